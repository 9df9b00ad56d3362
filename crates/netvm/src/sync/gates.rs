//! Lock, reader-writer lock, semaphore.

use std::sync::Arc;
use std::time::Duration;

use netvm_core::key::RemoteKey;
use netvm_core::sync::{Kind, Op, Ticket, WRITER};

use super::{Held, Object, SyncError, Turn, done, wrong_kind};
use crate::region::Peer;

macro_rules! guard {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        #[must_use = "it ends when it is dropped"]
        pub struct $name(Held);

        impl $name {
            /// Ends it and returns when the home has heard so. Dropping it does not wait.
            ///
            /// # Errors
            /// [`SyncError::Failed`]: then the home gives it to the next as abandoned.
            pub fn release(self) -> Result<(), SyncError> {
                self.0.release()
            }
        }
    };
}

guard!(
    /// Our turn with a [`Lock`].
    LockGuard
);
guard!(
    /// Our turn as one of the readers of a [`ReadWriteLock`].
    ReadGuard
);
guard!(
    /// Our turn as the writer of a [`ReadWriteLock`].
    WriteGuard
);
guard!(
    /// Permits of a [`Semaphore`] that go back to it.
    Permit
);

fn turn<G>(held: Turn<Held>, guard: fn(Held) -> G) -> Turn<G> {
    held.map(guard).map_err(|error| error.map(guard))
}

/// One at a time, first come, first served.
#[derive(Clone, Debug)]
pub struct Lock(Arc<Object>);

impl Lock {
    /// Opens the lock `name` of `peer`.
    ///
    /// # Errors
    /// [`SyncError::Refused`] when it is something else; [`SyncError::Failed`] as [`Peer::import`].
    pub fn open(peer: &Peer, name: &str, key: &RemoteKey) -> Result<Self, SyncError> {
        let object = Object::open(peer, name, key)?;
        if matches!(object.kind, Kind::Monitor { .. }) { Ok(Self(object)) } else { Err(wrong_kind()) }
    }

    /// Waits for our turn.
    ///
    /// # Errors
    /// [`SyncError`]; [`SyncError::Abandoned`] has the guard.
    pub fn lock(&self, timeout: Option<Duration>) -> Turn<LockGuard> {
        turn(self.0.acquire(1, true, true, timeout), LockGuard)
    }

    /// Our turn, if it is nobody else's.
    ///
    /// # Errors
    /// [`SyncError::Busy`], and as [`Lock::lock`].
    pub fn try_lock(&self) -> Turn<LockGuard> {
        turn(self.0.acquire(1, true, false, None), LockGuard)
    }
}

/// Many readers or one writer, first come, first served: a writer waits for the readers before it, later readers for the writer.
///
/// A writer's death is told to the next writer, and to the readers before it, who cannot repair anything. A reader's death harms nobody.
#[derive(Clone, Debug)]
pub struct ReadWriteLock(Arc<Object>);

impl ReadWriteLock {
    /// Opens the reader-writer lock `name` of `peer`.
    ///
    /// # Errors
    /// As [`Lock::open`].
    pub fn open(peer: &Peer, name: &str, key: &RemoteKey) -> Result<Self, SyncError> {
        let object = Object::open(peer, name, key)?;
        if object.kind == Kind::ReadWriteLock { Ok(Self(object)) } else { Err(wrong_kind()) }
    }

    /// Waits for our turn to read.
    ///
    /// # Errors
    /// As [`Lock::lock`].
    pub fn read(&self, timeout: Option<Duration>) -> Turn<ReadGuard> {
        turn(self.0.acquire(1, true, true, timeout), ReadGuard)
    }

    /// Waits for our turn to write.
    ///
    /// # Errors
    /// As [`Lock::lock`].
    pub fn write(&self, timeout: Option<Duration>) -> Turn<WriteGuard> {
        turn(self.0.acquire(WRITER, true, true, timeout), WriteGuard)
    }

    /// Reads, if nobody writes or waits.
    ///
    /// # Errors
    /// As [`Lock::try_lock`].
    pub fn try_read(&self) -> Turn<ReadGuard> {
        turn(self.0.acquire(1, true, false, None), ReadGuard)
    }

    /// Writes, if nobody else is here.
    ///
    /// # Errors
    /// As [`Lock::try_lock`].
    pub fn try_write(&self) -> Turn<WriteGuard> {
        turn(self.0.acquire(WRITER, true, false, None), WriteGuard)
    }
}

/// A counting semaphore, first come, first served: who wants many permits is not overtaken by those who want few.
///
/// Permits that are *acquired* belong to the process and go back when it drops them or dies. Permits that are *consumed* are gone, and
/// [`Semaphore::add`] makes new ones: this counts things, such as the items of a queue.
#[derive(Clone, Debug)]
pub struct Semaphore(Arc<Object>);

impl Semaphore {
    /// Opens the semaphore `name` of `peer`.
    ///
    /// # Errors
    /// As [`Lock::open`].
    pub fn open(peer: &Peer, name: &str, key: &RemoteKey) -> Result<Self, SyncError> {
        let object = Object::open(peer, name, key)?;
        if matches!(object.kind, Kind::Semaphore { .. }) { Ok(Self(object)) } else { Err(wrong_kind()) }
    }

    /// Waits for so many permits, all at once.
    ///
    /// # Errors
    /// As [`Lock::lock`]: abandoned when one of the permits comes from a process that died with it.
    pub fn acquire(&self, permits: u32, timeout: Option<Duration>) -> Turn<Permit> {
        turn(self.0.acquire(permits, true, true, timeout), Permit)
    }

    /// So many permits, if they are there and nobody waits.
    ///
    /// # Errors
    /// As [`Lock::try_lock`].
    pub fn try_acquire(&self, permits: u32) -> Turn<Permit> {
        turn(self.0.acquire(permits, true, false, None), Permit)
    }

    /// Waits for so many permits and uses them up. One that reaches a process as it dies is gone with it.
    ///
    /// # Errors
    /// As [`Lock::lock`].
    pub fn consume(&self, permits: u32, timeout: Option<Duration>) -> Turn<()> {
        turn(self.0.acquire(permits, false, true, timeout), drop)
    }

    /// Uses up so many permits, if they are there and nobody waits. It asks the home only where somebody waits, or some are owned; or where the
    /// permits are not mapped.
    ///
    /// # Errors
    /// As [`Lock::try_lock`].
    pub fn try_consume(&self, permits: u32) -> Turn<()> {
        turn(self.0.acquire(permits, false, false, None), drop)
    }

    /// Makes new permits; returns how many are free now.
    ///
    /// # Errors
    /// [`SyncError::Refused`] beyond 2³² − 1 permits; [`SyncError::Failed`].
    pub fn add(&self, permits: u32) -> Result<u64, SyncError> {
        if let Some(free) = self.0.add_near(permits) {
            return Ok(free.into());
        }
        done(self.0.call(Ticket { slot: 0, generation: 0 }, Op::Add { count: permits }))
    }
}
