//! A cluster of 1000 simulated nodes: seeded delays, rails that overtake each other, sessions that end at any byte and begin anew.
//! After every operation that ends, and of everything at the end: order holds, nothing is lost, nothing is done twice.
//!
//! `NETVM_SEED=n cargo test --release -p netvm-core --test cluster` repeats a run, `NETVM_OPERATIONS` makes it longer.

mod node;
mod session;
mod truth;

use std::env;
use std::time::{SystemTime, UNIX_EPOCH};

use netvm_core::sim::Random;
use node::Node;
use session::{Counts, Session};

const NODES: usize = 1000;
/// Each is an endpoint at either node.
const SESSIONS: usize = 2 * NODES;
/// An endpoint with all that it has grown to in the run, in bytes.
const ENDPOINT_BYTES_MAX: u64 = 256 << 10;

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// Says how to repeat a run that panics.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to repeat: NETVM_SEED={} and the same NETVM_OPERATIONS and profile", self.0);
        }
    }
}

/// Bytes of memory that this process has resident, if the system tells.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

#[test]
fn a_thousand_nodes_keep_order_and_lose_nothing() {
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_nanos() as u64);
    let seed = Seed(number("NETVM_SEED").unwrap_or_else(|| clock() % 1_000_000));
    let most = if cfg!(debug_assertions) { 300_000 } else { 10_000_000 };
    let operations = number("NETVM_OPERATIONS").unwrap_or(most);
    println!("NETVM_SEED={} NETVM_OPERATIONS={operations}", seed.0);

    let mut random = Random::new(seed.0);
    let before = resident_bytes();
    let mut nodes: Vec<Node> = (0..NODES).map(|_| Node::default()).collect();
    // A ring, so that each node has peers, and as many sessions anywhere.
    let mut sessions: Vec<Session> = (0..SESSIONS)
        .map(|index| {
            let from = index % NODES;
            let step = if index < NODES { 1 } else { 1 + random.below(NODES as u64 - 1) as usize };
            Session::new(random.draw(), [from, (from + step) % NODES])
        })
        .collect();
    let mut counts = Counts::default();
    while counts.posted < operations {
        let session = &mut sessions[random.below(SESSIONS as u64) as usize];
        session.visit(&mut nodes, &mut counts, true);
    }
    for session in &mut sessions {
        session.settle(&mut nodes, &mut counts);
    }
    for (index, node) in nodes.iter().enumerate() {
        node.check(index);
    }
    println!("{counts:?}");
    assert_eq!(counts.posted, counts.done + counts.refused + counts.lost + counts.unknown, "each ends once");
    counts.check_that_all_was_tried();
    if let (Some(before), Some(after)) = (before, resident_bytes()) {
        let each = (after - before) / (2 * SESSIONS as u64);
        println!("{each} bytes for each endpoint, the bookkeeping of this test included");
        assert!(each <= ENDPOINT_BYTES_MAX, "{each} bytes for each endpoint");
    }
}
