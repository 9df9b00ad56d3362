//! Counts in another process's memory: with one atomic, and under a lock for what no atomic can do.
//!
//! Every thread here has a node of its own and could as well be a process on another machine.

use netvm::node::{Node, Rights};
use netvm::sync::{Kind, Lock};

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let home = Node::new()?;
    let address = home.listen("127.0.0.1:0")?;
    let counters = home.export("counters", Node::memory(4096)?, Rights::ReadWrite)?;
    let lock = home.export_sync("lock", Kind::LOCK)?;

    std::thread::scope(|scope| {
        let count = || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            let node = Node::new()?;
            let peer = node.connect(&address)?;
            let counters = peer.import("counters", &counters)?;
            let lock = Lock::open(&peer, "lock", &lock)?;
            for _ in 0..1000 {
                counters.fetch_add(0, 1u64)?;

                let guard = lock.lock(None)?;
                let mut average = [0; 8];
                counters.read(8, &mut average)?;
                let next = f64::from_le_bytes(average) * 0.5 + 1.0;
                counters.write(8, &next.to_le_bytes())?;
                // The next one reads what we wrote: it went the same way before the lock's end.
                drop(guard);
            }
            Ok(())
        };
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(count)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread has panicked")?)
    })?;

    let node = Node::new()?;
    let counters = node.connect(&address)?.import("counters", &counters)?;
    let mut average = [0; 8];
    counters.read(8, &mut average)?;
    println!("counted to {}, series at {}", counters.atomic_load::<u64>(0)?, f64::from_le_bytes(average));
    Ok(())
}
