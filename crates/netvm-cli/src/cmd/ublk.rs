//! `netvm ublk`: lent memory as a block device of this machine. docs/design/ublk.md has the whole.

use super::Outcome;
use super::volume::{Story, VolumeArgs};
use clap::Args;
use netvm::view::ublk::{self, Notice, StandIn, UblkConfig, UblkServer};
use netvm_sys::signal::{SIGHUP, SIGINT, SIGTERM, Signals};
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};

const PAGE_BYTES: u64 = 4096;
/// What makes ublk devices, and what to do when it is not there.
pub const CONTROL: (&str, &str) =
    ("/dev/ublk-control", "no ublk in this kernel (Linux 6.5 with CONFIG_BLK_DEV_UBLK; modprobe ublk_drv)");

/// Arguments of `netvm ublk`.
#[derive(Args, Debug)]
#[command(after_help = "\
Needs root and ublk_drv. The device's memory is borrowed when the command starts: it cannot run out later. Lenders use memory only for what
has been written, and get back what is discarded. What is on it lives as long as this command, and as one lender of each part of it.

SIGTERM and SIGINT remove the disk, after what was written to it has been flushed. When this command is killed, requests fail at once and the disk
goes.

Examples:
  netvm ublk --size 4G --lender big:7070 --secret key
  mkfs.ext4 -E nodiscard /dev/ublkb0 && mount -o discard /dev/ublkb0 /mnt
  netvm ublk --size 4G --lender a:7070 --lender b:7070 --replicas 2 --secret key
                                                    survives the loss of either lender")]
pub struct UblkArgs {
    #[command(flatten)]
    volume: VolumeArgs,
    /// Hardware queues
    #[arg(long, value_name = "N", default_value_t = 1)]
    queues: u16,
    /// Requests of each queue that are executed at a time
    #[arg(long, value_name = "N", default_value_t = 64)]
    depth: u16,
}

/// Arguments of the process that looks after a device.
#[derive(Args, Debug)]
pub struct GuardArgs {
    /// Number of the device
    id: u32,
    /// Process that serves it
    #[arg(long)]
    server: u32,
    /// Answer requests with errors instead of removing the device
    #[arg(long)]
    stand_in: bool,
}

pub fn run(args: &UblkArgs) -> Outcome {
    let VolumeArgs { size, .. } = args.volume;
    if size.0 == 0 {
        return Err("a device of 0 bytes is of no use; give --size, e.g. 4G".into());
    }
    if !Path::new(CONTROL.0).exists() {
        return Err(format!("there is no {}: {}", CONTROL.0, CONTROL.1).into());
    }
    let signals = Signals::block(&[SIGTERM, SIGINT]);
    let volume = args.volume.open("ublk", size.0.next_multiple_of(PAGE_BYTES))?;
    let config = UblkConfig { queues: args.queues, depth: args.depth, ..UblkConfig::default() };
    let mut server = UblkServer::new(volume, &config)?;
    let guard = Guard::start(server.id(), false)?;
    let stop = super::stop_on(signals)?;
    let disk = server.disk();
    let mut story = Story::new(args.volume.lender.len(), args.volume.replicas);
    let result = server.run(&stop, |_, notice| match notice {
        Notice::Started => {
            let mut out = std::io::stdout();
            // Whoever started us may have gone; that is no reason not to serve.
            let _ = writeln!(out, "netvm: serving {size} at {}", disk.display()).and_then(|()| out.flush());
        }
        Notice::Volume(event) => {
            if let Some(sentence) = story.sentence(&event) {
                tell!("netvm ublk: {sentence}");
            }
        }
        _ => {}
    });
    drop(server);
    guard.dismiss();
    Ok(result.map(|()| ExitCode::SUCCESS)?)
}

/// A process that outlives the server of a device, and acts when that has died.
#[derive(Debug)]
pub struct Guard(Child);

impl Guard {
    /// For a device of this process.
    ///
    /// # Errors
    /// A sentence.
    pub fn start(id: u32, stand_in: bool) -> Result<Self, String> {
        Self::start_for(id, std::process::id(), stand_in)
    }

    /// For a device of another process, which may be dead.
    ///
    /// # Errors
    /// A sentence.
    pub fn start_for(id: u32, server: u32, stand_in: bool) -> Result<Self, String> {
        let failed = |error| format!("cannot start the guard of the device: {error}");
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.arg0("@netvm").args(["ublk-guard", &id.to_string(), "--server", &server.to_string()]);
        if stand_in {
            command.arg("--stand-in");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(failed)?;
        // It has all that it needs when it says so.
        let said = child.stdout.take().map(|mut out| out.read(&mut [0]));
        match said {
            Some(Ok(1)) => Ok(Self(child)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                Err("the guard of the device ended before it was there".to_owned())
            }
        }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// The server is dead: it is to act. It is still a child of this process.
    pub fn act(mut self) -> Child {
        drop(self.0.stdin.take());
        self.0
    }

    /// It is not needed any more.
    pub fn dismiss(mut self) {
        if let Some(mut input) = self.0.stdin.take() {
            let _ = input.write_all(b"\n");
        }
        let _ = self.0.wait();
    }
}

/// The guard: waits until its server is dead, or needs it no more.
pub fn guard(args: &GuardArgs) -> Outcome {
    let _signals = Signals::block(&[SIGTERM, SIGINT, SIGHUP]);
    // Who kills the server's group or session does not mean this.
    let _ = netvm_sys::process::new_session();
    let stand_in = args.stand_in.then(|| prepare(args.id)).transpose()?;
    {
        let mut out = std::io::stdout();
        out.write_all(b"\n")?;
        out.flush()?;
    }
    if std::io::stdin().read(&mut [0]).unwrap_or(0) > 0 {
        return Ok(ExitCode::SUCCESS);
    }
    match stand_in {
        Some(stand_in) => stand_in.run()?,
        // The number may be another one's device by now. The kernel may have stopped ours already.
        None if [args.server, 0].contains(&ublk::server_of(args.id)?) => ublk::remove(args.id)?,
        None => {}
    }
    Ok(ExitCode::SUCCESS)
}

fn prepare(id: u32) -> Result<StandIn, Box<dyn std::error::Error>> {
    super::swap::protect();
    let stand_in = StandIn::new(id)?;
    netvm_sys::swap::lock_memory()?;
    Ok(stand_in)
}
