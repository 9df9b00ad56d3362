//! `netvm demo`: a sort of four times the local memory, in RAM and on lent memory.

use super::Outcome;
use super::run::{EXIT_NETVM, RunArgs, Tier, ask_lenders, check_local, execute};
use super::secret::SecurityArgs;
use crate::machine::meminfo;
use crate::picture::{self, Area};
use crate::size::Size;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use netvm::pager::PagerError;
use netvm_sys::signal::{self, SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use plotters::prelude::*;
use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

/// Arguments of `netvm demo`.
#[derive(Args, Debug)]
#[command(mut_arg("encrypt", |arg| arg.help("Encrypt everything on the way; needs a secret; the private lender has one by itself")))]
#[command(after_help = "\
The demo sorts random numbers twice, in a process of its own each time: in ordinary memory, then under `netvm run` with a
quarter of the memory. Both results are checked.

Examples:
  netvm demo
  netvm demo --local 64M --data 256M               a small one
  netvm demo --lender big:7070 --secret key        on another machine's memory")]
pub struct DemoArgs {
    /// Local memory for the second run
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    local: Size,
    /// Numbers to sort, in bytes [default: four times --local]
    #[arg(long, value_name = "SIZE")]
    data: Option<Size>,
    /// A lender's address; a private lender is used without
    #[arg(long, value_name = "ADDR")]
    lender: Vec<String>,
    #[command(flatten)]
    security: SecurityArgs,
    /// Where to write the plot
    #[arg(long, value_name = "FILE", default_value = "netvm-demo.svg", value_parser = super::bench::picture)]
    svg: PathBuf,
}

/// Arguments of the process that sorts.
#[derive(Args, Debug)]
pub struct WorkerArgs {
    bytes: u64,
}

/// Less shows nothing.
const DATA_BYTES_MIN: u64 = 1 << 20;

/// What one sort measured.
#[derive(Clone, Copy, Debug, Default)]
struct Sorted {
    checksum: u64,
    sort_ms: u64,
    peak_kib: u64,
}

pub fn run(args: &DemoArgs) -> Outcome {
    let data = args.data.unwrap_or(Size(args.local.0.saturating_mul(4)));
    check_local(args.local)?;
    check_data(args.data.is_some(), data)?;
    // Nobody waits for the sort in RAM to hear that far memory is not to be had,
    netvm_sys::uffd::probe().map_err(|error| PagerError::Userfaultfd((&error).into()))?;
    if !args.lender.is_empty() {
        // or that a lender is not there.
        ask_lenders(&args.lender, &args.security.load()?)?;
    }
    let program = std::env::current_exe().map_err(|error| format!("cannot find netvm itself: {error}"))?;
    out!("Sorting {data} of random numbers, first in RAM, then with {} of local memory.", args.local);
    let in_ram = {
        let mut command = Command::new(&program);
        command.args(["demo-worker", &data.0.to_string()]);
        let mut sorted = None;
        let status = watch("in RAM", &mut command, &mut sorted)?;
        check_worker(status, sorted)?
    };
    let mut run_args = RunArgs {
        local: args.local,
        lender: args.lender.clone(),
        security: args.security.clone(),
        replicas: 1,
        erasure: None,
        encrypt_pages: false,
        // Some slabs, however little is sorted.
        lend_size: args.lender.is_empty().then_some(Size((data.0 * 2).max(64 << 20))),
        file: None,
        learn: None,
        tier: Tier::Auto,
        fault_path: netvm::pager::FaultPath::Auto,
        page_size: Size(4096),
        explain: false,
        stats: false,
        json: false,
        threshold: Size(128 << 10),
        small_local: Size(16 << 20),
        area: Size(1 << 40),
        trace: None,
        report: None,
        program: vec![program.into(), "demo-worker".into(), data.0.to_string().into()],
    };
    run_args.local = args.local;
    let reader = std::sync::Mutex::new(None);
    let (pipe_out, pipe_in) = std::io::pipe()?;
    let report = std::thread::scope(|scope| {
        let follower = scope.spawn(|| follow("on netvm", pipe_out));
        // The command keeps a copy of the pipe's end until it is dropped inside.
        let report = execute(&run_args, |command| command.stdout(pipe_in));
        if let Ok(sorted) = follower.join() {
            *reader.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = sorted;
        }
        report
    })?;
    let sorted = reader.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    report.show_message();
    if report.message.is_some() && !report.status.success() {
        // That was why.
        return Ok(ExitCode::from(EXIT_NETVM));
    }
    if let Some(signal @ (SIGHUP | SIGINT | SIGQUIT | SIGTERM)) = report.status.signal() {
        // Whoever told the sorting process to end has told this one, which handed it on.
        signal::end_by(signal);
    }
    let on_netvm = check_worker(report.status, sorted)?;
    if in_ram.checksum != on_netvm.checksum {
        return Err("the two results differ: this is a bug in netvm, please report it".into());
    }
    let stats = report.stats;
    out!("");
    out!("{:<26} {:>12} {:>14}", "", "in RAM", "on netvm");
    out!("{:<26} {:>10.2} s {:>12.2} s", "sort", seconds(in_ram), seconds(on_netvm));
    out!(
        "{:<26} {:>8} MiB {:>10} MiB",
        "peak local memory",
        (in_ram.peak_kib + 512) >> 10,
        (on_netvm.peak_kib + 512) >> 10
    );
    out!("{:<26} {:>12} {:>14}", "page faults served", "-", stats.faults);
    out!("{:<26} {:>12} {:>10} MiB", "read from the lender", "-", stats.bytes_in >> 20);
    out!("{:<26} {:>12} {:>10} MiB", "written to the lender", "-", stats.bytes_out >> 20);
    out!(
        "Results are equal. {:.1} times the time, {:.0} % of the local memory.",
        seconds(on_netvm) / seconds(in_ram).max(0.001),
        on_netvm.peak_kib as f64 / in_ram.peak_kib.max(1) as f64 * 100.0
    );
    picture::write(&args.svg, (760, 380), |root| plot(root, data, [in_ram, on_netvm]))?;
    out!("Plot: {}", args.svg.display());
    Ok(ExitCode::SUCCESS)
}

/// Before anything is started for a sort that cannot be.
fn check_data(is_given: bool, data: Size) -> Result<(), String> {
    if data.0 < DATA_BYTES_MIN {
        return Err(format!("--data {data} is too little to sort; give at least {}", Size(DATA_BYTES_MIN)));
    }
    let what = if is_given { "--data" } else { "four times --local," };
    match meminfo("MemAvailable") {
        Some(free) if data.0 > free => Err(format!(
            "{what} {data} is more than the {} that are free here, and the first sort is in RAM; give a smaller --data",
            Size(free >> 20 << 20)
        )),
        _ => Ok(()),
    }
}

fn seconds(sorted: Sorted) -> f64 {
    sorted.sort_ms as f64 / 1000.0
}

fn watch(
    label: &str,
    command: &mut Command,
    sorted: &mut Option<Sorted>,
) -> Result<std::process::ExitStatus, String> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cannot start the sorting process: {error}"))?;
    if let Some(out) = child.stdout.take() {
        *sorted = follow(label, out);
    }
    child.wait().map_err(|error| format!("cannot wait for the sorting process: {error}"))
}

