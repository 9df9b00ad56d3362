//! `netvm bench fault`: far memory over TCP loopback beside its floors and beside swap.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use netvm::lender::LinkChoice;
use netvm::pager::{Erasure, FaultPath};
use netvm_sys::bench_floor::{allowed_cpus, unpin_thread};
use netvm_sys::cpu::pin;

use crate::size::Size;

use super::child::Helper;
use super::far::{self, Far, Started};
use super::report::{Row, median_and_spread};
use super::swap::{self, Kind};
use super::walks::Walks;
use super::worker::{CHUNK_BYTES, Case, Outcome};
use super::{PAGE_BYTES, floors, plot};

type Failure = Box<dyn Error>;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  netvm bench fault                          all placements, beside disk swap and zram when root
  netvm bench fault --placement same-cpu --peers none --seconds 2
  netvm bench fault --placement same-cpu --replicas 2 --peers none
  netvm bench fault --placement same-cpu --encrypt-pages --peers none
  netvm bench fault --placement nearby-unpinned --fault-path in-thread --threads 2 --peers none
  netvm bench fault --placement nearby-unpinned --fault-path in-thread --threads 4 --shards 2 --peers none
  netvm bench fault --placement spin --peers none --case seq-read   a stream by itself: behind random accesses it is slower
  netvm bench fault --json --svg fault.svg   for a program, and a picture
  netvm bench fault --walks --local-percent 75,50,25,10   what an access costs with so much local memory
  netvm bench fault --walks --placement nearby-unpinned --threads 4 --peers none   and to four threads at once
  netvm bench fault --walks --case chase --encrypt-pages --peers none

Walks are timed over all accesses; the case ends in the part that is local, in -half where the second half of each page is
zeros, and in -threads where --threads of them walk at once: us are what each takes for an access, per s what all do (swap is
measured with one). Their floor is that of a random access for each page that is not local, of sequential ones that of a page
of the stream. `netvm-lender` packs nothing.
Zram's own memory (packed) is not counted in its limit (local), that of netvm is.

The floor of a random access is a bare userfaultfd fault plus a bare TCP round trip in the same placement; that of a
sequential read is a bare TCP stream; that of a sequential write is one connection with as much each way: a page that is
overwritten comes in before and goes out afterwards. Row fault-copy-sigbus is the same fault answered by the faulting thread in a handler
of SIGBUS, as --fault-path in-thread has it: of a program that knows of its far memory, whose system calls touch nothing missing. The ratio says how many times slower: 1 is the floor. An access counts as a fault
when it takes 1 us or more. Every value read is checked.")]
pub struct FaultArgs {
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// Which CPUs the program, its pager and the lender run on [default: all, with --walks same-cpu]
    #[arg(long, value_enum)]
    placement: Option<Placements>,
    /// Local memory for far pages
    #[arg(long, default_value = "64M", conflicts_with = "walks")]
    local: Size,
    /// Far memory that is walked over
    #[arg(long, default_value = "256M")]
    size: Size,
    /// Seconds for all repetitions of one case
    #[arg(long, default_value_t = 3.0, value_parser = seconds)]
    seconds: f64,
    /// Measure accesses instead, whether they fault or not: at random, by Zipf's law, in order, strided, by pointers (the same circle again and again);
    /// on random and on half-compressible data, with and without packed pages
    #[arg(long)]
    walks: bool,
    /// With --walks: parts of --size that are local, in percent
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', default_value = "50", requires = "walks",
          value_parser = clap::value_parser!(u32).range(1..=95))]
    local_percent: Vec<u32>,
    /// A short run on little memory, for tests
    #[arg(long, conflicts_with_all = ["local", "size", "seconds"])]
    quick: bool,
    /// How many lenders hold each page, each a process of its own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4))]
    replicas: u8,
    /// Or how many parts, as in 2+1, each at a lender that is a process of its own
    #[arg(long, value_name = "K+M", conflicts_with = "replicas")]
    erasure: Option<Erasure>,
    /// With 2 and more, random reads (and all walks) are also measured by so many threads at once
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    threads: u8,
    /// Pagers that divide the far memory
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64), conflicts_with = "walks")]
    shards: u8,
    /// Encrypt the pages that lenders get
    #[arg(long)]
    encrypt_pages: bool,
    /// Who serves faults: auto, thread, same-cpu, spin or in-thread
    #[arg(long, value_name = "PATH", default_value = "auto")]
    fault_path: FaultPath,
    /// Only this one: random-read, random-rmw, seq-read or seq-write; with --walks uniform, uniform-named, zipf, sequential, stride or chase
    #[arg(long, value_name = "CASE")]
    case: Option<String>,
    /// Write a bar plot of the medians to this file
    #[arg(long, value_name = "FILE", value_parser = super::picture)]
    svg: Option<PathBuf>,
    /// Whether to measure disk swap and zram as well (needs root)
    #[arg(long, value_enum, default_value = "auto")]
    peers: Peers,
}

