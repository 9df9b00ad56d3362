//! The program in the lender's kernel that answers reads: docs/design/datagrams.md.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};

use netvm_core::slab::datagram::{HEADER_BYTES, Kind, PACKET_BYTES_MAX, PAGE_BYTES, PART_BYTES, UNIT_BYTES};
use netvm_sys::bpf::{Attachment, Code, Helper, If, Label, Pages, Program, R, Table, Width, verdict};
use netvm_sys::mapping::Mapping;
use netvm_sys::net::Interface;

/// Bytes by which the program finds a unit.
const KEY_BYTES: usize = 48;
/// Most units that it knows, for all leases together: 2 TiB.
const UNITS_MAX: u32 = 1 << 20;

/// By what the program finds a unit of a slab: who asks, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct UnitKey([u8; KEY_BYTES]);

impl UnitKey {
    /// For a lease's key, by who asks from there.
    pub(super) fn new(key: &[u8; 16], origin: ([u8; 16], u16), slab: u32, unit: u32) -> Self {
        let (address, port) = origin;
        let mut bytes = [0; KEY_BYTES];
        bytes[..16].copy_from_slice(key);
        bytes[16..20].copy_from_slice(&slab.to_ne_bytes());
        bytes[20..24].copy_from_slice(&unit.to_ne_bytes());
        bytes[24..40].copy_from_slice(&address);
        bytes[40..42].copy_from_slice(&port.to_be_bytes());
        Self(bytes)
    }
}

/// What the thread is to tell the program.
enum Word {
    Known(UnitKey, Arc<Pages>),
    Gone(UnitKey),
}

/// Program and table, and where they are attached.
pub(super) struct Reader {
    table: Arc<Table>,
    counts: Pages,
    counted: Mapping,
    /// By the interface: why not, if not.
    attached: BTreeMap<u32, Result<Attachment, String>>,
    words: Sender<Word>,
}

impl Reader {
    /// A table without units.
    ///
    /// # Errors
    /// EPERM without CAP_BPF and CAP_NET_ADMIN, and what else the kernel says.
    pub(super) fn new() -> io::Result<Self> {
        if cfg!(target_endian = "big") {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let (table, counts) = (Table::new(KEY_BYTES as u32, UNITS_MAX)?, Pages::new(1)?);
        // Whether programs may be had is found out now, and not when somebody waits for a page.
        Program::load(NAME, &program(&table, &counts, Shape { link_bytes: 14, whole: true }))?;
        let counted = Mapping::anonymous(PAGE_BYTES as usize)?;
        counted.replace_with_pages(0, &counts, |_| Ok(()))?;
        let table = Arc::new(table);
        let (words, heard) = mpsc::channel();
        let told = Arc::clone(&table);
        std::thread::Builder::new().name("netvm-reader".to_owned()).spawn(move || {
            netvm_sys::thread::block_signals();
            while let Ok(first) = heard.recv() {
                tell(&told, [first].into_iter().chain(heard.try_iter()));
            }
        })?;
        Ok(Self { table, counts, counted, attached: BTreeMap::new(), words })
    }

    /// Has the program look at what comes in by an interface. Of the first time it is told whether it does.
    pub(super) fn attach(&mut self, interface: u32) -> Option<Result<String, String>> {
        if self.attached.contains_key(&interface) {
            return None;
        }
        let mut name = format!("interface {interface}");
        let mut attach = || {
            let found = Interface::by_index(interface).map_err(|error| error.to_string())?;
            name.clone_from(&found.name);
            let link_bytes = match found.link_bytes {
                Some(bytes) => bytes,
                None => return Err("links of its kind are not known".to_owned()),
            };
            let shape = Shape { link_bytes, whole: found.packet_bytes_max >= PACKET_BYTES_MAX };
            let program = Program::load(NAME, &program(&self.table, &self.counts, shape));
            program.and_then(|program| program.attach(interface)).map_err(|error| error.to_string())
        };
        let attached = attach();
        let told = attached.as_ref().map(|_| name.clone()).map_err(|why| format!("{name}: {why}"));
        self.attached.insert(interface, attached);
        Some(told)
    }

    /// Whether the program sees what comes in by this interface.
    pub(super) fn sees(&self, interface: u32) -> bool {
        matches!(self.attached.get(&interface), Some(Ok(_)))
    }

    /// From soon on the program finds these pages.
    pub(super) fn tell(&self, key: UnitKey, pages: Arc<Pages>) {
        let _ = self.words.send(Word::Known(key, pages));
    }

    /// From soon on it does not.
    pub(super) fn forget(&self, key: UnitKey) {
        let _ = self.words.send(Word::Gone(key));
    }

    /// Whether the program could be attached: to no interface, which is another error than not at all.
    fn attachable(&self) -> io::Result<()> {
        let program =
            Program::load(NAME, &program(&self.table, &self.counts, Shape { link_bytes: 14, whole: true }))?;
        match program.attach(u32::MAX >> 1) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            attached => attached.map(drop),
        }
    }

