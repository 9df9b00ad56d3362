//! `netvm nbd`: lent memory as a network block device.

use super::Outcome;
use super::volume::{Story, VolumeArgs};
use clap::Args;
use netvm::Error;
use netvm::view::nbd::{NbdConfig, NbdServer, Notice, TlsFiles};
use netvm_sys::signal::{SIGINT, SIGTERM, Signals};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of `netvm nbd`.
#[derive(Args, Debug)]
#[command(after_help = "\
The device's memory is borrowed when the command starts: it cannot run out later. Lenders use memory only for what has been written, and
get back what is trimmed. What is on it lives as long as this command, and as one lender of each part of it.

Examples:
  netvm nbd --size 4G --lender big:7070 --secret key            at 127.0.0.1:10809, for clients on this machine
  nbd-client -C 4 -N \"\" localhost /dev/nbd0 && mkswap /dev/nbd0 && swapon /dev/nbd0
  netvm nbd --size 4G --lender a:7070 --lender b:7070 --replicas 2 --secret key
                                                                survives the loss of either lender
  netvm nbd --size 1G --lender big:7070 --secret key --unix /run/disk
  qemu-img convert -n -f raw -O raw disk.img nbd+unix:///?socket=/run/disk
  netvm nbd --size 1G --lender big:7070 --secret key --listen 0.0.0.0:10809 --tls /etc/pki/nbd
                                                                for others, who show a certificate")]
pub struct NbdArgs {
    #[command(flatten)]
    volume: VolumeArgs,
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
    /// [default: 50, with a single CPU 0]
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(..=10_000))]
    spin_us: Option<u32>,
}

pub fn run(args: NbdArgs) -> Outcome {
    let VolumeArgs { size, replicas, .. } = args.volume;
    if size.0 == 0 {
        return Err("a device of 0 bytes is of no use; give --size, e.g. 4G".into());
    }
    let signals = Signals::block(&[SIGTERM, SIGINT]);
    let tls = args.tls.as_deref().map(load_tls).transpose()?;
    let volume = args.volume.open("nbd", size.0)?;
    let mut listen = args.listen;
    listen.extend(args.unix.map(|path| format!("unix:{}", path.display())));
    if listen.is_empty() {
        listen.push("127.0.0.1:10809".to_owned());
    }
    let description = format!("{size} on {} lenders, {replicas} replicas", args.volume.lender.len());
    let config = NbdConfig {
        listen,
        export: args.export,
        description,
        read_only: false,
        tls,
        insecure: args.insecure,
        spin_us: args.spin_us,
    };
    let mut server = NbdServer::bind(volume, config).map_err(cannot)?;
    let mut out = std::io::stdout();
    for address in server.addresses() {
        // Whoever started us may have gone; that is no reason not to serve.
        let _ = writeln!(out, "netvm: serving {size} at {address}");
    }
    let _ = out.flush();
    let stop = super::stop_on(signals)?;
    let mut story = Story::new(args.volume.lender.len(), replicas);
    server.run(&stop, |notice| {
        if let Some(sentence) = sentence(&mut story, &notice) {
            tell!("netvm nbd: {sentence}");
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// A folder without what it is to have says all that it is to have.
fn load_tls(folder: &Path) -> Result<TlsFiles, String> {
    TlsFiles::load(folder).map_err(|error| {
        let is_there = |name: &str| folder.join(name).is_file();
        match is_there("server-cert.pem") && is_there("server-key.pem") {
            true => error.to_string(),
            false => format!(
                "{error}; --tls wants a folder with server-cert.pem, server-key.pem and, to check clients' certificates, ca-cert.pem"
            ),
        }
    })
}

/// What to do about an address that cannot be listened at, in the words of this command.
fn cannot(error: Error) -> String {
    match &error {
        Error::Listen { address, reason } if address.starts_with("unix:") => {
            format!("cannot listen at {address}: {reason}; choose another --unix path")
        }
        _ => error.to_string(),
    }
}

fn sentence(story: &mut Story, notice: &Notice) -> Option<String> {
    Some(match notice {
        Notice::Volume(event) => return story.sentence(event),
        Notice::BadClient(what) => format!("closed a client: {what}"),
        _ => format!("{notice:?}"),
    })
}
