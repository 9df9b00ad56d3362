//! The sending end.

use std::time::{Duration, Instant};

use netvm_core::atomic::{Atomic, AtomicOp, Width};
use netvm_core::channel::line::{self, LINE_BYTES};
use netvm_core::channel::{
    Ask, BLOCK_BYTES, Flow, MESSAGE_HEADER_BYTES, NoPlace, Notice, Queue, SendRing, Told, taken,
};
use netvm_core::key::RemoteKey;
use netvm_core::limits::{CHANNEL_BYTES_MIN, COPIED_BYTES_MAX, HELD_BYTES_MAX, PUT_BYTES_MAX};
use netvm_core::notify::Notify;
use netvm_core::wire::Status;

use super::inlet::BLOCK_END;
use super::outlet::Heard;
use super::{CHANNEL_HANDLE, CHANNEL_METHOD, ChannelError};
use crate::error::Error;
use crate::posted::Counter;
use crate::region::{Peer, Region};

/// Who finds no room looks for so long whether the receiver has made some, before sleeping.
const LOOK_MAX: Duration = Duration::from_micros(50);
/// And then so often.
const LINE_LOOK: Duration = Duration::from_millis(100);

/// The sending end of a channel. Dropping it closes it: the receiver gets all that was sent, and is told.
#[derive(Debug)]
pub struct Sender {
    region: Region,
    slot: u16,
    number: u16,
    capacity: u64,
    /// None: the ring is shared, and the receiver's node gives out the places.
    ring: Option<SendRing>,
    /// Where in the region the receiver tells how far it is, if that is mapped here.
    line: Option<u64>,
    /// Of small blocks for a shared ring: what has been sent and placed, and the answers.
    flow: Flow,
    answers: Counter,
    /// Requests may overtake each other.
    rails: usize,
    buffer: Vec<u8>,
    ended: bool,
}

impl Sender {
    /// Becomes a sender of the channel `name` of `peer`.
    ///
    /// # Errors
    /// [`ChannelError::Failed`] as [`Peer::import`], when it is no channel, or when it has as many senders as it can have
    /// (`Status::Busy`).
    pub fn open(peer: &Peer, name: &str, key: &RemoteKey) -> Result<Self, ChannelError> {
        let region = peer.import(name, key)?;
        let slot = region.peer().lock().inbox.outlets.take();
        let slot = slot.ok_or_else(|| Error::Other("too many senders over one connection".to_owned()))?;
        let rails = region.peer().lock().session.endpoint.rails();
        let mut sender = Self {
            region,
            slot,
            number: 0,
            capacity: 0,
            ring: None,
            line: None,
            flow: Flow::default(),
            answers: Counter::new(),
            rails,
            buffer: Vec::new(),
            ended: true,
        };
        let handle = sender.region.handle();
        let answer = sender.ask(Ask::Open { handle })?;
        let words = answer.first_chunk::<20>().ok_or_else(nonsense)?;
        let word = |at: usize| u32::from_le_bytes([words[at], words[at + 1], words[at + 2], words[at + 3]]);
        let (shared, number, nonce) = (word(0) != 0, word(4), word(8));
        let capacity = u64::from(word(12)) | u64::from(word(16)) << 32;
        let rings = if shared { 1 } else { u64::from(number) + 1 };
        let fits = rings.checked_mul(capacity).is_some_and(|end| end <= sender.region.len());
        if !fits || capacity < CHANNEL_BYTES_MIN || !capacity.is_multiple_of(8) {
            return Err(nonsense().into());
        }
        (sender.number, sender.capacity) = (u16::try_from(number).map_err(|_| nonsense())?, capacity);
        sender.ring = (!shared).then(|| SendRing::new(capacity, nonce));
        sender.ended = false;
        if !shared {
            sender.choose_line(capacity)?;
        }
        Ok(sender)
    }

    /// Has the receiver tell in shared memory how far it is, or over the session.
    fn choose_line(&mut self, capacity: u64) -> Result<(), Error> {
        let rings = u64::from(self.region.notifications());
        let at =
            rings.checked_mul(capacity).and_then(|end| end.checked_add(LINE_BYTES * u64::from(self.number)));
        let at = at.filter(|at| at.checked_add(LINE_BYTES).is_some_and(|end| end <= self.region.len()));
        let Some(at) = at else { return Err(nonsense()) };
        self.line = self.change_line(at, AtomicOp::Swap, line::beginning(true)).map(|_| at);
        match self.line {
            Some(_) => Ok(()),
            // The sender before may have been near.
            None => self.region.write(at, &line::beginning(false).to_ne_bytes()),
        }
    }

