//! Programs whose lender is on another network, and has its kernel answer their reads: docs/design/datagrams.md.

mod common;

use common::{Folder, Guard, Lender, can_run, finish, netvm, until};
use serde_json::Value;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

const PYTHON: &str = "/usr/bin/python3";

/// Memory that is read at random by it and two children, who each change a third of it and see nothing of the other's.
const WORK: &str = "\
import mmap, os, random, sys
pages = (40 << 20) >> 12
held = mmap.mmap(-1, pages << 12, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
noise = random.Random(5).randbytes(8192)
def content(page, by):
    at = (page * 37 + by * 11) % 4096
    return noise[at:at + 4088] + (page * 4 + by).to_bytes(8, 'little')
def put(page, by): held[page << 12:(page + 1) << 12] = content(page, by)
def check(owners, seed):
    order = random.Random(seed)
    for _ in range(12000):
        page = order.randrange(pages)
        if held[page << 12:(page + 1) << 12] != content(page, owners[page % 3]):
            print('WRONG', page, owners, flush=True)
            os._exit(3)
for page in range(pages): put(page, 3)
check([3, 3, 3], 1)
children = []
for by in (1, 2):
    child = os.fork()
    if child == 0:
        for page in range(by, pages, 3): put(page, by)
        owners = [3, 3, 3]
        owners[by] = by
        check(owners, by)
        os._exit(0)
    children.append(child)
for page in range(0, pages, 3): put(page, 0)
check([0, 3, 3], 9)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)
";

/// Two networks with a link between them, as long as this lives.
struct Networks {
    names: [String; 2],
}

impl Networks {
    /// `None` where there can be none, having said so.
    fn new(test: &str, packet_bytes_max: &str) -> Option<Self> {
        // Tests of this process run at once.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let names = ["a", "b"].map(|side| format!("netvm-{}-{count}-{side}", std::process::id()));
        let [a, b] = &names;
        let ip =
            |args: &[&str]| Command::new("ip").args(args).output().is_ok_and(|done| done.status.success());
        let made = ip(&["netns", "add", a]) && {
            let networks = Self { names: names.clone() };
            let veth = ["link", "add", "va", "netns", a, "mtu", packet_bytes_max, "type", "veth"];
            let peer = ["peer", "name", "vb", "netns", b, "mtu", packet_bytes_max];
            let all = ip(&["netns", "add", b])
                && ip(&[&veth[..], &peer[..]].concat())
                && [(a, "va", "1"), (b, "vb", "2")].into_iter().all(|(name, link, host)| {
                    let (v4, v6) = (format!("10.77.0.{host}/24"), format!("fd77::{host}/64"));
                    ip(&["-n", name, "addr", "add", &v4, "dev", link])
                        && ip(&["-n", name, "addr", "add", &v6, "dev", link, "nodad"])
                        && ip(&["-n", name, "link", "set", "lo", "up"])
                        && ip(&["-n", name, "link", "set", link, "up"])
                });
            if all {
                return Some(networks);
            }
            all
        };
        assert!(!made);
        let _ =
            writeln!(std::io::stderr(), "{test}: skipped (no network name spaces with links, or no `ip`)");
        None
    }

    /// `netvm` there.
    fn netvm(&self, side: usize) -> Command {
        let inner = netvm();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[side]]).arg(inner.get_program()).args(inner.get_args());
        for (name, value) in inner.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    fn lend(&self, address: &str, more: &[&str]) -> Guard {
        let mut command = self.netvm(0);
        command.args(["lend", "--size", "512M", "--insecure", "--listen", address]).args(more);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).expect("the lender did not start");
        Guard(child)
    }

    fn status(&self, address: &str) -> Value {
        let done = finish(self.netvm(1).args(["status", address, "--json"])).must_succeed();
        serde_json::from_str(&done.out()).unwrap()
    }
}

