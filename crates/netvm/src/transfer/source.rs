//! How bytes of a file get onto a connection.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use netvm_sys::mapping::Mapping;

use super::digest::Digest;
use super::wire::Wire;
use super::{Method, STEP_BYTES, about};
use crate::error::{Error, Result};

/// A file that is sent.
pub(super) struct Source<'a> {
    pub file: &'a File,
    /// For messages.
    pub path: &'a Path,
    /// With [`Method::Mmap`], all of it.
    mapping: Option<Mapping>,
}

impl<'a> Source<'a> {
    pub fn new(file: &'a File, path: &'a Path, method: Method, bytes: u64) -> Result<Self> {
        let mapping = match method {
            Method::Mmap if bytes > 0 => {
                Some(Mapping::of_file(file, false).map_err(|error| about("map", path.display(), &error))?)
            }
            _ => None,
        };
        Ok(Self { file, path, mapping })
    }

    pub fn shorter(&self) -> Error {
        let path = self.path.display();
        Error::Other(format!("{path} became shorter while it was sent; send it again"))
    }

    fn failed(&self, error: &io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => self.shorter(),
            _ => about("read", self.path.display(), error),
        }
    }
}

/// Puts ranges of files onto a connection.
pub(super) struct Pouring {
    method: Method,
    buffer: Vec<u8>,
}

impl Pouring {
    pub fn new(method: Method) -> Self {
        Self { method, buffer: vec![0; STEP_BYTES] }
    }

    /// Bytes for whoever needs some.
    pub fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Sends bytes that the receiver has been told of; `sent` hears of each step.
    pub fn send(
        &mut self,
        wire: &mut Wire,
        source: &Source<'_>,
        (start, bytes): (u64, u64),
        mut digest: Option<&mut Digest>,
        sent: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let end = start + bytes;
        let mut at = start;
        while at < end {
            let most = (self.buffer.len() as u64).min(end - at);
            let count = match (self.method, &source.mapping) {
                (Method::Sendfile, _) => match wire.sendfile(source.file, at, end - at)? {
                    0 => return Err(source.shorter()),
                    count => count,
                },
                (Method::Mmap, Some(mapping)) => {
                    let part = mapping.shared().sub(at as usize, most as usize);
                    wire.shared(part.ok_or_else(|| source.shorter())?)?;
                    most
                }
                _ => {
                    let piece = &mut self.buffer[..most as usize];
                    source.file.read_exact_at(piece, at).map_err(|error| source.failed(&error))?;
                    if let Some(digest) = &mut digest {
                        digest.update(at, piece);
                    }
                    wire.bytes(piece)?;
                    most
                }
            };
            if let Some(digest) = &mut digest
                && matches!(self.method, Method::Mmap | Method::Sendfile)
            {
                self.look_back(source, (at, count), digest)?;
            }
            at += count;
            sent(count);
        }
        Ok(())
    }

    /// What the kernel has sent is read once more, while it is still in its cache.
    fn look_back(
        &mut self,
        source: &Source<'_>,
        (start, bytes): (u64, u64),
        digest: &mut Digest,
    ) -> Result<()> {
        let mut done = start;
        while done < start + bytes {
            let piece = &mut self.buffer[..(start + bytes - done).min(STEP_BYTES as u64) as usize];
            match &source.mapping {
                Some(mapping) => {
                    mapping.shared().read_into(done as usize, piece).ok_or_else(|| source.shorter())?
                }
                None => source.file.read_exact_at(piece, done).map_err(|error| source.failed(&error))?,
            }
            digest.update(done, piece);
            done += piece.len() as u64;
        }
        Ok(())
    }
}
