//! Who may mount.

use super::*;

/// Nobody on most systems; it owns nothing here but what the test gives it.
const USER: u32 = 65534;

/// Starts a mount of 16 MiB, which must succeed.
#[track_caller]
fn mounted(command: &mut Command) -> Guard {
    let mut process = Guard(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    if !line.contains("mounted 16 MiB") {
        let _ = process.0.kill();
        let mut said = String::new();
        process.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        panic!("{line} {said}");
    }
    process
}

/// Whether another user reaches the program at all: not below root's own folder. Says so if not.
fn others_can_run(test: &str) -> bool {
    let mut command = Command::new("/usr/bin/setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]);
    let can = finish(command.arg(netvm().get_program()).arg("--version")).status.success();
    if !can {
        let _ = writeln!(std::io::stderr(), "{test}: skipped (no other user may run what is built here)");
    }
    can
}

#[test]
fn users_mount_for_themselves() {
    const NAME: &str = "users_mount_for_themselves";
    if !can_mount(NAME, &["/usr/bin/setpriv"]) || !others_can_run(NAME) {
        return;
    }
    let folder = Folder::new("mount-user");
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let lender = Lender::at(&free.to_string(), "64M");
    let at = folder.path("mount");
    fs::create_dir(&at).unwrap();
    std::os::unix::fs::chown(&at, Some(USER), Some(USER)).unwrap();
    let as_user = |program: &std::ffi::OsStr| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]).arg(program);
        command
    };
    let mount = |command: &mut Command| {
        command.arg("mount").arg(&at).args(["--size", "16M", "--lender", &lender.address]);
    };
    // Without the program that may, a sentence says which one.
    let setpriv = finish(Command::new("sh").args(["-c", "command -v setpriv"])).must_succeed();
    let mut alone = Command::new(setpriv.out().trim());
    alone.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]).arg(netvm().get_program());
    mount(alone.env("PATH", "/nowhere"));
    let done = finish(&mut alone);
    assert!(!done.status.success() && done.err.contains("install fuse3"), "{done:?}");
    if !has(NAME, &["/usr/bin/fusermount3"]) {
        return;
    }
    if fs::metadata("/dev/fuse").unwrap().mode() & 0o006 != 0o006 {
        let _ = writeln!(std::io::stderr(), "{NAME}: skipped (only root may open /dev/fuse)");
        return;
    }
    let mut command = as_user(netvm().get_program());
    mount(&mut command);
    let mut process = mounted(&mut command);
    let script =
        "set -e; cd \"$1\"; head -c 3000000 /dev/urandom > a; cp a b; sync; cmp a b; stat -c %u a; rm a";
    let mut command = as_user("sh".as_ref());
    let done = finish(command.args(["-c", script, "sh"]).arg(&at)).must_succeed();
    assert_eq!(done.out().trim(), "65534");
    // Not even root sees it.
    fails_with(fs::read_dir(&at).map(drop), 13);
    signal(process.0.id(), "TERM");
    let status = wait(&mut process.0, Duration::from_secs(20));
    assert!(status.is_some_and(|status| status.success()), "{status:?}");
    assert!(!is_mounted(&at));
}

/// With the capability to mount, and nothing else of root: all users see the files, and no other program is needed.
#[test]
fn a_user_who_may_mount_does() {
    const NAME: &str = "a_user_who_may_mount_does";
    if !can_mount(NAME, &["/usr/bin/setpriv"]) || !others_can_run(NAME) {
        return;
    }
    if fs::metadata("/dev/fuse").unwrap().mode() & 0o006 != 0o006 {
        let _ = writeln!(std::io::stderr(), "{NAME}: skipped (only root may open /dev/fuse)");
        return;
    }
    let folder = Folder::new("mount-may");
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let lender = Lender::at(&free.to_string(), "64M");
    let at = folder.path("mount");
    fs::create_dir(&at).unwrap();
    std::os::unix::fs::chown(&at, Some(USER), Some(USER)).unwrap();
    let mut command = Command::new("/usr/bin/setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    command.args(["--inh-caps", "+sys_admin", "--ambient-caps", "+sys_admin", "--"]);
    command.arg(netvm().get_program()).arg("mount").arg(&at);
    command.args(["--size", "16M", "--lender", &lender.address]).env("PATH", "/nowhere");
    let mut process = mounted(&mut command);
    let data = bytes(9, 3_000_000);
    fs::write(at.join("file"), &data).unwrap();
    File::open(at.join("file")).unwrap().sync_all().unwrap();
    assert!(fs::read(at.join("file")).unwrap() == data);
    assert_eq!(fs::metadata(&at).unwrap().uid(), USER);
    signal(process.0.id(), "TERM");
    let status = wait(&mut process.0, Duration::from_secs(20));
    assert!(status.is_some_and(|status| status.success()), "{status:?}");
    assert!(!is_mounted(&at));
}
