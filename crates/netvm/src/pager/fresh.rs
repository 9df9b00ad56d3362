//! Single pages arrive by copy, in memory of their own: for that, pages of the budget are given up ahead, many at a time.

use super::engine::Engine;
use super::error::{PagerError, system};
use crate::error::Result;

/// Pages of the budget that are given up at a time,
pub(super) const SPARE_STEP: usize = 32;
/// when fewer than these are left and an answer is on its way,
const SPARE_MIN: usize = 16;
/// or fewer than these.
const SPARE_FEW: usize = 4;

impl Engine {
    /// Installs a page by a copy of its frame, if a page of the budget is to be had for it. False when nothing has changed.
    pub(super) fn install_fresh(&mut self, page: u32, frame: u32, protect: bool) -> Result<bool> {
        self.spare_wanted = true;
        if self.spare == 0 {
            return Ok(false);
        }
        match self.paged.install_fresh(self.address_of(page), frame as usize, protect) {
            Ok(()) => {
                self.spare -= 1;
                // The next page arrives in it, while it is in the cache.
                self.free.put_hot(frame as usize);
                Ok(true)
            }
            // Then it gives its own memory.
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => Ok(false),
            Err(source) => Err(system("install a page", source)),
        }
    }

    /// With fewer spare pages than this more are made.
    pub(super) fn spare_enough(&self) -> usize {
        if self.is_reading() { SPARE_MIN } else { SPARE_FEW }
    }

    /// While nobody waits: gives up memory of the pool for pages that will arrive by copy, if single pages do arrive.
    pub(super) fn make_spare(&mut self) -> Result<()> {
        if self.spare >= self.spare_enough() || !self.spare_wanted {
            return Ok(());
        }
        self.spare_wanted = false;
        // Debts come before anything else.
        if self.budget.may_grow() && !self.budget.owes(self.local_frames as u64) {
            let room = self.paged.frames().saturating_sub(self.local_frames).min(SPARE_STEP);
            let granted = self.budget.grow(room as u64) as usize;
            self.spare += granted;
            self.note_local(granted);
            if granted > 0 {
                return Ok(());
            }
        }
        let hot = self.free.take_hot();
        if self.free.len() < SPARE_STEP {
            self.give_up_cached(SPARE_STEP - self.free.len());
        }
        let (mut runs, mut count, mut left) = ([(0, 0); SPARE_STEP], 0, SPARE_STEP);
        while let Some((frame, frames)) = self.free.take_run(left) {
            runs[count] = (frame, frames);
            (count, left) = (count + 1, left - frames);
        }
        self.paged.drop_frame_runs(&runs[..count]).map_err(|e| system("give memory back", e))?;
        for &(frame, frames) in &runs[..count] {
            self.empty.put(frame, frames);
            self.spare += frames;
        }
        hot.into_iter().for_each(|frame| self.free.put_hot(frame));
        Ok(())
    }

    /// There are fewer free frames than `enough`: what was given up ahead becomes frames again.
    pub(super) fn use_spare_pages(&mut self, enough: usize) -> Result<()> {
        while self.free.len() < enough && self.spare > 0 {
            let Some((frame, frames)) = self.empty.take_run(self.spare) else { return Ok(()) };
            if let Err(error) = self.paged.fill_frames(frame, frames) {
                self.empty.put(frame, frames);
                if self.local_frames > self.spare {
                    // Others took that memory: it goes on with less.
                    self.release_spare(self.spare);
                    return Ok(());
                }
                return Err(PagerError::NoLocalMemory((&error).into()).into());
            }
            self.spare -= frames;
            self.free.put(frame, frames);
        }
        Ok(())
    }

    /// Gives up to `frames` pages back that were given up ahead. Returns how many.
    pub(super) fn release_spare(&mut self, frames: usize) -> usize {
        let released = frames.min(self.spare);
        self.spare -= released;
        self.local_frames -= released;
        self.budget.release_excess(released as u64, self.local_frames as u64);
        released
    }

    /// More local memory is in use, or given up for what will arrive.
    pub(super) fn note_local(&mut self, frames: usize) {
        self.local_frames += frames;
        self.stats.local_frames_peak = self.stats.local_frames_peak.max(self.local_frames as u64);
    }
}
