//! The far area and the frame pool: the two ranges between which the pager moves pages.
//!
//! Both are private anonymous memory registered with one userfaultfd. A page of the far area that the program may touch
//! at once is *installed*; all other pages are missing, and touching one stops the thread until the pager installs it.
//! A frame of the pool is either *full* (it has memory) or *empty*; installing page from frame empties the frame, extracting does
//! the reverse, so that the number of full frames plus installed pages changes only by [`PagedArea::fill_frames`],
//! [`PagedArea::drop_frames`], [`PagedArea::drop_pages`], and [`PagedArea::install_fresh`], before which as many frames are dropped. That is
//! what makes the local budget exact.
//!
//! Only the pager's thread touches frames, and only full ones: its own fault on an empty frame would be one that nobody serves.
//! The caller keeps track of which are full; the methods check ranges, not that.

use crate::local::LocalCopy;
use crate::raw;
use crate::together::Together;
use crate::uffd::{
    FEATURE_EXACT_ADDRESS, FEATURE_MOVE, FEATURE_PAGEFAULT_FLAG_WP, FEATURE_POISON, FEATURE_SIGBUS,
    FEATURE_THREAD_ID, Fault, PAGE_BYTES, Userfault,
};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

pub use crate::together::TOGETHER_MAX;
pub use addresses::Addresses;
use addresses::{Reservation, map};
pub use extract::ExtractError;
use extract::Pagemap;

mod addresses;
mod extract;
mod frames;

const FAULTER_FEATURES: u64 = FEATURE_MOVE | FEATURE_POISON | FEATURE_PAGEFAULT_FLAG_WP | FEATURE_SIGBUS;
const FEATURES: u64 =
    FEATURE_EXACT_ADDRESS | FEATURE_MOVE | FEATURE_POISON | FEATURE_PAGEFAULT_FLAG_WP | FEATURE_THREAD_ID;

/// How pages travel between the far area and the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameDesign {
    /// UFFDIO_MOVE both ways: no copy, no allocation (Linux 6.8).
    Move,
    /// UFFDIO_COPY in; write-protect, copy and MADV_DONTNEED out.
    Copy,
}

/// Who is told of a fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Told {
    /// Whoever reads the descriptor. The thread that faulted sleeps meanwhile.
    #[default]
    Reader,
    /// The thread that faulted, by SIGBUS; nothing is to be read, nobody sleeps, and there is no doorbell. System calls that meet a
    /// missing page fail.
    Faulter,
}

/// What threads without the [`PagedArea`] may do for whoever has it, who says when.
#[derive(Clone, Debug)]
pub struct Helper {
    uffd: Arc<Userfault>,
    area: Arc<Reservation>,
    together: Option<Arc<Together>>,
}

impl Helper {
    /// As [`PagedArea::install_contents`], of the same pager.
    ///
    /// # Errors
    /// As there.
    pub fn install(&self, address: usize, contents: &[u8], protect: bool) -> (usize, io::Result<()>) {
        assert!(!protect || self.together.is_some(), "nobody serves writes to protected pages");
        copy_in(&self.uffd, &self.area, address, contents, protect)
    }

    /// As [`PagedArea::drop_together`], of the same pager.
    ///
    /// # Errors
    /// As there.
    pub fn drop_together(&self, pages: &[usize], left: &mut [bool; TOGETHER_MAX]) -> io::Result<usize> {
        extract::drop_together(self.together.as_deref(), &self.area, pages, left)
    }
}

/// Pages with these contents at missing addresses. Returns how many, and why no more.
fn copy_in(
    uffd: &Userfault,
    area: &Reservation,
    address: usize,
    contents: &[u8],
    protect: bool,
) -> (usize, io::Result<()>) {
    let (mut copied, mut together) = (0, contents.len());
    while copied < contents.len() {
        let (to, left) = (address + copied, &contents[copied..contents.len().min(copied + together)]);
        if let Err(error) = area.check(to, left.len()) {
            return (copied / PAGE_BYTES, Err(error));
        }
        // SAFETY: the destination is ours (checked), and the source is there to be read.
        let (done, result) = unsafe {
            match protect {
                true => uffd.copy_protected(to, left.as_ptr() as usize, left.len()),
                false => uffd.copy(to, left.as_ptr() as usize, left.len(), true),
            }
        };
        copied += done;
        match result {
            Ok(()) => {}
            // The kernel may find the process changing its mappings at any time.
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
            // They may belong to two mappings.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) && left.len() > PAGE_BYTES => {
                together = PAGE_BYTES;
            }
            Err(error) => return (copied / PAGE_BYTES, Err(error)),
        }
    }
    (copied / PAGE_BYTES, Ok(()))
}

