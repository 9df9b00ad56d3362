//! One contract, tested on every link: first the bytes, then a node's work over it.

use std::io;
use std::num::NonZeroU32;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::auth::{self, Connecting};
use super::sealed::Sealed;
use super::{Caps, Delayed, Fault, Faulty, Incoming, Link, Loopback, Outgoing, Stream};
use crate::error::Error;
use crate::node::{ConnectOptions, LinkChoice, Mapping, Node, Rights};
use crate::notify::{Notifications, Notify};
use crate::region::{Region, WriteOptions};
use crate::security::{Encryption, Secret, Security};
use netvm_core::limits::{OPS_MAX, WINDOW};
use netvm_core::opening::Opening;
use netvm_core::sim::Random;
use netvm_core::wire::Role;
use netvm_core::wire::Status;

/// Two ends, and what the nodes behind them use.
type Pair = (Box<dyn Link>, Box<dyn Link>, LinkChoice);

const LINKS: LinkChoice = LinkChoice::Socket;

fn tcp() -> Pair {
    let listener = netvm_sys::net::Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let one = super::connect(listener.address());
    let two = loop {
        if let Some(stream) = listener.accept().unwrap() {
            break stream;
        }
    };
    (Box::new(one), Box::new(two), LINKS)
}

fn unix() -> Pair {
    let (one, two) = Stream::pair().unwrap();
    (Box::new(one), Box::new(two), LINKS)
}

fn loopback() -> Pair {
    let (one, two) = Loopback::pair().unwrap();
    (Box::new(one), Box::new(two), LINKS)
}

/// Both ends encrypted.
fn sealed(pair: Pair) -> Pair {
    let secret = Secret::from_bytes([5; 32]);
    let opening = Opening::new(Role::Node, Encryption::Always);
    let (connecting, message) = Connecting::start(&secret, opening).unwrap();
    let (there, answer) = auth::answer(&secret, &message, opening).unwrap();
    let here = connecting.finish(&answer).unwrap();
    (Box::new(Sealed::new(pair.0, here)), Box::new(Sealed::new(pair.1, there)), pair.2)
}

fn faulty(pair: Pair, one: Fault, two: Fault) -> Pair {
    (Box::new(Faulty::new(pair.0, one)), Box::new(Faulty::new(pair.1, two)), pair.2)
}

/// Both ends late, each by itself.
fn delayed(pair: Pair) -> Pair {
    static SEED: AtomicU64 = AtomicU64::new(1);
    let late = |link| -> Box<dyn Link> {
        let seed = SEED.fetch_add(1, Ordering::Relaxed);
        Box::new(Delayed::new(link, seed, Duration::from_micros(300)).unwrap())
    };
    (late(pair.0), late(pair.1), pair.2)
}

/// Portions of few bytes, of other lengths at the other end.
fn short(pair: Pair) -> Pair {
    faulty(pair, Fault::Short(3000), Fault::Short(1001))
}

/// The same for control, and shared memory for the rest.
fn shm(pair: Pair) -> Pair {
    (pair.0, pair.1, LinkChoice::Shm)
}

/// Bytes come in order whatever the portions, a full link says so, and an end is seen after the last byte.
fn bytes_come_in_order((mut one, mut two, _): Pair) {
    let mut random = Random::new(5);
    let (mut sent, mut received): (Vec<u8>, Vec<u8>) = (Vec::new(), Vec::new());
    let mut full = false;
    while sent.len() < 4 << 20 {
        let data: Vec<u8> = (0..1 + random.below(50_000)).map(|_| random.draw() as u8).collect();
        let (head, tail) = data.split_at(data.len() / 2);
        let mut out = Outgoing::new();
        out.bytes(head);
        out.bytes(tail);
        match one.post(&out) {
            Ok(count) => {
                assert!(count > 0 && count <= data.len());
                sent.extend_from_slice(&data[..count]);
            }
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                full = true;
            }
        }
        if full || random.once_in(3) {
            take(&mut *two, &mut received, &mut random);
        }
    }
    let deadline = Instant::now() + Duration::from_secs(5);
    while one.has_unsent() {
        assert!(Instant::now() < deadline);
        let _ = one.flush();
        take(&mut *two, &mut received, &mut random);
    }
    drop(one);
    while take(&mut *two, &mut received, &mut random) {
        assert!(Instant::now() < deadline);
    }
    assert!(sent == received);
}