    /// Datagrams that it has answered.
    pub(super) fn answered(&self) -> u64 {
        let count = |word: &std::sync::atomic::AtomicU64| word.load(std::sync::atomic::Ordering::Relaxed);
        self.counted.shared().with_u64(0, count).unwrap_or(0)
    }
}

/// Whether lenders of this process can have the kernel answer reads.
///
/// # Errors
/// What is missing, in words.
pub fn probe_kernel_reads() -> Result<(), String> {
    Reader::new().and_then(|reader| reader.attachable()).map_err(|error| match error.raw_os_error() {
        Some(libc::EPERM) => "this user may not".to_owned(),
        Some(libc::EINVAL) => "this kernel cannot".to_owned(),
        _ => error.to_string(),
    })
}

/// Tells the program all of these at once: each change of its table takes as long as all.
fn tell(table: &Table, words: impl Iterator<Item = Word>) {
    // The last one of each key counts.
    let mut last = BTreeMap::new();
    for word in words {
        match word {
            Word::Known(key, pages) => last.insert(key, Some(pages)),
            Word::Gone(key) => last.insert(key, None),
        };
    }
    table.remove(last.iter().filter(|(_, pages)| pages.is_none()).map(|(key, _)| &key.0[..]));
    let known = last.iter().filter_map(|(key, pages)| Some((&key.0[..], pages.as_deref()?)));
    // What finds no room is answered by the process.
    let _ = table.insert(known);
}

/// What programs are called where the kernel lists them.
const NAME: &std::ffi::CStr = c"netvm_reader";

/// How packets come by an interface.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Bytes before the Internet header.
    link_bytes: i16,
    /// There is room for pages.
    whole: bool,
}

/// The length of the Internet header, and where in there or behind it the program has to look.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    V4,
    V6,
}

impl Version {
    const fn header_bytes(self) -> i16 {
        match self {
            Self::V4 => 20,
            Self::V6 => 40,
        }
    }
}

const UDP_BYTES: i16 = 8;
const PROTOCOL_UDP: i32 = 17;
/// Bits of the flags and the offset of a fragment: more follow, and it is not the first.
const FRAGMENT: u16 = 0x3FFF;
// Of `struct __sk_buff`.
const DATA: i16 = 76;
const DATA_END: i16 = 80;
const INTERFACE: i16 = 40;

const PACKET: R = R(6);
const START: R = R(7);
const END: R = R(8);
const PAGE: R = R(9);
const STACK: R = R(10);
/// Where the key is on the stack, and behind it the number of the page.
const KEY: i16 = -(KEY_BYTES as i16);
const INDEX: i16 = KEY - 8;

/// What answers reads of known units, and leaves all other packets alone.
fn program<'a>(table: &'a Table, counts: &'a Pages, shape: Shape) -> Code<'a> {
    let mut code = Code::new();
    let (pass, six) = (code.label(), code.label());
    code.copy(PACKET, R(1));
    let start = shape.link_bytes;
    begin(&mut code, start + Version::V4.header_bytes(), pass);
    code.load(Width::B1, R(1), START, start);
    code.jump_if(R(1), If::Ne, 0x45, six);
    path(&mut code, table, counts, shape, Version::V4, pass);
    code.place(six);
    code.shift_right(R(1), 4);
    code.jump_if(R(1), If::Ne, 6, pass);
    path(&mut code, table, counts, shape, Version::V6, pass);
    code.place(pass);
    code.set(R(0), verdict::NEXT);
    code.end();
    code
}

/// Where the packet begins and ends; a shorter one than this, with UDP's and our header, is none of ours.
fn begin(code: &mut Code<'_>, before_udp: i16, short: Label) {
    code.load(Width::B4, START, PACKET, DATA);
    code.load(Width::B4, END, PACKET, DATA_END);
    code.copy(R(1), START);
    code.add(R(1), i32::from(before_udp + UDP_BYTES) + HEADER_BYTES as i32);
    code.jump_if_register(R(1), If::Gt, END, short);
}

