//! One-sided memory between processes: nodes export memory under names and keys, and import each other's.
//!
//! ```no_run
//! # fn main() -> netvm::Result<()> {
//! use netvm::node::{Node, Rights};
//! use std::sync::Arc;
//!
//! let server = Node::new()?;
//! let address = server.listen("127.0.0.1:0")?;
//! let memory = Node::memory(1 << 20)?;
//! let key = server.export("numbers", Arc::clone(&memory), Rights::ReadWrite)?;
//!
//! let client = Node::new()?;
//! let region = client.connect(&address)?.import("numbers", &key)?;
//! region.write(4096, b"hello")?;
//! region.flush()?;
//! # Ok(()) }
//! ```
//!
//! A node has one thread that serves its peers: the program behind an exported segment need not do anything.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use netvm_core::atomic::Atomic;
use netvm_core::key::Access;
pub use netvm_core::key::{RemoteKey, Rights};
use netvm_core::limits::{
    HALF_OPEN_MAX, HELLO_TIMEOUT_MS, NOTIFICATIONS_MAX, OPS_MAX, RAILS_MAX, TICKETS_MAX, WINDOW,
};
use netvm_core::segment::{ExportError, ExportTable, ImportTable, SegmentId};
use netvm_core::sync::{Home, Kind, ObjectId, Request, SessionId, Waiters};
use netvm_core::wire::{Hello, Refusal, Role, Status};
use netvm_sys::epoll::{Epoll, EventFd, Interest, Ready};
pub use netvm_sys::mapping::Mapping;
use netvm_sys::net::{Address, Listener};
use netvm_sys::shared::SharedSlice;

use crate::connection::{Channel, LEASE_TICK, LOOK_MAX, Ticks, gather};
use crate::error::{Error, Result};
use crate::link::greeting::{self, Greeted, Greeting, Transport};
use crate::link::session::Memory;
use crate::link::spin::Trial;
use crate::link::{Link, Loopback};
use crate::notify::{Notifications, Notify};
use crate::region::Peer;
use crate::security::Security;
use crate::sync::{SYNC_HANDLE, SYNC_METHOD};

const STOP_ID: u64 = u64::MAX;
const LISTENER_ID: u64 = 1 << 40;
const GREETING_ID: u64 = 1 << 41;
const KICK_ID: u64 = u64::MAX - 1;
/// More peers than this are not polled one by one.
const POLLED_MAX: usize = 8;
/// Who comes back from yielding the CPU so late had to share it.
const AWAY: Duration = Duration::from_micros(50);
/// Then it does not look for so long, twice as long each time until looking is not disturbed.
const REST_MIN: Duration = Duration::from_millis(1);
const REST_MAX: Duration = Duration::from_millis(64);
/// Place of a session's channel, in its number.
const SESSION_BITS: u32 = 24;
const SESSION_INDEX: u64 = (1 << SESSION_BITS) - 1;
const TICK: Duration = Duration::from_millis(500);

/// What a node exports.
#[derive(Default)]
pub(crate) struct Exports {
    table: ExportTable,
    /// By the segment's place in the table.
    segments: Vec<Option<Segment>>,
    names: HashMap<String, SegmentId>,
}

struct Segment {
    memory: Arc<Mapping>,
    notifications: Notifications,
    /// What it is besides memory.
    sync: Option<ObjectId>,
}

impl Exports {
    fn segment(&self, id: SegmentId) -> Option<&Segment> {
        self.segments.get(id.index())?.as_ref()
    }
}

/// What one peer may reach.
pub(crate) struct View<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) session: SessionId,
    pub(crate) imports: &'a mut ImportTable,
    pub(crate) inbox: &'a mut Inbox,
}

/// Signals from the peer, for our processes that wait for their turn there.
#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) waiters: Waiters,
    pub(crate) news: bool,
}

