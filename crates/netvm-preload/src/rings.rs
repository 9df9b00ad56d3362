//! io_uring: rings in which nothing is sent without a copy.
//!
//! A socket that is given pages without a copy refers to them, unseen by the pager, which moves them away: wrong bytes would be sent. And nobody
//! would see madvise(2) by a ring. So each ring begins disabled, gets *restrictions* (`IORING_REGISTER_RESTRICTIONS`, Linux 5.10) that
//! allow everything but these operations, and is enabled then: they end with EACCES, and a probe says that they are not there.
//!
//! Where pages travel by copy (before Linux 6.8) there are no rings: what they write into pages that are pinned would be lost (`direct.rs`).
//!
//! Two ways lead to a ring: syscall(2), and liburing, which makes its system calls by itself. Who has neither in a library of its own (Go, a
//! static liburing) is not seen.

use crate::direct;
use crate::run;
use crate::sys::raw;
use crate::tls::Internal;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU8, Ordering};

/// `IORING_OP_MADVISE`, `IORING_OP_SEND_ZC`, `IORING_OP_SENDMSG_ZC`.
const FORBIDDEN: [u8; 3] = [25, 47, 48];

const R_DISABLED: u32 = 1 << 6;
const REGISTERED_FD_ONLY: u32 = 1 << 15;
const USE_REGISTERED_RING: u32 = 1 << 31;
const REGISTER_PROBE: u32 = 8;
const REGISTER_RESTRICTIONS: u32 = 11;
const REGISTER_ENABLE_RINGS: u32 = 12;
/// More kinds of registration than any kernel has.
const REGISTER_OPS_MAX: u8 = 96;
const OP_SUPPORTED: u16 = 1;
const OPS: usize = 256;
/// Words of the whole `struct io_uring_params`.
const PARAMS_WORDS: usize = 30;

/// `struct io_uring_params`, as far as it matters here.
#[repr(C)]
pub struct Params {
    entries: [u32; 2],
    flags: u32,
}

/// `struct io_uring_probe`.
#[repr(C)]
struct Probe {
    last_op: u8,
    ops_len: u8,
    reserved: [u16; 7],
    ops: [ProbeOp; OPS],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ProbeOp {
    op: u8,
    reserved: u8,
    flags: u16,
    reserved2: u32,
}

/// `struct io_uring_restriction`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Restriction {
    kind: u16,
    value: u8,
    reserved: [u8; 13],
}

const ALLOW_REGISTER: u16 = 0;
const ALLOW_OP: u16 = 1;
const ALLOW_FLAGS: u16 = 2;

/// Kinds of registration that this kernel knows, 0 until it has been asked.
static REGISTER_OPS: AtomicU8 = AtomicU8::new(0);

/// io_uring_setup(2), of which a ring comes that has restrictions.
///
/// # Safety
/// As of the call.
pub(crate) unsafe fn set_up(entries: c_uint, params: *mut Params) -> isize {
    let plain = [entries as usize, params as usize, 0, 0, 0, 0];
    if direct::will_be_by_copy() {
        run::refused();
        return -libc::ENOSYS as isize;
    }
    if params.is_null() {
        // SAFETY: the kernel refuses it.
        return unsafe { raw(libc::SYS_io_uring_setup, plain) };
    }
    // SAFETY: the program's own call, which has the kernel read and write this.
    unsafe {
        let flags = (&raw mut (*params).flags).cast::<u32>();
        let asked = flags.read_unaligned();
        if asked & R_DISABLED != 0 {
            // The program enables it, and perhaps has restrictions of its own.
            return raw(libc::SYS_io_uring_setup, plain);
        }
        flags.write_unaligned(asked | R_DISABLED);
        let ring = raw(libc::SYS_io_uring_setup, plain);
        if ring < 0 {
            flags.write_unaligned(asked);
            // Before Linux 5.10 there is nothing to forbid either.
            return if ring == -libc::EINVAL as isize { raw(libc::SYS_io_uring_setup, plain) } else { ring };
        }
        flags.write_unaligned(flags.read_unaligned() & !R_DISABLED);
        let by_number = if asked & REGISTERED_FD_ONLY != 0 { USE_REGISTERED_RING } else { 0 };
        match begin(ring as usize, by_number) {
            Ok(()) => ring,
            Err(errno) => {
                if by_number == 0 {
                    raw(libc::SYS_close, [ring as usize, 0, 0, 0, 0, 0]);
                }
                -errno as isize
            }
        }
    }
}

