//! Numbers and records of the protocol, all big-endian.

pub(super) const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
pub(super) const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Of the server's greeting, and the same bits of the client's answer.
pub(super) mod handshake {
    pub(in super::super) const FIXED_NEWSTYLE: u16 = 1;
    pub(in super::super) const NO_ZEROES: u16 = 2;
}

pub(super) mod option {
    pub(in super::super) const EXPORT_NAME: u32 = 1;
    pub(in super::super) const ABORT: u32 = 2;
    pub(in super::super) const LIST: u32 = 3;
    pub(in super::super) const STARTTLS: u32 = 5;
    pub(in super::super) const INFO: u32 = 6;
    pub(in super::super) const GO: u32 = 7;
    pub(in super::super) const STRUCTURED_REPLY: u32 = 8;
    pub(in super::super) const LIST_META_CONTEXT: u32 = 9;
    pub(in super::super) const SET_META_CONTEXT: u32 = 10;
}

pub(super) mod answer {
    pub(in super::super) const ACK: u32 = 1;
    pub(in super::super) const SERVER: u32 = 2;
    pub(in super::super) const INFO: u32 = 3;
    pub(in super::super) const META_CONTEXT: u32 = 4;
    pub(in super::super) const ERR_UNSUP: u32 = 1 << 31 | 1;
    pub(in super::super) const ERR_INVALID: u32 = 1 << 31 | 3;
    pub(in super::super) const ERR_TLS_REQD: u32 = 1 << 31 | 5;
    pub(in super::super) const ERR_UNKNOWN: u32 = 1 << 31 | 6;
}

pub(super) mod info {
    pub(in super::super) const EXPORT: u16 = 0;
    pub(in super::super) const NAME: u16 = 1;
    pub(in super::super) const DESCRIPTION: u16 = 2;
    pub(in super::super) const BLOCK_SIZE: u16 = 3;
}

/// What an export can do.
pub(super) mod transmission {
    pub(in super::super) const HAS_FLAGS: u16 = 1;
    pub(in super::super) const READ_ONLY: u16 = 1 << 1;
    pub(in super::super) const SEND_FLUSH: u16 = 1 << 2;
    pub(in super::super) const SEND_FUA: u16 = 1 << 3;
    pub(in super::super) const SEND_TRIM: u16 = 1 << 5;
    pub(in super::super) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(in super::super) const SEND_DF: u16 = 1 << 7;
    pub(in super::super) const CAN_MULTI_CONN: u16 = 1 << 8;
    pub(in super::super) const SEND_CACHE: u16 = 1 << 10;
    pub(in super::super) const SEND_FAST_ZERO: u16 = 1 << 11;
}

pub(super) mod command {
    pub(in super::super) const READ: u16 = 0;
    pub(in super::super) const WRITE: u16 = 1;
    pub(in super::super) const DISC: u16 = 2;
    pub(in super::super) const FLUSH: u16 = 3;
    pub(in super::super) const TRIM: u16 = 4;
    pub(in super::super) const CACHE: u16 = 5;
    pub(in super::super) const WRITE_ZEROES: u16 = 6;
    pub(in super::super) const BLOCK_STATUS: u16 = 7;
}

pub(super) mod flag {
    pub(in super::super) const FUA: u16 = 1;
    pub(in super::super) const REQ_ONE: u16 = 1 << 3;
}

/// Error numbers on the wire.
pub(super) mod errno {
    pub(in super::super) const EPERM: u32 = 1;
    pub(in super::super) const EIO: u32 = 5;
    pub(in super::super) const EINVAL: u32 = 22;
    pub(in super::super) const ENOSPC: u32 = 28;
}

/// Context number of `base:allocation`.
pub(super) const ALLOCATION_CONTEXT: u32 = 1;
pub(super) const ALLOCATION: &str = "base:allocation";
/// Status of an absent range: a hole that reads as zeros.
pub(super) const HOLE_ZERO: u32 = 3;

pub(super) const BLOCK_MIN: u32 = 1;
pub(super) const BLOCK_PREFERRED: u32 = 4096;
/// Longest payload of one request.
pub(super) const PAYLOAD_MAX: u32 = 32 << 20;

pub(super) const REQUEST_BYTES: usize = 28;

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) flags: u16,
    pub(super) command: u16,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) bytes: u32,
}

impl Request {
    /// `None` when it is none.
    pub(super) fn decode(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let u16_at = |at: usize| bytes[at..].first_chunk().map(|part| u16::from_be_bytes(*part));
        let u32_at = |at: usize| bytes[at..].first_chunk().map(|part| u32::from_be_bytes(*part));
        let u64_at = |at: usize| bytes[at..].first_chunk().map(|part| u64::from_be_bytes(*part));
        if u32_at(0)? != REQUEST_MAGIC {
            return None;
        }
        Some(Self {
            flags: u16_at(4)?,
            command: u16_at(6)?,
            cookie: u64_at(8)?,
            offset: u64_at(16)?,
            bytes: u32_at(24)?,
        })
    }
}

/// Longest head of an answer.
pub(super) const HEAD_BYTES_MAX: usize = 32;

/// What precedes the data of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    bytes: [u8; HEAD_BYTES_MAX],
    len: usize,
}

impl Head {
    fn new() -> Self {
        Self { bytes: [0; HEAD_BYTES_MAX], len: 0 }
    }

    fn put<const N: usize>(mut self, bytes: [u8; N]) -> Self {
        self.bytes[self.len..self.len + N].copy_from_slice(&bytes);
        self.len += N;
        self
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// An answer without data, or whose data follows.
    pub(super) fn simple(cookie: u64, errno: u32) -> Self {
        Self::new().put(SIMPLE_REPLY_MAGIC.to_be_bytes()).put(errno.to_be_bytes()).put(cookie.to_be_bytes())
    }

    /// The only chunk of a structured answer.
    fn chunk(cookie: u64, kind: u16, bytes: u32) -> Self {
        const DONE: u16 = 1;
        Self::new()
            .put(CHUNK_MAGIC.to_be_bytes())
            .put(DONE.to_be_bytes())
            .put(kind.to_be_bytes())
            .put(cookie.to_be_bytes())
            .put(bytes.to_be_bytes())
    }

    /// A structured answer without anything.
    pub(super) fn none(cookie: u64) -> Self {
        Self::chunk(cookie, 0, 0)
    }

    /// `bytes` bytes of data from `offset` on follow.
    pub(super) fn data(cookie: u64, offset: u64, bytes: u32) -> Self {
        Self::chunk(cookie, 1, 8 + bytes).put(offset.to_be_bytes())
    }

    pub(super) fn hole(cookie: u64, offset: u64, bytes: u32) -> Self {
        Self::chunk(cookie, 2, 12).put(offset.to_be_bytes()).put(bytes.to_be_bytes())
    }

    /// `descriptors` pairs of length and status follow.
    pub(super) fn block_status(cookie: u64, descriptors: u32) -> Self {
        Self::chunk(cookie, 5, 4 + 8 * descriptors).put(ALLOCATION_CONTEXT.to_be_bytes())
    }

    pub(super) fn error(cookie: u64, errno: u32) -> Self {
        Self::chunk(cookie, 1 << 15 | 1, 6).put(errno.to_be_bytes()).put([0; 2])
    }
}
