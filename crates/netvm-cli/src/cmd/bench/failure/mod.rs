//! `netvm bench failure`: what a program feels when a lender is lost under it. See docs/design/replicas.md.

mod lenders;

use std::error::Error;
use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::apps::{Folder, Outcome, Work, carry_out, in_ram, part};
use super::report::{Row, median_and_spread};
use super::{Form, plot};
use crate::size::Size;
use lenders::Lenders;

type Failure = Box<dyn Error>;

/// So often it is tried to have the program notice.
const ATTEMPTS: u32 = 4;

/// Arguments of `netvm bench failure`.
#[derive(Args, Debug)]
#[command(after_help = "\
sort(1) runs with a part of its memory local and the rest on lenders of this machine, one more than are needed. When it has run for four tenths of
its time one of them is killed (SIGKILL), stopped (SIGSTOP), or cut off (its network goes down, in a network namespace of its own). What is
written must be what it is in RAM.

REDUNDANCY-TROUBLE: seconds that it takes; the floor is the same without trouble. ...-stall: the longest that a page took, in ms. ...-repair:
seconds from when it was given up until all pages had all copies or parts again. With one lender, where the pages would be lost, only the time without trouble is measured.
A program that ends before the lender is missed runs again, with the trouble earlier; runs that end so each time are counted under remarks.

Examples:
  netvm bench failure --quick
  netvm bench failure --redundancy 2+1 --trouble stop
  netvm bench failure --json --svg failure.svg")]
pub struct FailureArgs {
    /// Only these ways to keep pages
    #[arg(long, value_enum, value_name = "WAY")]
    redundancy: Vec<Redundancy>,
    /// Only these troubles
    #[arg(long, value_enum, value_name = "TROUBLE")]
    trouble: Vec<Trouble>,
    /// What is sorted
    #[arg(long, default_value = "16M")]
    size: Size,
    /// Local memory
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=75))]
    local_percent: u64,
    /// Runs of each
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    repetitions: u32,
    #[command(flatten)]
    form: Form,
    /// The network may be cut: it is nobody else's
    #[arg(long, hide = true)]
    own_network: bool,
}

/// How pages are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Redundancy {
    /// On one lender
    #[value(name = "one")]
    One,
    /// On two
    #[value(name = "replicas-2")]
    Replicas,
    /// In two parts, and one more
    #[value(name = "2+1")]
    TwoAndOne,
    /// In four parts, and two more
    #[value(name = "4+2")]
    FourAndTwo,
}

impl Redundancy {
    fn name(self) -> &'static str {
        match self {
            Self::One => "one",
            Self::Replicas => "replicas-2",
            Self::TwoAndOne => "2+1",
            Self::FourAndTwo => "4+2",
        }
    }

    /// What `netvm run` is told, how many lenders it takes, and how many bytes are lent for each far one, in eighths.
    fn options(self) -> (&'static [&'static str], usize, u64) {
        match self {
            Self::One => (&[], 1, 8),
            Self::Replicas => (&["--replicas", "2"], 2, 16),
            Self::TwoAndOne => (&["--erasure", "2+1"], 3, 12),
            Self::FourAndTwo => (&["--erasure", "4+2"], 6, 12),
        }
    }
}

/// What happens to a lender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Trouble {
    /// It is killed
    Kill,
    /// It stands still
    Stop,
    /// Its network is down
    Cut,
}

impl Trouble {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Stop => "stop",
            Self::Cut => "cut",
        }
    }
}

/// Measures all that is asked for.
///
/// # Errors
/// When the program writes something else than in RAM, or does not outlive a lender that it can do without.
pub fn run(args: &FailureArgs) -> Result<(), Failure> {
    if !args.own_network
        && wanted(&args.trouble).contains(&Trouble::Cut)
        && let Some(status) = in_own_network()
    {
        return if status? { Ok(()) } else { Err("the bench failed".into()) };
    }
    let rows = rows(args)?;
    if let Some(path) = &args.form.svg {
        plot::of_failure(&rows, path)?;
    }
    super::print(&rows, args.form.json)
}

fn wanted<T: ValueEnum + Clone>(named: &[T]) -> Vec<T> {
    if named.is_empty() { T::value_variants().to_vec() } else { named.to_vec() }
}

