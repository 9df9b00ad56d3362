//! `netvm swap off`.

use super::super::Outcome;
use super::on::check_root;
use super::reserve;
use super::table::{Entry, Files};
use crate::cmd::ublk::Guard;
use clap::Args;
use netvm::view::ublk;
use netvm_sys::stat::start_time;
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(10);

/// Arguments of `netvm swap off`.
#[derive(Args, Debug)]
#[command(after_help = "\
Everything that is swapped out comes back first; that takes as long as it takes, and fails when this machine has no room for it.
When the server is dead, what was swapped out is lost: programs that need it are killed, and the swap is taken away.")]
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
            Ok(()) => out!("netvm: swap {} is off", files.number()),
            Err(error) => {
                tell!("netvm: swap {} stays: {error}", files.number());
                code = ExitCode::from(super::super::run::EXIT_NETVM);
            }
        }
    }
    Ok(code)
}

fn end(files: &Files) -> Result<(), String> {
    let mut entry = match files.entry() {
        Ok(entry) => entry,
        // Nothing was ever made of it, or all of it has gone.
        Err(_) if !files.is_mounted() => {
            files.remove();
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let stand_in = if entry.is_abandoned(files) { Some(StandIn::start(files, &mut entry)?) } else { None };
    if entry.in_use(files).is_some() {
        let dead = if entry.is_served() { "" } else { "; its server has ended, so what was on it is lost" };
        netvm_sys::swap::swap_off(&entry.device)
            .map_err(|error| format!("{}: {error}{dead}", entry.device.display()))?;
    }
    entry.take_away(files)?;
    until(|| !entry.is_attached(files))
        .ok_or_else(|| format!("{} is still open somewhere", entry.device.display()))?;
    drop(stand_in);
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

/// A process that fails whatever waits for a dead server, when the one that was to do that is dead, too: the kernel could not swap off
/// otherwise. If this process is killed it stays, as that of `swap on` would have.
struct StandIn(Child);

impl StandIn {
    fn start(files: &Files, entry: &mut Entry) -> Result<Self, String> {
        let device = entry.device.display();
        let number = entry.number().ok_or_else(|| format!("{device} has no number"))?;
        let guard = Guard::start_for(number, entry.pid, true)?;
        let pid = guard.pid();
        let started = start_time(pid).ok_or("the stand-in has ended")?;
        tell!(
            "netvm: nobody answers for {device} any more: what waits for it fails, so that it can be taken away"
        );
        // Whoever comes next knows it by this.
        entry.guard = Some((pid, started));
        files.write_entry(entry)?;
        let mut stand_in = Self(guard.act());
        let has_begun = || {
            !matches!(stand_in.0.try_wait(), Ok(None)) || ublk::server_of(number).is_ok_and(|now| now == pid)
        };
        match until(has_begun) {
            Some(()) if matches!(stand_in.0.try_wait(), Ok(None)) => Ok(stand_in),
            _ => Err(format!("what waits for {} cannot be ended", entry.device.display())),
        }
    }
}

impl Drop for StandIn {
    /// It ends when its device is gone.
    fn drop(&mut self) {
        until(|| !matches!(self.0.try_wait(), Ok(None)));
    }
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
