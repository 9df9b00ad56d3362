//! `netvm bench tiers`: places chosen by what they cost, beside each order that is given once and for all. See docs/design/tiers.md.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};

use super::child::Helper;
use super::lender::Lender;
use super::report::{Row, median_and_spread};
use super::worker::{Case, Outcome};
use super::{Form, plot};
use crate::size::Size;

type Failure = Box<dyn Error>;

/// Arguments of `netvm bench tiers`.
#[derive(Args, Debug)]
#[command(after_help = "\
A program reads words of its memory, of which every other MiB shrinks to half: nine of ten in the hot part, a quarter of it, the rest anywhere. Each phase has
another hot part. An eighth of the memory is local, packed or not; the rest fits a lender whose memory is shared (near, a quarter), one
behind a delay (slow, three eighths), and a file behind a longer one.

phases: the time of an access, all phases together. netvm: as it chooses. packed-near-slow-file and so on: pages go to the first of
these that has room, and stay; without packed- nothing is packed. The floor is the best of those orders.

Before that: faults on a lender that keeps pages packed (netvm lend --compress) beside those on a plain one, over TCP on this machine, where half of each
page shrinks to nothing; lent-to-used is how much more it lends than it uses for it, books left aside.

Examples:
  netvm bench tiers --quick
  netvm bench tiers --json --svg tiers.svg --phases 4 --phase-seconds 8")]
pub struct TiersArgs {
    /// Memory that is used
    #[arg(long, default_value = "96M")]
    size: Size,
    /// How often another part becomes hot
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=16))]
    phases: u32,
    /// Length of a phase
    #[arg(long, default_value_t = 4.0)]
    phase_seconds: f64,
    /// Delay of each request to the slow lender, in microseconds
    #[arg(long, value_name = "US", default_value_t = 100)]
    slow_us: u64,
    /// Delay of each request to the file, in microseconds
    #[arg(long, value_name = "US", default_value_t = 400)]
    file_us: u64,
    /// The hot part is every fourth page, in place of a quarter of the memory in one piece
    #[arg(long)]
    scattered: bool,
    /// Only orders in which nothing is packed, or everything, besides what netvm chooses
    #[arg(long, value_name = "BOOL")]
    packed: Option<bool>,
    /// Only these orders, such as slow-near-file,packed-slow-near-file, besides what netvm chooses
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = names())]
    orders: Vec<String>,
    /// Only faults on a lender that packs, or only phases
    #[arg(long, value_enum)]
    case: Option<Part>,
    #[command(flatten)]
    form: Form,
}

impl TiersArgs {
    /// Whether JSON is wanted.
    pub fn json(&self) -> bool {
        self.form.json
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    Lender,
    Phases,
}

fn names() -> PossibleValuesParser {
    ORDERS.iter().flat_map(|(names, _)| names).copied().collect::<Vec<_>>().into()
}

/// Where pages may be, beside the local memory.
const NEAR: usize = 0;
const SLOW: usize = 1;
const FILE: usize = 2;

/// Names with and without packing, and the order.
const ORDERS: [([&str; 2], [usize; 3]); 6] = [
    (["near-slow-file", "packed-near-slow-file"], [NEAR, SLOW, FILE]),
    (["near-file-slow", "packed-near-file-slow"], [NEAR, FILE, SLOW]),
    (["slow-near-file", "packed-slow-near-file"], [SLOW, NEAR, FILE]),
    (["slow-file-near", "packed-slow-file-near"], [SLOW, FILE, NEAR]),
    (["file-near-slow", "packed-file-near-slow"], [FILE, NEAR, SLOW]),
    (["file-slow-near", "packed-file-slow-near"], [FILE, SLOW, NEAR]),
];

/// Passes bytes on to `address`, what goes there so much later: where it listens.
fn delayed(address: &str, delay: Duration) -> Result<String, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let (here, there) = (listener.local_addr()?.to_string(), address.to_owned());
    // They end with the bench.
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let Ok(far) = TcpStream::connect(&there) else { continue };
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            let (Ok(near_back), Ok(far_back)) = (near.try_clone(), far.try_clone()) else { continue };
            std::thread::spawn(move || pass(near, far, delay));
            std::thread::spawn(move || pass(far_back, near_back, Duration::ZERO));
        }
    });
    Ok(here)
}

