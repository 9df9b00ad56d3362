//! Lent memory and segments as character devices of the kernel module `netvm_mem`
//! ([design](../../../../docs/design/device.md)).
//!
//! The greeting, and with it the proof of the secret, is made here; then the connection is the kernel's.

#[cfg(test)]
mod header_tests;

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use netvm_core::epoch::Incarnation;
use netvm_core::key::RemoteKey;
use netvm_core::limits::NAME_BYTES_MAX;
use netvm_core::wire::{Hello, Role};
use netvm_sys::device as sys;
pub use netvm_sys::device::Page;
use netvm_sys::mapping::Mapping;
use zeroize::Zeroize;

use crate::error::{Error, Result};
use crate::link::greeting::{self, Transport};
use crate::security::Security;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// Where the module tells of its devices.
const CLASS: &str = "/sys/class/netvm_mem";

/// What a device shows.
#[derive(Clone, Debug)]
pub enum Source {
    /// So many bytes of a lender's memory, which nobody else sees and which are free again when the device is detached.
    Lender {
        /// Bytes of the device.
        bytes: u64,
    },
    /// A node's segment.
    Segment {
        /// Its name.
        name: String,
        /// Its key.
        key: RemoteKey,
    },
}

/// How to attach.
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// Address of the lender or node: `HOST:PORT` or `unix:/path`.
    pub address: String,
    /// What of it.
    pub source: Source,
    /// Never write.
    pub read_only: bool,
    /// With this key the peer may import the segment `netvm_mem` over this connection, to notify the device.
    pub board_key: Option<RemoteKey>,
    /// The secret to prove, and whether to encrypt.
    pub security: Security,
}

/// A device that was attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// Its number.
    pub number: u32,
    /// Its bytes.
    pub bytes: u64,
    /// It cannot be written: so it was asked for, or the key does not allow more.
    pub read_only: bool,
}

impl Attached {
    /// Its file.
    pub fn path(&self) -> PathBuf {
        path(self.number)
    }
}

/// The file of a device.
pub fn path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/netvm_mem{number}"))
}

fn text<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let mut len = text.len().min(N - 1);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
    bytes
}

/// Connects, proves the secret, and makes a device of the connection.
///
/// # Errors
/// Those of connecting: [`Error::Address`], [`Error::Connect`], [`Error::NeedsSecret`], [`Error::WrongSecret`], [`Error::NoEncryption`] and so
/// on; [`Error::Other`] when the module is missing or refuses, with what to do.
pub fn attach(options: &AttachOptions) -> Result<Attached> {
    make(options, 0).map(|(attached, _)| attached)
}

/// A device that goes, by force, when this is dropped or its process dies. Whatever counts is to be flushed before.
#[derive(Debug)]
pub struct BoundDevice {
    attached: Attached,
    /// The kernel takes the device away when it is closed.
    _made_by: File,
}

impl BoundDevice {
    /// What was attached.
    pub fn attached(&self) -> &Attached {
        &self.attached
    }
}

/// As [`attach`], for a device that nobody else is to use and that must not stay.
///
/// # Errors
/// Those of [`attach`].
pub fn attach_bound(options: &AttachOptions) -> Result<BoundDevice> {
    make(options, sys::BOUND).map(|(attached, made_by)| BoundDevice { attached, _made_by: made_by })
}

