//! `netvm bench rma`: one-sided operations between two processes beside bare sockets.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use netvm::node::Node;
use netvm::security::Secret;
use netvm_sys::bench_floor::{allowed_cpus, unpin_thread};
use netvm_sys::cpu::pin;

use super::child::Helper;
use super::report::{self, Row, median_and_spread};
use cases::Pair;
use partner::{How, MEMORY_BYTES, Side};
pub use partner::{PartnerArgs, run as run_partner};
use timing::Sample;

mod cases;
mod idle;
mod meet;
mod partner;
mod peers;
mod plot;
mod raw;
mod shm;
mod timing;

type Failure = Box<dyn Error>;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  netvm bench rma                                  over TCP, all placements, and the peers that are installed
  netvm bench rma --placement two-cpus --link unix
  netvm bench rma --rails 4 --case put-bw          over four connections at once
  netvm bench rma --encrypt --case bw              encrypted TCP
  netvm bench rma --case passive                   while the target's program computes
  netvm bench rma --peers install-hint             how to get UCX, libfabric and Open MPI
  netvm bench rma --json --svg rma.svg             for a program, and a picture

Two processes: one operates on the memory of the other, whose program does nothing except in put, notify-*, channel
and barrier, where it does the same. In *-passive it computes all the time, on the CPU of netvm's thread.

  put, notify-*, channel      one way: half of a ping-pong; floor: half of one with bare sockets
  others in us                from the call to the answer; floor: a round trip of bare sockets with the same bytes
                              (waitq has two: to queue, and to be woken)
  put-bw, get-bw, *-rate      floor: a bare stream in sends of that size (channel-rate: messages of one sender;
                              shared-rate: of four, into one ring)
  with --link shm             floors: a ping-pong of plain stores, copies and an atomic within one process
  memory_per_idle_peer_bytes  growth of a process for each peer that has been served; floor: the limit of 256 KiB

Floors poll, except for notify-block and notify-handler, with both processes on one CPU, and in *-passive, where they
block. The ratio says how many times worse: 1 is the floor. Contents are checked. Floors and cases take turns, and the
spread is over the rounds. Peers run after the rounds, one after the other, on the same CPUs.")]
pub struct RmaArgs {
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// What carries the bytes
    #[arg(long, value_enum, default_value = "tcp")]
    link: Link,
    /// Which CPUs the two processes run on
    #[arg(long, value_enum, default_value = "all")]
    placement: Placements,
    /// Only the cases whose name contains this
    #[arg(long)]
    case: Option<String>,
    /// Rounds, in each of which all floors and cases have a turn
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Milliseconds of one case in one round
    #[arg(long, default_value_t = 150)]
    case_ms: u64,
    /// A short run, for tests
    #[arg(long)]
    quick: bool,
    /// Connections of one session, 1 to 16
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    rails: u8,
    /// Encrypt every byte (TCP)
    #[arg(long)]
    encrypt: bool,
    /// Measure UCX, libfabric and Open MPI too [default: auto, none with --quick, --case or --encrypt]
    #[arg(long, value_enum)]
    peers: Option<Peers>,
    /// Write a plot of bandwidth by size to this file
    #[arg(long)]
    svg: Option<PathBuf>,
}

/// What to do about other libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Peers {
    /// Measure those that are installed
    Auto,
    /// Leave them out
    None,
    /// Tell how to install them, and measure nothing
    InstallHint,
}

/// A kind of socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Link {
    /// TCP over loopback
    Tcp,
    /// A unix socket
    Unix,
    /// Shared memory
    Shm,
}

impl Link {
    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
            Self::Shm => "shm",
        }
    }

    fn floor(self) -> &'static str {
        match self {
            Self::Tcp => "floor-tcp",
            Self::Unix => "floor-unix",
            Self::Shm => "floor-shm",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Placements {
    /// Each process on a CPU of its own
    TwoCpus,
    /// Both on one
    SameCpu,
    /// As the kernel likes
    Unpinned,
    /// All three
    All,
}

#[derive(Clone, Copy, Debug)]
struct Placement {
    name: &'static str,
    here: Option<usize>,
    there: Option<usize>,
}

fn placements(wanted: Placements) -> Vec<Placement> {
    let cpus = allowed_cpus();
    let (first, second) = (cpus.first().copied(), cpus.get(1).copied());
    let is = |one| wanted == one || wanted == Placements::All;
    let mut all = Vec::new();
    if is(Placements::TwoCpus) {
        if second.is_some() {
            all.push(Placement { name: "two-cpus", here: first, there: second });
        } else {
            eprintln!("skipped (two-cpus: there is only one)");
        }
    }
    if is(Placements::SameCpu) {
        all.push(Placement { name: "same-cpu", here: first, there: first });
    }
    if is(Placements::Unpinned) {
        all.push(Placement { name: "unpinned", here: None, there: None });
    }
    all
}

const PING_POLLING: &str = "ping-pong-poll";
const PING_BLOCKING: &str = "ping-pong-block";
/// While the other side's program computes.
const PING_PASSIVE: &str = "ping-pong-passive";
const STREAM: &str = "stream";
const SIZES: [usize; 9] = [8, 64, 512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20];

/// What is measured: a floor or a case of netvm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    name: &'static str,
    size: usize,
    /// Bytes off alignment.
    shift: usize,
    is_floor: bool,
}

