//! Who receives: the node's thread, whoever polls, or whoever waits. docs/design/one-sided.md has who drives progress.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use netvm_sys::epoll::Interest;

use super::{FINDS_MIN, LEASE_TICK, LEASE_TICK_MAX, PeerSession, QUIET_POLLS, State, gather};
use crate::link::Link;

impl PeerSession {
    /// The node's thread: time to send what has been gathered, and to come by where it does not watch. Returns when to come again.
    pub(crate) fn tick(&self) -> Option<Duration> {
        let pace = Duration::from_micros(self.pace_us.load(Ordering::Relaxed).into());
        // Who holds the lock sends and receives himself.
        let Ok(mut state) = self.state.try_lock() else { return Some(pace.max(gather::TICK)) };
        if state.session.has_output()
            && state.broken.is_none()
            && let Err(failure) = self.send_all(&mut state)
        {
            self.fail(&mut state, &failure);
        }
        let sent_all = !state.session.has_output();
        let gathers = state.gather.tick(sent_all);
        state.ride.tick(Instant::now);
        let mut busy = false;
        if state.leased && !state.led {
            // Who came by since the last tick received what there was.
            busy = std::mem::take(&mut state.visits) > 0;
            if !busy {
                self.progress(&mut state);
                self.end_lease(&mut state);
            }
        }
        // Whoever leads may be asleep without watching for room.
        let stuck = state.led && !sent_all;
        let lease = (state.leased || stuck).then(|| match busy {
            // What is left for the next request must not wait for long.
            true if !state.ride.is_on() => (pace * 2).clamp(LEASE_TICK, LEASE_TICK_MAX),
            _ => LEASE_TICK,
        });
        let next = gathers.or(lease).filter(|_| state.broken.is_none());
        match next {
            Some(pace) => self.pace_us.store(pace.as_micros() as u32, Ordering::Relaxed),
            None => {
                state.ticking = false;
                // The link may have taken some of it only.
                self.leave_rest(&mut state);
            }
        }
        next
    }

    pub(super) fn begin_ticks(&self, state: &mut State) {
        if !std::mem::replace(&mut state.ticking, true) {
            self.shared.tick_for(self.id);
        }
    }

    fn begin_lease(&self, state: &mut State) {
        if !state.leased {
            state.leased = true;
            #[cfg(test)]
            self.leases.fetch_add(1, Ordering::Relaxed);
            self.set_interest(state, Interest { readable: false, writable: false });
            if !state.ticking {
                // The first tick may find the session locked.
                self.pace_us.store(LEASE_TICK.as_micros() as u32, Ordering::Relaxed);
            }
            self.begin_ticks(state);
        }
    }

    fn end_lease(&self, state: &mut State) {
        if state.leased {
            state.leased = false;
            (state.series, state.waited) = (0, None);
            self.watch_again(state);
        }
    }

    /// The node's thread watches the links again.
    pub(super) fn watch_again(&self, state: &mut State) {
        if state.broken.is_none() {
            state.watches_room = state.session.has_output();
            state.watches_no_input = state.session.is_stalled();
            let (readable, writable) = (!state.watches_no_input, state.watches_room);
            self.set_interest(state, Interest { readable, writable });
        }
    }

    /// Sends and receives for whoever waits for something that a peer does.
    pub(crate) fn poll(&self) {
        // Who holds the lock does it.
        let Ok(mut state) = self.state.try_lock() else { return };
        if state.broken.is_none() && !state.led {
            self.begin_lease(&mut state);
            self.visit(&mut state);
        } else {
            // Who leads receives by himself, and of a broken one nothing comes: else all others that are quiet would be left alone for it.
            self.quiet.store(QUIET_POLLS, Ordering::Relaxed);
        }
    }

    /// The same at a peer that is quiet: unless the node's thread watches it. To begin and to end leases all the time costs far more than looks.
    pub(crate) fn poll_leased(&self) {
        if let Ok(mut state) = self.state.try_lock()
            && state.leased
            && state.broken.is_none()
            && !state.led
        {
            self.visit(&mut state);
        }
    }

    fn visit(&self, state: &mut State) {
        state.visits += 1;
        if !self.glance(state) {
            self.quiet.store(self.quiet.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
        }
    }

    /// Nothing has come for so many polls that it is not worth looking each time.
    pub(crate) fn is_quiet(&self) -> bool {
        self.quiet.load(Ordering::Relaxed) >= QUIET_POLLS
    }

    /// Nobody polls any more.
    pub(crate) fn stop_polling(&self) {
        let mut state = self.lock();
        if !state.led {
            self.end_lease(&mut state);
        }
    }

    /// The node's thread: something is ready, told by the number of the rail.
    pub(crate) fn serve(&self, id: u64) {
        let mut state = self.lock();
        if !state.led && !state.leased {
            state.session.stir(id.wrapping_sub(self.id) as usize);
            self.glance(&mut state);
            self.arm(&mut state);
        }
    }

    /// As [`PeerSession::serve`], by the node's thread without having been told that there is something. Whether there was; until it calls
    /// [`PeerSession::watch_output`] it must look again.
    pub(crate) fn look(&self) -> bool {
        let Ok(mut state) = self.state.try_lock() else { return false };
        if state.led || state.leased || state.broken.is_some() {
            state.finds = 0;
            return false;
        }
        let sent = |state: &State| {
            let rails = 0..state.session.endpoint.rails();
            rails.map(|rail| state.session.traffic(rail).1).sum::<u64>()
        };
        let before = sent(&state);
        let received = self.glance(&mut state);
        let found = received || state.broken.is_none() && sent(&state) != before;
        state.finds += u32::from(found);
        if state.finds == FINDS_MIN && !state.unwatched && state.broken.is_none() {
            // As under a lease.
            state.unwatched = true;
            for rail in 0..state.session.endpoint.rails() {
                let _ = self.shared.epoll.remove(state.session.link(rail).wait_fd());
            }
        }
        found
    }

    /// The node's thread does not look by itself any more.
    pub(crate) fn watch_output(&self) {
        let mut state = self.lock();
        state.finds = 0;
        if state.led || state.leased {
            return;
        }
        match state.unwatched {
            true => self.watch_again(&mut state),
            false => self.arm(&mut state),
        }
    }

    /// Tells the node's thread what to watch for.
    pub(super) fn arm(&self, state: &mut State) {
        let (room, stalled) = (state.session.has_output(), state.session.is_stalled());
        if state.broken.is_none() && (room, stalled) != (state.watches_room, state.watches_no_input) {
            (state.watches_room, state.watches_no_input) = (room, stalled);
            self.set_interest(state, Interest { readable: !stalled, writable: room });
        }
    }

    pub(super) fn set_interest(&self, state: &mut State, interest: Interest) {
        // A hang-up is reported whatever one watches for, again and again; it is seen when more may be received. And under a lease the
        // kernel need not look at each arrival whom to wake.
        let is_blind =
            !interest.writable && !interest.readable && (state.leased || state.session.is_stalled());
        let was_blind = std::mem::replace(&mut state.unwatched, is_blind);
        for rail in 0..state.session.endpoint.rails() {
            let (fd, id) = (state.session.link(rail).wait_fd(), self.id + rail as u64);
            let _ = match (was_blind, is_blind) {
                (false, false) => self.shared.epoll.change(fd, id, interest),
                (false, true) => self.shared.epoll.remove(fd),
                (true, false) => self.shared.epoll.add(fd, id, interest),
                (true, true) => Ok(()),
            };
        }
    }
}