/// Time in which a case has something to measure in each repetition.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is no number of seconds"))?;
    if (0.1..=86400.0).contains(&seconds) { Ok(seconds) } else { Err("give 0.1 to 86400 seconds".to_owned()) }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Placements {
    /// Everything on one CPU: no wake-up crosses CPUs
    SameCpu,
    /// The pager on another CPU than the program and the lender: every wake-up crosses CPUs
    OtherCpu,
    /// The lender on a CPU of its own, looking for requests; the pager beside the program, looking for answers
    Spin,
    /// All on one CPU, and the lender's memory shared: pages come without it
    Nearby,
    /// The same as the kernel likes: several threads on several CPUs
    NearbyUnpinned,
    /// All on one CPU, over the network, and reads of single pages answered by the lender's kernel (needs CAP_BPF and CAP_NET_ADMIN)
    Kernel,
    /// The same as the kernel likes
    KernelUnpinned,
    /// As the kernel likes
    Unpinned,
    /// All of them but nearby-unpinned and kernel-unpinned
    All,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Peers {
    /// Those that work here
    Auto,
    /// Only netvm and the floors
    None,
}

/// Where the parts of a fault run. `None` is anywhere.
#[derive(Clone, Copy, Debug)]
pub struct Placement {
    pub name: &'static str,
    pub program: Option<usize>,
    pub pager: Option<usize>,
    pub lender: Option<usize>,
    /// Lender and pager look for messages instead of sleeping.
    pub spin: bool,
    /// How the lender's memory is reached: shared; over connections; or also by datagrams that its kernel answers.
    pub link: LinkChoice,
}

impl Placement {
    /// Nothing crosses a network.
    pub fn is_nearby(&self) -> bool {
        self.link == LinkChoice::Shm
    }

    /// What reads come by, for tables.
    pub fn link_name(&self) -> &'static str {
        match self.link {
            LinkChoice::Shm => "shm",
            LinkChoice::Datagrams => "udp",
            LinkChoice::Socket | LinkChoice::Auto => "tcp",
        }
    }
}

