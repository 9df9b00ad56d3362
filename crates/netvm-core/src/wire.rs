//! The bytes on the wire, version 2. All numbers are little-endian.
//!
//! A connection starts with one *hello* in each direction (behind [`crate::opening`]s when the peers share a secret). Bytes 0 to 11 keep their meaning in all versions:
//!
//! ```text
//!   0               8       10      12      14      16
//!  +---------------+-------+-------+-------+-------+
//!  | magic         |version|oldest | role  | 0     |
//!  +---------------+-------+-------+-------+-------+
//!  16              24              28              32
//!  +---------------+---------------+---------------+
//!  | features      | most ops      | window        |
//!  +---------------+---------------+---------------+
//!  32                                              48
//!  +-----------------------------------------------+
//!  | session                                       |
//!  +-----------------------------------------------+
//!  48      49      50      52          56          64
//!  +-------+-------+-------+-----------+-----------+
//!  | rail  | rails |refusal|payload max| 0         |
//!  +-------+-------+-------+-----------+-----------+
//! ```
//!
//! Then *frames*, each a header and a payload:
//!
//! ```text
//!   0       1       2       4       8              16
//!  +-------+-------+-------+-------+---------------+
//!  | kind  | flags |status |payload| sequence      |
//!  +-------+-------+-------+-------+---------------+
//!  16                              24              32
//!  +-------------------------------+---------------+
//!  | applied                       | token         |
//!  +-------------------------------+---------------+
//!  32              36              40              48
//!  +---------------+---------------+---------------+
//!  | handle        | bytes         | offset        |
//!  +---------------+---------------+---------------+
//! ```
//!
//! * `sequence`: a write's own number; in any other request how many writes must be applied before it is served; in the answer
//!   to an import how many notification numbers the segment has.
//! * `applied`: in every frame, all writes of the *receiver* below this number have been applied.
//! * `token`: chosen by the requester, repeated in the answer.
//! * `handle`: an import (or slab) in data operations, the method in a call.
//! * `bytes`: how many a read asks for. Only `Write`, `ReadReply` and frames with a body have a payload.
//!
//! Some kinds use the fields that they have no other use for:
//!
//! ```text
//!               flags                    status        bytes            offset         payload
//!  Write        1 fence, 2 count,     number        value of a post, place          the bytes
//!               4 post, 8 queue                     of a queued one
//!  Atomic       operation, 0 to 6        0             width: 4 or 8    place          operand (8), comparand (8)
//!  AtomicReply  0                        0             0                old value      -
//!  Flush        1 quiet: keep refusals   0             0                0              -
//! ```

use core::fmt;
use core::num::NonZeroU32;

use crate::limits::{
    ATOMIC_BYTES, BODY_BYTES_MAX, HEADER_BYTES, HELLO_BYTES, OPS_MAX, PAYLOAD_BYTES_MAX, RAILS_MAX, VERSION,
    VERSION_MIN, WINDOW,
};
use crate::notify::Notify;

/// First bytes of every connection: a line end of each kind shows text conversions, as in PNG.
pub const MAGIC: [u8; 8] = *b"netvm\r\n\x1a";

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Payload for `handle` at `offset`.
    Write = 1,
    /// Asks for `bytes` bytes of `handle` at `offset`.
    Read = 2,
    /// The bytes of a read.
    ReadReply = 3,
    /// Asks for an answer once all writes below `sequence` are applied.
    Flush = 4,
    /// The answer to a flush.
    FlushAck = 5,
    /// `applied` and nothing else.
    Acknowledge = 6,
    /// Asks for a segment by name and key; body: key (16), name.
    Import = 7,
    /// Answer to an import: `handle`; `offset` is the length, `bytes` the rights (1 read, 3 read and write).
    ImportAck = 8,
    /// Gives an imported handle back.
    Unimport = 9,
    /// Calls method `handle` with the body.
    Call = 10,
    /// Answer to a call, with a body.
    CallReply = 11,
    /// The operation `token` failed with `status`.
    Error = 12,
    /// The sender ends the session on purpose; `status` and a body that says why.
    Goodbye = 13,
    /// Changes the word of `bytes` bytes at `offset` of `handle` in one step.
    Atomic = 14,
    /// Answer to an atomic: `offset` is what the word was before.
    AtomicReply = 15,
}