fn make(options: &AttachOptions, flags: u32) -> Result<(Attached, File)> {
    check(options)?;
    let mut hello = Hello::new(match options.source {
        Source::Lender { .. } => Role::Borrower,
        Source::Segment { .. } => Role::Node,
    });
    let mut client = [0; 12];
    getrandom::fill(&mut client)
        .map_err(|error| Error::Other(format!("cannot get random numbers: {error}")))?;
    hello.session = Incarnation { client, epoch: 0 }.to_bytes();
    let (transport, theirs) =
        greeting::connect(&options.address, &hello, CONNECT_TIMEOUT, &options.security)?;
    let stream = transport.stream();
    // The kernel module looks for signs of life itself.
    stream.without_user_timeout().map_err(|error| Error::system("set up a connection", &error))?;
    let mut attach = sys::Attach::new(0);
    (attach.ops_max, attach.window) = (theirs.ops_max, theirs.window);
    attach.peer = text(&options.address);
    attach.flags = flags | if options.read_only { sys::READ_ONLY } else { 0 };
    attach.board_key = options.board_key.map_or([0; 16], RemoteKey::to_bytes);
    if let Transport::Sealed(sealed) = &transport {
        let nonsense = || Error::NotNetvm { lender: options.address.clone() };
        let [(send_key, send_record), (receive_key, receive_record)] = sealed.keys().ok_or_else(nonsense)?;
        (attach.send_key, attach.send_record) = (*send_key, send_record);
        (attach.receive_key, attach.receive_record) = (*receive_key, receive_record);
        attach.flags |= sys::ENCRYPTED;
    }
    match &options.source {
        Source::Lender { bytes } => {
            (attach.kind, attach.bytes, attach.name) = (sys::LENDER, *bytes, text("device"));
        }
        Source::Segment { name, key } => {
            (attach.kind, attach.key, attach.name) = (sys::SEGMENT, key.to_bytes(), text(name));
        }
    }
    let done = sys::attach(stream.as_fd(), &mut attach);
    attach.send_key.zeroize();
    attach.receive_key.zeroize();
    let made_by = done.map_err(|error| refused(options, &error))?;
    let read_only = attach.flags & sys::READ_ONLY != 0;
    Ok((Attached { number: attach.device, bytes: attach.bytes, read_only }, made_by))
}

/// What can be known to be wrong before anybody is asked.
fn check(options: &AttachOptions) -> Result<()> {
    match &options.source {
        Source::Lender { bytes: 0 } => Err(Error::Other("a device of 0 bytes is of no use".to_owned())),
        Source::Segment { name, .. }
            if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains('\0') =>
        {
            Err(Error::Other(format!("a segment's name has 1 to {NAME_BYTES_MAX} bytes, none of them zero")))
        }
        _ => check_module(),
    }
}

/// Whether the kernel module is there.
pub(crate) fn check_module() -> Result<()> {
    if Path::new(sys::CONTROL).exists() {
        return Ok(());
    }
    Err(Error::Other(format!(
        "there is no {}: load the kernel module netvm_mem (make -C kmod, insmod kmod/netvm_mem.ko)",
        sys::CONTROL
    )))
}

fn refused(options: &AttachOptions, error: &io::Error) -> Error {
    let peer = &options.address;
    Error::Other(match (error.raw_os_error(), &options.source) {
        (Some(libc::EACCES | libc::EPERM), _) => format!("only root may use {}", sys::CONTROL),
        (Some(libc::ENOENT), Source::Segment { name, .. }) => {
            format!("{peer} has no segment {name:?}, or the key is wrong")
        }
        (Some(libc::ENODATA), Source::Segment { name, .. }) => {
            format!("the segment {name:?} of {peer} has no bytes")
        }
        (Some(libc::ENOSPC), _) => {
            format!("{peer} has not so much memory left: ask for less, or another lender")
        }
        (Some(libc::EMFILE), _) => "there are 256 devices: detach one (netvm device status)".to_owned(),
        (Some(libc::ENOPKG), _) => {
            "this kernel has no AES-GCM, which an encrypted session needs: modprobe gcm, aes and ghash"
                .to_owned()
        }
        (Some(libc::EPROTO), _) => format!("{peer} and the kernel module do not understand each other"),
        _ => format!("the kernel module could not attach {peer}: {error}"),
    })
}

/// Writes what is not written yet, and takes a device away; with `force` also while it is open, and whatever cannot be written is lost.
///
/// # Errors
/// [`Error::Other`] with what to do.
pub fn detach(number: u32, force: bool) -> Result<()> {
    sys::detach(number, force).map_err(|error| {
        let path = path(number);
        let path = path.display();
        Error::Other(match error.raw_os_error() {
            Some(libc::ENODEV) => format!("there is no {path}"),
            Some(libc::EBUSY) => {
                format!("{path} is open or mapped (fuser -v {path} shows by whom): end that, or use --force")
            }
            Some(libc::EIO) => format!(
                "not everything that was written to {path} has reached its peer: it is still attached; --force gives the rest up"
            ),
            Some(libc::ENOENT) => {
                format!("there is no {}: the kernel module netvm_mem is not loaded", sys::CONTROL)
            }
            _ => format!("cannot detach {path}: {error}"),
        })
    })
}

