//! Who waits and which rail is used, by counts.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use netvm_core::endpoint::PostError;
use netvm_core::limits::{OPS_MAX, WINDOW};
use netvm_sys::net::Listener;

use super::{LOOK_MAX, PeerSession};
use crate::link::{Caps, Incoming, Link, Outgoing, Stream};
use crate::node::{KeepAlive, LinkChoice, Mapping, Node, Rights};
use crate::region::{Region, WriteOptions};

/// Sends, receives, and bytes sent.
type Counts = Arc<[AtomicU64; 3]>;

/// A link that counts.
struct Counted(Stream, Counts);

impl Counted {
    fn note(&self, what: usize, count: u64) {
        self.1[what].fetch_add(count, Ordering::Relaxed);
    }
}

impl Link for Counted {
    fn caps(&self) -> Caps {
        self.0.caps()
    }

    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        self.note(0, 1);
        let sent = self.0.post(pieces)?;
        self.note(2, sent as u64);
        Ok(sent)
    }

    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        self.note(1, 1);
        self.0.poll(pieces)
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.0.wait_fd()
    }
}

/// A region of another node over so many rails, with what each rail of this side and of the other counts.
struct World {
    _nodes: [Node; 2],
    memory: Arc<Mapping>,
    region: Region,
    here: Vec<Counts>,
    there: Vec<Counts>,
}

fn world(rails: usize) -> World {
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let (mut ours, mut theirs, mut here, mut there) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    for _ in 0..rails {
        let one = crate::link::connect(listener.address());
        let two = std::iter::repeat_with(|| listener.accept().unwrap()).flatten().next().unwrap();
        for (link, links, counts) in [(one, &mut ours, &mut here), (two, &mut theirs, &mut there)] {
            counts.push(Counts::default());
            links.push(Box::new(Counted(link, Arc::clone(counts.last().unwrap()))) as Box<dyn Link>);
        }
    }
    server.serve_links(theirs).unwrap();
    let peer = client.connect_links(ours, (OPS_MAX as u32, WINDOW as u32), "peer").unwrap();
    peer.choose(LinkChoice::Socket);
    let memory = Node::memory(16 << 20).unwrap();
    let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let region = peer.import("memory", &key).unwrap();
    World { _nodes: [server, client], memory, region, here, there }
}

/// What the counters say now, less what they said then.
fn since(counts: &[Counts], before: &[[u64; 3]]) -> Vec<[u64; 3]> {
    let now = |(counts, before): (&Counts, &[u64; 3])| {
        std::array::from_fn(|what| counts[what].load(Ordering::Relaxed) - before[what])
    };
    counts.iter().zip(before).map(now).collect()
}

/// Over several rails a small operation costs the sends and receives that it costs over one.
#[test]
fn small_operations_keep_to_one_rail() {
    const ROUNDS: u64 = 3000;
    /// Questions for signs of life, and their answers, on a machine that stood still.
    const LIFE_MAX: u64 = 20;
    let World { region, here, there, memory, .. } = &world(4);
    let zero = [[0; 3]; 4];
    for round in 0..ROUNDS {
        for index in 0..10 {
            region.write(index * 8, &round.to_ne_bytes()).unwrap();
        }
        assert_eq!(region.fetch_add(4096, 1u64).unwrap(), round);
        let mut back = [0; 8];
        region.read(72, &mut back).unwrap();
        assert_eq!(u64::from_ne_bytes(back), round);
        region.write_flush(8192, &[round as u8; 4096]).unwrap();
    }
    for counts in [here, there] {
        let counts = since(counts, &zero);
        let [sends, looks, bytes] = counts[0];
        assert!(sends >= ROUNDS && bytes >= ROUNDS * 48, "{counts:?}");
        for [other_sends, other_looks, _] in &counts[1..] {
            assert!(*other_sends <= LIFE_MAX, "{counts:?}");
            // One look in eight when quiet, but all after a sleep, and while the first is quiet, too.
            assert!(*other_looks * 4 <= looks * 3, "{counts:?}");
        }
    }
    // Long ones take turns.
    let before: Vec<[u64; 3]> = since(here, &zero);
    let data: Vec<u8> = (0..4 << 20).map(|index: u32| (index / 5) as u8).collect();
    for round in 0..4 {
        region.write(round * (4 << 20), &data).unwrap();
    }
    region.flush().unwrap();
    let after = since(here, &before);
    assert!(after.iter().all(|[_, _, bytes]| *bytes >= 2 << 20), "{after:?}");
    assert!(memory.shared().sub(12 << 20, 4 << 20).unwrap().to_vec() == data);
}

