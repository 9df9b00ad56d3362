//! What cannot be meant is refused, with what to do.

use super::*;

#[test]
fn other_framings_are_told_apart_from_other_servers() {
    let (_folder, source, target) = folders("transfer-framings");
    let file = random_file(&source.join("a"), 10);
    for (receives, sends) in [(&["--framing", "simple"][..], &[][..]), (&[][..], &["--framing", "simple"])] {
        let receiver = Receiver::start(&target, receives);
        let done = finish(&mut send(&receiver.address, &[&file], sends));
        assert!(!done.status.success() && done.err.contains("--framing"), "{done:?}");
        assert!(!done.err.contains("check the address"), "{done:?}");
    }
}

#[test]
fn the_kernel_cannot_encrypt_and_both_sides_know_at_once() {
    let (folder, source, target) = folders("transfer-contrary");
    let file = random_file(&source.join("a"), 10);
    let key = folder.path("key");
    finish(netvm().args(["secret", "new"]).arg(&key)).must_succeed();
    let how = ["--secret", key.to_str().unwrap(), "--method", "sendfile", "--encrypt"];
    // Nobody listens there.
    let sent = finish(&mut send("127.0.0.1:1", &[&file], &how));
    let received = finish(netvm().arg("recv").arg(&target).args(["--listen", "127.0.0.1:0"]).args(how));
    for done in [sent, received] {
        assert!(!done.status.success() && done.err.contains("copy or mmap"), "{done:?}");
        assert_eq!(done.err.lines().count(), 1, "{done:?}");
    }
}

#[test]
fn a_folder_in_the_way_is_not_to_be_overwritten() {
    let (_folder, source, target) = folders("transfer-in-the-way");
    let file = random_file(&source.join("a"), 10);
    fs::create_dir(target.join("a")).unwrap();
    fs::create_dir(target.join("file-0001")).unwrap();
    for (how, code) in [
        (&[][..], 1),
        (&["--overwrite"], 125),
        (&["--framing", "simple"], 125),
        (&["--framing", "simple", "--overwrite"], 125),
    ] {
        let receiver = Receiver::start(&target, how);
        let framing = how.iter().filter(|word| **word != "--overwrite").copied().collect::<Vec<_>>();
        let sent = finish(&mut send(&receiver.address, &[&file], &framing));
        let received = receiver.end();
        assert_eq!(received.status.code(), Some(code), "{received:?}");
        // In the simple framing the sender may be done before anybody has looked.
        if framing.is_empty() {
            assert_eq!(sent.status.code(), Some(code), "{sent:?}");
        }
        assert!(
            received.err.contains("is in the way") && !received.err.contains("--overwrite"),
            "{received:?}"
        );
        assert!(target.join("a").is_dir() && target.join("file-0001").is_dir());
    }
}

#[test]
fn who_is_told_to_stop_while_it_waits_leaves_no_socket() {
    use std::os::unix::process::ExitStatusExt;
    let (folder, _source, target) = folders("transfer-stopped");
    let socket = folder.path("socket");
    for signal in [netvm_sys::signal::SIGTERM, netvm_sys::signal::SIGINT] {
        let listen = format!("unix:{}", socket.display());
        // Whoever runs the tests in the background may have had SIGINT ignored.
        let mut command = std::process::Command::new("env");
        command.args(["--default-signal=INT", env!("CARGO_BIN_EXE_netvm"), "recv"]).arg(&target);
        command.args(["--listen", &listen]).stderr(std::process::Stdio::null());
        let mut receiver = common::Guard(command.spawn().unwrap());
        common::until("it listens", || socket.exists());
        netvm_sys::signal::send(receiver.0.id(), signal).unwrap();
        assert_eq!(receiver.0.wait().unwrap().signal(), Some(signal));
        assert!(!socket.exists());
    }
    // What nohup(1) and shells have made it ignore does not end it.
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "trap '' HUP INT; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_netvm"), "recv"]);
    command.arg(&target).arg("--listen").arg(format!("unix:{}", socket.display()));
    let mut receiver = common::Guard(command.stderr(std::process::Stdio::null()).spawn().unwrap());
    common::until("it listens", || socket.exists());
    for signal in [netvm_sys::signal::SIGHUP, netvm_sys::signal::SIGINT, netvm_sys::signal::SIGTERM] {
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(receiver.0.try_wait().unwrap().is_none(), "it has ended before {signal}");
        netvm_sys::signal::send(receiver.0.id(), signal).unwrap();
    }
    assert_eq!(receiver.0.wait().unwrap().signal(), Some(netvm_sys::signal::SIGTERM));
}
