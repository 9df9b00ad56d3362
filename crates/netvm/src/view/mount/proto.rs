//! Requests of a kernel and their answers: <linux/fuse.h>, protocol 7.31. Numbers are of this machine's byte order. Pure: bytes in,
//! bytes out; a request may come from another machine, and is not believed.

use netvm_core::files::{Attributes, Change, Entry, Kind, Room, Time};

/// Bytes before the data of a write: `fuse_in_header` and `fuse_write_in`.
pub(super) const HEAD_BYTES: usize = 80;
pub(super) const IN_HEADER_BYTES: usize = 40;
pub(super) const OUT_HEADER_BYTES: usize = 16;
/// Most bytes of other requests: one with an extended attribute, which is refused.
const SMALL_BYTES_MAX: usize = 128 << 10;

const MAJOR: u32 = 7;
const MINOR: u32 = 31;
/// The first version with all that is used here.
pub(super) const MINOR_MIN: u32 = 31;
const WRITE_OPCODE: u32 = 16;
const FORGET_MANY_OPCODE: u32 = 42;
/// FUSE_INIT_EXT: there are more than 32 flags.
const EXTENDED: u64 = 1 << 30;

/// What begins each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Bytes of the whole request.
    pub(super) length: usize,
    pub(super) opcode: u32,
    pub(super) unique: u64,
    pub(super) node: u64,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// The thread that asks, as this process's name space numbers it.
    pub(super) thread: u32,
}

impl Header {
    pub(super) fn parse(head: &[u8; HEAD_BYTES]) -> Self {
        let mut words = Words(head);
        let (length, opcode, unique, node) = (words.u32(), words.u32(), words.u64(), words.u64());
        let (uid, gid, thread) = (words.u32(), words.u32(), words.u32());
        // All of it is there.
        let number = |word: Option<u32>| word.unwrap_or(0);
        Self {
            length: number(length) as usize,
            opcode: number(opcode),
            unique: unique.unwrap_or(0),
            node: node.unwrap_or(0),
            uid: number(uid),
            gid: number(gid),
            thread: number(thread),
        }
    }

    /// Whether it is a write, whose data is not parsed.
    pub(super) fn is_write(&self) -> bool {
        self.opcode == WRITE_OPCODE
    }

    /// Whether it may be so long.
    pub(super) fn is_plausible(&self, data_max: usize) -> bool {
        let most = match self.opcode {
            WRITE_OPCODE | FORGET_MANY_OPCODE => HEAD_BYTES + data_max,
            _ => SMALL_BYTES_MAX,
        };
        (IN_HEADER_BYTES..=most).contains(&self.length)
    }
}

/// What is asked for. Names are not checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask<'a> {
    Init {
        minor: u32,
        readahead: u32,
        flags: u64,
    },
    Lookup {
        name: &'a [u8],
    },
    Forget {
        times: u64,
    },
    ForgetMany(&'a [u8]),
    Attributes,
    Change(ChangeWanted),
    ReadLink,
    MakeLink {
        name: &'a [u8],
        target: &'a [u8],
    },
    MakeNode {
        name: &'a [u8],
        mode: u32,
        device: u32,
    },
    MakeFolder {
        name: &'a [u8],
        mode: u32,
    },
    Create {
        name: &'a [u8],
        mode: u32,
        /// It must be new.
        exclusive: bool,
    },
    Remove {
        name: &'a [u8],
        folder: bool,
    },
    Rename {
        name: &'a [u8],
        to: u64,
        new: &'a [u8],
        flags: u32,
    },
    Link {
        file: u64,
        name: &'a [u8],
    },
    Open {
        flags: u32,
    },
    OpenFolder,
    Read {
        offset: u64,
        bytes: u32,
    },
    /// `cached`: from the page cache.
    Write {
        offset: u64,
        bytes: u32,
        append: bool,
        cached: bool,
    },
    Entries {
        offset: u64,
        bytes: u32,
    },
    Statistics,
    Sync,
    Allocate {
        offset: u64,
        bytes: u64,
        mode: u32,
    },
    /// Nothing to do, but somebody waits for the answer.
    Nothing,
    /// Nobody waits for an answer.
    Silent,
    Unknown,
}

/// Attributes to be set; times may be "now".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ChangeWanted {
    pub(super) size: Option<u64>,
    pub(super) permissions: Option<u32>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) accessed: Option<Option<Time>>,
    pub(super) modified: Option<Option<Time>>,
    pub(super) changed: Option<Time>,
}

