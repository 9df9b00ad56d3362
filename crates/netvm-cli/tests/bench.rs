//! The benches still run, and their JSON has the form that all benches of the project share.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

const KEYS: [&str; 13] = [
    "bench",
    "case",
    "floor",
    "link",
    "median",
    "n",
    "p99",
    "peer",
    "per_s",
    "placement",
    "ratio",
    "size_bytes",
    "unit",
];

/// Runs `netvm bench ...` and returns its lines, or `None` where the kernel does not let us have a userfaultfd.
fn bench(arguments: &[&str]) -> Option<Vec<serde_json::Value>> {
    if let Err(error) = netvm_sys::uffd::probe() {
        println!("skipped (no userfaultfd here: {error})");
        return None;
    }
    Some(rows_of(arguments))
}

fn rows_of(arguments: &[&str]) -> Vec<serde_json::Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_netvm")).arg("bench").args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "netvm bench {}: {said}", arguments.join(" "));
    let rows: Vec<serde_json::Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line}")))
        .collect();
    for row in &rows {
        let mut keys: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, KEYS, "{row}");
    }
    rows
}

fn number(row: &serde_json::Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("no {key} in {row}"))
}

#[test]
fn bench_fault_measures_reads_that_the_kernel_answers() {
    if let Err(error) = netvm::lender::probe_kernel_reads() {
        eprintln!("bench_fault_measures_reads_that_the_kernel_answers: skipped ({error})");
        return;
    }
    let arguments = ["fault", "--quick", "--json", "--peers", "none", "--placement", "kernel"];
    let Some(rows) = bench(&[&arguments[..], &["--case", "random-read"]].concat()) else { return };
    let row = rows.iter().find(|row| row["case"] == "random-read" && row["peer"].is_null()).unwrap();
    assert_eq!((&row["link"], &row["placement"]), (&"udp".into(), &"kernel".into()));
    assert!(number(row, "median") > 0.0 && number(row, "floor") > 0.0 && number(row, "per_s") > 0.0);
}

#[test]
fn bench_fault_measures_netvm_beside_its_floors() {
    let svg = std::env::temp_dir().join(format!("netvm-bench-test-{}.svg", std::process::id()));
    let arguments = ["fault", "--quick", "--json", "--peers", "none", "--placement", "same-cpu", "--svg"];
    let arguments = [&arguments[..], &[svg.to_str().unwrap()]].concat();
    let Some(rows) = bench(&arguments) else { return };
    let find = |peer: Option<&str>, case: &str| {
        let found = rows.iter().find(|row| row["case"] == case && row["peer"].as_str() == peer);
        found.unwrap_or_else(|| panic!("no row for {peer:?} {case}"))
    };
    for case in ["random-read", "random-rmw", "seq-read-first", "seq-read", "seq-write-first", "seq-write"] {
        let row = find(None, case);
        assert_eq!((&row["bench"], &row["link"]), (&"fault".into(), &"tcp".into()));
        for key in ["median", "p99", "per_s", "floor", "ratio", "n"] {
            assert!(number(row, key) > 0.0, "{key} of {row}");
        }
    }
    for (peer, case) in [
        ("floor-tcp", "round-trip-16-4096"),
        ("floor-tcp", "stream"),
        ("floor-tcp", "stream-both-ways"),
        ("floor-uffd", "fault-copy"),
    ] {
        assert!(number(find(Some(peer), case), "median") > 0.0);
    }
    // The floor of a random fault is the sum of its two steps.
    let sum = number(find(Some("floor-tcp"), "round-trip-16-4096"), "median")
        + number(find(Some("floor-uffd"), "fault-copy"), "median");
    assert!((number(find(None, "random-read"), "floor") - sum).abs() < 1e-6);
    let drawn = std::fs::read_to_string(&svg).unwrap();
    std::fs::remove_file(&svg).unwrap();
    assert!(drawn.contains("<svg") && drawn.contains("random-read"), "no picture in {drawn}");
    assert!(
        drawn.contains("floor (bare kernel)") && !drawn.contains("swap"),
        "no swap was measured: {drawn}"
    );
}