impl netvm_core::endpoint::Exports for View<'_> {
    fn check(&mut self, handle: u32, offset: u64, bytes: u32, access: Access) -> Result<(), Status> {
        if handle == SYNC_HANDLE && bytes == 0 && access == Access::Write {
            return Ok(());
        }
        self.imports.check(&lock(&self.shared.exports).table, handle, offset, bytes, access).map(|_| ())
    }

    fn import(&mut self, name: &str, key: &RemoteKey) -> Result<(u32, u64, Rights), Status> {
        self.imports.import(&lock(&self.shared.exports).table, name, key)
    }

    fn unimport(&mut self, handle: u32) {
        self.imports.unimport(handle);
    }

    fn atomic(&mut self, handle: u32, offset: u64, atomic: &Atomic) -> Result<u64, Status> {
        let exports = lock(&self.shared.exports);
        let id = self.imports.check_atomic(&exports.table, handle, offset, atomic)?;
        let memory = exports.segment(id).map(|segment| Arc::clone(&segment.memory));
        // The word's page may have to come in first: nobody else waits for it, and the session's lock keeps `unexport` waiting.
        drop(exports);
        let memory = memory.ok_or(Status::NoHandle)?;
        let offset = usize::try_from(offset).map_err(|_| Status::OutOfBounds)?;
        crate::atomic::execute(&memory.shared(), offset, atomic).ok_or(Status::Misaligned)
    }

    fn call(&mut self, method: u32, body: &[u8]) -> Option<Result<Vec<u8>, Status>> {
        (method == SYNC_METHOD).then(|| self.shared.answer(self.session, self.imports, body))
    }

    fn notifications(&mut self, handle: u32) -> u32 {
        if handle == SYNC_HANDLE {
            return TICKETS_MAX as u32;
        }
        self.imports
            .notifications(&lock(&self.shared.exports).table, handle)
            .map_or(0, |(_, numbers)| numbers)
    }

    fn notify(&mut self, handle: u32, notify: Notify) {
        if handle == SYNC_HANDLE {
            self.inbox.news |= self.inbox.waiters.deliver(notify);
            return;
        }
        let exports = lock(&self.shared.exports);
        let segment = self.imports.notifications(&exports.table, handle);
        let segment = segment.and_then(|(id, _)| exports.segment(id));
        let notifications = segment.map(|segment| segment.notifications.clone());
        // Waking somebody takes a system call, which other sessions need not wait for.
        drop(exports);
        if let Some(notifications) = notifications {
            notifications.notify(notify);
        }
    }
}

