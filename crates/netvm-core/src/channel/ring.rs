//! A ring with one sender and one receiver.

use super::{Garbage, MESSAGE_HEADER_BYTES, NoPlace, taken};

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
    end: u64,
}

/// The sender's side.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SendRing {
    capacity: u64,
    nonce: u32,
    sent: u64,
    freed: u64,
}

impl SendRing {
    /// An empty ring of `capacity` bytes.
    pub fn new(capacity: u64, nonce: u32) -> Self {
        Self { capacity, nonce, sent: 0, freed: 0 }
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
        let (need, at) = (taken(len), self.sent % self.capacity);
        let lost = if at + need > self.capacity { self.capacity - at } else { 0 };
        let start = self.sent + lost;
        if start + need - self.freed > self.capacity {
            return Err(NoPlace::Full);
        }
        Ok(Placed {
            skip: (lost > 0).then(|| (at, header(SKIP, self.sent, self.nonce))),
            offset: start % self.capacity,
            header: header(len as u32, start, self.nonce),
            end: start + need,
        })
    }

    /// The message has been written.
    pub fn written(&mut self, placed: &Placed) {
        self.sent = placed.end;
    }

    /// The receiver has told what it consumed.
    ///
    /// # Errors
    /// More than was sent.
    pub fn credit(&mut self, units: u32) -> Result<(), Garbage> {
        let more = u64::from(units).wrapping_sub(self.freed / 8) % UNITS * 8;
        if more > self.sent - self.freed {
            return Err(Garbage);
        }
        self.freed += more;
        Ok(())
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
    at: u64,
    told: u64,
}

impl ReceiveRing {
    /// An empty ring of `capacity` bytes.
    pub fn new(capacity: u64, nonce: u32) -> Self {
        Self { capacity, nonce, at: 0, told: 0 }
    }

    /// Where the next header is.
    pub fn offset(&self) -> u64 {
        self.at % self.capacity
    }

    /// What the header there, of a message that was notified, says.
    ///
    /// # Errors
    /// It makes no sense.
    pub fn parse(&mut self, word: u64) -> Result<Parsed, Garbage> {
        let (len, offset) = (word as u32, self.offset());
        if word != header(len, self.at, self.nonce) {
            return Err(Garbage);
        }
        if len == SKIP {
            // Only once in a row: the start is no place to skip from.
            if offset == 0 {
                return Err(Garbage);
            }
            self.at += self.capacity - offset;
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
        self.at += taken(len);
        if self.at - self.told < self.capacity / 4 {
            return None;
        }
        self.told = self.at;
        Some((self.at / 8 % UNITS) as u32)
    }
}