/// Undoes what mlockall(MCL_FUTURE) does with a new mapping: that asks for nothing in particular. No page leaves locked memory by a copy, or moves
/// between memory that is locked and memory that is not.
///
/// # Safety
/// The range has just been mapped, by us.
unsafe fn unlock(address: usize, bytes: usize) {
    // SAFETY: the caller's promise: nobody has locked this for a reason. The kernel refuses it to nobody.
    let _ = unsafe { raw::munlock(address, bytes) };
}

/// See the module's text.
#[derive(Debug)]
pub struct PagedArea {
    uffd: Arc<Userfault>,
    told: Told,
    area: Arc<Reservation>,
    pool: Reservation,
    /// One page behind the pool: a thread that reads it wakes the pager.
    doorbell: Reservation,
    design: FrameDesign,
    /// Whether pages may be write-protected: the kernel tells who writes to one apart from who finds none, and takes them together.
    may_protect: bool,
    /// Where pages can be installed write-protected and leave together.
    together: Option<Arc<Together>>,
    /// Of /proc, where the kernel lets us.
    memory: Option<File>,
    pagemap: Option<Pagemap>,
}

impl PagedArea {
    /// Reserves `area_bytes` of addresses and a pool of `frames` frames, all empty.
    ///
    /// # Errors
    /// EPERM when userfaultfd may not be used, ENOMEM when the addresses cannot be had (RLIMIT_AS, overcommit).
    pub fn new(area_bytes: usize, frames: usize, design: Option<FrameDesign>) -> io::Result<Self> {
        Self::telling(Told::Reader, &Addresses::reserve(area_bytes)?, frames, design)
    }

    /// Who is told of faults.
    pub fn told(&self) -> Told {
        self.told
    }

