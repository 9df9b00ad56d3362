//! `netvm bench file`: files in lent memory, on tmpfs, and on nbdkit's memory under nbdfuse.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use netvm::device::{self, AttachOptions, Source};
use netvm::security::Security;
use netvm_sys::mapping::Mapping;
use rustix::fs::{Advice, fadvise};

use super::block::{Ended, find, netvm};
use super::child::Helper;
use super::floors;
use super::report::{Row, median_and_spread, percentile};
use super::sweeper::Sweeper;
use crate::folder::Folder;

/// Arguments of `netvm bench file`.
#[derive(Args, Debug)]
#[command(after_help = "\
Needs root, to mount. In each round every file system has a turn at every case, on one file; whoever waits sleeps.

file-seq-write: the file is written anew, 1 MiB at a time, and synced; file-seq-write-cached: until the last write has returned. file-seq: it is read, 1 MiB at a time, after the page cache has dropped it: each
byte comes from the lender. file-seq-cached: once more, from the page cache. In GB/s; the floor is one bare TCP stream.
file-rand: reads of 4 KiB at random; file-mmap: page faults at random on a mapping of the file; in us, without the page cache. The floor is a bare round
trip of 16 bytes there and 4 KiB back.

What has the word device in its row is one of the kernel module netvm_mem, when that is loaded, with a lender of its own.

tmpfs keeps its files in the page cache itself: its rows show what the kernel costs. nbdfuse has rows when it and nbdkit are installed.")]
pub struct FileArgs {
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// Rounds; with --quick at most 2
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// A short run on a small file
    #[arg(long)]
    quick: bool,
    /// Draw the rows to this SVG file
    #[arg(long = "svg", alias = "plot", value_name = "FILE", value_parser = super::picture)]
    plot: Option<std::path::PathBuf>,
}

impl FileArgs {
    /// Whether JSON is wanted.
    pub fn json(&self) -> bool {
        self.json
    }
}

type Failure = Box<dyn Error>;

const CASES: [&str; 6] =
    ["file-seq-write", "file-seq-write-cached", "file-seq", "file-seq-cached", "file-rand", "file-mmap"];
const STEP: usize = 1 << 20;
const PAGE: usize = 4096;

fn is_bandwidth(case: &str) -> bool {
    case.starts_with("file-seq")
}

/// A file under test.
struct Place {
    peer: Option<&'static str>,
    lender: Option<&'static str>,
    file: PathBuf,
    /// They end with this, in this order.
    _mount: Option<Mounted>,
    _device: Option<Device>,
    _processes: Ended,
    _sweeper: Option<Sweeper>,
}

/// A device of the kernel module, which is detached with this.
struct Device(u32);

impl Drop for Device {
    fn drop(&mut self) {
        if let Err(error) = device::detach(self.0, true) {
            tell!("netvm bench file: {error}");
        }
    }
}

/// Something mounted by a process that is not told to end by a terminal, but by the end of its input, and so of this process.
#[derive(Debug)]
pub(super) struct Mounted {
    keeper: Child,
}

/// The second argument is the folder, what follows the command.
const KEEPER: &str =
    "at=$1; shift; \"$@\" & m=$!; read x; umount \"$at\" 2>/dev/null || umount -l \"$at\"; wait $m";

impl Mounted {
    pub(super) fn start(at: &Path, command: &[String]) -> Result<Self, Failure> {
        let mut keeper = Command::new("/bin/sh");
        // As if the lender were on another machine.
        keeper.args(["-c", KEEPER, "sh"]).arg(at).args(command).env("NETVM_LINK", "socket").process_group(0);
        let keeper = keeper.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()?;
        Ok(Self { keeper })
    }

