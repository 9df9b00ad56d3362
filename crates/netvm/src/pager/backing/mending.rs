//! What is done in the background for slabs that lack a copy or a part, and for lenders that want their memory back.

use super::super::erasure::Erasure;
use super::super::error::system;
use super::{Backing, COOL_INTERVAL, WEIGH_INTERVAL, WEIGH_PART};
use crate::error::{Error, Result};
use crate::lender::PostError;
use netvm_core::residency::{CHUNK_PAGES, Copies, SlabCopy, Slot, Step, StepEnd};
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;
use netvm_sys::uffd::PAGE_BYTES;
use std::time::Instant;

/// Numbers of operations that no transfer of the engine belongs to.
pub(super) const MEND_STEP: u64 = 1 << 40;
const MEND_WRITE: u64 = MEND_STEP + 1;
pub(super) const RETURN: u64 = MEND_STEP + 2;

/// The step under way.
pub(super) struct Mending {
    /// What is copied passes through here: whole pages,
    chunk: Mapping,
    /// and parts of them.
    parity: Option<Mapping>,
    unposted: Option<Step>,
    /// It borrows a slab.
    borrowing: bool,
    /// It reads: from these, so many of which have not answered, and one of which has failed.
    read: Copies,
    left: usize,
    failed: bool,
    /// What was read last was wrong: read all parts to find which.
    doubts: bool,
    /// When the pages that are copied were asked for, and how many they are.
    since: Instant,
    pages: u32,
    /// Some have been copied, and nobody has looked since whether more are to be.
    copied: bool,
}

impl Mending {
    pub(super) fn new(erasure: Option<Erasure>) -> Result<Self> {
        let map = |bytes| Mapping::anonymous(bytes).map_err(|e| system("map a buffer", e));
        let pages = CHUNK_PAGES as usize;
        let parity_bytes = |erasure: Erasure| pages * erasure.parity() * erasure.part_bytes();
        Ok(Self {
            // For moves, too: it costs memory when it is used.
            chunk: map(pages * PAGE_BYTES)?,
            parity: erasure.map(|erasure| map(parity_bytes(erasure))).transpose()?,
            unposted: None,
            borrowing: false,
            read: Copies::default(),
            left: 0,
            failed: false,
            doubts: false,
            since: Instant::now(),
            pages: 0,
            copied: false,
        })
    }

    /// In the child of a fork, where nothing is under way.
    pub(super) fn leave(&mut self) {
        (self.unposted, self.left, self.doubts) = (None, 0, false);
    }

    fn pages(&self, pages: u32) -> Result<SharedSlice, PostError> {
        self.chunk.shared().sub(0, pages as usize * PAGE_BYTES).ok_or(PostError::TooLong)
    }
}

impl Backing {
    /// Slots of a chunk that has been read to be copied whose contents are not what was written there, and where in it they are.
    fn wrong_slots(&mut self) -> Vec<(Slot, usize)> {
        if !self.slots.is_step_good() {
            return Vec::new();
        }
        let (chunk, seals) = (self.mending.chunk.shared(), &self.seals);
        let mut page = [0; PAGE_BYTES];
        let is_wrong = |&(slot, index): &(Slot, usize)| {
            let read = chunk.read_into(index * PAGE_BYTES, &mut page);
            read.is_some() && !seals.is_right(slot, &mut page)
        };
        let live = self.slots.slots_of_step().enumerate().filter_map(|(index, slot)| Some((slot?, index)));
        let wrong = live.filter(is_wrong);
        // What is still to be written there is not known.
        wrong.filter(|&(slot, _)| !self.promised.is_left(slot)).collect()
    }

    /// An operation that was begun here has ended.
    pub(super) fn mend_ended(
        &mut self,
        lender: u32,
        token: u64,
        failed: bool,
        slab: Option<u32>,
    ) -> Result<()> {
        if token != MEND_STEP {
            return Ok(());
        }
        if self.mending.left > 0 {
            self.mending.left -= 1;
            self.mending.failed |= failed;
            return match self.mending.left {
                0 if self.mending.unposted.is_none() => self.chunk_read(lender),
                _ => Ok(()),
            };
        }
        if !failed && !self.mending.borrowing {
            let took = self.mending.since.elapsed();
            self.slots.note_copied(self.mending.pages, took.as_nanos() as u64);
        }
        self.mending.copied = true;
        self.slots.step_ended(match slab {
            _ if failed => StepEnd::Lost,
            Some(slab) => StepEnd::Borrowed(slab),
            None if self.mending.borrowing => StepEnd::Full,
            None => StepEnd::Done,
        });
        Ok(())
    }

