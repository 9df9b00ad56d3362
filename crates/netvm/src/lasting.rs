//! Peers that are connected to again when they have come back. docs/design/failure.md tells what that means for operations.
//!
//! ```no_run
//! # fn main() -> netvm::Result<()> {
//! # use netvm::node::{Node, RemoteKey};
//! use netvm::lasting::Reconnect;
//! use netvm::Error;
//!
//! # let (node, key) = (Node::new()?, RemoteKey::from_bytes([0; 16]));
//! let peer = node.connect_lasting("10.0.0.2:7000", Reconnect::default())?;
//! let counter = peer.import("counter", &key)?;
//! loop {
//!     match counter.fetch_add(0, 1u64) {
//!         Ok(before) => println!("it was {before}"),
//!         Err(Error::OutcomeUnknown { .. }) => println!("added or not: nobody knows"),
//!         Err(error) => println!("not added: {error}"),
//!     }
//! }
//! # }
//! ```
//!
//! An operation is never repeated by the library. One that was under way when the connection ended fails as always, and the next one
//! connects anew. What must be decided by the program – whether to add again – stays with it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use netvm_core::epoch::{Backoff, Incarnation};
use netvm_core::limits::RAILS_MAX;

use crate::atomic::Word;
use crate::error::{Error, Result};
use crate::node::{ConnectOptions, Node, RemoteKey, Shared, connect_as, lock};
use crate::region::{Peer, Region, WriteOptions};

/// When and how a lost peer is connected to again.
#[derive(Clone, Copy, Debug)]
pub struct Reconnect {
    /// How to connect.
    pub options: ConnectOptions,
    /// Pause after the first attempt that failed; twice as long after each further one.
    pub first: Duration,
    /// Longest pause.
    pub longest: Duration,
    /// Whoever needs the peer waits for it so long at most.
    pub patience: Duration,
}

impl Default for Reconnect {
    /// Pauses of 10 ms to 1 s, for at most 10 s.
    fn default() -> Self {
        Self {
            options: ConnectOptions::default(),
            first: Duration::from_millis(10),
            longest: Duration::from_secs(1),
            patience: Duration::from_secs(10),
        }
    }
}

impl Node {
    /// Connects to the node at `address`, now and again whenever it is needed and the connection has ended.
    ///
    /// # Errors
    /// As [`Node::connect_with`], once `patience` is over.
    pub fn connect_lasting(&self, address: &str, reconnect: Reconnect) -> Result<LastingPeer> {
        let rails = reconnect.options.rails.unwrap_or(1);
        if !(1..=RAILS_MAX).contains(&rails) {
            return Err(Error::Other(format!("a session has 1 to {RAILS_MAX} rails, not {rails}")));
        }
        let mut client = [0; 12];
        getrandom::fill(&mut client)
            .map_err(|error| Error::Other(format!("cannot get random numbers: {error}")))?;
        let inner = Inner {
            node: Arc::downgrade(self.shared()),
            address: address.to_owned(),
            reconnect,
            rails,
            client,
            epoch: AtomicU32::new(0),
            connection: Mutex::default(),
            writes: Mutex::default(),
        };
        inner.current()?;
        Ok(LastingPeer { inner: Arc::new(inner) })
    }
}

/// See the module. Cloning it is cheap; the connection ends with the last clone and the last region.
#[derive(Clone)]
pub struct LastingPeer {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for LastingPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LastingPeer").field("address", &self.inner.address).finish_non_exhaustive()
    }
}

struct Inner {
    node: Weak<Shared>,
    address: String,
    reconnect: Reconnect,
    rails: usize,
    client: [u8; 12],
    /// Of the last attempt to connect. Changed with the connection locked.
    epoch: AtomicU32,
    /// Locked while somebody connects.
    connection: Mutex<Connection>,
    /// Locked for moments, perhaps with the connection locked, and never before it.
    writes: Mutex<Writes>,
}

