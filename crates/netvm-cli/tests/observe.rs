//! Watching runs: `netvm top`, `netvm metrics`, `--trace` and `--report`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

mod common;
use common::{Folder, Guard, Lender, can_run, finish, netvm, until, wait};

const PYTHON: &str = "/usr/bin/python3";

fn look(pid: u32) -> Option<Value> {
    let done = finish(netvm().args(["top", "--json", "--interval", "0.1", "--pid", &pid.to_string()]));
    if !done.status.success() {
        assert!(done.err.contains("no `netvm run` that goes on"), "{}", done.err);
        return None;
    }
    Some(serde_json::from_str(&done.out()).unwrap())
}

/// Its program goes on, on its lender.
#[test]
fn a_run_whose_netvm_was_killed_is_seen_as_long_as_its_program_lives() {
    if !can_run("a_run_whose_netvm_was_killed_is_seen_as_long_as_its_program_lives", &[PYTHON]) {
        return;
    }
    let mut command = netvm();
    command.args(["run", "--local", "8M", "--", PYTHON, "-c"]);
    // Bytes that are not zero, which is what a page would be that came from nowhere.
    command.arg(
        "x = bytearray(b'netvm' * (32 << 18)); print(1, flush=True); input(); print(sum(x), flush=True)",
    );
    let mut run = Guard(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let pid = run.0.id();
    let mut said = BufReader::new(run.0.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    let mut input = run.0.stdin.take().unwrap();
    run.0.kill().unwrap();
    run.0.wait().unwrap();
    let seen = look(pid).expect("it goes on");
    assert!(has_private_lender(pid));
    assert!(seen["command"].as_str().unwrap().contains("bytearray"), "{seen}");
    input.write_all(b"\n").unwrap();
    line.clear();
    said.read_line(&mut line).unwrap();
    let sum = b"netvm".iter().map(|&byte| u64::from(byte) << 23).sum::<u64>();
    assert_eq!(line, format!("{sum}\n"));
    until("nothing of it is left", || look(pid).is_none() && !has_private_lender(pid));
}

/// Whether a lender runs for this `netvm run` alone.
fn has_private_lender(run: u32) -> bool {
    let socket = format!("/netvm-{run}-0/lender");
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let mut lines =
        processes.filter_map(|process| std::fs::read_to_string(process.path().join("cmdline")).ok());
    lines.any(|line| line.contains("--private") && line.contains(&socket))
}

#[test]
fn a_run_is_seen_while_it_goes_on_and_afterwards() {
    if !can_run("a_run_is_seen_while_it_goes_on_and_afterwards", &[]) {
        return;
    }
    let folder = Folder::new("observe");
    let (trace, report) = (folder.path("trace.json"), folder.path("report.svg"));
    let mut command = netvm();
    command.args(["run", "--local", "16M", "--lend-size", "1G", "--stats"]);
    command.arg("--trace").arg(&trace).arg("--report").arg(&report).arg("--");
    // A control character in an argument is not the terminal's.
    command.args([
        "sh",
        "-c",
        "while :; do \"$0\" demo-worker 67108864; done",
        env!("CARGO_BIN_EXE_netvm"),
        "\x1b[2J",
    ]);
    let mut run = Guard(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let pid = run.0.id();
    let number = |look: &Value, name: &str| look[name].as_f64().unwrap();
    let mut best = Value::Null;
    until("the run has pages on its lender", || {
        let Some(look) = look(pid) else { return false };
        best = look;
        number(&best, "far_bytes") > 32e6 && number(&best, "faults_per_s") > 0.0
    });
    assert_eq!(best["pid"], pid);
    assert!(
        best["command"].as_str().unwrap().contains("demo-worker")
            && best["command"].as_str().unwrap().ends_with("?[2J")
            && best["command"].as_str().unwrap().starts_with("sh -c")
    );
    assert!(
        number(&best, "local_bytes") <= number(&best, "budget_bytes") && best["budget_bytes"] == 16 << 20
    );
    assert!(!best["processes"].as_array().unwrap().is_empty(), "{best}");
    let text = finish(netvm().args(["top", "--once", "--interval", "0.1"])).must_succeed().out();
    assert!(text.contains(&format!("run {pid} (sh")) && text.contains("fetched"), "{text}");

    let metrics = finish(netvm().args(["metrics", "--print"])).must_succeed().out();
    let faults = |text: &str| {
        let start = format!("netvm_run_faults_total{{pid=\"{pid}\"");
        let line = text.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("{text}"));
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let first = faults(&metrics);
    // A histogram's last bucket has all of it, and lenders have what was moved.
    let value = |start: &str| -> f64 {
        let line = metrics
            .lines()
            .find(|line| line.starts_with(start))
            .unwrap_or_else(|| panic!("{start}: {metrics}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let of_run = format!("{{pid=\"{pid}\"");
    let infinite =
        metrics.lines().find(|line| line.contains("le=\"+Inf\"") && line.contains(&of_run)).unwrap();
    assert_eq!(
        infinite.rsplit(' ').next().unwrap().parse::<f64>().unwrap(),
        value(&format!("netvm_run_read_seconds_count{of_run}"))
    );
    assert!(value(&format!("netvm_run_lender_written_bytes_total{of_run}")) > 0.0);
    assert!(
        best["read_us_p99"].as_f64().unwrap_or(f64::MAX) >= best["read_us_p50"].as_f64().unwrap_or(0.0),
        "{best}"
    );
    assert_eq!(best["each_lender"][0]["lender"], "private lender");
    let held = best["each_lender"][0]["held_bytes"].as_u64().unwrap();
    let class = best["each_lender"][0]["class"].as_str().unwrap();
    assert!(held > 0 && best["held_bytes"][class] == held, "{best}");
    assert!(metrics.contains(&format!("netvm_run_held_bytes{of_run}")), "{metrics}");
    assert!(
        metrics.contains("# TYPE netvm_run_faults_total counter")
            && metrics.contains("# TYPE netvm_run_far_pages gauge")
    );
    let mut server = netvm();
    server.args(["metrics", "--listen", "127.0.0.1:0"]).stdout(Stdio::piped());
    let mut server = Guard(server.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("metrics at http://").unwrap().strip_suffix("/metrics").unwrap();
    let get = |path: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let answer = get("/metrics");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("text/plain; version=0.0.4"), "{answer}");
    assert!(faults(&answer) >= first);
    assert!(get("/nothing").starts_with("HTTP/1.1 404"));

    // The program is told to stop; what was written of it is whole.
    netvm_sys::signal::send(pid, netvm_sys::signal::SIGTERM).unwrap();
    assert!(wait(&mut run.0, common::PATIENCE).is_some());
    assert!(look(pid).is_none(), "it is over");
    let events: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(&trace).unwrap()).unwrap();
    let of = |name: &str| events.iter().filter(|event| event["name"] == name).collect::<Vec<_>>();
    let rates = of("faults/s");
    assert!(rates.iter().any(|event| event["args"]["untouched"].as_f64().unwrap() > 0.0), "{rates:?}");
    assert!(rates.windows(2).all(|pair| pair[0]["ts"].as_u64() < pair[1]["ts"].as_u64()));
    assert!(of("local memory, MiB").iter().all(|event| event["args"]["pages"].as_f64().unwrap() <= 16.0));
    assert!(of("uses far memory").iter().any(|event| event["dur"].as_u64().unwrap() > 0));
    let picture = std::fs::read_to_string(&report).unwrap();
    assert!(
        picture.starts_with("<svg")
            && picture.contains("fetched from lenders")
            && picture.contains("faults by address, MiB")
            && picture.contains("faults in ")
            && picture.ends_with("</svg>\n")
    );
}

#[test]
fn faults_without_io_are_some_of_the_faults() {
    if !can_run("faults_without_io_are_some_of_the_faults", &[]) {
        return;
    }
    let mut command = netvm();
    command.args(["run", "--local", "16M", "--lend-size", "256M", "--stats", "--"]);
    command.args([env!("CARGO_BIN_EXE_netvm"), "demo-worker", "67108864"]);
    let done = finish(&mut command).must_succeed();
    let number = |word: &str| {
        let end = done.err.find(word).unwrap_or_else(|| panic!("{word}: {}", done.err));
        done.err[..end].rsplit([' ', '(']).next().unwrap().parse::<u64>().unwrap()
    };
    assert!((1..number(" faults (")).contains(&number(" without I/O)")), "{}", done.err);
}

#[test]
fn what_cannot_be_watched_is_told() {
    for (args, why) in [
        (&["top", "--pid", "1"][..], "no `netvm run` that goes on"),
        (&["top", "--interval", "0"], "0.05 to 3600"),
        (&["top", "--interval", "x"], "no number of seconds"),
        (&["metrics", "--listen", "nowhere"], "cannot listen at nowhere"),
        (&["run", "--trace", "/nonexistent/trace", "--", "true"], "cannot write /nonexistent/trace"),
        (&["run", "--report", "/nonexistent/report", "--", "true"], "cannot write /nonexistent/report"),
    ] {
        let done = finish(netvm().args(args));
        assert!(!done.status.success() && done.err.contains(why), "{args:?}: {}", done.err);
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let done = finish(netvm().args(["metrics", "--listen", &address]));
    assert!(
        !done.status.success() && done.err.contains(&address) && done.err.contains("another --listen"),
        "{}",
        done.err
    );
}

#[test]
fn a_full_disk_is_told_before_the_program_starts() {
    for option in ["--trace", "--report"] {
        let mut command = netvm();
        command.args([
            "run",
            "--local",
            "16M",
            "--lend-size",
            "1G",
            option,
            "/dev/full",
            "--",
            "echo",
            "started",
        ]);
        let done = finish(&mut command);
        assert!(done.status.code() == Some(125) && done.out().is_empty(), "{done:?}");
        assert!(done.err.contains("cannot write /dev/full: No space left"), "{}", done.err);
    }
}

#[test]
fn two_outputs_of_a_run_are_two_files() {
    let folder = Folder::new("observe-outputs");
    let (one, link) = (folder.path("one"), folder.path("link"));
    let also = folder.path("./one");
    let run = |first: (&str, &Path), second: (&str, &Path)| {
        let mut command = netvm();
        command.args(["run", "--local", "16M", "--lend-size", "64M", first.0]).arg(first.1).arg(second.0);
        finish(command.arg(second.1).args(["--", "echo", "started"]))
    };
    // Before there is such a file, and when it has two names.
    for is_there in [false, true] {
        if is_there {
            std::fs::write(&one, "").unwrap();
            std::fs::hard_link(&one, &link).unwrap();
        }
        let other = if is_there { &link } else { &also };
        for (first, second) in [("--trace", "--report"), ("--report", "--learn"), ("--learn", "--trace")] {
            let done = run((first, &one), (second, other));
            assert!(done.status.code() == Some(125) && done.out().is_empty(), "{done:?}");
            assert!(done.err.contains("give each a file of its own"), "{}", done.err);
        }
    }
    assert_eq!(std::fs::read(&one).unwrap(), b"");
    // A device takes what both write.
    let device = Path::new("/dev/zero");
    run(("--trace", device), ("--report", device)).must_succeed();
}

#[test]
fn a_run_in_parts_says_what_it_lacks() {
    if !can_run("a_run_in_parts_says_what_it_lacks", &[]) {
        return;
    }
    let folder = Folder::new("observe-parts");
    let lenders = ["one", "two", "three"].map(|name| Lender::named(&folder, name, "256M"));
    let mut command = netvm();
    command.args(["run", "--local", "8M", "--tier", "lender", "--erasure", "2+1", "--explain"]);
    for lender in &lenders {
        command.args(["--lender", &lender.address]);
    }
    command.args(["--", "sh", "-c", "while :; do \"$0\" demo-worker 33554432; done"]);
    command.arg(env!("CARGO_BIN_EXE_netvm")).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut run = Guard(command.spawn().unwrap());
    let pid = run.0.id();
    until("the run has pages on its lenders", || {
        look(pid).is_some_and(|look| look["far_bytes"].as_f64().unwrap() > 16e6)
    });
    let text = || finish(netvm().args(["top", "--once", "--interval", "0.1"])).must_succeed().out();
    assert!(text().contains("in 2+1 parts: any 1 of their lenders"), "{}", text());
    let seen = look(pid).unwrap();
    assert_eq!((&seen["erasure"], &seen["lost"]), (&"2+1".into(), &Value::Array(Vec::new())));
    lenders[1].signal("KILL");
    let is_lost =
        |lost: &Value| lost.as_array().unwrap().iter().any(|lost| lost == lenders[1].address.as_str());
    until("it is told that one is lost", || is_lost(&look(pid).unwrap()["lost"]));
    let text = text();
    let is_told = |line: &str| line.contains("lost ") && line.contains(&lenders[1].address);
    assert!(text.lines().any(is_told) && text.contains("fewer copies"), "{text}");
    netvm_sys::signal::send(pid, netvm_sys::signal::SIGTERM).unwrap();
    assert!(wait(&mut run.0, common::PATIENCE).is_some());
    let mut said = String::new();
    run.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("pages that were not here were in 2+1 parts\n"), "{said}");
    assert!(said.contains("netvm: fault path "), "{said}");
}

/// A program that wants pages at random, with a quarter and with half of them local.
#[test]
fn what_more_local_memory_saves_is_foretold() {
    if !can_run("what_more_local_memory_saves_is_foretold", &[PYTHON]) {
        return;
    }
    let wants = "import random; r = random.Random(3); x = bytearray(32 << 20)\n\
        for page in range(8192): x[page << 12:(page << 12) + 8] = r.randbytes(8)\n\
        print(sum(x[r.randrange(8192) << 12] for _ in range(40000)))";
    let run_as = |local: &str, more: &[&str], program: &[&str]| {
        let mut command = netvm();
        command.args(["run", "--local", local, "--tier", "lender", "--explain"]).args(more);
        finish(command.arg("--").args(program)).must_succeed()
    };
    let run = |local: &str, more: &[&str]| run_as(local, more, &[PYTHON, "-c", wants]);
    let json = |local| serde_json::from_str::<Value>(run(local, &["--json"]).err.trim()).unwrap();
    let (quarter, half) = (json("8M"), json("16M"));
    let lines: Vec<(u64, f64)> = quarter["more_local"]
        .as_array()
        .unwrap()
        .iter()
        .map(|line| (line["local_bytes"].as_u64().unwrap() >> 20, line["bytes_in"].as_f64().unwrap()))
        .collect();
    let local: Vec<u64> = lines.iter().map(|line| line.0).collect();
    assert!(local.starts_with(&[8, 10, 12, 16, 24, 32]), "{quarter}");
    assert!(lines.is_sorted_by(|one, next| one.1 >= next.1), "{quarter}");
    let (now, foretold) = (lines[0].1, lines[3].1);
    let moved = quarter["bytes_in"].as_f64().unwrap();
    assert!((0.9..1.1).contains(&(now / moved)) && moved > 60e6, "{quarter}");
    let found = half["bytes_in"].as_f64().unwrap();
    assert!((foretold - found).abs() < 0.15 * now, "{foretold} foretold, {found} found: {quarter}");
    // Two in step, each of which has a half: who is alone for a while has all.
    let step = "import os, random, sys; r = random.Random(3); x = bytearray(32 << 20)\n\
        meet = lambda: (os.write(int(sys.argv[2]), b'.'), os.read(int(sys.argv[1]), 1))\n\
        for page in range(8192): x[page << 12:(page << 12) + 8] = r.randbytes(8); page % 64 or meet()\n\
        for turn in range(200): meet(), sum(x[r.randrange(8192) << 12] for _ in range(200))";
    let pair = "import os, subprocess, sys\n\
        (a, b), (c, d) = os.pipe(), os.pipe()\n\
        run = lambda *fds: subprocess.Popen([sys.executable, '-c', sys.argv[1], *map(str, fds)], pass_fds=fds)\n\
        both = run(a, d), run(c, b)\n\
        sys.exit(any(one.wait() for one in both))";
    let two = |local| {
        let both = [PYTHON, "-c", pair, step];
        serde_json::from_str::<Value>(run_as(local, &["--json"], &both).err.trim()).unwrap()
    };
    let (less, more) = (two("16M"), two("32M"));
    let (now, found) = (less["bytes_in"].as_f64().unwrap(), more["bytes_in"].as_f64().unwrap());
    let foretold = &less["more_local"][3];
    assert_eq!(foretold["local_bytes"], 32 << 20);
    let foretold = foretold["bytes_in"].as_f64().unwrap();
    assert!((foretold - found).abs() < 0.15 * now, "{foretold} foretold, {found} found: {less}");
    let text = run("8M", &[]).err;
    assert!(text.contains("with --local") && text.contains("netvm: 16M "), "{text}");
    // And while it runs, of the last interval.
    let forever = wants.replace("print(sum", "while True: sum").replace("range(40000)))", "range(4000))");
    let mut command = netvm();
    command.args(["run", "--local", "8M", "--tier", "lender", "--", PYTHON, "-c", &forever]);
    let mut running = Guard(command.spawn().unwrap());
    let pid = running.0.id();
    until("it is told of a run that goes on", || {
        let ratio = look(pid).and_then(|look| look["in_ratio_at_twice_local"].as_f64());
        ratio.is_some_and(|ratio| (0.5..0.85).contains(&ratio))
    });
    let text = finish(netvm().args(["top", "--once", "--interval", "0.2"])).must_succeed().out();
    assert!(text.contains("twice as much local would leave about"), "{text}");
    netvm_sys::signal::send(pid, netvm_sys::signal::SIGTERM).unwrap();
    assert!(wait(&mut running.0, common::PATIENCE).is_some());
    let enough = run("128M", &[]).err;
    assert!(enough.contains("nothing had to be brought in") && !enough.contains("with --local"), "{enough}");
}

#[test]
fn what_is_no_address_or_number_is_told_with_an_example() {
    for (arguments, words) in [
        (&["metrics", "--listen", "foo"][..], "127.0.0.1:9477"),
        (&["metrics", "--listen", "unix:/x"], "127.0.0.1:9477"),
        (&["metrics", "--listen", ":9477"], "127.0.0.1:9477"),
        (&["device", "detach", "xx"], "0 for /dev/netvm_mem0"),
        (&["device", "page", "1x"], "0 for /dev/netvm_mem0"),
    ] {
        let done = finish(netvm().args(arguments));
        assert!(!done.status.success() && done.err.contains(words), "{arguments:?}: {}", done.err);
    }
}
