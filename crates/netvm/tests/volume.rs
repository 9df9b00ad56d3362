//! Volumes over real lenders, some of which are lost.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use netvm::lender::{BorrowOptions, LenderConfig, LinkChoice, status};
use netvm::volume::{Ended, Event, Volume, VolumeOptions};
use netvm_sys::mapping::Mapping;
use netvm_sys::thread::poll;
use std::os::fd::AsRawFd;

mod common;
use common::{Random, Serving, delayed};

const SLAB: u64 = 1 << 20;

fn turn(volume: &mut Volume, ended: &mut Vec<Ended>) {
    volume.advance(false, ended);
    if !ended.is_empty() {
        return;
    }
    let patience = volume.patience();
    let heard = comes(volume, patience);
    volume.advance(heard || !patience.is_zero(), ended);
}

/// Whether something comes within this time.
fn comes(volume: &Volume, patience: Duration) -> bool {
    let fd = volume.as_fd().as_raw_fd();
    let mut fds = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
    poll(&mut fds, Some(patience)).unwrap();
    fds[0].revents != 0
}

/// Drives the volume until the op has ended.
fn wait(volume: &mut Volume, token: u64) -> netvm::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut ended = Vec::new();
    while Instant::now() < deadline {
        turn(volume, &mut ended);
        if let Some(op) = ended.iter().find(|op| op.token == token) {
            return op.result.clone();
        }
    }
    panic!("it does not end");
}

fn open(lenders: &[&Serving], size: u64, replicas: usize) -> netvm::Result<Volume> {
    let addresses: Vec<String> = lenders.iter().map(|lender| lender.address.clone()).collect();
    Volume::open(&addresses, size, VolumeOptions { replicas, ..VolumeOptions::default() })
}

#[test]
fn random_operations_read_back_while_lenders_come_and_go() {
    come_and_go(LinkChoice::Socket);
}

#[test]
fn the_same_with_the_lenders_memory_shared() {
    come_and_go(LinkChoice::Shm);
}

/// Nothing is asked of the lender that it would have to answer, and its network takes longer for what is written than it may be silent.
#[test]
fn a_slow_network_full_of_writes_is_no_silence() {
    const OPS: u64 = 16;
    for replicas in [1, 2] {
        let lenders = [Serving::new(40), Serving::new(40)];
        let delay_ms = Arc::new(AtomicU64::new(0));
        let addresses = [delayed(&lenders[0].address, Arc::clone(&delay_ms)), lenders[1].address.clone()];
        let silence = Duration::from_millis(500);
        let options = VolumeOptions { replicas, silence, ..VolumeOptions::default() };
        let mut volume = Volume::open(&addresses[..replicas], 32 * SLAB, options).unwrap();
        let memory = Mapping::anonymous((OPS * SLAB) as usize).unwrap();
        let place = |number: u64| memory.shared().sub((number % OPS * SLAB) as usize, SLAB as usize).unwrap();
        let content = |number: u64| -> Vec<u8> {
            let mut random = Random::new(number);
            (0..SLAB / 8).flat_map(|_| random.next().to_le_bytes()).collect()
        };
        delay_ms.store(8, Ordering::Relaxed);
        let (started, mut begun, mut done, mut ended) = (Instant::now(), 0, 0, Vec::new());
        while done < 32 {
            while begun < 32 && begun < done + OPS {
                place(begun).write_from(0, &content(begun)).unwrap();
                volume.write(begun, begun * SLAB, place(begun)).unwrap();
                begun += 1;
            }
            assert!(started.elapsed() < Duration::from_secs(60), "{volume:?}");
            turn(&mut volume, &mut ended);
            for Ended { result, .. } in ended.drain(..) {
                result.unwrap();
                done += 1;
            }
        }
        let took = started.elapsed();
        assert!(took > 4 * silence, "the network was not slow: {took:?}");
        delay_ms.store(0, Ordering::Relaxed);
        for number in 0..32 {
            volume.read(number, number * SLAB, place(number)).unwrap();
            wait(&mut volume, number).unwrap();
            assert!(place(number).to_vec() == content(number), "MiB {number}");
        }
        assert!(volume.lenders().iter().all(|lender| lender.lost.is_none()), "{volume:?}");
        assert_eq!(volume.degraded(), (0, 0));
    }
}

