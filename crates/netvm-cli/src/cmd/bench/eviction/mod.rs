//! `netvm bench eviction`: how often each way to choose what leaves would have missed, by simulation.

use std::error::Error;
use std::path::PathBuf;

use clap::Args;
use netvm::pager::read_record;
use netvm_core::residency::{Eviction, Trace};

use super::report::Row;

mod plot;

/// Arguments of `netvm bench eviction`.
#[derive(Args, Debug)]
#[command(after_help = "\
Nothing is timed here: traces of page accesses are played against each way to choose which page leaves, with so much of their pages local. The
number is the part of all accesses that does not find its page, in percent; the ratio is that to the best possible choice, which
knows the future. The pager's own choice needs to see faults only; CLOCK and S3-FIFO need accessed bits, LRU each access.

Without --trace: uniform (every page as likely), zipf (a few pages most of the time), loop (the same order, round after round), scan (zipf, and now and
then all pages once), phases (another tenth of the pages every while).

With --trace: records of `netvm run --learn FILE`. They have the faults of that run, so give it very little local memory:
  netvm run --local 4M --tier lender --learn job.record -- ./job
  netvm bench eviction --trace job.record --svg eviction.svg")]
pub struct EvictionArgs {
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// Short traces
    #[arg(long)]
    quick: bool,
    /// A record of `netvm run --learn`, instead of the built-in traces; may be given several times
    #[arg(long, value_name = "FILE")]
    trace: Vec<PathBuf>,
    /// Draw miss ratios by local memory to this SVG file
    #[arg(long = "svg", alias = "plot", value_name = "FILE", value_parser = super::picture)]
    plot: Option<PathBuf>,
}

impl EvictionArgs {
    /// Whether JSON is wanted.
    pub fn json(&self) -> bool {
        self.json
    }
}

type Failure = Box<dyn Error>;

/// Percent of the pages that are local: those of the table, and those of the picture.
const TABLE: [u64; 4] = [10, 25, 50, 75];
const PICTURE: [u64; 12] = [5, 10, 15, 20, 25, 30, 40, 50, 60, 70, 80, 90];

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From 0 to less than 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, end: u32) -> u32 {
        (self.unit() * f64::from(end)) as u32
    }

    /// The lower, the likelier, by about 1 / (n + 1).
    fn zipf(&mut self, end: u32) -> u32 {
        (f64::from(end).powf(self.unit()) as u32).min(end) - 1
    }
}

/// Which page is accessed, of the number of the access.
type Access = Box<dyn FnMut(&mut Random, u32) -> u32>;

/// A name and the pages that are accessed.
fn built_in(quick: bool) -> Vec<(String, Vec<u32>)> {
    let (pages, accesses) = if quick { (1000, 20_000) } else { (10_000, 400_000) };
    let mut random = Random(7);
    let mut trace = |name: &str, mut access: Access| {
        (name.to_owned(), (0..accesses).map(|at| access(&mut random, at)).collect())
    };
    let scan_every = pages * 6;
    vec![
        trace("uniform", Box::new(move |random, _| random.below(pages))),
        trace("zipf", Box::new(move |random, _| random.zipf(pages))),
        trace("loop", Box::new(move |_, at| at % pages)),
        trace(
            "scan",
            Box::new(move |random, at| match at % scan_every {
                page if page < pages => page,
                _ => random.zipf(pages),
            }),
        ),
        trace(
            "phases",
            Box::new(move |random, at| (at / (pages * 4) % 10) * (pages / 10) + random.below(pages / 10)),
        ),
    ]
}

/// Runs the bench.
///
/// # Errors
/// When a record cannot be read, or the picture not be written.
pub fn run(args: &EvictionArgs) -> Result<Vec<Row>, Failure> {
    let traces = match &args.trace[..] {
        [] => built_in(args.quick),
        files => {
            let name = |file: &PathBuf| {
                file.file_stem()
                    .map_or_else(|| "trace".to_owned(), |name| name.to_string_lossy().into_owned())
            };
            let read = |file: &PathBuf| Ok((name(file), read_record(file)?));
            files.iter().map(read).collect::<Result<_, Failure>>()?
        }
    };
    let mut rows = Vec::new();
    let mut curves = Vec::new();
    for (name, pages) in &traces {
        let trace = Trace::new(pages);
        if trace.is_empty() {
            return Err(
                format!("{name} has no faults: give the run that is recorded less local memory").into()
            );
        }
        let ratio = |eviction, percent: u64| {
            let frames = (trace.pages() as u64 * percent / 100).max(1) as usize;
            trace.misses(eviction, frames) as f64 / trace.len() as f64 * 100.0
        };
        for percent in TABLE {
            let best = ratio(Eviction::Optimal, percent);
            for eviction in Eviction::ALL {
                let missed = ratio(eviction, percent);
                let mut row = Row::new("eviction", format!("{name}-{percent}"), "% missed");
                row.peer = (eviction != Eviction::Spared).then(|| eviction.name());
                (row.median, row.floor, row.ratio) = (Some(missed), Some(best), Some(missed / best));
                row.n = trace.len() as u64;
                row.size_bytes = Some(trace.pages() as u64 * percent / 100 * super::PAGE_BYTES as u64);
                rows.push(row);
            }
        }
        if args.plot.is_some() {
            let curve =
                |eviction: Eviction| (eviction, PICTURE.map(|percent| (percent, ratio(eviction, percent))));
            curves.push((name.clone(), Eviction::ALL.map(curve)));
        }
    }
    if let Some(path) = &args.plot {
        plot::write(&curves, path)?;
    }
    Ok(rows)
}
