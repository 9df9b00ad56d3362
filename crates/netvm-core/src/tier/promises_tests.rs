//! Promises among a process, its children and theirs, which use their packed pages meanwhile, against a lender whose writes arrive late and in
//! any order.

use super::pool::PieceId;
use super::promises::{Promise, Promises};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::AtomicU64;

type Words = Arc<[AtomicU64]>;

/// The same list in another process.
fn forked(promises: &Promises<Words>, words: Words) -> Promises<Words> {
    let mut child = Promises::new(words, promises.left().to_vec());
    child.follow();
    child
}

struct World {
    random: u64,
    /// What the lender has in each slot.
    slots: BTreeMap<u32, u64>,
    next_slot: u32,
    next_content: u64,
}

/// A step that has left: its number, and what goes where.
type Sent = (u32, Vec<(u32, u64)>);

struct Process {
    /// Stamp, contents, and the slot that has the same.
    pieces: BTreeMap<PieceId, (u32, u64, u32)>,
    clock: u32,
    promises: Option<Promises<Words>>,
    sent: Vec<Sent>,
    step: u32,
    /// Slots taken for promises that are neither kept nor given back.
    reserved: BTreeSet<u32>,
}

impl World {
    fn new(seed: u64) -> Self {
        Self { random: seed | 1, slots: BTreeMap::new(), next_slot: 1, next_content: 1 }
    }

    fn next(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as usize % below
    }

    fn pack(&mut self, process: &mut Process) {
        process.clock += 1;
        let id = (0..).find(|id| !process.pieces.contains_key(id)).unwrap();
        process.pieces.insert(id, (process.clock, self.next_content, 0));
        self.next_content += 1;
    }

    fn unpack(&mut self, process: &mut Process) {
        let ids: Vec<_> = process.pieces.keys().copied().collect();
        if !ids.is_empty() {
            process.pieces.remove(&ids[self.next(ids.len())]);
        }
    }

    fn promise(&mut self, process: &mut Process) {
        if process.promises.is_some() {
            return;
        }
        process.clock += 1;
        let list: Vec<_> = process
            .pieces
            .iter()
            .filter(|(_, piece)| piece.2 == 0)
            .map(|(&piece, &(stamp, ..))| {
                self.next_slot += 1;
                Promise { piece, stamp, slot: self.next_slot }
            })
            .collect();
        process.reserved = list.iter().map(|promise| promise.slot).collect();
        let words: Words = (0..Promises::<Words>::words(list.len())).map(|_| AtomicU64::new(0)).collect();
        process.promises = Some(Promises::new(words, list));
    }

    fn send(&mut self, process: &mut Process) {
        let want = self.next(8);
        let Some(promises) = &mut process.promises else { return };
        let mut sent = Vec::new();
        while sent.len() < want
            && let Some(Promise { piece, stamp, slot }) = promises.next()
        {
            assert!(process.reserved.remove(&slot));
            match process.pieces.get_mut(&piece).filter(|piece| piece.0 == stamp && piece.2 == 0) {
                Some(piece) => {
                    sent.push((slot, piece.1));
                    piece.2 = slot;
                    promises.keep();
                }
                None => promises.break_it(),
            }
        }
        if sent.is_empty() {
            promises.settle_broken();
        } else {
            process.step += 1;
            promises.leave(process.step);
            process.sent.push((process.step, sent));
        }
    }

    fn arrive(&mut self, process: &mut Process) {
        if process.sent.is_empty() {
            return;
        }
        let (number, pages) = process.sent.swap_remove(self.next(process.sent.len()));
        self.slots.extend(pages);
        if let Some(promises) = &mut process.promises {
            promises.arrived(number);
        }
    }

    /// What a follower takes up must be what it has.
    fn take_up(&self, process: &mut Process) -> usize {
        let mut taken = 0;
        let Some(promises) = &mut process.promises else { return 0 };
        while let Some((Promise { piece, stamp, slot }, kept)) = promises.take_up() {
            assert!(process.reserved.remove(&slot));
            let own = process.pieces.get_mut(&piece).filter(|piece| piece.0 == stamp && piece.2 == 0);
            if let Some(own) = own.filter(|_| kept) {
                assert_eq!(self.slots.get(&slot), Some(&own.1), "another page is in slot {slot}");
                own.2 = slot;
                taken += 1;
            }
        }
        taken
    }

    fn end(&self, process: &mut Process) {
        if let Some(mut promises) = process.promises.take() {
            for promise in promises.end() {
                assert!(process.reserved.remove(&promise.slot));
            }
            assert!(process.reserved.is_empty() && promises.is_over());
        }
    }
}

