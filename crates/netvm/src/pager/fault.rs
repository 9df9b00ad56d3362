//! Faults: bringing pages in.

use super::backing::Origin;
use super::engine::{Engine, SPARED};
use super::errand::NO_FRAME;
use super::error::{PagerError, system};
use super::transfers::{TRANSFER_PAGES_MAX, Transfer};
use crate::error::Result;
use netvm_core::residency::{Arrival, Entry, PageState, Slot};
use netvm_sys::uffd::{Fault, PAGE_BYTES};
use std::ops::Range;

/// Pages of a run for which neighbouring frames are worth looking for,
const RUN_PAGES_MIN: u32 = 16;
/// and how many frames may be free meanwhile that are none.
const LOOSE_FRAMES_MAX: usize = 128;
/// A page is worth being spared that is needed again before one in so many local pages has been evicted.
const AGAIN_PART: usize = 2;

impl Engine {
    /// Serves one fault, or puts it off until there is a frame.
    pub(super) fn fault(&mut self, fault: Fault) -> Result<()> {
        if !self.area().contains(&fault.address) {
            return self.fault_in_pool(fault);
        }
        self.stats.faults += 1;
        self.protection.note_fault(fault.thread);
        let page = self.page_of(fault.address);
        self.backing.detail.heat.note(page);
        let entry = self.table.get(page);
        self.serve_fault(fault, page, entry)?;
        // Neither on its way before nor now, and not put off.
        let was_here = !matches!(entry.state(), PageState::Remote | PageState::Fetching | PageState::Writing);
        let is_here = self.table.get(page).state() == PageState::Mapped;
        self.stats.faults_without_io += u64::from(was_here && is_here);
        Ok(())
    }

    /// Nobody touches an empty frame but other processes that look at all of this one's memory: they must not wait for ever, nor this one end.
    fn fault_in_pool(&mut self, fault: Fault) -> Result<()> {
        let Some(frame) = self.paged.frame_at(fault.address) else {
            return Err(PagerError::OutsideFarMemory { address: fault.address, bytes: PAGE_BYTES }.into());
        };
        let shown = match self.empty.contains(frame) {
            true => self.paged.show_empty_frame(frame),
            false => self.paged.show_full_frame(frame),
        };
        shown.map_err(|error| system("let another process look at a frame", error))
    }

    fn serve_fault(&mut self, fault: Fault, page: u32, entry: Entry) -> Result<()> {
        match entry.state() {
            PageState::Mapped => {
                if fault.write && entry.protected() {
                    self.protection.note_write();
                }
                self.lift_protection(page, entry, fault.write || fault.protected)?;
                if fault.protected {
                    return Ok(());
                }
                let was_missing = self.paged.install_zero_if_missing(fault.address).or_else(gone);
                self.dropped_by_program |= was_missing.map_err(|e| system("wake a thread", e))?;
                Ok(())
            }
            PageState::Writing => {
                self.table.set(page, entry.with_wanted(true));
                Ok(())
            }
            PageState::Untouched if !self.is_mapped(fault.address) => {
                // Unmapped, or made local, while the fault was on its way: the thread will see that by itself.
                self.paged.wake(fault.address, PAGE_BYTES).map_err(|e| system("wake a thread", e))
            }
            PageState::Untouched => {
                let ahead = self.ahead(fault, page);
                let has_room = self.has_room_for_units();
                let units = match ahead.stride {
                    Some(stride) if has_room => self.zero_elements(page, ahead.map, stride).map(|()| 1)?,
                    Some(_) => 1,
                    None => ahead.map,
                };
                let pages = if has_room { units * self.unit - page % self.unit } else { 1 };
                self.zero_fill(page, pages, fault)
            }
            PageState::Cached
            | PageState::Fetching
            | PageState::Remote
            | PageState::Packed
            | PageState::Filled => {
                if fault.write {
                    self.note_write_ahead(page);
                }
                let ahead = self.ahead(fault, page);
                let followed = self.follow(fault, page, ahead);
                self.bring_rest_in(fault, page, ahead)?;
                let are_many = ahead.map > 1 || followed > 0;
                self.in_window = are_many || self.unit > 1;
                self.are_many = are_many;
                let follows = self.bring_what_follows(followed);
                let is_under_way = follows.and_then(|()| self.bring_window_in(page, ahead));
                (self.in_window, self.are_many) = (false, false);
                if is_under_way? {
                    self.fetch_what_follows(followed)?;
                    self.read_ahead(page, ahead)
                } else {
                    self.deferred.push(fault);
                    Ok(())
                }
            }
        }
    }

