//! The default framing of a transfer as bytes, and what may follow what: docs/design/transfer.md. Pure: no I/O.

use std::fmt;

use super::pieces::Piece;

/// Bytes in front of each payload.
pub(super) const HEADER_BYTES: usize = 8;
/// Most bytes of one payload: an entry with the longest name.
pub(super) const PAYLOAD_BYTES_MAX: usize = ENTRY_BYTES + NAME_BYTES_MAX;
/// Most bytes of a file behind one header.
pub(super) const CHUNK_BYTES: u64 = 4 << 20;
/// Most bytes of a path.
pub(super) const NAME_BYTES_MAX: usize = 4096;
/// Most folders above a file.
const DEPTH_MAX: usize = 256;
/// Most entries of one transfer.
pub(super) const ENTRIES_MAX: usize = 1 << 20;
/// Most bytes of all their names.
pub(super) const NAMES_BYTES_MAX: usize = 128 << 20;
/// Largest file: offsets of the operating system are signed.
pub(super) const FILE_BYTES_MAX: u64 = i64::MAX as u64;
const ENTRY_BYTES: usize = 24;
const TEXT_BYTES_MAX: usize = 1024;

/// Most connections that carry bytes of one file.
pub(super) const LANES_MAX: usize = 16;

/// What a peer has done wrong.
pub(super) type Wrong = &'static str;

/// A folder or file that is to be at the receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub folder: bool,
    /// Permissions: nine bits.
    pub mode: u16,
    /// Time of the last change: seconds since 1970, and nanoseconds.
    pub changed: (i64, u32),
    pub bytes: u64,
    /// Its path below the target folder: see [`check_name`].
    pub name: Vec<u8>,
}

/// What the receiver wants of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// All but the first `have` bytes, if these have this digest; all otherwise.
    Send { have: u64, digest: u64 },
    /// Something else has its name and is kept.
    Keep,
    /// A file of the same length and time is there. Nothing, if it has this digest; otherwise all if it may be replaced.
    There { digest: u64, replace: bool },
}

/// How a transfer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub sent: u64,
    pub there: u64,
    pub kept: u64,
}

/// A header with its payload; the bytes behind [`Frame::Data`] are not in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Entry(Entry),
    /// That were all; whether digests of what is sent follow.
    Listed {
        entries: u64,
        check: bool,
    },
    Plan(Plan),
    File {
        index: u64,
        from: u64,
    },
    /// Bytes follow; or, of a [`Frame::Remote`] file, are about to be written.
    Data {
        offset: u64,
        bytes: u64,
    },
    End {
        digest: u64,
    },
    Done(Totals),
    Failed(String),
    /// It takes a while.
    Working,
    /// As `File`, but its bytes do not come over this connection.
    Remote {
        index: u64,
        from: u64,
    },
    /// Who has this key may write into it.
    Into {
        key: [u8; 16],
    },
    /// The first piece that was announced, up to `end`, may be written,
    Ready {
        end: u64,
    },
    /// and has been.
    Wrote {
        end: u64,
    },
    /// So many more connections come, each of which says
    Lanes {
        count: u64,
    },
    /// what the receiver answers to that.
    Join {
        token: [u8; 16],
    },
    /// As `File`, but its bytes come over those.
    Striped {
        index: u64,
        from: u64,
    },
    /// Bytes of it follow, and [`Frame::End`] with their digest.
    Piece(Piece),
}