#[derive(Default)]
struct Connection {
    peer: Option<Peer>,
    /// When the last attempts to connect failed for good, and why.
    failed: Option<(Instant, Error)>,
}

#[derive(Default)]
struct Writes {
    /// The epoch of writes that no flush has confirmed, and whether there were such in epochs before.
    written: Option<u32>,
    lost: bool,
    /// Writes so far.
    count: u64,
}

/// One write, until it is known that there was one.
struct Noted {
    epoch: u32,
    /// What was written before.
    before: Option<u32>,
    count: u64,
}

impl Writes {
    /// Whether writes of ended epochs are unconfirmed, and how many there have been, for [`Writes::told`].
    fn unconfirmed(&self, epoch: u32) -> (bool, u64) {
        (self.lost || self.written.is_some_and(|written| written != epoch), self.count)
    }

    /// A flush that began after so many writes has ended and told of all before it. Not earlier: who flushes meanwhile must learn of
    /// the same.
    fn told(&mut self, count: u64) {
        if self.count == count {
            (self.written, self.lost) = (None, false);
        }
    }

    fn note(&mut self, epoch: u32) -> Noted {
        let before = self.written;
        self.written = before.max(Some(epoch));
        // Whichever of the two is the older, its connection has ended.
        self.lost |= before.is_some_and(|before| before != epoch);
        self.count += 1;
        Noted { epoch, before, count: self.count }
    }

    /// Nothing was written. The number stays: a flush that has begun since answers for no later write.
    fn take_back(&mut self, noted: &Noted) {
        if self.count == noted.count && self.written == Some(noted.epoch) && noted.before != self.written {
            self.written = None;
        }
    }
}

impl Inner {
    /// The peer, connected to again if need be, and its epoch.
    fn current(&self) -> Result<(u32, Peer)> {
        let open = |connection: &Connection| {
            let peer = connection.peer.as_ref().filter(|peer| !peer.is_closed());
            peer.map(|peer| (self.epoch.load(Ordering::Relaxed), peer.clone()))
        };
        if let Some(peer) = self.connection.try_lock().ok().and_then(|connection| open(&connection)) {
            return Ok(peer);
        }
        let start = Instant::now();
        // Locked while it connects: whoever else needs the peer waits for the same.
        let mut connection = lock(&self.connection);
        if let Some(peer) = open(&connection) {
            return Ok(peer);
        }
        connection.peer = None;
        // Who has waited for another's attempts has had them: one after the other all would wait as long again.
        let Reconnect { options, first, longest, patience } = self.reconnect;
        if let Some((when, error)) = &connection.failed
            && *when >= start
            && start.elapsed() + longest > patience
        {
            return Err(error.clone());
        }
        let mut backoff = Backoff::new(first.as_millis() as u64, longest.as_millis() as u64);
        loop {
            let node = self.node.upgrade().ok_or_else(|| Error::Other("the node has gone".to_owned()))?;
            // Each attempt: one that failed here may have come to something there.
            let epoch = self.epoch.load(Ordering::Relaxed).checked_add(1);
            let epoch =
                epoch.ok_or_else(|| Error::Other("the epochs are used up: connect anew".to_owned()))?;
            self.epoch.store(epoch, Ordering::Relaxed);
            let incarnation = Incarnation { client: self.client, epoch };
            match connect_as(&node, &self.address, self.rails, incarnation) {
                Ok(peer) => {
                    peer.choose(options.link);
                    connection.peer = Some(peer.clone());
                    return Ok((epoch, peer));
                }
                Err(error) if !may_pass(&error) => return Err(error),
                Err(error) => {
                    let mut random = [0; 8];
                    let _ = getrandom::fill(&mut random);
                    let pause = Duration::from_millis(backoff.pause_ms(u64::from_le_bytes(random)));
                    if start.elapsed() + pause > patience {
                        connection.failed = Some((Instant::now(), error.clone()));
                        return Err(error);
                    }
                    std::thread::sleep(pause);
                }
            }
        }
    }
}

