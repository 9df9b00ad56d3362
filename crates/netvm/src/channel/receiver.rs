//! The receiving end.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use netvm_core::channel::line::{self, LINE_BYTES};
use netvm_core::channel::{Block, Notice, Parsed, ReceiveRing, Told, taken};
use netvm_core::key::{RemoteKey, Rights};
use netvm_core::limits::SENDERS_MAX;
use netvm_sys::shared::SharedSlice;

use super::inlet::{End, State};
use super::{ChannelError, Inlet, Shape};
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::node::{Node, Shared};
use crate::notify::Notifications;

/// The receiving end of a channel, with any number of senders. Dropping it tells them.
pub struct Receiver {
    node: Arc<Shared>,
    name: String,
    memory: Memory,
    board: Notifications,
    inlet: Arc<Inlet>,
    senders: u32,
    /// What of the shared ring is being read: the block, and how much of it has been.
    block: Option<(Block, u64)>,
}

impl std::fmt::Debug for Receiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receiver").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A message, where it arrived. Its place is freed when this is dropped.
#[derive(Debug)]
#[must_use = "dropping a message frees its place"]
pub struct Message<'a> {
    receiver: &'a mut Receiver,
    sender: u32,
    bytes: SharedSlice,
}

impl Message<'_> {
    /// Number of its sender, unique among those that there are now.
    pub fn sender(&self) -> u32 {
        self.sender
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Its bytes in the ring, valid until the message is dropped; afterwards they are another's. A sender that does not keep to the protocol can
    /// change them at any time: copy first what is checked.
    pub fn bytes(&self) -> SharedSlice {
        self.bytes
    }

    /// A copy of its bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        self.bytes.to_vec()
    }

    /// Leaves the message in its place until [`Receiver::free`]: for who cannot keep the receiver borrowed.
    pub fn keep(self) -> Kept {
        let kept = Kept { sender: self.sender, bytes: self.bytes };
        std::mem::forget(self);
        kept
    }

    /// Copies the bytes from `offset` on; `None` when there are not so many.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Option<()> {
        self.bytes.read_into(offset, bytes)
    }
}

/// A message in its place, without the receiver.
#[derive(Debug)]
#[must_use = "its place is taken until it is given to `Receiver::free`"]
pub struct Kept {
    sender: u32,
    bytes: SharedSlice,
}

impl Kept {
    /// As [`Message::sender`].
    pub fn sender(&self) -> u32 {
        self.sender
    }

    /// As [`Message::bytes`], while the receiver is there, too.
    pub fn bytes(&self) -> SharedSlice {
        self.bytes
    }
}

impl Drop for Message<'_> {
    fn drop(&mut self) {
        self.receiver.consumed(self.sender, self.bytes.len());
    }
}

/// What is there.
enum Found {
    Message(u32, SharedSlice),
    Nothing,
    /// Look again.
    Again,
}

impl Receiver {
    /// Receives under `name`, from whoever has the returned key.
    ///
    /// All who have the key can write into all rings, and so spoil each other's messages: senders that do not trust each other want a receiver
    /// each.
    ///
    /// # Errors
    /// [`Error::Other`] for a shape beyond the limits, and as [`Node::export`].
    pub fn new(node: &Node, name: &str, shape: Shape) -> Result<(RemoteKey, Self)> {
        Self::within(node, name, shape, Memory::new)
    }

    /// As [`Receiver::new`], in memory that `memory` makes, of at least so many bytes: for tests.
    #[doc(hidden)]
    pub fn within(
        node: &Node,
        name: &str,
        shape: Shape,
        memory: impl FnOnce(usize) -> Result<Memory>,
    ) -> Result<(RemoteKey, Self)> {
        let rings = shape.rings().filter(|(rings, _)| (1..=SENDERS_MAX).contains(rings));
        let (rings, ring_bytes) =
            rings.ok_or_else(|| Error::Other(format!("no channel can be {shape:?}")))?;
        let shared = matches!(shape, Shape::Shared { .. });
        let line_bytes = if shared { 0 } else { LINE_BYTES };
        let bytes = usize::try_from(u64::from(rings) * (ring_bytes + line_bytes))
            .map_err(|_| Error::Other(format!("{shape:?} is too large for this machine")))?;
        let memory = memory(bytes)?;
        let (key, board) = node.export_notified(name, &memory, Rights::ReadWrite, rings)?;
        let senders = if shared { SENDERS_MAX } else { rings };
        let inlet = Arc::new(Inlet::new(board.clone(), memory.clone(), ring_bytes, senders, shared));
        node.shared().set_inlet(name, &inlet);
        let node = Arc::clone(node.shared());
        Ok((key, Self { node, name: name.to_owned(), memory, board, inlet, senders: rings, block: None }))
    }