impl Frame {
    /// Appends header and payload.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([0; HEADER_BYTES]);
        let words = |out: &mut Vec<u8>, words: &[u64]| {
            words.iter().for_each(|word| out.extend(word.to_le_bytes()));
        };
        let kind = match self {
            Self::Entry(entry) => {
                out.extend([u8::from(entry.folder), 0]);
                out.extend(entry.mode.to_le_bytes());
                out.extend(entry.changed.1.to_le_bytes());
                out.extend(entry.changed.0.to_le_bytes());
                out.extend(entry.bytes.to_le_bytes());
                out.extend(&entry.name);
                1
            }
            Self::Listed { entries, check } => {
                words(out, &[*entries, u64::from(*check)]);
                2
            }
            Self::Plan(plan) => {
                words(
                    out,
                    &match *plan {
                        Plan::Send { have, digest } => [0, have, digest],
                        Plan::Keep => [1, 0, 0],
                        Plan::There { digest, replace } => [2, u64::from(replace), digest],
                    },
                );
                3
            }
            Self::File { index, from } => {
                words(out, &[*index, *from]);
                4
            }
            Self::Data { offset, bytes } => {
                words(out, &[*offset, *bytes]);
                5
            }
            Self::End { digest } => {
                words(out, &[*digest]);
                6
            }
            Self::Done(totals) => {
                words(out, &[totals.sent, totals.there, totals.kept]);
                7
            }
            Self::Failed(text) => {
                out.extend(shortened(text).as_bytes());
                8
            }
            Self::Working => 9,
            Self::Remote { index, from } => {
                words(out, &[*index, *from]);
                10
            }
            Self::Into { key } => {
                out.extend(key);
                11
            }
            Self::Ready { end } => {
                words(out, &[*end]);
                12
            }
            Self::Wrote { end } => {
                words(out, &[*end]);
                13
            }
            Self::Lanes { count } => {
                words(out, &[*count]);
                14
            }
            Self::Join { token } => {
                out.extend(token);
                15
            }
            Self::Striped { index, from } => {
                words(out, &[*index, *from]);
                16
            }
            Self::Piece(piece) => {
                words(out, &[piece.after, piece.offset, piece.bytes]);
                17
            }
        };
        let bytes = (out.len() - start - HEADER_BYTES) as u32;
        out[start] = kind;
        out[start + 4..start + 8].copy_from_slice(&bytes.to_le_bytes());
    }

    /// Bytes of the payload that a header announces.
    ///
    /// # Errors
    /// More than there may be.
    pub fn payload_bytes(header: &[u8; HEADER_BYTES]) -> Result<usize, Wrong> {
        let [kind, a, b, c, length @ ..] = *header;
        let bytes = u32::from_le_bytes(length) as usize;
        if !(1..=17).contains(&kind) || [a, b, c] != [0; 3] {
            return Err("a message of an unknown kind");
        }
        if bytes > PAYLOAD_BYTES_MAX { Err("a message that is too long") } else { Ok(bytes) }
    }

    /// Reads a payload.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(kind: u8, payload: &[u8]) -> Result<Self, Wrong> {
        let words = |count: usize| {
            let fits = payload.len() == count * 8;
            let word = |index: usize| u64_at(payload, index * 8);
            fits.then_some([word(0), word(1), word(2)]).ok_or("a message of a wrong length")
        };
        Ok(match kind {
            1 => Self::Entry(Entry::decode(payload)?),
            2 => match words(2)? {
                [entries, check @ 0..=1, _] => Self::Listed { entries, check: check == 1 },
                _ => return Err("unknown options"),
            },
            3 => Self::Plan(match words(3)? {
                [0, have, digest] => Plan::Send { have, digest },
                [1, ..] => Plan::Keep,
                [2, replace @ 0..=1, digest] => Plan::There { digest, replace: replace == 1 },
                _ => return Err("an unknown plan"),
            }),
            4 => words(2).map(|[index, from, _]| Self::File { index, from })?,
            5 => words(2).map(|[offset, bytes, _]| Self::Data { offset, bytes })?,
            6 => words(1).map(|[digest, ..]| Self::End { digest })?,
            7 => words(3).map(|[sent, there, kept]| Self::Done(Totals { sent, there, kept }))?,
            8 => {
                let text = &payload[..payload.len().min(TEXT_BYTES_MAX)];
                Self::Failed(printable(text))
            }
            9 => words(0).map(|_| Self::Working)?,
            10 => words(2).map(|[index, from, _]| Self::Remote { index, from })?,
            11 => Self::Into { key: payload.try_into().map_err(|_| "a message of a wrong length")? },
            12 => words(1).map(|[end, ..]| Self::Ready { end })?,
            13 => words(1).map(|[end, ..]| Self::Wrote { end })?,
            14 => match words(1)? {
                [count, ..] if (1..=LANES_MAX as u64).contains(&count) => Self::Lanes { count },
                _ => return Err("too many connections"),
            },
            15 => Self::Join { token: payload.try_into().map_err(|_| "a message of a wrong length")? },
            16 => words(2).map(|[index, from, _]| Self::Striped { index, from })?,
            17 => words(3).map(|[after, offset, bytes]| Self::Piece(Piece { after, offset, bytes }))?,
            _ => return Err("a message of an unknown kind"),
        })
    }
}

