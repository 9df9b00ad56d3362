//! Memory that is not there when peers use it: who waits, who does not, and that nothing is lost or reordered.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use netvm::channel::{Receiver, Sender, Shape};
use netvm::error::Error;
use netvm::memory::{Memory, RawRange};
use netvm::node::{ConnectOptions, LinkChoice, Node, Rights};
use netvm::notify::Notify;
use netvm::pager::{Pager, PagerConfig};
use netvm::region::{Peer, Region, WriteOptions};
use netvm::sync::{Kind, Lock, SyncError};
use netvm_core::wire::Status;
use netvm_sys::mapping::Mapping;
use netvm_sys::residency::{page_out, resident};
use netvm_sys::shared::SharedSlice;
use netvm_sys::uffd::{Fault, Userfault};

mod common;
use common::Random;

const PAGE: u64 = 4096;

/// Memory whose pages come in when the test says so.
struct Gated {
    mapping: Arc<Mapping>,
    gate: Arc<Gate>,
}

#[derive(Default)]
struct Gate {
    open: AtomicBool,
    /// Faults that have been reported.
    faults: AtomicU64,
}

impl Gate {
    fn set(&self, open: bool) {
        self.open.store(open, Ordering::Relaxed);
    }

    /// Until somebody waits for a page.
    fn wait_for_fault(&self, before: u64) {
        let start = Instant::now();
        while self.faults.load(Ordering::Relaxed) <= before {
            assert!(start.elapsed() < Duration::from_secs(20), "nobody has touched the page");
            std::thread::yield_now();
        }
    }
}

impl Gated {
    /// So many pages, of which the first `away` are missing, and the gate is closed.
    fn new(pages: usize, away: usize) -> Self {
        Self::with(Userfault::open(0).unwrap(), pages, away)
    }

    /// Only accesses of the program itself wait, those of the kernel fail.
    fn for_user_faults(pages: usize, away: usize) -> Self {
        Self::with(Userfault::open_for_user_faults().unwrap(), pages, away)
    }

