//! Volumes on lenders that are arrays of bytes, with transfers that end late, and lenders that are lost at any time.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use super::*;
use crate::sim::Random;

const EXTENT_BYTES: u64 = 1 << 20;
const SLABS: usize = 12;

struct FakeLender {
    memory: Vec<Vec<u8>>,
    free: Vec<u32>,
    posted: VecDeque<(TransferId, Transfer)>,
    lost: bool,
}

struct World {
    volume: Volume,
    lenders: Vec<FakeLender>,
    /// Buffers of the ops under way, by token; and for reads what they must read.
    ops: Vec<Option<Running>>,
    model: Vec<u8>,
    chunk: Vec<u8>,
    random: Random,
    failures: u32,
    /// Reads that a copy could have answered at once.
    found: u32,
}

struct Running {
    kind: Kind,
    offset: u64,
    buffer: Vec<u8>,
    expected: Vec<u8>,
}

impl World {
    fn new(seed: u64, size: u64, replicas: usize, lenders: usize) -> Self {
        let mut random = Random::new(seed);
        let mut volume = Volume::new(size, EXTENT_BYTES, replicas, lenders);
        let mut fakes: Vec<_> = (0..lenders)
            .map(|_| FakeLender {
                // What a lender's memory holds before must never be seen.
                memory: (0..SLABS).map(|_| vec![random.draw() as u8 | 1; EXTENT_BYTES as usize]).collect(),
                free: (0..SLABS as u32).collect(),
                posted: VecDeque::new(),
                lost: false,
            })
            .collect();
        for extent in 0..volume.extents() {
            for _ in 0..replicas {
                let lender = volume.candidate(extent).unwrap();
                let slab = fakes[lender as usize].free.pop().unwrap();
                volume.place(extent, lender, slab);
            }
        }
        Self {
            volume,
            lenders: fakes,
            ops: Vec::new(),
            model: vec![0; size as usize],
            chunk: vec![0; CHUNK_BYTES as usize],
            random,
            failures: 0,
            found: 0,
        }
    }

    fn submit(&mut self) {
        let size = self.model.len() as u64;
        let longest = if self.random.once_in(12) { 2 << 20 } else { 20_000 };
        let offset = self.random.below(size);
        let offset = if self.random.once_in(2) { offset / BLOCK_BYTES * BLOCK_BYTES } else { offset };
        let bytes = (1 + self.random.below(longest)).min(size - offset);
        let kind = [Kind::Read, Kind::Write, Kind::Write, Kind::Discard][self.random.below(4) as usize];
        let overlaps = |op: &Running| {
            op.offset < offset + bytes
                && offset < op.offset + op.buffer.len() as u64
                && (op.kind == Kind::Read) != (kind == Kind::Read)
        };
        // What changes the same bytes is executed in the order in which it was submitted; a read beside it may find either.
        if self.ops.iter().flatten().any(overlaps) {
            return;
        }
        let range = offset as usize..(offset + bytes) as usize;
        let mut buffer = vec![0xEE; bytes as usize];
        if kind == Kind::Write {
            let mut bytes = Random::new(self.random.draw());
            buffer.fill_with(|| bytes.draw() as u8);
        }
        match kind {
            Kind::Read => {}
            Kind::Write => self.model[range.clone()].copy_from_slice(&buffer),
            Kind::Discard => self.model[range.clone()].fill(0),
        }
        let expected = self.model[range].to_vec();
        if kind == Kind::Read {
            for (lender, slab, at) in self.volume.sources(offset, bytes) {
                let held =
                    &self.lenders[lender as usize].memory[slab as usize][at as usize..][..bytes as usize];
                assert!(held == expected, "{bytes} bytes at {offset} are not what lender {lender} has");
                self.found += 1;
            }
        }
        let token = self.ops.iter().position(Option::is_none).unwrap_or(self.ops.len());
        self.ops.resize_with(self.ops.len().max(token + 1), || None);
        self.ops[token] = Some(Running { kind, offset, buffer, expected });
        self.volume.submit(token as u64, kind, offset, bytes).unwrap();
        self.collect();
    }

    fn collect(&mut self) {
        while let Some(Zeros { token, at, bytes }) = self.volume.zeros() {
            let op = self.ops[token as usize].as_mut().unwrap();
            op.buffer[at as usize..(at + bytes) as usize].fill(0);
        }
        while let Some((token, result)) = self.volume.ended() {
            let op = self.ops[token as usize].take().expect("an op ends once");
            match result {
                Ok(()) if op.kind == Kind::Read => {
                    assert!(op.buffer == op.expected, "read of {} at {}", op.buffer.len(), op.offset);
                }
                Ok(()) => {}
                Err(_) => self.failures += 1,
            }
        }
    }

