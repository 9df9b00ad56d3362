//! The importer's side, until the memory is mapped.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use netvm_core::gate::{GATE_WORDS, SHARES};
use netvm_core::key::{RemoteKey, Rights};
use netvm_core::notify::{Board, board_words};
use netvm_core::wire::Status;
use netvm_sys::fdpass::{FdListener, FdSocket};
use netvm_sys::mapping::Mapping;
use netvm_sys::membarrier;
use netvm_sys::memfd::Memfd;
use netvm_sys::words::SharedWords;

use super::mapped::Mapped;
use super::{LinkChoice, PeerWords, Request, SHM_METHOD, Secret, Share, meeting_name};
use crate::connection::PeerSession;
use crate::error::Error;
use crate::node::lock;

/// What a session knows of its peer's host.
#[derive(Debug, Default)]
pub(crate) struct Neighbour {
    choice: Mutex<LinkChoice>,
    meeting: Mutex<Meeting>,
}

#[derive(Debug, Default)]
enum Meeting {
    #[default]
    Untried,
    Met(Host),
    /// Why not.
    Failed(String),
}

/// A peer on this host.
#[derive(Debug)]
struct Host {
    channel: Arc<FdSocket>,
    gate: Option<Arc<PeerWords>>,
}

impl Neighbour {
    pub(crate) fn choose(&self, link: LinkChoice) {
        *lock(&self.choice) = link;
    }

    pub(crate) fn choice(&self) -> LinkChoice {
        lock(&self.choice).or_environment()
    }

    /// Maps the segment that was imported under `handle`, of `len` bytes and so many notification numbers.
    ///
    /// # Errors
    /// Why it cannot be mapped, in words.
    pub(crate) fn map(
        &self,
        peer: &PeerSession,
        handle: u32,
        len: u64,
        rights: Rights,
        numbers: u32,
    ) -> Result<Mapped, String> {
        // One share at a time: their descriptors come in order.
        let mut meeting = lock(&self.meeting);
        if let Meeting::Untried = *meeting {
            *meeting = match meet(peer) {
                Ok(channel) => Meeting::Met(Host { channel: Arc::new(channel), gate: None }),
                Err(reason) => Meeting::Failed(reason),
            };
        }
        let host = match &mut *meeting {
            Meeting::Met(host) => host,
            Meeting::Failed(reason) => return Err(reason.clone()),
            Meeting::Untried => return Err(String::new()),
        };
        let request = Request::Share { handle, light: membarrier::register() };
        let answer = peer.call(SHM_METHOD, &request.encode()).map_err(|error| match error {
            Error::Op { code: Status::Unsupported, .. } => {
                "the peer's memory is not a whole shareable file".to_owned()
            }
            Error::Op { code: Status::Full, .. } => "too many segments of the peer are mapped".to_owned(),
            other => other.to_string(),
        })?;
        let share = Share::decode(&answer).ok_or("its answer makes no sense")?;
        let mut bytes = [0; 4];
        let (count, fds) = host.channel.receive(&mut bytes).map_err(|error| error.to_string())?;
        host.channel.send(&[1], &[]).map_err(|error| error.to_string())?;
        if bytes[..count] != handle.to_le_bytes() {
            return Err("its descriptors are another segment's".to_owned());
        }
        host.open(&share, fds, len, rights, numbers).map_err(|error| format!("cannot map it: {error}"))
    }
}

impl Host {
    fn open(
        &mut self,
        share: &Share,
        fds: Vec<OwnedFd>,
        len: u64,
        rights: Rights,
        numbers: u32,
    ) -> std::io::Result<Mapped> {
        let invalid = || std::io::Error::from(std::io::ErrorKind::InvalidData);
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or_else(invalid);
        let number = usize::try_from(share.number).ok().filter(|&number| number < SHARES);
        if share.bytes < len || share.board != (rights == Rights::ReadWrite && numbers > 0) {
            return Err(invalid());
        }
        let memory = Memfd::adopt(next()?, share.bytes)?;
        let memory = Mapping::of_peer(&memory, rights == Rights::ReadWrite)?;
        if share.gate {
            let words = SharedWords::of_peer(next()?, GATE_WORDS)?;
            self.gate = Some(Arc::new(PeerWords(words)));
        }
        let board = if share.board {
            Some(Board::of_words(PeerWords(SharedWords::of_peer(next()?, board_words(numbers))?)))
        } else {
            None
        };
        Ok(Mapped {
            memory,
            rights,
            gate: self.gate.clone().ok_or_else(invalid)?,
            share: number.ok_or_else(invalid)?,
            light: share.light && membarrier::register(),
            board,
            _channel: Arc::clone(&self.channel),
        })
    }
}

/// Meets the peer, if it is on this host.
fn meet(peer: &PeerSession) -> Result<FdSocket, String> {
    let random = || {
        let mut bytes: Secret = [0; 16];
        getrandom::fill(&mut bytes).map(|()| bytes).map_err(|error| error.to_string())
    };
    let (name, hello, proof) = (random()?, random()?, random()?);
    let listener = FdListener::bind(&meeting_name(&name))
        .map_err(|error| format!("no sockets to pass descriptors over: {error}"))?;
    peer.call(SHM_METHOD, &Request::Meet { name, hello, proof }.encode()).map_err(|error| match error {
        Error::Op { code: Status::Unsupported, .. } => {
            "the peer is on another host (or in another network name space), or shares no memory".to_owned()
        }
        Error::Op { code: Status::NoMethod, .. } => "the peer's netvm has no shared memory".to_owned(),
        other => other.to_string(),
    })?;
    // It has connected and sent its part before it answered; whoever else has come is not it.
    while let Some(socket) = listener.accept().map_err(|error| error.to_string())? {
        let mut bytes = [0; 16];
        let known = match socket.receive(&mut bytes) {
            Ok((16, fds)) => {
                fds.is_empty() && RemoteKey::from_bytes(bytes).matches(&RemoteKey::from_bytes(hello))
            }
            _ => false,
        };
        if known {
            socket.send(&proof, &[]).map_err(|error| error.to_string())?;
            return Ok(socket);
        }
    }
    Err("the peer did not come to the meeting".to_owned())
}
