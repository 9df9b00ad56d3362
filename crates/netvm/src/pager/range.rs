//! Far memory at addresses that the pager chooses.

use super::Pager;
use super::error::PagerError;
use crate::error::Result;
use netvm_core::ranges::FreeRanges;
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

/// Far memory of its own, until it is dropped.
#[derive(Debug)]
pub struct FarRange {
    pager: Arc<Pager>,
    /// Far memory is not inherited: a child of a fork has nothing to give back.
    process: u32,
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
        let full = || PagerError::AreaFull { bytes, area_bytes: self.area.len() };
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES).filter(|bytes| *bytes > 0).ok_or_else(full)?;
        let address = self.addresses.with(self, |free| free.take(bytes, PAGE_BYTES)).ok_or_else(full)?;
        // Given back also when it cannot be mapped.
        let range = FarRange { pager: Arc::clone(self), process: std::process::id(), address, bytes };
        self.map(address, bytes, libc::PROT_READ | libc::PROT_WRITE)?;
        Ok(range)
    }
}

impl FarRange {
    /// Its bytes.
    pub fn shared(&self) -> SharedSlice {
        // In the area: taken from there.
        self.pager.memory(self.address, self.bytes).unwrap_or(SharedSlice::EMPTY)
    }
}

impl Drop for FarRange {
    fn drop(&mut self) {
        // Addresses that cannot be unmapped are never used again.
        if self.process == std::process::id() && self.pager.unmap(self.address, self.bytes).is_ok() {
            self.pager.addresses.with(&self.pager, |free| free.put(self.address, self.bytes));
        }
    }
}
