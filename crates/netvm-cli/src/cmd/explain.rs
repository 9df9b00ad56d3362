//! What `netvm run --explain` says: what each place for a page cost in this run, what was chosen, and what more local memory would save.

use crate::size::Size;
use netvm::detail::{LENDERS_COUNTED, PagerDetail};
use netvm::lender::Class;
use netvm::pager::{FaultPath, WakeCosts};
use netvm::stats::PagerStats;
use netvm_core::observe::Reuse;
use serde_json::{Value, json};
use std::fmt::Write as _;

const PAGE_BYTES: u64 = 4096;

/// One place where pages were.
struct Place {
    name: &'static str,
    /// Pages that went there.
    evicted: u64,
    /// Pages that came from there.
    brought_in: u64,
    /// Microseconds for each, if measured.
    evict_us: Option<f64>,
    bring_in_us: Option<f64>,
    /// Bytes of local memory for each page there.
    local_bytes: Option<f64>,
}

/// Who served faults, and what decided it.
pub fn faults(wanted: FaultPath) -> String {
    let why = match wanted {
        FaultPath::Auto => format!("auto: {}", WakeCosts::of_this_machine()),
        _ => "as asked for".to_owned(),
    };
    format!("netvm: fault path {} ({why})\n", wanted.resolved())
}

/// The same for a program.
pub fn faults_to_json(wanted: FaultPath) -> Value {
    let mut object = json!({ "wanted": wanted.to_string(), "path": wanted.resolved().to_string() });
    if wanted == FaultPath::Auto {
        let costs = WakeCosts::of_this_machine();
        (object["wake_same_cpu_ns"], object["wake_other_cpu_ns"]) =
            (json!(costs.same_cpu_ns), json!(costs.other_cpu_ns));
    }
    object
}

fn each_us(ns: u64, pages: u64) -> Option<f64> {
    (pages > 0 && ns > 0).then(|| ns as f64 / pages as f64 / 1000.0)
}

fn places(stats: &PagerStats) -> [Place; 3] {
    [
        Place {
            name: "one word, zero",
            evicted: stats.filled + stats.zero_drops,
            brought_in: 0,
            evict_us: None,
            bring_in_us: None,
            local_bytes: Some(0.0),
        },
        Place {
            name: "packed",
            evicted: stats.packed,
            brought_in: stats.unpacked,
            evict_us: each_us(stats.pack_ns, stats.pack_tries),
            bring_in_us: each_us(stats.unpack_ns, stats.unpacked + stats.spilled),
            local_bytes: (stats.packed > 0).then(|| stats.packed_bytes as f64 / stats.packed as f64),
        },
        Place {
            name: "lender",
            evicted: stats.remote_writes + stats.clean_drops,
            brought_in: stats.remote_reads,
            evict_us: None,
            bring_in_us: each_us(stats.fetch_ns, stats.remote_reads),
            local_bytes: Some(0.0),
        },
    ]
}

/// Most of the local memory that held packed pages.
fn share(stats: &PagerStats, local_bytes: u64) -> f64 {
    (stats.pool_frames_peak * PAGE_BYTES) as f64 / local_bytes.max(1) as f64
}

fn verdict(stats: &PagerStats, local_bytes: u64) -> String {
    if stats.remote_reads + stats.unpacked == 0 {
        return "nothing had to be brought in".into();
    }
    let size = Size(stats.pool_frames_peak * PAGE_BYTES);
    if stats.pool_frames_peak > 0 {
        return format!(
            "packed pages had up to {size} ({:.0} %) of the local memory; their part was changed {} times",
            100.0 * share(stats, local_bytes),
            stats.pool_changes
        );
    }
    match stats.incompressible {
        0 => "no page was packed: fetching costs less".into(),
        tried => format!("no page was packed: fetching costs less, or they do not shrink ({tried} did not)"),
    }
}

/// The table that is printed.
pub fn table(stats: &PagerStats, local_bytes: u64) -> String {
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
    let mut text = format!(
        "netvm: {:<16}{:>12}{:>12}{:>12}{:>12}{:>14}\n",
        "place", "evicted", "brought in", "evict us", "bring in us", "local bytes"
    );
    for place in places(stats) {
        let _ = writeln!(
            text,
            "netvm: {:<16}{:>12}{:>12}{:>12}{:>12}{:>14}",
            place.name,
            place.evicted,
            place.brought_in,
            number(place.evict_us),
            number(place.bring_in_us),
            number(place.local_bytes),
        );
    }
    if let Some(wake) = each_us(stats.wake_ns, stats.wakes) {
        let _ = writeln!(text, "netvm: a fault itself took {wake:.1} us more, wherever its page was");
    }
    let _ = writeln!(text, "netvm: {}", verdict(stats, local_bytes));
    text
}

