//! Whether single pages are installed write-protected, so that those that nobody writes to can leave many at a time.
//!
//! A write to a protected page is a fault more. That pays as long as few of the pages are written to: so these are counted, and when there
//! are too many only one page in some is still protected, to see whether that has changed. How many are too many depends on who faults: where several
//! threads do, each page that leaves by itself would interrupt another CPU.

/// Pages after which what was counted counts half.
const PAGES: u32 = 128;
/// Fewer than so many say nothing.
const PAGES_MIN: u32 = 64;
/// One written page of so many is too much where several threads fault, or faults are served in their threads,
const TOO_MANY: u32 = 3;
/// and where one thread does, which a pager's thread serves.
const TOO_MANY_ALONE: u32 = 8;
/// Half as many are few enough to begin again.
const FEW_PART: u32 = 2;
/// Faults after which it is decided how many threads fault,
const FAULTS: u32 = 64;
/// and how many of these must follow one of another thread.
const CHANGES: u32 = 8;
/// Meanwhile one page of so many is protected.
const SAMPLED: u32 = 16;

/// See the module's text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Protection {
    installed: u32,
    written: u32,
    stopped: bool,
    skipped: u32,
    /// Who faulted last; 0: unknown.
    thread: u32,
    faults: u32,
    changes: u32,
    several: bool,
    /// What leaves costs as much as where several fault.
    in_thread: bool,
}

impl Protection {
    /// Nothing is known. `in_thread`: faults are served in their threads.
    pub const fn new(in_thread: bool) -> Self {
        Self {
            in_thread,
            installed: 0,
            written: 0,
            stopped: false,
            skipped: 0,
            thread: 0,
            faults: 0,
            changes: 0,
            several: true,
        }
    }

    /// A thread of this number faults.
    pub fn note_fault(&mut self, thread: u32) {
        self.changes += u32::from(thread != self.thread);
        self.thread = thread;
        self.faults += 1;
        if self.faults >= FAULTS {
            self.several = thread == 0 || self.changes >= CHANGES;
            (self.faults, self.changes) = (0, 0);
        }
    }

    /// Whether several threads fault.
    pub const fn is_of_several(&self) -> bool {
        self.several
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
        let too_many = if self.several || self.in_thread { TOO_MANY } else { TOO_MANY_ALONE };
        let part = if self.stopped { FEW_PART * too_many } else { too_many };
        let stopped = self.written * part > self.installed;
        if stopped != self.stopped {
            // What comes now is counted anew: writes come later than the pages they are to.
            (self.stopped, self.installed, self.written, self.skipped) = (stopped, 0, 0, 0);
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
        assert_eq!(run(&mut Protection::new(false), 10_000, 0, 0), 10_000);
        assert_eq!(run(&mut Protection::new(false), 10_000, 10, 100), 10_000, "a tenth is written to");
    }

    #[test]
    fn pages_that_are_written_to_are_soon_only_samples() {
        for late in [0, 1, 50] {
            let mut protection = Protection::new(false);
            let protected = run(&mut protection, 10_000, 1, late);
            assert!((600..900).contains(&protected), "{protected}");
            // And the way back, when they are only read any more.
            let protected = run(&mut protection, 10_000, 0, 0);
            assert!(protected > 7_000, "{protected}");
        }
    }

    #[test]
    fn who_faults_alone_may_write_to_fewer() {
        let mut protection = Protection::new(false);
        let faults = |protection: &mut Protection, threads: u32| {
            (0..2 * FAULTS).for_each(|fault| protection.note_fault(1 + fault % threads));
        };
        faults(&mut protection, 1);
        assert_eq!(run(&mut protection, 10_000, 20, 0), 10_000);
        assert!(run(&mut protection, 10_000, 5, 0) < 2_000);
        faults(&mut protection, 2);
        run(&mut protection, 10_000, 7, 0);
        assert_eq!(run(&mut protection, 10_000, 5, 0), 10_000, "two threads");
        // Nobody knows.
        faults(&mut protection, 1);
        (0..FAULTS).for_each(|_| protection.note_fault(0));
        assert_eq!(run(&mut protection, 10_000, 5, 0), 10_000, "unknown threads");
        assert!(protection.is_of_several());
        // Served in its own thread a fault of one costs as those of several.
        let mut protection = Protection::new(true);
        faults(&mut protection, 1);
        assert_eq!(run(&mut protection, 10_000, 5, 0), 10_000, "in its thread");
        assert!(!protection.is_of_several());
    }

    #[test]
    fn it_does_not_go_to_and_fro() {
        // Between the two limits whatever was decided stays.
        let mut protection = Protection::new(false);
        assert_eq!(run(&mut protection, 20_000, 4, 30), 20_000);
        run(&mut protection, 5_000, 1, 0);
        let protected = run(&mut protection, 20_000, 4, 30);
        assert!((1200..1300).contains(&protected), "{protected}");
    }
}