#[test]
fn bench_fault_measures_one_case_by_itself() {
    let arguments = ["fault", "--quick", "--json", "--peers", "none", "--placement", "same-cpu", "--case"];
    for shards in ["1", "2"] {
        let Some(rows) = bench(&[&arguments[..], &["seq-read", "--shards", shards]].concat()) else { return };
        let ours: Vec<_> = rows.iter().filter(|row| row["peer"].is_null()).map(|row| &row["case"]).collect();
        assert_eq!(ours, ["seq-read-first", "seq-read"]);
    }
    let command = [&["bench"][..], &arguments, &["seq-read", "--shards", "65"]].concat();
    let output = Command::new(env!("CARGO_BIN_EXE_netvm")).args(command).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("1..=64"), "{said}");
    for seconds in ["0", "-1", "nan", "inf", "x"] {
        let seconds = format!("--seconds={seconds}");
        let command = ["bench", "fault", "--peers", "none", "--placement", "same-cpu", &seconds];
        let output = Command::new(env!("CARGO_BIN_EXE_netvm")).args(command).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains("seconds"), "{seconds}: {said}");
    }
    for option in [["--local", "16M"], ["--size", "64M"], ["--seconds", "1"]] {
        let command = [&["bench"][..], &arguments, &["seq-read"], &option].concat();
        let output = Command::new(env!("CARGO_BIN_EXE_netvm")).args(command).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains("'--quick' cannot be used with"), "{said}");
    }
    let command = [&["bench"][..], &arguments, &["zipf"]].concat();
    let output = Command::new(env!("CARGO_BIN_EXE_netvm")).args(command).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("random-read, random-rmw"), "{said}");
}

#[test]
fn bench_fault_measures_walks_with_and_without_packed_pages() {
    let svg = std::env::temp_dir().join(format!("netvm-bench-walks-{}.svg", std::process::id()));
    let arguments = ["fault", "--quick", "--walks", "--json", "--peers", "none", "--local-percent", "25"];
    let arguments = [&arguments[..], &["--svg", svg.to_str().unwrap()]].concat();
    let Some(rows) = bench(&arguments) else { return };
    let find = |case: &str, peer: Option<&str>| {
        let row = rows.iter().find(|row| row["case"] == case && row["peer"].as_str() == peer);
        row.unwrap_or_else(|| panic!("no row for {peer:?} {case}"))
    };
    for case in ["uniform", "uniform-named", "zipf", "sequential", "stride", "chase"] {
        for (half, peer) in [("", None), ("-half", None), ("", Some("netvm-lender"))] {
            let row = find(&format!("{case}-25{half}"), peer);
            assert!(number(row, "median") > 0.0 && number(row, "n") > 0.0, "{row}");
            assert!(case == "zipf" || number(row, "floor") > 0.0, "{row}");
            assert_eq!(row["placement"], "same-cpu");
        }
    }
    let drawn = std::fs::read_to_string(&svg).unwrap();
    std::fs::remove_file(&svg).unwrap();
    for text in ["An access, 25 % local, half-compressible data, same-cpu", "chase-25  netvm-lender"] {
        assert!(drawn.contains(text), "no {text} in {drawn}");
    }
    // A floor for the pages that fault: three of four.
    let floor = |case: &str| number(find(case, None), "floor");
    assert!((floor("uniform-25") - floor("chase-25")).abs() < 1e-6);
    assert!(floor("sequential-25") < floor("uniform-25"));
}

#[test]
fn bench_fault_measures_one_walk_by_threads_and_in_all_placements() {
    let common = ["fault", "--quick", "--walks", "--json", "--peers", "none", "--case", "uniform"];
    let more = ["--placement", "nearby", "--threads", "2", "--local-percent", "75,10", "--encrypt-pages"];
    let Some(rows) = bench(&[&common[..], &more].concat()) else { return };
    let find = |rows: &[serde_json::Value], case: &str, placement: &str| {
        let of = |row: &&serde_json::Value| row["case"] == case && row["placement"] == placement;
        rows.iter().find(of).unwrap_or_else(|| panic!("no {case} in {placement}")).clone()
    };
    for case in ["uniform-75", "uniform-10", "uniform-10-half"] {
        for (threads, by) in [(1.0, ""), (2.0, "-threads")] {
            let row = find(&rows, &format!("{case}{by}"), "nearby");
            // Of all threads, each of which takes the median for an access.
            let per_s = threads * 1e6 / number(&row, "median");
            assert!((number(&row, "per_s") / per_s - 1.0).abs() < 1e-3, "{row}");
        }
    }
    assert!(rows.iter().all(|row| row["case"].as_str().unwrap().starts_with("uniform-")), "{rows:?}");
    let rows = rows_of(&[&common[..], &["--placement", "all", "--replicas", "2"]].concat());
    // With one CPU there are fewer.
    for placement in ["same-cpu", "nearby", "unpinned"] {
        assert!(number(&find(&rows, "uniform-50", placement), "ratio") > 0.0);
    }
}

