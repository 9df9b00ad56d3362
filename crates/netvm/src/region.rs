//! A peer and its segments: the importing side of [`crate::node`].

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use netvm_core::endpoint::{Answer, PostError};
use netvm_core::key::{RemoteKey, Rights};
use netvm_core::limits::{COPIED_BYTES_MAX, PAYLOAD_BYTES_MAX};
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;

pub use netvm_core::endpoint::WriteOptions;

use crate::connection::{Connection, PeerSession, State};
use crate::error::{Error, Result};

use crate::node::{LOCATE_METHOD, LinkChoice, Location, ask_address, ask_find, decode_locations, lock};
use crate::notify::{Notify, queue};
use crate::posted::Posting;
use crate::shm::mapped::Mapped;

/// Bytes of one bounce buffer: what one operation of [`Region::read`] or [`Region::write`] moves at once.
const BOUNCE_BYTES: usize = 256 << 10;

/// A node we are connected to. Cloning it is cheap; the connection ends with the last clone and the last region on the side that
/// has opened it.
#[derive(Clone)]
pub struct Peer {
    connection: Arc<Connection>,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("address", &self.connection.session.address).finish()
    }
}

impl Peer {
    /// The peer of a session, which ends with the last clone if it `closes`.
    pub(crate) fn new(session: Arc<PeerSession>, closes: bool) -> Self {
        Self { connection: Arc::new(Connection { session, closes }) }
    }

    /// Whether the session has ended.
    pub(crate) fn is_closed(&self) -> bool {
        self.connection.session.is_closed()
    }

    /// Opens the peer's segment `name`.
    ///
    /// # Errors
    /// [`Error::Op`] when there is no such segment or the key is wrong (the peer does not tell which); [`Error::LenderLost`].
    pub fn import(&self, name: &str, key: &RemoteKey) -> Result<Region> {
        self.import_over(self.connection.session.neighbour.choice(), name, key)
    }

    /// As [`Peer::import`], for what is no memory and only called.
    pub(crate) fn import_called(&self, name: &str, key: &RemoteKey) -> Result<Region> {
        self.import_over(LinkChoice::Socket, name, key)
    }

    fn import_over(&self, choice: LinkChoice, name: &str, key: &RemoteKey) -> Result<Region> {
        let peer = &self.connection.session;
        let post = |state: &mut State, token| state.session.endpoint.post_import(token, name, key);
        let (state, token) = peer.post(peer.lock(), post)?;
        // The session is free again before the peer is asked for its memory.
        let answer = peer.wait(state, token, "import").map(|(_, answer)| answer)?;
        match answer {
            Answer::Imported { handle, len, rights, notifications } => {
                let (connection, owned) = (Arc::clone(&self.connection), name.to_owned());
                let mut region = Region {
                    connection,
                    handle,
                    len,
                    rights,
                    notifications,
                    name: owned,
                    key: *key,
                    mapped: None,
                    places: Mutex::new(0),
                };
                if choice.may_share() {
                    match peer.neighbour.map(peer, choice, handle, len, rights, notifications) {
                        Ok(mapped) => region.mapped = Some(mapped),
                        Err(reason) if choice == LinkChoice::Shm => {
                            return Err(Error::Other(format!("no shared memory for {name:?}: {reason}")));
                        }
                        Err(_) => {}
                    }
                }
                Ok(region)
            }
            _ => Err(Error::Other("an import was answered with something else".to_owned())),
        }
    }

    /// Chooses what carries the operations of segments that are imported from now on.
    pub fn choose(&self, link: LinkChoice) {
        self.connection.session.neighbour.choose(link);
    }

    /// What the connection is made of: `tcp`, `unix`, `sealed` (encrypted) or `loopback`.
    pub fn link(&self) -> &'static str {
        self.connection.session.link
    }
}

