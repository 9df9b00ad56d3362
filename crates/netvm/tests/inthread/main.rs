//! Faults that the faulting threads serve themselves, over a real lender.

#[path = "../common/mod.rs"]
mod common;
mod processes;

use common::mapped::{churn, mapped, set_word, word};
use common::{Lent, Random, Serving, alone_in_thread, lend};
use netvm::lender::LinkChoice;
use netvm::pager::{FaultPath, FrameDesign, LOCAL_BYTES_MIN, Pager, PagerConfig, TierPolicy};
use netvm_sys::shared::SharedSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const PAGE: usize = 4096;
const READ_WRITE: i32 = 3;

fn start(lenders: &[&str], local_bytes: u64, change: impl FnOnce(&mut PagerConfig)) -> Arc<Pager> {
    let mut config = PagerConfig {
        local_bytes,
        lenders: lenders.iter().map(|&lender| lender.to_owned()).collect(),
        area_bytes: 1 << 34,
        tier: TierPolicy::Lender,
        fault_path: FaultPath::InThread,
        ..PagerConfig::default()
    };
    change(&mut config);
    Pager::start(config).unwrap()
}

fn over(lent: &Lent, change: impl FnOnce(&mut PagerConfig)) -> Arc<Pager> {
    start(&[lent.address()], LOCAL_BYTES_MIN, change)
}

#[test]
fn contents_survive_four_times_the_budget() {
    let Some(_alone) = alone_in_thread() else { return };
    for link in [LinkChoice::Socket, LinkChoice::Auto] {
        let lent = lend(64 << 20);
        let pager = over(&lent, |config| config.link = link);
        churn(mapped(&pager, 0, 4 * LOCAL_BYTES_MIN as usize), 1, 60_000);
        let stats = pager.stats();
        assert!(stats.local_frames_peak <= LOCAL_BYTES_MIN / PAGE as u64, "{stats:?}");
        assert!(stats.remote_reads > 1000 && stats.remote_writes > 1000, "{stats:?}");
    }
}

#[test]
fn packed_and_encrypted_pages_survive() {
    let Some(_alone) = alone_in_thread() else { return };
    let lent = lend(64 << 20);
    let pager = over(&lent, |config| (config.tier, config.encrypt_pages) = (TierPolicy::Auto, true));
    churn(mapped(&pager, 0, 3 * LOCAL_BYTES_MIN as usize), 2, 40_000);
}

#[test]
fn streams_are_fetched_ahead() {
    let Some(_alone) = alone_in_thread() else { return };
    let lent = lend(64 << 20);
    let pager = over(&lent, |config| config.link = LinkChoice::Socket);
    let memory = mapped(&pager, 0, 16 << 20);
    for pass in 0..3_u64 {
        for index in 0..memory.len() / 8 {
            if pass > 0 {
                assert_eq!(word(memory, index), index as u64 ^ (pass - 1), "pass {pass}, word {index}");
            }
            set_word(memory, index, index as u64 ^ pass);
        }
    }
    let stats = pager.stats();
    // Without read-ahead each pass would have a fault for nearly every page. How many of those that come with one fault were asked for
    // ahead of it depends on who was faster.
    assert!(stats.faults < 3 * 4096 / 8 && stats.prefetched > 0, "{stats:?}");
}

/// Each thread's faults are looked at by themselves: between two of one that are all but neighbours lie those of all others.
#[test]
fn streams_of_many_threads_are_fetched_ahead() {
    let Some(_alone) = alone_in_thread() else { return };
    const THREADS: usize = 96;
    let lent = lend(128 << 20);
    let pager = over(&lent, |config| (config.local_bytes, config.link) = (8 << 20, LinkChoice::Socket));
    let memory = mapped(&pager, 0, 96 << 20);
    let pages = memory.len() / PAGE;
    (0..pages).for_each(|page| set_word(memory, page * 512, page as u64));
    let before = pager.stats().faults;
    let turn = std::sync::Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (part, turn) = (thread * (pages / THREADS)..(thread + 1) * (pages / THREADS), &turn);
            scope.spawn(move || {
                for page in part {
                    turn.wait();
                    assert_eq!(word(memory, page * 512), page as u64);
                }
            });
        }
    });
    let faults = pager.stats().faults - before;
    // 15,500 to 20,000 where all have one table.
    assert!(faults < pages as u64 / 16 * 9, "{faults} faults for {pages} pages");
}

