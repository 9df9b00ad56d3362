//! Programs that people use, unmodified, on four and more times the local memory: the same output as without netvm.

mod common;

use common::{
    Done, Folder, Guard, Lender, REDUNDANT, Random, TIERS, can_run, finish, finish_with, netvm,
    run_on_some_of, run_on_tier, until,
};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// The run stayed within its local memory, and could not have done its work in it.
#[track_caller]
fn must_have_used_far_memory(done: &Done, local_bytes: u64) {
    let summary = done.summary();
    let number = |name: &str| summary[name].as_u64().unwrap_or_else(|| panic!("no {name} in {summary}"));
    assert!(number("local_bytes_peak") <= local_bytes, "{summary}");
    let packed = number("unpacked").min(number("packed")) * 4096;
    assert!(number("bytes_in") + packed > MIB && number("bytes_out") + packed > MIB, "{summary}");
}

/// Lines of random numbers.
fn write_lines(path: &Path, seed: u64, bytes: usize) {
    let mut random = Random(seed);
    let mut text = String::with_capacity(bytes + 32);
    while text.len() < bytes {
        writeln!(text, "{:x}", random.next()).unwrap();
    }
    std::fs::write(path, text).unwrap();
}

/// A program that writes the same wherever its memory is: to its output, and perhaps to the file that is its last argument.
struct Recipe {
    local_mib: u64,
    program: &'static str,
    needs: &'static [&'static str],
    arguments: Vec<OsString>,
    input: Vec<u8>,
    writes_file: bool,
}

impl Recipe {
    /// What it writes.
    #[track_caller]
    fn run(&self, mut command: Command, folder: &Folder) -> (Done, Vec<u8>) {
        let file = folder.path("written");
        let _ = std::fs::remove_file(&file);
        command.env("LC_ALL", "C").current_dir(folder.path("")).args(&self.arguments);
        if self.writes_file {
            command.arg(&file);
        }
        let done = finish_with(&mut command, &self.input).must_succeed();
        let written = if self.writes_file { std::fs::read(file).unwrap() } else { Vec::new() };
        (done, written)
    }

    fn local(&self) -> String {
        format!("{}M", self.local_mib)
    }

    /// Without netvm.
    fn plain(&self, folder: &Folder) -> (Done, Vec<u8>) {
        self.run(Command::new(self.program), folder)
    }

    #[track_caller]
    fn must_be_the_same(&self, plain: &(Done, Vec<u8>), (done, file): (Done, Vec<u8>)) -> Done {
        must_have_used_far_memory(&done, self.local_mib * MIB);
        assert_eq!(plain.0.out(), done.out(), "{}", done.err);
        assert!(plain.1 == file, "the files differ");
        done
    }

    /// On a lender of its own, with pages packed and not.
    #[track_caller]
    fn on_a_private_lender(&self, test: &str, folder: &Folder) {
        if !can_run(test, self.needs) {
            return;
        }
        let plain = self.plain(folder);
        for tier in TIERS {
            let far = run_on_tier(&self.local(), tier, self.program);
            self.must_be_the_same(&plain, self.run(far, folder));
        }
    }
}

fn words(arguments: &[&str]) -> Vec<OsString> {
    arguments.iter().map(OsString::from).collect()
}

fn gnu_sort_of(folder: &Folder) -> Recipe {
    write_lines(&folder.path("lines"), 1, 8 << 20);
    let arguments = words(&["--buffer-size=512M", "--parallel=2", "lines", "--output"]);
    let needs = &["/usr/bin/sort"];
    Recipe { local_mib: 8, program: "sort", needs, arguments, input: Vec::new(), writes_file: true }
}

const PYTHON: &str = "/usr/bin/python3";

