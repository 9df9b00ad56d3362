//! Programs of the kernel's own (eBPF) that look at packets before any socket does, and memory that they share with this process: bpf(2), <linux/bpf.h>. Programs are
//! attached by TCX (Linux 6.6).

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

mod code;

pub use code::{Code, Helper, If, Label, R, Width};

// Commands, types and flags of <linux/bpf.h>.
const MAP_CREATE: i32 = 0;
const MAP_LOOKUP_ELEM: i32 = 1;
const PROG_LOAD: i32 = 5;
const PROG_TEST_RUN: i32 = 10;
const MAP_UPDATE_BATCH: i32 = 26;
const MAP_DELETE_BATCH: i32 = 27;
const LINK_CREATE: i32 = 28;
const MAP_TYPE_ARRAY: u32 = 2;
const MAP_TYPE_HASH_OF_MAPS: u32 = 13;
const NO_PREALLOC: u32 = 1;
const MMAPABLE: u32 = 1 << 10;
const INNER_MAP: u32 = 1 << 12;
const PROG_TYPE_SCHED_CLS: u32 = 3;
const TCX_INGRESS: u32 = 46;

/// Bytes of a page of [`Pages`].
pub const PAGE_BYTES: usize = 4096;
/// Zeroed behind what a command takes: as large as the kernel's own union.
const ATTRIBUTE_WORDS: usize = 18;
/// Of what the kernel says about a program that it refuses.
const LOG_BYTES: usize = 64 << 10;

/// The union that bpf(2) takes, by its 32-bit words; addresses take two.
struct Attribute([u64; ATTRIBUTE_WORDS]);

impl Attribute {
    fn new() -> Self {
        Self([0; ATTRIBUTE_WORDS])
    }

    /// The 32-bit field at this byte.
    fn u32(mut self, at: usize, value: u32) -> Self {
        let (word, shift) = (at / 8, at % 8 * 8);
        // In memory the field has its place whatever the byte order.
        let shift = if cfg!(target_endian = "big") { 32 - shift } else { shift };
        self.0[word] |= u64::from(value) << shift;
        self
    }

    /// What the kernel has put into the 32-bit field at this byte.
    fn told(&self, at: usize) -> u32 {
        let shift = at % 8 * 8;
        let shift = if cfg!(target_endian = "big") { 32 - shift } else { shift };
        (self.0[at / 8] >> shift) as u32
    }

    fn fd(self, at: usize, fd: BorrowedFd<'_>) -> Self {
        self.u32(at, fd.as_raw_fd() as u32)
    }

    fn address<T>(mut self, at: usize, bytes: &[T]) -> Self {
        self.0[at / 8] = bytes.as_ptr() as u64;
        self
    }

    fn address_mut<T>(mut self, at: usize, bytes: &mut [T]) -> Self {
        self.0[at / 8] = bytes.as_mut_ptr() as u64;
        self
    }

