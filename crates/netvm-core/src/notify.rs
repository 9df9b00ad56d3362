//! Notifications of one segment: event counts and one-shot values, and who waits for them. Atomics only.
//!
//! The order of steps that keeps wake-ups from being lost is described at [`Board`]; docs/design/one-sided.md tells what
//! notifications mean. The tests run this code under loom, in all interleavings.

use core::num::NonZeroU32;
use core::ops::Range;

#[cfg(not(test))]
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(test)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::words::{PrivateWords, Words};

/// What a write tells the owner of the memory once it, and everything before it, is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Notify {
    /// One signal more for an event count.
    Count {
        /// Which.
        number: u16,
    },
    /// A value in place of the one posted before.
    Post {
        /// Where.
        number: u16,
        /// What.
        value: NonZeroU32,
    },
    /// A number and a value at the end of the segment's queue, if it has one: none replaces another, none is coalesced.
    Queue {
        /// Which.
        number: u16,
        /// What.
        value: NonZeroU32,
    },
}

impl Notify {
    /// The number on the board.
    pub fn number(self) -> u16 {
        match self {
            Self::Count { number } | Self::Post { number, .. } | Self::Queue { number, .. } => number,
        }
    }
}

/// Whom a signal must wake. The driver does it; forgetting it loses a wake-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Wake {
    /// Threads that sleep while the bell has the value they saw.
    pub sleepers: bool,
    /// Whoever watches the descriptor.
    pub descriptor: bool,
}

/// Somebody may sleep on the bell.
const SLEEPING: u32 = 1;
/// Somebody watches the descriptor, which is not readable.
const WATCHED: u32 = 2;
/// Whoever calls handlers may sleep on the bell, and cares for numbers that have one only.
const DISPATCHING: u32 = 4;
const EPOCH: u32 = 8;

/// Words of one number: signals ever, which only grow; signals taken, never more than that; the posted value; 1 when it has a handler.
const SLOT_WORDS: usize = 4;

/// How many words a board of so many numbers has.
pub const fn board_words(numbers: u32) -> usize {
    numbers as usize * SLOT_WORDS
}

struct Slot<'a> {
    signals: &'a AtomicU64,
    acknowledged: &'a AtomicU64,
    value: &'a AtomicU64,
    handled: &'a AtomicU64,
}

/// The notification numbers of one segment.
///
/// To sleep: [`Board::prepare`], *then* look at the numbers, then sleep while the bell is as prepared. To watch the descriptor: empty it,
/// [`Board::watch`], *then* look. A signaller changes the number first and the bell second. Both sides read and modify the bell in one
/// step, so one of them is first: either the looker sees the number's change, or the signaller sees the looker.
///
/// The words may be shared with other processes, which may put anything there: then signals are lost or invented, and nothing else.
#[derive(Debug)]
pub struct Board<W = PrivateWords> {
    words: W,
}

impl Board {
    /// A board of so many numbers, at most 65536, of this process alone.
    pub fn new(numbers: u32) -> Self {
        let numbers = numbers.min(crate::limits::NOTIFICATIONS_MAX);
        Self { words: PrivateWords::new(board_words(numbers)) }
    }
}

impl<W: Words> Board<W> {
    /// A board in these words, as many numbers as they suffice for ([`board_words`]).
    pub fn of_words(words: W) -> Self {
        Self { words }
    }

    /// Where it lives.
    pub fn words(&self) -> &W {
        &self.words
    }

    /// How many numbers it has.
    pub fn numbers(&self) -> u32 {
        let numbers = self.words.words().len() / SLOT_WORDS;
        (numbers as u32).min(crate::limits::NOTIFICATIONS_MAX)
    }

