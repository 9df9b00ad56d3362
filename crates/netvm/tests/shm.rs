//! Shared memory between processes: each test has the other side in a process of its own.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use netvm::Error;
use netvm::memory::{Memory, RawRange};
use netvm::node::{ConnectOptions, KeepAlive, LinkChoice, Node, RemoteKey, Rights};
use netvm::notify::Notify;
use netvm::region::{Peer, Region};
use netvm::security::{Encryption, Secret, Security};
use netvm::sync::{Kind, Lock, LockGuard, Monitor, Semaphore, SyncError};
use netvm_sys::shared::SharedSlice;

const SOON: Option<Duration> = Some(Duration::from_secs(20));
const MIB: usize = 1 << 20;

fn security(encrypted: bool) -> Security {
    let secret = Some(Secret::from_bytes([9; 32]));
    let encryption = if encrypted { Encryption::Always } else { Encryption::IfAsked };
    Security { secret, encryption, insecure: false }
}

fn hex(key: RemoteKey) -> String {
    key.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn key(hex: &str) -> RemoteKey {
    RemoteKey::from_bytes(std::array::from_fn(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap()))
}

/// The other process: this program again, running [`other_process`].
struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    fn start(role: &str, environment: &[(&str, &str)]) -> Self {
        Self::start_as(None, role, environment)
    }

    /// As another user, if given.
    fn start_as(user: Option<u32>, role: &str, environment: &[(&str, &str)]) -> Self {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "other_process", "--ignored", "--nocapture"])
            .env("NETVM_TEST_ROLE", role)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(user) = user {
            command.uid(user).gid(user).current_dir("/");
        }
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// What it says next.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the other process has ended");
            // The test harness talks too.
            if let Some((_, said)) = line.trim_end().split_once("> ") {
                return said.to_owned();
            }
        }
    }

    fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.hear()
    }

    fn signal(&self, signal: i32) {
        // SAFETY: no pointers; a child that has not been waited for.
        #[expect(unsafe_code, reason = "kill(2) has no safe wrapper here")]
        unsafe {
            libc::kill(self.child.id() as i32, signal)
        };
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(line: &str) {
    println!("> {line}");
}

/// Not a test: the other process.
#[test]
#[ignore = "started by the tests"]
fn other_process() {
    let Ok(role) = std::env::var("NETVM_TEST_ROLE") else { return };
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    let mut next = || lines.next();
    match role.as_str() {
        "importer" => importer(&mut next),
        "exporter" => exporter(&mut next),
        _ => panic!("{role}"),
    }
}

/// Connects with `encrypted|plain|open`, imports and does as it is told.
fn importer(next: &mut dyn FnMut() -> Option<String>) {
    let first = next().unwrap();
    let words: Vec<&str> = first.split(' ').collect();
    let [address, how, link] = words[..] else { panic!("{first}") };
    let node = match how {
        "open" => Node::new(),
        how => Node::with_security(security(how == "encrypted")),
    };
    let node = node.unwrap();
    let options = ConnectOptions { link: link.parse().unwrap(), ..ConnectOptions::default() };
    let peer = node.connect_with(address, &options).unwrap();
    let mut region: Option<Region> = None;
    let mut held: Option<(Lock, Option<LockGuard>)> = None;
    while let Some(line) = next() {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            "import" => match peer.import(words[1], &key(words[2])) {
                Ok(imported) => {
                    say(imported.link());
                    region = Some(imported);
                }
                Err(error) => say(&format!("error: {error}")),
            },
            "close" => {
                region = None;
                say("closed");
            }
            "write" => {
                let region = region.as_ref().unwrap();
                region.write(number(1), &vec![number(3) as u8; number(2) as usize]).unwrap();
                say(&told(region.flush()));
            }
            "read" => {
                let mut bytes = vec![0; number(2) as usize];
                let read = region.as_ref().unwrap().read(number(1), &mut bytes);
                say(&read.map_or_else(|error| told(Err(error)), |()| bytes[0].to_string()));
            }
            "add" => {
                for _ in 0..number(2) {
                    region.as_ref().unwrap().fetch_add(number(1), 1u64).unwrap();
                }
                say("done");
            }
            "notify" => {
                let notify = Notify::Count { number: number(1) as u16 };
                region.as_ref().unwrap().write_notify(0, &[number(2) as u8; 4096], notify).unwrap();
                say("done");
            }
            "open" => {
                held = Some((Lock::open(&peer, words[1], &key(words[2])).unwrap(), None));
                say("opened");
            }
            "lock" => {
                let (lock, guard) = held.as_mut().unwrap();
                match lock.lock(SOON) {
                    Ok(ours) => {
                        *guard = Some(ours);
                        say("ours");
                    }
                    Err(error) => say(&format!("error: {error}")),
                }
            }
            "unlock" => match held.as_mut().unwrap().1.take().unwrap().release() {
                Ok(()) => say("done"),
                Err(error) => say(&format!("error: {error}")),
            },
            "hammer" => hammer(&peer, &words[1..]),
            _ => panic!("{line}"),
        }
    }
}

