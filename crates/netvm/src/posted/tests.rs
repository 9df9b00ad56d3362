//! Posted operations over real links: what ends when, how much may be under way, and what a broken session leaves known.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use netvm_core::limits::{OPS_MAX, WINDOW};

use super::*;
use crate::link::{Caps, Fault, Faulty, Incoming, Link, Loopback, Outgoing};
use crate::node::{LinkChoice, Mapping, Node, Rights};
use crate::notify::Notify;
use crate::region::Peer;

const SOON: Option<Duration> = Some(Duration::from_secs(20));

fn word(memory: &Mapping, offset: usize) -> u64 {
    memory.shared().with_u64(offset, |word| word.load(Ordering::SeqCst)).unwrap()
}

fn nodes(here: impl Link + 'static, there: impl Link + 'static) -> (Node, Node, Peer) {
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    server.serve_links(vec![Box::new(there)]).unwrap();
    let limits = (OPS_MAX as u32, WINDOW as u32);
    let peer = client.connect_links(vec![Box::new(here)], limits, "peer").unwrap();
    peer.choose(LinkChoice::Socket);
    (server, client, peer)
}

/// A server with 1 MiB, a client, and what it imports.
fn over_tcp(link: LinkChoice) -> (Node, Arc<Mapping>, Node, Region) {
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let memory = Node::memory(1 << 20).unwrap();
    let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let peer = client.connect(&server.listen("127.0.0.1:0").unwrap()).unwrap();
    peer.choose(link);
    let region = peer.import("memory", &key).unwrap();
    (server, memory, client, region)
}

/// Receives nothing while it is held.
struct Held<L>(L, Arc<AtomicBool>);

impl<L: Link> Link for Held<L> {
    fn caps(&self) -> Caps {
        self.0.caps()
    }
    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        self.0.post(pieces)
    }
    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        if self.1.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.0.poll(pieces)
    }
    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.0.wait_fd()
    }
}

#[test]
fn posted_operations_end_with_what_the_blocking_ones_return() {
    for link in [LinkChoice::Socket, LinkChoice::Shm] {
        posted_operations_end(link);
    }
}

fn posted_operations_end(link: LinkChoice) {
    let (_server, memory, _client, region) = over_tcp(link);
    let local = Node::memory(1 << 20).unwrap();
    local.shared().fill(7);
    // Copied, not copied, and scattered.
    for bytes in [0, 1, 4096, COPIED_BYTES_MAX, COPIED_BYTES_MAX + 1, 1 << 19] {
        let (one, two) =
            (local.shared().sub(3, bytes / 3).unwrap(), local.shared().sub(9, bytes / 2).unwrap());
        memory.shared().fill(0);
        let written = region.post().write(5, &[one, two], WriteOptions::default()).unwrap();
        let flushed = region.post().flush().unwrap();
        flushed.wait().unwrap();
        assert_eq!(written.test(), Some(Ok(())), "a flush comes after the writes");
        let all = bytes / 3 + bytes / 2;
        let is = |at: usize| memory.shared().sub(at, 1).unwrap().to_vec() == [7];
        assert!(!is(4) && !is(5 + all) && (5..5 + all).step_by(511).all(is));
        let back = Node::memory(1 << 20).unwrap();
        let target = back.shared().sub(1, all).unwrap();
        region.post().read(5, &[target]).unwrap().wait().unwrap();
        assert_eq!(target.to_vec(), vec![7; all]);
    }
    memory.shared().fill(0);
    let added: Vec<_> = (0..100).map(|_| region.post().atomic(8, Atomically::Add(3u64)).unwrap()).collect();
    let old: Vec<_> = added.iter().map(|op| op.wait().unwrap()).collect();
    assert_eq!(old, (0..100).map(|index| index * 3).collect::<Vec<u64>>());
    let swap = region.post().atomic(8, Atomically::CompareSwap { expected: 300, new: 5u32 }).unwrap();
    assert_eq!(swap.wait_for(Duration::from_secs(20)), Some(Ok(300)));
    assert_eq!(swap.test(), Some(Ok(300)), "told again");
    assert_eq!(word(&memory, 8), 5);
    // Refused here and there.
    assert!(matches!(region.post().read(1 << 20, &[local.shared()]), Err(Error::Bounds { .. })));
    let misaligned = region.post().atomic(4, Atomically::Load::<u64>).unwrap().wait();
    assert!(matches!(misaligned, Err(Error::Op { .. })), "{misaligned:?}");
}

