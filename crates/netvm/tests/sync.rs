//! Locks and the like between processes: what they promise, and that they keep it when processes are killed.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use netvm::node::{Node, Rights};
use netvm::region::Peer;
use netvm::sync::{
    Combine, Group, Kind, Lock, Monitor, ReadWriteLock, Refusal, Semaphore, SyncError, WaitQueue,
};

const SECOND: Option<Duration> = Some(Duration::from_secs(10));
const SHORT: Option<Duration> = Some(Duration::from_millis(30));

struct Home {
    node: Node,
    address: String,
}

impl Home {
    fn new() -> Self {
        let node = Node::new().unwrap();
        let address = node.listen("127.0.0.1:0").unwrap();
        Self { node, address }
    }

    /// Another process, as far as the home can tell.
    fn guest(&self) -> (Node, Peer) {
        let node = Node::new().unwrap();
        let peer = node.connect(&self.address).unwrap();
        (node, peer)
    }
}

#[test]
fn locks_exclude_time_out_and_tell_of_deaths() {
    let home = Home::new();
    let key = home.node.export_sync("lock", Kind::LOCK).unwrap();
    let ((_node, peer), (dying, other)) = (home.guest(), home.guest());
    let lock = Lock::open(&peer, "lock", &key).unwrap();
    let theirs = Lock::open(&other, "lock", &key).unwrap();
    assert!(matches!(Semaphore::open(&peer, "lock", &key), Err(SyncError::Refused(Refusal::WrongKind))));
    let guard = lock.lock(None).unwrap();
    assert!(matches!(theirs.try_lock(), Err(SyncError::Busy)));
    assert!(matches!(lock.try_lock(), Err(SyncError::Busy)), "another thread of the same process waits too");
    let start = Instant::now();
    assert!(matches!(theirs.lock(SHORT), Err(SyncError::TimedOut)));
    assert!(start.elapsed() >= SHORT.unwrap() && start.elapsed() < Duration::from_secs(2));
    drop(guard);
    let guard = theirs.lock(SECOND).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| lock.lock(SECOND));
        std::thread::sleep(Duration::from_millis(20));
        drop(dying);
        assert!(matches!(waiting.join().unwrap(), Err(SyncError::Abandoned(_))));
    });
    assert!(matches!(guard.release(), Err(SyncError::Failed(_))));
    // Told once; the abandoned guard has been dropped.
    let guard = lock.lock(SECOND).unwrap();
    assert!(home.node.unexport("lock").unwrap());
    assert!(matches!(guard.release(), Err(SyncError::Refused(Refusal::Closed))));
    assert!(matches!(lock.lock(None), Err(SyncError::Refused(Refusal::Closed))));
}

#[test]
fn waiting_ends_when_the_object_or_its_home_goes() {
    let home = Home::new();
    let key = home.node.export_sync("queue", Kind::WaitQueue).unwrap();
    let (_node, peer) = home.guest();
    let queue = WaitQueue::open(&peer, "queue", &key).unwrap();
    std::thread::scope(|scope| {
        let waiting = queue.enqueue().unwrap();
        let waiting = scope.spawn(move || waiting.wait(None));
        std::thread::sleep(Duration::from_millis(10));
        assert!(home.node.unexport("queue").unwrap());
        assert!(matches!(waiting.join().unwrap(), Err(SyncError::Refused(Refusal::Closed))));
    });
    let key = home.node.export_sync("queue", Kind::WaitQueue).unwrap();
    let waiting = WaitQueue::open(&peer, "queue", &key).unwrap().enqueue().unwrap();
    let waiting = std::thread::spawn(move || waiting.wait(None));
    std::thread::sleep(Duration::from_millis(10));
    drop(home);
    assert!(matches!(waiting.join().unwrap(), Err(SyncError::Failed(_))));
}

#[test]
fn who_came_first_is_woken_first() {
    let home = Home::new();
    let key = home.node.export_sync("queue", Kind::WaitQueue).unwrap();
    let (_node, peer) = home.guest();
    let queue = WaitQueue::open(&peer, "queue", &key).unwrap();
    let woken = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let guests: Vec<_> = (0..5).map(|_| home.guest()).collect();
        for round in 0..10 {
            let peer = &guests[round % 5].1;
            let waiting = WaitQueue::open(peer, "queue", &key).unwrap().enqueue().unwrap();
            let woken = &woken;
            scope.spawn(move || {
                waiting.wait(None).unwrap();
                woken.lock().unwrap().push(round);
            });
        }
        for round in 1..=10 {
            assert!(queue.wake().unwrap());
            while woken.lock().unwrap().len() < round {
                std::thread::yield_now();
            }
        }
    });
    assert_eq!(woken.into_inner().unwrap(), (0..10).collect::<Vec<_>>());
}

