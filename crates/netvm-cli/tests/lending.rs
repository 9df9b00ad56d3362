//! Lenders that want their memory back, as users see it.

mod common;

use common::{Folder, Guard, Lender, can_run, finish, netvm, signal, until, wait};
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

const PYTHON: &str = "/usr/bin/python3";

/// Room for what parent and child of [`WORK`] write, and for what both have from before, in slabs.
const ROOM: &str = "192M";

/// Fills far memory, says so, forks while it is checked, and ends when it is told to.
const WORK: &str = "\
import os, sys
pages = 8192
block = os.urandom(4096)
memory = bytearray(block * pages)
def check():
    for page in range(0, pages):
        if memory[page * 4096:page * 4096 + 4096] != block:
            print('WRONG DATA', flush=True)
            os._exit(3)
print('filled', flush=True)
sys.stdin.readline()
check()
child = os.fork()
check()
block = bytes(reversed(block)) if child == 0 else block[1:] + block[:1]
for page in range(0, pages):
    memory[page * 4096:page * 4096 + 4096] = block
check()
if child == 0:
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
";

#[test]
fn a_lender_ends_when_its_borrowers_have_moved_elsewhere() {
    const TEST: &str = "a_lender_ends_when_its_borrowers_have_moved_elsewhere";
    if !can_run(TEST, &[PYTHON]) {
        return;
    }
    leaves(&[]);
    // Forks included: parent and child write under keys of their own.
    leaves(&["--encrypt-pages"]);
}

