//! Memory of a peer on this host, mapped: its regions are read and written by plain copies; or, where it cannot be mapped, by copies that the
//! kernel makes between the processes. docs/design/shm.md has the whole.
//!
//! [`export`] is the exporter's side, [`import`] the importer's until the memory is mapped, [`mapped`] what is done with it.

pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod mapped;
pub(crate) mod meeting;

use std::os::fd::AsFd;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64};

use netvm_core::words::{PrivateWords, Words};
use netvm_sys::fdpass::{FdListener, FdSocket};
use netvm_sys::mapping::Mapping;
use netvm_sys::memfd::Memfd;
use netvm_sys::words::SharedWords;

use meeting::{INVITATION_BYTES, Invitation, Secret, meeting_name};

/// The method of calls about shared memory.
pub(crate) const SHM_METHOD: u32 = 0x5348_4D31;

/// A call about nothing: its answer says which writes have been applied.
pub(crate) const APPLIED: [u8; 1] = [4];

/// What carries the operations on a peer's segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkChoice {
    /// Shared memory where it can be had, the connection otherwise. The environment variable `NETVM_LINK` can say more.
    #[default]
    Auto,
    /// Shared memory: whatever cannot be mapped cannot be imported.
    Shm,
    /// The connection.
    Socket,
    /// The connection, as if it were to another host, and from pagers datagrams for reads where the lender answers them.
    Datagrams,
}

impl FromStr for LinkChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "shm" => Ok(Self::Shm),
            "socket" => Ok(Self::Socket),
            "datagrams" => Ok(Self::Datagrams),
            _ => Err("a link is auto, shm, socket or datagrams"),
        }
    }
}

impl LinkChoice {
    /// The choice that `NETVM_LINK` makes for the whole program; nonsense is no choice.
    pub fn from_environment() -> Self {
        static CHOICE: OnceLock<LinkChoice> = OnceLock::new();
        *CHOICE.get_or_init(|| {
            let value = std::env::var("NETVM_LINK").unwrap_or_default();
            value.parse().unwrap_or_default()
        })
    }

    pub(crate) fn or_environment(self) -> Self {
        if self == Self::Auto { Self::from_environment() } else { self }
    }

    /// Whether memory may be shared.
    pub fn may_share(self) -> bool {
        matches!(self, Self::Auto | Self::Shm)
    }

    /// Whether datagrams may be used.
    pub(crate) fn wants_datagrams(self) -> bool {
        matches!(self.or_environment(), Self::Auto | Self::Datagrams)
    }
}

/// Whether processes of this host can share memory by netvm.
///
/// # Errors
/// What is missing, in words.
pub fn probe_shm() -> Result<(), String> {
    let told = |what: &'static str| move |error: std::io::Error| format!("{what}: {error}");
    let file = Memfd::sealed(c"netvm-probe", 4096).map_err(told("no sealed memfd"))?;
    let mut name: Secret = [0; 16];
    getrandom::fill(&mut name).map_err(|error| error.to_string())?;
    let name = meeting_name(&name);
    let listener = FdListener::bind(&name).map_err(told("no abstract unix sockets"))?;
    let there = FdSocket::connect(&name).map_err(told("cannot connect to an abstract unix socket"))?;
    let here = listener.accept().map_err(told("cannot accept"))?.ok_or("nobody came to the meeting")?;
    let read_only =
        file.read_only().map_err(told("cannot open descriptors anew for reading (is /proc mounted?)"))?;
    there.send(&[0], &[read_only.as_fd()]).map_err(told("cannot pass descriptors"))?;
    let (_, mut fds) = here.receive(&mut [0; 1]).map_err(told("cannot receive descriptors"))?;
    let passed = fds.pop().ok_or("a descriptor was lost")?;
    let passed = Memfd::adopt(passed, 4096).map_err(told("seals are not to be seen"))?;
    Mapping::of_peer(&passed, false).map_err(told("cannot map a passed descriptor"))?;
    Ok(())
}

/// Where a board of notifications lives.
#[derive(Debug)]
pub(crate) enum BoardWords {
    Private(PrivateWords),
    Shared(SharedWords),
}

impl Words for BoardWords {
    #[inline]
    fn bell(&self) -> &AtomicU32 {
        match self {
            Self::Private(words) => words.bell(),
            Self::Shared(words) => words.bell(),
        }
    }

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        match self {
            Self::Private(words) => words.words(),
            Self::Shared(words) => words.words(),
        }
    }
}

/// The words of a gate, or of a board that is a peer's.
#[derive(Debug)]
pub(crate) struct PeerWords(pub(crate) SharedWords);

