//! Far vectors of words that nobody packs or guesses.

use super::Random;
use netvm::far::{FarMemory, FarVec};

pub fn words(far: &FarMemory, count: usize, seed: u64) -> FarVec<u64> {
    let mut random = Random::new(seed);
    let mut words = far.vec();
    words.extend((0..count).map(|_| random.next()));
    words
}

#[track_caller]
pub fn check(words: &[u64], seed: u64) {
    let mut random = Random::new(seed);
    assert!(words.iter().all(|&word| word == random.next()));
}