    #[inline]
    fn slot(&self, number: u16) -> Option<Slot<'_>> {
        let at = usize::from(number) * SLOT_WORDS;
        match self.words.words().get(at..at + SLOT_WORDS)? {
            [signals, acknowledged, value, handled] => Some(Slot { signals, acknowledged, value, handled }),
            _ => None,
        }
    }

    /// Makes a notification visible; `None` when there is no such number.
    #[inline]
    pub fn deliver(&self, notify: Notify) -> Option<Wake> {
        let slot = self.slot(notify.number())?;
        // Release pairs with the Acquire of whoever looks: he sees the data that was written before.
        match notify {
            Notify::Count { .. } => {
                slot.signals.fetch_add(1, Ordering::Release);
            }
            // A swap, not a store: values and takers of a word then have one order, also in the model that the tests check.
            Notify::Post { value, .. } => {
                slot.value.swap(u64::from(value.get()), Ordering::Release);
            }
            // The driver keeps the queue, and has put it there.
            Notify::Queue { .. } => {}
        }
        let old = self.advance();
        // Acquire in `advance`: who sees the dispatcher's bit sees what has a handler. It stays until the dispatcher takes it back.
        let dispatcher = old & DISPATCHING != 0 && slot.handled.load(Ordering::Relaxed) != 0;
        Some(Wake { sleepers: old & SLEEPING != 0 || dispatcher, descriptor: old & WATCHED != 0 })
    }

    /// Wakes everybody so that they look again.
    pub fn ring(&self) -> Wake {
        let old = self.advance();
        Wake { sleepers: old & (SLEEPING | DISPATCHING) != 0, descriptor: old & WATCHED != 0 }
    }

    /// Has those who are about to sleep look again; returns the bell as it was.
    #[inline]
    fn advance(&self) -> u32 {
        // One step: bits set after it belong to somebody who will see what was done before it.
        let next = |bell: u32| Some(bell.wrapping_add(EPOCH) & !(SLEEPING | WATCHED));
        // AcqRel: pairs with `prepare` and `watch` in both directions.
        let updated = self.bell().fetch_update(Ordering::AcqRel, Ordering::Relaxed, next);
        let (Ok(old) | Err(old)) = updated;
        old
    }

    /// Says whether a number has a handler; the dispatcher has to look once more ([`Board::ring`]).
    pub fn handle(&self, number: u16, handled: bool) {
        if let Some(slot) = self.slot(number) {
            slot.handled.store(u64::from(handled), Ordering::Release);
        }
    }

    /// As [`Board::prepare`], for the one that calls handlers: numbers without one do not wake it.
    #[must_use]
    pub fn prepare_dispatcher(&self) -> u32 {
        self.bell().fetch_or(DISPATCHING, Ordering::AcqRel) | DISPATCHING
    }

    /// It does not sleep any more.
    pub fn end_dispatcher(&self) {
        self.bell().fetch_and(!DISPATCHING, Ordering::AcqRel);
    }

    /// Announces a sleeper. Look at the numbers next; then sleep on [`Board::bell`] while it has this value.
    #[must_use]
    pub fn prepare(&self) -> u32 {
        self.bell().fetch_or(SLEEPING, Ordering::AcqRel) | SLEEPING
    }

    /// Announces somebody who watches the descriptor. Look at the numbers next.
    pub fn watch(&self) {
        self.bell().fetch_or(WATCHED, Ordering::AcqRel);
    }

    /// The word to sleep on.
    pub fn bell(&self) -> &AtomicU32 {
        self.words.bell()
    }

    /// Signals of an event count that nobody has taken.
    pub fn pending(&self, number: u16) -> u64 {
        let Some(slot) = self.slot(number) else { return 0 };
        // In this order: `signals` is then at least what any taker saw who moved `acknowledged` there.
        let acknowledged = slot.acknowledged.load(Ordering::Acquire);
        slot.signals.load(Ordering::Acquire).saturating_sub(acknowledged)
    }

    /// Signals of an event count ever.
    pub fn signals(&self, number: u16) -> u64 {
        self.slot(number).map_or(0, |slot| slot.signals.load(Ordering::Acquire))
    }

    /// Takes up to `most` signals of an event count; each is taken once, whoever else takes. Returns how many.
    pub fn acknowledge(&self, number: u16, most: u64) -> u64 {
        let Some(slot) = self.slot(number) else { return 0 };
        let mut acknowledged = slot.acknowledged.load(Ordering::Acquire);
        loop {
            let take = most.min(slot.signals.load(Ordering::Acquire).saturating_sub(acknowledged));
            if take == 0 {
                return 0;
            }
            // Release: whoever reads this value sees at least as many signals as we did.
            let moved = slot.acknowledged.compare_exchange_weak(
                acknowledged,
                acknowledged + take,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            match moved {
                Ok(_) => return take,
                Err(now) => acknowledged = now,
            }
        }
    }

    /// The value that is posted under a number.
    pub fn value(&self, number: u16) -> Option<NonZeroU32> {
        NonZeroU32::new(self.slot(number)?.value.load(Ordering::Acquire) as u32)
    }

    /// Takes the value that is posted under a number; one of several takers gets it.
    pub fn reset(&self, number: u16) -> Option<NonZeroU32> {
        NonZeroU32::new(self.slot(number)?.value.swap(0, Ordering::AcqRel) as u32)
    }

    /// Whether a number has a signal or a value that nobody has taken.
    pub fn is_pending(&self, number: u16) -> bool {
        self.pending(number) > 0 || self.value(number).is_some()
    }

    /// The first such number of a range, from `start` on and around.
    pub fn find(&self, range: Range<u32>, start: u32) -> Option<u16> {
        let end = range.end.min(self.numbers());
        let start = if range.contains(&start) { start } else { range.start };
        let mut numbers = (start..end).chain(range.start..start.min(end)).map(|number| number as u16);
        numbers.find(|&number| self.is_pending(number))
    }
}

#[cfg(test)]
mod tests;
