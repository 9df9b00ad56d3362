//! A model of lenders that are lost, come back and ask for their memory, in all orders of their answers.

use super::super::copies::Redundancy;
use super::super::slots::{ALL, Loss};
use super::*;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

const SLOTS: u32 = 128;

enum Op {
    Write {
        slab: u32,
        page: u32,
        part: u8,
        values: Vec<u64>,
    },
    Read {
        slab: u32,
        page: u32,
        part: u8,
        value: u64,
    },
    Step(Step),
    /// Of the step that reads, what this lender has.
    Part {
        slab: u32,
        page: u32,
        pages: u32,
        part: u8,
    },
    Return(u32),
}

#[derive(Default)]
struct Lender {
    /// Part of a page: which, and of what.
    memory: BTreeMap<(u32, u32), (u8, u64)>,
    queue: VecDeque<Op>,
    held: Vec<u32>,
    lent: u32,
}

/// Pages on lenders that execute what is asked of them in order, whenever they like.
struct World {
    map: SlotMap,
    lenders: Vec<Lender>,
    /// What each slot must hold.
    pages: BTreeMap<Slot, u64>,
    buffer: Vec<u64>,
    /// Parts that have been read for the buffer; `None` where a lender was lost.
    parts: Vec<Option<Vec<(u8, u64)>>>,
    written: u64,
    random: u64,
    losses: u32,
    lefts: u32,
    unposted: Option<Step>,
}

impl World {
    fn new(seed: u64, redundancy: Redundancy, lenders: usize) -> Self {
        let map = SlotMap::new(SLOTS, lenders, redundancy);
        let lenders = (0..lenders).map(|_| Lender::default()).collect();
        let (pages, buffer) = (BTreeMap::new(), Vec::new());
        Self {
            map,
            lenders,
            pages,
            buffer,
            parts: Vec::new(),
            written: 0,
            random: seed,
            losses: 0,
            lefts: 0,
            unposted: None,
        }
    }

