//! How pages leave the far area, or move inside it: by MOVE, many together, by copy.

use super::frames::populate;
use super::{FrameDesign, PAGE_BYTES, PagedArea, Reservation, TOGETHER_MAX, Told};
use crate::raw;
use crate::residency::resident;
use crate::shared::SharedSlice;
use crate::together::Together;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;

/// Why a page could not be extracted.
#[derive(Debug)]
pub enum ExtractError {
    /// Pinned by the kernel for I/O, or otherwise not movable now: leave it and try another.
    Busy,
    /// The program dropped it behind the pager's back; there is nothing to extract.
    Missing,
    /// Anything else.
    Os(io::Error),
}

/// [`PagedArea::drop_together`], for whoever does it.
pub(super) fn drop_together(
    together: Option<&Together>,
    area: &Reservation,
    pages: &[usize],
    left: &mut [bool; TOGETHER_MAX],
) -> io::Result<usize> {
    *left = [false; TOGETHER_MAX];
    let Some(together) = together else { return Ok(0) };
    let pages = &pages[..pages.len().min(TOGETHER_MAX)];
    let (mut there, mut leaving, mut count) = ([false; TOGETHER_MAX], [0; TOGETHER_MAX], 0);
    pages.iter().try_for_each(|&page| area.check(page, PAGE_BYTES))?;
    together.are_there(pages, &mut there)?;
    for (&page, _) in pages.iter().zip(&there).filter(|(_, there)| **there) {
        leaving[count] = page;
        count += 1;
    }
    if count == 0 {
        return Ok(0);
    }
    // SAFETY: the pages are ours (checked), and protected by the caller's promise: they hold what the caller knows, and whoever writes to
    // one faults, and waits for the caller.
    let dropped = match unsafe { together.drop(&leaving[..count]) } {
        // The first is locked in memory.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => 0,
        dropped => dropped?,
    };
    for (left, _) in left.iter_mut().zip(&there).filter(|(_, there)| **there).take(dropped) {
        *left = true;
    }
    Ok(dropped)
}

impl PagedArea {
    /// Moves installed pages into empty frames, which are full afterwards; the pages are missing. Stops at the first page
    /// that cannot be moved; returns how many were.
    ///
    /// # Errors
    /// Why the first page that was not moved could not be.
    pub fn extract(
        &mut self,
        address: usize,
        frame: usize,
        pages: usize,
    ) -> (usize, Result<(), ExtractError>) {
        let bytes = pages * PAGE_BYTES;
        if let Err(error) = self.area.check(address, bytes) {
            return (0, Err(ExtractError::Os(error)));
        }
        let to = self.frame_address(frame, pages);
        let mut done = 0;
        let mut unshared = usize::MAX;
        let mut together = bytes;
        while done < bytes {
            let length = together.min(bytes - done);
            if self.design == FrameDesign::Copy && length > PAGE_BYTES {
                let step = self.extract_run_by_copy(address + done, to + done, length);
                done += step;
                if step == length {
                    continue;
                }
                // Something is in the way: a page by itself tells what it is, and is no longer in the way of the others.
                together = PAGE_BYTES * (length / PAGE_BYTES / 2);
            }
            let length = together.min(bytes - done);
            let (step, result) = match self.design {
                // SAFETY: both ranges are ours (checked); the pages belong to the pager until they are installed again.
                FrameDesign::Move => unsafe {
                    self.uffd.move_pages(to + done, address + done, length, false)
                },
                FrameDesign::Copy => (0, Err(io::Error::from_raw_os_error(libc::EINVAL))),
            };
            done += step;
            let Err(error) = result else { continue };
            match error.raw_os_error() {
                Some(libc::EAGAIN) => {}
                Some(libc::EEXIST) => {
                    match self.moved_all_the_same(to + done, address + done, length, error) {
                        Ok(moved) => done += moved,
                        Err(error) => return (done / PAGE_BYTES, Err(ExtractError::Os(error))),
                    }
                }
                Some(libc::ENOENT) => return (done / PAGE_BYTES, Err(ExtractError::Missing)),
                // Shared with a forked process: make it ours by a write fault that changes nothing, then move. Were it protected, that fault would
                // be one of those that the caller serves.
                Some(libc::EBUSY) if unshared != done => {
                    unshared = done;
                    if self.may_protect
                        && let Err(error) = self.unprotect(address + done)
                    {
                        return (done / PAGE_BYTES, Err(ExtractError::Os(error)));
                    }
                    // SAFETY: POPULATE_WRITE changes no contents; the page is present, so it cannot fault to us.
                    let populated =
                        unsafe { raw::madvise(address + done, PAGE_BYTES, libc::MADV_POPULATE_WRITE) };
                    if populated.is_err() {
                        match self.extract_by_copy(address + done, to + done) {
                            Ok(()) => done += PAGE_BYTES,
                            Err(error) => return (done / PAGE_BYTES, Err(error)),
                        }
                    }
                }
                Some(libc::EBUSY) => return (done / PAGE_BYTES, Err(ExtractError::Busy)),
                // They may belong to two mappings (mprotect; heaps that grew in different processes).
                Some(libc::EINVAL) if length > PAGE_BYTES && self.design == FrameDesign::Move => {
                    together = PAGE_BYTES * (length / PAGE_BYTES / 2);
                }
                Some(libc::EINVAL) => match self.extract_by_copy(address + done, to + done) {
                    Ok(()) => done += PAGE_BYTES,
                    Err(error) => return (done / PAGE_BYTES, Err(error)),
                },
                _ => return (done / PAGE_BYTES, Err(ExtractError::Os(error))),
            }
        }
        (pages, Ok(()))
    }

