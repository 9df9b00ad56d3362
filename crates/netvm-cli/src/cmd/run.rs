//! `netvm run`: a program on lent memory.

mod private;
mod report;
mod supervise;
mod trace;
mod watch;

use super::Outcome;
use super::explain;
use super::secret::SecurityArgs;
use crate::elf;
use crate::folder::Folder;
use crate::machine::meminfo;
use crate::runs;
use crate::size::Size;
use clap::{Args, ValueEnum};
use netvm::detail::PagerDetail;
use netvm::lender::{BorrowOptions, Class, LenderStatus};
use netvm::pager::{
    AREA_BYTES_MAX, Erasure, FaultPath, LOCAL_BYTES_MIN, PAGE_BYTES_MAX, REPLICAS_MAX, TierPolicy,
};
use netvm::runfile::{RunFile, RunParams};
use netvm::security::Security;
use netvm::stats::PagerStats;
use netvm_sys::signal::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, Signals};
use netvm_sys::uffd;
use private::{FileTier, PrivateLender};
use serde_json::json;
use std::ffi::OsString;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};
use supervise::{Ended, Supervisor};

/// Exit code when netvm itself could not go on, as of other tools that run a program (env, timeout).
pub const EXIT_NETVM: u8 = 125;
/// Addresses for far memory.
const AREA_DEFAULT: Size = Size(1 << 40);
/// Code, libraries and stacks of a usual process, which are local.
const OTHER_BYTES: u64 = 64 << 20;
const PRELOAD: &str = "libnetvm_preload.so";
/// Where pages are copied, processes of a run may not write into each other's memory. Open MPI 4 asks before only whether Yama is in the way, and waits
/// for ever when a write is refused; so told, its processes copy by way of memory that they share.
const MPI_WRITES: (&str, &str) = ("OMPI_MCA_btl_vader_single_copy_mechanism", "emulated");

/// Arguments of `netvm run`.
#[derive(Args, Debug)]
#[command(mut_arg("encrypt", |arg| arg.help("Encrypt everything on the way; needs a secret; the private lender has one by itself")))]
#[command(after_help = "\
Large anonymous memory of the program (malloc, mmap) becomes far memory: at most --local of it is in this machine at any
time, for all processes of the run together; the rest is on the lenders. Small programs pay nothing. Small allocations are local besides that, up to
--small-local in each process.

A run lasts until all processes have ended that the program has started, also those in the background. Signals that end netvm go to the program;
SIGKILL, which cannot be handed on, ends netvm alone: the program goes on with its memory, and a private lender ends after it.

Before Linux 6.8 pages travel by copy: programs that want io_uring or libaio are told that there is none, and do without. NETVM_WITHOUT=move in the
environment has the same effect on any kernel.

Not covered: statically linked programs, musl, set-user-ID programs. Of the program itself, and what it becomes by exec, a run says so; of other
processes, as those that are started with a cleared environment, it does not. Programs that make system calls of their own, not by libc, run: what they
map so is local, and they must not unmap, move or drop far memory so.

Most fields of --json are the counters of netvm metrics --print, which has a line of help for each.

Examples:
  netvm run --local 256M -- ./solver                               a private lender on this machine
  netvm run --local 1G --lender a:7070 --lender b:7070 --secret key -- python3 job.py
  netvm run --local 256M --explain -- ./solver                     and what more memory would save
  netvm run --lender a:7070 --lender b:7070 --replicas 2 --secret key -- ./solver     either of the two may die
  netvm run --local 1G --lender a:7070 --secret key --file /var/tmp:64G -- ./solver   what a has no room for goes to a file
  netvm run --lender a:7070 --lender b:7070 --lender c:7070 --erasure 2+1 --secret key -- ./solver     any one of the three may die; takes 1.5 times the memory, not twice
  netvm run --local 512M --stats -- sh -c 'first && second'
  netvm run --local 512M --trace job.json --report job.svg -- python3 job.py
  netvm run --local 512M --learn job.record -- ./pagerank graph        knows the second time what comes next

While it runs: netvm top.

