//! The end of a process whose first thread ends by itself, as by pthread_exit(3).
//!
//! The C library ends a process with its last thread, but counts the pager's, which has no end. So the first thread waits for the program's others, and ends
//! the process as the last of them would have.

use crate::small;
use crate::tls::Internal;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Key whose destructor is called when the first thread ends.
static KEY: AtomicU32 = AtomicU32::new(0);

/// Destructors may set values anew, so often (PTHREAD_DESTRUCTOR_ITERATIONS): those of the program's keys come before the last time.
const ROUNDS: usize = 4;

/// How the threads of this library are called.
const NAMES: [&str; 2] = ["netvm-pager", "netvm-comeback"];

/// Time between two looks at first, and at most.
const LOOK: Duration = Duration::from_millis(1);
const LOOK_MAX: Duration = Duration::from_millis(32);

/// Before the program starts, in its first thread.
pub(crate) fn set_up() -> Result<(), String> {
    small::set_up_key(&KEY, ends)?;
    remember(1);
    Ok(())
}

/// In the child of a fork: this is its first thread.
pub(crate) fn after_fork() {
    remember(1);
}

fn remember(round: usize) {
    // SAFETY: the key exists; its destructor takes the value for a number. If there is no memory for it the process goes on until it is ended.
    unsafe { libc::pthread_setspecific(KEY.load(Ordering::Relaxed), std::ptr::without_provenance(round)) };
}

extern "C" fn ends(round: *mut c_void) {
    if round.addr() < ROUNDS {
        return remember(round.addr() + 1);
    }
    let mut pause = LOOK;
    while has_others() {
        std::thread::sleep(pause);
        pause = (pause * 2).min(LOOK_MAX);
    }
    // SAFETY: this thread is the program's last, so nobody else calls exit(3).
    unsafe { libc::exit(0) }
}

/// Whether the program has other threads than the calling one.
pub(crate) fn has_others() -> bool {
    let _internal = Internal::enter();
    netvm_sys::thread::has_others(&NAMES)
}
