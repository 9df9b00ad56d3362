//! Which slabs deserve dearer or cheaper lenders: docs/design/tiers.md.
//!
//! A slab's *heat* is how many of its pages were read lately. Now and then the hottest slab that is at a dear lender changes to a cheaper one that
//! has room; when none has, the coldest slab of a cheaper one makes room first.

use super::slots::{Place, Slab, SlabIndex, SlotMap};

/// Heat falls by this part each time it is weighed.
const COOLING: u32 = 8;
/// A slab is moved for another only when that is so many times as hot.
const FACTOR: u32 = 2;

/// A slab that is to change places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wish {
    pub(super) slab: SlabIndex,
    pub(super) from: u32,
    pub(super) to: u32,
}

impl SlotMap {
    /// Pages are read from the slab of this slot.
    #[inline]
    pub fn heat(&mut self, slot: super::Slot, pages: u32) {
        let index = self.split(slot).0;
        if let Some(Some(slab)) = self.slabs.get_mut(index) {
            slab.heat = slab.heat.saturating_add(pages);
        }
    }

    /// Whether some slab is at a lender that is dearer than another: then there is something to [weigh](SlotMap::weigh).
    pub fn is_mixed(&self) -> bool {
        let cheapest = self.places.iter().filter(|place| place.alive).map(|place| place.class).min();
        let is_dear = |place: &Place| place.alive && place.slabs > 0 && Some(place.class) > cheapest;
        self.places.iter().any(is_dear)
    }

    /// Chooses a slab that is to change places, if one should, and lets all cool. [`SlotMap::next_step`] moves it. Meant to be called twice a
    /// second.
    pub fn weigh(&mut self) {
        self.wish = if self.is_mending() { None } else { self.choose() };
        for slab in self.slabs.iter_mut().flatten() {
            slab.heat -= slab.heat.div_ceil(COOLING);
        }
        // Those that were full may have room.
        self.places.iter_mut().for_each(Place::may_have_room);
    }

    /// When what was chosen last has been moved, or could not be: whether there is another slab that is to change places. Nothing cools.
    pub fn wish_again(&mut self) -> bool {
        if !core::mem::take(&mut self.wish_over) || self.is_mending() {
            return false;
        }
        self.wish = self.choose();
        self.wish.is_some()
    }

    fn choose(&self) -> Option<Wish> {
        let class = |lender: u32| self.places[lender as usize].class;
        let slabs = || {
            let movable = |slab: &Slab| slab.live_count > 0 && !slab.frozen;
            let all = self.slabs.iter().enumerate();
            all.filter_map(move |(index, slab)| {
                slab.as_ref().filter(|slab| movable(slab)).map(|slab| (index as u32, slab))
            })
        };
        // The dearest copy of each.
        let dear = |slab: &Slab| {
            slab.copies.as_slice().iter().map(|copy| copy.lender).max_by_key(|&lender| class(lender))
        };
        let cheapest = self.places.iter().filter(|place| place.alive).map(|place| place.class).min()?;
        // Some cheaper lender has none of it yet.
        let can_improve = |slab: &Slab, from: u32| {
            let is_new =
                |lender: usize| slab.copies.as_slice().iter().all(|copy| copy.lender as usize != lender);
            let mut places = self.places.iter().enumerate();
            places.any(|(lender, place)| place.alive && place.class < class(from) && is_new(lender))
        };
        let (index, hot, from) = slabs()
            .filter_map(|(index, slab)| Some((index, slab, dear(slab)?)))
            .filter(|&(_, slab, from)| class(from) > cheapest && can_improve(slab, from))
            .max_by_key(|(_, slab, _)| slab.heat)?;
        // What is moved must be worth it: it is read and written once for that.
        if hot.heat < hot.live_count.div_ceil(FACTOR) {
            return None;
        }
        let free = |taken: &Slab, fits: &dyn Fn(&Place) -> bool| {
            let has =
                |lender: usize| taken.copies.as_slice().iter().any(|copy| copy.lender as usize == lender);
            let open = |&(lender, place): &(usize, &Place)| {
                place.alive && !place.full && place.recalled == 0 && !has(lender) && fits(place)
            };
            let places = self.places.iter().enumerate().filter(open);
            places.min_by_key(|(_, place)| (place.class, place.slabs)).map(|(lender, _)| lender as u32)
        };
        if let Some(to) = free(hot, &|place| place.class < class(from)) {
            return Some(Wish { slab: index, from, to });
        }
        // The coldest slab of a cheaper lender makes room.
        let (index, cold, from) = slabs()
            .flat_map(|(index, slab)| {
                slab.copies.as_slice().iter().map(move |copy| (index, slab, copy.lender))
            })
            .filter(|&(_, slab, lender)| {
                let is_needed = hot.copies.as_slice().iter().any(|copy| copy.lender == lender);
                class(lender) < class(from) && !is_needed && slab.heat.saturating_mul(FACTOR) < hot.heat
            })
            .min_by_key(|(_, slab, _)| slab.heat)?;
        let to = free(cold, &|place| place.class > class(from))?;
        Some(Wish { slab: index, from, to })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Redundancy, SlabCopy, Step, StepEnd};
    use super::*;

