//! Signals taken one by one by a thread that waits for them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

pub use libc::{SIGCHLD, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM};

/// A set of signals, blocked in the thread that made it and the threads it starts.
#[derive(Debug)]
pub struct Signals {
    set: libc::sigset_t,
}

impl Signals {
    /// Blocks `signals`. Call it before any other thread is started.
    pub fn block(signals: &[i32]) -> Self {
        // SAFETY: `set` is initialised by sigemptyset before it is used; sigaddset ignores numbers that are no signals.
        let set = unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            for &signal in signals {
                libc::sigaddset(&mut set, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            set
        };
        Self { set }
    }

    /// Waits for one of them.
    pub fn wait(&self) -> i32 {
        let mut signal = 0;
        // SAFETY: both arguments outlive the call.
        while unsafe { libc::sigwait(&self.set, &mut signal) } != 0 {}
        signal
    }

    /// A descriptor that is readable while one of them waits.
    ///
    /// # Errors
    /// EMFILE, ENOMEM.
    pub fn descriptor(&self) -> io::Result<SignalFd> {
        // SAFETY: the set outlives the call; the new descriptor is checked and owned at once.
        let fd = unsafe { libc::signalfd(-1, &self.set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nobody else owns (checked >= 0 above).
        Ok(SignalFd(unsafe { OwnedFd::from_raw_fd(fd) }))
    }
}

/// See [`Signals::descriptor`].
#[derive(Debug)]
pub struct SignalFd(OwnedFd);

impl AsFd for SignalFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sends a signal to a process.
///
/// # Errors
/// ESRCH when it is gone, EPERM when it is somebody else's.
pub fn send(pid: u32, signal: i32) -> io::Result<()> {
    // SAFETY: kill(2) takes numbers only.
    if unsafe { libc::kill(pid as i32, signal) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
