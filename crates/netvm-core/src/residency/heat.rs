//! Which slabs deserve dearer or cheaper lenders: docs/design/tiers.md.
//!
//! A slab's *heat* is how often it was read lately, where time is counted in reads: so a new hot part is known as soon as there is evidence for it,
//! however slow the lender makes the program. Its *due* is how often it was read from where it is. A slab at a dear lender moves to a cheaper one as
//! soon as it has been read so often that the move would have paid for itself; when cheap lenders are full, a slab of theirs that is clearly colder
//! makes room first, and both moves must have paid for themselves.

use super::slots::{Place, Slab, SlabIndex, SlotMap};
use crate::tier::Average;
use alloc::vec;
use alloc::vec::Vec;

/// Heat halves each time each slab was read so often, on average.
const HALF_READS: u64 = 8;
/// With few slabs there is more evidence to be had.
const HALF_READS_MIN: u64 = 512;
/// What is due falls by this part each time all cool: a slab that is read now and then is never worth a move.
const COOLING: u32 = 64;
/// A slab makes room only for one that is so many times as hot,
const FACTOR: u64 = 2;
/// and the difference must not be by chance: so many standard deviations of it.
const SIGMAS: u64 = 4;
/// What a lender's reads take differs from another's when it is less than so many parts
const DIFFERS: u64 = 3;
/// of so many of it.
const DIFFERS_OF: u64 = 4;
/// Of lenders of one class, when it is more than so many times as long.
const DIFFERS_ALIKE: u64 = 4;
/// Reading and writing a page for a move, until it has been measured: nanoseconds.
const COPY_NS: f64 = 10_000.0;
/// What is written to copies that are hardly read counts one part in so many.
const WRITE_PART: u64 = 8;
/// What a read takes until it has been measured, by class.
const READ_NS: [u64; 4] = [5_000, 50_000, 60_000, 250_000];

/// A slab that is to change places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Move {
        slab: SlabIndex,
        from: u32,
        to: u32,
    },
    /// An empty slab, for pages that are wanted often.
    Fresh {
        lender: u32,
    },
}

/// What moves take, how many reads there were since heat was halved, and since all cooled.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Scale {
    reads: u64,
    recent: u64,
    is_quiet: bool,
    copy: Average,
}

impl Scale {
    /// What it takes to copy so many pages, in nanoseconds.
    pub(super) fn price(&self, pages: u32) -> f64 {
        f64::from(pages) * self.copy.or(COPY_NS)
    }
}

/// A hot slab, and what would be gained by each of its reads at the cheapest lender.
#[derive(Clone, Copy)]
struct Hot<'a> {
    index: SlabIndex,
    slab: &'a Slab,
    from: u32,
    gain: u64,
}

impl Place {
    /// What a read from it takes.
    pub(super) fn read_ns(&self) -> u64 {
        match self.measured_ns {
            0 => READ_NS[usize::from(self.class).min(READ_NS.len() - 1)],
            measured => measured,
        }
    }
}

impl SlotMap {
    /// The slab of this slot is read.
    #[inline]
    pub fn heat(&mut self, slot: super::Slot, reads: u32) {
        let index = self.split(slot).0;
        if let Some(Some(slab)) = self.slabs.get_mut(index) {
            slab.heat = slab.heat.saturating_add(reads);
            slab.due = slab.due.saturating_add(reads);
            self.scale.reads += u64::from(reads);
            self.scale.recent += u64::from(reads);
        }
    }

    /// What a read from this lender takes, as was measured; 0: not yet.
    pub fn set_read_ns(&mut self, lender: u32, ns: u64) {
        self.places[lender as usize].measured_ns = ns;
    }

    /// So many pages were copied in a move, and that took so long.
    pub fn note_copied(&mut self, pages: u32, ns: u64) {
        self.scale.copy.note(ns as f64 / f64::from(pages.max(1)));
    }

    /// Whether reads from one lender take so much less than from another that pages had better be there. Among lenders of one class those that are read differ by
    /// chance; and where there are several copies, the one that answers soonest is read anyway.
    pub(super) fn is_cheaper(&self, one: &Place, other: &Place) -> bool {
        let (ns, other_ns) = (one.read_ns(), other.read_ns());
        if one.class != other.class {
            ns.saturating_mul(DIFFERS_OF) < other_ns.saturating_mul(DIFFERS)
        } else {
            self.redundancy.total() == 1 && ns.saturating_mul(DIFFERS_ALIKE) < other_ns
        }
    }