    /// Its first line.
    fn line(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        BufReader::new(self.keeper.stdout.as_mut().ok_or("no output")?).read_line(&mut line)?;
        Ok(line)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

fn ours(folder: &Folder, size: u64, lender: &'static str) -> Result<Place, Failure> {
    let unix = lender == "lender unix";
    let name = if unix { "unix" } else { "tcp" };
    let listen =
        if unix { format!("unix:{}", folder.file("lender").display()) } else { "127.0.0.1:0".to_owned() };
    let bytes = (size + (16 << 20)).next_multiple_of(16 << 20).to_string();
    let (lend, address) = netvm(&["lend", "--size", &bytes, "--listen", &listen], "socket")?;
    let processes = Ended(vec![lend]);
    let at = folder.file(name);
    fs::create_dir(&at)?;
    let program = std::env::current_exe()?.display().to_string();
    let command = [&program, "mount", &at.display().to_string(), "--size", &bytes, "--lender", &address]
        .map(str::to_owned);
    let mut mount = Mounted::start(&at, &command)?;
    if !mount.line()?.contains("mounted") {
        return Err("netvm mount did not start".into());
    }
    Ok(Place {
        peer: None,
        lender: Some(lender),
        file: at.join("file"),
        _mount: Some(mount),
        _device: None,
        _processes: processes,
        _sweeper: None,
    })
}

fn of_kernel(size: u64) -> Result<Place, Failure> {
    if !Path::new(netvm_sys::device::CONTROL).exists() {
        return Err("the kernel module netvm_mem is not loaded".into());
    }
    let bytes = (size + (16 << 20)).to_string();
    let (lend, address) = netvm(&["lend", "--size", &bytes, "--listen", "127.0.0.1:0"], "socket")?;
    let processes = Ended(vec![lend]);
    let attached = device::attach(&AttachOptions {
        address,
        source: Source::Lender { bytes: size },
        read_only: false,
        board_key: None,
        security: Security::default(),
    })?;
    Ok(Place {
        peer: None,
        lender: Some("lender tcp, device"),
        file: attached.path(),
        _mount: None,
        _device: Some(Device(attached.number)),
        _processes: processes,
        _sweeper: None,
    })
}

fn tmpfs() -> Result<Place, Failure> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let is_tmpfs = |line: &str| line.split(' ').skip(1).take(2).eq(["/dev/shm", "tmpfs"]);
    if !mounts.lines().any(is_tmpfs) {
        return Err("/dev/shm is no tmpfs".into());
    }
    let file = Path::new("/dev/shm").join(format!("netvm-bench-file-{}", std::process::id()));
    let sweeper = Some(Sweeper::start(&file)?);
    Ok(Place {
        peer: Some("tmpfs"),
        lender: None,
        file,
        _mount: None,
        _device: None,
        _processes: Ended(Vec::new()),
        _sweeper: sweeper,
    })
}

fn nbdfuse(folder: &Folder, size: u64) -> Result<Place, Failure> {
    let (nbdfuse, nbdkit) = (
        find("nbdfuse").ok_or("nbdfuse is not installed")?,
        find("nbdkit").ok_or("nbdkit is not installed")?,
    );
    let at = folder.file("nbdfuse");
    fs::create_dir(&at)?;
    let file = at.join("file");
    let size = size.to_string();
    let (nbdfuse, nbdkit, path) =
        (nbdfuse.display().to_string(), nbdkit.display().to_string(), file.display().to_string());
    let command = [&nbdfuse, &path, "--command", &nbdkit, "-s", "memory", &size].map(str::to_owned);
    let mount = Mounted::start(&at, &command)?;
    let deadline = Instant::now() + Duration::from_secs(10);
    while !file.exists() {
        if Instant::now() > deadline {
            return Err("nbdfuse did not start".into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(Place {
        peer: Some("nbdfuse"),
        lender: None,
        file,
        _mount: Some(mount),
        _device: None,
        _processes: Ended(Vec::new()),
        _sweeper: None,
    })
}

/// The first eight bytes of a page: where it is, and in which round it was written.
fn mark(offset: u64, round: u64) -> u64 {
    (offset ^ round << 48).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1
}

impl Place {
    fn open(&self) -> Result<File, Failure> {
        let create = self._device.is_none();
        Ok(OpenOptions::new().read(true).write(true).create(create).truncate(false).open(&self.file)?)
    }

    /// GB/s.
    fn write(&self, size: u64, round: u64, sync: bool) -> Result<f64, Failure> {
        let file = self.open()?;
        let mut step = vec![round as u8; STEP];
        let start = Instant::now();
        for offset in (0..size).step_by(STEP) {
            for page in 0..STEP / PAGE {
                let at = page * PAGE;
                step[at..at + 8].copy_from_slice(&mark(offset + at as u64, round).to_ne_bytes());
            }
            file.write_all_at(&step, offset)?;
        }
        if sync {
            file.sync_all()?;
        }
        let rate = size as f64 / start.elapsed().as_secs_f64() / 1e9;
        // What comes next finds nothing to be written.
        file.sync_all()?;
        Ok(rate)
    }

    /// GB/s.
    fn read(&self, size: u64, round: u64, cold: bool) -> Result<f64, Failure> {
        let file = self.open()?;
        if cold {
            fadvise(&file, 0, None, Advice::DontNeed)?;
        }
        let mut step = vec![0; STEP];
        let start = Instant::now();
        for offset in (0..size).step_by(STEP) {
            file.read_exact_at(&mut step, offset)?;
            for page in (0..STEP).step_by(PAGE) {
                check(&step[page..page + 8], offset + page as u64, round)?;
            }
        }
        Ok(size as f64 / start.elapsed().as_secs_f64() / 1e9)
    }

    /// Microseconds of each read, or of each page fault.
    fn random(&self, size: u64, round: u64, time: Duration, mapped: bool) -> Result<Vec<f64>, Failure> {
        let file = self.open()?;
        fadvise(&file, 0, None, Advice::DontNeed)?;
        fadvise(&file, 0, None, Advice::Random)?;
        let mapping = mapped.then(|| Mapping::of_device(&file, size, false)).transpose()?;
        if let Some(mapping) = &mapping {
            mapping.expect_random()?;
        }
        let pages = size / PAGE as u64;
        // Each page once, in an order that jumps about.
        let stride = (pages as f64 * 0.618) as u64 | 1;
        let (mut times, mut page, mut bytes) = (Vec::new(), round * 7 % pages, [0; PAGE]);
        let start = Instant::now();
        while start.elapsed() < time && (times.len() as u64) < pages / 2 {
            page = (page + stride) % pages;
            let offset = page * PAGE as u64;
            let begun = Instant::now();
            match &mapping {
                Some(mapping) => {
                    mapping.shared().read_into(offset as usize, &mut bytes[..8]).ok_or("a page is gone")?;
                }
                None => file.read_exact_at(&mut bytes, offset)?,
            }
            times.push(begun.elapsed().as_secs_f64() * 1e6);
            check(&bytes[..8], offset, round)?;
        }
        Ok(times)
    }
}

fn check(bytes: &[u8], offset: u64, round: u64) -> Result<(), Failure> {
    if bytes == mark(offset, round).to_ne_bytes() {
        return Ok(());
    }
    Err(format!("what was read at {offset} is not what was written there").into())
}

#[derive(Clone, Default)]
struct Measured {
    medians: Vec<f64>,
    all: Vec<f64>,
    n: u64,
}

/// Runs the bench.
///
/// # Errors
/// When netvm's own mounts cannot be made, or anything reads what was not written.
pub fn run(args: &FileArgs) -> Result<Vec<Row>, Failure> {
    let (size, time): (u64, _) = match args.quick {
        true => (16 << 20, Duration::from_millis(60)),
        false => (256 << 20, Duration::from_millis(400)),
    };
    let rounds = args.rounds.clamp(1, if args.quick { 2 } else { usize::MAX });
    let folder = Folder::create()?;
    let mut places = vec![ours(&folder, size, "lender tcp")?, ours(&folder, size, "lender unix")?];
    let others = [("device", of_kernel(size)), ("tmpfs", tmpfs()), ("nbdfuse", nbdfuse(&folder, size))];
    for (name, place) in others {
        match place {
            Ok(place) => places.push(place),
            Err(error) => tell!("netvm bench file: no rows for {name}: {error}"),
        }
    }
    let mut echo = Helper::start(&["bench".to_owned(), "echo".to_owned()], false)?;
    let echo_address = echo.line()?;
    let (mut trips, mut streams) = (Vec::new(), Vec::new());
    let mut measured = vec![vec![Measured::default(); CASES.len()]; places.len()];
    for round in 1..=rounds as u64 {
        trips.push(floors::round_trip(&echo_address, false, time)?.median);
        streams.push(floors::stream(&echo_address, time)?.median);
        for (place, measured) in places.iter().zip(&mut measured) {
            for (case, measured) in CASES.iter().zip(measured) {
                let result = match *case {
                    "file-seq-write" => place.write(size, round, true).map(|rate| vec![rate]),
                    "file-seq-write-cached" => place.write(size, round, false).map(|rate| vec![rate]),
                    "file-seq" => place.read(size, round, true).map(|rate| vec![rate]),
                    "file-seq-cached" => place.read(size, round, false).map(|rate| vec![rate]),
                    "file-rand" => place.random(size, round, time, false),
                    _ => place.random(size, round, time, true),
                };
                let mut values =
                    result.map_err(|error| format!("{} {case}: {error}", place.peer.unwrap_or("netvm")))?;
                measured.n += values.len() as u64 * if is_bandwidth(case) { size / STEP as u64 } else { 1 };
                measured.medians.extend(percentile(&mut values, 0.5));
                measured.all.append(&mut values);
            }
        }
    }
    echo.finish();
    let floor = |values: &[f64]| median_and_spread(values).map(|(floor, _)| floor);
    let mut rows = Vec::new();
    for (index, case) in CASES.iter().enumerate() {
        for (place, measured) in places.iter().zip(&mut measured) {
            let measured = &mut measured[index];
            let bandwidth = is_bandwidth(case);
            let mut row = Row::new("file", *case, if bandwidth { "GB/s" } else { "us" });
            (row.placement, row.peer, row.n) = (place.lender, place.peer, measured.n);
            row.size_bytes = Some(if bandwidth { STEP } else { PAGE } as u64);
            if let Some((median, spread)) = median_and_spread(&measured.medians) {
                (row.median, row.spread) = (Some(median), Some(spread));
            }
            row.p99 = (!bandwidth).then(|| percentile(&mut measured.all, 0.99)).flatten();
            row.floor = if bandwidth { floor(&streams) } else { floor(&trips) };
            if let (Some(median), Some(floor)) = (row.median, row.floor) {
                row.ratio = Some(if bandwidth { floor / median } else { median / floor });
            }
            rows.push(row);
        }
    }
    // What is still there is unmounted before the folder goes.
    drop(places);
    std::io::stdout().flush()?;
    if let Some(path) = &args.plot {
        super::plot::by_unit(&rows, path, "Files")?;
    }
    Ok(rows)
}
