//! Slots: the pages of borrowed slabs.

use alloc::vec;
use alloc::vec::Vec;

use super::copies::{Copies, Redundancy, SlabCopy};
use super::heat::{Scale, Wish};
use super::mend::Mender;
use super::promote::Better;

/// Number of a slab in its [`SlotMap`].
pub type SlabIndex = u32;
/// Number of a slot: slab and page in it, counted from 1.
pub type Slot = u32;

/// One slab, where its copies are, and which of its slots hold a page.
#[derive(Clone, Debug)]
pub(super) struct Slab {
    pub(super) copies: Copies,
    live: Vec<u64>,
    pub(super) live_count: u32,
    /// How often it was read lately,
    pub(super) heat: u32,
    /// and since it is where it is.
    pub(super) due: u32,
    /// Another process (after fork) may read every slot of it: nothing may be written.
    pub(super) frozen: bool,
    /// What it holds is being moved to others: nothing new is to be written.
    pub(super) emptying: bool,
    cursor: u32,
}

/// What is known of a lender.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) alive: bool,
    /// It had no slab left when it was last asked.
    pub(super) full: bool,
    /// Not even for who has nobody else.
    pub(super) pressed: bool,
    pub(super) slabs: u32,
    /// Slots of them that hold a page.
    pub(super) live: u64,
    /// What its memory costs: the lowest is the cheapest.
    pub(super) class: u8,
    /// What a read takes, in nanoseconds; 0: not measured.
    pub(super) measured_ns: u64,
    /// Free slots of its slabs that nobody has been promised.
    pub(super) spare: u32,
    /// So many slabs it asks back; [`ALL`] when it is leaving.
    pub(super) recalled: u32,
    /// Nobody else can have them.
    pub(super) stuck: Stuck,
}

/// Whether a lender's slabs can be given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stuck {
    #[default]
    No,
    /// To be told.
    Found,
    Told,
}

/// All slabs of a lender, those that it will lend included: it is leaving.
pub const ALL: u32 = u32::MAX;

impl Place {
    fn new(alive: bool) -> Self {
        Self {
            alive,
            full: false,
            pressed: false,
            slabs: 0,
            live: 0,
            class: 0,
            measured_ns: 0,
            spare: 0,
            recalled: 0,
            stuck: Stuck::No,
        }
    }

    /// It is worth being asked again.
    pub(super) fn may_have_room(&mut self) {
        (self.full, self.pressed) = (false, false);
    }
}

/// What the loss of a lender means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loss {
    /// Pages that have fewer copies now.
    pub poorer: u64,
    /// Pages that have no copy left, or too few parts.
    pub gone: u64,
}

/// Which slots of which slabs hold a page, and where the copies of each slab are.
///
/// Neighbouring slots are handed out in runs, so that pages evicted together can be fetched together. A *frozen* slab is
/// shared with a process forked from this one; its slots are read and let go, never written, until it is thawed. Every complete
/// copy of a slab holds every page of it; what a lost lender held is copied again, see [`SlotMap::next_step`].
#[derive(Clone, Debug)]
pub struct SlotMap {
    pub(super) slabs: Vec<Option<Slab>>,
    pub(super) slots_per_slab: u32,
    pub(super) places: Vec<Place>,
    pub(super) redundancy: Redundancy,
    pub(super) mender: Mender,
    pub(super) wish: Option<Wish>,
    pub(super) scale: Scale,
    pub(super) better: Better,
    /// How many slabs are being emptied.
    pub(super) emptying: u32,
    /// Slabs to give back to their lenders.
    pub(super) returns: Vec<SlabCopy>,
    pub(super) current: usize,
    pub(super) live_count: u64,
}

impl SlotMap {
    /// No slabs yet; each will have `slots_per_slab` slots and, where they can be had, as many copies or parts as `redundancy` says, on as many
    /// of the `lenders` lenders.
    pub fn new(slots_per_slab: u32, lenders: usize, redundancy: Redundancy) -> Self {
        assert!(slots_per_slab > 0 && slots_per_slab.is_multiple_of(64));
        let places = vec![Place::new(true); lenders];
        let (mender, returns) = (Mender::default(), Vec::new());
        Self {
            slabs: Vec::new(),
            slots_per_slab,
            places,
            redundancy,
            mender,
            wish: None,
            scale: Scale::default(),
            better: Better::default(),
            emptying: 0,
            returns,
            current: 0,
            live_count: 0,
        }
    }

