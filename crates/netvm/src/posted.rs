//! Operations that are posted now and end later: handles, and counters that many operations share.
//!
//! ```no_run
//! # fn main() -> netvm::Result<()> {
//! # use netvm::node::{Node, RemoteKey};
//! # use netvm::posted::{Atomically, Counter};
//! # let (node, key) = (Node::new()?, RemoteKey::from_bytes([0; 16]));
//! # let region = node.connect("127.0.0.1:1")?.import("numbers", &key)?;
//! let buffer = Node::memory(1 << 20)?;
//! let old = region.post().atomic(0, Atomically::Add(1u64))?;
//! let read = region.post().read(4096, &[buffer.shared()])?;
//! // ... compute ...
//! read.wait()?;
//! println!("the word was {}", old.wait()?);
//!
//! let counter = Counter::new();
//! for block in 0..100 {
//!     let local = buffer.shared().sub(block * 4096, 4096).unwrap();
//!     region.post().counted(&counter).write(block as u64 * 4096, &[local], Default::default())?;
//! }
//! region.post().counted(&counter).flush()?;
//! counter.wait_all(None)?;
//! # Ok(()) }
//! ```
//!
//! An operation's buffers belong to it until it has ended: they stay mapped, and what they contain is undefined meanwhile. A read or
//! atomic has ended when its answer is here; a write when its bytes may be changed again (at once, up to 16 KiB: they are copied); a
//! flush when all writes posted before it are in the peer's memory. The order of operations is that of the blocking ones.
//!
//! Nobody has to drive what is posted: the node's thread does, and whoever waits. Posting waits for room when 256 operations, 4096
//! writes or 256 KiB of copied writes are under way, or fails with [`Error::WouldBlock`] if asked to: nothing is queued beyond that.

use std::marker::PhantomData;
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use netvm_core::atomic::{Atomic, AtomicOp};
use netvm_core::endpoint::Answer;
use netvm_core::limits::COPIED_BYTES_MAX;
use netvm_sys::shared::SharedSlice;

use crate::atomic::Word;
use crate::connection::{Connection, LOOK_MAX, PeerSession};
use crate::error::{Error, Result};
use crate::node::lock;
use crate::region::{Region, WriteOptions};

/// Who waits for operations of several peers, or for operations that others are still to post, looks again after so long.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A change of a word in one step. The operation's result is what the word was before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomically<W> {
    /// Reads it.
    Load,
    /// Puts this in its place.
    Swap(W),
    /// Puts `new` in its place if it is `expected`.
    CompareSwap {
        /// What it must be.
        expected: W,
        /// What it becomes then.
        new: W,
    },
    /// Adds, wrapping around.
    Add(W),
    /// Bitwise and.
    And(W),
    /// Bitwise or.
    Or(W),
    /// Bitwise exclusive or.
    Xor(W),
}

impl<W: Word> Atomically<W> {
    fn encode(self) -> (Atomic, &'static str) {
        let (op, operand, what) = match self {
            Self::CompareSwap { expected, new } => {
                return (Atomic::compare_swap(W::WIDTH, expected.to_u64(), new.to_u64()), "compare-and-swap");
            }
            Self::Load => (AtomicOp::Load, None, "load"),
            Self::Swap(operand) => (AtomicOp::Swap, Some(operand), "swap"),
            Self::Add(operand) => (AtomicOp::Add, Some(operand), "fetch-and-add"),
            Self::And(operand) => (AtomicOp::And, Some(operand), "fetch-and-and"),
            Self::Or(operand) => (AtomicOp::Or, Some(operand), "fetch-and-or"),
            Self::Xor(operand) => (AtomicOp::Xor, Some(operand), "fetch-and-xor"),
        };
        (Atomic::new(op, W::WIDTH, operand.map_or(0, Word::to_u64)), what)
    }
}

/// What an operation ends with: `()`, the word before an atomic, or the body of an answer.
pub trait Outcome: Sized {
    #[doc(hidden)]
    fn of(answer: &Answer) -> Option<Self>;
}

