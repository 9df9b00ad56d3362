//! Moving pages out of slabs that hold few, so that those go back to their lenders. See docs/design/lending.md, "Sparse slabs".

use super::engine::{EVICT_PAGES, Engine, TICK};
use super::transfers::Transfer;
use crate::error::Result;
use netvm_core::residency::PageState;
use std::time::{Duration, Instant};

/// Time between two looks whether it pays.
const LOOK: Duration = Duration::from_millis(250);
/// So many in a row must find that the program has neither taken nor given up more than one
const LOOKS: u32 = 4;
/// in so many slots since the last: it may be in the middle of something.
const STEADY_PART: u64 = 16;
/// Time between two steps at least,
const STEP: Duration = Duration::from_millis(2);
/// and so many times what the last one took.
const STEP_PART: u32 = 16;
/// So many steps may come to nothing, without any between that did not.
const IN_VAIN_MAX: u32 = 64;
/// Pages that are brought in to be moved, in one step,
const PAGES: usize = EVICT_PAGES;
/// for which so many frames must be to be had,
const SCARCE: usize = 8;
/// and entries of the page table that are looked at: a tenth of a millisecond.
const ENTRIES: u32 = 1 << 14;

/// A page that is on its way here to be moved, or is here.
#[derive(Clone, Copy)]
struct Coming {
    page: u32,
    /// When it had left.
    stamp: u32,
}

/// What is done, and when next.
pub(super) struct Collecting {
    is_on: bool,
    next: Instant,
    /// Looks in a row that found a steady program.
    looks: u32,
    /// Slots with a page at the last look.
    live: u64,
    /// The same when it was given up: not again, until something has changed.
    given_up: Option<u64>,
    /// Pages that have left slabs that are emptied.
    done: u64,
    /// Steps since then that have come to nothing.
    in_vain: u32,
    /// Where in the page table to look next.
    at: u32,
    coming: Vec<Coming>,
    /// Pages that were read for this, and for nobody.
    read: u64,
}

impl Collecting {
    pub(super) fn new() -> Self {
        Self {
            is_on: false,
            next: Instant::now(),
            looks: 0,
            live: 0,
            given_up: None,
            done: 0,
            in_vain: 0,
            at: 0,
            coming: Vec::with_capacity(PAGES),
            read: 0,
        }
    }

    /// Pages are being moved.
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Pages that were read to be moved so far.
    pub(super) fn read(&self) -> u64 {
        self.read
    }

    /// When to go on though nothing else happens, if something does after `timeout` at the latest: who wakes anyway looks then, and gives frames to others at
    /// its usual times.
    pub(super) fn patience(&self, live: u64, timeout: Option<Duration>) -> Option<Duration> {
        let left = self.next.saturating_duration_since(Instant::now());
        if self.is_on {
            return Some(timeout.map_or(left, |timeout| timeout.min(left)));
        }
        let is_due = live != self.live || self.looks < LOOKS;
        timeout.or_else(|| is_due.then(|| left.max(TICK)))
    }

    /// Whether the program is steady, and was for a while.
    fn is_steady(&mut self, live: u64) -> bool {
        let is_steady = live.abs_diff(self.live) <= live / STEADY_PART;
        (self.live, self.looks) = (live, if is_steady { self.looks.saturating_add(1) } else { 0 });
        self.given_up.take_if(|given_up| *given_up != live);
        self.looks >= LOOKS && self.given_up.is_none()
    }

    fn end(&mut self, live: u64, given_up: bool) {
        (self.is_on, self.in_vain, self.looks, self.live) = (false, 0, 0, live);
        self.given_up = given_up.then_some(live);
    }
}

impl Engine {
    /// Now and then: a step.
    pub(super) fn collect(&mut self) -> Result<()> {
        let now = Instant::now();
        if now < self.collecting.next {
            return Ok(());
        }
        let slots = &mut self.backing.slots;
        let live = slots.live();
        if !self.collecting.is_on {
            self.collecting.next = now + LOOK;
            self.collecting.is_on =
                self.collecting.is_steady(live) && slots.begin_to_collect(self.table.far_pages());
            return Ok(());
        }
        let (done, at) = (self.collecting.done, self.collecting.at);
        self.move_what_has_come()?;
        let waits = !self.collecting.coming.is_empty();
        self.look_for_more()?;
        if self.collecting.done != done {
            self.collecting.in_vain = 0;
        } else if !waits && self.collecting.at <= at {
            // No frames; or once through the table, and what came was gone before it was moved.
            self.collecting.in_vain += 1;
        }
        if self.collecting.in_vain >= IN_VAIN_MAX {
            self.backing.slots.stop_collecting();
        }
        if !self.backing.slots.collects() && self.collecting.coming.is_empty() {
            self.collecting.end(self.backing.slots.live(), self.collecting.in_vain >= IN_VAIN_MAX);
        }
        self.collecting.next = now + STEP.max(now.elapsed() * STEP_PART);
        Ok(())
    }

