//! Memory that the program's own call points to: read and written as the kernel does, which knows where nothing is.

use crate::sys::{self, raw};
use std::ffi::c_void;
use std::mem::MaybeUninit;

/// Memory of this process for the time of one call.
pub(crate) struct Buffer {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
}

impl Buffer {
    /// Of at least one page. An error is a negative errno.
    pub(crate) fn new(bytes: usize) -> Result<Self, isize> {
        let Some(bytes) = sys::round_up(bytes.max(1), sys::PAGE_BYTES) else {
            return Err(-libc::ENOMEM as isize);
        };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        unsafe { sys::mmap(0, bytes, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) }
            .map(|start| Self { start, bytes })
            .map_err(|errno| -errno as isize)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody else's.
        unsafe { raw(libc::SYS_munmap, [self.start, self.bytes, 0, 0, 0, 0]) };
    }
}

/// Copies from or to the program's memory. How many bytes, fewer where it ends, or -EFAULT where there is none.
///
/// # Safety
/// One of them is ours; the program's own call has as many bytes read or written at the other.
pub(crate) unsafe fn copy_across(from: usize, to: usize, bytes: usize) -> isize {
    const FAULT: isize = -libc::EFAULT as isize;
    let part = |start: usize| libc::iovec { iov_base: start as *mut c_void, iov_len: bytes };
    let (local, remote) = (part(to), part(from));
    // SAFETY: no arguments.
    let this = unsafe { raw(libc::SYS_gettid, [0; 6]) };
    // The thread: the process has no memory any more by its own number when its first thread has ended.
    let arguments = [this as usize, (&raw const local) as usize, 1, (&raw const remote) as usize, 1, 0];
    // SAFETY: the caller's promise.
    let copied = unsafe { raw(libc::SYS_process_vm_readv, arguments) };
    if copied >= 0 || copied == FAULT {
        return copied;
    }
    // A filter of system calls forbids it, with an errno of its choice.
    if from == 0 || to == 0 {
        return FAULT;
    }
    // SAFETY: the caller's promise.
    unsafe { (to as *mut u8).copy_from_nonoverlapping(from as *const u8, bytes) };
    bytes as isize
}

/// What the program's own call points to. `None`: it cannot be read, which the kernel would refuse with EFAULT.
///
/// # Safety
/// The program's own call has this read.
pub(crate) unsafe fn given<T: Copy>(from: *const T, room: &mut [MaybeUninit<T>]) -> Option<&[T]> {
    let bytes = size_of_val(room);
    // SAFETY: the room is ours.
    if unsafe { copy_across(from as usize, room.as_mut_ptr() as usize, bytes) } != bytes as isize {
        return None;
    }
    // SAFETY: filled in just now, with what the program has of this type.
    Some(unsafe { std::slice::from_raw_parts(room.as_ptr().cast(), room.len()) })
}

/// Has a list of parts looked at, once and as a whole: advice may drop the list itself. An error is an errno: but for ENOMEM the kernel's own.
///
/// Not inlined: each syscall(2) of a program may come by here, also on a stack that has hardly room for it.
///
/// # Safety
/// The program's own call has this list read.
#[inline(never)]
pub(crate) unsafe fn with_parts<R>(
    parts: *const libc::iovec,
    count: usize,
    look: impl FnOnce(&[libc::iovec]) -> R,
) -> Result<R, i32> {
    const FEW: usize = 64;
    if count > FEW {
        // SAFETY: the caller's promise.
        return unsafe { with_many(parts, count, look) };
    }
    let mut room = [const { MaybeUninit::<libc::iovec>::uninit() }; FEW];
    // SAFETY: the caller's promise.
    unsafe { given(parts, &mut room[..count]) }.map(look).ok_or(libc::EFAULT)
}

/// # Safety
/// As of [`with_parts`].
#[inline(never)]
unsafe fn with_many<R>(
    parts: *const libc::iovec,
    count: usize,
    look: impl FnOnce(&[libc::iovec]) -> R,
) -> Result<R, i32> {
    if count > libc::UIO_MAXIOV as usize {
        return Err(libc::EINVAL);
    }
    let buffer = Buffer::new(count * size_of::<libc::iovec>()).map_err(|_| libc::ENOMEM)?;
    // SAFETY: the buffer has room for so many, and nobody else uses it.
    let room =
        unsafe { std::slice::from_raw_parts_mut(buffer.start as *mut MaybeUninit<libc::iovec>, count) };
    // SAFETY: the caller's promise.
    unsafe { given(parts, room) }.map(look).ok_or(libc::EFAULT)
}
