//! Prefetch by the program's own past: a record of faults, of this run or of one before, that is followed when the program does the same again.
//!
//! Where a page was last wanted, what was wanted after it is likely to be wanted next (temporal streaming: Wenisch et al., ISCA 2005; here for pages,
//! with one record and an index to it). Programs that go over the same data in the same irregular order are what strides do not find.

use alloc::vec::Vec;

/// Faults that are kept: 8 MiB of records.
pub const RECORD_MAX: usize = 1 << 20;
/// How far behind the expected fault the real one is looked for: some faults do not happen again.
const WINDOW: u64 = 64;
/// Pages asked for ahead, at first and at most.
const AHEAD_MIN: u64 = 4;
const AHEAD_MAX: u64 = 64;
/// Earlier places of a page that are looked at.
const PLACES_MAX: usize = 16;
/// After so many pages brought in ahead it is asked whether that was good for something,
const TRIAL: u32 = 512;
/// which it was if one in so many was wanted,
const USED_MIN: u32 = 3;
/// and if not, nothing is brought in for so many faults; each time twice as many.
const PAUSE_MIN: u64 = 8192;
const PAUSE_MAX: u64 = 1 << 24;

/// Where in the record each page is: 1 more than the number of its last fault, 0 for none.
pub trait Index {
    /// What was set, or 0.
    fn get(&self, page: u32) -> u64;
    /// Sets it.
    fn set(&mut self, page: u32, place: u64);
}

