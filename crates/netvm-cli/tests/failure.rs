//! What users see when something is wrong: one sentence that says what, soon, and never wrong data.

mod common;

use common::{Done, Folder, Guard, Lender, can_run, finish, netvm, wait};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PYTHON: &str = "/usr/bin/python3";

/// Longest time from the failure to the end of the program: one to three seconds, and several times as long while other tests keep the CPUs busy.
const PATIENCE: Duration = Duration::from_secs(15);

/// Fills far memory, says so, and then reads and checks it for ever.
const WORK: &str = "\
import os, sys
pages = 12288
block = os.urandom(4096)
memory = bytearray(block * pages)
print('filled', flush=True)
while True:
    for page in range(0, pages, 7):
        if memory[page * 4096:page * 4096 + 4096] != block:
            print('WRONG DATA', flush=True)
            sys.exit(3)
";

/// `netvm run` on this lender with a program that goes on for ever, when it has filled its memory.
fn start_work(lender: &str) -> Guard {
    start_work_by("auto", lender)
}

fn start_work_by(link: &str, lender: &str) -> Guard {
    start_work_with(link, &["--lender", lender])
}

/// The same with these options.
fn start_work_with(link: &str, options: &[&str]) -> Guard {
    let mut child = netvm()
        .env("NETVM_LINK", link)
        .args(["run", "--local", "8M"])
        .args(options)
        .args(["--", PYTHON, "-c", WORK])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 7];
    child.stdout.as_mut().unwrap().read_exact(&mut said).expect("the program did not start");
    assert_eq!(&said, b"filled\n");
    Guard(child)
}

/// Waits for the end; the status and what was said.
#[track_caller]
fn ends_soon(mut run: Guard) -> Done {
    let started = Instant::now();
    let status = wait(&mut run.0, PATIENCE + Duration::from_secs(5)).expect("the program hangs");
    let elapsed = started.elapsed();
    assert!(elapsed < PATIENCE, "{elapsed:?}");
    let (mut out, mut err) = (Vec::new(), String::new());
    run.0.stdout.take().unwrap().read_to_end(&mut out).unwrap();
    run.0.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    Done { status, out, err, elapsed }
}

/// One line, of netvm, that has all these words.
#[track_caller]
fn must_say(done: &Done, words: &[&str]) {
    assert!(!done.status.success(), "{}", done.err);
    let lines: Vec<_> = done.err.lines().filter(|line| line.starts_with("netvm: ")).collect();
    assert_eq!(lines.len(), 1, "{}", done.err);
    for word in words {
        assert!(lines[0].contains(word), "no {word:?} in: {}", done.err);
    }
    assert!(!done.out().contains("WRONG"), "{}", done.out());
}

#[test]
fn a_killed_lender_ends_the_program_with_one_sentence_that_names_it() {
    const TEST: &str = "a_killed_lender_ends_the_program_with_one_sentence_that_names_it";
    if !can_run(TEST, &[PYTHON]) {
        return;
    }
    let folder = Folder::new("killed");
    let lender = Lender::start(&folder, "256M");
    let run = start_work(&lender.address);
    assert!(lender.used_bytes() > 16 << 20);
    lender.signal("KILL");
    let done = ends_soon(run);
    must_say(&done, &[&lender.address]);
    assert_eq!(done.status.code(), Some(125));
}

