//! Threads that this library starts are internal from their first instruction.
//!
//! A new thread allocates before any code of ours runs on it (thread-local destructors, its name). If that became far memory, the
//! pager's thread would wait for itself. So pthread_create is owned too, for calls from inside this library.

use crate::tls::words;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

type Start = extern "C" fn(*mut c_void) -> *mut c_void;
type Create =
    unsafe extern "C" fn(*mut libc::pthread_t, *const libc::pthread_attr_t, Start, *mut c_void) -> i32;

/// Address of the C library's pthread_create.
static REAL: AtomicUsize = AtomicUsize::new(0);

fn real() -> Option<Create> {
    let mut address = REAL.load(Ordering::Relaxed);
    if address == 0 {
        // SAFETY: the name is a C string.
        address = unsafe { libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr()) } as usize;
        REAL.store(address, Ordering::Relaxed);
    }
    // SAFETY: not null, so it is the next pthread_create in the search order, which has this type.
    (address != 0).then(|| unsafe { std::mem::transmute::<usize, Create>(address) })
}

/// What an internal thread is to run.
struct Work {
    start: Start,
    argument: *mut c_void,
}

extern "C" fn run_internal(work: *mut c_void) -> *mut c_void {
    words().internal.set(1);
    // SAFETY: made by Box::into_raw in `pthread_create` for this thread alone.
    let Work { start, argument } = *unsafe { Box::from_raw(work.cast::<Work>()) };
    start(argument)
}

/// pthread_create(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> i32 {
    let Some(create) = real() else { return libc::EAGAIN };
    if words().internal.get() == 0 {
        // SAFETY: the caller's contract.
        return unsafe { create(thread, attributes, start, argument) };
    }
    let work = Box::into_raw(Box::new(Work { start, argument }));
    // SAFETY: the caller's contract; `work` is given to the new thread, or taken back if there is none.
    unsafe {
        let result = create(thread, attributes, run_internal, work.cast());
        if result != 0 {
            drop(Box::from_raw(work));
        }
        result
    }
}
