//! Channels: messages from other processes, in order, read where they arrived.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use netvm::channel::{Receiver, Sender, Shape};
//! use netvm::node::Node;
//!
//! let node = Node::new()?;
//! let address = node.listen("127.0.0.1:0")?;
//! let (key, mut receiver) = Receiver::new(&node, "jobs", Shape::Rings { senders: 4, bytes: 1 << 20 })?;
//!
//! let other = Node::new()?;
//! let mut sender = Sender::open(&other.connect(&address)?, "jobs", &key)?;
//! sender.send(b"hello", None)?;
//!
//! let message = receiver.receive(None)?;
//! println!("{} bytes from sender {}: {:?}", message.len(), message.sender(), message.to_vec());
//! # Ok(()) }
//! ```
//!
//! A sender writes its messages straight into the receiver's memory, one-sidedly; the receiver looks at them there and frees their place when
//! it drops the [`Message`]. There is no round trip in a stream of messages ([`Shape::Rings`]; with [`Shape::Shared`] there is one for each
//! that is longer than 4 KiB). A sender for which there is no room waits, or is told so. Messages of one sender come in the order in which
//! they were sent; senders take turns.
//!
//! When a sender closes or dies, the receiver gets all its whole messages and is then told, once. When the receiver goes, its senders are
//! told. docs/design/channels.md has states, races and costs.

use std::fmt;

use netvm_core::channel::ring_bytes;

use crate::error::Error;

mod inlet;
mod outlet;
mod receiver;
mod sender;

pub(crate) use inlet::{Hub, Inlet};
pub(crate) use outlet::{Heard, Notices, Outlets};
pub use receiver::{Kept, Message, Receiver};
pub use sender::Sender;

/// Handle of the session's notices between the ends of channels: no segment has it.
pub(crate) const CHANNEL_HANDLE: u32 = u32::MAX - 1;
/// The call by which senders ask.
pub(crate) const CHANNEL_METHOD: u32 = 0x4348_414E;

/// What a receiver's memory is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A ring for each sender: no round trips, and nobody waits for another sender. A message takes up to a quarter of its ring.
    Rings {
        /// How many senders at once, at most 1024.
        senders: u32,
        /// Bytes of each ring, 256 to 2³⁰.
        bytes: usize,
    },
    /// One ring for all senders, in the order in which they arrive or ask for room. A message takes up to half of it.
    Shared {
        /// Bytes of the ring, 256 to 2³⁰.
        bytes: usize,
    },
}

impl Shape {
    /// Rings, and the bytes of each.
    fn rings(self) -> Option<(u32, u64)> {
        match self {
            Self::Rings { senders, bytes } => Some((senders, ring_bytes(bytes)?)),
            Self::Shared { bytes } => Some((1, ring_bytes(bytes)?)),
        }
    }
}

/// Why nothing was sent or received.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub enum ChannelError {
    /// Time was over; nothing was sent.
    TimedOut,
    /// Not now: no room, or no message.
    WouldBlock,
    /// No message can be so long here.
    TooLong {
        /// The message's bytes.
        bytes: usize,
        /// The most that fit.
        max: usize,
    },
    /// The receiver has gone.
    Closed,
    /// To the receiver: this sender has closed its end, and all its messages have been received.
    Left {
        /// Its number.
        sender: u32,
    },
    /// To the receiver: this sender has died, or its connection is lost; all messages of which it had told have been received.
    Lost {
        /// Its number.
        sender: u32,
    },
    /// The connection is lost, or cannot be used.
    Failed(Error),
}

impl ChannelError {
    /// Whether trying again may help.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::TimedOut | Self::WouldBlock)
    }
}

impl From<Error> for ChannelError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl fmt::Display for ChannelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimedOut => f.write_str("time was over"),
            Self::WouldBlock => f.write_str("no room for a message, or no message, just now"),
            Self::TooLong { bytes, max } => {
                write!(f, "a message of {bytes} bytes; this channel takes at most {max}")
            }
            Self::Closed => f.write_str("the receiver has gone"),
            Self::Left { sender } => write!(f, "sender {sender} has closed its end"),
            Self::Lost { sender } => write!(f, "sender {sender} is lost"),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ChannelError {}
