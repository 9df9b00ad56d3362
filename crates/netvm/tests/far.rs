//! Far memory as a library: collections, hints, budget.

mod common;

use common::words::{check, words};
use common::{Lent, Random, Serving, alone, lend};
use hashbrown::{DefaultHashBuilder, HashMap};
use netvm::Error;
use netvm::far::{FarAlloc, FarBuilder, FarHeap, FarMemory, FarVec, PagerError};
use netvm::lender::LinkChoice;
use netvm::pager::TierPolicy;
use std::time::Duration;

const PAGE: usize = 4096;
const MIB: u64 = 1 << 20;

fn builder(lent: &Lent, local_bytes: u64) -> FarBuilder {
    // What is counted does not depend on what packing costs today.
    FarMemory::builder().local(local_bytes).lender(lent.address()).area(1 << 36).tier(TierPolicy::Lender)
}

fn far(lent: &Lent, local_bytes: u64) -> FarMemory {
    builder(lent, local_bytes).start().unwrap()
}

#[test]
fn collections_are_larger_than_the_budget() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    let far = far(&lent, 8 * MIB);
    let mut map: HashMap<u64, String, DefaultHashBuilder, FarAlloc> = HashMap::new_in(far.alloc());
    let mut vec = words(&far, 3 << 20, 1);
    for (index, &word) in vec.iter().enumerate().step_by(31) {
        map.insert(word, index.to_string());
    }
    vec.sort_unstable();
    assert!(vec.is_sorted());
    let mut random = Random::new(1);
    for index in 0..vec.len() {
        let word = random.next();
        if index % 31 == 0 {
            assert_eq!(map.remove(&word), Some(index.to_string()));
        }
        if index % 1009 == 0 {
            assert!(vec.binary_search(&word).is_ok());
        }
    }
    assert!(map.is_empty());
    let stats = far.stats();
    assert!(stats.local_frames_peak <= 8 * MIB / PAGE as u64, "{stats:?}");
    assert!(stats.remote_reads > 4096, "{stats:?}");
    drop((vec, map));
    // One span is kept for each size.
    assert!(far.stats().far_pages < 64, "everything was given back");
}

#[test]
fn small_blocks_of_many_threads_keep_their_contents() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    let far = far(&lent, 8 * MIB);
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let far = far.clone();
            scope.spawn(move || {
                let mut random = Random::new(seed);
                let mut blocks: Vec<(u64, FarVec<u8>)> = Vec::new();
                for _ in 0..40_000 {
                    let word = random.next();
                    if !word.is_multiple_of(3) || blocks.is_empty() {
                        let mut block = far.vec();
                        let bytes = (random.next() % (1 << (4 + word % 10))) as usize;
                        block.resize(bytes, word as u8);
                        if word.is_multiple_of(5) {
                            block.resize(bytes * 3 / 2, word as u8);
                            block.shrink_to_fit();
                        }
                        blocks.push((word, block));
                    } else {
                        let (word, block) = blocks.swap_remove(random.next() as usize % blocks.len());
                        assert!(block.iter().all(|&byte| byte == word as u8));
                    }
                }
                for (word, block) in blocks {
                    assert!(block.iter().all(|&byte| byte == word as u8));
                }
            });
        }
    });
}

#[test]
fn a_large_vector_grows_and_shrinks_by_moving_pages() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    let far = far(&lent, 4 * MIB);
    let mut vec = words(&far, 2 << 20, 5);
    vec.shrink_to_fit();
    let before = far.stats();
    vec.reserve_exact(8 << 20);
    let moved = far.stats();
    // A copy would have read all 4096 pages, and written them again.
    assert!(moved.remote_reads - before.remote_reads < 512, "{before:?} {moved:?}");
    check(&vec[..2 << 20], 5);
    vec.truncate(100_000);
    vec.shrink_to_fit();
    check(&vec, 5);
    vec.truncate(300);
    vec.shrink_to_fit();
    check(&vec, 5);
    let mut zeros = far.zeroed::<u64>(4 << 20).unwrap();
    assert!(zeros.iter().step_by(500).all(|&zero| zero == 0));
    zeros[3 << 20] = 1;
    assert_eq!(zeros.iter().rev().find(|&&word| word != 0), Some(&1));
    assert_eq!(*far.boxed([7_u64; 3]).unwrap(), [7; 3]);
}

