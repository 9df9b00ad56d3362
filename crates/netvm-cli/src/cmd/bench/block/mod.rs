//! `netvm bench block`: network block devices in memory: netvm's on a lender, nbdkit's and nbd-server's in their own.

use std::error::Error;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;

mod device;

use super::child::Helper;
use super::floors;
use super::report::{Row, median_and_spread, percentile};
use crate::folder::Folder;

/// Arguments of `netvm bench block`.
#[derive(Args, Debug)]
#[command(after_help = "\
Over TCP loopback; whoever waits sleeps. In each round every server has a turn at every case.

nbd-4k-qd1: random reads and writes of 4 KiB, one at a time; the floor is a bare round trip of 16 bytes there and 4 KiB back.
nbd-4k-qd16: sixteen at a time, in microseconds for each. nbd-128k-qd4: reads of 128 KiB in order, four at a time, in GB/s;
the floor is one bare TCP stream.

netvm's server is between client and lender. With the lender on another machine (\"lender tcp\", where it is only asked over TCP) it pays two network
round trips where the others, whose memory is their own, pay one; with a lender on its own host (\"lender nearby\") it pays one, too.
nbdkit and nbd-server have rows when they are installed (packages nbdkit and nbd-server).

--device measures block devices that are there, past the page cache, instead of servers: disk-4k-qd1 and so on, several at a time by one thread
and an io_uring, or, where the kernel has none, by a thread for each. What is on them is overwritten. Of a ublk or nbd.ko disk on lent memory, each operation pays for its way to the lender, too.

Examples:
  netvm bench block --svg block.svg
  netvm bench block --device /dev/ublkb0 --device /dev/nbd0 --overwrite")]
pub struct BlockArgs {
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
    /// Rounds; with --quick at most 2
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Measure this block device, as root; may be given several times
    #[arg(long, value_name = "PATH", requires = "overwrite")]
    device: Vec<PathBuf>,
    /// What is on the devices is lost
    #[arg(long, requires = "device")]
    overwrite: bool,
    /// Time of a turn at a case, in milliseconds [default: 400; short: 60]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=600_000))]
    case_ms: Option<u64>,
    /// A short run on a small device
    #[arg(long)]
    quick: bool,
    /// Draw the rows to this SVG file
    #[arg(long = "svg", alias = "plot", value_name = "FILE", value_parser = super::picture)]
    plot: Option<std::path::PathBuf>,
}

type Failure = Box<dyn Error>;

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    bytes: usize,
    depth: usize,
    writes: bool,
    in_order: bool,
}

const CASES: [Case; 5] = [
    Case { name: "nbd-4k-qd1", bytes: 4096, depth: 1, writes: false, in_order: false },
    Case { name: "nbd-4k-qd1-write", bytes: 4096, depth: 1, writes: true, in_order: false },
    Case { name: "nbd-4k-qd16", bytes: 4096, depth: 16, writes: false, in_order: false },
    Case { name: "nbd-4k-qd16-write", bytes: 4096, depth: 16, writes: true, in_order: false },
    Case { name: "nbd-128k-qd4", bytes: 128 << 10, depth: 4, writes: false, in_order: true },
];

impl Case {
    fn is_bandwidth(&self) -> bool {
        self.in_order
    }
}

/// A server under test, which ends with this.
struct Server {
    name: &'static str,
    peer: Option<&'static str>,
    lender: Option<&'static str>,
    #[expect(dead_code, reason = "they end with this")]
    processes: Ended,
    disk: Disk,
}

/// Processes that are killed with this, and so if what follows fails.
#[derive(Debug)]
pub(super) struct Ended(pub(super) Vec<Child>);

fn ended_with(child: Child) -> Ended {
    Ended(vec![child])
}

