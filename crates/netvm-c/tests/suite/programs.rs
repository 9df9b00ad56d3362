//! The examples as users build and run them, and programs that try everything, also under AddressSanitizer.

use crate::common::{Running, installed, root, source, succeeded};
use netvm::lender::{Lender, LenderConfig, StopFlag};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

const SANITIZERS: &str = "-fsanitize=address,undefined";

/// How to build: plainly, and with sanitizers when they work here.
fn variants() -> Vec<(&'static str, Vec<&'static str>)> {
    static SANITIZERS_WORK: OnceLock<Result<(), String>> = OnceLock::new();
    let mut variants = vec![("plain", vec![])];
    match SANITIZERS_WORK.get_or_init(sanitizers) {
        Ok(()) => variants.push(("sanitized", vec![SANITIZERS, "-fno-sanitize-recover=all"])),
        Err(reason) => println!("skipped (sanitizers: {reason})"),
    }
    variants
}

/// Whether a program can be built and run with them, and leaks are found.
fn sanitizers() -> Result<(), String> {
    let folder = &installed().place.destdir;
    let name = format!("leaks-{:?}", std::thread::current().id()).replace(['(', ')'], "");
    let (source, program) = (folder.join(format!("{name}.c")), folder.join(name));
    let text = "#include <stdlib.h>\nint main(int n, char **v) { volatile char *p = malloc(10); if (n > 1) { p = NULL; } return p != NULL && !v; }\n";
    std::fs::write(&source, text).unwrap();
    let output = Command::new("cc").args(["-g", SANITIZERS, "-o"]).arg(&program).arg(&source).output();
    let output = output.map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(format!("cannot link with them: {}", String::from_utf8_lossy(&output.stderr)));
    }
    // Where addresses are very random those of older compilers die at their start now and then.
    for _ in 0..16 {
        let output = installed().command(&program).arg("leak").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        if !said.contains("LeakSanitizer: detected memory leaks") {
            return Err(format!("leaks are not found here: {said}"));
        }
    }
    Ok(())
}

/// Runs the listener, and the command that it prints `clients` times.
fn example(name: &str, listen: &[&str], clients: usize) {
    let installed = installed();
    let path = root().join("examples/c").join(format!("{name}.c"));
    for (variant, flags) in variants() {
        let Some(program) = installed.build(&path, &format!("{name}-{variant}"), &flags) else { return };
        let mut listener =
            Running::start(installed.command(&program).args(["listen", "127.0.0.1:0"]).args(listen));
        let (line, mut out) = listener.line();
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words[0], name);
        let clients: Vec<_> =
            (0..clients).map(|_| Running::start(installed.command(&program).args(&words[1..]))).collect();
        for client in clients {
            print!("{name}, {variant}: {}", succeeded(name, &client.finish()));
        }
        let mut rest = String::new();
        std::io::Read::read_to_string(&mut out, &mut rest).unwrap();
        succeeded(name, &listener.finish());
        println!("{name}, {variant}, listener: {rest}");
    }
}

#[test]
fn ping_pong() {
    example("ping_pong", &[], 1);
}

#[test]
fn producer_consumer() {
    example("producer_consumer", &[], 1);
}

#[test]
fn distributed_counter() {
    example("distributed_counter", &["3"], 3);
}

#[test]
fn work_queue() {
    example("work_queue", &["3"], 3);
}

#[test]
fn halo_exchange() {
    example("halo_exchange", &["4"], 3);
}

fn program(name: &str, arguments: &[&str]) {
    let path = source().join("tests/c").join(format!("{name}.c"));
    for (variant, flags) in variants() {
        let Some(program) = installed().build(&path, &format!("{name}-{variant}"), &flags) else { return };
        for link in ["auto", "socket"] {
            let mut command = installed().command(&program);
            let output = Running::start(command.args(arguments).env("NETVM_LINK", link)).finish();
            let said = succeeded(&format!("{name}, {variant}, {link}"), &output);
            match said.strip_prefix("skipped ") {
                Some(reason) => println!("skipped ({name}: {})", reason.trim()),
                None => assert_eq!(said, "ok\n"),
            }
        }
    }
}

#[test]
fn everything_works() {
    program("api", &[]);
}

#[test]
fn bad_input_is_refused() {
    program("bad_input", &[]);
}

#[test]
fn dead_and_silent_peers_are_told_of() {
    program("dead_peer", &[]);
}

#[test]
fn peers_are_connected_to_again() {
    program("reconnect", &[]);
}

/// A lender until these tests end.
fn lend() -> String {
    let config = LenderConfig { size_bytes: 256 << 20, slab_bytes: 1 << 20, ..LenderConfig::default() };
    let mut lender = Lender::bind(config).unwrap();
    let address = lender.addresses().remove(0);
    let stop = StopFlag::new().unwrap();
    std::thread::spawn(move || lender.run(&stop).unwrap());
    address
}

#[test]
fn far_memory_is_exported() {
    program("far", &[&lend()]);
}

/// A lender in a process of its own, which can be killed.
struct Apart {
    process: Running,
    address: String,
}

