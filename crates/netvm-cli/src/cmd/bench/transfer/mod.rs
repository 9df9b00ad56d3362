//! `netvm bench transfer`: files to another process over TCP loopback, by every method, beside socat and rsync.

use std::error::Error;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::Args;
use netvm_sys::signal::die_with_parent;

use super::child::Helper;
use super::floors;
use super::report::{Row, median_and_spread};
use super::sweeper::Sweeper;

mod floor;
mod peers;
mod plot;

/// Arguments of `netvm bench transfer`.
#[derive(Args, Debug)]
#[command(after_help = "\
Files of random integers from one folder to another, `netvm send` to `netvm recv`, each side with the method of the row: ten files of 48 KB, and one
of 12 MB, 128 MiB, 512 MiB and 1 GiB. In each round every method has a turn at every size. GB/s of the whole transfer, the check of all bytes
included (--no-check does without), from the sender's first message to the receiver's last; of socat and rsync, which check nothing, from the
start of the process to its end. The floor is a bare TCP stream that nobody writes anywhere. The rows `transfer-file` are what remains of it
when bare streams are written into a new file in the same folder, one and as many as there are CPUs (2 to 4), by threads of one process, unchecked.
Before each transfer as much is written to a file there, which is removed: so none pays for memory that a hypervisor has to find first.
x2 is a file of 16 MiB or more over two connections (`netvm send --streams`); smaller ones always have one.

onesided has two rows: over TCP, and as two processes of one machine do it by themselves. device is one-sided over TCP by the kernel module netvm_mem, as
root, where it is loaded. What the file system costs is in every row: --dir
/dev/shm shows the methods, a folder on a disk shows what to expect there.

Examples:
  netvm bench transfer --quick
  netvm bench transfer --dir /dev/shm --rounds 5 --svg transfer.svg")]
pub struct TransferArgs {
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// Rounds; with --quick at most 2
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// A short run on little files
    #[arg(long)]
    quick: bool,
    /// Folder for the files [default: that of temporary files]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Without the receiver's check of all bytes
    #[arg(long)]
    no_check: bool,
    /// Draw the rates by size to this SVG file
    #[arg(long = "svg", alias = "plot", value_name = "FILE", value_parser = super::picture)]
    plot: Option<PathBuf>,
}

impl TransferArgs {
    /// Whether JSON is wanted.
    pub fn json(&self) -> bool {
        self.json
    }
}

type Failure = Box<dyn Error>;

/// How often a size is sent in a round at most: so many bytes.
const ROUND_BYTES: u64 = 48 << 20;

/// What is sent at once.
#[derive(Clone, Copy)]
struct Load {
    files: u64,
    bytes: u64,
}

impl Load {
    fn total(self) -> u64 {
        self.files * self.bytes
    }
}

const LOADS: [Load; 5] = [
    Load { files: 10, bytes: 48_000 },
    Load { files: 1, bytes: 12_000_000 },
    Load { files: 1, bytes: 128 << 20 },
    Load { files: 1, bytes: 512 << 20 },
    Load { files: 1, bytes: 1 << 30 },
];

