//! What can be exported, under which names and rights, and what happens when it, or its owner, goes away.

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use netvm::error::Error;
use netvm::memory::{HugePages, Memory, RawRange};
use netvm::node::{Location, Node, RemoteKey, Rights};
use netvm::notify::Notify;
use netvm::pager::{Pager, PagerConfig, PagerError};
use netvm::region::Region;
use netvm_core::wire::Status;

mod common;

fn pair() -> (Node, Node, String) {
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let address = server.listen("127.0.0.1:0").unwrap();
    (server, client, address)
}

/// Threads of a test stop with it, also when it fails.
#[derive(Default)]
struct Stop(AtomicBool);

struct Stopping<'a>(&'a Stop);

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

fn refused<T: std::fmt::Debug>(result: netvm::Result<T>) -> Status {
    match result {
        Err(Error::Op { code, .. }) => code,
        other => panic!("{other:?}"),
    }
}

fn scratch(bytes: u64) -> File {
    let path = std::env::temp_dir().join(format!("netvm-segments-{}-{bytes}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file.set_len(bytes).unwrap();
    file
}

/// Reads, writes, atomics, vectored and long transfers.
fn exercise(region: &Region) {
    let len = region.len() as usize;
    let data: Vec<u8> = (0..len).map(|index| (index * 31 + index / 4096) as u8).collect();
    region.write(0, &data).unwrap();
    let mut back = vec![0; len];
    region.read(0, &mut back).unwrap();
    assert!(back == data);
    region.write(len as u64 - 3, b"end").unwrap();
    region.write(8, &[0; 16]).unwrap();
    assert_eq!(region.fetch_add(8, 5u64).unwrap(), 0);
    assert_eq!(region.compare_swap(8, 5u64, 6).unwrap(), 5);
    assert_eq!(region.fetch_or(20, 0xF0u32).unwrap(), 0);
    assert_eq!((region.atomic_load::<u64>(8).unwrap(), region.atomic_load::<u32>(20).unwrap()), (6, 0xF0));
    region.flush().unwrap();
    let mut end = [0; 3];
    region.read(len as u64 - 3, &mut end).unwrap();
    assert_eq!(&end, b"end");
}

#[test]
fn one_memory_under_several_names_and_rights() {
    let (server, client, address) = pair();
    let memory = Memory::new(3 << 20).unwrap();
    let middle = memory.range(4096, 1 << 20).unwrap();
    let all = server.export("all", &memory, Rights::Read).unwrap();
    let some = server.export("some", &middle, Rights::ReadWrite).unwrap();
    let inner = server.export("inner", middle.range(100, 50).unwrap(), Rights::Read).unwrap();
    assert!(memory.range(1, 3 << 20).is_err() && middle.range(1 << 20, 1).is_err());
    assert!(client.connect(&address).unwrap().import("some", &all).is_err(), "each has its own key");
    let peer = client.connect(&address).unwrap();
    let (all, some) = (peer.import("all", &all).unwrap(), peer.import("some", &some).unwrap());
    exercise(&some);
    some.write(100, b"seen everywhere").unwrap();
    let mut seen = [0; 15];
    all.read(4196, &mut seen).unwrap();
    assert_eq!(&seen, b"seen everywhere");
    all.write(0, b"x").unwrap();
    assert_eq!(refused(all.flush()), Status::NoRights);
    assert_eq!(refused(all.fetch_add(0, 1u64)), Status::NoRights);
    // From addresses to segments and back, for who has the key.
    let byte = memory.shared().as_ptr().addr() as u64 + 4096 + 120;
    assert_eq!(all.remote_address(4096 + 120).unwrap(), byte);
    assert_eq!(some.remote_address(120).unwrap(), byte);
    assert!(some.remote_address((1 << 20) + 1).is_err());
    let place = |name: &str, offset| Location { name: name.to_owned(), offset };
    let sorted = |mut found: Vec<Location>| {
        found.sort_by(|one, two| one.name.cmp(&two.name));
        found
    };
    assert_eq!(sorted(peer.find(byte).unwrap()), [place("all", 4096 + 120), place("some", 120)]);
    let inner = peer.import("inner", &inner).unwrap();
    let found = sorted(peer.find(byte).unwrap());
    assert_eq!(found, [place("all", 4096 + 120), place("inner", 20), place("some", 120)]);
    assert_eq!(sorted(server.find(byte as *const u8)), found);
    assert!(peer.find(0).unwrap().is_empty() && server.find(std::ptr::null()).is_empty());
    // One of them goes, the others do not notice.
    assert!(server.unexport("all").unwrap());
    assert_eq!(refused(all.read(0, &mut seen)), Status::NoHandle);
    assert_eq!(refused(all.remote_address(0)), Status::NoHandle);
    let mut last = [0; 15];
    some.read(100, &mut last).unwrap();
    inner.read(0, &mut last).unwrap();
    assert_eq!(&last, b"seen everywhere");
    assert_eq!(sorted(peer.find(byte).unwrap()), [place("inner", 20), place("some", 120)]);
}

#[test]
fn memory_of_the_heap_and_the_stack() {
    let (server, client, address) = pair();
    let heap = vec![0u64; 100_000].into_boxed_slice();
    let heap = Box::into_raw(heap);
    let stack = [const { AtomicU64::new(7) }; 4];
    // SAFETY: the box is freed below, after both are unexported; the array is of atomics and outlives the exports.
    let (boxed, words) = unsafe {
        (RawRange::new(heap.cast(), 800_000, true), RawRange::new(stack.as_ptr().cast_mut().cast(), 32, true))
    };
    let boxed = server.export("heap", boxed, Rights::ReadWrite).unwrap();
    let words = server.export("stack", words, Rights::ReadWrite).unwrap();
    let peer = client.connect(&address).unwrap();
    exercise(&peer.import("heap", &boxed).unwrap());
    let words = peer.import("stack", &words).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..1000 {
                stack[1].fetch_add(1, Ordering::Relaxed);
            }
        });
        for _ in 0..1000 {
            words.fetch_add(8, 1u64).unwrap();
        }
    });
    assert_eq!(stack[1].load(Ordering::Relaxed), 2007, "with the owner's own atomics");
    assert_eq!(server.find(stack.as_ptr().wrapping_add(3).cast())[0].offset, 24);
    assert!(server.unexport("heap").unwrap() && server.unexport("stack").unwrap());
    // SAFETY: nobody uses it any more.
    drop(unsafe { Box::from_raw(heap) });
}

