//! Signals taken one by one by a thread that waits for them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

pub use libc::{SIGCHLD, SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGSTOP, SIGTERM};

/// A set of signals, blocked in the thread that made it and the threads it starts.
#[derive(Debug)]
pub struct Signals {
    set: libc::sigset_t,
    /// The mask of the thread before.
    before: libc::sigset_t,
}

/// A signal that was waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Its number.
    pub number: i32,
    /// Sent by the kernel (for a terminal, or for a child's end), not by a process.
    pub from_kernel: bool,
}

impl Signals {
    /// Blocks `signals`. Call it before any other thread is started.
    pub fn block(signals: &[i32]) -> Self {
        // SAFETY: `set` is initialised by sigemptyset, `before` by pthread_sigmask; sigaddset ignores numbers that are no
        // signals.
        unsafe {
            let mut set = std::mem::zeroed();
            let mut before = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            for &signal in signals {
                libc::sigaddset(&mut set, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before);
            Self { set, before }
        }
    }

    /// Gives `command` the mask that this thread had before: a program must not find its signals blocked.
    pub fn restore_in(&self, command: &mut Command) {
        let before = self.before;
        // SAFETY: between fork and exec only pthread_sigmask is called, which is async-signal-safe; the mask is a copy.
        unsafe {
            command.pre_exec(move || {
                match libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) {
                    0 => Ok(()),
                    error => Err(io::Error::from_raw_os_error(error)),
                }
            });
        }
    }

    /// Waits for one of them, and tells where it came from.
    pub fn wait_from(&self) -> Taken {
        // SAFETY: an all-zero siginfo_t is valid; it and the set outlive the call, which fills it in.
        let (number, code) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let mut number;
            loop {
                number = libc::sigwaitinfo(&self.set, &mut info);
                if number > 0 {
                    break;
                }
            }
            (number, info.si_code)
        };
        Taken { number, from_kernel: code > 0 }
    }

    /// The same for up to `patience`.
    pub fn wait_from_within(&self, patience: Duration) -> Option<Taken> {
        let time = libc::timespec {
            tv_sec: patience.as_secs() as libc::time_t,
            tv_nsec: patience.subsec_nanos() as libc::c_long,
        };
        // SAFETY: an all-zero siginfo_t is valid; it, the set and the time outlive the call, which fills it in.
        unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let number = libc::sigtimedwait(&self.set, &mut info, &time);
            (number > 0).then_some(Taken { number, from_kernel: info.si_code > 0 })
        }
    }

    /// Waits for one of them.
    pub fn wait(&self) -> i32 {
        self.wait_from().number
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

/// From now on a write to a pipe that nobody reads ends the process without a word, as it ends other tools: Rust's runtime ignores
/// SIGPIPE. For programs that only print.
pub fn end_at_closed_pipes() {
    // SAFETY: signal(2) takes numbers only; the default disposition runs no code of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Signals that mean what a program wants them to, as schedulers of jobs send them; they end who does nothing about them.
pub fn of_programs() -> impl Iterator<Item = i32> {
    [libc::SIGUSR1, libc::SIGUSR2, libc::SIGXCPU].into_iter().chain(libc::SIGRTMIN()..=libc::SIGRTMAX())
}

/// Sends a signal to a process.
///
/// # Errors
/// ESRCH when it is gone, EPERM when it is somebody else's.
pub fn send(pid: u32, signal: i32) -> io::Result<()> {
    // SAFETY: kill(2) takes numbers only.
    if unsafe { libc::kill(pid as i32, signal) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether who has started this process wants it to go on at this signal: nohup(1), shells that start something in the background. One that
/// is blocked arrives all the same.
pub fn is_ignored(signal: i32) -> bool {
    // SAFETY: an all-zero sigaction is valid, and a local; nothing is changed.
    unsafe {
        let mut now = std::mem::zeroed::<libc::sigaction>();
        libc::sigaction(signal, std::ptr::null(), &mut now) == 0 && now.sa_sigaction == libc::SIG_IGN
    }
}

/// Ends this process as `signal` ends one that has done nothing about it: for who was told to end and has put everything away.
pub fn end_by(signal: i32) -> ! {
    // SAFETY: `set` is initialised by sigemptyset and outlives the call; the others take numbers only, and the default disposition runs no
    // code of ours.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, signal);
        libc::signal(signal, libc::SIG_DFL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
        libc::raise(signal);
    }
    // It was one that ends nobody.
    std::process::exit(128 + signal)
}

/// Whether there is such a process, also of another user, or one that has ended and that nobody has waited for.
pub fn exists(pid: u32) -> bool {
    // What is no positive number means other things than a process.
    let is_number = i32::try_from(pid).is_ok_and(|pid| pid > 0);
    is_number && !send(pid, 0).is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH))
}

/// `command` is killed when the thread that starts it ends.
pub fn die_with_parent(command: &mut Command) {
    with_parent(command, libc::SIGKILL);
}

/// `command` is asked to end (SIGTERM) when the thread that starts it ends: for those that have others to end.
pub fn end_with_parent(command: &mut Command) {
    with_parent(command, libc::SIGTERM);
}

fn with_parent(command: &mut Command, signal: i32) {
    let parent = std::process::id();
    // SAFETY: between fork and exec only prctl and getppid are called, which are async-signal-safe and take numbers only.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, signal) < 0 {
                return Err(io::Error::last_os_error());
            }
            // It may have ended before the kernel knew.
            if libc::getppid() as u32 == parent { Ok(()) } else { Err(io::ErrorKind::BrokenPipe.into()) }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_dies_with_the_thread_that_started_it() {
        let child = std::thread::spawn(|| {
            let mut command = Command::new("sleep");
            command.arg("60");
            die_with_parent(&mut command);
            command.spawn().unwrap()
        });
        let mut child = child.join().unwrap();
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    fn a_child_gets_the_mask_from_before() {
        let signals = Signals::block(&[SIGTERM, SIGHUP]);
        let blocked = |command: &mut Command| {
            let output = command.args(["SigBlk", "/proc/self/status"]).output().unwrap();
            u64::from_str_radix(
                String::from_utf8(output.stdout).unwrap().split_whitespace().nth(1).unwrap(),
                16,
            )
            .unwrap()
        };
        let bits = 1 << (SIGTERM - 1) | 1 << (SIGHUP - 1);
        let mut command = Command::new("grep");
        signals.restore_in(&mut command);
        assert_eq!(blocked(&mut command) & bits, 0);
        // SAFETY: a signal to this very thread, which has it blocked.
        unsafe { libc::pthread_kill(libc::pthread_self(), SIGHUP) };
        assert_eq!(signals.wait_from(), Taken { number: SIGHUP, from_kernel: false });
    }
}
