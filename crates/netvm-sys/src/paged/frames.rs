//! The pool: frames that have memory, and frames that have none.

use super::{FrameDesign, PAGE_BYTES, PagedArea, retry};
use crate::raw;
use crate::shared::SharedSlice;
use crate::together::TOGETHER_MAX;
use std::io;
use std::time::Duration;

/// How long an empty frame can be looked at.
const LOOK: Duration = Duration::from_micros(20);

/// Has the kernel give memory to empty frames all at once, where they are not served by us.
///
/// # Errors
/// EINVAL before Linux 5.14; ENOMEM.
pub(super) fn populate(frames: usize, bytes: usize) -> io::Result<()> {
    // SAFETY: the frames are in the pool (our callers' check); this changes no contents.
    unsafe { raw::madvise(frames, bytes, libc::MADV_POPULATE_WRITE) }
}

impl PagedArea {
    pub(super) fn frame_address(&self, frame: usize, frames: usize) -> usize {
        assert!(frames > 0 && frame + frames <= self.frames(), "frame {frame}+{frames} out of range");
        self.pool.start + frame * PAGE_BYTES
    }

    /// Memory of full frames.
    pub fn frame_memory(&self, frame: usize, frames: usize) -> SharedSlice {
        let address = self.frame_address(frame, frames);
        // SAFETY: the pool is mapped as long as `self`; frames are in range (checked).
        unsafe { SharedSlice::from_raw(address as *mut u8, frames * PAGE_BYTES) }
    }

    /// Bytes of one full frame.
    pub fn frame_bytes(&self, frame: usize) -> &[u8] {
        let address = self.frame_address(frame, 1);
        // SAFETY: in range (checked); frames change only through this struct's owner, the pager's thread, which holds
        // this borrow meanwhile.
        unsafe { std::slice::from_raw_parts(address as *const u8, PAGE_BYTES) }
    }

    /// Bytes of one full frame, to change.
    pub fn frame_bytes_mut(&mut self, frame: usize) -> &mut [u8] {
        let address = self.frame_address(frame, 1);
        // SAFETY: in range (checked), mapped writable, and `&mut self` excludes other borrows.
        unsafe { std::slice::from_raw_parts_mut(address as *mut u8, PAGE_BYTES) }
    }

    /// Zeroes full frames.
    pub fn zero_frames(&mut self, frame: usize, frames: usize) {
        let address = self.frame_address(frame, frames);
        // SAFETY: in range (checked), mapped writable, and `&mut self` excludes other borrows.
        unsafe { std::ptr::write_bytes(address as *mut u8, 0, frames * PAGE_BYTES) };
    }

    /// Gives memory to empty frames (contents: zero).
    ///
    /// # Errors
    /// ENOMEM when the machine has no memory left.
    pub fn fill_frames(&mut self, frame: usize, frames: usize) -> io::Result<()> {
        static ZERO: [u8; 16 * PAGE_BYTES] = [0; 16 * PAGE_BYTES];
        let address = self.frame_address(frame, frames);
        if self.design == FrameDesign::Copy {
            // Memory that is new is zero.
            if populate(address, frames * PAGE_BYTES).is_err() {
                self.zero_frames(frame, frames);
            }
            return Ok(());
        }
        let (mut done, bytes) = (0, frames * PAGE_BYTES);
        while done < bytes {
            let step = (bytes - done).min(ZERO.len());
            // SAFETY: both ranges are ours: the pool (checked above) and a static.
            let (copied, result) =
                unsafe { self.uffd.copy(address + done, ZERO.as_ptr() as usize, step, false) };
            done += copied;
            if let Err(error) = retry(result) {
                // All or none of them.
                if done > 0 {
                    self.drop_frames(frame, done / PAGE_BYTES)?;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Whether a fork inherits the frames, as they are: copy on write, as everything.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn share_frames(&self, inherit: bool) -> io::Result<()> {
        let advice = if inherit { libc::MADV_DOFORK } else { libc::MADV_DONTFORK };
        // SAFETY: the pool is ours; the advice changes what a child inherits, not contents.
        unsafe { raw::madvise(self.pool.start, self.pool.bytes, advice) }
    }

    /// Full frames that a fork shares become this process's alone, with the same contents: only then they can be moved.
    pub(super) fn own_frames(&mut self, frame: usize, frames: usize) {
        let address = self.frame_address(frame, frames);
        for page in (address..address + frames * PAGE_BYTES).step_by(PAGE_BYTES) {
            let first = page as *mut u8;
            // SAFETY: in range (checked), mapped writable, and `&mut self` excludes other borrows. The write changes nothing but whose it is.
            unsafe { first.write_volatile(first.read_volatile()) };
        }
    }

    /// Takes the memory from full frames.
    ///
    /// # Errors
    /// Never in practice.
    pub fn drop_frames(&mut self, frame: usize, frames: usize) -> io::Result<()> {
        let address = self.frame_address(frame, frames);
        // SAFETY: frames in range (checked), contents given up by the caller.
        unsafe { raw::drop_memory(address, frames * PAGE_BYTES) }
    }

    /// The same for several runs of frames, each its first and how many: in one system call, where that is possible.
    ///
    /// # Errors
    /// Never in practice.
    pub fn drop_frame_runs(&mut self, runs: &[(usize, usize)]) -> io::Result<()> {
        if let (Some(together), 2..=TOGETHER_MAX) = (&self.together, runs.len()) {
            let (mut ranges, mut bytes) = ([(0, 0); TOGETHER_MAX], 0);
            for (range, &(frame, frames)) in ranges.iter_mut().zip(runs) {
                *range = (self.frame_address(frame, frames), frames * PAGE_BYTES);
                bytes += range.1;
            }
            // SAFETY: frames in range (checked), contents given up by the caller.
            if unsafe { together.drop_ranges(&ranges[..runs.len()]) }.is_ok_and(|done| done == bytes) {
                return Ok(());
            }
        }
        // Those that are gone already are not hurt.
        runs.iter().try_for_each(|&(frame, frames)| self.drop_frames(frame, frames))
    }

    /// The frame at an address of the pool.
    pub fn frame_at(&self, address: usize) -> Option<usize> {
        let offset = address.checked_sub(self.pool.start)?;
        (offset < self.pool.bytes).then_some(offset / PAGE_BYTES)
    }

    /// Another process reads or writes an empty frame (process_vm_readv(2) of all that is mapped): it finds zero, and what it writes is lost. It gets
    /// a moment for that; if it needs longer it faults again.
    ///
    /// # Errors
    /// Never in practice.
    pub fn show_empty_frame(&mut self, frame: usize) -> io::Result<()> {
        let address = self.frame_address(frame, 1);
        // SAFETY: of the pool (checked), and nobody uses what an empty frame holds.
        match unsafe { self.uffd.zero(address, PAGE_BYTES) } {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                self.uffd.wake(address, PAGE_BYTES)?
            }
            result => result?,
        }
        std::thread::sleep(LOOK);
        self.drop_frames(frame, 1)
    }

    /// Another process looks at a frame that is full by now.
    ///
    /// # Errors
    /// Never in practice.
    pub fn show_full_frame(&self, frame: usize) -> io::Result<()> {
        self.uffd.wake(self.frame_address(frame, 1), PAGE_BYTES)
    }
}
