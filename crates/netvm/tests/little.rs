//! Next to no local memory: small shares of a run, pins, packed pages and large units beside each other. Whatever an access needs at once, it gets.

mod common;

use common::mapped::{mapped, set_word, word};
use common::{Random, alone, alone_in_thread, delayed, fault_paths, lend};
use netvm::lender::LinkChoice;
use netvm::pager::{FaultPath, LOCAL_BYTES_MIN, Pager, PagerConfig, STRIPE_BYTES, TierPolicy};
use netvm::runfile::{RunFile, RunParams};
use netvm_sys::shared::SharedSlice;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
/// Frames of the least local memory there can be.
const FRAMES: usize = LOCAL_BYTES_MIN as usize / PAGE;

fn start(local_bytes: u64, change: impl FnOnce(&mut PagerConfig)) -> Arc<Pager> {
    let lent = lend(128 << 20);
    let mut config = PagerConfig {
        local_bytes,
        lenders: vec![lent.address().to_owned()],
        area_bytes: 1 << 34,
        tier: TierPolicy::Lender,
        prefetch_pages_max: 0,
        ..PagerConfig::default()
    };
    change(&mut config);
    Pager::start(config).unwrap()
}

/// Ends the process when it is kept for too long: who waits for a page cannot be ended otherwise.
fn watched(what: &'static str) -> Sender<()> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        if receiver.recv_timeout(Duration::from_secs(60)) == Err(RecvTimeoutError::Timeout) {
            eprintln!("this does not end: {what}");
            std::process::exit(3);
        }
    });
    sender
}

/// Of a page that shrinks to a half.
fn contents(page: usize) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    let mut noise = Random::new(page as u64 + 1);
    for (index, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = if index % 4 == 0 { noise.next().to_le_bytes() } else { [index as u8 & 3; 8] };
    }
    bytes
}

fn fill(memory: SharedSlice, pages: usize) {
    (0..pages).for_each(|page| memory.write_from(page * PAGE, &contents(page)).unwrap());
}

fn first_word(page: usize) -> u64 {
    u64::from_le_bytes(contents(page)[..8].try_into().unwrap())
}

fn look(word: u64) {
    std::hint::black_box(word);
}

/// A word that lies half on this page and half on the one before, by one access.
fn across(pager: &Pager, page: usize) {
    let address = pager.area().start + page * PAGE - 4;
    // SAFETY: far memory of this test, which nobody writes to meanwhile.
    let word = unsafe { (address as *const u64).read_unaligned() }.to_le_bytes();
    assert_eq!(
        (&word[..4], &word[4..]),
        (&contents(page - 1)[PAGE - 4..], &contents(page)[..4]),
        "page {page}"
    );
}

/// So many processes of a run, of which this one has its share of `frames`, the others the rest.
struct Run {
    run: Arc<RunFile>,
    others: Vec<Child>,
}

impl Run {
    fn new(frames: u64, processes: u64, unit: usize) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("netvm-little-{}-{count}", std::process::id()));
        let (budget_bytes, page_bytes) = (frames * PAGE as u64, unit as u64);
        let params = RunParams { budget_bytes, page_bytes, ..RunParams::default() };
        let run = RunFile::create(&path, &params).unwrap();
        let _ = std::fs::remove_file(&path);
        let others: Vec<_> =
            (1..processes).map(|_| Command::new("sleep").arg("300").spawn().unwrap()).collect();
        for other in &others {
            assert_eq!(run.join(other.id()).unwrap().grow(frames / processes), frames / processes);
        }
        Self { run, others }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        for other in &mut self.others {
            let _ = other.kill();
            let _ = other.wait();
        }
    }
}

