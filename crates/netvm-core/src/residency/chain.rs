//! A first-in-first-out queue of pages that lie in frames, from which any page can be taken in constant time.

use alloc::vec;
use alloc::vec::Vec;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    page: u32,
    before: u32,
    after: u32,
}

/// Pages in the order in which they came, linked by the frames that they lie in: 12 bytes a frame.
#[derive(Clone, Debug)]
pub struct FrameChain {
    links: Vec<Link>,
    first: u32,
    last: u32,
    count: usize,
}

impl FrameChain {
    /// An empty chain for frames `0..frames`.
    pub fn new(frames: usize) -> Self {
        let free = Link { page: NONE, before: NONE, after: NONE };
        Self { links: vec![free; frames], first: NONE, last: NONE, count: 0 }
    }

    /// Pages in it.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Adds a page, in a frame that is not in the chain, at the end.
    ///
    /// # Panics
    /// When the frame is in the chain already.
    pub fn push(&mut self, frame: u32, page: u32) {
        let link = &mut self.links[frame as usize];
        assert!(link.page == NONE, "frame {frame} is in the chain already");
        *link = Link { page, before: self.last, after: NONE };
        match self.last {
            NONE => self.first = frame,
            last => self.links[last as usize].after = frame,
        }
        self.last = frame;
        self.count += 1;
    }

    /// Takes the oldest: frame and page.
    pub fn pop(&mut self) -> Option<(u32, u32)> {
        if self.first == NONE {
            return None;
        }
        let frame = self.first;
        let page = self.links[frame as usize].page;
        self.remove(frame);
        Some((frame, page))
    }

    /// Takes the page out that lies in this frame.
    ///
    /// # Panics
    /// When the frame is not in the chain.
    pub fn remove(&mut self, frame: u32) {
        let free = Link { page: NONE, before: NONE, after: NONE };
        let link = core::mem::replace(&mut self.links[frame as usize], free);
        assert!(link.page != NONE, "frame {frame} is not in the chain");
        match link.before {
            NONE => self.first = link.after,
            before => self.links[before as usize].after = link.after,
        }
        match link.after {
            NONE => self.last = link.before,
            after => self.links[after as usize].before = link.before,
        }
        self.count -= 1;
    }

    /// Says that the page in this frame is now known as `page`; its place stays.
    ///
    /// # Panics
    /// When the frame is not in the chain.
    pub fn rename(&mut self, frame: u32, page: u32) {
        let link = &mut self.links[frame as usize];
        assert!(link.page != NONE, "frame {frame} is not in the chain");
        link.page = page;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::VecDeque;

    #[test]
    fn behaves_like_a_queue_from_which_any_can_be_taken() {
        const FRAMES: u32 = 64;
        let mut chain = FrameChain::new(FRAMES as usize);
        let mut model: VecDeque<(u32, u32)> = VecDeque::new();
        let mut random = 1_u32;
        for page in 0..20_000 {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let frame = random >> 8 & (FRAMES - 1);
            let place = model.iter().position(|&(other, _)| other == frame);
            match (random >> 28, place) {
                (0..8, None) => {
                    chain.push(frame, page);
                    model.push_back((frame, page));
                }
                (0..8, Some(place)) => {
                    chain.remove(frame);
                    model.remove(place);
                }
                (8..10, Some(place)) => {
                    chain.rename(frame, page);
                    model[place].1 = page;
                }
                (8..10, None) => {}
                _ => assert_eq!(chain.pop(), model.pop_front()),
            }
            assert_eq!(chain.len(), model.len());
        }
        while let Some(expected) = model.pop_front() {
            assert_eq!(chain.pop(), Some(expected));
        }
        assert!(chain.is_empty() && chain.pop().is_none());
    }

    #[test]
    #[should_panic(expected = "is in the chain already")]
    fn a_frame_holds_one_page() {
        let mut chain = FrameChain::new(2);
        chain.push(1, 7);
        chain.push(1, 8);
    }
}
