//! When small writes are sent.
//!
//! A write that comes alone is sent at once. Writes that follow each other closely are gathered, until they are many bytes, until
//! anything else is posted that wants an answer or tells somebody, or until the node's thread has its turn: it looks after every
//! [`TICK`] while writes are being gathered, and stops when they have become few. So a write never waits for later ones to come.

use std::time::{Duration, Instant};

/// How often the node's thread sends what has been gathered.
pub(crate) const TICK: Duration = Duration::from_micros(50);
/// And how often at least.
const TICK_MAX: Duration = Duration::from_micros(400);
/// Gathered bytes that are worth a send of their own, however few writes they are;
pub(super) const SEND_BYTES: usize = 256 << 10;
/// or so many, of many writes: what each of them costs besides its bytes is spent by then.
const CROWD_BYTES: usize = 64 << 10;
const CROWD_WRITES: u32 = 256;
/// A write that comes so soon after the one before was sent follows it closely; so does one that comes after less than half of what
/// sending took, since a long one is still being copied by then.
const CLOSE: Duration = Duration::from_micros(1);
/// Writes that must follow each other closely before gathering starts: a few in a row are still sent at once.
const CLOSE_MIN: u32 = 4;
/// Gathering stops when fewer writes came during a tick.
const WRITES_MIN: u32 = 8;

/// What to do with a write that has been queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Send now, then call [`Gather::sent`].
    Send,
    /// Leave it to the next one, or to the tick.
    Leave,
}

/// Decides for one session.
#[derive(Debug, Default)]
pub(super) struct Gather {
    on: bool,
    close: u32,
    sent: Option<Instant>,
    /// When the write that is being sent came, and how long the last send took.
    came: Option<Instant>,
    cost: Duration,
    /// Writes since the last tick.
    writes: u32,
    /// Writes since one of them sent what there was, or a tick did.
    unsent: u32,
    /// They were so many that one of them sent what there was.
    full: bool,
    pace: Duration,
}

impl Gather {
    pub(super) fn is_on(&self) -> bool {
        self.on
    }

    /// A write has been queued, and so many bytes wait now; `now` is asked for only when nothing is gathered.
    pub(super) fn queued(&mut self, bytes: usize, now: impl FnOnce() -> Instant) -> Step {
        if self.on {
            self.writes += 1;
            self.unsent += 1;
            let is_full = bytes >= SEND_BYTES || (bytes >= CROWD_BYTES && self.unsent >= CROWD_WRITES);
            if !is_full {
                return Step::Leave;
            }
            (self.full, self.unsent) = (true, 0);
            return Step::Send;
        }
        let now = now();
        let is_close =
            self.sent.is_some_and(|sent| now.saturating_duration_since(sent) <= CLOSE.max(self.cost / 2));
        self.came = Some(now);
        self.close = if is_close { self.close + 1 } else { 0 };
        Step::Send
    }

    /// It has been sent; true when gathering starts: then the node's thread must tick.
    pub(super) fn sent(&mut self, now: impl FnOnce() -> Instant) -> bool {
        if self.on {
            return false;
        }
        let now = now();
        self.cost = self.came.map_or(Duration::ZERO, |came| now.saturating_duration_since(came));
        self.sent = Some(now);
        self.on = self.close >= CLOSE_MIN;
        self.writes = WRITES_MIN;
        self.on
    }

    /// A tick has sent what there was, all of it or not; when the next one is due, if any.
    ///
    /// Ticks are rarer while the writes themselves send what there is: they take some of the writer's time.
    pub(super) fn tick(&mut self, sent_all: bool) -> Option<Duration> {
        let goes_on = self.on && (self.writes >= WRITES_MIN || !sent_all);
        if !goes_on {
            (self.on, self.close, self.sent) = (false, 0, None);
        }
        self.pace = if self.full { (self.pace.max(TICK) * 2).min(TICK_MAX) } else { TICK };
        (self.writes, self.unsent, self.full) = (0, 0, false);
        goes_on.then_some(self.pace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lone_writes_go_at_once_and_crowds_are_gathered() {
        let start = Instant::now();
        let at = |micros| move || start + Duration::from_micros(micros);
        let mut gather = Gather::default();
        for write in 0..50 {
            assert_eq!(gather.queued(56, at(10 * write)), Step::Send);
            assert!(!gather.sent(at(10 * write + 3)));
        }
        let mut sent = 0;
        for _ in 0..100 {
            if gather.queued(56, at(1000)) == Step::Send {
                sent += 1;
                let _ = gather.sent(at(1000));
            }
        }
        assert_eq!(sent, CLOSE_MIN + 1);
        assert_eq!(gather.queued(SEND_BYTES, at(1000)), Step::Send);
        // Long ones until they are many bytes, short ones until they are many.
        assert_eq!(gather.queued(CROWD_BYTES, at(1000)), Step::Leave);
        let left = (2..CROWD_WRITES).all(|_| gather.queued(CROWD_BYTES, at(1000)) == Step::Leave);
        assert!(left && gather.queued(CROWD_BYTES, at(1000)) == Step::Send);
        assert_eq!(gather.queued(CROWD_BYTES, at(1000)), Step::Leave);
        assert_eq!(gather.tick(true), Some(TICK * 2), "a write has sent");
        assert_eq!(gather.tick(true), None, "a tick without writes is the last");
        assert_eq!(gather.queued(56, at(1000)), Step::Send);
    }

    #[test]
    fn ticks_go_on_while_something_is_stuck() {
        let now = Instant::now();
        let mut gather = Gather::default();
        while gather.queued(56, || now) == Step::Send {
            let _ = gather.sent(|| now);
        }
        assert!((0..10).all(|_| gather.tick(false) == Some(TICK)));
        assert_eq!(gather.tick(true), None);
    }
}
