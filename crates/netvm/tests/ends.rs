//! Far memory that nobody has any more: its pager's thread, connections, local memory and addresses go with it.

mod common;

use common::mapped::{mapped, start, word};
use common::words::{check, words};
use common::{Lent, alone, delayed, fault_paths, has_in_thread, lend};
use netvm::far::{FarBuilder, FarHeap, FarMemory, FarVec, FaultPath};
use netvm::lender::{LinkChoice, status};
use netvm::memory::Memory;
use netvm::node::{Node, Rights};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Words of 6 MiB, where 4 are local.
const WORDS: usize = 768 << 10;

fn builder(lent: &Lent) -> FarBuilder {
    FarMemory::builder().local(4 * MIB).lender(lent.address()).area(1 << 36)
}

fn pagers() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.trim_end() == "netvm-pager").count()
}

/// Those of tests before this one, which they leave, or which are about to end.
fn others() -> usize {
    let (mut count, mut same) = (pagers(), 0);
    while same < 10 {
        std::thread::sleep(Duration::from_millis(10));
        let now = pagers();
        same = if now == count { same + 1 } else { 0 };
        count = now;
    }
    count
}

fn borrowers(lent: &Lent) -> usize {
    status(lent.address()).unwrap().borrowers.len()
}

/// The lender, which is in this process, has no memory that it does not lend.
fn is_cleared(lent: &Lent) -> bool {
    status(lent.address()).unwrap().resident_bytes == 0
}

/// Descriptors, and MiB of addresses and of memory.
fn held() -> [u64; 3] {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages = |field| statm.split(' ').nth(field).unwrap().parse::<u64>().unwrap();
    [open, pages(0) >> 8, pages(1) >> 8]
}

fn settles(what: &str, is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(10), "{what}: {} pagers, {:?}", pagers(), held());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A child of a fork that ends after `run`, with 0 if that succeeds.
fn forked(run: impl FnOnce()) -> i32 {
    // SAFETY: the child takes no locks that threads which it does not have may hold, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let succeeded = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_ok();
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(!succeeded)) };
    }
    child
}

fn status_of(child: i32) -> i32 {
    let mut status = 0;
    // SAFETY: waits for our child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    status
}

