//! Reads that are asked for with single datagrams: what is in them, which answers belong to which read, and when to give up. docs/design/datagrams.md has the whole.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::wire::BodyReader;

mod alone;
mod trust;

pub use alone::{Alone, Begun, Ended, Report};
use trust::Trust;

/// Bytes of a request,
pub const REQUEST_BYTES: usize = 40;
/// and of an answer's header, which what was read follows.
pub const ANSWER_BYTES: usize = 24;
/// Slabs are in maps by units of so many bytes.
pub const UNIT_BYTES: u64 = 2 << 20;
/// What is asked for at once. The answer is one datagram,
pub const PAGE_BYTES: u32 = 4096;
/// or, where packets are smaller, three: of so many bytes, and what is left for the last.
pub const PART_BYTES: u32 = 1368;
/// Of a page.
pub const PARTS: u32 = PAGE_BYTES.div_ceil(PART_BYTES);
/// Bytes of the packet with an answer of so many bytes, but for the link's own header: IPv6 or IPv4, UDP, header, bytes.
pub const fn packet_bytes(is_v6: bool, bytes: u32) -> u32 {
    (if is_v6 { 40 } else { 20 }) + 8 + ANSWER_BYTES as u32 + bytes
}
/// Most bytes of one read.
pub const READ_BYTES_MAX: u32 = 2 * PAGE_BYTES;
/// Most reads on their way.
pub const READS_MAX: usize = 32;

/// What a datagram is, by its first four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A request.
    Read,
    /// The bytes, from the lender's kernel,
    ByKernel,
    /// from its process.
    ByProcess,
    /// No bytes: the session is to be asked.
    Refused,
}

impl Kind {
    /// As it is on the wire, little endian.
    pub const fn magic(self) -> u32 {
        match self {
            Self::Read => u32::from_le_bytes(*b"nvR1"),
            Self::ByKernel => u32::from_le_bytes(*b"nvK1"),
            Self::ByProcess => u32::from_le_bytes(*b"nvP1"),
            Self::Refused => u32::from_le_bytes(*b"nvN1"),
        }
    }

    fn from_magic(magic: u32) -> Option<Self> {
        [Self::Read, Self::ByKernel, Self::ByProcess, Self::Refused]
            .into_iter()
            .find(|kind| kind.magic() == magic)
    }
}

/// The header of all datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// Of which slab,
    pub slab: u32,
    /// from which byte on: in a request that of a page;
    pub offset: u32,
    /// how many: in a request those of the longest answer, [`PAGE_BYTES`] or [`PART_BYTES`].
    pub bytes: u32,
    /// By which an answer is known.
    pub sequence: u64,
}

/// Asks for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// For which.
    pub header: Header,
    /// By which the lender knows the lease.
    pub key: [u8; 16],
}

impl Header {
    /// As it is sent.
    pub fn encode(&self) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        let words = [self.kind.magic(), self.slab, self.offset, self.bytes];
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes[16..].copy_from_slice(&self.sequence.to_le_bytes());
        bytes
    }

    /// From the beginning of a datagram.
    pub fn decode(datagram: &[u8]) -> Option<Self> {
        let mut body = BodyReader(datagram.get(..ANSWER_BYTES)?);
        Some(Self {
            kind: Kind::from_magic(body.u32()?)?,
            slab: body.u32()?,
            offset: body.u32()?,
            bytes: body.u32()?,
            sequence: body.u64()?,
        })
    }

    /// The headers of all answers to this request.
    pub fn answers(self, kind: Kind) -> impl Iterator<Item = Self> {
        let parts = PAGE_BYTES.div_ceil(self.bytes.max(1)).min(PARTS);
        (0..parts).map(move |part| {
            let at = part * self.bytes;
            let bytes = self.bytes.min(PAGE_BYTES - at);
            Self { kind, offset: self.offset.wrapping_add(at), bytes, ..self }
        })
    }
}

impl Request {
    /// As it is sent.
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..ANSWER_BYTES].copy_from_slice(&self.header.encode());
        bytes[ANSWER_BYTES..].copy_from_slice(&self.key);
        bytes
    }

    /// Of a whole datagram, if it is one that these rules allow.
    pub fn decode(datagram: &[u8]) -> Option<Self> {
        let (header, key) = (Header::decode(datagram)?, datagram.get(ANSWER_BYTES..)?.try_into().ok()?);
        let is_one = header.kind == Kind::Read
            && (header.bytes == PAGE_BYTES || header.bytes == PART_BYTES)
            && header.offset.is_multiple_of(PAGE_BYTES);
        is_one.then_some(Self { header, key })
    }
}

