//! `netvm swap status`.

use super::super::Outcome;
use super::table::{Entry, Files, Health, InUse};
use crate::size::Size;
use clap::Args;
use serde_json::{Value, json};
use std::process::ExitCode;

/// Arguments of `netvm swap status`.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit code: 0, or 1 when a server has ended, pages are lost, or a swap cannot be read."
)]
pub struct StatusArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

struct Swap {
    number: u32,
    entry: Entry,
    served: bool,
    used: Option<InUse>,
    health: Health,
}

impl Swap {
    fn of(files: &Files) -> Result<Self, String> {
        let entry = files.entry()?;
        let (served, used) = (entry.is_served(), entry.in_use(files));
        Ok(Self { number: files.number(), served, used, health: files.health().unwrap_or_default(), entry })
    }

    fn is_well(&self) -> bool {
        self.served && self.health.lost == 0
    }

    fn state(&self) -> &'static str {
        match (self.served, self.used) {
            (true, Some(_)) if self.health.lost > 0 => "pages lost",
            (true, Some(_)) => "in use",
            (true, None) => "not in use",
            (false, Some(_)) => "server dead",
            (false, None) => "server dead, not in use",
        }
    }

    fn json(&self) -> Value {
        json!({
            "number": self.number, "state": self.state(), "device": self.entry.device, "size_bytes": self.entry.size_bytes,
            "used_bytes": self.used.map(|used| used.used_bytes), "priority": self.used.map(|used| used.priority),
            "replicas": self.entry.replicas, "by": self.entry.by, "server": { "pid": self.entry.pid, "alive": self.served },
            "lenders": self.health.lenders, "extents_degraded": self.health.degraded, "extents_lost": self.health.lost,
            "warnings": self.health.warnings,
        })
    }

    fn print(&self) {
        out!("swap       {} at {}: {}", self.number, self.entry.device.display(), self.state());
        let used = self.used.map_or(String::new(), |used| {
            format!(", {} used, priority {}", Size(used.used_bytes), used.priority)
        });
        out!("size       {}{used}", Size(self.entry.size_bytes));
        out!(
            "server     {} {}",
            self.entry.pid,
            if self.served { "alive" } else { "dead: `netvm swap off` clears up" }
        );
        for warning in &self.health.warnings {
            out!("warning    {warning}");
        }
        let copies = match (self.health.degraded, self.health.lost) {
            (0, 0) => String::new(),
            (degraded, lost) => format!("; extents with copies missing: {degraded}, with none left: {lost}"),
        };
        out!("replicas   {}{copies}", self.entry.replicas);
        for lender in &self.health.lenders {
            out!(
                "lender     {}{}",
                lender.address,
                lender.lost.as_ref().map_or(String::new(), |why| format!(" lost: {why}"))
            );
        }
    }
}

pub fn run(args: &StatusArgs) -> Outcome {
    super::on::check_root()?;
    let all = Files::all();
    // What one of them says that cannot be read does not hide the others.
    let swaps: Vec<(u32, Result<Swap, String>)> =
        all.iter().map(|files| (files.number(), Swap::of(files))).collect();
    if args.json {
        let shown = swaps.iter().map(|(number, swap)| match swap {
            Ok(swap) => swap.json(),
            Err(error) => json!({ "number": number, "state": "unreadable", "error": error }),
        });
        out!("{}", json!({ "swaps": shown.collect::<Vec<_>>() }));
    } else if swaps.is_empty() {
        out!("no swap on lent memory");
    }
    for (number, swap) in &swaps {
        match swap {
            Ok(swap) if !args.json => swap.print(),
            Ok(_) => {}
            Err(error) => tell!("netvm: swap {number} cannot be read: {error}"),
        }
    }
    let well = swaps.iter().all(|(_, swap)| swap.as_ref().is_ok_and(Swap::is_well));
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
