//! Swap on a file: loop devices, swapon and swapoff, and what a process needs that the kernel's swap depends on.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

// <linux/loop.h>
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;
/// Others may take the free device first; each try asks for another one.
const LOOP_TRIES: usize = 64;

/// `struct loop_config`, with its `struct loop_info64`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_bytes: u32,
    device: u64,
    inode: u64,
    special_device: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encryption: u32,
    key_bytes: u32,
    flags: u32,
    name: [u8; 64],
    crypt_name: [u8; 64],
    key: [u8; 32],
    init: [u64; 2],
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopConfig>() == 304);

/// A loop device. The kernel takes the file off it when nobody has the device open and it is not in use as swap.
#[derive(Debug)]
pub struct LoopDevice {
    file: File,
    path: PathBuf,
}

impl LoopDevice {
    /// Puts `file`, which was opened for reading and writing, on a free device; with `direct`, past the page cache.
    ///
    /// # Errors
    /// ENOENT without loop devices in the kernel; EACCES; ENOTTY before Linux 5.8; `Unsupported` when the file cannot be read and
    /// written past the page cache.
    pub fn attach(file: &File, name: &str, direct: bool) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_CLOEXEC);
        let control = options.open("/dev/loop-control")?;
        for _ in 0..LOOP_TRIES {
            // SAFETY: this ioctl takes no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = options.open(&path)?;
            // SAFETY: integers and arrays of them; zeros are what unused fields must be.
            let mut config: LoopConfig = unsafe { std::mem::zeroed() };
            config.fd = file.as_raw_fd() as u32;
            config.block_bytes = 4096;
            config.flags = LO_FLAGS_AUTOCLEAR | if direct { LO_FLAGS_DIRECT_IO } else { 0 };
            let shown = name.len().min(config.name.len() - 1);
            config.name[..shown].copy_from_slice(&name.as_bytes()[..shown]);
            // SAFETY: the kernel reads a `struct loop_config` (its size is asserted above), which outlives the call.
            if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) } == 0 {
                let is_direct = std::fs::read_to_string(format!("/sys/block/loop{number}/loop/dio"))?;
                if direct && is_direct.trim() != "1" {
                    return Err(io::Error::new(
                        io::ErrorKind::Unsupported,
                        "the loop device refused direct I/O",
                    ));
                }
                return Ok(Self { file: device, path });
            }
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EBUSY) {
                return Err(error);
            }
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// Its path, `/dev/loop3`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// It, open.
    pub fn file(&self) -> &File {
        &self.file
    }
}

fn text(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// Most that a priority can be.
pub const PRIORITY_MAX: u32 = 0x7FFF;

/// Uses a device or file with a swap header as swap. With `discard`, clusters of pages that are free again are discarded. Without a priority the kernel
/// chooses one below all others.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN; EINVAL without a header; EBUSY.
pub fn swap_on(device: &Path, priority: Option<u32>, discard: bool) -> io::Result<()> {
    const PREFER: u32 = 0x8000;
    const DISCARD: u32 = 0x10000;
    const DISCARD_CLUSTERS: u32 = 0x40000;
    let device = text(device)?;
    let priority = priority.map_or(0, |priority| PREFER | priority.min(PRIORITY_MAX));
    let flags = priority | if discard { DISCARD | DISCARD_CLUSTERS } else { 0 };
    // SAFETY: a string that ends with a zero and outlives the call.
    let result = unsafe { libc::swapon(device.as_ptr(), flags as i32) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Brings everything back that is on this swap, and uses it no longer.
///
/// # Errors
/// EINVAL when it is not in use; ENOMEM when there is no room for what is on it; EINTR when it was interrupted again and again.
pub fn swap_off(device: &Path) -> io::Result<()> {
    // A ring that was closed just before has the kernel interrupt its process.
    const TRIES: usize = 100;
    let device = text(device)?;
    for _ in 1..TRIES {
        // SAFETY: a string that ends with a zero and outlives the call.
        if unsafe { libc::swapoff(device.as_ptr()) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Err(io::ErrorKind::Interrupted.into())
}

/// Keeps all memory of this process resident, present and future.
///
/// # Errors
/// EPERM and ENOMEM when the limit of locked memory does not allow it.
pub fn lock_memory() -> io::Result<()> {
    // SAFETY: numbers only; memory stays where it is.
    let result = unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Tells the kernel that memory is freed through this thread, and those it starts: what it needs for them is not to be found by
/// waiting for them.
///
/// # Errors
/// EPERM without CAP_SYS_RESOURCE; EINVAL before Linux 5.6.
pub fn set_io_flusher() -> io::Result<()> {
    const PR_SET_IO_FLUSHER: i32 = 57;
    // SAFETY: numbers only.
    let result = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1_usize, 0_usize, 0_usize, 0_usize) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Puts this thread, and those it starts, before all that are not real-time threads. Such threads may also use a part of the memory
/// that the kernel keeps in reserve.
///
/// # Errors
/// EPERM without CAP_SYS_NICE.
pub fn set_realtime() -> io::Result<()> {
    let least = libc::sched_param { sched_priority: 1 };
    // SAFETY: of this thread; the parameters are a local.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const least) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
