//! Pages on their way to lenders and from them.

use super::engine::Engine;
use super::error::system;
use crate::error::Result;
use netvm_core::limits::PAYLOAD_BYTES_MAX;
use netvm_core::residency::PageState;
use netvm_sys::shared::SharedSlice;
use netvm_sys::uffd::{Fault, PAGE_BYTES};

/// Pages in one transfer: what the protocol carries at once.
pub(super) const TRANSFER_PAGES_MAX: u32 = PAYLOAD_BYTES_MAX / PAGE_BYTES as u32;

/// One transfer on its way: neighbouring pages, frames and slots.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) page: u32,
    pub(super) frame: u32,
    pub(super) pages: u32,
    pub(super) write: bool,
    /// The frames belong to no page any more: they are free when it is done.
    pub(super) loose: bool,
    /// Loose, and written for children, too: `page` is the number of the step.
    pub(super) promised: bool,
    /// The first page was evicted so short a time ago that it is worth being spared.
    pub(super) again: bool,
    /// Its pages are a part of a window.
    pub(super) in_window: bool,
    /// It had better be elsewhere when it leaves again: its slot is let go.
    pub(super) promote: bool,
    /// It has been tried by a shorter way, or is one of many, of which each costs less on a session than by a datagram.
    pub(super) by_session: bool,
}

impl Transfer {
    /// Pages that are written from neighbouring frames.
    pub(super) const fn write(page: u32, frame: u32, pages: u32) -> Self {
        Self { write: true, ..Self::read(page, frame, pages) }
    }

    /// Pages that are read into neighbouring frames, and that nobody waits for.
    pub(super) const fn read(page: u32, frame: u32, pages: u32) -> Self {
        Self {
            page,
            frame,
            pages,
            write: false,
            loose: false,
            promised: false,
            again: false,
            in_window: false,
            promote: false,
            by_session: false,
        }
    }
}

impl Engine {
    /// Hash by which contents are recognised, keyed with a secret of this process.
    pub(super) fn content_hash(&self, frame: u32) -> u64 {
        self.backing.seals.hash(self.paged.frame_bytes(frame as usize))
    }

    /// Starts a transfer; the entries of its pages say what kind it is.
    pub(super) fn start(&mut self, transfer: Transfer, slot: u32) -> Result<()> {
        let token = match self.transfers_free.pop() {
            Some(index) => {
                self.transfers[index as usize] = transfer;
                index
            }
            None => {
                self.transfers.push(transfer);
                self.transfers.len() as u32 - 1
            }
        };
        let local = self.paged.frame_memory(transfer.frame as usize, transfer.pages as usize);
        if transfer.write {
            let local = self.outgoing(token, transfer, slot, local)?;
            self.stats.remote_writes += u64::from(transfer.pages);
            self.stats.bytes_out += self.backing.write(token, slot, local)?;
            Ok(())
        } else {
            self.stats.remote_reads += u64::from(transfer.pages);
            self.stats.bytes_in += local.len() as u64;
            self.backing.read(token, slot, local, transfer.by_session)
        }
    }

    /// What is sent for a write: the frames, or encrypted copies of them. What must come back is noted.
    fn outgoing(
        &mut self,
        token: u32,
        transfer: Transfer,
        slot: u32,
        local: SharedSlice,
    ) -> Result<SharedSlice> {
        if self.backing.seals.encrypts() {
            return self.backing.seals.seal(token, slot, local);
        }
        for index in 0..transfer.pages {
            // Pages of a loose transfer are no neighbours.
            let hash = match transfer.loose {
                true => self.content_hash(transfer.frame + index),
                false => self.table.hash(transfer.page + index),
            };
            self.backing.seals.note(slot + index, hash);
        }
        Ok(local)
    }

    fn finish(&mut self, token: u32) -> Result<()> {
        self.backing.seals.sent(token);
        let transfer = self.transfers[token as usize];
        let from = self.backing.came_from(token);
        self.transfers_free.push(token);
        if transfer.write { self.written(transfer) } else { self.fetched(transfer, from) }
    }

    /// Moves transfers on and takes up what finished. True when something did.
    pub(super) fn progress(&mut self) -> Result<bool> {
        let mut done = std::mem::take(&mut self.completions);
        self.backing.poll(&mut done)?;
        let some = !done.is_empty();
        for token in done.drain(..) {
            self.finish(token)?;
        }
        self.completions = done;
        let some = self.hedge() || some;
        if some && !self.deferred.is_empty() && !self.holds_back {
            self.retry_deferred()?;
        }
        Ok(some)
    }

    /// Pages of reads that take far too long are asked of another lender. True when there were any.
    fn hedge(&mut self) -> bool {
        let mut some = false;
        while let Some(token) = self.backing.overdue() {
            let Transfer { page, frame, pages, .. } = self.transfers[token as usize];
            for index in 0..pages {
                self.read_again(page + index, frame + index);
            }
            self.backing.hedged(token);
            some = true;
        }
        some
    }

    /// A page that waits for this frame will not get it: it is as if it had not been asked for. Who waits for it faults again.
    pub(super) fn read_again(&mut self, page: u32, frame: u32) {
        let entry = self.table.get(page);
        if entry.state() != PageState::Fetching || entry.frame() != frame {
            return;
        }
        if entry.wanted() {
            self.deferred.push(Fault { address: self.address_of(page), ..Fault::default() });
            self.stats.faults += 1;
        }
        let entry = entry.with_state(PageState::Remote).with_frame(0).with_wanted(false);
        self.table.set(page, entry);
    }

    /// Waits until every transfer has finished.
    pub(super) fn finish_all(&mut self) -> Result<()> {
        self.backing.pause(true);
        let finished = self.finish_what_is_under_way();
        self.backing.pause(false);
        finished
    }

    fn transfers_are_under_way(&self) -> bool {
        self.backing.pending() > 0 || self.in_flight() > 0
    }

    fn finish_what_is_under_way(&mut self) -> Result<()> {
        while self.transfers_are_under_way() {
            // What has ended may have been no transfer, and the last: then nothing would come.
            if !self.progress()? && self.transfers_are_under_way() {
                self.poll_fds.clear();
                self.backing.poll_fds(&mut self.poll_fds);
                let patience = self.backing.patience();
                netvm_sys::thread::poll(&mut self.poll_fds, Some(patience)).map_err(|e| system("poll", e))?;
                self.backing.check_answers()?;
            }
        }
        Ok(())
    }

    pub(super) fn in_flight(&self) -> usize {
        self.transfers.len() - self.transfers_free.len()
    }
}
