//! What a peer may ask for, and in which order. tests/shm.rs has the rest, between processes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use netvm_core::gate::{self, GATE_WORDS};
use netvm_core::sim::Random;
use netvm_core::wire::Status;

use super::*;
use crate::error::Error;
use crate::node::{Node, RemoteKey, Rights};
use crate::region::{Peer, Region};

#[test]
fn golden_bytes() {
    let meet = Request::Meet(Invitation { name: [1; 16], hello: [2; 16], proof: [3; 16] });
    assert_eq!(meet.encode(), [&[1][..], &[1; 16], &[2; 16], &[3; 16]].concat());
    let share = Request::Share { handle: 0x0403_0201, light: true, apart: false };
    assert_eq!(share.encode(), [2, 1, 2, 3, 4, 1]);
    let apart = Request::Share { handle: 9, light: true, apart: true };
    assert_eq!((apart.encode()[5], Request::decode(&apart.encode())), (3, Some(apart)));
    let ring = Request::Ring { handle: 5 };
    assert_eq!(ring.encode(), [3, 5, 0, 0, 0]);
    assert_eq!(Request::Applied.encode(), [4]);
    for request in [meet, share, ring, Request::Applied] {
        let bytes = request.encode();
        assert_eq!(Request::decode(&bytes), Some(request));
        assert_eq!(Request::decode(&bytes[..bytes.len() - 1]), None);
        assert_eq!(Request::decode(&[&bytes[..], &[0]].concat()), None);
    }
    let share = Share { number: 2, bytes: 4096, gate: true, board: false, light: true, apart: false };
    assert_eq!(share.encode(), [2, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 5]);
    assert_eq!(Share::decode(&share.encode()), Some(share));
    let apart = Share { apart: true, ..share };
    assert_eq!((apart.encode()[12], Share::decode(&apart.encode())), (13, Some(apart)));
    let place = Place { address: 0x1000, bytes: 5, writable: true, gate: 0x2000 };
    let bytes = [[0, 16, 0, 0, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0, 0, 0], [1, 0, 32, 0, 0, 0, 0, 0]].concat();
    assert_eq!(place.encode(), [&bytes[..], &[0]].concat());
    assert_eq!(Place::decode(&place.encode()), Some(place));
    assert_eq!((Place::decode(&bytes), Place::decode(&[0xFF; PLACE_BYTES])), (None, None));
    assert_eq!((Share::decode(&[0; 12]), Request::decode(&[]), Request::decode(&[9; 5])), (None, None, None));
    assert_eq!(meeting_name(&[0xA5; 16]), b"netvm-a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5");
    assert_eq!("shm".parse(), Ok(LinkChoice::Shm));
}

/// A peer that speaks for itself.
struct Stranger {
    server: Node,
    _client: Node,
    memory: Arc<Mapping>,
    key: RemoteKey,
    peer: Peer,
    region: Region,
}

impl Stranger {
    fn new() -> Self {
        let server = Node::new().unwrap();
        let memory = Node::memory(8192).unwrap();
        let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
        Self::connect(server, memory, key)
    }

    fn connect(server: Node, memory: Arc<Mapping>, key: RemoteKey) -> Self {
        let client = Node::new().unwrap();
        let peer = client.connect_local(&server).unwrap();
        peer.choose(LinkChoice::Socket);
        let region = peer.import("memory", &key).unwrap();
        Self { server, _client: client, memory, key, peer, region }
    }

    /// Ends the session, with the segment open as one that is cut has it, and begins another.
    fn again(self) -> Self {
        let Self { server, memory, key, peer, region, _client } = self;
        drop(_client);
        drop((region, peer));
        Self::connect(server, memory, key)
    }