/// A read on its way.
#[derive(Clone, Copy, Debug)]
pub struct Read<T> {
    /// Whose it is.
    pub token: u64,
    /// Of which slab,
    pub slab: u32,
    /// from which byte on,
    pub offset: u32,
    /// how many.
    pub bytes: u32,
    /// Where they are to go.
    pub locals: T,
    /// Of its first page.
    sequence: u64,
    /// A bit for each answer that has not come, [`PARTS`] for each page.
    missing: u8,
    asked_ns: u64,
}

impl<T> Read<T> {
    /// Which of its pages this sequence asked for.
    fn page_of(&self, sequence: u64) -> Option<u32> {
        let page = u32::try_from(sequence.wrapping_sub(self.sequence)).ok()?;
        (page < self.bytes / PAGE_BYTES).then_some(page)
    }

    /// What to send for it.
    fn requests(&self, key: [u8; 16], part_bytes: u32) -> impl Iterator<Item = Request> + use<T> {
        let (slab, first, sequence) = (self.slab, self.offset, self.sequence);
        (0..self.bytes / PAGE_BYTES).map(move |page| {
            let (offset, sequence) = (first + page * PAGE_BYTES, sequence.wrapping_add(page.into()));
            Request { header: Header { kind: Kind::Read, slab, offset, bytes: part_bytes, sequence }, key }
        })
    }

    /// What a datagram of so many bytes is, with this header, whose sequence is that of its page number `page`; of the answers, each at most `part_bytes` long.
    fn judge(&self, page: u32, part_bytes: u32, header: &Header, datagram_bytes: usize) -> Answer {
        let at = header.offset.wrapping_sub(self.offset + page * PAGE_BYTES);
        let last = PAGE_BYTES.div_ceil(part_bytes) - 1;
        let place = Place::of(page * PARTS + (at / part_bytes).min(last), part_bytes);
        let is_it = header.slab == self.slab
            && header.offset.wrapping_sub(self.offset) == place.at
            && header.bytes == place.bytes
            && self.missing >> place.number(part_bytes) & 1 == 1;
        match header.kind {
            Kind::Refused if header.slab == self.slab => Answer::Refused,
            Kind::ByKernel | Kind::ByProcess
                if is_it && datagram_bytes == ANSWER_BYTES + place.bytes as usize =>
            {
                Answer::Bytes(place)
            }
            _ => Answer::Nothing,
        }
    }
}

/// A bit for each answer to a read of so many pages.
fn all_missing(pages: u32, part_bytes: u32) -> u8 {
    let parts = PAGE_BYTES.div_ceil(part_bytes);
    (0..pages).fold(0, |missing, page| missing | ((1 << parts) - 1) << (page * PARTS))
}

/// Where the bytes of an answer go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which of the reads,
    pub read: usize,
    /// from which of its bytes on,
    pub at: u32,
    /// how many.
    pub bytes: u32,
}

impl Place {
    /// Of the answer with this number of the first read.
    fn of(number: u32, part_bytes: u32) -> Self {
        let (page, at) = (number / PARTS, number % PARTS * part_bytes);
        Self { read: 0, at: page * PAGE_BYTES + at, bytes: part_bytes.min(PAGE_BYTES - at) }
    }

    /// Which of a read's answers has these bytes.
    fn number(self, part_bytes: u32) -> u32 {
        self.at / PAGE_BYTES * PARTS + self.at % PAGE_BYTES / part_bytes
    }
}

/// What an answer is to be taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// These bytes.
    Bytes(Place),
    /// The read has to be done over the session.
    Refused,
    /// It belongs to nothing, or is not as it should be.
    Nothing,
}

/// The reads of one lease.
#[derive(Debug)]
pub struct Reads<T> {
    key: [u8; 16],
    reads: Vec<Read<T>>,
    next_sequence: u64,
    /// The first of all.
    first_sequence: u64,
    /// Bytes of the longest answer.
    part_bytes: u32,
    /// Reads that were given up, by whether their answers still come it is known what they were: lost, or late.
    doubtful: VecDeque<Doubtful>,
    trust: Trust,
    counts: Counts,
}

/// The datagrams of a read that was given up.
#[derive(Clone, Copy, Debug)]
struct Doubtful {
    sequence: u64,
    count: u32,
    asked_ns: u64,
}

/// So long after it was sent, or when so many others are doubtful, a datagram that was not answered is lost.
const LOST_AFTER_NS: u64 = 100_000_000;
const DOUBTFUL_MAX: usize = 32;

