//! What devices and other processes write straight into pages, where pages travel by copy (before Linux 6.8).
//!
//! There the pager does not see that the kernel has pinned a page: it copies the page and lets it go, and what a device writes into it afterwards is
//! lost. So nothing is written into far memory but by way of the page tables: reads of files that are open with O_DIRECT go into a buffer that is
//! local, and are copied from there. Asynchronous ones, and rings, are refused as by kernels that have none: programs do without.

use crate::given::{Buffer, copy_across, with_parts};
use crate::real::{Real, jumps};
use crate::run;
use crate::sys::{self, raw};
use netvm_sys::uffd;
use std::ffi::{c_int, c_long, c_ulong, c_void};

/// Bytes that are read by one call of the kernel, at most: several move a file's position that is shared more than once.
const BUFFER_BYTES_MAX: usize = 16 << 20;

/// What one call reads at most (`MAX_RW_COUNT`).
const READ_BYTES_MAX: usize = 0x7fff_f000;

/// File systems that may read straight into memory without O_DIRECT: FUSE, 9P, CIFS and SMB2 (`linux/magic.h`).
const DIRECT_FILE_SYSTEMS: [u32; 4] = [0x6573_5546, 0x0102_1997, 0xFF53_4D42, 0xFE53_4D42];

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
        fread = c"fread",
        fread_unlocked = c"fread_unlocked",
        fread_chk = c"__fread_chk",
        fread_unlocked_chk = c"__fread_unlocked_chk",
        aio_read = c"aio_read",
        aio_read64 = c"aio_read64",
        lio_listio = c"lio_listio",
        lio_listio64 = c"lio_listio64",
    }
}

pub(crate) use real::set_up;

/// Whether pages of this process travel by copy. Whoever has far memory has found out what the kernel can.
pub(crate) fn is_by_copy() -> bool {
    uffd::known().is_some_and(copies) && run::is_routed() && run::has_pager()
}

/// Whether they will, for what lasts, and may be set up before there is far memory.
pub(crate) fn will_be_by_copy() -> bool {
    if uffd::known().is_some() || !run::is_routed() || !run::has_pager() {
        return is_by_copy();
    }
    match uffd::probe() {
        Ok((features, _)) => copies(features),
        // Who may not use it will have no far memory; who has no descriptor left now may have one then.
        Err(error) => matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)),
    }
}

fn copies(features: u64) -> bool {
    features & uffd::FEATURE_MOVE == 0
}

fn is_far(buffer: *const c_void, bytes: usize) -> bool {
    bytes > 0 && run::touches_far(buffer as usize, bytes)
}

/// Whether what is read from a file may be written by a device, unseen by us.
fn is_direct(file: c_int) -> bool {
    if !is_by_copy() {
        return false;
    }
    // SAFETY: F_GETFL takes no argument.
    let flags = unsafe { raw(libc::SYS_fcntl, [file as usize, libc::F_GETFL as usize, 0, 0, 0, 0]) };
    if flags < 0 || flags as c_int & libc::O_DIRECT != 0 {
        return flags >= 0;
    }
    // SAFETY: all zeros are valid, and the kernel fills it in.
    let kind = unsafe {
        let mut about = std::mem::zeroed::<libc::statfs>();
        match raw(libc::SYS_fstatfs, [file as usize, (&raw mut about) as usize, 0, 0, 0, 0]) {
            0 => about.f_type as u32,
            _ => return false,
        }
    };
    DIRECT_FILE_SYSTEMS.contains(&kind)
}

/// Whether some of these is far. Of what the kernel refuses none is; where there is no memory to look, some may be.
///
/// # Safety
/// Of the program's own call.
pub(crate) unsafe fn some_far(parts: *const libc::iovec, count: usize) -> bool {
    let look = |parts: &[libc::iovec]| parts.iter().any(|part| is_far(part.iov_base, part.iov_len));
    // SAFETY: the caller's promise.
    unsafe { with_parts(parts, count, look) }.unwrap_or_else(|errno| errno == libc::ENOMEM)
}