    /// Brings `pages` pages from `page` on into the program's address space, whatever they are now. False when there is no
    /// frame even for the first.
    pub(super) fn bring_in(&mut self, first: u32, pages: u32) -> Result<bool> {
        let end = first.saturating_add(pages).min(self.page_count());
        let mut page = first;
        while page < end {
            let entry = self.table.get(page);
            match entry.state() {
                PageState::Cached => page += self.map_cached(page, end - page)?,
                PageState::Fetching => {
                    // Of an errand it is known how long it took.
                    if entry.frame() != NO_FRAME && !self.names {
                        self.tier.note_waiting();
                        self.stats.prefetch_hits += u64::from(!entry.wanted());
                    }
                    self.table.set(page, entry.with_wanted(true));
                    page += 1;
                }
                PageState::Packed | PageState::Filled => {
                    let unpacked = self.unpack_run(page, end - page)?;
                    if unpacked == 0 && self.table.get(page).state() == entry.state() {
                        return Ok(page != first);
                    }
                    page += unpacked;
                }
                PageState::Remote => {
                    let started = self.fetch_run(page..end, true)?;
                    if started == 0 {
                        return Ok(page != first);
                    }
                    page += started;
                }
                PageState::Untouched | PageState::Mapped | PageState::Writing => page += 1,
            }
        }
        Ok(true)
    }

    /// Faults that found no frame: try again, in order.
    pub(super) fn retry_deferred(&mut self) -> Result<()> {
        let faults = std::mem::take(&mut self.deferred);
        self.is_retrying = true;
        let served = faults.iter().try_for_each(|&fault| {
            self.stats.faults -= 1;
            self.fault(fault)
        });
        self.is_retrying = false;
        served
    }

    /// Free frames: from the free set, by growing within the budget, or from pages that are cached and safe elsewhere.
    pub(super) fn take_frames(&mut self, want: u32) -> Result<Option<(u32, u32)>> {
        let want_frames = want as usize;
        if self.free.len() < want_frames {
            let grown = self.grow()?;
            if grown == 0 {
                self.give_up_cached(want_frames - self.free.len());
            }
        }
        // Frames that are no neighbours may stay for a while: pages that left together are, and their frames become free together.
        if want >= RUN_PAGES_MIN
            && self.free.len() < want_frames + LOOSE_FRAMES_MAX
            && self.free.find_run(want_frames).is_none_or(|(_, frames)| frames < want_frames)
        {
            self.give_up_cached(want_frames);
        }
        if self.free.is_empty() {
            self.use_spare_pages(1)?;
        }
        if self.free.is_empty() {
            self.evict_now()?;
            self.give_up_cached(want as usize);
        }
        let run = self.free.take_run(want as usize);
        if run.is_some() {
            self.backing.need_is_met();
        }
        Ok(run.map(|(frame, frames)| (frame as u32, frames as u32)))
    }

    /// Turns up to `frames` of the longest cached pages into remote ones.
    pub(super) fn give_up_cached(&mut self, frames: usize) {
        for _ in 0..frames {
            let Some((frame, page)) = self.cached.pop() else { return };
            self.free.put(frame as usize, 1);
            self.table.set(
                page,
                self.table
                    .get(page)
                    .with_state(PageState::Remote)
                    .with_frame(self.tier.stamp())
                    .with_wanted(false),
            );
        }
    }

