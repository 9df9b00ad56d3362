//! What lenders ask back, and how borrowers give it: pressure, leaving, quotas, leases of those who do not answer.

mod common;

use common::words::{check, words};
use common::{Random, Serving, alone};
use netvm::far::FarMemory;
use netvm::lender::{BorrowOptions, Borrower, LenderConfig, LenderStatus, LinkChoice, status};
use netvm::pager::TierPolicy;
use netvm::volume::{BLOCK_BYTES, Event, Volume, VolumeOptions};
use netvm::{Error, LenderLimit};
use netvm_sys::mapping::Mapping;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const WORDS: usize = 3 << 20;

/// Slabs of 1 MiB.
fn config(mib: u64) -> LenderConfig {
    LenderConfig { size_bytes: mib * MIB, slab_bytes: MIB, ..LenderConfig::default() }
}

/// A lender until the process ends: pagers have no end either.
fn lend(config: LenderConfig) -> &'static Serving {
    Box::leak(Box::new(Serving::start(config)))
}

fn borrow(lenders: &[&Serving], replicas: usize, link: LinkChoice) -> FarMemory {
    borrow_with(lenders, replicas, link, false)
}

fn borrow_with(lenders: &[&Serving], replicas: usize, link: LinkChoice, encrypt: bool) -> FarMemory {
    let far = FarMemory::builder().lenders(lenders.iter().map(|lender| lender.address.as_str()));
    let far = far.encrypt_pages(encrypt);
    far.replicas(replicas).local(4 * MIB).area(1 << 34).tier(TierPolicy::Lender).link(link).start().unwrap()
}

fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !so() {
        assert!(Instant::now() < end, "it never came that {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn is_over(lender: &Serving) -> bool {
    lender.thread.as_ref().is_none_or(|thread| thread.is_finished())
}

/// A file that tells how much memory is available.
struct Meminfo(PathBuf);

impl Meminfo {
    fn new(name: &str) -> Self {
        let meminfo = Self(std::env::temp_dir().join(format!("netvm-{name}-{}", std::process::id())));
        meminfo.set(1 << 40);
        meminfo
    }

    fn set(&self, bytes: u64) {
        let next = self.0.with_extension("next");
        std::fs::write(&next, format!("MemTotal: 1 kB\nMemAvailable: {} kB\n", bytes / 1024)).unwrap();
        std::fs::rename(next, &self.0).unwrap();
    }
}

impl Drop for Meminfo {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Ends another thread's work, also when this one fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_lender_leaves_while_its_memory_is_used() {
    let Some(_alone) = alone() else { return };
    for (replicas, link, encrypt) in
        [(1, LinkChoice::Socket, false), (1, LinkChoice::Auto, true), (2, LinkChoice::Socket, false)]
    {
        let lenders: Vec<_> = (0..replicas + 1).map(|_| lend(config(128))).collect();
        let far = borrow_with(&lenders, replicas, link, encrypt);
        let mut vec = words(&far, WORDS, 1);
        assert!(status(&lenders[0].address).unwrap().used_bytes > 4 * MIB);
        let end = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let ended = End(&end);
            scope.spawn(|| {
                let mut random = Random::new(9);
                while !end.load(Ordering::Relaxed) {
                    let index = random.next() as usize % WORDS;
                    // Written and put back: what is in the middle of a move changes.
                    vec[index] ^= 1;
                    std::hint::black_box(&mut vec[(index + WORDS / 2) % WORDS]);
                    vec[index] ^= 1;
                }
            });
            lenders[0].stop.stop();
            until("the lender has left", || is_over(lenders[0]));
            drop(ended);
        });
        check(&vec, 1);
        let stats = far.stats();
        assert!(stats.pages_moved > 1000 && stats.lenders_left == 1, "{stats:?}");
        assert_eq!((stats.lenders_lost, stats.wrong_pages, stats.pages_unprotected), (0, 0, 0));
    }
}

#[test]
fn a_lender_short_of_memory_gets_it_back() {
    let Some(_alone) = alone() else { return };
    let meminfo = Meminfo::new("short");
    let reserve_bytes = 100 * MIB;
    let lender = lend(LenderConfig { reserve_bytes, meminfo_file: meminfo.0.clone(), ..config(128) });
    let far = borrow(&[lender], 1, LinkChoice::Auto);
    let vec = words(&far, WORDS, 2);
    let state = || status(&lender.address).unwrap();
    let used = state().used_bytes;
    meminfo.set(90 * MIB);
    until("nobody can take it", || state().stuck);
    let LenderStatus { missing_bytes, borrowers, used_bytes, .. } = state();
    // What was being written out when it was asked first may have taken more since.
    assert!(missing_bytes == 10 * MIB && used_bytes >= used, "{missing_bytes} {used_bytes} {used}");
    assert!(borrowers[0].cannot && borrowers[0].recalled_bytes == 10 * MIB, "{borrowers:?}");
    // It is served all the same.
    check(&vec, 2);
    meminfo.set(200 * MIB);
    until("there is enough", || state().missing_bytes == 0 && !state().stuck);

    let other = lend(config(128));
    let far = borrow(&[lender, other], 1, LinkChoice::Auto);
    let both = words(&far, WORDS, 3);
    let (used, elsewhere) = (state().used_bytes, status(&other.address).unwrap().used_bytes);
    meminfo.set(96 * MIB);
    until("something has moved", || state().used_bytes + 3 * MIB < used);
    meminfo.set(200 * MIB);
    check(&both, 3);
    check(&vec, 2);
    assert!(status(&other.address).unwrap().used_bytes > elsewhere);
    assert!(far.stats().pages_moved > 700, "{:?}", far.stats());
}

