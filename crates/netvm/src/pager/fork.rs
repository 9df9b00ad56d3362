//! fork(2): parent and child each keep their own view of far memory.
//!
//! Before the fork all I/O is finished and the pager's thread stands still; then every remote page is safe in a slot. The
//! child inherits the page table and, copy on write, installed and packed pages. All slabs are frozen: both processes may read the slots
//! they had, neither writes them. The child takes over connections whose leases hold the same slabs, so a slab lives as
//! long as one of the two needs it.

use super::calls::Call;
use super::engine::{EVICT_PAGES, Engine};
use super::error::{PagerError, system};
use super::{Pager, PagerConfig, join_run};
use crate::error::Result;
use crate::lender::Borrower;
use crate::runfile::Slot;
use netvm_core::residency::{FrameSet, PageState};
use netvm_sys::paged::PagedArea;
use netvm_sys::uffd::Userfault;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Free frames that a child keeps of its parent's, if it has the packed pages.
pub(super) const KEPT_FREE: usize = 2 * EVICT_PAGES;

/// What the forking thread holds between prepare and the end: the child's connections, or why it has none.
pub(super) struct ForkState {
    borrowers: Result<Vec<Option<Borrower>>>,
}

impl Pager {
    /// For pthread_atfork: makes the pager ready for a fork. The caller's threads wait at their next fault until it is over; the caller
    /// itself must have all signals blocked, since their handlers could fault, and `stack_pointer` is about where its stack is: if that
    /// is far memory, 96 KiB below stay in this machine. So do the pages at the addresses `also`: what is used between the two halves of a
    /// fork, when nobody serves faults.
    pub fn fork_prepare(&self, stack_pointer: usize, also: Vec<usize>) {
        // Then nothing is inherited.
        if !self.is_inherited() {
            return;
        }
        self.doorbell(0).turn().take();
        if let Err(error) = self.try_prepare(stack_pointer, also) {
            netvm_sys::thread::die(&format!("cannot fork: {error}"));
        }
    }

    /// Whether a child gets far memory: only of pagers that have it all, and whose faults are not served in their threads; and not the child
    /// of a child that got none.
    fn is_inherited(&self) -> bool {
        matches!(&self.shards[..], [only] if only.in_thread.is_none())
            && !self.orphaned.load(Ordering::Relaxed)
    }

    fn try_prepare(&self, stack_pointer: usize, also: Vec<usize>) -> Result<()> {
        *self.doorbell(0).needed() = also;
        self.doorbell(0).call_in_turn(Call::Park { stack_pointer })?;
        let mut parked = self.doorbell(0).parked();
        let Some(engine) = parked.as_mut() else {
            return Err(system("park the pager", std::io::ErrorKind::InvalidData.into()));
        };
        // These connections are made in this thread's descriptor table, which the child inherits. They may fail where the first did not: no
        // descriptor is left, or the process has another user or root since. That is no reason to end: many a child only starts a program.
        let tickets = std::mem::take(&mut *self.doorbell(0).tickets());
        let borrowers = engine.backing.redeem(&tickets);
        if borrowers.is_ok() {
            engine.backing.slots.freeze();
            engine.shares_frames = engine.has_packed_alone();
            engine.set_fork(true).map_err(|e| system("share far memory with a child", e))?;
            engine.shared = engine.shares_frames.then(Instant::now).or(engine.shared);
        }
        *self.forking() = Some(ForkState { borrowers });
        Ok(())
    }

    /// For pthread_atfork, in the parent.
    pub fn fork_parent(&self) {
        if !self.is_inherited() {
            return;
        }
        // Closing our copies leaves the leases to the child.
        let state = self.forking().take();
        if let Some(engine) = self.doorbell(0).parked().as_mut() {
            engine.backing.promised.forked();
            if let Err(error) = engine.set_fork(false) {
                netvm_sys::thread::die(&format!("cannot close far memory to other forks: {error}"));
            }
        }
        drop(state);
        self.doorbell(0).resume().open(0);
        self.doorbell(0).turn().give_back();
    }

    /// In a child of a fork that is about to give privileges up: closes what its lenders on this host have given it to read its parent's memory, which
    /// the parent goes on to write. What it has of its parent's is read over connections then, which give it nothing else.
    ///
    /// # Errors
    /// Where the pager's thread cannot be called; in an orphan, which has nothing.
    pub fn forget_inherited(&self) -> Result<()> {
        self.shards[0].call(Call::ForgetInherited, self)
    }