Exit code: the program's; 128 + N if signal N ended it; 125 if netvm itself could not go on, or start it; 2 for wrong options of netvm.")]
pub struct RunArgs {
    /// Local memory for the program's large data, of all processes together, at least 4M; small allocations come on top: see --small-local
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    pub local: Size,
    /// A lender's address, HOST:PORT or unix:/path; may be given up to 64 times
    #[arg(long, value_name = "ADDR")]
    pub lender: Vec<String>,
    /// How many lenders hold each page, 1 to 4: with 2, the program goes on when one of them is lost
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub replicas: usize,
    /// Each page in K parts (2, 4 or 8) on different lenders, and M more (1 to 4) that are computed from them: the program goes on when any
    /// M of the K+M lenders are lost
    #[arg(long, value_name = "K+M", conflicts_with = "replicas")]
    pub erasure: Option<Erasure>,
    #[command(flatten)]
    pub security: SecurityArgs,
    /// Encrypt every page that leaves this process, under a key of its own: lenders can neither read it nor change it unnoticed
    #[arg(long)]
    pub encrypt_pages: bool,
    /// Without --lender: size of the private lender [default: most of this machine's free memory]
    #[arg(long, value_name = "SIZE", conflicts_with = "lender")]
    pub lend_size: Option<Size>,
    /// Where pages go when all lenders are full: a file in this folder, of at most SIZE [default: most of what is free there]
    #[arg(long, value_name = "FOLDER[:SIZE]", conflicts_with = "erasure")]
    pub file: Option<FileTier>,
    /// Where pages go that are not local: `auto` packs them into local memory as far as this costs less than fetching them
    #[arg(long, value_enum, default_value = "auto")]
    pub tier: Tier,
    /// Who serves page faults: the pager's `thread`, wherever it is; on the `same-cpu` as a thread that does nearly all the faulting; or
    /// looking (`spin`), for a CPU of its own. `auto` measures what it takes to wake a thread
    #[arg(long, value_name = "PATH", default_value = "auto")]
    pub fault_path: FaultPath,
    /// Bytes that come in together at a fault, 4K to 2M: larger ones suit what is read in long pieces
    #[arg(long, value_name = "SIZE", default_value = "4K")]
    pub page_size: Size,
    /// Prefetch by what the program wanted in its last run, too, as FILE has recorded it (what it wanted in this run always counts). FILE is read at the
    /// start, if it is there, and written anew at the end
    #[arg(long, value_name = "FILE")]
    pub learn: Option<PathBuf>,
    /// Print at the end what each place costs, what was chosen, and what more local memory would save
    #[arg(long)]
    pub explain: bool,
    /// Print a summary at the end, to standard error
    #[arg(long)]
    pub stats: bool,
    /// Print the summary as JSON, to standard error: standard output is the program's
    #[arg(long)]
    pub json: bool,
    /// Write a trace of the run, for chrome://tracing or Perfetto
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Draw faults, transfers and local memory over time, and what more local memory would save, as SVG
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Allocations and mappings of at least this size become far memory
    #[arg(long, value_name = "SIZE", default_value = "128K")]
    pub threshold: Size,
    /// Small allocations stay local until a process has this much of them
    #[arg(long, value_name = "SIZE", default_value = "16M")]
    pub small_local: Size,
    /// Address space for far memory in each process, less than 16T
    #[arg(long, value_name = "SIZE", default_value = "1T")]
    pub area: Size,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub program: Vec<OsString>,
}

/// Where pages go that are not local.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Tier {
    /// Whatever costs least, as measured
    #[default]
    Auto,
    /// To the lenders only
    Lender,
    /// Packed into up to three quarters of the local memory, the oldest to the lenders
    Compressed,
}

impl Tier {
    /// What the pager calls it.
    pub fn policy(self) -> TierPolicy {
        match self {
            Tier::Auto => TierPolicy::Auto,
            Tier::Lender => TierPolicy::Lender,
            Tier::Compressed => TierPolicy::Packed,
        }
    }
}

