//! The local budget is exact: what the far area and the pool really have never exceeds it, whatever happens at once.

mod common;

use common::{Random, alone, alone_in_thread, fault_paths, lend};
use netvm::pager::{FaultPath, FrameDesign, LOCAL_BYTES_MIN, Pager, PagerConfig, STRIPE_BYTES, TierPolicy};
use netvm_sys::shared::SharedSlice;
use std::io::Write;
use std::ops::Range;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: usize = 4096;
const READ_WRITE: i32 = 3;
const THREADS: usize = 3;
const ROUNDS: usize = 24;

/// Where anything is mapped: pagers of tests before live on, and may give memory back at any time.
fn mappings() -> Vec<Range<u64>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().map(|line| range(line).unwrap()).collect()
}

/// The addresses at the beginning of a line of maps or smaps.
fn range(line: &str) -> Option<Range<u64>> {
    let (start, end) = line.split_ascii_whitespace().next()?.split_once('-')?;
    Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
}

/// Bytes of memory in mappings that are watched by a userfaultfd, as the kernel counts them, beside `others`: the far area, and the pool.
///
/// It counts one mapping after the other: a page that the pager moves meanwhile may be seen in both, or in none. So until two counts agree.
fn resident_bytes(others: &[Range<u64>]) -> u64 {
    let mut last = count_resident_bytes(others);
    loop {
        let next = count_resident_bytes(others);
        if next == last {
            return next;
        }
        last = next;
    }
}

fn count_resident_bytes(others: &[Range<u64>]) -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut sum, mut rss, mut is_others) = (0, 0, false);
    for line in smaps.lines() {
        if let Some(here) = range(line) {
            is_others = others.iter().any(|other| other.start < here.end && here.start < other.end);
        }
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("Rss:") => rss = words.next().unwrap().parse::<u64>().unwrap() * 1024,
            Some("VmFlags:") if !is_others && words.any(|flag| flag == "um") => sum += rss,
            _ => {}
        }
    }
    sum
}

/// Single pages at random, each filled from its own sum; some ranges are discarded, some moved to and fro.
struct Worker<'a> {
    pager: &'a Pager,
    address: usize,
    memory: SharedSlice,
    /// What each page was filled from; 0: it reads as zeros.
    seeds: Vec<u64>,
    random: Random,
}

impl Worker<'_> {
    fn fill(&mut self, page: usize) {
        let seed = self.random.next() | 1;
        let mut bytes = [0; PAGE];
        let mut words = Random::new(seed);
        bytes.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = words.next().to_ne_bytes());
        self.memory.write_from(page * PAGE, &bytes).unwrap();
        self.seeds[page] = seed;
    }

    fn check(&self, page: usize) {
        let mut bytes = [0; PAGE];
        self.memory.read_into(page * PAGE, &mut bytes).unwrap();
        let mut words = Random::new(self.seeds[page]);
        let right = bytes.as_chunks::<8>().0.iter().all(|word| {
            let expected = if self.seeds[page] == 0 { 0 } else { words.next() };
            u64::from_ne_bytes(*word) == expected
        });
        assert!(right, "page {page} of {:#x}", self.address);
    }

    fn round(&mut self, steps: usize) {
        let pages = self.seeds.len();
        for _ in 0..steps {
            let page = self.random.next() as usize % pages;
            match self.random.next() % 256 {
                0 => {
                    let count = (pages - page).min(40);
                    self.pager.discard(self.address + page * PAGE, count * PAGE).unwrap();
                    self.seeds[page..page + count].fill(0);
                }
                1 => {
                    let (half, count) = (pages / 2, 24);
                    let from = page % (half - count);
                    let (old, new) = (self.address + from * PAGE, self.address + (half + from) * PAGE);
                    self.pager.relocate(old, new, count * PAGE).unwrap();
                    self.seeds.copy_within(from..from + count, half + from);
                    self.seeds[from..from + count].fill(0);
                }
                2..100 => self.fill(page),
                _ => self.check(page),
            }
        }
    }
}

fn stays_exact(design: Option<FrameDesign>, fault_path: FaultPath, shards: usize) {
    let lent = lend(96 << 20);
    let low = shards as u64 * LOCAL_BYTES_MIN;
    let high = 2 * low;
    let others = mappings();
    let pager = Pager::start(PagerConfig {
        local_bytes: high,
        local_bytes_max: high,
        lenders: vec![lent.address().to_owned()],
        area_bytes: 1 << 34,
        tier: TierPolicy::Lender,
        design,
        fault_path,
        shards,
        ..PagerConfig::default()
    })
    .unwrap();
    let (bytes, barrier) = (2 * low as usize, Barrier::new(THREADS + 1));
    let budget = AtomicU64::new(high);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (pager, barrier) = (&pager, &barrier);
            scope.spawn(move || {
                // With several shards in two stripes each.
                let address = pager.area().start + (thread << 30) + STRIPE_BYTES - bytes / 2;
                pager.map(address, bytes, READ_WRITE).unwrap();
                let (memory, seeds) = (pager.memory(address, bytes).unwrap(), vec![0; bytes / PAGE]);
                let mut worker =
                    Worker { pager, address, memory, seeds, random: Random::new(thread as u64 + 1) };
                for _ in 0..ROUNDS {
                    worker.round(1200);
                    barrier.wait();
                    barrier.wait();
                }
                (0..bytes / PAGE).for_each(|page| worker.check(page));
            });
        }
        for round in 0..ROUNDS {
            // While they are at it.
            let next = if round % 2 == 0 { low } else { high };
            std::thread::sleep(std::time::Duration::from_millis(5));
            pager.set_local_bytes(next).unwrap();
            budget.store(next, Ordering::Relaxed);
            barrier.wait();
            let (stats, resident) = (pager.stats(), resident_bytes(&others));
            let held = stats.local_frames * PAGE as u64;
            // And not because nothing is there.
            if resident > held || held > next || resident <= low / 2 {
                // A panic would leave the threads to wait for this one for ever, and be told by nobody.
                let what = format!("{design:?}, {fault_path:?}, {shards} shards, round {round}");
                let _ = writeln!(std::io::stderr(), "{what}: {resident} of {held} of {next}; {stats:?}");
                std::process::exit(101);
            }
            barrier.wait();
        }
    });
    let stats = pager.stats();
    assert!(stats.local_frames_peak * PAGE as u64 <= high, "{stats:?}");
    assert!(stats.remote_reads > 5000, "{stats:?}");
}

#[test]
fn the_budget_stays_exact() {
    let Some(_alone) = alone() else { return };
    stays_exact(None, FaultPath::Auto, 1);
}

#[test]
fn the_budget_stays_exact_in_the_copying_design() {
    let Some(_alone) = alone() else { return };
    stays_exact(Some(FrameDesign::Copy), FaultPath::Auto, 1);
}

#[test]
fn the_budget_stays_exact_where_pages_leave_together() {
    let Some(_alone) = alone_in_thread() else { return };
    stays_exact(None, FaultPath::InThread, 1);
}

#[test]
fn the_budget_of_shards_stays_exact() {
    let Some(_alone) = alone() else { return };
    stays_exact(Some(FrameDesign::Copy), FaultPath::Thread, 2);
    fault_paths().into_iter().for_each(|path| stays_exact(None, path, 2));
}
