//! Locks and the like between processes: what they promise, and that they keep it when processes are killed.

use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use netvm::node::{Node, RemoteKey, Rights};
use netvm::region::{Peer, Region};
use netvm::sync::{
    Combine, Group, Kind, Lock, Monitor, ReadWriteLock, Refusal, Semaphore, SyncError, WaitQueue,
};

mod common;
use common::Random;

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
    assert!(home.node.unexport("lock"));
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
        assert!(home.node.unexport("queue"));
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
        std::thread::sleep(Duration::from_millis(20));
        assert!(matches!(lock.try_read(), Err(SyncError::Busy)), "the writer was first");
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
                    let [number] = words(&region, 0);
                    put(&region, 0, &[number + 1]);
                    drop(guard);
                }
            });
        }
    });
    let (_node, peer) = home.guest();
    assert_eq!(words(&peer.import("memory", &memory_key).unwrap(), 0), [600]);
}

// ---- killed processes ----

const WORKERS: usize = 4;
const PERMITS: usize = 2;
/// Each lock has a record in the memory that the processes share. A section changes it in two steps, so that one who is killed in
/// between leaves it half done: first counter and owner, then owner and checksum.
const LOCKS: u64 = 2;
const RECORD: u64 = 64;
const COUNTER: u64 = 0;
const OWNER: u64 = 8;
const CHECKSUM: u64 = 16;
/// How often a section was found abandoned, and how often half done.
const ABANDONED: u64 = 24;
const REPAIRED: u64 = 32;
/// Behind the records: sections to do; one word per worker: sections finished; its incarnation while it has a permit; its incarnation
/// while nobody kills it.
const TARGET: u64 = LOCKS * RECORD;
const DONE: u64 = 256;
const CLAIMS: u64 = 320;
const ALIVE: u64 = 352;

fn words<const N: usize>(region: &Region, offset: u64) -> [u64; N] {
    let mut bytes = vec![0; 8 * N];
    region.read(offset, &mut bytes).unwrap();
    std::array::from_fn(|word| u64::from_le_bytes(bytes[8 * word..][..8].try_into().unwrap()))
}

fn put(region: &Region, offset: u64, words: &[u64]) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    region.write(offset, &bytes).unwrap();
}

fn checksum(counter: u64) -> u64 {
    Random::new(counter).next()
}

fn hex(key: RemoteKey) -> String {
    format!("{:032x}", u128::from_be_bytes(key.to_bytes()))
}

struct Worker<'a> {
    number: u64,
    incarnation: u64,
    region: &'a Region,
    random: Random,
}

impl Worker<'_> {
    /// One section under a lock; false when there are enough.
    fn section(&mut self, lock: &Lock, record: u64, target: u64) -> bool {
        // Sometimes time is over first: the queue must stay sound.
        let impatient = self.random.next().is_multiple_of(16);
        let timeout = if impatient { self.random.next() % 300 } else { 60_000_000 };
        let (guard, abandoned) = match lock.lock(Some(Duration::from_micros(timeout))) {
            Ok(guard) => (guard, false),
            Err(SyncError::Abandoned(guard)) => (guard, true),
            Err(SyncError::TimedOut) if impatient => return true,
            Err(error) => panic!("no lock: {error}"),
        };
        let number = self.number;
        let [counter, owner, sum, deaths, repairs] = words(self.region, record);
        let half_done = owner != 0 || sum != checksum(counter);
        assert!(abandoned || !half_done, "{number} found a section half done that nobody abandoned");
        if abandoned {
            put(self.region, record + ABANDONED, &[deaths + 1, repairs + u64::from(half_done)]);
            put(self.region, record + OWNER, &[0, checksum(counter)]);
        }
        if counter >= target {
            guard.release().unwrap();
            return false;
        }
        if self.random.next().is_multiple_of(4) {
            put(self.region, record + COUNTER, &[counter + 1, number + 1]);
            if self.random.next().is_multiple_of(64) {
                std::thread::sleep(Duration::from_micros(200));
            }
            put(self.region, record + OWNER, &[0, checksum(counter + 1)]);
        } else {
            put(self.region, record, &[counter + 1, 0, checksum(counter + 1)]);
        }
        drop(guard);
        true
    }

    /// Never more with a permit than there are permits.
    fn permit(&self, semaphore: &Semaphore) {
        let permit = semaphore.acquire(1, Some(Duration::from_secs(60))).or_else(SyncError::recover).unwrap();
        let claim = CLAIMS + 8 * self.number;
        put(self.region, claim, &[self.incarnation]);
        let both: [u64; 2 * WORKERS] = words(self.region, CLAIMS);
        let inside = (0..WORKERS).filter(|&w| both[w] != 0 && both[w] == both[WORKERS + w]).count();
        assert!(inside <= PERMITS, "{inside} have one of {PERMITS} permits: {both:?}");
        put(self.region, claim, &[0]);
        drop(permit);
    }
}

