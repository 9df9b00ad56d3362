//! What devices and other processes write straight into pages, where pages travel by copy (before Linux 6.8).
//!
//! There the pager does not see that the kernel has pinned a page: it copies the page and lets it go, and what a device writes into it afterwards is
//! lost. So nothing is written into far memory but by way of the page tables: reads of files that are open with O_DIRECT go into a buffer that is
//! local, and are copied from there. Asynchronous ones, and rings, are refused as by kernels that have none: programs do without.

use crate::real::jumps;
use crate::run;
use crate::sys::{self, raw};
use netvm_sys::uffd;
use std::ffi::{c_int, c_long, c_ulong, c_void};
use std::sync::atomic::{AtomicU8, Ordering};

/// Bytes that are read at a time, a multiple of what any device has as a block.
const BUFFER_BYTES: usize = 1 << 20;

/// The functions defined here.
#[allow(non_upper_case_globals, reason = "named as the functions are")]
mod real {
    use crate::real::{Real, reals};

    reals! {
        read = c"read",
        pread = c"pread",
        pread64 = c"pread64",
        read_chk = c"__read_chk",
        pread_chk = c"__pread_chk",
        pread64_chk = c"__pread64_chk",
        readv = c"readv",
        preadv = c"preadv",
        preadv64 = c"preadv64",
        preadv2 = c"preadv2",
        preadv64v2 = c"preadv64v2",
        aio_read = c"aio_read",
        aio_read64 = c"aio_read64",
        lio_listio = c"lio_listio",
        lio_listio64 = c"lio_listio64",
    }
}

/// Finds all of them: a child of vfork(2) must not look for them itself.
pub(crate) fn set_up() {
    for real in real::ALL {
        real.find();
    }
}

/// Whether pages of this process travel by copy, if it has far ones.
pub(crate) fn is_by_copy() -> bool {
    const UNKNOWN: u8 = 0;
    const BY_COPY: u8 = 1;
    const BY_MOVE: u8 = 2;
    static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);
    if !run::is_routed() || !run::has_pager() {
        return false;
    }
    let mut known = KNOWN.load(Ordering::Relaxed);
    if known == UNKNOWN {
        // Who may not use it has no far memory.
        let moves = uffd::probe().map_or(true, |(features, _)| features & uffd::FEATURE_MOVE != 0);
        known = if moves { BY_MOVE } else { BY_COPY };
        KNOWN.store(known, Ordering::Relaxed);
    }
    known == BY_COPY
}

fn is_far(buffer: *const c_void, bytes: usize) -> bool {
    bytes > 0 && run::touches_far(buffer as usize, bytes)
}

/// Whether a device may write into what is read to, and that is far.
fn is_direct(file: c_int) -> bool {
    // SAFETY: F_GETFL takes no argument.
    let flags = unsafe { raw(libc::SYS_fcntl, [file as usize, libc::F_GETFL as usize, 0, 0, 0, 0]) };
    flags >= 0 && flags as c_int & libc::O_DIRECT != 0 && is_by_copy()
}

/// Whether some of these is far. What the kernel refuses is not looked at.
unsafe fn some_far(parts: *const libc::iovec, count: usize) -> bool {
    // SAFETY: the program's own call, which has the kernel read these.
    let far = |index| unsafe {
        let part = parts.add(index).read_unaligned();
        is_far(part.iov_base, part.iov_len)
    };
    !parts.is_null() && count <= libc::UIO_MAXIOV as usize && (0..count).any(far)
}

/// Memory of this process for one read.
struct Buffer(usize);

impl Buffer {
    /// A negative errno where there is none.
    fn new() -> Result<Self, isize> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        unsafe { sys::mmap(0, BUFFER_BYTES, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) }
            .map(Self)
            .map_err(|errno| -errno as isize)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody else's.
        unsafe { raw(libc::SYS_munmap, [self.0, BUFFER_BYTES, 0, 0, 0, 0]) };
    }
}

/// Where a read is from.
#[derive(Clone, Copy)]
struct From {
    file: c_int,
    /// -1: where the file is.
    offset: i64,
    flags: c_int,
}

