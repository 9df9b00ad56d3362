//! Swap as a peer of `netvm bench fault`: the same access patterns in a memory cgroup, on a swap file or on zram.
//!
//! A keeper process of its own sets everything up and takes it down again. It lives outside the terminal's process group
//! and ends when its standard input does, so that Ctrl-C, an error or a killed bench leave no swap and no cgroup behind.

use std::error::Error;
use std::fs;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};

use super::PAGE_BYTES;
use super::child::Helper;
use super::worker::{Case, Outcome};

/// Memory that the worker itself needs beside the region, in bytes.
const OVERHEAD_BYTES: u64 = 4 << 20;

/// The outcomes of each case, one per repetition.
pub type Outcomes = Vec<(Case, Vec<Outcome>)>;

#[derive(Args, Debug)]
pub struct SwapArgs {
    #[arg(long)]
    kind: Kind,
    #[arg(long)]
    local_bytes: u64,
    #[arg(long)]
    size_bytes: u64,
    #[arg(long)]
    case_ms: u64,
    /// Second half of every page is zero
    #[arg(long)]
    compressible: bool,
}

/// Where the swapped pages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// A swap file.
    Disk,
    /// Compressed memory.
    Zram,
}

impl Kind {
    /// Name in the column `peer`.
    pub fn peer(self) -> &'static str {
        match self {
            Kind::Disk => "swap-disk",
            Kind::Zram => "swap-zram",
        }
    }

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Disk => "disk",
            Kind::Zram => "zram",
        }
    }
}

/// The keeper: sets up, relays commands to a worker in the cgroup, tears down when its input ends.
///
/// # Errors
/// When the swap cannot be set up. This is reported on standard output as well, as the first outcome.
pub fn keep(args: &SwapArgs) -> Result<(), Box<dyn Error>> {
    let mut parts = match set_up(args) {
        Ok(parts) => parts,
        Err(error) => {
            println!(
                "{}",
                serde_json::to_string(&Outcome { error: error.to_string(), ..Outcome::default() })?
            );
            return Ok(());
        }
    };
    for line in std::io::stdin().lock().lines() {
        let outcome = parts.worker.ask(&line?).map(|outcome| Outcome {
            pool_bytes: parts.swap.pool_bytes(),
            local_bytes_peak: args.local_bytes,
            ..outcome
        });
        let outcome =
            outcome.unwrap_or_else(|error| Outcome { error: error.to_string(), ..Outcome::default() });
        let mut out = std::io::stdout().lock();
        // The bench may have gone: then the input has ended as well.
        let _ = writeln!(out, "{}", serde_json::to_string(&outcome)?).and_then(|()| out.flush());
    }
    Ok(())
}

/// What the keeper keeps. Fields drop in order: the worker ends, then the swap is empty, then the cgroup.
#[derive(Debug)]
struct Parts {
    worker: Helper,
    swap: Swap,
    _cgroup: Cgroup,
}

fn set_up(args: &SwapArgs) -> Result<Parts, Box<dyn Error>> {
    let swap_bytes = args.size_bytes + (32 << 20);
    // Declared first, so that a failure further down takes it down again.
    let swap = match args.kind {
        Kind::Disk => Swap::file(swap_bytes)?,
        Kind::Zram => Swap::zram(swap_bytes)?,
    };
    let cgroup = Cgroup::new(args.local_bytes + OVERHEAD_BYTES)?;
    let mut command = vec!["bench".to_string(), "worker".into()];
    for (name, value) in
        [("local-bytes", args.local_bytes), ("size-bytes", args.size_bytes), ("case-ms", args.case_ms)]
    {
        command.extend([format!("--{name}"), value.to_string()]);
    }
    if args.compressible {
        command.push("--compressible".into());
    }
    let worker = Helper::start(&command, true)?;
    // It has not touched its memory yet: that begins with the command to fill it.
    cgroup.add(worker.pid())?;
    Ok(Parts { worker, swap, _cgroup: cgroup })
}

