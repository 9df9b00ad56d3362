//! `netvm lend --compress`: programs on a lender that keeps pages packed.

mod common;

use common::{Folder, Lender, PATIENCE, can_run, finish, netvm, signal, until, wait};
use std::io::{Read, Write};
use std::process::{Command, Stdio};

const PYTHON: &str = "/usr/bin/python3";

/// Fills 40 MiB, half of which does not shrink, says so, and checks them, again and again until its input ends. When it reads a line it fills all
/// anew with what does not shrink.
const WORK: &str = "\
import os, select, sys, zlib
pages = 10240
memory = bytearray(pages * 4096)
sums = []
def block(part):
    return os.urandom(part) + (b'%07d ' % os.getpid()) * ((4096 - part) // 8)
def fill(part):
    sums.clear()
    for page in range(pages):
        new = block(part)
        memory[page * 4096:page * 4096 + 4096] = new
        sums.append(zlib.crc32(new))
    print('filled', flush=True)
fill(2048)
while True:
    for page in range(pages):
        if zlib.crc32(memory[page * 4096:page * 4096 + 4096]) != sums[page]:
            print('WRONG DATA', flush=True)
            sys.exit(3)
    if select.select([sys.stdin], [], [], 0)[0]:
        if not sys.stdin.readline():
            break
        fill(4096)
print('checked')
";

fn run(lenders: &[&Lender]) -> Command {
    let mut command = netvm();
    command.args(["run", "--local", "8M", "--tier", "lender", "--explain", "--json"]);
    for lender in lenders {
        command.args(["--lender", &lender.address]);
    }
    command.args(["--", PYTHON, "-c", WORK]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn packed(folder: &Folder, size: &str) -> Lender {
    let overflow = folder.path("");
    let more =
        ["--slab", "1M", "--compress", "--overflow", overflow.to_str().unwrap(), "--lend-up-to", "256M"];
    Lender::start_with(&folder.path("packed"), size, &more)
}

#[test]
fn a_program_runs_on_packed_memory_whatever_becomes_of_its_pages() {
    const TEST: &str = "a_program_runs_on_packed_memory_whatever_becomes_of_its_pages";
    if !can_run(TEST, &[PYTHON]) {
        return;
    }
    let folder = Folder::new("packed");
    let (packed, plain) = (packed(&folder, "40M"), Lender::named(&folder, "plain", "16M"));
    let mut child = run(&[&packed, &plain]).spawn().unwrap();
    let mut said = [0; 7];
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    let status = packed.status();
    assert_eq!(status["class"], "packed", "{status}");
    let number = |name: &str| status[name].as_u64().unwrap();
    assert!(number("used_bytes") >= 16 << 20 && number("memory_bytes") <= 40 << 20, "{status}");
    // Half of what is lent, and what else there is of each page.
    assert!(number("resident_bytes") < number("used_bytes") / 4 * 3, "{status}");
    let told = finish(netvm().args(["status", &packed.address])).must_succeed().out();
    assert!(told.contains("lends      packed") && told.contains("into at most"), "{told}");
    child.stdin.as_mut().unwrap().write_all(b"again\n").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    let full = packed.status();
    assert!(full["resident_bytes"].as_u64() > status["resident_bytes"].as_u64(), "{full}");
    assert!(full["resident_bytes"].as_u64() <= full["memory_bytes"].as_u64(), "{full}");
    drop(child.stdin.take());
    let ended = wait(&mut child, PATIENCE).expect("the program hangs");
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert!(ended.success() && out == "checked\n", "{out} {err}");
    until("all was given back", || packed.status()["resident_bytes"] == 0);
    // The file for the overflow has no name.
    assert!(std::fs::read_dir(folder.path("")).unwrap().all(|file| {
        let name = file.unwrap().file_name();
        name == "packed" || name == "plain"
    }));
}

#[test]
fn a_killed_packed_lender_ends_the_program_with_a_sentence() {
    if !can_run("a_killed_packed_lender_ends_the_program_with_a_sentence", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("packed-killed");
    let packed = packed(&folder, "64M");
    let mut child = run(&[&packed]).spawn().unwrap();
    let mut said = [0; 7];
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    signal(packed.process.0.id(), "KILL");
    let ended = wait(&mut child, PATIENCE).expect("the program hangs");
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(ended.code(), Some(125), "{err}");
    assert!(err.contains("/packed") && !out.contains("WRONG"), "{out} {err}");
}

#[test]
fn what_cannot_be_lent_packed_is_said() {
    for (more, said) in [
        (&["--overflow", "/tmp"][..], "--compress"),
        (&["--compress", "--lend-up-to", "4G"], "--overflow"),
        (&["--compress", "--hugepages"], "--hugepages"),
        (&["--compress", "--file", "/tmp"], "--file"),
        (&["--compress", "--overflow", "/tmp", "--lend-up-to", "1M"], "less than --size"),
        (&["--compress", "--overflow", "/tmp", "--lend-up-to", "2G"], "16 times"),
        (&["--compress", "--overflow", "/nowhere/at/all"], "/nowhere/at/all"),
    ] {
        let done = finish(netvm().args(["lend", "--size", "64M", "--listen", "127.0.0.1:0"]).args(more));
        assert!(!done.status.success() && done.err.contains(said), "{more:?}: {}", done.err);
    }
}
