//! What a process that forks has for its child: a lease of the same slabs, until the child claims it.

use std::time::{Duration, Instant};

use netvm_core::key::RemoteKey;
use netvm_core::limits::{TICKET_TIMEOUT_MS, UNCLAIMED_MAX};
use netvm_core::slab::LeaseId;

/// All that nobody has claimed.
#[derive(Default)]
pub(super) struct Tickets(Vec<Ticket>);

struct Ticket {
    key: [u8; 16],
    lease: LeaseId,
    /// Whose lease it is a fork of, as long as that lasts: to whom it counts.
    of: Option<LeaseId>,
    since: Instant,
}

impl Tickets {
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// The forks of a lease.
    pub(super) fn forks_of(&self, lease: LeaseId) -> impl Iterator<Item = LeaseId> + '_ {
        self.0.iter().filter(move |ticket| ticket.of == Some(lease)).map(|ticket| ticket.lease)
    }

    /// Whether a lease may have another fork.
    pub(super) fn has_room(&self, lease: LeaseId) -> bool {
        self.forks_of(lease).count() < UNCLAIMED_MAX
    }

    /// For whoever has the key.
    pub(super) fn add(&mut self, key: [u8; 16], fork: LeaseId, of: LeaseId) {
        self.0.push(Ticket { key, lease: fork, of: Some(of), since: Instant::now() });
    }

    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn key(&self, index: usize) -> Option<[u8; 16]> {
        Some(self.0.get(index)?.key)
    }

    pub(super) fn claim(&mut self, key: &[u8; 16]) -> Option<LeaseId> {
        let key = RemoteKey::from_bytes(*key);
        let same = |ticket: &Ticket| RemoteKey::from_bytes(ticket.key).matches(&key);
        let index = self.0.iter().position(same)?;
        Some(self.0.swap_remove(index).lease)
    }

    /// Leases that nobody has come for in time.
    pub(super) fn take_stale(&mut self, now: Instant) -> Vec<LeaseId> {
        let is_stale = |ticket: &mut Ticket| now - ticket.since > Duration::from_millis(TICKET_TIMEOUT_MS);
        self.0.extract_if(.., is_stale).map(|ticket| ticket.lease).collect()
    }

    /// A lease has ended; another may get its number.
    pub(super) fn forget_parent(&mut self, lease: LeaseId) {
        self.0.iter_mut().filter(|ticket| ticket.of == Some(lease)).for_each(|ticket| ticket.of = None);
    }
}