    /// The same at addresses that are reserved, for faults that somebody else is told of.
    ///
    /// # Errors
    /// As [`PagedArea::new`]; Unsupported when the thread that faults is to be told and the kernel cannot do that, or move pages: then who
    /// faults cannot tell a missing page from a protected one.
    pub fn telling(
        told: Told,
        area: &Addresses,
        frames: usize,
        design: Option<FrameDesign>,
    ) -> io::Result<Self> {
        let uffd = match told {
            Told::Reader => Userfault::open(FEATURES)?,
            Told::Faulter => Userfault::open(FAULTER_FEATURES)?,
        };
        let uffd = Arc::new(uffd);
        const FAULTER: u64 = FEATURE_MOVE | FEATURE_SIGBUS;
        let can_tell = uffd.features() & FAULTER == FAULTER && design != Some(FrameDesign::Copy);
        if told == Told::Faulter && !can_tell {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "faults in their own threads need Linux 6.8, and pages that are moved",
            ));
        }
        let design = match design {
            None if uffd.features() & FEATURE_MOVE != 0 => FrameDesign::Move,
            None => FrameDesign::Copy,
            Some(FrameDesign::Move) if uffd.features() & FEATURE_MOVE == 0 => {
                return Err(io::Error::new(io::ErrorKind::Unsupported, "UFFDIO_MOVE needs Linux 6.8"));
            }
            Some(design) => design,
        };
        let area = Arc::clone(&area.0);
        let pool = Reservation::guarded(frames * PAGE_BYTES)?;
        let doorbell = Reservation::guarded(PAGE_BYTES)?;
        let tells_writes = uffd.features() & FEATURE_PAGEFAULT_FLAG_WP != 0;
        let (may_protect, together, memory, pagemap) = (false, None, None, None);
        let mut paged =
            Self { uffd, told, area, pool, doorbell, design, may_protect, together, memory, pagemap };
        paged.mark_reserved(paged.area.start, paged.area.bytes)?;
        paged.set_up_pool(false)?;
        paged.may_protect =
            design == FrameDesign::Move && tells_writes && Together::new(paged.doorbell.start).is_some();
        Ok(paged)
    }

    /// `has_pool`: what is in the pool stays.
    fn set_up_pool(&mut self, has_pool: bool) -> io::Result<()> {
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        let pool = (&self.pool, has_pool, self.design == FrameDesign::Move);
        for (range, is_there, register) in [pool, (&self.doorbell, false, true)] {
            // SAFETY: both ranges are reservations that this struct owns; nothing in them is referenced.
            unsafe {
                if !is_there {
                    map(range.start, range.bytes, writable, libc::MAP_FIXED)?;
                    raw::madvise(range.start, range.bytes, libc::MADV_NOHUGEPAGE).or_else(no_thp)?;
                    unlock(range.start, range.bytes);
                }
                raw::madvise(range.start, range.bytes, libc::MADV_DONTFORK)?;
                if register {
                    self.uffd.register(range.start, range.bytes, false)?;
                }
            }
        }
        Ok(())
    }

    /// Whether pages can be installed write-protected ([`PagedArea::install_fresh`]) and leave together ([`PagedArea::extract_together`],
    /// [`PagedArea::drop_together`]). Not before [`PagedArea::open_memory`].
    pub fn takes_together(&self) -> bool {
        self.together.is_some()
    }

    fn protects(&self) -> bool {
        self.design == FrameDesign::Copy || self.may_protect
    }

    /// Opens what belongs into the pager thread's own descriptor table. Before any frame is filled.
    ///
    /// # Errors
    /// When /proc is not mounted, or the kernel does not let a process read it that has made itself undumpable, and faults are told to who has
    /// them. Else pages stay installed that the program may not read and only a copy could take from it.
    pub fn open_memory(&mut self) -> io::Result<()> {
        if self.may_protect {
            self.together = Together::new(self.doorbell.start).map(Arc::new);
        }
        self.pagemap = Pagemap::open().ok();
        match File::open("/proc/thread-self/mem") {
            Ok(memory) => self.memory = Some(memory),
            Err(_) if self.told == Told::Reader => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// For [`PagedArea::adopt_after_fork`].
    ///
    /// # Errors
    /// EPERM when userfaultfd may not be used (any more).
    pub fn userfault() -> io::Result<Userfault> {
        Userfault::open(FEATURES)
    }

    /// After fork(2), in a child that cannot have its parent's far memory: no address of those inherited `ranges` means anything, or becomes
    /// anything else. Nor has it the frames, if it inherited them (`has_frames`).
    ///
    /// # Errors
    /// EINVAL outside the area, ENOMEM.
    pub fn give_up_after_fork(
        &self,
        ranges: impl Iterator<Item = (usize, usize)>,
        has_frames: bool,
    ) -> io::Result<()> {
        if has_frames {
            // SAFETY: the pool is ours, and this process uses no frame any more.
            unsafe { map(self.pool.start, self.pool.bytes, libc::PROT_NONE, libc::MAP_FIXED) }?;
        }
        for (address, bytes) in ranges {
            self.area.check(address, bytes)?;
            // SAFETY: in our area (checked); whoever touches what was there must not find the child's copies of some of its pages.
            unsafe { map(address, bytes, libc::PROT_NONE, libc::MAP_FIXED) }?;
        }
        Ok(())
    }

    /// After fork(2), in the child: a new userfaultfd (of [`PagedArea::userfault`]) for the inherited `ranges` of the far area. No page is
    /// protected there. The pool is new and empty, or, if `has_frames`, what the parent had when it called [`PagedArea::share_frames`]: who has
    /// no use for a full frame drops it.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn adopt_after_fork(
        &mut self,
        new: Userfault,
        ranges: impl Iterator<Item = (usize, usize)>,
        has_frames: bool,
    ) -> io::Result<()> {
        // The inherited numbers name the parent's files only in the parent's descriptor table, never here.
        std::mem::forget(std::mem::replace(&mut self.uffd, Arc::new(new)));
        std::mem::forget(self.memory.take());
        std::mem::forget(self.pagemap.take());
        std::mem::forget(self.together.take());
        self.set_up_pool(has_frames)?;
        for (address, bytes) in ranges {
            self.area.check(address, bytes)?;
            // SAFETY: the range is inside our area (checked), and this pager serves its faults.
            unsafe { self.uffd.register(address, bytes, self.protects())? };
        }
        Ok(())
    }

    /// The design in use.
    pub fn design(&self) -> FrameDesign {
        self.design
    }

    /// Addresses of the far area.
    pub fn area(&self) -> Range<usize> {
        self.area.start..self.area.start + self.area.bytes
    }

    /// The page whose missing fault is a call from another thread. It must not be rung once the area is gone.
    pub fn bell(&self) -> Bell {
        Bell { address: self.doorbell.start }
    }

    /// Capacity of the pool.
    pub fn frames(&self) -> usize {
        self.pool.bytes / PAGE_BYTES
    }

    /// Descriptor to wait on for faults.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.uffd.as_fd()
    }

    /// All descriptors that it uses.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> + '_ {
        let pagemap = self.pagemap.as_ref().map(Pagemap::descriptor);
        let together = self.together.as_ref().and_then(|together| together.descriptor());
        let memory = self.memory.as_ref().map(AsRawFd::as_raw_fd);
        [Some(self.as_fd().as_raw_fd()), pagemap, together, memory].into_iter().flatten()
    }

    /// See [`Userfault::read_faults`].
    ///
    /// # Errors
    /// Any error of read(2) but EAGAIN.
    pub fn read_faults(&self, out: &mut [Fault]) -> io::Result<usize> {
        self.uffd.read_faults(out)
    }

    /// Lets whoever rang the bell go on.
    ///
    /// # Errors
    /// Never in practice; EEXIST is success.
    pub fn answer_bell(&self) -> io::Result<()> {
        // SAFETY: the doorbell page is ours and holds nothing.
        match unsafe { self.uffd.zero(self.doorbell.start, PAGE_BYTES) } {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                self.uffd.wake(self.doorbell.start, PAGE_BYTES)
            }
            result => result,
        }
    }

    /// Makes a range of the area fresh far memory: every page missing.
    ///
    /// # Errors
    /// EINVAL outside the area, ENOMEM.
    pub fn map_range(&self, address: usize, bytes: usize, protection: i32) -> io::Result<()> {
        self.place_range(address, bytes, protection)?;
        self.serve_range(address, bytes)
    }

    /// Puts memory without pages in place of whatever is there. Nobody serves it before [`PagedArea::serve_range`].
    ///
    /// # Errors
    /// EINVAL outside the area, ENOMEM: nothing has changed.
    pub fn place_range(&self, address: usize, bytes: usize, protection: i32) -> io::Result<()> {
        self.area.check(address, bytes)?;
        // SAFETY: the range is inside our area (checked); whoever asked gives up what was there.
        unsafe { map(address, bytes, protection, libc::MAP_FIXED) }.map(drop)
    }

    /// Makes a range that was just placed far memory.
    ///
    /// # Errors
    /// EINVAL outside the area; else never in practice.
    pub fn serve_range(&self, address: usize, bytes: usize) -> io::Result<()> {
        self.area.check(address, bytes)?;
        // SAFETY: the range is inside our area (checked); the advice changes no contents, and this pager serves its faults.
        unsafe {
            raw::madvise(address, bytes, libc::MADV_NOHUGEPAGE).or_else(no_thp)?;
            raw::madvise(address, bytes, libc::MADV_DONTFORK)?;
            unlock(address, bytes);
            self.uffd.register(address, bytes, self.protects())
        }
    }

    /// Returns a range of the area to the reservation.
    ///
    /// # Errors
    /// EINVAL outside the area, ENOMEM: nothing has changed.
    pub fn unmap_range(&self, address: usize, bytes: usize) -> io::Result<()> {
        self.place_range(address, bytes, libc::PROT_NONE)?;
        // Without the mark it is a reservation, too.
        let _ = self.mark_reserved(address, bytes);
        Ok(())
    }

    /// Tells the reservation apart from memory that is placed beside it: the kernel would take the two for one mapping, and might have no room
    /// to part them again.
    fn mark_reserved(&self, address: usize, bytes: usize) -> io::Result<()> {
        // SAFETY: the callers' range is inside our area, and the advice changes no contents.
        unsafe { raw::madvise(address, bytes, libc::MADV_DONTDUMP) }
    }

    /// Puts plain local memory in place of a range of the area, whose pages are all missing. Who waits for one finds it there.
    ///
    /// # Errors
    /// EINVAL outside the area; as mremap(2). With the copy: nothing has changed.
    pub fn replace_range(
        &self,
        address: usize,
        copy: LocalCopy,
        protection: i32,
    ) -> Result<(), (LocalCopy, io::Error)> {
        if let Err(error) = self.area.check(address, copy.bytes()) {
            return Err((copy, error));
        }
        // SAFETY: the range is inside our area (checked); whoever asked gives up what was there.
        unsafe { copy.take_the_place_of(address, protection) }
    }

    /// Wakes who waits for pages of a range: what they wait for may not come any more. They look again.
    ///
    /// # Errors
    /// EINVAL outside the area.
    pub fn wake(&self, address: usize, bytes: usize) -> io::Result<()> {
        self.area.check(address, bytes)?;
        self.uffd.wake(address, bytes)
    }

    /// mprotect on a range of the area.
    ///
    /// # Errors
    /// As mprotect(2); EINVAL outside the area.
    pub fn protect_range(&self, address: usize, bytes: usize, protection: i32) -> io::Result<()> {
        self.area.check(address, bytes)?;
        // SAFETY: the range is inside our area (checked); protections are the program's own business.
        unsafe { raw::mprotect(address, bytes, protection) }
    }

    /// Whether a fork inherits far memory of a range. Only a fork that the pager takes part in may. What else is in the area is not our
    /// business.
    ///
    /// # Errors
    /// As madvise(2); EINVAL outside the area.
    pub fn set_fork(&self, address: usize, bytes: usize, inherit: bool) -> io::Result<()> {
        self.area.check(address, bytes)?;
        let advice = if inherit { libc::MADV_DOFORK } else { libc::MADV_DONTFORK };
        // SAFETY: inside our area (checked); the advice changes what a child inherits, not contents.
        unsafe { raw::madvise(address, bytes, advice) }
    }

    /// Drops installed pages of a range: all of it is missing afterwards.
    ///
    /// # Errors
    /// EINVAL outside the area.
    pub fn drop_pages(&self, address: usize, bytes: usize) -> io::Result<()> {
        self.area.check(address, bytes)?;
        // SAFETY: the range is inside our area (checked); the caller gave up its contents.
        unsafe { raw::drop_memory(address, bytes) }
    }

    /// Installs full frames at missing pages and wakes who waits for them. The frames are empty afterwards.
    ///
    /// Returns how many pages were installed with the frames' memory, and how many by a copy (their frames stay full).
    ///
    /// # Errors
    /// EEXIST when a page is there already; ENOENT when the range was unmapped meanwhile.
    pub fn install(&mut self, address: usize, frame: usize, pages: usize) -> io::Result<Installed> {
        let bytes = pages * PAGE_BYTES;
        self.area.check(address, bytes)?;
        let from = self.frame_address(frame, pages);
        let mut done = 0;
        let mut copied = 0;
        let mut together = bytes;
        let mut is_own = false;
        while done < bytes {
            let left = together.min(bytes - done);
            let transfer = match self.design {
                FrameDesign::Move => Userfault::move_pages,
                FrameDesign::Copy => Userfault::copy,
            };
            // SAFETY: both ranges are ours (checked), and no reference into the pool is alive (`&mut self`).
            let (step, result) = unsafe { transfer(&self.uffd, address + done, from + done, left, true) };
            done += step;
            if let Err(error) = result {
                match error.raw_os_error() {
                    Some(libc::EAGAIN) => {}
                    // A fork shares them, or did.
                    Some(libc::EBUSY) if !is_own => {
                        self.own_frames(frame + done / PAGE_BYTES, (bytes - done) / PAGE_BYTES);
                        is_own = true;
                    }
                    Some(libc::EEXIST) => {
                        let moved =
                            self.moved_all_the_same(address + done, from + done, left - step, error)?;
                        self.uffd.wake(address + done, moved)?;
                        done += moved;
                    }
                    // They may belong to two mappings: a move says the one, a copy the other.
                    Some(libc::EINVAL | libc::ENOENT) if step == 0 && left > PAGE_BYTES => {
                        together = PAGE_BYTES * (left / PAGE_BYTES / 2);
                    }
                    // Protections differ (the program made it read-only), or the kernel has pinned the frame for somebody who reads it
                    // (process_vm_readv(2)): a copy does not mind.
                    Some(libc::EBUSY) if self.design == FrameDesign::Move && step > 0 => {}
                    Some(libc::EINVAL | libc::EBUSY) if self.design == FrameDesign::Move && step == 0 => {
                        // SAFETY: as above.
                        let (step, result) =
                            unsafe { self.uffd.copy(address + done, from + done, PAGE_BYTES, true) };
                        copied += step / PAGE_BYTES;
                        done += step;
                        retry(result)?;
                    }
                    _ => return Err(error),
                }
            }
        }
        if self.design == FrameDesign::Copy {
            self.drop_frames(frame, pages)?;
        } else if copied > 0 {
            // Mixed runs are rare; make the outcome uniform: all frames of this call are empty.
            self.drop_frames(frame, pages)?;
        }
        Ok(Installed { pages, copied })
    }

    /// Installs a copy of a full frame at a missing page, in memory of its own, and wakes who waits for it. The frame stays full, so the
    /// caller has given up as much memory before. Unlike a move it need not interrupt threads of the process on other CPUs. With `protect`, a
    /// write to the page is a fault until [`PagedArea::unprotect`].
    ///
    /// # Errors
    /// ENOMEM when the machine has none, and nothing has changed; else as [`PagedArea::install`].
    pub fn install_fresh(&mut self, address: usize, frame: usize, protect: bool) -> io::Result<()> {
        let frame = self.frame_bytes(frame);
        self.install_contents(address, frame, protect).1
    }

    /// Installs missing pages with these contents, in memory of their own: pages of the budget that were given up before. `protect`: who writes to
    /// one faults once more. Returns how many were installed, from the first on, and why no more.
    ///
    /// # Errors
    /// As [`PagedArea::install_fresh`].
    pub fn install_contents(
        &self,
        address: usize,
        contents: &[u8],
        protect: bool,
    ) -> (usize, io::Result<()>) {
        assert!(!protect || self.takes_together(), "nobody serves writes to protected pages");
        copy_in(&self.uffd, &self.area, address, contents, protect)
    }

    /// For other threads. Not before [`PagedArea::open_memory`].
    pub fn helper(&self) -> Helper {
        Helper { uffd: Arc::clone(&self.uffd), area: Arc::clone(&self.area), together: self.together.clone() }
    }

    /// A page that the pager believes installed faulted as missing: either it is there (a stale event), or the program
    /// dropped it by a system call of its own and must read zero. True: it was missing.
    ///
    /// # Errors
    /// ENOENT when the range was unmapped meanwhile.
    pub fn install_zero_if_missing(&self, address: usize) -> io::Result<bool> {
        self.area.check(address, PAGE_BYTES)?;
        // SAFETY: inside our area (checked); zero is right for a page dropped by MADV_DONTNEED.
        match unsafe { self.uffd.zero(address, PAGE_BYTES) } {
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                self.uffd.wake(address, PAGE_BYTES).map(|()| false)
            }
            result => result.map(|()| true),
        }
    }

    /// Whether the kernel can read the page now, as long as [`PagedArea::open_memory`] was called.
    pub fn is_readable(&self, address: usize) -> bool {
        let memory = self.memory.as_ref();
        memory.is_none_or(|memory| memory.read_at(&mut [0], address as u64).is_ok_and(|bytes| bytes == 1))
    }

    /// Lifts write protection, where there is any, and wakes the writer.
    ///
    /// # Errors
    /// ENOENT when the range was unmapped meanwhile.
    pub fn unprotect(&self, address: usize) -> io::Result<()> {
        self.area.check(address, PAGE_BYTES)?;
        if !self.protects() {
            return Ok(());
        }
        // SAFETY: inside our area (checked).
        unsafe { self.uffd.write_protect(address, PAGE_BYTES, false) }
    }
}

