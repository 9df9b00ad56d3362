//! Where evicted pages live: slabs of the lenders.

use super::error::{PagerError, system};
use crate::error::{Error, Result};
use crate::lender::{BorrowOptions, Borrower, Completion, ForkTicket};
use netvm_core::endpoint::PostError;
use netvm_core::residency::{Slot, SlotMap};
use netvm_sys::shared::SharedSlice;
use netvm_sys::uffd::PAGE_BYTES;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// Connections to the lenders and the slots borrowed from them.
pub(super) struct Backing {
    borrowers: Vec<Borrower>,
    pub(super) slots: SlotMap,
    /// Lender whose turn it is to give the next slab.
    next_lender: usize,
    completions: Vec<Completion>,
    timeout: Duration,
    /// Frozen slabs are asked about one at a time, and not more often than this allows.
    next_thaw: Instant,
}

const THAW_INTERVAL: Duration = Duration::from_millis(200);

impl Backing {
    pub(super) fn connect(addresses: &[String], options: &BorrowOptions, timeout: Duration) -> Result<Self> {
        let borrowers = addresses
            .iter()
            .map(|address| Borrower::connect(address, options))
            .collect::<Result<Vec<_>>>()?;
        Self::new(borrowers, timeout)
    }

    fn new(borrowers: Vec<Borrower>, timeout: Duration) -> Result<Self> {
        let Some(first) = borrowers.first() else {
            return Err(PagerError::NoLender.into());
        };
        let slab_bytes = borrowers.iter().map(Borrower::slab_bytes).min().unwrap_or(first.slab_bytes());
        let slots_per_slab = (slab_bytes / PAGE_BYTES as u64 / 64 * 64) as u32;
        if slots_per_slab == 0 {
            return Err(
                PagerError::SlabTooSmall { lender: first.lender().to_owned(), bytes: slab_bytes }.into()
            );
        }
        Ok(Self {
            borrowers,
            slots: SlotMap::new(slots_per_slab),
            next_lender: 0,
            completions: Vec::with_capacity(1024),
            timeout,
            next_thaw: Instant::now(),
        })
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.borrowers.iter().flat_map(Borrower::descriptors).map(|fd| fd.as_raw_fd())
    }

    /// Whether something has ended without anything having arrived.
    pub(super) fn has_ended(&self) -> bool {
        !self.completions.is_empty() || self.borrowers.iter().any(Borrower::has_ended)
    }

    /// Operations on their way.
    pub(super) fn pending(&self) -> usize {
        self.borrowers.iter().map(Borrower::pending).sum()
    }

    /// What to wait for.
    pub(super) fn poll_fds(&self, fds: &mut Vec<libc::pollfd>) {
        fds.extend(self.borrowers.iter().map(|borrower| libc::pollfd {
            fd: borrower.as_fd().as_raw_fd(),
            events: libc::POLLIN | if borrower.wants_write() { libc::POLLOUT } else { 0 },
            revents: 0,
        }));
    }

    /// Takes a run of free slots, borrowing another slab if need be.
    pub(super) fn take_slots(&mut self, want: u32) -> Result<(Slot, u32)> {
        loop {
            if let Some(run) = self.slots.take_run(want) {
                return Ok(run);
            }
            self.borrow_slab()?;
        }
    }

