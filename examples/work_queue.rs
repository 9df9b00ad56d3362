//! A work queue in one process's memory: a semaphore counts the jobs, an atomic hands them out, another one adds up the results.
//!
//! ```text
//! work_queue listen 0.0.0.0:7070 WORKERS        has jobs for so many, and prints the command for them
//! work_queue connect HOST:7070 KEY              works until there are no jobs any more
//! ```

use std::sync::atomic::Ordering;
use std::time::Duration;

use netvm::Error;
use netvm::node::{Node, RemoteKey, Rights};
use netvm::notify::Notify;
use netvm::security::{Secret, Security};
use netvm::sync::{Kind, Semaphore, SyncError};

type Result<T = (), E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const JOBS: u64 = 2000;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Words of the memory: which job is next, the sum of results; the semaphore's key; the jobs.
const NEXT: u64 = 0;
const SUM: u64 = 8;
const SEMAPHORE_KEY: u64 = 16;
const QUEUE: u64 = 64;
/// The numbers that tell of results and of workers that have gone.
const RESULT: u16 = 0;
const LEFT: u16 = 1;

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["listen", address, workers] => listen(address, workers.parse()?),
        ["connect", address, key] => connect(address, RemoteKey::from_text(key).ok_or("not a key")?),
        _ => Err("usage: work_queue listen ADDRESS WORKERS | connect ADDRESS KEY".into()),
    }
}

fn listen(address: &str, workers: u64) -> Result {
    let node = start()?;
    let memory = Node::memory((QUEUE + 8 * JOBS) as usize)?;
    let words = memory.shared();
    let ready = node.export_sync("ready", Kind::Semaphore { permits: 0 })?;
    words.write_from(SEMAPHORE_KEY as usize, &ready.to_bytes()).ok_or("too small")?;
    let (key, results) = node.export_notified("queue", memory, Rights::ReadWrite, 2)?;
    println!("work_queue connect {} {}", node.listen(address)?, key.to_text());

    // The home of the semaphore uses it like everybody else.
    let ready = Semaphore::open(&node.connect_local(&node)?, "ready", &ready)?;
    for job in 0..JOBS {
        words.write_from((QUEUE + 8 * job) as usize, &(job + 1).to_le_bytes()).ok_or("too small")?;
        ready.add(1)?;
    }
    if !results.wait_count(RESULT, JOBS, Some(TIMEOUT)) {
        return Err("not all jobs have been done".into());
    }
    let sum = words.with_u64(SUM as usize, |sum| sum.load(Ordering::Acquire)).ok_or("too small")?;
    println!("sum of squares: {sum}");
    assert_eq!(sum, (1..=JOBS).map(|job| job * job).sum::<u64>());
    // Every worker that waits now gets a permit for no job, and passes it on. We go when all have gone.
    ready.add(1)?;
    if !results.wait_count(LEFT, workers, Some(TIMEOUT)) {
        return Err("not all workers have come and gone".into());
    }
    Ok(())
}

fn connect(address: &str, key: RemoteKey) -> Result {
    let node = start()?;
    let peer = node.connect(address)?;
    let queue = peer.import("queue", &key)?;
    let mut ready = [0; 16];
    queue.read(SEMAPHORE_KEY, &mut ready)?;
    let ready = Semaphore::open(&peer, "ready", &RemoteKey::from_bytes(ready))?;
    let mut done = 0;
    loop {
        match ready.consume(1, Some(TIMEOUT)) {
            Ok(()) => {}
            // The queue has gone: the work is done.
            Err(SyncError::Failed(Error::LenderLost { .. })) => break,
            Err(error) => return Err(error.into()),
        }
        let place = queue.fetch_add(NEXT, 1u64)?;
        if place >= JOBS {
            ready.add(1)?;
            break;
        }
        let job = queue.atomic_load::<u64>(QUEUE + 8 * place)?;
        queue.fetch_add(SUM, job * job)?;
        queue.notify(Notify::Count { number: RESULT })?;
        done += 1;
    }
    println!("did {done} jobs");
    queue.notify(Notify::Count { number: LEFT })?;
    // We are heard before we go: confirmed by an answer. The queue may go as soon as all have gone.
    match queue.flush() {
        Ok(()) | Err(Error::LenderLost { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Machines on a network share a secret: `netvm secret new FILE`, and `NETVM_SECRET_FILE=FILE` for all.
fn start() -> Result<Node> {
    let file = std::env::var_os("NETVM_SECRET_FILE");
    let secret = file.map(|file| Secret::from_file(file.as_ref())).transpose()?;
    Ok(Node::with_security(Security { secret, ..Security::default() })?)
}