fn told(result: Result<(), Error>) -> String {
    result.map_or_else(|error| format!("error: {error}"), |()| "ok".to_owned())
}

/// `threads` threads write all of the segment, read it and change its words until it is taken back.
fn hammer(peer: &Peer, words: &[&str]) {
    let [name, hex, threads, piece] = words[..] else { panic!("{words:?}") };
    let (threads, piece): (u8, usize) = (threads.parse().unwrap(), piece.parse().unwrap());
    let region = peer.import(name, &key(hex)).unwrap();
    assert!(["shm", apart(may_trace())].contains(&region.link()));
    say("hammering");
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let region = &region;
            scope.spawn(move || {
                let len = region.len() as usize;
                let mut bytes = vec![thread; piece];
                let mut at = 0;
                let error = loop {
                    let result = match thread % 3 {
                        0 => region.write(at as u64, &bytes).and_then(|()| region.flush()),
                        1 => region.fetch_add(at as u64 / 8 * 8, 1u64).map(drop),
                        _ => region.read(at as u64, &mut bytes),
                    };
                    if let Err(error) = result {
                        break error;
                    }
                    at = (at + piece + 64) % (len - piece);
                };
                assert!(
                    matches!(
                        error,
                        Error::Op { .. } | Error::LenderLost { .. } | Error::OutcomeUnknown { .. }
                    ),
                    "{error}"
                );
            });
        }
    });
    say("refused");
}

/// Exports, and answers what is in its memory.
fn exporter(next: &mut dyn FnMut() -> Option<String>) {
    let node = Node::new().unwrap();
    let address = node.listen("127.0.0.1:0").unwrap();
    let private = std::env::var_os("NETVM_TEST_PRIVATE").is_some();
    let memory = if private { Node::private_memory(MIB) } else { Node::memory(MIB) }.unwrap();
    let (key, board) = node.export_notified("memory", Arc::clone(&memory), Rights::ReadWrite, 4).unwrap();
    say(&format!("{address} {}", hex(key)));
    while let Some(line) = next() {
        match line.as_str() {
            "wait" => {
                assert!(board.wait(2, SOON));
                say(&format!("{}", board.test(2)));
            }
            "lock" => say(&hex(node.export_sync("lock", Kind::Monitor { conditions: 1 }).unwrap())),
            "semaphore" => say(&hex(node.export_sync("semaphore", Kind::Semaphore { permits: 3 }).unwrap())),
            "first" => say(&memory.shared().sub(0, 1).unwrap().to_vec()[0].to_string()),
            "unexport" => say(&node.unexport("memory").unwrap().to_string()),
            "hide" => {
                // SAFETY: no pointers.
                #[expect(unsafe_code, reason = "prctl(2) has no safe wrapper here")]
                let done = unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
                say(&(done == 0).to_string());
            }
            _ => panic!("{line}"),
        }
    }
}

/// A node that listens, and what importers have to be told to find it.
struct Here {
    node: Node,
    address: String,
    how: &'static str,
}

impl Here {
    fn new(address: &str, how: &'static str) -> Self {
        let node = match how {
            "open" => Node::new(),
            how => Node::with_security(security(how == "encrypted")),
        };
        let node = node.unwrap();
        let address = node.listen(address).unwrap();
        Self { node, address, how }
    }

    fn importer(&self, link: &str) -> Other {
        let mut other = Other::start("importer", &[]);
        other.tell(&format!("{} {} {link}", self.address, self.how));
        other
    }
}