/// What a run did.
pub struct Report {
    pub status: ExitStatus,
    ended: Ended,
    pub elapsed: Duration,
    pub stats: PagerStats,
    pub detail: PagerDetail,
    /// The most memory that one of its processes had at a time, of all kinds, if somebody has waited for it.
    largest_bytes: u64,
    /// How many lenders hold each page.
    pub replicas: usize,
    /// Or how many parts of each.
    pub erasure: Option<Erasure>,
    /// Lenders that were lost.
    pub lost: Vec<String>,
    /// Those that were left, as they asked for it.
    pub left: Vec<String>,
    /// Whether a program was refused io_uring or asynchronous I/O.
    refused: bool,
    /// Why a process of the run lost its far memory.
    pub message: Option<String>,
    /// What lenders are called in tables.
    pub lenders: Vec<String>,
    /// What each of them lends.
    pub classes: Vec<Class>,
}

impl Report {
    /// Says why a process of the run lost its far memory, if one did.
    pub fn show_message(&self) {
        if let Some(message) = &self.message {
            tell!("netvm: {message}");
        }
    }

    /// Says which lenders the run did without, and what that took.
    fn show_losses(&self) {
        let stats = &self.stats;
        if self.lost.is_empty() || self.message.is_some() {
            return;
        }
        let lost = self.lost.join(" and ");
        let back = if stats.lenders_back > 0 { ", which came back" } else { "" };
        if self.replicas == 1 && self.erasure.is_none() {
            // Else the program would not have come to its end.
            tell!("netvm: lost {lost}{back}: nothing of this program was there");
            return;
        }
        tell!(
            "netvm: lost {lost}{back}: no page waited longer than {} ms; {}",
            stats.read_us_peak.div_ceil(1000),
            match stats.pages_repaired {
                0 => match self.may_lose_more() {
                    0 => "no pages could be copied elsewhere, so there was no protection left".to_owned(),
                    more => format!("no pages could be copied elsewhere: {more} more might have been lost"),
                },
                pages if stats.repair_ms > 0 || stats.pages_unprotected == 0 => format!(
                    "{pages} pages were copied elsewhere within {:.1} s",
                    stats.repair_ms as f64 / 1000.0
                ),
                pages =>
                    format!("{pages} pages were copied elsewhere, others were still unprotected at the end"),
            }
        );
        if stats.wrong_pages > 0 {
            tell!(
                "netvm: {} page(s) came back from a lender with other contents than were written, and were read from another; do \
                 not use that machine",
                stats.wrong_pages
            );
        }
    }

    /// How pages were kept that were not here, at the end.
    fn protection(&self) -> Option<String> {
        let Self { stats, lost, lenders, replicas, erasure, .. } = self;
        match runs::is_complete(stats, lost.len(), lenders.len(), *replicas, *erasure) {
            true => runs::protection(*replicas, *erasure),
            false => runs::copies(*replicas, *erasure),
        }
    }

    /// How many lenders could have been lost besides, had nothing been copied elsewhere.
    fn may_lose_more(&self) -> usize {
        let all = self.erasure.map_or(self.replicas.saturating_sub(1), Erasure::parity);
        all.saturating_sub(self.lost.len())
    }

    /// Says which lenders the run has left, since they were asked to stop.
    fn show_left(&self) {
        if self.left.is_empty() || self.message.is_some() {
            return;
        }
        tell!(
            "netvm: {} left when asked to stop: {} pages were moved to other lenders",
            self.left.join(" and "),
            self.stats.pages_moved
        );
    }

    /// Says what a program that has failed may have failed for.
    fn show_refused(&self) {
        // Nobody's fault.
        let is_stopped = matches!(self.status.signal(), Some(SIGHUP | SIGINT | SIGQUIT | SIGTERM));
        if self.refused && !self.status.success() && !is_stopped && self.message.is_none() {
            tell!(
                "netvm: the program, or one that it started, wanted io_uring or asynchronous I/O and was told ENOSYS: before Linux 6.8 far pages travel by \
                 copy, which would lose what a device reads into them meanwhile. If it cannot do without, have it read and write by threads"
            );
        }
    }