    /// For pthread_atfork, in the child.
    ///
    /// # Errors
    /// Why it has no far memory: its addresses cannot be touched, and calls fail.
    pub fn fork_child(self: &Arc<Self>) -> Result<()> {
        if !self.is_inherited() {
            return Ok(());
        }
        let state = self.forking().take();
        let engine = self.doorbell(0).parked().take();
        let (Some(state), Some(mut engine)) = (state, engine) else {
            netvm_sys::thread::die("a forked child found no pager state");
        };
        if !self.own_table.load(Ordering::Relaxed) {
            // What the parent's pager has open this process has, too: its faults, its memory, its connections.
            netvm_sys::thread::close_copies(&engine.descriptors());
        }
        let granted =
            state.borrowers.and_then(|borrowers| Ok((borrowers, Granted::get(&self.config, &engine)?)));
        let (borrowers, granted) = match granted {
            Ok(both) => both,
            Err(error) => {
                // All of it is the parent's.
                std::mem::forget(engine);
                self.orphaned.store(true, Ordering::Relaxed);
                self.doorbell(0).turn().give_back();
                return Err(error);
            }
        };
        let adopted = engine.adopt_after_fork(borrowers, granted);
        if let Err(error) = adopted.and_then(|()| self.spawn(engine)) {
            netvm_sys::thread::die(&format!("a forked child cannot reach its far memory: {error}"));
        }
        self.doorbell(0).turn().give_back();
        Ok(())
    }
}

/// What a child needs besides connections.
struct Granted {
    uffd: Userfault,
    slot: Option<Slot>,
}

impl Granted {
    /// Its user may not be one who may use userfaultfd, and there may be too many processes. Then it has what a child has that cannot connect:
    /// nothing.
    fn get(config: &PagerConfig, engine: &Engine) -> Result<Self> {
        let uffd = PagedArea::userfault().map_err(|source| PagerError::Userfaultfd((&source).into()));
        let granted = uffd.map_err(Into::into).and_then(|uffd| Ok(Self { uffd, slot: join_run(config)? }));
        if granted.is_err()
            && let Err(error) = engine.paged.give_up_after_fork(
                engine.ranges.iter().map(|(&address, &bytes)| (address, bytes)),
                engine.shares_frames,
            )
        {
            netvm_sys::thread::die(&format!(
                "a forked child cannot let go of its parent's far memory: {error}"
            ));
        }
        granted
    }
}

impl Engine {
    /// Whether pages are packed here, and nowhere else.
    fn has_packed_alone(&self) -> bool {
        self.tier.pool.pieces().any(|(_, piece)| self.table.get(piece.page).slot() == 0)
    }

    fn set_fork(&self, inherit: bool) -> std::io::Result<()> {
        if self.shares_frames {
            self.paged.share_frames(inherit)?;
        }
        let mut ranges = self.ranges.iter().map(|(&address, &bytes)| (address, bytes)).peekable();
        while let Some((address, mut bytes)) = ranges.next() {
            while let Some((_, more)) = ranges.next_if(|&(next, _)| next == address + bytes) {
                bytes += more;
            }
            self.paged.set_fork(address, bytes, inherit)?;
        }
        Ok(())
    }

    fn adopt_after_fork(
        &mut self,
        borrowers: Vec<Option<Borrower>>,
        Granted { uffd, slot }: Granted,
    ) -> Result<()> {
        // Nothing may be allocated before the pool is there again: what would be could lie in its place.
        let has_frames = self.shares_frames;
        let ranges = self.ranges.iter().map(|(&address, &bytes)| (address, bytes));
        self.paged
            .adopt_after_fork(uffd, ranges, has_frames)
            .and_then(|()| self.set_fork(false))
            .map_err(|source| PagerError::Userfaultfd((&source).into()))?;
        self.backing.adopt(borrowers)?;
        // Those threads stayed with the parent.
        self.deferred.clear();
        // A child's pages are not protected.
        let table = &mut self.table;
        self.mapped.retain(|page| {
            let entry = table.get(page);
            if entry.state() == PageState::Mapped && entry.protected() {
                table.set(page, entry.with_protected(false));
            }
            true
        });
        self.local_frames -= std::mem::take(&mut self.spare);
        // Nothing was on its way, so cached pages are on their lender.
        self.give_up_cached(self.cached.len());
        // It could not evict anything without a free frame.
        let kept = if has_frames { KEPT_FREE.min(self.free.len()) } else { 0 };
        while let Some((frame, frames)) = self.free.take_run(self.free.len() - kept) {
            if has_frames {
                self.paged.drop_frames(frame, frames).map_err(|e| system("give memory back", e))?;
            }
            self.empty.put(frame, frames);
            self.local_frames -= frames;
        }
        if !has_frames {
            self.leave_pool();
        }
        debug_assert_eq!(self.empty.len() + self.free.len() + self.tier.frames(), self.paged.frames());
        // No fault is under way.
        self.tier.forget_waiting();
        self.shared = None;
        self.stats = crate::stats::PagerStats::default();
        self.learn.forked();
        self.budget.replace_after_fork(slot);
        self.budget.adopt(self.local_frames as u64);
        Ok(())
    }

    /// The pool stayed with the parent, with nothing that lenders have not.
    fn leave_pool(&mut self) {
        let stamp = self.tier.stamp();
        for page in self.tier.pool.pieces().map(|(_, piece)| piece.page) {
            let entry = self.table.get(page).with_state(PageState::Remote);
            self.table.set(page, entry.with_frame(stamp).with_wanted(false));
        }
        let frames = self.paged.frames();
        self.local_frames -= self.tier.frames();
        self.tier.forget_pool(frames);
        self.empty = FrameSet::new(frames);
        self.empty.put(0, frames);
    }
}
