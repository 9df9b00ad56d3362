//! Volumes as others want to see them.

pub mod nbd;
