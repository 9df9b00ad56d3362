//! Eviction: keeping frames ready before they are needed.

use super::engine::{EVICT_PAGES, EVICT_PAGES_MAX, Engine};
use super::error::{PagerError, system};
use super::fork::KEPT_FREE;
use super::fresh::SPARE_STEP;
use super::tier::{PACK_PAGES, repeated_word};
use super::transfers::Transfer;
use crate::error::Result;
use netvm_core::residency::{Arrival, Entry, PageState};
use netvm_core::tier::Policy;
use netvm_sys::paged::ExtractError;
use std::time::{Duration, Instant};

/// One part in this many of the local memory is kept free or cached.
const RESERVE_PART: usize = 16;
const RESERVE_FRAMES_MIN: usize = 2 * EVICT_PAGES;
/// Pages evicted in one step where few are neighbours: each is a call of its own, and a step should not take longer than an answer.
const SCATTERED_PAGES: usize = EVICT_PAGES / 8;
/// The same where the lender's process is not waited for, but its kernel.
const UNAWAITED_PAGES: usize = EVICT_PAGES / 2;
/// The same where pages leave together.
const TOGETHER_PAGES: usize = EVICT_PAGES / 4;
/// Fewer than so many below the reserve, they wait until an answer is on its way.
const SCATTERED_SLACK: usize = EVICT_PAGES / 2;
/// Pages of a run that counts as long.
const RUN_PAGES_MIN: usize = 16;
/// Pages that one step may spare.
const SPARED_MAX: usize = 8 * EVICT_PAGES;
/// For how long frames are given back at a time, but for one step at least,
const SHRINK_TIME: Duration = Duration::from_micros(200);
/// and how many in a step.
pub(super) const SHRINK_FRAMES: usize = 4 * EVICT_PAGES;
/// Pages in a row that the kernel may refuse to let go before the budget counts as exhausted.
const BUSY_MAX: usize = 100_000;

/// A page taken out of the program's address space, in its frame.
#[derive(Clone, Copy)]
pub(super) struct Taken {
    pub(super) page: u32,
    pub(super) frame: u32,
}

impl Engine {
    /// Frames that should be free, cached or about to be.
    pub(super) fn reserve(&self) -> usize {
        // Who has next to nothing uses most of it: one access may need several pages at once.
        (self.local_frames / RESERVE_PART).max(RESERVE_FRAMES_MIN.min(self.local_frames / 4))
    }

    fn available(&self) -> usize {
        self.free.len() + self.cached.len() + self.writing_frames
    }

    /// While nobody waits: evicts a batch if the reserve is low. True when it did.
    pub(super) fn evict_ahead(&mut self) -> Result<bool> {
        if self.budget.may_grow() {
            return Ok(false);
        }
        let (mut available, mut reserve) = (self.available(), self.reserve());
        if self.together {
            // What leaves together leaves spare pages behind, no frames.
            let spare = self.spare + self.errands.leaving();
            (available, reserve) = (available + spare, reserve + SPARE_STEP);
        }
        let scattered = self.scattered && self.tier.choice.step() == 0;
        let short = reserve.saturating_sub(available);
        let is_behind = short * 2 > reserve;
        let (pages, slack) = match scattered {
            // Windows with a stride use up more frames at a fault than a step makes ready.
            true if self.has_strides && is_behind => {
                ((short / 2).clamp(SCATTERED_PAGES, EVICT_PAGES_MAX), SCATTERED_PAGES / 2)
            }
            // Nobody waits for the lender's process, and each send wakes it.
            true if self.backing.reads() == 0 && self.backing.asks() => (UNAWAITED_PAGES, SCATTERED_SLACK),
            true if !self.is_reading() => (SCATTERED_PAGES, SCATTERED_SLACK),
            true => (SCATTERED_PAGES, SCATTERED_PAGES / 2),
            // Nobody else is interrupted by what leaves, and an answer is not to wait for it.
            false if self.together && self.backing.reads() > 0 && !self.protection.is_of_several() => {
                (TOGETHER_PAGES, TOGETHER_PAGES / 2)
            }
            false => (self.evict_pages(available + 2 * EVICT_PAGES <= reserve), EVICT_PAGES / 2),
        };
        let spare_is_low = self.together
            && self.spare + self.errands.leaving() < self.spare_enough()
            && available <= reserve + EVICT_PAGES;
        if available + slack > reserve && !spare_is_low {
            return Ok(false);
        }
        if self.backing.is_stranded() {
            let packs = self.packing && self.tier.choice.step() > 0;
            let has_room = self.tier.pool.frames() < self.pool_frames_max(self.local_frames);
            return if packs && has_room { self.evict_here(pages) } else { Ok(false) };
        }
        let taken = self.evict(pages)?;
        self.has_strides &= is_behind;
        // What is scattered goes out in small steps, with a look at what has come after each.
        Ok(taken > 0 && (!scattered || available + SCATTERED_SLACK <= reserve))
    }

