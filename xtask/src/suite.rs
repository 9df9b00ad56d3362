//! Builds the tests, runs several of their programs at a time, adds up what they say, and runs what failed once more, alone.
//!
//! The tests are real processes with time limits, on machines whose CPUs others may be using. One that fails among the others and passes alone
//! was starved, or has a race: it is named at the end, and does not fail the run.
//!
//! Cargo would run one program after the other. Many tests wait most of the time, for somebody to be missed or a second to be over.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Programs that run at the same time. Each runs as many tests as there are CPUs.
const AT_A_TIME: usize = 2;
/// What is left of a program that has ended may say something for so long.
const LEFT_BEHIND: Duration = Duration::from_secs(5);
/// A program that says nothing is asked so often whether it has ended.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// More failures than this are no accident.
const AGAIN_MAX: usize = 4;

/// What came of a run.
#[derive(Default)]
pub struct Tally {
    pub passed: u64,
    pub failed: u64,
    /// Failed, and then passed alone.
    pub alone: Vec<String>,
    /// Failed alone, too.
    pub failures: Vec<String>,
}

impl Tally {
    /// Whether every test has passed in the end.
    pub fn is_good(&self) -> bool {
        self.failed == 0 && self.passed > 0
    }

    /// One line, and a warning.
    pub fn print(&self) {
        println!("{} passed, {} failed", self.passed, self.failed);
        if !self.failures.is_empty() {
            println!("FAILED: {}", self.failures.join(", "));
        }
        if !self.alone.is_empty() {
            println!("passed only when it ran again, alone: {}", self.alone.join(", "));
        }
    }
}

/// Runs all tests of the workspace, built with this profile, then once more what failed.
pub fn run(profile: &str) -> Tally {
    let mut tally = Tally::default();
    let Some(programs) = build(profile) else {
        tally.failed = 1;
        tally.failures.push("the build".to_owned());
        return tally;
    };
    let mut failures = Vec::new();
    for (program, said) in run_all(programs) {
        tally.passed += said.passed;
        let names: Vec<_> = match said.trouble() {
            Trouble::None => continue,
            Trouble::Tests(names) => names.into_iter().map(Some).collect(),
            Trouble::Crash => vec![None],
        };
        tally.failed += names.len() as u64;
        failures.extend(names.into_iter().map(|name| (program.clone(), name)));
    }
    let tries = failures.len() <= AGAIN_MAX;
    for (program, name) in failures {
        let called = match &name {
            Some(name) => format!("{name} ({})", program.name),
            None => format!("all of {}, which had crashed", program.name),
        };
        let passed = if tries { again(&program, name.as_deref()) } else { 0 };
        if passed > 0 {
            (tally.passed, tally.failed) = (tally.passed + passed, tally.failed - 1);
            tally.alone.push(called);
        } else {
            tally.failures.push(called);
        }
    }
    let examples = ["test", "--profile", profile, "--workspace", "--no-fail-fast", "--doc"];
    println!("== cargo {}", examples.join(" "));
    let said = output_of(super::cargo(&examples), true);
    tally.passed += said.passed;
    if !matches!(said.trouble(), Trouble::None) {
        tally.failed += said.failed.max(1);
        tally.failures.push("examples in the documentation".to_owned());
    }
    tally
}

/// Runs a test, or all of them, again. Returns how many have passed, 0 when one failed.
fn again(program: &Program, name: Option<&str>) -> u64 {
    println!("== {}{} again, alone", program.name, name.map_or(String::new(), |name| format!(": {name}")));
    let mut command = program.command();
    command.args(name.iter().flat_map(|name| ["--exact", name]));
    let said = output_of(command, true);
    if matches!(said.trouble(), Trouble::None) { said.passed } else { 0 }
}

/// A program that runs tests.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Program {
    /// Package and target.
    name: String,
    path: PathBuf,
    /// Where cargo would start it.
    folder: PathBuf,
}

impl Program {
    /// From what cargo says of it; `None` for what is none.
    fn of(message: &Value) -> Option<Self> {
        let is_test = message["reason"] == "compiler-artifact" && message["profile"]["test"] == true;
        let path = PathBuf::from(message["executable"].as_str().filter(|_| is_test)?);
        let folder = PathBuf::from(message["manifest_path"].as_str()?).parent()?.to_owned();
        let package = folder.file_name()?.to_string_lossy().into_owned();
        let (kind, target) = (message["target"]["kind"][0].as_str()?, message["target"]["name"].as_str()?);
        Some(Self { name: format!("{package}, {kind} {target}"), path, folder })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        super::forget_own(&mut command);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }
}