    fn below(&mut self, end: usize) -> usize {
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.random >> 33) as usize % end
    }

    fn some_slot(&mut self) -> Option<Slot> {
        let from = self.below(SLOTS as usize * 8) as Slot;
        self.pages.range(from..).chain(self.pages.iter()).next().map(|(&slot, _)| slot)
    }

    fn borrow(&mut self) {
        let mut copies = Vec::new();
        while copies.len() < self.map.redundancy.need() {
            while copies.len() < self.map.redundancy.total()
                && let Some(lender) = self.map.candidate(&copies)
            {
                let slab = self.lend(lender);
                copies.push(SlabCopy { lender, slab, part: copies.len() as u8 });
            }
            // All were full: nothing can be put where nobody has anything.
            self.map.ask_again();
        }
        self.map.add(&copies).unwrap();
    }

    fn lend(&mut self, lender: u32) -> u32 {
        let lender = &mut self.lenders[lender as usize];
        lender.lent += 1;
        lender.held.push(lender.lent);
        lender.lent
    }

    fn write(&mut self, first: Slot, count: u32) {
        let (copies, page) = self.map.write(first, count).unwrap();
        let values: Vec<u64> = (1..=u64::from(count)).map(|index| self.written + index).collect();
        self.written += u64::from(count);
        for (slot, &value) in (first..).zip(&values) {
            self.pages.insert(slot, value);
        }
        for copy in copies.as_slice() {
            let values = values.clone();
            self.lenders[copy.lender as usize].queue.push_back(Op::Write {
                slab: copy.slab,
                page,
                part: copy.part,
                values,
            });
        }
    }

    fn act(&mut self) {
        match self.below(100) {
            0..20 => {
                let want = self.below(40) as u32 + 1;
                let (slot, count) = loop {
                    match self.map.take_run(want) {
                        Some(run) => break run,
                        None => self.borrow(),
                    }
                };
                self.write(slot, count);
            }
            20..40 => {
                // Neighbours that are there, as far as they may be written.
                let Some(slot) = self.some_slot() else { return };
                let want = self.below(20) as u32 + 1;
                let mut count = 1;
                while count < want
                    && self.pages.contains_key(&(slot + count))
                    && self.map.adjacent(slot + count - 1, slot + count)
                {
                    count += 1;
                }
                if self.map.is_writable(slot) {
                    self.write(slot, count);
                }
            }
            40..55 => {
                let Some(slot) = self.some_slot() else { return };
                let value = self.pages[&slot];
                let (copies, page) = self.map.locate(slot).unwrap();
                let copies = copies.to_vec();
                let copy = copies[self.below(copies.len())];
                let read = Op::Read { slab: copy.slab, page, part: copy.part, value };
                self.lenders[copy.lender as usize].queue.push_back(read);
            }
            55..72 => {
                let Some(slot) = self.some_slot() else { return };
                for slot in slot..slot + self.below(20) as u32 {
                    if self.pages.remove(&slot).is_some()
                        && let Some(slab) = self.map.release(slot)
                        && self.map.slabs() > 1
                    {
                        assert!(self.map.remove(slab));
                    }
                }
            }
            72 => self.map.freeze(),
            73 => {
                let frozen: Vec<_> = self.map.frozen().collect();
                frozen.iter().for_each(|(slab, _)| self.map.thaw(*slab));
            }
            74 => {
                let lender = self.below(self.lenders.len()) as u32;
                // With too few left nothing could be put anywhere.
                let is_spare = self.map.alive() > self.map.redundancy.need();
                let can_spare = is_spare && self.map.can_spare(|doubtful| doubtful == lender);
                if self.map.is_alive(lender) && can_spare {
                    self.lose(lender);
                }
            }
            75..77 => {
                let lender = self.below(self.lenders.len()) as u32;
                if !self.map.is_alive(lender) {
                    self.map.lender_back(lender);
                }
            }
            77 => {
                self.map.ask_again();
                let lender = self.below(self.lenders.len()) as u32;
                let class = self.below(3) as u8;
                self.map.set_class(lender, class);
                if let Some(slot) = self.some_slot() {
                    self.map.heat(slot, 200);
                }
                self.map.weigh();
            }
            78 => {
                let lender = self.below(self.lenders.len()) as u32;
                let slabs = [0, 1, 3, ALL][self.below(4)];
                self.map.recall(lender, slabs);
            }
            79 => {
                if let Some(lender) = self.map.left() {
                    self.leave(lender);
                }
                while let Some(lender) = self.map.take_stuck() {
                    assert!(self.map.is_alive(lender));
                }
            }
            _ => {
                let lender = self.below(self.lenders.len());
                self.execute(lender);
            }
        }
        self.post();
    }

    /// What the map wants done.
    fn post(&mut self) {
        while let Some(copy) = self.map.take_return() {
            self.lenders[copy.lender as usize].queue.push_back(Op::Return(copy.slab));
        }
        self.unposted = self.unposted.or_else(|| self.map.next_step());
        // Connections have no room for it at times.
        if self.below(3) > 0
            && let Some(step) = self.unposted.take()
        {
            let lender = match step {
                Step::Read { from, page, pages } => return self.read_parts(from, page, pages),
                Step::Borrow { lender, .. } | Step::Write { to: SlabCopy { lender, .. }, .. } => lender,
            };
            if self.map.is_alive(lender) {
                self.lenders[lender as usize].queue.push_back(Op::Step(step));
                self.map.step_posted();
            } else {
                self.map.step_ended(StepEnd::Lost);
            }
        }
    }

    /// From some of them.
    fn read_parts(&mut self, from: Copies, page: u32, pages: u32) {
        let (mut copies, need) = (from.as_slice().to_vec(), self.map.redundancy.need());
        while copies.len() > need {
            let place = self.below(copies.len());
            copies.swap_remove(place);
        }
        self.parts.clear();
        self.map.step_posted();
        for SlabCopy { lender, slab, part } in copies {
            if self.map.is_alive(lender) {
                let queue = &mut self.lenders[lender as usize].queue;
                queue.push_back(Op::Part { slab, page, pages, part });
            } else {
                self.part_read(None);
            }
        }
    }

    fn part_read(&mut self, values: Option<Vec<(u8, u64)>>) {
        self.parts.push(values);
        let need = self.map.redundancy.need();
        if self.parts.len() < need {
            return;
        }
        let Some(parts) = core::mem::take(&mut self.parts).into_iter().collect::<Option<Vec<_>>>() else {
            return self.map.step_ended(StepEnd::Lost);
        };
        // Parts of different contents make a page of none.
        let value = |index: usize| {
            let (_, value) = parts[0][index];
            let is_whole = parts.iter().enumerate().all(|(at, part)| {
                let is_other = |other: &Vec<(u8, u64)>| need == 1 || other[index].0 != part[index].0;
                part[index].1 == value && parts[..at].iter().all(is_other)
            });
            if is_whole { value } else { u64::MAX }
        };
        self.buffer = (0..parts[0].len()).map(value).collect();
        self.map.step_ended(StepEnd::Done);
    }

    fn lose(&mut self, lender: u32) {
        self.losses += 1;
        assert_eq!(self.map.lender_lost(lender).gone, 0);
        let lost = core::mem::take(&mut self.lenders[lender as usize]);
        for op in lost.queue {
            match op {
                Op::Step(_) => self.map.step_ended(StepEnd::Lost),
                Op::Part { .. } => self.part_read(None),
                _ => {}
            }
        }
    }

    /// What is leaving and holds nothing can go, as soon as it has been given all that was its own.
    fn leave(&mut self, lender: u32) {
        let place = &self.lenders[lender as usize];
        if place.queue.is_empty() {
            assert_eq!(place.held.len(), 0, "it still lends something");
            assert_eq!(self.map.lender_lost(lender), Loss::default());
            self.lenders[lender as usize] = Lender::default();
            self.lefts += 1;
        }
    }

    /// Lenders that ask nothing back.
    fn staying(&self) -> usize {
        let stays = |place: &&super::super::slots::Place| place.alive && place.recalled == 0;
        self.map.places.iter().filter(stays).count()
    }

    fn execute(&mut self, index: usize) {
        let lender = &mut self.lenders[index];
        let Some(op) = lender.queue.pop_front() else { return };
        match op {
            Op::Write { slab, page, part, values } => {
                assert!(lender.held.contains(&slab), "a write to a slab that was given back");
                let pages = (page..).zip(values).map(|(page, value)| ((slab, page), (part, value)));
                lender.memory.extend(pages);
            }
            Op::Read { slab, page, part, value } => {
                assert_eq!(lender.memory[&(slab, page)], (part, value));
            }
            Op::Return(slab) => {
                let place = lender.held.iter().position(|&held| held == slab);
                lender.held.swap_remove(place.expect("given back twice"));
                lender.memory.retain(|&(held, _), _| held != slab);
            }
            Op::Part { slab, page, pages, part } => {
                let read = |page| lender.memory.get(&(slab, page)).copied().unwrap_or((part, 0));
                let values = (page..page + pages).map(read).collect();
                self.part_read(Some(values));
            }
            Op::Step(Step::Read { .. }) => unreachable!("it is read part by part"),
            Op::Step(Step::Write { to, page, pages }) => {
                assert_eq!(self.buffer.len(), pages as usize);
                let values = (page..).zip(&self.buffer);
                lender.memory.extend(values.map(|(page, &value)| ((to.slab, page), (to.part, value))));
                self.map.step_ended(StepEnd::Done);
            }
            Op::Step(Step::Borrow { .. }) => {
                let full = self.below(4) == 0;
                let end = if full { StepEnd::Full } else { StepEnd::Borrowed(self.lend(index as u32)) };
                self.map.step_ended(end);
            }
        }
    }

    /// Every complete copy holds what was written last, and nothing is borrowed that is not needed.
    fn check(&mut self) {
        let (mut rounds, total) = (0, self.map.redundancy.total());
        while self.map.is_mending()
            || self.unposted.is_some()
            || !self.map.returns.is_empty()
            || (self.map.poor() > 0 && self.map.alive() >= total)
            || (self.map.places.iter().any(|place| place.recalled > 0 && place.slabs > 0)
                && self.staying() >= total)
            || self.lenders.iter().any(|lender| !lender.queue.is_empty())
        {
            rounds += 1;
            assert!(rounds < 100_000, "it does not come to an end");
            (0..self.lenders.len()).for_each(|lender| self.execute(lender));
            self.map.ask_again();
            if rounds < 400 && rounds % 20 == 0 {
                let class = self.below(3) as u8;
                let lender = self.below(self.lenders.len()) as u32;
                self.map.set_class(lender, class);
                if let Some(slot) = self.some_slot() {
                    self.map.heat(slot, 1000);
                }
                self.map.weigh();
            }
            self.post();
        }
        for (&slot, &value) in &self.pages {
            let (copies, page) = self.map.locate(slot).unwrap();
            assert!(copies.len() >= total.min(self.map.alive()), "slot {slot}: {copies:?}");
            for copy in copies {
                let memory = &self.lenders[copy.lender as usize].memory;
                let found = memory.get(&(copy.slab, page));
                assert_eq!(found, Some(&(copy.part, value)), "slot {slot} in {copy:?}");
            }
        }
        let held: usize = self.lenders.iter().map(|lender| lender.held.len()).sum();
        let copies = self.map.slabs.iter().flatten().map(|slab| slab.copies.as_slice().len());
        assert_eq!(held, copies.sum::<usize>());
        for lender in 0..self.lenders.len() as u32 {
            let at =
                |slot: &&Slot| self.map.locate(**slot).unwrap().0.iter().any(|copy| copy.lender == lender);
            assert_eq!(self.map.live_at(lender), self.pages.keys().filter(at).count() as u64);
        }
    }
}

