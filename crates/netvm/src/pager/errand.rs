//! What whoever faults does by itself, without the engine: docs/design/pager.md, "Errands".
//!
//! The engine *gives* an errand: it says what is to be done, and has made room for it. Whoever gets it *does* it. Then the engine *takes it back*: it is
//! done, or all is as it was. Until then the pages are neither here nor there, as if they were on their way, and calls wait.

use super::backing::{HowRead, Source};
use super::engine::{EVICT_PAGES, Engine, SPARED};
use super::seals::PageHash;
use crate::error::Result;
use netvm_core::combine::ERRANDS;
use netvm_core::residency::{Arrival, FRAME_MAX, PageState};
use netvm_core::slab::datagram::{Begun, Ended, Report};
use netvm_sys::paged::{Helper, TOGETHER_MAX, Told};
use netvm_sys::uffd::PAGE_BYTES;
use std::time::Instant;

/// Stands for a frame in the entry of a page that is on an errand: no frame has this number.
pub(super) const NO_FRAME: u32 = FRAME_MAX;
/// The number of the errand that takes pages away. There is one at a time.
pub(super) const LEAVE: usize = ERRANDS - 1;
/// Pages that it takes at most.
const LEAVE_PAGES: usize = EVICT_PAGES;

/// Pages that one fetches at most: a block of an allocator may lie on two.
pub(super) const FETCH_PAGES: usize = 2;

/// To fetch neighbouring pages from a lender on this host, or those that it has been asked for by datagrams.
#[derive(Debug)]
pub(super) struct Fetch {
    /// Which of those that are under way.
    pub(super) number: usize,
    address: usize,
    source: Source,
    /// Of what must be there.
    hashes: [u64; FETCH_PAGES],
    pages: usize,
    protect: bool,
}

/// To take the memory of pages that are known to be what their slots hold.
#[derive(Debug)]
pub(super) struct Leave {
    area_start: usize,
    pages: [u32; LEAVE_PAGES],
    count: usize,
}

/// What the engine remembers of a [`Fetch`].
#[derive(Clone, Copy, Debug, Default)]
struct Fetched {
    page: u32,
    pages: u32,
    /// What stands in place of a frame in the entries of remote pages.
    stamps: [u32; FETCH_PAGES],
    lender: u32,
    /// If they were asked for.
    begun: Option<Begun>,
    class: u8,
    protect: bool,
    /// The first was evicted so short a time ago that it is worth being spared.
    again: bool,
    /// The slot of a page alone is let go when it is there.
    promote: bool,
}

/// Those under way.
pub(super) struct Errands {
    /// A bit for each number that is under way.
    under_way: u64,
    fetched: [Fetched; LEAVE],
    leaving: ([u32; LEAVE_PAGES], usize),
    /// The page that whoever is served now may fetch,
    pub(super) page: Option<u32>,
    /// whether its last errand has failed,
    pub(super) has_failed: bool,
    /// and whether it may take pages away.
    pub(super) takes_leave: bool,
    /// What it is to do.
    pub(super) fetch: Option<Fetch>,
    pub(super) leave: Option<Leave>,
}

impl Errands {
    pub(super) fn new() -> Self {
        Self {
            under_way: 0,
            fetched: [Fetched::default(); LEAVE],
            leaving: ([0; LEAVE_PAGES], 0),
            page: None,
            has_failed: false,
            takes_leave: false,
            fetch: None,
            leave: None,
        }
    }

    pub(super) fn are_under_way(&self) -> bool {
        self.under_way != 0
    }

    /// Pages that are being taken away.
    pub(super) fn leaving(&self) -> usize {
        if self.under_way >> LEAVE & 1 == 1 { self.leaving.1 } else { 0 }
    }

    /// The number of another fetch.
    fn free(&self) -> Option<usize> {
        let number = self.under_way.trailing_ones() as usize;
        (number < LEAVE).then_some(number)
    }
}

/// What has become of an errand. Where no page is there, or has left, nothing has changed: the engine finds out why, when it does the same in its own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// So many pages are there, from the first on; the read took so many nanoseconds.
    Fetched { pages: u64, ns: u64, report: Option<Report> },
    /// These have left, a bit for each, within so many nanoseconds.
    Left { pages: u64, ns: u64 },
}

/// How many words an [`Outcome`] has.
pub(super) const WORDS: usize = 4;

impl Outcome {
    /// As numbers.
    pub(super) fn words(self) -> [u64; WORDS] {
        match self {
            Self::Fetched { pages, ns, report } => {
                let [how, late] = report.map_or([0; 2], Report::words);
                [ns, pages, how, late]
            }
            Self::Left { pages, ns } => [ns, pages, 0, 0],
        }
    }

