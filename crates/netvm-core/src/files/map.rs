//! Where the blocks of a file are.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range;

/// Runs of blocks of the file that lie in a row in the volume: first block -> (block of the volume, count). The others are holes.
#[derive(Clone, Debug, Default)]
pub(super) struct Map {
    runs: BTreeMap<u64, (u64, u64)>,
    count: u64,
}

impl Map {
    /// Blocks that are there.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The run from `block` on, at most to `end`: where it begins, if it is there, and the block behind it.
    pub(super) fn run(&self, block: u64, end: u64) -> (Option<u64>, u64) {
        if let Some((&first, &(at, count))) = self.runs.range(..=block).next_back()
            && block < first + count
        {
            return (Some(at + (block - first)), end.min(first + count));
        }
        let next = self.runs.range(block..).next().map_or(end, |(&first, _)| first);
        (None, end.min(next))
    }

    /// The block of the volume behind the one that has the file's block before this one.
    pub(super) fn near(&self, block: u64) -> Option<u64> {
        let (&first, &(at, count)) = self.runs.range(..block).next_back()?;
        (first + count == block).then_some(at + count)
    }

    /// Puts a hole's blocks somewhere.
    pub(super) fn insert(&mut self, block: u64, at: u64, count: u64) {
        self.count += count;
        if let Some((_, (left_at, left_count))) =
            self.runs.range_mut(..block).next_back().filter(|(first, (_, left))| **first + *left == block)
            && *left_at + *left_count == at
        {
            *left_count += count;
            return;
        }
        self.runs.insert(block, (at, count));
    }

    /// Makes a hole; returns the blocks of the volume that were there.
    pub(super) fn remove(&mut self, blocks: Range<u64>) -> Vec<Range<u64>> {
        let mut removed = Vec::new();
        while let Some((&first, &(at, count))) = self
            .runs
            .range(..blocks.end)
            .next_back()
            .filter(|&(&first, &(_, count))| first + count > blocks.start)
        {
            self.runs.remove(&first);
            let (from, to) = (first.max(blocks.start), (first + count).min(blocks.end));
            if first < from {
                self.runs.insert(first, (at, from - first));
            }
            if to < first + count {
                self.runs.insert(to, (at + (to - first), first + count - to));
            }
            self.count -= to - from;
            removed.push(at + (from - first)..at + (to - first));
        }
        removed
    }

    /// All blocks of the volume that the file has.
    pub(super) fn places(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.runs.values().map(|&(at, count)| at..at + count)
    }
}
