//! Channels: order, contents, room, and what is told when one end goes.

use std::collections::HashMap;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use netvm::Error;
use netvm::channel::{ChannelError, Receiver, Sender, Shape};
use netvm::node::{ConnectOptions, LinkChoice, Node, RemoteKey};
use netvm::notify::Notify;
use netvm::region::Peer;

mod common;
use common::Random;

const LONG: Option<Duration> = Some(Duration::from_secs(30));
const SHORT: Option<Duration> = Some(Duration::from_millis(20));
const SHAPES: [Shape; 2] = [Shape::Rings { senders: 4, bytes: 64 << 10 }, Shape::Shared { bytes: 64 << 10 }];

fn home() -> (Node, String) {
    let node = Node::new().unwrap();
    let address = node.listen("127.0.0.1:0").unwrap();
    (node, address)
}

/// Over the connection, and through shared memory.
fn cases() -> impl Iterator<Item = (LinkChoice, Shape)> {
    [LinkChoice::Socket, LinkChoice::Shm].into_iter().flat_map(|link| SHAPES.map(|shape| (link, shape)))
}

/// Another process, as far as the receiver can tell.
fn guest(address: &str, link: LinkChoice) -> (Node, Peer) {
    let node = Node::new().unwrap();
    let peer = node.connect_with(address, &ConnectOptions { link, ..ConnectOptions::default() }).unwrap();
    (node, peer)
}

/// Message `number` of sender `id`: both, a checksum, and bytes that follow from them.
fn message(id: u64, number: u64, most: u64) -> Vec<u8> {
    let mut random = Random::new(id << 32 | number);
    let len = random.next() % most.min(if number.is_multiple_of(16) { most } else { 200 });
    let mut bytes = [id, number, random.next()].map(u64::to_le_bytes).concat();
    bytes.extend((0..len).map(|_| random.next() as u8));
    bytes
}

fn head(bytes: &[u8]) -> (u64, u64) {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    (word(0), word(8))
}

#[test]
fn messages_arrive_in_order_from_many() {
    const MESSAGES: u64 = 1000;
    for (link, shape) in cases() {
        let (node, address) = home();
        let (key, mut receiver) = Receiver::new(&node, "channel", shape).unwrap();
        std::thread::scope(|scope| {
            for id in 0..4 {
                let address = &address;
                scope.spawn(move || {
                    let node = Node::new().unwrap();
                    let options = ConnectOptions { rails: Some(1 + id as usize % 3), link };
                    let peer = node.connect_with(address, &options).unwrap();
                    let mut sender = Sender::open(&peer, "channel", &key).unwrap();
                    let most = sender.message_bytes_max() as u64 - 24;
                    let mut number = 0;
                    while number < MESSAGES {
                        let (one, two) = (message(id, number, most), message(id, number + 1, most));
                        if number.is_multiple_of(4) && one.len() + two.len() < 1000 {
                            sender.send_many(&[&one, &two], LONG).unwrap();
                            number += 2;
                        } else {
                            sender.send(&one, LONG).unwrap();
                            number += 1;
                        }
                    }
                    sender.close().unwrap();
                });
            }
            let most = if matches!(shape, Shape::Rings { .. }) { (16 << 10) - 32 } else { (32 << 10) - 32 };
            let (mut next, mut left) = (HashMap::new(), 0);
            while left < 4 {
                match receiver.receive(LONG) {
                    Ok(received) => {
                        let (id, number) = head(&received.to_vec());
                        let expected = next.entry(id).or_insert((received.sender(), 0));
                        assert_eq!(*expected, (received.sender(), number), "{shape:?}");
                        assert!(received.to_vec() == message(id, number, most), "{shape:?}: {id}, {number}");
                        expected.1 += 1;
                    }
                    Err(ChannelError::Left { .. }) => left += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            assert!(next.len() == 4 && next.values().all(|(_, count)| *count >= MESSAGES));
        });
        assert!(matches!(receiver.try_receive(), Err(ChannelError::WouldBlock)));
    }
}

#[test]
fn who_finds_no_room_waits_and_is_told() {
    let shapes = [Shape::Rings { senders: 1, bytes: 1024 }, Shape::Shared { bytes: 1024 }];
    let links = [LinkChoice::Socket, LinkChoice::Shm];
    for (link, shape) in links.into_iter().flat_map(|link| shapes.map(|shape| (link, shape))) {
        let (node, address) = home();
        let (key, mut receiver) = Receiver::new(&node, "channel", shape).unwrap();
        let (_node, peer) = guest(&address, link);
        let mut sender = Sender::open(&peer, "channel", &key).unwrap();
        let max = sender.message_bytes_max();
        assert!(
            matches!(sender.send(&vec![0; max + 1], SHORT), Err(ChannelError::TooLong { max: most, .. }) if most == max)
        );
        assert!(matches!(receiver.receive(SHORT), Err(ChannelError::TimedOut)));
        for round in 0..50u8 {
            let mut sent = 0;
            while let Ok(()) = sender.try_send(&[round; 100]) {
                sent += 1;
            }
            assert!(sent >= 4, "{shape:?}: {sent} in round {round}");
            assert!(matches!(sender.try_send(&[0; 100]), Err(ChannelError::WouldBlock)));
            assert!(matches!(sender.send(&[0; 100], SHORT), Err(ChannelError::TimedOut)));
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| sender.send(&[round; 100], LONG));
                for _ in 0..=sent {
                    assert_eq!(receiver.receive(LONG).unwrap().to_vec(), [round; 100], "{shape:?}");
                }
                waiting.join().unwrap().unwrap();
            });
            assert!(matches!(receiver.try_receive(), Err(ChannelError::WouldBlock)));
            // What was not received is not freed.
            sender.send(&vec![round; max], LONG).unwrap();
            assert_eq!(receiver.receive(LONG).unwrap().len(), max);
            sender.send(&[], LONG).unwrap();
            assert!(receiver.receive(LONG).unwrap().is_empty());
        }
    }
}