    /// Evicts what needs no lender of so many pages; the others are put back. Whether frames were won.
    fn evict_here(&mut self, pages: usize) -> Result<bool> {
        let before = self.available();
        self.evict(pages)?;
        Ok(self.available() > before)
    }

    /// There is no frame at all: evicts a batch, and waits for writes only if nothing clean came out.
    pub(super) fn evict_now(&mut self) -> Result<()> {
        if !self.cached.is_empty() || self.writing_frames >= EVICT_PAGES {
            return Ok(());
        }
        if self.backing.is_stranded() {
            // What is zero, or packs, needs no lender. Else the fault waits, and calls are carried out meanwhile: the program may give pages back.
            let gained = self.evict_here(EVICT_PAGES)? || self.take_from_pool_now()?;
            return if gained { Ok(()) } else { self.backing.need_lenders() };
        }
        let taken = self.evict(self.evict_pages(true))?;
        if taken == 0 && self.take_from_pool_now()? {
            return Ok(());
        }
        if taken == 0 && self.in_flight() == 0 && self.busy_streak > BUSY_MAX {
            return Err(PagerError::LocalExhausted { pages: self.mapped.len() as u64 }.into());
        }
        Ok(())
    }

    /// Pages to evict in one step; `behind`: far fewer frames are ready than should be.
    fn evict_pages(&self, behind: bool) -> usize {
        match self.tier.choice.step() {
            // With memory that is shared a write is a copy, here and now, and a longer step makes faults wait. But a fault of a stream uses up as many
            // frames: were fewer made ready for each, it would soon wait for all of them.
            0 if self.in_runs && (behind || !self.backing.is_nearby()) => EVICT_PAGES_MAX,
            0 => EVICT_PAGES,
            _ => PACK_PAGES,
        }
    }

    /// Gives frames beyond the budget back to the machine, for a moment: faults are served before it goes on, for as long as that took.
    pub(super) fn shrink(&mut self) -> Result<()> {
        self.give_back(self.budget.excess(self.local_frames as u64) as usize)
    }

    /// Goes on with what [`Engine::shrink`] has left, when it is time.
    pub(super) fn shrink_on(&mut self) -> Result<()> {
        match self.shrinks_on {
            // What has become more meanwhile is looked at again with the next tick.
            Some((due, left)) if Instant::now() >= due => {
                self.give_back(left.min(self.budget.excess(self.local_frames as u64) as usize))
            }
            _ => Ok(()),
        }
    }

    /// Gives `excess` frames back, as far as it can and there is time.
    fn give_back(&mut self, excess: usize) -> Result<()> {
        let began = Instant::now();
        let until = began + SHRINK_TIME;
        // What is only above its share a child gives back as its parent writes what both have packed.
        let is_own = self.local_frames as u64 > self.budget.frames_max();
        let left = match self.backing.promised.is_following() && !is_own {
            true => self.give_written_back(excess, until)?,
            false => self.give_some_back(excess, until)?,
        };
        self.shrinks_on = (left > 0).then(|| (Instant::now() + began.elapsed(), left));
        Ok(())
    }

