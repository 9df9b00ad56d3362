//! Counts in another process's memory: with one atomic, and under a lock for what no atomic can do.
//!
//! ```text
//! distributed_counter listen 0.0.0.0:7070 PROCESSES       waits for so many, and prints the command for them
//! distributed_counter connect HOST:7070 KEY
//! ```

use std::time::Duration;

use netvm::Error;
use netvm::node::{Node, RemoteKey, Rights};
use netvm::notify::Notify;
use netvm::security::{Secret, Security};
use netvm::sync::{Kind, Lock, SyncError};

type Result<T = (), E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const ROUNDS: u64 = 1000;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Words of the memory, the lock's key behind them, and the number that tells that a process has finished.
const COUNTER: u64 = 0;
const LEAST_AND_MOST: u64 = 8;
const LOCK_KEY: u64 = 64;
const FINISHED: u16 = 0;

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["listen", address, processes] => listen(address, processes.parse()?),
        ["connect", address, key] => connect(address, RemoteKey::from_text(key).ok_or("not a key")?),
        _ => Err("usage: distributed_counter listen ADDRESS PROCESSES | connect ADDRESS KEY".into()),
    }
}

fn listen(address: &str, processes: u64) -> Result {
    let node = start()?;
    let memory = Node::memory(4096)?;
    let lock = node.export_sync("lock", Kind::LOCK)?;
    let words = memory.shared();
    words.write_from(LEAST_AND_MOST as usize, &u64::MAX.to_le_bytes()).ok_or("too small")?;
    words.write_from(LOCK_KEY as usize, &lock.to_bytes()).ok_or("too small")?;
    let (key, board) = node.export_notified("counters", memory, Rights::ReadWrite, 1)?;
    println!("distributed_counter connect {} {}", node.listen(address)?, key.to_text());
    if !board.wait_count(FINISHED, processes, Some(TIMEOUT)) {
        return Err("not all have finished".into());
    }
    let mut numbers = [[0; 8]; 3];
    words.read_into(0, numbers.as_flattened_mut()).ok_or("too small")?;
    let [counter, least, most] = numbers.map(u64::from_le_bytes);
    println!("counted to {counter}; numbers drawn from {least} to {most}");
    assert_eq!((counter, least, most), (processes * ROUNDS, 0, processes * ROUNDS - 1));
    Ok(())
}

fn connect(address: &str, key: RemoteKey) -> Result {
    let node = start()?;
    let peer = node.connect(address)?;
    let counters = peer.import("counters", &key)?;
    let mut lock = [0; 16];
    counters.read(LOCK_KEY, &mut lock)?;
    let lock = Lock::open(&peer, "lock", &RemoteKey::from_bytes(lock))?;
    for _ in 0..ROUNDS {
        let drawn = counters.fetch_add(COUNTER, 1u64)?;
        // Who had the lock before us may have died. Each of its writes is whole, so there is nothing to repair.
        let guard = lock.lock(Some(TIMEOUT)).or_else(SyncError::recover)?;
        let mut numbers = [[0; 8]; 2];
        counters.read(LEAST_AND_MOST, numbers.as_flattened_mut())?;
        let [least, most] = numbers.map(u64::from_le_bytes);
        let numbers = [least.min(drawn), most.max(drawn)].map(u64::to_le_bytes);
        counters.write(LEAST_AND_MOST, numbers.as_flattened())?;
        // The next one finds what we wrote: it goes to the same node before the end of our turn.
        drop(guard);
    }
    counters.notify(Notify::Count { number: FINISHED })?;
    // We are heard before we go: confirmed by an answer. The home may go as soon as all have finished.
    match counters.flush() {
        Ok(()) | Err(Error::LenderLost { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    println!("counted {ROUNDS} times");
    Ok(())
}

/// Machines on a network share a secret: `netvm secret new FILE`, and `NETVM_SECRET_FILE=FILE` for all.
fn start() -> Result<Node> {
    let file = std::env::var_os("NETVM_SECRET_FILE");
    let secret = file.map(|file| Secret::from_file(file.as_ref())).transpose()?;
    Ok(Node::with_security(Security { secret, ..Security::default() })?)
}
