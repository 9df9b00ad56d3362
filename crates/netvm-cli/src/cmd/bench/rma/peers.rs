//! The same operations of other libraries, between two processes on the same CPUs, when they are installed.

use std::error::Error;
use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::super::report::Row;
use super::super::sweeper::Sweeper;
use super::Link;
use super::plan::Placement;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How to get them.
pub const INSTALL_HINT: &str = "\
UCX, libfabric and Open MPI are measured beside netvm when their programs are found:

  program                Debian, Ubuntu                               Fedora, RHEL              Arch
  ucx_perftest           apt install ucx-utils                        dnf install ucx           pacman -S openucx
  fi_pingpong            apt install libfabric-bin                    dnf install libfabric     pacman -S libfabric
  mpicc, mpirun          apt install openmpi-bin libopenmpi-dev gcc   dnf install openmpi-devel pacman -S openmpi gcc

On Fedora, `module load mpi` puts mpicc and mpirun into the path.";

/// No run of a peer takes longer.
const PATIENCE: Duration = Duration::from_secs(20);
const MPI_PROGRAM: &str = include_str!("peer_mpi.c");

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// A process that does not outlive the bench, with what it prints.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// Waits for its end; what it printed.
    fn output(mut self) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait()? {
                let mut text = String::new();
                self.0.stdout.take().ok_or("no output")?.read_to_string(&mut text)?;
                return if status.success() {
                    Ok(text)
                } else {
                    Err(format!("it ended with {status}").into())
                };
            }
            if Instant::now() > end {
                return Err(format!("it did not end within {} s", PATIENCE.as_secs()).into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Starts a program on one CPU, if there is a program that sees to that.
fn start(
    program: &Path,
    arguments: &[String],
    cpu: Option<usize>,
    variables: &[(&str, &str)],
) -> Result<Running> {
    let mut command = match (cpu, find("taskset")) {
        (Some(cpu), Some(taskset)) => {
            let mut command = Command::new(taskset);
            command.args(["-c", &cpu.to_string()]).arg(program);
            command
        }
        _ => Command::new(program),
    };
    command.args(arguments).envs(variables.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    Ok(Running(command.spawn()?))
}

fn free_port() -> Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string())
}

/// Runs a server and its client, which connects as soon as the server listens.
fn pair(
    program: &Path,
    server: &[String],
    client: &[String],
    placement: &Placement,
    variables: &[(&str, &str)],
) -> Result<String> {
    let mut last = Err("it never started".into());
    for wait in [100, 400, 1500] {
        let there = start(program, server, placement.there, variables)?;
        std::thread::sleep(Duration::from_millis(wait));
        last = start(program, client, placement.here, variables)?.output();
        drop(there);
        if last.is_ok() {
            break;
        }
    }
    last
}

fn words(text: &[&str]) -> Vec<String> {
    text.iter().map(|&word| word.to_owned()).collect()
}

/// One number of a peer.
struct Found {
    case: &'static str,
    size: usize,
    unit: &'static str,
    value: f64,
    per_s: Option<f64>,
    n: u64,
    note: &'static str,
}

/// Latency (median, us), bandwidth (GB/s) and rate in what ucx_perftest prints.
///
/// `Final: iterations, median, average, overall (us), average, overall (MiB/s), average, overall (messages/s)`
fn parse_ucx(text: &str) -> Option<(u64, f64, f64, f64)> {
    let line = text.lines().rev().find_map(|line| line.trim().strip_prefix("Final:"))?;
    let numbers: Vec<f64> = line.split_ascii_whitespace().map_while(|word| word.parse().ok()).collect();
    let &[n, median, _, _, _, bandwidth, _, rate] = numbers.as_slice() else { return None };
    Some((n as u64, median, bandwidth * 1.048_576e-3, rate))
}

/// Microseconds of one way and the iterations in what fi_pingpong prints.
///
/// `bytes  #sent  #ack  total  time  MB/sec  usec/xfer  Mxfers/sec`
fn parse_libfabric(text: &str) -> Option<f64> {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let column = lines
        .find(|line| line.starts_with("bytes"))?
        .split_ascii_whitespace()
        .position(|word| word == "usec/xfer")?;
    lines.next()?.split_ascii_whitespace().nth(column)?.parse().ok()
}

/// Case, size, microseconds and count in what the MPI program prints.
fn parse_mpi(line: &str) -> Option<(&str, usize, f64, u64)> {
    let mut words = line.strip_prefix("netvm-peer ")?.split_ascii_whitespace();
    Some((
        words.next()?,
        words.next()?.parse().ok()?,
        words.next()?.parse().ok()?,
        words.next()?.parse().ok()?,
    ))
}

fn ucx(program: &Path, link: Link, placement: &Placement, sizes: &[usize]) -> Vec<Result<Found>> {
    // With "self" alone it would find no way to another process.
    let tls = match link {
        Link::Tcp => "tcp",
        _ => "posix",
    };
    let run = |test: &str, size: usize, n: u64| -> Result<(u64, f64, f64, f64)> {
        let port = free_port()?;
        // One at a time, or what it takes to fill the link.
        let under_way = if test.ends_with("_bw") { "16" } else { "1" };
        let (size, n, warm) = (size.to_string(), n.to_string(), (n / 10).to_string());
        let client = words(&[
            "-p",
            &port,
            "-t",
            test,
            "-s",
            &size,
            "-n",
            &n,
            "-w",
            &warm,
            "-O",
            under_way,
            "127.0.0.1",
        ]);
        let text = pair(program, &words(&["-p", &port]), &client, placement, &[("UCX_TLS", tls)])?;
        parse_ucx(&text).ok_or_else(|| "it printed something else than expected".into())
    };
    let mut all = Vec::new();
    let latencies = [
        ("put", "ucp_put_lat", 8),
        ("put", "ucp_put_lat", 4096),
        ("get", "ucp_get", 8),
        ("get", "ucp_get", 4096),
    ];
    let atomics = [("fetch-add", "ucp_fadd", 8), ("cas", "ucp_cswap", 8)];
    for (case, test, size) in latencies.into_iter().chain(atomics) {
        all.push(run(test, size, 2000).map(|(n, median, _, rate)| Found {
            case,
            size,
            unit: "us",
            value: median,
            per_s: Some(rate),
            n,
            note: "",
        }));
    }
    for &size in sizes {
        let n = ((256 << 20) / size).clamp(50, 100_000) as u64;
        all.push(run("ucp_put_bw", size, n).map(|(n, _, bandwidth, rate)| Found {
            case: "put-bw",
            size,
            unit: "GB/s",
            value: bandwidth,
            per_s: Some(rate),
            n,
            note: "",
        }));
    }
    all
}

fn libfabric(program: &Path, placement: &Placement) -> Vec<Result<Found>> {
    let run = |size: usize| -> Result<Found> {
        let port = free_port()?;
        // A mean: so many that one pause of the machine does not decide.
        let (bytes, n) = (size.to_string(), "20000");
        let common = ["-p", "tcp", "-e", "msg", "-S", &bytes, "-I", n];
        let server = [&["-B", &port], &common[..]].concat();
        let client = [&["-P", &port], &common[..], &["127.0.0.1"]].concat();
        let text = pair(program, &words(&server), &words(&client), placement, &[])?;
        let value = parse_libfabric(&text).ok_or("it printed something else than expected")?;
        let note = "a mean, of messages: the other side receives";
        Ok(Found { case: "put", size, unit: "us", value, per_s: Some(5e5 / value), n: 20_000, note })
    };
    [8, 4096].map(run).into()
}

fn open_mpi(mpicc: &Path, mpirun: &Path, link: Link, placement: &Placement) -> Result<Vec<Found>> {
    let folder = std::env::temp_dir().join(format!("netvm-bench-mpi-{}", std::process::id()));
    let _sweeper = Sweeper::of_new_folder(&folder)?;
    let (source, program) = (folder.join("rma.c"), folder.join("rma"));
    std::fs::write(&source, MPI_PROGRAM)?;
    let arguments = ["-O2", "-o", &program.display().to_string(), &source.display().to_string()];
    start(mpicc, &words(&arguments), None, &[])?.output()?;
    let btl = if link == Link::Tcp { "self,tcp" } else { "self,vader" };
    let cpus = |cpu: Option<usize>| cpu.map_or("-1".to_owned(), |cpu| cpu.to_string());
    let mut arguments = words(&[
        "--oversubscribe",
        "--bind-to",
        "none",
        "-np",
        "2",
        "--mca",
        "pml",
        "ob1",
        "--mca",
        "btl",
        btl,
    ]);
    if link == Link::Tcp {
        // The other components put windows of one host into shared memory, whatever carries the messages.
        arguments.extend(words(&["--mca", "osc", "pt2pt"]));
    }
    if std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self")?) == 0 {
        arguments.insert(0, "--allow-run-as-root".to_owned());
    }
    arguments.extend([program.display().to_string(), cpus(placement.here), cpus(placement.there)]);
    let text = start(mpirun, &arguments, None, &[])?.output()?;
    let names = ["put-complete", "get", "fetch-add", "cas"];
    let found: Vec<Found> = text
        .lines()
        .filter_map(parse_mpi)
        .filter_map(|(case, size, value, n)| {
            let case = names.into_iter().find(|name| *name == case)?;
            let note = "the target waits in a barrier";
            Some(Found { case, size, unit: "us", value, per_s: Some(1e6 / value), n, note })
        })
        .collect();
    if found.is_empty() { Err("it printed something else than expected".into()) } else { Ok(found) }
}

