//! When the pager's thread looks after what threads that fault have left behind: soon, and never while others do it.

use super::*;
use crate::lender::{Lender, LenderConfig, LinkChoice, StopFlag};
use crate::pager::{FaultPath, LOCAL_BYTES_MIN, PagerConfig, TierPolicy};
use netvm_sys::shared::SharedSlice;

const BYTES: usize = 4 * LOCAL_BYTES_MIN as usize;

/// Sleeps are counted of all pagers of the process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn start(link: LinkChoice) -> Option<Arc<Pager>> {
    if !netvm_sys::uffd::can_move() {
        eprintln!("what_is_left_over: skipped (needs userfaultfd of Linux 6.8)");
        return None;
    }
    let config = LenderConfig { size_bytes: 64 << 20, slab_bytes: 1 << 20, ..LenderConfig::default() };
    let mut lender = Lender::bind(config).unwrap();
    let lenders = vec![lender.addresses().remove(0)];
    let stop = StopFlag::new().unwrap();
    std::thread::spawn(move || lender.run(&stop).unwrap());
    let pager = Pager::start(PagerConfig {
        local_bytes: LOCAL_BYTES_MIN,
        lenders,
        area_bytes: 1 << 30,
        link,
        fault_path: FaultPath::InThread,
        tier: TierPolicy::Lender,
        ..PagerConfig::default()
    });
    Some(pager.unwrap())
}

/// Reads a word of each of `pages`.
fn touch(memory: SharedSlice, pages: std::ops::Range<usize>) {
    for page in pages {
        let mut word = [0; 8];
        memory.read_into(page % (BYTES / PAGE_BYTES) * PAGE_BYTES, &mut word).unwrap();
        assert_eq!(usize::from_le_bytes(word), page % (BYTES / PAGE_BYTES) + 1);
    }
}

/// How often the pager's thread has slept.
fn sleeps() -> u64 {
    let threads =
        std::fs::read_dir("/proc/self/task").unwrap().filter_map(|thread| Some(thread.ok()?.path()));
    // Those of other tests may end at any time.
    let is_ours = |path: &std::path::PathBuf| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name == "netvm-pager\n")
    };
    let status = |path: std::path::PathBuf| std::fs::read_to_string(path.join("status")).unwrap();
    let of = |status: String| {
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse::<u64>().unwrap()
    };
    threads.filter(is_ours).map(|path| of(status(path))).sum()
}

#[test]
fn what_is_left_over_is_looked_after_soon_and_not_while_others_do() {
    let _alone = alone();
    let Some(pager) = start(LinkChoice::Socket) else { return };
    let address = pager.area().start;
    pager.map(address, BYTES, libc::PROT_READ | libc::PROT_WRITE).unwrap();
    let memory = pager.memory(address, BYTES).unwrap();
    for page in 0..BYTES / PAGE_BYTES {
        memory.write_from(page * PAGE_BYTES, &(page + 1).to_le_bytes()).unwrap();
    }
    let shared = pager.shards[0].in_thread.clone().unwrap();
    // Looks without setting the clock.
    let is_under_way = || without_signals(|| shared.with_turn(|_| ()).1);

    // A thread faults, asks for something ahead, and then nobody does anything.
    let (mut begun, mut forgotten) = (0, 0);
    for round in 0..40 {
        let page = round * 331 % (BYTES / PAGE_BYTES - 64);
        touch(memory, page..page + 1);
        pager.will_need(address + (page + 8) * PAGE_BYTES, 32 * PAGE_BYTES);
        if is_under_way() {
            begun += 1;
            std::thread::sleep(10 * LEFT_OVER);
            forgotten += u32::from(is_under_way());
        }
    }
    assert!(begun >= 5, "only {begun} rounds left something behind");
    assert!(forgotten * 2 < begun, "{forgotten} of {begun} were still under way after 10 ms");

    // One thread faults all the time, and always leaves something behind.
    let mut least = u64::MAX;
    let mut page = 0;
    for _ in 0..5 {
        let (before, start) = (sleeps(), Instant::now());
        while start.elapsed() < 100 * LEFT_OVER {
            touch(memory, page..page + 200);
            page += 200;
        }
        least = least.min((sleeps() - before) * 100 / start.elapsed().as_millis() as u64);
    }
    assert!(least < 50, "{least} looks in 100 ms");
}

