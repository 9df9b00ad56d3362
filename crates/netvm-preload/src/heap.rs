//! Large far allocations: whole pages, found again by address in a local table.
//!
//! The heap takes addresses from the area in chunks that stay mapped. A free range of it has been discarded: it reads zero and
//! costs nothing, except for a few freed blocks that are kept as they are for the next allocation of their size.

use crate::backend::Far;
use crate::space::{Kind, SPACE};
use crate::sys::{Locked, PAGE_BYTES, round_up};
use netvm_core::ranges::FreeRanges;
use std::collections::BTreeMap;

/// Least far threshold, in bytes: what is smaller than a small block can always be small.
pub(crate) const THRESHOLD_BYTES_MIN: usize = PAGE_BYTES;
/// The heap grows by at least this.
const CHUNK_BYTES: usize = 64 << 20;
/// Freed blocks up to this size are kept, so many and so much of them.
const KEPT_BYTES_EACH: usize = 1 << 20;
const KEPT_BLOCKS: usize = 8;
const KEPT_BYTES: usize = 4 << 20;

/// A large allocation.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// What the program may use, whole pages.
    bytes: usize,
    /// Addresses set aside for growth, at least `bytes`; what is beyond `bytes` reads zero.
    reserved: usize,
    /// Pages of it are local until it is freed.
    local: bool,
}

pub(crate) struct Heap {
    free: FreeRanges,
    blocks: BTreeMap<usize, Block>,
    /// Freed blocks with contents: (address, bytes), oldest first.
    kept: Vec<(usize, usize)>,
    kept_bytes: usize,
}

/// Taken after the lock of a size class, before the space's.
pub(crate) static HEAP: Locked<Heap> =
    Locked::new(Heap { free: FreeRanges::new(), blocks: BTreeMap::new(), kept: Vec::new(), kept_bytes: 0 });

/// What [`Heap::allocate`] found.
pub(crate) struct Fresh {
    pub(crate) address: usize,
    /// It reads zero.
    pub(crate) zero: bool,
}

impl Heap {
    /// Zero memory of whole pages.
    pub(crate) fn take(&mut self, far: &dyn Far, bytes: usize, alignment: usize) -> Option<usize> {
        if let Some(address) = self.free.take(bytes, alignment) {
            return Some(address);
        }
        let chunk = round_up(bytes.checked_add(alignment)?, crate::small::GRANULE_BYTES)?;
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        let mapped = SPACE.with(|space| {
            let mut map = |bytes| {
                space
                    .map(far, bytes, crate::small::GRANULE_BYTES, writable, Kind::Heap)
                    .map(|address| (address, bytes))
            };
            map(chunk.max(CHUNK_BYTES)).or_else(|_| map(chunk))
        });
        let (address, chunk) = mapped.ok()?;
        self.free.put(address, chunk);
        self.free.take(bytes, alignment)
    }

    /// Gives memory back, contents and all.
    pub(crate) fn put(&mut self, far: &dyn Far, address: usize, bytes: usize) {
        // A range that could not be discarded would not read zero: better lost than wrong.
        if far.discard(address, bytes).is_ok() {
            self.free.put(address, bytes);
        }
    }

    /// A large block of at least `bytes`, with addresses set aside up to `reserved`.
    pub(crate) fn allocate(
        &mut self,
        far: &dyn Far,
        bytes: usize,
        reserved: usize,
        alignment: usize,
    ) -> Option<Fresh> {
        let bytes = round_up(bytes, PAGE_BYTES)?;
        let reserved = round_up(reserved, PAGE_BYTES)?.max(bytes);
        if reserved == bytes && alignment <= PAGE_BYTES && bytes <= KEPT_BYTES_EACH {
            let fits = |&(_, kept): &(usize, usize)| kept >= bytes && kept - bytes <= bytes / 8;
            if let Some(index) = self.kept.iter().rposition(fits) {
                let (address, kept) = self.kept.remove(index);
                self.kept_bytes -= kept;
                self.blocks.insert(address, Block { bytes: kept, reserved: kept, local: false });
                return Some(Fresh { address, zero: false });
            }
        }
        let alignment = alignment.max(PAGE_BYTES);
        let (address, reserved) = match self.take(far, reserved, alignment) {
            Some(address) => (address, reserved),
            None => (self.take(far, bytes, alignment)?, bytes),
        };
        self.blocks.insert(address, Block { bytes, reserved, local: false });
        Some(Fresh { address, zero: true })
    }

    /// Usable bytes of the block at `address`.
    pub(crate) fn usable(&self, address: usize) -> Option<usize> {
        self.blocks.get(&address).map(|block| block.bytes)
    }

    /// Frees the block at `address`; false if there is none.
    pub(crate) fn free(&mut self, far: &dyn Far, address: usize) -> bool {
        let Some(Block { bytes, reserved, local }) = self.blocks.remove(&address) else { return false };
        if local && SPACE.with(|space| space.make_block_far(far, address, bytes)).is_err() {
            // Better lost than wrong, as in `put`.
            return true;
        }
        if reserved == bytes && bytes <= KEPT_BYTES_EACH {
            self.kept.push((address, bytes));
            self.kept_bytes += bytes;
            while self.kept.len() > KEPT_BLOCKS || self.kept_bytes > KEPT_BYTES {
                let (oldest, bytes) = self.kept.remove(0);
                self.kept_bytes -= bytes;
                self.put(far, oldest, bytes);
            }
            return true;
        }
        if far.discard(address, bytes).is_ok() {
            self.free.put(address, reserved);
        }
        true
    }

    /// Makes pages that lie in one block local until it is freed.
    pub(crate) fn make_local(&mut self, far: &dyn Far, address: usize, bytes: usize) -> Result<(), i32> {
        let (start, block) = self.blocks.range_mut(..=address).next_back().ok_or(libc::EINVAL)?;
        if address + bytes > start + block.bytes {
            return Err(libc::EINVAL);
        }
        block.local = true;
        SPACE.with(|space| space.make_block_local(far, address, bytes))
    }

    /// Changes the size of a block, moving its contents (without touching them) if need be. Returns its address; none where they have to be copied.
    pub(crate) fn resize(&mut self, far: &dyn Far, address: usize, bytes: usize) -> Option<usize> {
        let block = *self.blocks.get(&address)?;
        let wanted = round_up(bytes, PAGE_BYTES)?;
        if wanted <= block.bytes {
            // A little less is not worth a call.
            if block.bytes - wanted > block.bytes / 8 && !block.local {
                if far.discard(address + wanted, block.bytes - wanted).is_err() {
                    return Some(address);
                }
                self.free.put(address + wanted, block.reserved - wanted);
                self.blocks.insert(address, Block { bytes: wanted, reserved: wanted, ..block });
            }
            return Some(address);
        }
        if wanted <= block.reserved {
            self.blocks.insert(address, Block { bytes: wanted, ..block });
            return Some(address);
        }
        if self.free.take_at(address + block.reserved, wanted - block.reserved) {
            self.blocks.insert(address, Block { bytes: wanted, reserved: wanted, ..block });
            return Some(address);
        }
        if block.local {
            return None;
        }
        // Whoever grows will grow again: set addresses aside, they cost nothing.
        let Fresh { address: new, .. } = self.allocate(far, wanted, wanted.checked_mul(2)?, PAGE_BYTES)?;
        if far.relocate(address, new, block.bytes).is_err() {
            self.free(far, new);
            return None;
        }
        self.blocks.remove(&address);
        // Relocated pages are gone from the old place: it reads zero.
        self.free.put(address, block.reserved);
        Some(new)
    }
}
