//! Page faults that the faulting thread serves itself, in a handler of SIGBUS.
//!
//! A range registered with a userfaultfd that has `UFFD_FEATURE_SIGBUS` sends whoever touches a missing page a SIGBUS. The handler here calls the
//! range's [`Server`], after which the access is repeated. Every other SIGBUS goes to whoever had the signal before, as if
//! this module were not there; a program that sets its own handler later must pass on what it does not know, with all signals blocked
//! (`sa_mask`) and without `SA_ONSTACK`.
//!
//! The handler runs on the stack of the thread that faults: alternate stacks are too small for it. All signals are blocked, and the thread
//! is not cancelled meanwhile. What it interrupted is an access to the range, never malloc or another function of the C library
//! with a lock, as those have nothing there: so the server may allocate. It must not touch the range itself.

use crate::before::Before;
use crate::guarded;
use crate::thread::{die, uncancelled};
use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

/// Serves the faults of a range, on any of the program's threads, several at once.
pub trait Server: Send + Sync {
    /// Returns when the access at `address` can be repeated: the page is there, or was asked for in vain. False: it is not the server's, as
    /// in a child of a fork. `write`: the access was one, or that is not known.
    fn serve(&self, address: usize, write: bool) -> bool;

    /// It serves nothing any more, and never will.
    fn has_ended(&self) -> bool {
        false
    }
}

struct Served {
    range: Range<usize>,
    server: Box<dyn Server>,
    /// The one before, or null.
    next: AtomicPtr<Served>,
}

/// All that are served, the newest first. They are never freed: a thread may be on its way along the list.
static SERVED: AtomicPtr<Served> = AtomicPtr::new(ptr::null_mut());
/// Those that have ended, and are in the list no more.
static ENDED: Mutex<Vec<&Served>> = Mutex::new(Vec::new());
static BEFORE: Before = Before::new();

thread_local! {
    /// The thread is in a server.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// From now on, and until the process ends, faults of `range` are served by `server`. Its owner keeps the range mapped.
///
/// # Errors
/// That of sigaction(2).
pub fn serve(range: Range<usize>, server: Box<dyn Server>) -> io::Result<()> {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // Before ours, so that ours comes first: its own accesses may be to this range.
    let _ = guarded::install();
    leave_out_ended();
    let next = AtomicPtr::new(SERVED.load(Ordering::Relaxed));
    let served = Box::into_raw(Box::new(Served { range, server, next }));
    // Release: whoever finds it sees what is in it.
    SERVED.store(served, Ordering::Release);
    // SAFETY: who serves faults lives as long as the process; `on_sigbus` says what it does with others.
    unsafe { BEFORE.take(libc::SIGBUS, on_sigbus, 0, true) }
}

/// Who looks for a server need not pass those that have ended. The caller has the turn.
fn leave_out_ended() {
    let mut link = &SERVED;
    loop {
        // SAFETY: null or a leaked box, as in `find`.
        let Some(served) = (unsafe { link.load(Ordering::Acquire).as_ref() }) else { return };
        if served.server.has_ended() {
            // Whoever is there now goes on from it as before.
            link.store(served.next.load(Ordering::Acquire), Ordering::Release);
            ENDED.lock().unwrap_or_else(PoisonError::into_inner).push(served);
        } else {
            link = &served.next;
        }
    }
}

extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo_t to a handler with SA_SIGINFO.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // Not what a process has sent, nor a page whose memory is broken.
    if code == libc::BUS_ADRERR
        && let Some(served) = find(address)
        // SAFETY: the kernel's context.
        && serve_here(served, address, unsafe { is_write(context) })
    {
        return;
    }
    // SAFETY: the kernel's arguments.
    unsafe { BEFORE.pass_on(signal, info, context) };
}

fn find(address: usize) -> Option<&'static Served> {
    let mut next = SERVED.load(Ordering::Acquire);
    loop {
        // SAFETY: null or a leaked box that is only read since it is in the list.
        let served = unsafe { next.as_ref() }?;
        if served.range.contains(&address) {
            return Some(served);
        }
        next = served.next.load(Ordering::Acquire);
    }
}

