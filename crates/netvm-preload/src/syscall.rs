//! syscall(2): calls by number do what the functions of their names do here.

use crate::sys::{self, raw};
use crate::{direct, kept, maps, privileges, rings, run, spawn};
use std::ffi::{c_int, c_long, c_uint, c_void};

/// syscall(2): what concerns far memory goes to the functions of those names, which call the kernel where it does not; everything else is the
/// program's own business. So are new mappings: they stay local, as allocators hide them from whoever owns mmap(2).
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
    let address = a as *mut c_void;
    // Arguments that the program has not passed are whatever is in their registers, and not looked at.
    // SAFETY: the program's own call. Kernel and C library pass the same arguments to all of these.
    let result = unsafe {
        match number {
            libc::SYS_mmap if d as c_int & libc::MAP_FIXED != 0 => {
                maps::mmap(address, b, c as c_int, d as c_int, e as c_int, f as i64) as isize
            }
            libc::SYS_mremap => maps::mremap(address, b, c, d as c_int, e as *mut c_void) as isize,
            libc::SYS_munmap => maps::munmap(address, b) as isize,
            libc::SYS_mprotect => maps::mprotect(address, b, c as c_int) as isize,
            libc::SYS_pkey_mprotect => maps::pkey_mprotect(address, b, c as c_int, d as c_int) as isize,
            libc::SYS_madvise => maps::madvise(address, b, c as c_int) as isize,
            libc::SYS_process_madvise => {
                maps::process_madvise(a as c_int, b as *const libc::iovec, c, d as c_int, e as c_uint)
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
            libc::SYS_io_uring_setup if run::is_routed() => {
                sys::as_in_c(rings::set_up(a as c_uint, b as *mut rings::Params))
            }
            libc::SYS_io_uring_register if run::is_routed() => {
                sys::as_in_c(rings::register(a, b as u32, c, d))
            }
            _ => {
                match number {
                    libc::SYS_sched_getaffinity => spawn::release(),
                    libc::SYS_prctl => privileges::before_prctl(a as c_int),
                    libc::SYS_setuid
                    | libc::SYS_setreuid
                    | libc::SYS_setresuid
                    | libc::SYS_setgid
                    | libc::SYS_setregid
                    | libc::SYS_setresgid
                    | libc::SYS_setgroups
                    | libc::SYS_chroot
                    | libc::SYS_capset
                    | libc::SYS_seccomp
                    | libc::SYS_landlock_restrict_self => privileges::before_less(),
                    _ => {}
                }
                let arguments = [a, b, c, d, e, f];
                direct::by_number(number, arguments).unwrap_or_else(|| sys::as_in_c(raw(number, arguments)))
            }
        }
    };
    result as c_long
}