impl Outcome for () {
    fn of(_: &Answer) -> Option<Self> {
        Some(())
    }
}

impl Outcome for Vec<u8> {
    fn of(answer: &Answer) -> Option<Self> {
        if let Answer::Reply(body) = answer { Some(body.clone()) } else { None }
    }
}

impl<W: Word> Outcome for W {
    fn of(answer: &Answer) -> Option<Self> {
        if let Answer::Word(word) = answer { Some(W::from_u64(*word)) } else { None }
    }
}

/// Where the end of a posted operation is told.
pub(crate) enum Target {
    Cell(Arc<Cell>),
    Count(Arc<Count>, SessionKey),
}

type Cell = OnceLock<Result<Answer>>;
/// Tells a counter's sessions apart; never looked through.
type SessionKey = usize;

impl Target {
    /// It has ended. Called once, with the session locked.
    pub(crate) fn end(self, result: Result<Answer>) {
        match self {
            // Set once: nobody else sets it.
            Self::Cell(cell) => drop(cell.set(result)),
            Self::Count(count, session) => count.end(session, result.map(drop)),
        }
    }
}

/// One posted operation. Dropping it waits for its end (or for that of the session): its buffers may be gone next.
/// [`Op::detach`] does not wait.
pub struct Op<T = ()> {
    cell: Arc<Cell>,
    /// The session lives until the operation has ended.
    connection: Arc<Connection>,
    what: &'static str,
    detached: bool,
    outcome: PhantomData<fn() -> T>,
}

impl<T> std::fmt::Debug for Op<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ended = self.cell.get().map(|result| result.is_ok());
        f.debug_struct("Op").field("what", &self.what).field("ended", &ended).finish_non_exhaustive()
    }
}

impl<T: Outcome> Op<T> {
    /// How it ended, if it has; sends and receives for its peer otherwise. Whoever calls this in a loop is served quickest.
    pub fn test(&self) -> Option<Result<T>> {
        if self.cell.get().is_none() {
            self.connection.session.poll();
        }
        self.ended()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// Those of the blocking operation of the same name.
    pub fn wait(&self) -> Result<T> {
        if self.cell.get().is_none() {
            self.connection.session.wait_posted(self.what, || self.cell.get().is_some())?;
        }
        self.ended().unwrap_or_else(|| Err(Error::Other("an operation has no end".to_owned())))
    }

    /// As [`Op::wait`], for at most `limit`; `None` afterwards, and the operation goes on.
    pub fn wait_for(&self, limit: Duration) -> Option<Result<T>> {
        let mut waited = Ok(());
        if self.cell.get().is_none() {
            waited = self.connection.session.wait_posted_for(limit, || self.cell.get().is_some());
        }
        self.ended().or_else(|| waited.err().map(Err))
    }

    /// Lets it go on unseen. Its buffers must stay as long as it may be under way: until a later flush, or the session, has ended.
    pub fn detach(mut self) {
        self.detached = true;
    }

    fn ended(&self) -> Option<Result<T>> {
        let answered = |answer| {
            T::of(answer)
                .ok_or_else(|| Error::Other("an operation was answered with something else".to_owned()))
        };
        Some(self.cell.get()?.as_ref().map_err(Clone::clone).and_then(answered))
    }
}

impl<T> Drop for Op<T> {
    fn drop(&mut self) {
        if !self.detached && self.cell.get().is_none() {
            let _ = self.connection.session.wait_posted(self.what, || self.cell.get().is_some());
        }
    }
}

/// How many operations have been posted and have ended. Cloning is cheap; all clones are the same counter.
///
/// Any number of operations, of several peers and nodes, count on one counter.
#[derive(Clone, Default)]
pub struct Counter {
    count: Arc<Count>,
}

#[derive(Default)]
pub(crate) struct Count {
    state: Mutex<CountState>,
    changed: Condvar,
}

#[derive(Default)]
struct CountState {
    posted: u64,
    done: u64,
    failed: u64,
    /// Why the first failed.
    error: Option<Error>,
    /// Where operations are under way, and how many.
    sessions: Vec<(Weak<PeerSession>, u64)>,
    sleepers: usize,
}

impl Count {
    fn begin(&self, session: &Arc<PeerSession>) {
        let mut state = lock(&self.state);
        state.posted += 1;
        let key = Arc::as_ptr(session);
        match state.sessions.iter_mut().find(|(session, _)| session.as_ptr() == key) {
            Some((_, pending)) => *pending += 1,
            None => {
                state.sessions.retain(|(_, pending)| *pending > 0);
                state.sessions.push((Arc::downgrade(session), 1));
            }
        }
    }

