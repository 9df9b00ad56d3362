//! How a node asks a peer to copy between a segment of that peer's and another segment.
//!
//! ```text
//!  request  | way 1 | 0 1 | address bytes 1 | name bytes 1 | handle 4 | offset 8 | bytes 8 | other handle 4 | 0 4 | other offset 8 |
//!           | key 16 | address ... | name ... |
//!  reply    | outcome 1 | 0 1 | status 2 | reason ... |
//! ```

use alloc::string::String;
use alloc::vec::Vec;

use crate::key::RemoteKey;
use crate::limits::{COPY_BYTES_MAX, COPY_LOCAL_BYTES_MAX, REASON_BYTES_MAX};
use crate::wire::Status;

/// Method of the call.
pub const METHOD: u32 = 0x434F_5059;
const FIXED_BYTES: usize = 56;

/// Where the other segment is, and which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way<'a> {
    /// To another segment of the same peer, by its handle.
    Local {
        /// Handle of the target.
        handle: u32,
    },
    /// To a third node's segment.
    Push(Third<'a>),
    /// From a third node's segment.
    Pull(Third<'a>),
}

/// A third node's segment.
#[derive(Clone, Copy, Debug)]
pub struct Third<'a> {
    /// Where the node listens.
    pub address: &'a str,
    /// The segment's name.
    pub name: &'a str,
    /// Its key.
    pub key: RemoteKey,
}

impl PartialEq for Third<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.address == other.address && self.name == other.name && self.key.matches(&other.key)
    }
}

impl Eq for Third<'_> {}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Where the other segment is.
    pub way: Way<'a>,
    /// The asker's handle for the peer's segment: the source, or the target of a pull.
    pub handle: u32,
    /// First byte there.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
    /// First byte in the other segment.
    pub other_offset: u64,
}

impl<'a> Request<'a> {
    /// The call's body; `None` when an address or name has more than 255 bytes.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let nowhere = Third { address: "", name: "", key: RemoteKey::from_bytes([0; 16]) };
        let (way, other, Third { address, name, key }) = match self.way {
            Way::Local { handle } => (0, handle, nowhere),
            Way::Push(third) => (1, 0, third),
            Way::Pull(third) => (2, 0, third),
        };
        let lengths = [u8::try_from(address.len()).ok()?, u8::try_from(name.len()).ok()?];
        let mut out = Vec::with_capacity(FIXED_BYTES + address.len() + name.len());
        out.extend_from_slice(&[way, 0, lengths[0], lengths[1]]);
        out.extend_from_slice(&self.handle.to_le_bytes());
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.bytes.to_le_bytes());
        out.extend_from_slice(&other.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.other_offset.to_le_bytes());
        out.extend_from_slice(&key.to_bytes());
        out.extend_from_slice(address.as_bytes());
        out.extend_from_slice(name.as_bytes());
        Some(out)
    }

    /// Reads a call's body; `None` for nonsense and for more bytes than one request may move.
    pub fn decode(body: &'a [u8]) -> Option<Self> {
        let (fixed, rest) = body.split_first_chunk::<FIXED_BYTES>()?;
        let u32_at = |at: usize| u32::from_le_bytes(core::array::from_fn(|index| fixed[at + index]));
        let u64_at = |at: usize| u64::from_le_bytes(core::array::from_fn(|index| fixed[at + index]));
        let (address_bytes, name_bytes) = (usize::from(fixed[2]), usize::from(fixed[3]));
        if rest.len() != address_bytes + name_bytes {
            return None;
        }
        let (address, name) = rest.split_at(address_bytes);
        let third = Third {
            address: core::str::from_utf8(address).ok()?,
            name: core::str::from_utf8(name).ok()?,
            key: RemoteKey::from_bytes(core::array::from_fn(|index| fixed[40 + index])),
        };
        let way = match fixed[0] {
            0 if rest.is_empty() => Way::Local { handle: u32_at(24) },
            1 => Way::Push(third),
            2 => Way::Pull(third),
            _ => return None,
        };
        let max = if matches!(way, Way::Local { .. }) { COPY_LOCAL_BYTES_MAX } else { COPY_BYTES_MAX };
        let request =
            Self { way, handle: u32_at(4), offset: u64_at(8), bytes: u64_at(16), other_offset: u64_at(32) };
        let ends = request.offset.checked_add(request.bytes).is_some()
            && request.other_offset.checked_add(request.bytes).is_some();
        (ends && request.bytes <= max).then_some(request)
    }
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// All bytes are in the target.
    Done,
    /// Not this way, and nothing was written: in words.
    Declined(String),
    /// The third node refused it.
    Refused(Status),
    /// The third node, or the connection to it, failed in the middle: in words.
    Broken(String),
}