/// A way to send.
#[derive(Clone, Copy)]
enum Way {
    /// The methods of sender and receiver, the link of one-sided writes, and connections (0 where there is no choice).
    Netvm(&'static str, &'static str, &'static str, usize),
    /// Bare streams into a new file.
    Floor(u64),
    Socat,
    Rsync,
}

/// All ways, with so many CPUs.
fn ways(cpus: usize) -> Vec<Way> {
    let streams = cpus.clamp(2, 4);
    vec![
        Way::Floor(1),
        Way::Floor(streams as u64),
        Way::Netvm("copy", "copy", "tcp", 1),
        Way::Netvm("mmap", "mmap", "tcp", 1),
        Way::Netvm("sendfile", "sendfile", "tcp", 1),
        Way::Netvm("copy", "copy", "tcp", streams),
        Way::Netvm("sendfile", "copy", "tcp", streams),
        Way::Netvm("sendfile", "sendfile", "tcp", streams),
        Way::Netvm("onesided", "copy", "tcp", 0),
        Way::Netvm("onesided", "copy", "cma", 0),
        Way::Netvm("device", "copy", "device", 0),
        Way::Socat,
        Way::Rsync,
    ]
}

/// A folder that goes with everything in it, at the latest with this process.
struct Place(PathBuf, #[expect(dead_code, reason = "removes the folder")] Sweeper);

impl Place {
    fn make(base: &Path) -> Result<Self, Failure> {
        let path = base.join(format!("netvm-bench-transfer-{}", std::process::id()));
        let sweeper = Sweeper::of_new_folder(&path)?;
        Ok(Self(path, sweeper))
    }
}

/// Files of random integers, the same every time.
fn make_files(folder: &Path, load: Load) -> Result<Vec<PathBuf>, Failure> {
    let mut paths = Vec::new();
    let mut state = load.bytes | 1;
    for file in 0..load.files {
        let path = folder.join(format!("{}-{file}", load.bytes));
        let mut out = std::io::BufWriter::with_capacity(1 << 20, File::create(&path)?);
        let mut left = load.bytes;
        while left > 0 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let take = left.min(8) as usize;
            out.write_all(&state.to_le_bytes()[..take])?;
            left -= take as u64;
        }
        out.flush().map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        paths.push(path);
    }
    Ok(paths)
}

/// A process that is ended when it is not wanted any more.
struct Running(Child);

impl Running {
    fn wait(mut self, who: &str) -> Result<(), Failure> {
        let status = self.0.wait()?;
        let mut said = String::new();
        if let Some(mut err) = self.0.stderr.take() {
            err.read_to_string(&mut said)?;
        }
        if status.success() { Ok(()) } else { Err(format!("{who} failed: {}", said.trim()).into()) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Has the system find memory for so many bytes of a file in `folder`: where a hypervisor takes back what is free, the first to write there pays
/// several times what all others do, and who comes next in a round pays nothing.
fn make_room(folder: &Path, bytes: u64) -> Result<(), Failure> {
    let path = folder.join("room");
    let block = vec![0x5A; 1 << 20];
    let mut file = File::create(&path)?;
    let mut left = bytes;
    while left > 0 {
        let step = left.min(block.len() as u64);
        file.write_all(&block[..step as usize])?;
        left -= step;
    }
    fs::remove_file(&path)?;
    Ok(())
}

/// Seconds of one transfer; `None` where this link cannot be had.
fn netvm(
    way: (&str, &str, &str, usize),
    files: &[PathBuf],
    total: u64,
    target: &Path,
    check: bool,
) -> Result<Option<f64>, Failure> {
    let program = std::env::current_exe()?;
    let (sends, receives, link, streams) = way;
    let mut command = Command::new(&program);
    command.arg("recv").arg(target).args(["--listen", "127.0.0.1:0", "--json", "--method", receives]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    // Whoever kills the bench leaves nobody behind who writes.
    die_with_parent(&mut command);
    let mut receiver = Running(command.spawn()?);
    let mut said = BufReader::new(receiver.0.stderr.take().ok_or("no output")?);
    let mut line = String::new();
    said.read_line(&mut line)?;
    let (_, address) = line.trim().rsplit_once(" at ").ok_or_else(|| format!("netvm recv: {line}"))?;
    make_room(target, total)?;
    let mut command = Command::new(&program);
    command.args(["send", "--json", "--to", address, "--method", sends]).args(files);
    command.args((!check).then_some("--no-check"));
    if streams > 0 {
        command.args(["--streams", &streams.to_string()]);
    }
    // Whether one-sided writes use that the receiver is on this machine.
    command.env("NETVM_LINK", if link == "tcp" { "socket" } else { "auto" });
    die_with_parent(&mut command);
    let done = command.stdin(Stdio::null()).output()?;
    if !done.status.success() {
        return Err(format!("netvm send: {}", String::from_utf8_lossy(&done.stderr).trim()).into());
    }
    if !receiver.0.wait()?.success() {
        let mut why = String::new();
        said.read_to_string(&mut why)?;
        return Err(format!("netvm recv: {}", why.trim()).into());
    }
    let summary: serde_json::Value = serde_json::from_slice(&done.stdout)?;
    let carried = summary["link"].as_str().unwrap_or_default();
    if !carried.is_empty() && (carried == "tcp") != (link == "tcp") {
        return Ok(None);
    }
    summary["seconds"].as_f64().map(Some).ok_or_else(|| "netvm send tells no time".into())
}

/// Whether everything arrived; and away with it.
fn take_away(files: &[PathBuf], target: &Path, compare: bool) -> Result<(), Failure> {
    for file in files {
        let arrived = target.join(file.file_name().unwrap_or_default());
        let same = arrived.metadata()?.len() == file.metadata()?.len();
        if !same || (compare && fs::read(file)? != fs::read(&arrived)?) {
            return Err(format!("{} did not arrive as it was sent", file.display()).into());
        }
        fs::remove_file(&arrived)?;
    }
    Ok(())
}

/// Runs the bench.
///
/// # Errors
/// When a transfer of netvm's own fails, or files arrive changed.
pub fn run(args: &TransferArgs) -> Result<Vec<Row>, Failure> {
    let place = Place::make(&args.dir.clone().unwrap_or_else(std::env::temp_dir))?;
    let (source, target) = (place.0.join("source"), place.0.join("target"));
    fs::create_dir(&source)?;
    fs::create_dir(&target)?;
    let loads = if args.quick { &LOADS[..2] } else { &LOADS[..] };
    let rounds = args.rounds.clamp(1, if args.quick { 2 } else { usize::MAX });
    let mut ways = Vec::new();
    let cpus = std::thread::available_parallelism()?.get();
    for way in self::ways(cpus) {
        match peers::missing(way) {
            None => ways.push(way),
            Some(name) => tell!("netvm bench transfer: no rows for {name}: not here"),
        }
    }
    let files = loads.iter().map(|load| make_files(&source, *load)).collect::<Result<Vec<_>, Failure>>()?;
    let mut echo = Helper::start(&["bench".to_owned(), "echo".to_owned()], false)?;
    let address = echo.line()?;
    let bar = indicatif::ProgressBar::new((rounds * loads.len() * ways.len()) as u64);
    let mut streams = Vec::new();
    let mut rates = vec![vec![Vec::new(); loads.len()]; ways.len()];
    for round in 0..rounds {
        streams
            .push(floors::stream(&address, Duration::from_millis(if args.quick { 60 } else { 500 }))?.median);
        for (index, load) in loads.iter().enumerate() {
            for turn in 0..ways.len() {
                // Nobody always comes after the same other.
                let which = (turn + round) % ways.len();
                let times = (ROUND_BYTES / load.total()).clamp(1, 5);
                for _ in 0..times {
                    if !matches!(ways[which], Way::Netvm(..)) {
                        make_room(&target, load.total())?;
                    }
                    let seconds = match ways[which] {
                        Way::Netvm(sends, receives, link, streams) => {
                            let way = (sends, receives, link, streams);
                            netvm(way, &files[index], load.total(), &target, !args.no_check)
                        }
                        Way::Floor(streams) => {
                            let rate = floor::into_file(&target, load.total(), streams)?;
                            rates[which][index].push(rate);
                            continue;
                        }
                        Way::Socat => peers::socat(&files[index], &target).map(Some),
                        Way::Rsync => peers::rsync(&files[index], &target, &place.0).map(Some),
                    }?;
                    take_away(&files[index], &target, round == 0)?;
                    rates[which][index].extend(seconds.map(|seconds| load.total() as f64 / seconds / 1e9));
                }
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    echo.finish();
    let floor = median_and_spread(&streams).map(|(floor, _)| floor);
    let mut rows = Vec::new();
    for (index, load) in loads.iter().enumerate() {
        for (way, rates) in ways.iter().zip(&rates) {
            rows.push(row(*way, *load, &rates[index], floor));
        }
    }
    if let Some(path) = &args.plot {
        plot::write(&rows, path)?;
    }
    Ok(rows)
}

/// What carries the bytes, as rows name it.
fn over(link: &str, streams: u64) -> String {
    if streams > 1 { format!("{link}-x{streams}") } else { link.to_owned() }
}

fn row(way: Way, load: Load, rates: &[f64], floor: Option<f64>) -> Row {
    let (case, link, peer) = match way {
        Way::Netvm(method, receives, link, streams) => {
            let receives = if method == "sendfile" && receives == "copy" { "-copy" } else { "" };
            (format!("transfer-{method}{receives}"), over(link, streams as u64), None)
        }
        Way::Floor(streams) => ("transfer-file".to_owned(), over("tcp", streams), Some("bare")),
        Way::Socat => ("transfer-copy".to_owned(), "tcp".to_owned(), Some("socat")),
        Way::Rsync => ("transfer-copy".to_owned(), "tcp".to_owned(), Some("rsync")),
    };
    let mut row = Row::new("transfer", case, "GB/s");
    (row.link, row.peer, row.size_bytes) = (Some(link.into()), peer, Some(load.total()));
    (row.n, row.floor) = (rates.len() as u64, floor);
    if let Some((median, spread)) = median_and_spread(rates) {
        (row.median, row.spread) = (Some(median), Some(spread));
        row.per_s = Some(median * 1e9 / load.total() as f64);
    }
    if let (Some(median), Some(floor)) = (row.median, floor) {
        row.ratio = Some(floor / median);
    }
    if rates.is_empty() {
        row.note = "processes may not write into each other here".to_owned();
    } else if load.files > 1 {
        row.note = format!("{} files", load.files);
    }
    row
}