    /// The next message; senders take turns (or, with one ring for all, in the order in which they asked for room).
    ///
    /// # Errors
    /// [`ChannelError::TimedOut`]; [`ChannelError::Left`] and [`ChannelError::Lost`], once for each sender that ends: the others go on.
    pub fn receive(&mut self, timeout: Option<Duration>) -> Result<Message<'_>, ChannelError> {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let (sender, bytes) = loop {
            match self.look()? {
                Found::Message(sender, bytes) => break (sender, bytes),
                Found::Again => {}
                Found::Nothing => {
                    let left = end.map(|end| end.saturating_duration_since(Instant::now()));
                    if self.board.wait_any(0..self.senders, left).is_none() {
                        return Err(ChannelError::TimedOut);
                    }
                }
            }
        };
        Ok(Message { receiver: self, sender, bytes })
    }

    /// The next message, if there is one.
    ///
    /// # Errors
    /// As [`Receiver::receive`], and [`ChannelError::WouldBlock`].
    pub fn try_receive(&mut self) -> Result<Message<'_>, ChannelError> {
        let (sender, bytes) = loop {
            match self.look()? {
                Found::Message(sender, bytes) => break (sender, bytes),
                Found::Again => {}
                Found::Nothing => return Err(ChannelError::WouldBlock),
            }
        };
        Ok(Message { receiver: self, sender, bytes })
    }

    /// Frees the place of a message of this receiver's, before the next one is received.
    pub fn free(&mut self, kept: Kept) {
        self.consumed(kept.sender, kept.bytes.len());
    }

    /// A descriptor for epoll, poll or select: readable when there is something to receive that came after [`Receiver::rearm`], which
    /// must be called first. Many receivers can be waited for in this way.
    ///
    /// # Errors
    /// [`Error::System`] when no descriptor is left.
    pub fn descriptor(&self) -> Result<BorrowedFd<'_>> {
        self.board.descriptor()
    }

    /// Makes the descriptor unreadable until something comes. False when something may be there already: then receive it, and do not
    /// sleep.
    #[must_use]
    pub fn rearm(&self) -> bool {
        let armed = self.board.rearm(0..self.senders);
        let state = self.inlet.lock();
        let has_block = state.queue.as_ref().is_some_and(|queue| queue.front().is_some());
        armed && !has_block && state.ended.is_empty()
    }

    fn look(&mut self) -> Result<Found, ChannelError> {
        let inlet = Arc::clone(&self.inlet);
        if inlet.lock().queue.is_some() { self.look_in_block() } else { self.look_in_rings() }
    }

    fn look_in_rings(&mut self) -> Result<Found, ChannelError> {
        let Some(number) = self.board.test_any(0..self.senders) else { return Ok(Found::Nothing) };
        let sender = u32::from(number);
        // Messages first: the end comes behind them.
        if self.board.acknowledge(number) {
            let state = self.inlet.lock();
            let Some(source) = &state.sources[usize::from(number)] else { return Ok(Found::Again) };
            let (end, open, ring) = (source.end, source.state == State::Open, source.ring.clone());
            // The ring may not be there, and the node's thread must not wait for it.
            drop(state);
            if let Some(bytes) = self.message(ring, sender) {
                return Ok(Found::Message(sender, bytes));
            }
            self.board.acknowledge_many(number, u64::MAX);
            if open {
                self.node.violated(end.0, "it wrote garbage into a channel");
            }
            return Ok(Found::Again);
        }
        let mut state = self.inlet.lock();
        let place = &mut state.sources[usize::from(number)];
        if self.board.reset(number).is_none() {
            return Ok(Found::Again);
        }
        let error = match place.as_ref().map(|source| source.state) {
            None | Some(State::Open) => return Ok(Found::Again),
            Some(State::Closing) => ChannelError::Left { sender },
            Some(State::Lost) => ChannelError::Lost { sender },
        };
        *place = None;
        Err(error)
    }

    /// The message that has been notified.
    fn message(&self, mut ring: ReceiveRing, sender: u32) -> Option<SharedSlice> {
        let ring_bytes = self.inlet.ring_bytes as usize;
        let bytes = self.memory.shared().sub(sender as usize * ring_bytes, ring_bytes)?;
        loop {
            match ring.parse(word(&bytes, ring.offset())?).ok()? {
                Parsed::Skipped => {
                    // Nobody else changes it.
                    if let Some(source) = &mut self.inlet.lock().sources[sender as usize] {
                        source.ring = ring.clone();
                    }
                }
                Parsed::Message { offset, len } => return bytes.sub(offset as usize, len),
            }
        }
    }

    fn look_in_block(&mut self) -> Result<Found, ChannelError> {
        if self.block.is_none() {
            // In this order: what comes after the look is signalled again.
            self.board.acknowledge_many(0, u64::MAX);
            if let Some(told) = self.inlet.write_away() {
                self.tell(told);
            }
            let mut state = self.inlet.lock();
            if !state.away.is_empty() {
                return Ok(Found::Again);
            }
            let super::inlet::Sources { sources, queue, ended, .. } = &mut *state;
            let Some(queue) = queue else { return Ok(Found::Nothing) };
            if let Some(block) = queue.front() {
                self.block = Some((block, 0));
            } else {
                let Some(at) = ended.iter().position(|sender| !queue.has_of(*sender)) else {
                    return Ok(Found::Nothing);
                };
                let sender = ended.remove(at).unwrap_or(0);
                let lost = sources[sender as usize].take().is_none_or(|source| source.state == State::Lost);
                return Err(if lost { ChannelError::Lost { sender } } else { ChannelError::Left { sender } });
            }
        }
        let Some((block, at)) = self.block else { return Ok(Found::Again) };
        if let Some(bytes) = self.message_in_block(block, at) {
            return Ok(Found::Message(block.sender, bytes));
        }
        let (sender, garbage) = (block.sender, at == 0);
        self.release_block();
        // A block without a message has been committed by nobody who keeps to the protocol.
        if garbage {
            let state = self.inlet.lock();
            let source = state.sources[sender as usize].as_ref().filter(|source| source.state == State::Open);
            let end = source.map(|source| source.end);
            drop(state);
            if let Some((session, _)) = end {
                self.node.violated(session, "it wrote garbage into a channel");
            }
        }
        Ok(Found::Again)
    }

    fn message_in_block(&self, block: Block, at: u64) -> Option<SharedSlice> {
        let bytes = self.memory.shared().sub(block.offset as usize, block.bytes as usize)?;
        let len = usize::try_from(word(&bytes, at)?).ok()?;
        bytes.sub(at as usize + 8, len)
    }

    fn release_block(&mut self) {
        if self.block.take().is_some() {
            let mut state = self.inlet.lock();
            if let Some(queue) = &mut state.queue {
                queue.release();
            }
            let grants = self.inlet.grants(&mut state);
            drop(state);
            self.tell(grants);
        }
    }

    /// A message has been read.
    fn consumed(&mut self, sender: u32, len: usize) {
        if let Some((block, at)) = &mut self.block {
            *at += taken(len);
            let (block, at) = (*block, *at);
            if self.message_in_block(block, at).is_none() {
                self.release_block();
            }
            return;
        }
        let mut state = self.inlet.lock();
        let Some(source) = state.sources.get_mut(sender as usize).and_then(Option::as_mut) else { return };
        let Some(units) = source.ring.consumed(len) else { return };
        let (end, open, position) = (source.end, source.state == State::Open, source.ring.position());
        let near = source.near;
        drop(state);
        let at = self.inlet.ring_bytes * u64::from(self.senders) + LINE_BYTES * u64::from(sender);
        // Others who have the key can write the word of one that never reads it.
        let hears = near
            && self.memory.shared().with_u64(at as usize, |word| line::advance(word, position))
                == Some(false);
        if open && !hears {
            self.tell(vec![(end, Told::Position(units))]);
        }
    }

    fn tell(&self, told: Vec<(End, Told)>) {
        for ((session, slot), told) in told {
            self.node.tell_sender(session, Notice { slot, told });
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.node.unexport_inlet(&self.name, &self.inlet);
    }
}

/// A header: read once, since its sender may change it.
fn word(ring: &SharedSlice, offset: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    ring.read_into(usize::try_from(offset).ok()?, &mut bytes)?;
    Some(u64::from_le_bytes(bytes))
}
