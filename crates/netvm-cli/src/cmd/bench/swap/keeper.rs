//! The access patterns of `netvm bench fault` in a memory cgroup, on swap.
//!
//! A keeper process of its own sets everything up and takes it down again. It lives outside the terminal's process group
//! and ends when its standard input does, so that Ctrl-C, an error or a killed bench leave no swap and no cgroup behind.

use std::error::Error;
use std::fs;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;

use super::super::PAGE_BYTES;
use super::super::child::Helper;
use super::super::worker::{Case, Outcome, WRONG_DATA};
use super::cgroup::Cgroup;
use super::device::{Kind, Lent, Swap};

/// Of the servers, and of a file in memory beyond what is swapped, in bytes.
const SERVERS_BYTES: u64 = 64 << 20;
/// Memory that the worker itself needs beside the region, in bytes.
const OVERHEAD_BYTES: u64 = 4 << 20;

/// How often a measurement whose worker is killed is begun.
const ATTEMPTS: usize = 5;
/// What is said of a worker that was killed.
const KILLED: &str = "SIGKILL";

/// The outcomes of each case, one per repetition.
pub type Outcomes = Vec<(Case, Vec<Outcome>)>;

#[derive(Args, Debug)]
pub struct KeeperArgs {
    #[arg(long)]
    kind: Kind,
    #[arg(long)]
    local_bytes: u64,
    #[arg(long)]
    size_bytes: u64,
    #[arg(long)]
    case_ms: u64,
    /// Second half of every page is zero
    #[arg(long)]
    compressible: bool,
    /// As of the worker
    #[arg(long)]
    waits_only: bool,
    #[command(flatten)]
    lent: Lent,
}

/// The keeper: sets up, relays commands to a worker in the cgroup, tears down when its input ends.
///
/// # Errors
/// When the swap cannot be set up. This is reported on standard output as well, as the first outcome.
pub fn keep(args: &KeeperArgs) -> Result<(), Box<dyn Error>> {
    let mut parts = match set_up(args) {
        Ok(parts) => parts,
        Err(error) => {
            out!("{}", serde_json::to_string(&Outcome { error: error.to_string(), ..Outcome::default() })?);
            return Ok(());
        }
    };
    for line in std::io::stdin().lock().lines() {
        let (begun, before) = (Instant::now(), swapped_bytes());
        let outcome = parts.worker.ask(&line?).map(|outcome| Outcome {
            seconds: begun.elapsed().as_secs_f64(),
            in_bytes: swapped_bytes().0.saturating_sub(before.0),
            out_bytes: swapped_bytes().1.saturating_sub(before.1),
            pool_bytes: parts.swap.pool_bytes(),
            local_bytes_peak: args.local_bytes,
            ..outcome
        });
        let outcome =
            outcome.unwrap_or_else(|error| Outcome { error: error.to_string(), ..Outcome::default() });
        let mut out = std::io::stdout().lock();
        // The bench may have gone: then the input has ended as well.
        let _ = writeln!(out, "{}", serde_json::to_string(&outcome)?).and_then(|()| out.flush());
    }
    Ok(())
}

/// What the keeper keeps. Fields drop in order: the worker ends, then the swap is empty, then the cgroup.
#[derive(Debug)]
struct Parts {
    worker: Helper,
    swap: Swap,
    _cgroup: Cgroup,
}

fn set_up(args: &KeeperArgs) -> Result<Parts, Box<dyn Error>> {
    let swap_bytes = args.size_bytes + (32 << 20);
    // Declared first, so that a failure further down takes it down again.
    let swap = Swap::open(args.kind, swap_bytes, &args.lent)?;
    let cgroup = Cgroup::new(Some(args.local_bytes + OVERHEAD_BYTES))?;
    let mut command = vec!["bench".to_string(), "worker".into()];
    for (name, value) in
        [("local-bytes", args.local_bytes), ("size-bytes", args.size_bytes), ("case-ms", args.case_ms)]
    {
        command.extend([format!("--{name}"), value.to_string()]);
    }
    if args.compressible {
        command.push("--compressible".into());
    }
    if args.waits_only {
        command.push("--waits-only".into());
    }
    let worker = Helper::start(&command, true)?;
    // It has not touched its memory yet: that begins with the command to fill it.
    cgroup.add(worker.pid())?;
    Ok(Parts { worker, swap, _cgroup: cgroup })
}

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    pub kind: Kind,
    pub lent: &'a Lent,
    /// Of random accesses only those count that waited for swap.
    pub waits_only: bool,
    /// Half of each page is zero.
    pub compressible: bool,
    pub local_bytes: u64,
    pub size_bytes: u64,
    /// Time of one repetition of one case.
    pub case_ms: u64,
    pub repetitions: usize,
    pub cases: &'a [Case],
}

/// What measuring a kind of swap came to.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Of writing all pages for the first time.
    pub fill: Outcome,
    /// Of the cases.
    pub outcomes: Outcomes,
}