/// As much of a text as a message takes.
fn shortened(text: &str) -> &str {
    let end = (0..=text.len().min(TEXT_BYTES_MAX)).rev().find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |word| u64::from_le_bytes(std::array::from_fn(|index| word[index])))
}

impl Entry {
    fn decode(payload: &[u8]) -> Result<Self, Wrong> {
        let Some((&[kind @ 0..=1, 0, low, high, a, b, c, d], _)) = payload.split_first_chunk() else {
            return Err("an entry of an unknown kind");
        };
        if payload.len() < ENTRY_BYTES {
            return Err("a message of a wrong length");
        }
        let entry = Self {
            folder: kind == 1,
            mode: u16::from_le_bytes([low, high]),
            changed: (u64_at(payload, 8) as i64, u32::from_le_bytes([a, b, c, d])),
            bytes: u64_at(payload, 16),
            name: payload[ENTRY_BYTES..].to_vec(),
        };
        if entry.mode > 0o777 {
            return Err("permissions that may not be sent");
        }
        if entry.changed.1 >= 1_000_000_000 {
            return Err("a time that is none");
        }
        if entry.bytes > if entry.folder { 0 } else { FILE_BYTES_MAX } {
            return Err("a length that is none");
        }
        check_name(&entry.name)?;
        Ok(entry)
    }
}

/// A path is relative, and names folders and a file below where it starts and nothing else.
pub(super) fn check_name(name: &[u8]) -> Result<(), Wrong> {
    if name.len() > NAME_BYTES_MAX {
        return Err("a name that is too long");
    }
    for (depth, part) in name.split(|&byte| byte == b'/').enumerate() {
        if depth > DEPTH_MAX {
            return Err("a name with too many folders");
        }
        if part.is_empty() || part.len() > 255 {
            return Err("a name that is absolute, empty or too long");
        }
        if part == b"." || part == b".." || part.contains(&0) {
            return Err("a name that leads out of the target folder");
        }
        if is_part_name(part) {
            return Err("a name of netvm's own");
        }
    }
    Ok(())
}

/// The name, in the same folder, under which a file is written until it is complete.
pub(super) fn part_name(name: &[u8]) -> String {
    format!(".netvm-{:016x}.part", xxhash_rust::xxh3::xxh3_64(name))
}

/// Whether it may be such a name.
pub(super) fn is_part_name(name: &[u8]) -> bool {
    name.starts_with(b".netvm-") && name.ends_with(b".part")
}

/// A peer's text, or a name, for a terminal.
pub(super) fn printable(text: &[u8]) -> String {
    let turns = |char| matches!(char, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut out = String::new();
    for char in String::from_utf8_lossy(text).chars() {
        match char.is_control() || turns(char) {
            true => out.extend(char.escape_default()),
            false => out.push(char),
        }
    }
    out
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable(&self.name))
    }
}

/// The receiver's list: bounded however much a sender sends.
#[derive(Debug, Default)]
pub(super) struct List {
    pub entries: Vec<Entry>,
    names_bytes: usize,
}

impl List {
    pub fn add(&mut self, entry: Entry) -> Result<(), Wrong> {
        self.names_bytes += entry.name.len();
        if self.entries.len() == ENTRIES_MAX || self.names_bytes > NAMES_BYTES_MAX {
            return Err("too many files for one transfer");
        }
        self.entries.push(entry);
        Ok(())
    }
}

/// Where in the list a receiver is, and which bytes may come next.
#[derive(Debug, Default)]
pub(super) struct Course {
    /// The next file has at least this index.
    next: usize,
    /// Of the file that is under way: its length, and the end of what has come.
    file: Option<(u64, u64)>,
}

