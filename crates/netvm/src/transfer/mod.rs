//! Files and folders to another machine: docs/design/transfer.md.
//!
//! ```no_run
//! # fn main() -> netvm::Result<()> {
//! use netvm::transfer::{ReceiveOptions, Receiver, SendOptions, send};
//!
//! // One process receives,
//! let receiver = Receiver::bind("target".as_ref(), ReceiveOptions::default())?;
//! let address = receiver.address();
//! receiver.run(&mut |_| {})?;
//!
//! // another one sends.
//! let summary = send(&["photos".into()], &address, &SendOptions::default(), &mut |_| {})?;
//! println!("{} files", summary.files);
//! # Ok(()) }
//! ```

mod device;
mod digest;
mod extents;
mod folder;
mod frames;
mod lanes;
mod onesided;
mod pieces;
mod receiver;
mod sender;
mod sink;
mod source;
mod wire;

use std::time::Duration;

use crate::error::Error;
use crate::security::{Encryption, Protection, Security};
use crate::shm::LinkChoice;
pub use receiver::Receiver;
pub use sender::send;

/// How bytes get from a file to the connection, or from the connection to a file. The two sides need not agree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// Read and written through a buffer.
    #[default]
    Copy,
    /// The file is mapped; the kernel copies between its pages and the connection.
    Mmap,
    /// The kernel moves pages: sendfile(2), splice(2). Not for encrypted connections.
    Sendfile,
    /// The sender writes into the receiver's mapped file, one-sidedly: on one host, without a connection. The sender's choice alone.
    OneSided,
    /// The same by the kernel module: the receiver's file is a device of this machine, which is written as a file. Needs root and
    /// `netvm_mem`. The sender's choice alone.
    Device,
}

impl Method {
    /// Whether the sender writes into the receiver's file.
    fn is_one_sided(self) -> bool {
        matches!(self, Self::OneSided | Self::Device)
    }

    /// Before anybody connects or waits: the kernel neither encrypts nor decrypts what it moves by itself.
    fn check(self, security: &Security) -> Result<(), Error> {
        if self == Self::Sendfile && security.encryption == Encryption::Always {
            let error = "the method sendfile is not for encrypted connections: the kernel moves bytes as they are; use the method copy or mmap";
            return Err(Error::Other(error.to_owned()));
        }
        Ok(())
    }
}

/// What goes over the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Framing {
    /// Names, permissions, times, holes and digests; goes on where it ended.
    #[default]
    Full,
    /// Of each file its length, 8 bytes big-endian, and its bytes: nothing else.
    Simple,
}

/// How to send.
#[derive(Clone, Debug)]
pub struct SendOptions {
    /// How files are read.
    pub method: Method,
    /// What goes over the connection.
    pub framing: Framing,
    /// The receiver checks a digest of each file.
    pub check: bool,
    /// Who may receive.
    pub security: Security,
    /// For so long a connection is tried.
    pub connect_timeout: Duration,
    /// What carries the bytes of [`Method::OneSided`].
    pub link: LinkChoice,
    /// Connections that carry the bytes of long files, 1 to 16; `None` is one. Not for one-sided methods and [`Framing::Simple`].
    pub streams: Option<usize>,
}

impl Default for SendOptions {
    fn default() -> Self {
        Self {
            method: Method::default(),
            framing: Framing::default(),
            check: true,
            security: Security::default(),
            connect_timeout: Duration::from_secs(5),
            link: LinkChoice::default(),
            streams: None,
        }
    }
}

/// How to receive.
#[derive(Clone, Debug)]
pub struct ReceiveOptions {
    /// `HOST:PORT` or `unix:/path`.
    pub listen: String,
    /// How files are written.
    pub method: Method,
    /// What the sender must speak.
    pub framing: Framing,
    /// Files that are there already are replaced.
    pub overwrite: bool,
    /// Who may send.
    pub security: Security,
}

impl Default for ReceiveOptions {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:0".to_owned(),
            method: Method::default(),
            framing: Framing::default(),
            overwrite: false,
            security: Security::default(),
        }
    }
}

/// How far a transfer has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of all files, as far as it is known.
    pub total_bytes: u64,
    /// Bytes of files that need no more work.
    pub done_bytes: u64,
    /// The file that is under way, fit for a terminal.
    pub name: String,
    /// Why the last one that connected was turned away, if one was: only a receiver has such.
    pub turned_away: Option<&'static str>,
}

/// What a transfer has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Files that were sent, whole or in part.
    pub files: u64,
    /// Files that were there already, with the same content.
    pub there: u64,
    /// Files that were not sent because something else has their name at the receiver.
    pub kept: u64,
    /// Those of them where this is a folder, which no file replaces. Only the receiver knows.
    pub kept_folders: u64,
    /// Links, devices and the like, which are not sent.
    pub left_out: u64,
    /// Bytes of the sent files.
    pub bytes: u64,
    /// Bytes that went over the connection for them: no holes, and nothing that was there already.
    pub moved_bytes: u64,
    /// Digests of all sent files were equal.
    pub checked: bool,
    /// What protected the connection.
    pub protection: Protection,
    /// What carried bytes that were written one-sidedly (`device`: the kernel module); empty if none were.
    pub link: &'static str,
    /// Connections that carried bytes of one file at once.
    pub streams: usize,
    /// From the first message to the last.
    pub elapsed: Duration,
}

/// Is told how far it is.
pub type Observer<'a> = &'a mut dyn FnMut(&Progress);

/// In hellos: simple framing.
const FEATURE_SIMPLE: u64 = 1;
/// And: files may be written one-sidedly.
const FEATURE_ONE_SIDED: u64 = 2;
/// And: it belongs to another connection.
const FEATURE_LANE: u64 = 4;
/// And: more connections may follow.
const FEATURE_LANES: u64 = 8;
/// Bytes that are moved in one step.
const STEP_BYTES: usize = 256 << 10;

fn about(what: &str, name: impl std::fmt::Display, error: &std::io::Error) -> Error {
    Error::Other(format!("cannot {what} {name}: {error}"))
}
