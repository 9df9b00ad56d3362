//! Pages that change places one by one, when they are evicted: docs/design/tiers.md.
//!
//! A page that comes back from a dear lender so soon that cheaper ones would still have it, if they had what left last, gives its slot up: when it
//! is evicted again it is written to a cheaper one. So hot pages that lie among cold ones leave them. Room for them is an empty slab, where the coldest of a
//! cheap lender was before.

use super::copies::SlabCopy;
use super::heat::{Wish, is_colder};
use super::slots::{Slab, Slot, SlotMap};

/// Slots of dear lenders that are given up stay free until something new is written there: at most one for so many pages that are live.
const HOLES_PART: u64 = 2;

/// Pages that are to be written to cheaper lenders.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Better {
    /// Lenders differ, and each page is at one.
    pub(super) is_on: bool,
    /// They were promised a slot.
    promised: u32,
    /// So many were to be, lately, whether there was room or not.
    pub(super) wanted: u32,
    /// What each of their reads takes longer than it need, in nanoseconds.
    gain: u64,
    /// The slab that they go to.
    current: usize,
    /// Slabs that are hotter move as they are.
    hot: u32,
}

impl Better {
    /// Some of them were let go, and will not come.
    pub(super) fn forget(&mut self) {
        self.promised -= self.promised / 16;
    }
}

impl SlotMap {
    /// The page of this slot has come, so many evictions after it left. Whether it had better be elsewhere: then its slot is to be let go.
    #[inline]
    pub fn promote(&mut self, slot: Slot, age: u32) -> bool {
        if !self.better.is_on {
            return false;
        }
        let Some(Some(slab)) = self.slabs.get(self.split(slot).0) else { return false };
        let [copy] = slab.copies.as_slice() else { return false };
        let (here, is_frozen) = (self.places[copy.lender as usize], slab.frozen);
        let ns = here.read_ns();
        let is_hot = slab.heat > self.better.hot;
        let (mut room, mut cheapest, mut spare) = (0, ns, None);
        for (lender, place) in self.places.iter().enumerate() {
            if !place.alive || !self.is_cheaper(place, &here) {
                continue;
            }
            room += u64::from(place.slabs) * u64::from(self.slots_per_slab);
            cheapest = cheapest.min(place.read_ns());
            if place.spare > 0 && place.recalled == 0 {
                spare = Some(lender);
            }
        }
        if u64::from(age) >= room || is_frozen || is_hot {
            return false;
        }
        self.better.wanted = self.better.wanted.saturating_add(1);
        self.better.gain = ns - cheapest;
        let Some(lender) = spare else { return false };
        self.places[lender].spare -= 1;
        self.better.promised += 1;
        self.mender.count_sorted();
        true
    }

    /// Slots for pages that were promised them, at the cheapest lender that has some.
    pub(super) fn take_better(&mut self, want: u32) -> Option<(Slot, u32)> {
        if self.better.promised == 0 {
            return None;
        }
        let slots = self.slots_per_slab;
        let is_open = |slab: &Slab| !slab.frozen && !slab.emptying && slab.live_count < slots;
        let current = self.slabs.get(self.better.current).and_then(Option::as_ref);
        let index = match current.filter(|slab| is_open(slab)) {
            Some(_) => self.better.current,
            None => {
                let open = self.slabs.iter().enumerate().filter_map(|(index, slab)| {
                    let slab = slab.as_ref().filter(|slab| is_open(slab))?;
                    let place = &self.places[slab.copies.as_slice().first()?.lender as usize];
                    (place.recalled == 0).then_some((place.read_ns(), index))
                });
                let Some((_, index)) = open.min() else {
                    // They go wherever there is room.
                    self.better.promised = 0;
                    return None;
                };
                index
            }
        };
        let slab = self.slabs[index].as_mut()?;
        let (page, length) = slab.take_run(want.min(self.better.promised), slots);
        self.better.current = index;
        self.better.promised -= length;
        self.note_taken(index, length);
        Some((self.join(index, page), length))
    }

    /// The slab that the next page without a slot goes to, as far as is known.
    pub(super) fn next(&self) -> usize {
        if self.better.promised > 0 { self.better.current } else { self.current }
    }

    /// Which free slots nobody has been promised, and where the next of those who have been go.
    pub(super) fn count_spare(&mut self) {
        self.places.iter_mut().for_each(|place| place.spare = 0);
        let slabs = || self.slabs.iter().flatten().filter(|slab| slab.live_count > 0);
        let heat: u64 = slabs().map(|slab| u64::from(slab.heat)).sum();
        self.better.hot = u32::try_from(heat / (slabs().count() as u64).max(1) * 3 / 2).unwrap_or(u32::MAX);
        let mut cheapest = u64::MAX;
        for (index, slab) in self.slabs.iter().enumerate() {
            let Some(slab) = slab.as_ref().filter(|slab| !slab.frozen && !slab.emptying) else { continue };
            let spare = self.slots_per_slab - slab.live_count;
            for copy in slab.copies.as_slice() {
                let place = &mut self.places[copy.lender as usize];
                place.spare += spare;
                if spare > 0 && place.recalled == 0 && place.read_ns() < cheapest {
                    (cheapest, self.better.current) = (place.read_ns(), index);
                }
            }
        }
        // They go to the cheapest first.
        let mut promised = self.better.promised;
        while promised > 0 {
            let spare = self.places.iter_mut().filter(|place| place.alive && place.spare > 0);
            let Some(place) = spare.min_by_key(|place| place.read_ns()) else { break };
            let taken = promised.min(place.spare);
            (place.spare, promised) = (place.spare - taken, promised - taken);
        }
    }

