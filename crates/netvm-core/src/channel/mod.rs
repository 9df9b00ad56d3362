//! Channels: who may write where in a receiver's ring, and what of it is a message. docs/design/channels.md tells why.
//!
//! ```text
//!  message  | length 4 | tag 4 | bytes ... | padding to 8 |        length 2^32 - 1: go on at the ring's start
//!  notice   a notification of the session: number = the sender's slot, value = number 29 | code 3
//! ```

pub mod line;
mod notice;
mod queue;
mod ring;
#[cfg(test)]
mod tests;

pub use notice::{Ask, Notice, Told};
pub use queue::{BLOCK_BYTES, Block, Grant, Place, Queue};
pub use ring::{Flow, Parsed, Placed, Progress, ReceiveRing, SendRing, farther};

use crate::limits::{CHANNEL_BYTES_MAX, CHANNEL_BYTES_MIN};

/// Bytes of a message's header.
pub const MESSAGE_HEADER_BYTES: u64 = 8;

/// Why there is no place for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NoPlace {
    /// Not now.
    Full,
    /// Never.
    TooLong,
}

/// The peer has written or said what makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Garbage;

/// A ring's length: at least what was asked for, within bounds.
pub fn ring_bytes(asked: usize) -> Option<u64> {
    let bytes = u64::try_from(asked).ok()?.max(CHANNEL_BYTES_MIN).checked_next_multiple_of(64)?;
    (bytes <= CHANNEL_BYTES_MAX).then_some(bytes)
}

/// What a message of so many bytes takes.
pub fn taken(len: usize) -> u64 {
    MESSAGE_HEADER_BYTES + (len as u64).next_multiple_of(8)
}
