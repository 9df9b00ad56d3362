//! Peers that die and come back, and connections that are cut or fall silent: no operation is executed twice, and none that was
//! confirmed is lost.
//!
//! The witness is a word that is only added to: *additions that succeeded ≤ its value ≤ those and the ones nobody knows of*.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use netvm::Error;
use netvm::lasting::{LastingRegion, Reconnect};
use netvm::memory::Memory;
use netvm::node::{ConnectOptions, KeepAlive, LinkChoice, Node, RemoteKey, Rights};
use netvm::posted::Atomically;

mod common;
use common::Random;
use common::process::{Process, ROLE, hex, key};

const KEY: RemoteKey = RemoteKey::from_bytes([0x5A; 16]);
const THREADS: usize = 3;
/// A thread's words: one that is added to, and one that is written.
const STRIDE: u64 = 64;
const LIMIT: Duration = Duration::from_secs(100);

/// What other processes of these tests do.
#[test]
#[ignore = "started by other tests"]
fn process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let role: Vec<&str> = role.split(' ').collect();
    let file = OpenOptions::new().read(true).write(true).open(role[0]).unwrap();
    let memory = Memory::file(&file, Rights::ReadWrite).unwrap();
    let node = Node::new().unwrap();
    node.export_keyed("memory", memory, Rights::ReadWrite, 0, key(role[2])).unwrap();
    // The one before may hold the address for a moment.
    let start = Instant::now();
    while let Err(error) = node.listen(role[1]) {
        assert!(start.elapsed() < Duration::from_secs(20), "{error}");
        std::thread::sleep(Duration::from_millis(5));
    }
    println!("ready now");
    std::thread::sleep(Duration::from_secs(300));
}

/// Over the connection also where the memory could be mapped.
fn reconnect() -> Reconnect {
    let options = ConnectOptions { link: LinkChoice::Socket, ..ConnectOptions::default() };
    Reconnect { options, patience: LIMIT, ..Reconnect::default() }
}

/// What one thread knows of its words.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    done: u64,
    unknown: u64,
    failed: u64,
    /// The last value that a flush has confirmed, and the last one written.
    flushed: u64,
    written: u64,
}

impl Known {
    fn note<T>(&mut self, added: Result<T, Error>) {
        match added {
            Ok(_) => self.done += 1,
            Err(Error::OutcomeUnknown { .. }) => self.unknown += 1,
            Err(_) => self.failed += 1,
        }
    }
}

/// Adds one by one, several at once, and writes and flushes, until told to stop.
fn work(region: &LastingRegion, thread: usize, stop: &AtomicBool) -> Known {
    let (add, write) = (thread as u64 * STRIDE, thread as u64 * STRIDE + 8);
    let mut known = Known::default();
    while !stop.load(Ordering::Relaxed) {
        known.note(region.fetch_add(add, 1u64));
        if let Ok(region) = region.current() {
            let posted: Vec<_> = (0..20).map(|_| region.post().atomic(add, Atomically::Add(1u64))).collect();
            for op in posted {
                known.note(op.and_then(|op| op.wait()));
            }
        }
        known.written += 1;
        let written = region.write(write, &known.written.to_ne_bytes());
        if written.and_then(|()| region.flush()).is_ok() {
            known.flushed = known.written;
        }
    }
    known
}

