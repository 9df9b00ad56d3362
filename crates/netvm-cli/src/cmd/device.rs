//! `netvm device`: lent memory and segments as character devices of the kernel module.

use super::Outcome;
use super::mount::read_key;
use super::secret::SecurityArgs;
use crate::size::Size;
use clap::{Args, Subcommand};
use netvm::device::{self, AttachOptions, DeviceStatus, Source};
use netvm_sys::device::{ACCESSED, DIRTY, PRESENT, WRITABLE};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `netvm device`.
#[derive(Args, Debug)]
#[command(after_help = "\
A device is read, written and mapped as a file of fixed size; its pages are in this machine's page cache, and with the lender or node after fsync or
msync. Needs root and the kernel module netvm_mem: make -C kmod, insmod kmod/netvm_mem.ko. When its lender or node is lost, or breaks off, everything fails with EIO,
mappings with SIGBUS.

Examples:
  netvm device attach --lender big:7070 --size 4G --secret key      /dev/netvm_mem0, as long as it is attached
  netvm device attach --segment grid --at node:7070 --key grid.key  the exported memory of another process
  netvm device status
  netvm device detach 0")]
pub struct DeviceArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// Make a device of a lender's memory, or of a node's segment
    Attach(AttachArgs),
    /// Write what is not written yet, and take a device away
    Detach(DetachArgs),
    /// Show all devices
    Status(StatusArgs),
    /// Show how a page of a device is mapped, down to its physical address
    Page(PageArgs),
}

#[derive(Args, Debug)]
struct AttachArgs {
    /// Address of a lender, HOST:PORT or unix:/path
    #[arg(long, value_name = "ADDR", requires = "size", required_unless_present = "segment")]
    lender: Option<String>,
    /// Bytes to borrow, e.g. 4G
    #[arg(long, requires = "lender")]
    size: Option<Size>,
    /// Name of a segment
    #[arg(long, value_name = "NAME", requires = "at", requires = "key", conflicts_with = "lender")]
    segment: Option<String>,
    /// Address of the node that exports it, HOST:PORT or unix:/path
    #[arg(long, value_name = "ADDR", requires = "segment")]
    at: Option<String>,
    /// File with the segment's key, 32 hexadecimal digits
    #[arg(long, value_name = "FILE", requires = "segment")]
    key: Option<PathBuf>,
    /// File with a key with which the node may notify whoever polls the device
    #[arg(long, value_name = "FILE", requires = "segment")]
    board_key: Option<PathBuf>,
    /// Nothing can be changed through this device
    #[arg(long)]
    read_only: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    security: SecurityArgs,
}

#[derive(Args, Debug)]
struct DetachArgs {
    /// Number of the device: 0 for /dev/netvm_mem0
    #[arg(value_name = "N", value_parser = parse_number)]
    number: u32,
    /// Though it is open, and though not everything can be written
    #[arg(long)]
    force: bool,
}

#[derive(Args, Debug)]
struct PageArgs {
    /// Number of the device: 0 for /dev/netvm_mem0
    #[arg(value_name = "N", value_parser = parse_number)]
    number: u32,
    /// Where in the device, e.g. 64K
    #[arg(long, default_value = "0")]
    offset: Size,
}

#[derive(Args, Debug)]
#[command(after_help = "Exit code: 0, or 1 when the peer of a device is lost.")]
struct StatusArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn parse_number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "give the number of a device: 0 for /dev/netvm_mem0".to_owned())
}

impl DeviceArgs {
    /// Whether it changes nothing.
    pub fn only_prints(&self) -> bool {
        matches!(self.action, Action::Status(_) | Action::Page(_))
    }
}

pub fn run(args: &DeviceArgs) -> Outcome {
    match &args.action {
        Action::Attach(args) => attach(args)?,
        Action::Detach(args) => device::detach(args.number, args.force)?,
        Action::Page(args) => page(args)?,
        Action::Status(args) => return Ok(status(args)),
    }
    Ok(ExitCode::SUCCESS)
}