impl Apart {
    fn new() -> Self {
        let me = std::env::current_exe().unwrap();
        let mut command = Command::new(me);
        command.args(["--exact", "--ignored", "--nocapture", "programs::lends_until_it_is_killed"]);
        let mut process = Running::start(command.env(LENDS, "1"));
        // The test harness says something first, perhaps on the same line.
        let mut out = BufReader::new(process.0.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("lends at ") {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "no lender");
        }
        let address = line.trim().rsplit(' ').next().unwrap().to_owned();
        Self { process, address }
    }
}

const LENDS: &str = "NETVM_TEST_LENDS";

/// For [`Apart`].
#[test]
#[ignore = "goes on until it is killed"]
fn lends_until_it_is_killed() {
    assert!(std::env::var_os(LENDS).is_some(), "it would never end");
    println!("lends at {}", lend());
    loop {
        std::thread::park();
    }
}

#[test]
fn far_memory_in_parts_outlives_a_lender() {
    let path = source().join("tests/c/parts.c");
    for (variant, flags) in variants() {
        let Some(program) = installed().build(&path, &format!("parts-{variant}"), &flags) else { return };
        for (victim, link) in ["auto", "socket"].into_iter().enumerate() {
            let mut lenders: Vec<Apart> = (0..3).map(|_| Apart::new()).collect();
            let mut command = installed().command(&program);
            command.args(lenders.iter().map(|lender| &lender.address)).env("NETVM_LINK", link);
            let mut running = Running::start(&mut command);
            let (line, mut out) = running.line();
            if let Some(reason) = line.strip_prefix("skipped ") {
                return println!("skipped (parts: {})", reason.trim());
            }
            assert_eq!(line, "filled\n");
            lenders[victim].process.0.kill().unwrap();
            let mut rest = String::new();
            out.read_to_string(&mut rest).unwrap();
            succeeded(&format!("parts, {variant}, {link}"), &running.finish());
            assert_eq!(rest, "ok\n");
        }
    }
}

#[test]
fn far_sort() {
    let (path, address) = (root().join("examples/c/far_sort.c"), lend());
    for (variant, flags) in variants() {
        let Some(program) = installed().build(&path, &format!("far_sort-{variant}"), &flags) else { return };
        let mut command = installed().command(&program);
        let output = Running::start(command.args([&address, "600000", "4"])).finish();
        if !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("userfaultfd") {
            return println!("skipped (far_sort: no userfaultfd here)");
        }
        print!("far_sort, {variant}: {}", succeeded("far_sort", &output));
    }
}

/// As many different words as do not fit, beside what the usual programs say of them.
#[test]
fn far_words() {
    let (path, address) = (root().join("examples/c/far_words.c"), lend());
    let mut text = String::new();
    let mut number = 7_u64;
    for _ in 0..200_000 {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Few short ones are frequent, and most are there once.
        let letters = number >> (8 + (number >> 33) % 50);
        text.extend((0..14).map(|at| (b'a' + (letters >> (4 * at) & 15) as u8) as char));
        text.push(if number & 1 << 32 == 0 { ' ' } else { '\n' });
    }
    let file = installed().place.destdir.join("words");
    std::fs::write(&file, text).unwrap();
    let usual = "tr -cs A-Za-z '\\n' < $0 | LC_ALL=C sort | uniq -c | LC_ALL=C sort -k1,1nr -k2,2 | head";
    let usual = Running::start(Command::new("sh").args(["-c", usual]).arg(&file)).finish();
    let usual = succeeded("the usual programs", &usual);
    for (variant, flags) in variants() {
        let Some(program) = installed().build(&path, &format!("far_words-{variant}"), &flags) else { return };
        let mut command = installed().command(&program);
        let output = Running::start(command.arg(&address).arg(&file).arg("4")).finish();
        if !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("userfaultfd") {
            return println!("skipped (far_words: no userfaultfd here)");
        }
        let said = succeeded("far_words", &output);
        let counts = said.strip_prefix(&usual).unwrap_or_else(|| panic!("{said}, in place of {usual}"));
        print!("far_words, {variant}: {counts}");
        let pages: u32 = counts.split(' ').rev().nth(5).unwrap().parse().unwrap();
        assert!(pages > 1000, "{counts}");
    }
}

/// With a secret, from a file that others cannot read.
#[test]
fn examples_share_a_secret() {
    let installed = installed();
    let path = root().join("examples/c/distributed_counter.c");
    let Some(program) = installed.build(&path, "secret", &[]) else { return };
    let file = installed.place.destdir.join("secret-file");
    netvm::security::Secret::random().unwrap().write_new_file(Path::new(&file)).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = installed.command(&program);
        Running::start(command.args(arguments).env("NETVM_SECRET_FILE", &file))
    };
    // Beyond loopback.
    let mut listener = run(&["listen", "0.0.0.0:0", "1"]);
    let (line, _out) = listener.line();
    let line = line.replace("0.0.0.0:", "127.0.0.1:");
    let words: Vec<&str> = line.split_whitespace().collect();
    let refused = Running::start(installed.command(&program).args(&words[1..])).finish();
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("secret") && said.contains(words[2]), "{said}");
    succeeded("with the secret", &run(&words[1..]).finish());
    succeeded("listener", &listener.finish());
}
