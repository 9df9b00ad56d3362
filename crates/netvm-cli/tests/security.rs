//! Secrets and encryption, from the command line.

mod common;

use common::{Done, Folder, Guard, can_run, finish, netvm};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A secret file.
fn secret(folder: &Folder, name: &str) -> PathBuf {
    let path = folder.path(name);
    finish(netvm().args(["secret", "new"]).arg(&path)).must_succeed();
    path
}

#[test]
fn shells_offer_only_what_is_for_people() {
    for shell in ["bash", "zsh", "fish"] {
        let done = finish(netvm().args(["completions", shell])).must_succeed();
        for there in ["lend-size", "bench", "fault", "replicas"] {
            assert!(done.out().contains(there), "{there} in {shell}");
        }
        for hidden in ["demo-worker", "ublk-guard"] {
            assert!(!done.out().contains(hidden), "{hidden} in {shell}");
        }
    }
}

/// `netvm completions bash | head -1`
#[test]
fn who_prints_ends_quietly_when_nobody_reads() {
    for arguments in [&["completions", "bash"][..], &["doctor"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = netvm().args(arguments).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.is_empty() && !output.status.success(), "{arguments:?}: {} {said}", output.status);
    }
}

/// What a full disk has taken a part of is not there for the next try.
#[test]
fn a_full_disk_keeps_no_part_of_a_secret() {
    const TEST: &str = "a_full_disk_keeps_no_part_of_a_secret";
    let folder = Folder::new("security-full");
    let at = folder.path("");
    let mount = Command::new("mount").args(["-t", "tmpfs", "-o", "size=16k", "none"]).arg(&at).output();
    if !mount.is_ok_and(|output| output.status.success()) {
        let _ = writeln!(std::io::stderr(), "{TEST}: skipped (nothing can be mounted)");
        return;
    }
    let full = std::fs::write(at.join("full"), vec![1; 1 << 20]);
    let new = finish(netvm().args(["secret", "new"]).arg(at.join("key")));
    let run =
        finish(netvm().args(["run", "--local", "8M", "--trace"]).arg(at.join("trace")).args(["--", "true"]));
    let left: Vec<_> = std::fs::read_dir(&at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    let _ = std::fs::remove_file(at.join("full"));
    let again = finish(netvm().args(["secret", "new"]).arg(at.join("key")));
    let _ = Command::new("umount").arg("-l").arg(&at).status();
    assert!(full.is_err());
    for done in [new, run] {
        assert!(!done.status.success(), "{}", done.err);
        assert!(done.err.contains("No space left") || done.err.contains("userfaultfd"), "{}", done.err);
    }
    assert_eq!(left, ["full"]);
    again.must_succeed();
}

/// A lender over TCP on this machine, with more arguments, and its address.
fn lend(arguments: &[&str], secret: Option<&Path>) -> (Guard, String) {
    let mut command = netvm();
    command.args(["lend", "--size", "256M", "--listen", "127.0.0.1:0"]).args(arguments);
    if let Some(secret) = secret {
        command.arg("--secret").arg(secret);
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.split(" at ").nth(1).expect("no address").trim();
    (Guard(child), address.split(',').next().unwrap().to_owned())
}

fn status(address: &str, arguments: &[&str], secret: Option<&Path>) -> Done {
    let mut command = netvm();
    command.args(["status", address]).args(arguments).env_remove("NETVM_SECRET_FILE");
    if let Some(secret) = secret {
        command.arg("--secret").arg(secret);
    }
    finish(&mut command)
}

/// The command failed for a reason with these words, in one line.
#[track_caller]
fn must_say(done: &Done, words: &[&str]) {
    assert_eq!(done.status.code(), Some(125), "{}", done.err);
    assert_eq!(done.err.lines().count(), 1, "{}", done.err);
    for word in words {
        assert!(done.err.contains(word), "{word} is not in: {}", done.err);
    }
}

#[test]
fn the_same_secret_on_both_sides() {
    let folder = Folder::new("secret");
    let (one, other) = (secret(&folder, "one"), secret(&folder, "other"));
    let (_lender, address) = lend(&[], Some(&one));
    let done = status(&address, &[], Some(&one)).must_succeed();
    assert!(done.out().contains("authenticated, not encrypted"), "{}", done.out());
    let done = status(&address, &["--encrypt"], Some(&one)).must_succeed();
    assert!(done.out().contains("authenticated and encrypted"), "{}", done.out());
    let by_environment =
        finish(netvm().args(["status", &address]).env("NETVM_SECRET_FILE", &one)).must_succeed();
    assert!(by_environment.out().contains("authenticated"), "{}", by_environment.out());
    must_say(&status(&address, &[], None), &[&address, "secret", "--secret FILE"]);
    must_say(&status(&address, &[], Some(&other)), &[&address, "another secret"]);
    must_say(&status(&address, &["--encrypt"], None), &["encryption needs a secret"]);
}

/// A demo asks its lender twice, before it sorts and after.
#[test]
fn a_secret_that_comes_by_a_pipe_is_read_once() {
    if !can_run("a_secret_that_comes_by_a_pipe_is_read_once", &["/usr/bin/cat"]) {
        return;
    }
    let folder = Folder::new("pipe");
    let key = secret(&folder, "key");
    let (_lender, address) = lend(&[], Some(&key));
    let demo =
        "cat \"$1\" | \"$0\" demo --local 8M --data 32M --lender \"$2\" --secret /dev/stdin --svg \"$3\"";
    let mut shell = Command::new("sh");
    shell
        .args(["-c", demo, env!("CARGO_BIN_EXE_netvm")])
        .arg(&key)
        .arg(&address)
        .arg(folder.path("demo.svg"));
    let done = finish(&mut shell).must_succeed();
    assert!(done.out().contains("Results are equal."), "{}", done.out());
}

#[test]
fn a_lender_that_insists_on_encryption_or_has_no_secret() {
    let folder = Folder::new("insists");
    let one = secret(&folder, "one");
    let (_lender, address) = lend(&["--encrypt"], Some(&one));
    let done = status(&address, &["--json"], Some(&one)).must_succeed();
    assert!(done.out().contains("authenticated and encrypted"), "{}", done.out());
    let (_lender, address) = lend(&[], None);
    status(&address, &[], None).must_succeed();
    must_say(&status(&address, &[], Some(&one)), &[&address, "cannot prove"]);
}

#[test]
fn secret_files_are_checked_and_networks_need_one() {
    let folder = Folder::new("files");
    let one = secret(&folder, "one");
    assert_eq!(one.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    must_say(&finish(netvm().args(["secret", "new"]).arg(&one)), &["exists and is kept", "another file"]);
    std::fs::set_permissions(&one, std::fs::Permissions::from_mode(0o644)).unwrap();
    must_say(&status("127.0.0.1:1", &[], Some(&one)), &["mode 644", "chmod 600"]);
    // To change the mode of these would harm others.
    for (path, words) in [("/tmp", "is a folder"), ("/dev/zero", "no ordinary file")] {
        let done = status("127.0.0.1:1", &[], Some(Path::new(path)));
        must_say(&done, &[path, words]);
        assert!(!done.err.contains("chmod"), "{}", done.err);
    }
    // A pipe that nobody writes to is not waited for.
    let pipe = folder.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    std::fs::set_permissions(&pipe, std::fs::Permissions::from_mode(0o600)).unwrap();
    must_say(&status("127.0.0.1:1", &[], Some(&pipe)), &["pipe", "nobody writes to"]);
    for option in ["--learn", "--trace", "--report"] {
        let done = finish(netvm().args(["run", option]).arg(&pipe).args(["--", "true"]));
        must_say(&done, &[option, "pipe that nobody reads"]);
    }
    let network = ["lend", "--size", "64M", "--listen", "0.0.0.0:0"];
    let done = finish(netvm().args(network).env_remove("NETVM_SECRET_FILE"));
    must_say(&done, &["0.0.0.0:", "--secret FILE", "--insecure"]);
    let (lender, _) = lend(&["--listen", "0.0.0.0:0", "--insecure"], None);
    drop(lender);
    std::fs::set_permissions(&one, std::fs::Permissions::from_mode(0o600)).unwrap();
    let (lender, _) = lend(&["--listen", "0.0.0.0:0"], Some(&one));
    drop(lender);
}

/// Programs that fork, on far memory behind a secret: the same output, encrypted or not.
#[test]
fn programs_run_on_protected_memory() {
    let script = "import os, hashlib\n\
        data = bytearray(os.urandom(1 << 20)) * 24\n\
        pid = os.fork()\n\
        if pid == 0:\n    data[:4096] = bytes(4096); os._exit(0 if sum(data[:4096]) == 0 else 1)\n\
        print(os.waitpid(pid, 0)[1], data[:1 << 20] * 24 == data)\n";
    if !can_run("programs_run_on_protected_memory", &["/usr/bin/python3"]) {
        return;
    }
    let folder = Folder::new("run");
    let one = secret(&folder, "one");
    for arguments in [&[][..], &["--encrypt"]] {
        let (_lender, address) = lend(&[], Some(&one));
        for lender in [&["--lender", &address][..], &["--lend-size", "256M"]] {
            let mut command = netvm();
            command
                .args(["run", "--local", "8M", "--json"])
                .args(lender)
                .args(arguments)
                .arg("--secret")
                .arg(&one);
            let done = finish(command.args(["--", "/usr/bin/python3", "-c", script])).must_succeed();
            assert_eq!(done.out().trim(), "0 True", "{lender:?} {arguments:?}");
            assert!(done.summary()["bytes_out"].as_u64().unwrap() > 4 << 20, "{}", done.err);
        }
        let mut command = netvm();
        command.args(["run", "--lender", &address]).env_remove("NETVM_SECRET_FILE");
        must_say(&finish(command.args(["--", "/usr/bin/true"])), &[&address, "--secret FILE"]);
    }
}

/// What a run hands to its private lender is not among anybody's arguments or variables.
#[test]
fn the_secret_of_a_run_stays_private() {
    if !can_run("the_secret_of_a_run_stays_private", &["/usr/bin/python3"]) {
        return;
    }
    let script = "import os, glob, stat\n\
        run = os.environ['NETVM_RUN']\n\
        secret = open(run, 'rb').read()[128:160]\n\
        assert any(secret)\n\
        modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (run, os.path.dirname(run))]\n\
        shown = 0\n\
        for path in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ'):\n    \
            try: text = open(path, 'rb').read()\n    \
            except OSError: continue\n    \
            shown += secret in text or secret.hex().encode() in text\n\
        print([oct(mode) for mode in modes], shown)\n";
    let mut command = netvm();
    command.args(["run", "--lend-size", "64M", "--", "/usr/bin/python3", "-c", script]);
    assert_eq!(finish(&mut command).must_succeed().out().trim(), "['0o600', '0o700'] 0");
}
