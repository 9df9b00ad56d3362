//! When a turn that is over is told.
//!
//! A release is sent at once: somebody may wait for the turn. But who asks for turns one after the other tells of the end of one and
//! asks for the next within microseconds, and two sends cost twice what one does, here and at the home, which is woken twice. So when
//! releases have been followed closely by a request several times, the next one is left to travel with its request. Where none
//! comes after all, the node's thread sends it with its next tick, and the ones after that are sent at once again.

use std::time::{Duration, Instant};

/// A request that comes so soon follows closely.
const CLOSE: Duration = Duration::from_micros(20);
/// So many must have, in a row.
const ROW_MIN: u32 = 4;

/// Decides for one session.
#[derive(Debug, Default)]
pub(super) struct Ride {
    released: Option<Instant>,
    row: u32,
}

impl Ride {
    /// A release has been sent, or left.
    pub(super) fn released(&mut self, now: Instant) {
        self.released = Some(now);
    }

    /// A request has been queued; `now` is asked for only behind a release.
    pub(super) fn asked(&mut self, now: impl FnOnce() -> Instant) {
        if let Some(released) = self.released.take() {
            let is_close = now().saturating_duration_since(released) <= CLOSE;
            self.row = if is_close { (self.row + 1).min(ROW_MIN) } else { 0 };
        }
    }

    /// The node's thread has sent what was left.
    pub(super) fn tick(&mut self, now: impl FnOnce() -> Instant) {
        if self.released.is_some_and(|released| now().saturating_duration_since(released) > CLOSE) {
            (self.released, self.row) = (None, 0);
        }
    }

    /// Whether releases are to be left for the requests that follow them.
    pub(super) fn is_on(&self) -> bool {
        self.row >= ROW_MIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_asks_again_at_once_leaves_releases() {
        let start = Instant::now();
        let at = |micros| start + Duration::from_micros(micros);
        let mut ride = Ride::default();
        for round in 0..100 {
            assert!(!ride.is_on(), "what comes slowly is sent at once");
            ride.released(at(100 * round));
            ride.asked(|| at(100 * round + 50));
        }
        for round in 0..100 {
            assert_eq!(ride.is_on(), round >= u64::from(ROW_MIN));
            ride.released(at(20_000 + 20 * round));
            // Between the two.
            ride.tick(|| at(20_000 + 20 * round));
            ride.asked(|| at(20_015 + 20 * round));
        }
        ride.released(at(30_000));
        ride.tick(|| at(30_200));
        assert!(!ride.is_on(), "the tick had to send it");
        for round in 0..=u64::from(ROW_MIN) {
            ride.asked(|| at(31_000 + round));
            ride.released(at(31_000 + round));
        }
        assert!(ride.is_on());
        ride.asked(|| at(40_000));
        assert!(!ride.is_on());
    }
}
