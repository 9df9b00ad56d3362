//! Operations of the peer's on memory that is not there at the moment: which may be tried now, and which must wait for others.
//!
//! Such an operation becomes a *job*, which somebody executes who may take the page fault. Whatever touches a page of an unfinished job
//! stays behind it, so operations of one rail on the same page happen in the order in which they arrived. A job with a *barrier* (a
//! fenced write, an atomic) also waits for all jobs before it.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use crate::atomic::Atomic;
use crate::limits::{JOB_BYTES, JOBS_RUNNING_MAX};
use crate::wire::Header;

/// Jobs wait for each other by pages of so many bytes.
const PAGE_BYTES: u64 = 4096;

/// A job, never the same again in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobId(u64);

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Write these bytes.
    Write(Vec<u8>),
    /// Read so many bytes.
    Read(u32),
    /// Execute this once.
    Atomic(Atomic),
}

/// What has been done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Done {
    /// The bytes are in place.
    Written,
    /// The bytes.
    Read(Vec<u8>),
    /// What the word was.
    Word(u64),
}

/// A job to execute, anywhere and for as long as it takes; then tell [`Endpoint::paged`](super::Endpoint::paged).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Its name.
    pub id: JobId,
    /// Handle that the peer named; to be looked up now.
    pub handle: u32,
    /// First byte.
    pub offset: u64,
    /// What to do there.
    pub work: Work,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) rail: usize,
    pub(super) header: Header,
    /// Its handle was taken away while it was executed.
    pub(super) revoked: bool,
    first: u64,
    last: u64,
    /// On how many of its pages somebody else comes first.
    behind: usize,
    barrier: bool,
    cost: usize,
    /// When somebody first looked how long it has waited.
    seen_ms: Option<u64>,
    /// None while it is executed.
    work: Option<Work>,
}

/// The jobs of one session.
#[derive(Debug, Default)]
pub struct Paging {
    entries: BTreeMap<JobId, Entry>,
    /// Unfinished jobs of each page, in order.
    pages: BTreeMap<u64, VecDeque<JobId>>,
    ready: VecDeque<JobId>,
    running: usize,
    atomics: usize,
    next: u64,
    bytes: usize,
}

impl Paging {
    /// Whether there are no unfinished jobs.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes that the jobs hold, and something for each.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether something at `address` must stay behind a job.
    #[inline]
    pub fn is_before(&self, address: u64, bytes: u32) -> bool {
        if self.entries.is_empty() || bytes == 0 {
            return false;
        }
        let (first, last) = pages(address, bytes);
        self.pages.range(first..=last).next().is_some()
    }

    /// Whether an atomic is unfinished.
    pub(super) fn has_atomics(&self) -> bool {
        self.atomics > 0
    }

    /// How many unfinished writes have numbers below `sequence`.
    pub(super) fn writes_below(&self, sequence: u64) -> u64 {
        let is_below = |entry: &&Entry| entry.is_write() && entry.header.sequence < sequence;
        self.entries.values().filter(is_below).count() as u64
    }

    /// Whether an unfinished job uses this handle.
    pub(super) fn uses(&self, handle: u32) -> bool {
        self.entries.values().any(|entry| entry.header.handle == handle)
    }

    /// Adds a job for `bytes` (at least one) bytes at `address`.
    pub(super) fn add(
        &mut self,
        rail: usize,
        header: Header,
        address: u64,
        bytes: u32,
        work: Work,
        barrier: bool,
    ) {
        let id = JobId(self.next);
        self.next += 1;
        let (first, last) = pages(address, bytes);
        let mut behind = 0;
        for page in first..=last {
            let queue = self.pages.entry(page).or_default();
            behind += usize::from(!queue.is_empty());
            queue.push_back(id);
        }
        let cost = JOB_BYTES + if let Work::Write(bytes) = &work { bytes.len() } else { 0 };
        self.bytes += cost;
        self.atomics += usize::from(matches!(work, Work::Atomic(_)));
        let revoked = false;
        let (seen_ms, work) = (None, Some(work));
        let entry = Entry { rail, header, revoked, first, last, behind, barrier, cost, seen_ms, work };
        let waits = behind > 0 || (barrier && !self.entries.is_empty());
        self.entries.insert(id, entry);
        if !waits {
            self.ready.push_back(id);
        }
    }

    /// The next job to execute now; none while enough are.
    pub(super) fn start(&mut self) -> Option<Job> {
        if self.running >= JOBS_RUNNING_MAX {
            return None;
        }
        let id = self.ready.pop_front()?;
        let entry = self.entries.get_mut(&id)?;
        let work = entry.work.take()?;
        self.running += 1;
        Some(Job { id, handle: entry.header.handle, offset: entry.header.offset, work })
    }

    /// The jobs that nobody executes yet and that have waited for at least `limit_ms`, to be refused.
    pub(super) fn overdue(&mut self, now_ms: u64, limit_ms: u64) -> Vec<JobId> {
        let waiting = self.entries.iter_mut().filter(|(_, entry)| entry.work.is_some());
        let is_overdue =
            |entry: &mut Entry| now_ms.saturating_sub(*entry.seen_ms.get_or_insert(now_ms)) >= limit_ms;
        waiting.filter_map(|(id, entry)| is_overdue(entry).then_some(*id)).collect()
    }

    /// A job has been executed, or will not be. None when it is forgotten.
    pub(super) fn finish(&mut self, id: JobId) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        if entry.work.is_none() {
            self.running -= 1;
        } else {
            self.ready.retain(|other| *other != id);
        }
        self.bytes -= entry.cost;
        self.atomics -= usize::from(entry.header.kind == crate::wire::Kind::Atomic);
        for page in entry.first..=entry.last {
            let Some(queue) = self.pages.get_mut(&page) else { continue };
            if queue.front() != Some(&id) {
                debug_assert!(entry.work.is_some(), "executed before it was its turn");
                queue.retain(|other| *other != id);
                continue;
            }
            queue.pop_front();
            let Some(next) = queue.front().copied() else {
                self.pages.remove(&page);
                continue;
            };
            if let Some(waiting) = self.entries.get_mut(&next) {
                waiting.behind -= 1;
                if waiting.behind == 0 && !waiting.barrier {
                    self.ready.push_back(next);
                }
            }
        }
        // A barrier is ready when it has become the first of all.
        if let Some((first, waiting)) = self.entries.first_key_value()
            && waiting.barrier
            && waiting.work.is_some()
            && !self.ready.contains(first)
        {
            debug_assert_eq!(waiting.behind, 0, "the first of all is the first of each page");
            self.ready.push_back(*first);
        }
        Some(entry)
    }

    /// Jobs of this handle that are being executed count as refused when they are over.
    pub(super) fn revoke(&mut self, handle: u32) {
        for entry in self.entries.values_mut().filter(|entry| entry.header.handle == handle) {
            entry.revoked = true;
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        let next = self.next;
        *self = Self { next, ..Self::default() };
    }
}

impl Entry {
    fn is_write(&self) -> bool {
        self.header.kind == crate::wire::Kind::Write
    }
}

fn pages(address: u64, bytes: u32) -> (u64, u64) {
    let last = address.saturating_add(u64::from(bytes).saturating_sub(1));
    (address / PAGE_BYTES, last / PAGE_BYTES)
}