#[test]
fn all_that_a_far_memory_had_is_given_back_each_time() {
    let Some(_alone) = alone() else { return };
    let others = others();
    let lent = lend(256 << 20);
    type Case = (&'static str, fn(FarBuilder) -> FarBuilder);
    let cases: [Case; 6] = [
        ("socket", |far| far.link(LinkChoice::Socket)),
        ("nearby", |far| far.link(LinkChoice::Auto)),
        ("spin", |far| far.fault_path(FaultPath::Spin)),
        ("in-thread", |far| far.fault_path(FaultPath::InThread)),
        ("shards", |far| far.shards(3).local(12 * MIB)),
        ("shards in-thread", |far| far.shards(3).local(12 * MIB).fault_path(FaultPath::InThread)),
    ];
    let in_thread = has_in_thread();
    for (name, change) in cases.into_iter().filter(|(name, _)| in_thread || !name.ends_with("in-thread")) {
        let mut before = None;
        for round in 0..12 {
            let far =
                change(builder(&lent)).start().unwrap_or_else(|error| panic!("{name}, {round}: {error}"));
            let all = [words(&far, WORDS, round), words(&far, WORDS, round + 1)];
            let small: Vec<FarVec<u8>> = (0..1000)
                .map(|_| {
                    let mut bytes = far.vec();
                    bytes.resize(100, 7);
                    bytes
                })
                .collect();
            // The collections keep it.
            drop(far);
            assert!(pagers() > others);
            check(&all[1], round + 1);
            check(&all[0], round);
            assert!(small.iter().all(|bytes| bytes.iter().all(|byte| *byte == 7)));
            drop(all);
            assert!(pagers() > others);
            drop(small);
            settles(name, || pagers() <= others && borrowers(&lent) == 0 && is_cleared(&lent));
            // What the lenders of this process have open changes by itself.
            if round == 4 {
                before = Some(held());
            }
        }
        let (before, after) = (before.unwrap(), held());
        println!("{name}: descriptors, MiB of addresses and memory {before:?}, then {after:?}");
        assert!(
            after[0] <= before[0] + 3 && after[1] <= before[1] + 64 && after[2] <= before[2] + 8,
            "{name}"
        );
    }
}

#[test]
fn what_is_still_used_keeps_it() {
    let Some(_alone) = alone() else { return };
    let others = others();
    let lent = lend(64 << 20);
    // A block whose address somebody has for ever.
    let far = builder(&lent).start().unwrap();
    let leaked = words(&far, WORDS, 1).leak();
    drop(far);
    check(leaked, 1);
    assert_eq!(pagers(), others + 1);
    // Blocks as malloc's, likewise.
    let far = builder(&lent).start().unwrap();
    let heap = FarHeap::new(&far);
    let block = heap.allocate(100, 16).unwrap();
    let pager = far.pager().clone();
    drop(far);
    drop(heap);
    pager.memory(block, 100).unwrap().fill(3);
    drop(pager);
    assert_eq!(pagers(), others + 2);
    // Memory that is to be exported, and a range, which are dropped.
    let far = builder(&lent).start().unwrap();
    let memory = Memory::from(far.range(1 << 20).unwrap());
    let range = far.range(1 << 20).unwrap();
    drop(far);
    range.shared().fill(1);
    drop(range);
    memory.shared().fill(1);
    assert_eq!(pagers(), others + 3);
    drop(memory);
    settles("memory", || pagers() == others + 2);
    // What the caller has mapped by addresses, and what it has made local.
    let pager = start(&lent, 4 * MIB, |_| ());
    let memory = mapped(&pager, 0, 8 << 20);
    memory.fill(9);
    drop(pager);
    assert_eq!((word(memory, (1 << 20) - 1) & 0xff, pagers()), (9, others + 3));
    let pager = start(&lent, 4 * MIB, |_| ());
    let memory = mapped(&pager, 0, 1 << 20);
    memory.fill(8);
    pager.make_local(pager.area().start, 1 << 20, 3).unwrap();
    drop(pager);
    assert_eq!((word(memory, 7) & 0xff, pagers()), (8, others + 4));
}

#[test]
fn it_ends_in_any_thread_and_while_its_lender_is_gone() {
    let Some(_alone) = alone() else { return };
    let before = pagers();
    let lent = lend(64 << 20);
    for path in fault_paths() {
        let far = builder(&lent).fault_path(path).start().unwrap();
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let far = far.clone();
                scope.spawn(move || check(&words(&far, WORDS, seed), seed));
            }
            drop(far);
        });
        settles("threads", || pagers() == before);
    }
    // Who answers nothing any more is not waited for for long.
    let delay_ms = Arc::new(AtomicU64::new(0));
    let far = FarMemory::builder().local(4 * MIB).lender(delayed(lent.address(), Arc::clone(&delay_ms)));
    let far = far.lender_timeout(Duration::from_millis(500)).start().unwrap();
    let all = words(&far, WORDS, 1);
    delay_ms.store(60_000, Ordering::Relaxed);
    drop(all);
    let began = Instant::now();
    drop(far);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    settles("a lender that has gone", || pagers() == before);
}

#[test]
fn what_the_program_has_open_stays_open() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let files = |count| -> Vec<_> { (0..count).map(|_| std::fs::File::open("/dev/null").unwrap()).collect() };
    for shards in [1, 3] {
        let far =
            builder(&lent).shards(shards).local(12 * MIB).fault_path(FaultPath::Thread).start().unwrap();
        // Numbers that the pager had at its start are the program's now.
        let files = files(64);
        drop(words(&far, WORDS, 1));
        drop(far);
        for file in &files {
            let there = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
            assert_eq!(there.unwrap().to_str(), Some("/dev/null"), "{shards}");
        }
    }
}

