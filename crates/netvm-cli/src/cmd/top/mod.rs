//! `netvm top`: what runs on this machine do with lent memory.

mod view;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde_json::json;

use super::Outcome;
use crate::runs::{self, Look, Rates, Run, lender_rates};
use crate::size::Size;

/// Arguments of `netvm top`.
#[derive(Args, Debug)]
#[command(after_help = "\
On a terminal: a live view; arrows choose a run, q ends. Otherwise one look of --interval seconds at all runs.

Examples:
  netvm top
  netvm top --once --interval 5
  netvm top --json | jq .faults_per_s
  netvm top --pid 4711                the run of this `netvm run` only")]
pub struct TopArgs {
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    interval: f64,
    /// Print one look and end
    #[arg(long)]
    once: bool,
    /// Print one look as JSON, one object per run
    #[arg(long)]
    json: bool,
    /// Only the run of this `netvm run`
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

fn interval(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is no number of seconds"))?;
    if (0.05..=3600.0).contains(&seconds) { Ok(seconds) } else { Err("give 0.05 to 3600 seconds".to_owned()) }
}

/// Runs of the machine that are asked for.
fn find(pid: Option<u32>) -> Vec<Run> {
    let mut runs = runs::find();
    runs.retain(|run| pid.is_none_or(|pid| run.pid == pid));
    runs
}

pub fn run(args: &TopArgs) -> Outcome {
    let interval = Duration::from_secs_f64(args.interval);
    let draws = std::env::var_os("TERM").is_some_and(|terminal| terminal != "dumb");
    if std::io::stdout().is_terminal() && draws && !args.once && !args.json {
        view::show(interval, args.pid)?;
        return Ok(ExitCode::SUCCESS);
    }
    let runs = find(args.pid);
    if let (Some(pid), true) = (args.pid, runs.is_empty()) {
        return Err(format!("process {pid} is no `netvm run` that goes on, or not one of yours").into());
    }
    let old: Vec<Look> = runs.iter().map(Run::look).collect();
    if !runs.is_empty() {
        std::thread::sleep(interval);
    }
    let looks: Vec<_> = runs.iter().map(Run::look).collect();
    for ((run, old), new) in runs.iter().zip(&old).zip(&looks) {
        let rates = Rates::between(old, new);
        if args.json {
            out!("{}", to_json(run, old, new, &rates));
        } else {
            crate::say::text(&to_text(run, old, new, &rates));
        }
    }
    if runs.is_empty() && !args.json {
        out!("no program runs on lent memory (of this user's)");
    }
    Ok(ExitCode::SUCCESS)
}

const PAGE_BYTES: u64 = 4096;

fn pages(count: u64) -> String {
    Size(count.saturating_mul(PAGE_BYTES)).to_string()
}

fn rate(bytes: f64) -> String {
    format!("{:.1} MB/s", bytes / 1e6)
}

fn to_text(run: &Run, old: &Look, look: &Look, rates: &Rates) -> String {
    let stats = &look.stats;
    let mut text = format!(
        "run {} ({})\n  lenders    {}\n  faults     {:.0}/s, {:.0} of them without I/O; pages a second: {:.0} fetched, {:.0} unpacked, {:.0} touched for the first time, {:.0} still there\n",
        run.pid,
        run.command,
        run.lenders,
        rates.faults,
        rates.faults_without_io,
        rates.fetched,
        rates.unpacked,
        rates.zero_fills,
        rates.rescues
    );
    let fetch =
        rates.fetch_us.map_or_else(|| "nothing fetched".to_owned(), |us| format!("{us:.1} us a page"));
    let ahead = ahead(rates).map_or_else(String::new, |ahead| format!("; {ahead}"));
    text += &format!("  waiting    {fetch}{ahead}\n");
    if let Some(reads) = reads(rates) {
        text += &format!("  reads      {reads}\n");
    }
    text += &format!("  transfers  {} in, {} out\n", rate(rates.bytes_in), rate(rates.bytes_out));
    text += &format!(
        "  memory     {} far; {} of {} local, of which {} hold {} packed\n",
        pages(stats.far_pages),
        pages(stats.local_frames),
        pages(look.budget_frames),
        pages(stats.pool_frames),
        pages(stats.pool_pages),
    );
    if let Some(more) = more(rates) {
        text += &format!("  more       {more}\n");
    }
    text += &format!("  lent       {}\n", held(run, look));
    if let Some(protection) = run.protection(stats) {
        text += &format!("  pages      {protection}\n");
    }
    let left = run.left();
    if !left.is_empty() {
        text += &format!("  left       {}: {} pages moved\n", left.join(", "), stats.pages_moved);
    }
    if run.each_lender.len() > 1 {
        let rates = lender_rates(old, look, run.each_lender.len());
        let held = look.detail.lender_held.map(|bytes| Size(bytes).to_string());
        for ((lender, (bytes_in, bytes_out)), held) in run.each_lender.iter().zip(rates).zip(held) {
            let (bytes_in, bytes_out) = (rate(bytes_in), rate(bytes_out));
            text += &format!("    {lender:<24} {bytes_in:>12} in {bytes_out:>12} out {held:>12} lent\n");
        }
    }
    for (pid, name, stats) in run.processes() {
        text += &format!(
            "    {pid:>8} {name:<16} {:>9} far {:>9} local {:>12} faults\n",
            pages(stats.far_pages),
            pages(stats.local_frames),
            stats.faults
        );
    }
    text
}

/// What more local memory is good for.
fn more(rates: &Rates) -> Option<String> {
    let part = rates.in_at_twice_local?;
    Some(format!("twice as much local would leave about {:.0} % of what comes in", 100.0 * part))
}

/// What is at lenders of each class.
fn held(run: &Run, look: &Look) -> String {
    let held = run.held(&look.detail).into_iter();
    held.map(|(class, bytes)| format!("{} {}", Size(bytes), class.name())).collect::<Vec<_>>().join(", ")
}

/// The quantiles that people ask for.
fn reads(rates: &Rates) -> Option<String> {
    let us = |share| rates.read_us(share).map(micros);
    Some(format!("half within {}, 99 % within {}, all within {}", us(0.5)?, us(0.99)?, us(1.0)?))
}

/// A time in a unit that fits.
fn micros(us: f64) -> String {
    match us {
        10_000.0.. => format!("{:.0} ms", us / 1e3),
        1_000.0.. => format!("{:.1} ms", us / 1e3),
        100.0.. => format!("{us:.0} us"),
        _ => format!("{us:.1} us"),
    }
}

fn to_json(run: &Run, old: &Look, look: &Look, rates: &Rates) -> serde_json::Value {
    let stats = &look.stats;
    let processes: Vec<_> = run
        .processes()
        .into_iter()
        .map(|(pid, name, stats)| {
            json!({
                "pid": pid, "name": name, "faults": stats.faults,
                "far_bytes": stats.far_pages.saturating_mul(PAGE_BYTES),
                "local_bytes": stats.local_frames.saturating_mul(PAGE_BYTES),
            })
        })
        .collect();
    let lenders: Vec<_> = run
        .each_lender
        .iter()
        .zip(lender_rates(old, look, run.each_lender.len()))
        .zip(run.classes().into_iter().zip(look.detail.lender_held))
        .map(|((lender, (bytes_in, bytes_out)), (class, held))| {
            json!({"lender": lender, "in_bytes_per_s": bytes_in, "out_bytes_per_s": bytes_out,
                "class": class.name(), "held_bytes": held})
        })
        .collect();
    let held = run.held(&look.detail).into_iter();
    let held: serde_json::Map<_, _> =
        held.map(|(class, bytes)| (class.name().to_owned(), bytes.into())).collect();
    json!({
        "pid": run.pid, "command": run.command, "lenders": run.lenders, "seconds": rates.seconds,
        "faults_per_s": rates.faults, "faults_without_io_per_s": rates.faults_without_io, "fetched_per_s": rates.fetched, "unpacked_per_s": rates.unpacked,
        "zero_fills_per_s": rates.zero_fills, "rescues_per_s": rates.rescues,
        "in_bytes_per_s": rates.bytes_in, "out_bytes_per_s": rates.bytes_out,
        "read_us_p50": rates.read_us(0.5), "read_us_p99": rates.read_us(0.99), "each_lender": lenders,
        "fetch_us_mean": rates.fetch_us, "prefetch_hit_ratio": rates.prefetch_hit, "prefetch_coverage": rates.prefetch_coverage,
        "far_bytes": stats.far_pages.saturating_mul(PAGE_BYTES),
        "local_bytes": stats.local_frames.saturating_mul(PAGE_BYTES),
        "in_ratio_at_twice_local": rates.in_at_twice_local,
        "budget_bytes": look.budget_frames.saturating_mul(PAGE_BYTES),
        "pool_bytes": stats.pool_frames.saturating_mul(PAGE_BYTES),
        "held_bytes": held,
        "packed_pages_bytes": stats.pool_pages.saturating_mul(PAGE_BYTES),
        "processes": processes, "replicas": run.replicas,
        "erasure": run.erasure.map(|erasure| erasure.to_string()), "lost": run.lost(), "left": run.left(),
        "pages_moved": stats.pages_moved,
        "pages_repaired": stats.pages_repaired, "pages_unprotected": stats.pages_unprotected,
    })
}
/// How good prefetch is: how much of what it read was used, and how much of what came it has brought.
fn ahead(rates: &Rates) -> Option<String> {
    let used = rates.prefetch_hit.map(|hit| format!("{:.0} % of what was read ahead was used", hit * 100.0));
    let covered = rates.prefetch_coverage.map(|part| format!("{:.0} % of reads before faults", part * 100.0));
    let parts: Vec<String> = used.into_iter().chain(covered).collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}
