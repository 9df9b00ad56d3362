//! Locks, a monitor and a semaphore of one home, used by processes that are killed at any time.

use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use netvm::node::{Mapping, Node, RemoteKey, Rights};
use netvm::region::Region;
use netvm::sync::{Kind, Lock, Monitor, Semaphore, SyncError};

mod common;
use common::Random;
use common::process::{hex, key};

const WORKERS: usize = 4;
const PERMITS: usize = 2;
const LOCKS: u64 = 16;
/// Who waits for so long is stuck.
const LONG: Option<Duration> = Some(Duration::from_secs(60));

/// Each lock has a record in the memory that the processes share. A section changes it in two steps, so that one who is killed in
/// between leaves it half done: first counter and owner, then owner and checksum.
const RECORD: u64 = 64;
const COUNTER: u64 = 0;
const OWNER: u64 = 8;
const CHECKSUM: u64 = 16;
/// How often its lock was found abandoned, and how often half done.
const ABANDONED: u64 = 24;
const REPAIRED: u64 = 32;
/// How many have told that they would die inside, and how many have been killed who knows where.
const DEATHS: u64 = 40;
const KILLS: u64 = 48;

/// Behind the records: sections to do; one word per worker: sections finished; its incarnation while it has a permit; its incarnation
/// while nobody kills it; its incarnation when it wants to die.
const TARGET: u64 = LOCKS * RECORD;
const DONE: u64 = 1088;
const CLAIMS: u64 = 1120;
const ALIVE: u64 = 1152;
const DYING: u64 = 1184;
/// The queue inside the monitor, in the order of waiting: the places that have been woken and those that have been taken, and who is in
/// which place, or nobody any more.
const WOKEN: u64 = 1216;
const PLACES: u64 = 1280;
const PLACES_MAX: u64 = 64;
/// How often somebody was woken there.
const WAKES: u64 = 1232;
/// One word per worker: how many items it may have used up and not made anew.
const TAKING: u64 = 1792;
/// Items that are used up and made anew, and how many some want at once: only one can.
const ITEMS: u32 = 1 << 30;
const MANY: u32 = ITEMS / 4 * 3;
const FEW: u32 = 3;

fn words<const N: usize>(region: &Region, offset: u64) -> [u64; N] {
    let mut bytes = [0; 512];
    region.read(offset, &mut bytes[..8 * N]).unwrap();
    std::array::from_fn(|word| u64::from_le_bytes(bytes[8 * word..][..8].try_into().unwrap()))
}

fn put(region: &Region, offset: u64, words: &[u64]) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    region.write(offset, &bytes).unwrap();
}

fn checksum(counter: u64) -> u64 {
    Random::new(counter).next()
}

struct Worker<'a> {
    number: u64,
    incarnation: u64,
    region: &'a Region,
    random: Random,
}

