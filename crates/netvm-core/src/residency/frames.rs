//! Sets of frame numbers from which runs of neighbours can be taken.

use alloc::vec;
use alloc::vec::Vec;

/// Frames that are remembered as in the processor's cache.
const HOT_MAX: usize = 4;
/// Once a run was found that is too short, a longer one is looked for among so many more runs,
const SEARCH_RUNS: usize = 32;
/// and so many frames.
const SEARCH_FRAMES: usize = 1 << 14;

/// A set of frames as a bitmap. Neighbouring frames matter: one system call moves a whole run. Of single frames, those that were used
/// last matter: they are in the processor's cache.
#[derive(Clone, Debug)]
pub struct FrameSet {
    words: Vec<u64>,
    capacity: usize,
    count: usize,
    cursor: usize,
    /// Frames that were put hot, the latest last; some may have been taken since.
    hot: [u32; HOT_MAX],
    hot_count: usize,
}

impl FrameSet {
    /// An empty set of frames below `capacity`.
    pub fn new(capacity: usize) -> Self {
        Self {
            words: vec![0; capacity.div_ceil(64)],
            capacity,
            count: 0,
            cursor: 0,
            hot: [0; HOT_MAX],
            hot_count: 0,
        }
    }

    /// Frames in the set.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether it holds `frame`.
    pub fn contains(&self, frame: usize) -> bool {
        self.words[frame / 64] >> (frame % 64) & 1 != 0
    }

    /// Adds `frames` frames from `frame` on, none of which is in the set.
    pub fn put(&mut self, frame: usize, frames: usize) {
        assert!(frame + frames <= self.capacity, "frame {frame}+{frames} of {}", self.capacity);
        for index in frame..frame + frames {
            assert!(!self.contains(index), "frame {index} given back twice");
            self.words[index / 64] |= 1 << (index % 64);
        }
        self.count += frames;
    }

    /// Adds a frame that has just been used, which [`FrameSet::take_hot`] takes first.
    pub fn put_hot(&mut self, frame: usize) {
        self.put(frame, 1);
        if self.hot_count == HOT_MAX {
            self.hot.copy_within(1.., 0);
            self.hot_count -= 1;
        }
        self.hot[self.hot_count] = frame as u32;
        self.hot_count += 1;
    }

    /// Takes the frame that was put hot last, of those that are still in the set.
    pub fn take_hot(&mut self) -> Option<usize> {
        while self.hot_count > 0 {
            self.hot_count -= 1;
            let frame = self.hot[self.hot_count] as usize;
            if self.contains(frame) {
                self.words[frame / 64] &= !(1 << (frame % 64));
                self.count -= 1;
                return Some(frame);
            }
        }
        None
    }

    /// Takes a run of 1..=`want` neighbours: the next after the last taken that is long enough, or the longest of those that come next. One
    /// that is too short would break up what is taken and put back together, for good. `None` when the set is empty.
    pub fn take_run(&mut self, want: usize) -> Option<(usize, usize)> {
        let (start, frames) = self.find_run(want)?;
        for index in start..start + frames {
            self.words[index / 64] &= !(1 << (index % 64));
        }
        self.count -= frames;
        self.cursor = start + frames;
        Some((start, frames))
    }

    /// The run that [`FrameSet::take_run`] takes.
    pub fn find_run(&self, want: usize) -> Option<(usize, usize)> {
        if self.count == 0 || want == 0 {
            return None;
        }
        let whole = self.capacity;
        let first = self.next_in(self.cursor, whole).or_else(|| self.next_in(0, whole))?;
        let mut best = (first, self.run_at(first, want));
        let from = first + best.1;
        let end = whole.min(from + SEARCH_FRAMES);
        let rest = first.min(from + SEARCH_FRAMES - end);
        let mut runs = 0;
        for (mut from, end) in [(from, end), (0, rest)] {
            while best.1 < want
                && runs < SEARCH_RUNS
                && let Some(start) = self.next_in(from, end)
            {
                let frames = self.run_at(start, want);
                if frames > best.1 {
                    best = (start, frames);
                }
                from = start + frames;
                runs += 1;
            }
        }
        Some(best)
    }

