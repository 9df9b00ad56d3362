//! netvm's protocol and policies as pure state machines: no sockets, no clock, no memory but their own.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;

pub mod atomic;
pub mod channel;
pub mod combine;
pub mod copy;
pub mod endpoint;
pub mod epoch;
pub mod files;
pub mod gate;
pub mod heap;
pub mod key;
pub mod limits;
pub mod notify;
pub mod observe;
pub mod opening;
pub mod pulse;
pub mod ranges;
pub mod recall;
pub mod residency;
pub mod segment;
pub mod sim;
pub mod slab;
pub mod sync;
pub mod tier;
pub mod volume;
pub mod wire;
pub mod words;