    /// Pages that are here in frames are written to other slots. What was wanted, dropped or given up meanwhile is left alone.
    fn move_what_has_come(&mut self) -> Result<()> {
        let mut coming = std::mem::take(&mut self.collecting.coming);
        coming.sort_unstable_by_key(|coming| coming.page);
        let mut rest = &coming[..];
        while let Some(&first) = rest.first() {
            let entry = self.table.get(first.page);
            let mut done = 1;
            if entry.state() == PageState::Fetching {
                self.collecting.coming.push(first);
            } else if entry.state() == PageState::Cached && self.backing.slots.is_emptying(entry.slot()) {
                let class = self.backing.slots.class_of(entry.slot());
                let follows = |(index, coming): &(usize, &Coming)| {
                    let next = self.table.get(coming.page);
                    next.state() == PageState::Cached
                        && next.frame() == entry.frame() + *index as u32
                        && self.backing.slots.is_emptying(next.slot())
                        && self.backing.slots.class_of(next.slot()) == class
                };
                let run = rest.iter().enumerate().take_while(follows).count();
                // Where there is no other slot they stay.
                done = self.move_run(&rest[..run])?.max(1);
            }
            rest = &rest[done..];
        }
        Ok(())
    }

    /// Pages in neighbouring frames. Returns how many were moved, 0 where there is no other slot.
    fn move_run(&mut self, run: &[Coming]) -> Result<usize> {
        let first = self.table.get(run[0].page);
        let Some((slot, slots)) = self.backing.slots.take_other(first.slot(), run.len() as u32) else {
            return Ok(0);
        };
        for (&Coming { page, stamp }, slot) in run.iter().zip(slot..slot + slots) {
            let entry = self.table.get(page);
            self.cached.remove(entry.frame());
            self.backing.release_slot(entry.slot())?;
            // As cold as it was. Whoever reads the slot from now on does so after the write, on the same connection.
            let entry = entry.with_state(PageState::Remote).with_frame(stamp).with_slot(slot);
            self.table.set(page, entry.with_wanted(false));
        }
        self.writing_frames += slots as usize;
        self.stats.pages_collected += u64::from(slots);
        self.collecting.done += u64::from(slots);
        self.start(Transfer { loose: true, ..Transfer::write(0, first.frame(), slots) }, slot)?;
        Ok(slots as usize)
    }

    /// Goes through the page table: what is here lets go of its slot; what is not is asked for, as far as there are frames.
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
                PageState::Cached => {
                    let stamp = self.tier.stamp();
                    self.collecting.coming.push(Coming { page, stamp });
                }
                PageState::Mapped | PageState::Packed => {
                    self.let_go_of_slot(page)?;
                    self.collecting.done += 1;
                }
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
        let run = 1 + (1..most).take_while(follows).count();
        self.give_up_cached(run.saturating_sub(self.free.len()));
        let Some((frame, frames)) = self.free.take_run(run) else { return Ok(false) };
        let (frame, frames) = (frame as u32, frames as u32);
        for index in 0..frames {
            let entry = self.table.get(page + index);
            self.collecting.coming.push(Coming { page: page + index, stamp: entry.frame() });
            let entry = entry.with_state(PageState::Fetching).with_frame(frame + index);
            self.table.set(page + index, entry.with_wanted(false));
        }
        self.collecting.at = page + frames;
        self.collecting.read += u64::from(frames);
        self.start(Transfer::read(page, frame, frames), slot)?;
        Ok(true)
    }

    /// What is moved needs the same few frames all the time. Pages that leave for them are there at the next step; those that the kernel has are not asked for
    /// again and again, nor others for what they have: no fault waits.
    fn make_a_few_frames(&mut self) -> Result<()> {
        if !self.budget.is_shared() && self.grow()? > 0 {
            return Ok(());
        }
        self.use_spare_pages(SCARCE)?;
        if self.free.len() < SCARCE && self.writing_frames == 0 && self.busy_streak == 0 {
            self.evict_unpacked()?;
        }
        Ok(())
    }
}