    /// All have answered, at last `lender`: of copies, the only one.
    fn chunk_read(&mut self, lender: u32) -> Result<()> {
        let (chunk, parity, had_doubts) = (
            self.mending.chunk.shared(),
            self.mending.parity.as_ref().map(Mapping::shared),
            std::mem::take(&mut self.mending.doubts),
        );
        if self.mending.failed {
            self.slots.step_ended(StepEnd::Lost);
            return Ok(());
        }
        let have = self.mending.read.as_slice().iter().fold(0, |all, copy| all | 1 << copy.part);
        let pages = self.slots.slots_of_step().count();
        let local = chunk.sub(0, pages * PAGE_BYTES);
        if let (Some(parts), Some(local)) = (&mut self.parts, local) {
            parts.restore(local, parity, have);
        }
        // Who is wrong is blamed now, not whoever would have got a copy.
        let wrong = self.wrong_slots();
        let Some(&(slot, _)) = wrong.first() else {
            self.slots.step_ended(StepEnd::Done);
            return Ok(());
        };
        if self.parts.is_none() {
            self.distrust(lender, slot)?;
        } else if had_doubts {
            let mut liars = 0;
            for at in wrong {
                let (Some(parts), Some(local)) = (&mut self.parts, local) else { break };
                match parts.find_wrong(&self.seals, at, local, parity, have) {
                    Some(found) => liars |= found,
                    None => return Err(self.nobody_to_blame(at.0)),
                }
            }
            let read = self.mending.read;
            for copy in read.as_slice().iter().filter(|copy| liars >> copy.part & 1 == 1) {
                self.blame(copy.lender)?;
            }
        } else {
            self.mending.doubts = true;
        }
        self.slots.step_ended(StepEnd::Lost);
        Ok(())
    }

    /// What the lender asks back.
    pub(super) fn hear(&mut self, lender: u32) -> Result<()> {
        if let Some(borrower) = self.sides.live(lender)
            && let Some(recall) = borrower.take_recall()
        {
            let slabs = recall.slabs(borrower.slab_bytes());
            // Whoever moves a slab must know what is in it.
            self.end_promises()?;
            self.slots.recall(lender, slabs);
        }
        Ok(())
    }

    /// Tells lenders what nobody else can have, and leaves those that are leaving and have nothing any more.
    fn answer_recalls(&mut self) {
        while let Some(lender) = self.slots.take_stuck() {
            if let Some(borrower) = self.sides.live(lender) {
                borrower.post_cannot();
            }
        }
        if let Some(lender) = self.slots.left()
            && self.sides.live(lender).is_some_and(|borrower| borrower.pending() == 0)
        {
            let reason = "it has been stopped, and what it held was moved".to_owned();
            let error = Error::LenderLost { lender: self.sides[lender].address.clone(), reason };
            self.sides.lose(lender, error);
            self.sides[lender].left = true;
            // It has nothing that could be.
            self.slots.lender_lost(lender);
            self.stats.lenders_left += 1;
            self.ever_left |= 1 << lender.min(63);
        }
    }

    pub(super) fn post_returns(&mut self) {
        while let Some(copy) = self.slots.take_return() {
            let Some(borrower) = &mut self.sides[copy.lender].borrower else { continue };
            if borrower.post_return(RETURN, copy.slab) == Err(PostError::Full) {
                self.slots.not_wanted(copy);
                return;
            }
        }
    }

    /// Begins what is to be done next for slabs that lack a copy.
    pub(super) fn mend(&mut self) {
        self.post_returns();
        if self.paused {
            return;
        }
        if self.sides.len() > 1 && !self.fixed_order && !self.slots.is_mending() {
            self.weigh();
        }
        let mut unposted = self.mending.unposted.take();
        let is_copy = unposted.is_some_and(|step| !matches!(step, Step::Borrow { .. }));
        if is_copy && !self.slots.is_growing() {
            // The slab was given back meanwhile.
            unposted = None;
            match self.mending.left {
                0 => self.slots.step_ended(StepEnd::Lost),
                _ => self.mending.failed = true,
            }
        }
        let step = unposted.or_else(|| {
            let step = self.slots.next_step()?;
            (self.mending.read, self.mending.failed) = (Copies::default(), false);
            if let Step::Read { pages, .. } = step {
                (self.mending.since, self.mending.pages) = (Instant::now(), pages);
            }
            Some(step)
        });
        // A move may have been the last, and nothing else wakes us.
        self.post_returns();
        if self.slots.is_recalled() {
            self.answer_recalls();
        }
        let Some(step) = step else { return };
        match self.post_step(step) {
            Ok(()) => self.slots.step_posted(),
            Err(PostError::Full) => self.mending.unposted = Some(step),
            Err(PostError::Closed | PostError::TooLong) => self.slots.step_ended(StepEnd::Lost),
        }
    }

