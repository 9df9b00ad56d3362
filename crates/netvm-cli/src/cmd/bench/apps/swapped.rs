//! The same programs on swap, in a memory cgroup, as peers.
//!
//! A keeper process of its own sets the swap up and takes it down again when its standard input ends, so that Ctrl-C, an error or a killed
//! bench leave neither swap nor cgroup behind.

use std::error::Error;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};

use super::super::child::Helper;
use super::super::swap::{Cgroup, Swap, available_bytes};
use super::measure::{Outcome, Work, carry_out};

/// What a program needs beside the memory that can be far: its code, its stacks, the page cache of its files.
const OVERHEAD_BYTES: u64 = 16 << 20;

/// Where swapped pages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Compressed memory
    Zram,
    /// A swap file
    Disk,
    /// A network block device that nbdkit serves from this machine's memory
    Nbdkit,
}

impl Kind {
    /// Name in the column `peer`.
    pub fn peer(self) -> &'static str {
        match self {
            Kind::Zram => "swap-zram",
            Kind::Disk => "swap-disk",
            Kind::Nbdkit => "swap-nbdkit",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Zram => "zram",
            Kind::Disk => "disk",
            Kind::Nbdkit => "nbdkit",
        }
    }
}

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
    let swap = match args.kind {
        Kind::Zram => Swap::zram(args.size_bytes),
        Kind::Disk => Swap::file(args.size_bytes),
        Kind::Nbdkit => Swap::nbdkit(args.size_bytes),
    };
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
    if !std::fs::read_to_string("/proc/self/status")?.lines().any(|line| line.starts_with("Uid:\t0\t")) {
        return Err("needs root".into());
    }
    if kind == Kind::Nbdkit && something_pages_out(Path::new("/sys/kernel/mm/damon/admin/kdamonds")) {
        return Err("DAMON pages memory of all processes out here; the swap's own server could wait for itself for ever".into());
    }
    let size_bytes = bytes + bytes / 2 + (64 << 20);
    if available_bytes().is_some_and(|free| free < size_bytes + local_bytes) {
        return Err(format!("needs {} MiB of free memory", (size_bytes + local_bytes) >> 20).into());
    }
    let mut command = vec!["bench".to_owned(), "apps-keeper".into(), "--kind".into(), kind.name().into()];
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
