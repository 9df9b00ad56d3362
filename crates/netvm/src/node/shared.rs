//! What a node's thread and its users share.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use netvm_core::limits::{OPS_MAX, WINDOW};
use netvm_core::segment::ImportTable;
use netvm_core::sync::{Home, Request, SessionId, Ticket};
use netvm_core::wire::{Hello, Role, Status};
use netvm_sys::epoll::{Epoll, EventFd, Interest};
use netvm_sys::net::Listener;

use super::exports::Exports;
use crate::connection::{Origin, PeerSession};
use crate::copy::Copies;
use crate::error::{Error, Result};
use crate::link::{Link, greeting};
use crate::region::Peer;
use crate::security::Security;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// More peers than this are not polled one by one.
const POLLED_MAX: usize = 8;
/// While others are busy, one quiet peer is polled with every so many polls.
const QUIET_EVERY: usize = 8;
/// Place of a session's peer, in its number.
const SESSION_BITS: u32 = 24;
const SESSION_INDEX: u64 = (1 << SESSION_BITS) - 1;
pub(super) const STOP_ID: u64 = u64::MAX;
pub(super) const LISTENER_ID: u64 = 1 << 40;
pub(super) const GREETING_ID: u64 = 1 << 41;
pub(super) const KICK_ID: u64 = u64::MAX - 1;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a node's thread and its users share.
pub(crate) struct Shared {
    pub(crate) exports: Mutex<Exports>,
    pub(crate) epoll: Epoll,
    pub(super) peers: Mutex<Vec<Option<Arc<PeerSession>>>>,
    pub(super) listeners: Mutex<Vec<Listener>>,
    pub(super) stop: EventFd,
    /// Channels that gather writes, and what tells the node's thread of new ones.
    pub(super) ticking: Mutex<Vec<u64>>,
    pub(super) kick: EventFd,
    /// Taken after a peer's lock and never before one.
    pub(crate) home: Mutex<Home>,
    pub(super) server: OnceLock<ThreadId>,
    /// A peer has connected.
    pub(super) arrivals: Condvar,
    /// How often somebody has polled.
    polls: AtomicUsize,
    pub(super) session_numbers: AtomicU64,
    /// Unexporting takes the locks of all peers: one at a time.
    pub(super) unexporting: Mutex<()>,
    pub(super) security: Security,
    /// A number of [`Copies`], and how many sessions' copiers there are.
    pub(super) copies: AtomicU8,
    pub(crate) copiers: AtomicUsize,
}

impl Shared {
    pub(super) fn new(security: Security) -> std::io::Result<Self> {
        let shared = Self {
            exports: Mutex::default(),
            epoll: Epoll::new()?,
            peers: Mutex::default(),
            listeners: Mutex::default(),
            stop: EventFd::new()?,
            ticking: Mutex::default(),
            kick: EventFd::new()?,
            home: Mutex::default(),
            server: OnceLock::new(),
            arrivals: Condvar::new(),
            polls: AtomicUsize::new(0),
            session_numbers: AtomicU64::new(0),
            unexporting: Mutex::default(),
            security,
            copies: AtomicU8::new(Copies::default() as u8),
            copiers: AtomicUsize::new(0),
        };
        let readable = Interest { readable: true, writable: false };
        shared.epoll.add(shared.stop.as_fd(), STOP_ID, readable)?;
        shared.epoll.add(shared.kick.as_fd(), KICK_ID, readable)?;
        Ok(shared)
    }

    /// Has the node's thread look after a peer every [`gather::TICK`], until it wants that no more.
    pub(crate) fn tick_for(&self, peer: u64) {
        lock(&self.ticking).push(peer);
        self.kick.signal();
    }

    /// Sends and receives in this thread, for all peers when they are few; otherwise the node's thread is as quick.
    pub(crate) fn poll(&self) {
        if let Ok(peers) = self.peers.try_lock()
            && peers.len() <= POLLED_MAX
        {
            // To look at a socket costs a good part of what a message costs.
            let turn = self.polls.fetch_add(1, Ordering::Relaxed);
            let all = peers.iter().flatten().all(|peer| peer.is_quiet());
            let guest = (turn / QUIET_EVERY) % peers.len().max(1);
            for (index, peer) in peers.iter().enumerate() {
                if let Some(peer) = peer
                    && (all || !peer.is_quiet() || turn.is_multiple_of(QUIET_EVERY) && index == guest)
                {
                    peer.poll();
                }
            }
        }
    }

    /// This thread goes to sleep: the node's thread watches again what this one polled.
    pub(crate) fn stop_polling(&self) {
        let peers = lock(&self.peers);
        if peers.len() <= POLLED_MAX {
            peers.iter().flatten().for_each(|peer| peer.stop_polling());
        }
    }

