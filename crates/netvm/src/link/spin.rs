//! How long to look for the next event before sleeping.
//!
//! To sleep and be woken costs 3 to 30 µs, more than most answers take; to look in vain costs the CPU. As in adaptive mutexes,
//! what the last waits took decides (Karlin et al., *Empirical studies of competitive spinning for a shared-memory
//! multiprocessor*, SOSP 1991).

use netvm_sys::epoll::{Epoll, Ready};
use std::cell::RefCell;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Waits in a row that must have been short before spinning starts is half of this; it stops as soon after long ones.
const SCORE_MAX: u32 = 16;
const LONG_WAIT_COSTS: u32 = 4;

/// For how long servers look, in microseconds, unless told otherwise: about what a sleep and a wake-up on another CPU cost.
const SERVER_US: u32 = 50;

/// Decides for one kind of wait.
#[derive(Clone, Debug)]
pub struct Spin {
    max: Duration,
    /// Rises with short waits, falls faster with long ones.
    score: u32,
}

impl Spin {
    /// Never spins for longer than `max`; zero: never at all.
    pub fn new(max: Duration) -> Self {
        Self { max, score: 0 }
    }

    /// For a server that waits for requests: looks for so many microseconds. `None`: for 50, or not at all where there is a single CPU,
    /// which whoever sends the next request needs.
    pub fn server(us: Option<u32>) -> Self {
        let one_cpu = || std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1);
        let us = us.unwrap_or_else(|| if one_cpu() { 0 } else { SERVER_US });
        Self::new(Duration::from_micros(us.into()))
    }

    /// Waits until something of `epoll` is ready or `patience` has passed. While it looks, others that want this CPU get it.
    ///
    /// # Errors
    /// None in practice.
    pub fn wait_for(&mut self, epoll: &Epoll, ready: &mut Vec<Ready>, patience: Duration) -> io::Result<()> {
        if patience.is_zero() {
            return epoll.wait(ready, Some(patience));
        }
        let ready = RefCell::new(ready);
        let look = || {
            epoll.wait(&mut ready.borrow_mut(), Some(Duration::ZERO))?;
            let came = !ready.borrow().is_empty();
            if !came {
                std::thread::yield_now();
            }
            Ok(came)
        };
        self.wait(patience, look, || {
            epoll.wait(&mut ready.borrow_mut(), Some(patience))?;
            Ok(!ready.borrow().is_empty())
        })
    }

    /// How long to spin now.
    pub fn budget(&self) -> Duration {
        if self.score >= SCORE_MAX / 2 { self.max } else { Duration::ZERO }
    }

    /// Notes how long a wait took, spun or slept.
    pub fn note(&mut self, waited: Duration) {
        // A sleeper is woken late: a wait that would have ended in time counts as one that did.
        if waited <= self.max * 2 {
            self.score = (self.score + 1).min(SCORE_MAX);
        } else {
            self.score = self.score.saturating_sub(LONG_WAIT_COSTS);
        }
    }

    /// Waits for at most `patience`, which `sleep` keeps to itself: both say whether something came.
    ///
    /// # Errors
    /// Those of the two.
    fn wait<E>(
        &mut self,
        patience: Duration,
        mut look: impl FnMut() -> Result<bool, E>,
        sleep: impl FnOnce() -> Result<bool, E>,
    ) -> Result<(), E> {
        if self.max.is_zero() {
            return sleep().map(drop);
        }
        let start = Instant::now();
        let budget = self.budget().min(patience);
        let mut came = false;
        while !came && start.elapsed() < budget {
            came = look()?;
        }
        if !came {
            came = sleep()?;
        }
        self.note(if came { start.elapsed() } else { Duration::MAX });
        Ok(())
    }
}

static SWITCHED_OFF: AtomicBool = AtomicBool::new(false);

/// From now on whoever waits for a peer sleeps at once, or (at first) not: a measurement of what looking saves.
#[doc(hidden)]
pub fn switch_looking_off(off: bool) {
    SWITCHED_OFF.store(off, Ordering::Relaxed);
}

/// Decides by what looking brought: where the other side needs our CPU to answer, waits are short and looking is vain all the same.
#[derive(Clone, Debug)]
pub struct Trial {
    max: Duration,
    score: u32,
    /// Waits without looking since the last that looked.
    blind: u32,
}

/// Even who looks in vain tries again once in so many waits.
const TRY_EVERY: u32 = 64;

impl Trial {
    /// Never looks for longer than `max`. Begins with looking.
    pub fn new(max: Duration) -> Self {
        Self { max, score: SCORE_MAX, blind: 0 }
    }

    /// How long to look in the wait that begins now.
    pub fn budget(&mut self) -> Duration {
        if SWITCHED_OFF.load(Ordering::Relaxed) {
            return Duration::ZERO;
        }
        if self.score < SCORE_MAX / 2 {
            self.blind += 1;
            if self.blind < TRY_EVERY {
                return Duration::ZERO;
            }
            self.blind = 0;
        }
        self.max
    }

    /// Notes whether what was waited for came while looking.
    pub fn note(&mut self, came: bool) {
        self.score = match came {
            true => (self.score + LONG_WAIT_COSTS).min(SCORE_MAX),
            false => self.score.saturating_sub(LONG_WAIT_COSTS),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_looks_in_vain_rarely_looks() {
        let max = Duration::from_micros(50);
        let mut trial = Trial::new(max);
        let mut looked = 0;
        for _ in 0..1000 {
            if trial.budget() == max {
                looked += 1;
                trial.note(false);
            }
        }
        assert!((10..25).contains(&looked), "{looked}");
        for _ in 0..400 {
            if trial.budget() == max {
                trial.note(true);
            }
        }
        assert!((0..10).all(|_| trial.budget() == max), "it pays again");
    }

    #[test]
    fn spins_after_short_waits_and_stops_after_long_ones() {
        let max = Duration::from_micros(50);
        let mut spin = Spin::new(max);
        assert_eq!(spin.budget(), Duration::ZERO);
        for _ in 0..SCORE_MAX {
            spin.note(Duration::from_micros(90));
        }
        assert_eq!(spin.budget(), max);
        spin.note(Duration::from_secs(1));
        assert_eq!(spin.budget(), max, "one pause in a busy time changes nothing");
        for _ in 0..2 {
            spin.note(Duration::from_secs(1));
        }
        assert_eq!(spin.budget(), Duration::ZERO);
    }

    #[test]
    fn looks_only_when_it_pays() {
        let mut spin = Spin::new(Duration::from_secs(1));
        let (mut looks, mut sleeps) = (0, 0);
        for _ in 0..100 {
            let look = || {
                Ok::<_, ()>({
                    looks += 1;
                    true
                })
            };
            let sleep = || {
                sleeps += 1;
                Ok(true)
            };
            spin.wait(Duration::MAX, look, sleep).unwrap();
        }
        assert_eq!((looks, sleeps), (100 - SCORE_MAX / 2, SCORE_MAX / 2));
        let mut never = Spin::new(Duration::ZERO);
        never.wait(Duration::MAX, || Err("looked"), || Ok(true)).unwrap();
        // Time-outs are no short waits, and looking is no reason to wait for longer.
        let mut idle = Spin::new(Duration::from_secs(1));
        (0..SCORE_MAX).for_each(|_| idle.wait(Duration::ZERO, || Err("looked"), || Ok(false)).unwrap());
        assert_eq!(idle.budget(), Duration::ZERO);
    }
}
