//! Single pages that nobody has written to leave many at a time: docs/design/pager.md, "Pages that leave together".

use super::engine::{EVICT_PAGES_MAX, Engine};
use super::error::system;
use super::evict::Taken;
use super::fault::gone;
use super::fresh::SPARE_STEP;
use crate::error::Result;
use netvm_core::residency::{Entry, PageState};
use netvm_sys::paged::{TOGETHER_MAX, Told};

/// Fewer are moved.
const TOGETHER_MIN: usize = 4;
/// So many neighbours are moved: other CPUs are interrupted once for them, too, and nothing is copied.
const RUN_PAGES: usize = 8;
/// With more spare pages than this, pages are moved: they leave frames behind.
const SPARE_MAX: usize = 4 * SPARE_STEP;
/// A page gets a second chance in the pool as long as more than one in so many takes it,
const RETURNS: u32 = 8;
/// and where to read it again costs little more than to find it there.
const RETURNS_NEARBY: u32 = 4;
/// Pages that are known to be written to as soon as they come; of more it is found out when they are.
pub(super) const TO_WRITE_MAX: usize = 64;

impl Engine {
    /// Whether protected pages leave without a copy: few of them come back soon, and the program drops none by system calls of its own, of which
    /// nobody is told.
    pub(super) fn drops(&self) -> bool {
        // Where pages are packed, all go by way of frames.
        self.returns.are_rare() && !self.dropped_by_program && self.tier.choice.step() == 0
    }

    /// So many pages have left.
    pub(super) fn note_left(&mut self, pages: usize) {
        let part = if self.backing.is_nearby() { RETURNS_NEARBY } else { RETURNS };
        self.returns.note_left(pages as u32, part);
    }

    /// A thread that is going to write waits for this page.
    pub(super) fn note_write_ahead(&mut self, page: u32) {
        if !self.paged.takes_together() || self.to_write.contains(&page) {
            return;
        }
        if self.to_write.len() >= TO_WRITE_MAX {
            // Pages that were dropped on their way may be among them.
            self.to_write.clear();
        }
        self.to_write.push(page);
    }

    /// Whether a page that comes alone is to be write-protected; `again`: it was wanted again soon after it had left, and had better leave by way of
    /// the pool.
    pub(super) fn protects_next(&mut self, page: u32, again: bool) -> bool {
        if !self.paged.takes_together() {
            return false;
        }
        let to_write = self.to_write.iter().position(|&other| other == page);
        if let Some(place) = to_write {
            self.to_write.swap_remove(place);
        }
        let entry = self.table.get(page);
        let again = again || entry.state() == PageState::Cached && entry.wanted();
        // Where nothing is copied, protected pages leave no other way than by being dropped.
        if self.paged.told() == Told::Reader && (again || !self.drops()) {
            return false;
        }
        // What is in the pool of pages is what its slot holds: it has arrived from there, or been sent there.
        let same = matches!(entry.state(), PageState::Cached | PageState::Fetching) && entry.slot() != 0;
        same && to_write.is_none()
            && self.spare > 0
            && self.pins.get(page) == 0
            && self.protection.protects_next()
    }

    /// A fault of an installed page: somebody writes to it, or the program has dropped it and what comes now is another.
    pub(super) fn lift_protection(&mut self, page: u32, entry: Entry, write: bool) -> Result<()> {
        if entry.protected() {
            self.table.set(page, entry.with_protected(false));
        }
        if write {
            let lifted = self.paged.unprotect(self.address_of(page)).or_else(gone);
            lifted.map_err(|e| system("lift write protection", e))?;
        }
        Ok(())
    }