impl Drop for Ended {
    fn drop(&mut self) {
        for process in self.0.iter_mut().rev() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A client of the simple kind: no structured replies, one connection.
struct Disk {
    out: TcpStream,
    input: BufReader<TcpStream>,
    cookie: u64,
}

const REPLY_BYTES: usize = 16;

impl Disk {
    fn connect(address: &str, export: &str, size: u64) -> Result<Self, Failure> {
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut stream = loop {
            match TcpStream::connect(address) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => return Err(error.into()),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        stream.write_all(&[&3u32.to_be_bytes()[..], b"IHAVEOPT", &1u32.to_be_bytes()].concat())?;
        stream.write_all(&[&(export.len() as u32).to_be_bytes()[..], export.as_bytes()].concat())?;
        let mut about = [0; 10];
        stream.read_exact(&mut about)?;
        let [size_bytes @ .., _, _] = about;
        if u64::from_be_bytes(size_bytes) < size {
            return Err(format!("the device at {address} is too small").into());
        }
        let input = BufReader::with_capacity(1 << 20, stream.try_clone()?);
        Ok(Self { out: stream, input, cookie: 0 })
    }

    fn request(&mut self, batch: &mut Vec<u8>, writes: bool, offset: u64, bytes: usize) {
        self.cookie += 1;
        batch.extend(0x2560_9513u32.to_be_bytes());
        batch.extend([0, 0, 0, u8::from(writes)]);
        batch.extend(self.cookie.to_be_bytes());
        batch.extend(offset.to_be_bytes());
        batch.extend((bytes as u32).to_be_bytes());
    }

    fn reply(&mut self) -> Result<u64, Failure> {
        let mut head = [0; REPLY_BYTES];
        self.input.read_exact(&mut head)?;
        let [m0, m1, m2, m3, e0, e1, e2, e3, cookie @ ..] = head;
        if [m0, m1, m2, m3] != 0x6744_6698u32.to_be_bytes() || [e0, e1, e2, e3] != [0; 4] {
            return Err("the server refuses a request".into());
        }
        Ok(u64::from_be_bytes(cookie))
    }

    /// Writes at every 4 KiB where it is.
    fn fill(&mut self, size: u64) -> Result<(), Failure> {
        const STEP: u64 = 1 << 20;
        for start in (0..size).step_by(STEP as usize) {
            let mut batch = Vec::new();
            self.request(&mut batch, true, start, STEP as usize);
            for block in (start..start + STEP).step_by(4096) {
                batch.extend(block.to_be_bytes());
                batch.resize(batch.len() + 4088, block as u8 | 1);
            }
            self.out.write_all(&batch)?;
            self.reply()?;
        }
        Ok(())
    }

    /// Microseconds of each operation, and how long all took.
    fn run(
        &mut self,
        case: Case,
        size: u64,
        time: Duration,
        seed: &mut u64,
    ) -> Result<(Vec<f64>, f64), Failure> {
        let blocks = size / case.bytes as u64;
        let mut next = 0;
        let mut place = move |seed: &mut u64| {
            *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            next += 1;
            (if case.in_order { next } else { *seed >> 33 }) % blocks * case.bytes as u64
        };
        let mut data = vec![0; case.bytes];
        let mut times = Vec::new();
        let mut sent: Vec<(u64, u64, Instant)> = Vec::new();
        let start = Instant::now();
        let mut batch = Vec::new();
        loop {
            let now = Instant::now();
            let over = now - start > time;
            while sent.len() < case.depth && !over {
                let offset = place(seed);
                self.request(&mut batch, case.writes, offset, case.bytes);
                if case.writes {
                    data[..8].copy_from_slice(&offset.to_be_bytes());
                    batch.extend(&data);
                }
                sent.push((self.cookie, offset, now));
            }
            self.out.write_all(&batch)?;
            batch.clear();
            if sent.is_empty() {
                return Ok((times, start.elapsed().as_secs_f64()));
            }
            // One answer, and those that have come with it.
            loop {
                let cookie = self.reply()?;
                let index =
                    sent.iter().position(|(sent, ..)| *sent == cookie).ok_or("an answer to nothing")?;
                let (_, offset, since) = sent.swap_remove(index);
                if !case.writes {
                    self.input.read_exact(&mut data)?;
                    if data[..8] != offset.to_be_bytes() {
                        return Err(format!("what was read at {offset} is not what was written there").into());
                    }
                }
                times.push(since.elapsed().as_secs_f64() * 1e6);
                let whole = REPLY_BYTES + if case.writes { 0 } else { case.bytes };
                if sent.is_empty() || self.input.buffer().len() < whole {
                    break;
                }
            }
        }
    }
}

/// Starts a command and returns what follows ` at ` in its first line.
pub(super) fn netvm(arguments: &[&str], link: &str) -> Result<(Child, String), Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(arguments).env("NETVM_LINK", link);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().ok_or("no output")?).read_line(&mut line)?;
    match line.trim().rsplit_once(" at ") {
        Some((_, address)) => Ok((child, address.to_owned())),
        None => {
            let mut why = String::new();
            child.stderr.take().ok_or("no output")?.read_to_string(&mut why)?;
            Err(format!("netvm {} did not start: {}", arguments[0], why.trim()).into())
        }
    }
}

fn ours(size: u64, lender: &'static str, link: &str) -> Result<Server, Failure> {
    let bytes = size.to_string();
    let (lend, address) = netvm(&["lend", "--size", &bytes, "--listen", "127.0.0.1:0"], link)?;
    let mut processes = ended_with(lend);
    let (server, address) =
        netvm(&["nbd", "--size", &bytes, "--lender", &address, "--listen", "127.0.0.1:0"], link)?;
    processes.0.push(server);
    let disk = Disk::connect(&address, "", size)?;
    Ok(Server { name: "netvm", peer: None, lender: Some(lender), processes, disk })
}

fn free_port() -> Result<u16, Failure> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A program in PATH.
pub(super) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|path| path.exists())
}