/// Calls that are not answered must leave room for the question whether it is there.
#[test]
fn who_does_not_answer_is_not_asked_again_and_told_the_last_wish_when_it_does() {
    let meminfo = Meminfo::new("wishes");
    let reserve_bytes = 100 * MIB;
    let lender = lend(LenderConfig { reserve_bytes, meminfo_file: meminfo.0.clone(), ..config(8) });
    let mut borrower = lender.connect();
    for _ in 0..8 {
        borrower.borrow_slab().unwrap();
    }
    let missing = || status(&lender.address).unwrap().missing_bytes;
    for mib in [1, 0, 2, 0, 3] {
        meminfo.set(reserve_bytes - mib * MIB);
        until("it has looked", || missing() == mib * MIB);
    }
    let mut told = Vec::new();
    until("the last wish is told", || {
        borrower.poll(&mut Vec::new()).unwrap();
        told.extend(borrower.take_recall().map(|recall| recall.bytes));
        told.last() == Some(&(3 * MIB))
    });
    assert_eq!(told, [MIB, 3 * MIB]);
}

#[test]
fn pages_come_home_when_nobody_else_has_room_and_the_budget_does() {
    let Some(_alone) = alone() else { return };
    let lender = lend(config(128));
    let far = FarMemory::builder().lender(&lender.address).local(4 * MIB).local_max(64 * MIB).area(1 << 34);
    let far = far.tier(TierPolicy::Lender).start().unwrap();
    let mut vec = words(&far, WORDS, 6);
    let state = || status(&lender.address).unwrap();
    lender.stop.stop();
    until("nobody can take it", || state().borrowers[0].cannot);
    assert!(state().used_bytes > 16 * MIB);
    far.set_local(64 * MIB).unwrap();
    until("it is here", || state().used_bytes == 0);
    assert!(far.stats().local_frames <= 64 * MIB / 4096);
    check(&vec, 6);
    // It is still served, and has to be.
    vec[0] ^= 1;
    far.set_local(4 * MIB).unwrap();
    vec[0] ^= 1;
    check(&vec, 6);
    assert!(state().used_bytes > 16 * MIB);
}

#[test]
fn pressure_of_a_control_group_asks_for_memory_too() {
    let Some(_alone) = alone() else { return };
    let pressure = Meminfo::new("psi");
    std::fs::write(&pressure.0, "some avg10=0.10 avg60=0.00 avg300=0.00 total=1\n").unwrap();
    let lenders = [
        lend(LenderConfig { stall: 1000, pressure_file: pressure.0.clone(), ..config(128) }),
        lend(config(128)),
    ];
    let far = borrow(&lenders, 1, LinkChoice::Auto);
    let vec = words(&far, WORDS, 4);
    let used = || status(&lenders[0].address).unwrap().used_bytes;
    let before = used();
    std::thread::sleep(Duration::from_millis(700));
    // What was on its way out may have taken more since.
    assert!(used() >= before);
    std::fs::write(&pressure.0, "some avg10=35.00 avg60=0.00 avg300=0.00 total=1\n").unwrap();
    until("half of it has moved", || used() < before / 2);
    check(&vec, 4);
}

#[test]
fn a_borrower_gets_no_more_than_its_quota() {
    let lender = lend(LenderConfig { quota_bytes: 2 * MIB + 5, ..config(8) });
    let (mut one, mut two) = (lender.connect(), lender.connect());
    for borrower in [&mut one, &mut two] {
        borrower.borrow_slab().unwrap();
        let last = borrower.borrow_slab().unwrap();
        let error = borrower.borrow_slab().unwrap_err();
        assert!(matches!(error, Error::LenderFull { limit: LenderLimit::Quota, .. }), "{error:?}");
        assert!(error.to_string().contains("no more than 2 MiB"), "{error}");
        borrower.return_slab(last).unwrap();
        borrower.borrow_slab().unwrap();
    }
    assert_eq!(status(&lender.address).unwrap().quota_bytes, 2 * MIB + 5);
}

