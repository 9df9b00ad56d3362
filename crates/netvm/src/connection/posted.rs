//! Operations that nobody waits for where they are posted.

use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use netvm_core::endpoint::{Answer, OpError, PostError};

use super::gather::{SEND_BYTES, Step};
use super::{FOREVER, PATIENCE, PeerSession, State, TIMEOUT};
use crate::error::{Error, Result};
use crate::posted::{How, Target};
use crate::region::WriteOptions;
use crate::shm::{APPLIED, SHM_METHOD};

/// Who finds so many operations under way and no room waits until half of them have ended, but not longer than this.
const FULL_MIN: usize = 16;
const ROOM_WAIT: Duration = Duration::from_millis(1);

/// With so many writes that are not known to be applied the peer is asked.
const UNKNOWN_MAX: u64 = 1024;

/// Where the ends of posted operations are told, by the operation's slot.
#[derive(Default)]
pub(super) struct Targets(Vec<Option<(u64, &'static str, Target)>>);

impl Targets {
    fn set(&mut self, slot: u16, token: u64, what: &'static str, target: Target) {
        let slot = usize::from(slot);
        if self.0.len() <= slot {
            self.0.resize_with(slot + 1, || None);
        }
        self.0[slot] = Some((token, what, target));
    }

    /// The one of this very operation: its slot may be in use by another already.
    pub(super) fn take(&mut self, slot: u16, token: u64) -> Option<(&'static str, Target)> {
        let place = self.0.get_mut(usize::from(slot))?;
        place.take_if(|(other, ..)| *other == token).map(|(_, what, target)| (what, target))
    }
}

impl PeerSession {
    /// Posts an operation whose end is told to `target`.
    pub(crate) fn start(
        &self,
        how: How,
        what: &'static str,
        target: Target,
        mut post: impl FnMut(&mut State, u64) -> Result<u16, PostError>,
    ) -> Result<()> {
        let mut state = self.lock();
        // Ends that have not been told keep their slots' targets.
        self.collect(&mut state);
        let mut target = Some(target);
        let mut post = |state: &mut State, token| {
            let slot = post(state, token)?;
            if let Some(target) = target.take() {
                state.targets.set(slot, token, what, target);
            }
            Ok(())
        };
        let state = self.post_or_fail(state, how.waits, true, &mut post)?;
        self.launch(state, false, how.followed);
        Ok(())
    }

    /// Calls the peer at once; nobody wants the answer.
    pub(crate) fn call_unseen(&self, how: How, method: u32, body: &[u8]) -> Result<()> {
        let mut state = self.lock();
        self.collect(&mut state);
        let mut post = |state: &mut State, token| {
            let slot = state.session.endpoint.post_call(token, method, body.to_vec())?;
            state.targets.set(slot, token, "call", Target::Cell(Arc::default()));
            Ok(())
        };
        let state = self.post_or_fail(state, how.waits, false, &mut post)?;
        self.launch(state, true, how.followed);
        Ok(())
    }

    /// A peer that answers through memory says of no notice that it has been applied, and the window would fill up.
    pub(super) fn ask_what_is_applied(&self, state: &mut State) {
        let endpoint = &mut state.session.endpoint;
        let (posted, applied) = (endpoint.posted_writes(), endpoint.applied_writes());
        if state.broken.is_none() && posted - applied >= UNKNOWN_MAX && applied >= state.asked {
            let token = state.next_token;
            state.next_token += 1;
            // Full: at the next notice.
            if let Ok(slot) = endpoint.post_call(token, SHM_METHOD, APPLIED.to_vec()) {
                state.asked = posted;
                state.targets.set(slot, token, "call", Target::Cell(Arc::default()));
            }
        }
    }

    /// As [`PeerSession::start`], for a write whose bytes are copied: it has ended when it is posted.
    pub(crate) fn start_copied(
        &self,
        how: How,
        handle: u32,
        offset: u64,
        bytes: &[u8],
        options: WriteOptions,
        target: Target,
    ) -> Result<()> {
        let mut post =
            |state: &mut State, _| state.session.endpoint.post_write_copied(handle, offset, bytes, options);
        let state = self.post_or_fail(self.lock(), how.waits, false, &mut post)?;
        target.end(Ok(Answer::Done));
        self.launch(state, options.notify.is_some(), how.followed);
        Ok(())
    }

    fn post_or_fail<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        waits: bool,
        takes_slot: bool,
        post: &mut impl FnMut(&mut State, u64) -> Result<(), PostError>,
    ) -> Result<MutexGuard<'a, State>> {
        if waits {
            let (pending, full) = (state.session.endpoint.pending(), !state.session.endpoint.has_slots());
            if takes_slot && full && pending >= FULL_MIN && state.broken.is_none() {
                // Whoever waited for each slot would post, and the peer answer, one at a time.
                self.glance(&mut state);
                let mut ready = |_: &Self, state: &mut State| {
                    let enough = state.session.endpoint.pending() <= pending / 2;
                    (enough || state.broken.is_some()).then_some(Ok(()))
                };
                state = self.wait_for(state, ROOM_WAIT, PATIENCE, |state| &mut state.look, &mut ready).0;
            }
            return self.post(state, post).map(|(state, _)| state);
        }
        for attempt in 0..2 {
            if let Some(error) = &state.broken {
                return Err(error.clone());
            }
            let token = state.next_token;
            state.next_token += 1;
            match post(&mut state, token) {
                Ok(()) => {
                    self.publish(&mut state);
                    return Ok(state);
                }
                Err(PostError::Full) if attempt == 0 => drop(self.glance(&mut state)),
                Err(PostError::Full) => break,
                Err(error) => return Err(Error::Other(error.to_string())),
            }
        }
        Err(state.broken.clone().unwrap_or_else(|| Error::WouldBlock { lender: self.address.clone() }))
    }

    /// Sends what has been posted, now or together with what follows closely; the node's thread sends what the link does not take.
    fn launch(&self, mut state: MutexGuard<'_, State>, tells: bool, followed: bool) {
        let endpoint = &state.session.endpoint;
        let bytes = (0..endpoint.rails()).map(|rail| endpoint.queued_bytes(rail)).sum();
        if followed && bytes < SEND_BYTES && state.broken.is_none() {
            // In case nothing follows.
            return self.begin_ticks(&mut state);
        }
        if state.gather.queued(bytes, Instant::now) == Step::Leave && !tells {
            return;
        }
        if let Err(failure) = self.send_all(&mut state) {
            self.fail(&mut state, &failure);
        }
        if state.gather.sent(Instant::now) {
            self.begin_ticks(&mut state);
        }
        self.collect(&mut state);
        self.leave_rest(&mut state);
    }

    /// Whether nothing is left to send, or the node's thread comes by.
    #[cfg(test)]
    pub(crate) fn is_sent_by_somebody(&self) -> bool {
        let state = self.lock();
        state.ticking || !state.session.has_output()
    }

    /// The node's thread sends what the link has not taken.
    pub(super) fn leave_rest(&self, state: &mut State) {
        if state.broken.is_none() && state.session.has_output() {
            if state.led || state.leased {
                // Whoever leads may be asleep without watching for room.
                self.begin_ticks(state);
            } else {
                self.arm(state);
            }
        }
    }

    /// Waits until `ended`, for as long as a peer may take to answer; then the session is over.
    pub(crate) fn wait_posted(&self, what: &'static str, mut ended: impl FnMut() -> bool) -> Result<()> {
        let mut state = self.lock();
        self.glance(&mut state);
        self.wait_until(state, what, TIMEOUT, |_, _| ended().then_some(Ok(()))).1
    }

    /// As [`PeerSession::wait_posted`], for at most `limit`; the session goes on.
    pub(crate) fn wait_posted_for(&self, limit: Duration, mut ended: impl FnMut() -> bool) -> Result<()> {
        let mut state = self.lock();
        self.glance(&mut state);
        let mut ready = |_: &Self, _: &mut State| ended().then_some(Ok(()));
        let limit = limit.min(FOREVER);
        let (state, waited) = self.wait_for(state, limit, TIMEOUT, |state| &mut state.look, &mut ready);
        waited.unwrap_or_else(|| state.broken.clone().map_or(Ok(()), Err))
    }

    /// What an operation's end means.
    pub(super) fn outcome(
        &self,
        state: &State,
        what: &'static str,
        result: Result<Answer, OpError>,
    ) -> Result<Answer> {
        let lender = || self.address.clone();
        let broken =
            || state.broken.clone().unwrap_or_else(|| Error::Other("the session has ended".to_owned()));
        result.map_err(|error| match error {
            OpError::Lost => broken(),
            OpError::Unknown => {
                Error::OutcomeUnknown { lender: lender(), what, reason: broken().to_string() }
            }
            OpError::Refused(code) => Error::Op { lender: lender(), what, code },
        })
    }
}