    /// Says that most of a process's memory was of a kind that is not far.
    fn show_other_memory(&self, args: &RunArgs) {
        let far_bytes = self.stats.local_frames_peak * 4096;
        let bounded = args.local.0.saturating_add(args.small_local.0).saturating_add(OTHER_BYTES);
        if self.ended.preloaded && self.largest_bytes > bounded && far_bytes < args.local.0 / 2 {
            tell!(
                "netvm: a process of this run had {}, while all of them had at most {} of far memory here: what a program shares, maps from files or to be \
                 executed, or by system calls of its own, is local, and not bounded by --local",
                Size(self.largest_bytes >> 20 << 20),
                Size(far_bytes >> 20 << 20),
            );
        }
    }

    /// Says that the program was not on far memory, if so, and nobody has said why.
    fn show_local(&self) {
        if self.exit_code() != EXIT_NETVM {
            self.ended.show_local();
        }
    }

    /// The program's exit code as a shell would give it, or 125 when netvm was the reason for its end.
    fn exit_code(&self) -> u8 {
        if self.message.is_some() && !self.status.success() {
            return EXIT_NETVM;
        }
        self.status.code().unwrap_or_else(|| 128 + self.status.signal().unwrap_or(0)) as u8
    }
}

pub fn run(args: RunArgs) -> Outcome {
    let report = execute(&args, |command| command)?;
    report.show_message();
    report.show_losses();
    report.show_left();
    report.show_refused();
    report.show_local();
    if args.json {
        tell!("{}", to_json(&args, &report));
    } else if args.stats {
        tell!("{}", to_line(&report));
        report.show_other_memory(&args);
    }
    if args.explain && !args.json {
        tell!("{}", explain::faults(args.fault_path).trim_end_matches('\n'));
        tell!("{}", explain::table(&report.stats, args.local.0).trim_end_matches('\n'));
        if let Some(protection) = report.protection() {
            tell!("netvm: pages that were not here were {protection}");
        }
        let lenders = explain::lenders(&report.detail, &report.lenders, &report.classes);
        if !lenders.is_empty() {
            tell!("{}", lenders.trim_end_matches('\n'));
        }
        let more = explain::more_local(&report.detail.reuse, args.local.0);
        if !more.is_empty() {
            tell!("{}", more.trim_end_matches('\n'));
        }
    }
    Ok(ExitCode::from(report.exit_code()))
}

/// Whether all that `NETVM_WITHOUT` names can be left out.
fn check_unwanted() -> Result<(), String> {
    let said = std::env::var(uffd::WITHOUT.to_string_lossy().as_ref()).unwrap_or_default();
    let words = said.split(',').map(str::trim).filter(|word| !word.is_empty());
    let names = || uffd::NAMES.iter().map(|(name, _)| *name);
    for word in words {
        if names().all(|name| name != word) {
            let names: Vec<_> = names().collect();
            return Err(format!("NETVM_WITHOUT has {word:?}; it may have {}", names.join(", ")));
        }
    }
    Ok(())
}

/// Whether a program can have so little local memory.
pub fn check_local(local: Size) -> Result<(), String> {
    if local.0 < LOCAL_BYTES_MIN {
        let least = Size(LOCAL_BYTES_MIN);
        return Err(format!("--local {local} is too little to work with; give at least {least}"));
    }
    Ok(())
}

fn check_page_size(args: &RunArgs) -> Result<(), String> {
    let (size, local) = (args.page_size, args.local);
    if !size.0.is_power_of_two() || !(4096..=PAGE_BYTES_MAX as u64).contains(&size.0) {
        return Err(format!(
            "--page-size {size} is none; give a power of two from 4K to {}",
            Size(PAGE_BYTES_MAX as u64)
        ));
    }
    if local.0 / 4 < size.0 {
        return Err(format!(
            "--local {local} has no room for four pages of {size}; give more, or a smaller --page-size"
        ));
    }
    Ok(())
}