/// Memory of this process for one read of so many bytes, or for as many as go at a time.
fn buffer_of(bytes: usize) -> Result<Buffer, isize> {
    Buffer::new(bytes.min(BUFFER_BYTES_MAX))
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
    /// `bytes` at `to` are ours, to be written to.
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
/// As of preadv2(2).
unsafe fn read_by_copy(from: From, parts: *const libc::iovec, count: usize) -> isize {
    // SAFETY: the caller's contract; `some_far` has looked at all of them.
    let mut parts = (0..count).map(|index| unsafe { parts.add(index).read_unaligned() });
    let all = parts.clone().fold(0_usize, |all, part| all.saturating_add(part.iov_len)).min(READ_BYTES_MAX);
    let buffer = match buffer_of(all) {
        Ok(buffer) => buffer,
        Err(error) => return error,
    };
    let (mut done, mut to, mut room) = (0, 0, 0);
    while done < all {
        let asked = (all - done).min(buffer.bytes);
        // SAFETY: the buffer has room for so much.
        let got = unsafe { from.read(buffer.start, asked, done) };
        if got < 0 {
            return if done > 0 { done as isize } else { got };
        }
        let (mut at, end) = (buffer.start, buffer.start + got as usize);
        while at < end {
            while room == 0 {
                let Some(next) = parts.next() else { return done as isize };
                (to, room) = (next.iov_base as usize, next.iov_len);
            }
            let bytes = room.min(end - at);
            // SAFETY: read just now; the program's memory, by its contract with preadv2(2).
            let copied = unsafe { copy_across(at, to, bytes) };
            done += copied.max(0) as usize;
            if copied < bytes as isize {
                return if done > 0 { done as isize } else { copied };
            }
            (at, to, room) = (at + bytes, to + bytes, room - bytes);
        }
        if (got as usize) < asked {
            break;
        }
    }
    done as isize
}

/// `may_be_here`: an offset of -1 stands for where the file is.
///
/// # Safety
/// As of preadv2(2), of which it returns what the kernel does.
unsafe fn preadv2_by_copy(from: From, may_be_here: bool, parts: *const libc::iovec, count: usize) -> isize {
    if from.offset < 0 && !(may_be_here && from.offset == -1) {
        return -libc::EINVAL as isize;
    }
    // SAFETY: the caller's contract.
    unsafe { read_by_copy(from, parts, count) }
}

unsafe extern "C-unwind" {
    /// Ends the thread, if it is to end, by unwinding it.
    safe fn pthread_testcancel();
}

/// In place of a function that is a point of cancellation. Nothing is to be dropped when the thread ends here.
///
/// # Safety
/// As of preadv2(2).
unsafe fn cancellable(from: From, may_be_here: bool, parts: *const libc::iovec, count: usize) -> isize {
    pthread_testcancel();
    // SAFETY: the caller's contract.
    sys::as_in_c(unsafe { preadv2_by_copy(from, may_be_here, parts, count) })
}

unsafe extern "C-unwind" fn direct_read(file: c_int, buffer: *mut c_void, bytes: usize) -> isize {
    let part = libc::iovec { iov_base: buffer, iov_len: bytes };
    // SAFETY: the program's own call.
    unsafe { cancellable(From { file, offset: -1, flags: 0 }, true, &raw const part, 1) }
}

unsafe extern "C-unwind" fn direct_pread(
    file: c_int,
    buffer: *mut c_void,
    bytes: usize,
    offset: i64,
) -> isize {
    let part = libc::iovec { iov_base: buffer, iov_len: bytes };
    // SAFETY: the program's own call.
    unsafe { cancellable(From { file, offset, flags: 0 }, false, &raw const part, 1) }
}

unsafe extern "C-unwind" fn direct_readv(file: c_int, parts: *const libc::iovec, count: c_int) -> isize {
    // SAFETY: the program's own call.
    unsafe { cancellable(From { file, offset: -1, flags: 0 }, true, parts, count as usize) }
}

unsafe extern "C-unwind" fn direct_preadv(
    file: c_int,
    parts: *const libc::iovec,
    count: c_int,
    offset: i64,
) -> isize {
    // SAFETY: the program's own call.
    unsafe { cancellable(From { file, offset, flags: 0 }, false, parts, count as usize) }
}

unsafe extern "C-unwind" fn direct_preadv2(
    file: c_int,
    parts: *const libc::iovec,
    count: c_int,
    offset: i64,
    flags: c_int,
) -> isize {
    // SAFETY: the program's own call.
    unsafe { cancellable(From { file, offset, flags }, true, parts, count as usize) }
}

/// By way of a local buffer, as often as it takes. The stream may have some of it already.
unsafe extern "C-unwind" fn direct_fread(
    to: *mut c_void,
    size: usize,
    count: usize,
    stream: *mut libc::FILE,
) -> usize {
    type Fread = unsafe extern "C-unwind" fn(*mut c_void, usize, usize, *mut libc::FILE) -> usize;
    // SAFETY: the C library's function of that name; it is one of those that lock what `flockfile` locks.
    let fread = unsafe { std::mem::transmute::<*mut c_void, Fread>(real::fread.address()) };
    // What overflows the C library does not read either.
    let Some(all) = size.checked_mul(count).filter(|&all| all > 0) else { return 0 };
    let Ok(buffer) = buffer_of(all) else { return 0 };
    // Nothing is dropped where the thread ends in the middle of a read: the buffer stays then.
    let buffer = std::mem::ManuallyDrop::new(buffer);
    let mut done = 0;
    // SAFETY: the program's own call, with its stream and memory.
    unsafe {
        flockfile(stream);
        while done < all {
            let asked = (all - done).min(buffer.bytes);
            let got = fread(buffer.start as *mut c_void, 1, asked, stream);
            let copied = sys::as_in_c(copy_across(buffer.start, to as usize + done, got)).max(0) as usize;
            done += copied;
            if copied < asked {
                break;
            }
        }
        funlockfile(stream);
    }
    drop(std::mem::ManuallyDrop::into_inner(buffer));
    done / size
}

unsafe extern "C-unwind" fn direct_fread_chk(
    to: *mut c_void,
    _: usize,
    size: usize,
    count: usize,
    stream: *mut libc::FILE,
) -> usize {
    // SAFETY: the program's own call.
    unsafe { direct_fread(to, size, count, stream) }
}

unsafe extern "C" {
    fn flockfile(stream: *mut libc::FILE);
    fn funlockfile(stream: *mut libc::FILE);
}

/// What is not there.
extern "C" fn refuse() -> isize {
    run::refused();
    lacks()
}

/// What is not there in a C library of this age.
extern "C" fn lacks() -> isize {
    sys::set_errno(libc::ENOSYS);
    -1
}

/// Where a call goes on that nothing is in the way of.
fn through(real: &Real) -> *const c_void {
    let found = real.find();
    if found.is_null() { lacks as *const c_void } else { found }
}

/// Defines where calls of one type go on: at `$direct` if `$is` says so.
macro_rules! ways {
    ($arguments:tt if $is:expr => $($before:ident = $name:ident | $direct:ident;)*) => {
        $(extern "C" fn $before $arguments -> *const c_void {
            // SAFETY: the program's own call, whose arguments the function reads.
            #[allow(unused_unsafe, reason = "some need none")]
            if unsafe { $is } { $direct as *const c_void } else { through(&real::$name) }
        })*
    };
}

ways! {
    (file: c_int, buffer: *mut c_void, bytes: usize) if is_far(buffer, bytes) && is_direct(file) =>
    before_read = read | direct_read;
    before_pread = pread | direct_pread;
    before_pread64 = pread64 | direct_pread;
}
ways! {
    // Beyond the limit the C library ends the program.
    (file: c_int, buffer: *mut c_void, bytes: usize, limit: usize)
    if bytes <= limit && is_far(buffer, bytes) && is_direct(file) =>
    before_read_chk = read_chk | direct_read;
}
ways! {
    (file: c_int, buffer: *mut c_void, bytes: usize, _offset: i64, limit: usize)
    if bytes <= limit && is_far(buffer, bytes) && is_direct(file) =>
    before_pread_chk = pread_chk | direct_pread;
    before_pread64_chk = pread64_chk | direct_pread;
}
ways! {
    (file: c_int, parts: *const libc::iovec, count: c_int)
    if count > 0 && is_by_copy() && some_far(parts, count as usize) && is_direct(file) =>
    before_readv = readv | direct_readv;
    before_preadv = preadv | direct_preadv;
    before_preadv64 = preadv64 | direct_preadv;
    before_preadv2 = preadv2 | direct_preadv2;
    before_preadv64v2 = preadv64v2 | direct_preadv2;
}
ways! {
    (to: *mut c_void, size: usize, count: usize, stream: *mut libc::FILE)
    if is_far(to, size.saturating_mul(count)) && is_by_copy() && is_direct(libc::fileno(stream)) =>
    before_fread = fread | direct_fread;
    before_fread_unlocked = fread_unlocked | direct_fread;
}
ways! {
    (to: *mut c_void, limit: usize, size: usize, count: usize, stream: *mut libc::FILE)
    if size.saturating_mul(count) <= limit
        && is_far(to, size.saturating_mul(count))
        && is_by_copy()
        && is_direct(libc::fileno(stream)) =>
    before_fread_chk = fread_chk | direct_fread_chk;
    before_fread_unlocked_chk = fread_unlocked_chk | direct_fread_chk;
}
ways! {
    (block: *const libc::aiocb) if is_by_copy() && is_refused(block) =>
    before_aio_read = aio_read | refuse;
    before_aio_read64 = aio_read64 | refuse;
}
ways! {
    (_mode: c_int, blocks: *const *const libc::aiocb, count: c_int)
    if is_by_copy() && (0..count.max(0) as usize).any(|index| {
        let block = *blocks.add(index);
        is_refused(block) && (*block).aio_lio_opcode == libc::LIO_READ
    }) =>
    before_lio_listio = lio_listio | refuse;
    before_lio_listio64 = lio_listio64 | refuse;
}

/// Of a read that a thread of the C library would do.
///
/// # Safety
/// Null, or of the program's own call.
unsafe fn is_refused(block: *const libc::aiocb) -> bool {
    // SAFETY: the caller's promise.
    !block.is_null()
        && unsafe {
            is_far((*block).aio_buf as *const c_void, (*block).aio_nbytes) && is_direct((*block).aio_fildes)
        }
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
    /// fread(3).
    fread = before_fread;
    /// fread_unlocked(3).
    fread_unlocked = before_fread_unlocked;
    /// fread(3), of programs that are built with checks.
    __fread_chk = before_fread_chk;
    /// fread_unlocked(3), of programs that are built with checks.
    __fread_unlocked_chk = before_fread_unlocked_chk;
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
    let is_one = |bytes| is_far(to, bytes) && is_direct(file);
    let one = libc::iovec { iov_base: to, iov_len: a[2] };
    let are_several = || {
        // SAFETY: the program's own call.
        is_by_copy() && unsafe { some_far(parts, a[2]) } && is_direct(file)
    };
    let (here, there) = (From { file, offset: -1, flags: 0 }, From { file, offset: a[3] as i64, flags: 0 });
    // SAFETY: the program's own call.
    unsafe {
        let result = match number {
            libc::SYS_read if is_one(a[2]) => read_by_copy(here, &raw const one, 1),
            libc::SYS_pread64 if is_one(a[2]) => preadv2_by_copy(there, false, &raw const one, 1),
            libc::SYS_readv if are_several() => read_by_copy(here, parts, a[2]),
            libc::SYS_preadv if are_several() => preadv2_by_copy(there, false, parts, a[2]),
            libc::SYS_preadv2 if are_several() => {
                preadv2_by_copy(From { flags: a[5] as c_int, ..there }, true, parts, a[2])
            }
            libc::SYS_io_setup => begin_asynchronous(a[0], a[1]),
            libc::SYS_process_vm_writev => {
                return Some(process_vm_writev(
                    a[0] as c_int,
                    parts,
                    a[2] as c_ulong,
                    a[3] as *const libc::iovec,
                    a[4] as c_ulong,
                    a[5] as c_ulong,
                ));
            }
            _ => return None,
        };
        Some(sys::as_in_c(result))
    }
}

/// io_setup(2). Returns a negative errno.
unsafe fn begin_asynchronous(most: usize, context: usize) -> isize {
    if will_be_by_copy() {
        run::refused();
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
        if !will_be_by_copy() {
            raw(libc::SYS_process_vm_writev, arguments)
        } else if is_own_thread(process) {
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

/// Whether this number is one of a thread of this process, whose memory it stands for.
fn is_own_thread(number: c_int) -> bool {
    // SAFETY: signal 0 is none.
    number > 0
        && unsafe { raw(libc::SYS_tgkill, [std::process::id() as usize, number as usize, 0, 0, 0, 0]) } == 0
}
