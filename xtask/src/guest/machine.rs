//! One guest: QEMU, its console and its disk.

use super::debug;
use super::kernel::{Architecture, Kernel};
use super::tools::{self, Result};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// What the kernel says when something is wrong with it. `panic_on_warn` makes most of it fatal as well.
const COMPLAINTS: [&str; 22] = [
    "BUG:",
    "WARNING: ",
    "Oops",
    "Kernel panic",
    "general protection fault",
    "Internal error:",
    "Unable to handle kernel",
    "unable to handle",
    "INFO: possible ",
    "INFO: suspicious ",
    "INFO: trying to register",
    "INFO: task ",
    "rcu: INFO:",
    "UBSAN:",
    "KASAN:",
    "soft lockup",
    "hard LOCKUP",
    "list_add corruption",
    "list_del corruption",
    "Bad page ",
    "refcount_t: ",
    "new suspected memory leaks",
];
/// How long the kernel may still tell after a complaint.
const AFTER_COMPLAINT: Duration = Duration::from_secs(3);
/// How long a guest may take until its script starts. It takes 4 to 8 s on an idle machine.
const BOOT_LIMIT: Duration = Duration::from_secs(150);
/// What init says before the script.
const STARTS: &str = "guest: test starts";
/// Runs QEMU until the keeper's standard input ends: also when this program is killed, no guest stays.
const KEEPER: &str = "trap : INT TERM HUP; \"$@\" </dev/null & exec >/dev/null 2>&1; cat; kill -9 $!; wait";
/// Room for what a guest brings back.
const DISK_BYTES: u64 = 64 << 20;

/// How a guest is connected.
#[derive(Clone, Debug)]
pub enum Wire {
    /// Not at all.
    None,
    /// To another one, through a unix socket: who listens is started first.
    Pair { socket: PathBuf, listens: bool },
}

/// What to start.
pub struct Machine<'a> {
    pub kernel: &'a Kernel,
    pub packed: bool,
    /// The clock goes by the instructions that were executed, and waiting takes no time of the host.
    pub counted: bool,
    /// Whether the kernel checks its memory as far as it can.
    pub checked: bool,
    /// The host's files can be read.
    pub host: bool,
    pub memory_mib: u64,
    pub initramfs: &'a Path,
    pub wire: Wire,
    /// Console, disk and results are put here.
    pub folder: PathBuf,
    /// Of the script, from its start.
    pub limit: Duration,
    /// How many times as long everything may take: the slower one of two that are connected decides.
    pub slowness: u32,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The script's exit status.
    Status(i32),
    /// The kernel complained; the line.
    Complaint(String),
    /// It took too long.
    Limit,
    /// The machine stopped without saying how the script ended.
    Lost,
}

/// What is known of a guest afterwards.
pub struct Outcome {
    pub end: End,
    /// From the start of QEMU to the first line of the script, if it came so far.
    pub boot: Option<Duration>,
    pub elapsed: Duration,
}

/// A guest that runs. It is killed when it is dropped.
pub struct Running {
    /// The keeper of QEMU.
    child: Child,
    /// What the console says, and when it did.
    lines: Receiver<(Instant, String)>,
    folder: PathBuf,
    started: Instant,
    limit: Duration,
    slowness: u32,
}

impl Drop for Running {
    fn drop(&mut self) {
        // Ends the keeper's standard input.
        let _ = self.child.wait();
    }
}

