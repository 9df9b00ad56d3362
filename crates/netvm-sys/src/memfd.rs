//! Anonymous files: memory that can be mapped by several processes and given back page by page.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// An anonymous file in memory.
#[derive(Debug)]
pub struct Memfd {
    fd: OwnedFd,
    bytes: u64,
}

impl Memfd {
    /// A file of `bytes` zeros that costs memory only where it is written.
    ///
    /// # Errors
    /// EFBIG, EINVAL for a size the kernel cannot have; ENFILE, EMFILE; ENOMEM.
    pub fn new(name: &std::ffi::CStr, bytes: u64) -> io::Result<Self> {
        // SAFETY: `name` is NUL-terminated.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that the kernel just gave us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let size = libc::off_t::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        // SAFETY: plain system call on our own descriptor.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), size) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { fd, bytes })
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Gives the memory of `offset .. offset + bytes` back; it reads as zeros afterwards, in every mapping.
    ///
    /// # Errors
    /// EINVAL beyond the end.
    pub fn punch_hole(&self, offset: u64, bytes: u64) -> io::Result<()> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: plain system call on our own descriptor; mapped pages there become zero pages.
        let result = unsafe {
            libc::fallocate(self.fd.as_raw_fd(), mode, offset as libc::off_t, bytes as libc::off_t)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Bytes of memory the file uses now.
    ///
    /// # Errors
    /// None in practice.
    pub fn resident_bytes(&self) -> io::Result<u64> {
        // SAFETY: `stat` is a local that fstat fills.
        unsafe {
            let mut stat = std::mem::zeroed::<libc::stat>();
            if libc::fstat(self.fd.as_raw_fd(), &mut stat) < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(stat.st_blocks as u64 * 512)
        }
    }
}

impl AsFd for Memfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