/// What has become of datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Answers of the lender's kernel: pages, or parts of pages.
    pub by_kernel: u64,
    /// Answers of its process.
    pub by_process: u64,
    /// Reads that had to be done over the session after all.
    pub given_up: u64,
}

impl<T: Copy> Reads<T> {
    /// By this key; the first sequence should be one that nobody can guess. `packet_bytes_max` is what a packet may have on the whole way, but for the link's own header:
    /// `None` when not even a part fits.
    pub fn new(key: [u8; 16], first_sequence: u64, is_v6: bool, packet_bytes_max: u32) -> Option<Self> {
        let fits = |bytes: &u32| packet_bytes(is_v6, *bytes) <= packet_bytes_max;
        Some(Self {
            key,
            reads: Vec::with_capacity(READS_MAX),
            next_sequence: first_sequence,
            first_sequence,
            part_bytes: [PAGE_BYTES, PART_BYTES].into_iter().find(fits)?,
            doubtful: VecDeque::with_capacity(DOUBTFUL_MAX),
            trust: Trust::new(),
            counts: Counts::default(),
        })
    }

    /// Whether these bytes can be asked for by datagrams now.
    pub fn can(&mut self, now_ns: u64, offset: u64, bytes: u32) -> bool {
        let pages = u64::from(PAGE_BYTES);
        bytes > 0
            && bytes <= READ_BYTES_MAX
            && (offset | u64::from(bytes)).is_multiple_of(pages)
            && offset <= u64::from(u32::MAX - READ_BYTES_MAX)
            && self.reads.len() < READS_MAX
            && {
                self.doubt(now_ns);
                self.trust.is_on(now_ns)
            }
    }

    /// Whether anything is asked for by datagrams now.
    pub fn are_on(&self, now_ns: impl FnOnce() -> u64) -> bool {
        self.trust.is_on_at(now_ns)
    }

    /// Begins a read, of which [`Reads::can`] has been true; what to send for it.
    pub fn ask(
        &mut self,
        now_ns: u64,
        token: u64,
        slab: u32,
        offset: u32,
        bytes: u32,
        locals: T,
    ) -> impl Iterator<Item = Request> + use<T> {
        let read = self.begin(now_ns, token, slab, offset, bytes, locals);
        let requests = read.requests(self.key, self.part_bytes);
        self.reads.push(read);
        requests
    }

    fn begin<L>(
        &mut self,
        asked_ns: u64,
        token: u64,
        slab: u32,
        offset: u32,
        bytes: u32,
        locals: L,
    ) -> Read<L> {
        let (pages, sequence) = (bytes / PAGE_BYTES, self.next_sequence);
        self.next_sequence = sequence.wrapping_add(pages.into());
        let missing = all_missing(pages, self.part_bytes);
        Read { token, slab, offset, bytes, locals, sequence, missing, asked_ns }
    }

    /// The last read could not be sent, and is none. That counts as lost if it is not to be expected that the next one can.
    pub fn take_back(&mut self, now_ns: u64, is_lost: bool) {
        if let Some(read) = self.reads.pop().filter(|_| is_lost) {
            self.trust.lost(now_ns, read.asked_ns);
        }
    }

    /// Reads on their way.
    pub fn len(&self) -> usize {
        self.reads.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }

    /// One of them.
    pub fn get(&self, read: usize) -> Option<&Read<T>> {
        self.reads.get(read)
    }

    /// The bytes that come next if nothing is lost or overtaken.
    pub fn expected(&self) -> Option<Place> {
        let read = self.reads.first()?;
        Some(Place::of(read.missing.trailing_zeros(), self.part_bytes))
    }

    /// What a datagram of so many bytes, with this header, is, and of which read. [`Reads::arrived`] and [`Reads::refused`] are to be told of it.
    pub fn answer(&mut self, now_ns: u64, header: &Header, datagram_bytes: usize) -> (usize, Answer) {
        let found = self
            .reads
            .iter()
            .enumerate()
            .find_map(|(index, read)| read.page_of(header.sequence).map(|page| (index, page, read)));
        let Some((index, page, read)) = found else {
            if header.kind != Kind::Read {
                self.came_late(now_ns, header.sequence);
            }
            return (0, Answer::Nothing);
        };
        match read.judge(page, self.part_bytes, header, datagram_bytes) {
            Answer::Bytes(place) => (index, Answer::Bytes(Place { read: index, ..place })),
            other => (index, other),
        }
    }

