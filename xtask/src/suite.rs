//! Runs `cargo test`, adds up what it says, and runs what failed once more, alone.
//!
//! The tests are real processes with time limits, on machines whose CPUs others may be using. One that fails among the others and passes alone
//! was starved, or has a race: it is named at the end, and does not fail the run.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

/// More failures than this are no accident.
const AGAIN_MAX: usize = 4;
/// Nor are more programs that crash.
const CRASHES_MAX: usize = 2;

/// What came of a run.
#[derive(Default)]
pub struct Tally {
    pub passed: u64,
    pub failed: u64,
    /// Failed, and then passed alone.
    pub alone: Vec<String>,
}

impl Tally {
    /// Whether every test has passed in the end.
    pub fn is_good(&self) -> bool {
        self.failed == 0 && self.passed > 0
    }

    /// One line, and a warning.
    pub fn print(&self) {
        println!("{} passed, {} failed", self.passed, self.failed);
        if !self.alone.is_empty() {
            println!("passed only when it ran again, alone: {}", self.alone.join(", "));
        }
    }
}

/// Runs all tests with these arguments of cargo, then once more what failed.
pub fn run(arguments: &[&str]) -> Tally {
    let mut said = Said::default();
    let ended_well = cargo_test(arguments, &mut said);
    let mut tally = Tally { passed: said.passed, failed: said.failed, alone: Vec::new() };
    if ended_well {
        return tally;
    }
    let failures = said.failures();
    // One that does not compile, too.
    tally.failed = tally.failed.max(1).max(failures.len() as u64);
    let profile: Vec<&str> =
        arguments.iter().copied().filter(|&word| !matches!(word, "--workspace" | "--no-fail-fast")).collect();
    for (target, name) in failures {
        let exact = name.iter().flat_map(|name| ["--", "--exact", name]);
        let again: Vec<&str> = profile.iter().copied().chain(target.split(' ')).chain(exact).collect();
        let mut said = Said::default();
        let passed = cargo_test(&again, &mut said) && said.failed == 0;
        match name {
            Some(name) if passed && said.passed == 1 => {
                (tally.passed, tally.failed) = (tally.passed + 1, tally.failed - 1);
                tally.alone.push(format!("{name} ({target})"));
            }
            None if passed && said.passed > 0 => {
                (tally.passed, tally.failed) = (tally.passed + said.passed, tally.failed - 1);
                tally.alone.push(format!("all of {target}, which had crashed"));
            }
            _ => {}
        }
    }
    tally
}

/// Shows the output of a run of cargo and takes down what it says. True when cargo ended well.
fn cargo_test(arguments: &[&str], said: &mut Said) -> bool {
    println!("== cargo {}", arguments.join(" "));
    // One pipe for both: the lines must keep their order.
    let Ok((output, input)) = std::io::pipe() else { return false };
    let Ok(errors) = input.try_clone() else { return false };
    let child = super::cargo(arguments).stdin(Stdio::null()).stdout(input).stderr(errors).spawn();
    let Ok(mut child) = child else {
        eprintln!("cannot run cargo");
        return false;
    };
    for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        said.line(&line);
    }
    child.wait().is_ok_and(|status| status.success())
}

/// What a run of `cargo test --no-fail-fast` said.
#[derive(Default)]
struct Said {
    passed: u64,
    failed: u64,
    /// The last list of failures.
    list: Vec<String>,
    listing: bool,
    /// The failed tests of each program that had some.
    groups: Vec<Vec<String>>,
    /// How cargo calls those programs, in the same order.
    targets: Vec<String>,
}

impl Said {
    fn line(&mut self, line: &str) {
        if let Some(result) = line.strip_prefix("test result: ") {
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
            if result.starts_with("FAILED") {
                self.groups.push(std::mem::take(&mut self.list));
            }
        } else if line == "failures:" {
            // It comes twice: before what the tests printed, and before their names.
            (self.listing, self.list) = (true, Vec::new());
        } else if let Some(name) = line.strip_prefix("    ").filter(|name| !name.contains([' ', '`'])) {
            if self.listing {
                self.list.push(name.to_owned());
            }
        } else if let Some(target) =
            line.trim_start().strip_prefix("`-p ").and_then(|rest| rest.strip_suffix('`'))
        {
            self.targets.push(format!("-p {target}"));
        }
    }

    /// What is worth another try: each failed test and where it is; or, when nothing else has failed, the programs that crashed.
    fn failures(&self) -> Vec<(String, Option<String>)> {
        let known = self.groups.iter().map(Vec::len).sum::<usize>();
        let all_known = self.targets.len() == self.groups.len() && known as u64 == self.failed;
        if all_known && known <= AGAIN_MAX {
            let pairs = self.targets.iter().zip(&self.groups);
            let each = |(target, names): (&String, &Vec<String>)| {
                names.iter().map(|name| (target.clone(), Some(name.clone()))).collect::<Vec<_>>()
            };
            pairs.flat_map(each).collect()
        } else if self.groups.is_empty() && self.targets.len() <= CRASHES_MAX {
            self.targets.iter().map(|target| (target.clone(), None)).collect()
        } else {
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Said;

    const OUTPUT: &str = "\
     Running tests/a.rs (target/a)
running 2 tests
test one ... ok
test two ... FAILED

failures:

---- two stdout ----
    indented
thread panicked

failures:
    two

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
     Running tests/b.rs (target/b)
test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
error: 1 target failed:
    `-p netvm --test a`
";

    fn said(output: &str) -> Said {
        let mut said = Said::default();
        output.lines().for_each(|line| said.line(line));
        said
    }

    #[test]
    fn failed_tests_are_found_where_they_are() {
        let said = said(OUTPUT);
        assert_eq!((said.passed, said.failed), (4, 1));
        assert_eq!(said.failures(), [("-p netvm --test a".to_owned(), Some("two".to_owned()))]);
    }

    #[test]
    fn what_is_not_understood_is_not_run_again() {
        let crashed =
            OUTPUT.replace("    `-p netvm --test a`", "    `-p netvm --test a`\n    `-p netvm --test c`");
        assert_eq!(said(&crashed).failures(), []);
        assert_eq!(said(&OUTPUT.replace("    two\n", "")).failures(), []);
        assert_eq!(said("error: could not compile `netvm`\n").failures(), []);
        // Unless it is a crash and nothing else.
        let crash = "error: 1 target failed:\n    `-p netvm --test c`\n";
        assert_eq!(said(crash).failures(), [("-p netvm --test c".to_owned(), None)]);
    }
}