/// More threads of one process wait than it may have calls under way, and for longer than a call may take.
#[test]
fn many_wait_long_in_one_process() {
    let home = Home::new();
    let key = home.node.export_sync("queue", Kind::WaitQueue).unwrap();
    let (_node, peer) = home.guest();
    let queue = WaitQueue::open(&peer, "queue", &key).unwrap();
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..100).map(|_| queue.enqueue().unwrap()).collect();
        let threads: Vec<_> =
            waiting.into_iter().map(|waiting| scope.spawn(move || waiting.wait(None))).collect();
        std::thread::sleep(Duration::from_millis(5500));
        // A place that is given up passes a wake-up on, and others' are not touched.
        drop(queue.enqueue().unwrap());
        assert_eq!(queue.wake_many(60).unwrap(), 60);
        assert_eq!(queue.wake_many(60).unwrap(), 40);
        assert!(!queue.wake().unwrap());
        assert!(threads.into_iter().all(|thread| thread.join().unwrap().is_ok()));
    });
}

/// A bounded buffer of one item, with many producers and consumers.
#[test]
fn monitors_lose_no_signal() {
    let home = Home::new();
    let key = home.node.export_sync("buffer", Kind::Monitor { conditions: 2 }).unwrap();
    let (filled, sum) = (AtomicU32::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (filled, sum, home, key) = (&filled, &sum, &home, &key);
            scope.spawn(move || {
                let (_node, peer) = home.guest();
                let monitor = Monitor::open(&peer, "buffer", key).unwrap();
                let produces = u32::from(worker % 2 == 0);
                for item in 0..300 {
                    let mut guard = monitor.enter(SECOND).unwrap();
                    while filled.load(Ordering::Relaxed) == produces {
                        let (inside, signalled) = guard.wait(produces, SECOND).unwrap();
                        assert!(signalled, "a signal was lost");
                        guard = inside;
                    }
                    filled.store(produces, Ordering::Relaxed);
                    sum.fetch_add(u64::from(produces) * item, Ordering::Relaxed);
                    guard.signal(1 - produces).unwrap();
                }
            });
        }
    });
    assert_eq!(sum.into_inner(), 2 * 300 * 299 / 2);
    let (_node, peer) = home.guest();
    let monitor = Monitor::open(&peer, "buffer", &key).unwrap();
    let (guard, signalled) = monitor.enter(None).unwrap().wait(0, SHORT).unwrap();
    assert!(!signalled && matches!(monitor.try_enter(), Err(SyncError::Busy)));
    assert_eq!(guard.broadcast(1).unwrap(), 0);
}

#[test]
fn readers_share_and_writers_do_not() {
    let home = Home::new();
    let key = home.node.export_sync("table", Kind::ReadWriteLock).unwrap();
    let ((_node, peer), (dying, other)) = (home.guest(), home.guest());
    let lock = ReadWriteLock::open(&peer, "table", &key).unwrap();
    let theirs = ReadWriteLock::open(&other, "table", &key).unwrap();
    let readers = (lock.read(None).unwrap(), theirs.read(None).unwrap());
    assert!(matches!(lock.try_write(), Err(SyncError::Busy)));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| theirs.write(SECOND).unwrap());
        // The writer comes at some time, and is first from then on.
        let began = Instant::now();
        while !matches!(lock.try_read(), Err(SyncError::Busy)) {
            assert!(began.elapsed() < Duration::from_secs(10), "the writer was not first");
        }
        drop(readers);
        let writer = writer.join().unwrap();
        assert!(matches!(lock.read(SHORT), Err(SyncError::TimedOut)));
        drop(dying);
        assert!(matches!(lock.read(SECOND), Err(SyncError::Abandoned(_))));
        assert!(matches!(lock.write(SECOND), Err(SyncError::Abandoned(_))));
        drop((lock.read(SECOND).unwrap(), writer));
    });
}

