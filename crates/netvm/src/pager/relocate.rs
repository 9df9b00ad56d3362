//! Moving pages inside the area.

use super::engine::Engine;
use super::error::{PagerError, system};
use crate::error::{Error, Result};
use netvm_core::residency::{Arrival, Entry, PageState};
use netvm_sys::uffd::PAGE_BYTES;
use std::ops::Range;

impl Engine {
    /// Moves pages inside the area.
    ///
    /// # Errors
    /// [`PagerError::PagePinned`], and all pages are where they were.
    pub(super) fn relocate(&mut self, old: Range<u32>, new: Range<u32>) -> Result<()> {
        self.finish_all()?;
        self.forget(new.clone())?;
        let (new_address, bytes) = (self.address_of(new.start), new.len() * PAGE_BYTES);
        self.paged.drop_pages(new_address, bytes).map_err(|e| system("make room for moved pages", e))?;
        match self.relocate_entries(old.clone(), new.start) {
            Err(error) if matches!(error, Error::Pager(PagerError::PagePinned { .. })) => {
                self.relocate_entries(new, old.start)?;
                Err(error)
            }
            moved => {
                // What the program has told of them goes with them.
                self.pins.relocate(old.clone(), new.start);
                self.advice.relocate(old, new.start);
                self.budget.set_pinned(self.pins.count());
                moved
            }
        }
    }

    /// Stops at a page that is pinned.
    fn relocate_entries(&mut self, old: Range<u32>, new_start: u32) -> Result<()> {
        let mut from = old.start;
        while let Some(page) = self.table.next_touched(from..old.end) {
            let to = new_start + (page - old.start);
            let entry = self.table.get(page);
            if entry.state() == PageState::Mapped {
                let mut run = 1;
                while page + run < old.end && self.table.get(page + run).state() == PageState::Mapped {
                    run += 1;
                }
                self.shift(page, to, run)?;
                from = page + run;
            } else {
                self.table.set(page, Entry::default().with_queued(entry.queued()));
                let queued = self.table.get(to).queued();
                self.table.set(to, entry.with_queued(queued));
                self.table.set_hash(to, self.table.hash(page));
                match entry.state() {
                    PageState::Cached => self.cached.rename(entry.frame(), to),
                    PageState::Packed => self.tier.pool.rename(entry.frame(), to),
                    _ => {}
                }
                from = page + 1;
            }
        }
        Ok(())
    }

    /// Moves a run of mapped pages.
    fn shift(&mut self, page: u32, to: u32, pages: u32) -> Result<()> {
        let mut done = 0;
        while done < pages {
            let (old, new) = (self.address_of(page + done), self.address_of(to + done));
            let (moved, stopped) = self.paged.shift(old, new, (pages - done) as usize);
            for index in done..done + moved as u32 {
                self.move_entry(page + index, to + index);
            }
            done += moved as u32;
            if stopped.is_err() && done < pages {
                // Pinned, shared with a child, or dropped by the program itself: by way of a frame, one at a time.
                self.shift_by_frame(page + done, to + done)?;
                done += 1;
            }
        }
        Ok(())
    }

    fn move_entry(&mut self, page: u32, to: u32) {
        let entry = self.table.get(page);
        self.table.set(page, Entry::default().with_queued(entry.queued()));
        self.table.set_hash(to, self.table.hash(page));
        let queued = self.table.get(to).queued();
        // A move lifts the protection.
        self.note_mapped(to, entry.with_protected(false).with_queued(queued), Arrival::Alone);
    }

    fn shift_by_frame(&mut self, page: u32, to: u32) -> Result<()> {
        let Some(frame) = self.extract_patiently(page)? else {
            return self.lost_by_program(page);
        };
        let installed = self.paged.install(self.address_of(to), frame as usize, 1);
        installed.map_err(|e| system("move a page", e))?;
        self.empty.put(frame as usize, 1);
        self.move_entry(page, to);
        Ok(())
    }
}
