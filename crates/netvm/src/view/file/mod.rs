//! A volume as one file, by FUSE. docs/design/swap.md has the whole.

mod proto;
mod server;

pub use super::places::{IN_FLIGHT_MAX, REQUEST_BYTES_MAX};
pub use server::FileServer;
