//! `netvm bench apps`: what programs that people use take with a part of their memory local, next to all of it in RAM.
//! See docs/design/apps.md.

mod measure;
mod plot;
mod programs;
mod redis;
mod swapped;

use std::error::Error;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::Form;
use super::report::{self, Row};
use super::swap::Kind;
use super::sweeper::Sweeper;
use measure::on_netvm;
pub(super) use measure::{Outcome, Work, carry_out, in_ram, part};
use programs::App;
pub use swapped::{KeeperArgs, keep};

/// Arguments of `netvm bench apps`.
#[derive(Args, Debug)]
#[command(after_help = "\
Each program runs in RAM first, then on memory of which only a part is local; what it writes must be the same. The rest is on a
private lender of this machine. A program that is not installed is left out with a remark.

Examples:
  netvm bench apps --quick                         a few minutes on little data
  netvm bench apps --app redis --app pagerank --local-percent 50,25
  netvm bench apps --json --svg apps.svg
  netvm bench apps --swap zram --swap disk         as root: the same in a memory cgroup on swap")]
pub struct AppsArgs {
    /// Only these programs
    #[arg(long, value_enum, value_name = "APP")]
    app: Vec<App>,
    /// How much of a program's memory is local, in percent
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', default_values_t = [75, 50, 25, 10],
          value_parser = clap::value_parser!(u64).range(1..=100))]
    local_percent: Vec<u64>,
    /// Runs of each [default: 3; with --quick 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=99))]
    repetitions: Option<u32>,
    /// Measure this kind of swap too, as root
    #[arg(long, value_enum, value_name = "KIND")]
    swap: Vec<Kind>,
    #[command(flatten)]
    form: Form,
}

impl AppsArgs {
    /// Whether JSON is wanted.
    pub fn json(&self) -> bool {
        self.form.json
    }

    fn repetitions(&self) -> u32 {
        self.repetitions.unwrap_or(if self.form.quick { 1 } else { 3 })
    }
}

