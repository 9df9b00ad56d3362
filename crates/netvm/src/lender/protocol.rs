//! The calls between a borrower and a lender.

use std::time::Duration;

use netvm_core::limits::SLABS_MAX;
use netvm_core::wire::{BodyReader, BodyWriter};

use crate::error::LenderLimit;
use crate::security::Protection;

/// Body: ticket (16 zeros for a new lease), pid, name. Answer: slab bytes.
pub(super) const ATTACH: u32 = 1;
/// Body: nothing; or 1 when nobody else has a slab, which lenders may ignore. Answer: see [`BorrowAnswer`].
pub(super) const BORROW: u32 = 2;
/// Body: slab.
pub(super) const RETURN: u32 = 3;
/// Answer: a ticket for one `ATTACH` to a copy of this lease.
pub(super) const FORK: u32 = 4;
/// Body: slab. Answer: 1 when no other lease holds it, else 0.
pub(super) const SOLE: u32 = 5;
/// Answer: see [`LenderStatus`].
pub(super) const STATUS: u32 = 6;
/// Body: slab, offset, bytes, whole pages: they read as zeros from now on, and cost nothing.
pub(super) const DISCARD: u32 = 7;

/// Body: an invitation to a meeting on this host. Answered when the lender has come, or refused.
pub(super) const MEET: u32 = 8;
/// Body: nothing; or 1 by who has a fork's lease. Answer: bytes of the lease's file, whose descriptor is on the meeting's socket, and where in it a mark
/// is that goes with the lease. Slabs that are borrowed from now on are in it. For 1 see [`Inherited`]. Lenders that do not know the body say no more.
pub(super) const FILE: u32 = 9;
/// Body: slab, offset, bytes, whole pages of a slab in the lease's file: the lender allocates them.
pub(super) const PROVIDE: u32 = 10;

/// By the lender. Body: bytes that are to be given back, and 1 when it is leaving; 0 bytes: none any more. Answer: nothing, at once.
pub(super) const RECALL: u32 = 11;
/// Nobody else can have what the lender wants back.
pub(super) const CANNOT: u32 = 12;
/// By the lender: is anybody there?
pub(super) const PING: u32 = 13;

/// Answer: what it lends, 0 memory, 1 a file, 2 memory in which pages are packed; and 16 bytes by which this lender is told from others, whatever
/// it is called, others each time it starts. Lenders that do not know this call lend memory.
pub(super) const KIND: u32 = 14;

/// Neither this lease nor a fork of it is given files of other leases any more.
pub(super) const RENOUNCE: u32 = 15;

/// Answer: a UDP port of the lender, and 16 bytes by which datagrams there are known to be of this lease. Refused by who answers none.
pub(super) const DATAGRAMS: u32 = 16;

/// How dear the memory of a lender is, by where it is: pages go to the cheapest that has room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Memory of this host, read and written without its lender.
    Nearby,
    /// Memory that the lender is asked for.
    #[default]
    Remote,
    /// The same, where pages are packed.
    Packed,
    /// A file on the lender's disk.
    File,
}

impl Class {
    /// As a lender tells it.
    pub(super) fn kind(self) -> u32 {
        match self {
            Self::Nearby | Self::Remote => 0,
            Self::File => 1,
            Self::Packed => 2,
        }
    }

    /// What is not known counts as the dearest.
    pub(super) fn from_kind(kind: u32) -> Self {
        match kind {
            0 => Self::Remote,
            2 => Self::Packed,
            _ => Self::File,
        }
    }

    /// All of them, the cheapest first.
    pub const ALL: [Self; 4] = [Self::Nearby, Self::Remote, Self::Packed, Self::File];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nearby => "nearby",
            Self::Remote => "memory",
            Self::Packed => "packed",
            Self::File => "file",
        }
    }
}

/// What a lender asks back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recall {
    /// How many bytes of its slabs.
    pub bytes: u64,
    /// It is going to end: all of them, and those that it lends meanwhile.
    pub leaving: bool,
}

