//! `netvm bench rma`: one-sided operations between two processes beside bare sockets.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use netvm::node::Node;
use netvm::region::Region;
use netvm::security::Secret;
use netvm_sys::bench_floor::{allowed_cpus, unpin_thread};
use netvm_sys::cpu::pin;

use super::child::Helper;
use super::report::{self, Row, median_and_spread};
use crate::size::Size;
use cases::Pair;
use partner::{How, MEMORY_BYTES, Side};
pub use partner::{PartnerArgs, run as run_partner};
use plan::{
    ASK_BLOCKING, ASK_PASSIVE, ASK_POLLING, Case, PING_BLOCKING, PING_PASSIVE, PING_POLLING, Placement,
    Placements, STREAM, Wait, all_cases, is_wanted, placements,
};
use timing::Sample;

mod cases;
mod copies;
mod failing;
mod idle;
mod meet;
mod partner;
mod peers;
mod plan;
mod plot;
mod raw;
mod shm;
mod timing;

type Failure = Box<dyn Error>;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  netvm bench rma                                  over TCP, all placements, and the peers that are installed
  netvm bench rma --placement two-cpus --link unix
  netvm bench rma --wait both --case get           who waits looks all the time, or sleeps
  netvm bench rma --rails 1,2,4 --case bw          over one, two and four connections
  netvm bench rma --encrypt=both --case bw         plain and encrypted TCP
  netvm bench rma --case passive                   while the target's program computes
  netvm bench rma --case lock                      taking and giving back, together and each by itself
  netvm bench rma --case copy                      from one node to another, asked for by a third
  netvm bench rma --case idle                      processor time and memory of nodes that do nothing
  netvm bench rma --case detect                    how soon a dead or stopped peer is found
  netvm bench rma --peers install-hint             how to get UCX, libfabric and Open MPI
  netvm bench rma --json --svg rma.svg             for a program, and a picture

Two processes: one operates on the memory of the other, whose program does nothing except in put, notify-*, channel
and barrier, where it does the same. In *-passive it computes all the time, on the CPU of netvm's thread.

  put, notify-*, channel      one way: half of a ping-pong; floor: half of one with bare sockets
  get, put-complete           from the call to the answer; floor: a message with these bytes one way, 8 bytes the other
  others in us                from the call to the answer; floor: a round trip of bare sockets with 8 bytes
                              (waitq has two: to queue, and to be woken; copy one for us and one between the others)
  *-take, *-give              the two halves of lock and sem, in turns with an atomic; floors: that atomic, one way
  *-block                     nobody looks before sleeping, on either side, and put comes with a notification
  put-bw, get-bw, *-rate      floor: a bare stream in sends of that size (channel-rate: messages of one sender;
                              shared-rate: of four, into one ring)
  with --link shm             floors: a ping-pong of plain stores, copies and an atomic within one process
  memory_per_idle_peer_bytes  growth of a process for each peer that has been served; floor: the limit of 256 KiB
  idle-cpu, detect-*          floor: the limit, 0.1 % of a CPU and 5 s

Floors poll, except for notify-block and notify-handler, with both processes on one CPU, in *-block and in *-passive,
where they block. The ratio says how many times worse: 1 is the floor. Contents are checked. Floors and cases take
turns, and the spread is over the rounds. Peers run after the rounds, one after the other, on the same CPUs.")]
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
    /// How whoever waits does so [default: poll, and the cases that are there in one way only]
    #[arg(long, value_enum)]
    wait: Option<Wait>,
    /// Puts and gets of all sizes one by one too, as --svg does
    #[arg(long)]
    by_size: bool,
    /// Only cases of these sizes, as 8,64K,1M
    #[arg(long, value_delimiter = ',')]
    size: Vec<Size>,
    /// Rounds, in each of which all floors and cases have a turn
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Milliseconds of one case in one round
    #[arg(long, default_value_t = 150, value_parser = clap::value_parser!(u16).range(1..))]
    case_ms: u16,
    /// A short run, for tests
    #[arg(long)]
    quick: bool,
    /// Connections of one session, 1 to 16; several numbers are measured in turns
    #[arg(long, default_value = "1", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..=16))]
    rails: Vec<u8>,
    /// Encrypt every byte (TCP), or measure both ways in turns
    #[arg(long, value_enum, default_value = "no", default_missing_value = "yes", num_args = 0..=1, require_equals = true)]
    encrypt: Encrypt,
    /// Measure UCX, libfabric and Open MPI too [default: auto, none with --quick, --case or --encrypt]
    #[arg(long, value_enum)]
    peers: Option<Peers>,
    /// Write plots of latency and bandwidth by size to this file
    #[arg(long, value_name = "FILE", value_parser = super::picture)]
    svg: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Encrypt {
    No,
    Yes,
    Both,
}

