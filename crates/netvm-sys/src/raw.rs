//! Memory system calls, made directly: in a preloaded library the libc functions of these names are our own.
//!
//! `syscall(2)` is variadic: every argument is passed here as a whole register, or its upper half would be garbage.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// mmap(2); `flags` are passed as given.
///
/// # Safety
/// With MAP_FIXED, the caller owns `address..address + bytes`.
pub unsafe fn mmap(address: usize, bytes: usize, protection: i32, flags: i32, fd: i32) -> io::Result<usize> {
    // SAFETY: forwarded from the caller.
    unsafe { mmap_at(address, bytes, protection, flags, fd, 0) }
}

/// mmap(2) from `offset` of the file.
///
/// # Safety
/// As mmap(2): with `MAP_FIXED` nobody may rely on what was mapped there.
pub unsafe fn mmap_at(
    address: usize,
    bytes: usize,
    protection: i32,
    flags: i32,
    fd: i32,
    offset: u64,
) -> io::Result<usize> {
    // SAFETY: forwarded from the caller.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mmap,
            address,
            bytes,
            protection as isize,
            flags as isize,
            fd as isize,
            offset as usize,
        )
    };
    check(result)
}

/// munmap(2).
///
/// # Safety
/// The caller owns the range and nothing refers to it any more.
pub unsafe fn munmap(address: usize, bytes: usize) -> io::Result<()> {
    // SAFETY: forwarded from the caller.
    check(unsafe { libc::syscall(libc::SYS_munmap, address, bytes) }).map(drop)
}

/// madvise(2).
///
/// # Safety
/// The caller owns the range, and the advice does not change contents that someone relies on.
pub unsafe fn madvise(address: usize, bytes: usize, advice: i32) -> io::Result<()> {
    // SAFETY: forwarded from the caller.
    check(unsafe { libc::syscall(libc::SYS_madvise, address, bytes, advice as isize) }).map(drop)
}

/// Takes a range's memory away, also where the program has locked it (Linux 5.18).
///
/// # Safety
/// The caller owns the range and gives up what is in it.
pub unsafe fn drop_memory(address: usize, bytes: usize) -> io::Result<()> {
    const MADV_DONTNEED_LOCKED: i32 = 24;
    // SAFETY: forwarded from the caller.
    match unsafe { madvise(address, bytes, MADV_DONTNEED_LOCKED) } {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            // SAFETY: as above.
            unsafe { madvise(address, bytes, libc::MADV_DONTNEED) }
        }
        result => result,
    }
}

/// A descriptor of the process of this number.
pub fn pidfd(process: i32) -> io::Result<OwnedFd> {
    // SAFETY: two numbers; the kernel checks them.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, process as isize, 0_isize) })?;
    // SAFETY: just opened, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// process_madvise(2) on ranges of this process, which `pidfd` names; without one it is the calling thread, which kernels know since 6.14. Returns the bytes done, from the first range on. The process may do itself
/// what it may do by madvise(2) since Linux 6.13; since 6.16 other CPUs are interrupted once for all ranges.
///
/// # Safety
/// As [`madvise`], for each range.
pub unsafe fn madvise_many(pidfd: Option<RawFd>, ranges: &[libc::iovec], advice: i32) -> io::Result<usize> {
    const PIDFD_SELF_THREAD: i32 = -10_000;
    // SAFETY: the ranges are only read; for the rest forwarded from the caller.
    check(unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            pidfd.unwrap_or(PIDFD_SELF_THREAD) as isize,
            ranges.as_ptr(),
            ranges.len(),
            advice as isize,
            0_isize,
        )
    })
}

/// Which of `pages` are in memory: one system call for all, move_pages(2) without a place to move them to. Nothing is brought in. `Ok(false)` for what
/// is not there, what is swapped out, and what the kernel does not know.
///
/// # Errors
/// ENOSYS, EPERM: kernels without memory nodes, filters of system calls.
pub fn are_there<const PAGES: usize>(pages: &[usize], there: &mut [bool; PAGES]) -> io::Result<()> {
    let mut nodes = [-1_i32; PAGES];
    let count = pages.len().min(PAGES);
    // SAFETY: addresses are only looked up, and the kernel writes `count` numbers, as many as there is room for.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0_isize,
            count,
            pages.as_ptr(),
            std::ptr::null::<i32>(),
            nodes.as_mut_ptr(),
            0_isize,
        )
    })?;
    for (there, node) in there.iter_mut().zip(&nodes[..count]) {
        *there = *node >= 0;
    }
    Ok(())
}

/// Copies memory of this process to other memory of it, by process_vm_readv(2): a source that cannot be read is an error, or the end of what is
/// done, and no signal. Returns the bytes done.
///
/// # Safety
/// The caller owns all of `to`, and nothing refers to it.
pub unsafe fn copy_many(to: &[libc::iovec], from: &[libc::iovec]) -> io::Result<usize> {
    // By the number of the process there is no memory any more when its first thread has ended.
    let this = crate::thread::number() as i32;
    // SAFETY: both lists are only read; for the rest forwarded from the caller.
    let copied = unsafe {
        let (to_count, from_count) = (to.len() as _, from.len() as _);
        libc::process_vm_readv(this, to.as_ptr(), to_count, from.as_ptr(), from_count, 0)
    };
    if copied < 0 { Err(io::Error::last_os_error()) } else { Ok(copied as usize) }
}

/// munlock(2).
///
/// # Safety
/// Nothing relies on the range staying in memory.
pub unsafe fn munlock(address: usize, bytes: usize) -> io::Result<()> {
    // SAFETY: forwarded from the caller.
    check(unsafe { libc::syscall(libc::SYS_munlock, address, bytes) }).map(drop)
}

/// mprotect(2).
///
/// # Safety
/// The caller owns the range, and no reference relies on the protection it has.
pub unsafe fn mprotect(address: usize, bytes: usize, protection: i32) -> io::Result<()> {
    // SAFETY: forwarded from the caller.
    check(unsafe { libc::syscall(libc::SYS_mprotect, address, bytes, protection as isize) }).map(drop)
}

/// mremap(2) to a place that is given.
///
/// # Safety
/// The caller owns both ranges, and gives up what is at `to`.
pub unsafe fn move_to(from: usize, bytes: usize, to: usize) -> io::Result<()> {
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as isize;
    // SAFETY: forwarded from the caller.
    check(unsafe { libc::syscall(libc::SYS_mremap, from, bytes, bytes, flags, to) }).map(drop)
}

fn check(result: libc::c_long) -> io::Result<usize> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result as usize) }
}
