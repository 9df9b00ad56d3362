//! Strides: what comes with a page of a matrix, and that programs without any are left alone.

mod common;

use common::mapped::{mapped, set_word, start, while_budgets_change_and_a_lender_dies, word};
use common::{Random, alone, fault_paths, lend};
use netvm::pager::{LOCAL_BYTES_MIN, Pager};

const PAGE: usize = 4096;

#[test]
fn columns_come_without_what_lies_between() {
    let Some(_alone) = alone() else { return };
    for page_bytes in [PAGE, 4 * PAGE] {
        let lent = lend(96 << 20);
        let pager = start(&lent, 8 << 20, |config| config.page_bytes = page_bytes);
        // Columns of 4.7 pages, of which there are four times the local memory; bands of 512 rows, in tiles of eight columns.
        let (rows, columns) = (2400_usize, 1700);
        let memory = mapped(&pager, 0, (rows * columns * 8).next_multiple_of(4 * PAGE));
        let mut before = pager.stats();
        for pass in 0..4_u64 {
            for band in (0..rows).step_by(512) {
                for tile in (0..columns).step_by(8) {
                    for row in (band..rows.min(band + 512)).step_by(4) {
                        for column in tile..columns.min(tile + 8) {
                            let index = column * rows + row;
                            let value = if pass == 0 { 0 } else { index as u64 * pass };
                            assert_eq!(word(memory, index), value, "pass {pass}, row {row}, column {column}");
                            set_word(memory, index, index as u64 * (pass + 1));
                        }
                    }
                }
            }
            let stats = pager.stats();
            let faults = stats.faults - before.faults;
            let came = stats.remote_reads - before.remote_reads;
            println!("{page_bytes} bytes, pass {pass}: {faults} faults, {came} pages came");
            if page_bytes == PAGE {
                // A band has one or two of each column's pages: 1.9 of them, 10,000 in all five.
                assert!(faults < 5000 && came < 17_000, "{pass}: {faults} faults, {came} pages");
            }
            before = stats;
        }
    }
}

#[test]
fn a_stride_ends_where_the_area_does() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    for step in [20 * PAGE, 20 * PAGE + 64] {
        for down in [false, true] {
            let pager = start(&lent, LOCAL_BYTES_MIN, |config| config.area_bytes = 32 << 20);
            let memory = mapped(&pager, 0, 32 << 20);
            let places = (0..32 << 20).step_by(step);
            let places: Vec<usize> = if down { places.rev().collect() } else { places.collect() };
            for pass in 0..3 {
                for &at in &places {
                    assert_eq!(word(memory, at / 8), pass);
                    set_word(memory, at / 8, pass + 1);
                }
            }
        }
    }
}

#[test]
fn windows_of_large_units_leave_room_for_what_is_waited_for() {
    let Some(_alone) = alone() else { return };
    for fault_path in fault_paths() {
        for unit_pages in [16_usize, 256] {
            let lent = lend(160 << 20);
            let unit = unit_pages * PAGE;
            let local = LOCAL_BYTES_MIN.max(4 * unit as u64);
            let pager =
                start(&lent, local, |config| (config.page_bytes, config.fault_path) = (unit, fault_path));
            let bytes = 128 << 20;
            let memory = mapped(&pager, 0, bytes);
            (0..bytes / PAGE).for_each(|page| set_word(memory, page * 512, page as u64 + 1));
            let before = pager.stats();
            let mut accesses = 0;
            for step in [2, 3, 5, 7].map(|units| units * unit + 3 * PAGE) {
                for pass in 0..5 {
                    for at in (local as usize + pass * unit..bytes - unit).step_by(step) {
                        // Two units at once: a word across, once at the beginning of an element, once behind it.
                        let at = at / unit * unit + pass % 2 * PAGE;
                        let address = (pager.area().start + at - 4) as *const u64;
                        // SAFETY: far memory of this test; nobody else has it.
                        std::hint::black_box(unsafe { address.read_unaligned() });
                        assert_eq!(word(memory, at / 8), (at / PAGE) as u64 + 1);
                        accesses += 1;
                    }
                }
            }
            let came = (pager.stats().remote_reads - before.remote_reads) / unit_pages as u64;
            println!("{fault_path} {unit_pages}: {accesses} accesses, {came} units came");
            assert!(came < 8 * accesses, "{fault_path} {unit_pages}: {came} units for {accesses} accesses");
        }
    }
}

/// Faults, and pages that came, when words are read in this order with 4 MiB of local memory.
fn cost(name: &str, places: &[u64]) -> (u64, u64) {
    let lent = lend(160 << 20);
    let pager = start(&lent, 4 << 20, |_| {});
    let memory = mapped(&pager, 0, (places.iter().max().unwrap() + 8).next_multiple_of(1 << 20) as usize);
    (0..memory.len() / PAGE).for_each(|page| set_word(memory, page * 512 + 500, page as u64 + 1));
    let before = pager.stats();
    for &at in places {
        let expected = if at % PAGE as u64 == 4000 { at / PAGE as u64 + 1 } else { 0 };
        assert_eq!(word(memory, at as usize / 8), expected, "{name} at {at}");
    }
    let stats = pager.stats();
    let cost = (stats.faults - before.faults, stats.remote_reads - before.remote_reads);
    println!("{name}: {} faults, {} pages came", cost.0, cost.1);
    cost
}

