//! Blocks of far memory: small ones from spans of their size, large ones in pages of their own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use allocator_api2::alloc::Layout;
use netvm_core::heap::{Given, Heap, SPAN_BYTES, small_bytes};
use netvm_sys::allocator::Blocks;
use netvm_sys::fork::Process;
use netvm_sys::uffd::PAGE_BYTES;

use crate::error::Result;
use crate::pager::{BlockAt, Pager, this_process};

/// All blocks of one far memory.
pub(super) struct FarBlocks {
    pager: Arc<Pager>,
    heap: Arc<Mutex<Heap>>,
    /// Far memory is not inherited: a child of a fork has nothing to give back.
    process: Process,
}

impl FarBlocks {
    pub(super) fn new(pager: Arc<Pager>, heap: Arc<Mutex<Heap>>) -> Result<Self> {
        Ok(Self { pager, heap, process: this_process()? })
    }

    fn heap(&self) -> MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is any in this process.
    pub(super) fn is_here(&self) -> bool {
        self.process.is_this()
    }

    /// Bytes of the small block that begins at an address and is used.
    pub(super) fn small_bytes_of(&self, address: usize) -> Option<usize> {
        self.heap().used_at(address)
    }

    /// Whether an address is in a span of small blocks.
    pub(super) fn is_in_span(&self, address: usize) -> bool {
        self.heap().block_at(address).is_some()
    }

    /// Zero pages; a child of a fork has none.
    fn pages(&self, bytes: usize, alignment: usize) -> Option<usize> {
        if !self.is_here() {
            return None;
        }
        self.pager.take_range(bytes, alignment).ok().map(|(address, _)| address)
    }

    /// Moves a large block to `bytes` bytes elsewhere: its pages, not their bytes.
    fn relocate(&self, address: usize, held: usize, new: Layout) -> Option<usize> {
        if !self.is_here() {
            return None;
        }
        let (to, _) = self.pager.take_range_like(new.size(), new.align(), address).ok()?;
        if self.pager.relocate(address, to, held).is_err() {
            self.merge(address, to, held);
        }
        self.pager.give_range(address, held);
        Some(to)
    }

    /// Zeros in the bytes `from..to` of a block.
    fn clear(&self, address: usize, from: usize, to: usize, zeroed: bool) {
        if zeroed
            && from < to
            && let Ok(memory) = self.pager.memory(address + from, to - from)
        {
            memory.fill(0);
        }
    }

    /// What was moved is zero at its old place, and what was not is zero at its new one.
    #[cold]
    fn merge(&self, from: usize, to: usize, bytes: usize) {
        let (Ok(from), Ok(to)) = (self.pager.memory(from, bytes), self.pager.memory(to, bytes)) else {
            return;
        };
        let (mut old, mut new) = (vec![0; PAGE_BYTES], vec![0; PAGE_BYTES]);
        for at in (0..bytes).step_by(PAGE_BYTES) {
            // Both are whole pages.
            let both = from.read_into(at, &mut old).and(to.read_into(at, &mut new));
            if both.is_some() {
                new.iter_mut().zip(&old).for_each(|(new, old)| *new |= old);
                let _ = to.write_from(at, &new);
            }
        }
    }
}

/// For the pager, which waits for nobody: a thread that has the heap may be waiting for a page.
pub(super) fn block_at(heap: &Arc<Mutex<Heap>>) -> BlockAt {
    let heap = Arc::clone(heap);
    BlockAt(Arc::new(move |address| heap.try_lock().ok()?.block_at(address)))
}

/// Whether it has pages of its own.
pub(super) fn is_large(layout: Layout) -> bool {
    small_bytes(layout.size(), layout.align()).is_none()
}

fn page_bytes(layout: Layout) -> usize {
    layout.size().next_multiple_of(PAGE_BYTES)
}

impl Blocks for FarBlocks {
    fn take(&self, layout: Layout) -> Option<usize> {
        // Before the heap: a thread that is not here may have it locked, and its blocks are not here either.
        if !self.is_here() {
            return None;
        }
        if is_large(layout) {
            return self.pages(layout.size(), layout.align());
        }
        let mut heap = self.heap();
        if let Some(block) = heap.take(layout.size(), layout.align()) {
            return Some(block);
        }
        let span = self.pages(SPAN_BYTES, SPAN_BYTES)?;
        heap.add(span, layout.size(), layout.align());
        heap.take(layout.size(), layout.align())
    }

    fn is_zero(&self, layout: Layout) -> bool {
        is_large(layout)
    }

    fn give(&self, address: usize, layout: Layout) {
        if !self.is_here() {
            return;
        }
        if is_large(layout) {
            return self.pager.give_range(address, page_bytes(layout));
        }
        let given = self.heap().give(address, layout.size(), layout.align());
        debug_assert!(given.is_ok(), "{address:#x} is no block");
        if let Ok(Given::Empty(span)) = given {
            self.pager.give_range(span, SPAN_BYTES);
        }
    }

    fn resize(&self, address: usize, old: Layout, new: Layout, zeroed: bool) -> Option<usize> {
        if !self.is_here() {
            return None;
        }
        let small = |layout: Layout| small_bytes(layout.size(), layout.align());
        if let (Some(old_block), Some(new_block)) = (small(old), small(new)) {
            let same = (old_block == new_block).then_some(address)?;
            self.clear(same, old.size(), new.size(), zeroed);
            return Some(same);
        }
        if !is_large(old) || !is_large(new) || !address.is_multiple_of(new.align()) {
            return None;
        }
        let (held, needed) = (page_bytes(old), page_bytes(new));
        // What was once used of the last page; whole new pages are zero.
        self.clear(address, old.size(), new.size().min(held), zeroed);
        if needed > held {
            return self.relocate(address, held, new);
        }
        if needed < held {
            self.pager.give_range(address + needed, held - needed);
        }
        Some(address)
    }
}

impl Drop for FarBlocks {
    fn drop(&mut self) {
        if self.is_here() {
            // Those with blocks that nobody has given back stay: somebody may have their addresses.
            let spans: Vec<usize> = self.heap().empty_spans().collect();
            spans.into_iter().for_each(|span| self.pager.give_range(span, SPAN_BYTES));
        }
    }
}
