//! First-in-first-out queues of pages, with lazy removal.

use alloc::collections::VecDeque;

/// A queue of page numbers. A page that has left its state is not looked for in the queue: whoever pops it checks.
///
/// Two of them make the *segmented FIFO* of Turner and Levy (SIGMETRICS 1981): pages leave the queue of mapped pages in
/// order of arrival, stay cached for a while, and a fault on a cached page puts it back at the end: the second chance,
/// without any reference bit, which user space cannot read.
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

    /// Drops stale entries once there are more than `limit` entries.
    pub fn compact(&mut self, limit: usize, mut is_live: impl FnMut(u32) -> bool) {
        if self.pages.len() > limit {
            self.pages.retain(|&page| is_live(page));
        }
    }
}
