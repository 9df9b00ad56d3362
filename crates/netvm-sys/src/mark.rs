//! A word in a file of two processes, by which its owner tells the other that what is in there is over.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU32, Ordering, fence};

use crate::memfd::Memfd;
use crate::raw;

/// Bytes of the page that a mark is in.
pub const MARK_BYTES: u64 = 4096;

/// Another process's mark, mapped for reading.
#[derive(Debug)]
pub struct Mark {
    page: usize,
}

impl Mark {
    /// The mark at `offset` of `file`.
    ///
    /// # Errors
    /// EINVAL for what is no page of the file; ENOMEM.
    pub fn of_peer(file: &Memfd, offset: u64) -> io::Result<Self> {
        let end = offset.checked_add(MARK_BYTES).filter(|&end| end <= file.len());
        if end.is_none() || !offset.is_multiple_of(MARK_BYTES) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (fd, bytes) = (file.as_fd().as_raw_fd(), MARK_BYTES as usize);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let page = unsafe { raw::mmap_at(0, bytes, libc::PROT_READ, libc::MAP_SHARED, fd, offset) }?;
        Ok(Self { page })
    }

    /// A child of a fork does not have it. It could have the kernel map any other page of the file in its place (remap_file_pages(2)).
    ///
    /// # Errors
    /// ENOMEM, and it has.
    pub fn keep_from_children(&self) -> io::Result<()> {
        // SAFETY: our own mapping; the advice changes what a child inherits, not contents.
        unsafe { raw::madvise(self.page, MARK_BYTES as usize, libc::MADV_DONTFORK) }
    }

    /// Whether it is set. What was read or written in the file before was still what its owner had there if it is.
    #[inline]
    pub fn is_set(&self) -> bool {
        // What was read before is read before the mark.
        fence(Ordering::Acquire);
        // SAFETY: a whole page of a file that does not become shorter (no `Memfd` does), mapped as long as `self` lives; others may
        // change atomics.
        unsafe { &*(self.page as *const AtomicU32) }.load(Ordering::Relaxed) != 0
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: our own mapping, into which no reference is left.
        let _ = unsafe { raw::munmap(self.page, MARK_BYTES as usize) };
    }
}

/// Sets the mark at `offset` of our `file`.
///
/// # Errors
/// Those of pwrite(2); ENOSPC, ENOMEM.
pub fn set(file: &Memfd, offset: u64) -> io::Result<()> {
    put(file, offset, 1)
}

/// Takes it away: whoever sees something in the file that is done after this sees no mark either.
///
/// # Errors
/// None in practice.
pub fn clear(file: &Memfd, offset: u64) -> io::Result<()> {
    // A hole is no mark; making one needs no memory.
    let cleared = put(file, offset, 0).or_else(|_| file.punch_hole(offset, MARK_BYTES));
    fence(Ordering::SeqCst);
    cleared
}

fn put(file: &Memfd, offset: u64, word: u32) -> io::Result<()> {
    let (fd, bytes) = (file.as_fd().as_raw_fd(), word.to_ne_bytes());
    // SAFETY: the kernel reads the bytes of a local.
    let count = unsafe { libc::pwrite(fd, bytes.as_ptr().cast(), bytes.len(), offset as libc::off_t) };
    match usize::try_from(count) {
        Ok(count) if count == bytes.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_seen_until_it_is_taken_away_and_cannot_be_kept() {
        let file = Memfd::sealed(c"test", 4 * 4096).unwrap();
        let mark = Mark::of_peer(&file, 3 * 4096).unwrap();
        assert!(!mark.is_set(), "nobody has set it");
        for _ in 0..2 {
            set(&file, 3 * 4096).unwrap();
            assert!(mark.is_set());
            clear(&file, 3 * 4096).unwrap();
            assert!(!mark.is_set());
        }
        set(&file, 3 * 4096).unwrap();
        file.punch_hole(3 * 4096, 4096).unwrap();
        assert!(!mark.is_set(), "a hole");
        for offset in [4 * 4096, 3 * 4096 + 4, u64::MAX - 4095] {
            assert!(Mark::of_peer(&file, offset).is_err(), "{offset}");
        }
    }
}
