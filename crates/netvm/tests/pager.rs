//! The pager over a real lender: contents, budget, mapping changes, threads.

mod common;

use common::mapped::{churn, mapped, set_word, start, word};
use common::{alone, lend, lend_in_slabs};
use netvm::lender::LinkChoice;
use netvm::pager::{AREA_BYTES_MAX, FrameDesign, LOCAL_BYTES_MIN, Pager, PagerConfig};

const PAGE: usize = 4096;
const READ_WRITE: i32 = 3;

#[test]
fn more_addresses_than_there_are_page_numbers_are_refused() {
    for bytes in [1 << 44, AREA_BYTES_MAX + 1] {
        let config = PagerConfig { area_bytes: bytes, ..PagerConfig::default() };
        let refused = Pager::start(config).unwrap_err();
        assert!(refused.to_string().contains("less than 16 TiB"), "{refused}");
    }
}

#[test]
fn contents_survive_four_times_the_budget() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, LOCAL_BYTES_MIN, |_| {});
    let memory = mapped(&pager, 0, 4 * LOCAL_BYTES_MIN as usize);
    churn(memory, 1, 60_000);
    let stats = pager.stats();
    assert!(stats.local_frames_peak <= LOCAL_BYTES_MIN / PAGE as u64, "{stats:?}");
    assert!(stats.remote_reads > 1000 && stats.remote_writes > 1000, "{stats:?}");
    assert!(stats.rescues > 0, "{stats:?}");
    // None of those that had to read can be among them; nor were most of the others put off.
    let without_io = stats.faults_without_io;
    assert!(0 < without_io && without_io + stats.remote_reads / 4 < stats.faults, "{stats:?}");
}

#[test]
fn faults_that_need_no_io_are_some_of_the_faults() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, 4 << 20, |_| {});
    // Many new pages come at one fault.
    let memory = mapped(&pager, 0, 2 << 20);
    (0..memory.len() / PAGE).for_each(|page| set_word(memory, page * 512, 1));
    let stats = pager.stats();
    assert!(stats.zero_fills > stats.faults && stats.faults > 0, "{stats:?}");
    assert_eq!(stats.faults_without_io, stats.faults, "{stats:?}");
    // What has left has to be read.
    let others = mapped(&pager, 4 << 20, 8 << 20);
    (0..others.len() / PAGE).for_each(|page| set_word(others, page * 512, 1));
    let before = pager.stats();
    for page in (0..memory.len() / PAGE).rev().step_by(7) {
        assert_eq!(word(memory, page * 512), 1);
    }
    let stats = pager.stats();
    let (faults, without) =
        (stats.faults - before.faults, stats.faults_without_io - before.faults_without_io);
    assert!(faults > 0 && without < faults, "{before:?} {stats:?}");
}

#[test]
fn the_copying_design_keeps_contents_too() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, LOCAL_BYTES_MIN, |config| config.design = Some(FrameDesign::Copy));
    churn(mapped(&pager, 0, 3 * LOCAL_BYTES_MIN as usize), 2, 30_000);
}

#[test]
fn sequential_passes_are_prefetched() {
    let Some(_alone) = alone() else { return };
    let lent = lend(128 << 20);
    // Nothing is ahead of a lender that need not be waited for.
    let pager = start(&lent, 8 << 20, |config| config.link = LinkChoice::Socket);
    let memory = mapped(&pager, 0, 32 << 20);
    for pass in 0..3_u64 {
        for index in 0..memory.len() / 8 {
            if pass > 0 {
                assert_eq!(word(memory, index), index as u64 ^ (pass - 1), "pass {pass}, word {index}");
            }
            set_word(memory, index, index as u64 ^ pass);
        }
    }
    let stats = pager.stats();
    assert!(stats.faults < 3 * 8192 / 8, "{stats:?}");
    // How many come ahead of their faults depends on who gets the CPU.
    assert!(stats.prefetched > 1024, "{stats:?}");
}

#[test]
fn pages_in_constant_use_are_spared() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, 4 << 20, |_| {});
    let (stream, often) = (mapped(&pager, 0, 16 << 20), mapped(&pager, 16 << 20, 1 << 19));
    let (pages, often_pages) = (stream.len() / PAGE, often.len() / PAGE);
    // One page after the other goes by, while each of an eighth of the local pages is used 32 times in a pass.
    for pass in 0..4 {
        for page in 0..pages {
            // In an order that is no stream.
            let (index, round) = (page * 37 % often_pages * 512, pass * pages + page);
            assert_eq!(word(often, index), (round / often_pages) as u64, "pass {pass}, page {page}");
            set_word(often, index, (round / often_pages) as u64 + 1);
            assert_eq!(word(stream, page * 512), pass as u64, "page {page}");
            set_word(stream, page * 512, pass as u64 + 1);
        }
    }
    let stats = pager.stats();
    println!("{} faults, {} rescues", stats.faults, stats.rescues);
    // Without being spared each would be evicted with every 1000 pages that go by: 1400 rescues, now 800.
    assert!(stats.rescues < 1150, "{stats:?}");
}