/// What would have no effect is not taken.
#[test]
fn bench_fault_takes_no_options_that_walks_do_not_heed() {
    for (arguments, why) in [
        (&["--walks", "--local", "64M"][..], "--local"),
        (&["--walks", "--shards", "2"], "--shards"),
        (&["--walks", "--case", "seq-read"], "uniform, uniform-named, zipf, sequential, stride, chase"),
        (&["--walks", "--replicas", "2", "--erasure", "2+1"], "--erasure"),
        (&["--local-percent", "50"], "--walks"),
        (&["--walks", "--local-percent", "75,99"], "1..=95"),
        (&["--walks", "--size", "1M"], "too small to have 50 % of it local"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_netvm"));
        let output = command.args(["bench", "fault", "--peers", "none"]).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{arguments:?}: {said}");
    }
}

#[test]
fn bench_frames_compares_both_designs() {
    if let Err(error) = netvm_sys::bench_floor::FaultFloor::new(
        1,
        netvm_sys::bench_floor::FloorFeatures { moves: true, ..Default::default() },
    ) {
        println!("skipped (no UFFDIO_MOVE here: {error})");
        return;
    }
    let Some(rows) = bench(&["frames", "--quick", "--json"]) else { return };
    for case in
        ["a-move-in-1", "a-move-out-64", "a-hash-cold", "b-copy-in-64", "b-protect-64", "b-first-write"]
    {
        let row = rows.iter().find(|row| row["case"] == case && row["placement"] == "quiet");
        assert!(number(row.unwrap_or_else(|| panic!("no {case}")), "median") > 0.0);
    }
}

#[test]
fn bench_rma_measures_all_operations_beside_their_floors() {
    let svg = std::env::temp_dir().join(format!("netvm-bench-rma-test-{}.svg", std::process::id()));
    for link in ["tcp", "unix"] {
        let arguments = ["rma", "--quick", "--json", "--placement", "unpinned", "--link", link, "--svg"];
        let rows = rows_of(&[&arguments[..], &[svg.to_str().unwrap()]].concat());
        let names = ["put", "put-complete", "get", "fetch-add", "cas", "notify-spin", "notify-block"];
        let more =
            ["notify-handler", "channel", "lock", "waitq", "sem", "barrier", "put-rate", "put-bw", "get-bw"];
        let passive = ["get-passive", "put-complete-passive", "fetch-add-passive"];
        for name in names.into_iter().chain(more).chain(passive) {
            let of_netvm = |row: &&serde_json::Value| row["case"] == name && row["peer"].is_null();
            let row = rows.iter().find(of_netvm).unwrap_or_else(|| panic!("no row for {name}"));
            assert_eq!((&row["bench"], &row["link"]), (&"rma".into(), &link.into()));
            for key in ["median", "per_s", "floor", "ratio", "n", "size_bytes"] {
                assert!(number(row, key) > 0.0, "{key} of {row}");
            }
        }
        let idle = rows.iter().find(|row| row["case"] == "memory_per_idle_peer_bytes").expect("a row");
        let bytes = number(idle, "median");
        assert!(bytes > 0.0 && bytes <= number(idle, "floor"), "{bytes} bytes for each peer");
        for name in ["ping-pong-poll", "ping-pong-block", "stream"] {
            assert!(rows.iter().any(|row| row["case"] == name && !row["peer"].is_null()), "no floor {name}");
        }
    }
    let drawn = std::fs::read_to_string(&svg).unwrap();
    std::fs::remove_file(&svg).unwrap();
    assert!(drawn.contains("<svg"), "no picture in {drawn}");
    for word in ["latency, us", "bandwidth, GB/s", "put and flush", "bare stream", "bare sockets"] {
        assert!(drawn.contains(word), "no {word} in the picture");
    }
}

#[test]
fn bench_rma_over_rails_and_encrypted() {
    for (flags, link) in [(&["--rails", "4"][..], "tcp-x4"), (&["--encrypt"], "tcp-encrypted")] {
        let common = ["rma", "--quick", "--json", "--placement", "unpinned", "--case", "get"];
        let rows = rows_of(&[&common[..], flags].concat());
        let row = rows.iter().find(|row| row["case"] == "get-bw" && row["peer"].is_null()).expect("a row");
        assert_eq!(row["link"], link);
        assert!(number(row, "median") > 0.0 && number(row, "ratio") > 0.0);
    }
}

/// All ways to connect in one table, beside the same floors.
#[test]
fn bench_rma_over_several_ways_to_connect() {
    let common = ["rma", "--quick", "--json", "--placement", "unpinned", "--case", "put-complete"];
    let rows = rows_of(&[&common[..], &["--rails", "1,2", "--encrypt=both", "--wait", "poll"]].concat());
    let of_netvm = |row: &&serde_json::Value| row["case"] == "put-complete" && row["peer"].is_null();
    for link in ["tcp", "tcp-x2", "tcp-encrypted", "tcp-encrypted-x2"] {
        let mine: Vec<_> = rows.iter().filter(of_netvm).filter(|row| row["link"] == link).collect();
        assert_eq!(mine.len(), 2, "{link}: 8 B and 4 KiB");
        assert!(mine.iter().all(|row| number(row, "ratio") > 0.0));
    }
    assert_eq!(rows.iter().filter(|row| row["case"] == "ask-poll").count(), 2);
}

#[test]
fn bench_rma_by_how_one_waits() {
    let cases = |wait: &[&str]| -> Vec<String> {
        let common = ["rma", "--quick", "--json", "--placement", "unpinned", "--case", "put"];
        let rows = rows_of(&[&common[..], wait].concat());
        for row in rows.iter().filter(|row| row["peer"].is_null()) {
            assert!(number(row, "median") > 0.0 && number(row, "floor") > 0.0, "{row}");
        }
        rows.iter().filter(|row| row["peer"].is_null()).map(|row| row["case"].to_string()).collect()
    };
    let (poll, block) = (cases(&["--wait", "poll"]), cases(&["--wait", "block"]));
    assert!(poll.iter().all(|case| !case.contains("block") && !case.contains("passive")), "{poll:?}");
    for name in ["put-block", "put-complete-block", "put-complete-passive"] {
        assert!(block.iter().any(|case| case.trim_matches('"') == name), "no {name} in {block:?}");
    }
    assert_eq!(cases(&["--wait", "both"]).len(), poll.len() + block.len());
}

/// What SPEC.md says of locks, copies, idle nodes and dead ones.
#[test]
fn bench_rma_measures_halves_copies_idle_nodes_and_dead_ones() {
    for (part, cases) in [
        ("lock", &["lock", "lock-take", "lock-give", "fetch-add"][..]),
        ("sem-", &["sem-take", "sem-give", "fetch-add"]),
        ("copy", &["copy", "copy-through", "copy-bw"]),
        ("idle", &["idle-cpu", "memory_per_idle_peer_bytes"]),
        ("detect-killed", &["detect-killed"]),
    ] {
        let rows = rows_of(&["rma", "--quick", "--json", "--placement", "unpinned", "--case", part]);
        for case in cases {
            let row = rows.iter().find(|row| row["case"] == *case && row["peer"].is_null());
            let row = row.unwrap_or_else(|| panic!("--case {part}: no {case}"));
            assert!(number(row, "median") > 0.0 && number(row, "floor") > 0.0, "{row}");
            assert!(number(row, "n") > 0.0 && row["link"] == "tcp", "{row}");
        }
    }
    let rows = rows_of(&["rma", "--quick", "--json", "--link", "unix", "--case", "detect-stopped"]);
    let milliseconds = number(&rows[0], "median");
    assert!(rows.len() == 1 && (3000.0..10_000.0).contains(&milliseconds), "found after {milliseconds} ms");
}

#[test]
fn bench_rma_says_what_is_wrong_and_how_to_get_peers() {
    let run = |arguments: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_netvm")).args(["bench", "rma"]).args(arguments).output();
        let output = output.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    let (well, said, _) = run(&["--peers", "install-hint"]);
    assert!(
        well && ["ucx-utils", "libfabric-bin", "openmpi-bin", "dnf"].iter().all(|word| said.contains(word))
    );
    for (arguments, word) in [
        (&["--rails", "0"][..], "1..=16"),
        (&["--rails", "17"], "1..=16"),
        (&["--rails", "1,x"], "invalid digit"),
        (&["--rounds", "0"], "1"),
        (&["--wait", "long"], "block"),
        (&["--encrypt=perhaps"], "both"),
        (&["--link", "pigeon"], "tcp"),
        (&["--encrypt", "--link", "unix"], "only TCP"),
        (&["--case", "no-such-case"], "there is no case"),
    ] {
        let (well, out, said) = run(arguments);
        assert!(!well && out.is_empty() && said.contains(word), "{arguments:?}: {said}");
    }
}

#[test]
fn bench_rma_measures_shared_memory_too() {
    let rows = rows_of(&["rma", "--quick", "--json", "--placement", "unpinned", "--link", "shm"]);
    let names = ["put", "put-complete", "get", "fetch-add", "cas", "notify-spin", "notify-block"];
    for name in names.into_iter().chain(["notify-handler", "put-rate", "put-bw", "get-bw"]) {
        let of_netvm =
            |row: &&serde_json::Value| row["case"] == name && row["link"] == "shm" && row["peer"].is_null();
        let row = rows.iter().find(of_netvm).unwrap_or_else(|| panic!("no row for {name}"));
        for key in ["median", "per_s", "floor", "ratio", "n", "size_bytes"] {
            assert!(number(row, key) > 0.0, "{key} of {row}");
        }
    }
    for name in ["ping-pong-poll", "copy", "atomic", "stream"] {
        assert!(rows.iter().any(|row| row["case"] == name && row["peer"] == "floor-shm"), "no floor {name}");
    }
}

#[test]
fn bench_nonresident_measures_each_case_beside_its_floor() {
    let Some(rows) = bench(&["nonresident", "--quick", "--json"]) else { return };
    let cases: Vec<&str> = rows.iter().filter_map(|row| row["case"].as_str()).collect();
    for case in ["checked-get", "checked-put", "beside-slow", "beside-swapped"] {
        assert!(cases.contains(&case), "no {case} in {cases:?}");
    }
    for row in rows.iter().filter(|row| row["case"] != "beside-swapped") {
        assert!(number(row, "median") > 0.0 && number(row, "floor") > 0.0, "{row}");
        assert!(number(row, "ratio") > 0.0, "{row}");
    }
}

#[test]
fn a_partner_that_fails_leaves_nothing_behind() {
    let folder = std::env::temp_dir().join(format!("netvm-partner-test-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    // The one that starts it goes, or talks nonsense.
    for (ticket, succeeds) in [(&b""[..], true), (b"\xFF\n", false)] {
        let partner = Command::new(env!("CARGO_BIN_EXE_netvm"))
            .args(["bench", "rma-partner", "--link", "unix"])
            .env("TMPDIR", &folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut partner = partner.unwrap();
        partner.stdin.take().unwrap().write_all(ticket).unwrap();
        let output = partner.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), succeeds, "{said}");
        // The floors' address was told: it has served them.
        assert!(String::from_utf8_lossy(&output.stdout).contains("netvm-rma-raw-"), "{said}");
        let left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "{left:?}");
    }
    std::fs::remove_dir(&folder).unwrap();
}

/// Not after minutes of measuring.
#[test]
fn a_picture_that_cannot_be_written_is_told_first() {
    let benches = "fault rma block swap file transfer eviction tiers failure apps";
    let commands = benches.split(' ').map(|bench| vec!["bench", bench]).chain([vec!["demo"]]);
    for command in commands {
        let output = Command::new(env!("CARGO_BIN_EXE_netvm"))
            .args(&command)
            .args(["--svg", "/proc/no/such.svg"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command:?}: {said}");
        assert!(said.contains("cannot write /proc/no/such.svg"), "{command:?}: {said}");
    }
}

#[test]
fn bench_block() {
    let svg = std::env::temp_dir().join(format!("netvm-bench-block-{}.svg", std::process::id()));
    let rows = rows_of(&["block", "--quick", "--json", "--svg", svg.to_str().unwrap()]);
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(
        picture.contains("nbd-128k-qd4")
            && picture.contains("lender nearby")
            && picture.contains("lower is better")
    );
    std::fs::remove_file(svg).unwrap();
    for case in ["nbd-4k-qd1", "nbd-4k-qd1-write", "nbd-4k-qd16", "nbd-4k-qd16-write", "nbd-128k-qd4"] {
        for lender in ["lender nearby", "lender tcp"] {
            let row = rows.iter().find(|row| row["case"] == case && row["placement"] == lender);
            let row = row.unwrap_or_else(|| panic!("no {case} with {lender}"));
            assert!(row["median"].as_f64().unwrap() > 0.0 && row["n"].as_u64().unwrap() > 0, "{row}");
        }
        let has_nbdkit = std::path::Path::new("/usr/bin/nbdkit").exists();
        assert_eq!(rows.iter().any(|row| row["case"] == case && row["peer"] == "nbdkit memory"), has_nbdkit);
    }
}

/// What is measured needs a machine of its own: guest/tests/swap-bench.sh, disk-bench.sh.
#[test]
fn bench_swap_and_disks_say_what_is_wrong() {
    for (arguments, reason) in [
        (&["swap", "--size", "8M", "--local", "8M"][..], "must be larger than"),
        (&["swap", "--size", "8M", "--local", "0"], "must be larger than"),
        (&["swap", "--kind", "tape"], "tape"),
        (&["swap", "--secret", "key"], "--lender"),
        // Nothing has so much: as root or not, no swap is made.
        (&["swap", "--size", "1P", "--local", "1M"], "needs "),
        (&["block", "--device", "/dev/null"], "--overwrite"),
        (&["block", "--overwrite"], "--device"),
        (&["block", "--device", "/dev/null", "--overwrite"], "no block device"),
        (&["block", "--device", "/nowhere", "--overwrite"], "/nowhere"),
    ] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_netvm"));
        let done = command.arg("bench").args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && said.contains(reason), "{arguments:?}: {said}");
    }
}