    /// Copies installed, write-protected pages into full frames, and takes the pages' memory: they are missing then. The first
    /// [`TOGETHER_MAX`] at most. Stops at the first that is not there; returns how many left.
    ///
    /// # Errors
    /// EINVAL outside the area; when the process has closed our descriptor.
    pub fn extract_together(&mut self, pages: &[usize], frames: &[usize]) -> io::Result<usize> {
        let Some(together) = &self.together else { return Ok(0) };
        assert!(self.told == Told::Faulter, "a reader would wait for itself where a page is missing");
        let count = pages.len().min(frames.len()).min(TOGETHER_MAX);
        let (pages, frames) = (&pages[..count], &frames[..count]);
        let mut to = [0; TOGETHER_MAX];
        for ((&page, &frame), to) in pages.iter().zip(frames).zip(&mut to) {
            self.area.check(page, PAGE_BYTES)?;
            *to = self.frame_address(frame, 1);
        }
        // SAFETY: pages and frames are ours (checked), and no reference into the pool is alive (`&mut self`). The pages are protected by the
        // caller's promise; whoever writes to one faults, and waits for the caller.
        unsafe { together.take(pages, &to[..count]) }
    }

    /// Takes the memory of installed, write-protected pages, the first [`TOGETHER_MAX`] at most, whose contents the caller knows: they are
    /// missing then. Pages that are not there are left alone. In `left` is which left; returns how many.
    ///
    /// # Errors
    /// As [`PagedArea::extract_together`].
    pub fn drop_together(&mut self, pages: &[usize], left: &mut [bool; TOGETHER_MAX]) -> io::Result<usize> {
        drop_together(self.together.as_deref(), &self.area, pages, left)
    }

    /// Neighbouring pages into empty frames by copy, in few calls. Returns the bytes done: less than all where something is in the way, which the
    /// same for one page finds out.
    fn extract_run_by_copy(&mut self, pages: usize, frames: usize, bytes: usize) -> usize {
        let Some(memory) = &self.memory else { return 0 };
        // SAFETY: our pages; a writer that comes now waits until they are missing and faults again.
        if unsafe { self.uffd.write_protect(pages, bytes, true) }.is_err() {
            // The first of several mappings may be.
            // SAFETY: as above.
            let _ = unsafe { self.uffd.write_protect(pages, bytes, false) };
            return 0;
        }
        // Where that is not possible each gets its memory when it is written to.
        let _ = populate(frames, bytes);
        // SAFETY: the frames are in the pool (our caller's check), and empty; nobody else refers to them.
        let buffer = unsafe { std::slice::from_raw_parts_mut(frames as *mut u8, bytes) };
        let copied = memory.read_at(buffer, pages as u64).unwrap_or(0) / PAGE_BYTES * PAGE_BYTES;
        let mut left = 0;
        // SAFETY: our pages, whose contents now live in the frames.
        if copied > 0 && unsafe { raw::madvise(pages, copied, libc::MADV_DONTNEED) }.is_ok() {
            left = copied;
        }
        // Some are locked: those before are gone now or then, none behind is.
        while left < copied {
            // SAFETY: as above.
            let dropped = unsafe { raw::madvise(pages + left, PAGE_BYTES, libc::MADV_DONTNEED) };
            if dropped.is_err() {
                break;
            }
            left += PAGE_BYTES;
        }
        if left < bytes {
            let first = (frames + left - self.pool.start) / PAGE_BYTES;
            let _ = self.drop_frames(first, (bytes - left) / PAGE_BYTES);
        }
        // SAFETY: our pages. Those that are still there hold what they held; who waits for one of the others finds it missing.
        let _ = unsafe { self.uffd.write_protect(pages, bytes, false) };
        left
    }