    fn wait_for_shares(&self, shares: usize) {
        let start = Instant::now();
        while self.server.shared().shares("memory") != shares {
            assert!(start.elapsed().as_secs() < 10, "{} shares", self.server.shared().shares("memory"));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn ask(&self, request: Request) -> Result<Vec<u8>, Status> {
        self.call(&request.encode())
    }

    fn call(&self, body: &[u8]) -> Result<Vec<u8>, Status> {
        match self.region.call(SHM_METHOD, body) {
            Ok(body) => Ok(body),
            Err(Error::Op { code, .. }) => Err(code),
            Err(other) => panic!("{other}"),
        }
    }

    fn share(&self) -> Result<Vec<u8>, Status> {
        self.ask(Request::Share { handle: self.region.handle(), light: true, apart: false })
    }

    /// Gets the memory, and the gate, which it works as it likes.
    fn guest(&self, number: u8) -> (FdSocket, PeerWords) {
        let (_listener, socket) = self.meet(name(number));
        socket.send(&[2; 16], &[]).unwrap();
        self.share().unwrap();
        let (_, mut fds) = socket.receive(&mut [0; 8]).unwrap();
        let gate = PeerWords(SharedWords::of_peer(fds.pop().unwrap(), GATE_WORDS).unwrap());
        (socket, gate)
    }

    /// Waits at `name` until the exporter has come.
    fn meet(&self, name: Secret) -> (FdListener, FdSocket) {
        let listener = FdListener::bind(&meeting_name(&name)).unwrap();
        self.ask(Request::Meet(Invitation { name, hello: [1; 16], proof: [2; 16] })).unwrap();
        // The strangers of another test may have come too.
        loop {
            let socket = listener.accept().unwrap().unwrap();
            let mut bytes = [0; 16];
            if matches!(socket.receive(&mut bytes), Ok((16, _))) && bytes == [1; 16] {
                return (listener, socket);
            }
        }
    }
}

fn name(number: u8) -> Secret {
    let mut name = [number; 16];
    name[..4].copy_from_slice(&std::process::id().to_le_bytes());
    name
}

#[test]
fn nothing_is_passed_to_who_cannot_prove_itself() {
    let stranger = Stranger::new();
    assert_eq!(stranger.share(), Err(Status::BadRequest), "before a meeting");
    let nowhere = Request::Meet(Invitation { name: name(1), hello: [1; 16], proof: [2; 16] });
    assert_eq!(stranger.ask(nowhere), Err(Status::Unsupported), "nobody listens there");
    for proof in [None, Some(&[3; 16][..]), Some(&[2; 15]), Some(&[])] {
        let (_listener, socket) = stranger.meet(name(2));
        if let Some(proof) = proof {
            socket.send(proof, &[]).unwrap();
        }
        assert_eq!(stranger.share(), Err(Status::Unsupported));
        assert!(!matches!(socket.receive(&mut [0; 64]), Ok((bytes, _)) if bytes > 0), "something came");
        assert_eq!(stranger.share(), Err(Status::BadRequest), "a proof is tried once");
    }
    // The session is as good as before.
    stranger.region.write(0, &[7; 8]).unwrap();
    stranger.region.flush().unwrap();
    assert_eq!(stranger.memory.shared().sub(0, 1).unwrap().to_vec(), [7]);
}

#[test]
fn one_message_is_under_way_and_each_handle_is_shared_once() {
    let stranger = Stranger::new();
    let (_listener, socket) = stranger.meet(name(3));
    socket.send(&[2; 16], &[]).unwrap();
    let second = stranger.peer.import("memory", &stranger.key).unwrap();
    let share = Share::decode(&stranger.share().unwrap()).unwrap();
    assert_eq!((share.number, share.bytes, share.gate, share.board), (0, 8192, true, false));
    assert_eq!(stranger.share(), Err(Status::BadRequest), "once");
    let share_second =
        || stranger.ask(Request::Share { handle: second.handle(), light: false, apart: false });
    assert_eq!(share_second(), Err(Status::Busy), "the first has not been taken");
    let mut bytes = [0; 8];
    let (len, fds) = socket.receive(&mut bytes).unwrap();
    assert_eq!((&bytes[..len], fds.len()), (&stranger.region.handle().to_le_bytes()[..], 2));
    socket.send(&[1], &[]).unwrap();
    let share = Share::decode(&share_second().unwrap()).unwrap();
    assert_eq!((share.number, share.gate, share.light), (1, false, false));
    assert_eq!(socket.receive(&mut bytes).unwrap().1.len(), 1);
    let meet = Request::Meet(Invitation { name: name(3), hello: [1; 16], proof: [2; 16] });
    assert_eq!(stranger.ask(meet), Err(Status::BadRequest), "met already");
    let foreign = Request::Share { handle: 4000, light: false, apart: false };
    assert_eq!(stranger.ask(foreign), Err(Status::NoHandle));
    assert_eq!(stranger.ask(Request::Ring { handle: 4000 }), Err(Status::NoHandle));
    assert_eq!(stranger.ask(Request::Ring { handle: second.handle() }), Ok(Vec::new()));
}

/// One descriptor for each session is the exporter's: of the socket.
#[test]
fn a_gate_keeps_no_descriptor() {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;
    let stranger = Stranger::new();
    let (_listener, socket) = stranger.meet(name(6));
    socket.send(&[2; 16], &[]).unwrap();
    stranger.share().unwrap();
    let (_, fds) = socket.receive(&mut [0; 8]).unwrap();
    let file = |path: std::path::PathBuf| std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    let files: Vec<_> =
        fds.iter().map(|fd| file(format!("/proc/self/fd/{}", fd.as_raw_fd()).into())).collect();
    drop(fds);
    let is_open = |wanted: &Option<(u64, u64)>| {
        std::fs::read_dir("/proc/self/fd").unwrap().any(|entry| file(entry.unwrap().path()) == *wanted)
    };
    // The memory has one, since it can be exported again.
    assert_eq!(files.iter().map(is_open).collect::<Vec<_>>(), [true, false]);
}

#[test]
fn unexporting_does_not_succeed_while_somebody_is_inside() {
    let stranger = Stranger::new();
    stranger.server.page_limit(Duration::from_millis(100));
    let (_socket, gate) = stranger.guest(4);
    assert!(gate::enter(&gate, 7, 0, || ()));
    for _ in 0..2 {
        let start = Instant::now();
        let unexported = stranger.server.unexport("memory");
        assert!(matches!(unexported, Err(Error::StillUsed { taken_back: true, .. })), "{unexported:?}");
        assert!(start.elapsed() >= Duration::from_millis(100));
    }
    assert!(!gate::enter(&gate, 8, 0, || ()), "nobody else goes in");
    gate::leave(&gate, 7);
    assert_eq!(
        (stranger.server.unexport("memory"), stranger.server.unexport("memory")),
        (Ok(true), Ok(false))
    );
}

/// While somebody's session is busy, others come, and nobody would wait for them.
#[test]
fn nobody_imports_what_is_being_taken_back() {
    let stranger = Stranger::new();
    let server = &stranger.server;
    // Nobody else wants the busy session.
    server.keep_alive(crate::node::KeepAlive::new(60_000, 60_000));
    std::thread::sleep(Duration::from_millis(50));
    let busy = server.shared().sessions().remove(0);
    let come = || {
        let client = Node::new().unwrap();
        let peer = client.connect_local(server).unwrap();
        peer.choose(LinkChoice::Socket);
        peer.import("memory", &stranger.key).map(|region| (region, client))
    };
    for limit in [200, 20_000] {
        server.page_limit(Duration::from_millis(limit));
        let held = busy.lock();
        std::thread::scope(|scope| {
            let unexporting = scope.spawn(|| server.unexport("memory"));
            std::thread::sleep(Duration::from_millis(50));
            let import = come();
            assert!(matches!(import, Err(Error::Op { code: Status::NoSegment, .. })), "{import:?}");
            if limit == 200 {
                let unexported = unexporting.join().unwrap();
                assert!(matches!(unexported, Err(Error::StillUsed { taken_back: false, .. })));
                // Nothing was done.
                let (region, _client) = come().unwrap();
                region.write(0, &[1; 4096]).unwrap();
                region.flush().unwrap();
                drop(held);
            } else {
                drop(held);
                assert_eq!(unexporting.join().unwrap(), Ok(true));
            }
        });
    }
    assert!(matches!(stranger.region.read(0, &mut [0]), Err(Error::Op { code: Status::NoHandle, .. })));
}

#[test]
fn who_dies_inside_is_out() {
    let stranger = Stranger::new();
    let (socket, gate) = stranger.guest(5);
    assert!(gate::enter(&gate, 7, 0, || ()));
    drop(socket);
    assert_eq!(stranger.server.unexport("memory"), Ok(true));
}

#[test]
fn who_comes_again_and_again_leaves_nothing() {
    let mut stranger = Stranger::new();
    let mut guests = Vec::new();
    for number in 0..5 {
        guests.push(stranger.guest(10 + number));
        stranger.wait_for_shares(1);
        stranger = stranger.again();
        stranger.wait_for_shares(0);
    }
    // Inside while its session ends, and out again before the next one comes.
    let (_first, gate) = stranger.guest(20);
    assert!(gate::enter(&gate, 7, 0, || ()));
    stranger = stranger.again();
    let (_second, _) = stranger.guest(21);
    stranger.wait_for_shares(2);
    stranger = stranger.again();
    stranger.wait_for_shares(1);
    gate::leave(&gate, 7);
    let (_third, gate) = stranger.guest(22);
    stranger.wait_for_shares(1);
    // Inside still.
    assert!(gate::enter(&gate, 7, 0, || ()));
    stranger = stranger.again();
    stranger.server.page_limit(Duration::from_millis(100));
    assert!(matches!(stranger.server.unexport("memory"), Err(Error::StillUsed { taken_back: true, .. })));
    gate::leave(&gate, 7);
    assert_eq!(stranger.server.unexport("memory"), Ok(true));
}

#[test]
fn an_importer_believes_only_who_it_asked() {
    // Strangers come to every meeting of this process first.
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut tried = std::collections::HashSet::new();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let names = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
                for name in names.lines().filter_map(|line| line.split_once('@')).map(|(_, name)| name) {
                    if name.starts_with("netvm-")
                        && tried.insert(name.to_owned())
                        && let Ok(socket) = FdSocket::connect(name.as_bytes())
                    {
                        let _ = socket.send(&[5; 16], &[]);
                    }
                }
            }
        });
        for _ in 0..200 {
            let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
            let memory = Node::memory(4096).unwrap();
            let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
            let peer = client.connect_local(&server).unwrap();
            peer.choose(LinkChoice::Shm);
            let region = peer.import("memory", &key).unwrap();
            region.write(0, &[9]).unwrap();
            assert_eq!(memory.shared().sub(0, 1).unwrap().to_vec(), [9]);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn random_requests_are_refused() {
    let stranger = Stranger::new();
    let mut random = Random::new(3);
    for _ in 0..3000 {
        let mut body: Vec<u8> = (0..random.below(60)).map(|_| random.draw() as u8).collect();
        if let Some(first) = body.first_mut() {
            *first %= 5;
        }
        let answer = stranger.call(&body);
        let harmless = matches!(Request::decode(&body), Some(Request::Ring { handle: 0 } | Request::Applied));
        assert!(answer.is_err() || harmless, "{body:?}");
    }
}

#[test]
fn mapped_and_posted_operations_keep_their_order() {
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let memory = Node::memory(1 << 20).unwrap();
    let private = Node::private_memory(1 << 20).unwrap();
    let (key, board) = server.export_notified("memory", Arc::clone(&memory), Rights::ReadWrite, 1).unwrap();
    let other = server.export("private", Arc::clone(&private), Rights::ReadWrite).unwrap();
    let read_only = server.export("read-only", Arc::clone(&memory), Rights::Read).unwrap();
    let address = server.listen("127.0.0.1:0").unwrap();
    let options = crate::node::ConnectOptions { rails: Some(3), ..Default::default() };
    let peer = client.connect_with(&address, &options).unwrap();
    let mapped = peer.import("memory", &key).unwrap();
    // In one process nothing is copied by the kernel.
    let posted = peer.import("private", &other).unwrap();
    let forbidden = peer.import("read-only", &read_only).unwrap();
    assert_eq!((mapped.link(), posted.link(), forbidden.link()), ("shm", "tcp", "shm"));
    for round in 1..=100u8 {
        // The signal tells of what went another way.
        for part in 0..8 {
            posted.write(part * 100_000, &vec![round; 90_000]).unwrap();
        }
        mapped.write_notify(0, &[round], crate::notify::Notify::Count { number: 0 }).unwrap();
        assert!(board.wait(0, Some(std::time::Duration::from_secs(20))) && board.acknowledge(0));
        for part in 0..8 {
            let there = private.shared().sub(part * 100_000, 90_000).unwrap().to_vec();
            assert!(there.iter().all(|&byte| byte == round), "round {round}: told too early");
        }
        assert_eq!(memory.shared().sub(0, 1).unwrap().to_vec(), [round]);
        // A refusal on one way is told by a flush on the other, once.
        posted.flush().unwrap();
        forbidden.write(0, &[1]).unwrap();
        let flushed = if round % 2 == 0 { mapped.flush() } else { posted.flush() };
        assert!(matches!(flushed, Err(Error::Op { code: Status::NoRights, .. })), "{flushed:?}");
        mapped.flush().unwrap();
    }
}

#[test]
fn notifications_find_back_from_the_links() {
    use crate::node::KeepAlive;
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    // Nothing else is to tell.
    for node in [&server, &client] {
        node.keep_alive(KeepAlive::new(60_000, 60_000));
    }
    let memory = Node::memory(4096).unwrap();
    let (key, board) = server.export_notified("memory", memory, Rights::ReadWrite, 1).unwrap();
    let other = server.export("private", Node::private_memory(4096).unwrap(), Rights::ReadWrite).unwrap();
    let peer = client.connect_local(&server).unwrap();
    let (mapped, posted) = (peer.import("memory", &key).unwrap(), peer.import("private", &other).unwrap());
    assert_eq!((mapped.link(), posted.link()), ("shm", "loopback"));
    for _ in 0..10 {
        posted.write(0, &[1; 100]).unwrap();
        assert!(!mapped.session().beside.is_applied());
        mapped.notify(crate::notify::Notify::Count { number: 0 }).unwrap();
        assert!(board.wait(0, Some(std::time::Duration::from_secs(20))) && board.acknowledge(0));
        let start = std::time::Instant::now();
        while !mapped.session().beside.is_applied() {
            assert!(start.elapsed().as_secs() < 10, "the way through memory is not found again");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

#[test]
fn a_write_in_memory_is_not_undone_by_an_earlier_one() {
    use netvm_sys::shared::SharedSlice;

    use crate::notify::Notify;
    use crate::region::WriteOptions;
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let memory = Node::memory(1 << 20).unwrap();
    let (key, queue) = server.export_notified("memory", Arc::clone(&memory), Rights::ReadWrite, 1).unwrap();
    queue.open_queue(1000).unwrap();
    let peer = client.connect_local(&server).unwrap();
    let region = peer.import("memory", &key).unwrap();
    assert_eq!(region.link(), "shm");
    let (old, new) = (Node::memory(100_000).unwrap(), Node::memory(100_000).unwrap());
    old.shared().fill(1);
    new.shared().fill(2);
    let none = WriteOptions::default();
    let notify = Notify::Queue { number: 0, value: 7.try_into().unwrap() };
    let ways: [&(dyn Fn(SharedSlice) + Sync); 4] = [
        &|new| region.write(0, &new.to_vec()).unwrap(),
        &|new| region.write_shared(0, &[new]).unwrap(),
        &|new| region.write_vectored(&[(0, new)]).unwrap(),
        &|new| region.post().write(0, &[new], none).unwrap().wait().unwrap(),
    ];
    for round in 0..40 {
        let bytes = [100, 100_000][round / 4 % 2];
        let options = WriteOptions { notify: Some(notify), ..none };
        // What has no bytes keeps nothing out of the memory.
        region.notify(notify).unwrap();
        assert!(region.mapped_for(none).is_some());
        region.flush().unwrap();
        assert!(queue.remove().is_some());
        // Nothing is served meanwhile.
        let server = server.shared().sessions().pop().unwrap();
        let held = server.lock();
        region.post().write(0, &[old.shared().sub(0, bytes).unwrap()], options).unwrap().detach();
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| ways[round % 4](new.shared().sub(0, bytes).unwrap()));
            let start = Instant::now();
            while !writing.is_finished() && start.elapsed() < Duration::from_millis(10) {
                std::thread::yield_now();
            }
            drop(held);
            writing.join().unwrap();
        });
        region.flush().unwrap();
        assert!(queue.remove().is_some());
        let seen = memory.shared().sub(0, bytes).unwrap().to_vec();
        assert!(seen.iter().all(|&byte| byte == 2), "round {round}: the earlier write came last");
        // The way through memory is found again.
        let start = Instant::now();
        while !region.session().beside.is_applied() {
            assert!(start.elapsed().as_secs() < 10, "nobody asks");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn this_host_can_share_memory() {
    assert_eq!(probe_shm(), Ok(()));
    assert!(netvm_sys::membarrier::is_available() && netvm_sys::membarrier::register());
}
