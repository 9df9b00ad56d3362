//! Pages that can be read without their lender, as its memory is shared.

use super::Backing;
use crate::lender::Lease;
use netvm_core::residency::{SlabCopy, Slot};
use netvm_sys::uffd::PAGE_BYTES;
use std::sync::Arc;
use std::time::Duration;

/// Pages in the memory of a lender on this host.
#[derive(Debug)]
pub(in crate::pager) struct Source {
    pub(in crate::pager) lease: Arc<Lease>,
    pub(in crate::pager) at: u64,
}

impl Source {
    /// Reads them; false when the lender has taken it back, or it cannot be read.
    pub(in crate::pager) fn read(&self, to: &mut [u8]) -> bool {
        self.lease.file.read_exact_at(self.at, to).is_ok() && self.lease.is_lent()
    }
}

impl Backing {
    /// Where neighbouring pages from this slot on can be read without the lender, and whose they are, if there is no more to it than that.
    pub(in crate::pager) fn source_of(&mut self, slot: Slot, pages: u32) -> Option<(u32, Source)> {
        if self.parts.is_some() {
            return None;
        }
        let (copies, page) = self.slots.locate(slot)?;
        // Who chooses has asked: of others the engine asks itself.
        let is_nearby = |copy: &SlabCopy| {
            self.sides[copy.lender].borrower.as_ref().is_some_and(crate::lender::Borrower::is_nearby)
        };
        if !copies.iter().all(is_nearby) {
            return None;
        }
        let SlabCopy { lender, slab, .. } = self.sides.choose(copies)?;
        let (offset, bytes) = (u64::from(page) * PAGE_BYTES as u64, u64::from(pages) * PAGE_BYTES as u64);
        let place = self.sides.live(lender)?.file_of(slab, offset, bytes)?;
        let source = Source { lease: Arc::clone(place.lease), at: place.at };
        self.slots.heat(slot, 1);
        self.detail.moved(lender, bytes, 0);
        Some((lender, source))
    }

    /// So many bytes have been read that way.
    pub(in crate::pager) fn fetched(&mut self, lender: u32, ns: u64, bytes: usize) {
        let waited = Duration::from_nanos(ns);
        self.detail.waited(lender, ns);
        self.note_wait(waited);
        self.sides[lender].answered(waited, bytes);
    }
}
