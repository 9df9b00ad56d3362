//! `netvm lend`: a lender.

use super::Outcome;
use super::secret::SecurityArgs;
use crate::machine::{HUGE_ADVISE, lent_hugepages, meminfo};
use crate::size::Size;
use clap::{Args, ValueEnum};
use netvm::lender::{Compress, Lender, LenderConfig};
use netvm::security::{Encryption, Secret, Security};
use netvm_core::slab::is_slab;
use netvm_sys::cpu::CpuSet;
use netvm_sys::signal::{SIGINT, SIGTERM, Signals};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use zeroize::Zeroizing;

/// Of the whole machine.
const PRESSURE_FILE: &str = "/proc/pressure/memory";

/// Arguments of `netvm lend`.
#[derive(Args, Debug)]
#[command(after_help = "\
Memory is taken from this machine only as borrowers fill it, and goes back when a borrower returns it, ends or dies.

SIGTERM: no new borrowers are taken; those that are there are asked to move what they have to their other lenders, and served until they
have, or to their end. --leave-timeout sets an end to that; a second SIGTERM stops at once.

Examples:
  netvm lend --size 8G                              for programs on this machine (127.0.0.1:7070)
  netvm lend --size 4G --listen unix:/run/netvm     for who may open this path
  netvm lend --size 32G --listen 0.0.0.0:7070 --secret /etc/netvm.secret
                                                    for borrowers with a copy of the secret file
  netvm lend --size 32G --listen 0.0.0.0:7070 --secret /etc/netvm.secret --encrypt
                                                    and everything on the way is encrypted
  netvm lend --size 32G --reserve 4G --quota 8G      asks for memory back when less than 4G are available; 8G for each borrower
  netvm lend --size 256G --file /var/tmp            a file, for borrowers whose other lenders are full
  netvm lend --size 32G --compress --overflow /var/tmp   up to 128G, packed into 32G, as long as it shrinks so much
  netvm lend --size 32G --listen 10.0.0.5:7070 --insecure
                                                    for everybody who reaches that address")]
pub struct LendArgs {
    /// Most memory to lend, e.g. 8G; of the file with --file; with --compress, most memory to use. Whole slabs are lent: what is less than one at the
    /// end is not
    #[arg(long)]
    size: Size,
    /// Address to listen at: HOST:PORT or unix:/path; may be given several times
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7070")]
    listen: Vec<String>,
    #[command(flatten)]
    security: SecurityArgs,
    /// Listen on a network without a secret: whoever reaches the address can use the memory
    #[arg(long)]
    insecure: bool,
    /// Lend from a file in this folder, not from memory: it has no name there, and is gone with the lender
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["hugepages", "reserve", "pressure"])]
    file: Option<PathBuf>,
    /// Keep pages compressed: what does not shrink stays as it is. Pages that borrowers encrypt do not shrink
    #[arg(long, conflicts_with_all = ["hugepages", "file"])]
    compress: bool,
    /// With --compress: what does not shrink, and finds no room in --size then, goes to a file without a name in this folder. Room for the worst case
    /// (--lend-up-to less --size) is taken there at once. Without this option no more than --size is lent
    #[arg(long, value_name = "FOLDER", requires = "compress")]
    overflow: Option<PathBuf>,
    /// With --overflow: lend at most so much, up to 16 times --size, as far as it shrinks [default: 4 times --size]
    #[arg(long, value_name = "SIZE", requires = "overflow")]
    lend_up_to: Option<Size>,
    /// Use huge pages where the kernel has them
    #[arg(long)]
    hugepages: bool,
    /// Memory is lent in slabs of this size
    #[arg(long, value_name = "SIZE", default_value = "16M")]
    slab: Size,
    /// Memory to leave to others on this machine: when less is available, borrowers are asked to give some back
    #[arg(long, value_name = "SIZE")]
    reserve: Option<Size>,
    /// Ask for memory back when something has waited for memory for so many percent of the last 10 s
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent)]
    pressure: Option<u32>,
    /// What --pressure reads, a file as /proc/pressure/memory: for a control group its memory.pressure
    #[arg(long, value_name = "FILE", default_value = PRESSURE_FILE, requires = "pressure")]
    pressure_file: PathBuf,
    /// What tells how much memory is available (tests)
    #[arg(long, value_name = "FILE", default_value = "/proc/meminfo", hide = true)]
    meminfo_file: PathBuf,
    /// Most memory for one borrower
    #[arg(long, value_name = "SIZE")]
    quota: Option<Size>,
    /// Take the memory of a borrower that has not answered for so long though its connection stands: a stopped process loses it
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    lease_timeout: Option<u64>,
    /// After SIGTERM, end after so long, whoever has not left by then
    #[arg(long, value_name = "SECONDS")]
    leave_timeout: Option<u64>,
    /// While requests come in quick succession, look for the next one this long before sleeping, in microseconds; 0: never
    /// [default: 50, with a single CPU 0]
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(..=10_000))]
    spin_us: Option<u32>,
    /// Whether the kernel answers reads of single pages, before anybody is woken: needs Linux 6.6, CAP_BPF and CAP_NET_ADMIN (root has them), and is used
    /// by programs on other machines. `netvm status` tells how many it has answered
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    kernel_reads: KernelReads,
    /// Run on this CPU only
    #[arg(long)]
    cpu: Option<usize>,
    /// Take the secret from standard input; end when that ends and the last borrower has gone
    #[arg(long, hide = true)]
    private: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum KernelReads {
    /// Where the kernel lets this user
    Auto,
    /// Never
    Off,
}