impl Worker<'_> {
    fn one_in(&mut self, times: u64) -> bool {
        self.random.next().is_multiple_of(times)
    }

    /// Waits to be killed.
    fn die(&self) -> ! {
        self.region.flush().unwrap();
        put(self.region, DYING + 8 * self.number, &[self.incarnation]);
        loop {
            std::thread::park();
        }
    }

    /// One section under a lock; false when there are enough.
    fn section(&mut self, lock: &Lock, record: u64, target: u64) -> bool {
        // Where in the section it dies, if it does.
        let end = self.one_in(2048).then(|| self.random.next() % 3);
        // Sometimes time is over first: the queue must stay sound.
        let impatient = self.one_in(16);
        let timeout = if impatient { self.random.next() % 300 } else { 60_000_000 };
        let (guard, abandoned) = match lock.lock(Some(Duration::from_micros(timeout))) {
            Ok(guard) => (guard, false),
            Err(SyncError::Abandoned(guard)) => (guard, true),
            Err(SyncError::TimedOut) if impatient => return true,
            Err(error) => panic!("no lock: {error}"),
        };
        let number = self.number;
        let [counter, owner, sum, told, repairs, deaths, kills] = words(self.region, record);
        let half_done = owner != 0 || sum != checksum(counter);
        assert!(abandoned || !half_done, "{number} found a section half done that nobody abandoned");
        // Each death inside is told to the next, and to nobody else. Of one who was killed from outside nobody knows where it was.
        let told = told + u64::from(abandoned);
        assert!(
            (deaths..=deaths + kills).contains(&told),
            "{told} told of {deaths} deaths and {kills} kills"
        );
        if abandoned {
            put(self.region, record + ABANDONED, &[told, repairs + u64::from(half_done)]);
            put(self.region, record + OWNER, &[0, checksum(counter)]);
        }
        if counter >= target {
            guard.release().unwrap();
            return false;
        }
        if end.is_some() {
            put(self.region, record + DEATHS, &[deaths + 1]);
        }
        if end == Some(0) {
            self.die();
        }
        if end.is_some() || self.one_in(8) {
            put(self.region, record + COUNTER, &[counter + 1, self.incarnation]);
            if end == Some(1) {
                self.die();
            }
            put(self.region, record + OWNER, &[0, checksum(counter + 1)]);
        } else {
            put(self.region, record, &[counter + 1, 0, checksum(counter + 1)]);
        }
        if end.is_some() {
            self.die();
        }
        drop(guard);
        true
    }

    /// Uses up items, and makes as many. Who wants many waits for others who do, but not for long: some may have died with theirs.
    fn items(&mut self, items: &Semaphore) {
        let (count, timeout) = match self.one_in(64) {
            true => (MANY, Some(Duration::from_millis(2))),
            false => (FEW, LONG),
        };
        put(self.region, TAKING + 8 * self.number, &[count.into()]);
        // Over a connection this and what is used up may arrive when we are dead, and have been asked what we had.
        self.region.flush().unwrap();
        match items.consume(count, timeout) {
            Ok(()) => {
                let free = items.add(count).unwrap();
                assert!(free <= ITEMS.into(), "{free} items");
            }
            Err(SyncError::TimedOut) if count == MANY => {}
            Err(error) => panic!("{error}"),
        }
        put(self.region, TAKING + 8 * self.number, &[0]);
    }

    /// Never more with a permit than there are permits.
    fn permit(&self, semaphore: &Semaphore) {
        let permit = semaphore.acquire(1, LONG).or_else(SyncError::recover).unwrap();
        let claim = CLAIMS + 8 * self.number;
        put(self.region, claim, &[self.incarnation]);
        let both: [u64; 2 * WORKERS] = words(self.region, CLAIMS);
        let inside = (0..WORKERS).filter(|&w| both[w] != 0 && both[w] == both[WORKERS + w]).count();
        assert!(inside <= PERMITS, "{inside} have one of {PERMITS} permits: {both:?}");
        put(self.region, claim, &[0]);
        drop(permit);
    }

    /// Waits in the monitor until a third comes. Who waited first is inside first: places are taken inside, in the same step in which
    /// the wait begins, so there is no doubt about the order.
    fn turn(&mut self, monitor: &Monitor) {
        let guard = monitor.enter(LONG).or_else(SyncError::recover).unwrap();
        let [woken, taken] = words(self.region, WOKEN);
        let place = |place: u64| PLACES + place % PLACES_MAX * 8;
        let waits = |at: u64| {
            let [who] = words(self.region, place(at));
            let [alive] = words(self.region, ALIVE + who % WORKERS as u64 * 8);
            who != 0 && alive == who
        };
        // Whose time was over, and who has died, are not waited for.
        let first = (woken..taken).find(|&at| waits(at)).unwrap_or(taken);
        put(self.region, WOKEN, &[first]);
        if (first..taken).filter(|&at| waits(at)).count() >= 2 {
            match self.random.next().is_multiple_of(2) {
                true => assert!(guard.broadcast(0).unwrap() <= WORKERS as u64),
                false => assert!(guard.signal(0).unwrap() <= 1),
            }
            return;
        }
        assert!(taken - first < PLACES_MAX, "places of the dead are taken for ever");
        put(self.region, place(taken), &[self.incarnation]);
        put(self.region, WOKEN + 8, &[taken + 1]);
        let limit = Duration::from_micros(self.random.next() % 20_000);
        let (_guard, signalled) = match guard.wait(0, Some(limit)) {
            Ok((guard, signalled)) => (guard, signalled),
            // Signalled or not: nobody says.
            Err(SyncError::Abandoned(guard)) => (guard, false),
            Err(error) => panic!("not inside again: {error}"),
        };
        if signalled {
            let [woken] = words(self.region, WOKEN);
            let before: Vec<u64> = (woken..taken).filter(|&at| waits(at)).collect();
            assert!(
                before.is_empty() && woken <= taken,
                "place {taken} before {before:?} ({woken} are woken)"
            );
            let [wakes] = words(self.region, WAKES);
            put(self.region, WAKES, &[wakes + 1]);
            put(self.region, WOKEN, &[taken + 1]);
        }
        put(self.region, place(taken), &[0]);
    }
}