impl ChangeWanted {
    pub(super) fn at(&self, now: Time) -> Change {
        Change {
            size: self.size,
            permissions: self.permissions,
            uid: self.uid,
            gid: self.gid,
            accessed: self.accessed.map(|time| time.unwrap_or(now)),
            modified: self.modified.map(|time| time.unwrap_or(now)),
            changed: self.changed,
        }
    }
}

struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    /// A text that ends with a zero.
    fn text(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|&byte| byte == 0)?;
        let (text, rest) = self.0.split_at(end);
        self.0 = &rest[1..];
        Some(text)
    }
}

fn time(seconds: u64, nanos: u32) -> Time {
    Time { seconds: seconds as i64, nanos: nanos.min(999_999_999) }
}

impl<'a> Ask<'a> {
    /// From what follows the header; of a write only what comes before the data. `None`: it makes no sense.
    pub(super) fn parse(header: &Header, body: &'a [u8]) -> Option<Self> {
        let mut body = Words(body);
        let body = &mut body;
        Some(match header.opcode {
            1 => Ask::Lookup { name: body.text()? },
            2 => Ask::Forget { times: body.u64()? },
            3 => Ask::Attributes,
            4 => Ask::Change(Self::change(body)?),
            5 => Ask::ReadLink,
            6 => Ask::MakeLink { name: body.text()?, target: body.text()? },
            8 => {
                let (mode, device, _) = (body.u32()?, body.u32()?, body.u64()?);
                Ask::MakeNode { name: body.text()?, mode, device }
            }
            9 => {
                let (mode, _) = (body.u32()?, body.u32()?);
                Ask::MakeFolder { name: body.text()?, mode }
            }
            10 => Ask::Remove { name: body.text()?, folder: false },
            11 => Ask::Remove { name: body.text()?, folder: true },
            12 => {
                let to = body.u64()?;
                Ask::Rename { name: body.text()?, to, new: body.text()?, flags: 0 }
            }
            13 => {
                let file = body.u64()?;
                Ask::Link { file, name: body.text()? }
            }
            14 => Ask::Open { flags: body.u32()? },
            15 => {
                let (_, offset, bytes) = (body.u64()?, body.u64()?, body.u32()?);
                Ask::Read { offset, bytes }
            }
            WRITE_OPCODE => {
                let (_, offset, bytes, how) = (body.u64()?, body.u64()?, body.u32()?, body.u32()?);
                let (_, flags) = (body.u64()?, body.u32()?);
                if header.length != HEAD_BYTES + bytes as usize {
                    return None;
                }
                /// FUSE_WRITE_CACHE: it comes from the page cache, whose pages have their places.
                const FROM_CACHE: u32 = 1;
                let cached = how & FROM_CACHE != 0;
                let append = flags & libc::O_APPEND as u32 != 0 && !cached;
                Ask::Write { offset, bytes, append, cached }
            }
            17 => Ask::Statistics,
            20 => Ask::Sync,
            26 => {
                let (major, minor) = (body.u32()?, body.u32()?);
                let (readahead, flags) = (body.u32()?, body.u32()?);
                // Only newer kernels tell more.
                let more = if flags & EXTENDED as u32 != 0 { body.u32()? } else { 0 };
                let flags = u64::from(flags) | u64::from(more) << 32;
                Ask::Init { minor: if major == MAJOR { minor } else { 0 }, readahead, flags }
            }
            27 => Ask::OpenFolder,
            28 => {
                let (_, offset, bytes) = (body.u64()?, body.u64()?, body.u32()?);
                Ask::Entries { offset, bytes }
            }
            35 => {
                let (flags, mode, _) = (body.u32()?, body.u32()?, body.u64()?);
                Ask::Create { name: body.text()?, mode, exclusive: flags & libc::O_EXCL as u32 != 0 }
            }
            // RELEASE, FLUSH, RELEASEDIR, DESTROY; FSYNCDIR, as names are in the server's memory and nowhere else.
            18 | 25 | 29 | 30 | 38 => Ask::Nothing,
            36 => Ask::Silent,
            FORGET_MANY_OPCODE => {
                let (count, _) = (body.u32()? as usize, body.u32()?);
                Ask::ForgetMany(body.0.get(..count.checked_mul(16)?)?)
            }
            43 => {
                let (_, offset, bytes, mode) = (body.u64()?, body.u64()?, body.u64()?, body.u32()?);
                Ask::Allocate { offset, bytes, mode }
            }
            45 => {
                let (to, flags, _) = (body.u64()?, body.u32()?, body.u32()?);
                Ask::Rename { name: body.text()?, to, new: body.text()?, flags }
            }
            _ => Ask::Unknown,
        })
    }

