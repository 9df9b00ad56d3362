//! Mappings that own their addresses.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::bpf::Pages;
use crate::memfd::{Memfd, huge_page_bytes};
use crate::shared::SharedSlice;
use crate::{guarded, raw};

const WRITABLE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// A range of memory mapped for us.
///
/// When it is dropped the memory is given back but its *addresses* stay reserved without access, so that a [`SharedSlice`] that
/// outlived its mapping by mistake stops the program instead of reaching somebody else's memory.
#[derive(Debug)]
pub struct Mapping {
    memory: SharedSlice,
    /// What is mapped, a whole number of pages.
    bytes: usize,
    file: Option<Memfd>,
    huge: bool,
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

    /// The same for a file on a disk. When the disk fails, or has no room, accesses tell ([`SharedSlice`]).
    ///
    /// # Errors
    /// As [`Mapping::of_memfd`]; Unsupported where [`guarded`] is.
    pub fn of_disk(file: &Memfd) -> io::Result<Self> {
        guarded::install()?;
        let mut mapping = Self::of_memfd(file)?;
        // SAFETY: freshly mapped up to the end of the file, its addresses stay ours for good, and `install` was called.
        mapping.memory = unsafe { SharedSlice::of_file(mapping.memory.as_ptr(), mapping.memory.len()) };
        Ok(mapping)
    }

