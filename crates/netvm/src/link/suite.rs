//! One contract, tested on every link: first the bytes, then a node's work over it.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::auth::{self, Connecting};
use super::sealed::Sealed;
use super::{Fault, Faulty, Incoming, Link, Loopback, Outgoing, Stream};
use crate::error::Error;
use crate::node::{Node, Rights};
use crate::security::{Encryption, Secret, Security};
use netvm_core::limits::{OPS_MAX, WINDOW};
use netvm_core::opening::Opening;
use netvm_core::sim::Random;
use netvm_core::wire::Role;

type Pair = (Box<dyn Link>, Box<dyn Link>);

fn tcp() -> Pair {
    let listener = netvm_sys::net::Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let one = Stream::connect(listener.address(), Duration::from_secs(1)).unwrap();
    let two = loop {
        if let Some(stream) = listener.accept().unwrap() {
            break stream;
        }
    };
    (Box::new(one), Box::new(two))
}

fn unix() -> Pair {
    let (one, two) = Stream::pair().unwrap();
    (Box::new(one), Box::new(two))
}

fn loopback() -> Pair {
    let (one, two) = Loopback::pair().unwrap();
    (Box::new(one), Box::new(two))
}

/// Both ends encrypted.
fn sealed(pair: Pair) -> Pair {
    let secret = Secret::from_bytes([5; 32]);
    let opening = Opening::new(Role::Node, Encryption::Always);
    let (connecting, message) = Connecting::start(&secret, opening).unwrap();
    let (there, answer) = auth::answer(&secret, &message, opening).unwrap();
    let here = connecting.finish(&answer).unwrap();
    (Box::new(Sealed::new(pair.0, here)), Box::new(Sealed::new(pair.1, there)))
}

fn faulty(pair: Pair, one: Fault, two: Fault) -> Pair {
    (Box::new(Faulty::new(pair.0, one)), Box::new(Faulty::new(pair.1, two)))
}

/// Bytes come in order whatever the portions, a full link says so, and an end is seen after the last byte.
fn bytes_come_in_order((mut one, mut two): Pair) {
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

fn nodes((one, two): Pair) -> (Node, Node, crate::region::Peer) {
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    server.serve_links(vec![two]).unwrap();
    let peer = client.connect_links(vec![one], (OPS_MAX as u32, WINDOW as u32), "peer").unwrap();
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
    assert!(server.unexport("memory") && !server.unexport("memory"));
    assert!(matches!(region.read(0, &mut byte), Err(Error::Op { .. })));
    server.export("memory", memory, Rights::ReadWrite).unwrap();
    assert!(matches!(region.read(0, &mut byte), Err(Error::Op { .. })), "an old handle");
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
    assert!(matches!(&error, Error::LenderLost { lender, .. } if lender == "peer"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(2));
    assert_eq!(region.flush(), Err(error));
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
    on_short_loopback: faulty(loopback(), Fault::Short(777), Fault::Short(5000));
    on_short_tcp: faulty(tcp(), Fault::Short(3000), Fault::Short(1001));
    on_sealed_loopback: sealed(loopback());
    on_sealed_tcp: sealed(tcp());
    on_sealed_unix: sealed(unix());
    on_short_sealed_tcp: sealed(faulty(tcp(), Fault::Short(3000), Fault::Short(1001)));
    on_sealed_short_loopback: faulty(sealed(loopback()), Fault::Short(777), Fault::Short(5000));
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
    let region = client.connect_rails(&address, 4).unwrap().import("memory", &key).unwrap();
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
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let address = server.listen("127.0.0.1:0").unwrap();
    for round in 0..20u8 {
        let memory = Node::memory(1 << 20).unwrap();
        memory.shared().fill(round);
        let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let region = client.connect(&address).unwrap().import("memory", &key).unwrap();
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
            assert!(server.unexport("memory"));
            memory.shared().fill(0xEE);
            std::thread::sleep(Duration::from_millis(2));
            assert!(memory.shared().to_vec().iter().all(|&byte| byte == 0xEE), "written after unexport");
        });
    }
}
