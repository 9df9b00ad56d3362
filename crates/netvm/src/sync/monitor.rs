//! Mesa monitor: a lock with conditions.

use std::sync::Arc;
use std::time::Duration;

use netvm_core::key::RemoteKey;
use netvm_core::sync::{Kind, Op, Outcome, Refusal};

use super::{By, Held, Object, SyncError, Turn, done, failed, wrong_kind};
use crate::region::Peer;

/// A lock with conditions, numbered from 0 on.
///
/// Who is signalled queues for the monitor like everybody else, so what he waited for may have changed: look again. The home moves him from
/// the one queue to the other, so that he is woken once, inside. If he dies before that, the next who waits for the condition is signalled.
#[derive(Clone, Debug)]
pub struct Monitor(Arc<Object>);

impl Monitor {
    /// Opens the monitor `name` of `peer`.
    ///
    /// # Errors
    /// As [`Lock::open`](super::Lock::open).
    pub fn open(peer: &Peer, name: &str, key: &RemoteKey) -> Result<Self, SyncError> {
        let object = Object::open(peer, name, key)?;
        if matches!(object.kind, Kind::Monitor { .. }) { Ok(Self(object)) } else { Err(wrong_kind()) }
    }

    /// Waits for our turn inside.
    ///
    /// # Errors
    /// As [`Lock::lock`](super::Lock::lock).
    pub fn enter(&self, timeout: Option<Duration>) -> Turn<MonitorGuard> {
        let held = self.0.acquire(1, true, true, timeout);
        held.map(MonitorGuard).map_err(|error| error.map(MonitorGuard))
    }

    /// Inside, if nobody else is.
    ///
    /// # Errors
    /// As [`Lock::try_lock`](super::Lock::try_lock).
    pub fn try_enter(&self) -> Turn<MonitorGuard> {
        let held = self.0.acquire(1, true, false, None);
        held.map(MonitorGuard).map_err(|error| error.map(MonitorGuard))
    }
}

/// We are inside a [`Monitor`].
#[derive(Debug)]
#[must_use = "dropping it leaves the monitor"]
pub struct MonitorGuard(Held);

impl MonitorGuard {
    /// Leaves, waits for a signal, and comes back in. False when time was over first; also then we are inside again.
    ///
    /// # Errors
    /// [`SyncError::Abandoned`] with the guard, when somebody died inside meanwhile; [`SyncError::Refused`] for a condition that does not
    /// exist; otherwise we are outside.
    pub fn wait(
        mut self,
        condition: u32,
        timeout: Option<Duration>,
    ) -> Result<(Self, bool), SyncError<Self>> {
        let object = Arc::clone(&self.0.object);
        match object.kind {
            Kind::Monitor { conditions } if condition < conditions => {}
            _ => return Err(SyncError::Refused(Refusal::Number)),
        }
        let asked = match self.0.with_ticket() {
            Ok(ticket) => ticket,
            Err(error) => return Err(error.map(|nothing| match nothing {})),
        };
        let ticket = object.renewed(asked);
        let op = Op::Wait { condition, next: ticket.generation };
        let outcome = object.attempt(asked, ticket, op, timeout);
        self.0.by = By::Ticket(ticket);
        match outcome {
            Ok(Outcome::Ours { abandoned: false, expired }) => Ok((self, !expired)),
            Ok(Outcome::Ours { abandoned: true, .. }) => Err(SyncError::Abandoned(self)),
            ended => {
                self.0.owned = false;
                Err(failed(ended))
            }
        }
    }

    /// Signals the first who waits for a condition, if anybody does; returns how many: 0 or 1.
    ///
    /// # Errors
    /// [`SyncError::Refused`] for a condition that does not exist; [`SyncError::Failed`].
    pub fn signal(&self, condition: u32) -> Result<u64, SyncError> {
        done(self.0.object.call(self.0.known_as()?, Op::Notify { condition, all: false }))
    }

    /// Signals all who wait for a condition; returns how many.
    ///
    /// # Errors
    /// As [`MonitorGuard::signal`].
    pub fn broadcast(&self, condition: u32) -> Result<u64, SyncError> {
        done(self.0.object.call(self.0.known_as()?, Op::Notify { condition, all: true }))
    }

    /// Leaves and returns when the home has heard so. Dropping the guard does not wait.
    ///
    /// # Errors
    /// [`SyncError::Failed`]: then the next one gets the monitor as abandoned.
    pub fn release(self) -> Result<(), SyncError> {
        self.0.release()
    }
}