/// Receives once, into two places; false at the end.
fn take(link: &mut dyn Link, received: &mut Vec<u8>, random: &mut Random) -> bool {
    let (mut head, mut tail) = (vec![0; 1 + random.below(1000) as usize], vec![0; 60_000]);
    let mut into = Incoming::new();
    into.bytes(&mut head);
    into.bytes(&mut tail);
    match link.poll(&mut into) {
        Ok(count) => {
            head.extend_from_slice(&tail);
            received.extend_from_slice(&head[..count]);
            count > 0
        }
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

fn nodes((one, two, choice): Pair) -> (Node, Node, crate::region::Peer) {
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    server.serve_links(vec![two]).unwrap();
    let peer = client.connect_links(vec![one], (OPS_MAX as u32, WINDOW as u32), "peer").unwrap();
    peer.choose(choice);
    (server, client, peer)
}

/// Reads see writes, at any offset and of any length, from several threads at once.
fn regions_keep_what_is_written(pair: Pair) {
    let (server, _client, peer) = nodes(pair);
    let memory = Node::memory(1 << 20).unwrap();
    let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let region = peer.import("memory", &key).unwrap();
            scope.spawn(move || {
                let mut random = Random::new(thread);
                let base = thread << 18;
                let mut model = vec![0; 1 << 18];
                for _ in 0..60 {
                    let offset = random.below(200_000) as usize;
                    let len = match random.below(3) {
                        0 => 1 + random.below(60_000) as usize,
                        _ => 1 + random.below(300) as usize,
                    };
                    if random.once_in(2) {
                        let data: Vec<u8> = (0..len).map(|_| random.draw() as u8).collect();
                        region.write(base + offset as u64, &data).unwrap();
                        model[offset..offset + len].copy_from_slice(&data);
                    } else {
                        let mut data = vec![0; len];
                        region.read(base + offset as u64, &mut data).unwrap();
                        assert!(data == model[offset..offset + len]);
                    }
                }
                region.flush().unwrap();
            });
        }
    });
}

/// Keys, rights, bounds, and unexporting.
fn regions_are_protected(pair: Pair) {
    let (server, _client, peer) = nodes(pair);
    let memory = Node::memory(8192).unwrap();
    let key = server.export("memory", Arc::clone(&memory), Rights::Read).unwrap();
    let wrong = crate::node::RemoteKey::from_bytes([0; 16]);
    assert!(matches!(peer.import("memory", &wrong), Err(Error::Op { .. })));
    assert!(matches!(peer.import("other", &key), Err(Error::Op { .. })));
    let region = peer.import("memory", &key).unwrap();
    assert_eq!((region.len(), region.rights()), (8192, Rights::Read));
    assert!(matches!(region.read(8190, &mut [0; 3]), Err(Error::Bounds { .. })));
    region.write(0, &[1]).unwrap();
    assert!(matches!(region.flush(), Err(Error::Op { .. })), "read only");
    region.flush().unwrap();
    assert_eq!(memory.shared().sub(0, 1).unwrap().to_vec(), [0]);
    memory.shared().fill(3);
    let mut byte = [0];
    region.read(8191, &mut byte).unwrap();
    assert_eq!(byte, [3]);
    assert!(server.unexport("memory").unwrap() && !server.unexport("memory").unwrap());
    assert!(matches!(region.read(0, &mut byte), Err(Error::Op { .. })));
    server.export("memory", memory, Rights::ReadWrite).unwrap();
    assert!(matches!(region.read(0, &mut byte), Err(Error::Op { .. })), "an old handle");
}