/// Whether the access that faulted was a write; true where the processor's way to say so is not known here.
///
/// # Safety
/// The context is that of a handler.
#[allow(clippy::missing_const_for_fn, reason = "not on all processors")]
unsafe fn is_write(context: *mut libc::c_void) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        const WRITE: i64 = 1 << 1;
        // SAFETY: the kernel passes a valid ucontext_t to a handler with SA_SIGINFO.
        let context = unsafe { &*context.cast::<libc::ucontext_t>() };
        context.uc_mcontext.gregs[libc::REG_ERR as usize] & WRITE != 0
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = context;
        true
    }
}

fn serve_here(served: &'static Served, address: usize, write: bool) -> bool {
    if INSIDE.replace(true) {
        die(&format!("far memory at {address:#x} was touched while a fault of this thread was being served"));
    }
    // SAFETY: this thread's own errno.
    let errno = unsafe { *libc::__errno_location() };
    let served = uncancelled(|| catch_unwind(AssertUnwindSafe(|| served.server.serve(address, write))));
    let Ok(served) = served else { die("a fault of far memory could not be served, for a mistake in netvm") };
    // SAFETY: as above; it becomes what it was.
    unsafe { *libc::__errno_location() = errno };
    INSIDE.set(false);
    served
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_floor::{FaultFloor, FloorFeatures, PAGE_BYTES};
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    struct Copies(Arc<FaultFloor>, AtomicU32);

    impl Server for Copies {
        fn serve(&self, address: usize, _: bool) -> bool {
            self.1.fetch_add(1, Ordering::Relaxed);
            let page = self.0.page_at(address).unwrap();
            // SAFETY: this thread's own errno.
            unsafe { *libc::__errno_location() = libc::ENOTTY };
            // Another thread may have been faster.
            if let Err(error) = self.0.copy_in(page, page, 1, false) {
                assert_eq!(error.raw_os_error(), Some(libc::EEXIST));
            }
            true
        }
    }

    struct Ends(Arc<AtomicU32>);

    impl Server for Ends {
        fn serve(&self, _: usize, _: bool) -> bool {
            false
        }

        fn has_ended(&self) -> bool {
            self.0.load(Ordering::Relaxed) > 0
        }
    }

    #[test]
    fn what_has_ended_is_left_out_and_nothing_else() {
        let _alone = crate::bench_sigbus::alone();
        // Nobody has anything at these addresses.
        let range = |number: usize| (number << 12)..((number + 1) << 12);
        let ended: Vec<_> = (1..9).map(|_| Arc::new(AtomicU32::new(0))).collect();
        let end = |numbers: &[usize]| {
            numbers.iter().for_each(|&number| ended[number - 1].store(1, Ordering::Relaxed));
        };
        let found = || (1..9).filter(|&number| find(range(number).start).is_some()).collect::<Vec<_>>();
        for number in 1..8 {
            serve(range(number), Box::new(Ends(Arc::clone(&ended[number - 1])))).unwrap();
        }
        assert_eq!(found(), [1, 2, 3, 4, 5, 6, 7]);
        // The oldest, two neighbours, and the newest.
        end(&[1, 3, 4, 7]);
        serve(range(8), Box::new(Ends(Arc::clone(&ended[7])))).unwrap();
        assert_eq!(found(), [2, 5, 6, 8]);
        end(&[2, 5, 6, 8]);
        leave_out_ended();
        assert_eq!(found(), []);
    }

    #[test]
    fn several_ranges_are_served_and_errno_is_kept() {
        let _alone = crate::bench_sigbus::alone();
        let features = FloorFeatures { sigbus: true, ..FloorFeatures::default() };
        let (Ok(first), Ok(second)) = (FaultFloor::new(64, features), FaultFloor::new(8, features)) else {
            eprintln!("several_ranges_are_served_and_errno_is_kept: skipped (no userfaultfd here)");
            return;
        };
        let floors = [Arc::new(first), Arc::new(second)];
        for floor in &floors {
            let start = floor.area_start();
            let server = Box::new(Copies(Arc::clone(floor), AtomicU32::new(0)));
            serve(start..start + floor.pages() * PAGE_BYTES, server).unwrap();
        }
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for floor in &floors {
                        for page in 0..floor.pages() {
                            // SAFETY: this thread's own errno.
                            unsafe { *libc::__errno_location() = libc::EDOM };
                            let word = floor.read(page);
                            // SAFETY: as above.
                            assert_eq!(unsafe { *libc::__errno_location() }, libc::EDOM);
                            assert_eq!(word == 0, page == 0, "page {page}");
                        }
                    }
                });
            }
        });
        std::mem::forget(floors);
    }
}
