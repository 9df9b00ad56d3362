//! What goes in and out of an endpoint.

use alloc::vec::Vec;
use core::fmt;

use crate::atomic::Atomic;
use crate::key::{Access, RemoteKey, Rights};
use crate::limits::{HEADER_BYTES, INLINE_BYTES_MAX};
use crate::notify::Notify;
use crate::wire::{Kind, Status, WireError};

/// What the peer may reach here. The driver implements it over its segments or slabs.
pub trait Exports {
    /// Whether this peer may do that now.
    ///
    /// # Errors
    /// The status to answer with.
    fn check(&mut self, handle: u32, offset: u64, bytes: u32, access: Access) -> Result<(), Status>;
    /// Opens a segment for this peer: its handle, length in bytes and rights.
    ///
    /// # Errors
    /// The status to answer with.
    fn import(&mut self, name: &str, key: &RemoteKey) -> Result<(u32, u64, Rights), Status>;
    /// Closes a handle of this peer's.
    fn unimport(&mut self, handle: u32);
    /// Executes an atomic now, once; returns what the word was.
    ///
    /// # Errors
    /// The status to answer with; then nothing was done.
    fn atomic(&mut self, _handle: u32, _offset: u64, _atomic: &Atomic) -> Result<u64, Status> {
        Err(Status::Unsupported)
    }
    /// Whether memory that was checked can be touched in that way as it is: without waiting for it, and, for a write, part by part.
    fn presence(&mut self, _handle: u32, _offset: u64, _bytes: u32, _access: Access) -> Presence {
        Presence::Here
    }
    /// A number for a byte that was checked, the same for the same byte through all handles: its address.
    fn address(&mut self, _handle: u32, offset: u64) -> u64 {
        offset
    }
    /// Copies what a read asks for, when it may be gone before it is sent. `None`: it stays, and is sent from where it is.
    fn snapshot(&mut self, _handle: u32, _offset: u64, _bytes: u32) -> Option<Result<Vec<u8>, Status>> {
        None
    }
    /// Answers a call at once, in order with the peer's other requests; `None`: it becomes an [`Event::Called`].
    fn call(&mut self, _method: u32, _body: &[u8]) -> Option<Result<Vec<u8>, Status>> {
        None
    }
    /// How many notification numbers an open segment has.
    fn notifications(&mut self, _handle: u32) -> u32 {
        0
    }
    /// Makes a notification visible: its write and all before it have been applied. The handle may have been taken away meanwhile.
    fn notify(&mut self, _handle: u32, _notify: Notify) {}
}

/// Whether memory is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// It is.
    Here,
    /// It is paged out, not yet there, or can only be written as a whole.
    Away,
}

/// What a write may ask for besides being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteOptions {
    /// It is not applied before all writes posted earlier on the session are.
    pub fence: bool,
    /// What the owner of the memory is told when it and all earlier writes have been applied.
    pub notify: Option<Notify>,
}

/// A few bytes that travel inside their frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inline {
    bytes: [u8; INLINE_BYTES_MAX],
    len: u8,
}

impl Inline {
    /// A copy of `bytes`; `None` when they are more than [`INLINE_BYTES_MAX`].
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut copy = [0; INLINE_BYTES_MAX];
        copy.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(Self { bytes: copy, len: bytes.len() as u8 })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// Where received payload belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Into exported memory, to be looked up anew for every copy.
    Segment {
        /// Handle that the peer named.
        handle: u32,
        /// First byte of the whole payload.
        offset: u64,
    },
    /// Into the buffer of the read in this slot.
    Local {
        /// Slot of the read.
        slot: u16,
    },
    /// Into the endpoint: [`Endpoint::body`](super::Endpoint::body).
    Body,
    /// Nowhere.
    Discard,
}

/// What the next bytes of a rail are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// This many bytes of a header: [`Endpoint::header`](super::Endpoint::header).
    Header(usize),
    /// Payload: put it there and tell [`Endpoint::landed`](super::Endpoint::landed).
    Payload {
        /// Where it belongs.
        place: Place,
        /// How much of it has arrived.
        at: u32,
        /// How much is missing.
        bytes: u32,
    },
}