/// Flag of a write: it is not applied before all earlier writes are.
pub const FENCE: u8 = 1;
/// Flag of a write: it signals the event count of the number in `status`.
pub const COUNT: u8 = 2;
/// Flag of a write: it posts the value in `bytes` under the number in `status`.
pub const POST: u8 = 4;
/// Flag of a write: it appends number and value, as in a post, to the segment's queue.
pub const QUEUE: u8 = 8;
/// Flag of a flush: refused writes are kept for the next one to tell.
pub const QUIET: u8 = 1;

/// Token of a write that nobody waits for: no slot has this number.
pub const NO_SLOT: u64 = u64::MAX;
/// Token of questions for a sign of life, which need no slot: none has this number.
pub const PULSE: u64 = u64::MAX - 1;

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Write,
            2 => Self::Read,
            3 => Self::ReadReply,
            4 => Self::Flush,
            5 => Self::FlushAck,
            6 => Self::Acknowledge,
            7 => Self::Import,
            8 => Self::ImportAck,
            9 => Self::Unimport,
            10 => Self::Call,
            11 => Self::CallReply,
            12 => Self::Error,
            13 => Self::Goodbye,
            14 => Self::Atomic,
            15 => Self::AtomicReply,
            _ => return None,
        })
    }

    /// Most payload bytes of this kind.
    pub fn payload_bytes_max(self) -> u32 {
        match self {
            Self::Write | Self::ReadReply => PAYLOAD_BYTES_MAX,
            Self::Import | Self::Call | Self::CallReply | Self::Goodbye => BODY_BYTES_MAX as u32,
            Self::Atomic => ATOMIC_BYTES as u32,
            _ => 0,
        }
    }
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
#[non_exhaustive]
pub enum Status {
    /// Well.
    Ok = 0,
    /// No such handle (or it was taken away).
    NoHandle = 1,
    /// The range reaches beyond the end.
    OutOfBounds = 2,
    /// The rights do not cover it.
    NoRights = 3,
    /// No segment of that name, or the key is wrong: the same answer, so that names cannot be guessed.
    NoSegment = 4,
    /// No memory left to give.
    Full = 5,
    /// No such method.
    NoMethod = 6,
    /// A call's body makes no sense.
    BadRequest = 7,
    /// Too many at once; try again.
    Busy = 8,
    /// The peer is shutting down.
    Stopping = 9,
    /// The peer's memory could not be touched.
    Fault = 10,
    /// An atomic's place is not a multiple of its width.
    Misaligned = 11,
    /// The memory, or the peer, does not offer this operation.
    Unsupported = 12,
    /// The peer's memory is paged out, and has not come back in time.
    Away = 13,
    /// An answer of a newer peer that we do not know.
    Unknown = 0xFFFF,
}

impl Status {
    /// The status with this number; numbers we do not know are [`Status::Unknown`].
    pub fn from_number(number: u16) -> Self {
        match number {
            0 => Self::Ok,
            1 => Self::NoHandle,
            2 => Self::OutOfBounds,
            3 => Self::NoRights,
            4 => Self::NoSegment,
            5 => Self::Full,
            6 => Self::NoMethod,
            7 => Self::BadRequest,
            8 => Self::Busy,
            9 => Self::Stopping,
            10 => Self::Fault,
            11 => Self::Misaligned,
            12 => Self::Unsupported,
            13 => Self::Away,
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "done",
            Self::NoHandle => "that memory is not (or no longer) ours to use",
            Self::OutOfBounds => "the range reaches beyond the end of the memory",
            Self::NoRights => "the key does not allow it",
            Self::NoSegment => "there is no such segment, or the key is wrong",
            Self::Full => "no memory is left",
            Self::NoMethod => "it does not know that call",
            Self::BadRequest => "the request makes no sense to it",
            Self::Busy => "too many requests at once",
            Self::Stopping => "it is shutting down",
            Self::Fault => "it could not touch its memory",
            Self::Misaligned => "the place is not a multiple of the word's width",
            Self::Unsupported => "that memory does not offer this operation",
            Self::Away => "its memory there is paged out, and has not come back in time",
            Self::Unknown => "for a reason that only a newer netvm knows",
        })
    }
}

