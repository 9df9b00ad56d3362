//! The importer's side, until the memory is mapped.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use netvm_core::gate::{GATE_WORDS, SHARES, TOKEN, TOKEN_WORDS};
use netvm_core::key::Rights;
use netvm_core::notify::{Board, board_words};
use netvm_core::wire::Status;
use netvm_core::words::Words;
use netvm_sys::fdpass::FdSocket;
use netvm_sys::mapping::Mapping;
use netvm_sys::membarrier;
use netvm_sys::memfd::Memfd;
use netvm_sys::process::{Process, Target};
use netvm_sys::words::SharedWords;

use super::mapped::{Apart, Mapped, Memory};
use super::meeting::Inviter;
use super::{LinkChoice, PLACE_BYTES, PeerWords, Place, Request, SHM_METHOD, Share};
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
    /// Its process, once the kernel has let us copy from it; `Err` says why it does not.
    process: Option<Result<Arc<Process>, String>>,
}

impl Neighbour {
    pub(crate) fn choose(&self, link: LinkChoice) {
        *lock(&self.choice) = link;
    }

    pub(crate) fn choice(&self) -> LinkChoice {
        lock(&self.choice).or_environment()
    }

    /// The number of the peer's process, if it is one of this host that meets us.
    pub(crate) fn process_id(&self, peer: &PeerSession) -> Option<u32> {
        let mut meeting = lock(&self.meeting);
        match meeting.of(peer) {
            Ok(host) => {
                host.channel.peer_id().ok().and_then(|id| u32::try_from(id).ok()).filter(|&id| id > 0)
            }
            Err(_) => None,
        }
    }

    /// Maps the segment that was imported under `handle`, of `len` bytes and so many notification numbers; or, if that is enough by
    /// `choice`, finds out how it is copied without.
    ///
    /// # Errors
    /// Why it cannot be reached, in words.
    pub(crate) fn map(
        &self,
        peer: &PeerSession,
        choice: LinkChoice,
        handle: u32,
        len: u64,
        rights: Rights,
        numbers: u32,
    ) -> Result<Mapped, String> {
        // One share at a time: their descriptors come in order.
        let mut meeting = lock(&self.meeting);
        let host = meeting.of(peer)?;
        let apart = choice == LinkChoice::Auto && !matches!(host.process, Some(Err(_)));
        let request = Request::Share { handle, light: membarrier::register(), apart };
        let answer = peer.call(SHM_METHOD, &request.encode()).map_err(|error| match error {
            Error::Op { code: Status::Unsupported, .. } => {
                "the peer's memory is not a whole shareable file".to_owned()
            }
            Error::Op { code: Status::Full, .. } => "too many segments of the peer are mapped".to_owned(),
            other => other.to_string(),
        })?;
        let share = Share::decode(&answer).ok_or("its answer makes no sense")?;
        let mut bytes = [0; 4 + PLACE_BYTES];
        let received = host.channel.receive(&mut bytes);
        // Also when there was no descriptor left for what came: it is not under way any more.
        host.channel.send(&[1], &[]).map_err(|error| error.to_string())?;
        let (count, fds) = received.map_err(|error| error.to_string())?;
        let Some(place) = bytes[..count].strip_prefix(&handle.to_le_bytes()) else {
            return Err("its descriptors are another segment's".to_owned());
        };
        let place = Place::decode(place);
        host.open(&share, fds, place, len, rights, numbers)
            .map_err(|error| format!("cannot reach it: {error}"))
    }
}

impl Meeting {
    /// Meets the peer if that has not been tried.
    fn of(&mut self, peer: &PeerSession) -> Result<&mut Host, String> {
        if let Self::Untried = self {
            *self = match meet(peer) {
                Ok(channel) => Self::Met(Host::new(channel)),
                Err(reason) => Self::Failed(reason),
            };
        }
        match self {
            Self::Met(host) => Ok(host),
            Self::Failed(reason) => Err(reason.clone()),
            Self::Untried => Err(String::new()),
        }
    }
}

impl Host {
    fn new(channel: FdSocket) -> Self {
        Self { channel: Arc::new(channel), gate: None, process: None }
    }

