//! The kernel's side of a file system in this process: /dev/fuse, mount and unmount.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::fdpass::FdSocket;
use crate::shared::SharedSlice;

/// What mounts for users who may not: it is installed with the rights of root.
const HELPER: &str = "fusermount3";
const DEVICE: &str = "/dev/fuse";

/// Requests of the kernel, one for each read, and their answers, one for each write.
#[derive(Debug)]
pub struct FuseDevice {
    /// Not there before the mount of users other than root: [`HELPER`] may have to open it.
    file: OnceLock<File>,
    /// Until then: /dev/null.
    nothing: File,
}

impl FuseDevice {
    /// A device that nothing is mounted of yet. Reads of it do not wait. Users other than root get theirs with the mount.
    ///
    /// # Errors
    /// ENOENT and ENODEV without FUSE in the kernel; EACCES.
    pub fn open() -> io::Result<Self> {
        let nothing = File::open("/dev/null")?;
        // SAFETY: no arguments.
        if unsafe { libc::geteuid() } != 0 {
            std::fs::metadata(DEVICE)?;
            return Ok(Self { file: OnceLock::new(), nothing });
        }
        Ok(Self { file: open_device()?.into(), nothing })
    }

    /// Mounts a file system whose root is a regular file, readable and writable by root only, over the file `at`. The kernel's first
    /// request is there when this returns.
    ///
    /// # Errors
    /// EPERM without CAP_SYS_ADMIN; ENOTDIR when `at` is a folder; ENODEV.
    pub fn mount_file(&self, at: &Path) -> io::Result<()> {
        let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC | libc::MS_NOATIME;
        mount(self.file(), at, flags, "rootmode=100600,user_id=0,group_id=0,default_permissions")
    }

    /// Mounts a file system over the folder `at`, for all users, whose permissions the kernel checks. Programs on it may be run, but not
    /// as another user, and devices on it are none. The kernel's first request is there when this returns. Who is not root and has no
    /// CAP_SYS_ADMIN has fusermount3 do it, for himself only.
    ///
    /// # Errors
    /// EPERM without CAP_SYS_ADMIN; ENOTDIR when `at` is not a folder; ENODEV; what fusermount3 says, or that it is not there.
    pub fn mount_folder(&self, at: &Path, read_only: bool) -> io::Result<()> {
        let flags = libc::MS_NOSUID | libc::MS_NODEV | if read_only { libc::MS_RDONLY } else { 0 };
        // SAFETY: no arguments.
        let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
        let options =
            format!("rootmode=40755,user_id={user},group_id={group},default_permissions,allow_other");
        if let Some(file) = self.file.get() {
            return mount(file, at, flags, &options);
        }
        // By itself if it may: only the kernel knows, which asks for more than a capability.
        let tried = open_device().and_then(|file| mount(&file, at, flags, &options).map(|()| file));
        let file = match tried {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES)) => {
                mount_by_helper(at, read_only)?
            }
            tried => tried?,
        };
        self.file.set(file).map_err(|_| io::ErrorKind::AlreadyExists.into())
    }

    /// Of nothing, before there is a device.
    fn file(&self) -> &File {
        self.file.get().unwrap_or(&self.nothing)
    }

    fn raw_fd(&self) -> i32 {
        self.file().as_raw_fd()
    }

    /// Reads a request: its first bytes into `head`, the rest into `data`. Returns how many bytes it has in all.
    ///
    /// # Errors
    /// `WouldBlock` when there is none; ENODEV when the file system is unmounted; ENOENT when a request was taken back: read again.
    pub fn read(&self, head: &mut [u8], data: SharedSlice) -> io::Result<usize> {
        let pieces = [
            libc::iovec { iov_base: head.as_mut_ptr().cast(), iov_len: head.len() },
            libc::iovec { iov_base: data.as_ptr().cast(), iov_len: data.len() },
        ];
        // SAFETY: the kernel writes at most `head.len()` bytes into bytes that are borrowed exclusively and `data.len()` bytes into
        // shared memory, which may change at any time.
        let got = unsafe { libc::readv(self.raw_fd(), pieces.as_ptr(), 2) };
        if got < 0 { Err(io::Error::last_os_error()) } else { Ok(got as usize) }
    }

    /// Writes an answer: `head`, then `data`.
    ///
    /// # Errors
    /// ENOENT when nobody waits for it any more; EINVAL when it is no answer.
    pub fn write(&self, head: &[u8], data: SharedSlice) -> io::Result<()> {
        let pieces = [
            libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() },
            libc::iovec { iov_base: data.as_ptr().cast(), iov_len: data.len() },
        ];
        // SAFETY: the kernel only reads, `head.len()` borrowed bytes and `data.len()` bytes of shared memory.
        let put = unsafe { libc::writev(self.raw_fd(), pieces.as_ptr(), 2) };
        if put < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl AsFd for FuseDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file().as_fd()
    }
}