    /// Whether some slab is at a lender that is dearer than another: then there is something to [weigh](SlotMap::weigh).
    pub fn is_mixed(&mut self) -> bool {
        let alive = || self.places.iter().filter(|place| place.alive);
        let is_mixed =
            alive().any(|place| place.slabs > 0 && alive().any(|other| self.is_cheaper(other, place)));
        self.better.is_on = is_mixed && self.redundancy.total() == 1;
        is_mixed
    }

    /// Lets what is due fall a little, and those that were full may have room. Meant to be called twice a second.
    pub fn cool(&mut self) {
        for slab in self.slabs.iter_mut().flatten() {
            slab.due -= slab.due.div_ceil(COOLING);
        }
        self.better.forget();
        self.scale.is_quiet = core::mem::take(&mut self.scale.recent) == 0;
        self.places.iter_mut().for_each(Place::may_have_room);
    }

    /// Chooses a slab that is to change places, if one should; [`SlotMap::next_step`] moves it. Meant to be called often while nothing is moved; it takes
    /// time in proportion to the number of slabs.
    pub fn weigh(&mut self) -> bool {
        self.count_spare();
        let is_quiet = self.scale.is_quiet && self.scale.recent == 0;
        self.wish =
            if is_quiet || self.is_mending() { None } else { self.choose().or_else(|| self.make_better()) };
        let half = (HALF_READS * self.slabs.len() as u64).max(HALF_READS_MIN);
        if self.scale.reads >= half {
            let halvings = (self.scale.reads / half).min(31) as u32;
            self.scale.reads %= half;
            self.better.wanted >>= halvings;
            for slab in self.slabs.iter_mut().flatten() {
                slab.heat >>= halvings;
            }
        }
        self.wish.is_some()
    }

    /// What a read takes of a slab with copies, or parts, at these lenders; and a little for the dearest, to which all is written, too.
    fn read_ns(&self, lenders: impl Iterator<Item = u32>) -> u64 {
        let mut all = [u64::MAX; super::PARTS_MAX];
        let mut count = 0;
        for (ns, lender) in all.iter_mut().zip(lenders) {
            *ns = self.places[lender as usize].read_ns();
            count += 1;
        }
        all.sort_unstable();
        let dearest = if count > self.redundancy.need() { all[count - 1] / WRITE_PART } else { 0 };
        all[self.redundancy.need() - 1].saturating_add(dearest)
    }

    /// What a read would take less, if the slab's part at `from` were at `to`; negative: more.
    fn gain(&self, slab: &Slab, from: u32, to: u32) -> i64 {
        let lenders = || slab.copies.as_slice().iter().map(|copy| copy.lender);
        let moved = lenders().map(|lender| if lender == from { to } else { lender });
        i64::try_from(self.read_ns(lenders())).unwrap_or(i64::MAX)
            - i64::try_from(self.read_ns(moved)).unwrap_or(i64::MAX)
    }