    fn with(uffd: Userfault, pages: usize, away: usize) -> Self {
        let mapping = Arc::new(Mapping::anonymous(pages * 4096).unwrap());
        let rest = mapping.shared().sub(away * 4096, (pages - away) * 4096).unwrap();
        rest.fill(0);
        let start = mapping.shared().as_ptr().addr();
        // SAFETY: our own mapping, and the thread below serves its faults.
        unsafe { uffd.register(start, away * 4096, false) }.unwrap();
        let gate = Arc::new(Gate::default());
        let (serving, kept) = (Arc::clone(&gate), Arc::clone(&mapping));
        std::thread::spawn(move || {
            let (mut faults, mut waiting) = ([Fault::default(); 16], Vec::new());
            let _kept = kept;
            loop {
                let count = uffd.read_faults(&mut faults).unwrap();
                serving.faults.fetch_add(count as u64, Ordering::Relaxed);
                waiting.extend_from_slice(&faults[..count]);
                let open = serving.open.load(Ordering::Relaxed);
                for fault in waiting.drain(..if open { waiting.len() } else { 0 }) {
                    // SAFETY: a page of our mapping, which reads as zero.
                    match unsafe { uffd.zero(fault.address, 4096) } {
                        Err(error) if error.raw_os_error() != Some(libc::EEXIST) => panic!("{error}"),
                        _ => uffd.wake(fault.address, 4096).unwrap(),
                    }
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        Self { mapping, gate }
    }

    fn memory(&self) -> Memory {
        let shared = self.mapping.shared();
        // SAFETY: the mapping is kept until the process ends, by the thread that serves its faults.
        unsafe { RawRange::new(shared.as_ptr(), shared.len(), true) }.into()
    }

    fn shared(&self) -> SharedSlice {
        self.mapping.shared()
    }
}

/// A test that fails does not wait for ever.
impl Drop for Gated {
    fn drop(&mut self) {
        self.gate.set(true);
    }
}

struct World {
    server: Node,
    client: Node,
    address: String,
}

impl World {
    fn new() -> Self {
        let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
        let address = server.listen("127.0.0.1:0").unwrap();
        Self { server, client, address }
    }

    fn peer(&self, rails: usize) -> Peer {
        let options = ConnectOptions { rails: Some(rails), link: LinkChoice::Socket };
        self.client.connect_with(&self.address, &options).unwrap()
    }
}

#[test]
fn one_page_keeps_nobody_else_waiting() {
    let Some(_alone) = common::alone() else { return };
    for rails in [1, 3] {
        let world = World::new();
        let gated = Gated::new(256, 8);
        let (key, board) =
            world.server.export_notified("memory", gated.memory(), Rights::ReadWrite, 4).unwrap();
        let peer = world.peer(rails);
        let region = peer.import("memory", &key).unwrap();
        let other = world.peer(1).import("memory", &key).unwrap();
        // A few bytes, and a long write of which only one page is away.
        region.write(100, b"small and late").unwrap();
        region.write(7 * PAGE, &vec![9; 300_000]).unwrap();
        region.write_notify(0, b"x", Notify::Count { number: 0 }).unwrap();
        gated.gate.wait_for_fault(0);
        // Other pages, for as many writes as the window holds; and other sessions.
        let mut random = Random::new(rails as u64);
        for round in 0..1000u64 {
            let offset = 100 * PAGE + random.next() % (150 * PAGE);
            region.write(offset, &round.to_le_bytes()).unwrap();
            if round % 50 == 0 {
                let mut back = [0; 8];
                region.read(offset, &mut back).unwrap();
                assert_eq!(u64::from_le_bytes(back), round, "a read sees earlier writes");
                other.write(50 * PAGE, &round.to_le_bytes()).unwrap();
                other.flush().unwrap();
                assert_eq!(other.fetch_add(60 * PAGE, 1u64).unwrap(), round / 50);
            }
        }
        assert_eq!(board.test(0), 0, "notified before what came earlier was there");
        std::thread::scope(|scope| {
            let flush = scope.spawn(|| region.flush());
            let count = scope.spawn(|| region.fetch_add(200 * PAGE, 5u64));
            let read = scope.spawn(|| {
                let mut bytes = [0; 14];
                region.read(100, &mut bytes).map(|()| bytes)
            });
            std::thread::sleep(Duration::from_millis(20));
            assert!(!flush.is_finished() && !count.is_finished() && !read.is_finished());
            gated.gate.set(true);
            flush.join().unwrap().unwrap();
            count.join().unwrap().unwrap();
            assert_eq!(&read.join().unwrap().unwrap(), b"small and late");
        });
        assert!(board.wait(0, Some(Duration::from_secs(10))));
        assert_eq!(gated.shared().sub(7 * 4096, 300_000).unwrap().to_vec(), vec![9; 300_000]);
        assert_eq!(gated.shared().sub(100, 5).unwrap().to_vec(), b"small");
        assert!(world.server.unexport("memory").unwrap());
    }
}

#[test]
fn writes_of_one_page_stay_in_order() {
    let Some(_alone) = common::alone() else { return };
    let world = World::new();
    let gated = Gated::new(64, 8);
    let key = world.server.export("memory", gated.memory(), Rights::ReadWrite).unwrap();
    let tail = gated.memory().range(2000, 8000).unwrap();
    let tail = world.server.export("tail", tail, Rights::ReadWrite).unwrap();
    let peer = world.peer(1);
    let (region, tail) = (peer.import("memory", &key).unwrap(), peer.import("tail", &tail).unwrap());
    let mut model = vec![0; 8 * 4096];
    let mut random = Random::new(3);
    for round in 0..400u64 {
        let offset = (random.next() % 30_000) as usize;
        let len = 1 + (random.next() % 2700) as usize;
        let data: Vec<u8> = (0..len).map(|index| (round as usize + index) as u8).collect();
        let options = WriteOptions { fence: round % 7 == 0, notify: None };
        // By two names, of overlapping memory.
        if offset >= 2000 && offset + len < 10_000 {
            tail.write_with(offset as u64 - 2000, &data, options).unwrap();
        } else {
            region.write_with(offset as u64, &data, options).unwrap();
        }
        model[offset..offset + len].copy_from_slice(&data);
    }
    gated.gate.wait_for_fault(0);
    gated.gate.set(true);
    region.flush().unwrap();
    assert!(gated.shared().sub(0, 8 * 4096).unwrap().to_vec() == model);
}

#[test]
fn a_session_that_has_used_its_bounce_memory_waits_alone() {
    let Some(_alone) = common::alone() else { return };
    let world = World::new();
    let gated = Gated::new(1024, 512);
    let key = world.server.export("memory", gated.memory(), Rights::ReadWrite).unwrap();
    let region = world.peer(1).import("memory", &key).unwrap();
    let other = world.peer(1).import("memory", &key).unwrap();
    let data: Vec<u8> = (0..1 << 20).map(|index| (index / 999) as u8).collect();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for round in 0..24u64 {
                region.write(round % 2 * (1 << 20), &data)?;
            }
            region.flush()
        });
        gated.gate.wait_for_fault(0);
        std::thread::sleep(Duration::from_millis(200));
        assert!(!writer.is_finished(), "24 MiB fit nowhere");
        for round in 0..200u64 {
            other.write(600 * PAGE, &round.to_le_bytes()).unwrap();
            other.flush().unwrap();
        }
        gated.gate.set(true);
        writer.join().unwrap().unwrap();
    });
    assert!(gated.shared().sub(1 << 20, 1 << 20).unwrap().to_vec() == data);
}