/// Carries out a run; `prepare` may change how the program is started.
pub fn execute(
    args: &RunArgs,
    prepare: impl FnOnce(&mut Command) -> &mut Command,
) -> Result<Report, Box<dyn std::error::Error>> {
    check_unwanted()?;
    check_local(args.local)?;
    if args.local.0 > AREA_BYTES_MAX {
        return Err(format!(
            "--local {} is more than far memory can have addresses for; give less than {}",
            args.local,
            Size(AREA_BYTES_MAX.next_power_of_two())
        )
        .into());
    }
    if args.area.0 < args.local.0 {
        // The default is no help where it is what was too little.
        let remedy = match args.local.0 <= AREA_DEFAULT.0 {
            true => format!("leave --area out for {AREA_DEFAULT}"),
            false => "give less, or as large an --area".to_owned(),
        };
        return Err(format!(
            "--local {} is more memory than {} of far memory have addresses for; {remedy}",
            args.local, args.area
        )
        .into());
    }
    if args.area.0 > AREA_BYTES_MAX {
        return Err(format!(
            "--area {} has more addresses than far memory can have; give less than {}, or leave it out for 1T",
            args.area,
            Size(AREA_BYTES_MAX.next_power_of_two())
        )
        .into());
    }
    check_page_size(args)?;
    check_replicas(args)?;
    check_outputs(args)?;
    let fault_path = fault_path(args.fault_path)?;
    let Some((program, rest)) = args.program.split_first() else { return Err("no program is given".into()) };
    let path = elf::find(&program.to_string_lossy())?;
    elf::check(&path)?;
    let preload = preload_list(&find_preload()?)?;
    // Before any thread: the threads of this process must not take the signals.
    let mut handed_on = vec![SIGCHLD, SIGTERM, SIGHUP, SIGINT, SIGQUIT];
    handed_on.extend(netvm_sys::signal::of_programs());
    let signals = Signals::block(&handed_on);
    let folder = Folder::create()?;
    let mut lenders = args.lender.clone();
    let mut names = lenders.clone();
    let mut classes = Vec::new();
    let mut private = None;
    let mut slab = None;
    let security;
    if lenders.is_empty() {
        let socket = folder.socket();
        security = args.security.ephemeral()?;
        let size = args.lend_size.unwrap_or_else(free_memory);
        private = Some(PrivateLender::start(&socket, size, None, &security, None)?);
        lenders.push(format!("unix:{}", socket.display()));
        names.push("private lender".to_owned());
        classes.push(Class::Remote);
    } else {
        security = args.security.load()?;
        let statuses = ask_lenders(&lenders, &security)?;
        classes.extend(statuses.iter().map(|status| status.class));
        let slabs: Vec<_> = statuses.iter().map(|status| Size(status.slab_bytes)).collect();
        slab = super::slabs::smallest(&lenders, &slabs);
    }
    let mut on_disk = None;
    if let Some(tier) = &args.file {
        let socket = folder.file("file");
        on_disk = Some(PrivateLender::start(&socket, tier.size()?, slab, &security, Some(&tier.folder))?);
        lenders.push(format!("unix:{}", socket.display()));
        names.push(format!("file in {}", tier.folder.display()));
        classes.push(Class::File);
    }
    let learn = record(args.learn.as_deref())?;
    let run_file = folder.run_file();
    let name = args.program.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let run = RunFile::create(
        &run_file,
        &RunParams {
            budget_bytes: args.local.0,
            area_bytes: args.area.0,
            small_local_bytes: args.small_local.0,
            far_threshold_bytes: args.threshold.0,
            lenders,
            names: names.clone(),
            replicas: args.replicas as u64,
            erasure: args.erasure,
            encrypt_pages: args.encrypt_pages,
            private_lender: private.as_ref().map_or(0, PrivateLender::pid),
            security,
            tier: args.tier.policy(),
            fault_path,
            page_bytes: args.page_size.0,
            learn,
            verbose: args.stats,
            command: name.clone(),
        },
    )?;
    for (lender, class) in classes.into_iter().enumerate() {
        run.set_class(lender as u32, class);
    }
    let watch = watch::Watch::start(&run, &name, args.trace.as_deref(), args.report.as_deref())?;
    let mut command = Command::new(&path);
    signals.restore_in(&mut command);
    command.args(rest).env("LD_PRELOAD", preload).env("NETVM_RUN", &run_file);
    if !uffd::can_move() && std::env::var_os(MPI_WRITES.0).is_none() {
        command.env(MPI_WRITES.0, MPI_WRITES.1);
    }
    let supervisor = Supervisor::new(&run, &signals)?;
    let started = Instant::now();
    let mut child =
        prepare(&mut command).spawn().map_err(|error| format!("cannot run {}: {error}", path.display()))?;
    let ended = supervisor.wait_for_program(&mut child)?;
    supervisor.wait_for_the_rest();
    drop(watch);
    let report = Report {
        status: ended.status,
        ended,
        elapsed: started.elapsed(),
        stats: run.summary(),
        detail: run.detail(),
        // A private lender has not been waited for.
        largest_bytes: netvm_sys::descendants::largest_bytes(),
        replicas: args.replicas,
        erasure: args.erasure,
        lost: run.lost_lenders(),
        left: run.left_lenders(),
        refused: run.has_refused(),
        message: run.message().map(|message| {
            let ours = || [&private, &on_disk].into_iter().flatten();
            ours().find_map(|lender| lender.in_words_of_the_run(&message)).unwrap_or(message)
        }),
        lenders: names,
        classes: run.classes(),
    };
    if report.exit_code() == EXIT_NETVM {
        tell_of_dead_lenders(&mut [private.as_mut(), on_disk.as_mut()]);
    }
    drop((private, on_disk));
    Ok(report)
}

