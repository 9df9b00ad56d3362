//! fork(2): every lock of this library is held by the thread that forks, and the pager makes a pager for the child.

use crate::heap::HEAP;
use crate::run::{self, START};
use crate::small;
use crate::space::SPACE;
use crate::sys;
use crate::tls::Internal;
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::mem::MaybeUninit;

unsafe extern "C" {
    /// What pthread_atfork calls; exported by the C library itself.
    fn __register_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
        library: *mut c_void,
    ) -> i32;
}

/// Registers the handlers. Done before the program can register its own, so that ours run last before the fork and first after it,
/// and the program's may allocate.
pub(crate) fn set_up() -> Result<(), String> {
    // SAFETY: the handlers live as long as the process (this library is never unloaded).
    let result = unsafe { __register_atfork(Some(prepare), Some(parent), Some(child), std::ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err("cannot register fork handlers: out of memory".into()) }
}

/// The signal mask of the thread that forks, from prepare to the end. Only who holds START touches it.
struct Mask(UnsafeCell<MaybeUninit<libc::sigset_t>>);

// SAFETY: reached only by the one thread that holds START.
unsafe impl Sync for Mask {}

static MASK: Mask = Mask(UnsafeCell::new(MaybeUninit::uninit()));

extern "C" fn prepare() {
    let _internal = Internal::enter();
    // The stack of a handler may be far memory, and nobody serves faults until the fork is over.
    let mask = block_signals();
    // The order in which they are taken elsewhere.
    START.hold();
    // SAFETY: START is held.
    unsafe { (*MASK.0.get()).write(mask) };
    small::hold();
    HEAP.hold();
    SPACE.hold();
    if let Some(far) = run::started() {
        far.fork_prepare(std::ptr::from_ref(&mask) as usize);
    }
}

/// Returns the signal mask, which is to be restored at the very end.
fn let_go() -> libc::sigset_t {
    // SAFETY: START is held, and `prepare` wrote the mask when it took it.
    let mask = unsafe { (*MASK.0.get()).assume_init() };
    SPACE.let_go();
    HEAP.let_go();
    small::let_go();
    START.let_go();
    mask
}

extern "C" fn parent() {
    let _internal = Internal::enter();
    let errno = sys::errno();
    if let Some(far) = run::started() {
        far.fork_parent();
    }
    restore_signals(&let_go());
    sys::set_errno(errno);
}

extern "C" fn child() {
    let _internal = Internal::enter();
    let far = run::started();
    if let Some(far) = far {
        far.fork_child();
    }
    let mask = let_go();
    if let Some(far) = far
        && let Err(errno) = SPACE.with(|space| space.after_fork(far))
    {
        let error = std::io::Error::from_raw_os_error(errno);
        sys::give_up(&format!(
            "a forked child cannot drop memory that it must not have (MADV_DONTFORK, MADV_WIPEONFORK): {error}"
        ));
    }
    restore_signals(&mask);
}

/// Blocks all signals, so that a thread started meanwhile never runs a handler of the program.
pub(crate) fn block_signals() -> libc::sigset_t {
    // SAFETY: both sets are locals; sigfillset initialises the first, pthread_sigmask the second.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut old = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        old
    }
}

pub(crate) fn restore_signals(old: &libc::sigset_t) {
    // SAFETY: `old` was filled in by `block_signals`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old, std::ptr::null_mut()) };
}
