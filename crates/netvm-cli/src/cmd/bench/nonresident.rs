//! `netvm bench nonresident`: what it costs to ask whether memory is there, and what one page that is not costs everybody else.

use std::error::Error;
use std::time::{Duration, Instant};

use clap::Args;
use netvm::memory::{Memory, switch_checks_off};
use netvm::node::{ConnectOptions, LinkChoice, Node, Rights};
use netvm::region::Region;
use netvm_sys::residency::page_out;
use netvm_sys::slow::SlowPages;

use super::report::{Row, median_and_spread};

/// One page takes so long to come in.
const DELAY: Duration = Duration::from_millis(100);
/// Writes that go beside it: less than a window.
const WRITES: u64 = 3000;
const PAGE: u64 = 4096;

#[derive(Args, Debug)]
#[command(after_help = "Over TCP, both nodes in this process.

checked-*: an operation with the check whether its memory is there, at random places of 64 MiB; the floor is the same
without the check, in turns. beside-slow and beside-swapped: 4 KiB puts to other pages of the same memory over the
same connection, in GB/s, while one page that was written first takes 100 ms to come in (or was swapped out); the floor
is the same with all pages there.")]
pub struct NonresidentArgs {
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// Rounds, in each of which a case and its floor have a turn
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// A short run, for tests
    #[arg(long)]
    quick: bool,
}

type Failure = Box<dyn Error>;

struct Pair {
    server: Node,
    _client: Node,
    peer: netvm::region::Peer,
    names: u32,
}

impl Pair {
    fn new() -> Result<Self, Failure> {
        let (server, client) = (Node::new()?, Node::new()?);
        let address = server.listen("127.0.0.1:0")?;
        let options = ConnectOptions { link: LinkChoice::Socket, ..ConnectOptions::default() };
        let peer = client.connect_with(&address, &options)?;
        Ok(Self { server, _client: client, peer, names: 0 })
    }

    fn open(&mut self, memory: &Memory) -> Result<Region, Failure> {
        self.names += 1;
        let name = format!("memory {}", self.names);
        let key = self.server.export(&name, memory, Rights::ReadWrite)?;
        Ok(self.peer.import(&name, &key)?)
    }
}

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 20
}

/// Seconds for so many writes of `size` bytes at random places, until the last has arrived.
fn writes(region: &Region, from: u64, count: u64, size: usize, seed: &mut u64) -> Result<f64, Failure> {
    let (bytes, places) = (vec![7; size], (region.len() - from - size as u64) / 8);
    let start = Instant::now();
    let mut last = from;
    for _ in 0..count {
        last = from + random(seed) % places * 8;
        region.write(last, &bytes)?;
    }
    // It sees all of them; a flush would also wait for the page that is away.
    let mut byte = [0];
    region.read(last, &mut byte)?;
    if byte != [7] {
        return Err("a write was lost".into());
    }
    Ok(start.elapsed().as_secs_f64())
}

fn row(case: &str, unit: &'static str, size: u64, cases: &[f64], floors: &[f64], note: &str) -> Row {
    let mut row = Row::new("nonresident", case, unit);
    row.link = Some("tcp".into());
    row.size_bytes = Some(size);
    row.n = cases.len() as u64;
    row.note = note.to_owned();
    if let (Some((middle, spread)), Some((floor, _))) = (median_and_spread(cases), median_and_spread(floors))
    {
        (row.median, row.spread, row.floor) = (Some(middle), Some(spread), Some(floor));
        row.ratio = Some(if unit == "us" { middle / floor } else { floor / middle });
    }
    row
}