impl Drop for Networks {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

/// Whether lenders of this user have their kernel answer.
fn by_kernel(test: &str) -> bool {
    let probed = netvm::lender::probe_kernel_reads();
    if let Err(error) = &probed {
        let _ = writeln!(std::io::stderr(), "{test}: skipped ({error})");
    }
    probed.is_ok()
}

/// The same where threads serve their own faults.
fn in_thread(test: &str) -> bool {
    let has = netvm_sys::uffd::can_move();
    if !has {
        let _ = writeln!(std::io::stderr(), "{test}: skipped (in-thread faults need Linux 6.8)");
    }
    has && by_kernel(test)
}

#[test]
fn programs_read_by_the_kernel_of_another_network() {
    const TEST: &str = "programs_read_by_the_kernel_of_another_network";
    if !by_kernel(TEST) || !can_run(TEST, &[PYTHON]) {
        return;
    }
    // Ethernet, jumbo frames, and less than a part of a page has room in.
    for (packet_bytes_max, address, options) in [
        ("1500", "10.77.0.1:7070", &[][..]),
        ("1500", "[fd77::1]:7070", &["--encrypt-pages"]),
        ("9000", "10.77.0.1:7070", &["--fault-path", "same-cpu"]),
        ("9000", "[fd77::1]:7070", &[]),
        ("1400", "10.77.0.1:7070", &[]),
    ] {
        let Some(networks) = Networks::new(TEST, packet_bytes_max) else { return };
        let lender = networks.lend(address, &[]);
        let mut run = networks.netvm(1);
        run.args(["run", "--local", "8M", "--tier", "lender", "--json", "--lender", address]).args(options);
        let done = finish(run.args(["--", PYTHON, "-c", WORK])).must_succeed();
        assert_eq!(done.out(), "[0, 0]\n", "{packet_bytes_max} {address}: {}", done.err);
        let summary = done.summary();
        let count = |name: &str| summary[name].as_u64().unwrap_or_else(|| panic!("no {name} in {summary}"));
        assert_eq!((count("wrong_pages"), count("wrong_datagrams")), (0, 0), "{summary}");
        let status = networks.status(address);
        let answered = status["kernel_reads"].as_u64().unwrap();
        let (faults, given_up) = (count("faults"), count("datagrams_given_up"));
        println!(
            "{packet_bytes_max} {address} {options:?}: {answered} by the kernel, {given_up} given up of {faults}"
        );
        // About a third of all faults reads a page at random.
        assert_eq!(answered > faults / 8, packet_bytes_max != "1400", "{status}\n{summary}");
        assert!(given_up <= faults / 10, "{summary}");
        until("all of it is free again", || networks.status(address)["used_bytes"] == 0);
        until("the kernel has none of it", || networks.status(address)["resident_bytes"] == 0);
        drop(lender);
    }
}

/// Three at once, and one that writes, each waiting for its own answers; every word is checked.
#[test]
fn threads_that_serve_their_own_faults_read_by_the_kernel_of_another_network() {
    const TEST: &str = "threads_that_serve_their_own_faults_read_by_the_kernel_of_another_network";
    if !in_thread(TEST) {
        return;
    }
    const CASES: [&str; 5] =
        ["fill", "random-read-threads", "random-rmw", "random-read-threads", "random-read"];
    for (packet_bytes_max, address) in [("1500", "10.77.0.1:7070"), ("9000", "[fd77::1]:7070")] {
        let Some(networks) = Networks::new(TEST, packet_bytes_max) else { return };
        let lender = networks.lend(address, &[]);
        let mut worker = networks.netvm(1);
        worker.args([
            "bench",
            "worker",
            "--lender",
            address,
            "--link",
            "datagrams",
            "--fault-path",
            "in-thread",
        ]);
        worker.args(["--local-bytes", "8388608", "--size-bytes", "33554432", "--case-ms", "700"]);
        let mut worker =
            worker.args(["--threads", "3"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut stdin = worker.stdin.take().unwrap();
        stdin.write_all(CASES.map(|case| format!("{case}\n")).concat().as_bytes()).unwrap();
        drop(stdin);
        let out = worker.wait_with_output().unwrap();
        let outcomes: Vec<Value> = String::from_utf8(out.stdout)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert!(out.status.success() && outcomes.len() == CASES.len(), "{outcomes:?}");
        for (case, outcome) in CASES.iter().zip(&outcomes) {
            assert!(
                outcome["error"] == "" && (*case == "fill" || outcome["per_s"].as_f64() > Some(100.0)),
                "{case}: {outcome}"
            );
        }
        let answered = networks.status(address)["kernel_reads"].as_u64().unwrap();
        println!("{packet_bytes_max}: {answered} by the kernel, {outcomes:?}");
        assert!(answered > 2000, "{packet_bytes_max}: {answered} {outcomes:?}");
        until("all of it is free again", || networks.status(address)["used_bytes"] == 0);
        drop(lender);
    }
}

/// The link is cut, or the lender killed or stopped, while its kernel answers: a second copy is enough, and without one the program ends with a sentence.
#[test]
fn a_lender_is_lost_while_its_kernel_answers() {
    const TEST: &str = "a_lender_is_lost_while_its_kernel_answers";
    if !by_kernel(TEST) || !can_run(TEST, &[PYTHON]) {
        return;
    }
    let address = "10.77.0.1:7070";
    for (trouble, replicas) in [("cut", 2), ("KILL", 2), ("STOP", 2), ("KILL", 1), ("cut", 1)] {
        let Some(networks) = Networks::new(TEST, "9000") else { return };
        let folder = Folder::new("lost");
        let far = networks.lend(address, &[]);
        // Whatever network they are in, they meet in a folder.
        let near = Lender::start(&folder, "256M");
        let mut run = networks.netvm(1);
        run.args(["run", "--local", "8M", "--tier", "lender", "--json", "--lender", address]);
        if replicas == 2 {
            run.args(["--replicas", "2", "--lender", &near.address]);
        }
        let run = std::thread::spawn(move || finish(run.args(["--", PYTHON, "-c", WORK])));
        until("the kernel answers", || networks.status(address)["kernel_reads"].as_u64() > Some(1500));
        match trouble {
            "cut" => {
                let cut = ["-n", &networks.names[1], "link", "set", "vb", "down"];
                assert!(Command::new("ip").args(cut).status().unwrap().success());
            }
            signal => {
                // What `ip` has started has its process.
                let kill = ["-s", signal, &far.0.id().to_string()];
                assert!(Command::new("kill").args(kill).status().unwrap().success());
            }
        }
        let done = run.join().unwrap();
        if replicas == 2 {
            let done = done.must_succeed();
            assert_eq!(done.out(), "[0, 0]\n", "{trouble}: {}", done.err);
            println!("{trouble}: {}", done.summary()["lost"]);
        } else {
            assert!(!done.out().contains("WRONG") && !done.status.success(), "{trouble}: {}", done.err);
            assert!(done.err.contains(address), "{trouble}: {}", done.err);
        }
    }
}

/// The same, of threads that wait for their answers by themselves; every word is checked.
#[test]
fn a_lender_is_lost_while_threads_wait_for_its_kernel() {
    const TEST: &str = "a_lender_is_lost_while_threads_wait_for_its_kernel";
    if !in_thread(TEST) {
        return;
    }
    let address = "10.77.0.1:7070";
    for (trouble, replicas) in [("cut", 2), ("KILL", 2), ("STOP", 2), ("KILL", 1), ("cut", 1)] {
        let Some(networks) = Networks::new(TEST, "9000") else { return };
        // The other copy is over there, too.
        let (far, other) = (networks.lend(address, &[]), networks.lend("[fd77::1]:7071", &[]));
        let mut worker = networks.netvm(1);
        worker.args(["bench", "worker", "--lender", address, "--link", "datagrams"]);
        if replicas == 2 {
            worker.args(["--replicas", "2", "--lender", "[fd77::1]:7071"]);
        }
        worker.args(["--fault-path", "in-thread", "--threads", "3", "--case-ms", "5000"]);
        worker.args(["--local-bytes", "8388608", "--size-bytes", "33554432"]);
        worker.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut worker = worker.spawn().unwrap();
        worker.stdin.take().unwrap().write_all(b"fill\nrandom-read-threads\n").unwrap();
        until("the kernel answers", || networks.status(address)["kernel_reads"].as_u64() > Some(5000));
        match trouble {
            "cut" => {
                // Only what goes there: the other copy stays.
                let drop = ["-n", &networks.names[1], "route", "add", "blackhole", "10.77.0.1/32"];
                assert!(Command::new("ip").args(drop).status().unwrap().success());
            }
            signal => {
                let kill = ["-s", signal, &far.0.id().to_string()];
                assert!(Command::new("kill").args(kill).status().unwrap().success());
            }
        }
        let done = worker.wait_with_output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        println!("{trouble} {replicas}: {out}{err}");
        assert!(!out.contains("wrong data") && !err.contains("panicked"), "{trouble}: {out}{err}");
        if replicas == 2 {
            let last: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
            assert!(done.status.success() && last["error"] == "", "{trouble}: {out}{err}");
        } else {
            assert!(!done.status.success() && err.contains(address), "{trouble}: {out}{err}");
        }
        drop(other);
    }
}

/// A lender that may have few descriptors lets others in, whatever its kernel has.
#[test]
fn units_leave_descriptors_for_others() {
    const TEST: &str = "units_leave_descriptors_for_others";
    if !by_kernel(TEST) || !can_run(TEST, &[PYTHON, "/usr/bin/prlimit"]) {
        return;
    }
    let inner = netvm();
    let mut command = Command::new("/usr/bin/prlimit");
    command.args(["--nofile=48", "--"]).arg(inner.get_program()).args(inner.get_args());
    let any = "127.0.0.1:0";
    let lender =
        Lender::by(command.args(["lend", "--size", "256M", "--listen", any]).stderr(Stdio::null()), any);
    let address = lender.address.as_str();
    for tier in ["lender", "auto"] {
        let mut run = netvm();
        run.args(["run", "--local", "8M", "--tier", tier, "--json", "--lender", address]);
        let done = finish(run.args(["--", PYTHON, "-c", WORK]).env("NETVM_LINK", "datagrams")).must_succeed();
        assert_eq!(done.out(), "[0, 0]\n", "{}", done.err);
    }
    let status = finish(netvm().args(["status", address, "--json"])).must_succeed();
    let status: Value = serde_json::from_str(&status.out()).unwrap();
    assert!(status["kernel_reads"].as_u64().unwrap() > 1000, "{status}");
}

/// Who does not want it has none of it, on either side.
#[test]
fn either_side_can_do_without() {
    const TEST: &str = "either_side_can_do_without";
    if !can_run(TEST, &[PYTHON]) {
        return;
    }
    let off = Lender::listening_with("127.0.0.1:0", "256M", &["--kernel-reads", "off"]);
    let on = Lender::listening_with("127.0.0.1:0", "256M", &[]);
    if !by_kernel(TEST) {
        return;
    }
    for (lender, link) in [(&off, "datagrams"), (&on, "socket")] {
        let mut run = netvm();
        run.args(["run", "--local", "8M", "--json", "--lender", &lender.address]);
        let done = finish(run.args(["--", PYTHON, "-c", WORK]).env("NETVM_LINK", link)).must_succeed();
        assert_eq!(done.out(), "[0, 0]\n", "{}", done.err);
        let status = finish(netvm().args(["status", &lender.address, "--json"])).must_succeed();
        let status: Value = serde_json::from_str(&status.out()).unwrap();
        assert_eq!(status["kernel_reads"], 0, "{status}");
    }
}