/// Builds all of them. `None`: cargo has said why not.
fn build(profile: &str) -> Option<Vec<Program>> {
    let arguments = ["test", "--profile", profile, "--workspace", "--no-run"];
    println!("== cargo {}", arguments.join(" "));
    let mut command = super::cargo(&arguments);
    command.arg("--message-format=json-render-diagnostics").stdin(Stdio::null());
    let output = command.stderr(Stdio::inherit()).output().ok().filter(|output| output.status.success())?;
    let lines = output.stdout.split(|&byte| byte == b'\n');
    let messages = lines.filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    Some(messages.filter_map(|message| Program::of(&message)).collect())
}

/// Runs all of them, some at a time, and shows what each has said when it is done.
fn run_all(programs: Vec<Program>) -> Vec<(Program, Said)> {
    let left = Mutex::new(programs.into_iter());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(program) = next() {
                    println!("== {} has begun", program.name);
                    let began = Instant::now();
                    // A test that has been skipped has passed, and says so where nobody looks.
                    let mut command = program.command();
                    command.arg("--show-output");
                    let said = output_of(command, false);
                    // With the lock, so that nothing comes between the lines.
                    let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
                    println!("== {}, {:.0} s\n{}", program.name, began.elapsed().as_secs_f64(), said.text);
                    results.push((program, said));
                }
            });
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a program of tests, and takes down what it says; shows it at once, or leaves that for later.
fn output_of(mut command: Command, show: bool) -> Said {
    let mut said = Said::default();
    // One pipe for both: the lines must keep their order.
    let Ok((output, input)) = std::io::pipe() else { return said };
    let Ok(errors) = input.try_clone() else { return said };
    let child = command.stdin(Stdio::null()).stdout(input).stderr(errors).spawn();
    // The command has the pipe's other end as well.
    drop(command);
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            said.text = format!("it cannot be started: {error}");
            println!("{}", said.text);
            return said;
        }
    };
    let (sender, lines) = mpsc::channel();
    // It ends with the pipe.
    std::thread::spawn(move || {
        let lines = BufReader::new(output).split(b'\n').map_while(Result::ok);
        lines.map(|line| sender.send(line)).take_while(Result::is_ok).count()
    });
    // What a test that failed has left may have the pipe for ever: once the program has ended it has so much time.
    let mut end = None;
    while end.is_none_or(|end| Instant::now() < end) {
        if end.is_none() && !matches!(child.try_wait(), Ok(None)) {
            end = Some(Instant::now() + LEFT_BEHIND);
        }
        let line = match lines.recv_timeout(LOOK_EVERY) {
            Ok(line) => String::from_utf8_lossy(&line).into_owned(),
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        said.line(&line);
        if show {
            println!("{line}");
        } else if !said.showing {
            said.text.push_str(&line);
            said.text.push('\n');
        }
    }
    said.skipped.iter().for_each(|line| said.text.push_str(line));
    let status = child.wait();
    said.ended_well = status.as_ref().is_ok_and(ExitStatus::success);
    if let Ok(status) = status
        && status.signal().is_some()
    {
        // A test program says nothing then.
        let line = format!("ended by {status}\n");
        if show { print!("{line}") } else { said.text.push_str(&line) }
    }
    said
}

/// What a program of tests said, or several by way of cargo.
#[derive(Default)]
struct Said {
    text: String,
    ended_well: bool,
    passed: u64,
    failed: u64,
    /// The last list of failures.
    list: Vec<String>,
    listing: bool,
    /// What tests that have passed have printed is being shown, of the one named; then their names.
    showing: bool,
    naming: bool,
    test: String,
    /// What they say of having been skipped.
    skipped: Vec<String>,
}

/// What went wrong.
#[derive(Debug, PartialEq, Eq)]
enum Trouble {
    None,
    /// These tests have failed.
    Tests(Vec<String>),
    /// It ended before it could tell, or said what nobody understands.
    Crash,
}

impl Said {
    fn line(&mut self, line: &str) {
        if line == "successes:" {
            // It comes twice, too: before what they printed, and before all their names.
            self.naming = self.showing;
            self.showing = true;
        } else if self.showing {
            match line.strip_prefix("---- ").and_then(|line| line.strip_suffix(" stdout ----")) {
                Some(name) => self.test = name.to_owned(),
                None if line.contains("skipped (") => self.skipped.push(format!("{}: {line}\n", self.test)),
                None => self.showing = !(self.naming && line.is_empty()),
            }
        } else if let Some(result) = line.strip_prefix("test result: ") {
            for part in result.split([';', '.']) {
                let mut words = part.split_ascii_whitespace();
                if let (Some(Ok(count)), Some(what)) = (words.next().map(str::parse::<u64>), words.next()) {
                    match what {
                        "passed" => self.passed += count,
                        "failed" => self.failed += count,
                        _ => {}
                    }
                }
            }
            self.listing = false;
        } else if line == "failures:" {
            // It comes twice: before what the tests printed, and before their names.
            (self.listing, self.list) = (true, Vec::new());
        } else if let Some(name) = line.strip_prefix("    ").filter(|name| !name.contains([' ', '`']))
            && self.listing
        {
            self.list.push(name.to_owned());
        }
    }

