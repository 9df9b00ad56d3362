//! netvm's protocol and policies as pure state machines: no sockets, no clock, no memory but their own.
#![no_std]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

extern crate alloc;

pub mod residency;
