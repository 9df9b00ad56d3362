//! `netvm mount`: lent memory and segments as files.

use super::Outcome;
use super::secret::SecurityArgs;
use super::volume::{self, Story};
use crate::size::Size;
use clap::Args;
use netvm::Error;
use netvm::lender::{BorrowOptions, StopFlag};
use netvm::node::{ConnectOptions, LinkChoice, Node};
use netvm::region::{Peer, Region};
use netvm::view::mount::{JoinOptions, Joined, MountConfig, MountNotice, MountServer};
use netvm::volume::VolumeOptions;
use netvm_core::key::RemoteKey;
use netvm_sys::signal::{SIGHUP, SIGINT, SIGTERM, Signals};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// Requests of the kernel have at most so many bytes.
const READAHEAD_KIB: u32 = 1024;
/// How much of what may be dirty in this machine's page cache may be of one mount. The kernel's own limit for FUSE, 1, stops writers for most of
/// the time; more would hold up writers to other file systems when lenders stand still.
const DIRTY_PERCENT: u32 = 20;

/// Arguments of `netvm mount`.
#[derive(Args, Debug)]
#[command(after_help = "\
Files live as long as this command (and as one lender of each part of them): it ends when DIR is unmounted, with umount(8), Ctrl-C or SIGTERM, which
is refused while something is open there. Lenders use memory only for what has been written, and get back what is deleted. Needs FUSE; users other than
root, without CAP_SYS_ADMIN, need fusermount3 (package fuse3) besides, and nobody else sees their files.

With --share several mounts have the same files: what one has written is seen by the others after fsync or close, and they lose the files when
this command ends. What a lost lender had reads as an input/output error, never as something else.

A segment is the exported memory of another process: a file of fixed size. Its key is in a file, in the 32 hexadecimal digits of RemoteKey::to_text (Rust) and netvm_key_to_text (C).
The process that exports it has the memory itself: it is not to open the file, as it could wait for itself. Where this mount cannot map the memory
that fails (EDEADLK); through a mount that has joined it is not noticed, and what is written so may be lost.

Examples:
  netvm mount /mnt/far --size 4G --lender big:7070 --secret key
  netvm mount /mnt/far --size 4G --lender a:7070 --lender b:7070 --replicas 2 --secret key
                                                    survives the loss of either lender
  netvm mount /mnt/far --size 4G --lender big:7070 --share 0.0.0.0:7072 --secret key
  netvm mount /mnt/far --join first:7072 --secret key         the same files, on another machine
  netvm mount /mnt/far --segment grid,name=grid,at=node:7070,key=grid.key,read-only")]
pub struct MountArgs {
    /// The folder to mount over
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Bytes for files, e.g. 4G
    #[arg(long, requires = "lender", conflicts_with = "join")]
    size: Option<Size>,
    /// Address of a lender, HOST:PORT or unix:/path; may be given several times
    #[arg(long, value_name = "ADDR", requires = "size")]
    lender: Vec<String>,
    /// How many lenders keep each byte
    #[arg(long, value_name = "N", default_value_t = 1)]
    replicas: usize,
    /// Let other mounts join at HOST:PORT or unix:/path; may be given several times
    #[arg(long, value_name = "ADDR", conflicts_with = "join")]
    share: Vec<String>,
    /// Let other mounts join there that only read; may be given several times
    #[arg(long, value_name = "ADDR", conflicts_with = "join")]
    share_read_only: Vec<String>,
    /// Join the mount that is shared at this address
    #[arg(long, value_name = "ADDR")]
    join: Option<String>,
    /// Show a segment of another process: FILE,name=NAME,at=ADDR,key=KEYFILE[,read-only]; may be given several times
    #[arg(long, value_name = "SEGMENT", conflicts_with = "join")]
    segment: Vec<SegmentArg>,
    /// Nothing can be changed through this mount
    #[arg(long)]
    read_only: bool,
    #[command(flatten)]
    security: SecurityArgs,
}

