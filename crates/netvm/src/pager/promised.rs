//! Packed pages get copies at lenders after a fork, once for parent and children: docs/design/pager.md, "fork".

use super::engine::{EVICT_PAGES, Engine};
use super::evict::SHRINK_FRAMES;
use super::tier::PACK_PAGES;
use super::transfers::Transfer;
use crate::error::Result;
use netvm_core::residency::PageState;
use netvm_core::tier::{PieceId, Promise};
use std::time::{Duration, Instant};

/// Promised pages sent at a time while nobody waits for them,
const STEP_PAGES: usize = EVICT_PAGES / 4;
/// and how many steps lenders may not have confirmed.
const STEPS_MAX: usize = 8;
/// When it is looked again whether some can be sent.
const IDLE: Duration = Duration::from_millis(1);
/// Promises that a child takes up at a time.
const TAKEN_UP_MAX: usize = 1 << 14;

impl Engine {
    /// Before a fork: takes slots for what is packed and nowhere else, so that the child knows where it will be.
    pub(super) fn promise_packed(&mut self) -> Result<()> {
        // What is being copied or moved would be somewhere else in the child.
        if self.backing.is_poor() || self.backing.slots.is_mending() {
            self.backing.end_promises()?;
            return Ok(());
        }
        if !self.backing.promised.has_room() {
            return Ok(());
        }
        let promised = self.backing.promised.pieces();
        let is_promised =
            |id: PieceId| promised.get(id as usize / 64).is_some_and(|word| word >> (id % 64) & 1 == 1);
        let pieces = self.tier.pool.pieces();
        let alone = pieces.filter(|&(id, piece)| !is_promised(id) && self.table.get(piece.page).slot() == 0);
        let alone: Vec<_> = alone.map(|(id, piece)| (id, piece.stamp)).collect();
        if alone.is_empty() {
            return Ok(());
        }
        self.tier.begin_stamp();
        self.backing.promise(alone, self.mapped.len())
    }

    /// Whether the oldest packed page is the next that was promised.
    pub(super) fn is_oldest_promised(&mut self) -> Result<bool> {
        while let Some((fork, promise)) = self.backing.promised.next() {
            if self.page_of_promise(promise).is_some() {
                return Ok(self.tier.pool.oldest() == Some(promise.piece));
            }
            self.break_promise(fork, promise)?;
            self.backing.promised.settle_broken(fork);
        }
        Ok(false)
    }

    fn break_promise(&mut self, fork: usize, promise: Promise) -> Result<()> {
        self.backing.promised.break_it(fork);
        self.backing.release_slot(promise.slot)
    }

    /// The page of a promise, if its piece is the same, and no lender has it yet.
    fn page_of_promise(&self, promise: Promise) -> Option<u32> {
        let Promise { piece: id, stamp, .. } = promise;
        let piece = self.tier.pool.find(id).filter(|piece| piece.stamp == stamp)?;
        let entry = self.table.get(piece.page);
        let is_same = entry.state() == PageState::Packed && entry.frame() == id && entry.slot() == 0;
        is_same.then_some(piece.page)
    }

    /// Sends up to `want` pages that have been promised, as far as there are free frames. They stay packed. Returns how many.
    pub(super) fn send_promised(&mut self, want: usize) -> Result<usize> {
        let mut sent = 0;
        while sent < want
            && self.backing.promised.next().is_some()
            && let Some((frame, frames)) = self.free.take_run((want - sent).min(EVICT_PAGES))
        {
            let used = self.send_promised_from(frame as u32, frames as u32)?;
            if used < frames as u32 {
                self.free.put(frame + used as usize, frames - used as usize);
            }
            sent += used as usize;
        }
        Ok(sent)
    }