#[test]
fn unexport_refuses_what_waits_for_a_page() {
    let Some(_alone) = common::alone() else { return };
    // The program's own, and memory that is kept by whoever uses it, for kernels and systems of all kinds.
    for (kept, limited) in [(false, false), (true, false), (true, true)] {
        let world = World::new();
        let gated = if limited { Gated::for_user_faults(64, 8) } else { Gated::new(64, 8) };
        let memory = if kept { Arc::clone(&gated.mapping).into() } else { gated.memory() };
        let key = world.server.export("memory", memory, Rights::ReadWrite).unwrap();
        let region = world.peer(1).import("memory", &key).unwrap();
        for page in 0..8 {
            region.write(page * PAGE, &[7; 100]).unwrap();
        }
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| region.read(5 * PAGE, &mut [0; 10]));
            gated.gate.wait_for_fault(0);
            let start = Instant::now();
            assert!(world.server.unexport("memory").unwrap());
            assert!(start.elapsed() < Duration::from_secs(5), "it has waited for the page");
            let refused = |result| matches!(result, Err(Error::Op { code: Status::NoHandle, .. }));
            assert!(refused(reading.join().unwrap()) && refused(region.flush()));
        });
        gated.gate.set(true);
        gated.shared().fill(0xEE);
        std::thread::sleep(Duration::from_millis(50));
        let bytes = gated.shared().to_vec();
        assert!(bytes.iter().all(|&byte| byte == 0xEE), "written after unexport had returned");
        assert!(!world.server.unexport("memory").unwrap());
    }
}

/// The kernel cannot bring the page in for us, and the program may free the memory: then it learns that it must not.
#[test]
fn unexport_tells_of_memory_that_is_still_used() {
    let Some(_alone) = common::alone() else { return };
    let world = World::new();
    let gated = Gated::for_user_faults(64, 8);
    let key = world.server.export("memory", gated.memory(), Rights::ReadWrite).unwrap();
    world.server.page_limit(Duration::from_millis(300));
    let region = world.peer(1).import("memory", &key).unwrap();
    region.write(0, b"in the middle").unwrap();
    gated.gate.wait_for_fault(0);
    for _ in 0..2 {
        let start = Instant::now();
        match world.server.unexport("memory") {
            Err(error @ Error::StillUsed { taken_back: true, .. }) => {
                assert!(error.to_string().contains("\"memory\"") && error.is_retryable(), "{error}");
            }
            other => panic!("{other:?}"),
        }
        assert!((300..5000).contains(&start.elapsed().as_millis()));
    }
    assert!(matches!(region.read(PAGE, &mut [0]), Err(Error::Op { code: Status::NoHandle, .. })));
    // The name is free, and the end of its first bearer is told with that of the second.
    world.server.export("memory", Node::memory(4096).unwrap(), Rights::Read).unwrap();
    assert!(matches!(world.server.unexport("memory"), Err(Error::StillUsed { .. })));
    gated.gate.set(true);
    assert!(world.server.unexport("memory").unwrap() && !world.server.unexport("memory").unwrap());
    gated.shared().fill(0xEE);
    std::thread::sleep(Duration::from_millis(50));
    assert!(gated.shared().to_vec().iter().all(|&byte| byte == 0xEE), "written after unexport had returned");
}

