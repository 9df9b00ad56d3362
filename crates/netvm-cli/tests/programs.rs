//! Programs that people use, unmodified, on four and more times the local memory: the same output as without netvm.

mod common;

use common::{Done, Folder, Guard, Random, TIERS, can_run, finish, finish_with, run_on, run_on_tier, until};
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

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

#[test]
fn gnu_sort() {
    if !can_run("gnu_sort", &["/usr/bin/sort"]) {
        return;
    }
    let folder = Folder::new("sort");
    write_lines(&folder.path("lines"), 1, 8 << 20);
    let arguments = ["--buffer-size=512M", "--parallel=2", "--output"];
    let plain = folder.path("plain");
    finish(Command::new("sort").env("LC_ALL", "C").args(arguments).arg(&plain).arg(folder.path("lines")))
        .must_succeed();
    let far = folder.path("far");
    for tier in TIERS {
        let mut command = run_on_tier("8M", tier, "sort");
        let command = command.env("LC_ALL", "C").args(arguments).arg(&far).arg(folder.path("lines"));
        must_have_used_far_memory(&finish(command).must_succeed(), 8 * MIB);
        assert!(std::fs::read(&plain).unwrap() == std::fs::read(&far).unwrap(), "the files differ ({tier})");
    }
}

#[test]
fn numpy_sort() {
    const PYTHON: &str = "/usr/bin/python3";
    if !can_run("numpy_sort", &[PYTHON, "/usr/lib/python3/dist-packages/numpy"]) {
        return;
    }
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
    let folder = Folder::new("numpy");
    let plain = finish(Command::new(PYTHON).args(["-c", script]).arg(folder.path("plain"))).must_succeed();
    for tier in TIERS {
        let mut command = run_on_tier("16M", tier, PYTHON);
        let done = finish(command.args(["-c", script]).arg(folder.path("far"))).must_succeed();
        must_have_used_far_memory(&done, 16 * MIB);
        assert_eq!(plain.out(), done.out(), "{tier}");
        assert!(std::fs::read(folder.path("plain")).unwrap() == std::fs::read(folder.path("far")).unwrap());
    }
}

#[test]
fn sqlite_in_memory() {
    if !can_run("sqlite_in_memory", &["/usr/bin/sqlite3"]) {
        return;
    }
    let script = b"\
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
    let plain = finish_with(Command::new("sqlite3").arg(":memory:"), script).must_succeed();
    for tier in TIERS {
        let done = finish_with(run_on_tier("8M", tier, "sqlite3").arg(":memory:"), script).must_succeed();
        must_have_used_far_memory(&done, 8 * MIB);
        assert_eq!(plain.out(), done.out(), "{tier}");
        assert!(done.out().ends_with("ok\n"));
    }
}

#[test]
fn gcc_on_a_large_file() {
    if !can_run("gcc_on_a_large_file", &["/usr/bin/gcc"]) {
        return;
    }
    let folder = Folder::new("gcc");
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
    let file = folder.path("large.c");
    std::fs::write(&file, source).unwrap();
    let arguments = ["-O2", "-c", "-o"];
    let plain = folder.path("plain.o");
    finish(Command::new("gcc").args(arguments).arg(&plain).arg(&file)).must_succeed();
    let far = folder.path("far.o");
    let done = finish(run_on("8M", "gcc").args(arguments).arg(&far).arg(&file)).must_succeed();
    must_have_used_far_memory(&done, 8 * MIB);
    assert!(std::fs::read(plain).unwrap() == std::fs::read(far).unwrap(), "the object files differ");
}

#[test]
fn two_processes_share_the_local_memory() {
    if !can_run("two_processes_share_the_local_memory", &["/usr/bin/sort"]) {
        return;
    }
    let folder = Folder::new("two");
    let script = "\
cd \"$1\"
sort --buffer-size=256M -o a.$2 a & first=$!
sort --buffer-size=256M -r -o b.$2 b & second=$!
wait $first && wait $second && cat a.$2 b.$2 | cksum";
    write_lines(&folder.path("a"), 4, 5 << 20);
    write_lines(&folder.path("b"), 5, 5 << 20);
    let arguments = |name| ["-c".into(), script.into(), "sh".into(), folder.path("").into_os_string(), name];
    let plain = finish(Command::new("sh").env("LC_ALL", "C").args(arguments("plain".into()))).must_succeed();
    for tier in TIERS {
        let mut command = run_on_tier("16M", tier, "sh");
        let done = finish(command.env("LC_ALL", "C").args(arguments("far".into()))).must_succeed();
        must_have_used_far_memory(&done, 16 * MIB);
        assert_eq!(plain.out(), done.out(), "{tier}");
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
    if !can_run("redis_with_bgsave", &["/usr/bin/redis-server", "/usr/bin/redis-cli"]) {
        return;
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

    for tier in TIERS {
        on_far_memory(tier, &plain, &load, &expected);
    }
    plain.stop();
}

/// The same load on far memory, a dump of it while it changes, and a benchmark.
fn on_far_memory(tier: &str, plain: &Redis, load: &str, expected: &str) {
    let far = Redis::start("redis-far", run_on_tier("8M", tier, "redis-server"), None);
    finish_with(far.cli().arg("--pipe"), load.as_bytes()).must_succeed();
    assert_eq!(far.digest(), expected);
    for key in ["key000000", "key012345", "key023999"] {
        assert_eq!(far.ask(&["get", key]), plain.ask(&["get", key]));
    }
    // The child of fork() writes what was there before, whatever the parent does meanwhile.
    assert!(far.ask(&["bgsave"]).contains("started"));
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
    loaded.stop();
    let err = far.stop();
    let done = Done { status: Default::default(), out: Vec::new(), err, elapsed: Default::default() };
    must_have_used_far_memory(&done, 8 * MIB);
}
