//! The first message of a connection whose peers share a secret, in each direction: as long as a hello, and told from one by a flag.
//!
//! ```text
//!   0               8       10      12      14      16                                              64
//!  +---------------+-------+-------+-------+-------+-----------------------------------------------+
//!  | magic         |version|oldest | role  | flags | Noise message: public key (32), tag (16)      |
//!  +---------------+-------+-------+-------+-------+-----------------------------------------------+
//! ```
//!
//! The first 16 bytes of the connecting side's opening are the handshake's prologue: whoever changes one of them on the way makes
//! the proof fail. Nothing in the answer's first 16 bytes is believed, except that there is an answer. The hellos follow, sealed.

use crate::limits::HELLO_BYTES;
use crate::wire::{Hello, MAGIC, Role, WireError, u16_at};

/// Bytes that the handshake binds.
pub const PROLOGUE_BYTES: usize = 16;
/// Bytes of one Noise message: a public key and a tag.
pub const PROOF_BYTES: usize = HELLO_BYTES - PROLOGUE_BYTES;
/// Bytes of an authentication tag.
pub const TAG_BYTES: usize = 16;
/// Bytes of a sealed hello.
pub const SEALED_HELLO_BYTES: usize = HELLO_BYTES + TAG_BYTES;

/// A proof follows in place of a hello.
const PROOF: u16 = 1;
/// The sender can encrypt.
const CAN_ENCRYPT: u16 = 2;
/// The sender insists on it.
const MUST_ENCRYPT: u16 = 4;

/// In the sealed answer: all bytes after it are encrypted.
pub const FEATURE_ENCRYPTED: u64 = 1 << 63;

/// How a side wants the bytes after the handshake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encryption {
    /// Never encrypted.
    Never,
    /// Encrypted when the peer wants it.
    #[default]
    IfAsked,
    /// Encrypted, or no session.
    Always,
}

impl Encryption {
    /// What two sides agree on: whether to encrypt, or `None` when one insists and the other cannot.
    pub fn agree(self, other: Self) -> Option<bool> {
        match (self, other) {
            (Self::Always, Self::Never) | (Self::Never, Self::Always) => None,
            (Self::Always, _) | (_, Self::Always) => Some(true),
            _ => Some(false),
        }
    }
}

/// The first bytes of an opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Newest version spoken.
    pub version: u16,
    /// Oldest version spoken.
    pub version_min: u16,
    /// Who speaks.
    pub role: u16,
    /// What the sender wants.
    pub encryption: Encryption,
}

impl Opening {
    /// Our opening.
    pub fn new(role: Role, encryption: Encryption) -> Self {
        let hello = Hello::new(role);
        Self { version: hello.version, version_min: hello.version_min, role: role as u16, encryption }
    }

    /// The bytes on the wire, without the proof.
    pub fn encode(&self) -> [u8; PROLOGUE_BYTES] {
        let flags = PROOF
            | match self.encryption {
                Encryption::Never => 0,
                Encryption::IfAsked => CAN_ENCRYPT,
                Encryption::Always => CAN_ENCRYPT | MUST_ENCRYPT,
            };
        let mut out = [0; PROLOGUE_BYTES];
        out[0..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&self.version.to_le_bytes());
        out[10..12].copy_from_slice(&self.version_min.to_le_bytes());
        out[12..14].copy_from_slice(&self.role.to_le_bytes());
        out[14..16].copy_from_slice(&flags.to_le_bytes());
        out
    }

    /// Reads an opening; `None` for a hello, which has no proof.
    ///
    /// # Errors
    /// [`WireError::Magic`], [`WireError::Version`].
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Option<Self>, WireError> {
        let (version, version_min) = Hello::versions(bytes)?;
        let flags = u16_at(bytes, 14);
        if flags & PROOF == 0 {
            return Ok(None);
        }
        let encryption = match (flags & CAN_ENCRYPT != 0, flags & MUST_ENCRYPT != 0) {
            (_, true) => Encryption::Always,
            (true, false) => Encryption::IfAsked,
            (false, false) => Encryption::Never,
        };
        Ok(Some(Self { version, version_min, role: u16_at(bytes, 12), encryption }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{VERSION, VERSION_MIN};

    #[test]
    fn golden_openings() {
        for (encryption, flags) in [(Encryption::Never, 1), (Encryption::IfAsked, 3), (Encryption::Always, 7)]
        {
            let opening = Opening::new(Role::Borrower, encryption);
            let (version, oldest) = (VERSION as u8, VERSION_MIN as u8);
            let golden = [b'n', b'e', b't', b'v', b'm', 13, 10, 26, version, 0, oldest, 0, 1, 0, flags, 0];
            assert_eq!(opening.encode(), golden);
            let mut bytes = [0xEE; HELLO_BYTES];
            bytes[..PROLOGUE_BYTES].copy_from_slice(&golden);
            assert_eq!(Opening::decode(&bytes), Ok(Some(opening)));
            bytes[8] = 0;
            assert_eq!(
                Opening::decode(&bytes),
                Err(WireError::Version { theirs: 0, theirs_min: VERSION_MIN })
            );
            bytes[3] = 0;
            assert_eq!(Opening::decode(&bytes), Err(WireError::Magic));
        }
        assert_eq!(Opening::decode(&Hello::new(Role::Node).encode()), Ok(None));
    }

    #[test]
    fn whoever_insists_gets_it_or_no_session() {
        use Encryption::{Always, IfAsked, Never};
        for (one, two, agreed) in [
            (Never, Never, Some(false)),
            (Never, IfAsked, Some(false)),
            (IfAsked, IfAsked, Some(false)),
            (IfAsked, Always, Some(true)),
            (Always, Always, Some(true)),
            (Never, Always, None),
        ] {
            assert_eq!((one.agree(two), two.agree(one)), (agreed, agreed));
        }
    }
}