fn attach(args: &AttachArgs) -> Outcome<()> {
    let (address, source) = match (&args.lender, args.size, &args.segment, &args.at, &args.key) {
        (Some(lender), Some(size), ..) => (lender, Source::Lender { bytes: size.0 }),
        (_, _, Some(name), Some(at), Some(key)) => {
            (at, Source::Segment { name: name.clone(), key: read_key(key)? })
        }
        _ => return Err("give --lender and --size, or --segment, --at and --key".into()),
    };
    let attached = device::attach(&AttachOptions {
        address: address.clone(),
        source,
        read_only: args.read_only,
        board_key: args.board_key.as_deref().map(read_key).transpose()?,
        security: args.security.load()?,
    })?;
    if args.json {
        out!(
            "{}",
            json!({
                "number": attached.number, "path": attached.path(), "bytes": attached.bytes,
                "read_only": attached.read_only,
            })
        );
    } else {
        let only = if attached.read_only { ", only to read" } else { "" };
        out!("{}: {} of {address}{only}", attached.path().display(), Size(attached.bytes));
    }
    Ok(())
}

fn page(args: &PageArgs) -> Outcome<()> {
    let page = device::page(args.number, args.offset.0)?;
    out!("address    {:#x}", page.address);
    for (level, (name, entry)) in ["PGD", "P4D", "PUD", "PMD", "PTE"].iter().zip(page.entries).enumerate() {
        let folded = match (level, page.levels) {
            (1, ..=4) | (2, ..=3) => ", folded into the one above",
            _ => "",
        };
        out!("{name}        {entry:#018x}{folded}");
        if level as u32 == page.leaf {
            break;
        }
    }
    let flags = [(PRESENT, "present"), (WRITABLE, "writable"), (DIRTY, "dirty"), (ACCESSED, "accessed")];
    let said = flags.iter().filter(|(flag, _)| page.flags & flag != 0).map(|(_, name)| format!(", {name}"));
    out!("page       {}{}", Size(page.page_bytes), said.collect::<String>());
    out!("physical   {:#x}", page.physical);
    Ok(())
}

fn status(args: &StatusArgs) -> ExitCode {
    let devices = device::devices();
    if args.json {
        out!("{}", devices.iter().map(described).collect::<Value>());
    } else if devices.is_empty() {
        out!("no devices");
    }
    for device in devices.iter().filter(|_| !args.json) {
        print(device);
    }
    if devices.iter().all(DeviceStatus::is_attached) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn described(device: &DeviceStatus) -> Value {
    json!({
        "number": device.number, "path": device::path(device.number), "kind": device.kind, "name": device.name,
        "peer": device.peer, "state": device.state, "bytes": device.bytes, "read_only": device.read_only, "encrypted": device.encrypted,
        "opens": device.opens, "reads": device.reads.0, "read_bytes": device.reads.1, "writes": device.writes.0,
        "write_bytes": device.writes.1, "flushes": device.flushes, "errors": device.errors, "notified": device.notified,
    })
}

fn print(device: &DeviceStatus) {
    let only = if device.read_only { ", only to read" } else { "" };
    let only = if device.encrypted { format!("{only}, encrypted") } else { only.to_owned() };
    out!("device     {}: {}", device::path(device.number).display(), device.state);
    match device.kind.as_str() {
        "segment" => out!("segment    {} of {}{only}", device.name, device.peer),
        _ => out!("lender     {}{only}", device.peer),
    }
    out!("size       {}, open {} times", Size(device.bytes), device.opens);
    out!("read       {} in {} requests", Size(device.reads.1), device.reads.0);
    out!("written    {} in {} requests, {} flushes", Size(device.writes.1), device.writes.0, device.flushes);
    if device.errors > 0 {
        out!("errors     {}", device.errors);
    }
}