#[test]
fn ends_are_told_behind_the_messages() {
    for (link, shape) in cases() {
        let (node, address) = home();
        let (key, mut receiver) = Receiver::new(&node, "channel", shape).unwrap();
        let ((dying, peer), (_other, other)) = (guest(&address, link), guest(&address, link));
        assert!(matches!(
            Sender::open(&peer, "channel", &RemoteKey::from_bytes([0; 16])),
            Err(ChannelError::Failed(_))
        ));
        let mut senders: Vec<Sender> =
            (0..2).map(|_| Sender::open(&peer, "channel", &key).unwrap()).collect();
        let mut lasting = Sender::open(&other, "channel", &key).unwrap();
        for number in 0..10 {
            senders[number % 2].send(&[number as u8], LONG).unwrap();
        }
        drop(senders.pop());
        // Through the connection of its own: so that the death comes behind the messages.
        peer.import("channel", &key).unwrap().flush().unwrap();
        drop(dying);
        let (mut messages, mut ends) = (0, Vec::new());
        while ends.len() < 2 {
            match receiver.receive(LONG) {
                Ok(_) => messages += 1,
                Err(error) => ends.push((messages, error)),
            }
        }
        assert_eq!(messages, 10);
        assert!(ends.iter().any(|(_, error)| matches!(error, ChannelError::Left { sender: 1 })));
        assert!(ends.iter().any(|(_, error)| matches!(error, ChannelError::Lost { sender: 0 })));
        assert!(matches!(senders[0].send(&[0], LONG), Err(ChannelError::Failed(_))));
        // Their places are free again.
        lasting.send(b"still here", LONG).unwrap();
        assert_eq!(receiver.receive(LONG).unwrap().sender(), 2);
        let mut again: Vec<Sender> = (0..3).map(|_| Sender::open(&other, "channel", &key).unwrap()).collect();
        if let Shape::Rings { .. } = shape {
            assert!(matches!(Sender::open(&other, "channel", &key), Err(ChannelError::Failed(_))));
        }
        again[0].send(b"new", LONG).unwrap();
        assert_eq!(receiver.receive(LONG).unwrap().to_vec(), b"new");
        // The receiver goes while one waits for room.
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| while again[0].send(&[0; 1000], LONG).is_ok() {});
            std::thread::sleep(Duration::from_millis(50));
            drop(receiver);
            waiting.join().unwrap();
        });
        assert!(matches!(again[0].send(&[0], LONG), Err(ChannelError::Closed)), "{shape:?}");
        let error = loop {
            if let Err(error) = lasting.send(&[0], LONG) {
                break error;
            }
        };
        assert!(matches!(error, ChannelError::Closed), "{shape:?}: {error}");
        // The name is free too.
        let (_key, _receiver) = Receiver::new(&node, "channel", shape).unwrap();
    }
}