    /// When many pages are to go to cheaper lenders, and there is hardly room: an empty slab there, or that the coldest of one makes room.
    pub(super) fn make_better(&self) -> Option<Wish> {
        let (wanted, slots) = (self.better.wanted, self.slots_per_slab);
        let slabs =
            || self.slabs.iter().enumerate().filter_map(|(index, slab)| Some((index, slab.as_ref()?)));
        let holes: u64 = slabs().map(|(_, slab)| u64::from(slots - slab.live_count)).sum();
        if wanted < slots || holes * HOLES_PART > self.live_count {
            return None;
        }
        let alive = || self.places.iter().enumerate().filter(|(_, place)| place.alive && place.recalled == 0);
        let (lender, cheapest) = alive().min_by_key(|(_, place)| place.read_ns())?;
        if cheapest.spare >= slots / 2 {
            return None;
        }
        if !cheapest.full {
            return Some(Wish::Fresh { lender: lender as u32 });
        }
        let from = lender as u32;
        let at = |slab: &Slab| slab.copies.as_slice().iter().any(|copy| copy.lender == from);
        let cold =
            slabs().filter(|(_, slab)| slab.live_count > 0 && !slab.frozen && !slab.emptying && at(slab));
        let (index, cold) = cold.min_by_key(|(_, slab)| (slab.heat, slab.live_count))?;
        let dearer = alive().filter(|(_, place)| !place.full && self.is_cheaper(cheapest, place));
        let (to, _) = dearer.min_by_key(|(_, place)| (place.read_ns(), place.slabs))?;
        let is_paid = f64::from(wanted) * self.better.gain as f64 > self.scale.price(cold.live_count);
        let is_worth = is_paid && is_colder(cold.heat, wanted.min(slots));
        is_worth.then_some(Wish::Move { slab: index as u32, from, to: to as u32 })
    }

    /// An empty slab has come.
    pub(super) fn add_better(&mut self, copy: SlabCopy) {
        let current = self.current;
        match self.add(&[copy]) {
            Some(index) => self.better.current = index as usize,
            None => self.not_wanted(copy),
        }
        self.current = current;
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Redundancy, Step, StepEnd};
    use super::*;
    use alloc::vec::Vec;

    /// Slabs of 64 pages: one at a cheap lender, which has room for two, and eight at a dear one.
    struct World {
        map: SlotMap,
        slots: Vec<Slot>,
        cheap: u32,
        next: u32,
    }

    impl World {
        fn new() -> Self {
            let mut map = SlotMap::new(64, 2, Redundancy::replicas(1));
            map.set_class(1, 2);
            let mut world = Self { map, slots: Vec::new(), cheap: 0, next: 0 };
            for lender in [0, 1, 1, 1, 1, 1, 1, 1, 1] {
                world.borrow(lender);
                let (slot, _) = world.map.take_run(64).unwrap();
                world.slots.extend(slot..slot + 64);
            }
            assert!(world.map.is_mixed());
            world
        }

        fn borrow(&mut self, lender: u32) {
            self.next += 1;
            self.cheap += u32::from(lender == 0);
            self.map.add(&[SlabCopy { lender, slab: self.next, part: 0 }]).unwrap();
        }

        fn lender(&self, page: usize) -> u32 {
            self.map.locate(self.slots[page]).unwrap().0[0].lender
        }

        /// The page is read, so long after it left, and leaves again.
        fn read(&mut self, page: usize, age: u32) {
            self.map.heat(self.slots[page], 1);
            if self.map.promote(self.slots[page], age) {
                if let Some(slab) = self.map.release(self.slots[page]) {
                    self.map.remove(slab);
                }
                self.slots[page] = self.map.take_run(1).unwrap().0;
            }
            self.map.weigh();
            while let Some(step) = self.map.next_step() {
                self.map.step_posted();
                self.next += 1;
                self.map.step_ended(match step {
                    Step::Borrow { lender: 0, .. } if self.cheap == 2 => StepEnd::Full,
                    Step::Borrow { lender, .. } => {
                        self.cheap += u32::from(lender == 0);
                        StepEnd::Borrowed(self.next)
                    }
                    _ => StepEnd::Done,
                });
            }
            while let Some(copy) = self.map.take_return() {
                self.cheap -= u32::from(copy.lender == 0);
            }
        }
    }

    #[test]
    fn hot_pages_leave_the_cold_ones_among_which_they_are() {
        let mut world = World::new();
        // One of eight, over and over: they fit the cheap lender, and no slab is hotter than another.
        let hot: Vec<usize> = (0..9 * 64).step_by(8).collect();
        for _ in 0..40 {
            hot.iter().for_each(|&page| world.read(page, 60));
        }
        let there = hot.iter().filter(|&&page| world.lender(page) == 0).count();
        assert!(there >= hot.len() * 9 / 10, "{there} of {}", hot.len());
        assert_eq!(world.map.live(), 9 * 64);
    }

    #[test]
    fn what_came_back_late_stays_in_its_slab() {
        let mut world = World::new();
        let slots = world.slots.clone();
        for _ in 0..40 {
            (0..9 * 64).step_by(8).for_each(|page| world.read(page, 128));
        }
        assert_eq!(world.slots, slots);
    }

    #[test]
    fn with_several_copies_no_page_moves_by_itself() {
        let mut map = SlotMap::new(64, 2, Redundancy::replicas(2));
        map.set_class(1, 2);
        map.add(&[SlabCopy { lender: 0, slab: 1, part: 0 }, SlabCopy { lender: 1, slab: 1, part: 0 }]);
        let (slot, _) = map.take_run(64).unwrap();
        assert!(map.is_mixed());
        (0..1000).for_each(|_| assert!(!map.promote(slot, 0)));
    }
}