fn word(memory: SharedSlice, at: usize) -> u64 {
    let mut bytes = [0; 8];
    memory.read_into(at, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

fn unix_address() -> String {
    let name = format!("netvm-shm-{}-{:?}", std::process::id(), std::thread::current().id());
    format!("unix:{}", std::env::temp_dir().join(name.replace(['(', ')'], "")).display())
}

#[test]
fn another_process_shares_memory_whatever_it_is_connected_by() {
    for (address, how) in [
        ("127.0.0.1:0".to_owned(), "open"),
        (unix_address(), "open"),
        ("127.0.0.1:0".to_owned(), "plain"),
        ("127.0.0.1:0".to_owned(), "encrypted"),
    ] {
        let here = Here::new(&address, how);
        shares(&here, "shm", &Node::memory(4 * MIB).unwrap().into());
    }
}

fn is_root() -> bool {
    // SAFETY: no pointers.
    #[expect(unsafe_code, reason = "geteuid(2) has no safe wrapper here")]
    unsafe {
        libc::geteuid() == 0
    }
}

/// CAP_SYS_PTRACE, which root in a container may not have.
fn may_trace() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> 19 & 1 == 1
}

/// The link to memory that cannot be mapped: this host's Yama may let only ancestors reach into a process that has not the capability.
fn apart(may_trace: bool) -> &'static str {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    match scope.trim() {
        "" | "0" => "cma",
        "1" | "2" if may_trace => "cma",
        _ => "tcp",
    }
}

#[test]
fn memory_that_cannot_be_mapped_is_copied_between_the_processes() {
    let here = Here::new("127.0.0.1:0", "open");
    shares(&here, apart(may_trace()), &Node::private_memory(4 * MIB).unwrap().into());
    let whole = Memory::new(5 * MIB).unwrap();
    shares(&here, apart(may_trace()), &whole.range(4096, 4 * MIB).unwrap());
    let mut heap = vec![0u64; 4 * MIB / 8];
    // SAFETY: the vector lives until the segment has been unexported, and is not touched meanwhile.
    #[expect(unsafe_code, reason = "the program's own memory")]
    let range = unsafe { RawRange::new(heap.as_mut_ptr().cast(), 4 * MIB, true) };
    shares(&here, apart(may_trace()), &range.into());
    let here = Here::new("127.0.0.1:0", "encrypted");
    let path = std::env::temp_dir().join(format!("netvm-shm-file-{}", std::process::id()));
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file.set_len(4 * MIB as u64).unwrap();
    let memory = Memory::file(&file, Rights::ReadWrite).unwrap();
    shares(&here, apart(may_trace()), &memory);
    // What has been truncated is told as over any link, and the rest is there.
    let key = here.node.export("memory", &memory, Rights::ReadWrite).unwrap();
    let mut other = here.importer("auto");
    assert_eq!(other.ask(&format!("import memory {}", hex(key))), apart(may_trace()));
    file.set_len(8192).unwrap();
    assert!(other.ask("read 4096 8192").contains("error"));
    assert!(other.ask("write 8192 10 1").contains("error"));
    assert_eq!(other.ask("write 0 8192 4"), "ok");
    assert_eq!(other.ask("read 1 8191"), "4");
    file.set_len(4 * MIB as u64).unwrap();
    assert_eq!((other.ask("write 8192 10 6"), other.ask("read 8192 1")), ("ok".into(), "6".into()));
}

