//! Prefetch by the program's own past: a record of faults, of this run or of one before, that is followed when the program does the same again.
//!
//! Programs that go over the same data in the same irregular order are what streams do not find. Each thread is followed by itself. Where it has two faults in a
//! row that it, or another, had before, it is expected to want next what was wanted then; once it has, that comes in windows, like those of streams.
//! Whether all of a window is wanted nobody sees, as there are no faults: so one page of some is left out, a *probe*.

use super::record::{BEGINNING, Place, RECORD_MAX, Record, Tail};
use super::stream::MappedAhead;
use alloc::vec::Vec;

/// Threads whose faults are told apart.
const THREADS: usize = 256;
/// Faults that may be missing where one is expected, as what is wanted changes a little.
const MISSED_MAX: u32 = 8;
/// Faults that may be new before the place is given up, and as many for each page that came ahead: visits elsewhere, and pages that were here the last time.
const VISITS_MAX: u32 = 16;
/// A window ends after so many faults that would be of pages that are here, and so does the search for the one that happened.
const PASSED_MAX: usize = 256;
/// Longest window: each page of it is a transfer of its own.
const WINDOW_MAX: u32 = 32;
/// Longest window of which nobody knows yet whether it is wanted; narrower ones have nothing read ahead behind them.
const AHEAD_MIN: u32 = 4;
/// Of so many windows one has a probe,
const PROBED: u32 = 4;
/// or each, while there is less of this: it is one more for each probe that is wanted, up to a bound, and one less for each that is not, down to where
/// nothing comes any more.
const CREDIT_ENOUGH: i8 = 2;
const CREDIT_MAX: i8 = 4;
const CREDIT_MIN: i8 = -3;
/// A probe may be wanted late, by so many windows.
const PROBE_WINDOWS: u8 = 4;
/// Of this, what part of the probes is wanted: each changes that by one part of so many of the difference.
const ALL: u64 = 1 << 16;
const WEIGHT: u64 = 8;
/// Faults in a row that were expected before anything comes,
const NEED_MIN: u32 = 2;
/// more where what came was not wanted, half as many each time it was.
const NEED_MAX: u32 = 1 << 12;
/// What came ahead for a thread that has had none of so many faults may not be wanted soon,
const DUE: u64 = 256;
/// and of so many at all.
const PATIENCE: u64 = 2048;

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whereabouts {
    /// In the program's address space: there is no fault.
    Here,
    /// Somewhere else.
    Away,
    /// Away, and asked for.
    Coming,
    /// There is no such page any more, or it has no contents.
    Nowhere,
}

impl Whereabouts {
    fn is_away(self) -> bool {
        matches!(self, Self::Away | Self::Coming)
    }
}

/// Where a thread is.
#[derive(Clone, Debug)]
struct Follower {
    thread: u32,
    /// When it had its last fault, in faults of all.
    used: u64,
    tail: Tail,
    /// The same fault as the last one that was expected.
    at: Option<Place>,
    /// The same fault as the last one, if that was not: where the thread may be now.
    other: Option<Place>,
    /// What comes ahead ends here, at most [`PASSED_MAX`] faults behind `at`.
    reach: Place,
    /// Pages of it that were brought in,
    brought: u32,
    /// and those of them that had left when they were wanted, or never came.
    missed: u32,
    /// Faults in a row that were expected,
    run: u32,
    /// and faults since that were not.
    visits: u32,
    window: u32,
    /// Windows since the last probe.
    windows: u32,
    /// A page that was left out, and how many windows it may still come late by.
    probe: Option<(u32, u8)>,
    credit: i8,
}

impl Follower {
    fn new(thread: u32, used: u64, tail: Tail) -> Self {
        Self {
            thread,
            used,
            tail,
            at: None,
            other: None,
            reach: 0,
            brought: 0,
            missed: 0,
            run: 0,
            visits: 0,
            window: 0,
            windows: 0,
            probe: None,
            credit: 0,
        }
    }

