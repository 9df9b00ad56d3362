//! A process that gives its privileges up, as servers' workers do, can start far memory only before: afterwards it may not reach the lenders' sockets, or use
//! userfaultfd.

use crate::real::around;
use crate::run;
use libc::{gid_t, uid_t};
use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicU32, Ordering};

#[allow(non_upper_case_globals, reason = "named as the functions are")]
mod real {
    use crate::real::{Real, reals};

    reals! {
        setuid = c"setuid",
        seteuid = c"seteuid",
        setreuid = c"setreuid",
        setresuid = c"setresuid",
        setgid = c"setgid",
        setegid = c"setegid",
        setregid = c"setregid",
        setresgid = c"setresgid",
        setgroups = c"setgroups",
        initgroups = c"initgroups",
        chroot = c"chroot",
    }
}

/// Whose memory this is: a child of vfork(2) has another number.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// In this process, before the program's code, and in each child of a fork.
pub(crate) fn set_up() {
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    // A child of vfork(2) must not look for them itself.
    for real in real::ALL {
        real.find();
    }
}

/// Only root has much to lose.
fn start_before() {
    // SAFETY: no arguments.
    let is_root = unsafe { libc::geteuid() } == 0;
    if is_root && run::is_routed() && PROCESS.load(Ordering::Relaxed) == std::process::id() {
        run::far();
    }
}

around!(
    /// setuid(2).
    setuid(user: uid_t) -> c_int, start_before()
);
around!(
    /// seteuid(2).
    seteuid(user: uid_t) -> c_int, start_before()
);
around!(
    /// setreuid(2).
    setreuid(real_user: uid_t, user: uid_t) -> c_int, start_before()
);
around!(
    /// setresuid(2).
    setresuid(real_user: uid_t, user: uid_t, saved: uid_t) -> c_int, start_before()
);
around!(
    /// setgid(2).
    setgid(group: gid_t) -> c_int, start_before()
);
around!(
    /// setegid(2).
    setegid(group: gid_t) -> c_int, start_before()
);
around!(
    /// setregid(2).
    setregid(real_group: gid_t, group: gid_t) -> c_int, start_before()
);
around!(
    /// setresgid(2).
    setresgid(real_group: gid_t, group: gid_t, saved: gid_t) -> c_int, start_before()
);
around!(
    /// setgroups(2).
    setgroups(count: usize, groups: *const gid_t) -> c_int, start_before()
);
around!(
    /// initgroups(3).
    initgroups(user: *const c_char, group: gid_t) -> c_int, start_before()
);
around!(
    /// chroot(2).
    chroot(path: *const c_char) -> c_int, start_before()
);
