//! A seeded network for tests: delay, reordering across rails, sends and receives of any length, disconnection at any byte.
//!
//! The same seed gives the same run. Time is a count of steps.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// SplitMix64: a small generator whose whole state is its seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }

    /// True once in `times` on average.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// One direction of one connection: bytes arrive in order, after a delay, in other portions than they were sent.
#[derive(Debug)]
pub struct Pipe {
    random: Random,
    delay_max: u64,
    /// Portions with the step at which they arrive.
    portions: VecDeque<(u64, Vec<u8>)>,
    last_due: u64,
    /// Bytes that may still be received before the connection breaks.
    left_bytes: u64,
}

impl Pipe {
    /// A pipe whose delays are up to `delay_max` steps and that breaks after `cut_after_bytes`.
    pub fn new(seed: u64, delay_max: u64, cut_after_bytes: Option<u64>) -> Self {
        Self {
            random: Random::new(seed),
            delay_max,
            portions: VecDeque::new(),
            last_due: 0,
            left_bytes: cut_after_bytes.unwrap_or(u64::MAX),
        }
    }

    /// Takes some of `bytes` (perhaps none); returns how many.
    pub fn send(&mut self, now: u64, bytes: &[u8]) -> usize {
        let take = match self.random.below(4) {
            0 => 0,
            1 => bytes.len().min(1 + self.random.below(100) as usize),
            _ => bytes.len(),
        };
        if take > 0 {
            let due = self.last_due.max(now + self.random.below(self.delay_max + 1));
            self.last_due = due;
            self.portions.push_back((due, bytes[..take].to_vec()));
        }
        take
    }

    /// Up to `bytes_max` bytes that have arrived (perhaps fewer); `None` once the connection is broken.
    pub fn receive(&mut self, now: u64, bytes_max: usize) -> Option<Vec<u8>> {
        if self.left_bytes == 0 {
            return None;
        }
        let mut max = bytes_max.min(usize::try_from(self.left_bytes).unwrap_or(usize::MAX));
        if self.random.once_in(3) {
            max = max.min(1 + self.random.below(60) as usize);
        }
        let mut out = Vec::new();
        while let Some((due, portion)) = self.portions.front_mut() {
            if *due > now || out.len() == max {
                break;
            }
            let take = portion.len().min(max - out.len());
            if take < portion.len() {
                out.extend(portion.drain(..take));
            } else if out.is_empty() {
                out = core::mem::take(portion);
                self.portions.pop_front();
            } else {
                out.extend_from_slice(portion);
                self.portions.pop_front();
            }
        }
        self.left_bytes -= out.len() as u64;
        Some(out)
    }
}