/// Whether waiting may help: somebody who is just starting, or going, answers in odd ways.
fn may_pass(error: &Error) -> bool {
    error.is_retryable() || matches!(error, Error::NotNetvm { .. } | Error::Refused { .. })
}

impl LastingPeer {
    /// The peer as it is now, connected to again if need be, for all that is not offered here (locks, channels). What is opened through it
    /// ends with this connection.
    ///
    /// # Errors
    /// As [`Node::connect_lasting`].
    pub fn current(&self) -> Result<Peer> {
        self.inner.current().map(|(_, peer)| peer)
    }

    /// Attempts to connect so far: another number, another connection.
    pub fn epoch(&self) -> u32 {
        self.inner.epoch.load(Ordering::Relaxed)
    }

    /// Opens the segment `name`, now and again in each connection. A peer that has started anew must export it with the same
    /// key: [`Node::export_keyed`].
    ///
    /// # Errors
    /// As [`Peer::import`].
    pub fn import(&self, name: &str, key: &RemoteKey) -> Result<LastingRegion> {
        let (name, inner) = (name.to_owned(), Arc::clone(&self.inner));
        let region = LastingRegion { inner, name, key: *key, open: Mutex::default() };
        region.current()?;
        Ok(region)
    }
}

/// A region for writes. They count as written until it is dropped, and once more then: a flush that another thread has begun meanwhile
/// may have come before them, and answers for none.
pub struct Writing<'a> {
    inner: &'a Inner,
    epoch: u32,
    region: Arc<Region>,
}

impl std::fmt::Debug for Writing<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.region.fmt(f)
    }
}

impl std::ops::Deref for Writing<'_> {
    type Target = Region;

    #[inline]
    fn deref(&self) -> &Region {
        &self.region
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        lock(&self.inner.writes).note(self.epoch);
    }
}

/// A segment that is opened again in each connection.
pub struct LastingRegion {
    inner: Arc<Inner>,
    name: String,
    key: RemoteKey,
    open: Mutex<Option<(u32, Arc<Region>)>>,
}

impl std::fmt::Debug for LastingRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (address, name) = (&self.inner.address, &self.name);
        f.debug_struct("LastingRegion").field("address", address).field("name", name).finish_non_exhaustive()
    }
}

/// Each fails as the [`Region`]'s own, and with what connecting again failed with. None is ever executed twice.
impl LastingRegion {
    /// The segment in the connection there is now, opened again if need be: quickest, and for all that is not offered here. It ends with
    /// that connection, and its flush tells only of writes through it.
    ///
    /// # Errors
    /// See above.
    pub fn current(&self) -> Result<Arc<Region>> {
        self.open().map(|(_, region)| region)
    }

    fn open(&self) -> Result<(u32, Arc<Region>)> {
        let (epoch, peer) = self.inner.current()?;
        let mut open = lock(&self.open);
        if let Some((opened, region)) = &*open
            && *opened == epoch
        {
            return Ok((epoch, Arc::clone(region)));
        }
        // The one before closes its handle in a session that has ended: at once.
        *open = None;
        let region = Arc::new(peer.import(&self.name, &self.key)?);
        *open = Some((epoch, Arc::clone(&region)));
        Ok((epoch, region))
    }