impl Memory for View<'_> {
    fn memory(&mut self, handle: u32, offset: u64, bytes: u32) -> Option<SharedSlice> {
        let exports = lock(&self.shared.exports);
        // The kind of access was checked when the operation began; that the segment is still there is checked each time.
        let id = self.imports.check(&exports.table, handle, offset, bytes, Access::Read).ok()?;
        exports.segment(id)?.memory.shared().sub(usize::try_from(offset).ok()?, bytes as usize)
    }

    fn write(&mut self, handle: u32, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        let exports = lock(&self.shared.exports);
        let id = self.imports.check(&exports.table, handle, offset, bytes.len() as u32, Access::Write)?;
        let memory = exports.segment(id).ok_or(Status::NoHandle)?.memory.shared();
        // The page may have to come in first: nobody else waits for it, and the session's lock keeps `unexport` waiting.
        drop(exports);
        let offset = usize::try_from(offset).map_err(|_| Status::OutOfBounds)?;
        memory.write_from(offset, bytes).ok_or(Status::OutOfBounds)
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A session whose rails are not complete.
struct Forming {
    session: [u8; 16],
    rails: Vec<Option<Transport>>,
    since: Instant,
}

/// What a node's thread and its users share.
pub(crate) struct Shared {
    pub(crate) exports: Mutex<Exports>,
    pub(crate) epoll: Epoll,
    channels: Mutex<Vec<Option<Arc<Channel>>>>,
    listeners: Mutex<Vec<Listener>>,
    stop: EventFd,
    /// Channels that gather writes, and what tells the node's thread of new ones.
    ticking: Mutex<Vec<u64>>,
    kick: EventFd,
    /// Taken after a channel's lock and never before one.
    pub(crate) home: Mutex<Home>,
    server: OnceLock<ThreadId>,
    sessions: AtomicU64,
    /// Unexporting takes the locks of all channels: one at a time.
    unexporting: Mutex<()>,
    security: Security,
}

impl Shared {
    /// Has the node's thread look after a channel every [`gather::TICK`], until it wants that no more.
    pub(crate) fn tick_for(&self, channel: u64) {
        lock(&self.ticking).push(channel);
        self.kick.signal();
    }

    /// Sends and receives in this thread, for all peers when they are few; otherwise the node's thread is as quick.
    pub(crate) fn poll(&self) {
        if let Ok(channels) = self.channels.try_lock()
            && channels.len() <= POLLED_MAX
        {
            channels.iter().flatten().for_each(|channel| channel.poll());
        }
    }

    /// This thread goes to sleep: the node's thread watches again what this one polled.
    pub(crate) fn stop_polling(&self) {
        let channels = lock(&self.channels);
        if channels.len() <= POLLED_MAX {
            channels.iter().flatten().for_each(|channel| channel.stop_polling());
        }
    }

    fn channel(&self, id: u64) -> Option<Arc<Channel>> {
        lock(&self.channels).get((id / 256) as usize).cloned().flatten()
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

    /// Has the node's thread send the home's signals: whoever is here has a channel locked, and they need others.
    pub(crate) fn ring(&self) {
        // That thread looks after every event anyway.
        if self.server.get() != Some(&std::thread::current().id()) {
            self.kick.signal();
        }
    }

    fn deliver(&self) {
        loop {
            let Some(signalled) = lock(&self.home).signal() else { return };
            let index = (signalled.session.0 & SESSION_INDEX) as usize;
            let channel = lock(&self.channels).get(index).cloned().flatten();
            if let Some(channel) = channel.filter(|channel| channel.session == signalled.session) {
                channel.signal(signalled.ticket, signalled.signal);
            }
        }
    }
}

/// See the module.
pub struct Node {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").finish_non_exhaustive()
    }
}

impl Node {
    /// A node that exports nothing and listens nowhere, without a secret: for loopback and unix sockets.
    ///
    /// # Errors
    /// [`Error::System`] when no descriptor or thread is to be had.
    pub fn new() -> Result<Self> {
        Self::with_security(Security::default())
    }

    /// A node that connects to, and is connected to by, nodes with the same secret.
    ///
    /// # Errors
    /// As [`Node::new`]; [`Error::Other`] for encryption without a secret.
    pub fn with_security(security: Security) -> Result<Self> {
        security.check()?;
        let system = |error: std::io::Error| Error::system("start a node", &error);
        let shared = Arc::new(Shared {
            exports: Mutex::default(),
            epoll: Epoll::new().map_err(system)?,
            channels: Mutex::default(),
            listeners: Mutex::default(),
            stop: EventFd::new().map_err(system)?,
            ticking: Mutex::default(),
            kick: EventFd::new().map_err(system)?,
            home: Mutex::default(),
            server: OnceLock::new(),
            sessions: AtomicU64::new(0),
            unexporting: Mutex::default(),
            security,
        });
        watch(&shared.epoll, shared.stop.as_fd(), STOP_ID)?;
        watch(&shared.epoll, shared.kick.as_fd(), KICK_ID)?;
        let server = Server {
            shared: Arc::clone(&shared),
            greetings: Vec::new(),
            forming: Vec::new(),
            ticking: Vec::new(),
            ticked: Instant::now(),
            ticks: 0,
            interval: gather::TICK,
            look: Trial::new(LOOK_MAX),
            look_again: Instant::now(),
            rest: REST_MIN,
        };
        let thread = std::thread::Builder::new().name("netvm-node".to_owned());
        let thread = thread.spawn(move || server.run()).map_err(system)?;
        let _ = shared.server.set(thread.thread().id());
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Serves peers in this thread: for a program that looks for what they write into its memory, without sleeping. Nobody has to:
    /// the node's own thread serves them as well, but has to be woken first. Whoever stops calling it leaves them to that thread
    /// again, within a millisecond.
    pub fn poll(&self) {
        self.shared.poll();
    }

    /// `bytes` of zero memory that can be exported.
    ///
    /// # Errors
    /// [`Error::System`] when there is not so much.
    pub fn memory(bytes: usize) -> Result<Arc<Mapping>> {
        Mapping::anonymous(bytes).map(Arc::new).map_err(|error| Error::system("map memory", &error))
    }

    /// Listens at `address`; returns it with the real port.
    ///
    /// # Errors
    /// [`Error::Address`]; [`Error::Listen`], also for a network address without a secret.
    pub fn listen(&self, address: &str) -> Result<String> {
        let parsed: Address = address.parse().map_err(|reason: &str| Error::Address {
            address: address.to_owned(),
            reason: reason.to_owned(),
        })?;
        let listener = Listener::bind(&parsed)
            .map_err(|error| Error::Listen { address: address.to_owned(), reason: error.to_string() })?;
        self.shared.security.check_listener(listener.address())?;
        let mut listeners = lock(&self.shared.listeners);
        watch(&self.shared.epoll, listener.as_fd(), LISTENER_ID + listeners.len() as u64)?;
        let address = listener.address().to_string();
        listeners.push(listener);
        Ok(address)
    }

    /// Lets whoever has the returned key reach `memory` under `name`.
    ///
    /// # Errors
    /// [`Error::Other`] when the name is empty, too long or taken, or too much is exported.
    pub fn export(&self, name: &str, memory: Arc<Mapping>, rights: Rights) -> Result<RemoteKey> {
        self.export_notified(name, memory, rights, 0).map(|(key, _)| key)
    }

    /// As [`Node::export`], with so many notification numbers, which peers signal and this process waits for.
    ///
    /// # Errors
    /// As [`Node::export`]; [`Error::Other`] for more than 65536 numbers.
    pub fn export_notified(
        &self,
        name: &str,
        memory: Arc<Mapping>,
        rights: Rights,
        numbers: u32,
    ) -> Result<(RemoteKey, Notifications)> {
        let len = memory.shared().len() as u64;
        self.export_with(name, memory, len, rights, numbers, None)
    }

    fn export_with(
        &self,
        name: &str,
        memory: Arc<Mapping>,
        len: u64,
        rights: Rights,
        numbers: u32,
        sync: Option<ObjectId>,
    ) -> Result<(RemoteKey, Notifications)> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes)
            .map_err(|error| Error::Other(format!("cannot get random numbers: {error}")))?;
        let key = RemoteKey::from_bytes(bytes);
        let mut exports = lock(&self.shared.exports);
        let id = exports.table.export(name, key, rights, len, numbers).map_err(|error| {
            Error::Other(match error {
                ExportError::Name => "a segment's name has 1 to 255 bytes".to_owned(),
                ExportError::Taken => format!("a segment named {name:?} is exported already"),
                ExportError::Notifications => {
                    format!("a segment has at most {NOTIFICATIONS_MAX} notification numbers, not {numbers}")
                }
                ExportError::Full => "too many segments are exported".to_owned(),
            })
        })?;
        if exports.segments.len() <= id.index() {
            exports.segments.resize_with(id.index() + 1, || None);
        }
        let notifications = Notifications::new(numbers, Arc::downgrade(&self.shared));
        exports.segments[id.index()] = Some(Segment { memory, notifications: notifications.clone(), sync });
        exports.names.insert(name.to_owned(), id);
        Ok((key, notifications))
    }

    /// Becomes the home of a lock, semaphore or the like, for whoever has the returned key: see [`crate::sync`].
    ///
    /// # Errors
    /// As [`Node::export`]; [`Error::Other`] for more parties or conditions, or more objects, than there can be.
    pub fn export_sync(&self, name: &str, kind: Kind) -> Result<RemoteKey> {
        // It is a segment of no memory to its importers: name, key and revocation are the same.
        let memory = Self::memory(4096)?;
        let id = lock(&self.shared.home).create(kind);
        let id = id.ok_or_else(|| Error::Other(format!("{kind:?} is too large, or one too many")))?;
        let exported = self.export_with(name, memory, 0, Rights::ReadWrite, 0, Some(id));
        if exported.is_err() {
            lock(&self.shared.home).close(id);
        }
        exported.map(|(key, _)| key)
    }

    /// Takes a segment back; when this returns no peer reaches it any more, not even in a transfer that had begun.
    ///
    /// False when no segment of that name is exported.
    pub fn unexport(&self, name: &str) -> bool {
        let _one_at_a_time = lock(&self.shared.unexporting);
        let channels: Vec<Arc<Channel>> = lock(&self.shared.channels).iter().flatten().cloned().collect();
        // Everybody else takes one channel's lock and then the exports'; nobody waits while holding a channel's.
        let mut guards: Vec<_> = channels.iter().map(|channel| channel.lock()).collect();
        let mut exports = lock(&self.shared.exports);
        let Some(id) = exports.names.remove(name) else { return false };
        exports.table.unexport(id);
        let segment = exports.segments[id.index()].take();
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
        if let Some(id) = segment.and_then(|segment| segment.sync) {
            lock(&self.shared.home).close(id);
            self.shared.ring();
        }
        true
    }

    /// Connects to the node that listens at `address`.
    ///
    /// # Errors
    /// [`Error::Address`], [`Error::Connect`], [`Error::NotNetvm`], [`Error::Version`], [`Error::Refused`], [`Error::Timeout`].
    pub fn connect(&self, address: &str) -> Result<Peer> {
        self.connect_rails(address, 1)
    }

    /// As [`Node::connect`], over several connections at once: more bandwidth for large transfers.
    ///
    /// Two writes to the same bytes keep their order only with a flush between them.
    ///
    /// # Errors
    /// As [`Node::connect`]; [`Error::Other`] for other than 1 to 16 rails.
    pub fn connect_rails(&self, address: &str, rails: usize) -> Result<Peer> {
        if !(1..=RAILS_MAX).contains(&rails) {
            return Err(Error::Other(format!("a session has 1 to {RAILS_MAX} rails, not {rails}")));
        }
        let mut hello = Hello::new(Role::Node);
        getrandom::fill(&mut hello.session)
            .map_err(|error| Error::Other(format!("cannot get random numbers: {error}")))?;
        let mut links: Vec<Box<dyn Link>> = Vec::new();
        let mut limits = (OPS_MAX as u32, WINDOW as u32);
        for rail in 0..rails {
            (hello.rail, hello.rails) = (rail as u8, rails as u8);
            let timeout = Duration::from_secs(4);
            let (transport, theirs) = greeting::connect(address, &hello, timeout, &self.shared.security)?;
            limits = (limits.0.min(theirs.ops_max), limits.1.min(theirs.window));
            links.push(Box::new(transport));
        }
        self.connect_links(links, limits, address)
    }

    /// Connects to another node of this process.
    ///
    /// # Errors
    /// [`Error::System`] when no descriptor is to be had.
    pub fn connect_local(&self, other: &Node) -> Result<Peer> {
        let (here, there) = Loopback::pair()?;
        let limits = (OPS_MAX as u32, WINDOW as u32);
        add_channel(&other.shared, vec![Box::new(there)], limits, "a node of this process")?;
        self.connect_links(vec![Box::new(here)], limits, "a node of this process")
    }

    pub(crate) fn connect_links(
        &self,
        links: Vec<Box<dyn Link>>,
        limits: (u32, u32),
        address: &str,
    ) -> Result<Peer> {
        add_channel(&self.shared, links, limits, address).map(Peer::new)
    }

    /// Serves a peer behind `links`, whose hellos are done.
    #[cfg(test)]
    pub(crate) fn serve_links(&self, links: Vec<Box<dyn Link>>) -> Result<()> {
        add_channel(&self.shared, links, (OPS_MAX as u32, WINDOW as u32), "a tested peer").map(drop)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.shared.stop.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // Others may keep what is shared for a while, but nobody listens any more.
        lock(&self.shared.listeners).clear();
        for channel in std::mem::take(&mut *lock(&self.shared.channels)).into_iter().flatten() {
            channel.close("the node has gone");
        }
    }
}

