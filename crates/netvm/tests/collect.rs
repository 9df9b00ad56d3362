//! What a program frees here and there goes back to its lenders: docs/design/lending.md, "Sparse slabs".

mod common;

use common::{Random, Serving, alone, delayed, fault_paths, has_in_thread};
use netvm::far::{FarBuilder, FarMemory, FarVec};
use netvm::lender::{LenderConfig, LinkChoice, status};
use netvm::pager::{Erasure, FaultPath, TierPolicy};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// 24 MiB, of which 4 MiB are local.
const PAGES: usize = 6 << 10;
const PAGE_WORDS: usize = 512;

/// Slabs of 1 MiB.
fn lend(count: usize, mib: u64) -> Vec<&'static Serving> {
    let config = || LenderConfig { size_bytes: mib * MIB, slab_bytes: MIB, ..LenderConfig::default() };
    // Pagers have no end, so neither do they.
    (0..count).map(|_| &*Box::leak(Box::new(Serving::start(config())))).collect()
}

fn far(lenders: &[&Serving]) -> FarBuilder {
    let far = FarMemory::builder().lenders(lenders.iter().map(|lender| lender.address.as_str()));
    far.local(4 * MIB).area(1 << 34).tier(TierPolicy::Lender)
}

/// Each page with words of its own.
fn fill(far: &FarMemory) -> FarVec<u64> {
    let mut words = far.vec();
    words.extend((0..PAGES).flat_map(page_words));
    words
}

fn page_words(page: usize) -> impl Iterator<Item = u64> {
    let mut random = Random::new(page as u64 + 1);
    (0..PAGE_WORDS).map(move |_| random.next())
}

/// The program gives up all pages but those.
fn discard(far: &FarMemory, words: &mut [u64], keeps: impl Fn(usize) -> bool) {
    // Where pages begin, not where the vector does.
    let first = words.as_ptr().align_offset(4096);
    for page in (0..PAGES - 1).filter(|&page| !keeps(page)) {
        let start = first + page * PAGE_WORDS;
        far.discard(&mut words[start..start + PAGE_WORDS]);
    }
}

/// Those that were kept are what they were, the others zero.
#[track_caller]
fn check(words: &[u64], keeps: impl Fn(usize) -> bool) {
    let first = words.as_ptr().align_offset(4096);
    let mut expected = (0..PAGES).flat_map(page_words);
    let head = expected.by_ref().take(first).eq(words[..first].iter().copied());
    assert!(head);
    for page in 0..PAGES - 1 {
        let start = first + page * PAGE_WORDS;
        let is_kept = keeps(page);
        for &word in &words[start..start + PAGE_WORDS] {
            let value = expected.next().unwrap();
            assert_eq!(word, if is_kept { value } else { 0 }, "page {page}");
        }
    }
}

fn used(lenders: &[&Serving]) -> u64 {
    lenders.iter().map(|lender| status(&lender.address).unwrap().used_bytes).sum()
}

