//! What is known of a pager besides its counters: a histogram of its reads, what it moved to and from each lender and has there,
//! how soon pages come back, and where its faults are.

use netvm_core::observe::{AGES, HEAT_BINS, Heat, Reuse, TIME_BUCKETS, Times};

/// Lenders that are counted one by one; the last number counts all others, too.
pub const LENDERS_COUNTED: usize = 32;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagerDetail {
    /// How long reads from lenders took, those ahead of demand among them.
    pub reads: Times,
    /// Bytes read from and written to each lender.
    pub lenders: [(u64, u64); LENDERS_COUNTED],
    /// Reads from each lender, and nanoseconds that they took.
    pub lender_reads: [(u64, u64); LENDERS_COUNTED],
    /// How soon evicted pages come back.
    pub reuse: Reuse,
    /// Gauge: bytes of pages that each lender holds, each copy and part counted.
    pub lender_held: [u64; LENDERS_COUNTED],
    /// The most of that whenever it was counted; of several processes the sum.
    pub lender_held_peak: [u64; LENDERS_COUNTED],
    /// Where faults were, from the beginning of the far area on.
    pub heat: Heat,
}

impl PagerDetail {
    /// Words that it takes when it is shared.
    pub(crate) const WORDS: usize = Self::SUMS + LENDERS_COUNTED + 1 + HEAT_BINS;
    /// Those at the front that can be added up, also when their process has ended.
    pub(crate) const SUMS: usize = Self::REUSE + 2 + AGES + LENDERS_COUNTED;
    /// Where the reuse begins.
    const REUSE: usize = TIME_BUCKETS + 4 * LENDERS_COUNTED;

    /// Counts bytes that came from a lender, or went there.
    #[inline]
    pub(crate) fn moved(&mut self, lender: u32, bytes_in: u64, bytes_out: u64) {
        let (sum_in, sum_out) = &mut self.lenders[(lender as usize).min(LENDERS_COUNTED - 1)];
        *sum_in += bytes_in;
        *sum_out += bytes_out;
    }

    /// A read from a lender took so long.
    pub(crate) fn waited(&mut self, lender: u32, ns: u64) {
        self.reads.note(ns);
        let (reads, sum) = &mut self.lender_reads[(lender as usize).min(LENDERS_COUNTED - 1)];
        *reads += 1;
        *sum += ns;
    }

    /// What the lenders hold now, one after the other.
    pub(crate) fn hold(&mut self, bytes: impl Iterator<Item = u64>) {
        self.lender_held = [0; LENDERS_COUNTED];
        for (lender, bytes) in bytes.enumerate() {
            self.lender_held[lender.min(LENDERS_COUNTED - 1)] += bytes;
        }
        for (peak, held) in self.lender_held_peak.iter_mut().zip(self.lender_held) {
            *peak = held.max(*peak);
        }
    }

    /// As words, in an order of its own.
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> + '_ {
        let lenders = self.lenders.iter().chain(&self.lender_reads).flat_map(|&(one, other)| [one, other]);
        let heat = std::iter::once(self.heat.pages_log2().into()).chain(self.heat.counts().iter().copied());
        let held = self.lender_held_peak.iter().chain(&self.lender_held).copied();
        let reuse = [self.reuse.evicted, self.reuse.rescued].into_iter().chain(self.reuse.ages);
        self.reads.counts().iter().copied().chain(lenders).chain(reuse).chain(held).chain(heat)
    }

    /// From such words.
    pub(crate) fn from_words(word: impl Fn(usize) -> u64) -> Self {
        let lenders = TIME_BUCKETS;
        let lender_reads = TIME_BUCKETS + 2 * LENDERS_COUNTED;
        let (peaks, held) = (Self::SUMS - LENDERS_COUNTED, Self::SUMS);
        let reuse = Self::REUSE;
        let heat = held + LENDERS_COUNTED;
        Self {
            reads: Times::from_counts(std::array::from_fn(&word)),
            lenders: std::array::from_fn(|lender| {
                (word(lenders + 2 * lender), word(lenders + 2 * lender + 1))
            }),
            lender_reads: std::array::from_fn(|lender| {
                (word(lender_reads + 2 * lender), word(lender_reads + 2 * lender + 1))
            }),
            reuse: Reuse {
                evicted: word(reuse),
                rescued: word(reuse + 1),
                ages: std::array::from_fn(|range| word(reuse + 2 + range)),
            },
            lender_held: std::array::from_fn(|lender| word(held + lender)),
            lender_held_peak: std::array::from_fn(|lender| word(peaks + lender)),
            heat: Heat::from_parts(word(heat), std::array::from_fn(|bin| word(heat + 1 + bin))),
        }
    }

    /// Adds another's counts.
    pub fn add(&mut self, other: &Self) {
        self.reads.add(&other.reads);
        let sums = self.lenders.iter_mut().chain(&mut self.lender_reads);
        for (sum, more) in sums.zip(other.lenders.iter().chain(&other.lender_reads)) {
            *sum = (sum.0.wrapping_add(more.0), sum.1.wrapping_add(more.1));
        }
        let held = self.lender_held.iter_mut().chain(&mut self.lender_held_peak);
        for (sum, more) in held.zip(other.lender_held.iter().chain(&other.lender_held_peak)) {
            *sum = sum.wrapping_add(*more);
        }
        self.reuse.add(&other.reuse);
        self.heat.add(&other.heat);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_hold_all_of_it() {
        let mut detail = PagerDetail::default();
        detail.waited(3, 30_000);
        detail.moved(3, 4096, 0);
        detail.moved(77, 0, 8192);
        detail.hold([0, 12288].into_iter());
        detail.hold([8192, 4096].into_iter().chain([0; 32]).chain([4096]));
        [1, 5, 100_000].into_iter().for_each(|page| detail.heat.note(page));
        (detail.reuse.evicted, detail.reuse.rescued) = (7, 3);
        [1, 70_000, u32::MAX].into_iter().for_each(|age| detail.reuse.note_back(age));
        let words: Vec<u64> = detail.words().collect();
        assert_eq!(words.len(), PagerDetail::WORDS);
        assert_eq!(PagerDetail::from_words(|index| words[index]), detail);
        assert_eq!((detail.lenders[3], detail.lenders[LENDERS_COUNTED - 1]), ((4096, 0), (0, 8192)));
        let held =
            (detail.lender_held[1], detail.lender_held_peak[1], detail.lender_held[LENDERS_COUNTED - 1]);
        assert_eq!(held, (4096, 12288, 4096));
        let mut sum = detail;
        sum.add(&detail);
        assert_eq!((sum.reads.total(), sum.lenders[3].0, sum.lender_reads[3]), (2, 8192, (2, 60_000)));
        assert_eq!((sum.reuse.evicted, sum.reuse.rescued, sum.reuse.back()), (14, 6, 6));
        assert_eq!((sum.lender_held[0], sum.lender_held_peak[1]), (16384, 24576));
    }
}