impl Recall {
    pub(super) fn encode(self) -> Vec<u8> {
        let mut body = BodyWriter::default();
        body.u64(self.bytes).u32(u32::from(self.leaving));
        body.0
    }

    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        let mut body = BodyReader(body);
        Some(Self { bytes: body.u64()?, leaving: body.u32()? != 0 })
    }

    /// In slabs of so many bytes, [`u32::MAX`] for all of them.
    pub(crate) fn slabs(self, slab_bytes: u64) -> u32 {
        if self.leaving {
            return u32::MAX;
        }
        u32::try_from(self.bytes.div_ceil(slab_bytes.max(1))).unwrap_or(u32::MAX).min(u32::MAX - 1)
    }
}

/// What a lender says to who wants a slab.
pub(super) struct BorrowAnswer {
    pub(super) slab: Option<u32>,
    /// What it lends in all, and how much of that is lent; to this borrower if that is the limit.
    pub(super) size_bytes: u64,
    pub(super) used_bytes: u64,
    /// Why there is none.
    pub(super) limit: LenderLimit,
}

impl BorrowAnswer {
    pub(super) const BYTES: usize = 28;

    /// What is not lent yet.
    pub(super) fn room_bytes(&self) -> u64 {
        self.size_bytes.saturating_sub(self.used_bytes)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut body = BodyWriter::default();
        body.u32(u32::from(self.slab.is_some())).u32(self.slab.unwrap_or(0));
        body.u64(self.size_bytes).u64(self.used_bytes).u32(self.limit as u32);
        debug_assert_eq!(body.0.len(), Self::BYTES);
        body.0
    }

    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        let mut body = BodyReader(body);
        let (had, slab, size_bytes, used_bytes) = (body.u32()?, body.u32()?, body.u64()?, body.u64()?);
        let limit = match body.u32()? {
            0 => LenderLimit::Size,
            2 => LenderLimit::Disk,
            3 => LenderLimit::Memory,
            _ => LenderLimit::Quota,
        };
        let slab = (had == 1).then_some(slab);
        (had <= 1).then_some(Self { slab, size_bytes, used_bytes, limit })
    }
}

/// Where slabs are that a fork's lease has inherited: the rest of [`FILE`]'s answer. For each file, whose descriptors follow on the socket, the number
/// of runs of slabs in there, and of each run its first slab and how many it has.
pub(super) struct Inherited(pub(super) Vec<Runs>);

/// Slabs: the first of each run, and how many it has.
pub(super) type Runs = Vec<(u32, u32)>;

/// Most files: descriptors go in one message, with the lease's own.
pub(super) const INHERITED_MAX: usize = netvm_sys::fdpass::FDS_MAX - 1;
/// Most runs in all of them: an answer must fit into one body.
const RUNS_MAX: usize = 7000;

const _: () = assert!(16 + 4 + 4 * INHERITED_MAX + 8 * RUNS_MAX <= netvm_core::limits::BODY_BYTES_MAX);

impl Inherited {
    /// Runs that do not fit are left out: such slabs go over the session.
    pub(super) fn encode(&self, body: &mut BodyWriter) {
        let mut left = RUNS_MAX;
        body.u32(self.0.len() as u32);
        for runs in &self.0 {
            let runs = &runs[..runs.len().min(left)];
            left -= runs.len();
            body.u32(runs.len() as u32);
            for &(first, count) in runs {
                body.u32(first).u32(count);
            }
        }
    }

    /// None of lenders that say nothing about it.
    pub(super) fn decode(mut body: BodyReader<'_>) -> Option<Self> {
        if body.0.is_empty() {
            return Some(Self(Vec::new()));
        }
        let (files, mut left) = (body.u32()? as usize, RUNS_MAX);
        if files > INHERITED_MAX {
            return None;
        }
        let runs = |_| {
            let (runs, mut end) = (body.u32()? as usize, 0);
            left = left.checked_sub(runs)?;
            let mut run = |_| {
                let (first, count) = (body.u32()?, body.u32()?);
                let next = u64::from(first) + u64::from(count);
                // One behind the other: no slab is named twice.
                let is_next = u64::from(first) >= std::mem::replace(&mut end, next) && next <= SLABS_MAX;
                is_next.then_some((first, count))
            };
            (0..runs).map(&mut run).collect()
        };
        let files = (0..files).map(runs).collect::<Option<_>>()?;
        body.0.is_empty().then_some(Self(files))
    }
}

