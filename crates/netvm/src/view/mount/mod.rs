//! Lent memory and segments as files, by FUSE. docs/design/mount.md has the whole.

mod errno;
mod execute;
mod join;
mod notifier;
mod proto;
mod segment;
mod server;
mod session;

pub use join::{JoinOptions, Joined};
pub use server::{JOINED_MAX, MountConfig, MountServer};

use crate::error::Error;
use crate::volume::Event;

/// In hellos: the order of bytes in the records of this machine's kernel.
const FEATURE_ORDER: u64 = 3 << 8;
const OUR_ORDER: u64 = if cfg!(target_endian = "big") { 2 << 8 } else { 1 << 8 };

fn may_not_mount(error: &std::io::Error) -> Error {
    match error.raw_os_error() {
        Some(_) => Error::system("mount a FUSE file system", error),
        // A sentence, of the program that mounts for users.
        None => Error::Other(format!("cannot mount: {error}")),
    }
}

/// Something that whoever runs a mount should know.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum MountNotice {
    /// What happened to the volume.
    Volume(Event),
    /// A segment did not do what was asked of it.
    Segment(Error),
    /// A process wanted to open the file of memory that it exports itself: mapped, it could wait for itself for ever.
    OfItself {
        /// Its thread that did.
        thread: u32,
    },
    /// A mount has joined.
    Joined {
        /// Where it is.
        peer: String,
        /// It may only read.
        read_only: bool,
    },
    /// A mount that had joined has gone.
    Left {
        /// Where it was.
        peer: String,
        /// Why, if it did not just leave.
        why: Option<String>,
    },
    /// It was unmounted here.
    Unmounted {
        /// Mounts that have joined and still use it.
        joined: usize,
    },
    /// The mount that was joined is lost: all requests fail from now on.
    Lost(Error),
}