    fn go_to(&mut self, place: Option<Place>, run: u32) {
        let new = Self::new(self.thread, self.used, self.tail);
        *self = Self { at: place, reach: place.unwrap_or(0), run, ..new };
    }

    /// A probe was wanted, or not.
    fn judge(&mut self, is_wanted: bool, share: &mut u64) {
        self.probe = None;
        self.credit = if is_wanted { (self.credit + 1).min(CREDIT_MAX) } else { self.credit - 1 };
        *share = *share - *share / WEIGHT + if is_wanted { ALL / WEIGHT } else { 0 };
    }
}

/// The record, and who follows it.
#[derive(Clone, Debug)]
pub struct Replay {
    record: Record,
    followers: Vec<Follower>,
    clock: u64,
    need: u32,
    /// What part of the last probes was wanted.
    share: u64,
    /// The first thread is expected to begin as the run before did.
    begins: bool,
    /// What was begun before is another run's.
    loaded: u64,
    asked: u64,
    /// `ALL` times as many.
    wanted: u64,
}

impl Default for Replay {
    fn default() -> Self {
        Self::new()
    }
}

impl Replay {
    /// With an empty record.
    pub fn new() -> Self {
        Self {
            record: Record::new(),
            followers: Vec::new(),
            clock: 0,
            need: NEED_MIN,
            share: ALL,
            begins: false,
            loaded: 0,
            asked: 0,
            wanted: 0,
        }
    }

    /// Takes up the record of another run, from whose beginning on it is followed.
    pub fn load(&mut self, pages: impl ExactSizeIterator<Item = u32>) {
        // What this run records must not take the place of what is followed.
        self.record.make_room(2 * pages.len());
        let mut tail = Tail::default();
        for page in pages {
            self.record.add(&mut tail, page);
            self.begins = true;
        }
        self.loaded = self.record.now();
    }

    /// So many pages may be wanted in turn, 2^28 at most: about as many faults are kept, as far as that can still be had. 2^21 always are.
    pub fn make_room(&mut self, pages: usize) {
        self.record.make_room(pages.min(RECORD_MAX));
    }

    /// Pages that were asked for, and those of them that were wanted, estimated from the part of the probes that was.
    pub fn usefulness(&self) -> (u64, u64) {
        (self.asked, (self.wanted / ALL).min(self.asked))
    }

    /// What is recorded of this run, thread by thread, the oldest first.
    pub fn pages(&self) -> Vec<u32> {
        self.record.pages(self.loaded)
    }

    /// What was mapped ahead, and may not have been used yet.
    pub fn mapped_ahead(&self) -> MappedAhead {
        let of_last = |faults: u64| self.leading(faults).map(|follower| 2 * follower.brought as usize).sum();
        MappedAhead { likely: of_last(DUE), possible: of_last(PATIENCE) }
    }

    /// Those for which something came ahead, and who had one of so many faults.
    fn leading(&self, faults: u64) -> impl Iterator<Item = &Follower> {
        let since = self.clock.saturating_sub(faults);
        self.followers.iter().filter(move |follower| follower.brought > 0 && follower.used >= since)
    }

    /// A page that has contents elsewhere was wanted by `thread`. Puts into `next` what is likely to be wanted after it and is away, up to
    /// `room` pages: the first ones, whose number is returned, to be mapped with it, the others to be fetched. Nothing, with a room of 0.
    pub fn fault(
        &mut self,
        page: u32,
        thread: u32,
        room: usize,
        whereabouts: impl Fn(u32) -> Whereabouts,
        next: &mut Vec<u32>,
    ) -> usize {
        next.clear();
        self.clock += 1;
        let index = self.follower(thread);
        let found = self.look(&self.followers[index], page, &whereabouts);
        let other = match found {
            Some(_) => None,
            None => self.followers[index].other.and_then(|other| self.look_behind(other, page, &whereabouts)),
        };
        let is_late =
            found.is_some_and(|(_, is_behind)| !is_behind) && whereabouts(page) == Whereabouts::Away;
        let (follower, share) = (&mut self.followers[index], &mut self.share);
        if follower.probe.is_some_and(|(probe, _)| probe == page) {
            follower.judge(true, share);
        } else if is_late {
            follower.missed += 1;
        }
        let Some((place, is_behind)) = found else {
            self.visit(index, page, other);
            return 0;
        };
        self.go_on(index, page, place, &whereabouts);
        if is_behind {
            self.end_window(index, place, &whereabouts);
        }
        self.bring(index, page, room, whereabouts, next)
    }

