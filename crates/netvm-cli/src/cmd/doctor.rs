//! `netvm doctor`: what works on this machine, why the rest does not, and what would help.

use super::Outcome;
use crate::machine::{HUGE_ADVISE, lent_hugepages, meminfo};
use crate::size::Size;
use clap::Args;
use netvm::pager::{FaultPath, WakeCosts};
use netvm_sys::uffd;
use serde::{Serialize, Serializer};
use std::path::Path;
use std::process::ExitCode;

/// Arguments of `netvm doctor`.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit code: 0 when `netvm run` can work here as it is by default, 1 otherwise. Lenders need none of what is marked MISSING."
)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Only read a byte of that process, at that address: what another process does to find out whether it may
    #[arg(long, hide = true, num_args = 2, value_names = ["PROCESS", "ADDRESS"])]
    reach: Option<Vec<u64>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// It works.
    Ok,
    /// netvm works without it, less well or with fewer views.
    Without,
    /// netvm does not work without it.
    Missing,
}

#[derive(Debug, Serialize)]
struct Finding {
    /// With blanks before it where it is a part of the one above; programs get it without.
    #[serde(serialize_with = "without_blanks")]
    what: &'static str,
    verdict: Verdict,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

fn without_blanks<S: Serializer>(what: &&'static str, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(what.trim_start())
}

fn finding(what: &'static str, verdict: Verdict, found: impl Into<String>, fix: Option<&str>) -> Finding {
    Finding { what, verdict, found: found.into(), fix: fix.map(str::to_owned) }
}

pub fn run(args: &DoctorArgs) -> Outcome {
    if let Some([process, address]) = args.reach.as_deref() {
        let reached = netvm_sys::process::probe(*process as u32, *address, &mut [0]);
        out!("{}", reached.map_or_else(|error| error.to_string(), |()| REACHED.to_owned()));
        return Ok(ExitCode::SUCCESS);
    }
    let findings: Vec<Finding> = [kernel(), glibc()]
        .into_iter()
        .chain(userfaultfd())
        .chain([
            preload(),
            encryption(),
            memory(),
            overcommit(),
            address_limit(),
            data_limit(),
            hugepages(),
            pressure(),
        ])
        .chain(links())
        .chain(views())
        .collect();
    let works = findings.iter().all(|finding| finding.verdict != Verdict::Missing);
    if args.json {
        out!("{}", serde_json::json!({ "works": works, "findings": findings }));
    } else {
        for finding in &findings {
            let mark = match finding.verdict {
                Verdict::Ok => "ok     ",
                Verdict::Without => "-      ",
                Verdict::Missing => "MISSING",
            };
            out!("{mark} {:<22} {}", finding.what, finding.found);
            if let Some(fix) = &finding.fix {
                out!("        {:<22} -> {fix}", "");
            }
        }
        out!(
            "{}",
            if works {
                "netvm run and netvm lend work here."
            } else {
                "netvm run does not work here; netvm lend does."
            }
        );
    }
    Ok(if works { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn kernel() -> Finding {
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".into());
    finding("kernel", Verdict::Ok, format!("Linux {release} {}", std::env::consts::ARCH), None)
}

fn glibc() -> Finding {
    let loader = ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"];
    match loader.iter().find(|path| Path::new(path).exists()) {
        Some(path) => finding("C library", Verdict::Ok, format!("glibc ({path})"), None),
        None => finding(
            "C library",
            Verdict::Missing,
            "no glibc loader found",
            Some("netvm run preloads into glibc programs; lend and status work without"),
        ),
    }
}

/// What faults in the threads that fault need.
const IN_THREAD: u64 = uffd::FEATURE_MOVE | uffd::FEATURE_SIGBUS;

fn userfaultfd() -> Vec<Finding> {
    let (features, access) = match uffd::probe() {
        Ok(found) => found,
        Err(error) => {
            return vec![finding(
                "userfaultfd",
                Verdict::Missing,
                format!("not permitted: {error}"),
                Some(
                    "as root: sysctl vm.unprivileged_userfaultfd=1, or chmod 666 /dev/userfaultfd, or give CAP_SYS_PTRACE",
                ),
            )];
        }
    };
    let how = match access {
        uffd::Access::Syscall => "full mode by system call",
        uffd::Access::Device => "full mode by /dev/userfaultfd",
    };
    let feature = |bit: u64, what: &'static str, with: &str, without: &'static str| {
        if features & bit == bit {
            finding(what, Verdict::Ok, with, None)
        } else if uffd::unwanted() & bit != 0 {
            finding(what, Verdict::Without, "not used, as NETVM_WITHOUT says", None)
        } else {
            finding(what, Verdict::Without, without, None)
        }
    };
    vec![
        finding("userfaultfd", Verdict::Ok, how, None),
        feature(
            uffd::FEATURE_MOVE,
            "  move pages",
            "pages travel without a copy",
            "needs Linux 6.8; pages are copied, and io_uring and libaio refused to programs with far memory",
        ),
        feature(uffd::FEATURE_POISON, "  poison pages", "available", "needs Linux 6.6"),
        feature(
            uffd::FEATURE_WP_ASYNC,
            "  async protection",
            "available (not used by default)",
            "needs Linux 6.7",
        ),
        finding(
            "  fault path",
            Verdict::Ok,
            format!("auto is {}: {}", FaultPath::Auto.resolved(), WakeCosts::of_this_machine()),
            None,
        ),
        feature(
            IN_THREAD,
            "  in-thread faults",
            "available to programs that ask for them",
            "needs Linux 6.8",
        ),
    ]
}

fn preload() -> Finding {
    match super::run::find_preload() {
        Ok(path) => finding("preload library", Verdict::Ok, path.display().to_string(), None),
        Err(error) => finding("preload library", Verdict::Missing, error, None),
    }
}

/// What `--encrypt` can count on.
fn encryption() -> Finding {
    #[cfg(target_arch = "x86_64")]
    let in_hardware = std::is_x86_feature_detected!("aes") && std::is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    let in_hardware = std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let in_hardware = false;
    if in_hardware {
        finding("encryption", Verdict::Ok, "AES in hardware", None)
    } else {
        finding("encryption", Verdict::Without, "no AES in hardware: --encrypt works, slowly", None)
    }
}

fn memory() -> Finding {
    let size = |name: &str| Size(meminfo(name).unwrap_or(0));
    let text = format!("{} of {} available", size("MemAvailable"), size("MemTotal"));
    finding("memory", Verdict::Ok, text, None)
}

fn overcommit() -> Finding {
    match read("/proc/sys/vm/overcommit_memory").as_deref() {
        Some("2") => finding(
            "overcommit",
            Verdict::Missing,
            "vm.overcommit_memory is 2: 1 TiB of addresses (--area) is refused",
            Some("sysctl vm.overcommit_memory=0, or give a small --area each time"),
        ),
        mode => finding(
            "overcommit",
            Verdict::Ok,
            format!("vm.overcommit_memory is {}", mode.unwrap_or("unknown")),
            None,
        ),
    }
}

fn address_limit() -> Finding {
    let advice = "ulimit -v unlimited, or give a small --area";
    limit("address space limit", "Max address space", u64::MAX, advice)
}

/// The page table of the far area counts as data, though most of it is never touched: 4 GiB for 1 TiB. The program has data, too.
fn data_limit() -> Finding {
    limit("data size limit", "Max data size", 8 << 30, "ulimit -d unlimited, or give a small --area")
}

fn limit(what: &'static str, name: &str, enough_bytes: u64, advice: &'static str) -> Finding {
    let limits = read("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    let soft = line.split_ascii_whitespace().next().unwrap_or("unknown");
    if soft.parse::<u64>().map_or(true, |bytes| bytes >= enough_bytes) {
        return finding(what, Verdict::Ok, soft, None);
    }
    finding(what, Verdict::Missing, format!("{soft} bytes"), Some(advice))
}

fn hugepages() -> Finding {
    match lent_hugepages() {
        Ok(()) => finding("huge pages", Verdict::Ok, "lend --hugepages gets transparent ones", None),
        Err(setting) => finding(
            "huge pages",
            Verdict::Without,
            format!("lend --hugepages gets none: shmem_enabled is {setting}"),
            Some(HUGE_ADVISE),
        ),
    }
}

fn pressure() -> Finding {
    match read("/proc/pressure/memory") {
        Some(text) => {
            let some = text.lines().next().unwrap_or_default().to_owned();
            finding("memory pressure", Verdict::Ok, some, None)
        }
        None => finding(
            "memory pressure",
            Verdict::Without,
            "no /proc/pressure/memory (PSI)",
            Some("boot with psi=1"),
        ),
    }
}

/// What can carry operations on a peer's memory.
fn links() -> Vec<Finding> {
    use netvm_sys::membarrier;
    let chosen = std::env::var("NETVM_LINK").map(|link| format!(" (NETVM_LINK={link})")).unwrap_or_default();
    let tcp = match std::net::TcpListener::bind("127.0.0.1:0") {
        Ok(_) => finding("TCP link", Verdict::Ok, "any host, several rails, encryption", None),
        Err(error) => finding("TCP link", Verdict::Without, format!("cannot listen: {error}"), None),
    };
    let unix = match netvm_sys::net::Stream::pair() {
        Ok(_) => finding("unix link", Verdict::Ok, "this host", None),
        Err(error) => finding("unix link", Verdict::Without, format!("no unix sockets: {error}"), None),
    };
    let shm = match netvm::node::probe_shm() {
        Ok(()) if membarrier::is_available() && membarrier::register() => {
            let text = format!("this host, by itself where both ends can{chosen}");
            finding("shm link", Verdict::Ok, text, None)
        }
        Ok(()) => finding(
            "shm link",
            Verdict::Without,
            format!("this host, a little slower: no membarrier{chosen}"),
            Some("needs Linux 4.16 and a system call filter that lets membarrier(2) through"),
        ),
        Err(error) => finding(
            "shm link",
            Verdict::Without,
            format!("{error}{chosen}"),
            Some("the connection is used instead; a container needs the peer's network name space"),
        ),
    };
    vec![tcp, unix, shm, private_memory(), kernel_reads()]
}

/// Whether a lender of this user has its kernel answer reads.
fn kernel_reads() -> Finding {
    match netvm::lender::probe_kernel_reads() {
        Ok(()) => finding(
            "kernel reads",
            Verdict::Ok,
            "`netvm lend` has the kernel answer reads from other hosts",
            None,
        ),
        Err(error) => finding(
            "kernel reads",
            Verdict::Without,
            format!("reads from other hosts wake the lender: {error}"),
            Some("to have the kernel answer them a lender needs Linux 6.6, CAP_BPF and CAP_NET_ADMIN"),
        ),
    }
}

const REACHED: &str = "reached";

/// Whether another process of this user can copy from and to this one, and what keeps it from that.
fn private_memory() -> Finding {
    const WHAT: &str = "  private memory";
    let byte = 1u8;
    let address = (&raw const byte).addr().to_string();
    let asked = std::env::current_exe().and_then(|program| {
        let process = std::process::id().to_string();
        std::process::Command::new(program).args(["doctor", "--reach", &process, &address]).output()
    });
    let said = match asked {
        Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    let scope = read("/proc/sys/kernel/yama/ptrace_scope");
    if said == REACHED {
        let text = "copied between processes of one user (process_vm_readv, process_vm_writev)";
        return finding(WHAT, Verdict::Ok, text, None);
    }
    let fix = match scope.as_deref() {
        Some("1") => {
            "kernel.yama.ptrace_scope is 1: sysctl kernel.yama.ptrace_scope=0, or the exporter names the importer with prctl(PR_SET_PTRACER), or CAP_SYS_PTRACE"
        }
        Some("2") => {
            "kernel.yama.ptrace_scope is 2: only with CAP_SYS_PTRACE; or sysctl kernel.yama.ptrace_scope=0"
        }
        Some("3") => "kernel.yama.ptrace_scope is 3, until the next boot: use Node::memory",
        _ => {
            "a filter of system calls, a security module or a process that is not dumpable; Node::memory needs none of it"
        }
    };
    finding(WHAT, Verdict::Without, format!("goes over the connection ({said})"), Some(fix))
}

/// Files in lent memory.
fn mount() -> Finding {
    const WHAT: &str = "netvm mount";
    const FUSE: &str = "/dev/fuse";
    if !Path::new(FUSE).exists() {
        let text = format!("no {FUSE}: no files in lent memory");
        return finding(WHAT, Verdict::Without, text, Some("as root: modprobe fuse"));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let has_helper = std::env::split_paths(&path).any(|folder| folder.join("fusermount3").is_file());
    let text = match has_helper {
        true => format!("{FUSE}: files in lent memory"),
        false => format!("{FUSE}: files in lent memory, as root only"),
    };
    let fix = (!has_helper).then_some("for others: install fuse3 (fusermount3)");
    finding(WHAT, Verdict::Ok, text, fix)
}

/// Character devices of lent memory, by a kernel module of our own.
fn device() -> Finding {
    const WHAT: &str = "netvm device";
    if Path::new("/sys/module/netvm_mem").exists() {
        let text = "netvm_mem is loaded: lent memory as a character device, as root";
        return finding(WHAT, Verdict::Ok, text, None);
    }
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let headers = format!("/lib/modules/{release}/build");
    if Path::new(&headers).exists() {
        let text = format!("netvm_mem is not loaded; {headers} has what it is built with");
        let fix = "as root: make -C kmod && insmod kmod/netvm_mem.ko";
        return finding(WHAT, Verdict::Without, text, Some(fix));
    }
    finding(
        WHAT,
        Verdict::Without,
        format!("netvm_mem is not loaded, and there is no {headers} to build it with"),
        Some("install this kernel's headers; then, as root: make -C kmod && insmod kmod/netvm_mem.ko"),
    )
}

/// What views of lent memory besides `netvm run`, and the benchmarks, find here.
fn views() -> Vec<Finding> {
    let nbd = match netvm_sys::net::Stream::pair() {
        Ok(_) => finding("netvm nbd", Verdict::Ok, "serves a block device to NBD clients anywhere", None),
        Err(error) => finding("netvm nbd", Verdict::Without, format!("no sockets: {error}"), None),
    };
    let found = |what, path: &str, with: &str, without: &str, fix| {
        if Path::new(path).exists() {
            finding(what, Verdict::Ok, format!("{path}: {with}"), None)
        } else {
            finding(what, Verdict::Without, format!("no {path}: {without}"), fix)
        }
    };
    vec![
        nbd,
        found(
            "  client in the kernel",
            "/dev/nbd0",
            "nbd-client on this host can use it",
            "not on this host, but in others and in user space (nbdcopy, qemu)",
            Some("as root: modprobe nbd"),
        ),
        found(
            "netvm ublk",
            "/dev/ublk-control",
            "lent memory as a block device of this machine; the best swap, as root",
            "netvm swap uses nbd or a loop device",
            Some("as root: modprobe ublk_drv (Linux 6.5 or later)"),
        ),
        mount(),
        device(),
        found(
            "netvm swap",
            "/dev/fuse",
            "by a loop device, where ublk and nbd are missing, as root",
            "only by ublk or nbd",
            Some("as root: modprobe fuse"),
        ),
        found(
            "  loop devices",
            "/dev/loop-control",
            "that needs one",
            "only by ublk or nbd",
            Some("as root: modprobe loop"),
        ),
        found(
            "zram",
            "/sys/class/zram-control",
            "netvm bench fault and bench apps compare with it",
            "netvm bench fault and bench apps compare without it",
            None,
        ),
    ]
}