#[test]
fn a_page_that_never_comes_fails_what_waits_for_it() {
    let Some(_alone) = common::alone() else { return };
    let world = World::new();
    let gated = Gated::new(64, 40);
    let key = world.server.export("memory", gated.memory(), Rights::ReadWrite).unwrap();
    world.server.page_limit(Duration::from_secs(1));
    let away = |error: &Error| {
        let is_it = matches!(error, Error::Op { lender, code: Status::Away, .. } if *lender == world.address);
        is_it && error.to_string().contains("paged out")
    };
    for round in 0..8 {
        // More than there are threads, and behind each other.
        let regions: Vec<_> = (0..3).map(|_| world.peer(1).import("memory", &key).unwrap()).collect();
        let start = Instant::now();
        std::thread::scope(|scope| {
            for (index, region) in regions.iter().enumerate() {
                scope.spawn(move || {
                    let page = (index * 4) as u64;
                    for at in 0..4 {
                        region.write((page + at) * PAGE, b"never").unwrap();
                        region.write((page + at) * PAGE, b"never, too").unwrap();
                    }
                    let error = region.flush().unwrap_err();
                    assert!(away(&error), "{error}");
                });
                scope.spawn(move || {
                    let error = region.read((20 + index as u64) * PAGE, &mut [0; 100]).unwrap_err();
                    assert!(away(&error), "{error}");
                });
            }
        });
        let took = start.elapsed();
        // Once it is known nobody waits again.
        let soonest = Duration::from_millis(if round == 0 { 900 } else { 0 });
        assert!(took >= soonest && took < Duration::from_secs(15), "{took:?}");
        for region in &regions {
            // The session goes on.
            region.write(50 * PAGE, &[round; 10]).unwrap();
            region.flush().unwrap();
            assert_eq!(region.fetch_add(60 * PAGE + 8 * u64::from(round), 1u64).unwrap() / 3, 0);
        }
        let error = regions[0].fetch_add(30 * PAGE, 1u64).unwrap_err();
        assert!(away(&error), "{error}");
    }
    // Others are served that wait for what does come.
    let slow = Gated::new(4, 4);
    let key = world.server.export("slow", slow.memory(), Rights::ReadWrite).unwrap();
    let region = world.peer(1).import("slow", &key).unwrap();
    region.write(0, b"late").unwrap();
    slow.gate.wait_for_fault(0);
    slow.gate.set(true);
    region.flush().unwrap();
    // Neither this nor the end of the node waits for what does not.
    let start = Instant::now();
    assert!(world.server.unexport("memory").unwrap());
    drop(world);
    assert!(start.elapsed() < Duration::from_secs(5));
    gated.gate.set(true);
    std::thread::sleep(Duration::from_millis(100));
    assert!(gated.shared().sub(0, 40 * 4096).unwrap().to_vec().iter().all(|&byte| byte == 0));
}

/// For longer than a peer may be silent, than a socket may be full, and than anybody waits for bytes.
#[test]
fn who_waits_for_a_page_is_not_dead() {
    let Some(_alone) = common::alone() else { return };
    let world = World::new();
    let gated = Gated::new(1024, 512);
    let key = world.server.export("memory", gated.memory(), Rights::ReadWrite).unwrap();
    let (stalled, full) = (world.peer(1).import("memory", &key), world.peer(2).import("memory", &key));
    let (stalled, full) = (stalled.unwrap(), full.unwrap());
    std::thread::scope(|scope| {
        // Receives nothing more of this session.
        let writer = scope.spawn(|| {
            for _ in 0..12 {
                stalled.write(0, &vec![5; 1 << 20])?;
            }
            stalled.flush()
        });
        // Answers nothing of this one.
        let reader = scope.spawn(|| {
            let buffer = Node::memory(256 * 8).unwrap();
            let post = |index: usize| {
                let local = buffer.shared().sub(index * 8, 8).unwrap();
                full.post().read(index as u64 * PAGE, &[local])
            };
            let reads: Result<Vec<_>, _> = (0..256).map(post).collect();
            reads?.iter().try_for_each(|read| read.wait())
        });
        std::thread::sleep(Duration::from_secs(8));
        assert!(!writer.is_finished() && !reader.is_finished(), "the page has not come yet");
        gated.gate.set(true);
        writer.join().unwrap().unwrap();
        reader.join().unwrap().unwrap();
    });
    assert!(gated.shared().sub(0, 1 << 20).unwrap().to_vec() == vec![5; 1 << 20]);
}