fn placements(wanted: Placements) -> Result<Vec<Placement>, Failure> {
    let cpus = allowed_cpus();
    let first = cpus.first().copied();
    let second = cpus.get(1).copied();
    let mut all = Vec::new();
    if matches!(wanted, Placements::SameCpu | Placements::All) {
        all.push(Placement {
            name: "same-cpu",
            program: first,
            pager: first,
            lender: first,
            spin: false,
            link: LinkChoice::Socket,
        });
    }
    if matches!(wanted, Placements::OtherCpu | Placements::All) {
        if second.is_some() {
            all.push(Placement {
                name: "other-cpu",
                program: first,
                pager: second,
                lender: first,
                spin: false,
                link: LinkChoice::Socket,
            });
        } else {
            tell!("skipped: other-cpu (needs two CPUs)");
        }
    }
    if matches!(wanted, Placements::Spin | Placements::All) {
        if second.is_some() {
            all.push(Placement {
                name: "spin",
                program: first,
                pager: first,
                lender: second,
                spin: true,
                link: LinkChoice::Socket,
            });
        } else {
            tell!("skipped: spin (needs two CPUs)");
        }
    }
    if matches!(wanted, Placements::Nearby | Placements::All) {
        all.push(Placement {
            name: NEARBY,
            program: first,
            pager: first,
            lender: first,
            spin: false,
            link: LinkChoice::Shm,
        });
    }
    if matches!(wanted, Placements::NearbyUnpinned) {
        all.push(Placement {
            name: NEARBY_UNPINNED,
            program: None,
            pager: None,
            lender: None,
            spin: false,
            link: LinkChoice::Shm,
        });
    }
    if matches!(wanted, Placements::Kernel | Placements::KernelUnpinned | Placements::All) {
        let (name, cpu) = match wanted {
            Placements::KernelUnpinned => (KERNEL_UNPINNED, None),
            _ => (KERNEL, first),
        };
        match netvm::lender::probe_kernel_reads() {
            Ok(()) => all.push(Placement {
                name,
                program: cpu,
                pager: cpu,
                lender: cpu,
                spin: false,
                link: LinkChoice::Datagrams,
            }),
            Err(error) => tell!("skipped: {name} ({error})"),
        }
    }
    if matches!(wanted, Placements::Unpinned | Placements::All) {
        all.push(Placement {
            name: "unpinned",
            program: None,
            pager: None,
            lender: None,
            spin: false,
            link: LinkChoice::Socket,
        });
    }
    if all.is_empty() { Err("no placement can be measured on this host".into()) } else { Ok(all) }
}

/// One line of the result: what each repetition found.
struct Series {
    placement: Option<&'static str>,
    peer: Option<&'static str>,
    case: &'static str,
    outcomes: Vec<Outcome>,
    note: String,
}

impl Series {
    fn median_and_spread(&self) -> Option<(f64, (f64, f64))> {
        median_and_spread(&self.outcomes.iter().map(|outcome| outcome.median).collect::<Vec<_>>())
    }

    fn median_of(&self, value: impl Fn(&Outcome) -> f64) -> Option<f64> {
        Some(median_and_spread(&self.outcomes.iter().map(value).collect::<Vec<_>>())?.0)
    }
}

const NEARBY: &str = "nearby";
const NEARBY_UNPINNED: &str = "nearby-unpinned";
const KERNEL: &str = "kernel";
const KERNEL_UNPINNED: &str = "kernel-unpinned";
const ROUND_TRIP: &str = "round-trip-16-4096";
const STREAM: &str = "stream";
const BOTH_WAYS: &str = "stream-both-ways";
/// The sequential cases' first passes: while what the case before has left is taken out.
const SEQ_READ_FIRST: &str = "seq-read-first";
const SEQ_WRITE_FIRST: &str = "seq-write-first";
const FAULT_COPY: &str = "fault-copy";
const FAULT_COPY_SIGBUS: &str = "fault-copy-sigbus";
const FAULT_COPY_THREADS: &str = "fault-copy-threads";
const FAULT_COPY_SHARDS: &str = "fault-copy-shards";
const FAULT_MOVE: &str = "fault-move";
const COPY_PAGE: &str = "copy-4k";
const COPY_SEQUENTIAL: &str = "copy-sequential";

fn is_sequential(case: &str) -> bool {
    matches!(case, "seq-read" | "seq-write" | SEQ_READ_FIRST | SEQ_WRITE_FIRST)
}

fn is_nearby(placement: Option<&str>) -> bool {
    matches!(placement, Some(NEARBY | NEARBY_UNPINNED))
}

#[derive(Default)]
struct Table {
    series: Vec<Series>,
}

