//! Anonymous files, in memory or on a disk: they can be mapped by several processes and given back page by page.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::shared::SharedSlice;

/// Most pieces of memory in one read or write.
pub const PIECES_MAX: usize = 256;

/// Bytes of the system's usual huge page; `None` where there are none.
pub fn huge_page_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024).filter(|bytes| bytes.is_power_of_two())
}

/// An anonymous file, in memory but for [`Memfd::in_folder`].
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
        Self::create(name, bytes, libc::MFD_CLOEXEC)
    }

    /// As [`Memfd::new`], to be passed to other processes: nobody can make it shorter or longer, so no access to it is ever beyond
    /// its end, and nobody opens it anew for writing who is not its owner.
    ///
    /// # Errors
    /// As [`Memfd::new`].
    pub fn sealed(name: &std::ffi::CStr, bytes: u64) -> io::Result<Self> {
        let file = Self::create(name, bytes, libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)?;
        // SAFETY: plain system calls on our own descriptor.
        let done = unsafe {
            libc::fchmod(file.fd.as_raw_fd(), 0o400) == 0
                && libc::fcntl(file.fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS | libc::F_SEAL_SEAL) == 0
        };
        if done { Ok(file) } else { Err(io::Error::last_os_error()) }
    }

    /// A file of huge pages; `bytes` is a multiple of their size ([`huge_page_bytes`]). They are taken from the system's pool when the
    /// file is mapped.
    ///
    /// # Errors
    /// EINVAL for another size; ENOSYS, ENODEV, ENOMEM where there are no huge pages.
    pub fn huge(name: &std::ffi::CStr, bytes: u64) -> io::Result<Self> {
        Self::create(name, bytes, libc::MFD_CLOEXEC | libc::MFD_HUGETLB)
    }

    /// A file of `bytes` zeros on the file system of `folder`, without a name there, that takes room where it is written or
    /// [provided](Memfd::provide).
    ///
    /// # Errors
    /// Those of open(2); EFBIG, EINVAL for a size that the file system cannot have.
    pub fn in_folder(folder: &Path, bytes: u64) -> io::Result<Self> {
        let file = match unnamed(folder) {
            // Some file systems know no files without a name.
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL)) =>
            {
                named_once(folder)?
            }
            result => result?,
        };
        file.set_len(bytes)?;
        Ok(Self { fd: file.into(), bytes })
    }

    /// A file of another process, of exactly `bytes` bytes and with the seals of [`Memfd::sealed`].
    ///
    /// # Errors
    /// `InvalidData` when it is another kind of file, of another length, or its length can change.
    pub fn adopt(fd: OwnedFd, bytes: u64) -> io::Result<Self> {
        // SAFETY: no pointers; it fails for anything but a file in memory.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        // In this order: a sealed length does not change any more.
        if seals < 0 || seals & SEALS != SEALS || stat(&fd)?.st_size as u64 != bytes {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self { fd, bytes })
    }

    /// Another descriptor of the same file, which can only be read and mapped for reading.
    ///
    /// # Errors
    /// Those of open(2), where /proc is not mounted for example.
    pub fn read_only(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        Ok(std::fs::File::open(path)?.into())
    }

    fn create(name: &std::ffi::CStr, bytes: u64, flags: libc::c_uint) -> io::Result<Self> {
        // SAFETY: `name` is NUL-terminated.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
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

    /// Allocates the memory of `offset .. offset + bytes` for this process: what is there stays, the rest reads as zeros, and no write to it needs memory.
    ///
    /// # Errors
    /// EINVAL beyond the end; ENOSPC, ENOMEM; EINTR.
    pub fn provide(&self, offset: u64, bytes: u64) -> io::Result<()> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: plain system call on our own descriptor, within the length, which stays.
        let result =
            unsafe { libc::fallocate(self.fd.as_raw_fd(), 0, offset as libc::off_t, bytes as libc::off_t) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Reads the bytes from `offset` on into all of `locals`, in order: the kernel copies, and maps nothing here.
    ///
    /// # Errors
    /// `UnexpectedEof` beyond the end; `InvalidInput` for more than [`PIECES_MAX`] pieces; EFAULT; EIO, ENOMEM when pages do not come back
    /// from swap. Some of the bytes may have been copied then.
    pub fn read_at(&self, offset: u64, locals: &[SharedSlice]) -> io::Result<()> {
        let (pieces, bytes) = pieces(locals)?;
        let (fd, at) = (self.fd.as_raw_fd(), offset as libc::off_t);
        // SAFETY: the kernel writes into the shared memory of `locals`, and tells when some of it is not mapped.
        whole(unsafe { libc::preadv(fd, pieces.as_ptr().cast(), locals.len() as i32, at) }, bytes)
    }

    /// Reads as many bytes as `to` has from `offset` on: the kernel copies, and maps nothing here.
    ///
    /// # Errors
    /// `UnexpectedEof` beyond the end; EIO, ENOMEM when there is no memory for a page that was written back.
    pub fn read_exact_at(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        // SAFETY: the kernel writes into `to`, at most its length.
        let read = unsafe {
            libc::pread(self.fd.as_raw_fd(), to.as_mut_ptr().cast(), to.len(), offset as libc::off_t)
        };
        whole(read, to.len())
    }

    /// Writes all of `locals`, in order, to the bytes from `offset` on: the kernel copies, and maps nothing here.
    ///
    /// # Errors
    /// EFBIG, EPERM beyond the end; `InvalidInput` for more than [`PIECES_MAX`] pieces; EFAULT; EIO, ENOMEM, ENOSPC when there is no memory. Some of the
    /// bytes may have been written then.
    pub fn write_at(&self, offset: u64, locals: &[SharedSlice]) -> io::Result<()> {
        let (pieces, bytes) = pieces(locals)?;
        let (fd, at) = (self.fd.as_raw_fd(), offset as libc::off_t);
        // SAFETY: the kernel only reads the shared memory of `locals`, and tells when some of it is not mapped.
        whole(unsafe { libc::pwritev(fd, pieces.as_ptr().cast(), locals.len() as i32, at) }, bytes)
    }

    /// Whether the page at `offset` has never been written (or has been given back): touching it costs a zero page and no waiting.
    pub fn is_hole(&self, offset: u64) -> bool {
        // SAFETY: plain system call on our own descriptor, whose position nobody uses.
        let data = unsafe { libc::lseek(self.fd.as_raw_fd(), offset as libc::off_t, libc::SEEK_DATA) };
        // ENXIO: no data up to the end.
        if data < 0 {
            io::Error::last_os_error().raw_os_error() == Some(libc::ENXIO)
        } else {
            data as u64 >= offset + 4096
        }
    }

    /// Bytes of memory the file uses now.
    ///
    /// # Errors
    /// None in practice.
    pub fn resident_bytes(&self) -> io::Result<u64> {
        Ok(stat(&self.fd)?.st_blocks as u64 * 512)
    }
}

fn unnamed(folder: &Path) -> io::Result<File> {
    let flags = libc::O_TMPFILE | libc::O_EXCL;
    OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags).open(folder)
}

