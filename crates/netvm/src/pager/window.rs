//! Windows of streams: what comes with the page that is waited for.

use super::engine::Engine;
use super::hints::Access;
use crate::error::Result;
use netvm_core::residency::{Ahead, PageState, Stride};
use netvm_sys::uffd::{Fault, PAGE_BYTES};
use std::ops::Range;

/// With fewer frames than this to be had, only what is waited for is brought in.
pub(super) const ROOM_FRAMES: usize = 8;
/// One part in this many of the local memory is for the windows of streams that are told of.
const WINDOWS_PART: usize = 2;
/// A stream passes at most so many pages over.
const PASSED_OVER_MAX: u32 = 2048;

impl Engine {
    /// How far to run ahead of a fault, in units of pages that come together.
    #[inline]
    pub(super) fn ahead(&mut self, fault: Fault, page: u32) -> Ahead {
        let at = (fault.address + fault.offset - self.area().start) as u64;
        let (table, pages) = (&self.table, self.unit);
        let end = self.page_count();
        let here = |unit: u32| {
            let page = unit.saturating_mul(pages);
            page < end && table.get(page).state() == PageState::Mapped
        };
        const RANDOM: u32 = Access::Random as u32;
        const SEQUENTIAL: u32 = Access::Sequential as u32;
        let access = self.advice.get(page);
        if access == RANDOM {
            return Ahead::ALONE;
        }
        let ahead = if access == SEQUENTIAL || self.takes_stream_over(page) {
            // Windows that leave before they are used would come again and again.
            let frames = match self.budget.may_grow() {
                true => self.budget.frames_max() as usize,
                false => self.local_frames,
            };
            let room = frames / WINDOWS_PART / pages as usize;
            self.streams.fault_in_stream(at, fault.thread, room, here)
        } else {
            self.streams.fault(at, fault.thread, here)
        };
        // There was no frame for the page itself.
        if self.is_retrying {
            return Ahead::ALONE;
        }
        if ahead.map > 1 && ahead.stride.is_none() && self.mapped.keeps() {
            self.pass_over_kept((page / self.unit).saturating_add(ahead.map));
        }
        self.pass_stream_on(page, ahead);
        ahead
    }

    /// A stream goes on behind what is here of what it would bring in next.
    fn pass_over_kept(&mut self, from: u32) {
        let end = (self.page_count() / self.unit).min(from.saturating_add(PASSED_OVER_MAX));
        let is_here = |unit: &u32| self.table.get(unit * self.unit).state() == PageState::Mapped;
        let kept = (from..end).take_while(is_here).count() as u32;
        if kept > 0 {
            self.streams.pass_over(from, from + kept);
        }
    }

    /// Zero pages for elements of a stride that nobody has touched, but for `own`.
    pub(super) fn zero_elements(&mut self, own: u32, elements: u32, stride: Stride) -> Result<()> {
        self.has_strides = true;
        for index in 0..elements {
            let Some(pages) = self.element(stride, index) else { break };
            let mut page = pages.start;
            while page < pages.end {
                let is_new = page != own
                    && self.table.get(page).state() == PageState::Untouched
                    && self.is_mapped(self.address_of(page));
                if !is_new {
                    page += 1;
                    continue;
                }
                let end = if page < own { pages.end.min(own) } else { pages.end };
                let has_room = self.has_room_beside(end - page);
                let zeroed = if has_room { self.zero_run(page, end - page, true)? } else { 0 };
                if zeroed == 0 {
                    return Ok(());
                }
                page += zeroed;
            }
        }
        Ok(())
    }

    /// Fetches the remote pages of a range into the pool.
    pub(super) fn fetch_ahead(&mut self, pages: Range<u32>) -> Result<()> {
        self.fetch_some(pages, u32::MAX)
    }

    /// As many of these as are not here, and as there is room for.
    fn fetch_some(&mut self, pages: Range<u32>, mut room: u32) -> Result<()> {
        let end = pages.end.min(self.page_count());
        let mut page = pages.start;
        while room > 0
            && let Some(touched) = self.table.next_touched(page..end)
        {
            page = touched;
            if self.table.get(page).state() != PageState::Remote {
                page += 1;
                continue;
            }
            let started = self.fetch_run(page..end.min(page.saturating_add(room)), false)?;
            if started == 0 {
                return Ok(());
            }
            self.stats.prefetched += u64::from(started);
            page += started;
            room -= started;
        }
        Ok(())
    }

