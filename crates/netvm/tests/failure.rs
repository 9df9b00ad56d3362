//! Peers that fail without a word: stopped, or cut off. Real processes, and a network of their own where the system allows it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use netvm::Error;
use netvm::copy::{Copied, Copies};
use netvm::node::{ConnectOptions, KeepAlive, LinkChoice, Node, Rights};
use netvm::posted::{Atomically, Counter};
use netvm::region::{Peer, Region};
use netvm::sync::{Kind, Lock, SyncError};

mod common;
use common::process::{Process, ROLE, hex, key};

/// A failed peer is found after 5 s; this is for a machine that does many other things.
const FOUND: Duration = Duration::from_secs(15);

fn open(server: &Process, node: &Node) -> (Peer, Region) {
    let peer = node.connect(&server.said[0]).unwrap();
    // It needs the other process.
    peer.choose(LinkChoice::Socket);
    let region = peer.import("memory", &server.key(1)).unwrap();
    (peer, region)
}

/// What other processes of these tests do.
#[test]
#[ignore = "started by other tests"]
fn process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let role: Vec<&str> = role.split(' ').collect();
    let mut out = std::io::stdout();
    match role[0] {
        "server" => {
            let node = Node::new().unwrap();
            let memory = Node::private_memory(1 << 20).unwrap();
            let key = node.export("memory", memory, Rights::ReadWrite).unwrap();
            let lock = node.export_sync("lock", Kind::LOCK).unwrap();
            node.allow_copies(Copies::Anywhere);
            let address = node.listen("127.0.0.1:0").unwrap();
            writeln!(out, "ready {address} {} {}", hex(key), hex(lock)).unwrap();
            std::thread::sleep(Duration::from_secs(300));
        }
        "holder" => {
            let node = Node::new().unwrap();
            let peer = node.connect(role[1]).unwrap();
            let lock = Lock::open(&peer, "lock", &key(role[2])).unwrap();
            let _guard = lock.lock(None).unwrap();
            writeln!(out, "ready held").unwrap();
            std::thread::sleep(Duration::from_secs(300));
        }
        "idle" => {
            let (one, two) = (Node::new().unwrap(), Node::new().unwrap());
            let address = one.listen("127.0.0.1:0").unwrap();
            let key = one.export("memory", Node::memory(4096).unwrap(), Rights::Read).unwrap();
            let region = two.connect(&address).unwrap().import("memory", &key).unwrap();
            region.read(0, &mut [0; 8]).unwrap();
            std::thread::sleep(Duration::from_secs(1));
            let (start, used) = (Instant::now(), cpu_ns());
            std::thread::sleep(Duration::from_secs(8));
            let used = cpu_ns() - used;
            let share = used as f64 / start.elapsed().as_nanos() as f64;
            writeln!(out, "ready {share}").unwrap();
            region.read(0, &mut [0; 8]).unwrap();
        }
        "adder" => {
            let node = Node::new().unwrap();
            let socket = ConnectOptions { link: LinkChoice::Socket, rails: None };
            let peer = node.connect_with(role[1], &socket).unwrap();
            let region = peer.import("memory", &key(role[2])).unwrap();
            writeln!(out, "ready adding").unwrap();
            while region.fetch_add(0, 1u64).is_ok() {}
        }
        "cable" => cut_cable(),
        other => panic!("no such role: {other}"),
    }
}

/// Time on a CPU of all threads of this process.
fn cpu_ns() -> u64 {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let used = threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("schedstat")));
    used.flatten().map(|text| text.split(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

fn names(error: &Error, address: &str) -> bool {
    let text = error.to_string();
    text.contains(address) && (text.contains("a sign of life") || text.contains("timed out"))
}

/// Everything that is under way, or begins now, ends with an error that names the peer; returns how long that took.
fn everything_ends(address: &str, region: &Region, idle: &Region, lock: &Lock) -> Duration {
    let start = Instant::now();
    let counter = Counter::new();
    let local = Node::memory(1 << 20).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| lock.lock(Some(Duration::from_secs(60))));
        let reading = scope.spawn(|| region.read(0, &mut [0; 100_000]));
        for _ in 0..100 {
            region.post().counted(&counter).atomic(0, Atomically::Add(1u64)).unwrap();
        }
        let added = region.post().atomic(8, Atomically::Add(1u64)).unwrap();
        let written = region.post().write(0, &[local.shared()], Default::default()).unwrap();
        let flushed = region.post().flush().unwrap();
        let error = reading.join().unwrap().unwrap_err();
        assert!(names(&error, address), "{error}");
        // These had left, or may have.
        let error = added.wait().unwrap_err();
        assert!(matches!(error, Error::OutcomeUnknown { .. }) && names(&error, address), "{error}");
        let error = flushed.wait().unwrap_err();
        assert!(names(&error, address), "{error}");
        drop(written);
        let error = counter.wait_all(Some(FOUND)).unwrap_err();
        assert!(names(&error, address), "{error}");
        assert_eq!((counter.failed(), counter.pending()), (100, 0));
        match waiting.join().unwrap() {
            Err(SyncError::Failed(error)) => assert!(names(&error, address), "{error}"),
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("locked by whom?"),
        }
    });
    let took = start.elapsed();
    // Nobody used this one. What begins now fails now, and not after a time-out of its own.
    let start = Instant::now();
    let error = loop {
        if let Err(error) = idle.write(0, b"anybody there?").and_then(|()| idle.flush()) {
            break error;
        }
    };
    assert!(names(&error, address), "{error}");
    assert!(start.elapsed() < Duration::from_secs(3));
    took
}

