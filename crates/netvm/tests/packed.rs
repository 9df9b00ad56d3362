//! Lenders that keep pages packed: contents, how much they lend, and what happens when pages do not shrink.

mod common;

use common::{Random, Serving, alone};
use netvm::far::{FarMemory, FarVec};
use netvm::lender::{Borrower, Class, Compress, LenderConfig, LenderStatus, LinkChoice, status};
use netvm::pager::TierPolicy;
use netvm::volume::{Volume, VolumeOptions};
use netvm::{Error, LenderLimit};
use netvm_sys::mapping::Mapping;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(10);

/// Slabs of 1 MiB from `mib` MiB of memory; with `lend_mib` more than that, and a file in the folder for temporary files.
fn config(mib: u64, lend_mib: u64) -> LenderConfig {
    let overflow = (lend_mib > mib).then(std::env::temp_dir);
    let compress = Some(Compress { lend_bytes: lend_mib * MIB, overflow });
    LenderConfig { size_bytes: mib * MIB, slab_bytes: MIB, compress, ..LenderConfig::default() }
}

/// A lender until the process ends: pagers have no end either.
fn lend(config: LenderConfig) -> &'static Serving {
    Box::leak(Box::new(Serving::start(config)))
}

/// Whatever it lends, it never uses more memory than it said, as far as the pages are concerned.
fn held(lender: &Serving) -> LenderStatus {
    let held = status(&lender.address).unwrap();
    assert!(held.memory_bytes > 0 && held.resident_bytes <= held.memory_bytes, "{held:?}");
    held
}

/// `parts` of 8 parts of what is filled are random, the rest are a few words.
fn fill(random: &mut Random, parts: usize, bytes: &mut [u8]) {
    let bytes_random = bytes.len() / 8 * parts;
    for (index, place) in bytes.chunks_mut(8).enumerate() {
        let word = if index * 8 < bytes_random {
            random.next()
        } else {
            0x1234_5678_9ABC_DEF1 ^ (index as u64 / 64)
        };
        place.copy_from_slice(&word.to_le_bytes()[..place.len()]);
    }
}

/// A borrower with a slab, and what should be in it.
struct Slab {
    slab: u32,
    is: Vec<u8>,
}

struct Borrowing {
    borrower: Borrower,
    memory: Mapping,
    random: Random,
    slabs: Vec<Slab>,
}

impl Borrowing {
    fn new(lender: &Serving, seed: u64) -> Self {
        let (borrower, memory) = (lender.connect(), Mapping::anonymous(MIB as usize).unwrap());
        Self { borrower, memory, random: Random::new(seed), slabs: Vec::new() }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random.next() as usize % bound
    }

    fn borrow(&mut self) -> netvm::Result<usize> {
        let slab = self.borrower.borrow_slab()?;
        self.slabs.push(Slab { slab, is: vec![0; MIB as usize] });
        Ok(self.slabs.len() - 1)
    }

    /// Of which `parts` of 8 do not shrink.
    fn write(&mut self, slab: usize, from: usize, len: usize, parts: usize) {
        let Slab { slab, is } = &mut self.slabs[slab];
        fill(&mut self.random, parts, &mut is[from..from + len]);
        self.memory.shared().write_from(0, &is[from..from + len]).unwrap();
        let part = self.memory.shared().sub(0, len).unwrap();
        self.borrower.post_write(1, *slab, from as u64, part).unwrap();
        // The buffer is written again.
        self.borrower.flush(PATIENCE).unwrap();
    }

    fn check(&mut self, slab: usize, from: usize, len: usize) {
        let Slab { slab, is } = &self.slabs[slab];
        let part = self.memory.shared().sub(0, len).unwrap();
        part.fill(0x5A);
        self.borrower.post_read(2, *slab, from as u64, part).unwrap();
        self.borrower.flush(PATIENCE).unwrap();
        assert!(part.to_vec() == is[from..from + len], "slab {slab}, {len} bytes from {from}");
    }

    fn check_all(&mut self) {
        (0..self.slabs.len()).for_each(|slab| self.check(slab, 0, MIB as usize));
    }

    fn discard(&mut self, slab: usize, from: usize, len: usize) {
        self.slabs[slab].is[from..from + len].fill(0);
        let slab = self.slabs[slab].slab;
        self.borrower.post_discard(3, slab, from as u64, len as u64).unwrap();
        self.borrower.flush(PATIENCE).unwrap();
    }
}

