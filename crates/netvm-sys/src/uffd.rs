//! userfaultfd(2): creating one, asking what it can do, and its ioctls.
//!
//! Layouts and numbers follow `include/uapi/linux/userfaultfd.h`. Everything that takes an address is `unsafe` here;
//! [`crate::paged::PagedArea`] is the checked wrapper that the pager uses.

use std::ffi::CStr;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the base page that all page operations here work on.
pub const PAGE_BYTES: usize = 4096;

/// Write-protect faults are reported.
pub const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
/// A fault may be delivered as SIGBUS to the faulting thread.
pub const FEATURE_SIGBUS: u64 = 1 << 7;
/// Fault messages carry the thread id.
pub const FEATURE_THREAD_ID: u64 = 1 << 8;
/// Fault addresses are not rounded to the page.
pub const FEATURE_EXACT_ADDRESS: u64 = 1 << 11;
/// Pages can be poisoned (Linux 6.6).
pub const FEATURE_POISON: u64 = 1 << 14;
/// Write protection that the kernel resolves by itself (Linux 6.7).
pub const FEATURE_WP_ASYNC: u64 = 1 << 15;
/// Pages can be moved without a copy (Linux 6.8).
pub const FEATURE_MOVE: u64 = 1 << 16;

const API: u64 = 0xAA;
const IOC_API: u64 = 0xC018_AA3F;
const IOC_REGISTER: u64 = 0xC020_AA00;
const IOC_WAKE: u64 = 0x8010_AA02;
const IOC_COPY: u64 = 0xC028_AA03;
const IOC_ZEROPAGE: u64 = 0xC020_AA04;
const IOC_MOVE: u64 = 0xC028_AA05;
const IOC_WRITEPROTECT: u64 = 0xC018_AA06;
const IOC_POISON: u64 = 0xC020_AA08;
const IOC_NEW: u64 = 0xAA00;

const REGISTER_MISSING: u64 = 1;
const REGISTER_WP: u64 = 2;
const MODE_DONTWAKE: u64 = 1;
const COPY_WP: u64 = 2;
const WRITEPROTECT_WP: u64 = 1;

const EVENT_PAGEFAULT: u8 = 0x12;
const FAULT_WRITE: u64 = 1;
const FAULT_WP: u64 = 2;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    bytes: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Transfer {
    to: u64,
    from: u64,
    bytes: u64,
    mode: u64,
    done: i64,
}

#[repr(C)]
struct RangeMode {
    start: u64,
    bytes: u64,
    mode: u64,
    done: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    rest: u64,
}

/// One page fault reported by the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    /// Faulting address, rounded down to the page.
    pub address: usize,
    /// Where in the page, where that is known.
    pub offset: usize,
    /// The access was a write.
    pub write: bool,
    /// The page is present but write-protected.
    pub protected: bool,
    /// Thread that faulted, 0 when the kernel does not tell.
    pub thread: u32,
}

/// How [`Userfault::open`] got its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// `userfaultfd(2)`: CAP_SYS_PTRACE or vm.unprivileged_userfaultfd=1.
    Syscall,
    /// `/dev/userfaultfd`.
    Device,
}

/// A userfaultfd in full mode: faults of the kernel itself (`read(2)` into a far buffer) are served too.
#[derive(Debug)]
pub struct Userfault {
    fd: OwnedFd,
    features: u64,
    access: Access,
}

/// Only faults of the program itself are reported, those of the kernel fail.
const USER_MODE_ONLY: i32 = 1;

fn open_raw(mode: i32) -> io::Result<(OwnedFd, Access)> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | mode;
    // SAFETY: userfaultfd(2) takes flags only; the returned descriptor is checked and owned at once.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if fd >= 0 {
        // SAFETY: `fd` is a fresh descriptor that nobody else owns (checked >= 0 above).
        return Ok((unsafe { OwnedFd::from_raw_fd(fd as i32) }, Access::Syscall));
    }
    let first = io::Error::last_os_error();
    let Ok(device) = OpenOptions::new().read(true).write(true).open("/dev/userfaultfd") else {
        return Err(first);
    };
    // SAFETY: IOC_NEW takes flags by value; the returned descriptor is checked and owned at once.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), IOC_NEW as _, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` is a fresh descriptor that nobody else owns (checked >= 0 above).
    Ok((unsafe { OwnedFd::from_raw_fd(fd) }, Access::Device))
}

/// Environment variable with features that are not to be used although the kernel has them, by their names in [`NAMES`], separated by commas. For
/// kernels in which one has a fault, and to try what older kernels get. Words that are no names are ignored.
pub const WITHOUT: &CStr = c"NETVM_WITHOUT";

/// Features that may be done without.
pub const NAMES: [(&str, u64); 3] =
    [("move", FEATURE_MOVE), ("poison", FEATURE_POISON), ("wp-async", FEATURE_WP_ASYNC)];

