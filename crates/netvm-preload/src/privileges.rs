//! A process that gives its privileges up, as servers' workers do, can start far memory only before: afterwards it may not use userfaultfd, or reach the
//! lenders' sockets. And what lenders on this host let it read of its parent's memory it must not have any more.
//!
//! Whether it will need far memory nobody knows, so what fails is told when it does. Nothing is started in the child of a fork of a process with
//! several threads: such a child mostly becomes another program, and until then may only do what a handler of a signal may.

use crate::last;
use crate::real::around;
use crate::run;
use crate::sys::{self, raw};
use crate::tls::Internal;
use libc::{gid_t, uid_t};
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::time::{Duration, Instant};

#[allow(non_upper_case_globals, reason = "named as the functions are")]
mod real {
    use crate::real::{Real, reals};

    reals! {
        setuid = c"setuid",
        seteuid = c"seteuid",
        setreuid = c"setreuid",
        setresuid = c"setresuid",
        chroot = c"chroot",
        capset = c"capset",
        prctl = c"prctl",
        setgid = c"setgid",
        setegid = c"setegid",
        setregid = c"setregid",
        setresgid = c"setresgid",
        setgroups = c"setgroups",
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
/// This is the child of a fork, and may read its parent's memory at lenders on this host.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// Before the program's code.
pub(crate) fn set_up() {
    PROCESS.store(std::process::id(), Ordering::Relaxed);
    // SAFETY: the name is a C string.
    let single = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
    IS_SINGLE.store(single.cast(), Ordering::Relaxed);
    real::set_up();
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
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// Before the process may do less than its parent, in whatever way.
pub(crate) fn before_less() {
    // Not of a child of vfork, which has its parent's memory, and no descriptor of the pager's.
    let is_this = PROCESS.load(Ordering::Relaxed) == std::process::id();
    if !is_this || !IS_CHILD.load(Ordering::Relaxed) || run::is_orphaned() {
        return;
    }
    if let Some(far) = run::started() {
        let _internal = Internal::enter();
        if let Err(why) = far.forget_inherited() {
            sys::give_up(&format!("a child cannot let go of what it can read of its parent's memory: {why}"));
        }
    }
    // Not before: of two threads that come at once both go on when it is done.
    IS_CHILD.store(false, Ordering::Relaxed);
}

/// Before prctl(2) with this option: some are filters of system calls, or what comes before one.
pub(crate) fn before_prctl(option: c_int) {
    if matches!(option, libc::PR_SET_NO_NEW_PRIVS | libc::PR_SET_SECCOMP | libc::PR_CAPBSET_DROP) {
        before_less();
    }
}

/// Only root has much to lose, and does when it becomes `user`.
fn start_before(user: uid_t) {
    if user != uid_t::MAX {
        before_less();
    }
    // SAFETY: no arguments.
    if user == 0 || user == uid_t::MAX || unsafe { libc::geteuid() } != 0 {
        return;
    }
    let may_start = PROCESS.load(Ordering::Relaxed) == std::process::id() && !OF_MANY.load(Ordering::Relaxed);
    if may_start && run::is_routed() {
        run::try_to_start();
    }
}

/// Root again, where the process has only put that aside (seteuid): a fork makes connections, and the child's userfaultfd, as the process did at its start.
/// Of this thread only, which has all signals blocked; it is what it was when this is dropped.
pub(crate) struct Regained {
    user: uid_t,
    files_user: usize,
    dumpable: i32,
    parent_death: i32,
}

impl Regained {
    /// `None`: nothing has been put aside, or there is no far memory.
    pub(crate) fn get() -> Option<Self> {
        if run::is_orphaned() {
            return None;
        }
        let (mut real, mut user, mut saved) = (0, 0, 0);
        // SAFETY: three locals.
        unsafe { libc::getresuid(&mut real, &mut user, &mut saved) };
        if user == 0 || (real != 0 && saved != 0) {
            return None;
        }
        let mut parent_death = 0;
        // SAFETY: a local that outlives the call, and numbers only. What is no user tells who it is for files.
        let (dumpable, files_user) = unsafe {
            libc::prctl(libc::PR_GET_PDEATHSIG, &raw mut parent_death);
            let files_user = raw(libc::SYS_setfsuid, [UNCHANGED, 0, 0, 0, 0, 0]) as usize;
            (libc::prctl(libc::PR_GET_DUMPABLE, 0, 0, 0, 0), files_user)
        };
        // SAFETY: numbers only. The C library's function would do so in all threads.
        let became = unsafe { raw(libc::SYS_setresuid, [UNCHANGED, 0, UNCHANGED, 0, 0, 0]) };
        (became == 0).then_some(Self { user, files_user, dumpable, parent_death })
    }
}

/// Who a thread becomes that is started meanwhile; `uid_t::MAX`: nobody else.
static BECOMES: AtomicU32 = AtomicU32::new(uid_t::MAX);
/// So long the process waits until it has; it does all the same when it comes to run.
const SOON: Duration = Duration::from_millis(500);

impl Regained {
    /// Has `start` start a thread, which calls [`put_aside`] first: the C library expects the same of all threads, and ends processes where one
    /// may what another may not.
    pub(crate) fn around<T, E>(self, start: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        BECOMES.store(self.user, Ordering::Release);
        let started = start();
        if started.is_err() {
            BECOMES.store(uid_t::MAX, Ordering::Release);
        }
        let since = Instant::now();
        while BECOMES.load(Ordering::Acquire) != uid_t::MAX && since.elapsed() < SOON {
            std::thread::yield_now();
        }
        started
    }
}

/// By a new thread of this library: its privileges are what the process's are.
pub(crate) fn put_aside() {
    let user = BECOMES.load(Ordering::Acquire);
    if user != uid_t::MAX {
        become_user(user);
        BECOMES.store(uid_t::MAX, Ordering::Release);
    }
}

/// The calling thread; the process ends where it cannot.
fn become_user(user: uid_t) {
    // SAFETY: numbers only. The C library's function would do so in all threads.
    if unsafe { raw(libc::SYS_setresuid, [UNCHANGED, user as usize, UNCHANGED, 0, 0, 0]) } != 0 {
        sys::give_up("a process cannot put its privileges aside again");
    }
}

impl Drop for Regained {
    fn drop(&mut self) {
        become_user(self.user);
        // What the kernel resets with it.
        // SAFETY: numbers only.
        unsafe {
            raw(libc::SYS_setfsuid, [self.files_user, 0, 0, 0, 0, 0]);
            if self.dumpable == 1 {
                libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
            }
            if self.parent_death != 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, self.parent_death);
            }
        }
    }
}

/// No change of a user, in system calls.
const UNCHANGED: usize = uid_t::MAX as usize;

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

around!(
    /// capset(2).
    capset(header: *mut c_void, data: *const c_void) -> c_int, before_less()
);

/// prctl(2).
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    before_prctl(option);
    type Real = unsafe extern "C" fn(c_int, usize, usize, usize, usize) -> c_int;
    // SAFETY: this is the C library's function of that name. It takes what is there of its arguments, which are all words.
    let real = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Real>(real::prctl.address()) };
    // SAFETY: forwarded from the caller.
    unsafe { real(option, a, b, c, d) }
}

