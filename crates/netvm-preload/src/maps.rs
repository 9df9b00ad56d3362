//! The C library's mapping functions.

use crate::given::with_parts;
use crate::run::{self, FAR_THRESHOLD_BYTES};
use crate::space::{Kind, Mapping, Move, SPACE};
use crate::sys::{self, PAGE_BYTES, round_up};
use crate::tls::Internal;
use netvm::pager::ShortCalls;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering;

/// Turns a result into what C expects, with errno.
fn pointer(result: Result<usize, i32>) -> *mut c_void {
    match result {
        Ok(address) => address as *mut c_void,
        Err(errno) => {
            sys::set_errno(errno);
            libc::MAP_FAILED
        }
    }
}

fn status(result: Result<(), i32>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            sys::set_errno(errno);
            -1
        }
    }
}

/// Runs a call that has nothing to say in errno when it succeeds.
fn keeping_errno<T>(work: impl FnOnce() -> T) -> T {
    let _internal = Internal::enter();
    let errno = sys::errno();
    let result = work();
    sys::set_errno(errno);
    result
}

/// Splits a range into what lies before, in and behind the far area, as (address, bytes, far).
fn split(address: usize, bytes: usize) -> impl Iterator<Item = (usize, usize, bool)> {
    let end = address.saturating_add(bytes);
    let area = run::started().map_or(0..0, |far| far.area());
    let (start, stop) = (area.start.clamp(address, end), area.end.clamp(address, end));
    [(address, start, false), (start, stop, true), (stop, end, false)]
        .into_iter()
        .filter(|(from, to, _)| from < to)
        .map(|(from, to, far)| (from, to - from, far))
}

/// Whether a mapping is of the kind that can be far.
fn is_private_memory(protection: i32, flags: i32) -> bool {
    // The far area is above 4 GiB.
    #[cfg(target_arch = "x86_64")]
    const LOW: i32 = libc::MAP_32BIT;
    #[cfg(not(target_arch = "x86_64"))]
    const LOW: i32 = 0;
    let local = libc::MAP_STACK | libc::MAP_GROWSDOWN | libc::MAP_HUGETLB | libc::MAP_LOCKED | LOW;
    flags & (libc::MAP_ANONYMOUS | libc::MAP_TYPE) == libc::MAP_ANONYMOUS | libc::MAP_PRIVATE
        && flags & local == 0
        && protection & !(libc::PROT_READ | libc::PROT_WRITE) == 0
}

/// Whether something can be mapped at all: what a MAP_FIXED would replace stays if it fails, and here it has to go first.
fn try_elsewhere(bytes: usize, protection: i32, flags: i32, fd: i32, offset: i64) -> Result<(), i32> {
    // A driver may insist on an address.
    if flags & libc::MAP_ANONYMOUS == 0 && is_device(fd) {
        return Ok(());
    }
    // Nobody will use its pages.
    let flags = flags & !(libc::MAP_FIXED | libc::MAP_POPULATE | libc::MAP_LOCKED);
    // SAFETY: a new mapping at an address of the kernel's choice, of which nobody else knows.
    unsafe { sys::munmap(sys::mmap(0, bytes, protection, flags, fd, offset)?, bytes) }
}

fn is_device(fd: i32) -> bool {
    let mut stat = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: fstat writes all of `stat` when it succeeds, and only then is it read.
    unsafe {
        libc::fstat(fd, stat.as_mut_ptr()) == 0 && stat.assume_init().st_mode & libc::S_IFMT == libc::S_IFCHR
    }
}

