//! Locks, monitors, semaphores, wait queues and groups (barrier, reduction, broadcast) between processes, as state machines.
//!
//! The node that exports such an object is its *home* and decides whose turn it is ([`Home`]). A process asks with a call, which is
//! answered at once: done, or queued. Who is queued gets exactly one [`Signal`] later, unless he cancels and is told [`Reply::Cancelled`].
//! docs/design/sync.md compares this with queues that the waiting processes link up themselves, and tells the races.

mod attempt;
mod gate;
mod group;
mod home;
mod message;
mod near;
mod queue;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_meet;
#[cfg(test)]
mod tests_model;
#[cfg(test)]
mod tests_near;
mod waiters;

pub use attempt::{Attempt, Outcome, Step};
pub use group::Combine;
pub use home::{Home, Kind, ObjectId, SessionId, Signalled};
pub use message::{Op, Refusal, Reply, Request, Signal, Ticket};
pub use near::{CLAIMED, Near, Nowhere, Seen, Word};
pub use waiters::Waiters;

/// What a writer takes of a reader-writer lock; a reader takes 1.
pub const WRITER: u32 = 1 << 20;