/// Small writes that follow each other closely come in order and without a word more, also those that nothing follows.
fn crowds_of_writes_come_by_themselves(pair: Pair) {
    let (server, _client, peer) = nodes(pair);
    let memory = Node::memory(1 << 20).unwrap();
    let key = server.export("log", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let region = peer.import("log", &key).unwrap();
    let word = |at: usize| memory.shared().with_u64(at, |word| word.load(Ordering::Acquire)).unwrap();
    for round in 1..=5u64 {
        // As many as fill the queue, and some.
        for index in 0..20_000u64 {
            region.write(8 + index * 8, &(round * index).to_ne_bytes()).unwrap();
            if index % 1000 == 7 {
                region.write(200_000, &[round as u8; 9000]).unwrap();
            }
        }
        region.write(0, &round.to_ne_bytes()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while word(0) != round {
            assert!(Instant::now() < deadline, "the last write of round {round} was not sent");
            std::thread::yield_now();
        }
        assert!((0..20_000).all(|index| word(8 + index as usize * 8) == round * index));
        assert_eq!(memory.shared().sub(200_000, 9000).unwrap().to_vec(), [round as u8; 9000]);
    }
    for index in 0..10_000u64 {
        region.write(index * 8, &index.to_ne_bytes()).unwrap();
    }
    region.flush().unwrap();
    assert!((0..10_000).all(|index| word(index * 8) == index as u64), "flushed, not there");
    for _ in 0..1000 {
        region.write(64, &[1; 8]).unwrap();
    }
    assert!(server.unexport("log").unwrap());
    memory.shared().fill(7);
    assert!(matches!(region.flush(), Err(Error::Op { .. })) || memory.shared().to_vec() == [7; 1 << 20]);
    region.write(64, &[1; 8]).unwrap();
    assert!(matches!(region.flush(), Err(Error::Op { .. })));
    assert!(memory.shared().to_vec() == [7; 1 << 20], "written after unexport");
}

/// When the peer goes, everything that waits fails soon, and says whose fault it is.
fn an_end_is_told(pair: Pair) {
    let (server, _client, peer) = nodes(pair);
    let key = server.export("memory", Node::memory(4096).unwrap(), Rights::ReadWrite).unwrap();
    let region = peer.import("memory", &key).unwrap();
    let start = Instant::now();
    drop(server);
    let error = loop {
        if let Err(error) = region.read(0, &mut [0; 100]) {
            break error;
        }
    };
    let is_told = |reason: &str| reason == "the node has gone";
    assert!(
        matches!(&error, Error::LenderLost { lender, reason } if lender == "peer" && is_told(reason)),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(2));
    assert_eq!(region.flush(), Err(error));
}

/// Atomics of peers, of their threads and of the owner's CPU on the same words.
fn atomics_are_atomic_with_everybody(pair: Pair) {
    const EACH: u64 = 300;
    let (server, _client, peer) = nodes(pair);
    let memory = Node::memory(4096).unwrap();
    let key = server.export("words", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let local = memory.shared();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let region = peer.import("words", &key).unwrap();
            scope.spawn(move || {
                for _ in 0..EACH {
                    region.fetch_add(8, 1u64).unwrap();
                    region.fetch_add(20, 1u32).unwrap();
                }
            });
        }
        scope.spawn(move || {
            for _ in 0..100 * EACH {
                local.with_u64(8, |word| word.fetch_add(1, Ordering::Relaxed)).unwrap();
                local.with_u32(20, |word| word.fetch_add(1, Ordering::Relaxed)).unwrap();
            }
        });
    });
    let region = peer.import("words", &key).unwrap();
    assert_eq!(region.atomic_load::<u64>(8).unwrap(), 103 * EACH);
    assert_eq!(region.atomic_load::<u32>(20).unwrap(), 103 * EACH as u32);
    assert_eq!(region.atomic_load::<u32>(16).unwrap(), 0, "its neighbour");
    // An atomic sees the writes before it.
    region.write(64, &0xF0u64.to_ne_bytes()).unwrap();
    assert_eq!(region.compare_swap(64, 0xF0u64, 0xFF).unwrap(), 0xF0);
    assert_eq!(region.compare_swap(64, 0xF0u64, 1).unwrap(), 0xFF);
    assert_eq!(region.fetch_and(64, 0x0Fu64).unwrap(), 0xFF);
    assert_eq!(region.fetch_or(64, 0x30u64).unwrap(), 0x0F);
    assert_eq!(region.fetch_xor(64, 0x01u64).unwrap(), 0x3F);
    assert_eq!(region.swap(64, 9u64).unwrap(), 0x3E);
    region.atomic_store(64, u64::MAX).unwrap();
    assert_eq!(region.fetch_add(64, 2u64).unwrap(), u64::MAX);
    assert_eq!(local.with_u64(64, |word| word.load(Ordering::Relaxed)), Some(1));
    let refused = |result: Result<u64, Error>, expected| match result {
        Err(Error::Op { code, .. }) => assert_eq!(code, expected),
        other => panic!("{other:?}"),
    };
    refused(region.fetch_add(12, 1), Status::Misaligned);
    assert!(matches!(region.fetch_add(4092, 1u64), Err(Error::Bounds { .. })));
    let read_only = server.export("read-only", memory, Rights::Read).unwrap();
    let read_only = peer.import("read-only", &read_only).unwrap();
    refused(read_only.fetch_add(8, 1), Status::NoRights);
    assert_eq!(read_only.atomic_load::<u64>(8).unwrap(), 103 * EACH);
    server.unexport("words").unwrap();
    refused(region.fetch_add(8, 1), Status::NoHandle);
}

