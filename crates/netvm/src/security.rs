//! Who may connect, and what is hidden on the way: docs/security.md.
//!
//! ```no_run
//! # fn main() -> netvm::Result<()> {
//! use netvm::lender::{BorrowOptions, Borrower};
//! use netvm::security::{Encryption, Secret, Security};
//!
//! let secret = Some(Secret::from_file("/etc/netvm/secret".as_ref())?);
//! let security = Security { secret, encryption: Encryption::Always, ..Security::default() };
//! let borrower = Borrower::connect("big:7070", &BorrowOptions { security, ..BorrowOptions::default() })?;
//! # Ok(()) }
//! ```

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use netvm_core::key::RemoteKey;
pub use netvm_core::opening::Encryption;
use netvm_sys::net::Address;
use zeroize::Zeroizing;

use crate::error::{Error, Result};

/// Fewest bytes of a passphrase.
pub const PASSPHRASE_BYTES_MIN: usize = 12;
/// Most bytes of a secret file.
pub const SECRET_FILE_BYTES_MAX: usize = 4096;
/// Rounds that make guessing a passphrase slow: about 0.1 s each try.
const STRETCH_ROUNDS: NonZeroU32 = NonZeroU32::new(600_000).unwrap();
const STRETCH_SALT: &[u8] = b"netvm passphrase 1";

