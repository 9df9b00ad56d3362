//! A peer and its segments: the importing side of [`crate::node`].

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use netvm_core::endpoint::{Answer, Event, OpError, PostError};
use netvm_core::key::{RemoteKey, Rights};
use netvm_core::limits::PAYLOAD_BYTES_MAX;
use netvm_core::segment::ImportTable;
use netvm_core::wire::Status;
use netvm_sys::epoll::Interest;
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;

use crate::error::{Error, Result};
use crate::link::Link;
use crate::link::session::{Failure, Session};
use crate::node::{Shared, View};

/// A peer that does not answer for so long has failed.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Receives on one rail before the others have their turn.
const ROUNDS_MAX: usize = 16;
/// Bytes of one bounce buffer: what one operation of [`Region::read`] or [`Region::write`] moves at once.
const BOUNCE_BYTES: usize = 256 << 10;

/// A session with one peer, shared by its users and the node's thread.
pub(crate) struct Channel {
    shared: Arc<Shared>,
    address: String,
    id: u64,
    state: Mutex<State>,
    /// An operation has ended, or nobody leads any more.
    changed: Condvar,
}

pub(crate) struct State {
    pub(crate) session: Session<Box<dyn Link>>,
    pub(crate) imports: ImportTable,
    ended: HashMap<u64, Result<Answer, OpError>>,
    next_token: u64,
    /// A user waits on the links itself; the node's thread keeps out.
    led: bool,
    watches_room: bool,
    broken: Option<Error>,
    bounces: Vec<Mapping>,
}

