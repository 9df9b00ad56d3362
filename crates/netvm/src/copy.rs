//! Copies from one peer's segment to another's, without the bytes coming here if it can be helped. docs/design/copy.md tells the promises.
//!
//! ```no_run
//! # fn main() -> netvm::Result<()> {
//! # use netvm::node::{Node, RemoteKey};
//! # let (node, key) = (Node::new()?, RemoteKey::from_bytes([0; 16]));
//! let from = node.connect("10.0.0.2:7000")?.import("results", &key)?;
//! let to = node.connect("10.0.0.3:7000")?.import("archive", &key)?;
//! let way = from.copy_to(0, &to, 4096, 1 << 30)?;
//! println!("copied by {way:?}");
//! # Ok(()) }
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use netvm_core::copy::{METHOD, Reply, Request, Third, Way};
use netvm_core::key::Access;
use netvm_core::limits::{COPY_BYTES_MAX, COPY_LOCAL_BYTES_MAX};
use netvm_core::wire::Status;
use netvm_sys::mapping::Mapping;
use netvm_sys::net::Address;
use netvm_sys::shared::SharedSlice;

use crate::error::{Error, Result};
use crate::posted::Op;
use crate::region::{Region, WriteOptions, lengths};

/// Requests under way at a time: the next one waits at the peer when the one before is done.
const REQUESTS: usize = 2;
/// A peer may itself wait that long for the third node before it answers.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes of one piece that is copied through somebody's buffer.
pub(crate) const PIECE_BYTES: usize = 256 << 10;
/// Buffers of a copier: pieces being read and pieces being written.
const BUFFERS: usize = 4;

/// How bytes were copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Copied {
    /// Within one peer.
    Locally,
    /// The source's node wrote them to the target.
    Pushed,
    /// The target's node read them from the source.
    Pulled,
    /// They came here and went on.
    Through,
}

/// Whom a node connects to when a peer asks it to copy to or from a third node. See docs/design/copy.md.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Copies {
    /// Nobody.
    Never = 0,
    /// Nodes that its own program is connected to at that address.
    #[default]
    Known = 1,
    /// Anybody that it has the secret for. Whoever may import something here then has it connect to any address.
    Anywhere = 2,
}

impl Copies {
    pub(crate) fn from_number(number: u8) -> Self {
        match number {
            0 => Self::Never,
            1 => Self::Known,
            _ => Self::Anywhere,
        }
    }
}

/// A part of a copy.
#[derive(Clone, Copy)]
struct Part {
    /// Bytes before it.
    at: u64,
    bytes: u64,
}

/// How far one way led.
enum Led {
    Whole,
    /// The peer does not go this way: everything before is copied.
    Declined(u64),
}

impl Region {
    /// Copies `bytes` at `offset` to `to_offset` of `to`, which may belong to another peer, and returns when they are there. It reads
    /// after all writes made before through this region's peer, and is ordered behind those through `to`'s.
    ///
    /// The one peer may be told address, name and key of the other's segment; [`Region::copy_through`] tells nobody.
    ///
    /// # Errors
    /// [`Error::Bounds`]; [`Error::Op`] of the peer that refuses; [`Error::LenderLost`] of the one that died;
    /// [`Error::OutcomeUnknown`] when the two lost each other in the middle. Then the target has any part of the bytes.
    pub fn copy_to(&self, offset: u64, to: &Region, to_offset: u64, bytes: u64) -> Result<Copied> {
        self.check_copy(offset, to, to_offset, bytes)?;
        if Arc::ptr_eq(self.session(), to.session()) {
            return self.copy_locally(offset, to, to_offset, bytes);
        }
        to.flush()?;
        let mut done = 0;
        if let Some(third) = to.as_third() {
            let request = |part: Part| Request {
                way: Way::Push(third),
                handle: self.handle(),
                offset: offset + part.at,
                bytes: part.bytes,
                other_offset: to_offset + part.at,
            };
            match self.ask(to, done..bytes, COPY_BYTES_MAX, REQUESTS, request)? {
                Led::Whole => return Ok(Copied::Pushed),
                Led::Declined(at) => done = at,
            }
        }
        if let Some(third) = self.as_third() {
            self.flush()?;
            let request = |part: Part| Request {
                way: Way::Pull(third),
                handle: to.handle(),
                offset: to_offset + part.at,
                bytes: part.bytes,
                other_offset: offset + part.at,
            };
            match to.ask(self, done..bytes, COPY_BYTES_MAX, REQUESTS, request)? {
                Led::Whole => return Ok(Copied::Pulled),
                Led::Declined(at) => done = at,
            }
        }
        self.copy_through(offset + done, to, to_offset + done, bytes - done)?;
        Ok(Copied::Through)
    }

