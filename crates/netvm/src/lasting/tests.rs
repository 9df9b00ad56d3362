//! Epochs, as a node sees them.

use std::sync::atomic::Ordering;

use super::*;
use crate::node::Rights;
use crate::sync::{Kind, Lock, SyncError};

#[test]
fn a_new_epoch_ends_the_old_one_first_and_old_ones_are_refused() {
    let server = Node::new().unwrap();
    let memory = Node::memory(4096).unwrap();
    let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let lock_key = server.export_sync("lock", Kind::LOCK).unwrap();
    let address = server.listen("127.0.0.1:0").unwrap();
    let client = Node::new().unwrap();
    let connect = |number, epoch, rails| {
        connect_as(client.shared(), &address, rails, Incarnation { client: [number; 12], epoch })
    };
    for rails in [1, 3] {
        let number = rails as u8;
        let other = connect(100 + number, 7, rails).unwrap();
        let untouched = other.import("memory", &key).unwrap();
        let old = connect(number, 1, rails).unwrap();
        let region = old.import("memory", &key).unwrap();
        let lock = Lock::open(&old, "lock", &lock_key).unwrap();
        let guard = lock.lock(None).or_else(SyncError::recover).unwrap();
        let new = connect(number, 2, rails).unwrap();
        // Already: its operations find nothing of the old session's.
        let second = Lock::open(&new, "lock", &lock_key).unwrap();
        let Err(SyncError::Abandoned(_held)) = second.lock(Some(Duration::ZERO)) else { panic!("not told") };
        assert!(region.fetch_add(0, 1u64).is_err());
        drop(guard);
        let region = new.import("memory", &key).unwrap();
        for late in [0, 1, 2] {
            assert!(matches!(connect(number, late, rails), Err(Error::Refused { .. })), "{late}");
        }
        region.fetch_add(0, 1u64).unwrap();
        untouched.fetch_add(0, 1u64).unwrap();
        let newest = connect(number, 9, rails).unwrap();
        assert!(region.fetch_add(0, 1u64).is_err());
        newest.import("memory", &key).unwrap().fetch_add(0, 1u64).unwrap();
    }
    let executed = memory.shared().with_u64(0, |word| word.load(Ordering::SeqCst));
    assert_eq!(executed, Some(6));
}

#[test]
fn writes_that_no_flush_confirmed_are_told_once() {
    let server = Node::new().unwrap();
    let memory = Node::memory(4096).unwrap();
    let key = server.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let address = server.listen("127.0.0.1:0").unwrap();
    let client = Node::new().unwrap();
    let peer = client.connect_lasting(&address, Reconnect::default()).unwrap();
    let region = peer.import("memory", &key).unwrap();
    // Ends the session, as a cut does.
    let cut = || {
        let before = peer.epoch();
        connect_as(
            client.shared(),
            &address,
            1,
            Incarnation { client: peer.inner.client, epoch: before + 1 },
        )
        .unwrap();
        peer.inner.epoch.fetch_add(1, Ordering::Relaxed);
        while !lock(&peer.inner.connection).peer.as_ref().unwrap().is_closed() {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let unknown =
        |result: Result<()>| assert!(matches!(result, Err(Error::OutcomeUnknown { .. })), "{result:?}");
    region.write(0, &[1; 8]).unwrap();
    region.flush().unwrap();
    cut();
    region.flush().unwrap();
    region.write(0, &[2; 8]).unwrap();
    cut();
    unknown(region.flush());
    region.flush().unwrap();
    // Also when others were written since.
    region.write(0, &[3; 8]).unwrap();
    cut();
    region.write(8, &[4; 8]).unwrap();
    unknown(region.flush());
    region.write(8, &[5; 8]).unwrap();
    region.flush().unwrap();
    assert_eq!(memory.shared().sub(8, 8).unwrap().to_vec(), [5; 8]);
    let mut seen = [0; 8];
    region.read(8, &mut seen).unwrap();
    assert_eq!(seen, [5; 8]);
    // Posted ones alike: told once, before anything is posted.
    let local = Node::memory(4096).unwrap();
    let post = |value: u8| {
        local.shared().fill(value);
        let region = region.writing().unwrap();
        region.post().write(8, &[local.shared().sub(0, 8).unwrap()], WriteOptions::default()).unwrap().wait()
    };
    post(6).unwrap();
    let flush = || region.post_flush(|region| region.post().flush());
    flush().unwrap().wait().unwrap();
    assert_eq!(memory.shared().sub(8, 8).unwrap().to_vec(), [6; 8]);
    cut();
    region.flush().unwrap();
    post(7).unwrap();
    cut();
    post(8).unwrap();
    unknown(flush().map(drop));
    // What this connection has is still to be flushed.
    assert!(lock(&peer.inner.writes).written.is_some());
    flush().unwrap().wait().unwrap();
    assert_eq!(memory.shared().sub(8, 8).unwrap().to_vec(), [8; 8]);
    region.flush().unwrap();
    // What was refused for want of room was not written, and a flush that was refused has answered for nothing.
    let full = |_: &Region| Err(Error::WouldBlock { lender: address.clone() });
    let refused = |result: Result<()>| assert!(matches!(result, Err(Error::WouldBlock { .. })), "{result:?}");
    let would_block = |error: &Error| matches!(error, Error::WouldBlock { .. });
    refused(region.post_write(full, would_block));
    cut();
    region.flush().unwrap();
    region.write(8, &[9; 8]).unwrap();
    refused(region.post_write(full, would_block));
    refused(region.post_flush(full));
    cut();
    unknown(region.flush());
    region.post_write(|region| region.write(8, &[10; 8]), would_block).unwrap();
    cut();
    refused(region.post_write(full, would_block));
    unknown(region.flush());
    region.flush().unwrap();
}

#[test]
fn who_connects_keeps_nobody_from_looking() {
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let address = server.listen("127.0.0.1:0").unwrap();
    let peer = client.connect_lasting(&address, Reconnect::default()).unwrap();
    let connecting = lock(&peer.inner.connection);
    let (looked, looks) = std::sync::mpsc::channel();
    let other = peer.clone();
    std::thread::spawn(move || {
        lock(&other.inner.writes).note(1);
        looked.send(other.epoch()).unwrap();
    });
    assert_eq!(looks.recv_timeout(Duration::from_secs(10)), Ok(1));
    drop(connecting);
}

#[test]
fn who_cannot_be_reached_is_waited_for_with_patience() {
    let client = Node::new().unwrap();
    let reconnect = Reconnect { patience: Duration::from_millis(200), ..Reconnect::default() };
    let start = Instant::now();
    // Nobody listens there.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    assert!(matches!(client.connect_lasting(&free, reconnect), Err(Error::Connect { .. })));
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(matches!(client.connect_lasting("nowhere", reconnect), Err(Error::Address { .. })));
    // It comes late.
    let patient = Reconnect { patience: Duration::from_secs(60), ..Reconnect::default() };
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| client.connect_lasting(&free, patient));
        std::thread::sleep(Duration::from_millis(100));
        let server = Node::new().unwrap();
        server.listen(&free).unwrap();
        connecting.join().unwrap().unwrap();
    });
}