fn watch(epoll: &Epoll, fd: BorrowedFd<'_>, id: u64) -> Result<()> {
    let added = epoll.add(fd, id, Interest { readable: true, writable: false });
    added.map_err(|error| Error::system("watch a descriptor", &error))
}

fn add_channel(
    shared: &Arc<Shared>,
    links: Vec<Box<dyn Link>>,
    limits: (u32, u32),
    address: &str,
) -> Result<Arc<Channel>> {
    let mut channels = lock(&shared.channels);
    let free = channels.iter().position(Option::is_none);
    let index = free.unwrap_or(channels.len());
    // Never the same again, and the place of the channel.
    let session = shared.sessions.fetch_add(1, Ordering::Relaxed) << SESSION_BITS | index as u64;
    let (id, session) = (index as u64 * 256, SessionId(session));
    let channel = Arc::new(Channel::new(Arc::clone(shared), links, limits, address, id, session));
    channel.watch()?;
    match channels.get_mut(index) {
        Some(place) => *place = Some(Arc::clone(&channel)),
        None => channels.push(Some(Arc::clone(&channel))),
    }
    Ok(channel)
}

/// The thread that serves a node's peers.
struct Server {
    shared: Arc<Shared>,
    greetings: Vec<Option<Greeting>>,
    forming: Vec<Forming>,
    /// Channels that are looked after every `gather::TICK`, and when that was.
    ticking: Vec<u64>,
    ticked: Instant,
    ticks: u64,
    interval: Duration,
    look: Trial,
    /// Others wanted this CPU: no looking before then.
    look_again: Instant,
    rest: Duration,
}