    /// As [`Region::copy_to`], through this process, for ranges that do not overlap: nobody learns of the other peer.
    ///
    /// # Errors
    /// As [`Region::read`] of this region and [`Region::flush`] of the other.
    pub fn copy_through(&self, offset: u64, to: &Region, to_offset: u64, bytes: u64) -> Result<()> {
        self.check_copy(offset, to, to_offset, bytes)?;
        let mut pipe = Pipe::new(to, to_offset)?;
        let mut reads: VecDeque<(usize, SharedSlice, Op)> = VecDeque::new();
        let (mut asked, mut index) = (0, 0);
        while asked < bytes || !reads.is_empty() {
            while asked < bytes && reads.len() < BUFFERS / 2 {
                let piece = (bytes - asked).min(PIECE_BYTES as u64);
                let buffer = pipe.buffer(index, piece as usize)?;
                reads.push_back((index, buffer, self.post().read(offset + asked, &[buffer])?));
                (asked, index) = (asked + piece, index + 1);
            }
            if let Some((index, buffer, read)) = reads.pop_front() {
                read.wait()?;
                pipe.write(index, buffer)?;
            }
        }
        pipe.finish()
    }

    fn check_copy(&self, offset: u64, to: &Region, to_offset: u64, bytes: u64) -> Result<()> {
        self.check(offset, bytes as usize)?;
        to.check(to_offset, bytes as usize)?;
        if to.rights().allow(Access::Write) {
            return Ok(());
        }
        Err(Error::Op { lender: to.peer().address.clone(), what: "copy", code: Status::NoRights })
    }

    fn copy_locally(&self, offset: u64, to: &Region, to_offset: u64, bytes: u64) -> Result<Copied> {
        let overlaps = self.handle() == to.handle() && offset.abs_diff(to_offset) < bytes;
        let backwards = overlaps && offset < to_offset;
        let request = |part: Part| {
            // From the end on, so that no part is overwritten before it is copied.
            let at = if backwards { bytes - part.at - part.bytes } else { part.at };
            Request {
                way: Way::Local { handle: to.handle() },
                handle: self.handle(),
                offset: offset + at,
                bytes: part.bytes,
                other_offset: to_offset + at,
            }
        };
        // Over several rails two calls may change places.
        let requests = if overlaps { 1 } else { REQUESTS };
        match self.ask(to, 0..bytes, COPY_LOCAL_BYTES_MAX, requests, request)? {
            Led::Whole => Ok(Copied::Locally),
            Led::Declined(_) if overlaps => {
                let lender = self.peer().address.clone();
                Err(Error::Op { lender, what: "copy of overlapping ranges", code: Status::Unsupported })
            }
            Led::Declined(at) => {
                self.copy_through(offset + at, to, to_offset + at, bytes - at)?;
                Ok(Copied::Through)
            }
        }
    }

