//! Waiting for many descriptors, and waking a waiter.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// What to wait for, or what happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// Bytes (or an end, or an error) to receive.
    pub readable: bool,
    /// Room to send.
    pub writable: bool,
}

/// One descriptor that is ready.
#[derive(Clone, Copy, Debug)]
pub struct Ready {
    /// The number it was added under.
    pub id: u64,
    /// What it is ready for; an error or a hang-up counts as both.
    pub interest: Interest,
}

/// Most events that one wait returns.
pub const EVENTS_MAX: usize = 64;

/// A set of descriptors to wait for (level-triggered).
#[derive(Debug)]
pub struct Epoll {
    fd: OwnedFd,
}

impl Epoll {
    /// An empty set.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that the kernel just gave us.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    fn control(&self, op: i32, fd: BorrowedFd<'_>, id: u64, interest: Interest) -> io::Result<()> {
        let mut events = 0;
        if interest.readable {
            events |= (libc::EPOLLIN | libc::EPOLLRDHUP) as u32;
        }
        if interest.writable {
            events |= libc::EPOLLOUT as u32;
        }
        let mut event = libc::epoll_event { events, u64: id };
        // SAFETY: `event` outlives the call.
        let result = unsafe { libc::epoll_ctl(self.fd.as_raw_fd(), op, fd.as_raw_fd(), &mut event) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Adds a descriptor under a number of the caller's.
    ///
    /// # Errors
    /// EEXIST when it is there already; ENOMEM, ENOSPC.
    pub fn add(&self, fd: BorrowedFd<'_>, id: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, id, interest)
    }

    /// Changes what to wait for.
    ///
    /// # Errors
    /// ENOENT when it is not there.
    pub fn change(&self, fd: BorrowedFd<'_>, id: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, id, interest)
    }

    /// Removes a descriptor.
    ///
    /// # Errors
    /// ENOENT when it is not there.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd, 0, Interest { readable: false, writable: false })
    }

    /// Waits until something is ready or `timeout` has passed (before Linux 5.11 rounded up to milliseconds); `ready` holds what is.
    ///
    /// # Errors
    /// None in practice; EINTR is an empty result.
    pub fn wait(&self, ready: &mut Vec<Ready>, timeout: Option<Duration>) -> io::Result<()> {
        ready.clear();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS_MAX];
        let is_short = timeout.is_some_and(|timeout| timeout.subsec_nanos() % 1_000_000 != 0);
        let mut count = -1;
        if let Some(timeout) = timeout.filter(|_| is_short) {
            let time = libc::timespec {
                tv_sec: timeout.as_secs() as libc::time_t,
                tv_nsec: timeout.subsec_nanos() as libc::c_long,
            };
            // SAFETY: the kernel writes at most EVENTS_MAX events into the local array and reads the local time; no signal mask.
            count = unsafe {
                libc::syscall(
                    libc::SYS_epoll_pwait2,
                    self.fd.as_raw_fd(),
                    events.as_mut_ptr(),
                    EVENTS_MAX as i32,
                    &raw const time,
                    std::ptr::null::<libc::sigset_t>(),
                    0usize,
                ) as i32
            };
        }
        if !is_short || (count < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS)) {
            let whole = |timeout: Duration| i32::try_from(timeout.as_nanos().div_ceil(1_000_000));
            let milliseconds = timeout.map_or(-1, |timeout| whole(timeout).unwrap_or(i32::MAX));
            // SAFETY: the kernel writes at most EVENTS_MAX events into the local array.
            count = unsafe {
                libc::epoll_wait(self.fd.as_raw_fd(), events.as_mut_ptr(), EVENTS_MAX as i32, milliseconds)
            };
        }
        if count < 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) };
        }
        for event in &events[..count as usize] {
            let (bits, id) = (event.events as i32, event.u64);
            let trouble = bits & (libc::EPOLLERR | libc::EPOLLHUP) != 0;
            let readable = trouble || bits & (libc::EPOLLIN | libc::EPOLLRDHUP) != 0;
            let writable = trouble || bits & libc::EPOLLOUT != 0;
            ready.push(Ready { id, interest: Interest { readable, writable } });
        }
        Ok(())
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A descriptor that can be made readable, also by a signal handler.
#[derive(Debug)]
pub struct EventFd {
    fd: OwnedFd,
}

impl EventFd {
    /// A descriptor that is not readable yet.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that the kernel just gave us.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Makes it readable. Safe in a signal handler.
    pub fn signal(&self) {
        let one = 1u64;
        // SAFETY: eight bytes of a local. It fails only when the counter is full: then it is readable already.
        unsafe { libc::write(self.fd.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Makes it unreadable again; returns how often it was signalled since.
    pub fn take(&self) -> u64 {
        let mut count = 0u64;
        // SAFETY: eight bytes of a local. It fails only with EAGAIN when nobody signalled: the count stays 0.
        unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut count).cast(), 8) };
        count
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A descriptor that becomes readable after a time, also when a signal handler sets it.
#[derive(Debug)]
pub struct Timer {
    fd: OwnedFd,
}

impl Timer {
    /// A timer that is not set.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let fd =
            unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that the kernel just gave us.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// Once, after this time from now on; what was set before is forgotten, and it is not readable any more. Safe in a signal handler.
    pub fn set(&self, after: Duration) {
        // Zero would mean never.
        let after = after.max(Duration::from_nanos(1));
        let it_value = libc::timespec {
            tv_sec: after.as_secs().min(1 << 30) as libc::time_t,
            tv_nsec: after.subsec_nanos() as libc::c_long,
        };
        let it_interval = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let time = libc::itimerspec { it_interval, it_value };
        // SAFETY: the kernel reads a local. It fails only for times that are none.
        unsafe { libc::timerfd_settime(self.fd.as_raw_fd(), 0, &time, std::ptr::null_mut()) };
    }

    /// Makes it unreadable again; true when it was readable.
    pub fn take(&self) -> bool {
        let mut count = 0u64;
        // SAFETY: eight bytes of a local. It fails only with EAGAIN when the time has not passed.
        unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut count).cast(), 8) == 8 }
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
