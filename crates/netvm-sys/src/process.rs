//! Memory of another process that is not mapped here: process_vm_readv(2) and process_vm_writev(2), where the kernel lets us.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::fdpass::FdSocket;
use crate::raw;
use crate::shared::SharedSlice;

/// Where in the other process: address and length, laid out as the kernel's `iovec`. The kernel reads it when the copy begins: whoever else
/// can write it makes a copy that has not begun one of no bytes.
pub type Target = [AtomicU64; 2];

const _: () = assert!(size_of::<Target>() == size_of::<libc::iovec>());

/// Another process, not this one.
#[derive(Debug)]
pub struct Process {
    id: i32,
    /// Readable once it has ended: until somebody has seen that, nobody else has its number.
    pidfd: OwnedFd,
    /// A connection of its, which ends also when it becomes another program.
    channel: Arc<FdSocket>,
}

impl Process {
    /// Whoever has connected `channel`.
    ///
    /// # Errors
    /// `Unsupported` for this process itself, and for one in another name space of processes; ENOSYS before Linux 5.3; ESRCH when it has
    /// gone.
    pub fn of_peer(channel: Arc<FdSocket>) -> io::Result<Self> {
        let id = channel.peer_id()?;
        if id <= 0 || id == std::process::id() as i32 {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let pidfd = raw::pidfd(id)?;
        let process = Self { id, pidfd, channel };
        // Its connection is open, so it had not ended before, and its number is not another's.
        process.check()?;
        Ok(process)
    }

    /// # Errors
    /// ESRCH when it has ended or become another program.
    fn check(&self) -> io::Result<()> {
        let watch = |fd: i32, events| libc::pollfd { fd, events, revents: 0 };
        let mut fds = [watch(self.pidfd.as_raw_fd(), libc::POLLIN), watch(self.channel.as_raw_fd(), 0)];
        // SAFETY: two entries, locals.
        match unsafe { libc::poll(fds.as_mut_ptr(), 2, 0) } {
            0 => Ok(()),
            _ => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    }

    /// Copies from `target`.
    ///
    /// # Errors
    /// EPERM where the kernel does not let us; EFAULT where memory of either is gone, or only some of it came; ESRCH.
    pub fn read_into(&self, target: &Target, bytes: &mut [u8]) -> io::Result<()> {
        // SAFETY: they are ours alone.
        self.read(target, unsafe { SharedSlice::from_raw(bytes.as_mut_ptr(), bytes.len()) })
    }

    /// As [`Process::read_into`], into memory that others may change.
    ///
    /// # Errors
    /// As [`Process::read_into`].
    pub fn read(&self, target: &Target, local: SharedSlice) -> io::Result<()> {
        let piece = piece(local);
        // SAFETY: the kernel writes into `local`, no more than its length, and tells when some of it is not mapped; it only reads the
        // target, whose words others may change.
        let copied = unsafe { libc::process_vm_readv(self.id, &raw const piece, 1, remote(target), 1, 0) };
        whole(copied, local.len())?;
        // Afterwards: then it was it.
        self.check()
    }

    /// Copies to `target`: memory that the other process has offered for that.
    ///
    /// # Errors
    /// As [`Process::read_into`].
    pub fn write_from(&self, target: &Target, bytes: &[u8]) -> io::Result<()> {
        // SAFETY: only read, and not beyond this call.
        self.write(target, unsafe { SharedSlice::from_raw(bytes.as_ptr().cast_mut(), bytes.len()) })
    }

    /// As [`Process::write_from`], from memory that others may change.
    ///
    /// # Errors
    /// As [`Process::read_into`].
    pub fn write(&self, target: &Target, local: SharedSlice) -> io::Result<()> {
        // Not to another that has its number.
        self.check()?;
        let piece = piece(local);
        // SAFETY: the kernel only reads `local` and the target, and tells when some of it is not mapped. What it writes is not memory of
        // this process (`of_peer`).
        let copied = unsafe { libc::process_vm_writev(self.id, &raw const piece, 1, remote(target), 1, 0) };
        whole(copied, local.len())
    }
}

fn piece(local: SharedSlice) -> libc::iovec {
    libc::iovec { iov_base: local.as_ptr().cast(), iov_len: local.len() }
}

fn remote(target: &Target) -> *const libc::iovec {
    target.as_ptr().cast()
}

fn whole(copied: isize, bytes: usize) -> io::Result<()> {
    match usize::try_from(copied) {
        Ok(copied) if copied == bytes => Ok(()),
        Ok(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Whether another process's memory, `bytes` at `address`, can be read.
///
/// # Errors
/// EPERM; ENOSYS; EFAULT.
pub fn probe(id: u32, address: u64, bytes: &mut [u8]) -> io::Result<()> {
    let target = [AtomicU64::new(address), AtomicU64::new(bytes.len() as u64)];
    let piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: the kernel writes into `bytes`, no more than their length, and only reads the target.
    let copied = unsafe { libc::process_vm_readv(id as i32, &raw const piece, 1, remote(&target), 1, 0) };
    whole(copied, bytes.len())
}

/// Leaves the terminal and the group of whoever started this process.
///
/// # Errors
/// EPERM when it leads a group.
pub fn new_session() -> io::Result<()> {
    // SAFETY: no arguments.
    if unsafe { libc::setsid() } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fdpass::FdListener;

    #[test]
    fn this_process_is_no_other() {
        let name = format!("netvm-test-process-{}", std::process::id());
        let listener = FdListener::bind(name.as_bytes()).unwrap();
        let _here = FdSocket::connect(name.as_bytes()).unwrap();
        let there = Arc::new(listener.accept().unwrap().unwrap());
        assert_eq!(Process::of_peer(there).unwrap_err().kind(), io::ErrorKind::Unsupported);
        let (bytes, mut copy) = ([7u8; 4], [0; 4]);
        probe(std::process::id(), bytes.as_ptr().addr() as u64, &mut copy).unwrap();
        assert_eq!(copy, bytes);
        assert_eq!(probe(std::process::id(), 8, &mut copy).unwrap_err().raw_os_error(), Some(libc::EFAULT));
    }
}
