//! A link whose every byte is encrypted and checked.
//!
//! ```text
//!  +-------------+---------------------------------+-----------+
//!  | length (2)  | 1 to 16384 bytes, encrypted     | tag (16)  |   and so on, records numbered from 1 (0 was the hello)
//!  +-------------+---------------------------------+-----------+
//! ```
//! The length (little-endian) counts the bytes between it and the tag, and the tag covers it too. Bytes are encrypted and decrypted
//! where they lie in this link's buffers; on the way between those and their own places they are copied once.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use netvm_core::limits::RECORD_BYTES_MAX;
use netvm_core::opening::TAG_BYTES;

use super::auth::{Keys, RecordKey};
use super::{Caps, Incoming, Link, Outgoing};

const LENGTH_BYTES: usize = 2;
/// A record with all that belongs to it.
const SEALED_BYTES_MAX: usize = LENGTH_BYTES + RECORD_BYTES_MAX + TAG_BYTES;
/// Bytes of records that one send or receive moves.
const BUFFER_BYTES: usize = 6 * SEALED_BYTES_MAX;

const _: () = assert!(RECORD_BYTES_MAX <= u16::MAX as usize);

/// See the module.
pub(crate) struct Sealed<L> {
    link: L,
    seal: RecordKey,
    open: RecordKey,
    /// Records on their way out.
    outgoing: Box<[u8]>,
    unsent: Range<usize>,
    /// Records on their way in.
    incoming: Box<[u8]>,
    /// Received and not opened.
    unopened: Range<usize>,
    /// Opened and not handed on.
    opened: Range<usize>,
    /// Something was altered: nothing after it counts.
    broken: bool,
}

impl<L: Link> Sealed<L> {
    pub(crate) fn new(link: L, keys: Keys) -> Self {
        Self {
            link,
            seal: keys.outgoing,
            open: keys.incoming,
            outgoing: vec![0; BUFFER_BYTES].into(),
            unsent: 0..0,
            incoming: vec![0; BUFFER_BYTES].into(),
            unopened: 0..0,
            opened: 0..0,
            broken: false,
        }
    }

    /// The keys for sending and receiving, and the numbers of the next records, for whoever goes on with the link; none after something was
    /// received or has not been sent.
    pub(crate) fn keys(&self) -> Option<[(&[u8; 32], u64); 2]> {
        let idle = self.unsent.is_empty() && self.unopened.is_empty() && self.opened.is_empty();
        idle.then(|| [self.seal.state(), self.open.state()])
    }

    pub(crate) fn link(&self) -> &L {
        &self.link
    }

    /// Length of the record at the front, with all that belongs to it, as soon as it is known.
    fn front(&self) -> io::Result<Option<usize>> {
        let Some(&[low, high]) = self.incoming[self.unopened.clone()].first_chunk() else { return Ok(None) };
        match usize::from(u16::from_le_bytes([low, high])) {
            len @ 1..=RECORD_BYTES_MAX => Ok(Some(LENGTH_BYTES + len + TAG_BYTES)),
            _ => Err(altered()),
        }
    }

    /// Opens the record at the front; false when it is not all there.
    fn open_front(&mut self) -> io::Result<bool> {
        let Some(bytes) = self.front()?.filter(|&bytes| bytes <= self.unopened.len()) else {
            return Ok(false);
        };
        let (length, record) = self.incoming[self.unopened.start..][..bytes].split_at_mut(LENGTH_BYTES);
        let len = self.open.open(length, record).map_err(|_| altered())?;
        let start = self.unopened.start + LENGTH_BYTES;
        self.opened = start..start + len;
        self.unopened.start += bytes;
        Ok(true)
    }

    /// Receives once; false at the end of the stream.
    fn fill(&mut self) -> io::Result<bool> {
        debug_assert!(self.opened.is_empty());
        if self.unopened.is_empty() {
            self.unopened = 0..0;
        } else if self.unopened.start + SEALED_BYTES_MAX > self.incoming.len() {
            self.incoming.copy_within(self.unopened.clone(), 0);
            self.unopened = 0..self.unopened.len();
        }
        let mut into = Incoming::new();
        into.bytes(&mut self.incoming[self.unopened.end..]);
        let received = self.link.poll(&mut into)?;
        self.unopened.end += received;
        Ok(received > 0)
    }

    fn poll_once(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        let total = pieces.total_bytes();
        let mut taken = 0;
        loop {
            if !self.opened.is_empty() {
                let count = match pieces.scatter(taken, &self.incoming[self.opened.clone()]) {
                    Ok(count) => count,
                    // What comes before it is taken; it is told when it is asked for again.
                    Err(_) if taken > 0 => return Ok(taken),
                    Err(error) => return Err(error),
                };
                self.opened.start += count;
                taken += count;
                if taken == total {
                    return Ok(taken);
                }
            }
            match self.open_front() {
                Ok(true) => continue,
                // What came before it is good.
                Err(_) if taken > 0 => {
                    self.broken = true;
                    return Ok(taken);
                }
                Err(error) => return Err(error),
                Ok(false) if taken > 0 => return Ok(taken),
                Ok(false) => {}
            }
            if !self.fill()? {
                // An end in the middle of a record is an end all the same: no frame is believed to be complete because of it.
                return Ok(0);
            }
        }
    }
}

fn altered() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "encrypted bytes were altered on the way")
}

impl<L: Link> Link for Sealed<L> {
    fn caps(&self) -> Caps {
        Caps { name: "sealed", ..self.link.caps() }
    }

    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        self.flush()?;
        let total = pieces.total_bytes();
        let mut taken = 0;
        while taken < total && self.unsent.is_empty() {
            let mut end = 0;
            while taken < total && end + SEALED_BYTES_MAX <= self.outgoing.len() {
                let len = (total - taken).min(RECORD_BYTES_MAX);
                let (length, rest) = self.outgoing[end..].split_at_mut(LENGTH_BYTES);
                let (bytes, tag) = rest.split_at_mut(len);
                length.copy_from_slice(&(len as u16).to_le_bytes());
                pieces.gather(taken, bytes)?;
                let sealed = self.seal.seal(length, bytes);
                tag[..TAG_BYTES].copy_from_slice(&sealed.ok_or(io::ErrorKind::QuotaExceeded)?);
                taken += len;
                end += LENGTH_BYTES + len + TAG_BYTES;
            }
            self.unsent = 0..end;
            match self.flush() {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
        }
        Ok(taken)
    }

    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        if self.broken {
            return Err(altered());
        }
        let result = self.poll_once(pieces);
        self.broken |= matches!(&result, Err(error) if error.kind() == io::ErrorKind::InvalidData);
        result
    }

    fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            let mut out = Outgoing::new();
            out.bytes(&self.outgoing[self.unsent.clone()]);
            self.unsent.start += self.link.post(&out)?;
        }
        Ok(())
    }

    fn has_received(&self) -> bool {
        // What is altered is told by the next poll.
        let is_whole =
            || self.front().map_or(true, |front| front.is_some_and(|len| len <= self.unopened.len()));
        self.broken || !self.opened.is_empty() || is_whole()
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.link.wait_fd()
    }
}
