//! Moving pages out of slabs that hold few, so that those go back to their lenders. See docs/design/lending.md, "Sparse slabs".

use super::engine::{EVICT_PAGES, Engine, Transfer};
use super::evict::Taken;
use crate::error::Result;
use netvm_core::residency::PageState;
use std::time::{Duration, Instant};

/// Time between two looks whether it pays.
const LOOK: Duration = Duration::from_millis(250);
/// So many in a row must find that it does, and that the program
const LOOKS: u32 = 4;
/// has neither taken nor given up more than one in so many slots since the last: it may be in the middle of something.
const STEADY_PART: u64 = 16;
/// Time between two steps at least,
const STEP: Duration = Duration::from_millis(2);
/// and so many times what the last one took.
const STEP_PART: u32 = 16;
/// Pages that are brought in to be moved, in one step,
const PAGES: usize = EVICT_PAGES;
/// and in a row where frames are scarce,
const SCARCE: usize = 8;
/// and entries of the page table that are looked at: a tenth of a millisecond.
const ENTRIES: u32 = 1 << 14;

/// What is done, and when next.
pub(super) struct Collecting {
    is_on: bool,
    next: Instant,
    /// Looks that found that it pays.
    looks: u32,
    /// Slots with a page at the last look.
    live: u64,
    /// Where in the page table to look next.
    at: u32,
    /// Pages that are on their way here to be moved, or are here.
    coming: Vec<u32>,
}

impl Collecting {
    pub(super) fn new() -> Self {
        let coming = Vec::with_capacity(PAGES);
        Self { is_on: false, next: Instant::now(), looks: 0, live: 0, at: 0, coming }
    }

    /// Pages are being moved.
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// When to look though nothing else happens, while so many slots hold a page.
    pub(super) fn patience(&self, live: u64) -> Option<Duration> {
        if self.is_on {
            return Some(STEP);
        }
        (live != self.live || self.looks < LOOKS).then_some(LOOK)
    }

    /// Whether the program is steady, and was for a while.
    fn is_steady(&mut self, live: u64) -> bool {
        let is_steady = live.abs_diff(self.live) <= live / STEADY_PART;
        (self.live, self.looks) = (live, if is_steady { self.looks + 1 } else { 0 });
        self.looks >= LOOKS
    }
}

impl Engine {
    /// Now and then: a step.
    pub(super) fn collect(&mut self) -> Result<()> {
        let now = Instant::now();
        if now < self.collecting.next {
            return Ok(());
        }
        if !self.collecting.is_on {
            self.collecting.next = now + LOOK;
            let slots = &mut self.backing.slots;
            self.collecting.is_on = self.collecting.is_steady(slots.live()) && slots.begin_to_collect();
            return Ok(());
        }
        self.move_what_has_come()?;
        self.look_for_more()?;
        if self.collecting.coming.is_empty() && !self.backing.slots.collects() {
            (self.collecting.is_on, self.collecting.looks) = (false, 0);
        }
        self.collecting.next = now + STEP.max(now.elapsed() * STEP_PART);
        Ok(())
    }

    /// Pages that are here in frames are written to other slots.
    fn move_what_has_come(&mut self) -> Result<()> {
        let coming = std::mem::take(&mut self.collecting.coming);
        let (mut here, mut count) = ([Taken { page: 0, frame: 0 }; PAGES], 0);
        for &page in &coming {
            let entry = self.table.get(page);
            match entry.state() {
                PageState::Fetching => self.collecting.coming.push(page),
                PageState::Cached if self.backing.slots.is_emptying(entry.slot()) => {
                    here[count] = Taken { page, frame: entry.frame() };
                    count += 1;
                }
                // Wanted, dropped, or given up meanwhile: it is found again.
                _ => {}
            }
        }
        here[..count].sort_unstable_by_key(|taken| taken.page);
        let mut rest = &here[..count];
        while let Some(&first) = rest.first() {
            let class = |page: u32| self.backing.slots.class_of(self.table.get(page).slot());
            let follows = |(index, taken): &(usize, &Taken)| {
                let index = *index as u32;
                taken.page == first.page + index
                    && taken.frame == first.frame + index
                    && class(taken.page) == class(first.page)
            };
            let run = rest.iter().enumerate().take_while(follows).count();
            let moved = self.move_run(&rest[..run])?;
            if moved == 0 {
                break;
            }
            rest = &rest[moved..];
        }
        Ok(())
    }

