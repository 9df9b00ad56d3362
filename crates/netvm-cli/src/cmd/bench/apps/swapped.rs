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

/// What a program needs beside the memory that can be far: its code, its stacks, the page cache of its files.
const OVERHEAD_BYTES: u64 = 16 << 20;

/// Arguments of the keeper.
#[derive(Args, Debug)]
pub struct KeeperArgs {
    #[arg(long, value_enum)]
    kind: Kind,
    #[arg(long)]
    local_bytes: u64,
    #[arg(long)]
    size_bytes: u64,
}

/// The keeper: one line, which is the file that takes processes into the group, or `error` and why; then it waits for the end of its input.
///
/// # Errors
/// When its output is closed.
pub fn keep(args: &KeeperArgs) -> Result<(), Box<dyn Error>> {
    let swap = Swap::open(args.kind, args.size_bytes, &Lent::default());
    // Fields of a tuple are dropped in order: swap is taken off before the group goes.
    let parts = swap.and_then(|swap| Ok((swap, Cgroup::new(args.local_bytes + OVERHEAD_BYTES)?)));
    let line = match &parts {
        Ok((_, cgroup)) => cgroup.entrance().display().to_string(),
        Err(error) => format!("error {error}"),
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()?;
    std::io::stdin().lock().lines().for_each(drop);
    Ok(())
}

/// Measures a program on one kind of swap.
///
/// # Errors
/// Why it is skipped.
pub fn measure(
    work: &Work,
    kind: Kind,
    local_bytes: u64,
    bytes: u64,
    repetitions: u32,
) -> Result<Vec<Outcome>, Box<dyn Error>> {
    let size_bytes = bytes + bytes / 2 + (64 << 20);
    check(kind, size_bytes + local_bytes)?;
    let mut command = vec!["bench".to_owned(), "apps-keeper".into(), "--kind".into(), kind.name()];
    for (name, value) in [("local-bytes", local_bytes), ("size-bytes", size_bytes)] {
        command.extend([format!("--{name}"), value.to_string()]);
    }
    let mut keeper = Helper::start(&command, true)?;
    let entrance = keeper.line()?;
    if let Some(error) = entrance.strip_prefix("error ") {
        return Err(error.into());
    }
    let run = |_| {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0\" && exec \"$@\"", &entrance]).arg(&work.program);
        carry_out(work, command).map(|(outcome, _)| outcome)
    };
    let outcomes = (0..repetitions).map(run).collect();
    keeper.finish();
    outcomes
}