    /// How many neighbours from `start` on are in the set, at most `max`.
    fn run_at(&self, start: usize, max: usize) -> usize {
        let mut end = start;
        while end < self.capacity && end - start < max {
            let ones = (self.words[end / 64] >> (end % 64)).trailing_ones() as usize;
            end += ones;
            if ones == 0 || !end.is_multiple_of(64) {
                break;
            }
        }
        max.min(end - start)
    }

    /// The first of `from..end` that is in the set.
    fn next_in(&self, from: usize, end: usize) -> Option<usize> {
        let mut mask = u64::MAX << (from % 64);
        for (index, &word) in self.words[..end.div_ceil(64)].iter().enumerate().skip(from / 64) {
            let word = word & mask;
            if word != 0 {
                return Some(index * 64 + word.trailing_zeros() as usize).filter(|&frame| frame < end);
            }
            mask = u64::MAX;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_runs_and_wraps() {
        let mut set = FrameSet::new(200);
        set.put(10, 5);
        set.put(100, 80);
        assert_eq!(set.take_run(3), Some((10, 3)));
        assert_eq!(set.take_run(64), Some((100, 64)), "13 and 14 are too few");
        assert_eq!(set.take_run(10), Some((164, 10)));
        assert_eq!(set.take_run(64), Some((174, 6)));
        assert_eq!(set.take_run(64), Some((13, 2)));
        assert_eq!(set.take_run(1), None);
        set.put(0, 1);
        assert_eq!((set.len(), set.take_run(9)), (1, Some((0, 1))));
        assert!(set.is_empty());
    }

    #[test]
    fn runs_stay_whole_among_single_frames() {
        let mut set = FrameSet::new(4096);
        set.put(0, 4096);
        let mut runs = alloc::vec::Vec::new();
        // Of every fourth run a frame is kept for long, as single pages do.
        for round in 0..1000 {
            let (start, frames) = set.take_run(64).unwrap();
            assert_eq!(frames, 64, "round {round}");
            runs.push(start);
            if round % 4 == 0 && round < 40 {
                assert!(set.take_run(1).is_some());
            }
            if runs.len() == 8 {
                set.put(runs.remove(0), 64);
            }
        }
    }

    #[test]
    fn a_search_ends() {
        let mut set = FrameSet::new(1 << 20);
        (0..1 << 18).for_each(|frame| set.put(frame * 2, 1));
        set.put((1 << 20) - 64, 64);
        assert_eq!(set.take_run(64), Some((0, 1)), "the long one is far away");
        assert_eq!(set.find_run(1), Some((2, 1)));
    }

    #[test]
    fn the_latest_hot_frame_is_taken_first() {
        let mut set = FrameSet::new(100);
        set.put(0, 10);
        assert_eq!(set.take_hot(), None);
        for frame in [90, 91, 92, 93, 94, 95] {
            set.put_hot(frame);
        }
        assert_eq!((set.take_hot(), set.len()), (Some(95), 15));
        assert_eq!(set.take_run(93), Some((0, 10)));
        assert_eq!(set.take_run(3), Some((90, 3)));
        assert_eq!((set.take_hot(), set.take_hot(), set.take_hot()), (Some(94), Some(93), None));
        assert!(set.is_empty());
    }

    #[test]
    fn never_gives_a_frame_twice() {
        let mut set = FrameSet::new(1000);
        set.put(0, 1000);
        let mut seen = alloc::vec![false; 1000];
        let mut want = 1;
        while let Some((start, length)) = set.take_run(want) {
            for taken in &mut seen[start..start + length] {
                assert!(!core::mem::replace(taken, true));
            }
            want = want * 7 % 61 + 1;
        }
        assert!(seen.iter().all(|taken| *taken));
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn giving_back_twice_is_caught() {
        let mut set = FrameSet::new(10);
        set.put(1, 2);
        set.put(2, 1);
    }
}
