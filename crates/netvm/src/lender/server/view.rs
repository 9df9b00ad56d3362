//! What a borrower may reach.

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

    fn unimport(&mut self, handle: u32) {
        // A borrower has no other way to close something than to give it back.
        if self.returns.waiting.contains(&handle) {
            self.returns.over.push(handle);
        }
    }
}

impl Memory for View<'_> {
    fn memory(&mut self, handle: u32, offset: u64, bytes: u32) -> Option<SharedSlice> {
        self.lease.filter(|&lease| self.memories.slabs.holds(lease, handle))?;
        self.memories.slab(handle, offset, bytes)
    }
}
