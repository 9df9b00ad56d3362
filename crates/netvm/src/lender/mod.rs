//! Lending memory: a lender serves slabs, borrowers read and write them one-sidedly.

mod borrower;
mod clearing;
mod comeback;
mod memories;
mod nearby;
mod options;
mod packing;
mod patience;
mod pressure;
mod protocol;
mod reader;
mod recall;
mod server;
mod stop;
mod tickets;

pub use crate::shm::LinkChoice;
pub(crate) use borrower::Asked;
pub use borrower::{Borrower, BorrowerParts, status, status_with};
pub(crate) use comeback::{Comeback, RETRY};
pub(crate) use nearby::{Lease, Place};
pub use netvm_core::endpoint::PostError;
pub use netvm_core::slab::datagram::Counts as DatagramCounts;
pub use options::{BorrowOptions, Completion, ForkTicket};
pub(crate) use patience::{Debt, Ear, HEARD, Patience, SILENCE};
pub use pressure::tells_pressure;
pub use protocol::{BorrowerStatus, Class, LenderStatus, Recall};
pub use reader::probe_kernel_reads;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use server::fuzzing::{fuzz, fuzz_status};
pub use server::{Compress, Lender, LenderConfig};
pub use stop::StopFlag;

/// What the kernel module calls a lender for: ATTACH and BORROW.
#[cfg(test)]
pub(crate) const METHODS: (u32, u32) = (protocol::ATTACH, protocol::BORROW);
/// Bytes that a lender answers BORROW with.
#[cfg(test)]
pub(crate) const BORROW_ANSWER_BYTES: usize = protocol::BorrowAnswer::BYTES;
