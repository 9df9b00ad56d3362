//! How to borrow, and what comes of it.

use std::time::Duration;

use crate::error::Result;
use crate::security::Security;
use crate::shm::LinkChoice;

/// How to borrow.
#[derive(Clone, Debug)]
pub struct BorrowOptions {
    /// Name under which the lender lists this borrower.
    pub name: String,
    /// Process to list; this one if `None`.
    pub pid: Option<u32>,
    /// How long to try to connect.
    pub connect_timeout: Duration,
    /// How long a blocking call waits for the lender's answer.
    pub call_timeout: Duration,
    /// The secret to prove, and whether to encrypt.
    pub security: Security,
    /// Whether a lender on this host is read and written without it.
    pub link: LinkChoice,
    /// Whether reads of one or two pages may be asked for by datagrams, by who can tell a page that is wrong: some may be.
    /// Not over encrypted connections, unless what is written there is encrypted anyway ([`BorrowOptions::seals`]).
    pub datagrams: bool,
    /// What is written has been encrypted by who writes it.
    pub seals: bool,
}

impl Default for BorrowOptions {
    fn default() -> Self {
        Self {
            name: String::new(),
            pid: None,
            connect_timeout: Duration::from_secs(4),
            call_timeout: Duration::from_secs(4),
            security: Security::default(),
            link: LinkChoice::Auto,
            datagrams: false,
            seals: false,
        }
    }
}

/// An operation has ended.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The number it was posted under.
    pub token: u64,
    /// How it ended.
    pub result: Result<()>,
    /// What [`super::Borrower::post_borrow`] got.
    pub slab: Option<u32>,
    /// What was read came by datagrams ([`BorrowOptions::datagrams`]): if it is wrong it is to be read again, and nobody is to blame.
    pub unsure: bool,
}

/// A claim to a copy of a lease: plain data, good for one [`super::Borrower::adopt`] within ten seconds, in any process.
#[derive(Clone)]
pub struct ForkTicket {
    pub(super) lender: String,
    /// Where it was reached.
    pub(super) at: String,
    pub(super) ticket: [u8; 16],
    /// By which the lender is told from others.
    pub(super) identity: Option<[u8; 16]>,
    pub(super) security: Security,
}

impl std::fmt::Debug for ForkTicket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Who has the ticket's number may claim the lease.
        f.debug_struct("ForkTicket").field("lender", &self.lender).finish_non_exhaustive()
    }
}