/// Rows of all peers for one placement. `floor` finds the floor of a case and size in the same run, in the case's unit.
pub fn measure(
    link: Link,
    placement: &Placement,
    quick: bool,
    floor: impl Fn(&str, usize) -> Option<f64>,
) -> Vec<Row> {
    let sizes: &[usize] = if quick { &[4 << 10] } else { &[8, 4 << 10, 64 << 10, 1 << 20, 8 << 20] };
    let mut rows = Vec::new();
    let mut add = |peer: &'static str, found: Result<Found>| {
        let found = found.unwrap_or_else(|error| Found {
            case: "put",
            size: 8,
            unit: "us",
            value: f64::NAN,
            per_s: None,
            n: 0,
            note: Box::leak(format!("skipped ({error})").into_boxed_str()),
        });
        let mut row = Row::new("rma", found.case, found.unit);
        (row.link, row.placement, row.peer) = (Some(link.name().into()), Some(placement.name), Some(peer));
        row.size_bytes = Some(found.size as u64);
        row.note = found.note.to_owned();
        if link != Link::Tcp {
            let (comma, over) = (if row.note.is_empty() { "" } else { ", " }, "over shared memory");
            row.note = format!("{}{comma}{over}", row.note);
        }
        if found.n == 0 {
            row.note = found.note.to_owned();
        } else {
            (row.median, row.per_s, row.n) = (Some(found.value), found.per_s, found.n);
            row.floor = floor(found.case, found.size);
            row.ratio = row
                .floor
                .map(|floor| if found.unit == "us" { found.value / floor } else { floor / found.value });
        }
        rows.push(row);
    };
    let missing = |program: &str| Err(format!("{program} is not installed, see --peers install-hint").into());
    match find("ucx_perftest") {
        Some(program) => {
            ucx(&program, link, placement, sizes).into_iter().for_each(|found| add("ucx", found))
        }
        None => add("ucx", missing("ucx_perftest")),
    }
    if link == Link::Tcp {
        match find("fi_pingpong") {
            Some(program) => {
                libfabric(&program, placement).into_iter().for_each(|found| add("libfabric", found))
            }
            None => add("libfabric", missing("fi_pingpong")),
        }
    }
    match (find("mpicc"), find("mpirun")) {
        (Some(mpicc), Some(mpirun)) => match open_mpi(&mpicc, &mpirun, link, placement) {
            Ok(all) => all.into_iter().for_each(|found| add("openmpi", Ok(found))),
            Err(error) => add("openmpi", Err(error)),
        },
        _ => add("openmpi", missing("mpicc or mpirun")),
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_peers_print() {
        let ucx = "\
|    Stage     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  |
[thread 0]              1053     16.691   474.847   474.847        0.02       0.02        2106        2106
Final:                  2000     19.750   487.289   480.739        0.02       0.02        2052        2080
";
        let (n, median, bandwidth, rate) = parse_ucx(ucx).unwrap();
        assert_eq!((n, median, rate), (2000, 19.75, 2080.0));
        assert!((bandwidth - 0.02 * 1.048_576e-3).abs() < 1e-9);
        assert_eq!(parse_ucx("Final: 3"), None);
        let libfabric = "\
bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
8       5k      =5k      78k         5.83s      0.01     583.37       0.00
";
        assert_eq!(parse_libfabric(libfabric), Some(583.37));
        assert_eq!(parse_libfabric("fi_getinfo: -61"), None);
        assert_eq!(parse_mpi("netvm-peer get 8 12.5 1000"), Some(("get", 8, 12.5, 1000)));
        assert_eq!(parse_mpi("netvm-peer get 8"), None);
    }
}
