//! What a thread of a library inside a stranger's program needs: its own descriptors, no signals, a way to die loudly.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

/// Gives the calling thread a descriptor table of its own, with only `keep` of the old one open in it.
///
/// The program may then close any descriptor without touching this thread's, and this thread holds no end of a pipe open
/// that the program thinks it has closed.
///
/// # Errors
/// ENOMEM; EPERM under a seccomp filter that forbids unshare(2).
pub fn own_descriptors(keep: &[RawFd]) -> io::Result<()> {
    // SAFETY: CLONE_FILES affects only which descriptor table this thread uses.
    if unsafe { libc::unshare(libc::CLONE_FILES) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut keep: Vec<u32> = keep.iter().map(|&fd| fd as u32).collect();
    keep.sort_unstable();
    let mut next = 0;
    for fd in keep {
        if fd > next {
            close_range(next, fd - 1);
        }
        next = fd + 1;
    }
    close_range(next, u32::MAX);
    Ok(())
}

fn close_range(first: u32, last: u32) {
    // SAFETY: the table is this thread's own; nobody else uses these descriptors in it.
    let refused = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } < 0;
    if refused {
        // A filter of system calls that does not know it.
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a local that outlives the call.
        let limit = match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } {
            0 => limit.rlim_max.min(1 << 20) as u32,
            _ => 1 << 16,
        };
        let all: Vec<_> = (first..limit.min(last.saturating_add(1))).map(|fd| fd as RawFd).collect();
        close_copies(&all);
    }
}

/// Starts a detached thread that runs `first` before anything else at all.
///
/// `std::thread` allocates in the new thread before its closure runs; in a library that owns `malloc` that would be too early. In a process that is
/// traced by strace, the thread is not: with `-f` strace stops all threads, and then reads what only this one can bring.
///
/// # Errors
/// EAGAIN when no thread can be had.
pub fn start(stack_bytes: usize, first: Option<fn()>, body: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    let traced = is_traced();
    let spare_bytes = if traced { ABOVE_BYTES } else { 0 };
    let start = Box::into_raw(Box::new(Start { first, body }));
    let enter = if traced { enter_untraced } else { enter };
    // SAFETY: the attributes are initialised before use and destroyed after; `enter` takes the box over if it runs.
    let error = unsafe {
        let mut attributes = std::mem::zeroed();
        libc::pthread_attr_init(&mut attributes);
        libc::pthread_attr_setstacksize(&mut attributes, stack_bytes + spare_bytes + thread_local_bytes());
        libc::pthread_attr_setdetachstate(&mut attributes, libc::PTHREAD_CREATE_DETACHED);
        let mut thread = std::mem::zeroed();
        let error = libc::pthread_create(&mut thread, &attributes, enter, start.cast());
        libc::pthread_attr_destroy(&mut attributes);
        error
    };
    if error == 0 {
        return Ok(());
    }
    // SAFETY: no thread was started, so the box is still ours.
    drop(unsafe { Box::from_raw(start) });
    Err(io::Error::from_raw_os_error(error))
}

/// What the C library takes of each thread's stack, for thread-local memory of the program and its libraries: as much as they want.
fn thread_local_bytes() -> usize {
    /// Found once: a child of a fork must not look for it.
    static BYTES: AtomicUsize = AtomicUsize::new(0);
    let known = BYTES.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // SAFETY: the name is a C string; where the C library has such a function it takes attributes, and returns how long a stack must be.
    let bytes = unsafe {
        let found = libc::dlsym(libc::RTLD_DEFAULT, c"__pthread_get_minstack".as_ptr());
        let mut attributes = std::mem::zeroed();
        if found.is_null() || libc::pthread_attr_init(&mut attributes) != 0 {
            libc::PTHREAD_STACK_MIN
        } else {
            let least: unsafe extern "C" fn(*const libc::pthread_attr_t) -> usize =
                std::mem::transmute(found);
            let bytes = least(&attributes);
            libc::pthread_attr_destroy(&mut attributes);
            bytes
        }
    };
    // Whole pages.
    let bytes = bytes.next_multiple_of(4096);
    BYTES.store(bytes, Ordering::Relaxed);
    bytes
}

