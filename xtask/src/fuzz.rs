//! `cargo xtask fuzz`: libFuzzer on the targets of `fuzz/`, with the toolchain that builds everything else.
//!
//! cargo-fuzz wants a nightly compiler for its sanitizers only. What guides the fuzzer is a pass of LLVM that a stable compiler
//! runs too; code without `unsafe` loses little without the sanitizers.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

const TARGETS: [&str; 6] = ["handshake", "frames", "control", "words", "datagrams", "nbd"];
const FLAGS: [&str; 6] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cforce-frame-pointers=yes",
];

/// Fuzzes all targets, or the one named, for so many seconds each, in turns of one for each CPU; or runs one on one input.
pub fn fuzz(mut arguments: impl Iterator<Item = String>) -> Result<(), String> {
    let (mut seconds, mut words) = (60u64, Vec::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--seconds" => {
                let number = arguments.next().and_then(|text| text.parse().ok());
                seconds = number.filter(|&seconds| seconds > 0).ok_or("--seconds wants a number above 0")?;
            }
            flag if flag.starts_with('-') => return Err(format!("there is no {flag}")),
            _ => words.push(argument),
        }
    }
    let targets: Vec<&str> = match words.first() {
        None => TARGETS.to_vec(),
        Some(word) => {
            let known = TARGETS.into_iter().find(|target| target == word);
            vec![known.ok_or(format!("there is no target {word}: {}", TARGETS.join(", ")))?]
        }
    };
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(|root| root.join("fuzz")).ok_or("no workspace")?;
    let programs = build(&folder, &targets)?;
    if let Some(input) = words.get(1) {
        let status = Command::new(&programs[0]).arg(input).status();
        return if status.is_ok_and(|status| status.success()) { Ok(()) } else { Err("it fails".into()) };
    }
    let cpus = std::thread::available_parallelism().map_or(1, Into::into);
    let mut failed = Vec::new();
    for turn in targets.iter().zip(&programs).collect::<Vec<_>>().chunks(cpus) {
        let mut running = Vec::new();
        for &(target, program) in turn {
            running.push((target, start(&folder, target, program, seconds)?));
        }
        for (target, (mut child, log, artifacts)) in running {
            let well = child.wait().is_ok_and(|status| status.success());
            report(target, &log, &artifacts, well);
            if !well {
                failed.push(*target);
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

/// Builds the targets with coverage; returns the programs.
fn build(folder: &Path, targets: &[&str]) -> Result<Vec<PathBuf>, String> {
    let version = Command::new("rustc").arg("-vV").output().map_err(|error| format!("rustc: {error}"))?;
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).ok_or("rustc tells no host")?;
    let out = match env::var_os("CARGO_TARGET_DIR") {
        Some(out) => PathBuf::from(out).join("fuzz"),
        None => folder.join("target"),
    };
    let mut build = crate::cargo(&["build", "--quiet", "--release", "--target", host]);
    for target in targets {
        build.args(["--bin", target]);
    }
    build.arg("--manifest-path").arg(folder.join("Cargo.toml"));
    // With --target the flags are for the targets and not for build scripts.
    build.env("RUSTFLAGS", FLAGS.join(" ")).env("CARGO_TARGET_DIR", &out);
    println!("== building {} with coverage", targets.join(", "));
    if !build.status().is_ok_and(|status| status.success()) {
        return Err("the targets do not build (they need a C++ compiler)".into());
    }
    Ok(targets.iter().map(|target| out.join(host).join("release").join(target)).collect())
}

type Running = (std::process::Child, PathBuf, PathBuf);

fn start(folder: &Path, target: &str, program: &Path, seconds: u64) -> Result<Running, String> {
    let artifacts = folder.join("artifacts").join(target);
    // What it finds worth keeping stays here; copy what is worth more into fuzz/corpus.
    let found = program.with_file_name(format!("{target}-corpus"));
    let log = program.with_file_name(format!("{target}.log"));
    let make = |path: &Path| fs::create_dir_all(path).map_err(|error| format!("{}: {error}", path.display()));
    make(&artifacts)?;
    make(&found)?;
    let file = fs::File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
    let mut command = Command::new(program);
    command.args([&found, &folder.join("corpus").join(target)]);
    command
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()));
    // A hang is an input of ten seconds; all bounds of the protocol together are far below a gigabyte.
    command.args([
        "-timeout=10",
        "-rss_limit_mb=1024",
        "-max_len=4096",
        "-len_control=10",
        "-print_final_stats=1",
    ]);
    println!("== fuzzing {target} for {seconds} s");
    let child = command.stderr(file).stdout(Stdio::null()).spawn();
    Ok((child.map_err(|error| format!("{}: {error}", program.display()))?, log, artifacts))
}

fn report(target: &str, log: &Path, artifacts: &Path, well: bool) {
    let log = fs::read(log).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let runs = log.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    let coverage = log.lines().rev().find_map(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let at = words.iter().position(|&word| word == "cov:")?;
        words.get(at + 1).map(|&word| word.to_owned())
    });
    let (runs, coverage) = (runs.unwrap_or("?").trim(), coverage.unwrap_or_else(|| "?".into()));
    println!("{target}: {runs} inputs, {coverage} edges covered, {}", if well { "ok" } else { "FAILED" });
    if well {
        return;
    }
    let tail: Vec<&str> = log.lines().rev().take(60).collect();
    tail.into_iter().rev().for_each(|line| println!("  {line}"));
    for file in fs::read_dir(artifacts).into_iter().flatten().flatten() {
        println!("to repeat: cargo xtask fuzz {target} {}", file.path().display());
    }
}
