//! A file of words that several processes map and change atomically, or the same in memory of one.

use crate::raw;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Words shared through a file. The file must not be made shorter while it is mapped; it is created with mode 0600.
#[derive(Debug)]
pub struct FileWords {
    start: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the words are atomics; any thread may use them.
unsafe impl Send for FileWords {}
// SAFETY: as above.
unsafe impl Sync for FileWords {}

impl FileWords {
    /// Creates a file of `words` zero words.
    ///
    /// # Errors
    /// EEXIST when it is there already; ENOSPC when the file system has no room.
    pub fn create(path: &Path, words: usize) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
        file.set_len(words as u64 * 8)?;
        Self::map(&file, words)
    }

    /// Opens a file that another process created.
    ///
    /// # Errors
    /// InvalidData when it does not have `words` words.
    pub fn open(path: &Path, words: usize) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() != words as u64 * 8 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Self::map(&file, words)
    }

    /// The first `words` words of such a file.
    ///
    /// # Errors
    /// InvalidData when it is shorter.
    pub fn open_start(path: &Path, words: usize) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() < words as u64 * 8 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Self::map(&file, words)
    }

    /// Zero words of this process alone.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn anonymous(words: usize) -> io::Result<Self> {
        Self::map_with(words, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    /// Zero words that this process shares with those that it forks.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn inherited(words: usize) -> io::Result<Self> {
        Self::map_with(words, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1)
    }

    fn map(file: &File, words: usize) -> io::Result<Self> {
        Self::map_with(words, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn map_with(words: usize, flags: libc::c_int, file: RawFd) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe { raw::mmap(0, words * 8, protection, flags, file) }?;
        let start = NonNull::new(start as *mut AtomicU64).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { start, words })
    }

    /// The words.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped for as long as `self`, page-aligned, `words` words long; atomics may change under a shared reference.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl AsRef<[AtomicU64]> for FileWords {
    fn as_ref(&self) -> &[AtomicU64] {
        self.words()
    }
}

impl Drop for FileWords {
    fn drop(&mut self) {
        // SAFETY: our own mapping; no reference into it outlives `self`.
        let _ = unsafe { raw::munmap(self.start.as_ptr() as usize, self.words * 8) };
    }
}
