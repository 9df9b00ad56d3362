//! Whether the peer is alive, and each of its rails.

use std::time::Duration;

use netvm_core::pulse::{KeepAlive, Pulse, Verdict};
use netvm_core::wire::Status;

use super::{PeerSession, State};
use crate::error::Error;

/// What was seen of one rail at the last look.
#[derive(Clone, Default)]
pub(super) struct Seen {
    pulse: Pulse,
    received_bytes: u64,
    sent_bytes: u64,
    /// Bytes waited to be sent: when they move, somebody takes them.
    stuck: bool,
}

impl PeerSession {
    /// The node's thread, from time to time.
    pub(crate) fn look_after(&self, now_ms: u64, keep_alive: KeepAlive, page_limit: Duration) {
        let mut state = self.lock();
        if state.broken.is_some() {
            return;
        }
        match self.refuse_overdue(&mut state, now_ms, page_limit) {
            Ok(()) => self.look_for_life(&mut state, now_ms, keep_alive),
            Err(failure) => self.fail(&mut state, &failure),
        }
    }

    fn look_for_life(&self, state: &mut State, now_ms: u64, keep_alive: KeepAlive) {
        let rails = state.session.endpoint.rails();
        state.pulses.resize(rails, Seen::default());
        // Who does not listen blames nobody, and says that he is alive: the peer is not heard either.
        let is_stalled = state.session.is_stalled();
        let (mut asks, mut dead) = (false, None);
        for rail in 0..rails {
            let (received, sent) = state.session.traffic(rail);
            let stuck = state.session.has_output_on(rail);
            let seen = &mut state.pulses[rail];
            let heard = received != seen.received_bytes || (seen.stuck && sent != seen.sent_bytes);
            (seen.received_bytes, seen.sent_bytes, seen.stuck) = (received, sent, stuck);
            match seen.pulse.look(now_ms, heard || is_stalled, keep_alive) {
                Verdict::Fine if !is_stalled => {}
                Verdict::Fine => {
                    state.session.endpoint.show_life(rail);
                    asks = true;
                }
                Verdict::Ask => {
                    state.session.endpoint.ask_for_life(rail);
                    asks = true;
                }
                Verdict::Failed(after_ms) => dead = dead.or(Some((rail, after_ms))),
            }
        }
        if let Some((rail, after_ms)) = dead {
            self.give_up(state, rail, after_ms, now_ms, keep_alive);
        } else if asks {
            self.progress(state);
            self.leave_rest(state);
        }
    }

    /// A rail is silent. When others are not, it is cut: the session ends all the same, and the peer is told over those that live.
    fn give_up(&self, state: &mut State, rail: usize, after_ms: u64, now_ms: u64, keep_alive: KeepAlive) {
        let lender = self.address.clone();
        let is_alive = |seen: &Seen| seen.pulse.silent_ms(now_ms) <= keep_alive.timeout_ms / 2;
        if !state.pulses.iter().any(is_alive) {
            return self.break_off(state, Error::Timeout { lender, what: "a sign of life", after_ms });
        }
        let (number, rails, seconds) = (rail + 1, state.pulses.len(), after_ms as f64 / 1000.0);
        let reason = format!(
            "rail {number} of {rails} is cut: no sign of life on that connection for {seconds:.1} s, though there was on others"
        );
        state.session.endpoint.goodbye(Status::Stopping, &reason);
        // What cannot be sent now is not worth waiting for.
        let _ = self.send_all(state);
        self.break_off(state, Error::LenderLost { lender, reason });
    }
}
