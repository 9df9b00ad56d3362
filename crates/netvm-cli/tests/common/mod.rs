//! What the tests of the program share.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use serde_json::Value;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Nothing here takes so long; a hang is a failure.
pub const PATIENCE: Duration = Duration::from_secs(240);

/// The program under test.
pub fn netvm() -> Command {
    Command::new(env!("CARGO_BIN_EXE_netvm"))
}

/// `netvm run --local LOCAL --json -- PROGRAM`, ready for more arguments.
pub fn run_on(local: &str, program: impl AsRef<OsStr>) -> Command {
    run_on_tier(local, TIERS[0], program)
}

/// What `--tier` may be: as it is chosen, and packed as far as possible.
pub const TIERS: [&str; 2] = ["auto", "compressed"];

/// As [`run_on`], with `--tier TIER`.
pub fn run_on_tier(local: &str, tier: &str, program: impl AsRef<OsStr>) -> Command {
    let mut command = netvm();
    command.args(["run", "--local", local, "--lend-size", "1G", "--json", "--tier", tier, "--"]).arg(program);
    command
}

/// Ways to keep pages so that any lender may be lost, and how many lenders they need.
pub const REDUNDANT: [(&[&str], usize); 2] = [(&["--replicas", "2"], 2), (&["--erasure", "2+1"], 3)];

/// The same on these lenders, as if they were far, with pages kept in this way.
pub fn run_on_some_of(
    lenders: &[Lender],
    redundancy: &[&str],
    local: &str,
    program: impl AsRef<OsStr>,
) -> Command {
    let mut command = netvm();
    command.env("NETVM_LINK", "socket").args(["run", "--local", local, "--tier", "lender", "--json"]);
    command.args(redundancy);
    for lender in lenders {
        command.args(["--lender", &lender.address]);
    }
    command.arg("--").arg(program);
    command
}

/// What a program left behind.
#[derive(Debug)]
pub struct Done {
    pub status: ExitStatus,
    pub out: Vec<u8>,
    pub err: String,
    pub elapsed: Duration,
}

impl Done {
    /// The summary of `--json`: the last line on standard error.
    pub fn summary(&self) -> Value {
        let line = self.err.lines().last().unwrap_or_default();
        serde_json::from_str(line).unwrap_or_else(|error| panic!("no summary ({error}) in:\n{}", self.err))
    }

    /// Within the budget, and more than that.
    #[track_caller]
    pub fn must_have_used_far_memory(&self) {
        let summary = self.summary();
        let number = |name: &str| summary[name].as_u64().unwrap();
        assert!(number("local_bytes_peak") <= number("local_bytes"), "{summary}");
        assert!(number("remote_reads") + number("unpacked") > 0, "{summary}");
    }

    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }

    #[track_caller]
    pub fn must_succeed(self) -> Self {
        assert!(self.status.success(), "{}\n{}\n{}", self.status, self.out(), self.err);
        self
    }
}

/// Runs a command to its end, or kills it after [`PATIENCE`].
#[track_caller]
pub fn finish(command: &mut Command) -> Done {
    finish_with(command, b"")
}

/// The same with something on standard input.
#[track_caller]
pub fn finish_with(command: &mut Command, input: &[u8]) -> Done {
    let started = Instant::now();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    let (mut stdin, mut stdout, mut stderr) =
        (child.stdin.take().unwrap(), child.stdout.take().unwrap(), child.stderr.take().unwrap());
    std::thread::scope(|scope| {
        // A program need not read its input to the end.
        scope.spawn(move || drop(stdin.write_all(input)));
        let out = scope.spawn(move || {
            let mut bytes = Vec::new();
            stdout.read_to_end(&mut bytes).map(|_| bytes)
        });
        let err = scope.spawn(move || {
            let mut bytes = Vec::new();
            stderr.read_to_end(&mut bytes).map(|_| bytes)
        });
        let status = wait(&mut child, PATIENCE);
        let elapsed = started.elapsed();
        let status = status.unwrap_or_else(|| {
            let _ = child.kill();
            child.wait().unwrap()
        });
        let err = String::from_utf8_lossy(&err.join().unwrap().unwrap()).into_owned();
        assert!(elapsed < PATIENCE, "{command:?} did not end:\n{err}");
        Done { status, out: out.join().unwrap().unwrap(), err, elapsed }
    })
}