impl Words for PeerWords {
    #[inline]
    fn bell(&self) -> &AtomicU32 {
        self.0.bell()
    }

    #[inline]
    fn words(&self) -> &[AtomicU64] {
        self.0.words()
    }
}

/// A request about shared memory, all numbers little-endian:
///
/// ```text
///   0   1                17               33               49
///  +---+----------------+----------------+----------------+
///  | 1 | name           | nonce A        | nonce B        |   meet; answered by nothing
///  +---+----------------+----------------+----------------+
///  | 2 | handle (4) | flags (1)     |                               share; answered by a Share
///  | 3 | handle (4) |                                           ring: a watcher of the board's descriptor
///  | 4 |------------+                                           applied: answered by nothing, behind all earlier writes
///  +---+
/// ```
///
/// Flags: 1: our threads are included in membarriers; 2: memory that cannot be mapped is welcome, if the kernel lets us copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    Meet(Invitation),
    Share { handle: u32, light: bool, apart: bool },
    Ring { handle: u32 },
    Applied,
}

impl Request {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Meet(invitation) => [&[1][..], &invitation.encode()].concat(),
            Self::Share { handle, light, apart } => {
                [&[2], &handle.to_le_bytes()[..], &[u8::from(*light) | u8::from(*apart) << 1]].concat()
            }
            Self::Ring { handle } => [&[3], &handle.to_le_bytes()[..]].concat(),
            Self::Applied => APPLIED.to_vec(),
        }
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let (what, rest) = body.split_first()?;
        Some(match (what, rest.len()) {
            (1, INVITATION_BYTES) => Self::Meet(Invitation::decode(rest)?),
            (2, 5) => {
                let flag = |bit: u8| rest[4] & bit != 0;
                Self::Share { handle: number(rest)?, light: flag(1), apart: flag(2) }
            }
            (3, 4) => Self::Ring { handle: number(rest)? },
            (4, 0) => Self::Applied,
            _ => return None,
        })
    }
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

/// The answer to a share: its number (4), length of the memory (8), flags (1). The descriptors, in this order, are on the meeting's socket behind
/// the handle (4): memory, unless flag 8; gate, if flag 1; board, if flag 2. Flag 4: the exporter executes membarriers. Flag 8: a [`Place`] is on
/// the meeting's socket behind the handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    number: u32,
    bytes: u64,
    gate: bool,
    board: bool,
    light: bool,
    apart: bool,
}

impl Share {
    fn encode(&self) -> Vec<u8> {
        let flags = [self.gate, self.board, self.light, self.apart];
        let flags = flags.iter().rev().fold(0, |flags, &flag| flags << 1 | u8::from(flag));
        [&self.number.to_le_bytes()[..], &self.bytes.to_le_bytes(), &[flags]].concat()
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let body: &[u8; 13] = body.try_into().ok()?;
        let bytes = u64::from_le_bytes(*body[4..].first_chunk()?);
        let flag = |bit: u8| body[12] & bit != 0;
        Some(Self {
            number: number(body)?,
            bytes,
            gate: flag(1),
            board: flag(2),
            light: flag(4),
            apart: flag(8),
        })
    }
}

/// Memory that is not mapped, as the exporter's process tells it over a socket of its own: nobody else can have us copy to another place of it, or
/// more than it allows. Address (8), length (8), 1: it may be written (1), address of the gate (8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    address: u64,
    bytes: u64,
    writable: bool,
    gate: u64,
}

const PLACE_BYTES: usize = 25;

impl Place {
    fn encode(&self) -> Vec<u8> {
        let Self { address, bytes, writable, gate } = *self;
        [&address.to_le_bytes()[..], &bytes.to_le_bytes(), &[u8::from(writable)], &gate.to_le_bytes()]
            .concat()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; PLACE_BYTES] = bytes.try_into().ok()?;
        let word = |at: usize| bytes[at..].first_chunk().map(|word| u64::from_le_bytes(*word));
        let (address, len, gate) = (word(0)?, word(8)?, word(17)?);
        address.checked_add(len)?;
        Some(Self { address, bytes: len, writable: bytes[16] == 1, gate })
    }
}

/// Bytes of a peer's, as a request and as an answer.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(body: &[u8]) {
    if let Some(request) = Request::decode(body)
        && !matches!(request, Request::Share { .. })
    {
        assert_eq!(request.encode(), body);
    }
    if let Some(share) = Share::decode(body) {
        assert_eq!(Share::decode(&share.encode()), Some(share));
    }
}

#[cfg(test)]
mod tests;
