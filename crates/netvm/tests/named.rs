//! Pages that a program names a little before it uses them: docs/design/far.md.

mod common;

use common::words::{check, words};
use common::{Lent, Random, Serving, alone, delayed, fault_paths, has_in_thread, lend};
use netvm::far::{FarBuilder, FarMemory, FarVec, FaultPath};
use netvm::lender::LinkChoice;
use netvm::pager::TierPolicy;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const WORDS_OF_PAGE: usize = 512;
const LINKS: [LinkChoice; 3] = [LinkChoice::Socket, LinkChoice::Datagrams, LinkChoice::Shm];

fn builder(lent: &Lent, local_bytes: u64) -> FarBuilder {
    FarMemory::builder().local(local_bytes).lender(lent.address()).area(1 << 36).tier(TierPolicy::Lender)
}

/// Waits until nothing has come for a while.
fn wait_for_reads(far: &FarMemory) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let (mut last, mut same) = (u64::MAX, 0);
    // Whoever reads may stand still for a while.
    while Instant::now() < deadline && same < 4 {
        let reads = far.stats().remote_reads;
        same = if reads == last { same + 1 } else { 0 };
        last = reads;
        std::thread::sleep(Duration::from_millis(25));
    }
}

/// Words of so many pages that are no neighbours, each with its place.
fn scattered(vec: &FarVec<u64>, random: &mut Random, count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..count)
        .map(|_| random.next() as usize % (vec.len() / WORDS_OF_PAGE) * WORDS_OF_PAGE + 77)
        .collect();
    places.dedup();
    places
}

/// What a vector of [`words`] has at these places.
fn at_places(len: usize, seed: u64, places: &[usize]) -> Vec<u64> {
    let mut random = Random::new(seed);
    let all: Vec<u64> = (0..len).map(|_| random.next()).collect();
    places.iter().map(|&place| all[place]).collect()
}

#[test]
fn what_is_named_is_there_without_a_fault() {
    let Some(_alone) = alone() else { return };
    for path in fault_paths() {
        for link in LINKS {
            let lent = lend(128 << 20);
            let far = builder(&lent, 8 * MIB).fault_path(path).link(link).start().unwrap();
            let vec = words(&far, 4 << 20, 4);
            let mut random = Random::new(9);
            let (mut faults, mut named) = (0, 0);
            for _ in 0..10 {
                let places = scattered(&vec, &mut random, 200);
                let expected = at_places(vec.len(), 4, &places);
                let before = far.stats();
                far.will_need_each(places.iter().map(|&place| &vec[place]));
                wait_for_reads(&far);
                // The last ones wait for room that those before them have taken, and come with the next call.
                let found: Vec<u64> = places.iter().map(|&place| vec[place]).collect();
                assert!(found == expected);
                let after = far.stats();
                faults += after.faults - before.faults;
                named += after.named - before.named;
            }
            assert!(named > 1500, "{path:?} {link:?}: {:?}", far.stats());
            assert!(faults * 10 < named, "{path:?} {link:?}: {faults} faults, {named} named");
            check(&vec, 4);
        }
    }
}