impl Channel {
    pub(crate) fn new(
        shared: Arc<Shared>,
        links: Vec<Box<dyn Link>>,
        limits: (u32, u32),
        address: &str,
        id: u64,
    ) -> Self {
        let state = State {
            session: Session::new(links, limits.0, limits.1),
            imports: ImportTable::default(),
            ended: HashMap::new(),
            next_token: 0,
            led: false,
            watches_room: false,
            broken: None,
            bounces: Vec::new(),
        };
        let address = address.to_owned();
        Self { shared, address, id, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn watch(&self) -> Result<()> {
        let state = self.lock();
        for rail in 0..state.session.endpoint.rails() {
            let fd = state.session.link(rail).wait_fd();
            let added = self.shared.epoll.add(
                fd,
                self.id + rail as u64,
                Interest { readable: true, writable: false },
            );
            added.map_err(|error| Error::system("watch a link", &error))?;
        }
        Ok(())
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().broken.is_some()
    }

    /// Ends the session; operations under way fail.
    pub(crate) fn close(&self, reason: &str) {
        let mut state = self.lock();
        if state.broken.is_none() {
            state.session.endpoint.goodbye(Status::Stopping, reason);
            let State { session, imports, .. } = &mut *state;
            let mut view = View { exports: &self.shared.exports, imports };
            let _ = session.send(0, &mut view);
            let error = Error::LenderLost { lender: self.address.clone(), reason: reason.to_owned() };
            self.break_off(&mut state, error);
        }
    }

    fn break_off(&self, state: &mut State, error: Error) {
        if state.broken.is_some() {
            return;
        }
        for rail in 0..state.session.endpoint.rails() {
            let _ = self.shared.epoll.remove(state.session.link(rail).wait_fd());
        }
        state.broken = Some(error);
        state.session.endpoint.fail();
        self.collect(state);
        state.session.close_links();
        self.changed.notify_all();
    }

    /// The node's thread: something is ready.
    pub(crate) fn serve(&self) {
        let mut state = self.lock();
        if !state.led {
            self.progress(&mut state);
            self.arm(&mut state);
        }
    }

    /// Tells the node's thread what to watch for.
    fn arm(&self, state: &mut State) {
        let room = state.session.has_output();
        if state.broken.is_none() && room != state.watches_room {
            state.watches_room = room;
            self.set_interest(state, Interest { readable: true, writable: room });
        }
    }

    fn set_interest(&self, state: &State, interest: Interest) {
        for rail in 0..state.session.endpoint.rails() {
            let fd = state.session.link(rail).wait_fd();
            let _ = self.shared.epoll.change(fd, self.id + rail as u64, interest);
        }
    }

    /// Sends and receives what goes without waiting.
    fn progress(&self, state: &mut State) {
        if state.broken.is_some() {
            return;
        }
        if let Err(failure) = self.exchange(state) {
            self.collect(state);
            let (lender, reason) = (self.address.clone(), failure.to_string());
            let error = match failure {
                Failure::Violation(_) => Error::Protocol { lender, reason },
                Failure::Link(_) | Failure::Ended => Error::LenderLost { lender, reason },
            };
            self.break_off(state, error);
        }
    }

    fn exchange(&self, state: &mut State) -> Result<(), Failure> {
        for rail in 0..state.session.endpoint.rails() {
            let State { session, imports, .. } = &mut *state;
            let mut view = View { exports: &self.shared.exports, imports };
            session.send(rail, &mut view)?;
            for _ in 0..ROUNDS_MAX {
                if !session.receive(rail, &mut view)? {
                    break;
                }
            }
        }
        self.collect(state);
        // Answers may go out on any rail: a write that arrived on one lets a read of another be served.
        let rails = if state.broken.is_none() { state.session.endpoint.rails() } else { 0 };
        for rail in 0..rails {
            let State { session, imports, .. } = &mut *state;
            session.send(rail, &mut View { exports: &self.shared.exports, imports })?;
        }
        // Writes complete when they are sent.
        self.collect(state);
        Ok(())
    }

    fn collect(&self, state: &mut State) {
        let mut any = false;
        while let Some(event) = state.session.event() {
            match event {
                Event::Completed { token, result, .. } => {
                    any = true;
                    state.ended.insert(token, result);
                }
                Event::Called { request, .. } => {
                    state.session.endpoint.reply(request, Err(Status::NoMethod));
                }
                Event::Goodbye { reason, .. } => {
                    let reason = String::from_utf8_lossy(&reason).chars().take(200).collect();
                    self.break_off(state, Error::LenderLost { lender: self.address.clone(), reason });
                }
                // The next flush tells.
                Event::WriteRefused(_) => {}
            }
        }
        if any {
            self.changed.notify_all();
        }
    }

    /// Posts an operation, waiting for room if need be.
    fn post<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        mut post: impl FnMut(&mut State, u64) -> Result<u16, PostError>,
    ) -> Result<(MutexGuard<'a, State>, u64)>
    where
        Self: 'a,
    {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(error) = &state.broken {
                return Err(error.clone());
            }
            let token = state.next_token;
            match post(&mut state, token) {
                Ok(_) => {
                    state.next_token += 1;
                    return Ok((state, token));
                }
                Err(PostError::Full) => {
                    self.progress(&mut state);
                    if Instant::now() > deadline {
                        return Err(self.timeout(&mut state, "room for another operation"));
                    }
                    let wait = self.changed.wait_timeout(state, Duration::from_millis(1));
                    state = wait.unwrap_or_else(PoisonError::into_inner).0;
                }
                Err(error) => return Err(Error::Other(error.to_string())),
            }
        }
    }

    fn timeout(&self, state: &mut State, what: &'static str) -> Error {
        let after_ms = TIMEOUT.as_millis() as u64;
        let error = Error::Timeout { lender: self.address.clone(), what, after_ms };
        // Its answer could still come, into memory that is in other use by then.
        self.break_off(state, error.clone());
        error
    }

    /// Waits for an operation. The first who waits waits on the links (and so saves a change of threads), the others on him.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        token: u64,
        what: &'static str,
    ) -> Result<(MutexGuard<'a, State>, Answer)> {
        let deadline = Instant::now() + TIMEOUT;
        let mut leads = false;
        let result = loop {
            self.progress(&mut state);
            if let Some(result) = state.ended.remove(&token) {
                break match (result, &state.broken) {
                    (Ok(answer), _) => Ok(answer),
                    (Err(OpError::Lost), Some(error)) => Err(error.clone()),
                    (Err(OpError::Lost), None) => Err(Error::Other("the session has ended".to_owned())),
                    (Err(OpError::Refused(code)), _) => {
                        Err(Error::Op { lender: self.address.clone(), what, code })
                    }
                };
            }
            if let Some(error) = &state.broken {
                break Err(error.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Err(self.timeout(&mut state, what));
            }
            let room = state.session.has_output();
            if !leads && state.led {
                // The leader may have gone to sleep before our bytes were stuck: then we look after them.
                let patience = if room { Duration::from_millis(1) } else { left };
                let wait = self.changed.wait_timeout(state, patience);
                state = wait.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            if !leads {
                (leads, state.led) = (true, true);
                self.set_interest(&state, Interest { readable: false, writable: false });
            }
            let events = libc::POLLIN | if room { libc::POLLOUT } else { 0 };
            let mut fds = [libc::pollfd { fd: -1, events, revents: 0 }; netvm_core::limits::RAILS_MAX];
            let rails = state.session.endpoint.rails();
            for (rail, fd) in fds.iter_mut().enumerate().take(rails) {
                fd.fd = state.session.link(rail).wait_fd().as_raw_fd();
            }
            drop(state);
            // Should the session end meanwhile, its descriptors may be closed or others': a spurious wake-up at worst.
            let waited =
                netvm_sys::thread::poll(&mut fds[..rails], Some(left.min(Duration::from_millis(100))));
            state = self.lock();
            if let Err(error) = waited {
                break Err(Error::system("wait for a peer", &error));
            }
        };
        if leads {
            state.led = false;
            if state.broken.is_none() {
                state.watches_room = state.session.has_output();
                let writable = state.watches_room;
                self.set_interest(&state, Interest { readable: true, writable });
            }
            self.changed.notify_all();
        }
        result.map(|answer| (state, answer))
    }
}

/// A node we are connected to. Cloning it is cheap; the connection ends with the last clone and the last region.
#[derive(Clone)]
pub struct Peer {
    connection: Arc<Connection>,
}

/// Closes the channel when the last user has gone.
struct Connection(Arc<Channel>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.close("the peer has closed the connection");
    }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("address", &self.connection.0.address).finish()
    }
}