/// What one option writes another must not write over.
fn check_outputs(args: &RunArgs) -> Result<(), String> {
    let files = [("--learn", &args.learn), ("--trace", &args.trace), ("--report", &args.report)];
    let files: Vec<_> = files.iter().filter_map(|(option, path)| Some((option, path.as_deref()?))).collect();
    for (index, (option, path)) in files.iter().enumerate() {
        if let Some((other, _)) = files[..index].iter().find(|(_, other)| is_same_file(path, other)) {
            return Err(format!(
                "{other} and {option} would write to one file, {}; give each a file of its own",
                path.display()
            ));
        }
        check_is_read(option, path)?;
    }
    Ok(())
}

/// Who opens a pipe that nobody reads waits until somebody does.
fn check_is_read(option: &str, path: &Path) -> Result<(), String> {
    if !path.metadata().is_ok_and(|metadata| metadata.file_type().is_fifo()) {
        return Ok(());
    }
    let opened = std::fs::OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path);
    match opened {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
            Err(format!("{option} {} is a pipe that nobody reads; name a file", path.display()))
        }
        _ => Ok(()),
    }
}

/// Whether two paths are of one file, also of one that is not there yet. A device such as /dev/null takes what all write.
fn is_same_file(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| Some((path.parent()?.canonicalize().ok()?, path.file_name()?.to_owned()));
    let place = |path: &Path| place(&std::path::absolute(path).ok()?);
    match (one.metadata(), other.metadata()) {
        (Ok(one), Ok(other)) => one.is_file() && (one.dev(), one.ino()) == (other.dev(), other.ino()),
        (Err(_), Err(_)) => place(one).is_some_and(|one| place(other) == Some(one)),
        _ => false,
    }
}

/// Asks lenders how they are.
///
/// # Errors
/// That of the first one that does not answer, or has no room.
pub(super) fn ask_lenders(lenders: &[String], security: &Security) -> netvm::Result<Vec<LenderStatus>> {
    let options = BorrowOptions { security: security.clone(), ..BorrowOptions::default() };
    let ask = |address: &String| {
        let status = netvm::lender::status_with(address, &options)?;
        if status.size_bytes - status.used_bytes.min(status.size_bytes) < status.slab_bytes {
            return Err(netvm::Error::LenderFull {
                lender: address.clone(),
                size_bytes: status.size_bytes,
                used_bytes: status.used_bytes,
                limit: netvm::LenderLimit::Size,
            });
        }
        Ok(status)
    };
    lenders.iter().map(ask).collect()
}

/// Who serves faults, with `auto` decided.
fn fault_path(wanted: FaultPath) -> Result<FaultPath, String> {
    if wanted == FaultPath::InThread {
        return Err("--fault-path in-thread is for programs that ask for far memory themselves (FarBuilder::fault_path): any other's system \
                    calls would fail where they meet a page that is not there; give auto, thread, same-cpu or spin"
            .into());
    }
    Ok(wanted.resolved())
}

