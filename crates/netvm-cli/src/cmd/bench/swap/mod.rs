//! `netvm bench swap`: what swap costs a program that has more memory than it may use, by what is behind the swap.

use std::error::Error;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::child::Helper;
use super::report::{Row, median_and_spread};
use super::worker::{Case, Outcome};
use super::{PAGE_BYTES, floors};
use crate::size::Size;

mod cgroup;
mod device;
mod keeper;

pub use cgroup::Cgroup;
pub use device::{Kind, Lent, Swap};
use keeper::is_wrong_data;
pub use keeper::{KeeperArgs, Wanted, check, keep, measure};

/// Arguments of `netvm bench swap`.
#[derive(Args, Debug)]
#[command(after_help = "\
Needs root: it turns swap on, before all other swap of the machine, and off again. A program walks over --size of memory in a memory cgroup that may
have --local of it, on one kind of swap after the other, and checks all that it reads: every word, and of each pass over all pages every byte.

swap-rand: reads of a word of a random page, microseconds of those that had to wait for swap (major faults), and how many there were per second.
The floor is a bare round trip of 16 bytes there and 4 KiB back. swap-seq: all pages are read in order, MB/s that come in; swap-seq-write: all pages are
written anew in order, MB/s that go out while as much comes in; swap-fill: they are written for the first time, MB/s that go out. The floor is one bare TCP
stream. Pages do not compress, except with --compressible.

zram, disk: as the kernel has them. tmpfs: a loop device on a file in /dev/shm, the least that a loop device costs. nbdkit: its memory by nbd.ko.
nbdfuse: its memory as a FUSE file with a loop device on it. netvm-...: `netvm swap`, with a lender of its own on this machine over TCP, which frees
nothing and is refused where the kernel pages such processes out, or with those that --lender names. With --nearby netvm's server reads and writes that
lender's memory itself, as nbdkit has its own.

Examples:
  netvm bench swap --kind zram --kind disk
  netvm bench swap --kind nbdkit --kind netvm-nbd --nearby
  netvm bench swap --kind netvm-ublk --kind netvm-nbd --lender big:7070 --secret key --svg swap.svg")]
pub struct SwapArgs {
    /// Where pages go; may be given several times [default: all]
    #[arg(long, value_enum)]
    kind: Vec<Kind>,
    /// Memory that is walked over
    #[arg(long, default_value = "256M")]
    size: Size,
    /// Memory that the program may have of it
    #[arg(long, default_value = "64M")]
    local: Size,
    /// Repetitions of each case
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Time of one repetition of one case, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    case_ms: u64,
    /// Second half of every page is zero
    #[arg(long)]
    compressible: bool,
    #[command(flatten)]
    lent: Lent,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// A short run on little memory
    #[arg(long)]
    quick: bool,
    /// Draw the rows to this SVG file
    #[arg(long = "svg", alias = "plot", value_name = "FILE", value_parser = super::picture)]
    plot: Option<std::path::PathBuf>,
}

impl SwapArgs {
    /// Whether JSON is wanted.
    pub fn json(&self) -> bool {
        self.json
    }
}

const CASES: [Case; 3] = [Case::RandomRead, Case::SeqRead, Case::SeqWrite];

fn name_of(case: Case) -> &'static str {
    match case {
        Case::SeqRead => "swap-seq",
        Case::SeqWrite => "swap-seq-write",
        _ => "swap-rand",
    }
}

/// Bare kernel, in microseconds and in MB/s.
struct Floors {
    trip: Option<f64>,
    stream: Option<f64>,
}