/// Measures one kind of swap: the outcomes of each case, over the repetitions.
///
/// # Errors
/// Why it is skipped.
pub fn measure(wanted: &Wanted) -> Result<Measured, Box<dyn Error>> {
    let Wanted { kind, lent, waits_only, compressible, local_bytes, size_bytes, case_ms, repetitions, cases } =
        *wanted;
    check(kind, size_bytes + local_bytes + SERVERS_BYTES)?;
    let mut command = vec!["bench".to_string(), "swap-keeper".into(), "--kind".into(), kind.name()];
    for (name, value) in [("local-bytes", local_bytes), ("size-bytes", size_bytes), ("case-ms", case_ms)] {
        command.extend([format!("--{name}"), value.to_string()]);
    }
    command.extend(compressible.then(|| "--compressible".to_owned()));
    command.extend(waits_only.then(|| "--waits-only".to_owned()));
    command.extend(lent.arguments());
    // While every page of the group is being swapped out the kernel may give up too soon and kill the worker, the sooner the slower the swap is: once
    // more, then.
    let mut measured = relay(&command, repetitions, cases);
    for _ in 1..ATTEMPTS {
        match &measured {
            Err(error) if error.to_string().contains(KILLED) => {
                measured = relay(&command, repetitions, cases)
            }
            _ => break,
        }
    }
    measured
}

/// Whether a worker has read something else than it had written: no reason to try again.
pub fn is_wrong_data(error: &dyn Error) -> bool {
    error.to_string().contains(WRONG_DATA)
}

/// Has one keeper measure all cases.
fn relay(command: &[String], repetitions: usize, cases: &[Case]) -> Result<Measured, Box<dyn Error>> {
    let mut keeper = Helper::start(command, true)?;
    let fill = keeper.ask("fill")?;
    let mut outcomes: Outcomes = cases.iter().map(|&case| (case, Vec::new())).collect();
    for _ in 0..repetitions {
        for (case, outcomes) in &mut outcomes {
            outcomes.push(keeper.ask(case.name())?);
        }
    }
    keeper.finish();
    Ok(Measured { fill, outcomes })
}

/// Whether this machine may have such swap for a while.
///
/// # Errors
/// Why not.
pub fn check(kind: Kind, bytes: u64) -> Result<(), Box<dyn Error>> {
    if !fs::read_to_string("/proc/self/status")?.lines().any(|line| line.starts_with("Uid:\t0\t")) {
        return Err("needs root".into());
    }
    if kind.is_served_here() && something_pages_out(Path::new("/sys/kernel/mm/damon/admin/kdamonds")) {
        return Err("DAMON pages memory of all processes out here; the swap's own server could wait for itself for ever".into());
    }
    if available_bytes().is_some_and(|free| free < bytes) {
        return Err(format!("needs {} MiB of free memory", bytes >> 20).into());
    }
    Ok(())
}

/// What all swap of this machine has brought in and taken out since it was started.
fn swapped_bytes() -> (u64, u64) {
    let all = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let pages = |name: &str| {
        let line = all.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse::<u64>().ok()).unwrap_or(0)
    };
    (pages("pswpin") * PAGE_BYTES as u64, pages("pswpout") * PAGE_BYTES as u64)
}

/// Memory that is available without swapping, in bytes.
fn available_bytes() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("MemAvailable:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

const _: () = assert!(OVERHEAD_BYTES.is_multiple_of(PAGE_BYTES as u64));

/// Whether something pages cold memory of all processes out, whatever group it is in.
fn something_pages_out(kdamonds: &Path) -> bool {
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let below = |path: &Path| -> Vec<PathBuf> {
        let numbers = std::fs::read_dir(path).into_iter().flatten().flatten();
        numbers.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
    };
    let is_on = |kdamond: &PathBuf| read(kdamond.join("state")).trim() == "on";
    below(kdamonds).into_iter().filter(is_on).any(|kdamond| {
        below(&kdamond.join("contexts"))
            .into_iter()
            .flat_map(|context| below(&context.join("schemes")))
            .any(|scheme| read(scheme.join("action")).trim() == "pageout")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_pages_out_is_found() {
        let folder = std::env::temp_dir().join(format!("netvm-damon-{}", std::process::id()));
        let scheme = folder.join("0/contexts/0/schemes/1");
        std::fs::create_dir_all(&scheme).unwrap();
        std::fs::write(folder.join("nr_kdamonds"), "1\n").unwrap();
        std::fs::write(folder.join("0/state"), "on\n").unwrap();
        assert!(!something_pages_out(&folder));
        for (state, action, pages_out) in
            [("on\n", "stat\n", false), ("on\n", "pageout\n", true), ("off\n", "pageout\n", false)]
        {
            std::fs::write(folder.join("0/state"), state).unwrap();
            std::fs::write(scheme.join("action"), action).unwrap();
            assert_eq!(something_pages_out(&folder), pages_out, "{state} {action}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(!something_pages_out(&folder));
    }
}