    /// It was not posted after all.
    fn take_back(&self, session: SessionKey) {
        let mut state = lock(&self.state);
        state.posted -= 1;
        state.leave(session);
        self.tell(&state);
    }

    fn end(&self, session: SessionKey, result: Result<()>) {
        let mut state = lock(&self.state);
        state.leave(session);
        match result {
            Ok(()) => state.done += 1,
            Err(error) => {
                state.failed += 1;
                state.error.get_or_insert(error);
            }
        }
        self.tell(&state);
    }

    fn tell(&self, state: &CountState) {
        if state.sleepers > 0 {
            self.changed.notify_all();
        }
    }
}

impl CountState {
    fn leave(&mut self, key: SessionKey) {
        if let Some((_, pending)) =
            self.sessions.iter_mut().find(|(session, _)| session.as_ptr() as usize == key)
        {
            *pending -= 1;
        }
    }

    fn pending(&self) -> u64 {
        self.posted - self.done - self.failed
    }
}

impl std::fmt::Debug for Counter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = lock(&self.count.state);
        let CountState { posted, done, failed, .. } = *state;
        f.debug_struct("Counter")
            .field("posted", &posted)
            .field("done", &done)
            .field("failed", &failed)
            .finish()
    }
}

impl Counter {
    /// A counter of nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Operations posted so far.
    pub fn posted(&self) -> u64 {
        lock(&self.count.state).posted
    }

    /// Those of them that have ended well.
    pub fn done(&self) -> u64 {
        lock(&self.count.state).done
    }

    /// Those that have failed.
    pub fn failed(&self) -> u64 {
        lock(&self.count.state).failed
    }

    /// Those under way.
    pub fn pending(&self) -> u64 {
        lock(&self.count.state).pending()
    }

    /// Takes the first failure since the last call: waiting goes on without it, though the count of failures stays.
    pub fn take_error(&self) -> Option<Error> {
        lock(&self.count.state).error.take()
    }

    /// Sends and receives for the peers whose operations are under way.
    pub fn poll(&self) {
        self.sessions().iter().for_each(|session| session.poll());
    }

    /// Waits until `operations` have ended well since the counter was made; false after `timeout`.
    ///
    /// # Errors
    /// The first failure, as soon as there is one, until somebody takes it.
    pub fn wait_for(&self, operations: u64, timeout: Option<Duration>) -> Result<bool> {
        self.wait_until(timeout, |state| state.done >= operations)
    }

    /// Waits until nothing is under way; false after `timeout`.
    ///
    /// # Errors
    /// The first failure, once nothing is under way any more.
    pub fn wait_all(&self, timeout: Option<Duration>) -> Result<bool> {
        let start = Instant::now();
        loop {
            let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
            let ended = self.look(left, |state| (state.pending() == 0).then(|| state.error.clone()));
            match ended {
                Some(None) => return Ok(true),
                Some(Some(error)) => return Err(error),
                None if left == Some(Duration::ZERO) => return Ok(false),
                None => {}
            }
        }
    }

    fn wait_until(&self, timeout: Option<Duration>, ready: impl Fn(&CountState) -> bool) -> Result<bool> {
        let start = Instant::now();
        loop {
            let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
            let ended = self.look(left, |state| match &state.error {
                _ if ready(state) => Some(Ok(true)),
                error => error.clone().map(Err),
            });
            match ended {
                Some(ended) => return ended,
                None if left == Some(Duration::ZERO) => return Ok(false),
                None => {}
            }
        }
    }

