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

mod exports;
mod locate;
mod paging;
mod server;
mod shared;

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use netvm_core::key::{RemoteKey, Rights};
use netvm_core::limits::{NOTIFICATIONS_MAX, OPS_MAX, RAILS_MAX, WINDOW};
pub use netvm_core::pulse::KeepAlive;
use netvm_core::segment::ExportError;
use netvm_core::sync::{Kind, ObjectId};
pub use netvm_sys::mapping::Mapping;
use netvm_sys::net::{Address, Listener};

use crate::connection::{FOREVER, Origin};
use crate::copy::Copies;
use crate::error::{Error, Result};
use crate::link::{Link, Loopback};
use crate::memory::Memory;
use crate::notify::Notifications;
use crate::pager::PagerError;
use crate::region::Peer;
use crate::security::Security;
pub use crate::shm::{LinkChoice, probe_shm};
use crate::sync::LockWord;
use exports::Segment;
pub(crate) use exports::{Inbox, View};
pub use locate::Location;
pub(crate) use locate::{LOCATE_METHOD, ask_address, ask_find, decode as decode_locations};
pub(crate) use paging::Task;
use server::Server;
use shared::{LISTENER_ID, add_peer, connect, watch};
pub(crate) use shared::{Shared, connect_as, lock, lock_by};

/// How to connect to a node.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConnectOptions {
    /// What carries the operations on segments.
    pub link: LinkChoice,
    /// Over how many connections, 1 to 16; `None` lets netvm choose.
    pub rails: Option<usize>,
}

/// See the module.
pub struct Node {
    shared: Arc<Shared>,
    /// And what tells its end.
    thread: Option<(JoinHandle<()>, Mutex<Receiver<()>>)>,
}

/// Of so many locks and monitors the words are mapped; others are asked for.
const WORDS_MAX: usize = 128;

