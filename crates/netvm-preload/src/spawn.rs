//! Threads and programs that the program starts, and its questions about CPUs.
//!
//! The pager holds a thread that faults all the time on its own CPU. New threads and programs must not inherit that, and the
//! program must not see it.

use crate::kept;
use crate::real::{around, jumps};
use crate::run;
use crate::tls::words;
use netvm_sys::cpu::Hold;
use std::ffi::{c_char, c_int, c_void};

/// The functions defined here.
#[allow(non_upper_case_globals, reason = "named as the functions are")]
mod real {
    use crate::real::{Real, reals};

    reals! {
        pthread_create = c"pthread_create",
        thrd_create = c"thrd_create",
        posix_spawn = c"posix_spawn",
        posix_spawnp = c"posix_spawnp",
        system = c"system",
        popen = c"popen",
        execve = c"execve",
        execv = c"execv",
        execvp = c"execvp",
        execvpe = c"execvpe",
        fexecve = c"fexecve",
        execl = c"execl",
        execlp = c"execlp",
        execle = c"execle",
        sched_setaffinity = c"sched_setaffinity",
        pthread_setaffinity_np = c"pthread_setaffinity_np",
        sched_getaffinity = c"sched_getaffinity",
        pthread_getaffinity_np = c"pthread_getaffinity_np",
    }
}

pub(crate) use real::set_up;

/// No thread is held while it lives.
struct Suspended(Option<&'static Hold>);

impl Suspended {
    fn new() -> Self {
        let hold = hold();
        if let Some(hold) = hold {
            hold.suspend();
        }
        Self(hold)
    }
}

impl Drop for Suspended {
    fn drop(&mut self) {
        if let Some(hold) = self.0 {
            hold.resume();
        }
    }
}

/// What holds threads, once far memory has started, for the program's own threads.
fn hold() -> Option<&'static Hold> {
    if words().internal.get() != 0 { None } else { run::started()?.hold() }
}

/// The calling thread is about to become another program.
fn free_this_thread() {
    if let Some(hold) = hold() {
        hold.free_this_thread();
    }
}

/// A stack that the program has put into far memory becomes local: when the thread ends the kernel clears its number there, for those that
/// join it, and does not wait for a page that has left.
fn keep_stack_local(attributes: *const libc::pthread_attr_t) {
    if attributes.is_null() || !run::is_routed() || run::started().is_none() {
        return;
    }
    let (mut start, mut bytes) = (std::ptr::null_mut(), 0);
    // SAFETY: the program's own attributes, initialised by its contract with pthread_create; they are only read.
    let known = unsafe { libc::pthread_attr_getstack(attributes, &mut start, &mut bytes) } == 0;
    if known && run::touches_far(start as usize, bytes) {
        kept::keep_local(start as usize, bytes);
    }
}

type Start = extern "C" fn(*mut c_void) -> *mut c_void;
type Strings = *const *const c_char;

around!(
    /// pthread_create(3).
    pthread_create(thread: *mut libc::pthread_t, attributes: *const libc::pthread_attr_t, start: Start, argument: *mut c_void) -> c_int,
    (keep_stack_local(attributes), Suspended::new())
);
around!(
    /// thrd_create(3).
    thrd_create(thread: *mut c_void, start: extern "C" fn(*mut c_void) -> c_int, argument: *mut c_void) -> c_int,
    Suspended::new()
);
around!(
    /// posix_spawn(3).
    posix_spawn(
        pid: *mut libc::pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: Strings, environment: Strings
    ) -> c_int,
    Suspended::new()
);
around!(
    /// posix_spawnp(3).
    posix_spawnp(
        pid: *mut libc::pid_t, file: *const c_char, actions: *const c_void, attributes: *const c_void,
        arguments: Strings, environment: Strings
    ) -> c_int,
    Suspended::new()
);
around!(
    /// system(3).
    system(command: *const c_char) -> c_int,
    Suspended::new()
);
around!(
    /// popen(3).
    popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE,
    Suspended::new()
);
around!(
    /// execve(2).
    execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int,
    free_this_thread()
);
around!(
    /// execv(3).
    execv(path: *const c_char, arguments: Strings) -> c_int,
    free_this_thread()
);
around!(
    /// execvp(3).
    execvp(file: *const c_char, arguments: Strings) -> c_int,
    free_this_thread()
);
around!(
    /// execvpe(3).
    execvpe(file: *const c_char, arguments: Strings, environment: Strings) -> c_int,
    free_this_thread()
);
around!(
    /// fexecve(3).
    fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int,
    free_this_thread()
);

macro_rules! before_jump {
    ($($before:ident = $name:ident),*) => {
        $(extern "C" fn $before() -> *mut c_void {
            free_this_thread();
            real::$name.address()
        })*
    };
}
before_jump!(before_execl = execl, before_execlp = execlp, before_execle = execle);

jumps! {
    /// execl(3).
    execl = before_execl;
    /// execlp(3).
    execlp = before_execlp;
    /// execle(3).
    execle = before_execle;
}

around!(
    /// sched_setaffinity(2): the program places its threads itself.
    sched_setaffinity(thread: libc::pid_t, bytes: usize, set: *const c_void) -> c_int,
    give_up()
);
around!(
    /// pthread_setaffinity_np(3): the program places its threads itself.
    pthread_setaffinity_np(thread: libc::pthread_t, bytes: usize, set: *const c_void) -> c_int,
    give_up()
);

fn give_up() {
    if let Some(hold) = hold() {
        hold.give_up();
    }
}

/// Lets go before the question, since a held thread would see one CPU.
pub(crate) fn release() {
    if let Some(hold) = hold() {
        hold.release();
    }
}

around!(
    /// sched_getaffinity(2).
    sched_getaffinity(thread: libc::pid_t, bytes: usize, set: *mut c_void) -> c_int,
    release()
);
around!(
    /// pthread_getaffinity_np(3).
    pthread_getaffinity_np(thread: libc::pthread_t, bytes: usize, set: *mut c_void) -> c_int,
    release()
);