/// What a worker process does; started by [`torture`].
#[test]
#[ignore = "started by other tests"]
fn worker() {
    let Ok(job) = std::env::var("NETVM_TEST_WORKER") else { return };
    let job: Vec<&str> = job.split(' ').collect();
    let key = |at: usize| RemoteKey::from_bytes(u128::from_str_radix(job[at], 16).unwrap().to_be_bytes());
    let node = Node::new().unwrap();
    let peer = node.connect(job[0]).unwrap();
    let region = peer.import("memory", &key(3)).unwrap();
    let semaphore = Semaphore::open(&peer, "semaphore", &key(4)).unwrap();
    let locks: Vec<Lock> = (0..LOCKS)
        .map(|lock| Lock::open(&peer, &format!("lock {lock}"), &key(5 + lock as usize)).unwrap())
        .collect();
    let [target] = words(&region, TARGET);
    let (number, incarnation) = (job[1].parse::<u64>().unwrap(), job[2].parse::<u64>().unwrap());
    let mut worker = Worker { number, incarnation, region: &region, random: Random::new(incarnation) };
    let [mut done] = words(&region, DONE + 8 * number);
    let mut left: Vec<u64> = (0..LOCKS).collect();
    while !left.is_empty() {
        let at = (worker.random.next() % left.len() as u64) as usize;
        if !worker.section(&locks[left[at] as usize], left[at] * RECORD, target) {
            left.swap_remove(at);
        }
        done += 1;
        if done.is_multiple_of(16) {
            put(&region, DONE + 8 * number, &[done]);
            worker.permit(&semaphore);
        }
    }
}

/// Kills a worker from time to time and starts another one in its place, until `sections` have been done.
fn torture(sections: u64, kill_every: Duration) {
    let home = Home::new();
    let folder = std::env::temp_dir().join(format!("netvm-sync-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let unix = home.node.listen(&format!("unix:{}", folder.join("home").display())).unwrap();
    let memory = Node::memory(4096).unwrap();
    let word = |offset: u64| {
        let memory = Arc::clone(&memory);
        move |value: Option<u64>| {
            let access = |word: &AtomicU64| match value {
                Some(value) => word.swap(value, Ordering::SeqCst),
                None => word.load(Ordering::SeqCst),
            };
            memory.shared().with_u64(offset as usize, access).unwrap()
        }
    };
    let sum = |offset: u64| (0..LOCKS).map(|lock| word(lock * RECORD + offset)(None)).sum::<u64>();
    let target = sections.div_ceil(LOCKS);
    word(TARGET)(Some(target));
    let mut keys = vec![
        home.node.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap(),
        home.node.export_sync("semaphore", Kind::Semaphore { permits: PERMITS as u32 }).unwrap(),
    ];
    for lock in 0..LOCKS {
        word(lock * RECORD + CHECKSUM)(Some(checksum(0)));
        keys.push(home.node.export_sync(&format!("lock {lock}"), Kind::LOCK).unwrap());
    }
    let mut incarnations = 0;
    let mut start = |worker: usize| {
        incarnations += 1;
        word(CLAIMS + 8 * worker as u64)(Some(0));
        word(ALIVE + 8 * worker as u64)(Some(incarnations));
        let address = if worker.is_multiple_of(2) { &unix } else { &home.address };
        let keys: Vec<String> = keys.iter().copied().map(hex).collect();
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "worker", "--ignored", "--nocapture"])
            .env("NETVM_TEST_WORKER", format!("{address} {worker} {incarnations} {}", keys.join(" ")))
            // Some have the memory mapped, the others' writes go over their sockets.
            .env("NETVM_LINK", if worker < 2 { "auto" } else { "socket" })
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap()
    };
    let begin = Instant::now();
    let mut workers: Vec<Child> = (0..WORKERS).map(&mut start).collect();
    let (mut random, mut kills, mut last, mut last_counter) = (Random::new(7), 0, Instant::now(), 0);
    while sum(COUNTER) < LOCKS * target {
        std::thread::sleep(kill_every);
        for worker in &mut workers {
            let ended = worker.try_wait().unwrap();
            assert!(ended.is_none_or(|status| status.success()), "a worker failed");
        }
        let counter = sum(COUNTER);
        if counter > last_counter {
            (last, last_counter) = (Instant::now(), counter);
        }
        assert!(last.elapsed() < Duration::from_secs(60), "stuck after {counter} sections, {kills} kills");
        let victim = (random.next() % WORKERS as u64) as usize;
        word(ALIVE + 8 * victim as u64)(Some(0));
        workers[victim].kill().unwrap();
        workers[victim].wait().unwrap();
        kills += 1;
        workers[victim] = start(victim);
    }
    for mut worker in workers {
        assert!(worker.wait().unwrap().success(), "a worker failed");
    }
    let elapsed = begin.elapsed();
    let (counter, abandoned, repaired) = (sum(COUNTER), sum(ABANDONED), sum(REPAIRED));
    println!(
        "{counter} sections, {kills} kills, {abandoned} abandoned, {repaired} of them half done, {:.1} µs per section",
        elapsed.as_micros() as f64 / counter as f64
    );
    assert_eq!(counter, LOCKS * target);
    assert!(abandoned <= kills, "{abandoned} abandoned, {kills} kills");
    let (_node, peer) = home.guest();
    for lock in 0..LOCKS {
        assert_eq!(word(lock * RECORD + CHECKSUM)(None), checksum(target));
        let lock = Lock::open(&peer, &format!("lock {lock}"), &keys[2 + lock as usize]).unwrap();
        drop(lock.lock(SECOND).or_else(SyncError::recover).unwrap());
    }
    let semaphore = Semaphore::open(&peer, "semaphore", &keys[1]).unwrap();
    let _all = semaphore.acquire(PERMITS as u32, SECOND).or_else(SyncError::recover).unwrap();
    assert!(matches!(semaphore.try_acquire(1), Err(SyncError::Busy)), "permits came out of nowhere");
    let _ = std::fs::remove_dir_all(folder);
}

/// `NETVM_TEST_SECTIONS` sets how many critical sections there are.
#[test]
fn killed_processes_break_nothing() {
    let sections = std::env::var("NETVM_TEST_SECTIONS").ok().and_then(|sections| sections.parse().ok());
    torture(sections.unwrap_or(50_000), Duration::from_millis(100));
}