    /// A fault that was not expected, unless at another place, `other`.
    fn visit(&mut self, index: usize, page: u32, other: Option<Place>) {
        let follower = &mut self.followers[index];
        let before = self.record.add(&mut follower.tail, page);
        follower.visits += 1;
        let is_sure = follower.at.is_some() && follower.run >= self.need;
        let is_lost = follower.visits > VISITS_MAX * (1 + follower.brought);
        if is_sure && other.is_none() && !is_lost {
            follower.other = before;
        } else if is_lost || other.or(before).is_some() {
            if follower.brought > 0 {
                self.need = (self.need * 2).min(NEED_MAX);
            }
            follower.go_to(other.or(before), if other.is_some() { 2 } else { 1 });
        }
    }

    /// A fault that was expected at `place`. What is here of what lies before it was wanted, too, without a fault.
    fn go_on(&mut self, index: usize, page: u32, place: Place, whereabouts: impl Fn(u32) -> Whereabouts) {
        let (record, follower) = (&mut self.record, &mut self.followers[index]);
        let mut passed = follower.at.and_then(|at| record.next(at));
        while let Some((at, page)) = passed.filter(|(at, _)| *at != place) {
            if whereabouts(page) == Whereabouts::Here {
                record.add(&mut follower.tail, page);
            }
            passed = record.next(at);
        }
        record.add(&mut follower.tail, page);
        (follower.at, follower.other) = (Some(place), None);
        (follower.run, follower.visits) = (follower.run.saturating_add(1), 0);
    }

    /// All of the last window has been passed: how wide the next one is.
    fn end_window(&mut self, index: usize, place: Place, whereabouts: impl Fn(u32) -> Whereabouts) {
        let Self { followers, need, share, wanted, .. } = self;
        let follower = &mut followers[index];
        if follower.brought > 0 {
            *wanted += u64::from(follower.brought) * *share;
            match follower.probe {
                Some((probe, 1)) if whereabouts(probe).is_away() => follower.judge(false, share),
                Some((_, 1)) => follower.probe = None,
                Some((probe, left)) => follower.probe = Some((probe, left - 1)),
                None => {}
            }
            if follower.credit < CREDIT_MIN {
                *need = (*need * 4).min(NEED_MAX);
                follower.go_to(Some(place), 0);
            } else if follower.missed > follower.window / 4 {
                // They had left already, or there was no room for them.
                follower.window /= 2;
            } else if follower.credit > 0 {
                *need = (*need / 2).max(NEED_MIN);
                follower.window = (follower.window * 2).min(WINDOW_MAX);
            } else {
                follower.window = (follower.window * 2).min(AHEAD_MIN);
            }
        }
        (follower.reach, follower.brought, follower.missed) = (place, 0, 0);
    }

