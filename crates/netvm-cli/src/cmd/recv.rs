//! `netvm recv`: receives what a `netvm send` sends.

use super::Outcome;
use super::secret::SecurityArgs;
use super::send::{Bar, TransferArgs, report};
use clap::{Args, ValueEnum};
use netvm::security::Security;
use netvm::transfer::{Method, ReceiveOptions, Receiver};
use netvm_sys::net::{Address, remove_socket};
use netvm_sys::signal::{SIGHUP, SIGINT, SIGTERM, Signals, end_by, is_ignored};
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `netvm recv`.
#[derive(Args, Debug)]
#[command(after_help = "\
One transfer is received, then the command ends. Nothing is written outside the folder, whatever the sender says, and nothing in it is
replaced without --overwrite. Until a file is complete and checked it is called .netvm-XXXX.part; when the transfer is cut, the next one
of the same files goes on there.

Exit code 1: everything went well, but files with other content were there and were kept.

Examples:
  netvm recv target                                 for senders on this machine (127.0.0.1:7071)
  netvm recv target --listen 0.0.0.0:7071 --secret key
                                                    for senders with a copy of the secret file")]
pub struct RecvArgs {
    /// Folder that the files are to be in; it must exist
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Address to listen at: HOST:PORT or unix:/path
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7071")]
    listen: String,
    /// How bytes get between the connection and files; the sender may use another way. Of onesided and device the sender decides
    #[arg(long, value_enum, default_value_t = MethodName::Copy)]
    method: MethodName,
    #[command(flatten)]
    how: TransferArgs,
    /// Replace files that are there already
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    security: SecurityArgs,
    /// Listen on a network without a secret: whoever reaches the address can write into the folder
    #[arg(long)]
    insecure: bool,
}

/// Ways that are a receiver's choice.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum MethodName {
    /// Through a buffer, with read and write
    Copy,
    /// Between the connection and the pages of the mapped file
    Mmap,
    /// By the kernel: splice
    Sendfile,
}

impl From<MethodName> for Method {
    fn from(name: MethodName) -> Self {
        match name {
            MethodName::Copy => Self::Copy,
            MethodName::Mmap => Self::Mmap,
            MethodName::Sendfile => Self::Sendfile,
        }
    }
}

pub fn run(args: RecvArgs) -> Outcome {
    let options = ReceiveOptions {
        listen: args.listen,
        method: args.method.into(),
        framing: args.how.framing(),
        overwrite: args.overwrite,
        security: Security { insecure: args.insecure, ..args.security.load()? },
    };
    if options.security.secret.is_none() && args.insecure {
        tell!("netvm: without a secret, whoever reaches the address can write into the folder");
    }
    let ends: Vec<i32> =
        [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&signal| !is_ignored(signal)).collect();
    let signals = Signals::block(&ends);
    let receiver = Receiver::bind(&args.folder, options)?;
    let address: Address = receiver.address().parse()?;
    std::thread::spawn(move || {
        // Nobody else takes the socket away from a listener that is not dropped.
        let number = signals.wait();
        remove_socket(&address);
        end_by(number)
    });
    // Standard output is for the summary: it may be JSON.
    let _ = writeln!(std::io::stderr(), "netvm: waiting for a sender at {}", receiver.address());
    let bar = Bar::new();
    let mut told = Vec::new();
    let result = receiver.run(&mut |progress| match progress.turned_away {
        // However many come for one reason.
        Some(why) if told.contains(&why) => {}
        Some(why) => {
            told.push(why);
            tell!("netvm: turned away a connection: {why}");
        }
        None => bar.show(progress),
    });
    bar.end();
    let summary = result?;
    report("received", &summary, args.how.json)
}
