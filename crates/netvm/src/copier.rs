//! Executes what a peer asks to have copied to or from a third node: a thread for each such peer, while it asks.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use netvm_core::copy::{Reply, Request, Third, Way};
use netvm_core::endpoint::{Exports, Request as Call};
use netvm_core::key::Access;
use netvm_core::limits::{COPIERS_MAX, COPY_PEERS_MAX};
use netvm_core::wire::Status;

use crate::connection::{PeerSession, State};
use crate::copy::{Copies, PIECE_BYTES, Pipe};
use crate::error::{Error, Result};
use crate::link::session::Memory;
use crate::node::Shared;
use crate::region::{Peer, Region};

/// A copier that has had nothing to do for so long ends, and with it its connections.
const LINGER: Duration = Duration::from_secs(2);

/// A request, and where to answer.
pub(crate) type Job = (Call, Vec<u8>);

/// Gives a request to the session's copier; false when there are too many.
pub(crate) fn submit(peer: Arc<PeerSession>, state: &mut State, job: Job) -> bool {
    let job = match &state.copier {
        Some(copier) => match copier.send(job) {
            Ok(()) => return true,
            Err(mpsc::SendError(job)) => job,
        },
        None => job,
    };
    let Some(place) = Place::take(peer.node()) else { return false };
    // Bounded by the calls that a peer may have under way.
    let (sender, receiver) = mpsc::channel();
    let _ = sender.send(job);
    let thread = std::thread::Builder::new().name("netvm-copy".to_owned());
    let started = thread.spawn(move || {
        let _place = place;
        let copier = Copier { peer: &peer, third: Vec::new() };
        copier.run(&receiver);
    });
    if started.is_ok() {
        state.copier = Some(sender);
    }
    started.is_ok()
}

/// One of the node's copiers.
struct Place(Arc<Shared>);

impl Place {
    fn take(node: &Arc<Shared>) -> Option<Self> {
        let count: &AtomicUsize = &node.copiers;
        let more = |count| (count < COPIERS_MAX).then_some(count + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Self(Arc::clone(node)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.copiers.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Copier<'a> {
    /// Who asks.
    peer: &'a Arc<PeerSession>,
    /// Third nodes' segments, the one used last at the end.
    third: Vec<(String, Peer, Region)>,
}

/// Why a request was not executed to its end.
enum Stop {
    /// The asker's own segment is not (or no longer) to be used like that.
    Own(Status),
    Reply(Reply),
}

impl From<Error> for Stop {
    /// A failure after the first byte has been sent.
    fn from(error: Error) -> Self {
        Self::Reply(match error {
            Error::Op { code, .. } => Reply::Refused(code),
            Error::Bounds { .. } => Reply::Refused(Status::OutOfBounds),
            error => Reply::Broken(error.to_string()),
        })
    }
}

impl Copier<'_> {
    fn run(mut self, jobs: &Receiver<Job>) {
        loop {
            let (call, body) = match jobs.recv_timeout(LINGER) {
                Ok(job) => job,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    let mut state = self.peer.lock();
                    // Under the lock nobody can send another.
                    match jobs.try_recv() {
                        Ok(job) => job,
                        Err(_) => return state.copier = None,
                    }
                }
            };
            // Who has gone wants nothing more: to connect for it may take long.
            if self.peer.is_closed() {
                return;
            }
            let answer = match self.execute(&body) {
                Ok(()) => Ok(Reply::Done.encode()),
                Err(Stop::Reply(reply)) => Ok(reply.encode()),
                Err(Stop::Own(status)) => Err(status),
            };
            self.peer.answer(call, answer);
        }
    }

    fn execute(&mut self, body: &[u8]) -> Result<(), Stop> {
        let request = Request::decode(body).ok_or(Stop::Own(Status::BadRequest))?;
        let Request { handle, offset, bytes, .. } = request;
        let bytes = usize::try_from(bytes).map_err(|_| Stop::Own(Status::OutOfBounds))?;
        let pieces = (0..bytes).step_by(PIECE_BYTES).map(|at| (at as u64, PIECE_BYTES.min(bytes - at)));
        let peer = self.peer;
        match request.way {
            Way::Local { .. } => Err(Stop::Own(Status::BadRequest)),
            Way::Push(third) => {
                let mut pipe = Pipe::new(self.open(third)?, request.other_offset)?;
                for (index, (at, len)) in pieces.enumerate() {
                    let buffer = pipe.buffer(index, len)?;
                    let read = peer.with_view(|view| {
                        view.check(handle, offset + at, len as u32, Access::Read)?;
                        let from = view.memory(handle, offset + at, len as u32).ok_or(Status::Fault)?;
                        buffer.copy_from(&from).ok_or(Status::Fault)
                    });
                    read.map_err(Stop::Own)?;
                    pipe.write(index, buffer)?;
                }
                Ok(pipe.finish()?)
            }
            Way::Pull(third) => {
                // Nothing is written until it can be read.
                let mut buffer = vec![0; PIECE_BYTES.min(bytes)];
                let region = self.open(third)?;
                for (at, len) in pieces {
                    region.read(request.other_offset + at, &mut buffer[..len])?;
                    let written =
                        peer.with_view(|view| view.write_and_wait(handle, offset + at, &buffer[..len]));
                    written.map_err(Stop::Own)?;
                }
                Ok(())
            }
        }
    }

    /// The third node's segment, if our policy and the network let us have it.
    fn open(&mut self, third: Third<'_>) -> Result<&Region, Stop> {
        let declined = |reason: String| Stop::Reply(Reply::Declined(reason));
        let node = self.peer.node();
        let allowed = match node.copies() {
            Copies::Never => false,
            Copies::Known => node.is_connected_to(third.address),
            Copies::Anywhere => true,
        };
        if !allowed {
            return Err(declined(format!("it does not copy to or from {}", third.address)));
        }
        let is_it = |(address, peer, region): &(String, Peer, Region)| {
            address == third.address
                && region.name() == third.name
                && region.key().matches(&third.key)
                && !peer.is_closed()
        };
        let place = match self.third.iter().position(is_it) {
            Some(place) => self.third.remove(place),
            None => {
                let open = || {
                    let peer = node.connect_for_copies(third.address)?;
                    let region = peer.import(third.name, &third.key)?;
                    Ok((third.address.to_owned(), peer, region))
                };
                self.third.retain(|(_, peer, _)| !peer.is_closed());
                if self.third.len() >= COPY_PEERS_MAX {
                    self.third.remove(0);
                }
                open().map_err(|error: Error| declined(error.to_string()))?
            }
        };
        self.third.push(place);
        match self.third.last() {
            Some((_, _, region)) => Ok(region),
            None => Err(declined("it has no connection".to_owned())),
        }
    }
}
