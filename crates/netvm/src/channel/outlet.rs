//! What receivers have told the senders of one session.

use std::collections::VecDeque;

use netvm_core::channel::{Notice, Told};
use netvm_core::limits::OUTLETS_MAX;
use netvm_core::notify::Notify;

/// What a sender has heard.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Heard {
    /// The last position, taken by whoever looks.
    pub(crate) position: Option<u32>,
    pub(crate) ended: bool,
}

/// By the slot of the sender.
#[derive(Debug, Default)]
pub(crate) struct Outlets {
    slots: Vec<Heard>,
    /// Used again as late as possible: something may be under way to the last user.
    free: VecDeque<u16>,
}

impl Outlets {
    pub(crate) fn take(&mut self) -> Option<u16> {
        if self.slots.len() < OUTLETS_MAX {
            self.slots.push(Heard::default());
            return Some((self.slots.len() - 1) as u16);
        }
        self.free.pop_front()
    }

    pub(crate) fn give_back(&mut self, slot: u16) {
        self.free.push_back(slot);
    }

    /// Forgets what was told to the last user of a slot.
    pub(crate) fn clear(&mut self, slot: u16) {
        self.slots[usize::from(slot)] = Heard::default();
    }

    /// A receiver tells; false when nobody is told.
    pub(crate) fn deliver(&mut self, notice: Notice) -> bool {
        let Some(heard) = self.slots.get_mut(usize::from(notice.slot)) else { return false };
        match notice.told {
            Told::Position(units) => heard.position = Some(units),
            Told::Ended => heard.ended = true,
            Told::Commit | Told::Close => return false,
        }
        true
    }

    /// What a sender has not heard yet.
    pub(crate) fn hear(&mut self, slot: u16) -> Heard {
        let heard = &mut self.slots[usize::from(slot)];
        Heard { position: heard.position.take(), ended: heard.ended }
    }
}

/// Notices that wait for room in the window: of several for one slot the last one tells all.
#[derive(Debug, Default)]
pub(crate) struct Notices(VecDeque<Notice>);

impl Notices {
    pub(crate) fn push(&mut self, notice: Notice) {
        match self.0.iter_mut().find(|other| other.slot == notice.slot) {
            Some(other) if other.told == Told::Ended => {}
            Some(other) => *other = notice,
            None => self.0.push_back(notice),
        }
    }

    pub(crate) fn first(&self) -> Option<Notify> {
        self.0.front().map(|notice| notice.notify())
    }

    pub(crate) fn pop(&mut self) {
        self.0.pop_front();
    }
}