#[test]
fn no_page_is_ever_lost_or_stale_while_lenders_come_and_go() {
    come_and_go(Redundancy::replicas(2));
}

#[test]
fn the_same_with_pages_in_parts() {
    come_and_go(Redundancy::erasure(2, 1).unwrap());
    come_and_go(Redundancy::erasure(4, 2).unwrap());
}

fn come_and_go(redundancy: Redundancy) {
    let (mut losses, mut mended, mut moved, mut sorted, mut lefts) = (0, 0, 0, 0, 0);
    for seed in 0..60 {
        let mut world = World::new(seed, redundancy, redundancy.total() + seed as usize % 3);
        for step in 0..4000 {
            world.act();
            if step % 1000 == 999 {
                world.check();
            }
        }
        (losses, mended) = (losses + world.losses, mended + world.map.mended());
        (lefts, moved) = (lefts + world.lefts, moved + world.map.moved());
        sorted += world.map.sorted();
    }
    assert!(losses > 500 && mended > 20_000, "{losses} {mended}");
    assert!(lefts > 3 && moved > 10_000 && sorted > 100, "{lefts} {moved} {sorted}");
}

#[test]
fn a_child_leaves_what_grows_to_its_parent() {
    let mut world = World::new(1, Redundancy::replicas(2), 3);
    world.borrow();
    let (slot, count) = world.map.take_run(20).unwrap();
    world.write(slot, count);
    world.lose(1);
    while world.lenders.iter().all(|lender| !matches!(lender.queue.back(), Some(Op::Step(_)))) {
        world.post();
    }
    let lender = (0..3).find(|&lender| matches!(world.lenders[lender].queue.back(), Some(Op::Step(_))));
    world.map.step_ended(StepEnd::Borrowed(9));
    assert!(world.map.is_mending());
    world.map.leave_mending();
    let lender = lender.unwrap() as u32;
    assert_eq!(world.map.take_return(), Some(SlabCopy { lender, slab: 9, part: 1 }));
    assert_eq!((world.map.next_step(), world.map.poor()), (Some(Step::Borrow { lender, press: false }), 20));
}