    /// Looks for a slab that had better be elsewhere: now and then, and again as soon as one has been moved.
    fn weigh(&mut self) {
        let now = Instant::now();
        if now < self.next_weigh && !std::mem::take(&mut self.mending.copied) {
            return;
        }
        self.next_weigh = now + WEIGH_INTERVAL;
        for lender in 0..self.sides.len() {
            self.slots.set_read_ns(lender, self.sides[lender].read_ns());
        }
        if !self.slots.is_mixed() {
            return;
        }
        if now >= self.next_cool {
            self.next_cool = now + COOL_INTERVAL;
            self.slots.cool();
        }
        self.slots.weigh();
        self.next_weigh = self.next_weigh.max(now + now.elapsed() * WEIGH_PART);
    }

    fn post_step(&mut self, step: Step) -> Result<(), PostError> {
        self.mending.borrowing = matches!(step, Step::Borrow { .. });
        let part_bytes = self.part_bytes();
        match step {
            Step::Borrow { lender, press } => {
                let borrower = self.sides.live(lender).ok_or(PostError::Closed)?;
                if press { borrower.post_press(MEND_STEP) } else { borrower.post_borrow(MEND_STEP) }
            }
            Step::Read { from, page, pages } => {
                self.post_chunk_reads(from, u64::from(page) * part_bytes, pages)
            }
            Step::Write { to, page, pages } => {
                let (chunk, offset) = (self.mending.pages(pages)?, u64::from(page) * part_bytes);
                let borrower = self.sides.live(to.lender).ok_or(PostError::Closed)?;
                match (&mut self.parts, self.mending.parity.as_ref().map(Mapping::shared)) {
                    (Some(parts), Some(parity)) => {
                        parts.encode(chunk, parity).ok_or(PostError::TooLong)?;
                        let pieces = parts.pieces(to.part, chunk, Some(parity)).ok_or(PostError::TooLong)?;
                        borrower.post_write_pages(MEND_WRITE, to.slab, offset, pieces)?;
                    }
                    _ => borrower.post_write(MEND_WRITE, to.slab, offset, chunk)?,
                }
                // It has ended when the lender has it.
                borrower.post_flush(MEND_STEP)
            }
        }
    }

    /// Of copies from one, of parts from as many as are needed, or all of them to find which are wrong. Goes on where it stopped when a
    /// connection had no room.
    fn post_chunk_reads(&mut self, from: Copies, offset: u64, pages: u32) -> Result<(), PostError> {
        let (all, need) = (from.as_slice().len(), self.slots.redundancy().need());
        let want = if self.mending.doubts { all } else { need };
        let (chunk, parity) = (self.mending.pages(pages)?, self.mending.parity.as_ref().map(Mapping::shared));
        while self.mending.read.as_slice().len() < want && !self.mending.failed {
            let read = self.mending.read;
            let open = |copy: &&SlabCopy| read.as_slice().iter().all(|other| other.lender != copy.lender);
            let Some(copy) = self.sides.choose_part(from.as_slice().iter().filter(open), |_| 0) else {
                break;
            };
            let posted = match (&mut self.parts, self.sides.live(copy.lender)) {
                (_, None) => Err(PostError::Closed),
                (None, Some(borrower)) => borrower.post_sure_read(MEND_STEP, copy.slab, offset, &[chunk]),
                (Some(parts), Some(borrower)) => {
                    let pieces = parts.pieces(copy.part, chunk, parity).ok_or(PostError::TooLong)?;
                    borrower.post_sure_read(MEND_STEP, copy.slab, offset, pieces)
                }
            };
            match posted {
                Ok(()) => {
                    self.mending.read.push(copy);
                    self.mending.left += 1;
                }
                Err(PostError::Full) => return Err(PostError::Full),
                // Once those that were asked have answered, from others.
                Err(_) => self.mending.failed = true,
            }
        }
        if self.mending.left > 0 { Ok(()) } else { Err(PostError::Closed) }
    }
}