/// What a stream evicts in long steps is scattered where single pages had been read before.
#[test]
fn streams_and_scattered_reads_take_turns() {
    let Some(_alone) = alone_in_thread() else { return };
    let (socket, auto) = (LinkChoice::Socket, LinkChoice::Auto);
    for (link, lenders, encrypt) in
        [(socket, 1, false), (auto, 1, false), (socket, 2, false), (auto, 1, true)]
    {
        let lent: Vec<Lent> = (0..lenders).map(|_| lend(128 << 20)).collect();
        let addresses: Vec<&str> = lent.iter().map(Lent::address).collect();
        let pager = start(&addresses, 16 << 20, |config| {
            (config.link, config.replicas, config.encrypt_pages) = (link, lenders, encrypt);
        });
        let memory = mapped(&pager, 0, 64 << 20);
        let pages = memory.len() / PAGE;
        (0..pages).for_each(|page| set_word(memory, page * 512, page as u64 ^ 5));
        let mut random = Random::new(3);
        for scattered in [1000, 2000, 3000, 8000] {
            for page in (0..scattered).map(|_| random.next() as usize % pages) {
                assert_eq!(word(memory, page * 512), page as u64 ^ 5);
            }
            for page in 0..pages {
                assert_eq!(word(memory, page * 512), page as u64 ^ 5);
            }
        }
        // A stream that writes, over what was scattered.
        (0..pages).for_each(|page| set_word(memory, page * 512, page as u64 ^ 9));
        (0..pages).for_each(|page| assert_eq!(word(memory, page * 512), page as u64 ^ 9));
        assert!(pager.stats().local_frames_peak <= (16 << 20) / PAGE as u64, "{:?}", pager.stats());
    }
}

/// Threads share pages: each has one word of every page, so that they wait for the same pages at the same time.
#[test]
fn threads_share_pages_while_others_are_mapped_and_discarded() {
    let Some(_alone) = alone_in_thread() else { return };
    assert_eq!(share_pages(LinkChoice::Socket).read_at_once, 0);
    let stats = share_pages(LinkChoice::Shm);
    assert!(stats.read_at_once > 1000, "{stats:?}");
}

/// When these threads have ended so do others. One that fails must not leave those running for ever.
fn end_with(threads: Vec<std::thread::ScopedJoinHandle<'_, ()>>, end: &AtomicBool) {
    let failed = threads.into_iter().map(|thread| thread.join().is_err()).filter(|&failed| failed).count();
    end.store(true, Ordering::Relaxed);
    assert_eq!(failed, 0);
}

