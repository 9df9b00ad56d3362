//! The server of a swap: a process of its own, which needs no memory once it serves.

use super::super::Outcome;
use super::by::By;
use super::on::OnArgs;
use super::table::{Files, Health, LenderHealth};
use crate::cmd::ublk::Guard;
use netvm::lender::StopFlag;
use netvm::view::file::FileServer;
use netvm::view::nbd::NbdDisk;
use netvm::view::ublk::{Notice, UblkConfig, UblkServer};
use netvm::volume::Volume;
use netvm_sys::mapping::Mapping;
use netvm_sys::signal::{SIGHUP, SIGINT, SIGTERM, Signals};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Begins the line that it says when it serves, before a [`Ready`]. Anything else is why it does not.
pub const READY: &str = "ready ";
/// Begins lines before that about what does not keep it from serving.
pub const WARNING: &str = "warning: ";
/// Characters of the reason why a lender is lost.
const REASON_MAX: usize = 200;

/// What it serves.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Ready {
    /// The block device, unless there is only a file.
    pub device: Option<PathBuf>,
    /// The process that stands in for it when it is dead.
    pub guard: Option<u32>,
}

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

/// What needs CAP_SYS_RESOURCE or CAP_SYS_NICE, which containers often lack: swap works without it, until memory is short everywhere.
/// Returns what could not be done.
pub fn protect() -> Vec<String> {
    let spared = fs::write("/proc/self/oom_score_adj", "-1000").map_err(|error| {
        format!("the kernel may kill the server when memory runs out (oom_score_adj: {error})")
    });
    let flusher = netvm_sys::swap::set_io_flusher().map_err(|error| {
        format!("the server may wait for its own swap when memory is short everywhere (PR_SET_IO_FLUSHER: {error})")
    });
    let first = netvm_sys::swap::set_realtime().map_err(|error| {
        format!("the server gets none of the kernel's reserve when memory is short everywhere (SCHED_FIFO: {error})")
    });
    [spared, flusher, first].into_iter().filter_map(Result::err).collect()
}

fn serve(args: &OnArgs, files: &Files) -> Result<(), Box<dyn std::error::Error>> {
    netvm_sys::process::new_session()?;
    let warnings = protect();
    netvm_sys::swap::lock_memory().map_err(|error| format!("cannot lock the server's memory: {error}"))?;
    let volume = args.volume.open("swap", args.size_bytes())?;
    let health = files.make_health().and_then(|file| Mapping::of_file(&file, true));
    let health = health.map_err(|error| format!("cannot make a health file: {error}"))?;
    std::env::set_current_dir("/")?;
    let stop = StopFlag::new()?;
    let told = |volume: &Volume| health_of(volume, &warnings).write(health.shared());
    match args.by.unwrap_or(By::Loop) {
        By::Ublk => {
            let config = UblkConfig { stays: true, ..UblkConfig::default() };
            let mut server = UblkServer::new(volume, &config)?;
            let guard = Guard::start(server.id(), true)?;
            let ready = Ready { device: Some(server.disk()), guard: Some(guard.pid()) };
            let mut is_ready = false;
            let result = server.run(&stop, |volume, notice| {
                told(volume);
                if matches!(notice, Notice::Started) && !is_ready {
                    is_ready = true;
                    say(&ready, &warnings, files, &stop);
                }
            });
            drop(server);
            guard.dismiss();
            result?;
        }
        By::Nbd => {
            let mut server = NbdDisk::new(volume)?;
            say(&Ready { device: Some(server.disk()), guard: None }, &warnings, files, &stop);
            server.run(&stop, |volume, _| told(volume))?;
        }
        By::Loop => {
            let mut server = FileServer::new(volume)?;
            server.mount(&files.mount_point())?;
            say(&Ready::default(), &warnings, files, &stop);
            server.run(&stop, |volume, _| told(volume))?;
        }
    }
    Ok(())
}

/// Tells whoever started this process that it serves, and ends it when they have gone before anything was on it.
fn say(ready: &Ready, warnings: &[String], files: &Files, stop: &StopFlag) {
    let mut out = std::io::stdout();
    let said = warnings.iter().try_for_each(|warning| writeln!(out, "{WARNING}{warning}"));
    let line = serde_json::to_string(ready).unwrap_or_default();
    let said = said.and_then(|()| writeln!(out, "{READY}{line}"));
    let (files, stop) = (files.clone(), stop.clone());
    let starter = std::thread::Builder::new().name("netvm-starter".to_owned()).stack_size(128 << 10);
    let _ = starter.spawn(move || {
        if said.is_err() || std::io::stdin().read(&mut [0]).unwrap_or(0) == 0 {
            let _ = netvm_sys::fuse::unmount(&files.mount_point());
            files.remove();
            stop.stop();
        }
    });
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
