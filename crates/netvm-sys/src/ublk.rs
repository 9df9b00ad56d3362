//! Block devices whose requests this process answers: ublk (Linux 6.0, its commands as of 6.4), <linux/ublk_cmd.h>. All commands go
//! through io_urings.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::PathBuf;

use io_uring::{IoUring, cqueue, opcode, squeue, types};

use crate::raw;
use crate::shared::SharedSlice;

const CONTROL_PATH: &str = "/dev/ublk-control";

// _IOR and _IOWR of 'u' and `struct ublksrv_ctrl_cmd`.
const GET_DEV_INFO: u32 = 0x8020_7502;
const ADD_DEV: u32 = 0xC020_7504;
const DEL_DEV: u32 = 0xC020_7505;
const START_DEV: u32 = 0xC020_7506;
const STOP_DEV: u32 = 0xC020_7507;
const GET_FEATURES: u32 = 0x8020_7513;
const DEL_DEV_ASYNC: u32 = 0x8020_7514;
const SET_PARAMS: u32 = 0xC020_7508;
const START_USER_RECOVERY: u32 = 0xC020_7510;
const END_USER_RECOVERY: u32 = 0xC020_7511;
// _IOWR of 'u' and `struct ublksrv_io_cmd`.
const FETCH_REQ: u32 = 0xC010_7520;
const COMMIT_AND_FETCH_REQ: u32 = 0xC010_7521;

const F_USER_RECOVERY: u64 = 1 << 3;
const F_CMD_IOCTL_ENCODE: u64 = 1 << 6;

/// Most requests of one queue, as the kernel has it; where a queue's descriptors begin in the device's file depends on it.
const DEPTH_MAX: usize = 4096;
const DESCRIPTOR_BYTES: usize = 24;
const PAGE_BYTES: usize = 4096;
/// Bytes in which the kernel counts.
pub const SECTOR_BYTES: u64 = 512;
/// Most bytes of one discard.
const DISCARD_BYTES_MAX: u64 = 1 << 30;

/// What a device is made as.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Hardware queues.
    pub queues: u16,
    /// Requests of each.
    pub depth: u16,
    /// Most bytes of one, a multiple of 4096.
    pub request_bytes: u32,
    /// When its server dies, requests wait until [`Control::begin_recovery`] and [`Control::end_recovery`] have given it another one.
    /// Otherwise they fail, and the disk is removed.
    pub recoverable: bool,
}

impl Shape {
    /// Requests of all queues.
    pub fn slots(&self) -> usize {
        usize::from(self.queues) * usize::from(self.depth)
    }
}

/// What the kernel knows of a device.
#[derive(Clone, Copy, Debug)]
pub struct Info {
    /// N in /dev/ublkbN.
    pub id: u32,
    /// The process that serves it, or served it last; 0 or less before it was started.
    pub server: i32,
    /// What it was made as; the kernel may have allowed less than was asked for.
    pub shape: Shape,
}

/// `struct ublksrv_ctrl_cmd`.
#[repr(C)]
struct ControlCommand {
    device: u32,
    queue: u16,
    bytes: u16,
    address: u64,
    data: u64,
    path_bytes: u16,
    pad: u16,
    reserved: u32,
}

/// `struct ublksrv_ctrl_dev_info`.
#[repr(C)]
#[derive(Default)]
struct DeviceInfo {
    queues: u16,
    depth: u16,
    state: u16,
    pad0: u16,
    request_bytes: u32,
    id: u32,
    server: i32,
    pad1: u32,
    flags: u64,
    server_flags: u64,
    reserved: [u64; 3],
}

/// `struct ublk_params`, as far as it is used here.
#[repr(C)]
#[derive(Default)]
struct Parameters {
    bytes: u32,
    types: u32,
    attributes: u32,
    logical_shift: u8,
    physical_shift: u8,
    optimal_shift: u8,
    least_shift: u8,
    sectors_max: u32,
    chunk_sectors: u32,
    sectors: u64,
    boundary_mask: u64,
    discard_alignment: u32,
    discard_granularity: u32,
    discard_sectors_max: u32,
    zeroes_sectors_max: u32,
    discard_segments_max: u16,
    reserved: u16,
}

const _: () = assert!(size_of::<ControlCommand>() == 32 && size_of::<DeviceInfo>() == 64);
const _: () = assert!(size_of::<Parameters>() == 64);