impl Table {
    fn add(
        &mut self,
        placement: Option<&'static str>,
        peer: Option<&'static str>,
        case: &'static str,
        outcome: Result<Outcome, Failure>,
    ) {
        let place =
            self.series.iter().position(|old| (old.placement, old.peer, old.case) == (placement, peer, case));
        let place = place.unwrap_or_else(|| {
            self.series.push(Series { placement, peer, case, outcomes: Vec::new(), note: String::new() });
            self.series.len() - 1
        });
        match outcome {
            Ok(outcome) => self.series[place].outcomes.push(outcome),
            Err(error) => self.series[place].note = format!("skipped ({error})"),
        }
    }

    /// What a worker found, which for the sequential cases is two lines.
    fn add_case(
        &mut self,
        placement: Option<&'static str>,
        peer: Option<&'static str>,
        case: Case,
        mut outcome: Outcome,
    ) {
        let first = match case {
            Case::SeqRead => SEQ_READ_FIRST,
            _ => SEQ_WRITE_FIRST,
        };
        if let Some(pass) = outcome.first_pass.take() {
            let local_bytes_peak = outcome.local_bytes_peak;
            self.add(placement, peer, first, Ok(Outcome { local_bytes_peak, ..*pass }));
        }
        self.add(placement, peer, case.name(), Ok(outcome));
    }

    fn median(&self, placement: Option<&str>, peer: &str, case: &str) -> Option<f64> {
        let found = self
            .series
            .iter()
            .find(|series| series.peer == Some(peer) && series.case == case && series.placement == placement);
        Some(found?.median_and_spread()?.0)
    }

    /// The floor of a case in a placement, in the unit of the case.
    fn floor(&self, placement: Option<&str>, case: &str) -> Option<f64> {
        match case {
            // Nothing crosses a network.
            "random-read" | "random-rmw" | "random-read-threads" if is_nearby(placement) => {
                self.median(placement, "floor-uffd", FAULT_COPY)
            }
            _ if is_nearby(placement) => self.median(None, "memcpy", COPY_SEQUENTIAL),
            "random-read" | "random-rmw" | "random-read-threads" => Some(
                self.median(placement, "floor-uffd", FAULT_COPY)?
                    + self.median(placement, "floor-tcp", ROUND_TRIP)?,
            ),
            // What is overwritten comes in before, and goes out afterwards.
            "seq-write" | SEQ_WRITE_FIRST => self.median(placement, "floor-tcp", BOTH_WAYS),
            _ if is_sequential(case) => self.median(placement, "floor-tcp", STREAM),
            _ => None,
        }
    }

    fn rows(&self) -> Vec<Row> {
        self.series.iter().map(|series| self.row(series)).collect()
    }

    fn row(&self, series: &Series) -> Row {
        let sequential =
            is_sequential(series.case) || matches!(series.case, STREAM | BOTH_WAYS | COPY_SEQUENTIAL);
        let mut row = Row::new("fault", series.case, if sequential { "GB/s" } else { "us" });
        row.placement = series.placement;
        row.peer = series.peer;
        let link = match series.placement {
            placement if is_nearby(placement) => "shm",
            // Streams go over the session there, too.
            Some(KERNEL | KERNEL_UNPINNED) if series.peer.is_none() && !sequential => "udp",
            _ => "tcp",
        };
        row.link = matches!(series.peer, None | Some("floor-tcp")).then_some(link.into());
        row.size_bytes = Some(match series.case {
            STREAM | BOTH_WAYS | COPY_SEQUENTIAL => floors::STREAM_BYTES,
            case if is_sequential(case) => CHUNK_BYTES,
            _ => PAGE_BYTES,
        } as u64);
        row.note.clone_from(&series.note);
        let Some((median, spread)) = series.median_and_spread() else { return row };
        row.median = Some(median);
        row.spread = Some(spread);
        row.p99 = series.median_of(|outcome| outcome.p99);
        row.per_s = series.median_of(|outcome| outcome.per_s);
        row.n = series.outcomes.iter().map(|outcome| outcome.n).sum();
        // Swap has no other side; it is compared with the same floor as netvm where nothing is pinned.
        let placement = series.placement.or(Some("unpinned"));
        row.floor = self.floor(placement, series.case);
        row.ratio = row.floor.map(|floor| if sequential { floor / median } else { median / floor });
        if row.note.is_empty() {
            let peak = series.outcomes.iter().map(|outcome| outcome.local_bytes_peak).max().unwrap_or(0);
            if peak > 0 {
                row.note = format!("peak local {}", Size(peak));
            }
        }
        row
    }
}

