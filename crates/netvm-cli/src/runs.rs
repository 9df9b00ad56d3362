//! Runs of this machine that can be watched, and how fast their counters grow. docs/design/observe.md has the whole.

use std::sync::Arc;
use std::time::Instant;

use netvm::runfile::RunFile;
use netvm::stats::PagerStats;

use crate::folder;

/// A run whose supervisor lives.
pub struct Run {
    pub pid: u32,
    /// The program and its arguments.
    pub command: String,
    pub lenders: String,
    file: Arc<RunFile>,
}

/// This user's runs, the lowest process number first.
pub fn find() -> Vec<Run> {
    folder::runs().into_iter().map(|(pid, file)| Run::new(pid, file)).collect()
}

impl Run {
    fn new(pid: u32, file: Arc<RunFile>) -> Self {
        let params = file.params();
        let lenders = if params.private_lender > 0 { "private" } else { &params.lenders };
        let lenders = printable(lenders);
        Self { pid, command: command(pid), lenders, file }
    }

    /// Whether it goes on.
    pub fn is_alive(&self) -> bool {
        self.file.is_supervised()
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

/// What follows `--` in the supervisor's arguments.
fn command(pid: u32) -> String {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = String::from_utf8_lossy(&words);
    let mut words: Vec<&str> = words.split_terminator('\0').collect();
    if let Some(end) = words.iter().position(|&word| word == "--") {
        words.drain(..=end);
    }
    printable(&words.join(" "))
}

/// The name of a process; its arguments may be in memory that has to be waited for.
fn name(pid: u32) -> String {
    printable(std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim())
}

/// Nobody else's text moves the cursor.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Counters at a moment.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    pub at: Instant,
    pub budget_frames: u64,
    pub stats: PagerStats,
}

impl Look {
    /// Now.
    pub fn at(file: &RunFile) -> Self {
        Self { at: Instant::now(), budget_frames: file.budget_frames(), stats: file.summary() }
    }
}

/// What happened between two looks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rates {
    pub seconds: f64,
    /// Faults per second, and of these: without I/O, of untouched pages, unpacked, from lenders.
    pub faults: f64,
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
        let prefetched = grown(|stats| stats.prefetched);
        Self {
            seconds,
            faults: rate(|stats| stats.faults),
            rescues: rate(|stats| stats.rescues),
            zero_fills: rate(|stats| stats.zero_fills),
            unpacked: rate(|stats| stats.unpacked),
            fetched: read / seconds,
            bytes_in: rate(|stats| stats.bytes_in),
            bytes_out: rate(|stats| stats.bytes_out),
            fetch_us: part(grown(|stats| stats.fetch_ns) / 1e3, read),
            prefetch_hit: part(grown(|stats| stats.prefetch_hits), prefetched).map(|hit| hit.min(1.0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn rates_are_differences_over_the_time_between() {
        let at = Instant::now();
        let look = |ms, stats| Look { at: at + Duration::from_millis(ms), budget_frames: 10, stats };
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
    fn texts_of_others_move_no_cursor() {
        assert_eq!(printable("a\x1b[2Jb\n"), "a?[2Jb?");
        assert!(!command(std::process::id()).is_empty());
    }
}
