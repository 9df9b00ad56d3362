//! Where far memory comes from: the pager, or for tests of the interposition plain local memory.

use crate::tls::words;
use crate::{privileges, small, sys};
use netvm::Error;
use netvm::pager::{Access, BlockAt, Pager, PagerConfig, PagerError};
use netvm::runfile::RunFile;
use netvm_sys::cpu::Hold;
use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

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
    /// Plain local memory in place of far memory, with its contents, for good.
    fn make_local(&self, address: usize, bytes: usize, protection: i32) -> Result<(), i32>;
    /// A hint that the range will be used.
    fn will_need(&self, address: usize, bytes: usize);
    /// A hint that these ranges, addresses and bytes, will be used in this order.
    fn will_need_each(&self, places: &mut dyn Iterator<Item = (usize, usize)>);
    /// How the range is going to be used; a hint.
    fn advise(&self, address: usize, bytes: usize, access: Access);
    /// A hint that the range is not needed for now.
    fn page_out(&self, address: usize, bytes: usize);
    /// The thread that is held on a CPU while it faults.
    fn hold(&self) -> Option<&Hold>;
    /// The process is about to end: leave the counters where the supervisor finds them.
    fn finish(&self);
    /// pthread_atfork, prepare, with all signals blocked and about this stack pointer. The pages at `also` are used before the fork is over.
    fn fork_prepare(&self, stack_pointer: usize, also: Vec<usize>);
    /// pthread_atfork, parent.
    fn fork_parent(&self);
    /// pthread_atfork, child. An error says why it has no far memory.
    fn fork_child(&self) -> Result<(), String>;
    /// In a child: privileges are about to be given up. An error says why it has what it had.
    fn forget_inherited(&self) -> Result<(), String>;
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

    fn make_local(&self, address: usize, bytes: usize, _: i32) -> Result<(), i32> {
        self.check(address, bytes)
    }

    fn will_need(&self, _: usize, _: usize) {}

    fn will_need_each(&self, _: &mut dyn Iterator<Item = (usize, usize)>) {}
    fn advise(&self, _: usize, _: usize, _: Access) {}
    fn page_out(&self, _: usize, _: usize) {}
    fn hold(&self) -> Option<&Hold> {
        None
    }
    fn finish(&self) {}
    fn fork_prepare(&self, _: usize, _: Vec<usize>) {}
    fn fork_parent(&self) {}
    fn fork_child(&self) -> Result<(), String> {
        Ok(())
    }
    fn forget_inherited(&self) -> Result<(), String> {
        Ok(())
    }
}

/// Far memory of the pager.
pub(crate) struct PagerFar {
    pager: Arc<Pager>,
}

impl PagerFar {
    /// Starts the pager of this process as `run` says.
    pub(crate) fn start(run: &Arc<RunFile>) -> Result<Self, String> {
        let params = run.params();
        let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
        let config = PagerConfig {
            local_bytes: params.budget_bytes,
            lenders: params.lenders,
            replicas: params.replicas.max(1) as usize,
            erasure: params.erasure,
            security: params.security,
            encrypt_pages: params.encrypt_pages,
            area_bytes: params.area_bytes,
            private_lender: (params.private_lender != 0).then_some(params.private_lender),
            tier: params.tier,
            fault_path: params.fault_path,
            page_bytes: usize::try_from(params.page_bytes).unwrap_or(0),
            learn: (!params.learn.is_empty() && run.claim_record()).then(|| params.learn.into()),
            block_at: Some(BlockAt(Arc::new(small::block_at))),
            run: Some(Arc::clone(run)),
            name: name.trim_end().to_owned(),
            // Nothing that the pager's thread allocates may be far memory.
            thread_hook: Some(|| {
                words().internal.set(1);
                privileges::put_aside();
            }),
            ..PagerConfig::default()
        };
        Pager::start(config).map(|pager| Self { pager }).map_err(|error| error.to_string())
    }
}

fn errno(result: Result<(), Error>) -> Result<(), i32> {
    result.map_err(|error| match error {
        Error::System { errno, .. } => errno.0,
        Error::Pager(PagerError::OutsideFarMemory { .. }) => libc::EINVAL,
        Error::Pager(PagerError::PagePinned { .. }) => libc::EBUSY,
        _ => libc::ENOMEM,
    })
}

impl Far for PagerFar {
    fn area(&self) -> Range<usize> {
        self.pager.area()
    }

    fn map(&self, address: usize, bytes: usize, protection: i32) -> Result<(), i32> {
        errno(self.pager.map(address, bytes, protection))
    }

    fn unmap(&self, address: usize, bytes: usize) -> Result<(), i32> {
        errno(self.pager.unmap(address, bytes))
    }

    fn discard(&self, address: usize, bytes: usize) -> Result<(), i32> {
        errno(self.pager.discard(address, bytes))
    }

    fn relocate(&self, old: usize, new: usize, bytes: usize) -> Result<(), i32> {
        errno(self.pager.relocate(old, new, bytes))
    }

    fn protect(&self, address: usize, bytes: usize, protection: i32) -> Result<(), i32> {
        errno(self.pager.protect(address, bytes, protection))
    }

    fn make_local(&self, address: usize, bytes: usize, protection: i32) -> Result<(), i32> {
        errno(self.pager.make_local(address, bytes, protection))
    }

    fn will_need(&self, address: usize, bytes: usize) {
        self.pager.will_need(address, bytes);
    }

    fn will_need_each(&self, places: &mut dyn Iterator<Item = (usize, usize)>) {
        self.pager.will_need_each(places);
    }

    fn advise(&self, address: usize, bytes: usize, access: Access) {
        self.pager.advise(address, bytes, access);
    }

    fn page_out(&self, address: usize, bytes: usize) {
        self.pager.page_out(address, bytes);
    }

    fn hold(&self) -> Option<&Hold> {
        Some(self.pager.hold())
    }

    fn finish(&self) {
        if let Err(error) = self.pager.keep_record() {
            let _ = writeln!(std::io::stderr(), "netvm: {error}");
        }
        // Asking makes the pager publish its counters in the run file.
        self.pager.stats();
    }

    fn fork_prepare(&self, stack_pointer: usize, also: Vec<usize>) {
        self.pager.fork_prepare(stack_pointer, also);
    }

    fn fork_parent(&self) {
        self.pager.fork_parent();
    }

    fn fork_child(&self) -> Result<(), String> {
        self.pager.fork_child().map_err(|error| error.to_string())
    }

    fn forget_inherited(&self) -> Result<(), String> {
        self.pager.forget_inherited().map_err(|error| error.to_string())
    }
}
