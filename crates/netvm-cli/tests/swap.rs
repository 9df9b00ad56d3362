//! `netvm swap`, as far as no swap is turned on: what is refused, and what is left over. The rest needs a machine of its own
//! (guest/tests/swap.sh): with a lender on this one the kernel may swap the lender's memory to the lender itself.

mod common;

use common::{Folder, Guard, Lender, finish, has, netvm, signal, until};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One at a time: the machine has one list of swaps.
static MACHINE: Mutex<()> = Mutex::new(());

/// Whether a swap can be made here, up to the last step. Says why not, past the capture of the test harness.
fn can_swap(test: &str) -> Option<MutexGuard<'static, ()>> {
    if !has(test, &["/dev/fuse", "/dev/loop-control"]) {
        return None;
    }
    let reason = match fs::metadata("/proc/self").unwrap().uid() {
        1.. => "not root",
        // A container may have the devices and still not the rights.
        _ if !has_capability(CAP_SYS_ADMIN) => "no CAP_SYS_ADMIN",
        _ => return Some(MACHINE.lock().unwrap_or_else(PoisonError::into_inner)),
    };
    let _ = writeln!(std::io::stderr(), "{test}: skipped ({reason})");
    None
}

const CAP_SYS_ADMIN: u32 = 21;

fn has_capability(number: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(effective.trim(), 16).unwrap() >> number & 1 == 1
}

fn is_gone(pid: u32) -> bool {
    // Nobody of ours waits for it.
    fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
}

fn files_with(prefix: &str) -> Vec<String> {
    let entries = fs::read_dir("/run/netvm").into_iter().flatten();
    let names = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names.filter(|name| name.starts_with(prefix)).collect()
}

fn find(number: u64) -> Option<Value> {
    let done = finish(netvm().args(["swap", "status", "--json"]));
    let all: Value = serde_json::from_slice(&done.out).unwrap_or_else(|_| panic!("{}", done.err));
    all["swaps"].as_array().unwrap().iter().find(|swap| swap["number"] == number).cloned()
}

fn lender(size: &str) -> (Folder, Lender) {
    let folder = Folder::new("swap-lender");
    let lender = Lender::start(&folder, size);
    (folder, lender)
}

#[test]
fn nothing_is_left_of_a_failure() {
    let Some(_turn) = can_swap("nothing_is_left_of_a_failure") else { return };
    let (_folder, lender) = lender("64M");
    // Not how much of them is used.
    let swaps = || {
        let swaps = fs::read_to_string("/proc/swaps").unwrap();
        swaps.lines().filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect::<Vec<_>>()
    };
    let before = (files_with("swap-"), swaps());
    let is_clean = |what: &str| {
        assert_eq!((files_with("swap-"), swaps()), before, "{what}");
        assert!(!fs::read_to_string("/proc/self/mounts").unwrap().contains("/run/netvm/swap-"), "{what}");
        until("the lender has everything back", || lender.used_bytes() == 0);
        assert_eq!(lender.status()["borrowers"].as_array().unwrap().len(), 0, "{what}");
    };
    let address = lender.address.as_str();
    for (size, address, more, reason) in [
        ("0", address, &[][..], "too little for swap"),
        ("32M", address, &["--priority", "40000"], "40000"),
        ("32M", "unix:/nowhere/at/all", &[], "/nowhere/at/all"),
        ("32M", address, &["--replicas", "2"], "replicas"),
        ("1G", address, &[], "too little memory"),
        ("32M", address, &["--secret", "/nowhere/key"], "/nowhere/key"),
    ] {
        let mut command = netvm();
        command.args(["swap", "on", "--size", size, "--lender", address, "--lender-here"]).args(more);
        let done = finish(&mut command);
        assert!(!done.status.success() && done.err.contains(reason), "{reason}: {}", done.err);
        is_clean(reason);
    }
    // Lenders on this machine have to be asked for.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for address in [address, &listener.local_addr().unwrap().to_string()] {
        let done = finish(netvm().args(["swap", "on", "--size", "32M", "--lender", address]));
        assert!(!done.status.success() && done.err.contains("is on this machine"), "{}", done.err);
        is_clean("lender here");
    }
    // The loop device cannot be had, when the file is there already.
    let script = "mount --bind /dev/null /dev/loop-control && exec \"$0\" swap on --by loop --size 32M --lender-here --lender \"$1\"";
    let mut command = Command::new("/usr/bin/unshare");
    command.args(["--mount", "/bin/sh", "-c", script, env!("CARGO_BIN_EXE_netvm"), address]);
    let done = finish(&mut command);
    assert!(!done.status.success() && done.err.contains("on a loop device"), "{}", done.err);
    is_clean("loop device");
}

#[test]
fn what_is_left_or_unreadable_hides_nothing() {
    let Some(_turn) = can_swap("what_is_left_or_unreadable_hides_nothing") else { return };
    let folder = Folder::new("swap-left");
    // Somebody who listens and never answers: the server waits for it when both are killed.
    let silent = folder.path("silent");
    let _listener = std::os::unix::net::UnixListener::bind(&silent).unwrap();
    let before = files_with("swap-");
    let mut command = netvm();
    let address = format!("unix:{}", silent.display());
    command.args(["swap", "on", "--size", "32M", "--lender-here", "--lender", &address]);
    let mut on = Guard(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    until("a number is taken", || files_with("swap-").len() > before.len());
    let left = files_with("swap-").into_iter().find(|name| !before.contains(name)).unwrap();
    until("its server has started", || !children(on.0.id()).is_empty());
    let server = children(on.0.id())[0];
    signal(on.0.id(), "STOP");
    signal(server, "STOP");
    // A number that somebody works on is nobody else's.
    let again = finish(netvm().args(["swap", "off"]));
    assert!(!again.status.success() && again.err.contains("there is no swap"), "{}", again.err);
    assert!(files_with("swap-").contains(&left), "{left}");
    signal(server, "KILL");
    on.0.kill().unwrap();
    on.0.wait().unwrap();
    until("the server has ended", || is_gone(server));
    assert!(files_with("swap-").contains(&left));

    // One entry that makes no sense.
    let broken = format!("/run/netvm/{}", left.replace(".file", ".json"));
    fs::write(&broken, "{").unwrap();
    let done = finish(netvm().args(["swap", "status"]));
    assert_eq!(done.status.code(), Some(1), "{}", done.err);
    assert!(done.err.contains(&broken), "{}\n{}", done.out(), done.err);
    let number = left.trim_start_matches("swap-").trim_end_matches(".file");
    assert_eq!(find(number.parse().unwrap()).unwrap()["state"], "unreadable");
    finish(netvm().args(["swap", "off", number])).must_succeed();
    assert!(!files_with("swap-").iter().any(|name| name.starts_with(&format!("swap-{number}."))));

    // An empty file that nobody has goes with the next call.
    fs::write(format!("/run/netvm/{left}"), "").unwrap();
    let again = finish(netvm().args(["swap", "off"]));
    assert!(!again.status.success(), "{}", again.out());
    assert_eq!(files_with("swap-"), before);
}

fn children(pid: u32) -> Vec<u32> {
    let processes =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let parent = |child: &u32| {
        let stat = fs::read_to_string(format!("/proc/{child}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    processes.filter(|child| parent(child) == Some(pid)).collect()
}