#[test]
fn a_run_tells_which_lenders_have_left() {
    if !can_run("a_run_tells_which_lenders_have_left", &[PYTHON]) {
        return;
    }
    for (count, more) in [(2, &[][..]), (3, &["--replicas", "2"])] {
        let folder = Folder::new("left");
        let lenders = ["one", "two", "three"].map(|name| Lender::named(&folder, name, ROOM));
        let mut command = netvm();
        command.args(["run", "--local", "8M", "--tier", "lender", "--json"]).args(more);
        for lender in &lenders[..count] {
            command.args(["--lender", &lender.address]);
        }
        // Who comes later does without the one that has left.
        let twice = "\"$0\" -c \"$1\" && \"$0\" -c \"$1\" < /dev/null";
        command.args(["--", "sh", "-c", twice, PYTHON, WORK]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut run = Guard(command.stderr(Stdio::piped()).spawn().unwrap());
        run.0.stdout.as_mut().unwrap().read_exact(&mut [0; 7]).unwrap();
        until("all lend something", || lenders[..count].iter().all(|lender| lender.used_bytes() > 0));
        let [mut one, ..] = lenders;
        one.signal("TERM");
        let ended = wait(&mut one.process.0, Duration::from_secs(120)).expect("the lender does not end");
        assert!(ended.success(), "{ended:?}");
        let status = || finish(netvm().arg("status")).must_succeed().out();
        until("it is told", || status().contains(&format!("  left     {}, as they", one.address)));
        drop(run.0.stdin.take());
        let status = wait(&mut run.0, Duration::from_secs(120)).expect("the program hangs");
        let mut said = String::new();
        run.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(status.success(), "{status:?} {said}");
        let line = said.lines().find(|line| line.contains(" left when asked to stop: ")).expect(&said);
        assert!(line.starts_with(&format!("netvm: {} left", one.address)), "{said}");
        let pages = line.split(": ").last().unwrap().split(' ').next().unwrap();
        let summary: serde_json::Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
        // Some may have gone to the other lenders before, which were quicker for a while.
        let sorted = summary["pages_sorted"].as_u64().unwrap();
        assert!(pages.parse::<u64>().unwrap() + sorted > 1000, "{said}");
        assert_eq!(summary["left"][0], one.address.as_str());
        assert_eq!((&summary["lost"], &summary["lenders_left"]), (&serde_json::json!([]), &1.into()));
    }
}

#[test]
fn who_comes_while_a_lender_leaves_does_without() {
    if !can_run("who_comes_while_a_lender_leaves_does_without", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("comes");
    let lenders = ["one", "two"].map(|name| Lender::named(&folder, name, ROOM));
    let fifo = folder.path("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let script = "\"$0\" -c \"$1\" < \"$3\" & echo $!; read line; \"$0\" -c \"$2\" || exit 4; wait $!";
    // More than is local.
    let small = "import os; block = os.urandom(4096); memory = bytearray(block * 4096); print(memory == block * 4096)";
    let mut command = netvm();
    command.args(["run", "--local", "8M", "--tier", "lender", "--json"]);
    for lender in &lenders {
        command.args(["--lender", &lender.address]);
    }
    command.args(["--", "sh", "-c", script, PYTHON, WORK, small]).arg(&fifo);
    let mut run =
        Guard(command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(run.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let first: u32 = lines.next().unwrap().parse().unwrap();
    let mut input = OpenOptions::new().write(true).open(&fifo).unwrap();
    assert_eq!(lines.next().unwrap(), "filled");
    until("both lend something", || lenders.iter().all(|lender| lender.used_bytes() > 0));
    // Who stands still gives nothing back.
    signal(first, "STOP");
    let [mut one, two] = lenders;
    one.signal("TERM");
    until("it is about to leave", || one.status()["draining"] == true);
    run.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    assert_eq!(lines.next().unwrap(), "True");
    signal(first, "CONT");
    let ended = wait(&mut one.process.0, Duration::from_secs(120)).expect("the lender does not end");
    assert!(ended.success() && two.used_bytes() > 0, "{ended:?}");
    input.write_all(b"\n").unwrap();
    let status = wait(&mut run.0, Duration::from_secs(120)).expect("the program hangs");
    let mut said = String::new();
    run.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(status.success(), "{status:?} {said}");
    let summary: serde_json::Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    assert_eq!(
        (&summary["left"][0], &summary["lost"]),
        (&one.address.as_str().into(), &serde_json::json!([]))
    );
}

fn leaves(more: &[&str]) {
    let folder = Folder::new("leaving");
    let log = folder.path("log");
    let lenders = [Lender::named(&folder, "one", ROOM), Lender::logged(&folder, "two", ROOM, &log)];
    let mut run = Guard(
        netvm()
            .args(["run", "--local", "8M", "--tier", "lender", "--lender", &lenders[0].address])
            .args(["--lender", &lenders[1].address])
            .args(more)
            .args(["--", PYTHON, "-c", WORK])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut said = [0; 7];
    run.0.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    until("both lend something", || lenders.iter().all(|lender| lender.used_bytes() > 0));
    let [mut one, two] = lenders;
    one.signal("TERM");
    let ended = wait(&mut one.process.0, Duration::from_secs(120)).expect("the lender does not end");
    assert!(ended.success(), "{ended:?}");
    assert!(two.used_bytes() >= 24 << 20);
    // The only one left cannot: it says so and serves on, forks included.
    two.signal("TERM");
    until("it is told that nobody else can have it", || {
        let status = two.status();
        status["draining"] == true && status["borrowers"][0]["cannot"] == true
    });
    let said = || std::fs::read_to_string(&log).unwrap();
    until("it says so", || said().contains("MiB lent to 1 borrower: serving on"));
    assert!(said().contains("asked to stop: waiting for 1 borrower\n"), "{}", said());
    drop(run.0.stdin.take());
    let status = wait(&mut run.0, Duration::from_secs(120)).expect("the program hangs");
    assert!(status.success(), "{status:?}");
    assert_eq!(said().matches("serving on").count(), 1, "{}", said());
}

#[test]
fn arguments_that_make_no_sense_are_refused() {
    for (arguments, words) in [
        (&["--quota", "1M"][..], "less than one slab"),
        (&["--pressure", "0"], "percent"),
        (&["--pressure", "10", "--pressure-file", "/nonexistent"], "cannot read /nonexistent (No such file"),
        (&["--pressure", "10", "--pressure-file", "/etc/passwd"], "/etc/passwd tells of no pressure"),
        (&["--lease-timeout", "0"], "0"),
        (&["--reserve", "500T"], "leaves nothing to lend: this machine has"),
        (&["--slab", "64M"], "no room for one slab of 64 MiB; give more, or a smaller --slab"),
        (&["--cpu", "1023"], "this process may use, "),
    ] {
        let done = finish(netvm().args(["lend", "--size", "32M", "--listen", "127.0.0.1:0"]).args(arguments));
        assert!(!done.status.success() && done.err.contains(words), "{arguments:?}: {}", done.err);
    }
}
