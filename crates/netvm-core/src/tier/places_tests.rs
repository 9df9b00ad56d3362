//! Places chosen by what they cost against every order that is given once and for all: three lenders, packing, pages of which half shrink, and a hot
//! part that changes.

extern crate std;

use super::choice::{Choice, Policy};
use crate::residency::{Redundancy, SlabCopy, Slot, SlotMap, Step, StepEnd};
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

/// Pages of a slab.
const SLAB: usize = 64;
const PAGES: usize = 64 * SLAB;
/// Frames of local memory.
const LOCAL: usize = PAGES / 8;
/// Slabs of each lender: near, slow, in a file.
const ROOM: [u32; 3] = [16, 24, 80];
const FAULT: f64 = 5e3;
const PACK: f64 = 3e3;
const UNPACK: f64 = 1e3;
const HIT: f64 = 100.0;
/// A page of a move, at each of both ends, beside a read's time.
const COPY: f64 = 1e3;
/// A phase, in nanoseconds.
const PHASE: f64 = 2e9;
const ORDERS: [[u8; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 0, 1], [1, 2, 0], [2, 1, 0]];

#[derive(Clone, Copy, PartialEq)]
enum Place {
    Nowhere,
    Mapped,
    Packed,
    Remote,
}

#[derive(Clone, Copy)]
struct Page {
    place: Place,
    /// When it left.
    stamp: u32,
    slot: Slot,
}

/// What a page's place costs, and which pages shrink.
#[derive(Clone, Copy)]
struct World {
    fetch: [f64; 3],
    /// Every other so many pages become half as large; 0: none does.
    shrinking: usize,
    /// Pages of the hot part lie among the others: every fourth of all, in place of a quarter of all.
    scattered: bool,
}

const WORLD: World = World { fetch: [5e3, 150e3, 500e3], shrinking: 16, scattered: false };

struct Pager {
    world: World,
    choice: Choice,
    is_fixed: bool,
    map: SlotMap,
    room: [u32; 3],
    next_slab: u32,
    pages: Vec<Page>,
    mapped: VecDeque<usize>,
    packed: VecDeque<(usize, u32)>,
    packed_pages: usize,
    clock: u32,
    now: f64,
    /// When the step under way ends, how it does, and how long it takes for how many pages.
    step: Option<(f64, StepEnd)>,
    copy: (u32, f64),
    cooled: f64,
    random: u64,
}

impl Pager {
    fn new(world: World, fixed: Option<([u8; 3], bool)>) -> Self {
        let mut map = SlotMap::new(SLAB as u32, 3, Redundancy::replicas(1));
        for lender in 0..3 {
            let rank = fixed.map_or(lender as u8, |(classes, _)| classes[lender as usize]);
            map.set_class(lender, rank);
            map.set_read_ns(lender, world.fetch[lender as usize] as u64);
        }
        let policy = match fixed {
            None => Policy::Auto,
            Some((_, true)) => Policy::Packed,
            Some((_, false)) => Policy::Lender,
        };
        let mut pager = Self {
            world,
            choice: Choice::new(policy),
            is_fixed: fixed.is_some(),
            map,
            room: ROOM,
            next_slab: 0,
            pages: vec![Page { place: Place::Nowhere, stamp: 0, slot: 0 }; PAGES],
            mapped: VecDeque::new(),
            packed: VecDeque::new(),
            packed_pages: 0,
            clock: 0,
            now: 0.0,
            step: None,
            copy: (0, 0.0),
            cooled: 0.0,
            random: 0x1234_5678_9ABC_DEF1,
        };
        (0..PAGES).for_each(|page| pager.touch(page));
        pager
    }

    fn lend(&mut self, lender: u32) -> Option<u32> {
        let room = &mut self.room[lender as usize];
        *room = room.checked_sub(1)?;
        self.next_slab += 1;
        Some(self.next_slab)
    }