#[test]
fn nobody_has_to_wait_for_what_is_posted() {
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let memory = Node::memory(1 << 20).unwrap();
    let exported = server.export_notified("memory", Arc::clone(&memory), Rights::ReadWrite, 1);
    let (key, board) = exported.unwrap();
    let peer = client.connect(&server.listen("127.0.0.1:0").unwrap()).unwrap();
    peer.choose(LinkChoice::Socket);
    let region = peer.import("memory", &key).unwrap();
    let local = Node::memory(1 << 20).unwrap();
    local.shared().fill(1);
    for round in 0..50 {
        let counter = Counter::new();
        for index in 0..64 {
            let bytes = [8, 40_000][index % 2];
            let local = local.shared().sub(index, bytes).unwrap();
            region.post().counted(&counter).write(0, &[local], WriteOptions::default()).unwrap();
        }
        region.post().atomic(8 * (1000 + round), Atomically::Add(1u64)).unwrap().detach();
        let options = WriteOptions { fence: false, notify: Some(Notify::Count { number: 0 }) };
        region.post().write(0, &[], options).unwrap().detach();
        assert!(board.wait(0, SOON) && board.acknowledge(0), "round {round}");
        assert_eq!(word(&memory, 0), 0x0101_0101_0101_0101);
        // Only the node's thread, looking at the counter.
        while counter.pending() > 0 {
            std::thread::sleep(Duration::from_micros(50));
        }
        assert_eq!((counter.done(), counter.failed()), (64, 0));
        memory.shared().sub(0, 4096).unwrap().fill(0);
    }
}

#[test]
fn counters_count_operations_of_several_peers() {
    let (_server, memory, _client, region) = over_tcp(LinkChoice::Socket);
    let (_second, other, _client, there) = over_tcp(LinkChoice::Socket);
    let counter = Counter::new();
    assert_eq!(counter.wait_for(0, None), Ok(true));
    assert_eq!(counter.wait_for(1, Some(Duration::from_millis(5))), Ok(false));
    std::thread::scope(|scope| {
        // Waits before the first is posted.
        let waiter = scope.spawn(|| counter.wait_for(2000, SOON));
        for index in 0..1000u64 {
            region.post().counted(&counter).atomic(0, Atomically::Add(1u64)).unwrap();
            there.post().counted(&counter).atomic(8 * (index % 4), Atomically::Add(1u64)).unwrap();
        }
        assert_eq!(waiter.join().unwrap(), Ok(true));
    });
    assert_eq!((counter.posted(), counter.done(), counter.pending()), (2000, 2000, 0));
    assert_eq!((word(&memory, 0), word(&other, 24)), (1000, 250));
    there.post().counted(&counter).atomic(4, Atomically::Add(1u64)).unwrap();
    region.post().counted(&counter).flush().unwrap();
    assert!(matches!(counter.wait_all(SOON), Err(Error::Op { .. })));
    assert!(matches!(counter.wait_for(2002, SOON), Err(Error::Op { .. })), "until somebody takes it");
    assert!(matches!(counter.take_error(), Some(Error::Op { .. })));
    assert_eq!((counter.done(), counter.failed(), counter.wait_all(SOON)), (2001, 1, Ok(true)));
}

