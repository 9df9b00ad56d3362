//! Writes of a session that may not have been applied yet: what they write is not to be read by any other way.

use alloc::collections::VecDeque;
use core::ops::Range;

use crate::limits::WINDOW;

/// Most writes whose application is unknown: as many as the session lets be on their way. With more everything would go over the session, behind
/// which a lender that is slower than its borrower is never through.
const UNKNOWN_MAX: usize = WINDOW as usize;
/// With so many the lender is asked which it has applied: of writes alone it tells rarely.
const ASK_FROM: usize = 32;

/// A write over the session that may not have been applied.
#[derive(Clone, Copy, Debug)]
struct Unknown {
    sequence: u64,
    slab: u32,
    start: u64,
    end: u64,
}

/// Those of one session.
#[derive(Debug)]
pub struct Unsettled {
    /// In the order of their numbers.
    unknown: VecDeque<Unknown>,
    /// Some writes were too many to be remembered: all below this number.
    unknown_below: u64,
}

impl Default for Unsettled {
    fn default() -> Self {
        Self::new()
    }
}

impl Unsettled {
    /// None.
    pub fn new() -> Self {
        // Now: who serves swap must not allocate later.
        Self { unknown: VecDeque::with_capacity(UNKNOWN_MAX), unknown_below: 0 }
    }

    /// A write of these bytes of a slab has been posted on the session as number `sequence`; `applied` of them are known to have been applied.
    pub fn written(&mut self, applied: u64, sequence: u64, slab: u32, Range { start, end }: Range<u64>) {
        self.forget(applied);
        if self.unknown.len() < UNKNOWN_MAX {
            self.unknown.push_back(Unknown { sequence, slab, start, end });
        } else {
            self.unknown_below = sequence + 1;
        }
    }

    /// Whether the lender should be asked which writes it has applied, behind all that were posted; `applied` are known.
    pub fn wants_word(&self, applied: u64) -> bool {
        self.unknown.len() >= ASK_FROM || self.unknown_below > applied
    }

    /// So many writes are known to have been applied.
    #[inline]
    fn forget(&mut self, applied: u64) {
        while self.unknown.front().is_some_and(|write| write.sequence < applied) {
            self.unknown.pop_front();
        }
    }

    /// Whether all session writes of these bytes are known to have been applied.
    #[inline]
    pub fn allows(&mut self, applied: u64, slab: u32, Range { start, end }: Range<u64>) -> bool {
        if self.unknown_below > applied {
            return false;
        }
        self.forget(applied);
        !self.unknown.iter().any(|write| write.slab == slab && write.start < end && start < write.end)
    }
}
