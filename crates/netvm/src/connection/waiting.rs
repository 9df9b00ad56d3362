//! Waiting for what a peer does.

use std::os::fd::AsRawFd;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use netvm_core::endpoint::Answer;
use netvm_sys::epoll::Interest;

use super::{PATIENCE, PeerSession, State, TIMEOUT};
use crate::error::{Error, Result};
use crate::link::Link;
use crate::link::spin::Trial;

/// A wait that begins so soon after the last one ended belongs to a series.
const SERIES_GAP: Duration = Duration::from_micros(20);
/// Waits of a series before the node's thread is kept out between them too.
const SERIES_MIN: u32 = 4;
/// One that lives, but does not answer this operation, has failed after so many times that. The node's thread finds one that gives no
/// sign of life.
const ROUNDS_ALIVE: u32 = 6;
/// Who wakes up so late was stopped himself, or had no CPU: that time does not count.
const LATE: Duration = Duration::from_secs(1);

impl PeerSession {
    fn timeout(&self, state: &mut State, what: &'static str, rounds: u32) -> Error {
        let after_ms = TIMEOUT.as_millis() as u64 * u64::from(rounds);
        let error = Error::Timeout { lender: self.address.clone(), what, after_ms };
        // Its answer could still come, into memory that is in other use by then.
        self.break_off(state, error.clone());
        error
    }

