//! Calls of the pager where the kernel, other threads or other processes do something at the same moment.

mod common;

use common::mapped::{churn, mapped, set_word, start, word};
use common::{Random, Serving, alone, fault_paths, lend, lend_in_slabs};
use netvm::far::FarMemory;
use netvm::lender::{LinkChoice, status};
use netvm::pager::{Access, FaultPath, FrameDesign, LOCAL_BYTES_MIN, Pager, PagerConfig};
use netvm::runfile::{RunFile, RunParams};
use netvm_sys::shared::SharedSlice;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

fn is_here(address: usize, pages: usize) -> Vec<bool> {
    let mut here = vec![0_u8; pages];
    // SAFETY: one byte for each page of a range that is mapped.
    assert_eq!(unsafe { libc::mincore(address as *mut _, pages * PAGE, here.as_mut_ptr()) }, 0);
    here.into_iter().map(|byte| byte & 1 != 0).collect()
}

#[test]
fn what_a_fork_needs_of_a_far_stack_is_here_however_small_the_share() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let path = std::env::temp_dir().join(format!("netvm-calls-fork-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let params = RunParams { budget_bytes: LOCAL_BYTES_MIN, ..RunParams::default() };
    let run = RunFile::create(&path, &params).unwrap();
    // The share of each of 64 processes is 16 frames; one has all the rest.
    let mut others: Vec<Child> = (0..63).map(|_| Command::new("sleep").arg("100").spawn().unwrap()).collect();
    let slots: Vec<_> = others.iter().map(|other| run.join(other.id()).unwrap()).collect();
    let rest = LOCAL_BYTES_MIN / PAGE as u64 - 16;
    assert_eq!(slots[0].grow(rest), rest);
    let pager = Pager::start(PagerConfig {
        local_bytes: LOCAL_BYTES_MIN,
        lenders: vec![lent.address().to_owned()],
        area_bytes: 1 << 34,
        run: Some(run.clone()),
        fault_path: FaultPath::Thread,
        ..PagerConfig::default()
    })
    .unwrap();
    let address = pager.area().start;
    pager.map(address, 64 * PAGE, 3).unwrap();
    let memory = pager.memory(address, 64 * PAGE).unwrap();
    (0..64).for_each(|page| set_word(memory, page * 512, page as u64 + 1));
    let stack_pointer = address + 50 * PAGE + 100;
    for _ in 0..20 {
        pager.fork_prepare(stack_pointer, Vec::new());
        let here = is_here(address, 64);
        pager.fork_parent();
        let missing: Vec<usize> = (26..=52).filter(|&page| !here[page]).collect();
        assert!(missing.is_empty(), "{missing:?} are not here while nobody serves faults");
        // Others' turn.
        (0..20).for_each(|page| set_word(memory, page * 512, page as u64 + 1));
    }
    (0..64).for_each(|page| assert_eq!(word(memory, page * 512), page as u64 + 1));
    // What was beyond the share goes back.
    let until = Instant::now() + Duration::from_secs(10);
    while pager.stats().local_frames > 20 {
        assert!(Instant::now() < until, "{} frames of 16", pager.stats().local_frames);
        std::thread::sleep(Duration::from_millis(20));
    }
    for other in &mut others {
        other.kill().unwrap();
        other.wait().unwrap();
    }
    std::fs::remove_file(&path).unwrap();
}

/// Fills these pages, and does something while a thread reads them at random.
fn while_others_read(memory: SharedSlice, pages: usize, run: impl FnOnce()) {
    (0..pages).for_each(|page| set_word(memory, page * 512, page as u64 + 1));
    let goes_on = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = Random::new(7);
            while goes_on.load(Ordering::Relaxed) {
                let page = random.next() as usize % pages;
                assert_eq!(word(memory, page * 512), page as u64 + 1);
            }
        });
        // Whatever fails, the thread must end.
        let _end = Ends(&goes_on);
        run();
    });
}