/// Everything that an importer does with 4 MiB.
fn shares(here: &Here, link: &str, memory: &Memory) {
    let add = |at: usize| {
        let added = memory.shared().with_u64(at, |word| word.fetch_add(1, Ordering::SeqCst));
        added.or_else(|| memory.shared().update(at, 8, |word| Some(word + 1))).unwrap()
    };
    let export = here.node.export_notified("memory", memory, Rights::ReadWrite, 4);
    let (key, board) = export.unwrap();
    let mut other = here.importer(if link == "shm" { "shm" } else { "auto" });
    assert_eq!(other.ask(&format!("import memory {}", hex(key))), link);
    // More than one visit, at an odd place.
    assert_eq!(other.ask(&format!("write 4097 {} 7", 3 * MIB)), "ok");
    let written = memory.shared().sub(4097, 3 * MIB).unwrap().to_vec();
    assert!(written.iter().all(|&byte| byte == 7));
    assert_eq!((word(memory.shared(), 0), word(memory.shared(), 3 * MIB + 4104)), (0, 0));
    memory.shared().fill(9);
    assert_eq!(other.ask("read 5000 2000000"), "9");
    // Both processes' CPUs on one word.
    memory.shared().fill(0);
    let times = if link == "shm" { 100_000 } else { 2000 };
    other.tell(&format!("add 64 {times}"));
    for _ in 0..times {
        add(64);
    }
    assert_eq!(other.hear(), "done");
    assert_eq!(word(memory.shared(), 64), 2 * times);
    // Asleep on the board, on its descriptor, and in a handler.
    let waiter = {
        let board = board.clone();
        std::thread::spawn(move || board.wait(1, SOON) && board.acknowledge(1))
    };
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(other.ask("notify 1 5"), "done");
    assert!(waiter.join().unwrap());
    assert_eq!(memory.shared().sub(0, 4096).unwrap().to_vec(), [5; 4096]);
    let descriptor = board.descriptor().unwrap();
    assert!(board.rearm(2..3));
    assert_eq!(other.ask("notify 2 6"), "done");
    let mut fds = [netvm_sys::thread::readable(&descriptor)];
    assert_eq!(netvm_sys::thread::poll(&mut fds, SOON).unwrap(), 1, "the descriptor was not rung");
    assert_eq!(board.test(2), 1);
    let (tell, called) = std::sync::mpsc::channel();
    board.arm(3, move |_| tell.send(()).unwrap()).unwrap();
    assert_eq!(other.ask("notify 3 8"), "done");
    called.recv_timeout(Duration::from_secs(20)).unwrap();
    // Taken back.
    assert!(here.node.unexport("memory").unwrap());
    memory.shared().fill(3);
    assert!(other.ask("write 0 10 1").contains("refused"), "written after unexport");
    assert!(other.ask("read 0 10").contains("refused"));
    assert_eq!(memory.shared().sub(0, 4096).unwrap().to_vec(), [3; 4096]);
}

