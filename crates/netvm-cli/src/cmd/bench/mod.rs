//! `netvm bench`: measurements that carry their floors with them.

use std::error::Error;
use std::io::Write;

use clap::{Args, Subcommand};

mod frames;
mod report;

/// Arguments of `netvm bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    which: Which,
}

#[derive(Subcommand, Debug)]
enum Which {
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
}

/// Runs `netvm bench`.
///
/// # Errors
/// When a floor cannot be measured here at all (no userfaultfd, no loopback), with what to do about it.
pub fn run(args: BenchArgs) -> Result<(), Box<dyn Error>> {
    match args.which {
        Which::Frames { json, quick } => print(&frames::run(quick)?, json),
    }
}

fn print(rows: &[report::Row], json: bool) -> Result<(), Box<dyn Error>> {
    let mut out = std::io::stdout().lock();
    if json {
        report::write_json(rows, &mut out)?;
    } else {
        report::write_table(rows, &mut out)?;
    }
    out.flush()?;
    Ok(())
}