    /// What comes ahead of where a thread is that has had a fault on `own`.
    fn bring(
        &mut self,
        index: usize,
        own: u32,
        room: usize,
        whereabouts: impl Fn(u32) -> Whereabouts,
        next: &mut Vec<u32>,
    ) -> usize {
        let others = self.leading(DUE).count();
        let room = room / others.max(1);
        let Self { record, followers, need, asked, .. } = self;
        let follower = &mut followers[index];
        // What is left of a window did not all come, and is not asked for twice.
        if follower.at != Some(follower.reach) || follower.run < *need || room == 0 {
            return 0;
        }
        follower.window = follower.window.max(2);
        let window = follower.window as usize;
        let mut place = follower.reach;
        let mut take = |pages: usize, next: &mut Vec<u32>| {
            for _ in 0..PASSED_MAX {
                if next.len() >= pages.min(room) {
                    break;
                }
                let Some((passed, page)) = record.next(place) else { break };
                place = passed;
                if page != own && whereabouts(page).is_away() && !next.contains(&page) {
                    next.push(page);
                }
            }
            place
        };
        follower.reach = take(window, next);
        let mut mapped = next.len();
        follower.windows += 1;
        let is_probed = follower.credit < CREDIT_ENOUGH || follower.windows >= PROBED;
        if is_probed && follower.probe.is_none() && mapped >= AHEAD_MIN as usize {
            // Any of them, the first of those that are only fetched.
            mapped -= 1;
            next[(self.clock % mapped as u64) as usize..].rotate_left(1);
            (follower.probe, follower.windows) = (Some((next[mapped], PROBE_WINDOWS)), 0);
        }
        follower.brought = mapped as u32;
        *asked += mapped as u64;
        if window >= AHEAD_MIN as usize {
            take(next.len() + window, next);
        }
        mapped
    }

    /// The fault where the thread is expected, or a little behind; and whether that is the last of what came ahead, or behind it.
    fn look(
        &self,
        follower: &Follower,
        page: u32,
        whereabouts: impl Fn(u32) -> Whereabouts,
    ) -> Option<(Place, bool)> {
        let mut at = follower.at?;
        if let Some(place) = self.look_behind(follower.reach, page, whereabouts) {
            return Some((place, true));
        }
        while at != follower.reach {
            let (next, expected) = self.record.next(at)?;
            if expected == page {
                return Some((next, next == follower.reach));
            }
            at = next;
        }
        None
    }

    /// The fault on this page behind a place, or a little further.
    fn look_behind(
        &self,
        mut place: Place,
        page: u32,
        whereabouts: impl Fn(u32) -> Whereabouts,
    ) -> Option<Place> {
        let mut missed = 0;
        for _ in 0..PASSED_MAX {
            let (next, expected) = self.record.next(place)?;
            if expected == page {
                return Some(next);
            }
            missed += u32::from(whereabouts(expected).is_away());
            if missed > MISSED_MAX {
                return None;
            }
            place = next;
        }
        None
    }

    /// Who follows this thread, in place of the one that has had no fault for longest if there are too many.
    fn follower(&mut self, thread: u32) -> usize {
        let clock = self.clock;
        let known = self.followers.iter().position(|follower| follower.thread == thread);
        let index = known.unwrap_or_else(|| {
            let mut new = Follower::new(thread, clock, Tail::default());
            if core::mem::take(&mut self.begins) {
                new.go_to(Some(BEGINNING), NEED_MIN);
            }
            if self.followers.len() < THREADS {
                self.followers.push(new);
                return self.followers.len() - 1;
            }
            let oldest = self.followers.iter().enumerate().min_by_key(|(_, follower)| follower.used);
            let index = oldest.map_or(0, |(index, _)| index);
            // The record goes on where the other's ended, so as not to have gaps.
            new.tail = self.followers[index].tail;
            self.followers[index] = new;
            index
        });
        self.followers[index].used = clock;
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::{BTreeSet, VecDeque};
    use alloc::vec;

    fn at(here: bool) -> Whereabouts {
        if here { Whereabouts::Here } else { Whereabouts::Away }
    }

    #[derive(Default)]
    struct Random(u64);

    impl Random {
        fn below(&mut self, end: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) % end
        }
    }

    /// What faults, and what came ahead, of accesses with so many pages local, first in, first out.
    #[derive(Default)]
    struct Memory {
        replay: Replay,
        local: usize,
        here: BTreeSet<u32>,
        queue: VecDeque<u32>,
        next: Vec<u32>,
        faults: usize,
        brought: usize,
        /// Pages that came ahead and left without being used.
        ahead: BTreeSet<u32>,
        /// Any page leaves, but for the last ones, in place of the first.
        is_random: bool,
        random: Random,
        useless: usize,
    }

    impl Memory {
        fn new(local: usize) -> Self {
            Self { local, ..Self::default() }
        }