#[test]
fn no_more_than_there_is_room_for_is_under_way() {
    let (here, there) = Loopback::pair().unwrap();
    let held = Arc::new(AtomicBool::new(false));
    let (server, _client, peer) = nodes(here, Held(there, Arc::clone(&held)));
    let memory = Node::memory(1 << 20).unwrap();
    let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let region = peer.import("memory", &key).unwrap();
    let local = Node::memory(1 << 20).unwrap();
    held.store(true, Ordering::SeqCst);
    let counter = Counter::new();
    let post = || region.post().without_waiting().counted(&counter);
    let fill = |mut start: Box<dyn FnMut() -> Result<()> + '_>| {
        for posted in 0..100_000 {
            match start() {
                Ok(()) => {}
                Err(Error::WouldBlock { .. }) => return posted,
                Err(other) => panic!("{other}"),
            }
        }
        panic!("no end");
    };
    let small = local.shared().sub(0, 1000).unwrap();
    let writes = fill(Box::new(|| post().write(0, &[small], WriteOptions::default())));
    assert!((100..=WINDOW).contains(&writes), "{writes}");
    let atomics = fill(Box::new(|| post().atomic(8192, Atomically::Add(1u64))));
    assert_eq!(atomics, OPS_MAX as u64);
    assert_eq!(counter.pending(), atomics);
    std::thread::scope(|scope| {
        // Who may wait does, until there is room.
        let waiter = scope.spawn(|| region.post().atomic(8192, Atomically::Add(1u64)).unwrap().wait());
        std::thread::sleep(Duration::from_millis(20));
        held.store(false, Ordering::SeqCst);
        assert_eq!(waiter.join().unwrap(), Ok(OPS_MAX as u64));
    });
    assert_eq!(counter.wait_all(SOON), Ok(true));
    assert_eq!(counter.done(), writes + atomics);
}

#[test]
fn a_dropped_operation_has_ended() {
    let (here, there) = Loopback::pair().unwrap();
    let held = Arc::new(AtomicBool::new(false));
    let (server, _client, peer) = nodes(here, Held(there, Arc::clone(&held)));
    let memory = Node::memory(4096).unwrap();
    memory.shared().fill(3);
    let key = server.export("memory", memory, Rights::Read).unwrap();
    let region = peer.import("memory", &key).unwrap();
    let local = Node::memory(4096).unwrap();
    held.store(true, Ordering::SeqCst);
    let read = region.post().read(0, &[local.shared()]).unwrap();
    assert_eq!((read.test(), read.wait_for(Duration::from_millis(5))), (None, None));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            held.store(false, Ordering::SeqCst);
        });
        drop(read);
        assert_eq!(local.shared().to_vec(), [3; 4096]);
    });
    // An operation keeps its session.
    let read = region.post().read(0, &[local.shared()]).unwrap();
    drop((region, peer));
    read.wait().unwrap();
}

#[test]
fn a_cut_at_any_byte_leaves_atomics_done_unknown_or_lost() {
    let (mut unknown, mut lost) = (0, 0);
    for cut in 0..300 {
        let ends = (Fault::CutAfter(100 + 7 * cut), Fault::CutAfter(u64::MAX));
        let (one, two) = if cut % 2 == 0 { ends } else { (ends.1, ends.0) };
        let (here, there) = Loopback::pair().unwrap();
        let (server, _client, peer) = nodes(Faulty::new(here, one), Faulty::new(there, two));
        let memory = Node::memory(4096).unwrap();
        let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
        let Ok(region) = peer.import("memory", &key) else { continue };
        let mut ops = Vec::new();
        while ops.len() < 60 {
            let Ok(op) = region.post().atomic(0, Atomically::Add(1u64)) else { break };
            ops.push(op);
        }
        let (mut done, mut perhaps) = (0, 0);
        for op in &ops {
            match op.wait() {
                Ok(before) => {
                    assert_eq!(before, done, "in order");
                    done += 1;
                }
                Err(Error::OutcomeUnknown { .. }) => perhaps += 1,
                Err(Error::LenderLost { .. }) => lost += 1,
                Err(other) => panic!("{other}"),
            }
        }
        drop((ops, region, peer, server));
        let executed = word(&memory, 0);
        assert!((done..=done + perhaps).contains(&executed), "{done} {perhaps} {executed}");
        unknown += perhaps;
    }
    assert!(unknown > 0, "{unknown} {lost}");
}

/// Counts what it is given to send.
struct Counting<L>(L, Arc<std::sync::atomic::AtomicUsize>);

impl<L: Link> Link for Counting<L> {
    fn caps(&self) -> Caps {
        self.0.caps()
    }
    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        let sent = self.0.post(pieces);
        self.1.fetch_add(usize::from(sent.is_ok()), Ordering::SeqCst);
        sent
    }
    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        self.0.poll(pieces)
    }
    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.0.wait_fd()
    }
}

