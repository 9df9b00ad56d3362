//! What can go wrong with far memory itself.

use super::erasure::Erasure;
use super::{AREA_BYTES_MAX, LENDER_TIMEOUT_MIN, LOCAL_BYTES_MAX};
use crate::error::Errno;
use netvm_core::residency::COPIES_MAX;
use std::any::Any;
use std::fmt;
use std::time::Duration;

/// A failure of the pager.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PagerError {
    /// The kernel or its settings do not permit userfaultfd in full mode.
    Userfaultfd(Errno),
    /// The addresses for far memory and its tables cannot be reserved.
    Reserve {
        /// Bytes of far memory asked for.
        bytes: u64,
        /// Why not.
        errno: Errno,
    },
    /// More addresses than a pager has page numbers for.
    AreaTooLarge {
        /// Bytes of far memory asked for.
        bytes: u64,
    },
    /// There would be fewer addresses than local memory.
    AreaTooSmall {
        /// Bytes of far memory asked for.
        bytes: u64,
        /// The local budget in bytes.
        local_bytes: u64,
    },
    /// The local budget is too small to work with.
    LocalTooSmall {
        /// The budget in bytes.
        bytes: u64,
        /// The least that works.
        min_bytes: u64,
    },
    /// Lenders would be given up that only take the time they need.
    LenderTimeout {
        /// What was asked for.
        timeout: Duration,
    },
    /// The pager's thread cannot be pinned to this CPU.
    Cpu {
        /// Its number.
        cpu: usize,
        /// Why not.
        errno: Errno,
    },
    /// There are no numbers for so many local pages.
    LocalTooLarge {
        /// The budget, or how far it may be raised, in bytes.
        bytes: u64,
    },
    /// Memory cannot be aligned so, or so much of it.
    Alignment {
        /// How much was asked for.
        bytes: usize,
        /// At a multiple of what.
        alignment: usize,
    },
    /// There is no block of far memory at this address, or it has been given back.
    NotABlock {
        /// The address.
        address: usize,
    },
    /// A pager does not end while its far memory is in use.
    InUse,
    /// A pin ends that nobody has begun.
    NotPinned {
        /// A page of it that is not pinned.
        address: usize,
    },
    /// A child of a fork has no far memory of its parent's.
    Forked,
    /// There is no local memory left for the pager's first frames.
    NoLocalMemory(Errno),
    /// No lender was named.
    NoLender,
    /// So many replicas are not possible.
    Replicas {
        /// How many were asked for.
        replicas: usize,
        /// How many lenders there are.
        lenders: usize,
        /// A lender that is named twice.
        twice: Option<String>,
    },
    /// So many parts are not possible.
    Erasure {
        /// How many were asked for.
        erasure: Erasure,
        /// How many lenders there are.
        lenders: usize,
        /// A lender that is named twice.
        twice: Option<String>,
    },
    /// Two addresses are those of one lender: who loses it loses more than one copy, or part, of each page.
    SameLender([String; 2]),
    /// Pages in parts have no replicas.
    ReplicasOfParts,
    /// Of these pages too few parts are left.
    PartsLost {
        /// How many pages.
        pages: u64,
        /// How many parts of each are needed.
        need: usize,
        /// What happened to the lenders, naming each.
        why: String,
    },
    /// Parts of a page make another page than was written, and there are too few to tell whose is wrong.
    PartsCorrupt {
        /// Addresses of the lenders that have them.
        lenders: String,
    },
    /// Every lender that had these pages is lost.
    CopiesLost {
        /// How many.
        pages: u64,
        /// What happened to the lenders, naming each.
        why: String,
    },
    /// No page can leave: of the lenders that are there none has room, or they are too few.
    TooFewLenders {
        /// What happened to the others, naming each, and who has no room.
        why: String,
    },
    /// A lender's slabs are smaller than 64 pages.
    SlabTooSmall {
        /// Address of the lender.
        lender: String,
        /// Its slab size in bytes.
        bytes: u64,
    },
    /// More far memory than slot numbers (16 TiB).
    SlotsExhausted,
    /// The range is not far memory, or not on page boundaries.
    OutsideFarMemory {
        /// First address.
        address: usize,
        /// Length in bytes.
        bytes: usize,
    },
    /// No addresses are left for so much more far memory.
    AreaFull {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes of addresses that were reserved.
        area_bytes: usize,
    },
    /// A page came back from a lender with other contents than were written.
    PageCorrupt {
        /// Address of the lender.
        lender: String,
    },
    /// A packed page did not unpack to what it was: this machine's memory is faulty, or something wrote to it.
    PackedCorrupt {
        /// Address of the page.
        address: usize,
    },
    /// The budget cannot be changed to this.
    BudgetRange {
        /// Bytes asked for.
        bytes: u64,
        /// The least that works now, with what is pinned.
        min_bytes: u64,
        /// The most that was provided for.
        max_bytes: u64,
    },
    /// Faults cannot be served like that.
    FaultPath {
        /// Why not.
        why: &'static str,
    },
    /// Pages cannot come and go like that.
    FrameDesign {
        /// Why not.
        why: &'static str,
    },
    /// The far memory cannot be divided among so many pagers.
    Shards {
        /// How many were asked for.
        shards: usize,
        /// Why not.
        why: &'static str,
    },
    /// More would be pinned than the budget has room for.
    PinnedTooMuch {
        /// Bytes pinned with these.
        bytes: u64,
        /// The most that can be.
        max_bytes: u64,
    },
    /// No such pages.
    PageSize {
        /// Bytes asked for.
        bytes: usize,
    },
    /// A mistake in the pager itself: what the panic said.
    Panicked(String),
    /// Nearly all local pages are pinned by the kernel for I/O.
    LocalExhausted {
        /// Pages that could not be taken out.
        pages: u64,
    },
    /// A page that must be moved is pinned by the kernel for I/O.
    PagePinned {
        /// Its address.
        address: usize,
    },
}