#[test]
fn discarded_values_are_zero_and_their_neighbours_are_not() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let far = far(&lent, 4 * MIB);
    let mut vec = words(&far, 1 << 20, 3);
    let pages = far.stats().far_pages;
    far.discard(&mut vec[1001..1_000_003]);
    assert!(far.stats().far_pages < pages / 10);
    let mut random = Random::new(3);
    for (index, &word) in vec.iter().enumerate() {
        let was = random.next();
        assert_eq!(word, if (1001..1_000_003).contains(&index) { 0 } else { was }, "word {index}");
    }
    // Elsewhere it does the same, by hand.
    let mut local = vec![1_u8; 20_000];
    far.discard(&mut local[1..]);
    assert!(local[0] == 1 && local[1..].iter().all(|&byte| byte == 0));
}

#[test]
fn pinned_values_stay() {
    let Some(_alone) = alone() else { return };
    let lent = lend(128 << 20);
    let far = far(&lent, 8 * MIB);
    let mut hot = words(&far, 1 << 19, 7);
    let cold = words(&far, 4 << 20, 8);
    let mut pin = far.pin(&mut hot[..]).unwrap();
    let faults = || far.stats().faults;
    let before = faults();
    check(&pin, 7);
    assert_eq!(faults(), before, "they came with the pin");
    for _ in 0..2 {
        check(&cold, 8);
    }
    let before = faults();
    check(&pin, 7);
    assert_eq!(faults(), before, "and stayed");
    pin[5] = 5;
    let error = far.pin(&cold[..1 << 19]).unwrap_err().to_string();
    assert!(error.contains("three quarters"), "{error}");
    let error = far.set_local(4 * MIB).unwrap_err().to_string();
    assert!(error.contains("unpin"), "{error}");
    drop(pin);
    check(&cold, 8);
    let before = faults();
    assert_eq!(hot[5], 5);
    hot[5] = words(&far, 6, 7)[5];
    check(&hot, 7);
    assert!(faults() > before, "no longer");
}

/// What the budget has left is used, and asking again goes on where the last time ended.
#[test]
fn what_will_be_needed_comes_into_frames_that_nobody_has() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    let far = builder(&lent, 8 * MIB).local_max(64 * MIB).start().unwrap();
    let vec = words(&far, 8 << 20, 4);
    far.set_local(64 * MIB).unwrap();
    let wanted = &vec[..4 << 20];
    far.will_need(wanted);
    let faults_with_io = || far.stats().faults - far.stats().faults_without_io;
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while far.stats().remote_reads < 7500 && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(50));
    let before = faults_with_io();
    check(wanted, 4);
    assert!(faults_with_io() - before < 100, "{:?}", far.stats());
    assert!(far.stats().local_frames <= 64 * MIB / PAGE as u64);
}