/// io_uring_register(2).
///
/// # Safety
/// As of the call.
pub(crate) unsafe fn register(ring: usize, operation: u32, argument: usize, count: usize) -> isize {
    // SAFETY: the program's own call.
    let call = |operation: u32| unsafe {
        raw(libc::SYS_io_uring_register, [ring, operation as usize, argument, count, 0, 0])
    };
    match operation & !USE_REGISTERED_RING {
        // It began disabled because the program wanted that. With restrictions of its own already this changes nothing.
        REGISTER_ENABLE_RINGS => {
            restrict(ring, operation & USE_REGISTERED_RING);
            call(operation)
        }
        REGISTER_PROBE => {
            let result = call(operation);
            if result >= 0 {
                for op in FORBIDDEN.into_iter().filter(|&op| usize::from(op) < count) {
                    let at = offset_of!(Probe, ops) + usize::from(op) * size_of::<ProbeOp>();
                    let flags = (argument + at + offset_of!(ProbeOp, flags)) as *mut u16;
                    // SAFETY: the kernel has just filled in `count` operations there.
                    unsafe { flags.write_unaligned(flags.read_unaligned() & !OP_SUPPORTED) };
                }
            }
            result
        }
        _ => call(operation),
    }
}

/// Restricts a new ring, and enables it.
fn begin(ring: usize, by_number: u32) -> Result<(), i32> {
    let restricted = restrict(ring, by_number);
    if restricted != 0 {
        return Err(-restricted as i32);
    }
    let enable = (REGISTER_ENABLE_RINGS | by_number) as usize;
    // SAFETY: no argument.
    match unsafe { raw(libc::SYS_io_uring_register, [ring, enable, 0, 0, 0, 0]) } {
        0 => Ok(()),
        error => Err(-error as i32),
    }
}

/// Allows everything that this kernel has, but what is forbidden. Returns 0, or a negative errno.
fn restrict(ring: usize, by_number: u32) -> isize {
    // SAFETY: integers; zeros are valid.
    let mut probe: Probe = unsafe { std::mem::zeroed() };
    let operation = (REGISTER_PROBE | by_number) as usize;
    // SAFETY: the kernel writes at most OPS operations behind the head.
    let probed =
        unsafe { raw(libc::SYS_io_uring_register, [ring, operation, (&raw mut probe) as usize, OPS, 0, 0]) };
    if probed < 0 {
        return probed;
    }
    let known = REGISTER_OPS.load(Ordering::Relaxed);
    let (first, last) =
        if known > 0 { (known, known) } else { (REGISTER_OPS_MAX, REGISTER_ENABLE_RINGS as u8) };
    let mut all = [Restriction { kind: ALLOW_FLAGS, value: u8::MAX, reserved: [0; 13] }; 1 + 2 * OPS];
    let mut result = 0;
    // The kernel does not tell how many kinds of registration it has, but refuses those that it has not.
    for ops in (last..=first).rev() {
        let mut count = 1;
        let allowed = (0..ops).map(|value| (ALLOW_REGISTER, value));
        let allowed = allowed
            .chain((0..=probe.last_op).filter(|op| !FORBIDDEN.contains(op)).map(|value| (ALLOW_OP, value)));
        for (kind, value) in allowed {
            all[count] = Restriction { kind, value, reserved: [0; 13] };
            count += 1;
        }
        let operation = (REGISTER_RESTRICTIONS | by_number) as usize;
        // SAFETY: the kernel reads `count` of them.
        result = unsafe {
            raw(libc::SYS_io_uring_register, [ring, operation, all.as_ptr() as usize, count, 0, 0])
        };
        if result == 0 {
            REGISTER_OPS.store(ops, Ordering::Relaxed);
            return 0;
        }
        if result != -libc::EINVAL as isize {
            break;
        }
    }
    result
}

