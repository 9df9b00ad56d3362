//! Packed pages: contents of every kind, budget, mapping changes, threads, and what is chosen by itself.

mod common;

use common::mapped::mapped;
use common::{Lent, Random, alone, lend};
use netvm::lender::LinkChoice;
use netvm::pager::{FaultPath, FrameDesign, LOCAL_BYTES_MIN, Pager, PagerConfig, TierPolicy};
use netvm_sys::shared::SharedSlice;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

const PAGE: usize = 4096;
const READ_WRITE: i32 = 3;

fn start(lent: &Lent, local_bytes: u64, change: impl FnOnce(&mut PagerConfig)) -> Arc<Pager> {
    common::mapped::start(lent, local_bytes, |config| {
        config.tier = TierPolicy::Packed;
        change(config);
    })
}

/// What pages are made of.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Random bytes.
    Noise,
    /// Random bytes in the first half, zeros in the second.
    Half,
    /// Few different words.
    Dull,
    /// One word repeated.
    Word,
    /// Zeros.
    Zero,
    /// One of the others, by the page.
    Mixed,
}

fn contents(kind: Kind, page: usize, generation: u32) -> [u8; PAGE] {
    let seed = (page as u64) << 32 | u64::from(generation);
    let mut random = Random::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut bytes = [0; PAGE];
    let words = bytes.as_chunks_mut::<8>().0;
    match kind {
        Kind::Noise => words.fill_with(|| random.next().to_le_bytes()),
        Kind::Half => words[..256].fill_with(|| random.next().to_le_bytes()),
        Kind::Dull => words.fill_with(|| (random.next() % 5 + seed).to_le_bytes()),
        Kind::Word => words.fill(random.next().to_le_bytes()),
        Kind::Zero => {}
        Kind::Mixed => {
            let kinds = [Kind::Noise, Kind::Half, Kind::Dull, Kind::Word, Kind::Zero];
            return contents(kinds[(page * 7 + generation as usize) % kinds.len()], page, generation);
        }
    }
    bytes
}

/// Far memory whose every page is known.
struct Known {
    memory: SharedSlice,
    kind: Kind,
    generations: Vec<u32>,
    random: Random,
}

impl Known {
    fn new(memory: SharedSlice, kind: Kind, seed: u64) -> Self {
        let generations = vec![0; memory.len() / PAGE];
        let mut known = Self { memory, kind, generations, random: Random::new(seed) };
        (0..known.generations.len()).for_each(|page| known.write(page));
        known
    }

    fn write(&mut self, page: usize) {
        self.generations[page] += 1;
        let bytes = contents(self.kind, page, self.generations[page]);
        self.memory.write_from(page * PAGE, &bytes).unwrap();
    }

    #[track_caller]
    fn check(&self, page: usize) {
        let mut bytes = [0; PAGE];
        self.memory.read_into(page * PAGE, &mut bytes).unwrap();
        let expected = match self.generations[page] {
            0 => [0; PAGE],
            generation => contents(self.kind, page, generation),
        };
        assert!(bytes == expected, "page {page} of {:?} differs", self.kind);
    }

    fn churn(&mut self, steps: usize) {
        for _ in 0..steps {
            let page = self.random.next() as usize % self.generations.len();
            self.check(page);
            if self.random.next().is_multiple_of(3) {
                self.write(page);
            }
        }
    }

    fn check_all(&self) {
        (0..self.generations.len()).for_each(|page| self.check(page));
    }
}