    /// Slabs of 64 pages, of one copy each; lender 0 is cheap and has `room` slabs, lender 1 is dear.
    struct World {
        map: SlotMap,
        room: u32,
        slots: alloc::vec::Vec<u32>,
        next: u32,
    }

    impl World {
        fn new(room: u32, slabs: u32) -> Self {
            let mut map = SlotMap::new(64, 2, Redundancy::replicas(1));
            map.set_class(1, 2);
            let mut world = Self { map, room, slots: alloc::vec::Vec::new(), next: 0 };
            for _ in 0..slabs {
                let lender = u32::from(world.room == 0);
                let slab = world.lend(lender).unwrap();
                world.map.add(&[SlabCopy { lender, slab, part: 0 }]).unwrap();
                let (slot, count) = world.map.take_run(64).unwrap();
                assert_eq!(count, 64);
                world.slots.push(slot);
            }
            world
        }

        fn lend(&mut self, lender: u32) -> Option<u32> {
            if lender == 0 {
                self.room = self.room.checked_sub(1)?;
            }
            self.next += 1;
            Some(self.next)
        }

        /// A second: slabs are read so often, then everything is done that is to be done.
        fn second(&mut self, heats: &[u32]) {
            for (&slot, &heat) in self.slots.iter().zip(heats) {
                self.map.heat(slot, heat);
            }
            self.map.weigh();
            self.do_all();
        }

        fn do_all(&mut self) {
            while let Some(step) = self.map.next_step() {
                self.map.step_posted();
                let end = match step {
                    Step::Borrow { lender, .. } => self.lend(lender).map_or(StepEnd::Full, StepEnd::Borrowed),
                    _ => StepEnd::Done,
                };
                self.map.step_ended(end);
            }
            while let Some(copy) = self.map.take_return() {
                self.room += u32::from(copy.lender == 0);
            }
        }

        fn places(&self) -> alloc::vec::Vec<u32> {
            self.slots.iter().map(|&slot| self.map.locate(slot).unwrap().0[0].lender).collect()
        }
    }

    #[test]
    fn hot_slabs_come_to_cheap_lenders_and_cold_ones_make_room() {
        let mut world = World::new(2, 4);
        assert_eq!(world.places(), [0, 0, 1, 1]);
        assert!(world.map.is_mixed());
        for _ in 0..20 {
            world.second(&[0, 10, 5, 100]);
        }
        // The hottest has changed places with the coldest; the others do not pay.
        assert_eq!(world.places(), [1, 0, 1, 0]);
        // And then there is peace.
        let sorted = world.map.sorted();
        assert_eq!(sorted, 128);
        (0..20).for_each(|_| world.second(&[0, 10, 5, 100]));
        assert_eq!(world.map.sorted(), sorted);
    }

    #[test]
    fn all_that_should_change_places_does_at_once_when_it_is_asked_for_again() {
        let mut world = World::new(3, 8);
        assert_eq!(world.places(), [0, 0, 0, 1, 1, 1, 1, 1]);
        let heats = [0, 3, 200, 90, 2, 100, 1, 30];
        world.second(&heats);
        let mut times = 0;
        while world.map.wish_again() {
            world.do_all();
            times += 1;
            assert!(times < 20, "no end to it");
        }
        assert_eq!(world.places(), [1, 1, 0, 0, 1, 0, 1, 1]);
        assert_eq!(world.map.sorted(), 4 * 64);
        // Nothing is over that was not begun.
        assert!(!world.map.wish_again());
        (0..20).for_each(|_| {
            world.second(&heats);
            while world.map.wish_again() {
                world.do_all();
            }
        });
        assert_eq!(world.map.sorted(), 4 * 64);
    }

    #[test]
    fn what_is_as_hot_as_the_rest_stays() {
        let mut world = World::new(2, 4);
        for _ in 0..50 {
            world.second(&[100, 80, 120, 90]);
        }
        // Nor is anything moved that is not used any more, into room that there is.
        (0..80).for_each(|_| world.second(&[0; 4]));
        world.room = 5;
        (0..80).for_each(|_| world.second(&[0; 4]));
        assert_eq!((world.places(), world.map.sorted()), (alloc::vec![0, 0, 1, 1], 0));
    }

    #[test]
    fn room_is_used_by_the_hottest() {
        let mut world = World::new(0, 3);
        assert_eq!(world.places(), [1, 1, 1]);
        world.room = 1;
        for _ in 0..5 {
            world.second(&[10, 90, 30]);
        }
        assert_eq!(world.places(), [1, 0, 1]);
    }
}
