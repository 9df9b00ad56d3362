//! A range of bytes on lenders, with replicas: what the views for kernels read and write. docs/design/volume.md has the whole.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use netvm_core::endpoint::PostError;
use netvm_core::limits::SLABS_MAX;
use netvm_core::volume::{self as core, CHUNK_BYTES, Done, Gone, Kind, Transfer, What, Zeros};
use netvm_sys::epoll::{Epoll, Interest};
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;

use crate::error::{Error, LenderLimit, Result};
use crate::lender::{
    BorrowOptions, Borrower, Comeback, Completion, Debt, Ear, HEARD, Patience, Place, SILENCE,
};

pub use netvm_core::volume::{BLOCK_BYTES, LENDERS_MAX, Presence, VOLUME_BYTES_MAX};

#[cfg(test)]
mod tests;

/// How a volume is made.
#[derive(Clone, Debug)]
pub struct VolumeOptions {
    /// How many lenders have each byte: 1 to the number of lenders.
    pub replicas: usize,
    /// How to borrow.
    pub borrow: BorrowOptions,
    /// A lender that has sent nothing for so long while something was asked of it is lost.
    pub silence: Duration,
    /// The same where other lenders have all that it has, and do answer.
    pub silence_with_replicas: Duration,
}

impl Default for VolumeOptions {
    fn default() -> Self {
        Self {
            replicas: 1,
            borrow: BorrowOptions::default(),
            silence: Duration::from_secs(5),
            silence_with_replicas: SILENCE,
        }
    }
}

/// An operation has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The number it was begun under.
    pub token: u64,
    /// How it ended.
    pub result: Result<()>,
}

/// Something that whoever runs the volume should know.
#[derive(Clone, Debug)]
pub enum Event {
    /// A lender is lost.
    LenderLost {
        /// Its address.
        lender: String,
        /// What was seen.
        error: Error,
        /// Extents that have fewer copies than they should.
        degraded: u64,
        /// Extents of which nothing is left.
        lost: u64,
    },
    /// A lost lender can be used again.
    LenderBack {
        /// Its address.
        lender: String,
    },
    /// A lost lender is there again, but as one that cannot be used; told once. It is looked for on.
    LenderUnfit {
        /// Its address.
        lender: String,
        /// Why not.
        reason: String,
    },
    /// A lender has asked for its memory; what it holds moves to others, as far as they can take it.
    Recalled {
        /// Its address.
        lender: String,
        /// How many bytes; all when it is leaving.
        bytes: u64,
        /// It is going to end.
        leaving: bool,
    },
    /// Nobody else can take what a lender has asked for.
    Stuck {
        /// Its address.
        lender: String,
    },
    /// A lender that was leaving has nothing any more, and was left.
    LenderLeft {
        /// Its address.
        lender: String,
    },
    /// Every extent that is not lost has all its copies again.
    Mended {
        /// Since something was missing.
        after: Duration,
    },
}

impl std::fmt::Display for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::LenderLost { error, .. } => write!(f, "{error}"),
            Self::LenderBack { lender } => write!(f, "{lender} is back, empty, and used again"),
            Self::LenderUnfit { lender, reason } => {
                write!(f, "{lender} is back, and cannot be used: {reason}")
            }
            Self::Recalled { lender, leaving: true, .. } => {
                write!(f, "lender {lender} is going to end: what it holds moves to the others")
            }
            Self::Recalled { lender, bytes, .. } => {
                write!(f, "lender {lender} asks for {} MiB: they move to the others", bytes >> 20)
            }
            Self::Stuck { lender } => {
                write!(
                    f,
                    "nobody else can take what lender {lender} asks for: it stays there; name more lenders"
                )
            }
            Self::LenderLeft { lender } => write!(f, "lender {lender} holds nothing any more, and may end"),
            Self::Mended { after } => {
                write!(f, "all copies are complete again, after {:.1} s", after.as_secs_f64())
            }
        }
    }
}

/// How a lender of a volume is doing.
#[derive(Clone, Debug)]
pub struct LenderState {
    /// Its address.
    pub address: String,
    /// Why it is lost.
    pub lost: Option<Error>,
    /// Operations that it has not answered.
    pub pending: usize,
}