fn share_pages(link: LinkChoice) -> netvm::stats::PagerStats {
    let lent = lend(64 << 20);
    let pager = over(&lent, |config| {
        (config.link, config.local_bytes_max) = (link, 2 * LOCAL_BYTES_MIN);
    });
    let bytes = 3 * LOCAL_BYTES_MIN as usize;
    let memory = mapped(&pager, 0, bytes);
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4_usize)
            .map(|thread| {
                scope.spawn(move || {
                    let mut random = Random::new(thread as u64);
                    let mut model = vec![0_u64; bytes / PAGE];
                    for _ in 0..15_000 {
                        let page = random.next() as usize % model.len();
                        assert_eq!(word(memory, page * 512 + thread), model[page], "page {page}");
                        model[page] = random.next();
                        set_word(memory, page * 512 + thread, model[page]);
                    }
                    for (page, &value) in model.iter().enumerate() {
                        assert_eq!(word(memory, page * 512 + thread), value, "page {page}");
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            let mut round = 0_u64;
            while !end.load(Ordering::Relaxed) {
                round += 1;
                let other = mapped(&pager, 1 << 30, 64 * PAGE);
                (0..64).for_each(|page| set_word(other, page * 512, round));
                pager.page_out(pager.area().start + (1 << 30), 64 * PAGE);
                (0..64).for_each(|page| assert_eq!(word(other, page * 512), round));
                pager.discard(pager.area().start + (1 << 30), 32 * PAGE).unwrap();
                (0..64)
                    .for_each(|page| assert_eq!(word(other, page * 512), if page < 32 { 0 } else { round }));
                pager.set_local_bytes(LOCAL_BYTES_MIN * (1 + round % 2)).unwrap();
                pager.unmap(pager.area().start + (1 << 30), 64 * PAGE).unwrap();
            }
        });
        // Who reads a range that is discarded meanwhile sees zeros, or what somebody wrote.
        let shared = mapped(&pager, 2 << 30, 64 * PAGE);
        scope.spawn(|| {
            while !end.load(Ordering::Relaxed) {
                pager.discard(pager.area().start + (2 << 30), 64 * PAGE).unwrap();
                std::thread::yield_now();
            }
        });
        let end = &end;
        scope.spawn(move || {
            let mut random = Random::new(99);
            while !end.load(Ordering::Relaxed) {
                let index = random.next() as usize % 64 * 512;
                set_word(shared, index, index as u64 | 1);
                let read = word(shared, index);
                assert!(read == 0 || read == index as u64 | 1, "{read}");
            }
        });
        end_with(threads, end);
    });
    pager.set_local_bytes(LOCAL_BYTES_MIN).unwrap();
    assert!(pager.stats().local_frames <= LOCAL_BYTES_MIN / PAGE as u64);
    pager.stats()
}

