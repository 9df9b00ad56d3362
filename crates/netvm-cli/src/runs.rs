//! Runs of this machine that can be watched, and how fast their counters grow. docs/design/observe.md has the whole.

use std::sync::Arc;
use std::time::Instant;

use netvm::detail::PagerDetail;
use netvm::lender::Class;
use netvm::pager::Erasure;
use netvm::runfile::RunFile;
use netvm::stats::PagerStats;

use netvm_core::observe::{Reuse, Times};

use crate::folder;

/// A run whose supervisor lives.
pub struct Run {
    pub pid: u32,
    /// The program and its arguments.
    pub command: String,
    pub lenders: String,
    /// The same, one by one.
    pub each_lender: Vec<String>,
    /// How many lenders hold each page, or how many parts of it.
    pub replicas: u64,
    pub erasure: Option<Erasure>,
    file: Arc<RunFile>,
}

/// This user's runs, the lowest process number first.
pub fn find() -> Vec<Run> {
    folder::runs().into_iter().map(|(pid, file)| Run::new(pid, file)).collect()
}

impl Run {
    pub fn new(pid: u32, file: Arc<RunFile>) -> Self {
        let params = file.params();
        let each_lender: Vec<String> = file.lender_names().iter().map(|lender| printable(lender)).collect();
        let lenders = each_lender.join(",");
        let (replicas, erasure) = (params.replicas, params.erasure);
        Self { pid, command: printable(&params.command), lenders, each_lender, replicas, erasure, file }
    }

    /// Lenders that it has lost so far.
    pub fn lost(&self) -> Vec<String> {
        self.file.lost_lenders().iter().map(|lender| printable(lender)).collect()
    }

    /// Lenders that it has left so far, as they asked for it.
    pub fn left(&self) -> Vec<String> {
        self.file.left_lenders().iter().map(|lender| printable(lender)).collect()
    }

    /// What each of its lenders lends.
    pub fn classes(&self) -> Vec<Class> {
        self.file.classes()
    }

    /// Bytes of its pages that are at lenders of each class that it has.
    pub fn held(&self, detail: &PagerDetail) -> Vec<(Class, u64)> {
        let classes = self.classes();
        let of = |class: Class| {
            let held = classes.iter().zip(detail.lender_held).filter(|&(&of, _)| of == class);
            held.map(|(_, bytes)| bytes).reduce(u64::saturating_add).map(|bytes| (class, bytes))
        };
        Class::ALL.into_iter().filter_map(of).collect()
    }

    /// How its pages are protected, and what is missing of that; nothing for a run without redundancy that has lost nobody.
    pub fn protection(&self, stats: &PagerStats) -> Option<String> {
        let (lost, replicas) = (self.lost(), self.replicas as usize);
        let kept = match self.is_complete(stats) {
            true => protection(replicas, self.erasure),
            false => copies(replicas, self.erasure),
        };
        if lost.is_empty() {
            return kept;
        }
        Some(format!(
            "{}; lost {}: {} pages copied elsewhere, {} have fewer copies or parts than they should have",
            kept.unwrap_or_else(|| "kept once".to_owned()),
            lost.join(", "),
            stats.pages_repaired,
            stats.pages_unprotected
        ))
    }

    /// Whether all pages have the copies or parts that they should have, as far as it is known.
    pub fn is_complete(&self, stats: &PagerStats) -> bool {
        let lost = self.lost().len();
        is_complete(stats, lost, self.each_lender.len(), self.replicas as usize, self.erasure)
    }

    /// Whether it goes on.
    pub fn is_alive(&self) -> bool {
        folder::goes_on(&self.file)
    }

    /// One look at it.
    pub fn look(&self) -> Look {
        Look::at(&self.file)
    }

    /// Its processes: number, name, counters.
    pub fn processes(&self) -> Vec<(u32, String, PagerStats)> {
        self.file.each_process().into_iter().map(|(pid, stats)| (pid, name(pid), stats)).collect()
    }
}

