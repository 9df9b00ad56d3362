//! Pages that come home: their lender asks for its memory, nobody else has room, and the budget has. See docs/design/lending.md.

use super::engine::Engine;
use super::transfers::TRANSFER_PAGES_MAX;
use crate::error::Result;
use netvm_core::residency::PageState;

/// Pages that are brought in at one look,
const PAGES: u32 = 512;
/// and entries of the page table that are looked at.
const ENTRIES: u32 = 1 << 16;
/// Neighbours that come together.
const RUN: u32 = if TRANSFER_PAGES_MAX < 64 { TRANSFER_PAGES_MAX } else { 64 };

impl Engine {
    /// Idle work, while a lender waits for slabs that nobody else can have: brings pages in as long as the budget is not used up, and lets
    /// go of the slots of those that are here.
    pub(super) fn bring_home(&mut self) -> Result<()> {
        let end = self.page_of(self.area().end - 1) + 1;
        let (mut looked, mut taken) = (0, 0);
        while looked < ENTRIES && taken < PAGES && self.budget.may_grow() {
            let Some(page) = self.table.next_touched(self.home..end) else {
                self.home = 0;
                return Ok(());
            };
            looked += 1;
            self.home = page + 1;
            let entry = self.table.get(page);
            if entry.slot() == 0 || !self.backing.slots.is_stuck_slot(entry.slot()) {
                continue;
            }
            match entry.state() {
                PageState::Remote => {
                    self.bring_in(page, RUN)?;
                    // Their slots are let go at the next round.
                    self.home = page.saturating_add(RUN).min(end);
                    taken += RUN;
                }
                PageState::Cached => {
                    self.map_cached(page, 1)?;
                    self.let_go_of_slot(page)?;
                }
                PageState::Mapped | PageState::Packed => self.let_go_of_slot(page)?,
                PageState::Untouched | PageState::Writing | PageState::Fetching | PageState::Filled => {}
            }
        }
        Ok(())
    }

    /// The page is here, and written anew when it leaves.
    pub(super) fn let_go_of_slot(&mut self, page: u32) -> Result<()> {
        let entry = self.table.get(page);
        self.backing.release_slot(entry.slot())?;
        self.table.set(page, entry.with_slot(0));
        Ok(())
    }
}
