//! Copies of packed pages that a process has promised to the children that it forks: the list, and how far it has come.
//!
//! Parent and child have the same packed pieces after a fork, and both would send them to a lender by and by, each to slots of its own.
//! Instead the parent takes slots for all of them before the fork, so both know them, and writes them afterwards (its *keeper*). Whoever has
//! the list since a fork (*followers*) finds out from words that all share which slots have been written, and needs not write those pieces.
//!
//! A promise may be broken, each for itself: the keeper has no use for a piece any more before it was written, or stops. Then a follower does
//! for itself what it would have done without. Which slot and which piece is never learnt from the words, only how many promises are settled
//! and which of them are kept; what they say about promises that this process does not have is not looked at.

use super::pool::PieceId;
use crate::residency::Slot;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

/// Promises settled so far: written by the keeper alone.
const SETTLED: usize = 0;
/// The keeper has stopped, or is to stop.
const ENDED: usize = 1;
/// How often followers have said that they are there.
const SEEN: usize = 2;
/// Then a bit for each promise: it was kept.
const KEPT: usize = 3;

/// That the piece will be written to the slot, if it is still the same: a number may be given to another piece, which has another stamp then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promise {
    /// The piece.
    pub piece: PieceId,
    /// What the piece was marked with when it was packed.
    pub stamp: u32,
    /// Where it goes.
    pub slot: Slot,
}

/// What goes out in one transfer, and promises before it that were broken.
#[derive(Clone, Copy, Debug)]
struct Step {
    number: u32,
    /// All promises before this one are settled when it, and all before it, have arrived.
    end: usize,
    arrived: bool,
}

/// The promises made before one fork. Each process has its list; `W` are words that all have, zero at first.
#[derive(Debug)]
pub struct Promises<W> {
    words: W,
    list: Vec<Promise>,
    is_keeper: bool,
    /// The keeper's: so many have been sent, or broken. A follower's: so many have been taken up.
    done: usize,
    /// On their way, in order.
    steps: VecDeque<Step>,
}

impl<W: AsRef<[AtomicU64]>> Promises<W> {
    /// Words that so many promises need.
    pub const fn words(promises: usize) -> usize {
        KEPT + promises.div_ceil(u64::BITS as usize)
    }

    /// Whoever makes them is their keeper.
    ///
    /// # Panics
    /// When there are too few words.
    pub fn new(words: W, list: Vec<Promise>) -> Self {
        assert!(words.as_ref().len() >= Self::words(list.len()));
        Self { words, list, is_keeper: true, done: 0, steps: VecDeque::new() }
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.words.as_ref()[index]
    }

    /// After a fork, in the child. The keeper must have had nothing on its way when it forked.
    pub fn follow(&mut self) {
        self.is_keeper = false;
        self.steps.clear();
    }

    /// Whether this process is to keep them.
    pub fn is_keeper(&self) -> bool {
        self.is_keeper
    }

    /// Whether nothing is left to be done about them here.
    pub fn is_over(&self) -> bool {
        self.done == self.list.len() && self.steps.is_empty()
    }

    /// Those that are neither sent nor broken, or have not been taken up.
    pub fn left(&self) -> &[Promise] {
        &self.list[self.done..]
    }

    /// The keeper: the next one to keep or to break.
    pub fn next(&self) -> Option<Promise> {
        self.list.get(self.done).copied().filter(|_| self.is_keeper)
    }

    /// The next one is sent with the next step.
    pub fn keep(&mut self) {
        let (word, bit) = (KEPT + self.done / 64, 1 << (self.done % 64));
        // Nobody looks at it before it is settled.
        self.word(word).fetch_or(bit, Ordering::Relaxed);
        self.done += 1;
    }

    /// The next one is broken. Its slot is free for the keeper.
    pub fn break_it(&mut self) {
        self.done += 1;
    }

    /// What was kept since the last step leaves together, as step `number`: a number that no other step on its way has.
    pub fn leave(&mut self, number: u32) {
        self.steps.push_back(Step { number, end: self.done, arrived: false });
    }

    /// What was broken since the last step needs no transfer.
    pub fn settle_broken(&mut self) {
        match self.steps.back_mut() {
            Some(last) => last.end = self.done,
            None => self.word(SETTLED).store(self.done as u64, Ordering::Release),
        }
    }

    /// A step is at its lenders. False when it is none of these.
    pub fn arrived(&mut self, number: u32) -> bool {
        let Some(step) = self.steps.iter_mut().find(|step| step.number == number) else { return false };
        step.arrived = true;
        while let Some(&Step { end, arrived: true, .. }) = self.steps.front() {
            self.steps.pop_front();
            self.word(SETTLED).store(end as u64, Ordering::Release);
        }
        true
    }

    /// Steps that have left and are not settled.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// A follower: takes up the next one that is settled, and whether it was kept. One that was not leaves its slot free for this process.
    pub fn take_up(&mut self) -> Option<(Promise, bool)> {
        let settled = self.word(SETTLED).load(Ordering::Acquire);
        let promise =
            *self.list.get(self.done).filter(|_| !self.is_keeper && (self.done as u64) < settled)?;
        let kept = self.word(KEPT + self.done / 64).load(Ordering::Relaxed) >> (self.done % 64) & 1 == 1;
        self.done += 1;
        Some((promise, kept))
    }

    /// How many are settled, as far as is known.
    pub fn settled(&self) -> u64 {
        self.word(SETTLED).load(Ordering::Relaxed)
    }

    /// Breaks all that are left, whose slots are free for this process. The keeper tells the others; what it has sent is kept, but no follower
    /// learns of what has not arrived.
    pub fn end(&mut self) -> Vec<Promise> {
        if self.is_keeper {
            self.stop();
        }
        self.steps.clear();
        let left = self.list.split_off(self.done);
        self.done = self.list.len();
        left
    }

    /// All are to stop: the keeper learns it from [`Promises::is_stopped`].
    pub fn stop(&self) {
        self.word(ENDED).store(1, Ordering::Release);
    }

    /// Whether somebody has stopped it.
    pub fn is_stopped(&self) -> bool {
        self.word(ENDED).load(Ordering::Relaxed) != 0
    }

    /// A follower: the keeper has stopped, and what it has settled has been taken up.
    pub fn has_ended(&self) -> bool {
        // In this order: what was settled before the end is seen.
        let ended = self.word(ENDED).load(Ordering::Acquire) != 0;
        ended && self.done as u64 >= self.settled()
    }

    /// A follower says that it is there.
    pub fn be_seen(&self) {
        self.word(SEEN).fetch_add(1, Ordering::Relaxed);
    }

    /// How often followers have been seen.
    pub fn seen(&self) -> u64 {
        self.word(SEEN).load(Ordering::Relaxed)
    }
}