    fn change(body: &mut Words<'_>) -> Option<ChangeWanted> {
        let (valid, _, _, size, _) = (body.u32()?, body.u32()?, body.u64()?, body.u64()?, body.u64()?);
        let seconds = (body.u64()?, body.u64()?, body.u64()?);
        let nanos = (body.u32()?, body.u32()?, body.u32()?);
        let (mode, _, uid, gid) = (body.u32()?, body.u32()?, body.u32()?, body.u32()?);
        let has = |bit: u32| valid >> bit & 1 == 1;
        let stamp = |set: u32, now: u32, time: Time| has(set).then_some((!has(now)).then_some(time));
        Some(ChangeWanted {
            permissions: has(0).then_some(mode & 0o7777),
            uid: has(1).then_some(uid),
            gid: has(2).then_some(gid),
            size: has(3).then_some(size),
            accessed: stamp(4, 7, time(seconds.0, nanos.0)),
            modified: stamp(5, 8, time(seconds.1, nanos.1)),
            changed: has(10).then_some(time(seconds.2, nanos.2)),
        })
    }
}

/// Pairs of number and times of [`Ask::ForgetMany`].
pub(super) fn forgotten(bytes: &[u8]) -> impl Iterator<Item = (u64, u64)> + '_ {
    bytes.chunks_exact(16).filter_map(|pair| {
        let mut words = Words(pair);
        Some((words.u64()?, words.u64()?))
    })
}

/// What a kernel does with the pages of a file that was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// It forgets them first.
    Fresh = 0,
    /// It does without, except for mappings.
    Direct = 1,
    /// It may use what it has.
    Keep = 2,
}

/// How long a kernel keeps what it was told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keeping {
    /// Names, in seconds.
    pub(super) names: u64,
    /// Attributes, in seconds.
    pub(super) attributes: u64,
}

/// An answer without its data.
#[derive(Debug)]
pub(super) struct Answer {
    bytes: Vec<u8>,
}

impl Answer {
    /// One that says only that it was done.
    pub(super) fn done(unique: u64) -> Self {
        let mut bytes = Vec::with_capacity(OUT_HEADER_BYTES + 128);
        bytes.extend([0; 8]);
        bytes.extend(unique.to_ne_bytes());
        Self { bytes }
    }

    pub(super) fn error(unique: u64, error: i32) -> Self {
        let mut answer = Self::done(unique);
        answer.bytes[4..8].copy_from_slice(&(-error).to_ne_bytes());
        answer
    }

    /// FUSE_NOTIFY_INVAL_INODE.
    pub(super) const INVALIDATE_INODE: i32 = 2;

    /// Has the kernel drop what it has cached of a file's bytes and attributes.
    pub(super) fn stale(number: u64) -> Self {
        // No request has number 0; the code is where an error would be, and positive.
        Self::error(0, -Self::INVALIDATE_INODE).u64(number).u64(0).u64(0)
    }

    /// What this file system can: requests of at most `bytes_max` bytes. `alone`: nobody else changes files.
    pub(super) fn init(unique: u64, readahead: u32, flags: u64, bytes_max: u32, alone: bool) -> Self {
        /// ASYNC_READ, BIG_WRITES, ASYNC_DIO, PARALLEL_DIROPS, MAX_PAGES, DIRECT_IO_ALLOW_MMAP.
        const ALWAYS: u64 = 1 | 1 << 5 | 1 << 15 | 1 << 18 | 1 << 22 | EXTENDED | 1 << 36;
        const AUTO_INVAL_DATA: u64 = 1 << 12;
        const WRITEBACK_CACHE: u64 = 1 << 16;
        const BACKGROUND_MAX: u16 = 32;
        let wanted = ALWAYS | if alone { WRITEBACK_CACHE } else { AUTO_INVAL_DATA };
        let pages = bytes_max.div_ceil(4096).min(u16::MAX.into());
        let mut answer = Self::done(unique)
            .u32(MAJOR)
            .u32(MINOR)
            .u32(readahead.max(bytes_max))
            .u32((flags & wanted) as u32);
        answer =
            answer.u16(BACKGROUND_MAX).u16(BACKGROUND_MAX).u32(bytes_max).u32(1).u16(pages as u16).u16(0);
        answer.u32(((flags & wanted) >> 32) as u32).zeros(28)
    }

