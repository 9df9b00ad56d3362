//! The server of a swap: a process of its own, which needs no memory once it serves.

use super::super::Outcome;
use super::on::OnArgs;
use super::table::{Files, Health, LenderHealth};
use netvm::lender::StopFlag;
use netvm::view::file::FileServer;
use netvm::volume::Volume;
use netvm_sys::mapping::Mapping;
use netvm_sys::signal::{SIGHUP, SIGINT, SIGTERM, Signals};
use std::fs;
use std::io::{Read, Write};
use std::process::ExitCode;

/// What it says when the file is there. Anything else is why it is not.
pub const READY: &str = "ready";
/// Begins lines before that about what does not keep it from serving.
pub const WARNING: &str = "warning: ";
/// Characters of the reason why a lender is lost.
const REASON_MAX: usize = 200;

pub fn run(args: &OnArgs) -> Outcome {
    let files = Files::of(args.serve.unwrap_or_default());
    // What is swapped out is nowhere else: a polite end would be the end of those whose pages it is.
    let _signals = Signals::block(&[SIGTERM, SIGINT, SIGHUP]);
    match serve(args, &files) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            let mut out = std::io::stdout();
            if writeln!(out, "{}", error.to_string().replace('\n', " ")).and_then(|()| out.flush()).is_err() {
                // Whoever started us has gone, and cannot clear up.
                files.remove();
            }
            Ok(ExitCode::FAILURE)
        }
    }
}

/// What needs CAP_SYS_RESOURCE, which containers often lack: swap works without it, until memory is short everywhere. Returns what
/// could not be done.
pub fn protect() -> Vec<String> {
    let spared = fs::write("/proc/self/oom_score_adj", "-1000").map_err(|error| {
        format!("the kernel may kill the server when memory runs out (oom_score_adj: {error})")
    });
    let flusher = netvm_sys::swap::set_io_flusher().map_err(|error| {
        format!("the server may wait for its own swap when memory is short everywhere (PR_SET_IO_FLUSHER: {error})")
    });
    [spared, flusher].into_iter().filter_map(Result::err).collect()
}

fn serve(args: &OnArgs, files: &Files) -> Result<(), Box<dyn std::error::Error>> {
    netvm_sys::process::new_session()?;
    let warnings = protect();
    netvm_sys::swap::lock_memory().map_err(|error| format!("cannot lock the server's memory: {error}"))?;
    let volume = args.volume.open("swap", args.size_bytes())?;
    let mut server = FileServer::new(volume)?;
    let health = files.make_health().and_then(|file| Mapping::of_file(&file, true));
    let health = health.map_err(|error| format!("cannot make a health file: {error}"))?;
    std::env::set_current_dir("/")?;
    let stop = StopFlag::new()?;
    let flag = stop.clone();
    server.mount(&files.mount_point())?;
    let mount = files.clone();
    let mut out = std::io::stdout();
    let said = warnings.iter().try_for_each(|warning| writeln!(out, "{WARNING}{warning}"));
    let said = said.and_then(|()| writeln!(out, "{READY}"));
    std::thread::Builder::new().name("netvm-starter".to_owned()).spawn(move || {
        if said.is_err() || std::io::stdin().read(&mut [0]).unwrap_or(0) == 0 {
            // Whoever started us has gone before anything was on it.
            let _ = netvm_sys::fuse::unmount(&mount.mount_point());
            mount.remove();
            flag.stop();
        }
    })?;
    server.run(&stop, |volume, _| health_of(volume, &warnings).write(health.shared()))?;
    Ok(())
}

fn health_of(volume: &Volume, warnings: &[String]) -> Health {
    let (degraded, lost) = volume.degraded();
    let lender = |lender: netvm::volume::LenderState| LenderHealth {
        address: lender.address,
        lost: lender.lost.map(|error| error.to_string().chars().take(REASON_MAX).collect()),
    };
    Health {
        lenders: volume.lenders().into_iter().map(lender).collect(),
        degraded,
        lost,
        warnings: warnings.to_vec(),
    }
}
