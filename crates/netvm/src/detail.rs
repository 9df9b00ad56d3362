//! What is known of a pager besides its counters: a histogram of its reads, what it moved to and from each lender, and where its faults are.

use netvm_core::observe::{HEAT_BINS, Heat, TIME_BUCKETS, Times};

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
    /// Where faults were, from the beginning of the far area on.
    pub heat: Heat,
}

impl PagerDetail {
    /// Words that it takes when it is shared.
    pub(crate) const WORDS: usize = TIME_BUCKETS + 4 * LENDERS_COUNTED + 1 + HEAT_BINS;
    /// Those at the front that can be added up.
    pub(crate) const SUMS: usize = TIME_BUCKETS + 4 * LENDERS_COUNTED;

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

    /// As words, in an order of its own.
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> + '_ {
        let lenders = self.lenders.iter().chain(&self.lender_reads).flat_map(|&(one, other)| [one, other]);
        let heat = std::iter::once(self.heat.pages_log2().into()).chain(self.heat.counts().iter().copied());
        self.reads.counts().iter().copied().chain(lenders).chain(heat)
    }

    /// From such words.
    pub(crate) fn from_words(word: impl Fn(usize) -> u64) -> Self {
        let lenders = TIME_BUCKETS;
        let (lender_reads, heat) = (TIME_BUCKETS + 2 * LENDERS_COUNTED, Self::SUMS);
        Self {
            reads: Times::from_counts(std::array::from_fn(&word)),
            lenders: std::array::from_fn(|lender| {
                (word(lenders + 2 * lender), word(lenders + 2 * lender + 1))
            }),
            lender_reads: std::array::from_fn(|lender| {
                (word(lender_reads + 2 * lender), word(lender_reads + 2 * lender + 1))
            }),
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
        [1, 5, 100_000].into_iter().for_each(|page| detail.heat.note(page));
        let words: Vec<u64> = detail.words().collect();
        assert_eq!(words.len(), PagerDetail::WORDS);
        assert_eq!(PagerDetail::from_words(|index| words[index]), detail);
        assert_eq!((detail.lenders[3], detail.lenders[LENDERS_COUNTED - 1]), ((4096, 0), (0, 8192)));
        let mut sum = detail;
        sum.add(&detail);
        assert_eq!((sum.reads.total(), sum.lenders[3].0, sum.lender_reads[3]), (2, 8192, (2, 60_000)));
    }
}
