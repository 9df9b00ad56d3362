//! Single pages that nobody writes to leave many at a time, served by the pager's thread: what is read is what was written, whoever writes, drops or
//! pins what and when.

mod common;

use common::mapped::{mapped, set_word, word};
use common::{Lent, Random, alone, has_moves, lend};
use netvm::lender::LinkChoice;
use netvm::pager::{FaultPath, LOCAL_BYTES_MIN, Pager, PagerConfig, TierPolicy};
use netvm_sys::shared::SharedSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const PAGE: usize = 4096;
const LOCAL_PAGES: u64 = LOCAL_BYTES_MIN / PAGE as u64;
const BYTES: usize = 4 * LOCAL_BYTES_MIN as usize;
const PAGES: usize = BYTES / PAGE;

fn start(lent: &Lent, link: LinkChoice) -> Arc<Pager> {
    Pager::start(PagerConfig {
        local_bytes: LOCAL_BYTES_MIN,
        lenders: vec![lent.address().to_owned()],
        area_bytes: 1 << 34,
        tier: TierPolicy::Lender,
        fault_path: FaultPath::Thread,
        link,
        ..PagerConfig::default()
    })
    .unwrap()
}

/// process_madvise(2) of the process itself: Linux 6.13.
fn kernel_can() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse::<u32>().unwrap_or(0));
    let can = (numbers.next(), numbers.next()) >= (Some(6), Some(13));
    if !can {
        println!("skipped (Linux {} cannot take pages together)", release.trim());
    }
    can && has_moves("pages that leave together")
}

fn value(page: usize) -> u64 {
    page as u64 + 1
}

fn filled(pager: &Pager) -> SharedSlice {
    let memory = mapped(pager, 0, BYTES);
    (0..PAGES).for_each(|page| set_word(memory, page * 512, value(page)));
    memory
}

fn read_at_random(memory: SharedSlice, seed: u64, reads: usize) {
    let mut random = Random::new(seed);
    for _ in 0..reads {
        let page = random.next() as usize % PAGES;
        assert_eq!(word(memory, page * 512), value(page), "page {page}");
    }
}

/// Drops a page by a system call that netvm is not told of.
fn drop_unseen(pager: &Pager, page: usize) {
    let address = (pager.area().start + page * PAGE) as *mut libc::c_void;
    // SAFETY: far memory of this test, whose contents it gives up.
    assert_eq!(unsafe { libc::madvise(address, PAGE, libc::MADV_DONTNEED) }, 0);
}

#[test]
fn pages_that_are_read_leave_together_and_writes_are_kept() {
    let Some(_alone) = alone() else { return };
    if !kernel_can() {
        return;
    }
    let lent = lend(64 << 20);
    for link in [LinkChoice::Auto, LinkChoice::Socket] {
        let pager = start(&lent, link);
        let memory = filled(&pager);
        std::thread::scope(|scope| {
            for seed in [3, 4] {
                scope.spawn(move || read_at_random(memory, seed, 12_000));
            }
        });
        let stats = pager.stats();
        assert!(stats.left_together > stats.remote_reads / 2, "{stats:?}");
        assert!(stats.local_frames_peak <= LOCAL_PAGES, "{stats:?}");

        // Each of four threads has a word of every page, which it reads, and now and then writes afterwards: to a protected page.
        std::thread::scope(|scope| {
            for thread in 1..5 {
                scope.spawn(move || {
                    let (mut random, mut model) = (Random::new(thread as u64), vec![0; PAGES]);
                    for step in 0..12_000 {
                        let page = random.next() as usize % PAGES;
                        assert_eq!(word(memory, page * 512 + thread), model[page], "page {page}");
                        if step % 16 == 0 {
                            model[page] = random.next();
                            set_word(memory, page * 512 + thread, model[page]);
                        }
                    }
                    for (page, &value) in model.iter().enumerate() {
                        assert_eq!(word(memory, page * 512 + thread), value, "page {page} of {thread}");
                    }
                });
            }
        });
        let after = pager.stats();
        assert!(after.left_together > stats.left_together + 1000, "{after:?}");
        assert!(after.local_frames_peak <= LOCAL_PAGES, "{after:?}");
    }
}