    /// Waits for a while, at most `left`, until `ready` has something.
    fn look<R>(&self, left: Option<Duration>, mut ready: impl FnMut(&CountState) -> Option<R>) -> Option<R> {
        let count = &self.count;
        let found = ready(&lock(&count.state));
        if found.is_some() || left == Some(Duration::ZERO) {
            return found;
        }
        let limit = left.map_or(LOOK_AGAIN, |left| left.min(LOOK_AGAIN));
        let sessions = self.sessions();
        if let [session] = &sessions[..] {
            // Receives by itself.
            let mut found = None;
            let waited = session.wait_posted_for(limit, || {
                found = ready(&lock(&count.state));
                found.is_some()
            });
            if waited.is_ok() {
                return found;
            }
        }
        let until = Instant::now() + limit.min(LOOK_MAX);
        while !sessions.is_empty() && Instant::now() < until {
            sessions.iter().for_each(|session| session.poll());
            let found = ready(&lock(&count.state));
            if found.is_some() {
                return found;
            }
            std::thread::yield_now();
        }
        sessions.iter().for_each(|session| session.stop_polling());
        let mut state = lock(&count.state);
        let found = ready(&state);
        if found.is_some() {
            return found;
        }
        state.sleepers += 1;
        let waited = count.changed.wait_timeout(state, limit);
        let mut state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        state.sleepers -= 1;
        ready(&state)
    }

    fn sessions(&self) -> Vec<Arc<PeerSession>> {
        let state = lock(&self.count.state);
        let busy = state.sessions.iter().filter(|(_, pending)| *pending > 0);
        busy.filter_map(|(session, _)| session.upgrade()).collect()
    }
}

/// What is posted next, and how: made by [`Region::post`].
#[derive(Clone, Copy, Debug)]
pub struct Posting<'a> {
    region: &'a Region,
    how: How,
}

/// How an operation is posted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    /// Waits for room.
    pub(crate) waits: bool,
    /// Another one follows at once.
    pub(crate) followed: bool,
}

impl<'a> Posting<'a> {
    pub(crate) fn new(region: &'a Region) -> Self {
        Self { region, how: How { waits: true, followed: false } }
    }

    /// Fails with [`Error::WouldBlock`] instead of waiting for room.
    pub fn without_waiting(self) -> Self {
        Self { how: How { waits: false, ..self.how }, ..self }
    }

    /// Another operation for this peer follows at once: they are sent together, in one system call, when 256 KiB wait, the last
    /// is posted without this, or somebody waits, tests or polls. libfabric's `FI_MORE`. If none of that happens the node's thread sends
    /// it, within two milliseconds.
    pub fn followed(self) -> Self {
        Self { how: How { followed: true, ..self.how }, ..self }
    }

