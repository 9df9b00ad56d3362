//! `netvm run --file`: a file for what the lenders have no room for.

mod common;

use common::{Done, Folder, Guard, can_run, finish, netvm, signal, until, wait};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

const PYTHON: &str = "/usr/bin/python3";

/// Fills 48 MiB, says so, and checks them, again and again until its input ends.
const WORK: &str = "\
import os, select, sys, zlib
pages = 12288
memory = bytearray(pages * 4096)
sums = []
for page in range(pages):
    block = os.urandom(4096)
    memory[page * 4096:page * 4096 + 4096] = block
    sums.append(zlib.crc32(block))
print('filled', flush=True)
while True:
    for page in range(pages):
        if zlib.crc32(memory[page * 4096:page * 4096 + 4096]) != sums[page]:
            print('WRONG DATA', flush=True)
            sys.exit(3)
    if select.select([sys.stdin], [], [], 0)[0]:
        break
print('checked')
";

fn run(file: &str, more: &[&str]) -> Command {
    let mut command = netvm();
    command.args(["run", "--local", "8M", "--tier", "lender", "--lend-size", "16M", "--file", file]);
    command.args(more).args(["--", PYTHON, "-c", WORK]);
    command
}

#[test]
fn what_does_not_fit_into_memory_goes_to_the_file() {
    if !can_run("what_does_not_fit_into_memory_goes_to_the_file", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("file");
    let file = format!("{}:256M", folder.path("").display());
    let done = finish(run(&file, &["--explain", "--json"]).stdin(Stdio::null())).must_succeed();
    assert_eq!(done.out(), "filled\nchecked\n");
    let lenders = done.summary()["lenders"].clone();
    assert!(done.summary()["faults"].is_u64() && done.summary()["fault_path"]["path"].is_string());
    let moved = |lender: usize| lenders[lender]["bytes_out"].as_u64().unwrap() >> 20;
    // A slab may change places meanwhile, and is written once more for that.
    assert!((10..=48).contains(&moved(0)) && moved(1) >= 20, "{lenders}");
    assert!(lenders[1]["lender"].as_str().unwrap().starts_with("file in "), "{lenders}");
    let most = |lender: usize| lenders[lender]["held_bytes_peak"].as_u64().unwrap() >> 20;
    assert!((8..=16).contains(&most(0)) && (20..60).contains(&most(1)), "{lenders}");
    assert!(lenders[1]["read_us"].as_f64().unwrap() > 0.0, "{lenders}");
    let done = finish(run(&file, &["--explain"]).stdin(Stdio::null())).must_succeed();
    assert!(done.err.contains("file in ") && done.err.contains("us each"), "{}", done.err);
    // Nothing of it is left.
    assert_eq!(std::fs::read_dir(folder.path("")).unwrap().count(), 0);
    let done = finish(run("/nowhere/at/all", &[]).stdin(Stdio::null()));
    assert!(!done.status.success() && done.err.contains("/nowhere/at/all"), "{}", done.err);
}

/// A file beside a lender of small slabs has room for as much as it says; of another lender's larger slabs less is used, and that is said.
#[test]
fn slabs_of_a_file_are_as_large_as_those_of_the_lenders() {
    if !can_run("slabs_of_a_file_are_as_large_as_those_of_the_lenders", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("slabs");
    let lend = |name: &str, arguments: &[&str]| {
        let address = format!("unix:{}", folder.path(name).display());
        let mut lend = netvm();
        lend.args(["lend", "--listen", &address]).args(arguments).stdout(Stdio::piped());
        let mut lender = Guard(lend.spawn().unwrap());
        assert_ne!(lender.0.stdout.as_mut().unwrap().read(&mut [0]).unwrap(), 0, "it serves");
        (lender, address)
    };
    let (_small, small) = lend("small", &["--size", "8M", "--slab", "1M"]);
    let (_large, large) = lend("large", &["--size", "64M"]);
    let file = format!("{}:64M", folder.path("").display());
    let run = |lenders: &[&str]| {
        let mut command = netvm();
        command.args(["run", "--local", "8M", "--file", &file]);
        for lender in lenders {
            command.args(["--lender", lender]);
        }
        finish(command.args(["--", PYTHON, "-c", WORK]).stdin(Stdio::null())).must_succeed()
    };
    let done = run(&[&small]);
    assert!(done.out() == "filled\nchecked\n" && done.err.is_empty(), "{}", done.err);
    let done = run(&[&small, &large]);
    assert!(done.err.contains("lends slabs of 16 MiB") && done.err.contains("of 1 MiB"), "{}", done.err);
}

/// The lender of the run's file.
fn file_lender(run: &Guard) -> Option<u32> {
    let pid = run.0.id();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    let is_it = |pid: &u32| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split(|&byte| byte == 0).any(|word| word == b"--file")
    };
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(is_it)
}

#[test]
fn a_killed_file_lender_ends_the_program_with_a_sentence() {
    if !can_run("a_killed_file_lender_ends_the_program_with_a_sentence", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("file-killed");
    let file = format!("{}:256M", folder.path("").display());
    let mut run = run(&file, &[]);
    let mut run =
        Guard(run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut said = [0; 7];
    run.0.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    until("there is a lender", || file_lender(&run).is_some());
    // Whoever watches sees the name that `--explain` has: it is the same in each run.
    let name = format!("file in {}", folder.path("").display());
    let pid = run.0.id();
    let seen = |args: &[&str]| finish(netvm().args(args)).must_succeed().out();
    let top = seen(&["top", "--once", "--interval", "0.1", "--pid", &pid.to_string()]);
    assert!(top.contains(&format!("lenders    private lender,{name}\n")), "{top}");
    let mine = |line: &&str| line.contains(&format!("pid=\"{pid}\"")) && line.contains("lender=");
    let metrics = seen(&["metrics", "--print"]);
    let of_file = metrics.lines().filter(mine).filter(|line| line.contains(&format!("lender=\"{name}\"")));
    assert!(
        of_file.count() > 1 && !metrics.lines().filter(mine).any(|line| line.contains("unix:")),
        "{metrics}"
    );
    // The private lender has one slab, which makes room for pages that are wanted more now and then.
    until("both have what they have room for", || {
        let json: serde_json::Value =
            serde_json::from_str(&seen(&["top", "--json", "--pid", &pid.to_string()])).unwrap();
        let held = |class: &str| json["held_bytes"][class].as_u64().unwrap();
        // The private lender's memory may be shared or not.
        let memory = json["each_lender"][0]["class"].as_str().unwrap();
        (8 << 20..=16 << 20).contains(&held(memory)) && held("file") >= 20 << 20
    });
    assert!(top.contains(" MiB file\n") && metrics.contains("class=\"file\"} "), "{top}\n{metrics}");
    let status = seen(&["status"]);
    assert!(status.contains(&format!("lenders  private lender, {name}\n")), "{status}");
    signal(file_lender(&run).unwrap(), "KILL");
    let status = wait(&mut run.0, Duration::from_secs(10)).expect("the program hangs");
    let done = rest(run, status);
    let whose = format!("the lender of the {name}");
    assert!(done.err.contains(&format!("netvm: {whose} has ended too soon (signal: 9")), "{}", done.err);
    assert_eq!(done.status.code(), Some(125), "{}", done.err);
    assert!(done.err.contains("/file") && !done.out().contains("WRONG"), "{}", done.err);
}

fn rest(mut run: Guard, status: std::process::ExitStatus) -> Done {
    let (mut out, mut err) = (Vec::new(), String::new());
    run.0.stdout.take().unwrap().read_to_end(&mut out).unwrap();
    run.0.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    Done { status, out, err, elapsed: Duration::ZERO }
}

#[test]
fn a_full_disk_ends_the_program_with_a_sentence() {
    const TEST: &str = "a_full_disk_ends_the_program_with_a_sentence";
    if !can_run(TEST, &[PYTHON]) {
        return;
    }
    let folder = Folder::new("file-full");
    let path = folder.path("");
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=20M", "none"]).arg(&path).output();
    if !mount.is_ok_and(|output| output.status.success()) {
        let _ = writeln!(std::io::stderr(), "{TEST}: skipped (nothing can be mounted)");
        return;
    }
    let done = finish(run(&format!("{}:1G", path.display()), &[]).stdin(Stdio::null()));
    let _ = Command::new("umount").arg("-l").arg(&path).status();
    assert_eq!(done.status.code(), Some(125), "{}", done.err);
    assert!(done.err.contains("disk") && !done.out().contains("WRONG"), "{}", done.err);
}