    fn trouble(&self) -> Trouble {
        match (self.ended_well, self.failed, self.list.len() as u64) {
            (true, 0, _) => Trouble::None,
            (false, failed, listed) if failed > 0 && failed == listed => Trouble::Tests(self.list.clone()),
            _ => Trouble::Crash,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Program, Said, Trouble};
    use std::path::Path;

    const OUTPUT: &str = "\
running 3 tests
test one ... ok
test two ... FAILED
test three ... FAILED

failures:

---- two stdout ----
    indented
thread panicked

failures:
    three
    two

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    fn said(output: &str, ended_well: bool) -> Said {
        let mut said = Said { ended_well, ..Said::default() };
        output.lines().for_each(|line| said.line(line));
        said
    }

    #[test]
    fn failed_tests_are_found() {
        let bad = said(OUTPUT, false);
        assert_eq!((bad.passed, bad.failed), (1, 2));
        assert_eq!(bad.trouble(), Trouble::Tests(vec!["three".to_owned(), "two".to_owned()]));
        let good = said("test result: ok. 3 passed; 0 failed; 1 ignored; finished in 0.00s", true);
        assert_eq!((good.passed, good.trouble()), (3, Trouble::None));
    }

    #[test]
    fn what_a_test_leaves_behind_keeps_nobody_waiting() {
        for left in ["sleep 60 &", "(for i in $(seq 60); do sleep 1; echo; done) &"] {
            let mut command = std::process::Command::new("sh");
            command.args(["-c", &format!("{left} echo 'test result: ok. 3 passed; 0 failed'")]);
            let began = std::time::Instant::now();
            let said = super::output_of(command, false);
            assert_eq!((said.passed, said.trouble()), (3, Trouble::None));
            assert!(began.elapsed().as_secs() < 50);
        }
    }

    #[test]
    fn tests_that_were_skipped_are_told_of() {
        let output = "test a ... ok\n\nsuccesses:\n\n---- a stdout ----\nskipped (no b)\ntest result: ok. 9 passed\n\n\n\
            successes:\n    a\n\ntest result: ok. 1 passed; 0 failed";
        let said = said(output, true);
        assert_eq!((said.passed, said.trouble()), (1, Trouble::None));
        assert_eq!((said.skipped, said.showing), (vec!["a: skipped (no b)\n".to_owned()], false));
    }

    #[test]
    fn what_a_program_of_tests_shows_is_understood() {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--show-output", "--test-threads=1", "one_that_is_skipped", "programs_are"]);
        let said = super::output_of(command, false);
        assert_eq!((said.passed, said.trouble()), (2, Trouble::None), "{}", said.text);
        assert_eq!(said.skipped, ["suite::tests::one_that_is_skipped: skipped (as an example)\n"]);
        let ends =
            said.text.contains("test result: ok. 2 passed") && said.text.ends_with("(as an example)\n");
        assert!(ends && !said.text.contains("    suite::"), "{}", said.text);
    }

    #[test]
    fn one_that_is_skipped() {
        println!("skipped (as an example)");
    }

    #[test]
    fn what_is_not_understood_is_no_success() {
        assert_eq!(said("", false).trouble(), Trouble::Crash);
        assert_eq!(said("test one ... ok\n", false).trouble(), Trouble::Crash);
        assert_eq!(said(OUTPUT, true).trouble(), Trouble::Crash);
        assert_eq!(said(&OUTPUT.replace("    three\n", ""), false).trouble(), Trouble::Crash);
    }

    #[test]
    fn programs_are_what_cargo_has_built_of_tests() {
        let message = serde_json::json!({
            "reason": "compiler-artifact",
            "manifest_path": "/a/crates/netvm/Cargo.toml",
            "target": {"kind": ["test"], "name": "pager"},
            "profile": {"test": true},
            "executable": "/a/target/pager-1",
        });
        let program = Program::of(&message).unwrap();
        assert_eq!(
            (program.name.as_str(), program.path.as_path()),
            ("netvm, test pager", Path::new("/a/target/pager-1"))
        );
        assert_eq!(program.folder, Path::new("/a/crates/netvm"));
        for (key, other) in [("reason", "build-finished"), ("executable", "")] {
            let mut message = message.clone();
            message[key] = if other.is_empty() { serde_json::Value::Null } else { other.into() };
            assert_eq!(Program::of(&message), None);
        }
    }
}