    /// Takes those of `victims`, in order, that are protected and have no neighbours among them, out of the program's address space. The
    /// others are left in `rest`; returns how many left, and how many are left.
    pub(super) fn take_out_together(
        &mut self,
        victims: &[u32],
        rest: &mut [u32; EVICT_PAGES_MAX],
    ) -> Result<(usize, usize)> {
        const { assert!(EVICT_PAGES_MAX <= TOGETHER_MAX) }
        let all = victims.len();
        rest[..all].copy_from_slice(victims);
        // Frames are wanted where nothing is to be packed, and packed pages come from frames that were moved.
        let moves = !self.paged.takes_together()
            || !self.packing
            || self.tier.choice.step() > 0
            || self.spare > SPARE_MAX;
        if moves {
            return Ok((0, all));
        }
        let drops = self.drops();
        let (mut pages, mut count, mut left) = ([0_u32; EVICT_PAGES_MAX], 0, 0);
        for run in victims.chunk_by(|page, next| page + 1 == *next) {
            for &page in run {
                let entry = self.table.get(page);
                let known = run.len() < RUN_PAGES && entry.protected() && entry.slot() != 0;
                if known && !(drops && self.tier.samples(page)) {
                    pages[count] = page;
                    count += 1;
                } else {
                    rest[left] = page;
                    left += 1;
                }
            }
        }
        let addresses: [usize; EVICT_PAGES_MAX] = std::array::from_fn(|index| self.address_of(pages[index]));
        if count >= TOGETHER_MIN && drops && self.give_leave(&pages[..count]) {
            rest[..left].sort_unstable();
            return Ok((count, left));
        }
        if count >= TOGETHER_MIN && drops {
            let mut dropped = [false; TOGETHER_MAX];
            let taken = self.paged.drop_together(&addresses[..count], &mut dropped);
            let taken = taken.map_err(|e| system("take pages out", e))?;
            self.note_left_together(taken);
            self.stats.clean_drops += taken as u64;
            for (&page, dropped) in pages[..count].iter().zip(dropped) {
                if dropped {
                    self.note_dropped(page);
                } else {
                    // Moving it tells why.
                    rest[left] = page;
                    left += 1;
                }
            }
            rest[..left].sort_unstable();
            return Ok((taken, left));
        }
        let (mut frames, mut taken) = ([0_usize; EVICT_PAGES_MAX], 0);
        if count >= TOGETHER_MIN && self.paged.told() == Told::Faulter {
            let room = self.frames_for_copies(&mut frames[..count]);
            taken = self
                .paged
                .extract_together(&addresses[..room], &frames[..room])
                .map_err(|e| system("take pages out", e))?;
            frames[taken..room].iter().for_each(|&frame| self.free.put(frame, 1));
        }
        self.note_left_together(taken);
        for (&page, &frame) in pages[..taken].iter().zip(&frames) {
            self.sort_out(Taken { page, frame: frame as u32 }, true)?;
        }
        rest[left..left + count - taken].copy_from_slice(&pages[taken..count]);
        left += count - taken;
        rest[..left].sort_unstable();
        Ok((taken, left))
    }

    /// A page is where its slot is, and nowhere else.
    pub(super) fn note_dropped(&mut self, page: u32) {
        let entry = self.table.get(page).with_state(PageState::Remote).with_frame(self.tier.stamp());
        self.table.set(page, entry.with_wanted(false));
    }

    /// Their memory is of the budget still, and for the next that come.
    pub(super) fn note_left_together(&mut self, pages: usize) {
        self.spare += pages;
        self.stats.left_together += pages as u64;
    }

    /// Full frames without contents, but not the hot one; returns how many there are.
    fn frames_for_copies(&mut self, frames: &mut [usize]) -> usize {
        let hot = self.free.take_hot();
        if self.free.len() < frames.len() {
            self.give_up_cached(frames.len() - self.free.len());
        }
        let mut room = 0;
        while room < frames.len()
            && let Some((first, run)) = self.free.take_run(frames.len() - room)
        {
            for (index, frame) in frames[room..room + run].iter_mut().enumerate() {
                *frame = first + index;
            }
            room += run;
        }
        hot.into_iter().for_each(|frame| self.free.put_hot(frame));
        room
    }
}