const _: () = {
    const fn is_shared_by_threads<T: Send + Sync>() {}
    is_shared_by_threads::<Node>();
};

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
        let shared = Shared::new(security).map(Arc::new).map_err(system)?;
        let server = Server::new(Arc::clone(&shared));
        let thread = std::thread::Builder::new().name("netvm-node".to_owned());
        let (running, has_ended) = mpsc::channel();
        let run = move || {
            server.run();
            drop(running);
        };
        let thread = thread.spawn(run).map_err(system)?;
        let _ = shared.server.set(thread.thread().id());
        Ok(Self { shared, thread: Some((thread, Mutex::new(has_ended))) })
    }

    /// Serves peers in this thread: for a program that looks for what they write into its memory, without sleeping. Nobody has to:
    /// the node's own thread serves them as well, but has to be woken first. Whoever stops calling it leaves them to that thread
    /// again, within a millisecond.
    pub fn poll(&self) {
        self.shared.poll();
    }

    /// `bytes` of zero memory that can be exported, also to be mapped by importers on this host: docs/security.md tells what that lets
    /// them do. A forked child shares it. [`Memory`] is the general case.
    ///
    /// # Errors
    /// [`Error::System`] when there is not so much.
    pub fn memory(bytes: usize) -> Result<Arc<Mapping>> {
        match Mapping::shareable(bytes) {
            Ok(memory) => Ok(Arc::new(memory)),
            // Out of descriptors, or no memfd here.
            Err(_) => Self::private_memory(bytes),
        }
    }

    /// `bytes` of zero memory that can be exported and that no other process ever maps: importers reach it through this node, or by copies that
    /// the kernel makes for those who may do so to any memory of this process (docs/security.md).
    ///
    /// # Errors
    /// As [`Node::memory`].
    pub fn private_memory(bytes: usize) -> Result<Arc<Mapping>> {
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
        let listener = Listener::bind(&parsed).map_err(|error| Error::listen(address.to_owned(), &error))?;
        self.listen_on(listener)
    }

    /// Takes over a listener that nobody else accepts connections from.
    pub(crate) fn listen_on(&self, listener: Listener) -> Result<String> {
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
    /// [`Error::Other`] when the name is empty, too long or taken, or too much is exported, or memory that cannot be written is
    /// exported for writing.
    pub fn export(&self, name: &str, memory: impl Into<Memory>, rights: Rights) -> Result<RemoteKey> {
        self.export_notified(name, memory, rights, 0).map(|(key, _)| key)
    }

    /// As [`Node::export`], with so many notification numbers, which peers signal and this process waits for.
    ///
    /// # Errors
    /// As [`Node::export`]; [`Error::Other`] for more than 65536 numbers.
    pub fn export_notified(
        &self,
        name: &str,
        memory: impl Into<Memory>,
        rights: Rights,
        numbers: u32,
    ) -> Result<(RemoteKey, Notifications)> {
        let key = random_key()?;
        self.export_keyed(name, memory, rights, numbers, key).map(|notifications| (key, notifications))
    }

    /// As [`Node::export_notified`], with a key of the caller's: for programs that start again and are found by those who have it. Whoever
    /// can guess it may do what `rights` allow: take random bytes, and keep them as a secret.
    ///
    /// # Errors
    /// As [`Node::export_notified`].
    pub fn export_keyed(
        &self,
        name: &str,
        memory: impl Into<Memory>,
        rights: Rights,
        numbers: u32,
        key: RemoteKey,
    ) -> Result<Notifications> {
        let memory = memory.into();
        if !memory.is_servable() {
            return Err(PagerError::FaultPath {
                why: "its memory cannot be exported: system calls on it fail",
            }
            .into());
        }
        if rights == Rights::ReadWrite && !memory.is_writable() {
            return Err(Error::Other(format!("the memory of segment {name:?} can only be read")));
        }
        self.export_with(name, memory, rights, numbers, key, None)
    }

    fn export_with(
        &self,
        name: &str,
        memory: Memory,
        rights: Rights,
        numbers: u32,
        key: RemoteKey,
        sync: Option<ObjectId>,
    ) -> Result<Notifications> {
        let len = if sync.is_some() { 0 } else { memory.len() as u64 };
        let mut exports = lock(&self.shared.exports);
        let id = exports.table.export(name, key, rights, len, numbers).map_err(|error| match error {
            ExportError::Name => Error::Other("a segment's name has 1 to 255 bytes".to_owned()),
            ExportError::Taken => Error::NameTaken { name: name.to_owned() },
            ExportError::Notifications => Error::Other(format!(
                "a segment has at most {NOTIFICATIONS_MAX} notification numbers, not {numbers}"
            )),
            ExportError::Full => Error::Other("too many segments are exported".to_owned()),
        })?;
        if exports.segments.len() <= id.index() {
            exports.segments.resize_with(id.index() + 1, || None);
        }
        let notifications = Notifications::new(numbers, Arc::downgrade(&self.shared));
        exports.segments[id.index()] = Some(Segment {
            memory,
            notifications: notifications.clone(),
            sync,
            inlet: None,
            shares: Vec::new(),
        });
        exports.names.insert(name.to_owned(), id);
        Ok(notifications)
    }

    /// Becomes the home of a lock, semaphore or the like, for whoever has the returned key: see [`crate::sync`].
    ///
    /// # Errors
    /// As [`Node::export`]; [`Error::Other`] for more parties or conditions, or more objects, than there can be.
    pub fn export_sync(&self, name: &str, kind: Kind) -> Result<RemoteKey> {
        // It is a segment of no memory to its importers: name, key and revocation are the same. Those of this host map its word.
        let has_word = matches!(kind, Kind::Monitor { .. } | Kind::Semaphore { .. });
        let key = random_key()?;
        let id = lock(&self.shared.home).create(kind);
        let id = id.ok_or_else(|| Error::Other(format!("{kind:?} is too large, or one too many")))?;
        // A word takes a descriptor here and a share of each session, which segments want, too.
        let word = if has_word && id.place() < WORDS_MAX { Self::memory(4096).ok() } else { None };
        let memory: Memory = match &word {
            Some(mapping) => Arc::clone(mapping).into(),
            None => match Self::private_memory(4096) {
                Ok(mapping) => mapping.into(),
                Err(error) => {
                    lock(&self.shared.home).close(id);
                    return Err(error);
                }
            },
        };
        if let Some(mapping) = word {
            lock(&self.shared.home).give_word(id, LockWord(mapping));
        }
        let exported = self.export_with(name, memory, Rights::ReadWrite, 0, key, Some(id));
        if exported.is_err() {
            lock(&self.shared.home).close(id);
        }
        exported.map(|_| key)
    }

    /// Takes a segment back; when this has returned, no peer reaches it any more, not even in a transfer that had begun.
    ///
    /// False when no segment of that name is exported.
    ///
    /// # Errors
    /// [`Error::StillUsed`] when somebody is in the middle of the memory for longer than [`Node::page_limit`]: it waits for a page that
    /// does not come, or is a process of this host that has the memory mapped and was stopped there. The memory must not be
    /// freed or used for anything else until the same call, made again, has succeeded.
    pub fn unexport(&self, name: &str) -> Result<bool> {
        self.shared.unexport(name)
    }

    /// For how long peers' operations wait for memory that is not there (paged out, or missing under a userfaultfd); then they are
    /// refused with [`Status::Away`](netvm_core::wire::Status::Away). [`Node::unexport`] and the drop of the node wait for as long. At
    /// first 10 s; whoever waits for an answer gives the peer up after 30 s.
    pub fn page_limit(&self, limit: Duration) {
        let limit_ms = limit.as_millis().clamp(1, 1 << 40) as u64;
        self.shared.page_limit_ms.store(limit_ms, Ordering::Relaxed);
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// How this node finds peers that have failed without a word: stopped, or cut off. At first each is asked after 1 s of silence
    /// and given up after 4 s.
    pub fn keep_alive(&self, keep_alive: KeepAlive) {
        *lock(&self.shared.keep_alive) = KeepAlive::new(keep_alive.interval_ms, keep_alive.timeout_ms);
        self.shared.kick.signal();
    }

    /// Whom this node connects to when a peer asks it to copy to or from a third node; [`Copies::Known`] at first.
    pub fn allow_copies(&self, copies: Copies) {
        self.shared.copies.store(copies as u8, Ordering::Relaxed);
    }

    /// All exported segments that contain the byte at `address` of this process.
    pub fn find(&self, address: *const u8) -> Vec<Location> {
        let exports = lock(&self.shared.exports);
        let found = exports.names.iter().filter_map(|(name, id)| {
            let segment = exports.segment(*id).filter(|segment| segment.sync.is_none())?;
            let offset = segment.memory.find(address.addr() as u64)?;
            Some(Location { name: name.clone(), offset })
        });
        found.collect()
    }

    /// Connects to the node that listens at `address`.
    ///
    /// # Errors
    /// [`Error::Address`], [`Error::Connect`], [`Error::NotNetvm`], [`Error::Version`], [`Error::Refused`], [`Error::Timeout`].
    pub fn connect(&self, address: &str) -> Result<Peer> {
        self.connect_with(address, &ConnectOptions::default())
    }

    /// As [`Node::connect`], with a say in what carries the operations.
    ///
    /// # Errors
    /// As [`Node::connect`]; [`Error::Other`] for other than 1 to 16 rails.
    pub fn connect_with(&self, address: &str, options: &ConnectOptions) -> Result<Peer> {
        let peer = self.connect_rails(address, options.rails.unwrap_or(1))?;
        peer.choose(options.link);
        Ok(peer)
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
        connect(&self.shared, address, rails, Origin::Program).map(|session| Peer::new(session, true))
    }

    /// The next peer that has connected to this node, over the connection that it has opened; `None` after `timeout`.
    ///
    /// A pair of nodes that operate on each other's memory needs one connection, and is faster with one than with one each way.
    pub fn accept(&self, timeout: Duration) -> Option<Peer> {
        let deadline = Instant::now() + timeout.min(FOREVER);
        let mut peers = lock(&self.shared.peers);
        loop {
            let mut open = peers.iter().flatten().filter(|peer| !peer.is_closed());
            if let Some(peer) = open.find(|peer| peer.arrived.swap(false, Ordering::Relaxed)) {
                return Some(Peer::new(Arc::clone(peer), false));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.shared.arrivals.wait_timeout(peers, left);
            peers = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Connects to another node of this process.
    ///
    /// # Errors
    /// [`Error::System`] when no descriptor is to be had.
    pub fn connect_local(&self, other: &Node) -> Result<Peer> {
        let (here, there) = Loopback::pair()?;
        let limits = (OPS_MAX as u32, WINDOW as u32);
        add_peer(&other.shared, vec![Box::new(there)], limits, "a node of this process", Origin::Peer)?;
        self.connect_links(vec![Box::new(here)], limits, "a node of this process")
    }

    pub(crate) fn connect_links(
        &self,
        links: Vec<Box<dyn Link>>,
        limits: (u32, u32),
        address: &str,
    ) -> Result<Peer> {
        add_peer(&self.shared, links, limits, address, Origin::Program)
            .map(|session| Peer::new(session, true))
    }

    /// Serves a peer behind `links`, whose hellos are done.
    #[cfg(test)]
    pub(crate) fn serve_links(&self, links: Vec<Box<dyn Link>>) -> Result<()> {
        add_peer(&self.shared, links, (OPS_MAX as u32, WINDOW as u32), "a tested peer", Origin::Peer)
            .map(drop)
    }
}

fn random_key() -> Result<RemoteKey> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::Other(format!("cannot get random numbers: {error}")))?;
    Ok(RemoteKey::from_bytes(bytes))
}

impl Drop for Node {
    fn drop(&mut self) {
        self.shared.stop.signal();
        // Exported memory is kept by whoever waits for a page of it, but for the program's own, which may be freed next.
        let limit = if lock(&self.shared.exports).has_foreign() { FOREVER } else { self.shared.page_limit() };
        let deadline = Instant::now() + limit;
        if let Some((thread, running)) = self.thread.take()
            && lock(&running).recv_timeout(limit) == Err(RecvTimeoutError::Disconnected)
        {
            let _ = thread.join();
        }
        // Others may keep what is shared for a while, but nobody listens any more.
        lock(&self.shared.listeners).clear();
        for peer in std::mem::take(&mut *lock(&self.shared.peers)).into_iter().flatten() {
            peer.close_by("the node has gone", deadline);
        }
        self.shared.pagers.stop(Instant::now() + self.shared.page_limit());
        // The sessions have ended for those who are in our memory by themselves too; what they had begun they finish.
        self.shared.take_all_back();
    }
}