#[test]
fn a_session_may_end_while_a_page_is_away() {
    let Some(_alone) = common::alone() else { return };
    let world = World::new();
    let gated = Gated::new(64, 8);
    let key = world.server.export("memory", gated.memory(), Rights::ReadWrite).unwrap();
    for _ in 0..3 {
        let before = gated.gate.faults.load(Ordering::Relaxed);
        let node = Node::new().unwrap();
        let region = node.connect(&world.address).unwrap().import("memory", &key);
        // On shared memory there is nobody in between.
        let region = region.unwrap();
        region.write(before % 8 * PAGE, b"x").unwrap();
        let _ = region.notify(Notify::Count { number: 0 });
        gated.gate.wait_for_fault(before);
        drop(node);
        drop(region);
    }
    let region = world.peer(1).import("memory", &key).unwrap();
    region.write(20 * PAGE, b"others").unwrap();
    region.flush().unwrap();
    drop((region, world));
}

/// Or the next one that locks the memory would find its own bytes replaced.
#[test]
fn what_a_session_left_is_not_executed_after_its_end() {
    let Some(_alone) = common::alone() else { return };
    let world = World::new();
    let gated = Gated::new(64, 8);
    let key = world.server.export("memory", gated.memory(), Rights::ReadWrite).unwrap();
    let lock_key = world.server.export_sync("lock", Kind::LOCK).unwrap();
    let node = Node::new().unwrap();
    let options = ConnectOptions { rails: Some(1), link: LinkChoice::Socket };
    let peer = node.connect_with(&world.address, &options).unwrap();
    let lock = Lock::open(&peer, "lock", &lock_key).unwrap();
    let guard = lock.lock(None).or_else(SyncError::recover).unwrap();
    let region = peer.import("memory", &key).unwrap();
    for page in 0..8 {
        region.write(page * PAGE, &[9; 100]).unwrap();
    }
    let _ = region.notify(Notify::Count { number: 0 });
    gated.gate.wait_for_fault(2);
    drop(node);
    let next = world.peer(1);
    let second = Lock::open(&next, "lock", &lock_key).unwrap();
    let held = second.lock(Some(Duration::from_secs(20)));
    assert!(matches!(held, Err(SyncError::Abandoned(_))));
    gated.gate.set(true);
    let region = next.import("memory", &key).unwrap();
    for page in 0..8 {
        region.write(page * PAGE + 4000, &[5; 8]).unwrap();
    }
    region.flush().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    for page in 0..8 {
        let bytes = gated.shared().sub(page * 4096, 4096).unwrap().to_vec();
        assert_eq!((bytes[99], bytes[4000]), (0, 5), "page {page}");
    }
    drop(guard);
}

