//! `netvm swap on`: starts a server, waits for its block device, and makes that swap.

use super::super::Outcome;
use super::super::volume::VolumeArgs;
use super::by::By;
use super::off::until;
use super::reserve::{self, Changed};
use super::serve::{self, Ready};
use super::table::{Entry, Files, Reserved};
use crate::size::Size;
use clap::Args;
use netvm_sys::swap::{LoopDevice, PRIORITY_MAX};
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

/// A swap header and nine pages.
const SIZE_MIN: u64 = 40 << 10;
const PAGE_BYTES: u64 = 4096;

/// Arguments of `netvm swap on`.
#[derive(Args, Debug)]
#[command(after_help = "\
Needs root and a block device of the kernel: ublk, nbd, or a loop device on a FUSE file. All memory is borrowed now: it cannot run out later. Lenders use memory only for
what is swapped out. A server stays behind until `netvm swap off`. When the last lender of a page is lost, programs that need the page are
killed (SIGBUS): use replicas. Lenders belong on other machines. One on this machine frees nothing, and its memory may be swapped to itself: then
everything that needs memory waits for good, and the machine has to be reset. Such lenders are refused without --lender-here.
Until `netvm swap off`, vm.min_free_kbytes is raised to a sixteenth of all memory, at most 16 MiB, and vm.watermark_boost_factor is 0.

Examples:
  netvm swap on --size 8G --lender big:7070 --secret key
  netvm swap on --size 8G --lender a:7070 --lender b:7070 --replicas 2 --priority 10 --secret key
                                                    survives the loss of either lender; used before swap of lower priority
  netvm swap on --size 8G --lender big:7070 --by loop --secret key
                                                    though the kernel has better: see netvm doctor
  netvm swap status
  netvm swap off")]
pub struct OnArgs {
    #[command(flatten)]
    pub volume: VolumeArgs,
    /// The kernel fills swap of higher priority first, 0 to 32767 [default: below all other swap]
    #[arg(long, value_name = "P", value_parser = clap::value_parser!(u32).range(..=i64::from(PRIORITY_MAX)))]
    priority: Option<u32>,
    /// What the kernel sees of it [default: the first that this kernel has]
    #[arg(long, value_name = "MEANS", overrides_with = "by")]
    pub by: Option<By>,
    /// Allow lenders on this machine, whose memory the kernel may swap to itself
    #[arg(long)]
    lender_here: bool,
    /// Be the server of the swap with this number
    #[arg(long, hide = true)]
    pub serve: Option<u32>,
}

impl OnArgs {
    pub fn is_server(&self) -> bool {
        self.serve.is_some()
    }

    /// The size, in whole pages.
    pub fn size_bytes(&self) -> u64 {
        self.volume.size.0.next_multiple_of(PAGE_BYTES)
    }
}

/// Whether this process may do it.
///
/// # Errors
/// A sentence with the remedy.
pub fn check_root() -> Result<(), String> {
    match fs::metadata("/proc/self").map(|this| this.uid()) {
        Ok(0) => Ok(()),
        _ => Err("only root can change this machine's swap: try sudo".to_owned()),
    }
}

pub fn run(args: &OnArgs) -> Outcome {
    if args.size_bytes() < SIZE_MIN {
        return Err(format!("{} is too little for swap; give --size, e.g. 8G", args.volume.size).into());
    }
    check_root()?;
    if let Some(address) = args.volume.lender_here().filter(|_| !args.lender_here) {
        return Err(format!(
            "lender {address} is on this machine: that frees no memory, and when the kernel swaps the lender's memory to the lender \
             itself, this machine stands still for good; lend on another machine, or give --lender-here if you know why"
        )
        .into());
    }
    let by = By::choose(args.by)?;
    if by == By::Loop {
        tell!(
            "netvm: warning: with a loop device this machine can stand still for good when all its memory is used up; limit what uses it with \
             cgroups, or give it ublk_drv (Linux 6.5) or nbd: modprobe ublk_drv nbd"
        );
    }
    Files::sweep();
    let Reserved { files, lock } = Files::reserve()?;
    let mut making = Making {
        files,
        lock,
        by,
        server: None,
        device: None,
        ready: Ready::default(),
        changed: Vec::new(),
        entry: None,
        done: false,
    };
    let (pid, started) = making.start_server()?;
    let path = making.device()?;
    let size_bytes = args.size_bytes();
    until(|| size_of(&path) == Some(size_bytes))
        .ok_or_else(|| format!("there is no disk {}", path.display()))?;
    write_header(&path, size_bytes).map_err(|error| format!("cannot write a swap header: {error}"))?;
    let failed;
    (making.changed, failed) = reserve::raise();
    making.changed.iter().for_each(|changed| tell!("netvm: {changed}"));
    failed.iter().for_each(|warning| tell!("netvm: {warning}"));
    // From here on `swap off` finds it, and the server stays when this process is killed: pages may be on it.
    let guard = making.ready.guard.map(started_at).transpose()?;
    let entry = making.entry.insert(Entry {
        pid,
        started,
        guard,
        by,
        device: path.clone(),
        size_bytes,
        replicas: args.volume.replicas,
        changed: making.changed.clone(),
    });
    making.files.write_entry(entry)?;
    making.release_server()?;
    netvm_sys::swap::swap_on(&path, args.priority, true)
        .map_err(|error| format!("the kernel does not take {} as swap: {error}", path.display()))?;
    making.done = true;
    let number = making.files.number();
    out!(
        "netvm: swap {number}: {} on {} lenders at {}",
        Size(size_bytes),
        args.volume.lender.len(),
        path.display()
    );
    Ok(ExitCode::SUCCESS)
}