struct Start {
    first: Option<fn()>,
    body: Box<dyn FnOnce() + Send>,
}

extern "C" fn enter(start: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: `start` is the box that `start()` gave away; this thread alone has it now.
    let start = unsafe { Box::from_raw(start.cast::<Start>()) };
    if let Some(first) = start.first {
        first();
    }
    (start.body)();
    std::ptr::null_mut()
}

/// Of its stack, what a thread leaves to itself when it gives the rest to an untraced one.
const ABOVE_BYTES: usize = 16 << 10;

/// As [`enter`], by a thread that no tracer has.
///
/// The C library makes none. So the thread that it has made makes another one, which gets its stack, its number in the C library's books and its thread-local
/// memory, and ends without a word to the C library, for which the thread goes on.
extern "C" fn enter_untraced(start: *mut libc::c_void) -> *mut libc::c_void {
    extern "C" fn run(start: *mut libc::c_void) -> libc::c_int {
        enter(start);
        0
    }
    let mut number: *mut libc::pid_t = std::ptr::null_mut();
    let here = 0_usize;
    let top = ((&raw const here).addr() - ABOVE_BYTES) & !15;
    let flags = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_FILES
        | libc::CLONE_SIGHAND
        | libc::CLONE_SYSVSEM
        | libc::CLONE_THREAD
        | libc::CLONE_UNTRACED
        | libc::CLONE_CHILD_SETTID
        | libc::CLONE_CHILD_CLEARTID;
    // SAFETY: the kernel writes a pointer, which outlives the call: where the C library has told it to clear this thread's number when it ends.
    let told = unsafe { libc::prctl(libc::PR_GET_TID_ADDRESS, &raw mut number) };
    if told < 0 || number.is_null() {
        return enter(start);
    }
    // SAFETY: below `top` are `stack_bytes` of this thread's stack, which `start()` asked for and this thread does not reach: it needs less than ABOVE_BYTES
    // until it ends. Without CLONE_SETTLS the new thread has this one's thread-local memory; this one touches it no more, as calls that succeed set no errno.
    unsafe {
        let stack = (&raw const here).cast_mut().with_addr(top).cast();
        let none = std::ptr::null_mut::<libc::c_void>();
        if libc::clone(run, stack, flags, start, none, none, number) < 0 {
            // Who may not make such a thread is as well off as before.
            return enter(start);
        }
        // The number is the new thread's.
        libc::syscall(libc::SYS_set_tid_address, none);
        loop {
            libc::syscall(libc::SYS_exit, 0);
        }
    }
}

/// Whether strace has this process: of its threads, it would have to be told to leave one alone. Debuggers do without what they cannot read.
fn is_traced() -> bool {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    let Some(tracer) = tracer.map(str::trim).filter(|pid| *pid != "0") else { return false };
    std::fs::read_to_string(format!("/proc/{tracer}/comm")).is_ok_and(|name| name.trim_end() == "strace")
}

/// Names the calling thread (at most 15 bytes are kept).
pub fn set_name(name: &std::ffi::CStr) {
    // SAFETY: the name outlives the call.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr() as usize, 0_usize, 0_usize, 0_usize) };
}

/// Page faults of this thread so far: those that waited for no device, and those that did (major faults).
pub fn faults_of_thread() -> (u64, u64) {
    // SAFETY: integers; zeros are valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes a `struct rusage`, which outlives the call.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    (usage.ru_minflt as u64, usage.ru_majflt as u64)
}

/// Number of the calling thread, as in /proc.
pub fn number() -> u32 {
    // SAFETY: gettid takes nothing and cannot fail.
    unsafe { libc::gettid() as u32 }
}

