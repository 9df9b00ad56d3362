//! Which blocks of the volume are free.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::ops::Range;

use crate::ranges::FreeRanges;
use crate::volume::{BLOCK_BYTES, GIVE_BACK_BYTES_MIN};

/// Shorter runs of free blocks are not worth giving back.
const RUN_MIN: u64 = GIVE_BACK_BYTES_MIN / BLOCK_BYTES;

/// Blocks are *taken*, *retired* (somebody may still read them), or free; free ones are *stale* until the volume has been told to
/// discard what they held.
#[derive(Debug)]
pub(super) struct Space {
    total: u64,
    free: FreeRanges,
    free_blocks: u64,
    /// Free blocks that hold old bytes: start -> end.
    stale: BTreeMap<u64, u64>,
    /// With the number of the last request that was begun before.
    retired: VecDeque<(u64, Range<u64>)>,
    /// Not to be used again: start -> end.
    lost: BTreeMap<u64, u64>,
    /// What the volume is to discard, in bytes and in this order, before anything that is begun later.
    discards: Vec<Range<u64>>,
}

impl Space {
    pub(super) fn new(blocks: u64) -> Self {
        let mut free = FreeRanges::new();
        free.put(0, blocks as usize);
        Self {
            total: blocks,
            free,
            free_blocks: blocks,
            stale: BTreeMap::new(),
            retired: VecDeque::new(),
            lost: BTreeMap::new(),
            discards: Vec::new(),
        }
    }

    pub(super) fn total(&self) -> u64 {
        self.total
    }

    pub(super) fn free(&self) -> u64 {
        self.free_blocks
    }

    /// Takes `count` blocks, as far as possible from `near` on; in pieces, all or none.
    pub(super) fn take(&mut self, near: Option<u64>, count: u64) -> Option<Vec<Range<u64>>> {
        if count > self.free_blocks {
            return None;
        }
        self.free_blocks -= count;
        let mut pieces = Vec::new();
        let mut left = count as usize;
        if let Some(near) = near {
            let got = self.free.take_front(near as usize, left);
            if got > 0 {
                pieces.push(near..near + got as u64);
                left -= got;
            }
        }
        while left > 0 {
            let whole = self.free.take(left, 1).map(|start| (start, left));
            let Some((start, got)) = whole.or_else(|| self.free.take_most(left)) else { break };
            pieces.push(start as u64..(start + got) as u64);
            left -= got;
        }
        debug_assert_eq!(left, 0);
        for piece in &pieces {
            self.clean(piece.clone());
        }
        Some(pieces)
    }

    /// What is taken must not show what was there.
    fn clean(&mut self, piece: Range<u64>) {
        while let Some((&start, &end)) =
            self.stale.range(..piece.end).next_back().filter(|&(_, &end)| end > piece.start)
        {
            self.stale.remove(&start);
            if start < piece.start {
                self.stale.insert(start, piece.start);
            }
            if piece.end < end {
                self.stale.insert(piece.end, end);
            }
            self.discard(start.max(piece.start)..end.min(piece.end));
        }
    }

    /// Nobody uses these any more, once all requests up to number `last` have ended.
    pub(super) fn retire(&mut self, last: u64, blocks: Range<u64>) {
        self.retired.push_back((last, blocks));
    }

    /// All requests with smaller numbers have ended.
    pub(super) fn settle(&mut self, oldest: u64) {
        while self.retired.front().is_some_and(|&(last, _)| last < oldest) {
            if let Some((_, blocks)) = self.retired.pop_front() {
                self.put(blocks);
            }
        }
    }

    fn put(&mut self, blocks: Range<u64>) {
        // Around what is lost.
        let lost: Vec<Range<u64>> = self
            .lost
            .range(..blocks.end)
            .rev()
            .map(|(&start, &end)| start..end)
            .take_while(|lost| lost.end > blocks.start)
            .collect();
        let mut from = blocks.start;
        for lost in lost.into_iter().rev() {
            self.put_good(from..lost.start);
            from = lost.end;
        }
        self.put_good(from..blocks.end);
    }

    fn put_good(&mut self, blocks: Range<u64>) {
        if blocks.is_empty() {
            return;
        }
        self.free.put(blocks.start as usize, (blocks.end - blocks.start) as usize);
        self.free_blocks += blocks.end - blocks.start;
        let Range { mut start, mut end } = blocks;
        if let Some((&left, _)) =
            self.stale.range(..start).next_back().filter(|&(_, &left_end)| left_end == start)
        {
            self.stale.remove(&left);
            start = left;
        }
        if let Some(right_end) = self.stale.remove(&end) {
            end = right_end;
        }
        if end - start >= RUN_MIN {
            self.discard(start..end);
        } else {
            self.stale.insert(start, end);
        }
    }

    /// Nothing can be kept in these blocks any more. Those that are taken stay so until they are retired.
    pub(super) fn lose(&mut self, blocks: Range<u64>) {
        let removed = self.free.take_any(blocks.start as usize, blocks.end as usize);
        self.free_blocks -= removed as u64;
        self.lost.insert(blocks.start, blocks.end);
    }

    /// Whether one of these blocks is lost.
    pub(super) fn is_lost(&self, blocks: Range<u64>) -> bool {
        self.lost.range(..blocks.end).next_back().is_some_and(|(_, &end)| end > blocks.start)
    }

    fn discard(&mut self, blocks: Range<u64>) {
        self.discards.push(blocks.start * BLOCK_BYTES..blocks.end * BLOCK_BYTES);
    }

    /// Zeros to these bytes of the volume.
    pub(super) fn zero(&mut self, bytes: Range<u64>) {
        self.discards.push(bytes);
    }

    /// Blocks that are retired.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> u64 {
        self.retired.iter().map(|(_, blocks)| blocks.end - blocks.start).sum()
    }

    /// What the volume is to discard before anything else.
    pub(super) fn discards(&mut self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.discards.drain(..)
    }
}