    /// Ends are counted instead of waited for one by one.
    pub fn counted(self, counter: &'a Counter) -> Counted<'a> {
        Counted { posting: self, counter }
    }

    /// Writes `locals`, in order, to neighbouring bytes from `offset` on: at most 256 pieces and 1 MiB.
    ///
    /// # Errors
    /// [`Error::Bounds`], [`Error::WouldBlock`], [`Error::LenderLost`], [`Error::Timeout`]. A refusal is told by the next flush.
    pub fn write(self, offset: u64, locals: &[SharedSlice], options: WriteOptions) -> Result<Op> {
        self.op("write", |target| self.start_write(offset, locals, options, target))
    }

    /// Reads neighbouring bytes from `offset` on into `locals`, in order: at most 256 pieces and 1 MiB.
    ///
    /// # Errors
    /// As [`Posting::write`].
    pub fn read(self, offset: u64, locals: &[SharedSlice]) -> Result<Op> {
        self.op("read", |target| self.start_read(offset, locals, target))
    }

    /// Changes the word at `offset`, a multiple of its width.
    ///
    /// # Errors
    /// As [`Posting::write`].
    pub fn atomic<W: Word>(self, offset: u64, change: Atomically<W>) -> Result<Op<W>> {
        let (atomic, what) = change.encode();
        self.op(what, |target| self.start_atomic::<W>(offset, atomic, what, target))
    }

    /// Ends when the peer's memory has all writes posted before through its regions.
    ///
    /// # Errors
    /// As [`Posting::write`].
    pub fn flush(self) -> Result<Op> {
        self.op("flush", |target| self.start_flush(target))
    }

    /// Calls a method of the peer.
    pub(crate) fn call(self, method: u32, body: &[u8]) -> Result<Op<Vec<u8>>> {
        self.op("call", |target| self.start_call(method, body, target))
    }

    fn start_call(self, method: u32, body: &[u8], target: Target) -> Result<()> {
        let post = |state: &mut crate::connection::State, token| {
            state.session.endpoint.post_call(token, method, body.to_vec())
        };
        self.region.peer().start(self.how, "call", target, post)
    }

    fn op<T>(self, what: &'static str, start: impl FnOnce(Target) -> Result<()>) -> Result<Op<T>> {
        let cell = Arc::new(Cell::new());
        start(Target::Cell(Arc::clone(&cell)))?;
        let connection = self.region.connection();
        Ok(Op { cell, connection, what, detached: false, outcome: PhantomData })
    }

    fn start_write(
        self,
        offset: u64,
        locals: &[SharedSlice],
        options: WriteOptions,
        target: Target,
    ) -> Result<()> {
        let bytes = self.region.check_all(offset, locals)?;
        self.region.check_notify(options)?;
        let (peer, handle) = (self.region.peer(), self.region.handle());
        let mapped = self.region.mapped_for(options);
        if mapped.is_some_and(|mapped| mapped.write_shared(peer, handle, offset, locals, options)) {
            target.end(Ok(Answer::Done));
            return Ok(());
        }
        if bytes as usize <= COPIED_BYTES_MAX {
            let mut copy = vec![0; bytes as usize];
            let mut rest = &mut copy[..];
            for local in locals {
                let (head, tail) = rest.split_at_mut(local.len());
                local.read_into(0, head).ok_or_else(crate::region::lengths)?;
                rest = tail;
            }
            peer.start_copied(self.how, handle, offset, &copy, options, target)?;
        } else {
            peer.start(self.how, "write", target, |state, token| {
                let slot = state.session.endpoint.post_write_with(token, handle, offset, bytes, options)?;
                state.session.set_locals(slot, locals);
                Ok(slot)
            })?;
        }
        self.region.went_over(self.how.followed);
        Ok(())
    }

    fn start_read(self, offset: u64, locals: &[SharedSlice], target: Target) -> Result<()> {
        let bytes = self.region.check_all(offset, locals)?;
        let handle = self.region.handle();
        let peer = self.region.peer();
        if self.region.mapped(true).is_some_and(|mapped| mapped.read_shared(peer, offset, locals)) {
            target.end(Ok(Answer::Done));
            return Ok(());
        }
        self.region.peer().start(self.how, "read", target, |state, token| {
            let slot = state.session.endpoint.post_read(token, handle, offset, bytes)?;
            state.session.set_locals(slot, locals);
            Ok(slot)
        })
    }

    fn start_atomic<W: Word>(
        self,
        offset: u64,
        atomic: Atomic,
        what: &'static str,
        target: Target,
    ) -> Result<()> {
        self.region.check(offset, W::WIDTH as usize)?;
        let handle = self.region.handle();
        let mapped = self.region.mapped(true);
        if let Some(word) = mapped.and_then(|mapped| mapped.atomic(self.region.peer(), offset, &atomic)) {
            target.end(Ok(Answer::Word(word)));
            return Ok(());
        }
        let post = |state: &mut crate::connection::State, token| {
            state.session.endpoint.post_atomic(token, handle, offset, &atomic)
        };
        self.region.peer().start(self.how, what, target, post)
    }

    fn start_flush(self, target: Target) -> Result<()> {
        if self.region.mapped_flush() {
            target.end(Ok(Answer::Done));
            return Ok(());
        }
        let post = |state: &mut crate::connection::State, token| state.session.endpoint.post_flush(token);
        self.region.peer().start(self.how, "flush", target, post)
    }
}

/// As [`Posting`], for operations whose ends are counted.
#[derive(Clone, Copy, Debug)]
pub struct Counted<'a> {
    posting: Posting<'a>,
    counter: &'a Counter,
}