#[test]
fn descriptors_tell_of_messages() {
    use std::os::fd::AsRawFd;
    for (link, shape) in cases() {
        let (node, address) = home();
        let (key, mut receiver) = Receiver::new(&node, "channel", shape).unwrap();
        let (_node, peer) = guest(&address, link);
        let mut sender = Sender::open(&peer, "channel", &key).unwrap();
        for round in 0..200u64 {
            let fd = receiver.descriptor().unwrap().as_raw_fd();
            if round == 0 {
                assert!(receiver.rearm());
            }
            sender.send(&round.to_le_bytes(), LONG).unwrap();
            let mut fds = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
            netvm_sys::thread::poll(&mut fds, LONG).unwrap();
            assert!(fds[0].revents & libc::POLLIN != 0, "{shape:?}: nothing in round {round}");
            assert_eq!(receiver.try_receive().unwrap().to_vec(), round.to_le_bytes());
            let limit = Instant::now() + LONG.unwrap();
            while !receiver.rearm() {
                assert!(matches!(receiver.try_receive(), Err(ChannelError::WouldBlock)));
                assert!(Instant::now() < limit);
            }
        }
    }
}

/// Whoever has the key writes what he likes into the ring and signals what he likes.
#[test]
fn garbage_is_refused() {
    let mut random = Random::new(11);
    let (mut good, mut lost) = (0, 0);
    for round in 0..60 {
        let shape = SHAPES[round % 2];
        let link = [LinkChoice::Socket, LinkChoice::Shm][round / 2 % 2];
        let (node, address) = home();
        let (key, mut receiver) = Receiver::new(&node, "channel", shape).unwrap();
        let (_node, peer) = guest(&address, link);
        let mut sender = Sender::open(&peer, "channel", &key).unwrap();
        let raw = peer.import("channel", &key).unwrap();
        for _ in 0..random.next() % 5 {
            sender.send(&[7; 100], LONG).unwrap();
        }
        let word = if random.next().is_multiple_of(2) { random.next() } else { random.next() >> 44 };
        raw.write(random.next() % 8 * 112, &word.to_le_bytes()).unwrap();
        if let Shape::Rings { .. } = shape {
            for _ in 0..random.next() % 4 {
                let number = (random.next() % 4) as u16;
                let value = std::num::NonZeroU32::new(random.next() as u32 | 1).unwrap();
                let _ = raw.notify(Notify::Count { number });
                let _ = raw.notify(Notify::Post { number, value });
            }
        }
        let _ = raw.flush();
        loop {
            match receiver.receive(SHORT) {
                Ok(message) => good += message.to_vec().len().min(1),
                Err(ChannelError::Lost { .. }) => lost += 1,
                Err(ChannelError::TimedOut) => break,
                Err(error) => panic!("{error}"),
            }
        }
        // Others are not disturbed.
        let (_node, other) = guest(&address, link);
        let mut other = Sender::open(&other, "channel", &key).unwrap();
        other.send(b"fine", LONG).unwrap();
        assert_eq!(receiver.receive(LONG).unwrap().to_vec(), b"fine", "{shape:?} in round {round}");
    }
    assert!(good > 0 && lost > 0, "{good} good, {lost} lost");
}

/// Where the receiver tells the only sender how far it is: behind the ring.
const LINE: u64 = 1024;

/// Whoever has the key writes what he likes where the receiver tells how far it is.
#[test]
fn garbage_about_room_is_refused() {
    let mut random = Random::new(17);
    let (mut sent, mut full, mut refused) = (0, 0, 0);
    for _ in 0..40 {
        let (node, address) = home();
        let shape = Shape::Rings { senders: 1, bytes: LINE as usize };
        let (key, mut receiver) = Receiver::new(&node, "channel", shape).unwrap();
        let (_node, peer) = guest(&address, LinkChoice::Shm);
        let mut sender = Sender::open(&peer, "channel", &key).unwrap();
        let raw = peer.import("channel", &key).unwrap();
        assert_eq!(raw.link(), "shm");
        for _ in 0..20 {
            while sender.try_send(&[7; 100]).is_ok() {}
            let word = match random.next() % 3 {
                0 => random.next(),
                1 => random.next() % 4096,
                _ => (random.next() % 128 * 8) | 2,
            };
            if raw.write(LINE, &word.to_le_bytes()).is_err() {
                break;
            }
            match sender.send(&[7; 100], SHORT) {
                Ok(()) => sent += 1,
                Err(ChannelError::TimedOut) => full += 1,
                Err(ChannelError::Failed(Error::Protocol { lender, .. })) => {
                    assert_eq!(lender, address);
                    refused += 1;
                }
                Err(ChannelError::Failed(_)) => break,
                Err(error) => panic!("{error}"),
            }
            if random.next().is_multiple_of(2) {
                // What it finds may have been overwritten: then its sender has not kept to the protocol.
                while let Ok(message) = receiver.try_receive() {
                    assert_eq!(message.len(), 100);
                }
            }
        }
        // Others are not disturbed.
        let (_node, other) = guest(&address, LinkChoice::Shm);
        drop((sender, raw));
        let limit = Instant::now() + LONG.unwrap();
        let mut other = loop {
            let _ = receiver.receive(SHORT);
            match Sender::open(&other, "channel", &key) {
                Ok(other) => break other,
                Err(error) => assert!(Instant::now() < limit, "{error}"),
            }
        };
        for number in 0..100u64 {
            other.send(&number.to_le_bytes(), LONG).unwrap();
            let message = receiver.receive(LONG).unwrap();
            assert_eq!(message.to_vec(), number.to_le_bytes());
        }
    }
    assert!(sent > 0 && full > 0 && refused > 0, "{sent} sent, {full} without room, {refused} refused");
}

