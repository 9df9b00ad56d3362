//! Words that several processes map and change atomically.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::mapping::Mapping;
use crate::memfd::Memfd;

/// In front of the words: a page with one word to sleep on.
const HEAD_BYTES: usize = 4096;

/// A word to sleep on and counters, in a file that can be passed to another process.
#[derive(Debug)]
pub struct SharedWords {
    mapping: Mapping,
    words: usize,
    file: Option<Memfd>,
}

impl SharedWords {
    /// So many zero words, in a file of their own.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM.
    pub fn new(words: usize) -> io::Result<Self> {
        let file = Memfd::sealed(c"netvm-words", Self::bytes(words)?)?;
        Ok(Self { mapping: Mapping::of_memfd(&file)?, words, file: Some(file) })
    }

    /// Those of another process. The file is not kept.
    ///
    /// # Errors
    /// As [`Memfd::adopt`], for another length too; ENOMEM.
    pub fn of_peer(file: std::os::fd::OwnedFd, words: usize) -> io::Result<Self> {
        let file = Memfd::adopt(file, Self::bytes(words)?)?;
        Ok(Self { mapping: Mapping::of_peer(&file, true)?, words, file: None })
    }

    fn bytes(words: usize) -> io::Result<u64> {
        let bytes = words.checked_mul(8).and_then(|bytes| bytes.checked_add(HEAD_BYTES));
        let bytes = bytes.and_then(|bytes| bytes.checked_next_multiple_of(4096));
        bytes.map(|bytes| bytes as u64).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Their file, when it is ours.
    pub fn file(&self) -> Option<&Memfd> {
        self.file.as_ref()
    }

    /// Closes the file: it has been passed on.
    pub fn forget_file(&mut self) {
        self.file = None;
    }

    /// The word to sleep on.
    pub fn bell(&self) -> &AtomicU32 {
        // SAFETY: the mapping is page-aligned, longer than a page (`bytes`) and lives as long as `self`; others may change atomics.
        unsafe { &*self.mapping.shared().as_ptr().cast::<AtomicU32>() }
    }

    /// The counters.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: behind the first page the mapping has at least `words` aligned words (`bytes`), and it lives as long as `self`.
        unsafe {
            let start = self.mapping.shared().as_ptr().add(HEAD_BYTES);
            std::slice::from_raw_parts(start.cast::<AtomicU64>(), self.words)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::sync::atomic::Ordering;

    #[test]
    fn both_see_the_same_words() {
        let here = SharedWords::new(1000).unwrap();
        let file = || here.file().unwrap().as_fd().try_clone_to_owned().unwrap();
        let there = SharedWords::of_peer(file(), 1000).unwrap();
        here.words()[999].store(5, Ordering::Relaxed);
        there.bell().store(7, Ordering::Relaxed);
        assert_eq!(there.words()[999].load(Ordering::Relaxed), 5);
        assert_eq!((here.bell().load(Ordering::Relaxed), here.words().len()), (7, 1000));
        assert!(SharedWords::of_peer(file(), 5000).is_err());
        assert!(SharedWords::new(usize::MAX / 4).is_err());
    }
}