impl Process {
    fn new() -> Self {
        let (pieces, sent, reserved) = (BTreeMap::new(), Vec::new(), BTreeSet::new());
        Self { pieces, clock: 0, promises: None, sent, step: 0, reserved }
    }
}

/// A list and its words, which `Promises` keeps to itself.
fn words_of(promises: &Promises<Words>) -> usize {
    Promises::<Words>::words(promises.left().len())
}

#[test]
fn followers_never_take_another_page_for_theirs() {
    let (mut taken, mut broken, mut ended) = (0, 0, 0);
    for seed in 1..400 {
        let mut world = World::new(seed * 0x9E37_79B9);
        let mut parent = Process::new();
        (0..world.next(200)).for_each(|_| world.pack(&mut parent));
        world.promise(&mut parent);
        // As after a fork, before which nothing was sent: all have the same words, and lists of their own.
        let promises = parent.promises.take().unwrap();
        let words: Words = (0..words_of(&promises)).map(|_| AtomicU64::new(0)).collect();
        let mut children: Vec<Process> = (0..3)
            .map(|_| Process {
                pieces: parent.pieces.clone(),
                clock: parent.clock,
                promises: Some(forked(&promises, words.clone())),
                sent: Vec::new(),
                step: 0,
                reserved: parent.reserved.clone(),
            })
            .collect();
        parent.promises = Some(Promises::new(words, promises.left().to_vec()));
        for _ in 0..600 {
            match world.next(8) {
                0 => world.pack(&mut parent),
                1 => world.unpack(&mut parent),
                2 | 3 => world.send(&mut parent),
                4 => world.arrive(&mut parent),
                5 => {
                    let child = world.next(3);
                    taken += world.take_up(&mut children[child]);
                }
                6 => {
                    let child = world.next(3);
                    world.unpack(&mut children[child]);
                    world.pack(&mut children[child]);
                }
                _ if world.next(200) == 0 => {
                    let child = world.next(3);
                    world.end(&mut children[child]);
                }
                _ if world.next(400) == 0 => world.end(&mut parent),
                _ => {}
            }
        }
        while !parent.sent.is_empty() {
            world.arrive(&mut parent);
        }
        for child in &mut children {
            taken += world.take_up(child);
            let Some(promises) = &child.promises else { continue };
            match &parent.promises {
                Some(kept) => assert_eq!(promises.left().len(), kept.left().len()),
                None => {
                    assert!(promises.has_ended());
                    ended += 1;
                }
            }
            broken += child.pieces.values().filter(|piece| piece.2 == 0).count();
            world.end(child);
        }
    }
    assert!(taken > 1000 && broken > 1000 && ended > 10, "{taken} {broken} {ended}");
}

#[test]
fn what_arrives_out_of_order_is_settled_in_order() {
    let promise = |piece| Promise { piece, stamp: 1, slot: piece + 1 };
    let words: Words = (0..Promises::<Words>::words(6)).map(|_| AtomicU64::new(0)).collect();
    let mut keeper = Promises::new(words.clone(), (0..6).map(promise).collect());
    let mut follower = Promises::new(words, (0..6).map(promise).collect());
    follower.follow();
    assert!(keeper.is_keeper() && !follower.is_keeper() && follower.next().is_none());
    keeper.keep();
    keeper.leave(1);
    keeper.break_it();
    keeper.settle_broken();
    keeper.keep();
    keeper.leave(2);
    assert!(keeper.arrived(2) && follower.take_up().is_none());
    assert!(!keeper.arrived(7) && keeper.arrived(1));
    let all = core::iter::from_fn(|| follower.take_up());
    let all: Vec<_> = all.map(|(promise, kept)| (promise.piece, kept)).collect();
    assert_eq!(all, [(0, true), (1, false), (2, true)]);
    // Nothing is on its way.
    keeper.break_it();
    keeper.settle_broken();
    assert_eq!(follower.take_up(), Some((promise(3), false)));
    keeper.keep();
    keeper.leave(3);
    assert_eq!(keeper.next(), Some(promise(5)));
    assert_eq!(keeper.end(), [promise(5)]);
    assert!(keeper.is_over() && !keeper.arrived(3) && follower.has_ended() && !follower.is_over());
    assert_eq!(follower.end(), [promise(4), promise(5)]);
    assert_eq!(keeper.seen(), 0);
    follower.be_seen();
    follower.be_seen();
    assert_eq!(keeper.seen(), 2);
}