    /// Slots of each slab.
    pub fn slots_per_slab(&self) -> u32 {
        self.slots_per_slab
    }

    /// How slabs are kept.
    pub fn redundancy(&self) -> Redundancy {
        self.redundancy
    }

    /// Slots that hold a page.
    pub fn live(&self) -> u64 {
        self.live_count
    }

    /// Slots that hold a page of which this lender has a complete copy, or a part.
    pub fn live_at(&self, lender: u32) -> u64 {
        self.places[lender as usize].live
    }

    /// Slabs borrowed, each counted once.
    pub fn slabs(&self) -> usize {
        self.slabs.iter().flatten().count()
    }

    /// Adds a slab that was borrowed at each of `copies`. `None` when slot numbers are used up.
    pub fn add(&mut self, copies: &[SlabCopy]) -> Option<SlabIndex> {
        let slab = Slab {
            copies: copies.iter().copied().collect(),
            live: vec![0; self.slots_per_slab as usize / 64],
            live_count: 0,
            heat: 0,
            due: 0,
            frozen: false,
            emptying: false,
            cursor: 0,
        };
        let index = self.slabs.iter().position(Option::is_none).unwrap_or(self.slabs.len());
        let last = (index as u64 + 1) * u64::from(self.slots_per_slab);
        if last > u64::from(Slot::MAX) {
            return None;
        }
        for copy in copies {
            self.places[copy.lender as usize].slabs += 1;
        }
        if index == self.slabs.len() {
            self.slabs.push(Some(slab));
        } else {
            self.slabs[index] = Some(slab);
        }
        self.current = index;
        Some(index as u32)
    }

    /// Complete copies of a slot's slab, and the page in it. `None` for a slab that was returned.
    #[inline]
    pub fn locate(&self, slot: Slot) -> Option<(&[SlabCopy], u32)> {
        let (index, page) = self.split(slot);
        Some((self.slabs.get(index)?.as_ref()?.copies.as_slice(), page))
    }

    /// Whether a slot may be overwritten in place.
    pub fn is_writable(&self, slot: Slot) -> bool {
        self.slabs[self.split(slot).0].as_ref().is_some_and(|slab| !slab.frozen)
    }

    /// Whether two slots are neighbours in one slab.
    pub fn adjacent(&self, slot: Slot, next: Slot) -> bool {
        next == slot.wrapping_add(1) && self.split(slot).0 == self.split(next).0
    }

    /// Takes a run of 1..=`want` free neighbouring slots; `None` when another slab is needed.
    pub fn take_run(&mut self, want: u32) -> Option<(Slot, u32)> {
        if let Some(run) = self.take_better(want) {
            return Some(run);
        }
        let count = self.slabs.len();
        for step in 0..count {
            let index = (self.current + step) % count;
            let Some(slab) = &mut self.slabs[index] else { continue };
            if slab.frozen || slab.emptying || slab.live_count == self.slots_per_slab {
                continue;
            }
            let (page, length) = slab.take_run(want, self.slots_per_slab);
            self.current = index;
            self.note_taken(index, length);
            return Some((self.join(index, page), length));
        }
        if !self.collects() {
            return None;
        }
        // Rather than that another slab is borrowed.
        self.stop_collecting();
        self.take_run(want)
    }

    /// So many more slots of a slab hold a page.
    pub(super) fn note_taken(&mut self, index: usize, slots: u32) {
        self.live_count += u64::from(slots);
        let copies = self.slabs[index].as_ref().map_or(&[][..], |slab| slab.copies.as_slice());
        copies.iter().for_each(|copy| self.places[copy.lender as usize].live += u64::from(slots));
    }

    /// Lets go of a slot. Returns its slab when that holds no page any more and can be returned to the lender.
    pub fn release(&mut self, slot: Slot) -> Option<SlabIndex> {
        let (index, page) = self.split(slot);
        let slab = self.slabs[index].as_mut().expect("slot of a slab that was returned");
        let (word, bit) = (page as usize / 64, 1 << (page % 64));
        assert!(slab.live[word] & bit != 0, "slot {slot} released twice");
        slab.live[word] &= !bit;
        slab.live_count -= 1;
        self.live_count -= 1;
        slab.copies.as_slice().iter().for_each(|copy| self.places[copy.lender as usize].live -= 1);
        let is_empty = slab.live_count == 0;
        if is_empty && core::mem::take(&mut slab.emptying) {
            self.emptying -= 1;
        }
        is_empty.then_some(index as u32)
    }

