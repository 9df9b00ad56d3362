//! A ring with one sender and one receiver.

use super::{Garbage, MESSAGE_HEADER_BYTES, NoPlace, taken};
use crate::limits::CHANNEL_BYTES_MAX;

const SKIP: u32 = u32::MAX;
/// Positions are told in units of 8 bytes, modulo this many.
const UNITS: u64 = 1 << 29;

/// The tag of a position and a use of the ring: what is left from earlier has another one.
fn header(len: u32, position: u64, nonce: u32) -> u64 {
    let tag = nonce.wrapping_add((position / 8) as u32);
    u64::from(tag) << 32 | u64::from(len)
}

/// Where a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placed {
    /// A header to write first, where, and what: the message begins at the ring's start.
    pub skip: Option<(u64, u64)>,
    /// Place of the header in the ring; the bytes follow.
    pub offset: u64,
    /// The header.
    pub header: u64,
    pub(super) end: u64,
}

/// What a sender has sent and the receiver has told of it: positions that only grow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Flow {
    sent: u64,
    freed: u64,
}

impl Flow {
    /// So many bytes more, a multiple of 8.
    pub fn sent(&mut self, bytes: u64) {
        self.sent += bytes;
    }

    /// Bytes of which nothing has been told.
    pub fn under_way(&self) -> u64 {
        self.sent - self.freed
    }

    /// The receiver has told how far it is. Several of its threads tell, so an earlier position may come later: it changes nothing.
    ///
    /// # Errors
    /// Farther than was sent.
    pub fn credit(&mut self, units: u32) -> Result<(), Garbage> {
        let more = u64::from(units).wrapping_sub(self.freed / 8) % UNITS * 8;
        if more > CHANNEL_BYTES_MAX * 2 {
            return Ok(());
        }
        if more > self.under_way() {
            return Err(Garbage);
        }
        self.freed += more;
        Ok(())
    }

    /// The receiver's word says that it has consumed so many bytes.
    ///
    /// # Errors
    /// Farther than was sent, or back.
    pub fn credit_to(&mut self, position: u64) -> Result<bool, Garbage> {
        if !(self.freed..=self.sent).contains(&position) || !position.is_multiple_of(8) {
            return Err(Garbage);
        }
        let is_news = position > self.freed;
        self.freed = position;
        Ok(is_news)
    }
}

/// The farther of two positions that have been told; they are not half of all positions apart.
pub fn farther(one: u32, other: u32) -> u32 {
    if u64::from(one.wrapping_sub(other)) % UNITS < UNITS / 2 { one } else { other }
}

/// When a receiver tells how far it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Progress {
    at: u64,
    told: u64,
}

impl Progress {
    /// So many bytes more of at most `most` under way: what to tell, a few times in each `most`.
    pub fn step(&mut self, bytes: u64, most: u64) -> Option<u32> {
        self.at += bytes;
        if self.at - self.told < most / 4 {
            return None;
        }
        self.told = self.at;
        Some((self.at / 8 % UNITS) as u32)
    }
}

/// The sender's side.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SendRing {
    capacity: u64,
    nonce: u32,
    flow: Flow,
}

impl SendRing {
    /// An empty ring of `capacity` bytes.
    pub fn new(capacity: u64, nonce: u32) -> Self {
        Self { capacity, nonce, flow: Flow::default() }
    }

    /// Longest message.
    pub fn message_bytes_max(capacity: u64) -> usize {
        (capacity / 4).saturating_sub(MESSAGE_HEADER_BYTES) as usize / 8 * 8
    }

    /// A place for a message of `len` bytes.
    ///
    /// # Errors
    /// See [`NoPlace`].
    pub fn place(&self, len: usize) -> Result<Placed, NoPlace> {
        if len > Self::message_bytes_max(self.capacity) {
            return Err(NoPlace::TooLong);
        }
        let Flow { sent, freed } = self.flow;
        let (need, at) = (taken(len), sent % self.capacity);
        let lost = if at + need > self.capacity { self.capacity - at } else { 0 };
        let start = sent + lost;
        if start + need - freed > self.capacity {
            return Err(NoPlace::Full);
        }
        Ok(Placed {
            skip: (lost > 0).then(|| (at, header(SKIP, sent, self.nonce))),
            offset: start % self.capacity,
            header: header(len as u32, start, self.nonce),
            end: start + need,
        })
    }

    /// The message has been written.
    pub fn written(&mut self, placed: &Placed) {
        self.flow.sent = placed.end;
    }

    /// The receiver has told what it consumed.
    ///
    /// # Errors
    /// More than was sent.
    pub fn credit(&mut self, units: u32) -> Result<(), Garbage> {
        self.flow.credit(units)
    }

    /// The receiver's word ([`super::line`]) says what it consumed; whether that is more than before.
    ///
    /// # Errors
    /// More than was sent, or less than before.
    pub fn credit_to(&mut self, position: u64) -> Result<bool, Garbage> {
        self.flow.credit_to(position)
    }
}

/// What a header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Parsed {
    /// Look at [`ReceiveRing::offset`] again.
    Skipped,
    /// A message.
    Message {
        /// Where its bytes are.
        offset: u64,
        /// How many.
        len: usize,
    },
}

/// The receiver's side.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ReceiveRing {
    capacity: u64,
    nonce: u32,
    progress: Progress,
}

impl ReceiveRing {
    /// An empty ring of `capacity` bytes.
    pub fn new(capacity: u64, nonce: u32) -> Self {
        Self { capacity, nonce, progress: Progress::default() }
    }

    /// Where the next header is.
    pub fn offset(&self) -> u64 {
        self.progress.at % self.capacity
    }

    /// What has been consumed, in bytes.
    pub fn position(&self) -> u64 {
        self.progress.at
    }

    /// What the header there, of a message that was notified, says.
    ///
    /// # Errors
    /// It makes no sense.
    pub fn parse(&mut self, word: u64) -> Result<Parsed, Garbage> {
        let (len, offset) = (word as u32, self.offset());
        if word != header(len, self.progress.at, self.nonce) {
            return Err(Garbage);
        }
        if len == SKIP {
            // Only once in a row: the start is no place to skip from.
            if offset == 0 {
                return Err(Garbage);
            }
            self.progress.at += self.capacity - offset;
            return Ok(Parsed::Skipped);
        }
        let len = len as usize;
        if len > SendRing::message_bytes_max(self.capacity) || offset + taken(len) > self.capacity {
            return Err(Garbage);
        }
        Ok(Parsed::Message { offset: offset + MESSAGE_HEADER_BYTES, len })
    }

    /// A message of `len` bytes has been consumed; what to tell the sender, from time to time.
    pub fn consumed(&mut self, len: usize) -> Option<u32> {
        self.progress.step(taken(len), self.capacity)
    }
}
