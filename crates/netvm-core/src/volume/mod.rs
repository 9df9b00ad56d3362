//! A range of bytes on lenders, with copies: which transfers an operation needs, in which order, and what becomes of them when a
//! lender is lost. docs/design/volume.md has the whole.
//!
//! Whoever drives it posts each lender's transfers in the order of its queue ([`Volume::next`], [`Volume::posted`]), over a connection
//! that keeps this order, and reports how each one ended ([`Volume::done`]).

mod presence;
mod repair;
#[cfg(test)]
mod tests;

pub use presence::Presence;

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::ops::Range;

use crate::limits::PAYLOAD_BYTES_MAX;
use repair::Repair;

/// What presence is kept of; offsets within a slab are multiples of it.
pub const BLOCK_BYTES: u64 = 4096;
/// Bytes that are copied at once to repair an extent.
pub const CHUNK_BYTES: u64 = 256 << 10;
/// Shorter runs of discarded bytes are not given back to a lender.
pub const GIVE_BACK_BYTES_MIN: u64 = 64 << 10;
/// Most bytes of a volume, whose presence then takes 2 GiB.
pub const VOLUME_BYTES_MAX: u64 = 1 << 46;
/// Most lenders of one volume.
pub const LENDERS_MAX: usize = 64;
/// Pieces that may wait before there must be more memory for them.
const HELD: usize = 256;

/// Number of a transfer, until it has ended.
pub type TransferId = u32;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bytes into the op's buffer.
    Read,
    /// Bytes of the op's buffer.
    Write,
    /// The range reads as zeros from now on.
    Discard,
}

/// What a transfer does. `at` is an offset into the op's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Reads into the buffer of the op.
    Read {
        /// Token of the op.
        token: u64,
        /// Where in its buffer.
        at: u64,
    },
    /// Writes `before` zeros, then bytes of the buffer of the op, then `after` zeros.
    Write {
        /// Token of the op.
        token: u64,
        /// Where in its buffer.
        at: u64,
        /// Zeros before.
        before: u32,
        /// Zeros behind.
        after: u32,
    },
    /// Tells the lender that it need not keep the bytes.
    Discard,
    /// Asks for all writes before it to be applied.
    Flush,
    /// Borrows a slab; [`Done::Slab`] when there is one.
    Borrow,
    /// Returns a slab.
    Return,
    /// Reads into the repair buffer.
    ChunkRead,
    /// Writes from the repair buffer.
    ChunkWrite,
}

/// Something for a lender to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Number of the lender.
    pub lender: u32,
    /// The lender's number of the slab.
    pub slab: u32,
    /// Where in the slab.
    pub offset: u64,
    /// How many bytes of it.
    pub bytes: u32,
    /// What to do.
    pub what: What,
}

/// How a transfer ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// As it was asked for.
    Ok,
    /// The borrowed slab.
    Slab(u32),
    /// The lender has no slab left.
    Full,
}

/// The connection to the lender has ended, or it refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

/// Why an op failed: the last lender that had some of its bytes is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Number of the lender.
    pub lender: u32,
}

/// Bytes of an op's buffer that are to be filled with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zeros {
    /// Token of the op.
    pub token: u64,
    /// Where in its buffer.
    pub at: u64,
    /// How many.
    pub bytes: u64,
}

/// The range is not within the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfBounds;

/// One of the slabs that hold an extent.
#[derive(Clone, Copy, Debug)]
struct Copy {
    lender: u32,
    slab: u32,
    /// Everything that is present has been written to it.
    full: bool,
}

#[derive(Debug, Default)]
struct Extent {
    copies: Vec<Copy>,
    /// Who had the last complete copy.
    lost: Option<u32>,
}

impl Extent {
    fn full(&self) -> impl Iterator<Item = &Copy> {
        self.copies.iter().filter(|copy| copy.full)
    }
}

/// Whether a lender's slabs can be given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stuck {
    #[default]
    No,
    /// To be told.
    Found,
    Told,
}

