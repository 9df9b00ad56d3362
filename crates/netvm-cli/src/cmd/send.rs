//! `netvm send`: files and folders to a `netvm recv`. What both commands share is here, too.

use super::Outcome;
use super::secret::SecurityArgs;
use crate::size::Size;
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use netvm::transfer::{Framing, Method, Progress, SendOptions, Summary, send};
use serde_json::json;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

/// Most connections of a sender.
const STREAMS_MAX: usize = 16;

/// Arguments of `netvm send`.
#[derive(Args, Debug)]
#[command(after_help = "\
Folders are sent with all files and folders in them; links, devices and the like are left out. Each file arrives complete and
checked, or not at all. When the connection is cut, start both sides again: what has arrived is not sent again.

Exit code 1: everything went well, but the receiver has other files of the same names, and kept those.

Examples:
  netvm recv target                                 on the same machine, at 127.0.0.1:7071
  netvm send report.pdf photos --to 127.0.0.1:7071
  netvm recv target --listen 0.0.0.0:7071 --secret key
  netvm send disk.img --to big:7071 --secret key --method sendfile
                                                    fewer copies, not with --encrypt
  netvm send disk.img --to big:7071 --secret key --method onesided
                                                    into the receiver's mapped file
  netvm send disk.img --to big:7071 --secret key --method device
                                                    the same by the kernel module, as root")]
pub struct SendArgs {
    /// Files and folders
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Where `netvm recv` listens: HOST:PORT or unix:/path
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7071")]
    to: String,
    /// How bytes get between files and the connection; the receiver may use another way
    #[arg(long, value_enum, default_value_t = MethodName::Copy)]
    method: MethodName,
    #[command(flatten)]
    how: TransferArgs,
    /// Connections that files of 16 MiB or more are sent over, 1 to 16 [default: 1]
    #[arg(long, value_name = "N")]
    streams: Option<usize>,
    /// Do without the receiver's check of all bytes
    #[arg(long)]
    no_check: bool,
    #[command(flatten)]
    security: SecurityArgs,
}

/// Options of both sides.
#[derive(Args, Debug)]
pub struct TransferArgs {
    /// What goes over the connection; both sides must use the same
    #[arg(long, value_enum, default_value_t = FramingName::Full)]
    framing: FramingName,
    /// Write a summary in JSON to standard output
    #[arg(long)]
    pub json: bool,
}

impl TransferArgs {
    pub fn framing(&self) -> Framing {
        match self.framing {
            FramingName::Full => Framing::Full,
            FramingName::Simple => Framing::Simple,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum MethodName {
    /// Through a buffer, with read and write
    Copy,
    /// Between the connection and the pages of the mapped file
    Mmap,
    /// By the kernel: sendfile and splice
    Sendfile,
    /// Written by the sender into the receiver's mapped file; `netvm recv` needs no option for it
    Onesided,
    /// The same by the kernel module netvm_mem, as root: the receiver's file is a device of the sender's machine
    Device,
}

impl From<MethodName> for Method {
    fn from(name: MethodName) -> Self {
        match name {
            MethodName::Copy => Self::Copy,
            MethodName::Mmap => Self::Mmap,
            MethodName::Sendfile => Self::Sendfile,
            MethodName::Onesided => Self::OneSided,
            MethodName::Device => Self::Device,
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FramingName {
    /// Names, permissions, times, holes, checksums
    Full,
    /// Of each file its length in 8 bytes, big-endian, and its bytes
    Simple,
}

/// Before anything is read or connected to.
fn check_streams(args: &SendArgs) -> Result<(), String> {
    let Some(streams) = args.streams else { return Ok(()) };
    if !(1..=STREAMS_MAX).contains(&streams) {
        return Err(format!(
            "--streams {streams} is not possible: a file is sent over 1 to {STREAMS_MAX} connections"
        ));
    }
    match (args.method, args.how.framing) {
        _ if streams == 1 => Ok(()),
        (MethodName::Onesided | MethodName::Device, _) => Err(format!(
            "--streams {streams} is not for --method {}: only methods that are not one-sided (copy, mmap, sendfile) use several connections",
            args.method.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
        )),
        (_, FramingName::Simple) => Err(format!(
            "--streams {streams} is not for --framing simple: only the default framing uses several connections"
        )),
        _ => Ok(()),
    }
}

pub fn run(args: &SendArgs) -> Outcome {
    check_streams(args)?;
    let options = SendOptions {
        method: args.method.into(),
        framing: args.how.framing(),
        check: !args.no_check,
        streams: args.streams,
        security: args.security.load()?,
        ..SendOptions::default()
    };
    let bar = Bar::new();
    let result = send(&args.paths, &args.to, &options, &mut |progress| bar.show(progress));
    bar.end();
    let summary = result?;
    report("sent", &summary, args.how.json)
}

/// A progress bar, on terminals only.
pub struct Bar(ProgressBar);

impl Bar {
    pub fn new() -> Self {
        let bar = if std::io::stderr().is_terminal() { ProgressBar::new(0) } else { ProgressBar::hidden() };
        let template =
            "{percent:>3} % [{bar:30}] {bytes} of {total_bytes}, {bytes_per_sec}, {eta} {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        Self(bar)
    }

    pub fn show(&self, progress: &Progress) {
        if self.0.is_hidden() {
            return;
        }
        self.0.set_length(progress.total_bytes);
        self.0.set_position(progress.done_bytes);
        if self.0.message() != progress.name {
            self.0.set_message(progress.name.clone());
        }
    }

    pub fn end(self) {
        self.0.finish_and_clear();
    }
}

/// Says what was done.
pub fn report(done: &str, summary: &Summary, as_json: bool) -> Outcome {
    let seconds = summary.elapsed.as_secs_f64();
    if as_json {
        out!(
            "{}",
            json!({
                "files": summary.files,
                "there": summary.there,
                "kept": summary.kept,
                "left_out": summary.left_out,
                "bytes": summary.bytes,
                "moved_bytes": summary.moved_bytes,
                "checked": summary.checked,
                "protection": summary.protection.to_string(),
                "link": summary.link,
                "streams": summary.streams,
                "seconds": seconds,
            })
        );
    } else {
        let rate = Size((summary.moved_bytes as f64 / seconds.max(1e-6)) as u64);
        let checked = if summary.checked { "checked" } else { "not checked" };
        out!(
            "netvm: {done} {} files, {} in {seconds:.2} s ({rate}/s), {checked}",
            summary.files,
            Size(summary.bytes)
        );
    }
    let folders = summary.kept_folders;
    for (count, what) in [
        (summary.there, "were there already, with the same content"),
        (summary.left_out, "are links, devices or the like and were left out"),
        (
            summary.kept - folders.min(summary.kept),
            "were kept as they are at the receiver, with other content; `netvm recv --overwrite` replaces files, not folders",
        ),
        (
            folders,
            "were not received, as a folder of the same name is in the way; move it, or receive into another folder",
        ),
    ] {
        if count > 0 {
            tell!("netvm: {count} {what}");
        }
    }
    Ok(if summary.kept > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
