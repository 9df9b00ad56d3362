//! A volume as a network block device. docs/design/block.md has the whole; the protocol is
//! <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>.

mod buffers;
mod client;
mod disk;
mod negotiation;
mod proto;
mod server;
mod tls;

pub use disk::NbdDisk;
pub use server::{NbdConfig, NbdServer, Notice};
pub use tls::TlsFiles;

/// Bytes of a client that has just connected.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz_negotiation(bytes: &[u8]) {
    negotiation::fuzz(bytes);
}