    /// Has this region's peer copy `range`, in parts of at most `part_bytes`, of which so many requests are under way.
    fn ask<'a>(
        &self,
        other: &Region,
        range: std::ops::Range<u64>,
        part_bytes: u64,
        requests: usize,
        request: impl Fn(Part) -> Request<'a>,
    ) -> Result<Led> {
        let mut asked = range.start;
        let mut under_way: VecDeque<(u64, Op<Vec<u8>>)> = VecDeque::new();
        let mut declined = None;
        while (asked < range.end && declined.is_none()) || !under_way.is_empty() {
            while asked < range.end && under_way.len() < requests && declined.is_none() {
                let part = Part { at: asked, bytes: (range.end - asked).min(part_bytes) };
                let Some(body) = request(part).encode() else { return Ok(Led::Declined(asked)) };
                under_way.push_back((asked, self.post().call(METHOD, &body)?));
                asked += part.bytes;
            }
            let Some((at, call)) = under_way.pop_front() else { break };
            if !self.copied(&call, other)? {
                declined.get_or_insert(at);
            }
        }
        Ok(declined.map_or(Led::Whole, Led::Declined))
    }

    /// Waits for one part: whether it has been copied.
    fn copied(&self, call: &Op<Vec<u8>>, other: &Region) -> Result<bool> {
        let lender = other.peer().address.clone();
        let start = Instant::now();
        let answer = loop {
            if let Some(answer) = call.wait_for(Duration::from_secs(1)) {
                break answer;
            }
            if start.elapsed() > TIMEOUT {
                let (lender, after_ms) = (self.peer().address.clone(), TIMEOUT.as_millis() as u64);
                return Err(Error::Timeout { lender, what: "copy", after_ms });
            }
        };
        let reply = match answer {
            Ok(body) => Reply::decode(&body),
            Err(Error::Op { code: Status::NoMethod | Status::Busy, .. }) => return Ok(false),
            Err(error) => return Err(error),
        };
        match reply {
            Some(Reply::Done) => Ok(true),
            Some(Reply::Declined(_)) => Ok(false),
            Some(Reply::Refused(code)) => Err(Error::Op { lender, what: "copy", code }),
            Some(Reply::Broken(reason)) => {
                let reason = format!("{}, which copied, says: {reason}", self.peer().address);
                Err(Error::OutcomeUnknown { lender, what: "copy", reason })
            }
            None => {
                let lender = self.peer().address.clone();
                Err(Error::Protocol { lender, reason: "a copy was answered with nonsense".to_owned() })
            }
        }
    }

    /// What another node needs to reach this segment, if it can at all.
    fn as_third(&self) -> Option<Third<'_>> {
        let address = self.peer().address.as_str();
        address.parse::<Address>().is_ok().then_some(Third { address, name: self.name(), key: *self.key() })
    }
}

/// Writes pieces to a region through a few buffers.
pub(crate) struct Pipe<'a> {
    to: &'a Region,
    offset: u64,
    // Before the buffers: dropped first, and then ended.
    writes: [Option<Op>; BUFFERS],
    buffers: Vec<Mapping>,
}

impl<'a> Pipe<'a> {
    pub(crate) fn new(to: &'a Region, offset: u64) -> Result<Self> {
        Ok(Self { to, offset, writes: [const { None }; BUFFERS], buffers: Vec::new() })
    }

    /// The buffer of piece `index`, when its last bytes have left.
    pub(crate) fn buffer(&mut self, index: usize, bytes: usize) -> Result<SharedSlice> {
        let index = index % BUFFERS;
        if let Some(write) = self.writes[index].take() {
            write.wait()?;
        }
        while self.buffers.len() <= index {
            let buffer = Mapping::anonymous(PIECE_BYTES);
            self.buffers.push(buffer.map_err(|error| Error::system("map a buffer", &error))?);
        }
        self.buffers[index].shared().sub(0, bytes).ok_or_else(lengths)
    }

    /// Writes piece `index`, which comes behind the one before.
    pub(crate) fn write(&mut self, index: usize, piece: SharedSlice) -> Result<()> {
        let write = self.to.post().write(self.offset, &[piece], WriteOptions::default())?;
        self.offset += piece.len() as u64;
        self.writes[index % BUFFERS] = Some(write);
        Ok(())
    }

    /// Returns when all of it is in the peer's memory.
    pub(crate) fn finish(self) -> Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests;
