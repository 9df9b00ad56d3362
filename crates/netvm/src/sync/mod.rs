//! Synchronisation between processes on any machines: locks, monitors, reader-writer locks, semaphores, wait queues, and groups that meet
//! at barriers, reduce and broadcast.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use netvm::node::Node;
//! use netvm::sync::{Kind, Lock};
//!
//! let home = Node::new()?;
//! let address = home.listen("127.0.0.1:0")?;
//! let key = home.export_sync("stock", Kind::LOCK)?;
//!
//! let node = Node::new()?;
//! let lock = Lock::open(&node.connect(&address)?, "stock", &key)?;
//! let guard = lock.lock(None)?;
//! // Nobody else is here, on no machine.
//! drop(guard);
//! # Ok(()) }
//! ```
//!
//! The node that exports an object is its home: its thread decides whose turn it is, in the order of asking, and the program behind it need
//! do nothing. Asking is one round trip, as an atomic is; who has to wait is told by one message when his turn has come, and spins or sleeps
//! until then. A process at the home itself uses [`Node::connect_local`](crate::node::Node::connect_local).
//!
//! **On one host** a lock or monitor that nobody else wants is taken and given back, and permits of a semaphore that nobody waits for are used up and made, without asking,
//! by a word of memory that its users have mapped, unless [`LinkChoice::Socket`](crate::node::LinkChoice) is chosen. Who finds it taken queues at the home like everybody else.
//!
//! **Order.** What was written through the same [`Peer`] before a turn ends is there before the next one begins. Memory of other nodes wants
//! a [`flush`](crate::region::Region::flush) first.
//!
//! **Death.** A process that dies, or whose connection is lost, gives back what it has and waits for nothing any more. The next one gets what
//! it had as [`SyncError::Abandoned`], with the guard in it: whatever the object protects may be half done. A process that is cut off
//! but alive can no more write to the home's memory, since its session has ended, but it can to other nodes'.
//!
//! **Time-outs** leave the queue as if one had never asked. A turn that comes at the last moment is taken, not lost.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use netvm_core::key::RemoteKey;
use netvm_core::sync::{Attempt, Near, Op, Outcome, Reply, Request, Step, Ticket};
pub use netvm_core::sync::{Combine, Kind, Refusal};
use netvm_core::wire::Status;

use crate::error::Error;
use crate::region::{Peer, Region};

mod gates;
mod group;
mod monitor;
mod near;
mod queue;

pub use gates::{Lock, LockGuard, Permit, ReadGuard, ReadWriteLock, Semaphore, WriteGuard};
pub use group::Group;
pub use monitor::{Monitor, MonitorGuard};
pub(crate) use near::LockWord;
use near::Taken;
pub use queue::{WaitQueue, Waiting};

/// Handle of the session's own signals: no segment has it.
pub(crate) const SYNC_HANDLE: u32 = u32::MAX;
/// The call by which turns are asked for.
pub(crate) const SYNC_METHOD: u32 = 0x5359_4E43;

/// Stands for no guard in [`SyncError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nothing {}

/// Why it is not simply our turn.
#[non_exhaustive]
pub enum SyncError<G = Nothing> {
    /// It is our turn, and somebody died in his: repair what the object protects, or give up. [`SyncError::recover`] takes the guard.
    Abandoned(G),
    /// Time was over. We are not in the queue any more.
    TimedOut,
    /// Not now (only when asked not to wait).
    Busy,
    /// A member of the group has died, or left while others waited: this meeting will not be.
    Broken,
    /// The home did not do it.
    Refused(Refusal),
    /// The home is gone, or cannot be reached.
    Failed(Error),
}

/// A guard, or why there is none.
pub type Turn<G> = Result<G, SyncError<G>>;

impl<G> SyncError<G> {
    /// The guard after all, when the one before died; for who can repair what is half done, or has nothing that could be.
    ///
    /// `lock.lock(None).or_else(SyncError::recover)?`
    ///
    /// # Errors
    /// All but [`SyncError::Abandoned`].
    pub fn recover(self) -> Result<G, SyncError> {
        match self {
            Self::Abandoned(guard) => Ok(guard),
            Self::TimedOut => Err(SyncError::TimedOut),
            Self::Busy => Err(SyncError::Busy),
            Self::Broken => Err(SyncError::Broken),
            Self::Refused(refusal) => Err(SyncError::Refused(refusal)),
            Self::Failed(error) => Err(SyncError::Failed(error)),
        }
    }