impl Course {
    /// A file begins behind its first `from` bytes.
    pub fn file(
        &mut self,
        plans: &[Option<Plan>],
        list: &List,
        index: u64,
        from: u64,
    ) -> Result<usize, Wrong> {
        let at = usize::try_from(index).map_err(|_| "a file that is not in its list")?;
        let (Some(Some(plan)), Some(entry)) = (plans.get(at), list.entries.get(at)) else {
            return Err("a file that is not in its list");
        };
        if self.file.is_some() || at < self.next {
            return Err("files out of order");
        }
        let have = match *plan {
            Plan::Send { have, .. } => have,
            Plan::There { replace: true, .. } => 0,
            Plan::There { .. } | Plan::Keep => return Err("a file that nobody wanted"),
        };
        if from != 0 && from != have {
            return Err("a file from where nobody wanted it");
        }
        self.next = at + 1;
        self.file = Some((entry.bytes, from));
        Ok(at)
    }

    /// Bytes of it come.
    pub fn data(&mut self, offset: u64, bytes: u64) -> Result<(), Wrong> {
        let Some((length, position)) = &mut self.file else { return Err("bytes of no file") };
        let end = offset.checked_add(bytes).filter(|&end| end <= *length);
        match end {
            Some(end) if offset >= *position && (1..=CHUNK_BYTES).contains(&bytes) => *position = end,
            _ => return Err("bytes that are not where they should be"),
        }
        Ok(())
    }

    /// It is complete; returns its length.
    pub fn end(&mut self) -> Result<u64, Wrong> {
        self.file.take().map(|(length, _)| length).ok_or("the end of no file")
    }

    /// Whether no file is under way.
    pub fn is_between(&self) -> bool {
        self.file.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &[u8], bytes: u64) -> Entry {
        Entry { folder: false, mode: 0o640, changed: (-7, 999_999_999), bytes, name: name.to_vec() }
    }

    fn bytes_of(frame: &Frame) -> Vec<u8> {
        let mut out = Vec::new();
        frame.encode(&mut out);
        out
    }

    fn decoded(bytes: &[u8]) -> Result<Frame, Wrong> {
        let (header, payload) = bytes.split_first_chunk().unwrap();
        assert_eq!(Frame::payload_bytes(header), Ok(payload.len()));
        Frame::decode(header[0], payload)
    }

    #[test]
    fn frames_are_read_as_written() {
        for frame in [
            Frame::Entry(entry(b"a/b", 1 << 40)),
            Frame::Entry(Entry { folder: true, ..entry(&[b'x'; 255], 0) }),
            Frame::Listed { entries: 7, check: true },
            Frame::Plan(Plan::Send { have: 5, digest: u64::MAX }),
            Frame::Plan(Plan::Keep),
            Frame::Plan(Plan::There { digest: 9, replace: true }),
            Frame::File { index: 3, from: 4 },
            Frame::Data { offset: 1 << 60, bytes: 77 },
            Frame::End { digest: 1 },
            Frame::Done(Totals { sent: 1, there: 2, kept: 3 }),
            Frame::Failed("no room: ü".to_owned()),
            Frame::Working,
            Frame::Remote { index: 3, from: 4 },
            Frame::Into { key: std::array::from_fn(|index| index as u8) },
            Frame::Ready { end: 1 << 60 },
            Frame::Wrote { end: 7 },
            Frame::Lanes { count: 16 },
            Frame::Join { token: [7; 16] },
            Frame::Striped { index: 3, from: 4 },
            Frame::Piece(Piece { after: 1, offset: 1 << 60, bytes: 3 }),
        ] {
            let bytes = bytes_of(&frame);
            assert_eq!(decoded(&bytes), Ok(frame));
            // One byte more or less is another message, or none.
            let (header, payload) = bytes.split_first_chunk::<HEADER_BYTES>().unwrap();
            if !matches!(header[0], 1 | 8) {
                assert!(Frame::decode(header[0], &[payload, &[0]].concat()).is_err());
                assert!(payload.is_empty() || Frame::decode(header[0], &payload[1..]).is_err());
            }
        }
        // Golden bytes: other versions must read them.
        assert_eq!(
            bytes_of(&Frame::Entry(entry(b"f", 258))),
            b"\x01\0\0\0\x19\0\0\0\0\0\xa0\x01\xff\xc9\x9a\x3b\xf9\xff\xff\xff\xff\xff\xff\xff\x02\x01\0\0\0\0\0\0f"
        );
        let long = Frame::Failed("ü".repeat(4000));
        assert!(bytes_of(&long).len() <= HEADER_BYTES + TEXT_BYTES_MAX);
    }