/// mmap(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    bytes: usize,
    protection: i32,
    flags: i32,
    fd: i32,
    offset: i64,
) -> *mut c_void {
    let place = address as usize;
    // SAFETY: the program's own call.
    let real = |flags| unsafe { sys::mmap(place, bytes, protection, flags, fd, offset) };
    if !run::is_routed() {
        return pointer(real(flags));
    }
    let Some(whole) = round_up(bytes, PAGE_BYTES).filter(|&whole| whole > 0) else {
        return pointer(real(flags));
    };
    // The kernel refuses such an offset even where it means nothing.
    let is_memory =
        is_private_memory(protection, flags) && offset.unsigned_abs().is_multiple_of(PAGE_BYTES as u64);
    if flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0 {
        if !run::touches_far(place, whole) || !place.is_multiple_of(PAGE_BYTES) {
            return pointer(real(flags));
        }
        let far = run::far();
        let inside = run::is_far(place) && run::is_far(place + whole - 1);
        let result = keeping_errno(|| {
            SPACE.with(|space| {
                if flags & libc::MAP_FIXED_NOREPLACE != 0 && !(inside && space.is_free(place, whole)) {
                    Err(libc::EEXIST)
                } else if !inside {
                    Err(libc::ENOMEM)
                } else if is_memory {
                    space.map_at(far, place, whole, protection).map(|()| place)
                } else {
                    if !space.is_free(place, whole) {
                        try_elsewhere(whole, protection, flags, fd, offset)?;
                    }
                    let flags = flags & !libc::MAP_FIXED_NOREPLACE | libc::MAP_FIXED;
                    space.place_foreign(far, place, whole, || real(flags))
                }
            })
        });
        return pointer(result);
    }
    if !is_memory || whole < FAR_THRESHOLD_BYTES.load(Ordering::Relaxed) || run::maps_locally() {
        return pointer(real(flags));
    }
    let far = run::far();
    let kind = Kind::Far(Mapping::new(protection));
    pointer(keeping_errno(|| SPACE.with(|space| space.map(far, whole, PAGE_BYTES, protection, kind))))
}

/// mmap(2) with a 64-bit offset, which is the same here.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    bytes: usize,
    protection: i32,
    flags: i32,
    fd: i32,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's contract.
    unsafe { mmap(address, bytes, protection, flags, fd, offset) }
}

/// Runs a range call on its parts outside and inside the far area; `None` if it has none inside, or is none of ours. What the kernel refuses outside,
/// as beyond the addresses there are, changes nothing inside.
fn by_parts(
    address: usize,
    bytes: usize,
    outside: impl Fn(usize, usize) -> Result<(), i32>,
    inside: impl Fn(usize, usize) -> Result<(), i32>,
) -> Option<Result<(), i32>> {
    let whole = round_up(bytes, PAGE_BYTES)?;
    if !run::touches_far(address, whole) || !run::is_routed() {
        return None;
    }
    if !address.is_multiple_of(PAGE_BYTES) {
        return Some(Err(libc::EINVAL));
    }
    if whole == 0 {
        return None;
    }
    let parts = |wanted| split(address, whole).filter(move |&(_, _, far)| far == wanted);
    Some(keeping_errno(|| {
        parts(false).try_for_each(|(address, bytes, _)| outside(address, bytes))?;
        parts(true).try_for_each(|(address, bytes, _)| inside(address, bytes))
    }))
}

/// munmap(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, bytes: usize) -> i32 {
    // SAFETY: the program's own call, on parts that are not far.
    let outside = |address, bytes| unsafe { sys::munmap(address, bytes) };
    let inside = |address, bytes| SPACE.with(|space| space.unmap(run::far(), address, bytes));
    let result = by_parts(address as usize, bytes, outside, inside);
    status(result.unwrap_or_else(|| outside(address as usize, bytes)))
}

/// mprotect(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mprotect(address: *mut c_void, bytes: usize, protection: i32) -> i32 {
    // SAFETY: the program's own call, on parts that are not far.
    let outside = |address, bytes| unsafe { sys::mprotect(address, bytes, protection) };
    let inside = |address, bytes| SPACE.with(|space| space.protect(run::far(), address, bytes, protection));
    let result = by_parts(address as usize, bytes, outside, inside);
    status(result.unwrap_or_else(|| outside(address as usize, bytes)))
}

/// pkey_mprotect(2). Memory with a key of its own is local: the pager would have to have all keys.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pkey_mprotect(address: *mut c_void, bytes: usize, protection: i32, key: i32) -> i32 {
    if key == -1 {
        // SAFETY: the caller's contract.
        return unsafe { mprotect(address, bytes, protection) };
    }
    // SAFETY: the program's own call, on parts that are not far.
    let outside = |address, bytes| unsafe { sys::pkey_mprotect(address, bytes, protection, key) };
    let inside = |address, bytes| {
        // Before anything is made local for a call that the kernel refuses.
        try_key(protection, key)?;
        SPACE.with(|space| space.protect_by_key(run::far(), address, bytes, protection, key))
    };
    let result = by_parts(address as usize, bytes, outside, inside);
    status(result.unwrap_or_else(|| outside(address as usize, bytes)))
}