#[test]
fn streams_do_not_push_out_what_is_used_at_random() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, 8 << 20, |_| {});
    let (stream, often) = (mapped(&pager, 0, 32 << 20), mapped(&pager, 32 << 20, 5 << 20));
    let (pages, often_pages) = (stream.len() / PAGE, often.len() / PAGE);
    let (mut random, mut sums) = (7_u64, vec![0; often_pages]);
    let mut before = pager.stats();
    for pass in 0..8 {
        if pass == 2 {
            // What is used how has been seen.
            before = pager.stats();
        }
        for page in 0..pages {
            assert_eq!(word(stream, page * 512), pass as u64, "page {page}");
            set_word(stream, page * 512, pass as u64 + 1);
            for _ in 0..2 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let index = (random >> 33) as usize % often_pages;
                assert_eq!(word(often, index * 512), sums[index], "pass {pass}, page {page}");
                sums[index] = sums[index].wrapping_add(random);
                set_word(often, index * 512, sums[index]);
            }
        }
    }
    let stats = pager.stats();
    let (faults, windows) = (stats.faults - before.faults, 6 * pages as u64 / 128);
    println!("{faults} faults for {windows} windows, {} rescues", stats.rescues - before.rescues);
    // In one queue: 70 for each window.
    assert!(faults < 40 * windows, "{stats:?}");
}

#[test]
fn of_a_loop_larger_than_the_memory_a_part_is_kept() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, 16 << 20, |_| {});
    let memory = mapped(&pager, 0, 24 << 20);
    let (pages, passes) = (memory.len() / PAGE, 16);
    let mut before = pager.stats();
    for pass in 0..passes {
        if pass == 6 {
            // It has been tried.
            before = pager.stats();
        }
        for page in 0..pages {
            assert_eq!(word(memory, page * 512), pass * 31, "pass {pass}, page {page}");
            set_word(memory, page * 512, (pass + 1) * 31);
        }
    }
    let stats = pager.stats();
    let fetched = (stats.bytes_in - before.bytes_in) / (passes - 6);
    println!("{} KiB of {} fetched in each pass", fetched >> 10, memory.len() >> 10);
    // One queue: all of it. At best: what does not fit, 9 MiB of 24.
    assert!(fetched < memory.len() as u64 * 3 / 4, "{fetched} {stats:?}");
}

#[test]
fn a_window_beyond_the_longest_transfer_is_cut() {
    let Some(_alone) = alone() else { return };
    let lent = lend_in_slabs(256 << 20, 16 << 20);
    let pager = start(&lent, 32 << 20, |config| {
        // Nothing is ahead of a lender that need not be waited for.
        (config.link, config.prefetch_pages_max) = (LinkChoice::Socket, 4096);
    });
    let memory = mapped(&pager, 0, 96 << 20);
    for pass in 0..2_u64 {
        for index in (0..memory.len() / 8).step_by(512) {
            if pass > 0 {
                assert_eq!(word(memory, index), index as u64, "word {index}");
            }
            set_word(memory, index, index as u64);
        }
        pager.will_need(pager.area().start, 96 << 20);
    }
    assert!(pager.stats().prefetched > 4096, "{:?}", pager.stats());
}

#[test]
fn clean_pages_are_not_written_again() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, LOCAL_BYTES_MIN, |_| {});
    let memory = mapped(&pager, 0, 4 * LOCAL_BYTES_MIN as usize);
    for page in 0..memory.len() / PAGE {
        set_word(memory, page * 512, page as u64 + 1);
    }
    let written = pager.stats().remote_writes;
    for _ in 0..3 {
        for page in 0..memory.len() / PAGE {
            assert_eq!(word(memory, page * 512), page as u64 + 1);
        }
    }
    let stats = pager.stats();
    // The first pass still takes out what the filling left behind; later passes write nothing.
    assert!(stats.remote_writes - written <= 1024 + 64, "{stats:?}");
    assert!(stats.clean_drops > 4000, "{stats:?}");
}

#[test]
fn zero_pages_need_no_lender_memory() {
    let Some(_alone) = alone() else { return };
    let lent = lend(16 << 20);
    let pager = start(&lent, LOCAL_BYTES_MIN, |_| {});
    // 64 MiB of zeroes on a 16 MiB lender.
    let memory = mapped(&pager, 0, 64 << 20);
    for page in 0..memory.len() / PAGE {
        set_word(memory, page * 512 + 7, 0);
    }
    for page in 0..memory.len() / PAGE {
        assert_eq!(word(memory, page * 512 + 7), 0);
    }
    assert_eq!(pager.stats().remote_writes, 0);
}

#[test]
fn discarded_and_remapped_memory_reads_zero() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, LOCAL_BYTES_MIN, |_| {});
    let bytes = 3 * LOCAL_BYTES_MIN as usize;
    let memory = mapped(&pager, 0, bytes);
    let fill = || (0..bytes / PAGE).for_each(|page| set_word(memory, page * 512, !(page as u64)));
    let address = pager.area().start;
    let half = bytes / 2;
    fill();
    pager.discard(address, half).unwrap();
    for page in 0..bytes / PAGE {
        let expected = if page < half / PAGE { 0 } else { !(page as u64) };
        assert_eq!(word(memory, page * 512), expected, "page {page}");
    }
    fill();
    pager.unmap(address + half, half).unwrap();
    pager.map(address + half, half, READ_WRITE).unwrap();
    for page in 0..bytes / PAGE {
        let expected = if page < half / PAGE { !(page as u64) } else { 0 };
        assert_eq!(word(memory, page * 512), expected, "page {page}");
    }
}

