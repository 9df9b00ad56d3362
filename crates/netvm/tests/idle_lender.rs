//! Lenders that are lost while they hold nothing: nobody minds, until they are needed.

mod common;

use common::words::{check, words};
use common::{Serving, alone, fault_paths, lend};
use netvm::far::{FarBuilder, FarMemory, FarVec, FaultPath, PagerError, TierPolicy};
use netvm::lender::LinkChoice;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const SLABS: u64 = 64;
/// So many times two words are a MiB.
const MIB_WORDS: u32 = 17;

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
    for (path, link) in fault_paths().into_iter().zip([LinkChoice::Socket, LinkChoice::Auto]) {
        let lender = Serving::new(SLABS);
        let address = lender.address.clone();
        let far = FarMemory::builder().local(8 * MIB).lender(&address).area(1 << 34);
        let far = far.fault_path(path).link(link).start().unwrap();
        // All of it is local.
        let near = words(&far, 3 << MIB_WORDS, 1);
        drop(lender);
        until(&far, "lost", |lost| lost == [true]);
        check(&near, 1);
        // It is there again before it is needed.
        let lender = Serving::at(&address, SLABS);
        until(&far, "back", |lost| lost == [false]);
        let more = words(&far, 16 << MIB_WORDS, 2);
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
        check(&words(&far, 16 << MIB_WORDS, 3), 3);
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
        let near = words(&far, 3 << MIB_WORDS, 1);
        drop(lenders);
        until(&far, "lost", |lost| lost == [true; 2]);
        check(&near, 1);
        let lenders = addresses.clone().map(|address| Serving::at(&address, SLABS));
        until(&far, "back", |lost| lost == [false; 2]);
        check(&words(&far, 16 << MIB_WORDS, 2), 2);
        check(&near, 1);
        drop((far, near));
        drop(lenders);
    }
}

#[test]
fn who_is_waited_for_may_be_needed_no_longer_and_calls_are_answered() {
    let Some(_alone) = alone() else { return };
    for path in fault_paths() {
        let lender = Serving::new(SLABS);
        let far = FarMemory::builder().local(8 * MIB).lender(&lender.address).area(1 << 34);
        let far = far.fault_path(path).link(LinkChoice::Socket).start().unwrap();
        let near = words(&far, 6 << MIB_WORDS, 1);
        drop(lender);
        until(&far, "lost", |lost| lost == [true]);
        // Pages that have nowhere to go stay, whatever is said of them.
        far.wont_need(&near);
        let refused = far.set_local(4 * MIB);
        assert!(matches!(refused, Err(netvm::Error::Pager(PagerError::CopiesLost { .. }))), "{refused:?}");
        check(&near, 1);
        let began = Instant::now();
        std::thread::scope(|scope| {
            // More than is local, until the other thread gives its part back.
            let filling = scope.spawn(|| words(&far, 6 << MIB_WORDS, 2));
            std::thread::sleep(Duration::from_millis(300));
            assert!(far.stats().faults > 0 && far.lenders()[0].lost.is_some());
            assert!(!filling.is_finished());
            drop(near);
            check(&filling.join().unwrap(), 2);
        });
        assert!(began.elapsed() < Duration::from_secs(2), "{path:?}: {:?}", began.elapsed());
    }
}

/// Passes bytes on between a pager and its lender. Armed, it ends a connection as soon as something comes from the pager.
fn cut(lender: &str, armed: &Arc<AtomicBool>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (lender, armed) = (lender.to_owned(), Arc::clone(armed));
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            // It may be away.
            let Ok(far) = TcpStream::connect(&lender) else { continue };
            let ends = [(near.try_clone(), far.try_clone()), (far.try_clone(), near.try_clone())];
            for (at, (from, to)) in ends.into_iter().enumerate() {
                let (mut from, mut to, armed) = (from.unwrap(), to.unwrap(), Arc::clone(&armed));
                std::thread::spawn(move || {
                    let mut bytes = vec![0; 1 << 16];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        if at == 0 && armed.swap(false, Ordering::Relaxed) {
                            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                            return;
                        }
                        if to.write_all(&bytes[..count]).is_err() {
                            return;
                        }
                    }
                });
            }
        }
    });
    address
}

#[test]
fn a_loss_that_is_noticed_when_somebody_is_needed_is_no_end_either() {
    let Some(_alone) = alone() else { return };
    let (lent, armed) = (lend(SLABS << 20), Arc::new(AtomicBool::new(false)));
    let far = FarMemory::builder().local(8 * MIB).lender(cut(lent.address(), &armed)).area(1 << 34);
    // Less than it takes to look for a lender again and again.
    let far = far.lender_timeout(Duration::from_millis(500)).link(LinkChoice::Socket).start().unwrap();
    let near = words(&far, 3 << MIB_WORDS, 1);
    armed.store(true, Ordering::Relaxed);
    let more = words(&far, 16 << MIB_WORDS, 2);
    check(&near, 1);
    check(&more, 2);
    assert!(far.stats().lenders_lost == 1 && !armed.load(Ordering::Relaxed), "{:?}", far.stats());
}