impl From {
    /// # Safety
    /// `bytes` at `to` are the program's, to be written to.
    unsafe fn read(self, to: usize, bytes: usize, done: usize) -> isize {
        let part = libc::iovec { iov_base: to as *mut c_void, iov_len: bytes };
        let offset = if self.offset < 0 { -1 } else { self.offset + done as i64 };
        let arguments =
            [self.file as usize, (&raw const part) as usize, 1, offset as usize, 0, self.flags as usize];
        // SAFETY: the caller's promise.
        unsafe { raw(libc::SYS_preadv2, arguments) }
    }
}

/// Reads into several places, one after the other, by way of local memory. A negative errno is an error.
///
/// # Safety
/// As of readv(2).
unsafe fn read_by_copy(from: From, parts: impl Iterator<Item = libc::iovec>) -> isize {
    let buffer = match Buffer::new() {
        Ok(buffer) => buffer,
        Err(error) => return error,
    };
    let mut done = 0;
    for part in parts {
        let mut filled = 0;
        while filled < part.iov_len {
            let bytes = (part.iov_len - filled).min(BUFFER_BYTES);
            // SAFETY: the buffer has room for so much; so has the program's memory, by its contract with readv(2).
            let got = unsafe {
                let got = from.read(buffer.0, bytes, done);
                let to = part.iov_base.cast::<u8>().add(filled);
                to.copy_from_nonoverlapping(buffer.0 as *const u8, got.max(0) as usize);
                got
            };
            if got < 0 {
                return if done > 0 { done as isize } else { got };
            }
            (done, filled) = (done + got as usize, filled + got as usize);
            if (got as usize) < bytes {
                return done as isize;
            }
        }
    }
    done as isize
}

/// # Safety
/// As of preadv2(2).
unsafe fn readv_by_copy(from: From, parts: *const libc::iovec, count: c_int) -> isize {
    // SAFETY: the caller's contract; `some_far` has looked at all of them.
    let each = (0..count as usize).map(|index| unsafe { parts.add(index).read_unaligned() });
    // SAFETY: the caller's contract.
    sys::as_in_c(unsafe { read_by_copy(from, each) })
}

unsafe extern "C" fn direct_read(file: c_int, buffer: *mut c_void, bytes: usize) -> isize {
    let part = libc::iovec { iov_base: buffer, iov_len: bytes };
    // SAFETY: the program's own call.
    unsafe { readv_by_copy(From { file, offset: -1, flags: 0 }, &raw const part, 1) }
}

unsafe extern "C" fn direct_pread(file: c_int, buffer: *mut c_void, bytes: usize, offset: i64) -> isize {
    let part = libc::iovec { iov_base: buffer, iov_len: bytes };
    // SAFETY: the program's own call.
    unsafe { direct_preadv2(file, &raw const part, 1, offset, 0, false) }
}

unsafe extern "C" fn direct_pread_chk(
    file: c_int,
    buffer: *mut c_void,
    bytes: usize,
    _: usize,
    offset: i64,
) -> isize {
    // SAFETY: the program's own call.
    unsafe { direct_pread(file, buffer, bytes, offset) }
}

unsafe extern "C" fn direct_readv(file: c_int, parts: *const libc::iovec, count: c_int) -> isize {
    // SAFETY: the program's own call.
    unsafe { readv_by_copy(From { file, offset: -1, flags: 0 }, parts, count) }
}

unsafe extern "C" fn direct_preadv(
    file: c_int,
    parts: *const libc::iovec,
    count: c_int,
    offset: i64,
) -> isize {
    // SAFETY: the program's own call.
    unsafe { direct_preadv2(file, parts, count, offset, 0, false) }
}

unsafe extern "C" fn direct_preadv64v2(
    file: c_int,
    parts: *const libc::iovec,
    count: c_int,
    offset: i64,
    flags: c_int,
) -> isize {
    // SAFETY: the program's own call.
    unsafe { direct_preadv2(file, parts, count, offset, flags, true) }
}

/// `may_be_here`: -1 stands for where the file is.
///
/// # Safety
/// As of preadv2(2).
unsafe fn direct_preadv2(
    file: c_int,
    parts: *const libc::iovec,
    count: c_int,
    offset: i64,
    flags: c_int,
    may_be_here: bool,
) -> isize {
    if offset < 0 && !(offset == -1 && may_be_here) {
        sys::set_errno(libc::EINVAL);
        return -1;
    }
    // SAFETY: the caller's contract.
    unsafe { readv_by_copy(From { file, offset, flags }, parts, count) }
}