#[test]
fn faults_are_served_while_much_has_to_leave_or_to_come() {
    let Some(_alone) = alone() else { return };
    const PAGES: usize = 384 << 20 >> 12;
    for (link, shards) in [(LinkChoice::Shm, 1), (LinkChoice::Socket, 1), (LinkChoice::Shm, 2)] {
        let lent = lend(768 << 20);
        let pager = start(&lent, 256 << 20, |config| {
            (config.link, config.shards, config.fault_path) = (link, shards, FaultPath::Thread);
        });
        let memory = mapped(&pager, 0, PAGES * PAGE);
        while_others_read(memory, PAGES, || {
            let faults_of = |what: &dyn Fn()| {
                let before = pager.stats().faults;
                what();
                pager.stats().faults - before
            };
            let shrunk = faults_of(&|| pager.set_local_bytes(16 << 20).unwrap());
            let local_bytes = pager.stats().local_frames << 12;
            assert!(local_bytes <= 16 << 20, "{link:?}, {shards}: {local_bytes}");
            pager.set_local_bytes(256 << 20).unwrap();
            let (start, bytes) = (pager.area().start, 64 << 20);
            let pinned = faults_of(&|| pager.pin(start, bytes).unwrap());
            assert!(is_here(start, bytes / PAGE).iter().all(|&here| here));
            // What is too small for them is refused before anything leaves.
            assert!(pager.set_local_bytes(64 << 20).is_err());
            assert!(pager.stats().local_frames << 12 >= bytes as u64);
            pager.unpin(start, bytes).unwrap();
            assert!(pager.unpin(start, bytes).is_err());
            assert!(shrunk > 100 && pinned > 100, "{link:?}, {shards}: {shrunk} and {pinned} faults");
        });
        // Else it would be kept, here and at the lender.
        pager.unmap(pager.area().start, PAGES * PAGE).unwrap();
    }
}

/// Half of the budget is not in use: giving it up is quick, the rest is not.
#[test]
fn faults_are_served_though_much_of_the_budget_was_free() {
    let Some(_alone) = alone() else { return };
    const PAGES: usize = 160 << 20 >> 12;
    let lent = lend(512 << 20);
    let pager = start(&lent, 512 << 20, |config| config.link = LinkChoice::Socket);
    let memory = mapped(&pager, 0, PAGES * PAGE);
    while_others_read(memory, PAGES, || {
        let before = pager.stats().faults;
        pager.set_local_bytes(16 << 20).unwrap();
        let faults = pager.stats().faults - before;
        assert!(pager.stats().local_frames << 12 <= 16 << 20);
        assert!(faults > 100, "{faults}");
    });
}