/// Before anything is started for a run that cannot be.
fn check_replicas(args: &RunArgs) -> Result<(), String> {
    let (replicas, lenders) = (args.replicas, args.lender.len() + usize::from(args.file.is_some()));
    if !(1..=REPLICAS_MAX).contains(&replicas) || (replicas > 1 && replicas > lenders) {
        return Err(format!(
            "--replicas {replicas} on {lenders} lender(s) is not possible; give 1 to {REPLICAS_MAX}, and as many --lender at least"
        ));
    }
    let twice = (1..args.lender.len()).find(|&index| args.lender[..index].contains(&args.lender[index]));
    if let Some(erasure) = args.erasure {
        return match twice {
            Some(index) => Err(format!(
                "lender {} is named twice; the parts of a page must be on different lenders",
                args.lender[index]
            )),
            None if lenders < erasure.lenders() => Err(format!(
                "--erasure {erasure} needs {} lenders, and {lenders} are given; name each with --lender ADDR",
                erasure.lenders()
            )),
            None => Ok(()),
        };
    }
    match twice {
        Some(index) if replicas > 1 => Err(format!(
            "lender {} is named twice; replicas must be on different lenders",
            args.lender[index]
        )),
        _ => Ok(()),
    }
}

/// The last words of a program that has lost its memory know only an address.
fn tell_of_dead_lenders(lenders: &mut [Option<&mut PrivateLender>]) {
    for lender in lenders.iter_mut().flatten() {
        if let Some(how) = lender.ended() {
            tell!("netvm: {} has ended too soon ({how})", lender.name());
        }
    }
}

/// Most of the memory that is free now.
fn free_memory() -> Size {
    Size(meminfo("MemAvailable").unwrap_or(4 << 30) / 10 * 9)
}

/// The preloaded library: where NETVM_PRELOAD says, beside the program, or in ../lib/netvm.
pub fn find_preload() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("NETVM_PRELOAD") {
        let path = PathBuf::from(path);
        if !path.is_file() {
            return Err(format!("NETVM_PRELOAD names {}, which is not there", path.display()));
        }
        // The program may change its folder before it starts others.
        return std::path::absolute(&path)
            .map_err(|error| format!("cannot find {}: {error}", path.display()));
    }
    let program = std::env::current_exe().map_err(|error| format!("cannot find netvm itself: {error}"))?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    // Cargo puts it into deps/ when it builds it for the program, and beside the program too when it is asked for it: an
    // older one may lie in the other place.
    let built = [folder.join(PRELOAD), folder.join("deps").join(PRELOAD)];
    let modified = |path: &PathBuf| path.metadata().and_then(|meta| meta.modified()).ok();
    let newest =
        built.into_iter().filter_map(|path| Some((modified(&path)?, path))).max().map(|(_, path)| path);
    let installed = folder.join("../lib/netvm").join(PRELOAD);
    newest.or_else(|| installed.is_file().then_some(installed)).ok_or_else(|| {
        format!(
            "{PRELOAD} is neither beside {} nor in ../lib/netvm: `cargo xtask install` puts it there; or copy it from target/release/deps, or name it in \
             NETVM_PRELOAD",
            program.display()
        )
    })
}

/// The file of the record as the processes of the run find it.
fn record(file: Option<&Path>) -> Result<String, Box<dyn std::error::Error>> {
    let Some(file) = file else { return Ok(String::new()) };
    let file = std::path::absolute(file)?;
    if !file.parent().is_some_and(Path::is_dir) {
        return Err(format!("cannot keep a record in {}: there is no such folder", file.display()).into());
    }
    netvm::pager::check_record(&file)?;
    let file = file.into_os_string().into_string();
    Ok(file.map_err(|file| format!("the path of the record is no text: {}", file.display()))?)
}

