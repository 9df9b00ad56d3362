//! Which addresses are free.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

/// Free addresses. Neighbouring ranges are one.
#[derive(Debug, Default)]
pub struct FreeRanges {
    /// start -> end
    by_start: BTreeMap<usize, usize>,
    /// (bytes, start)
    by_size: BTreeSet<(usize, usize)>,
}

impl FreeRanges {
    /// None.
    pub const fn new() -> Self {
        Self { by_start: BTreeMap::new(), by_size: BTreeSet::new() }
    }

    fn insert(&mut self, start: usize, end: usize) {
        if start < end {
            self.by_start.insert(start, end);
            self.by_size.insert((end - start, start));
        }
    }

    fn remove(&mut self, start: usize, end: usize) {
        self.by_start.remove(&start);
        self.by_size.remove(&(end - start, start));
    }

    /// Adds a range, none of which is free yet.
    pub fn put(&mut self, start: usize, bytes: usize) {
        let (mut start, mut end) = (start, start + bytes);
        if let Some((&left, &left_end)) = self.by_start.range(..start).next_back() {
            debug_assert!(left_end <= start, "{start:#x} is free already");
            if left_end == start {
                self.remove(left, left_end);
                start = left;
            }
        }
        if let Some(&right_end) = self.by_start.get(&end) {
            self.remove(end, right_end);
            end = right_end;
        }
        self.insert(start, end);
    }

    /// Takes `bytes` from the smallest range that has them at a multiple of `alignment` (a power of two).
    pub fn take(&mut self, bytes: usize, alignment: usize) -> Option<usize> {
        let (start, end, address) = self.by_size.range((bytes, 0)..).find_map(|&(length, start)| {
            let end = start + length;
            let address = start.checked_add(alignment - 1)? & !(alignment - 1);
            (address.checked_add(bytes)? <= end).then_some((start, end, address))
        })?;
        self.remove(start, end);
        self.insert(start, address);
        self.insert(address + bytes, end);
        Some(address)
    }

    /// Takes exactly this range, if all of it is free.
    pub fn take_at(&mut self, start: usize, bytes: usize) -> bool {
        let end = start + bytes;
        let Some((&left, &left_end)) = self.by_start.range(..=start).next_back() else { return false };
        if left_end < end {
            return false;
        }
        self.remove(left, left_end);
        self.insert(left, start);
        self.insert(end, left_end);
        true
    }

    /// Takes the first bytes, at most `most`, of what is free from `start` on; returns how many.
    pub fn take_front(&mut self, start: usize, most: usize) -> usize {
        let Some((_, &end)) = self.by_start.range(..=start).next_back() else { return 0 };
        let bytes = end.saturating_sub(start).min(most);
        if bytes > 0 {
            self.take_at(start, bytes);
        }
        bytes
    }

    /// Takes at most `most` bytes of the largest range: its start, and how many.
    pub fn take_most(&mut self, most: usize) -> Option<(usize, usize)> {
        let &(bytes, start) = self.by_size.last()?;
        Some((start, self.take_front(start, bytes.min(most))))
    }

    /// Whether any of it is free.
    pub fn has_any(&self, start: usize, end: usize) -> bool {
        self.by_start.range(..end).next_back().is_some_and(|(_, &left_end)| left_end > start)
    }

    /// Takes whatever is free between `start` and `end`; returns how many bytes.
    pub fn take_any(&mut self, start: usize, end: usize) -> usize {
        let mut overlapping = Vec::new();
        for (&left, &left_end) in self.by_start.range(..end).rev() {
            if left_end <= start {
                break;
            }
            overlapping.push((left, left_end));
        }
        let mut taken = 0;
        for (left, left_end) in overlapping {
            self.remove(left, left_end);
            self.insert(left, start.max(left).min(left_end));
            if end < left_end {
                self.insert(end, left_end);
            }
            taken += left_end.min(end) - left.max(start);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ranges_fit_and_coalesce() {
        let mut free = FreeRanges::new();
        free.put(0x1000, 0x1000);
        free.put(0x10000, 0x10000);
        assert_eq!(free.take(0x800, 16), Some(0x1000));
        assert_eq!(free.take(0x1000, 0x8000), Some(0x10000));
        assert_eq!(free.take(0x4000, 0x8000), Some(0x18000));
        assert!(!free.take_at(0x17000, 0x2000));
        assert!(free.take_at(0x12000, 0x1000));
        free.put(0x12000, 0x1000);
        free.put(0x10000, 0x1000);
        free.put(0x18000, 0x4000);
        free.put(0x1000, 0x800);
        assert_eq!(free.by_start.iter().collect::<Vec<_>>(), [(&0x1000, &0x2000), (&0x10000, &0x20000)]);
        assert_eq!(free.by_size.len(), 2);
        assert_eq!(free.take_any(0x1800, 0x11000), 0x1800);
        assert_eq!(free.by_start.iter().collect::<Vec<_>>(), [(&0x1000, &0x1800), (&0x11000, &0x20000)]);
        assert_eq!(free.take_any(0x12000, 0x13000), 0x1000);
        assert_eq!(free.by_start.len(), 3);
        assert_eq!(free.take(0x100_0000, 1), None);
        assert_eq!(free.take_front(0x800, 0x100), 0);
        assert_eq!(free.take_front(0x1700, 0x1000), 0x100);
        assert_eq!(free.take_most(0x2000), Some((0x13000, 0x2000)));
        assert_eq!(free.take_most(usize::MAX), Some((0x15000, 0xB000)));
    }
}