fn pass(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
    let mut bytes = vec![0; 1 << 18];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(std::net::Shutdown::Both), to.shutdown(std::net::Shutdown::Both));
}

/// Measures all that is asked for.
///
/// # Errors
/// When a lender or the far memory cannot be had, or what is read is not what was written.
pub fn run(args: &TiersArgs) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    if args.case != Some(Part::Phases) {
        rows = packed(args)?;
    }
    if args.case == Some(Part::Lender) {
        return Ok(rows);
    }
    let mut found = vec![(None, measure(args, None)?)];
    for (names, order) in ORDERS.iter().take(if args.form.quick { 2 } else { ORDERS.len() }) {
        for (index, name) in names.iter().enumerate() {
            let packed = index == 1;
            let is_wanted = args.orders.is_empty() || args.orders.iter().any(|wanted| wanted == name);
            if is_wanted && args.packed.is_none_or(|wanted| wanted == packed) {
                found.push((Some(*name), measure(args, Some((*order, packed)))?));
            }
        }
    }
    let best = found.iter().filter(|(name, _)| name.is_some()).map(|(_, each)| mean(&times(each)));
    let best = best.min_by(f64::total_cmp);
    rows.extend(found.into_iter().map(|(name, each)| row(args, name, &each, best)));
    if let Some(path) = &args.form.svg {
        plot::of_tiers(&rows, path)?;
    }
    Ok(rows)
}