/// A notification comes after its write and all before it, small or large, fenced or not.
fn notifications_come_after_the_data(pair: Pair) {
    let (server, _client, peer) = nodes(pair);
    let memory = Node::memory(1 << 20).unwrap();
    let (key, board) = server.export_notified("log", Arc::clone(&memory), Rights::ReadWrite, 8).unwrap();
    let region = peer.import("log", &key).unwrap();
    assert_eq!(region.notifications(), 8);
    check_log(&memory, &board, &region, 60);
    assert!(matches!(region.notify(Notify::Count { number: 8 }), Err(Error::Bounds { .. })));
    region.notify(Notify::Count { number: 7 }).unwrap();
    assert!(board.wait(7, SOON) && board.acknowledge(7));
    let plain = server.export("plain", memory, Rights::ReadWrite).unwrap();
    let plain = peer.import("plain", &plain).unwrap();
    assert!(matches!(plain.notify(Notify::Count { number: 0 }), Err(Error::Bounds { .. })));
}

const SOON: Option<Duration> = Some(Duration::from_secs(20));

/// Rounds of writes of a round's byte at growing offsets, the last with a notification; the owner looks when he is told.
fn check_log(memory: &Mapping, board: &Notifications, region: &Region, rounds: u32) {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=rounds {
                assert!(board.wait(3, SOON), "round {round}");
                board.acknowledge(3);
                assert_eq!(board.reset(4), NonZeroU32::new(round));
                let bytes = memory.shared().sub(0, 250_000).unwrap().to_vec();
                assert!(bytes.iter().all(|&byte| byte == round as u8), "round {round}: told too early");
                assert!(board.notify(Notify::Count { number: 5 }));
            }
        });
        for round in 1..=rounds {
            let data = vec![round as u8; 250_000];
            let cuts = [0, 1, 60, 130, 5000, 5008, 90_000, 100_000, 249_990, 250_000];
            for (index, cut) in cuts.windows(2).enumerate() {
                let last = cut[1] == 250_000;
                let notify = last.then_some(Notify::Post { number: 4, value: round.try_into().unwrap() });
                let options = WriteOptions { fence: index % 3 == 2, notify };
                region.write_with(cut[0] as u64, &data[cut[0]..cut[1]], options).unwrap();
            }
            region.notify(Notify::Count { number: 3 }).unwrap();
            assert!(board.wait(5, SOON));
            board.acknowledge(5);
        }
    });
}