fn named_once(folder: &Path) -> io::Result<File> {
    for attempt in 0..100 {
        let path = folder.join(format!(".netvm-{}-{attempt}", std::process::id()));
        match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => return std::fs::remove_file(&path).map(|()| file),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Bytes that this user can still write on the file system of `path`.
///
/// # Errors
/// Those of statvfs(3); `InvalidInput` for a path with a zero in it.
pub fn room_bytes(path: &Path) -> io::Result<u64> {
    let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `path` is NUL-terminated, `room` is a local that statvfs fills.
    unsafe {
        let mut room = std::mem::zeroed::<libc::statvfs>();
        if libc::statvfs(path.as_ptr(), &mut room) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((room.f_bavail as u64).saturating_mul(room.f_frsize as u64))
    }
}

type Iovecs = [MaybeUninit<libc::iovec>; PIECES_MAX];

fn pieces(locals: &[SharedSlice]) -> io::Result<(Iovecs, usize)> {
    let mut pieces = [const { MaybeUninit::uninit() }; PIECES_MAX];
    let places = pieces.get_mut(..locals.len()).ok_or(io::ErrorKind::InvalidInput)?;
    let mut bytes = 0;
    for (place, local) in places.iter_mut().zip(locals) {
        place.write(libc::iovec { iov_base: local.as_ptr().cast(), iov_len: local.len() });
        bytes += local.len();
    }
    Ok((pieces, bytes))
}

fn whole(copied: isize, bytes: usize) -> io::Result<()> {
    match usize::try_from(copied) {
        Ok(copied) if copied == bytes => Ok(()),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Its length is fixed.
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

fn stat(fd: &OwnedFd) -> io::Result<libc::stat> {
    // SAFETY: `stat` is a local that fstat fills.
    unsafe {
        let mut stat = std::mem::zeroed::<libc::stat>();
        if libc::fstat(fd.as_raw_fd(), &mut stat) < 0 { Err(io::Error::last_os_error()) } else { Ok(stat) }
    }
}

impl AsFd for Memfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn bytes_are_gathered_and_scattered() {
        use crate::mapping::Mapping;
        let file = Memfd::sealed(c"test", 3 * 4096).unwrap();
        let local = Mapping::anonymous(4096).unwrap();
        let local = local.shared();
        local.write_from(0, b"abcdef").unwrap();
        let part = |at, bytes| local.sub(at, bytes).unwrap();
        file.write_at(4094, &[part(3, 3), part(0, 3)]).unwrap();
        assert_eq!(file.resident_bytes().unwrap(), 8192);
        file.read_at(4093, &[part(10, 1), part(20, 6)]).unwrap();
        assert_eq!((part(10, 1).to_vec(), part(20, 6).to_vec()), (vec![0], b"defabc".to_vec()));
        assert!(file.read_at(3 * 4096 - 1, &[part(0, 2)]).is_err(), "beyond the end");
        assert!(file.write_at(3 * 4096 - 1, &[part(0, 2)]).is_err(), "beyond the end");
        assert!(file.read_at(u64::MAX, &[part(0, 2)]).is_err());
        assert!(file.read_at(0, &[part(0, 1); PIECES_MAX]).is_ok());
        assert!(file.read_at(0, &[part(0, 1); PIECES_MAX + 1]).is_err());
        file.provide(0, 3 * 4096).unwrap();
        assert_eq!(file.resident_bytes().unwrap(), 3 * 4096);
        file.read_at(4094, &[part(20, 6)]).unwrap();
        assert_eq!(part(20, 6).to_vec(), b"defabc", "what was there stays");
        assert!(file.provide(4096, 3 * 4096).is_err() && file.provide(u64::MAX, 2).is_err());
    }

    #[test]
    fn a_file_on_a_disk_takes_room_where_it_is_wanted() {
        let folder = std::env::temp_dir();
        let room = room_bytes(&folder).unwrap();
        assert!(room > 1 << 20 && room_bytes(Path::new("/nowhere/at/all")).is_err());
        for file in [
            Memfd::in_folder(&folder, 1 << 30),
            named_once(&folder).and_then(|file| {
                file.set_len(1 << 30)?;
                Ok(Memfd { fd: file.into(), bytes: 1 << 30 })
            }),
        ] {
            let file = file.unwrap();
            assert!(file.resident_bytes().unwrap() < 1 << 20);
            file.provide(1 << 20, 1 << 20).unwrap();
            assert!(file.resident_bytes().unwrap() >= 1 << 20);
            file.punch_hole(1 << 20, 1 << 20).unwrap();
            assert!(file.resident_bytes().unwrap() < 1 << 20);
            let links = stat(&file.fd).unwrap().st_nlink;
            assert_eq!(links, 0, "it has a name");
        }
        assert!(Memfd::in_folder(Path::new("/nowhere/at/all"), 4096).is_err());
    }

    #[test]
    fn a_sealed_file_keeps_its_length_and_its_rights() {
        let file = Memfd::sealed(c"test", 8192).unwrap();
        // SAFETY: plain system call on our own descriptor.
        assert!(unsafe { libc::ftruncate(file.fd.as_raw_fd(), 4096) } < 0);
        let copy = || file.fd.try_clone().unwrap();
        assert!(Memfd::adopt(copy(), 8192).is_ok());
        assert!(Memfd::adopt(copy(), 4096).is_err(), "another length");
        let open = Memfd::new(c"test", 8192).unwrap();
        assert!(Memfd::adopt(open.fd.try_clone().unwrap(), 8192).is_err(), "not sealed");
        let pipe = std::os::unix::net::UnixStream::pair().unwrap().0;
        assert!(Memfd::adopt(pipe.into(), 0).is_err(), "no file in memory");
        let mut readable = std::fs::File::from(file.read_only().unwrap());
        assert!(readable.write_all(b"x").is_err());
        let readable = Memfd::adopt(readable.into(), 8192).unwrap();
        assert!(crate::mapping::Mapping::of_peer(&readable, true).is_err(), "mapped for writing");
        assert!(crate::mapping::Mapping::of_peer(&readable, false).is_ok());
    }
}
