//! The program in the lender's kernel that answers reads: docs/design/datagrams.md.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use netvm_core::slab::datagram::{
    ANSWER_BYTES, Header, Kind, PAGE_BYTES, PART_BYTES, REQUEST_BYTES, UNIT_BYTES, packet_bytes,
};
use netvm_sys::bpf::{Attachment, Code, Helper, If, Label, Pages, Program, R, Table, Width, verdict};
use netvm_sys::mapping::Mapping;
use netvm_sys::net::Interface;

/// Bytes by which the program finds a unit.
const KEY_BYTES: usize = 64;
/// Most units that it knows, for all leases together: 2 TiB.
const UNITS_MAX: u32 = 1 << 20;

/// By what the program finds a unit of a slab: who asks whom, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct UnitKey([u8; KEY_BYTES]);

/// Who asks whom: a host, and an address with its port; addresses as IPv6 has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flow {
    pub(super) from: [u8; 16],
    pub(super) to: ([u8; 16], u16),
}

impl UnitKey {
    /// For a lease's key.
    pub(super) fn new(key: &[u8; 16], flow: &Flow, slab: u32, unit: u32) -> Self {
        let mut bytes = [0; KEY_BYTES];
        bytes[..16].copy_from_slice(key);
        bytes[16..20].copy_from_slice(&slab.to_ne_bytes());
        bytes[20..24].copy_from_slice(&unit.to_ne_bytes());
        bytes[24..40].copy_from_slice(&flow.from);
        bytes[40..56].copy_from_slice(&flow.to.0);
        bytes[56..58].copy_from_slice(&flow.to.1.to_be_bytes());
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
    /// By the interface.
    interfaces: BTreeMap<u32, At>,
    words: Sender<Word>,
    told: Arc<Told>,
}

/// What the thread tells the lender.
#[derive(Default)]
struct Told {
    /// Words that the program has not been told yet.
    left: AtomicUsize,
    /// Units for which its table had no room.
    failed: Mutex<Vec<UnitKey>>,
}

/// The program at an interface.
enum At {
    Attached {
        #[expect(dead_code, reason = "held")]
        attachment: Attachment,
        packet_bytes_max: u32,
        /// Datagrams that it should have answered, since it has answered this many.
        missed: (u32, u64),
    },
    /// It cannot be, or has been of no use there. It is tried again then.
    Not(Instant),
}

/// No more units are moved when the program has not been told of so many.
const UNTOLD_MAX: usize = 64;
/// After so many datagrams that it should have answered, and did not, it is of no use: another program comes first, perhaps.
const MISSED_MAX: u32 = 256;
/// For so long.
const AGAIN: Duration = Duration::from_secs(60);

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
        Program::load(NAME, &program(&table, &counts, Shape { link_bytes: 14, packet_bytes_max: u32::MAX }))?;
        let counted = Mapping::anonymous(PAGE_BYTES as usize)?;
        counted.replace_with_pages(0, &counts, |_| Ok(()))?;
        let table = Arc::new(table);
        let (words, heard) = mpsc::channel();
        let (known, told) = (Arc::clone(&table), Arc::new(Told::default()));
        let teller = Arc::clone(&told);
        std::thread::Builder::new().name("netvm-reader".to_owned()).spawn(move || {
            netvm_sys::thread::block_signals();
            while let Ok(first) = heard.recv() {
                let words: Vec<_> = [first].into_iter().chain(heard.try_iter()).collect();
                let count = words.len();
                let failed = tell(&known, words);
                if !failed.is_empty() {
                    teller.failed.lock().unwrap_or_else(PoisonError::into_inner).extend(failed);
                }
                teller.left.fetch_sub(count, Ordering::Release);
            }
        })?;
        Ok(Self { table, counts, counted, interfaces: BTreeMap::new(), words, told })
    }

    /// Has the program look at what comes in by an interface. Of the first time it is told whether it does.
    pub(super) fn attach(&mut self, interface: u32) -> Option<Result<String, String>> {
        match self.interfaces.get(&interface) {
            Some(At::Not(again)) if Instant::now() >= *again => {}
            Some(_) => return None,
            None => {}
        }
        let mut name = format!("interface {interface}");
        let mut attach = || {
            let found = Interface::by_index(interface).map_err(|error| error.to_string())?;
            name.clone_from(&found.name);
            let link_bytes = match found.link_bytes {
                Some(bytes) => bytes,
                None => return Err("links of its kind are not known".to_owned()),
            };
            let shape = Shape { link_bytes, packet_bytes_max: found.packet_bytes_max };
            let program = Program::load(NAME, &program(&self.table, &self.counts, shape));
            let attachment = program.and_then(|program| program.attach(interface));
            let attachment = attachment.map_err(|error| error.to_string())?;
            Ok(At::Attached { attachment, packet_bytes_max: found.packet_bytes_max, missed: (0, 0) })
        };
        let attached = attach();
        let told = attached.as_ref().map(|_| name.clone()).map_err(|why| format!("{name}: {why}"));
        self.interfaces.insert(interface, attached.unwrap_or_else(|_| At::Not(Instant::now() + AGAIN)));
        Some(told)
    }

    /// Whether the program sees what comes in by this interface.
    pub(super) fn sees(&self, interface: u32) -> bool {
        matches!(self.interfaces.get(&interface), Some(At::Attached { .. }))
    }

    /// Whether more can be told now.
    pub(super) fn has_room(&self) -> bool {
        self.told.left.load(Ordering::Acquire) < UNTOLD_MAX
    }

    /// Units that the program has not been told of, as there was no room for them.
    pub(super) fn take_failed(&self) -> Vec<UnitKey> {
        std::mem::take(&mut *self.told.failed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A datagram has come in by this interface that the program should have answered with so many bytes. True when that has been so often that the program is
    /// of no use there, and is not there any more.
    pub(super) fn has_missed(&mut self, interface: u32, is_v6: bool, bytes: u32) -> bool {
        let answered = self.answered();
        let Some(At::Attached { packet_bytes_max, missed, .. }) = self.interfaces.get_mut(&interface) else {
            return false;
        };
        // What does not fit is the process's.
        if packet_bytes(is_v6, bytes) > *packet_bytes_max {
            return false;
        }
        *missed = if answered == missed.1 { (missed.0 + 1, answered) } else { (1, answered) };
        let is_useless = missed.0 >= MISSED_MAX;
        if is_useless {
            self.interfaces.insert(interface, At::Not(Instant::now() + AGAIN));
        }
        is_useless
    }

    fn say(&self, word: Word) {
        self.told.left.fetch_add(1, Ordering::Relaxed);
        let _ = self.words.send(word);
    }

    /// From soon on the program finds these pages.
    pub(super) fn tell(&self, key: UnitKey, pages: Arc<Pages>) {
        self.say(Word::Known(key, pages));
    }

    /// From soon on it does not.
    pub(super) fn forget(&self, key: UnitKey) {
        self.say(Word::Gone(key));
    }

    /// Whether the program finds something by this key now.
    #[cfg(test)]
    pub(super) fn knows(&self, key: &UnitKey) -> bool {
        self.table.has(&key.0)
    }

    /// Whether the program could be attached: to no interface, which is another error than not at all.
    fn attachable(&self) -> io::Result<()> {
        let program = Program::load(
            NAME,
            &program(&self.table, &self.counts, Shape { link_bytes: 14, packet_bytes_max: u32::MAX }),
        )?;
        match program.attach(u32::MAX >> 1) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            attached => attached.map(drop),
        }
    }

    /// Datagrams that it has answered.
    pub(super) fn answered(&self) -> u64 {
        let count = |word: &AtomicU64| word.load(Ordering::Relaxed);
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

/// Tells the program all of these at once: each change of its table takes as long as all. Those that it had no room for it does not know.
fn tell(table: &Table, words: Vec<Word>) -> Vec<UnitKey> {
    // The last one of each key counts.
    let mut last = BTreeMap::new();
    for word in words {
        match word {
            Word::Known(key, pages) => last.insert(key, Some(pages)),
            Word::Gone(key) => last.insert(key, None),
        };
    }
    table.remove(last.iter().filter(|(_, pages)| pages.is_none()).map(|(key, _)| &key.0[..]));
    let known = last.iter().filter_map(|(key, pages)| Some((key, pages.as_deref()?)));
    let Err((done, _)) = table.insert(known.clone().map(|(key, pages)| (&key.0[..], pages))) else {
        return Vec::new();
    };
    let failed: Vec<UnitKey> = known.skip(done).map(|(key, _)| *key).collect();
    // Perhaps they were known before, with other pages.
    table.remove(failed.iter().map(|key| &key.0[..]));
    failed
}

/// What programs are called where the kernel lists them.
const NAME: &std::ffi::CStr = c"netvm_reader";

/// How packets come by an interface.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Bytes before the Internet header.
    link_bytes: i16,
    /// Most bytes of a packet without that header.
    packet_bytes_max: u32,
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
    begin(&mut code, start + Version::V4.header_bytes(), REQUEST_BYTES, pass);
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

/// Where the packet begins and ends; one that is shorter than UDP's header and so many bytes behind it is none of ours.
fn begin(code: &mut Code<'_>, before_udp: i16, bytes: usize, short: Label) {
    code.load(Width::B4, START, PACKET, DATA);
    code.load(Width::B4, END, PACKET, DATA_END);
    code.copy(R(1), START);
    code.add(R(1), i32::from(before_udp + UDP_BYTES) + bytes as i32);
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
    let request_bytes = UDP_BYTES as u16 + REQUEST_BYTES as u16;
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
        begin(code, udp, REQUEST_BYTES, pass);
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
    find(code, table, pass);
    // How long answers may be: as a page, or a part of one.
    let room = |bytes: &u32| packet_bytes(!is_v4, *bytes) <= shape.packet_bytes_max;
    code.load(Width::B4, R(1), START, header + 12);
    for bytes in [PAGE_BYTES, PART_BYTES].into_iter().filter(room) {
        let other = code.label();
        code.jump_if(R(1), If::Ne, bytes as i32, other);
        answer(code, counts, link, version, bytes, pass);
        code.place(other);
    }
    code.set(R(0), verdict::NEXT);
    code.end();
}

/// What the table is asked for, onto the stack ([`UnitKey`]); the offset within the slab stays in the third register.
fn key(code: &mut Code<'_>, version: Version, link: i16, header: i16) {
    let udp = header - UDP_BYTES;
    let dword = |code: &mut Code<'_>, from: i16, to: i16| {
        code.load(Width::B8, R(1), START, from);
        code.store(Width::B8, STACK, KEY + to, R(1));
    };
    dword(code, header + ANSWER_BYTES as i16, 0);
    dword(code, header + ANSWER_BYTES as i16 + 8, 8);
    if version == Version::V6 {
        (0..4).for_each(|part| dword(code, link + 8 + part * 8, 24 + part * 8));
    } else {
        for (from, to) in [(link + 12, 24), (link + 16, 40)] {
            code.set(R(1), 0);
            code.store(Width::B8, STACK, KEY + to, R(1));
            code.set(R(1), i32::from_ne_bytes([0, 0, 0xFF, 0xFF]));
            code.store(Width::B4, STACK, KEY + to + 8, R(1));
            code.load(Width::B4, R(1), START, from);
            code.store(Width::B4, STACK, KEY + to + 12, R(1));
        }
    }
    code.load(Width::B4, R(1), START, header + 4);
    code.store(Width::B4, STACK, KEY + 16, R(1));
    code.load(Width::B4, R(3), START, header + 8);
    code.copy(R(1), R(3));
    code.shift_right(R(1), UNIT_BYTES.trailing_zeros() as i32);
    code.store(Width::B4, STACK, KEY + 20, R(1));
    code.set(R(1), 0);
    code.store(Width::B8, STACK, KEY + 56, R(1));
    // The port that is asked. Whoever waits for a page by itself has another one to ask from.
    code.load(Width::B2, R(1), START, udp + 2);
    code.store(Width::B2, STACK, KEY + 56, R(1));
}

/// The address of the page.
fn find<'a>(code: &mut Code<'a>, table: &'a Table, pass: Label) {
    code.copy(R(1), R(3));
    code.and(R(1), PAGE_BYTES as i32 - 1);
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
}