        fn come(&mut self, page: u32) {
            if !self.here.insert(page) {
                return;
            }
            self.queue.push_back(page);
            if self.queue.len() > self.local {
                if self.is_random {
                    let at = self.random.below(self.local as u64 - 200) as usize;
                    self.queue.swap(0, at);
                }
                let gone = self.queue.pop_front().unwrap();
                self.here.remove(&gone);
                self.useless += usize::from(self.ahead.remove(&gone));
            }
        }

        fn access(&mut self, page: u32, thread: u32) {
            self.ahead.remove(&page);
            if self.here.contains(&page) {
                return;
            }
            self.faults += 1;
            let mut next = core::mem::take(&mut self.next);
            let here = &self.here;
            let mapped =
                self.replay.fault(page, thread, self.local / 8, |page| at(here.contains(&page)), &mut next);
            self.brought += mapped;
            for &page in &next[..mapped] {
                self.come(page);
                self.ahead.insert(page);
            }
            self.come(page);
            self.next = next;
        }

        /// Faults of these accesses, and pages that came with them.
        fn run(&mut self, accesses: impl IntoIterator<Item = u32>) -> (usize, usize) {
            let before = (self.faults, self.brought);
            accesses.into_iter().for_each(|page| self.access(page, 1));
            (self.faults - before.0, self.brought - before.1)
        }
    }

    fn shuffled(pages: u32, seed: u64) -> Vec<u32> {
        let mut random = Random(seed);
        let mut order: Vec<u32> = (0..pages).map(|page| page * 7 + 3).collect();
        for index in (1..order.len()).rev() {
            order.swap(index, random.below(index as u64 + 1) as usize);
        }
        order
    }

    #[test]
    fn the_second_pass_in_any_order_comes_in_windows() {
        let order = shuffled(20_000, 1);
        let mut memory = Memory::new(10_000);
        assert_eq!(memory.run(order.iter().copied()), (20_000, 0));
        for _ in 0..4 {
            let (faults, brought) = memory.run(order.iter().copied());
            assert!(faults < 850 && brought < 20_200, "{faults} {brought}");
        }
        assert!(memory.useless < 100, "{}", memory.useless);
        let (asked, wanted) = memory.replay.usefulness();
        assert!(asked as usize == memory.brought && wanted + 64 >= asked, "{asked} {wanted}");
        let ahead = memory.replay.mapped_ahead();
        assert_eq!((ahead.likely, ahead.possible), (64, 64));
    }

    #[test]
    fn what_stays_here_is_passed_over_and_remembered() {
        let order = shuffled(20_000, 1);
        let mut memory = Memory::new(15_000);
        memory.run(order.iter().copied());
        // Anything of it.
        for round in 0..4 {
            let mut random = Random(round);
            for _ in 0..6000 {
                memory.come(order[random.below(20_000) as usize]);
            }
            let (faults, brought) = memory.run(order.iter().copied());
            assert!(faults < 1200 && brought < 20_000, "{round}: {faults} {brought}");
        }
    }

    #[test]
    fn objects_that_share_pages_are_told_apart() {
        // Sixteen of each page, in a random order: each page is wanted in sixteen places.
        let mut random = Random(9);
        let order: Vec<u32> = (0..160_000).map(|_| random.below(10_000) as u32).collect();
        let mut memory = Memory::new(4_000);
        let (first, brought) = memory.run(order.iter().copied());
        assert!(brought < first / 50, "{brought} of {first}");
        let (faults, brought) = memory.run(order.iter().copied());
        assert!(faults < first / 8 && brought < first * 5 / 4, "{faults} {brought} of {first}");
    }