/// Maps a device, reads the byte at `offset`, and tells how its page is mapped: the entries of the page tables, and the physical address.
///
/// # Errors
/// [`Error::Bounds`]; [`Error::Other`] without the module or the device; [`Error::System`]: EPERM without CAP_SYS_ADMIN, EIO when the peer is lost.
pub fn page(number: u32, offset: u64) -> Result<Page> {
    let failed = |error: &io::Error| Error::system("look at the device's page", error);
    let file = File::open(path(number)).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => match check_module() {
            Ok(()) => Error::Other(format!("there is no {}", path(number).display())),
            Err(missing) => missing,
        },
        _ => failed(&error),
    })?;
    let folder = PathBuf::from(format!("{CLASS}/netvm_mem{number}"));
    let status = DeviceStatus::read(&folder, number);
    let len = status.ok_or_else(|| Error::Other(format!("there is no {}", folder.display())))?.bytes;
    if offset >= len {
        return Err(Error::Bounds { offset, bytes: 1, len });
    }
    let mapping = Mapping::of_device(&file, len, false).map_err(|error| failed(&error))?;
    let memory = mapping.shared();
    memory.touch(offset as usize).ok_or_else(|| failed(&io::Error::from_raw_os_error(libc::EIO)))?;
    sys::page(&file, memory.as_ptr() as u64 + offset).map_err(|error| failed(&error))
}

/// What the module tells of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Its number.
    pub number: u32,
    /// `lender` or `segment`.
    pub kind: String,
    /// Of the segment, or what the lender shows.
    pub name: String,
    /// Address of the lender or node.
    pub peer: String,
    /// `attached`, or `lost:` and why.
    pub state: String,
    /// Bytes of the device.
    pub bytes: u64,
    /// It cannot be written.
    pub read_only: bool,
    /// All that travels is encrypted.
    pub encrypted: bool,
    /// Open files of it; mappings count as one.
    pub opens: u64,
    /// Reads, and their bytes.
    pub reads: (u64, u64),
    /// Writes, and their bytes.
    pub writes: (u64, u64),
    /// Times that the peer was asked whether it has everything.
    pub flushes: u64,
    /// Reads and writes that failed.
    pub errors: u64,
    /// Notifications that came.
    pub notified: u64,
}

impl DeviceStatus {
    fn read(folder: &Path, number: u32) -> Option<Self> {
        let text = |name: &str| {
            fs::read_to_string(folder.join(name)).ok().map(|text| text.trim_end_matches('\n').to_owned())
        };
        let value = |name: &str| text(name)?.parse::<u64>().ok();
        Some(Self {
            number,
            kind: text("kind")?,
            name: text("name")?,
            peer: text("peer")?,
            state: text("state")?,
            bytes: value("bytes")?,
            read_only: value("read_only")? != 0,
            encrypted: value("encrypted")? != 0,
            opens: value("opens")?,
            reads: (value("reads")?, value("read_bytes")?),
            writes: (value("writes")?, value("write_bytes")?),
            flushes: value("flushes")?,
            errors: value("errors")?,
            notified: value("notified")?,
        })
    }

    /// Whether its peer is there.
    pub fn is_attached(&self) -> bool {
        self.state == "attached"
    }
}

/// All devices, by number; none when the module is not loaded.
pub fn devices() -> Vec<DeviceStatus> {
    let entries = fs::read_dir(CLASS).into_iter().flatten().flatten();
    let mut devices: Vec<_> = entries
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix("netvm_mem")?.parse().ok()?;
            // One that is being detached is left out.
            DeviceStatus::read(&entry.path(), number)
        })
        .collect();
    devices.sort_by_key(|device| device.number);
    devices
}