impl Case {
    fn unit(&self) -> &'static str {
        match self.name {
            "put-bw" | "get-bw" | "put-bw-misaligned" | "get-bw-misaligned" | STREAM => "GB/s",
            "put-rate" | "channel-rate" | "shared-rate" => "M/s",
            _ => "us",
        }
    }

    /// The name and size of its floor, and how many of its operations are one of the floor's.
    fn floor(&self, link: Link, placement: &str) -> Option<(&'static str, usize, f64)> {
        if link == Link::Shm {
            return shm::floor_of(self);
        }
        // Who polls keeps the other one from running.
        let ping = if placement == "same-cpu" { PING_BLOCKING } else { PING_POLLING };
        Some(match self.name {
            _ if self.is_floor => return None,
            "put" => (ping, self.size, 0.5),
            "notify-spin" => (ping, 8, 0.5),
            "notify-block" | "notify-handler" => (PING_BLOCKING, 8, 0.5),
            "channel" => (ping, self.size, 0.5),
            "lock" | "sem" | "barrier" => (ping, 8, 1.0),
            "waitq" => (ping, 8, 2.0),
            "put-complete-passive" | "get-passive" | "fetch-add-passive" => (PING_PASSIVE, self.size, 1.0),
            "put-complete" | "get" | "fetch-add" | "cas" => (ping, self.size, 1.0),
            _ => (STREAM, self.size, 1.0),
        })
    }
}

fn all_cases(link: Link, quick: bool) -> Vec<Case> {
    let case = |name, size| Case { name, size, shift: 0, is_floor: false };
    let floor = |name, size| Case { is_floor: true, ..case(name, size) };
    let mut all = Vec::new();
    for size in [8, 4 << 10] {
        all.extend([floor(PING_POLLING, size), floor(PING_BLOCKING, size), floor(PING_PASSIVE, size)]);
    }
    if link == Link::Shm {
        all = shm::floors();
    }
    let sizes: &[usize] = if quick { &[8, 64, 4 << 10, 64 << 10, 1 << 20] } else { &SIZES };
    all.extend(sizes.iter().map(|&size| floor(STREAM, size)));
    for name in ["put", "put-complete", "get"] {
        all.extend([case(name, 8), case(name, 4 << 10)]);
    }
    all.extend(
        ["fetch-add", "cas", "notify-spin", "notify-block", "notify-handler"].map(|name| case(name, 8)),
    );
    all.extend([case("channel", 8), case("channel", 4 << 10)]);
    all.extend(["lock", "waitq", "sem", "barrier"].map(|name| case(name, 8)));
    for name in ["put-complete-passive", "get-passive"] {
        all.extend([case(name, 8), case(name, 4 << 10)]);
    }
    all.push(case("fetch-add-passive", 8));
    for name in ["put-rate", "channel-rate", "shared-rate"] {
        all.extend([case(name, 8), case(name, 64)]);
    }
    for name in ["put-bw", "get-bw"] {
        all.extend(sizes.iter().map(|&size| case(name, size)));
    }
    for name in ["put-bw-misaligned", "get-bw-misaligned"] {
        let odd = sizes.iter().filter(|size| (64..=1 << 20).contains(*size));
        all.extend(odd.map(|&size| Case { shift: 1, ..case(name, size) }));
    }
    all.retain(|case| link != Link::Shm || shm::has(case));
    all
}

/// One placement, ready to measure.
struct Setup {
    placement: Placement,
    link: Link,
    raw: String,
    pair: Pair,
}

