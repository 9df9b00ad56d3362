//! `netvm lend --compress`: programs on a lender that keeps pages packed.

mod common;

use common::{Folder, Lender, PATIENCE, can_run, finish, netvm, signal, until, wait};
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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

/// A small disk for the overflow, for as long as it lives. Whatever is in it, it can be made full.
struct SmallDisk(Folder);

impl SmallDisk {
    /// `None` where there can be none, having said so.
    fn new(test: &str, size: &str) -> Option<Self> {
        let folder = Folder::new("small-disk");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "netvm-test"])
            .arg(folder.path(""))
            .output();
        match mounted {
            Ok(done) if done.status.success() => Some(Self(folder)),
            Ok(done) => {
                let why = String::from_utf8_lossy(&done.stderr).trim().to_owned();
                let _ = writeln!(std::io::stderr(), "{test}: skipped (mount: {why})");
                None
            }
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "{test}: skipped (mount: {error})");
                None
            }
        }
    }

    fn path(&self) -> String {
        self.0.path("").to_str().unwrap().to_owned()
    }

    /// Until nothing more goes in.
    fn fill(&self) {
        let mut file = std::fs::File::create(self.0.path("other")).unwrap();
        while file.write_all(&[0x5A; 1 << 16]).is_ok() {}
        while file.write_all(&[0x5A; 1 << 9]).is_ok() {}
        assert_eq!(self.free_bytes(), 0);
    }

    fn free_bytes(&self) -> u64 {
        let df = finish(Command::new("df").args(["--block-size=1", "--output=avail"]).arg(self.path()));
        df.must_succeed().out().lines().last().unwrap().trim().parse().unwrap()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path("")).output();
    }
}

/// A lender that has lent more than its memory has room for as it is, to [`WORK`] on these lenders as well, whose disk has become full then.
fn with_a_full_disk(folder: &Folder, disk: &SmallDisk, others: &[&Lender], more: &[&str]) -> (Lender, Child) {
    let more_of_lender = ["--slab", "1M", "--compress", "--overflow", &disk.path(), "--lend-up-to", "96M"];
    let packed = Lender::start_with(&folder.path("packed"), "26M", &more_of_lender);
    let lenders: Vec<&Lender> = [&packed].into_iter().chain(others.iter().copied()).collect();
    let mut command = netvm();
    command.args(["run", "--local", "8M", "--tier", "lender", "--explain", "--json"]).args(more);
    for lender in lenders {
        command.args(["--lender", &lender.address]);
    }
    command.args(["--", PYTHON, "-c", WORK]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = [0; 7];
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    // Until each page has left once, and has its place.
    let (mut before, mut since) = (packed.status(), Instant::now());
    while since.elapsed() < Duration::from_secs(3) {
        std::thread::sleep(Duration::from_millis(100));
        let now = packed.status();
        if now["used_bytes"] != before["used_bytes"] {
            (before, since) = (now, Instant::now());
        }
    }
    assert!(before["used_bytes"].as_u64() > before["memory_bytes"].as_u64(), "{before}");
    disk.fill();
    // What was lent changes into what does not shrink: the disk has its room, whatever else is there.
    child.stdin.as_mut().unwrap().write_all(b"again\n").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    let full = packed.status();
    assert!(full["spilled_bytes"].as_u64() > Some(1 << 20), "{full}");
    (packed, child)
}

/// It has found all as it should be, to its end.
fn must_have_checked(mut child: Child) -> String {
    drop(child.stdin.take());
    let ended = wait(&mut child, PATIENCE).expect("the program hangs");
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert!(ended.success() && out.trim() == "checked", "{out} {err}");
    err
}

#[test]
fn a_full_disk_loses_no_page() {
    const TEST: &str = "a_full_disk_loses_no_page";
    if !can_run(TEST, &[PYTHON]) {
        return;
    }
    let Some(disk) = SmallDisk::new(TEST, "64M") else { return };
    let folder = Folder::new("packed-full");
    let (packed, child) = with_a_full_disk(&folder, &disk, &[], &[]);
    must_have_checked(child);
    until("all was given back", || packed.status()["resident_bytes"] == 0);
}

#[test]
fn a_packed_lender_killed_while_its_disk_is_full_is_done_without() {
    const TEST: &str = "a_packed_lender_killed_while_its_disk_is_full_is_done_without";
    if !can_run(TEST, &[PYTHON]) {
        return;
    }
    let Some(disk) = SmallDisk::new(TEST, "64M") else { return };
    let folder = Folder::new("packed-full-killed");
    let plain = Lender::start_with(&folder.path("plain"), "96M", &["--slab", "1M"]);
    let (packed, mut child) = with_a_full_disk(&folder, &disk, &[&plain], &["--replicas", "2"]);
    signal(packed.process.0.id(), "KILL");
    until("its room on disk came back", || disk.free_bytes() > 1 << 20);
    // Contents of both, from the one that is left, and new ones.
    child.stdin.as_mut().unwrap().write_all(b"again\n").unwrap();
    let mut said = [0; 7];
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    let err = must_have_checked(child);
    let summary: serde_json::Value = serde_json::from_str(err.lines().last().unwrap()).unwrap();
    assert_eq!(summary["lenders_lost"], 1, "{err}");
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