impl Server {
    fn run(mut self) {
        let mut ready = Vec::new();
        let mut served = false;
        loop {
            let timeout = if self.ticking.is_empty() { TICK } else { self.interval };
            if self.wait(&mut ready, timeout, served).is_err() {
                return;
            }
            served = false;
            for Ready { id, .. } in ready.drain(..) {
                match id {
                    STOP_ID => return,
                    KICK_ID => {
                        self.shared.kick.take();
                        self.ticking.append(&mut lock(&self.shared.ticking));
                        self.interval = gather::TICK;
                    }
                    GREETING_ID.. => self.greet((id - GREETING_ID) as usize),
                    LISTENER_ID.. => self.accept((id - LISTENER_ID) as usize),
                    _ => {
                        if let Some(channel) = self.shared.channel(id) {
                            channel.serve();
                            served = true;
                        }
                    }
                }
            }
            self.shared.deliver();
            if self.ticking.is_empty() {
                self.tidy();
            } else {
                self.tick();
            }
        }
    }

    /// Waits for something to do. After a request the next one may come soon: then it looks for it before it sleeps, as long as
    /// that pays and nobody else wants the CPU.
    fn wait(&mut self, ready: &mut Vec<Ready>, timeout: Duration, served: bool) -> std::io::Result<()> {
        let mut last = Instant::now();
        if served && last >= self.look_again {
            let budget = self.look.budget();
            let until = last + budget.min(timeout);
            while last < until {
                self.shared.epoll.wait(ready, Some(Duration::ZERO))?;
                if !ready.is_empty() {
                    self.look.note(true);
                    self.rest = (self.rest / 2).max(REST_MIN);
                    return Ok(());
                }
                std::thread::yield_now();
                let now = Instant::now();
                if now.duration_since(last) > AWAY {
                    self.look_again = now + self.rest;
                    self.rest = (self.rest * 2).min(REST_MAX);
                    return self.shared.epoll.wait(ready, Some(timeout));
                }
                last = now;
            }
            if !budget.is_zero() {
                self.look.note(false);
            }
        }
        self.shared.epoll.wait(ready, Some(timeout))
    }