/// What a worker process does; started by [`torture`].
#[test]
#[ignore = "started by other tests"]
fn worker() {
    let Ok(job) = std::env::var("NETVM_TEST_WORKER") else { return };
    let job: Vec<&str> = job.split(' ').collect();
    let node = Node::new().unwrap();
    let peer = node.connect(job[0]).unwrap();
    let region = peer.import("memory", &key(job[3])).unwrap();
    let semaphore = Semaphore::open(&peer, "semaphore", &key(job[4])).unwrap();
    let monitor = Monitor::open(&peer, "monitor", &key(job[5])).unwrap();
    let items = Semaphore::open(&peer, "items", &key(job[6])).unwrap();
    let open = |lock: u64| Lock::open(&peer, &format!("lock {lock}"), &key(job[7 + lock as usize])).unwrap();
    let locks: Vec<Lock> = (0..LOCKS).map(open).collect();
    let [target] = words(&region, TARGET);
    let (number, incarnation) = (job[1].parse::<u64>().unwrap(), job[2].parse::<u64>().unwrap());
    let [mut done] = words(&region, DONE + 8 * number);
    let mut worker = Worker { number, incarnation, region: &region, random: Random::new(incarnation) };
    let mut left: Vec<u64> = (0..LOCKS).collect();
    while !left.is_empty() {
        // One that many want, and others.
        let at = if worker.one_in(16) { 0 } else { (worker.random.next() % left.len() as u64) as usize };
        if !worker.section(&locks[left[at] as usize], left[at] * RECORD, target) {
            left.swap_remove(at);
        }
        done += 1;
        if done.is_multiple_of(4) {
            worker.items(&items);
        }
        if done.is_multiple_of(32) {
            put(&region, DONE + 8 * number, &[done]);
            worker.permit(&semaphore);
        }
        if done.is_multiple_of(256) {
            worker.turn(&monitor);
        }
    }
}

/// The memory of the home, as the parent sees it.
struct Words(Arc<Mapping>);

impl Words {
    fn get(&self, offset: u64) -> u64 {
        self.0.shared().with_u64(offset as usize, |word| word.load(Ordering::SeqCst)).unwrap()
    }

    fn change(&self, offset: u64, change: impl FnOnce(&AtomicU64)) {
        self.0.shared().with_u64(offset as usize, change).unwrap();
    }

    fn set(&self, offset: u64, value: u64) {
        self.change(offset, |word| word.store(value, Ordering::SeqCst));
    }

    fn sum(&self, offset: u64) -> u64 {
        (0..LOCKS).map(|lock| self.get(lock * RECORD + offset)).sum()
    }
}