impl Reply {
    /// The answer's body.
    pub fn encode(&self) -> Vec<u8> {
        let (outcome, status, reason) = match self {
            Self::Done => (0, Status::Ok, ""),
            Self::Declined(reason) => (1, Status::Ok, reason.as_str()),
            Self::Refused(status) => (2, *status, ""),
            Self::Broken(reason) => (3, Status::Ok, reason.as_str()),
        };
        let mut end = reason.len().min(REASON_BYTES_MAX);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        let mut out = Vec::with_capacity(4 + end);
        out.extend_from_slice(&[outcome, 0]);
        out.extend_from_slice(&(status as u16).to_le_bytes());
        out.extend_from_slice(&reason.as_bytes()[..end]);
        out
    }

    /// Reads an answer; `None` for nonsense.
    pub fn decode(body: &[u8]) -> Option<Self> {
        let (&[outcome, _, low, high], reason) = body.split_first_chunk()?;
        let reason = || {
            let reason = &reason[..reason.len().min(REASON_BYTES_MAX)];
            String::from_utf8_lossy(reason).chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
        };
        Some(match outcome {
            0 => Self::Done,
            1 => Self::Declined(reason()),
            2 => Self::Refused(Status::from_number(u16::from_le_bytes([low, high]))),
            3 => Self::Broken(reason()),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::Random;

    #[test]
    fn requests_and_replies_survive_the_wire() {
        let third = Third { address: "host:1234", name: "käse", key: RemoteKey::from_bytes([9; 16]) };
        for way in [Way::Local { handle: 77 }, Way::Push(third), Way::Pull(third)] {
            let request = Request { way, handle: 5, offset: 1 << 40, bytes: 65_536, other_offset: 3 };
            let body = request.encode().unwrap();
            assert_eq!(Request::decode(&body), Some(request));
            assert_eq!(Request::decode(&body[..body.len() - 1]), None);
            for (bytes, offset) in [(COPY_BYTES_MAX + 1, 0), (1, u64::MAX)] {
                let request = Request { bytes, offset, ..request };
                assert_eq!(Request::decode(&request.encode().unwrap()), None);
            }
        }
        let long = "ä".repeat(200);
        let too_long = Way::Push(Third { address: &long, ..third });
        assert_eq!(Request { way: too_long, handle: 0, offset: 0, bytes: 0, other_offset: 0 }.encode(), None);
        for reply in [
            Reply::Done,
            Reply::Declined("no".into()),
            Reply::Refused(Status::NoRights),
            Reply::Broken("gone".into()),
        ] {
            assert_eq!(Reply::decode(&reply.encode()), Some(reply));
        }
        let Some(Reply::Broken(cut)) = Reply::decode(&Reply::Broken(long.clone()).encode()) else { panic!() };
        assert!(long.starts_with(&cut) && cut.len() <= REASON_BYTES_MAX);
    }

    #[test]
    fn golden() {
        let third = Third { address: "a:1", name: "n", key: RemoteKey::from_bytes([0xAA; 16]) };
        let request =
            Request { way: Way::Push(third), handle: 1, offset: 2, bytes: 3, other_offset: 4 }.encode();
        let mut expected = alloc::vec![1, 0, 3, 1, 1, 0, 0, 0];
        expected.extend_from_slice(&[2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend_from_slice(&[0; 8]);
        expected.extend_from_slice(&[4, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend_from_slice(&[0xAA; 16]);
        expected.extend_from_slice(b"a:1n");
        assert_eq!(request, Some(expected));
    }

    #[test]
    fn nonsense_is_refused() {
        let mut random = Random::new(5);
        for _ in 0..100_000 {
            let len = random.below(120) as usize;
            let mut body: Vec<u8> = (0..len).map(|_| random.draw() as u8).collect();
            if let Some(first) = body.first_mut() {
                *first %= 4;
            }
            if let Some(request) = Request::decode(&body) {
                assert!(request.bytes <= COPY_BYTES_MAX);
            }
            let _ = Reply::decode(&body);
        }
    }
}
