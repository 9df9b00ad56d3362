//! Far memory that several pagers divide: contents, budget, hints, lenders that come and go.

mod common;

use common::mapped::{mapped, word};
use common::pages::Pages;
use common::{Lent, Random, Serving, alone, fault_paths, lend};
use netvm::far::{FarBuilder, FarMemory, FarVec};
use netvm::lender::LinkChoice;
use netvm::pager::{Erasure, FaultPath, Pager, PagerConfig, SHARDS_MAX, STRIPE_BYTES, TierPolicy};
use netvm::runfile::{RunFile, RunParams};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const MIB: u64 = 1 << 20;
/// Mappings are this far apart.
const APART: usize = 1 << 30;

fn start(
    lenders: &[&str],
    local_mib: u64,
    shards: usize,
    change: impl FnOnce(&mut PagerConfig),
) -> Arc<Pager> {
    let mut config = PagerConfig {
        local_bytes: local_mib * MIB,
        lenders: lenders.iter().map(|&lender| lender.to_owned()).collect(),
        area_bytes: 1 << 36,
        tier: TierPolicy::Lender,
        shards,
        ..PagerConfig::default()
    };
    change(&mut config);
    Pager::start(config).unwrap()
}

fn builder(lent: &Lent, local_mib: u64, shards: usize) -> FarBuilder {
    let far = FarMemory::builder().local(local_mib * MIB).lender(lent.address()).area(1 << 36);
    far.tier(TierPolicy::Lender).shards(shards)
}

#[test]
fn contents_stay_while_budgets_change_and_a_lender_dies() {
    let Some(_alone) = alone() else { return };
    for (path, shards) in fault_paths().into_iter().zip([2, 3]) {
        let lenders: Vec<_> = (0..3).map(|_| Serving::new(256)).collect();
        let mut lenders = std::mem::ManuallyDrop::new(lenders);
        let addresses: Vec<_> = lenders.iter().map(|lender| lender.address.clone()).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        let pager = start(&addresses, 24, shards, |config| {
            (config.fault_path, config.replicas, config.link) = (path, 2, LinkChoice::Socket);
            config.local_bytes_max = 32 * MIB;
        });
        let running = AtomicUsize::new(4);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                // Two regions, in two threads each, that end within stripes.
                let (region, half) = (thread / 2, thread % 2);
                let bytes = STRIPE_BYTES + 5 * PAGE;
                let offset = region * APART + STRIPE_BYTES / 2 + half * bytes;
                let memory = mapped(&pager, offset, bytes);
                let running = &running;
                scope.spawn(move || {
                    let mut pages = Pages::written(memory, thread as u64 + 1);
                    for _ in 0..8 {
                        pages.churn(1500);
                    }
                    pages.check_all();
                    running.fetch_sub(1, Ordering::Relaxed);
                });
            }
            let mut random = Random::new(5);
            let mut lost = false;
            while running.load(Ordering::Relaxed) > 0 {
                let local = (12 + random.next() % 21) * MIB;
                pager.set_local_bytes(local).unwrap();
                let now = pager.stats().local_frames;
                assert!(now * PAGE as u64 <= local, "{now} pages, {local} bytes");
                std::thread::sleep(Duration::from_millis(30));
                if !lost && pager.stats().remote_reads > 2000 {
                    drop(lenders.remove(1));
                    lost = true;
                }
            }
            assert!(lost);
        });
        // Each shard has connections of its own. One whose pages nobody needs hears of the end a little later.
        let ended = Instant::now();
        while pager.stats().lenders_lost < shards as u64 && ended.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let stats = pager.stats();
        println!("{path} {stats:?}");
        assert_eq!((stats.lenders_lost, stats.wrong_pages), (shards as u64, 0), "{stats:?}");
        assert!(stats.local_frames_peak <= 32 * MIB / PAGE as u64, "{stats:?}");
        for region in 0..2 {
            pager.unmap(pager.area().start + region * APART, 3 * STRIPE_BYTES).unwrap();
        }
        assert_eq!(pager.stats().far_pages, 0);
    }
}

