//! The floor of a fault that the faulting thread answers itself: UFFDIO_COPY in a handler of SIGBUS, for `netvm bench`. No other thread
//! takes part, so nobody is woken. The pager does not use it: a program's own handlers, and faults in the kernel, rule it out.

use crate::bench_floor::{FaultFloor, FloorFeatures};
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Frames that are copied from: they stay in the processor's cache.
const FRAMES: usize = 64;

struct Served {
    floor: FaultFloor,
    before: libc::sigaction,
}

/// What the handler answers faults of. Whoever set it holds [`ONE`].
static SERVED: AtomicPtr<Served> = AtomicPtr::new(ptr::null_mut());
static ONE: Mutex<()> = Mutex::new(());

/// A range whose missing pages are copied in by whoever touches them. One at a time in a process: others wait.
pub struct SigbusFloor {
    /// From a box; the handler has it, too.
    served: NonNull<Served>,
    _one: MutexGuard<'static, ()>,
}

impl SigbusFloor {
    /// Maps and registers a range of `pages` pages, and takes SIGBUS over.
    ///
    /// # Errors
    /// As [`FaultFloor::new`]; that of sigaction(2).
    pub fn new(pages: usize) -> io::Result<Self> {
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let floor =
            FaultFloor::new(pages.max(FRAMES), FloorFeatures { sigbus: true, ..FloorFeatures::default() })?;
        // SAFETY: all zeros is a valid sigaction; `on_sigbus` has the signature that SA_SIGINFO asks for, and calls only ioctl(2) and
        // sigaction(2). It finds what it works on in a box that is kept until the former action is back.
        unsafe {
            let mut before = std::mem::zeroed();
            libc::sigaction(libc::SIGBUS, ptr::null(), &mut before);
            let served = NonNull::from(Box::leak(Box::new(Served { floor, before })));
            SERVED.store(served.as_ptr(), Ordering::Release);
            let floor = Self { served, _one: one };
            let mut action = std::mem::zeroed::<libc::sigaction>();
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            if libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(floor)
        }
    }

    fn floor(&self) -> &FaultFloor {
        // SAFETY: the box lives until `self` is dropped, and nobody changes what is in it.
        unsafe { &self.served.as_ref().floor }
    }

    /// Reads the first word of a page, which is copied in if it is missing.
    pub fn read(&self, page: usize) -> u64 {
        self.floor().read(page)
    }

    /// Makes the first `count` pages missing again.
    ///
    /// # Errors
    /// That of madvise(2).
    pub fn discard(&self, count: usize) -> io::Result<()> {
        self.floor().discard(0, count)
    }
}

impl Drop for SigbusFloor {
    fn drop(&mut self) {
        // SAFETY: `before` is what sigaction(2) said the action was. Then no handler finds the box any more, which nobody else frees.
        unsafe {
            libc::sigaction(libc::SIGBUS, &self.served.as_ref().before, ptr::null_mut());
            SERVED.store(ptr::null_mut(), Ordering::Release);
            drop(Box::from_raw(self.served.as_ptr()));
        }
    }
}

extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the pointer is null or names the box of a floor whose owner has not given the signal back yet.
    let served = unsafe { SERVED.load(Ordering::Acquire).as_ref() };
    // SAFETY: the kernel passes a valid siginfo_t to a handler with SA_SIGINFO.
    let address = unsafe { (*info).si_addr() } as usize;
    if let Some(served) = served
        && let Some(page) = served.floor.page_at(address)
        && served.floor.copy_in(page, page % FRAMES, 1, false).is_ok()
    {
        return;
    }
    // Not ours: the access is repeated, and meets whoever had the signal before.
    // SAFETY: both are valid actions: the former one, or all zeros, which is SIG_DFL.
    unsafe {
        let default = std::mem::zeroed();
        libc::sigaction(libc::SIGBUS, served.map_or(&default, |served| &served.before), ptr::null_mut());
    }
}

/// Whoever else has to do with the handlers of this process's SIGBUS meanwhile.
#[cfg(test)]
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_touches_a_page_copies_it_in() {
        let Ok(floor) = SigbusFloor::new(128) else {
            eprintln!("whoever_touches_a_page_copies_it_in: skipped (no userfaultfd here)");
            return;
        };
        let first: Vec<u64> = (0..FRAMES).map(|page| floor.read(page)).collect();
        let second: Vec<u64> = (FRAMES..2 * FRAMES).map(|page| floor.read(page)).collect();
        assert!(first == second && first[1] != first[2] && first[1] != 0);
        floor.discard(128).unwrap();
        assert_eq!(floor.read(3), first[3]);
    }
}