    fn borrow_slab(&mut self) -> Result<()> {
        let mut refused = None;
        for _ in 0..self.borrowers.len() {
            let index = self.next_lender;
            self.next_lender = (index + 1) % self.borrowers.len();
            match self.borrowers[index].borrow_slab() {
                Ok(id) => {
                    return match self.slots.add(index as u32, id) {
                        Some(_) => Ok(()),
                        None => Err(PagerError::SlotsExhausted.into()),
                    };
                }
                Err(error @ Error::LenderFull { .. }) => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        // Better a slab that a dead child has let go than none at all.
        if self.thaw_all()? {
            return Ok(());
        }
        Err(refused.unwrap_or(PagerError::NoLender.into()))
    }

    /// Lets go of a slot; an empty slab goes back to its lender, but one is kept for the next eviction.
    pub(super) fn release_slot(&mut self, slot: Slot) -> Result<()> {
        if slot == 0 {
            return Ok(());
        }
        if let Some(slab) = self.slots.release(slot)
            && (self.slots.slabs() > 1 || !self.slots.is_writable(slot))
            && let Some((lender, id)) = self.slots.remove(slab)
        {
            self.borrowers[lender as usize].return_slab(id)?;
        }
        Ok(())
    }

    /// Reads neighbouring slots from `slot` on into `local`.
    pub(super) fn read(&mut self, token: u64, slot: Slot, local: SharedSlice) -> Result<()> {
        let (lender, slab, page) = self.slots.locate(slot);
        let offset = u64::from(page) * PAGE_BYTES as u64;
        let borrower = &mut self.borrowers[lender as usize];
        while let Err(error) = borrower.post_read(token, slab, offset, local) {
            Self::make_room(error, borrower, &mut self.completions, self.timeout)?;
        }
        Ok(())
    }

    /// Writes `local` to neighbouring slots from `slot` on.
    pub(super) fn write(&mut self, token: u64, slot: Slot, local: SharedSlice) -> Result<()> {
        let (lender, slab, page) = self.slots.locate(slot);
        let offset = u64::from(page) * PAGE_BYTES as u64;
        let borrower = &mut self.borrowers[lender as usize];
        while let Err(error) = borrower.post_write(token, slab, offset, local) {
            Self::make_room(error, borrower, &mut self.completions, self.timeout)?;
        }
        Ok(())
    }

    /// The queue of a connection is full: wait until it is not. Completions are kept for the next [`Backing::poll`].
    fn make_room(
        error: PostError,
        borrower: &mut Borrower,
        completions: &mut Vec<Completion>,
        timeout: Duration,
    ) -> Result<()> {
        if error == PostError::TooLong {
            return Err(Error::Other(format!("a transfer for lender {}: {error}", borrower.lender())));
        }
        let before = completions.len();
        borrower.poll(completions)?;
        if completions.len() == before {
            let events = libc::POLLIN | if borrower.wants_write() { libc::POLLOUT } else { 0 };
            let mut fds = [libc::pollfd { fd: borrower.as_fd().as_raw_fd(), events, revents: 0 }];
            netvm_sys::thread::poll(&mut fds, Some(timeout)).map_err(|e| system("poll", e))?;
            Self::check_answer(borrower, timeout)?;
        }
        Ok(())
    }

    fn check_answer(borrower: &Borrower, timeout: Duration) -> Result<()> {
        match borrower.oldest_pending() {
            Some(since) if since.elapsed() > timeout => Err(Error::Timeout {
                lender: borrower.lender().to_owned(),
                what: "a page",
                after_ms: timeout.as_millis() as u64,
            }),
            _ => Ok(()),
        }
    }

    /// Sends and receives what can be; finished operations are appended to `out`.
    pub(super) fn poll(&mut self, out: &mut Vec<Completion>) -> Result<()> {
        out.append(&mut self.completions);
        for borrower in &mut self.borrowers {
            borrower.poll(out)?;
        }
        Ok(())
    }

    /// Sends what is queued.
    pub(super) fn push(&mut self) -> Result<()> {
        self.borrowers.iter_mut().filter(|borrower| borrower.wants_write()).try_for_each(Borrower::push)
    }

    /// An error when a lender has not answered in time.
    pub(super) fn check_answers(&self) -> Result<()> {
        self.borrowers.iter().try_for_each(|borrower| Self::check_answer(borrower, self.timeout))
    }

    /// Whether there are frozen slabs to ask about now.
    pub(super) fn thaw_due(&self, now: Instant) -> bool {
        now >= self.next_thaw && self.slots.frozen().next().is_some()
    }

    /// Asks about every frozen slab; true when one can be written again.
    pub(super) fn thaw_all(&mut self) -> Result<bool> {
        self.next_thaw = Instant::now() + THAW_INTERVAL;
        let frozen: Vec<_> = self.slots.frozen().collect();
        let mut thawed = false;
        for (slab, lender, id) in frozen {
            if !self.borrowers[lender as usize].sole_holder(id)? {
                // A fork shares all slabs, so the others are most likely shared too: ask again later.
                break;
            }
            self.slots.thaw(slab);
            thawed = true;
        }
        Ok(thawed)
    }

    /// Address of the lender that holds a slot.
    pub(super) fn lender_of(&self, slot: Slot) -> String {
        self.borrowers[self.slots.locate(slot).0 as usize].lender().to_owned()
    }

    /// Before a fork, with no operation on its way: claims to leases that share every slab.
    pub(super) fn fork_tickets(&mut self) -> Result<Vec<ForkTicket>> {
        self.borrowers.iter_mut().map(Borrower::fork_ticket).collect()
    }

    /// After a fork, in the child. The parent's connections belong to descriptors that do not exist here.
    pub(super) fn adopt(&mut self, borrowers: Vec<Borrower>) {
        std::mem::forget(std::mem::replace(&mut self.borrowers, borrowers));
    }
}