fn nbdkit(program: &Path, size: u64) -> Result<Server, Failure> {
    let port = free_port()?.to_string();
    let mut command = Command::new(program);
    command.args(["-f", "-i", "127.0.0.1", "-p", &port, "memory", &size.to_string()]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
    let processes = ended_with(child);
    let disk = Disk::connect(&format!("127.0.0.1:{port}"), "", size)?;
    Ok(Server { name: "nbdkit", peer: Some("nbdkit memory"), lender: None, processes, disk })
}

fn nbd_server(program: &Path, folder: &Folder, size: u64) -> Result<Server, Failure> {
    let port = free_port()?.to_string();
    // In memory, if anything is.
    let file = folder.file("disk");
    fs::File::create(&file)?.set_len(size)?;
    let config = folder.file("nbd-server.conf");
    let export = file.display();
    fs::write(
        &config,
        format!("[generic]\nlistenaddr=127.0.0.1\nport={port}\n[disk]\nexportname={export}\n"),
    )?;
    let mut command = Command::new(program);
    command.arg("-d").arg("-C").arg(&config).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn()?;
    let processes = ended_with(child);
    let disk = Disk::connect(&format!("127.0.0.1:{port}"), "disk", size)?;
    Ok(Server { name: "nbd-server", peer: Some("nbd-server"), lender: None, processes, disk })
}

/// The other side of the floors, and its address.
fn echo() -> Result<(Helper, String), Failure> {
    let mut echo = Helper::start(&["bench".to_owned(), "echo".to_owned()], false)?;
    let address = echo.line()?;
    Ok((echo, address))
}

/// What was measured of each of those that have a turn, by case.
struct Series {
    trips: Vec<f64>,
    streams: Vec<f64>,
    medians: Vec<Vec<Vec<f64>>>,
    all: Vec<Vec<Vec<f64>>>,
    rates: Vec<Vec<Vec<f64>>>,
}

impl Series {
    fn new(count: usize) -> Self {
        let empty = vec![vec![Vec::new(); CASES.len()]; count];
        let (trips, streams) = (Vec::new(), Vec::new());
        Self { trips, streams, medians: empty.clone(), all: empty.clone(), rates: empty }
    }

    /// A turn: microseconds of each operation, and seconds of all.
    fn add(&mut self, number: usize, index: usize, mut times: Vec<f64>, seconds: f64) {
        let case = &CASES[index];
        let rate = times.len() as f64 / seconds;
        self.medians[number][index].push(match (case.is_bandwidth(), case.depth) {
            (true, _) => rate * case.bytes as f64 / 1e9,
            (false, 1) => percentile(&mut times, 0.5).unwrap_or(0.0),
            // What one costs while others are on their way.
            (false, _) => 1e6 / rate,
        });
        self.rates[number][index].push(rate);
        self.all[number][index].append(&mut times);
    }

    fn row(&mut self, number: usize, index: usize, name: String) -> Row {
        let case = &CASES[index];
        let mut row = Row::new("block", name, if case.is_bandwidth() { "GB/s" } else { "us" });
        row.size_bytes = Some(case.bytes as u64);
        row.n = self.all[number][index].len() as u64;
        row.per_s = median_and_spread(&self.rates[number][index]).map(|(rate, _)| rate);
        (row.median, row.spread) = median_and_spread(&self.medians[number][index]).unzip();
        row.p99 = (case.depth == 1).then(|| percentile(&mut self.all[number][index], 0.99)).flatten();
        row.floor = match (case.is_bandwidth(), case.depth) {
            (true, _) => median_and_spread(&self.streams).map(|(floor, _)| floor),
            (false, 1) => median_and_spread(&self.trips).map(|(floor, _)| floor),
            _ => None,
        };
        if let (Some(median), Some(floor)) = (row.median, row.floor) {
            row.ratio = Some(if case.is_bandwidth() { floor / median } else { median / floor });
        }
        row
    }
}

/// Runs the bench.
///
/// # Errors
/// When netvm's own servers cannot be started, or read what was not written.
pub fn run(args: &BlockArgs) -> Result<Vec<Row>, Failure> {
    let (size, time) = match args.quick {
        true => (16 << 20, Duration::from_millis(60)),
        false => (256 << 20, Duration::from_millis(400)),
    };
    let time = args.case_ms.map_or(time, Duration::from_millis);
    let rounds = args.rounds.clamp(1, if args.quick { 2 } else { usize::MAX });
    if !args.device.is_empty() {
        let rows = device::run(&args.device, size, time, rounds)?;
        if let Some(path) = &args.plot {
            super::plot::by_unit(&rows, path, "Block device")?;
        }
        return Ok(rows);
    }
    let folder = Folder::create()?;
    let mut servers = vec![ours(size, "lender nearby", "shm")?, ours(size, "lender tcp", "socket")?];
    let mut rows = Vec::new();
    for (program, start) in [("nbdkit", 0), ("nbd-server", 1)] {
        let started = match find(program) {
            None => Err("not installed".into()),
            Some(path) if start == 0 => nbdkit(&path, size),
            Some(path) => nbd_server(&path, &folder, size),
        };
        match started {
            Ok(server) => servers.push(server),
            Err(error) => tell!("netvm bench block: no rows for {program}: {error}"),
        }
    }
    for server in &mut servers {
        server.disk.fill(size).map_err(|error| format!("{}: {error}", server.name))?;
    }
    let (echo, echo_address) = echo()?;
    let mut series = Series::new(servers.len());
    let mut seed = 1;
    for _ in 0..rounds {
        series.trips.push(floors::round_trip(&echo_address, false, time)?.median);
        series.streams.push(floors::stream(&echo_address, time)?.median);
        for (number, server) in servers.iter_mut().enumerate() {
            for (index, case) in CASES.iter().enumerate() {
                let run = server.disk.run(*case, size, time, &mut seed);
                let (times, seconds) = run.map_err(|error| format!("{}: {error}", server.name))?;
                series.add(number, index, times, seconds);
            }
        }
    }
    echo.finish();
    for (index, case) in CASES.iter().enumerate() {
        for (number, server) in servers.iter().enumerate() {
            let mut row = series.row(number, index, case.name.to_owned());
            (row.link, row.placement, row.peer) = (Some("tcp".into()), server.lender, server.peer);
            rows.push(row);
        }
    }
    if let Some(path) = &args.plot {
        super::plot::by_unit(&rows, path, "Block device over NBD")?;
    }
    Ok(rows)
}

impl BlockArgs {
    /// Whether JSON is wanted.
    pub fn json(&self) -> bool {
        self.json
    }
}