/// Hundredths of a percent.
fn parse_percent(text: &str) -> Result<u32, String> {
    let percent: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.01..=100.0).contains(&percent) {
        Ok((percent * 100.0) as u32)
    } else {
        Err("give 0.01 to 100 percent".to_owned())
    }
}

pub fn run(args: LendArgs) -> Outcome {
    match &args.file {
        None => check_size(args.size, args.private)?,
        Some(folder) => check_room(folder, args.size)?,
    }
    let compress = compress(&args)?;
    if let (Some(reserve), Some(ram)) = (args.reserve, meminfo("MemTotal"))
        && reserve.0 >= ram
    {
        // All would be asked back at once, for ever.
        return Err(format!(
            "--reserve {reserve} leaves nothing to lend: this machine has {} of memory; give less",
            Size(ram)
        )
        .into());
    }
    if let Some(quota) = args.quota.filter(|quota| quota.0 < args.slab.0) {
        return Err(format!(
            "a quota of {quota} is less than one slab of {}; give more, or a smaller --slab",
            args.slab
        )
        .into());
    }
    if args.pressure.is_some()
        && let Err(error) = std::fs::read(&args.pressure_file)
    {
        let file = args.pressure_file.display();
        // Of a file that was named the kernel says nothing by its absence.
        let remedy = match args.pressure_file == Path::new(PRESSURE_FILE) {
            true => "this kernel does not measure pressure (CONFIG_PSI, psi=1); use --reserve",
            false => "name another --pressure-file, or leave it out for the whole machine",
        };
        return Err(format!("cannot read {file} ({error}): {remedy}").into());
    }
    if args.pressure.is_some() && !netvm::lender::tells_pressure(&args.pressure_file) {
        let file = args.pressure_file.display();
        return Err(format!(
            "{file} tells of no pressure: it has no line as `some avg10=0.00 ...`; name a file such as {PRESSURE_FILE}, or memory.pressure of a control group"
        )
        .into());
    }
    if args.size < args.slab && compress.is_none() && is_slab(args.slab.0) {
        return Err(format!(
            "--size {} has no room for one slab of {}; give more, or a smaller --slab",
            args.size, args.slab
        )
        .into());
    }
    let signals = Signals::block(&[SIGTERM, SIGINT]);
    if args.kernel_reads == KernelReads::Auto {
        // Each unit that the kernel reads has one.
        netvm_sys::thread::raise_descriptors_max();
    }
    if let Some(cpu) = args.cpu {
        netvm_sys::cpu::pin(cpu).map_err(|error| cannot_pin(cpu, &error))?;
    }
    if args.hugepages
        && let Err(setting) = lent_hugepages()
    {
        tell!("netvm: lending without huge pages: shmem_enabled is {setting}; `{HUGE_ADVISE}` allows them");
    }
    let security = match args.security.is_on_input() {
        true => secret_on_input(&args)?,
        // Whoever starts it for itself alone decides; the environment is the user's.
        false if args.private => Security::default(),
        false => args.security.load()?,
    };
    let security = Security { insecure: args.insecure, ..security };
    if security.secret.is_none() && args.insecure {
        tell!("netvm: without a secret, whoever reaches the address can use the memory");
    }
    let protection = match (&security.secret, security.encryption) {
        (None, _) => "",
        (Some(_), Encryption::Always) => ", with a secret, encrypted",
        (Some(_), _) => ", with a secret",
    };
    let mut lender = Lender::bind(LenderConfig {
        listen: args.listen,
        size_bytes: args.size.0,
        slab_bytes: args.slab.0,
        folder: args.file,
        compress: compress.clone(),
        hugepages: args.hugepages,
        private: args.private,
        parent_fd: None,
        // A private lender shares its borrower's CPU most of the time.
        spin_us: if args.private { Some(args.spin_us.unwrap_or(0)) } else { args.spin_us },
        verbose: !args.private,
        reserve_bytes: args.reserve.map_or(0, |size| size.0),
        stall: args.pressure.unwrap_or(0),
        pressure_file: args.pressure_file,
        meminfo_file: args.meminfo_file,
        quota_bytes: args.quota.map_or(0, |size| size.0),
        lease_timeout: args.lease_timeout.map(Duration::from_secs),
        leave_timeout: args.leave_timeout.map(Duration::from_secs),
        kernel_reads: args.kernel_reads == KernelReads::Auto,
        security,
    })?;
    let wanted = compress.as_ref().map_or(args.size, |compress| Size(compress.lend_bytes));
    let lent = Size(wanted.0 / args.slab.0 * args.slab.0);
    let size = match compress {
        Some(Compress { overflow: Some(_), .. }) => format!("up to {lent}, packed into {},", args.size),
        Some(_) => format!("{lent}, packed,"),
        None => lent.to_string(),
    };
    if lent < wanted && !args.private {
        tell!("netvm: {wanted} to lend were rounded down to whole slabs: {lent}");
    }
    let mut out = std::io::stdout();
    for address in lender.addresses() {
        // Whoever started us may have gone; that is no reason not to serve.
        let _ = writeln!(out, "netvm: lending {size} in slabs of {} at {address}{protection}", args.slab);
    }
    let _ = out.flush();
    let stop = super::stop_on(signals)?;
    lender.run(&stop)?;
    Ok(ExitCode::SUCCESS)
}