/// Reads a worker's progress and shows it; returns its result.
fn follow(label: &str, out: impl Read) -> Option<Sorted> {
    let bar = if std::io::stderr().is_terminal() { ProgressBar::new(100) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template("{prefix:>9} [{bar:50}] {pos:>3} % {msg}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_prefix(label.to_owned());
    let mut sorted = None;
    for line in BufReader::new(out).lines().map_while(Result::ok) {
        let mut words = line.split(' ');
        match (words.next(), words.next()) {
            (Some("progress"), Some(percent)) => {
                bar.set_position(percent.parse().unwrap_or(0));
                bar.set_message(words.next().unwrap_or_default().to_owned());
            }
            (Some("done"), Some(checksum)) => {
                let mut number = || words.next().and_then(|word| word.parse().ok());
                sorted = checksum
                    .parse()
                    .ok()
                    .and_then(|checksum| Some(Sorted { checksum, sort_ms: number()?, peak_kib: number()? }));
            }
            _ => {}
        }
    }
    bar.finish_and_clear();
    sorted
}

fn check_worker(status: std::process::ExitStatus, sorted: Option<Sorted>) -> Result<Sorted, String> {
    match sorted {
        Some(sorted) if status.success() => Ok(sorted),
        _ => Err(format!("the sorting process failed ({status})")),
    }
}

/// The process that sorts: `progress PERCENT WHAT` lines, then `done CHECKSUM MILLISECONDS PEAK_KIB`.
pub fn worker(args: &WorkerArgs) -> Outcome {
    let count = usize::try_from(args.bytes / 8).map_err(|_| "too many numbers")?;
    let mut numbers: Vec<u64> = vec![0; count];
    let mut state = 0x1234_5678_9ABC_DEF0_u64;
    let step = (count / 20).max(1);
    let mut sum_before = 0_u64;
    for (index, number) in numbers.iter_mut().enumerate() {
        // xorshift64*
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        *number = state.wrapping_mul(0x2545_F491_4F6C_DD1D);
        sum_before = sum_before.wrapping_add(*number);
        if index % step == 0 {
            say(&format!("progress {} filling", index / step));
        }
    }
    let started = std::time::Instant::now();
    let mut progress = Progress { done: 0, total: count, shown: 0 };
    sort(&mut numbers, 5, &mut progress);
    let sort_ms = started.elapsed().as_millis();
    let mut sum = 0_u64;
    let mut hash = 0xCBF2_9CE4_8422_2325_u64;
    for (index, &number) in numbers.iter().enumerate() {
        if index > 0 && numbers[index - 1] > number {
            return Err(format!("the numbers are not in order at {index}").into());
        }
        sum = sum.wrapping_add(number);
        hash = (hash ^ number).wrapping_mul(0x0000_0100_0000_01B3);
    }
    if sum != sum_before {
        return Err("the sum of the numbers has changed: memory was corrupted".into());
    }
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    say(&format!("done {hash} {sort_ms} {}", peak.trim().trim_end_matches(" kB")));
    Ok(ExitCode::SUCCESS)
}

struct Progress {
    done: usize,
    total: usize,
    shown: usize,
}

/// Quicksort down to `levels` levels, then the standard sort: so that there is progress to show.
fn sort(numbers: &mut [u64], levels: u32, progress: &mut Progress) {
    if levels == 0 || numbers.len() < 1024 {
        numbers.sort_unstable();
        progress.done += numbers.len();
        let percent = 20 + progress.done * 80 / progress.total.max(1);
        if percent != progress.shown {
            progress.shown = percent;
            say(&format!("progress {percent} sorting"));
        }
        return;
    }
    let middle = numbers.len() / 2;
    numbers.select_nth_unstable(middle);
    let (low, high) = numbers.split_at_mut(middle);
    sort(low, levels - 1, progress);
    sort(high, levels - 1, progress);
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // Nobody may be listening; the sort goes on.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Two pairs of bars: time, and peak local memory.
fn plot(root: &Area<'_>, data: Size, results: [Sorted; 2]) -> Result<(), Box<dyn std::error::Error>> {
    const RAM: RGBColor = RGBColor(0x8A, 0x94, 0xA6);
    const NETVM: RGBColor = RGBColor(0x1F, 0x77, 0xB4);
    let title = format!("Sorting {data}: in RAM and on lent memory");
    let root = root.titled(&title, ("sans-serif", 20))?;
    let panels = root.split_evenly((1, 2));
    let [ram, far] = results;
    let measures = [
        ("time, s", [seconds(ram), seconds(far)]),
        ("peak local memory, MiB", [ram.peak_kib as f64 / 1024.0, far.peak_kib as f64 / 1024.0]),
    ];
    for (panel, (label, values)) in panels.iter().zip(measures) {
        let top = values[0].max(values[1]).max(0.001) * 1.2;
        let mut chart = ChartBuilder::on(panel)
            .margin(16)
            .caption(label, ("sans-serif", 16))
            .x_label_area_size(28)
            .y_label_area_size(52)
            .build_cartesian_2d(0.0..2.0, 0.0..top)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .x_labels(0)
            .y_labels(6)
            .y_label_formatter(&|value| {
                let decimals = usize::from(top < 10.0) + usize::from(top < 1.0);
                format!("{value:.decimals$}")
            })
            .label_style(("sans-serif", 13))
            .draw()?;
        for (index, (name, (value, colour))) in
            ["in RAM", "on netvm"].into_iter().zip(values.into_iter().zip([RAM, NETVM])).enumerate()
        {
            let left = index as f64 + 0.2;
            chart.draw_series([Rectangle::new([(left, 0.0), (left + 0.6, value)], colour.filled())])?;
            let text =
                if value < 10.0 { format!("{name}: {value:.2}") } else { format!("{name}: {value:.0}") };
            chart.draw_series([Text::new(text, (left + 0.05, value + top * 0.06), ("sans-serif", 14))])?;
        }
    }
    Ok(())
}