#[test]
fn what_is_followed_goes_with_the_last() {
    let sends = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (here, there) = Loopback::pair().unwrap();
    let (server, _client, peer) = nodes(Counting(here, Arc::clone(&sends)), there);
    let memory = Node::memory(1 << 20).unwrap();
    let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let region = peer.import("memory", &key).unwrap();
    let local = Node::memory(1 << 20).unwrap();
    local.shared().write_from(0, &[7; 1 << 20]).unwrap();
    let piece = |index: usize, bytes: usize| local.shared().sub(index * bytes, bytes).unwrap();
    let none = WriteOptions::default();
    // Three of 20 KiB wait for the fourth. The node's thread may come by in between, but not each time.
    let mut least = usize::MAX;
    for _ in 0..20 {
        region.flush().unwrap();
        let before = sends.load(Ordering::SeqCst);
        let mut ops: Vec<_> = (0..3)
            .map(|index| {
                let post = region.post().followed();
                post.write(index as u64 * 20_480, &[piece(index, 20_480)], none).unwrap()
            })
            .collect();
        ops.push(region.post().write(3 * 20_480, &[piece(3, 20_480)], none).unwrap());
        ops.iter().for_each(|op| op.wait().unwrap());
        least = least.min(sends.load(Ordering::SeqCst) - before);
    }
    assert_eq!(least, 1);
    region.flush().unwrap();
    assert!(memory.shared().sub(0, 4 * 20_480).unwrap().to_vec().iter().all(|&byte| byte == 7));
    // What is many bytes is sent, whatever follows.
    let before = sends.load(Ordering::SeqCst);
    let op = region.post().followed().write(0, &[local.shared()], none).unwrap();
    assert!(sends.load(Ordering::SeqCst) > before);
    op.wait().unwrap();
}

#[test]
fn what_nothing_follows_is_sent_all_the_same() {
    for link in [LinkChoice::Socket, LinkChoice::Auto] {
        let (_server, memory, _client, region) = over_tcp(link);
        let local = Node::memory(1 << 20).unwrap();
        for round in 1..=50u64 {
            local.shared().with_u64(0, |word| word.store(round, Ordering::SeqCst)).unwrap();
            let small = local.shared().sub(0, 8).unwrap();
            region.post().followed().write(0, &[small], WriteOptions::default()).unwrap();
            let read = region.post().followed().read(0, &[local.shared().sub(4096, 32 << 10).unwrap()]);
            let read = read.unwrap();
            assert!(region.session().is_sent_by_somebody());
            let start = Instant::now();
            while read.cell.get().is_none() {
                assert!(start.elapsed() < Duration::from_secs(10), "nobody sent it");
                std::thread::yield_now();
            }
            assert_eq!((word(&memory, 0), word(&local, 4096)), (round, round));
        }
    }
}

#[test]
fn more_is_followed_than_there_is_room_for() {
    let (_server, memory, _client, region) = over_tcp(LinkChoice::Socket);
    memory.shared().write_from(0, &[9; 1 << 20]).unwrap();
    let local = Node::memory(1 << 20).unwrap();
    let counter = Counter::new();
    let piece = |index: u64| local.shared().sub(index as usize % 256 * 4096, 4096).unwrap();
    // Short requests: their bytes would never make a send, so only the want of room does.
    for index in 0..4 * OPS_MAX as u64 {
        region.post().followed().counted(&counter).read(index % 256 * 4096, &[piece(index)]).unwrap();
    }
    let full = (0..2 * OPS_MAX as u64).try_for_each(|index| {
        let post = region.post().followed().without_waiting().counted(&counter);
        post.read(index % 256 * 4096, &[piece(index)])
    });
    assert!(matches!(full, Ok(()) | Err(Error::WouldBlock { .. })), "{full:?}");
    assert_eq!(counter.wait_all(SOON), Ok(true));
    assert!(local.shared().to_vec().iter().all(|&byte| byte == 9));
}