struct Side {
    address: String,
    borrower: Option<Borrower>,
    lost: Option<Error>,
    /// Waits for room.
    writable: bool,
    comeback: Option<Comeback>,
    /// It has come back as one that cannot be used, which has been told.
    unfit: bool,
    ear: Ear,
    probed: Instant,
}

impl Side {
    fn debt(&mut self, now: Instant) -> Debt {
        let live = self.borrower.as_mut().filter(|_| self.lost.is_none());
        live.map(|borrower| borrower.debt(now)).unwrap_or_default()
    }
}

struct Op {
    token: u64,
    local: Option<SharedSlice>,
}

/// A volume, and its connections to the lenders. One thread owns it, and drives it with [`Volume::poll`].
pub struct Volume {
    core: core::Volume,
    sides: Vec<Side>,
    epoll: Epoll,
    ops: Vec<Op>,
    free: Vec<usize>,
    zeros: Mapping,
    chunk: Mapping,
    options: VolumeOptions,
    patience: Patience,
    completions: Vec<Completion>,
    events: VecDeque<Event>,
    poor_since: Option<Instant>,
    /// When lenders that were full are asked again, while another asks for its memory.
    next_ask: Instant,
}

/// How often they are.
const ASK_INTERVAL: Duration = Duration::from_secs(1);

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume")
            .field("size_bytes", &self.size_bytes())
            .field("lenders", &self.lenders())
            .finish_non_exhaustive()
    }
}

/// What transfers that end at once lead to is looked at so often before others have their turn.
const ROUNDS_MAX: usize = 8;
/// Zeros that a write may need before or behind its bytes.
const ZEROS_BYTES: usize = 1 << 20;

impl Volume {
    /// Borrows `size_bytes` from the lenders, `replicas` times. Everything reads as zeros.
    ///
    /// # Errors
    /// What [`Borrower::connect`] says, for any of the lenders; [`Error::Other`] when the lenders have too little or are too few.
    pub fn open(lenders: &[String], size_bytes: u64, options: VolumeOptions) -> Result<Self> {
        let replicas = options.replicas;
        if !(1..=LENDERS_MAX).contains(&lenders.len()) || !(1..=lenders.len()).contains(&replicas) {
            return Err(Error::Other(format!(
                "{replicas} replicas on {} lenders are not possible: there must be 1 to {LENDERS_MAX} lenders, and as many \
                 replicas at most",
                lenders.len()
            )));
        }
        let epoll = Epoll::new().map_err(|error| Error::system("make an epoll set", &error))?;
        let twice = |index: &usize| lenders[..*index].contains(&lenders[*index]) && replicas > 1;
        if let Some(index) = (1..lenders.len()).find(twice) {
            let address = &lenders[index];
            return Err(Error::Other(format!(
                "lender {address} is named twice: replicas must be on different lenders"
            )));
        }
        let mut sides: Vec<Side> = Vec::new();
        let each = lenders.iter().map(|address| (&address[..], &options.borrow));
        for (address, borrower) in lenders.iter().zip(Borrower::connect_all(each)) {
            let borrower = borrower?;
            watch(&epoll, &borrower)?;
            let address = address.clone();
            sides.push(Side {
                address,
                borrower: Some(borrower),
                lost: None,
                writable: false,
                comeback: None,
                unfit: false,
                ear: Ear::default(),
                probed: Instant::now(),
            });
        }
        let borrowers = sides.iter().filter_map(|side| side.borrower.as_ref());
        if let Some([one, other]) = Borrower::two_at_one(borrowers.clone()).filter(|_| replicas > 1) {
            return Err(Error::Other(format!(
                "{} and {} are the same lender: replicas must be on different ones",
                one.lender(),
                other.lender()
            )));
        }
        let slabs = borrowers.map(Borrower::slab_bytes);
        let extent_bytes = slabs.min().unwrap_or(0) / BLOCK_BYTES * BLOCK_BYTES;
        if extent_bytes == 0 {
            return Err(Error::Other("a lender's slabs are smaller than a block of 4096 bytes".to_owned()));
        }
        // What a lender has, as far as it can have any: before anything is made for it.
        let extents = size_bytes.div_ceil(extent_bytes).saturating_mul(replicas as u64);
        if size_bytes > VOLUME_BYTES_MAX || extents > SLABS_MAX * sides.len() as u64 {
            return Err(Error::Other(format!(
                "{} MiB in {replicas} replicas are more than {} lenders with slabs of {} KiB can have, or than a volume may have",
                size_bytes >> 20,
                sides.len(),
                extent_bytes >> 10
            )));
        }
        let memory = |bytes| {
            Mapping::anonymous(bytes).map_err(|error| Error::system("reserve memory for buffers", &error))
        };
        let early = options.silence_with_replicas;
        let mut volume = Self {
            core: core::Volume::new(size_bytes, extent_bytes, replicas, sides.len()),
            sides,
            epoll,
            ops: Vec::new(),
            free: Vec::new(),
            zeros: memory(ZEROS_BYTES)?,
            chunk: memory(CHUNK_BYTES as usize)?,
            options,
            patience: Patience::new(Instant::now(), early),
            completions: Vec::new(),
            events: VecDeque::new(),
            poor_since: None,
            next_ask: Instant::now(),
        };
        let (mut reluctant, mut press) = (false, false);
        for extent in 0..volume.core.extents() {
            for _ in 0..replicas {
                while !volume.borrow_copy(extent, press, &mut reluctant)? {
                    if !reluctant || press {
                        return Err(volume.too_little(extent));
                    }
                    // Nobody else has more: those that would rather not lend it are pressed.
                    press = true;
                    volume.core.look_again();
                }
            }
        }
        Ok(volume)
    }