/// How pages are protected that are not local, if they are, and all copies are complete.
pub fn protection(replicas: usize, erasure: Option<Erasure>) -> Option<String> {
    let what = if erasure.is_some() { "their lenders" } else { "them" };
    let spare = erasure.map_or(replicas.saturating_sub(1), Erasure::parity);
    copies(replicas, erasure).map(|copies| format!("{copies}: any {spare} of {what} may be lost"))
}

/// Where pages are that are not local, unless they are in one place each.
pub fn copies(replicas: usize, erasure: Option<Erasure>) -> Option<String> {
    match erasure {
        Some(erasure) => Some(format!("in {erasure} parts")),
        None => (replicas > 1).then(|| format!("on {replicas} lenders each")),
    }
}

/// Whether a run that has lost so many of its lenders has all copies or parts of its pages. Where that is not known, it has not.
pub fn is_complete(
    stats: &PagerStats,
    lost: usize,
    lenders: usize,
    replicas: usize,
    erasure: Option<Erasure>,
) -> bool {
    let needed = erasure.map_or(replicas, Erasure::lenders);
    lost == 0 || (stats.pages_unprotected == 0 && stats.pages_repaired > 0 && lenders >= needed + lost)
}

/// The name of a process; its arguments may be in memory that has to be waited for.
fn name(pid: u32) -> String {
    printable(std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim())
}

/// Nobody else's text moves the cursor.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Counters at a moment.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    pub at: Instant,
    pub budget_frames: u64,
    pub stats: PagerStats,
    pub detail: PagerDetail,
}

impl Look {
    /// Now.
    pub fn at(file: &RunFile) -> Self {
        Self {
            at: Instant::now(),
            budget_frames: file.budget_frames(),
            stats: file.summary(),
            detail: file.detail(),
        }
    }
}

/// Bytes per second from and to each of `lenders` lenders, between two looks.
pub fn lender_rates(old: &Look, new: &Look, lenders: usize) -> Vec<(f64, f64)> {
    let seconds = new.at.saturating_duration_since(old.at).as_secs_f64().max(1e-9);
    let rate = |old: u64, new: u64| new.checked_sub(old).unwrap_or(new) as f64 / seconds;
    let pairs = old.detail.lenders.iter().zip(&new.detail.lenders).take(lenders);
    pairs.map(|(old, new)| (rate(old.0, new.0), rate(old.1, new.1))).collect()
}

/// What happened between two looks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rates {
    pub seconds: f64,
    /// Faults per second, and of these without I/O.
    pub faults: f64,
    pub faults_without_io: f64,
    /// Pages per second: still in local frames, touched for the first time, unpacked, from lenders.
    pub rescues: f64,
    pub zero_fills: f64,
    pub unpacked: f64,
    pub fetched: f64,
    /// Bytes per second from and to lenders.
    pub bytes_in: f64,
    pub bytes_out: f64,
    /// Mean time that faults waited for a page from a lender.
    pub fetch_us: Option<f64>,
    /// Part of the pages read ahead that was used.
    pub prefetch_hit: Option<f64>,
    /// Part of the pages that came from lenders for which no fault waited.
    pub prefetch_coverage: Option<f64>,
    /// How long reads from lenders took.
    pub reads: Times,
    /// Part of what was brought in that would have been with twice the local memory: an estimate (docs/design/observe.md).
    pub in_at_twice_local: Option<f64>,
}

