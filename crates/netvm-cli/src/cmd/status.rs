//! `netvm status`: what a lender serves, and what runs on lent memory here.

use super::Outcome;
use super::secret::SecurityArgs;
use crate::runs::{is_complete, printable};
use crate::size::Size;
use clap::Args;
use netvm::lender::BorrowOptions;
use serde_json::json;
use std::process::ExitCode;

/// Arguments of `netvm status`.
#[derive(Args, Debug)]
#[command(after_help = "\
Without an address: the runs of this user on this machine, how many lenders hold each page, which of them were lost, and how
many pages have been copied elsewhere since. With --json one JSON object a line for each run, and nothing when nothing runs.

Examples:
  netvm status
  netvm status unix:/run/netvm
  netvm status big:7070 --secret key
  netvm status --json 127.0.0.1:7070")]
pub struct StatusArgs {
    /// A lender's address: HOST:PORT or unix:/path
    address: Option<String>,
    #[command(flatten)]
    security: SecurityArgs,
    /// Print JSON: an object for the lender; without an address one a line for each run, none if nothing runs
    #[arg(long)]
    json: bool,
}

pub fn run(args: &StatusArgs) -> Outcome {
    let Some(address) = &args.address else {
        runs(args.json);
        return Ok(ExitCode::SUCCESS);
    };
    let options = BorrowOptions { security: args.security.load()?, ..BorrowOptions::default() };
    let status = netvm::lender::status_with(address, &options)?;
    if args.json {
        let borrowers: Vec<_> = status
            .borrowers
            .iter()
            .map(|b| {
                json!({ "name": b.name, "pid": b.pid, "bytes": b.bytes, "ops": b.ops, "nearby": b.nearby,
                "recalled_bytes": b.recalled_bytes, "cannot": b.cannot })
            })
            .collect();
        out!(
            "{}",
            json!({
                "address": address, "size_bytes": status.size_bytes, "used_bytes": status.used_bytes,
                "resident_bytes": status.resident_bytes,
                "slab_bytes": status.slab_bytes, "ops": status.ops, "ops_per_s": status.ops_per_s,
                "kernel_reads": status.kernel_reads,
                "uptime_s": status.uptime.as_secs(), "draining": status.draining, "borrowers": borrowers,
                "missing_bytes": status.missing_bytes, "stuck": status.stuck, "quota_bytes": status.quota_bytes,
                "connection": status.protection.to_string(), "class": status.class.name(),
                "memory_bytes": status.memory_bytes, "spilled_bytes": status.spilled_bytes,
            })
        );
        return Ok(ExitCode::SUCCESS);
    }
    out!("lender     {address}{}", if status.draining { " (draining)" } else { "" });
    out!("connection {}", status.protection);
    out!("lends      {}", status.class.name());
    out!("size       {}", Size(status.size_bytes));
    out!("lent       {} in slabs of {}", Size(status.used_bytes), Size(status.slab_bytes));
    out!("in use     {}", Size(status.resident_bytes));
    if status.memory_bytes > 0 {
        out!(
            "packed     into at most {} of memory, {} in a file",
            Size(status.memory_bytes),
            Size(status.spilled_bytes)
        );
    }
    if status.quota_bytes > 0 {
        out!("quota      {} for each borrower", Size(status.quota_bytes));
    }
    if status.missing_bytes > 0 {
        let stuck = if status.stuck { "; nobody else can take them" } else { "" };
        out!("short of   {}: asked back{stuck}", Size(status.missing_bytes));
    }
    out!("operations {} ({}/s)", status.ops, status.ops_per_s);
    if status.kernel_reads > 0 {
        out!("by kernel  {} more reads, of which the lender knows nothing", status.kernel_reads);
    }
    out!("up         {} s", status.uptime.as_secs());
    out!("borrowers  {}", status.borrowers.len());
    if !status.borrowers.is_empty() {
        out!("  {:<24} {:>8} {:>10} {:>12}", "name", "pid", "memory", "operations");
        for borrower in &status.borrowers {
            out!(
                "  {:<24} {:>8} {:>10} {:>12}{}",
                borrower.name,
                borrower.pid,
                Size(borrower.bytes).to_string(),
                borrower.ops,
                if borrower.nearby { "  and by itself: its memory is shared" } else { "" }
            );
            if borrower.recalled_bytes > 0 {
                let cannot = if borrower.cannot { "; it has no other place for them" } else { "" };
                out!("  {:<24} {} asked back{cannot}", "", Size(borrower.recalled_bytes));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn runs(json: bool) {
    let runs = crate::folder::runs();
    if runs.is_empty() && !json {
        out!("no program runs on lent memory here; `netvm status ADDRESS` asks a lender");
    }
    for (pid, run) in runs {
        let (params, stats, lost) = (run.params(), run.summary(), run.lost_lenders());
        let (lenders, left) = (run.lender_names(), run.left_lenders());
        if json {
            out!(
                "{}",
                json!({
                    "pid": pid, "processes": run.processes(), "budget_bytes": params.budget_bytes,
                    "local_bytes": stats.local_frames * 4096, "far_bytes": stats.far_pages * 4096,
                    "replicas": params.replicas, "erasure": params.erasure.map(|erasure| erasure.to_string()), "lenders": lenders, "lost": lost, "left": left,
                    "pages_repaired": stats.pages_repaired, "pages_unprotected": stats.pages_unprotected,
                    "pages_moved": stats.pages_moved,
                })
            );
            continue;
        }
        out!("run        of process {pid}: {} process(es) on lent memory", run.processes());
        let (local, budget) = (Size(stats.local_frames * 4096), Size(params.budget_bytes));
        out!("  memory   {} of data, {local} of it here (at most {budget})", Size(stats.far_pages * 4096));
        out!("  lenders  {}", printable(&lenders.join(", ")));
        if params.replicas > 1 {
            out!("  replicas {}", params.replicas);
        }
        if let Some(erasure) = params.erasure {
            let (lost, all) = (lost.len(), lenders.len());
            match is_complete(&stats, lost, all, params.replicas as usize, Some(erasure)) {
                true => out!("  erasure  {erasure}: any {} of the lenders may be lost", erasure.parity()),
                false => out!("  erasure  {erasure}"),
            }
        }
        if stats.pages_moved > 0 {
            out!("  moved    {} pages, whose lenders asked for their memory", stats.pages_moved);
        }
        if !left.is_empty() {
            out!("  left     {}, as they asked for it", printable(&left.join(", ")));
        }
        if !lost.is_empty() {
            out!("  lost     {}", printable(&lost.join(", ")));
            out!(
                "  repair   {} pages copied elsewhere, {} have fewer copies or parts than they should have",
                stats.pages_repaired,
                stats.pages_unprotected
            );
        }
    }
}
