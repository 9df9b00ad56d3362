//! New copies for extents that have lost some, or whose lender asks for them: one extent at a time, chunk by chunk.

use super::{ALL, BLOCK_BYTES, CHUNK_BYTES, Copy, Done, Gone, Moving, Piece, Stuck, Transfer, Volume, What};

#[derive(Debug, Default)]
pub(super) struct Repair {
    /// Where to look for the next extent; at the end there is none until something changes.
    cursor: usize,
    job: Option<Job>,
    /// A transfer has the repair buffer, perhaps for a job that has been dropped.
    buffer_in_use: bool,
}

#[derive(Clone, Copy, Debug)]
struct Job {
    extent: u32,
    target: u32,
    /// The new copy takes the place of this lender's.
    leaving: Option<u32>,
    step: Step,
    /// Offset of the chunk within the volume; those before it are done.
    chunk: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Borrowing,
    /// What touches the chunk is held.
    Reading,
    Writing,
    /// All of it was sent to the target, which has not said yet that it has it.
    Flushing,
}

impl Repair {
    /// Extents that could not be repaired may be now.
    pub(super) fn look_again(&mut self) {
        self.cursor = 0;
    }
}

impl Volume {
    /// Whether an extent is being repaired.
    pub fn is_mending(&self) -> bool {
        self.repair.job.is_some()
    }

    /// Begins with the next extent that lacks a copy, if some lender could have it.
    pub(super) fn mend(&mut self) {
        while self.repair.job.is_none()
            && !self.repair.buffer_in_use
            && self.repair.cursor < self.extents.len()
        {
            let number = self.repair.cursor;
            let is_poor = (1..self.replicas).contains(&self.extents[number].full().count());
            let recalled = |lender: u32| self.lenders[lender as usize].recalled > 0;
            let leaving = self.extents[number].full().find(|copy| recalled(copy.lender));
            let leaving = leaving.map(|copy| copy.lender).filter(|_| !is_poor);
            let candidate = if is_poor || leaving.is_some() { self.candidate(number) } else { None };
            // To one that asks for its own memory only what has too few copies.
            let Some(lender) = candidate.filter(|&lender| is_poor || !recalled(lender)) else {
                if let Some(lender) = leaving.map(|lender| &mut self.lenders[lender as usize])
                    && lender.stuck == Stuck::No
                {
                    lender.stuck = Stuck::Found;
                }
                self.repair.cursor += 1;
                continue;
            };
            let (extent, chunk) = (number as u32, number as u64 * self.extent_bytes);
            self.repair.job = Some(Job { extent, target: lender, leaving, step: Step::Borrowing, chunk });
            let transfer = Transfer { lender, slab: 0, offset: 0, bytes: 0, what: What::Borrow };
            self.queue(Moving { transfer, op: None, extent });
        }
    }

    /// Whether a piece touches the chunk that is being read.
    pub(super) fn is_repaired(&self, piece: &Piece) -> bool {
        self.repair.job.is_some_and(|job| {
            let touches = piece.offset < job.chunk + CHUNK_BYTES && job.chunk < piece.offset + piece.bytes;
            job.step == Step::Reading && job.extent == piece.extent && touches
        })
    }

    pub(super) fn borrowed(&mut self, lender: u32, result: Result<Done, Gone>) {
        let job = self.repair.job.filter(|job| job.target == lender && job.step == Step::Borrowing);
        match (result, job) {
            (Ok(Done::Slab(slab)), Some(job)) => {
                let copy = Copy { lender, slab, full: false };
                self.extents[job.extent as usize].copies.push(copy);
                self.lenders[lender as usize].copies += 1;
                self.read_chunk();
            }
            // A lost lender has it back already, and nothing that is queued for it would ever end.
            (Ok(Done::Slab(_)), None) if self.lenders[lender as usize].lost => {}
            (Ok(Done::Slab(slab)), None) => self.return_slab(lender, slab),
            (Ok(_), job) => {
                self.lenders[lender as usize].full = true;
                // Not the job that has begun since the one that it was for was dropped.
                if job.is_some() {
                    self.end_job();
                }
            }
            // Its loss has ended the job.
            (Err(Gone), _) => {}
        }
    }