#[test]
fn a_far_page_behind_a_slow_lender() {
    let Some(_alone) = common::alone() else { return };
    let lender = common::lend(64 << 20);
    let delay_ms = Arc::new(AtomicU64::new(0));
    let config = PagerConfig {
        lenders: vec![common::delayed(lender.address(), Arc::clone(&delay_ms))],
        // It would find out that the lender behind the delay is on this host.
        link: LinkChoice::Socket,
        local_bytes: 4 << 20,
        area_bytes: 64 << 20,
        ..PagerConfig::default()
    };
    let pager = Pager::start(config).unwrap();
    let start = pager.area().start;
    pager.map(start, 16 << 20, libc::PROT_READ | libc::PROT_WRITE).unwrap();
    let world = World::new();
    let memory = Memory::far(&pager, start, 16 << 20).unwrap();
    let key = world.server.export("far", &memory, Rights::ReadWrite).unwrap();
    let region = world.peer(1).import("far", &key).unwrap();
    for page in 0..4096u64 {
        region.write(page * PAGE, &page.to_le_bytes()).unwrap();
    }
    region.flush().unwrap();
    let hot = 4095 * PAGE;
    delay_ms.store(100, Ordering::Relaxed);
    let (mut others, mut late) = (0, 0);
    // Far from each other: the pager brings neighbours in ahead of time.
    let is_away = |page: &u64| !is_resident(memory.range((page * PAGE) as usize, 4096).unwrap().shared());
    for round in 0..40 {
        if late == 5 {
            break;
        }
        let page = (round * 90..4000).find(is_away).expect("most of it is at the lender");
        std::thread::scope(|scope| {
            region.write(page * PAGE + 8, b"late").unwrap();
            let flush = scope.spawn(|| {
                let start = Instant::now();
                region.flush().map(|()| start.elapsed())
            });
            let mut seen = 0;
            while !flush.is_finished() {
                let mut bytes = [0; 8];
                region.read(hot, &mut bytes).unwrap();
                assert_eq!(u64::from_le_bytes(bytes), 4095);
                seen += u64::from(!flush.is_finished());
            }
            // The pager may still have had it in a frame.
            if flush.join().unwrap().unwrap() >= Duration::from_millis(90) {
                (late, others) = (late + 1, others + seen);
            }
        });
        let mut bytes = [0; 12];
        region.read(page * PAGE, &mut bytes).unwrap();
        assert_eq!((&bytes[..8], &bytes[8..]), (&page.to_le_bytes()[..], &b"late"[..]));
    }
    assert!(late == 5 && others > 100, "{others} reads beside {late} pages of 100 ms");
    assert!(world.server.unexport("far").unwrap());
}

/// Answers of few bytes are copied when they are sent, and the page may have left since the request was looked at.
#[test]
fn short_reads_of_pages_that_come_and_go() {
    let Some(_alone) = common::alone() else { return };
    let lender = common::lend(64 << 20);
    let config = PagerConfig {
        lenders: vec![lender.address().to_owned()],
        local_bytes: 4 << 20,
        area_bytes: 64 << 20,
        ..PagerConfig::default()
    };
    let pager = Pager::start(config).unwrap();
    let start = pager.area().start;
    pager.map(start, 16 << 20, libc::PROT_READ | libc::PROT_WRITE).unwrap();
    let world = World::new();
    let memory = Memory::far(&pager, start, 16 << 20).unwrap();
    let key = world.server.export("far", &memory, Rights::ReadWrite).unwrap();
    let region = world.peer(1).import("far", &key).unwrap();
    let shared = memory.shared();
    (0..4096).for_each(|page| shared.write_from(page * 4096, &(page as u64 + 1).to_le_bytes()).unwrap());
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _end = End(&ended);
        scope.spawn(|| {
            let mut random = Random::new(2);
            while !ended.load(Ordering::Relaxed) {
                shared.touch((random.next() % 4096) as usize * 4096).unwrap();
            }
        });
        let mut random = Random::new(1);
        let local = Mapping::anonymous(64 * 8).unwrap();
        for _ in 0..400 {
            let pages: Vec<u64> = (0..64).map(|_| random.next() % 4096).collect();
            let read = |(index, page): (usize, &u64)| {
                region.post().read(page * PAGE, &[local.shared().sub(index * 8, 8).unwrap()]).unwrap()
            };
            let reads: Vec<_> = pages.iter().enumerate().map(read).collect();
            reads.iter().for_each(|read| read.wait().unwrap());
            let got = local.shared().sub(0, 64 * 8).unwrap().to_vec();
            let words = got.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
            assert!(words.eq(pages.iter().map(|page| page + 1)));
        }
    });
    assert!(pager.stats().faults > 10_000, "{:?}", pager.stats());
}