/// Why bytes are not a frame or a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireError {
    /// The first bytes are not netvm's.
    Magic,
    /// No version that both speak.
    Version {
        /// Newest version of the peer.
        theirs: u16,
        /// Its oldest.
        theirs_min: u16,
    },
    /// A number in the hello is out of range.
    Hello,
    /// No such kind of frame.
    Kind(u8),
    /// The payload is longer than its kind allows.
    Payload {
        /// Kind of the frame.
        kind: Kind,
        /// Announced length.
        bytes: u32,
    },
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic => f.write_str("the first bytes are not netvm's"),
            Self::Version { theirs, theirs_min } => {
                write!(f, "it speaks versions {theirs_min} to {theirs}, not {VERSION_MIN} to {VERSION}")
            }
            Self::Hello => f.write_str("a number in the hello is out of range"),
            Self::Kind(byte) => write!(f, "no frame has the kind {byte}"),
            Self::Payload { kind, bytes } => write!(f, "a {kind:?} frame of {bytes} bytes is too long"),
        }
    }
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// See the module.
    pub flags: u8,
    /// How an operation ended (answers), or a notification's number (writes).
    pub status: u16,
    /// Bytes that follow.
    pub payload_bytes: u32,
    /// See the module.
    pub sequence: u64,
    /// See the module.
    pub applied: u64,
    /// See the module.
    pub token: u64,
    /// See the module.
    pub handle: u32,
    /// See the module.
    pub bytes: u32,
    /// Position in the segment.
    pub offset: u64,
}

impl Header {
    /// A header of zeros.
    pub const fn new(kind: Kind) -> Self {
        Self {
            kind,
            flags: 0,
            status: 0,
            payload_bytes: 0,
            sequence: 0,
            applied: 0,
            token: 0,
            handle: 0,
            bytes: 0,
            offset: 0,
        }
    }

    /// A write's header with its fence and its notification.
    pub fn write(fence: bool, notify: Option<Notify>) -> Self {
        let (flags, status, bytes) = match notify {
            None => (0, 0, 0),
            Some(Notify::Count { number }) => (COUNT, number, 0),
            Some(Notify::Post { number, value }) => (POST, number, value.get()),
            Some(Notify::Queue { number, value }) => (QUEUE, number, value.get()),
        };
        let flags = if fence { flags | FENCE } else { flags };
        Self { flags, status, bytes, ..Self::new(Kind::Write) }
    }

    /// The notification that a write carries; `None` when its flags make no sense.
    pub fn notify(&self) -> Option<Option<Notify>> {
        let number = self.status;
        match self.flags & !FENCE {
            0 => Some(None),
            COUNT => Some(Some(Notify::Count { number })),
            POST => Some(Some(Notify::Post { number, value: NonZeroU32::new(self.bytes)? })),
            QUEUE => Some(Some(Notify::Queue { number, value: NonZeroU32::new(self.bytes)? })),
            _ => None,
        }
    }

    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0] = self.kind as u8;
        out[1] = self.flags;
        out[2..4].copy_from_slice(&self.status.to_le_bytes());
        out[4..8].copy_from_slice(&self.payload_bytes.to_le_bytes());
        out[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        out[16..24].copy_from_slice(&self.applied.to_le_bytes());
        out[24..32].copy_from_slice(&self.token.to_le_bytes());
        out[32..36].copy_from_slice(&self.handle.to_le_bytes());
        out[36..40].copy_from_slice(&self.bytes.to_le_bytes());
        out[40..48].copy_from_slice(&self.offset.to_le_bytes());
        out
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`WireError::Kind`] and [`WireError::Payload`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let kind = Kind::from_byte(bytes[0]).ok_or(WireError::Kind(bytes[0]))?;
        let payload_bytes = u32_at(bytes, 4);
        if payload_bytes > kind.payload_bytes_max() {
            return Err(WireError::Payload { kind, bytes: payload_bytes });
        }
        Ok(Self {
            kind,
            flags: bytes[1],
            status: u16_at(bytes, 2),
            payload_bytes,
            sequence: u64_at(bytes, 8),
            applied: u64_at(bytes, 16),
            token: u64_at(bytes, 24),
            handle: u32_at(bytes, 32),
            bytes: u32_at(bytes, 36),
            offset: u64_at(bytes, 40),
        })
    }
}

