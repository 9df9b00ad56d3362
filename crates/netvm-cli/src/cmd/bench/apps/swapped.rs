//! The same programs on swap, in a memory cgroup, as peers.
//!
//! A keeper process of its own sets the swap up and takes it down again when its standard input ends, so that Ctrl-C, an error or a killed
//! bench leave neither swap nor cgroup behind.

use std::error::Error;
use std::io::{BufRead, Write};
use std::process::Command;

use clap::Args;

use super::super::child::Helper;
use super::super::swap::{Cgroup, Kind, Lent, Swap, check};
use super::measure::{Outcome, Work, carry_out};

/// What the kernel counts of a program when netvm counts nothing of it, at least.
const BESIDE_BYTES_MIN: u64 = 4 << 20;

/// Arguments of the keeper.
#[derive(Args, Debug)]
pub struct KeeperArgs {
    /// Nothing: a group without a limit.
    #[arg(long, value_enum)]
    kind: Option<Kind>,
    #[arg(long, default_value_t = 0)]
    limit_bytes: u64,
    #[arg(long, default_value_t = 0)]
    size_bytes: u64,
}

/// The keeper: one line, which is the file that takes processes into the group, or `error` and why; then it answers each line with the most memory
/// that the group has had, until the end of its input.
///
/// # Errors
/// When its output is closed.
pub fn keep(args: &KeeperArgs) -> Result<(), Box<dyn Error>> {
    let swap = args.kind.map(|kind| Swap::open(kind, args.size_bytes, &Lent::default())).transpose();
    // Fields of a tuple are dropped in order: swap is taken off before the group goes.
    let parts = swap.and_then(|swap| Ok((swap, Cgroup::new(args.kind.map(|_| args.limit_bytes))?)));
    let line = match &parts {
        Ok((_, cgroup)) => cgroup.entrance().display().to_string(),
        Err(error) => format!("error {error}"),
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()?;
    for _ in std::io::stdin().lock().lines() {
        let peak = parts.as_ref().ok().map(|(_, cgroup)| cgroup.bytes_peak());
        match peak {
            Some(Ok(bytes)) => writeln!(out, "{bytes}")?,
            Some(Err(error)) => writeln!(out, "error {error}")?,
            None => writeln!(out, "error there is no group")?,
        }
        out.flush()?;
    }
    Ok(())
}

/// A keeper, and the file that takes processes into its group.
fn keeper(arguments: &[(&str, String)]) -> Result<(Helper, String), Box<dyn Error>> {
    let mut command = vec!["bench".to_owned(), "apps-keeper".into()];
    for (name, value) in arguments {
        command.extend([format!("--{name}"), value.clone()]);
    }
    let mut keeper = Helper::start(&command, true)?;
    let entrance = said(&mut keeper)?;
    Ok((keeper, entrance))
}

fn said(keeper: &mut Helper) -> Result<String, Box<dyn Error>> {
    let line = keeper.line()?;
    match line.strip_prefix("error ") {
        Some(error) => Err(error.into()),
        None => Ok(line),
    }
}

/// Runs it in the group.
fn run(work: &Work, entrance: &str) -> Result<Outcome, Box<dyn Error>> {
    let mut command = Command::new("sh");
    command.args(["-c", "echo $$ > \"$0\" && exec \"$@\"", entrance]).arg(&work.program);
    carry_out(work, command).map(|(outcome, _)| outcome)
}

/// What a group's limit has to leave for that part of a program of which netvm counts nothing, when it counts `bytes` of it: code, stacks, small allocations, the page
/// cache of its files.
///
/// # Errors
/// When there are no memory cgroups, or the program fails.
pub fn beside(work: &Work, bytes: u64) -> Result<u64, Box<dyn Error>> {
    let (mut keeper, entrance) = keeper(&[])?;
    run(work, &entrance)?;
    keeper.tell("peak")?;
    let peak: u64 = said(&mut keeper)?.parse()?;
    keeper.finish();
    Ok(peak.saturating_sub(bytes).max(BESIDE_BYTES_MIN))
}

/// Measures a program on one kind of swap, with `limit_bytes` of memory for it and all that belongs to it, and `bytes` that can go to the swap.
///
/// # Errors
/// Why it is skipped.
pub fn measure(
    work: &Work,
    kind: Kind,
    limit_bytes: u64,
    bytes: u64,
    repetitions: u32,
) -> Result<Vec<Outcome>, Box<dyn Error>> {
    let size_bytes = bytes + bytes / 2 + (64 << 20);
    check(kind, size_bytes + limit_bytes)?;
    let (limit, size) = (limit_bytes.to_string(), size_bytes.to_string());
    let (keeper, entrance) = keeper(&[("kind", kind.name()), ("limit-bytes", limit), ("size-bytes", size)])?;
    let outcomes = (0..repetitions).map(|_| run(work, &entrance)).collect();
    keeper.finish();
    outcomes
}
