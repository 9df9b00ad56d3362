//! The exporter's side: passes descriptors to whoever it has met, and takes memory back.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use netvm_core::gate::{self, GATE_WORDS, Inside, SHARES};
use netvm_core::key::Access;
use netvm_core::segment::{ImportTable, SegmentId};
use netvm_core::wire::Status;
use netvm_sys::fdpass::FdSocket;
use netvm_sys::membarrier;
use netvm_sys::memfd::Memfd;
use netvm_sys::shared::SharedSlice;
use netvm_sys::words::SharedWords;

use super::meeting::{Invitation, Invited};
use super::{LinkChoice, PeerWords, Place, Request, Share};
use crate::node::{Shared, lock};
use crate::notify::Notifications;

/// Whoever has the kernel copy and is inside for so long has been stopped, and copies nothing when it goes on ([`Inside::cut`]).
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// Memory that a process of this host can reach by itself.
pub(crate) enum Near<'a> {
    /// By mapping it.
    File(&'a Memfd),
    /// By having the kernel copy.
    Apart(SharedSlice),
}

/// A process that has memory of ours mapped.
#[derive(Debug)]
pub(crate) struct Guest {
    /// The kernel closes its other end when the process dies.
    channel: FdSocket,
    gate: PeerWords,
    /// Who was inside when its session ended.
    left: Mutex<Option<Inside>>,
}

impl Guest {
    /// It will not touch anything any more: its process has died, or it was outside since its session ended.
    fn is_gone(&self) -> bool {
        self.channel.has_ended() || lock(&self.left).as_mut().is_some_and(|inside| inside.is_over(&self.gate))
    }
}

/// One segment, as one guest has it.
#[derive(Clone, Debug)]
pub(crate) struct Shared1 {
    guest: Arc<Guest>,
    number: usize,
    /// It is not mapped: the kernel copies.
    apart: bool,
}

/// What one session's peer has mapped.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// Met, and not yet proved to be the session's peer.
    met: Option<Invited>,
    guest: Option<Arc<Guest>>,
    /// By handle.
    shares: HashMap<u32, (SegmentId, usize)>,
}

impl Sharing {
    /// Answers the peer; never waits.
    pub(crate) fn answer(
        &mut self,
        shared: &Shared,
        imports: &ImportTable,
        body: &[u8],
    ) -> Result<Vec<u8>, Status> {
        match Request::decode(body).ok_or(Status::BadRequest)? {
            Request::Meet(_) | Request::Share { .. } if !LinkChoice::from_environment().may_share() => {
                Err(Status::Unsupported)
            }
            Request::Meet(invitation) => self.meet(&invitation),
            Request::Share { handle, light, apart } => self.share(shared, imports, handle, light, apart),
            Request::Applied => Ok(Vec::new()),
            Request::Ring { handle } => {
                let exports = lock(&shared.exports);
                let (id, _) = imports.notifications(&exports.table, handle).ok_or(Status::NoHandle)?;
                let notifications = exports.segment(id).map(|segment| segment.notifications.clone());
                drop(exports);
                notifications.ok_or(Status::NoHandle)?.ring_descriptor();
                Ok(Vec::new())
            }
        }
    }

    fn meet(&mut self, invitation: &Invitation) -> Result<Vec<u8>, Status> {
        if self.guest.is_some() {
            return Err(Status::BadRequest);
        }
        self.met = Some(Invited::come(invitation).map_err(|_| Status::Unsupported)?);
        Ok(Vec::new())
    }

    fn share(
        &mut self,
        shared: &Shared,
        imports: &ImportTable,
        handle: u32,
        light: bool,
        apart: bool,
    ) -> Result<Vec<u8>, Status> {
        if self.shares.contains_key(&handle) {
            return Err(Status::BadRequest);
        }
        // Held until the share is listed: nobody unexports in between.
        let mut exports = lock(&shared.exports);
        let id = imports.check(&exports.table, handle, 0, 0, Access::Read)?;
        let writable = imports.check(&exports.table, handle, 0, 0, Access::Write).is_ok();
        let segment = exports.segment_mut(id).ok_or(Status::NoHandle)?;
        let memory = segment.near(apart).ok_or(Status::Unsupported)?;
        let number = (0..SHARES).find(|number| self.shares.values().all(|(_, used)| used != number));
        let number = number.ok_or(Status::Full)?;
        let board = match segment.notifications.file() {
            Some(board) if writable => Some(board),
            // It could not notify.
            None if writable && segment.notifications.numbers() > 0 => return Err(Status::Unsupported),
            _ => None,
        };
        let (mut guest, is_new) = match &self.guest {
            Some(guest) => {
                // It has taken what we sent last.
                guest.channel.receive(&mut [0; 1]).map_err(|_| Status::Busy)?;
                (Arc::clone(guest), false)
            }
            None => (Arc::new(self.accept()?), true),
        };
        let mut message = handle.to_le_bytes().to_vec();
        let read_only;
        let mut fds = Vec::new();
        let bytes = match memory {
            Near::File(file) => {
                fds.push(if writable {
                    file.as_fd()
                } else {
                    read_only = file.read_only().map_err(|_| Status::Unsupported)?;
                    read_only.as_fd()
                });
                file.len()
            }
            Near::Apart(memory) => {
                let (address, bytes) = (memory.as_ptr().addr() as u64, memory.len() as u64);
                let gate = guest.gate.0.words().as_ptr().addr() as u64;
                message.extend(Place { address, bytes, writable, gate }.encode());
                bytes
            }
        };
        let apart = matches!(memory, Near::Apart(_));
        if is_new {
            fds.extend(guest.gate.0.file().map(AsFd::as_fd));
        }
        fds.extend(board.map(AsFd::as_fd));
        gate::open(&guest.gate, number);
        guest.channel.send(&message, &fds).map_err(|_| Status::Unsupported)?;
        if let Some(guest) = Arc::get_mut(&mut guest) {
            guest.gate.0.forget_file();
        }
        let light = light && membarrier::is_available();
        let (number_told, board) = (number as u32, board.is_some());
        let answer = Share { number: number_told, bytes, gate: is_new, board, light, apart };
        segment.shares.retain(|share| !share.guest.is_gone());
        segment.shares.push(Shared1 { guest: Arc::clone(&guest), number, apart });
        self.guest = Some(guest);
        self.shares.insert(handle, (id, number));
        Ok(answer.encode())
    }

