//! Development tasks: `cargo xtask check | test | fuzz | guest | ci | install`.

mod fuzz;
mod guest;
mod install;
mod suite;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

const USAGE: &str = "\
usage: cargo xtask check        format, lints
       cargo xtask test         check, build, every test, and once more, alone, those that fail; installs the programs that
                                tests run (as root)
       cargo xtask fuzz [--seconds N] [TARGET [FILE]]
                                fuzzes handshake, frames, control, words, datagrams and nbd, 60 seconds each; with FILE runs that input once
       cargo xtask guest [--kernel NAME]... [TEST | SCRIPT]...
                                runs tests of guest/tests, or a bench of guest/benches or a
                                script by its name, in emulated machines with Debian's kernels 6.1, 6.12 and
                                6.12-arm64; NAME+NAME are two machines that are connected; debug is 6.12 with KASAN and lockdep,
                                which is built when it is asked for (a quarter of an hour of CPU time)
       cargo xtask ci           test, then guest, then fuzz, 20 seconds each
       cargo xtask install [--prefix DIR] [--libdir NAME]
                                builds and installs program, libraries, header, netvm.pc and manual pages below DIR
                                (/usr/local); with the environment variable DESTDIR below that folder";

/// For how long each target is fuzzed after the tests.
const CI_FUZZ_SECONDS: u32 = 20;

/// Programs that tests run, and the packages that have them.
const PROGRAMS: [(&str, &str); 25] = [
    ("/usr/bin/redis-server", "redis-server"),
    ("/usr/bin/sqlite3", "sqlite3"),
    ("/usr/bin/python3", "python3"),
    ("/usr/lib/python3/dist-packages/numpy", "python3-numpy"),
    ("/usr/bin/gcc", "gcc"),
    ("/usr/bin/g++", "g++"),
    ("/usr/bin/pkg-config", "pkg-config"),
    ("/usr/bin/groff", "groff"),
    ("/usr/bin/mandoc", "mandoc"),
    ("/usr/bin/sort", "coreutils"),
    ("/usr/bin/nbdinfo", "libnbd-bin"),
    ("/usr/lib/python3/dist-packages/nbd.py", "python3-libnbd"),
    ("/usr/bin/qemu-img", "qemu-utils"),
    ("/usr/bin/fio", "fio"),
    ("/usr/bin/nbdkit", "nbdkit"),
    ("/usr/bin/openssl", "openssl"),
    ("/usr/bin/git", "git"),
    ("/sbin/mkfs.ext4", "e2fsprogs"),
    ("/usr/bin/javac", "default-jdk-headless"),
    ("/usr/lib/postgresql", "postgresql"),
    ("/usr/sbin/mariadbd", "mariadb-server-core"),
    ("/usr/bin/mariadb", "mariadb-client-core"),
    ("/usr/bin/stress-ng", "stress-ng"),
    ("/usr/bin/gdb", "gdb"),
    ("/usr/bin/strace", "strace"),
];

fn main() -> ExitCode {
    let asks = env::args().skip(2).any(|argument| matches!(argument.as_str(), "--help" | "-h"));
    let ok = match env::args().nth(1).as_deref().map(|task| if asks { "help" } else { task }) {
        Some("check") => check(),
        Some("test") => test(),
        Some("fuzz") => fuzz_for(env::args().skip(2)),
        Some("guest") => guest(env::args().skip(2)),
        Some("ci") => ci(),
        Some("install") => match install_everything(env::args().skip(2)) {
            Ok(()) => true,
            Err(message) => {
                eprintln!("{message}");
                false
            }
        },
        Some("help" | "--help" | "-h") => {
            println!("{USAGE}");
            true
        }
        _ => {
            eprintln!("{USAGE}");
            false
        }
    };
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    forget_own(&mut command);
    command.args(arguments);
    command
}

/// Leaves out what cargo has told this program of itself: build scripts would take it for a change, and run again.
fn forget_own(command: &mut Command) {
    let told = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"];
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(|name| told.iter().any(|told| name.starts_with(told))) {
            command.env_remove(name);
        }
    }
}

/// All, even if one fails.
fn ci() -> bool {
    install_programs(&[&PROGRAMS[..], &guest::PROGRAMS].concat());
    // Meanwhile: much of it is waiting for the network.
    let getting_ready = std::thread::spawn(|| ready(std::iter::empty()));
    let tested = test();
    let ready = getting_ready.join().unwrap_or_else(|_| Err("it panicked".to_owned()));
    // What the tests have built is what guests run.
    let guests = told(ready.and_then(|guests| guests.run(tested)));
    guests & fuzz_for(["--seconds".to_owned(), CI_FUZZ_SECONDS.to_string()].into_iter()) & tested
}

fn fuzz_for(arguments: impl Iterator<Item = String>) -> bool {
    fuzz::fuzz(arguments).map_err(|message| eprintln!("fuzz: {message}")).is_ok()
}