/// What all members of a cluster know and nobody else does. It is never printed, and wiped when dropped.
#[derive(Clone)]
pub struct Secret(Zeroizing<[u8; 32]>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl PartialEq for Secret {
    /// In a time that does not tell where they differ.
    fn eq(&self, other: &Self) -> bool {
        let halves = |secret: &Self| {
            let half = |at| RemoteKey::from_bytes(std::array::from_fn(|index| secret.0[at + index]));
            (half(0), half(16))
        };
        let ((one, two), (low, high)) = (halves(self), halves(other));
        one.matches(&low) & two.matches(&high)
    }
}

impl Eq for Secret {}

impl Secret {
    /// A new one, from the system's random numbers.
    ///
    /// # Errors
    /// [`Error::Other`] when there are none.
    pub fn random() -> Result<Self> {
        let mut bytes = Zeroizing::new([0; 32]);
        getrandom::fill(&mut *bytes)
            .map_err(|error| Error::Other(format!("cannot get random numbers: {error}")))?;
        Ok(Self(bytes))
    }

    /// The secret of these bytes, which should be as good as random.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// The bytes, to hand to the one who shall use it.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The secret that a file with this content stands for: 64 hexadecimal digits are the secret itself, anything else is a
    /// passphrase. White space around it does not count.
    ///
    /// # Errors
    /// [`Error::Other`] when it is too short or too long.
    pub fn from_content(content: &[u8]) -> Result<Self> {
        let content = content.trim_ascii();
        if let Some(secret) = Self::from_hex(content) {
            return Ok(secret);
        }
        if !(PASSPHRASE_BYTES_MIN..=SECRET_FILE_BYTES_MAX).contains(&content.len()) {
            return Err(Error::Other(format!(
                "a secret of {} bytes is no good: {PASSPHRASE_BYTES_MIN} to {SECRET_FILE_BYTES_MAX} are needed; \
                 `netvm secret new FILE` makes one",
                content.len()
            )));
        }
        let mut bytes = Zeroizing::new([0; 32]);
        let sha256 = ring::pbkdf2::PBKDF2_HMAC_SHA256;
        ring::pbkdf2::derive(sha256, STRETCH_ROUNDS, STRETCH_SALT, content, &mut *bytes);
        Ok(Self(bytes))
    }

    fn from_hex(digits: &[u8]) -> Option<Self> {
        let mut bytes = Zeroizing::new([0; 32]);
        if digits.len() != 64 {
            return None;
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
            let digit = |digit: u8| char::from(digit).to_digit(16);
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Some(Self(bytes))
    }

    /// What [`Secret::from_content`] turns into this secret: 64 hexadecimal digits and a line end.
    pub fn to_content(&self) -> Zeroizing<String> {
        let mut text = Zeroizing::new(String::with_capacity(65));
        for byte in self.0.iter() {
            for digit in [byte >> 4, byte & 15] {
                text.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
            }
        }
        text.push('\n');
        text
    }

    /// Reads a secret file, which nobody but its owner may be able to read.
    ///
    /// # Errors
    /// [`Error::Other`], a sentence with the file's name and the remedy.
    pub fn from_file(path: &Path) -> Result<Self> {
        let name = path.display();
        let failed =
            |what: &dyn fmt::Display| Error::Other(format!("cannot use the secret file {name}: {what}"));
        // A pipe that nobody writes to would be waited for, perhaps for ever.
        let mut options = OpenOptions::new();
        let file =
            options.read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(|error| failed(&error))?;
        // Of the open file, not of the path: nobody can exchange it between the check and the reading.
        let metadata = file.metadata().map_err(|error| failed(&error))?;
        let mode = metadata.mode() & 0o777;
        if metadata.is_dir() {
            return Err(failed(&"it is a folder; name the file with the secret"));
        }
        // Of a pipe the shell makes the mode; that of a device is for others to change, if anybody.
        if mode & 0o077 != 0 && !metadata.is_file() {
            return Err(failed(
                &"it is no ordinary file, and others can get at it; name the file with the secret",
            ));
        }
        if mode & 0o077 != 0 {
            return Err(failed(&format!(
                "others can get at it (mode {mode:03o}); `chmod 600 {name}`, and if it lay open for long, make a new one"
            )));
        }
        rustix::fs::fcntl_setfl(&file, rustix::fs::OFlags::empty()).map_err(|error| failed(&error))?;
        let mut content = Zeroizing::new(Vec::with_capacity(SECRET_FILE_BYTES_MAX + 1));
        let limit = SECRET_FILE_BYTES_MAX as u64 + 1;
        file.take(limit).read_to_end(&mut content).map_err(|error| failed(&error))?;
        if content.is_empty() && metadata.file_type().is_fifo() {
            return Err(failed(&"it is a pipe that nobody writes to"));
        }
        Self::from_content(&content).map_err(|error| failed(&error))
    }

    /// Writes a new secret file that only its owner can read. An existing file is left alone.
    ///
    /// # Errors
    /// [`Error::Other`], a sentence.
    pub fn write_new_file(&self, path: &Path) -> Result<()> {
        let name = path.display();
        let failed = |error: io::Error| {
            Error::Other(match error.kind() {
                io::ErrorKind::AlreadyExists => {
                    format!("{name} exists and is kept as it is; name another file, or remove it first")
                }
                _ => format!("cannot write the secret file {name}: {error}"),
            })
        };
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
        file.write_all(self.to_content().as_bytes()).and_then(|()| file.sync_all()).map_err(failed)
    }
}

/// How sessions are protected. The default: not at all, which is for loopback and unix sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Security {
    /// Both sides prove that they know it before anything else is looked at; then a peer without it is refused.
    pub secret: Option<Secret>,
    /// Whether all bytes after the proof are encrypted, too. It needs a secret.
    pub encryption: Encryption,
    /// Without a secret, listen on networks all the same.
    pub insecure: bool,
}

impl Security {
    /// Whether it makes sense.
    ///
    /// # Errors
    /// [`Error::Other`], a sentence.
    pub fn check(&self) -> Result<()> {
        if self.encryption == Encryption::Always && self.secret.is_none() {
            return Err(Error::Other(
                "encryption needs a secret that both sides share; name its file with --secret FILE"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    /// Whether it is enough to listen at `address`, which is a socket's own and not a name.
    ///
    /// # Errors
    /// [`Error::Listen`] for a network address without a secret.
    pub fn check_listener(&self, address: &Address) -> Result<()> {
        self.check_listener_or(address, ", or --insecure if you trust everybody on the network")
    }

    /// The same for who has no option to do without.
    pub(crate) fn check_shared(&self, address: &Address) -> Result<()> {
        self.check_listener_or(address, "")
    }

    fn check_listener_or(&self, address: &Address, or: &str) -> Result<()> {
        self.check()?;
        let is_local = match address {
            Address::Unix(_) => true,
            Address::Tcp(text) => {
                text.parse::<SocketAddr>().is_ok_and(|address| address.ip().to_canonical().is_loopback())
            }
        };
        if is_local || self.secret.is_some() || self.insecure {
            return Ok(());
        }
        Err(Error::Listen {
            address: address.to_string(),
            reason: format!(
                "whoever reaches this address could use what it offers; give --secret FILE (`netvm secret new FILE` makes one){or}"
            ),
        })
    }
}

/// What protects a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protection {
    /// Nothing.
    #[default]
    None,
    /// Both sides have proved that they know the secret; the bytes after that travel as they are.
    Authenticated,
    /// And all bytes are encrypted and checked.
    Encrypted,
}

impl fmt::Display for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "not authenticated",
            Self::Authenticated => "authenticated, not encrypted",
            Self::Encrypted => "authenticated and encrypted",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn contents_become_secrets() {
        let secret = Secret::from_bytes(std::array::from_fn(|index| (index * 9) as u8));
        let content = secret.to_content();
        assert!(content.starts_with("0009121b") && content.len() == 65);
        assert_eq!(Secret::from_content(content.as_bytes()), Ok(secret.clone()));
        assert_eq!(Secret::from_content(content.to_uppercase().as_bytes()), Ok(secret.clone()));
        assert_ne!(Secret::random(), Secret::random());
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        // A golden value: members of a cluster must agree for ever.
        let passphrase = Secret::from_content(b"  correct horse battery staple\n").unwrap();
        assert_eq!(
            passphrase.to_content().trim(),
            "050e531e9d7a060a7bdb69203394a98c1158c00bb90a03656eaf8409c4034b75"
        );
        assert_ne!(Secret::from_content(b"correct horse battery stapl\xFF"), Ok(passphrase));
        for content in [&b"too short"[..], b"", &[7; SECRET_FILE_BYTES_MAX + 1]] {
            let error = Secret::from_content(content).unwrap_err().to_string();
            assert!(error.contains("netvm secret new"), "{error}");
        }
    }

    #[test]
    fn every_bit_of_a_secret_counts() {
        let secret = Secret::from_bytes([7; 32]);
        for bit in 0..256 {
            let mut bytes = [7; 32];
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(secret, Secret::from_bytes(bytes));
        }
    }

    #[test]
    fn secret_files_are_for_their_owner_alone() {
        let path = std::env::temp_dir().join(format!("netvm-secret-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let secret = Secret::random().unwrap();
        secret.write_new_file(&path).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        assert_eq!(Secret::from_file(&path), Ok(secret.clone()));
        let error = secret.write_new_file(&path).unwrap_err().to_string();
        assert!(error.contains("exists"), "{error}");
        for mode in [0o640, 0o604, 0o602, 0o610, 0o777] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = Secret::from_file(&path).unwrap_err().to_string();
            assert!(error.contains(&format!("mode {mode:o}")) && error.contains("chmod 600"), "{error}");
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o400)).unwrap();
        assert_eq!(Secret::from_file(&path), Ok(secret));
        std::fs::remove_file(&path).unwrap();
        let error = Secret::from_file(&path).unwrap_err().to_string();
        assert!(error.contains("No such file") && error.contains("netvm-secret-"), "{error}");
    }

    #[test]
    fn networks_need_a_secret() {
        let open = Security::default();
        let insecure = Security { insecure: true, ..Security::default() };
        let secret = Security { secret: Some(Secret::from_bytes([1; 32])), ..Security::default() };
        for address in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1", "unix:/tmp/x"] {
            assert_eq!(open.check_listener(&address.parse().unwrap()), Ok(()), "{address}");
        }
        for address in ["0.0.0.0:1", "10.0.0.5:1", "[::]:1", "[fe80::1]:1", "[::ffff:10.0.0.5]:1"] {
            let parsed = address.parse().unwrap();
            let error = open.check_listener(&parsed).unwrap_err().to_string();
            assert!(error.contains(address) && error.contains("--secret"), "{error}");
            assert_eq!((insecure.check_listener(&parsed), secret.check_listener(&parsed)), (Ok(()), Ok(())));
        }
        let security = Security { encryption: Encryption::Always, ..insecure };
        assert!(security.check().unwrap_err().to_string().contains("--secret"));
    }
}