#[test]
fn bench_file() {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_netvm"));
    let svg = std::env::temp_dir().join(format!("netvm-bench-file-{}.svg", std::process::id()));
    command.args(["bench", "file", "--quick", "--json", "--svg"]).arg(&svg);
    let child =
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    let folder = format!("/netvm-{}-", child.id());
    let done = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    if !done.status.success() {
        // Only root mounts, and not in every container.
        assert!(said.contains("netvm mount did not start") || said.contains("/dev/fuse"), "{said}");
        println!("skipped ({said})");
        return;
    }
    let rows: Vec<serde_json::Value> = done
        .stdout
        .split(|&byte| byte == b'\n')
        .filter_map(|line| serde_json::from_slice(line).ok())
        .collect();
    for case in ["file-seq-write", "file-seq", "file-seq-cached", "file-rand", "file-mmap"] {
        for lender in ["lender tcp", "lender unix"] {
            let row = rows.iter().find(|row| row["case"] == case && row["placement"] == lender);
            let row = row.unwrap_or_else(|| panic!("no {case} with {lender} in {rows:?}"));
            assert_eq!((&row["bench"], &row["peer"]), (&"file".into(), &serde_json::Value::Null));
            for key in ["median", "floor", "ratio", "n", "size_bytes"] {
                assert!(number(row, key) > 0.0, "{key} of {row}");
            }
        }
        assert!(
            rows.iter().any(|row| row["case"] == case && row["peer"] == "tmpfs") || said.contains("tmpfs")
        );
    }
    assert!(std::fs::read_to_string(&svg).unwrap().contains("file-mmap"));
    std::fs::remove_file(svg).unwrap();
    // It takes away what it has mounted.
    assert!(!std::fs::read_to_string("/proc/self/mounts").unwrap().contains(&folder));
}