/// A segment and the file that shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SegmentArg {
    file: String,
    name: String,
    address: String,
    key: PathBuf,
    read_only: bool,
}

impl FromStr for SegmentArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let file =
            parts.next().filter(|file| !file.is_empty()).ok_or("it must begin with the name of a file")?;
        let (mut name, mut address, mut key, mut read_only) = (None, None, None, false);
        for part in parts {
            match part.split_once('=') {
                Some(("name", value)) => name = Some(value.to_owned()),
                Some(("at", value)) => address = Some(value.to_owned()),
                Some(("key", value)) => key = Some(PathBuf::from(value)),
                None if part == "read-only" => read_only = true,
                _ => return Err(format!("{part:?} is none of name=, at=, key= and read-only")),
            }
        }
        let missing = |what| format!("{what}= is missing");
        Ok(Self {
            file: file.to_owned(),
            name: name.ok_or_else(|| missing("name"))?,
            address: address.ok_or_else(|| missing("at"))?,
            key: key.ok_or_else(|| missing("key"))?,
            read_only,
        })
    }
}

pub fn run(args: &MountArgs) -> Outcome {
    if args.join.is_none() && args.size.is_none() && args.segment.is_empty() {
        return Err("there is nothing to mount: give --size and --lender, --join, or --segment".into());
    }
    if args.size.is_some_and(|size| size.0 < 4096) {
        return Err("less than a block of 4096 bytes is of no use; give --size, e.g. 4G".into());
    }
    let folder = std::path::absolute(&args.folder)?;
    take_away_dead(&folder)?;
    let folder = fs::canonicalize(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let signals = Signals::block(&[SIGTERM, SIGINT, SIGHUP]);
    let stop = StopFlag::new()?;
    match &args.join {
        Some(address) => join(args, &folder, address, signals, &stop)?,
        None => serve(args, &folder, signals, &stop)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A mount whose server was killed is in the way of a new one.
fn take_away_dead(folder: &Path) -> Result<(), String> {
    let dead = matches!(fs::metadata(folder), Err(error) if error.raw_os_error() == Some(libc::ENOTCONN));
    if dead && mount_of(folder).is_some_and(|mount| mount.is_ours) {
        tell!("netvm mount: what was mounted at {} has ended without being unmounted", folder.display());
        netvm_sys::fuse::unmount(folder)
            .map_err(|error| format!("cannot unmount {}: {error}", folder.display()))?;
    }
    Ok(())
}

struct MountLine {
    device: String,
    is_ours: bool,
}

/// What is mounted there, without asking it.
fn mount_of(folder: &Path) -> Option<MountLine> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let found = |line: &str| {
        let fields: Vec<&str> = line.split(' ').collect();
        let kind = fields.iter().position(|field| *field == "-").and_then(|at| fields.get(at + 1).copied());
        let same = fields.get(4).is_some_and(|path| Path::new(&unescaped(path)) == folder);
        same.then(|| MountLine { device: fields[2].to_owned(), is_ours: kind == Some("fuse.netvm") })
    };
    mounts.lines().rev().find_map(found)
}

/// Blanks and the like are octal numbers there.
fn unescaped(path: &str) -> std::ffi::OsString {
    let mut bytes = Vec::new();
    let mut rest = path.as_bytes();
    while let Some((&first, others)) = rest.split_first() {
        let number =
            others.get(..3).filter(|_| first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match number.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &others[3..];
            }
            None => {
                bytes.push(first);
                rest = others;
            }
        }
    }
    std::os::unix::ffi::OsStringExt::from_vec(bytes)
}

/// Reads ahead as much as one request may have, and lets writers run ahead of us. Without either, sequential access is only slower.
fn widen(folder: &Path) {
    if let Some(mount) = mount_of(folder).filter(|mount| mount.is_ours) {
        let set = |what, value: u32| {
            let _ = fs::write(format!("/sys/class/bdi/{}/{what}", mount.device), value.to_string());
        };
        set("read_ahead_kb", READAHEAD_KIB);
        set("max_ratio", DIRTY_PERCENT);
    }
}

fn serve(
    args: &MountArgs,
    folder: &Path,
    signals: Signals,
    stop: &StopFlag,
) -> Result<(), Box<dyn std::error::Error>> {
    let security = args.security.load()?;
    let volume = match args.size {
        Some(size) => {
            let borrow = BorrowOptions {
                name: "mount".to_owned(),
                security: security.clone(),
                ..BorrowOptions::default()
            };
            let options = VolumeOptions { replicas: args.replicas, borrow, ..VolumeOptions::default() };
            Some(volume::open(&args.lender, size.0, options)?)
        }
        None => None,
    };
    let config = MountConfig {
        share: args.share.clone(),
        share_read_only: args.share_read_only.clone(),
        security: security.clone(),
        read_only: args.read_only,
    };
    let mut server = MountServer::new(folder, volume, config).map_err(may_not)?;
    for segment in &args.segment {
        let key = read_key(&segment.key)?;
        let node = Arc::new(Node::with_security(security.clone())?);
        let peer = node.connect_with(&segment.address, &ConnectOptions::default())?;
        let region = import(&peer, &segment.name, &key)?;
        server.add_segment(&segment.file, node, region, segment.read_only)?;
    }
    server.mount().map_err(may_not)?;
    watch_signals(signals, stop.clone(), folder.to_owned());
    let mut out = std::io::stdout();
    // Whoever started us may have gone; that is no reason not to serve.
    let size = args.size.map_or_else(String::new, |size| format!("{size} "));
    let _ = writeln!(out, "netvm: mounted {size}at {}", folder.display());
    for (address, read_only) in server.addresses() {
        let how = if read_only { ", to read" } else { "" };
        let _ = writeln!(out, "netvm: others may join at {address}{how}");
    }
    let _ = out.flush();
    widen(folder);
    let mut story = Story::new(args.lender.len(), args.replicas);
    server.run(stop, |notice| tell(&mut story, &notice))?;
    Ok(())
}

/// Mapped if it can be; else over the connection. Not by copies from the exporter's memory: they want its memory map, which it may hold
/// while it waits for this mount.
fn import(peer: &Peer, name: &str, key: &RemoteKey) -> Result<Region, Error> {
    if LinkChoice::from_environment().may_share() {
        peer.choose(LinkChoice::Shm);
        if let Ok(region) = peer.import(name, key) {
            return Ok(region);
        }
    }
    peer.choose(LinkChoice::Socket);
    peer.import(name, key)
}

fn join(
    args: &MountArgs,
    folder: &Path,
    address: &str,
    signals: Signals,
    stop: &StopFlag,
) -> Result<(), Box<dyn std::error::Error>> {
    let options = JoinOptions {
        address: address.to_owned(),
        security: args.security.load()?,
        read_only: args.read_only,
        timeout: Duration::from_secs(5),
    };
    let mut joined = Joined::mount(folder, &options).map_err(may_not)?;
    watch_signals(signals, stop.clone(), folder.to_owned());
    let mut out = std::io::stdout();
    let _ = writeln!(out, "netvm: mounted {address} at {}", folder.display());
    let _ = out.flush();
    widen(folder);
    // Lenders are the other mount's.
    let mut story = Story::new(0, 0);
    joined.run(stop, |notice| tell(&mut story, &notice))?;
    Ok(())
}

/// What to do about a mount that was refused, in the words of this command.
fn may_not(error: Error) -> String {
    match &error {
        Error::Listen { address, reason } => {
            return format!("cannot listen at {address}: {reason}; choose another --share address");
        }
        Error::Connect { lender, reason } => {
            return format!(
                "cannot connect to {lender}: {reason}; is a mount (`netvm mount --share {lender}`) shared there?"
            );
        }
        _ => {}
    }
    let hint = match &error {
        Error::System { errno, .. } if errno.0 == libc::EPERM => ": this process may not mount",
        Error::System { errno, .. } if matches!(errno.0, libc::ENOENT | libc::ENODEV) => {
            ": no FUSE in this kernel (CONFIG_FUSE_FS; modprobe fuse)"
        }
        _ => "",
    };
    format!("{error}{hint}")
}

/// The key in a file.
pub fn read_key(path: &Path) -> Result<RemoteKey, String> {
    let text = fs::read_to_string(path)
        .map_err(|error| format!("cannot read the key file {}: {error}", path.display()))?;
    RemoteKey::from_text(text.trim())
        .ok_or_else(|| format!("the key file {} has no key: 32 hexadecimal digits", path.display()))
}

/// Unmounts when the process is told to end: that ends it, as soon as nobody uses the files.
fn watch_signals(signals: Signals, stop: StopFlag, folder: PathBuf) {
    std::thread::spawn(move || {
        let mut unmounted = false;
        loop {
            signals.wait();
            if unmounted {
                stop.stop();
                continue;
            }
            match unmount(&folder) {
                Ok(()) => {
                    unmounted = true;
                    stop.stop();
                }
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => tell!(
                    "netvm mount: {0} is in use: close what is open there (fuser -vm {0} shows it). Nothing was unmounted",
                    folder.display()
                ),
                Err(error) => {
                    tell!("netvm mount: cannot unmount {}: {error}", folder.display());
                    unmounted = mount_of(&folder).is_none_or(|mount| !mount.is_ours);
                    if unmounted {
                        stop.stop();
                    }
                }
            }
        }
    });
}

/// Unmounts what nobody uses. A program that is being started may have a file open for a moment that it does not know of: it gets a second.
fn unmount(folder: &Path) -> std::io::Result<()> {
    let is_busy = |error: &std::io::Error| error.raw_os_error() == Some(libc::EBUSY);
    for _ in 0..10 {
        match netvm_sys::fuse::unmount_unused(folder) {
            Err(error) if is_busy(&error) => std::thread::sleep(Duration::from_millis(100)),
            done => return done,
        }
    }
    netvm_sys::fuse::unmount_unused(folder)
}

fn tell(story: &mut Story, notice: &MountNotice) {
    if let Some(sentence) = sentence(story, notice) {
        tell!("netvm mount: {sentence}");
    }
}

fn sentence(story: &mut Story, notice: &MountNotice) -> Option<String> {
    Some(match notice {
        MountNotice::Volume(event) => return story.sentence(event),
        MountNotice::Segment(error) => format!("a segment failed (EIO): {error}"),
        MountNotice::OfItself { thread } => format!(
            "thread {thread} may not open a file that is memory of its own process (EDEADLK): it could wait for itself"
        ),
        MountNotice::Joined { peer, read_only } => {
            format!("{peer} has joined{}", if *read_only { ", to read" } else { "" })
        }
        MountNotice::Left { peer, why: None } => format!("{peer} has left"),
        MountNotice::Left { peer, why: Some(why) } => format!("lost {peer}: {why}"),
        MountNotice::Unmounted { joined: 0 } => return None,
        MountNotice::Unmounted { joined } => format!(
            "unmounted here; the files stay for {joined} mounts that have joined, until they leave or this is told to end once more"
        ),
        MountNotice::Lost(error) => {
            format!("{error}. Every access fails (EIO) until this is unmounted; then it can be joined again")
        }
        other => format!("{other:?}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_on_the_command_line() {
        let full = "f,name=n,at=h:1,key=/k,read-only".parse();
        let segment = SegmentArg {
            file: "f".to_owned(),
            name: "n".to_owned(),
            address: "h:1".to_owned(),
            key: "/k".into(),
            read_only: true,
        };
        assert_eq!(full, Ok(segment));
        for (text, says) in [
            ("", "name of a file"),
            ("f", "name="),
            ("f,name=n", "at="),
            ("f,name=n,at=a", "key="),
            ("f,name=n,at=a,key=k,rw", "rw"),
        ] {
            let error = text.parse::<SegmentArg>().unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn paths_of_mounts() {
        assert_eq!(unescaped("/a\\040b\\134\\0"), "/a b\\\\0");
    }
}