fn numpy_sort_of(_: &Folder) -> Recipe {
    // Four times the local memory. The file goes through read(2) and write(2) too.
    let script = "\
import hashlib, numpy, sys
a = numpy.random.default_rng(7).integers(0, 2**63, size=8 << 20, dtype=numpy.int64)
a.sort()
print(hashlib.sha256(a).hexdigest(), a[::1000003])
a.tofile(sys.argv[1])
b = numpy.fromfile(sys.argv[1], dtype=numpy.int64)
print((a == b).all(), b[:-1].max() <= b[-1])
";
    let needs = &[PYTHON, "/usr/lib/python3/dist-packages/numpy"];
    let arguments = words(&["-c", script]);
    Recipe { local_mib: 16, program: PYTHON, needs, arguments, input: Vec::new(), writes_file: true }
}

fn sqlite_of(_: &Folder) -> Recipe {
    let script = "\
create table t (id integer primary key, k integer, v text);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 150000)
  insert into t select i, (i * 2654435761) % 4294967296, hex(i * 40503) || printf('%0300d', i) from n;
create index t_k on t (k);
select count(*), sum(k), sum(length(v)) from t;
select id, k, v from t order by k limit 200 offset 70000;
update t set v = upper(v) || id where k % 3 = 0;
delete from t where k % 7 = 0;
select count(*), sum(id), sum(length(v)), max(v) from t;
pragma integrity_check;
";
    let (needs, arguments) = (&["/usr/bin/sqlite3"], words(&[":memory:"]));
    Recipe { local_mib: 8, program: "sqlite3", needs, arguments, input: script.into(), writes_file: false }
}

fn gcc_of(folder: &Folder) -> Recipe {
    let mut random = Random(3);
    let mut source = String::new();
    for function in 0..300 {
        let mut number = || random.next() % 1000 + 1;
        writeln!(source, "int f{function}(int *a, int n) {{ int s = {};", number()).unwrap();
        for _ in 0..6 {
            writeln!(
                source,
                "for (int i = 0; i < n; i++) {{ s += a[i] * {}; if (s % {} == 0) a[i] ^= s; switch (s & 7) {{ case 1: s -= {}; \
                 break; case 3: s *= {}; break; default: s ^= i; }} }}",
                number(),
                number(),
                number(),
                number()
            )
            .unwrap();
        }
        source.push_str("return s; }\n");
    }
    std::fs::write(folder.path("large.c"), source).unwrap();
    let arguments = words(&["-O2", "-c", "large.c", "-o"]);
    let needs = &["/usr/bin/gcc"];
    Recipe { local_mib: 8, program: "gcc", needs, arguments, input: Vec::new(), writes_file: true }
}

fn two_processes_of(folder: &Folder) -> Recipe {
    let script = "\
sort --buffer-size=256M -o a.sorted a & first=$!
sort --buffer-size=256M -r -o b.sorted b & second=$!
wait $first && wait $second && cat a.sorted b.sorted | cksum";
    write_lines(&folder.path("a"), 4, 5 << 20);
    write_lines(&folder.path("b"), 5, 5 << 20);
    let (needs, arguments) = (&["/usr/bin/sort"], words(&["-c", script]));
    Recipe { local_mib: 12, program: "sh", needs, arguments, input: Vec::new(), writes_file: false }
}

#[test]
fn gnu_sort() {
    let folder = Folder::new("sort");
    gnu_sort_of(&folder).on_a_private_lender("gnu_sort", &folder);
}

#[test]
fn larger_pages() {
    let folder = Folder::new("pages");
    let sort = gnu_sort_of(&folder);
    if can_run("larger_pages", sort.needs) {
        let plain = sort.plain(&folder);
        for size in ["64K", "256K"] {
            let mut far = netvm();
            far.args(["run", "--local", "8M", "--page-size", size, "--lend-size", "1G", "--json", "--"]);
            far.arg(sort.program);
            sort.must_be_the_same(&plain, sort.run(far, &folder));
        }
    }
    for (size, says) in
        [("5K", "power of two"), ("4M", "power of two"), ("0", "power of two"), ("2M", "four pages")]
    {
        let mut refused = netvm();
        refused.args(["run", "--local", "6M", "--page-size", size, "--", "true"]);
        let output = refused.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{size}: {said}");
    }
}