    fn map<H>(self, map: impl FnOnce(G) -> H) -> SyncError<H> {
        match self {
            Self::Abandoned(guard) => SyncError::Abandoned(map(guard)),
            Self::TimedOut => SyncError::TimedOut,
            Self::Busy => SyncError::Busy,
            Self::Broken => SyncError::Broken,
            Self::Refused(refusal) => SyncError::Refused(refusal),
            Self::Failed(error) => SyncError::Failed(error),
        }
    }
}

impl<G> From<Error> for SyncError<G> {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl<G> fmt::Display for SyncError<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Abandoned(_) => {
                "it is our turn, but who had it before died: what it protects may be half done"
            }
            Self::TimedOut => "time was over before it was our turn",
            Self::Busy => "it is somebody else's turn",
            Self::Broken => "a member of the group died or left before all had come",
            Self::Refused(Refusal::WrongKind) => "the object is of another kind",
            Self::Refused(Refusal::NotHeld) => "the home does not know that we have it",
            Self::Refused(Refusal::Number) => "the number is out of range for this object",
            Self::Refused(Refusal::Full) => "all places are taken",
            Self::Refused(Refusal::InUse) => "it is in use by another thread of this process",
            Self::Refused(Refusal::Mismatch) => "others of the group do something else at this meeting",
            Self::Refused(Refusal::Closed) => "the object is not there any more",
            Self::Failed(error) => return error.fmt(f),
        })
    }
}

impl<G> fmt::Debug for SyncError<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl<G> std::error::Error for SyncError<G> {}

/// An object at its home.
#[derive(Debug)]
pub(crate) struct Object {
    region: Region,
    pub(crate) kind: Kind,
    /// A lock or semaphore whose word is mapped here.
    near: Option<Near>,
}

impl Object {
    fn open(peer: &Peer, name: &str, key: &RemoteKey) -> Result<Arc<Self>, SyncError> {
        let region = peer.import_called(name, key)?;
        let mut object = Self { region, kind: Kind::WaitQueue, near: None };
        let ticket = Ticket { slot: 0, generation: 0 };
        match object.call(ticket, Op::Describe)? {
            Reply::Done(kind) => {
                object.kind = Kind::from_u64(kind).ok_or(SyncError::Refused(Refusal::WrongKind))?;
            }
            reply => return Err(unexpected(reply)),
        }
        object.come_near()?;
        Ok(Arc::new(object))
    }

    fn call(&self, ticket: Ticket, op: Op) -> Result<Reply, SyncError> {
        let request = Request { object: self.region.handle(), ticket, op };
        let body = self.region.call(SYNC_METHOD, &request.encode()).map_err(|error| match error {
            Error::Op { code: Status::NoHandle, .. } => SyncError::Refused(Refusal::Closed),
            error => error.into(),
        })?;
        Reply::decode(&body).ok_or_else(|| nonsense().into())
    }

    /// Gives back what a ticket has, without waiting. Lost with the session at worst, and then the home takes it back itself. The
    /// ticket's next use does not overtake it: no request overtakes a notification.
    fn give_up(&self, ticket: Ticket) {
        if let Some(notify) = ticket.release() {
            // The next turn may be taken by the word, and no request take this with it.
            let _ = self.region.peer().tell_released(notify, self.near.is_none());
        }
    }

    /// A ticket of our session.
    fn ticket(&self) -> Result<Ticket, SyncError> {
        self.region.peer().lock().inbox.waiters.take().ok_or(SyncError::Refused(Refusal::Full))
    }

    /// A ticket for another wait of who has this one already.
    fn renewed(&self, ticket: Ticket) -> Ticket {
        self.region.peer().lock().inbox.waiters.renew(ticket.slot)
    }

    fn give_back(&self, ticket: Ticket) {
        self.region.peer().lock().inbox.waiters.give_back(ticket.slot);
    }

    /// Asks, waits, and cancels when time is over; `asked` and `waits` are the tickets of the request and of its signal.
    fn attempt(
        &self,
        asked: Ticket,
        waits: Ticket,
        op: Op,
        timeout: Option<Duration>,
    ) -> Result<Outcome, SyncError> {
        let mut attempt = Attempt::default();
        attempt.reply(self.call(asked, op)?);
        self.finish(attempt, waits, timeout)
    }

    fn finish(
        &self,
        mut attempt: Attempt,
        waits: Ticket,
        timeout: Option<Duration>,
    ) -> Result<Outcome, SyncError> {
        let peer = self.region.peer();
        loop {
            match attempt.step() {
                Step::Signal => {
                    match peer.wait_signal(waits, timeout)? {
                        Some(signal) => attempt.signal(signal),
                        None => attempt.timeout(),
                    };
                }
                Step::Cancel => {
                    attempt.cancelled();
                    attempt.reply(self.call(waits, Op::Cancel)?);
                }
                Step::LastSignal => {
                    // It is certain to come, or the session ends.
                    if let Some(signal) = peer.wait_signal(waits, None)? {
                        attempt.signal(signal);
                    }
                }
                Step::Done(outcome) => return Ok(outcome.clone()),
                Step::Reply => return Err(nonsense().into()),
            }
        }
    }