/// Pieces from and to scattered places, more of them than may be under way.
fn scattered_pieces_find_their_places(pair: Pair) {
    let (server, _client, peer) = nodes(pair);
    let memory = Node::memory(1 << 20).unwrap();
    let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let region = peer.import("memory", &key).unwrap();
    let (out, back) = (Node::memory(1 << 20).unwrap(), Node::memory(1 << 20).unwrap());
    let mut random = Random::new(8);
    let bytes: Vec<u8> = (0..1 << 20).map(|_| random.draw() as u8).collect();
    out.shared().write_from(0, &bytes).unwrap();
    // Piece `i` of ours is piece `i * 7` of theirs.
    let pieces = |local: &Mapping| -> Vec<_> {
        let piece = |index: usize| {
            ((index * 7 % 600 * 1000) as u64, local.shared().sub(index * 1000, 1000 - index % 9).unwrap())
        };
        (0..600).map(piece).collect()
    };
    region.write_vectored(&pieces(&out)).unwrap();
    region.read_vectored(&pieces(&back)).unwrap();
    for (one, two) in pieces(&out).iter().zip(pieces(&back)) {
        assert!(one.1.to_vec() == two.1.to_vec() && one.0 == two.0);
        let there = memory.shared().sub(one.0 as usize, one.1.len()).unwrap();
        assert!(there.to_vec() == one.1.to_vec());
    }
    let beyond = [(0, out.shared().sub(0, 8).unwrap()), ((1 << 20) - 7, out.shared().sub(0, 8).unwrap())];
    assert!(matches!(region.write_vectored(&beyond), Err(Error::Bounds { .. })));
}

macro_rules! link_suite {
    ($($link:ident: $pair:expr;)*) => {$(
        mod $link {
            use super::*;

            #[test]
            fn bytes_come_in_order() {
                super::bytes_come_in_order($pair);
            }

            #[test]
            fn regions_keep_what_is_written() {
                super::regions_keep_what_is_written($pair);
            }

            #[test]
            fn regions_are_protected() {
                super::regions_are_protected($pair);
            }

            #[test]
            fn atomics_are_atomic_with_everybody() {
                super::atomics_are_atomic_with_everybody($pair);
            }

            #[test]
            fn notifications_come_after_the_data() {
                super::notifications_come_after_the_data($pair);
            }

            #[test]
            fn scattered_pieces_find_their_places() {
                super::scattered_pieces_find_their_places($pair);
            }

            #[test]
            fn crowds_of_writes_come_by_themselves() {
                super::crowds_of_writes_come_by_themselves($pair);
            }

            #[test]
            fn an_end_is_told() {
                super::an_end_is_told($pair);
            }
        }
    )*};
}

link_suite! {
    on_loopback: loopback();
    on_tcp: tcp();
    on_unix: unix();
    on_sealed_loopback: sealed(loopback());
    on_sealed_tcp: sealed(tcp());
    on_sealed_unix: sealed(unix());
    on_shm_beside_loopback: shm(loopback());
    on_shm_beside_tcp: shm(tcp());
    on_shm_beside_unix: shm(unix());
    on_shm_beside_sealed_tcp: shm(sealed(tcp()));

    on_short_loopback: faulty(loopback(), Fault::Short(777), Fault::Short(5000));
    on_short_tcp: short(tcp());
    on_short_unix: short(unix());
    on_short_sealed_loopback: faulty(sealed(loopback()), Fault::Short(777), Fault::Short(5000));
    on_short_sealed_tcp: short(sealed(tcp()));
    on_short_sealed_unix: short(sealed(unix()));
    on_sealed_short_tcp: sealed(short(tcp()));
    on_shm_beside_short_loopback: shm(short(loopback()));
    on_shm_beside_short_tcp: shm(short(tcp()));
    on_shm_beside_short_unix: shm(short(unix()));
    on_shm_beside_short_sealed_tcp: shm(short(sealed(tcp())));

    on_delayed_loopback: delayed(loopback());
    on_delayed_tcp: delayed(tcp());
    on_delayed_unix: delayed(unix());
    on_delayed_sealed_loopback: delayed(sealed(loopback()));
    on_delayed_sealed_tcp: delayed(sealed(tcp()));
    on_delayed_sealed_unix: delayed(sealed(unix()));
    on_sealed_delayed_tcp: sealed(delayed(tcp()));
    on_shm_beside_delayed_loopback: shm(delayed(loopback()));
    on_shm_beside_delayed_tcp: shm(delayed(tcp()));
    on_shm_beside_delayed_unix: shm(delayed(unix()));
    on_shm_beside_delayed_sealed_tcp: shm(delayed(sealed(tcp())));
    on_short_delayed_tcp: short(delayed(tcp()));
}