    fn slot(&mut self) -> Slot {
        loop {
            if let Some((slot, _)) = self.map.take_run(1) {
                return slot;
            }
            let lender = self.map.candidate(&[]).unwrap();
            match self.lend(lender) {
                Some(slab) => drop(self.map.add(&[SlabCopy { lender, slab, part: 0 }])),
                None => self.map.lender_full(lender),
            }
        }
    }

    fn release(&mut self, slot: Slot) {
        if slot != 0
            && let Some(slab) = self.map.release(slot)
        {
            self.map.remove(slab);
            self.give_back();
        }
    }

    fn give_back(&mut self) {
        while let Some(copy) = self.map.take_return() {
            self.room[copy.lender as usize] += 1;
        }
    }

    fn pool_frames(&self) -> usize {
        self.packed_pages / 2
    }

    fn touch(&mut self, index: usize) {
        let page = self.pages[index];
        if page.place == Place::Mapped {
            self.now += HIT;
            return;
        }
        self.now += FAULT;
        self.choice.costs.fault.note(FAULT);
        if page.place != Place::Nowhere {
            let class = usize::from(self.map.class_of(page.slot));
            if page.place == Place::Packed {
                self.now += UNPACK;
                self.choice.costs.unpack.note(UNPACK);
                self.packed_pages -= 1;
            } else {
                let fetch = self.world.fetch[self.map.locate(page.slot).unwrap().0[0].lender as usize];
                self.now += fetch;
                self.choice.costs.fetch[class].note(fetch);
                self.map.heat(page.slot, 1);
                if !self.is_fixed && self.map.promote(page.slot, self.clock - page.stamp) {
                    self.release(page.slot);
                    self.pages[index].slot = 0;
                }
            }
            if self.choice.note_age(self.clock - page.stamp, class as u8) {
                self.choice.decide(LOCAL);
            }
        }
        self.pages[index].place = Place::Mapped;
        self.mapped.push_back(index);
        while self.mapped.len() + self.pool_frames() > LOCAL {
            self.make_room();
        }
        self.sort();
    }

    fn make_room(&mut self) {
        if self.pool_frames() > self.choice.frames(LOCAL) {
            let (index, stamp) = self.packed.pop_front().unwrap();
            if self.pages[index].place == Place::Packed && self.pages[index].stamp == stamp {
                if self.pages[index].slot == 0 {
                    self.now += UNPACK;
                    self.pages[index].slot = self.slot();
                }
                self.pages[index].place = Place::Remote;
                self.packed_pages -= 1;
            }
            return;
        }
        let index = self.mapped.pop_front().unwrap();
        self.clock += 1;
        self.choice.note_evicted(1);
        let shrinks = self.world.shrinking > 0 && (index / self.world.shrinking).is_multiple_of(2);
        let slot = self.pages[index].slot;
        let tries = self.choice.try_to_pack(self.map.class_of(slot));
        if tries || self.choice.sample() {
            self.now += PACK;
            self.choice.costs.pack.note(PACK);
            self.choice.costs.unpack.note(UNPACK);
            self.choice.costs.changed.note(0.0);
            self.choice.tried(shrinks.then_some(8));
        }
        self.pages[index].stamp = self.clock;
        if tries && shrinks {
            self.packed.push_back((index, self.clock));
            self.packed_pages += 1;
            self.pages[index].place = Place::Packed;
        } else {
            if slot == 0 {
                self.pages[index].slot = self.slot();
            }
            self.pages[index].place = Place::Remote;
        }
    }