    /// What the receiver's word was; None where it is not mapped here (any more).
    fn change_line(&self, at: u64, op: AtomicOp, operand: u64) -> Option<u64> {
        let mapped = self.region.mapped(false)?;
        mapped.atomic(self.region.peer(), at, &Atomic::new(op, Width::Eight, operand))
    }

    /// Longest message that this channel takes.
    pub fn message_bytes_max(&self) -> usize {
        match &self.ring {
            Some(_) => SendRing::message_bytes_max(self.capacity),
            None => (Queue::block_bytes_max(self.capacity) - MESSAGE_HEADER_BYTES) as usize,
        }
    }

    /// Sends a message; waits for room. The bytes may be used again when this returns.
    ///
    /// # Errors
    /// [`ChannelError::TimedOut`], [`ChannelError::TooLong`]: nothing was sent; [`ChannelError::Closed`], [`ChannelError::Failed`]: it may
    /// not have been received, and nothing more can be sent.
    pub fn send(&mut self, bytes: &[u8], timeout: Option<Duration>) -> Result<(), ChannelError> {
        self.put(&[bytes], Limit::new(timeout))
    }

    /// Sends a message if there is room.
    ///
    /// # Errors
    /// As [`Sender::send`], and [`ChannelError::WouldBlock`].
    pub fn try_send(&mut self, bytes: &[u8]) -> Result<(), ChannelError> {
        self.put(&[bytes], Limit::Now)
    }

