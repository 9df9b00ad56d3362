//! Slabs that hold few pages give them to others, so that they can go back to their lenders: docs/design/lending.md, "Sparse slabs".
//!
//! A slab goes back when it holds no page any more; a program that frees pages here and there keeps nearly all of them, with little in each. When more than a
//! third of all slots are free, those slabs that hold least are *emptied*: nothing new is written to them, and the pager moves what they hold to free slots
//! of others, as log-structured file systems clean segments (Rosenblum and Ousterhout, SOSP 1991; greedy: what is hot leaves its slot by itself). Pages stay
//! with lenders of the same class: what had better be elsewhere is decided there.

use super::slots::{Slab, Slot, SlotMap};
use alloc::vec::Vec;

/// It pays when more than one slot is free for so many pages, beside those of a slab,
const BEGIN_PART: u64 = 2;
/// and until there is one for so many.
const END_PART: u64 = 4;
/// The same while a lender waits for memory that nobody else can have.
const STUCK_PART: u64 = 16;
/// Slabs in which more than one slot in so many is taken by a page stay: to move nearly a slab for a slab is too much.
const FULL_PART: u32 = 4;

impl SlotMap {
    /// Chooses slabs to be emptied, if that pays; whether there are any. `pages`: how many pages hold contents, wherever they are: those that are local, without a
    /// slot, will need one.
    pub fn begin_to_collect(&mut self, pages: u64) -> bool {
        self.stop_collecting();
        let is_stuck = self.is_stuck();
        if self.is_recalled() && !is_stuck {
            // Slabs are moved as they are.
            return false;
        }
        let slots = u64::from(self.slots_per_slab);
        let is_steady = |index: usize, slab: &Slab| {
            !slab.frozen
                && !self.is_growing_slab(index)
                && slab.copies.as_slice().len() == self.redundancy.total()
        };
        let slabs = self.slabs.iter().enumerate().filter_map(|(index, slab)| {
            let slab = slab.as_ref().filter(|slab| is_steady(index, slab))?;
            Some((self.class_of_slab(slab), !self.is_asked_back(slab), slab.live_count, index))
        });
        let mut slabs: Vec<_> = slabs.collect();
        slabs.sort_unstable();
        let (begin, end) = if is_stuck { (STUCK_PART, STUCK_PART) } else { (BEGIN_PART, END_PART) };
        // Where those go that have no slot is not known.
        let coming = pages.saturating_sub(self.live_count);
        for alike in slabs.chunk_by(|(class, ..), (other, ..)| class == other) {
            let live: u64 = alike.iter().map(|&(_, _, live, _)| u64::from(live)).sum();
            let mut free = (alike.len() as u64 * slots - live).saturating_sub(coming);
            if free < (live + coming) / begin + slots {
                continue;
            }
            for &(.., live_here, index) in alike {
                let is_sparse =
                    live_here > 0 && live_here <= self.slots_per_slab - self.slots_per_slab / FULL_PART;
                if is_sparse
                    && free >= (live + coming) / end + slots
                    && let Some(slab) = &mut self.slabs[index]
                {
                    free -= slots;
                    slab.emptying = true;
                    self.emptying += 1;
                }
            }
        }
        self.collects()
    }

    /// Whether slabs are being emptied.
    pub fn collects(&self) -> bool {
        self.emptying > 0
    }

    /// What is in slabs that were to be emptied stays.
    pub fn stop_collecting(&mut self) {
        self.emptying = 0;
        self.slabs.iter_mut().flatten().for_each(|slab| slab.emptying = false);
    }

    /// Whether the page of this slot is to be moved to another, see [`SlotMap::take_other`].
    pub fn is_emptying(&self, slot: Slot) -> bool {
        let slab = self.slabs.get(self.split(slot).0).and_then(Option::as_ref);
        slab.is_some_and(|slab| slab.emptying)
    }

