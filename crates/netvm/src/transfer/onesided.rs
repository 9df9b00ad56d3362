//! Files that are written one-sidedly: the sender's node writes into the mapped file of the receiver. The connection carries what each side
//! is about to do and has done.

use std::collections::VecDeque;
use std::fs::File;

use netvm_core::key::{RemoteKey, Rights};
use netvm_sys::mapping::Mapping;
use netvm_sys::net::Listener;
use netvm_sys::residency;
use netvm_sys::shared::SharedSlice;

use super::STEP_BYTES;
use super::digest::Digest;
use super::frames::{CHUNK_BYTES, Wrong};
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::node::{ConnectOptions, Node};
use crate::posted::{Counter, Op};
use crate::region::{Peer, Region, WriteOptions};
use crate::security::Security;
use crate::shm::LinkChoice;

/// Smaller files go over the connection: an answer is awaited for each of these.
pub(super) const BYTES_MIN: u64 = 1 << 20;
/// Pieces that are announced and not confirmed.
pub(super) const AHEAD_MAX: usize = 8;
/// The segment of the file that is under way.
pub(super) const NAME: &str = "file";
/// Most bytes of one write.
const WRITE_BYTES: usize = 1 << 20;

/// The receiver's side: a node that listens where the receiver did.
pub(super) struct Target {
    node: Node,
}

impl Target {
    pub fn new(listener: Listener, security: &Security) -> Result<Self> {
        let node = Node::with_security(security.clone())?;
        node.listen_on(listener)?;
        Ok(Self { node })
    }

    /// Lets the sender write into all of `file`, which must have at least a byte.
    pub fn open(&self, file: &File) -> Result<(RemoteKey, Incoming)> {
        let memory = Memory::file(file, Rights::ReadWrite)?;
        let key = self.node.export(NAME, memory.clone(), Rights::ReadWrite)?;
        Ok((key, Incoming { memory, announced: VecDeque::new() }))
    }

    /// From here on nobody writes into the file.
    ///
    /// # Errors
    /// [`Error::StillUsed`]: somebody may.
    pub fn close(&self) -> Result<()> {
        self.node.unexport(NAME).map(drop)
    }
}

/// A file that the sender writes into.
pub(super) struct Incoming {
    memory: Memory,
    /// Pieces that may be written: offset and bytes.
    announced: VecDeque<(u64, u64)>,
}

impl Incoming {
    /// Makes a piece of the file, whose room is promised, ready to be written.
    pub fn prepare(&mut self, offset: u64, bytes: u64) -> Result<(), Wrong> {
        if self.announced.len() == AHEAD_MAX {
            return Err("more is announced than may be");
        }
        let piece = self.memory.shared().sub(offset as usize, bytes as usize);
        let piece = piece.ok_or("bytes that are not where they should be")?;
        // Writes to pages that are not there would wait for them one by one. Where the kernel cannot bring them, they do.
        let _ = residency::bring(piece, true);
        self.announced.push_back((offset, bytes));
        Ok(())
    }

    /// The sender has written what was announced first, up to `end`.
    pub fn wrote(&mut self, end: u64) -> Result<(u64, SharedSlice), Wrong> {
        match self.announced.pop_front() {
            Some((offset, bytes)) if offset + bytes == end => {
                let piece = self.memory.shared().sub(offset as usize, bytes as usize);
                piece.map(|piece| (offset, piece)).ok_or("bytes that are not where they should be")
            }
            _ => Err("bytes that were not announced"),
        }
    }

    /// Whether all that was announced has been written.
    pub fn is_complete(&self) -> bool {
        self.announced.is_empty()
    }
}

/// The digest of a piece of a mapped file; `None` when it is not there any more.
pub(super) fn update(digest: &mut Digest, at: u64, memory: SharedSlice, buffer: &mut [u8]) -> Option<()> {
    let mut done = 0;
    while done < memory.len() {
        let step = (memory.len() - done).min(STEP_BYTES).min(buffer.len());
        memory.read_into(done, &mut buffer[..step])?;
        digest.update(at + done as u64, &buffer[..step]);
        done += step;
    }
    Some(())
}

/// The sender's side: connected to the receiver's node.
pub(super) struct Source {
    peer: Peer,
    // After what is connected by it.
    _node: Node,
}

impl Source {
    pub fn connect(address: &str, security: &Security, link: LinkChoice) -> Result<Self> {
        let node = Node::with_security(security.clone())?;
        let peer = node.connect_with(address, &ConnectOptions { link, rails: None })?;
        Ok(Self { peer, _node: node })
    }

