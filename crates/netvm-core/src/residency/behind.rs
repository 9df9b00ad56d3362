//! Which pages to give up when streams run over more than there is room for: those that the stream has just left.
//!
//! Who keeps the newest pages of a loop over more than the local memory loses each of them just before it is needed again. Who
//! gives up the pages right behind the stream keeps the others, which the next round finds; and the memory that goes round is small enough
//! for the processor's cache. For a stream over what does have room it is wrong: the old pages would never leave. So it is
//! tried when pages of streams come back that were evicted, and left again when they come back so soon that keeping the newest would
//! have kept them. As in set duelling (Qureshi et al., *Adaptive insertion policies*, ISCA 2007), what would have happened decides, but
//! by the age of what comes back: there are no accesses to sample.

use core::ops::Range;

/// Windows that streams have left and that are remembered; older ones stay local.
const WINDOWS: usize = 8;
/// So much of the local memory must have come back before another way is tried.
const TRIED_PART: u64 = 8;
/// Younger than so many eighths of the local memory: keeping the newest would have kept it. The rest is the reserve.
const YOUNG_EIGHTHS: u64 = 7;
/// A trial of keeping the newest that ends before so many times the local memory was evicted has failed.
const FAILED: u64 = 4;
/// Least and most times the local memory that is evicted between two trials after one that failed.
const PATIENCE: Range<u64> = 4..1024;

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub struct Behind {
    windows: [(u32, u32); WINDOWS],
    count: usize,
    drops: bool,
    /// Pages evicted since it began to drop, or stopped.
    evicted: u64,
    /// Of the pages that came back: those that keeping the newest would have kept, and the others.
    young: u64,
    old: u64,
    /// Pages to evict before keeping the newest is tried again.
    patience: u64,
}

impl Behind {
    /// Begins with keeping the newest.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether pages behind streams are given up first.
    #[inline]
    pub fn drops(&self) -> bool {
        self.drops
    }

    /// Pages were evicted.
    pub fn evicted(&mut self, pages: usize) {
        self.evicted += pages as u64;
    }

    /// A stream has left these pages.
    pub fn left(&mut self, pages: Range<u32>) {
        if !self.drops || pages.is_empty() {
            return;
        }
        if self.count == WINDOWS {
            self.windows.copy_within(1.., 0);
            self.count -= 1;
        }
        self.windows[self.count] = (pages.start, pages.end);
        self.count += 1;
    }

    /// The pages to give up first: those that were left last, as they are in the cache.
    pub fn take(&mut self) -> Option<Range<u32>> {
        self.count = self.count.checked_sub(1)?;
        let (start, end) = self.windows[self.count];
        Some(start..end)
    }

    /// Pages of a stream come back that were evicted `age` pages ago, where `local` pages have room.
    pub fn back(&mut self, age: u32, pages: u32, local: usize) {
        let (age, local) = (u64::from(age), local as u64);
        if age >= self.evicted {
            // The other way has evicted it.
            return;
        }
        if age < local / 8 * YOUNG_EIGHTHS {
            self.young += u64::from(pages)
        } else {
            self.old += u64::from(pages)
        }
        let enough = (local / TRIED_PART).max(1);
        if !self.drops {
            if self.young + self.old >= enough {
                let failed = self.evicted < local.saturating_mul(FAILED) && self.patience > 0;
                let patience = if failed { self.patience.saturating_mul(2) } else { 0 };
                self.patience = patience.min(local.saturating_mul(PATIENCE.end));
                self.change(true);
            }
        } else if self.young >= enough && self.young > self.old && self.evicted >= self.patience {
            self.patience = self.patience.max(local.saturating_mul(PATIENCE.start));
            self.change(false);
        } else if self.young + self.old >= local.max(2) {
            (self.young, self.old) = (self.young / 2, self.old / 2);
        }
    }

    fn change(&mut self, drops: bool) {
        (self.drops, self.count) = (drops, 0);
        (self.evicted, self.young, self.old) = (0, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::VecDeque;
    use alloc::vec;

    const LOCAL: usize = 1024;
    const WINDOW: u32 = 16;

    /// Streams over pages of which `LOCAL` have room; returns how many windows were missed.
    struct Model {
        behind: Behind,
        local: VecDeque<u32>,
        /// When each window was evicted.
        evicted: alloc::vec::Vec<u64>,
        clock: u64,
    }

    impl Model {
        fn new(pages: u32) -> Self {
            Self {
                behind: Behind::new(),
                local: VecDeque::new(),
                evicted: vec![0; pages.div_ceil(WINDOW) as usize],
                clock: 0,
            }
        }

        fn round(&mut self, pages: Range<u32>) -> usize {
            let mut misses = 0;
            for start in pages.step_by(WINDOW as usize) {
                let window = start / WINDOW;
                if !self.local.contains(&window) {
                    misses += 1;
                    let evicted = self.evicted[window as usize];
                    if evicted > 0 {
                        self.behind.back((self.clock - evicted) as u32, WINDOW, LOCAL);
                    }
                    while self.local.len() >= LOCAL / WINDOW as usize {
                        let left = self.behind.take().map(|pages| pages.start / WINDOW);
                        let victim = match left.and_then(|left| self.local.iter().position(|&w| w == left)) {
                            Some(place) => self.local.remove(place),
                            None => self.local.pop_front(),
                        };
                        self.clock += u64::from(WINDOW);
                        self.behind.evicted(WINDOW as usize);
                        self.evicted[victim.unwrap() as usize] = self.clock;
                    }
                    self.local.push_back(window);
                }
                self.behind.left(start..start + WINDOW);
            }
            misses
        }
    }

    #[test]
    fn a_loop_over_more_than_there_is_room_for_finds_what_stayed() {
        for pages in [1100, 1500, 2000, 4096, 100_000] {
            let mut model = Model::new(pages);
            for _ in 0..4 {
                model.round(0..pages);
            }
            let misses: usize = (0..20).map(|_| model.round(0..pages)).sum();
            let all = 20 * pages.div_ceil(WINDOW) as usize;
            let best = all - 20 * LOCAL / WINDOW as usize;
            // Keeping the newest misses all of them.
            assert!(
                misses <= best + (all - best) / 4,
                "{pages} pages: {misses} of {all} missed, {best} at best"
            );
        }
    }

    #[test]
    fn what_has_room_comes_in_for_good() {
        let mut model = Model::new(4096 + 800);
        (0..6).for_each(|_| _ = model.round(0..4096));
        assert!(model.behind.drops());
        let misses: usize = (0..20).map(|_| model.round(4096..4096 + 800)).sum();
        assert!(misses <= 4 * 800 / WINDOW as usize, "{misses} missed");
        assert_eq!(model.round(4096..4096 + 800), 0);
    }

    #[test]
    fn only_the_last_windows_are_known() {
        let mut behind = Behind { drops: true, ..Behind::new() };
        (0..20).for_each(|window| behind.left(window * 10..window * 10 + 10));
        behind.left(7..7);
        assert_eq!(behind.take(), Some(190..200));
        assert_eq!((0..20).map_while(|_| behind.take()).last(), Some(120..130));
        behind.drops = false;
        behind.left(0..10);
        assert_eq!(behind.take(), None);
    }
}
