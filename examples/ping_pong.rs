//! Two processes put a message into each other's memory in turn, and measure how long that takes.
//!
//! ```text
//! ping_pong listen 0.0.0.0:7070          prints the command for the other process
//! ping_pong connect HOST:7070 KEY
//! ```

use std::time::{Duration, Instant};

use netvm::node::{Node, RemoteKey, Rights};
use netvm::notify::{Notifications, Notify};
use netvm::region::Region;
use netvm::security::{Secret, Security};

type Result<T = (), E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const ROUNDS: u64 = 1000;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Where the ball is in each one's memory, the key of the other's, and the notification numbers.
const BALL: u64 = 0;
const KEY: u64 = 64;
const HIT: u16 = 0;
const HELLO: u16 = 1;

fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["listen", address] => listen(address),
        ["connect", address, key] => connect(address, RemoteKey::from_text(key).ok_or("not a key")?),
        _ => Err("usage: ping_pong listen ADDRESS | connect ADDRESS KEY".into()),
    }
}

fn listen(address: &str) -> Result {
    let node = start()?;
    let memory = Node::memory(4096)?;
    let (key, board) = node.export_notified("court", memory.clone(), Rights::ReadWrite, 2)?;
    println!("ping_pong connect {} {}", node.listen(address)?, key.to_text());
    let peer = node.accept(TIMEOUT).ok_or("nobody has come")?;
    // The notification comes after what was written before it.
    if !board.wait(HELLO, Some(TIMEOUT)) {
        return Err("nobody has said hello".into());
    }
    let mut theirs = [0; 16];
    memory.shared().read_into(KEY as usize, &mut theirs).ok_or("no key")?;
    let other = peer.import("court", &RemoteKey::from_bytes(theirs))?;
    for _ in 0..ROUNDS {
        let mut ball = [0; 8];
        receive(&board)?;
        memory.shared().read_into(BALL as usize, &mut ball).ok_or("no ball")?;
        hit(&other, u64::from_le_bytes(ball) + 1)?;
    }
    // The other one has everything, or is gone because it has.
    let _ = other.flush();
    Ok(())
}

fn connect(address: &str, key: RemoteKey) -> Result {
    let node = start()?;
    let memory = Node::memory(4096)?;
    let (own, board) = node.export_notified("court", memory.clone(), Rights::ReadWrite, 2)?;
    let other = node.connect(address)?.import("court", &key)?;
    other.write_notify(KEY, &own.to_bytes(), Notify::Count { number: HELLO })?;
    let begin = Instant::now();
    for round in 0..ROUNDS {
        hit(&other, 2 * round)?;
        receive(&board)?;
        let mut ball = [0; 8];
        memory.shared().read_into(BALL as usize, &mut ball).ok_or("no ball")?;
        assert_eq!(u64::from_le_bytes(ball), 2 * round + 1, "somebody else's ball");
    }
    println!("{ROUNDS} round trips, {:.1} us each", begin.elapsed().as_secs_f64() * 1e6 / ROUNDS as f64);
    Ok(())
}

fn hit(other: &Region, ball: u64) -> Result {
    Ok(other.write_notify(BALL, &ball.to_le_bytes(), Notify::Count { number: HIT })?)
}

fn receive(board: &Notifications) -> Result {
    if board.wait(HIT, Some(TIMEOUT)) && board.acknowledge(HIT) { Ok(()) } else { Err("no ball came".into()) }
}

/// Machines on a network share a secret: `netvm secret new FILE`, and `NETVM_SECRET_FILE=FILE` for all.
fn start() -> Result<Node> {
    let file = std::env::var_os("NETVM_SECRET_FILE");
    let secret = file.map(|file| Secret::from_file(file.as_ref())).transpose()?;
    Ok(Node::with_security(Security { secret, ..Security::default() })?)
}