#[test]
fn words_across_pages_in_small_shares_of_a_run() {
    let Some(_alone) = alone() else { return };
    for processes in [16, 40, 100] {
        let run = Run::new(FRAMES as u64, processes, PAGE);
        let pager = start(LOCAL_BYTES_MIN, |config| config.run = Some(Arc::clone(&run.run)));
        let _watch = watched("words across pages in a run");
        let pages = 1000;
        fill(mapped(&pager, 0, pages * PAGE), pages);
        let before = pager.stats().faults;
        let words = (1..pages).step_by(3);
        let count = words.len() as u64;
        words.for_each(|page| across(&pager, page));
        let faults = pager.stats().faults - before;
        println!("{processes} processes: {faults} faults for {count} words on two pages each");
        assert!(faults <= 2 * count + 100, "{processes} processes: {faults} faults for {count} words");
    }
}

#[test]
fn memory_becomes_local_in_small_shares_of_a_run() {
    let Some(_alone) = alone() else { return };
    for processes in [40, 60, 100] {
        let run = Run::new(FRAMES as u64, processes, PAGE);
        let pager = start(LOCAL_BYTES_MIN, |config| config.run = Some(Arc::clone(&run.run)));
        let _watch = watched("make_local in a run");
        let pages = 1000;
        let memory = mapped(&pager, 0, pages * PAGE);
        fill(memory, pages);
        pager
            .make_local(pager.area().start + 100 * PAGE, 200 * PAGE, libc::PROT_READ | libc::PROT_WRITE)
            .unwrap();
        (0..pages).for_each(|page| assert_eq!(word(memory, page * 512), first_word(page), "page {page}"));
    }
}

/// Units of which the run has four, for six processes.
#[test]
fn words_across_units_in_small_shares_of_a_run() {
    let Some(_alone) = alone() else { return };
    let unit = 2 << 20;
    let (frames, units, unit_pages) = (4 * (unit / PAGE) as u64, 8, unit / PAGE);
    let run = Run::new(frames, 6, unit);
    let pager = start(frames * PAGE as u64, |config| {
        (config.run, config.page_bytes) = (Some(Arc::clone(&run.run)), unit);
    });
    let _watch = watched("words across units in a run");
    fill(mapped(&pager, 0, units * unit), units * unit_pages);
    for round in 0..10 {
        for at in 1..units {
            across(&pager, if round % 2 == 0 { at } else { units - at } * unit_pages);
        }
    }
}

/// Units of 1 MiB, of which local memory has four, and three are pinned.
#[test]
fn words_across_units_beside_pins() {
    let Some(_alone) = alone() else { return };
    let (unit, units, pinned) = (1 << 20, 16, 3);
    for fault_path in fault_paths() {
        let pager =
            start(4 * unit as u64, |config| (config.fault_path, config.page_bytes) = (fault_path, unit));
        let _watch = watched("words across units");
        fill(mapped(&pager, 0, units * unit), units * unit / PAGE);
        pager.pin(pager.area().start, pinned * unit).unwrap();
        for round in 0..10 {
            for at in pinned + 1..units {
                across(&pager, if round % 2 == 0 { at } else { units + pinned - at } * unit / PAGE);
            }
        }
    }
}

/// Of two shards one has pinned three quarters of the local memory, the other reads words across units.
#[test]
fn words_across_units_in_another_shard_than_pins() {
    let Some(_alone) = alone() else { return };
    let unit = 1 << 20;
    for fault_path in fault_paths() {
        let pager = start(8 * unit as u64, |config| {
            (config.fault_path, config.page_bytes, config.shards) = (fault_path, unit, 2);
        });
        let _watch = watched("words in another shard");
        let pages = 2 * STRIPE_BYTES / PAGE;
        fill(mapped(&pager, 0, pages * PAGE), pages);
        pager.pin(pager.area().start, 6 * unit).unwrap();
        for round in 0..10 {
            for at in 1..16 {
                let at = STRIPE_BYTES + if round % 2 == 0 { at } else { 16 - at } * unit;
                across(&pager, at / PAGE);
            }
        }
    }
}