/// All slabs of a lender: it is leaving.
pub const ALL: u32 = u32::MAX;

#[derive(Debug, Default)]
struct Lender {
    lost: bool,
    /// It had no slab left when it was last asked.
    full: bool,
    copies: u64,
    /// So many slabs it asks back; [`ALL`] when it is leaving.
    recalled: u32,
    /// Nobody else can have them.
    stuck: Stuck,
    queue: VecDeque<TransferId>,
    /// Transfers that have not ended.
    pending: u32,
}

#[derive(Debug)]
struct Op {
    token: u64,
    /// Transfers and held pieces that have not ended.
    left: u32,
    lost: Option<Lost>,
    is_flush: bool,
}

#[derive(Clone, Copy, Debug)]
struct Moving {
    transfer: Transfer,
    op: Option<u32>,
    extent: u32,
}

/// A part of an op that lies in one extent.
#[derive(Clone, Copy, Debug)]
struct Piece {
    op: u32,
    kind: Kind,
    extent: u32,
    offset: u64,
    bytes: u64,
    at: u64,
}

impl Piece {
    /// The bytes of the blocks that it touches: writes change the rest of their first and last blocks, too.
    fn blocks(&self) -> Range<u64> {
        let end = (self.offset + self.bytes).div_ceil(BLOCK_BYTES) * BLOCK_BYTES;
        self.offset / BLOCK_BYTES * BLOCK_BYTES..end
    }
}

/// The state of a volume. Nothing in it waits.
#[derive(Debug)]
pub struct Volume {
    size_bytes: u64,
    extent_bytes: u64,
    replicas: usize,
    extents: Vec<Extent>,
    presence: Presence,
    lenders: Vec<Lender>,
    ops: Places<Op>,
    moving: Places<Moving>,
    zeros: VecDeque<Zeros>,
    ended: VecDeque<(u64, Result<(), Lost>)>,
    /// Who had the last complete copy of the first extent that was lost.
    lost: Option<Lost>,
    repair: Repair,
    /// Extents whose copy has moved to another lender.
    moved: u64,
    /// Ranges that lenders have been told to discard and have not answered for, and how many have not. A lender may do so after it
    /// has applied later writes.
    giving_back: Vec<(Range<u64>, usize)>,
    /// Pieces that wait for a chunk or for a discard.
    held: VecDeque<Piece>,
}

impl Volume {
    /// A volume whose extents have no copies yet: [`Volume::place`] gives them.
    ///
    /// # Panics
    /// When `extent_bytes` is not a multiple of [`BLOCK_BYTES`] or 0, or there is no lender or replica, or there are more than
    /// [`LENDERS_MAX`] lenders or [`VOLUME_BYTES_MAX`] bytes.
    pub fn new(size_bytes: u64, extent_bytes: u64, replicas: usize, lenders: usize) -> Self {
        assert!(extent_bytes > 0 && extent_bytes.is_multiple_of(BLOCK_BYTES));
        assert!(replicas > 0 && (1..=LENDERS_MAX).contains(&lenders) && size_bytes <= VOLUME_BYTES_MAX);
        let count = size_bytes.div_ceil(extent_bytes) as usize;
        Self {
            size_bytes,
            extent_bytes,
            replicas,
            extents: (0..count).map(|_| Extent::default()).collect(),
            presence: Presence::new(size_bytes),
            lenders: (0..lenders).map(|_| Lender::default()).collect(),
            ops: Places::default(),
            moving: Places::default(),
            zeros: VecDeque::new(),
            ended: VecDeque::new(),
            lost: None,
            repair: Repair::default(),
            moved: 0,
            giving_back: Vec::new(),
            held: VecDeque::with_capacity(HELD),
        }
    }

    /// Bytes of the volume.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Bytes of an extent.
    pub fn extent_bytes(&self) -> u64 {
        self.extent_bytes
    }

    /// How many extents there are.
    pub fn extents(&self) -> usize {
        self.extents.len()
    }