    fn step(&mut self) {
        let number = self.random.below(self.lenders.len() as u64) as u32;
        let index = number as usize;
        if self.random.once_in(2) {
            if let Some((id, transfer)) = self.volume.next(number) {
                assert!(!self.lenders[index].lost, "a transfer for a lost lender");
                self.volume.posted(number);
                self.post(id, transfer);
            }
        } else if let Some((id, transfer)) = self.lenders[index].posted.pop_front() {
            // Calls stay in order.
            let is_call =
                |(_, transfer): &(_, Transfer)| matches!(transfer.what, What::Return | What::Borrow);
            let posted = &self.lenders[index].posted;
            let later = posted.iter().position(is_call).unwrap_or(posted.len());
            if transfer.what == What::Discard && later > 0 && !self.random.once_in(3) {
                // A lender answers calls when it has applied what came with them.
                let place = 1 + self.random.below(later as u64) as usize;
                return self.lenders[index].posted.insert(place, (id, transfer));
            }
            let result = if self.lenders[index].lost { Err(Gone) } else { Ok(self.execute(transfer)) };
            self.volume.done(id, result);
            self.collect();
        }
    }

    /// Writes take their bytes when they are posted: this is when a real connection may have sent them.
    fn post(&mut self, id: TransferId, transfer: Transfer) {
        self.lenders[transfer.lender as usize].posted.push_back((id, transfer));
    }

    fn execute(&mut self, transfer: Transfer) -> Done {
        let Transfer { lender, slab, offset, bytes, what } = transfer;
        let lender = &mut self.lenders[lender as usize];
        let (from, to) = (offset as usize, offset as usize + bytes as usize);
        if what == What::Borrow {
            return lender.free.pop().map_or(Done::Full, |slab| {
                lender.memory[slab as usize].fill(0x77);
                Done::Slab(slab)
            });
        }
        assert!(!lender.free.contains(&slab) || what == What::Flush, "{what:?} of a slab that is not lent");
        let place = &mut lender.memory[slab as usize][from..to];
        match what {
            What::Read { token, at } => {
                let op = self.ops[token as usize].as_mut().unwrap();
                op.buffer[at as usize..][..bytes as usize].copy_from_slice(place);
            }
            What::Write { token, at, before, after } => {
                let middle = (bytes - before - after) as usize;
                place.fill(0);
                let op = self.ops[token as usize].as_ref().unwrap();
                place[before as usize..][..middle].copy_from_slice(&op.buffer[at as usize..][..middle]);
            }
            What::ChunkRead => self.chunk[..bytes as usize].copy_from_slice(place),
            What::ChunkWrite => place.copy_from_slice(&self.chunk[..bytes as usize]),
            What::Return => lender.free.push(slab),
            // What it holds afterwards is its affair.
            What::Discard => place.fill(0x99),
            What::Flush | What::Borrow => {}
        }
        Done::Ok
    }

    fn lose(&mut self, lender: u32) {
        self.lenders[lender as usize].lost = true;
        self.volume.lender_lost(lender);
        self.collect();
    }

    /// With nothing of what it had; false when something that was posted to it has not ended yet.
    fn come_back(&mut self, lender: usize) -> bool {
        let place = &mut self.lenders[lender];
        if !place.posted.is_empty() {
            return false;
        }
        (place.lost, place.free) = (false, (0..SLABS as u32).collect());
        place.memory.iter_mut().for_each(|slab| slab.fill(0x55));
        self.volume.lender_back(lender as u32);
        true
    }

    fn settle(&mut self) {
        for _ in 0..1_000_000 {
            let queued = (0..self.lenders.len() as u32).any(|lender| self.volume.next(lender).is_some());
            if !queued && self.lenders.iter().all(|lender| lender.posted.is_empty()) {
                assert!(self.ops.iter().all(Option::is_none), "ops that never end");
                assert!(self.volume.is_idle() && !self.volume.is_mending());
                return;
            }
            self.step();
        }
        panic!("it does not settle");
    }

