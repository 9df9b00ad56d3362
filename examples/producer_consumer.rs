//! A bounded buffer in the consumer's memory. The producer puts items there, one-sidedly, and each one notifies; the consumer notifies
//! back for each free place.
//!
//! ```text
//! producer_consumer listen 0.0.0.0:7070          consumes, and prints the command for the producer
//! producer_consumer connect HOST:7070 KEY        produces
//! ```

use std::time::Duration;

use netvm::Error;
use netvm::node::{Node, RemoteKey, Rights};
use netvm::notify::Notify;
use netvm::security::{Secret, Security};

type Result<T = (), E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const ITEMS: u64 = 5000;
const TIMEOUT: Duration = Duration::from_secs(60);
/// The buffer: places of so many bytes, and behind them the producer's key.
const PLACES: u64 = 16;
const PLACE_BYTES: u64 = 64;
const KEY: u64 = PLACES * PLACE_BYTES;
/// Notification numbers: an item (at the consumer) or a free place (at the producer), and the key.
const NEXT: u16 = 0;
const HELLO: u16 = 1;

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["listen", address] => listen(address),
        ["connect", address, key] => connect(address, RemoteKey::from_text(key).ok_or("not a key")?),
        _ => Err("usage: producer_consumer listen ADDRESS | connect ADDRESS KEY".into()),
    }
}

fn listen(address: &str) -> Result {
    let node = start()?;
    let memory = Node::memory(4096)?;
    let (key, items) = node.export_notified("buffer", memory.clone(), Rights::ReadWrite, 2)?;
    println!("producer_consumer connect {} {}", node.listen(address)?, key.to_text());
    let peer = node.accept(TIMEOUT).ok_or("nobody has come")?;
    if !items.wait(HELLO, Some(TIMEOUT)) {
        return Err("the producer has not said hello".into());
    }
    let mut theirs = [0; 16];
    memory.shared().read_into(KEY as usize, &mut theirs).ok_or("no key")?;
    let places = peer.import("places", &RemoteKey::from_bytes(theirs))?;
    let mut sum = 0;
    for item in 0..ITEMS {
        if !(items.wait(NEXT, Some(TIMEOUT)) && items.acknowledge(NEXT)) {
            return Err("no item came".into());
        }
        // In order, and whole: its notification comes after it.
        let mut bytes = [0; 8];
        memory.shared().read_into((item % PLACES * PLACE_BYTES) as usize, &mut bytes).ok_or("no item")?;
        sum += u64::from_le_bytes(bytes);
        // The producer ends when it has sent the last ones: it does not wait for their places.
        if item + PLACES < ITEMS {
            places.notify(Notify::Count { number: NEXT })?;
        }
    }
    println!("consumed {ITEMS} items, sum {sum}");
    assert_eq!(sum, (0..ITEMS).map(|item| item * item).sum::<u64>());
    Ok(())
}

fn connect(address: &str, key: RemoteKey) -> Result {
    let node = start()?;
    let (own, places) = node.export_notified("places", Node::memory(4096)?, Rights::ReadWrite, 1)?;
    let buffer = node.connect(address)?.import("buffer", &key)?;
    buffer.write_notify(KEY, &own.to_bytes(), Notify::Count { number: HELLO })?;
    for item in 0..ITEMS {
        if item >= PLACES && !(places.wait(NEXT, Some(TIMEOUT)) && places.acknowledge(NEXT)) {
            return Err("no place has become free".into());
        }
        let place = item % PLACES * PLACE_BYTES;
        buffer.write_notify(place, &(item * item).to_le_bytes(), Notify::Count { number: NEXT })?;
    }
    // What was written last may still be on its way. The consumer may go as soon as it has all.
    match buffer.flush() {
        Ok(()) | Err(Error::LenderLost { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    println!("produced {ITEMS} items");
    Ok(())
}

/// Machines on a network share a secret: `netvm secret new FILE`, and `NETVM_SECRET_FILE=FILE` for all.
fn start() -> Result<Node> {
    let file = std::env::var_os("NETVM_SECRET_FILE");
    let secret = file.map(|file| Secret::from_file(file.as_ref())).transpose()?;
    Ok(Node::with_security(Security { secret, ..Security::default() })?)
}