/// Who finds no room, and receives then what makes some, does not go to sleep over it: nothing else might come to wake him.
#[test]
fn who_makes_room_by_receiving_uses_it() {
    for rails in [1, 3] {
        let World { region, .. } = &world(rails);
        region.write_flush(0, &[0; 8]).unwrap();
        let mut slept = 0;
        for _ in 0..20 {
            fill(region.session(), region.handle());
            let sleeps = || region.session().sleeps.load(Ordering::Relaxed);
            let before = sleeps();
            region.write(0, &[1; 8]).unwrap();
            slept += sleeps() - before;
            region.flush().unwrap();
        }
        // What lies in the socket may be another word than that there is room; else he would sleep each time.
        assert!(slept <= 5, "{slept} of 20, {rails} rails");
    }
}

/// Posts until the window is full, and waits until the peer's word that some has been applied lies in the socket.
fn fill(session: &PeerSession, handle: u32) {
    let mut state = session.lock();
    // Keeps the node's thread out.
    while state.led {
        drop(state);
        std::thread::yield_now();
        state = session.lock();
    }
    state.led = true;
    let post = |state: &mut super::State| {
        state.session.endpoint.post_write_copied(handle, 8, &[7; 8], WriteOptions::default())
    };
    while post(&mut state).is_ok() {}
    assert_eq!(post(&mut state), Err(PostError::Full));
    // Who waits sleeps at once.
    (0..64).for_each(|_| state.look.note(false));
    let deadline = Instant::now() + Duration::from_secs(20);
    while state.session.has_output() {
        assert!(Instant::now() < deadline, "the links take nothing");
        assert!(session.send_all(&mut state).is_ok());
        drop(state);
        std::thread::yield_now();
        state = session.lock();
    }
    let mut fds = [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; 3];
    for (rail, fd) in fds.iter_mut().enumerate().take(state.session.endpoint.rails()) {
        fd.fd = state.session.link(rail).wait_fd().as_raw_fd();
    }
    drop(state);
    netvm_sys::thread::poll(&mut fds, Some(Duration::from_secs(20))).unwrap();
    assert!(fds.iter().any(|fd| fd.revents & libc::POLLIN != 0), "nothing has been applied");
    session.lock().led = false;
}

/// A link on which bytes come little by little.
struct Little(Stream, Instant);

impl Little {
    const BYTES: usize = 4096;
    const PACE: Duration = Duration::from_micros(20);
}

impl Link for Little {
    fn caps(&self) -> Caps {
        self.0.caps()
    }

    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        self.0.post(pieces)
    }

    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        if self.1.elapsed() < Self::PACE {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.1 = Instant::now();
        pieces.truncate(Self::BYTES.min(pieces.total_bytes()));
        self.0.poll(pieces)
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.0.wait_fd()
    }
}

#[test]
fn who_looks_goes_on_looking_while_bytes_come() {
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1) {
        println!("skipped (one CPU: the other side would have to be looked for and to answer at once)");
        return;
    }
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let one = crate::link::connect(listener.address());
    let two = std::iter::repeat_with(|| listener.accept().unwrap()).flatten().next().unwrap();
    server.serve_links(vec![Box::new(two)]).unwrap();
    let link = Box::new(Little(one, Instant::now()));
    let peer = client.connect_links(vec![link], (OPS_MAX as u32, WINDOW as u32), "peer").unwrap();
    peer.choose(LinkChoice::Socket);
    let memory = Node::memory(1 << 20).unwrap();
    let key = server.export("memory", memory, Rights::ReadWrite).unwrap();
    let region = peer.import("memory", &key).unwrap();
    // Each takes a multiple of what is looked for at once.
    let mut bytes = vec![0; 128 << 10];
    assert!(Little::PACE * (bytes.len() / Little::BYTES) as u32 > LOOK_MAX * 4);
    // Whoever has to share his CPU may come late, but not each time.
    let start = Instant::now();
    loop {
        let before = region.session().sleeps.load(Ordering::Relaxed);
        region.read(0, &mut bytes).unwrap();
        if region.session().sleeps.load(Ordering::Relaxed) == before {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "each wait slept");
    }
}