#[test]
fn packed_pages_leave_room_for_others_beside_pins() {
    let Some(_alone) = alone() else { return };
    let paths = fault_paths();
    for (fault_path, quarters) in paths.iter().flat_map(|&path| [(path, 1), (path, 3)]) {
        let pager = start(LOCAL_BYTES_MIN, |config| {
            (config.fault_path, config.tier) = (fault_path, TierPolicy::Packed);
        });
        let _watch = watched("accesses beside pins and packed pages");
        let (pages, pins) = (4096, FRAMES / 4 * quarters);
        let memory = mapped(&pager, 0, pages * PAGE);
        fill(memory, pages);
        pager.pin(pager.area().start, pins * PAGE).unwrap();
        let mut random = Random::new(5);
        for _ in 0..10_000 {
            let page = pins + random.next() as usize % (pages - pins);
            assert_eq!(word(memory, page * 512), first_word(page), "page {page}");
        }
        (pins + 1..pages).step_by(7).for_each(|page| across(&pager, page));
        let before = pager.stats().faults;
        // 64 pages, for which there is room.
        (0..20_000).map(|turn| word(memory, (pages - 64 + turn % 64) * 512)).for_each(look);
        let faults = pager.stats().faults - before;
        assert!(faults < 1000, "{fault_path}, {quarters} quarters pinned: {faults} faults for 64 pages");
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        pager.make_local(pager.area().start + (pages - 64) * PAGE, 32 * PAGE, protection).unwrap();
        (0..pages).for_each(|page| assert_eq!(word(memory, page * 512), first_word(page), "page {page}"));
    }
}

/// Packing was chosen, as the lender takes a while, and its pages have most of the memory when three quarters of it are wanted.
#[test]
fn pins_take_memory_from_packed_pages() {
    let Some(_alone) = alone_in_thread() else { return };
    let lent = lend(128 << 20);
    let delay_ms = Arc::new(AtomicU64::new(0));
    let address = delayed(lent.address(), Arc::clone(&delay_ms));
    let pager = start(LOCAL_BYTES_MIN, |config| {
        (config.lenders, config.link) = (vec![address], LinkChoice::Socket);
        (config.fault_path, config.tier) = (FaultPath::InThread, TierPolicy::Auto);
    });
    let _watch = watched("pins beside packed pages");
    let (pages, pins) = (2600, FRAMES / 4 * 3);
    let memory = mapped(&pager, 0, pages * PAGE);
    fill(memory, pages);
    delay_ms.store(1, Ordering::Relaxed);
    let (mut random, since) = (Random::new(5), Instant::now());
    while pager.stats().pool_frames < 600 && since.elapsed() < Duration::from_secs(20) {
        (0..500).map(|_| word(memory, random.next() as usize % pages * 512)).for_each(look);
    }
    println!("{} frames with packed pages after {:?}", pager.stats().pool_frames, since.elapsed());
    pager.pin(pager.area().start, pins * PAGE).unwrap();
    (0..pins).for_each(|page| assert_eq!(word(memory, page * 512), first_word(page), "page {page}"));
}

/// The pages that would leave first are not there: the program has dropped them behind the pager's back.
#[test]
fn a_smaller_budget_holds_where_pages_were_dropped() {
    let Some(_alone) = alone() else { return };
    for fault_path in fault_paths() {
        let pager = start(16 << 20, |config| {
            (config.fault_path, config.local_bytes_max) = (fault_path, 16 << 20);
        });
        let (pages, dropped) = (3000, 200);
        let memory = mapped(&pager, 0, pages * PAGE);
        (0..pages).for_each(|page| set_word(memory, page * 512, page as u64 + 1));
        let start = pager.area().start as *mut libc::c_void;
        // SAFETY: this test's own far memory.
        assert_eq!(unsafe { libc::madvise(start, dropped * PAGE, libc::MADV_DONTNEED) }, 0);
        pager.set_local_bytes(LOCAL_BYTES_MIN).unwrap();
        let frames = pager.stats().local_frames;
        assert!(frames <= FRAMES as u64, "{fault_path}: {frames} frames");
        (dropped..pages).for_each(|page| assert_eq!(word(memory, page * 512), page as u64 + 1));
    }
}

