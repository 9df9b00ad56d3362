//! Blocks of an allocator that lie on several pages come in as a whole.

use std::ops::Range;
use std::sync::Arc;

use netvm_core::residency::{Ahead, BLOCK_BYTES_MAX, PageState, WholeBlocks};
use netvm_sys::uffd::{Fault, PAGE_BYTES};

use super::engine::Engine;
use crate::error::Result;

/// Where the block is that an address belongs to, if an allocator knows: a hint. Called where faults are served, so it waits for
/// nobody and touches no far memory.
#[derive(Clone)]
pub struct BlockAt(pub Arc<dyn Fn(usize) -> Option<Range<usize>> + Send + Sync>);

impl std::fmt::Debug for BlockAt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BlockAt")
    }
}

/// What an engine knows of blocks.
pub(super) struct Blocks {
    at: Option<BlockAt>,
    whole: WholeBlocks,
}

impl Blocks {
    pub(super) fn new(at: Option<BlockAt>) -> Self {
        Self { at, whole: WholeBlocks::default() }
    }
}

impl Engine {
    /// Brings in the rest of the block in which a thread has faulted, if there is one and that mostly pays: before the page itself, whose
    /// arrival wakes the thread.
    pub(super) fn bring_rest_in(&mut self, fault: Fault, page: u32, ahead: Ahead) -> Result<()> {
        let Some(at) = &self.blocks.at else { return Ok(()) };
        self.blocks.whole.note_fault(page);
        if ahead.map > 1 || self.unit > 1 {
            return Ok(());
        }
        let Some(block) = at.0(fault.address + fault.offset) else { return Ok(()) };
        let pages = (block.end.saturating_sub(fault.address)).div_ceil(PAGE_BYTES) as u32;
        if pages < 2 || block.len() > BLOCK_BYTES_MAX || block.end > self.area().end {
            return Ok(());
        }
        let is_there = matches!(self.table.get(page + 1).state(), PageState::Mapped | PageState::Writing);
        if is_there || !self.has_room() || !self.blocks.whole.takes(block.len(), page + 1) {
            return Ok(());
        }
        // The page itself with it, if both can come at once.
        let slot = self.table.get(page).slot();
        let together = pages == 2
            && [page, page + 1].iter().all(|&page| self.table.get(page).state() == PageState::Remote)
            && self.backing.slots.adjacent(slot, self.table.get(page + 1).slot());
        if together && self.give_fetch(page, pages)? {
            return Ok(());
        }
        self.bring_in(page + 1, pages - 1).map(drop)
    }
}
