//! What is counted of a pager besides totals: how long reads take, and where faults are. Fixed sizes, so that it can be shared as words.

/// Ranges of times that a [`Times`] tells apart.
pub const TIME_BUCKETS: usize = 96;
/// Ranges of addresses that a [`Heat`] tells apart.
pub const HEAT_BINS: usize = 128;

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

#[cfg(test)]
mod tests {
    use super::*;

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