/// Runs the bench.
///
/// # Errors
/// When there is nothing to measure, or no right to.
pub fn run(args: &SwapArgs) -> Result<Vec<Row>, Box<dyn Error>> {
    let (size, local, case_ms, rounds) = match args.quick {
        true => (Size(args.size.0.min(24 << 20)), Size(args.local.0.min(8 << 20)), 100, 2),
        false => (args.size, args.local, args.case_ms, args.rounds.max(1)),
    };
    if size.0 <= local.0 || local.0 == 0 {
        return Err(
            format!("--size {size} must be larger than --local {local}, or nothing is swapped").into()
        );
    }
    let kinds = if args.kind.is_empty() { Kind::value_variants().to_vec() } else { args.kind.clone() };
    // What holds for all of them is no row.
    check(Kind::Disk, size.0 + local.0)?;
    let time = Duration::from_millis(case_ms);
    let mut echo = Helper::start(&["bench".to_owned(), "echo".to_owned()], false)?;
    let address = echo.line()?;
    let (mut trips, mut streams) = (Vec::new(), Vec::new());
    let mut rows = Vec::new();
    for kind in kinds {
        trips.push(floors::round_trip(&address, false, time)?.median);
        streams.push(floors::stream(&address, time)?.median * 1000.0);
        let wanted = Wanted {
            kind,
            lent: if kind.by().is_some() { &args.lent } else { &Lent::default() },
            waits_only: true,
            compressible: args.compressible,
            local_bytes: local.0,
            size_bytes: size.0,
            case_ms,
            repetitions: rounds,
            cases: &CASES,
        };
        match measure(&wanted) {
            Ok(measured) => {
                rows.push(rate(kind, "swap-fill", std::slice::from_ref(&measured.fill)));
                for (case, outcomes) in measured.outcomes {
                    rows.push(match case {
                        Case::RandomRead => random(kind, &outcomes),
                        _ => rate(kind, name_of(case), &outcomes),
                    });
                }
            }
            Err(error) if is_wrong_data(&*error) => return Err(format!("{}: {error}", kind.name()).into()),
            Err(error) => {
                tell!("netvm bench swap: no figures for {}: {error}", kind.name());
                for case in CASES {
                    let unit = if case == Case::RandomRead { "us" } else { "MB/s" };
                    let mut row = row_of(kind, name_of(case), unit);
                    row.note = format!("skipped ({error})");
                    rows.push(row);
                }
            }
        }
    }
    echo.finish();
    let middle = |values: &[f64]| median_and_spread(values).map(|(middle, _)| middle);
    let floors = Floors { trip: middle(&trips), stream: middle(&streams) };
    for row in &mut rows {
        if args.lent.nearby {
            row.placement = row.link.as_deref().map(nearby_name);
        }
        let in_time = row.unit == "us";
        row.floor = if in_time { floors.trip } else { floors.stream };
        if let (Some(median), Some(floor)) = (row.median.filter(|median| *median > 0.0), row.floor) {
            row.ratio = Some(if in_time { median / floor } else { floor / median });
        }
    }
    rows.sort_by_key(|row| {
        ["swap-rand", "swap-seq", "swap-seq-write"].iter().position(|case| row.case == *case)
    });
    if let Some(path) = &args.plot {
        super::plot::of_swap(&rows, path)?;
    }
    Ok(rows)
}

fn row_of(kind: Kind, case: &'static str, unit: &'static str) -> Row {
    let mut row = Row::new("swap", case, unit);
    row.size_bytes = Some(PAGE_BYTES as u64);
    match kind.by() {
        Some(by) => (row.link, row.placement) = (Some(by.into()), Some(netvm_name(by))),
        None => row.peer = Some(kind.peer()),
    }
    row
}

/// As pictures name it.
fn netvm_name(by: &str) -> &'static str {
    match by {
        "ublk" => "netvm by ublk",
        "nbd" => "netvm by nbd",
        _ => "netvm by loop",
    }
}

/// The same where it reads its lender's memory itself.
fn nearby_name(by: &str) -> &'static str {
    match by {
        "ublk" => "netvm by ublk, nearby",
        "nbd" => "netvm by nbd, nearby",
        _ => "netvm by loop, nearby",
    }
}

fn random(kind: Kind, outcomes: &[Outcome]) -> Row {
    let mut row = row_of(kind, name_of(Case::RandomRead), "us");
    let of = |value: fn(&Outcome) -> f64| median_and_spread(&outcomes.iter().map(value).collect::<Vec<_>>());
    (row.median, row.spread) = of(|outcome| outcome.median).unzip();
    row.p99 = of(|outcome| outcome.p99).map(|(p99, _)| p99);
    row.per_s = of(|outcome| outcome.n as f64 / outcome.seconds).map(|(rate, _)| rate);
    row.n = outcomes.iter().map(|outcome| outcome.n).sum();
    row
}

/// What came in, or went out, in MB/s.
fn rate(kind: Kind, case: &'static str, outcomes: &[Outcome]) -> Row {
    let mut row = row_of(kind, case, "MB/s");
    let moved = |outcome: &Outcome| match case {
        "swap-seq" => outcome.in_bytes,
        _ => outcome.out_bytes,
    };
    let rates: Vec<f64> =
        outcomes.iter().map(|outcome| moved(outcome) as f64 / outcome.seconds / 1e6).collect();
    (row.median, row.spread) = median_and_spread(&rates).unzip();
    row.per_s = row.median.map(|rate| rate * 1e6 / PAGE_BYTES as f64);
    row.n = outcomes.iter().map(|outcome| moved(outcome) / PAGE_BYTES as u64).sum();
    let pool = outcomes.iter().map(|outcome| outcome.pool_bytes).max().unwrap_or(0);
    if pool > 0 {
        row.note = format!("packed {}", Size(pool));
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_what_moved() {
        let outcome = Outcome {
            seconds: 2.0,
            in_bytes: 8_000_000,
            out_bytes: 2_000_000,
            median: 7.0,
            n: 10,
            ..Outcome::default()
        };
        let row = rate(Kind::Zram, "swap-seq", &[outcome.clone(), outcome.clone()]);
        assert_eq!((row.median, row.peer, row.n), (Some(4.0), Some("swap-zram"), 2 * 8_000_000 / 4096));
        assert_eq!(rate(Kind::Zram, "swap-fill", std::slice::from_ref(&outcome)).median, Some(1.0));
        let row = random(Kind::NetvmNbd, &[outcome]);
        assert_eq!(
            (row.median, row.per_s, row.peer, row.link.as_deref()),
            (Some(7.0), Some(5.0), None, Some("nbd"))
        );
    }
}
