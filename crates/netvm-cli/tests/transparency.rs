//! What unmodified programs may do with their memory: each line of docs/transparency.md that names a test.

mod common;

use common::{Folder, Guard, Lender, TIERS, can_run, finish, netvm, run_on, run_on_tier, signal, wait};
use std::io::{BufRead as _, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

fn compile(folder: &Folder, name: &str) -> PathBuf {
    let program = folder.path(name);
    let options = ["-O1", "-g", "-Wall", "-Wno-unused-function", "-fno-builtin-malloc", "-pthread", "-o"];
    let source = source(&format!("c/{name}.c"));
    let mut compiler = Command::new("cc");
    compiler.args(options).arg(&program).arg(source);
    // Without its headers, if it is here.
    let arguments = ["-DLIBURING", "-Wl,--no-as-needed", "-l:liburing.so.2"];
    let linked = finish(Command::new("cc").args(compiler.get_args()).args(arguments));
    if !linked.status.success() {
        finish(&mut compiler).must_succeed();
    }
    program
}

/// A C program that checks all by itself, first without netvm.
#[track_caller]
fn c_program(name: &str, tiers: &[&str], links: &[&str]) {
    c_program_without(name, tiers, links, "");
}

/// The same without some features of the kernel.
#[track_caller]
fn c_program_without(name: &str, tiers: &[&str], links: &[&str], without: &str) {
    let folder = Folder::new(&format!("{name}{}", without.len()));
    if !can_run(name, &["/usr/bin/gcc"]) {
        return;
    }
    let program = compile(&folder, name);
    let plain = finish(Command::new(&program).arg(folder.path(""))).must_succeed();
    assert!(plain.out().ends_with("ok\n"), "{}", plain.out());
    for tier in tiers {
        for link in links {
            let mut far = run_on_tier("8M", tier, &program);
            far.env("NETVM_LINK", link).env("NETVM_WITHOUT", without);
            let done = finish(far.arg(folder.path(""))).must_succeed();
            assert!(done.out().ends_with("ok\n"), "{}", done.out());
            done.must_have_used_far_memory();
        }
    }
}

#[test]
fn kept_pages() {
    c_program("kept", &TIERS[..1], &["auto"]);
}

/// The same as before Linux 6.8, where the pager does not see what the kernel has pinned.
#[test]
fn kept_pages_where_pages_are_copied() {
    c_program_without("kept", &TIERS[..1], &["auto"], "move,poison,wp-async");
}

/// Who cannot do without io_uring or libaio, and fails, is told why; who can is left alone.
#[test]
fn who_fails_without_asynchronous_reads_is_told_why() {
    if !can_run("who_fails_without_asynchronous_reads_is_told_why", &["/usr/bin/python3"]) {
        return;
    }
    let number = if cfg!(target_arch = "x86_64") { 206 } else { 0 };
    let folder = Folder::new("refused");
    let lender = Lender::start(&folder, "64M");
    let ask = |setup: usize, without: &str, fails: bool| {
        let program = format!(
            "import ctypes, errno, sys; kernel = ctypes.CDLL(None, use_errno=True); place = ctypes.create_string_buffer(256); \
             ok = kernel.syscall({setup}, 4, place) >= 0; print(ok or errno.errorcode[ctypes.get_errno()]); \
             sys.exit(7 if {} and not ok else 0)",
            if fails { "True" } else { "False" }
        );
        let mut run = netvm();
        run.args([
            "run",
            "--local",
            "8M",
            "--lender",
            &lender.address,
            "--",
            "/usr/bin/python3",
            "-c",
            &program,
        ]);
        finish(run.env("NETVM_WITHOUT", without))
    };
    const SAID: &str = "wanted io_uring or asynchronous I/O and was told ENOSYS";
    // io_setup, io_uring_setup.
    for setup in [number, 425] {
        let done = ask(setup, "move", true);
        assert!(done.out == b"ENOSYS\n" && done.status.code() == Some(7), "{done:?}");
        assert!(done.err.contains(SAID), "{}", done.err);
        let done = ask(setup, "move", false);
        assert!(done.out == b"ENOSYS\n" && done.err.is_empty(), "{done:?}");
    }
    let done = ask(number, &std::env::var("NETVM_WITHOUT").unwrap_or_default(), true);
    assert_eq!(done.err.contains(SAID), !netvm_sys::uffd::can_move(), "{}", done.err);
}

/// It would wait for ever for a write that is refused.
#[test]
fn open_mpi_is_told_not_to_write_into_others() {
    if !can_run("open_mpi_is_told_not_to_write_into_others", &[]) {
        return;
    }
    const NAME: &str = "OMPI_MCA_btl_vader_single_copy_mechanism";
    let folder = Folder::new("mpi");
    let lender = Lender::start(&folder, "64M");
    let run = |without: &str, own: Option<&str>| {
        let mut run = netvm();
        run.args(["run", "--local", "8M", "--lender", &lender.address, "--", "/usr/bin/printenv", NAME]);
        run.envs(own.map(|own| (NAME, own))).env("NETVM_WITHOUT", without);
        finish(&mut run).out()
    };
    assert_eq!(run("move", None), "emulated\n");
    assert_eq!(run("move", Some("none")), "none\n");
    if netvm_sys::uffd::can_move() {
        assert_eq!(run("", None), "");
    }
}

/// Memory of a kind that cannot be far is not bounded, and `--stats` says so of a process that has more of it than was to be expected.
#[test]
fn what_is_local_for_other_reasons_is_told_of() {
    if !can_run("what_is_local_for_other_reasons_is_told_of", &["/usr/bin/python3"]) {
        return;
    }
    let folder = Folder::new("other");
    let lender = Lender::start(&folder, "256M");
    let shared = ["--lender", &lender.address];
    // Not what a private lender has, which is a process of the run's; but what a child has, and one that is killed.
    let cases: [(&str, &str, &[&str], bool); 5] = [
        ("MAP_SHARED", "", &shared, true),
        ("MAP_PRIVATE", "", &shared, false),
        ("MAP_PRIVATE", "", &[], false),
        ("MAP_SHARED", "if os.fork(): os._exit(os.waitstatus_to_exitcode(os.wait()[1]))", &shared, true),
        ("MAP_SHARED", "if os.fork(): os.wait(), os.kill(os.getpid(), 9)", &shared, true),
    ];
    for (flags, before, lenders, is_told) in cases {
        let program = format!(
            "import mmap, os\n{before}\nm = mmap.mmap(-1, 160 << 20, flags=mmap.{flags} | mmap.MAP_ANONYMOUS)\n\
             for at in range(0, 160 << 20, 4096): m[at:at + 8] = at.to_bytes(8, 'little')"
        );
        let mut run = netvm();
        run.args(["run", "--local", "32M", "--stats"]).args(lenders).args(["--", "/usr/bin/python3", "-c"]);
        let done = finish(run.arg(program));
        assert_eq!(done.status.success(), !before.contains("kill"), "{done:?}");
        assert!(done.err.contains("largest process "), "{done:?}");
        let told = done.err.contains("is local, and not bounded by --local");
        assert_eq!(told, is_told, "{flags} {before} {lenders:?}: {}", done.err);
    }
}

/// Children of forks read, too, and one of two lenders is killed; with moves and with copies.
#[test]
fn what_devices_write_outlives_forks_and_a_lender() {
    if !can_run("what_devices_write_outlives_forks_and_a_lender", &["/usr/bin/gcc"]) {
        return;
    }
    let folder = Folder::new("direct");
    let program = compile(&folder, "direct");
    for without in ["", "move,poison,wp-async"] {
        let lenders = ["one", "two"].map(|name| Lender::named(&folder, name, "256M"));
        let mut run = netvm();
        run.args(["run", "--local", "8M", "--replicas", "2", "--json"]);
        lenders.iter().for_each(|lender| {
            run.args(["--lender", &lender.address]);
        });
        run.arg("--").arg(&program).arg(folder.path("")).env("NETVM_WITHOUT", without);
        let mut run = Guard(run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
        let mut out = std::io::BufReader::new(run.0.stdout.take().unwrap());
        let mut said = String::new();
        out.read_line(&mut said).unwrap();
        lenders[1].signal("KILL");
        let status = wait(&mut run.0, common::PATIENCE).expect("the program hangs");
        out.read_to_string(&mut said).unwrap();
        let mut err = String::new();
        run.0.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        assert!(status.success() && said == "begun\nok\n", "{without}: {status} {said}{err}");
        assert!(err.contains(&format!("\"lost\":[\"{}\"]", lenders[1].address)), "{without}: {err}");
    }
}

#[test]
fn raw_system_calls() {
    c_program("raw", &TIERS[..1], &["auto"]);
}

/// Go's runtime gives its memory back where nobody sees it: what it maps stays here, what C allocates does not.
#[test]
fn mappings_of_go_stay_local() {
    if !can_run("mappings_of_go_stay_local", &["/usr/bin/gcc"]) {
        return;
    }
    let folder = Folder::new("golike");
    let program = folder.path("golike");
    let mut compiler = Command::new("cc");
    finish(compiler.args(["-O1", "-Wall", "-rdynamic", "-o"]).arg(&program).arg(source("c/golike.c")))
        .must_succeed();
    let done = finish(&mut run_on("8M", &program)).must_succeed();
    assert!(done.out().ends_with("ok\n"), "{}", done.out());
    done.must_have_used_far_memory();
}

/// What a program says of its memory by madvise(2) is heard.
#[test]
fn advice_of_the_program_is_followed() {
    if !can_run("advice_of_the_program_is_followed", &[PYTHON]) {
        return;
    }
    let script = "import mmap, sys\n\
        m = mmap.mmap(-1, int(sys.argv[2]) << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n\
        m.madvise(getattr(mmap, 'MADV_' + sys.argv[1]))\n\
        if len(m) < 48 << 20: m.resize(48 << 20)\n\
        each = range(0, len(m), 4096)\n\
        for at in each: m[at:at + 16] = at.to_bytes(8, 'little') + hash(at * 7 + 1).to_bytes(8, 'little')\n\
        assert all(int.from_bytes(m[at:at + 8], 'little') == at for at in each)\n";
    let figures = |advice: &str, mib: &str| {
        let mut run = run_on_tier("8M", "lender", Path::new(PYTHON));
        let done = finish(run.args(["-c", script, advice, mib]).env("NETVM_LINK", "socket")).must_succeed();
        let summary = done.summary();
        ["faults", "prefetched"].map(|name| summary[name].as_u64().unwrap())
    };
    let [normal, ahead] = figures("NORMAL", "48");
    assert!(ahead > 1000, "{ahead}");
    let [random, alone] = figures("RANDOM", "48");
    assert!(
        random > normal + 8000 && alone < ahead / 2,
        "{normal} and {random} faults, {alone} of {ahead} ahead"
    );
    // Memory that grows goes on to be used as it is.
    let [grown, alone] = figures("RANDOM", "4");
    assert!(
        grown > normal + 8000 && alone < ahead / 2,
        "{normal} and {grown} faults, {alone} of {ahead} ahead"
    );
    let [in_order, _] = figures("SEQUENTIAL", "48");
    assert!(in_order < normal + 500, "{normal} {in_order}");
}

/// Named by threads, while it is dropped, moved, unmapped and protected, and children are forked.
#[test]
fn pages_that_are_named_may_go_any_way() {
    c_program("named", &TIERS, &["auto", "socket"]);
    c_program_without("named", &TIERS[..1], &["auto"], "move,poison,wp-async");
}

/// examples/c/named_probe.c: a program names rows here and there before it uses them, all at once or one by one, and hardly ever faults.
#[test]
fn pages_that_the_program_names_come_without_faults() {
    const TEST: &str = "pages_that_the_program_names_come_without_faults";
    if !can_run(TEST, &["/usr/bin/gcc"]) {
        return;
    }
    let folder = Folder::new("named");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/c/named_probe.c");
    let text = std::fs::read_to_string(path).unwrap();
    let call = "syscall(SYS_process_madvise, self, pages, (long)BATCH, MADV_WILLNEED, 0);";
    assert!(text.contains(call));
    let singly =
        "(void)self; for (int i = 0; i < BATCH; i++) madvise(pages[i].iov_base, PAGE, MADV_WILLNEED);";
    for (name, text) in [("together", text.clone()), ("singly", text.replace(call, singly))] {
        let (source, program) = (folder.path(&format!("{name}.c")), folder.path(name));
        std::fs::write(&source, text).unwrap();
        let mut compiler = Command::new("cc");
        compiler.args(["-O2", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program).arg(&source);
        finish(&mut compiler).must_succeed();
        let plain = finish(Command::new(&program).args(["32", "100000"])).must_succeed();
        for link in ["socket", "shm"] {
            let run = |more: &[&str]| {
                let mut far = run_on_tier("8M", "lender", &program);
                let done = finish(far.args(["32", "100000"]).args(more).env("NETVM_LINK", link));
                let done = done.must_succeed();
                assert_eq!(done.out(), plain.out());
                let summary = done.summary();
                ["faults", "named"].map(|name| summary[name].as_u64().unwrap())
            };
            let ([faults, unnamed], [few, named]) = (run(&["no"]), run(&[]));
            assert!(unnamed == 0 && faults > 50_000, "{name} {link}: {faults} faults, {unnamed} named");
            assert!(
                named > 50_000 && few < faults / 4,
                "{name} {link}: {few} of {faults} faults, {named} named"
            );
        }
    }
}

#[test]
fn signals_and_stacks() {
    c_program("signals", &TIERS, &["auto"]);
}

#[test]
fn paging_moving_advising() {
    c_program("paging", &TIERS[..1], &["auto", "socket"]);
}

#[test]
fn java() {
    if !can_run("java", &["/usr/bin/javac", "/usr/bin/java"]) {
        return;
    }
    let folder = Folder::new("java");
    finish(Command::new("javac").arg("-d").arg(folder.path("")).arg(source("programs/Heap.java")))
        .must_succeed();
    let arguments = |collector: &str| {
        let classes = folder.path("").display().to_string();
        [collector.to_owned(), "-Xmx96m".to_owned(), "-cp".to_owned(), classes, "Heap".to_owned()]
    };
    let plain = finish(Command::new("java").args(arguments("-XX:+UseSerialGC"))).must_succeed();
    for collector in ["-XX:+UseSerialGC", "-XX:+UseParallelGC", "-XX:+UseG1GC"] {
        let done = finish(run_on("24M", "java").args(arguments(collector))).must_succeed();
        assert_eq!(done.out(), plain.out(), "{collector}");
        done.must_have_used_far_memory();
    }
    // Its heap would be local.
    let done = finish(run_on("24M", "java").args(arguments("-XX:+UseZGC")));
    assert_eq!(done.status.code(), Some(125), "{}", done.err);
    assert!(done.err.contains("ZGC") && done.err.contains("-XX:+UseG1GC"), "{}", done.err);
}

#[test]
fn python_processes() {
    if !can_run("python_processes", &["/usr/bin/python3"]) {
        return;
    }
    let script = source("programs/processes.py");
    let plain = finish(Command::new("/usr/bin/python3").arg(&script)).must_succeed();
    let done = finish(run_on("12M", "/usr/bin/python3").arg(&script)).must_succeed();
    assert_eq!(done.out(), plain.out());
    done.must_have_used_far_memory();
}

#[test]
fn stress_ng() {
    if !can_run("stress_ng", &["/usr/bin/stress-ng"]) {
        return;
    }
    let folder = Folder::new("stress");
    let stressors = "--vm 1 --vm-bytes 32M --vm-method all --vm-ops 1500 --mmap 1 --mmap-bytes 24M --mmap-ops 20 --mremap 1 \
        --mremap-bytes 16M --mremap-ops 20 --malloc 1 --malloc-bytes 16M --malloc-ops 1500 --bigheap 1 --bigheap-ops 30 --stack 1 \
        --stack-ops 20 --sigsegv 1 --sigsegv-ops 200 --userfaultfd 1 --userfaultfd-ops 500 --vm-splice 1 --vm-splice-ops 1000 \
        --fork 1 --fork-ops 15 --madvise 1 --madvise-ops 15 --mlock 1 --mlock-ops 50 --timeout 6 --verify";
    let mut far = run_on("12M", "stress-ng");
    // It leaves files where it is started.
    let done = finish(far.args(stressors.split_whitespace()).current_dir(folder.path(""))).must_succeed();
    let said = done.out() + &done.err;
    assert!(said.contains("successful run completed") && !said.contains("fail:"), "{said}");
    done.must_have_used_far_memory();
}

#[test]
fn gdb() {
    if !can_run("gdb", &["/usr/bin/gdb", "/usr/bin/gcc"]) {
        return;
    }
    let folder = Folder::new("gdb");
    let program = compile(&folder, "debugged");
    let mut far = run_on("8M", "gdb");
    far.args(["-batch", "-ex", "break stop_here", "-ex", "run", "-ex", "backtrace"]);
    // Of the first page long ago, of the last just now; then a change, and on.
    far.args([
        "-ex",
        "print numbers[5]",
        "-ex",
        "print numbers[4194303]",
        "-ex",
        "set var numbers[4194303] = 1",
    ]);
    far.args(["-ex", "call (long)netvm_touch((char *)&numbers[5], 8)", "-ex", "print numbers[5]"]);
    let done = finish(far.args(["-ex", "continue"]).arg(&program)).must_succeed();
    let (out, err) = (done.out(), &done.err);
    assert!(out.contains("stop_here ()") && out.contains("in main ()"), "{out}\n{err}");
    assert!(out.contains("= 29360122"), "{out}\n{err}");
    // What is not here cannot be read, and is never wrong.
    assert!(out.contains("= 36") || err.contains("Cannot access memory"), "{out}\n{err}");
    let count = 4_i64 << 20;
    let sum = |numbers: std::ops::Range<i64>| numbers.map(|number| number * 7 + 1).sum::<i64>();
    let expected = sum(0..count) - (count - 1) * 7 + sum(count - 1000..count);
    assert!(out.contains(&format!("sum {expected}\n")), "{out}\n{err}");
    done.must_have_used_far_memory();
}

/// It stops every thread, and reads what they are about to write, which may be far away.
#[test]
fn strace_that_follows_all_threads() {
    if !can_run("strace_that_follows_all_threads", &["/usr/bin/strace", PYTHON]) {
        return;
    }
    let folder = Folder::new("strace");
    let (script, seen) = (folder.path("writes.py"), folder.path("seen"));
    let lines = [
        "import os, threading",
        "block = os.urandom(4096)",
        "memory = bytearray(block * 8192)",
        "def work(thread):",
        "    null, view = os.open('/dev/null', os.O_WRONLY), memoryview(memory)",
        "    for at in range(thread << 16, len(memory), 1 << 18):",
        "        os.write(null, view[at:at + (1 << 16)])",
        "threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]",
        "[thread.start() for thread in threads]",
        "[thread.join() for thread in threads]",
        "os.setgid(os.getgid())",
        "child = os.fork()",
        "if child == 0:",
        "    work(0)",
        "    os._exit(0 if memory == block * 8192 else 1)",
        "print(memory == block * 8192, os.waitpid(child, 0)[1])",
    ];
    std::fs::write(&script, lines.join("\n")).unwrap();
    let mut far = run_on("8M", "timeout");
    far.args(["60", "strace", "-f", "-s", "4096", "-e", "trace=write,clone,clone3,exit", "-o"]).arg(&seen);
    let done = finish(far.args([PYTHON]).arg(&script)).must_succeed();
    assert_eq!(done.out(), "True 0\n", "{}", done.err);
    done.must_have_used_far_memory();
    let seen = std::fs::read_to_string(&seen).unwrap();
    assert_eq!(seen.lines().filter(|line| line.ends_with("= 65536")).count(), 512 + 128);
}

#[test]
fn a_library_of_another_build_says_so() {
    if !can_run("a_library_of_another_build_says_so", &["/usr/bin/dd"]) {
        return;
    }
    // The second word of a run file tells builds apart.
    let script = "printf another. | dd of=\"$NETVM_RUN\" bs=8 seek=1 conv=notrunc status=none; exec sort --buffer-size=64M /dev/null";
    let done = finish(run_on("8M", "sh").args(["-c", script]));
    assert_eq!(done.status.code(), Some(125), "{}", done.err);
    assert!(
        done.err.contains("another build of netvm") && done.err.contains("libnetvm_preload.so"),
        "{}",
        done.err
    );
}

/// More than is local, all of it touched; then what stands behind it.
const FILL: &str = "import os, sys; block = os.urandom(4096); memory = bytearray(block * 4096); sum(memory[::4096]); exec(sys.argv[1])";
const PYTHON: &str = "/usr/bin/python3";

#[test]
fn what_a_process_held_before_exec_is_for_others() {
    if !can_run("what_a_process_held_before_exec_is_for_others", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("exec");
    // Into a program that is not of the run, and into one that needs no far memory.
    for environment in ["{}", "os.environ"] {
        let fifo = folder.path("fifo");
        finish(Command::new("mkfifo").arg(&fifo)).must_succeed();
        let becomes = format!("os.execve('/bin/sh', ['sh', '-c', 'echo; exec sleep 60'], {environment})");
        let script = "\"$0\" -c \"$1\" \"$2\" > \"$3\" & read line < \"$3\"; timeout 30 \"$0\" -c \"$1\" 'print(memory == block * 4096)'; kill -9 $!";
        let mut far = run_on("8M", "sh");
        let done = finish(far.args(["-c", script, PYTHON, FILL, &becomes]).arg(&fifo)).must_succeed();
        assert_eq!(done.out(), "True\n", "{}", done.err);
        // Not by what a process gets beyond the budget.
        assert!(!done.err.contains("gives nothing back"), "{}", done.err);
        done.must_have_used_far_memory();
        std::fs::remove_file(&fifo).unwrap();
    }
}

#[test]
fn who_gives_nothing_back_is_named_and_others_go_on() {
    if !can_run("who_gives_nothing_back_is_named_and_others_go_on", &[PYTHON]) {
        return;
    }
    let folder = Folder::new("stopped");
    let fifo = folder.path("fifo");
    finish(Command::new("mkfifo").arg(&fifo)).must_succeed();
    let script =
        "\"$0\" -c \"$1\" 'print(flush=True); import time; time.sleep(60)' > \"$2\" & read line < \"$2\"
        kill -STOP $!; timeout 60 \"$0\" -c \"$1\" 'print(memory == block * 4096)'; echo $!; kill -9 $!";
    let mut far = run_on("8M", "sh");
    let done = finish(far.args(["-c", script, PYTHON, FILL]).arg(&fifo)).must_succeed();
    let out = done.out();
    let (result, holder) = out.split_once('\n').unwrap();
    assert_eq!(result, "True", "{}", done.err);
    let line = format!("netvm: process {}", holder.trim());
    let said = done.err.lines().filter(|said| said.starts_with(&line)).collect::<Vec<_>>();
    assert!(said.len() == 1 && said[0].contains("gives nothing back"), "{}", done.err);
    // A little beyond.
    assert!(done.summary()["local_bytes_peak"].as_u64().unwrap() <= 9 << 20, "{}", done.err);
}

/// Whether whoever runs this may mount /proc again.
fn can_mount(test: &str) -> bool {
    let can = Command::new("unshare").args(["-m", "mount", "-t", "proc", "proc", "/proc"]).status();
    let can = can.is_ok_and(|status| status.success());
    if !can {
        println!("skipped ({test}): no right to mount /proc");
    }
    can
}

#[test]
fn whom_proc_hides_is_not_taken_for_dead() {
    const TEST: &str = "whom_proc_hides_is_not_taken_for_dead";
    // The children have another user, and cannot see their parent. All touch all of their memory in turn; what is resident then, together.
    const PROGRAM: &str = "
import os
def resident(): return int(open('/proc/self/status').read().split('RssAnon:')[1].split()[0]) * 1024
before = resident()
memory = bytearray(os.urandom(4096) * 8192)
def touch():
    for page in range(0, len(memory), 4096): memory[page] = page >> 12 & 255
touch()
children = []
for child in range(3):
    (asked, ask), (answered, answer) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.setgid(65534)
        os.setuid(65534)
        for turn in range(3): touch()
        os.write(answer, b'x')
        os.read(asked, 1)
        os.write(answer, str(resident() - before).encode())
        os._exit(0)
    os.read(answered, 1)
    children.append((ask, answered))
for turn in range(3): touch()
total = resident() - before
for ask, answered in children:
    os.write(ask, b'x')
    total += int(os.read(answered, 100))
print(total)
";
    if !can_run(TEST, &[PYTHON, "/usr/bin/unshare"]) || !can_mount(TEST) {
        return;
    }
    let mut far = Command::new("unshare");
    far.args(["-m", "sh", "-c", "mount -t proc -o hidepid=2 proc /proc && exec \"$@\"", "sh"]);
    let run = run_on("8M", PYTHON);
    let done = finish(far.arg(run.get_program()).args(run.get_args()).args(["-c", PROGRAM])).must_succeed();
    let resident: u64 = done.out().trim().parse().unwrap();
    assert!(resident < 11 << 20, "{resident} bytes of 8 MiB\n{}", done.err);
}

#[test]
fn what_a_process_of_an_ended_name_space_held_is_for_others() {
    const TEST: &str = "what_a_process_of_an_ended_name_space_held_is_for_others";
    if !can_run(TEST, &[PYTHON, "/usr/bin/unshare"]) || !can_mount(TEST) {
        return;
    }
    // The second one is there, and waits for memory, before the first one ends with its name space.
    let folder = Folder::new("ended");
    let fifo = folder.path("fifo");
    finish(Command::new("mkfifo").arg(&fifo)).must_succeed();
    for beside in [false, true] {
        let (before, sleep) = if beside { ("&", "time.sleep(0.7)") } else { ("", "0") };
        let script = format!(
            "unshare -pf \"$0\" -c \"$1\" 'import time; print(flush=True); {sleep}; os._exit(0)' > \"$2\" {before}
            timeout 60 \"$0\" -c \"$1\" 'print(memory == block * 4096)'"
        );
        let (script, out) = match beside {
            true => (script.replace("timeout", "read line < \"$2\"; timeout"), fifo.clone()),
            false => (script, folder.path("out")),
        };
        let done = finish(run_on("8M", "sh").args(["-c", &script, PYTHON, FILL]).arg(out)).must_succeed();
        assert_eq!(done.out(), "True\n", "{}", done.err);
        assert!(!done.err.contains("gives nothing back"), "{}", done.err);
        done.must_have_used_far_memory();
    }
}

#[test]
fn processes_in_the_background_keep_the_run() {
    if !can_run("processes_in_the_background_keep_the_run", &[PYTHON]) {
        return;
    }
    // One that is nobody's child any more and begins with far memory when the program has ended.
    let script = "(setsid \"$0\" -c 'import time; time.sleep(1); '\"$1\" 'print(memory == block * 4096)' &); echo started";
    let done = finish(run_on("8M", "sh").args(["-c", script, PYTHON, FILL])).must_succeed();
    assert_eq!(done.out(), "started\nTrue\n", "{}", done.err);
    assert!(done.err.contains("waiting for 1 background process"), "{}", done.err);
    done.must_have_used_far_memory();
}

#[test]
fn a_run_that_waits_for_the_background_ends_when_told_to() {
    if !can_run("a_run_that_waits_for_the_background_ends_when_told_to", &[]) {
        return;
    }
    let mut far = netvm();
    far.args(["run", "--lend-size", "1G", "--", "sh", "-c", "sleep 60 > /dev/null 2>&1 & echo $!"]);
    let mut run = Guard(far.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut job = String::new();
    std::io::BufReader::new(run.0.stdout.take().unwrap()).read_line(&mut job).unwrap();
    let mut said = std::io::BufReader::new(run.0.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.contains("waiting for 1 background process"), "{line}");
    signal(run.0.id(), "TERM");
    let status = wait(&mut run.0, Duration::from_secs(30)).expect("it does not end");
    assert!(status.success(), "{status:?}");
    signal(job.trim().parse().unwrap(), "KILL");
}

#[test]
fn a_program_that_is_local_is_told_of() {
    if !can_run("a_program_that_is_local_is_told_of", &["/usr/bin/env", PYTHON]) {
        return;
    }
    let local = |arguments: &[&str]| {
        let done = finish(run_on("8M", arguments[0]).args(&arguments[1..]));
        let said = done.err.lines().filter(|line| line.contains("without the preloaded library")).count();
        let preloaded = done.summary()["preloaded"].as_bool().unwrap();
        assert_eq!(said, usize::from(!preloaded), "{}", done.err);
        (!preloaded, done.status.code())
    };
    assert_eq!(local(&["env", "-i", "/bin/sort", "/dev/null"]), (true, Some(0)));
    assert_eq!(local(&["sh", "-c", "exec env -u LD_PRELOAD cat /dev/null"]), (true, Some(0)));
    for fine in [
        &["env", "sort", "/dev/null"][..],
        // Ends without a word; by a signal; with another name.
        &["sh", "-c", "exit 3"],
        &["sh", "-c", "kill $$"],
        &[PYTHON, "-c", "open('/proc/self/comm', 'w').write('another')"],
    ] {
        assert!(!local(fine).0, "{fine:?}");
    }
}

/// Databases reserve more addresses than there are by default: they are told, and the user what to do.
#[test]
fn who_finds_no_addresses_is_told_of() {
    if !can_run("who_finds_no_addresses_is_told_of", &[PYTHON]) {
        return;
    }
    let reserve = "import mmap, sys\n\
        try: mmap.mmap(-1, 3 << 40, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)\n\
        except OSError as error: print(error.errno)";
    let run = |more: &[&str]| {
        let mut command = netvm();
        command.args(["run", "--local", "8M"]).args(more).args(["--", PYTHON, "-c", reserve]);
        let done = finish(&mut command);
        assert!(done.status.success(), "{}", done.err);
        (String::from_utf8_lossy(&done.out).trim().to_owned(), done.err)
    };
    let (refused, said) = run(&[]);
    assert_eq!(refused, libc::ENOMEM.to_string(), "{said}");
    assert!(said.contains("wanted 3 TiB") && said.contains("larger --area"), "{said}");
    assert_eq!(said.matches("--area").count(), 1, "{said}");
    let (refused, said) = run(&["--area", "4T"]);
    assert!(refused.is_empty() && !said.contains("--area"), "{refused}: {said}");
    // Who is content with half of it is not told of, as runtimes are that reserve addresses; memory of another kind is no substitute.
    for (bytes, protection, is_told) in
        [("7 << 38", "0", false), ("64 << 20", "0", true), ("7 << 38", "3", true)]
    {
        let mut command = netvm();
        let less = format!(
            "{reserve}\nmmap.mmap(-1, {bytes}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, {protection})"
        );
        command.args(["run", "--local", "8M", "--area", "2T", "--", PYTHON, "-c", &less]);
        let done = finish(&mut command);
        assert!(done.status.success(), "{}", done.err);
        assert_eq!(done.err.contains("larger --area"), is_told, "{bytes}, {protection}: {}", done.err);
    }
}

#[test]
fn a_library_that_the_loader_cannot_find_is_refused() {
    let folder = Folder::new("library");
    for name in ["a b", "a:b"] {
        let copy = folder.path(name);
        std::fs::write(&copy, "").unwrap();
        let done = finish(netvm().args(["run", "--", "true"]).env("NETVM_PRELOAD", &copy));
        assert!(done.err.contains("space or colon") && done.err.lines().count() == 1, "{}", done.err);
        assert!(!done.status.success());
    }
    if !can_run("a_library_that_the_loader_cannot_find_is_refused", &[]) {
        return;
    }
    // A relative path holds for programs that are started elsewhere.
    let beside = Path::new(env!("CARGO_BIN_EXE_netvm")).parent().unwrap();
    let library = [beside.join("libnetvm_preload.so"), beside.join("deps/libnetvm_preload.so")];
    let library = library
        .iter()
        .filter(|path| path.exists())
        .max_by_key(|path| path.metadata().unwrap().modified().unwrap());
    let library = library.unwrap();
    let mut far = run_on("8M", "sh");
    far.args(["-c", "cd /; exec sort /dev/null"]).current_dir(library.parent().unwrap());
    let done = finish(far.env("NETVM_PRELOAD", library.file_name().unwrap())).must_succeed();
    assert_eq!(done.summary()["preloaded"], true, "{}", done.err);
    assert!(!done.err.contains("ld.so"), "{}", done.err);
}
