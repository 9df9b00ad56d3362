//! How bytes get from a connection into a file.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use netvm_sys::mapping::Mapping;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags};

use super::digest::Digest;
use super::frames::{CHUNK_BYTES, Entry};
use super::wire::Wire;
use super::{Method, STEP_BYTES};
use crate::error::{Error, Result};

/// Bytes that are received before they are written: with few the thread is woken often, and a file system that has large pages makes small ones.
const TAKEN_BYTES: usize = 1 << 20;
/// Bytes of the pipe that the kernel moves bytes through.
const PIPE_BYTES: usize = 1 << 20;
/// For fewer bytes no room is made ahead; nor for as many as a sender may claim that says the length of a whole file.
const RESERVED_BYTES_MIN: u64 = 1 << 20;

/// Takes ranges of files from a connection.
pub(super) struct Sink {
    /// The target folder, for messages.
    shown: String,
    buffer: Vec<u8>,
    /// What the kernel moves bytes through: the end to read, and the end to write.
    pipe: Option<(OwnedFd, OwnedFd)>,
}

/// Where bytes go to.
#[derive(Clone, Copy)]
pub(super) struct Into<'a> {
    pub file: &'a File,
    /// With [`Method::Mmap`], all of it.
    pub mapping: Option<&'a Mapping>,
    pub entry: &'a Entry,
}

impl Sink {
    /// # Errors
    /// The connection cannot do what is asked.
    pub fn new(method: Method, wire: &Wire, shown: &str) -> Result<Self> {
        let pipe = if method == Method::Sendfile { Some(pipe_for(wire)?) } else { None };
        Ok(Self { shown: shown.to_owned(), buffer: vec![0; TAKEN_BYTES], pipe })
    }

    /// Bytes for whoever needs some.
    pub fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Writes bytes that are next on the connection; `got` hears of each step, and where it ends.
    pub fn take(
        &mut self,
        wire: &mut Wire,
        into: Into<'_>,
        (offset, bytes): (u64, u64),
        mut digest: Option<&mut Digest>,
        got: &mut dyn FnMut(u64, usize),
    ) -> Result<()> {
        let (end, entry) = (offset + bytes, into.entry);
        if into.mapping.is_some() {
            promise(&self.shown, into.file, entry, offset, bytes)?;
        } else if (RESERVED_BYTES_MIN..=CHUNK_BYTES).contains(&bytes) {
            self.reserve(into.file, entry, offset, bytes)?;
        }
        let mut at = offset;
        while at < end {
            let count = if let Some(mapping) = into.mapping {
                let most = (end - at).min(STEP_BYTES as u64) as usize;
                let place = mapping.shared().sub(at as usize, most);
                let place = place.ok_or_else(|| wire.wrong("bytes that are not where they should be"))?;
                let count = wire.receive_shared(place)?;
                if let Some(digest) = &mut digest {
                    let piece = &mut self.buffer[..count];
                    place.read_into(0, piece).ok_or_else(|| became_shorter(entry))?;
                    digest.update(at, piece);
                }
                count
            } else if self.pipe.is_some() && wire.buffered() == 0 {
                let count = self.splice(wire, into, at, end)?;
                if let Some(digest) = &mut digest {
                    self.look_back(into, at, count, digest)?;
                }
                count
            } else {
                // Whole steps: what is written in one go gets memory in large pieces.
                let most = (end - at).min(TAKEN_BYTES as u64) as usize;
                wire.receive_exact(&mut self.buffer[..most])?;
                let (piece, count) = (&self.buffer[..most], most);
                let written = into.file.write_all_at(piece, at);
                written.map_err(|error| failed(&self.shown, "write", entry, &error))?;
                if let Some(digest) = &mut digest {
                    digest.update(at, piece);
                }
                count
            };
            at += count as u64;
            got(at, count);
        }
        Ok(())
    }

    /// What is written step by step finds its room in one piece: the file system looks for it once. Where it cannot, it looks each time.
    fn reserve(&self, file: &File, entry: &Entry, offset: u64, bytes: u64) -> Result<()> {
        match rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, offset, bytes) {
            Err(error @ (Errno::NOSPC | Errno::DQUOT)) => {
                Err(failed(&self.shown, "write", entry, &error.into()))
            }
            _ => Ok(()),
        }
    }

    /// Has the kernel move bytes; returns how many.
    fn splice(&mut self, wire: &mut Wire, into: Into<'_>, at: u64, end: u64) -> Result<usize> {
        let Some((read, write)) = &self.pipe else { return Ok(0) };
        let got = wire.splice(write, (end - at).min(PIPE_BYTES as u64) as usize)?;
        let mut place = at;
        while place < at + got as u64 {
            let left = (at + got as u64 - place) as usize;
            match rustix::pipe::splice(read, None, into.file, Some(&mut place), left, SpliceFlags::MOVE) {
                Ok(0) => return Err(became_shorter(into.entry)),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(failed(&self.shown, "write", into.entry, &error.into())),
            }
        }
        Ok(got)
    }

    /// What the kernel has moved is read once more, while it is still in its cache.
    fn look_back(&mut self, into: Into<'_>, at: u64, count: usize, digest: &mut Digest) -> Result<()> {
        let mut done = 0;
        while done < count {
            let piece = &mut self.buffer[..(count - done).min(STEP_BYTES)];
            let read = into.file.read_exact_at(piece, at + done as u64);
            read.map_err(|error| failed(&self.shown, "read back", into.entry, &error))?;
            digest.update(at + done as u64, piece);
            done += piece.len();
        }
        Ok(())
    }
}

fn pipe_for(wire: &Wire) -> Result<(OwnedFd, OwnedFd)> {
    if !wire.is_plain() {
        let error = "the kernel cannot decrypt what it moves by itself; use the method copy or mmap";
        return Err(Error::Other(error.to_owned()));
    }
    let pipe = rustix::pipe::pipe_with(PipeFlags::CLOEXEC);
    let (read, write) = pipe.map_err(|error| Error::system("make a pipe", &error.into()))?;
    // More at once, where this user may.
    let _ = rustix::pipe::fcntl_setpipe_size(&write, PIPE_BYTES);
    Ok((read, write))
}

/// Room for what will be mapped: a full disk must be found before its pages are touched.
pub(super) fn promise(shown: &str, file: &File, entry: &Entry, offset: u64, bytes: u64) -> Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, offset, bytes) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP) => Err(Error::Other(format!(
            "cannot map files in {shown}: its file system cannot promise room for them; use the method copy"
        ))),
        Err(error) => Err(failed(shown, "write", entry, &error.into())),
    }
}

/// A sentence about a file.
pub(super) fn failed(shown: &str, what: &str, entry: &Entry, error: &io::Error) -> Error {
    let advice = match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => "; make room and start both sides again: what has come is kept",
        Some(libc::EEXIST) => "; --overwrite replaces what is there",
        Some(libc::EISDIR) => "; a folder is in the way: move it, or receive into another folder",
        Some(libc::ELOOP | libc::ENOTDIR) => "; a file or a symbolic link is where a folder should be",
        _ => "",
    };
    Error::Other(format!("cannot {what} {entry} in {shown}: {error}{advice}"))
}

pub(super) fn became_shorter(entry: &Entry) -> Error {
    Error::Other(format!("somebody else changed {entry} while it was received"))
}

pub(super) fn differs(entry: &Entry) -> Error {
    Error::Other(format!(
        "{entry} did not arrive as it was sent: it was changed meanwhile, or on the way; send it again"
    ))
}