    fn tick(&mut self) {
        if self.ticked.elapsed() < self.interval {
            return;
        }
        let shared = &self.shared;
        self.interval = LEASE_TICK;
        let interval = &mut self.interval;
        self.ticking.retain(|&id| {
            let ticks = shared.channel(id).map_or(Ticks::Never, |channel| channel.tick());
            if ticks == Ticks::Soon {
                *interval = gather::TICK;
            }
            ticks != Ticks::Never
        });
        self.ticked = Instant::now();
        // Some ten times a second is enough.
        self.ticks += 1;
        if self.ticks.is_multiple_of(256) {
            self.tidy();
        }
    }

    /// Closes what has been half open for too long, and forgets channels that have ended.
    fn tidy(&mut self) {
        let late = |since: Instant| since.elapsed() > Duration::from_millis(HELLO_TIMEOUT_MS);
        let now = Instant::now();
        for greeting in &mut self.greetings {
            greeting.take_if(|greeting| greeting.is_late(now));
        }
        self.forming.retain(|forming| !late(forming.since));
        for place in lock(&self.shared.channels).iter_mut() {
            place.take_if(|channel| channel.is_closed());
        }
    }

    fn accept(&mut self, listener: usize) {
        for _ in 0..8 {
            let accepted = match lock(&self.shared.listeners).get(listener) {
                Some(listener) => listener.accept(),
                None => return,
            };
            let Ok(Some(stream)) = accepted else { return };
            let index = match self.greetings.iter().position(Option::is_none) {
                Some(index) => index,
                None if self.greetings.len() < HALF_OPEN_MAX => {
                    self.greetings.push(None);
                    self.greetings.len() - 1
                }
                None => {
                    // Who means it says hello sooner than the oldest has.
                    let since = |index: &usize| self.greetings[*index].as_ref().map(Greeting::since);
                    (0..HALF_OPEN_MAX).min_by_key(since).unwrap_or(0)
                }
            };
            self.greetings[index] = None;
            if watch(&self.shared.epoll, stream.as_fd(), GREETING_ID + index as u64).is_ok() {
                self.greetings[index] = Some(Greeting::new(stream, Role::Node));
            }
        }
    }