/// Whether this process has other threads than the calling one, and those of these names; true where /proc does not tell.
pub fn has_others(but: &[&str]) -> bool {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return true };
    let this = number().to_string();
    let others = threads.flatten().filter(|thread| thread.file_name() != *this);
    // One that has ended meanwhile has no name.
    let mut names = others.filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok());
    names.any(|name| !but.contains(&name.trim_end()))
}

/// Blocks every signal in the calling thread.
pub fn block_signals() {
    // SAFETY: `set` is initialised by sigfillset before it is used.
    unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&mut set);
        libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
}

/// Runs `f` with every signal blocked: the threads that it starts leave all signals to the program's own.
pub fn without_signals<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(libc::sigset_t);
    impl Drop for Restore {
        fn drop(&mut self) {
            // SAFETY: the set is what pthread_sigmask filled in below.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
        }
    }
    // SAFETY: `all` is initialised by sigfillset, `before` by pthread_sigmask.
    let _restore = unsafe {
        let mut all = std::mem::zeroed::<libc::sigset_t>();
        let mut before = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        Restore(before)
    };
    f()
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
}
/// `PTHREAD_CANCEL_DISABLE` of glibc and musl.
const CANCEL_DISABLE: libc::c_int = 1;

/// Runs `f` without this thread being cancelled in the middle of it. `f` does not unwind.
#[inline]
pub fn uncancelled<R>(f: impl FnOnce() -> R) -> R {
    let mut before = 0;
    // SAFETY: the calls change this thread's own state; `before` is what the first one said.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &mut before) };
    let result = f();
    // SAFETY: as above.
    unsafe { pthread_setcancelstate(before, std::ptr::null_mut()) };
    result
}

/// Writes `message` to the program's standard error, also from a thread with descriptors of its own, and ends the process
/// with SIGBUS: to the program its memory is broken.
pub fn die(message: &str) -> ! {
    let pid = std::process::id();
    let line = format!("netvm: {message}\n");
    let by_name = |_| std::fs::OpenOptions::new().append(true).open(format!("/proc/{pid}/fd/2"));
    let shown = standard_error().or_else(by_name).and_then(|mut file| file.write_all(line.as_bytes()));
    if shown.is_err() {
        let _ = io::stderr().write_all(line.as_bytes());
    }
    die_silently()
}

/// The program's standard error itself: a socket cannot be opened by its name, and a file would be written at a place of its own.
fn standard_error() -> io::Result<File> {
    let opened = |descriptor: libc::c_long| match i32::try_from(descriptor) {
        // SAFETY: the kernel has just made it, for nobody else.
        Ok(descriptor) if descriptor >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: plain system calls, without pointers.
    let process = opened(unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) })?;
    // SAFETY: as above.
    let shown = opened(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), 2, 0) })?;
    Ok(shown.into())
}

/// Ends the process with SIGBUS: to the program its memory is broken.
pub fn die_silently() -> ! {
    // SAFETY: plain system calls on this process; a core dump would read far memory that nobody serves any more.
    unsafe {
        let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &none);
        libc::signal(libc::SIGBUS, libc::SIG_DFL);
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
        // Not raise(3): to the C library an untraced thread is the one that made it.
        libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::gettid(), libc::SIGBUS);
        libc::_exit(128 + libc::SIGBUS);
    }
}

/// Sleeps until `word` is no longer `value`, somebody of this process wakes it, or `timeout` has passed.
pub fn futex_wait(word: &AtomicU32, value: u32, timeout: Option<Duration>) {
    wait(word, libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, value, timeout);
}

/// As [`futex_wait`], on a word that other processes map and wake too.
pub fn futex_wait_shared(word: &AtomicU32, value: u32, timeout: Option<Duration>) {
    wait(word, libc::FUTEX_WAIT, value, timeout);
}

fn wait(word: &AtomicU32, operation: i32, value: u32, timeout: Option<Duration>) {
    let time = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: timeout.subsec_nanos() as libc::c_long,
    });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `word` and `time` outlive the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, time) };
}