/// Workers do `sections`, and die: inside where they have said so, and in the second half also whenever the parent likes.
fn torture(sections: u64, kill_every: Duration) {
    let home = Node::new().unwrap();
    let tcp = home.listen("127.0.0.1:0").unwrap();
    let folder = std::env::temp_dir().join(format!("netvm-torture-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let unix = home.listen(&format!("unix:{}", folder.join("home").display())).unwrap();
    let memory = Words(Node::memory(4096).unwrap());
    let target = sections.div_ceil(LOCKS);
    memory.set(TARGET, target);
    let mut keys = vec![
        home.export("memory", Arc::clone(&memory.0), Rights::ReadWrite).unwrap(),
        home.export_sync("semaphore", Kind::Semaphore { permits: PERMITS as u32 }).unwrap(),
        home.export_sync("monitor", Kind::Monitor { conditions: 1 }).unwrap(),
        home.export_sync("items", Kind::Semaphore { permits: ITEMS }).unwrap(),
    ];
    for lock in 0..LOCKS {
        memory.set(lock * RECORD + CHECKSUM, checksum(0));
        keys.push(home.export_sync(&format!("lock {lock}"), Kind::LOCK).unwrap());
    }
    // Each time another number, from which the worker follows.
    let mut round = 0;
    let mut start = |worker: usize| {
        round += 1;
        let incarnation = round * WORKERS as u64 + worker as u64;
        memory.set(CLAIMS + 8 * worker as u64, 0);
        memory.set(ALIVE + 8 * worker as u64, incarnation);
        let address = if worker == 0 { &tcp } else { &unix };
        let keys: Vec<String> = keys.iter().map(|key: &RemoteKey| hex(*key)).collect();
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "worker", "--ignored", "--nocapture"])
            .env("NETVM_TEST_WORKER", format!("{address} {worker} {incarnation} {}", keys.join(" ")))
            // Some have the memory mapped, the others' reads and writes go over their sockets.
            .env("NETVM_LINK", if round % 8 == 0 { "socket" } else { "auto" })
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap()
    };
    let begin = Instant::now();
    let mut workers: Vec<Child> = (0..WORKERS).map(&mut start).collect();
    let mut random = Random::new(7);
    let (mut deaths, mut kills, mut lost_max) = (0, 0, 0);
    let (mut last_kill, mut last, mut last_counter) = (begin, begin, 0);
    loop {
        let counter = memory.sum(COUNTER);
        if counter >= LOCKS * target {
            break;
        }
        if counter > last_counter {
            (last, last_counter) = (Instant::now(), counter);
        }
        assert!(last.elapsed() < Duration::from_secs(60), "stuck after {counter} sections, {deaths} deaths");
        std::thread::sleep(Duration::from_micros(500));
        let mut victim = (0..WORKERS).find(|&worker| {
            let [alive, dying] = [ALIVE, DYING].map(|word| memory.get(word + 8 * worker as u64));
            alive == dying
        });
        if victim.is_none() && counter > sections / 2 && last_kill.elapsed() > kill_every {
            last_kill = Instant::now();
            victim = Some((random.next() % WORKERS as u64) as usize);
            kills += 1;
            // Before: it may be inside anywhere, also where it has just said that it dies.
            for lock in 0..LOCKS {
                memory.change(lock * RECORD + KILLS, |word| _ = word.fetch_add(1, Ordering::SeqCst));
            }
        }
        for worker in &mut workers {
            let ended = worker.try_wait().unwrap();
            assert!(ended.is_none_or(|status| status.success()), "a worker failed");
        }
        if let Some(victim) = victim {
            memory.set(ALIVE + 8 * victim as u64, 0);
            workers[victim].kill().unwrap();
            workers[victim].wait().unwrap();
            lost_max += memory.get(TAKING + 8 * victim as u64);
            memory.set(TAKING + 8 * victim as u64, 0);
            deaths += 1;
            workers[victim] = start(victim);
        }
    }
    for mut worker in workers {
        assert!(worker.wait().unwrap().success(), "a worker failed");
    }
    let elapsed = begin.elapsed();
    let [counter, told, repaired] = [COUNTER, ABANDONED, REPAIRED].map(|word| memory.sum(word));
    println!(
        "{counter} sections, {deaths} deaths of which {kills} anywhere, {told} told, {repaired} of them half done, \
         {} woken, {:.1} µs per section",
        memory.get(WAKES),
        elapsed.as_micros() as f64 / counter as f64
    );
    assert_eq!(counter, LOCKS * target);
    assert!(memory.get(WAKES) > 0, "nobody was woken in the monitor");
    assert!(deaths > kills && kills > 0 && told > 0, "{deaths} deaths, {kills} kills, {told} told");
    let peer = home.connect_local(&home).unwrap();
    for lock in 0..LOCKS {
        assert_eq!(memory.get(lock * RECORD + CHECKSUM), checksum(target));
        let lock = Lock::open(&peer, &format!("lock {lock}"), &keys[4 + lock as usize]).unwrap();
        drop(lock.lock(LONG).or_else(SyncError::recover).unwrap());
    }
    let semaphore = Semaphore::open(&peer, "semaphore", &keys[1]).unwrap();
    let _all = semaphore.acquire(PERMITS as u32, LONG).or_else(SyncError::recover).unwrap();
    assert!(matches!(semaphore.try_acquire(1), Err(SyncError::Busy)), "permits came out of nowhere");
    let items = Semaphore::open(&peer, "items", &keys[3]).unwrap();
    let left = items.add(1).unwrap() - 1;
    println!("{left} of {ITEMS} items left, {lost_max} with those who died at most");
    assert!(left <= ITEMS.into() && left + lost_max >= ITEMS.into(), "items were lost or made");
    let _ = std::fs::remove_dir_all(folder);
}

/// `NETVM_TEST_SECTIONS` sets how many critical sections there are.
#[test]
fn killed_processes_break_nothing() {
    let sections = std::env::var("NETVM_TEST_SECTIONS").ok().and_then(|sections| sections.parse().ok());
    torture(sections.unwrap_or(1_000_000), Duration::from_millis(100));
}
