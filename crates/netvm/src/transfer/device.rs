//! Files that are sent by the kernel module: the receiver's file is a device of this machine, and is written as a file.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;

use netvm_core::key::RemoteKey;
use netvm_sys::shared::SharedSlice;

use super::STEP_BYTES;
use super::onesided::{NAME, shorter};
use crate::device::{self, AttachOptions, BoundDevice};
use crate::error::{Error, Result};
use crate::security::Security;

/// Pieces that are flushed together: what is not flushed is sent again after a cut, and the receiver waits for it.
const FLUSH_PIECES: usize = 2;

/// A file that is written into another, which is a device here.
pub(super) struct Outgoing {
    /// Closed before the device goes.
    target: Option<File>,
    /// Goes with this, or with the process.
    device: BoundDevice,
    buffer: Vec<u8>,
    /// End and bytes of pieces that were written, and how many of them the receiver is known to have.
    written: VecDeque<(u64, u64)>,
    flushed: usize,
}

impl Outgoing {
    /// Begins to write into the file that has this key.
    pub fn open(address: &str, security: &Security, key: &RemoteKey, bytes: u64) -> Result<Self> {
        let device = device::attach_bound(&AttachOptions {
            address: address.to_owned(),
            source: device::Source::Segment { name: NAME.to_owned(), key: *key },
            read_only: false,
            board_key: None,
            security: security.clone(),
        })?;
        let mut outgoing =
            Self { target: None, device, buffer: vec![0; STEP_BYTES], written: VecDeque::new(), flushed: 0 };
        let attached = outgoing.device.attached();
        if attached.bytes != bytes {
            return Err(Error::Other("the receiver's file has another length".to_owned()));
        }
        // What is written in part is read first, by the kernel.
        let target = OpenOptions::new().read(true).write(true).open(attached.path());
        outgoing.target = Some(target.map_err(|error| Error::system("open a device", &error))?);
        Ok(outgoing)
    }

    /// Pieces that are not confirmed.
    pub fn under_way(&self) -> usize {
        self.written.len()
    }

    /// Writes a piece to its place.
    pub fn write(&mut self, offset: u64, piece: SharedSlice) -> Result<()> {
        let target = self.target.as_ref().ok_or_else(shorter)?;
        let mut at = 0;
        while at < piece.len() {
            let step = &mut self.buffer[..STEP_BYTES.min(piece.len() - at)];
            piece.read_into(at, step).ok_or_else(shorter)?;
            target
                .write_all_at(step, offset + at as u64)
                .map_err(|error| Error::system("write to the receiver's file", &error))?;
            at += step.len();
        }
        let bytes = piece.len() as u64;
        self.written.push_back((offset + bytes, bytes));
        Ok(())
    }

    /// The end and the bytes of a piece that the receiver has, in order. With `wait`, or when there are some, all that were written are
    /// waited for.
    pub fn wrote(&mut self, wait: bool) -> Result<Option<(u64, u64)>> {
        let wanted = if wait { 1 } else { FLUSH_PIECES };
        if self.flushed == 0
            && self.written.len() >= wanted
            && let Some(target) = &self.target
        {
            target.sync_data().map_err(|error| Error::system("write to the receiver's file", &error))?;
            self.flushed = self.written.len();
        }
        if self.flushed == 0 {
            return Ok(None);
        }
        self.flushed -= 1;
        Ok(self.written.pop_front())
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        self.target = None;
        // With a goodbye, unless something else has it open: whatever counts has been confirmed, or is sent again.
        let _ = device::detach(self.device.attached().number, false);
    }
}