    pub(crate) fn copies(&self) -> Copies {
        Copies::from_number(self.copies.load(Ordering::Relaxed))
    }

    /// Whether the program has connected to this address, and still is.
    pub(crate) fn is_connected_to(&self, address: &str) -> bool {
        let peers: Vec<_> = lock(&self.peers).iter().flatten().cloned().collect();
        peers
            .iter()
            .any(|peer| peer.address == address && peer.origin == Origin::Program && !peer.is_closed())
    }

    /// Connects because a peer has asked for a copy.
    pub(crate) fn connect_for_copies(self: &Arc<Self>, address: &str) -> Result<Peer> {
        connect(self, address, 1, Origin::Copy).map(|session| Peer::new(session, true))
    }

    pub(super) fn peer(&self, id: u64) -> Option<Arc<PeerSession>> {
        lock(&self.peers).get((id / 256) as usize).cloned().flatten()
    }

    /// Answers a peer that asks for its turn.
    pub(crate) fn answer(
        &self,
        session: SessionId,
        imports: &ImportTable,
        body: &[u8],
    ) -> Result<Vec<u8>, Status> {
        let request = Request::decode(body).ok_or(Status::BadRequest)?;
        let exports = lock(&self.exports);
        let (segment, _) = imports.notifications(&exports.table, request.object).ok_or(Status::NoHandle)?;
        let object = exports.segment(segment).and_then(|segment| segment.sync);
        drop(exports);
        let mut home = lock(&self.home);
        let reply = home.handle(session, object.ok_or(Status::Unsupported)?, request);
        let news = home.has_signals();
        drop(home);
        if news {
            self.ring();
        }
        Ok(reply.encode())
    }

    /// A peer's turn is over.
    pub(crate) fn released(&self, session: SessionId, ticket: Ticket) {
        let mut home = lock(&self.home);
        home.released(session, ticket);
        let news = home.has_signals();
        drop(home);
        if news {
            self.ring();
        }
    }

    /// Has the node's thread send the home's signals: whoever is here has a peer locked, and they need others.
    pub(crate) fn ring(&self) {
        // That thread looks after every event anyway.
        if self.server.get() != Some(&std::thread::current().id()) {
            self.kick.signal();
        }
    }

    pub(super) fn deliver(&self) {
        loop {
            let Some(signalled) = lock(&self.home).signal() else { return };
            let index = (signalled.session.0 & SESSION_INDEX) as usize;
            let peer = lock(&self.peers).get(index).cloned().flatten();
            if let Some(peer) = peer.filter(|peer| peer.session == signalled.session) {
                peer.signal(signalled.ticket, signalled.signal);
            }
        }
    }
}

pub(super) fn watch(epoll: &Epoll, fd: BorrowedFd<'_>, id: u64) -> Result<()> {
    let added = epoll.add(fd, id, Interest { readable: true, writable: false });
    added.map_err(|error| Error::system("watch a descriptor", &error))
}

/// Connects and says hello.
pub(super) fn connect(
    shared: &Arc<Shared>,
    address: &str,
    rails: usize,
    origin: Origin,
) -> Result<Arc<PeerSession>> {
    let mut hello = Hello::new(Role::Node);
    getrandom::fill(&mut hello.session)
        .map_err(|error| Error::Other(format!("cannot get random numbers: {error}")))?;
    let mut links: Vec<Box<dyn Link>> = Vec::new();
    let mut limits = (OPS_MAX as u32, WINDOW as u32);
    for rail in 0..rails {
        (hello.rail, hello.rails) = (rail as u8, rails as u8);
        let (transport, theirs) = greeting::connect(address, &hello, CONNECT_TIMEOUT, &shared.security)?;
        limits = (limits.0.min(theirs.ops_max), limits.1.min(theirs.window));
        links.push(Box::new(transport));
    }
    add_peer(shared, links, limits, address, origin)
}

pub(super) fn add_peer(
    shared: &Arc<Shared>,
    links: Vec<Box<dyn Link>>,
    limits: (u32, u32),
    address: &str,
    origin: Origin,
) -> Result<Arc<PeerSession>> {
    let mut peers = lock(&shared.peers);
    let free = peers.iter().position(Option::is_none);
    let index = free.unwrap_or(peers.len());
    // Never the same again, and the place of the peer.
    let session = shared.session_numbers.fetch_add(1, Ordering::Relaxed) << SESSION_BITS | index as u64;
    let (id, session) = (index as u64 * 256, SessionId(session));
    let peer = PeerSession::new(Arc::clone(shared), links, limits, address, id, session, origin);
    peer.watch()?;
    match peers.get_mut(index) {
        Some(place) => *place = Some(Arc::clone(&peer)),
        None => peers.push(Some(Arc::clone(&peer))),
    }
    if origin == Origin::Peer {
        shared.arrivals.notify_all();
    }
    Ok(peer)
}
