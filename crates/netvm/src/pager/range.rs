//! Far memory at addresses that the pager chooses.

use super::Pager;
use super::error::{PagerError, system};
use super::shards::STRIPE_BYTES;
use crate::error::Result;
use netvm_core::ranges::FreeRanges;
use netvm_sys::fork::Process;
use netvm_sys::shared::SharedSlice;
use netvm_sys::uffd::PAGE_BYTES;
use std::sync::{Arc, Mutex, PoisonError};

/// Addresses of the area that nobody has, once somebody has asked for some.
#[derive(Debug, Default)]
pub(super) struct Addresses(Mutex<Option<FreeRanges>>);

impl Addresses {
    fn with<R>(&self, pager: &Pager, run: impl FnOnce(&mut FreeRanges) -> R) -> R {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        run(free.get_or_insert_with(|| {
            let mut free = FreeRanges::new();
            free.put(pager.area.start, pager.area.len());
            free
        }))
    }
}

/// Whose far memory what is made now is.
pub(crate) fn this_process() -> Result<Process> {
    Process::this().map_err(|e| system("map a page that a fork wipes", e))
}

/// Far memory of its own, until it is dropped.
#[derive(Debug)]
pub struct FarRange {
    pager: Arc<Pager>,
    /// Far memory is not inherited: a child of a fork has nothing to give back.
    process: Process,
    address: usize,
    bytes: usize,
}

impl Pager {
    /// `bytes` of zero far memory, rounded up to whole pages, at addresses that nobody else has: for programs that call neither
    /// [`Pager::map`] nor [`Pager::unmap`] on addresses of their own choice.
    ///
    /// # Errors
    /// [`PagerError::AreaFull`] when no addresses are left; as [`Pager::map`].
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<FarRange> {
        let process = this_process()?;
        let (address, bytes) = self.take_range(bytes, PAGE_BYTES)?;
        Ok(FarRange { pager: Arc::clone(self), process, address, bytes })
    }

    /// Whether all of a range is of what [`Pager::allocate`] gave.
    ///
    /// # Errors
    /// [`PagerError::OutsideFarMemory`].
    pub fn check_allocated(&self, address: usize, bytes: usize) -> Result<()> {
        self.memory(address, bytes)?;
        // In the area, so this is no overflow.
        match self.addresses.with(self, |free| free.has_any(address, address + bytes)) {
            true => Err(PagerError::OutsideFarMemory { address, bytes }.into()),
            false => Ok(()),
        }
    }

    /// Zero far memory at a multiple of `alignment`, a power of two: its address, and its bytes in whole pages.
    pub(crate) fn take_range(&self, bytes: usize, alignment: usize) -> Result<(usize, usize)> {
        let full = || PagerError::AreaFull { bytes, area_bytes: self.area.len() };
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES).filter(|bytes| *bytes > 0).ok_or_else(full)?;
        let take = |free: &mut FreeRanges| free.take(bytes, alignment.max(PAGE_BYTES));
        let address = self.addresses.with(self, take).ok_or_else(full)?;
        self.map_taken(address, bytes)
    }

    /// The same where pages of `like`, a multiple of `alignment`, can be moved to: each to an address of its own shard.
    pub(crate) fn take_range_like(
        &self,
        bytes: usize,
        alignment: usize,
        like: usize,
    ) -> Result<(usize, usize)> {
        if self.stripes.shards == 1 || alignment > STRIPE_BYTES {
            return self.take_range(bytes, alignment);
        }
        let full = || PagerError::AreaFull { bytes, area_bytes: self.area.len() };
        let cycle = self.stripes.cycle();
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES).filter(|bytes| *bytes > 0).ok_or_else(full)?;
        let wide = bytes.checked_add(cycle).ok_or_else(full)?;
        let take = |free: &mut FreeRanges| {
            let start = free.take(wide, PAGE_BYTES)?;
            let before = (like % cycle + cycle - start % cycle) % cycle;
            for (at, left) in [(start, before), (start + before + bytes, cycle - before)] {
                if left > 0 {
                    free.put(at, left);
                }
            }
            Some(start + before)
        };
        match self.addresses.with(self, take) {
            Some(address) => self.map_taken(address, bytes),
            None => self.take_range(bytes, alignment),
        }
    }

    fn map_taken(&self, address: usize, bytes: usize) -> Result<(usize, usize)> {
        match self.map(address, bytes, libc::PROT_READ | libc::PROT_WRITE) {
            Ok(()) => Ok((address, bytes)),
            Err(error) => {
                self.give_range(address, bytes);
                Err(error)
            }
        }
    }

    /// Whole pages of what [`Pager::take_range`] gave are not needed any more.
    pub(crate) fn give_range(&self, address: usize, bytes: usize) {
        // Addresses that cannot be unmapped are never used again.
        if self.unmap(address, bytes).is_ok() {
            self.addresses.with(self, |free| free.put(address, bytes));
        }
    }
}

impl FarRange {
    pub(crate) fn pager(&self) -> &Arc<Pager> {
        &self.pager
    }

    /// Its bytes.
    pub fn shared(&self) -> SharedSlice {
        // In the area: taken from there.
        self.pager.memory(self.address, self.bytes).unwrap_or(SharedSlice::EMPTY)
    }
}

impl Drop for FarRange {
    fn drop(&mut self) {
        if self.process.is_this() {
            self.pager.give_range(self.address, self.bytes);
        }
    }
}
