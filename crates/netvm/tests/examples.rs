//! The examples, each as several processes.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use netvm::security::Secret;

/// Where the examples are, built as this test was.
fn examples() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let profile = test.parent().and_then(Path::parent).unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--offline", "--workspace", "--examples"]);
        // What it tells tests would make it build everything again.
        let tells = |name: &str| name.starts_with("CARGO_") && name != "CARGO_HOME";
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(tells) {
                cargo.env_remove(name);
            }
        }
        cargo.args(["--target-dir", profile.parent().unwrap().to_str().unwrap()]);
        let name = profile.file_name().unwrap().to_str().unwrap();
        cargo.args(["--profile", if name == "debug" { "dev" } else { name }]);
        assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
        profile.join("examples")
    })
}

fn start(name: &str, args: &[&str], secret: Option<&Path>) -> Child {
    let mut command = Command::new(examples().join(name));
    if let Some(secret) = secret {
        command.env("NETVM_SECRET_FILE", secret);
    }
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

struct Listener {
    process: Child,
    output: BufReader<ChildStdout>,
    /// What the others are started with.
    args: Vec<String>,
}

/// Starts the first one, which prints the command for the others.
fn listen(name: &str, more: &[&str], secret: Option<&Path>) -> Listener {
    let mut process = start(name, &[&["listen", "127.0.0.1:0"], more].concat(), secret);
    let mut output = BufReader::new(process.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    let mut words = line.split_whitespace().map(str::to_owned);
    assert_eq!(words.next().as_deref(), Some(name), "{line}");
    Listener { process, output, args: words.collect() }
}

fn end(name: &str, process: Child) -> String {
    let output = process.wait_with_output().unwrap();
    assert!(output.status.success(), "{name}: {:?}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Runs it with so many others; returns what the first one and the others print.
fn run(name: &str, more: &[&str], others: usize, secret: Option<&Path>) -> (String, Vec<String>) {
    let Listener { process, mut output, args } = listen(name, more, secret);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let others: Vec<Child> = (0..others).map(|_| start(name, &args, secret)).collect();
    let others = others.into_iter().map(|other| end(name, other)).collect();
    let mut text = String::new();
    output.read_to_string(&mut text).unwrap();
    end(name, process);
    (text, others)
}

#[test]
fn far_join() {
    if let Err(error) = netvm_sys::uffd::probe() {
        eprintln!("far_join: skipped (userfaultfd: {error})");
        return;
    }
    let config = netvm::lender::LenderConfig { size_bytes: 256 << 20, ..Default::default() };
    let mut lender = netvm::lender::Lender::bind(config).unwrap();
    let address = lender.addresses().remove(0);
    std::thread::spawn(move || lender.run(&netvm::lender::StopFlag::new().unwrap()).unwrap());
    let output = end("far_join", start("far_join", &[&address, "300000", "8"], None));
    assert!(output.starts_with("300000 orders of "), "{output}");
}

#[test]
fn ping_pong() {
    let (_, others) = run("ping_pong", &[], 1, None);
    assert!(others[0].starts_with("1000 round trips"), "{others:?}");
}

#[test]
fn producer_consumer() {
    let (text, others) = run("producer_consumer", &[], 1, None);
    assert!(text.contains("consumed 5000 items") && others[0].contains("produced 5000"), "{text}{others:?}");
}

#[test]
fn distributed_counter() {
    let (text, _) = run("distributed_counter", &["3"], 3, None);
    assert!(text.contains("counted to 3000; numbers drawn from 0 to 2999"), "{text}");
}

#[test]
fn work_queue() {
    let (text, others) = run("work_queue", &["3"], 3, None);
    assert!(text.contains("sum of squares: 2668667000"), "{text}");
    let jobs = |text: &String| text.split(' ').nth(1).unwrap().parse::<u32>().unwrap();
    assert_eq!(others.iter().map(jobs).sum::<u32>(), 2000, "{others:?}");
}

#[test]
fn halo_exchange() {
    let (text, others) = run("halo_exchange", &["4"], 3, None);
    assert!(text.contains("process 0 of 4: as the serial result"), "{text}");
    assert!(others.iter().all(|other| other.contains("as the serial result")), "{others:?}");
}

#[test]
fn collect_lines() {
    let Listener { process, mut output, args } = listen("collect_lines", &["3"], None);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut senders: Vec<Child> = (0..3).map(|_| start("collect_lines", &args, None)).collect();
    for (number, sender) in senders.iter_mut().enumerate() {
        for line in 0..500 {
            writeln!(sender.stdin.as_mut().unwrap(), "{line} from {number}").unwrap();
        }
    }
    // One dies when all has come: before it is a sender nobody would be told.
    let mut dying = senders.pop().unwrap();
    let mut lines = Vec::new();
    while lines.len() < 1500 {
        let mut line = String::new();
        assert!(output.read_line(&mut line).unwrap() > 0, "{lines:?}");
        lines.push(line);
    }
    dying.kill().unwrap();
    dying.wait().unwrap();
    // Their ends of the pipe go, and so the processes.
    senders.into_iter().for_each(|sender| drop(end("collect_lines", sender)));
    for line in output.lines() {
        lines.push(line.unwrap());
    }
    end("collect_lines", process);
    for number in 0..3 {
        let of_sender = |line: &&String| line.trim_end().ends_with(&format!("from {number}"));
        let numbers: Vec<u32> = lines
            .iter()
            .filter(of_sender)
            .map(|line| line.split(' ').nth(1).unwrap().parse().unwrap())
            .collect();
        assert_eq!(numbers, (0..500).collect::<Vec<_>>());
    }
    let ends = |what: &str| lines.iter().filter(|line| line.trim_end().ends_with(what)).count();
    assert_eq!((ends("has finished"), ends("has died")), (2, 1));
}

/// As between machines: everybody proves to know the secret.
#[test]
fn examples_share_a_secret() {
    let folder = std::env::temp_dir().join(format!("netvm-examples-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let secret = folder.join("secret");
    Secret::random().unwrap().write_new_file(&secret).unwrap();
    let (_, others) = run("ping_pong", &[], 1, Some(&secret));
    assert!(others[0].starts_with("1000 round trips"), "{others:?}");
    std::fs::remove_dir_all(folder).unwrap();
}