fn open_device() -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(DEVICE)
}

fn mount(device: &File, at: &Path, flags: libc::c_ulong, options: &str) -> io::Result<()> {
    let at = text(at.as_os_str().as_bytes())?;
    let options = text(format!("fd={},{options}", device.as_raw_fd()).as_bytes())?;
    // SAFETY: strings that end with a zero and outlive the call.
    let result = unsafe {
        libc::mount(c"netvm".as_ptr(), at.as_ptr(), c"fuse.netvm".as_ptr(), flags, options.as_ptr().cast())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Has fusermount3 mount, which sends the descriptor over its standard input.
fn mount_by_helper(at: &Path, read_only: bool) -> io::Result<File> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut options = "nosuid,nodev,default_permissions,fsname=netvm,subtype=netvm".to_owned();
    if read_only {
        options.push_str(",ro");
    }
    let mut command = Command::new(HELPER);
    command.args(["-o", &options, "--"]).arg(at).env("_FUSE_COMMFD", "0");
    help(command.stdin(OwnedFd::from(theirs)))?;
    let (_, fds) = FdSocket::adopt(ours.into()).receive(&mut [0; 16])?;
    let fd =
        fds.into_iter().next().ok_or_else(|| io::Error::other(format!("{HELPER} sent no descriptor")))?;
    // SAFETY: numbers only.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd.into())
}

/// Runs fusermount3; what it says is the error.
fn help(command: &mut Command) -> io::Result<()> {
    let done = command.stdout(Stdio::null()).stderr(Stdio::piped()).output().map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::NotFound => format!("other users than root need {HELPER}: install fuse3"),
            _ => format!("cannot run {HELPER}: {error}"),
        };
        io::Error::new(error.kind(), why)
    })?;
    let said = String::from_utf8_lossy(&done.stderr);
    match done.status.success() {
        true => Ok(()),
        false if said.contains("busy") => Err(io::Error::from_raw_os_error(libc::EBUSY)),
        false => Err(io::Error::other(said.trim().to_owned())),
    }
}

fn text(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

/// Takes away what is mounted at `at`, now or, when it is in use, as soon as it is not.
///
/// # Errors
/// EINVAL when nothing is mounted there; EPERM.
pub fn unmount(at: &Path) -> io::Result<()> {
    unmount_with(at, libc::MNT_DETACH)
}

/// Takes away what is mounted at `at`, unless it is in use.
///
/// # Errors
/// EBUSY when it is in use; EINVAL when nothing is mounted there; EPERM, or what fusermount3 says.
pub fn unmount_unused(at: &Path) -> io::Result<()> {
    unmount_with(at, 0)
}

fn unmount_with(at: &Path, flags: i32) -> io::Result<()> {
    let path = text(at.as_os_str().as_bytes())?;
    // SAFETY: a string that ends with a zero and outlives the call.
    let result = unsafe { libc::umount2(path.as_ptr(), flags | libc::UMOUNT_NOFOLLOW) };
    if result == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // SAFETY: no arguments.
    if error.raw_os_error() != Some(libc::EPERM) || unsafe { libc::geteuid() } == 0 {
        return Err(error);
    }
    let how = if flags & libc::MNT_DETACH != 0 { "-uz" } else { "-u" };
    help(Command::new(HELPER).args([how, "--"]).arg(at).stdin(Stdio::null()))
}