/// The record. Faults are numbered from 0 on; the last [`RECORD_MAX`] are known.
#[derive(Clone, Debug)]
pub struct Replay {
    pages: Vec<u32>,
    /// For each, 1 more than the fault before on the same page, 0 for none that is known; modulo 2^32.
    before: Vec<u32>,
    head: u64,
    /// The fault that is expected,
    cursor: Option<u64>,
    /// and one that is if the program has gone somewhere else.
    other: Option<u64>,
    /// The first that was not asked for.
    asked: u64,
    ahead: u64,
    trial_asked: u32,
    trial_used: u32,
    pause: u64,
    paused_until: u64,
    asked_all: u64,
    used_all: u64,
    /// Faults before this one are another run's.
    loaded: u64,
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
            pages: Vec::new(),
            before: Vec::new(),
            head: 0,
            cursor: None,
            other: None,
            asked: 0,
            ahead: AHEAD_MIN,
            trial_asked: 0,
            trial_used: 0,
            pause: PAUSE_MIN,
            paused_until: 0,
            asked_all: 0,
            used_all: 0,
            loaded: 0,
        }
    }

    /// Takes up the record of another run, from whose beginning on it is followed.
    pub fn load(&mut self, pages: impl Iterator<Item = u32>, index: &mut impl Index) {
        for page in pages {
            self.record(page, index);
        }
        let first = self.oldest();
        (self.cursor, self.asked) = (Some(first), first);
        self.loaded = self.head;
    }

    /// Pages that were asked for, and those of them that were wanted then.
    pub fn usefulness(&self) -> (u64, u64) {
        (self.asked_all, self.used_all)
    }

    /// What is recorded of this run, the oldest first.
    pub fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        (self.oldest().max(self.loaded)..self.head).map(|fault| self.page(fault))
    }

    fn oldest(&self) -> u64 {
        self.head.saturating_sub(RECORD_MAX as u64)
    }

    fn page(&self, fault: u64) -> u32 {
        self.pages[fault as usize % RECORD_MAX]
    }

    fn record(&mut self, page: u32, index: &mut impl Index) {
        let place = self.head as usize % RECORD_MAX;
        let before = index.get(page) as u32;
        if place == self.pages.len() {
            self.pages.push(page);
            self.before.push(before);
        } else {
            (self.pages[place], self.before[place]) = (page, before);
        }
        self.head += 1;
        index.set(page, self.head);
    }

    /// A page that has contents elsewhere was wanted. Calls `bring` with those that are likely to be wanted next, each once; false of it
    /// ends that for now.
    pub fn fault(&mut self, page: u32, index: &mut impl Index, mut bring: impl FnMut(u32) -> bool) {
        let end = self.head;
        if let Some(fault) = self.look(self.cursor, page) {
            if fault < self.asked {
                self.trial_used += 1;
                self.used_all += 1;
            }
            (self.cursor, self.other) = (Some(fault + 1), None);
            self.ahead = (self.ahead + 1).min(AHEAD_MAX);
        } else if let Some(fault) = self.look(self.other, page) {
            // Twice in a row elsewhere: that is where the program is.
            self.go_to(fault + 1);
        } else {
            // Something new, or a visit: the place is kept.
            self.other = self.place_of(page, index).map(|fault| fault + 1);
            if let (None, Some(place)) = (self.cursor, self.other) {
                self.go_to(place);
            }
        }
        self.record(page, index);
        let Some(cursor) = self.cursor else { return };
        self.judge();
        if self.head < self.paused_until {
            self.asked = self.asked.max(cursor);
            return;
        }
        let mut next = self.asked.max(cursor).max(self.oldest());
        // Not its own beginning of this very stream.
        let last = (cursor + self.ahead).min(end);
        while next < last {
            if !bring(self.page(next)) {
                break;
            }
            next += 1;
            self.trial_asked += 1;
            self.asked_all += 1;
        }
        self.asked = next;
    }

    /// The next fault on the page, not far from where it is expected.
    fn look(&self, expected: Option<u64>, page: u32) -> Option<u64> {
        let expected = expected?;
        let window = expected.max(self.oldest())..(expected + WINDOW).min(self.head);
        window.into_iter().find(|&fault| self.page(fault) == page)
    }

    fn go_to(&mut self, place: u64) {
        (self.cursor, self.other, self.asked, self.ahead) = (Some(place), None, place, AHEAD_MIN);
    }

    /// Where the page was wanted: after the present place if possible, else last.
    fn place_of(&self, page: u32, index: &impl Index) -> Option<u64> {
        let oldest = self.oldest();
        let is_known = |place: u64| place > oldest && place <= self.head && self.page(place - 1) == page;
        let mut place = Some(index.get(page)).filter(|&place| is_known(place))?;
        let mut best = place;
        let cursor = self.cursor.unwrap_or(u64::MAX);
        for _ in 0..PLACES_MAX {
            // Places are kept modulo 2^32: those of the record are within that.
            let low = u64::from(self.before[(place - 1) as usize % RECORD_MAX]);
            let before = (place & !u64::from(u32::MAX)) | low;
            let before = if before >= place { before.wrapping_sub(1 << 32) } else { before };
            if low == 0 || !is_known(before) || before >= place {
                break;
            }
            place = before;
            if place > cursor {
                best = place;
            }
        }
        Some(best - 1)
    }

    /// Whether what was brought in was good for something.
    fn judge(&mut self) {
        if self.trial_asked < TRIAL {
            return;
        }
        if self.trial_used * USED_MIN < self.trial_asked {
            self.paused_until = self.head + self.pause;
            self.pause = (self.pause * 2).min(PAUSE_MAX);
        } else {
            self.pause = PAUSE_MIN;
        }
        (self.trial_asked, self.trial_used) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::{BTreeMap, BTreeSet};

    #[derive(Default)]
    struct Map(BTreeMap<u32, u64>);

    impl Index for Map {
        fn get(&self, page: u32) -> u64 {
            self.0.get(&page).copied().unwrap_or(0)
        }

        fn set(&mut self, page: u32, place: u64) {
            self.0.insert(page, place);
        }
    }

    struct Random(u64);

    impl Random {
        fn below(&mut self, end: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) % end
        }
    }

    /// Which of the faults had been brought in within the last 256 pages brought in; and how many were brought in.
    fn follow(replay: &mut Replay, index: &mut Map, faults: &[u32]) -> (usize, usize) {
        let (mut recent, mut had): (alloc::collections::VecDeque<u32>, BTreeSet<u32>) = Default::default();
        let (mut hits, mut brought) = (0, 0);
        for &page in faults {
            hits += usize::from(had.contains(&page));
            replay.fault(page, index, |next| {
                brought += 1;
                recent.push_back(next);
                had.insert(next);
                if recent.len() > 256 {
                    let gone = recent.pop_front().unwrap();
                    if !recent.contains(&gone) {
                        had.remove(&gone);
                    }
                }
                true
            });
        }
        (hits, brought)
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
    fn the_second_pass_in_any_order_is_foreseen() {
        let order = shuffled(20_000, 1);
        let (mut replay, mut index) = (Replay::new(), Map::default());
        assert_eq!(follow(&mut replay, &mut index, &order), (0, 0));
        for _ in 0..3 {
            let (hits, brought) = follow(&mut replay, &mut index, &order);
            assert!(hits > 19_900 && brought < 20_200, "{hits} {brought}");
        }
    }

    #[test]
    fn faults_that_are_missing_or_new_do_not_lose_the_place() {
        let order = shuffled(20_000, 2);
        let (mut replay, mut index) = (Replay::new(), Map::default());
        follow(&mut replay, &mut index, &order);
        let mut random = Random(3);
        let mut again = Vec::new();
        for &page in &order {
            match random.below(10) {
                0 => {}
                1 => again.extend([page, 1_000_000 + random.below(1000) as u32]),
                _ => again.push(page),
            }
        }
        let (hits, brought) = follow(&mut replay, &mut index, &again);
        assert!(hits > again.len() * 8 / 10 && brought < again.len() * 13 / 10, "{hits} {brought}");
    }

    #[test]
    fn a_record_of_another_run_is_followed_from_its_beginning() {
        // Each page several times: its last place is the wrong one.
        let mut record = Vec::new();
        for pass in 0..5 {
            record.extend(shuffled(3000, pass));
        }
        let (mut replay, mut index) = (Replay::new(), Map::default());
        replay.load(record.iter().copied(), &mut index);
        let (hits, brought) = follow(&mut replay, &mut index, &record);
        assert!(hits > 14_500 && brought < 15_500, "{hits} {brought}");
    }

    #[test]
    fn what_has_no_order_is_left_alone() {
        let (mut replay, mut index) = (Replay::new(), Map::default());
        let mut random = Random(5);
        let faults: Vec<u32> = (0..200_000).map(|_| random.below(10_000) as u32).collect();
        let (_, brought) = follow(&mut replay, &mut index, &faults);
        assert!(brought < 8_000, "{brought} pages for nothing");
        // And is found again when it has one.
        let order = shuffled(10_000, 6);
        for _ in 0..20 {
            follow(&mut replay, &mut index, &order);
        }
        let (hits, _) = follow(&mut replay, &mut index, &order);
        assert!(hits > 9_000, "{hits}");
    }

    #[test]
    fn the_record_is_bounded_and_wraps() {
        let order = shuffled(300_000, 7);
        let (mut replay, mut index) = (Replay::new(), Map::default());
        for &page in order.iter().cycle().take(4 * order.len()) {
            replay.fault(page, &mut index, |_| true);
        }
        assert_eq!(replay.pages.len(), RECORD_MAX);
        let (hits, _) = follow(&mut replay, &mut index, &order[..20_000]);
        assert!(hits > 19_000, "{hits}");
        // Room that is refused is asked for again.
        let mut asked = Vec::new();
        replay.fault(order[20_000], &mut index, |page| {
            asked.push(page);
            false
        });
        replay.fault(order[20_001], &mut index, |page| {
            asked.push(page);
            false
        });
        assert_eq!(asked.len(), 2);
        let (asked, used) = replay.usefulness();
        assert!(used <= asked && used > 0);
    }
}
