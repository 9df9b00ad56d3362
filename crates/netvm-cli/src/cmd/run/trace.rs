//! A run in the trace event format of Chrome, which Perfetto reads too.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use netvm::stats::PagerStats;
use serde_json::{Value, json};

use crate::runs::{Look, Rates};

/// The file, which ends with what was added last.
pub struct Trace {
    file: BufWriter<File>,
    old: Option<Look>,
    /// When each process was first seen, and its faults then.
    processes: BTreeMap<u32, Duration>,
    last: Duration,
}

/// Counters of the whole run are under this number.
const RUN: u32 = 0;

impl Trace {
    pub fn create(path: &Path, program: &str) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("cannot write {}: {error}", path.display());
        let mut file = BufWriter::new(File::create(path).map_err(failed)?);
        let name = json!({"name": "process_name", "ph": "M", "pid": RUN, "args": {"name": format!("netvm run: {program}")}});
        write!(file, "[\n{name}").and_then(|()| file.flush()).map_err(|error| {
            // A part of a line is no trace. What was there before is gone since the file was opened.
            if path.symlink_metadata().is_ok_and(|metadata| metadata.is_file()) {
                let _ = std::fs::remove_file(path);
            }
            failed(error)
        })?;
        Ok(Self { file, old: None, processes: BTreeMap::new(), last: Duration::ZERO })
    }

    fn event(&mut self, event: &Value) -> std::io::Result<()> {
        write!(self.file, ",\n{event}")
    }

    fn counter(&mut self, at: Duration, pid: u32, name: &str, args: Value) -> std::io::Result<()> {
        self.event(&json!({"name": name, "ph": "C", "ts": at.as_micros() as u64, "pid": pid, "args": args}))
    }

    /// One look at the run and its processes, so long after its start.
    pub fn add(&mut self, at: Duration, look: &Look, processes: &[(u32, PagerStats)]) -> std::io::Result<()> {
        let mib = |pages: u64| pages as f64 / 256.0;
        let stats = &look.stats;
        if let Some(old) = &self.old {
            let rates = Rates::between(old, look);
            let faults = json!({
                "fetched": rates.fetched.round(), "unpacked": rates.unpacked.round(),
                "untouched": rates.zero_fills.round(), "still there": rates.rescues.round(),
            });
            self.counter(at, RUN, "faults/s", faults)?;
            let moved = json!({"in": rates.bytes_in / 1e6, "out": rates.bytes_out / 1e6});
            self.counter(at, RUN, "transfers, MB/s", moved)?;
            if let Some(us) = rates.fetch_us {
                self.counter(at, RUN, "wait for a page, us", json!({"mean": us}))?;
            }
            if let (Some(half), Some(most)) = (rates.read_us(0.5), rates.read_us(0.99)) {
                self.counter(at, RUN, "reads, us", json!({"p50": half, "p99": most}))?;
            }
        }
        let pages = stats.local_frames.saturating_sub(stats.pool_frames);
        self.counter(
            at,
            RUN,
            "local memory, MiB",
            json!({"pages": mib(pages), "packed": mib(stats.pool_frames)}),
        )?;
        self.counter(at, RUN, "far memory, MiB", json!({"holds": mib(stats.far_pages)}))?;
        self.old = Some(*look);
        for (pid, stats) in processes {
            if !self.processes.contains_key(pid) {
                self.processes.insert(*pid, at);
                let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                let name = format!("{} {pid}", name.trim());
                self.event(&json!({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}))?;
            }
            let memory = json!({"far": mib(stats.far_pages), "local": mib(stats.local_frames)});
            self.counter(at, *pid, "memory, MiB", memory)?;
        }
        let gone: Vec<u32> = self
            .processes
            .keys()
            .copied()
            .filter(|pid| processes.iter().all(|(other, _)| other != pid))
            .collect();
        for pid in gone {
            self.lived(pid, at)?;
        }
        self.last = at;
        // A viewer can read what is there.
        self.file.flush()
    }

    /// A bar for as long as the process used far memory.
    fn lived(&mut self, pid: u32, until: Duration) -> std::io::Result<()> {
        let Some(since) = self.processes.remove(&pid) else { return Ok(()) };
        let (ts, dur) = (since.as_micros() as u64, (until - since).as_micros() as u64);
        self.event(
            &json!({"name": "uses far memory", "ph": "X", "ts": ts, "dur": dur, "pid": pid, "tid": pid}),
        )
    }

    pub fn finish(mut self) -> std::io::Result<()> {
        for pid in self.processes.keys().copied().collect::<Vec<_>>() {
            self.lived(pid, self.last)?;
        }
        writeln!(self.file, "\n]")?;
        self.file.flush()
    }
}
