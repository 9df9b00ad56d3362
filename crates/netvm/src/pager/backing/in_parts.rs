//! Reading and writing pages of which each lender has a part.

use super::super::erasure::{Codec, Erasure, PartSet};
use super::super::error::{PagerError, system};
use super::super::seals::Seals;
use super::super::transfers::TRANSFER_PAGES_MAX;
use super::{Backing, Op};
use crate::error::{Error, Result};
use crate::lender::PostError;
use netvm_core::residency::{PARTS_MAX, SlabCopy, Slot};
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;
use netvm_sys::uffd::PAGE_BYTES;
use std::time::Instant;

/// What computing a page from parity costs, as if its lender were so much slower.
const RESTORE_NS: u64 = 3_000;

/// A read in parts.
#[derive(Clone, Copy, Debug, Default)]
struct Read {
    /// Parts that have been asked for, and not in vain.
    asked: PartSet,
    /// Those of them that are there.
    got: PartSet,
    /// Of whom.
    lenders: [u32; PARTS_MAX],
    /// All that there are: one of them was wrong before.
    all: bool,
}

/// Buffers, and reads that are under way.
pub(super) struct InParts {
    erasure: Erasure,
    codec: Codec,
    /// By the engine's number, as those of the backing.
    reads: Vec<Read>,
    /// Parity parts that are on their way, by the engine's number; each holds those of the longest transfer.
    buffers: Vec<Option<Mapping>>,
    spare: Vec<Mapping>,
    /// Slots of which something else was read than was written, and whether no parts were found from which it comes.
    suspects: Vec<(Slot, bool)>,
    /// All parts of some pages, one after the other.
    work: Vec<u8>,
    pieces: Vec<SharedSlice>,
}

fn too_long() -> Error {
    system("divide pages", std::io::ErrorKind::InvalidInput.into())
}

impl InParts {
    pub(super) fn new(erasure: Erasure) -> Self {
        Self {
            erasure,
            codec: Codec::new(erasure),
            reads: Vec::with_capacity(1024),
            buffers: Vec::with_capacity(1024),
            spare: Vec::new(),
            suspects: Vec::new(),
            work: Vec::new(),
            pieces: Vec::with_capacity(TRANSFER_PAGES_MAX as usize),
        }
    }

    /// Bytes of a part.
    pub(super) fn bytes(&self) -> usize {
        self.erasure.part_bytes()
    }

    /// What else a part costs than its lender's time.
    fn cost_ns(&self, part: u8) -> u64 {
        if usize::from(part) < self.erasure.data() { 0 } else { RESTORE_NS }
    }

    /// The parity parts of a transfer.
    fn buffer(&mut self, token: u32) -> Result<SharedSlice> {
        let index = token as usize;
        if index >= self.buffers.len() {
            self.buffers.resize_with(index + 1, || None);
        }
        if self.buffers[index].is_none() {
            let bytes = self.erasure.parity() * self.bytes() * TRANSFER_PAGES_MAX as usize;
            self.buffers[index] = Some(match self.spare.pop() {
                Some(buffer) => buffer,
                None => Mapping::anonymous(bytes).map_err(|e| system("map a buffer", e))?,
            });
        }
        self.buffers[index].as_ref().map(Mapping::shared).ok_or_else(too_long)
    }

    /// A transfer is over.
    fn release(&mut self, token: u32) {
        self.spare.extend(self.buffers.get_mut(token as usize).and_then(Option::take));
    }

    /// Where a part of the pages in `local` is; those that are computed are in `parity`.
    pub(super) fn pieces(
        &mut self,
        part: u8,
        local: SharedSlice,
        parity: Option<SharedSlice>,
    ) -> Option<&[SharedSlice]> {
        let (part, bytes, pages) = (usize::from(part), self.bytes(), local.len() / PAGE_BYTES);
        self.pieces.clear();
        match part.checked_sub(self.erasure.data()) {
            None => {
                for page in 0..pages {
                    self.pieces.push(local.sub(page * PAGE_BYTES + part * bytes, bytes)?);
                }
            }
            Some(index) => self.pieces.push(parity?.sub(index * pages * bytes, pages * bytes)?),
        }
        Some(&self.pieces)
    }