    /// At least one step. Returns for how many frames there was no time `until` then.
    fn give_some_back(&mut self, mut excess: usize, until: Instant) -> Result<usize> {
        excess -= self.release_spare(excess);
        // What is promised is to leave meanwhile.
        let kept = if self.backing.promised.is_wanted() { KEPT_FREE.min(self.reserve()) } else { 0 };
        while excess > 0 {
            let some = excess.min(SHRINK_FRAMES);
            self.give_up_cached(some.saturating_sub(self.free.len()));
            if self.free.is_empty() && self.backing.is_stranded() {
                return Ok(0);
            }
            if self.free.len() <= kept {
                // The pool keeps its part of what is left; it may have had far more since frames were given back that were free.
                self.shrink_pool_by(some, self.pool_frames_max(self.local_frames.saturating_sub(some)))?;
            }
            if self.free.len() <= kept {
                let before = self.local_frames;
                let taken = self.evict_unpacked()?;
                self.finish_all()?;
                // What the program had dropped is gone, too; and behind what the kernel holds there may be others.
                excess = excess.saturating_sub(before.saturating_sub(self.local_frames));
                if taken == 0 && (self.mapped.is_empty() || self.busy_streak > self.mapped.len()) {
                    return Ok(0);
                }
            } else {
                let some = some.min(self.free.len() - kept);
                let Some((frame, frames)) = self.free.take_run(some) else { return Ok(0) };
                self.drop_free(frame, frames)?;
                excess -= frames;
            }
            if Instant::now() >= until {
                return Ok(excess);
            }
        }
        Ok(0)
    }

    /// Frames that were free go back to the machine.
    pub(super) fn drop_free(&mut self, frame: usize, frames: usize) -> Result<()> {
        self.paged.drop_frames(frame, frames).map_err(|e| system("give memory back", e))?;
        self.empty.put(frame, frames);
        self.local_frames -= frames;
        self.budget.release_excess(frames as u64, self.local_frames as u64);
        Ok(())
    }

    /// As [`Engine::evict`], with nothing packed.
    pub(super) fn evict_unpacked(&mut self) -> Result<usize> {
        let packing = std::mem::replace(&mut self.packing, false);
        let taken = self.evict(EVICT_PAGES);
        self.packing = packing;
        taken
    }

    /// Takes up to `want` pages out of the program's address space, oldest first; writes those that changed.
    pub(super) fn evict(&mut self, want: usize) -> Result<usize> {
        let packing = self.packing && self.tier.choice.step() > 0;
        let since = self.tier.time_eviction();
        let mut victims = [0_u32; EVICT_PAGES_MAX];
        let (mut count, mut spared) = (0, 0);
        let ahead = self.streams.mapped_ahead() + self.learn.replay.mapped_ahead();
        let ahead = ahead.in_units_of(self.unit as usize);
        while count < want.min(EVICT_PAGES_MAX) {
            let Some(page) = self.mapped.pop(ahead, self.local_frames) else { break };
            let entry = self.table.get(page);
            let is_mapped = entry.state() == PageState::Mapped;
            if is_mapped && entry.frame() > 0 && spared < SPARED_MAX && self.pins.get(page) == 0 {
                self.table.set(page, entry.with_frame(entry.frame() - 1));
                self.mapped.push(page, Arrival::Alone);
                spared += 1;
                continue;
            }
            self.table.set(page, entry.with_queued(false));
            // Who unpins it puts it back.
            if is_mapped && self.pins.get(page) == 0 {
                self.mapped.note_left(page, self.local_frames);
                victims[count] = page;
                count += 1;
            }
        }
        // Neighbours are moved and written together, also where several streams arrived by turns.
        victims[..count].sort_unstable();
        let taken = self.take_out(&victims[..count])?;
        self.tier.note_evicted(taken);
        self.backing.detail.reuse.evicted += taken as u64;
        // How long an errand takes is known when it ends.
        let since = since.filter(|_| self.errands.leave.is_none());
        self.tier.note_eviction(since, taken, packing);
        Ok(taken)
    }

