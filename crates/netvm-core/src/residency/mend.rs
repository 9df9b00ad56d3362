//! New copies for slabs that have lost some, or whose lender asks for them, while their pages are read and written: one slab at a time,
//! chunk by chunk.
//!
//! A connection to a lender keeps the order of what is posted on it. So a page that is written goes to the copy that grows as well
//! when its chunk's write has been posted there before; until then its chunk is copied again.

use super::copies::{Copies, SlabCopy};
use super::heat::Wish;
use super::slots::{SlabIndex, Slot, SlotMap, Stuck};

/// Pages that are copied at a time.
pub const CHUNK_PAGES: u32 = 64;

/// What is to be done for a new copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Borrow a slab of this lender.
    Borrow {
        /// Its number.
        lender: u32,
        /// It has refused, and so has everybody else: what it would rather not lend, too.
        press: bool,
    },
    /// Read pages into the buffer for chunks.
    Read {
        /// From any of these; of parts, from as many as are needed.
        from: Copies,
        /// First page.
        page: u32,
        /// How many.
        pages: u32,
    },
    /// Write the buffer, and be told when it has been written.
    Write {
        /// To which copy.
        to: SlabCopy,
        /// First page.
        page: u32,
        /// How many.
        pages: u32,
    },
}

/// How a step has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepEnd {
    /// Done.
    Done,
    /// There is a slab.
    Borrowed(u32),
    /// The lender has none.
    Full,
    /// Its lender is lost.
    Lost,
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    page: u32,
    pages: u32,
    phase: Phase,
    /// A page of it was written meanwhile.
    stale: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Reading,
    /// Its write is not posted yet.
    Read,
    Writing,
}

#[derive(Clone, Copy, Debug)]
struct Growing {
    slab: SlabIndex,
    lender: u32,
    /// Which part of each page it will have.
    part: u8,
    /// It takes the place of the copy of this lender.
    leaving: Option<u32>,
    /// Because that one suits it better.
    wished: bool,
    /// `None` until it is borrowed.
    copy: Option<SlabCopy>,
    /// Pages below are in it.
    done: u32,
    chunk: Option<Chunk>,
    width: u32,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Mender {
    growing: Option<Growing>,
    /// Perhaps for a copy that is no longer wanted.
    in_flight: Option<Step>,
    /// Slabs before have what they need, or cannot be helped now.
    cursor: usize,
    /// What is asked for is an empty slab.
    fresh: bool,
    mended: u64,
    moved: u64,
    sorted: u64,
}

impl Mender {
    /// A page changes places by itself.
    pub(super) fn count_sorted(&mut self) {
        self.sorted += 1;
    }

    pub(super) fn look_again(&mut self) {
        self.cursor = 0;
    }
}

impl SlotMap {
    /// Whether a slab is getting another copy.
    pub fn is_mending(&self) -> bool {
        self.mender.growing.is_some() || self.mender.in_flight.is_some()
    }

    /// Whether some slab is being copied.
    pub fn is_growing(&self) -> bool {
        self.mender.growing.is_some()
    }

    /// Whether this one is.
    pub(super) fn is_growing_slab(&self, index: usize) -> bool {
        self.mender.growing.as_ref().is_some_and(|growing| growing.slab as usize == index)
    }

    /// Pages that got another copy so far.
    pub fn mended(&self) -> u64 {
        self.mender.mended
    }

    /// Pages that were moved because their lender asked for its memory.
    pub fn moved(&self) -> u64 {
        self.mender.moved
    }

    /// Pages that were moved because a lender of another class suits them.
    pub fn sorted(&self) -> u64 {
        self.mender.sorted
    }

    /// Whether a lender is asked for a slab.
    pub(super) fn is_asking(&self, lender: u32) -> bool {
        matches!(self.mender.in_flight, Some(Step::Borrow { lender: asked, .. }) if asked == lender)
    }

    /// Slots of the slab that a step reads from or writes to, from the step's first page on; those that hold nothing are none.
    pub fn slots_of_step(&self) -> impl Iterator<Item = Option<Slot>> + '_ {
        let pages = match self.mender.in_flight {
            Some(Step::Read { page, pages, .. } | Step::Write { page, pages, .. }) => page..page + pages,
            _ => 0..0,
        };
        let slab = self.mender.growing.as_ref().map(|growing| growing.slab as usize);
        let place = slab.and_then(|index| Some((index, self.slabs.get(index)?.as_ref()?)));
        pages.map(move |page| {
            let (index, slab) = place?;
            slab.is_live(page).then(|| self.join(index, page))
        })
    }

    /// Whether what the step under way has read is going to be written: nothing of it was changed meanwhile.
    pub fn is_step_good(&self) -> bool {
        let chunk = self.mender.growing.as_ref().and_then(|growing| growing.chunk);
        chunk.is_some_and(|chunk| !chunk.stale && chunk.phase == Phase::Reading)
    }