    fn greet(&mut self, index: usize) {
        let Some(greeting) = self.greetings.get_mut(index).and_then(Option::take) else { return };
        let arrival = match greeting.progress(&self.shared.security) {
            Greeted::Waiting(greeting) => return self.greetings[index] = Some(greeting),
            Greeted::Hello(arrival) => arrival,
            Greeted::Gone(_) => return,
        };
        let theirs = arrival.hello;
        if theirs.role != Role::Node {
            return arrival.refuse(Refusal::Role);
        }
        if self.forming.len() >= HALF_OPEN_MAX {
            return arrival.refuse(Refusal::Busy);
        }
        let _ = self.shared.epoll.remove(arrival.stream().as_fd());
        let known = self.forming.iter().position(|forming| forming.session == theirs.session);
        let index = known.unwrap_or_else(|| {
            let rails = (0..theirs.rails).map(|_| None).collect();
            self.forming.push(Forming { session: theirs.session, rails, since: Instant::now() });
            self.forming.len() - 1
        });
        let rails = &mut self.forming[index].rails;
        let expected = rails.len() == usize::from(theirs.rails) && rails[usize::from(theirs.rail)].is_none();
        let accepted = if expected { arrival.accept() } else { None };
        let Some(transport) = accepted else {
            self.forming.swap_remove(index);
            return;
        };
        rails[usize::from(theirs.rail)] = Some(transport);
        if rails.iter().all(Option::is_some) {
            let rails = self.forming.swap_remove(index).rails;
            let links = rails.into_iter().flatten().map(|rail| Box::new(rail) as Box<dyn Link>).collect();
            let _ = add_channel(&self.shared, links, (theirs.ops_max, theirs.window), "a peer");
        }
    }
}