/// A fault on a lender that packs, beside one on a lender that does not, and how much more it lends than it uses.
fn packed(args: &TiersArgs) -> Result<Vec<Row>, Failure> {
    const PACKED: &str = "packed-lender";
    let bytes = size(args);
    let folder = std::env::temp_dir();
    let folder = folder.to_str().ok_or("the folder for temporary files has a strange name")?;
    // The worker ends before its lender.
    let start = |packed: bool| -> Result<(Helper, Lender), Failure> {
        let more: &[&str] = if packed { &["--compress", "--overflow", folder] } else { &[] };
        let lender = Lender::start("127.0.0.1:0", bytes * 2, more, true)?;
        let mut command =
            ["bench", "worker", "--link", "socket", "--compressible", "--tier", "lender", "--lender"]
                .map(str::to_owned)
                .to_vec();
        command.push(lender.address.clone());
        command.extend(["--local-bytes".to_owned(), (bytes / 8).max(4 << 20).to_string()]);
        command.extend(["--size-bytes".to_owned(), bytes.to_string()]);
        command.extend(["--case-ms".to_owned(), if args.form.quick { "150" } else { "1000" }.to_owned()]);
        let mut worker = Helper::start(&command, false)?;
        worker.ask("fill")?;
        Ok((worker, lender))
    };
    let mut pairs = [start(false)?, start(true)?];
    let mut rows = Vec::new();
    for case in [Case::RandomRead, Case::RandomRmw, Case::SeqRead, Case::SeqWrite] {
        let mut medians = [Vec::new(), Vec::new()];
        for _ in 0..if args.form.quick { 2 } else { 5 } {
            for ((worker, _), medians) in pairs.iter_mut().zip(&mut medians) {
                medians.push(worker.ask(case.name())?.median);
            }
        }
        let is_rate = matches!(case, Case::SeqRead | Case::SeqWrite);
        let found = medians.each_ref().map(|medians| median_and_spread(medians.as_slice()));
        let plain = found[0];
        for (index, found) in found.iter().enumerate() {
            let mut row = Row::new("tiers", case.name(), if is_rate { "GB/s" } else { "us" });
            row.peer = Some(["plain-lender", PACKED][index]);
            (row.median, row.spread) = (found.map(|found| found.0), found.map(|found| found.1));
            row.n = medians[index].len() as u64;
            if let (1, Some((plain, _)), Some((median, _))) = (index, plain, *found) {
                row.floor = Some(plain);
                row.ratio = Some(if is_rate { plain / median } else { median / plain });
            }
            rows.push(row);
        }
    }
    let status = netvm::lender::status(&pairs[1].1.address)?;
    let mut row = Row::new("tiers", "lent-to-used", "x");
    row.peer = Some(PACKED);
    row.median = Some(status.used_bytes as f64 / status.resident_bytes.max(1) as f64);
    row.n = 1;
    row.note =
        format!("{} lent in {} of memory, and books", Size(status.used_bytes), Size(status.resident_bytes));
    rows.push(row);
    Ok(rows)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// All phases take as long, so what an access took over all is a harmonic mean; what is shown is that of the time, as each phase counts.
fn row(args: &TiersArgs, name: Option<&'static str>, outcomes: &[Outcome], best: Option<f64>) -> Row {
    let each = &times(outcomes)[..];
    let mut row = Row::new("tiers", "phases", "us");
    row.peer = name;
    row.size_bytes = Some(8);
    row.median = Some(mean(each));
    row.spread = median_and_spread(each).map(|(_, spread)| spread);
    row.per_s = row.median.map(|us| 1e6 / us);
    row.floor = best;
    row.ratio = best.and_then(|best| Some(row.median? / best));
    row.n = each.len() as u64;
    let list: Vec<String> = each.iter().map(|us| format!("{us:.1}")).collect();
    row.note = format!("{} of memory, phase by phase {}", Size(size(args)), list.join(", "));
    if let Some(last) = outcomes.last()
        && last.sorted + last.pool_bytes > 0
    {
        let packed = Size(last.pool_bytes);
        row.note += &format!("; {} pages changed places, {packed} packed at the end", last.sorted);
    }
    row
}

/// Microseconds of an access in each phase.
fn times(outcomes: &[Outcome]) -> Vec<f64> {
    outcomes.iter().map(|outcome| outcome.median).collect()
}

fn size(args: &TiersArgs) -> u64 {
    if args.form.quick { 24 << 20 } else { args.size.0.next_multiple_of(8 << 20) }
}

/// What each phase took: as netvm chooses, or in this order.
fn measure(args: &TiersArgs, fixed: Option<([usize; 3], bool)>) -> Result<Vec<Outcome>, Failure> {
    let bytes = size(args);
    let seconds = if args.form.quick { 0.5 } else { args.phase_seconds };
    let folder = std::env::temp_dir();
    let folder = folder.to_str().ok_or("the folder for temporary files has a strange name")?;
    let near = Lender::start("127.0.0.1:0", bytes / 4, &[], false)?;
    let slow = Lender::start("127.0.0.1:0", bytes / 8 * 3, &[], true)?;
    let file = Lender::start("127.0.0.1:0", bytes * 2, &["--file", folder], true)?;
    let addresses = [
        near.address.clone(),
        delayed(&slow.address, Duration::from_micros(args.slow_us))?,
        delayed(&file.address, Duration::from_micros(args.file_us))?,
    ];
    let (order, tier) = match fixed {
        Some((order, packed)) => (order, if packed { "compressed" } else { "lender" }),
        None => ([NEAR, SLOW, FILE], "auto"),
    };
    let mut command: Vec<String> =
        ["bench", "worker", "--link", "auto", "--mixed", "--tier", tier].map(str::to_owned).to_vec();
    command.extend(fixed.map(|_| "--fixed-order".to_owned()));
    command.extend(args.scattered.then(|| "--scattered".to_owned()));
    command.extend(["--local-bytes".to_owned(), (bytes / 8).max(4 << 20).to_string()]);
    command.extend(["--size-bytes".to_owned(), bytes.to_string()]);
    command.extend(["--case-ms".to_owned(), ((seconds * 1000.0) as u64).to_string()]);
    command.extend(order.iter().flat_map(|&place| ["--lender".to_owned(), addresses[place].clone()]));
    let mut worker = Helper::start(&command, false)?;
    worker.ask("fill")?;
    let phase = |_| worker.ask(Case::Phases.name());
    (0..if args.form.quick { 2 } else { args.phases }).map(phase).collect()
}