    /// `bytes` of zero memory, rounded up to whole huge pages, which stay in memory. They are reserved here: touching them cannot fail later.
    ///
    /// # Errors
    /// ENOMEM when the system's pool has too few of them (`vm.nr_hugepages`); ENODEV where there are none.
    pub fn huge(bytes: usize) -> io::Result<Self> {
        let page = huge_page_bytes().ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))?;
        let whole = (bytes as u64).checked_next_multiple_of(page).ok_or(io::ErrorKind::InvalidInput)?;
        let file = Memfd::huge(c"netvm", whole)?;
        let bytes = usize::try_from(whole).map_err(|_| io::ErrorKind::InvalidInput)?;
        use std::os::fd::AsFd;
        let mut mapping = Self::map(bytes, WRITABLE, libc::MAP_SHARED, file.as_fd().as_raw_fd())?;
        mapping.huge = true;
        Ok(mapping)
    }

    /// All bytes that `file` has now, shared with everybody else who maps it. When it is truncated later, accesses tell
    /// ([`SharedSlice`]).
    ///
    /// # Errors
    /// EINVAL for an empty file; EACCES when it was not opened for what is asked; ENODEV when it cannot be mapped; Unsupported where
    /// [`guarded`] is.
    pub fn of_file(file: &File, writable: bool) -> io::Result<Self> {
        Self::of_device(file, file.metadata()?.len(), writable)
    }

    /// As [`Mapping::of_file`], for a device of so many bytes, which the file does not tell. When they are gone, accesses tell.
    ///
    /// # Errors
    /// As [`Mapping::of_file`].
    pub fn of_device(file: &File, bytes: u64, writable: bool) -> io::Result<Self> {
        guarded::install()?;
        let bytes = usize::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        let mut mapping =
            Self::map(bytes, protection, libc::MAP_SHARED | libc::MAP_NORESERVE, file.as_raw_fd())?;
        // SAFETY: freshly mapped up to the end of the file, its addresses stay ours for good, and `install` was called.
        mapping.memory = unsafe { SharedSlice::of_file(mapping.memory.as_ptr(), bytes) };
        Ok(mapping)
    }

    /// Puts `bytes` bytes from `offset` of `file` where this mapping has its own from the same offset, for those who use its
    /// memory and for all later. What was mapped there is not changed, and not to be seen here any more.
    ///
    /// # Errors
    /// EINVAL for what is no whole number of pages, or beyond the end of the mapping or the file; ENOMEM when there are too many mappings. Nothing has
    /// changed then.
    pub fn replace(&self, offset: u64, bytes: u64, file: &Memfd, huge: bool) -> io::Result<()> {
        use std::os::fd::AsFd;
        let start = self.part(offset, bytes, file.len())?;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let fd = file.as_fd().as_raw_fd();
        // SAFETY: whole pages of our own range (checked), of which there are only `SharedSlice`s: whoever uses one sees other bytes, as if others had
        // written them. The file reaches as far (checked), and does not become shorter (no `Memfd` does).
        unsafe { raw::mmap_at(start, bytes as usize, WRITABLE, flags, fd, offset) }?;
        if huge {
            // SAFETY: our own range; the advice changes no contents.
            let _ = unsafe { raw::madvise(start, bytes as usize, libc::MADV_HUGEPAGE) };
        }
        Ok(())
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
        let memory = unsafe { SharedSlice::from_raw(start as *mut u8, bytes) };
        Ok(Self { memory, bytes, file: None, huge: false })
    }

    /// Puts all of `pages`, which `fill` has given what is to be seen there, in the place of what this mapping has from `offset` on, for those who use
    /// its memory and for all later.
    ///
    /// # Errors
    /// As [`Mapping::replace`], and what `fill` says. Nothing has changed then.
    pub fn replace_with_pages(
        &self,
        offset: u64,
        pages: &Pages,
        fill: impl FnOnce(SharedSlice) -> io::Result<()>,
    ) -> io::Result<()> {
        use std::os::fd::AsFd;
        let start = self.part(offset, pages.bytes(), u64::MAX)?;
        // By an address of their own first: nobody sees them half full.
        let new = Self::map(pages.bytes() as usize, WRITABLE, libc::MAP_SHARED, pages.as_fd().as_raw_fd())?;
        fill(new.shared())?;
        let (from, bytes) = (new.memory.as_ptr() as usize, new.bytes);
        // SAFETY: the source is ours alone, and is not used there afterwards (below); the target is whole pages of our own range (checked), of which there are only
        // `SharedSlice`s: whoever uses one sees other bytes, as if others had written them. Maps do not become shorter.
        unsafe { raw::move_to(from, bytes, start) }?;
        // Its addresses are nobody's any more.
        std::mem::forget(new);
        Ok(())
    }

    /// The address of whole pages of this mapping, for which something else has `have` bytes from the beginning on.
    fn part(&self, offset: u64, bytes: u64, have: u64) -> io::Result<usize> {
        let end = offset.checked_add(bytes).filter(|&end| end <= have && end <= self.bytes as u64);
        if end.is_none() || bytes == 0 || !(offset | bytes).is_multiple_of(4096) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        Ok(self.memory.as_ptr() as usize + offset as usize)
    }

    /// Whether it is made of huge pages, which are never paged out.
    pub fn is_huge(&self) -> bool {
        self.huge
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
        unsafe { raw::madvise(self.memory.as_ptr() as usize, self.bytes, libc::MADV_WIPEONFORK) }
    }

    /// Asks for huge pages; the kernel may decline silently.
    ///
    /// # Errors
    /// EINVAL when the kernel has none.
    pub fn advise_huge(&self) -> io::Result<()> {
        // SAFETY: our own range; the advice changes no contents.
        unsafe { raw::madvise(self.memory.as_ptr() as usize, self.bytes, libc::MADV_HUGEPAGE) }
    }

    /// Tells the kernel that pages are used in no order: it brings no others in with them.
    ///
    /// # Errors
    /// None in practice.
    pub fn expect_random(&self) -> io::Result<()> {
        // SAFETY: our own mapping, whose contents this does not change.
        unsafe { raw::madvise(self.memory.as_ptr() as usize, self.bytes, libc::MADV_RANDOM) }
    }

    /// Tells the kernel that this page is going to be used: it begins to bring it in, if it is swapped out. False beyond the mapping.
    pub fn will_need(&self, page: usize, page_bytes: usize) -> bool {
        let Some(part) = page.checked_mul(page_bytes).and_then(|at| self.memory.sub(at, page_bytes)) else {
            return false;
        };
        // SAFETY: a part of our own mapping, whose contents this does not change.
        unsafe { raw::madvise(part.as_ptr() as usize, page_bytes, libc::MADV_WILLNEED) }.is_ok()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: replaces our own range by one without access; the addresses are never used again.
        let _ = unsafe { raw::mmap(self.memory.as_ptr() as usize, self.bytes, libc::PROT_NONE, flags, -1) };
    }
}

/// A range of the program's own memory, lent out as it is: heap, stack, a static, or what another library has mapped.
#[derive(Debug)]
pub struct RawRange {
    memory: SharedSlice,
    writable: bool,
}

