//! What must be true of the writes in one direction of a session: the memory they go to, and what has become of each.

use std::collections::VecDeque;

use netvm_core::notify::Notify;

/// Value of a posted notification: the number of its write, which is never 0.
pub fn value_of(number: u64) -> std::num::NonZeroU32 {
    std::num::NonZeroU32::new(number as u32 + 1).expect("not 0")
}

const BYTES: u8 = 1;
const FENCED: u8 = 2;
const APPLIED: u8 = 4;

/// Write number `n` (its sequence number, too) fills cell `n % cells` with words of `n + 1`. There are as many cells as
/// the window has places, so no two writes to the same cell are under way at once.
pub struct Truth {
    pub memory: Vec<u8>,
    offsets: Vec<usize>,
    /// Of each number that was posted.
    flags: Vec<u8>,
    /// All writes with bytes below this number are applied.
    applied_below: u64,
    /// Notifications that were posted and not delivered, with their numbers.
    notices: VecDeque<(u64, Notify)>,
    pub delivered: u64,
}

fn cell_bytes(cell: usize) -> usize {
    match cell % 16 {
        15 => 3000,
        3 | 7 | 11 => 256,
        other => 8 * (1 + other % 5),
    }
}

impl Truth {
    pub fn new(cells: usize) -> Self {
        let mut offsets = vec![0];
        for cell in 0..cells {
            offsets.push(offsets[cell] + cell_bytes(cell));
        }
        Self {
            memory: vec![0; offsets[cells]],
            offsets,
            flags: Vec::new(),
            applied_below: 0,
            notices: VecDeque::new(),
            delivered: 0,
        }
    }

    pub fn cells(&self) -> usize {
        self.offsets.len() - 1
    }

    /// The number of the next write.
    pub fn next(&self) -> u64 {
        self.flags.len() as u64
    }

    /// Where a cell begins, and its length.
    pub fn place(&self, cell: usize) -> (usize, usize) {
        (self.offsets[cell], self.offsets[cell + 1] - self.offsets[cell])
    }

    /// What a write of this number consists of.
    pub fn contents(&self, number: u64, out: &mut Vec<u8>) {
        let (_, len) = self.place(number as usize % self.cells());
        out.clear();
        out.extend(std::iter::repeat_n((number + 1).to_le_bytes(), len / 8).flatten());
    }

    /// The next number was posted, with bytes or without, perhaps for nothing because it will be refused.
    pub fn posted(&mut self, has_bytes: bool, is_fenced: bool, notify: Option<Notify>) {
        let number = self.next();
        self.notices.extend(notify.map(|notify| (number, notify)));
        let flag = |is: bool, flag| if is { flag } else { 0 };
        self.flags.push(flag(has_bytes, BYTES) | flag(is_fenced, FENCED));
        self.advance();
    }

    fn advance(&mut self) {
        while let Some(flags) = self.flags.get(self.applied_below as usize)
            && flags & (BYTES | APPLIED) != BYTES
        {
            self.applied_below += 1;
        }
    }

    /// The last byte of a write that begins at `offset` has been put into the memory.
    pub fn landed(&mut self, offset: usize, len: usize) {
        let word = |at: usize| u64::from_le_bytes(self.memory[at..at + 8].try_into().expect("8 bytes"));
        let number = word(offset).checked_sub(1).expect("nobody writes 0");
        assert!((offset..offset + len).step_by(8).all(|at| word(at) == number + 1), "torn");
        assert_eq!(self.place(number as usize % self.cells()), (offset, len), "elsewhere");
        let flags = &mut self.flags[number as usize];
        assert!(*flags & BYTES != 0, "write {number} was never posted");
        assert!(*flags & APPLIED == 0, "write {number} applied twice");
        if *flags & FENCED != 0 {
            assert!(self.applied_below == number, "fenced write {number} before {}", self.applied_below);
        }
        *flags |= APPLIED;
        self.advance();
    }

    /// A notification has become visible.
    pub fn notified(&mut self, notify: Notify) {
        let (number, expected) = self.notices.pop_front().expect("a notification that nobody posted");
        assert_eq!(notify, expected, "in another order");
        assert!(self.applied_below >= number, "notification {number} before write {}", self.applied_below);
        let own = self.flags[number as usize];
        assert!(own & (BYTES | APPLIED) != BYTES, "notification {number} before its own write");
        self.delivered += 1;
    }

    /// All below `number` is there, and told.
    pub fn must_be_applied(&self, number: u64) {
        assert!(self.applied_below >= number, "flushed to {number}, applied to {}", self.applied_below);
        let told = self.notices.front().is_none_or(|&(first, _)| first >= number);
        assert!(told, "flushed to {number}, but {:?} was not told", self.notices.front());
    }

    /// This write was reported not to have left.
    pub fn must_not_be_applied(&self, number: u64) {
        assert!(self.flags[number as usize] & APPLIED == 0, "write {number} was called lost");
    }

    /// The least that who reads this cell now and later must find there.
    pub fn least(&self, cell: usize) -> u64 {
        let (next, cells) = (self.next(), self.cells() as u64);
        let rounds = (next + cells - 1 - cell as u64) / cells;
        let numbers = (0..rounds).rev().map(|round| round * cells + cell as u64);
        let mut written = numbers.filter(|&number| self.flags[number as usize] & BYTES != 0);
        written.next().map_or(0, |number| number + 1)
    }

    /// `bytes` were read from a cell when at least `least` had been written there.
    pub fn check_read(&self, cell: usize, least: u64, bytes: &[u8]) {
        let newest = self.least(cell);
        for word in bytes.chunks_exact(8) {
            let word = u64::from_le_bytes(word.try_into().expect("8 bytes"));
            let fits = word == 0 || (word - 1) as usize % self.cells() == cell;
            let is_whole = fits && (least..=newest).contains(&word);
            assert!(is_whole || self.is_torn(word, least, newest), "read {word}, not {least} to {newest}");
        }
    }

    /// Whether each byte of the word is from one of the writes that were under way during a read.
    fn is_torn(&self, word: u64, least: u64, newest: u64) -> bool {
        let versions = || std::iter::once(least).chain((least..=newest).rev().step_by(self.cells()));
        let has = |index: usize, byte| versions().any(|version| version.to_le_bytes()[index] == byte);
        least < newest && word.to_le_bytes().into_iter().enumerate().all(|(index, byte)| has(index, byte))
    }

    /// The end of a session that nobody cut: all is there.
    pub fn check_whole(&self) {
        self.must_be_applied(self.next());
        for cell in 0..self.cells() {
            let (offset, len) = self.place(cell);
            let newest = self.least(cell);
            self.check_read(cell, newest, &self.memory[offset..offset + len]);
        }
    }
}
