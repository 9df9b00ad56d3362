//! `netvm swap`: programs in a memory cgroup, on swap that is lent.

mod common;

use common::{Folder, Guard, Lender, finish, has, netvm, signal, until};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

const PYTHON: &str = "/usr/bin/python3";
const LIMIT: u64 = 32 << 20;
/// Twice the limit.
const PAGES: u64 = 2 * LIMIT / 4096;

/// One at a time: the machine has one list of swaps.
static MACHINE: Mutex<()> = Mutex::new(());

/// Whether swap can be changed here. Says why not, past the capture of the test harness.
fn can_swap(test: &str) -> Option<MutexGuard<'static, ()>> {
    if !has(test, &[PYTHON, "/dev/fuse", "/dev/loop-control"]) {
        return None;
    }
    let reason = match (fs::metadata("/proc/self").unwrap().uid(), memory_cgroup()) {
        (1.., _) => "not root",
        (_, None) => "no memory cgroup",
        // A container may have the devices and still not the rights.
        _ if !has_capability(CAP_SYS_ADMIN) => "no CAP_SYS_ADMIN",
        _ => return Some(MACHINE.lock().unwrap_or_else(PoisonError::into_inner)),
    };
    let _ = writeln!(std::io::stderr(), "{test}: skipped ({reason})");
    None
}

const CAP_SYS_ADMIN: u32 = 21;
const CAP_SYS_RESOURCE: u32 = 24;

fn has_capability(number: u32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(effective.trim(), 16).unwrap() >> number & 1 == 1
}

/// Where groups are made, and the name of the file with the limit.
fn memory_cgroup() -> Option<(PathBuf, &'static str)> {
    let one = Path::new("/sys/fs/cgroup/memory");
    if one.join("memory.limit_in_bytes").exists() {
        return Some((one.to_owned(), "memory.limit_in_bytes"));
    }
    let two = Path::new("/sys/fs/cgroup");
    let controllers = fs::read_to_string(two.join("cgroup.subtree_control")).unwrap_or_default();
    controllers.split_whitespace().any(|name| name == "memory").then(|| (two.to_owned(), "memory.max"))
}

struct Cgroup {
    folder: PathBuf,
    limit: &'static str,
}