#[test]
fn scattered_pieces_are_posted_together() {
    for link in [LinkChoice::Socket, LinkChoice::Auto] {
        let (_server, memory, _client, region) = over_tcp(link);
        let local = Node::memory(1 << 20).unwrap();
        (0..256u64).for_each(|page| {
            local.shared().with_u64(page as usize * 4096, |word| word.store(page, Ordering::SeqCst)).unwrap();
        });
        let counter = Counter::new();
        // The pages in reverse.
        let pieces: Vec<_> = (0..256)
            .map(|page| ((255 - page) * 4096, local.shared().sub(page as usize * 4096, 4096).unwrap()))
            .collect();
        let none = WriteOptions::default();
        assert_eq!(region.post().counted(&counter).write_vectored(&pieces, none), Ok(256));
        assert_eq!(counter.wait_for(256, SOON), Ok(true));
        region.flush().unwrap();
        assert!((0..256).all(|page| word(&memory, page * 4096) == 255 - page as u64));
        assert_eq!(region.post().counted(&counter).read_vectored(&pieces[..100]), Ok(100));
        assert_eq!(counter.wait_all(SOON), Ok(true));
        assert_eq!((counter.posted(), counter.done()), (356, 356));
        // Where there is no more room the rest is left.
        let mut left = &pieces[..];
        while !left.is_empty() {
            let posted = region.post().without_waiting().counted(&counter).read_vectored(left).unwrap();
            left = &left[posted..];
            assert_eq!(counter.wait_all(SOON), Ok(true));
        }
        assert_eq!(counter.done(), 356 + 256);
        // All or nothing, where it is known before.
        let mut wrong = pieces.clone();
        wrong[255].0 = 1 << 20;
        let post = region.post().counted(&counter);
        assert!(matches!(post.write_vectored(&wrong, none), Err(Error::Bounds { .. })));
        assert_eq!(counter.posted(), 356 + 256);
    }
}

#[test]
fn scattered_pieces_end_with_their_peer() {
    for round in 0..20 {
        let (server, _memory, _client, region) = over_tcp(LinkChoice::Socket);
        let local = Node::memory(1 << 20).unwrap();
        let pieces: Vec<_> = (0..200u64)
            .map(|index| {
                (index % 16 * 65_536, local.shared().sub(index as usize % 16 * 65_536, 65_536).unwrap())
            })
            .collect();
        let counter = Counter::new();
        let start = Instant::now();
        let posted = std::thread::scope(|scope| {
            let lists = scope.spawn(|| {
                let mut posted = 0;
                loop {
                    let post = region.post().counted(&counter);
                    let list = match posted % 2 {
                        0 => post.write_vectored(&pieces, WriteOptions::default()),
                        _ => post.read_vectored(&pieces),
                    };
                    match list {
                        Ok(count) => assert_eq!(count, 200),
                        Err(error) => return (posted, error),
                    }
                    posted += 1;
                }
            });
            std::thread::sleep(Duration::from_micros(300 * round));
            drop(server);
            lists.join().unwrap()
        });
        assert!(matches!(posted.1, Error::LenderLost { .. } | Error::OutcomeUnknown { .. }), "{posted:?}");
        // Those that were under way have ended, and are counted.
        let ended = counter.wait_all(SOON);
        assert!(ended != Ok(false) && counter.pending() == 0, "{ended:?}, {counter:?}");
        assert_eq!(counter.done() + counter.failed(), counter.posted());
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    }
}

/// The links of a session that has ended are closed: nobody looks at them any more.
#[test]
fn a_session_that_has_ended_is_no_longer_looked_at() {
    let (server, _memory, _client, region) = over_tcp(LinkChoice::Socket);
    let link = region.link();
    // One waits for more than one peer's operations when the only one that was busy ends.
    let session = Arc::clone(region.session());
    let waiting = std::thread::spawn(move || session.wait_posted("read", || false));
    let session = Arc::clone(region.session());
    let following = std::thread::spawn(move || session.wait_posted_for(Duration::MAX, || false));
    std::thread::sleep(Duration::from_millis(20));
    drop(server);
    for waited in [waiting.join().unwrap(), following.join().unwrap()] {
        assert!(matches!(waited, Err(Error::LenderLost { .. })), "{waited:?}");
    }
    let start = Instant::now();
    assert!(region.session().wait_posted("read", || false).is_err());
    assert!(region.session().wait_posted_for(Duration::from_secs(20), || false).is_err());
    assert!(start.elapsed() < Duration::from_secs(10), "waited for nothing");
    assert_eq!((region.link(), Peer::new(Arc::clone(region.session()), false).link()), (link, link));
    // A counter waits for others to post more, and its thread sleeps.
    let counter = Counter::new();
    counter.count.begin(region.session());
    assert_eq!(counter.wait_for(1, Some(Duration::from_millis(50))), Ok(false));
}

