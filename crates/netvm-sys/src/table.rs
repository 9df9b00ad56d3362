//! A large table of words that costs memory only where it was written.

use crate::raw;
use std::io;

/// `words` zero words; pages of the table appear as they are written, and a fork copies them on write.
#[derive(Debug)]
pub struct LazyTable {
    start: *mut u64,
    words: usize,
}

// SAFETY: the table is plain memory that it owns; `&mut self` is needed to change it.
unsafe impl Send for LazyTable {}
// SAFETY: shared references only read, and nothing writes while they exist.
unsafe impl Sync for LazyTable {}

impl LazyTable {
    /// Reserves a table of `words` words.
    ///
    /// # Errors
    /// ENOMEM when the addresses cannot be had (RLIMIT_AS, vm.overcommit_memory=2).
    pub fn new(words: usize) -> io::Result<Self> {
        let bytes = words.checked_mul(8).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe { raw::mmap(0, bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1) }?;
        // SAFETY: our fresh mapping; a huge page for a sparse table would waste memory.
        let _ = unsafe { raw::madvise(start, bytes, libc::MADV_NOHUGEPAGE) };
        Ok(Self { start: start as *mut u64, words })
    }

    /// Words in the table.
    pub fn len(&self) -> usize {
        self.words
    }

    /// Whether it has no words.
    pub fn is_empty(&self) -> bool {
        self.words == 0
    }

    /// Reads word `index`; panics beyond the end.
    pub fn get(&self, index: usize) -> u64 {
        assert!(index < self.words, "word {index} of {}", self.words);
        // SAFETY: in bounds (checked), aligned, always initialised (zero pages).
        unsafe { self.start.add(index).read() }
    }

    /// Writes word `index`; panics beyond the end.
    pub fn set(&mut self, index: usize, word: u64) {
        assert!(index < self.words, "word {index} of {}", self.words);
        // SAFETY: in bounds (checked) and aligned; `&mut self` excludes readers.
        unsafe { self.start.add(index).write(word) }
    }
}

impl Drop for LazyTable {
    fn drop(&mut self) {
        // SAFETY: our own mapping, not used after this.
        let _ = unsafe { raw::munmap(self.start as usize, self.words * 8) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_words_keep_their_values() {
        let mut table = LazyTable::new(1 << 32).unwrap();
        for index in [0, 511, 512, (1 << 32) - 1] {
            assert_eq!(table.get(index), 0);
            table.set(index, index as u64 + 1);
        }
        assert_eq!(table.get((1 << 32) - 1), 1 << 32);
    }
}
