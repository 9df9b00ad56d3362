//! What was wanted before comes in windows when it is wanted again, in whatever order that was: docs/design/learn.md.

mod common;

use common::mapped::{mapped, set_word, start, while_budgets_change_and_a_lender_dies, word};
use common::{Random, alone, fault_paths, lend};

use netvm::pager::{FaultPath, Pager};
use netvm::stats::PagerStats;
use netvm_sys::shared::SharedSlice;

const PAGE: usize = 4096;
const PAGES: usize = 6000;

fn shuffled(random: &mut Random, pages: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..pages).collect();
    (1..pages).rev().for_each(|last| order.swap(last, random.next() as usize % (last + 1)));
    order
}

/// Adds 1 to the words that each page has of this walk.
fn walk(memory: SharedSlice, order: &[usize], pass: u64) {
    for &page in order {
        let index = page * PAGE / 8 + page % 512;
        assert_eq!(word(memory, index), pass * (page as u64 + 1), "page {page}");
        set_word(memory, index, (pass + 1) * (page as u64 + 1));
    }
}

fn since(pager: &Pager, before: &mut PagerStats) -> (u64, u64) {
    let stats = pager.stats();
    let grown = (stats.faults - before.faults, stats.remote_reads - before.remote_reads);
    *before = stats;
    grown
}

#[test]
fn any_order_is_known_the_second_time() {
    let Some(_alone) = alone() else { return };
    let paths = fault_paths().into_iter().map(|path| (path, PAGE));
    for (fault_path, page_bytes) in paths.chain([(FaultPath::Thread, 4 * PAGE)]) {
        let lent = lend(64 << 20);
        let pager = start(&lent, 8 << 20, |config| {
            (config.fault_path, config.page_bytes) = (fault_path, page_bytes);
        });
        let memory = mapped(&pager, 0, PAGES * PAGE);
        let order = shuffled(&mut Random::new(1), PAGES);
        let mut before = pager.stats();
        let passes: Vec<_> = (0..5)
            .map(|pass| {
                walk(memory, &order, pass);
                since(&pager, &mut before)
            })
            .collect();
        println!("{fault_path}, {page_bytes} bytes: {passes:?} faults, pages that came");
        // The first touches no page twice; of the second all but a part of what is local faults.
        let most = if page_bytes == PAGE { 1500 } else { 3500 };
        assert!(passes[1].0 > 3500 && passes[3..].iter().all(|pass| pass.0 < most), "{passes:?}");
        let (asked, wanted) = (before.foreseen, before.foreseen_hits);
        assert!(wanted <= asked && wanted * 10 > asked * 9, "{asked} asked for, {wanted} wanted");
        // Another order each time is none.
        let mut random = Random::new(2);
        for pass in 5..8 {
            walk(memory, &shuffled(&mut random, PAGES), pass);
        }
        let asked_now = pager.stats().foreseen;
        assert!(asked_now - asked < 500, "{} pages for nothing", asked_now - asked);
    }
}

#[test]
fn each_thread_has_its_own_order() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, 8 << 20, |_| {});
    let memory = mapped(&pager, 0, 4 * 1500 * PAGE);
    let pass_of_all = |pass: u64| {
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    let order = shuffled(&mut Random::new(10 + thread as u64), 1500);
                    let own: Vec<usize> = order.iter().map(|page| thread * 1500 + page).collect();
                    walk(memory, &own, pass);
                });
            }
        });
    };
    let mut before = pager.stats();
    let passes: Vec<_> = (0..5)
        .map(|pass| {
            pass_of_all(pass);
            since(&pager, &mut before)
        })
        .collect();
    println!("{passes:?} faults, pages that came");
    assert!(passes[1].0 > 3000 && passes[3..].iter().all(|pass| pass.0 < 2500), "{passes:?}");
}

/// Most of what was wanted in turn is not wanted again: what comes ahead for nothing is noticed, though there are no faults for it.
#[test]
fn what_is_wanted_in_part_only_is_left_alone() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let came = |prefetch: bool| {
        let pager = start(&lent, 8 << 20, |config| {
            config.prefetch_pages_max = if prefetch { config.prefetch_pages_max } else { 0 };
        });
        let memory = mapped(&pager, 0, PAGES * PAGE);
        let order = shuffled(&mut Random::new(1), PAGES);
        (0..2).for_each(|pass| walk(memory, &order, pass));
        let (mut random, mut before) = (Random::new(3), pager.stats());
        for _ in 0..20 {
            for &page in order.iter().filter(|_| random.next().is_multiple_of(4)) {
                assert_eq!(word(memory, page * PAGE / 8 + page % 512), 2 * (page as u64 + 1));
            }
        }
        since(&pager, &mut before).1
    };
    let (with, without) = (came(true), came(false));
    println!("{with} pages came, {without} without prefetch");
    assert!(with < without * 5 / 4, "{with} pages came, {without} without prefetch");
}

/// A list that changes a little from pass to pass, some of whose pages are dropped while more of it is on its way.
fn use_list(pager: &Pager, offset: usize, seed: u64) {
    let pages = 2400;
    let memory = mapped(pager, offset, pages * PAGE);
    let mut random = Random::new(seed);
    let mut order = shuffled(&mut random, pages);
    // What each page had last, 0 if it has been dropped.
    let mut model = vec![0; pages];
    for pass in 1..=8_u64 {
        for (number, &page) in order.iter().enumerate() {
            let index = page * PAGE / 8 + page % 512;
            assert_eq!(word(memory, index), model[page], "pass {pass}, page {page}");
            model[page] = pass << 40 ^ index as u64;
            set_word(memory, index, model[page]);
            if number % 600 == 599 {
                let first = random.next() as usize % (pages - 16);
                pager.discard(pager.area().start + offset + first * PAGE, 16 * PAGE).unwrap();
                model[first..first + 16].fill(0);
            }
        }
        let (one, other) = (random.next() as usize % pages, random.next() as usize % pages);
        order.swap(one, other);
    }
}

#[test]
fn lists_stay_as_written_while_budgets_change_and_a_lender_dies() {
    let Some(_alone) = alone() else { return };
    while_budgets_change_and_a_lender_dies(use_list);
}