#[test]
fn an_operation_may_be_waited_for_without_end() {
    let (_server, _memory, _client, region) = over_tcp(LinkChoice::Socket);
    let local = Node::memory(4096).unwrap();
    let read = region.post().read(0, &[local.shared()]).unwrap();
    assert_eq!(read.wait_for(Duration::MAX), Some(Ok(())));
}

/// Takes so many bytes, and no more until it is open.
struct Narrow<L>(L, Arc<(AtomicBool, std::sync::atomic::AtomicUsize)>);

impl<L: Link> Link for Narrow<L> {
    fn caps(&self) -> Caps {
        self.0.caps()
    }
    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        let (is_open, left) = &*self.1;
        if is_open.load(Ordering::SeqCst) {
            return self.0.post(pieces);
        }
        let bytes = left.load(Ordering::SeqCst).min(pieces.total_bytes());
        if bytes == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut some = vec![0; bytes];
        let count = pieces.gather(0, &mut some)?;
        let mut short = Outgoing::new();
        short.bytes(&some[..count]);
        let sent = self.0.post(&short)?;
        left.fetch_sub(sent, Ordering::SeqCst);
        Ok(sent)
    }
    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        self.0.poll(pieces)
    }
    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.0.wait_fd()
    }
}

#[test]
fn what_the_link_does_not_take_at_the_tick_is_sent_when_it_does() {
    let width = Arc::new((AtomicBool::new(true), std::sync::atomic::AtomicUsize::new(1000)));
    let (here, there) = Loopback::pair().unwrap();
    let (server, client, peer) = nodes(Narrow(here, Arc::clone(&width)), there);
    for node in [&server, &client] {
        // Nobody else looks.
        node.keep_alive(crate::node::KeepAlive::new(60_000, 60_000));
    }
    let memory = Node::memory(1 << 16).unwrap();
    let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let region = peer.import("memory", &key).unwrap();
    let local = Node::memory(8192).unwrap();
    local.shared().fill(7);
    std::thread::sleep(Duration::from_millis(20));
    width.0.store(false, Ordering::SeqCst);
    region.post().followed().write(0, &[local.shared()], WriteOptions::default()).unwrap().detach();
    let start = Instant::now();
    let wait = |what: &str, so: &dyn Fn() -> bool| {
        while !so() {
            assert!(start.elapsed() < Duration::from_secs(10), "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    wait("the node's thread does not come by", &|| width.1.load(Ordering::SeqCst) == 0);
    std::thread::sleep(Duration::from_millis(20));
    width.0.store(true, Ordering::SeqCst);
    wait("the rest is not sent", &|| memory.shared().sub(8191, 1).unwrap().to_vec() == [7]);
}

#[test]
fn what_is_followed_ends_with_its_peer() {
    for round in 0..20 {
        let (server, _memory, _client, region) = over_tcp(LinkChoice::Socket);
        let local = Node::memory(1 << 20).unwrap();
        let whole = local.shared();
        let reads: Vec<_> = (0..10).map(|_| region.post().followed().read(0, &[whole]).unwrap()).collect();
        let write =
            region.post().followed().write(0, &[whole.sub(0, 20_000).unwrap()], WriteOptions::default());
        if round % 2 == 0 {
            std::thread::sleep(Duration::from_micros(100 * round));
        }
        drop(server);
        // Done, or lost with the peer: nobody waits for ever.
        let start = Instant::now();
        for ended in reads.iter().map(Op::wait).chain([write.and_then(|write| write.wait())]) {
            assert!(
                matches!(&ended, Ok(()) | Err(Error::LenderLost { .. } | Error::OutcomeUnknown { .. })),
                "{ended:?}"
            );
        }
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    }
}