fn come_and_go(link: LinkChoice) {
    let size = 8 * SLAB - 12_345;
    let mut lenders: Vec<Option<Serving>> = (0..3).map(|_| Some(Serving::new(10))).collect();
    let addresses: Vec<String> = lenders.iter().flatten().map(|lender| lender.address.clone()).collect();
    let borrow = BorrowOptions { link, ..BorrowOptions::default() };
    let options = VolumeOptions { replicas: 2, borrow, ..VolumeOptions::default() };
    let mut volume = Volume::open(&addresses, size, options).unwrap();
    let memory = Mapping::anonymous(16 << 20).unwrap();
    let place = |token: u64| memory.shared().sub((token as usize) << 20, 1 << 20).unwrap();
    let mut model = vec![0u8; size as usize];
    let mut random = Random::new(5);
    let mut running: HashMap<u64, (bool, u64, Vec<u8>)> = HashMap::new();
    let mut ended = Vec::new();
    let (mut losses, mut backs, mut mends) = (0, 0, 0);
    let start = Instant::now();
    let mut round = 0u64;
    while round < 4000 || (mends < 2 && start.elapsed() < Duration::from_secs(40)) {
        round += 1;
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "round {round}: {} run in {volume:?}",
            running.len()
        );
        let offset = random.next() % size;
        let most = if random.next().is_multiple_of(8) { 1 << 20 } else { 9000 };
        let bytes = (1 + random.next() % most).min(size - offset);
        let overlaps = |(_, at, content): &(bool, u64, Vec<u8>)| {
            *at < offset + bytes && offset < at + content.len() as u64
        };
        if running.len() < 16 && !running.values().any(overlaps) {
            let token = (0..16).find(|token| !running.contains_key(token)).unwrap();
            let local = place(token).sub(0, bytes as usize).unwrap();
            let range = offset as usize..(offset + bytes) as usize;
            let is_read = random.next().is_multiple_of(2);
            if is_read {
                local.fill(0xEE);
                volume.read(token, offset, local).unwrap();
            } else if random.next().is_multiple_of(4) {
                model[range.clone()].fill(0);
                volume.discard(token, offset, bytes).unwrap();
            } else {
                let seed = random.next();
                let content: Vec<u8> = (0..bytes).map(|at| (seed >> (at % 57)) as u8).collect();
                local.write_from(0, &content).unwrap();
                model[range.clone()].copy_from_slice(&content);
                volume.write(token, offset, local).unwrap();
            }
            running.insert(token, (is_read, offset, model[range].to_vec()));
        }
        turn(&mut volume, &mut ended);
        for Ended { token, result } in ended.drain(..) {
            result.unwrap();
            let (is_read, _, expected) = running.remove(&token).unwrap();
            assert!(!is_read || place(token).sub(0, expected.len()).unwrap().to_vec() == expected);
        }
        while let Some(event) = volume.event() {
            match event {
                Event::LenderLost { lost, .. } => assert_eq!(lost, 0),
                Event::LenderBack { .. } => backs += 1,
                Event::Mended { .. } => mends += 1,
                // Whoever is stopped asks for everything first.
                _ => {}
            }
        }
        if round.is_multiple_of(1500) && losses < 2 && volume.degraded() == (0, 0) {
            let victim = losses % 3;
            lenders[victim] = None;
            losses += 1;
            // The second one comes back, and is used again.
            if losses == 2 {
                lenders[victim] = Some(Serving::at(&addresses[victim], 10));
            }
        }
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while !running.is_empty() {
        assert!(Instant::now() < deadline, "{} never end: {volume:?}", running.len());
        turn(&mut volume, &mut ended);
        for Ended { token, result } in ended.drain(..) {
            result.unwrap();
            running.remove(&token);
        }
    }
    assert_eq!((losses, mends), (2, 2), "{backs} came back");
    assert_eq!((backs, volume.degraded()), (1, (0, 0)));
    for at in (0..size).step_by(1 << 20) {
        let local = place(0).sub(0, (1 << 20).min((size - at) as usize)).unwrap();
        volume.read(99, at, local).unwrap();
        wait(&mut volume, 99).unwrap();
        assert!(local.to_vec() == model[at as usize..at as usize + local.len()]);
    }
}