extern "C" fn refuse() -> c_int {
    sys::set_errno(libc::ENOSYS);
    -1
}

/// Which functions read straight into memory: those of these types.
macro_rules! reads_to_one {
    ($($before:ident = $name:ident, $direct:ident;)*) => {
        $(extern "C" fn $before(file: c_int, buffer: *mut c_void, bytes: usize) -> *const c_void {
            if is_far(buffer, bytes) && is_direct(file) { $direct as *const c_void } else { real::$name.address() }
        })*
    };
}
reads_to_one! {
    before_read = read, direct_read;
    before_pread = pread, direct_pread;
    before_pread64 = pread64, direct_pread;
}

macro_rules! checked_reads {
    ($($before:ident = $name:ident, $direct:ident;)*) => {
        $(extern "C" fn $before(file: c_int, buffer: *mut c_void, bytes: usize, limit: usize) -> *const c_void {
            // Beyond the limit the C library ends the program.
            let direct = bytes <= limit && is_far(buffer, bytes) && is_direct(file);
            if direct { $direct as *const c_void } else { real::$name.address() }
        })*
    };
}
checked_reads! {
    before_read_chk = read_chk, direct_read;
    before_pread_chk = pread_chk, direct_pread_chk;
    before_pread64_chk = pread64_chk, direct_pread_chk;
}

macro_rules! reads_to_several {
    ($($before:ident = $name:ident, $direct:ident;)*) => {
        $(extern "C" fn $before(file: c_int, parts: *const libc::iovec, count: c_int) -> *const c_void {
            // SAFETY: the program's own call.
            let direct = count > 0 && unsafe { some_far(parts, count as usize) } && is_direct(file);
            if direct { $direct as *const c_void } else { real::$name.address() }
        })*
    };
}
reads_to_several! {
    before_readv = readv, direct_readv;
    before_preadv = preadv, direct_preadv;
    before_preadv64 = preadv64, direct_preadv;
    before_preadv2 = preadv2, direct_preadv64v2;
    before_preadv64v2 = preadv64v2, direct_preadv64v2;
}

/// Of a read that a thread of the C library would do.
unsafe fn is_refused(block: *const libc::aiocb) -> bool {
    // SAFETY: the program's own call, to a function that reads this.
    !block.is_null()
        && unsafe {
            is_far((*block).aio_buf as *const c_void, (*block).aio_nbytes) && is_direct((*block).aio_fildes)
        }
}

macro_rules! reads_of_threads {
    ($($before:ident = $name:ident;)*) => {
        $(extern "C" fn $before(block: *const libc::aiocb) -> *const c_void {
            // SAFETY: the program's own call.
            if unsafe { is_refused(block) } { refuse as *const c_void } else { real::$name.address() }
        })*
    };
}
reads_of_threads! {
    before_aio_read = aio_read;
    before_aio_read64 = aio_read64;
}

macro_rules! lists_of_reads {
    ($($before:ident = $name:ident;)*) => {
        $(extern "C" fn $before(_: c_int, blocks: *const *const libc::aiocb, count: c_int) -> *const c_void {
            // SAFETY: the program's own call, to a function that reads these.
            let refused = |index| unsafe {
                let block = *blocks.add(index);
                is_refused(block) && (*block).aio_lio_opcode == libc::LIO_READ
            };
            let refused = !blocks.is_null() && (0..count.max(0) as usize).any(refused);
            if refused { refuse as *const c_void } else { real::$name.address() }
        })*
    };
}
lists_of_reads! {
    before_lio_listio = lio_listio;
    before_lio_listio64 = lio_listio64;
}