#[test]
fn semaphores_count() {
    let home = Home::new();
    let key = home.node.export_sync("pool", Kind::Semaphore { permits: 3 }).unwrap();
    let ((_node, peer), (dying, other)) = (home.guest(), home.guest());
    let pool = Semaphore::open(&peer, "pool", &key).unwrap();
    let theirs = Semaphore::open(&other, "pool", &key).unwrap();
    let two = theirs.acquire(2, None).unwrap();
    pool.consume(1, None).unwrap();
    assert!(matches!(pool.try_acquire(1), Err(SyncError::Busy)));
    assert_eq!(pool.add(1).unwrap(), 1);
    assert!(matches!(pool.add(u32::MAX), Err(SyncError::Refused(Refusal::Number))));
    drop(dying);
    let three = pool.acquire(3, SECOND).or_else(SyncError::recover).unwrap();
    assert!(matches!(pool.try_consume(1), Err(SyncError::Busy)));
    drop((three, two));
    pool.acquire(3, SECOND).unwrap().release().unwrap();
}

#[test]
fn groups_meet() {
    let home = Home::new();
    let key = home.node.export_sync("group", Kind::Group { parties: 4 }).unwrap();
    let meetings = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (home, key, meetings) = (&home, &key, &meetings);
            scope.spawn(move || {
                let (_node, peer) = home.guest();
                let mut group = Group::join(&peer, "group", key).unwrap();
                let rank = u64::from(group.rank());
                for round in 0..100 {
                    meetings.fetch_add(1, Ordering::Relaxed);
                    group.barrier(SECOND).unwrap();
                    assert!(meetings.load(Ordering::Relaxed) >= 4 * (round + 1));
                    let mut numbers = [rank, round];
                    group.reduce(Combine::SumU64, &mut numbers, SECOND).unwrap();
                    assert_eq!(numbers, [6, 4 * round]);
                    let least = group.reduce_f64(Combine::MinF64, rank as f64 - 0.5, SECOND).unwrap();
                    assert_eq!(least, -0.5);
                    let word = format!("round {round} of {rank}");
                    let all = group.broadcast((round % 4) as u32, word.as_bytes(), SECOND).unwrap();
                    assert_eq!(all, format!("round {round} of {}", round % 4).into_bytes());
                }
            });
        }
    });
    // All have left: new members join. One that dies breaks the meeting for each of the others, once.
    let ((_node, peer), (dying, other)) = (home.guest(), home.guest());
    let mut members: Vec<Group> = (0..3).map(|_| Group::join(&peer, "group", &key).unwrap()).collect();
    let dead = Group::join(&other, "group", &key).unwrap();
    std::thread::scope(|scope| {
        let waiting: Vec<_> =
            members.iter_mut().take(2).map(|member| scope.spawn(|| member.barrier(SECOND))).collect();
        std::thread::sleep(Duration::from_millis(20));
        drop(dying);
        assert!(waiting.into_iter().all(|thread| matches!(thread.join().unwrap(), Err(SyncError::Broken))));
    });
    drop(dead);
    assert!(matches!(members[2].barrier(SECOND), Err(SyncError::Broken)));
    assert!(matches!(members[2].barrier(SHORT), Err(SyncError::TimedOut)));
    members.push(Group::join(&peer, "group", &key).unwrap());
    std::thread::scope(|scope| {
        for member in &mut members {
            scope.spawn(|| member.barrier(SECOND).unwrap());
        }
    });
}

/// Over several connections at once, calls and signals overtake each other.
#[test]
fn turns_over_several_rails() {
    let home = Home::new();
    let key = home.node.export_sync("lock", Kind::LOCK).unwrap();
    let memory = Node::memory(4096).unwrap();
    let memory_key = home.node.export("memory", memory, Rights::ReadWrite).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let node = Node::new().unwrap();
                let peer = node.connect_rails(&home.address, 3).unwrap();
                let lock = Lock::open(&peer, "lock", &key).unwrap();
                let region = peer.import("memory", &memory_key).unwrap();
                for _ in 0..200 {
                    let guard = lock.lock(SECOND).unwrap();
                    let mut number = [0; 8];
                    region.read(0, &mut number).unwrap();
                    region.write(0, &(u64::from_le_bytes(number) + 1).to_le_bytes()).unwrap();
                    drop(guard);
                }
            });
        }
    });
    let (_node, peer) = home.guest();
    assert_eq!(peer.import("memory", &memory_key).unwrap().atomic_load::<u64>(0).unwrap(), 600);
}