#[test]
fn numpy_sort() {
    let folder = Folder::new("numpy");
    numpy_sort_of(&folder).on_a_private_lender("numpy_sort", &folder);
}

#[test]
fn sqlite_in_memory() {
    let folder = Folder::new("sqlite");
    sqlite_of(&folder).on_a_private_lender("sqlite_in_memory", &folder);
}

#[test]
fn gcc_on_a_large_file() {
    let folder = Folder::new("gcc");
    gcc_of(&folder).on_a_private_lender("gcc_on_a_large_file", &folder);
}

#[test]
fn two_processes_share_the_local_memory() {
    let folder = Folder::new("two");
    two_processes_of(&folder).on_a_private_lender("two_processes_share_the_local_memory", &folder);
}

/// What happens to a lender while a program runs on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    Killed,
    Stopped,
    /// Its network is down.
    Cut,
}

impl Trouble {
    fn strike(self, lender: &Lender) {
        match self {
            Self::Killed => lender.signal("KILL"),
            Self::Stopped => lender.signal("STOP"),
            Self::Cut => {
                let cut = Command::new("ip").args(["link", "set", "lo", "down"]).status();
                assert!(cut.unwrap().success());
            }
        }
    }
}

/// Once the lender holds some of the run's memory; false when the run ended before.
fn strike_soon(trouble: Trouble, lender: &Lender, ended: &AtomicBool) -> bool {
    let is_used = || netvm::lender::status(&lender.address).is_ok_and(|status| status.used_bytes > 0);
    while !ended.load(Ordering::Relaxed) {
        if is_used() {
            trouble.strike(lender);
            return true;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    false
}

/// A program goes on, and writes the same, when it loses a lender of pages that can be had without it.
#[track_caller]
fn loses_a_lender(
    (recipe, plain): (&Recipe, &(Done, Vec<u8>)),
    folder: &Folder,
    (lenders, redundancy): (&[Lender], &[&str]),
    victim: usize,
    trouble: Trouble,
) {
    let ended = AtomicBool::new(false);
    let (done, struck) = std::thread::scope(|scope| {
        let strike = scope.spawn(|| strike_soon(trouble, &lenders[victim], &ended));
        let far = run_on_some_of(lenders, redundancy, &recipe.local(), recipe.program);
        let done = recipe.run(far, folder);
        ended.store(true, Ordering::Relaxed);
        (done, strike.join().unwrap())
    });
    assert!(struck, "the program ended too soon");
    let done = recipe.must_be_the_same(plain, done);
    must_have_lost(&done, &lenders[victim]);
}

/// The report tells of it.
#[track_caller]
fn must_have_lost(done: &Done, lender: &Lender) {
    let summary = done.summary();
    assert_eq!(summary["lost"], serde_json::json!([lender.address]), "{}", done.err);
    assert!(done.err.contains(&format!("lost {}", lender.address)), "{}", done.err);
    // Lenders without others are waited for for 4 s. On a machine that does nothing else it is far below one.
    assert!(summary["read_us_peak"].as_u64().unwrap() < 4_000_000, "{summary}");
}

/// The first is killed where there is one more than is needed, then the second is stopped where there is not.
#[track_caller]
fn loses_lenders(test: &str, recipe: fn(&Folder) -> Recipe) {
    loses_lenders_by(test, recipe, &[Trouble::Killed, Trouble::Stopped]);
}

/// One of these; pages have replicas, or are in parts.
#[track_caller]
fn loses_lenders_by(test: &str, recipe: fn(&Folder) -> Recipe, troubles: &[Trouble]) {
    let folder = Folder::new("loses");
    let recipe = recipe(&folder);
    if !can_run(test, recipe.needs) {
        return;
    }
    let plain = recipe.plain(&folder);
    for (&trouble, (redundancy, need)) in
        troubles.iter().flat_map(|trouble| REDUNDANT.map(|redundancy| (trouble, redundancy)))
    {
        let (count, victim) = if trouble == Trouble::Killed { (need + 1, 0) } else { (need, 1) };
        let start = |index| Lender::named(&folder, &format!("{trouble:?}-{need}-{index}"), "256M");
        let lenders: Vec<_> = (0..count).map(start).collect();
        loses_a_lender((&recipe, &plain), &folder, (&lenders, redundancy), victim, trouble);
    }
}

#[test]
fn gnu_sort_loses_lenders() {
    loses_lenders("gnu_sort_loses_lenders", gnu_sort_of);
}

#[test]
fn numpy_sort_loses_lenders() {
    loses_lenders("numpy_sort_loses_lenders", numpy_sort_of);
}

#[test]
fn sqlite_loses_lenders() {
    loses_lenders("sqlite_loses_lenders", sqlite_of);
}

#[test]
fn gcc_loses_lenders() {
    loses_lenders_by("gcc_loses_lenders", gcc_of, &[Trouble::Killed]);
}

#[test]
fn two_processes_lose_lenders() {
    loses_lenders("two_processes_lose_lenders", two_processes_of);
}

const CUT: &str = "NETVM_TEST_CUT";

#[test]
fn programs_lose_a_lender_whose_network_is_cut() {
    const TEST: &str = "programs_lose_a_lender_whose_network_is_cut";
    let me = std::env::current_exe().unwrap();
    // As another user a network of one's own needs a user namespace of one's own.
    let ways = [["unshare", "-n", "--"], ["unshare", "-Urn", "--"]];
    let works = |way: &&[&str; 3]| {
        let up = Command::new(way[0]).args(&way[1..]).args(["ip", "link", "set", "lo", "up"]).output();
        up.is_ok_and(|output| output.status.success())
    };
    let Some(way) = ways.iter().find(works) else {
        let _ = writeln!(std::io::stderr(), "{TEST}: skipped (no network namespace)");
        return;
    };
    let mut command = Command::new(way[0]);
    command.args(&way[1..]).arg(me).args(["--exact", "--ignored", "--nocapture", "in_a_network_of_its_own"]);
    let done = finish(command.env(CUT, "1")).must_succeed();
    let skipped = done.err.lines().find(|line| line.contains("skipped"));
    let _ = skipped.map(|line| writeln!(std::io::stderr(), "{line}"));
    assert!(skipped.is_some() || done.out().contains("1 passed"), "{}", done.out());
}

/// For [`programs_lose_a_lender_whose_network_is_cut`]: one lender by the loopback device, the others without a network.
#[test]
#[ignore = "wants a network namespace of its own"]
fn in_a_network_of_its_own() {
    assert!(std::env::var_os(CUT).is_some(), "it would cut the network of this machine");
    let recipes = [gnu_sort_of, sqlite_of].into_iter();
    for (recipe, (redundancy, need)) in recipes.flat_map(|recipe| REDUNDANT.map(|way| (recipe, way))) {
        let folder = Folder::new("cut");
        let recipe = recipe(&folder);
        if !can_run("programs_lose_a_lender_whose_network_is_cut", recipe.needs) {
            return;
        }
        assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
        let near = |index| Lender::named(&folder, &format!("near-{index}"), "256M");
        let mut lenders: Vec<_> = (1..need).map(near).collect();
        lenders.insert(1, Lender::at("127.0.0.1:0", "256M"));
        loses_a_lender((&recipe, &recipe.plain(&folder)), &folder, (&lenders, redundancy), 1, Trouble::Cut);
    }
}

/// A redis-server in a folder of its own, without a TCP port.
struct Redis {
    folder: Folder,
    server: Guard,
}

impl Redis {
    fn start(name: &str, mut command: Command, dump: Option<&Path>) -> Self {
        let folder = Folder::new(name);
        if let Some(dump) = dump {
            std::fs::copy(dump, folder.path("dump.rdb")).unwrap();
        }
        let err = std::fs::File::create(folder.path("err")).unwrap();
        command
            .args([
                "--port",
                "0",
                "--save",
                "",
                "--enable-debug-command",
                "yes",
                "--daemonize",
                "no",
                "--unixsocket",
            ])
            .arg(folder.path("socket"))
            .arg("--dir")
            .arg(folder.path(""))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(err);
        let server = Guard(command.spawn().unwrap());
        let redis = Self { folder, server };
        until("redis answers", || redis.cli().arg("ping").output().unwrap().stdout == b"PONG\n");
        redis
    }

    fn cli(&self) -> Command {
        let mut command = Command::new("redis-cli");
        command.arg("-s").arg(self.folder.path("socket"));
        command
    }

    #[track_caller]
    fn ask(&self, arguments: &[&str]) -> String {
        let done = finish(self.cli().args(arguments)).must_succeed();
        done.out().trim().to_owned()
    }

    /// A checksum of everything in it.
    fn digest(&self) -> String {
        self.ask(&["debug", "digest"])
    }

    /// Ends it as an operator would; returns what it wrote to standard error.
    fn stop(mut self) -> String {
        let _ = self.cli().args(["shutdown", "nosave"]).output();
        let status = common::wait(&mut self.server.0, common::PATIENCE).expect("redis does not end");
        let err = std::fs::read_to_string(self.folder.path("err")).unwrap();
        assert!(status.success(), "{status}\n{err}");
        err
    }
}

#[test]
fn redis_with_bgsave() {
    for tier in TIERS {
        redis_saves("redis_with_bgsave", run_on_tier("8M", tier, "redis-server"), || {});
    }
}

#[test]
fn redis_loses_a_lender_during_bgsave() {
    for (redundancy, need) in REDUNDANT {
        let folder = Folder::new("redis-lenders");
        let lenders = &["a", "b", "c"].map(|name| Lender::named(&folder, name, "256M"))[..need];
        let far = run_on_some_of(lenders, redundancy, "8M", "redis-server");
        let test = "redis_loses_a_lender_during_bgsave";
        if let Some(done) = redis_saves(test, far, || lenders[0].signal("KILL")) {
            must_have_lost(&done, &lenders[0]);
        }
    }
}

/// Fills redis, has it write a dump, changes it meanwhile; `meanwhile` happens then, too.
fn redis_saves(test: &str, far: Command, meanwhile: impl FnOnce()) -> Option<Done> {
    if !can_run(test, &["/usr/bin/redis-server", "/usr/bin/redis-cli"]) {
        return None;
    }
    // "Redis server v=7.0.15 sha=...": it has DEBUG, which has the digest, switched on by an option since 7.
    let version = finish(Command::new("redis-server").arg("--version")).out();
    let major = version.split("v=").nth(1).and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    if major.is_none_or(|major| major < 7) {
        let _ = writeln!(std::io::stderr(), "{test}: skipped (needs redis 7, not {})", version.trim());
        return None;
    }
    // In redis' own protocol: strings, a few hashes and a list.
    let mut random = Random(6);
    let mut load = String::new();
    for key in 0..24_000 {
        let value = format!("{:016x}", random.next()).repeat(100);
        write!(load, "*3\r\n$3\r\nSET\r\n$9\r\nkey{key:06}\r\n${}\r\n{value}\r\n", value.len()).unwrap();
        if key % 8 == 0 {
            let (hash, field) = (key % 80, random.next());
            write!(load, "*4\r\n$4\r\nHSET\r\n$6\r\nhash{hash:02}\r\n$16\r\n{field:016x}\r\n$1\r\n1\r\n")
                .unwrap();
            write!(load, "*3\r\n$5\r\nRPUSH\r\n$4\r\nlist\r\n$16\r\n{field:016x}\r\n").unwrap();
        }
    }
    let plain = Redis::start("redis-plain", Command::new("redis-server"), None);
    finish_with(plain.cli().arg("--pipe"), load.as_bytes()).must_succeed();
    let expected = plain.digest();

    let far = Redis::start("redis-far", far, None);
    finish_with(far.cli().arg("--pipe"), load.as_bytes()).must_succeed();
    assert_eq!(far.digest(), expected);
    for key in ["key000000", "key012345", "key023999"] {
        assert_eq!(far.ask(&["get", key]), plain.ask(&["get", key]));
    }
    // The child of fork() writes what was there before, whatever the parent does meanwhile.
    assert!(far.ask(&["bgsave"]).contains("started"));
    meanwhile();
    for key in 0..400 {
        far.ask(&["set", &format!("key{:06}", key * 50), "changed while the child was writing"]);
    }
    until("BGSAVE has ended", || far.ask(&["info", "persistence"]).contains("rdb_bgsave_in_progress:0"));
    assert!(far.ask(&["info", "persistence"]).contains("rdb_last_bgsave_status:ok"));
    assert_ne!(far.digest(), expected);
    let dump = far.folder.path("dump.rdb");
    let loaded = Redis::start("redis-loaded", Command::new("redis-server"), Some(&dump));
    assert_eq!(loaded.digest(), expected, "the dump differs");
    let benchmark = finish(
        Command::new("redis-benchmark")
            .arg("-s")
            .arg(far.folder.path("socket"))
            .args(["-t", "set,get", "-n", "3000", "-d", "500"])
            .args(["-r", "2000", "-q"]),
    )
    .must_succeed();
    assert!(benchmark.out().contains("GET"), "{}", benchmark.out());
    plain.stop();
    loaded.stop();
    let err = far.stop();
    let done = Done { status: Default::default(), out: Vec::new(), err, elapsed: Default::default() };
    must_have_used_far_memory(&done, 8 * MIB);
    Some(done)
}

/// The same irregular walk in each of some phases, and in each run.
#[test]
fn what_a_program_did_before_is_foreseen() {
    const PROGRAM: &str = "
import numpy, sys
words = numpy.random.default_rng(1).integers(0, 1 << 60, 6 << 20)   # 48 MiB
order = numpy.random.default_rng(2).permutation(12 << 10) * 512      # each page once
total = 0
for phase in range(3):
    for at in order.tolist():
        total = (total * 31 + int(words[at])) % (1 << 61)
print(total)
";
    const TEST: &str = "what_a_program_did_before_is_foreseen";
    if !can_run(TEST, &["/usr/bin/python3", "/usr/lib/python3/dist-packages/numpy"]) {
        return;
    }
    let folder = Folder::new("learn");
    let record = folder.path("record");
    let plain = finish(Command::new("/usr/bin/python3").args(["-c", PROGRAM])).must_succeed();
    let run = || {
        let mut far = netvm();
        far.args(["run", "--local", "16M", "--lend-size", "1G", "--tier", "lender", "--json", "--learn"]);
        let done = finish(far.arg(&record).args(["--", "/usr/bin/python3", "-c", PROGRAM])).must_succeed();
        assert_eq!(done.out(), plain.out());
        let summary = done.summary();
        let number = |name: &str| summary[name].as_u64().unwrap();
        println!("{summary}");
        (number("foreseen"), number("foreseen_hits"))
    };
    // Two of three phases, then all three.
    let (first, hits) = run();
    assert!(first > 12_000 && hits * 2 > first, "{first} {hits}");
    let (second, hits) = run();
    assert!(second > first && hits * 2 > second, "{second} {hits}");
    std::fs::write(&record, "not a record").unwrap();
    let done = finish(netvm().args(["run", "--learn"]).arg(&record).args(["--", "true"]));
    assert!(!done.status.success() && done.err.contains("as a record"), "{done:?}");
    let done = finish(netvm().args(["run", "--learn", "/nonexistent/record", "--", "true"]));
    assert!(!done.status.success() && done.err.contains("no such folder"), "{done:?}");
}

/// Forks that follow the record, on encrypted pages, while one of two lenders is killed.
#[test]
fn a_record_survives_forks_and_a_lost_lender() {
    const PROGRAM: &str = "
import numpy, os
words = numpy.random.default_rng(1).integers(0, 1 << 60, 4 << 20)
order = numpy.random.default_rng(2).permutation(8 << 10) * 512
def walk(phases):
    total = 0
    for phase in range(phases):
        for at in order.tolist(): total = (total * 31 + int(words[at])) % (1 << 61)
    return total
walk(1)
children = []
for child in range(2):
    read, write = os.pipe()
    if os.fork() == 0:
        words[order[child]] = child
        os.write(write, str(walk(2)).encode())
        os._exit(0)
    os.close(write)
    children.append(read)
print(walk(2), *[os.read(read, 100) for read in children])
";
    const TEST: &str = "a_record_survives_forks_and_a_lost_lender";
    if !can_run(TEST, &["/usr/bin/python3", "/usr/lib/python3/dist-packages/numpy"]) {
        return;
    }
    let folder = Folder::new("learn-forks");

    let lenders = ["one", "two"].map(|name| Lender::named(&folder, name, "512M"));
    let plain = finish(Command::new("/usr/bin/python3").args(["-c", PROGRAM])).must_succeed();
    for round in 0..2 {
        let mut far = netvm();
        far.args(["run", "--local", "12M", "--replicas", "2", "--encrypt-pages", "--json", "--learn"]);
        far.arg(folder.path("record")).args([
            "--lender",
            &lenders[0].address,
            "--lender",
            &lenders[1].address,
        ]);
        far.args(["--", "/usr/bin/python3", "-c", PROGRAM]);
        let killer = (round == 1).then(|| {
            let pid = lenders[1].process.0.id();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(700));
                common::signal(pid, "KILL");
            })
        });
        let done = finish(&mut far).must_succeed();
        if let Some(killer) = killer {
            killer.join().unwrap();
        }
        assert_eq!(done.out(), plain.out(), "{round}");
        assert!(done.summary()["foreseen_hits"].as_u64().unwrap() > 4000, "{}", done.summary());
        assert!(folder.path("record").metadata().unwrap().len() > 30_000);
    }
}