#[test]
fn slabs_of_forks_that_nobody_has_claimed_count() {
    let lender = lend(LenderConfig { quota_bytes: 2 * MIB, ..config(8) });
    let mut borrower = lender.connect();
    let slabs = [(); 2].map(|()| borrower.borrow_slab().unwrap());
    let ticket = borrower.fork_ticket().unwrap();
    for slab in slabs {
        borrower.return_slab(slab).unwrap();
    }
    let error = borrower.borrow_slab().unwrap_err();
    assert!(matches!(error, Error::LenderFull { limit: LenderLimit::Quota, .. }), "{error:?}");
    // Who has claimed them has a share of its own.
    let mut child = Borrower::adopt(&ticket, &BorrowOptions::default()).unwrap();
    assert!(child.borrow_slab().is_err());
    borrower.borrow_slab().unwrap();
    // What both have counts once.
    borrower.fork_ticket().unwrap();
    borrower.borrow_slab().unwrap();
    assert!(borrower.borrow_slab().is_err());
    // Another one with the number of a lease that has ended has nothing of it.
    drop((borrower, child));
    until("they are gone", || status(&lender.address).unwrap().borrowers.is_empty());
    let mut next = lender.connect();
    next.borrow_slab().unwrap();
    next.borrow_slab().unwrap();
}

#[test]
fn who_does_not_answer_loses_the_lease_and_who_does_keeps_it() {
    let Some(_alone) = alone() else { return };
    let lender = lend(LenderConfig { lease_timeout: Some(Duration::from_secs(3)), ..config(128) });
    // A pager with nothing to do answers all the same.
    let far = borrow(&[lender], 1, LinkChoice::Auto);
    let vec = words(&far, WORDS, 5);
    let mut silent = lender.connect();
    silent.borrow_slab().unwrap();
    let borrowers = || status(&lender.address).unwrap().borrowers;
    assert_eq!(borrowers().len(), 2);
    until("the silent one is gone", || borrowers().len() == 1);
    std::thread::sleep(Duration::from_millis(3500));
    check(&vec, 5);
    assert!(borrowers()[0].bytes > 4 * MIB);
    let error = silent.borrow_slab().unwrap_err();
    assert!(matches!(error, Error::LenderLost { .. }), "{error:?}");
}

#[test]
fn nobody_waits_longer_than_the_time_to_leave() {
    let lender = lend(LenderConfig { leave_timeout: Some(Duration::from_millis(700)), ..config(8) });
    let mut borrower = lender.connect();
    borrower.borrow_slab().unwrap();
    let since = Instant::now();
    lender.stop.stop();
    until("it has ended", || is_over(lender));
    assert!(since.elapsed() >= Duration::from_millis(700));
    assert!(borrower.borrow_slab().is_err());
}

#[test]
fn a_volume_moves_away_from_a_lender_that_leaves() {
    for replicas in [1, 2] {
        let lenders: Vec<_> = (0..replicas + 1).map(|_| lend(config(32))).collect();
        let addresses: Vec<String> = lenders.iter().map(|lender| lender.address.clone()).collect();
        let options = VolumeOptions { replicas, ..VolumeOptions::default() };
        let mut volume = Volume::open(&addresses, 16 * MIB, options).unwrap();
        let buffer = Mapping::anonymous(BLOCK_BYTES as usize).unwrap();
        let run = |volume: &mut Volume, begin: &mut dyn FnMut(&mut Volume)| {
            begin(volume);
            let mut ended = Vec::new();
            while ended.is_empty() {
                volume.poll(&mut ended);
                std::thread::yield_now();
            }
            ended.remove(0).result.unwrap();
        };
        let blocks = 16 * MIB / BLOCK_BYTES;
        let mut model = vec![0_u64; blocks as usize];
        let (mut random, memory) = (Random::new(3), buffer.shared());
        let (mut seen, mut left) = (Vec::new(), false);
        for step in 0..12_000 {
            if step == 4_000 {
                lenders[0].stop.stop();
            }
            let block = random.next() % blocks;
            let offset = block * BLOCK_BYTES;
            if random.next().is_multiple_of(2) {
                model[block as usize] = random.next();
                memory.write_from(8, &model[block as usize].to_le_bytes()).unwrap();
                run(&mut volume, &mut |volume| volume.write(1, offset, memory).unwrap());
            } else {
                run(&mut volume, &mut |volume| volume.read(1, offset, memory).unwrap());
                let mut word = [0; 8];
                memory.read_into(8, &mut word).unwrap();
                assert_eq!(u64::from_le_bytes(word), model[block as usize], "block {block}");
            }
            while let Some(event) = volume.event() {
                left |= matches!(&event, Event::LenderLeft { lender } if *lender == addresses[0]);
                seen.push(event.to_string());
            }
        }
        until("it has left", || {
            volume.poll(&mut Vec::new());
            while let Some(event) = volume.event() {
                left |= matches!(event, Event::LenderLeft { .. });
                seen.push(event.to_string());
            }
            left && is_over(lenders[0])
        });
        assert!(seen[0].contains("is going to end"), "{seen:?}");
        assert_eq!(volume.degraded(), (0, 0));
        for (block, &expected) in model.iter().enumerate() {
            run(&mut volume, &mut |volume| volume.read(1, block as u64 * BLOCK_BYTES, memory).unwrap());
            let mut word = [0; 8];
            memory.read_into(8, &mut word).unwrap();
            assert_eq!(u64::from_le_bytes(word), expected, "block {block}");
        }
    }
}