    /// bpf(2).
    ///
    /// # Safety
    /// The addresses in there have as many bytes as the command reads or writes there.
    unsafe fn call(&mut self, command: i32) -> io::Result<i32> {
        // SAFETY: an attribute of so many bytes; what it points at is the caller's promise.
        let result =
            unsafe { libc::syscall(libc::SYS_bpf, command, self.0.as_mut_ptr(), size_of_val(&self.0)) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
    }

    /// A command that makes a descriptor.
    ///
    /// # Safety
    /// As [`Attribute::call`].
    unsafe fn make(mut self, command: i32) -> io::Result<OwnedFd> {
        // SAFETY: the caller's promise.
        let fd = unsafe { self.call(command) }?;
        // SAFETY: a descriptor that the kernel has just made for us, closed on exec as all of bpf(2)'s.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// Pages of zeros that programs of the kernel read, and that this process can map ([`crate::mapping::Mapping::replace_with_pages`]). It is the kernel's memory, all of it
/// from the beginning, and lives as long as anybody has it.
#[derive(Debug)]
pub struct Pages {
    fd: OwnedFd,
    count: u32,
}

impl Pages {
    /// So many pages.
    ///
    /// # Errors
    /// EPERM without CAP_BPF; ENOMEM; EINVAL for none.
    pub fn new(count: u32) -> io::Result<Self> {
        let attribute = Attribute::new().u32(0, MAP_TYPE_ARRAY).u32(4, 4).u32(8, PAGE_BYTES as u32);
        let attribute = attribute.u32(12, count).u32(16, MMAPABLE | INNER_MAP);
        // SAFETY: there are no addresses.
        let fd = unsafe { attribute.make(MAP_CREATE) }?;
        Ok(Self { fd, count })
    }

    /// All of them.
    pub fn bytes(&self) -> u64 {
        u64::from(self.count) * PAGE_BYTES as u64
    }
}

impl AsFd for Pages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// By which keys programs find which [`Pages`].
#[derive(Debug)]
pub struct Table {
    fd: OwnedFd,
    key_bytes: usize,
}

impl Table {
    /// For `entries_max` keys of `key_bytes` bytes each; room is taken as there are some.
    ///
    /// # Errors
    /// EPERM without CAP_BPF; E2BIG.
    pub fn new(key_bytes: u32, entries_max: u32) -> io::Result<Self> {
        // Of what kind its values are.
        let pages = Pages::new(1)?;
        let attribute = Attribute::new().u32(0, MAP_TYPE_HASH_OF_MAPS).u32(4, key_bytes).u32(8, 4);
        let attribute = attribute.u32(12, entries_max).u32(16, NO_PREALLOC).fd(20, pages.as_fd());
        // SAFETY: there are no addresses.
        let fd = unsafe { attribute.make(MAP_CREATE) }?;
        Ok(Self { fd, key_bytes: key_bytes as usize })
    }

    /// Has programs find the pages by their keys. When it returns no program runs any more that saw another state; that takes milliseconds, for any number of them.
    ///
    /// # Errors
    /// E2BIG when it is full, ENOMEM: so many have been entered, in order.
    ///
    /// # Panics
    /// When a key has not the table's number of bytes.
    pub fn insert<'a>(
        &self,
        entries: impl Iterator<Item = (&'a [u8], &'a Pages)>,
    ) -> Result<(), (usize, io::Error)> {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (key, pages) in entries {
            assert_eq!(key.len(), self.key_bytes, "a key of another table");
            keys.extend_from_slice(key);
            values.push(pages.fd.as_raw_fd());
        }
        if values.is_empty() {
            return Ok(());
        }
        let attribute = Attribute::new().address(16, &keys).address(24, &values);
        let mut attribute = attribute.u32(32, values.len() as u32).fd(36, self.fd.as_fd());
        // SAFETY: as many keys and values as it is told of, each of the table's sizes (asserted); all outlive the call.
        let done = unsafe { attribute.call(MAP_UPDATE_BATCH) };
        done.map(drop).map_err(|error| ((attribute.told(32) as usize).min(values.len()), error))
    }

    /// Whether programs find something by this key.
    pub fn has(&self, key: &[u8]) -> bool {
        assert_eq!(key.len(), self.key_bytes, "a key of another table");
        let mut id = [0u32];
        let attribute = Attribute::new().fd(0, self.fd.as_fd()).address(8, key);
        let mut attribute = attribute.address_mut(16, &mut id);
        // SAFETY: a key of the table's size (asserted), and room for a value; both outlive the call.
        unsafe { attribute.call(MAP_LOOKUP_ELEM) }.is_ok()
    }

    /// Has programs not find anything by these keys any more, whether they did or not. As [`Table::insert`], it takes milliseconds.
    ///
    /// # Panics
    /// When a key has not the table's number of bytes.
    pub fn remove<'a>(&self, keys: impl Iterator<Item = &'a [u8]>) {
        let mut all = Vec::new();
        for key in keys {
            assert_eq!(key.len(), self.key_bytes, "a key of another table");
            all.extend_from_slice(key);
        }
        let mut rest = &all[..];
        while !rest.is_empty() {
            let count = rest.len() / self.key_bytes;
            let attribute = Attribute::new().address(16, rest);
            let mut attribute = attribute.u32(32, count as u32).fd(36, self.fd.as_fd());
            // SAFETY: as many keys as it is told of, each of the table's size (asserted), which outlive the call.
            if unsafe { attribute.call(MAP_DELETE_BATCH) }.is_ok() {
                return;
            }
            // The first that is not there ends it.
            let done = (attribute.told(32) as usize).min(count) + 1;
            rest = rest.get(done * self.key_bytes..).unwrap_or_default();
        }
    }
}

/// A program that the kernel has found to be harmless.
#[derive(Debug)]
pub struct Program(OwnedFd);

impl Program {
    /// Has the kernel check and translate a program for packets (`BPF_PROG_TYPE_SCHED_CLS`). What [`Code::table`] and [`Code::pages`] name lives as long as it.
    ///
    /// # Errors
    /// EPERM without CAP_BPF and CAP_NET_ADMIN; EACCES, EINVAL with the end of what the kernel has to say of the program.
    pub fn load(name: &CStr, code: &Code<'_>) -> io::Result<Self> {
        let words = code.words();
        let attribute = |log: &mut [u8]| {
            let attribute = Attribute::new().u32(0, PROG_TYPE_SCHED_CLS).u32(4, words.len() as u32);
            let attribute = attribute.address(8, &words).address(16, c"GPL".to_bytes_with_nul());
            let attribute = attribute.u32(68, TCX_INGRESS).name(48, name);
            if log.is_empty() {
                attribute
            } else {
                attribute.u32(24, 1).u32(28, log.len() as u32).address_mut(32, log)
            }
        };
        // SAFETY: as many instructions as it is told of, a string with its end, and no log; all outlive the call.
        let refusal = match unsafe { attribute(&mut []).make(PROG_LOAD) } {
            Ok(fd) => return Ok(Self(fd)),
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => return Err(error),
            Err(error) => error,
        };
        let mut log = vec![0; LOG_BYTES];
        // SAFETY: as above, with a log of as many bytes as it is told of.
        match unsafe { attribute(&mut log).make(PROG_LOAD) } {
            Ok(fd) => Ok(Self(fd)),
            Err(_) => {
                let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
                let said = String::from_utf8_lossy(&log[end.saturating_sub(2000)..end]).trim().to_owned();
                Err(io::Error::new(refusal.kind(), format!("{refusal}: {said}")))
            }
        }
    }