/// A mark that is taken away delays a sender, and no more.
#[test]
fn who_sleeps_without_its_mark_goes_on() {
    let (node, address) = home();
    let shape = Shape::Rings { senders: 1, bytes: LINE as usize };
    let (key, mut receiver) = Receiver::new(&node, "channel", shape).unwrap();
    let (_node, peer) = guest(&address, LinkChoice::Shm);
    let mut sender = Sender::open(&peer, "channel", &key).unwrap();
    let raw = peer.import("channel", &key).unwrap();
    while sender.try_send(&[7; 100]).is_ok() {}
    let mut word = [0; 8];
    raw.read(LINE, &mut word).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| sender.send(&[8; 100], LONG));
        std::thread::sleep(Duration::from_millis(30));
        raw.write(LINE, &word).unwrap();
        let start = Instant::now();
        while !waiting.is_finished() {
            if let Ok(message) = receiver.try_receive() {
                assert_eq!(message.len(), 100);
            }
            assert!(start.elapsed() < Duration::from_secs(5), "it sleeps for ever");
        }
        waiting.join().unwrap().unwrap();
    });
}

/// Who has the key says for a sender over the connection that it reads its word: it is told all the same.
#[test]
fn nobody_is_called_near_by_others() {
    let (node, address) = home();
    let shape = Shape::Rings { senders: 1, bytes: LINE as usize };
    let (key, mut receiver) = Receiver::new(&node, "channel", shape).unwrap();
    let (_far, peer) = guest(&address, LinkChoice::Socket);
    let mut sender = Sender::open(&peer, "channel", &key).unwrap();
    let (_near, neighbour) = guest(&address, LinkChoice::Shm);
    let raw = neighbour.import("channel", &key).unwrap();
    for _ in 0..20 {
        while sender.try_send(&[7; 100]).is_ok() {}
        raw.write(LINE, &2u64.to_le_bytes()).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| sender.send(&[7; 100], Some(Duration::from_secs(5))));
            while !waiting.is_finished() {
                if let Ok(message) = receiver.try_receive() {
                    assert_eq!(message.len(), 100);
                }
            }
            waiting.join().unwrap().unwrap();
        });
    }
}

// ---- killed processes ----

/// What a receiving process does; started by [`senders_outlive_killed_receivers`].
#[test]
#[ignore = "started by other tests"]
fn receives() {
    if std::env::var("NETVM_TEST_RECEIVER").is_err() {
        return;
    }
    let (node, address) = home();
    let shape = Shape::Rings { senders: 1, bytes: 4096 };
    let (key, mut receiver) = Receiver::new(&node, "channel", shape).unwrap();
    println!("> {address} {:032x}", u128::from_be_bytes(key.to_bytes()));
    // The second half is never received.
    for number in 0..500 {
        assert!(receiver.receive(LONG).unwrap().to_vec() == message(9, number, 200));
    }
    println!("> received");
    std::thread::sleep(LONG.unwrap());
}

#[test]
fn senders_outlive_killed_receivers() {
    use std::io::{BufRead, BufReader};
    for link in [LinkChoice::Socket, LinkChoice::Shm, LinkChoice::Shm] {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "receives", "--ignored", "--nocapture"])
            .env("NETVM_TEST_RECEIVER", "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let mut hear =
            || lines.find_map(|line| line.split_once("> ").map(|(_, said)| said.to_owned())).unwrap();
        let said = hear();
        let (address, hex) = said.split_once(' ').unwrap();
        let key = RemoteKey::from_bytes(u128::from_str_radix(hex, 16).unwrap().to_be_bytes());
        let (_node, peer) = guest(address, link);
        let mut sender = Sender::open(&peer, "channel", &key).unwrap();
        (0..500).for_each(|number| sender.send(&message(9, number, 200), LONG).unwrap());
        assert_eq!(hear(), "received");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                loop {
                    if let Err(error) = sender.send(&[1; 200], LONG) {
                        break (error, Instant::now());
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(100));
            assert!(!waiting.is_finished(), "the ring should be full");
            child.kill().unwrap();
            child.wait().unwrap();
            let killed = Instant::now();
            let (error, ended) = waiting.join().unwrap();
            assert!(matches!(error, ChannelError::Failed(_)), "{error}");
            assert!(ended.saturating_duration_since(killed) < Duration::from_secs(5));
        });
        assert!(sender.send(&[1], SHORT).is_err());
    }
}

