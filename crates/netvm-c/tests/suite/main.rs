//! The C interface as its users meet it: installed, found by pkg-config, compiled and run.

mod agree;
mod common;
mod programs;
