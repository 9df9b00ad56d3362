//! Locks and semaphores whose word is mapped: taken and given back, used up and made without asking anybody, where nobody else wants them.
//! `netvm_core::sync` has the word.

use std::sync::Arc;

use netvm_core::atomic::{Atomic, AtomicOp, Width};
use netvm_core::sync::{CLAIMED, Near, Op, Reply, Seen, Word};
use netvm_sys::mapping::Mapping;

use super::{Kind, Object, SyncError};
use crate::shm::mapped::Mapped;

/// Who finds a lock taken and free by turns so often leaves it to the others.
const LOCK_ROUNDS_MAX: u32 = 16;

/// Who changes a number of permits takes nothing from those who came first. The home would have to be asked, and everybody else, too, until it has
/// answered; hardly anybody ever gets so far.
const PERMIT_ROUNDS_MAX: u32 = 1000;

/// The word, at its home.
#[derive(Debug)]
pub(crate) struct LockWord(pub(crate) Arc<Mapping>);

impl LockWord {
    fn change(&self, op: AtomicOp, operand: u64) -> u64 {
        let atomic = Atomic::new(op, Width::Eight, operand);
        // The first word of a page of our own is there and aligned.
        crate::atomic::execute(&self.0.shared(), 0, &atomic).unwrap_or(CLAIMED)
    }
}

impl Word for LockWord {
    fn claim(&mut self) -> u64 {
        self.change(AtomicOp::Or, CLAIMED)
    }

    fn put(&mut self, word: u64) {
        self.change(AtomicOp::Swap, word);
    }
}

/// What came of taking a lock by its word.
pub(super) enum Taken {
    /// It is ours, with that word.
    Ours(u64),
    /// Another process of this host has it so.
    Others,
    /// The home decides, or there is no word.
    Home,
}

impl Object {
    /// Maps the word and asks for a seat, where that can be.
    pub(super) fn come_near(&mut self) -> Result<(), SyncError> {
        if matches!(self.kind, Kind::Monitor { .. } | Kind::Semaphore { .. }) && self.region.map_word() {
            let nobody = super::Ticket { slot: 0, generation: 0 };
            // One that knows no such thing, or has no seat left, is asked for each turn.
            if let Reply::Done(near) = self.call(nobody, Op::Near)? {
                self.near = Near::from_u64(near);
            }
        }
        Ok(())
    }

    /// Takes the lock, if its word says that it is free; or uses up permits, if they are there. Who wants to own some asks the home.
    pub(super) fn take_near(&self, count: u32, owned: bool) -> Taken {
        let (Some(near), Some(mapped)) = (&self.near, self.region.mapped(false)) else { return Taken::Home };
        let is_semaphore = matches!(self.kind, Kind::Semaphore { .. });
        if is_semaphore && owned {
            return Taken::Home;
        }
        let peer = self.region.peer();
        // Read before the share's flag is looked at, with which the change begins: see the page of the word.
        let load = Atomic::new(AtomicOp::Load, Width::Eight, 0);
        let (rounds_max, otherwise) =
            if is_semaphore { (PERMIT_ROUNDS_MAX, Taken::Home) } else { (LOCK_ROUNDS_MAX, Taken::Others) };
        // Each round that fails is one in which somebody else took it or gave it back.
        for round in 0..rounds_max {
            let Some(seen) = mapped.atomic(peer, 0, &load) else { return Taken::Home };
            let see = if is_semaphore { Near::see_permits(seen, count) } else { near.see(seen) };
            let ours = match see {
                Seen::Free(ours) => ours,
                Seen::Taken => return Taken::Others,
                Seen::Home => return Taken::Home,
            };
            match mapped.atomic(peer, 0, &Atomic::compare_swap(Width::Eight, seen, ours)) {
                Some(was) if was == seen => return Taken::Ours(ours),
                Some(_) => step_aside(round),
                None => return Taken::Home,
            }
        }
        otherwise
    }

    /// Gives it back; false when the home must be told: somebody waits, or writes of ours are under way over the links, which come first.
    pub(super) fn give_back_near(&self, word: u64) -> bool {
        let (Some(near), Some(mapped)) = (&self.near, self.mapped_in_order()) else { return false };
        let give = Atomic::compare_swap(Width::Eight, word, near.give_back(word));
        mapped.atomic(self.region.peer(), 0, &give) == Some(word)
    }

    /// Makes permits: how many are free then. `None` when the home must be told, as of a lock that is given back.
    pub(super) fn add_near(&self, count: u32) -> Option<u32> {
        self.near?;
        let (peer, mapped) = (self.region.peer(), self.mapped_in_order()?);
        for round in 0..PERMIT_ROUNDS_MAX {
            let seen = mapped.atomic(peer, 0, &Atomic::new(AtomicOp::Load, Width::Eight, 0))?;
            let (more, free) = Near::more_permits(seen, count)?;
            if mapped.atomic(peer, 0, &Atomic::compare_swap(Width::Eight, seen, more))? == seen {
                return Some(free);
            }
            step_aside(round);
        }
        None
    }

    /// The mapped word, where what is done there comes after all that was written before.
    fn mapped_in_order(&self) -> Option<&Mapped> {
        let mapped = self.region.mapped(true);
        if mapped.is_none()
            && let Some(mapped) = self.region.mapped(false)
        {
            // Or all later ones would have to go to the home, too.
            mapped.ask_what_is_applied(self.region.peer(), false);
        }
        mapped
    }
}

/// After a round that has failed: others that change the word without a pause may be in step with us, and would come first each time.
fn step_aside(round: u32) {
    (0..round % 61).for_each(|_| std::hint::spin_loop());
}