/// What makes and removes devices.
pub struct Control {
    file: File,
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Control {
    /// # Errors
    /// ENOENT without ublk in the kernel; EACCES; ENOSYS or EPERM where io_uring is switched off.
    pub fn open() -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(CONTROL_PATH)?;
        Ok(Self { file, ring: IoUring::builder().build(2)? })
    }

    /// Runs one command to its end.
    fn command(
        &mut self,
        operation: u32,
        device: u32,
        data: u64,
        (address, bytes): (u64, usize),
    ) -> io::Result<()> {
        let command = ControlCommand {
            device,
            queue: u16::MAX,
            bytes: bytes as u16,
            address,
            data,
            path_bytes: 0,
            pad: 0,
            reserved: 0,
        };
        let mut payload = [0; 80];
        // SAFETY: 32 bytes of integers without padding (its size is asserted above), into 80.
        unsafe { payload.as_mut_ptr().cast::<ControlCommand>().write_unaligned(command) };
        let entry = opcode::UringCmd80::new(types::Fd(self.file.as_raw_fd()), operation).cmd(payload).build();
        // SAFETY: the kernel uses `address` until the command has ended, which is waited for below whatever happens; callers pass memory of
        // their own that outlives this call, and its length.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| io::Error::other("a command is under way"))?;
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // Only when the ring itself is broken: nothing was begun.
                Err(error) => return Err(error),
            }
            if let Some(done) = self.ring.completion().next() {
                return match done.result() {
                    0.. => Ok(()),
                    error => Err(io::Error::from_raw_os_error(-error)),
                };
            }
        }
    }

    /// Whether devices can be [`Shape::recoverable`].
    ///
    /// # Errors
    /// EOPNOTSUPP before Linux 6.5.
    pub fn can_recover(&mut self) -> io::Result<bool> {
        let mut features = 0_u64;
        self.command(GET_FEATURES, u32::MAX, 0, ((&raw mut features) as u64, size_of::<u64>()))?;
        Ok(features & F_USER_RECOVERY != 0)
    }

    /// Makes a device, under a number of the kernel's choice. It is no disk yet: [`Control::start`].
    ///
    /// # Errors
    /// EPERM without CAP_SYS_ADMIN; ENOMEM; EOPNOTSUPP before Linux 6.5; ENOSPC, EACCES when there are too many.
    pub fn add(&mut self, shape: Shape) -> io::Result<Info> {
        let recovery = if shape.recoverable { F_USER_RECOVERY } else { 0 };
        let mut info = DeviceInfo {
            queues: shape.queues,
            depth: shape.depth,
            request_bytes: shape.request_bytes,
            id: u32::MAX,
            flags: recovery | F_CMD_IOCTL_ENCODE,
            ..DeviceInfo::default()
        };
        let place = ((&raw mut info) as u64, size_of::<DeviceInfo>());
        self.command(ADD_DEV, u32::MAX, 0, place)?;
        Ok(told(&info))
    }

    /// Tells how large the disk is, in bytes, a multiple of 4096. Before it is started.
    ///
    /// # Errors
    /// EINVAL for what the kernel does not allow.
    pub fn set_size(&mut self, info: &Info, size_bytes: u64) -> io::Result<()> {
        const VOLATILE_CACHE: u32 = 1 << 2;
        const FUA: u32 = 1 << 3;
        const BASIC_AND_DISCARD: u32 = 3;
        let most = (DISCARD_BYTES_MAX / SECTOR_BYTES) as u32;
        let parameters = Parameters {
            bytes: size_of::<Parameters>() as u32,
            types: BASIC_AND_DISCARD,
            attributes: VOLATILE_CACHE | FUA,
            logical_shift: 9,
            physical_shift: 12,
            optimal_shift: 12,
            least_shift: 12,
            sectors_max: info.shape.request_bytes / SECTOR_BYTES as u32,
            sectors: size_bytes / SECTOR_BYTES,
            discard_granularity: PAGE_BYTES as u32,
            discard_sectors_max: most,
            zeroes_sectors_max: most,
            discard_segments_max: 1,
            ..Parameters::default()
        };
        let place = ((&raw const parameters) as u64, size_of::<Parameters>());
        self.command(SET_PARAMS, info.id, 0, place)
    }

    /// Makes it a disk, /dev/ublkbN. Its queues must be served already, by another thread of this process: the kernel reads the disk
    /// before this returns.
    ///
    /// # Errors
    /// EINTR; EEXIST when it is one.
    pub fn start(&mut self, id: u32) -> io::Result<()> {
        self.command(START_DEV, id, std::process::id().into(), (0, 0))
    }

    /// Removes the disk. What was written is flushed first, so its queues must still be served; afterwards they end.
    ///
    /// # Errors
    /// ENODEV when there is none of this number.
    pub fn stop(&mut self, id: u32) -> io::Result<()> {
        self.command(STOP_DEV, id, 0, (0, 0))
    }

    /// Removes the device. It goes when nobody has it open any more; before Linux 6.9 this waits for that.
    ///
    /// # Errors
    /// ENODEV when there is none of this number; EINTR.
    pub fn delete(&mut self, id: u32) -> io::Result<()> {
        match self.command(DEL_DEV_ASYNC, id, 0, (0, 0)) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                self.command(DEL_DEV, id, 0, (0, 0))
            }
            other => other,
        }
    }

    /// What the kernel knows of a device.
    ///
    /// # Errors
    /// ENODEV when there is none of this number.
    pub fn info(&mut self, id: u32) -> io::Result<Info> {
        let mut info = DeviceInfo::default();
        let place = ((&raw mut info) as u64, size_of::<DeviceInfo>());
        self.command(GET_DEV_INFO, id, 0, place)?;
        Ok(told(&info))
    }

    /// A recoverable device whose server is dead is to get another one: [`Queues::open`], then [`Control::end_recovery`].
    ///
    /// # Errors
    /// EBUSY while the kernel has not noticed yet that the server is dead; EINVAL when the device is not recoverable; ENODEV.
    pub fn begin_recovery(&mut self, id: u32) -> io::Result<()> {
        self.command(START_USER_RECOVERY, id, 0, (0, 0))
    }

    /// This process serves it from now on. Requests must have been asked for ([`Queues::ask`]).
    ///
    /// # Errors
    /// EBUSY without [`Control::begin_recovery`]; EINTR.
    pub fn end_recovery(&mut self, id: u32) -> io::Result<()> {
        self.command(END_USER_RECOVERY, id, std::process::id().into(), (0, 0))
    }
}