/// Tells others that the test has ended, also when it has failed.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A receiver's ring is away: its senders and everybody else on the node go on, and no message is lost, torn or out of order.
#[test]
fn a_ring_that_is_away_keeps_only_its_receiver_waiting() {
    let Some(_alone) = common::alone() else { return };
    const MESSAGES: u64 = 200;
    for shape in [Shape::Shared { bytes: 64 << 10 }, Shape::Rings { senders: 1, bytes: 64 << 10 }] {
        let world = World::new();
        let gated = Gated::new(20, 20);
        let given = |bytes: usize| {
            assert!(bytes <= gated.shared().len());
            Ok(gated.memory())
        };
        let (key, mut receiver) = Receiver::within(&world.server, "ring", shape, given).unwrap();
        let board = Mapping::anonymous(4096).unwrap();
        let other_key = world.server.export("other", Arc::new(board), Rights::ReadWrite).unwrap();
        let other = world.peer(1).import("other", &other_key).unwrap();
        let peer = world.peer(1);
        let client = &world.client;
        std::thread::scope(|scope| {
            let sends = scope.spawn(move || {
                let _client = client;
                let mut random = Random::new(5);
                let mut sender = Sender::open(&peer, "ring", &key).unwrap();
                for number in 0..MESSAGES {
                    let len = random.next() as usize % 1500;
                    let mut bytes: Vec<u8> = number.to_le_bytes().to_vec();
                    bytes.extend((0..len).map(|_| random.next() as u8));
                    sender.send(&bytes, Some(Duration::from_secs(60))).unwrap();
                }
                sender
            });
            let receives = scope.spawn(move || {
                let mut random = Random::new(5);
                for number in 0..MESSAGES {
                    let len = random.next() as usize % 1500;
                    let mut bytes: Vec<u8> = number.to_le_bytes().to_vec();
                    bytes.extend((0..len).map(|_| random.next() as u8));
                    let message = receiver.receive(Some(Duration::from_secs(60))).unwrap();
                    assert!(message.to_vec() == bytes, "{shape:?}: message {number}");
                }
                receiver
            });
            gated.gate.wait_for_fault(0);
            for round in 0..200u64 {
                assert_eq!(other.fetch_add(8, 1u64).unwrap(), round);
                other.write(64, &round.to_le_bytes()).unwrap();
                other.flush().unwrap();
                std::thread::sleep(Duration::from_micros(200));
            }
            assert!(!receives.is_finished());
            gated.gate.set(true);
            let sender = sends.join().unwrap();
            drop(receives.join().unwrap());
            drop(sender);
        });
    }
}

fn is_resident(memory: SharedSlice) -> bool {
    let mut pages = vec![0; memory.len() / 4096 + 2];
    resident(memory, &mut pages).unwrap();
    pages[..memory.len() / 4096].iter().any(|page| page & 1 != 0)
}

#[test]
fn pages_that_were_swapped_out() {
    let _alone = common::alone();
    let _swap = match common::Swap::on() {
        Ok(swap) => swap,
        Err(reason) => {
            let _ = writeln!(std::io::stderr(), "pages_that_were_swapped_out: skipped ({reason})");
            return;
        }
    };
    let world = World::new();
    for private in [true, false] {
        let memory: Memory = if private {
            Node::private_memory(4 << 20).unwrap().into()
        } else {
            Memory::new(4 << 20).unwrap()
        };
        let key = world.server.export("swapped", &memory, Rights::ReadWrite).unwrap();
        let region = world.peer(1).import("swapped", &key).unwrap();
        let mut random = Random::new(7);
        let mut model: Vec<u8> = (0..4 << 20).map(|_| random.next() as u8).collect();
        for round in 0..4u64 {
            region.write(0, &model).unwrap();
            region.flush().unwrap();
            page_out(memory.shared()).unwrap();
            if is_resident(memory.shared().sub(0, 8192).unwrap()) {
                let _ = writeln!(std::io::stderr(), "pages_that_were_swapped_out: skipped (nothing was)");
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
            write_some(&region, &mut model, &mut random);
            let mut back = vec![0; 4 << 20];
            region.read(0, &mut back).unwrap();
            assert!(back == model, "round {round}");
            assert_eq!(region.fetch_add(8, 0u64).unwrap().to_le_bytes(), model[8..16]);
        }
        assert!(world.server.unexport("swapped").unwrap());
    }
}

fn write_some(region: &Region, model: &mut [u8], random: &mut Random) {
    for round in 0..200 {
        let offset = (random.next() % (3 << 20)) as usize;
        let data = vec![round; 1 + (random.next() % 100_000) as usize];
        region.write(offset as u64, &data).unwrap();
        model[offset..offset + data.len()].copy_from_slice(&data);
    }
}