    /// Has it look at all packets that come in by an interface, until this is dropped. Programs that are there already look first.
    ///
    /// # Errors
    /// EPERM without CAP_NET_ADMIN; EINVAL before Linux 6.6; ENODEV.
    pub fn attach(&self, interface: u32) -> io::Result<Attachment> {
        let attribute = Attribute::new().fd(0, self.0.as_fd()).u32(4, interface).u32(8, TCX_INGRESS);
        // SAFETY: there are no addresses.
        unsafe { attribute.make(LINK_CREATE) }.map(Attachment)
    }

    /// What it makes of a packet, which goes nowhere: its verdict, and the packet afterwards, of at most `room` bytes. For tests.
    ///
    /// # Errors
    /// EINVAL for a packet of less than 14 bytes; ENOSPC without the room.
    pub fn test(&self, packet: &[u8], room: usize) -> io::Result<(i32, Vec<u8>)> {
        let mut out = vec![0; room];
        let attribute =
            Attribute::new().fd(0, self.0.as_fd()).u32(8, packet.len() as u32).u32(12, room as u32);
        let mut attribute = attribute.address(16, packet).address_mut(24, &mut out).u32(32, 1);
        // SAFETY: as many bytes on both sides as it is told of; both outlive the call.
        unsafe { attribute.call(PROG_TEST_RUN) }?;
        out.truncate(attribute.told(12) as usize);
        Ok((attribute.told(4) as i32, out))
    }
}

impl Attribute {
    /// A name of at most fifteen bytes.
    fn name(mut self, at: usize, name: &CStr) -> Self {
        let mut bytes = [0; 16];
        let len = name.count_bytes().min(15);
        bytes[..len].copy_from_slice(&name.to_bytes()[..len]);
        for (word, part) in self.0[at / 8..].iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_ne_bytes(part.try_into().unwrap_or_default());
        }
        self
    }
}

/// A program looks at an interface's packets as long as this lives, and no longer than this process.
#[derive(Debug)]
pub struct Attachment(#[expect(dead_code, reason = "held")] OwnedFd);

/// What the kernel makes of packets by what a program returns.
pub mod verdict {
    /// The next program looks at it, or the rest of the kernel.
    pub const NEXT: i32 = -1;
    /// It is thrown away.
    pub const DROP: i32 = 2;
}

#[cfg(test)]
mod tests;