    fn read_all(&mut self) -> bool {
        let expected = self.model.clone();
        self.ops =
            vec![Some(Running { kind: Kind::Read, offset: 0, buffer: vec![0xEE; expected.len()], expected })];
        let failures = self.failures;
        self.volume.submit(0, Kind::Read, 0, self.model.len() as u64).unwrap();
        self.collect();
        self.settle();
        self.failures == failures
    }
}

#[test]
fn what_is_written_is_read_whatever_one_lender_does() {
    for seed in 0..20 {
        let lenders = 2 + seed as usize % 3;
        let mut world = World::new(seed, 5 * EXTENT_BYTES - 777, 2, lenders);
        let mut losses = 0;
        for step in 0..6000 {
            if world.random.once_in(3) && world.ops.iter().flatten().count() < 8 {
                world.submit();
            }
            world.step();
            for lender in 0..lenders {
                if world.lenders[lender].lost && world.random.once_in(400) && world.come_back(lender) {
                    losses -= 1;
                }
            }
            // One at a time: another only when the first one's copies have been made anew.
            let may_lose = losses + 2 < lenders || losses == 0;
            if step > 500 && world.random.once_in(1500) && may_lose && world.volume.degraded() == (0, 0) {
                let alive: Vec<u32> =
                    (0..lenders as u32).filter(|&n| !world.lenders[n as usize].lost).collect();
                let lender = alive[world.random.below(alive.len() as u64) as usize];
                world.lose(lender);
                losses += 1;
            }
        }
        world.settle();
        assert!(world.read_all(), "seed {seed}");
        assert!(world.found > 20, "seed {seed}: {} reads found a copy at once", world.found);
        assert_eq!(world.failures, 0);
        let alive = lenders - losses;
        let degraded = if alive >= 2 { 0 } else { world.volume.extents() as u64 };
        assert_eq!(world.volume.degraded(), (degraded, 0), "seed {seed}: {losses} lost");
    }
}

#[test]
fn lenders_get_their_memory_back_while_it_is_read_and_written() {
    let (mut moved, mut left, mut stuck) = (0, 0, 0);
    for seed in 0..20 {
        let (replicas, lenders) = (1 + seed as usize % 2, 3);
        let mut world = World::new(seed, 4 * EXTENT_BYTES - 777, replicas, lenders);
        for _ in 0..8000 {
            if world.random.once_in(3) && world.ops.iter().flatten().count() < 8 {
                world.submit();
            }
            if world.random.once_in(300) {
                let lender = world.random.below(lenders as u64) as u32;
                world.volume.recall(lender, [0, 1, 2, ALL][world.random.below(4) as usize]);
            }
            if world.random.once_in(100) {
                world.volume.look_again();
            }
            if let Some(lender) = world.volume.left() {
                assert_eq!(world.lenders[lender as usize].free.len(), SLABS, "it still lends something");
                world.lose(lender);
                assert!(world.come_back(lender as usize));
                left += 1;
            }
            while world.volume.take_stuck().is_some() {
                stuck += 1;
            }
            world.step();
        }
        world.settle();
        assert!(world.read_all() && world.failures == 0, "seed {seed}");
        assert_eq!(world.volume.degraded(), (0, 0));
        moved += world.volume.moved();
    }
    assert!(moved > 200 && left > 20 && stuck > 20, "{moved} {left} {stuck}");
}

#[test]
fn a_lost_extent_fails_and_the_others_go_on() {
    for seed in 0..40 {
        let mut world = World::new(seed, 6 * EXTENT_BYTES, 1 + seed as usize % 2, 3);
        for step in 0..3000 {
            if world.random.once_in(3) && world.ops.iter().flatten().count() < 8 {
                world.submit();
            }
            if step == 1000 || step == 1003 {
                world.lose(u32::from(step == 1003));
            }
            world.step();
        }
        world.settle();
        let (_, lost) = world.volume.degraded();
        assert!((1..6).contains(&lost), "{lost}");
        let good: Vec<usize> = (0..6).filter(|&extent| world.volume.extents[extent].lost.is_none()).collect();
        for extent in good {
            let range = extent * EXTENT_BYTES as usize..(extent + 1) * EXTENT_BYTES as usize;
            let expected = world.model[range.clone()].to_vec();
            let buffer = vec![0xEE; expected.len()];
            world.ops =
                vec![Some(Running { kind: Kind::Read, offset: range.start as u64, buffer, expected })];
            let failures = world.failures;
            world.volume.submit(0, Kind::Read, range.start as u64, EXTENT_BYTES).unwrap();
            world.collect();
            world.settle();
            assert_eq!(world.failures, failures);
        }
        assert!(!world.read_all(), "what is lost is not read as anything");
        world.ops = vec![Some(Running { kind: Kind::Discard, offset: 0, buffer: vec![], expected: vec![] })];
        let failures = world.failures;
        world.volume.flush(0);
        world.collect();
        world.settle();
        assert_eq!(world.failures, failures + 1, "something that was written is gone");
    }
}