/// As of liburing 2.3: a system call that tells of errors by its result.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_uring_setup(entries: c_uint, params: *mut c_void) -> c_int {
    // SAFETY: the program's own call.
    unsafe {
        if run::is_routed() {
            return set_up(entries, params.cast()) as c_int;
        }
        raw(libc::SYS_io_uring_setup, [entries as usize, params as usize, 0, 0, 0, 0]) as c_int
    }
}

/// `struct io_uring` of liburing 2, whose layout is fixed, as far as it matters here.
#[repr(C)]
pub struct Ring {
    queues: [u64; 24],
    flags: u32,
    fd: c_int,
    features: u32,
    enter_fd: c_int,
}

type InitParams = unsafe extern "C" fn(c_uint, *mut Ring, *mut Params) -> c_int;
type InitMemory = unsafe extern "C" fn(c_uint, *mut Ring, *mut Params, *mut c_void, usize) -> c_int;
type Exit = unsafe extern "C" fn(*mut Ring);

/// The function of liburing behind the one of the same name here, if the program was linked with one.
fn next(name: &CStr) -> Option<*mut c_void> {
    let _internal = Internal::enter();
    // SAFETY: the name is a C string; dlsym returns null or the next definition of the symbol.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Has liburing make a ring, as it is asked for, and restricts it.
///
/// # Safety
/// `ring` and `params` are those of a call to liburing, which `make` passes on.
unsafe fn make(ring: *mut Ring, params: *mut Params, make: impl Fn() -> Option<c_int>) -> c_int {
    if direct::will_be_by_copy() {
        run::refused();
        return -libc::ENOSYS;
    }
    let make = || make().unwrap_or(-libc::ENOSYS);
    // SAFETY: the program's own call, which has the kernel read and write this.
    unsafe {
        let flags = (&raw mut (*params).flags).cast::<u32>();
        let asked = flags.read_unaligned();
        if !run::is_routed() || asked & R_DISABLED != 0 {
            return make();
        }
        flags.write_unaligned(asked | R_DISABLED);
        let made = make();
        flags.write_unaligned(flags.read_unaligned() & !R_DISABLED);
        if made == -libc::EINVAL {
            // Before Linux 5.10 there is nothing to forbid either.
            return make();
        }
        if made < 0 {
            return made;
        }
        let (fd, by_number) = match asked & REGISTERED_FD_ONLY {
            0 => ((&raw const (*ring).fd).read_unaligned(), 0),
            _ => ((&raw const (*ring).enter_fd).read_unaligned(), USE_REGISTERED_RING),
        };
        let Err(errno) = begin(fd as usize, by_number) else { return made };
        if let Some(exit) = next(c"io_uring_queue_exit") {
            std::mem::transmute::<*mut c_void, Exit>(exit)(ring);
        }
        -errno
    }
}

/// Of liburing.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_uring_queue_init_params(
    entries: c_uint,
    ring: *mut Ring,
    params: *mut Params,
) -> c_int {
    let real = next(c"io_uring_queue_init_params");
    // SAFETY: the program's own call, to a function of this type.
    unsafe {
        make(ring, params, || {
            Some(std::mem::transmute::<*mut c_void, InitParams>(real?)(entries, ring, params))
        })
    }
}

/// Of liburing.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_uring_queue_init(entries: c_uint, ring: *mut Ring, flags: c_uint) -> c_int {
    let mut params = [0_u32; PARAMS_WORDS];
    params[offset_of!(Params, flags) / 4] = flags;
    // SAFETY: the program's own call, with the parameters that liburing would use.
    unsafe { io_uring_queue_init_params(entries, ring, params.as_mut_ptr().cast()) }
}

/// Of liburing 2.5.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_uring_queue_init_mem(
    entries: c_uint,
    ring: *mut Ring,
    params: *mut Params,
    memory: *mut c_void,
    bytes: usize,
) -> c_int {
    let real = next(c"io_uring_queue_init_mem");
    // SAFETY: the program's own call, to a function of this type.
    unsafe {
        make(ring, params, || {
            let real = std::mem::transmute::<*mut c_void, InitMemory>(real?);
            Some(real(entries, ring, params, memory, bytes))
        })
    }
}