    /// Forgets an empty slab; [`SlotMap::take_return`] has its copies. False when it is not empty.
    pub fn remove(&mut self, slab: SlabIndex) -> bool {
        let Some(place) = self.slabs.get_mut(slab as usize) else { return false };
        if place.as_ref().is_none_or(|slab| slab.live_count != 0) {
            return false;
        }
        let Some(Slab { copies, .. }) = place.take() else { return false };
        for &copy in copies.as_slice() {
            self.give_back(copy);
        }
        self.stop_mending(slab);
        true
    }

    pub(super) fn give_back(&mut self, copy: SlabCopy) {
        let place = &mut self.places[copy.lender as usize];
        if place.alive {
            place.slabs -= 1;
            if place.recalled != ALL {
                place.recalled = place.recalled.saturating_sub(1);
            }
            self.not_wanted(copy);
        }
    }

    /// A slab that was borrowed is not needed: to be given back, see [`SlotMap::take_return`].
    pub fn not_wanted(&mut self, copy: SlabCopy) {
        self.places[copy.lender as usize].may_have_room();
        self.returns.push(copy);
    }

    /// A slab to be given back to its lender.
    pub fn take_return(&mut self) -> Option<SlabCopy> {
        self.returns.pop()
    }

    /// What a lender's memory costs, compared with that of others: pages go to the lowest class that has room.
    pub fn set_class(&mut self, lender: u32, class: u8) {
        self.places[lender as usize].class = class;
    }

    /// As it was set.
    pub fn class(&self, lender: u32) -> u8 {
        self.places[lender as usize].class
    }

    /// The class of the lender that a slot is read from; of none, of the one that would get the next page.
    #[inline]
    pub fn class_of(&self, slot: Slot) -> u8 {
        let index = if slot == 0 { self.next() } else { self.split(slot).0 };
        let slab = self.slabs.get(index).and_then(Option::as_ref);
        slab.map_or(0, |slab| self.class_of_slab(slab))
    }

    #[inline]
    pub(super) fn class_of_slab(&self, slab: &Slab) -> u8 {
        slab.copies.as_slice().iter().map(|copy| self.places[copy.lender as usize].class).min().unwrap_or(0)
    }

    /// Whether a lender of a lower class than `lender` had no slab left: it may have one now.
    pub fn is_overflow(&self, lender: u32) -> bool {
        let class = self.places[lender as usize].class;
        self.places.iter().any(|place| place.alive && place.full && place.class < class)
    }

    /// The lender to ask for a slab of which `taken` have copies: alive, not known to be full, rather one that asks nothing back, of the
    /// lowest class, and with the fewest slabs.
    pub fn candidate(&self, taken: &[SlabCopy]) -> Option<u32> {
        let fits = |(index, place): &(usize, &Place)| {
            place.alive && !place.full && taken.iter().all(|copy| copy.lender as usize != *index)
        };
        let lenders = self.places.iter().enumerate().filter(fits);
        lenders
            .min_by_key(|(_, place)| (place.recalled > 0, place.class, place.slabs))
            .map(|(index, _)| index as u32)
    }

    /// When there is no candidate: the lender to press for a slab, so that what lacks a copy gets one. It has refused before, and was not pressed
    /// since somebody gave something back.
    pub(super) fn last_resort(&self, taken: &[SlabCopy]) -> Option<u32> {
        let fits = |(index, place): &(usize, &Place)| {
            let has_copy = taken.iter().any(|copy| copy.lender as usize == *index);
            place.alive && place.full && !place.pressed && !has_copy
        };
        let lenders = self.places.iter().enumerate().filter(fits);
        let best = lenders.min_by_key(|(_, place)| (place.recalled > 0, place.class, place.slabs))?;
        Some(best.0 as u32)
    }

    /// A lender has no slab left.
    pub fn lender_full(&mut self, lender: u32) {
        self.places[lender as usize].full = true;
    }

    /// Lenders that were full may have something again.
    pub fn ask_again(&mut self) {
        self.places.iter_mut().for_each(Place::may_have_room);
        self.mender.look_again();
    }

    /// Whether a lender can be used.
    pub fn is_alive(&self, lender: u32) -> bool {
        self.places[lender as usize].alive
    }