#[track_caller]
fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !so() {
        assert!(Instant::now() < end, "it never came that {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_is_freed_here_and_there_goes_back() {
    let Some(_alone) = alone() else { return };
    let in_thread = has_in_thread();
    let kinds = [
        ("socket", lend(1, 64), 1.0, (|far| far.link(LinkChoice::Socket)) as fn(FarBuilder) -> FarBuilder),
        ("nearby", lend(1, 64), 1.0, |far| far),
        ("encrypted", lend(1, 64), 1.0, |far| far.encrypt_pages(true).link(LinkChoice::Socket)),
        ("in-thread", lend(1, 64), 1.0, |far| far.fault_path(FaultPath::InThread)),
        ("two shards", lend(1, 64), 1.0, |far| far.shards(2).local(8 * MIB)),
        ("two copies", lend(2, 64), 2.0, |far| far.replicas(2).link(LinkChoice::Socket)),
        ("in parts", lend(3, 64), 1.5, |far| far.erasure(Erasure::new(2, 1).unwrap())),
        ("packed", lend(1, 64), 1.0, |far| far.tier(TierPolicy::Packed)),
    ];
    for (name, lenders, redundant, build) in
        kinds.into_iter().filter(|kind| in_thread || kind.0 != "in-thread")
    {
        let far = build(far(&lenders)).start().unwrap();
        let mut words = fill(&far);
        let keeps = |page: usize| page.is_multiple_of(8);
        let before = used(&lenders);
        discard(&far, &mut words, keeps);
        // Nothing of what is left is dense: three MiB, in twenty slabs.
        assert!(used(&lenders) > before / 2, "{name}: {} of {before}", used(&lenders));
        until(&format!("{name}: it went back"), || used(&lenders) as f64 <= 8.0 * redundant * MIB as f64);
        println!("{name}: {} of {before} bytes are left", used(&lenders));
        check(&words, keeps);
        let stats = far.stats();
        assert!(stats.pages_collected > 200 && stats.wrong_pages == 0, "{name}: {stats:?}");
        // And it is far memory as any other.
        words.clear();
        words.extend((0..PAGES).flat_map(page_words));
        check(&words, |_| true);
    }
}

#[test]
fn pages_are_used_while_they_are_moved() {
    let Some(_alone) = alone() else { return };
    for (name, path) in ["thread", "in-thread"].into_iter().zip(fault_paths()) {
        let lenders = lend(1, 64);
        let far = far(&lenders).fault_path(path).link(LinkChoice::Socket).start().unwrap();
        let mut words = fill(&far);
        // A third, in a pattern without runs.
        let keeps = |page: usize| page.is_multiple_of(5) || page.is_multiple_of(7);
        discard(&far, &mut words, keeps);
        let before = used(&lenders);
        let (first, end) = (words.as_ptr().align_offset(4096), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let (end, slice) = (&end, &mut words[first..]);
            // Each thread has every fourth page; what it writes is undone by the end.
            let mut parts: Vec<Vec<&mut [u64]>> = (0..4).map(|_| Vec::new()).collect();
            for (page, part) in slice.chunks_exact_mut(PAGE_WORDS).enumerate() {
                if keeps(page) && page < PAGES - 1 {
                    parts[page % 4].push(part);
                }
            }
            for (thread, mut part) in parts.into_iter().enumerate() {
                scope.spawn(move || {
                    let mut random = Random::new(thread as u64 + 99);
                    while !end.load(Ordering::Relaxed) {
                        let page = random.next() as usize % part.len();
                        let word = random.next() as usize % PAGE_WORDS;
                        if random.next().is_multiple_of(4) {
                            part[page][word] ^= 1;
                            let other = (page + part.len() / 2) % part.len();
                            std::hint::black_box(part[other][word]);
                            part[page][word] ^= 1;
                        }
                        std::hint::black_box(part[page][word]);
                    }
                });
            }
            let went_back = Instant::now() + Duration::from_secs(20);
            while used(&lenders) > before * 2 / 3 && Instant::now() < went_back {
                std::thread::sleep(Duration::from_millis(20));
            }
            end.store(true, Ordering::Relaxed);
        });
        assert!(used(&lenders) <= before * 2 / 3, "{name}: {} of {before}", used(&lenders));
        check(&words, keeps);
        assert_eq!(far.stats().wrong_pages, 0);
    }
}

#[test]
fn a_lender_that_nobody_can_replace_gets_what_is_free() {
    let Some(_alone) = alone() else { return };
    let lenders = lend(1, 64);
    let far = far(&lenders).link(LinkChoice::Socket).start().unwrap();
    let mut words = fill(&far);
    // Three of eight: too little to be worth it, unless it is asked for.
    let keeps = |page: usize| page % 8 < 5;
    discard(&far, &mut words, keeps);
    std::thread::sleep(Duration::from_secs(2));
    let before = used(&lenders);
    assert_eq!(far.stats().pages_collected, 0);
    lenders[0].stop.stop();
    until("it has something back", || used(&lenders) + 3 * MIB <= before);
    check(&words, keeps);
}

