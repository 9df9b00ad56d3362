//! What a program tells of its future: budget, pins, advice. See docs/design/far.md.

use super::engine::{EVICT_PAGES, Engine, STARVED};
use super::error::PagerError;
use super::{Pager, local_bytes_min};
use crate::error::{Error, Result};
use netvm_core::residency::{Arrival, PageState};
use netvm_sys::paged::Told;
use netvm_sys::uffd::{Fault, PAGE_BYTES};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::calls::Call;

/// How a range is going to be read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Access {
    /// Streams are recognised.
    #[default]
    Normal = 0,
    /// In order: as much as possible is fetched ahead from the first fault on.
    Sequential = 1,
    /// In no order: nothing is fetched ahead.
    Random = 2,
}

/// Of four pages of the budget, so many may be pinned.
const PINNED_QUARTERS: u64 = 3;
/// Pages that are brought in between two looks at what has come.
const PIN_STEP: u32 = 256;
/// What a call brings in: as much as there are frames for, mostly.
const PIN_BYTES: usize = 256 << 10;
/// Looks in a row after which nothing came, of a millisecond each: longer than until a process of a run gets something beyond the budget.
const PIN_TRIES: u32 = 3000;

impl Pager {
    /// Another local budget, in bytes, up to `PagerConfig::local_bytes_max`. A smaller one holds when this returns: other pages have
    /// been given up.
    ///
    /// # Errors
    /// [`PagerError::BudgetRange`], and nothing is changed.
    pub fn set_local_bytes(&self, bytes: u64) -> Result<()> {
        // No lock: a child may be forked meanwhile, or a signal's handler call this. Of two at once the last call counts.
        let before = self.local_bytes.load(Ordering::SeqCst);
        let set = |bytes| match &self.division {
            Some(division) => self.set_budget_of_shards(division, bytes),
            None => self.shards[0].shrink(Call::Budget { bytes }, self),
        };
        set(bytes).inspect_err(|_| drop(set(before)))?;
        self.local_bytes.store(bytes, Ordering::SeqCst);
        Ok(())
    }

    /// Brings a range in and keeps it in local memory until [`Pager::unpin`], which is called once for each call of this.
    ///
    /// # Errors
    /// [`PagerError::PinnedTooMuch`] when less than a quarter of the budget would be left; [`PagerError::OutsideFarMemory`] off page
    /// boundaries, and where nothing is mapped. Nothing is pinned then.
    pub fn pin(&self, address: usize, bytes: usize) -> Result<()> {
        let _turn = self.budget_turn();
        let pin = |address, bytes| Call::Pin { address, bytes };
        let bring_in = |address, bytes| Call::BringIn { address, bytes };
        let undo = |address, bytes| Call::UndoPin { address, bytes };
        self.on_all_pieces(address, bytes, pin, undo)?;
        // Faults of others are served in between.
        for at in (0..bytes).step_by(PIN_BYTES) {
            self.on_pieces(address + at, PIN_BYTES.min(bytes - at), bring_in)
                .inspect_err(|_| self.on_each_piece(address, bytes, undo))?;
        }
        Ok(())
    }

    /// The end of one [`Pager::pin`] of this range.
    ///
    /// # Errors
    /// [`PagerError::OutsideFarMemory`] off page boundaries; [`PagerError::NotPinned`] where a page of it is not, and nothing is changed (with
    /// several shards, in the shard of that page).
    pub fn unpin(&self, address: usize, bytes: usize) -> Result<()> {
        self.on_pieces(address, bytes, |address, bytes| Call::Unpin { address, bytes })
    }

    /// How a range is going to be used, until it is unmapped; a hint.
    pub fn advise(&self, address: usize, bytes: usize, access: Access) {
        // A hint that cannot be followed changes nothing.
        let _ = self.on_pieces(address, bytes, |address, bytes| Call::Advise { address, bytes, access });
    }

