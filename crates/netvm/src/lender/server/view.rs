//! What a borrower may reach.

use netvm_core::endpoint::{Done, Job, Paging, Presence, Work};

use super::*;

/// What one borrower may reach.
pub(super) struct View<'a> {
    pub(super) memories: &'a Memories,
    pub(super) lease: Option<LeaseId>,
    pub(super) returns: &'a mut Returns,
    pub(super) ops: &'a mut u64,
}

/// Slabs that a borrower gives back.
#[derive(Default)]
pub(super) struct Returns {
    /// Answers with their bytes may be on their way. Nothing else is taken or given any more.
    pub(super) waiting: Vec<u32>,
    /// These have been sent.
    pub(super) over: Vec<u32>,
}

impl Exports for View<'_> {
    fn check(&mut self, handle: u32, offset: u64, bytes: u32, _: Access) -> Result<(), Status> {
        *self.ops += 1;
        let slabs = &self.memories.slabs;
        if !self.lease.is_some_and(|lease| slabs.holds(lease, handle))
            || self.returns.waiting.contains(&handle)
        {
            return Err(Status::NoHandle);
        }
        let inside = offset.checked_add(u64::from(bytes)).is_some_and(|end| end <= slabs.slab_bytes());
        if inside { Ok(()) } else { Err(Status::OutOfBounds) }
    }

    fn import(&mut self, _: &str, _: &RemoteKey) -> Result<(u32, u64, Rights), Status> {
        Err(Status::NoSegment)
    }

    fn presence(&mut self, _: u32, _: u64, _: u32, access: Access) -> Presence {
        // A page is packed as a whole, when all of it is here.
        let is_packed = self.memories.packing().is_some();
        if is_packed && access == Access::Write { Presence::Away } else { Presence::Here }
    }

    fn address(&mut self, handle: u32, offset: u64) -> u64 {
        u64::from(handle) * self.memories.slabs.slab_bytes() + offset
    }

    fn snapshot(&mut self, handle: u32, offset: u64, bytes: u32) -> Option<Result<Vec<u8>, Status>> {
        let packing = self.memories.packing()?;
        Some(packing.borrow_mut().read(handle, offset, bytes as usize).ok_or(Status::Fault))
    }

    fn unimport(&mut self, handle: u32) {
        // A borrower has no other way to close something than to give it back.
        if self.returns.waiting.contains(&handle) {
            self.returns.over.push(handle);
        }
    }
}

impl View<'_> {
    /// Does what the session has put off: writes to packed pages, and what must stay behind them.
    pub(super) fn execute(&mut self, job: Job) -> Result<Done, Status> {
        let Job { handle, offset, work, .. } = job;
        let Some(packing) = self.memories.packing() else { return Err(Status::Fault) };
        let mut packing = packing.borrow_mut();
        match work {
            Work::Write(bytes) => {
                packing.write(handle, offset, &bytes).map(|()| Done::Written).ok_or(Status::Fault)
            }
            Work::Read(bytes) => {
                packing.read(handle, offset, bytes as usize).map(Done::Read).ok_or(Status::Fault)
            }
            Work::Atomic(_) => Err(Status::Unsupported),
        }
    }
}

impl Memory for View<'_> {
    fn memory(&mut self, handle: u32, offset: u64, bytes: u32) -> Option<SharedSlice> {
        self.lease.filter(|&lease| self.memories.slabs.holds(lease, handle))?;
        self.memories.slab(handle, offset, bytes)
    }

    fn write(&mut self, handle: u32, offset: u64, bytes: &[u8], jobs: &Paging) -> Option<Result<(), Status>> {
        if self.memories.packing().is_some() && !jobs.is_empty() {
            return None;
        }
        let written = self.check(handle, offset, bytes.len() as u32, Access::Write).and_then(|()| {
            let written = match self.memories.packing() {
                Some(packing) => packing.borrow_mut().write(handle, offset, bytes),
                None => {
                    self.memory(handle, offset, bytes.len() as u32).and_then(|to| to.write_from(0, bytes))
                }
            };
            written.ok_or(Status::Fault)
        });
        Some(written)
    }
}

/// Does what a session has put off; true when there was something.
pub(super) fn do_jobs(
    session: &mut Session<Transport>,
    view: &mut View<'_>,
) -> std::result::Result<bool, Failure> {
    let mut any = false;
    while let Some(job) = session.endpoint.job() {
        let id = job.id;
        let result = view.execute(job);
        session.endpoint.paged(id, result, view)?;
        any = true;
    }
    Ok(any)
}
