//! Where far memory comes from: the pager, or for tests of the interposition plain local memory.

use crate::sys;
use std::ops::Range;

/// What this library needs of far memory. Errors are errno values.
///
/// Ranges are whole pages inside [`Far::area`]. None of these calls may allocate far memory or call back.
pub(crate) trait Far: Send + Sync {
    /// Addresses reserved for far memory.
    fn area(&self) -> Range<usize>;
    /// Fresh, zero far memory in place of whatever is there.
    fn map(&self, address: usize, bytes: usize, protection: i32) -> Result<(), i32>;
    /// Back to the reservation.
    fn unmap(&self, address: usize, bytes: usize) -> Result<(), i32>;
    /// Mapped pages read zero from now on.
    fn discard(&self, address: usize, bytes: usize) -> Result<(), i32>;
    /// Moves contents; both ranges are mapped and do not overlap; `old` reads zero afterwards.
    fn relocate(&self, old: usize, new: usize, bytes: usize) -> Result<(), i32>;
    /// mprotect.
    fn protect(&self, address: usize, bytes: usize, protection: i32) -> Result<(), i32>;
    /// A hint that the range will be used.
    fn will_need(&self, address: usize, bytes: usize);
    /// The process is about to end: leave the counters where the supervisor finds them.
    fn finish(&self);
    /// pthread_atfork, prepare.
    fn fork_prepare(&self);
    /// pthread_atfork, parent.
    fn fork_parent(&self);
    /// pthread_atfork, child.
    fn fork_child(&self);
}

/// "Far" memory that is local: for tests, where userfaultfd may be missing.
pub(crate) struct LocalArea {
    area: Range<usize>,
}

impl LocalArea {
    pub(crate) fn new(bytes: usize) -> Result<Self, i32> {
        // SAFETY: a new reservation at an address of the kernel's choice.
        let start = unsafe { sys::reserve(0, bytes) }?;
        Ok(Self { area: start..start + bytes })
    }

    fn check(&self, address: usize, bytes: usize) -> Result<(), i32> {
        let whole_pages = (address | bytes).is_multiple_of(sys::PAGE_BYTES);
        let inside =
            address >= self.area.start && address.checked_add(bytes).is_some_and(|end| end <= self.area.end);
        if whole_pages && inside && bytes > 0 { Ok(()) } else { Err(libc::EINVAL) }
    }
}

impl Far for LocalArea {
    fn area(&self) -> Range<usize> {
        self.area.clone()
    }

    fn map(&self, address: usize, bytes: usize, protection: i32) -> Result<(), i32> {
        self.check(address, bytes)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: inside our reservation (checked).
        unsafe { sys::mmap(address, bytes, protection, flags, -1, 0) }.map(drop)
    }

    fn unmap(&self, address: usize, bytes: usize) -> Result<(), i32> {
        self.check(address, bytes)?;
        // SAFETY: inside our reservation (checked).
        unsafe { sys::reserve(address, bytes) }.map(drop)
    }

    fn discard(&self, address: usize, bytes: usize) -> Result<(), i32> {
        self.check(address, bytes)?;
        // SAFETY: inside our reservation (checked).
        unsafe { sys::madvise(address, bytes, libc::MADV_DONTNEED) }
    }

    fn relocate(&self, old: usize, new: usize, bytes: usize) -> Result<(), i32> {
        self.check(old, bytes)?;
        self.check(new, bytes)?;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        // SAFETY: both inside our reservation (checked).
        unsafe { sys::mremap(old, bytes, bytes, flags, new) }.map(drop)
    }

    fn protect(&self, address: usize, bytes: usize, protection: i32) -> Result<(), i32> {
        self.check(address, bytes)?;
        // SAFETY: inside our reservation (checked).
        unsafe { sys::mprotect(address, bytes, protection) }
    }

    fn will_need(&self, _: usize, _: usize) {}
    fn finish(&self) {}
    fn fork_prepare(&self) {}
    fn fork_parent(&self) {}
    fn fork_child(&self) {}
}