    fn from_words(number: usize, [ns, pages, how, late]: [u64; WORDS]) -> Self {
        match number {
            LEAVE => Self::Left { pages, ns },
            _ => Self::Fetched { pages, ns, report: Report::from_words([how, late]) },
        }
    }

    /// Nothing has changed.
    pub(super) fn has_failed(self) -> bool {
        matches!(self, Self::Fetched { pages: 0, .. } | Self::Left { pages: 0, .. })
    }
}

impl Fetch {
    /// Reads the pages, looks whether they are what they must be, and installs them.
    pub(super) fn run(
        &mut self,
        hash: &PageHash,
        install: impl FnOnce(usize, &[u8], bool) -> usize,
    ) -> Outcome {
        match self.pages {
            1 => self.run_in::<{ HEAD_BYTES + PAGE_BYTES }>(hash, install),
            _ => self.run_in::<{ HEAD_BYTES + FETCH_PAGES * PAGE_BYTES }>(hash, install),
        }
    }

    fn run_in<const BYTES: usize>(
        &mut self,
        hash: &PageHash,
        install: impl FnOnce(usize, &[u8], bool) -> usize,
    ) -> Outcome {
        // Where the next one will be, too: in the processor's cache.
        let mut room = Aligned([0; BYTES]);
        let HowRead { is_whole, ns, mut report } = self.source.read(&mut room.0, HEAD_BYTES);
        let contents = &room.0[HEAD_BYTES..];
        if !is_whole {
            return Outcome::Fetched { pages: 0, ns, report };
        }
        let (pages, _) = contents.as_chunks::<PAGE_BYTES>();
        if pages.iter().zip(&self.hashes).any(|(page, expected)| hash.of(page) != *expected) {
            report = report.map(|report| Report { ended: Ended::Wrong, ..report });
            return Outcome::Fetched { pages: 0, ns, report };
        }
        let pages = install(self.address, contents, self.protect) as u64;
        Outcome::Fetched { pages, ns, report }
    }
}

/// What there is room for before pages: that of datagrams, and the pages are aligned as the processor likes it.
const HEAD_BYTES: usize = 64;

#[repr(align(64))]
struct Aligned<const BYTES: usize>([u8; BYTES]);

impl Leave {
    pub(super) fn run(&self, helper: &Helper) -> Outcome {
        let mut addresses = [0; LEAVE_PAGES];
        for (address, &page) in addresses.iter_mut().zip(&self.pages) {
            *address = self.area_start + page as usize * PAGE_BYTES;
        }
        let (mut left, since) = ([false; TOGETHER_MAX], Instant::now());
        if helper.drop_together(&addresses[..self.count], &mut left).is_err() {
            return Outcome::Left { pages: 0, ns: 0 };
        }
        let ns = since.elapsed().as_nanos() as u64;
        let pages = left[..self.count].iter().rev().fold(0, |pages, &left| pages << 1 | u64::from(left));
        Outcome::Left { pages, ns }
    }
}

impl Engine {
    /// Whether reads are under way, of whoever.
    pub(super) fn is_reading(&self) -> bool {
        self.backing.reads() > 0 || self.errands.are_under_way()
    }