impl Counted<'_> {
    /// As [`Posting::write`].
    ///
    /// # Errors
    /// As [`Posting::write`]; then it is not counted.
    pub fn write(self, offset: u64, locals: &[SharedSlice], options: WriteOptions) -> Result<()> {
        self.count(|target| self.posting.start_write(offset, locals, options, target))
    }

    /// As [`Posting::read`].
    ///
    /// # Errors
    /// As [`Counted::write`].
    pub fn read(self, offset: u64, locals: &[SharedSlice]) -> Result<()> {
        self.count(|target| self.posting.start_read(offset, locals, target))
    }

    /// Writes scattered bytes, each piece to its own offset and of at most 1 MiB: as many operations as there are pieces, which are sent
    /// together; a fence comes before the first, a notification behind the last. GASPI's `gaspi_write_list_notify`.
    ///
    /// How many were posted: fewer than all only [without waiting](Posting::without_waiting), when there is no more room.
    ///
    /// # Errors
    /// As [`Posting::write`]; [`Error::Bounds`] before the first is posted, otherwise those before are counted.
    pub fn write_vectored(self, pieces: &[(u64, SharedSlice)], options: WriteOptions) -> Result<usize> {
        if pieces.is_empty() && options.notify.is_some() {
            self.write(0, &[], options)?;
        }
        let last = pieces.len().saturating_sub(1);
        self.each(pieces, |counted, index, (offset, local)| {
            let fence = options.fence && index == 0;
            let notify = options.notify.filter(|_| index == last);
            counted.write(offset, &[local], WriteOptions { fence, notify })
        })
    }

    /// Reads scattered bytes, each piece from its own offset and of at most 1 MiB, as [`Counted::write_vectored`] writes them.
    ///
    /// # Errors
    /// As [`Counted::write_vectored`].
    pub fn read_vectored(self, pieces: &[(u64, SharedSlice)]) -> Result<usize> {
        self.each(pieces, |counted, _, (offset, local)| counted.read(offset, &[local]))
    }

    fn each(
        self,
        pieces: &[(u64, SharedSlice)],
        mut post: impl FnMut(Self, usize, (u64, SharedSlice)) -> Result<()>,
    ) -> Result<usize> {
        self.posting.region.check_pieces(pieces)?;
        for (index, piece) in pieces.iter().enumerate() {
            let posting = if index + 1 < pieces.len() { self.posting.followed() } else { self.posting };
            match post(Self { posting, ..self }, index, *piece) {
                Err(Error::WouldBlock { .. }) => return Ok(index),
                result => result?,
            }
        }
        Ok(pieces.len())
    }

    /// As [`Posting::atomic`]; what the word was is not told.
    ///
    /// # Errors
    /// As [`Counted::write`].
    pub fn atomic<W: Word>(self, offset: u64, change: Atomically<W>) -> Result<()> {
        let (atomic, what) = change.encode();
        self.count(|target| self.posting.start_atomic::<W>(offset, atomic, what, target))
    }

    /// As [`Posting::flush`].
    ///
    /// # Errors
    /// As [`Counted::write`].
    pub fn flush(self) -> Result<()> {
        self.count(|target| self.posting.start_flush(target))
    }

    /// As [`Posting::call`]; what was answered is not told.
    pub(crate) fn call(self, method: u32, body: &[u8]) -> Result<()> {
        self.count(|target| self.posting.start_call(method, body, target))
    }

    fn count(self, start: impl FnOnce(Target) -> Result<()>) -> Result<()> {
        let session = self.posting.region.session();
        let key = Arc::as_ptr(session) as SessionKey;
        // First: it may have ended before it is posted, as far as we can see.
        self.counter.count.begin(session);
        let started = start(Target::Count(Arc::clone(&self.counter.count), key));
        if started.is_err() {
            self.counter.count.take_back(key);
        }
        started
    }
}

#[cfg(test)]
mod tests;