    /// Begins to write into the file that has this key.
    pub fn open(&self, key: &RemoteKey, file: &File, bytes: u64) -> Result<Writing> {
        let region = self.peer.import(NAME, key)?;
        if region.len() != bytes {
            return Err(Error::Other("the receiver's file has another length".to_owned()));
        }
        let way = Outgoing { region, counter: Counter::new(), written: VecDeque::new() };
        Writing::new(file, Way::Node(Box::new(way)))
    }
}

/// A file that is written into another: the pieces that the receiver has been told of, and then those that are under way.
pub(super) struct Writing {
    /// Before the memory that it reads.
    way: Way,
    mapping: Mapping,
    /// Offset and bytes of pieces that the receiver has been told of and has not made ready.
    announced: VecDeque<(u64, u64)>,
}

/// Who carries what is ready: this process's node, or the kernel module.
pub(super) enum Way {
    Node(Box<Outgoing>),
    Device(super::device::Outgoing),
}

impl Writing {
    /// Nothing of `file` has been announced.
    pub fn new(file: &File, way: Way) -> Result<Self> {
        let mapping = Mapping::of_file(file, false).map_err(|error| Error::system("map a file", &error))?;
        Ok(Self { way, mapping, announced: VecDeque::new() })
    }

    /// What carries the bytes.
    pub fn link(&self) -> &'static str {
        match &self.way {
            Way::Node(way) => way.region.link(),
            Way::Device(_) => "device",
        }
    }

    fn under_way(&self) -> usize {
        match &self.way {
            Way::Node(way) => way.written.len(),
            Way::Device(way) => way.under_way(),
        }
    }

    /// Whether another piece may be announced.
    pub fn has_room(&self) -> bool {
        self.announced.len() + self.under_way() < AHEAD_MAX
    }

    /// The receiver is told of a piece.
    pub fn announce(&mut self, offset: u64, bytes: u64) {
        debug_assert!(self.has_room() && (1..=CHUNK_BYTES).contains(&bytes));
        self.announced.push_back((offset, bytes));
    }

    /// Whether the receiver is to make something ready.
    pub fn waits_for_receiver(&self) -> bool {
        !self.announced.is_empty()
    }

    /// Whether something is not confirmed.
    pub fn is_writing(&self) -> bool {
        self.under_way() > 0
    }

    /// The first announced piece is ready: it is written, and returned with its offset.
    ///
    /// # Errors
    /// Also when it is another piece than the receiver says.
    pub fn ready(&mut self, end: u64) -> Result<(u64, SharedSlice)> {
        let (offset, bytes) =
            self.announced.pop_front().filter(|(offset, bytes)| offset + bytes == end).ok_or_else(|| {
                Error::Other("the receiver has made ready what nobody announced".to_owned())
            })?;
        let piece = self.mapping.shared().sub(offset as usize, bytes as usize).ok_or_else(shorter)?;
        match &mut self.way {
            Way::Node(way) => way.write(offset, piece)?,
            Way::Device(way) => way.write(offset, piece)?,
        }
        Ok((offset, piece))
    }

    /// The end and the bytes of a piece that the receiver has, in order; with `wait`, it is waited for.
    pub fn wrote(&mut self, wait: bool) -> Result<Option<(u64, u64)>> {
        match &mut self.way {
            Way::Node(way) => way.wrote(wait),
            Way::Device(way) => way.wrote(wait),
        }
    }
}

/// The file of the sender is not as long any more as it was.
pub(super) fn shorter() -> Error {
    Error::Other("the file became shorter".to_owned())
}

/// A file that this process's node writes into.
pub(super) struct Outgoing {
    region: Region,
    counter: Counter,
    /// End and bytes of pieces that are under way, and what tells that they are there.
    written: VecDeque<(u64, u64, Op)>,
}

impl Outgoing {
    fn write(&mut self, offset: u64, piece: SharedSlice) -> Result<()> {
        let mut at = 0;
        while at < piece.len() {
            let step = WRITE_BYTES.min(piece.len() - at);
            let part = piece.sub(at, step).ok_or_else(shorter)?;
            let post = self.region.post().counted(&self.counter);
            post.write(offset + at as u64, &[part], WriteOptions::default())?;
            at += step;
        }
        let bytes = piece.len() as u64;
        self.written.push_back((offset + bytes, bytes, self.region.post().flush()?));
        Ok(())
    }

    fn wrote(&mut self, wait: bool) -> Result<Option<(u64, u64)>> {
        let Some((end, bytes, flush)) = self.written.front() else { return Ok(None) };
        match flush.test() {
            Some(result) => result?,
            None if wait => flush.wait()?,
            None => return Ok(None),
        }
        let done = (*end, *bytes);
        self.written.pop_front();
        Ok(Some(done))
    }
}