/// A hot part of three quarters of the budget, which is all one shard's, after both shards have used a half of it; then the other's.
#[test]
fn the_budget_comes_to_the_shard_that_needs_it() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    for path in fault_paths() {
        let pager = start(&[lent.address()], 16, 2, |config| config.fault_path = path);
        // Each in a stripe of its own, and of its own shard.
        let mut parts = [0, 1].map(|stripe| {
            let memory = mapped(&pager, stripe * STRIPE_BYTES, 12 << 20);
            Pages::written(memory, stripe as u64 + 1)
        });
        for (round, part) in [0, 1, 0].into_iter().enumerate() {
            let started = Instant::now();
            loop {
                let before = pager.stats().remote_reads;
                parts[part].churn(6000);
                let reads = pager.stats().remote_reads - before;
                if reads < 100 {
                    break;
                }
                let late = started.elapsed() > Duration::from_secs(20);
                assert!(!late, "round {round}: {reads} of 6000 accesses wait: {:?}", pager.stats());
            }
            println!("{path}, round {round}: after {:?}", started.elapsed());
        }
        parts.iter().for_each(Pages::check_all);
        let stats = pager.stats();
        assert!(stats.local_frames.max(stats.local_frames_peak) <= 16 * MIB / PAGE as u64, "{stats:?}");
    }
}

/// A shard whose program takes and gives up a few pages all the time, thousands a second, has what it wants: the rest stays with the other.
#[test]
fn a_shard_that_uses_few_pages_again_and_again_leaves_the_rest_to_the_other() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    for path in fault_paths() {
        let pager = start(&[lent.address()], 16, 2, |config| config.fault_path = path);
        let mut hot = Pages::written(mapped(&pager, 0, 12 << 20), 1);
        // It has all of the budget when the other one begins.
        Pages::written(mapped(&pager, 2 * STRIPE_BYTES, 12 << 20), 2);
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let few = scope.spawn(|| {
                let (start, bytes) = (pager.area().start + STRIPE_BYTES, 30 * PAGE);
                let mut rounds = 0;
                while !ends.load(Relaxed) {
                    let memory = mapped(&pager, STRIPE_BYTES, bytes);
                    (0..30).for_each(|page| memory.write_from(page * PAGE, &[page as u8 + 1; 64]).unwrap());
                    pager.unmap(start, bytes).unwrap();
                    rounds += 1;
                }
                rounds
            });
            let started = Instant::now();
            // For a while whoever has more pages coming gets more.
            let mut settled = 0;
            while settled < 100 && started.elapsed() < Duration::from_secs(20) {
                let before = pager.stats().remote_reads;
                hot.churn(6000);
                let reads = pager.stats().remote_reads - before;
                settled = if reads < 100 { settled + 1 } else { 0 };
            }
            ends.store(true, Relaxed);
            let rounds = few.join().unwrap();
            println!("{path}: after {:?}, {rounds} rounds of the other", started.elapsed());
            assert!(settled == 100 && rounds > 100, "{rounds} rounds: {:?}", pager.stats());
        });
        hot.check_all();
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let refused = |shards, local_mib, path| {
        builder(&lent, local_mib, shards).fault_path(path).start().unwrap_err().to_string()
    };
    for shards in [0, SHARDS_MAX + 1, usize::MAX] {
        let said = refused(shards, 64, FaultPath::Thread);
        assert!(said.contains(&format!("{shards} shards")) && said.contains("1 to 64"), "{said}");
    }
    let said = refused(2, 64, FaultPath::SameCpu);
    assert!(said.contains("2 shards") && said.contains("one pager"), "{said}");
    let said = refused(4, 15, FaultPath::Thread);
    assert!(said.contains("too small"), "{said}");
    let file = std::env::temp_dir().join(format!("netvm-shards-{}", std::process::id()));
    let _ = std::fs::remove_file(&file);
    let params = RunParams { budget_bytes: 64 * MIB, ..RunParams::default() };
    let run = RunFile::create(&file, &params).unwrap();
    std::fs::remove_file(&file).unwrap();
    let config = PagerConfig { shards: 2, run: Some(run), ..PagerConfig::default() };
    let said = Pager::start(config).unwrap_err().to_string();
    assert!(said.contains("a run"), "{said}");
    // As many as there can be.
    let far = builder(&lent, 4 * SHARDS_MAX as u64, SHARDS_MAX).start().unwrap();
    let mut values: FarVec<u64> = far.vec();
    values.extend(0..1 << 20);
    assert!(values.iter().enumerate().all(|(index, &value)| index as u64 == value));
    let error = far.set_local(4 * MIB).unwrap_err().to_string();
    assert!(error.contains("262144"), "{error}");
}