/// What [`PagedArea::install`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Installed {
    /// Pages installed in all.
    pub pages: usize,
    /// Of these, by a copy instead of a move.
    pub copied: usize,
}

fn retry(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(()),
        result => result,
    }
}

/// Kernels without transparent hugepages refuse the advice, and need none.
fn no_thp(error: io::Error) -> io::Result<()> {
    if error.raw_os_error() == Some(libc::EINVAL) { Ok(()) } else { Err(error) }
}

/// Wakes the pager by a page fault: no descriptor is needed that the program could close.
#[derive(Clone, Copy, Debug)]
pub struct Bell {
    address: usize,
}

impl Bell {
    /// Returns when the pager has answered with [`PagedArea::answer_bell`], perhaps somebody else, who has read the page meanwhile (process_vm_readv(2)). One thread at a time.
    ///
    /// # Errors
    /// EINVAL when the page cannot be dropped: it is locked in memory, before Linux 5.18.
    pub fn ring(&self) -> io::Result<()> {
        // SAFETY: the page is a readable doorbell of a `PagedArea` (only it makes a Bell); dropping it makes the read fault.
        unsafe {
            raw::drop_memory(self.address, PAGE_BYTES)?;
            std::ptr::read_volatile(self.address as *const u8);
        }
        Ok(())
    }

    /// Whether a fault at `address` is this bell.
    pub fn is_at(&self, address: usize) -> bool {
        address == self.address
    }
}

#[cfg(test)]
mod tests;
