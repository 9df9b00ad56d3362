//! What `docs/json.md` says of `--json`, and what is printed.

mod common;

use common::{Folder, Guard, Lender, can_run, finish, netvm};
use netvm::stats::PagerStats;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;

type Fields = BTreeSet<String>;

fn document() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/json.md");
    std::fs::read_to_string(path).unwrap()
}

/// Fields in the tables below a heading.
#[track_caller]
fn told(heading: &str) -> Fields {
    let document = document();
    let mut lines = document.lines().skip_while(|line| *line != format!("## {heading}")).skip(1).peekable();
    assert!(lines.peek().is_some(), "there is no {heading}");
    let lines = lines.take_while(|line| !line.starts_with("## "));
    lines
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(field, _)| field.to_owned())
        .collect()
}

/// Adds the fields of a value, as the document names them.
fn add(value: &Value, path: &str, fields: &mut Fields) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let key = if path == "held_bytes" { "CLASS" } else { key };
                add(value, &if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }, fields);
            }
        }
        Value::Array(values) if values.iter().any(Value::is_object) => {
            values.iter().for_each(|value| add(value, &format!("{path}[]"), fields));
        }
        _ => drop(fields.insert(path.to_owned())),
    }
}

#[track_caller]
fn must_be_as_told(heading: &str, value: &Value) {
    let mut fields = Fields::new();
    add(value, "", &mut fields);
    // What there is nothing to say of is left out of findings.
    let told = told(heading);
    let other: Vec<_> =
        fields.symmetric_difference(&told).filter(|field| *field != "findings[].fix").collect();
    assert!(other.is_empty(), "{heading}: {other:?} told or printed, not both:\n{value}");
}

fn parse(text: &[u8]) -> Value {
    serde_json::from_slice(text).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(text)))
}

#[test]
fn of_runs_and_lenders_all_fields_are_told() {
    let python = "/usr/bin/python3";
    if !can_run("of_runs_and_lenders_all_fields_are_told", &[python]) {
        return;
    }
    let folder = Folder::new("json");
    let lenders = ["one", "two"].map(|name| Lender::named(&folder, name, "128M"));
    let mut command = netvm();
    command.env("NETVM_LINK", "socket").args([
        "run",
        "--json",
        "--explain",
        "--local",
        "8M",
        "--tier",
        "lender",
    ]);
    command.args(lenders.iter().flat_map(|lender| ["--lender", &lender.address]));
    let program = "import os, sys\ndata = os.urandom(32 << 20)\nsum(data[::4096])\nprint('!', end='', flush=True)\nsys.stdin.read()";
    command
        .args(["--", python, "-c", program])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut run = Guard(command.spawn().unwrap());
    let mut ready = [0];
    run.0.stdout.as_mut().unwrap().read_exact(&mut ready).expect("the program did not come so far");
    let pid = run.0.id();
    let top = finish(netvm().args(["top", "--json", "--interval", "0.1", "--pid", &pid.to_string()]))
        .must_succeed();
    must_be_as_told("netvm top --json", &parse(&top.out));
    // Others may run, too.
    let runs = finish(netvm().args(["status", "--json"])).must_succeed().out();
    let mine = runs.lines().map(|line| parse(line.as_bytes())).find(|run| run["pid"] == pid);
    must_be_as_told("netvm status --json", &mine.expect("the run is there"));
    must_be_as_told("netvm status --json ADDRESS", &lenders[0].status());
    drop(run.0.stdin.take());
    let mut said = String::new();
    run.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(run.0.wait().unwrap().success(), "{said}");
    must_be_as_told("netvm run --json", &parse(said.lines().last().unwrap().as_bytes()));
}

#[test]
fn counters_are_told_as_metrics_have_them() {
    let document = document();
    for (name, help) in PagerStats::NAMES.iter().zip(PagerStats::HELP) {
        let row = format!("| `{name}` | {} |", help.trim());
        assert!(document.lines().any(|line| line == row), "it has no line\n{row}");
    }
}

#[test]
fn of_doctor_transfers_and_benches_all_fields_are_told() {
    must_be_as_told("netvm doctor --json", &parse(&finish(netvm().args(["doctor", "--json"])).out));
    let folder = Folder::new("json-send");
    std::fs::create_dir(folder.path("to")).unwrap();
    std::fs::write(folder.path("file"), "contents").unwrap();
    let address = format!("unix:{}", folder.path("socket").display());
    let mut receiver = netvm();
    receiver.args(["recv", "--listen", &address, "--json"]).arg(folder.path("to"));
    let mut receiver = Guard(receiver.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut first = [0];
    receiver.0.stderr.as_mut().unwrap().read_exact(&mut first).expect("it says when it listens");
    let sent =
        finish(netvm().args(["send", "--json", "--to", &address]).arg(folder.path("file"))).must_succeed();
    let mut received = Vec::new();
    receiver.0.stdout.take().unwrap().read_to_end(&mut received).unwrap();
    for said in [&sent.out, &received] {
        must_be_as_told("netvm send --json, netvm recv --json", &parse(said));
    }
    let rows = finish(netvm().args(["bench", "eviction", "--quick", "--json"])).must_succeed().out();
    must_be_as_told("netvm bench --json", &parse(rows.lines().next().unwrap().as_bytes()));
}