    /// Takes mapped pages, at most [`EVICT_PAGES_MAX`], out of the program's address space; writes those that changed. Returns how many it
    /// took.
    pub(super) fn take_out(&mut self, victims: &[u32]) -> Result<usize> {
        let mut rest = [0; EVICT_PAGES_MAX];
        let (together, count) = self.take_out_together(victims, &mut rest)?;
        let (moved, runs) = self.move_out(&rest[..count])?;
        self.scattered = runs * 2 > count + together;
        self.in_runs = together == 0 && runs * RUN_PAGES_MIN <= count;
        self.together = together > count;
        self.note_left(together + moved);
        Ok(together + moved)
    }

    /// Moves mapped pages, in order, to frames; writes those that changed. Returns how many it took, and in how many runs of neighbours they came.
    pub(super) fn move_out(&mut self, victims: &[u32]) -> Result<(usize, usize)> {
        // Neighbours are moved and written together.
        let (mut start, mut taken, mut runs, count) = (0, 0, 0, victims.len());
        let mut changed = [Taken { page: 0, frame: 0 }; EVICT_PAGES_MAX];
        let mut changes = 0;
        while start < count {
            let mut run = 1;
            while start + run < count && victims[start + run] == victims[start] + run as u32 {
                run += 1;
            }
            let end = start + run;
            runs += 1;
            while start < end {
                let page = victims[start];
                let Some((frame, frames)) = self.empty.take_run(end - start) else {
                    return Err(system("find an empty frame", std::io::ErrorKind::OutOfMemory.into()));
                };
                let (moved, stopped) = self.paged.extract(self.address_of(page), frame, frames);
                if moved < frames {
                    self.empty.put(frame + moved, frames - moved);
                }
                for index in 0..moved as u32 {
                    let one = Taken { page: page + index, frame: frame as u32 + index };
                    if self.sort_out(one, false)? {
                        changed[changes] = one;
                        changes += 1;
                    }
                }
                taken += moved;
                start += moved;
                if moved < frames {
                    self.not_taken(victims[start], stopped)?;
                    start += 1;
                } else {
                    self.busy_streak = 0;
                }
            }
        }
        self.write_back(&changed[..changes])?;
        Ok((taken, runs))
    }

    /// A victim that could not be moved.
    fn not_taken(&mut self, page: u32, why: std::result::Result<(), ExtractError>) -> Result<()> {
        match why {
            Err(ExtractError::Missing) => self.lost_by_program(page),
            Err(ExtractError::Busy) | Ok(()) => {
                self.busy_streak += 1;
                // The attempt may have lifted the protection.
                let entry = self.table.get(page).with_protected(false);
                self.note_mapped(page, entry, Arrival::Alone);
                Ok(())
            }
            Err(ExtractError::Os(source)) => Err(system("take a page out", source)),
        }
    }

    /// Decides what a page that was taken out needs; `same`: it is known to be what its slot holds. True: it changed and must be written.
    pub(super) fn sort_out(&mut self, taken: Taken, same: bool) -> Result<bool> {
        let Taken { page, frame } = taken;
        let entry = self.table.get(page).with_protected(false);
        match repeated_word(self.paged.frame_bytes(frame as usize)) {
            Some(0) => {
                self.backing.release_slot(entry.slot())?;
                self.table.set(page, Entry::default().with_queued(entry.queued()));
                self.free.put(frame as usize, 1);
                self.stats.zero_drops += 1;
                return Ok(false);
            }
            Some(word) if self.tier.choice.policy() != Policy::Lender => {
                self.backing.release_slot(entry.slot())?;
                self.table
                    .set(page, Entry::default().with_state(PageState::Filled).with_queued(entry.queued()));
                self.table.set_hash(page, word);
                self.free.put(frame as usize, 1);
                self.stats.filled += 1;
                return Ok(false);
            }
            _ => {}
        }
        let clean = same || {
            let hash = self.content_hash(frame);
            let clean = entry.slot() != 0 && hash == self.table.hash(page);
            self.table.set_hash(page, hash);
            clean
        };
        if self.packing && self.pack(page, frame, entry, clean)? {
            return Ok(false);
        }
        if clean {
            let entry = entry.with_state(PageState::Cached).with_frame(frame).with_wanted(true);
            self.table.set(page, entry);
            self.cached.push(frame, page);
            self.stats.clean_drops += 1;
            return Ok(false);
        }
        let slot = if entry.slot() != 0 && !self.backing.slots.is_writable(entry.slot()) {
            self.backing.release_slot(entry.slot())?;
            0
        } else {
            entry.slot()
        };
        self.writing_frames += 1;
        self.table.set(page, entry.with_state(PageState::Writing).with_frame(frame).with_slot(slot));
        Ok(true)
    }