#[test]
fn what_cannot_be_mapped_goes_over_the_connection() {
    let here = Here::new("127.0.0.1:0", "open");
    let memory = Node::private_memory(MIB).unwrap();
    let private = here.node.export("private", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let shared = here.node.export("shared", Node::memory(MIB).unwrap(), Rights::ReadWrite).unwrap();
    let mut other = here.importer("auto");
    assert_eq!(other.ask(&format!("import private {}", hex(private))), apart(may_trace()));
    assert_eq!(other.ask("write 0 100 4"), "ok");
    assert_eq!(memory.shared().sub(99, 2).unwrap().to_vec(), [4, 0]);
    assert_eq!(other.ask(&format!("import shared {}", hex(shared))), "shm");
    let mut forced = here.importer("shm");
    let answer = forced.ask(&format!("import private {}", hex(private)));
    assert!(answer.starts_with("error: no shared memory for \"private\""), "{answer}");
    assert_eq!(forced.ask(&format!("import shared {}", hex(shared))), "shm");
    let mut never = here.importer("socket");
    assert_eq!(never.ask(&format!("import shared {}", hex(shared))), "tcp");
    // An exporter that shares nothing.
    let mut exporter = Other::start("exporter", &[("NETVM_LINK", "socket")]);
    let ticket = exporter.hear();
    let (address, hex) = ticket.split_once(' ').unwrap();
    let node = Node::new().unwrap();
    let region = node.connect(address).unwrap().import("memory", &key(hex)).unwrap();
    assert_eq!(region.link(), "tcp");
}

#[test]
fn a_read_only_key_maps_read_only() {
    let here = Here::new("127.0.0.1:0", "open");
    let memory = Node::memory(MIB).unwrap();
    memory.shared().fill(2);
    let read = here.node.export("read", Arc::clone(&memory), Rights::Read).unwrap();
    let write = here.node.export("write", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    let mut reader = here.importer("shm");
    let mut writer = here.importer("shm");
    assert_eq!(reader.ask(&format!("import read {}", hex(read))), "shm");
    assert_eq!(writer.ask(&format!("import write {}", hex(write))), "shm");
    assert_eq!(reader.ask("read 77 100000"), "2");
    assert!(reader.ask("write 77 1 9").contains("refused"));
    assert_eq!(writer.ask("write 77 1 9"), "ok");
    assert_eq!(reader.ask("read 77 1"), "9");
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", reader.child.id())).unwrap();
    let mapped: Vec<&str> = maps.lines().filter(|line| line.contains("netvm-memory")).collect();
    assert!(mapped.len() == 1 && mapped[0].contains(" r--s "), "{mapped:?}");
    // Unexporting one leaves the other.
    assert!(here.node.unexport("write").unwrap());
    assert!(writer.ask("read 0 1").contains("refused"));
    assert_eq!(reader.ask("read 77 1"), "9");
}

#[test]
fn unexporting_under_fire_takes_effect_before_it_returns() {
    let here = Here::new("127.0.0.1:0", "open");
    // Few threads with long copies; more threads than have a word of their own, with short ones.
    let mut others: Vec<_> =
        [(4, 300_000), (80, 200)].map(|shape| (here.importer("auto"), shape)).into_iter().collect();
    for round in 0..60u64 {
        let name = format!("round-{round}");
        let apart = round % 3 == 2;
        let memory = if apart { Node::private_memory(2 * MIB) } else { Node::memory(2 * MIB) }.unwrap();
        let key = here.node.export(&name, Arc::clone(&memory), Rights::ReadWrite).unwrap();
        for (other, (threads, piece)) in &mut others {
            other.tell(&format!("hammer {name} {} {threads} {piece}", hex(key)));
            assert_eq!(other.hear(), "hammering");
        }
        std::thread::sleep(Duration::from_millis(round % 8));
        let start = Instant::now();
        assert!(here.node.unexport(&name).unwrap());
        let took = start.elapsed();
        memory.shared().fill(0xEE);
        assert!(memory.shared().to_vec().iter().all(|&byte| byte == 0xEE), "written after unexport");
        for (other, _) in &mut others {
            assert_eq!(other.hear(), "refused");
        }
        assert!(memory.shared().to_vec().iter().all(|&byte| byte == 0xEE), "written after unexport");
        // The limit is for those who were stopped.
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
}

#[test]
fn an_importer_that_dies_inside_delays_nobody() {
    let here = Here::new("127.0.0.1:0", "open");
    for round in 0..8 {
        let name = format!("round-{round}");
        let memory = Node::memory(8 * MIB).unwrap();
        let key = here.node.export(&name, Arc::clone(&memory), Rights::ReadWrite).unwrap();
        let mut other = here.importer("shm");
        other.tell(&format!("hammer {name} {} 6 1000000", hex(key)));
        assert_eq!(other.hear(), "hammering");
        std::thread::sleep(Duration::from_millis(20));
        // Stopped in the middle of its copies, most probably.
        other.signal(libc::SIGSTOP);
        std::thread::sleep(Duration::from_millis(20));
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                other.signal(libc::SIGKILL);
            });
            assert!(here.node.unexport(&name).unwrap());
        });
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
        memory.shared().fill(0xEE);
        std::thread::sleep(Duration::from_millis(5));
        assert!(memory.shared().to_vec().iter().all(|&byte| byte == 0xEE));
    }
}

#[test]
fn who_was_stopped_while_it_copies_does_not_touch_what_was_taken_back() {
    let here = Here::new("127.0.0.1:0", "open");
    let mut heap = vec![0u8; 8 * MIB];
    let slice = {
        // SAFETY: the vector lives until the segment has been unexported, and is used through the slice only.
        #[expect(unsafe_code, reason = "the program's own memory")]
        let range = unsafe { RawRange::new(heap.as_mut_ptr(), 8 * MIB, true) };
        let memory = Memory::from(range);
        let key = here.node.export("heap", &memory, Rights::ReadWrite).unwrap();
        let mut other = here.importer("auto");
        other.tell(&format!("hammer heap {} 12 1000", hex(key)));
        assert_eq!(other.hear(), "hammering");
        std::thread::sleep(Duration::from_millis(30));
        other.signal(libc::SIGSTOP);
        std::thread::sleep(Duration::from_millis(20));
        assert!(here.node.unexport("heap").unwrap());
        memory.shared().fill(0xEE);
        other.signal(libc::SIGCONT);
        assert_eq!(other.hear(), "refused");
        memory.shared().to_vec()
    };
    assert!(slice.iter().all(|&byte| byte == 0xEE), "written after unexport");
    drop(heap);
}

