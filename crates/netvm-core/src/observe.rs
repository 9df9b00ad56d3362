//! What is counted of a pager besides totals: how long reads take, where faults are, and how soon pages come back. Fixed sizes, so that it can be shared as words.

/// Ranges of times that a [`Times`] tells apart.
pub const TIME_BUCKETS: usize = 96;
/// Ranges of addresses that a [`Heat`] tells apart.
pub const HEAT_BINS: usize = 128;
/// Ranges of ages that a [`Reuse`] tells apart.
pub const AGES: usize = 104;

/// Everything shorter is in the first bucket: 2^10 ns.
const OCTAVE_MIN: u32 = 10;
/// Buckets for each doubling, as a power of two.
const STEPS_LOG2: u32 = 2;
const STEPS: u32 = 1 << STEPS_LOG2;

/// A histogram of times: four buckets for each doubling, from 1 us to 17 s. A quantile is at most a quarter too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    counts: [u64; TIME_BUCKETS],
}

impl Default for Times {
    fn default() -> Self {
        Self { counts: [0; TIME_BUCKETS] }
    }
}

impl Times {
    /// From what [`Times::counts`] returned.
    pub fn from_counts(counts: [u64; TIME_BUCKETS]) -> Self {
        Self { counts }
    }

    /// How many times are in each bucket.
    pub fn counts(&self) -> &[u64; TIME_BUCKETS] {
        &self.counts
    }

    /// The end of a bucket, in nanoseconds: times in it are shorter. The last one has no end.
    pub fn end_ns(bucket: usize) -> u64 {
        let (octave, step) = (bucket as u32 / STEPS + OCTAVE_MIN, bucket as u32 % STEPS);
        u64::from(STEPS + step + 1) << (octave - STEPS_LOG2)
    }

    fn bucket(ns: u64) -> usize {
        let octave = ns.max(1).ilog2();
        if octave < OCTAVE_MIN {
            return 0;
        }
        let step = (ns >> (octave - STEPS_LOG2)) as u32 & (STEPS - 1);
        (((octave - OCTAVE_MIN) * STEPS + step) as usize).min(TIME_BUCKETS - 1)
    }

    /// Counts a time.
    #[inline]
    pub fn note(&mut self, ns: u64) {
        self.counts[Self::bucket(ns)] += 1;
    }

    /// How many were counted.
    pub fn total(&self) -> u64 {
        self.counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The end of the bucket that holds the quantile `share` (0 to 1), in nanoseconds; `None` when nothing was counted.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        let total = self.total();
        let rank = ((total as f64 * share) as u64).min(total.saturating_sub(1));
        let mut before = 0u64;
        for (bucket, count) in self.counts.iter().enumerate() {
            before = before.saturating_add(*count);
            if before > rank {
                return Some(Self::end_ns(bucket));
            }
        }
        None
    }

    /// Adds another's counts.
    pub fn add(&mut self, other: &Self) {
        for (count, other) in self.counts.iter_mut().zip(other.counts) {
            *count = count.wrapping_add(other);
        }
    }

    /// What was counted since `old`. A count that has become smaller is another's.
    #[must_use]
    pub fn since(&self, old: &Self) -> Self {
        let mut new = *self;
        for (count, old) in new.counts.iter_mut().zip(old.counts) {
            *count = count.checked_sub(old).unwrap_or(*count);
        }
        new
    }
}

/// Where faults are: counts for neighbouring ranges of pages, all of the same length from page 0 on, which doubles when a page lies behind
/// the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heat {
    /// A bin has so many pages, as a power of two.
    shift: u32,
    counts: [u64; HEAT_BINS],
}

impl Default for Heat {
    fn default() -> Self {
        Self { shift: 0, counts: [0; HEAT_BINS] }
    }
}