    /// Slabs change places while the program goes on; half of the time that copying takes is the program's.
    fn sort(&mut self) {
        if self.is_fixed {
            return;
        }
        if let Some((until, end)) = self.step {
            if self.now < until {
                return;
            }
            if end == StepEnd::Done && self.copy.0 > 0 {
                self.map.note_copied(self.copy.0, self.copy.1 as u64);
            }
            self.step = None;
            self.map.step_ended(end);
        }
        if self.now >= self.cooled + 5e8 {
            self.cooled = self.now;
            self.map.cool();
        }
        if !self.map.is_mending() && self.map.is_mixed() {
            self.map.weigh();
        }
        let step = self.map.next_step();
        self.give_back();
        let Some(step) = step else { return };
        self.map.step_posted();
        let (lender, pages, end) = match step {
            Step::Borrow { lender, .. } => {
                let end = self.lend(lender).map_or(StepEnd::Full, StepEnd::Borrowed);
                (lender, 0, end)
            }
            Step::Read { from, pages, .. } => (from.as_slice()[0].lender, pages, StepEnd::Done),
            Step::Write { to, pages, .. } => (to.lender, pages, StepEnd::Done),
        };
        let copying = f64::from(pages) * COPY;
        let time = self.world.fetch[lender as usize] + copying;
        self.copy = match step {
            Step::Read { .. } => (0, time),
            Step::Write { .. } => (pages, self.copy.1 + time),
            Step::Borrow { .. } => (0, 0.0),
        };
        self.now += copying / 2.0;
        self.step = Some((self.now + time, end));
    }

    fn random(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as usize
    }

    /// Nanoseconds of an access while this quarter is hot.
    fn phase(&mut self, quarter: usize) -> f64 {
        let (start, mut accesses) = (self.now, 0);
        while self.now < start + PHASE {
            let page = match self.random() % 10 {
                0 => self.random() % PAGES,
                _ if self.world.scattered => self.random() % (PAGES / 4) * 4 + quarter,
                _ => self.random() % (PAGES / 4) + quarter * (PAGES / 4),
            };
            self.touch(page);
            accesses += 1;
        }
        (self.now - start) / f64::from(accesses)
    }
}

fn run(world: World, fixed: Option<([u8; 3], bool)>, phases: &[usize]) -> Vec<f64> {
    let mut pager = Pager::new(world, fixed);
    phases.iter().map(|&quarter| pager.phase(quarter)).collect()
}

/// The mean of what is chosen, and the best mean of an order that is given.
fn compare(world: World, phases: &[usize]) -> (f64, f64) {
    let mean = |each: &Vec<f64>| each.iter().sum::<f64>() / each.len() as f64;
    let chosen = run(world, None, phases);
    std::println!("chosen {:.0} {chosen:.0?}", mean(&chosen));
    let orders = ORDERS.iter().flat_map(|&order| [(order, false), (order, true)]);
    let each = orders.map(|order| {
        let found = run(world, Some(order), phases);
        std::println!("{order:?} {:.0} {found:.0?}", mean(&found));
        mean(&found)
    });
    (mean(&chosen), each.min_by(f64::total_cmp).unwrap())
}

#[test]
fn places_that_are_chosen_are_better_than_every_order() {
    let (chosen, best) = compare(WORLD, &[3, 2, 1, 0]);
    assert!(chosen < best, "{chosen} {best}");
    let (chosen, best) = compare(WORLD, &[3, 2]);
    assert!(chosen < best, "{chosen} {best}");
}

#[test]
fn hot_pages_among_cold_ones_find_their_places_too() {
    let (chosen, best) = compare(World { scattered: true, ..WORLD }, &[3, 2, 1, 0]);
    assert!(chosen < best, "{chosen} {best}");
}

/// What is hot once is hot for good: then the order is best that has it near.
#[test]
fn the_best_order_is_found_where_nothing_changes() {
    let (chosen, best) = compare(WORLD, &[0; 6]);
    assert!(chosen < best * 1.03, "{chosen} {best}");
}

#[test]
fn lenders_that_cost_the_same_have_nothing_to_change() {
    let alike = World { fetch: [20e3, 21e3, 19e3], ..WORLD };
    let mut pager = Pager::new(alike, None);
    for quarter in [3, 2, 1, 0] {
        pager.phase(quarter);
    }
    assert_eq!(pager.map.sorted(), 0);
}

#[test]
fn pages_that_do_not_shrink_stay_unpacked() {
    let (chosen, best) = compare(World { shrinking: 0, ..WORLD }, &[3, 2, 1, 0]);
    assert!(chosen < best, "{chosen} {best}");
}
