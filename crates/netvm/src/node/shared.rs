//! What a node's thread and its users share.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use netvm_core::channel::{Ask, Notice, Told};
use netvm_core::epoch::{Incarnation, Order};
use netvm_core::limits::{OPS_MAX, WINDOW};
use netvm_core::pulse::KeepAlive;
use netvm_core::segment::{ImportTable, SegmentId};
use netvm_core::sync::{Home, Request, SessionId, Signalled, Ticket};
use netvm_core::wire::{Hello, Role, Status};
use netvm_sys::epoll::{Epoll, EventFd, Interest};
use netvm_sys::net::Listener;

use super::exports::{Exports, Segment};
use super::paging::Pagers;
use crate::channel::{Hub, Inlet};
use crate::connection::{Origin, PeerSession};
use crate::copy::Copies;
use crate::error::{Error, Result};
use crate::link::{Link, greeting};
use crate::region::Peer;
use crate::security::Security;
use crate::shm::export::{TIMEOUT, TakingBack};
use crate::sync::LockWord;

/// At first.
const PAGE_LIMIT_MS: u64 = 10_000;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// Among more peers than this nobody looks for those that are not quiet,
const POLLED_MAX: usize = 64;
/// and more than this are not all looked at when they all are.
const QUIET_MAX: usize = 16;
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

/// As [`lock`]; none when somebody has had it until the deadline.
pub(crate) fn lock_by<T>(mutex: &Mutex<T>, deadline: Instant) -> Option<MutexGuard<'_, T>> {
    let mut pause = Duration::from_micros(1);
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(1));
    }
}

/// A segment that no peer reaches any more.
#[derive(Clone)]
struct Leaving {
    name: String,
    id: SegmentId,
    guests: TakingBack,
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
    pub(crate) home: Mutex<Home<LockWord>>,
    /// Likewise.
    pub(crate) hub: Mutex<Hub>,
    pub(super) server: OnceLock<ThreadId>,
    /// A peer has connected.
    pub(super) arrivals: Condvar,
    /// How often somebody has polled.
    pub(crate) polls: AtomicUsize,
    pub(super) session_numbers: AtomicU64,
    /// Unexporting takes the locks of all peers: one at a time.
    pub(super) unexporting: Mutex<()>,
    pub(super) security: Security,
    pub(super) keep_alive: Mutex<KeepAlive>,
    /// A number of [`Copies`], and how many sessions' copiers there are.
    pub(super) copies: AtomicU8,
    pub(crate) copiers: AtomicUsize,
    pub(crate) pagers: Arc<Pagers>,
    /// Segments that were taken back and that somebody may still be in the middle of.
    leaving: Mutex<Vec<Leaving>>,
    pub(super) page_limit_ms: AtomicU64,
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
            hub: Mutex::default(),
            server: OnceLock::new(),
            arrivals: Condvar::new(),
            polls: AtomicUsize::new(0),
            session_numbers: AtomicU64::new(0),
            unexporting: Mutex::default(),
            security,
            keep_alive: Mutex::default(),
            copies: AtomicU8::new(Copies::default() as u8),
            copiers: AtomicUsize::new(0),
            pagers: Arc::default(),
            leaving: Mutex::default(),
            page_limit_ms: AtomicU64::new(PAGE_LIMIT_MS),
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

    #[cfg(test)]
    pub(crate) fn sessions(&self) -> Vec<Arc<PeerSession>> {
        lock(&self.peers).iter().flatten().cloned().collect()
    }