    /// Makes an errand of remote pages that a thread waits for, neighbours in neighbouring slots, if it can be one.
    pub(super) fn give_fetch(&mut self, page: u32, pages: u32) -> Result<bool> {
        let is_mine = self.paged.told() == Told::Reader || self.errands.page == Some(page);
        if !is_mine || self.in_window || pages as usize > FETCH_PAGES || self.backing.seals.encrypts() {
            return Ok(false);
        }
        let Some(number) = self.errands.free() else { return Ok(false) };
        self.spare_wanted = true;
        if self.spare < pages as usize {
            return Ok(false);
        }
        let slot = self.table.get(page).slot();
        let waits = self.paged.told() == Told::Faulter;
        let source = self.backing.source_of(slot, pages, number, waits);
        let Some((lender, source)) = source else { return Ok(false) };
        let class = self.backing.slots.class(lender);
        let (mut again, mut age, mut protect) = (false, 0, true);
        let (mut hashes, mut stamps) = ([0; FETCH_PAGES], [0; FETCH_PAGES]);
        for index in 0..pages {
            let (one, place, entry) = (page + index, index as usize, self.table.get(page + index));
            let is_again;
            (age, is_again) = self.note_back(one, class, Arrival::Alone, true, index == 0);
            again |= is_again;
            (hashes[place], stamps[place]) = (self.table.hash(one), entry.frame());
            let entry = entry.with_state(PageState::Fetching).with_frame(NO_FRAME);
            self.table.set(one, entry.with_wanted(true));
            protect &= self.protects_next(one, again);
        }
        let promote = pages == 1 && self.backing.promotes(slot, age);
        protect &= !promote;
        // The pages arrive in them.
        self.spare -= pages as usize;
        self.stats.remote_reads += u64::from(pages);
        self.stats.bytes_in += u64::from(pages) * PAGE_BYTES as u64;
        self.errands.under_way |= 1 << number;
        self.errands.fetched[number] =
            Fetched { page, pages, stamps, lender, begun: source.begun(), class, protect, again, promote };
        let (address, pages) = (self.address_of(page), pages as usize);
        let mut fetch = Fetch { number, address, source, hashes, pages, protect };
        if waits {
            self.errands.fetch = Some(fetch);
            return Ok(true);
        }
        // Who faulted sleeps: nobody else would do it.
        let outcome = fetch.run(self.backing.seals.page_hash(), |address, contents, protect| {
            self.paged.install_contents(address, contents, protect).0
        });
        self.take_back(number, outcome.words())?;
        Ok(!outcome.has_failed())
    }

    /// Makes an errand of mapped pages that can be dropped, if it can be one.
    pub(super) fn give_leave(&mut self, pages: &[u32]) -> bool {
        let count = pages.len();
        if !self.errands.takes_leave || self.errands.leaving() > 0 || count > LEAVE_PAGES {
            return false;
        }
        for &page in pages {
            let entry = self.table.get(page).with_state(PageState::Fetching);
            self.table.set(page, entry.with_frame(NO_FRAME).with_wanted(false));
        }
        let mut all = [0; LEAVE_PAGES];
        all[..count].copy_from_slice(pages);
        self.errands.under_way |= 1 << LEAVE;
        self.errands.leaving = (all, count);
        self.errands.leave = Some(Leave { area_start: self.area().start, pages: all, count });
        true
    }

    /// An errand has ended.
    pub(super) fn take_back(&mut self, number: usize, words: [u64; WORDS]) -> Result<()> {
        self.errands.under_way &= !(1 << number);
        let outcome = Outcome::from_words(number, words);
        if number == LEAVE { self.take_leave_back(outcome) } else { self.take_fetch_back(number, outcome) }
    }

    fn take_fetch_back(&mut self, number: usize, outcome: Outcome) -> Result<()> {
        let Fetched { page, pages, stamps, lender, begun, class, protect, again, promote } =
            self.errands.fetched[number];
        let mut there = 0;
        if let Outcome::Fetched { pages: installed, ns, report } = outcome {
            if let (Some(begun), Some(report)) = (begun, report) {
                self.backing.ended_alone(lender, begun, ns, report);
            }
            if installed > 0 {
                self.stats.read_at_once += if begun.is_none() { installed } else { 0 };
                self.backing.fetched(lender, ns, installed as usize * PAGE_BYTES);
                self.tier.note_answered();
                self.tier.note_fetched_alone(installed as u32, ns, class, &mut self.stats);
            }
            there = installed as u32;
        }
        // They are read again.
        self.stats.remote_reads -= u64::from(pages - there);
        self.stats.bytes_in -= u64::from(pages - there) * PAGE_BYTES as u64;
        for index in 0..pages {
            let entry = self.table.get(page + index);
            // Calls wait until none is under way, and nobody else has to do with a page that is.
            debug_assert!(entry.state() == PageState::Fetching && entry.frame() == NO_FRAME);
            if index >= there {
                self.spare += 1;
                // It has not left anew.
                let entry = entry.with_state(PageState::Remote).with_frame(stamps[index as usize]);
                self.table.set(page + index, entry.with_wanted(false));
                continue;
            }
            if promote {
                self.backing.release_slot(entry.slot())?;
            }
            let entry = entry.with_slot(if promote { 0 } else { entry.slot() });
            let entry = entry.with_frame(if again && index == 0 { SPARED } else { 0 });
            let entry = entry.with_state(PageState::Mapped).with_protected(protect);
            self.note_mapped(page + index, entry, Arrival::Alone);
        }
        Ok(())
    }