fn connected(client: &Node, address: &str, link: LinkChoice, rails: usize) -> crate::region::Peer {
    client.connect_with(address, &ConnectOptions { link, rails: Some(rails) }).unwrap()
}

#[test]
fn a_cut_at_any_byte_ends_everything_in_time() {
    for cut in (0..6000).step_by(37) {
        let pair = faulty(loopback(), Fault::CutAfter(cut), Fault::CutAfter(u64::MAX));
        let (server, _client, peer) = nodes(pair);
        let memory = Node::memory(1 << 16).unwrap();
        memory.shared().fill(9);
        let key = server.export("memory", memory, Rights::ReadWrite).unwrap();
        let start = Instant::now();
        let error = (|| -> Result<(), Error> {
            let region = peer.import("memory", &key)?;
            loop {
                let mut data = [0; 1500];
                region.read(100, &mut data)?;
                assert_eq!(data, [9; 1500]);
                region.write(5000, &data)?;
                region.flush()?;
            }
        })();
        assert!(matches!(error, Err(Error::LenderLost { .. })), "{error:?}");
        assert!(start.elapsed() < Duration::from_secs(2));
    }
}

#[test]
fn a_cut_within_gathered_writes_leaves_a_beginning_of_them() {
    const WRITES: u64 = 300;
    let mut whole = 0;
    for cut in (200..WRITES * 56 + 400).step_by(61) {
        let (server, _client, peer) =
            nodes(faulty(loopback(), Fault::CutAfter(u64::MAX), Fault::CutAfter(cut)));
        let memory = Node::memory(4096).unwrap();
        let key = server.export("log", Arc::clone(&memory), Rights::ReadWrite).unwrap();
        let region = peer.import("log", &key).unwrap();
        let mut result = Ok(());
        for index in 0..WRITES {
            result = result.and_then(|()| region.write(index * 8, &(index + 1).to_ne_bytes()));
        }
        let flushed = result.and_then(|()| region.flush());
        drop((region, peer, server));
        let word =
            |index: u64| memory.shared().with_u64(index as usize * 8, |word| word.load(Ordering::SeqCst));
        let came = (0..WRITES).take_while(|&index| word(index) == Some(index + 1)).count() as u64;
        // The cut may lie within the next one's bytes.
        assert!((came + 1..WRITES).all(|index| word(index) == Some(0)), "cut at {cut}: a gap after {came}");
        match flushed {
            Ok(()) => assert_eq!(came, WRITES),
            Err(error) => assert!(matches!(error, Error::LenderLost { .. }), "{error}"),
        }
        whole += u32::from(came == WRITES);
    }
    assert!(whole > 0, "no cut came after the writes");
}

#[test]
fn a_cut_at_any_byte_never_claims_an_atomic() {
    let (mut unknown, mut certain) = (0, 0);
    for cut in 0..400 {
        // Either the requests or the answers are cut.
        let ends = (Fault::CutAfter(100 + cut), Fault::CutAfter(u64::MAX));
        let (one, two) = if cut % 2 == 0 { ends } else { (ends.1, ends.0) };
        let (server, _client, peer) = nodes(faulty(loopback(), one, two));
        let memory = Node::memory(4096).unwrap();
        let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
        let mut done = 0;
        let error = match peer.import("memory", &key) {
            Err(error) => error,
            Ok(region) => loop {
                match region.fetch_add(0, 1u64) {
                    Ok(before) => {
                        assert_eq!(before, done);
                        done += 1;
                    }
                    Err(error) => break error,
                }
            },
        };
        drop(peer);
        // The last atomic may still be on its way to the server.
        drop(server);
        let executed = memory.shared().with_u64(0, |word| word.load(Ordering::SeqCst)).unwrap();
        match error {
            Error::OutcomeUnknown { .. } => {
                unknown += 1;
                assert!(executed == done || executed == done + 1);
            }
            Error::LenderLost { .. } => {
                certain += 1;
                assert_eq!(executed, done);
            }
            other => panic!("{other}"),
        }
    }
    assert!(unknown > 0, "{unknown} {certain}");
}

