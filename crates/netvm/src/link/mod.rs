//! The waist: what a session needs of a transport.
//!
//! A link is an ordered, reliable stream of bytes to one peer with scatter and gather. Everything above it (sessions, lenders,
//! nodes) works on any link; everything below it (sockets, loopback) knows nothing of frames.
//!
//! A link does **not** promise that a send arrives, that bytes arrive in the pieces they were sent in, that a peer is alive, or
//! secrecy (one that is sealed does). It never blocks, and it does not allocate once it is warm.

pub(crate) mod auth;
#[cfg(test)]
mod auth_tests;
mod delayed;
mod faulty;
pub(crate) mod greeting;
mod loopback;
pub(crate) mod paused;
pub(crate) mod sealed;
pub(crate) mod session;
pub(crate) mod spin;
#[doc(hidden)]
pub use spin::switch_looking_off;
#[cfg(test)]
mod suite;
pub(crate) mod together;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

pub use delayed::Delayed;
pub use faulty::{Fault, Faulty};
pub use loopback::Loopback;
pub use netvm_sys::net::{Incoming, Outgoing, Stream};

/// What a link is good at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Short name.
    pub name: &'static str,
    /// The peer may be on another machine.
    pub remote: bool,
}

/// One connection to one peer.
pub trait Link: Send {
    /// What it is good at.
    fn caps(&self) -> Caps;

    /// Sends what the link takes now; returns how many bytes, at least one.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing now; anything else ends the link.
    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize>;

    /// Receives what is there into the pieces, in order; returns how many bytes, 0 when the peer has ended the stream.
    ///
    /// # Errors
    /// `WouldBlock` when there is nothing now; anything else ends the link.
    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize>;

    /// Whether `post` has taken bytes that are still to be sent: wait for room, then call [`Link::flush`].
    fn has_unsent(&self) -> bool {
        false
    }

    /// Sends what `post` has taken.
    ///
    /// # Errors
    /// As `post`.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Whether `poll` would return bytes of which the descriptor does not tell.
    fn has_received(&self) -> bool {
        false
    }

    /// A descriptor that is readable while `poll` would return something, and writable while `post` would take something.
    fn wait_fd(&self) -> BorrowedFd<'_>;
}

impl Link for Stream {
    fn caps(&self) -> Caps {
        Caps { name: if self.is_tcp() { "tcp" } else { "unix" }, remote: self.is_tcp() }
    }

    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        self.send(pieces)
    }

    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        self.receive(pieces)
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
}

impl Link for Box<dyn Link> {
    fn caps(&self) -> Caps {
        (**self).caps()
    }

    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        (**self).post(pieces)
    }

    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        (**self).poll(pieces)
    }

    fn has_unsent(&self) -> bool {
        (**self).has_unsent()
    }

    fn flush(&mut self) -> io::Result<()> {
        (**self).flush()
    }

    fn has_received(&self) -> bool {
        (**self).has_received()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        (**self).wait_fd()
    }
}

/// For tests.
#[cfg(test)]
pub(crate) fn connect(address: &netvm_sys::net::Address) -> Stream {
    together::alone(async |wait| greeting::dial(wait, address, std::time::Duration::from_secs(1)).await)
        .unwrap()
}
