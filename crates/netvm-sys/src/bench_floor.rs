//! The bare kernel operations that `netvm bench` measures as floors.
//!
//! A [`FaultFloor`] is the smallest thing that can take a page fault: one registered range (the *area*), one range of
//! frames (the *pool*) and a userfaultfd. It has no policy, no network and no bookkeeping, so that what it costs is what
//! the kernel costs. The pager does not use it.
//!
//! Pages are named by index; every index is checked, so the type is safe to use although a fault that nobody answers
//! blocks the thread that took it.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::raw;

/// Bytes in a page. The floors are written for 4 KiB pages only.
pub const PAGE_BYTES: usize = 4096;

const UFFD_API: u64 = 0xAA;
const UFFDIO_API: u64 = iowr(0x3F, 24);
const UFFDIO_REGISTER: u64 = iowr(0x00, 32);
const UFFDIO_COPY: u64 = iowr(0x03, 40);
const UFFDIO_MOVE: u64 = iowr(0x05, 40);
const UFFDIO_WRITEPROTECT: u64 = iowr(0x06, 24);
/// `_IO(0xAA, 0)` on `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xAA00;

const REGISTER_MODE_MISSING: u64 = 1 << 0;
const REGISTER_MODE_WP: u64 = 1 << 1;
const COPY_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const FEATURE_SIGBUS: u64 = 1 << 7;
const FEATURE_WP_ASYNC: u64 = 1 << 15;
const FEATURE_MOVE: u64 = 1 << 16;
const EVENT_PAGEFAULT: u8 = 0x12;
const PAGEFAULT_FLAG_WP: u64 = 1 << 1;

/// `_IOWR(0xAA, number, bytes)`.
const fn iowr(number: u64, bytes: u64) -> u64 {
    (3 << 30) | (bytes << 16) | (0xAA << 8) | number
}

/// What a [`FaultFloor`] should be able to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FloorFeatures {
    /// Register for write-protection as well as for missing pages.
    pub write_protect: bool,
    /// The kernel resolves write-protection faults by itself (dirty tracking without a handler; Linux 6.7).
    pub write_protect_async: bool,
    /// `UFFDIO_MOVE` between area and pool (Linux 6.8).
    pub moves: bool,
    /// A fault is a SIGBUS of the faulting thread; nothing is to be read from the descriptor.
    pub sigbus: bool,
}

/// A fault read from the userfaultfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FloorFault {
    /// Index of the page in the area.
    pub page: usize,
    /// True if the page is there and only write-protected.
    pub write_protected: bool,
}

/// A registered area, a pool of frames, and the userfaultfd between them; all of `pages` pages of 4 KiB.
#[derive(Debug)]
pub struct FaultFloor {
    uffd: OwnedFd,
    pidfd: Option<OwnedFd>,
    area: NonNull<u8>,
    pool: NonNull<u8>,
    pages: usize,
}

// SAFETY: area and pool are owned mappings that live until drop; `&self` methods touch them only through atomics or
// through the kernel, and the one method that lends plain bytes takes `&mut self`.
unsafe impl Send for FaultFloor {}
// SAFETY: as above.
unsafe impl Sync for FaultFloor {}

impl FaultFloor {
    /// Maps and registers an area and a pool of `pages` pages each.
    ///
    /// # Errors
    /// The error of userfaultfd(2) or of one of its ioctls: `EPERM` without the privilege, `EINVAL` when the kernel
    /// lacks a feature that was asked for, `ENOMEM`.
    pub fn new(pages: usize, features: FloorFeatures) -> io::Result<Self> {
        let bytes = pages
            .checked_mul(PAGE_BYTES)
            .filter(|&bytes| bytes > 0)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        let uffd = open_userfaultfd()?;
        let mut wanted = 0;
        if features.write_protect || features.write_protect_async {
            wanted |= FEATURE_PAGEFAULT_FLAG_WP;
        }
        if features.write_protect_async {
            wanted |= FEATURE_WP_ASYNC;
        }
        if features.moves {
            wanted |= FEATURE_MOVE;
        }
        if features.sigbus {
            wanted |= FEATURE_SIGBUS;
        }
        let mut api = [UFFD_API, wanted, 0];
        ioctl(&uffd, UFFDIO_API, &mut api)?;
        let area = map_anonymous(bytes)?;
        let pool = match map_anonymous(bytes) {
            Ok(pool) => pool,
            Err(error) => {
                unmap(area, bytes);
                return Err(error);
            }
        };
        let floor = Self { uffd, pidfd: raw::pidfd(std::process::id() as i32).ok(), area, pool, pages };
        let protects = features.write_protect || features.write_protect_async;
        let mode = REGISTER_MODE_MISSING | if protects { REGISTER_MODE_WP } else { 0 };
        floor.register(area, mode)?;
        if features.moves {
            // UFFDIO_MOVE wants its destination registered, and pages come back into the pool by it. After `fill_pool`
            // a hole in the pool is touched by nobody.
            floor.fill_pool();
            floor.register(pool, REGISTER_MODE_MISSING)?;
        } else {
            floor.fill_pool();
        }
        Ok(floor)
    }