#[test]
fn a_node_that_goes_takes_back_what_others_copy_from_and_to() {
    for round in 0..10 {
        let here = Here::new("127.0.0.1:0", "open");
        let memory = Node::private_memory(2 * MIB).unwrap();
        let key = here.node.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
        let mut other = here.importer("auto");
        other.tell(&format!("hammer memory {} 4 300000", hex(key)));
        assert_eq!(other.hear(), "hammering");
        std::thread::sleep(Duration::from_millis(round));
        drop(here);
        memory.shared().fill(0xEE);
        assert_eq!(other.hear(), "refused");
        assert!(memory.shared().to_vec().iter().all(|&byte| byte == 0xEE), "written after the node had gone");
    }
}

#[test]
fn a_process_that_must_not_be_reached_into_is_asked() {
    // Root may everything, so not as root.
    let user = is_root().then_some(65534);
    if let Some(user) = user {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new(std::env::current_exe().unwrap());
        let tried = command.arg("--list").stdout(Stdio::null()).uid(user).gid(user).current_dir("/").status();
        if let Err(error) = tried {
            println!("skipped (no other user may run what is built here: {error})");
            return;
        }
    }
    let start = || {
        let mut exporter = Other::start_as(user, "exporter", &[("NETVM_TEST_PRIVATE", "1")]);
        let ticket = exporter.hear();
        let (address, key) = ticket.split_once(' ').unwrap();
        let mut importer = Other::start_as(user, "importer", &[]);
        importer.tell(&format!("{address} open auto"));
        (exporter, importer, format!("import memory {key}"))
    };
    // From the beginning.
    let (mut exporter, mut importer, import) = start();
    assert_eq!(exporter.ask("hide"), "true");
    assert_eq!(importer.ask(&import), "tcp");
    assert_eq!(importer.ask("write 0 100000 7"), "ok");
    assert_eq!((importer.ask("read 5 9"), exporter.ask("first")), ("7".to_owned(), "7".to_owned()));
    assert_eq!(importer.ask("notify 2 9"), "done");
    assert_eq!((exporter.ask("wait"), exporter.ask("first")), ("1".to_owned(), "9".to_owned()));
    // While it is being used.
    let (mut exporter, mut importer, import) = start();
    let link = importer.ask(&import);
    assert_eq!(link, apart(false));
    assert_eq!((importer.ask("write 0 100000 3"), exporter.ask("first")), ("ok".to_owned(), "3".to_owned()));
    assert_eq!(exporter.ask("hide"), "true");
    assert_eq!((importer.ask("write 0 100000 4"), exporter.ask("first")), ("ok".to_owned(), "4".to_owned()));
    assert_eq!(importer.ask("read 99 1"), "4");
    assert_eq!(exporter.ask("unexport"), "true");
    assert!(importer.ask("read 0 1").contains("refused"));
}

#[test]
fn importers_that_are_killed_anywhere_leave_a_working_exporter() {
    let here = Here::new("127.0.0.1:0", "open");
    let memory = Node::memory(2 * MIB).unwrap();
    let key = here.node.export("memory", Arc::clone(&memory), Rights::ReadWrite).unwrap();
    for round in 0..12 {
        let mut other = here.importer("shm");
        if round % 3 != 0 {
            other.tell(&format!("hammer memory {} 3 70000", hex(key)));
        }
        if round % 3 == 2 {
            assert_eq!(other.hear(), "hammering");
        }
        std::thread::sleep(Duration::from_millis(round * 3));
        drop(other);
    }
    let mut other = here.importer("shm");
    assert_eq!(other.ask(&format!("import memory {}", hex(key))), "shm");
    assert_eq!(other.ask("write 0 2000000 5"), "ok");
    let start = Instant::now();
    assert!(here.node.unexport("memory").unwrap());
    assert!(start.elapsed() < Duration::from_secs(4));
}