    /// Lenders that can be used.
    pub fn alive(&self) -> usize {
        self.places.iter().filter(|place| place.alive).count()
    }

    /// A lender is lost with all that it held.
    pub fn lender_lost(&mut self, lender: u32) -> Loss {
        let class = self.places[lender as usize].class;
        self.places[lender as usize] = Place { class, ..Place::new(false) };
        self.returns.retain(|copy| copy.lender != lender);
        self.mender_lost(lender);
        let mut loss = Loss::default();
        for index in 0..self.slabs.len() {
            let Some(slab) = &mut self.slabs[index] else { continue };
            if slab.copies.remove(lender).is_none() {
                continue;
            }
            let (pages, left) = (u64::from(slab.live_count), slab.copies.as_slice().len());
            if pages == 0 {
                self.remove(index as u32);
            } else if left < self.redundancy.need() {
                loss.gone += pages;
            } else {
                loss.poorer += pages;
            }
        }
        self.mender.look_again();
        loss
    }

    /// A lost lender can be used again; it holds nothing.
    pub fn lender_back(&mut self, lender: u32) {
        let class = self.places[lender as usize].class;
        self.places[lender as usize] = Place { class, ..Place::new(true) };
        self.mender.look_again();
    }

    /// A lender asks so many slabs back, [`ALL`] when it is leaving; 0: it does not any more. [`SlotMap::next_step`] moves them, as far as
    /// others can have them.
    pub fn recall(&mut self, lender: u32, slabs: u32) {
        let place = &mut self.places[lender as usize];
        if place.alive {
            (place.recalled, place.stuck) = (slabs, Stuck::No);
            self.mender.look_again();
        }
    }

    /// Whether a lender waits for slabs.
    pub fn is_recalled(&self) -> bool {
        self.places.iter().any(|place| place.recalled > 0 && (place.slabs > 0 || place.recalled == ALL))
    }

    /// A lender that waits for slabs that nobody else can have; told once for each time it has asked.
    pub fn take_stuck(&mut self) -> Option<u32> {
        let lender = self.places.iter().position(|place| place.stuck == Stuck::Found)?;
        self.places[lender].stuck = Stuck::Told;
        Some(lender as u32)
    }

    /// Whether a lender waits for slabs that nobody else can have.
    pub fn is_stuck(&self) -> bool {
        self.places.iter().any(|place| place.recalled > 0 && place.stuck != Stuck::No && place.slabs > 0)
    }

    /// Whether a slot is in such a slab.
    pub fn is_stuck_slot(&self, slot: Slot) -> bool {
        let is_stuck = |copy: &SlabCopy| {
            let place = &self.places[copy.lender as usize];
            place.recalled > 0 && place.stuck != Stuck::No
        };
        self.locate(slot).is_some_and(|(copies, _)| copies.iter().any(is_stuck))
    }

    /// A lender that is leaving, has nothing any more, and is not needed: there are enough others.
    pub fn left(&self) -> Option<u32> {
        let others = self.places.iter().filter(|place| place.alive && place.recalled != ALL).count();
        let is_left = |place: &Place| place.alive && place.recalled == ALL && place.slabs == 0;
        let lender =
            self.places.iter().position(is_left).filter(|_| others >= self.redundancy.total())? as u32;
        let is_idle = self.returns.iter().all(|copy| copy.lender != lender) && !self.is_asking(lender);
        is_idle.then_some(lender)
    }

    /// Whether a lender has the contents of a page.
    pub fn has_pages(&self, lender: u32) -> bool {
        let has = |slab: &Slab| slab.copies.as_slice().iter().any(|copy| copy.lender == lender);
        self.slabs.iter().flatten().any(|slab| slab.live_count > 0 && has(slab))
    }

    /// Whether every page can be had from lenders that are none of the `doubtful`.
    pub fn can_spare(&self, doubtful: impl Fn(u32) -> bool) -> bool {
        let safe = |slab: &Slab| {
            let sure = slab.copies.as_slice().iter().filter(|copy| !doubtful(copy.lender)).count();
            slab.live_count == 0 || sure >= self.redundancy.need()
        };
        self.slabs.iter().flatten().all(safe)
    }

    /// Pages with fewer copies than they should have.
    pub fn poor(&self) -> u64 {
        let poor = |slab: &&Slab| slab.copies.as_slice().len() < self.redundancy.total();
        self.slabs.iter().flatten().filter(poor).map(|slab| u64::from(slab.live_count)).sum()
    }