    /// Where pages from `slot` on are to be written: to all complete copies, and to the one that grows when they are in it.
    /// `None` for a slab that was returned.
    #[inline]
    pub fn write(&mut self, slot: Slot, pages: u32) -> Option<(Copies, u32)> {
        let (index, page) = self.split(slot);
        let mut copies = self.slabs.get(index)?.as_ref()?.copies;
        if let Some(growing) = &mut self.mender.growing
            && growing.slab == index as u32
            && let Some(copy) = growing.write(page, pages)
        {
            copies.push(copy);
        }
        Some((copies, page))
    }

    /// What to do next for copies that are missing; `None` while a step is under way, or when nothing can be done.
    pub fn next_step(&mut self) -> Option<Step> {
        if self.mender.in_flight.is_some() {
            return None;
        }
        let step = loop {
            match self.mender.growing {
                None => break self.begin()?,
                Some(growing) => {
                    if let Some(step) = self.go_on(growing) {
                        break step;
                    }
                }
            }
        };
        self.mender.in_flight = Some(step);
        Some(step)
    }

    fn begin(&mut self) -> Option<Step> {
        while let Some(slab) = self.slabs.get(self.mender.cursor) {
            if let Some(slab) = slab {
                let (copies, is_empty) = (slab.copies, slab.live_count == 0);
                let total = self.redundancy.total();
                let is_poor = (self.redundancy.need()..total).contains(&copies.as_slice().len());
                let recalled = |copy: &&SlabCopy| self.places[copy.lender as usize].recalled > 0;
                let leaver = copies.as_slice().iter().find(recalled);
                let leaving = leaver.map(|copy| copy.lender);
                let index = self.mender.cursor as SlabIndex;
                if is_empty && leaving.is_some() {
                    self.remove(index);
                } else if !is_empty && (is_poor || leaving.is_some()) {
                    let candidate = self.candidate(copies.as_slice());
                    // To one that asks for its own memory only what has too few copies.
                    let usable = |lender: &u32| is_poor || self.places[*lender as usize].recalled == 0;
                    let last = || Some((self.last_resort(copies.as_slice()).filter(|_| is_poor)?, true));
                    let asked = candidate.filter(usable).map(|lender| (lender, false)).or_else(last);
                    if let Some((lender, press)) = asked {
                        let leaver = leaver.filter(|_| !is_poor);
                        let part = leaver.map_or_else(|| copies.missing(total), |copy| copy.part);
                        let leaving = leaver.map(|copy| copy.lender);
                        self.mender.growing = Some(Growing::new(index, lender, part, leaving));
                        return Some(Step::Borrow { lender, press });
                    }
                    if let Some(lender) = leaving
                        && self.places[lender as usize].stuck == Stuck::No
                    {
                        self.places[lender as usize].stuck = Stuck::Found;
                    }
                }
            }
            self.mender.cursor += 1;
        }
        self.begin_wish()
    }

    /// Nothing is missing: a slab that had better be elsewhere.
    fn begin_wish(&mut self) -> Option<Step> {
        let (index, from, to) = match self.wish.take()? {
            Wish::Move { slab, from, to } => (slab, from, to),
            Wish::Fresh { lender } => {
                self.mender.fresh = true;
                return Some(Step::Borrow { lender, press: false });
            }
        };
        let slab = self.slabs.get(index as usize)?.as_ref()?;
        let at = |lender: u32| slab.copies.as_slice().iter().find(|copy| copy.lender == lender);
        // Something may have changed since it was chosen.
        let part = at(from)?.part;
        let fits = slab.live_count > 0 && !slab.frozen && at(to).is_none() && self.places[to as usize].alive;
        if !fits || self.places[to as usize].recalled > 0 {
            return None;
        }
        self.mender.growing = Some(Growing { wished: true, ..Growing::new(index, to, part, Some(from)) });
        Some(Step::Borrow { lender: to, press: false })
    }

    /// `None` when there is nothing more to do for it.
    fn go_on(&mut self, mut growing: Growing) -> Option<Step> {
        let slots = self.slots_per_slab;
        let slab = self.slabs.get_mut(growing.slab as usize).and_then(Option::as_mut);
        let (Some(slab), Some(copy)) = (slab, growing.copy) else {
            self.mender.growing = None;
            return None;
        };
        if let Some(Chunk { page, pages, phase: Phase::Read, .. }) = growing.chunk {
            return Some(Step::Write { to: copy, page, pages });
        }
        let Some((page, pages)) = slab.live_run(growing.done, growing.width, slots) else {
            slab.copies.push(copy);
            slab.due = 0;
            self.places[copy.lender as usize].live += u64::from(slab.live_count);
            let left = growing.leaving.and_then(|lender| slab.copies.remove(lender));
            if let Some(left) = &left {
                self.places[left.lender as usize].live -= u64::from(slab.live_count);
            }
            self.mender.growing = None;
            if let Some(lender) = growing.leaving.filter(|_| growing.wished) {
                // There is room for another one now.
                self.places[lender as usize].may_have_room();
            }
            // What was posted to it before comes before its return.
            left.into_iter().for_each(|copy| self.give_back(copy));
            return None;
        };
        let from = slab.copies;
        if from.as_slice().len() < self.redundancy.need() {
            self.mender.growing = None;
            self.give_back(copy);
            return None;
        }
        // Pages before it hold nothing: whatever is written there from now on goes to this copy, too.
        growing.done = page;
        growing.chunk = Some(Chunk { page, pages, phase: Phase::Reading, stale: false });
        self.mender.growing = Some(growing);
        Some(Step::Read { from, page, pages })
    }