    fn take_leave_back(&mut self, outcome: Outcome) -> Result<()> {
        let (pages, count) = self.errands.leaving;
        let (left, ns) = match outcome {
            Outcome::Left { pages, ns } => (pages, ns),
            Outcome::Fetched { .. } => (0, 0),
        };
        let (mut rest, mut stayed) = ([0; LEAVE_PAGES], 0);
        for (index, &page) in pages[..count].iter().enumerate() {
            if left >> index & 1 == 1 {
                self.note_dropped(page);
                continue;
            }
            // Moving it tells why. It has left the queue.
            let entry = self.table.get(page).with_frame(0).with_wanted(false);
            self.table.set(page, entry.with_state(PageState::Mapped).with_protected(false));
            rest[stayed] = page;
            stayed += 1;
        }
        let left = count - stayed;
        self.note_left_together(left);
        self.stats.clean_drops += left as u64;
        if left > 0 {
            self.tier.choice.costs.send.note(ns as f64 / left as f64);
        }
        self.move_out(&rest[..stayed]).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lender::Lease;
    use netvm_sys::mark::{self, MARK_BYTES};
    use netvm_sys::memfd::Memfd;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    const BYTES: usize = 3 * PAGE_BYTES;

    #[test]
    fn what_is_wrong_or_no_longer_lent_is_not_installed() {
        let file = Memfd::sealed(c"errand", BYTES as u64 + MARK_BYTES).unwrap();
        let mut contents = vec![0; BYTES];
        getrandom::fill(&mut contents).unwrap();
        let writer = std::fs::File::from(file.as_fd().try_clone_to_owned().unwrap());
        writer.write_all_at(&contents, 0).unwrap();
        let lease = Arc::new(Lease::of(file, BYTES as u64).unwrap());
        let hash = PageHash::new([7; 192]);
        let hash_of = |page: usize| hash.of(contents[page * PAGE_BYTES..].first_chunk().unwrap());
        // Of two pages at `at`, of which `room` can be installed.
        let run = |at: usize, hashes: [u64; 2], pages: usize, room: usize| {
            let source = Source::File { lease: Arc::clone(&lease), at: at as u64 };
            let mut fetch = Fetch { number: 0, address: 5, source, hashes, pages, protect: true };
            let mut installed = 0;
            let outcome = fetch.run(&hash, |address, bytes, protect| {
                assert!(address == 5 && protect && bytes == &contents[at..at + pages * PAGE_BYTES]);
                installed = room;
                room
            });
            let Outcome::Fetched { pages, report: None, .. } = outcome else { panic!("{outcome:?}") };
            assert!(pages == installed as u64 && outcome.has_failed() == (pages == 0));
            installed
        };
        let right = [hash_of(1), hash_of(2)];
        assert_eq!((run(PAGE_BYTES, right, 2, 2), run(PAGE_BYTES, right, 1, 1)), (2, 1));
        assert_eq!((run(PAGE_BYTES, right, 2, 1), run(PAGE_BYTES, right, 2, 0)), (1, 0));
        // The first, the second, another place, beyond the end.
        assert_eq!(run(PAGE_BYTES, [right[0] ^ 1, right[1]], 2, 2), 0);
        assert_eq!(run(PAGE_BYTES, [right[0], right[1] ^ 1], 2, 2), 0);
        assert_eq!((run(0, right, 2, 2), run(0, right, 1, 1)), (0, 0));
        assert_eq!(run(BYTES + MARK_BYTES as usize, right, 1, 1), 0);
        mark::clear(&lease.file, BYTES as u64).unwrap();
        assert_eq!(run(PAGE_BYTES, right, 1, 1), 0, "the lender has ended the lease");
    }

    #[test]
    fn outcomes_are_numbers() {
        let report = |ended, late| Report { ended, by_kernel: 6, by_process: 255, late };
        for (number, outcome) in [
            (0, Outcome::Fetched { pages: 0, ns: 7, report: None }),
            (
                3,
                Outcome::Fetched {
                    pages: 2,
                    ns: 1 << 40,
                    report: Some(report(Ended::Whole, Some(u64::MAX))),
                },
            ),
            (5, Outcome::Fetched { pages: 0, ns: 0, report: Some(report(Ended::Wrong, None)) }),
            (6, Outcome::Fetched { pages: 0, ns: 1, report: Some(report(Ended::Refused, Some(1))) }),
            (7, Outcome::Fetched { pages: 0, ns: 1, report: Some(report(Ended::Late, None)) }),
            (LEAVE, Outcome::Left { pages: 0, ns: 0 }),
            (LEAVE, Outcome::Left { pages: 0xFFFF_FFFF, ns: 0 }),
        ] {
            assert_eq!(Outcome::from_words(number, outcome.words()), outcome);
        }
    }
}
