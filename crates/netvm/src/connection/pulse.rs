//! Whether the peer is alive.

use netvm_core::pulse::{KeepAlive, Pulse, Verdict};

use super::PeerSession;
use crate::error::Error;

/// What was seen of the peer at the last look.
#[derive(Default)]
pub(super) struct Seen {
    pulse: Pulse,
    received_bytes: u64,
    sent_bytes: u64,
    /// Bytes waited to be sent: when they move, somebody takes them.
    stuck: bool,
}

impl PeerSession {
    /// The node's thread, from time to time.
    pub(crate) fn look_for_life(&self, now_ms: u64, keep_alive: KeepAlive) {
        let mut state = self.lock();
        if state.broken.is_some() {
            return;
        }
        let (received, sent) = (state.session.received_bytes, state.session.sent_bytes);
        let stuck = state.session.has_output();
        let seen = &mut state.pulse;
        let heard = received != seen.received_bytes || (seen.stuck && sent != seen.sent_bytes);
        (seen.received_bytes, seen.sent_bytes, seen.stuck) = (received, sent, stuck);
        match seen.pulse.look(now_ms, heard, keep_alive) {
            Verdict::Fine => {}
            Verdict::Ask => {
                state.session.endpoint.ask_for_life();
                self.progress(&mut state);
                self.leave_rest(&mut state);
            }
            Verdict::Failed(after_ms) => {
                let lender = self.address.clone();
                self.break_off(&mut state, Error::Timeout { lender, what: "a sign of life", after_ms });
            }
        }
    }
}
