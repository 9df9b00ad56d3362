//! Pages that whoever wants them can read without the engine: from memory that is shared, or by datagrams.

use super::Backing;
use crate::lender::{Asked, Lease};
use netvm_core::residency::{SlabCopy, Slot};
use netvm_core::slab::datagram::{Begun, Ended, Report};
use netvm_sys::uffd::PAGE_BYTES;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where pages are.
#[derive(Debug)]
pub(in crate::pager) enum Source {
    /// In the memory of a lender on this host,
    File {
        /// with what it has lent,
        lease: Arc<Lease>,
        /// from this byte on.
        at: u64,
    },
    /// Under way.
    Asked(Asked),
}

/// How they have been read.
#[derive(Clone, Copy, Debug)]
pub(in crate::pager) struct HowRead {
    /// They are there.
    pub(in crate::pager) is_whole: bool,
    /// Within so many nanoseconds.
    pub(in crate::pager) ns: u64,
    /// If it was by datagrams.
    pub(in crate::pager) report: Option<Report>,
}

impl Source {
    /// Reads them into `room` from `at` on; what is before that may be used, too. Not whole: the lender has taken them back, or they cannot be read so.
    pub(in crate::pager) fn read(&mut self, room: &mut [u8], at: usize) -> HowRead {
        match self {
            Self::File { lease, at: from } => {
                let since = Instant::now();
                let is_whole = lease.file.read_exact_at(*from, &mut room[at..]).is_ok() && lease.is_lent();
                HowRead { is_whole, ns: since.elapsed().as_nanos() as u64, report: None }
            }
            Self::Asked(asked) => {
                let (ended, ns) = asked.wait(room, at);
                HowRead { is_whole: ended == Ended::Whole, ns, report: Some(asked.report(ended)) }
            }
        }
    }

    /// What is to be remembered of what is under way.
    pub(in crate::pager) fn begun(&self) -> Option<Begun> {
        match self {
            Self::File { .. } => None,
            Self::Asked(asked) => Some(asked.begun()),
        }
    }
}

impl Backing {
    /// Where whoever has this number can read neighbouring pages from this slot on, and whose they are, if there is no more to it than that; by datagrams
    /// if it `waits` for them by itself.
    pub(in crate::pager) fn source_of(
        &mut self,
        slot: Slot,
        pages: u32,
        number: usize,
        waits: bool,
    ) -> Option<(u32, Source)> {
        if self.parts.is_some() {
            return None;
        }
        let (copies, page) = self.slots.locate(slot)?;
        // Who chooses has asked: of others the engine asks itself.
        let is_nearby = |copy: &SlabCopy| {
            self.sides[copy.lender].borrower.as_ref().is_some_and(crate::lender::Borrower::is_nearby)
        };
        let are_nearby = copies.iter().all(is_nearby);
        let may_ask = |copy: &SlabCopy| self.sides[copy.lender].asks();
        if !(are_nearby || waits && copies.iter().all(may_ask)) {
            return None;
        }
        let has_others = copies.len() > 1;
        let SlabCopy { lender, slab, .. } = self.sides.choose(copies)?;
        let (offset, bytes) = (u64::from(page) * PAGE_BYTES as u64, pages * PAGE_BYTES as u32);
        // Another one has it: as with reads that are asked of that then.
        let patience_max = has_others.then(|| self.sides[lender].limit(bytes as usize));
        let borrower = self.sides.live(lender)?;
        let source = if are_nearby {
            let place = borrower.file_of(slab, offset, bytes.into())?;
            Source::File { lease: Arc::clone(place.lease), at: place.at }
        } else {
            let asked = borrower.ask_alone(number, slab, offset, bytes, patience_max)?;
            self.sides[lender].alone += 1;
            Source::Asked(asked)
        };
        self.slots.heat(slot, 1);
        self.detail.moved(lender, bytes.into(), 0);
        Some((lender, source))
    }

    /// What has become of what began so.
    pub(in crate::pager) fn ended_alone(&mut self, lender: u32, begun: Begun, ns: u64, report: Report) {
        self.sides[lender].alone -= 1;
        self.stats.wrong_datagrams += u64::from(report.ended == Ended::Wrong);
        if report.ended != Ended::Whole {
            self.note_wait(Duration::from_nanos(ns));
        }
        if let Some(borrower) = self.sides.live(lender) {
            borrower.ended_alone(begun, ns, report);
        }
    }

    /// So many bytes have been read that way.
    pub(in crate::pager) fn fetched(&mut self, lender: u32, ns: u64, bytes: usize) {
        let waited = Duration::from_nanos(ns);
        self.detail.waited(lender, ns);
        self.note_wait(waited);
        self.sides[lender].answered(waited, bytes);
    }
}