#[test]
fn runs_that_cannot_be_meant_are_refused_with_what_is_wrong() {
    for (arguments, word) in [
        (&["--local", "8M", "--area", "1M"][..], "leave --area out"),
        (&["--local", "8M", "--area", "16T"][..], "give less than 16 TiB"),
        (
            &["--local", "900T"][..],
            "--local 900 TiB is more than far memory can have addresses for; give less",
        ),
        (&["--local", "2T"][..], "have addresses for; give less, or as large an --area"),
        (&["--local", "8M", "--file", "/nowhere/there:xx"][..], "\"xx\" is no size"),
        (&["--local", "8M", "--file", "/nowhere/there:1G"][..], "/nowhere/there: No such file"),
        (&["--local", "64K"][..], "too little"),
        (&["--local", "8M", "--lend-size", "1M"][..], "--lend-size of at least that"),
        (
            &["--local", "8M", "--lend-size", "16M", "--file", "/proc"][..],
            "a file of 0 B in /proc has no room",
        ),
        (&["--local", "8M", "--lend-size", "16M", "--file", "/var/tmp:0"][..], "give it at least that"),
    ] {
        let output = netvm().arg("run").args(arguments).args(["--", "true"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && said.contains(word) && said.lines().count() == 1,
            "{arguments:?}: {said}"
        );
    }
}