fn preload_list(preload: &Path) -> Result<OsString, String> {
    let mut list = preload.as_os_str().to_owned();
    if list.as_encoded_bytes().iter().any(|byte| b" :".contains(byte)) {
        return Err(format!(
            "{} cannot be preloaded: the loader takes a space or colon in a path for the end of it; install netvm elsewhere, or name a copy of \
             {PRELOAD} in NETVM_PRELOAD",
            preload.display()
        ));
    }
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    Ok(list)
}

fn to_line(report: &Report) -> String {
    let stats = &report.stats;
    let mib = |bytes: u64| bytes >> 20;
    format!(
        "netvm: {:.2} s; {} faults ({} without I/O), {} pages prefetched, {} of them hit{}; {} MiB in, {} MiB out; \
         local peak {} MiB, largest process {} MiB",
        report.elapsed.as_secs_f64(),
        stats.faults,
        stats.faults_without_io,
        stats.prefetched,
        stats.prefetch_hits.min(stats.prefetched),
        covered(stats),
        mib(stats.bytes_in),
        mib(stats.bytes_out),
        mib(stats.local_frames_peak * 4096),
        mib(report.largest_bytes),
    ) + &reads(&report.detail)
        + &by_kernels(stats)
        + &foreseen(stats)
        + &named(stats)
        + &moved(report)
}

/// How much of what was read no fault has waited for.
fn covered(stats: &PagerStats) -> String {
    let coverage = stats
        .prefetch_coverage()
        .map(|coverage| format!("; {:.0} % of reads before faults", coverage * 100.0));
    coverage.unwrap_or_default()
}

/// What was moved for lenders that have not left.
fn moved(report: &Report) -> String {
    match report.stats.pages_moved {
        pages if pages > 0 && report.left.is_empty() => {
            format!("; {pages} pages moved, whose lenders asked for their memory")
        }
        _ => String::new(),
    }
}

/// What came without anybody being woken for it.
fn by_kernels(stats: &PagerStats) -> String {
    match stats.kernel_reads {
        0 => String::new(),
        count => format!("; {count} answered by lenders' kernels"),
    }
}

/// How good the record was, if there was one.
fn foreseen(stats: &PagerStats) -> String {
    match stats.foreseen {
        0 => String::new(),
        all => format!("; {all} pages foreseen, {} % of them wanted", stats.foreseen_hits * 100 / all),
    }
}

/// What came as the program had named it.
fn named(stats: &PagerStats) -> String {
    match stats.named {
        0 => String::new(),
        count => format!("; {count} pages named by the program"),
    }
}

/// How long reads from lenders took, if there were any.
fn reads(detail: &PagerDetail) -> String {
    let us = |share| detail.reads.quantile_ns(share).map(|ns| ns as f64 / 1e3);
    match (us(0.5), us(0.99)) {
        (Some(half), Some(most)) => format!("; reads: half within {half:.0} us, 99 % within {most:.0} us"),
        _ => String::new(),
    }
}

fn to_json(args: &RunArgs, report: &Report) -> serde_json::Value {
    let us = |share| report.detail.reads.quantile_ns(share).map(|ns| ns as f64 / 1e3);
    let mut object = json!({
        "elapsed_s": report.elapsed.as_secs_f64(),
        "exit_code": report.exit_code(),
        "local_bytes": args.local.0,
        "local_bytes_peak": report.stats.local_frames_peak * 4096,
        "process_bytes_peak": report.largest_bytes,
        "replicas": report.replicas,
        "erasure": report.erasure.map(|erasure| erasure.to_string()),
        "lost": report.lost,
        "left": report.left,
        "message": report.message,
        "preloaded": report.ended.preloaded,
        "read_us_p50": us(0.5),
        "read_us_p99": us(0.99),
        "prefetch_coverage": report.stats.prefetch_coverage(),
    });
    for (name, value) in PagerStats::NAMES.iter().zip(report.stats.values()) {
        object[*name] = value.into();
    }
    if args.explain {
        object["tiers"] = explain::to_json(&report.stats);
        object["more_local"] = explain::more_local_to_json(&report.detail.reuse, args.local.0);
        object["fault_path"] = explain::faults_to_json(args.fault_path);
        object["lenders"] = explain::lenders_to_json(&report.detail, &report.lenders, &report.classes);
    }
    object
}