#[test]
fn every_kind_of_contents_survives() {
    let Some(_alone) = alone() else { return };
    for design in [None, Some(FrameDesign::Copy)] {
        for kind in [Kind::Noise, Kind::Half, Kind::Dull, Kind::Word, Kind::Mixed] {
            let lent = lend(64 << 20);
            let pager = start(&lent, LOCAL_BYTES_MIN, |config| config.design = design);
            let mut known = Known::new(mapped(&pager, 0, 3 * LOCAL_BYTES_MIN as usize), kind, 3);
            known.churn(3000);
            known.check_all();
            let stats = pager.stats();
            assert!(stats.local_frames_peak <= LOCAL_BYTES_MIN / PAGE as u64, "{kind:?} {stats:?}");
            // The pool never has more than three quarters, and the spare frame.
            assert!(stats.pool_frames <= LOCAL_BYTES_MIN / PAGE as u64 / 4 * 3 + 1, "{kind:?} {stats:?}");
            match kind {
                Kind::Noise => assert!(stats.packed == 0 && stats.incompressible > 0, "{stats:?}"),
                Kind::Word => {
                    assert!(
                        stats.filled > 1000 && stats.remote_writes == 0 && stats.packed == 0,
                        "{stats:?}"
                    );
                }
                // All of it fits, packed.
                Kind::Dull => {
                    assert!(stats.unpacked > 1000, "{stats:?}");
                    assert!(stats.packed_bytes < stats.packed * 2048, "{stats:?}");
                }
                Kind::Half => assert!(stats.unpacked > 500 && stats.spilled > 100, "{stats:?}"),
                _ => assert!(stats.unpacked > 500 && stats.filled > 500, "{kind:?} {stats:?}"),
            }
        }
    }
}

/// The memory that the kernel counts for all mappings of this process between these addresses, in bytes.
fn resident(from: usize, to: usize) -> u64 {
    let mut bytes = 0;
    let mut inside = false;
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        if let Some((range, _)) = line.split_once(' ')
            && let Some((start, _)) = range.split_once('-')
            && let Ok(start) = usize::from_str_radix(start, 16)
        {
            inside = (from..to).contains(&start);
        } else if let Some(rest) = line.strip_prefix("Rss:").filter(|_| inside) {
            bytes += rest.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
        }
    }
    bytes
}

#[test]
fn packed_pages_count_in_the_budget() {
    let Some(_alone) = alone() else { return };
    let lent = lend(128 << 20);
    let local = 8 << 20;
    let pager = start(&lent, local, |_| {});
    let area = pager.area();
    let mut known = Known::new(mapped(&pager, 0, 4 * local as usize), Kind::Half, 5);
    known.churn(5000);
    let stats = pager.stats();
    assert!(stats.pool_pages > 1500, "{stats:?}");
    let installed = resident(area.start, area.end);
    let frames = stats.local_frames - installed / PAGE as u64;
    println!(
        "{} frames of {} in the pool, {installed} bytes installed",
        stats.pool_frames, stats.local_frames
    );
    assert!(stats.pool_frames <= frames, "{stats:?}");
    assert!(stats.local_frames * PAGE as u64 <= local, "{stats:?}");
    // Nearly two pages in each frame.
    assert!(stats.pool_pages as f64 > 1.6 * stats.pool_frames as f64, "{stats:?}");
}

#[test]
fn discarded_moved_and_protected_pages() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, LOCAL_BYTES_MIN, |_| {});
    let bytes = 3 * LOCAL_BYTES_MIN as usize;
    let pages = bytes / PAGE;
    let start = pager.area().start;
    let mut known = Known::new(mapped(&pager, 0, bytes), Kind::Mixed, 7);
    for round in 0..3 {
        let (old, new) = if round % 2 == 0 { (0, 1 << 30) } else { (1 << 30, 0) };
        known.churn(700);
        // Every third stretch reads zero.
        for first in (0..pages - 32).step_by(96) {
            pager.discard(start + old + first * PAGE, 32 * PAGE).unwrap();
            known.generations[first..first + 32].fill(0);
        }
        known.check_all();
        // To another place, and back; what was there is gone.
        let other = mapped(&pager, new, bytes);
        for page in 0..pages {
            other.write_from(page * PAGE, &[9]).unwrap();
        }
        pager.relocate(start + old, start + new, bytes).unwrap();
        known.memory = other;
        known.check_all();
        pager.protect(start + new, bytes / 2, 1).unwrap();
        known.check_all();
        pager.protect(start + new, bytes / 2, READ_WRITE).unwrap();
        (0..pages).step_by(5).for_each(|page| known.write(page));
    }
    pager.unmap(start, bytes).unwrap();
    pager.unmap(start + (1 << 30), bytes).unwrap();
    let stats = pager.stats();
    assert_eq!((stats.pool_pages, stats.far_pages), (0, 0), "{stats:?}");
}