jumps! {
    /// read(2).
    read = before_read;
    /// pread(2).
    pread = before_pread;
    /// pread(2).
    pread64 = before_pread64;
    /// read(2), of programs that are built with checks.
    __read_chk = before_read_chk;
    /// pread(2), of programs that are built with checks.
    __pread_chk = before_pread_chk;
    /// pread(2), of programs that are built with checks.
    __pread64_chk = before_pread64_chk;
    /// readv(2).
    readv = before_readv;
    /// preadv(2).
    preadv = before_preadv;
    /// preadv(2).
    preadv64 = before_preadv64;
    /// preadv2(2).
    preadv2 = before_preadv2;
    /// preadv2(2).
    preadv64v2 = before_preadv64v2;
    /// aio_read(3).
    aio_read = before_aio_read;
    /// aio_read(3).
    aio_read64 = before_aio_read64;
    /// lio_listio(3).
    lio_listio = before_lio_listio;
    /// lio_listio(3).
    lio_listio64 = before_lio_listio64;
}

/// By number: `None` where the kernel may do it.
///
/// # Safety
/// As of these calls.
pub(crate) unsafe fn by_number(number: c_long, a: [usize; 6]) -> Option<isize> {
    let file = a[0] as c_int;
    let (to, parts) = (a[1] as *mut c_void, a[1] as *const libc::iovec);
    let to_one = || is_far(to, a[2]) && is_direct(file);
    let several = (1..=libc::UIO_MAXIOV as usize).contains(&a[2]);
    // SAFETY: the program's own call.
    let to_several = || several && unsafe { some_far(parts, a[2]) } && is_direct(file);
    // SAFETY: as above.
    unsafe {
        match number {
            libc::SYS_read => to_one().then(|| direct_read(file, to, a[2])),
            libc::SYS_pread64 => to_one().then(|| direct_pread(file, to, a[2], a[3] as i64)),
            libc::SYS_readv => to_several().then(|| direct_readv(file, parts, a[2] as c_int)),
            libc::SYS_preadv => to_several().then(|| direct_preadv(file, parts, a[2] as c_int, a[3] as i64)),
            libc::SYS_preadv2 => to_several()
                .then(|| direct_preadv64v2(file, parts, a[2] as c_int, a[3] as i64, a[5] as c_int)),
            libc::SYS_io_setup => Some(sys::as_in_c(begin_asynchronous(a[0], a[1]))),
            libc::SYS_process_vm_writev => Some(process_vm_writev(
                a[0] as c_int,
                parts,
                a[2] as c_ulong,
                a[3] as *const libc::iovec,
                a[4] as c_ulong,
                a[5] as c_ulong,
            )),
            _ => None,
        }
    }
}

/// io_setup(2). Returns a negative errno.
unsafe fn begin_asynchronous(most: usize, context: usize) -> isize {
    if is_by_copy() {
        return -libc::ENOSYS as isize;
    }
    // SAFETY: the program's own call.
    unsafe { raw(libc::SYS_io_setup, [most, context, 0, 0, 0, 0]) }
}

/// Of libaio.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_setup(most: c_int, context: *mut c_ulong) -> c_int {
    // SAFETY: the program's own call.
    unsafe { begin_asynchronous(most as usize, context as usize) as c_int }
}

/// Of libaio.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn io_queue_init(most: c_int, context: *mut c_ulong) -> c_int {
    if most <= 0 {
        return -libc::EINVAL;
    }
    // SAFETY: the program's own call, which has the library write this.
    unsafe {
        context.write(0);
        io_setup(most, context)
    }
}

/// process_vm_writev(2): into another process of the run it is refused, as where processes may not debug each other. Into its own memory it is
/// a read of the other side.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn process_vm_writev(
    process: c_int,
    local: *const libc::iovec,
    local_count: c_ulong,
    remote: *const libc::iovec,
    remote_count: c_ulong,
    flags: c_ulong,
) -> isize {
    let (local, locals) = (local as usize, local_count as usize);
    let (remote, remotes) = (remote as usize, remote_count as usize);
    let arguments = [process as usize, local, locals, remote, remotes, flags as usize];
    // SAFETY: the program's own call, in either direction.
    let written = unsafe {
        if !is_by_copy() {
            raw(libc::SYS_process_vm_writev, arguments)
        } else if process == std::process::id() as c_int {
            let swapped = [process as usize, remote, remotes, local, locals, flags as usize];
            raw(libc::SYS_process_vm_readv, swapped)
        } else if run::has_process(process as u32) {
            -libc::EPERM as isize
        } else {
            raw(libc::SYS_process_vm_writev, arguments)
        }
    };
    sys::as_in_c(written)
}