#[test]
fn ranges_are_checked() {
    let mut volume = Volume::new(10_000, EXTENT_BYTES, 1, 1);
    volume.place(0, 0, 0);
    for (offset, bytes) in [(0, 10_001), (10_001, 0), (u64::MAX, 2), (9_999, u64::MAX)] {
        assert_eq!(volume.submit(1, Kind::Read, offset, bytes), Err(OutOfBounds));
    }
    volume.submit(1, Kind::Write, 10_000, 0).unwrap();
    assert_eq!(volume.ended(), Some((1, Ok(()))));
    volume.submit(2, Kind::Write, 9_999, 1).unwrap();
    let (_, transfer) = volume.next(0).unwrap();
    assert_eq!((transfer.offset, transfer.bytes), (8192, 4096), "the last block is whole at the lender");
}

/// Tells what a lender's next transfer is, which is posted.
fn post(volume: &mut Volume, lender: u32) -> (TransferId, What) {
    let (id, transfer) = volume.next(lender).expect("nothing is to be posted");
    volume.posted(lender);
    (id, transfer.what)
}

/// Posts a lender's next transfer, which ends as it was asked for.
fn end(volume: &mut Volume, lender: u32) -> What {
    let (id, what) = post(volume, lender);
    volume.done(id, Ok(Done::Ok));
    what
}

/// As when its last words are read together with the end of its connection.
#[test]
fn a_slab_of_a_lender_that_is_lost_is_not_returned() {
    let mut volume = Volume::new(EXTENT_BYTES, EXTENT_BYTES, 2, 3);
    (0..2).for_each(|lender| volume.place(0, lender, 0));
    volume.lender_lost(1);
    let (id, what) = post(&mut volume, 2);
    assert_eq!(what, What::Borrow);
    volume.lender_lost(2);
    volume.done(id, Ok(Done::Slab(5)));
    assert_eq!(volume.next(2), None, "nobody can be told");
    volume.lender_back(2);
    let (id, what) = post(&mut volume, 2);
    assert_eq!(what, What::Borrow, "it is used again");
    volume.done(id, Ok(Done::Slab(1)));
    assert_eq!(end(&mut volume, 2), What::Flush);
    assert_eq!(volume.degraded(), (0, 0));
}

/// It was borrowed for an extent that has been lost since, and the next one is being copied to the same lender.
#[test]
fn a_late_refusal_leaves_the_next_repair_alone() {
    let mut volume = Volume::new(2 * EXTENT_BYTES, EXTENT_BYTES, 2, 4);
    for (extent, lender) in [(0, 0), (0, 1), (1, 0), (1, 2)] {
        volume.place(extent, lender, extent as u32);
    }
    volume.submit(1, Kind::Write, EXTENT_BYTES, BLOCK_BYTES).unwrap();
    for lender in [0, 2] {
        assert!(matches!(end(&mut volume, lender), What::Write { .. }));
    }
    volume.lender_lost(1);
    let (first, _) = post(&mut volume, 3);
    volume.lender_lost(0);
    let (second, what) = post(&mut volume, 3);
    assert_eq!(what, What::Borrow);
    volume.done(first, Ok(Done::Slab(7)));
    volume.done(second, Ok(Done::Full));
    assert_eq!(end(&mut volume, 2), What::ChunkRead);
    assert_eq!(end(&mut volume, 3), What::ChunkWrite);
    assert_eq!(end(&mut volume, 3), What::Flush);
    assert!(!volume.is_mending());
    assert_eq!(volume.degraded(), (0, 1), "the second one has both copies");
}

#[test]
fn a_lender_that_is_lost_asks_for_nothing() {
    let mut volume = Volume::new(EXTENT_BYTES, EXTENT_BYTES, 1, 2);
    volume.place(0, 0, 0);
    volume.set_full(1);
    volume.recall(0, ALL);
    assert!(volume.is_recalled());
    volume.lender_lost(0);
    assert!(!volume.is_recalled());
    assert_eq!((volume.take_stuck(), volume.left()), (None, None));
}