/// What was pinned waits for nobody, whatever shard has it, and pins of all shards count together.
#[test]
fn pins_count_together() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    for path in fault_paths() {
        let pager = start(&[lent.address()], 16, 2, |config| {
            (config.fault_path, config.local_bytes_max) = (path, 24 * MIB);
        });
        let mut pages = Pages::written(mapped(&pager, 0, 3 * STRIPE_BYTES), 7);
        let start = pager.area().start;
        // More than half of the budget, of one shard.
        pager.pin(start, 10 << 20).unwrap();
        let error = pager.pin(start + STRIPE_BYTES, 3 << 20).unwrap_err().to_string();
        assert!(error.contains("pinned"), "{error}");
        // None of the pieces of what does not fit stays.
        assert!(pager.pin(start + (14 << 20), 4 << 20).is_err());
        pager.pin(start + (15 << 20), 2 << 20).unwrap();
        pages.churn(4000);
        let before = pager.stats().faults;
        (0..10 << 8).chain(15 << 8..17 << 8).for_each(|page| pages.check(page));
        assert_eq!(pager.stats().faults, before, "{path}");
        assert!(pager.set_local_bytes(15 * MIB).is_err());
        pager.set_local_bytes(24 * MIB).unwrap();
        pager.set_local_bytes(16 * MIB).unwrap();
        let before = pager.stats().faults;
        (0..10 << 8).for_each(|page| pages.check(page));
        assert_eq!(pager.stats().faults, before, "{path}");
        pager.unpin(start, 10 << 20).unwrap();
        pager.unpin(start + (15 << 20), 2 << 20).unwrap();
        pager.set_local_bytes(8 * MIB).unwrap();
        let stats = pager.stats();
        assert!(stats.local_frames <= 8 * MIB / PAGE as u64, "{stats:?}");
        pages.check_all();
    }
}

/// Growing moves pages, which stay with their shards; what cannot stay is copied.
#[test]
fn large_blocks_grow_without_coming_in() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    for path in fault_paths() {
        let far = builder(&lent, 12, 3).fault_path(path).start().unwrap();
        let (count, mut random) = (5 << 20, Random::new(3));
        let mut values: FarVec<u64> = far.vec();
        values.reserve_exact(count);
        values.extend((0..count).map(|_| random.next()));
        let before = far.stats().remote_reads;
        for mib in [47, 80, 112] {
            values.reserve_exact((mib << 17) - values.len());
        }
        let reads = far.stats().remote_reads - before;
        assert!(reads < 64, "{path}: {reads} pages came in");
        let mut random = Random::new(3);
        assert!(values.iter().all(|&value| value == random.next()), "{path}");
        let sum = values[..1000].iter().fold(0, |sum: u64, value| sum.wrapping_add(*value));
        far.wont_need(&values);
        far.will_need(&values[..1000]);
        far.random(&values);
        let mut random = Random::new(3);
        assert_eq!(sum, (0..1000).fold(0, |sum: u64, _| sum.wrapping_add(random.next())));
        far.discard(&mut values[..2 << 20]);
        assert!(values[..2 << 20].iter().all(|&value| value == 0), "{path}");
        drop(values);

        let pager = start(&[lent.address()], 12, 3, |config| config.fault_path = path);
        let start = pager.area().start;
        let (bytes, to) = (STRIPE_BYTES + (1 << 20), APART + PAGE);
        let pages = Pages::written(mapped(&pager, 0, bytes), 9);
        let other = mapped(&pager, to, bytes);
        other.write_from(0, &[1; PAGE]).unwrap();
        pager.relocate(start, start + to, bytes).unwrap();
        let mut word = [0; 8];
        pager.memory(start, bytes).unwrap().read_into(0, &mut word).unwrap();
        assert_eq!(word, [0; 8]);
        pages.at(other).check_all();
    }
}