    /// Writes changed pages, neighbours in one transfer.
    fn write_back(&mut self, changed: &[Taken]) -> Result<()> {
        let mut index = 0;
        while index < changed.len() {
            let Taken { page, frame } = changed[index];
            let contiguous = |other: &Taken, run: usize| {
                other.page == page + run as u32 && other.frame == frame + run as u32
            };
            let slot = self.table.get(page).slot();
            let mut run = 1;
            if slot == 0 {
                while index + run < changed.len()
                    && changed[index + run].frame == frame + run as u32
                    && self.table.get(changed[index + run].page).slot() == 0
                    && contiguous(&changed[index + run], run)
                {
                    run += 1;
                }
                // Without a lender a page is nowhere else.
                let taken = match self.backing.is_stranded() {
                    true => Ok(None),
                    false => self.backing.take_slots(run as u32).map(Some),
                };
                let (first, slots) = match taken {
                    Ok(Some(run)) => run,
                    none => {
                        self.install_again(&changed[index..])?;
                        return none.map(drop);
                    }
                };
                run = slots as usize;
                for (offset, taken) in changed[index..index + run].iter().enumerate() {
                    let entry = self.table.get(taken.page);
                    self.table.set(taken.page, entry.with_slot(first + offset as u32));
                }
                self.start(Transfer::write(page, frame, run as u32), first)?;
            } else {
                while index + run < changed.len()
                    && contiguous(&changed[index + run], run)
                    && self
                        .backing
                        .slots
                        .adjacent(slot + run as u32 - 1, self.table.get(changed[index + run].page).slot())
                {
                    run += 1;
                }
                self.start(Transfer::write(page, frame, run as u32), slot)?;
            }
            index += run;
        }
        Ok(())
    }

    /// Pages that were taken out have nowhere to go.
    fn install_again(&mut self, taken: &[Taken]) -> Result<()> {
        for &Taken { page, frame } in taken {
            self.writing_frames -= 1;
            // What has a slot was not written there, though the table has the hash of what should have been.
            self.let_go_of_slot(page)?;
            self.install(page, frame, 1)?;
        }
        Ok(())
    }

    /// A write has reached the lender.
    pub(super) fn written(&mut self, transfer: Transfer) -> Result<()> {
        if transfer.promised {
            self.backing.promised.sent(transfer.page);
        }
        if transfer.loose {
            self.spilled(transfer.frame, transfer.pages);
            return Ok(());
        }
        for index in 0..transfer.pages {
            let (page, frame) = (transfer.page + index, transfer.frame + index);
            let entry = self.table.get(page);
            if entry.state() != PageState::Writing || entry.frame() != frame {
                // Discarded meanwhile.
                self.free.put(frame as usize, 1);
                continue;
            }
            self.writing_frames -= 1;
            self.table.set(page, entry.with_state(PageState::Cached).with_wanted(true));
            self.cached.push(frame, page);
            if entry.wanted() {
                self.map_cached(page, 1)?;
            }
        }
        Ok(())
    }
}