    /// Which blocks hold data.
    pub fn presence(&self) -> &Presence {
        &self.presence
    }

    /// Extents with fewer copies than there should be, and extents without any.
    pub fn degraded(&self) -> (u64, u64) {
        let lost = self.extents.iter().filter(|extent| extent.lost.is_some()).count();
        let poor = self.extents.iter().filter(|extent| extent.full().count() < self.replicas).count();
        ((poor - lost) as u64, lost as u64)
    }

    /// The bytes of extents of which nothing is left.
    pub fn lost(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let lost = self.extents.iter().enumerate().filter(|(_, extent)| extent.lost.is_some());
        lost.map(|(index, _)| {
            let start = index as u64 * self.extent_bytes;
            start..self.size_bytes.min(start + self.extent_bytes)
        })
    }

    /// Whether an op is under way.
    pub fn is_idle(&self) -> bool {
        self.ops.used == 0
    }

    /// The lender that should get the next copy of an extent: none with a copy of it, rather one that asks nothing back, the one with the
    /// fewest copies.
    pub fn candidate(&self, extent: usize) -> Option<u32> {
        let copies = &self.extents[extent].copies;
        let free = |number: &usize| {
            let lender = &self.lenders[*number];
            !lender.lost && !lender.full && copies.iter().all(|copy| copy.lender as usize != *number)
        };
        let number = (0..self.lenders.len()).filter(free).min_by_key(|&number| {
            let lender = &self.lenders[number];
            (lender.recalled > 0, lender.copies)
        })?;
        Some(number as u32)
    }

    /// Gives an extent a copy: a slab of zeros, before anything is written.
    pub fn place(&mut self, extent: usize, lender: u32, slab: u32) {
        self.extents[extent].copies.push(Copy { lender, slab, full: true });
        self.lenders[lender as usize].copies += 1;
    }

    /// A lender has no slab left.
    pub fn set_full(&mut self, lender: u32) {
        self.lenders[lender as usize].full = true;
    }

    /// A lost lender whose transfers have all ended is there again, with nothing of what it had.
    pub fn lender_back(&mut self, lender: u32) {
        let place = &mut self.lenders[lender as usize];
        if place.lost && place.pending == 0 {
            *place = Lender::default();
            self.look_again();
        }
    }

    /// Extents that could not be repaired may be now: lenders that were full may have room.
    pub fn look_again(&mut self) {
        for lender in &mut self.lenders {
            lender.full = false;
        }
        self.repair.look_again();
        self.mend();
    }

    /// A lender asks so many slabs back, [`ALL`] when it is leaving; 0: it does not any more. They are moved as far as others can have
    /// them.
    pub fn recall(&mut self, lender: u32, slabs: u32) {
        let place = &mut self.lenders[lender as usize];
        if !place.lost {
            (place.recalled, place.stuck) = (slabs, Stuck::No);
            self.repair.look_again();
            self.mend();
        }
    }

    /// Whether a lender waits for slabs.
    pub fn is_recalled(&self) -> bool {
        self.lenders.iter().any(|place| place.recalled > 0 && (place.copies > 0 || place.recalled == ALL))
    }

    /// A lender that waits for slabs that nobody else can have; told once for each time it has asked.
    pub fn take_stuck(&mut self) -> Option<u32> {
        let lender = self.lenders.iter().position(|place| place.stuck == Stuck::Found)?;
        self.lenders[lender].stuck = Stuck::Told;
        Some(lender as u32)
    }

    /// A lender that is leaving, has nothing any more, and is not needed.
    pub fn left(&self) -> Option<u32> {
        let others = self.lenders.iter().filter(|place| !place.lost && place.recalled != ALL).count();
        let left =
            |place: &Lender| !place.lost && place.recalled == ALL && place.copies == 0 && place.pending == 0;
        let lender = self.lenders.iter().position(left).filter(|_| others >= self.replicas)?;
        Some(lender as u32)
    }

