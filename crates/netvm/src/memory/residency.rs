//! What is known of memory being there, so that the kernel is asked rarely.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use netvm_sys::memfd::Memfd;
use netvm_sys::residency::{PAGE_BYTES, coarse_ms, resident};
use netvm_sys::shared::SharedSlice;

/// Whoever asks about a page learns of so many neighbours: to ask about 512 costs a quarter more than about one.
const BATCH_PAGES: usize = 512;
/// Pages of one operation: of 1 MiB, anywhere.
const PAGES_MAX: usize = 257 + 2 * BATCH_PAGES;

/// For measurements: nothing is ever asked.
static SWITCHED_OFF: AtomicBool = AtomicBool::new(false);

/// Switches all checks of this process off: a measurement of what they cost. Everybody then waits for memory that is not there.
#[doc(hidden)]
pub fn switch_checks_off(off: bool) {
    SWITCHED_OFF.store(off, Ordering::Relaxed);
}

/// The time for [`Residency`]: milliseconds, never 0, which says never.
pub(crate) fn now() -> u32 {
    coarse_ms() as u32 | 1
}

/// What is known of one allocation.
#[derive(Debug)]
pub(super) struct Residency {
    whole: SharedSlice,
    /// For how long a page that was there counts as there, in milliseconds; 0 for good.
    trust_ms: u32,
    /// When each page was last seen there; 0 never.
    seen: OnceLock<Box<[AtomicU32]>>,
}

impl Residency {
    pub(super) fn new(whole: SharedSlice, trust_ms: u32) -> Self {
        Self { whole, trust_ms, seen: OnceLock::new() }
    }

    fn first_page(&self) -> usize {
        self.whole.as_ptr().addr() / PAGE_BYTES
    }

    /// Pages of a part of the allocation that is not empty.
    fn pages(&self, part: SharedSlice) -> Range<usize> {
        let (start, first) = (part.as_ptr().addr(), self.first_page());
        start / PAGE_BYTES - first..(start + part.len() - 1) / PAGE_BYTES - first + 1
    }

    /// Whether all of `part` of the allocation was there a moment ago.
    #[inline]
    pub(super) fn is_known_here(&self, part: SharedSlice, now: u32) -> bool {
        if self.trust_ms == 0 || part.is_empty() || SWITCHED_OFF.load(Ordering::Relaxed) {
            return true;
        }
        let Some(seen) = self.seen.get() else { return false };
        let is_fresh = |at: &AtomicU32| {
            let at = at.load(Ordering::Relaxed);
            at != 0 && now.wrapping_sub(at) < self.trust_ms
        };
        seen[self.pages(part)].iter().all(is_fresh)
    }

    /// Whether `part` of the allocation can be touched without waiting. `file`: where untouched pages are holes, and cheap.
    #[cold]
    pub(super) fn is_here(&self, part: SharedSlice, now: u32, file: Option<&Memfd>) -> bool {
        if self.trust_ms == 0 || part.is_empty() {
            return true;
        }
        let pages = self.pages(part);
        let seen = self.seen.get_or_init(|| {
            let end = (self.whole.as_ptr().addr() + self.whole.len()).div_ceil(PAGE_BYTES);
            (self.first_page()..end).map(|_| AtomicU32::new(0)).collect()
        });
        let first = pages.start / BATCH_PAGES * BATCH_PAGES;
        let end = pages.end.next_multiple_of(BATCH_PAGES).min(seen.len());
        let mut bits = [0; PAGES_MAX];
        if end - first > bits.len() {
            return true;
        }
        // The allocation may begin and end inside a page.
        let offset = (first * PAGE_BYTES).saturating_sub(self.whole.as_ptr().addr() % PAGE_BYTES);
        let last =
            (end * PAGE_BYTES).saturating_sub(self.whole.as_ptr().addr() % PAGE_BYTES).min(self.whole.len());
        let asked = self.whole.sub(offset, last - offset).map(|range| resident(range, &mut bits));
        if !matches!(asked, Some(Ok(()))) {
            // Not mapped, perhaps: whoever touches it finds out.
            return true;
        }
        let mut here = true;
        for page in first..end {
            if bits[page - first] & 1 != 0 {
                seen[page].store(now, Ordering::Relaxed);
            } else if pages.contains(&page) && here {
                here = file.is_some_and(|file| file.is_hole((page * PAGE_BYTES) as u64));
            }
        }
        here
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netvm_sys::mapping::Mapping;

    #[test]
    fn pages_are_asked_for_and_trusted_for_a_while() {
        let mapping = Mapping::anonymous(300 * PAGE_BYTES).unwrap();
        // It begins and ends inside a page.
        let whole = mapping.shared().sub(100, 299 * PAGE_BYTES).unwrap();
        let residency = Residency::new(whole, 10_000);
        let part = |page: usize, bytes: usize| whole.sub(page * PAGE_BYTES, bytes).unwrap();
        assert!(!residency.is_here(part(0, 1), now(), None) && residency.is_here(part(0, 0), now(), None));
        part(0, 1).fill(1);
        part(298, 4096).fill(1);
        assert!(residency.is_here(part(0, PAGE_BYTES - 100), now(), None));
        assert!(!residency.is_here(part(0, PAGE_BYTES), now(), None), "its last bytes are in the next page");
        assert!(residency.is_here(part(298, PAGE_BYTES), now(), None), "the last one");
        assert!(!residency.is_here(part(1, 256 * PAGE_BYTES), now(), None));
        whole.fill(1);
        assert!(residency.is_here(part(1, 256 * PAGE_BYTES), now(), None));
        assert!(Residency::new(whole, 0).is_here(whole, now(), None));
        let residency = Residency::new(whole, 10_000);
        assert!(residency.is_here(part(7, 1), now(), None));
        assert!(residency.is_known_here(whole, now()), "asked once for all");
    }

    #[test]
    fn holes_of_shareable_memory_are_cheap() {
        let mapping = Mapping::shareable(100 * PAGE_BYTES).unwrap();
        let residency = Residency::new(mapping.shared(), 10_000);
        let part = mapping.shared().sub(50 * PAGE_BYTES, 100).unwrap();
        assert!(residency.is_here(part, now(), mapping.file()) && !residency.is_here(part, now(), None));
    }
}
