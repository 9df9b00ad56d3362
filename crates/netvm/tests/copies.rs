//! Copies between two other nodes while connections between any two of the three are cut.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use netvm::Error;
use netvm::copy::{Copied, Copies};
use netvm::lasting::{LastingRegion, Reconnect};
use netvm::node::{Mapping, Node, Rights};

mod common;
use common::Random;

const BYTES: usize = 6 << 20;

/// What is between a node and those who connect to it.
struct Wire {
    address: String,
    open: Arc<Mutex<Vec<[TcpStream; 2]>>>,
}

impl Wire {
    fn new(node: &Node) -> Self {
        let to = node.listen("127.0.0.1:0").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let open = Arc::new(Mutex::new(Vec::new()));
        let all = Arc::clone(&open);
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                let Ok(server) = TcpStream::connect(&to) else { return };
                for end in [&client, &server] {
                    end.set_nodelay(true).unwrap();
                }
                let ends = || [client.try_clone().unwrap(), server.try_clone().unwrap()];
                all.lock().unwrap().push(ends());
                let [one, two] = ends();
                for (from, to) in [(client, server), (two, one)] {
                    std::thread::spawn(move || pass(from, to));
                }
            }
        });
        Self { address, open }
    }

    /// Cuts the connections that were made first, or all the others.
    fn cut(&self, first: bool) {
        let mut open = self.open.lock().unwrap();
        let one = open.len().min(1);
        let kept = open.split_off(one);
        let (cut, kept) =
            if first { (std::mem::take(&mut *open), kept) } else { (kept, std::mem::take(&mut *open)) };
        *open = kept;
        for end in cut.iter().flatten() {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream) {
    // No multiple of anything: it is cut within frames.
    let mut bytes = vec![0; 5003];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Between {
    UsAndSource,
    UsAndTarget,
    SourceAndTarget,
}

/// Copies until it has worked, with connections made anew; returns how often it had not.
fn copied(source: &LastingRegion, target: &LastingRegion, way: Copied, names: &[&str; 2]) -> u32 {
    let (start, mut failures) = (Instant::now(), 0);
    loop {
        let copied = source
            .current()
            .and_then(|source| Ok((source, target.current()?)))
            .and_then(|(source, target)| source.copy_to(3, &target, 5, BYTES as u64 - 8));
        match copied {
            // Who cannot be reached just then is gone around.
            Ok(other) => assert!(other == way || failures > 0 || other == Copied::Through, "{other:?}"),
            Err(Error::LenderLost { lender, .. } | Error::OutcomeUnknown { lender, .. }) => {
                assert!(names.contains(&lender.as_str()), "{lender} was lost");
                failures += 1;
                assert!(start.elapsed() < Duration::from_secs(60), "never again");
                continue;
            }
            Err(error) => panic!("{error}"),
        }
        return failures;
    }
}

fn cut_while_copying(between: Between, way: Copied) {
    let (from, to) = (Node::new().unwrap(), Node::new().unwrap());
    // The one that copies connects to the name by which we know the other.
    let (copier, other) = if way == Copied::Pushed { (&from, &to) } else { (&to, &from) };
    copier.allow_copies(Copies::Anywhere);
    other.allow_copies(Copies::Never);
    let (source_wire, target_wire) = (Wire::new(&from), Wire::new(&to));
    let third = if way == Copied::Pushed { &target_wire } else { &source_wire };
    let memories: [Arc<Mapping>; 2] = std::array::from_fn(|_| Node::memory(BYTES).unwrap());
    let source_key = from.export("memory", Arc::clone(&memories[0]), Rights::Read).unwrap();
    let target_key = to.export("memory", Arc::clone(&memories[1]), Rights::ReadWrite).unwrap();
    let us = Node::new().unwrap();
    let open = |wire: &Wire, key| {
        let peer = us.connect_lasting(&wire.address, Reconnect::default()).unwrap();
        peer.import("memory", key).unwrap()
    };
    let (source, target) = (open(&source_wire, &source_key), open(&target_wire, &target_key));
    let names = [source_wire.address.as_str(), target_wire.address.as_str()];
    let (mut random, mut failures) = (Random::new(between as u64), 0);
    for round in 0..8u8 {
        let bytes: Vec<u8> =
            (0..BYTES).map(|index| (index / 3) as u8 ^ (index >> 12) as u8 ^ round).collect();
        memories[0].shared().write_from(0, &bytes).unwrap();
        memories[1].shared().fill(0);
        failures += std::thread::scope(|scope| {
            let copying = scope.spawn(|| copied(&source, &target, way, &names));
            for _ in 0..2 {
                std::thread::sleep(Duration::from_micros(random.next() % 8000));
                match between {
                    Between::UsAndSource => source_wire.cut(true),
                    Between::UsAndTarget => target_wire.cut(true),
                    Between::SourceAndTarget => third.cut(false),
                }
            }
            copying.join().unwrap()
        });
        // The bytes that were meant, and none beside them.
        let seen = memories[1].shared().sub(0, BYTES).unwrap().to_vec();
        assert!(seen[5..BYTES - 3] == bytes[3..BYTES - 5], "{between:?}, round {round}");
        assert!(seen[..5].iter().chain(&seen[BYTES - 3..]).all(|&byte| byte == 0));
    }
    println!("{between:?}, {way:?}: {failures} copies failed");
}

#[test]
fn cuts_are_told_or_gone_around_and_the_next_copy_is_whole() {
    for between in [Between::UsAndSource, Between::UsAndTarget, Between::SourceAndTarget] {
        for way in [Copied::Pushed, Copied::Pulled] {
            cut_while_copying(between, way);
        }
    }
}
