//! The `netvm` program: one file per command in `cmd/`.

// First: it has the macros of all that follow.
#[macro_use]
mod say;

mod cmd;
mod elf;
mod folder;
mod help;
mod machine;
mod picture;
mod runs;
mod size;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use netvm::node::LinkChoice;
use std::process::ExitCode;

/// Network virtual memory: use another machine's memory as if it were your own
///
/// A lender offers memory (netvm lend); a program runs on it, unmodified (netvm run).
#[derive(Parser, Debug)]
#[command(
    name = "netvm",
    version,
    propagate_version = true,
    max_term_width = help::COLUMNS,
    after_help = "\
Examples:
  netvm demo                                        see it work: sort four times the local memory
  netvm secret new key                              once; a copy on each machine
  netvm lend --size 8G --listen 0.0.0.0:7070 --secret key
  netvm run --local 256M --lender big:7070 --secret key -- python3 job.py
  netvm run --local 256M -- ./solver                without a lender: a private one on this machine
  netvm nbd --size 4G --lender big:7070 --secret key
                                                    a block device of lent memory
  netvm mount /mnt/far --size 4G --lender big:7070 --secret key
                                                    files in lent memory
  netvm device attach --lender big:7070 --size 4G --secret key
                                                    a character device of lent memory
  netvm recv photos --listen 0.0.0.0:7071 --secret key
  netvm send 2024 2025 --to big:7071 --secret key   files and folders, and on from where it was cut
  netvm ublk --size 4G --lender big:7070 --secret key
                                                    lent memory as /dev/ublkb0
  netvm swap on --size 8G --lender big:7070 --secret key
                                                    swap on lent memory
  netvm status big:7070 --secret key                what a lender serves
  netvm top                                         what running programs do with it
  netvm doctor                                      what works on this machine

Environment:
  NETVM_SECRET_FILE   the file with the secret, where --secret is not given
  NETVM_LINK          how to talk to lenders and nodes: auto; socket, no memory shared on one host; shm, an error where it
                      cannot be; datagrams, single pages are read so also where nothing speaks for it
  NETVM_PRELOAD       where libnetvm_preload.so is, if it is neither beside netvm nor in ../lib/netvm
  NETVM_WITHOUT       features of userfaultfd to leave alone, separated by commas: move, poison, wp-async

Exit code: 0; 125 and a sentence on standard error where netvm cannot do what it is to do; 2 for wrong options. Where there are others, a command's help says so."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Lend this machine's memory to others
    Lend(cmd::lend::LendArgs),
    /// Run a program on lent memory
    Run(cmd::run::RunArgs),
    /// Serve lent memory as a network block device
    Nbd(cmd::nbd::NbdArgs),
    /// Make a block device of this machine from lent memory
    Ublk(cmd::ublk::UblkArgs),
    /// Show lent memory, and other processes' segments, as files
    Mount(cmd::mount::MountArgs),
    /// Show lent memory, and other processes' segments, as character devices
    Device(cmd::device::DeviceArgs),
    /// Send files and folders to another machine
    Send(cmd::send::SendArgs),
    /// Receive what another machine sends
    Recv(cmd::recv::RecvArgs),
    /// Add lent memory to this machine's swap
    Swap(cmd::swap::SwapArgs),
    /// Show what running programs do with lent memory
    Top(cmd::top::TopArgs),
    /// Serve counters of running programs for Prometheus
    Metrics(cmd::metrics::MetricsArgs),
    /// Show what a lender serves, or what runs on lent memory here
    Status(cmd::status::StatusArgs),
    /// Make the secret that lenders and borrowers share
    Secret(cmd::secret::SecretArgs),
    /// See netvm at work: a sort of four times the local memory
    Demo(cmd::demo::DemoArgs),
    /// Tell what works on this machine, and what would make the rest work
    Doctor(cmd::doctor::DoctorArgs),
    /// Measure, next to the floors of this machine
    Bench(cmd::bench::BenchArgs),
    /// Print a completion script for a shell
    Completions(cmd::completions::CompletionsArgs),
    /// Write the manual pages into a folder
    Man(cmd::man::ManArgs),
    #[command(hide = true)]
    DemoWorker(cmd::demo::WorkerArgs),
    #[command(hide = true)]
    UblkGuard(cmd::ublk::GuardArgs),
}

/// The command line's definition.
fn described() -> clap::Command {
    help::flowing(Cli::command())
}

fn main() -> ExitCode {
    let command = match Cli::from_arg_matches(&described().get_matches()) {
        Ok(cli) => cli.command,
        Err(error) => error.format(&mut described()).exit(),
    };
    let prints = match &command {
        Command::Swap(args) => args.only_prints(),
        Command::Device(args) => args.only_prints(),
        Command::Status(_) | Command::Secret(_) | Command::Doctor(_) | Command::Completions(_) => true,
        _ => false,
    };
    if prints {
        netvm_sys::signal::end_at_closed_pipes();
    }
    let result = check_environment().and_then(|()| carry_out(command));
    let code = result.unwrap_or_else(|error| {
        tell!("netvm: {error}");
        ExitCode::from(cmd::run::EXIT_NETVM)
    });
    say::end(code)
}

/// What is set wrong would be ignored.
fn check_environment() -> Result<(), Box<dyn std::error::Error>> {
    let Some(link) = std::env::var_os("NETVM_LINK").filter(|link| !link.is_empty()) else { return Ok(()) };
    let link = link.to_string_lossy();
    link.parse::<LinkChoice>().map_err(|error| format!("NETVM_LINK is {link}: {error}"))?;
    Ok(())
}

fn carry_out(command: Command) -> cmd::Outcome {
    match command {
        Command::Lend(args) => cmd::lend::run(args),
        Command::Run(args) => cmd::run::run(args),
        Command::Nbd(args) => cmd::nbd::run(args),
        Command::Ublk(args) => cmd::ublk::run(&args),
        Command::Mount(args) => cmd::mount::run(&args),
        Command::Device(args) => cmd::device::run(&args),
        Command::Send(args) => cmd::send::run(&args),
        Command::Recv(args) => cmd::recv::run(args),
        Command::Swap(args) => cmd::swap::run(&args),
        Command::Top(args) => cmd::top::run(&args),
        Command::Metrics(args) => cmd::metrics::run(&args),
        Command::Status(args) => cmd::status::run(&args),
        Command::Secret(args) => cmd::secret::run(&args),
        Command::Demo(args) => cmd::demo::run(&args),
        Command::Doctor(args) => cmd::doctor::run(&args),
        Command::Bench(args) => cmd::bench::run(args).map(|()| ExitCode::SUCCESS),
        Command::Completions(args) => cmd::completions::run(&args, described()),
        Command::Man(args) => cmd::man::run(&args, described()),
        Command::DemoWorker(args) => cmd::demo::worker(&args),
        Command::UblkGuard(args) => cmd::ublk::guard(&args),
    }
}