/// Memory that begins at any address: an atomic's word must be aligned there, not in the segment only.
#[test]
fn atomics_on_memory_that_is_not_aligned() {
    let (server, client, address) = pair();
    let memory = Memory::new(4096).unwrap();
    let key = server.export("odd", memory.range(4, 100).unwrap(), Rights::ReadWrite).unwrap();
    let region = client.connect(&address).unwrap().import("odd", &key).unwrap();
    assert_eq!(refused(region.fetch_add(8, 1u64)), Status::Misaligned);
    assert_eq!(region.fetch_add(8, 1u32).unwrap(), 0);
}

#[test]
fn huge_pages_or_a_clear_answer() {
    let preferred = Memory::huge(1 << 20, HugePages::Preferred).unwrap();
    let (server, client, address) = pair();
    let key = server.export("huge", &preferred, Rights::ReadWrite).unwrap();
    exercise(&client.connect(&address).unwrap().import("huge", &key).unwrap());
    match Memory::huge(1 << 20, HugePages::Required) {
        Ok(memory) => assert!(memory.is_huge() && preferred.is_huge()),
        Err(Error::System { what, errno }) => {
            assert!(!preferred.is_huge() && what.contains("huge"));
            assert!([libc::ENOMEM, libc::ENODEV, libc::ENOSYS].contains(&errno.0), "{errno}");
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_file_and_what_becomes_of_it() {
    use std::os::unix::fs::FileExt;
    let (server, client, address) = pair();
    let file = scratch(1 << 20);
    let memory = Memory::file(&file, Rights::ReadWrite).unwrap();
    assert_eq!((memory.len(), memory.is_writable()), (1 << 20, true));
    let key = server.export("file", &memory, Rights::ReadWrite).unwrap();
    let read_only = Memory::file(&file, Rights::Read).unwrap();
    assert!(server.export("wrong", &read_only, Rights::ReadWrite).is_err());
    let look = server.export("look", &read_only, Rights::Read).unwrap();
    for (rails, local) in [(1, false), (3, false), (1, true)] {
        file.set_len(1 << 20).unwrap();
        let peer = if local { client.connect_local(&server) } else { client.connect_rails(&address, rails) };
        let peer = peer.unwrap();
        let (region, look) = (peer.import("file", &key).unwrap(), peer.import("look", &look).unwrap());
        exercise(&region);
        region.write(5000, b"in the file").unwrap();
        region.flush().unwrap();
        let mut bytes = [0; 11];
        file.read_exact_at(&mut bytes, 5000).unwrap();
        assert_eq!(&bytes, b"in the file");
        file.write_all_at(b"by somebody", 6000).unwrap();
        look.read(6000, &mut bytes).unwrap();
        assert_eq!(&bytes, b"by somebody");
        file.set_len(8192).unwrap();
        for bytes in [1usize, 100, 20_000, 300_000] {
            for region in [&region, &look] {
                assert_eq!(refused(region.read(10_000, &mut vec![0; bytes])), Status::Fault, "{bytes}");
            }
            // A long write may hear of it itself.
            match region.write(10_000, &vec![1; bytes]) {
                Ok(()) | Err(Error::Op { code: Status::Fault, .. }) => {}
                Err(error) => panic!("{error}"),
            }
            assert_eq!(refused(region.flush()), Status::Fault, "{bytes}");
            region.write(0, b"still here").unwrap();
            region.flush().unwrap();
        }
        assert_eq!(refused(region.fetch_add(16384, 1u64)), Status::Fault);
        assert_eq!(refused(region.atomic_load::<u32>(16384)), Status::Fault);
        // Half of a transfer is there, half is not.
        assert_eq!(refused(region.read(4096, &mut vec![0; 100_000])), Status::Fault);
        region.fetch_add(8184, 1u64).unwrap();
        look.read(0, &mut bytes).unwrap();
        assert_eq!(&bytes[..10], b"still here");
    }
}

/// Truncated again and again in the middle of transfers: refusals, but no signal and no lost session.
#[test]
fn a_file_that_is_truncated_all_the_time() {
    let (server, client, address) = pair();
    let file = scratch(2 << 20);
    let key =
        server.export("file", Memory::file(&file, Rights::ReadWrite).unwrap(), Rights::ReadWrite).unwrap();
    let stop = Stop::default();
    std::thread::scope(|scope| {
        let _stops = Stopping(&stop);
        scope.spawn(|| {
            while !stop.0.load(Ordering::Relaxed) {
                file.set_len(4096).unwrap();
                file.set_len(2 << 20).unwrap();
            }
        });
        let region = client.connect(&address).unwrap().import("file", &key).unwrap();
        let (mut faults, start) = (0, Instant::now());
        let mut data = vec![3; 1 << 20];
        for round in 0..1_000_000u64 {
            let results = [
                region.write(round % 4096 * 300, &data[..1 << (round % 21)]).and_then(|()| region.flush()),
                region.read(round % 4096 * 300, &mut data[..1 << (round % 19)]),
                region.fetch_add(round % 1000 * 2000, 1u64).map(drop),
            ];
            for result in results {
                match result {
                    Ok(()) => {}
                    Err(Error::Op { code: Status::Fault, .. }) => faults += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            if (faults > 100 && round > 300) || start.elapsed() > Duration::from_secs(10) {
                break;
            }
        }
        assert!(faults > 0);
    });
}

#[test]
fn far_memory_of_the_pager() {
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
    let (server, client, address) = pair();
    let memory = Memory::far(&pager, start, 16 << 20).unwrap();
    let key = server.export("far", &memory, Rights::ReadWrite).unwrap();
    let region = client.connect(&address).unwrap().import("far", &key).unwrap();
    // Four times what may be local: most of it goes to the lender and comes back.
    exercise(&region);
    let mut bytes = vec![0; 4096];
    for page in 0..4096u64 {
        region.read(page * 4096, &mut bytes).unwrap();
    }
    assert!(Memory::far(&pager, start + (64 << 20), 4096).is_err());
    assert!(server.unexport("far").unwrap());
}

/// At addresses of the pager's choice: each has its own, and what has gone is given out again, as zero.
#[test]
fn far_memory_is_allocated_and_given_back() {
    let Some(_alone) = common::alone() else { return };
    let lender = common::lend(32 << 20);
    let config = PagerConfig {
        lenders: vec![lender.address().to_owned()],
        local_bytes: 4 << 20,
        area_bytes: 16 << 20,
        ..PagerConfig::default()
    };
    let pager = Pager::start(config).unwrap();
    for value in 1..20u8 {
        let memory = Memory::from(pager.allocate((8 << 20) - 1).unwrap());
        assert_eq!(memory.len(), 8 << 20);
        let other = pager.allocate(8 << 20).unwrap();
        assert!(memory.shared().to_vec().iter().all(|byte| *byte == 0));
        memory.shared().fill(value);
        other.shared().fill(0xEE);
        let range = memory.range(4096, 4096).unwrap();
        drop(memory);
        let full = pager.allocate(4096);
        assert!(matches!(full, Err(netvm::Error::Pager(PagerError::AreaFull { .. }))), "{full:?}");
        assert_eq!(range.shared().to_vec(), [value; 4096]);
    }
    for bytes in [0, usize::MAX, (16 << 20) + 1] {
        assert!(pager.allocate(bytes).is_err());
    }
}

/// Traffic on two names of the same memory; one of them is taken away in the middle.
#[test]
fn unexport_fails_what_is_under_way_there_and_nothing_else() {
    let (server, client, address) = pair();
    for round in 0..10u8 {
        let memory = vec![round; 1 << 20].leak();
        // SAFETY: leaked, and only looked at through the slice made from this range.
        let range = unsafe { RawRange::new(memory.as_mut_ptr(), 1 << 20, true) };
        let shared = range.shared();
        let memory = Memory::from(range);
        let stop = Stop::default();
        let (one, other) = (memory.range(0, 1 << 19).unwrap(), memory.range(1 << 19, 1 << 19).unwrap());
        let one = server.export("one", one, Rights::ReadWrite).unwrap();
        let other = server.export("other", other, Rights::ReadWrite).unwrap();
        std::thread::scope(|scope| {
            let _stops = Stopping(&stop);
            let peer = client.connect(&address).unwrap();
            let ends = {
                let region = peer.import("one", &one).unwrap();
                scope.spawn(move || {
                    let data = vec![round; 1 << 19];
                    loop {
                        if let Err(error) = region.write(0, &data).and_then(|()| region.flush()) {
                            return error;
                        }
                    }
                })
            };
            let goes_on = {
                let (peer, stop) = (client.connect(&address).unwrap(), &stop);
                scope.spawn(move || {
                    let region = peer.import("other", &other).unwrap();
                    let mut rounds = 0;
                    loop {
                        let stopped = stop.0.load(Ordering::Relaxed);
                        region.write(0, &[round; 30_000]).unwrap();
                        region.flush().unwrap();
                        rounds += 1;
                        if stopped {
                            return rounds;
                        }
                    }
                })
            };
            std::thread::sleep(Duration::from_millis(u64::from(round)));
            assert!(server.unexport("one").unwrap() && !server.unexport("one").unwrap());
            let mine = shared.sub(0, 1 << 19).unwrap();
            mine.fill(0xEE);
            assert_eq!(refused::<()>(Err(ends.join().unwrap())), Status::NoHandle, "told, not silent");
            assert!(mine.to_vec().iter().all(|&byte| byte == 0xEE), "written after unexport had returned");
            stop.0.store(true, Ordering::Relaxed);
            assert!(goes_on.join().unwrap() > 0);
        });
        assert!(server.unexport("other").unwrap());
    }
}

/// Peers that connect, import and write while the memory is taken away, from before the call to after it: none of them has it when that has returned.
#[test]
fn unexport_also_ends_who_comes_meanwhile() {
    let (server, _, address) = pair();
    let (came, refused_late) = (AtomicU64::new(0), AtomicU64::new(0));
    for round in 0..30u64 {
        let memory = vec![1_u8; 1 << 20].leak();
        // SAFETY: leaked, and only looked at through the slice made from this range.
        let range = unsafe { RawRange::new(memory.as_mut_ptr(), 1 << 20, true) };
        let shared = range.shared();
        let key = server.export("memory", Memory::from(range), Rights::ReadWrite).unwrap();
        let stop = Stop::default();
        std::thread::scope(|scope| {
            let _stops = Stopping(&stop);
            for _ in 0..3 {
                let (stop, address, key, came, refused_late) = (&stop, &address, &key, &came, &refused_late);
                scope.spawn(move || {
                    let data = vec![2; 1 << 20];
                    while !stop.0.load(Ordering::Relaxed) {
                        let client = Node::new().unwrap();
                        let Ok(peer) = client.connect(address) else { continue };
                        match peer.import("memory", key) {
                            Ok(region) => {
                                came.fetch_add(1, Ordering::Relaxed);
                                while region.write(0, &data).and_then(|()| region.flush()).is_ok() {}
                            }
                            Err(error) => {
                                assert_eq!(refused::<()>(Err(error)), Status::NoSegment);
                                refused_late.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(5 + round % 7));
            assert!(server.unexport("memory").unwrap());
            shared.fill(0xEE);
            std::thread::sleep(Duration::from_millis(15));
            assert!(shared.to_vec().iter().all(|&byte| byte == 0xEE), "written after unexport had returned");
        });
    }
    let (came, refused_late) = (came.into_inner(), refused_late.into_inner());
    assert!(came > 20 && refused_late > 20, "{came} {refused_late}");
}

// ---- killed processes ----

fn child(test: &str, arguments: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--ignored", "--nocapture"]).env("NETVM_TEST_CHILD", arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

fn hex(key: RemoteKey) -> String {
    format!("{:032x}", u128::from_be_bytes(key.to_bytes()))
}

fn unhex(text: &str) -> RemoteKey {
    RemoteKey::from_bytes(u128::from_str_radix(text, 16).unwrap().to_be_bytes())
}

/// Exports memory and says where.
#[test]
#[ignore = "started by other tests"]
fn exporting_child() {
    if std::env::var("NETVM_TEST_CHILD").is_err() {
        return;
    }
    let node = Node::new().unwrap();
    let memory = Memory::new(1 << 20).unwrap();
    memory.shared().fill(9);
    let key = node.export("child", &memory, Rights::ReadWrite).unwrap();
    println!("\nEXPORTS {} {}", node.listen("127.0.0.1:0").unwrap(), hex(key));
    std::thread::sleep(Duration::from_secs(60));
}

/// Imports memory and writes to it without end.
#[test]
#[ignore = "started by other tests"]
fn importing_child() {
    let Ok(job) = std::env::var("NETVM_TEST_CHILD") else { return };
    let (address, key) = job.split_once(' ').unwrap();
    let node = Node::new().unwrap();
    let region = node.connect(address).unwrap().import("memory", &unhex(key)).unwrap();
    region.notify(Notify::Count { number: 0 }).unwrap();
    let data = vec![5; 1 << 19];
    loop {
        region.write(0, &data).unwrap();
        region.flush().unwrap();
    }
}

#[test]
fn a_killed_exporter_is_told_at_once() {
    use std::io::{BufRead, BufReader};
    let mut exporter = child("exporting_child", "go");
    let lines = BufReader::new(exporter.stdout.take().unwrap()).lines();
    let line = lines.map_while(Result::ok).find(|line| line.starts_with("EXPORTS")).unwrap();
    let words: Vec<&str> = line.split(' ').collect();
    let node = Node::new().unwrap();
    let peer = node.connect(words[1]).unwrap();
    let region = peer.import("child", &unhex(words[2])).unwrap();
    let mut bytes = vec![0; 1 << 19];
    region.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 9));
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let start = Instant::now();
            while start.elapsed() < Duration::from_secs(20) {
                if let Err(error) = region.read(0, &mut bytes) {
                    return Some(error);
                }
            }
            None
        });
        std::thread::sleep(Duration::from_millis(20));
        exporter.kill().unwrap();
        exporter.wait().unwrap();
        let error = reading.join().unwrap().expect("reads go on after the exporter's death");
        assert!(matches!(error, Error::LenderLost { .. }), "{error}");
    });
    assert!(matches!(region.write(0, b"x").and_then(|()| region.flush()), Err(Error::LenderLost { .. })));
    assert!(matches!(peer.find(1), Err(Error::LenderLost { .. })));
}

#[test]
fn a_killed_importer_leaves_nothing_behind() {
    let server = Node::new().unwrap();
    let address = server.listen("127.0.0.1:0").unwrap();
    let memory = Memory::new(1 << 20).unwrap();
    let (key, board) = server.export_notified("memory", &memory, Rights::ReadWrite, 1).unwrap();
    for _ in 0..3 {
        let mut importer = child("importing_child", &format!("{address} {}", hex(key)));
        assert!(board.wait(0, Some(Duration::from_secs(20))) && board.acknowledge(0));
        std::thread::sleep(Duration::from_millis(10));
        importer.kill().unwrap();
        importer.wait().unwrap();
    }
    // Nobody is left who could keep this waiting or write afterwards.
    assert!(server.unexport("memory").unwrap());
    memory.shared().fill(0xEE);
    std::thread::sleep(Duration::from_millis(20));
    assert!(memory.shared().to_vec().iter().all(|&byte| byte == 0xEE));
}