    /// Brings parts to work with.
    fn load(&mut self, local: SharedSlice, parity: Option<SharedSlice>, have: PartSet) -> Option<()> {
        let (bytes, total) = (local.len() / PAGE_BYTES * self.bytes(), self.erasure.lenders());
        self.work.resize(total * bytes, 0);
        for part in (0..total).filter(|part| have >> part & 1 == 1) {
            self.pieces(part as u8, local, parity)?;
            let mut at = part * bytes;
            for piece in &self.pieces {
                piece.read_into(0, &mut self.work[at..at + piece.len()])?;
                at += piece.len();
            }
        }
        Some(())
    }

    /// Computes the parity parts of pages.
    pub(super) fn encode(&mut self, local: SharedSlice, parity: SharedSlice) -> Option<()> {
        let (bytes, data) = (local.len() / PAGE_BYTES * self.bytes(), self.erasure.data());
        self.load(local, None, (1 << data) - 1)?;
        self.codec.encode(&mut self.work, bytes);
        parity.write_from(0, &self.work[data * bytes..])
    }

    /// Computes the data parts that are not in `have`, in their places.
    pub(super) fn restore(
        &mut self,
        local: SharedSlice,
        parity: Option<SharedSlice>,
        have: PartSet,
    ) -> Option<()> {
        let (bytes, data) = (local.len() / PAGE_BYTES * self.bytes(), self.erasure.data());
        let missing = !have & ((1 << data) - 1);
        if missing == 0 {
            return Some(());
        }
        self.load(local, parity, have)?;
        self.codec.restore(&mut self.work, bytes, have);
        for part in (0..data).filter(|part| missing >> part & 1 == 1) {
            self.pieces(part as u8, local, None)?;
            let mut at = part * bytes;
            for piece in &self.pieces {
                piece.write_from(0, &self.work[at..at + piece.len()])?;
                at += piece.len();
            }
        }
        Some(())
    }

    /// Puts the page that was written to `slot` at `page` of `local`, if it comes from some of the parts in `have`, and tells those that
    /// are wrong.
    pub(super) fn find_wrong(
        &mut self,
        seals: &Seals,
        (slot, page): (Slot, usize),
        local: SharedSlice,
        parity: Option<SharedSlice>,
        have: PartSet,
    ) -> Option<PartSet> {
        let (bytes, pages) = (self.bytes(), local.len() / PAGE_BYTES);
        self.load(local, parity, have)?;
        let of_page = |part: usize| &self.work[(part * pages + page) * bytes..][..bytes];
        let mut parts: Vec<u8> = (0..self.erasure.lenders()).flat_map(of_page).copied().collect();
        let is_right = |page: &[u8]| seals.is_right(slot, &mut page.to_vec());
        let wrong = self.codec.find_wrong(&mut parts, have, is_right)?;
        local.write_from(page * PAGE_BYTES, &parts[..PAGE_BYTES])?;
        Some(wrong)
    }
}

impl Backing {
    /// For those that are written.
    pub(super) fn encode_parts(&mut self, token: u32, local: SharedSlice) -> Result<()> {
        let Some(parts) = &mut self.parts else { return Ok(()) };
        let parity = parts.buffer(token)?;
        parts.encode(local, parity).ok_or_else(too_long)
    }

    /// Writes pages, or the part of them that belongs there.
    pub(super) fn post_write(
        &mut self,
        token: u32,
        to: SlabCopy,
        offset: u64,
        local: SharedSlice,
    ) -> Result<(), PostError> {
        let borrower = self.sides.live(to.lender).ok_or(PostError::Closed)?;
        let Some(parts) = &mut self.parts else {
            return borrower.post_write(token.into(), to.slab, offset, local);
        };
        let parity = parts.buffers.get(token as usize).and_then(Option::as_ref).map(Mapping::shared);
        let pieces = parts.pieces(to.part, local, parity).ok_or(PostError::TooLong)?;
        borrower.post_write_pages(token.into(), to.slab, offset, pieces)
    }