#[test]
fn a_child_of_a_fork_keeps_no_lender_busy() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    for path in fault_paths() {
        let far = builder(&lent).fault_path(path).link(LinkChoice::Socket).start().unwrap();
        let all = words(&far, WORDS, 1);
        let child = forked(|| std::thread::sleep(Duration::from_secs(60)));
        assert_eq!(borrowers(&lent), 1);
        drop((all, far));
        settles("the lender", || borrowers(&lent) == 0);
        // SAFETY: our child, which has not been waited for.
        unsafe { libc::kill(child, libc::SIGKILL) };
        assert!(libc::WIFSIGNALED(status_of(child)));
    }
}

#[test]
fn children_of_forks_and_pagers_that_could_not_start_end_nothing() {
    let Some(_alone) = alone() else { return };
    let before = pagers();
    let lent = lend(64 << 20);
    for path in fault_paths() {
        let far = builder(&lent).fault_path(path).start().unwrap();
        let all = words(&far, WORDS, 1);
        let mut both = Some((all, far));
        let child = forked(|| drop(both.take()));
        assert_eq!(status_of(child), 0);
        let Some((all, far)) = both else { unreachable!("only the child took it") };
        check(&all, 1);
        drop((all, far));
        settles("forks", || pagers() == before);
    }
    let refused = FarMemory::builder().local(4 * MIB).lender("127.0.0.1:1").start();
    assert!(refused.is_err());
    assert_eq!(pagers(), before);
}

/// Exports keep it, and the last one of them may be dropped by a node, or by its thread when a peer goes.
#[test]
fn a_node_may_have_it_last() {
    let Some(_alone) = alone() else { return };
    let others = others();
    let lent = lend(64 << 20);
    for path in fault_paths() {
        let (node, other) = (Node::new().unwrap(), Node::new().unwrap());
        let address = node.listen("127.0.0.1:0").unwrap();
        for round in 0..4 {
            let far = builder(&lent).fault_path(path).start().unwrap();
            let memory = Memory::from(far.range(6 << 20).unwrap());
            if path == FaultPath::InThread {
                assert!(node.export("far", memory, Rights::ReadWrite).is_err(), "system calls would fail");
                drop(far);
                settles("nobody exports", || pagers() <= others && borrowers(&lent) == 0);
                continue;
            }
            let key = node.export("far", memory, Rights::ReadWrite).unwrap();
            drop(far);
            let peer = other.connect(&address).unwrap();
            let region = peer.import("far", &key).unwrap();
            let bytes = vec![round as u8 + 1; 6 << 20];
            region.write(0, &bytes).unwrap();
            let mut back = vec![0; 6 << 20];
            region.read(0, &mut back).unwrap();
            assert!(back == bytes);
            assert_eq!(pagers(), others + 1);
            // While the peer still has it, and after it has gone.
            if round % 2 == 0 {
                drop((region, peer));
            }
            assert!(node.unexport("far").unwrap());
            settles("the export", || pagers() <= others && borrowers(&lent) == 0);
        }
    }
}

/// All of the program's memory is locked, also what it maps later.
#[test]
fn it_ends_where_all_memory_is_locked() {
    let Some(_alone) = alone() else { return };
    let lent = lend(64 << 20);
    let child = forked(|| {
        // SAFETY: changes no contents.
        if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) } < 0 {
            println!("skipped (mlockall is not permitted)");
            return;
        }
        for path in fault_paths() {
            for round in 0..3 {
                let far = builder(&lent).fault_path(path).start().unwrap();
                let all = words(&far, WORDS, round);
                check(&all, round);
                drop((all, far));
                settles("locked", || pagers() == 0);
            }
        }
    });
    assert_eq!(status_of(child), 0);
}