#[test]
fn who_flushes_meanwhile_learns_of_the_same_writes() {
    let mut state = Writes::default();
    state.note(1);
    // One flush fails with the connection of epoch 1, another one begins in epoch 2 before the first has ended.
    let (lost, writes) = state.unconfirmed(1);
    assert!(!lost);
    let (lost, later) = state.unconfirmed(2);
    assert!(lost && later == writes);
    state.told(writes);
    assert_eq!(state.unconfirmed(2), (false, 1));
    // A write that comes while a flush is under way is not told with it.
    state.note(2);
    let (_, writes) = state.unconfirmed(2);
    state.note(2);
    state.told(writes);
    assert!(state.unconfirmed(3).0);
}

#[test]
fn a_flush_that_came_before_a_write_does_not_answer_for_it() {
    let (server, client) = (Node::new().unwrap(), Node::new().unwrap());
    let key = server.export("memory", Node::memory(4096).unwrap(), Rights::ReadWrite).unwrap();
    let address = server.listen("127.0.0.1:0").unwrap();
    let peer = client.connect_lasting(&address, Reconnect::default()).unwrap();
    let region = peer.import("memory", &key).unwrap();
    let unconfirmed = || lock(&peer.inner.writes).written.is_some();
    let would_block = |_: &Error| false;
    for posts in [false, true] {
        let flush = || match posts {
            true => region.post_flush(|region| region.post().flush()).and_then(|flush| flush.wait()),
            false => region.flush(),
        };
        // The other thread's flush comes when the write has been announced, and is not posted yet.
        let late = |current: &Region| {
            flush().unwrap();
            current.write(0, &[1; 8])
        };
        region.post_write(late, would_block).unwrap();
        assert!(unconfirmed(), "confirmed before it was written");
        flush().unwrap();
        assert!(!unconfirmed());
        let writing = region.writing().unwrap();
        flush().unwrap();
        writing.write(0, &[1; 8]).unwrap();
        drop(writing);
        assert!(unconfirmed(), "confirmed before it was written");
        flush().unwrap();
        assert!(!unconfirmed());
    }
    // The connection ended meanwhile, and there is another: its writes are not confirmed either.
    let mut state = Writes::default();
    state.note(1);
    state.note(2);
    state.note(1);
    assert_eq!((state.lost, state.written), (true, Some(2)));
}

/// One after the other each would have all the patience for itself.
#[test]
fn who_waits_for_others_attempts_has_no_more_patience_than_they() {
    let server = Node::new().unwrap();
    let key = server.export("memory", Node::memory(4096).unwrap(), Rights::ReadWrite).unwrap();
    let address = server.listen("127.0.0.1:0").unwrap();
    let client = Node::new().unwrap();
    let patience = Duration::from_millis(500);
    let reconnect = Reconnect { patience, longest: Duration::from_millis(20), ..Reconnect::default() };
    let peer = client.connect_lasting(&address, reconnect).unwrap();
    let region = peer.import("memory", &key).unwrap();
    drop(server);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert!(region.fetch_add(0, 1u64).is_err()));
        }
    });
    assert!(start.elapsed() < 3 * patience, "{:?}", start.elapsed());
}

#[test]
fn epochs_that_are_used_up_are_told() {
    let server = Node::new().unwrap();
    let address = server.listen("127.0.0.1:0").unwrap();
    let client = Node::new().unwrap();
    let peer = client.connect_lasting(&address, Reconnect::default()).unwrap();
    let newest = |epoch| {
        let incarnation = Incarnation { client: peer.inner.client, epoch };
        connect_as(client.shared(), &address, 1, incarnation)
    };
    // The last epoch there is replaces all before it, and nothing comes after it.
    let last = newest(u32::MAX).unwrap();
    for late in [0, 1, u32::MAX - 1, u32::MAX] {
        assert!(matches!(newest(late), Err(Error::Refused { .. })), "{late}");
    }
    peer.inner.epoch.store(u32::MAX, Ordering::Relaxed);
    while !lock(&peer.inner.connection).peer.as_ref().unwrap().is_closed() {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(matches!(peer.current(), Err(Error::Other(_))), "the epochs began anew");
    assert!(!last.is_closed());
}