    /// Goes on with the next chunk that holds anything; when there is none, asks whether all of them have arrived: a write ends when it is sent.
    fn read_chunk(&mut self) {
        let Some(mut job) = self.repair.job else { return };
        let end = ((u64::from(job.extent) + 1) * self.extent_bytes).min(self.size_bytes);
        while job.chunk < end {
            let (from, to) =
                (job.chunk / BLOCK_BYTES, (job.chunk + CHUNK_BYTES).min(end).div_ceil(BLOCK_BYTES));
            let mut present = (from..to).filter(|&block| self.presence.has(block));
            if let Some(first) = present.next() {
                let last = present.next_back().unwrap_or(first);
                job.step = Step::Reading;
                self.repair.job = Some(job);
                let offset = first * BLOCK_BYTES - u64::from(job.extent) * self.extent_bytes;
                return self.move_chunk(What::ChunkRead, offset, ((last + 1 - first) * BLOCK_BYTES) as u32);
            }
            job.chunk += CHUNK_BYTES;
        }
        self.repair.job = Some(Job { step: Step::Flushing, ..job });
        self.move_chunk(What::Flush, 0, 0);
    }

    /// The target has all of it.
    fn complete(&mut self, job: Job) {
        let copies = &mut self.extents[job.extent as usize].copies;
        copies.iter_mut().for_each(|copy| copy.full |= copy.lender == job.target);
        let left = job.leaving.and_then(|lender| copies.iter().position(|copy| copy.lender == lender));
        if let Some(index) = left {
            // Behind all that is in its queue.
            let Copy { lender, slab, .. } = copies.swap_remove(index);
            let place = &mut self.lenders[lender as usize];
            place.copies -= 1;
            if place.recalled != ALL {
                place.recalled = place.recalled.saturating_sub(1);
            }
            self.moved += 1;
            self.return_slab(lender, slab);
        }
        self.end_job();
    }

    fn move_chunk(&mut self, what: What, offset: u64, bytes: u32) {
        let Some(job) = self.repair.job else { return };
        let copies = &self.extents[job.extent as usize].copies;
        let fits = |copy: &&Copy| match what {
            What::ChunkRead => copy.full,
            _ => copy.lender == job.target,
        };
        let Some(&Copy { lender, slab, .. }) = copies.iter().find(fits) else { return self.end_job() };
        self.repair.buffer_in_use = true;
        let transfer = Transfer { lender, slab, offset, bytes, what };
        self.queue(Moving { transfer, op: None, extent: job.extent });
    }

    /// The repair buffer is free again.
    pub(super) fn chunk_moved(&mut self, transfer: Transfer, result: Result<Done, Gone>) {
        self.repair.buffer_in_use = false;
        let Transfer { what, offset, bytes, .. } = transfer;
        match (self.repair.job, what, result) {
            // For a job that has been dropped; there is no other while the buffer is in use.
            (None, ..) => self.mend(),
            (Some(job), What::ChunkRead, Ok(_)) => {
                self.repair.job = Some(Job { step: Step::Writing, ..job });
                self.move_chunk(What::ChunkWrite, offset, bytes);
                // Behind the chunk, in the target's queue.
                self.release();
            }
            (Some(_), What::ChunkRead, Err(Gone)) => self.move_chunk(What::ChunkRead, offset, bytes),
            (Some(job), What::Flush, Ok(_)) => self.complete(job),
            (Some(job), _, Ok(_)) => {
                self.repair.job = Some(Job { chunk: job.chunk + CHUNK_BYTES, ..job });
                self.read_chunk();
            }
            (Some(_), _, Err(Gone)) => self.end_job(),
        }
    }

    /// A lender is lost. Where nobody else certainly has all of it, a target that was sent all of it counts: so do writes that were sent.
    pub(super) fn trust_target(&mut self, lost: u32) {
        let Some(job) = self.repair.job.filter(|job| job.step == Step::Flushing) else { return };
        let copies = &mut self.extents[job.extent as usize].copies;
        if copies.iter().all(|copy| !copy.full || copy.lender == lost) {
            copies.iter_mut().for_each(|copy| copy.full |= copy.lender == job.target);
        }
    }

    /// A lender was lost: perhaps the job is pointless now.
    pub(super) fn check_repair(&mut self) {
        let Some(job) = self.repair.job else { return };
        let is_lost = self.extents[job.extent as usize].full().next().is_none();
        if is_lost || self.lenders[job.target as usize].lost {
            self.drop_job();
        }
    }

    fn return_slab(&mut self, lender: u32, slab: u32) {
        let transfer = Transfer { lender, slab, offset: 0, bytes: 0, what: What::Return };
        self.queue(Moving { transfer, op: None, extent: 0 });
    }

    /// What it has copied goes back, unless that is all of it.
    fn drop_job(&mut self) {
        let Some(job) = self.repair.job.take() else { return };
        let copies = &mut self.extents[job.extent as usize].copies;
        let partial = copies.iter().position(|copy| copy.lender == job.target && !copy.full);
        if let Some(index) = partial {
            let Copy { lender, slab, .. } = copies.swap_remove(index);
            self.lenders[lender as usize].copies -= 1;
            self.return_slab(lender, slab);
        }
        self.release();
    }

    fn end_job(&mut self) {
        self.drop_job();
        self.mend();
    }
}
