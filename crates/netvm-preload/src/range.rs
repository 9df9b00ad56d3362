//! What ranges of addresses are.

use std::collections::BTreeMap;

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

    /// How many ranges there are.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Everything known between `start` and `end`, cut to that, in order.
    pub(crate) fn pieces(&self, start: usize, end: usize) -> Vec<Piece<T>> {
        let mut pieces: Vec<_> = self.pieces_back(start, end).collect();
        pieces.reverse();
        pieces
    }

    /// The same, the last one first. There may be very many.
    pub(crate) fn pieces_back(&self, start: usize, end: usize) -> impl Iterator<Item = Piece<T>> + '_ {
        self.ranges.range(..end).rev().take_while(move |(_, (piece_end, _))| *piece_end > start).map(
            move |(&piece_start, &(piece_end, kind))| Piece {
                start: piece_start.max(start),
                end: piece_end.min(end),
                kind,
            },
        )
    }

    /// The last of them.
    pub(crate) fn last_piece(&self, start: usize, end: usize) -> Option<Piece<T>> {
        self.pieces_back(start, end).next()
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
