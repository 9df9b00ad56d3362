//! Devices that pages are swapped to, made and removed.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use netvm_sys::swap::{LoopDevice, PRIORITY_MAX, swap_off, swap_on};

use super::super::block::{Ended, find, netvm};
use super::super::file::Mounted;

type Failure = Box<dyn Error>;

/// How nbdkit has its memory: all of it from the start and locked, since it gets none while memory is being freed. With the language of its
/// messages it would lock all languages of the system, some 200 MB: hence `LC_ALL`.
const STORE: &str = "allocator=malloc,mlock=true";
/// Most that a server is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where swapped pages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Compressed memory
    Zram,
    /// A swap file
    Disk,
    /// A loop device on a file in tmpfs
    Tmpfs,
    /// A network block device that nbdkit serves from this machine's memory
    Nbdkit,
    /// A loop device on the file of nbdfuse, whose nbdkit has it in this machine's memory
    Nbdfuse,
    /// `netvm swap` by ublk
    NetvmUblk,
    /// `netvm swap` by nbd.ko
    NetvmNbd,
    /// `netvm swap` by a loop device on its FUSE file
    NetvmLoop,
}

impl Kind {
    /// Name in the column `peer`.
    pub fn peer(self) -> &'static str {
        match self {
            Kind::Zram => "swap-zram",
            Kind::Disk => "swap-disk",
            Kind::Tmpfs => "swap-tmpfs",
            Kind::Nbdkit => "swap-nbdkit",
            Kind::Nbdfuse => "swap-nbdfuse",
            Kind::NetvmUblk => "swap-netvm-ublk",
            Kind::NetvmNbd => "swap-netvm-nbd",
            Kind::NetvmLoop => "swap-netvm-loop",
        }
    }

    /// Name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// By what netvm makes it, if it does.
    pub fn by(self) -> Option<&'static str> {
        match self {
            Kind::NetvmUblk => Some("ublk"),
            Kind::NetvmNbd => Some("nbd"),
            Kind::NetvmLoop => Some("loop"),
            _ => None,
        }
    }

    /// Whether a process of this machine has the pages, which could be swapped to itself.
    pub fn is_served_here(self) -> bool {
        !matches!(self, Kind::Zram | Kind::Disk)
    }
}

/// Who lends what netvm swaps to.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Lent {
    /// Lender of what netvm swaps to, HOST:PORT; may be given several times [default: one of its own on this machine]
    #[arg(long, value_name = "ADDR")]
    pub lender: Vec<String>,
    /// File with the lenders' secret; NETVM_SECRET_FILE does not count here
    #[arg(long, value_name = "FILE", requires = "lender")]
    pub secret: Option<PathBuf>,
    /// The memory of its own lender is read and written without it, as nbdkit's is by nbdkit: what is left is the cost of the kernel's side
    #[arg(long, conflicts_with = "lender")]
    pub nearby: bool,
}

impl Lent {
    /// As arguments.
    pub fn arguments(&self) -> Vec<String> {
        let lenders = self.lender.iter().flat_map(|address| ["--lender".to_owned(), address.clone()]);
        let secret = self.secret.iter().flat_map(|file| ["--secret".to_owned(), file.display().to_string()]);
        lenders.chain(secret).chain(self.nearby.then(|| "--nearby".to_owned())).collect()
    }
}