/// What a sending process does; started by [`killed_senders_leave_whole_messages`].
#[test]
#[ignore = "started by other tests"]
fn sends() {
    let Ok(job) = std::env::var("NETVM_TEST_SENDER") else { return };
    let job: Vec<&str> = job.split(' ').collect();
    let key = RemoteKey::from_bytes(u128::from_str_radix(job[1], 16).unwrap().to_be_bytes());
    let id = job[2].parse().unwrap();
    let node = Node::new().unwrap();
    let link = job[3].parse().unwrap();
    let peer = node.connect_with(job[0], &ConnectOptions { link, ..ConnectOptions::default() }).unwrap();
    // A place is free when the receiver has heard of the death of the one before.
    let limit = Instant::now() + LONG.unwrap();
    let mut sender = loop {
        match Sender::open(&peer, "channel", &key) {
            Ok(sender) => break sender,
            Err(error) if error.to_string().contains("no such segment") => return,
            Err(error) => assert!(Instant::now() < limit, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let most = sender.message_bytes_max() as u64 - 24;
    for number in 0.. {
        match sender.send(&message(id, number, most), LONG) {
            Ok(()) => {}
            // The test is over.
            Err(ChannelError::Closed | ChannelError::Failed(_)) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn killed_senders_leave_whole_messages() {
    const SENDERS: usize = 3;
    let shapes = [Shape::Rings { senders: 3, bytes: 32 << 10 }, Shape::Shared { bytes: 32 << 10 }];
    for (link, shape) in ["socket", "shm"].into_iter().flat_map(|link| shapes.map(|shape| (link, shape))) {
        let (node, address) = home();
        let (key, mut receiver) = Receiver::new(&node, "channel", shape).unwrap();
        let hex = format!("{:032x}", u128::from_be_bytes(key.to_bytes()));
        let mut ids = 0;
        let mut start = || {
            ids += 1;
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "sends", "--ignored", "--nocapture"])
                .env("NETVM_TEST_SENDER", format!("{address} {hex} {ids} {link}"))
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        };
        let mut processes: Vec<Child> = (0..SENDERS).map(|_| start()).collect();
        let mut random = Random::new(5);
        let (mut next, mut messages, mut lost, mut kills) = (HashMap::new(), 0u64, 0, 0);
        let most = if matches!(shape, Shape::Rings { .. }) { (8 << 10) - 32 } else { (16 << 10) - 32 };
        let begin = Instant::now();
        let mut due = begin;
        while kills < 25 || lost < kills {
            match receiver.receive(LONG) {
                Ok(received) => {
                    messages += 1;
                    let (id, number) = head(&received.to_vec());
                    let expected = next.entry(id).or_insert(0);
                    assert_eq!(*expected, number, "{shape:?}: {id}");
                    assert!(received.to_vec() == message(id, number, most), "{shape:?}: torn");
                    *expected += 1;
                }
                Err(ChannelError::Lost { .. }) => lost += 1,
                Err(error) => {
                    panic!("{shape:?}: {error} after {messages} messages, {kills} kills, {lost} lost")
                }
            }
            if kills < 25 && Instant::now() >= due {
                due = Instant::now() + Duration::from_millis(40);
                // Only one that is at work: a death before the first message is told to nobody.
                let victim = random.next() as usize % SENDERS;
                if processes.len() == SENDERS && next.len() > kills {
                    processes[victim].kill().unwrap();
                    processes[victim].wait().unwrap();
                    kills += 1;
                    processes[victim] = start();
                }
            }
            if kills == 25 && lost + 3 >= kills && Instant::now() >= due + Duration::from_secs(1) {
                break;
            }
        }
        println!("{shape:?}: {messages} messages, {kills} kills, {lost} told, {:?}", begin.elapsed());
        drop(receiver);
        for mut process in processes {
            process.wait().unwrap();
        }
    }
}