/// Whatever is named: what is away, new, here, elsewhere, nowhere, more than there is room for, by several threads at once, while others write, discard and page
/// out; with larger pages, several shards, packed, in parts, encrypted.
#[test]
fn names_change_nothing() {
    let Some(_alone) = alone() else { return };
    let kinds: [fn(FarBuilder) -> FarBuilder; 6] = [
        |far| far,
        |far| far.page_bytes(64 << 10),
        |far| far.shards(2).local(16 * MIB),
        |far| far.tier(TierPolicy::Packed),
        |far| far.encrypt_pages(true),
        |far| far.fault_path(FaultPath::InThread),
    ];
    // The last one is in-thread.
    let kinds = &kinds[..kinds.len() - usize::from(!has_in_thread())];
    for (kind, change) in kinds.iter().enumerate() {
        let lent = lend(256 << 20);
        let far = change(builder(&lent, 8 * MIB)).start().unwrap();
        let vec = words(&far, 4 << 20, 5);
        let (local, start) = ([7_u64; 100], vec.as_ptr() as usize);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (far, vec, local) = (&far, &vec, &local);
                scope.spawn(move || {
                    let mut random = Random::new(thread);
                    let mut own: FarVec<u64> = far.vec();
                    for round in 0..10 {
                        let places = scattered(vec, &mut random, if round % 4 == 0 { 3000 } else { 300 });
                        far.will_need_each(places.iter().map(|&place| &vec[place]));
                        far.will_need_each(local.iter());
                        far.will_need_each(own.iter());
                        far.will_need_each([&vec[..], &vec[100..2000], &[]]);
                        far.pager().will_need_each([
                            (0, usize::MAX),
                            (usize::MAX, usize::MAX),
                            (start - 1, 3),
                            (start + (1 << 35), 1 << 20),
                            (far.pager().area().end - 1, 100),
                        ]);
                        own.resize(20_000, round);
                        assert!(own.iter().all(|&word| word == round));
                        far.wont_need(&vec[..1 << 18]);
                        if round % 3 == 0 {
                            far.discard(&mut own[..]);
                            assert!(own.iter().all(|&word| word == 0));
                        }
                        own.clear();
                        let sum = places.iter().fold(0_u64, |sum, &place| sum ^ vec[place]);
                        std::hint::black_box(sum);
                    }
                });
            }
        });
        check(&vec, 5);
        let stats = far.stats();
        let budget = if kind == 2 { 16 } else { 8 } * MIB / 4096;
        assert!(stats.local_frames_peak <= budget && stats.named > 1000, "{kind}: {stats:?}");
    }
}

/// A lender that is killed while what was named is on its way: another has it.
#[test]
fn who_has_named_pages_outlives_a_lender() {
    let Some(_alone) = alone() else { return };
    for path in fault_paths() {
        let (mut one, other) = (Some(Serving::new(128)), Serving::new(128));
        let addresses = one.iter().chain([&other]).map(|lender| lender.address.clone());
        let far = FarMemory::builder().local(8 * MIB).area(1 << 36).tier(TierPolicy::Lender).replicas(2);
        let far = far.link(LinkChoice::Socket).lenders(addresses);
        let far = far.fault_path(path).start().unwrap();
        let vec = words(&far, 4 << 20, 6);
        let mut random = Random::new(3);
        for round in 0..200 {
            let places = scattered(&vec, &mut random, 500);
            far.will_need_each(places.iter().map(|&place| &vec[place]));
            if round == 100 {
                drop(one.take());
            }
            std::hint::black_box(places.iter().fold(0, |sum, &place| sum ^ vec[place]));
        }
        check(&vec, 6);
        assert_eq!(far.stats().lenders_lost, 1, "{:?}", far.stats());
    }
}

/// Who names pages does not wait for a lender that answers late, also where all that could leave for them has been written to; and they are there later.
#[test]
fn who_names_pages_does_not_wait_for_lenders() {
    let Some(_alone) = alone() else { return };
    for path in fault_paths() {
        let lent = lend(128 << 20);
        let delay_ms = Arc::new(AtomicU64::new(0));
        let address = delayed(lent.address(), Arc::clone(&delay_ms));
        let far = FarMemory::builder().local(8 * MIB).area(1 << 36).tier(TierPolicy::Lender);
        let far = far.lender(address).link(LinkChoice::Socket).fault_path(path).start().unwrap();
        let mut vec = words(&far, 4 << 20, 7);
        // All of the local memory.
        for place in (0..1 << 20).step_by(WORDS_OF_PAGE) {
            vec[place] ^= 1;
        }
        delay_ms.store(1500, Ordering::Relaxed);
        let began = Instant::now();
        for first in (2 << 20..4 << 20).step_by(64 * WORDS_OF_PAGE) {
            far.will_need_each((0..64).map(|page| &vec[first + page * WORDS_OF_PAGE]));
            far.will_need_each([&vec[first]]);
        }
        let took = began.elapsed();
        delay_ms.store(0, Ordering::Relaxed);
        assert!(took < Duration::from_secs(1), "{path:?}: {took:?}");
        for place in (0..1 << 20).step_by(WORDS_OF_PAGE) {
            vec[place] ^= 1;
        }
        check(&vec, 7);
    }
}