    fn accept(&mut self) -> Result<Guest, Status> {
        let met = self.met.take().ok_or(Status::BadRequest)?;
        let channel = met.believe().ok_or(Status::Unsupported)?;
        let gate = SharedWords::new(GATE_WORDS).map_err(|_| Status::Full)?;
        Ok(Guest { channel, gate: PeerWords(gate), left: Mutex::default() })
    }

    /// Whether the peer has what it knows by this handle mapped, or may have the kernel copy there.
    pub(crate) fn has(&self, handle: u32) -> bool {
        self.shares.contains_key(&handle)
    }

    /// The peer says that it has unmapped what it had under this handle.
    pub(crate) fn forget(&mut self, shared: &Shared, handle: u32) {
        let (Some((id, number)), Some(guest)) = (self.shares.remove(&handle), &self.guest) else { return };
        gate::revoke(&guest.gate, number);
        if let Some(segment) = lock(&shared.exports).segment_mut(id) {
            segment.shares.retain(|share| !Arc::ptr_eq(&share.guest, guest) || share.number != number);
        }
    }

    /// The session has ended. What the peer is doing at this moment it may finish: whoever unexports waits for that.
    pub(crate) fn end(&mut self, shared: &Shared) {
        self.met = None;
        let Some(guest) = self.guest.take() else { return };
        (0..SHARES).for_each(|number| gate::revoke(&guest.gate, number));
        // Without the barrier nobody knows who is inside before whoever unexports has slept.
        if membarrier::barrier() {
            *lock(&guest.left) = Some(Inside::new(&guest.gate));
        }
        let exports = lock(&shared.exports);
        let segments = self
            .shares
            .values()
            .filter_map(|(id, _)| exports.segment(*id).filter(|_| exports.table.has(*id)));
        let boards: Vec<_> = segments.map(|segment| segment.notifications.clone()).collect();
        drop(exports);
        // What it has signalled last it may not have told anybody, and whoever signals next believes that it has.
        boards.iter().filter(|board| board.numbers() > 0).for_each(Notifications::wake_all);
        if !guest.is_gone() {
            // The next one that shares looks again.
            return;
        }
        let mut exports = lock(&shared.exports);
        for (id, _) in self.shares.values() {
            if let Some(segment) = exports.segment_mut(*id) {
                segment.shares.retain(|share| !Arc::ptr_eq(&share.guest, &guest));
            }
        }
    }
}

/// Memory that is being taken back from everybody who has it.
#[derive(Clone, Debug, Default)]
pub(crate) struct TakingBack {
    inside: Vec<(Shared1, Inside)>,
    since: Option<Instant>,
}

impl TakingBack {
    /// From now on nobody goes in.
    pub(crate) fn begin(shares: Vec<Shared1>) -> Self {
        if shares.is_empty() {
            return Self::default();
        }
        for Shared1 { guest, number, .. } in &shares {
            gate::revoke(&guest.gate, *number);
        }
        if !membarrier::barrier() {
            // Whoever relied on it has filtered it out since: stores do not linger for so long.
            std::thread::sleep(Duration::from_millis(10));
        }
        let look = |share: Shared1| {
            let inside = Inside::new(&share.guest.gate);
            inside.cut(&share.guest.gate);
            (share, inside)
        };
        Self { inside: shares.into_iter().map(look).collect(), since: Some(Instant::now()) }
    }

    /// Waits until `deadline` for those who are inside: true when none of them touches it any more, for ever.
    pub(crate) fn wait(mut self, deadline: Instant) -> bool {
        let is_late = |since: Option<Instant>| since.is_some_and(|since| since.elapsed() > TIMEOUT);
        for round in 0u32.. {
            self.inside.retain_mut(|(share, inside)| !inside.is_over(&share.guest.gate));
            if round >= 100 {
                let is_late = is_late(self.since);
                self.inside.retain(|(share, _)| !(share.guest.channel.has_ended() || share.apart && is_late));
            }
            if self.inside.is_empty() {
                break;
            }
            match round {
                0..100 => std::hint::spin_loop(),
                100..200 => std::thread::yield_now(),
                _ if Instant::now() >= deadline => return false,
                _ => std::thread::sleep(Duration::from_micros(100)),
            }
        }
        true
    }
}
