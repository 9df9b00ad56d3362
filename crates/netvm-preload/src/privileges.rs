//! A process that gives its privileges up, as servers' workers do, can start far memory only before: afterwards it may not use userfaultfd, or reach the
//! lenders' sockets.
//!
//! Whether it will need far memory nobody knows, so what fails is told when it does. Nothing is started in the child of a fork of a process with
//! several threads: such a child mostly becomes another program, and until then may only do what a handler of a signal may.

use crate::real::around;
use crate::run;
use libc::uid_t;
use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

#[allow(non_upper_case_globals, reason = "named as the functions are")]
mod real {
    use crate::real::{Real, reals};

    reals! {
        setuid = c"setuid",
        seteuid = c"seteuid",
        setreuid = c"setreuid",
        setresuid = c"setresuid",
        chroot = c"chroot",
    }
}

/// Whose memory this is: a child of vfork(2) has another number.
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// Of the C library; null where it is older than 2.32.
static IS_SINGLE: AtomicPtr<c_char> = AtomicPtr::new(std::ptr::null_mut());
/// The process that forks has other threads, of whose locks nobody knows,
static HAS_MANY: AtomicBool = AtomicBool::new(false);
/// or the one that forked this had.
static OF_MANY: AtomicBool = AtomicBool::new(false);

/// Before the program's code.
pub(crate) fn set_up() {
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    // SAFETY: the name is a C string.
    let single = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
    IS_SINGLE.store(single.cast(), Ordering::Relaxed);
    // A child of vfork(2) must not look for them itself.
    for real in real::ALL {
        real.find();
    }
}

/// Before a fork, in the parent.
pub(crate) fn before_fork() {
    let single = IS_SINGLE.load(Ordering::Relaxed);
    // SAFETY: null, or the C library's variable, which it changes when threads begin.
    let is_single = !single.is_null() && unsafe { single.read_volatile() } != 0;
    HAS_MANY.store(!is_single, Ordering::Relaxed);
}

/// In the child of a fork.
pub(crate) fn after_fork() {
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    OF_MANY.store(HAS_MANY.load(Ordering::Relaxed), Ordering::Relaxed);
}

/// Only root has much to lose, and does when it becomes `user`.
fn start_before(user: uid_t) {
    const UNCHANGED: uid_t = uid_t::MAX;
    // SAFETY: no arguments.
    if user == 0 || user == UNCHANGED || unsafe { libc::geteuid() } != 0 {
        return;
    }
    let may_start = PROCESS.load(Ordering::Relaxed) == std::process::id() && !OF_MANY.load(Ordering::Relaxed);
    if may_start && run::is_routed() {
        run::try_to_start();
    }
}

/// Somebody else's number.
const NOBODY: uid_t = 65_534;

around!(
    /// setuid(2).
    setuid(user: uid_t) -> c_int, start_before(user)
);
around!(
    /// seteuid(2).
    seteuid(user: uid_t) -> c_int, start_before(user)
);
around!(
    /// setreuid(2).
    setreuid(real_user: uid_t, user: uid_t) -> c_int, start_before(user)
);
around!(
    /// setresuid(2).
    setresuid(real_user: uid_t, user: uid_t, saved: uid_t) -> c_int, start_before(user)
);
around!(
    /// chroot(2): the lenders' sockets are elsewhere.
    chroot(path: *const c_char) -> c_int, start_before(NOBODY)
);