#[test]
fn a_stopped_process_is_found_by_all_who_wait_for_it() {
    let server = Process::start("server");
    let (node, other) = (Node::new().unwrap(), Node::new().unwrap());
    let ((peer, region), (_, idle)) = (open(&server, &node), open(&server, &other));
    region.write(0, &[1; 100]).unwrap();
    region.flush().unwrap();
    let lock = Lock::open(&peer, "lock", &server.key(2)).unwrap();
    // A living peer that has nothing to say is left alone.
    std::thread::sleep(Duration::from_secs(6));
    idle.read(0, &mut [0; 8]).unwrap();
    let guard = lock.lock(None).unwrap();
    server.signal("-STOP");
    let took = everything_ends(&server.said[0], &region, &idle, &lock);
    println!("found after {took:?}");
    assert!(took < FOUND);
    drop(guard);
}

#[test]
fn who_was_stopped_himself_blames_nobody() {
    let server = Process::start("server");
    let adder = Process::start(&format!("adder {} {}", server.said[0], server.said[1]));
    let node = Node::new().unwrap();
    node.keep_alive(KeepAlive { interval_ms: 1 << 20, timeout_ms: 1 << 22 });
    let (_peer, region) = open(&server, &node);
    for _ in 0..2 {
        server.signal("-STOP");
        adder.signal("-STOP");
        std::thread::sleep(Duration::from_secs(7));
        // As if the whole machine, or both, had been asleep.
        adder.signal("-CONT");
        std::thread::sleep(Duration::from_millis(300));
        server.signal("-CONT");
        let (start, before) = (Instant::now(), region.atomic_load::<u64>(0).unwrap());
        while region.atomic_load::<u64>(0).unwrap() < before + 100 {
            assert!(start.elapsed() < FOUND, "it has given its peer up");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_stopped_process_ends_a_copy_and_is_named() {
    for source_stops in [true, false] {
        let (from, to) = (Process::start("server"), Process::start("server"));
        let node = Node::new().unwrap();
        let ((_peer, source), (_other, target)) = (open(&from, &node), open(&to, &node));
        assert_eq!(source.copy_to(0, &target, 0, 1 << 20), Ok(Copied::Pushed));
        let stopped = if source_stops { &from } else { &to };
        let (start, error) = std::thread::scope(|scope| {
            let copying = scope.spawn(|| {
                loop {
                    if let Err(error) = source.copy_to(0, &target, 0, 1 << 20) {
                        break error;
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(50));
            stopped.signal("-STOP");
            (Instant::now(), copying.join().unwrap())
        });
        println!("found after {:?}: {error}", start.elapsed());
        assert!(start.elapsed() < FOUND);
        match &error {
            Error::Timeout { lender, .. } | Error::LenderLost { lender, .. } => {
                assert_eq!(*lender, stopped.said[0])
            }
            Error::OutcomeUnknown { lender, reason, .. } => {
                assert!(!source_stops && *lender == to.said[0] && reason.contains(&from.said[0]), "{error}");
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_stopped_process_loses_its_lock() {
    let home = Node::new().unwrap();
    home.keep_alive(KeepAlive { interval_ms: 100, timeout_ms: 1000 });
    let address = home.listen("127.0.0.1:0").unwrap();
    let key = home.export_sync("lock", Kind::LOCK).unwrap();
    let holder = Process::start(&format!("holder {address} {}", hex(key)));
    let client = Node::new().unwrap();
    let peer = client.connect(&address).unwrap();
    let lock = Lock::open(&peer, "lock", &key).unwrap();
    assert!(matches!(lock.lock(Some(Duration::from_millis(1500))), Err(SyncError::TimedOut)));
    holder.signal("-STOP");
    let start = Instant::now();
    assert!(matches!(lock.lock(Some(Duration::from_secs(60))), Err(SyncError::Abandoned(_))));
    println!("abandoned after {:?}", start.elapsed());
    assert!(start.elapsed() < FOUND);
}

#[test]
fn a_cut_cable_is_found_by_all_who_wait() {
    let mut unshare = Command::new("unshare");
    unshare.args(["-Urn"]).arg(std::env::current_exe().unwrap());
    // Not every system lets us have a network of our own.
    let possible = Command::new("unshare").args(["-Urn", "ip", "link", "set", "lo", "up"]).status();
    if !possible.is_ok_and(|status| status.success()) {
        let _ = writeln!(std::io::stderr(), "a_cut_cable: skipped (no network namespace)");
        return;
    }
    let process = Process::start_with(unshare, "cable");
    assert_eq!(process.said.first().map(String::as_str), Some("found"), "see its output");
    println!("found after {} ms", process.said[1]);
}

/// In a network of our own: its only cable is the loopback device.
fn cut_cable() {
    let ip = |arguments: &[&str]| assert!(Command::new("ip").args(arguments).status().unwrap().success());
    ip(&["link", "set", "lo", "up"]);
    let server = Process::start("server");
    let (node, other) = (Node::new().unwrap(), Node::new().unwrap());
    let ((peer, region), (_, idle)) = (open(&server, &node), open(&server, &other));
    let lock = Lock::open(&peer, "lock", &server.key(2)).unwrap();
    let guard = lock.lock(None).unwrap();
    ip(&["link", "set", "lo", "down"]);
    let took = everything_ends(&server.said[0], &region, &idle, &lock);
    assert!(took < FOUND);
    drop(guard);
    println!("ready found {}", took.as_millis());
}

/// Passes bytes on for each connection, in the order in which they came, until it is told to stop for one.
fn proxy(server: &str, cut: Arc<AtomicUsize>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = server.to_owned();
    std::thread::spawn(move || {
        for (number, near) in listener.incoming().map_while(Result::ok).enumerate() {
            let far = TcpStream::connect(&server).unwrap();
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            for (from, to) in [(near.try_clone(), far.try_clone()), (far.try_clone(), near.try_clone())] {
                let (mut from, mut to, cut) = (from.unwrap(), to.unwrap(), Arc::clone(&cut));
                std::thread::spawn(move || {
                    let mut bytes = vec![0; 1 << 16];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        while cut.load(Ordering::Relaxed) == number {
                            std::thread::sleep(Duration::from_millis(10));
                        }
                        if to.write_all(&bytes[..count]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    address
}

#[test]
fn a_cut_rail_is_found_and_named() {
    const NONE: usize = usize::MAX;
    let slow = KeepAlive { interval_ms: 1 << 20, timeout_ms: 1 << 22 };
    let quick = KeepAlive { interval_ms: 300, timeout_ms: 3000 };
    // Found by both, by who waits only, and by the other only, who tells.
    for (case, (one, two)) in
        [(KeepAlive::default(), KeepAlive::default()), (quick, slow), (slow, quick)].into_iter().enumerate()
    {
        let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
        server.keep_alive(two);
        client.keep_alive(one);
        let key = server.export("memory", Node::memory(1 << 20).unwrap(), Rights::ReadWrite).unwrap();
        let cut = Arc::new(AtomicUsize::new(NONE));
        let address = proxy(&server.listen("127.0.0.1:0").unwrap(), Arc::clone(&cut));
        let region = client.connect_rails(&address, 3).unwrap().import("memory", &key).unwrap();
        let idle = client.connect_rails(&address, 3).unwrap().import("memory", &key).unwrap();
        for _ in 0..100 {
            region.write(0, &[1; 1000]).unwrap();
            region.flush().unwrap();
        }
        // Nobody has said anything for longer than the quick one allows.
        std::thread::sleep(Duration::from_millis(4000));
        idle.read(0, &mut [0; 8]).unwrap();
        // A rail of the one, in the middle of its work, or of the other, which has none.
        let (region, number) = if case == 0 { (&region, 1) } else { (&idle, 3 + 1) };
        cut.store(number, Ordering::Relaxed);
        let start = Instant::now();
        let error = loop {
            if case != 0 {
                std::thread::sleep(Duration::from_millis(if one == slow { 4500 } else { 100 }));
            }
            if let Err(error) = region.write(0, &[2; 30_000]).and_then(|()| region.flush()) {
                break error;
            }
        };
        println!("found after {:?}: {error}", start.elapsed());
        assert!(start.elapsed() < FOUND);
        let text = error.to_string();
        assert!(text.contains(&address) && text.contains("rail 2 of 3 is cut"), "{text}");
        assert!(matches!(error, Error::LenderLost { .. }), "{error:?}");
        cut.store(NONE, Ordering::Relaxed);
    }
}

#[test]
fn idle_endpoints_cost_next_to_nothing() {
    let process = Process::start("idle");
    let share: f64 = process.said[0].parse().unwrap();
    println!("{:.4} % of a CPU for two idle nodes", share * 100.0);
    assert!(share < 2.0 * 0.001, "{share}");
}

#[test]
fn times_are_the_nodes_own() {
    // Silent for longer than the other side's time-out: it asks, and we answer without anybody's doing.
    let (one, two) = (Node::new().unwrap(), Node::new().unwrap());
    one.keep_alive(KeepAlive { interval_ms: 20, timeout_ms: 600 });
    two.keep_alive(KeepAlive { interval_ms: 1 << 40, timeout_ms: 1 << 41 });
    let memory = Node::memory(4096).unwrap();
    let key = one.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let peer = two.connect(&one.listen("127.0.0.1:0").unwrap()).unwrap();
    let region = peer.import("memory", &key).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    region.write(0, &[5; 8]).unwrap();
    region.flush().unwrap();
    assert_eq!(memory.shared().sub(0, 8).unwrap().to_vec(), [5; 8]);
}