#[test]
fn what_comes_back_soon_leaves_by_the_pool() {
    let Some(_alone) = alone() else { return };
    if !kernel_can() {
        return;
    }
    let lent = lend(64 << 20);
    let pager = start(&lent, LinkChoice::Socket);
    let memory = filled(&pager);
    let mut random = Random::new(11);
    // A few more pages than there are local ones: most that leave are wanted again soon.
    let hot = LOCAL_PAGES as usize * 17 / 16;
    let mut read = |range: usize, reads: usize| {
        for _ in 0..reads {
            let page = random.next() as usize % range;
            assert_eq!(word(memory, page * 512), value(page), "page {page}");
        }
    };
    read(hot, 60_000);
    let before = pager.stats();
    read(hot, 60_000);
    let stats = pager.stats();
    let (together, rescues) = (stats.left_together - before.left_together, stats.rescues - before.rescues);
    assert!(together * 4 < rescues, "{together} left together, {rescues} rescues");
    // And the other way round.
    read(PAGES, 20_000);
    let before = pager.stats();
    read(PAGES, 10_000);
    let stats = pager.stats();
    let together = stats.left_together - before.left_together;
    assert!(together * 2 > stats.remote_reads - before.remote_reads, "{together} left together");
}

/// What was dropped unseen reads zero, at any time; and as soon as that was noticed, nothing is dropped on trust any more.
#[test]
fn pages_that_were_dropped_unseen_stay_zero() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, LinkChoice::Auto);
    let memory = filled(&pager);
    read_at_random(memory, 1, 12_000);
    assert!(!kernel_can() || pager.stats().left_together > 1000, "{:?}", pager.stats());
    let mut random = Random::new(2);
    let mut dropped = [false; PAGES];
    let mut others = |dropped: &[bool; PAGES]| {
        for _ in 0..800 {
            let page = random.next() as usize % PAGES;
            let expected = if dropped[page] { 0 } else { value(page) };
            assert_eq!(word(memory, page * 512), expected, "page {page}");
        }
    };
    for page in (7..PAGES).step_by(97) {
        // There, and protected; not looked at before many others have come.
        assert_eq!(word(memory, page * 512), value(page));
        drop_unseen(&pager, page);
        dropped[page] = true;
        others(&dropped);
    }
    for (page, &dropped) in dropped.iter().enumerate() {
        let expected = if dropped { 0 } else { value(page) };
        assert_eq!(word(memory, page * 512), expected, "page {page}");
    }
    let before = pager.stats().left_together;
    others(&dropped);
    assert_eq!(pager.stats().left_together, before, "pages are dropped on trust");
}

/// The kernel writes to protected pages like to others, also while they leave; pinned ones stay.
#[test]
fn system_calls_write_to_protected_pages() {
    use std::io::Read;
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, LinkChoice::Auto);
    let memory = filled(&pager);
    read_at_random(memory, 1, 12_000);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut seed = 9;
            while !ended.load(Ordering::Relaxed) {
                seed += 1;
                read_at_random(memory, seed, 500);
            }
        });
        let (mut random, mut zeros) = (Random::new(5), std::fs::File::open("/dev/zero").unwrap());
        let mut buffer = [1_u8; 64];
        zeros.read_exact(&mut buffer).unwrap();
        for round in 0..2000_u64 {
            let page = random.next() as usize % PAGES;
            assert_eq!(word(memory, page * 512), value(page));
            set_word(memory, page * 512 + 8, round);
            let address = (pager.area().start + page * PAGE + 64) as *mut libc::c_void;
            use std::os::fd::AsRawFd;
            // SAFETY: far memory of this test, to which nobody refers.
            assert_eq!(unsafe { libc::read(zeros.as_raw_fd(), address, 8) }, 8);
            assert_eq!(word(memory, page * 512 + 8), 0, "page {page}");
            if round % 16 == 0 {
                let at = pager.area().start + page * PAGE;
                pager.pin(at, PAGE).unwrap();
                set_word(memory, page * 512 + 9, round);
                pager.unpin(at, PAGE).unwrap();
                assert_eq!(word(memory, page * 512 + 9), round);
            }
        }
        ended.store(true, Ordering::Relaxed);
    });
    read_at_random(memory, 77, 6000);
}