/// Whether a change of groups is for the calling thread alone, which is all there is of the program: it has kept its capabilities over setuid, and
/// may do what this library's threads may not. The C library has all threads change, and ends processes where only some can.
fn changes_alone() -> bool {
    // SAFETY: numbers only.
    let keeps = unsafe { libc::geteuid() != 0 && libc::prctl(libc::PR_GET_KEEPCAPS, 0, 0, 0, 0) == 1 };
    keeps && run::is_routed() && run::started().is_some() && !last::has_others()
}

/// Defines functions that change groups, by the system call of this name where that is to be done.
macro_rules! change_of_groups {
    ($($(#[$doc:meta])* $name:ident = $number:ident($($argument:ident: $type:ty),*) as [$($word:expr),*];)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As the C library's.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
                before_less();
                if changes_alone() {
                    let mut words = [0; 6];
                    words.iter_mut().zip([$($word),*]).for_each(|(word, argument)| *word = argument);
                    // SAFETY: forwarded from the caller.
                    return sys::as_in_c(unsafe { raw(libc::$number, words) }) as c_int;
                }
                type Real = unsafe extern "C" fn($($type),*) -> c_int;
                // SAFETY: this is the C library's function of that name, whose type POSIX and the manual give.
                let real = unsafe { std::mem::transmute::<*mut std::ffi::c_void, Real>(real::$name.address()) };
                // SAFETY: forwarded from the caller.
                unsafe { real($($argument),*) }
            }
        )*
    };
}

change_of_groups! {
    /// setgid(2).
    setgid = SYS_setgid(group: gid_t) as [group as usize];
    /// setegid(2).
    setegid = SYS_setresgid(group: gid_t) as [UNCHANGED, group as usize, UNCHANGED];
    /// setregid(2).
    setregid = SYS_setregid(real_group: gid_t, group: gid_t) as [real_group as usize, group as usize];
    /// setresgid(2).
    setresgid = SYS_setresgid(real_group: gid_t, group: gid_t, saved: gid_t) as [real_group as usize, group as usize, saved as usize];
    /// setgroups(2).
    setgroups = SYS_setgroups(count: usize, groups: *const gid_t) as [count, groups as usize];
}