#[test]
fn the_budget_changes_while_threads_work() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    let far = builder(&lent, 8 * MIB).local_max(32 * MIB).start().unwrap();
    let vecs: Vec<_> = (0..2).map(|seed| words(&far, 2 << 20, seed)).collect();
    std::thread::scope(|scope| {
        for (seed, vec) in vecs.iter().enumerate() {
            scope.spawn(move || (0..3).for_each(|_| check(vec, seed as u64)));
        }
        for mib in [32, 6, 20, 4, 8] {
            far.set_local(mib * MIB).unwrap();
            if mib == 4 {
                assert!(far.stats().local_frames <= 4 * MIB / PAGE as u64);
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    });
    far.set_local(32 * MIB).unwrap();
    check(&vecs[0], 0);
    check(&vecs[0][..1 << 20], 0);
    assert!(far.stats().local_frames > 3000, "it was made use of");
    for (mib, text) in [(64, "limit"), (1, "least")] {
        let error = far.set_local(mib * MIB).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn advice_is_followed() {
    let Some(_alone) = alone() else { return };
    let lent = lend(128 << 20);
    let far = builder(&lent, 8 * MIB).link(LinkChoice::Socket).start().unwrap();
    let vec = words(&far, 4 << 20, 2);
    let faults = || far.stats().faults;
    far.random(&vec);
    let before = faults();
    check(&vec, 2);
    assert!(faults() - before > 8000, "{:?}", far.stats());
    far.sequential(&vec);
    let before = faults();
    check(&vec, 2);
    assert!(faults() - before < 1000, "{:?}", far.stats());
    far.normal(&vec);
    // What is not needed leaves before what is: the rest is still there afterwards.
    let (cold, hot) = vec.split_at(1 << 19);
    let hot = &hot[..1 << 18];
    assert!(hot.iter().chain(cold).fold(0, |all, word| all ^ word) != 0);
    far.wont_need(cold);
    far.will_need(hot);
    check(cold, 2);
}

/// A vector that grows moves its pages; what was said of them holds at the new place.
#[test]
fn advice_goes_with_a_vector_that_grows() {
    let Some(_alone) = alone() else { return };
    let lent = lend(128 << 20);
    let far = builder(&lent, 8 * MIB).link(LinkChoice::Socket).start().unwrap();
    let mut vec = words(&far, 4 << 20, 2);
    vec.shrink_to_fit();
    far.random(&vec);
    let old = vec.as_ptr();
    // Its neighbour is in the way.
    let _neighbour = words(&far, 1 << 16, 3);
    vec.reserve_exact(16 << 20);
    assert_ne!(vec.as_ptr(), old);
    let before = far.stats();
    check(&vec[..4 << 20], 2);
    let after = far.stats();
    assert!(
        after.faults - before.faults > 8000 && after.prefetched == before.prefetched,
        "{before:?} {after:?}"
    );
}

#[test]
fn what_makes_no_sense_is_refused() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    for bytes in [0, 1, 2048, 4097, 12 << 10, 4 << 20, usize::MAX] {
        let error = builder(&lent, 8 * MIB).page_bytes(bytes).start().unwrap_err().to_string();
        assert!(error.contains("4096"), "{error}");
    }
    let error = builder(&lent, 6 * MIB).page_bytes(2 << 20).start().unwrap_err().to_string();
    assert!(error.contains("too small"), "{error}");
    let error = builder(&lent, MIB).start().unwrap_err().to_string();
    assert!(error.contains("too small"), "{error}");
    for cpu in [1023, 1 << 20] {
        let error = builder(&lent, 8 * MIB).cpu(cpu).start().unwrap_err().to_string();
        assert!(error.contains(&format!("CPU {cpu}, which this process may not use")), "{error}");
    }
    let far = builder(&lent, 8 * MIB).area(1 << 30).start().unwrap();
    let error = far.zeroed::<u64>(1 << 30).unwrap_err().to_string();
    assert!(error.contains("no room"), "{error}");
    assert!(far.vec::<u8>().try_reserve(1 << 40).is_err());
    // Hints for memory of another kind do nothing; who pins it would be wrong.
    let local = [0_u8; 100];
    far.sequential(&local);
    far.will_need(&local);
    let error = far.pin(&local[..]).unwrap_err().to_string();
    assert!(error.contains("not a range of far memory"), "{error}");
    let error = far.range(0).unwrap_err().to_string();
    assert!(error.contains("0 bytes"), "{error}");
    // Numbers that cannot be meant.
    let start = |change: fn(FarBuilder) -> FarBuilder| {
        change(builder(&lent, 8 * MIB))
            .start()
            .map_or_else(|error| error.to_string(), |_| "started".to_owned())
    };
    for (error, text) in [
        (start(|far| far.area(1 << 42).local(1 << 40)), "more than a pager has"),
        (start(|far| far.area(1 << 42).local_max(u64::MAX)), "more than a pager has"),
        (start(|far| far.local_max(4 * MIB)), "as its limit"),
        (start(|far| far.area(16 * MIB).local_max(64 * MIB)), "larger area"),
        (start(|far| far.lender_timeout(Duration::ZERO)), "at least 50ms"),
        (start(|far| far.lender_timeout(Duration::from_millis(4))), "at least 50ms"),
        (start(|far| far.learn("/nonexistent/record")), "cannot keep a record in /nonexistent/record"),
        (start(|far| far.learn("")), "cannot keep a record"),
    ] {
        assert!(error.contains(text), "{error}");
    }
    far.pin(&[0_u8; 0][..]).map(drop).unwrap();
}

/// Blocks without layouts, by many threads: those that grow keep what was in them, and nobody has another's.
#[test]
fn blocks_by_their_addresses_are_as_of_malloc() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    blocks_of_many_threads(&far(&lent, 8 * MIB), || {});
}

/// One of two lenders dies in the middle of it.
#[test]
fn blocks_by_their_addresses_outlive_a_lender() {
    let Some(_alone) = alone() else { return };
    let (one, other) = (Serving::new(256), Serving::new(256));
    let far = FarMemory::builder().local(8 * MIB).area(1 << 36).tier(TierPolicy::Lender).replicas(2);
    let far = far.lenders([&one.address, &other.address]).start().unwrap();
    let both = far.lenders();
    assert_eq!([&both[0].address, &both[1].address], [&one.address, &other.address]);
    assert!(both.iter().all(|lender| lender.lost.is_none() && lender.held_bytes == 0), "{both:?}");
    let gone = one.address.clone();
    blocks_of_many_threads(&far, || drop(one));
    assert_eq!(far.stats().lenders_lost, 1);
    let after = far.lenders();
    println!("{after:#?}");
    assert!(after[0].lost.as_ref().is_some_and(|why| why.contains(&gone)) && after[1].lost.is_none());
    assert!(after[0].held_bytes == 0 && after[1].written_bytes > 0, "{after:?}");
    assert!(after[1].reads > 0 && after[1].read_bytes >= 4096 && after[1].reads_ns > after[1].reads);
    assert_eq!(after.iter().map(|lender| lender.read_bytes).sum::<u64>(), far.stats().bytes_in);
    // The pager lives as long as the process.
    std::mem::forget(other);
}

fn blocks_of_many_threads(far: &FarMemory, meanwhile: impl FnOnce()) {
    let heap = FarHeap::new(far);
    let memory = |address, bytes| far.pager().memory(address, bytes).unwrap();
    let holds = |(address, bytes, byte): (usize, usize, u8)| {
        let mut held = vec![0; bytes];
        memory(address, bytes).read_into(0, &mut held).unwrap();
        held.iter().all(|&held| held == byte)
    };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (heap, memory, holds) = (&heap, &memory, &holds);
            scope.spawn(move || {
                let (mut random, mut blocks) = (Random::new(thread), Vec::new());
                for round in 0..4000_usize {
                    let bytes = 1 + random.next() as usize % if round % 20 == 0 { 200_000 } else { 5000 };
                    let byte = (round as u8).wrapping_mul(5).wrapping_add(thread as u8);
                    let address = match random.next() % 8 {
                        0 if !blocks.is_empty() => {
                            let block: (usize, usize, u8) =
                                blocks.swap_remove(random.next() as usize % blocks.len());
                            assert!(holds(block));
                            heap.free(block.0).unwrap();
                            continue;
                        }
                        1 | 2 if !blocks.is_empty() => {
                            let (address, old, byte) =
                                blocks.swap_remove(random.next() as usize % blocks.len());
                            let address = heap.resize(address, bytes).unwrap();
                            assert!(holds((address, old.min(bytes), byte)));
                            address
                        }
                        _ => heap.allocate(bytes, 1 << (random.next() % 13)).unwrap(),
                    };
                    assert!(heap.usable(address).unwrap() >= bytes);
                    memory(address, bytes).fill(byte);
                    blocks.push((address, bytes, byte));
                }
                assert!(blocks.iter().all(|&block| holds(block)));
                blocks.iter().for_each(|block| heap.free(block.0).unwrap());
                assert!(heap.free(blocks[0].0).is_err(), "twice");
            });
        }
        while far.stats().remote_writes < 1000 {
            std::thread::sleep(Duration::from_millis(1));
        }
        meanwhile();
    });
    assert!(far.stats().remote_reads > 100, "{:?}", far.stats());
}