#[test]
fn where_one_is_full_a_lost_one_is_waited_for() {
    let Some(_alone) = alone() else { return };
    let (small, large) = (Serving::new(2), Serving::new(SLABS));
    let address = large.address.clone();
    let far = FarMemory::builder().local(8 * MIB).lenders([&small.address, &address]).area(1 << 34);
    let far = far.link(LinkChoice::Socket).start().unwrap();
    drop(large);
    until(&far, "lost", |lost| lost == [false, true]);
    let back = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        Serving::at(&address, SLABS)
    });
    let all = words(&far, 16 << MIB_WORDS, 1);
    check(&all, 1);
    drop((all, far));
    drop(back.join().unwrap());
}

/// Far memory of 16 MiB whose only lender is lost before anything has left, and what is in it.
fn stranded_with<T>(
    path: FaultPath,
    change: impl FnOnce(FarBuilder) -> FarBuilder,
    fill: impl FnOnce(&FarMemory) -> T,
) -> (FarMemory, T) {
    let lender = Serving::new(SLABS);
    let far = FarMemory::builder().local(16 * MIB).lender(&lender.address).area(1 << 34).fault_path(path);
    let far = change(far.link(LinkChoice::Socket)).start().unwrap();
    let near = fill(&far);
    drop(lender);
    until(&far, "lost", |lost| lost == [true]);
    (far, near)
}

fn stranded(path: FaultPath, change: impl FnOnce(FarBuilder) -> FarBuilder) -> (FarMemory, FarVec<u64>) {
    stranded_with(path, change, |far| words(far, 12 << MIB_WORDS, 1))
}

/// Words of which a page packs to a small part.
fn packable(far: &FarMemory, mib: u64) -> FarVec<u64> {
    let mut words = far.vec();
    words.extend((0..mib << 17).map(|index| index % 1000));
    words
}

#[test]
fn what_is_zero_or_packs_needs_no_lender() {
    let Some(_alone) = alone() else { return };
    for path in fault_paths() {
        let (far, near) = stranded(path, |far| far);
        let zeros = far.zeroed::<u64>(32 << 17).unwrap();
        assert_eq!(zeros.iter().sum::<u64>(), 0);
        check(&near, 1);
        drop((zeros, near, far));
        let (far, near) = stranded_with(path, |far| far.tier(TierPolicy::Packed), |far| packable(far, 8));
        let more = packable(&far, 14);
        let is_right = |(index, &word): (usize, &u64)| word == index as u64 % 1000;
        assert!(more.iter().enumerate().all(is_right) && near.iter().enumerate().all(is_right));
        assert!(far.lenders()[0].lost.is_some() && far.stats().packed > 0, "{:?}", far.stats());
    }
}

#[test]
fn what_is_refused_changes_nothing() {
    let Some(_alone) = alone() else { return };
    for path in fault_paths() {
        // Noticed only when pages have left for their lender.
        let (lender, armed) = (Serving::new(SLABS), Arc::new(AtomicBool::new(false)));
        let address = lender.address.clone();
        let far = FarMemory::builder().local(16 * MIB).lender(cut(&address, &armed)).area(1 << 34);
        let far = far.lender_timeout(Duration::from_millis(50)).fault_path(path).link(LinkChoice::Socket);
        let far = far.start().unwrap();
        let near = words(&far, 12 << MIB_WORDS, 1);
        drop(lender);
        armed.store(true, Ordering::Relaxed);
        assert!(far.lenders()[0].lost.is_none());
        let refused = far.set_local(4 * MIB);
        assert!(matches!(refused, Err(netvm::Error::Pager(PagerError::CopiesLost { .. }))), "{refused:?}");
        let lender = Serving::at(&address, SLABS);
        // All of it is there, and the budget as well.
        check(&near, 1);
        until(&far, "back", |lost| lost == [false]);
        let more = words(&far, 16 << MIB_WORDS, 2);
        check(&near, 1);
        check(&more, 2);
        assert!(far.stats().local_frames > 3 << 10, "{:?}", far.stats());
        drop((near, more, far));
        drop(lender);
        // Shards that gave nothing up, or did, have what they had.
        let (far, near) = stranded(path, |far| far.shards(2).local(48 * MIB));
        assert!(far.set_local(8 * MIB).is_err());
        let more = words(&far, 20 << MIB_WORDS, 2);
        check(&near, 1);
        check(&more, 2);
        // A pin that finds no room leaves nobody behind who waits for it.
        let (far, near) = stranded(path, |far| far.lender_timeout(Duration::from_millis(50)));
        let more = far.zeroed::<u64>(6 << 17).unwrap();
        let pinned = words(&far, 3 << MIB_WORDS, 2);
        let _ = far.pin(&more[..]).map(drop);
        std::thread::sleep(Duration::from_millis(3500));
        check(&near, 1);
        check(&pinned, 2);
    }
}

#[test]
fn a_need_that_was_met_is_over() {
    let Some(_alone) = alone() else { return };
    for path in fault_paths() {
        let (far, near) = stranded(path, |far| far.lender_timeout(Duration::from_millis(50)));
        let (began, mut near, mut waits) = (Instant::now(), Some(near), 0);
        // Longer than any single need is waited for.
        for seed in 2.. {
            near = std::thread::scope(|scope| {
                let filling = scope.spawn(|| words(&far, 12 << MIB_WORDS, seed));
                std::thread::sleep(Duration::from_millis(40));
                waits += u32::from(!filling.is_finished());
                drop(near.take());
                let filled = filling.join().unwrap();
                check(&filled, seed);
                Some(filled)
            });
            if began.elapsed() > Duration::from_secs(4) && waits > 20 {
                break;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{path:?}: {waits}");
        }
    }
}
