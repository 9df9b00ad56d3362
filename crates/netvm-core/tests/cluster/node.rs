//! What the sessions of one node share: words on which everybody's atomics work.

use netvm_core::atomic::{Atomic, AtomicOp};

/// Words to which all add 1.
pub const ADDED: usize = 3;
/// The word in which each replaces what another one left.
pub const CHAIN: usize = ADDED;
/// Words of the segment.
pub const WORDS: usize = CHAIN + 1;

#[derive(Default)]
pub struct Node {
    words: [u64; WORDS],
    /// What the answers to additions said.
    before: [Vec<u32>; ADDED],
    /// Additions that were executed once or not at all.
    unknown: [u32; ADDED],
    /// Values of the chain that somebody was told to have replaced.
    replaced: Vec<u32>,
    last_link: u32,
}

impl Node {
    /// Executes an atomic of a peer.
    pub fn execute(&mut self, offset: u64, atomic: &Atomic) -> u64 {
        let word = &mut self.words[offset as usize / 8];
        let before = *word;
        *word = atomic.applied_to(before);
        before
    }

    /// A value that nobody has put into the chain yet.
    pub fn new_link(&mut self) -> u32 {
        self.last_link += 1;
        self.last_link
    }

    /// An atomic on `word` was answered.
    pub fn answered(&mut self, word: usize, atomic: &Atomic, before: u64) {
        let value = u32::try_from(before).expect("nobody counts so far");
        match atomic.op {
            AtomicOp::Add => self.before[word].push(value),
            AtomicOp::CompareSwap if before != atomic.compare => {}
            _ => self.replaced.push(value),
        }
    }

    /// The session of an atomic ended before its answer.
    pub fn is_unknown(&mut self, word: usize) {
        if word < ADDED {
            self.unknown[word] += 1;
        }
    }

    /// Each answered atomic was executed once, and nothing else was.
    pub fn check(&self, index: usize) {
        for word in 0..ADDED {
            let mut before = self.before[word].clone();
            before.sort_unstable();
            assert!(before.windows(2).all(|pair| pair[0] < pair[1]), "node {index}: an addition was lost");
            let (done, value) = (before.len() as u64, self.words[word]);
            let most = done + u64::from(self.unknown[word]);
            assert!(done <= value && value <= most, "node {index}: {value} additions, not {done} to {most}");
            assert!(before.last().is_none_or(|&last| u64::from(last) < value));
        }
        let mut replaced = self.replaced.clone();
        replaced.sort_unstable();
        assert!(replaced.windows(2).all(|pair| pair[0] < pair[1]), "node {index}: replaced twice");
    }
}
