//! `netvm nbd`: lent memory as a network block device.

use super::Outcome;
use super::secret::SecurityArgs;
use crate::size::Size;
use clap::Args;
use netvm::Error;
use netvm::lender::{BorrowOptions, StopFlag};
use netvm::view::nbd::{NbdConfig, NbdServer, Notice, TlsFiles};
use netvm::volume::{Event, Volume, VolumeOptions};
use netvm_sys::signal::{SIGINT, SIGTERM, Signals};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `netvm nbd`.
#[derive(Args, Debug)]
#[command(after_help = "\
The device's memory is borrowed when the command starts: it cannot run out later. Lenders use memory only for what has been written, and
get back what is trimmed. What is on it lives as long as this command, and as one lender of each part of it.

Examples:
  netvm nbd --size 4G --lender big:7070 --secret key            at 127.0.0.1:10809, for clients on this machine
  nbd-client -C 4 -N \"\" localhost /dev/nbd0 && mkswap /dev/nbd0 && swapon /dev/nbd0
  netvm nbd --size 4G --lender a:7070 --lender b:7070 --replicas 2
                                                                survives the loss of either lender
  netvm nbd --size 1G --lender big:7070 --unix /run/disk
  qemu-img convert -n -f raw -O raw disk.img nbd+unix:///?socket=/run/disk
  netvm nbd --size 1G --lender big:7070 --listen 0.0.0.0:10809 --tls /etc/pki/nbd
                                                                for others, who show a certificate")]
pub struct NbdArgs {
    /// Bytes of the device, e.g. 4G
    #[arg(long)]
    size: Size,
    /// Address of a lender, HOST:PORT or unix:/path; may be given several times
    #[arg(long, value_name = "ADDR", required = true)]
    lender: Vec<String>,
    /// How many lenders keep each byte
    #[arg(long, value_name = "N", default_value_t = 1)]
    replicas: usize,
    /// Listen at this unix socket
    #[arg(long, value_name = "PATH")]
    unix: Option<PathBuf>,
    /// Listen at HOST:PORT [default: 127.0.0.1:10809, unless --unix is given]; may be given several times
    #[arg(long, value_name = "ADDR")]
    listen: Vec<String>,
    /// Name of the export; clients that name none get it, too
    #[arg(long, value_name = "NAME", default_value = "")]
    export: String,
    /// Clients must use TLS: folder with server-cert.pem, server-key.pem and, to check clients' certificates, ca-cert.pem
    #[arg(long, value_name = "DIR")]
    tls: Option<PathBuf>,
    /// Listen on a network although nothing tells who the clients are
    #[arg(long)]
    insecure: bool,
    /// While requests come in quick succession, look for the next one this long before sleeping, in microseconds; 0: never
    #[arg(long, value_name = "US", default_value_t = 0)]
    spin_us: u32,
    #[command(flatten)]
    security: SecurityArgs,
}

pub fn run(args: NbdArgs) -> Outcome {
    if args.size.0 == 0 {
        return Err("a device of 0 bytes is of no use; give --size, e.g. 4G".into());
    }
    let signals = Signals::block(&[SIGTERM, SIGINT]);
    let tls = args.tls.as_deref().map(TlsFiles::load).transpose()?;
    let borrow =
        BorrowOptions { name: "nbd".to_owned(), security: args.security.load()?, ..BorrowOptions::default() };
    let options = VolumeOptions { replicas: args.replicas, borrow, ..VolumeOptions::default() };
    let volume = Volume::open(&args.lender, args.size.0, options)?;
    let mut listen = args.listen;
    listen.extend(args.unix.map(|path| format!("unix:{}", path.display())));
    if listen.is_empty() {
        listen.push("127.0.0.1:10809".to_owned());
    }
    let description = format!("{} on {} lenders, {} replicas", args.size, args.lender.len(), args.replicas);
    let config = NbdConfig {
        listen,
        export: args.export,
        description,
        read_only: false,
        tls,
        insecure: args.insecure,
        spin_us: args.spin_us,
    };
    let mut server = NbdServer::bind(volume, config)?;
    let mut out = std::io::stdout();
    for address in server.addresses() {
        // Whoever started us may have gone; that is no reason not to serve.
        let _ = writeln!(out, "netvm: serving {} at {address}", args.size);
    }
    let _ = out.flush();
    let stop = StopFlag::new()?;
    let flag = stop.clone();
    std::thread::spawn(move || {
        loop {
            signals.wait();
            flag.stop();
        }
    });
    server.run(&stop, |notice| eprintln!("netvm nbd: {}", sentence(&notice)))?;
    Ok(ExitCode::SUCCESS)
}

fn sentence(notice: &Notice) -> String {
    match notice {
        Notice::Volume(Event::LenderLost { lender, error, degraded, lost }) => {
            let what = match (degraded, lost) {
                (_, 1..) => "what only it had is lost: reads of that fail",
                (1.., 0) => "nothing is lost; the other copies are copied to another lender if there is one",
                (0, 0) => "it had nothing",
            };
            // The error's own sentence knows nothing of copies.
            let why = match error {
                Error::LenderLost { reason, .. } => reason.clone(),
                other => other.to_string(),
            };
            format!("lost lender {lender}, {why}: {what}")
        }
        Notice::Volume(Event::LenderBack { lender }) => format!("{lender} is back, empty, and used again"),
        Notice::Volume(Event::Mended { after }) => {
            format!("all copies are complete again, after {:.1} s", after.as_secs_f64())
        }
        Notice::BadClient(what) => format!("closed a client: {what}"),
        _ => format!("{notice:?}"),
    }
}
