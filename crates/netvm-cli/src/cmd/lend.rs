//! `netvm lend`: a lender.

use super::Outcome;
use crate::machine::meminfo;
use crate::size::Size;
use clap::Args;
use netvm::lender::{Lender, LenderConfig, StopFlag};
use netvm_sys::signal::{SIGINT, SIGTERM, Signals};
use std::io::Write;
use std::process::ExitCode;

/// Arguments of `netvm lend`.
#[derive(Args, Debug)]
#[command(after_help = "\
Memory is taken from this machine only as borrowers fill it, and goes back when a borrower returns it, ends or dies.
SIGTERM: no new borrowers are taken, those that are there are served to their end. A second one stops at once.

Examples:
  netvm lend --size 8G                              for programs on this machine (127.0.0.1:7070)
  netvm lend --size 32G --listen 10.0.0.5:7070      for a trusted network
  netvm lend --size 4G --listen unix:/run/netvm     over a unix socket, faster on one machine")]
pub struct LendArgs {
    /// Most memory to lend, e.g. 8G
    #[arg(long)]
    size: Size,
    /// Address to listen at: HOST:PORT or unix:/path; may be given several times
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7070")]
    listen: Vec<String>,
    /// Use huge pages where the kernel has them
    #[arg(long)]
    hugepages: bool,
    /// Memory is lent in slabs of this size
    #[arg(long, value_name = "SIZE", default_value = "16M")]
    slab: Size,
    /// Look for requests this long before sleeping, in microseconds: lower latency, more CPU
    #[arg(long, value_name = "US", default_value_t = 0)]
    spin_us: u32,
    /// Run on this CPU only
    #[arg(long)]
    cpu: Option<usize>,
    /// End when standard input ends and the last borrower has gone
    #[arg(long, hide = true)]
    private: bool,
}

pub fn run(args: LendArgs) -> Outcome {
    check_size(args.size)?;
    let signals = Signals::block(&[SIGTERM, SIGINT]);
    if let Some(cpu) = args.cpu {
        netvm_sys::cpu::pin(cpu).map_err(|error| format!("cannot run on CPU {cpu}: {error}"))?;
    }
    let mut lender = Lender::bind(LenderConfig {
        listen: args.listen,
        size_bytes: args.size.0,
        slab_bytes: args.slab.0,
        hugepages: args.hugepages,
        private: args.private,
        parent_fd: None,
        spin_us: args.spin_us,
        verbose: !args.private,
        ..LenderConfig::default()
    })?;
    let mut out = std::io::stdout();
    for address in lender.addresses() {
        // Whoever started us may have gone; that is no reason not to serve.
        let _ = writeln!(out, "netvm: lending {} in slabs of {} at {address}", args.size, args.slab);
    }
    let _ = out.flush();
    let stop = StopFlag::new()?;
    let flag = stop.clone();
    std::thread::spawn(move || {
        loop {
            signals.wait();
            flag.stop();
        }
    });
    lender.run(&stop)?;
    Ok(ExitCode::SUCCESS)
}

/// Memory that this machine does not have cannot be lent; what others use now may come free.
fn check_size(size: Size) -> Result<(), String> {
    let all = meminfo("MemTotal").and_then(|ram| Some(ram + meminfo("SwapTotal")?));
    let available = meminfo("MemAvailable");
    match (all, available) {
        (Some(all), _) if size.0 > all => Err(format!(
            "cannot lend {size}: this machine has {} of memory in all; give a smaller --size",
            Size(all)
        )),
        (_, Some(available)) if size.0 > available => {
            eprintln!(
                "netvm: only {} of the {size} to lend are free now; borrowers fail if it stays so",
                Size(available)
            );
            Ok(())
        }
        _ => Ok(()),
    }
}