#[test]
fn relocated_memory_keeps_its_contents() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, LOCAL_BYTES_MIN, |_| {});
    let bytes = 3 * LOCAL_BYTES_MIN as usize;
    let old = mapped(&pager, 0, bytes);
    let new = mapped(&pager, 1 << 30, bytes);
    for page in 0..bytes / PAGE {
        set_word(old, page * 512 + 3, page as u64 + 9);
        set_word(new, page * 512 + 3, 1);
    }
    let start = pager.area().start;
    pager.relocate(start, start + (1 << 30), bytes).unwrap();
    for page in 0..bytes / PAGE {
        assert_eq!(word(new, page * 512 + 3), page as u64 + 9, "page {page}");
        assert_eq!(word(old, page * 512 + 3), 0, "page {page}");
    }
}

#[test]
fn pins_go_with_relocated_memory() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, LOCAL_BYTES_MIN, |_| {});
    let bytes = 3 * LOCAL_BYTES_MIN as usize;
    let others = mapped(&pager, 2 << 30, bytes);
    let (_, new) = (mapped(&pager, 0, bytes), mapped(&pager, 1 << 30, bytes));
    let start = pager.area().start;
    let (pinned, moved, length) = (start + 16 * PAGE, start + (1 << 30) + 16 * PAGE, 64 * PAGE);
    pager.pin(pinned, length).unwrap();
    pager.relocate(start, start + (1 << 30), bytes).unwrap();
    (0..64).for_each(|page| set_word(new, (16 + page) * 512, page as u64));
    (0..others.len() / PAGE).for_each(|page| set_word(others, page * 512, 1));
    let before = pager.stats().faults;
    (0..64).for_each(|page| assert_eq!(word(new, (16 + page) * 512), page as u64));
    assert_eq!(pager.stats().faults, before, "they stayed");
    // Nothing is left behind of them: as much may be pinned as before.
    let most = LOCAL_BYTES_MIN as usize / 4 * 3;
    assert!(pager.pin(start, most).is_err());
    assert!(pager.unpin(pinned, length).unwrap_err().to_string().contains("is not pinned"));
    pager.unpin(moved, length).unwrap();
    assert!(pager.unpin(moved, length).unwrap_err().to_string().contains("is not pinned"));
    pager.pin(start, most).unwrap();
}

#[test]
fn protected_memory_is_evicted_and_comes_back() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, LOCAL_BYTES_MIN, |_| {});
    let bytes = LOCAL_BYTES_MIN as usize / 2;
    let fixed = mapped(&pager, 0, bytes);
    for page in 0..bytes / PAGE {
        set_word(fixed, page * 512, page as u64 + 1);
    }
    pager.protect(pager.area().start, bytes, 1).unwrap();
    churn(mapped(&pager, 1 << 30, 3 * LOCAL_BYTES_MIN as usize), 5, 20_000);
    for page in 0..bytes / PAGE {
        assert_eq!(word(fixed, page * 512), page as u64 + 1);
    }
}

#[test]
fn threads_share_one_pager() {
    let Some(_alone) = alone() else { return };
    let lent = lend(128 << 20);
    let pager = start(&lent, 8 << 20, |_| {});
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let memory = mapped(&pager, thread << 30, 8 << 20);
            scope.spawn(move || churn(memory, thread as u64 + 10, 20_000));
        }
        let pager = &pager;
        scope.spawn(move || {
            for round in 0..200 {
                let memory = mapped(pager, (8 << 30) + (round % 3) * PAGE, 64 * PAGE);
                set_word(memory, 5, 5);
                assert_eq!(word(memory, 5), 5);
                pager.discard(pager.area().start + (8 << 30) + (round % 3) * PAGE, 64 * PAGE).unwrap();
                assert_eq!(word(memory, 5), 0);
            }
        });
    });
}

#[test]
fn bad_ranges_and_budgets_are_refused() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, LOCAL_BYTES_MIN, |_| {});
    let area = pager.area();
    for (address, bytes) in [
        (area.start - PAGE, PAGE),
        (area.end, PAGE),
        (area.start + 1, PAGE),
        (area.start, usize::MAX & !4095),
        (area.start, 0),
    ] {
        assert!(pager.map(address, bytes, READ_WRITE).is_err(), "{address:#x}+{bytes:#x}");
        assert!(pager.discard(address, bytes).is_err());
    }
    let config = PagerConfig {
        local_bytes: LOCAL_BYTES_MIN - 1,
        lenders: vec![lent.address().to_owned()],
        ..PagerConfig::default()
    };
    let error = Pager::start(config).err().unwrap().to_string();
    assert!(error.contains("too small"), "{error}");
}