/// Lets threads work while `disturb` makes trouble; then compares what they know with the words.
fn torment(
    address: &str,
    reconnect: Reconnect,
    keep_alive: KeepAlive,
    disturb: impl FnOnce(),
    word: impl Fn(u64) -> u64,
) {
    let node = Node::new().unwrap();
    node.keep_alive(keep_alive);
    let peer = node.connect_lasting(address, reconnect).unwrap();
    let regions: Vec<_> = (0..THREADS).map(|_| peer.import("memory", &KEY).unwrap()).collect();
    let stop = AtomicBool::new(false);
    let known: Vec<Known> = std::thread::scope(|scope| {
        let stop = &stop;
        let threads: Vec<_> = regions
            .iter()
            .enumerate()
            .map(|(thread, region)| scope.spawn(move || work(region, thread, stop)))
            .collect();
        disturb();
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let epochs = peer.epoch();
    drop((regions, peer, node));
    let mut sum = Known::default();
    for (thread, known) in known.iter().enumerate() {
        let (value, last) = (word(thread as u64 * STRIDE), word(thread as u64 * STRIDE + 8));
        assert!(
            (known.done..=known.done + known.unknown).contains(&value),
            "thread {thread}: {value} for {known:?}"
        );
        assert!((known.flushed..=known.written).contains(&last), "thread {thread}: {last} for {known:?}");
        sum.done += known.done;
        sum.unknown += known.unknown;
        sum.failed += known.failed;
    }
    println!("{epochs} epochs, {} done, {} unknown, {} failed", sum.done, sum.unknown, sum.failed);
    assert!(epochs > 3 && sum.done > 50 && sum.unknown > 0, "{epochs} {sum:?}");
}

#[test]
fn a_server_that_is_killed_and_started_again_executes_nothing_twice() {
    let path = std::env::temp_dir().join(format!("netvm-reconnect-{}", std::process::id()));
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    file.set_len(4096).unwrap();
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = || Process::start(&format!("{} {address} {}", path.display(), hex(KEY)));
    let mut server = start();
    let mut random = Random::new(11);
    let disturb = || {
        for _ in 0..8 {
            std::thread::sleep(Duration::from_millis(20 + random.next() % 100));
            server.signal("-KILL");
            server = start();
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    let reconnect = reconnect();
    let memory = Memory::file(&file, Rights::Read).unwrap();
    let word = |offset| {
        let mut bytes = [0; 8];
        memory.shared().read_into(offset as usize, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    };
    torment(&address, reconnect, KeepAlive::default(), disturb, word);
    let _ = std::fs::remove_file(path);
}

/// What is between a client and a server: passes bytes on until told to break.
struct Cable {
    address: String,
    broken: Arc<AtomicU64>,
}

/// Both ends are closed, in the middle of whatever is under way.
const CUT: u64 = 1;
/// Nothing is passed on any more, and nobody is told.
const SILENT: u64 = 2;

impl Cable {
    fn new(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        // How it breaks, and how often it has: each connection lives until the next time.
        let broken = Arc::new(AtomicU64::new(0));
        let shared = Arc::clone(&broken);
        std::thread::spawn(move || {
            let mut kept = Vec::new();
            while let Ok((client, _)) = listener.accept() {
                let Ok(server) = TcpStream::connect(&server) else { continue };
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                // Silent connections stay open.
                kept.push((client.try_clone().unwrap(), server.try_clone().unwrap()));
                let now = shared.load(Ordering::SeqCst);
                let (one, two) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                for (from, to) in [(client, server), (two, one)] {
                    let broken = Arc::clone(&shared);
                    std::thread::spawn(move || pass(from, to, &broken, now));
                }
            }
        });
        Self { address, broken }
    }

    fn break_by(&self, how: u64) {
        let next = (self.broken.load(Ordering::SeqCst) >> 8) + 1;
        self.broken.store(next << 8 | how, Ordering::SeqCst);
    }
}

/// Passes a few bytes at a time, so that it breaks within frames.
fn pass(mut from: TcpStream, mut to: TcpStream, broken: &AtomicU64, at_first: u64) {
    from.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
    let mut bytes = [0; 61];
    loop {
        let now = broken.load(Ordering::SeqCst);
        if now != at_first {
            if now & 0xFF == CUT {
                let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
            }
            return;
        }
        match from.read(&mut bytes) {
            Ok(0) => return drop(to.shutdown(Shutdown::Both)),
            Ok(count) if to.write_all(&bytes[..count]).is_ok() => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
}

fn over_a_cable(how: &[u64], keep_alive: KeepAlive) {
    let server = Node::new().unwrap();
    // The server's own time-out is long: it is the new epoch that ends the old session.
    server.keep_alive(KeepAlive { interval_ms: 100_000, timeout_ms: 1_000_000 });
    let memory = Node::memory(4096).unwrap();
    server.export_keyed("memory", Arc::clone(&memory), Rights::ReadWrite, 0, KEY).unwrap();
    let cable = Cable::new(server.listen("127.0.0.1:0").unwrap());
    let mut random = Random::new(3);
    let disturb = || {
        for round in 0..12 {
            std::thread::sleep(Duration::from_millis(30 + random.next() % 50));
            cable.break_by(how[round % how.len()]);
            std::thread::sleep(Duration::from_millis(if how.contains(&SILENT) { 250 } else { 20 }));
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let reconnect = reconnect();
    let word =
        |offset: u64| memory.shared().with_u64(offset as usize, |word| word.load(Ordering::SeqCst)).unwrap();
    torment(&cable.address, reconnect, keep_alive, disturb, word);
}

#[test]
fn cut_connections_execute_nothing_twice() {
    over_a_cable(&[CUT], KeepAlive::default());
}

#[test]
fn silent_connections_are_replaced_and_execute_nothing_twice() {
    over_a_cable(&[SILENT, CUT], KeepAlive { interval_ms: 20, timeout_ms: 100 });
}
