//! Many pages leave the far area together: other CPUs are interrupted once for all of them, where a move interrupts them for each run.
//!
//! The pages are write-protected, so that their contents are the same from the copy until their memory is gone, or are known and need no copy.
//! Nobody is interrupted to protect them, as they were installed so.

use crate::raw;
use crate::uffd::PAGE_BYTES;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Most pages at a time.
pub const TOGETHER_MAX: usize = 128;

/// What it takes of the process.
#[derive(Debug)]
pub(crate) struct Together {
    /// `None`: the kernel knows a name of its own for the calling thread (Linux 6.14), which is there also when the first thread has ended.
    pidfd: Option<OwnedFd>,
}

impl Together {
    pub(crate) fn descriptor(&self) -> Option<RawFd> {
        self.pidfd.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// `None` where the kernel cannot, or a filter of system calls does not let us. `empty`: a page of the caller's without memory.
    pub(crate) fn new(empty: usize) -> Option<Self> {
        let mut together = Self { pidfd: None };
        // SAFETY: the page has nothing that could be lost.
        let mut dropped = unsafe { together.drop_memory(&[page(empty)]) };
        if dropped.is_err() {
            together.pidfd = Some(raw::pidfd(std::process::id() as i32).ok()?);
            // SAFETY: as above.
            dropped = unsafe { together.drop_memory(&[page(empty)]) };
        }
        let (word, mut copied) = (1_u64, 0_u64);
        let bytes = size_of::<u64>();
        let from = libc::iovec { iov_base: (&raw const word).cast_mut().cast(), iov_len: bytes };
        let to = libc::iovec { iov_base: (&raw mut copied).cast(), iov_len: bytes };
        // SAFETY: a local, to which nothing else refers meanwhile.
        let read = unsafe { raw::copy_many(&[to], &[from]) };
        let looked = raw::are_there(&[empty], &mut [true; 1]);
        (read.ok() == Some(bytes) && dropped.ok() == Some(PAGE_BYTES) && looked.is_ok()).then_some(together)
    }

    /// Which of `pages` are there. Unlike a copy, to look for a page never waits for it.
    ///
    /// # Errors
    /// Never where [`Together::new`] found that it works.
    pub(crate) fn are_there(&self, pages: &[usize], there: &mut [bool; TOGETHER_MAX]) -> io::Result<()> {
        raw::are_there(pages, there)
    }

    /// Takes the pages' memory. Returns how many, from the first on.
    ///
    /// # Errors
    /// When the process has closed our descriptor.
    ///
    /// # Safety
    /// The caller owns the pages and gives up what is in them.
    pub(crate) unsafe fn drop(&self, pages: &[usize]) -> io::Result<usize> {
        assert!(pages.len() <= TOGETHER_MAX, "{} pages", pages.len());
        let mut ranges = [page(0); TOGETHER_MAX];
        for (range, &address) in ranges.iter_mut().zip(pages) {
            *range = page(address);
        }
        // SAFETY: forwarded from the caller.
        Ok(unsafe { self.drop_memory(&ranges[..pages.len()]) }? / PAGE_BYTES)
    }

    /// Takes the memory of ranges of addresses and bytes, whole pages, at most [`TOGETHER_MAX`] of them. Returns the bytes, from the first on.
    ///
    /// # Errors
    /// As [`Together::drop`].
    ///
    /// # Safety
    /// The caller owns the ranges and gives up what is in them.
    pub(crate) unsafe fn drop_ranges(&self, ranges: &[(usize, usize)]) -> io::Result<usize> {
        assert!(ranges.len() <= TOGETHER_MAX, "{} ranges", ranges.len());
        let mut all = [page(0); TOGETHER_MAX];
        for (range, &(address, bytes)) in all.iter_mut().zip(ranges) {
            *range = libc::iovec { iov_len: bytes, ..page(address) };
        }
        // SAFETY: forwarded from the caller.
        unsafe { self.drop_memory(&all[..ranges.len()]) }
    }

    /// Copies `pages` to full `frames`, and takes the pages' memory. Returns how many, from the first on: fewer than all where one is not
    /// there, or cannot be read.
    ///
    /// # Errors
    /// When the process has closed our descriptor.
    ///
    /// # Safety
    /// The caller owns pages and frames; nothing refers to the frames, and nobody can write to the pages without its help.
    pub(crate) unsafe fn take(&self, pages: &[usize], frames: &[usize]) -> io::Result<usize> {
        assert!(pages.len() == frames.len() && pages.len() <= TOGETHER_MAX, "{} pages", pages.len());
        let (mut from, mut to) = ([page(0); TOGETHER_MAX], [page(0); TOGETHER_MAX]);
        for (index, (&source, &frame)) in pages.iter().zip(frames).enumerate() {
            (from[index], to[index]) = (page(source), page(frame));
        }
        let count = pages.len();
        // SAFETY: forwarded from the caller.
        let copied = match unsafe { raw::copy_many(&to[..count], &from[..count]) } {
            Ok(bytes) => bytes / PAGE_BYTES,
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => 0,
            Err(error) => return Err(error),
        };
        if copied == 0 {
            return Ok(0);
        }
        // SAFETY: forwarded from the caller; what they held is in the frames.
        Ok(unsafe { self.drop_memory(&from[..copied]) }? / PAGE_BYTES)
    }

    /// # Safety
    /// The caller owns the pages and gives up what is in them.
    unsafe fn drop_memory(&self, pages: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: forwarded from the caller.
        unsafe { raw::madvise_many(self.descriptor(), pages, libc::MADV_DONTNEED) }
    }
}

fn page(address: usize) -> libc::iovec {
    libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address), iov_len: PAGE_BYTES }
}