    /// As [`Region::read`].
    ///
    /// # Errors
    /// See above.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.current()?.read(offset, bytes)
    }

    /// As [`Region::write`].
    ///
    /// # Errors
    /// See above.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.write_with(offset, bytes, WriteOptions::default())
    }

    /// As [`Region::write_with`].
    ///
    /// # Errors
    /// See above.
    pub fn write_with(&self, offset: u64, bytes: &[u8], options: WriteOptions) -> Result<()> {
        self.writing()?.write_with(offset, bytes, options)
    }

    /// As [`LastingRegion::current`], for writes in a way that is not offered here (posted, from shared memory): the flushes here answer
    /// for what is written, or posted, before it is dropped.
    ///
    /// # Errors
    /// See above.
    pub fn writing(&self) -> Result<Writing<'_>> {
        let (epoch, region) = self.open()?;
        lock(&self.inner.writes).note(epoch);
        Ok(Writing { inner: &self.inner, epoch, region })
    }

    /// As [`LastingRegion::writing`], with the write: one that fails and `would_block` has written nothing, and no flush answers for it.
    ///
    /// # Errors
    /// See above, and those of `post`.
    pub fn post_write<T, E: From<Error>>(
        &self,
        post: impl FnOnce(&Region) -> std::result::Result<T, E>,
        would_block: impl FnOnce(&E) -> bool,
    ) -> std::result::Result<T, E> {
        let (epoch, region) = self.open()?;
        let noted = lock(&self.inner.writes).note(epoch);
        let posted = post(&region);
        let mut writes = lock(&self.inner.writes);
        match &posted {
            Err(error) if would_block(error) => writes.take_back(&noted),
            // Again: a flush that was begun meanwhile may have come before it.
            _ => drop(writes.note(epoch)),
        }
        drop(writes);
        posted
    }

    /// Has `post` post a flush, which answers for all writes so far.
    ///
    /// # Errors
    /// Those of `post`: then the next flush answers for them. As [`LastingRegion::flush`]: then nothing is posted, and the next call may
    /// succeed.
    pub fn post_flush<T, E: From<Error>>(
        &self,
        post: impl FnOnce(&Region) -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        let (epoch, region) = self.open()?;
        let mut writes = lock(&self.inner.writes);
        let (lost, count) = writes.unconfirmed(epoch);
        if lost {
            // What this connection has is still to be flushed.
            writes.lost = false;
            writes.written.take_if(|written| *written != epoch);
            return Err(self.unknown().into());
        }
        drop(writes);
        let posted = post(&region)?;
        lock(&self.inner.writes).told(count);
        Ok(posted)
    }

    fn unknown(&self) -> Error {
        let reason = "the connection ended before they were flushed".to_owned();
        Error::OutcomeUnknown { lender: self.inner.address.clone(), what: "write", reason }
    }

    /// Returns when the peer's memory has all writes made so far through all lasting regions of this peer.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`], once, when some of them were made in a connection that has ended without a flush: each may be there
    /// wholly, in part, or not at all. Otherwise as [`Region::flush`], and then the same holds.
    pub fn flush(&self) -> Result<()> {
        let (epoch, region) = self.open()?;
        let (lost, count) = lock(&self.inner.writes).unconfirmed(epoch);
        let flushed = region.flush();
        lock(&self.inner.writes).told(count);
        flushed?;
        if lost { Err(self.unknown()) } else { Ok(()) }
    }

    /// As [`Region::atomic_load`].
    ///
    /// # Errors
    /// See above.
    pub fn atomic_load<W: Word>(&self, offset: u64) -> Result<W> {
        self.current()?.atomic_load(offset)
    }

    /// As [`Region::swap`].
    ///
    /// # Errors
    /// See above.
    pub fn swap<W: Word>(&self, offset: u64, value: W) -> Result<W> {
        self.current()?.swap(offset, value)
    }

    /// As [`Region::compare_swap`].
    ///
    /// # Errors
    /// See above.
    pub fn compare_swap<W: Word>(&self, offset: u64, expected: W, new: W) -> Result<W> {
        self.current()?.compare_swap(offset, expected, new)
    }

    /// As [`Region::fetch_add`].
    ///
    /// # Errors
    /// See above.
    pub fn fetch_add<W: Word>(&self, offset: u64, operand: W) -> Result<W> {
        self.current()?.fetch_add(offset, operand)
    }
}

#[cfg(test)]
mod tests;
