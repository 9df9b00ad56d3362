//! Pages here and there that a program names because it is about to use them: docs/design/far.md, "Pages that are named".

use super::Pager;
use super::calls::Call;
use super::engine::{EVICT_PAGES, Engine};
use super::window::ROOM_FRAMES;
use crate::error::Result;
use netvm_core::residency::PageState;
use netvm_sys::paged::Told;
use netvm_sys::uffd::PAGE_BYTES;

/// Pages of one call: they have one bell rung, and go to lenders together.
const NAMED_MAX: usize = 64;
/// What is longer is read ahead, as by [`Pager::will_need`].
const SHORT_PAGES: u32 = 256;
/// One part in so many of the local memory comes as one run at most.
const RUN_PART: usize = 8;
/// Steps of eviction that a thread does for what it has named, where no thread of the pager's does.
const STEPS_MAX: usize = 16;

/// Pages in the order in which they are going to be used. A call has them with it: where the caller has its own list may be far memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named {
    pages: [u32; NAMED_MAX],
    count: usize,
}

impl Named {
    const NONE: Self = Self { pages: [0; NAMED_MAX], count: 0 };

    fn as_slice(&self) -> &[u32] {
        &self.pages[..self.count]
    }

    fn is_full(&self) -> bool {
        self.count == NAMED_MAX
    }

    /// One more, of which there is room.
    fn push(&mut self, page: u32) {
        // Several values of a page.
        if self.as_slice().last() != Some(&page) {
            self.pages[self.count] = page;
            self.count += 1;
        }
    }
}

impl Pager {
    /// So many bytes at each of these addresses are going to be used soon, in this order: begins to bring their pages in, to where they can be used without
    /// a fault, as far as there is room, and does not wait for them. What is longer than 1 MiB is only fetched ([`Pager::will_need`]). A hint: what is not far
    /// memory is passed over.
    pub fn will_need_each(&self, places: impl IntoIterator<Item = (usize, usize)>) {
        let mut named = Named::NONE;
        for (address, bytes) in places {
            let inside = address.max(self.area.start)..address.saturating_add(bytes).min(self.area.end);
            if inside.is_empty() {
                continue;
            }
            let (first, last) = (self.page_at(inside.start), self.page_at(inside.end - 1));
            if last - first >= SHORT_PAGES {
                let address = self.area.start + first as usize * PAGE_BYTES;
                self.will_need(address, (last - first + 1) as usize * PAGE_BYTES);
                continue;
            }
            for page in first..=last {
                named.push(page);
                if named.is_full() {
                    self.name(&named);
                    named = Named::NONE;
                }
            }
        }
        if named.count > 0 {
            self.name(&named);
        }
    }

    fn page_at(&self, address: usize) -> u32 {
        ((address - self.area.start) / PAGE_BYTES) as u32
    }

    fn name(&self, named: &Named) {
        if let [shard] = &self.shards[..] {
            // A hint that cannot be followed changes nothing.
            let _ = shard.call(Call::WillNeedEach(*named), self);
            return;
        }
        for (number, shard) in self.shards.iter().enumerate() {
            let mut some = Named::NONE;
            let address = |page: u32| self.area.start + page as usize * PAGE_BYTES;
            let is_its = |&&page: &&u32| self.stripes.shard_of(address(page)) == number;
            named.as_slice().iter().filter(is_its).for_each(|&page| some.push(page));
            if some.count > 0 {
                let _ = shard.call(Call::WillNeedEach(some), self);
            }
        }
    }
}

impl Engine {
    /// Begins to bring in what is named, as far as there is room.
    pub(super) fn will_need_each(&mut self, named: &Named) -> Result<()> {
        // What has come of those before them is out of the way.
        self.progress()?;
        self.names = true;
        let begun = self.bring_named_in(named.as_slice());
        self.names = false;
        begun?;
        // Where a thread of the pager's is called, that evicts while answers are on their way.
        if self.paged.told() == Told::Faulter {
            for _ in 0..STEPS_MAX {
                if !self.go_on(false)?.1 {
                    break;
                }
            }
        }
        Ok(())
    }

    fn bring_named_in(&mut self, mut named: &[u32]) -> Result<()> {
        while let Some(&first) = named.first() {
            // Neighbours in order are read by one transfer, but never at the expense of all others.
            let most = (self.local_frames / RUN_PART).max(1);
            let run = named.iter().zip(first..).take(most).take_while(|(page, next)| **page == *next).count();
            named = &named[run..];
            let (start, end) = (self.unit_of(first).start, self.unit_of(first + run as u32 - 1).end);
            let mut away = 0;
            for page in start..end.min(self.page_count()) {
                let entry = self.table.get(page);
                match entry.state() {
                    PageState::Remote | PageState::Cached | PageState::Packed | PageState::Filled => {
                        away += 1
                    }
                    // What is here is not to leave for those named with it.
                    PageState::Mapped => self.table.set(page, entry.with_frame(entry.frame().max(1))),
                    PageState::Writing => self.table.set(page, entry.with_wanted(true)),
                    PageState::Untouched | PageState::Fetching => {}
                }
            }
            if away == 0 {
                continue;
            }
            if !self.has_room_for_named(end - start)? {
                return Ok(());
            }
            self.stats.named += away as u64;
            self.bring_in(start, end - start)?;
        }
        Ok(())
    }

    /// Whether there is room for so many pages, or has been made.
    fn has_room_for_named(&mut self, pages: u32) -> Result<bool> {
        let needed = pages as usize + ROOM_FRAMES.max(self.unit as usize);
        let ready = |engine: &Self| engine.free.len() + engine.cached.len();
        while ready(self) < needed {
            let before = ready(self);
            if self.budget.may_grow() {
                self.grow()?;
            }
            // Nothing leaves for what would not come even then, nor while those before wait to be sent.
            let unpinned = self.local_frames.saturating_sub(self.pins.count() as usize);
            let may_leave = unpinned >= 2 * needed && self.writing_frames < EVICT_PAGES;
            if ready(self) <= before && may_leave && !self.evict_ahead()? && !self.backing.is_stranded() {
                match self.evict(EVICT_PAGES) {
                    Err(error) if error.is_no_room() => return Ok(false),
                    evicted => drop(evicted?),
                }
            }
            if ready(self) <= before {
                // Those that have left together have left no frames behind.
                self.use_spare_pages(needed.saturating_sub(self.cached.len()))?;
            }
            if ready(self) <= before {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
