//! A link that misbehaves on purpose.

use std::io;
use std::os::fd::BorrowedFd;

use super::{Caps, Incoming, Link, Outgoing};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// At most this many bytes per send and per receive.
    Short(usize),
    /// The link breaks after this many bytes received.
    CutAfter(u64),
}

/// Wraps a link and adds a fault.
#[derive(Debug)]
pub struct Faulty<L> {
    link: L,
    fault: Fault,
    received: u64,
}

impl<L: Link> Faulty<L> {
    /// `link` with `fault`.
    pub fn new(link: L, fault: Fault) -> Self {
        Self { link, fault, received: 0 }
    }
}

impl<L: Link> Link for Faulty<L> {
    fn caps(&self) -> Caps {
        Caps { name: "faulty", ..self.link.caps() }
    }

    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        let Fault::Short(bytes) = self.fault else { return self.link.post(pieces) };
        let mut some = vec![0; bytes.max(1)];
        let count = pieces.gather(0, &mut some)?;
        let mut short = Outgoing::new();
        short.bytes(&some[..count]);
        self.link.post(&short)
    }

    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        match self.fault {
            Fault::Short(bytes) => pieces.truncate(bytes.max(1).min(pieces.total_bytes())),
            Fault::CutAfter(bytes) => {
                let left = bytes - self.received;
                if left == 0 {
                    return Err(io::ErrorKind::ConnectionReset.into());
                }
                let left = usize::try_from(left).unwrap_or(usize::MAX);
                pieces.truncate(left.min(pieces.total_bytes()));
            }
        }
        let received = self.link.poll(pieces)?;
        self.received += received as u64;
        Ok(received)
    }

    fn has_unsent(&self) -> bool {
        self.link.has_unsent()
    }

    fn flush(&mut self) -> io::Result<()> {
        self.link.flush()
    }

    fn has_received(&self) -> bool {
        self.link.has_received()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.link.wait_fd()
    }
}