impl Heat {
    /// From what [`Heat::pages_log2`] and [`Heat::counts`] returned; whoever changes it meanwhile may have made it a little wrong.
    pub fn from_parts(pages_log2: u64, counts: [u64; HEAT_BINS]) -> Self {
        Self { shift: pages_log2.min(31) as u32, counts }
    }

    /// Pages of a bin, as a power of two.
    pub fn pages_log2(&self) -> u32 {
        self.shift
    }

    /// The faults in each bin.
    pub fn counts(&self) -> &[u64; HEAT_BINS] {
        &self.counts
    }

    /// Counts a fault at a page.
    #[inline]
    pub fn note(&mut self, page: u32) {
        while page >> self.shift >= HEAT_BINS as u32 {
            self.coarsen();
        }
        self.counts[(page >> self.shift) as usize] += 1;
    }

    fn coarsen(&mut self) {
        let old = self.counts;
        self.counts = [0; HEAT_BINS];
        for (bin, pair) in old.chunks(2).enumerate() {
            self.counts[bin] = pair.iter().fold(0, |sum, count| sum.wrapping_add(*count));
        }
        self.shift += 1;
    }

    /// In bins of at least so many pages.
    #[must_use]
    pub fn at(mut self, pages_log2: u32) -> Self {
        while self.shift < pages_log2.min(31) {
            self.coarsen();
        }
        self
    }

    /// Adds another's counts.
    pub fn add(&mut self, other: &Self) {
        let (mut sum, other) = (self.at(other.shift), other.at(self.shift));
        for (count, other) in sum.counts.iter_mut().zip(other.counts) {
            *count = count.wrapping_add(other);
        }
        *self = sum;
    }

    /// What was counted since `old`. A count that has become smaller is another's.
    #[must_use]
    pub fn since(&self, old: &Self) -> Self {
        let (mut new, old) = (self.at(old.shift), old.at(self.shift));
        for (count, old) in new.counts.iter_mut().zip(old.counts) {
            *count = count.checked_sub(old).unwrap_or(*count);
        }
        new
    }
}

/// After how many evictions pages that were evicted are brought in again. From that follows what more local memory would save, by the model of
/// average eviction times: Hu et al., *Kinetic Modeling of Data Eviction in Cache*, USENIX ATC 2016, where the pages that have left are the
/// tail of the queue of a larger memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reuse {
    /// Pages that were evicted: the clock of ages.
    pub evicted: u64,
    /// Of these, pages that were wanted again while they were still in a local frame.
    pub rescued: u64,
    /// Pages brought in by their age, four ranges for each doubling.
    pub ages: [u64; AGES],
}

impl Default for Reuse {
    fn default() -> Self {
        Self { evicted: 0, rescued: 0, ages: [0; AGES] }
    }
}

impl Reuse {
    /// Counts a page that is brought in when so many pages have been evicted since it was.
    #[inline]
    pub fn note_back(&mut self, age: u32) {
        self.ages[Self::range_of(age)] += 1;
    }

    fn range_of(age: u32) -> usize {
        let octave = age.max(1).ilog2();
        if octave < STEPS_LOG2 {
            return age as usize;
        }
        let step = age >> (octave - STEPS_LOG2) & (STEPS - 1);
        (((octave - STEPS_LOG2 + 1) << STEPS_LOG2 | step) as usize).min(AGES - 1)
    }

    /// The first age of a range.
    fn start(range: usize) -> f64 {
        let (octave, step) = (range as u32 >> STEPS_LOG2, range as u32 & (STEPS - 1));
        if octave == 0 { f64::from(step) } else { (u64::from(STEPS + step) << (octave - 1)) as f64 }
    }