    /// Neighbours in neighbouring frames. Returns how many were moved, 0 where there is no other slot.
    fn move_run(&mut self, run: &[Taken]) -> Result<usize> {
        let slot = self.table.get(run[0].page).slot();
        let Some((first, slots)) = self.backing.slots.take_other(slot, run.len() as u32) else {
            return Ok(0);
        };
        for (&Taken { page, frame }, slot) in run.iter().zip(first..first + slots) {
            let entry = self.table.get(page);
            self.cached.remove(frame);
            self.backing.release_slot(entry.slot())?;
            self.table.set(page, entry.with_state(PageState::Writing).with_slot(slot).with_wanted(false));
        }
        self.writing_frames += slots as usize;
        self.stats.pages_collected += u64::from(slots);
        self.start(Transfer::write(run[0].page, run[0].frame, slots), first)?;
        Ok(slots as usize)
    }

    /// Goes through the page table: what is here lets go of its slot; what is not is asked for, as far as there are frames that nobody needs.
    fn look_for_more(&mut self) -> Result<()> {
        let end = self.page_count();
        let mut looked = 0;
        while looked < ENTRIES && self.collecting.coming.len() < PAGES {
            let Some(page) = self.table.next_touched(self.collecting.at..end) else {
                self.collecting.at = 0;
                return Ok(());
            };
            looked += 1;
            self.collecting.at = page + 1;
            let entry = self.table.get(page);
            if entry.slot() == 0 || !self.backing.slots.is_emptying(entry.slot()) {
                continue;
            }
            match entry.state() {
                PageState::Remote => {
                    if !self.ask_for(page)? {
                        self.collecting.at = page;
                        return Ok(());
                    }
                }
                PageState::Cached => self.collecting.coming.push(page),
                PageState::Mapped | PageState::Packed => self.let_go_of_slot(page)?,
                PageState::Untouched | PageState::Writing | PageState::Fetching | PageState::Filled => {}
            }
        }
        Ok(())
    }

    /// Asks for a page, and for what follows it in the next slots. False when there is no frame.
    fn ask_for(&mut self, page: u32) -> Result<bool> {
        let slot = self.table.get(page).slot();
        if self.free.len() + self.cached.len() < SCARCE {
            self.make_a_few_frames()?;
        }
        let ready = self.free.len() + self.cached.len();
        if ready < SCARCE || !self.deferred.is_empty() {
            return Ok(false);
        }
        let spare = ready.saturating_sub(self.reserve() / 2).max(SCARCE);
        let room = (PAGES - self.collecting.coming.len()).min(spare) as u32;
        let follows = |run: &u32| {
            let entry = self.table.get(page + run);
            entry.state() == PageState::Remote && self.backing.slots.adjacent(slot + run - 1, entry.slot())
        };
        let most = room.min(self.page_count() - page);
        let run = 1 + (1..most).take_while(follows).count() as u32;
        let Some((frame, frames)) = self.take_frames(run)? else { return Ok(false) };
        for index in 0..frames {
            let entry =
                self.table.get(page + index).with_state(PageState::Fetching).with_frame(frame + index);
            self.table.set(page + index, entry.with_wanted(false));
            self.collecting.coming.push(page + index);
        }
        self.collecting.at = page + frames;
        self.start(Transfer::read(page, frame, frames), slot)?;
        Ok(true)
    }
    /// What is moved needs the same few frames all the time. Pages that leave for them are there at the next step; those that the kernel has are not asked for
    /// again and again: no fault waits.
    fn make_a_few_frames(&mut self) -> Result<()> {
        if self.grow()? > 0 {
            return Ok(());
        }
        self.use_spare_pages()?;
        if self.free.is_empty() && self.writing_frames == 0 && self.busy_streak == 0 {
            self.evict_unpacked()?;
        }
        Ok(())
    }
}