impl Setup {
    fn new(args: &RmaArgs, placement: Placement) -> Result<Self, Failure> {
        let link = args.link;
        let mut partner = Helper::start(&partner_args(link, args.encrypt, placement.there), false)?;
        let secret = tell_secret(&mut partner, args.encrypt)?;
        if let Some(cpu) = placement.here {
            // The node's thread is started here and stays with it.
            pin(cpu)?;
        }
        let raw = partner.line()?;
        let ticket = partner.line()?;
        let here = Side::new(link, secret, usize::from(args.rails))?;
        let region = here.connect(&ticket)?;
        partner.tell(&here.ticket)?;
        partner.line()?;
        let address = ticket.split(' ').next().unwrap_or_default().to_owned();
        let local = Node::memory(MEMORY_BYTES)?;
        let local = std::sync::Arc::into_inner(local).ok_or("the local memory is shared already")?;
        Ok(Self {
            placement,
            link,
            raw,
            pair: Pair { here, region, partner, local, round: 0, salt: 1, address, meet: None },
        })
    }

    fn measure(&mut self, case: &Case, time: Duration) -> Result<Sample, Failure> {
        let (size, shift, pair) = (case.size, case.shift, &mut self.pair);
        pair.salt = pair.salt.wrapping_add(1).max(2);
        if self.link == Link::Shm
            && let Some(sample) = shm::measure(pair, &self.raw, case, time)
        {
            return sample;
        }
        match case.name {
            PING_POLLING | PING_BLOCKING => {
                raw::round_trip(self.link, &self.raw, size, case.name == PING_POLLING, time)
            }
            PING_PASSIVE => {
                let (link, raw) = (self.link, &self.raw);
                pair.passive(|_| raw::round_trip(link, raw, size, false, time))
            }
            STREAM => raw::stream(self.link, &self.raw, size, time),
            "put" => pair.put(size, time),
            "put-complete" => pair.put_complete(size, time),
            "get" => pair.get(size, time),
            "fetch-add" => pair.fetch_add(time),
            "cas" => pair.compare_swap(time),
            "notify-spin" => pair.notify(How::Spin, time),
            "notify-block" => pair.notify(How::Block, time),
            "notify-handler" => pair.notify_handler(time),
            "put-complete-passive" => pair.passive(|pair| pair.put_complete(size, time)),
            "get-passive" => pair.passive(|pair| pair.get(size, time)),
            "fetch-add-passive" => pair.passive(|pair| pair.fetch_add(time)),
            "lock" | "sem" | "waitq" => pair.turns(case.name, time),
            "channel" | "barrier" => pair.together(case.name, size, time),
            "channel-rate" | "shared-rate" => pair.messages(case.name, size, time),
            "put-rate" => pair.put_bandwidth(size, 0, time).map(Sample::in_millions),
            "put-bw" | "put-bw-misaligned" => pair.put_bandwidth(size, shift, time),
            _ => pair.get_bandwidth(size, shift, time),
        }
    }
}

/// What all rounds of one case in one placement found.
struct Series {
    placement: &'static str,
    case: Case,
    samples: Vec<Sample>,
    note: String,
}

/// Runs the bench and prints its rows.
///
/// # Errors
/// When the other process or the sockets cannot be had.
pub fn run(args: &RmaArgs) -> Result<(), Failure> {
    if args.peers == Some(Peers::InstallHint) {
        println!("{}", peers::INSTALL_HINT);
        return Ok(());
    }
    if args.encrypt && args.link != Link::Tcp {
        return Err("only TCP is encrypted; leave --link or --encrypt out".into());
    }
    let (rounds, time) = if args.quick {
        (2, Duration::from_millis(20))
    } else {
        (args.rounds.max(1), Duration::from_millis(args.case_ms.max(1)))
    };
    let wanted = |case: &Case| args.case.as_deref().is_none_or(|part| case.name.contains(part));
    let all = all_cases(args.link, args.quick);
    let needed = |floor: &Case| {
        let is_floor_of = |case: &&Case| {
            placements(args.placement).iter().any(|placement| {
                case.floor(args.link, placement.name)
                    .is_some_and(|(name, size, _)| (name, size) == (floor.name, floor.size))
            })
        };
        all.iter().filter(|case| wanted(case)).any(|case| is_floor_of(&case))
    };
    let cases: Vec<Case> =
        all.iter().copied().filter(|case| if case.is_floor { needed(case) } else { wanted(case) }).collect();
    if let Some(part) = &args.case
        && cases.is_empty()
        && !idle::CASE.contains(part.as_str())
    {
        let mut names: Vec<&str> = all.iter().filter(|case| !case.is_floor).map(|case| case.name).collect();
        names.dedup();
        return Err(format!("there is no case {part}: {}, {}", names.join(", "), idle::CASE).into());
    }
    let cpus = allowed_cpus();
    let mut rows = Vec::new();
    for placement in placements(args.placement) {
        unpin_thread(&cpus)?;
        let series = Setup::new(args, placement).map(|mut setup| {
            let mut series = start(&cases, placement.name);
            for _ in 0..rounds {
                for one in &mut series {
                    // Whoever polls on the same CPU gets a turn only when the other one's time is up.
                    if one.case.name == PING_POLLING && setup.placement.name == "same-cpu" {
                        continue;
                    }
                    match setup.measure(&one.case, time) {
                        Ok(sample) => one.samples.push(sample),
                        Err(error) => one.note = format!("failed ({error})"),
                    }
                }
            }
            series
        });
        unpin_thread(&cpus)?;
        let series = series?;
        let first = rows.len();
        rows.extend(
            series
                .iter()
                .filter(|one| !one.samples.is_empty() || !one.note.is_empty())
                .map(|one| row(one, &series, args)),
        );
        let alone = args.quick || args.case.is_some() || args.encrypt;
        if args.peers.unwrap_or(if alone { Peers::None } else { Peers::Auto }) == Peers::Auto {
            let ours = rows[first..].to_vec();
            let floor = |case: &str, size: usize| {
                let same = |row: &&report::Row| row.case == case && row.size_bytes == Some(size as u64);
                ours.iter().find(same).and_then(|row| row.floor)
            };
            rows.extend(peers::measure(args.link, &placement, args.quick, floor));
        }
    }
    if args.case.as_deref().is_none_or(|part| idle::CASE.contains(part)) {
        let mut row = idle::measure(args.link, args.encrypt, if args.quick { 20 } else { 200 })?;
        row.link = Some(link_name(args));
        rows.push(row);
    }
    if let Some(path) = &args.svg {
        plot::write(&rows, path)?;
    }
    super::print(&rows, args.json)?;
    match rows.iter().find(|row| row.note.starts_with("failed")) {
        Some(row) => Err(format!("{} {}: {}", row.placement.unwrap_or("-"), row.case, row.note).into()),
        None => Ok(()),
    }
}