/// Makes the packet the answer, or one after the other, of at most so many bytes each, and sends it back the way it came.
fn answer<'a>(code: &mut Code<'a>, counts: &'a Pages, link: i16, version: Version, bytes: u32, pass: Label) {
    let udp = link + version.header_bytes();
    let header = udp + UDP_BYTES;
    let lost = code.label();
    // How many bytes UDP has.
    let mut was = UDP_BYTES as u16 + REQUEST_BYTES as u16;
    let request = Header { kind: Kind::Read, slab: 0, offset: 0, bytes, sequence: 0 };
    let parts: Vec<Header> = request.answers(Kind::ByKernel).collect();
    for (index, part) in parts.iter().enumerate() {
        let is = UDP_BYTES as u16 + ANSWER_BYTES as u16 + part.bytes as u16;
        let before = i32::from(header) + ANSWER_BYTES as i32;
        code.copy(R(1), PACKET);
        code.set(R(2), before + part.bytes as i32);
        code.set(R(3), 0);
        code.call(Helper::ChangeTail);
        // It has not become an answer yet.
        code.jump_if(R(0), If::Ne, 0, if index == 0 { pass } else { lost });
        begin(code, udp, ANSWER_BYTES, lost);
        if index == 0 {
            turn(code, link, version);
            code.set(R(1), Kind::ByKernel.magic() as i32);
            code.store(Width::B4, START, header, R(1));
        } else {
            code.load(Width::B4, R(1), START, header + 8);
            code.add(R(1), parts[index - 1].bytes as i32);
            code.store(Width::B4, START, header + 8, R(1));
        }
        set_length(code, link, version, was, is);
        code.set(R(1), part.bytes as i32);
        code.store(Width::B4, START, header + 12, R(1));
        code.copy(R(1), PACKET);
        code.set(R(2), before);
        code.copy(R(3), PAGE);
        code.add(R(3), part.offset as i32);
        code.set(R(4), part.bytes as i32);
        code.set(R(5), 0);
        code.call(Helper::StoreBytes);
        code.jump_if(R(0), If::Ne, 0, lost);
        if index + 1 < parts.len() {
            code.copy(R(1), PACKET);
            code.load(Width::B4, R(2), PACKET, INTERFACE);
            code.set(R(3), 0);
            code.call(Helper::CloneRedirect);
        }
        was = is;
    }
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

/// Who sent it is who gets it.
fn turn(code: &mut Code<'_>, link: i16, version: Version) {
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
    match version {
        Version::V4 => swap(code, Width::B4, link + 12, link + 16),
        Version::V6 => {
            swap(code, Width::B8, link + 8, link + 24);
            swap(code, Width::B8, link + 16, link + 32);
        }
    }
    let udp = link + version.header_bytes();
    swap(code, Width::B2, udp, udp + 2);
    // No checksum.
    code.set(R(1), 0);
    code.store(Width::B2, START, udp + 6, R(1));
}

/// UDP's header and what follows it have so many bytes, where it had others.
fn set_length(code: &mut Code<'_>, link: i16, version: Version, was: u16, is: u16) {
    if version == Version::V4 {
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
    code.set(R(1), be(is));
    if version == Version::V6 {
        code.store(Width::B2, START, link + 4, R(1));
    }
    code.store(Width::B2, START, link + version.header_bytes() + 4, R(1));
}

#[cfg(test)]
mod tests;
