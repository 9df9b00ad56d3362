//! The C interface of netvm: `include/netvm.h` documents it for those who use it, docs/design/c-api.md for those who change it.
//!
//! Every exported function is safe Rust: what C hands over are the wrappers of `ffi`, the one file that follows pointers.
//! `call::call` keeps panics in and remembers the message of an error.
#![warn(missing_docs)]

mod atomic;
mod blocks;
mod board;
mod call;
mod channel;
pub mod code;
mod copy;
mod ffi;
mod lasting;
pub mod layout;
mod memory;
mod node;
mod pager;
mod posted;
mod region;
mod sync;

pub use board::Signal;
pub use channel::{Buffer, Received};
pub use memory::Place;
pub use node::{ConnectOptions, NodeOptions};
pub use pager::{FarCounts, LenderState, PagerOptions, Stat};
pub use posted::{Counts, PostOptions};
pub use region::{Piece, RegionInfo};