/// How much is measured.
#[derive(Clone, Copy, Debug)]
struct Plan<'a> {
    far: Far,
    local_bytes: u64,
    repetitions: usize,
    shards: u8,
    cases: &'a [Case],
    /// Time of one repetition of one floor.
    floor: Duration,
}

/// Those of `all` that are asked for.
fn chosen(all: &[Case], name: Option<&str>) -> Result<Vec<Case>, Failure> {
    let chosen: Vec<Case> =
        all.iter().copied().filter(|case| name.is_none_or(|name| name == case.name())).collect();
    if chosen.is_empty() {
        let names: Vec<_> = all.iter().map(|case| case.name()).collect();
        return Err(format!("--case is one of {}", names.join(", ")).into());
    }
    Ok(chosen)
}

/// Runs the bench and prints its rows.
///
/// # Errors
/// When the far memory or a floor cannot be had at all. A peer that cannot be measured is a skipped row instead.
pub fn run(args: &FaultArgs) -> Result<(), Failure> {
    let (repetitions, case, local_bytes, size_bytes) = if args.quick {
        (2, Duration::from_millis(150), 8 << 20, 32 << 20)
    } else {
        (5, Duration::try_from_secs_f64(args.seconds / 5.0)?, args.local.0, args.size.0)
    };
    let far = Far {
        size_bytes,
        replicas: args.replicas,
        erasure: args.erasure,
        encrypt_pages: args.encrypt_pages,
        threads: args.threads,
        fault_path: args.fault_path,
        case,
    };
    let cpus = allowed_cpus();
    let all = if args.walks { &Case::WALKS[..] } else { &Case::ALL };
    let cases = chosen(all, args.case.as_deref())?;
    if args.walks {
        let walks = Walks {
            placements: &placements(args.placement.unwrap_or(Placements::SameCpu))?,
            cpus: &cpus,
            percents: &args.local_percent,
            far,
            cases: &cases,
            repetitions,
            peers: args.peers == Peers::Auto,
        };
        let rows = walks.rows();
        unpin_thread(&cpus)?;
        let rows = rows?;
        if let Some(path) = &args.svg {
            plot::of_walks(&rows, path)?;
        }
        return super::print(&rows, args.json);
    }
    if size_bytes <= local_bytes {
        return Err(format!(
            "--size {} must be larger than --local {}, or nothing faults",
            args.size, args.local
        )
        .into());
    }
    let plan = Plan { far, local_bytes, repetitions, shards: args.shards, cases: &cases, floor: case / 3 };
    let mut table = Table::default();
    let result = measure(&plan, args.placement.unwrap_or(Placements::All), &cpus, &mut table);
    unpin_thread(&cpus)?;
    result?;
    if args.peers == Peers::Auto {
        for kind in [Kind::Disk, Kind::Zram] {
            measure_swap(&plan, kind, &mut table);
        }
    }
    let rows = table.rows();
    if let Some(path) = &args.svg {
        plot::write(&rows, path)?;
    }
    super::print(&rows, args.json)
}

fn measure(plan: &Plan, wanted: Placements, cpus: &[usize], table: &mut Table) -> Result<(), Failure> {
    let mut setups = Vec::new();
    for placement in placements(wanted)? {
        // Before anything is started, so that children begin where they may run.
        unpin_thread(cpus)?;
        setups.push(Setup::new(plan, placement)?);
    }
    for _ in 0..plan.repetitions {
        table.add(None, Some("memcpy"), COPY_PAGE, floors::copy_pages(plan.floor));
        table.add(None, Some("memcpy"), COPY_SEQUENTIAL, floors::copy_sequential(plan.floor));
        for setup in &mut setups {
            setup.measure(plan, cpus, table)?;
        }
    }
    Ok(())
}