    /// A range is not needed for now: its pages are the next to leave local memory, with their contents (MADV_PAGEOUT); a hint.
    pub fn page_out(&self, address: usize, bytes: usize) {
        self.hint_shortly(address, bytes, |address, bytes| Call::PageOut { address, bytes });
    }

    /// A call for a range, of which faults are served in between. One that cannot be followed changes nothing.
    pub(super) fn hint_shortly(&self, address: usize, bytes: usize, call: impl Fn(usize, usize) -> Call) {
        let Some(end) = address.checked_add(bytes) else { return };
        for piece in ShortCalls::over(address..end) {
            if self.on_pieces(piece.start, piece.len(), &call).is_err() {
                return;
            }
        }
    }
}

/// Pieces of a range, whole pages if it is: longer ones as long as what is done with each takes little time.
pub struct ShortCalls {
    rest: Range<usize>,
    bytes: usize,
    since: Option<Instant>,
}

impl ShortCalls {
    const BYTES_MIN: usize = 256 << 10;
    const QUICK: Duration = Duration::from_micros(100);
    const SLOW: Duration = Duration::from_millis(1);

    /// Those of `range`.
    pub fn over(range: Range<usize>) -> Self {
        Self { rest: range, bytes: Self::BYTES_MIN, since: None }
    }
}

impl Iterator for ShortCalls {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        if self.rest.is_empty() {
            return None;
        }
        let now = Instant::now();
        match self.since.replace(now).map(|since| now - since) {
            Some(took) if took < Self::QUICK => self.bytes = self.bytes.saturating_mul(2),
            Some(took) if took > Self::SLOW => self.bytes = (self.bytes / 2).max(Self::BYTES_MIN),
            _ => {}
        }
        let start = self.rest.start;
        self.rest.start += self.bytes.min(self.rest.len());
        Some(start..self.rest.start)
    }
}

impl Engine {
    /// A range is somebody else's from now on.
    pub(super) fn forget_marks(&mut self, pages: Range<u32>) {
        for marks in [&mut self.pins, &mut self.advice] {
            if !marks.is_empty() {
                marks.change(pages.clone(), |_| 0);
            }
        }
        self.budget.set_pinned(self.pins.count());
    }

    fn is_all_mapped(&self, mut address: usize, end: usize) -> bool {
        while address < end {
            match self.ranges.range(..=address).next_back() {
                Some((&start, &bytes)) if start + bytes > address => address = start + bytes,
                _ => return false,
            }
        }
        true
    }

    fn pinnable(frames: u64) -> u64 {
        frames / 4 * PINNED_QUARTERS
    }

    pub(super) fn pin(&mut self, pages: Range<u32>) -> Result<()> {
        let (address, end) = (self.address_of(pages.start), self.address_of(pages.end));
        if !self.is_all_mapped(address, end) {
            return Err(PagerError::OutsideFarMemory { address, bytes: end - address }.into());
        }
        self.pins.change(pages.clone(), |pins| pins + 1);
        let pinned = self.pins.count();
        let max = Self::pinnable(self.budget.frames_max());
        let elsewhere = self.budget.pinned_elsewhere();
        if pinned + elsewhere > max {
            self.unpin(pages);
            let pinned = pinned + elsewhere;
            let (bytes, max_bytes) = (pinned * PAGE_BYTES as u64, max * PAGE_BYTES as u64);
            return Err(PagerError::PinnedTooMuch { bytes, max_bytes }.into());
        }
        // Other shards give what it needs.
        self.budget.set_pinned(pinned);
        Ok(())
    }

