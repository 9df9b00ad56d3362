//! Several children at once of a program whose pages are packed, or away: what each changes the others do not see, whatever becomes of the lenders.

mod common;

use common::{Folder, Guard, Lender, can_run, finish, netvm, wait};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

const PYTHON: &str = "/usr/bin/python3";
const PATIENCE: Duration = Duration::from_secs(30);

/// As many MiB as it is told, each page of which is as many bytes again and again. The parent changes a quarter of it as soon as it has forked, each of its children another one
/// after a while, when much of what all have packed has been written for them. Each checks all of it before and after.
const MANY: &str = "\
import mmap, os, random, sys, time
size = int(sys.argv[1]) << 20
held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
pages = range(size >> 12)
period = int(sys.argv[2])
content = lambda page, by: random.Random(page * 8 + by).randbytes(period) * (4096 // period)
place = lambda page: slice(page << 12, (page + 1) << 12)
is_right = lambda by: all(held[place(page)] == content(page, by if page % 4 == by else 7) for page in pages)
def change(by):
    good = all(held[place(page)] == content(page, 7) for page in pages)
    for page in pages[by::4]:
        held[place(page)] = content(page, by)
    return good and is_right(by)
for page in pages:
    held[place(page)] = content(page, 7)
print('filled', flush=True)
time.sleep(0.02)
children = []
for by in 1, 2, 3:
    children.append(os.fork())
    if children[-1] == 0:
        time.sleep(0.2 * by)
        os._exit(0 if change(by) else 9)
print('forked', flush=True)
good = change(0)
good &= all(os.waitpid(child, 0)[1] == 0 for child in children)
print('good' if good and is_right(0) else 'WRONG DATA')
";

/// `netvm run` of MANY on these lenders.
fn many(lenders: &[Lender], options: &[&str], local: &str, size: [&str; 2]) -> Command {
    let mut run = netvm();
    run.args(["run", "--local", local, "--tier", "compressed"]).args(options);
    for lender in lenders {
        run.args(["--lender", &lender.address]);
    }
    run.args(["--", PYTHON, "-c", MANY]).args(size);
    run
}

#[test]
fn children_find_what_was_packed_however_pages_are_kept() {
    if !can_run("children_find_what_was_packed_however_pages_are_kept", &[PYTHON]) {
        return;
    }
    let kept: [&[&str]; 4] = [&[], &["--replicas", "2"], &["--erasure", "2+1"], &["--encrypt-pages"]];
    for (link, kept) in [("shm", &kept[..2]), ("socket", &kept)] {
        for &options in kept {
            let folder = Folder::new("many");
            let lenders = ["one", "two", "three"].map(|name| Lender::named(&folder, name, "256M"));
            let done =
                finish(many(&lenders, options, "8M", ["20", "512"]).env("NETVM_LINK", link)).must_succeed();
            assert_eq!(done.out(), "filled\nforked\ngood\n", "{link} {options:?}: {}", done.err);
            for lender in &lenders {
                common::until("all of it is free again", || lender.used_bytes() == 0);
            }
        }
    }
}

#[test]
fn children_go_on_when_a_lender_is_killed_or_leaves() {
    if !can_run("children_go_on_when_a_lender_is_killed_or_leaves", &[PYTHON]) {
        return;
    }
    for (link, signal, options) in [
        ("shm", "KILL", &["--replicas", "2"][..]),
        ("socket", "KILL", &["--replicas", "2"]),
        ("socket", "KILL", &["--erasure", "2+1"]),
        ("socket", "TERM", &[]),
        ("shm", "TERM", &["--replicas", "2"]),
    ] {
        // None: just before the fork.
        for pause_ms in [None, Some(50)] {
            let folder = Folder::new("gone");
            let lenders = ["one", "two", "three", "four"].map(|name| Lender::named(&folder, name, "256M"));
            let mut run = many(&lenders, options, "8M", ["20", "512"]);
            let run = run.env("NETVM_LINK", link).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
            let mut run = Guard(run.unwrap());
            let mut wait_for = |what| run.0.stdout.as_mut().unwrap().read_exact(&mut [0; 7]).expect(what);
            wait_for("it did not start");
            if let Some(pause_ms) = pause_ms {
                wait_for("it did not fork");
                std::thread::sleep(Duration::from_millis(pause_ms));
            }
            lenders[0].signal(signal);
            let status = wait(&mut run.0, PATIENCE).expect("the program hangs");
            let (mut out, mut err) = (String::new(), String::new());
            run.0.stdout.take().unwrap().read_to_string(&mut out).unwrap();
            run.0.stderr.take().unwrap().read_to_string(&mut err).unwrap();
            let good = status.success() && out.ends_with("good\n");
            assert!(good, "{link} {signal} {options:?} {pause_ms:?}: {out}{err}");
        }
    }
}

/// There is room for what each process has to give up of its own, and none, or hardly any, for a copy of what is packed: 32 MiB suffice where pages are
/// moved, 38 where they are copied, and some more where a process has to wait for a CPU while it has what another one could have given up.
#[test]
fn children_need_no_copies_where_lenders_have_no_room_for_them() {
    if !can_run("children_need_no_copies_where_lenders_have_no_room_for_them", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("room");
    let sizes = if netvm_sys::uffd::can_move() { ["40M", "44M", "48M"] } else { ["44M", "48M", "52M"] };
    for size in sizes {
        let lenders = [Lender::start_with(&folder.path(size), size, &["--slab", "1M"])];
        let done = finish(&mut many(&lenders, &[], "16M", ["20", "256"])).must_succeed();
        assert_eq!(done.out(), "filled\nforked\ngood\n", "{size}: {}", done.err);
    }
}

/// While all of it is stopped nobody could have given memory to who waits for it: nobody goes beyond the budget then, nor is blamed.
#[test]
fn a_run_that_has_stood_still_keeps_to_its_budget() {
    if !can_run("a_run_that_has_stood_still_keeps_to_its_budget", &[PYTHON]) {
        return;
    }
    let script = "
import os, time
def work(who):
    memory, end = bytearray(24 << 20), time.time() + 5
    for at in range(0, len(memory), 4096): memory[at:at + 8] = (who * 1000003 + at).to_bytes(8, 'little')
    while time.time() < end:
        for at in range(0, len(memory), 4096):
            if int.from_bytes(memory[at:at + 8], 'little') != who * 1000003 + at: os._exit(9)
    os._exit(0)
children = []
for who in range(4):
    child = os.fork()
    if child == 0: work(who)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
";
    let mut command = netvm();
    command.args([
        "run",
        "--json",
        "--local",
        "8M",
        "--tier",
        "lender",
        "--lend-size",
        "512M",
        "--",
        PYTHON,
        "-c",
        script,
    ]);
    command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut run = Guard(command.spawn().unwrap());
    let group = format!("-{}", run.0.id());
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(1200));
        for (signal, pause_ms) in [("-STOP", 2000), ("-CONT", 0)] {
            assert!(Command::new("kill").args([signal, "--", &group]).status().unwrap().success());
            std::thread::sleep(Duration::from_millis(pause_ms));
        }
    }
    let (mut out, mut err) = (String::new(), String::new());
    run.0.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    run.0.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert!(run.0.wait().unwrap().success() && out == "[0, 0, 0, 0]\n", "{out}{err}");
    let summary: serde_json::Value = serde_json::from_str(err.lines().last().unwrap()).unwrap();
    assert!(summary["local_bytes_peak"].as_u64() <= summary["local_bytes"].as_u64(), "{summary}");
    assert_eq!(err.lines().count(), 1, "{err}");
}
