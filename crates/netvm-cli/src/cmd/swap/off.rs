//! `netvm swap off`.

use super::super::Outcome;
use super::on::check_root;
use super::reserve;
use super::table::Files;
use clap::Args;
use netvm::runfile::start_time;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(10);

/// Arguments of `netvm swap off`.
#[derive(Args, Debug)]
#[command(after_help = "\
Everything that is swapped out comes back first; that takes as long as it takes, and fails when this machine has no room for it.")]
pub struct OffArgs {
    /// Only the swap with this number [default: all]
    #[arg(value_name = "N")]
    number: Option<u32>,
}

pub fn run(args: &OffArgs) -> Outcome {
    check_root()?;
    Files::sweep();
    let all = Files::all();
    let chosen: Vec<&Files> =
        all.iter().filter(|files| args.number.is_none_or(|number| number == files.number())).collect();
    if chosen.is_empty() {
        return Err(match args.number {
            Some(number) => {
                format!("there is no swap {number} on lent memory; `netvm swap status` shows which there are")
            }
            None => "there is no swap on lent memory".to_owned(),
        }
        .into());
    }
    let mut code = ExitCode::SUCCESS;
    for files in chosen {
        match end(files) {
            Ok(()) => println!("netvm: swap {} is off", files.number()),
            Err(error) => {
                eprintln!("netvm: swap {} stays: {error}", files.number());
                code = ExitCode::from(super::super::run::EXIT_NETVM);
            }
        }
    }
    Ok(code)
}

fn end(files: &Files) -> Result<(), String> {
    let entry = match files.entry() {
        Ok(entry) => entry,
        // Nothing was ever made of it, or all of it has gone.
        Err(_) if !files.is_mounted() => {
            files.remove();
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    if entry.in_use(files).is_some() {
        let dead = if entry.is_served() { "" } else { "; its server has ended, so what was on it is lost" };
        netvm_sys::swap::swap_off(&entry.device)
            .map_err(|error| format!("{}: {error}{dead}", entry.device.display()))?;
    }
    entry.take_away(files)?;
    until(|| !entry.is_attached(files))
        .ok_or_else(|| format!("{} is still open somewhere", entry.device.display()))?;
    if files.is_mounted() {
        let path = files.mount_point();
        netvm_sys::fuse::unmount(&path)
            .map_err(|error| format!("cannot unmount {}: {error}", path.display()))?;
    }
    for process in entry.processes() {
        end_process(process);
    }
    files.remove();
    // Another one needs them as well; it was made later, and found them changed: they are its own to restore.
    match Files::all().first() {
        Some(other) => other.inherit(&entry.changed),
        None => reserve::restore(&entry.changed),
    }
    Ok(())
}

/// It ends when its device or file is taken away; nothing needs it any more.
fn end_process((pid, started): (u32, u64)) {
    let is_there = || start_time(pid) == Some(started);
    if until(|| !is_there()).is_none() {
        let _ = netvm_sys::signal::send(pid, netvm_sys::signal::SIGKILL);
        until(|| !is_there());
    }
}

/// Waits until something is so, but not for long.
pub fn until(mut so: impl FnMut() -> bool) -> Option<()> {
    let end = Instant::now() + PATIENCE;
    while !so() {
        if Instant::now() > end {
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Some(())
}
