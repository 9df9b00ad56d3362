//! Sets of frame numbers from which runs of neighbours can be taken.

use alloc::vec;
use alloc::vec::Vec;

/// Frames that are remembered as in the processor's cache.
const HOT_MAX: usize = 4;

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

    /// Takes a run of 1..=`want` neighbours: the next one after the last taken. `None` when the set is empty.
    pub fn take_run(&mut self, want: usize) -> Option<(usize, usize)> {
        if self.count == 0 || want == 0 {
            return None;
        }
        let start = self.next_from(self.cursor).or_else(|| self.next_from(0))?;
        let mut end = start;
        while end < self.capacity && end - start < want && self.contains(end) {
            self.words[end / 64] &= !(1 << (end % 64));
            end += 1;
        }
        self.count -= end - start;
        self.cursor = end;
        Some((start, end - start))
    }

    fn next_from(&self, from: usize) -> Option<usize> {
        let first = from / 64;
        let mut mask = u64::MAX << (from % 64);
        for (index, &word) in self.words.iter().enumerate().skip(first) {
            let word = word & mask;
            if word != 0 {
                return Some(index * 64 + word.trailing_zeros() as usize);
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
        assert_eq!(set.take_run(64), Some((13, 2)));
        assert_eq!(set.take_run(64), Some((100, 64)));
        assert_eq!(set.take_run(64), Some((164, 16)));
        assert_eq!(set.take_run(1), None);
        set.put(0, 1);
        assert_eq!((set.len(), set.take_run(9)), (1, Some((0, 1))));
        assert!(set.is_empty());
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