    /// Sends several messages, in this order. Where the ring is shared they are sent together or not at all, and must fit into half of it;
    /// otherwise one after the other.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn send_many(&mut self, messages: &[&[u8]], timeout: Option<Duration>) -> Result<(), ChannelError> {
        let limit = Limit::new(timeout);
        match &self.ring {
            Some(_) => messages.iter().try_for_each(|message| self.put(&[message], limit)),
            None if messages.is_empty() => Ok(()),
            None => self.put(messages, limit),
        }
    }

    /// Returns when the receiver's memory has everything, and closes this end, as dropping it does.
    ///
    /// # Errors
    /// [`ChannelError::Failed`], also when the receiver has gone.
    pub fn close(mut self) -> Result<(), ChannelError> {
        // In this order: a receiver that has been told may go.
        self.region.flush()?;
        self.answers.wait_all(None)?;
        self.end();
        Ok(())
    }

    fn put(&mut self, messages: &[&[u8]], limit: Limit) -> Result<(), ChannelError> {
        let heard = match self.line {
            // Who has the session is about to hear; what matters in memory is refused there.
            Some(_) => self.region.peer().try_hear(self.slot),
            None => self.region.peer().hear(self.slot),
        };
        self.take(heard)?;
        let answered = if self.ring.is_none() { self.answers.take_error() } else { None };
        let done = answered.map_or(Ok(()), |error| Err(error.into()));
        let done = done.and_then(|()| match &self.ring {
            Some(_) => self.put_in_ring(messages[0], limit),
            None => self.put_in_block(messages, limit),
        });
        // The handle goes before the notice comes.
        if let Err(ChannelError::Failed(Error::Op { code: Status::NoHandle, .. })) = done {
            self.ended = true;
            return Err(ChannelError::Closed);
        }
        done
    }

    fn put_in_ring(&mut self, bytes: &[u8], limit: Limit) -> Result<(), ChannelError> {
        let placed = loop {
            let Some(ring) = &self.ring else { return Err(nonsense().into()) };
            match ring.place(bytes.len()) {
                Ok(placed) => break placed,
                Err(NoPlace::TooLong) => {
                    return Err(ChannelError::TooLong { bytes: bytes.len(), max: self.message_bytes_max() });
                }
                Err(NoPlace::Full) => self.wait_for_room(limit)?,
            }
        };
        let base = u64::from(self.number) * self.capacity;
        if let Some((offset, header)) = placed.skip {
            self.region.write(base + offset, &header.to_le_bytes())?;
        }
        let (offset, header) = (base + placed.offset, placed.header.to_le_bytes());
        let notify = Notify::Count { number: self.number };
        if bytes.len() + header.len() <= COPIED_BYTES_MAX {
            self.buffer.clear();
            self.buffer.extend_from_slice(&header);
            self.buffer.extend_from_slice(bytes);
            self.region.write_message(offset, &self.buffer, notify)?;
        } else {
            self.region.write(offset + MESSAGE_HEADER_BYTES, bytes)?;
            self.region.write_notify(offset, &header, notify)?;
        }
        if let Some(ring) = &mut self.ring {
            ring.written(&placed);
        }
        Ok(())
    }

    /// Waits until the receiver has told that it is farther.
    fn wait_for_room(&mut self, limit: Limit) -> Result<(), ChannelError> {
        let mut looks = 0;
        let start = Instant::now();
        while let Some(at) = self.line {
            // The mark that we sleep is set only when looking has not helped.
            let sleeps = !matches!(limit, Limit::Now) && start.elapsed() > LOOK_MAX;
            let (op, mark) = if sleeps { (AtomicOp::Or, line::SLEEPS) } else { (AtomicOp::Load, 0) };
            let Some(word) = self.change_line(at, op, mark) else { break };
            match self.ring.as_mut().map(|ring| ring.credit_to(line::position(word))) {
                Some(Ok(true)) => return Ok(()),
                Some(Err(_)) => return Err(self.garbage().into()),
                Some(Ok(false)) | None => {}
            }
            if sleeps {
                // Others who have the key can take our mark away.
                let heard = match self.wait(limit.at_most(LINE_LOOK)) {
                    Err(ChannelError::TimedOut) if !limit.is_over() => continue,
                    heard => heard?,
                };
                return self.take(heard);
            }
            if matches!(limit, Limit::Now) {
                break;
            }
            looks += 1;
            match looks % 64 {
                0 => std::thread::yield_now(),
                _ => std::hint::spin_loop(),
            }
        }
        if self.line.is_none() {
            let heard = self.wait(limit)?;
            return self.take(heard);
        }
        // The mapping has gone, and our mark with it: the next write tells.
        match self.wait(limit.at_most(LINE_LOOK)) {
            Err(ChannelError::TimedOut) if !limit.is_over() => Ok(()),
            heard => self.take(heard?),
        }
    }

    fn garbage(&self) -> Error {
        let reason = "it told of messages that it cannot have received".to_owned();
        Error::Protocol { lender: self.region.peer().address.clone(), reason }
    }

    fn put_in_block(&mut self, messages: &[&[u8]], limit: Limit) -> Result<(), ChannelError> {
        let taken_all = messages.iter().map(|message| taken(message.len())).fold(0, u64::saturating_add);
        let max = Queue::block_bytes_max(self.capacity);
        if taken_all > max {
            let bytes = messages.iter().map(|message| message.len()).sum();
            return Err(ChannelError::TooLong { bytes, max: self.message_bytes_max() });
        }
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        for message in messages {
            buffer.extend_from_slice(&(message.len() as u64).to_le_bytes());
            buffer.extend_from_slice(message);
            buffer.resize(buffer.len().next_multiple_of(8), 0);
        }
        let done = match taken_all <= PUT_BYTES_MAX {
            true => self.put_together(&buffer, limit),
            false => self.put_in_place(&mut buffer, limit),
        };
        self.buffer = buffer;
        done
    }

    /// Sends a small block with the request for its place, and waits for neither.
    fn put_together(&mut self, block: &[u8], limit: Limit) -> Result<(), ChannelError> {
        let bytes = (block.len() as u64).next_multiple_of(BLOCK_BYTES);
        while self.flow.under_way() + bytes > HELD_BYTES_MAX {
            let heard = self.wait(limit)?;
            self.take(heard)?;
        }
        self.settle()?;
        let body = Ask::Put(block).encode(self.slot);
        self.region.post().counted(&self.answers).call(CHANNEL_METHOD, &body)?;
        self.flow.sent(bytes);
        Ok(())
    }

    /// Asks for a place, and writes a large block there.
    fn put_in_place(&mut self, block: &mut Vec<u8>, limit: Limit) -> Result<(), ChannelError> {
        let bytes = (block.len() as u64).next_multiple_of(BLOCK_BYTES);
        self.settle()?;
        let offset = match self.ask_words(Ask::Reserve { bytes: bytes as u32 })? {
            [1, offset] => offset,
            _ => self.wait_for_place(limit)?,
        };
        if (block.len() as u64) < bytes {
            block.extend_from_slice(&u64::from(BLOCK_END).to_le_bytes());
        }
        self.region.write(offset, block)?;
        self.tell(Told::Commit)?;
        Ok(())
    }

    /// Nothing must overtake the blocks that are on their way, which over several rails it might.
    fn settle(&self) -> Result<(), Error> {
        if self.rails > 1 {
            self.answers.wait_all(None)?;
        }
        Ok(())
    }

    /// Waits for the place that was asked for.
    fn wait_for_place(&mut self, limit: Limit) -> Result<u64, ChannelError> {
        let mut limit = limit;
        loop {
            match self.wait(limit) {
                Ok(heard) => {
                    self.take(heard)?;
                    if let Some(units) = heard.position {
                        return Ok(u64::from(units) * 8);
                    }
                }
                Err(error @ (ChannelError::TimedOut | ChannelError::WouldBlock)) => {
                    if self.ask_words(Ask::Cancel)?[0] == 1 {
                        return Err(error);
                    }
                    // The place is on its way.
                    limit = Limit::Never;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// What the receiver has told since.
    fn take(&mut self, heard: Heard) -> Result<(), ChannelError> {
        self.ended |= heard.ended;
        if self.ended {
            return Err(ChannelError::Closed);
        }
        if let Some(units) = heard.placed {
            self.flow.credit(units).map_err(|_| nonsense())?;
        }
        if let (Some(ring), Some(units)) = (&mut self.ring, heard.position) {
            ring.credit(units).map_err(|_| nonsense())?;
        }
        Ok(())
    }

    fn wait(&self, limit: Limit) -> Result<Heard, ChannelError> {
        let (left, error) = match limit {
            Limit::Now => (Some(Duration::ZERO), ChannelError::WouldBlock),
            Limit::Until(end) => {
                (Some(end.saturating_duration_since(Instant::now())), ChannelError::TimedOut)
            }
            Limit::Never => (None, ChannelError::TimedOut),
        };
        self.region.peer().wait_to_hear(self.slot, left)?.ok_or(error)
    }

    fn ask(&self, ask: Ask) -> Result<Vec<u8>, ChannelError> {
        Ok(self.region.call(CHANNEL_METHOD, &ask.encode(self.slot))?)
    }

    fn ask_words(&self, ask: Ask) -> Result<[u64; 2], ChannelError> {
        let answer = self.ask(ask)?;
        let (words, _) = answer.as_chunks::<8>();
        let [one, two] = *words else { return Err(nonsense().into()) };
        Ok([u64::from_le_bytes(one), u64::from_le_bytes(two)])
    }

    fn tell(&self, told: Told) -> Result<(), Error> {
        self.region.peer().tell(CHANNEL_HANDLE, Notice { slot: self.slot, told }.notify())
    }

    fn end(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            let _ = self.settle();
            let _ = self.tell(Told::Close);
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.end();
        self.region.peer().lock().inbox.outlets.give_back(self.slot);
    }
}

/// How long to wait.
#[derive(Clone, Copy)]
enum Limit {
    Now,
    Until(Instant),
    Never,
}

impl Limit {
    /// The same, but not longer than `most`.
    fn at_most(self, most: Duration) -> Self {
        let end = Instant::now() + most;
        match self {
            Self::Now => Self::Now,
            Self::Until(until) => Self::Until(until.min(end)),
            Self::Never => Self::Until(end),
        }
    }

    fn is_over(self) -> bool {
        match self {
            Self::Now => true,
            Self::Until(until) => until <= Instant::now(),
            Self::Never => false,
        }
    }

    fn new(timeout: Option<Duration>) -> Self {
        timeout.and_then(|timeout| Instant::now().checked_add(timeout)).map_or(Self::Never, Self::Until)
    }
}

fn nonsense() -> Error {
    Error::Other("a channel's receiver told something that makes no sense".to_owned())
}
