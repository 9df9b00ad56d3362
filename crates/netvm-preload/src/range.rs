//! Sets of address ranges: which are free, and what the others are.

use std::collections::{BTreeMap, BTreeSet};

/// Free addresses. Neighbouring ranges are one.
#[derive(Debug, Default)]
pub(crate) struct FreeRanges {
    /// start -> end
    by_start: BTreeMap<usize, usize>,
    /// (bytes, start)
    by_size: BTreeSet<(usize, usize)>,
}

impl FreeRanges {
    pub(crate) const fn new() -> Self {
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
    pub(crate) fn put(&mut self, start: usize, bytes: usize) {
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
    pub(crate) fn take(&mut self, bytes: usize, alignment: usize) -> Option<usize> {
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
    pub(crate) fn take_at(&mut self, start: usize, bytes: usize) -> bool {
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

    /// Takes whatever is free between `start` and `end`.
    pub(crate) fn take_any(&mut self, start: usize, end: usize) {
        let mut overlapping = Vec::new();
        for (&left, &left_end) in self.by_start.range(..end).rev() {
            if left_end <= start {
                break;
            }
            overlapping.push((left, left_end));
        }
        for (left, left_end) in overlapping {
            self.remove(left, left_end);
            self.insert(left, start.max(left).min(left_end));
            if end < left_end {
                self.insert(end, left_end);
            }
        }
    }
}

/// A range and what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece<T> {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) kind: T,
}

impl<T> Piece<T> {
    pub(crate) fn bytes(&self) -> usize {
        self.end - self.start
    }
}

/// What ranges are. Neighbours of the same kind are one.
#[derive(Debug)]
pub(crate) struct RangeMap<T> {
    /// start -> (end, kind)
    ranges: BTreeMap<usize, (usize, T)>,
}

impl<T: Copy + PartialEq> RangeMap<T> {
    pub(crate) const fn new() -> Self {
        Self { ranges: BTreeMap::new() }
    }

    /// Everything known between `start` and `end`, cut to that, in order.
    pub(crate) fn pieces(&self, start: usize, end: usize) -> Vec<Piece<T>> {
        let mut pieces: Vec<_> = self
            .ranges
            .range(..end)
            .rev()
            .take_while(|(_, (piece_end, _))| *piece_end > start)
            .map(|(&piece_start, &(piece_end, kind))| Piece {
                start: piece_start.max(start),
                end: piece_end.min(end),
                kind,
            })
            .collect();
        pieces.reverse();
        pieces
    }

    /// Whether all of `start..end` is known.
    pub(crate) fn covers(&self, start: usize, end: usize) -> bool {
        let known: usize = self.pieces(start, end).iter().map(Piece::bytes).sum();
        known == end - start
    }

    /// The range that `address` is in, uncut.
    pub(crate) fn at(&self, address: usize) -> Option<Piece<T>> {
        let (&start, &(end, kind)) = self.ranges.range(..=address).next_back()?;
        (address < end).then_some(Piece { start, end, kind })
    }

    /// Forgets `start..end`.
    pub(crate) fn clear(&mut self, start: usize, end: usize) {
        let overlapping: Vec<_> = self
            .ranges
            .range(..end)
            .rev()
            .take_while(|(_, (piece_end, _))| *piece_end > start)
            .map(|(&piece_start, &(piece_end, kind))| (piece_start, piece_end, kind))
            .collect();
        for (piece_start, piece_end, kind) in overlapping {
            self.ranges.remove(&piece_start);
            if piece_start < start {
                self.ranges.insert(piece_start, (start, kind));
            }
            if piece_end > end {
                self.ranges.insert(end, (piece_end, kind));
            }
        }
    }

    /// Makes `start..end` of this kind.
    pub(crate) fn set(&mut self, start: usize, end: usize, kind: T) {
        self.clear(start, end);
        let (mut start, mut end) = (start, end);
        if let Some((&left, &(left_end, left_kind))) = self.ranges.range(..start).next_back()
            && left_end == start
            && left_kind == kind
        {
            self.ranges.remove(&left);
            start = left;
        }
        if let Some(&(right_end, right_kind)) = self.ranges.get(&end)
            && right_kind == kind
        {
            self.ranges.remove(&end);
            end = right_end;
        }
        self.ranges.insert(start, (end, kind));
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Piece<T>> + '_ {
        self.ranges.iter().map(|(&start, &(end, kind))| Piece { start, end, kind })
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
        free.take_any(0x1800, 0x11000);
        assert_eq!(free.by_start.iter().collect::<Vec<_>>(), [(&0x1000, &0x1800), (&0x11000, &0x20000)]);
        free.take_any(0x12000, 0x13000);
        assert_eq!(free.by_start.len(), 3);
        assert_eq!(free.take(0x100_0000, 1), None);
    }

    #[test]
    fn range_map_cuts_and_merges() {
        let mut map = RangeMap::new();
        map.set(10, 20, 'a');
        map.set(20, 30, 'a');
        assert_eq!(map.iter().count(), 1);
        map.set(15, 18, 'b');
        assert_eq!(
            map.pieces(16, 19),
            [Piece { start: 16, end: 18, kind: 'b' }, Piece { start: 18, end: 19, kind: 'a' }]
        );
        assert!(map.covers(10, 30) && !map.covers(10, 31));
        map.clear(12, 25);
        assert_eq!(map.at(24), None);
        assert_eq!(map.at(25), Some(Piece { start: 25, end: 30, kind: 'a' }));
        map.set(12, 25, 'a');
        assert_eq!(map.iter().collect::<Vec<_>>(), [Piece { start: 10, end: 30, kind: 'a' }]);
    }
}