/// The next transfer of a lender, posted.
fn posted(world: &mut World, lender: u32, what: fn(&What) -> bool) -> (TransferId, Transfer) {
    let (id, transfer) = world.volume.next(lender).expect("a transfer");
    assert!(what(&transfer.what), "{:?}", transfer.what);
    world.volume.posted(lender);
    (id, transfer)
}

fn finish(world: &mut World, (id, transfer): (TransferId, Transfer)) {
    let done = world.execute(transfer);
    world.volume.done(id, Ok(done));
    world.collect();
}

fn begin(world: &mut World, token: usize, kind: Kind, offset: u64, buffer: Vec<u8>) {
    let range = offset as usize..offset as usize + buffer.len();
    match kind {
        Kind::Read => {}
        Kind::Write => world.model[range.clone()].copy_from_slice(&buffer),
        Kind::Discard => world.model[range.clone()].fill(0),
    }
    let (bytes, expected) = (buffer.len() as u64, world.model[range].to_vec());
    world.ops.resize_with(world.ops.len().max(token + 1), || None);
    world.ops[token] = Some(Running { kind, offset, buffer, expected });
    world.volume.submit(token as u64, kind, offset, bytes).unwrap();
    world.collect();
}

#[test]
fn a_write_does_not_overtake_a_discard_that_waits_for_the_repair() {
    let mut world = World::new(1, EXTENT_BYTES, 2, 3);
    for (token, chunk) in [0, 2].into_iter().enumerate() {
        begin(&mut world, token, Kind::Write, chunk * CHUNK_BYTES, vec![7; 3 * BLOCK_BYTES as usize]);
    }
    world.settle();
    let copies = world.volume.extents[0].copies.clone();
    world.lose(copies[0].lender);
    let target = (0..3).find(|&lender| copies.iter().all(|copy| copy.lender != lender)).unwrap();
    let borrow = posted(&mut world, target, |what| *what == What::Borrow);
    finish(&mut world, borrow);
    let read = posted(&mut world, copies[1].lender, |what| *what == What::ChunkRead);
    // The discard touches the chunk that is being read, what follows it does not.
    begin(&mut world, 0, Kind::Discard, 0, vec![0; EXTENT_BYTES as usize]);
    begin(&mut world, 1, Kind::Write, 2 * CHUNK_BYTES, vec![9; BLOCK_BYTES as usize]);
    begin(&mut world, 2, Kind::Write, 3 * CHUNK_BYTES, vec![9; BLOCK_BYTES as usize]);
    finish(&mut world, read);
    world.settle();
    assert!(world.read_all() && world.failures == 0);
}

#[test]
fn a_lender_keeps_its_memory_until_the_next_one_has_all_of_it() {
    for lost in [None, Some(false), Some(true)] {
        let mut world = World::new(2, EXTENT_BYTES, 1, 2);
        begin(&mut world, 0, Kind::Write, 0, vec![7; 3 * BLOCK_BYTES as usize]);
        world.settle();
        let from = world.volume.extents[0].copies[0].lender;
        let target = 1 - from;
        world.volume.recall(from, ALL);
        let borrow = posted(&mut world, target, |what| *what == What::Borrow);
        finish(&mut world, borrow);
        let read = posted(&mut world, from, |what| *what == What::ChunkRead);
        finish(&mut world, read);
        let write = posted(&mut world, target, |what| *what == What::ChunkWrite);
        // Sent: that is all that is known of it.
        let (id, chunk) = write;
        world.volume.done(id, Ok(Done::Ok));
        let flush = posted(&mut world, target, |what| *what == What::Flush);
        assert!(world.volume.next(from).is_none(), "its slab goes back before the next one has everything");
        if lost == Some(false) {
            // Nobody else has it, so what was sent counts.
            world.execute(chunk);
            world.lose(from);
            assert_eq!(world.volume.degraded(), (0, 0));
            finish(&mut world, flush);
        } else if lost == Some(true) {
            world.lose(target);
            world.volume.done(flush.0, Err(Gone));
            assert_eq!(world.volume.degraded(), (0, 0));
            assert!(world.volume.next(from).is_none(), "nobody else has it");
        } else {
            world.execute(chunk);
            finish(&mut world, flush);
            posted(&mut world, from, |what| *what == What::Return);
        }
        assert!(world.read_all() && world.failures == 0);
    }
}