/// Budgets and pins change, one of two lenders dies and comes back, and processes are forked, all at once.
#[test]
fn budgets_and_pins_change_while_lenders_die_and_processes_are_forked() {
    let Some(_alone) = alone() else { return };
    const PAGES: usize = 32 << 20 >> 12;
    for link in [LinkChoice::Shm, LinkChoice::Socket] {
        let (stays, mut goes) = (lend(64 << 20), Serving::new(64));
        let address = goes.address.clone();
        let far = FarMemory::builder().local(24 << 20).replicas(2).link(link).area(1 << 34);
        let far = far.lenders([stays.address(), &address]).start().unwrap();
        let mut words = far.vec::<u64>();
        words.extend((0..PAGES as u64 * 512).map(|index| if index % 512 == 0 { index + 1 } else { 0 }));
        let (goes_on, mut lost) = (AtomicBool::new(true), 0);
        let _goes = std::thread::scope(|scope| {
            let (words, far, goes_on) = (&words, &far, &goes_on);
            scope.spawn(move || {
                let mut random = Random::new(7);
                while goes_on.load(Ordering::Relaxed) {
                    let index = random.next() as usize % PAGES * 512;
                    assert_eq!(words[index], index as u64 + 1);
                }
            });
            scope.spawn(move || {
                for round in 0.. {
                    if !goes_on.load(Ordering::Relaxed) {
                        return;
                    }
                    let start = (round % 8) << 18;
                    let pin = far.pin(&words[start..start + (1 << 18)]).unwrap();
                    assert_eq!(words[start], start as u64 + 1);
                    drop(pin);
                }
            });
            scope.spawn(move || {
                while goes_on.load(Ordering::Relaxed) {
                    // SAFETY: the child does nothing but end.
                    let child = unsafe { libc::fork() };
                    if child == 0 {
                        // SAFETY: ends this process.
                        unsafe { libc::_exit(0) };
                    }
                    assert!(child > 0);
                    let mut status = 0;
                    // SAFETY: waits for our child.
                    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            let _end = Ends(goes_on);
            for round in 0..60 {
                far.set_local(if round % 2 == 0 { 8 << 20 } else { 24 << 20 }).unwrap();
                assert!(round % 2 == 1 || far.stats().local_frames << 12 <= 8 << 20);
                if round % 20 == 10 {
                    drop(goes);
                    lost += 1;
                    until("it is missed", || far.stats().lenders_lost == lost);
                    goes = Serving::at(&address, 64);
                    until("it is back", || far.lenders().iter().all(|lender| lender.lost.is_none()));
                }
            }
            goes
        });
        assert!(words.iter().enumerate().all(|(index, &word)| match index % 512 {
            0 => word == index as u64 + 1,
            _ => word == 0,
        }));
        assert_eq!((lost, far.stats().lenders_lost), (3, 3));
    }
}

/// Pages that leave have their places there.
#[test]
fn local_memory_shrinks_though_lenders_are_full() {
    let Some(_alone) = alone() else { return };
    const MIB: usize = 1 << 20;
    let lent = lend_in_slabs(16 << 20, 1 << 20);
    let pager = start(&lent, 8 << 20, |_| {});
    let memory = mapped(&pager, 0, 16 * MIB);
    let pages = 16 * MIB / PAGE;
    (0..pages).for_each(|page| set_word(memory, page * 512, page as u64 + 1));
    pager.page_out(pager.area().start, 16 * MIB);
    (0..pages).for_each(|page| assert_eq!(word(memory, page * 512), page as u64 + 1));
    assert_eq!(status(lent.address()).unwrap().used_bytes, 16 * MIB as u64, "it is full");
    pager.set_local_bytes(4 << 20).unwrap();
    assert!(pager.stats().local_frames << 12 <= 4 << 20);
    (0..pages).for_each(|page| assert_eq!(word(memory, page * 512), page as u64 + 1));
}

/// What has a place there and what has none by turns, in one call. What cannot leave is as it was, also when it leaves later.
#[test]
fn what_lenders_have_no_room_for_stays() {
    let Some(_alone) = alone() else { return };
    const MIB: usize = 1 << 20;
    let lent = lend_in_slabs(6 << 20, 1 << 20);
    let pager = start(&lent, 16 << 20, |_| {});
    let memory = mapped(&pager, 0, 12 * MIB);
    let (pages, address) = (12 * MIB / PAGE, pager.area().start);
    let set = |first: usize, add: u64| {
        (first..pages).step_by(2).for_each(|page| set_word(memory, page * 512, page as u64 + add));
    };
    let check = |first: usize, add: u64| {
        (first..pages)
            .step_by(2)
            .for_each(|page| assert_eq!(word(memory, page * 512), page as u64 + add, "page {page}"));
    };
    set(0, 1);
    pager.page_out(address, 12 * MIB);
    check(0, 1);
    assert_eq!(status(lent.address()).unwrap().used_bytes, 6 * MIB as u64, "it is full");
    for round in 2..8 {
        set(0, round);
        set(1, round);
        pager.page_out(address, 12 * MIB);
        check(0, round);
        check(1, round);
    }
    // The others have made room. Those that had places leave, as they are.
    (1..pages).step_by(2).for_each(|page| pager.discard(address + page * PAGE, PAGE).unwrap());
    pager.set_local_bytes(4 << 20).unwrap();
    check(0, 7);
    (1..pages).step_by(2).for_each(|page| assert_eq!(word(memory, page * 512), 0));
}

fn until(what: &str, so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[test]
fn memory_is_mapped_anew_while_others_use_it() {
    let Some(_alone) = alone() else { return };
    let lent = lend(128 << 20);
    let pager = start(&lent, LOCAL_BYTES_MIN, |config| config.fault_path = FaultPath::Thread);
    let bytes = 2048 * PAGE;
    let (memory, address) = (mapped(&pager, 0, bytes), pager.area().start);
    pager.advise(address, bytes, Access::Sequential);
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let end = &end;
            scope.spawn(move || {
                let mut random = Random::new(thread);
                while !end.load(Ordering::Relaxed) {
                    let first = random.next() as usize % 1900;
                    for page in first..first + 100 {
                        match page % 2 {
                            0 => set_word(memory, page * 512, random.next() | 1),
                            _ => assert_eq!(word(memory, page * 512), 0),
                        }
                    }
                }
            });
        }
        let until = Instant::now() + Duration::from_secs(3);
        let mut random = Random::new(9);
        while Instant::now() < until {
            let (first, count) = (random.next() as usize % 1900, 1 + random.next() as usize % 100);
            let (at, length) = (address + first * PAGE, count * PAGE);
            pager.map(at, length, 3).unwrap();
            pager.advise(at, length, Access::Sequential);
        }
        end.store(true, Ordering::Relaxed);
    });
    // Nothing is here that the pager does not know of.
    pager.page_out(address, bytes);
    pager.page_out(address, bytes);
    let left = is_here(address, 2048).into_iter().filter(|&here| here).count();
    assert_eq!(left, 0, "pages that stay for ever");
}

/// Locked memory stays, but it can be given up.
#[test]
fn locked_memory_is_discarded_moved_and_paged() {
    let Some(_alone) = alone() else { return };
    // SAFETY: numbers only, and nothing is changed but what is allowed afterwards.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | 4) } < 0 {
        println!("skipped (mlockall is not permitted)");
        return;
    }
    // SAFETY: as above.
    assert_eq!(unsafe { libc::munlockall() }, 0);
    let usual = fault_paths().into_iter().map(|path| (path, None));
    for (fault_path, design) in usual.chain([(FaultPath::Thread, Some(FrameDesign::Copy))]) {
        let lent = lend(64 << 20);
        let pager =
            start(&lent, LOCAL_BYTES_MIN, |config| (config.fault_path, config.design) = (fault_path, design));
        let bytes = 4 * LOCAL_BYTES_MIN as usize;
        let (memory, address) = (mapped(&pager, 0, bytes), pager.area().start);
        (0..64).for_each(|page| set_word(memory, page * 512, 7 + page as u64));
        // SAFETY: a page of ours.
        assert_eq!(unsafe { libc::mlock(address as *const _, PAGE) }, 0);
        pager.discard(address, 8 * PAGE).unwrap();
        (0..8).for_each(|page| assert_eq!(word(memory, page * 512), 0));
        pager.relocate(address + 8 * PAGE, address, 2 * PAGE).unwrap();
        assert_eq!([word(memory, 0), word(memory, 512), word(memory, 8 * 512)], [15, 16, 0]);
        // SAFETY: numbers only. As it comes (MCL_ONFAULT).
        assert_eq!(unsafe { libc::mlockall(libc::MCL_CURRENT | 4) }, 0);
        pager.discard(address, 64 * PAGE).unwrap();
        (0..64).for_each(|page| assert_eq!(word(memory, page * 512), 0));
        // Where pages leave by a copy, what is locked stays.
        let moves = netvm_sys::uffd::probe().unwrap().0 & netvm_sys::uffd::FEATURE_MOVE != 0;
        if moves && design.is_none() {
            churn(memory, 3, 20_000);
        }
        // SAFETY: as above.
        assert_eq!(unsafe { libc::munlockall() }, 0);
        pager.discard(address, bytes).unwrap();
        churn(memory, 4, 20_000);
        // Who has everything locked that is mapped from now on does not mean this. (MCL_FUTURE, MCL_ONFAULT.)
        // SAFETY: as above.
        assert_eq!(unsafe { libc::mlockall(libc::MCL_FUTURE | 4) }, 0);
        let later = mapped(&pager, bytes, bytes);
        churn(later, 5, 20_000);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::munlockall() }, 0);
    }
}
