//! The tickets of a session's processes, on their side.

use alloc::vec::Vec;

use super::message::{GENERATION_BITS, Signal, Ticket};
use crate::limits::TICKETS_MAX;
use crate::notify::Notify;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Slot {
    generation: u32,
    used: bool,
    signal: Option<Signal>,
}

/// Gives out tickets and keeps their signals. A signal for an earlier use of a ticket is thrown away.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Waiters {
    slots: Vec<Slot>,
    free: Vec<u16>,
}

impl Waiters {
    /// A ticket; `None` when as many are in use as a session may have.
    pub fn take(&mut self) -> Option<Ticket> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < TICKETS_MAX => {
                self.slots.push(Slot::default());
                (self.slots.len() - 1) as u16
            }
            None => return None,
        };
        self.slots[usize::from(slot)].used = true;
        Some(self.renew(slot))
    }

    /// The next use of a number, for another wait under the same possession.
    pub fn renew(&mut self, slot: u16) -> Ticket {
        let state = &mut self.slots[usize::from(slot)];
        state.generation = (state.generation + 1) & ((1 << GENERATION_BITS) - 1);
        state.signal = None;
        Ticket { slot, generation: state.generation }
    }

    /// The ticket may be given out again. Only when no home knows it any more.
    pub fn give_back(&mut self, slot: u16) {
        let state = &mut self.slots[usize::from(slot)];
        assert!(state.used, "ticket {slot} given back twice");
        state.used = false;
        self.free.push(slot);
    }

    /// A home signals; false when nobody waits for that.
    pub fn deliver(&mut self, notify: Notify) -> bool {
        let Some((ticket, signal)) = Signal::from_notify(notify) else { return false };
        let Some(state) = self.slots.get_mut(usize::from(ticket.slot)) else { return false };
        // One signal per wait; a home that repeats itself changes nothing.
        let expected = state.used && state.generation == ticket.generation && state.signal.is_none();
        if expected {
            state.signal = Some(signal);
        }
        expected
    }

    /// Takes a ticket's signal.
    pub fn signal(&mut self, ticket: Ticket) -> Option<Signal> {
        let state = self.slots.get_mut(usize::from(ticket.slot))?;
        if state.generation == ticket.generation { state.signal.take() } else { None }
    }

    /// Tickets in use.
    pub fn used(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}
