//! What receivers have told the senders of one session.

use std::collections::VecDeque;

use netvm_core::channel::{Notice, Told, farther};
use netvm_core::limits::OUTLETS_MAX;
use netvm_core::notify::Notify;

/// What a sender has heard.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Heard {
    /// The last position, taken by whoever looks.
    pub(crate) position: Option<u32>,
    /// The same of what came with requests.
    pub(crate) placed: Option<u32>,
    pub(crate) ended: bool,
}

impl Heard {
    pub(crate) fn is_something(&self) -> bool {
        self.ended || self.position.is_some() || self.placed.is_some()
    }
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
        let slot = self.free.pop_front()?;
        // What was told to its last user; the next one may be told something as soon as it has asked.
        self.slots[usize::from(slot)] = Heard::default();
        Some(slot)
    }

    pub(crate) fn give_back(&mut self, slot: u16) {
        self.free.push_back(slot);
    }

    /// A receiver tells; false when nobody is told.
    pub(crate) fn deliver(&mut self, notice: Notice) -> bool {
        let Some(heard) = self.slots.get_mut(usize::from(notice.slot)) else { return false };
        match notice.told {
            Told::Position(units) => heard.position = Some(units),
            Told::Placed(units) => {
                heard.placed = Some(heard.placed.map_or(units, |before| farther(units, before)));
            }
            Told::Ended => heard.ended = true,
            Told::Commit | Told::Close => return false,
        }
        true
    }

    /// What a sender has not heard yet.
    pub(crate) fn hear(&mut self, slot: u16) -> Heard {
        let heard = &mut self.slots[usize::from(slot)];
        Heard { position: heard.position.take(), placed: heard.placed.take(), ended: heard.ended }
    }
}

/// Notices that wait for room in the window: of several of a kind for one slot the last one tells all.
#[derive(Debug, Default)]
pub(crate) struct Notices(VecDeque<Notice>);

impl Notices {
    pub(crate) fn push(&mut self, notice: Notice) {
        let kind = |notice: &Notice| (notice.slot, std::mem::discriminant(&notice.told));
        match self.0.iter_mut().find(|other| kind(other) == kind(&notice)) {
            Some(other) => {
                other.told = match (other.told, notice.told) {
                    // Told by several threads.
                    (Told::Placed(before), Told::Placed(units)) => Told::Placed(farther(units, before)),
                    (_, told) => told,
                }
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_late_replaces_nothing() {
        let notice = |told| Notice { slot: 0, told };
        let (mut outlets, mut notices) = (Outlets::default(), Notices::default());
        let slot = outlets.take().unwrap();
        for told in [Told::Placed(700), Told::Position(3), Told::Placed(600), Told::Ended, Told::Position(4)]
        {
            notices.push(notice(told));
            assert!(outlets.deliver(notice(told)));
        }
        let heard = outlets.hear(slot);
        assert_eq!((heard.placed, heard.position, heard.ended), (Some(700), Some(4), true));
        let queued = std::iter::from_fn(|| {
            let first = notices.first();
            notices.pop();
            first
        });
        let expected = [Told::Placed(700), Told::Position(4), Told::Ended];
        assert!(queued.eq(expected.map(|told| notice(told).notify())));
    }

    #[test]
    fn a_slot_that_is_used_again_knows_nothing_of_before() {
        let mut outlets = Outlets::default();
        let slots: Vec<u16> = std::iter::from_fn(|| outlets.take()).collect();
        assert_eq!(slots.len(), OUTLETS_MAX);
        assert!(outlets.deliver(Notice { slot: slots[7], told: Told::Ended }));
        outlets.give_back(slots[7]);
        assert_eq!(outlets.take(), Some(slots[7]));
        assert!(!outlets.hear(slots[7]).is_something());
        // And hears what comes before it is answered.
        assert!(outlets.deliver(Notice { slot: slots[7], told: Told::Ended }));
        assert!(outlets.hear(slots[7]).ended);
    }
}