/// Runs a system tool.
pub fn tool(name: &str, arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new("sh")
        .args(["-c", "exec \"$@\"", "sh", name])
        .args(arguments)
        .env("PATH", path)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{name}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{name} {}: {}", arguments.join(" "), said.lines().next().unwrap_or("failed")).into())
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// What is behind a swap device.
#[derive(Debug)]
enum Behind {
    /// A file of this name, and the loop device on it if there is one.
    File(PathBuf, Option<LoopDevice>),
    Zram(u32),
    /// A network block device: its server, the socket, and whether the device is connected.
    Nbd(Ended, PathBuf, bool),
    /// A loop device on a file of what is mounted there.
    Mounted(Option<LoopDevice>, Option<Mounted>, PathBuf),
    /// `netvm swap` of this number, and the lender that belongs to it.
    Netvm(String, Option<Ended>),
}

/// A swap device in use, taken out of use and removed when dropped.
#[derive(Debug)]
pub struct Swap {
    device: PathBuf,
    behind: Behind,
    on: bool,
    /// Goes last.
    _module: Option<Loaded>,
}

/// A kernel module that was loaded for this bench, and goes with it.
#[derive(Debug)]
struct Loaded(&'static str);

impl Loaded {
    /// Loads it where `sign` is not there. Nothing says whether it could: what needs it does.
    fn unless(sign: &str, module: &'static str) -> Option<Self> {
        let loads = || tool("modprobe", &[module]).is_ok();
        (!Path::new(sign).exists() && loads()).then_some(Self(module))
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // Whoever had a device of it open may still be leaving.
        for _ in 0..20 {
            if tool("modprobe", &["-r", self.0]).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        tell!("netvm bench: the kernel module {} stays loaded: it is in use", self.0);
    }
}

impl Swap {
    /// Makes one of at least so many bytes, before all other swap of the machine.
    ///
    /// # Errors
    /// What is missing.
    pub fn open(kind: Kind, bytes: u64, lent: &Lent) -> Result<Self, Failure> {
        let bytes = bytes.next_multiple_of(1 << 20);
        let name = format!("netvm-bench-swap-{}", std::process::id());
        match kind {
            Kind::Zram => Self::zram(bytes),
            Kind::Disk => Self::file(Path::new("/var/tmp").join(name), bytes, false),
            Kind::Tmpfs => Self::file(Path::new("/dev/shm").join(name), bytes, true),
            Kind::Nbdkit => Self::nbdkit(bytes),
            Kind::Nbdfuse => Self::nbdfuse(&std::env::temp_dir().join(name), bytes),
            Kind::NetvmUblk | Kind::NetvmNbd | Kind::NetvmLoop => {
                Self::netvm(kind.by().unwrap_or_default(), bytes, lent)
            }
        }
    }

    fn file(path: PathBuf, bytes: u64, looped: bool) -> Result<Self, Failure> {
        let mut options = OpenOptions::new();
        let mut file = options
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(|error| format!("cannot make {}: {error}", path.display()))?;
        let mut swap =
            Self { device: path.clone(), behind: Behind::File(path.clone(), None), on: false, _module: None };
        // All of it: no page of it is charged to whoever is swapped out.
        let zeros = vec![0; 1 << 20];
        for _ in 0..bytes >> 20 {
            file.write_all(&zeros).map_err(|error| format!("cannot fill {}: {error}", path.display()))?;
        }
        file.sync_all()?;
        if looped {
            let device = loop_on(&file, text(&path))?;
            swap.device = device.path().to_owned();
            swap.behind = Behind::File(path, Some(device));
        }
        swap.switch_on()?;
        Ok(swap)
    }

    fn zram(bytes: u64) -> Result<Self, Failure> {
        let control = Path::new("/sys/class/zram-control");
        let module = Loaded::unless(text(control), "zram");
        let number = fs::read_to_string(control.join("hot_add"))
            .map_err(|error| format!("no zram in this kernel (modprobe zram): {error}"))?;
        let number: u32 = number.trim().parse()?;
        let device = format!("/dev/zram{number}").into();
        let mut swap = Self { device, behind: Behind::Zram(number), on: false, _module: module };
        fs::write(format!("/sys/block/zram{number}/disksize"), bytes.to_string())?;
        swap.switch_on()?;
        Ok(swap)
    }

    /// A network block device in the memory of nbdkit, which locks it.
    fn nbdkit(bytes: u64) -> Result<Self, Failure> {
        let device = PathBuf::from("/dev/nbd0");
        let module = Loaded::unless(text(&device), "nbd");
        if !device.exists() {
            return Err("no /dev/nbd0 in this kernel (modprobe nbd)".into());
        }
        if Path::new("/sys/block/nbd0/pid").exists() {
            return Err("/dev/nbd0 is in use".into());
        }
        let socket = std::env::temp_dir().join(format!("netvm-bench-nbdkit-{}", std::process::id()));
        let server = Command::new("nbdkit")
            .args(["--foreground", "--swap", "--unix", text(&socket), "memory", &bytes.to_string(), STORE])
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .spawn()
            .map_err(|error| format!("nbdkit: {error}"))?;
        let behind = Behind::Nbd(Ended(vec![server]), socket.clone(), false);
        let mut swap = Self { device, behind, on: false, _module: module };
        appears(&socket)?;
        tool("nbd-client", &["-unix", text(&socket), text(&swap.device), "-swap"])?;
        if let Behind::Nbd(_, _, connected) = &mut swap.behind {
            *connected = true;
        }
        swap.switch_on()?;
        Ok(swap)
    }

    fn nbdfuse(folder: &Path, bytes: u64) -> Result<Self, Failure> {
        let nbdfuse = find("nbdfuse").ok_or("nbdfuse is not installed")?;
        let nbdkit = find("nbdkit").ok_or("nbdkit is not installed")?;
        fs::create_dir(folder)?;
        let mut swap = Self {
            device: PathBuf::new(),
            behind: Behind::Mounted(None, None, folder.to_owned()),
            on: false,
            _module: None,
        };
        let path = folder.join("file");
        let (program, size) = (nbdfuse.display().to_string(), bytes.to_string());
        let command = ["env", "LC_ALL=C", &program, text(&path), "--command", text(&nbdkit)];
        let command = [&command[..], &["-s", "--swap", "memory", &size, STORE]].concat();
        let command: Vec<String> = command.into_iter().map(str::to_owned).collect();
        let mount = Mounted::start(folder, &command)?;
        swap.behind = Behind::Mounted(None, Some(mount), folder.to_owned());
        appears(&path)?;
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        let device = loop_on(&file, text(&path))?;
        swap.device = device.path().to_owned();
        if let Behind::Mounted(looped, ..) = &mut swap.behind {
            *looped = Some(device);
        }
        swap.switch_on()?;
        Ok(swap)
    }

    fn netvm(by: &str, bytes: u64, lent: &Lent) -> Result<Self, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["swap", "on", "--by", by, "--priority", "32767", "--size", &bytes.to_string()]);
        // Otherwise as if the lender were on another machine.
        let link = if lent.nearby { "shm" } else { "socket" };
        let lender = if lent.lender.is_empty() {
            let size = (bytes + (16 << 20)).next_multiple_of(16 << 20).to_string();
            let (lend, address) = netvm(&["lend", "--size", &size, "--listen", "127.0.0.1:0"], link)?;
            command.args(["--lender-here", "--lender", &address]);
            Some(Ended(vec![lend]))
        } else {
            command.args(lent.arguments());
            None
        };
        let output = command.env("NETVM_LINK", link).stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        let made = said.strip_prefix("netvm: swap ").and_then(|rest| {
            let (number, rest) = rest.split_once(':')?;
            Some((number.to_owned(), PathBuf::from(rest.trim().rsplit_once(" at ")?.1)))
        });
        match made.filter(|_| output.status.success()) {
            Some((number, device)) => {
                Ok(Self { device, behind: Behind::Netvm(number, lender), on: true, _module: None })
            }
            None => {
                let why = String::from_utf8_lossy(&output.stderr);
                Err(why.lines().last().unwrap_or("netvm swap on failed").to_owned().into())
            }
        }
    }

    /// Memory that the device itself takes, in bytes.
    pub fn pool_bytes(&self) -> u64 {
        let Behind::Zram(number) = self.behind else { return 0 };
        let stat = fs::read_to_string(format!("/sys/block/zram{number}/mm_stat")).unwrap_or_default();
        stat.split_whitespace().nth(2).and_then(|used| used.parse().ok()).unwrap_or(0)
    }

    fn switch_on(&mut self) -> Result<(), Failure> {
        tool("mkswap", &[text(&self.device)])?;
        // Before all other swap of the machine.
        swap_on(&self.device, Some(PRIORITY_MAX), false).map_err(|error| {
            format!("the kernel does not take {} as swap: {error}", self.device.display())
        })?;
        self.on = true;
        Ok(())
    }

    fn remove(&mut self) -> Result<(), Failure> {
        match &mut self.behind {
            Behind::File(path, device) => {
                *device = None;
                fs::remove_file(path)?;
            }
            Behind::Nbd(server, socket, connected) => {
                // It may be somebody else's who was faster.
                let disconnected = match connected {
                    true => tool("nbd-client", &["-d", text(&self.device)]).map(drop),
                    false => Ok(()),
                };
                *server = Ended(Vec::new());
                let _ = fs::remove_file(socket);
                disconnected?;
            }
            Behind::Zram(number) => {
                fs::write(format!("/sys/block/zram{number}/reset"), "1")?;
                fs::write("/sys/class/zram-control/hot_remove", number.to_string())?;
            }
            Behind::Mounted(device, mount, folder) => {
                (*device, *mount) = (None, None);
                fs::remove_dir(folder)?;
            }
            // `swap off` has done it.
            Behind::Netvm(_, lender) => drop(lender.take()),
        }
        Ok(())
    }
}

/// Past the page cache where the file system allows that.
fn loop_on(file: &File, name: &str) -> Result<LoopDevice, Failure> {
    if !Path::new("/dev/loop-control").exists() {
        return Err("no loop devices in this kernel (modprobe loop)".into());
    }
    let device = LoopDevice::attach(file, name, true).or_else(|_| LoopDevice::attach(file, name, false));
    Ok(device.map_err(|error| format!("cannot put {name} on a loop device: {error}"))?)
}

fn appears(path: &Path) -> Result<(), Failure> {
    let end = Instant::now() + PATIENCE;
    while !path.exists() {
        if Instant::now() > end {
            return Err(format!("{} did not appear", path.display()).into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

impl Drop for Swap {
    fn drop(&mut self) {
        let off = match &self.behind {
            Behind::Netvm(number, _) => std::env::current_exe()
                .map_err(Failure::from)
                .and_then(|program| tool(text(&program), &["swap", "off", number])),
            _ if self.on => swap_off(&self.device).map_err(Failure::from),
            _ => Ok(()),
        };
        if let Err(error) = off {
            tell!("netvm bench: {} is still in use as swap: {error}", self.device.display());
            // Whoever serves it must stay.
            std::mem::forget(std::mem::replace(&mut self.behind, Behind::Zram(0)));
            return;
        }
        if let Err(error) = self.remove() {
            tell!("netvm bench: {} could not be removed: {error}", self.device.display());
        }
    }
}
