//! Frames sorted by how many of their chunks are in use.

use alloc::vec;
use alloc::vec::Vec;

/// How many chunks of a frame with a free one may be in use: 0 to 15.
const FILLS: usize = super::FRAME_CHUNKS as usize;

/// A list of frames for each fill; all operations take constant time.
#[derive(Clone, Debug)]
pub(super) struct FrameBuckets {
    /// First frame of each list, plus one; 0 for none.
    first: [u32; FILLS],
    /// For each frame in a list the frames before and after it, plus one. A frame that is alone points to itself with `before`.
    links: Vec<[u32; 2]>,
}

impl FrameBuckets {
    /// Empty lists for frames `0..frames`.
    pub(super) fn new(frames: usize) -> Self {
        Self { first: [0; FILLS], links: vec![[0; 2]; frames] }
    }

    /// Whether the frame is in a list.
    pub(super) fn contains(&self, frame: u32) -> bool {
        self.links[frame as usize][0] != 0
    }

    /// Adds a frame of which `fill` chunks are in use.
    pub(super) fn put(&mut self, frame: u32, fill: u32) {
        let first = core::mem::replace(&mut self.first[fill as usize], frame + 1);
        // The first of a list has itself before it.
        self.links[frame as usize] = [frame + 1, first];
        if first != 0 {
            self.links[first as usize - 1][0] = frame + 1;
        }
    }

    /// Takes out a frame that was put with this `fill`.
    pub(super) fn remove(&mut self, frame: u32, fill: u32) {
        let [before, after] = core::mem::take(&mut self.links[frame as usize]);
        assert!(before != 0, "frame {frame} is in no list");
        let is_first = before == frame + 1;
        if is_first {
            self.first[fill as usize] = after;
        } else {
            self.links[before as usize - 1][1] = after;
        }
        if after != 0 {
            self.links[after as usize - 1][0] = if is_first { after } else { before };
        }
    }

    /// A frame of the highest fill that is at most `fill`.
    pub(super) fn fullest_below(&self, fill: u32) -> Option<u32> {
        self.first[..=(fill as usize).min(FILLS - 1)]
            .iter()
            .rev()
            .find(|&&frame| frame != 0)
            .map(|frame| frame - 1)
    }

    /// A frame of the lowest fill.
    pub(super) fn emptiest(&self) -> Option<u32> {
        self.first.iter().find(|&&frame| frame != 0).map(|frame| frame - 1)
    }
}