fn told(info: &DeviceInfo) -> Info {
    let shape = Shape {
        queues: info.queues,
        depth: info.depth,
        request_bytes: info.request_bytes,
        recoverable: info.flags & F_USER_RECOVERY != 0,
    };
    Info { id: info.id, server: info.server, shape }
}

/// The disk of a device.
pub fn disk(id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublkb{id}"))
}

/// What the kernel wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Bytes into the request's place.
    Read,
    /// The bytes that are in the request's place.
    Write {
        /// It has ended only when it is on stable storage.
        through: bool,
    },
    /// All writes that have ended, to stable storage.
    Flush,
    /// The bytes are not needed any more, or read as zeros.
    Discard,
    /// Something else.
    Unknown,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its place: queue * depth + tag.
    pub slot: usize,
    /// What to do.
    pub operation: Operation,
    /// Where, in bytes.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

/// What comes from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// To be answered.
    Request(Request),
    /// There will be no more requests at one place: the disk is being removed.
    Ended,
}

/// Requests of a device, for the one thread that asks for them and answers them. Neither allocates memory.
pub struct Queues {
    file: File,
    ring: IoUring,
    shape: Shape,
    /// Descriptors of the queues, one after the other.
    descriptors: Vec<usize>,
    buffers: SharedSlice,
    unsent: bool,
}

