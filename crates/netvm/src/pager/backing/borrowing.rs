//! Slabs for pages that leave, and what is done when no lender has any.

use super::{ASK_INTERVAL, Backing, LOOK_INTERVAL};
use crate::error::{Error, Result};
use crate::lender::RETRY;
use crate::pager::error::{PagerError, system};
use netvm_core::residency::{Copies, SlabCopy};
use std::time::{Duration, Instant};

/// Who was needed so long ago is needed anew.
const NEEDED_STILL: Duration = Duration::from_millis(200);

impl Backing {
    /// So few lenders are left that no page can leave. None has left before: it would be lost.
    pub(in crate::pager) fn is_stranded(&self) -> bool {
        self.slots.alive() < self.slots.redundancy().need()
    }

    /// How long a lender that is lost is waited for where it is needed: for at least one more try to reach it.
    fn comeback_patience(&self) -> Duration {
        self.timeout.max(RETRY + RETRY / 4)
    }

    /// A page must leave, and too few lenders are there: called again and again, it looks for lost ones.
    ///
    /// # Errors
    /// When they were needed for long enough.
    pub(in crate::pager) fn need_lenders(&mut self) -> Result<()> {
        let now = Instant::now();
        let began = match self.needed {
            Some((began, last)) if now.saturating_duration_since(last) < NEEDED_STILL => began,
            _ => now,
        };
        self.needed = Some((began, now));
        if now.saturating_duration_since(began) > self.comeback_patience() {
            return Err(self.too_few(None));
        }
        self.look()
    }

    /// A frame was found without them.
    pub(in crate::pager) fn need_is_met(&mut self) {
        self.needed = None;
    }

    /// Why no lender takes a page.
    pub(in crate::pager) fn too_few(&self, refused: Option<Error>) -> Error {
        let losses = self.sides.losses();
        match refused {
            Some(refused) if losses.is_empty() => refused,
            Some(refused) => PagerError::TooFewLenders { why: format!("{losses}; {refused}") }.into(),
            None if losses.is_empty() => PagerError::NoLender.into(),
            None if self.slots.alive() == 0 => PagerError::CopiesLost { pages: 0, why: losses }.into(),
            None => PagerError::TooFewLenders { why: losses }.into(),
        }
    }

    /// Borrows one. Where none is to be had, lost lenders are waited for: pages are on their way out.
    pub(super) fn borrow_slab(&mut self) -> Result<()> {
        let mut until = None;
        loop {
            let Some(refused) = self.try_to_borrow()? else { return Ok(()) };
            if self.promised.is_reserving() {
                return Err(self.too_few(refused));
            }
            if self.stop_promises()? {
                self.gather(None)?;
                std::thread::sleep(LOOK_INTERVAL);
                continue;
            }
            // From now on: to find out that somebody was lost may have taken long.
            let until = *until.get_or_insert_with(|| Instant::now() + self.comeback_patience());
            let (alive, mut waits) = (self.slots.alive(), self.sides.any_lost());
            while waits && self.slots.alive() <= alive {
                waits = Instant::now() < until;
                self.gather(None)?;
                self.look()?;
                std::thread::sleep(LOOK_INTERVAL);
            }
            if !waits {
                return Err(self.too_few(refused));
            }
        }
    }

