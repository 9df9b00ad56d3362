//! Network virtual memory for Linux: use another machine's memory as if it were your own.
//!
//! - [`lender`]: a lender serves slabs of its memory; a borrower reads and writes them one-sidedly.
//! - [`far`]: far memory for collections: more than this machine has, within an exact local budget.
//! - [`pager`]: far memory: addresses whose pages live on lenders.
//! - [`view`]: volumes as block devices.
//! - [`volume`]: a range of bytes on lenders, with replicas, for block devices and files.
//! - [`node`], [`region`], [`atomic`], [`notify`]: one-sided memory between processes: export, import, read, write, change words,
//!   notify and wait.
//! - [`posted`]: the same operations without waiting: handles and completion counters.
//! - [`copy`]: copies between two other nodes.
//! - [`memory`]: what can be exported: allocated, a file, far memory, the program's own.
//! - [`lasting`]: peers that are connected to again when they have come back.
//! - [`sync`]: locks, monitors, semaphores, wait queues, barriers and reductions between processes.
//! - [`channel`]: messages in order, from one process or many, read where they arrived.
//! - [`transfer`]: files and folders to another machine.
//! - [`device`]: lent memory and segments as devices of the kernel module.
//! - [`security`]: secrets that both sides prove to know, and encryption.
//! - [`link`]: the transports below.
//! - [`runfile`], [`stats`]: what the processes of one run share.
#![warn(missing_docs)]

pub mod atomic;
pub mod channel;
mod connection;
mod copier;
pub mod copy;
pub mod detail;
pub mod device;
pub mod error;
pub mod far;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod lasting;
pub mod lender;
pub mod link;
pub mod memory;
pub mod node;
pub mod notify;
pub mod pager;
pub mod posted;
pub mod region;
pub mod runfile;
pub mod security;
mod shm;
pub mod stats;
pub mod sync;
pub mod transfer;
pub mod view;
pub mod volume;

pub use error::{Error, LenderLimit, Result};

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