/// Whether memory could have this key.
fn try_key(protection: i32, key: i32) -> Result<(), i32> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice, of which nobody else knows.
    unsafe {
        let page = sys::mmap(0, PAGE_BYTES, libc::PROT_NONE, flags, -1, 0)?;
        let tried = sys::pkey_mprotect(page, PAGE_BYTES, protection, key);
        sys::munmap(page, PAGE_BYTES)?;
        tried
    }
}

fn advise(address: usize, bytes: usize, advice: i32) -> Result<(), i32> {
    // SAFETY: the program's own call, on parts that are not far.
    let outside = |address, bytes| unsafe { sys::madvise(address, bytes, advice) };
    let some = |address, bytes| SPACE.with(|space| space.advise(run::far(), address, bytes, advice));
    let inside = |address, bytes| {
        let is_long =
            [libc::MADV_PAGEOUT, libc::MADV_WILLNEED, libc::MADV_POPULATE_READ, libc::MADV_POPULATE_WRITE];
        if !is_long.contains(&advice) {
            return some(address, bytes);
        }
        let needed = &is_long[1..];
        if needed.contains(&advice)
            && SPACE.with(|space| space.will_need_each(run::far(), std::iter::once((address, bytes))))
        {
            return Ok(());
        }
        // Others map and allocate in between.
        let mut complete = Ok(());
        for piece in ShortCalls::over(address..address + bytes) {
            match some(piece.start, piece.len()) {
                Err(libc::ENOMEM) => complete = Err(libc::ENOMEM),
                result => result?,
            }
        }
        complete
    };
    by_parts(address, bytes, outside, inside).unwrap_or_else(|| outside(address, bytes))
}

/// madvise(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, bytes: usize, advice: i32) -> i32 {
    status(advise(address as usize, bytes, advice))
}

/// process_madvise(2): as [`madvise`] where the process is this one, which kernels since 6.13 let drop pages of its own so.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn process_madvise(
    process: i32,
    parts: *const libc::iovec,
    count: usize,
    advice: i32,
    flags: u32,
) -> isize {
    let look = |parts: &[libc::iovec]| {
        let is_far = |part: &libc::iovec| run::touches_far(part.iov_base as usize, part.iov_len);
        (parts.iter().any(is_far) && is_this_process(process)).then(|| advise_each(parts, advice))
    };
    if flags == 0 && run::is_routed() {
        // They may be in far memory themselves, or nowhere.
        // SAFETY: the program's own call, which has the kernel read these.
        match unsafe { with_parts(parts, count, look) } {
            Ok(Some(advised)) => return advised,
            Err(libc::ENOMEM) => return sys::as_in_c(-libc::ENOMEM as isize),
            _ => {}
        }
    }
    let arguments = [process as usize, parts as usize, count, advice as usize, flags as usize, 0];
    // SAFETY: the program's own call.
    sys::as_in_c(unsafe { sys::raw(libc::SYS_process_madvise, arguments) })
}

/// Advises this process's memory: how many bytes of it, or -1 and errno.
fn advise_each(parts: &[libc::iovec], advice: i32) -> isize {
    let mut done = 0;
    for some in parts.chunks(PARTS_MAX) {
        let places = some.iter().map(|part| (part.iov_base as usize, part.iov_len));
        if advice == libc::MADV_WILLNEED
            && SPACE.with(|space| space.will_need_each(run::far(), places.clone()))
        {
            done += places.map(|(_, bytes)| bytes).sum::<usize>();
            continue;
        }
        for (address, bytes) in places {
            if let Err(errno) = advise(address, bytes, advice) {
                if done > 0 {
                    return done as isize;
                }
                sys::set_errno(errno);
                return -1;
            }
            done += bytes;
        }
    }
    done as isize
}

/// Parts of a call of process_madvise(2) that are looked at together.
const PARTS_MAX: usize = 64;

/// Whether a descriptor of a process, or what stands for one, means this process.
fn is_this_process(process: i32) -> bool {
    /// `PIDFD_SELF_THREAD` and `PIDFD_SELF_THREAD_GROUP`, which was the last one at first.
    const SELF: [i32; 3] = [-10_000, -10_001, -20_000];
    keeping_errno(|| {
        SELF.contains(&process)
            || std::fs::read_to_string(format!("/proc/thread-self/fdinfo/{process}")).is_ok_and(|told| {
                let number = told.lines().find_map(|line| line.strip_prefix("Pid:"));
                number.and_then(|number| number.trim().parse().ok()) == Some(std::process::id())
            })
    })
}

