//! Far memory that must be in this machine: for good, because the kernel will keep its pages, or while the pager stands still.

use super::engine::{EVICT_PAGES, Engine};
use super::error::{PagerError, system};
use crate::error::Result;
use netvm_core::residency::{Entry, PageState};
use netvm_sys::local::LocalCopy;
use netvm_sys::paged::ExtractError;
use netvm_sys::uffd::{Fault, PAGE_BYTES};
use std::ops::Range;

/// Below and above the stack pointer of a thread that forks, what the fork may need of its stack.
const STACK_BELOW: usize = 96 << 10;
const STACK_ABOVE: usize = 8 << 10;
/// How often the pages that a fork needs are asked for until they are all there.
const STACK_ATTEMPTS: usize = 64;
/// How often a page that is pinned for I/O is tried again, a millisecond apart.
const PINNED_ATTEMPTS: usize = 1000;

impl Engine {
    /// Makes a range plain local memory, outside the budget, that the pager has nothing to do with any more. Pages without contents stay
    /// untouched. Threads that use it meanwhile wait, and find their pages.
    pub(super) fn make_local(&mut self, address: usize, bytes: usize, protection: i32) -> Result<()> {
        // A page that is served while it is in the copy, or before the copy takes its place, would be another.
        self.holds_back = true;
        let done = self.put_in_place(address, bytes, protection);
        self.holds_back = false;
        self.has_local |= done.is_ok();
        done
    }

    fn put_in_place(&mut self, address: usize, bytes: usize, protection: i32) -> Result<()> {
        let pages = self.pages(address, bytes)?;
        let mut copy = LocalCopy::new(bytes).map_err(|e| PagerError::NoLocalMemory((&e).into()))?;
        if let Err(error) = self.copy_out(pages.clone(), &mut copy) {
            self.put_back(pages, &copy)?;
            return Err(error);
        }
        // The kernel's mappings first: there may be no room for another (vm.max_map_count).
        if let Err((copy, error)) = self.paged.replace_range(address, copy, protection) {
            self.put_back(pages, &copy)?;
            return Err(PagerError::NoLocalMemory((&error).into()).into());
        }
        // Nothing of the range is left; transfers on their way find that out.
        self.forget_marks(pages.clone());
        self.forget(pages)?;
        self.remove_range(address, bytes);
        self.wake(address, bytes)
    }

    /// Moves the contents of all pages to `copy`; they are untouched afterwards.
    fn copy_out(&mut self, pages: Range<u32>, copy: &mut LocalCopy) -> Result<()> {
        let mut from = pages.start;
        while let Some(first) = self.table.next_touched(from..pages.end) {
            // All of them must be here at once, also in a process that has next to nothing.
            let unpinned = self.local_frames.saturating_sub(self.pins.count() as usize);
            let end = pages.end.min(first + (unpinned / 4).clamp(1, EVICT_PAGES) as u32);
            self.gather(first..end)?;
            for page in first..end {
                let offset = (page - pages.start) as usize * PAGE_BYTES;
                self.take_one_out(page, offset, copy)?;
            }
            from = end;
        }
        Ok(())
    }

    /// Brings pages into frames or into the program's address space.
    fn gather(&mut self, pages: Range<u32>) -> Result<()> {
        loop {
            let mut all = true;
            for page in pages.clone() {
                match self.table.get(page).state() {
                    PageState::Untouched | PageState::Mapped | PageState::Cached => {}
                    PageState::Writing | PageState::Fetching => all = false,
                    PageState::Remote | PageState::Packed | PageState::Filled => {
                        // Without a frame now there will be one when what is under way has finished.
                        self.bring_in(page, 1)?;
                        all = false;
                    }
                }
            }
            if all {
                return Ok(());
            }
            self.finish_all()?;
        }
    }

    fn take_one_out(&mut self, page: u32, offset: usize, copy: &mut LocalCopy) -> Result<()> {
        let entry = self.table.get(page);
        let frame = match entry.state() {
            PageState::Cached => {
                self.cached.remove(entry.frame());
                entry.frame()
            }
            PageState::Mapped => match self.extract_patiently(page)? {
                Some(frame) => frame,
                None => return self.lost_by_program(page),
            },
            _ => return Ok(()),
        };
        copy.set(offset, self.paged.frame_bytes(frame as usize));
        self.free.put(frame as usize, 1);
        self.backing.release_slot(entry.slot())?;
        self.table.set(page, Entry::default().with_queued(entry.queued()));
        Ok(())
    }