    /// Extents whose copy has moved because its lender asked for it.
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Whether nothing is lost if the transfer is refused.
    pub fn is_hint(&self, id: TransferId) -> bool {
        let what = self.moving.get(id).map(|moving| moving.transfer.what);
        matches!(what, Some(What::Discard | What::Return))
    }

    /// Begins an operation on `bytes` bytes from `offset` on, under a number that is unique among those under way. It may have ended
    /// when this returns.
    ///
    /// # Errors
    /// [`OutOfBounds`], and nothing is begun.
    pub fn submit(&mut self, token: u64, kind: Kind, offset: u64, bytes: u64) -> Result<(), OutOfBounds> {
        let end = offset.checked_add(bytes).filter(|&end| end <= self.size_bytes).ok_or(OutOfBounds)?;
        // One more than there are, until all have begun.
        let op = self.ops.add(Op { token, left: 1, lost: None, is_flush: false });
        let mut from = offset;
        while from < end {
            let extent = from / self.extent_bytes;
            let to = end.min((extent + 1) * self.extent_bytes);
            let piece =
                Piece { op, kind, extent: extent as u32, offset: from, bytes: to - from, at: from - offset };
            self.begin(piece);
            from = to;
        }
        self.lessen(op);
        Ok(())
    }

    /// Where a read of these bytes would find all of them at once: lender, slab, and offset there, for each copy. None when they are absent in
    /// part, lie in two extents, or wait for something.
    pub fn sources(&self, offset: u64, bytes: u64) -> impl Iterator<Item = (u32, u32, u64)> + '_ {
        let inside = bytes > 0 && offset.checked_add(bytes).is_some_and(|end| end <= self.size_bytes);
        let (extent, within) = (offset / self.extent_bytes, offset % self.extent_bytes);
        let piece = Piece { op: 0, kind: Kind::Read, extent: extent as u32, offset, bytes, at: 0 };
        let is_whole =
            inside && bytes <= self.extent_bytes - within && !self.must_wait(&piece, self.held.len()) && {
                let end = (offset + bytes).div_ceil(BLOCK_BYTES);
                self.presence.run(offset / BLOCK_BYTES, end) == (end, true)
            };
        let extent = is_whole.then(|| &self.extents[extent as usize]);
        let copies = extent.into_iter().flat_map(Extent::full);
        // What is queued there was begun before.
        let copies = copies.filter(|copy| self.lenders[copy.lender as usize].queue.is_empty());
        copies.map(move |copy| (copy.lender, copy.slab, within))
    }

    /// Begins an operation that ends when all writes that ended before it have been applied. It fails when something that was
    /// written is lost.
    pub fn flush(&mut self, token: u64) {
        let op = self.ops.add(Op { token, left: 1, lost: None, is_flush: true });
        for lender in 0..self.lenders.len() as u32 {
            if !self.lenders[lender as usize].lost && self.lenders[lender as usize].copies > 0 {
                let transfer = Transfer { lender, slab: 0, offset: 0, bytes: 0, what: What::Flush };
                self.queue(Moving { transfer, op: Some(op), extent: 0 });
            }
        }
        self.lessen(op);
    }

    /// The transfer that is to be posted next to a lender.
    pub fn next(&self, lender: u32) -> Option<(TransferId, Transfer)> {
        let id = *self.lenders[lender as usize].queue.front()?;
        self.moving.get(id).map(|moving| (id, moving.transfer))
    }

    /// The transfer that [`Volume::next`] told has been posted.
    pub fn posted(&mut self, lender: u32) {
        self.lenders[lender as usize].queue.pop_front();
    }

    /// What to fill with zeros next; before asking for what has ended.
    pub fn zeros(&mut self) -> Option<Zeros> {
        self.zeros.pop_front()
    }

    /// What has ended: the op's number and how.
    pub fn ended(&mut self) -> Option<(u64, Result<(), Lost>)> {
        self.ended.pop_front()
    }

    /// A transfer that was posted has ended. One that has failed is the end of its lender: call [`Volume::lender_lost`] first.
    pub fn done(&mut self, id: TransferId, result: Result<Done, Gone>) {
        let Some(moving) = self.moving.take(id) else { return };
        let Moving { transfer, op, extent } = moving;
        self.lenders[transfer.lender as usize].pending -= 1;
        match transfer.what {
            What::Read { .. } if result.is_err() => self.read_elsewhere(moving),
            What::Flush if op.is_none() => self.chunk_moved(transfer, result),
            What::Read { .. } | What::Write { .. } | What::Flush => {
                let Some(op) = op else { return };
                if result.is_err() && !matches!(transfer.what, What::Flush) {
                    self.check_lost(op, extent);
                }
                self.lessen(op);
            }
            What::Discard => self.given_back(u64::from(extent) * self.extent_bytes + transfer.offset),
            What::Return => {}
            What::Borrow => self.borrowed(transfer.lender, result),
            What::ChunkRead | What::ChunkWrite => self.chunk_moved(transfer, result),
        }
    }

    /// Whether everything that one of `lenders` has is complete at a lender that is not among them.
    pub fn can_spare(&self, lenders: &[bool]) -> bool {
        let is_among = |copy: &Copy| lenders.get(copy.lender as usize).is_some_and(|&among| among);
        self.extents
            .iter()
            .all(|extent| !extent.copies.iter().any(is_among) || extent.full().any(|copy| !is_among(copy)))
    }

    /// A lender is gone for good, and what it had. Transfers that were posted to it are still to be reported; those in its queue are
    /// dealt with here.
    pub fn lender_lost(&mut self, lender: u32) {
        let place = &mut self.lenders[lender as usize];
        if place.lost {
            return;
        }
        (place.lost, place.copies) = (true, 0);
        // Whoever is gone waits for nothing.
        (place.recalled, place.stuck) = (0, Stuck::No);
        let queued = core::mem::take(&mut place.queue);
        self.trust_target(lender);
        for extent in &mut self.extents {
            let had = extent.copies.len();
            extent.copies.retain(|copy| copy.lender != lender);
            if extent.copies.len() < had && extent.full().next().is_none() && extent.lost.is_none() {
                extent.lost = Some(lender);
                self.lost.get_or_insert(Lost { lender });
            }
        }
        self.repair.look_again();
        self.check_repair();
        for id in queued {
            self.done(id, Err(Gone));
        }
        self.mend();
    }

    fn begin(&mut self, piece: Piece) {
        if let Some(op) = self.ops.get_mut(piece.op) {
            op.left += 1;
        }
        if self.must_wait(&piece, self.held.len()) {
            return self.held.push_back(piece);
        }
        self.start(piece);
        self.lessen(piece.op);
    }

    /// Whether it waits for the repair, for a range that is given back, or for one of the last `held` pieces that wait, which it must not overtake:
    /// a discard that was submitted before a write would undo it.
    fn must_wait(&self, piece: &Piece, held: usize) -> bool {
        let blocks = piece.blocks();
        let touches = |range: &Range<u64>| blocks.start < range.end && range.start < blocks.end;
        let comes_after = |earlier: &Piece| {
            let only_read = piece.kind == Kind::Read && earlier.kind == Kind::Read;
            !only_read && earlier.extent == piece.extent && touches(&earlier.blocks())
        };
        self.is_repaired(piece)
            || (piece.kind == Kind::Write && self.giving_back.iter().any(|(range, _)| touches(range)))
            || self.held.range(self.held.len().saturating_sub(held)..).any(comes_after)
    }

    /// What was waited for has happened.
    fn release(&mut self) {
        // In place: swap has no memory for another queue.
        let mut still = 0;
        for _ in 0..self.held.len() {
            let Some(piece) = self.held.pop_front() else { return };
            if self.must_wait(&piece, still) {
                self.held.push_back(piece);
                still += 1;
            } else {
                self.start(piece);
                self.lessen(piece.op);
            }
        }
    }

    fn start(&mut self, piece: Piece) {
        match piece.kind {
            Kind::Read => self.start_read(piece),
            Kind::Write => self.start_write(piece),
            Kind::Discard => self.start_discard(piece),
        }
    }

    fn start_read(&mut self, piece: Piece) {
        let Piece { op, extent, offset, bytes, at, .. } = piece;
        let token = self.token(op);
        let (mut from, end) = (offset, offset + bytes);
        while from < end {
            let (block, present) = self.presence.run(from / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
            let mut to = end.min(block * BLOCK_BYTES);
            let at = at + (from - offset);
            if present {
                to = to.min(from + u64::from(PAYLOAD_BYTES_MAX));
                self.read(op, extent, from, (to - from) as u32, What::Read { token, at });
            } else {
                self.zeros.push_back(Zeros { token, at, bytes: to - from });
            }
            from = to;
        }
    }

    fn read(&mut self, op: u32, extent: u32, offset: u64, bytes: u32, what: What) {
        let copies = self.extents[extent as usize].full();
        let Some(Copy { lender, slab, .. }) =
            copies.min_by_key(|copy| self.lenders[copy.lender as usize].pending).copied()
        else {
            return self.check_lost(op, extent);
        };
        let offset = offset - u64::from(extent) * self.extent_bytes;
        self.queue(Moving { transfer: Transfer { lender, slab, offset, bytes, what }, op: Some(op), extent });
    }

    fn read_elsewhere(&mut self, moving: Moving) {
        let (Some(op), extent) = (moving.op, moving.extent) else { return };
        let Transfer { offset, bytes, what, .. } = moving.transfer;
        self.read(op, extent, offset + u64::from(extent) * self.extent_bytes, bytes, what);
        self.lessen(op);
    }

    fn start_write(&mut self, piece: Piece) {
        let Piece { op, extent, offset, bytes, at, .. } = piece;
        let token = self.token(op);
        let (mut from, end) = (offset, offset + bytes);
        while from < end {
            // Behind the first one transfers begin with whole blocks; the widest still has to fit.
            let most = (from / BLOCK_BYTES) * BLOCK_BYTES + u64::from(PAYLOAD_BYTES_MAX);
            let to = end.min(most);
            let (head, tail) = (from % BLOCK_BYTES, (BLOCK_BYTES - to % BLOCK_BYTES) % BLOCK_BYTES);
            let before = if self.presence.has(from / BLOCK_BYTES) { 0 } else { head };
            let after = if self.presence.has((to - 1) / BLOCK_BYTES) { 0 } else { tail };
            let what =
                What::Write { token, at: at + (from - offset), before: before as u32, after: after as u32 };
            self.presence.set(from / BLOCK_BYTES..to.div_ceil(BLOCK_BYTES), true);
            self.write(op, extent, from - before, (to - from + before + after) as u32, what);
            from = to;
        }
    }

    /// Zeros to part of a block.
    fn write_zeros(&mut self, op: u32, extent: u32, from: u64, to: u64) {
        if from < to && self.presence.has(from / BLOCK_BYTES) {
            let what = What::Write { token: self.token(op), at: 0, before: (to - from) as u32, after: 0 };
            self.write(op, extent, from, (to - from) as u32, what);
        }
    }

    fn write(&mut self, op: u32, extent: u32, offset: u64, bytes: u32, what: What) {
        let offset = offset - u64::from(extent) * self.extent_bytes;
        for index in 0..self.extents[extent as usize].copies.len() {
            let Copy { lender, slab, .. } = self.extents[extent as usize].copies[index];
            let transfer = Transfer { lender, slab, offset, bytes, what };
            self.queue(Moving { transfer, op: Some(op), extent });
        }
        self.check_lost(op, extent);
    }

    fn start_discard(&mut self, piece: Piece) {
        let Piece { op, extent, offset, bytes, .. } = piece;
        let end = offset + bytes;
        let first = offset.div_ceil(BLOCK_BYTES);
        // What lies behind the end of the volume belongs to its last block.
        let last = if end == self.size_bytes { end.div_ceil(BLOCK_BYTES) } else { end / BLOCK_BYTES };
        if first > last {
            return self.write_zeros(op, extent, offset, end);
        }
        self.write_zeros(op, extent, offset, first * BLOCK_BYTES);
        self.write_zeros(op, extent, last * BLOCK_BYTES, end);
        let mut block = first;
        while block < last {
            let (to, present) = self.presence.run(block, last);
            let bytes = (to - block) * BLOCK_BYTES;
            if present && bytes >= GIVE_BACK_BYTES_MIN {
                self.give_back(extent, block * BLOCK_BYTES, bytes);
            }
            block = to;
        }
        self.presence.set(first..last, false);
    }

    fn give_back(&mut self, extent: u32, offset: u64, bytes: u64) {
        let copies = self.extents[extent as usize].copies.len();
        if copies > 0 {
            self.giving_back.push((offset..offset + bytes, copies));
        }
        let offset = offset - u64::from(extent) * self.extent_bytes;
        for index in 0..self.extents[extent as usize].copies.len() {
            let Copy { lender, slab, .. } = self.extents[extent as usize].copies[index];
            let transfer = Transfer { lender, slab, offset, bytes: bytes as u32, what: What::Discard };
            self.queue(Moving { transfer, op: None, extent });
        }
    }

    fn given_back(&mut self, start: u64) {
        // Ranges that are being given back do not overlap: what is absent is not given back again.
        let Some(index) = self.giving_back.iter().position(|(range, _)| range.start == start) else { return };
        self.giving_back[index].1 -= 1;
        if self.giving_back[index].1 == 0 {
            self.giving_back.swap_remove(index);
            self.release();
        }
    }

    fn queue(&mut self, moving: Moving) {
        if let Some(op) = moving.op.and_then(|op| self.ops.get_mut(op)) {
            op.left += 1;
        }
        let id = self.moving.add(moving);
        let lender = &mut self.lenders[moving.transfer.lender as usize];
        lender.queue.push_back(id);
        lender.pending += 1;
    }

    fn token(&self, op: u32) -> u64 {
        self.ops.get(op).map_or(u64::MAX, |op| op.token)
    }

    /// The op fails if nobody has its bytes any more.
    fn check_lost(&mut self, op: u32, extent: u32) {
        if let (Some(lender), Some(op)) = (self.extents[extent as usize].lost, self.ops.get_mut(op)) {
            op.lost.get_or_insert(Lost { lender });
        }
    }

    fn lessen(&mut self, number: u32) {
        let Some(op) = self.ops.get_mut(number) else { return };
        op.left -= 1;
        if op.left > 0 {
            return;
        }
        let Some(op) = self.ops.take(number) else { return };
        let lost = if op.is_flush { self.lost } else { op.lost };
        self.ended.push_back((op.token, lost.map_or(Ok(()), Err)));
    }
}

/// Values under small numbers.
#[derive(Debug)]
struct Places<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
    used: u32,
}

impl<T> Default for Places<T> {
    fn default() -> Self {
        Self { places: Vec::new(), free: Vec::new(), used: 0 }
    }
}

impl<T> Places<T> {
    fn add(&mut self, value: T) -> u32 {
        self.used += 1;
        match self.free.pop() {
            Some(number) => {
                self.places[number as usize] = Some(value);
                number
            }
            None => {
                self.places.push(Some(value));
                self.places.len() as u32 - 1
            }
        }
    }

    fn get(&self, number: u32) -> Option<&T> {
        self.places.get(number as usize)?.as_ref()
    }

    fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.places.get_mut(number as usize)?.as_mut()
    }

    fn take(&mut self, number: u32) -> Option<T> {
        let value = self.places.get_mut(number as usize)?.take()?;
        self.free.push(number);
        self.used -= 1;
        Some(value)
    }
}
