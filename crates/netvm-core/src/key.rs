//! Keys that protect segments.

use alloc::format;
use alloc::string::String;
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

    /// 32 hexadecimal digits, to hand to the one who shall use it in a file or on a command line: [`RemoteKey::from_text`] reads them.
    pub fn to_text(self) -> String {
        format!("{:032x}", u128::from_be_bytes(self.0))
    }

    /// The key of [`RemoteKey::to_text`]; `None` for anything else.
    pub fn from_text(text: &str) -> Option<Self> {
        let is_key = text.len() == 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| is_key)?;
        Some(Self(number.to_be_bytes()))
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

    #[test]
    fn keys_match_only_themselves_and_stay_secret() {
        let key = RemoteKey::from_bytes([7; 16]);
        for bit in 0..128 {
            let mut bytes = key.to_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(!key.matches(&RemoteKey::from_bytes(bytes)));
        }
        assert!(key.matches(&key));
        assert!(RemoteKey::from_text(&key.to_text()).is_some_and(|same| same.matches(&key)));
        for wrong in ["", "7", &"07".repeat(17), &"+7".repeat(16), &"ü7".repeat(11)] {
            assert!(RemoteKey::from_text(wrong).is_none());
        }
        assert!(!format!("{key:?}").contains('7'));
        assert!(Rights::Read.allow(Access::Read) && !Rights::Read.allow(Access::Write));
        assert!(Rights::ReadWrite.allow(Access::Write));
    }
}