#[test]
fn a_child_of_a_fork_is_told_that_it_has_none() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let far = far(&lent, 8 * MIB);
    let mut vec = words(&far, 1000, 1);
    // Of a span that has room for more: the child finds the heap as it was.
    let _small = far.boxed(1_u8).unwrap();
    let is_told = |result: Result<(), Error>| matches!(result, Err(Error::Pager(PagerError::Forked)));
    // SAFETY: the child makes calls that take no locks of other threads, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let told = [far.set_local(8 * MIB), far.boxed(1_u8).map(drop), far.pin(&vec[..]).map(drop)];
        let all = told.into_iter().all(is_told) && vec.try_reserve(100_000).is_err();
        // SAFETY: ends the process.
        unsafe { libc::_exit(if all { 21 } else { 22 }) };
    }
    let mut status = 0;
    // SAFETY: waits for our child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(libc::WEXITSTATUS(status), 21, "{status:#x}");
    check(&vec, 1);
}

/// Who is asked, and says nothing at all, is given up after as long as was said.
#[test]
fn patience_with_lenders_is_that_at_the_start_too() {
    let Some(_alone) = alone() else { return };
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let start = std::time::Instant::now();
    let far = FarMemory::builder().local(8 * MIB).lender(&address).area(1 << 30);
    let error = far.lender_timeout(Duration::from_millis(300)).start().unwrap_err().to_string();
    assert!(error.contains(&address), "{error}");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

/// Random reads and writes beyond the budget with pages of each size: contents stay, and larger pages come in by fewer faults.
#[test]
fn pages_of_all_sizes() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    let mut faults = Vec::new();
    for bytes in [PAGE, 64 << 10, 2 << 20] {
        let far = builder(&lent, 8 * MIB).page_bytes(bytes).start().unwrap();
        let mut random = Random::new(bytes as u64);
        let mut values = words(&far, 5 << 19, 7);
        let mut model: Vec<u64> = values.to_vec();
        for _ in 0..3000 {
            let index = (random.next() % values.len() as u64) as usize;
            assert_eq!(values[index], model[index]);
            (values[index], model[index]) = (index as u64, index as u64);
        }
        assert!(values[..] == model[..]);
        // One word of each 64 KiB, in no order that could be guessed.
        let before = far.stats();
        let mut places: Vec<usize> = (0..values.len()).step_by(8192).collect();
        places.sort_by_key(|&place| (place as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        for place in places {
            for index in 0..16 {
                assert_eq!(values[place + index * 512], model[place + index * 512]);
            }
        }
        let after = far.stats();
        assert!(after.local_frames_peak <= 8 * MIB / PAGE as u64, "{after:?}");
        faults.push(after.faults - before.faults);
    }
    assert!(faults[1] * 6 < faults[0] * 2, "{faults:?}");
}

/// Blocks that lie on two pages come as a whole: half as many faults, and no page that nobody wanted where only heads are read.
#[test]
fn blocks_on_two_pages_come_together() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    let far = far(&lent, 8 * MIB);
    let mut random = Random::new(9);
    let blocks: Vec<FarVec<u64>> = (0..10_000_u64)
        .map(|number| {
            let mut block = far.vec();
            block.reserve_exact(320);
            block.extend((0..320).map(|word| number << 32 | word));
            block
        })
        .collect();
    let on_two = |block: &FarVec<u64>| {
        let start = block.as_ptr() as usize;
        start / PAGE != (start + block.len() * 8 - 1) / PAGE
    };
    let chosen: Vec<usize> = (0..blocks.len()).filter(|&index| on_two(&blocks[index])).collect();
    let mut read = |whole: bool| {
        let before = far.stats();
        for _ in 0..4000 {
            let number = chosen[(random.next() % chosen.len() as u64) as usize];
            let block = &blocks[number];
            assert_eq!(block[0], (number as u64) << 32);
            assert!(!whole || block[319] == (number as u64) << 32 | 319);
        }
        let after = far.stats();
        (after.faults - before.faults, after.bytes_in - before.bytes_in)
    };
    let (faults, _) = read(true);
    assert!(faults < 5000, "{faults} faults of 4000 reads of two pages each, of which most are far");
    let (faults, bytes) = read(false);
    assert!(bytes < faults * PAGE as u64 * 5 / 4, "{bytes} bytes came for {faults} heads");
}

/// Every seventeenth page, upwards and downwards: most come before they are wanted.
#[test]
fn strides_are_followed() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    let far = far(&lent, 8 * MIB);
    let values = words(&far, 8 << 20, 3);
    let mut expected = Random::new(3);
    let expected: Vec<u64> = (0..values.len()).map(|_| expected.next()).collect();
    for down in [false, true] {
        let before = far.stats();
        let mut reads = 0;
        for start in 0..4 {
            let pages = values.len() * 8 / PAGE;
            let strided = (start..pages).step_by(17).map(|page| page * PAGE / 8);
            let all: Vec<usize> = if down { strided.rev().collect() } else { strided.collect() };
            for &index in &all {
                assert_eq!(values[index], expected[index]);
            }
            reads += all.len() as u64;
        }
        let faults = far.stats().faults - before.faults;
        assert!(faults * 4 < reads, "{faults} faults of {reads} reads");
    }
}