/// A number of the network's, as a register has it that loads it.
fn be(value: u16) -> i32 {
    i32::from(value.to_be())
}

fn path<'a>(
    code: &mut Code<'a>,
    table: &'a Table,
    counts: &'a Pages,
    shape: Shape,
    version: Version,
    pass: Label,
) {
    let link = shape.link_bytes;
    let udp = link + version.header_bytes();
    let header = udp + UDP_BYTES;
    let is_v4 = version == Version::V4;
    let request_bytes = UDP_BYTES as u16 + HEADER_BYTES as u16;
    if link == 14 {
        code.load(Width::B2, R(1), START, 12);
        code.jump_if(R(1), If::Ne, be(if is_v4 { 0x0800 } else { 0x86DD }), pass);
    }
    if is_v4 {
        code.load(Width::B2, R(1), START, link + 6);
        code.and(R(1), be(FRAGMENT));
        code.jump_if(R(1), If::Ne, 0, pass);
        code.load(Width::B2, R(1), START, link + 2);
        code.jump_if(R(1), If::Ne, be(20 + request_bytes), pass);
        code.load(Width::B1, R(1), START, link + 9);
    } else {
        begin(code, udp, pass);
        code.load(Width::B2, R(1), START, link + 4);
        code.jump_if(R(1), If::Ne, be(request_bytes), pass);
        code.load(Width::B1, R(1), START, link + 6);
    }
    code.jump_if(R(1), If::Ne, PROTOCOL_UDP, pass);
    code.load(Width::B2, R(1), START, udp + 4);
    code.jump_if(R(1), If::Ne, be(request_bytes), pass);
    code.load(Width::B4, R(1), START, header);
    // None of them has a sign.
    code.jump_if(R(1), If::Ne, Kind::Read.magic() as i32, pass);
    key(code, version, link, header);
    let part = code.label();
    // Its length: a page, or a part of one, whole as it must be.
    code.load(Width::B4, R(1), START, header + 12);
    if shape.whole {
        code.jump_if(R(1), If::Ne, PAGE_BYTES as i32, part);
        find(code, table, header, PAGE_BYTES, pass);
        answer(code, counts, link, version, PAGE_BYTES, pass);
    }
    code.place(part);
    code.jump_if(R(1), If::Ne, PART_BYTES as i32, pass);
    find(code, table, header, PART_BYTES, pass);
    answer(code, counts, link, version, PART_BYTES, pass);
}

/// What the table is asked for, onto the stack ([`UnitKey`]); the offset within the slab stays in the third register.
fn key(code: &mut Code<'_>, version: Version, link: i16, header: i16) {
    let udp = header - UDP_BYTES;
    let dword = |code: &mut Code<'_>, from: i16, to: i16| {
        code.load(Width::B8, R(1), START, from);
        code.store(Width::B8, STACK, KEY + to, R(1));
    };
    dword(code, header + 16, 0);
    dword(code, header + 24, 8);
    if version == Version::V6 {
        dword(code, link + 8, 24);
        dword(code, link + 16, 32);
    } else {
        code.set(R(1), 0);
        code.store(Width::B8, STACK, KEY + 24, R(1));
        code.set(R(1), i32::from_ne_bytes([0, 0, 0xFF, 0xFF]));
        code.store(Width::B4, STACK, KEY + 32, R(1));
        code.load(Width::B4, R(1), START, link + 12);
        code.store(Width::B4, STACK, KEY + 36, R(1));
    }
    code.load(Width::B4, R(1), START, header + 4);
    code.store(Width::B4, STACK, KEY + 16, R(1));
    code.load(Width::B4, R(3), START, header + 8);
    code.copy(R(1), R(3));
    code.shift_right(R(1), UNIT_BYTES.trailing_zeros() as i32);
    code.store(Width::B4, STACK, KEY + 20, R(1));
    code.set(R(1), 0);
    code.store(Width::B8, STACK, KEY + 40, R(1));
    code.load(Width::B2, R(1), START, udp);
    code.store(Width::B2, STACK, KEY + 40, R(1));
}