#[test]
fn without_replicas_a_lost_lender_is_named_and_the_rest_goes_on() {
    let mut lenders: Vec<Serving> = (0..2).map(|_| Serving::new(4)).collect();
    let mut volume = open(&[&lenders[0], &lenders[1]], 4 * SLAB, 1).unwrap();
    let memory = Mapping::anonymous(SLAB as usize).unwrap();
    memory.shared().fill(7);
    for extent in 0..4 {
        volume.write(1, extent * SLAB, memory.shared()).unwrap();
        wait(&mut volume, 1).unwrap();
    }
    volume.flush(2);
    wait(&mut volume, 2).unwrap();
    let gone = lenders.remove(0);
    let address = gone.address.clone();
    drop(gone);
    // Its memory may be there for longer than itself.
    let mut ended = Vec::new();
    while !matches!(volume.event(), Some(Event::LenderLost { .. })) {
        turn(&mut volume, &mut ended);
    }
    let mut failed = 0;
    for extent in 0..4 {
        volume.read(1, extent * SLAB, memory.shared()).unwrap();
        if let Err(error) = wait(&mut volume, 1) {
            assert!(error.to_string().contains(&address), "{error}");
            failed += 1;
        }
    }
    assert_eq!((failed, volume.degraded()), (2, (0, 2)));
    volume.flush(2);
    assert!(wait(&mut volume, 2).is_err(), "what was written is gone");
    assert!(volume.lenders().iter().any(|lender| lender.lost.is_some() && lender.address == address));
}

/// A lender on this host has taken its memory back while nobody drove the volume.
#[test]
fn what_was_taken_away_is_read_elsewhere_or_told() {
    let lease_timeout = Some(Duration::from_millis(400));
    let config = LenderConfig { size_bytes: 4 * SLAB, slab_bytes: SLAB, ..LenderConfig::default() };
    let (hasty, other) =
        (Serving::start(LenderConfig { lease_timeout, ..config.clone() }), Serving::start(config));
    let mut alone = open(&[&hasty], SLAB, 1).unwrap();
    let mut both = open(&[&hasty, &other], SLAB, 2).unwrap();
    let memory = Mapping::anonymous(SLAB as usize).unwrap();
    let write = |volume: &mut Volume| {
        memory.shared().fill(7);
        for _ in 0..2 {
            volume.write(1, 0, memory.shared()).unwrap();
            wait(volume, 1).unwrap();
            volume.flush(2);
            wait(volume, 2).unwrap();
        }
    };
    write(&mut alone);
    write(&mut both);
    let deadline = Instant::now() + Duration::from_secs(10);
    while status(&hasty.address).unwrap().used_bytes > 0 {
        assert!(Instant::now() < deadline, "it waits for ever");
        std::thread::sleep(Duration::from_millis(10));
    }
    alone.read(1, 0, memory.shared()).unwrap();
    let error = wait(&mut alone, 1).unwrap_err();
    assert!(error.to_string().contains(&hasty.address), "{error}");
    for _ in 0..4 {
        memory.shared().fill(0);
        both.read(1, 0, memory.shared()).unwrap();
        wait(&mut both, 1).unwrap();
        assert!(memory.shared().to_vec() == vec![7; SLAB as usize]);
    }
    let lost = std::iter::from_fn(|| both.event()).find_map(|event| match event {
        Event::LenderLost { lender, .. } => Some(lender),
        _ => None,
    });
    assert_eq!(lost.as_ref(), Some(&hasty.address));
}

