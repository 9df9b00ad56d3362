//! Calls after which the kernel, or another pager of the program's own, keeps pages of memory, as if they stayed where they are.
//!
//! The pager sees pages that are pinned (O_DIRECT, io_uring, process_vm_readv): the kernel refuses to move them. It does not see those
//! that a pipe or a socket merely refers to.

use crate::direct;
use crate::given::given;
use crate::heap::HEAP;
use crate::run;
use crate::space::SPACE;
use crate::sys::{self, PAGE_BYTES};
use crate::tls::Internal;
use std::ffi::{c_int, c_uint, c_ulong, c_void};
use std::mem::MaybeUninit;

/// `_IOWR(0xAA, 0, struct uffdio_register)`.
const UFFDIO_REGISTER: c_ulong = 0xC020_AA00;

/// `struct uffdio_range`, with which `struct uffdio_register` begins.
#[repr(C)]
#[derive(Clone, Copy)]
struct UffdRange {
    start: u64,
    bytes: u64,
}

/// ioctl(2): far memory that the program wants to page by itself becomes local memory, since only one can page it.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if request as u32 as c_ulong == UFFDIO_REGISTER && run::is_routed() {
        let mut room = [MaybeUninit::<UffdRange>::uninit()];
        // SAFETY: the program's own call, which has the kernel read this.
        let range = unsafe { given(argument.cast(), &mut room) };
        let made = range.map_or(Ok(()), |range| make_local(range[0].start as usize, range[0].bytes as usize));
        if let Err(errno) = made {
            sys::set_errno(errno);
            return -1;
        }
    }
    // SAFETY: the program's own call.
    unsafe {
        sys::as_in_c(sys::raw(libc::SYS_ioctl, [fd as usize, request as usize, argument as usize, 0, 0, 0]))
            as c_int
    }
}

/// The pages of a range that is in use stay local from now on, as far as there is memory.
pub(crate) fn keep_local(start: usize, bytes: usize) {
    let first = start / PAGE_BYTES * PAGE_BYTES;
    let _ =
        sys::round_up(start.saturating_add(bytes) - first, PAGE_BYTES).map(|bytes| make_local(first, bytes));
}

/// The far parts of a range. What is no proper range is left to the kernel to refuse.
fn make_local(start: usize, bytes: usize) -> Result<(), i32> {
    let proper = (start | bytes).is_multiple_of(PAGE_BYTES) && start.checked_add(bytes).is_some();
    if !proper || !run::touches_far(start, bytes) {
        return Ok(());
    }
    let _internal = Internal::enter();
    let far = run::far();
    let area = far.area();
    let (start, end) = (start.max(area.start), (start + bytes).min(area.end));
    // A block of malloc's, or what the program has mapped.
    HEAP.with(|heap| heap.make_local(far, start, end - start))
        .or_else(|_| SPACE.with(|space| space.make_local(far, start, end - start)))
}

/// vmsplice(2) into a pipe: what is far is copied. The pipe would refer to pages that leave.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmsplice(
    fd: c_int,
    parts: *const libc::iovec,
    count: usize,
    flags: c_uint,
) -> isize {
    // SAFETY: F_GETPIPE_SZ and F_GETFL take no argument.
    let is_pipe = || unsafe {
        let access = libc::fcntl(fd, libc::F_GETFL) & libc::O_ACCMODE;
        (access == libc::O_WRONLY || access == libc::O_RDWR) && libc::fcntl(fd, libc::F_GETPIPE_SZ) >= 0
    };
    // SAFETY: the program's own call.
    let has_far = || unsafe { direct::some_far(parts, count) };
    let errno = sys::errno();
    if !run::is_routed() || !has_far() || !is_pipe() {
        sys::set_errno(errno);
        // SAFETY: the program's own call.
        return unsafe { really_splice(fd, parts, count, flags) };
    }
    sys::set_errno(errno);
    // SAFETY: as above.
    unsafe { fill_pipe(fd, parts, count, flags) }
}

/// # Safety
/// As vmsplice.
unsafe fn really_splice(fd: c_int, parts: *const libc::iovec, count: usize, flags: c_uint) -> isize {
    // SAFETY: the caller's contract.
    let result =
        unsafe { sys::raw(libc::SYS_vmsplice, [fd as usize, parts as usize, count, flags as usize, 0, 0]) };
    sys::as_in_c(result)
}

/// Copies as much as there is room for, and waits for some room first unless told not to: what vmsplice does, with writes.
///
/// # Safety
/// As vmsplice.
unsafe fn fill_pipe(fd: c_int, parts: *const libc::iovec, count: usize, flags: c_uint) -> isize {
    loop {
        if flags & libc::SPLICE_F_NONBLOCK == 0 {
            let mut entry = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
            // SAFETY: one entry that outlives the call.
            if unsafe { libc::poll(&mut entry, 1, -1) } < 0 {
                return -1;
            }
        }
        // SAFETY: the program's own memory, as in its own call.
        let written = unsafe { libc::pwritev2(fd, parts, count as c_int, -1, libc::RWF_NOWAIT) };
        if written < 0 && sys::errno() == libc::EOPNOTSUPP {
            // Before Linux 6.4. There pages travel by copy, and those that a pipe refers to stay as they are.
            // SAFETY: the program's own call.
            return unsafe { really_splice(fd, parts, count, flags) };
        }
        if written >= 0 || sys::errno() != libc::EAGAIN || flags & libc::SPLICE_F_NONBLOCK != 0 {
            return written;
        }
    }
}

/// setsockopt(2): MSG_ZEROCOPY is refused, as by a kind of socket that has none. A socket would refer to pages that leave.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    bytes: libc::socklen_t,
) -> c_int {
    if level == libc::SOL_SOCKET && name == libc::SO_ZEROCOPY && run::is_routed() {
        sys::set_errno(libc::EOPNOTSUPP);
        return -1;
    }
    // SAFETY: the program's own call.
    unsafe {
        let arguments = [fd as usize, level as usize, name as usize, value as usize, bytes as usize, 0];
        sys::as_in_c(sys::raw(libc::SYS_setsockopt, arguments)) as c_int
    }
}

/// Brings far memory in by touching it: for debuggers, whose own reads of pages that are not here fail. Returns how many bytes.
///
/// In gdb: `call (long)netvm_touch(pointer, bytes)`.
///
/// # Safety
/// The range is readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netvm_touch(start: *const u8, bytes: usize) -> isize {
    for offset in (0..bytes).step_by(PAGE_BYTES).chain(bytes.checked_sub(1)) {
        // SAFETY: the caller's contract.
        unsafe { start.add(offset).read_volatile() };
    }
    bytes as isize
}