    /// One page into one empty frame by copy: for kernels without MOVE, and for pages whose protection differs.
    fn extract_by_copy(&mut self, page: usize, frame: usize) -> Result<(), ExtractError> {
        let protects = self.protects();
        if protects {
            // SAFETY: our page; a writer that comes now waits until the page is missing and faults again.
            unsafe { self.uffd.write_protect(page, PAGE_BYTES, true) }.map_err(unless_unmapped)?;
        } else if is_writable(page) {
            // What is written between the copy and the end of the page would be lost.
            return Err(ExtractError::Busy);
        }
        let copied = self.copy_out(page, frame);
        if copied.is_err() {
            let _ = self.drop_frames((frame - self.pool.start) / PAGE_BYTES, 1);
        }
        if protects {
            // SAFETY: our page; if it is still there, so is what it holds.
            match unsafe { self.uffd.write_protect(page, PAGE_BYTES, false) }.map_err(unless_unmapped) {
                Ok(()) | Err(ExtractError::Missing) => {}
                Err(error) => return copied.and(Err(error)),
            }
        }
        copied
    }

    /// Fills an empty frame with the contents of a page that nobody can write to, and takes the page's memory.
    fn copy_out(&mut self, page: usize, frame: usize) -> Result<(), ExtractError> {
        let os = ExtractError::Os;
        if self.design == FrameDesign::Move {
            self.fill_frames((frame - self.pool.start) / PAGE_BYTES, 1).map_err(os)?;
        }
        if let Some(memory) = &self.memory {
            // SAFETY: the frame is in the pool (our caller's check) and full now; nobody else refers to it.
            let buffer = unsafe { std::slice::from_raw_parts_mut(frame as *mut u8, PAGE_BYTES) };
            // /proc/self/mem reads through any protection.
            if let Err(error) = memory.read_exact_at(buffer, page as u64) {
                let is_missing =
                    self.pagemap.as_ref().is_some_and(|pagemap| pagemap.has(page).is_ok_and(|has| !has));
                return Err(if is_missing { ExtractError::Missing } else { os(error) });
            }
        } else if !self.has(page).map_err(os)? || !copy_readable(page, frame) {
            // What was dropped behind our back, or swapped out, is not told apart: it stays.
            return Err(ExtractError::Busy);
        }
        // SAFETY: our page, its contents now live in the frame.
        unsafe { raw::madvise(page, PAGE_BYTES, libc::MADV_DONTNEED) }.map_err(unless_locked)
    }