    /// A part of what has been pinned comes in, to stay.
    pub(super) fn bring_pinned_in(&mut self, pages: Range<u32>) -> Result<()> {
        let (address, end) = (self.address_of(pages.start), self.address_of(pages.end));
        if !self.is_all_mapped(address, end) {
            return Err(PagerError::OutsideFarMemory { address, bytes: end - address }.into());
        }
        // What is packed makes room for pages as they are.
        self.shrink_pool_by(pages.len(), self.pool_frames_max(self.local_frames))?;
        let result = self.bring_all_in(pages.clone());
        if result.is_err() && self.paged.told() == Told::Faulter {
            // Those that nobody waits for but the pin; who waits in a handler looks again.
            let start = self.area().start;
            self.deferred.retain(|fault| !pages.contains(&(((fault.address - start) / PAGE_BYTES) as u32)));
        }
        result
    }

    fn bring_all_in(&mut self, pages: Range<u32>) -> Result<()> {
        // Where nobody serves faults of the kernel, what was never touched must be there, too.
        let fill = self.paged.told() == Told::Faulter;
        for page in pages.clone().filter(|_| fill) {
            if self.table.get(page).state() == PageState::Untouched {
                self.fault(Fault { address: self.address_of(page), ..Fault::default() })?;
                if !self.deferred.is_empty() {
                    self.finish_all()?;
                    self.retry_deferred()?;
                }
                if !self.deferred.is_empty() && self.backing.is_stranded() {
                    return Err(self.backing.too_few(None));
                }
            }
        }
        let is_in = |state| state == PageState::Mapped || (state == PageState::Untouched && !fill);
        let (mut from, mut tries) = (pages.start, 0);
        while let Some(page) = (from..pages.end).find(|&page| !is_in(self.table.get(page).state())) {
            tries = if page > from { 0 } else { tries + 1 };
            if tries > 0 && self.backing.is_stranded() {
                return Err(self.backing.too_few(None));
            }
            if tries > PIN_TRIES {
                return Err(PagerError::LocalExhausted { pages: self.mapped.len() as u64 }.into());
            }
            if tries > 0 && self.budget.is_shared() {
                std::thread::sleep(STARVED);
                self.budget.look_again();
                self.retry_deferred()?;
                if fill && self.table.get(page).state() == PageState::Untouched && self.deferred.is_empty() {
                    self.fault(Fault { address: self.address_of(page), ..Fault::default() })?;
                }
            }
            from = page;
            for page in page..pages.end.min(page.saturating_add(PIN_STEP)) {
                let entry = self.table.get(page);
                if entry.state() == PageState::Writing {
                    self.table.set(page, entry.with_wanted(true));
                }
            }
            self.bring_in(page, PIN_STEP.min(pages.end - page))?;
            self.finish_all()?;
        }
        // System calls that write to a protected page fail.
        for page in pages {
            let entry = self.table.get(page);
            if entry.protected() {
                self.lift_protection(page, entry, true)?;
            }
        }
        Ok(())
    }

    /// The end of a pin that the program knows of.
    pub(super) fn unpin_known(&mut self, pages: Range<u32>) -> Result<()> {
        if let Some(page) = pages.clone().find(|&page| self.pins.get(page) == 0) {
            return Err(PagerError::NotPinned { address: self.address_of(page) }.into());
        }
        self.unpin(pages);
        Ok(())
    }

    pub(super) fn unpin(&mut self, pages: Range<u32>) {
        self.pins.change(pages.clone(), |pins| pins.saturating_sub(1));
        self.budget.set_pinned(self.pins.count());
        // What left the queue because it was pinned may be evicted again.
        for page in pages {
            let entry = self.table.get(page);
            if entry.state() == PageState::Mapped && !entry.queued() && self.pins.get(page) == 0 {
                self.note_mapped(page, entry, Arrival::Alone);
            }
        }
    }

    pub(super) fn page_out(&mut self, pages: Range<u32>) -> Result<()> {
        // A hint: no lender is waited for.
        if self.backing.is_stranded() {
            return Ok(());
        }
        let mut victims = [0; EVICT_PAGES];
        let (mut from, mut count) = (pages.start, 0);
        while let Some(page) = self.table.next_touched(from..pages.end) {
            from = page + 1;
            if self.table.get(page).state() != PageState::Mapped || self.pins.get(page) != 0 {
                continue;
            }
            victims[count] = page;
            count += 1;
            if count == EVICT_PAGES {
                if !self.take_out_if_room(&victims)? {
                    return Ok(());
                }
                self.progress()?;
                count = 0;
            }
        }
        self.take_out_if_room(&victims[..count]).map(drop)
    }