/// What the connecting side wants to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Role {
    /// Borrows slabs from a lender.
    Borrower = 1,
    /// Asks how a lender is doing.
    Observer = 2,
    /// Imports segments of a node.
    Node = 3,
    /// Lends slabs (in the answer).
    Lender = 4,
    /// Sends files, or (in the answer) receives them.
    Transfer = 5,
    /// Joins a mount, or (in the answer) shares it.
    Mount = 6,
}

/// Why a hello was answered with "no".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Refusal {
    /// It was not.
    None = 0,
    /// No version that both speak.
    Version = 1,
    /// Too many connections.
    Busy = 2,
    /// The peer is shutting down.
    Stopping = 3,
    /// The peer does not serve this role, or does not know that session.
    Role = 4,
    /// The peer wants a proof of its secret, and there was none or another secret's.
    Secret = 5,
    /// The peer has no secret to prove.
    NoSecret = 6,
    /// One side insists on encryption, the other does not encrypt.
    Encryption = 7,
}

/// The first message in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Newest version spoken; in the answer the version to use.
    pub version: u16,
    /// Oldest version spoken.
    pub version_min: u16,
    /// Who speaks.
    pub role: Role,
    /// Bits for abilities of later versions: both sides use only the bits that both set.
    pub features: u64,
    /// Most operations that the *receiver* of this hello may have waiting at the sender.
    pub ops_max: u32,
    /// Most writes that may be under way.
    pub window: u32,
    /// Number that ties the rails of one session together: see [`crate::epoch`].
    pub session: [u8; 16],
    /// Which rail of the session this connection is.
    pub rail: u8,
    /// How many there will be.
    pub rails: u8,
    /// Why not.
    pub refusal: Refusal,
}

impl Hello {
    /// Our hello for a session of one rail.
    pub fn new(role: Role) -> Self {
        Self {
            version: VERSION,
            version_min: VERSION_MIN,
            role,
            features: 0,
            ops_max: OPS_MAX as u32,
            window: WINDOW as u32,
            session: [0; 16],
            rail: 0,
            rails: 1,
            refusal: Refusal::None,
        }
    }

    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[0..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&self.version.to_le_bytes());
        out[10..12].copy_from_slice(&self.version_min.to_le_bytes());
        out[12..14].copy_from_slice(&(self.role as u16).to_le_bytes());
        out[16..24].copy_from_slice(&self.features.to_le_bytes());
        out[24..28].copy_from_slice(&self.ops_max.to_le_bytes());
        out[28..32].copy_from_slice(&self.window.to_le_bytes());
        out[32..48].copy_from_slice(&self.session);
        out[48] = self.rail;
        out[49] = self.rails;
        out[50..52].copy_from_slice(&(self.refusal as u16).to_le_bytes());
        out[52..56].copy_from_slice(&PAYLOAD_BYTES_MAX.to_le_bytes());
        out
    }

    /// Whether these bytes can still become a hello.
    pub fn may_start_with(bytes: &[u8]) -> bool {
        let len = bytes.len().min(MAGIC.len());
        bytes[..len] == MAGIC[..len]
    }

    /// The versions, in what may be a hello of any version.
    pub(crate) fn versions(bytes: &[u8; HELLO_BYTES]) -> Result<(u16, u16), WireError> {
        if bytes[0..8] != MAGIC {
            return Err(WireError::Magic);
        }
        let (version, version_min) = (u16_at(bytes, 8), u16_at(bytes, 10));
        if version < VERSION_MIN || version_min > VERSION || version_min > version {
            return Err(WireError::Version { theirs: version, theirs_min: version_min });
        }
        Ok((version, version_min))
    }

    /// Reads a hello.
    ///
    /// # Errors
    /// [`WireError::Magic`], [`WireError::Version`] (before anything else in it is looked at), [`WireError::Hello`].
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, WireError> {
        let (version, version_min) = Self::versions(bytes)?;
        let role = match u16_at(bytes, 12) {
            1 => Role::Borrower,
            2 => Role::Observer,
            3 => Role::Node,
            4 => Role::Lender,
            5 => Role::Transfer,
            6 => Role::Mount,
            _ => return Err(WireError::Hello),
        };
        let refusal = match u16_at(bytes, 50) {
            0 => Refusal::None,
            1 => Refusal::Version,
            2 => Refusal::Busy,
            3 => Refusal::Stopping,
            5 => Refusal::Secret,
            6 => Refusal::NoSecret,
            7 => Refusal::Encryption,
            _ => Refusal::Role,
        };
        let hello = Self {
            version,
            version_min,
            role,
            features: u64_at(bytes, 16),
            ops_max: u32_at(bytes, 24),
            window: u32_at(bytes, 28),
            session: array_at(bytes, 32),
            rail: bytes[48],
            rails: bytes[49],
            refusal,
        };
        let sane = hello.ops_max > 0
            && hello.window > 1
            && (1..=RAILS_MAX).contains(&usize::from(hello.rails))
            && hello.rail < hello.rails;
        if sane { Ok(hello) } else { Err(WireError::Hello) }
    }
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// Takes numbers and texts from the front of a body; `None` when it is too short.
#[derive(Clone, Copy, Debug)]
pub struct BodyReader<'a>(pub &'a [u8]);

