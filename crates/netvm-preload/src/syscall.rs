//! syscall(2): calls by number do what the functions of their names do here.

use crate::sys::{self, PAGE_BYTES, raw};
use crate::{kept, maps, rings, run, spawn};
use std::ffi::{c_int, c_long, c_uint, c_void};

/// The arguments of a call.
type Arguments = [usize; 6];

/// syscall(2): calls that concern far memory go to the functions of those names; everything else is the program's own business.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    // Arguments that the program has not passed are whatever is in their registers, and not looked at.
    let all = [a, b, c, d, e, f];
    // SAFETY: the program's own call.
    unsafe {
        match number {
            libc::SYS_sched_getaffinity => spawn::release(),
            libc::SYS_io_uring_setup if run::is_routed() => {
                return sys::as_in_c(rings::set_up(a as c_uint, b as *mut rings::Params)) as c_long;
            }
            libc::SYS_io_uring_register if run::is_routed() => {
                return sys::as_in_c(rings::register(a, b as u32, c, d)) as c_long;
            }
            _ if run::is_routed() && concerns_far_memory(number, &all) => {
                if let Some(result) = by_name(number, all) {
                    return result as c_long;
                }
            }
            _ => {}
        }
        sys::as_in_c(raw(number, all)) as c_long
    }
}

/// Whether the function of that name would do something else than the kernel. New mappings by number are none: they stay local, as
/// allocators hide them from whoever owns mmap(2).
fn concerns_far_memory(number: c_long, &[a, b, c, d, e, _]: &Arguments) -> bool {
    match number {
        libc::SYS_munmap | libc::SYS_mprotect | libc::SYS_madvise | libc::SYS_mlock | libc::SYS_mlock2 => {
            run::touches_far(a, b)
        }
        libc::SYS_mmap => d as c_int & libc::MAP_FIXED != 0 && run::touches_far(a, b),
        libc::SYS_mremap => {
            run::touches_far(a, b.max(PAGE_BYTES))
                || d as c_int & libc::MREMAP_FIXED != 0 && run::touches_far(e, c)
        }
        libc::SYS_mlockall
        | libc::SYS_process_madvise
        | libc::SYS_ioctl
        | libc::SYS_vmsplice
        | libc::SYS_setsockopt => true,
        _ => false,
    }
}

/// What it returns, with errno; `None`: it has no function here.
///
/// # Safety
/// As of the call.
unsafe fn by_name(number: c_long, [a, b, c, d, e, f]: Arguments) -> Option<isize> {
    let address = a as *mut c_void;
    // SAFETY: the caller's contract. Kernel and C library pass the same arguments to all of these.
    Some(unsafe {
        match number {
            libc::SYS_mmap => maps::mmap(address, b, c as c_int, d as c_int, e as c_int, f as i64) as isize,
            libc::SYS_mremap => maps::mremap(address, b, c, d as c_int, e as *mut c_void) as isize,
            libc::SYS_munmap => maps::munmap(address, b) as isize,
            libc::SYS_mprotect => maps::mprotect(address, b, c as c_int) as isize,
            libc::SYS_madvise => maps::madvise(address, b, c as c_int) as isize,
            libc::SYS_process_madvise => {
                let parts = b as *const libc::iovec;
                maps::process_madvise(a as c_int, parts, c, d as c_int, e as c_uint)
            }
            libc::SYS_mlock => maps::mlock(address, b) as isize,
            libc::SYS_mlock2 => maps::mlock2(address, b, c as c_uint) as isize,
            libc::SYS_mlockall => maps::mlockall(a as c_int) as isize,
            libc::SYS_ioctl => kept::ioctl(a as c_int, b as _, c as *mut c_void) as isize,
            libc::SYS_vmsplice => kept::vmsplice(a as c_int, b as *const libc::iovec, c, d as c_uint),
            libc::SYS_setsockopt => {
                kept::setsockopt(a as c_int, b as c_int, c as c_int, d as *const c_void, e as libc::socklen_t)
                    as isize
            }
            _ => return None,
        }
    })
}