/// A peer from which nothing comes is left to the node's thread: to begin and to end leases for it all the time costs more than all looks.
#[test]
fn who_polls_leaves_quiet_peers_alone() {
    quiet_peers::<9>();
}

#[test]
fn who_polls_finds_the_one_of_many_that_something_comes_from() {
    quiet_peers::<40>();
}

/// The first of so many is busy.
fn quiet_peers<const PEERS: usize>() {
    const ROUNDS: u64 = 3000;
    let server = Node::new().unwrap();
    let address = server.listen("127.0.0.1:0").unwrap();
    let memory = Node::memory(1 << 20).unwrap();
    let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    // No signs of life meanwhile.
    let alive = KeepAlive::new(60_000, 240_000);
    server.keep_alive(alive);
    let clients: [_; PEERS] = std::array::from_fn(|_| {
        let node = Node::new().unwrap();
        node.keep_alive(alive);
        let peer = node.connect(&address).unwrap();
        peer.choose(LinkChoice::Socket);
        let region = peer.import("memory", &key).unwrap();
        (node, region)
    });
    let mut clients = Vec::from(clients);
    let gone = clients.pop().unwrap();
    let ((_, busy), (_, silent)) = (&clients[0], &clients[1]);
    let word = |at| memory.shared().with_u64(at, |word| word.load(Ordering::Acquire)).unwrap();
    let turn = |round: u64| {
        busy.write(0, &round.to_ne_bytes()).unwrap();
        while word(0) != round {
            server.poll();
        }
        for _ in 0..8 {
            server.poll();
        }
        // So each of the silent ones would have its turn less often than the node's thread comes by.
        std::thread::sleep(Duration::from_micros(20));
    };
    (1..1000).for_each(turn);
    let sessions = server.shared().sessions();
    assert_eq!(sessions.len(), PEERS);
    let is_silent = |session: &&Arc<PeerSession>| session.is_quiet();
    let quiet: Vec<_> = sessions.iter().filter(is_silent).collect();
    assert_eq!(quiet.len(), PEERS - 1);
    let leases = || quiet.iter().map(|one| u64::from(one.leases.load(Ordering::Relaxed))).sum::<u64>();
    let before = leases();
    (1000..1000 + ROUNDS).for_each(turn);
    // On a machine that stands still all of them are quiet now and then, and looked at.
    let begun = leases() - before;
    println!("{begun} leases in {ROUNDS} rounds");
    assert!(begun < ROUNDS / 4, "{begun} leases begun");
    let all: u64 = sessions.iter().map(|one| u64::from(one.leases.load(Ordering::Relaxed))).sum();
    assert!(all > leases(), "the node's thread receives all from the busy one");
    // What one of them sends arrives all the same, and then it is polled again.
    silent.write(8, &u64::to_ne_bytes(7)).unwrap();
    let start = Instant::now();
    while word(8) != 7 || quiet.iter().all(|session| session.is_quiet()) {
        std::hint::spin_loop();
        assert!(start.elapsed() < Duration::from_secs(20), "{} has come", word(8));
    }
    // One that ends without a word is missed, though others are looked at all the time.
    drop(gone);
    let mut round = 1000 + ROUNDS;
    while !quiet.iter().any(|session| session.lock().broken.is_some()) {
        turn(round);
        round += 1;
        assert!(start.elapsed() < Duration::from_secs(20), "nobody has noticed");
    }
}