#[test]
fn slabs_are_what_was_written_in_parts_of_any_length() {
    // Of 3 MiB at most, while up to 8 MiB are lent.
    let lender = lend(config(3, 8));
    for seed in 0..3 {
        let mut all = Borrowing::new(lender, seed);
        while all.slabs.len() < 2 {
            all.borrow().unwrap();
        }
        for step in 0..1500 {
            let slab = all.below(all.slabs.len());
            let len = match all.below(8) {
                0 => 1 + all.below(MIB as usize),
                1..4 => PAGE * (1 + all.below(32)),
                4 => 1 + all.below(16),
                _ => 1 + all.below(3 * PAGE),
            };
            let from = all.below(MIB as usize - len + 1);
            let from = if len % PAGE == 0 { from / PAGE * PAGE } else { from };
            // Phases of contents that shrink and of others.
            let parts = if step / 250 % 2 == 0 { 1 + all.below(4) } else { 8 };
            match all.below(10) {
                0 => all.discard(slab, from / PAGE * PAGE, len / PAGE * PAGE),
                1..5 => all.check(slab, from, len),
                _ => all.write(slab, from, len, parts),
            }
            if step % 300 == 0 {
                held(lender);
                // More, as soon as it has them.
                let _ = all.borrow();
            }
        }
        all.check_all();
        let most = held(lender);
        assert!(most.class == Class::Packed && most.used_bytes >= 2 * MIB, "{most:?}");
        drop(all);
        until("everything came back", || {
            let held = held(lender);
            held.used_bytes == 0 && held.resident_bytes == 0 && held.spilled_bytes == 0
        });
    }
}

/// Operations that are under way at once, on pages that overlap.
#[test]
fn what_is_posted_at_once_is_done_in_order() {
    let lender = lend(config(4, 8));
    let mut all = Borrowing::new(lender, 7);
    let slab = all.borrow().unwrap();
    let number = all.slabs[slab].slab;
    for round in 0..200 {
        // Long ones that are received in pieces, and short ones behind them.
        let mut reads = Vec::new();
        for step in 0..6 {
            let len = if step % 2 == 0 { 300_000 + all.below(100_000) } else { 1 + all.below(9000) };
            let from = all.below(MIB as usize - len);
            let mut bytes = vec![0; len];
            fill(&mut all.random, 1 + round % 8, &mut bytes);
            all.slabs[slab].is[from..from + len].copy_from_slice(&bytes);
            let memory = Mapping::anonymous(len).unwrap();
            memory.shared().write_from(0, &bytes).unwrap();
            all.borrower.post_write(1, number, from as u64, memory.shared().sub(0, len).unwrap()).unwrap();
            let back = Mapping::anonymous(len).unwrap();
            all.borrower.post_read(2, number, from as u64, back.shared().sub(0, len).unwrap()).unwrap();
            reads.push((memory, back, all.slabs[slab].is[from..from + len].to_vec()));
            // A write may overtake a read that was posted before it.
            all.borrower.flush(PATIENCE).unwrap();
        }
        for (_, back, expected) in reads {
            assert!(back.shared().sub(0, expected.len()).unwrap().to_vec() == expected, "round {round}");
        }
    }
    all.check_all();
}

#[test]
fn more_is_lent_than_there_is_as_long_as_it_shrinks_and_nothing_is_lost_when_it_does_not() {
    let lender = lend(config(8, 32));
    let mut all = Borrowing::new(lender, 11);
    let error = loop {
        match all.borrow() {
            Ok(slab) => all.write(slab, 0, MIB as usize, 2),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::LenderFull { limit: LenderLimit::Memory, .. }), "{error:?}");
    assert!(error.to_string().contains("does not shrink enough"), "{error}");
    let before = held(lender);
    println!("{} MiB are lent of {} MiB of memory", before.used_bytes >> 20, before.memory_bytes >> 20);
    assert!(before.used_bytes >= 16 * MIB && before.spilled_bytes == 0, "{before:?}");
    all.check_all();
    // All of it changes into what does not shrink.
    for slab in 0..all.slabs.len() {
        all.write(slab, 0, MIB as usize, 8);
    }
    let after = held(lender);
    assert!(after.spilled_bytes >= after.used_bytes - after.memory_bytes, "{after:?}");
    all.check_all();
    until("memory is asked back", || status(&lender.address).unwrap().missing_bytes > 0);
    // And back. What was written last is on disk, and comes to memory when there is room.
    let count = all.slabs.len();
    (0..count / 2).for_each(|slab| all.write(slab, 0, MIB as usize, 1));
    assert!(held(lender).spilled_bytes > 2 * MIB);
    (count / 2..count * 7 / 8).for_each(|slab| all.discard(slab, 0, MIB as usize));
    until("pages came back from disk", || held(lender).spilled_bytes == 0);
    all.check_all();
}