/// Payload of a frame to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// None.
    None,
    /// The buffer of the write in this slot.
    Local {
        /// Slot of the write.
        slot: u16,
        /// Its length.
        bytes: u32,
    },
    /// Exported memory.
    Segment {
        /// Handle that the peer named.
        handle: u32,
        /// First byte.
        offset: u64,
        /// Length.
        bytes: u32,
    },
    /// Bytes of the endpoint's; behind the first payload perhaps more whole frames.
    Body(Vec<u8>),
    /// A few bytes of the endpoint's.
    Inline(Inline),
}

impl Payload {
    /// Its length.
    pub fn bytes(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Local { bytes, .. } | Self::Segment { bytes, .. } => *bytes as usize,
            Self::Body(body) => body.len(),
            Self::Inline(inline) => inline.as_slice().len(),
        }
    }
}

/// A frame to send.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Its first bytes.
    pub header: [u8; HEADER_BYTES],
    /// What follows.
    pub payload: Payload,
    /// It answers a request of the peer's.
    pub(super) answers: bool,
    /// The payload is a body to which further copied writes may be appended, whole frames.
    pub(super) batch: bool,
}

/// How an operation ended that the peer did not refuse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A read's bytes are in place; a write's buffer may be used again; a flush is over.
    Done,
    /// A segment is open.
    Imported {
        /// Its handle.
        handle: u32,
        /// Its length in bytes.
        len: u64,
        /// What we may do.
        rights: Rights,
        /// How many notification numbers it has.
        notifications: u32,
    },
    /// What an atomic's word was before.
    Word(u64),
    /// A call's answer.
    Reply(Vec<u8>),
}

/// Why an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpError {
    /// The peer refused it.
    Refused(Status),
    /// The session ended first. A write or an atomic has certainly not been executed, not even in part.
    Lost,
    /// The session ended after a write or an atomic had left: it may have been executed (an atomic once, a write in part) or not.
    Unknown,
}

/// What the driver should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An operation of ours ended; its slot is free again.
    Completed {
        /// The slot it had.
        slot: u16,
        /// The poster's number.
        token: u64,
        /// How it ended.
        result: Result<Answer, OpError>,
    },
    /// A write that had been sent (and completed) was refused; the next flush says so too.
    WriteRefused(Status),
    /// The peer calls; answer with [`Endpoint::reply`](super::Endpoint::reply).
    Called {
        /// Where to answer.
        request: Request,
        /// What it calls.
        method: u32,
        /// With what.
        body: Vec<u8>,
    },
    /// The peer ends the session on purpose.
    Goodbye {
        /// Why.
        status: Status,
        /// In words.
        reason: Vec<u8>,
    },
}

/// A call of the peer's that waits for its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub(super) rail: u8,
    pub(super) token: u64,
}

/// Why an operation cannot be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostError {
    /// Too much is under way: poll, then post again. This is backpressure, not a failure.
    Full,
    /// Longer than the protocol allows (1 MiB of payload, 64 KiB of body).
    TooLong,
    /// The session has ended.
    Closed,
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "too many operations are under way; poll, then post again",
            Self::TooLong => "the operation is longer than the protocol allows",
            Self::Closed => "the session has ended",
        })
    }
}

/// How the peer broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// Bytes that are no frame.
    Wire(WireError),
    /// An answer to nothing.
    Unasked(Kind),
    /// An answer of another length than asked for.
    Length,
    /// A write number used twice or beyond the window.
    Sequence,
    /// More requests than were allowed.
    TooMany,
    /// A body or flags that make no sense.
    Body,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wire(error) => error.fmt(f),
            Self::Unasked(kind) => write!(f, "a {kind:?} that nobody asked for"),
            Self::Length => f.write_str("an answer of the wrong length"),
            Self::Sequence => f.write_str("a sequence number out of order"),
            Self::TooMany => f.write_str("more requests at once than allowed"),
            Self::Body => f.write_str("a request that makes no sense"),
        }
    }
}