    /// Some units; not `wait`: does not queue.
    fn acquire(
        self: &Arc<Self>,
        count: u32,
        owned: bool,
        wait: bool,
        timeout: Option<Duration>,
    ) -> Turn<Held> {
        match self.take_near(count, owned) {
            Taken::Ours(word) => {
                return Ok(Held { object: Arc::clone(self), by: By::Word(word), owned });
            }
            Taken::Others if !wait => return Err(SyncError::Busy),
            Taken::Others | Taken::Home => {}
        }
        let ticket = self.ticket().map_err(|error| error.map(|nothing| match nothing {}))?;
        let outcome = self.attempt(ticket, ticket, Op::Acquire { count, wait, owned }, timeout);
        let held = |owned: bool| Held { object: Arc::clone(self), by: By::Ticket(ticket), owned };
        match outcome {
            Ok(Outcome::Ours { abandoned: false, .. }) => Ok(held(owned)),
            Ok(Outcome::Ours { abandoned: true, .. }) => Err(SyncError::Abandoned(held(owned))),
            ended => {
                self.give_back(ticket);
                Err(failed(ended))
            }
        }
    }
}

/// By what something is ours.
#[derive(Clone, Copy, Debug)]
enum By {
    Ticket(Ticket),
    /// What we have made of the lock's word.
    Word(u64),
}

/// A possession: given back when dropped.
#[derive(Debug)]
pub(crate) struct Held {
    object: Arc<Object>,
    by: By,
    owned: bool,
}

impl Held {
    /// Gives it back and hears that the home has it.
    fn release(mut self) -> Result<(), SyncError> {
        self.owned = false;
        if matches!(self.by, By::Word(word) if self.object.give_back_near(word)) {
            return Ok(());
        }
        done(self.object.call(self.known_as()?, Op::Release)).map(drop)
    }

    /// By what the home knows it.
    fn known_as(&self) -> Result<Ticket, SyncError> {
        match (self.by, &self.object.near) {
            (By::Ticket(ticket), _) => Ok(ticket),
            (By::Word(_), Some(near)) => Ok(near.ticket()),
            (By::Word(_), None) => Err(SyncError::Refused(Refusal::NotHeld)),
        }
    }

    /// A ticket of its own, with which one can wait. On errors it is not ours any more, as far as we know.
    fn with_ticket(&mut self) -> Result<Ticket, SyncError> {
        if let By::Ticket(ticket) = self.by {
            return Ok(ticket);
        }
        let ticket = self.object.ticket()?;
        match done(self.object.call(ticket, Op::Adopt)) {
            Ok(_) => {
                self.by = By::Ticket(ticket);
                Ok(ticket)
            }
            Err(error) => {
                self.object.give_back(ticket);
                Err(error)
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        match self.by {
            By::Ticket(ticket) => {
                if self.owned {
                    self.object.give_up(ticket);
                }
                self.object.give_back(ticket);
            }
            By::Word(word) => {
                if self.owned && !self.object.give_back_near(word) {
                    let _ = self.known_as().map(|ticket| self.object.give_up(ticket));
                }
            }
        }
    }
}

fn nonsense() -> Error {
    Error::Other("a home answered with something that makes no sense".to_owned())
}

fn unexpected(reply: Reply) -> SyncError {
    match reply {
        Reply::Refused(refusal) => SyncError::Refused(refusal),
        _ => nonsense().into(),
    }
}

fn done(reply: Result<Reply, SyncError>) -> Result<u64, SyncError> {
    match reply? {
        Reply::Done(number) => Ok(number),
        reply => Err(unexpected(reply)),
    }
}

/// What an attempt that was not granted means.
fn failed<G>(ended: Result<Outcome, SyncError>) -> SyncError<G> {
    match ended {
        Ok(Outcome::TimedOut) => SyncError::TimedOut,
        Ok(Outcome::Busy) => SyncError::Busy,
        Ok(Outcome::Broken) => SyncError::Broken,
        Ok(Outcome::Refused(refusal)) => SyncError::Refused(refusal),
        Ok(Outcome::Ours { .. } | Outcome::Result(_) | Outcome::Nonsense) => nonsense().into(),
        Err(error) => error.map(|nothing| match nothing {}),
    }
}

fn wrong_kind() -> SyncError {
    SyncError::Refused(Refusal::WrongKind)
}