#[test]
fn a_killed_exporter_is_told_and_its_memory_stays_mapped() {
    let mut exporter = Other::start("exporter", &[]);
    let ticket = exporter.hear();
    let (address, hex) = ticket.split_once(' ').unwrap();
    let node = Node::new().unwrap();
    let options = ConnectOptions { link: LinkChoice::Shm, ..ConnectOptions::default() };
    let region = node.connect_with(address, &options).unwrap().import("memory", &key(hex)).unwrap();
    region.write_notify(0, &[8; 100], Notify::Count { number: 2 }).unwrap();
    assert_eq!((exporter.ask("wait"), exporter.ask("first")), ("1".to_owned(), "8".to_owned()));
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut bytes = vec![1; MIB];
            loop {
                let result = region.write(0, &bytes).and_then(|()| region.flush());
                let result = result.and_then(|()| region.read(0, &mut bytes));
                if let Err(error) = result.and_then(|()| region.fetch_add(8, 1u64).map(drop)) {
                    break error;
                }
            }
        });
        std::thread::sleep(Duration::from_millis(20));
        let start = Instant::now();
        exporter.signal(libc::SIGKILL);
        let error = worker.join().unwrap();
        assert!(matches!(error, Error::LenderLost { .. }), "{error}");
        assert!(start.elapsed() < Duration::from_secs(10));
    });
    assert!(matches!(region.notify(Notify::Count { number: 2 }), Err(Error::LenderLost { .. })));
}

/// Nobody at the home has a hand in it: its process is stopped.
#[test]
fn locks_that_nobody_else_wants_need_no_home() {
    let mut home = Other::start("exporter", &[]);
    let ticket = home.hear();
    let address = ticket.split(' ').next().unwrap().to_owned();
    let lock_key = key(&home.ask("lock"));
    let nodes = [Node::new().unwrap(), Node::new().unwrap()];
    let peers = nodes.each_ref().map(|node| node.connect(&address).unwrap());
    let locks = peers.each_ref().map(|peer| Lock::open(peer, "lock", &lock_key).unwrap());
    let monitor = Monitor::open(&peers[0], "lock", &lock_key).unwrap();
    home.signal(libc::SIGSTOP);
    let inside = std::sync::atomic::AtomicU32::new(0);
    std::thread::scope(|scope| {
        for lock in &locks {
            let inside = &inside;
            scope.spawn(move || {
                for _ in 0..2000 {
                    // Whoever waited would wait for the home.
                    let guard = loop {
                        match lock.try_lock() {
                            Ok(guard) => break guard,
                            Err(SyncError::Busy) => std::thread::yield_now(),
                            Err(error) => panic!("{error}"),
                        }
                    };
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two have it");
                    inside.fetch_sub(1, Ordering::SeqCst);
                    guard.release().unwrap();
                }
            });
        }
    });
    let guard = monitor.enter(None).unwrap();
    home.signal(libc::SIGCONT);
    // The second asks the home, which finds the first.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| locks[1].lock(SOON).map(drop));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waiting.is_finished());
        assert_eq!(guard.signal(0).unwrap(), 0);
        // It waits for the condition, and the other one has the lock meanwhile.
        let (guard, signalled) = guard.wait(0, Some(Duration::from_millis(50))).unwrap();
        assert!(!signalled);
        waiting.join().unwrap().unwrap();
        drop(guard);
    });
    // Nobody wants it any more: it is in its word again.
    locks[0].lock(SOON).unwrap().release().unwrap();
    home.signal(libc::SIGSTOP);
    (0..100).for_each(|_| drop(locks[1].lock(None).unwrap()));
    home.signal(libc::SIGCONT);
}

