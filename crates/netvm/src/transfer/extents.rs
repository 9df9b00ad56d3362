//! Which ranges of a file hold data, and the digest of them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::STEP_BYTES;
use super::digest::Digest;
use crate::error::Result;

/// The next range with data at or behind `from` and before `end`.
pub(super) fn next(file: &File, from: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
    if from >= end {
        return Ok(None);
    }
    let start = match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // The file system does not know its holes.
        Err(Errno::INVAL) => return Ok(Some((from, end))),
        Err(error) => return Err(error.into()),
    };
    if start >= end {
        return Ok(None);
    }
    let stop = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    Ok(Some((start, stop.clamp(start, end))).filter(|(start, stop)| stop > start))
}

/// The digest of the first `end` bytes; `None` when there are fewer, or they cannot be read.
pub(super) fn digest(file: &File, end: u64, tick: &mut dyn FnMut() -> Result<()>) -> Result<Option<u64>> {
    let mut digest = Digest::new();
    let mut buffer = vec![0; STEP_BYTES];
    if file.metadata().is_ok_and(|metadata| metadata.len() < end) {
        return Ok(None);
    }
    let mut at = 0;
    while let Ok(range) = next(file, at, end) {
        let Some((start, stop)) = range else { return Ok(Some(digest.finish(end))) };
        at = start;
        while at < stop {
            let piece = &mut buffer[..(STEP_BYTES as u64).min(stop - at) as usize];
            if file.read_exact_at(piece, at).is_err() {
                return Ok(None);
            }
            digest.update(at, piece);
            at += piece.len() as u64;
            tick()?;
        }
    }
    Ok(None)
}