impl Peer {
    pub(crate) fn new(channel: Arc<Channel>) -> Self {
        Self { connection: Arc::new(Connection(channel)) }
    }

    /// Opens the peer's segment `name`.
    ///
    /// # Errors
    /// [`Error::Op`] when there is no such segment or the key is wrong (the peer does not tell which); [`Error::LenderLost`].
    pub fn import(&self, name: &str, key: &RemoteKey) -> Result<Region> {
        let channel = &self.connection.0;
        let post = |state: &mut State, token| state.session.endpoint.post_import(token, name, key);
        let (state, token) = channel.post(channel.lock(), post)?;
        match channel.wait(state, token, "import")? {
            (_, Answer::Imported { handle, len, rights }) => {
                Ok(Region { connection: Arc::clone(&self.connection), handle, len, rights })
            }
            _ => Err(Error::Other("an import was answered with something else".to_owned())),
        }
    }
}

/// A peer's segment.
pub struct Region {
    connection: Arc<Connection>,
    handle: u32,
    len: u64,
    rights: Rights,
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("len", &self.len).field("rights", &self.rights).finish_non_exhaustive()
    }
}

impl Region {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What we may do.
    pub fn rights(&self) -> Rights {
        self.rights
    }

    /// Reads the bytes at `offset`. It sees all writes made before it through this peer's regions.
    ///
    /// # Errors
    /// [`Error::Bounds`], [`Error::Op`] when the peer has unexported the segment, [`Error::LenderLost`], [`Error::Timeout`].
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        let mut offset = offset;
        for part in bytes.chunks_mut(BOUNCE_BYTES) {
            let bounce = self.bounce()?;
            let local = part_of(&bounce, part.len())?;
            self.read_shared(offset, &[local])?;
            local.read_into(0, part).ok_or_else(lengths)?;
            self.connection.0.lock().bounces.push(bounce);
            offset += part.len() as u64;
        }
        Ok(())
    }

    /// Writes `bytes` at `offset`. The buffer may be used again when this returns; the peer has the bytes after [`Region::flush`].
    ///
    /// # Errors
    /// [`Error::Bounds`], [`Error::LenderLost`], [`Error::Timeout`]. A refusal is told by the next flush.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        let mut offset = offset;
        for part in bytes.chunks(BOUNCE_BYTES) {
            let bounce = self.bounce()?;
            let local = part_of(&bounce, part.len())?;
            local.write_from(0, part).ok_or_else(lengths)?;
            self.write_shared(offset, &[local])?;
            self.connection.0.lock().bounces.push(bounce);
            offset += part.len() as u64;
        }
        Ok(())
    }

    /// Reads neighbouring bytes from `offset` on into `locals`, in order, without a copy: at most 256 pieces and 1 MiB.
    ///
    /// # Errors
    /// As [`Region::read`].
    pub fn read_shared(&self, offset: u64, locals: &[SharedSlice]) -> Result<()> {
        let bytes = self.check_all(offset, locals)?;
        let post = |state: &mut State, token| {
            let slot = state.session.endpoint.post_read(token, self.handle, offset, bytes)?;
            state.session.set_locals(slot, locals);
            Ok(slot)
        };
        let channel = &self.connection.0;
        let (state, token) = channel.post(channel.lock(), post)?;
        channel.wait(state, token, "read").map(|_| ())
    }

    /// Writes `locals`, in order, to neighbouring bytes from `offset` on, without a copy: at most 256 pieces and 1 MiB.
    ///
    /// # Errors
    /// As [`Region::write`].
    pub fn write_shared(&self, offset: u64, locals: &[SharedSlice]) -> Result<()> {
        let bytes = self.check_all(offset, locals)?;
        let post = |state: &mut State, token| {
            let slot = state.session.endpoint.post_write(token, self.handle, offset, bytes)?;
            state.session.set_locals(slot, locals);
            Ok(slot)
        };
        let channel = &self.connection.0;
        let (state, token) = channel.post(channel.lock(), post)?;
        channel.wait(state, token, "write").map(|_| ())
    }

    /// Returns when the peer's memory has all writes made so far through this peer's regions.
    ///
    /// # Errors
    /// [`Error::Op`] when one of them was refused; [`Error::LenderLost`], [`Error::Timeout`].
    pub fn flush(&self) -> Result<()> {
        let channel = &self.connection.0;
        let post = |state: &mut State, token| state.session.endpoint.post_flush(token);
        let (state, token) = channel.post(channel.lock(), post)?;
        channel.wait(state, token, "write").map(|_| ())
    }

    fn check(&self, offset: u64, bytes: usize) -> Result<()> {
        let (bytes, len) = (bytes as u64, self.len);
        match offset.checked_add(bytes) {
            Some(end) if end <= len => Ok(()),
            _ => Err(Error::Bounds { offset, bytes, len }),
        }
    }

    fn check_all(&self, offset: u64, locals: &[SharedSlice]) -> Result<u32> {
        let bytes = locals.iter().map(SharedSlice::len).fold(0, usize::saturating_add);
        self.check(offset, bytes)?;
        if bytes > PAYLOAD_BYTES_MAX as usize || locals.len() > netvm_core::limits::PIECES_MAX {
            return Err(Error::Other(PostError::TooLong.to_string()));
        }
        Ok(bytes as u32)
    }

    fn bounce(&self) -> Result<Mapping> {
        if let Some(bounce) = self.connection.0.lock().bounces.pop() {
            return Ok(bounce);
        }
        Mapping::anonymous(BOUNCE_BYTES).map_err(|error| Error::system("map a buffer", &error))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let channel = &self.connection.0;
        let mut state = channel.lock();
        if state.broken.is_none() {
            let token = state.next_token;
            state.next_token += 1;
            // No room: the handle is closed with the connection.
            if state.session.endpoint.post_unimport(token, self.handle).is_ok() {
                let _ = channel.wait(state, token, "close");
            }
        }
    }
}

fn part_of(bounce: &Mapping, bytes: usize) -> Result<SharedSlice> {
    bounce.shared().sub(0, bytes).ok_or_else(lengths)
}

fn lengths() -> Error {
    Error::Other("a bounce buffer is shorter than its part".to_owned())
}