    /// Pages brought in.
    pub fn back(&self) -> u64 {
        self.ages.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// How many of the pages brought in would have been with so many more pages of local memory: an estimate for queues in the order of
    /// use, of one program that does the same all the time.
    pub fn back_with(&self, more_pages: u64) -> u64 {
        let mut still_out = self.evicted.saturating_sub(self.rescued) as f64;
        let mut left = self.back() as f64;
        // Pages that left up to `age` evictions ago and are out, and how many that is.
        let (mut room, clock) = (more_pages as f64, self.evicted.max(1) as f64);
        for (range, &count) in self.ages.iter().enumerate() {
            let (length, count) = (Self::start(range + 1) - Self::start(range), count as f64);
            // Halfway through it half of them have come back.
            let out = length * (still_out - count / 2.0).max(0.0) / clock;
            if out >= room {
                return (left - count * room / out.max(f64::MIN_POSITIVE)).max(0.0) as u64;
            }
            room -= out;
            still_out -= count;
            left -= count;
        }
        left.max(0.0) as u64
    }

    /// What was counted since `old`. A count that has become smaller is another's.
    #[must_use]
    pub fn since(&self, old: &Self) -> Self {
        let grown = |new: u64, old: u64| new.checked_sub(old).unwrap_or(new);
        Self {
            evicted: grown(self.evicted, old.evicted),
            rescued: grown(self.rescued, old.rescued),
            ages: core::array::from_fn(|range| grown(self.ages[range], old.ages[range])),
        }
    }

    /// Adds another's counts.
    pub fn add(&mut self, other: &Self) {
        self.evicted = self.evicted.wrapping_add(other.evicted);
        self.rescued = self.rescued.wrapping_add(other.rescued);
        for (count, other) in self.ages.iter_mut().zip(other.ages) {
            *count = count.wrapping_add(other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::VecDeque;
    use alloc::vec;
    use alloc::vec::Vec;

    #[test]
    fn ranges_of_ages_are_neighbours() {
        for range in 0..AGES {
            let start = Reuse::start(range);
            assert!(start < Reuse::start(range + 1), "{range}");
            assert_eq!(Reuse::range_of(start as u32), range);
            let end = (Reuse::start(range + 1) - 1.0) as u32;
            assert_eq!(Reuse::range_of(end), range, "{end}");
        }
        // Of the clock's 27 bits all are told apart.
        assert!(Reuse::start(AGES) >= f64::from(1u32 << 27));
        assert_eq!(Reuse::range_of(u32::MAX), AGES - 1);
    }

    /// What a local memory that evicts in the order of use brings in, pages seen for the first time left out.
    fn run(trace: &[u32], pages: usize, frames: usize) -> Reuse {
        let (mut reuse, mut last_use) = (Reuse::default(), vec![0usize; pages]);
        let (mut left_at, mut local) = (vec![None; pages], vec![false; pages]);
        let mut queue = VecDeque::new();
        let mut held = 0;
        for (now, &page) in trace.iter().enumerate() {
            let page = page as usize;
            last_use[page] = now;
            queue.push_back((now, page));
            if core::mem::replace(&mut local[page], true) {
                continue;
            }
            held += 1;
            if let Some(left_at) = left_at[page] {
                reuse.note_back((reuse.evicted - left_at) as u32);
            }
            while held > frames {
                let (used, victim) = queue.pop_front().unwrap();
                if last_use[victim] == used && local[victim] {
                    local[victim] = false;
                    held -= 1;
                    reuse.evicted += 1;
                    left_at[victim] = Some(reuse.evicted);
                }
            }
        }
        reuse
    }

    #[test]
    fn what_more_memory_saves_is_foretold() {
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        const PAGES: usize = 4000;
        let uniform: Vec<u32> = (0..200_000).map(|_| random(PAGES as u64) as u32).collect();
        // Half of the accesses go to an eighth of the pages, and so on.
        let skewed: Vec<u32> = (0..300_000)
            .map(|_| {
                let below = (0..3).fold(PAGES as u64, |below, _| below / [1, 8][random(2) as usize]);
                random(below) as u32
            })
            .collect();
        let circle: Vec<u32> = (0..200_000).map(|at| at % PAGES as u32).collect();
        let mixed: Vec<u32> = (0..200_000u32)
            .map(|at| if at % 2 == 0 { at / 2 % 3000 } else { 3000 + random(1000) as u32 })
            .collect();
        for (name, trace) in [("uniform", uniform), ("skewed", skewed), ("circle", circle), ("mixed", mixed)]
        {
            let now = run(&trace, PAGES, 500);
            assert_eq!(now.back_with(0), now.back(), "{name}");
            for frames in [600, 750, 1000, 1500, 2000, 3000, 4000] {
                let (foretold, found) =
                    (now.back_with(frames as u64 - 500), run(&trace, PAGES, frames).back());
                let wrong = foretold.abs_diff(found) as f64 / now.back() as f64;
                assert!(
                    wrong < 0.08,
                    "{name}, {frames} frames: {foretold} foretold, {found} of {}",
                    now.back()
                );
            }
        }
    }

    #[test]
    fn any_counts_foretell_something() {
        let mut reuse = Reuse::default();
        assert_eq!(reuse.back_with(7), 0);
        reuse = Reuse { evicted: 1, rescued: u64::MAX, ages: [u64::MAX; AGES] };
        assert!(reuse.back_with(1) <= reuse.back());
        let before = reuse;
        reuse.add(&before);
        assert_eq!((reuse.since(&before).evicted, before.since(&before).back()), (1, 0));
        reuse.back_with(u64::MAX);
    }

    #[test]
    fn buckets_are_neighbours_and_hold_what_they_say() {
        let mut last = 0;
        for bucket in 0..TIME_BUCKETS {
            let end = Times::end_ns(bucket);
            assert!(end > last && (bucket == 0 || end - last <= last.div_ceil(4)), "{bucket}: {last} {end}");
            assert_eq!(Times::bucket(end - 1), bucket);
            assert_eq!(Times::bucket(end), (bucket + 1).min(TIME_BUCKETS - 1));
            last = end;
        }
        assert!(last > 16_000_000_000);
        assert_eq!((Times::bucket(0), Times::bucket(u64::MAX)), (0, TIME_BUCKETS - 1));
    }

    #[test]
    fn quantiles_are_at_most_a_quarter_too_long() {
        let mut times = Times::default();
        assert_eq!(times.quantile_ns(0.5), None);
        for ns in 1..=1000u64 {
            times.note(ns * 1000);
        }
        for (share, exact) in [(0.0, 1_000), (0.5, 500_000), (0.99, 990_000), (1.0, 1_000_000)] {
            let found = times.quantile_ns(share).unwrap();
            assert!(found >= exact && found <= exact + exact / 4 + 1024, "{share}: {found}");
        }
        let old = times;
        times.note(5_000_000);
        assert_eq!(times.since(&old).total(), 1);
        assert_eq!(times.since(&old).quantile_ns(0.5), Some(5_242_880));
        let mut sum = old;
        sum.add(&old);
        assert_eq!(sum.total(), 2000);
    }

    #[test]
    fn heat_keeps_every_fault_however_far_away_the_next_one_is() {
        let mut heat = Heat::default();
        let mut state = 1u64;
        for round in 0..10_000u64 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            heat.note((state >> 40) as u32 >> (20 - round / 500).min(20));
            assert_eq!(heat.counts.iter().sum::<u64>(), round + 1);
        }
        assert!(heat.pages_log2() > 10);
        heat.note(u32::MAX);
        assert_eq!((heat.pages_log2(), heat.counts[HEAT_BINS - 1]), (25, 1));
        // Bins that have become wider still hold the same pages.
        let mut fine = Heat::default();
        (0..128).for_each(|page| fine.note(page));
        let old = fine;
        fine.note(128);
        assert_eq!((fine.counts[0], fine.counts[63], fine.counts[64]), (2, 2, 1));
        let new = fine.since(&old);
        assert_eq!((new.counts.iter().sum::<u64>(), new.counts[64]), (1, 1));
        fine.add(&old);
        assert_eq!(fine.counts[0], 4);
    }
}