/// Waits up to `patience` for a process.
pub fn wait(child: &mut Child, patience: Duration) -> Option<ExitStatus> {
    let end = Instant::now() + patience;
    while Instant::now() < end {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// Waits until something is so.
#[track_caller]
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !so() {
        assert!(Instant::now() < end, "waited too long until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A child that does not outlive its test.
#[derive(Debug)]
pub struct Guard(pub Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A lender on a unix socket in `folder`.
#[derive(Debug)]
pub struct Lender {
    pub process: Guard,
    pub address: String,
}

impl Lender {
    pub fn start(folder: &Folder, size: &str) -> Self {
        Self::named(folder, "lender", size)
    }

    /// One of several.
    pub fn named(folder: &Folder, name: &str, size: &str) -> Self {
        Self::start_with(&folder.path(name), size, &[])
    }

    /// On this socket, with more arguments.
    pub fn start_with(socket: &Path, size: &str, more: &[&str]) -> Self {
        Self::listening(&format!("unix:{}", socket.display()), size, more, Stdio::null())
    }

    pub fn at(address: &str, size: &str) -> Self {
        Self::listening(address, size, &[], Stdio::null())
    }

    /// At this address, with more arguments.
    pub fn listening_with(address: &str, size: &str, more: &[&str]) -> Self {
        Self::listening(address, size, more, Stdio::null())
    }

    /// What it says goes to this file.
    pub fn logged(folder: &Folder, name: &str, size: &str, log: &Path) -> Self {
        let (address, log) = (format!("unix:{}", folder.path(name).display()), File::create(log).unwrap());
        Self::listening(&address, size, &[], log.into())
    }

    fn listening(address: &str, size: &str, more: &[&str], log: Stdio) -> Self {
        let mut command = netvm();
        Self::by(command.args(["lend", "--size", size, "--listen", address]).args(more).stderr(log), address)
    }

    /// Of a command that begins to lend at this address.
    pub fn by(command: &mut Command, address: &str) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        // It says where it listens when it does. Its end of the pipe stays open: it may say more.
        let (mut line, mut byte) = (String::new(), [0]);
        while !line.ends_with('\n') {
            child.stdout.as_mut().unwrap().read_exact(&mut byte).expect("the lender did not start");
            line.push(byte[0].into());
        }
        let (_, told) = line.split_once(" at ").expect("the lender did not start");
        // With port 0 the kernel has chosen.
        let address = if address.ends_with(":0") { told.split(',').next().unwrap() } else { address };
        Self { process: Guard(child), address: address.trim().to_owned() }
    }

    pub fn status(&self) -> Value {
        let done = finish(netvm().args(["status", "--json", &self.address])).must_succeed();
        serde_json::from_slice(&done.out).unwrap()
    }

    pub fn used_bytes(&self) -> u64 {
        self.status()["used_bytes"].as_u64().unwrap()
    }

    pub fn signal(&self, name: &str) {
        signal(self.process.0.id(), name);
    }
}

/// kill(1).
pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap();
    assert!(status.success(), "kill -{name} {pid}");
}

/// A folder for one test.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        // Not CARGO_TARGET_TMPDIR: paths of unix sockets must be short.
        let path = std::env::temp_dir().join(format!("netvm-test-{name}-{}-{count}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Whether a test can run here. Says why not, past the capture of the test harness.
pub fn can_run(test: &str, programs: &[&str]) -> bool {
    let doctor = finish(netvm().args(["doctor", "--json"]));
    let findings: Value = serde_json::from_slice(&doctor.out).unwrap();
    let missing =
        findings["findings"].as_array().unwrap().iter().find(|finding| finding["verdict"] == "missing");
    let reason = match missing {
        Some(finding) => Some(format!("{}: {}", finding["what"], finding["found"])),
        None => {
            programs.iter().find(|path| !Path::new(path).exists()).map(|path| format!("there is no {path}"))
        }
    };
    if let Some(reason) = &reason {
        let _ = writeln!(std::io::stderr(), "{test}: skipped ({reason})");
    }
    reason.is_none()
}

/// What `netvm doctor` thinks of something.
pub fn verdict(what: &str) -> String {
    let doctor = finish(netvm().args(["doctor", "--json"]));
    let findings: Value = serde_json::from_slice(&doctor.out).unwrap();
    let found = findings["findings"].as_array().unwrap().iter().find(|finding| finding["what"] == what);
    found.unwrap_or_else(|| panic!("no {what} in {findings}"))["verdict"].as_str().unwrap().to_owned()
}

/// Random numbers that are the same every time (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// Whether programs that a test runs are there. Says which are not, past the capture of the test harness.
pub fn has(test: &str, programs: &[&str]) -> bool {
    let missing: Vec<&str> =
        programs.iter().copied().filter(|program| !Path::new(program).exists()).collect();
    if !missing.is_empty() {
        let _ = writeln!(std::io::stderr(), "{test}: skipped (no {})", missing.join(", "));
    }
    missing.is_empty()
}