/// What arrives is received only after a send has failed.
struct HardOfHearing {
    link: Loopback,
    is_deaf: Arc<AtomicBool>,
}

impl Link for HardOfHearing {
    fn caps(&self) -> Caps {
        self.link.caps()
    }

    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        self.link.post(pieces).inspect_err(|_| self.is_deaf.store(false, Ordering::SeqCst))
    }

    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        match self.is_deaf.load(Ordering::SeqCst) {
            true => Err(io::ErrorKind::WouldBlock.into()),
            false => self.link.poll(pieces),
        }
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.link.wait_fd()
    }
}

#[test]
fn a_farewell_is_read_before_a_failed_send_is_told() {
    let (one, two) = Loopback::pair().unwrap();
    let is_deaf = Arc::new(AtomicBool::new(false));
    let one = HardOfHearing { link: one, is_deaf: Arc::clone(&is_deaf) };
    let (server, _client, peer) = nodes((Box::new(one), Box::new(two), LINKS));
    let key = server.export("memory", Node::memory(4096).unwrap(), Rights::ReadWrite).unwrap();
    let region = peer.import("memory", &key).unwrap();
    is_deaf.store(true, Ordering::SeqCst);
    drop(server);
    let error = region.write(0, b"x").and_then(|()| region.flush()).unwrap_err();
    assert!(matches!(&error, Error::LenderLost { reason, .. } if reason == "the node has gone"), "{error}");
}

#[test]
fn notifications_come_after_the_data_over_several_rails() {
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let address = server.listen("127.0.0.1:0").unwrap();
    let memory = Node::memory(1 << 20).unwrap();
    let (key, board) = server.export_notified("log", Arc::clone(&memory), Rights::ReadWrite, 8).unwrap();
    let region = connected(&client, &address, LINKS, 4).import("log", &key).unwrap();
    check_log(&memory, &board, &region, 100);
}

/// Rails that are late by themselves: what is posted on one overtakes what is posted on others all the time.
#[test]
fn order_is_kept_over_rails_that_are_late() {
    for round in 0..3 {
        let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
        let pairs = (0..4).map(|_| delayed(if round == 0 { loopback() } else { tcp() }));
        let (here, there): (Vec<_>, Vec<_>) = pairs.map(|(one, two, _)| (one, two)).unzip();
        server.serve_links(there).unwrap();
        let peer = client.connect_links(here, (OPS_MAX as u32, WINDOW as u32), "peer").unwrap();
        let memory = Node::memory(1 << 20).unwrap();
        let (key, board) = server.export_notified("log", Arc::clone(&memory), Rights::ReadWrite, 8).unwrap();
        let region = peer.import("log", &key).unwrap();
        check_log(&memory, &board, &region, 40);
        for value in 1..=200u64 {
            // A read sees what was written before it, and an atomic likewise.
            region.write(value % 7 * 8, &value.to_ne_bytes()).unwrap();
            let mut back = [0; 8];
            region.read(value % 7 * 8, &mut back).unwrap();
            assert_eq!(u64::from_ne_bytes(back), value);
            region.write(4096, &vec![value as u8; 20_000]).unwrap();
            region.write(512, &value.to_ne_bytes()).unwrap();
            assert_eq!(region.fetch_add(512, 1u64).unwrap(), value);
            region.flush().unwrap();
            assert_eq!(memory.shared().sub(4096, 20_000).unwrap().to_vec(), vec![value as u8; 20_000]);
        }
        drop(server);
        let error = region.read(0, &mut [0]).unwrap_err();
        assert!(
            matches!(&error, Error::LenderLost { reason, .. } if reason == "the node has gone"),
            "{error}"
        );
    }
}