impl<'a> BodyReader<'a> {
    /// The next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count)?;
        self.0 = tail;
        Some(head)
    }
    /// The next 16 bytes.
    pub fn key(&mut self) -> Option<[u8; 16]> {
        Some(array_at(self.bytes(16)?, 0))
    }
    /// The next number of 4 bytes.
    pub fn u32(&mut self) -> Option<u32> {
        Some(u32_at(self.bytes(4)?, 0))
    }
    /// The next number of 8 bytes.
    pub fn u64(&mut self) -> Option<u64> {
        Some(u64_at(self.bytes(8)?, 0))
    }
    /// The next text: its length in 2 bytes, then UTF-8.
    pub fn text(&mut self) -> Option<&'a str> {
        let len = usize::from(u16_at(self.bytes(2)?, 0));
        if len > crate::limits::NAME_BYTES_MAX {
            return None;
        }
        core::str::from_utf8(self.bytes(len)?).ok()
    }
}

/// Appends numbers and texts to a body.
#[derive(Clone, Debug, Default)]
pub struct BodyWriter(pub alloc::vec::Vec<u8>);

impl BodyWriter {
    /// Appends bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }
    /// Appends a number of 4 bytes.
    pub fn u32(&mut self, number: u32) -> &mut Self {
        self.bytes(&number.to_le_bytes())
    }
    /// Appends a number of 8 bytes.
    pub fn u64(&mut self, number: u64) -> &mut Self {
        self.bytes(&number.to_le_bytes())
    }
    /// Appends a text, cut to the limit of names.
    pub fn text(&mut self, text: &str) -> &mut Self {
        let mut len = text.len().min(crate::limits::NAME_BYTES_MAX);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        self.bytes(&(len as u16).to_le_bytes()).bytes(&text.as_bytes()[..len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::atomic::{Atomic, Width};

    #[test]
    fn golden_header() {
        let header = Header {
            kind: Kind::Write,
            flags: 0,
            status: 0x0102,
            payload_bytes: 0x0003_0405,
            sequence: 0x1112_1314_1516_1718,
            applied: 0x2122_2324_2526_2728,
            token: 0x3132_3334_3536_3738,
            handle: 0x4142_4344,
            bytes: 0x5152_5354,
            offset: 0x6162_6364_6566_6768,
        };
        #[rustfmt::skip]
        let golden = [
            1, 0, 0x02, 0x01, 0x05, 0x04, 0x03, 0x00,
            0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
            0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21,
            0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31,
            0x44, 0x43, 0x42, 0x41, 0x54, 0x53, 0x52, 0x51,
            0x68, 0x67, 0x66, 0x65, 0x64, 0x63, 0x62, 0x61,
        ];
        assert_eq!(header.encode(), golden);
        assert_eq!(Header::decode(&golden), Ok(header));
    }

    #[test]
    fn golden_one_sided() {
        let notify = Notify::Post { number: 0x0102, value: NonZeroU32::new(0x0304_0506).unwrap() };
        let write = Header { handle: 7, offset: 8, ..Header::write(true, Some(notify)) };
        #[rustfmt::skip]
        let golden = [
            1, 5, 2, 1, 0, 0, 0, 0,  0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0,  0, 0, 0, 0, 0, 0, 0, 0,
            7, 0, 0, 0, 6, 5, 4, 3,  8, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(write.encode(), golden);
        assert_eq!(write.notify(), Some(Some(notify)));
        let count = Header::write(false, Some(Notify::Count { number: 9 }));
        assert_eq!((count.flags, count.status, count.bytes), (2, 9, 0));
        assert_eq!(count.notify(), Some(Some(Notify::Count { number: 9 })));
        let queued = Notify::Queue { number: 3, value: NonZeroU32::new(4).unwrap() };
        let header = Header::write(false, Some(queued));
        assert_eq!((header.flags, header.status, header.bytes), (8, 3, 4));
        assert_eq!(header.notify(), Some(Some(queued)));
        assert_eq!(Header::new(Kind::Write).notify(), Some(None));
        for (flags, bytes) in [(6, 1), (4, 0), (8, 0), (12, 1), (10, 1), (16, 1), (0xFF, 1)] {
            assert_eq!(Header { flags, bytes, ..Header::new(Kind::Write) }.notify(), None);
        }
        let atomic = Atomic::compare_swap(Width::Eight, 0x0102, 0x0A0B);
        let header = Header { handle: 7, offset: 8, ..atomic.header() };
        #[rustfmt::skip]
        let golden = [
            14, 2, 0, 0, 16, 0, 0, 0,  0, 0, 0, 0, 0, 0, 0, 0,
            0, 0, 0, 0, 0, 0, 0, 0,  0, 0, 0, 0, 0, 0, 0, 0,
            7, 0, 0, 0, 8, 0, 0, 0,  8, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(header.encode(), golden);
        assert_eq!(atomic.body(), [0x0B, 0x0A, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Atomic::decode(&header, &atomic.body()), Ok(atomic));
    }

    #[test]
    fn golden_hello() {
        let mut hello = Hello::new(Role::Borrower);
        hello.session = *b"0123456789abcdef";
        (hello.rail, hello.rails, hello.features) = (2, 4, 0x55);
        #[rustfmt::skip]
        let golden = [
            b'n', b'e', b't', b'v', b'm', 13, 10, 26, 2, 0, 2, 0, 1, 0, 0, 0,
            0x55, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 16, 0, 0,
            b'0', b'1', b'2', b'3', b'4', b'5', b'6', b'7', b'8', b'9', b'a', b'b', b'c', b'd', b'e', b'f',
            2, 4, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(hello.encode(), golden);
        assert_eq!(Hello::decode(&golden), Ok(hello));
    }

    #[test]
    fn bad_bytes_are_refused_with_the_reason() {
        let good = Hello::new(Role::Node).encode();
        let with = |at: usize, byte: u8| {
            let mut bytes = good;
            bytes[at] = byte;
            Hello::decode(&bytes)
        };
        assert_eq!(with(0, b'N'), Err(WireError::Magic));
        assert_eq!(with(8, 0), Err(WireError::Version { theirs: 0, theirs_min: 2 }));
        assert_eq!(with(10, 9), Err(WireError::Version { theirs: 2, theirs_min: 9 }));
        assert!(with(9, 1).is_ok(), "a newer peer that still speaks ours");
        for (at, byte) in [(12, 9), (49, 0), (48, 1), (49, 200)] {
            assert_eq!(with(at, byte), Err(WireError::Hello));
        }
        let mut bytes = Header::new(Kind::Read).encode();
        bytes[0] = 77;
        assert_eq!(Header::decode(&bytes), Err(WireError::Kind(77)));
        for kind in 1..=15 {
            bytes[0] = kind;
            bytes[4..8].copy_from_slice(&(PAYLOAD_BYTES_MAX + 1).to_le_bytes());
            assert!(matches!(Header::decode(&bytes), Err(WireError::Payload { .. })));
        }
    }

    #[test]
    fn bodies() {
        let mut body = BodyWriter::default();
        body.u32(7).u64(8).text("name").bytes(&[1; 16]);
        let mut reader = BodyReader(&body.0);
        assert_eq!((reader.u32(), reader.u64(), reader.text()), (Some(7), Some(8), Some("name")));
        assert_eq!((reader.key(), reader.u32()), (Some([1; 16]), None));
        assert_eq!(BodyReader(&[9, 0, 1]).text(), None);
        let mut long = alloc::vec![b'n'; 2 + crate::limits::NAME_BYTES_MAX + 1];
        long[..2].copy_from_slice(&(crate::limits::NAME_BYTES_MAX as u16 + 1).to_le_bytes());
        assert_eq!(BodyReader(&long).text(), None, "no text is longer than what a writer writes");
    }
}
