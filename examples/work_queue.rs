//! A work queue in one node's memory: a semaphore counts the jobs, an atomic hands them out.
//!
//! Every thread here has a node of its own and could as well be a process on another machine.

use netvm::node::{Node, Rights};
use netvm::sync::{Kind, Semaphore, SyncError};

const JOBS: u64 = 500;
const STOP: u64 = u64::MAX;
const WORKERS: u64 = 3;
/// Where the next job is taken from, and where the jobs are.
const NEXT: u64 = 0;
const QUEUE: u64 = 64;

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let home = Node::new()?;
    let address = home.listen("127.0.0.1:0")?;
    let memory = home.export("queue", Node::memory(1 << 16)?, Rights::ReadWrite)?;
    let ready = home.export_sync("ready", Kind::Semaphore { permits: 0 })?;

    let work = || -> Result<u64, Box<dyn std::error::Error + Send + Sync>> {
        let node = Node::new()?;
        let peer = node.connect(&address)?;
        let queue = peer.import("queue", &memory)?;
        let ready = Semaphore::open(&peer, "ready", &ready)?;
        let mut sum = 0;
        loop {
            ready.consume(1, None).or_else(SyncError::recover)?;
            let place = queue.fetch_add(NEXT, 1u64)?;
            match queue.atomic_load::<u64>(QUEUE + 8 * place)? {
                STOP => return Ok(sum),
                job => sum += job * job,
            }
        }
    };
    let total = std::thread::scope(|scope| -> Result<u64, Box<dyn std::error::Error + Send + Sync>> {
        let workers: Vec<_> = (0..WORKERS).map(|_| scope.spawn(work)).collect();
        let node = Node::new()?;
        let peer = node.connect(&address)?;
        let queue = peer.import("queue", &memory)?;
        let ready = Semaphore::open(&peer, "ready", &ready)?;
        for (place, job) in (0..JOBS).chain([STOP; WORKERS as usize]).enumerate() {
            queue.write(QUEUE + 8 * place as u64, &job.to_le_bytes())?;
            // Behind the write on the same session: who takes the permit finds the job.
            ready.add(1)?;
        }
        workers
            .into_iter()
            .try_fold(0, |sum, worker| Ok(sum + worker.join().map_err(|_| "a worker has panicked")??))
    })?;
    println!("sum of squares: {total}");
    assert_eq!(total, (0..JOBS).map(|job| job * job).sum::<u64>());
    Ok(())
}