    /// Takes a run of 1..=`want` free neighbouring slots in place of those from `slot` on, at lenders of the same class. `None` when there is no room: no
    /// slab is emptied any more.
    pub fn take_other(&mut self, slot: Slot, want: u32) -> Option<(Slot, u32)> {
        let class = self.class_of(slot);
        let fits = |slab: &Slab| {
            let has_room = !slab.frozen && !slab.emptying && slab.live_count < self.slots_per_slab;
            let is_whole = slab.copies.as_slice().len() == self.redundancy.total();
            has_room && is_whole && self.class_of_slab(slab) == class
        };
        let open = self.slabs.iter().enumerate().filter_map(|(index, slab)| {
            let slab = slab.as_ref().filter(|slab| fits(slab))?;
            Some((self.is_asked_back(slab), index))
        });
        let Some((_, index)) = open.min() else {
            self.stop_collecting();
            return None;
        };
        let (page, length) = self.slabs[index].as_mut()?.take_run(want, self.slots_per_slab);
        self.note_taken(index, length);
        Some((self.join(index, page), length))
    }

    fn is_asked_back(&self, slab: &Slab) -> bool {
        slab.copies.as_slice().iter().any(|copy| self.places[copy.lender as usize].recalled > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Redundancy, SlabCopy};
    use super::*;

    /// Slabs of 64 pages at the lenders named, all full.
    fn full(lenders: &[u32]) -> SlotMap {
        let mut map = SlotMap::new(64, 2, Redundancy::replicas(1));
        map.set_class(1, 1);
        for (slab, &lender) in lenders.iter().enumerate() {
            map.add(&[SlabCopy { lender, slab: slab as u32, part: 0 }]).unwrap();
            assert_eq!(map.take_run(64).unwrap().1, 64);
        }
        map
    }

    fn release(map: &mut SlotMap, slots: impl Iterator<Item = Slot>) {
        for slot in slots {
            if let Some(slab) = map.release(slot) {
                map.remove(slab);
            }
        }
    }

    /// What the pager does, until no slab is emptied any more. Returns where each page is.
    fn collect(map: &mut SlotMap, slots: &mut [Slot]) -> u32 {
        let mut moved = 0;
        for slot in slots {
            if map.is_emptying(*slot) {
                let Some((other, 1)) = map.take_other(*slot, 1) else { continue };
                assert!(!map.is_emptying(other));
                assert_eq!(map.class_of(other), map.class_of(*slot));
                release(map, core::iter::once(*slot));
                *slot = other;
                moved += 1;
            }
        }
        moved
    }

    #[test]
    fn sparse_slabs_go_back() {
        let mut map = full(&[0; 16]);
        // One page of four stays, everywhere.
        let mut slots: Vec<Slot> = (1..=16 * 64).filter(|slot| slot % 4 == 0).collect();
        release(&mut map, (1..=16 * 64).filter(|slot| slot % 4 != 0));
        assert_eq!((map.slabs(), map.live()), (16, 256));
        assert!(map.begin_to_collect(0));
        let moved = collect(&mut map, &mut slots);
        // 256 pages are in 5 slabs with a fourth of their slots free, and no page was moved twice.
        assert_eq!((map.slabs(), map.live(), moved), (5, 256, 11 * 16));
        assert!(!map.collects() && !map.begin_to_collect(0), "and there is peace");
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), 256);
        assert_eq!(core::iter::from_fn(|| map.take_return()).count(), 11);
    }

    #[test]
    fn what_is_dense_enough_stays() {
        let mut map = full(&[0; 16]);
        release(&mut map, (1..=16 * 64).filter(|slot| slot % 4 == 0));
        assert!(!map.begin_to_collect(0), "a quarter of all slots is free");
        // A lender that waits for memory, and that nobody can replace, gets what there is.
        map.recall(0, 1);
        map.lender_full(1);
        assert!(!map.begin_to_collect(0));
        assert_eq!(map.next_step(), None);
        assert!(map.is_stuck() && map.begin_to_collect(0));
        let mut slots: Vec<Slot> = (1..=16 * 64).filter(|slot| slot % 4 != 0).collect();
        collect(&mut map, &mut slots);
        assert_eq!(map.slabs(), 13);
    }

    #[test]
    fn pages_that_will_need_a_slot_have_one() {
        let mut map = full(&[0; 16]);
        release(&mut map, (1..=16 * 64).filter(|slot| slot % 4 != 0));
        // All the others are local.
        assert!(!map.begin_to_collect(16 * 64));
        assert!(map.begin_to_collect(8 * 64));
        let mut slots: Vec<Slot> = (1..=16 * 64).filter(|slot| slot % 4 == 0).collect();
        collect(&mut map, &mut slots);
        assert_eq!(map.slabs(), 10, "512 pages, and a quarter");
        assert!(!map.begin_to_collect(8 * 64));
    }

    #[test]
    fn a_slab_that_is_kept_though_it_is_empty_is_not_emptied() {
        let mut map = full(&[0; 8]);
        release(&mut map, (1..=8 * 64).filter(|slot| slot % 8 != 0));
        assert!(map.begin_to_collect(0));
        for slot in (1..=8 * 64).filter(|slot| slot % 8 == 0) {
            if let Some(slab) = map.release(slot)
                && map.slabs() > 1
            {
                map.remove(slab);
            }
        }
        assert!(!map.collects() && map.slabs() == 1);
        assert_eq!(map.take_run(64).map(|(_, slots)| slots), Some(64));
    }

    #[test]
    fn pages_stay_with_their_class() {
        let mut map = full(&[0, 0, 0, 0, 1, 1, 1, 1]);
        // The cheap lender's slabs are full; the dear one's nearly empty.
        release(&mut map, (4 * 64 + 1..=8 * 64).filter(|slot| slot % 8 != 0));
        let mut slots: Vec<Slot> = (1..=8 * 64).filter(|slot| *slot <= 256 || slot % 8 == 0).collect();
        assert!(map.begin_to_collect(0));
        assert!(!map.is_emptying(1));
        assert_eq!(collect(&mut map, &mut slots), 24);
        assert_eq!((map.live_at(0), map.live_at(1), map.slabs()), (256, 32, 5));
    }

    #[test]
    fn nothing_is_written_where_it_would_have_to_be_moved() {
        let mut map = full(&[0; 8]);
        release(&mut map, (1..=8 * 64).filter(|slot| slot % 8 != 0));
        assert!(map.begin_to_collect(0));
        let (slot, _) = map.take_run(1).unwrap();
        assert!(!map.is_emptying(slot));
        // Unless there is no other room.
        let mut taken = 1;
        while map.collects() {
            taken += map.take_run(64).unwrap().1;
        }
        assert!(taken > 2 * 56, "{taken}");
        while map.live() < 8 * 64 {
            map.take_run(64).unwrap();
        }
        assert_eq!(map.take_run(1), None);
    }

    #[test]
    fn what_a_child_shares_is_not_moved() {
        let mut map = full(&[0; 8]);
        release(&mut map, (1..=8 * 64).filter(|slot| slot % 8 != 0));
        assert!(map.begin_to_collect(0));
        map.freeze();
        assert!(!map.collects() && !map.is_emptying(8) && !map.begin_to_collect(0));
        (0..8).for_each(|slab| map.thaw(slab));
        assert!(map.begin_to_collect(0));
    }

    #[test]
    fn a_lender_that_is_lost_takes_its_slabs_along() {
        let mut map = SlotMap::new(64, 3, Redundancy::replicas(2));
        for slab in 0..8 {
            map.add(&[SlabCopy { lender: slab % 2, slab, part: 0 }, SlabCopy { lender: 2, slab, part: 0 }])
                .unwrap();
            map.take_run(64).unwrap();
        }
        release(&mut map, (1..=8 * 64).filter(|slot| slot % 8 != 0));
        let mut slots: Vec<Slot> = (1..=8 * 64).filter(|slot| slot % 8 == 0).collect();
        assert!(map.begin_to_collect(0));
        map.lender_lost(0);
        // To slabs that lack nothing.
        collect(&mut map, &mut slots);
        for &slot in &slots {
            assert!(map.locate(slot).is_some());
        }
        assert_eq!(map.live(), 64);
        assert!(map.slabs() < 8 && !map.collects());
    }
}
