//! Keys that protect segments.

use core::fmt;

/// What the holder of a key may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Read only.
    Read,
    /// Read and write.
    ReadWrite,
}

impl Rights {
    /// Whether `access` is among them.
    pub fn allow(self, access: Access) -> bool {
        match access {
            Access::Read => true,
            Access::Write => self == Rights::ReadWrite,
        }
    }
}

/// What an operation does to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It reads.
    Read,
    /// It writes.
    Write,
}

/// A random 128-bit key. It is never printed.
#[derive(Clone, Copy)]
pub struct RemoteKey([u8; 16]);

impl RemoteKey {
    /// A key of these bytes, which should come from the system's random numbers.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes, to hand to the one who shall use it.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// Whether both are the same, in a time that does not tell where they differ.
    #[must_use]
    pub fn matches(&self, other: &Self) -> bool {
        let mut difference = 0u8;
        for index in 0..16 {
            // black_box: the compiler must not leave the loop early.
            difference |= core::hint::black_box(self.0[index] ^ other.0[index]);
        }
        core::hint::black_box(difference) == 0
    }
}

impl fmt::Debug for RemoteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RemoteKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    #[test]
    fn keys_match_only_themselves_and_stay_secret() {
        let key = RemoteKey::from_bytes([7; 16]);
        for bit in 0..128 {
            let mut bytes = key.to_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(!key.matches(&RemoteKey::from_bytes(bytes)));
        }
        assert!(key.matches(&key));
        assert!(!format!("{key:?}").contains('7'));
        assert!(Rights::Read.allow(Access::Read) && !Rights::Read.allow(Access::Write));
        assert!(Rights::ReadWrite.allow(Access::Write));
    }
}