impl Machine<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new("sh");
        let emulator = format!("qemu-system-{}", self.kernel.architecture.machine());
        command.args(["-c", KEEPER, "sh", &emulator]);
        let console = match self.kernel.architecture {
            Architecture::Amd64 => {
                // QEMU copies byte by byte for `rep movsb`, 8 us a page where instructions are counted. Without these flags the kernel copies words.
                let cpu = if self.checked { "max" } else { "max,erms=off,fsrm=off" };
                command.args(["-M", "q35", "-cpu", cpu, "-vga", "none"]);
                "ttyS0"
            }
            Architecture::Arm64 => {
                command.args(["-M", "virt", "-cpu", "cortex-a76"]);
                "ttyAMA0"
            }
        };
        command
            .args(["-accel", "tcg", "-smp", "1", "-display", "none", "-monitor", "none", "-serial", "stdio"]);
        if self.counted {
            // Two nanoseconds for each.
            command.args(["-icount", "shift=1,sleep=off"]);
        }
        command.args(["-no-reboot", "-nodefaults", "-m", &self.memory().to_string()]);
        command.arg("-kernel").arg(self.kernel.image(self.packed)).arg("-initrd").arg(self.initramfs);
        // Memory is checked as far as the kernel can: KASAN sees more than red zones and poison in slabs. A loop device is open while it is mounted.
        // A check costs more than what is checked: a round trip on loopback has twice the instructions.
        let special = if self.kernel.is_debug() {
            "page_poison=1 bdev_allow_write_mounted=1"
        } else if self.checked {
            "page_poison=1 slub_debug=FZP init_on_alloc=1"
        } else {
            ""
        };
        // A slow host is no reason to complain.
        let append = format!(
            "console={console} loglevel=5 panic=-1 oops=panic panic_on_warn=1 {special} \
             no_timer_check watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=120 mitigations=off"
        );
        command.args(["-append", &append]);
        command
            .arg("-drive")
            .arg(format!("if=virtio,format=raw,cache=unsafe,file={}", self.disk().display()));
        if self.host {
            command.args([
                "-virtfs",
                "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
            ]);
        }
        if let Wire::Pair { socket, listens } = &self.wire {
            let (server, mac) =
                if *listens { ("on", "52:54:00:00:00:01") } else { ("off", "52:54:00:00:00:02") };
            let peer =
                format!("stream,id=pair,server={server},addr.type=unix,addr.path={}", socket.display());
            command.args([
                "-netdev",
                &peer,
                "-device",
                &format!("virtio-net-pci,netdev=pair,romfile=,mac={mac}"),
            ]);
        }
        command
    }

    fn memory(&self) -> u64 {
        self.memory_mib + if self.kernel.is_debug() { debug::MEMORY_MIB } else { 0 }
    }

    fn disk(&self) -> PathBuf {
        self.folder.join("disk")
    }

    /// Starts it.
    pub fn start(&self) -> Result<Running> {
        tools::make_folder(&self.folder)?;
        let disk = File::create(self.disk()).and_then(|file| file.set_len(DISK_BYTES));
        disk.map_err(|error| format!("cannot make {}: {error}", self.disk().display()))?;
        let console = self.folder.join("console");
        let mut log =
            File::create(&console).map_err(|error| format!("cannot make {}: {error}", console.display()))?;
        let errors =
            log.try_clone().map_err(|error| format!("cannot share {}: {error}", console.display()))?;
        let mut command = self.command();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        let mut child = command.spawn().map_err(|error| format!("cannot run QEMU: {error}"))?;
        let out = child.stdout.take().ok_or("QEMU has no output")?;
        let times = self.folder.join("times");
        let mut times =
            File::create(&times).map_err(|error| format!("cannot make {}: {error}", times.display()))?;
        let (sender, lines) = mpsc::channel();
        let started = Instant::now();
        std::thread::spawn(move || {
            let mut out = BufReader::new(out);
            let mut line = Vec::new();
            while out.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
                let _ = log.write_all(&line);
                let text = String::from_utf8_lossy(&line).trim_end().to_owned();
                if text.starts_with(STARTS) || text.starts_with("== ") || text.starts_with("order: ") {
                    let _ = writeln!(times, "{:7.1} {text}", started.elapsed().as_secs_f64());
                }
                let _ = sender.send((Instant::now(), text));
                line.clear();
            }
        });
        let (limit, slowness) = (self.limit * self.slowness, self.slowness);
        let folder = self.folder.clone();
        Ok(Running { child, lines, folder, started, limit, slowness })
    }
}

impl Running {
    /// Waits for its end. Afterwards the folder has `console`, and in `results` what the script left.
    pub fn finish(mut self) -> Result<Outcome> {
        let mut boot = None;
        let mut complaint: Option<String> = None;
        let mut end = self.started + BOOT_LIMIT * self.slowness;
        let mut late = false;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok((when, line)) => {
                    if boot.is_none() && line.contains(STARTS) {
                        boot = Some(when.duration_since(self.started));
                        end = when + self.limit;
                    }
                    if complaint.is_none() && complains(&line) {
                        complaint = Some(line);
                        end = end.min(when + AFTER_COMPLAINT * self.slowness);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    late = true;
                    break;
                }
            }
        }
        let _ = self.child.wait();
        let elapsed = self.started.elapsed();
        let status = self.unpack()?;
        let end = match (complaint, status) {
            (Some(line), _) => End::Complaint(line),
            (None, _) if late => End::Limit,
            (None, Some(status)) => End::Status(status),
            (None, None) => End::Lost,
        };
        Ok(Outcome { end, boot, elapsed })
    }

    /// Takes the archive off the disk. Gives the status in it, if the guest came so far.
    fn unpack(&self) -> Result<Option<i32>> {
        let results = self.folder.join("results");
        let _ = fs::remove_dir_all(&results);
        tools::make_folder(&results)?;
        let disk = self.folder.join("disk");
        let unpacked = tools::run(Command::new("tar").arg("-xf").arg(&disk).arg("-C").arg(&results));
        let _ = fs::remove_file(&disk);
        if unpacked.is_err() {
            return Ok(None);
        }
        Ok(fs::read_to_string(results.join("status")).ok().and_then(|status| status.trim().parse().ok()))
    }
}

/// Whether a line of the console tells of something wrong with the kernel.
fn complains(line: &str) -> bool {
    // "[   12.345678] "; what the script prints has none.
    let said = line.trim_start().strip_prefix('[').and_then(|rest| rest.split_once("] "));
    let time = |time: &str| time.trim().parse::<f64>().is_ok();
    said.is_some_and(|(when, said)| time(when) && COMPLAINTS.iter().any(|complaint| said.contains(complaint)))
}

#[cfg(test)]
mod tests {
    use super::complains;

    #[test]
    fn only_the_kernel_complains() {
        assert!(complains("[    1.234567] WARNING: CPU: 0 PID: 1 at mm/memory.c:1 f+0x1/0x2"));
        assert!(complains("[   61.000000] INFO: task sh:12 blocked for more than 120 seconds."));
        assert!(complains("[   61.000000] BUG: kernel NULL pointer dereference, address: 0000000000000000"));
        assert!(!complains(
            "[    1.441258] APIC calibration not consistent with PM-Timer: 106ms instead of 100ms"
        ));
        assert!(!complains("WARNING: a program of the guest says so"));
        assert!(!complains("[x] BUG: and so does this one"));
    }
}