/// Tests that need a kernel of their own.
fn guest(arguments: impl Iterator<Item = String>) -> bool {
    install_programs(&guest::PROGRAMS);
    told(ready(arguments).and_then(|guests| guests.run(false)))
}

fn ready(arguments: impl Iterator<Item = String>) -> Result<guest::Suite, String> {
    guest::ready(root(), &target_folder()?, arguments)
}

/// Whether no guest has failed; says what kept them from being run.
fn told(guests: Result<(u64, u64), String>) -> bool {
    match guests {
        Ok((_, failed)) => failed == 0,
        Err(message) => {
            eprintln!("guest: {message}");
            false
        }
    }
}

/// The folder of the workspace.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("/"))
}

fn step(arguments: &[&str]) -> bool {
    println!("== cargo {}", arguments.join(" "));
    cargo(arguments).status().is_ok_and(|status| status.success())
}

fn check() -> bool {
    step(&["fmt", "--all", "--check"])
        && step(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"])
        && document()
}

/// Links in the documentation lead somewhere.
fn document() -> bool {
    println!("== cargo doc");
    let mut doc = cargo(&["doc", "--quiet", "--workspace", "--no-deps"]);
    doc.env("RUSTDOCFLAGS", "-D warnings").status().is_ok_and(|status| status.success())
}

fn test() -> bool {
    install_programs(&PROGRAMS);
    // Another version of the tools may have more to say: that keeps no test from being run.
    let checked = check();
    let tally = suite::run("tested");
    tally.print();
    if !checked {
        println!("FAILED: the checks before the tests (cargo xtask check)");
    }
    checked & tally.is_good()
}

fn install_everything(mut arguments: impl Iterator<Item = String>) -> Result<(), String> {
    let mut place = install::Place {
        destdir: env::var_os("DESTDIR").map(PathBuf::from).unwrap_or_default(),
        prefix: PathBuf::from("/usr/local"),
        libdir: "lib".to_owned(),
    };
    while let Some(argument) = arguments.next() {
        let (name, value) = match argument.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (argument, arguments.next()),
        };
        match (name.as_str(), value) {
            ("--prefix", Some(value)) if value.starts_with('/') => place.prefix = PathBuf::from(value),
            ("--libdir", Some(value)) if !value.starts_with('/') => place.libdir = value,
            _ => return Err(format!("{name} is not understood, or its value is missing\n{USAGE}")),
        }
    }
    let root = root();
    let built = ["-p", "netvm-cli", "-p", "netvm-preload", "-p", "netvm-c"];
    if !step(&[&["build", "--quiet", "--release"][..], &built].concat()) {
        return Err("the build has failed".to_owned());
    }
    let release = target_folder()?.join("release");
    install::library(root, &release.join("libnetvm_c.a"), env!("CARGO_PKG_VERSION"), &place)?;
    let program = place.folder("bin").join("netvm");
    install::copy(&release.join("netvm"), &program, 0o755)?;
    let preload = "libnetvm_preload.so";
    // Where the program looks for it, whatever the folder of libraries is.
    install::copy(&release.join(preload), &place.folder("lib/netvm").join(preload), 0o644)?;
    let pages =
        Command::new(&program).arg("man").arg(place.folder("share/man/man1")).stdout(Stdio::null()).status();
    if !pages.is_ok_and(|status| status.success()) {
        return Err(format!("{} cannot write its manual pages", program.display()));
    }
    println!("installed below {}", place.folder("").display());
    Ok(())
}

/// Where cargo builds.
fn target_folder() -> Result<PathBuf, String> {
    let output = cargo(&["metadata", "--format-version", "1", "--no-deps"]).output();
    let output = output.map_err(|error| format!("cannot run cargo: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let folder = text.split("\"target_directory\":\"").nth(1).and_then(|rest| rest.split('"').next());
    folder.map(PathBuf::from).ok_or_else(|| "cargo metadata does not tell the target folder".to_owned())
}

/// Installs what is missing of the programs that tests run. Tests whose program is missing say so and are skipped.
fn install_programs(programs: &[(&str, &'static str)]) {
    let missing: Vec<&str> =
        programs.iter().filter(|(path, _)| !Path::new(path).exists()).map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return;
    }
    println!("== installing {}", missing.join(" "));
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive").stdout(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let install =
        |packages: &[&str]| apt(&[&["install", "-y", "--no-install-recommends"], packages].concat());
    // The package lists may be old or absent.
    if install(&missing) || (apt(&["update"]) && install(&missing)) {
        return;
    }
    // One that there is not keeps none of the others away.
    let left: Vec<&str> = missing.into_iter().filter(|package| !install(&[package])).collect();
    if !left.is_empty() {
        println!("could not install {}: tests that need them will say skipped", left.join(" "));
    }
}