/// One way to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Variant {
    encrypt: bool,
    rails: u8,
}

impl Variant {
    fn all(args: &RmaArgs) -> Vec<Self> {
        let ways: &[bool] = match args.encrypt {
            Encrypt::No => &[false],
            Encrypt::Yes => &[true],
            Encrypt::Both => &[false, true],
        };
        let mut all: Vec<Self> = Vec::new();
        for &encrypt in ways {
            for &rails in &args.rails {
                let one = Self { encrypt, rails };
                if !all.contains(&one) {
                    all.push(one);
                }
            }
        }
        all
    }

    fn name(self, link: Link) -> Cow<'static, str> {
        let name = if self.encrypt { "tcp-encrypted" } else { link.name() };
        if self.rails == 1 { name.into() } else { format!("{name}-x{}", self.rails).into() }
    }
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

/// One placement and way to connect, ready to measure.
struct Setup {
    link: Link,
    raw: String,
    pair: Pair,
}

impl Setup {
    fn new(link: Link, variant: Variant, placement: Placement) -> Result<Self, Failure> {
        let other = Other::start(link, variant.encrypt, placement.there)?;
        if let Some(cpu) = placement.here {
            // The node's thread is started here and stays with it.
            pin(cpu)?;
        }
        let here = Side::new(link, other.secret()?, usize::from(variant.rails))?;
        let region = here.connect(&other.ticket)?;
        let Other { mut partner, raw, ticket, secret } = other;
        partner.tell(&here.ticket)?;
        partner.line()?;
        let address = ticket.split(' ').next().unwrap_or_default().to_owned();
        let local = Node::memory(MEMORY_BYTES)?;
        let local = std::sync::Arc::into_inner(local).ok_or("the local memory is shared already")?;
        let third = copies::Third::new(link, secret, placement.there);
        let (meet, round, salt) = (None, 0, 1);
        Ok(Self { link, raw, pair: Pair { here, region, partner, local, round, salt, address, meet, third } })
    }

    fn measure(&mut self, case: &Case, time: Duration) -> Result<Sample, Failure> {
        let (size, shift, pair) = (case.size, case.shift, &mut self.pair);
        pair.salt = pair.salt.wrapping_add(1).max(2);
        if self.link == Link::Shm
            && let Some(sample) = shm::measure(pair, &self.raw, case, time)
        {
            return sample;
        }
        let bare = |size, back, polling| raw::round_trip(self.link, &self.raw, (size, back), polling, time);
        match case.name {
            PING_POLLING | PING_BLOCKING => bare(size, size, case.name == PING_POLLING),
            ASK_POLLING | ASK_BLOCKING => bare(8, size, case.name == ASK_POLLING),
            PING_PASSIVE => pair.passive(|_| bare(size, size, false)),
            ASK_PASSIVE => pair.passive(|_| bare(8, size, false)),
            STREAM => raw::stream(self.link, &self.raw, size, time),
            "put" => pair.put(size, time),
            "put-complete" => pair.put_complete(size, time),
            "get" => pair.get(size, time),
            "fetch-add" => pair.fetch_add(time),
            "cas" => pair.compare_swap(time),
            "put-block" => pair.sleeping(|pair| pair.put_block(size, time)),
            "put-complete-block" => pair.sleeping(|pair| pair.put_complete(size, time)),
            "get-block" => pair.sleeping(|pair| pair.get(size, time)),
            "fetch-add-block" => pair.sleeping(|pair| pair.fetch_add(time)),
            "cas-block" => pair.sleeping(|pair| pair.compare_swap(time)),
            "notify-spin" => pair.notify(How::Spin, time),
            "notify-block" => pair.notify(How::Block, time),
            "notify-handler" => pair.notify_handler(time),
            "put-complete-passive" => pair.passive(|pair| pair.put_complete(size, time)),
            "get-passive" => pair.passive(|pair| pair.get(size, time)),
            "fetch-add-passive" => pair.passive(|pair| pair.fetch_add(time)),
            "lock" | "sem" | "sem-count" | "waitq" => pair.turns(case.name, time),
            "lock-take" | "lock-give" | "sem-take" | "sem-give" => pair.halves(case.name, time),
            "channel" | "barrier" => pair.together(case.name, size, time),
            "channel-rate" | "shared-rate" => pair.messages(case.name, size, time),
            "copy" | "copy-through" => pair.copy(size, case.name == "copy-through", time),
            "copy-bw" => pair.copy_bandwidth(size, time),
            "put-rate" => pair.put_bandwidth(size, 0, time).map(Sample::in_millions),
            "put-bw" | "put-bw-misaligned" => pair.put_bandwidth(size, shift, time),
            _ => pair.get_bandwidth(size, shift, time),
        }
    }
}