/// Runs this command once more in a network of its own, whose loopback device may go down: whether it succeeded. `None` where that cannot be had.
fn in_own_network() -> Option<Result<bool, Failure>> {
    let ways = [&["-n"][..], &["-Urn"]];
    let works = |way: &&&[&str]| {
        let up = Command::new("unshare").args(**way).args(["--", "ip", "link", "set", "lo", "up"]).output();
        up.is_ok_and(|output| output.status.success())
    };
    let way = ways.iter().find(works)?;
    let again = || {
        let mut command = Command::new("unshare");
        command.args(*way).arg("--").arg(std::env::current_exe()?);
        command.args(std::env::args_os().skip(1)).arg("--own-network");
        netvm_sys::signal::die_with_parent(&mut command);
        Ok(command.status()?.success())
    };
    Some(again())
}

fn rows(args: &FailureArgs) -> Result<Vec<Row>, Failure> {
    if args.own_network {
        lenders::network("up")?;
    }
    let folder = Folder::new("failure")?;
    let size = if args.form.quick { 6 << 20 } else { args.size.0.max(4 << 20) };
    let work = sort(&folder.0, size)?;
    let bench = Bench {
        work: &work,
        folder: &folder.0,
        // sort keeps the lines and an entry for each.
        memory_bytes: size * 2,
        local_bytes: part(size * 2, args.local_percent),
        expected: in_ram(&work)?,
        repetitions: if args.form.quick { 1 } else { args.repetitions },
        own_network: args.own_network,
    };
    let mut rows = Vec::new();
    for redundancy in wanted(&args.redundancy) {
        let name = redundancy.name();
        let (alone, _) = bench.repeat(redundancy, None, Duration::ZERO)?;
        let mut row = bench.row(name.to_owned(), "s", &alone);
        row.floor = Some(bench.expected.value);
        row.note = "without trouble; the floor is in RAM".to_owned();
        let undisturbed = row.median.unwrap_or(0.0);
        row.ratio = Some(undisturbed / bench.expected.value);
        rows.push(row);
        if redundancy == Redundancy::One {
            continue;
        }
        for trouble in wanted(&args.trouble) {
            bench.disturb(redundancy, trouble, undisturbed, &mut rows)?;
        }
    }
    Ok(rows)
}

/// Lines of a generated file, sorted in memory.
fn sort(folder: &Path, size: u64) -> Result<Work, Failure> {
    let input = folder.join("lines");
    let mut out = std::io::BufWriter::new(std::fs::File::create(&input)?);
    let mut state = 1_u64;
    for _ in 0..size / 34 {
        // SplitMix64, twice a line.
        let mut word = || {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ z >> 31
        };
        writeln!(out, "{:016x} {:016x}", word(), word())?;
    }
    out.flush()?;
    let buffer = format!("--buffer-size={}K", (size * 4) >> 10);
    let arguments =
        [buffer.as_str(), "--parallel=1", "--output=sorted", "lines"].map(OsString::from).to_vec();
    let writes = Some(folder.join("sorted"));
    Ok(Work {
        program: "sort".into(),
        arguments,
        input: None,
        writes,
        folder: folder.to_owned(),
        server: None,
    })
}

struct Bench<'a> {
    work: &'a Work,
    folder: &'a Path,
    /// What the program wants, and how much of it is local.
    memory_bytes: u64,
    local_bytes: u64,
    expected: Outcome,
    repetitions: u32,
    own_network: bool,
}

/// What a lost lender cost.
#[derive(Clone, Copy, Debug)]
struct Cost {
    stall_ms: f64,
    repair_s: Option<f64>,
    unprotected: u64,
}