#[test]
fn what_is_no_stride_is_not_taken_for_one() {
    let Some(_alone) = alone() else { return };
    const PAGE: u64 = 4096;
    // Nodes of four pages, each searched by halves: three pages of it for each of two nodes.
    let mut random = Random::new(8);
    let mut places = Vec::new();
    for _ in 0..10_000 {
        let leaf = random.next() % 4096;
        let key = random.next() % 1024;
        for node in [4096 + leaf / 100, leaf] {
            let (mut low, mut high) = (0, 1024);
            while high - low > 1 {
                let middle = (low + high) / 2;
                places.push(node * 4 * PAGE + middle * 16);
                if key < middle { high = middle } else { low = middle }
            }
        }
    }
    let (_, came) = cost("B-tree", &places);
    assert!(came < 40_000, "{came} pages");
    // What is used at random, and mostly here, after a few columns.
    let mut random = Random::new(9);
    let places: Vec<u64> = (0..100_000_u64)
        .map(|index| match index % 20_000 {
            column @ 0..200 => column * 19_200 % (1126 * PAGE),
            _ => random.next() % 1126 * PAGE + random.next() % 512 * 8,
        })
        .collect();
    let (_, came) = cost("at random after columns", &places);
    assert!(came < 18_000, "{came} pages");
    // Headers, and of one in 32 what follows it.
    let mut random = Random::new(8);
    let places: Vec<u64> = (0..3 * 2800_u64)
        .flat_map(|index| {
            let pages = if random.next().is_multiple_of(32) { 6 } else { 1 };
            (0..pages).map(move |page| index % 2800 * 6 * PAGE + page * PAGE)
        })
        .collect();
    let (faults, came) = cost("objects", &places);
    assert!(faults < 2500 && came < 25_000, "{faults} faults, {came} pages");
}

#[test]
fn matrices_and_records_in_any_direction() {
    let Some(_alone) = alone() else { return };
    // Eight columns at a time, of rows that are no whole pages: each page is met in 64 passes, and most of them are here.
    for down in [false, true] {
        let row = 100_008_u64;
        let places: Vec<u64> = (0..128_u64)
            .flat_map(|tile| {
                (0..600_u64).flat_map(move |index| {
                    let index = if down { 599 - index } else { index };
                    [0, 4, 7].map(|column| index * row + (tile * 8 + column) * 8)
                })
            })
            .collect();
        let (faults, came) = cost("columns", &places);
        assert!(faults < 2400 && came < 5000, "{faults} faults, {came} pages");
    }
    for bytes in [8192_u64, 12_288, 16_384, 6000] {
        let records = (32 << 20) / bytes;
        let places: Vec<u64> = (0..2)
            .flat_map(|_| {
                (0..records).rev().flat_map(move |record| {
                    (0..bytes).step_by(256).map(move |at| (record * bytes + at) / 8 * 8)
                })
            })
            .collect();
        let (faults, came) = cost("records from the last to the first", &places);
        assert!(faults < 1800 && came < 23_000, "{bytes}: {faults} faults, {came} pages");
    }
}

/// A matrix by columns of 4.7 pages, whose words each thread that has one knows.
fn use_matrix(pager: &Pager, offset: usize, seed: u64) {
    let (rows, columns) = (2400, 400);
    let memory = mapped(pager, offset, (rows * columns * 8_usize).next_multiple_of(PAGE));
    let mut random = Random::new(seed);
    // What was last written to each column, 0 if it has been dropped.
    let mut model = vec![0; columns];
    for pass in 1..=6_u64 {
        for band in (0..rows).step_by(600) {
            for tile in (0..columns).step_by(8) {
                for row in (band..band + 600).step_by(25) {
                    for (column, &old) in model.iter().enumerate().skip(tile).take(8) {
                        let index = column * rows + row;
                        let expected = if old == 0 { 0 } else { index as u64 ^ old };
                        assert_eq!(word(memory, index), expected, "pass {pass}, row {row}, column {column}");
                        set_word(memory, index, index as u64 ^ (pass << 40));
                    }
                }
            }
        }
        model.fill(pass << 40);
        // Some columns in the middle of what comes next.
        let first = random.next() as usize % (columns - 64) / 64 * 64;
        let bytes = rows * 8 * 64;
        pager.discard(pager.area().start + offset + first * rows * 8, bytes).unwrap();
        model[first..first + 64].fill(0);
    }
}

#[test]
fn tiles_stay_as_written_while_budgets_change_and_a_lender_dies() {
    let Some(_alone) = alone() else { return };
    while_budgets_change_and_a_lender_dies(use_matrix);
}