/// posix_madvise(3): returns the error; POSIX_MADV_DONTNEED must not drop contents.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_madvise(address: *mut c_void, bytes: usize, advice: i32) -> i32 {
    if advice == libc::POSIX_MADV_DONTNEED {
        return 0;
    }
    let errno = sys::errno();
    let result = advise(address as usize, bytes, advice);
    sys::set_errno(errno);
    result.err().unwrap_or(0)
}

/// mremap(2). The fifth argument is optional in C; reading it when it is absent is harmless in both calling conventions.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_bytes: usize,
    new_bytes: usize,
    flags: i32,
    new: *mut c_void,
) -> *mut c_void {
    let (old, new) = (old as usize, new as usize);
    // SAFETY: the program's own call.
    let real = || unsafe { sys::mremap(old, old_bytes, new_bytes, flags, new) };
    let fixed = flags & libc::MREMAP_FIXED != 0;
    let (Some(old_whole), Some(new_whole)) =
        (round_up(old_bytes, PAGE_BYTES), round_up(new_bytes, PAGE_BYTES))
    else {
        return pointer(real());
    };
    let from_far = run::touches_far(old, old_whole.max(1));
    let to_far = fixed && run::touches_far(new, new_whole);
    if !run::is_routed() || !(from_far || to_far) {
        return pointer(real());
    }
    let known = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    let moves = flags & libc::MREMAP_MAYMOVE != 0;
    let overlap = fixed && old < new.saturating_add(new_whole) && new < old.saturating_add(old_whole);
    if !old.is_multiple_of(PAGE_BYTES)
        || old_whole == 0
        || new_whole == 0
        || flags & !known != 0
        || (fixed || flags & libc::MREMAP_DONTUNMAP != 0) && !moves
        || fixed && (!new.is_multiple_of(PAGE_BYTES) || overlap)
    {
        return pointer(Err(libc::EINVAL));
    }
    let ends_far = |start: usize, bytes: usize| run::is_far(start) && run::is_far(start + bytes - 1);
    let far = run::far();
    let call = Move { old, old_bytes: old_whole, new_bytes: new_whole, flags, new };
    pointer(keeping_errno(|| {
        if !from_far {
            // Something of the program's moves into the area.
            if !ends_far(new, new_whole) {
                return Err(libc::EINVAL);
            }
            return SPACE.with(|space| space.place_foreign(far, new, new_whole, real));
        }
        if !ends_far(old, old_whole) {
            return Err(libc::EFAULT);
        }
        SPACE.with(|space| {
            if fixed && !ends_far(new, new_whole) {
                if to_far {
                    return Err(libc::ENOMEM);
                }
                // Out of the area, where far memory cannot live.
                space.make_local(far, old, old_whole)?;
            }
            space.remap(far, call)
        })
    }))
}

/// mlock(2): far memory cannot be locked, and bringing all of it in would break the budget; so the call does nothing there.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(address: *const c_void, bytes: usize) -> i32 {
    if run::is_routed() && run::touches_far(address as usize, bytes) {
        return 0;
    }
    // SAFETY: the program's own call.
    unsafe { sys::as_in_c(sys::raw(libc::SYS_mlock, [address as usize, bytes, 0, 0, 0, 0])) as i32 }
}

/// mlock2(2), as [`mlock`].
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(address: *const c_void, bytes: usize, flags: u32) -> i32 {
    if run::is_routed() && run::touches_far(address as usize, bytes) {
        return 0;
    }
    // SAFETY: the program's own call.
    unsafe {
        sys::as_in_c(sys::raw(libc::SYS_mlock2, [address as usize, bytes, flags as usize, 0, 0, 0])) as i32
    }
}

/// mlockall(2): refused in a run, as if the limit were too low. It would bring in and pin all far memory, now and later.
#[unsafe(no_mangle)]
pub extern "C" fn mlockall(flags: i32) -> i32 {
    if run::is_routed() {
        sys::set_errno(libc::ENOMEM);
        return -1;
    }
    // SAFETY: the program's own call.
    unsafe { sys::as_in_c(sys::raw(libc::SYS_mlockall, [flags as usize, 0, 0, 0, 0, 0])) as i32 }
}