/// Runs a system tool.
fn tool(name: &str, arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new("sh")
        .args(["-c", "exec \"$@\"", "sh", name])
        .args(arguments)
        .env("PATH", path)
        .stdin(std::process::Stdio::null())
        .output()
        .map_err(|error| format!("{name}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{name} {}: {}", arguments.join(" "), said.lines().next().unwrap_or("failed")).into())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// What is behind a swap device.
#[derive(Debug)]
enum Behind {
    File,
    Zram(u32),
    /// A network block device; its server, and the socket.
    Nbd(std::process::Child, PathBuf),
}

/// A swap device in use, taken out of use and removed when dropped.
#[derive(Debug)]
pub(super) struct Swap {
    device: PathBuf,
    behind: Behind,
    on: bool,
}

impl Swap {
    pub(super) fn file(bytes: u64) -> Result<Self, Box<dyn Error>> {
        let device = PathBuf::from(format!("/var/tmp/netvm-bench-swap-{}", std::process::id()));
        let mut swap = Self { device, behind: Behind::File, on: false };
        let mut options = fs::OpenOptions::new();
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let mut file = options.write(true).create_new(true).open(&swap.device)?;
        let zeros = vec![0; 1 << 20];
        for _ in 0..bytes.div_ceil(1 << 20) {
            file.write_all(&zeros)?;
        }
        file.sync_all()?;
        swap.switch_on()?;
        Ok(swap)
    }

    pub(super) fn zram(bytes: u64) -> Result<Self, Box<dyn Error>> {
        let control = Path::new("/sys/class/zram-control");
        if !control.exists() {
            // Fails where the module is not there, which the next line then says.
            let _ = tool("modprobe", &["zram"]);
        }
        let number = fs::read_to_string(control.join("hot_add"))
            .map_err(|error| format!("no zram in this kernel (modprobe zram): {error}"))?;
        let number: u32 = number.trim().parse()?;
        let device = format!("/dev/zram{number}").into();
        let mut swap = Self { device, behind: Behind::Zram(number), on: false };
        fs::write(format!("/sys/block/zram{number}/disksize"), bytes.to_string())?;
        swap.switch_on()?;
        Ok(swap)
    }

    /// A network block device in the memory of nbdkit, which locks it.
    pub(super) fn nbdkit(bytes: u64) -> Result<Self, Box<dyn Error>> {
        let device = PathBuf::from("/dev/nbd0");
        if !device.exists() {
            // Fails where the module is not there, which the next lines then say.
            let _ = tool("modprobe", &["nbd"]);
        }
        if !device.exists() {
            return Err("no /dev/nbd0 in this kernel (modprobe nbd)".into());
        }
        if Path::new("/sys/block/nbd0/pid").exists() {
            return Err("/dev/nbd0 is in use".into());
        }
        let socket = std::env::temp_dir().join(format!("netvm-bench-nbdkit-{}", std::process::id()));
        let server = Command::new("nbdkit")
            .args(["--foreground", "--swap", "--unix", text(&socket), "memory", &bytes.to_string()])
            .stdin(std::process::Stdio::null())
            .spawn()
            .map_err(|error| format!("nbdkit: {error}"))?;
        let mut swap = Self { device, behind: Behind::Nbd(server, socket.clone()), on: false };
        for _ in 0..100 {
            if socket.exists() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        tool("nbd-client", &["-unix", text(&socket), text(&swap.device), "-swap"])?;
        swap.switch_on()?;
        Ok(swap)
    }

    /// Memory that the device itself takes, in bytes.
    fn pool_bytes(&self) -> u64 {
        let Behind::Zram(number) = self.behind else { return 0 };
        let stat = fs::read_to_string(format!("/sys/block/zram{number}/mm_stat")).unwrap_or_default();
        stat.split_whitespace().nth(2).and_then(|used| used.parse().ok()).unwrap_or(0)
    }

    fn switch_on(&mut self) -> Result<(), Box<dyn Error>> {
        tool("mkswap", &[text(&self.device)])?;
        // Before all other swap of the machine.
        tool("swapon", &["-p", "32767", text(&self.device)])?;
        self.on = true;
        Ok(())
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if self.on
            && let Err(error) = tool("swapoff", &[text(&self.device)])
        {
            eprintln!("netvm bench: {} is still in use as swap: {error}", self.device.display());
            return;
        }
        let removed = match &mut self.behind {
            Behind::File => fs::remove_file(&self.device),
            Behind::Nbd(server, socket) => {
                let disconnected = tool("nbd-client", &["-d", text(&self.device)]);
                let _ = server.kill();
                let _ = server.wait();
                let _ = fs::remove_file(socket);
                disconnected.map_err(|error| std::io::Error::other(error.to_string()))
            }
            Behind::Zram(number) => fs::write(format!("/sys/block/zram{number}/reset"), "1")
                .and_then(|()| fs::write("/sys/class/zram-control/hot_remove", number.to_string())),
        };
        if let Err(error) = removed {
            eprintln!("netvm bench: {} could not be removed: {error}", self.device.display());
        }
    }
}

/// A memory cgroup with a limit, removed when dropped.
#[derive(Debug)]
pub(super) struct Cgroup {
    directory: PathBuf,
    /// Where the hierarchy was mounted for this bench only.
    mounted: Option<PathBuf>,
}

impl Cgroup {
    pub(super) fn new(limit_bytes: u64) -> Result<Self, Box<dyn Error>> {
        let name = format!("netvm-bench-{}", std::process::id());
        let mounts = fs::read_to_string("/proc/mounts")?;
        let mount_of = |kind: &str, option: &str| {
            mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find_map(|fields| {
                let matches = fields.len() > 3 && fields[2] == kind;
                (matches && (option.is_empty() || fields[3].split(',').any(|word| word == option)))
                    .then(|| PathBuf::from(fields[1]))
            })
        };
        if let Some(root) = mount_of("cgroup2", "") {
            let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
            if controllers.split_whitespace().any(|controller| controller == "memory") {
                fs::write(root.join("cgroup.subtree_control"), "+memory")?;
                let cgroup = Self { directory: root.join(name), mounted: None };
                fs::create_dir(&cgroup.directory)?;
                fs::write(cgroup.directory.join("memory.max"), limit_bytes.to_string())?;
                return Ok(cgroup);
            }
        }
        let (root, mounted) = match mount_of("cgroup", "memory") {
            Some(root) => (root, None),
            None => {
                let root = std::env::temp_dir().join(format!("{name}-mount"));
                fs::create_dir(&root)?;
                if let Err(error) =
                    tool("mount", &["-t", "cgroup", "-o", "memory", "netvm-bench", text(&root)])
                {
                    let _ = fs::remove_dir(&root);
                    return Err(format!("no memory cgroup here: {error}").into());
                }
                (root.clone(), Some(root))
            }
        };
        let cgroup = Self { directory: root.join(name), mounted };
        fs::create_dir(&cgroup.directory)?;
        fs::write(cgroup.directory.join("memory.limit_in_bytes"), limit_bytes.to_string())?;
        Ok(cgroup)
    }

    /// The file that takes processes into the group, by their numbers.
    pub(super) fn entrance(&self) -> PathBuf {
        self.directory.join("cgroup.procs")
    }

    fn add(&self, pid: u32) -> Result<(), Box<dyn Error>> {
        Ok(fs::write(self.entrance(), pid.to_string())?)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has just ended may still be leaving the group.
        for _ in 0..100 {
            if fs::remove_dir(&self.directory).is_ok() || !self.directory.exists() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        if self.directory.exists() {
            eprintln!("netvm bench: the cgroup {} could not be removed", self.directory.display());
        }
        if let Some(root) = &self.mounted {
            if let Err(error) = tool("umount", &[text(root)]) {
                eprintln!("netvm bench: {error}");
            }
            let _ = fs::remove_dir(root);
        }
    }
}

/// What to measure.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    pub kind: Kind,
    /// Half of each page is zero.
    pub compressible: bool,
    pub local_bytes: u64,
    pub size_bytes: u64,
    /// Time of one repetition of one case.
    pub case_ms: u64,
    pub repetitions: usize,
    pub cases: &'a [Case],
}

/// Measures one kind of swap: the outcomes of each case, over the repetitions.
///
/// # Errors
/// Why it is skipped.
pub fn measure(wanted: &Wanted) -> Result<Outcomes, Box<dyn Error>> {
    let Wanted { kind, compressible, local_bytes, size_bytes, case_ms, repetitions, cases } = *wanted;
    if !fs::read_to_string("/proc/self/status")?.lines().any(|line| line.starts_with("Uid:\t0\t")) {
        return Err("needs root".into());
    }
    let free = available_bytes().unwrap_or(u64::MAX);
    if free < size_bytes + local_bytes {
        return Err(format!("needs {} MiB of free memory", (size_bytes + local_bytes) >> 20).into());
    }
    let mut command = vec!["bench".to_string(), "swap-keeper".into(), "--kind".into(), kind.name().into()];
    for (name, value) in [("local-bytes", local_bytes), ("size-bytes", size_bytes), ("case-ms", case_ms)] {
        command.extend([format!("--{name}"), value.to_string()]);
    }
    command.extend(compressible.then(|| "--compressible".to_owned()));
    // When every page of the group is in use the kernel may give up too soon and kill the worker: once more, then.
    relay(&command, repetitions, cases).or_else(|_| relay(&command, repetitions, cases))
}

/// Has one keeper measure all cases.
fn relay(command: &[String], repetitions: usize, cases: &[Case]) -> Result<Outcomes, Box<dyn Error>> {
    let mut keeper = Helper::start(command, true)?;
    keeper.ask("fill")?;
    let mut results: Outcomes = cases.iter().map(|&case| (case, Vec::new())).collect();
    for _ in 0..repetitions {
        for (case, outcomes) in &mut results {
            outcomes.push(keeper.ask(case.name())?);
        }
    }
    keeper.finish();
    Ok(results)
}

/// Memory that is available without swapping, in bytes.
pub(super) fn available_bytes() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("MemAvailable:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

const _: () = assert!(OVERHEAD_BYTES.is_multiple_of(PAGE_BYTES as u64));