#[test]
fn a_lost_lender_is_done_without() {
    let Some(_alone) = alone_in_thread() else { return };
    let (first, second) = (Serving::new(64), Serving::new(64));
    let pager = start(&[&first.address, &second.address], LOCAL_BYTES_MIN, |config| {
        (config.replicas, config.link) = (2, LinkChoice::Socket);
    });
    let memory = mapped(&pager, 0, 3 * LOCAL_BYTES_MIN as usize);
    let pages = memory.len() / PAGE;
    (0..pages).for_each(|page| set_word(memory, page * 512, page as u64 + 1));
    let check = || {
        let mut random = Random::new(5);
        for _ in 0..2 * pages {
            let page = random.next() as usize % pages;
            assert_eq!(word(memory, page * 512), page as u64 + 1);
        }
    };
    check();
    std::thread::scope(|scope| {
        let threads = [scope.spawn(check), scope.spawn(check)];
        drop(first);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    check();
    assert_eq!(pager.stats().lenders_lost, 1);
    // Pagers have no end either.
    std::mem::forget(second);
}

#[test]
fn system_calls_on_missing_pages_fail_and_pinned_ones_do_not() {
    let Some(_alone) = alone_in_thread() else { return };
    let lent = lend(64 << 20);
    let pager = over(&lent, |_| {});
    let memory = mapped(&pager, 0, 16 * PAGE);
    let address = pager.area().start;
    let (mut ends, bytes) = ([0; 2], 16 * PAGE);
    // SAFETY: two descriptors fit.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    let write = |from: usize| {
        // SAFETY: far memory is mapped; the kernel checks what it can reach of it.
        let written = unsafe { libc::write(ends[1], from as *const libc::c_void, PAGE) };
        if written < 0 { Err(std::io::Error::last_os_error().raw_os_error()) } else { Ok(written as usize) }
    };
    assert_eq!(write(address), Err(Some(libc::EFAULT)), "never touched");
    set_word(memory, 0, 7);
    assert_eq!(write(address), Ok(PAGE));
    pager.page_out(address, bytes);
    assert_eq!(write(address), Err(Some(libc::EFAULT)), "taken out");
    pager.pin(address, bytes).unwrap();
    assert_eq!(
        (write(address), write(address + 5 * PAGE)),
        (Ok(PAGE), Ok(PAGE)),
        "the other was never touched"
    );
    assert_eq!(word(memory, 0), 7);
    // Peers' operations are system calls.
    let far = netvm::memory::Memory::far(&pager, address, bytes).unwrap();
    let node = netvm::node::Node::new().unwrap();
    let refused = node.export("far", far, netvm::node::Rights::ReadWrite).unwrap_err();
    assert!(refused.to_string().contains("system calls on it fail"), "{refused}");
}

/// A device may read a page while it leaves: that takes what was there, and nobody else gets the memory before.
#[test]
fn pages_that_a_device_reads_leave_all_the_same() {
    use std::os::unix::fs::OpenOptionsExt;
    struct Ends<'a>(&'a AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let Some(_alone) = alone_in_thread() else { return };
    let path = std::env::temp_dir().join(format!("netvm-inthread-{}", std::process::id()));
    let mut how = std::fs::OpenOptions::new();
    how.read(true).write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT);
    let opened = how.open(&path);
    let _ = std::fs::remove_file(&path);
    let Ok(file) = opened else {
        eprintln!("pages_that_a_device_reads: skipped (the temporary folder's file system has no O_DIRECT)");
        return;
    };
    let lent = lend(64 << 20);
    let pager = over(&lent, |_| {});
    let bytes = 3 * LOCAL_BYTES_MIN as usize;
    let memory = mapped(&pager, 0, bytes);
    let (address, pages) = (pager.area().start, bytes / PAGE);
    let value = |page: usize, place: usize| (page * 512 + place) as u64 | 1 << 40;
    for page in 0..pages {
        (0..512).for_each(|place| set_word(memory, page * 512 + place, value(page, place)));
    }
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ends = Ends(&end);
        // Two threads read other pages all the time: what is here leaves within some hundred of their faults.
        for seed in [1, 2] {
            let end = &end;
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !end.load(Ordering::Relaxed) {
                    let (page, place) = (random.next() as usize % pages, random.next() as usize % 512);
                    assert_eq!(word(memory, page * 512 + place), value(page, place));
                }
            });
        }
        let mut random = Random::new(31);
        let mut written = 0;
        while written < 1500 {
            let page = random.next() as usize % pages;
            assert_eq!(word(memory, page * 512), value(page, 0));
            let from = (address + page * PAGE) as *const libc::c_void;
            let at = (written * PAGE) as i64;
            // SAFETY: far memory is mapped; the kernel checks what it can reach of it.
            let count = unsafe {
                use std::os::fd::AsRawFd;
                libc::pwrite(file.as_raw_fd(), from, PAGE, at)
            };
            if count < 0 {
                let error = std::io::Error::last_os_error();
                assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "it had left before: {error}");
                continue;
            }
            let got = netvm::node::Node::memory(PAGE).unwrap();
            // SAFETY: a mapping of so many bytes, which nobody refers to.
            let read = unsafe {
                use std::os::fd::AsRawFd;
                libc::pread(file.as_raw_fd(), got.shared().as_ptr().cast(), PAGE, at)
            };
            assert_eq!((count, read), (PAGE as isize, PAGE as isize));
            (0..512).for_each(|place| {
                assert_eq!(word(got.shared(), place), value(page, place), "page {page}, word {place}");
            });
            written += 1;
        }
        drop(ends);
    });
    for page in 0..pages {
        (0..512).for_each(|place| assert_eq!(word(memory, page * 512 + place), value(page, place)));
    }
}

