//! Which page of those that came in windows leaves next: the oldest, or, where a program reads the same memory in circles, the newest.
//!
//! A loop over more memory than there is defeats first in, first out (and LRU): each page leaves just before its turn. Whoever keeps a part of the loop, any
//! part, and lets newcomers pass finds that part at every turn (MRU for loops: *Unified Buffer Management*, Kim et al., OSDI 2000; *bimodal insertion*, Qureshi et al., ISCA 2007).
//! Whether there is a loop cannot be seen before it is tried, for uses of mapped pages are not. So it is tried where what leaves mostly comes back after not too
//! long, and what is kept must show again and again that it is wanted: some of it leaves, as a *probe*, and must come back about as soon as newcomers do.

use super::queue::Place;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// With fewer local pages nothing is kept: streams that map ahead need most of them.
const LOCAL_MIN: usize = 2048;
/// One part in so many of the windows' pages are newcomers, at least, while others are kept,
const FRESH_PART_MAX: usize = 8;
/// and at most: with more of them it is not worth it.
const FRESH_PART_MIN: usize = 2;
/// There is room for one more when one comes back soon, and for one less when so many do later.
const LATE_PER_SOON: usize = 16;
/// What comes back before so many times the local pages have left is worth a trial.
const LOOP_MAX: usize = 3;
/// It is the mean of about so many ages.
const AGES: u64 = 256;
/// Pages of a probe: one in so many local pages, within limits.
const PROBE_PART: usize = 32;
const PROBE_MIN: usize = 32;
const PROBE_MAX: usize = 128;
/// What a probe may take longer than newcomers, in pages that leave.
const PROBE_SLACK: u64 = 512;
/// Good probes that outweigh bad ones later, at most.
const CREDIT_MAX: u8 = 1;
/// A trial that fails is not repeated before the local pages have left twice; each further one twice as often, this many times.
const FAILURES_MAX: u32 = 6;

/// Some of what was kept, to see whether it comes back.
#[derive(Clone, Debug)]
struct Probe {
    /// Still to be chosen.
    wanted: usize,
    /// What has left, in order of pages once all have.
    pages: Vec<u32>,
    back: usize,
    /// When the last left.
    since: Option<u64>,
}

impl Probe {
    fn has(&self, page: u32) -> bool {
        match self.since {
            Some(_) => self.pages.binary_search(&page).is_ok(),
            None => self.pages.contains(&page),
        }
    }
}

/// While some is kept.
#[derive(Clone, Debug)]
struct Keeping {
    /// How old pages were when they came back, before.
    age_before: u64,
    /// `LATE_PER_SOON` times the newcomers that there is room for.
    room: usize,
    credit: u8,
    probe: Option<Probe>,
    /// No probe begins before so many pages have left.
    next_probe: u64,
    /// The page popped last is of the probe.
    probes: bool,
}

/// Pages that came in windows, in the order in which they leave.
#[derive(Clone, Debug, Default)]
pub(super) struct Windows {
    /// Older than all of `fresh`, but for those that were kept later.
    kept: VecDeque<Place>,
    fresh: VecDeque<Place>,
    keeping: Option<Keeping>,
    /// Pages that have left, others included.
    clock: u64,
    /// `AGES` times the mean age of those that came back.
    ages: u64,
    /// Pages that came from where pages leave to, and how many of them soon enough.
    came: usize,
    came_back: usize,
    failures: u32,
    not_before: u64,
}

impl Windows {
    pub(super) fn len(&self) -> usize {
        self.kept.len() + self.fresh.len()
    }

    /// Whether some is kept.
    pub(super) fn keeps(&self) -> bool {
        self.keeping.is_some()
    }

    pub(super) fn push(&mut self, place: Place) {
        self.fresh.push_back(place);
    }

