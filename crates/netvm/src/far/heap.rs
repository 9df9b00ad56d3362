//! Blocks of far memory as malloc's: who gives one back need not say how large it is.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use allocator_api2::alloc::Layout;
use netvm_sys::allocator::Blocks;

use super::blocks::{FarBlocks, is_large};
use super::{FarMemory, PagerError};
use crate::error::Result;
use crate::pager::Pager;

/// All blocks are at least so much aligned.
const ALIGNMENT: usize = 16;

/// Blocks by their addresses, for languages without layouts. What they are is kept outside of them, for large ones (above 32 KiB) in a table.
///
/// Blocks that are left when this is dropped stay where they are.
pub struct FarHeap {
    pager: Arc<Pager>,
    blocks: Arc<FarBlocks>,
    large: Mutex<BTreeMap<usize, Layout>>,
}

impl fmt::Debug for FarHeap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FarHeap").field("large", &self.large().len()).finish_non_exhaustive()
    }
}

impl FarHeap {
    /// Of this far memory, whose budget it shares.
    pub fn new(far: &FarMemory) -> Self {
        Self { pager: Arc::clone(&far.pager), blocks: Arc::clone(&far.blocks), large: Mutex::default() }
    }

    fn large(&self) -> MutexGuard<'_, BTreeMap<usize, Layout>> {
        self.large.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address of a block of `bytes` bytes, at a multiple of `alignment`, a power of two, and of 16. What it holds is anything.
    ///
    /// # Errors
    /// [`PagerError::AreaFull`] when no addresses are left, and for 0 bytes; [`PagerError::Alignment`].
    pub fn allocate(&self, bytes: usize, alignment: usize) -> Result<usize> {
        let layout = Layout::from_size_align(bytes, alignment.max(ALIGNMENT))
            .map_err(|_| PagerError::Alignment { bytes, alignment })?;
        let full = || PagerError::AreaFull { bytes, area_bytes: self.pager.area().len() };
        if bytes == 0 {
            return Err(full().into());
        }
        let address = self.blocks.take(layout).ok_or_else(full)?;
        if is_large(layout) {
            self.large().insert(address, layout);
        }
        Ok(address)
    }

    /// What a block is: large ones as they were asked for, small ones all that is theirs.
    fn layout_of(&self, address: usize) -> Result<Layout> {
        if let Some(&layout) = self.large().get(&address) {
            return Ok(layout);
        }
        let small = self.blocks.small_bytes_of(address);
        let layout = small.and_then(|bytes| Layout::from_size_align(bytes, ALIGNMENT).ok());
        layout.ok_or_else(|| PagerError::NotABlock { address }.into())
    }

    /// How many bytes of a block may be used: those that were asked for, or some more.
    ///
    /// # Errors
    /// [`PagerError::NotABlock`].
    pub fn usable(&self, address: usize) -> Result<usize> {
        Ok(self.layout_of(address)?.size())
    }

    /// A block of `bytes` bytes with the contents of this one, which is no more: the same, if possible. Pages of a large one are moved, not their
    /// bytes. It is as much aligned as a large one was, or 16.
    ///
    /// # Errors
    /// [`PagerError::NotABlock`], and as [`FarHeap::allocate`]: the block stays.
    pub fn resize(&self, address: usize, bytes: usize) -> Result<usize> {
        let old = self.layout_of(address)?;
        let new = Layout::from_size_align(bytes, old.align())
            .map_err(|_| PagerError::Alignment { bytes, alignment: old.align() })?;
        if bytes == 0 {
            return Err(PagerError::AreaFull { bytes, area_bytes: self.pager.area().len() }.into());
        }
        // Nobody else frees it meanwhile, or gets its old address before it is forgotten.
        let known = self.large().remove(&address);
        if let Some(moved) = self.blocks.resize(address, old, new, false) {
            if is_large(new) {
                self.large().insert(moved, new);
            }
            return Ok(moved);
        }
        if let Some(layout) = known {
            self.large().insert(address, layout);
        }
        let moved = self.allocate(bytes, old.align())?;
        let kept = old.size().min(bytes);
        let copied = self.pager.memory(moved, kept)?.copy_from(&self.pager.memory(address, kept)?);
        debug_assert!(copied.is_some(), "as long as each other");
        self.free(address)?;
        Ok(moved)
    }

    /// A block is not needed any more.
    ///
    /// # Errors
    /// [`PagerError::NotABlock`], also of one that has been freed.
    pub fn free(&self, address: usize) -> Result<()> {
        let layout = self.layout_of(address)?;
        if is_large(layout) && self.large().remove(&address).is_none() {
            return Err(PagerError::NotABlock { address }.into());
        }
        self.blocks.give(address, layout);
        Ok(())
    }
}
