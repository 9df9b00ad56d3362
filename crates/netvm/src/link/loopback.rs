//! Two ends in one process: the smallest link, and the one to read first.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use netvm_sys::epoll::EventFd;

use super::{Caps, Incoming, Link, Outgoing};
use crate::error::{Error, Result};

/// Bytes on their way in one direction before the sender must wait.
const PIPE_BYTES_MAX: usize = 256 << 10;

/// One direction.
#[derive(Debug)]
struct Pipe {
    bytes: Mutex<(VecDeque<u8>, bool)>,
    /// Readable while there are bytes to take, or no more will come.
    filled: EventFd,
}

impl Pipe {
    fn lock(&self) -> MutexGuard<'_, (VecDeque<u8>, bool)> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One end of a loopback link.
#[derive(Debug)]
pub struct Loopback {
    outgoing: Arc<Pipe>,
    incoming: Arc<Pipe>,
}

impl Loopback {
    /// Two ends of one link. Its descriptor does not tell when there is room again: senders ask again soon.
    ///
    /// # Errors
    /// [`Error::System`] when no descriptor is left.
    pub fn pair() -> Result<(Self, Self)> {
        let pipe = || -> Result<_> {
            let filled = EventFd::new().map_err(|error| Error::system("make an event descriptor", &error))?;
            Ok(Arc::new(Pipe { bytes: Mutex::new((VecDeque::new(), false)), filled }))
        };
        let (one, two) = (pipe()?, pipe()?);
        Ok((Self { outgoing: one.clone(), incoming: two.clone() }, Self { outgoing: two, incoming: one }))
    }
}

impl Link for Loopback {
    fn caps(&self) -> Caps {
        Caps { name: "loopback", remote: false }
    }

    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        let mut pipe = self.outgoing.lock();
        let (bytes, closed) = &mut *pipe;
        if *closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let room = (PIPE_BYTES_MAX - bytes.len()).min(pieces.total_bytes());
        if room == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let start = bytes.len();
        bytes.resize(start + room, 0);
        let taken = pieces.gather(0, &mut bytes.make_contiguous()[start..]);
        bytes.truncate(start + taken.as_ref().map_or(0, |taken| *taken));
        let taken = taken?;
        self.outgoing.filled.signal();
        Ok(taken)
    }

    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        let mut pipe = self.incoming.lock();
        let (bytes, closed) = &mut *pipe;
        let (head, tail) = bytes.as_slices();
        let mut taken = pieces.scatter(0, head)?;
        if taken == head.len() {
            taken += pieces.scatter(taken, tail)?;
        }
        bytes.drain(..taken);
        if taken == 0 && !*closed {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if bytes.is_empty() && !*closed {
            self.incoming.filled.take();
        }
        Ok(taken)
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.incoming.filled.as_fd()
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        for pipe in [&self.outgoing, &self.incoming] {
            pipe.lock().1 = true;
            pipe.filled.signal();
        }
    }
}