    #[test]
    fn names_that_lead_out_are_refused() {
        for name in
            [&b""[..], b"/", b"/etc/passwd", b"..", b"a/../b", b"a/..", b"./a", b"a//b", b"a/", b"a\0b"]
        {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        assert!(check_name(&[b'x'; 256]).is_err());
        assert!(check_name(&b"a/".repeat(300)[..599]).is_err());
        assert!(check_name(part_name(b"x").as_bytes()).is_err());
        for name in [&b"a"[..], b"..a", b"a/b/...", b".x", b"\xff\n"] {
            assert_eq!(check_name(name), Ok(()), "{name:?}");
        }
        let mut bytes = bytes_of(&Frame::Entry(entry(b"../x", 0)));
        assert!(decoded(&bytes).is_err());
        // Neither may permissions make a file one of set-user-ID.
        bytes = bytes_of(&Frame::Entry(Entry { mode: 0o4755, ..entry(b"x", 0) }));
        assert!(decoded(&bytes).is_err());
    }

    #[test]
    fn texts_of_peers_do_not_drive_terminals() {
        let text = printable(b"a\x1b[2J\r\n\xff\xe2\x80\xae");
        assert!(text.starts_with("a\\u{1b}[2J\\r\\n") && !text.chars().any(char::is_control), "{text}");
        assert!(!text.contains('\u{202e}'));
    }

    #[test]
    fn any_bytes_are_read_or_refused() {
        let mut state = 1u64;
        let mut next = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            state >> 33
        };
        let mut good = 0;
        for _ in 0..200_000 {
            let bytes: Vec<u8> = (0..next() % 48).map(|_| (next() % 4) as u8).collect();
            let frame = Frame::decode((next() % 20) as u8, &bytes);
            if let Ok(frame) = frame {
                good += 1;
                assert_eq!(decoded(&bytes_of(&frame)).as_ref(), Ok(&frame));
            }
            let header = std::array::from_fn(|_| next() as u8);
            assert!(!matches!(Frame::payload_bytes(&header), Ok(bytes) if bytes > PAYLOAD_BYTES_MAX));
        }
        assert!(good > 1000, "{good}");
    }

    #[test]
    fn only_what_was_asked_for_may_come() {
        let mut list = List::default();
        for _ in 0..4 {
            list.add(entry(b"x", 100)).unwrap();
        }
        let plans = [
            Some(Plan::Send { have: 40, digest: 0 }),
            Some(Plan::Keep),
            Some(Plan::There { digest: 0, replace: false }),
            None,
        ];
        let mut course = Course::default();
        let refused = |course: &mut Course, index, from| course.file(&plans, &list, index, from).is_err();
        assert!(course.data(0, 1).is_err() && course.end().is_err());
        for (index, from) in [(0, 1), (0, 100), (1, 0), (2, 0), (3, 0), (4, 0), (u64::MAX, 0)] {
            assert!(refused(&mut course, index, from), "{index} {from}");
        }
        assert_eq!(course.file(&plans, &list, 0, 40), Ok(0));
        assert!(refused(&mut course, 0, 0), "it is under way");
        for (offset, bytes) in [(39, 1), (40, 0), (40, 61), (100, 1), (u64::MAX, 1), (40, u64::MAX)] {
            assert!(course.data(offset, bytes).is_err(), "{offset} {bytes}");
        }
        assert_eq!((course.data(50, 10), course.data(60, 40)), (Ok(()), Ok(())));
        assert!(course.data(50, 10).is_err(), "twice");
        assert_eq!((course.end(), course.is_between()), (Ok(100), true));
        assert!(refused(&mut course, 0, 0), "twice");
    }

    #[test]
    fn lists_are_bounded() {
        let mut list = List::default();
        let long = entry(&b"x/".repeat(100)[..199], 0);
        let fit = NAMES_BYTES_MAX / long.name.len();
        for _ in 0..fit {
            list.add(long.clone()).unwrap();
        }
        assert!(list.add(long).is_err());
    }
}