    /// Fetches the pages behind the mapped window into the pool.
    pub(super) fn read_ahead(&mut self, page: u32, ahead: Ahead) -> Result<()> {
        if ahead.fetch == 0 {
            return Ok(());
        }
        // Never at the expense of pages in use: only as far as frames can be had without evicting.
        let mut room = (self.free.len() + self.cached.len()) as u32 / 2;
        let (first, unit) = (page / self.unit, self.unit);
        let Some(stride) = ahead.stride else {
            let pages = ahead.fetch.saturating_mul(unit).min(room);
            let start = first.saturating_add(ahead.map).saturating_mul(unit);
            return self.fetch_ahead(start..start.saturating_add(pages));
        };
        for index in ahead.map..ahead.map + ahead.fetch {
            let Some(pages) = self.element(stride, index).filter(|pages| pages.len() <= room as usize) else {
                break;
            };
            room -= pages.len() as u32;
            self.fetch_ahead(pages)?;
        }
        Ok(())
    }

    /// The pages of an element, if they are in the area.
    fn element(&self, stride: Stride, index: u32) -> Option<Range<u32>> {
        let (first, end) = stride.units(index, (self.unit as usize * PAGE_BYTES) as u64)?;
        let end = end.checked_mul(self.unit)?;
        (end <= self.page_count()).then(|| first * self.unit..end)
    }

    /// Brings in the pages of a window. False when there is no frame for the page itself.
    pub(super) fn bring_window_in(&mut self, page: u32, ahead: Ahead) -> Result<bool> {
        let (first, unit) = (page / self.unit, self.unit);
        if ahead.stride.is_none() && unit == 1 {
            return self.bring_in(page, ahead.map);
        }
        if !self.has_room_for_units() {
            return self.bring_in(page, 1);
        }
        let Some(stride) = ahead.stride else {
            self.bring_in(first * unit, ahead.map * unit)?;
            return self.bring_in(page, 1);
        };
        self.has_strides = true;
        // The page itself last: its arrival wakes who waits.
        let own = first * unit..(first + 1) * unit;
        for index in 0..ahead.map {
            let Some(pages) = self.element(stride, index) else { break };
            for part in [pages.start..pages.end.min(own.start), pages.start.max(own.end)..pages.end] {
                if !part.is_empty() && self.has_room_beside(part.len() as u32) {
                    self.bring_in(part.start, part.len() as u32)?;
                }
            }
        }
        self.bring_in(first * unit, unit)?;
        self.bring_in(page, 1)
    }

    /// Whether there is room for some units, beside what is pinned: one access may need two of them at once.
    pub(super) fn has_room_for_units(&self) -> bool {
        if self.unit == 1 {
            return true;
        }
        let unpinned = self.local_frames.saturating_sub(self.pins.count() as usize);
        unpinned >= 3 * self.unit as usize || (self.pins.is_empty() && self.budget.may_grow())
    }

    /// Whether so many pages of a window may come before the unit that somebody waits for.
    pub(super) fn has_room_beside(&self, pages: u32) -> bool {
        self.free.len() + self.cached.len() >= pages as usize + ROOM_FRAMES.max(self.unit as usize)
    }

    /// Whether pages that nobody waits for may come before one that somebody does.
    pub(super) fn has_room(&self) -> bool {
        self.free.len() + self.cached.len() >= ROOM_FRAMES
    }

    /// Fetches what is away, into frames that nobody uses, and those that the budget has left.
    pub(super) fn will_need(&mut self, pages: Range<u32>) -> Result<()> {
        let ready = self.free.len() + self.cached.len();
        let (mut from, mut away, mut grown) = (pages.start, 0, 0);
        while let Some(page) = self.table.next_touched(from..pages.end) {
            from = page + 1;
            if self.table.get(page).state() != PageState::Remote {
                continue;
            }
            away += 1;
            while grown < away && self.budget.may_grow() {
                match self.grow()? {
                    0 => break,
                    frames => grown += frames,
                }
            }
            if away > grown + ready {
                break;
            }
        }
        self.fetch_some(pages, (grown + ready / 2) as u32)
    }
}