    #[test]
    fn what_was_here_and_has_left_is_learnt_from_pass_to_pass() {
        // Objects of two pages, sixteen of each page: by their faults alone a pass is known in parts.
        let mut random = Random(9);
        let objects: Vec<u32> = (0..80_000).map(|_| random.below(10_000) as u32).collect();
        let order: Vec<u32> = objects.iter().flat_map(|&page| [page, (page + 1) % 10_000]).collect();
        let mut memory = Memory { is_random: true, ..Memory::new(5_000) };
        let passes: Vec<usize> = (0..6).map(|_| memory.run(order.iter().copied()).0).collect();
        assert!(passes[1] < passes[0] / 2 && passes[5] < passes[0] / 5, "{passes:?}");
        assert!(memory.useless < passes[0] / 50, "{}", memory.useless);
    }

    #[test]
    fn faults_that_are_missing_or_new_do_not_lose_the_place() {
        let order = shuffled(20_000, 2);
        let mut memory = Memory::new(5_000);
        memory.run(order.iter().copied());
        let mut random = Random(3);
        let mut again = Vec::new();
        for &page in &order {
            match random.below(100) {
                0..5 => {}
                5..10 => again.extend([page, 1_000_000 + random.below(1000) as u32]),
                _ => again.push(page),
            }
        }
        let (faults, brought) = memory.run(again.iter().copied());
        assert!(faults < 4_000 && brought < 21_000, "{faults} {brought}");
        assert!(memory.useless < 1600, "{}", memory.useless);
    }

    #[test]
    fn threads_are_followed_by_themselves() {
        let orders: Vec<Vec<u32>> = (0..8).map(|thread| shuffled(4_000, thread + 20)).collect();
        let mut memory = Memory::new(8_000);
        let mut random = Random(4);
        let mut passes = Vec::new();
        for _ in 0..4 {
            // Never in the same order of threads.
            let mut at = [0; 8];
            let before = memory.faults;
            while at.iter().any(|&at| at < 4_000) {
                let thread = random.below(8) as usize;
                if let Some(page) = orders[thread].get(at[thread]) {
                    memory.access(page + thread as u32 * 100_000, thread as u32);
                    at[thread] += 1;
                }
            }
            passes.push(memory.faults - before);
        }
        assert!(passes[0] == 32_000 && passes[1..].iter().all(|&faults| faults < 2_000), "{passes:?}");
        // What one has done another does.
        let mut other = Memory { replay: memory.replay, ..Memory::new(8_000) };
        for page in &orders[3] {
            other.access(page + 300_000, 77);
        }
        assert!(other.faults < 300, "{}", other.faults);
    }

    #[test]
    fn a_record_of_another_run_is_followed_from_its_beginning() {
        // Each page several times.
        let record: Vec<u32> = (0..5).flat_map(|pass| shuffled(3000, pass)).collect();
        let mut replay = Replay::new();
        replay.load(record.iter().copied());
        let mut memory = Memory { replay, ..Memory::new(1000) };
        let (faults, brought) = memory.run(record.iter().copied());
        assert!(faults < 700 && brought < 15_500, "{faults} {brought}");
        assert!(memory.replay.pages().len() + 64 >= record.len(), "as if none had been foreseen");
        let mut empty = Replay::new();
        empty.load(core::iter::empty());
        assert!(empty.pages().is_empty());
    }

    #[test]
    fn what_has_no_order_is_left_alone() {
        let mut memory = Memory::new(2_000);
        let mut random = Random(5);
        let uniform: Vec<u32> = (0..200_000).map(|_| random.below(10_000) as u32).collect();
        let (faults, brought) = memory.run(uniform);
        assert!(brought < faults / 500, "{brought} pages for nothing, {faults} faults");
        let mut zipf = Memory::new(1_000);
        // As likely in each power of two.
        let mut accesses = Vec::new();
        for _ in 0..400_000 {
            let power = random.below(14);
            accesses.push(random.below(1 << power) as u32);
        }
        let (faults, brought) = zipf.run(accesses);
        assert!(brought < faults / 50, "{brought} pages for nothing, {faults} faults");
        // And is found again when it has one.
        let order = shuffled(10_000, 6);
        for _ in 0..4 {
            memory.run(order.iter().copied());
        }
        let (faults, _) = memory.run(order.iter().copied());
        assert!(faults < 1_000, "{faults}");
    }