    /// Sends and receives in this thread, for all peers when they are few; of many for those that something comes from.
    pub(crate) fn poll(&self) {
        if let Ok(peers) = self.peers.try_lock()
            && peers.len() <= POLLED_MAX
        {
            // To look at a socket costs a good part of what a message costs.
            let turn = self.polls.fetch_add(1, Ordering::Relaxed);
            let all = peers.len() <= QUIET_MAX && peers.iter().flatten().all(|peer| peer.is_quiet());
            let guest = (turn / QUIET_EVERY) % peers.len().max(1);
            for (index, peer) in peers.iter().enumerate() {
                let Some(peer) = peer else { continue };
                if all || !peer.is_quiet() {
                    peer.poll();
                } else if turn.is_multiple_of(QUIET_EVERY) && index == guest {
                    peer.poll_leased();
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

    /// How often the node's thread looks after its peers.
    pub(super) fn look_every(&self) -> Duration {
        Duration::from_millis(lock(&self.keep_alive).look_every_ms())
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

    /// Answers a peer that asks for its turn. Signals for itself, `most` of them, go with the answer.
    pub(crate) fn answer(
        &self,
        session: SessionId,
        imports: &ImportTable,
        body: &[u8],
        most: usize,
    ) -> Result<(Vec<u8>, Vec<Signalled>), Status> {
        let request = Request::decode(body).ok_or(Status::BadRequest)?;
        let exports = lock(&self.exports);
        let (segment, _) = imports.notifications(&exports.table, request.object).ok_or(Status::NoHandle)?;
        let object = exports.segment(segment).and_then(|segment| segment.sync);
        drop(exports);
        let mut home = lock(&self.home);
        let reply = home.handle(session, object.ok_or(Status::Unsupported)?, request);
        let own = home.signals_for(session, most);
        let news = home.has_signals();
        drop(home);
        if news {
            self.ring();
        }
        Ok((reply.encode(), own))
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

    /// See [`super::Node::unexport`].
    pub(crate) fn unexport(&self, name: &str) -> Result<bool> {
        self.unexport_if(name, |_| true)
    }

    /// As a receiver goes: its name may be another's by now.
    pub(crate) fn unexport_inlet(&self, name: &str, inlet: &Arc<Inlet>) {
        // The ring is kept by whoever is still in the middle of it.
        let _ = self.unexport_if(name, |segment| {
            segment.inlet.as_ref().is_some_and(|other| Arc::ptr_eq(other, inlet))
        });
    }

    fn unexport_if(&self, name: &str, wanted: impl FnOnce(&Segment) -> bool) -> Result<bool> {
        let limit = self.page_limit();
        let deadline = Instant::now() + limit;
        let used = |taken_back| Error::StillUsed {
            segment: name.to_owned(),
            taken_back,
            after_ms: limit.as_millis() as u64,
        };
        let was_exported = self.revoke(name, wanted, deadline).ok_or_else(|| used(false))?;
        let leaving: Vec<Leaving> =
            lock(&self.leaving).iter().filter(|leaving| leaving.name == name).cloned().collect();
        let was_leaving = !leaving.is_empty();
        for Leaving { id, guests, .. } in leaving {
            if !(self.pagers.take_back(id, deadline) && guests.wait(deadline)) {
                return Err(used(true));
            }
            lock(&self.leaving).retain(|leaving| leaving.id != id);
        }
        Ok(was_exported || was_leaving)
    }

    /// Takes a segment from all peers: only paging threads, and who reaches it by himself, may still be in the middle of it. None at the
    /// deadline, with nothing done.
    fn revoke(&self, name: &str, wanted: impl FnOnce(&Segment) -> bool, deadline: Instant) -> Option<bool> {
        let _one_at_a_time = lock_by(&self.unexporting, deadline)?;
        let mut exports = lock(&self.exports);
        let Some(&id) = exports.names.get(name) else { return Some(false) };
        if !exports.segment(id).is_some_and(wanted) {
            return Some(false);
        }
        // Who connects from now on cannot import it: those who are here next are all that may have it open.
        exports.table.withhold(id, true);
        drop(exports);
        let peers: Vec<Arc<PeerSession>> = lock(&self.peers).iter().flatten().cloned().collect();
        // Everybody else takes one peer's lock and then the exports'. Who holds a peer's waits for nothing, but for a page that has left
        // just after it was there.
        let guards: Option<Vec<_>> = peers.iter().map(|peer| peer.lock_by(deadline)).collect();
        let mut exports = lock(&self.exports);
        let Some(mut guards) = guards else {
            exports.table.withhold(id, false);
            return None;
        };
        exports.names.remove(name);
        exports.table.unexport(id);
        let mut segment = exports.segments[id.index()].take();
        drop(exports);
        for state in &mut guards {
            let handles: Vec<u32> = state.imports.handles_of(id).collect();
            for handle in handles {
                state.session.endpoint.revoke(handle, |offset, bytes| {
                    let part = segment.as_ref().and_then(|segment| {
                        segment.memory.shared().sub(usize::try_from(offset).ok()?, bytes as usize)
                    });
                    part.map_or_else(|| vec![0; bytes as usize], |part| part.to_vec())
                });
            }
        }
        drop(guards);
        let shares = segment.as_mut().map(|segment| std::mem::take(&mut segment.shares));
        let guests = TakingBack::begin(shares.unwrap_or_default());
        lock(&self.leaving).push(Leaving { name: name.to_owned(), id, guests });
        if let Some(inlet) = segment.as_ref().and_then(|segment| segment.inlet.as_ref()) {
            lock(&self.hub).forget(inlet);
            for (session, slot) in inlet.close() {
                self.tell_sender(session, Notice { slot, told: Told::Ended });
            }
        }
        if let Some(id) = segment.and_then(|segment| segment.sync) {
            lock(&self.home).close(id);
            self.ring();
        }
        Some(true)
    }

    /// For how long a peer's operation, or whoever takes a segment back, waits for memory that is not there.
    pub(super) fn page_limit(&self) -> Duration {
        Duration::from_millis(self.page_limit_ms.load(Ordering::Relaxed))
    }

    /// Takes everything that is exported from those who reach it by themselves, whose sessions have ended. What is mapped stays with who is
    /// stopped in the middle of it, and is kept by him.
    pub(super) fn take_all_back(&self) {
        let mut exports = lock(&self.exports);
        let segments = exports.segments.iter_mut().flatten();
        let shares: Vec<_> = segments.flat_map(|segment| std::mem::take(&mut segment.shares)).collect();
        drop(exports);
        let _ = TakingBack::begin(shares).wait(Instant::now() + TIMEOUT + Duration::from_millis(100));
    }

    /// Who has a segment by himself.
    #[cfg(test)]
    pub(crate) fn shares(&self, name: &str) -> usize {
        let exports = lock(&self.exports);
        exports.names.get(name).and_then(|id| exports.segment(*id)).map_or(0, |segment| segment.shares.len())
    }

    /// What an exported segment is besides memory.
    pub(crate) fn set_inlet(&self, name: &str, inlet: &Arc<Inlet>) {
        let mut exports = lock(&self.exports);
        let index = exports.names.get(name).map(|id| id.index());
        if let Some(Some(segment)) = index.and_then(|index| exports.segments.get_mut(index)) {
            segment.inlet = Some(Arc::clone(inlet));
        }
    }

    /// Answers a sender of a peer.
    pub(crate) fn asked(
        &self,
        session: SessionId,
        imports: &ImportTable,
        is_mapped: impl Fn(u32) -> bool,
        body: &[u8],
    ) -> Result<Vec<u8>, Status> {
        let (slot, ask) = Ask::decode(body).ok_or(Status::BadRequest)?;
        let mut inlet = None;
        if let Ask::Open { handle } = ask {
            let exports = lock(&self.exports);
            let (segment, _) = imports.notifications(&exports.table, handle).ok_or(Status::NoHandle)?;
            let found = exports.segment(segment).and_then(|segment| segment.inlet.clone());
            inlet = found.map(|inlet| (inlet, is_mapped(handle)));
        }
        let mut hub = lock(&self.hub);
        let answer = hub.ask((session, slot), ask, inlet);
        let news = hub.has_news();
        drop(hub);
        if news {
            self.ring();
        }
        answer
    }

    /// A sender of a peer tells something; false when it is for a sender of ours.
    pub(crate) fn told(&self, session: SessionId, notice: Notice) -> bool {
        if matches!(notice.told, Told::Position(_) | Told::Placed(_) | Told::Ended) {
            return false;
        }
        let mut hub = lock(&self.hub);
        hub.told((session, notice.slot), notice.told);
        let news = hub.has_news();
        drop(hub);
        if news {
            self.ring();
        }
        true
    }

    /// Ends the sessions that a new one replaces; false when it comes too late itself.
    pub(super) fn make_way(&self, new: &Incarnation) -> bool {
        let peers: Vec<_> = lock(&self.peers).iter().flatten().cloned().collect();
        let open = peers.iter().filter(|peer| !peer.is_closed());
        for peer in open {
            match peer.came_as.get().map_or(Order::Unrelated, |came| new.after(came)) {
                Order::Unrelated => {}
                Order::Replaces => peer.replace(),
                Order::Stale => return false,
            }
        }
        true
    }

    fn session(&self, session: SessionId) -> Option<Arc<PeerSession>> {
        let index = (session.0 & SESSION_INDEX) as usize;
        let peer = lock(&self.peers).get(index).cloned().flatten();
        peer.filter(|peer| peer.session == session)
    }

    /// Tells a sender of a peer. Not while anything is locked.
    pub(crate) fn tell_sender(&self, session: SessionId, notice: Notice) {
        if let Some(peer) = self.session(session) {
            peer.notice(notice);
        }
    }

    /// A peer has not kept to the protocol. Not while anything is locked.
    pub(crate) fn violated(&self, session: SessionId, reason: &str) {
        if let Some(peer) = self.session(session) {
            peer.violated(reason);
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
            let Some(signalled) = lock(&self.home).signal() else { break };
            if let Some(peer) = self.session(signalled.session) {
                peer.signal(signalled.ticket, signalled.signal);
            }
        }
        loop {
            let Some((session, notice)) = lock(&self.hub).news() else { break };
            self.tell_sender(session, notice);
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
    let mut client = [0; 12];
    getrandom::fill(&mut client)
        .map_err(|error| Error::Other(format!("cannot get random numbers: {error}")))?;
    connect_session(shared, address, rails, origin, Incarnation { client, epoch: 0 })
}

/// As one of several connections of which each replaces the one before.
pub(crate) fn connect_as(
    shared: &Arc<Shared>,
    address: &str,
    rails: usize,
    incarnation: Incarnation,
) -> Result<Peer> {
    let session = connect_session(shared, address, rails, Origin::Program, incarnation)?;
    Ok(Peer::new(session, true))
}

fn connect_session(
    shared: &Arc<Shared>,
    address: &str,
    rails: usize,
    origin: Origin,
    incarnation: Incarnation,
) -> Result<Arc<PeerSession>> {
    let mut hello = Hello::new(Role::Node);
    hello.session = incarnation.to_bytes();
    let mut links: Vec<Box<dyn Link>> = Vec::new();
    let mut limits = (OPS_MAX as u32, WINDOW as u32);
    // Of a name with several addresses all rails take the one that the first has reached.
    let mut reached = None;
    for rail in 0..rails {
        (hello.rail, hello.rails) = (rail as u8, rails as u8);
        let address = reached.as_deref().unwrap_or(address);
        let (transport, theirs) = greeting::connect(address, &hello, CONNECT_TIMEOUT, &shared.security)?;
        if rail == 0 {
            reached = transport.stream().reached();
        }
        limits = (limits.0.min(theirs.ops_max), limits.1.min(theirs.window));
        // Looking for signs of life does it.
        let untimed = transport.stream().without_user_timeout();
        untimed.map_err(|error| Error::system("set up a connection", &error))?;
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