/// A stream goes on in the next stripe as it came.
#[test]
fn streams_cross_stripes() {
    let Some(_alone) = alone() else { return };
    let lent = lend(256 << 20);
    let faults_of_second_half = |shards| {
        let pager = start(&[lent.address()], 24, shards, |_| {});
        let memory = mapped(&pager, 0, 6 * STRIPE_BYTES);
        let pages = Pages::written(memory, 5);
        // What is local is settled when the second half begins, and it is less than a third of all: nothing is kept of it.
        let half = 3 * STRIPE_BYTES / PAGE;
        (0..half).for_each(|page| pages.check(page));
        let before = pager.stats().faults;
        (half..2 * half).for_each(|page| pages.check(page));
        let faults = pager.stats().faults - before;
        // Pagers have no end, and the lender has no room for all of three attempts.
        pager.unmap(pager.area().start, 6 * STRIPE_BYTES).unwrap();
        faults
    };
    // Where others have the CPUs, shards may give each other frames so late that windows are cut short.
    let is_as_one = (0..3).any(|_| {
        let faults = [1, 3].map(faults_of_second_half);
        println!("{faults:?} faults");
        // A new stream would need seven to have the widest window.
        faults[1] <= faults[0] + 3 * 3
    });
    assert!(is_as_one, "a stream began anew in each stripe, three times");
}

/// Each shard has a record of its own, of the pages that it serves: together they foresee what one would.
#[test]
fn each_shard_foresees_what_it_has_seen() {
    let Some(_alone) = alone() else { return };
    let folder = std::env::temp_dir().join(format!("netvm-test-shards-{}", std::process::id()));
    let run = |shards: usize, passes: usize| {
        let lent = lend(256 << 20);
        let file = folder.join(format!("{shards}"));
        let pager = start(&[lent.address()], 16, shards, |config| config.learn = Some(file));
        let memory = mapped(&pager, 0, 4 * STRIPE_BYTES);
        let pages = Pages::written(memory, 9);
        // The same order in each pass, and none that is a stream's.
        let mut order: Vec<usize> = (0..4 * STRIPE_BYTES / PAGE).step_by(2).collect();
        let mut random = Random::new(11);
        (1..order.len()).rev().for_each(|last| order.swap(last, random.next() as usize % (last + 1)));
        for _ in 0..passes {
            order.iter().for_each(|&page| pages.check(page));
        }
        pager.keep_record().unwrap();
        pager.stats().foreseen_hits
    };
    std::fs::create_dir_all(&folder).unwrap();
    // In the first run what the first passes saw helps the later ones, in the second what the first run saw.
    let hits = [(1, 3), (2, 3), (1, 1), (2, 1)].map(|(shards, passes)| run(shards, passes));
    println!("{hits:?} pages foreseen");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 3, "a record for each shard");
    assert!(hits[0] > 4000 && hits[2] > 2000, "{hits:?}");
    assert!(hits[1] > hits[0] / 2 && hits[3] > hits[2] / 2, "{hits:?}");
    std::fs::remove_dir_all(folder).unwrap();
}