/// The same for `--json`.
pub fn to_json(stats: &PagerStats) -> Value {
    let places: Vec<Value> = places(stats)
        .iter()
        .map(|place| {
            json!({
                "place": place.name,
                "evicted": place.evicted,
                "brought_in": place.brought_in,
                "evict_us": place.evict_us,
                "bring_in_us": place.bring_in_us,
                "local_bytes_each": place.local_bytes,
            })
        })
        .collect();
    json!({
        "places": places,
        "fault_us": each_us(stats.wake_ns, stats.wakes),
        "pool_bytes": stats.pool_frames_peak * PAGE_BYTES,
        "pool_changes": stats.pool_changes,
    })
}

/// Local memory to foretell for, in quarters of what there was.
const QUARTERS: [u64; 7] = [5, 6, 8, 12, 16, 24, 32];

/// More local memory, and bytes that would have been brought in with it: the first line is what was, the last one of less than a hundredth
/// of that. Nothing where nothing was brought in.
fn with_more(reuse: &Reuse, local_bytes: u64) -> Vec<(u64, u64)> {
    let back = reuse.back();
    if back == 0 {
        return Vec::new();
    }
    let mut lines = vec![(local_bytes, back * PAGE_BYTES)];
    for quarters in QUARTERS {
        let more = (local_bytes / 4).saturating_mul(quarters - 4);
        let left = reuse.back_with(more / PAGE_BYTES);
        lines.push((local_bytes.saturating_add(more), left * PAGE_BYTES));
        if left < back / 100 {
            break;
        }
    }
    lines
}

/// The table of it.
pub fn more_local(reuse: &Reuse, local_bytes: u64) -> String {
    let lines = with_more(reuse, local_bytes);
    let mut text = String::new();
    let Some(&(_, now)) = lines.first() else { return text };
    let _ = writeln!(text, "netvm: {:<16}{:>12}", "with --local", "MiB in");
    for (at, &(local, bytes)) in lines.iter().enumerate() {
        let share = 100.0 * bytes as f64 / now as f64;
        let remark = if at == 0 { ", as it was" } else { ", estimated" };
        let _ = writeln!(
            text,
            "netvm: {:<16}{:>12}  {share:.0} %{remark}",
            format!("{}M", local >> 20),
            bytes >> 20
        );
    }
    text
}

/// The same for `--json`.
pub fn more_local_to_json(reuse: &Reuse, local_bytes: u64) -> Value {
    let line = |&(local, bytes): &(u64, u64)| json!({ "local_bytes": local, "bytes_in": bytes });
    with_more(reuse, local_bytes).iter().map(line).collect()
}

/// What each of several lenders cost; nothing for one alone, which the other table has.
pub fn lenders(detail: &PagerDetail, names: &[String], classes: &[Class]) -> String {
    let mut text = String::new();
    if names.len() < 2 {
        return text;
    }
    let is_shared = |lender: &Lender<'_>| lender.reads == 0 && lender.bytes_in > 0;
    let any_shared = each_lender(detail, names, classes).any(|lender| is_shared(&lender));
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).clamp(16, 48);
    let _ = writeln!(
        text,
        "netvm: {:<width$}{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}",
        "lender", "lends", "timed reads", "us each", "MiB in", "MiB out", "most MiB"
    );
    for Lender { name, class, reads, us, bytes_in, bytes_out, held_peak } in
        each_lender(detail, names, classes)
    {
        let us = us.map_or("-".to_owned(), |us| format!("{us:.1}"));
        let _ = writeln!(
            text,
            "netvm: {name:<width$}{class:>12}{reads:>12}{us:>12}{:>12}{:>12}{:>12}",
            bytes_in >> 20,
            bytes_out >> 20,
            held_peak >> 20
        );
    }
    if any_shared {
        let _ = writeln!(
            text,
            "netvm: what comes straight out of memory that a lender shares is in \"MiB in\", and is not timed"
        );
    }
    text
}

struct Lender<'a> {
    name: &'a str,
    /// What it lends.
    class: &'static str,
    /// Those of which the time was taken.
    reads: u64,
    /// Microseconds for each.
    us: Option<f64>,
    bytes_in: u64,
    bytes_out: u64,
    /// The most that it held.
    held_peak: u64,
}

fn each_lender<'a>(
    detail: &'a PagerDetail,
    names: &'a [String],
    classes: &'a [Class],
) -> impl Iterator<Item = Lender<'a>> {
    names.iter().zip(classes).enumerate().take(LENDERS_COUNTED).map(|(index, (name, class))| {
        let class = class.name();
        let ((bytes_in, bytes_out), (reads, ns)) = (detail.lenders[index], detail.lender_reads[index]);
        let held_peak = detail.lender_held_peak[index];
        Lender { name, class, reads, us: each_us(ns, reads), bytes_in, bytes_out, held_peak }
    })
}

/// The same for `--json`.
pub fn lenders_to_json(detail: &PagerDetail, names: &[String], classes: &[Class]) -> Value {
    let lender = |Lender { name, class, reads, us, bytes_in, bytes_out, held_peak }| json!({ "lender": name, "class": class, "reads": reads, "read_us": us, "bytes_in": bytes_in, "bytes_out": bytes_out, "held_bytes_peak": held_peak });
    each_lender(detail, names, classes).map(lender).collect()
}