    /// False where lenders have no room for them: they stay.
    fn take_out_if_room(&mut self, victims: &[u32]) -> Result<bool> {
        match self.take_out(victims) {
            Err(error) if error.is_no_room() => Ok(false),
            taken => taken.map(|_| true),
        }
    }

    pub(super) fn set_budget(&mut self, bytes: u64) -> Result<()> {
        let frames = bytes / PAGE_BYTES as u64;
        let pinned = self.pins.count();
        let min_bytes = local_bytes_min(self.unit as usize * PAGE_BYTES)
            .max(pinned.div_ceil(PINNED_QUARTERS) * 4 * PAGE_BYTES as u64);
        let max_bytes = (self.paged.frames() * PAGE_BYTES) as u64;
        if bytes < min_bytes || bytes > max_bytes {
            return Err(PagerError::BudgetRange { bytes, min_bytes, max_bytes }.into());
        }
        self.can_keep(frames)?;
        let before = self.budget.frames_max();
        self.budget.set_frames_max(frames);
        let shrunk = self.shrink().and_then(|()| self.is_shrunk());
        shrunk.inspect_err(|_| self.budget.set_frames_max(before))
    }

    /// An error where pages had to leave, and have no lender to go to.
    fn is_shrunk(&self) -> Result<()> {
        let excess = self.budget.excess(self.local_frames as u64);
        if excess > 0 && self.backing.is_stranded() { Err(self.backing.too_few(None)) } else { Ok(()) }
    }

    /// An error where pages have to leave for that, and lenders are lost, of which nobody may have known before. Asked first: between two calls pages
    /// leave ahead of faults, and then it would be too late.
    fn can_keep(&mut self, frames: u64) -> Result<()> {
        let left = self.local_frames.saturating_sub(self.free.len() + self.cached.len() + self.spare);
        if left as u64 <= frames {
            return Ok(());
        }
        if self.backing.is_stranded() {
            return Err(self.backing.too_few(None));
        }
        match self.backing.take_slots(1) {
            Ok((slot, _)) => self.backing.release_slot(slot),
            // Pages that leave may need none: who needs one is told.
            Err(Error::LenderFull { .. } | Error::Pager(PagerError::TooFewLenders { .. }))
                if !self.backing.is_stranded() =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Of shards: gives up all but `frames` frames, for a moment; it may have up to `frames_max` later.
    pub(super) fn keep(&mut self, frames: u64, frames_max: u64) -> Result<()> {
        self.can_keep(frames)?;
        let before = self.budget.frames_max();
        self.budget.set_frames_max(frames);
        let shrunk = self.shrink().and_then(|()| self.is_shrunk());
        self.budget.set_frames_max(if shrunk.is_ok() { frames_max } else { before });
        shrunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_calls_cover_a_range_and_adapt() {
        // Nothing is done with them: half a terabyte is soon over.
        let (mut next, mut count) = (4096, 0);
        for piece in ShortCalls::over(4096..4096 + (1 << 39)) {
            assert!(piece.start == next && piece.start.is_multiple_of(4096) && !piece.is_empty());
            (next, count) = (piece.end, count + 1);
        }
        assert!(next == 4096 + (1 << 39) && count < 2000, "{count}");
        let lengths: Vec<_> = ShortCalls::over(0..4 << 20)
            .map(|piece| {
                std::thread::sleep(2 * ShortCalls::SLOW);
                piece.len()
            })
            .collect();
        assert_eq!(lengths, [ShortCalls::BYTES_MIN; 16]);
        assert_eq!(ShortCalls::over(5..5).next(), None);
    }
}