    /// Whether any slab has fewer copies than it should, with pages or without.
    pub fn lacks_copies(&self) -> bool {
        self.slabs.iter().flatten().any(|slab| slab.copies.as_slice().len() < self.redundancy.total())
    }

    /// A fork: every slab is shared from now on.
    pub fn freeze(&mut self) {
        self.stop_collecting();
        for slab in self.slabs.iter_mut().flatten() {
            slab.frozen = true;
        }
    }

    /// Whether a slab is frozen.
    pub fn is_frozen(&self) -> bool {
        self.slabs.iter().flatten().any(|slab| slab.frozen)
    }

    /// Frozen slabs with their complete copies.
    pub fn frozen(&self) -> impl Iterator<Item = (SlabIndex, Copies)> + '_ {
        self.slabs.iter().enumerate().filter_map(|(index, slab)| {
            slab.as_ref().filter(|slab| slab.frozen).map(|slab| (index as u32, slab.copies))
        })
    }

    /// A frozen slab has no other holder any more.
    pub fn thaw(&mut self, slab: SlabIndex) {
        if let Some(Some(slab)) = self.slabs.get_mut(slab as usize) {
            slab.frozen = false;
        }
    }

    pub(super) fn split(&self, slot: Slot) -> (usize, u32) {
        assert!(slot != 0, "slot 0 is none");
        ((slot - 1) as usize / self.slots_per_slab as usize, (slot - 1) % self.slots_per_slab)
    }

    pub(super) fn join(&self, slab: usize, page: u32) -> Slot {
        slab as u32 * self.slots_per_slab + page + 1
    }
}

impl Slab {
    pub(super) fn is_live(&self, page: u32) -> bool {
        self.live[page as usize / 64] >> (page % 64) & 1 != 0
    }

    /// The first live page from `from` on, and how many pages there are from it to the last live one within `width`.
    pub(super) fn live_run(&self, from: u32, width: u32, slots: u32) -> Option<(u32, u32)> {
        let mut first = from;
        while first < slots && !self.is_live(first) {
            let rest = self.live[first as usize / 64] >> (first % 64);
            first += if rest == 0 { 64 - first % 64 } else { rest.trailing_zeros() };
        }
        let end = slots.min(first.saturating_add(width));
        let last = (first..end).rev().find(|&page| self.is_live(page))?;
        Some((first, last + 1 - first))
    }

    pub(super) fn live_in(&self, from: u32, pages: u32) -> u64 {
        (from..from + pages).filter(|&page| self.is_live(page)).count() as u64
    }