    /// How old the one that leaves next would be if they left in order.
    pub(super) fn age(&self, now: u32) -> Option<usize> {
        let age = |place: &Place| now.wrapping_sub(place.number) as usize;
        match (self.kept.front(), self.fresh.front()) {
            (Some(_), Some(place)) if self.keeps() => {
                Some(age(place).saturating_mul(self.len()) / self.fresh.len())
            }
            (kept, fresh) => kept.or(fresh).map(age),
        }
    }

    /// Takes the one whose turn it is; the last `ahead` may not have been used yet.
    pub(super) fn pop(&mut self, ahead: usize, local: usize) -> Option<Place> {
        let part = |part| self.len() / part;
        let least = ahead.max(part(FRESH_PART_MAX));
        let newcomers = self.keeping.as_ref().map_or(0, |keeping| least.max(keeping.room / LATE_PER_SOON));
        if self.kept.is_empty() || ahead > part(FRESH_PART_MIN) || local < LOCAL_MIN {
            self.keeping = None;
        }
        let Some(keeping) = self.keeping.as_mut() else {
            return self.kept.pop_front().or_else(|| self.fresh.pop_front());
        };
        if self.fresh.len() <= newcomers {
            // Of a loop the one that was used last is used again last.
            return self.kept.pop_back();
        }
        let size = (local / PROBE_PART).clamp(PROBE_MIN, PROBE_MAX);
        if keeping.probe.is_none() && self.clock >= keeping.next_probe && self.kept.len() > size {
            keeping.probe =
                Some(Probe { wanted: size, pages: Vec::with_capacity(size), back: 0, since: None });
        }
        if let Some(probe) = keeping.probe.as_mut().filter(|probe| probe.wanted > 0)
            && let Some(place) = self.kept.pop_front()
        {
            probe.wanted -= 1;
            keeping.probes = true;
            // In its stead: so all that is kept is looked at, sooner or later.
            self.kept.extend(self.fresh.pop_front());
            return Some(place);
        }
        self.fresh.pop_front()
    }

    /// A page has left: the last one popped, of whatever queue.
    pub(super) fn note_left(&mut self, page: u32, local: usize) {
        self.clock += 1;
        let age = self.ages / AGES;
        let length = self.len();
        let Some(keeping) = self.keeping.as_mut() else { return };
        // Something is read in circles that is smaller than all the local memory.
        let mut fails = keeping.room / LATE_PER_SOON > length / FRESH_PART_MIN;
        if let Some(probe) = keeping.probe.as_mut() {
            if core::mem::take(&mut keeping.probes) {
                probe.pages.push(page);
            }
            match probe.since {
                None if probe.wanted > 0 => {}
                None => {
                    probe.pages.sort_unstable();
                    probe.since = Some(self.clock);
                }
                Some(since) if probe.back * 2 >= probe.pages.len() => {
                    keeping.probe = None;
                    // About one in each turn of a loop.
                    keeping.next_probe = since + age;
                    keeping.credit = (keeping.credit + 1).min(CREDIT_MAX);
                    if keeping.credit == CREDIT_MAX {
                        self.failures = 0;
                    }
                }
                Some(since) if self.clock > since + age + age / 2 + PROBE_SLACK => {
                    keeping.probe = None;
                    fails |= keeping.credit == 0;
                    keeping.credit = keeping.credit.saturating_sub(1);
                }
                Some(_) => {}
            }
        }
        if fails {
            self.keeping = None;
            self.failures = (self.failures + 1).min(FAILURES_MAX);
            self.not_before = self.clock + ((local as u64) << self.failures);
        }
    }