    /// Maps cached pages from `page` on, up to `pages` of them, as far as their frames are neighbours. Returns how many.
    pub(super) fn map_cached(&mut self, page: u32, pages: u32) -> Result<u32> {
        let entry = self.table.get(page);
        let first = entry.frame();
        let pages = pages.min(self.page_count() - page);
        // What was evicted, and not read ahead, had been wanted.
        let (mut run, mut ahead) = (1, u64::from(!entry.wanted()));
        while run < pages {
            let entry = self.table.get(page + run);
            if entry.state() != PageState::Cached || entry.frame() != first + run {
                break;
            }
            ahead += u64::from(!entry.wanted());
            run += 1;
        }
        if entry.wanted() {
            self.returns.note_back();
        }
        self.stats.rescues += 1;
        self.stats.prefetch_hits += ahead;
        self.backing.detail.reuse.rescued += u64::from(run) - ahead;
        (first..first + run).for_each(|frame| self.cached.remove(frame));
        self.install(page, first, run)?;
        Ok(run)
    }

    /// Whether so many neighbours that come together are a window of a stream.
    pub(super) fn is_window(&self, pages: u32) -> bool {
        (self.in_window || pages > 1) && !self.names
    }

    /// Installs frames and wakes who waits.
    pub(super) fn install(&mut self, page: u32, frame: u32, pages: u32) -> Result<()> {
        let arrival = Arrival::in_window(self.is_window(pages));
        self.install_known(page, frame, pages, false, arrival)
    }

    /// The same; `again`: the first page was wanted again soon after it had left.
    fn install_known(
        &mut self,
        page: u32,
        frame: u32,
        pages: u32,
        again: bool,
        arrival: Arrival,
    ) -> Result<()> {
        self.tier.note_answered();
        let protect = pages == 1 && self.protects_next(page, again);
        let is_fresh = pages == 1 && self.install_fresh(page, frame, protect)?;
        if !is_fresh {
            let address = self.address_of(page);
            let installed = self.paged.install(address, frame as usize, pages as usize);
            installed.map_err(|source| system("install a page", source))?;
            self.empty.put(frame as usize, pages as usize);
        }
        for index in 0..pages {
            let entry = self.table.get(page + index);
            let is_rescued = entry.state() == PageState::Cached && entry.wanted();
            if is_rescued {
                self.mapped.note_back(page + index, arrival, 0, self.local_frames, true);
            }
            self.note_mapped(page + index, entry.with_frame(if is_rescued { SPARED } else { 0 }), arrival);
        }
        if is_fresh && protect {
            self.table.set(page, self.table.get(page).with_protected(true));
        }
        Ok(())
    }

    pub(super) fn is_mapped(&self, address: usize) -> bool {
        self.ranges.range(..=address).next_back().is_some_and(|(&start, &bytes)| address < start + bytes)
    }

    pub(super) fn page_count(&self) -> u32 {
        (self.area().len() / PAGE_BYTES) as u32
    }

    /// Zero pages for a first touch, and for those after it in a sequential stream.
    pub(super) fn zero_fill(&mut self, page: u32, ahead: u32, fault: Fault) -> Result<()> {
        if self.zero_run(page, ahead, ahead > 1)? == 0 {
            self.deferred.push(fault);
        }
        Ok(())
    }

    /// Zero pages from `page` on, which is mapped, up to `ahead` of them as far as none was touched. Returns how many, 0 where there is no frame.
    pub(super) fn zero_run(&mut self, page: u32, ahead: u32, in_window: bool) -> Result<u32> {
        let end_of_range = self
            .ranges
            .range(..=self.address_of(page))
            .next_back()
            .map_or(page + 1, |(&start, &bytes)| self.page_of(start + bytes - PAGE_BYTES) + 1);
        let mut pages = 1;
        while pages < ahead
            && page + pages < end_of_range
            && self.table.get(page + pages).state() == PageState::Untouched
        {
            pages += 1;
        }
        let Some((frame, frames)) = self.take_frames(pages)? else { return Ok(0) };
        self.paged.zero_frames(frame as usize, frames as usize);
        self.stats.zero_fills += u64::from(frames);
        self.install_known(page, frame, frames, false, Arrival::in_window(in_window))?;
        Ok(frames)
    }

