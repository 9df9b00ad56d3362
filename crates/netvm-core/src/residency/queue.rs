//! Which mapped page leaves next: two first-in-first-out queues, with lazy removal.
//!
//! With a [`FrameChain`](super::FrameChain) of cached pages they make the *segmented FIFO* of Turner and Levy (SIGMETRICS
//! 1981): pages leave in order of arrival, stay cached for a while, and a fault on a cached page puts it back at the end: the second chance, without any reference
//! bit, which user space cannot read.
//!
//! What a stream has brought in, in windows, is mostly not wanted again; pages that came by themselves may be all that a program works on, and a stream would push them
//! out again and again. So the two have queues of their own. They leave in order of arrival, as from one, but windows by a *lead* earlier: it grows with each page that came by
//! itself and is wanted again soon, and shrinks with each one that came in a window and is (compare *ARC*: Megiddo and Modha, FAST 2003). At first it is 0: one queue.

use super::stream::MappedAhead;
use super::windows::Windows;
use alloc::collections::VecDeque;

/// What a page weighs that came by itself, whose return is a fault, to one of a window, whose return is a small part of one.
const ALONE_WEIGHS: usize = 8;
/// The lead is at most so many times the local pages: enough for none to leave but those of windows.
const LEAD_MAX: usize = 2;

/// How a page came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// By itself: somebody faulted on it.
    Alone,
    /// In the window of a stream, or with neighbours.
    InWindow,
}

impl Arrival {
    /// `InWindow` if so.
    pub const fn in_window(in_window: bool) -> Self {
        if in_window { Self::InWindow } else { Self::Alone }
    }
}

/// A page, and how many were mapped before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) page: u32,
    pub(super) number: u32,
}

/// The mapped pages, in the order in which they leave. A page that has left its state is not looked for in the queues: whoever pops it checks.
#[derive(Clone, Debug, Default)]
pub struct PageQueue {
    alone: VecDeque<Place>,
    windows: Windows,
    pushed: u32,
    lead: usize,
}

impl PageQueue {
    /// Nothing is mapped.
    pub fn new() -> Self {
        Self::default()
    }

    /// Entries, stale ones included.
    pub fn len(&self) -> usize {
        self.alone.len() + self.windows.len()
    }

    /// Whether it has no entry.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether newcomers in windows leave before what has been kept of older ones.
    pub fn keeps(&self) -> bool {
        self.windows.keeps()
    }

    /// Adds a page at the end.
    pub fn push(&mut self, page: u32, arrival: Arrival) {
        let place = Place { page, number: self.pushed };
        self.pushed = self.pushed.wrapping_add(1);
        match arrival {
            Arrival::Alone => self.alone.push_back(place),
            Arrival::InWindow => self.windows.push(place),
        }
    }

    /// Takes the page whose turn it is, of `local` ones. The last pages of windows, as many as are mapped `ahead`, have no lead.
    pub fn pop(&mut self, ahead: MappedAhead, local: usize) -> Option<u32> {
        let age = |place: &Place| self.pushed.wrapping_sub(place.number) as usize;
        let windows_first = match (self.windows.age(self.pushed), self.alone.front().map(age)) {
            (Some(window), Some(alone)) => {
                let lead = if self.windows.len() > ahead.possible { self.lead } else { 0 };
                window.saturating_add(lead) > alone
            }
            (window, _) => window.is_some(),
        };
        let place =
            if windows_first { self.windows.pop(ahead.likely, local) } else { self.alone.pop_front() };
        place.map(|place| place.page)
    }

    /// The page popped last leaves.
    pub fn note_left(&mut self, page: u32, local: usize) {
        self.windows.note_left(page, local);
    }

    /// A page comes back that left when `age` pages fewer had, of `local` ones; `wanted`: it is not only read ahead.
    pub fn note_back(&mut self, page: u32, arrival: Arrival, age: usize, local: usize, wanted: bool) {
        if wanted && age < local {
            // A queue of all pages would have it still.
            self.lead = match arrival {
                Arrival::Alone => self.lead.saturating_add(ALONE_WEIGHS).min(local.saturating_mul(LEAD_MAX)),
                Arrival::InWindow => self.lead.saturating_sub(1),
            };
        }
        self.windows.note_back(page, arrival == Arrival::InWindow, age, local);
    }

    /// Keeps the entries for which `keep` says so. Costs time in proportion to all of them: call it when most are stale.
    pub fn retain(&mut self, mut keep: impl FnMut(u32) -> bool) {
        self.alone.retain(|place| keep(place.page));
        self.windows.retain(&mut keep);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    const LOCAL: usize = 100;

    /// A window of four pages, from 1000 on, after each page that comes by itself.
    fn mixed() -> PageQueue {
        let mut queue = PageQueue::new();
        for page in 0..10 {
            queue.push(page, Arrival::Alone);
            (0..4).for_each(|index| queue.push(1000 + page * 4 + index, Arrival::InWindow));
        }
        queue
    }

    fn leave(queue: &mut PageQueue, ahead: usize) -> Vec<u32> {
        core::iter::from_fn(|| queue.pop(MappedAhead { likely: ahead, possible: ahead }, LOCAL)).collect()
    }

    #[test]
    fn pages_leave_in_order_of_arrival_at_first() {
        let mut queue = mixed();
        assert_eq!(queue.len(), 50);
        let order = leave(&mut queue, 0);
        assert_eq!(order[..7], [0, 1000, 1001, 1002, 1003, 1, 1004]);
        assert!(order.len() == 50 && queue.is_empty());
    }

    #[test]
    fn windows_leave_first_while_others_come_back() {
        let mut queue = mixed();
        queue.note_back(7, Arrival::Alone, 0, LOCAL, true);
        assert_eq!(leave(&mut queue.clone(), 0)[..4], [1000, 1001, 1002, 1003], "a lead of 8");
        (0..100).for_each(|_| queue.note_back(7, Arrival::Alone, 0, LOCAL, true));
        let order = leave(&mut queue.clone(), 0);
        assert!(order[..40].iter().all(|&page| page >= 1000), "{order:?}");
        let order = leave(&mut queue.clone(), 8);
        assert_eq!((order[31], order[32]), (1031, 0), "two windows are not used yet");
        // They come back, too.
        (0..LOCAL * LEAD_MAX).for_each(|_| queue.note_back(7, Arrival::InWindow, 0, LOCAL, true));
        assert_eq!(leave(&mut queue, 0)[..2], [0, 1000]);
    }

    #[test]
    fn numbers_begin_anew_and_stale_entries_go() {
        let mut queue = mixed();
        queue.pushed = u32::MAX - 20;
        leave(&mut queue, 0);
        for page in 0..100 {
            queue.push(page, Arrival::in_window(page % 2 == 0));
        }
        queue.retain(|page| page >= 50);
        assert_eq!(leave(&mut queue, 0), (50..100).collect::<Vec<_>>());
        // Whatever is said of it.
        queue.note_back(7, Arrival::Alone, 0, usize::MAX, true);
        queue.note_back(7, Arrival::InWindow, usize::MAX, 0, false);
        queue.push(7, Arrival::InWindow);
        assert_eq!(
            (
                queue.pop(MappedAhead { likely: 0, possible: usize::MAX }, LOCAL),
                queue.pop(MappedAhead::default(), LOCAL)
            ),
            (Some(7), None)
        );
    }
}