/// A swap that is being made; undone when dropped too early.
struct Making {
    files: Files,
    lock: fs::File,
    by: By,
    server: Option<Child>,
    /// Open, or else the kernel would take the file off it.
    device: Option<LoopDevice>,
    ready: Ready,
    changed: Vec<Changed>,
    entry: Option<Entry>,
    done: bool,
}

impl Making {
    /// Starts a server and waits until its file is there. Returns its process.
    fn start_server(&mut self) -> Result<(u32, u64), String> {
        let program =
            std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
        let mut command = Command::new(program);
        // systemd's last round of kills leaves processes alone whose name begins so: others may need their pages.
        command.arg0("@netvm").args(std::env::args_os().skip(1)).args([
            "--serve",
            &self.files.number().to_string(),
            "--by",
            self.by.name(),
        ]);
        // The server holds the lock, too, whatever becomes of this process.
        let lock = self.lock.try_clone().map_err(|error| format!("cannot start the server: {error}"))?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(lock);
        let mut server = command.spawn().map_err(|error| format!("cannot start the server: {error}"))?;
        let pid = server.id();
        let said = server.stdout.take();
        self.server = Some(server);
        for line in said.into_iter().flat_map(|said| BufReader::new(said).lines()).map_while(Result::ok) {
            if let Some(warning) = line.strip_prefix(serve::WARNING) {
                tell!("netvm: {warning}");
            } else if let Some(ready) = line.strip_prefix(serve::READY) {
                self.ready = serde_json::from_str(ready).map_err(|error| error.to_string())?;
                return started_at(pid);
            } else {
                return Err(line);
            }
        }
        Err("the server ended before it served".to_owned())
    }

    /// The block device; made here of the file if there is only that.
    fn device(&mut self) -> Result<PathBuf, String> {
        if let Some(device) = &self.ready.device {
            return Ok(device.clone());
        }
        let path = self.files.mount_point();
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(|error| format!("cannot open {}: {error}", path.display()))?;
        let device = LoopDevice::attach(&file, &path.to_string_lossy(), true);
        let device =
            device.map_err(|error| format!("cannot put {} on a loop device: {error}", path.display()))?;
        Ok(self.device.insert(device).path().to_owned())
    }

    /// From now on the server ends only when its device or file is taken away.
    fn release_server(&mut self) -> Result<(), String> {
        let input = self.server.as_mut().and_then(|server| server.stdin.as_mut());
        let written = input.map(|input| input.write_all(b"\n"));
        written.and_then(Result::ok).ok_or_else(|| "the server has ended".to_owned())
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        self.device = None;
        let _ = netvm_sys::fuse::unmount(&self.files.mount_point());
        if let Some(mut server) = self.server.take() {
            // It ends, and takes its device with it. One that was released does so when the device is taken away.
            drop(server.stdin.take());
            let _ = self.entry.as_ref().map(|entry| entry.take_away(&self.files));
            if self.ready.device.is_none() || until(|| !matches!(server.try_wait(), Ok(None))).is_none() {
                // Nothing is on it.
                let _ = server.kill();
            }
            let _ = server.wait();
        }
        // It may have mounted between.
        let _ = netvm_sys::fuse::unmount(&self.files.mount_point());
        self.files.remove();
        reserve::restore(&self.changed);
    }
}

/// The bytes that a block device has.
fn size_of(device: &Path) -> Option<u64> {
    let name = device.file_name()?.to_str()?;
    let sectors = fs::read_to_string(format!("/sys/block/{name}/size")).ok()?;
    Some(sectors.trim().parse::<u64>().ok()? * 512)
}

/// A process, and when it started.
fn started_at(pid: u32) -> Result<(u32, u64), String> {
    netvm_sys::stat::start_time(pid)
        .map(|started| (pid, started))
        .ok_or_else(|| "the server has ended".to_owned())
}

/// What mkswap(8) writes, version 1.
fn write_header(device: &Path, size_bytes: u64) -> std::io::Result<()> {
    let device = OpenOptions::new().read(true).write(true).open(device)?;
    device.write_all_at(&header(size_bytes), 0)?;
    device.sync_all()
}

fn header(size_bytes: u64) -> [u8; PAGE_BYTES as usize] {
    const LABEL: &[u8] = b"netvm";
    let mut page = [0; PAGE_BYTES as usize];
    let last_page = u32::try_from(size_bytes / PAGE_BYTES - 1).unwrap_or(u32::MAX);
    page[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    page[1028..1032].copy_from_slice(&last_page.to_ne_bytes());
    page[1052..1052 + LABEL.len()].copy_from_slice(LABEL);
    page[4086..].copy_from_slice(b"SWAPSPACE2");
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_mkswaps() {
        let path = std::env::temp_dir().join(format!("netvm-swap-header-{}", std::process::id()));
        let size = 1 << 20;
        fs::File::create(&path).unwrap().set_len(size).unwrap();
        let made = Command::new("/usr/sbin/mkswap").args(["-L", "netvm"]).arg(&path).output();
        let theirs = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        if !made.is_ok_and(|output| output.status.success()) {
            let _ = writeln!(std::io::stderr(), "the_header_is_mkswaps: skipped (no mkswap)");
            return;
        }
        let mut ours = header(size);
        // Theirs has a random number in it, too.
        ours[1036..1052].copy_from_slice(&theirs[1036..1052]);
        assert_eq!(ours[..], theirs[..4096]);
    }
}
