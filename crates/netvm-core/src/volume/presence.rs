//! Which blocks hold data.

use alloc::vec::Vec;
use core::ops::Range;

use super::BLOCK_BYTES;

/// One bit per block.
#[derive(Clone, Debug)]
pub struct Presence {
    words: Vec<u64>,
    blocks: u64,
    count: u64,
}

impl Presence {
    /// Nothing is present in a range of `bytes`.
    pub fn new(bytes: u64) -> Self {
        let blocks = bytes.div_ceil(BLOCK_BYTES);
        Self { words: alloc::vec![0; blocks.div_ceil(64) as usize], blocks, count: 0 }
    }

    /// Bytes of blocks that are present.
    pub fn bytes(&self) -> u64 {
        self.count * BLOCK_BYTES
    }

    /// Whether a block is present; none behind the end is.
    pub fn has(&self, block: u64) -> bool {
        self.words.get((block / 64) as usize).is_some_and(|word| word >> (block % 64) & 1 != 0)
    }

    /// Sets or clears blocks; those behind the end are left out.
    pub fn set(&mut self, blocks: Range<u64>, present: bool) {
        let end = blocks.end.min(self.blocks);
        let mut block = blocks.start;
        while block < end {
            let bits = (64 - block % 64).min(end - block);
            let mask = (u64::MAX >> (64 - bits)) << (block % 64);
            let word = &mut self.words[(block / 64) as usize];
            let before = word.count_ones();
            *word = if present { *word | mask } else { *word & !mask };
            self.count = self.count + u64::from(word.count_ones()) - u64::from(before);
            block += bits;
        }
    }

    /// The end of the run of blocks that are as `start` is, at most `end`; and whether they are present.
    pub fn run(&self, start: u64, end: u64) -> (u64, bool) {
        let present = self.has(start);
        let mut block = start;
        while block < end {
            let word = self.words.get((block / 64) as usize).copied().unwrap_or(0);
            let differing = (if present { !word } else { word }) >> (block % 64);
            if differing != 0 {
                return ((block + u64::from(differing.trailing_zeros())).min(end), present);
            }
            block = (block / 64 + 1) * 64;
        }
        (end, present)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::Random;

    #[test]
    fn runs_and_counts_are_those_of_a_list_of_flags() {
        let blocks = 300;
        let mut presence = Presence::new(blocks * BLOCK_BYTES - 5);
        let mut flags = alloc::vec![false; blocks as usize];
        let mut random = Random::new(7);
        for _ in 0..2000 {
            let start = random.below(blocks);
            let end = start + random.below(blocks - start + 1);
            let present = random.once_in(2);
            presence.set(start..end, present);
            flags[start as usize..end as usize].fill(present);
            assert_eq!(presence.bytes(), flags.iter().filter(|&&flag| flag).count() as u64 * BLOCK_BYTES);
            let start = random.below(blocks);
            let (end, present) = presence.run(start, blocks);
            assert_eq!(present, flags[start as usize]);
            assert!(end > start && flags[start as usize..end as usize].iter().all(|&flag| flag == present));
            assert!(end == blocks || flags[end as usize] != present);
        }
        presence.set(blocks - 1..blocks + 100, true);
        assert!(!presence.has(blocks));
    }
}