#[test]
fn transfers_have_a_row_for_each_method_and_size() {
    let svg = std::env::temp_dir().join(format!("netvm-bench-transfer-test-{}.svg", std::process::id()));
    let arguments = ["transfer", "--quick", "--json", "--svg", svg.to_str().unwrap()];
    let rows = rows_of(&arguments);
    let cpus = std::thread::available_parallelism().unwrap().get();
    let several = format!("tcp-x{}", cpus.clamp(2, 4));
    // Whether the kernel copies between processes of one user.
    let doctor = Command::new(env!("CARGO_BIN_EXE_netvm")).args(["doctor", "--json"]).output().unwrap();
    let doctor: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let findings = doctor["findings"].as_array().unwrap();
    let reaches = findings.iter().any(|found| found["what"] == "private memory" && found["verdict"] == "ok");
    if !reaches {
        println!("skipped (transfer-onesided on one machine: processes may not reach into each other)");
    }
    for bytes in [480_000u64, 12_000_000] {
        for link in ["tcp", &several] {
            let bare = |row: &&serde_json::Value| row["peer"] == "bare" && row["link"] == link;
            let found = rows.iter().filter(bare).find(|row| row["size_bytes"] == bytes).unwrap();
            assert!(found["median"].as_f64().unwrap() > 0.0, "{found}");
        }
        for (case, link) in [
            ("transfer-copy", "tcp"),
            ("transfer-mmap", "tcp"),
            ("transfer-sendfile", "tcp"),
            ("transfer-copy", several.as_str()),
            ("transfer-sendfile", &several),
            ("transfer-onesided", "tcp"),
            ("transfer-onesided", "cma"),
        ] {
            let of = |row: &&serde_json::Value| {
                row["case"] == case
                    && row["link"] == link
                    && row["size_bytes"] == bytes
                    && row["peer"].is_null()
            };
            let found: Vec<_> = rows.iter().filter(of).collect();
            if link == "cma" && !reaches {
                continue;
            }
            assert_eq!(found.len(), 1, "{case} {link} {bytes}: {rows:?}");
            assert!(found[0]["median"].as_f64().unwrap() > 0.0 && found[0]["ratio"].as_f64().unwrap() > 0.0);
            assert!(found[0]["n"].as_u64().unwrap() >= 2);
        }
    }
    assert!(!reaches || std::fs::read_to_string(&svg).unwrap().contains("onesided, same machine"));
    std::fs::remove_file(svg).unwrap();
}

