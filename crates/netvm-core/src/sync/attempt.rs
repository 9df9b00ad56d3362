//! One attempt to get a turn, as its process sees it.

use super::message::{Refusal, Reply, Signal};

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Wait for the answer to the request, or to the cancellation.
    Reply,
    /// Wait for the signal, until time is over.
    Signal,
    /// Cancel.
    Cancel,
    /// Wait for the signal, which is certain to come.
    LastSignal,
    /// It is over.
    Done(Outcome),
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It is our turn; the last who had it died with it, if `abandoned`.
    Ours {
        /// See above.
        abandoned: bool,
        /// The time for the condition was over first.
        expired: bool,
    },
    /// Time was over; we are not queued any more.
    TimedOut,
    /// Not now.
    Busy,
    /// A member of the group has died or left.
    Broken,
    /// The last to arrive learns what the meeting came to at once.
    Result(alloc::vec::Vec<u8>),
    /// Not done.
    Refused(Refusal),
    /// The home answers what makes no sense.
    Nonsense,
}

/// Asked → waiting → cancelling → committed, with an end at every step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Attempt {
    step: Step,
    cancelling: bool,
}

impl Default for Attempt {
    fn default() -> Self {
        Self { step: Step::Reply, cancelling: false }
    }
}

impl Attempt {
    /// What to do next.
    pub fn step(&self) -> &Step {
        &self.step
    }

    /// The home has answered.
    pub fn reply(&mut self, reply: Reply) -> &Step {
        self.step = match (reply, self.cancelling) {
            (Reply::Queued, false) => Step::Signal,
            (Reply::Queued, true) => Step::LastSignal,
            (Reply::Cancelled, true) => Step::Done(Outcome::TimedOut),
            (Reply::Granted { abandoned }, false) => Step::Done(Outcome::Ours { abandoned, expired: false }),
            (Reply::Busy, false) => Step::Done(Outcome::Busy),
            (Reply::Broken, false) => Step::Done(Outcome::Broken),
            (Reply::Result(bytes), false) => Step::Done(Outcome::Result(bytes)),
            (Reply::Refused(refusal), _) => Step::Done(Outcome::Refused(refusal)),
            _ => Step::Done(Outcome::Nonsense),
        };
        &self.step
    }

    /// The signal is there.
    pub fn signal(&mut self, signal: Signal) -> &Step {
        let ours = |abandoned, expired| Outcome::Ours { abandoned, expired };
        self.step = Step::Done(match signal {
            Signal::Granted => ours(false, false),
            Signal::Abandoned => ours(true, false),
            Signal::Expired => ours(false, true),
            Signal::ExpiredAbandoned => ours(true, true),
            Signal::Closed => Outcome::Refused(Refusal::Closed),
            Signal::Broken => Outcome::Broken,
        });
        &self.step
    }

    /// Time is over.
    pub fn timeout(&mut self) -> &Step {
        if self.step == Step::Signal {
            self.step = Step::Cancel;
        }
        &self.step
    }

    /// The cancellation is on its way.
    pub fn cancelled(&mut self) -> &Step {
        if self.step == Step::Cancel {
            (self.step, self.cancelling) = (Step::Reply, true);
        }
        &self.step
    }
}