#[test]
fn what_a_pipe_refers_to_stays_while_it_is_pinned() {
    let Some(_alone) = alone_in_thread() else { return };
    let lent = lend(64 << 20);
    let pager = over(&lent, |_| {});
    let bytes = 3 * LOCAL_BYTES_MIN as usize;
    let memory = mapped(&pager, 0, bytes);
    let (address, pages) = (pager.area().start, bytes / PAGE);
    (0..pages).for_each(|page| set_word(memory, page * 512, page as u64 + 1));
    let mut ends = [0; 2];
    // SAFETY: two descriptors fit.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    let mut random = Random::new(9);
    for page in (0..pages).step_by(97) {
        let at = address + page * PAGE;
        // Pages that were written to are moved.
        set_word(memory, page * 512 + 1, 3);
        pager.pin(at, PAGE).unwrap();
        let piece = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: PAGE };
        // SAFETY: far memory is mapped; the kernel checks what it can reach of it.
        assert_eq!(unsafe { libc::vmsplice(ends[1], &raw const piece, 1, 0) }, PAGE as isize);
        for _ in 0..1500 {
            let other = random.next() as usize % pages;
            assert_eq!(word(memory, other * 512), other as u64 + 1);
        }
        let mut got = [0_u8; PAGE];
        // SAFETY: a local buffer of so many bytes.
        assert_eq!(unsafe { libc::read(ends[0], got.as_mut_ptr().cast(), PAGE) }, PAGE as isize);
        assert_eq!(u64::from_le_bytes(got[..8].try_into().unwrap()), page as u64 + 1);
        pager.unpin(at, PAGE).unwrap();
    }
}

/// Pages that came to be read are protected; of those the program may drop some, and have the kernel write to others.
#[test]
fn protected_pages_are_dropped_pinned_and_moved() {
    let Some(_alone) = alone_in_thread() else { return };
    let lent = lend(64 << 20);
    let pager = over(&lent, |_| {});
    let bytes = 3 * LOCAL_BYTES_MIN as usize;
    let memory = mapped(&pager, 0, bytes);
    let (address, pages) = (pager.area().start, bytes / PAGE);
    let value = |page: usize| page as u64 + 1;
    (0..pages).for_each(|page| set_word(memory, page * 512, value(page)));
    let mut random = Random::new(8);
    let mut others = |rounds: usize| {
        for _ in 0..rounds {
            let page = pages / 2 + random.next() as usize % (pages / 2);
            assert_eq!(word(memory, page * 512), value(page));
        }
    };
    others(6000);
    for page in (3..pages / 2).step_by(61) {
        assert_eq!(word(memory, page * 512), value(page));
        // SAFETY: what was there is not needed any more.
        let dropped =
            unsafe { libc::madvise((address + page * PAGE) as *mut libc::c_void, PAGE, libc::MADV_DONTNEED) };
        assert_eq!((dropped, word(memory, page * 512)), (0, 0));
        set_word(memory, page * 512 + 7, 5);
        others(300);
    }
    others(6000);
    for page in (3..pages / 2).step_by(61) {
        assert_eq!((word(memory, page * 512), word(memory, page * 512 + 7)), (0, 5), "page {page}");
    }
    let mut read_before = Vec::new();
    for page in (5..pages / 2).step_by(67) {
        let before = word(memory, page * 512 + 7);
        pager.pin(address + page * PAGE, PAGE).unwrap();
        let zeros = std::fs::File::open("/dev/zero").unwrap();
        // SAFETY: far memory that is mapped, and nobody refers to it.
        let read = unsafe {
            use std::os::fd::AsRawFd;
            libc::read(zeros.as_raw_fd(), (address + page * PAGE) as *mut libc::c_void, 8)
        };
        assert_eq!((read, word(memory, page * 512)), (8, 0), "page {page}");
        pager.unpin(address + page * PAGE, PAGE).unwrap();
        others(300);
        read_before.push((page, before));
    }
    others(6000);
    for (page, before) in read_before {
        assert_eq!((word(memory, page * 512), word(memory, page * 512 + 7)), (0, before), "page {page}");
    }
    // Moved pages are as they were, and can be written to.
    others(4000);
    let new = mapped(&pager, 1 << 30, bytes / 2);
    pager.relocate(address + bytes / 2, address + (1 << 30), bytes / 2).unwrap();
    for page in 0..pages / 2 {
        assert_eq!(word(new, page * 512), value(pages / 2 + page));
        set_word(new, page * 512 + 1, 9);
    }
    (0..pages / 2).for_each(|page| assert_eq!(word(new, page * 512 + 1), 9, "page {page}"));
}