/// What swap is compared with: all that the kernel counts of a program.
#[test]
fn what_a_program_takes_in_a_group_is_known() {
    let mut keeper = Command::new(env!("CARGO_BIN_EXE_netvm"))
        .args(["bench", "apps-keeper"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(keeper.stdout.take().unwrap()).lines();
    let entrance = lines.next().unwrap().unwrap();
    if let Some(reason) = entrance.strip_prefix("error ") {
        println!("skipped ({reason})");
        return drop((keeper.stdin.take(), keeper.wait()));
    }
    let touch = "echo $$ > \"$0\" && exec head -c 50M /dev/zero | tail -c 50M >/dev/null";
    assert!(Command::new("sh").args(["-c", touch, &entrance]).status().unwrap().success());
    let mut input = keeper.stdin.take().unwrap();
    writeln!(input, "peak").unwrap();
    let peak: u64 = lines.next().unwrap().unwrap().parse().unwrap();
    drop(input);
    assert!(keeper.wait().unwrap().success() && !std::path::Path::new(&entrance).exists());
    assert!((50 << 20..90 << 20).contains(&peak), "{peak}");
}

#[test]
fn bench_apps_compares_with_ram() {
    let svg = std::env::temp_dir().join(format!("netvm-bench-apps-{}.svg", std::process::id()));
    let arguments =
        ["apps", "--quick", "--json", "--app", "pagerank", "--app", "redis", "--local-percent", "50"];
    let arguments = [&arguments[..], &["--svg", svg.to_str().unwrap()]].concat();
    let Some(rows) = bench(&arguments) else { return };
    let cases: Vec<_> = rows.iter().map(|row| row["case"].as_str().unwrap()).collect();
    assert_eq!(cases, ["pagerank-50", "redis-50"]);
    let mut drawn = false;
    for row in &rows {
        if number(row, "n") == 0.0 {
            let _ = writeln!(std::io::stderr(), "bench apps: skipped ({})", row["case"]);
            continue;
        }
        drawn = true;
        assert!(
            number(row, "ratio") > 0.0 && number(row, "floor") > 0.0 && number(row, "size_bytes") > 1e6,
            "{row}"
        );
        assert_eq!(row["per_s"].is_null(), row["case"] != "redis-50", "{row}");
    }
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(!drawn || picture.contains(", 50 % local, netvm"), "{picture}");
    assert!(picture.contains("in RAM") && picture.contains("times worse than in RAM, logarithmic"));
    std::fs::remove_file(svg).unwrap();
}

#[test]
fn bench_tiers_compares_with_given_orders() {
    let svg = std::env::temp_dir().join(format!("netvm-bench-tiers-{}.svg", std::process::id()));
    let Some(rows) = bench(&["tiers", "--quick", "--json", "--svg", svg.to_str().unwrap()]) else { return };
    let find = |peer: Option<&str>, case: &str| {
        let found = rows.iter().find(|row| row["case"] == case && row["peer"].as_str() == peer);
        found.unwrap_or_else(|| panic!("no row for {peer:?} {case} in {rows:?}"))
    };
    let chosen = find(None, "phases");
    let orders = ["near-slow-file", "packed-near-slow-file", "near-file-slow", "packed-near-file-slow"];
    let best = orders
        .map(|order| number(find(Some(order), "phases"), "median"))
        .into_iter()
        .fold(f64::MAX, f64::min);
    assert!((number(chosen, "floor") - best).abs() < 1e-9 && number(chosen, "ratio") > 0.0, "{chosen}");
    let packed = |case| find(Some("packed-lender"), case);
    assert!(number(packed("lent-to-used"), "median") > 1.3, "{rows:?}");
    for case in ["random-read", "random-rmw", "seq-read", "seq-write"] {
        let floor = number(find(Some("plain-lender"), case), "median");
        assert!(number(packed(case), "ratio") > 0.0 && number(packed(case), "floor") == floor, "{rows:?}");
    }
    assert!(std::fs::read_to_string(&svg).unwrap().contains("near-slow-file"));
    std::fs::remove_file(svg).unwrap();
}

#[test]
fn bench_failure_has_programs_outlive_lenders() {
    let svg = std::env::temp_dir().join(format!("netvm-bench-failure-{}.svg", std::process::id()));
    let arguments = ["failure", "--quick", "--json", "--redundancy", "one", "--redundancy", "2+1", "--svg"];
    let Some(rows) = bench(&[&arguments[..], &[svg.to_str().unwrap()]].concat()) else { return };
    let find = |case: &str| rows.iter().find(|row| row["case"] == case);
    for (case, unit) in [("one", "s"), ("2+1", "s"), ("2+1-kill", "s"), ("2+1-stop", "s")] {
        let row = find(case).unwrap_or_else(|| panic!("no {case} in {rows:?}"));
        assert!(row["unit"] == unit && number(row, "ratio") > 0.0 && number(row, "floor") > 0.0, "{row}");
    }
    let stall = |case: &str| number(find(case).unwrap(), "median");
    assert!(stall("2+1-kill-stall") > 0.0, "{rows:?}");
    // It may end before it has missed a lender that stands still.
    let stopped = find("2+1-stop-stall").unwrap();
    assert!(stopped["n"] == 0 || number(stopped, "median") > 0.0, "{rows:?}");
    // There may be no network to be cut; and the program may end before all is repaired.
    assert!(find("2+1-cut").is_some() && find("2+1-kill-repair").is_some(), "{rows:?}");
    assert!(find("one-kill").is_none());
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(picture.contains("2+1-stop-stall") && picture.contains("Longest wait"), "{picture}");
    std::fs::remove_file(svg).unwrap();
}

#[test]
fn evictions_are_compared_on_traces() {
    let svg = std::env::temp_dir().join(format!("netvm-bench-eviction-{}.svg", std::process::id()));
    let rows = rows_of(&["eviction", "--quick", "--json", "--svg", svg.to_str().unwrap()]);
    assert_eq!(rows.len(), 5 * 4 * 7, "{rows:?}");
    let missed = |case: &str, peer: Option<&str>| {
        let row = rows.iter().find(|row| row["case"] == case && row["peer"].as_str() == peer).unwrap();
        assert!(number(row, "ratio") >= 1.0 && number(row, "median") >= number(row, "floor"), "{row}");
        number(row, "median")
    };
    // A loop defeats LRU, and whatever is likelier is worth keeping.
    assert!(missed("loop-50", Some("LRU")) > 99.0);
    assert!(missed("zipf-25", None) < missed("zipf-25", Some("FIFO")));
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(picture.contains("S3-FIFO") && picture.contains("phases"));
    std::fs::remove_file(svg).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_netvm"))
        .args(["bench", "eviction", "--trace", "/nonexistent/record"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("no record in /nonexistent/record"));
}

#[test]
fn a_bench_that_is_interrupted_leaves_nothing() {
    let folder = std::env::temp_dir().join(format!("netvm-bench-interrupted-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let left = || std::fs::read_dir(&folder).unwrap().count();
    let until = |what: &str, so: &dyn Fn() -> bool| {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !so() {
            assert!(std::time::Instant::now() < end, "{what}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    // Programs that it has started know the folder.
    let is_known = || {
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let known = folder.to_str().unwrap();
        let knows = |arguments: Vec<u8>| String::from_utf8_lossy(&arguments).contains(known);
        processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok()).any(knows)
    };
    let mut benches = vec![&["transfer"][..], &["rma", "--peers", "none", "--link", "unix"]];
    if netvm_sys::uffd::probe().is_ok() {
        benches.push(&["failure"]);
        if std::path::Path::new("/usr/bin/redis-server").exists() {
            benches.push(&["apps", "--app", "redis", "--quick"]);
        } else {
            println!("skipped (bench apps: no redis-server)");
        }
    } else {
        println!("skipped (bench failure and apps: no userfaultfd)");
    }
    for signal in ["-INT", "-TERM", "-KILL"] {
        for &arguments in &benches {
            // Whoever runs the tests in the background may have had SIGINT ignored.
            let mut command = Command::new("env");
            command.args(["--default-signal=INT", env!("CARGO_BIN_EXE_netvm"), "bench"]);
            command.args(arguments).env("TMPDIR", &folder);
            let mut bench = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            until("it never began", &|| left() > 0);
            std::thread::sleep(std::time::Duration::from_millis(200));
            assert!(Command::new("kill").args([signal, &bench.id().to_string()]).status().unwrap().success());
            assert!(bench.wait().unwrap().code().is_none(), "{arguments:?} has not ended by {signal}");
            until(&format!("{arguments:?} leaves something at {signal}"), &|| left() == 0 && !is_known());
        }
    }
    std::fs::remove_dir(&folder).unwrap();
}