/// Copies at one lender under two addresses would be lost together, at the start and after a loss.
#[test]
fn copies_are_at_different_lenders_whatever_these_are_called() {
    let place = |name: &str| {
        std::env::temp_dir().join(format!("netvm-volume-{name}-{}", std::process::id())).display().to_string()
    };
    let (link, sockets) = (place("link"), [place("one"), place("two"), place("three")]);
    let points_to = |socket: &str| {
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(socket, &link).unwrap();
    };
    let start = |socket: &str| Serving::at(&format!("unix:{socket}"), 8);
    let (one, two) = (start(&sockets[0]), start(&sockets[1]));
    points_to(&sockets[1]);
    let addresses = [format!("unix:{link}"), two.address.clone()];
    let open = || Volume::open(&addresses, SLAB, VolumeOptions { replicas: 2, ..VolumeOptions::default() });
    assert!(open().unwrap_err().to_string().contains("are the same lender"));
    points_to(&sockets[0]);
    let mut volume = open().unwrap();
    let memory = Mapping::anonymous(SLAB as usize).unwrap();
    memory.shared().fill(9);
    volume.write(1, 0, memory.shared()).unwrap();
    wait(&mut volume, 1).unwrap();
    volume.flush(2);
    wait(&mut volume, 2).unwrap();
    points_to(&sockets[1]);
    drop(one);
    let mut until = |so: fn(&Event) -> bool| {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            turn(&mut volume, &mut Vec::new());
            match volume.event() {
                Some(event) if so(&event) => return event,
                Some(Event::LenderBack { lender }) => panic!("{lender} is the other one"),
                _ => assert!(Instant::now() < end, "nothing is said of it"),
            }
        }
    };
    let event = until(|event| matches!(event, Event::LenderUnfit { .. }));
    assert!(matches!(&event, Event::LenderUnfit { reason, .. } if reason.contains("one of the others")));
    // Another one that is really another is taken.
    let three = start(&sockets[2]);
    points_to(&sockets[2]);
    until(|event| matches!(event, Event::LenderBack { .. }));
    until(|event| matches!(event, Event::Mended { .. }));
    drop(two);
    memory.shared().fill(0);
    volume.read(3, 0, memory.shared()).unwrap();
    wait(&mut volume, 3).unwrap();
    assert!(memory.shared().to_vec() == vec![9; SLAB as usize]);
    drop(three);
    std::fs::remove_file(link).unwrap();
}

#[test]
fn what_cannot_be_is_said() {
    let (one, two) = (Serving::new(4), Serving::new(4));
    let error = open(&[&one, &two], 5 * SLAB, 2).unwrap_err().to_string();
    assert!(error.contains("too little memory") && error.contains("sufficed for 4 MiB"), "{error}");
    assert!(open(&[&one, &two], SLAB, 3).is_err());
    for size in [u64::MAX, 1 << 62, (1 << 46) + 1] {
        assert!(open(&[&one, &two], size, 1).unwrap_err().to_string().contains("can have"));
    }
    assert!(open(&[&one, &one], SLAB, 2).unwrap_err().to_string().contains("named twice"));
    let mut volume = open(&[&one, &two], 8 * SLAB, 1).unwrap();
    let memory = Mapping::anonymous(4096).unwrap();
    assert!(volume.write(1, 8 * SLAB - 1, memory.shared().sub(0, 2).unwrap()).is_err());
    assert!(volume.discard(1, u64::MAX, 2).is_err());
    volume.write(1, 8 * SLAB - 1, memory.shared().sub(0, 1).unwrap()).unwrap();
    wait(&mut volume, 1).unwrap();
}

#[test]
fn what_was_sent_ends_without_hearing_and_what_is_answered_does_not() {
    let lender = Serving::new(4);
    let borrow = BorrowOptions { link: LinkChoice::Socket, ..BorrowOptions::default() };
    let options = VolumeOptions { borrow, ..VolumeOptions::default() };
    let mut volume = Volume::open(std::slice::from_ref(&lender.address), SLAB, options).unwrap();
    let memory = Mapping::anonymous(4096).unwrap();
    memory.shared().fill(7);
    let mut ended = Vec::new();
    volume.write(1, 0, memory.shared()).unwrap();
    volume.advance(false, &mut ended);
    assert!(matches!(ended[..], [Ended { token: 1, result: Ok(()) }]), "{ended:?}");
    ended.clear();
    memory.shared().fill(0);
    let since = Instant::now();
    volume.poll(&mut ended);
    volume.read(2, 0, memory.shared()).unwrap();
    volume.advance(false, &mut ended);
    // The answer is there, and nobody has looked.
    assert!(comes(&volume, Duration::from_secs(20)));
    volume.advance(false, &mut ended);
    // Now and then it looks by itself.
    assert!(ended.is_empty() || since.elapsed() > Duration::from_millis(100), "{ended:?}");
    volume.advance(true, &mut ended);
    assert!(matches!(ended[..], [Ended { token: 2, result: Ok(()) }]), "{ended:?}");
    assert!(memory.shared().to_vec().iter().all(|&byte| byte == 7));
    // Nothing is owed, so nobody is silent: also when that was not heard.
    volume.write(3, 0, memory.shared()).unwrap();
    volume.advance(false, &mut ended);
    assert!(volume.patience() >= Duration::from_secs(1), "{:?}", volume.patience());
}