#[test]
fn without_a_file_no_more_is_lent_than_has_room_whatever_it_is() {
    let mut config = config(4, 4);
    config.quota_bytes = 2 * MIB;
    let lender = lend(config);
    let (mut one, mut other) = (Borrowing::new(lender, 3), Borrowing::new(lender, 4));
    for slab in [one.borrow().unwrap(), one.borrow().unwrap()] {
        one.write(slab, 0, MIB as usize, 8);
    }
    let error = one.borrow().unwrap_err();
    assert!(matches!(error, Error::LenderFull { limit: LenderLimit::Quota, .. }), "{error:?}");
    let slab = other.borrow().unwrap();
    other.write(slab, 0, MIB as usize, 8);
    let error = other.borrow().unwrap_err();
    assert!(matches!(error, Error::LenderFull { limit: LenderLimit::Size, .. }), "{error:?}");
    one.check_all();
    other.check_all();
    let full = held(lender);
    assert_eq!((full.used_bytes, full.missing_bytes), (3 * MIB, 0));
    // What shrinks gives memory back, and what is discarded.
    for slab in 0..2 {
        one.write(slab, 0, MIB as usize, 1);
    }
    until("memory came back", || held(lender).resident_bytes < 3 * MIB / 2 + MIB / 2);
    other.discard(slab, 0, MIB as usize);
    until("more memory came back", || held(lender).resident_bytes < MIB);
    one.check_all();
    other.check_all();
}

fn borrow(lenders: &[&Serving]) -> FarMemory {
    let far = FarMemory::builder().lenders(lenders.iter().map(|lender| lender.address.as_str()));
    far.local(4 * MIB).area(1 << 34).tier(TierPolicy::Lender).link(LinkChoice::Socket).start().unwrap()
}

/// Half of each page does not shrink.
fn words(far: &FarMemory, count: usize, seed: u64) -> FarVec<u64> {
    let mut random = Random::new(seed);
    let mut words = far.vec();
    words.reserve_exact(count);
    words.extend((0..count).map(|index| word(&mut random, index)));
    words
}

fn word(random: &mut Random, index: usize) -> u64 {
    let word = random.next();
    if index % 512 < 256 { word } else { index as u64 / 4096 }
}

fn check(words: &[u64], seed: u64) {
    let mut random = Random::new(seed);
    assert!(words.iter().enumerate().all(|(index, &is)| is == word(&mut random, index)));
}

#[test]
fn a_program_has_more_far_memory_than_its_lender_uses() {
    let Some(_alone) = alone() else { return };
    let lender = lend(config(40, 160));
    let far = borrow(&[lender]);
    // 48 MiB.
    let mut vec = words(&far, 12 << 19, 1);
    let most = held(lender);
    println!("{} MiB in {} MiB", most.used_bytes >> 20, most.resident_bytes >> 20);
    assert!(most.used_bytes >= 42 * MIB && most.resident_bytes < most.used_bytes / 3 * 2, "{most:?}");
    check(&vec, 1);
    let mut random = Random::new(2);
    for _ in 0..20_000 {
        let index = random.next() as usize % vec.len();
        vec[index] = !vec[index];
        let other = random.next() as usize % vec.len();
        vec[other] = std::hint::black_box(vec[other]);
        vec[index] = !vec[index];
    }
    check(&vec, 1);
    drop(vec);
    until("it was given back", || held(lender).resident_bytes < 2 * MIB);
}