    fn attribute_words(self, of: &Attributes) -> Self {
        let type_bits = match of.kind {
            Kind::Folder => libc::S_IFDIR,
            Kind::File | Kind::Segment(_) => libc::S_IFREG,
            Kind::Link => libc::S_IFLNK,
            Kind::Special(bits) => bits,
        };
        let mut answer = self.u64(of.number).u64(of.size).u64(of.blocks * 8);
        for time in [of.accessed, of.modified, of.changed] {
            answer = answer.u64(time.seconds as u64);
        }
        for time in [of.accessed, of.modified, of.changed] {
            answer = answer.u32(time.nanos);
        }
        answer = answer.u32(type_bits | of.permissions).u32(of.links).u32(of.uid).u32(of.gid);
        answer.u32(of.device).u32(4096).u32(0)
    }

    pub(super) fn attributes(unique: u64, keeping: Keeping, of: &Attributes) -> Self {
        Self::done(unique).u64(keeping.attributes).u32(0).u32(0).attribute_words(of)
    }

    pub(super) fn entry(unique: u64, keeping: Keeping, of: &Attributes) -> Self {
        let answer = Self::done(unique).u64(of.number).u64(0).u64(keeping.names).u64(keeping.attributes);
        answer.u32(0).u32(0).attribute_words(of)
    }

    /// An open file.
    pub(super) fn open(self, how: Opened) -> Self {
        self.u64(0).u32(how as u32).u32(0)
    }

    pub(super) fn written(unique: u64, bytes: u32) -> Self {
        Self::done(unique).u32(bytes).u32(0)
    }

    pub(super) fn statistics(unique: u64, room: &Room) -> Self {
        let answer = Self::done(unique).u64(room.blocks).u64(room.free).u64(room.free).u64(room.files);
        answer.u64(room.files_free).u32(4096).u32(255).u32(4096).zeros(28)
    }

    pub(super) fn bytes_of(unique: u64, bytes: &[u8]) -> Self {
        Self::done(unique).put(bytes)
    }

    /// Appends an entry of a folder, if the answer then has at most `most` bytes of them.
    pub(super) fn add_entry(&mut self, entry: &Entry<'_>, most: usize) -> bool {
        let length = (24 + entry.name.len()).next_multiple_of(8);
        if self.bytes.len() - OUT_HEADER_BYTES + length > most {
            return false;
        }
        let type_bits = match entry.kind {
            Kind::Folder => libc::S_IFDIR,
            Kind::File | Kind::Segment(_) => libc::S_IFREG,
            Kind::Link => libc::S_IFLNK,
            Kind::Special(bits) => bits,
        };
        self.bytes.extend(entry.number.to_ne_bytes());
        self.bytes.extend(entry.cookie.to_ne_bytes());
        self.bytes.extend((entry.name.len() as u32).to_ne_bytes());
        self.bytes.extend((type_bits >> 12).to_ne_bytes());
        self.bytes.extend(entry.name);
        self.bytes.resize(self.bytes.len() + length - 24 - entry.name.len(), 0);
        true
    }

    fn u16(self, value: u16) -> Self {
        self.put(&value.to_ne_bytes())
    }

    fn u32(self, value: u32) -> Self {
        self.put(&value.to_ne_bytes())
    }

    fn u64(self, value: u64) -> Self {
        self.put(&value.to_ne_bytes())
    }

    fn zeros(mut self, count: usize) -> Self {
        self.bytes.resize(self.bytes.len() + count, 0);
        self
    }

    fn put(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend(bytes);
        self
    }

    /// Its bytes, when `data` more follow.
    pub(super) fn finish(mut self, data: usize) -> Vec<u8> {
        let all = (self.bytes.len() + data) as u32;
        self.bytes[..4].copy_from_slice(&all.to_ne_bytes());
        self.bytes
    }
}