/// Threads that mostly read fetch their pages, and take others away, without whoever has the turn: meanwhile calls pin, page out, and change the budget.
#[test]
fn pages_come_and_leave_on_errands_while_others_call() {
    let Some(_alone) = alone_in_thread() else { return };
    let lent = lend(64 << 20);
    let pager = over(&lent, |config| {
        (config.link, config.local_bytes_max) = (LinkChoice::Shm, 2 * LOCAL_BYTES_MIN);
    });
    let bytes = 4 * LOCAL_BYTES_MIN as usize;
    let memory = mapped(&pager, 0, bytes);
    let (address, pages) = (pager.area().start, bytes / PAGE);
    (0..pages).for_each(|page| (0..4).for_each(|thread| set_word(memory, page * 512 + thread, page as u64)));
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                scope.spawn(move || {
                    let mut random = Random::new(70 + thread as u64);
                    let mut model: Vec<u64> = (0..pages as u64).collect();
                    for round in 0..40_000 {
                        let page = random.next() as usize % pages;
                        assert_eq!(word(memory, page * 512 + thread), model[page], "page {page}");
                        // Sometimes at once, sometimes much later than it has come.
                        let page = if round % 2 == 0 { page } else { random.next() as usize % pages };
                        if random.next().is_multiple_of(24) {
                            model[page] = random.next();
                            set_word(memory, page * 512 + thread, model[page]);
                        }
                    }
                    for (page, &value) in model.iter().enumerate() {
                        assert_eq!(word(memory, page * 512 + thread), value, "page {page}");
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            let mut random = Random::new(69);
            while !end.load(Ordering::Relaxed) {
                let page = random.next() as usize % (pages - 8);
                let at = address + page * PAGE;
                pager.pin(at, 4 * PAGE).unwrap();
                pager.page_out(at + 4 * PAGE, 4 * PAGE);
                pager.set_local_bytes(LOCAL_BYTES_MIN * (1 + random.next() % 2)).unwrap();
                assert!(pager.stats().local_frames <= 2 * LOCAL_BYTES_MIN / PAGE as u64);
                pager.unpin(at, 4 * PAGE).unwrap();
                std::thread::sleep(std::time::Duration::from_micros(random.next() % 2000));
            }
        });
        end_with(threads, &end);
    });
    let stats = pager.stats();
    assert!(stats.read_at_once > stats.remote_reads / 2, "{stats:?}");
    println!("{} of {} pages left together", stats.left_together, stats.remote_reads);
}

/// Their pages move to another lender meanwhile: what is read at the old place is right, or read again.
#[test]
fn a_lender_leaves_while_threads_fetch_from_its_memory() {
    let Some(_alone) = alone_in_thread() else { return };
    for replicas in [1, 2] {
        let lenders: Vec<_> = (0..=replicas).map(|_| Serving::new(64)).collect();
        let addresses: Vec<_> = lenders.iter().map(|lender| &lender.address[..]).collect();
        let pager = start(&addresses, LOCAL_BYTES_MIN, |config| {
            (config.replicas, config.link) = (replicas, LinkChoice::Shm);
        });
        let memory = mapped(&pager, 0, 4 * LOCAL_BYTES_MIN as usize);
        let pages = memory.len() / PAGE;
        (0..pages).for_each(|page| (0..3).for_each(|thread| set_word(memory, page * 512 + thread, 7)));
        let end = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3)
                .map(|thread| {
                    let end = &end;
                    scope.spawn(move || {
                        let mut random = Random::new(thread as u64 + 20);
                        let mut model = vec![7; pages];
                        while !end.load(Ordering::Relaxed) {
                            let page = random.next() as usize % pages;
                            assert_eq!(word(memory, page * 512 + thread), model[page], "page {page}");
                            if random.next().is_multiple_of(16) {
                                model[page] = random.next();
                                set_word(memory, page * 512 + thread, model[page]);
                            }
                        }
                        for (page, &value) in model.iter().enumerate() {
                            assert_eq!(word(memory, page * 512 + thread), value, "page {page}");
                        }
                    })
                })
                .collect();
            std::thread::sleep(std::time::Duration::from_millis(300));
            lenders[0].stop.stop();
            let begun = std::time::Instant::now();
            while pager.stats().lenders_left == 0 && begun.elapsed().as_secs() < 30 {
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            std::thread::sleep(std::time::Duration::from_millis(200));
            end.store(true, Ordering::Relaxed);
            end_with(threads, &end);
        });
        let stats = pager.stats();
        assert_eq!((stats.lenders_left, stats.lenders_lost, stats.wrong_pages), (1, 0, 0), "{stats:?}");
        // Some may have gone to the other lender before, which was quicker for a while.
        assert!(stats.pages_moved + stats.pages_sorted > 1000, "{stats:?}");
        assert!(stats.read_at_once > stats.remote_reads / 4, "{stats:?}");
        // Pagers have no end.
        std::mem::forget(lenders);
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let Some(_alone) = alone_in_thread() else { return };
    let lent = lend(8 << 20);
    let config = PagerConfig {
        lenders: vec![lent.address().to_owned()],
        fault_path: FaultPath::InThread,
        design: Some(FrameDesign::Copy),
        ..PagerConfig::default()
    };
    let error = Pager::start(config).unwrap_err().to_string();
    assert!(error.contains("in-thread") && error.contains("moved"), "{error}");
}

unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

/// What a thread that is cancelled works on.
struct Job(SharedSlice, AtomicBool);

/// What is cancelled unwinds.
type Unwinds = extern "C-unwind" fn(*mut libc::c_void) -> *mut libc::c_void;

extern "C-unwind" fn until_cancelled(job: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: the job lives until this thread has been joined.
    let job = unsafe { &*job.cast::<Job>() };
    // No stream.
    let mut random = Random::new(77);
    loop {
        let page = random.next() as usize % (job.0.len() / PAGE);
        let _ = word(job.0, page * 512);
        if page.is_multiple_of(64) {
            job.1.store(true, Ordering::Relaxed);
            // SAFETY: nothing of this frame needs to be dropped.
            unsafe { pthread_testcancel() };
        }
    }
}

/// Threads are cancelled while they fault: not in the middle of it. Their stacks are as small as is said to be enough.
#[test]
fn threads_with_small_stacks_are_cancelled() {
    let Some(_alone) = alone_in_thread() else { return };
    cancel_threads(|config| {
        (config.tier, config.encrypt_pages, config.replicas) = (TierPolicy::Auto, true, 2)
    });
    // Pages come and leave on errands.
    let stats = cancel_threads(|config| config.link = LinkChoice::Shm);
    assert!(stats.read_at_once > 30, "{stats:?}");
}

fn cancel_threads(change: impl FnOnce(&mut PagerConfig)) -> netvm::stats::PagerStats {
    let (first, second) = (Serving::new(64), Serving::new(64));
    let pager = start(&[&first.address, &second.address], LOCAL_BYTES_MIN, change);
    let memory = mapped(&pager, 0, 3 * LOCAL_BYTES_MIN as usize);
    (0..memory.len() / PAGE).for_each(|page| set_word(memory, page * 512, page as u64 + 1));
    for _ in 0..30 {
        let job = Job(memory, AtomicBool::new(false));
        // SAFETY: attributes are initialised before they are used; the job outlives the thread, which is joined.
        unsafe {
            let mut attributes = std::mem::zeroed();
            libc::pthread_attr_init(&mut attributes);
            assert_eq!(libc::pthread_attr_setstacksize(&mut attributes, 64 << 10), 0);
            let mut thread = std::mem::zeroed();
            let entry: Unwinds = until_cancelled;
            let entry =
                std::mem::transmute::<Unwinds, extern "C" fn(*mut libc::c_void) -> *mut libc::c_void>(entry);
            let argument = (&raw const job).cast_mut().cast();
            assert_eq!(libc::pthread_create(&mut thread, &attributes, entry, argument), 0);
            libc::pthread_attr_destroy(&mut attributes);
            while !job.1.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            assert_eq!(libc::pthread_cancel(thread), 0);
            assert_eq!(libc::pthread_join(thread, std::ptr::null_mut()), 0);
        }
    }
    (0..memory.len() / PAGE).for_each(|page| assert_eq!(word(memory, page * 512), page as u64 + 1));
    std::mem::forget((first, second));
    pager.stats()
}
