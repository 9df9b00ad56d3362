//! Volumes as others want to see them.

pub mod file;
pub mod mount;
pub mod nbd;
mod places;
mod rehearsal;
pub mod ublk;