/// Length, error and number of an answer: what begins it.
pub(super) fn answer_header(bytes: &[u8; OUT_HEADER_BYTES]) -> (usize, i32, u64) {
    let mut words = Words(bytes);
    let (length, error, unique) = (words.u32(), words.u32(), words.u64());
    (length.unwrap_or(0) as usize, error.unwrap_or(0) as i32, unique.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use netvm_core::sim::Random;

    fn request(opcode: u32, body: &[u8]) -> ([u8; HEAD_BYTES], Vec<u8>) {
        let mut bytes = vec![0; IN_HEADER_BYTES];
        bytes.extend(body);
        let length = bytes.len() as u32;
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes[8..16].copy_from_slice(&7u64.to_ne_bytes());
        bytes[16..24].copy_from_slice(&9u64.to_ne_bytes());
        let mut head = [0; HEAD_BYTES];
        let part = bytes.len().min(HEAD_BYTES);
        head[..part].copy_from_slice(&bytes[..part]);
        (head, bytes[IN_HEADER_BYTES..].to_vec())
    }

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn requests() {
        let ask = |opcode: u32, body: &[u8]| {
            let (head, body) = request(opcode, body);
            let header = Header::parse(&head);
            assert_eq!((header.unique, header.node), (7, 9));
            format!("{:?}", Ask::parse(&header, &body))
        };
        assert_eq!(ask(1, b"name\0"), format!("{:?}", Some(Ask::Lookup { name: b"name" })));
        assert_eq!(ask(1, b"name"), "None");
        assert_eq!(ask(6, b"name\0"), "None");
        assert_eq!(
            ask(6, b"name\0to\0"),
            format!("{:?}", Some(Ask::MakeLink { name: b"name", target: b"to" }))
        );
        let rename = [&words(&[5])[..], b"a\0b\0"].concat();
        assert_eq!(
            ask(12, &rename),
            format!("{:?}", Some(Ask::Rename { name: b"a", to: 5, new: b"b", flags: 0 }))
        );
        assert_eq!(
            ask(15, &words(&[0, 4096, 512])),
            format!("{:?}", Some(Ask::Read { offset: 4096, bytes: 512 }))
        );
        // Its data is not there.
        assert_eq!(ask(16, &words(&[0, 0, 1, 0, 0])), "None");
        assert_eq!(
            ask(16, &words(&[0, 8, 0, 0, 0])),
            format!("{:?}", Some(Ask::Write { offset: 8, bytes: 0, append: false, cached: false }))
        );
        assert_eq!(ask(42, &words(&[u64::from(u32::MAX), 1, 1])), "None");
        assert_eq!(ask(4242, &[]), "Some(Unknown)");
        // Of a file, and of a folder, which has nothing on the volume.
        assert_eq!(
            (&ask(20, &words(&[0, 0]))[..], &ask(30, &words(&[0, 0]))[..]),
            ("Some(Sync)", "Some(Nothing)")
        );
        let two = words(&[1, 2, 3, 4]);
        assert_eq!(forgotten(&two).collect::<Vec<_>>(), [(1, 2), (3, 4)]);
    }

    #[test]
    fn random_requests_are_only_refused() {
        let mut random = Random::new(5);
        for _ in 0..100_000 {
            let body: Vec<u8> = (0..random.below(130)).map(|_| (random.draw() as u8) & 0x83).collect();
            let (head, body) = request(random.below(56) as u32, &body);
            let header = Header::parse(&head);
            let _ = Ask::parse(&header, &body);
        }
        let head = [0xFF; HEAD_BYTES];
        assert!(!Header::parse(&head).is_plausible(1 << 20));
    }

    #[test]
    fn answers_have_the_kernels_sizes() {
        let time = Time::default();
        let of = Attributes {
            number: 1,
            kind: Kind::File,
            size: 1,
            blocks: 1,
            permissions: 0o644,
            links: 1,
            uid: 0,
            gid: 0,
            device: 0,
            accessed: time,
            modified: time,
            changed: time,
        };
        let room = Room { blocks: 1, free: 1, files: 1, files_free: 1 };
        let keeping = Keeping { names: 0, attributes: 0 };
        let lengths = [
            (Answer::done(1), 16),
            (Answer::error(1, 5), 16),
            (Answer::init(1, 0, u64::MAX, 1 << 20, true), 16 + 64),
            (Answer::attributes(1, keeping, &of), 16 + 104),
            (Answer::entry(1, keeping, &of), 16 + 128),
            (Answer::entry(1, keeping, &of).open(Opened::Keep), 16 + 128 + 16),
            (Answer::written(1, 4096), 16 + 8),
            (Answer::statistics(1, &room), 16 + 80),
            (Answer::stale(1), 16 + 24),
        ];
        for (answer, length) in lengths {
            let bytes = answer.finish(100);
            assert_eq!(bytes.len(), length);
            let header = bytes.first_chunk().map(answer_header);
            assert_eq!(header.map(|(all, ..)| all), Some(length + 100));
        }
    }

    #[test]
    fn entries_fill_what_was_asked_for() {
        let mut answer = Answer::done(1);
        let entry = Entry { cookie: 3, number: 4, kind: Kind::File, name: b"123456789" };
        assert!(answer.add_entry(&entry, 80) && answer.add_entry(&entry, 80));
        assert!(!answer.add_entry(&entry, 80));
        assert_eq!(answer.finish(0).len(), 16 + 80);
    }
}