#[test]
fn discarded_memory_goes_back_to_the_machine() {
    let lender = Serving::new(16);
    let mut volume = open(&[&lender], 16 * SLAB, 1).unwrap();
    let memory = Mapping::anonymous(SLAB as usize).unwrap();
    memory.shared().fill(7);
    for extent in 0..16 {
        volume.write(1, extent * SLAB, memory.shared()).unwrap();
        wait(&mut volume, 1).unwrap();
    }
    volume.flush(2);
    wait(&mut volume, 2).unwrap();
    let resident = || netvm::lender::status(&lender.address).unwrap().resident_bytes;
    assert!(resident() >= 16 * SLAB);
    assert_eq!(volume.presence().bytes(), 16 * SLAB);
    volume.discard(3, SLAB / 2, 15 * SLAB).unwrap();
    wait(&mut volume, 3).unwrap();
    volume.flush(2);
    wait(&mut volume, 2).unwrap();
    assert_eq!(volume.presence().bytes(), SLAB);
    // What has come back is cleared soon.
    let deadline = Instant::now() + Duration::from_secs(5);
    while resident() > 2 * SLAB {
        assert!(Instant::now() < deadline, "{}", resident());
    }
    volume.read(4, 0, memory.shared()).unwrap();
    wait(&mut volume, 4).unwrap();
    let half = SLAB as usize / 2;
    let bytes = memory.shared().to_vec();
    assert!(bytes[..half].iter().all(|&byte| byte == 7) && bytes[half..].iter().all(|&byte| byte == 0));
}

/// Also when it was full when it was asked last: others give memory back, and who comes back holds its old lease for a while.
#[test]
fn a_lender_that_has_room_again_gets_what_lacks_a_copy() {
    let lenders: Vec<Serving> = (0..2).map(|_| Serving::new(4)).collect();
    let full = Serving::new(4);
    let mut other = full.connect();
    let slabs: Vec<u32> = (0..4).map(|_| other.borrow_slab().unwrap()).collect();
    let mut volume = open(&[&lenders[0], &lenders[1], &full], 4 * SLAB, 2).unwrap();
    let memory = Mapping::anonymous(SLAB as usize).unwrap();
    for extent in 0..4u64 {
        memory.shared().fill(extent as u8 + 1);
        volume.write(1, extent * SLAB, memory.shared()).unwrap();
        wait(&mut volume, 1).unwrap();
    }
    let mut lenders = lenders;
    drop(lenders.remove(0));
    let mut ended = Vec::new();
    let start = Instant::now();
    let mut events = Vec::new();
    // It has been asked, and had nothing.
    while start.elapsed() < Duration::from_millis(1500) || volume.degraded() == (0, 0) {
        turn(&mut volume, &mut ended);
        events.extend(std::iter::from_fn(|| volume.event()));
        assert!(start.elapsed() < Duration::from_secs(20), "{events:?}");
    }
    assert!(!events.iter().any(|event| matches!(event, Event::Mended { .. })), "{events:?}");
    for slab in slabs {
        other.return_slab(slab).unwrap();
    }
    while !events.iter().any(|event| matches!(event, Event::Mended { .. })) {
        turn(&mut volume, &mut ended);
        events.extend(std::iter::from_fn(|| volume.event()));
        assert!(start.elapsed() < Duration::from_secs(40), "never mended: {events:?}");
    }
    assert_eq!(volume.degraded(), (0, 0));
    drop(lenders);
    for extent in 0..4u64 {
        volume.read(1, extent * SLAB, memory.shared()).unwrap();
        wait(&mut volume, 1).unwrap();
        assert!(memory.shared().to_vec().iter().all(|&byte| byte == extent as u8 + 1), "{extent}");
    }
}