impl Peer {
    /// Every place of the byte at `address` of the peer's process among the segments of it that we have open.
    ///
    /// # Errors
    /// [`Error::LenderLost`], [`Error::Timeout`]; [`Error::Op`] from a peer that cannot tell.
    pub fn find(&self, address: u64) -> Result<Vec<Location>> {
        let peer = &self.connection.session;
        let body = ask_find(address);
        let post =
            |state: &mut State, token| state.session.endpoint.post_call(token, LOCATE_METHOD, body.clone());
        let (state, token) = peer.post(peer.lock(), post)?;
        let (state, answer) = peer.wait(state, token, "call")?;
        drop(state);
        let found = if let Answer::Reply(body) = answer { decode_locations(&body) } else { None };
        found.ok_or_else(|| Error::Other("the peer's answer makes no sense".to_owned()))
    }
}

/// A peer's segment.
pub struct Region {
    connection: Arc<Connection>,
    handle: u32,
    len: u64,
    rights: Rights,
    notifications: u32,
    name: String,
    key: RemoteKey,
    mapped: Option<Mapped>,
    /// Places in the segment's queue that we know to be free.
    places: Mutex<u32>,
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

    /// Maps what an object that is only called has to be mapped. Whether there is something.
    pub(crate) fn map_word(&mut self) -> bool {
        let peer = &self.connection.session;
        if peer.neighbour.choice().may_share() {
            // Never copied by the kernel: it does not compute.
            self.mapped = peer.neighbour.map(peer, LinkChoice::Shm, self.handle, 0, self.rights, 0).ok();
        }
        self.mapped.is_some()
    }

    /// Flushes where nothing is under way over the links, nor a refusal to be told.
    #[inline]
    pub(crate) fn mapped_flush(&self) -> bool {
        let peer = self.peer();
        self.mapped.as_ref().is_some_and(|mapped| peer.beside.is_flushed() && mapped.flush(peer))
    }

