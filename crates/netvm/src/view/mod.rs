//! Volumes as others want to see them.

pub mod file;
pub mod nbd;