impl Cgroup {
    fn new(bytes: u64) -> Self {
        let (root, limit) = memory_cgroup().unwrap();
        let folder = root.join(format!("netvm-test-swap-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let group = Self { folder, limit };
        group.set_limit(bytes);
        group
    }

    fn set_limit(&self, bytes: u64) {
        fs::write(self.folder.join(self.limit), bytes.to_string()).unwrap();
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that has just ended may still be leaving it.
        for _ in 0..200 {
            if fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

/// A program that fills its memory, and checks it when it is told to.
struct Program {
    process: Guard,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    // Last: it can be removed when nobody is in it.
    group: Cgroup,
}

impl Program {
    fn start() -> Self {
        const SCRIPT: &str = "
import mmap, sys
n = int(sys.argv[1])
m = mmap.mmap(-1, n * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
def page(i, turn): return ((i * 2654435761 + turn) % 2**64).to_bytes(8, 'little') * 512
for i in range(n): m[i * 4096:(i + 1) * 4096] = page(i, 0)
print('filled', flush=True)
for turn, line in enumerate(sys.stdin):
    bad = 0
    for i in range(n):
        bad += m[i * 4096:(i + 1) * 4096] != page(i, turn)
        m[i * 4096:(i + 1) * 4096] = page(i, turn + 1)
    print('bad', bad, flush=True)
";
        let group = Cgroup::new(LIMIT);
        let mut child: Child = Command::new("/bin/sh")
            .args(["-c", "echo $$ > \"$1\" && exec \"$2\" -c \"$3\" \"$4\"", "sh"])
            .arg(group.folder.join("cgroup.procs"))
            .args([PYTHON, SCRIPT, &PAGES.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut program = Self { process: Guard(child), input, output, group };
        assert_eq!(program.line(), "filled\n");
        program
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line
    }

    /// Reads every page, compares it, and writes another content.
    #[track_caller]
    fn check(&mut self) {
        self.input.write_all(b"\n").unwrap();
        let said = self.line();
        assert_eq!(said, "bad 0\n", "{:?}", self.process.0.try_wait());
    }
}

/// `netvm swap on` with these lenders, and its state.
struct Swap {
    state: Value,
}

impl Swap {
    fn on(size: &str, lenders: &[&Lender], more: &[&str]) -> Self {
        let mut command = netvm();
        command.args(["swap", "on", "--size", size]).args(more);
        for lender in lenders {
            command.args(["--lender", &lender.address]);
        }
        let said = finish(&mut command).must_succeed().out();
        assert!(said.starts_with("netvm: swap "), "{said}");
        let number: u64 = said["netvm: swap ".len()..].split(':').next().unwrap().parse().unwrap();
        Self { state: find(number).expect("it is not in `swap status`") }
    }

    fn number(&self) -> u64 {
        self.state["number"].as_u64().unwrap()
    }

    fn now(&self) -> Value {
        find(self.number()).unwrap()
    }

    fn server(&self) -> u32 {
        self.state["server"]["pid"].as_u64().unwrap() as u32
    }

    /// Ends it, and looks whether all is as it was.
    fn off(self) {
        finish(netvm().args(["swap", "off", &self.number().to_string()])).must_succeed();
        self.assert_gone();
    }

    fn assert_gone(&self) {
        assert!(find(self.number()).is_none());
        let prefix = format!("swap-{}.", self.number());
        assert_eq!(files_with(&prefix), Vec::<String>::new());
        assert!(!fs::read_to_string("/proc/self/mounts").unwrap().contains(&format!("/run/netvm/{prefix}")));
        let device = self.state["device"].as_str().unwrap();
        assert!(!fs::read_to_string("/proc/swaps").unwrap().contains(device));
        let backing = format!("/sys/block/{}/loop/backing_file", device.trim_start_matches("/dev/"));
        assert!(!fs::read_to_string(backing).unwrap_or_default().contains(&prefix));
        assert!(is_gone(self.server()));
    }
}

impl Drop for Swap {
    /// A failed test leaves no swap behind.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = netvm().args(["swap", "off", &self.number().to_string()]).status();
        }
    }
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
fn a_program_of_twice_the_memory() {
    let Some(_turn) = can_swap("a_program_of_twice_the_memory") else { return };
    let (_folder, lender) = lender("256M");
    let swap = Swap::on("160M", &[&lender], &["--priority", "100"]);
    assert_eq!(swap.state["priority"], 100);
    assert_eq!((&swap.state["state"], &swap.state["extents_lost"]), (&"in use".into(), &0.into()));
    let spared = fs::read_to_string(format!("/proc/{}/oom_score_adj", swap.server())).unwrap() == "-1000\n";
    assert_eq!(spared, has_capability(CAP_SYS_RESOURCE));
    // What cannot be done is told.
    let warnings = swap.state["warnings"].as_array().unwrap();
    assert_eq!(warnings.iter().any(|text| text.as_str().unwrap().contains("oom_score_adj")), !spared);

    let mut program = Program::start();
    let used = swap.now()["used_bytes"].as_u64().unwrap();
    assert!(used >= LIMIT, "{used} bytes are on the swap");
    program.check();
    // What one round wrote is what the next one finds.
    program.check();
    let text = finish(netvm().args(["swap", "status"])).must_succeed().out();
    assert!(text.contains("priority 100") && text.contains("server     "), "{text}");
    // All of it comes back, and nothing of it is lost.
    program.group.set_limit(8 * LIMIT);
    swap.off();
    program.check();
    until("the lender has everything back", || lender.used_bytes() == 0);
}

#[test]
fn a_lost_lender_of_two() {
    let Some(_turn) = can_swap("a_lost_lender_of_two") else { return };
    let ((_one, mut first), (_two, second)) = (lender("256M"), lender("256M"));
    let swap = Swap::on("160M", &[&first, &second], &["--replicas", "2"]);
    let mut program = Program::start();
    first.process.0.kill().unwrap();
    program.check();
    program.check();
    let now = swap.now();
    assert_eq!((&now["state"], &now["extents_lost"]), (&"in use".into(), &0.into()));
    assert!(now["lenders"][0]["lost"].is_string() && now["lenders"][1]["lost"].is_null(), "{now}");
    program.group.set_limit(8 * LIMIT);
    swap.off();
    program.check();
}

#[test]
fn the_only_lender_lost() {
    let Some(_turn) = can_swap("the_only_lender_lost") else { return };
    let (_folder, mut lender) = lender("256M");
    let swap = Swap::on("160M", &[&lender], &[]);
    let mut program = Program::start();
    lender.process.0.kill().unwrap();
    // It never sees wrong bytes: it ends at the first page that is gone.
    program.input.write_all(b"\n").unwrap();
    assert_eq!(program.line(), "");
    assert!(!program.process.0.wait().unwrap().success());
    let done = finish(netvm().args(["swap", "status"]));
    assert_eq!(done.status.code(), Some(1), "{}", done.out());
    assert!(done.out().contains("pages lost") && done.out().contains("lost: "), "{}", done.out());
    swap.off();
}

#[test]
fn a_dead_server_is_told() {
    let Some(_turn) = can_swap("a_dead_server_is_told") else { return };
    let (_folder, lender) = lender("64M");
    let swap = Swap::on("32M", &[&lender], &[]);
    // Those who end it politely do not know whose memory it has.
    signal(swap.server(), "TERM");
    assert_eq!(swap.now()["state"], "in use");
    signal(swap.server(), "KILL");
    until("the server has ended", || is_gone(swap.server()));
    let done = finish(netvm().args(["swap", "status"]));
    assert_eq!(done.status.code(), Some(1));
    assert!(done.out().contains("server dead"), "{}", done.out());
    assert_eq!(swap.now()["server"]["alive"], false);
    swap.off();
}

#[test]
fn several_and_by_hand() {
    let Some(_turn) = can_swap("several_and_by_hand") else { return };
    let (_folder, lender) = lender("128M");
    let (first, second) = (Swap::on("32M", &[&lender], &[]), Swap::on("16M", &[&lender], &[]));
    assert_ne!(first.number(), second.number());
    // Somebody uses the system's tool.
    finish(Command::new("/usr/sbin/swapoff").arg(second.state["device"].as_str().unwrap())).must_succeed();
    assert_eq!(second.now()["state"], "not in use");
    assert_eq!(first.now()["state"], "in use");
    finish(netvm().args(["swap", "off"])).must_succeed();
    first.assert_gone();
    second.assert_gone();
    let again = finish(netvm().args(["swap", "off"]));
    assert!(!again.status.success() && again.err.contains("there is no swap"), "{}", again.err);
}

#[test]
fn nothing_is_left_of_a_failure() {
    let Some(_turn) = can_swap("nothing_is_left_of_a_failure") else { return };
    let (_folder, lender) = lender("64M");
    let before = (files_with("swap-"), fs::read_to_string("/proc/swaps").unwrap());
    let is_clean = |what: &str| {
        assert_eq!((files_with("swap-"), fs::read_to_string("/proc/swaps").unwrap()), before, "{what}");
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
        command.args(["swap", "on", "--size", size, "--lender", address]).args(more);
        let done = finish(&mut command);
        assert!(!done.status.success() && done.err.contains(reason), "{reason}: {}", done.err);
        is_clean(reason);
    }
    // The loop device cannot be had, when the file is there already.
    let script = "mount --bind /dev/null /dev/loop-control && exec \"$0\" swap on --size 32M --lender \"$1\"";
    let mut command = Command::new("/usr/bin/unshare");
    command.args(["--mount", "/bin/sh", "-c", script, env!("CARGO_BIN_EXE_netvm"), address]);
    let done = finish(&mut command);
    assert!(!done.status.success() && done.err.contains("on a loop device"), "{}", done.err);
    is_clean("loop device");
}

#[test]
fn what_is_left_or_unreadable_hides_nothing() {
    let Some(_turn) = can_swap("what_is_left_or_unreadable_hides_nothing") else { return };
    let (folder, lender) = lender("64M");
    let swap = Swap::on("32M", &[&lender], &[]);
    // Somebody who listens and never answers: the server waits for it when both are killed.
    let silent = folder.path("silent");
    let _listener = std::os::unix::net::UnixListener::bind(&silent).unwrap();
    let before = files_with("swap-");
    let mut command = netvm();
    command.args(["swap", "on", "--size", "32M", "--lender", &format!("unix:{}", silent.display())]);
    let mut on = Guard(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    until("a number is taken", || files_with("swap-").len() > before.len());
    let left = files_with("swap-").into_iter().find(|name| !before.contains(name)).unwrap();
    until("its server has started", || !children(on.0.id()).is_empty());
    let server = children(on.0.id())[0];
    signal(on.0.id(), "STOP");
    signal(server, "STOP");
    // A number that somebody works on is nobody else's.
    let other = Swap::on("16M", &[&lender], &[]);
    assert!(
        files_with("swap-").contains(&left) && !left.contains(&format!("-{}.", other.number())),
        "{left}"
    );
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
    assert!(done.err.contains(&broken) && done.out().contains("in use"), "{}\n{}", done.out(), done.err);
    assert_eq!(swap.now()["state"], "in use");
    let number = left.trim_start_matches("swap-").trim_end_matches(".file");
    assert_eq!(find(number.parse().unwrap()).unwrap()["state"], "unreadable");
    finish(netvm().args(["swap", "off", number])).must_succeed();
    assert!(!files_with("swap-").iter().any(|name| name.starts_with(&format!("swap-{number}."))));

    // An empty file that nobody has goes with the next call.
    fs::write(format!("/run/netvm/{left}"), "").unwrap();
    other.off();
    swap.off();
    assert_eq!(files_with("swap-"), Vec::<String>::new());
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
