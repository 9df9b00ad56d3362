//! `netvm metrics`: the runs of this machine for Prometheus.

use std::fmt::Write;
use std::process::ExitCode;

use clap::Args;
use netvm::stats::PagerStats;
use netvm_core::observe::Times;
use tiny_http::{Header, Method, Response, Server};

use super::Outcome;
use crate::runs::{self, Look, Run};

/// Arguments of `netvm metrics`.
#[derive(Args, Debug)]
#[command(after_help = "\
Serves counters of all runs of this user at /metrics. There is no authentication: whoever can connect sees
the programs' arguments, so it listens on loopback unless told otherwise.

Examples:
  netvm metrics &                                  then: curl http://127.0.0.1:9477/metrics
  netvm metrics --print                            print them once
  scrape_configs: [{job_name: netvm, static_configs: [{targets: ['127.0.0.1:9477']}]}]")]
pub struct MetricsArgs {
    /// Where to listen
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9477")]
    listen: String,
    /// Print them to standard output, once, and end
    #[arg(long)]
    print: bool,
}

/// Requests of other lengths are not for us.
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

pub fn run(args: &MetricsArgs) -> Outcome {
    if args.print {
        crate::say::text(&text(&runs::find()));
        return Ok(ExitCode::SUCCESS);
    }
    // What is no address at all would be told in the words of a library.
    let port = args.listen.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
    if port.is_none_or(|port| port.parse::<u16>().is_err()) {
        return Err(format!(
            "cannot listen at {}: give HOST:PORT, as 127.0.0.1:9477; metrics go over TCP only",
            args.listen
        )
        .into());
    }
    let server = Server::http(&args.listen).map_err(|error| {
        format!("cannot listen at {}: {error}; choose another --listen address, or --print", args.listen)
    })?;
    out!("metrics at http://{}/metrics", server.server_addr());
    let header: Header = format!("Content-Type: {CONTENT_TYPE}").parse().map_err(|()| "no header")?;
    for request in server.incoming_requests() {
        let is_get = matches!(request.method(), Method::Get | Method::Head);
        let response = match request.url().split('?').next() {
            Some("/metrics") if is_get => {
                Response::from_string(text(&runs::find())).with_header(header.clone())
            }
            Some("/") if is_get => Response::from_string("netvm: see /metrics\n"),
            _ => Response::from_string("not here: see /metrics\n").with_status_code(404),
        };
        // Whoever has gone does not want it.
        let _ = request.respond(response);
    }
    Ok(ExitCode::SUCCESS)
}

/// All runs in the text format, version 0.0.4.
fn text(runs: &[Run]) -> String {
    let looks: Vec<_> = runs.iter().map(|run| (labels(run), run.look(), run.processes().len())).collect();
    let mut text = String::new();
    let mut add = |name: &str, kind: &str, help: &str, values: Vec<(&str, u64)>| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in values {
            let _ = writeln!(text, "{name}{{{labels}}} {value}");
        }
    };
    for (field, (name, help)) in PagerStats::NAMES.iter().zip(PagerStats::HELP).enumerate() {
        let is_gauge = PagerStats::is_gauge(name) || name.ends_with("_peak");
        let (full, kind) = match is_gauge {
            true => (format!("netvm_run_{name}"), "gauge"),
            false => (format!("netvm_run_{name}_total"), "counter"),
        };
        let values =
            looks.iter().map(|(labels, look, _)| (labels.as_str(), look.stats.values()[field])).collect();
        add(&full, kind, help.trim(), values);
    }
    let full = "netvm_run_read_seconds";
    let _ = writeln!(text, "# HELP {full} How long reads from lenders took.\n# TYPE {full} histogram");
    for (labels, look, _) in &looks {
        histogram(&mut text, full, labels, &look.detail.reads);
    }
    for (name, help, get) in LENDER_COUNTERS {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
        for (run, (labels, look, _)) in runs.iter().zip(&looks) {
            for (lender, moved) in run.each_lender.iter().zip(&look.detail.lenders) {
                let _ = writeln!(text, "{name}{{{labels},lender=\"{}\"}} {}", escaped(lender), get(moved));
            }
        }
    }
    held(&mut text, runs, &looks);
    let mut add = |name: &str, kind: &str, help: &str, values: Vec<(&str, u64)>| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in values {
            let _ = writeln!(text, "{name}{{{labels}}} {value}");
        }
    };
    let budget = looks.iter().map(|(labels, look, _)| (labels.as_str(), look.budget_frames)).collect();
    add("netvm_run_budget_frames", "gauge", "Local frames that the run may use (4096 bytes each).", budget);
    let processes = looks.iter().map(|(labels, _, processes)| (labels.as_str(), *processes as u64)).collect();
    add("netvm_run_processes", "gauge", "Processes of the run that use far memory.", processes);
    text
}

/// What lenders hold: one by one, and by what they lend.
fn held(text: &mut String, runs: &[Run], looks: &[(String, Look, usize)]) {
    let name = "netvm_run_lender_held_bytes";
    let _ =
        writeln!(text, "# HELP {name} Bytes of pages that each lender holds, each copy and part counted.");
    let _ = writeln!(text, "# TYPE {name} gauge");
    for (run, (labels, look, _)) in runs.iter().zip(looks) {
        let lenders = run.each_lender.iter().zip(run.classes()).zip(look.detail.lender_held);
        for ((lender, class), bytes) in lenders {
            let (lender, class) = (escaped(lender), class.name());
            let _ = writeln!(text, "{name}{{{labels},lender=\"{lender}\",class=\"{class}\"}} {bytes}");
        }
    }
    let name = "netvm_run_held_bytes";
    let _ = writeln!(text, "# HELP {name} Bytes of pages at lenders of each class.\n# TYPE {name} gauge");
    for (run, (labels, look, _)) in runs.iter().zip(looks) {
        for (class, bytes) in run.held(&look.detail) {
            let _ = writeln!(text, "{name}{{{labels},class=\"{}\"}} {bytes}", class.name());
        }
    }
}

/// A name, what it is, and the bytes read from or written to a lender.
type LenderCounter = (&'static str, &'static str, fn(&(u64, u64)) -> u64);
const LENDER_COUNTERS: [LenderCounter; 2] = [
    ("netvm_run_lender_read_bytes_total", "Bytes read from each lender.", |moved| moved.0),
    ("netvm_run_lender_written_bytes_total", "Bytes written to each lender.", |moved| moved.1),
];

/// Buckets for each doubling, cumulative; the sum is that of the buckets' ends, so up to a quarter too high.
fn histogram(text: &mut String, name: &str, labels: &str, times: &Times) {
    let (mut count, mut sum_ns) = (0u64, 0f64);
    for (bucket, counted) in times.counts().iter().enumerate() {
        count = count.saturating_add(*counted);
        sum_ns += *counted as f64 * Times::end_ns(bucket) as f64;
        if bucket % 4 == 3 {
            let end = Times::end_ns(bucket) as f64 / 1e9;
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{end}\"}} {count}");
        }
    }
    let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
    let _ = writeln!(text, "{name}_sum{{{labels}}} {}", sum_ns / 1e9);
    let _ = writeln!(text, "{name}_count{{{labels}}} {count}");
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn labels(run: &Run) -> String {
    format!("pid=\"{}\",command=\"{}\"", run.pid, escaped(&run.command))
}