/// The address of the bytes: of the page in [`PAGE`], with the part's offset if it is one.
fn find<'a>(code: &mut Code<'a>, table: &'a Table, header: i16, bytes: u32, pass: Label) {
    code.copy(R(1), R(3));
    code.and(R(1), bytes as i32 - 1);
    code.jump_if(R(1), If::Ne, 0, pass);
    code.and(R(3), UNIT_BYTES as i32 - 1);
    code.shift_right(R(3), PAGE_BYTES.trailing_zeros() as i32);
    code.store(Width::B4, STACK, INDEX, R(3));
    code.table(R(1), table);
    code.copy(R(2), STACK);
    code.add(R(2), KEY.into());
    code.call(Helper::Lookup);
    code.jump_if(R(0), If::Eq, 0, pass);
    code.copy(R(1), R(0));
    code.copy(R(2), STACK);
    code.add(R(2), INDEX.into());
    code.call(Helper::Lookup);
    code.jump_if(R(0), If::Eq, 0, pass);
    code.copy(PAGE, R(0));
    if bytes < PAGE_BYTES {
        code.load(Width::B4, R(1), START, header + 8);
        code.and(R(1), (PAGE_BYTES - bytes) as i32);
        code.add_register(PAGE, R(1));
    }
}

/// Makes the packet an answer with the bytes at [`PAGE`], and sends it back the way it came.
fn answer<'a>(code: &mut Code<'a>, counts: &'a Pages, link: i16, version: Version, bytes: u32, pass: Label) {
    let udp = link + version.header_bytes();
    let header = udp + UDP_BYTES;
    let lost = code.label();
    let before = i32::from(header) + HEADER_BYTES as i32;
    code.copy(R(1), PACKET);
    code.set(R(2), before + bytes as i32);
    code.set(R(3), 0);
    code.call(Helper::ChangeTail);
    code.jump_if(R(0), If::Ne, 0, pass);
    begin(code, udp, lost);
    let swap = |code: &mut Code<'_>, width: Width, one: i16, other: i16| {
        code.load(width, R(1), START, one);
        code.load(width, R(2), START, other);
        code.store(width, START, one, R(2));
        code.store(width, START, other, R(1));
    };
    if link == 14 {
        swap(code, Width::B4, 0, 6);
        swap(code, Width::B2, 4, 10);
    }
    let (was, is) =
        (UDP_BYTES as u16 + HEADER_BYTES as u16, UDP_BYTES as u16 + HEADER_BYTES as u16 + bytes as u16);
    match version {
        Version::V4 => {
            swap(code, Width::B4, link + 12, link + 16);
            // The checksum of a header in which one word has changed: RFC 1624, equation 3. The order of bytes does not matter to it.
            code.load(Width::B2, R(1), START, link + 10);
            code.xor(R(1), 0xFFFF);
            code.add(R(1), be(!(20 + was)) + be(20 + is));
            for _ in 0..2 {
                code.copy(R(2), R(1));
                code.shift_right(R(2), 16);
                code.and(R(1), 0xFFFF);
                code.add_register(R(1), R(2));
            }
            code.xor(R(1), 0xFFFF);
            code.store(Width::B2, START, link + 10, R(1));
            code.set(R(1), be(20 + is));
            code.store(Width::B2, START, link + 2, R(1));
        }
        Version::V6 => {
            swap(code, Width::B8, link + 8, link + 24);
            swap(code, Width::B8, link + 16, link + 32);
            code.set(R(1), be(is));
            code.store(Width::B2, START, link + 4, R(1));
        }
    }
    swap(code, Width::B2, udp, udp + 2);
    code.set(R(1), be(is));
    code.store(Width::B2, START, udp + 4, R(1));
    code.set(R(1), 0);
    code.store(Width::B2, START, udp + 6, R(1));
    code.set(R(1), Kind::ByKernel.magic() as i32);
    code.store(Width::B4, START, header, R(1));
    code.copy(R(1), PACKET);
    code.set(R(2), before);
    code.copy(R(3), PAGE);
    code.set(R(4), bytes as i32);
    code.set(R(5), 0);
    code.call(Helper::StoreBytes);
    code.jump_if(R(0), If::Ne, 0, lost);
    code.set(R(1), 0);
    code.store(Width::B4, STACK, INDEX, R(1));
    code.pages(R(1), counts);
    code.copy(R(2), STACK);
    code.add(R(2), INDEX.into());
    code.call(Helper::Lookup);
    code.jump_if(R(0), If::Eq, 0, lost);
    code.set(R(1), 1);
    code.add_atomically(R(0), 0, R(1));
    code.load(Width::B4, R(1), PACKET, INTERFACE);
    code.set(R(2), 0);
    code.call(Helper::Redirect);
    code.end();
    code.place(lost);
    code.set(R(0), verdict::DROP);
    code.end();
}

#[cfg(test)]
mod tests;