impl Bench<'_> {
    /// The program, several times; with trouble for one lender after some time, or sooner. No cost of runs in which it was never missed.
    fn repeat(
        &self,
        redundancy: Redundancy,
        trouble: Option<Trouble>,
        after: Duration,
    ) -> Result<(Vec<f64>, Vec<Cost>), Failure> {
        let (mut seconds, mut costs) = (Vec::new(), Vec::new());
        for _ in 0..self.repetitions {
            let mut after = after;
            for attempt in 1..=ATTEMPTS {
                let (time, cost) = self.once(redundancy, trouble, after)?;
                if trouble.is_none() || cost.is_some() || attempt == ATTEMPTS {
                    seconds.push(time);
                    costs.extend(cost);
                    break;
                }
                after /= 2;
            }
        }
        Ok((seconds, costs))
    }

    fn once(
        &self,
        redundancy: Redundancy,
        trouble: Option<Trouble>,
        after: Duration,
    ) -> Result<(f64, Option<Cost>), Failure> {
        let (options, needed, eighths) = redundancy.options();
        let count = needed + usize::from(redundancy != Redundancy::One);
        // Any of them may have to take what one more had.
        let lent = self.memory_bytes / 8 * eighths / needed as u64 * 2 + (64 << 20);
        let mut lenders = Lenders::start(self.folder, count, lent, self.own_network)?;
        let mut command = Command::new(std::env::current_exe()?);
        // As if they were far.
        command.env("NETVM_LINK", "socket");
        command.args(["run", "--json", "--tier", "lender", "--local", &self.local_bytes.to_string()]);
        command.args(options).args(lenders.arguments()).arg("--").arg(&self.work.program);
        let name = redundancy.name();
        let ran = std::thread::scope(|scope| {
            let strike = trouble.map(|trouble| {
                let lenders = &mut lenders;
                scope.spawn(move || {
                    std::thread::sleep(after);
                    lenders.strike(trouble).map_err(|error| error.to_string())
                })
            });
            let ran = carry_out(self.work, command).map_err(|error| error.to_string());
            strike
                .map_or(Ok(()), |strike| strike.join().unwrap_or_else(|_| Err("a thread died".to_owned())))?;
            ran
        });
        lenders.end(trouble);
        let (mut outcome, said) = ran.map_err(|error| format!("{name}: {error}"))?;
        if outcome.result != self.expected.result {
            return Err(format!(
                "{name}: sort wrote something else than in RAM: {:?}, not {:?}",
                outcome.result, self.expected.result
            )
            .into());
        }
        outcome.take_summary(&said)?;
        let number = |key: &str| outcome.summary()[key].as_u64().unwrap_or(0);
        let lost = outcome.summary()["lost"].as_array().map_or(0, Vec::len);
        if trouble.is_none() {
            return Ok((outcome.value, None));
        }
        if lost == 0 {
            return Ok((outcome.value, None));
        }
        let unprotected = number("pages_unprotected");
        let repair_s = (unprotected == 0).then(|| number("repair_ms") as f64 / 1000.0);
        let cost = Cost { stall_ms: number("read_us_peak") as f64 / 1000.0, repair_s, unprotected };
        Ok((outcome.value, Some(cost)))
    }

    fn disturb(
        &self,
        redundancy: Redundancy,
        trouble: Trouble,
        undisturbed: f64,
        rows: &mut Vec<Row>,
    ) -> Result<(), Failure> {
        let case = format!("{}-{}", redundancy.name(), trouble.name());
        if trouble == Trouble::Cut && !self.own_network {
            let mut row = Row::new("failure", case, "s");
            row.note = "skipped (no network namespace of its own can be had)".to_owned();
            rows.push(row);
            return Ok(());
        }
        let after = Duration::from_secs_f64(undisturbed * 0.4);
        let (seconds, costs) = self.repeat(redundancy, Some(trouble), after)?;
        let mut row = self.row(case.clone(), "s", &seconds);
        row.floor = Some(undisturbed);
        row.ratio = row.median.map(|median| median / undisturbed);
        let unnoticed = seconds.len() - costs.len();
        if unnoticed > 0 {
            row.note = format!("{unnoticed} ended before the lender was missed");
        }
        rows.push(row);
        let stalls: Vec<f64> = costs.iter().map(|cost| cost.stall_ms).collect();
        rows.push(self.row(format!("{case}-stall"), "ms", &stalls));
        let repairs: Vec<f64> = costs.iter().filter_map(|cost| cost.repair_s).collect();
        let mut row = self.row(format!("{case}-repair"), "s", &repairs);
        if let Some(cost) = costs.iter().find(|cost| cost.unprotected > 0) {
            row.note =
                format!("once {} pages were not protected yet when the program ended", cost.unprotected);
        }
        rows.push(row);
        Ok(())
    }

    fn row(&self, case: String, unit: &'static str, values: &[f64]) -> Row {
        let mut row = Row::new("failure", case, unit);
        (row.size_bytes, row.n) = (Some(self.memory_bytes), values.len() as u64);
        if let Some((median, spread)) = median_and_spread(values) {
            (row.median, row.spread) = (Some(median), Some(spread));
        }
        row
    }
}
