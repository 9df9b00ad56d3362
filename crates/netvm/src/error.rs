//! What can go wrong, with the facts that whoever must act on it needs.

use std::fmt;
use std::io;

use netvm_core::limits::VERSION;

/// An errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", io::Error::from_raw_os_error(self.0))
    }
}

impl From<&io::Error> for Errno {
    fn from(error: &io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(match error.kind() {
            io::ErrorKind::TimedOut => libc::ETIMEDOUT,
            io::ErrorKind::ConnectionRefused => libc::ECONNREFUSED,
            io::ErrorKind::UnexpectedEof => libc::ECONNRESET,
            io::ErrorKind::WriteZero => libc::ENOSPC,
            _ => libc::EIO,
        }))
    }
}

/// How far the damage goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// This operation failed; the connection is fine.
    Op,
    /// The connection is gone, and with it everything that was under way on it.
    Link,
    /// This process cannot go on with netvm.
    Node,
}

/// Any failure of netvm. `Display` is a whole sentence that names the peer and says what to do.
///
/// The peer's address is called `lender` in all of them: it is that of the node, or the lender, at the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The address cannot be parsed.
    Address {
        /// The text given.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No connection could be made.
    Connect {
        /// Address of the peer.
        lender: String,
        /// Why.
        reason: String,
    },
    /// The address cannot be listened at.
    Listen {
        /// The address.
        address: String,
        /// Why.
        reason: String,
    },
    /// The peer accepted the connection but does not speak netvm's protocol.
    NotNetvm {
        /// Address of the peer.
        lender: String,
    },
    /// The peer speaks other versions of the protocol.
    Version {
        /// Address of the peer.
        lender: String,
        /// Newest version it speaks.
        theirs: u16,
        /// Oldest version it speaks.
        theirs_min: u16,
    },
    /// The peer does not want this connection.
    Refused {
        /// Address of the peer.
        lender: String,
        /// Its reason.
        reason: String,
    },
    /// The peer wants a proof of a secret, and we have none.
    NeedsSecret {
        /// Address of the peer.
        lender: String,
    },
    /// The peer's secret is another one, or somebody altered the proof on the way.
    WrongSecret {
        /// Address of the peer.
        lender: String,
    },
    /// We want a proof of our secret, and the peer has none.
    NoSecret {
        /// Address of the peer.
        lender: String,
    },
    /// One side insists on encryption, the other does not encrypt.
    NoEncryption {
        /// Address of the peer.
        lender: String,
    },
    /// The peer has not answered for too long.
    Timeout {
        /// Address of the peer.
        lender: String,
        /// What was waited for.
        what: &'static str,
        /// For how long, in milliseconds.
        after_ms: u64,
    },
    /// A transfer of files ended early; it goes on where it ended when it is started again.
    Cut {
        /// Address of the peer.
        peer: String,
        /// What was seen.
        reason: String,
    },
    /// The lender has no slab left.
    LenderFull {
        /// Address of the lender.
        lender: String,
        /// Bytes that it lends in all.
        size_bytes: u64,
        /// Bytes lent now.
        used_bytes: u64,
        /// Why there is none.
        limit: LenderLimit,
    },
    /// The connection ended: the peer died, was stopped, or the network failed.
    LenderLost {
        /// Address of the peer.
        lender: String,
        /// What was seen.
        reason: String,
    },
    /// The connection ended while an atomic, or a write with a handle, was under way: it was executed once, in part (a write) or not at
    /// all, and nobody can tell.
    OutcomeUnknown {
        /// Address of the peer.
        lender: String,
        /// What was tried.
        what: &'static str,
        /// How the connection ended.
        reason: String,
    },
    /// The peer sent something the protocol does not allow.
    Protocol {
        /// Address of the peer.
        lender: String,
        /// What it was.
        reason: String,
    },
    /// The peer refused one operation.
    Op {
        /// Address of the peer.
        lender: String,
        /// What was tried.
        what: &'static str,
        /// The peer's reason.
        code: netvm_core::wire::Status,
    },
    /// As much is under way as may be; the same call succeeds when some of it has ended.
    WouldBlock {
        /// Address of the peer.
        lender: String,
    },
    /// A segment cannot be taken back yet: somebody is in the middle of its memory, and waits for a page that does not come, or was stopped
    /// there.
    StillUsed {
        /// Its name.
        segment: String,
        /// No peer begins anything there any more; otherwise nothing has changed.
        taken_back: bool,
        /// For how long that was waited for, in milliseconds.
        after_ms: u64,
    },
    /// A range reaches beyond the memory it is in.
    Bounds {
        /// First byte.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes there are.
        len: u64,
    },
    /// Something else of this node is exported under this name.
    NameTaken {
        /// The name.
        name: String,
    },
    /// The operating system refused something.
    System {
        /// What was tried.
        what: &'static str,
        /// Its answer.
        errno: Errno,
    },
    /// Far memory itself failed.
    Pager(crate::pager::PagerError),
    /// Anything else, as a sentence.
    Other(String),
}