/// What all rounds of one case in one placement found.
struct Series {
    placement: &'static str,
    variant: Variant,
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
        out!("{}", peers::INSTALL_HINT);
        return Ok(());
    }
    if args.encrypt != Encrypt::No && args.link != Link::Tcp {
        return Err("only TCP is encrypted; leave --link or --encrypt out".into());
    }
    let (part, by_size) = (args.case.as_deref(), args.by_size || args.svg.is_some());
    let all = all_cases(args.link, by_size, args.quick);
    let sized = |case: &Case| args.size.is_empty() || args.size.contains(&Size(case.size as u64));
    let wanted = |case: &Case| !case.is_floor && sized(case) && is_wanted(case, part, args.wait);
    let single = |name: &str| match part {
        None => args.wait.is_none() && args.size.is_empty(),
        Some(part) => name.contains(part),
    };
    let singles = [idle::MEMORY, idle::CPU, failing::KILLED, failing::STOPPED];
    if !args.size.is_empty() && !all.iter().any(wanted) {
        let sizes: BTreeSet<usize> = all.iter().map(|case| case.size).collect();
        let sizes: Vec<String> = sizes.into_iter().map(|size| Size(size as u64).to_string()).collect();
        return Err(format!("no such case has one of these sizes; there are {}", sizes.join(", ")).into());
    }
    if let Some(part) = part
        && !all.iter().any(wanted)
        && !singles.into_iter().any(single)
    {
        let mut names: Vec<&str> = all.iter().filter(|case| !case.is_floor).map(|case| case.name).collect();
        names.extend(singles);
        names.dedup();
        return Err(format!("there is no case {part}: {}", names.join(", ")).into());
    }
    let placements = placements(args.placement);
    if placements.len() < if args.placement == Placements::All { 3 } else { 1 } {
        tell!("skipped (two-cpus: there is only one)");
    }
    // Cases too: a half of a lock is measured beside an atomic.
    let is_needed = |one: &Case| {
        wanted(one) || all.iter().any(|case| wanted(case) && case.needs(one, args.link, &placements))
    };
    let cases: Vec<Case> = all.iter().copied().filter(is_needed).collect();
    let mut rows = Vec::new();
    for placement in &placements {
        if cases.is_empty() {
            break;
        }
        let first = rows.len();
        rows.extend(measure_all(args, placement, &cases)?);
        let alone = args.quick || args.case.is_some() || args.encrypt != Encrypt::No;
        if args.peers.unwrap_or(if alone { Peers::None } else { Peers::Auto }) == Peers::Auto {
            let ours = rows[first..].to_vec();
            let floor = |case: &str, size: usize| {
                let same = |row: &&report::Row| row.case == case && row.size_bytes == Some(size as u64);
                ours.iter().find(same).and_then(|row| row.floor)
            };
            rows.extend(peers::measure(args.link, placement, args.quick, floor));
        }
    }
    let encrypt = args.encrypt == Encrypt::Yes;
    let mut singly = Vec::new();
    if single(idle::MEMORY) {
        singly.push(idle::memory(args.link, encrypt, if args.quick { 20 } else { 200 })?);
    }
    if single(idle::CPU) {
        singly.push(idle::cpu(args.link, encrypt, Duration::from_secs(if args.quick { 1 } else { 10 }))?);
    }
    if single(failing::KILLED) {
        singly.push(failing::killed(args.link, encrypt)?);
    }
    // It takes seconds, also in a short run.
    if single(failing::STOPPED) && (part.is_some() || !args.quick) {
        singly.push(failing::stopped(args.link, encrypt)?);
    }
    for mut row in singly {
        row.link = Some(Variant { encrypt, rails: 1 }.name(args.link));
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

/// All rounds of one placement.
fn measure_all(args: &RmaArgs, placement: &Placement, cases: &[Case]) -> Result<Vec<Row>, Failure> {
    let (rounds, time) = if args.quick {
        (2, Duration::from_millis(20))
    } else {
        (args.rounds, Duration::from_millis(args.case_ms.into()))
    };
    let cpus = allowed_cpus();
    let variants = Variant::all(args);
    unpin_thread(&cpus)?;
    let setups: Result<Vec<_>, _> =
        variants.iter().map(|&variant| Setup::new(args.link, variant, *placement)).collect();
    let measured = setups.map(|mut setups| {
        // Floors do not depend on how netvm connects.
        let start = |index: usize, case: Case| {
            let variant = variants[index];
            (
                index,
                Series { placement: placement.name, variant, case, samples: Vec::new(), note: String::new() },
            )
        };
        let of_case = |&case: &Case| {
            let times = if case.is_floor { 1 } else { variants.len() };
            (0..times).map(move |index| start(index, case)).collect::<Vec<_>>()
        };
        let mut series: Vec<(usize, Series)> = cases.iter().flat_map(of_case).collect();
        for _ in 0..rounds {
            for (setup, one) in &mut series {
                // Whoever polls on the same CPU gets a turn only when the other one's time is up.
                if [PING_POLLING, ASK_POLLING].contains(&one.case.name) && placement.name == "same-cpu" {
                    continue;
                }
                match setups[*setup].measure(&one.case, time) {
                    Ok(sample) => one.samples.push(sample),
                    Err(error) => one.note = format!("failed ({error})"),
                }
            }
        }
        series.into_iter().map(|(_, one)| one).collect::<Vec<_>>()
    });
    unpin_thread(&cpus)?;
    let series = measured?;
    let with_news = series.iter().filter(|one| !one.samples.is_empty() || !one.note.is_empty());
    Ok(with_news.map(|one| row(one, &series, args.link)).collect())
}

fn median(series: &Series) -> Option<(f64, (f64, f64))> {
    median_and_spread(&series.samples.iter().map(|sample| sample.median).collect::<Vec<_>>())
}

fn row(series: &Series, all: &[Series], link: Link) -> Row {
    let Series { placement, variant, case, samples, note } = series;
    let mut row = Row::new("rma", case.name, case.unit());
    row.link = Some(if case.is_floor { link.name().into() } else { variant.name(link) });
    row.placement = Some(placement);
    row.size_bytes = Some(case.size as u64);
    row.peer = case.is_floor.then(|| link.floor());
    row.n = samples.iter().map(|sample| sample.n).sum();
    row.note.clone_from(note);
    let Some((middle, spread)) = median(series) else { return row };
    row.median = Some(middle);
    row.spread = Some(spread);
    let tails: Vec<f64> = samples.iter().filter_map(|sample| sample.p99).collect();
    row.p99 = median_and_spread(&tails).map(|(middle, _)| middle);
    row.per_s = median_and_spread(&samples.iter().map(|sample| sample.per_s).collect::<Vec<_>>())
        .map(|(middle, _)| middle);
    let parts = case.floor(link, placement);
    let part = |(name, size, share): &(&str, usize, f64)| {
        let same = |one: &&Series| {
            (one.case.name, one.case.size) == (*name, *size) && (one.case.is_floor || one.variant == *variant)
        };
        let (found, _) = all.iter().find(same).and_then(median)?;
        Some(if case.unit() == "M/s" { found * 1e3 / *size as f64 } else { found * share })
    };
    let floors: Option<Vec<f64>> = parts.iter().map(part).collect();
    row.floor = floors.filter(|floors| !floors.is_empty()).map(|floors| floors.iter().sum());
    row.ratio = row.floor.map(|floor| if case.unit() == "us" { middle / floor } else { floor / middle });
    row
}

/// Another process, before it has been connected to.
struct Other {
    partner: Helper,
    /// Where its floors are.
    raw: String,
    ticket: String,
    /// What both know, and nobody else sees.
    secret: Option<String>,
}

impl Other {
    fn start(link: Link, encrypt: bool, cpu: Option<usize>) -> Result<Self, Failure> {
        let secret = if encrypt { Some(Secret::random()?.to_content().trim_end().to_owned()) } else { None };
        Self::with_secret(link, secret, cpu)
    }

    fn with_secret(link: Link, secret: Option<String>, cpu: Option<usize>) -> Result<Self, Failure> {
        let mut args = ["bench", "rma-partner", "--link", link.name()].map(str::to_owned).to_vec();
        if let Some(cpu) = cpu {
            args.extend(["--cpu".to_owned(), cpu.to_string()]);
        }
        if secret.is_some() {
            args.push("--encrypt".to_owned());
        }
        let mut partner = Helper::start(&args, false)?;
        if let Some(secret) = &secret {
            partner.tell(secret)?;
        }
        let (raw, ticket) = (partner.line()?, partner.line()?);
        Ok(Self { partner, raw, ticket, secret })
    }

    fn secret(&self) -> Result<Option<Secret>, Failure> {
        Ok(self.secret.as_ref().map(|secret| Secret::from_content(secret.as_bytes())).transpose()?)
    }

    /// A side here that is connected to it.
    fn connect(&mut self, link: Link) -> Result<(Side, Region), Failure> {
        let here = Side::new(link, self.secret()?, 1)?;
        let region = here.connect(&self.ticket)?;
        self.partner.tell(&here.ticket)?;
        self.partner.line()?;
        Ok((here, region))
    }
}