    fn open(
        &mut self,
        share: &Share,
        fds: Vec<OwnedFd>,
        place: Option<Place>,
        len: u64,
        rights: Rights,
        numbers: u32,
    ) -> Result<Mapped, String> {
        let invalid = || "its answer makes no sense".to_owned();
        let system = |error: std::io::Error| error.to_string();
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or_else(invalid);
        let number =
            usize::try_from(share.number).ok().filter(|&number| number < SHARES).ok_or_else(invalid)?;
        let writable = rights == Rights::ReadWrite;
        if share.bytes < len || share.board != (writable && numbers > 0) || share.apart != place.is_some() {
            return Err(invalid());
        }
        let file = if share.apart { None } else { Some(Memfd::adopt(next()?, share.bytes).map_err(system)?) };
        if share.gate {
            let words = SharedWords::of_peer(next()?, GATE_WORDS).map_err(system)?;
            self.gate = Some(Arc::new(PeerWords(words)));
        }
        let gate = self.gate.clone().ok_or_else(invalid)?;
        let memory = match (file, place) {
            (Some(file), _) => Memory::Mapped(Mapping::of_peer(&file, writable).map_err(system)?),
            // Said by itself: the session's word would not do.
            (None, Some(place)) if place.bytes >= len && (place.writable || !writable) => {
                let process = self.process(&gate, &place)?;
                Memory::Apart(Apart { process, address: place.address, refused: AtomicBool::new(false) })
            }
            _ => return Err(invalid()),
        };
        let board = if share.board {
            let words = SharedWords::of_peer(next()?, board_words(numbers)).map_err(system)?;
            Some(Board::of_words(PeerWords(words)))
        } else {
            None
        };
        Ok(Mapped {
            memory,
            rights,
            gate,
            share: number,
            light: share.light && membarrier::register(),
            board,
            _channel: Arc::clone(&self.channel),
        })
    }

    /// The peer's process, if the kernel lets us copy from there.
    fn process(&mut self, gate: &PeerWords, place: &Place) -> Result<Arc<Process>, String> {
        let channel = Arc::clone(&self.channel);
        let process = self.process.get_or_insert_with(|| {
            let refused = |error: std::io::Error| format!("its process cannot be reached: {error}");
            let process = Process::of_peer(channel).map_err(refused)?;
            // What we write into the gate here must be in the gate there: it is the process that we think it is.
            let mut token = [0; 8 * TOKEN_WORDS];
            getrandom::fill(&mut token).map_err(|error| error.to_string())?;
            for (word, bytes) in gate.words()[TOKEN..].iter().zip(token.chunks_exact(8)) {
                word.store(u64::from_ne_bytes(bytes.try_into().unwrap_or_default()), Ordering::SeqCst);
            }
            let mut found = [0; 8 * TOKEN_WORDS];
            let target = target(place.gate.wrapping_add(8 * TOKEN as u64), found.len());
            process.read_into(&target, &mut found).map_err(refused)?;
            if found == token { Ok(Arc::new(process)) } else { Err("it is in another process".to_owned()) }
        });
        let process = process.clone()?;
        if place.bytes > 0 {
            // Memory of devices cannot be copied so, by nobody.
            let refused = |error: std::io::Error| format!("its memory cannot be copied: {error}");
            process.read_into(&target(place.address, 1), &mut [0]).map_err(refused)?;
        }
        Ok(process)
    }
}

fn target(address: u64, bytes: usize) -> Target {
    [AtomicU64::new(address), AtomicU64::new(bytes as u64)]
}

/// Meets the peer, if it is on this host.
fn meet(peer: &PeerSession) -> Result<FdSocket, String> {
    let inviter = Inviter::invite()?;
    let request = Request::Meet(inviter.invitation);
    peer.call(SHM_METHOD, &request.encode()).map_err(|error| match error {
        Error::Op { code: Status::Unsupported, .. } => {
            "the peer is on another host (or in another network name space), or shares no memory".to_owned()
        }
        Error::Op { code: Status::NoMethod, .. } => "the peer's netvm has no shared memory".to_owned(),
        other => other.to_string(),
    })?;
    inviter.meet()
}