#[test]
fn who_stops_polling_is_served_all_the_same() {
    who_stops_polling(LINKS);
    who_stops_polling(LinkChoice::Shm);
}

fn who_stops_polling(link: LinkChoice) {
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let address = server.listen("127.0.0.1:0").unwrap();
    let memory = Node::memory(1 << 12).unwrap();
    let (key, board) = server.export_notified("words", memory, Rights::ReadWrite, 2).unwrap();
    let region = connected(&client, &address, link, 1).import("words", &key).unwrap();
    for round in 0..30u64 {
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                for turn in 0..100u64 {
                    assert_eq!(region.fetch_add(0, 1u64).unwrap(), round * 100 + turn);
                }
            });
            while round % 3 == 0 && !reader.is_finished() {
                server.poll();
            }
        });
        // Nobody polls now, or a sleeper has just stopped.
        if round % 3 == 1 {
            assert!(!board.spin(1, Some(Duration::from_millis(2))));
        }
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| board.wait(0, SOON) && board.acknowledge(0));
            std::thread::sleep(Duration::from_millis(round % 4));
            let start = Instant::now();
            region.notify(Notify::Count { number: 0 }).unwrap();
            assert!(waiter.join().unwrap());
            assert!(start.elapsed() < Duration::from_secs(1));
        });
    }
}

#[test]
fn a_session_runs_over_several_rails() {
    over_several_rails(&Security::default());
}

#[test]
fn a_protected_session_runs_over_several_rails() {
    let secret = Some(Secret::from_bytes([3; 32]));
    for encryption in [Encryption::IfAsked, Encryption::Always] {
        over_several_rails(&Security { secret: secret.clone(), encryption, insecure: false });
    }
}

fn over_several_rails(security: &Security) {
    let node = || Node::with_security(security.clone()).unwrap();
    let (server, client) = (node(), node());
    let address = server.listen("127.0.0.1:0").unwrap();
    let memory = Node::memory(4 << 20).unwrap();
    let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let region = connected(&client, &address, LINKS, 4).import("memory", &key).unwrap();
    let mut random = Random::new(11);
    let data: Vec<u8> = (0..4 << 20).map(|_| random.draw() as u8).collect();
    region.write(0, &data).unwrap();
    let mut back = vec![0; 4 << 20];
    region.read(0, &mut back).unwrap();
    assert!(back == data);
    region.flush().unwrap();
    assert!(memory.shared().to_vec() == data);
}

#[test]
fn unexporting_among_readers_and_writers_takes_effect_at_once() {
    unexporting_among_readers_and_writers(LINKS);
    unexporting_among_readers_and_writers(LinkChoice::Shm);
}

fn unexporting_among_readers_and_writers(link: LinkChoice) {
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let address = server.listen("127.0.0.1:0").unwrap();
    for round in 0..20u8 {
        let memory = Node::memory(1 << 20).unwrap();
        memory.shared().fill(round);
        let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let region = connected(&client, &address, link, 1).import("memory", &key).unwrap();
                scope.spawn(move || {
                    let mut data = vec![0; 1 << 19];
                    loop {
                        let result = if thread == 0 {
                            region.write(0, &vec![round; 1 << 19]).and_then(|()| region.flush())
                        } else {
                            data.fill(0xFF);
                            let result = region.read(0, &mut data);
                            assert!(result.is_err() || data.iter().all(|&byte| byte == round));
                            result
                        };
                        match result {
                            Ok(()) => {}
                            Err(Error::Op { .. }) => return,
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(5));
            assert!(server.unexport("memory").unwrap());
            memory.shared().fill(0xEE);
            std::thread::sleep(Duration::from_millis(2));
            assert!(memory.shared().to_vec().iter().all(|&byte| byte == 0xEE), "written after unexport");
        });
    }
}
