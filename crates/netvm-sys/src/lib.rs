//! The audited unsafe code of netvm: memory that others may change, mappings, userfaultfd, descriptors, threads.
#![warn(missing_docs)]

pub mod allocator;
mod before;
pub mod bench_floor;
pub mod bench_sigbus;
pub mod cpu;
pub mod descendants;
pub mod device;
pub mod direct;
pub mod epoll;
pub mod fdpass;
pub mod filemap;
pub mod fuse;
pub mod guarded;
pub mod local;
pub mod mapping;
pub mod membarrier;
pub mod memfd;
pub mod nbd;
pub mod net;
pub mod paged;
pub mod pagehash;
pub mod process;
pub mod raw;
pub mod residency;
pub mod shared;
pub mod sigbus;
pub mod signal;
pub mod slow;
pub mod swap;
pub mod table;
pub mod thread;
mod together;
pub mod ublk;
pub mod uffd;
pub mod words;