impl RawRange {
    /// The `bytes` bytes at `start`, that others may read and, if `writable`, write.
    ///
    /// # Safety
    /// As long as it, or anything made from it, is in use (memory that is exported: until `unexport` has succeeded or the drop of the
    /// node has returned, by whatever way, panics too):
    /// * the range stays mapped, readable and, if `writable`, writable, and is freed or reused for nothing else;
    /// * no Rust reference to its bytes is alive while they may be written from outside, and no unique one while they may be read:
    ///   the program uses raw pointers, atomics or a [`SharedSlice`];
    /// * any bytes are valid there: what is written from outside is not a `bool`, an enum or a pointer that somebody relies on.
    ///
    /// It may be paged out, shared with other processes and change at any time.
    ///
    /// # Panics
    /// When `start` is null or the range reaches beyond the end of the addresses.
    pub unsafe fn new(start: *mut u8, bytes: usize, writable: bool) -> Self {
        assert!(start.addr().checked_add(bytes).is_some(), "a range beyond the end of the addresses");
        // SAFETY: forwarded from the caller.
        Self { memory: unsafe { SharedSlice::from_raw(start, bytes) }, writable }
    }

    /// The memory.
    pub fn shared(&self) -> SharedSlice {
        self.memory
    }

    /// Whether others may write there.
    pub fn is_writable(&self) -> bool {
        self.writable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_truncated_file_is_told_and_signals_of_others_are_passed_on() {
        let file = tempfile(3 * 4096 + 100);
        let mapping = Mapping::of_file(&file, true).unwrap();
        let memory = mapping.shared();
        assert_eq!((memory.len(), memory.is_guarded()), (3 * 4096 + 100, true));
        memory.write_from(3 * 4096, b"end").unwrap();
        assert_eq!(memory.update(4096, 8, |word| Some(word + 7)), Some(0));
        assert_eq!(memory.update(4100, 4, |word| Some(word + 1)), Some(0));
        assert_eq!(memory.update(4096, 8, |_| None), Some(1 << 32 | 7));
        assert!(memory.update(4097, 4, |_| None).is_none() && memory.with_u64(0, |_| ()).is_none());
        file.set_len(4096).unwrap();
        let mut bytes = [0; 8];
        assert_eq!(memory.read_into(0, &mut bytes), Some(()));
        for offset in [4096, 8192 - 4, 3 * 4096] {
            assert!(memory.read_into(offset, &mut bytes).is_none());
            assert!(memory.write_from(offset, &bytes).is_none());
        }
        assert!(memory.read_into(4092, &mut bytes).is_none(), "half of it is gone");
        assert!(memory.update(8192, 8, |_| Some(1)).is_none() && memory.update(8192, 4, |_| None).is_none());
        assert!(memory.copy_from(&memory).is_none() && memory.to_vec().len() == memory.len());
        memory.fill(1);
        file.set_len(8192).unwrap();
        assert_eq!(memory.read_into(4096, &mut bytes), Some(()));
        let read_only = Mapping::of_file(&file, false).unwrap();
        assert_eq!(read_only.shared().len(), 8192);
        assert_eq!(read_only.shared().update(0, 4, |_| None), Some(0x0101_0101));
        file.set_len(0).unwrap();
        assert!(Mapping::of_file(&file, true).is_err());
    }

    fn tempfile(bytes: u64) -> File {
        let path = std::env::temp_dir().join(format!("netvm-mapping-{}", std::process::id()));
        let mut options = File::options();
        let file = options.read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len(bytes).unwrap();
        file
    }

    #[test]
    fn huge_pages_are_there_or_refused() {
        match Mapping::huge(1) {
            Ok(huge) => huge.shared().fill(1),
            Err(error) => assert!(error.raw_os_error().is_some(), "{error}"),
        }
    }

    #[test]
    fn a_part_is_replaced_by_another_file() {
        let common = Memfd::new(c"test", 1 << 16).unwrap();
        let own = Memfd::sealed(c"test", 1 << 16).unwrap();
        let mapping = Mapping::of_memfd(&common).unwrap();
        let memory = mapping.shared();
        memory.fill(1);
        mapping.replace(4096, 8192, &own, false).unwrap();
        memory.write_from(8192, &[2; 4096]).unwrap();
        let look = |at| memory.sub(at, 1).unwrap().to_vec()[0];
        assert_eq!([4095, 4096, 8192, 12288].map(look), [1, 0, 2, 1]);
        assert_eq!((own.resident_bytes().unwrap(), own.is_hole(4096)), (8192, false));
        mapping.replace(4096, 8192, &common, false).unwrap();
        assert_eq!([4095, 4096, 8192, 12288].map(look), [1, 1, 1, 1]);
        for (offset, bytes) in [(1, 4096), (0, 0), (0, 100), (1 << 16, 4096), (u64::MAX - 4095, 8192)] {
            assert!(mapping.replace(offset, bytes, &own, false).is_err());
        }
        let short = Memfd::sealed(c"test", 4096).unwrap();
        assert!(mapping.replace(4096, 4096, &short, false).is_err());
    }

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
