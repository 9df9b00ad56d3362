//! Development tasks: `cargo xtask check | test`.

use std::env;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

const USAGE: &str = "\
usage: cargo xtask check        format, lints
       cargo xtask test         check, build, every test; installs the programs that tests run (as root)";

/// Programs that tests run, and the packages that have them.
const PROGRAMS: [(&str, &str); 6] = [
    ("/usr/bin/redis-server", "redis-server"),
    ("/usr/bin/sqlite3", "sqlite3"),
    ("/usr/bin/python3", "python3"),
    ("/usr/lib/python3/dist-packages/numpy", "python3-numpy"),
    ("/usr/bin/gcc", "gcc"),
    ("/usr/bin/sort", "coreutils"),
];

fn main() -> ExitCode {
    let ok = match env::args().nth(1).as_deref() {
        Some("check") => check(),
        Some("test") => test(),
        _ => {
            eprintln!("{USAGE}");
            false
        }
    };
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments);
    command
}

fn step(arguments: &[&str]) -> bool {
    println!("== cargo {}", arguments.join(" "));
    cargo(arguments).status().is_ok_and(|status| status.success())
}

fn check() -> bool {
    step(&["fmt", "--all", "--check"])
        && step(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"])
}

fn test() -> bool {
    install();
    if !check() || !step(&["build", "--quiet", "--release", "--workspace"]) {
        return false;
    }
    let (mut passed, mut failed) = (0, 0);
    let ok = run_tests(&["test", "--release", "--workspace", "--no-fail-fast"], &mut passed, &mut failed);
    println!("{passed} passed, {failed} failed");
    ok && failed == 0 && passed > 0
}

/// Runs cargo test, shows its output, and adds up its results.
fn run_tests(arguments: &[&str], passed: &mut u64, failed: &mut u64) -> bool {
    println!("== cargo {}", arguments.join(" "));
    let child = cargo(arguments).stdout(Stdio::piped()).spawn();
    let Ok(mut child) = child else {
        eprintln!("cannot run cargo");
        return false;
    };
    if let Some(out) = child.stdout.take() {
        for line in BufReader::new(out).lines().map_while(Result::ok) {
            println!("{line}");
            if let Some(result) = line.strip_prefix("test result: ") {
                for part in result.split([';', '.']) {
                    let mut words = part.split_ascii_whitespace();
                    if let (Some(Ok(count)), Some(what)) = (words.next().map(str::parse::<u64>), words.next())
                    {
                        match what {
                            "passed" => *passed += count,
                            "failed" => *failed += count,
                            _ => {}
                        }
                    }
                }
            }
        }
    }
    child.wait().is_ok_and(|status| status.success())
}

/// Installs what is missing of the programs that tests run. Tests whose program is missing say so and are skipped.
fn install() {
    let missing: Vec<&str> =
        PROGRAMS.iter().filter(|(path, _)| !Path::new(path).exists()).map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return;
    }
    println!("== installing {}", missing.join(" "));
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdout(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let mut arguments = vec!["install", "-y", "--no-install-recommends"];
    arguments.extend(&missing);
    // The package lists may be old or absent.
    let installed = apt(&arguments) || (apt(&["update"]) && apt(&arguments));
    if !installed {
        println!("could not install {}: tests that need them will say skipped", missing.join(" "));
    }
}