fn start(cases: &[Case], placement: &'static str) -> Vec<Series> {
    let one = |&case: &Case| Series { placement, case, samples: Vec::new(), note: String::new() };
    cases.iter().map(one).collect()
}

fn median(series: &Series) -> Option<(f64, (f64, f64))> {
    median_and_spread(&series.samples.iter().map(|sample| sample.median).collect::<Vec<_>>())
}

fn row(series: &Series, all: &[Series], args: &RmaArgs) -> Row {
    let Series { placement, case, samples, note } = series;
    let mut row = Row::new("rma", case.name, case.unit());
    row.link = Some(link_name(args));
    row.placement = Some(placement);
    row.size_bytes = Some(case.size as u64);
    row.peer = case.is_floor.then(|| args.link.floor());
    row.n = samples.iter().map(|sample| sample.n).sum();
    row.note = if note.is_empty() {
        super::super::super::size::Size(case.size as u64).to_string()
    } else {
        note.clone()
    };
    let Some((middle, spread)) = median(series) else { return row };
    row.median = Some(middle);
    row.spread = Some(spread);
    let tails: Vec<f64> = samples.iter().filter_map(|sample| sample.p99).collect();
    row.p99 = median_and_spread(&tails).map(|(middle, _)| middle);
    row.per_s = median_and_spread(&samples.iter().map(|sample| sample.per_s).collect::<Vec<_>>())
        .map(|(middle, _)| middle);
    if let Some((name, size, share)) = case.floor(args.link, placement) {
        let floor =
            all.iter().find(|one| (one.case.name, one.case.size) == (name, size) && one.case.is_floor);
        row.floor = floor.and_then(median).map(|(floor, _)| match case.unit() {
            "M/s" => floor * 1e3 / size as f64,
            _ => floor * share,
        });
        row.ratio = row.floor.map(|floor| if case.unit() == "us" { middle / floor } else { floor / middle });
    }
    row
}

fn link_name(args: &RmaArgs) -> &'static str {
    if args.encrypt { "tcp-encrypted" } else { args.link.name() }
}

/// How the other process is started.
fn partner_args(link: Link, encrypt: bool, cpu: Option<usize>) -> Vec<String> {
    let mut args = ["bench", "rma-partner", "--link", link.name()].map(str::to_owned).to_vec();
    if let Some(cpu) = cpu {
        args.extend(["--cpu".to_owned(), cpu.to_string()]);
    }
    if encrypt {
        args.push("--encrypt".to_owned());
    }
    args
}

/// A secret for both, which nobody else sees.
fn tell_secret(partner: &mut Helper, encrypt: bool) -> Result<Option<Secret>, Failure> {
    if !encrypt {
        return Ok(None);
    }
    let secret = Secret::random()?;
    partner.tell(secret.to_content().trim_end())?;
    Ok(Some(secret))
}
