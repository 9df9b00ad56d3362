//! Far mappings of a pager, words in them, and random accesses that are checked against a model.

use super::{Lent, Random, Serving};
use netvm::lender::LinkChoice;
use netvm::pager::{Erasure, FaultPath, Pager, PagerConfig, TierPolicy};
use netvm_sys::shared::SharedSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const PAGE: usize = 4096;
const READ_WRITE: i32 = 3;

/// A pager of one lender. Pages are not packed unless `change` says so: what is counted does not depend on what packing costs today then.
pub fn start(lent: &Lent, local_bytes: u64, change: impl FnOnce(&mut PagerConfig)) -> Arc<Pager> {
    let mut config = PagerConfig {
        local_bytes,
        lenders: vec![lent.address().to_owned()],
        area_bytes: 1 << 34,
        tier: TierPolicy::Lender,
        ..PagerConfig::default()
    };
    change(&mut config);
    Pager::start(config).unwrap()
}

pub fn mapped(pager: &Pager, offset: usize, bytes: usize) -> SharedSlice {
    let address = pager.area().start + offset;
    pager.map(address, bytes, READ_WRITE).unwrap();
    pager.memory(address, bytes).unwrap()
}

pub fn word(memory: SharedSlice, index: usize) -> u64 {
    let mut bytes = [0; 8];
    memory.read_into(index * 8, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

pub fn set_word(memory: SharedSlice, index: usize, value: u64) {
    memory.write_from(index * 8, &value.to_le_bytes()).unwrap();
}

/// One random word at a random place of each page, checked against a model in ordinary memory.
pub fn churn(memory: SharedSlice, seed: u64, steps: usize) {
    let pages = memory.len() / PAGE;
    let mut random = Random::new(seed);
    let mut model = vec![0_u64; memory.len() / 8];
    for _ in 0..steps {
        let index = (random.next() as usize % pages) * 512 + random.next() as usize % 512;
        assert_eq!(word(memory, index), model[index], "word {index}");
        if !random.next().is_multiple_of(3) {
            model[index] = random.next();
            set_word(memory, index, model[index]);
        }
    }
    for (index, &value) in model.iter().enumerate().step_by(7) {
        assert_eq!(word(memory, index), value, "word {index}");
    }
}

/// `use_memory`, by four threads, gets where 12 MiB of addresses are that it may map, and a number of its own: in all ways to keep pages, while the budget changes
/// all the time and one of four lenders dies.
pub fn while_budgets_change_and_a_lender_dies(use_memory: fn(&Pager, usize, u64)) {
    type Case = (FaultPath, usize, fn(&mut PagerConfig));
    let cases: [Case; 5] = [
        (FaultPath::Thread, 1, |config| config.replicas = 2),
        (FaultPath::InThread, 1, |config| config.replicas = 2),
        (FaultPath::Thread, 2, |config| config.replicas = 2),
        (FaultPath::Thread, 1, |config| config.erasure = Erasure::new(2, 1)),
        (FaultPath::Thread, 1, |config| (config.replicas, config.encrypt_pages) = (2, true)),
    ];
    let paths = super::fault_paths();
    let cases = cases.into_iter().filter(|(path, ..)| paths.contains(path));
    for (number, (path, shards, change)) in cases.enumerate() {
        let mut lenders: Vec<_> = (0..4).map(|_| Serving::new(256)).collect();
        let mut config = PagerConfig {
            local_bytes: 12 << 20,
            local_bytes_max: 16 << 20,
            lenders: lenders.iter().map(|lender| lender.address.clone()).collect(),
            area_bytes: 1 << 34,
            tier: TierPolicy::Lender,
            link: LinkChoice::Socket,
            fault_path: path,
            shards,
            ..PagerConfig::default()
        };
        change(&mut config);
        let pager = Pager::start(config).unwrap();
        let running = AtomicUsize::new(4);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (pager, running) = (&pager, &running);
                scope.spawn(move || {
                    // Stripes of the shards are shared.
                    use_memory(pager, thread * (12 << 20), thread as u64 + 1);
                    running.fetch_sub(1, Ordering::Relaxed);
                });
            }
            let (mut random, mut lost) = (Random::new(5), false);
            while running.load(Ordering::Relaxed) > 0 {
                pager.set_local_bytes((8 + random.next() % 9) << 20).unwrap();
                std::thread::sleep(std::time::Duration::from_millis(20));
                if !lost && pager.stats().remote_reads > 2000 {
                    drop(lenders.remove(1));
                    lost = true;
                }
            }
            assert!(lost, "case {number}");
        });
        let stats = pager.stats();
        println!("case {number}: {} faults, {} pages came", stats.faults, stats.remote_reads);
        assert_eq!((stats.lenders_lost, stats.wrong_pages), (shards as u64, 0), "case {number}: {stats:?}");
        assert!(stats.local_frames_peak <= (16 << 20) / PAGE as u64, "case {number}: {stats:?}");
        // Pagers have no end.
        std::mem::forget(lenders);
    }
}