#[test]
fn permits_that_nobody_waits_for_need_no_home() {
    let mut home = Other::start("exporter", &[]);
    let ticket = home.hear();
    let address = ticket.split(' ').next().unwrap().to_owned();
    let semaphore_key = key(&home.ask("semaphore"));
    let nodes = [Node::new().unwrap(), Node::new().unwrap()];
    let peers = nodes.each_ref().map(|node| node.connect(&address).unwrap());
    let [one, two] = peers.each_ref().map(|peer| Semaphore::open(peer, "semaphore", &semaphore_key).unwrap());
    home.signal(libc::SIGSTOP);
    let inside = std::sync::atomic::AtomicU32::new(0);
    std::thread::scope(|scope| {
        for (semaphore, count) in [(&one, 1), (&two, 2), (&one, 2)] {
            let inside = &inside;
            scope.spawn(move || {
                for _ in 0..2000 {
                    while let Err(error) = semaphore.try_consume(count) {
                        // Whoever waited would wait for the home.
                        assert!(matches!(error, SyncError::Busy), "{error}");
                        std::thread::yield_now();
                    }
                    let now = inside.fetch_add(count, Ordering::SeqCst) + count;
                    assert!(now <= 3, "{now} of 3 are used up");
                    inside.fetch_sub(count, Ordering::SeqCst);
                    assert!(semaphore.add(count).unwrap() <= 3);
                }
            });
        }
    });
    one.consume(3, SOON).unwrap();
    assert!(matches!(two.try_consume(1), Err(SyncError::Busy)));
    home.signal(libc::SIGCONT);
    // Who waits does so at the home, where those go who add from then on.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| two.consume(2, SOON));
        // Until it does, what was added can be had again.
        let began = Instant::now();
        while {
            assert_eq!(one.add(1).unwrap(), 1);
            let had = one.try_consume(1);
            assert!(matches!(had, Ok(()) | Err(SyncError::Busy)), "{had:?}");
            had.is_ok()
        } {
            assert!(Some(began.elapsed()) < SOON, "nobody waits");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!waiting.is_finished());
        assert_eq!(one.add(1).unwrap(), 0);
        waiting.join().unwrap().unwrap();
    });
    // Owned ones are the home's business, and all others are in the word again.
    one.add(3).unwrap();
    let permit = two.acquire(1, SOON).unwrap();
    home.signal(libc::SIGSTOP);
    one.consume(2, SOON).unwrap();
    assert!(matches!(one.try_consume(1), Err(SyncError::Busy)));
    assert_eq!(one.add(2).unwrap(), 2);
    home.signal(libc::SIGCONT);
    permit.release().unwrap();
    assert_eq!(one.add(1).unwrap(), 4);
}

#[test]
fn who_is_stopped_with_a_lock_loses_it() {
    let here = Here::new("127.0.0.1:0", "open");
    here.node.keep_alive(KeepAlive::new(200, 1000));
    let lock_key = here.node.export_sync("lock", Kind::LOCK).unwrap();
    let mut other = here.importer("auto");
    assert_eq!(other.ask(&format!("open lock {}", hex(lock_key))), "opened");
    for _ in 0..3 {
        assert_eq!((other.ask("lock"), other.ask("unlock")), ("ours".to_owned(), "done".to_owned()));
    }
    assert_eq!(other.ask("lock"), "ours");
    other.signal(libc::SIGSTOP);
    let nodes = [Node::new().unwrap(), Node::new().unwrap()];
    let peers = nodes.each_ref().map(|node| node.connect(&here.address).unwrap());
    let locks = peers.each_ref().map(|peer| Lock::open(peer, "lock", &lock_key).unwrap());
    let guard = match locks[0].lock(SOON) {
        Err(SyncError::Abandoned(guard)) => guard,
        other => panic!("{other:?}"),
    };
    // It goes on, and neither gives back what is another's now nor takes it.
    other.signal(libc::SIGCONT);
    assert!(other.ask("unlock").starts_with("error"));
    assert!(other.ask("lock").starts_with("error"));
    assert!(matches!(locks[1].try_lock(), Err(SyncError::Busy)));
    guard.release().unwrap();
    let guard = locks[1].lock(SOON).unwrap();
    assert!(other.ask("lock").starts_with("error"));
    // Killed with it by the word: told at once.
    let mut another = here.importer("auto");
    assert_eq!(another.ask(&format!("open lock {}", hex(lock_key))), "opened");
    guard.release().unwrap();
    assert_eq!(another.ask("lock"), "ours");
    another.signal(libc::SIGKILL);
    assert!(matches!(locks[0].lock(SOON), Err(SyncError::Abandoned(_))));
    locks[1].lock(SOON).unwrap().release().unwrap();
}

#[test]
fn descriptors_are_not_left_behind() {
    let here = Here::new("127.0.0.1:0", "open");
    let memory = Node::memory(MIB).unwrap();
    let (key, _board) = here.node.export_notified("memory", memory, Rights::ReadWrite, 4).unwrap();
    let mut other = here.importer("shm");
    let count = |id: u32| std::fs::read_dir(format!("/proc/{id}/fd")).unwrap().count();
    assert_eq!(other.ask(&format!("import memory {}", hex(key))), "shm");
    let there = count(other.child.id());
    // More often than a session may share at once.
    for _ in 0..300 {
        assert_eq!(other.ask("close"), "closed");
        assert_eq!(other.ask(&format!("import memory {}", hex(key))), "shm");
    }
    assert_eq!(count(other.child.id()), there);
}
