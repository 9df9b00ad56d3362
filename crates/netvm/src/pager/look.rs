//! Waiting by looking: to sleep in poll(2) and be woken costs more than most waits of a busy pager take. Between two looks it yields
//! the CPU, which the one it waits for may need: the lender, or the program's thread that has just been woken. That thread may have had it already,
//! as the kernel prefers who wakes up, and faulted again: where it mostly has, the first look for a fault comes before the first yield.

use crate::link::spin::Trial;
use std::time::{Duration, Instant};

/// Longest time to look for an answer before sleeping,
const ANSWER_MAX: Duration = Duration::from_micros(100);
/// and for the next fault.
const FAULT_MAX: Duration = Duration::from_micros(50);

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaited {
    /// Pages from a lender.
    Answer,
    /// The next fault, or call.
    Fault,
}

#[derive(Clone, Copy, Debug)]
struct Wait {
    awaited: Awaited,
    since: Instant,
    /// Zero: it sleeps.
    budget: Duration,
    looks: u32,
    /// The first look comes before the first yield.
    at_once: bool,
}

/// Decides whether to look, for each wait, by what the last ones brought.
#[derive(Debug)]
pub(super) struct Look {
    answers: Trial,
    faults: Trial,
    /// Whether the next fault is mostly there before anybody yields.
    at_once: Trial,
    wait: Option<Wait>,
}

impl Look {
    pub(super) fn new() -> Self {
        let (answers, faults) = (Trial::new(ANSWER_MAX), Trial::new(FAULT_MAX));
        Self { answers, faults, at_once: Trial::new(FAULT_MAX), wait: None }
    }

    fn trial(&mut self, awaited: Awaited) -> &mut Trial {
        match awaited {
            Awaited::Answer => &mut self.answers,
            Awaited::Fault => &mut self.faults,
        }
    }

    /// Nothing has come of what is awaited: the number of the look that comes next, or `None` to sleep until something comes.
    pub(super) fn next(&mut self, awaited: Awaited, now: impl Fn() -> Instant) -> Option<u32> {
        let wait = match &mut self.wait {
            Some(wait) if wait.awaited == awaited => wait,
            _ => {
                let budget = self.trial(awaited).budget();
                let may_be = awaited == Awaited::Fault && !budget.is_zero();
                let at_once = may_be && !self.at_once.budget().is_zero();
                self.wait.insert(Wait { awaited, since: now(), budget, looks: 0, at_once })
            }
        };
        if wait.budget.is_zero() {
            return None;
        }
        wait.looks += 1;
        if wait.looks > 1 && std::mem::take(&mut wait.at_once) {
            self.at_once.note(false);
        }
        if wait.looks > 1 && now() - wait.since >= wait.budget {
            wait.budget = Duration::ZERO;
            self.trial(awaited).note(false);
            return None;
        }
        self.wait.map(|wait| wait.looks)
    }

    /// Whether to yield before the look that comes next.
    pub(super) fn yields(&self) -> bool {
        self.wait.is_none_or(|wait| !wait.at_once)
    }

    /// Something has come. What was not awaited changes nothing.
    pub(super) fn came(&mut self, what: Awaited, now: impl Fn() -> Instant) {
        if let Some(wait) = self.wait.take_if(|wait| wait.awaited == what)
            && !wait.budget.is_zero()
        {
            // Whoever else got the CPU in between kept it for too long.
            let in_time = now() - wait.since < wait.budget * 2;
            self.trial(wait.awaited).note(in_time);
            if wait.at_once {
                self.at_once.note(true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks in one wait for what comes after `time`; each look takes 10 µs.
    fn wait(look: &mut Look, start: Instant, time: Duration) -> u32 {
        let mut now = start;
        let mut looks = 0;
        while now - start < time {
            match look.next(Awaited::Fault, || now) {
                Some(_) => looks += 1,
                None => now = start + time,
            }
            now += Duration::from_micros(10);
        }
        look.came(Awaited::Fault, || now);
        looks
    }

    #[test]
    fn it_looks_while_that_pays_and_then_rarely() {
        let (mut look, start) = (Look::new(), Instant::now());
        for _ in 0..100 {
            assert_eq!(wait(&mut look, start, Duration::from_micros(30)), 3);
        }
        let vain: u32 = (0..640).map(|_| wait(&mut look, start, Duration::from_millis(3))).sum();
        assert!((5..100).contains(&vain), "{vain} looks in vain");
        let later: u32 = (0..6400).map(|_| wait(&mut look, start, Duration::from_micros(30))).sum();
        assert!(later > 3 * 6000, "{later} looks where it pays again");
    }

    #[test]
    fn who_is_there_at_once_is_not_yielded_to() {
        let (mut look, start) = (Look::new(), Instant::now());
        // Each fault comes at the look of this number.
        let yields = |look: &mut Look, number: u32| {
            let mut yields = 0;
            for turn in 1..=number {
                assert_eq!(look.next(Awaited::Fault, || start), Some(turn));
                yields += u32::from(look.yields());
            }
            look.came(Awaited::Fault, || start);
            yields
        };
        assert_eq!((0..100).map(|_| yields(&mut look, 1)).sum::<u32>(), 0);
        let of_two: u32 = (0..640).map(|_| yields(&mut look, 2)).sum();
        assert!((1240..1280).contains(&of_two), "{of_two}: a first look in vain costs little, but it is one");
        let later: u32 = (0..640).map(|_| yields(&mut look, 1)).sum();
        assert!(later < 320, "{later} yields where nobody has to wait any more");
    }

    #[test]
    fn what_was_not_awaited_does_not_prolong_a_wait() {
        let (mut look, start) = (Look::new(), Instant::now());
        let at = |micros| move || start + Duration::from_micros(micros);
        assert_eq!(look.next(Awaited::Fault, at(0)), Some(1));
        assert_eq!(look.next(Awaited::Fault, at(30)), Some(2));
        look.came(Awaited::Answer, at(40));
        assert_eq!(look.next(Awaited::Fault, at(60)), None);
    }

    #[test]
    fn who_gets_the_cpu_too_late_sleeps() {
        let (mut look, start) = (Look::new(), Instant::now());
        // Each yield gives the CPU away for milliseconds.
        for _ in 0..8 {
            if look.next(Awaited::Answer, || start).is_some() {
                look.came(Awaited::Answer, || start + Duration::from_millis(3));
            } else {
                look.came(Awaited::Answer, || start);
            }
        }
        assert_eq!(look.next(Awaited::Answer, || start), None);
    }
}