#[test]
fn threads_on_a_tiny_budget() {
    let Some(_alone) = alone() else { return };
    for policy in [TierPolicy::Packed, TierPolicy::Auto, TierPolicy::Lender] {
        let lent = lend(128 << 20);
        let pager = start(&lent, LOCAL_BYTES_MIN, |config| config.tier = policy);
        std::thread::scope(|scope| {
            for (thread, kind) in [Kind::Mixed, Kind::Half, Kind::Noise, Kind::Dull].into_iter().enumerate() {
                let memory = mapped(&pager, thread << 30, 4 << 20);
                scope.spawn(move || {
                    let mut known = Known::new(memory, kind, thread as u64 + 1);
                    known.churn(3000);
                    known.check_all();
                });
            }
        });
        let stats = pager.stats();
        assert!(stats.local_frames_peak <= LOCAL_BYTES_MIN / PAGE as u64, "{policy:?} {stats:?}");
        match policy {
            TierPolicy::Lender => {
                assert_eq!((stats.packed, stats.filled, stats.pool_frames), (0, 0, 0), "{stats:?}");
            }
            TierPolicy::Packed => assert!(stats.packed > 1000, "{stats:?}"),
            TierPolicy::Auto => {}
        }
    }
}

#[test]
fn what_a_lender_has_already_is_not_sent_again() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, LOCAL_BYTES_MIN, |_| {});
    let known = Known::new(mapped(&pager, 0, 6 * LOCAL_BYTES_MIN as usize), Kind::Half, 9);
    known.check_all();
    let written = pager.stats().remote_writes;
    known.check_all();
    known.check_all();
    let stats = pager.stats();
    // What the first passes left in local memory without a copy, once.
    assert!(stats.remote_writes - written < 2 * LOCAL_BYTES_MIN / PAGE as u64, "{written} {stats:?}");
    assert!(stats.spilled > 6000, "{stats:?}");
}

#[test]
fn incompressible_pages_are_hardly_ever_tried() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let pager = start(&lent, LOCAL_BYTES_MIN, |config| config.tier = TierPolicy::Auto);
    let mut known = Known::new(mapped(&pager, 0, 4 * LOCAL_BYTES_MIN as usize), Kind::Noise, 11);
    known.churn(20_000);
    let stats = pager.stats();
    let evicted = stats.remote_writes + stats.clean_drops;
    assert!(stats.packed == 0 && stats.pool_frames == 0 && stats.pool_changes == 0, "{stats:?}");
    assert!(stats.incompressible < 64 + evicted / 32, "{evicted} {stats:?}");
}

/// Pages that are only read leave many at a time, and nobody looks at them: but for samples.
#[test]
fn pages_that_are_only_read_are_sampled_like_others() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let local = 8 << 20;
    let pager = start(&lent, local, |config| {
        (config.tier, config.fault_path) = (TierPolicy::Auto, FaultPath::Thread);
    });
    let pages = 4 * local as usize / PAGE;
    let mut known = Known::new(mapped(&pager, 0, 4 * local as usize), Kind::Noise, 13);
    let read = |known: &mut Known, reads: usize| {
        for _ in 0..reads {
            let page = known.random.next() as usize % pages;
            known.check(page);
        }
    };
    read(&mut known, 20_000);
    let before = pager.stats();
    read(&mut known, 5_000);
    let tried = pager.stats().incompressible - before.incompressible;
    let evicted = pager.stats().clean_drops - before.clean_drops;
    println!("{tried} samples of {evicted} pages that left, {:?}", pager.stats().left_together);
    assert!(tried >= evicted / 128 && tried <= evicted / 16 + 64, "{tried} of {evicted}");
}

#[test]
fn the_pool_comes_when_it_pays() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let local = 8 << 20;
    // Far enough away that packing costs less, however busy this machine is.
    let address = common::delayed(lent.address(), Arc::new(AtomicU64::new(1)));
    let pager = start(&lent, local, |config| {
        (config.tier, config.link) = (TierPolicy::Auto, LinkChoice::Socket);
        config.lenders = vec![address];
    });
    // Four times as much as is local, and a tenth of that when packed.
    let mut known = Known::new(mapped(&pager, 0, 4 * local as usize), Kind::Dull, 13);
    for _ in 0..40 {
        known.churn(4000);
        if pager.stats().pool_pages > 4000 {
            known.check_all();
            return;
        }
    }
    panic!("{:?}", pager.stats());
}