/// One borrower of a lender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BorrowerStatus {
    /// What it calls itself.
    pub name: String,
    /// Its process, on its own machine.
    pub pid: u32,
    /// Bytes that it holds, alone or with others.
    pub bytes: u64,
    /// Reads and writes so far, but for those that it does by itself.
    pub ops: u64,
    /// It is on the lender's host, and has been given a file of its own: most reads and writes it does by itself.
    pub nearby: bool,
    /// Bytes that it was asked to give back and still has.
    pub recalled_bytes: u64,
    /// It has nowhere else to put them.
    pub cannot: bool,
}

/// How a lender is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LenderStatus {
    /// Version of its protocol.
    pub version: u16,
    /// Bytes that it lends in all.
    pub size_bytes: u64,
    /// Bytes that are lent.
    pub used_bytes: u64,
    /// Bytes of memory that it really uses.
    pub resident_bytes: u64,
    /// Bytes of one slab.
    pub slab_bytes: u64,
    /// Since it started.
    pub uptime: Duration,
    /// Reads and writes so far.
    pub ops: u64,
    /// Reads and writes per second, lately.
    pub ops_per_s: u64,
    /// It takes no new borrowers: it has been asked to stop.
    pub draining: bool,
    /// Bytes that its machine is short of, and that it asks back.
    pub missing_bytes: u64,
    /// Nobody can give back what is missing.
    pub stuck: bool,
    /// Most bytes for one borrower; 0: as many as there are.
    pub quota_bytes: u64,
    /// What it lends.
    pub class: Class,
    /// Most memory that it uses for it, when that is less than it lends; 0: as much as it lends.
    pub memory_bytes: u64,
    /// Bytes of pages that this memory has no room for, and that are in a file.
    pub spilled_bytes: u64,
    /// Datagrams, of a page or a part of one each, that its kernel has answered: they are in no other count.
    pub kernel_reads: u64,
    /// Who borrows (the first 200 when there are more).
    pub borrowers: Vec<BorrowerStatus>,
    /// What protects the connection that asked; not on the wire.
    pub protection: Protection,
}

/// Most borrowers in a status: they must fit into one body.
const BORROWERS_MAX: usize = 200;

