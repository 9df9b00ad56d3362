//! Barrier, reduction, broadcast.

use std::sync::Arc;
use std::time::Duration;

use netvm_core::key::RemoteKey;
use netvm_core::sync::{Combine, Kind, Op, Outcome, Refusal, Reply, Ticket};

use super::{Object, SyncError, done, failed, nonsense, unexpected, wrong_kind};
use crate::region::Peer;

/// Membership in a group that meets: at a barrier, to reduce numbers, or for a broadcast. All do the same at each meeting.
///
/// When a member dies, each of the others gets [`SyncError::Broken`] once: at the meeting under way, or at its next. Then a new member
/// can join. Leaving (dropping this) is the same while others wait, and harmless between meetings.
#[derive(Debug)]
pub struct Group {
    object: Arc<Object>,
    ticket: Ticket,
    rank: u32,
    parties: u32,
}

impl Group {
    /// Joins the group `name` of `peer`.
    ///
    /// # Errors
    /// [`SyncError::Refused`] when it has all its members, or is no group; [`SyncError::Failed`] as [`Peer::import`].
    pub fn join(peer: &Peer, name: &str, key: &RemoteKey) -> Result<Self, SyncError> {
        let object = Object::open(peer, name, key)?;
        let Kind::Group { parties } = object.kind else { return Err(wrong_kind()) };
        let ticket = object.ticket()?;
        match done(object.call(ticket, Op::Join)) {
            Ok(rank) => Ok(Self { object, ticket, rank: rank as u32, parties }),
            Err(error) => {
                object.give_back(ticket);
                Err(error)
            }
        }
    }

    /// Our rank, from 0 on: the least that was free.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How many meet.
    pub fn parties(&self) -> u32 {
        self.parties
    }

    /// Waits until all members are here.
    ///
    /// # Errors
    /// [`SyncError::TimedOut`]: then we have not been here; [`SyncError::Broken`]; [`SyncError::Refused`] when others do something else;
    /// [`SyncError::Failed`].
    pub fn barrier(&mut self, timeout: Option<Duration>) -> Result<(), SyncError> {
        self.meet(Combine::Nothing, &[], timeout).map(drop)
    }

    /// Combines the numbers of all members, place by place, in the order of ranks; all get the result. At most 512 numbers, as many of each.
    ///
    /// # Errors
    /// As [`Group::barrier`].
    pub fn reduce(
        &mut self,
        combine: Combine,
        numbers: &mut [u64],
        timeout: Option<Duration>,
    ) -> Result<(), SyncError> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let result = self.meet(combine, &bytes, timeout)?;
        if result.len() != bytes.len() {
            return Err(nonsense().into());
        }
        for (number, bytes) in numbers.iter_mut().zip(result.as_chunks::<8>().0) {
            *number = u64::from_le_bytes(*bytes);
        }
        Ok(())
    }

    /// As [`Group::reduce`] for one floating-point number, with a [`Combine`] for those.
    ///
    /// # Errors
    /// As [`Group::barrier`].
    pub fn reduce_f64(
        &mut self,
        combine: Combine,
        number: f64,
        timeout: Option<Duration>,
    ) -> Result<f64, SyncError> {
        let mut numbers = [number.to_bits()];
        self.reduce(combine, &mut numbers, timeout)?;
        Ok(f64::from_bits(numbers[0]))
    }

    /// The bytes of the member with rank `root` to all; the others' are not looked at. At most 4096.
    ///
    /// # Errors
    /// As [`Group::barrier`].
    pub fn broadcast(
        &mut self,
        root: u32,
        bytes: &[u8],
        timeout: Option<Duration>,
    ) -> Result<Vec<u8>, SyncError> {
        let combine = u16::try_from(root).map(Combine::Broadcast);
        let combine = combine.map_err(|_| SyncError::Refused(Refusal::Number))?;
        let bytes = if root == self.rank { bytes } else { &[] };
        self.meet(combine, bytes, timeout)
    }

    fn meet(
        &mut self,
        combine: Combine,
        bytes: &[u8],
        timeout: Option<Duration>,
    ) -> Result<Vec<u8>, SyncError> {
        if bytes.len() > netvm_core::limits::GROUP_BYTES_MAX {
            return Err(SyncError::Refused(Refusal::Number));
        }
        let ticket = self.object.renewed(self.ticket);
        let op = Op::Arrive { next: ticket.generation, combine, bytes: bytes.to_vec() };
        let outcome = self.object.attempt(self.ticket, ticket, op, timeout);
        if !matches!(outcome, Ok(Outcome::Refused(_))) {
            self.ticket = ticket;
        }
        match outcome {
            Ok(Outcome::Result(bytes)) => Ok(bytes),
            Ok(Outcome::Ours { .. }) if combine == Combine::Nothing => Ok(Vec::new()),
            Ok(Outcome::Ours { .. }) => match self.object.call(self.ticket, Op::Fetch)? {
                Reply::Result(bytes) => Ok(bytes),
                reply => Err(unexpected(reply)),
            },
            ended => Err(failed(ended)),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.object.give_up(self.ticket);
        self.object.give_back(self.ticket);
    }
}