impl fmt::Display for PagerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Userfaultfd(errno) => write!(
                f,
                "userfaultfd may not be used here ({errno}); as root run `sysctl vm.unprivileged_userfaultfd=1`, or give this \
                 user access to /dev/userfaultfd, or CAP_SYS_PTRACE; `netvm doctor` tells more"
            ),
            Self::Reserve { bytes, errno } => write!(
                f,
                "cannot reserve {} GiB of addresses for far memory, and its page table ({errno}); check `ulimit -v`, `ulimit -d` and \
                 vm.overcommit_memory, or give a smaller --area",
                bytes >> 30
            ),
            Self::AreaTooLarge { bytes } => write!(
                f,
                "{} GiB of addresses are too many for the far memory of one process: give less than {} TiB",
                bytes >> 30,
                AREA_BYTES_MAX.div_ceil(1 << 40)
            ),
            Self::AreaTooSmall { bytes, local_bytes } => write!(
                f,
                "{local_bytes} bytes of local memory are more than {bytes} bytes of far memory have addresses for: give less, or a larger area"
            ),
            Self::LenderTimeout { timeout } => write!(
                f,
                "a lender that has not answered for {timeout:?} may be well; give it at least {LENDER_TIMEOUT_MIN:?}"
            ),
            Self::Cpu { cpu, errno } => {
                write!(f, "the pager cannot be pinned to CPU {cpu}, which this process may not use: {errno}")
            }
            Self::LocalTooSmall { bytes, min_bytes } => write!(
                f,
                "a local budget of {} KiB is too small to work with; give at least {} MiB",
                bytes >> 10,
                min_bytes >> 20
            ),
            Self::LocalTooLarge { bytes } => write!(
                f,
                "a local budget of {} GiB is more than a pager has: give less than {} GiB",
                bytes >> 30,
                (LOCAL_BYTES_MAX >> 30) + 1
            ),
            Self::Alignment { bytes, alignment } => {
                write!(f, "{bytes} bytes at a multiple of {alignment} cannot be: give a power of two, and less")
            }
            Self::NotABlock { address } => {
                write!(f, "{address:#x} is no block of far memory, or has been freed")
            }
            Self::InUse => f.write_str("far memory is in use: give it back before its pager is to end"),
            Self::NotPinned { address } => {
                write!(f, "the page at {address:#x} is not pinned: unpin what was pinned, as often")
            }
            Self::Forked => f.write_str(
                "this is the child of a fork, which has none of its parent's far memory: make a pager of its own",
            ),
            Self::NoLocalMemory(errno) => {
                write!(f, "this machine has no memory left for local pages ({errno})")
            }
            Self::NoLender => f.write_str("no lender is given: name one (--lender ADDR, lenders)"),
            Self::Replicas { replicas, twice: Some(lender), .. } => {
                write!(f, "lender {lender} is named twice: {replicas} replicas must be on different lenders")
            }
            Self::Replicas { replicas, lenders, .. } => write!(
                f,
                "{replicas} replicas on {lenders} lender(s) are not possible: give 1 to {COPIES_MAX} replicas, and as many lenders at least"
            ),
            Self::Erasure { erasure, twice: Some(lender), .. } => {
                write!(
                    f,
                    "lender {lender} is named twice: the parts of {erasure} must be on different lenders"
                )
            }
            Self::Erasure { erasure, lenders, .. } => write!(
                f,
                "erasure coding {erasure} needs {} lenders, and there are {lenders}: give more of them, or fewer parts",
                erasure.lenders()
            ),
            Self::SameLender([one, other]) => write!(
                f,
                "{one} and {other} are the same lender: what must outlive a lender has to be on different ones"
            ),
            Self::ReplicasOfParts => f.write_str(
                "pages are kept either as replicas or in parts (erasure): give one of the two, not both",
            ),
            Self::PartsLost { pages: 0, need, why } => {
                write!(f, "fewer than {need} lenders are left, and each page needs as many: {why}")
            }
            Self::PartsLost { pages, need, why } => {
                write!(f, "fewer than {need} parts are left of {pages} pages: {why}")
            }
            Self::PartsCorrupt { lenders } => write!(
                f,
                "the parts of a page that lenders {lenders} returned do not make what was written, and there are too few to tell whose \
                 is wrong"
            ),
            Self::CopiesLost { pages: 0, why } => write!(f, "all lenders are lost: {why}"),
            Self::CopiesLost { pages, why } => write!(f, "no copy is left of {pages} pages: {why}"),
            Self::TooFewLenders { why } => write!(f, "no lender is there for more pages: {why}"),
            Self::SlabTooSmall { lender, bytes } => {
                write!(f, "lender {lender} lends slabs of only {bytes} bytes; start it with a larger --slab")
            }
            Self::SlotsExhausted => {
                f.write_str("more than 16 TiB of far memory are in use; that is the limit of one process")
            }
            Self::OutsideFarMemory { address, bytes } => {
                write!(f, "{bytes:#x} bytes at {address:#x} are not a range of far memory")
            }
            Self::AreaFull { bytes: 0, .. } => f.write_str("memory cannot have 0 bytes"),
            Self::AreaFull { bytes, area_bytes } => write!(
                f,
                "there is no room for {bytes} bytes in the {area_bytes} bytes of addresses reserved for far memory"
            ),
            Self::PageCorrupt { lender } => write!(
                f,
                "lender {lender} returned a page that differs from what was written; do not use that machine"
            ),
            Self::PackedCorrupt { address } => {
                write!(
                    f,
                    "the packed page at {address:#x} changed in local memory; test this machine's memory"
                )
            }
            Self::BudgetRange { bytes, min_bytes, max_bytes } if bytes < min_bytes => write!(
                f,
                "the local budget cannot be {} KiB: {} KiB are the least now; unpin memory, or leave more",
                bytes >> 10,
                min_bytes >> 10
            ),
            Self::BudgetRange { bytes, max_bytes, .. } => write!(
                f,
                "the local budget cannot be {} KiB: it was started with {} KiB as its limit (local_bytes_max, local_max)",
                bytes >> 10,
                max_bytes >> 10
            ),
            Self::PinnedTooMuch { bytes, max_bytes } => write!(
                f,
                "{} KiB cannot be pinned at once: three quarters of the local budget can, {} KiB",
                bytes >> 10,
                max_bytes >> 10
            ),
            Self::Shards { shards, why } => write!(f, "{shards} shards are not possible: {why}"),
            Self::FaultPath { why } => {
                write!(f, "faults cannot be served by the threads that fault (fault path in-thread): {why}")
            }
            Self::FrameDesign { why } => write!(f, "the frame design is not possible: {why}; with None the kernel decides"),
            Self::PageSize { bytes } => {
                write!(
                    f,
                    "pages of {bytes} bytes are not supported: it is a power of two from 4096 to 2097152"
                )
            }
            Self::Panicked(said) => write!(f, "the pager has made a mistake, please report it: {said}"),
            Self::LocalExhausted { pages } => write!(
                f,
                "all {pages} local pages are pinned for I/O, or locked by the program (mlock), and none can be evicted; give a larger local budget"
            ),
            Self::PagePinned { address } => {
                write!(f, "the page at {address:#x} is pinned for I/O and cannot be moved")
            }
        }
    }
}

impl std::error::Error for PagerError {}

impl PagerError {
    /// From what a panic carries.
    pub(super) fn panicked(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Self::Panicked(text.unwrap_or("it did not say which").to_owned())
    }
}

/// Wraps a failure of the operating system.
pub(super) fn system(what: &'static str, error: std::io::Error) -> crate::error::Error {
    crate::error::Error::system(what, &error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_panic_said_is_told() {
        let said = |work: fn()| {
            let panic = std::panic::catch_unwind(work).unwrap_err();
            PagerError::panicked(&*panic).to_string()
        };
        let of = |what: &str| format!("the pager has made a mistake, please report it: {what}");
        assert_eq!(said(|| panic!("no page")), of("no page"));
        assert_eq!(
            said(|| panic!("no page {}", std::process::id())),
            of(&format!("no page {}", std::process::id()))
        );
        assert_eq!(said(|| std::panic::panic_any(7)), of("it did not say which"));
    }
}
