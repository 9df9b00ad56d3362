//! Whether single pages are installed write-protected, so that those that nobody writes to can leave many at a time.
//!
//! A write to a protected page is a fault more. That pays as long as few of the pages are written to: so these are counted, and when there
//! are too many only one page in some is still protected, to see whether that has changed.

/// Pages after which what was counted counts half.
const PAGES: u32 = 128;
/// Fewer than so many say nothing.
const PAGES_MIN: u32 = 64;
/// One written page of so many is too much,
const TOO_MANY: u32 = 3;
/// and one of so many is little enough to begin again.
const FEW: u32 = 6;
/// Meanwhile one page of so many is protected.
const SAMPLED: u32 = 16;

/// See the module's text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Protection {
    installed: u32,
    written: u32,
    stopped: bool,
    skipped: u32,
}

impl Protection {
    /// Nothing is known.
    pub const fn new() -> Self {
        Self { installed: 0, written: 0, stopped: false, skipped: 0 }
    }

    /// Whether the next page, which was asked for to be read, is to be protected.
    pub fn protects_next(&mut self) -> bool {
        if self.stopped {
            self.skipped += 1;
            if self.skipped < SAMPLED {
                return false;
            }
            self.skipped = 0;
        }
        self.installed += 1;
        if self.installed >= PAGES {
            self.installed /= 2;
            self.written /= 2;
        }
        self.decide();
        true
    }

    /// A protected page was written to.
    pub fn note_write(&mut self) {
        self.written += 1;
        self.decide();
    }

    fn decide(&mut self) {
        if self.installed < PAGES_MIN {
            return;
        }
        let stopped = self.written * if self.stopped { FEW } else { TOO_MANY } > self.installed;
        if stopped != self.stopped {
            // What comes now is counted anew: writes come later than the pages they are to.
            *self = Self { stopped, ..Self::new() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of `pages` pages were protected, when every `nth` of these is written to, `late` pages later.
    fn run(protection: &mut Protection, pages: u32, nth: u32, late: usize) -> u32 {
        let (mut protected, mut writes) = (0, alloc::collections::VecDeque::new());
        for _ in 0..pages {
            let next = protection.protects_next();
            protected += u32::from(next);
            writes.push_back(next && nth > 0 && protected.is_multiple_of(nth));
            if writes.len() > late && writes.pop_front() == Some(true) {
                protection.note_write();
            }
        }
        protected
    }

    #[test]
    fn pages_that_are_only_read_are_all_protected() {
        assert_eq!(run(&mut Protection::new(), 10_000, 0, 0), 10_000);
        assert_eq!(run(&mut Protection::new(), 10_000, 10, 100), 10_000, "a tenth is written to");
    }

    #[test]
    fn pages_that_are_written_to_are_soon_only_samples() {
        for late in [0, 1, 50] {
            let mut protection = Protection::new();
            let protected = run(&mut protection, 10_000, 1, late);
            assert!((600..900).contains(&protected), "{protected}");
            // And the way back, when they are only read any more.
            let protected = run(&mut protection, 10_000, 0, 0);
            assert!(protected > 7_000, "{protected}");
        }
    }

    #[test]
    fn it_does_not_go_to_and_fro() {
        // Between the two limits whatever was decided stays.
        let mut protection = Protection::new();
        assert_eq!(run(&mut protection, 20_000, 4, 30), 20_000);
        run(&mut protection, 5_000, 1, 0);
        let protected = run(&mut protection, 20_000, 4, 30);
        assert!((1200..1300).contains(&protected), "{protected}");
    }
}
