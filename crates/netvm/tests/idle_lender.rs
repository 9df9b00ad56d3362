//! Lenders that are lost while they hold nothing: nobody minds, until they are needed.

mod common;

use common::{Random, Serving, alone};
use netvm::far::{FarMemory, FarVec, FaultPath};
use netvm::lender::LinkChoice;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const SLABS: u64 = 64;

fn words(far: &FarMemory, mib: usize, seed: u64) -> FarVec<u64> {
    let mut random = Random::new(seed);
    let mut words = far.vec();
    words.extend((0..mib << 17).map(|_| random.next()));
    words
}

fn check(words: &[u64], seed: u64) {
    let mut random = Random::new(seed);
    assert!(words.iter().all(|&word| word == random.next()));
}

fn until(far: &FarMemory, what: &str, is_so: impl Fn(&[bool]) -> bool) {
    let began = Instant::now();
    loop {
        let lost: Vec<bool> = far.lenders().iter().map(|lender| lender.lost.is_some()).collect();
        if is_so(&lost) {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(10), "{what}: {:?}", far.lenders());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn the_only_lender_may_go_while_it_has_nothing() {
    let Some(_alone) = alone() else { return };
    for (path, link) in [(FaultPath::Thread, LinkChoice::Socket), (FaultPath::InThread, LinkChoice::Auto)] {
        let lender = Serving::new(SLABS);
        let address = lender.address.clone();
        let far = FarMemory::builder().local(8 * MIB).lender(&address).area(1 << 34);
        let far = far.fault_path(path).link(link).start().unwrap();
        // All of it is local.
        let near = words(&far, 3, 1);
        drop(lender);
        until(&far, "lost", |lost| lost == [true]);
        check(&near, 1);
        // It is there again before it is needed.
        let lender = Serving::at(&address, SLABS);
        until(&far, "back", |lost| lost == [false]);
        let more = words(&far, 16, 2);
        check(&near, 1);
        check(&more, 2);
        assert!(far.stats().remote_reads > 1000, "{:?}", far.stats());
        // It has nothing any more, goes, and is there a second after it is needed.
        drop((near, more));
        drop(lender);
        until(&far, "lost again", |lost| lost == [true]);
        let back = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(1));
            Serving::at(&address, SLABS)
        });
        check(&words(&far, 16, 3), 3);
        let stats = far.stats();
        assert_eq!((stats.lenders_lost, stats.lenders_back), (2, 2), "{path:?}, {link:?}");
        drop(far);
        drop(back.join().unwrap());
    }
}

#[test]
fn so_may_all_of_several() {
    let Some(_alone) = alone() else { return };
    // Their ports are free again at once.
    let addresses = [(); 2].map(|()| Serving::new(SLABS)).each_ref().map(|lender| lender.address.clone());
    for replicas in [1, 2] {
        let lenders = addresses.clone().map(|address| Serving::at(&address, SLABS));
        let far = FarMemory::builder().local(8 * MIB).lenders(&addresses).area(1 << 34);
        let far = far.replicas(replicas).start().unwrap();
        let near = words(&far, 3, 1);
        drop(lenders);
        until(&far, "lost", |lost| lost == [true; 2]);
        check(&near, 1);
        let lenders = addresses.clone().map(|address| Serving::at(&address, SLABS));
        until(&far, "back", |lost| lost == [false; 2]);
        check(&words(&far, 16, 2), 2);
        check(&near, 1);
        drop((far, near));
        drop(lenders);
    }
}