    pub(super) fn take_run(&mut self, want: u32, slots: u32) -> (u32, u32) {
        let mut start = self.cursor % slots;
        while self.is_live(start) {
            let word = self.live[start as usize / 64];
            start = if word == u64::MAX { (start / 64 + 1) * 64 % slots } else { (start + 1) % slots };
        }
        let mut end = start;
        while end < slots && end - start < want && !self.is_live(end) {
            self.live[end as usize / 64] |= 1 << (end % 64);
            end += 1;
        }
        self.live_count += end - start;
        self.cursor = end % slots;
        (start, end - start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(lender: u32, slab: u32) -> SlabCopy {
        SlabCopy { lender, slab, part: 0 }
    }

    #[test]
    fn runs_fill_a_slab_and_ask_for_the_next() {
        let mut map = SlotMap::new(128, 5, Redundancy::replicas(1));
        assert_eq!(map.take_run(10), None);
        map.add(&[at(3, 77)]);
        assert_eq!(map.take_run(100), Some((1, 100)));
        assert_eq!(map.take_run(100), Some((101, 28)));
        assert_eq!(map.take_run(1), None);
        assert_eq!(map.locate(128), Some((&[at(3, 77)][..], 127)));
        map.add(&[at(4, 5)]);
        assert_eq!(map.take_run(64), Some((129, 64)));
        assert!(!map.adjacent(128, 129), "neighbours of different slabs are not adjacent");
        assert!(map.adjacent(127, 128));
    }

    #[test]
    fn frozen_slabs_are_let_go_but_not_written() {
        let mut map = SlotMap::new(64, 1, Redundancy::replicas(1));
        let slab = map.add(&[at(0, 9)]).unwrap();
        map.take_run(2);
        map.freeze();
        assert!(!map.is_writable(1));
        assert_eq!(map.take_run(1), None);
        assert_eq!(map.release(1), None);
        map.thaw(slab);
        assert_eq!(map.take_run(64), Some((3, 62)));
        assert_eq!(map.take_run(64), Some((1, 1)));
        for slot in 1..64 {
            assert_eq!(map.release(slot), None);
        }
        assert!(!map.remove(slab));
        assert_eq!(map.release(64), Some(slab));
        assert!(map.remove(slab));
        assert_eq!((map.take_return(), map.take_return()), (Some(at(0, 9)), None));
        assert_eq!((map.slabs(), map.live(), map.locate(1)), (0, 0, None));
    }

    #[test]
    fn new_slabs_go_where_the_fewest_are() {
        let mut map = SlotMap::new(64, 3, Redundancy::replicas(2));
        assert_eq!(map.candidate(&[]), Some(0));
        map.add(&[at(0, 0), at(1, 0)]);
        assert_eq!((map.candidate(&[]), map.candidate(&[at(2, 0)])), (Some(2), Some(0)));
        map.lender_full(2);
        assert_eq!((map.candidate(&[at(0, 0)]), map.candidate(&[at(0, 0), at(1, 0)])), (Some(1), None));
        map.ask_again();
        assert_eq!(map.candidate(&[at(0, 0)]), Some(2));
        // The slab was empty: nothing is lost with its lender, and the other copy goes back.
        assert_eq!(map.lender_lost(0), Loss::default());
        assert_eq!((map.take_return(), map.candidate(&[]), map.alive()), (Some(at(1, 0)), Some(1), 2));
    }

    #[test]
    fn slabs_are_borrowed_where_they_cost_least() {
        let mut map = SlotMap::new(64, 4, Redundancy::replicas(1));
        [2, 1, 0, 0].into_iter().enumerate().for_each(|(lender, class)| map.set_class(lender as u32, class));
        map.add(&[at(2, 0)]);
        assert_eq!(map.candidate(&[]), Some(3));
        map.lender_full(3);
        assert_eq!((map.candidate(&[]), map.is_overflow(2), map.is_overflow(1)), (Some(2), false, true));
        map.lender_full(2);
        assert_eq!((map.candidate(&[]), map.candidate(&[at(1, 0)])), (Some(1), Some(0)));
        map.recall(1, 1);
        assert_eq!(map.candidate(&[]), Some(0), "one that asks for nothing");
        map.lender_lost(2);
        map.lender_back(2);
        assert_eq!(map.candidate(&[]), Some(2));
        map.ask_again();
        assert!(!map.is_overflow(0));
    }

    #[test]
    fn a_page_is_gone_with_its_last_copy() {
        let mut map = SlotMap::new(64, 3, Redundancy::replicas(2));
        map.add(&[at(0, 0), at(1, 0)]);
        map.take_run(7);
        assert!(map.can_spare(|lender| lender == 0) && !map.can_spare(|lender| lender < 2));
        assert_eq!((map.lender_lost(0), map.poor()), (Loss { poorer: 7, gone: 0 }, 7));
        assert!(!map.can_spare(|lender| lender == 1));
        assert_eq!(map.lender_lost(1), Loss { poorer: 0, gone: 7 });
    }

    #[test]
    fn a_page_is_gone_when_too_few_parts_are_left() {
        let mut map = SlotMap::new(64, 4, Redundancy::erasure(2, 2).unwrap());
        map.add(&[at(0, 0), at(1, 0), at(2, 0), at(3, 0)]);
        map.take_run(7);
        assert!(map.can_spare(|lender| lender < 2) && !map.can_spare(|lender| lender < 3));
        assert_eq!((map.lender_lost(0), map.poor()), (Loss { poorer: 7, gone: 0 }, 7));
        assert_eq!(map.lender_lost(3), Loss { poorer: 7, gone: 0 });
        assert!(!map.can_spare(|lender| lender == 1));
        assert_eq!(map.lender_lost(1), Loss { poorer: 0, gone: 7 });
    }

    #[test]
    fn only_what_divides_a_page_is_a_number_of_parts() {
        for (data, parity, can_be) in [
            (2, 1, true),
            (4, 2, true),
            (8, 4, true),
            (1, 1, false),
            (3, 1, false),
            (16, 1, false),
            (4, 0, false),
            (4, 5, false),
        ] {
            assert_eq!(Redundancy::erasure(data, parity).is_some(), can_be, "{data}+{parity}");
        }
    }
}