impl LenderStatus {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut body = BodyWriter::default();
        body.u32(u32::from(self.version)).u64(self.size_bytes).u64(self.used_bytes).u64(self.resident_bytes);
        body.u64(self.slab_bytes).u64(self.uptime.as_millis() as u64).u64(self.ops).u64(self.ops_per_s);
        body.u32(u32::from(self.draining)).u64(self.missing_bytes).u32(u32::from(self.stuck));
        body.u64(self.quota_bytes);
        let listed = &self.borrowers[..self.borrowers.len().min(BORROWERS_MAX)];
        body.u32(listed.len() as u32);
        for borrower in listed {
            body.text(&borrower.name).u32(borrower.pid).u64(borrower.bytes).u64(borrower.ops);
            body.u32(u32::from(borrower.nearby)).u64(borrower.recalled_bytes);
            body.u32(u32::from(borrower.cannot));
        }
        body.u32(self.class.kind()).u64(self.memory_bytes).u64(self.spilled_bytes).u64(self.kernel_reads);
        body.0
    }

    pub(super) fn decode(body: &[u8]) -> Option<Self> {
        let mut body = BodyReader(body);
        let mut status = Self {
            version: u16::try_from(body.u32()?).ok()?,
            size_bytes: body.u64()?,
            used_bytes: body.u64()?,
            resident_bytes: body.u64()?,
            slab_bytes: body.u64()?,
            uptime: Duration::from_millis(body.u64()?),
            ops: body.u64()?,
            ops_per_s: body.u64()?,
            draining: body.u32()? != 0,
            missing_bytes: body.u64()?,
            stuck: body.u32()? != 0,
            quota_bytes: body.u64()?,
            class: Class::Remote,
            memory_bytes: 0,
            spilled_bytes: 0,
            kernel_reads: 0,
            borrowers: Vec::new(),
            protection: Protection::None,
        };
        for _ in 0..body.u32()?.min(BORROWERS_MAX as u32) {
            status.borrowers.push(BorrowerStatus {
                name: body.text()?.to_owned(),
                pid: body.u32()?,
                bytes: body.u64()?,
                ops: body.u64()?,
                nearby: body.u32()? != 0,
                recalled_bytes: body.u64()?,
                cannot: body.u32()? != 0,
            });
        }
        // Lenders that do not say so lend memory.
        status.class = body.u32().map_or(Class::Remote, Class::from_kind);
        (status.memory_bytes, status.spilled_bytes) = (body.u64().unwrap_or(0), body.u64().unwrap_or(0));
        status.kernel_reads = body.u64().unwrap_or(0);
        Some(status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_inherited_survives_the_wire_as_far_as_it_fits() {
        let encode = |files: &[Vec<(u32, u32)>]| {
            let mut body = BodyWriter::default();
            Inherited(files.to_vec()).encode(&mut body);
            body.0
        };
        let decode = |body: &[u8]| Inherited::decode(BodyReader(body)).map(|files| files.0);
        let files = [vec![(0, 4), (9, 1)], vec![], vec![(5, 1)]];
        let body = encode(&files);
        assert_eq!(decode(&body).as_deref(), Some(&files[..]));
        assert_eq!(decode(&[]), Some(vec![]));
        for len in 1..body.len() {
            assert_eq!(decode(&body[..len]), None, "{len} bytes");
        }
        assert_eq!(decode(&[body, vec![0]].concat()), None, "more than that");
        assert_eq!(decode(&encode(&vec![vec![]; INHERITED_MAX + 1])), None);
        let many = |count| (0..count).map(|run| (2 * run, 1)).collect::<Vec<_>>();
        let fitting = decode(&encode(&[many(5000), many(5000), many(7)])).unwrap();
        assert_eq!(fitting, [many(5000), many(2000), vec![]]);
        for bad in [vec![(0, u32::MAX)], vec![(7, 2), (8, 1)], vec![(SLABS_MAX as u32, 1)]] {
            assert_eq!(decode(&encode(&[bad])), None);
        }
        let mut body = BodyWriter::default();
        body.u32(1).u32(u32::MAX);
        assert_eq!(decode(&body.0), None);
    }

    #[test]
    fn a_status_survives_the_wire_and_fits() {
        let borrower = BorrowerStatus {
            name: "n".repeat(255),
            pid: 7,
            bytes: 8,
            ops: 9,
            nearby: true,
            recalled_bytes: 10,
            cannot: true,
        };
        let class = Class::Packed;
        let (memory_bytes, spilled_bytes) = (4, 5);
        let all = LenderStatus {
            size_bytes: 1,
            ops_per_s: 3,
            stuck: true,
            kernel_reads: 6,
            ..LenderStatus::default()
        };
        let mut status = LenderStatus { class, memory_bytes, spilled_bytes, ..all };
        status.borrowers = vec![borrower; 300];
        let body = status.encode();
        assert!(body.len() <= netvm_core::limits::BODY_BYTES_MAX);
        status.borrowers.truncate(BORROWERS_MAX);
        assert_eq!(LenderStatus::decode(&body), Some(status));
        // Of a lender that does not say what it lends.
        let old = LenderStatus::decode(&body[..body.len() - 28]);
        assert_eq!(old.map(|status| status.class), Some(Class::Remote));
        for len in 0..body.len() - 28 {
            assert!(LenderStatus::decode(&body[..len]).is_none(), "{len} bytes");
        }
    }
}