/// That CPU is none, or not one of this process.
fn cannot_pin(cpu: usize, error: &std::io::Error) -> String {
    let Ok(ours) = CpuSet::of(0) else { return format!("cannot run on CPU {cpu}: {error}") };
    if ours.contains(cpu) {
        return format!("cannot run on CPU {cpu}: {error}");
    }
    format!("cannot run on CPU {cpu}: give --cpu one of those that this process may use, {}", listed(&ours))
}

/// As in `0-3,8`.
fn listed(cpus: &CpuSet) -> String {
    let all = cpus.words().len() * 64;
    let mut ranges = Vec::new();
    let mut next = 0;
    while let Some(first) = (next..all).find(|&cpu| cpus.contains(cpu)) {
        next = (first..all).find(|&cpu| !cpus.contains(cpu)).unwrap_or(all);
        ranges.push(if next - first == 1 { first.to_string() } else { format!("{first}-{}", next - 1) });
    }
    ranges.join(",")
}

/// How to pack, if it is wanted.
fn compress(args: &LendArgs) -> Result<Option<Compress>, String> {
    if !args.compress {
        return Ok(None);
    }
    let Some(folder) = &args.overflow else {
        return Ok(Some(Compress { lend_bytes: args.size.0, overflow: None }));
    };
    let lend_bytes = args.lend_up_to.map_or(args.size.0.saturating_mul(4), |size| size.0);
    if lend_bytes < args.size.0 {
        return Err(format!("--lend-up-to {} is less than --size {}", Size(lend_bytes), args.size));
    }
    check_room(folder, Size(lend_bytes - args.size.0))?;
    Ok(Some(Compress { lend_bytes, overflow: Some(folder.clone()) }))
}

/// The secret that the starting process writes to our standard input: neither arguments nor files show it.
fn secret_on_input(args: &LendArgs) -> Result<Security, Box<dyn std::error::Error>> {
    let mut line = Zeroizing::new(String::new());
    std::io::stdin().read_line(&mut line).map_err(|error| format!("cannot read the secret: {error}"))?;
    Ok(args.security.with(Secret::from_content(line.as_bytes())?))
}

/// Memory that this machine does not have cannot be lent; what others use now may come free.
fn check_size(size: Size, is_private: bool) -> Result<(), String> {
    // Who starts a lender for itself alone has another option for it.
    let option = if is_private { "--lend-size" } else { "--size" };
    let all = meminfo("MemTotal").and_then(|ram| Some(ram + meminfo("SwapTotal")?));
    let available = meminfo("MemAvailable");
    match (all, available) {
        (Some(all), _) if size.0 > all => Err(format!(
            "cannot lend {size}: this machine has {} of memory in all; give a smaller {option}",
            Size(all)
        )),
        (_, Some(available)) if size.0 > available => {
            tell!(
                "netvm: only {} of the {size} to lend are free now; borrowers fail if it stays so",
                Size(available)
            );
            Ok(())
        }
        _ => Ok(()),
    }
}

/// A file may be larger than what is free now: room is taken as it is lent.
fn check_room(folder: &Path, size: Size) -> Result<(), String> {
    let room = netvm_sys::memfd::room_bytes(folder)
        .map_err(|error| format!("cannot lend from a file in {}: {error}", folder.display()))?;
    if size.0 > room {
        tell!(
            "netvm: only {} of the {size} to lend are free in {}; borrowers are refused when it is full",
            Size(room),
            folder.display()
        );
    }
    Ok(())
}