impl std::fmt::Debug for Queues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queues").field("file", &self.file).field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Queues {
    /// Those of a device. `buffers` has `request_bytes` bytes for each slot, and is the kernel's to read and write until this is
    /// dropped and the device stopped.
    ///
    /// # Errors
    /// EBUSY when another process has them; ENOENT; ENOMEM; EINVAL when `buffers` is too short.
    pub fn open(info: &Info, buffers: SharedSlice) -> io::Result<Self> {
        let shape = info.shape;
        if buffers.len() < shape.slots() * shape.request_bytes as usize || shape.slots() == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let path = format!("/dev/ublkc{}", info.id);
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let entries = shape.slots().next_power_of_two() as u32;
        let ring = IoUring::builder().setup_coop_taskrun().build(entries)?;
        let mut queues = Self { file, ring, shape, descriptors: Vec::new(), buffers, unsent: false };
        let stride = (DEPTH_MAX * DESCRIPTOR_BYTES).next_multiple_of(PAGE_BYTES);
        for queue in 0..usize::from(shape.queues) {
            // SAFETY: no address is asked for; the range is unmapped when this is dropped, and only read within its length.
            let at = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    queues.map_bytes(),
                    libc::PROT_READ,
                    libc::MAP_SHARED | libc::MAP_POPULATE,
                    queues.file.as_raw_fd(),
                    (queue * stride) as libc::off_t,
                )
            };
            if at == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            queues.descriptors.push(at as usize);
        }
        Ok(queues)
    }

    fn map_bytes(&self) -> usize {
        (usize::from(self.shape.depth) * DESCRIPTOR_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// Asks for the first request at each place. The thread that calls this is the server: only it may answer.
    ///
    /// # Errors
    /// As of io_uring_enter(2).
    pub fn ask(&mut self) -> io::Result<()> {
        for slot in 0..self.shape.slots() {
            self.push(FETCH_REQ, slot, 0);
        }
        self.push_all()
    }

    fn push(&mut self, operation: u32, slot: usize, result: i32) {
        let depth = usize::from(self.shape.depth);
        let (queue, tag) = ((slot / depth) as u16, (slot % depth) as u16);
        let bytes = self.shape.request_bytes as usize;
        let address = self.buffers.sub(slot * bytes, bytes).unwrap_or(SharedSlice::EMPTY).as_ptr() as u64;
        // `struct ublksrv_io_cmd`.
        let mut command = [0; 16];
        command[..2].copy_from_slice(&queue.to_ne_bytes());
        command[2..4].copy_from_slice(&tag.to_ne_bytes());
        command[4..8].copy_from_slice(&result.to_ne_bytes());
        command[8..].copy_from_slice(&address.to_ne_bytes());
        let entry = opcode::UringCmd16::new(types::Fd(self.file.as_raw_fd()), operation)
            .cmd(command)
            .build()
            .user_data(slot as u64);
        // SAFETY: the address is that of `request_bytes` bytes of `buffers` (`sub` checks that), which belong to the kernel as long as it
        // may use them, as the caller of `open` has promised.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // There is a place for each slot, and a slot has one command at a time.
        debug_assert!(pushed.is_ok());
        self.unsent = true;
    }

    /// The next thing that has come, if any.
    pub fn hear(&mut self) -> Option<Heard> {
        let done = self.ring.completion().next()?;
        let slot = done.user_data() as usize;
        if done.result() != 0 || slot >= self.shape.slots() {
            return Some(Heard::Ended);
        }
        Some(Heard::Request(self.request(slot)))
    }

    fn request(&self, slot: usize) -> Request {
        const FUA: u32 = 1 << 13;
        let depth = usize::from(self.shape.depth);
        let at = self.descriptors[slot / depth] + slot % depth * DESCRIPTOR_BYTES;
        // SAFETY: within the mapping of this queue, which has `depth` descriptors and is ours until drop. The kernel has written it before
        // the completion that the caller has taken, and writes it again only after the answer.
        let (flags, sectors, start) = unsafe {
            let words = at as *const u32;
            (words.read_volatile(), words.add(1).read_volatile(), words.add(2).cast::<u64>().read_volatile())
        };
        let operation = match flags & 0xff {
            0 => Operation::Read,
            1 => Operation::Write { through: flags & FUA != 0 },
            2 => Operation::Flush,
            3 | 5 => Operation::Discard,
            _ => Operation::Unknown,
        };
        let (offset, bytes) = (start.saturating_mul(SECTOR_BYTES), u64::from(sectors) * SECTOR_BYTES);
        Request { slot, operation, offset, bytes }
    }

    /// Answers the request at a place with the number of bytes that were moved, or a negative error number, and asks for the next one.
    /// Sent by [`Queues::push_all`].
    pub fn answer(&mut self, slot: usize, result: i32) {
        self.push(COMMIT_AND_FETCH_REQ, slot, result);
    }

    /// Sends answers.
    ///
    /// # Errors
    /// As of io_uring_enter(2).
    pub fn push_all(&mut self) -> io::Result<()> {
        while self.unsent {
            match self.ring.submit() {
                Ok(_) => self.unsent = !self.ring.submission().is_empty(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        for &at in &self.descriptors {
            // SAFETY: mapped by `open`, of this length, and not used any more.
            let _ = unsafe { raw::munmap(at, self.map_bytes()) };
        }
    }
}

impl AsFd for Queues {
    /// Readable when something has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor is open as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}