#[test]
fn who_refused_is_pressed_when_nobody_else_has_room_for_what_lacks_a_copy() {
    let mut world = World::new(2, Redundancy::replicas(2), 4);
    world.borrow();
    let (slot, count) = world.map.take_run(20).unwrap();
    world.write(slot, count);
    world.lose(1);
    let has = world.map.locate(slot).unwrap().0[0].lender;
    let others: Vec<u32> = (0..4).filter(|&lender| lender != has && lender != 1).collect();
    let mut asked = Vec::new();
    for round in 0..2 {
        while let Some(Step::Borrow { lender, press }) = world.map.next_step() {
            asked.push((press, lender));
            world.map.step_ended(StepEnd::Full);
        }
        asked.sort_unstable();
        let expected: Vec<_> =
            [false, true].iter().flat_map(|&press| others.iter().map(move |&other| (press, other))).collect();
        assert_eq!(asked, expected, "round {round}: each once, and once more pressed");
        asked.clear();
        // Nobody is asked again before something may have changed.
        assert_eq!(world.map.next_step(), None);
        world.map.ask_again();
    }
    for press in [false, true] {
        for _ in &others {
            let step = world.map.next_step();
            assert!(
                matches!(step, Some(Step::Borrow { press: pressed, .. }) if pressed == press),
                "{step:?}"
            );
            if press {
                world.map.step_ended(StepEnd::Borrowed(7));
                assert!(world.map.is_mending());
                return;
            }
            world.map.step_ended(StepEnd::Full);
        }
    }
}