    /// Reads the pages of a transfer that has been noted.
    pub(super) fn read_parts(&mut self, token: u32) -> Result<()> {
        let Op { slot, local, .. } = self.ops[token as usize];
        self.ops[token as usize].left = 0;
        let Some(parts) = &mut self.parts else { return Ok(()) };
        let slots = slot..slot + (local.len() / PAGE_BYTES) as u32;
        let all = parts.suspects.iter().any(|(suspect, _)| slots.contains(suspect));
        self.slots.heat(slot, 1);
        if token as usize >= parts.reads.len() {
            parts.reads.resize(token as usize + 1, Read::default());
        }
        parts.reads[token as usize] = Read { all, ..Read::default() };
        self.ask_for_parts(token)?;
        if self.ops[token as usize].left == 0 {
            // The slab was given back: nobody waits for it.
            self.read_ended(token);
            self.ended.push(token);
        }
        Ok(())
    }

    fn read_ended(&mut self, token: u32) {
        self.reads -= 1;
        self.parts.iter_mut().for_each(|parts| parts.release(token));
    }

    /// Asks for as many parts as are needed, of those who answer soonest.
    fn ask_for_parts(&mut self, token: u32) -> Result<()> {
        let need = self.slots.redundancy().need() as u32;
        loop {
            let Op { slot, local, .. } = self.ops[token as usize];
            let Some(parts) = &mut self.parts else { return Ok(()) };
            let read = parts.reads[token as usize];
            if !read.all && read.asked.count_ones() >= need {
                return Ok(());
            }
            let Some((copies, page)) = self.slots.locate(slot) else { return Ok(()) };
            let open = |copy: &&SlabCopy| read.asked >> copy.part & 1 == 0;
            let cost = |copy: &SlabCopy| parts.cost_ns(copy.part);
            let Some(copy) = self.sides.choose_part(copies.iter().filter(open), cost) else { return Ok(()) };
            let offset = u64::from(page) * parts.bytes() as u64;
            let is_parity = usize::from(copy.part) >= parts.erasure.data();
            let parity = if is_parity { Some(parts.buffer(token)?) } else { None };
            let pieces = parts.pieces(copy.part, local, parity).ok_or_else(too_long)?;
            let number = u64::from(token) | u64::from(copy.part) << 32;
            let posted = match &mut self.sides[copy.lender].borrower {
                Some(borrower) => borrower.post_read_pages(number, copy.slab, offset, pieces),
                None => Err(PostError::Closed),
            };
            match posted {
                Ok(()) => {
                    let read = &mut parts.reads[token as usize];
                    read.asked |= 1 << copy.part;
                    read.lenders[usize::from(copy.part)] = copy.lender;
                    self.ops[token as usize].left += 1;
                    let bytes = local.len() / PAGE_BYTES * parts.bytes();
                    self.detail.moved(copy.lender, bytes as u64, 0);
                }
                Err(error) => self.make_room(copy.lender, error)?,
            }
        }
    }

    /// One lender has taken or sent its part.
    pub(super) fn part_ended(
        &mut self,
        lender: u32,
        token: u32,
        part: u8,
        failed: bool,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        let need = self.slots.redundancy().need() as u32;
        let op = &mut self.ops[token as usize];
        op.left -= 1;
        let (op, Some(parts)) = (*op, &mut self.parts) else { return Ok(()) };
        let (bytes, waited) = (local_part(op.local, parts), op.asked.map(|asked| asked.elapsed()));
        if let (Some(waited), false) = (waited, failed) {
            self.sides[lender].answered(waited, bytes);
        }
        if op.write || op.hedged {
            if op.left == 0 {
                parts.release(token);
                out.push(token);
            }
            return Ok(());
        }
        let read = &mut parts.reads[token as usize];
        if failed {
            read.asked &= !(1 << part);
        } else {
            read.got |= 1 << part;
        }
        let read = *read;
        if failed || (op.left == 0 && read.got.count_ones() < need) {
            self.ask_for_parts(token)?;
        }
        if self.ops[token as usize].left > 0 {
            return Ok(());
        }
        if read.got.count_ones() >= need {
            self.put_together(token)?;
            let waited = waited.unwrap_or_default();
            self.detail.waited(lender, waited.as_nanos() as u64);
            self.note_wait(waited);
        }
        // With fewer the slab was given back: nobody waits for it.
        self.read_ended(token);
        out.push(token);
        Ok(())
    }

