//! Wait queue.

use std::sync::Arc;
use std::time::Duration;

use netvm_core::key::RemoteKey;
use netvm_core::sync::{Attempt, Kind, Op, Outcome, Reply, Ticket};

use super::{Object, SyncError, done, failed, unexpected, wrong_kind};
use crate::region::Peer;

/// Processes wait in it until others wake them, first come, first served.
///
/// A wake-up that reaches a process as it dies is gone with it, as if it had died right afterwards.
#[derive(Clone, Debug)]
pub struct WaitQueue(Arc<Object>);

impl WaitQueue {
    /// Opens the wait queue `name` of `peer`.
    ///
    /// # Errors
    /// As [`Lock::open`](super::Lock::open).
    pub fn open(peer: &Peer, name: &str, key: &RemoteKey) -> Result<Self, SyncError> {
        let object = Object::open(peer, name, key)?;
        if object.kind == Kind::WaitQueue { Ok(Self(object)) } else { Err(wrong_kind()) }
    }

    /// Takes the last place. Look at what you wait for *after* this, and then wait: a wake-up in between is not lost.
    ///
    /// # Errors
    /// [`SyncError::Failed`].
    pub fn enqueue(&self) -> Result<Waiting, SyncError> {
        let ticket = self.0.ticket()?;
        let mut waiting = Waiting { object: Arc::clone(&self.0), ticket, queued: false };
        match self.0.call(ticket, Op::Enqueue)? {
            Reply::Queued => {
                waiting.queued = true;
                Ok(waiting)
            }
            reply => Err(unexpected(reply)),
        }
    }

    /// Wakes the first; false when nobody waits.
    ///
    /// # Errors
    /// [`SyncError::Failed`].
    pub fn wake(&self) -> Result<bool, SyncError> {
        self.wake_many(1).map(|woken| woken > 0)
    }

    /// Wakes the first `most`; returns how many there were.
    ///
    /// # Errors
    /// [`SyncError::Failed`].
    pub fn wake_many(&self, most: u32) -> Result<u64, SyncError> {
        done(self.0.call(Ticket { slot: 0, generation: 0 }, Op::Wake { count: most }))
    }
}

/// A place in a [`WaitQueue`], given up when dropped.
#[derive(Debug)]
pub struct Waiting {
    object: Arc<Object>,
    ticket: Ticket,
    queued: bool,
}

impl Waiting {
    /// Waits to be woken.
    ///
    /// # Errors
    /// [`SyncError::TimedOut`], [`SyncError::Refused`] when the queue has gone, [`SyncError::Failed`].
    pub fn wait(mut self, timeout: Option<Duration>) -> Result<(), SyncError> {
        self.end(timeout)
    }

    fn end(&mut self, timeout: Option<Duration>) -> Result<(), SyncError> {
        self.queued = false;
        let mut attempt = Attempt::default();
        attempt.reply(Reply::Queued);
        match self.object.finish(attempt, self.ticket, timeout) {
            Ok(Outcome::Ours { .. }) => Ok(()),
            ended => Err(failed(ended)),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // Who is woken just now and does not want it passes it on: otherwise somebody else would sleep for ever.
        if self.queued && self.end(Some(Duration::ZERO)).is_ok() {
            let ticket = Ticket { slot: 0, generation: 0 };
            let _ = self.object.call(ticket, Op::Wake { count: 1 });
        }
        self.object.give_back(self.ticket);
    }
}