    /// A page comes, in a window or not, that left when `age` pages fewer had.
    pub(super) fn note_back(&mut self, page: u32, in_window: bool, age: usize, local: usize) {
        if let Some(probe) = self.keeping.as_mut().and_then(|keeping| keeping.probe.as_mut())
            && probe.has(page)
        {
            probe.back += 1;
            return;
        }
        if !in_window {
            return;
        }
        let is_late = age >= local.saturating_mul(LOOP_MAX);
        let length = self.len();
        if let Some(keeping) = &mut self.keeping {
            if (age as u64) < keeping.age_before / 2 {
                keeping.room = keeping.room.max(length / FRESH_PART_MAX * LATE_PER_SOON) + LATE_PER_SOON;
                return;
            }
            keeping.room = keeping.room.saturating_sub(1);
        }
        let mean = self.ages / AGES;
        if !is_late {
            self.ages = self.ages - mean + age as u64;
        }
        // What had not gone yet says nothing of a loop.
        if self.keeps() || age == 0 {
            return;
        }
        (self.came, self.came_back) = (self.came + 1, self.came_back + usize::from(!is_late));
        if self.came >= local / 2 {
            let is_loop = self.came_back * 2 > self.came && self.len() > local / FRESH_PART_MAX;
            if is_loop && local >= LOCAL_MIN && self.clock >= self.not_before {
                self.kept.append(&mut self.fresh);
                self.keeping = Some(Keeping {
                    age_before: mean,
                    room: 0,
                    credit: 0,
                    probe: None,
                    next_probe: 0,
                    probes: false,
                });
            }
            (self.came, self.came_back) = (0, 0);
        }
    }

    pub(super) fn retain(&mut self, keep: &mut impl FnMut(u32) -> bool) {
        self.kept.retain(|place| keep(place.page));
        self.fresh.retain(|place| keep(place.page));
    }
}

#[cfg(test)]
mod tests {
    use crate::residency::{Arrival, MappedAhead, PageQueue};
    use alloc::vec;
    use alloc::vec::Vec;
    use core::ops::Range;

    const LOCAL: u32 = 2048;
    const WINDOW: u32 = 64;

    fn ahead(pages: usize) -> MappedAhead {
        MappedAhead { likely: pages, possible: pages }
    }

    /// Local memory that is filled by windows.
    struct Memory {
        queue: PageQueue,
        local: u32,
        here: Vec<bool>,
        /// When each page left, from 1 on.
        left: Vec<usize>,
        count: u32,
        clock: usize,
        fetched: u32,
    }

    impl Memory {
        fn new(local: u32) -> Self {
            let pages = (local * 16) as usize;
            let (here, left) = (vec![false; pages], vec![0; pages]);
            Self { queue: PageQueue::new(), local, here, left, count: 0, clock: 0, fetched: 0 }
        }

        fn read(&mut self, pages: Range<u32>) {
            for page in pages {
                if !self.here[page as usize] {
                    (page..page + WINDOW).for_each(|page| self.bring(page));
                }
            }
        }

        fn bring(&mut self, page: u32) {
            let (index, local) = (page as usize, self.local as usize);
            if self.here[index] {
                return;
            }
            if self.left[index] > 0 {
                self.fetched += 1;
                let age = self.clock - self.left[index];
                self.queue.note_back(page, Arrival::InWindow, age, local, true);
            }
            while self.count >= self.local {
                let page = self.queue.pop(ahead(2 * WINDOW as usize), local).unwrap();
                assert!(core::mem::take(&mut self.here[page as usize]), "{page} twice");
                self.queue.note_left(page, local);
                (self.count, self.clock) = (self.count - 1, self.clock + 1);
                self.left[page as usize] = self.clock;
            }
            (self.here[index], self.count) = (true, self.count + 1);
            self.queue.push(page, Arrival::InWindow);
        }

        /// Pages fetched meanwhile.
        fn run(&mut self, rounds: u32, mut round: impl FnMut(&mut Self)) -> u32 {
            let before = self.fetched;
            (0..rounds).for_each(|_| round(self));
            self.fetched - before
        }
    }

    #[test]
    fn a_part_of_a_loop_is_kept_that_is_larger_than_the_memory() {
        for (percent, rest) in [(120, 35), (150, 50), (200, 65), (300, 80)] {
            let mut memory = Memory::new(LOCAL);
            let pages = LOCAL * percent / 100;
            let first = memory.run(4, |memory| memory.read(0..pages));
            assert!(first > pages, "{percent}: {first}");
            let fetched = memory.run(10, |memory| memory.read(0..pages)) / 10;
            assert!(memory.queue.keeps() && fetched < pages * rest / 100, "{percent}: {fetched} of {pages}");
        }
    }

