//! Devices of the kernel module `netvm_mem` (docs/design/device.md). The structs are those of kmod/netvm_mem.h; a test of the
//! library compares them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Where devices are made.
pub const CONTROL: &str = "/dev/netvm_mem_control";
/// A lender's memory.
pub const LENDER: u32 = 1;
/// A node's segment.
pub const SEGMENT: u32 = 2;
/// Nothing is ever written.
pub const READ_ONLY: u32 = 1;
/// The session is encrypted.
pub const ENCRYPTED: u32 = 2;
/// The device goes, by force, with the descriptor that made it.
pub const BOUND: u32 = 4;
/// Detach though it is open.
pub const FORCE: u32 = 1;
/// Of [`Page::flags`]: it is there.
pub const PRESENT: u32 = 1;
/// It can be written without a fault.
pub const WRITABLE: u32 = 2;
/// It was written.
pub const DIRTY: u32 = 4;
/// It was used.
pub const ACCESSED: u32 = 8;
/// Levels of page tables that may be.
pub const LEVELS: usize = 5;

const fn code(direction: u32, number: u32, bytes: usize) -> libc::Ioctl {
    (direction << 30 | (bytes as u32) << 16 | 0xd7 << 8 | number) as libc::Ioctl
}

const WRITE: u32 = 1;
const READ: u32 = 2;
/// `NETVM_MEM_ATTACH`.
pub const ATTACH: libc::Ioctl = code(READ | WRITE, 1, size_of::<Attach>());
/// `NETVM_MEM_DETACH`.
pub const DETACH: libc::Ioctl = code(WRITE, 2, size_of::<Detach>());
/// `NETVM_MEM_PAGE`.
pub const PAGE: libc::Ioctl = code(READ | WRITE, 7, size_of::<Page>());

/// `struct netvm_mem_attach`.
#[derive(Clone)]
#[repr(C)]
pub struct Attach {
    /// Bytes of this struct.
    pub struct_bytes: u32,
    /// [`LENDER`] or [`SEGMENT`].
    pub kind: u32,
    /// [`READ_ONLY`], [`ENCRYPTED`], [`BOUND`].
    pub flags: u32,
    /// A connected socket; [`attach`] sets it.
    pub socket: i32,
    /// What the peer's hello allows.
    pub ops_max: u32,
    /// What the peer's hello allows.
    pub window: u32,
    /// In: bytes to borrow. Out: bytes of the device.
    pub bytes: u64,
    /// Of the segment.
    pub key: [u8; 16],
    /// With which the peer may notify the device; zeros: it may not.
    pub board_key: [u8; 16],
    /// Ends with a zero.
    pub name: [u8; 256],
    /// Ends with a zero.
    pub peer: [u8; 128],
    /// Of an encrypted session.
    pub send_key: [u8; 32],
    /// Of an encrypted session.
    pub receive_key: [u8; 32],
    /// Number of the next record.
    pub send_record: u64,
    /// Number of the next record.
    pub receive_record: u64,
    /// Shown by the lender.
    pub pid: u32,
    /// Out: the device's number.
    pub device: u32,
}

/// `struct netvm_mem_detach`.
#[repr(C)]
pub struct Detach {
    /// The device's number.
    pub device: u32,
    /// [`FORCE`].
    pub flags: u32,
}

/// `struct netvm_mem_page`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Page {
    /// In: of this process.
    pub address: u64,
    /// PGD, P4D, PUD, PMD, PTE; zero below the last.
    pub entries: [u64; LEVELS],
    /// Of the byte at the address; zero when it is not present.
    pub physical: u64,
    /// What the last entry maps.
    pub page_bytes: u64,
    /// Where in the device.
    pub offset: u64,
    /// How many levels there are.
    pub levels: u32,
    /// Which entry is the last.
    pub leaf: u32,
    /// [`PRESENT`], [`WRITABLE`], [`DIRTY`], [`ACCESSED`]; 16: the mapping is the device's.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

impl Attach {
    /// With nothing in it.
    pub fn new(kind: u32) -> Self {
        Self {
            struct_bytes: size_of::<Self>() as u32,
            kind,
            flags: 0,
            socket: -1,
            ops_max: 0,
            window: 0,
            bytes: 0,
            key: [0; 16],
            board_key: [0; 16],
            name: [0; 256],
            peer: [0; 128],
            send_key: [0; 32],
            receive_key: [0; 32],
            send_record: 0,
            receive_record: 0,
            pid: std::process::id(),
            device: 0,
        }
    }
}

fn control() -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(CONTROL)
}

/// Hands a connected socket to the kernel, which makes a device of it. A [`BOUND`] one goes with the file that is returned, however that is closed.
///
/// # Errors
/// ENOENT without the module, EACCES; what the peer or the kernel refuses: docs/design/device.md.
pub fn attach(socket: BorrowedFd<'_>, attach: &mut Attach) -> io::Result<File> {
    let control = control()?;
    attach.socket = socket.as_raw_fd();
    // SAFETY: the kernel reads and writes a `struct netvm_mem_attach`, whose size is in the request's number, in the exclusive borrow.
    let result = unsafe { libc::ioctl(control.as_raw_fd(), ATTACH, std::ptr::from_mut(attach)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(control) }
}

/// Takes a device away.
///
/// # Errors
/// ENODEV, EBUSY while it is open, EIO when what was written does not reach the peer.
pub fn detach(device: u32, force: bool) -> io::Result<()> {
    let detach = Detach { device, flags: if force { FORCE } else { 0 } };
    let control = control()?;
    // SAFETY: the kernel reads a `struct netvm_mem_detach`, whose size is in the request's number, from the local.
    let result = unsafe { libc::ioctl(control.as_raw_fd(), DETACH, &raw const detach) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// How an address of this process is mapped; `device` is any device of the module, open.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN, EFAULT where nothing is mapped, ENOTTY for another file.
pub fn page(device: &File, address: u64) -> io::Result<Page> {
    let mut page = Page { address, ..Page::default() };
    // SAFETY: the kernel reads and writes a `struct netvm_mem_page`, whose size is in the request's number, in the local.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), PAGE, &raw mut page) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(page) }
}
