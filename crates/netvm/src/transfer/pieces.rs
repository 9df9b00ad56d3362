//! A file that comes over several connections at once, in pieces: what of it has come. Pure: no I/O.
//!
//! Each piece names the end of the one before it in the file, so that pieces are a chain from the first byte that is wanted: what is complete,
//! what is missing and what would be written twice is known without knowing the holes of the file.

use std::collections::BTreeMap;

use super::frames::{CHUNK_BYTES, Wrong};

/// Most pieces that come, or have come, behind one that is missing. A receiver that is killed has lost so many at most.
pub(super) const AHEAD_MAX: usize = 8;

/// A range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Where the piece before it ends; a hole is between them.
    pub after: u64,
    pub offset: u64,
    pub bytes: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Chain {
    /// The length of the file.
    length: u64,
    /// All below this has come.
    front: u64,
    /// Pieces behind that, by their `after`: their ends, and whether they have come.
    ahead: BTreeMap<u64, (u64, bool)>,
}

impl Chain {
    /// Of a file of `length` bytes, of which those below `from` are there.
    pub fn new(from: u64, length: u64) -> Self {
        Self { length, front: from, ahead: BTreeMap::new() }
    }

    /// A piece may come; `false` when it is too far ahead, and has to wait until others have come.
    ///
    /// # Errors
    /// It is not where a piece may be, or would be written twice.
    pub fn begin(&mut self, piece: Piece) -> Result<bool, Wrong> {
        let end = piece.offset.checked_add(piece.bytes).filter(|&end| end <= self.length);
        let end = end.ok_or("bytes that are not where they should be")?;
        if piece.offset < piece.after || !(1..=CHUNK_BYTES).contains(&piece.bytes) {
            return Err("bytes that are not where they should be");
        }
        let before = self.ahead.range(..piece.after).next_back();
        let behind = self.ahead.range(piece.after..).next();
        let overlaps = before.is_some_and(|(_, &(end, _))| end > piece.after)
            || behind.is_some_and(|(&after, _)| after < end);
        if piece.after < self.front || overlaps {
            return Err("bytes that come twice");
        }
        if self.ahead.len() >= AHEAD_MAX && piece.after != self.front {
            return Ok(false);
        }
        self.ahead.insert(piece.after, (end, false));
        Ok(true)
    }

    /// A piece that was let begin has come.
    pub fn came(&mut self, piece: Piece) {
        if let Some((_, came)) = self.ahead.get_mut(&piece.after) {
            *came = true;
        }
        while let Some(first) = self.ahead.first_entry()
            && *first.key() == self.front
            && first.get().1
        {
            self.front = first.remove().0;
        }
    }

    /// Everything below this has come.
    pub fn front(&self) -> u64 {
        self.front
    }

    /// Whether nothing is missing before what has come.
    pub fn is_whole(&self) -> bool {
        self.ahead.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(after: u64, offset: u64, bytes: u64) -> Piece {
        Piece { after, offset, bytes }
    }

    #[test]
    fn pieces_in_any_order_are_one_file() {
        let mut state = 7u64;
        let mut next = move |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        for _ in 0..2000 {
            // A file with holes, cut into pieces.
            let from = next(3) * 1000;
            let (mut at, mut pieces) = (from, Vec::new());
            for _ in 0..next(30) {
                let offset = at + next(3) * next(5000);
                let bytes = 1 + next(CHUNK_BYTES);
                pieces.push(piece(at, offset, bytes));
                at = offset + bytes;
            }
            let mut chain = Chain::new(from, at + next(2) * 77);
            // Lanes take them in order; each may stand still for as long as it likes.
            let mut coming: Vec<Piece> = Vec::new();
            let (mut taken, mut done) = (0, vec![false; pieces.len()]);
            let mut waiting = Vec::new();
            while done.iter().any(|done| !done) {
                waiting.retain(|&which: &usize| {
                    let begins = chain.begin(pieces[which]).unwrap();
                    if begins {
                        coming.push(pieces[which]);
                    }
                    !begins
                });
                if taken < pieces.len() && coming.len() + waiting.len() < 12 && next(2) == 0 {
                    waiting.push(taken);
                    taken += 1;
                } else if !coming.is_empty() {
                    let now = coming.swap_remove(next(coming.len() as u64) as usize);
                    chain.came(now);
                    done[pieces.iter().position(|piece| *piece == now).unwrap()] = true;
                    let missing = done.iter().position(|done| !done);
                    let front = missing.map_or(at, |missing| pieces[missing].after);
                    assert_eq!(chain.front(), front);
                } else {
                    assert!(taken < pieces.len(), "all wait for each other");
                }
            }
            assert!(chain.is_whole());
            assert_eq!(chain.front(), at);
        }
    }

    #[test]
    fn nothing_is_written_twice_or_outside() {
        let mut chain = Chain::new(100, 10_000);
        assert_eq!(chain.begin(piece(200, 300, 100)), Ok(true));
        for wrong in [
            piece(0, 0, 10),
            piece(99, 150, 10),
            piece(100, 99, 10),
            piece(100, 150, 51),
            piece(150, 150, 100),
            piece(200, 300, 100),
            piece(250, 500, 10),
            piece(399, 500, 10),
            piece(400, 9_999, 2),
            piece(400, 500, 0),
            piece(400, 500, CHUNK_BYTES + 1),
            piece(400, u64::MAX, 2),
            piece(u64::MAX, u64::MAX, 1),
        ] {
            assert!(chain.begin(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(chain.begin(piece(100, 150, 50)), Ok(true));
        chain.came(piece(200, 300, 100));
        assert_eq!((chain.front(), chain.is_whole()), (100, false));
        chain.came(piece(100, 150, 50));
        assert_eq!((chain.front(), chain.is_whole()), (400, true));
        assert!(chain.begin(piece(100, 150, 50)).is_err(), "it has come");
    }

    #[test]
    fn who_is_too_far_ahead_waits() {
        let mut chain = Chain::new(0, 1 << 30);
        for at in 1..=AHEAD_MAX as u64 {
            assert_eq!(chain.begin(piece(at, at, 1)), Ok(true));
        }
        assert_eq!(chain.begin(piece(99, 99, 1)), Ok(false));
        // The one that all wait for does not.
        assert_eq!(chain.begin(piece(0, 0, 1)), Ok(true));
        chain.came(piece(0, 0, 1));
        assert_eq!(chain.begin(piece(99, 99, 1)), Ok(false));
        chain.came(piece(1, 1, 1));
        assert_eq!(chain.begin(piece(99, 99, 1)), Ok(true));
    }
}