/// What the check costs.
fn checked(pair: &mut Pair, rounds: usize, rows: &mut Vec<Row>) -> Result<(), Failure> {
    let memory = Memory::new(64 << 20)?;
    memory.shared().fill(1);
    let region = pair.open(&memory)?;
    let mut seed = 1;
    for (case, size, count) in [
        ("checked-get", 8, 300),
        ("checked-put", 8, 20_000),
        ("checked-put", 4096, 3000),
        ("checked-put", 65536, 300),
    ] {
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            for (off, times) in times.iter_mut().enumerate() {
                switch_checks_off(off == 1);
                let seconds = if case == "checked-get" {
                    let start = Instant::now();
                    for _ in 0..count {
                        region.read(random(&mut seed) % (region.len() - 8), &mut [0; 8])?;
                    }
                    start.elapsed().as_secs_f64()
                } else {
                    writes(&region, 0, count, size, &mut seed)?
                };
                times.push(seconds / count as f64 * 1e6);
            }
        }
        switch_checks_off(false);
        rows.push(row(case, "us", size as u64, &times[0], &times[1], "floor: the check switched off"));
    }
    Ok(())
}

/// What others get while one page is away.
fn beside(
    pair: &mut Pair,
    memory: &Memory,
    rounds: usize,
    case: &str,
    mut leave: impl FnMut(u64) -> bool,
) -> Result<Row, Failure> {
    let region = pair.open(memory)?;
    let (mut seed, first) = (9, rounds as u64 * PAGE);
    let (mut during, mut before, mut late) = (Vec::new(), Vec::new(), Vec::new());
    let rate = |seconds: f64| (WRITES * PAGE) as f64 / seconds / 1e9;
    writes(&region, first, WRITES, PAGE as usize, &mut seed)?;
    for round in 0..rounds as u64 {
        region.flush()?;
        before.push(rate(writes(&region, first, WRITES, PAGE as usize, &mut seed)?));
        region.flush()?;
        if !leave(round) {
            return Ok(row(case, "GB/s", PAGE, &[], &[], "skipped (the page did not leave)"));
        }
        let start = Instant::now();
        region.write(round * PAGE, b"late")?;
        during.push(rate(writes(&region, first, WRITES, PAGE as usize, &mut seed)?));
        region.flush()?;
        late.push(start.elapsed().as_secs_f64() * 1e3);
        let mut bytes = [0; 4];
        region.read(round * PAGE, &mut bytes)?;
        if &bytes != b"late" {
            return Err("the late write was lost".into());
        }
    }
    let late = median_and_spread(&late).map_or(0.0, |(middle, _)| middle);
    let note = format!("floor: all there; the late write took {late:.1} ms");
    Ok(row(case, "GB/s", PAGE, &during, &before, &note))
}

/// Runs the bench and prints its rows.
///
/// # Errors
/// When sockets or memory cannot be had, or something was lost.
pub fn run(args: &NonresidentArgs) -> Result<(), Failure> {
    let rounds = if args.quick { 2 } else { args.rounds.max(1) };
    let mut rows = Vec::new();
    let mut pair = Pair::new()?;
    checked(&mut pair, rounds, &mut rows)?;
    match SlowPages::new(2048 + rounds, rounds, DELAY) {
        Ok(slow) => {
            let memory = Memory::from(slow.range());
            rows.push(beside(&mut pair, &memory, rounds, "beside-slow", |_| true)?);
        }
        Err(error) => {
            let note = format!("skipped (userfaultfd: {error})");
            rows.push(row("beside-slow", "GB/s", PAGE, &[], &[], &note));
        }
    }
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    if swaps.lines().count() > 1 {
        let memory = Memory::new((2048 + rounds) * PAGE as usize)?;
        memory.shared().fill(1);
        let leave = |round: u64| {
            let page = memory.shared().sub((round * PAGE) as usize, PAGE as usize);
            let left = page.is_some_and(|page| {
                let mut pages = [0; 2];
                let asked = page_out(page).and_then(|()| netvm_sys::residency::resident(page, &mut pages));
                asked.is_ok() && pages[0] & 1 == 0
            });
            // Longer than it is believed to be there.
            std::thread::sleep(Duration::from_millis(30));
            left
        };
        rows.push(beside(&mut pair, &memory, rounds, "beside-swapped", leave)?);
    } else {
        rows.push(row("beside-swapped", "GB/s", PAGE, &[], &[], "skipped (no swap is on)"));
    }
    super::print(&rows, args.json)
}
