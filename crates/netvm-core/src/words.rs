//! Words that several threads, or processes, change atomically: where notification boards and gates live.

use alloc::boxed::Box;

#[cfg(not(test))]
use core::sync::atomic::{AtomicU32, AtomicU64};
#[cfg(test)]
use loom::sync::atomic::{AtomicU32, AtomicU64};

/// A word to sleep on, and counters. Others may put anything there at any time: what is read is not believed.
pub trait Words {
    /// The word to sleep on.
    fn bell(&self) -> &AtomicU32;
    /// The counters; always as many.
    fn words(&self) -> &[AtomicU64];
}

/// Words of this process alone.
#[derive(Debug)]
pub struct PrivateWords {
    bell: AtomicU32,
    words: Box<[AtomicU64]>,
}

impl PrivateWords {
    /// So many zero words.
    pub fn new(words: usize) -> Self {
        Self { bell: AtomicU32::new(0), words: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl Words for PrivateWords {
    fn bell(&self) -> &AtomicU32 {
        &self.bell
    }

    fn words(&self) -> &[AtomicU64] {
        &self.words
    }
}