    /// What carries its operations: `shm` (mapped), `cma` (read and written by copies that the kernel makes between the processes; the rest goes
    /// over the connection), or the connection's link as [`Peer::link`].
    pub fn link(&self) -> &'static str {
        match &self.mapped {
            Some(mapped) if mapped.is_apart() => "cma",
            Some(_) => "shm",
            None => self.connection.session.link,
        }
    }

    /// The number of the exporting process, if it runs on this host and lets its memory be shared.
    pub(crate) fn peer_process(&self) -> Option<u32> {
        let peer = &self.connection.session;
        peer.neighbour.process_id(peer)
    }

    /// The memory itself, where it is mapped here. Not for an operation that comes after everything posted before (`ordered`) while
    /// some of that is under way over the links: then it goes there too.
    #[inline]
    pub(crate) fn mapped(&self, ordered: bool) -> Option<&Mapped> {
        self.mapped.as_ref().filter(|_| !ordered || self.connection.session.beside.is_applied())
    }

    /// The memory for a write with these options: an earlier one that is still under way over the links would undo it.
    #[inline]
    pub(crate) fn mapped_for(&self, options: WriteOptions) -> Option<&Mapped> {
        let ordered = options.fence || options.notify.is_some();
        self.mapped(ordered).filter(|_| ordered || self.connection.session.beside.is_filled())
    }

    /// A write of a mapped region has gone over the links: later ones shall find back to the memory.
    pub(crate) fn went_over(&self, followed: bool) {
        if let Some(mapped) = &self.mapped {
            mapped.ask_what_is_applied(self.peer(), followed);
        }
    }

    /// How many notification numbers it has, from 0 on.
    pub fn notifications(&self) -> u32 {
        self.notifications
    }

    /// Address, in the process that exports it, of the byte at `offset`. It asks the peer.
    ///
    /// # Errors
    /// [`Error::Bounds`]; [`Error::Op`] when the peer has unexported it or cannot tell; [`Error::LenderLost`], [`Error::Timeout`].
    pub fn remote_address(&self, offset: u64) -> Result<u64> {
        self.check(offset, 0)?;
        let body = self.call(LOCATE_METHOD, &ask_address(self.handle))?;
        let start = <[u8; 8]>::try_from(body).map(u64::from_le_bytes);
        let address = start.ok().and_then(|start| start.checked_add(offset));
        address.ok_or_else(|| Error::Other("the peer's answer makes no sense".to_owned()))
    }

    /// Reads the bytes at `offset`. It sees all writes made before it through this peer's regions.
    ///
    /// # Errors
    /// [`Error::Bounds`], [`Error::Op`] when the peer has unexported the segment, [`Error::LenderLost`], [`Error::Timeout`].
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        if self.mapped(true).is_some_and(|mapped| mapped.read(self.peer(), offset, bytes)) {
            return Ok(());
        }
        let mut offset = offset;
        for part in bytes.chunks_mut(BOUNCE_BYTES) {
            let bounce = self.bounce()?;
            let local = part_of(&bounce, part.len())?;
            self.read_shared(offset, &[local])?;
            local.read_into(0, part).ok_or_else(lengths)?;
            self.connection.session.lock().bounces.push(bounce);
            offset += part.len() as u64;
        }
        Ok(())
    }

    /// Writes `bytes` at `offset`. The buffer may be used again when this returns; the peer has the bytes after [`Region::flush`].
    ///
    /// # Errors
    /// [`Error::Bounds`], [`Error::LenderLost`], [`Error::Timeout`]. A refusal is told by the next flush.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.write_with(offset, bytes, WriteOptions::default())
    }

    /// As [`Region::write`] followed by [`Region::flush`], in one message where they fit one.
    ///
    /// # Errors
    /// As both.
    pub fn write_flush(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        if bytes.len() > COPIED_BYTES_MAX || self.mapped.is_some() {
            self.write(offset, bytes)?;
            return self.flush();
        }
        self.check(offset, bytes.len())?;
        let peer = &self.connection.session;
        let (state, _) = peer.post(peer.lock(), |state, _| {
            state.session.endpoint.post_write_copied(self.handle, offset, bytes, WriteOptions::default())
        })?;
        let (state, token) = peer.post(state, |state, token| state.session.endpoint.post_flush(token))?;
        peer.wait(state, token, "write").map(drop)
    }

    /// As [`Region::write`], and tells the peer once these bytes, and all written before through this peer's regions, are there.
    ///
    /// # Errors
    /// As [`Region::write`].
    pub fn write_notify(&self, offset: u64, bytes: &[u8], notify: Notify) -> Result<()> {
        self.write_with(offset, bytes, WriteOptions { fence: false, notify: Some(notify) })
    }

    /// Tells the peer once all that was written before through this peer's regions is there.
    ///
    /// # Errors
    /// As [`Region::write`].
    pub fn notify(&self, notify: Notify) -> Result<()> {
        self.write_notify(0, &[], notify)
    }

    /// Puts number and value at the end of the segment's queue (see [`Notify::Queue`]), once all that was written before through this peer's
    /// regions is there; waits for a place if need be.
    ///
    /// # Errors
    /// As [`Region::write`]; [`Error::WouldBlock`] when there is no place after `timeout`; [`Error::Op`] when the segment has no queue.
    pub fn enqueue(&self, number: u16, value: NonZeroU32, timeout: Option<Duration>) -> Result<()> {
        let start = Instant::now();
        let mut pause = Duration::from_micros(50);
        loop {
            match self.notify(Notify::Queue { number, value }) {
                Err(Error::WouldBlock { .. }) if timeout.is_none_or(|timeout| start.elapsed() < timeout) => {}
                ended => return ended,
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(2));
        }
    }

    /// As [`Region::write`], with a fence (not applied before everything that was written earlier), a notification, or both.
    ///
    /// # Errors
    /// As [`Region::write`].
    pub fn write_with(&self, offset: u64, bytes: &[u8], options: WriteOptions) -> Result<()> {
        self.write_told(offset, bytes, options, options.notify.is_some())
    }

    /// As [`Region::write_notify`], but as soon as a write without a notification would be sent: with others that follow it closely.
    pub(crate) fn write_message(&self, offset: u64, bytes: &[u8], notify: Notify) -> Result<()> {
        self.write_told(offset, bytes, WriteOptions { fence: false, notify: Some(notify) }, false)
    }

    fn write_told(&self, offset: u64, bytes: &[u8], options: WriteOptions, at_once: bool) -> Result<()> {
        self.check(offset, bytes.len())?;
        self.check_notify(options)?;
        if self
            .mapped_for(options)
            .is_some_and(|mapped| mapped.write(self.peer(), self.handle, offset, bytes, options))
        {
            return Ok(());
        }
        if bytes.len() <= COPIED_BYTES_MAX {
            let post = |state: &mut State, _| {
                state.session.endpoint.post_write_copied(self.handle, offset, bytes, options)
            };
            let peer = &self.connection.session;
            let (state, _) = peer.post(peer.lock(), post)?;
            let pushed = peer.push(state, at_once);
            self.went_over(false);
            return pushed;
        }
        let mut offset = offset;
        let mut parts = bytes.chunks(BOUNCE_BYTES).peekable();
        while let Some(part) = parts.next() {
            let bounce = self.bounce()?;
            let local = part_of(&bounce, part.len())?;
            local.write_from(0, part).ok_or_else(lengths)?;
            // The notification waits for all parts, since they come before it.
            let notify = options.notify.filter(|_| parts.peek().is_none());
            self.write_checked(offset, &[local], part.len() as u32, WriteOptions { notify, ..options })?;
            self.connection.session.lock().bounces.push(bounce);
            offset += part.len() as u64;
        }
        self.went_over(false);
        Ok(())
    }

    /// Reads neighbouring bytes from `offset` on into `locals`, in order, without a copy: at most 256 pieces and 1 MiB.
    ///
    /// # Errors
    /// As [`Region::read`].
    #[inline]
    pub fn read_shared(&self, offset: u64, locals: &[SharedSlice]) -> Result<()> {
        let bytes = self.check_all(offset, locals)?;
        if self.mapped(true).is_some_and(|mapped| mapped.read_shared(self.peer(), offset, locals)) {
            return Ok(());
        }
        self.read_over(offset, locals, bytes)
    }

    fn read_over(&self, offset: u64, locals: &[SharedSlice], bytes: u32) -> Result<()> {
        self.run("read", |state, token| {
            let slot = state.session.endpoint.post_read(token, self.handle, offset, bytes)?;
            state.session.set_locals(slot, locals);
            Ok(slot)
        })
        .map(drop)
    }

    /// Writes `locals`, in order, to neighbouring bytes from `offset` on, without a copy: at most 256 pieces and 1 MiB.
    ///
    /// # Errors
    /// As [`Region::write`].
    pub fn write_shared(&self, offset: u64, locals: &[SharedSlice]) -> Result<()> {
        self.write_shared_with(offset, locals, WriteOptions::default())
    }

    /// As [`Region::write_shared`], with a fence, a notification, or both.
    ///
    /// # Errors
    /// As [`Region::write`].
    pub fn write_shared_with(
        &self,
        offset: u64,
        locals: &[SharedSlice],
        options: WriteOptions,
    ) -> Result<()> {
        let bytes = self.check_all(offset, locals)?;
        self.check_notify(options)?;
        if self
            .mapped_for(options)
            .is_some_and(|mapped| mapped.write_shared(self.peer(), self.handle, offset, locals, options))
        {
            return Ok(());
        }
        self.write_checked(offset, locals, bytes, options)?;
        self.went_over(false);
        Ok(())
    }

    fn write_checked(
        &self,
        offset: u64,
        locals: &[SharedSlice],
        bytes: u32,
        options: WriteOptions,
    ) -> Result<()> {
        let peer = self.peer();
        let (state, token) = peer.post(peer.lock(), |state, token| {
            let endpoint = &mut state.session.endpoint;
            let slot = endpoint.post_write_with(token, self.handle, offset, bytes, options)?;
            state.session.set_locals(slot, locals);
            Ok(slot)
        })?;
        peer.wait_sent(state, token).map(drop)
    }

    /// Reads scattered bytes, each piece from its own offset and of at most 1 MiB, all under way at once.
    ///
    /// # Errors
    /// As [`Region::read`]; the others are read when one fails.
    pub fn read_vectored(&self, pieces: &[(u64, SharedSlice)]) -> Result<()> {
        if let Some(mapped) = self.mapped(true) {
            self.check_pieces(pieces)?;
            if pieces.iter().all(|&(offset, local)| mapped.read_shared(self.peer(), offset, &[local])) {
                return Ok(());
            }
        }
        self.run_all("read", pieces, |state, token, (offset, local)| {
            let slot = state.session.endpoint.post_read(token, self.handle, *offset, local.len() as u32)?;
            state.session.set_locals(slot, &[*local]);
            Ok(slot)
        })
    }

    /// Writes scattered bytes, each piece to its own offset and of at most 1 MiB, all under way at once.
    ///
    /// # Errors
    /// As [`Region::write`]; the others are written when one fails.
    pub fn write_vectored(&self, pieces: &[(u64, SharedSlice)]) -> Result<()> {
        let options = WriteOptions::default();
        if let Some(mapped) = self.mapped_for(options) {
            self.check_pieces(pieces)?;
            let peer = self.peer();
            let write =
                |&(offset, local): &_| mapped.write_shared(peer, self.handle, offset, &[local], options);
            if pieces.iter().all(write) {
                return Ok(());
            }
        }
        let written = self.run_all("write", pieces, |state, token, (offset, local)| {
            let slot = state.session.endpoint.post_write(token, self.handle, *offset, local.len() as u32)?;
            state.session.set_locals(slot, &[*local]);
            Ok(slot)
        });
        self.went_over(false);
        written
    }

    /// Returns when the peer's memory has all writes made so far through this peer's regions.
    ///
    /// # Errors
    /// [`Error::Op`] when one of them was refused; [`Error::LenderLost`], [`Error::Timeout`].
    pub fn flush(&self) -> Result<()> {
        if self.mapped_flush() {
            return Ok(());
        }
        let beside = &self.connection.session.beside;
        let posted = beside.posted();
        let result = self.run("write", |state, token| state.session.endpoint.post_flush(token)).map(drop);
        if let Ok(()) | Err(Error::Op { .. }) = &result {
            beside.flushed(posted);
        }
        result
    }

    /// Posts operations that end later: see [`crate::posted`].
    pub fn post(&self) -> Posting<'_> {
        Posting::new(self)
    }

    pub(crate) fn session(&self) -> &Arc<PeerSession> {
        &self.connection.session
    }

    pub(crate) fn connection(&self) -> Arc<Connection> {
        Arc::clone(&self.connection)
    }

    pub(crate) fn peer(&self) -> &PeerSession {
        &self.connection.session
    }

    pub(crate) fn call(&self, method: u32, body: &[u8]) -> Result<Vec<u8>> {
        self.connection.session.call(method, body)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn key(&self) -> &RemoteKey {
        &self.key
    }

    pub(crate) fn handle(&self) -> u32 {
        self.handle
    }

    /// Posts one operation and waits for it.
    pub(crate) fn run(
        &self,
        what: &'static str,
        post: impl FnMut(&mut State, u64) -> Result<u16, PostError>,
    ) -> Result<Answer> {
        let peer = &self.connection.session;
        let (state, token) = peer.post(peer.lock(), post)?;
        peer.wait(state, token, what).map(|(_, answer)| answer)
    }

    /// Posts an operation for each piece and waits for them all; the first failure is told.
    fn run_all(
        &self,
        what: &'static str,
        pieces: &[(u64, SharedSlice)],
        mut post: impl FnMut(&mut State, u64, &(u64, SharedSlice)) -> Result<u16, PostError>,
    ) -> Result<()> {
        self.check_pieces(pieces)?;
        let peer = &self.connection.session;
        let mut tokens = Vec::with_capacity(pieces.len());
        let mut result = Ok(());
        for piece in pieces {
            match peer.post(peer.lock(), |state, token| post(state, token, piece)) {
                Ok((_, token)) => tokens.push(token),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        for token in tokens {
            let ended = peer.wait(peer.lock(), token, what).map(drop);
            result = result.and(ended);
        }
        result
    }

    pub(crate) fn check_pieces(&self, pieces: &[(u64, SharedSlice)]) -> Result<()> {
        pieces.iter().try_for_each(|(offset, local)| self.check_all(*offset, &[*local]).map(drop))
    }

    #[inline]
    pub(crate) fn check(&self, offset: u64, bytes: usize) -> Result<()> {
        let (bytes, len) = (bytes as u64, self.len);
        match offset.checked_add(bytes) {
            Some(end) if end <= len => Ok(()),
            _ => Err(Error::Bounds { offset, bytes, len }),
        }
    }

    #[inline]
    pub(crate) fn check_all(&self, offset: u64, locals: &[SharedSlice]) -> Result<u32> {
        let bytes = locals.iter().map(SharedSlice::len).fold(0, usize::saturating_add);
        self.check(offset, bytes)?;
        if bytes > PAYLOAD_BYTES_MAX as usize || locals.len() > netvm_core::limits::PIECES_MAX {
            return Err(Error::Other(PostError::TooLong.to_string()));
        }
        Ok(bytes as u32)
    }

    pub(crate) fn check_notify(&self, options: WriteOptions) -> Result<()> {
        let len = u64::from(self.notifications);
        match options.notify.map(|notify| u64::from(notify.number())) {
            Some(offset) if offset >= len => Err(Error::Bounds { offset, bytes: 1, len }),
            _ if matches!(options.notify, Some(Notify::Queue { .. })) => self.take_place(),
            _ => Ok(()),
        }
    }

    /// Takes one of our places in the segment's queue.
    fn take_place(&self) -> Result<()> {
        let mut places = lock(&self.places);
        if *places == 0 {
            // Ordered behind all we have queued: the answer counts them.
            let room = self.call(queue::METHOD, &self.handle.to_le_bytes())?;
            *places = room.try_into().map_or(0, u32::from_le_bytes);
        }
        let left = places.checked_sub(1);
        *places =
            left.ok_or_else(|| Error::WouldBlock { lender: self.connection.session.address.clone() })?;
        Ok(())
    }

    fn bounce(&self) -> Result<Mapping> {
        if let Some(bounce) = self.connection.session.lock().bounces.pop() {
            return Ok(bounce);
        }
        Mapping::anonymous(BOUNCE_BYTES).map_err(|error| Error::system("map a buffer", &error))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let peer = &self.connection.session;
        let mut state = peer.lock();
        if state.broken.is_none() {
            let token = state.next_token;
            state.next_token += 1;
            // No room: the handle is closed with the connection.
            if state.session.endpoint.post_unimport(token, self.handle).is_ok() {
                let _ = peer.wait(state, token, "close");
            }
        }
    }
}

fn part_of(bounce: &Mapping, bytes: usize) -> Result<SharedSlice> {
    bounce.shared().sub(0, bytes).ok_or_else(lengths)
}

pub(crate) fn lengths() -> Error {
    Error::Other("a bounce buffer is shorter than its part".to_owned())
}
