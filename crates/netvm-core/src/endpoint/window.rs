//! Sequence numbers of writes: how many may be under way, and which have been applied.

use crate::limits::WINDOW;

/// The requester's side: which number comes next, and whether it may be used yet.
#[derive(Debug)]
pub(super) struct SendWindow {
    next: u64,
    applied: u64,
    size: u64,
}

impl SendWindow {
    pub(super) fn new(size: u64) -> Self {
        Self { next: 0, applied: 0, size: size.clamp(2, WINDOW) }
    }

    /// How many writes have a number: what a later request waits for.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// The peer has applied all writes below this number.
    pub(super) fn applied(&self) -> u64 {
        self.applied
    }

    pub(super) fn has_room(&self) -> bool {
        self.next - self.applied < self.size
    }

    /// Takes a number; `None` while the window is full.
    pub(super) fn take(&mut self) -> Option<u64> {
        self.has_room().then(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// The peer says that all numbers below `applied` are done; false when it cannot be. Rails may deliver old news late.
    #[must_use]
    pub(super) fn acknowledge(&mut self, applied: u64) -> bool {
        self.applied = self.applied.max(applied.min(self.next));
        applied <= self.next
    }
}

/// The server's side: which writes have been applied.
#[derive(Debug)]
pub(super) struct ReceiveWindow {
    /// All numbers below are applied.
    applied: u64,
    /// One bit for each number from `applied` on, by its number modulo WINDOW.
    bits: [u64; (WINDOW / 64) as usize],
}

impl ReceiveWindow {
    pub(super) fn new() -> Self {
        Self { applied: 0, bits: [0; (WINDOW / 64) as usize] }
    }

    pub(super) fn applied(&self) -> u64 {
        self.applied
    }

    fn bit(sequence: u64) -> (usize, u64) {
        (((sequence % WINDOW) / 64) as usize, 1 << (sequence % 64))
    }

    /// Whether a request may wait for the writes below `sequence`.
    pub(super) fn may_wait_for(&self, sequence: u64) -> bool {
        sequence <= self.applied.saturating_add(WINDOW)
    }

    /// How many numbers below `sequence` (at most a window ahead) are applied.
    pub(super) fn applied_below(&self, sequence: u64) -> u64 {
        let is_applied = |&sequence: &u64| {
            let (word, bit) = Self::bit(sequence);
            self.bits[word] & bit != 0
        };
        let end = sequence.min(self.applied + WINDOW);
        self.applied + (self.applied..end).filter(is_applied).count() as u64
    }

    /// Whether a write may have this number.
    pub(super) fn accepts(&self, sequence: u64) -> bool {
        let (word, bit) = Self::bit(sequence);
        sequence >= self.applied && sequence - self.applied < WINDOW && self.bits[word] & bit == 0
    }

    /// The write with this number has been applied; false when it cannot be (done already, or out of the window).
    #[must_use]
    pub(super) fn apply(&mut self, sequence: u64) -> bool {
        if !self.accepts(sequence) {
            return false;
        }
        if sequence == self.applied {
            // In order, as always on one rail.
            self.applied += 1;
        } else {
            let (word, bit) = Self::bit(sequence);
            self.bits[word] |= bit;
        }
        loop {
            let (word, bit) = Self::bit(self.applied);
            if self.bits[word] & bit == 0 {
                return true;
            }
            self.bits[word] &= !bit;
            self.applied += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_applied_once_in_any_order() {
        let mut window = ReceiveWindow::new();
        for round in 0..5 {
            let base = round * WINDOW;
            for sequence in (base + 1..base + WINDOW).rev() {
                assert!(window.apply(sequence));
                assert!(!window.apply(sequence), "twice");
                assert_eq!(window.applied(), base);
            }
            assert!(!window.apply(base + WINDOW), "beyond the window");
            assert!(window.apply(base));
            assert_eq!(window.applied(), base + WINDOW);
            assert!(!window.apply(base), "below the window");
        }
        assert!(!window.accepts(u64::MAX) && !window.may_wait_for(u64::MAX));
    }

    #[test]
    fn the_sender_stops_at_a_full_window() {
        let mut window = SendWindow::new(4);
        assert_eq!([0; 5].map(|_| window.take()), [Some(0), Some(1), Some(2), Some(3), None]);
        assert!(window.acknowledge(2) && window.acknowledge(1));
        assert_eq!([0; 3].map(|_| window.take()), [Some(4), Some(5), None]);
        assert!(!window.acknowledge(7), "not sent yet");
    }
}