    /// `None` when there is another slab. Else who refused, if anybody did.
    fn try_to_borrow(&mut self) -> Result<Option<Option<Error>>> {
        let (mut copies, mut refused) = (Copies::default(), None);
        // Nobody is left to ask who has not refused, perhaps long ago, or would rather see others lend.
        let mut press = false;
        let now = Instant::now();
        let first = self.slots.slabs();
        // A dearer lender is next: perhaps a cheaper one has something again.
        if now >= self.next_ask
            && self.slots.candidate(&[]).is_some_and(|lender| self.slots.is_overflow(lender))
        {
            self.next_ask = now + ASK_INTERVAL;
            self.slots.ask_again();
        }
        while copies.as_slice().len() < self.replicas {
            let Some(lender) = self.slots.candidate(copies.as_slice()) else {
                if press || self.promised.is_reserving() {
                    break;
                }
                press = true;
                self.slots.ask_again();
                continue;
            };
            match self.ask_for_slab(lender, press)? {
                // It was lost meanwhile, and is no candidate any more.
                None if self.slots.is_alive(lender) => break,
                None => {}
                Some(Ok(slab)) => {
                    // Parity by turns, so that all are read from.
                    let is_free =
                        |part: &usize| copies.as_slice().iter().all(|copy| usize::from(copy.part) != *part);
                    let mut parts = (0..self.replicas).map(|turn| (first + turn) % self.replicas);
                    let part = parts.find(is_free).unwrap_or(0);
                    copies.push(SlabCopy { lender, slab, part: part as u8 });
                }
                Some(Err(error @ Error::LenderFull { .. })) => {
                    self.slots.lender_full(lender);
                    refused = Some(error);
                }
                Some(Err(error)) => self.lose(lender, error)?,
            }
            // One that had answered may have been lost while the next was waited for.
            copies.retain(|copy| self.slots.is_alive(copy.lender));
        }
        let count = copies.as_slice().len();
        // After a loss fewer copies are better than none; before, the lenders are too small for what was asked.
        if count == self.replicas || (count >= self.slots.redundancy().need() && self.sides.any_lost()) {
            if count < self.replicas {
                self.poor_since.get_or_insert_with(Instant::now);
            }
            return match self.slots.add(copies.as_slice()) {
                Some(_) => Ok(None),
                None => Err(PagerError::SlotsExhausted.into()),
            };
        }
        copies.as_slice().iter().for_each(|&copy| self.slots.not_wanted(copy));
        self.slots.ask_again();
        // Better a slab that a dead child has let go than none at all.
        if self.thaw_some()? {
            return Ok(None);
        }
        Ok(Some(refused))
    }

    /// Asks a lender for a slab and waits, while others are heard: `None` when it is lost instead.
    fn ask_for_slab(&mut self, lender: u32, press: bool) -> Result<Option<Result<u32>>> {
        let mut slot = None;
        loop {
            let Some(borrower) = self.sides.live(lender) else { return Ok(None) };
            match borrower.try_borrow_slab(&mut slot, press) {
                Ok(None) => {}
                Ok(Some(slab)) => return Ok(Some(Ok(slab))),
                Err(error) => return Ok(Some(Err(error))),
            }
            if !self.gather(Some(lender))? {
                self.wait_for_lenders()?;
            }
            self.check_answers()?;
        }
    }

    /// Sends and receives what can be, but for one lender; what has ended is kept for the next [`Backing::poll`]. Whether something has, or was received:
    /// what it makes room for may be what somebody waits for.
    pub(super) fn gather(&mut self, but: Option<u32>) -> Result<bool> {
        let mut any = false;
        for lender in (0..self.sides.len()).filter(|&lender| Some(lender) != but) {
            let Some(borrower) = &mut self.sides[lender].borrower else { continue };
            let (mut done, received_bytes) = (std::mem::take(&mut self.scratch), borrower.received_bytes());
            let result = borrower.poll(&mut done);
            any |= !done.is_empty() || borrower.received_bytes() != received_bytes;
            self.inbox.extend(done.drain(..).map(|completion| (lender, completion)));
            self.scratch = done;
            if let Err(error) = result {
                self.lose(lender, error)?;
            }
        }
        Ok(any)
    }

    /// Until one of them sends something or can be sent something, or it is time to look at who is silent.
    pub(super) fn wait_for_lenders(&self) -> Result<()> {
        let mut fds = Vec::with_capacity(self.sides.len() as usize);
        self.poll_fds(&mut fds);
        netvm_sys::thread::poll(&mut fds, Some(self.patience())).map_err(|e| system("poll", e))?;
        Ok(())
    }
}