#[test]
fn a_packed_lender_is_asked_before_it_is_full_and_its_borrower_moves() {
    let Some(_alone) = alone() else { return };
    let plain: &'static Serving = Box::leak(Box::new(Serving::new(28)));
    let packed = lend(config(24, 96));
    // Somebody else has half of it for a while.
    let mut other = plain.connect();
    for _ in 0..14 {
        other.borrow_slab().unwrap();
    }
    // What is plain is cheaper, and is used first.
    let far = borrow(&[packed, plain]);
    let mut vec = words(&far, 10 << 19, 8);
    assert_eq!(status(&plain.address).unwrap().used_bytes, 28 * MIB);
    let before = held(packed);
    assert!(before.used_bytes >= 20 * MIB && before.missing_bytes == 0, "{before:?}");
    drop(other);
    let mut random = Random::new(9);
    vec.iter_mut().for_each(|word| *word = random.next());
    let moved = || far.stats().pages_moved > 0 || held(packed).used_bytes < before.used_bytes;
    until("slabs have moved", moved);
    let mut random = Random::new(9);
    assert!(vec.iter().all(|&word| word == random.next()));
    println!("{:?} {:?}", held(packed), far.stats());
}

#[test]
fn who_has_nobody_else_is_lent_what_the_disk_has_room_for() {
    let lender = lend(config(4, 10));
    let mut all = Borrowing::new(lender, 21);
    while let Ok(slab) = all.borrow() {
        all.write(slab, 0, MIB as usize, 8);
    }
    assert!((3..8).contains(&all.slabs.len()), "{}", all.slabs.len());
    // All that it lends at most.
    let error = loop {
        match all.borrower.press_for_slab() {
            Ok(slab) => all.slabs.push(Slab { slab, is: vec![0; MIB as usize] }),
            Err(error) => break error,
        }
        let slab = all.slabs.len() - 1;
        all.write(slab, 0, MIB as usize, 8);
        held(lender);
    };
    assert!(matches!(error, Error::LenderFull { limit: LenderLimit::Size, .. }), "{error:?}");
    assert_eq!(all.slabs.len(), 10);
    assert!(held(lender).spilled_bytes > 6 * MIB);
    all.check_all();
}

#[test]
fn a_program_whose_only_lender_packs_what_does_not_shrink_goes_on() {
    let Some(_alone) = alone() else { return };
    let lender = lend(config(12, 48));
    let far = borrow(&[lender]);
    let mut random = Random::new(5);
    let vec: FarVec<u64> = {
        let mut words = far.vec();
        words.reserve_exact(14 << 18);
        words.extend((0..14 << 18).map(|_| random.next()));
        words
    };
    let most = held(lender);
    assert!(most.used_bytes >= 22 * MIB && most.spilled_bytes >= 10 * MIB, "{most:?}");
    let mut random = Random::new(5);
    assert!(vec.iter().all(|&word| word == random.next()));
    // And a volume, which is borrowed as a whole before anything is known of it.
    let options = VolumeOptions::default();
    let volume = Volume::open(&[lend(config(4, 12)).address.clone()], 11 * MIB, options).unwrap();
    assert_eq!(volume.size_bytes(), 11 * MIB);
    let options = VolumeOptions::default();
    let error = Volume::open(&[lend(config(4, 12)).address.clone()], 13 * MIB, options).unwrap_err();
    assert!(error.to_string().contains("sufficed for 12 MiB"), "{error}");
}

/// What lacks a copy after a loss gets one from a lender that packs what does not shrink, when nobody else has room.
#[test]
fn a_packed_lender_is_pressed_for_what_a_lost_one_had() {
    let Some(_alone) = alone() else { return };
    let (lost, other) = (Serving::new(16), Serving::new(16));
    let packed = lend(config(4, 24));
    let far = FarMemory::builder().lenders([&lost, &other, packed].map(|lender| lender.address.as_str()));
    let far = far.local(4 * MIB).area(1 << 34).tier(TierPolicy::Lender).link(LinkChoice::Socket);
    let far = far.replicas(2).start().unwrap();
    let mut random = Random::new(31);
    let mut vec = far.vec::<u64>();
    vec.reserve_exact(14 << 17);
    vec.extend((0..14 << 17).map(|_| random.next()));
    let before = held(packed);
    assert!(before.used_bytes <= 2 * MIB, "what is plain is used first: {before:?}");
    drop(lost);
    until("the loss was seen", || far.stats().lenders_lost == 1);
    until("all has two copies again", || far.stats().pages_unprotected == 0);
    let after = held(packed);
    // More than it lends without being pressed.
    assert!(after.used_bytes >= 10 * MIB && after.spilled_bytes >= 4 * MIB, "{after:?}");
    let mut random = Random::new(31);
    assert!(vec.iter().all(|&word| word == random.next()));
    std::mem::forget(other);
}

fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !so() {
        assert!(Instant::now() < end, "it never came that {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