    #[test]
    fn orders_that_seem_to_come_back_and_do_not_cost_little() {
        // Two in a row, and then something else: pairs of pages that go together.
        let mut random = Random(8);
        let mut memory = Memory::new(2_000);
        let pairs: Vec<u32> = (0..200_000)
            .flat_map(|_| {
                let pair = random.below(4_000) as u32 * 2;
                [pair, pair + 1]
            })
            .collect();
        let (faults, brought) = memory.run(pairs);
        assert!(brought < faults / 100, "{brought} pages for nothing, {faults} faults");
        // Four in a row.
        let mut fours = Memory::new(2_000);
        let accesses: Vec<u32> = (0..100_000)
            .flat_map(|_| {
                let four = random.below(3_000) as u32 * 4;
                [four, four + 1, four + 2, four + 3]
            })
            .collect();
        let (faults, _) = fours.run(accesses);
        assert!(fours.useless < faults / 30, "{} pages for nothing, {faults} faults", fours.useless);
    }

    #[test]
    fn whatever_happens_no_more_comes_than_there_is_room_for() {
        for seed in 1..200 {
            let mut random = Random(seed);
            let pages = [3, 10, 100, 2000][random.below(4) as usize];
            let threads = [1, 3, 300][random.below(3) as usize];
            let mut replay = Replay::new();
            let record: Vec<u32> = (0..random.below(500)).map(|_| random.below(2 * pages) as u32).collect();
            replay.load(record.into_iter());
            let mut walk: Vec<u32> = (0..300).map(|_| random.below(pages) as u32).collect();
            let mut state: Vec<u64> = vec![1; 2 * pages as usize];
            let mut next = Vec::new();
            for step in 0..3000 {
                if step % 500 == 0 {
                    let likely = random.below(4);
                    state.iter_mut().for_each(|state| *state = (likely + random.below(2)) % 4);
                    replay.make_room(random.below(1 << 22) as usize);
                    walk.rotate_left(random.below(300) as usize);
                }
                let page = if random.below(8) > 0 { walk[step % 300] } else { random.below(pages) as u32 };
                let whereabouts = |page: u32| match state[page as usize] {
                    0 => Whereabouts::Here,
                    1 => Whereabouts::Away,
                    2 => Whereabouts::Coming,
                    _ => Whereabouts::Nowhere,
                };
                let room = [0, 1, 3, 1000][random.below(4) as usize];
                let thread = random.below(threads) as u32;
                let mapped = replay.fault(page, thread, room, whereabouts, &mut next);
                assert!(mapped <= next.len() && mapped <= WINDOW_MAX as usize && next.len() <= room);
                assert!(!next.contains(&page) && next.iter().all(|&page| whereabouts(page).is_away()));
                assert_eq!(next.iter().collect::<BTreeSet<_>>().len(), next.len());
                next.iter().take(mapped).for_each(|&page| state[page as usize] = 0);
                let changed = random.below(pages) as usize;
                state[changed] = random.below(4);
                let (asked, wanted) = replay.usefulness();
                let ahead = replay.mapped_ahead();
                assert!(wanted <= asked && ahead.likely <= ahead.possible);
            }
            assert!(replay.pages().iter().all(|&page| page < 2 * pages as u32));
        }
    }

    #[test]
    fn there_may_be_no_room() {
        let order = shuffled(5_000, 7);
        let mut replay = Replay::new();
        let mut next = Vec::new();
        for &page in order.iter().cycle().take(20_000) {
            assert_eq!(replay.fault(page, 1, 0, |_| Whereabouts::Away, &mut next), 0);
            assert!(next.is_empty());
        }
        assert_eq!(replay.fault(order[0], 1, 3, |_| Whereabouts::Away, &mut next), 2);
        assert_eq!(next, vec![order[1], order[2]]);
        // It did not all come.
        assert_eq!(replay.fault(order[1], 1, 3, |_| Whereabouts::Away, &mut next), 0);
        for thread in 0..200 {
            replay.fault(thread, thread, 3, |_| Whereabouts::Here, &mut next);
        }
    }
}