/// Features that [`WITHOUT`] names, as it was when this was called first: best before there are threads that may change the environment.
pub fn unwanted() -> u64 {
    static SAID: AtomicU64 = AtomicU64::new(UNKNOWN);
    let said = SAID.load(Ordering::Relaxed);
    if said != UNKNOWN {
        return said;
    }
    // SAFETY: a constant string that ends with a zero.
    let value = unsafe { libc::getenv(WITHOUT.as_ptr()) };
    let value: &[u8] = match value.is_null() {
        true => b"",
        // SAFETY: not null, and what getenv returns ends with a zero. Nothing is allocated: children of forks may ask.
        false => unsafe { CStr::from_ptr(value) }.to_bytes(),
    };
    let words = value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    let named = words.flat_map(|word| NAMES.iter().find(|(name, _)| name.as_bytes() == word));
    let unwanted = named.fold(0, |all, (_, feature)| all | feature);
    SAID.store(unwanted, Ordering::Relaxed);
    unwanted
}

/// Features that this kernel offers, but those that [`WITHOUT`] names, and how a full-mode descriptor can be had.
///
/// # Errors
/// EPERM when neither the system call nor the device may be used, ENOSYS on kernels without userfaultfd.
pub fn probe() -> io::Result<(u64, Access)> {
    let (fd, access) = open_raw(0)?;
    let mut api = Api { api: API, features: 0, ioctls: 0 };
    // SAFETY: `api` outlives the call and has the layout the kernel expects.
    if unsafe { libc::ioctl(fd.as_raw_fd(), IOC_API as _, &mut api) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let features = api.features & !unwanted();
    KNOWN.store(features, Ordering::Relaxed);
    Ok((features, access))
}

/// Whether this kernel moves pages, and may be asked: Linux 6.8.
pub fn can_move() -> bool {
    probe().is_ok_and(|(features, _)| features & FEATURE_MOVE != 0)
}

const UNKNOWN: u64 = u64::MAX;
static KNOWN: AtomicU64 = AtomicU64::new(UNKNOWN);

/// What [`probe`] found last in this process or those that it was forked from, if it could ask.
pub fn known() -> Option<u64> {
    Some(KNOWN.load(Ordering::Relaxed)).filter(|&features| features != UNKNOWN)
}

impl Userfault {
    /// Opens a descriptor with the `wanted` features that the kernel has.
    ///
    /// # Errors
    /// As [`probe`].
    pub fn open(wanted: u64) -> io::Result<Self> {
        Self::open_mode(wanted, 0)
    }

    /// As other programs may have to: faults of the kernel in this memory are not reported, but fail. For tests.
    ///
    /// # Errors
    /// As [`probe`].
    pub fn open_for_user_faults() -> io::Result<Self> {
        Self::open_mode(0, USER_MODE_ONLY)
    }

    fn open_mode(wanted: u64, mode: i32) -> io::Result<Self> {
        let (available, _) = probe()?;
        let (fd, access) = open_raw(mode)?;
        let features = wanted & available;
        let mut api = Api { api: API, features, ioctls: 0 };
        // SAFETY: `api` outlives the call and has the layout the kernel expects.
        if unsafe { libc::ioctl(fd.as_raw_fd(), IOC_API as _, &mut api) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { fd, features, access })
    }

    /// Features switched on.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// How the descriptor was had.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Reads up to `out.len()` waiting faults without blocking; returns how many.
    ///
    /// # Errors
    /// Any error but EAGAIN and EINTR.
    pub fn read_faults(&self, out: &mut [Fault]) -> io::Result<usize> {
        const BATCH: usize = 32;
        let mut messages = [Message { event: 0, reserved: [0; 7], flags: 0, address: 0, rest: 0 }; BATCH];
        let room = out.len().min(BATCH);
        let bytes = room * size_of::<Message>();
        // SAFETY: `messages` holds at least `bytes` bytes (room <= BATCH) and any bit pattern is a Message.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), messages.as_mut_ptr().cast(), bytes) };
        if got < 0 {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Ok(0),
                _ => Err(error),
            };
        }
        let mut count = 0;
        for message in &messages[..got as usize / size_of::<Message>()] {
            if message.event == EVENT_PAGEFAULT {
                out[count] = Fault {
                    address: message.address as usize & !(PAGE_BYTES - 1),
                    offset: message.address as usize & (PAGE_BYTES - 1),
                    write: message.flags & FAULT_WRITE != 0,
                    protected: message.flags & FAULT_WP != 0,
                    thread: if self.features & FEATURE_THREAD_ID != 0 { message.rest as u32 } else { 0 },
                };
                count += 1;
            }
        }
        Ok(count)
    }

    /// Registers a range for missing faults, with write protection too if asked.
    ///
    /// # Safety
    /// The caller owns the mapping at `start..start + bytes`, and faults in it will be served.
    pub unsafe fn register(&self, start: usize, bytes: usize, protect: bool) -> io::Result<()> {
        let mode = REGISTER_MISSING | if protect { REGISTER_WP } else { 0 };
        let mut argument = Register { start: start as u64, bytes: bytes as u64, mode, ioctls: 0 };
        // SAFETY: `argument` outlives the call; the kernel checks the range.
        self.result(unsafe { libc::ioctl(self.fd.as_raw_fd(), IOC_REGISTER as _, &mut argument) })
    }

    /// Wakes threads that wait on the range without changing its pages.
    ///
    /// # Errors
    /// EINVAL for a malformed range.
    pub fn wake(&self, start: usize, bytes: usize) -> io::Result<()> {
        let mut argument = RangeMode { start: start as u64, bytes: bytes as u64, mode: 0, done: 0 };
        // SAFETY: WAKE reads the first two fields only and changes no memory.
        self.result(unsafe { libc::ioctl(self.fd.as_raw_fd(), IOC_WAKE as _, &mut argument) })
    }

    /// Copies pages to missing addresses. Returns the bytes done with the error, if any.
    ///
    /// # Safety
    /// The caller owns both ranges; `from` holds the contents that the destination must have.
    pub unsafe fn copy(&self, to: usize, from: usize, bytes: usize, wake: bool) -> (usize, io::Result<()>) {
        self.transfer(IOC_COPY, to, from, bytes, if wake { 0 } else { MODE_DONTWAKE })
    }

    /// The same; the pages are write-protected from the beginning.
    ///
    /// # Safety
    /// As [`Userfault::copy`]; the caller serves write-protect faults there.
    pub unsafe fn copy_protected(&self, to: usize, from: usize, bytes: usize) -> (usize, io::Result<()>) {
        self.transfer(IOC_COPY, to, from, bytes, COPY_WP)
    }

    /// Moves pages without a copy; `from` is missing afterwards.
    ///
    /// # Safety
    /// The caller owns both ranges and no Rust reference into `from` exists.
    pub unsafe fn move_pages(
        &self,
        to: usize,
        from: usize,
        bytes: usize,
        wake: bool,
    ) -> (usize, io::Result<()>) {
        self.transfer(IOC_MOVE, to, from, bytes, if wake { 0 } else { MODE_DONTWAKE })
    }

    fn transfer(
        &self,
        ioctl: u64,
        to: usize,
        from: usize,
        bytes: usize,
        mode: u64,
    ) -> (usize, io::Result<()>) {
        let mut argument = Transfer { to: to as u64, from: from as u64, bytes: bytes as u64, mode, done: 0 };
        // SAFETY: `argument` outlives the call; our callers' contracts cover the two ranges.
        let result = self.result(unsafe { libc::ioctl(self.fd.as_raw_fd(), ioctl as _, &mut argument) });
        // A negative `done` is an errno, not a count.
        (argument.done.max(0) as usize, result)
    }

    /// Maps the shared zero page at missing addresses.
    ///
    /// # Safety
    /// The caller owns the range, and zero is what a reader must see there.
    pub unsafe fn zero(&self, start: usize, bytes: usize) -> io::Result<()> {
        let mut argument = RangeMode { start: start as u64, bytes: bytes as u64, mode: 0, done: 0 };
        // SAFETY: `argument` outlives the call; the caller owns the range.
        self.result(unsafe { libc::ioctl(self.fd.as_raw_fd(), IOC_ZEROPAGE as _, &mut argument) })
    }

    /// Write-protects a range, or lifts the protection.
    ///
    /// # Safety
    /// The caller owns the range and serves write-protect faults in it.
    pub unsafe fn write_protect(&self, start: usize, bytes: usize, protect: bool) -> io::Result<()> {
        let mode = if protect { WRITEPROTECT_WP } else { 0 };
        let mut argument = RangeMode { start: start as u64, bytes: bytes as u64, mode, done: 0 };
        // SAFETY: WRITEPROTECT reads the first three fields; the caller owns the range.
        self.result(unsafe { libc::ioctl(self.fd.as_raw_fd(), IOC_WRITEPROTECT as _, &mut argument) })
    }

    /// Makes missing pages raise SIGBUS for ever.
    ///
    /// # Safety
    /// The caller owns the range.
    pub unsafe fn poison(&self, start: usize, bytes: usize) -> io::Result<()> {
        let mut argument = RangeMode { start: start as u64, bytes: bytes as u64, mode: 0, done: 0 };
        // SAFETY: `argument` outlives the call; the caller owns the range.
        self.result(unsafe { libc::ioctl(self.fd.as_raw_fd(), IOC_POISON as _, &mut argument) })
    }

    fn result(&self, value: libc::c_int) -> io::Result<()> {
        if value < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