    /// What had been given up was under way.
    fn came_late(&mut self, now_ns: u64, sequence: u64) {
        let is_it = |one: &Doubtful| sequence.wrapping_sub(one.sequence) < one.count.into();
        if let Some(index) = self.doubtful.iter().position(is_it)
            && let Some(Doubtful { asked_ns, .. }) = self.doubtful.remove(index)
        {
            // Longer ago it says when somebody looked, not when it came.
            let waited = now_ns.saturating_sub(asked_ns);
            if waited < LOST_AFTER_NS {
                self.trust.answered(waited);
            }
        }
    }

    /// The bytes of this place are there; the read, if those were all.
    pub fn arrived(&mut self, now_ns: u64, place: Place, kind: Kind) -> Option<Read<T>> {
        let number = place.number(self.part_bytes);
        let read = self.reads.get_mut(place.read)?;
        read.missing &= !(1 << number);
        if kind == Kind::ByKernel {
            self.counts.by_kernel += 1;
        } else {
            self.counts.by_process += 1;
        }
        if read.missing != 0 {
            return None;
        }
        let read = self.reads.remove(place.read);
        self.trust.heard(now_ns, kind == Kind::ByKernel);
        self.trust.answered(now_ns.saturating_sub(read.asked_ns));
        Some(read)
    }

    /// A read is not answered by datagrams.
    pub fn refused(&mut self, now_ns: u64, read: usize) -> Option<Read<T>> {
        let is_one = read < self.reads.len();
        is_one.then(|| {
            self.counts.given_up += 1;
            let read = self.reads.remove(read);
            self.trust.lost(now_ns, read.asked_ns);
            read
        })
    }

    /// Nobody is there: all reads on their way have to be done over the session.
    pub fn unheard(&mut self, now_ns: u64) -> impl Iterator<Item = Read<T>> + '_ {
        let Self { reads, trust, counts, .. } = self;
        counts.given_up += reads.len() as u64;
        reads.drain(..).inspect(move |read| trust.lost(now_ns, read.asked_ns))
    }

    /// Those of a slab are to be done over the session, before what follows there.
    pub fn take_of(&mut self, slab: u32) -> impl Iterator<Item = Read<T>> + '_ {
        self.reads.extract_if(.., move |read| read.slab == slab)
    }

    /// Those that were given up long ago, or are too many, are lost.
    fn doubt(&mut self, now_ns: u64) {
        let is_lost = |one: &Doubtful| now_ns.saturating_sub(one.asked_ns) >= LOST_AFTER_NS;
        while self.doubtful.len() >= DOUBTFUL_MAX || self.doubtful.front().is_some_and(is_lost) {
            if let Some(Doubtful { asked_ns, .. }) = self.doubtful.pop_front() {
                self.trust.lost(now_ns, asked_ns);
            }
        }
    }

    /// A read whose answer does not come any more: it is to be done over the session.
    pub fn overdue(&mut self, now_ns: u64) -> Option<Read<T>> {
        // They were asked one after the other.
        let oldest = self.reads.first()?;
        if now_ns.saturating_sub(oldest.asked_ns) < self.trust.patience_ns() {
            return None;
        }
        self.doubt(now_ns);
        self.trust.late();
        let read = self.reads.remove(0);
        self.counts.given_up += 1;
        let count = read.bytes / PAGE_BYTES;
        self.doubtful.push_back(Doubtful { sequence: read.sequence, count, asked_ns: read.asked_ns });
        Some(read)
    }

    /// For how long to wait, at most, before [`Reads::overdue`] is asked; none on its way: `None`.
    pub fn patience_ns(&self, now_ns: u64) -> Option<u64> {
        let waited = now_ns.saturating_sub(self.reads.first()?.asked_ns);
        Some(self.trust.patience_ns().saturating_sub(waited))
    }

    /// Whether answers come while they are being asked for, nearly: to look at once is worth it.
    pub fn are_quick(&self) -> bool {
        self.trust.is_quick()
    }

    /// All reads on their way, which are given up, though nothing is known of their answers.
    pub fn give_up(&mut self) -> impl Iterator<Item = Read<T>> + '_ {
        self.reads.drain(..)
    }

    /// Something was wrong that has come so: nothing is asked for a while.
    pub fn distrust(&mut self, now_ns: u64) {
        self.trust.pause(now_ns);
    }

    /// Nothing is asked for any more.
    pub fn end(&mut self) {
        self.trust.end();
    }

    /// Whether answers of reads that were given up may be there.
    pub fn has_doubtful(&self) -> bool {
        !self.doubtful.is_empty()
    }

    /// What has become of datagrams since this was last asked.
    pub fn take_counts(&mut self) -> Counts {
        core::mem::take(&mut self.counts)
    }
}

#[cfg(test)]
mod tests;