#[test]
fn a_lender_that_stands_still_is_given_up() {
    if !can_run("a_lender_that_stands_still_is_given_up", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("stopped");
    let lender = Lender::start(&folder, "256M");
    let run = start_work_by("socket", &lender.address);
    lender.signal("STOP");
    let done = ends_soon(run);
    lender.signal("CONT");
    must_say(&done, &[&lender.address, "answer"]);
}

/// What `netvm status` tells of the run of this process.
fn status_of(run: &Guard) -> Option<Value> {
    let done = finish(netvm().args(["status", "--json"])).must_succeed();
    let out = done.out();
    let mut runs = out.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    runs.find(|told| told["pid"] == run.0.id())
}

#[test]
fn with_replicas_only_the_last_lender_ends_the_program() {
    if !can_run("with_replicas_only_the_last_lender_ends_the_program", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("replicas");
    let (first, second) = (Lender::named(&folder, "first", "256M"), Lender::named(&folder, "second", "256M"));
    let addresses = [first.address.clone(), second.address.clone()];
    let lenders = ["--lender", &addresses[0], "--lender", &addresses[1]];
    let run = start_work_with("socket", &[&lenders[..], &["--replicas", "2", "--tier", "lender"]].concat());
    let told = |so: &dyn Fn(&Value) -> bool| status_of(&run).is_some_and(|told| so(&told));
    assert!(told(&|told| told["replicas"] == 2 && told["lost"] == serde_json::json!([])));
    second.signal("KILL");
    common::until("the loss is told", || {
        told(&|told| {
            told["lost"] == serde_json::json!([&addresses[1]])
                && told["pages_unprotected"].as_u64() > Some(1000)
        })
    });
    drop(second);
    let second = Lender::named(&folder, "second", "256M");
    common::until("all pages have two copies again", || {
        told(&|told| told["pages_repaired"].as_u64() > Some(1000) && told["pages_unprotected"] == 0)
    });
    // The first is not needed any more: all pages are at the second.
    first.signal("KILL");
    common::until("the other loss is told", || told(&|told| told["lost"] == serde_json::json!(addresses)));
    assert!(second.used_bytes() > 16 << 20);
    second.signal("KILL");
    let done = ends_soon(run);
    must_say(&done, &["no copy is left", &addresses[0], &addresses[1]]);
    assert_eq!(done.status.code(), Some(125));
}

#[test]
fn replicas_that_cannot_be_had() {
    let run = |options: &[&str]| finish(netvm().arg("run").args(options).args(["--", "true"]));
    must_say(&run(&["--replicas", "2"]), &["--replicas 2", "0 lender"]);
    must_say(&run(&["--replicas", "2", "--lender", "a:1"]), &["1 lender"]);
    must_say(&run(&["--replicas", "2", "--lender", "a:1", "--lender", "a:1"]), &["a:1", "twice"]);
    must_say(&run(&["--replicas", "0", "--lender", "a:1"]), &["--replicas 0"]);
    must_say(&run(&["--erasure", "2+1", "--lender", "a:1"]), &["2+1", "3 lenders", "1 are given"]);
    let done = run(&["--erasure", "3+1", "--lender", "a:1"]);
    assert!(done.status.code() == Some(2) && done.err.contains("give K+M"), "{}", done.err);
}

/// Processes that check all that they have before and after they change it, while their parent forks on.
const FORKS: &str = "
import hashlib, os, random
data = [bytearray(os.urandom(1 << 20)) for _ in range(16)]
sums = [hashlib.md5(piece).digest() for piece in data]
def check():
    if [hashlib.md5(piece).digest() for piece in data] != sums: print('WRONG'); os._exit(1)
def change(seed):
    numbers = random.Random(seed)
    for _ in range(1000): data[numbers.randrange(16)][numbers.randrange(1 << 20)] = numbers.randrange(256)
    sums[:] = [hashlib.md5(piece).digest() for piece in data]
children = []
for seed in range(4):
    child = os.fork()
    if child == 0:
        for step in range(2): check(); change(seed + 10 * step); check()
        os._exit(0)
    children.append(child); change(100 + seed); check()
print('good' if not any(os.waitpid(child, 0)[1] for child in children) else 'BAD')
";

#[test]
fn forks_with_pages_in_parts_go_on_without_two_lenders() {
    if !can_run("forks_with_pages_in_parts_go_on_without_two_lenders", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("forks");
    let lenders: Vec<_> = (0..4).map(|index| Lender::named(&folder, &index.to_string(), "256M")).collect();
    let mut run = netvm();
    run.args(["run", "--local", "8M", "--erasure", "2+2", "--encrypt-pages", "--json"]);
    for lender in &lenders {
        run.args(["--lender", &lender.address]);
    }
    run.args(["--", PYTHON, "-c", FORKS]);
    let done = std::thread::scope(|scope| {
        scope.spawn(|| {
            common::until("it holds memory", || lenders[1].used_bytes() > 0);
            lenders[1].signal("KILL");
            std::thread::sleep(Duration::from_millis(700));
            lenders[2].signal("KILL");
        });
        finish(&mut run)
    });
    assert!(done.status.success() && done.out() == "good\n", "{} {}", done.out(), done.err);
    let lost = done.summary()["lost"].clone();
    assert!(lost.as_array().is_some_and(|lost| !lost.is_empty()), "{lost}");
}

/// Fills memory, says so, and checks it when its input ends.
const WAITS: &str = "
import os, sys
block = os.urandom(4096)
memory = bytearray(block * 8192)
print('filled', flush=True)
sys.stdin.read()
print('good' if memory == block * 8192 else 'WRONG DATA')
";

#[test]
fn the_end_says_how_many_lenders_might_have_been_lost_besides() {
    if !can_run("the_end_says_how_many_lenders_might_have_been_lost_besides", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("besides");
    let all = [
        ("3", "8M", "1 more might have been lost"),
        ("2", "8M", "so there was no protection left"),
        // All is local.
        ("1", "256M", "nothing of this program was there"),
    ];
    for (replicas, local, said) in all {
        let count: usize = replicas.parse().unwrap();
        let name = |index: usize| format!("{replicas}-{index}");
        let lenders: Vec<_> = (0..count).map(|index| Lender::named(&folder, &name(index), "256M")).collect();
        let mut run = netvm();
        run.args(["run", "--local", local, "--tier", "lender", "--replicas", replicas]);
        lenders.iter().for_each(|lender| _ = run.args(["--lender", &lender.address]));
        run.args(["--", PYTHON, "-c", WAITS]);
        let run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut run = Guard(run);
        run.0.stdout.as_mut().unwrap().read_exact(&mut [0; 7]).expect("the program did not start");
        lenders[0].signal("KILL");
        common::until("it is missed", || {
            status_of(&run).is_some_and(|told| told["lost"] != serde_json::json!([]))
        });
        drop(run.0.stdin.take());
        let done = ends_soon(run);
        assert!(done.status.success() && done.out() == "good\n", "{} {}", done.out(), done.err);
        assert!(done.err.contains(&lenders[0].address) && done.err.contains(said), "{}", done.err);
    }
}

/// Local first; then, when it is told to, more than is local.
const GROWS: &str = "\
import sys
print('filled', flush=True)
sys.stdin.read()
memory = bytearray(64 << 20)
for page in range(len(memory) // 4096):
    memory[page * 4096] = page % 251 + 1
print('WRONG: it goes on', flush=True)
";

#[test]
fn a_lender_that_was_lost_before_it_was_needed_is_named_then() {
    if !can_run("a_lender_that_was_lost_before_it_was_needed_is_named_then", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("needed");
    let lender = Lender::start(&folder, "256M");
    let mut run = netvm();
    run.args([
        "run",
        "--local",
        "32M",
        "--tier",
        "lender",
        "--lender",
        &lender.address,
        "--",
        PYTHON,
        "-c",
        GROWS,
    ]);
    let run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut run = Guard(run);
    run.0.stdout.as_mut().unwrap().read_exact(&mut [0; 7]).expect("the program did not start");
    lender.signal("KILL");
    drop(run.0.stdin.take());
    let mut status = None;
    // It is waited for as long as it might have been silent.
    common::until("the program ends", || {
        status = run.0.try_wait().unwrap();
        status.is_some()
    });
    let done = ends_soon(run);
    must_say(&done, &["all lenders are lost", &lender.address]);
    assert_eq!(done.status.code(), Some(125));
}

/// All of it fits, and forks; until its input ends.
const FITS: &str = "\
import os, random, select, sys
print('filled', flush=True)
held, draw = [], random.Random(1)
make = lambda seed: bytearray(random.Random(seed).randbytes(1 << 20))
while not select.select([sys.stdin], [], [], 0)[0]:
    if len(held) < 16 and draw.random() < 0.6:
        seed = draw.randrange(1 << 30)
        held.append((make(seed), seed))
    elif held:
        block, seed = held.pop(draw.randrange(len(held)))
        if block != make(seed):
            sys.exit('WRONG DATA')
    if draw.random() < 0.05:
        child = os.fork()
        if child == 0:
            os._exit(0 if all(block == make(seed) for block, seed in held[:2]) else 9)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit('WRONG DATA in a child')
print('good' if all(block == make(seed) for block, seed in held) else 'WRONG DATA')
";

#[test]
fn a_lender_may_come_and_go_while_it_holds_nothing() {
    if !can_run("a_lender_may_come_and_go_while_it_holds_nothing", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("flaps");
    let mut lender = Lender::start(&folder, "256M");
    let mut run = netvm();
    run.args(["run", "--local", "64M", "--lender", &lender.address, "--", PYTHON, "-c", FITS]);
    let run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut run = Guard(run);
    run.0.stdout.as_mut().unwrap().read_exact(&mut [0; 7]).expect("the program did not start");
    for pause_ms in [0, 300, 30] {
        std::thread::sleep(Duration::from_millis(300));
        lender.signal("KILL");
        drop(lender);
        std::thread::sleep(Duration::from_millis(pause_ms));
        lender = Lender::start(&folder, "256M");
    }
    std::thread::sleep(Duration::from_millis(300));
    drop(run.0.stdin.take());
    let done = ends_soon(run);
    assert!(done.status.success() && done.out() == "good\n", "{} {}", done.out(), done.err);
    assert!(done.err.contains("nothing of this program was there"), "{}", done.err);
}

/// More than its local memory, which packs to a fifth of it: less than a half of that, which is all that each has after a fork. It forks when its input ends.
const PACKS: &str = "\
import mmap, os, random, sys
size = 16 << 20
held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
page = lambda number: random.Random(number).randbytes(512) * 8
for number in range(size >> 12):
    held[number << 12:(number + 1) << 12] = page(number)
print('filled', flush=True)
sys.stdin.read()
child = os.fork()
for number in range(child > 0, size >> 12, 2):
    held[number << 12:(number + 1) << 12] = page(number + 1)
good = all(held[number << 12:(number + 1) << 12] == page(number + (number % 2 == (child > 0)))
           for number in range(size >> 12))
if child == 0:
    os._exit(0 if good else 9)
print('good' if os.waitpid(child, 0)[1] == 0 and good else 'WRONG DATA')
";

/// Everything is packed, so parent and child both have all of it.
#[test]
fn a_process_forks_though_its_only_lender_is_lost() {
    if !can_run("a_process_forks_though_its_only_lender_is_lost", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("packs");
    let lender = Lender::start(&folder, "64M");
    let mut run = netvm();
    run.args(["run", "--local", "12M", "--tier", "compressed", "--lender", &lender.address]);
    run.args(["--", PYTHON, "-c", PACKS]);
    let run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut run = Guard(run);
    run.0.stdout.as_mut().unwrap().read_exact(&mut [0; 7]).expect("the program did not start");
    assert_eq!(lender.used_bytes(), 0, "not all of it is packed");
    lender.signal("KILL");
    drop(lender);
    std::thread::sleep(Duration::from_millis(100));
    drop(run.0.stdin.take());
    let done = ends_soon(run);
    assert!(done.status.success() && done.out() == "good\n", "{} {}", done.out(), done.err);
}

/// Parent and child have changed what they share, and have less room than before, when one lender goes.
#[test]
fn processes_that_share_what_is_packed_go_on_without_one_of_two_lenders() {
    if !can_run("processes_that_share_what_is_packed_go_on_without_one_of_two_lenders", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("share");
    let lenders = ["one", "two"].map(|name| Lender::named(&folder, name, "128M"));
    // More than both can pack.
    let program = PACKS
        .replace("16 << 20", "48 << 20")
        .replace("child = os.fork()", "child = os.fork()\nprint('forked', flush=True)");
    let mut run = netvm();
    run.args(["run", "--local", "8M", "--tier", "compressed", "--replicas", "2", "--lender"]);
    run.args([&lenders[0].address, "--lender", &lenders[1].address, "--", PYTHON, "-c", &program]);
    let run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut run = Guard(run);
    run.0.stdout.as_mut().unwrap().read_exact(&mut [0; 7]).expect("the program did not start");
    drop(run.0.stdin.take());
    run.0.stdout.as_mut().unwrap().read_exact(&mut [0; 14]).expect("it did not fork");
    lenders[1].signal("KILL");
    let done = ends_soon(run);
    assert!(done.status.success() && done.out() == "good\n", "{} {}", done.out(), done.err);
}

#[test]
fn a_lender_that_becomes_full_is_named() {
    if !can_run("a_lender_that_becomes_full_is_named", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("full");
    let lender = Lender::start(&folder, "16M");
    let done =
        finish(netvm().args(["run", "--local", "8M", "--lender", &lender.address, "--", PYTHON, "-c", WORK]));
    must_say(&done, &[&lender.address, "full"]);
    // What the program had is free again.
    common::until("the memory is free", || lender.used_bytes() == 0);
}

#[test]
fn a_private_lender_that_is_too_small_is_full() {
    if !can_run("a_private_lender_that_is_too_small_is_full", &[PYTHON]) {
        return;
    }
    let done = finish(netvm().args(["run", "--local", "8M", "--lend-size", "16M", "--", PYTHON, "-c", WORK]));
    must_say(&done, &["full"]);
}

#[test]
fn a_path_may_have_commas_and_more() {
    if !can_run("a_path_may_have_commas_and_more", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("commas");
    let (first, second) =
        (Lender::named(&folder, "one, two,", "256M"), Lender::named(&folder, ",\x1b", "256M"));
    let lenders = ["--lender", &first.address, "--lender", &second.address];
    let run = start_work_with("auto", &lenders);
    let told = status_of(&run).unwrap();
    assert_eq!(told["lenders"], serde_json::json!([&first.address, &second.address]));
    let text = finish(netvm().arg("status")).must_succeed().out();
    assert!(text.contains(&format!("{}, {}", first.address, second.address.replace('\x1b', "?"))), "{text}");
    first.signal("KILL");
    must_say(&ends_soon(run), &[&first.address]);
}

#[test]
fn nobody_at_the_address() {
    let folder = Folder::new("nobody");
    let socket = format!("unix:{}", folder.path("nobody").display());
    // A port that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for address in [socket.as_str(), &port.to_string(), "no-such-host.invalid:7777", "127.0.0.1:99999", "x"] {
        for command in [vec!["run", "--lender", address, "--", "true"], vec!["status", address]] {
            let done = finish(netvm().args(&command));
            must_say(&done, &[address.trim_start_matches("unix:")]);
            // How long a name takes that there is not is the machine's business.
            assert!(
                address.contains("invalid") || done.elapsed < PATIENCE,
                "{command:?}: {:?}",
                done.elapsed
            );
        }
    }
    let done = finish(netvm().args(["run", "--lender", "127.0.0.1:1,127.0.0.1:2", "--", "true"]));
    must_say(&done, &["127.0.0.1:1,127.0.0.1:2", "comma"]);
}

/// Something that listens, says `greeting` to everyone and then nothing more.
fn stranger(greeting: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let mut connections = Vec::new();
        for connection in listener.incoming() {
            let mut connection = connection.unwrap();
            let _ = connection.write_all(greeting);
            connections.push(connection);
        }
    });
    address
}

#[test]
fn something_else_at_the_address() {
    for greeting in [&b"SSH-2.0-OpenSSH_9.2p1\r\n"[..], b"HTTP/1.1 400 Bad Request\r\n\r\n", b""] {
        let address = stranger(greeting);
        for command in [vec!["run", "--lender", &address, "--", "true"], vec!["status", &address]] {
            let done = finish(netvm().args(&command));
            must_say(&done, &[&address]);
            assert!(done.elapsed < PATIENCE, "{command:?}: {:?}", done.elapsed);
        }
    }
}

#[test]
fn local_memory_below_the_minimum() {
    for local in ["0", "1M", "4095K"] {
        let done = finish(netvm().args(["run", "--local", local, "--", "true"]));
        must_say(&done, &["4 MiB"]);
    }
    let done = finish(netvm().args(["run", "--local", "lots", "--", "true"]));
    assert!(!done.status.success() && done.err.contains("lots"), "{}", done.err);
}

#[test]
fn a_link_that_there_is_not_is_refused() {
    for command in [&["run", "--", "true"][..], &["lend", "--size", "64M"], &["status"]] {
        let done = finish(netvm().args(command).env("NETVM_LINK", "rdma"));
        must_say(&done, &["NETVM_LINK is rdma", "auto, shm, socket or datagrams"]);
        assert_eq!(done.status.code(), Some(125));
    }
}

#[test]
fn addresses_for_far_memory_that_cannot_be_had() {
    if !can_run("addresses_for_far_memory_that_cannot_be_had", &[PYTHON]) {
        return;
    }
    // 8 GiB of addresses for the process, 1 TiB for the far area; 2 GiB of data, of which the page table is 4.
    for (limit, named) in [("-v 8388608", "ulimit -v"), ("-d 2097152", "ulimit -d")] {
        let run = format!(
            "ulimit {limit}; exec {} run --local 8M --lend-size 64M -- {PYTHON} -c 'bytearray(50000000)'",
            env!("CARGO_BIN_EXE_netvm")
        );
        let done = finish(Command::new("sh").args(["-c", &run]));
        must_say(&done, &["addresses", named, "--area"]);
    }
}

/// Nobody has started the private lender: the option is that of the run.
#[test]
fn a_full_private_lender_names_the_option_of_the_run() {
    if !can_run("a_full_private_lender_names_the_option_of_the_run", &[PYTHON]) {
        return;
    }
    let script = "import os; x = os.urandom(1 << 20) * 64; print(sum(x[::4096]))";
    let done =
        finish(netvm().args(["run", "--lend-size", "16M", "--local", "8M", "--", PYTHON, "-c", script]));
    must_say(
        &done,
        &["the private lender is full: 16 of its 16 MiB are lent", "larger --lend-size", "cannot go on"],
    );
    assert!(!done.err.contains("--size (") && !done.err.contains("unix:"), "{}", done.err);
}

#[test]
fn no_memory_left_on_the_machine() {
    const TEST: &str = "no_memory_left_on_the_machine";
    if !can_run(TEST, &[PYTHON]) {
        return;
    }
    let groups = "/sys/fs/cgroup/memory";
    let group = format!("{groups}/netvm-test-{}", std::process::id());
    let limit = format!("{group}/memory.limit_in_bytes");
    if std::fs::create_dir(&group).and_then(|()| std::fs::write(&limit, "67108864")).is_err() {
        let _ = std::fs::remove_dir(&group);
        let _ = writeln!(std::io::stderr(), "{TEST}: skipped (cannot make a memory cgroup in {groups})");
        return;
    }
    // Nor swap.
    let _ = std::fs::write(format!("{group}/memory.swappiness"), "0");
    // The program and its private lender together may have 64 MiB, and need more.
    let run = format!(
        "echo $$ > {group}/cgroup.procs; exec {} run --local 8M --lend-size 1G -- {PYTHON} -c '{}'",
        env!("CARGO_BIN_EXE_netvm"),
        WORK.replace("12288", "65536").replace('\'', "\"")
    );
    let done = finish(Command::new("sh").args(["-c", &run]));
    let _ = std::fs::remove_dir(&group);
    // The kernel's victim may be any of the three; no result may be wrong.
    assert!(!done.status.success(), "{}", done.out());
    assert!(!done.out().contains("WRONG") && !done.out().contains("filled"), "{}", done.out());
}

#[test]
fn programs_that_are_not_covered() {
    let folder = Folder::new("programs");
    for program in ["/no/such/program", "no-such-program"] {
        let done = finish(netvm().args(["run", "--", program]));
        must_say(&done, &[program]);
    }
    let script = folder.path("script");
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    must_say(&finish(netvm().args(["run", "--"]).arg(&script)), &["/no/such/interpreter"]);

    let program = folder.path("static");
    std::fs::write(folder.path("main.c"), "int main(void) { return 0; }\n").unwrap();
    let compiled =
        Command::new("gcc").arg("-static").arg("-o").arg(&program).arg(folder.path("main.c")).output();
    if !compiled.is_ok_and(|output| output.status.success()) {
        let _ = writeln!(std::io::stderr(), "programs_that_are_not_covered: skipped (no gcc -static here)");
        return;
    }
    must_say(&finish(netvm().args(["run", "--"]).arg(&program)), &["statically linked", "swap"]);
}

#[test]
fn a_lender_goes_on_when_what_it_says_goes_to_a_full_disk() {
    let folder = Folder::new("full-disk");
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let address = format!("unix:{}", folder.path("lender").display());
    let mut command = netvm();
    command.args(["lend", "--size", "64M", "--listen", &address]).stdout(full()).stderr(full());
    let mut lender = Guard(command.spawn().unwrap());
    let run = ["run", "--local", "4M", "--lender", &address, "--", "/bin/true"];
    common::until("there is a lender", || folder.path("lender").exists());
    for _ in 0..3 {
        finish(netvm().args(run)).must_succeed();
    }
    assert!(lender.0.try_wait().unwrap().is_none(), "the lender has ended");
    // It says that it leaves.
    common::signal(lender.0.id(), "TERM");
    assert!(wait(&mut lender.0, PATIENCE).is_some_and(|status| status.success()));
}

/// What commands print and nobody can take: a full disk, and a pipe whose reader has gone.
#[test]
fn output_that_goes_nowhere_stops_nobody() {
    let folder = common::Folder::new("output-nowhere");
    let secret = folder.path("secret");
    let pages = folder.path("pages");
    let (secret, pages) = (secret.to_str().unwrap(), pages.to_str().unwrap());
    let commands: Vec<Vec<&str>> = [
        "lend",
        "run",
        "nbd",
        "ublk",
        "mount",
        "device",
        "send",
        "recv",
        "swap",
        "top",
        "metrics",
        "status",
        "secret",
        "demo",
        "doctor",
        "bench",
        "completions",
        "man",
    ]
    .into_iter()
    .map(|command| vec![command, "--help"])
    .chain([
        vec!["--help"],
        vec!["--version"],
        vec!["doctor"],
        vec!["top", "--once"],
        vec!["top", "--json"],
        vec!["metrics", "--print"],
        vec!["swap", "status"],
        vec!["device", "status"],
        vec!["completions", "bash"],
        vec!["man", pages],
        vec!["secret", "new", secret],
        vec!["status", "127.0.0.1:1"],
        vec!["run", "--local", "16M", "--stats", "--", "true"],
        vec!["bench", "frames", "--quick"],
        vec!["no-such-command"],
    ])
    .collect();
    for arguments in &commands {
        for closed in [false, true] {
            let sink = || {
                if !closed {
                    return Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap());
                }
                let (reader, writer) = std::io::pipe().unwrap();
                drop(reader);
                Stdio::from(writer)
            };
            // Standard error goes to a file first, to see what is said, and then nowhere, too.
            let said = folder.path("said");
            for loud in [true, false] {
                let err = if loud { Stdio::from(std::fs::File::create(&said).unwrap()) } else { sink() };
                let mut command = netvm();
                let child = command.args(arguments).stdin(Stdio::null()).stdout(sink()).stderr(err).spawn();
                let mut child = common::Guard(child.unwrap());
                let status = common::wait(&mut child.0, Duration::from_secs(60)).expect("it hangs");
                let text = std::fs::read_to_string(&said).unwrap();
                let panicked =
                    status.code() == Some(101) || status.code() == Some(134) || text.contains("panicked");
                assert!(!panicked, "{arguments:?} {closed} {loud}: {status} {text}");
                let _ = std::fs::remove_file(secret);
            }
        }
    }
    // Who asked for something and did not get it is told.
    for arguments in [&["doctor"][..], &["bench", "frames", "--quick"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let done = netvm().args(arguments).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        // Frames cannot be measured without userfaultfd.
        let is_told = said.contains("standard output: No space left") || said.contains("userfaultfd");
        assert!(done.status.code() == Some(125) && is_told, "{arguments:?}: {done:?}");
    }
}

#[test]
fn a_picture_that_does_not_get_onto_the_disk_is_told() {
    if !can_run("a_picture_that_does_not_get_onto_the_disk_is_told", &[]) {
        return;
    }
    let done = finish(netvm().args(["demo", "--local", "4M", "--svg", "/dev/full"]));
    assert_eq!(done.status.code(), Some(125), "{}", done.err);
    assert!(
        done.err.contains("cannot write /dev/full: No space left") && !done.out().contains("Plot"),
        "{done:?}"
    );
}

#[test]
fn a_demo_says_how_much_it_can_sort() {
    for (data, why) in [("0", "at least 1 MiB"), ("1", "at least 1 MiB"), ("1000000T", "free here")] {
        let done = finish(netvm().args(["demo", "--local", "16M", "--data", data]));
        assert!(done.status.code() == Some(125) && done.out().is_empty(), "{done:?}");
        assert!(done.err.starts_with("netvm: --data") && done.err.contains(why), "{}", done.err);
        assert_eq!(done.err.lines().count(), 1, "{}", done.err);
    }
}

#[test]
fn a_demo_asks_for_its_lender_before_it_sorts() {
    let done = finish(netvm().args(["demo", "--local", "4M", "--data", "32M", "--lender", "127.0.0.1:1"]));
    assert_eq!(done.status.code(), Some(125), "{done:?}");
    assert!(done.out.is_empty() && done.err.contains("127.0.0.1:1"), "{done:?}");
}

#[test]
fn a_demo_whose_lender_is_full_says_it_once() {
    if !can_run("a_demo_whose_lender_is_full_says_it_once", &[]) {
        return;
    }
    let folder = Folder::new("demo-full");
    let lender = Lender::named(&folder, "small", "16M");
    let done = finish(netvm().args(["demo", "--local", "4M", "--data", "32M", "--lender", &lender.address]));
    assert!(done.status.code() == Some(125) && done.err.contains("is full"), "{done:?}");
    assert_eq!(done.err.lines().count(), 1, "{}", done.err);
}

#[test]
fn a_demo_ends_by_the_signal_that_ends_it() {
    if !can_run("a_demo_ends_by_the_signal_that_ends_it", &[]) {
        return;
    }
    let mut command = netvm();
    command.args(["demo", "--local", "8M", "--data", "64M"]).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut demo = command.spawn().unwrap();
    // The second half, when there is a run.
    common::until("the second half has not begun", || {
        let pid = demo.id().to_string();
        !finish(netvm().args(["top", "--json", "--interval", "0.05", "--pid", &pid])).out.is_empty()
    });
    common::signal(demo.id(), "TERM");
    let mut said = String::new();
    demo.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    let status = demo.wait().unwrap();
    assert_eq!((std::os::unix::process::ExitStatusExt::signal(&status), said.as_str()), (Some(15), ""));
}

/// As schedulers of jobs send them.
#[test]
fn signals_that_mean_what_a_program_wants_are_handed_on() {
    if !can_run("signals_that_mean_what_a_program_wants_are_handed_on", &["/bin/bash"]) {
        return;
    }
    let script = "trap 'echo one' USR1; trap 'echo two' USR2; trap 'echo time' XCPU; trap 'echo real; exit 7' RTMIN+3\n\
        echo ready; while :; do sleep 0.02; done";
    let mut command = netvm();
    command.args(["run", "--local", "8M", "--", "/bin/bash", "-c", script]);
    let mut run = Guard(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut said = BufReader::new(run.0.stdout.take().unwrap()).lines();
    let mut line = || said.next().unwrap().unwrap();
    assert_eq!(line(), "ready");
    for (signal, word) in [("USR1", "one"), ("USR2", "two"), ("XCPU", "time"), ("RTMIN+3", "real")] {
        common::signal(run.0.id(), signal);
        assert_eq!(line(), word);
    }
    assert_eq!(wait(&mut run.0, common::PATIENCE).unwrap().code(), Some(7));
}

#[test]
fn a_limit_of_the_size_of_files_is_named() {
    let limited = |blocks: &str| {
        let mut command = Command::new("sh");
        command.args([
            "-c",
            &format!("ulimit -f {blocks}; exec \"$0\" run --local 8M --lend-size 64M -- echo started"),
        ]);
        finish(command.arg(env!("CARGO_BIN_EXE_netvm")))
    };
    for blocks in ["0", "1000"] {
        let done = limited(blocks);
        assert_eq!(done.status.code(), Some(125), "{done:?}");
        assert!(done.err.contains("ulimit -f") && done.out().is_empty(), "{}", done.err);
    }
}