    #[test]
    fn what_is_kept_for_nothing_goes() {
        let mut memory = Memory::new(LOCAL);
        memory.run(10, |memory| memory.read(0..2 * LOCAL));
        assert!(memory.queue.keeps());
        // Another loop.
        memory.run(4, |memory| memory.read(4 * LOCAL..6 * LOCAL));
        let fetched = memory.run(10, |memory| memory.read(4 * LOCAL..6 * LOCAL)) / 10;
        assert!(fetched < 2 * LOCAL * 65 / 100, "{fetched}");
        // One that has room.
        memory.run(6, |memory| memory.read(8 * LOCAL..8 * LOCAL + LOCAL * 3 / 4));
        assert_eq!(memory.run(4, |memory| memory.read(8 * LOCAL..8 * LOCAL + LOCAL * 3 / 4)), 0);
    }

    #[test]
    fn tiles_that_are_used_again_at_once_are_left_alone() {
        // Each by itself has room. First in, first out brings each in once a round.
        let (tile, tiles, again) = (LOCAL / 2, 4, 8);
        let mut memory = Memory::new(LOCAL);
        let rounds = 10;
        let fetched = memory.run(rounds, |memory| {
            for first in (0..tiles).map(|number| number * tile) {
                (0..again).for_each(|_| memory.read(first..first + tile));
            }
        });
        assert!(fetched < rounds * tiles * tile * 11 / 10, "{fetched}");
        // Small ones find room beside what is kept.
        let mut memory = Memory::new(LOCAL);
        let tile = LOCAL / 16;
        let mut round = |memory: &mut Memory| {
            for first in (0..32).map(|number| number * tile) {
                (0..4).for_each(|_| memory.read(first..first + tile));
            }
        };
        memory.run(4, &mut round);
        let fetched = memory.run(10, &mut round) / 10;
        assert!(fetched < 2 * LOCAL * 65 / 100, "{fetched}");
    }

    #[test]
    fn streams_and_small_memories_have_one_queue() {
        let mut memory = Memory::new(LOCAL);
        for _ in 0..3 {
            memory.read(0..15 * LOCAL);
            assert!(!memory.queue.keeps());
        }
        let mut memory = Memory::new(super::LOCAL_MIN as u32 / 2);
        memory.run(20, |memory| memory.read(0..super::LOCAL_MIN as u32));
        assert!(!memory.queue.keeps());
    }

    #[test]
    fn stale_entries_go_while_some_is_kept() {
        let mut memory = Memory::new(LOCAL);
        memory.run(10, |memory| memory.read(0..2 * LOCAL));
        assert!(memory.queue.keeps() && memory.queue.len() == LOCAL as usize);
        memory.queue.retain(|page| page % 2 == 0);
        let left: Vec<u32> = core::iter::from_fn(|| memory.queue.pop(ahead(100), LOCAL as usize)).collect();
        assert!(left.iter().all(|page| page % 2 == 0 && memory.here[*page as usize]), "{left:?}");
        assert!(!left.is_empty() && memory.queue.is_empty() && !memory.queue.keeps());
        // Any numbers at all.
        let mut queue = PageQueue::new();
        for page in 0..100_000 {
            queue.note_back(page, Arrival::InWindow, page as usize % 1000, LOCAL as usize, true);
            queue.push(page, Arrival::InWindow);
            queue.note_left(page, usize::MAX >> 20);
        }
        assert!(queue.keeps());
        queue.note_back(7, Arrival::InWindow, usize::MAX, usize::MAX, true);
        assert!(queue.pop(ahead(usize::MAX), usize::MAX).is_some() && queue.pop(ahead(0), 0).is_some());
    }
}
