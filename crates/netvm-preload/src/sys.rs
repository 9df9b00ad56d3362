//! Mapping calls as raw system calls (this library owns the symbols), and a lock that a fork can cross.

use netvm_sys::thread::{Turn, without_signals};
use std::cell::UnsafeCell;
use std::ffi::c_long;

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

/// A system call, without the C library's function of that name, which is ours. A negative errno is an error.
///
/// # Safety
/// As of the call.
pub(crate) unsafe fn raw(number: c_long, a: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the caller's contract; the registers are those of the kernel's calling convention.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a[0], in("rsi") a[1], in("rdx") a[2], in("r10") a[3], in("r8") a[4], in("r9") a[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack)
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number as isize,
            inlateout("x0") a[0] as isize => result,
            in("x1") a[1], in("x2") a[2], in("x3") a[3], in("x4") a[4], in("x5") a[5],
            options(nostack)
        );
    }
    result
}

fn check(result: isize) -> Result<usize, i32> {
    if (-4095..0).contains(&result) { Err(-result as i32) } else { Ok(result as usize) }
}

/// What the C library's function returns for it, with errno.
pub(crate) fn as_in_c(result: isize) -> isize {
    check(result).map_or_else(
        |errno| {
            set_errno(errno);
            -1
        },
        |result| result as isize,
    )
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
    let arguments = [address, bytes, protection as usize, flags as usize, fd as usize, offset as usize];
    // SAFETY: forwarded from the caller.
    check(unsafe { raw(libc::SYS_mmap, arguments) })
}

/// munmap(2).
///
/// # Safety
/// The caller owns the range.
pub(crate) unsafe fn munmap(address: usize, bytes: usize) -> Result<(), i32> {
    // SAFETY: forwarded from the caller.
    check(unsafe { raw(libc::SYS_munmap, [address, bytes, 0, 0, 0, 0]) }).map(drop)
}

/// mprotect(2).
///
/// # Safety
/// The caller owns the range.
pub(crate) unsafe fn mprotect(address: usize, bytes: usize, protection: i32) -> Result<(), i32> {
    // SAFETY: forwarded from the caller.
    check(unsafe { raw(libc::SYS_mprotect, [address, bytes, protection as usize, 0, 0, 0]) }).map(drop)
}

/// pkey_mprotect(2).
///
/// # Safety
/// The caller owns the range.
pub(crate) unsafe fn pkey_mprotect(
    address: usize,
    bytes: usize,
    protection: i32,
    key: i32,
) -> Result<(), i32> {
    let arguments = [address, bytes, protection as usize, key as usize, 0, 0];
    // SAFETY: forwarded from the caller.
    check(unsafe { raw(libc::SYS_pkey_mprotect, arguments) }).map(drop)
}

/// madvise(2).
///
/// # Safety
/// The caller owns the range, and gives up its contents where the advice drops them.
pub(crate) unsafe fn madvise(address: usize, bytes: usize, advice: i32) -> Result<(), i32> {
    // SAFETY: forwarded from the caller.
    check(unsafe { raw(libc::SYS_madvise, [address, bytes, advice as usize, 0, 0, 0]) }).map(drop)
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
    check(unsafe { raw(libc::SYS_mremap, [old, old_bytes, new_bytes, flags as usize, new, 0]) })
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