    /// All parts are there that were asked for.
    fn put_together(&mut self, token: u32) -> Result<()> {
        let Op { slot, local, .. } = self.ops[token as usize];
        let Some(parts) = &mut self.parts else { return Ok(()) };
        let Read { got, all, lenders, .. } = parts.reads[token as usize];
        let parity = parts.buffers.get(token as usize).and_then(Option::as_ref).map(Mapping::shared);
        let mut wrong = 0;
        if all {
            let (slots, mut hopeless) = (slot..slot + (local.len() / PAGE_BYTES) as u32, Vec::new());
            for (page, slot) in slots.clone().enumerate() {
                match parts.find_wrong(&self.seals, (slot, page), local, parity, got) {
                    Some(liars) => wrong |= liars,
                    None => hopeless.push(slot),
                }
            }
            // Perhaps nobody waits for them: whoever does finds them wrong again.
            parts.suspects.retain(|(suspect, _)| !slots.contains(suspect));
            parts.suspects.extend(hopeless.into_iter().map(|slot| (slot, true)));
        } else {
            parts.restore(local, parity, got).ok_or_else(too_long)?;
        }
        for part in (0..PARTS_MAX).filter(|part| wrong >> part & 1 == 1) {
            self.blame(lenders[part])?;
        }
        Ok(())
    }

    /// A lender has returned something else than was written.
    pub(super) fn blame(&mut self, lender: u32) -> Result<()> {
        if let Some(gone) = self.has_gone(lender) {
            return self.lose(lender, gone);
        }
        let side = &mut self.sides[lender];
        side.distrusted = true;
        let error = PagerError::PageCorrupt { lender: side.address.clone() };
        self.stats.wrong_pages += 1;
        self.lose(lender, error.into())
    }

    /// The parts that were read of a slot make another page than was written. It is to be read again, with all parts.
    pub(super) fn suspect(&mut self, slot: Slot) -> Result<()> {
        let Some(parts) = &mut self.parts else { return Ok(()) };
        match parts.suspects.iter().find(|(suspect, _)| *suspect == slot) {
            Some((_, true)) => Err(self.nobody_to_blame(slot)),
            Some(_) => Ok(()),
            None => {
                parts.suspects.push((slot, false));
                Ok(())
            }
        }
    }

    /// Some of the lenders of a slot are wrong, and there are too few others to tell which.
    pub(super) fn nobody_to_blame(&self, slot: Slot) -> Error {
        let copies = self.slots.locate(slot).map_or(&[][..], |(copies, _)| copies);
        let lenders: Vec<_> = copies.iter().map(|copy| self.sides[copy.lender].address.clone()).collect();
        PagerError::PartsCorrupt { lenders: lenders.join(", ") }.into()
    }

    /// A read of which some parts take far longer than usual, while other lenders have enough.
    pub(super) fn overdue_parts(&mut self, now: Instant) -> Option<u32> {
        let (need, parts) = (self.slots.redundancy().need(), self.parts.as_ref()?);
        let mut found = None;
        for (token, op) in self.ops.iter().enumerate().filter(|_| self.reads > 0) {
            let Some(asked) = op.asked.filter(|_| op.left > 0 && !op.write && !op.hedged) else { continue };
            let read = &parts.reads[token];
            let (open, bytes) = (read.asked & !read.got, local_part(op.local, parts));
            let is_late = |part: &usize| {
                let lender = read.lenders[*part];
                open >> part & 1 == 1 && now - asked > self.sides[lender].limit(bytes)
            };
            let late: PartSet = (0..PARTS_MAX).filter(is_late).fold(0, |all, part| all | 1 << part);
            let others = self.slots.locate(op.slot).map_or(0, |(copies, _)| {
                let can_help = |copy: &&SlabCopy| late >> copy.part & 1 == 0 && !self.sides[copy.lender].late;
                copies.iter().filter(can_help).count()
            });
            if late != 0 && others >= need && !read.all {
                found = Some((token as u32, late, read.lenders));
                break;
            }
        }
        let Some((token, late, lenders)) = found else {
            self.next_late = now + super::LOOK_INTERVAL;
            return None;
        };
        (0..PARTS_MAX)
            .filter(|part| late >> part & 1 == 1)
            .for_each(|part| self.sides[lenders[part]].late = true);
        Some(token)
    }
}

fn local_part(local: SharedSlice, parts: &InParts) -> usize {
    local.len() / PAGE_BYTES * parts.bytes()
}
