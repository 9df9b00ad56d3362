//! Mapping calls as raw system calls (this library owns the symbols), and a lock that a fork can cross.

use netvm_sys::thread::{Turn, without_signals};
use std::cell::UnsafeCell;

pub(crate) const PAGE_BYTES: usize = netvm_sys::uffd::PAGE_BYTES;

/// Rounds up to whole pages; `None` on overflow.
pub(crate) fn round_up(bytes: usize, unit: usize) -> Option<usize> {
    Some(bytes.checked_add(unit - 1)? & !(unit - 1))
}

pub(crate) fn errno() -> i32 {
    // SAFETY: the C library's per-thread errno is always readable.
    unsafe { *libc::__errno_location() }
}

pub(crate) fn set_errno(value: i32) {
    // SAFETY: the C library's per-thread errno is always writable.
    unsafe { *libc::__errno_location() = value }
}

fn check(result: libc::c_long) -> Result<usize, i32> {
    if result == -1 { Err(errno()) } else { Ok(result as usize) }
}

/// mmap(2).
///
/// # Safety
/// With MAP_FIXED in `flags` the caller owns the range.
pub(crate) unsafe fn mmap(
    address: usize,
    bytes: usize,
    protection: i32,
    flags: i32,
    fd: i32,
    offset: i64,
) -> Result<usize, i32> {
    // SAFETY: forwarded from the caller.
    check(unsafe { libc::syscall(libc::SYS_mmap, address, bytes, protection, flags, fd, offset) })
}

/// munmap(2).
///
/// # Safety
/// The caller owns the range.
pub(crate) unsafe fn munmap(address: usize, bytes: usize) -> Result<(), i32> {
    // SAFETY: forwarded from the caller.
    check(unsafe { libc::syscall(libc::SYS_munmap, address, bytes) }).map(drop)
}

/// mprotect(2).
///
/// # Safety
/// The caller owns the range.
pub(crate) unsafe fn mprotect(address: usize, bytes: usize, protection: i32) -> Result<(), i32> {
    // SAFETY: forwarded from the caller.
    check(unsafe { libc::syscall(libc::SYS_mprotect, address, bytes, protection) }).map(drop)
}

/// madvise(2).
///
/// # Safety
/// The caller owns the range, and gives up its contents where the advice drops them.
pub(crate) unsafe fn madvise(address: usize, bytes: usize, advice: i32) -> Result<(), i32> {
    // SAFETY: forwarded from the caller.
    check(unsafe { libc::syscall(libc::SYS_madvise, address, bytes, advice) }).map(drop)
}

/// mremap(2).
///
/// # Safety
/// The caller owns both ranges.
pub(crate) unsafe fn mremap(
    old: usize,
    old_bytes: usize,
    new_bytes: usize,
    flags: i32,
    new: usize,
) -> Result<usize, i32> {
    // SAFETY: forwarded from the caller.
    check(unsafe { libc::syscall(libc::SYS_mremap, old, old_bytes, new_bytes, flags, new) })
}

/// Reserves addresses without memory.
///
/// # Safety
/// With `address` other than 0 the caller owns that range; what is there is dropped.
pub(crate) unsafe fn reserve(address: usize, bytes: usize) -> Result<usize, i32> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let fixed = if address == 0 { 0 } else { libc::MAP_FIXED };
    // SAFETY: forwarded from the caller.
    unsafe { mmap(address, bytes, libc::PROT_NONE, flags | fixed, -1, 0) }
}

/// A value behind a lock that fork(2) can cross: whoever forks holds it, and gives it back on both sides.
pub(crate) struct Locked<T> {
    turn: Turn,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only under the lock.
unsafe impl<T: Send> Sync for Locked<T> {}

impl<T> Locked<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { turn: Turn::new(), value: UnsafeCell::new(value) }
    }

    /// Runs `work` under the lock. Not reentrant. No handler of a signal runs meanwhile: it might fork, which takes all
    /// locks, and programs stop their threads by signals and map memory while they stand still.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        without_signals(|| {
            self.turn.take();
            // SAFETY: the turn is taken, so this is the only reference; `work` cannot get a second one (not reentrant: it would
            // wait for ever instead).
            let result = work(unsafe { &mut *self.value.get() });
            self.turn.give_back();
            result
        })
    }

    /// Before a fork, with signals blocked.
    pub(crate) fn hold(&self) {
        self.turn.take();
    }

    /// After a fork, on both sides, by the thread that forked.
    pub(crate) fn let_go(&self) {
        self.turn.give_back();
    }
}

/// One line on standard error, written at once.
pub(crate) fn say(message: &str) {
    let line = format!("netvm: {message}\n");
    // SAFETY: the buffer outlives the call.
    let written = unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
    // Nobody is left to tell if standard error is closed.
    let _ = written;
}

/// Ends the process because far memory cannot be had.
pub(crate) fn give_up(message: &str) -> ! {
    say(message);
    // SAFETY: ends the process; no destructors may run on behalf of a library that never started.
    unsafe { libc::_exit(EXIT_NOT_STARTED) }
}

/// Exit status when far memory cannot be had, as of tools that run other programs (timeout, env).
pub(crate) const EXIT_NOT_STARTED: i32 = 125;