    /// Pages in the area, and frames in the pool.
    pub fn pages(&self) -> usize {
        self.pages
    }

    fn register(&self, start: NonNull<u8>, mode: u64) -> io::Result<()> {
        let mut register = [start.as_ptr() as u64, (self.pages * PAGE_BYTES) as u64, mode, 0];
        ioctl(&self.uffd, UFFDIO_REGISTER, &mut register)
    }

    fn fill_pool(&self) {
        for frame in 0..self.pages {
            for word in 0..PAGE_BYTES / 8 {
                let mixed = ((frame * 512 + word) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                self.pool_word(frame, word).store(mixed ^ (mixed >> 29), Ordering::Relaxed);
            }
        }
    }

    fn area_word(&self, page: usize, word: usize) -> &AtomicU64 {
        assert!(page < self.pages && word < PAGE_BYTES / 8);
        // SAFETY: page and word are checked against the mapping just above; it is aligned, lives as long as self, and
        // is otherwise accessed by the kernel only or exclusively (`frame_bytes` takes `&mut self`).
        unsafe { &*self.area.as_ptr().add(page * PAGE_BYTES + word * 8).cast::<AtomicU64>() }
    }

    fn pool_word(&self, frame: usize, word: usize) -> &AtomicU64 {
        assert!(frame < self.pages && word < PAGE_BYTES / 8);
        // SAFETY: as in `area_word`.
        unsafe { &*self.pool.as_ptr().add(frame * PAGE_BYTES + word * 8).cast::<AtomicU64>() }
    }

    /// Reads the first word of a page of the area; faults, and blocks until the fault is answered, if it is missing.
    pub fn read(&self, page: usize) -> u64 {
        self.area_word(page, 0).load(Ordering::Relaxed)
    }

    /// Writes the first word of a page of the area; faults like [`FaultFloor::read`].
    pub fn write(&self, page: usize, value: u64) {
        self.area_word(page, 0).store(value, Ordering::Relaxed);
    }

    /// The bytes of a frame of the pool. The frame must be there (not moved into the area), or the reader hangs.
    pub fn frame_bytes(&mut self, frame: usize) -> &[u8] {
        assert!(frame < self.pages);
        // SAFETY: the frame lies within the mapping (checked above) and `&mut self` keeps every writer out.
        unsafe { std::slice::from_raw_parts(self.pool.as_ptr().add(frame * PAGE_BYTES), PAGE_BYTES) }
    }

    /// The bytes of a page of the area, which must be present, or the reader hangs.
    pub fn page_bytes(&mut self, page: usize) -> &[u8] {
        assert!(page < self.pages);
        // SAFETY: the page lies within the mapping (checked above) and `&mut self` keeps every writer out.
        unsafe { std::slice::from_raw_parts(self.area.as_ptr().add(page * PAGE_BYTES), PAGE_BYTES) }
    }

    /// Copies a page of the area into a frame of the pool, both of which must be there.
    pub fn copy_out(&mut self, page: usize, frame: usize) {
        assert!(page < self.pages && frame < self.pages);
        // SAFETY: both lie within their mappings (checked above), which do not overlap; `&mut self` keeps others out.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.area.as_ptr().add(page * PAGE_BYTES),
                self.pool.as_ptr().add(frame * PAGE_BYTES),
                PAGE_BYTES,
            );
        }
    }

    fn area_address(&self, page: usize, count: usize) -> u64 {
        assert!(page <= self.pages && count <= self.pages - page);
        self.area.as_ptr() as u64 + (page * PAGE_BYTES) as u64
    }

    fn pool_address(&self, frame: usize, count: usize) -> u64 {
        assert!(frame <= self.pages && count <= self.pages - frame);
        self.pool.as_ptr() as u64 + (frame * PAGE_BYTES) as u64
    }

    /// `UFFDIO_COPY` of `count` frames into missing pages, write-protected if `protect`; wakes who waits for them.
    ///
    /// # Errors
    /// `EEXIST` if a page is there already.
    pub fn copy_in(&self, page: usize, frame: usize, count: usize, protect: bool) -> io::Result<()> {
        let mode = if protect { COPY_MODE_WP } else { 0 };
        let (area, pool) = (self.area_address(page, count), self.pool_address(frame, count));
        ioctl(&self.uffd, UFFDIO_COPY, &mut [area, pool, (count * PAGE_BYTES) as u64, mode, 0])
    }

    /// `UFFDIO_MOVE` of `count` frames out of the pool into missing pages of the area; the frames become holes.
    ///
    /// # Errors
    /// `EEXIST` if a page is there already, `ENOENT` if a frame is not.
    pub fn move_in(&self, page: usize, frame: usize, count: usize) -> io::Result<()> {
        let (area, pool) = (self.area_address(page, count), self.pool_address(frame, count));
        ioctl(&self.uffd, UFFDIO_MOVE, &mut [area, pool, (count * PAGE_BYTES) as u64, 0, 0])
    }

    /// `UFFDIO_MOVE` of `count` pages out of the area into holes of the pool; the pages become missing.
    ///
    /// # Errors
    /// As [`FaultFloor::move_in`].
    pub fn move_out(&self, page: usize, frame: usize, count: usize) -> io::Result<()> {
        let (area, pool) = (self.area_address(page, count), self.pool_address(frame, count));
        ioctl(&self.uffd, UFFDIO_MOVE, &mut [pool, area, (count * PAGE_BYTES) as u64, 0, 0])
    }

    /// `UFFDIO_WRITEPROTECT` of `count` pages, on or off; off wakes who waits.
    ///
    /// # Errors
    /// `EINVAL` if the floor was made without write-protection.
    pub fn protect(&self, page: usize, count: usize, on: bool) -> io::Result<()> {
        let mode = if on { WRITEPROTECT_MODE_WP } else { 0 };
        let area = self.area_address(page, count);
        ioctl(&self.uffd, UFFDIO_WRITEPROTECT, &mut [area, (count * PAGE_BYTES) as u64, mode])
    }

    /// `madvise(MADV_DONTNEED)` of `count` pages of the area, which become missing.
    ///
    /// # Errors
    /// That of madvise(2).
    pub fn discard(&self, page: usize, count: usize) -> io::Result<()> {
        let area = self.area_address(page, count);
        // SAFETY: the range lies within the area (checked in `area_address`), a private mapping of our own.
        let result =
            unsafe { libc::madvise(area as *mut libc::c_void, count * PAGE_BYTES, libc::MADV_DONTNEED) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// One `process_madvise(MADV_DONTNEED)` for up to 64 scattered pages of the area.
    ///
    /// # Errors
    /// `ENOSYS` or `EINVAL` where the kernel does not allow it.
    pub fn discard_scattered(&self, pages: &[usize]) -> io::Result<()> {
        let pidfd = self.pidfd.as_ref().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSYS))?;
        let mut vectors = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 64];
        assert!(pages.len() <= vectors.len());
        for (vector, &page) in vectors.iter_mut().zip(pages) {
            vector.iov_base = self.area_address(page, 1) as *mut libc::c_void;
            vector.iov_len = PAGE_BYTES;
        }
        // SAFETY: the vectors name pages of the area (checked in `area_address`) of this very process.
        let done = unsafe {
            raw::madvise_many(Some(pidfd.as_raw_fd()), &vectors[..pages.len()], libc::MADV_DONTNEED)
        }?;
        if done == pages.len() * PAGE_BYTES {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::EAGAIN))
        }
    }

    /// Address of the area.
    #[cfg(test)]
    pub(crate) fn area_start(&self) -> usize {
        self.area.as_ptr() as usize
    }

    /// The page of the area at an address.
    pub(crate) fn page_at(&self, address: usize) -> Option<usize> {
        let page = address.wrapping_sub(self.area.as_ptr() as usize) / PAGE_BYTES;
        (page < self.pages).then_some(page)
    }

    /// Waits for a fault in the area. `None` if the descriptor says something else than a fault of the area.
    ///
    /// # Errors
    /// That of read(2).
    pub fn wait_fault(&self) -> io::Result<Option<FloorFault>> {
        let mut message = [0u64; 4];
        // SAFETY: the buffer is 32 bytes, the size of one struct uffd_msg.
        let got = unsafe { libc::read(self.uffd.as_raw_fd(), message.as_mut_ptr().cast(), 32) };
        if got < 0 {
            return Err(io::Error::last_os_error());
        }
        if got != 32 || message[0].to_ne_bytes()[0] != EVENT_PAGEFAULT {
            return Ok(None);
        }
        let page = (message[2].wrapping_sub(self.area.as_ptr() as u64) / PAGE_BYTES as u64) as usize;
        let write_protected = message[1] & PAGEFAULT_FLAG_WP != 0;
        Ok((page < self.pages).then_some(FloorFault { page, write_protected }))
    }

    /// Makes [`FaultFloor::wait_fault`] return `EAGAIN` instead of blocking: for a handler that spins.
    ///
    /// # Errors
    /// That of fcntl(2).
    pub fn set_nonblocking(&self) -> io::Result<()> {
        // SAFETY: fcntl on a descriptor that we own.
        let result = unsafe { libc::fcntl(self.uffd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for FaultFloor {
    fn drop(&mut self) {
        unmap(self.area, self.pages * PAGE_BYTES);
        unmap(self.pool, self.pages * PAGE_BYTES);
    }
}

fn open_userfaultfd() -> io::Result<OwnedFd> {
    // SAFETY: userfaultfd(2) takes flags only.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) } as RawFd;
    if fd >= 0 {
        // SAFETY: the kernel has just given us this descriptor.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    let refused = io::Error::last_os_error();
    let Ok(device) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd") else {
        return Err(refused);
    };
    // SAFETY: USERFAULTFD_IOC_NEW takes flags by value.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(refused);
    }
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// All userfaultfd ioctls take a struct of 64-bit words that the kernel reads and partly writes back.
fn ioctl<const WORDS: usize>(
    uffd: &OwnedFd,
    request: libc::Ioctl,
    argument: &mut [u64; WORDS],
) -> io::Result<()> {
    assert_eq!((request >> 16) & 0x3FFF, WORDS as u64 * 8, "argument size does not fit the request");
    loop {
        // SAFETY: the argument is as large as the request says (asserted above), and the ranges in it were checked
        // against the mappings by the caller in this file.
        let result = unsafe { libc::ioctl(uffd.as_raw_fd(), request as libc::Ioctl, argument.as_mut_ptr()) };
        if result >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EAGAIN) {
            return Err(error);
        }
    }
}

fn map_anonymous(bytes: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: a new private anonymous mapping at an address of the kernel's choice overlaps nothing of ours.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the range was mapped just above. Failure (no huge pages in the kernel) is harmless.
    unsafe { libc::madvise(address, bytes, libc::MADV_NOHUGEPAGE) };
    NonNull::new(address.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

fn unmap(start: NonNull<u8>, bytes: usize) {
    // SAFETY: called once for each mapping made by `map_anonymous`, when nothing refers to it any more.
    unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
}

/// Lets the calling thread run on the CPUs `cpus` again.
///
/// # Errors
/// `EINVAL` if none of them exists.
pub fn unpin_thread(cpus: &[usize]) -> io::Result<()> {
    // SAFETY: an all-zero cpu_set_t is an empty set; CPUs beyond its capacity are filtered out.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &cpu in cpus.iter().filter(|&&cpu| cpu < libc::CPU_SETSIZE as usize) {
            libc::CPU_SET(cpu, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The CPUs on which the calling thread may run.
pub fn allowed_cpus() -> Vec<usize> {
    // SAFETY: the kernel fills in a cpu_set_t of the size given; only indexes below its capacity are asked for.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return vec![0];
        }
        (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &set)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floor(features: FloorFeatures) -> Option<FaultFloor> {
        match FaultFloor::new(8, features) {
            Ok(floor) => Some(floor),
            Err(error) => {
                println!("skipped (no userfaultfd with {features:?}: {error})");
                None
            }
        }
    }

    #[test]
    fn a_fault_is_answered_by_a_copy() {
        let Some(mut floor) = floor(FloorFeatures::default()) else { return };
        let expected = u64::from_ne_bytes(floor.frame_bytes(5)[..8].try_into().unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let fault = floor.wait_fault().unwrap().unwrap();
                assert_eq!(fault, FloorFault { page: 3, write_protected: false });
                floor.copy_in(3, 5, 1, false).unwrap();
            });
            assert_eq!(floor.read(3), expected);
        });
    }

    #[test]
    fn pages_move_there_and_back() {
        let Some(mut floor) = floor(FloorFeatures { moves: true, ..Default::default() }) else { return };
        let before = floor.frame_bytes(2).to_vec();
        floor.move_in(0, 2, 2).unwrap();
        assert_eq!(floor.page_bytes(0), before);
        floor.write(0, 77);
        floor.move_out(0, 2, 2).unwrap();
        assert_eq!(floor.frame_bytes(2)[..8], 77u64.to_ne_bytes());
        assert_eq!(floor.frame_bytes(2)[8..], before[8..]);
    }
}