    /// Borrows a slab for an extent. False when nobody lends one; then some may be `reluctant` who can be pressed.
    fn borrow_copy(&mut self, extent: usize, press: bool, reluctant: &mut bool) -> Result<bool> {
        while let Some(lender) = self.core.candidate(extent) {
            let Some(borrower) = &mut self.sides[lender as usize].borrower else { break };
            let slab = if press { borrower.press_for_slab() } else { borrower.borrow_slab() };
            match slab {
                Ok(slab) => {
                    self.core.place(extent, lender, slab);
                    return Ok(true);
                }
                Err(Error::LenderFull { limit, .. }) => {
                    *reluctant |= limit == LenderLimit::Memory;
                    self.core.set_full(lender);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    fn too_little(&self, extent: usize) -> Error {
        let (size, replicas) = (self.core.size_bytes(), self.options.replicas);
        let had = extent as u64 * size / self.core.extents() as u64;
        Error::Other(format!(
            "the lenders have too little memory for {} MiB in {replicas} replicas on different lenders: it sufficed for {} MiB; \
             lend more, name more lenders, or ask for less",
            size >> 20,
            had >> 20
        ))
    }

    /// Bytes of the volume.
    pub fn size_bytes(&self) -> u64 {
        self.core.size_bytes()
    }

    /// The lenders that are connected, and how large their slabs are, in bytes: of each no more is used than the smallest has.
    pub fn slabs(&self) -> impl Iterator<Item = (&str, u64)> + '_ {
        let connected = self.sides.iter().filter_map(|side| Some((side, side.borrower.as_ref()?)));
        connected.map(|(side, borrower)| (&*side.address, borrower.slab_bytes()))
    }

    /// Which blocks hold data; the others read as zeros.
    pub fn presence(&self) -> &Presence {
        self.core.presence()
    }

    /// Extents with fewer copies than there should be, and extents of which nothing is left.
    pub fn degraded(&self) -> (u64, u64) {
        self.core.degraded()
    }

    /// The bytes of extents of which nothing is left.
    pub fn lost(&self) -> impl Iterator<Item = std::ops::Range<u64>> + '_ {
        self.core.lost()
    }

    /// How the lenders are doing.
    pub fn lenders(&self) -> Vec<LenderState> {
        let state = |side: &Side| LenderState {
            address: side.address.clone(),
            lost: side.lost.clone(),
            pending: side.borrower.as_ref().map_or(0, Borrower::pending),
        };
        self.sides.iter().map(state).collect()
    }

    /// Readable when a lender has sent something, or takes more. What was begun since the last [`Volume::poll`] may have ended
    /// without that: poll before waiting.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// How long to wait at most before calling [`Volume::poll`] even if nothing is readable.
    pub fn patience(&self) -> Duration {
        let waits = self.sides.iter().any(|side| {
            let owes = |borrower: &Borrower| borrower.pending() > 0 || borrower.is_only_probed();
            side.comeback.is_some() || side.borrower.as_ref().is_some_and(owes)
        });
        if self.has_ended() {
            return Duration::ZERO;
        }
        if waits { HEARD / 2 } else { Duration::from_secs(1) }
    }

    /// Begins to read the bytes at `offset` into `local`, which is the volume's until this has ended.
    ///
    /// # Errors
    /// [`Error::Other`] when they lie outside of the volume.
    pub fn read(&mut self, token: u64, offset: u64, local: SharedSlice) -> Result<()> {
        self.begin(token, Kind::Read, offset, local.len() as u64, Some(local))
    }

    /// Where in the file of a lender on this host these bytes are, if all of them can be read there now. After the next call of this volume they
    /// may be elsewhere.
    pub(crate) fn file_of(&mut self, offset: u64, bytes: u64) -> Option<Place<'_>> {
        let mut sources = self.core.sources(offset, bytes);
        let near =
            |lender: u32| self.sides[lender as usize].borrower.as_ref().is_some_and(Borrower::is_nearby);
        let (lender, slab, at) = sources.find(|&(lender, ..)| near(lender))?;
        self.sides[lender as usize].borrower.as_mut()?.file_of(slab, at, bytes)
    }

    /// Begins to write the bytes of `local`, which must not change until this has ended, to `offset`.
    ///
    /// # Errors
    /// [`Error::Other`] when they lie outside of the volume.
    pub fn write(&mut self, token: u64, offset: u64, local: SharedSlice) -> Result<()> {
        self.begin(token, Kind::Write, offset, local.len() as u64, Some(local))
    }

    /// Makes `bytes` bytes from `offset` on read as zeros, and gives the memory back that they used.
    ///
    /// # Errors
    /// [`Error::Other`] when they lie outside of the volume.
    pub fn discard(&mut self, token: u64, offset: u64, bytes: u64) -> Result<()> {
        self.begin(token, Kind::Discard, offset, bytes, None)
    }

    /// Ends when all writes that have ended before are applied; fails when something that was written is lost.
    pub fn flush(&mut self, token: u64) {
        let op = self.add(Op { token, local: None });
        self.core.flush(op);
        self.post();
    }

    fn begin(
        &mut self,
        token: u64,
        kind: Kind,
        offset: u64,
        bytes: u64,
        local: Option<SharedSlice>,
    ) -> Result<()> {
        let op = self.add(Op { token, local });
        if self.core.submit(op, kind, offset, bytes).is_err() {
            self.free.push(op as usize);
            return Err(Error::Other(format!(
                "{bytes} bytes from {offset} on lie outside of the volume of {} bytes",
                self.size_bytes()
            )));
        }
        self.post();
        Ok(())
    }

    fn add(&mut self, op: Op) -> u64 {
        match self.free.pop() {
            Some(index) => {
                self.ops[index] = op;
                index as u64
            }
            None => {
                self.ops.push(op);
                self.ops.len() as u64 - 1
            }
        }
    }

    /// Posts what the lenders' connections take. Sends nothing yet: [`Volume::push`] does.
    fn post(&mut self) {
        for lender in 0..self.sides.len() {
            while let Some((id, transfer)) = self.core.next(lender as u32) {
                match self.post_one(lender, id, &transfer) {
                    Ok(()) => self.core.posted(lender as u32),
                    Err(PostError::Full) => break,
                    Err(error) => {
                        // It has failed already, or will not take what the volume wants: both end it.
                        if let Some(borrower) = &mut self.sides[lender].borrower {
                            borrower.abandon(&format!("a transfer could not be posted: {error}"));
                        }
                        break;
                    }
                }
            }
        }
    }

    fn post_one(&mut self, lender: usize, id: u32, transfer: &Transfer) -> Result<(), PostError> {
        let Some(borrower) = &mut self.sides[lender].borrower else { return Err(PostError::Full) };
        let Transfer { slab, offset, bytes, what, .. } = *transfer;
        let (id, length) = (u64::from(id), bytes as usize);
        let part = |token: u64, at: u64, bytes: usize| {
            self.ops[token as usize].local.and_then(|local| local.sub(at as usize, bytes))
        };
        match what {
            What::Read { token, at } => {
                let local = part(token, at, length).ok_or(PostError::TooLong)?;
                borrower.post_read(id, slab, offset, local)
            }
            What::Write { token, at, before, after } => {
                let (before, after) = (before as usize, after as usize);
                let zeros = self.zeros.shared();
                let pieces = [
                    zeros.sub(0, before),
                    if before + after == length {
                        zeros.sub(0, 0)
                    } else {
                        part(token, at, length - before - after)
                    },
                    zeros.sub(0, after),
                ];
                let mut locals = [zeros; 3];
                let mut count = 0;
                for piece in pieces {
                    let piece = piece.ok_or(PostError::TooLong)?;
                    if !piece.is_empty() {
                        (locals[count], count) = (piece, count + 1);
                    }
                }
                borrower.post_write_pages(id, slab, offset, &locals[..count])
            }
            What::ChunkRead | What::ChunkWrite => {
                let chunk = self.chunk.shared().sub(0, length).ok_or(PostError::TooLong)?;
                match what {
                    What::ChunkRead => borrower.post_read(id, slab, offset, chunk),
                    _ => borrower.post_write(id, slab, offset, chunk),
                }
            }
            What::Discard => borrower.post_discard(id, slab, offset, bytes.into()),
            What::Flush => borrower.post_flush(id),
            What::Borrow => borrower.post_borrow(id),
            What::Return => borrower.post_return(id, slab),
        }
    }

    /// Sends what was begun, as far as the connections take it.
    pub fn push(&mut self) {
        for side in &mut self.sides {
            if let Some(borrower) = &mut side.borrower {
                // What fails is found by the next poll.
                let _ = borrower.push();
                let writable = borrower.wants_write();
                if writable != side.writable {
                    side.writable = writable;
                    // Nobody looks at the numbers in this set.
                    let _ = self.epoll.change(borrower.as_fd(), 0, Interest { readable: true, writable });
                }
            }
        }
    }

    /// Sends and receives what can be; never blocks. What has ended is appended to `out`.
    pub fn poll(&mut self, out: &mut Vec<Ended>) {
        self.advance(true, out);
    }

    /// As [`Volume::poll`], for who has waited and knows whether something has come: if not, nothing is received, which saves a look in vain for
    /// each lender. Where that is said again and again, lenders are listened to now and then: silence is what was listened to.
    pub fn advance(&mut self, heard: bool, out: &mut Vec<Ended>) {
        let heard = heard || self.patience.is_due(Instant::now());
        for _ in 0..ROUNDS_MAX {
            for lender in 0..self.sides.len() {
                self.poll_lender(lender, heard);
                self.look_for_comeback(lender);
            }
            if heard {
                self.check_silence();
            }
            self.post();
            if !self.has_ended() {
                break;
            }
        }
        self.answer_recalls();
        self.ask_again();
        self.push();
        self.collect(out);
        self.note_repair();
    }

    /// Whether a transfer has ended with nothing to arrive: a lender on this host needs no answer.
    fn has_ended(&self) -> bool {
        self.sides.iter().any(|side| side.borrower.as_ref().is_some_and(Borrower::has_ended))
    }

    fn hear(&mut self, lender: usize) {
        let side = &mut self.sides[lender];
        let Some(borrower) = &mut side.borrower else { return };
        let Some(recall) = borrower.take_recall().filter(|_| side.lost.is_none()) else { return };
        let (bytes, leaving) = (recall.bytes, recall.leaving);
        self.events.push_back(Event::Recalled { lender: side.address.clone(), bytes, leaving });
        let slabs = recall.slabs(borrower.slab_bytes());
        self.core.recall(lender as u32, slabs);
    }

    /// Asks full lenders again, while something lacks a copy or is to be moved: others may have given back what they had, and one that
    /// has come back has its old lease until it notices that its old connection has ended.
    fn ask_again(&mut self) {
        let is_short = self.poor_since.is_some() && !self.core.is_mending();
        let now = Instant::now();
        if (is_short || self.core.is_recalled()) && now >= self.next_ask {
            self.next_ask = now + ASK_INTERVAL;
            self.core.look_again();
            self.post();
        }
    }

    /// Tells lenders what nobody else can have, and leaves those that are leaving and have nothing any more.
    fn answer_recalls(&mut self) {
        if !self.core.is_recalled() {
            return;
        }
        while let Some(lender) = self.core.take_stuck() {
            let side = &mut self.sides[lender as usize];
            if let Some(borrower) = &mut side.borrower {
                borrower.post_cannot();
            }
            self.events.push_back(Event::Stuck { lender: side.address.clone() });
        }
        let Some(lender) = self.core.left() else { return };
        let side = &mut self.sides[lender as usize];
        let Some(borrower) = side.borrower.take_if(|borrower| borrower.pending() == 0) else { return };
        let _ = self.epoll.remove(borrower.as_fd());
        let reason = "it has been stopped, and what it held was moved".to_owned();
        side.lost = Some(Error::LenderLost { lender: side.address.clone(), reason });
        (side.writable, side.ear) = (false, Ear::default());
        side.comeback = Comeback::start(&side.address, &self.options.borrow, None, true);
        self.events.push_back(Event::LenderLeft { lender: side.address.clone() });
        self.core.lender_lost(lender);
    }

    fn poll_lender(&mut self, lender: usize, heard: bool) {
        let Some(borrower) = &mut self.sides[lender].borrower else { return };
        let mut completions = std::mem::take(&mut self.completions);
        let polled =
            if heard { borrower.poll(&mut completions) } else { borrower.poll_sent(&mut completions) };
        if let Err(error) = polled {
            let _ = self.epoll.remove(borrower.as_fd());
            self.lose(lender, error);
        }
        for Completion { token, result, slab, .. } in completions.drain(..) {
            let id = token as u32;
            let done = match (slab, result) {
                (Some(slab), Ok(())) => Ok(Done::Slab(slab)),
                (None, Ok(())) => Ok(Done::Ok),
                // It is only a hint, and a lender may not know it.
                (_, Err(Error::Op { .. })) if self.core.is_hint(id) => Ok(Done::Ok),
                (_, Err(error @ Error::Op { .. })) => {
                    if let Some(borrower) = &mut self.sides[lender].borrower {
                        borrower.abandon(&error.to_string());
                    }
                    self.lose(lender, error);
                    Err(Gone)
                }
                (_, Err(_)) => Err(Gone),
            };
            self.core.done(id, done);
        }
        self.completions = completions;
        self.hear(lender);
    }

    /// Asks lenders for signs of life where nothing else is asked of them, and others have what they have.
    fn probe(&mut self, now: Instant) {
        if self.options.replicas == 1 {
            return;
        }
        for side in &mut self.sides {
            if let Some(borrower) = side.borrower.as_mut().filter(|_| side.lost.is_none())
                && now.saturating_duration_since(side.probed) >= HEARD
            {
                side.probed = now;
                borrower.probe();
            }
        }
    }

    /// Gives up lenders that do not answer. Time in which this process did not look, because it was stopped or starved, does not
    /// count against them.
    fn check_silence(&mut self) {
        let now = Instant::now();
        self.probe(now);
        self.patience.look(now);
        for side in &mut self.sides {
            let debt = side.debt(now);
            self.patience.hear(&mut side.ear, debt);
        }
        let mut missed = [false; LENDERS_MAX];
        for (side, missed) in self.sides.iter_mut().zip(&mut missed) {
            let debt = side.debt(now);
            self.patience.wait(&mut side.ear, debt);
            *missed = self.patience.is_missed(&side.ear);
        }
        let can_spare = missed.contains(&true) && self.core.can_spare(&missed);
        for (side, missed) in self.sides.iter_mut().zip(missed) {
            let silent = side.ear.silent();
            if let Some(borrower) = &mut side.borrower
                && (silent > self.options.silence || (missed && can_spare))
            {
                borrower.abandon(&format!("it has not answered for {} ms", silent.as_millis()));
            }
        }
    }

    fn lose(&mut self, lender: usize, error: Error) {
        let side = &mut self.sides[lender];
        if side.lost.is_some() {
            return;
        }
        side.lost = Some(error.clone());
        (side.writable, side.ear) = (false, Ear::default());
        self.core.lender_lost(lender as u32);
        let (degraded, lost) = self.core.degraded();
        let address = side.address.clone();
        if self.options.replicas > 1 {
            side.comeback = Comeback::start(&address, &self.options.borrow, None, true);
            if degraded > 0 {
                self.poor_since.get_or_insert_with(Instant::now);
            }
        }
        self.events.push_back(Event::LenderLost { lender: address, error, degraded, lost });
    }

    /// Takes a lost lender back when it can be reached again: as one that has nothing.
    fn look_for_comeback(&mut self, lender: usize) {
        let side = &mut self.sides[lender];
        // All that was under way has been reported.
        let is_over = |borrower: &mut Borrower| side.lost.is_some() && borrower.pending() == 0;
        if let Some(borrower) = side.borrower.take_if(is_over) {
            borrower.let_go(None);
        }
        if side.borrower.is_some() {
            return;
        }
        let Some(borrower) = side.comeback.as_mut().and_then(Comeback::take) else { return };
        let (slab_bytes, extent_bytes) = (borrower.slab_bytes(), self.core.extent_bytes());
        let is_same =
            |other: &Side| other.borrower.as_ref().is_some_and(|other| borrower.is_at_lender_of(other));
        let fits = if self.options.replicas > 1 && self.sides.iter().any(is_same) {
            Err("it is one of the others now, under another address".to_owned())
        } else if slab_bytes < extent_bytes {
            let (slab, extent) = (slab_bytes >> 10, extent_bytes >> 10);
            Err(format!("it lends slabs of {slab} KiB now, and this volume needs {extent} KiB"))
        } else {
            watch(&self.epoll, &borrower).map_err(|error| error.to_string())
        };
        let side = &mut self.sides[lender];
        let address = side.address.clone();
        if let Err(reason) = fits {
            // Somebody may start it once more, as it was.
            side.comeback = Comeback::start(&address, &self.options.borrow, None, true);
            if !std::mem::replace(&mut side.unfit, true) {
                self.events.push_back(Event::LenderUnfit { lender: address, reason });
            }
            return;
        }
        (side.borrower, side.lost, side.comeback, side.unfit) = (Some(borrower), None, None, false);
        self.events.push_back(Event::LenderBack { lender: address });
        self.core.lender_back(lender as u32);
    }

    fn note_repair(&mut self) {
        if let Some(since) = self.poor_since
            && !self.core.is_mending()
            && self.core.degraded().0 == 0
        {
            self.poor_since = None;
            self.events.push_back(Event::Mended { after: since.elapsed() });
        }
    }

    fn collect(&mut self, out: &mut Vec<Ended>) {
        while let Some(Zeros { token, at, bytes }) = self.core.zeros() {
            let local = self.ops[token as usize].local;
            if let Some(part) = local.and_then(|local| local.sub(at as usize, bytes as usize)) {
                part.fill(0);
            }
        }
        while let Some((op, result)) = self.core.ended() {
            self.free.push(op as usize);
            let result = result.map_err(|lost| {
                let lender = &self.sides[lost.lender as usize];
                lender.lost.clone().unwrap_or_else(|| Error::LenderLost {
                    lender: lender.address.clone(),
                    reason: "it was lost, and what it had".to_owned(),
                })
            });
            let Op { token, .. } = self.ops[op as usize];
            out.push(Ended { token, result });
        }
    }

    /// What has happened since the last call.
    pub fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}

fn watch(epoll: &Epoll, borrower: &Borrower) -> Result<()> {
    let added = epoll.add(borrower.as_fd(), 0, Interest { readable: true, writable: false });
    added.map_err(|error| Error::system("watch a lender's connection", &error))
}
