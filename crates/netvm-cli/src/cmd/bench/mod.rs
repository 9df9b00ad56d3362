//! `netvm bench`: measurements that carry their floors with them.

use std::error::Error;
use std::fs::OpenOptions;
use std::path::PathBuf;

use clap::{Args, Subcommand};

mod apps;
mod block;
mod child;
mod eviction;
mod failure;
mod far;
mod fault;
mod file;
mod floors;
mod frames;
mod lender;
mod nonresident;
mod plot;
mod report;
mod rma;
mod swap;
mod sweeper;
mod tiers;
mod transfer;
mod walks;
mod worker;

/// Bytes in a page of the far memory that is measured.
const PAGE_BYTES: usize = netvm_sys::bench_floor::PAGE_BYTES;

/// Arguments of `netvm bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    which: Which,
}

/// How long some of them work, and what they leave.
#[derive(Args, Debug)]
struct Form {
    /// Little data, short runs
    #[arg(long)]
    quick: bool,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// Write a bar plot to this file
    #[arg(long, value_name = "FILE", value_parser = picture)]
    svg: Option<PathBuf>,
}

/// A file that a picture can be written to: who cannot is told before something is measured for minutes.
pub(super) fn picture(path: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(path);
    let is_new = !path.exists();
    let open = OpenOptions::new().append(true).create(true).open(&path);
    open.map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    if is_new {
        let _ = std::fs::remove_file(&path);
    }
    Ok(path)
}

#[derive(Subcommand, Debug)]
enum Which {
    /// Measure page faults on far memory: over TCP, by shared memory, answered by the kernel, next to the floors and to swap
    Fault(fault::FaultArgs),
    /// Measure swap by what is behind it: zram, a disk, tmpfs, nbdkit, and lent memory
    Swap(swap::SwapArgs),
    /// Compare the two ways of putting a page into place and taking it out again
    ///
    /// Nanoseconds per page for design a (UFFDIO_MOVE between frame pool and memory) and design b (UFFDIO_COPY in,
    /// write-protect, copy and MADV_DONTNEED out), one page at a time and in batches of 64.
    Frames {
        /// Print one JSON object per line
        #[arg(long)]
        json: bool,
        /// A short run on little memory
        #[arg(long)]
        quick: bool,
    },
    /// Measure one-sided operations between two processes, next to bare sockets
    Rma(rma::RmaArgs),
    /// Measure what memory that is paged out costs, and what asking for it costs
    Nonresident(nonresident::NonresidentArgs),
    /// Measure network block devices, next to nbdkit and nbd-server
    Block(block::BlockArgs),
    /// Measure files in lent memory, next to tmpfs and to nbdkit under nbdfuse
    File(file::FileArgs),
    /// Measure file transfer by every method, next to a bare TCP stream, socat and rsync
    Transfer(transfer::TransferArgs),
    /// Compare ways to choose which page leaves, on traces of page accesses, by simulation
    Eviction(eviction::EvictionArgs),
    /// Compare places of pages that are chosen by what they cost with orders that are given
    Tiers(tiers::TiersArgs),
    /// Measure what a program feels when a lender is killed, stopped or cut off under it
    Failure(failure::FailureArgs),
    /// Measure programs that people use with a part of their memory local, next to all of it in RAM
    Apps(apps::AppsArgs),
    #[command(hide = true)]
    AppsKeeper(apps::KeeperArgs),
    #[command(hide = true)]
    RmaPartner(rma::PartnerArgs),
    #[command(hide = true)]
    Echo(floors::EchoArgs),
    #[command(hide = true)]
    Worker(worker::WorkerArgs),
    #[command(hide = true)]
    SwapKeeper(swap::KeeperArgs),
    #[command(hide = true)]
    Sweeper(sweeper::SweeperArgs),
}

/// Runs `netvm bench`.
///
/// # Errors
/// When a floor cannot be measured here at all (no userfaultfd, no loopback), with what to do about it.
pub fn run(args: BenchArgs) -> Result<(), Box<dyn Error>> {
    match args.which {
        Which::Fault(args) => fault::run(&args),
        Which::Swap(args) => print(&swap::run(&args)?, args.json()),
        Which::Frames { json, quick } => print(&frames::run(quick)?, json),
        Which::Rma(args) => rma::run(&args),
        Which::Nonresident(args) => nonresident::run(&args),
        Which::Block(args) => print(&block::run(&args)?, args.json()),
        Which::File(args) => print(&file::run(&args)?, args.json()),
        Which::Transfer(args) => print(&transfer::run(&args)?, args.json()),
        Which::Eviction(args) => print(&eviction::run(&args)?, args.json()),
        Which::Tiers(args) => print(&tiers::run(&args)?, args.json()),
        Which::Failure(args) => failure::run(&args),
        Which::Apps(args) => print(&apps::run(&args)?, args.json()),
        Which::AppsKeeper(args) => apps::keep(&args),
        Which::RmaPartner(args) => rma::run_partner(&args),
        Which::Echo(args) => floors::serve(&args),
        Which::Worker(args) => worker::run(&args),
        Which::SwapKeeper(args) => swap::keep(&args),
        Which::Sweeper(args) => sweeper::sweep(&args),
    }
}

fn print(rows: &[report::Row], json: bool) -> Result<(), Box<dyn Error>> {
    let mut text = Vec::new();
    if json {
        report::write_json(rows, &mut text)?;
    } else {
        report::write_table(rows, &mut text)?;
    }
    // Standard output that takes nothing is told at the end, as of all commands.
    crate::say::text(&String::from_utf8(text)?);
    Ok(())
}

/// A histogram of nanoseconds up to a minute, to three digits.
fn histogram() -> Result<hdrhistogram::Histogram<u64>, hdrhistogram::CreationError> {
    hdrhistogram::Histogram::new_with_bounds(1, 60_000_000_000, 3)
}