impl From<crate::pager::PagerError> for Error {
    fn from(error: crate::pager::PagerError) -> Self {
        Self::Pager(error)
    }
}

/// A result of netvm.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Wraps a failure of the operating system.
    pub fn system(what: &'static str, error: &io::Error) -> Self {
        Self::System { what, errno: error.into() }
    }

    /// Whether a page could not leave only because no lender has room for it.
    pub(crate) fn is_no_room(&self) -> bool {
        matches!(
            self,
            Self::LenderFull { .. }
                | Self::Pager(
                    crate::pager::PagerError::SlotsExhausted
                        | crate::pager::PagerError::TooFewLenders { .. }
                        | crate::pager::PagerError::CopiesLost { pages: 0, .. }
                )
        )
    }

    /// How far the damage goes.
    pub fn scope(&self) -> Scope {
        match self {
            Self::LenderFull { .. }
            | Self::Op { .. }
            | Self::WouldBlock { .. }
            | Self::StillUsed { .. }
            | Self::Bounds { .. }
            | Self::NameTaken { .. } => Scope::Op,
            Self::Address { .. }
            | Self::Connect { .. }
            | Self::NotNetvm { .. }
            | Self::Version { .. }
            | Self::Refused { .. }
            | Self::NeedsSecret { .. }
            | Self::WrongSecret { .. }
            | Self::NoSecret { .. }
            | Self::NoEncryption { .. }
            | Self::Timeout { .. }
            | Self::Cut { .. }
            | Self::LenderLost { .. }
            | Self::OutcomeUnknown { .. }
            | Self::Protocol { .. } => Scope::Link,
            Self::Listen { .. } | Self::System { .. } | Self::Pager(_) | Self::Other(_) => Scope::Node,
        }
    }

    /// That an address cannot be listened at.
    pub(crate) fn listen(address: String, error: &io::Error) -> Self {
        let full = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT));
        let advice = if full { " (its file system is full: make room there)" } else { "" };
        let reason = format!("{error}{advice}");
        Self::Listen { address, reason }
    }

    /// Whether the same call may succeed later without anybody changing the configuration.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connect { .. }
            | Self::Timeout { .. }
            | Self::Cut { .. }
            | Self::LenderFull { .. }
            | Self::WouldBlock { .. }
            | Self::StillUsed { .. }
            | Self::LenderLost { .. } => true,
            Self::Op { code, .. } => {
                matches!(code, netvm_core::wire::Status::Busy | netvm_core::wire::Status::Away)
            }
            Self::Address { .. }
            | Self::Listen { .. }
            | Self::NotNetvm { .. }
            | Self::Version { .. }
            | Self::Refused { .. }
            | Self::OutcomeUnknown { .. }
            | Self::NeedsSecret { .. }
            | Self::WrongSecret { .. }
            | Self::NoSecret { .. }
            | Self::NoEncryption { .. }
            | Self::Protocol { .. }
            | Self::Bounds { .. }
            | Self::NameTaken { .. }
            | Self::System { .. }
            | Self::Pager(_)
            | Self::Other(_) => false,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { address, reason } => {
                write!(f, "cannot use the address {address:?}: {reason}; write HOST:PORT or unix:/path")
            }
            Self::Connect { lender, reason } => write!(
                f,
                "cannot connect to {lender}: {reason}; is a lender (`netvm lend --listen {lender}`) or a node listening there?"
            ),
            Self::Listen { address, reason } => {
                write!(f, "cannot listen at {address}: {reason}; choose another --listen address")
            }
            Self::NotNetvm { lender } => {
                write!(f, "{lender} answers, but not in netvm's protocol; check the address and the port")
            }
            Self::Version { lender, theirs, theirs_min, .. } => write!(
                f,
                "{lender} speaks protocol versions {theirs_min} to {theirs}, this netvm speaks {VERSION}; \
                 install the same netvm on both machines"
            ),
            Self::Refused { lender, reason } => write!(f, "{lender} refused the connection: {reason}"),
            Self::NeedsSecret { lender } => write!(
                f,
                "{lender} serves only who knows its secret; copy its secret file here and name it with --secret FILE \
                 (or NETVM_SECRET_FILE)"
            ),
            Self::WrongSecret { lender } => write!(
                f,
                "{lender} has another secret than we have, or somebody alters what we send; \
                 copy its secret file here and name it with --secret FILE"
            ),
            Self::NoSecret { lender } => write!(
                f,
                "{lender} cannot prove that it knows our secret: it has none, or somebody answers in its place; \
                 start it with the same --secret FILE"
            ),
            Self::NoEncryption { lender } => write!(
                f,
                "{lender} and we do not agree on encryption: one side insists on it and the other does not encrypt"
            ),
            Self::Timeout { lender, what, after_ms } => write!(
                f,
                "{lender} has not answered for {:.1} s (waiting for {what}); is it stopped or the network down?",
                *after_ms as f64 / 1000.0
            ),
            Self::LenderFull { lender, size_bytes, used_bytes, limit: LenderLimit::Quota } => write!(
                f,
                "lender {lender} lends this borrower no more than {} MiB, and {} MiB are lent; start it with a larger --quota, or add \
                 another --lender",
                size_bytes >> 20,
                used_bytes >> 20
            ),
            Self::LenderFull { lender, used_bytes, limit: LenderLimit::Disk, .. } => write!(
                f,
                "the disk of lender {lender} is full: {} MiB of it are lent; make room on it, or add another --lender",
                used_bytes >> 20
            ),
            Self::LenderFull { lender, size_bytes, used_bytes, limit: LenderLimit::Memory } => write!(
                f,
                "lender {lender} has lent {} of the {} MiB that it lends at most, and what they hold does not shrink enough for more; start it with \
                 a larger --size, or add another --lender or --file FOLDER",
                used_bytes >> 20,
                size_bytes >> 20
            ),
            Self::LenderFull { lender, size_bytes, used_bytes, limit: LenderLimit::Size } => write!(
                f,
                "lender {lender} is full: {} of its {} MiB are lent; start it with a larger --size (or --lend-up-to, if it packs), or add another \
                 --lender or --file FOLDER",
                used_bytes >> 20,
                size_bytes >> 20
            ),
            Self::Cut { peer, reason } => write!(
                f,
                "the transfer with {peer} was cut: {reason}; start it again on both sides, and it goes on where it ended"
            ),
            Self::LenderLost { lender, reason } => write!(
                f,
                "lost the connection to {lender}: {reason}; what was under way there has failed, and memory that it lent is gone"
            ),
            Self::OutcomeUnknown { lender, what, reason } => {
                write!(
                    f,
                    "{lender} may or may not have executed a {what}: {reason}; read the word before you try again"
                )
            }
            Self::Protocol { lender, reason } => write!(
                f,
                "{lender} broke the protocol: {reason}; is the same netvm installed on both machines?"
            ),
            Self::Op { lender, what, code } => write!(f, "{lender} refused a {what}: {code}"),
            Self::WouldBlock { lender } => {
                write!(f, "too much is under way to {lender}; wait for some of it, then try again")
            }
            Self::StillUsed { segment, taken_back, after_ms } => write!(
                f,
                "segment {segment:?} is {} after {:.1} s: a peer's operation is in the middle of it, and waits for a page that does \
                 not come or was stopped; keep the memory, and unexport it again",
                if *taken_back { "taken back but still used" } else { "still exported" },
                *after_ms as f64 / 1000.0
            ),
            Self::Bounds { offset, bytes, len } => {
                write!(f, "{bytes} bytes at offset {offset} reach beyond the end of the memory ({len} bytes)")
            }
            Self::NameTaken { name } => write!(f, "something named {name:?} is exported already"),
            Self::System { what, errno } => write!(f, "cannot {what}: {errno}"),
            Self::Pager(error) => error.fmt(f),
            Self::Other(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Error {}

/// What keeps a lender from lending another slab.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LenderLimit {
    /// All that it lends is lent.
    #[default]
    Size,
    /// It lends more, but not to this borrower: the numbers are the borrower's.
    Quota,
    /// It lends from a file, or keeps what does not shrink in one, and the disk is full.
    Disk,
    /// It packs pages, and those that it has do not shrink enough for more.
    Memory,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_peer_and_what_to_do() {
        let full = Error::LenderFull {
            lender: "h:1".into(),
            size_bytes: 64 << 20,
            used_bytes: 48 << 20,
            limit: LenderLimit::Size,
        };
        assert_eq!(
            full.to_string(),
            "lender h:1 is full: 48 of its 64 MiB are lent; start it with a larger --size (or --lend-up-to, if it packs), or add another \
             --lender or --file FOLDER"
        );
        assert_eq!(full.scope(), Scope::Op);
        let lost = Error::LenderLost { lender: "h:1".into(), reason: "it closed the connection".into() };
        let timeout = Error::Timeout { lender: "h:1".into(), what: "a read", after_ms: 4500 };
        for error in [lost, timeout] {
            let text = error.to_string();
            assert!(text.contains("h:1") && !text.contains("lender"), "it may be any peer: {text}");
        }
        let system = Error::system("map memory", &io::Error::from_raw_os_error(libc::ENOMEM));
        assert!(system.to_string().starts_with("cannot map memory: Cannot allocate memory"));
        assert!(!system.is_retryable());
    }
}
