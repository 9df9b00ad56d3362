//! `netvm status`: what a lender serves.

use super::Outcome;
use super::secret::SecurityArgs;
use crate::size::Size;
use clap::Args;
use netvm::lender::BorrowOptions;
use serde_json::json;
use std::process::ExitCode;

/// Arguments of `netvm status`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  netvm status unix:/run/netvm
  netvm status big:7070 --secret key
  netvm status --json 127.0.0.1:7070")]
pub struct StatusArgs {
    /// The lender's address: HOST:PORT or unix:/path
    address: String,
    #[command(flatten)]
    security: SecurityArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &StatusArgs) -> Outcome {
    let options = BorrowOptions { security: args.security.load()?, ..BorrowOptions::default() };
    let status = netvm::lender::status_with(&args.address, &options)?;
    if args.json {
        let borrowers: Vec<_> = status
            .borrowers
            .iter()
            .map(|b| json!({ "name": b.name, "pid": b.pid, "bytes": b.bytes, "ops": b.ops, "nearby": b.nearby }))
            .collect();
        println!(
            "{}",
            json!({
                "address": args.address, "size_bytes": status.size_bytes, "used_bytes": status.used_bytes,
                "resident_bytes": status.resident_bytes,
                "slab_bytes": status.slab_bytes, "ops": status.ops, "ops_per_s": status.ops_per_s,
                "uptime_s": status.uptime.as_secs(), "draining": status.draining, "borrowers": borrowers,
                "connection": status.protection.to_string(),
            })
        );
        return Ok(ExitCode::SUCCESS);
    }
    println!("lender     {}{}", args.address, if status.draining { " (draining)" } else { "" });
    println!("connection {}", status.protection);
    println!("size       {}", Size(status.size_bytes));
    println!("lent       {} in slabs of {}", Size(status.used_bytes), Size(status.slab_bytes));
    println!("in use     {}", Size(status.resident_bytes));
    println!("operations {} ({}/s)", status.ops, status.ops_per_s);
    println!("up         {} s", status.uptime.as_secs());
    println!("borrowers  {}", status.borrowers.len());
    if !status.borrowers.is_empty() {
        println!("  {:<24} {:>8} {:>10} {:>12}", "name", "pid", "memory", "operations");
        for borrower in &status.borrowers {
            println!(
                "  {:<24} {:>8} {:>10} {:>12}{}",
                borrower.name,
                borrower.pid,
                Size(borrower.bytes).to_string(),
                borrower.ops,
                if borrower.nearby { "  and by itself: its memory is shared" } else { "" }
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}