/// Threads that fetch their pages by themselves leave nothing behind, and each sets the clock back.
#[test]
fn however_busy_others_are_the_pagers_thread_looks_now_and_then() {
    let _alone = alone();
    let Some(pager) = start(LinkChoice::Shm) else { return };
    let address = pager.area().start;
    pager.map(address, BYTES, libc::PROT_READ | libc::PROT_WRITE).unwrap();
    let memory = pager.memory(address, BYTES).unwrap();
    for page in 0..BYTES / PAGE_BYTES {
        memory.write_from(page * PAGE_BYTES, &(page + 1).to_le_bytes()).unwrap();
    }
    // It waits for nothing any more.
    std::thread::sleep(4 * TICK);
    let shared = pager.shards[0].in_thread.clone().unwrap();
    let (before, start, errands) = (sleeps(), Instant::now(), pager.stats().read_at_once);
    let mut pages = scattered(9);
    let mut longest = Duration::ZERO;
    while start.elapsed() < 20 * TICK {
        pages.by_ref().take(20).for_each(|page| touch(memory, page..page + 1));
        let looked = Duration::from_nanos(shared.now_ns() - shared.looked_ns.load(Ordering::Relaxed));
        longest = longest.max(looked.min(start.elapsed()));
    }
    let looks = sleeps() - before;
    println!("{looks} looks in a second, the longest pause {longest:?}");
    assert!(pager.stats().read_at_once > errands + 1000, "{:?}", pager.stats());
    assert!(longest < 6 * TICK, "nobody looked for {longest:?}");
}

/// Number of a page that has been filled with `round`.
fn number(page: usize, round: usize) -> usize {
    page << 16 | round | 1
}

fn left_together(shared: &InThread) -> u64 {
    without_signals(|| shared.with_turn(|engine| engine.stats.left_together).0)
}

/// Pages in random order, which is no stream.
fn scattered(seed: usize) -> impl Iterator<Item = usize> {
    let mut random = seed as u64 | 1;
    std::iter::repeat_with(move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 20) as usize % (BYTES / PAGE_BYTES)
    })
}

#[test]
fn pages_that_nobody_writes_to_leave_together_and_writes_are_not_lost() {
    let _alone = alone();
    let Some(pager) = start(LinkChoice::Socket) else { return };
    let shared = pager.shards[0].in_thread.clone().unwrap();
    if !without_signals(|| shared.with_turn(|engine| engine.paged.takes_together()).0) {
        eprintln!("pages_that_nobody_writes_to: skipped (this kernel cannot take pages together)");
        return;
    }
    let address = pager.area().start;
    pager.map(address, BYTES, libc::PROT_READ | libc::PROT_WRITE).unwrap();
    let memory = pager.memory(address, BYTES).unwrap();
    let (pages, frames) = (BYTES / PAGE_BYTES, LOCAL_BYTES_MIN / PAGE_BYTES as u64);
    let read = |page: usize, word: usize| {
        let mut bytes = [0; 8];
        memory.read_into(page * PAGE_BYTES + word * 8, &mut bytes).unwrap();
        usize::from_le_bytes(bytes)
    };
    let write = |page: usize, word: usize, value: usize| {
        memory.write_from(page * PAGE_BYTES + word * 8, &value.to_le_bytes()).unwrap();
    };
    (0..pages).for_each(|page| write(page, 0, number(page, 0)));

    // Two threads only read.
    std::thread::scope(|scope| {
        for seed in [3, 4] {
            scope.spawn(move || {
                for page in scattered(seed).take(12_000) {
                    assert_eq!(read(page, 0), number(page, 0), "page {page}");
                }
            });
        }
    });
    let (together, stats) = (left_together(&shared), pager.stats());
    assert!(together > stats.remote_reads / 2, "{together} of {} left together", stats.remote_reads);
    assert!(stats.local_frames_peak <= frames, "{stats:?}");

    // Each of four threads has a word of every page, reads it, and now and then writes it afterwards: to a protected page.
    std::thread::scope(|scope| {
        for thread in 1..5 {
            scope.spawn(move || {
                let mut model = vec![0; pages];
                for (step, page) in scattered(thread * 77).take(12_000).enumerate() {
                    assert_eq!(read(page, thread), model[page], "page {page} of thread {thread}");
                    if step % 16 == 0 {
                        model[page] = number(page, step);
                        write(page, thread, model[page]);
                    }
                }
                for (page, &value) in model.iter().enumerate() {
                    assert_eq!(read(page, thread), value, "page {page} of thread {thread}");
                }
            });
        }
    });
    let (after, stats) = (left_together(&shared), pager.stats());
    assert!(after > together + 2000, "only {} more left together", after - together);
    assert!(stats.local_frames_peak <= frames, "{stats:?}");
}