    /// Sends what goes to neighbouring slots, from neighbouring frames. Returns how many of these it took.
    fn send_promised_from(&mut self, frame: u32, frames: u32) -> Result<u32> {
        let (mut used, mut first) = (0, None);
        while used < frames
            && let Some((fork, promise)) = self.backing.promised.next()
            && first.is_none_or(|(of, _): (usize, u32)| of == fork)
        {
            let Some(page) = self.page_of_promise(promise) else {
                self.break_promise(fork, promise)?;
                if first.is_none() {
                    self.backing.promised.settle_broken(fork);
                }
                continue;
            };
            let is_next = |(_, slot)| self.backing.slots.adjacent(slot + used - 1, promise.slot);
            if !first.is_none_or(is_next) {
                break;
            }
            first = first.or(Some((fork, promise.slot)));
            self.read_from_pool(page, promise.piece, frame + used)?;
            self.table.set(page, self.table.get(page).with_slot(promise.slot));
            self.backing.promised.keep(fork);
            used += 1;
        }
        if let Some((fork, slot)) = first {
            self.writing_frames += used as usize;
            let step = self.backing.promised.leave(fork);
            self.start(Transfer { loose: true, promised: true, ..Transfer::write(step, frame, used) }, slot)?;
        }
        Ok(used)
    }

    /// Before a fork: all that has been promised leaves.
    pub(super) fn send_all_promised(&mut self) -> Result<()> {
        while self.backing.promised.next().is_some() {
            if self.send_promised(EVICT_PAGES)? == 0 && self.backing.promised.next().is_some() {
                self.make_frames_free()?;
            }
        }
        Ok(())
    }

    /// For how long to wait until more of what was promised can be sent, if some is.
    pub(super) fn promised_due(&self) -> Option<Duration> {
        let due = !self.backing.promised.is_empty() && self.backing.promised.is_wanted();
        due.then(|| self.keeps_at.saturating_duration_since(Instant::now()))
    }

    /// Sends a few pages that have been promised, if there is somebody to whom, and rests for as long.
    pub(super) fn keep_promises(&mut self) -> Result<()> {
        self.backing.ask_about_promised();
        let began = Instant::now();
        if began < self.keeps_at || !self.backing.promised.is_wanted() {
            return Ok(());
        }
        // What is free is for faults first.
        let may_send = self.backing.promised.steps() < STEPS_MAX && self.free.len() > STEP_PAGES;
        let sent = if may_send { self.send_promised(STEP_PAGES)? } else { 0 };
        let rest = match sent {
            0 => IDLE,
            _ if self.tier.is_waiting() => 3 * began.elapsed(),
            _ => began.elapsed(),
        };
        self.keeps_at = Instant::now() + rest;
        Ok(())
    }

    /// What the parent has written for this process, too, needs not be written again.
    pub(super) fn take_up_promised(&mut self) -> Result<()> {
        for _ in 0..TAKEN_UP_MAX {
            let Some((promise, kept)) = self.backing.promised.take_up() else { break };
            match self.page_of_promise(promise).filter(|_| kept) {
                Some(page) => {
                    self.backing.seals.note(promise.slot, self.table.hash(page));
                    self.table.set(page, self.table.get(page).with_slot(promise.slot));
                }
                None => self.backing.release_slot(promise.slot)?,
            }
        }
        Ok(())
    }

    /// A child that has more than its share, while its parent writes what both have packed: gives up what has been written, and packs others in its
    /// place, for a moment. The pool keeps its part. Returns how many frames are left for which there was no time.
    pub(super) fn give_written_back(&mut self, mut excess: usize, until: Instant) -> Result<usize> {
        self.take_up_promised()?;
        excess -= self.release_spare(excess);
        while excess > 0 {
            let some = excess.min(SHRINK_FRAMES);
            let target = self.pool_frames_max(self.local_frames.saturating_sub(some));
            let spare = some.min((self.free.len() + self.cached.len()).saturating_sub(self.reserve()));
            self.give_up_cached(spare.saturating_sub(self.free.len()));
            if let Some((frame, frames)) = self.free.take_run(spare) {
                self.drop_free(frame, frames)?;
                excess -= frames;
            } else if self.tier.pool.frames() > target {
                if self.release_pool_frames(some) == 0 && self.drop_written(EVICT_PAGES) == 0 {
                    return Ok(0);
                }
            } else if self.drop_written(EVICT_PAGES) == 0 || self.evict(PACK_PAGES)? == 0 {
                return Ok(0);
            }
            if Instant::now() >= until {
                return Ok(excess);
            }
        }
        Ok(0)
    }
}
