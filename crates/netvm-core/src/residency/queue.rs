//! The first-in-first-out queue of mapped pages, with lazy removal.

use alloc::collections::VecDeque;

/// A queue of page numbers. A page that has left its state is not looked for in the queue: whoever pops it checks.
///
/// With a [`FrameChain`](super::FrameChain) of cached pages it makes the *segmented FIFO* of Turner and Levy (SIGMETRICS
/// 1981): pages leave the queue of mapped pages in order of arrival, stay cached for a while, and a fault on a cached page
/// puts it back at the end: the second chance, without any reference bit, which user space cannot read.
#[derive(Clone, Debug, Default)]
pub struct PageQueue {
    pages: VecDeque<u32>,
}

impl PageQueue {
    /// An empty queue.
    pub fn new() -> Self {
        Self::default()
    }

    /// Entries, stale ones included.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether it has no entry.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Adds a page at the end.
    pub fn push(&mut self, page: u32) {
        self.pages.push_back(page);
    }

    /// Takes the oldest page.
    pub fn pop(&mut self) -> Option<u32> {
        self.pages.pop_front()
    }

    /// The oldest page.
    pub fn peek(&self) -> Option<u32> {
        self.pages.front().copied()
    }

    /// Keeps the entries for which `keep` says so. Costs time in proportion to all of them: call it when most are stale.
    pub fn retain(&mut self, mut keep: impl FnMut(u32) -> bool) {
        self.pages.retain(|&page| keep(page));
    }
}