/// How often the pagers of this process have slept so far.
fn sleeps() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let read =
        |task: &std::fs::DirEntry, name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
    let pagers = tasks.filter(|task| read(task, "comm").trim() == "netvm-pager");
    let sleeps = pagers.filter_map(|task| {
        let status = read(&task, "status");
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse::<u64>().ok()
    });
    sleeps.sum()
}

#[test]
fn who_has_nothing_to_move_sleeps() {
    let Some(_alone) = alone() else { return };
    let lenders = lend(1, 64);
    for path in fault_paths() {
        let far = far(&lenders).fault_path(path).start().unwrap();
        let mut words = fill(&far);
        // Here and there; in the middle of what that begins, all the rest.
        discard(&far, &mut words, |page| page.is_multiple_of(8));
        until("it begins", || far.stats().pages_collected > 0);
        drop(words);
        std::thread::sleep(Duration::from_secs(3));
        let before = sleeps();
        std::thread::sleep(Duration::from_secs(1));
        // Those of other tests that share a budget look twenty times a second.
        let slept = sleeps() - before;
        assert!(slept < 250, "{slept} times in a second");
    }
}

#[test]
fn a_lender_is_lost_while_pages_are_moved() {
    let Some(_alone) = alone() else { return };
    for (lost, redundancy) in [(0, "copies"), (1, "copies"), (2, "copies"), (0, "parts"), (2, "parts")] {
        let count = if redundancy == "copies" { 3 } else { 4 };
        let mut lenders: Vec<_> = (0..count).map(|_| Some(Serving::new(64))).collect();
        let delay_ms = Arc::new(AtomicU64::new(0));
        let through = lenders.iter().flatten().map(|lender| delayed(&lender.address, Arc::clone(&delay_ms)));
        let far = FarMemory::builder().lenders(through).local(4 * MIB).area(1 << 34).tier(TierPolicy::Lender);
        let far = match redundancy {
            "copies" => far.replicas(2),
            _ => far.erasure(Erasure::new(2, 1).unwrap()),
        };
        let far = far.link(LinkChoice::Socket).start().unwrap();
        let mut words = fill(&far);
        let keeps = |page: usize| page.is_multiple_of(5) || page % 7 == 3;
        discard(&far, &mut words, keeps);
        // So that it takes a while.
        delay_ms.store(5, Ordering::Relaxed);
        until("it begins", || far.stats().pages_collected > 0);
        let begun = far.stats().pages_collected;
        lenders[lost] = None;
        until("it is lost", || far.stats().lenders_lost == 1);
        println!("{redundancy}, lender {lost}: {begun} pages had been moved");
        delay_ms.store(0, Ordering::Relaxed);
        check(&words, keeps);
        until("all are protected", || far.stats().pages_unprotected == 0);
        check(&words, keeps);
        assert_eq!(far.stats().wrong_pages, 0, "{:?}", far.stats());
        // Pagers have no end.
        std::mem::forget(lenders);
    }
}

#[test]
fn a_slow_lender_is_waited_for() {
    let Some(_alone) = alone() else { return };
    let lenders = lend(1, 64);
    let delay_ms = Arc::new(AtomicU64::new(0));
    let through = delayed(&lenders[0].address, Arc::clone(&delay_ms));
    let far = FarMemory::builder().lender(through).local(4 * MIB).area(1 << 34).tier(TierPolicy::Lender);
    let far = far.link(LinkChoice::Socket).start().unwrap();
    let mut words = fill(&far);
    let keeps = |page: usize| page.is_multiple_of(16);
    discard(&far, &mut words, keeps);
    delay_ms.store(300, Ordering::Relaxed);
    until("it went back", || used(&lenders) <= 6 * MIB);
    delay_ms.store(0, Ordering::Relaxed);
    check(&words, keeps);
}