    /// Waits for an operation.
    pub(crate) fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        token: u64,
        what: &'static str,
    ) -> Result<(MutexGuard<'a, State>, Answer)> {
        // Of several that are waited for the first may have brought the ends of all.
        if !state.ended.contains_key(&token) {
            self.glance(&mut state);
        }
        let (state, result) =
            self.wait_until(state, what, TIMEOUT, |peer, state| match state.ended.remove(&token) {
                Some(result) => Some(peer.outcome(state, what, result)),
                None => state.broken.clone().map(Err),
            });
        result.map(|answer| (state, answer))
    }

    /// As [`PeerSession::wait`], for a write: it has ended when it is sent, and to look for what the peer has sent would be in vain.
    pub(crate) fn wait_sent<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        token: u64,
    ) -> Result<(MutexGuard<'a, State>, Answer)> {
        if state.broken.is_none()
            && let Err(failure) = self.send_all(&mut state)
        {
            self.fail(&mut state, &failure);
        }
        self.collect(&mut state);
        self.wait(state, token, "write")
    }

    /// Waits until `ready` has something. The first who waits waits on the links (and so saves a change of threads), the others on
    /// him, and on news of completions only: who waits for anything else looks himself after `patience`. When that takes too long the session is broken off and `ready` asked for the last time.
    pub(super) fn wait_until<'a, R>(
        &'a self,
        state: MutexGuard<'a, State>,
        what: &'static str,
        patience: Duration,
        mut ready: impl FnMut(&Self, &mut State) -> Option<Result<R>>,
    ) -> (MutexGuard<'a, State>, Result<R>) {
        let mut state = state;
        let (mut rounds, mut before): (u32, Option<Instant>) = (0, None);
        loop {
            match self.wait_for(state, TIMEOUT, patience, |state| &mut state.look, &mut ready) {
                (state, Some(result)) => return (state, result),
                (waited, None) => state = waited,
            }
            if let Some(error) = state.broken.clone() {
                let result = ready(self, &mut state).unwrap_or(Err(error));
                return (state, result);
            }
            let now = Instant::now();
            let late = before.is_some_and(|before| now.duration_since(before) > TIMEOUT + LATE);
            before = Some(now);
            rounds += u32::from(!late);
            if rounds == ROUNDS_ALIVE {
                let error = self.timeout(&mut state, what, rounds);
                let result = ready(self, &mut state).unwrap_or(Err(error));
                return (state, result);
            }
        }
    }

    /// As [`PeerSession::wait_until`]; nothing after `limit`, and the session goes on. Nothing either as soon as it has ended.
    pub(super) fn wait_for<'a, R>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        limit: Duration,
        patience: Duration,
        trial: fn(&mut State) -> &mut Trial,
        ready: &mut impl FnMut(&Self, &mut State) -> Option<Result<R>>,
    ) -> (MutexGuard<'a, State>, Option<Result<R>>) {
        // The clock is asked only by those who must wait.
        let mut deadline = None;
        let mut leads = false;
        let (mut budget, mut look_until, mut came) = (Duration::ZERO, None, false);
        let mut last = None;
        let result = loop {
            if let Some(result) = ready(self, &mut state) {
                if look_until.is_some() {
                    trial(&mut state).note(true);
                }
                break Some(result);
            }
            // Nothing comes any more, and the links have been closed.
            if state.broken.is_some() {
                break None;
            }
            let now = *last.insert(Instant::now());
            if std::mem::take(&mut came) {
                // Of what is long there is more to come.
                look_until = Some(now + budget);
            }
            let left = deadline.get_or_insert(now + limit).saturating_duration_since(now);
            if left.is_zero() {
                break None;
            }
            let room = state.session.has_output();
            if !leads && state.led {
                // The leader may have gone to sleep before our bytes were stuck: then we look after them.
                let patience = if room { PATIENCE } else { patience }.min(left);
                state.followers += 1;
                let wait = self.changed.wait_timeout(state, patience);
                state = wait.unwrap_or_else(PoisonError::into_inner).0;
                state.followers -= 1;
                self.progress(&mut state);
                continue;
            }
            if !leads {
                (leads, state.led) = (true, true);
                if !state.leased {
                    self.set_interest(&mut state, Interest { readable: false, writable: false });
                }
                let is_series =
                    state.waited.is_some_and(|end| now.saturating_duration_since(end) <= SERIES_GAP);
                state.series = if is_series { state.series + 1 } else { 0 };
                budget = trial(&mut state).budget();
                look_until = (!budget.is_zero()).then(|| now + budget);
            }
            if let Some(until) = look_until {
                if now < until {
                    // Others get the lock in between.
                    drop(state);
                    std::hint::spin_loop();
                    state = self.lock();
                    came = self.glance(&mut state);
                    continue;
                }
                look_until = None;
                trial(&mut state).note(false);
            }
            let stalled = state.session.is_stalled();
            let input = if stalled { 0 } else { libc::POLLIN };
            let events = input | if room { libc::POLLOUT } else { 0 };
            let mut fds = [libc::pollfd { fd: -1, events, revents: 0 }; netvm_core::limits::RAILS_MAX];
            let rails = state.session.endpoint.rails();
            // A hang-up would be reported again and again, and is seen when more may be received.
            let watched = if stalled && !room { 0 } else { rails };
            for (rail, fd) in fds.iter_mut().enumerate().take(watched) {
                fd.fd = state.session.link(rail).wait_fd().as_raw_fd();
            }
            drop(state);
            // Should the session end meanwhile, its descriptors may be closed or others': a spurious wake-up at worst.
            // Nobody tells when there is room for what is to be received.
            #[cfg(test)]
            self.sleeps.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let pause = if stalled { PATIENCE } else { Duration::from_millis(100) };
            let waited = netvm_sys::thread::poll(&mut fds[..rails], Some(left.min(pause)));
            state = self.lock();
            last = Some(Instant::now());
            if let Err(error) = waited {
                break Some(Err(Error::system("wait for a peer", &error)));
            }
            for (rail, _) in fds[..rails].iter().enumerate().filter(|(_, fd)| fd.revents != 0) {
                state.session.stir(rail);
            }
            self.glance(&mut state);
        };
        if leads {
            state.led = false;
            state.waited = last;
            state.visits += 1;
            if state.leased || state.series >= SERIES_MIN {
                if !std::mem::replace(&mut state.leased, true) && state.broken.is_none() {
                    self.set_interest(&mut state, Interest { readable: false, writable: false });
                }
                self.begin_ticks(&mut state);
            } else {
                self.watch_again(&mut state);
            }
            self.tell_followers(&state);
        }
        (state, result)
    }
}
