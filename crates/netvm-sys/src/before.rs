//! Who had a signal before a handler of this library: it gets what is not the library's.

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A handler with SA_SIGINFO.
pub(crate) type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

/// What handled a signal before. It is kept for ever: another thread may be in the handler.
pub(crate) struct Before(AtomicPtr<libc::sigaction>);

impl Before {
    /// Nothing has been taken.
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Takes `signal` for `handler`, with `flags` beside SA_SIGINFO and SA_RESTART, and all signals blocked meanwhile if so wanted. Nothing
    /// changes when the signal is the handler's already. Nor when it was, and another has taken its place since: that one must pass on what
    /// it does not know, so it calls `handler`, which would call it again for ever.
    ///
    /// Calls for one `Before` come one after the other.
    ///
    /// # Safety
    /// `handler` may run at any time from now on, in any thread, and calls nothing that such a handler must not call. It is never unloaded.
    pub(crate) unsafe fn take(
        &self,
        signal: i32,
        handler: Handler,
        flags: i32,
        block_all: bool,
    ) -> io::Result<()> {
        // SAFETY: all zeros is a valid sigaction; both outlive the calls; of the handler the caller vouches.
        unsafe {
            let mut now = Box::new(std::mem::zeroed::<libc::sigaction>());
            if libc::sigaction(signal, ptr::null(), &mut *now) != 0 {
                return Err(io::Error::last_os_error());
            }
            let was_taken = !self.0.load(Ordering::Acquire).is_null();
            let calls_nobody = [libc::SIG_DFL, libc::SIG_IGN].contains(&now.sa_sigaction);
            if now.sa_sigaction == handler as *const () as usize || (was_taken && !calls_nobody) {
                return Ok(());
            }
            // Before the handler can run.
            self.0.store(Box::into_raw(now), Ordering::Release);
            let mut action = std::mem::zeroed::<libc::sigaction>();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | flags;
            if block_all {
                libc::sigfillset(&mut action.sa_mask);
            }
            if libc::sigaction(signal, &action, ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// In the handler, for what is not its own: as if it were not there.
    ///
    /// # Safety
    /// The arguments are those that the kernel has called the handler with.
    pub(crate) unsafe fn pass_on(&self, signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: null or a leaked box that is written no more.
        let before = unsafe { self.0.load(Ordering::Acquire).as_ref() };
        let handler = before.map_or(libc::SIG_DFL, |before| before.sa_sigaction);
        // SAFETY: a valid siginfo_t, as the caller vouches.
        let is_fault = unsafe { (*info).si_code } > 0;
        match before {
            Some(before) if handler != libc::SIG_DFL && handler != libc::SIG_IGN => {
                // SAFETY: whoever set this handler vouched for its signature with its flags; it gets what the kernel gave us.
                unsafe {
                    if before.sa_flags & libc::SA_SIGINFO != 0 {
                        let handler: Handler = std::mem::transmute(handler);
                        handler(signal, info, context);
                    } else {
                        let handler: extern "C" fn(i32) = std::mem::transmute(handler);
                        handler(signal);
                    }
                }
            }
            _ if handler == libc::SIG_IGN && !is_fault => {}
            // A fault is repeated, and ends the process as it should; what was sent comes again.
            // SAFETY: signal(2) and raise(3) are async-signal-safe.
            _ => unsafe {
                libc::signal(signal, libc::SIG_DFL);
                if !is_fault {
                    libc::raise(signal);
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    static OURS: Before = Before::new();
    static CALLS: [AtomicU32; 3] = [const { AtomicU32::new(0) }; 3];
    const SIGNAL: i32 = libc::SIGURG;

    extern "C" fn first(_: i32) {
        CALLS[0].fetch_add(1, Ordering::Relaxed);
    }

    extern "C" fn ours(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        assert!(CALLS[1].fetch_add(1, Ordering::Relaxed) < 9, "it is called for ever");
        // SAFETY: the kernel's arguments.
        unsafe { OURS.pass_on(signal, info, context) };
    }

    extern "C" fn passes_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        CALLS[2].fetch_add(1, Ordering::Relaxed);
        ours(signal, info, context);
    }

    fn raised() -> [u32; 3] {
        // SAFETY: the signal has a handler, or is ignored.
        assert_eq!(unsafe { libc::raise(SIGNAL) }, 0);
        std::array::from_fn(|index| CALLS[index].swap(0, Ordering::Relaxed))
    }

    fn take() {
        // SAFETY: `ours` is async-signal-safe.
        unsafe { OURS.take(SIGNAL, ours, 0, false) }.unwrap();
    }

    #[test]
    fn who_comes_later_and_passes_on_is_not_called_by_us() {
        // SAFETY: handlers that only count, of a signal that nobody else uses here.
        unsafe { libc::signal(SIGNAL, first as *const () as usize) };
        take();
        assert_eq!(raised(), [1, 1, 0]);
        take();
        assert_eq!(raised(), [1, 1, 0], "it is ours already");
        // SAFETY: as above.
        unsafe {
            let mut action = std::mem::zeroed::<libc::sigaction>();
            action.sa_sigaction = passes_on as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(SIGNAL, &action, ptr::null_mut());
        }
        take();
        assert_eq!(raised(), [1, 1, 1], "it calls us");
        // SAFETY: as above.
        unsafe { libc::signal(SIGNAL, libc::SIG_IGN) };
        take();
        assert_eq!(raised(), [0, 1, 0], "it has been reset");
    }
}