/// Pages in parts, one lender that leaves and one that is lost; packed pages.
#[test]
fn parts_tiers_and_leaving() {
    let Some(_alone) = alone() else { return };
    for path in fault_paths() {
        let lenders: Vec<_> = (0..4).map(|_| Serving::new(128)).collect();
        let mut lenders = std::mem::ManuallyDrop::new(lenders);
        let addresses: Vec<_> = lenders.iter().map(|lender| lender.address.clone()).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        let pager = start(&addresses, 12, 2, |config| {
            (config.fault_path, config.tier) = (path, TierPolicy::Packed);
            config.erasure = Erasure::new(2, 1);
        });
        let mut pages = Pages::written(mapped(&pager, 0, 3 * STRIPE_BYTES), 11);
        // Words over and over: these are packed, or kept as one word.
        let dull = mapped(&pager, APART, STRIPE_BYTES);
        let dull_word = |index: usize| ((index as u64 / 512) << 8) | ((index as u64 % 512) / 500 + 1);
        for index in 0..dull.len() / 8 {
            dull.write_from(index * 8, &dull_word(index).to_le_bytes()).unwrap();
        }
        // The first time it is asked to.
        lenders[0].stop.stop();
        let until = |what: &str, pages: &mut Pages, so: &dyn Fn(&netvm::stats::PagerStats) -> bool| {
            let started = Instant::now();
            while !so(&pager.stats()) {
                pages.churn(300);
                assert!(started.elapsed() < Duration::from_secs(40), "never: {what}: {:?}", pager.stats());
            }
        };
        until("it has left", &mut pages, &|stats| stats.lenders_left == 2);
        drop(lenders.remove(1));
        until("it is missed", &mut pages, &|stats| stats.lenders_lost == 2);
        pages.churn(2000);
        pages.check_all();
        for index in (0..dull.len() / 8).step_by(99) {
            assert_eq!(word(dull, index), dull_word(index), "{path} word {index}");
        }
        let stats = pager.stats();
        assert!(stats.packed > 100 && stats.wrong_pages == 0, "{stats:?}");
        assert!(stats.local_frames_peak <= 12 * MIB / PAGE as u64, "{stats:?}");
    }
}

/// The lender of [`loses_its_lender`], and the number of a fault path.
const ROLE: &str = "NETVM_TEST_SHARDS";

/// What the process of [`the_last_lender_lost_ends_the_process`] does.
#[test]
#[ignore = "started by other tests"]
fn loses_its_lender() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (path, lender) = role.split_once(' ').unwrap();
    let path = fault_paths()[path.parse::<usize>().unwrap()];
    let pager =
        start(&[lender], 12, 3, |config| (config.fault_path, config.link) = (path, LinkChoice::Socket));
    let ready = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (pager, ready) = (&pager, &ready);
            scope.spawn(move || {
                let memory = mapped(pager, thread * APART, 2 * STRIPE_BYTES);
                let mut pages = Pages::written(memory, thread as u64);
                ready.fetch_add(1, Ordering::Relaxed);
                if ready.load(Ordering::Relaxed) == 3 {
                    println!("> ready");
                }
                loop {
                    pages.churn(100);
                }
            });
        }
    });
}

#[test]
fn the_last_lender_lost_ends_the_process() {
    let Some(_alone) = alone() else { return };
    for path in 0..fault_paths().len() {
        let lender = Serving::new(256);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "loses_its_lender", "--nocapture"])
            .env(ROLE, format!("{path} {}", lender.address))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().ends_with("> ready")), "it ended");
        let address = lender.address.clone();
        drop(lender);
        let started = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if started.elapsed() > Duration::from_secs(30) {
                let _ = child.kill();
                panic!("it goes on without its pages");
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let said = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        assert!(!status.success() && said.contains(&address), "{status}: {said}");
        assert!(!said.contains("panicked"), "a page was wrong: {said}");
    }
}

/// Each shard has books of all addresses.
#[test]
fn as_many_as_can_be_start_with_a_tebibyte() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    for path in fault_paths() {
        let started = Instant::now();
        let pager = start(&[lent.address()], 4 * SHARDS_MAX as u64, SHARDS_MAX, |config| {
            (config.fault_path, config.area_bytes) = (path, 1 << 40);
        });
        println!("{path}: started after {:?}", started.elapsed());
        // The first and the last stripe.
        for start in [0, pager.area().len() - STRIPE_BYTES] {
            let mut pages = Pages::written(mapped(&pager, start, MIB as usize), 3);
            pages.churn(200);
            pages.check_all();
        }
        pager.unmap(pager.area().start, 1 << 30).unwrap();
    }
}