    /// Starts to fetch a run of remote pages from the first of `pages` on, as far as slots and frames are neighbours; `wanted`
    /// ones are mapped on arrival. Returns how many were started, 0 when there is no frame.
    pub(super) fn fetch_run(&mut self, pages: Range<u32>, wanted: bool) -> Result<u32> {
        let page = pages.start;
        let slot = self.table.get(page).slot();
        let mut run = 1;
        while page + run < pages.end && run < TRANSFER_PAGES_MAX {
            let entry = self.table.get(page + run);
            let adjacent = entry.state() == PageState::Remote
                && self.backing.slots.adjacent(slot + run - 1, entry.slot());
            if !adjacent {
                break;
            }
            run += 1;
        }
        if wanted && self.give_fetch(page, run)? {
            return Ok(run);
        }
        let hot = if run == 1 && wanted { self.free.take_hot() } else { None };
        let taken = match hot {
            Some(frame) => Some((frame as u32, 1)),
            None => self.take_frames(run)?,
        };
        let Some((frame, frames)) = taken else { return Ok(0) };
        let (mut again, mut age, class) = (false, 0, self.backing.slots.class_of(slot));
        // Nobody waits for what is read ahead.
        let in_window = self.is_window(frames) || !wanted;
        let arrival = Arrival::in_window(in_window);
        for index in 0..frames {
            let is_soon;
            (age, is_soon) = self.note_back(page + index, class, arrival, wanted, index == 0);
            again |= is_soon;
            let entry = self.table.get(page + index);
            let entry = entry.with_state(PageState::Fetching).with_frame(frame + index);
            self.table.set(page + index, entry.with_wanted(wanted));
        }
        let promote = wanted && frames == 1 && self.backing.promotes(slot, age);
        let by_session = !wanted || self.are_many || self.names || self.errands.has_failed;
        let transfer =
            Transfer { again, in_window, promote, by_session, ..Transfer::read(page, frame, frames) };
        self.start(transfer, slot)?;
        if wanted && !self.names {
            self.tier.note_waiting();
        }
        Ok(frames)
    }

    /// A page that has left comes back. Returns how many pages have left since, and whether that are so few that it is worth being spared, which
    /// only the `first` that is fetched can be.
    pub(super) fn note_back(
        &mut self,
        page: u32,
        class: u8,
        arrival: Arrival,
        wanted: bool,
        first: bool,
    ) -> (u32, bool) {
        let age = self.tier.note_back(self.table.get(page).frame(), class);
        self.note_reuse(age);
        self.mapped.note_back(page, arrival, age as usize, self.local_frames, wanted);
        let first = first && wanted;
        if first && self.drops() && (age as usize) < self.reserve() {
            self.returns.note_back();
        }
        (age, first && (age as usize) < self.local_frames / AGAIN_PART)
    }

    /// Counts a page that comes back. Who has a part of the local memory that others share would get that part of more of it: by the clock of
    /// all of it, as much more has been evicted.
    fn note_reuse(&mut self, age: u32) {
        let (all, part) = (self.budget.frames_max(), self.local_frames.max(1) as u64);
        let age = u64::from(age).saturating_mul(all.max(part)) / part;
        self.backing.detail.reuse.note_back(u32::try_from(age).unwrap_or(u32::MAX));
    }

    /// A read has arrived.
    pub(super) fn fetched(&mut self, transfer: Transfer, from: Origin) -> Result<()> {
        if self.backing.seals.encrypts() {
            self.decrypt(transfer, from)?;
        }
        let mut index = 0;
        let mut wanted = false;
        while index < transfer.pages {
            let (page, frame) = (transfer.page + index, transfer.frame + index);
            if !self.arrived(page, frame, from)? {
                // Discarded meanwhile, or to be read again.
                self.free.put(frame as usize, 1);
                index += 1;
                continue;
            }
            if !self.table.get(page).wanted() {
                let entry = self.table.get(page).with_state(PageState::Cached);
                self.table.set(page, entry);
                self.cached.push(frame, page);
                index += 1;
                continue;
            }
            let mut run = 1;
            while index + run < transfer.pages
                && self.arrived(page + run, frame + run, from)?
                && self.table.get(page + run).wanted()
            {
                run += 1;
            }
            if transfer.promote {
                let entry = self.table.get(page);
                self.backing.release_slot(entry.slot())?;
                self.table.set(page, entry.with_slot(0));
            }
            let arrival = Arrival::in_window(transfer.in_window);
            self.install_known(page, frame, run, index == 0 && transfer.again, arrival)?;
            if index == 0 && transfer.again {
                self.table.set(page, self.table.get(page).with_frame(SPARED));
            }
            wanted = true;
            index += run;
        }
        let class = self.backing.slots.class(from.lender);
        self.tier.note_fetched(transfer.pages, wanted, class, &mut self.stats);
        Ok(())
    }

