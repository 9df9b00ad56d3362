//! One run of a program: how long it took, and what it wrote.

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use super::redis;
use netvm::pager::LOCAL_BYTES_MIN;
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

/// Local memory with which nothing leaves.
pub const ALL_LOCAL: u64 = 16 << 30;

/// What is to be done.
#[derive(Debug)]
pub struct Work {
    pub program: OsString,
    pub arguments: Vec<OsString>,
    /// Standard input.
    pub input: Option<PathBuf>,
    /// A file that it writes, in place of standard output.
    pub writes: Option<PathBuf>,
    /// Where it runs.
    pub folder: PathBuf,
    /// The program is a server that this asks.
    pub server: Option<redis::Load>,
}

/// What a run came to.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// What it wrote, or its sum when that is long.
    pub result: String,
    /// Seconds, or microseconds of a request.
    pub value: f64,
    pub p99: Option<f64>,
    pub per_s: Option<f64>,
    pub local_bytes_peak: u64,
    summary: Value,
}

impl Outcome {
    pub fn new(result: &[u8], value: f64) -> Self {
        let result = match std::str::from_utf8(result) {
            Ok(text) if text.len() <= 200 => text.trim().to_owned(),
            _ => format!("{} bytes with the sum {:016x}", result.len(), xxh3_64(result)),
        };
        Self { result, value, ..Self::default() }
    }

    /// What the pager did, in a few words.
    pub fn note(&self) -> String {
        let number = |name: &str| self.summary[name].as_u64().unwrap_or(0);
        let thousands = |name: &str| number(name).div_ceil(1000);
        format!(
            "{}k faults, {}k of them without I/O; {}k pages unpacked; {} MiB in, {} MiB out",
            thousands("faults"),
            thousands("faults_without_io"),
            thousands("unpacked"),
            number("bytes_in") >> 20,
            number("bytes_out") >> 20
        )
    }

    /// All of what it said at the end.
    pub fn summary(&self) -> &Value {
        &self.summary
    }

    /// Takes what `netvm run --json` says at the end.
    pub fn take_summary(&mut self, said: &str) -> Result<(), Box<dyn Error>> {
        let line = said.lines().last().unwrap_or_default();
        self.summary =
            serde_json::from_str(line).map_err(|_| format!("netvm run left no summary: {}", tail(said)))?;
        self.local_bytes_peak = self.summary["local_bytes_peak"].as_u64().unwrap_or(0);
        Ok(())
    }
}

/// The end of what a program said.
pub fn tail(said: &str) -> String {
    let lines: Vec<&str> = said.lines().rev().take(3).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("; ")
}

/// A part of a program's memory, as much as a pager needs at least.
pub fn part(bytes: u64, percent: u64) -> u64 {
    (bytes / 100 * percent).max(LOCAL_BYTES_MIN)
}

/// In RAM.
///
/// # Errors
/// When the program fails.
pub fn in_ram(work: &Work) -> Result<Outcome, Box<dyn Error>> {
    carry_out(work, Command::new(&work.program)).map(|(outcome, _)| outcome)
}

/// With so much of it local.
///
/// # Errors
/// When the program or netvm fails.
pub fn on_netvm(work: &Work, local_bytes: u64) -> Result<Outcome, Box<dyn Error>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["run", "--json", "--local", &local_bytes.to_string(), "--"]).arg(&work.program);
    let (mut outcome, said) = carry_out(work, command)?;
    outcome.take_summary(&said)?;
    Ok(outcome)
}

/// Runs it with `command` in place of its name. Returns what it said on standard error, too.
///
/// # Errors
/// When the program fails, with what it said.
pub fn carry_out(work: &Work, mut command: Command) -> Result<(Outcome, String), Box<dyn Error>> {
    command.args(&work.arguments).current_dir(&work.folder).env("LC_ALL", "C");
    netvm_sys::signal::end_with_parent(&mut command);
    if let Some(load) = &work.server {
        return load.ask(command, &work.folder);
    }
    command.stdin(match &work.input {
        Some(path) => Stdio::from(std::fs::File::open(path)?),
        None => Stdio::null(),
    });
    if let Some(path) = &work.writes {
        // What an earlier run wrote is no result of this one.
        let _ = std::fs::remove_file(path);
    }
    let started = Instant::now();
    let output = command.output().map_err(|error| format!("{}: {error}", work.program.display()))?;
    let seconds = started.elapsed().as_secs_f64();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() {
        return Err(format!("{}: {}: {}", work.program.display(), output.status, tail(&said)).into());
    }
    let written = match &work.writes {
        Some(path) => std::fs::read(path)?,
        None => output.stdout,
    };
    Ok((Outcome::new(&written, seconds), said))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_fails_says_why() {
        let work = |script: &str| Work {
            program: "sh".into(),
            arguments: ["-c", script].map(OsString::from).to_vec(),
            input: None,
            writes: None,
            folder: std::env::temp_dir(),
            server: None,
        };
        assert_eq!(in_ram(&work("echo so")).unwrap().result, "so");
        let long = in_ram(&work("seq 1000")).unwrap().result;
        assert!(long.starts_with("3893 bytes with the sum"), "{long}");
        let error = in_ram(&work("echo no room >&2; exit 3")).unwrap_err().to_string();
        assert!(error.contains("no room") && error.contains('3'), "{error}");
    }

    #[test]
    fn a_part_is_never_too_little() {
        assert_eq!(part(400 << 20, 50), (400 << 20) / 100 * 50);
        assert_eq!(part(5 << 20, 10), LOCAL_BYTES_MIN);
    }
}