    /// The step that was asked for is posted: what is posted from now on comes after it.
    pub fn step_posted(&mut self) {
        if let Some(Step::Write { .. }) = self.mender.in_flight
            && let Some(growing) = &mut self.mender.growing
            && let Some(chunk) = &mut growing.chunk
        {
            chunk.phase = Phase::Writing;
        }
    }

    /// The step under way has ended, or could not be posted.
    pub fn step_ended(&mut self, end: StepEnd) {
        let Some(step) = self.mender.in_flight.take() else { return };
        let is_fresh = core::mem::take(&mut self.mender.fresh);
        let growing = self.mender.growing.as_mut();
        match (step, end) {
            (Step::Borrow { lender, .. }, StepEnd::Borrowed(slab)) => {
                let part = growing.as_ref().map_or(0, |growing| growing.part);
                let copy = SlabCopy { lender, slab, part };
                match growing {
                    _ if !self.places[lender as usize].alive => {}
                    _ if is_fresh => self.add_better(copy),
                    Some(growing) => {
                        growing.copy = Some(copy);
                        self.places[lender as usize].slabs += 1;
                    }
                    None => self.not_wanted(copy),
                }
            }
            (Step::Borrow { lender, press }, end) => {
                let place = &mut self.places[lender as usize];
                place.full |= end == StepEnd::Full;
                place.pressed |= press && end == StepEnd::Full;
                self.mender.growing = None;
            }
            (Step::Read { .. }, StepEnd::Done) => {
                if let Some(growing) = growing {
                    match &mut growing.chunk {
                        Some(chunk) if !chunk.stale => chunk.phase = Phase::Read,
                        _ => growing.again(),
                    }
                }
            }
            (Step::Write { .. }, StepEnd::Done) => {
                if let Some(growing) = growing
                    && let Some(chunk) = growing.chunk.take()
                {
                    if chunk.stale {
                        growing.again();
                    } else {
                        (growing.done, growing.width) = (chunk.page + chunk.pages, CHUNK_PAGES);
                        let slab = self.slabs[growing.slab as usize].as_ref();
                        let pages = slab.map_or(0, |slab| slab.live_in(chunk.page, chunk.pages));
                        let count = match growing.leaving {
                            Some(_) if growing.wished => &mut self.mender.sorted,
                            Some(_) => &mut self.mender.moved,
                            None => &mut self.mender.mended,
                        };
                        *count += pages;
                    }
                }
            }
            // From another copy; the target is dropped by whoever says that its lender is lost.
            (_, _) => {
                if let Some(growing) = growing {
                    growing.again();
                }
            }
        }
    }

    /// What grows is no longer wanted.
    pub(super) fn stop_mending(&mut self, slab: SlabIndex) {
        if let Some(growing) = self.mender.growing.take_if(|growing| growing.slab == slab)
            && let Some(copy) = growing.copy
        {
            self.give_back(copy);
        }
    }

    /// In the child of a fork, where nothing is under way: what grew grows in the parent.
    pub fn leave_mending(&mut self) {
        if let Some(growing) = &self.mender.growing {
            self.stop_mending(growing.slab);
        }
        self.mender = Mender::default();
        self.wish = None;
        // It is asked itself.
        self.places.iter_mut().for_each(|place| (place.recalled, place.stuck) = (0, Stuck::No));
    }

    pub(super) fn mender_lost(&mut self, lender: u32) {
        self.mender.growing.take_if(|growing| growing.lender == lender);
    }
}

impl Growing {
    fn new(slab: SlabIndex, lender: u32, part: u8, leaving: Option<u32>) -> Self {
        Self {
            slab,
            lender,
            part,
            leaving,
            wished: false,
            copy: None,
            done: 0,
            chunk: None,
            width: CHUNK_PAGES,
        }
    }

    /// Whether pages that are written now go to this copy, too.
    fn write(&mut self, page: u32, pages: u32) -> Option<SlabCopy> {
        let copy = self.copy?;
        let written = match self.chunk {
            Some(chunk) if chunk.phase == Phase::Writing => chunk.page + chunk.pages,
            _ => self.done,
        };
        if page + pages <= written {
            return Some(copy);
        }
        if let Some(chunk) = &mut self.chunk
            && page < chunk.page + chunk.pages
            && chunk.page < page + pages
        {
            chunk.stale = true;
        }
        self.done = self.done.min(page);
        None
    }

    /// The chunk is copied again, less of it at a time: a page is not written twice while it alone is being read.
    fn again(&mut self) {
        self.chunk = None;
        self.width = (self.width / 2).max(1);
    }
}

#[cfg(test)]
mod tests;