    /// What still waits for its frame is decrypted there; what is not what was written is read again.
    fn decrypt(&mut self, transfer: Transfer, from: Origin) -> Result<()> {
        for index in 0..transfer.pages {
            let (page, frame) = (transfer.page + index, transfer.frame + index);
            let entry = self.table.get(page);
            if entry.state() != PageState::Fetching || entry.frame() != frame {
                continue;
            }
            let bytes = self.paged.frame_bytes_mut(frame as usize);
            if !self.backing.seals.open(entry.slot(), bytes) {
                self.is_wrong(from, entry.slot())?;
                self.read_again(page, frame);
            }
        }
        Ok(())
    }

    /// Whether the page still waits for this frame; then its contents are checked.
    fn arrived(&mut self, page: u32, frame: u32, from: Origin) -> Result<bool> {
        let entry = self.table.get(page);
        if entry.state() != PageState::Fetching || entry.frame() != frame {
            return Ok(false);
        }
        // What was encrypted has been checked when it was decrypted.
        if !self.backing.seals.encrypts() && self.content_hash(frame) != self.table.hash(page) {
            self.is_wrong(from, entry.slot())?;
            self.read_again(page, frame);
            return Ok(false);
        }
        Ok(true)
    }

    /// What came for this slot is not what was written; an error when it cannot be had from anywhere else.
    fn is_wrong(&mut self, from: Origin, slot: Slot) -> Result<()> {
        if from.unsure {
            self.backing.doubt(from.lender);
            return Ok(());
        }
        self.backing.distrust(from.lender, slot)
    }

    /// Drops the contents of a range. Transfers on their way find their pages in another state and free their frames.
    pub(super) fn forget(&mut self, pages: Range<u32>) -> Result<()> {
        let mut from = pages.start;
        let mut dropped = 0;
        while let Some(page) = self.table.next_touched(from..pages.end) {
            let entry = self.table.get(page);
            match entry.state() {
                PageState::Mapped => dropped += 1,
                PageState::Cached => {
                    self.cached.remove(entry.frame());
                    self.free.put(entry.frame() as usize, 1);
                }
                PageState::Writing => self.writing_frames -= 1,
                PageState::Packed => drop(self.tier.pool.remove(entry.frame())),
                PageState::Untouched | PageState::Remote | PageState::Fetching | PageState::Filled => {}
            }
            self.backing.release_slot(entry.slot())?;
            self.table.set(page, Entry::default().with_queued(entry.queued()));
            from = page + 1;
        }
        self.tier.forget_waiting();
        // The caller drops these pages' memory.
        self.local_frames -= dropped;
        self.budget.release_excess(dropped as u64, self.local_frames as u64);
        if self.mapped.len() > 2 * self.paged.frames() + 1024 {
            // Each mapped page is in it once, so more than half of it is stale.
            let table = &mut self.table;
            self.mapped.retain(|page| {
                let entry = table.get(page);
                let live = entry.state() == PageState::Mapped;
                table.set(page, entry.with_queued(live));
                live
            });
        }
        Ok(())
    }

    /// The program dropped an installed page by a system call that was not intercepted: it reads as zero from now on.
    pub(super) fn lost_by_program(&mut self, page: u32) -> Result<()> {
        self.dropped_by_program = true;
        let entry = self.table.get(page);
        self.backing.release_slot(entry.slot())?;
        self.table.set(page, Entry::default().with_queued(entry.queued()));
        self.local_frames -= 1;
        self.budget.release_excess(1, self.local_frames as u64);
        Ok(())
    }
}

/// The range was unmapped while the fault was on its way: the thread will see that by itself.
pub(super) fn gone<T: Default>(error: std::io::Error) -> std::io::Result<T> {
    if error.raw_os_error() == Some(libc::ENOENT) { Ok(T::default()) } else { Err(error) }
}
