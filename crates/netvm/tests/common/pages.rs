//! Far memory whose every byte is known.

use super::Random;
use netvm_sys::shared::SharedSlice;

const PAGE: usize = 4096;

/// Pages of noise: each is made from its number and how often it was written. Those that never were are zero.
pub struct Pages {
    memory: SharedSlice,
    seed: u64,
    times: Vec<u32>,
    random: Random,
}

impl Pages {
    pub fn new(memory: SharedSlice, seed: u64) -> Self {
        Self { memory, seed, times: vec![0; memory.len() / PAGE], random: Random::new(seed) }
    }

    /// The same, written.
    pub fn written(memory: SharedSlice, seed: u64) -> Self {
        let mut pages = Self::new(memory, seed);
        (0..pages.times.len()).for_each(|page| pages.write(page));
        pages
    }

    /// The same contents elsewhere.
    pub fn at(self, memory: SharedSlice) -> Self {
        Self { memory, ..self }
    }

    fn contents(&self, page: usize) -> [u8; PAGE] {
        let mut bytes = [0; PAGE];
        if self.times[page] > 0 {
            let mut noise = Random::new(self.seed ^ (page as u64) << 32 ^ u64::from(self.times[page]));
            bytes.as_chunks_mut::<8>().0.fill_with(|| noise.next().to_le_bytes());
        }
        bytes
    }

    pub fn write(&mut self, page: usize) {
        self.times[page] += 1;
        self.memory.write_from(page * PAGE, &self.contents(page)).unwrap();
    }

    #[track_caller]
    pub fn check(&self, page: usize) {
        let mut bytes = [0; PAGE];
        self.memory.read_into(page * PAGE, &mut bytes).unwrap();
        assert!(bytes == self.contents(page), "page {page} of {:#x}", self.seed);
    }

    /// Random pages of the first `part` are checked, every third is written.
    #[track_caller]
    pub fn churn_among(&mut self, part: usize, steps: usize) {
        for _ in 0..steps {
            let page = self.random.next() as usize % part;
            self.check(page);
            if self.random.next().is_multiple_of(3) {
                self.write(page);
            }
        }
    }

    #[track_caller]
    pub fn churn(&mut self, steps: usize) {
        self.churn_among(self.times.len(), steps);
    }

    /// Every `step`-th page, in no order, is checked, and every third of them written.
    #[track_caller]
    pub fn churn_scattered(&mut self, step: usize, steps: usize) {
        for _ in 0..steps {
            let page = self.random.next() as usize % (self.times.len() / step) * step;
            self.check(page);
            if self.random.next().is_multiple_of(3) {
                self.write(page);
            }
        }
    }

    #[track_caller]
    pub fn check_all(&self) {
        (0..self.times.len()).for_each(|page| self.check(page));
    }
}