    /// A mapped page into a frame; `None` when the program dropped it.
    pub(super) fn extract_patiently(&mut self, page: u32) -> Result<Option<u32>> {
        let Some((frame, _)) = self.empty.take_run(1) else {
            return Err(system("find an empty frame", std::io::ErrorKind::OutOfMemory.into()));
        };
        let address = self.address_of(page);
        for _ in 0..PINNED_ATTEMPTS {
            match self.paged.extract(address, frame, 1) {
                (1, _) => return Ok(Some(frame as u32)),
                (_, Err(ExtractError::Missing)) => {
                    self.empty.put(frame, 1);
                    return Ok(None);
                }
                (_, Err(ExtractError::Os(source))) => {
                    self.empty.put(frame, 1);
                    return Err(system("take a page out", source));
                }
                _ => std::thread::sleep(std::time::Duration::from_millis(1)),
            }
        }
        self.empty.put(frame, 1);
        // The attempts have lifted the protection.
        self.table.set(page, self.table.get(page).with_protected(false));
        Err(PagerError::PagePinned { address }.into())
    }

    /// What was taken out becomes far memory again.
    fn put_back(&mut self, pages: Range<u32>, copy: &LocalCopy) -> Result<()> {
        let mut contents = [0; PAGE_BYTES];
        for page in pages.clone() {
            copy.get((page - pages.start) as usize * PAGE_BYTES, &mut contents);
            if self.table.get(page).state() != PageState::Untouched || contents == [0; PAGE_BYTES] {
                continue;
            }
            let frame = loop {
                match self.take_frames(1)? {
                    Some((frame, _)) => break frame,
                    None => self.finish_all()?,
                }
            };
            self.paged.frame_bytes_mut(frame as usize).copy_from_slice(&contents);
            self.install(page, frame, 1)?;
        }
        Ok(())
    }

    /// Installs what is needed while no fault is served: the part of a far stack around its pointer, and the pages at some addresses.
    pub(super) fn bring_in_for_fork(&mut self, stack_pointer: usize, also: &[usize]) -> Result<()> {
        let mut pages: Vec<u32> = Vec::new();
        if self.area().contains(&stack_pointer) {
            pages.extend(self.stack_around(stack_pointer));
        }
        let also = also.iter().filter(|&&address| self.is_mapped(address));
        pages.extend(also.map(|&address| self.page_of(address)));
        for _ in 0..STACK_ATTEMPTS {
            self.make_room_for_fork(&pages)?;
            let mut all = true;
            for &page in &pages {
                let entry = self.table.get(page);
                match entry.state() {
                    // Writes to it would wait as well.
                    PageState::Mapped if entry.protected() => {
                        self.lift_protection(page, entry, true)?;
                        continue;
                    }
                    PageState::Mapped => continue,
                    PageState::Writing => self.table.set(page, entry.with_wanted(true)),
                    PageState::Untouched => {
                        let fault = Fault { address: self.address_of(page), ..Fault::default() };
                        self.zero_fill(page, 1, fault)?;
                    }
                    _ => drop(self.bring_in(page, 1)?),
                }
                all = false;
            }
            if all {
                return Ok(());
            }
            self.finish_all()?;
        }
        // Nobody would serve who forks.
        Err(system("keep the far stack of who forks here", std::io::ErrorKind::OutOfMemory.into()))
    }

    /// Frames for those of `pages` that are not here, whatever the budget: they are given back after the fork.
    fn make_room_for_fork(&mut self, pages: &[u32]) -> Result<()> {
        let is_missing = |&&page: &&u32| self.table.get(page).state() != PageState::Mapped;
        let mut lacking = pages.iter().filter(is_missing).count().saturating_sub(self.free.len());
        while lacking > 0
            && let Some((frame, frames)) = self.empty.take_run(lacking)
        {
            if let Err(error) = self.paged.fill_frames(frame, frames) {
                self.empty.put(frame, frames);
                return Err(PagerError::NoLocalMemory((&error).into()).into());
            }
            self.free.put(frame, frames);
            self.note_local(frames);
            lacking -= frames;
        }
        Ok(())
    }

    fn stack_around(&self, pointer: usize) -> Range<u32> {
        let (start, end) = match self.ranges.range(..=pointer).next_back() {
            Some((&start, &bytes)) if pointer < start + bytes => (start, start + bytes),
            _ => return 0..0,
        };
        let low = pointer.saturating_sub(STACK_BELOW).max(start);
        let high = (pointer + STACK_ABOVE).min(end);
        self.page_of(low)..self.page_of(high - 1) + 1
    }
}
