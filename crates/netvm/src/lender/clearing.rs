//! When memory that nobody holds any more is cleared: beside what borrowers are served, so that none of them waits for what another one had.
//! The kernel needs 0.2 s for a GiB. docs/design/lending.md.

use std::time::{Duration, Instant};

use super::server::{Lender, TICK};

/// Cleared at a time,
const PIECE_BYTES: u64 = 256 << 10;
/// and of what is on a disk or in huge pages.
const LARGE_PIECE_BYTES: u64 = 2 << 20;
/// While borrowers are served, of so many parts of the time one.
const PARTS: u32 = 4;
/// Who is served asks again within this time.
const LULL: Duration = Duration::from_millis(2);

/// How fast.
#[derive(Debug)]
pub(super) struct Pace {
    /// When somebody has last been served.
    served: Instant,
    /// When the next piece is due.
    next: Instant,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self { served: now, next: now }
    }

    /// A piece that was begun at `began` has been cleared; `hurry`: memory is short.
    fn cleared(&mut self, began: Instant, ended: Instant, hurry: bool) {
        let is_serving = ended.saturating_duration_since(self.served) < LULL;
        let pause = (PARTS - 1) * ended.saturating_duration_since(began);
        self.next = if is_serving && !hurry { ended + pause } else { ended };
    }

    /// How long it is until the next piece is due.
    fn left(&self, now: Instant) -> Duration {
        self.next.saturating_duration_since(now)
    }
}

impl Lender {
    /// Clears a piece, if there is something to clear and it is time, and tells for how long to wait at most for what comes next; `came`: somebody
    /// has just been served.
    pub(super) fn clear_ahead(&mut self, came: bool) -> Duration {
        if self.memories.slabs.uncleared().is_none() {
            return TICK;
        }
        let began = Instant::now();
        if came {
            self.pace.served = began;
        }
        if !self.pace.left(began).is_zero() {
            return self.pace.left(began);
        }
        let is_large = self.memories.on_disk || self.config.hugepages;
        self.memories.clear_some(if is_large { LARGE_PIECE_BYTES } else { PIECE_BYTES });
        let ended = Instant::now();
        self.pace.cleared(began, ended, self.is_short);
        self.pace.left(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_served_loses_a_fourth_of_the_time_and_others_nothing() {
        let start = Instant::now();
        let at = |us: u64| start + Duration::from_micros(us);
        let mut pace = Pace::new(start);
        pace.cleared(at(0), at(40), false);
        assert_eq!(pace.left(at(40)), Duration::from_micros(120));
        assert_eq!((pace.left(at(159)).is_zero(), pace.left(at(160)).is_zero()), (false, true));
        pace.cleared(at(0), at(40), true);
        assert!(pace.left(at(40)).is_zero(), "memory is short");
        pace.cleared(at(1990), at(2030), false);
        assert!(pace.left(at(2030)).is_zero(), "nobody has asked for anything");
        pace.served = at(2030);
        pace.cleared(at(2040), at(2080), false);
        assert_eq!(pace.left(at(2080)), Duration::from_micros(120));
    }
}