/// The processes of one placement. Those that are not being measured sleep.
struct Setup {
    placement: Placement,
    started: Started,
    _echo: Helper,
    echo_address: String,
}

impl Setup {
    fn new(plan: &Plan, placement: Placement) -> Result<Self, Failure> {
        let (echo, echo_address) = far::echo(placement)?;
        let shards = format!("--shards {}", plan.shards);
        let started = plan.far.start(placement, plan.local_bytes, false, &shards)?;
        Ok(Self { placement, started, _echo: echo, echo_address })
    }

    /// One repetition: the floors, then the cases.
    fn measure(&mut self, plan: &Plan, cpus: &[usize], table: &mut Table) -> Result<(), Failure> {
        let name = Some(self.placement.name);
        // In the floor of the network this thread stands for the pager, in that of the fault for the program.
        let be = |cpu: Option<usize>| cpu.map_or_else(|| unpin_thread(cpus), pin);
        be(self.placement.pager)?;
        if !self.placement.is_nearby() {
            let trip = floors::round_trip(&self.echo_address, self.placement.spin, plan.floor)?;
            table.add(name, Some("floor-tcp"), ROUND_TRIP, Ok(trip));
            table.add(name, Some("floor-tcp"), STREAM, Ok(floors::stream(&self.echo_address, plan.floor)?));
            let both_ways = floors::both_ways(&self.echo_address, plan.floor)?;
            table.add(name, Some("floor-tcp"), BOTH_WAYS, Ok(both_ways));
        }
        be(self.placement.program)?;
        let copy = floors::fault(false, self.placement.pager, plan.floor)?;
        table.add(name, Some("floor-uffd"), FAULT_COPY, Ok(copy));
        table.add(name, Some("floor-uffd"), FAULT_COPY_SIGBUS, floors::fault_in_handler(plan.floor));
        // Kernels before 6.8 cannot move.
        table.add(
            name,
            Some("floor-uffd"),
            FAULT_MOVE,
            floors::fault(true, self.placement.pager, plan.floor),
        );
        for &case in plan.cases {
            table.add_case(name, None, case, self.started.worker.ask(case.name())?);
        }
        if plan.far.threads > 1 && plan.cases.contains(&Case::RandomRead) {
            be(self.placement.program)?;
            for (case, sharded) in [(FAULT_COPY_THREADS, false), (FAULT_COPY_SHARDS, true)] {
                let threads = usize::from(plan.far.threads);
                let floor = floors::fault_by_threads(threads, sharded, self.placement.pager, plan.floor)?;
                table.add(name, Some("floor-uffd"), case, Ok(floor));
            }
            let case = Case::RandomReadThreads.name();
            table.add(name, None, case, Ok(self.started.worker.ask(case)?));
        }
        Ok(())
    }
}

fn measure_swap(plan: &Plan, kind: Kind, table: &mut Table) {
    let wanted = swap::Wanted {
        kind,
        lent: &swap::Lent::default(),
        waits_only: false,
        compressible: kind == Kind::Zram,
        local_bytes: plan.local_bytes,
        size_bytes: plan.far.size_bytes,
        case_ms: plan.far.case.as_millis() as u64,
        repetitions: plan.repetitions,
        cases: plan.cases,
    };
    match swap::measure(&wanted) {
        Ok(measured) => {
            for (case, outcomes) in measured.outcomes {
                outcomes
                    .into_iter()
                    .for_each(|outcome| table.add_case(None, Some(kind.peer()), case, outcome));
            }
        }
        Err(error) => {
            for &case in plan.cases {
                table.add(None, Some(kind.peer()), case.name(), Err(error.to_string().into()));
            }
        }
    }
    let data = if kind == Kind::Zram { "50 %-compressible data" } else { "random data" };
    for series in table.series.iter_mut().filter(|series| series.peer == Some(kind.peer())) {
        if series.note.is_empty() {
            series.note = data.into();
        }
    }
}
