//! Whether the rest of a block is brought in with the page of it that is missing.
//!
//! An allocator's block that lies on two pages is mostly used as a whole: its second page would be the next fault. Blocks that are not are
//! told apart by their size: of 16 times one is left alone, to see whether the fault comes. So a rest that nobody wants is fetched for
//! a while, and then only looked at.

/// Largest block whose rest is brought in, in bytes. Longer ones may be streams.
pub const BLOCK_BYTES_MAX: usize = 8 << 10;
/// Sizes are told apart in steps of so many bytes.
const STEP_BYTES: usize = 512;
const SIZES: usize = BLOCK_BYTES_MAX / STEP_BYTES;
/// One of so many is left alone,
const SAMPLED: u8 = 16;
/// and remembered until so many others have been.
const SAMPLES: usize = 8;
/// Of this, what part of those left alone was asked for.
const ALL: u16 = 256;
/// A rest costs about half of a fault: from here on it pays,
const ENOUGH: u16 = ALL / 2;
/// and new sizes are believed to.
const BEGIN: u16 = ALL * 3 / 4;
/// A sample changes what is believed by one part of so many of the difference.
const WEIGHT: u16 = 8;

#[derive(Clone, Copy, Debug)]
struct Size {
    wanted: u16,
    times: u8,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    page: u32,
    size: u8,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub struct WholeBlocks {
    sizes: [Size; SIZES],
    samples: [Option<Sample>; SAMPLES],
    next: usize,
}

impl Default for WholeBlocks {
    fn default() -> Self {
        Self { sizes: [Size { wanted: BEGIN, times: 0 }; SIZES], samples: [None; SAMPLES], next: 0 }
    }
}

impl WholeBlocks {
    /// There was a fault on this page.
    #[inline]
    pub fn note_fault(&mut self, page: u32) {
        for sample in &mut self.samples {
            if let Some(Sample { page: asked, size }) = *sample
                && asked == page
            {
                *sample = None;
                let size = &mut self.sizes[usize::from(size)];
                size.wanted += (ALL - size.wanted).div_ceil(WEIGHT);
            }
        }
    }

    /// Whether to bring in the rest of a block of `bytes` bytes (1 to [`BLOCK_BYTES_MAX`]), whose next page is `rest`, too.
    pub fn takes(&mut self, bytes: usize, rest: u32) -> bool {
        let index = (bytes.saturating_sub(1) / STEP_BYTES).min(SIZES - 1);
        let size = &mut self.sizes[index];
        size.times += 1;
        if size.times < SAMPLED {
            return size.wanted >= ENOUGH;
        }
        size.times = 0;
        let old = self.samples[self.next].replace(Sample { page: rest, size: index as u8 });
        self.next = (self.next + 1) % SAMPLES;
        if let Some(Sample { size, .. }) = old {
            let size = &mut self.sizes[usize::from(size)];
            size.wanted -= size.wanted.div_ceil(WEIGHT);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of `rounds` blocks, how many rests were brought in; `used`: whether their program wants them.
    fn brought_in(
        blocks: &mut WholeBlocks,
        bytes: usize,
        rounds: core::ops::Range<u32>,
        mut used: impl FnMut(u32) -> bool,
    ) -> u32 {
        let mut count = 0;
        for round in rounds {
            let page = round * 7;
            blocks.note_fault(page);
            let taken = blocks.takes(bytes, page + 1);
            count += u32::from(taken);
            if !taken && used(round) {
                blocks.note_fault(page + 1);
            }
        }
        count
    }

    #[test]
    fn what_is_used_as_a_whole_comes_as_a_whole() {
        let mut blocks = WholeBlocks::default();
        assert!(brought_in(&mut blocks, 2560, 0..1600, |_| true) >= 1500);
        assert!(brought_in(&mut blocks, BLOCK_BYTES_MAX, 0..1600, |round| round % 7 < 6) >= 1400);
    }

    #[test]
    fn what_nobody_wants_is_soon_left_alone_and_taken_up_again() {
        let mut blocks = WholeBlocks::default();
        assert!(brought_in(&mut blocks, 2560, 0..10_000, |_| false) < 300);
        let mut again = brought_in(&mut blocks, 2560, 0..1600, |_| true);
        assert!(again > 900, "{again}");
        again = brought_in(&mut blocks, 2560, 0..1600, |_| false);
        assert!(again < 700, "{again}");
    }

    #[test]
    fn sizes_are_judged_by_themselves() {
        let mut blocks = WholeBlocks::default();
        let (mut headers, mut values) = (0, 0);
        for round in 0..4000 {
            headers += brought_in(&mut blocks, 5000, round..round + 1, |_| false);
            values += brought_in(&mut blocks, 2560, round + 10_000..round + 10_001, |_| true);
        }
        assert!(headers < 400 && values > 3700, "{headers}, {values}");
    }
}