impl Rates {
    pub fn between(old: &Look, new: &Look) -> Self {
        let seconds = new.at.saturating_duration_since(old.at).as_secs_f64();
        if seconds <= 0.0 {
            return Self::default();
        }
        // A counter that has become smaller is another's.
        let grown = |get: fn(&PagerStats) -> u64| {
            let (old, new) = (get(&old.stats), get(&new.stats));
            new.checked_sub(old).unwrap_or(new) as f64
        };
        let rate = |get: fn(&PagerStats) -> u64| grown(get) / seconds;
        let part = |part: f64, whole: f64| (whole > 0.0).then(|| part / whole);
        let read = grown(|stats| stats.remote_reads);
        let since = PagerStats {
            faults: grown(|stats| stats.faults) as u64,
            faults_without_io: grown(|stats| stats.faults_without_io) as u64,
            remote_reads: read as u64,
            ..PagerStats::default()
        };
        let prefetched = grown(|stats| stats.prefetched);
        Self {
            seconds,
            faults: rate(|stats| stats.faults),
            faults_without_io: rate(|stats| stats.faults_without_io),
            rescues: rate(|stats| stats.rescues),
            zero_fills: rate(|stats| stats.zero_fills),
            unpacked: rate(|stats| stats.unpacked),
            fetched: read / seconds,
            bytes_in: rate(|stats| stats.bytes_in),
            bytes_out: rate(|stats| stats.bytes_out),
            fetch_us: part(grown(|stats| stats.fetch_ns) / 1e3, read),
            prefetch_hit: part(grown(|stats| stats.prefetch_hits), prefetched).map(|hit| hit.min(1.0)),
            prefetch_coverage: since.prefetch_coverage(),
            reads: new.detail.reads.since(&old.detail.reads),
            in_at_twice_local: at_twice(&new.detail.reuse.since(&old.detail.reuse), new.budget_frames),
        }
    }

    /// A quantile of the reads, in microseconds.
    pub fn read_us(&self, share: f64) -> Option<f64> {
        self.reads.quantile_ns(share).map(|ns| ns as f64 / 1e3)
    }
}

/// With fewer pages brought in nothing is told.
const BACK_MIN: u64 = 100;

fn at_twice(reuse: &Reuse, local_pages: u64) -> Option<f64> {
    let back = reuse.back();
    (back >= BACK_MIN).then(|| reuse.back_with(local_pages) as f64 / back as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn rates_are_differences_over_the_time_between() {
        let at = Instant::now();
        let detail = PagerDetail::default();
        let look = |ms, stats| Look { at: at + Duration::from_millis(ms), budget_frames: 10, stats, detail };
        let old = PagerStats { faults: 100, remote_reads: 7, fetch_ns: 1000, ..PagerStats::default() };
        let new = PagerStats {
            faults: 300,
            remote_reads: 17,
            fetch_ns: 51_000,
            prefetched: 8,
            prefetch_hits: 2,
            ..PagerStats::default()
        };
        let rates = Rates::between(&look(0, old), &look(500, new));
        assert_eq!((rates.faults, rates.fetched, rates.fetch_us), (400.0, 20.0, Some(5.0)));
        assert_eq!(rates.prefetch_hit, Some(0.25));
        // Another run.
        let rates = Rates::between(&look(0, new), &look(1000, old));
        assert_eq!((rates.faults, rates.prefetch_hit), (100.0, None));
        assert_eq!(Rates::between(&look(0, old), &look(0, new)).faults, 0.0);
    }

    #[test]
    fn what_has_lost_a_copy_is_not_protected() {
        let stats = |pages_repaired, pages_unprotected| PagerStats {
            pages_repaired,
            pages_unprotected,
            ..PagerStats::default()
        };
        assert!(is_complete(&stats(0, 0), 0, 2, 2, None));
        assert!(!is_complete(&stats(0, 0), 1, 2, 2, None), "nobody is left for a copy");
        assert!(!is_complete(&stats(5, 0), 1, 2, 2, None));
        assert!(!is_complete(&stats(5, 1), 1, 3, 2, None));
        assert!(is_complete(&stats(5, 0), 1, 3, 2, None));
        assert_eq!(protection(2, None).unwrap(), "on 2 lenders each: any 1 of them may be lost");
        assert_eq!(copies(2, None).unwrap(), "on 2 lenders each");
        assert_eq!((protection(1, None), copies(1, None)), (None, None));
    }

    #[test]
    fn texts_of_others_move_no_cursor() {
        assert_eq!(printable("a\x1b[2Jb\n"), "a?[2Jb?");
    }
}