/// A folder for what is compiled, read and written; removed with this process.
#[derive(Debug)]
pub(super) struct Folder(pub(super) PathBuf, #[expect(dead_code, reason = "removes the folder")] Sweeper);

impl Folder {
    /// For the bench of this name.
    pub(super) fn new(bench: &str) -> Result<Self, Box<dyn Error>> {
        let path = std::env::temp_dir().join(format!("netvm-bench-{bench}-{}", std::process::id()));
        let sweeper = Sweeper::of_new_folder(&path)?;
        Ok(Self(path, sweeper))
    }
}

/// Measures all that is asked for.
///
/// # Errors
/// When a program writes something else than in RAM, or netvm cannot run it.
pub fn run(args: &AppsArgs) -> Result<Vec<Row>, Box<dyn Error>> {
    let folder = Folder::new("apps")?;
    let apps = if args.app.is_empty() { App::value_variants().to_vec() } else { args.app.clone() };
    let mut rows = Vec::new();
    for app in apps {
        match app.prepare(&folder.0, args.form.quick) {
            Ok(work) => measure_app(args, app, &work, &mut rows)?,
            Err(reason) => {
                rows.extend(args.local_percent.iter().map(|percent| skipped(app, *percent, &reason)));
            }
        }
    }
    if let Some(path) = &args.form.svg {
        plot::write(&rows, path)?;
    }
    Ok(rows)
}

fn skipped(app: App, percent: u64, reason: &str) -> Row {
    let mut row = Row::new("apps", format!("{}-{percent}", app.name()), app.unit());
    row.note = format!("skipped: {reason}");
    row
}

fn measure_app(args: &AppsArgs, app: App, work: &Work, rows: &mut Vec<Row>) -> Result<(), Box<dyn Error>> {
    let repetitions = args.repetitions();
    let mut ram = Vec::new();
    // The first one, which may have to read the program from a disk, is not counted.
    for _ in 0..=repetitions {
        match in_ram(work) {
            Ok(outcome) => ram.push(outcome),
            Err(error) => {
                let reason = format!("it fails in RAM: {error}");
                rows.extend(args.local_percent.iter().map(|percent| skipped(app, *percent, &reason)));
                return Ok(());
            }
        }
    }
    let expected = ram[0].result.clone();
    if ram.iter().any(|outcome| outcome.result != expected) {
        return Err(format!("{} does not write the same each time it runs in RAM", app.name()).into());
    }
    ram.remove(0);
    let floor = Summary::of(&ram);
    // All of it local: how much that is.
    let whole = on_netvm(work, measure::ALL_LOCAL)?;
    same(app, 100, "netvm", &expected, &whole.result)?;
    let bytes = whole.local_bytes_peak;
    // What swap has to leave to the program besides.
    let beside =
        if args.swap.is_empty() { Ok(0) } else { swapped::beside(work, bytes).map_err(|e| e.to_string()) };
    for &percent in &args.local_percent {
        let local = measure::part(bytes, percent);
        let mut outcomes = Vec::new();
        for _ in 0..repetitions {
            let outcome = on_netvm(work, local)?;
            same(app, percent, "netvm", &expected, &outcome.result)?;
            outcomes.push(outcome);
        }
        let mut row = row(app, percent, &Summary::of(&outcomes), &floor, repetitions);
        row.size_bytes = Some(bytes);
        row.note = outcomes[0].note();
        rows.push(row);
        for &kind in &args.swap {
            let limit = beside.clone().map(|beside| local + beside);
            rows.push(swap_row(args, app, work, (percent, bytes), (kind, limit), (&expected, &floor))?);
        }
    }
    Ok(())
}

fn swap_row(
    args: &AppsArgs,
    app: App,
    work: &Work,
    (percent, bytes): (u64, u64),
    (kind, limit_bytes): (Kind, Result<u64, String>),
    (expected, floor): (&str, &Summary),
) -> Result<Row, Box<dyn Error>> {
    let repetitions = args.repetitions();
    let outcomes = limit_bytes.map_err(Box::<dyn Error>::from).and_then(|limit_bytes| {
        Ok((limit_bytes, swapped::measure(work, kind, limit_bytes, bytes, repetitions)?))
    });
    Ok(match outcomes {
        Ok((limit_bytes, outcomes)) => {
            for outcome in &outcomes {
                same(app, percent, kind.peer(), expected, &outcome.result)?;
            }
            let mut row = row(app, percent, &Summary::of(&outcomes), floor, repetitions);
            (row.peer, row.size_bytes) = (Some(kind.peer()), Some(bytes));
            row.note = format!("{:.1} MiB for all of it", limit_bytes as f64 / 1_048_576.0);
            row
        }
        Err(error) => {
            let mut row = skipped(app, percent, &error.to_string());
            row.peer = Some(kind.peer());
            row
        }
    })
}

/// A wrong result is no measurement.
fn same(app: App, percent: u64, on: &str, expected: &str, found: &str) -> Result<(), Box<dyn Error>> {
    if expected == found {
        return Ok(());
    }
    Err(format!(
        "{} wrote something else on {on} with {percent} % local than in RAM: {found:?}, not {expected:?}",
        app.name()
    )
    .into())
}

/// What repetitions came to.
struct Summary {
    /// Seconds, or microseconds of a request.
    median: f64,
    spread: (f64, f64),
    p99: Option<f64>,
    per_s: Option<f64>,
}

impl Summary {
    fn of(outcomes: &[measure::Outcome]) -> Self {
        let of = |get: fn(&measure::Outcome) -> Option<f64>| {
            let values: Vec<f64> = outcomes.iter().filter_map(get).collect();
            report::median_and_spread(&values)
        };
        let (median, spread) = of(|outcome| Some(outcome.value)).unwrap_or_default();
        let middle = |get| of(get).map(|(median, _)| median);
        let (p99, per_s) = (middle(|outcome| outcome.p99), middle(|outcome| outcome.per_s));
        Self { median, spread, p99, per_s }
    }
}

fn row(app: App, percent: u64, found: &Summary, ram: &Summary, repetitions: u32) -> Row {
    let mut row = Row::new("apps", format!("{}-{percent}", app.name()), app.unit());
    (row.median, row.spread, row.p99, row.per_s) =
        (Some(found.median), Some(found.spread), found.p99, found.per_s);
    row.floor = Some(ram.median);
    // Of a server, how many requests it serves counts.
    row.ratio = Some(match (found.per_s, ram.per_s) {
        (Some(found), Some(ram)) => ram / found,
        _ => found.median / ram.median,
    });
    row.n = repetitions.into();
    row
}