    /// Moves installed pages inside the area (mremap). Returns how many were moved, as [`PagedArea::extract`].
    ///
    /// # Errors
    /// Why the first page that was not moved could not be.
    pub fn shift(&mut self, old: usize, new: usize, pages: usize) -> (usize, Result<(), ExtractError>) {
        let bytes = pages * PAGE_BYTES;
        if let Err(error) = self.area.check(old, bytes).and_then(|()| self.area.check(new, bytes)) {
            return (0, Err(ExtractError::Os(error)));
        }
        if self.design == FrameDesign::Copy {
            return (0, Err(ExtractError::Busy));
        }
        let mut done = 0;
        while done < bytes {
            // SAFETY: both ranges are inside the area (checked); the program handed `old` over for `new`.
            let (step, result) = unsafe { self.uffd.move_pages(new + done, old + done, bytes - done, true) };
            done += step;
            match result {
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                    let moved = self.moved_all_the_same(new + done, old + done, bytes - done, error);
                    match moved.and_then(|moved| self.uffd.wake(new + done, moved).map(|()| moved)) {
                        Ok(moved) => done += moved,
                        Err(error) => return (done / PAGE_BYTES, Err(ExtractError::Os(error))),
                    }
                }
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                    return (done / PAGE_BYTES, Err(ExtractError::Missing));
                }
                Err(_) => return (done / PAGE_BYTES, Err(ExtractError::Busy)),
            }
        }
        (pages, Ok(()))
    }

    /// After EEXIST from a move to a range that was empty: how many bytes were moved nevertheless.
    ///
    /// Linux 6.18 forgets to reset the error of a move that it had to try again (a page was used in that moment, EAGAIN), so
    /// it tries once more what it has just moved, and finds it moved. The page tables tell: a page that is at its
    /// destination and no longer at its source has been moved, as nobody else fills the destination.
    ///
    /// # Errors
    /// `error` when nothing was moved.
    pub(super) fn moved_all_the_same(
        &self,
        to: usize,
        from: usize,
        bytes: usize,
        error: io::Error,
    ) -> io::Result<usize> {
        let mut moved = 0;
        while moved < bytes && self.has(to + moved)? && !self.has(from + moved)? {
            moved += PAGE_BYTES;
        }
        if moved == 0 { Err(error) } else { Ok(moved) }
    }

    /// Whether a page is there. Where we may not read the page tables, one that was swapped out is not: of a page that was moved in this moment
    /// the destination is not, and the kernel does not tell the source from one that is gone.
    pub(super) fn has(&self, address: usize) -> io::Result<bool> {
        if let Some(pagemap) = &self.pagemap {
            return pagemap.has(address);
        }
        // SAFETY: asked about, not accessed.
        let page = unsafe { SharedSlice::from_raw(address as *mut u8, PAGE_BYTES) };
        let mut there = [0];
        resident(page, &mut there)?;
        Ok(there[0] & 1 != 0)
    }
}

/// What the page tables say.
#[derive(Debug)]
pub(super) struct Pagemap(File);

impl Pagemap {
    pub(super) fn descriptor(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub(super) fn open() -> io::Result<Self> {
        File::open("/proc/thread-self/pagemap").map(Self)
    }

    /// Whether a page is there, or was swapped out by the kernel.
    pub(super) fn has(&self, address: usize) -> io::Result<bool> {
        const PRESENT_OR_SWAPPED: u64 = 0b11 << 62;
        let mut word = [0; 8];
        self.0.read_exact_at(&mut word, (address / PAGE_BYTES * size_of::<u64>()) as u64)?;
        Ok(u64::from_ne_bytes(word) & PRESENT_OR_SWAPPED != 0)
    }
}

/// Copies a page that the program may read into a frame, both ours; false if it may not. Were the page missing, who serves its faults would wait for
/// itself.
fn copy_readable(page: usize, frame: usize) -> bool {
    let part = |address: usize| libc::iovec { iov_base: address as *mut _, iov_len: PAGE_BYTES };
    // SAFETY: the frame is in the pool (our caller's check) and full; nobody else refers to it.
    let copied = unsafe { raw::copy_many(&[part(frame)], &[part(page)]) };
    copied.is_ok_and(|bytes| bytes == PAGE_BYTES)
}

/// A page that is locked in memory (mlock) stays.
fn unless_locked(error: io::Error) -> ExtractError {
    match error.raw_os_error() {
        Some(libc::EINVAL) => ExtractError::Busy,
        _ => ExtractError::Os(error),
    }
}

fn unless_unmapped(error: io::Error) -> ExtractError {
    match error.raw_os_error() {
        Some(libc::ENOENT) => ExtractError::Missing,
        _ => ExtractError::Os(error),
    }
}

/// Whether the program may write to an installed page.
fn is_writable(page: usize) -> bool {
    // SAFETY: POPULATE_WRITE changes no contents, and the page is present.
    unsafe { raw::madvise(page, PAGE_BYTES, libc::MADV_POPULATE_WRITE) }.is_ok()
}