/// Wakes everyone of this process who waits on `word`.
pub fn futex_wake(word: &AtomicU32) {
    wake(word, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG);
}

/// Wakes everyone of any process who waits on `word` with [`futex_wait_shared`].
pub fn futex_wake_shared(word: &AtomicU32) {
    wake(word, libc::FUTEX_WAKE);
}

fn wake(word: &AtomicU32, operation: i32) {
    // SAFETY: `word` outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, i32::MAX) };
}

/// Waits until one of `fds` is readable (or writable where asked) or `timeout` has passed.
///
/// # Errors
/// Any error of poll(2) but EINTR.
pub fn poll(fds: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<usize> {
    let time = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: timeout.subsec_nanos() as libc::c_long,
    });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the slice and the time outlive the call.
    let ready = unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, time, std::ptr::null()) };
    if ready >= 0 {
        return Ok(ready as usize);
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EINTR) { Ok(0) } else { Err(error) }
}

/// A gate that one thread opens for another, handing a small number over.
#[derive(Debug, Default)]
pub struct Gate {
    /// 0: closed, else the number handed over plus one.
    state: AtomicU32,
}

impl Gate {
    /// A closed gate.
    pub const fn new() -> Self {
        Self { state: AtomicU32::new(0) }
    }

    /// Waits until it is opened, closes it again and returns the opener's number.
    pub fn wait(&self) -> u32 {
        loop {
            // Acquire: what the opener did before is seen here; pairs with the Release in `open`.
            let state = self.state.swap(0, Ordering::Acquire);
            if state != 0 {
                return state - 1;
            }
            futex_wait(&self.state, 0, None);
        }
    }

    /// Opens it. `number` is below `u32::MAX`.
    pub fn open(&self, number: u32) {
        self.state.store(number.saturating_add(1), Ordering::Release);
        futex_wake(&self.state);
    }
}

/// A lock that is taken and given back by calls, not by scope: it can be held across fork(2), and in the child by the
/// thread that forked.
#[derive(Debug, Default)]
pub struct Turn {
    /// 0: free, 1: taken, 2: taken and waited for.
    state: AtomicU32,
}

impl Turn {
    /// A free turn.
    pub const fn new() -> Self {
        Self { state: AtomicU32::new(0) }
    }

    /// Waits for the turn.
    pub fn take(&self) {
        // Acquire pairs with the Release in `give_back`.
        if self.state.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            return;
        }
        while self.state.swap(2, Ordering::Acquire) != 0 {
            futex_wait(&self.state, 2, None);
        }
    }

    /// Lets the next one have it.
    pub fn give_back(&self) {
        if self.state.swap(0, Ordering::Release) == 2 {
            futex_wake(&self.state);
        }
    }
}

/// Closes descriptors of the calling thread's table whose owner lives in another table (see [`own_descriptors`]).
pub fn close_copies(fds: &[RawFd]) {
    for &fd in fds {
        // SAFETY: the caller's owner objects have moved to another descriptor table; these numbers are copies left behind.
        unsafe { libc::syscall(libc::SYS_close, fd) };
    }
}

/// An entry for [`poll`] that waits until `descriptor` is readable.
pub fn readable(descriptor: &impl std::os::fd::AsFd) -> libc::pollfd {
    use std::os::fd::AsRawFd;
    libc::pollfd { fd: descriptor.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 }
}

/// How many descriptors this process may have.
pub fn descriptors_max() -> usize {
    descriptors_limit().map_or(0, |limit| usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX))
}

/// Lets this process have as many descriptors as it may allow itself. Not for libraries: programs that use select(2) must have few.
pub fn raise_descriptors_max() {
    if let Some(limit) = descriptors_limit() {
        let limit = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
        // SAFETY: the kernel reads the local. What it refuses changes nothing.
        let _ = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    }
}

fn descriptors_limit() -> Option<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes to the local.
    (unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0).then_some(limit)
}
