//! Mappings that own their addresses.

use std::io;
use std::os::fd::AsRawFd;

use crate::memfd::Memfd;
use crate::raw;
use crate::shared::SharedSlice;

const WRITABLE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// A range of memory mapped for us.
///
/// When it is dropped the memory is given back but its *addresses* stay reserved without access, so that a [`SharedSlice`] that
/// outlived its mapping by mistake stops the program instead of reaching somebody else's memory.
#[derive(Debug)]
pub struct Mapping {
    memory: SharedSlice,
    file: Option<Memfd>,
}

impl Mapping {
    /// `bytes` of private zero memory, rounded up to whole pages.
    ///
    /// # Errors
    /// ENOMEM; EINVAL for no bytes.
    pub fn anonymous(bytes: usize) -> io::Result<Self> {
        Self::map(bytes, WRITABLE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)
    }

    /// `bytes` of zero memory, rounded up to whole pages, that can be shared with other processes: [`Mapping::file`].
    ///
    /// # Errors
    /// As [`Mapping::anonymous`]; EMFILE, ENFILE.
    pub fn shareable(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.checked_next_multiple_of(4096).ok_or(io::ErrorKind::InvalidInput)?;
        let file = Memfd::sealed(c"netvm-memory", bytes as u64)?;
        let memory = Self::of_memfd(&file)?;
        Ok(memory.with_file(file))
    }

    /// The file of all of this memory, if it was made by [`Mapping::shareable`].
    pub fn file(&self) -> Option<&Memfd> {
        self.file.as_ref()
    }

    /// The whole of another process's `file`, for reading or also for writing. A forked child does not have it.
    ///
    /// # Errors
    /// ENOMEM; EACCES when the descriptor does not allow it.
    pub fn of_peer(file: &Memfd, writable: bool) -> io::Result<Self> {
        use std::os::fd::AsFd;
        let bytes = usize::try_from(file.len()).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        let mapping = Self::map(bytes, protection, flags, file.as_fd().as_raw_fd())?;
        // SAFETY: our own range; the advice concerns only children.
        unsafe { raw::madvise(mapping.memory.as_ptr() as usize, mapping.memory.len(), libc::MADV_DONTFORK) }?;
        Ok(mapping)
    }

    /// The whole of `file`, shared with everybody else who maps it.
    ///
    /// # Errors
    /// ENOMEM; EINVAL for no bytes.
    pub fn of_memfd(file: &Memfd) -> io::Result<Self> {
        let bytes = usize::try_from(file.len()).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
        use std::os::fd::AsFd;
        Self::map(bytes, WRITABLE, libc::MAP_SHARED | libc::MAP_NORESERVE, file.as_fd().as_raw_fd())
    }

    fn with_file(mut self, file: Memfd) -> Self {
        self.file = Some(file);
        self
    }

    fn map(bytes: usize, protection: i32, flags: i32, fd: i32) -> io::Result<Self> {
        let bytes = bytes.checked_next_multiple_of(4096).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let start = unsafe { raw::mmap(0, bytes, protection, flags, fd) }?;
        // SAFETY: freshly mapped, and its addresses stay ours for good (see drop).
        Ok(Self { memory: unsafe { SharedSlice::from_raw(start as *mut u8, bytes) }, file: None })
    }

    /// The memory.
    pub fn shared(&self) -> SharedSlice {
        self.memory
    }

    /// Lets a forked child find zeros here. For [`Mapping::anonymous`].
    ///
    /// # Errors
    /// EINVAL for memory of a file, or on a kernel that cannot.
    pub fn wipe_on_fork(&self) -> io::Result<()> {
        // SAFETY: our own range; this process's contents stay as they are.
        unsafe { raw::madvise(self.memory.as_ptr() as usize, self.memory.len(), libc::MADV_WIPEONFORK) }
    }

    /// Asks for huge pages; the kernel may decline silently.
    ///
    /// # Errors
    /// EINVAL when the kernel has none.
    pub fn advise_huge(&self) -> io::Result<()> {
        // SAFETY: our own range; the advice changes no contents.
        unsafe { raw::madvise(self.memory.as_ptr() as usize, self.memory.len(), libc::MADV_HUGEPAGE) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: replaces our own range by one without access; the addresses are never used again.
        let _ = unsafe {
            raw::mmap(self.memory.as_ptr() as usize, self.memory.len(), libc::PROT_NONE, flags, -1)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_punched_hole_reads_as_zero_and_costs_nothing() {
        let file = Memfd::new(c"test", 1 << 20).unwrap();
        let one = Mapping::of_memfd(&file).unwrap();
        let two = Mapping::of_memfd(&file).unwrap();
        one.shared().sub(0, 8192).unwrap().fill(5);
        assert_eq!(two.shared().sub(4096, 4).unwrap().to_vec(), [5; 4]);
        assert_eq!(file.resident_bytes().unwrap(), 8192);
        file.punch_hole(4096, 4096).unwrap();
        assert_eq!(file.resident_bytes().unwrap(), 4096);
        assert_eq!(two.shared().sub(4092, 8).unwrap().to_vec(), [5, 5, 5, 5, 0, 0, 0, 0]);
        assert!(file.punch_hole(1 << 20, 1).is_err() && file.punch_hole(1, u64::MAX).is_err());
    }
}