/// A library of the program locks some of its memory. (In-thread that needs pins: it is a system call.)
#[test]
fn locked_pages_stay() {
    let Some(_alone) = alone() else { return };
    let pager = start(LOCAL_BYTES_MIN, |config| config.fault_path = FaultPath::Thread);
    let pages = 4096;
    let memory = mapped(&pager, 0, pages * PAGE);
    (0..pages).for_each(|page| set_word(memory, page * 512, page as u64 + 1));
    let start = (pager.area().start + 100 * PAGE) as *const libc::c_void;
    // SAFETY: this test's own far memory.
    let locked = unsafe { libc::mlock(start, 8 * PAGE) };
    assert_eq!(locked, 0, "{}", std::io::Error::last_os_error());
    for _ in 0..2 {
        (0..pages).for_each(|page| assert_eq!(word(memory, page * 512), page as u64 + 1));
    }
    // SAFETY: as before.
    assert_eq!(unsafe { libc::munlock(start, 8 * PAGE) }, 0);
}

/// Whether memory that is not far may be locked, so much of it.
fn may_lock(bytes: usize) -> bool {
    let memory = vec![1u8; bytes];
    // SAFETY: memory of ours, which changes nothing in it.
    unsafe { libc::mlock(memory.as_ptr().cast(), bytes) == 0 }
}

/// More of them than a smaller budget has room for: the call ends all the same, and holds when they are not locked any more.
#[test]
fn a_smaller_budget_does_not_wait_for_locked_pages() {
    let Some(_alone) = alone() else { return };
    let pager = start(16 << 20, |config| {
        (config.fault_path, config.local_bytes_max) = (FaultPath::Thread, 16 << 20);
    });
    let (pages, kept) = (3500, 2500);
    let memory = mapped(&pager, 0, pages * PAGE);
    (0..pages).for_each(|page| set_word(memory, page * 512, page as u64 + 1));
    let start = pager.area().start as *const libc::c_void;
    // SAFETY: this test's own far memory.
    let locked = unsafe { libc::mlock(start, kept * PAGE) };
    let error = std::io::Error::last_os_error();
    if locked < 0 && !may_lock(kept * PAGE) {
        println!("skipped (mlock of {kept} pages: {error})");
        return;
    }
    assert_eq!(locked, 0, "{error}");
    let _watch = watched("a smaller budget");
    pager.set_local_bytes(LOCAL_BYTES_MIN).unwrap();
    let frames = pager.stats().local_frames;
    assert!((kept as u64..kept as u64 + 600).contains(&frames), "{frames} frames");
    // SAFETY: as before.
    assert_eq!(unsafe { libc::munlock(start, kept * PAGE) }, 0);
    pager.set_local_bytes(LOCAL_BYTES_MIN).unwrap();
    let frames = pager.stats().local_frames;
    assert!(frames <= FRAMES as u64, "{frames} frames");
    (0..pages).for_each(|page| assert_eq!(word(memory, page * 512), page as u64 + 1));
}

#[test]
fn ranges_that_overlap_are_not_moved() {
    let Some(_alone) = alone() else { return };
    let pager = start(LOCAL_BYTES_MIN, |_| {});
    let memory = mapped(&pager, 0, 64 * PAGE);
    (0..32).for_each(|page| set_word(memory, page * 512, page as u64 + 1));
    let start = pager.area().start;
    for to in [start, start + 4 * PAGE, start + 31 * PAGE] {
        let refused = pager.relocate(start, to, 32 * PAGE).unwrap_err();
        assert!(refused.to_string().contains("onto itself"), "{refused}");
    }
    pager.relocate(start, start + 32 * PAGE, 32 * PAGE).unwrap();
    (0..32).for_each(|page| assert_eq!(word(memory, (page + 32) * 512), page as u64 + 1));
}