    fn choose(&self) -> Option<Wish> {
        let ns = |lender: u32| self.places[lender as usize].read_ns();
        let is_cheaper = |one: u32, other: u32| {
            let place = |lender: u32| &self.places[lender as usize];
            self.is_cheaper(place(one), place(other))
        };
        let has = |slab: &Slab, lender: u32| slab.copies.as_slice().iter().any(|copy| copy.lender == lender);
        let lenders = || (0..self.places.len() as u32).filter(|&to| self.places[to as usize].alive);
        let is_open = |to: u32| !self.places[to as usize].full && self.places[to as usize].recalled == 0;
        let movable = |slab: &&Slab| slab.live_count > 0 && !slab.frozen && !slab.emptying;
        // What the only copy of a slab gains at best, by where it is.
        let gains: Vec<u64> = (0..self.places.len() as u32)
            .map(|from| {
                let better = lenders().filter(|&to| is_cheaper(to, from)).map(ns).min();
                better.map_or(0, |best| ns(from).saturating_sub(best))
            })
            .collect();
        let mut hottest: Option<Hot> = None;
        // Of each lender.
        let mut coldest: Vec<Option<(SlabIndex, &Slab)>> = vec![None; self.places.len()];
        for (index, slab) in self.slabs.iter().enumerate() {
            let Some(slab) = slab.as_ref().filter(movable) else { continue };
            let index = index as SlabIndex;
            for copy in slab.copies.as_slice() {
                let place = &mut coldest[copy.lender as usize];
                let key = |slab: &Slab| (slab.heat, slab.live_count);
                if place.is_none_or(|(_, other)| key(slab) < key(other)) {
                    *place = Some((index, slab));
                }
            }
            let worth = |hot: &Hot| u64::from(hot.slab.heat).saturating_mul(hot.gain);
            // The dearest of its copies goes where that helps most.
            let dearest = slab.copies.as_slice().iter().map(|copy| copy.lender).max_by_key(|&at| ns(at));
            let Some(from) = dearest.filter(|_| slab.heat > 0) else { continue };
            let gain = if self.redundancy.total() == 1 {
                gains[from as usize]
            } else {
                let better = lenders().filter(|&to| is_cheaper(to, from) && !has(slab, to));
                better.map(|to| self.gain(slab, from, to)).max().unwrap_or(0).max(0) as u64
            };
            let hot = Hot { index, slab, from, gain };
            if gain > 0 && hottest.is_none_or(|other| worth(&other) < worth(&hot)) {
                hottest = Some(hot);
            }
        }
        let Hot { index, slab: hot, from, .. } = hottest?;
        let paid = |reads: f64, pages: u32| reads > self.scale.price(pages);
        let mut best: Option<(f64, Wish)> = None;
        for to in lenders().filter(|&to| is_cheaper(to, from) && !has(hot, to)) {
            let gain = self.gain(hot, from, to) as f64;
            let (worth, due) = (f64::from(hot.heat) * gain, f64::from(hot.due) * gain);
            let found = if is_open(to) {
                paid(due, hot.live_count).then_some((worth, Wish::Move { slab: index, from, to }))
            } else {
                coldest[to as usize].filter(|(_, cold)| is_colder(cold.heat, hot.heat)).and_then(
                    |(index, cold)| {
                        let dearer = lenders()
                            .filter(|&other| is_cheaper(to, other) && is_open(other) && !has(cold, other));
                        let other =
                            dearer.min_by_key(|&other| (ns(other), self.places[other as usize].slabs))?;
                        let loss = f64::from(cold.heat) * -self.gain(cold, to, other) as f64;
                        let is_paid = paid(due * (1.0 - loss / worth), hot.live_count + cold.live_count);
                        is_paid.then_some((worth - loss, Wish::Move { slab: index, from: to, to: other }))
                    },
                )
            };
            best = best.into_iter().chain(found).max_by(|(one, _), (other, _)| one.total_cmp(other));
        }
        best.filter(|&(worth, _)| worth > 0.0).map(|(_, wish)| wish)
    }
}

/// Whether one slab is read so much less often than another that it is no chance.
pub(super) fn is_colder(cold: u32, hot: u32) -> bool {
    let (cold, hot) = (u64::from(cold), u64::from(hot));
    let apart = hot.saturating_sub(cold);
    cold * FACTOR <= hot && apart * apart > SIGMAS * SIGMAS * (hot + cold)
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
            self.map.cool();
            self.settle();
        }

        fn settle(&mut self) {
            let mut times = 0;
            while self.map.weigh() {
                self.do_all();
                times += 1;
                assert!(times < 50, "no end to it");
            }
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
    fn all_that_should_change_places_does_at_once() {
        let mut world = World::new(3, 8);
        assert_eq!(world.places(), [0, 0, 0, 1, 1, 1, 1, 1]);
        let heats = [0, 3, 200, 90, 2, 100, 1, 30];
        world.second(&heats);
        assert_eq!(world.places(), [1, 1, 0, 0, 1, 0, 1, 1]);
        assert_eq!(world.map.sorted(), 4 * 64);
        (0..20).for_each(|_| world.second(&heats));
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
