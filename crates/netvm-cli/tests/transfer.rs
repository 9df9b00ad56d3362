//! `netvm send` and `netvm recv`: two real processes, and senders that mean harm.

mod common;
#[path = "transfer/names.rs"]
mod names;
#[path = "transfer/refusals.rs"]
mod refusals;

use common::{Done, Folder, Guard, Random, finish, netvm, wait};
use netvm_core::wire::{Hello, Role};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What both sides can do; and senders one more.
const METHODS: [&str; 3] = ["copy", "mmap", "sendfile"];
const ONESIDED: [&str; 2] = ["--method", "onesided"];
const PATIENCE: Duration = Duration::from_secs(60);

/// A `netvm recv` that listens.
struct Receiver {
    process: Guard,
    err: BufReader<std::process::ChildStderr>,
    address: String,
}

impl Receiver {
    fn start(folder: &Path, more: &[&str]) -> Self {
        let socket = format!("unix:{}.socket", folder.display());
        Self::start_at(&socket, folder, more)
    }

    #[track_caller]
    fn start_at(listen: &str, folder: &Path, more: &[&str]) -> Self {
        let mut command = netvm();
        command.arg("recv").arg(folder).args(["--json", "--listen", listen]).args(more);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut err = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        err.read_line(&mut line).unwrap();
        let (_, address) =
            line.trim().split_once("waiting for a sender at ").unwrap_or_else(|| panic!("{line}"));
        Self { address: address.to_owned(), process: Guard(child), err }
    }

    /// Waits for its end.
    #[track_caller]
    fn end(mut self) -> Done {
        let status = wait(&mut self.process.0, PATIENCE).expect("it hangs");
        let (mut out, mut err) = (Vec::new(), String::new());
        self.process.0.stdout.take().unwrap().read_to_end(&mut out).unwrap();
        self.err.read_to_string(&mut err).unwrap();
        Done { status, out, err, elapsed: Duration::ZERO }
    }
}

fn send(address: &str, paths: &[&Path], more: &[&str]) -> Command {
    let mut command = netvm();
    command.args(["send", "--json", "--to", address]).args(more).args(paths);
    command
}

fn summary(done: &Done) -> Value {
    serde_json::from_slice(&done.out).unwrap_or_else(|error| panic!("{error}: {done:?}"))
}

/// Both sides of a transfer that goes well.
#[track_caller]
fn transfer(target: &Path, paths: &[&Path], sends: &[&str], receives: &[&str]) -> (Value, Value) {
    let receiver = Receiver::start(target, receives);
    let sent = finish(&mut send(&receiver.address, paths, sends));
    let received = receiver.end();
    assert!(sent.status.success() && received.status.success(), "{sent:?}\n{received:?}");
    (summary(&sent), summary(&received))
}

fn random_file(path: &Path, bytes: usize) -> PathBuf {
    let mut random = Random(bytes as u64 + 1);
    let content: Vec<u8> = (0..bytes / 8 + 1).flat_map(|_| random.next().to_le_bytes()).collect();
    fs::write(path, &content[..bytes]).unwrap();
    path.to_owned()
}

/// Target and source folders for one test.
fn folders(name: &str) -> (Folder, PathBuf, PathBuf) {
    let folder = Folder::new(name);
    let (source, target) = (folder.path("source"), folder.path("target"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&target).unwrap();
    (folder, source, target)
}

/// A tree with everything that is sent.
fn tree(source: &Path) {
    for name in ["deep/er/est", "empty", "closed"] {
        fs::create_dir_all(source.join(name)).unwrap();
    }
    random_file(&source.join("big"), 9_000_001);
    random_file(&source.join("deep/er/est/one"), 1);
    random_file(&source.join("deep/page"), 4096);
    random_file(&source.join("closed/in it"), 70_000);
    random_file(&source.join("-strange\n\u{fc}"), 12);
    File::create(source.join("zero")).unwrap();
    let sparse = File::create(source.join("sparse")).unwrap();
    sparse.set_len(200 << 20).unwrap();
    sparse.write_all_at(&[7; 5000], (100 << 20) + 77).unwrap();
    for (name, mode) in [("big", 0o604), ("deep/page", 0o400), ("deep", 0o711), ("closed", 0o500)] {
        fs::set_permissions(source.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let old = std::time::UNIX_EPOCH + Duration::from_nanos(1_234_567_890_123_456_789);
    for name in ["big", "empty"] {
        File::open(source.join(name)).unwrap().set_modified(old).unwrap();
    }
}

/// Names below a folder, in order.
fn names(folder: &Path) -> Vec<PathBuf> {
    let mut names = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            names.push(path.strip_prefix(folder).unwrap().to_owned());
            if path.symlink_metadata().unwrap().is_dir() {
                folders.push(path);
            }
        }
    }
    names.sort();
    names
}

#[track_caller]
fn assert_same(one: &Path, other: &Path) {
    assert_eq!(names(one), names(other));
    for name in names(one) {
        let (here, there) = (one.join(&name), other.join(&name));
        let (a, b) = (here.metadata().unwrap(), there.metadata().unwrap());
        assert_eq!((a.mode(), a.mtime(), a.mtime_nsec()), (b.mode(), b.mtime(), b.mtime_nsec()), "{name:?}");
        if a.is_file() {
            assert_eq!(a.len(), b.len(), "{name:?}");
            let same = Command::new("cmp").arg(&here).arg(&there).status().unwrap();
            assert!(same.success(), "{name:?}");
            // A page that is written in a mapping brings its neighbours' blocks, in file systems with large folios.
            assert!(
                b.blocks() <= a.blocks() + 4096,
                "{name:?} has lost its holes: {} {}",
                a.blocks(),
                b.blocks()
            );
        }
    }
}

#[test]
fn trees_arrive_as_they_were_with_every_method() {
    let (_folder, source, target) = folders("transfer-tree");
    tree(&source);
    for (at, sends) in METHODS.iter().enumerate() {
        let receives = METHODS[(at + 1) % 3];
        for receives in [*sends, receives] {
            let into = target.join(format!("{sends}-{receives}"));
            fs::create_dir(&into).unwrap();
            let (sent, received) = transfer(&into, &[&source], &["--method", sends], &["--method", receives]);
            assert_same(&source, &into.join("source"));
            assert_eq!((&sent["files"], &received["files"]), (&7.into(), &7.into()), "{sent} {received}");
            assert_eq!((&sent["checked"], &sent["bytes"]), (&true.into(), &received["bytes"]));
            assert!(sent["moved_bytes"].as_u64().unwrap() < 12_000_000, "holes were sent: {sent}");
        }
    }
}

#[test]
fn files_are_written_one_sidedly_over_every_link() {
    let (folder, source, target) = folders("transfer-onesided");
    tree(&source);
    // Data, a hole, and data; and of a length that nothing divides.
    let file = random_file(&source.join("holes"), 7_654_321);
    File::options().write(true).open(&file).unwrap().set_len(60_000_001).unwrap();
    File::options().write(true).open(&file).unwrap().write_all_at(&[9; 33], 59_000_000).unwrap();
    let secret = folder.path("secret");
    assert!(finish(netvm().args(["secret", "new"]).arg(&secret)).status.success());
    let key = ["--secret", secret.to_str().unwrap()];
    let unix = format!("unix:{}", folder.path("socket").display());
    let tcp = "127.0.0.1:0".to_owned();
    for (round, (listen, link, security)) in [
        (&unix, "auto", &[][..]),
        (&tcp, "auto", &key[..]),
        (&tcp, "socket", &[][..]),
        (&tcp, "socket", &[key[0], key[1], "--encrypt"][..]),
    ]
    .into_iter()
    .enumerate()
    {
        let into = target.join(round.to_string());
        fs::create_dir(&into).unwrap();
        let receiver = Receiver::start_at(listen, &into, security);
        let mut sender = send(&receiver.address, &[&source], &[&ONESIDED, security].concat());
        let sent = finish(sender.env("NETVM_LINK", link));
        let received = receiver.end();
        assert!(sent.status.success() && received.status.success(), "{sent:?}\n{received:?}");
        assert_same(&source, &into.join("source"));
        let (sent, received) = (summary(&sent), summary(&received));
        assert_eq!((&sent["files"], &received["checked"]), (&8.into(), &true.into()), "{sent} {received}");
        assert_eq!(sent["moved_bytes"], received["moved_bytes"]);
        assert!(sent["moved_bytes"].as_u64().unwrap() < 20_000_000, "holes were sent: {sent}");
        let over_socket = matches!(sent["link"].as_str(), Some("tcp" | "sealed"));
        // Through a unix socket the file itself can be handed on. Without, the kernel copies between the processes, if it does.
        let reaches = listen == &unix || common::verdict("private memory") == "ok";
        assert_eq!(over_socket, link == "socket" || !reaches, "{sent}");
        assert!(into.join("source/holes").metadata().unwrap().blocks() * 512 < 20_000_000);
    }
    // It is nothing for a receiver, nor for a framing without messages.
    let done = finish(netvm().arg("recv").arg(&target).args(ONESIDED));
    assert!(!done.status.success() && done.err.contains("possible values: copy, mmap, sendfile"), "{done:?}");
    let done = finish(&mut send("127.0.0.1:1", &[&file], &["--framing", "simple", "--method", "onesided"]));
    assert!(!done.status.success() && done.err.contains("another method"), "{done:?}");
}

#[test]
fn long_files_come_over_several_connections() {
    let (folder, source, target) = folders("transfer-streams");
    tree(&source);
    // Data and holes, no end of which anything divides; and one that begins with a hole.
    let file = random_file(&source.join("long"), 41_234_567);
    File::options().write(true).open(&file).unwrap().set_len(90_000_001).unwrap();
    File::options().write(true).open(&file).unwrap().write_all_at(&[9; 33], 80_000_000).unwrap();
    let late = File::create(source.join("late")).unwrap();
    late.write_all_at(&fs::read(source.join("big")).unwrap(), 20_000_003).unwrap();
    let secret = folder.path("secret");
    assert!(finish(netvm().args(["secret", "new"]).arg(&secret)).status.success());
    let key = ["--secret", secret.to_str().unwrap()];
    let sealed = [key[0], key[1], "--encrypt"];
    let unix = format!("unix:{}", folder.path("socket").display());
    let tcp = "127.0.0.1:0".to_owned();
    for (round, (listen, security, streams, sends, receives)) in [
        (&unix, &[][..], "2", "copy", "copy"),
        (&unix, &[][..], "1", "copy", "copy"),
        (&tcp, &[][..], "3", "sendfile", "mmap"),
        (&tcp, &key[..], "16", "mmap", "sendfile"),
        (&tcp, &sealed[..], "2", "copy", "mmap"),
    ]
    .into_iter()
    .enumerate()
    {
        let into = target.join(round.to_string());
        fs::create_dir(&into).unwrap();
        let receiver = Receiver::start_at(listen, &into, &[security, &["--method", receives]].concat());
        let how = [security, &["--streams", streams, "--method", sends]].concat();
        let sent = finish(&mut send(&receiver.address, &[&source], &how));
        let received = receiver.end();
        assert!(sent.status.success() && received.status.success(), "{sent:?}\n{received:?}");
        assert_same(&source, &into.join("source"));
        let (sent, received) = (summary(&sent), summary(&received));
        assert_eq!((&sent["files"], &received["checked"]), (&9.into(), &true.into()), "{sent} {received}");
        assert_eq!((&sent["bytes"], &sent["moved_bytes"]), (&received["bytes"], &received["moved_bytes"]));
        assert!(sent["moved_bytes"].as_u64().unwrap() < 65_000_000, "holes were sent: {sent}");
        let streams: u64 = streams.parse().unwrap();
        assert_eq!((&sent["streams"], &received["streams"]), (&streams.into(), &streams.into()));
    }
    for (arguments, expected) in [
        (&["--streams", "0"][..], "1 to 16"),
        (&["--streams", "17"], "--streams 17 is not possible: a file is sent over 1 to 16"),
        (&["--streams", "2", "--method", "onesided"], "--streams 2 is not for --method onesided: only"),
        (&["--streams", "2", "--method", "device"], "--streams 2 is not for --method device: only"),
        (&["--streams", "2", "--framing", "simple"], "--streams 2 is not for --framing simple: only"),
    ] {
        let done = finish(&mut send("127.0.0.1:1", &[&file], arguments));
        assert!(!done.status.success() && done.err.contains(expected), "{done:?}");
    }
}

#[test]
fn the_second_time_nothing_is_sent_and_nothing_is_replaced_unasked() {
    let (folder, source, target) = folders("transfer-again");
    let file = random_file(&source.join("a"), 500_000);
    random_file(&source.join("b"), 10);
    transfer(&target, &[&source], &[], &[]);
    let (sent, _) = transfer(&target, &[&source], &[], &[]);
    assert_eq!(
        (&sent["there"], &sent["files"], &sent["moved_bytes"]),
        (&2.into(), &0.into(), &0.into()),
        "{sent}"
    );
    // The same length and the same time, and another content: the digest tells.
    let arrived = target.join("source/a");
    let time = arrived.metadata().unwrap().modified().unwrap();
    let open = File::options().write(true).open(&arrived).unwrap();
    open.write_all_at(b"x", 400_000).unwrap();
    open.set_modified(time).unwrap();
    // And one of another length.
    fs::write(target.join("source/b"), "mine").unwrap();
    let before = fs::read(&arrived).unwrap();
    let receiver = Receiver::start(&target, &[]);
    let sent = finish(&mut send(&receiver.address, &[&source], &[]));
    let received = receiver.end();
    assert_eq!((sent.status.code(), received.status.code()), (Some(1), Some(1)), "{sent:?} {received:?}");
    assert!(sent.err.contains("2 were kept") && sent.err.contains("--overwrite"), "{}", sent.err);
    assert_eq!(fs::read(&arrived).unwrap(), before);
    assert_eq!(fs::read(target.join("source/b")).unwrap(), b"mine");
    transfer(&target, &[&source], &[], &["--overwrite"]);
    assert_same(&source, &target.join("source"));
    assert!(file.exists() && folder.path("target").exists());
}

#[test]
fn links_are_left_out_and_what_is_named_must_be_there() {
    let (_folder, source, target) = folders("transfer-links");
    random_file(&source.join("a"), 10);
    symlink("/etc/passwd", source.join("link")).unwrap();
    assert!(Command::new("mkfifo").arg(source.join("fifo")).status().unwrap().success());
    let (sent, _) = transfer(&target, &[&source], &[], &[]);
    assert_eq!((&sent["left_out"], &sent["files"]), (&2.into(), &1.into()));
    assert_eq!(names(&target.join("source")), [PathBuf::from("a")]);
    for (paths, expected) in [
        (vec![source.join("missing")], "No such file"),
        (vec![source.join("fifo")], "neither a file nor a folder"),
        (vec![source.clone(), target.join("source")], "the same name"),
        (vec![PathBuf::from("/")], "no name"),
    ] {
        let paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
        let done = finish(&mut send("127.0.0.1:1", &paths, &[]));
        assert!(!done.status.success() && done.err.contains(expected), "{done:?}");
    }
    let done = finish(&mut send("127.0.0.1:1", &[&source], &[]));
    assert!(done.err.contains("netvm recv"), "{done:?}");
    let done = finish(netvm().arg("recv").arg(source.join("nowhere")));
    assert!(!done.status.success() && done.err.contains("mkdir"), "{done:?}");
    let done = finish(netvm().arg("recv").arg(source.join("a")));
    assert!(!done.status.success() && done.err.contains("Not a directory"), "{done:?}");
}

/// Kills one side as soon as enough has come: all of it takes a tenth of a second, or less.
#[track_caller]
fn cut(side: &mut Guard, mut enough: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !enough() {
        assert!(Instant::now() < end, "it does not come");
        std::thread::sleep(Duration::from_micros(500));
    }
    side.0.kill().unwrap();
    side.0.wait().unwrap();
}

#[test]
fn a_cut_transfer_goes_on_where_it_ended() {
    let (_folder, source, target) = folders("transfer-cut");
    const BYTES: u64 = 256 << 20;
    let file = source.join("big");
    {
        let content = random_file(&source.join("piece"), 1 << 20);
        let content = fs::read(content).unwrap();
        let open = File::create(&file).unwrap();
        for at in 0..256u64 {
            open.write_all_at(&content, at << 20).unwrap();
            open.write_all_at(&at.to_le_bytes(), at << 20).unwrap();
        }
    }
    let part_path = || {
        let parts = fs::read_dir(&target).unwrap().map(|entry| entry.unwrap().path());
        parts.into_iter().find(|path| path.extension().is_some_and(|end| end == "part"))
    };
    let part = || part_path().and_then(|path| path.metadata().ok());
    let ways = [
        ("copy", "copy", &["--streams", "1"][..]),
        ("sendfile", "sendfile", &["--streams", "1"]),
        ("copy", "mmap", &["--streams", "1"]),
        ("onesided", "copy", &[]),
        ("copy", "copy", &["--streams", "2"]),
        ("sendfile", "mmap", &["--streams", "4"]),
    ];
    for (sends, receives, how) in ways {
        let how = [&["--method", sends], how].concat();
        let receiver = Receiver::start(&target, &["--method", receives]);
        let mut sender = Guard(send(&receiver.address, &[&file], &how).spawn().unwrap());
        // Room is made ahead of what is written one-sidedly, and pieces come out of order.
        let enough = if how.contains(&"1") { 40 << 20 } else { 100 << 20 };
        cut(&mut sender, || part().is_some_and(|part| part.blocks() * 512 > enough));
        let received = receiver.end();
        assert!(!received.status.success() && received.err.contains("was cut"), "{received:?}");
        assert!(!target.join("big").exists(), "it was too fast to be cut");
        let came = part().unwrap().len();
        // Blocks may be allocated somewhat ahead of the length.
        assert!((32 << 20..BYTES).contains(&came), "{came}");
        let (sent, received) = transfer(&target, &[&file], &how, &["--method", receives]);
        let moved = sent["moved_bytes"].as_u64().unwrap();
        assert!(moved <= BYTES - came + (4 << 20), "sent again: {moved} of {BYTES}, {came} were there");
        assert_eq!(received["checked"], true);
        assert_same_file(&file, &target.join("big"));
        fs::remove_file(target.join("big")).unwrap();
    }
    // A receiver that is killed cannot say how far it was: what may have come out of order is sent again, and no more.
    let mut receiver = Receiver::start(&target, &[]);
    let streams = ["--streams", "2"];
    let mut sender = Guard(send(&receiver.address, &[&file], &streams).spawn().unwrap());
    cut(&mut receiver.process, || part().is_some_and(|part| part.blocks() * 512 > 100 << 20));
    assert!(!sender.0.wait().unwrap().success());
    let came = part().unwrap().len();
    assert!(came < BYTES, "it was too fast to be killed");
    let (sent, _) = transfer(&target, &[&file], &streams, &[]);
    let moved = sent["moved_bytes"].as_u64().unwrap();
    assert!(moved <= BYTES - came + (40 << 20), "sent again: {moved} of {BYTES}, {came} were there");
    assert_same_file(&file, &target.join("big"));
    fs::remove_file(target.join("big")).unwrap();
    // What is there and is not the beginning of the file is not believed.
    let receiver = Receiver::start(&target, &[]);
    let mut sender = Guard(send(&receiver.address, &[&file], &["--streams", "1"]).spawn().unwrap());
    cut(&mut sender, || part().is_some_and(|part| part.blocks() * 512 > 40 << 20));
    receiver.end();
    File::options()
        .write(true)
        .open(part_path().unwrap())
        .unwrap()
        .write_all_at(b"damaged", 5 << 20)
        .unwrap();
    let (sent, _) = transfer(&target, &[&file], &[], &[]);
    assert_eq!(sent["moved_bytes"], BYTES);
    assert_same_file(&file, &target.join("big"));
}

#[track_caller]
fn assert_same_file(one: &Path, other: &Path) {
    assert!(Command::new("cmp").arg(one).arg(other).status().unwrap().success());
}

#[test]
fn a_full_disk_is_told_to_both() {
    let (folder, source, target) = folders("transfer-full");
    let mounted =
        Command::new("mount").args(["-t", "tmpfs", "-o", "size=16m", "tmpfs"]).arg(&target).status();
    if !mounted.is_ok_and(|status| status.success()) {
        let _ = writeln!(std::io::stderr(), "a_full_disk_is_told_to_both: skipped (cannot mount a tmpfs)");
        return;
    }
    struct Unmount(PathBuf);
    impl Drop for Unmount {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
    let _unmount = Unmount(target.clone());
    let small = random_file(&source.join("a"), 1000);
    let big = random_file(&source.join("b"), 24 << 20);
    let socket = format!("unix:{}", folder.path("s").display());
    let ways = METHODS.map(|method| (method, "copy")).into_iter().chain([("copy", "onesided")]);
    for (method, sends) in ways {
        let receiver = Receiver::start_at(&socket, &target, &["--method", method]);
        let sent = finish(&mut send(&receiver.address, &[&small, &big], &["--method", sends]));
        let received = receiver.end();
        for done in [&sent, &received] {
            let text = &done.err;
            assert!(
                !done.status.success() && text.contains("No space left") && text.contains("cannot write b"),
                "{method}: {done:?}"
            );
        }
        assert_same_file(&small, &target.join("a"));
        assert!(!target.join("b").exists());
        for entry in fs::read_dir(&target).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
    }
}

/// A sender that says what it likes.
struct Hostile(UnixStream);

impl Hostile {
    fn connect(receiver: &Receiver) -> Self {
        Self::connect_as(receiver, 0)
    }

    fn connect_as(receiver: &Receiver, features: u64) -> Self {
        let mut stream = UnixStream::connect(receiver.address.strip_prefix("unix:").unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&Hello { features, ..Hello::new(Role::Transfer) }.encode()).unwrap();
        let mut hello = Hello::new(Role::Transfer).encode();
        stream.read_exact(&mut hello).unwrap();
        Self(stream)
    }

    /// It may have been thrown out by now.
    fn say(&mut self, kind: u8, payload: &[u8]) -> &mut Self {
        let mut frame = vec![kind, 0, 0, 0];
        frame.extend((payload.len() as u32).to_le_bytes());
        frame.extend(payload);
        let _ = self.0.write_all(&frame);
        self
    }

    fn entry(&mut self, folder: bool, mode: u16, bytes: u64, name: &[u8]) -> &mut Self {
        let mut payload = vec![u8::from(folder), 0];
        payload.extend(mode.to_le_bytes());
        payload.extend([0; 12]);
        payload.extend(bytes.to_le_bytes());
        payload.extend(name);
        self.say(1, &payload)
    }

    fn words(&mut self, kind: u8, words: &[u64]) -> &mut Self {
        let payload: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.say(kind, &payload)
    }

    /// A file, whatever the receiver's plan is.
    fn file(&mut self, name: &[u8], content: &[u8]) {
        self.entry(false, 0o666, content.len() as u64, name).words(2, &[1, 0]).words(4, &[0, 0]);
        self.words(5, &[0, content.len() as u64]);
        let _ = self.0.write_all(content);
        self.words(6, &[0]).words(7, &[1, 0, 0]);
    }

    /// What is said, until there is `expected` in it.
    fn hear_until(mut self, expected: &str) -> String {
        let (mut said, mut buffer) = (Vec::new(), [0; 4096]);
        loop {
            let got = self.0.read(&mut buffer).unwrap_or(0);
            said.extend(&buffer[..got]);
            let text = String::from_utf8_lossy(&said);
            if got == 0 || text.contains(expected) {
                return text.into_owned();
            }
        }
    }

    fn hear(mut self) -> Vec<u8> {
        let _ = self.0.shutdown(std::net::Shutdown::Write);
        let mut said = Vec::new();
        let _ = self.0.read_to_end(&mut said);
        said
    }
}

#[test]
fn hostile_senders_write_nothing_outside_the_folder() {
    let (folder, outside, target) = folders("transfer-hostile");
    fs::write(outside.join("precious"), "precious").unwrap();
    symlink(&outside, target.join("out")).unwrap();
    symlink(outside.join("precious"), target.join("file")).unwrap();
    fs::create_dir(target.join("folder")).unwrap();
    symlink("../../source", target.join("folder/up")).unwrap();
    // What would be the part of a file is a link, and one is a FIFO.
    let part = |name: &str| format!(".netvm-{:016x}.part", xxhash_rust::xxh3::xxh3_64(name.as_bytes()));
    symlink(outside.join("precious"), target.join(part("linked"))).unwrap();
    assert!(Command::new("mkfifo").arg(target.join(part("fifo"))).status().unwrap().success());
    let absolute = outside.join("new");
    let before = (names(&outside), names(&folder.path("target")));
    for name in [
        &b"../source/new"[..],
        absolute.to_str().unwrap().as_bytes(),
        b"out/new",
        b"out/precious",
        b"folder/up/new",
        b"folder/../../source/new",
        b"file/x",
        b"linked",
        b"fifo",
        b"..",
        b".",
        b"",
        b"a\0b",
        part("x").as_bytes(),
    ] {
        for overwrite in [&["--overwrite"][..], &[]] {
            let receiver = Receiver::start(&target, overwrite);
            let mut hostile = Hostile::connect(&receiver);
            hostile.file(name, b"harm");
            let said = hostile.hear();
            let done = receiver.end();
            let shown = String::from_utf8_lossy(name);
            assert!(
                !done.status.success() && said.windows(3).any(|three| three == [8, 0, 0]),
                "{shown}: {done:?}"
            );
            assert_eq!((names(&outside), names(&target)), before, "{shown}");
            assert_eq!(fs::read(outside.join("precious")).unwrap(), b"precious", "{shown}");
        }
    }
    // A link in the place of a file is replaced if asked, and what it leads to is not.
    let receiver = Receiver::start(&target, &["--overwrite"]);
    let mut hostile = Hostile::connect(&receiver);
    hostile.file(b"file", b"content");
    hostile.hear();
    assert!(receiver.end().status.success());
    assert_eq!(fs::read(outside.join("precious")).unwrap(), b"precious");
    assert!(target.join("file").symlink_metadata().unwrap().is_file());
}

#[test]
fn senders_that_break_the_protocol_are_told_so() {
    let (_folder, _, target) = folders("transfer-broken");
    type Harm = fn(&mut Hostile);
    let all: [(&str, Harm); 14] = [
        ("an unknown kind", |peer| {
            peer.say(77, b"");
        }),
        ("a long payload", |peer| peer.0.write_all(&[1, 0, 0, 0, 255, 255, 255, 255]).unwrap()),
        ("set-user-ID", |peer| {
            peer.entry(false, 0o4755, 0, b"x");
        }),
        ("too large", |peer| {
            peer.entry(false, 0o644, u64::MAX, b"x");
        }),
        ("another count", |peer| {
            peer.entry(false, 0o644, 1, b"x").words(2, &[2, 0]);
        }),
        ("an index", |peer| {
            peer.entry(false, 0o644, 1, b"x").words(2, &[1, 0]).words(4, &[1, 0]);
        }),
        ("from nowhere", |peer| {
            peer.entry(false, 0o644, 9, b"x").words(2, &[1, 0]).words(4, &[0, 5]);
        }),
        ("one-sided unasked", |peer| {
            peer.entry(false, 0o644, 9, b"x").words(2, &[1, 0]).words(10, &[0, 0]);
        }),
        ("written and not announced", |peer| {
            peer.entry(false, 0o644, 9, b"x").words(2, &[1, 0]).words(4, &[0, 0]).words(13, &[9]);
        }),
        ("a folder's bytes", |peer| {
            peer.entry(true, 0o755, 0, b"d").words(2, &[1, 0]).words(4, &[0, 0]);
        }),
        ("behind the end", |peer| {
            peer.entry(false, 0o644, 9, b"x").words(2, &[1, 0]).words(4, &[0, 0]).words(5, &[8, 2]);
        }),
        ("no bytes", |peer| {
            peer.entry(false, 0o644, 9, b"x").words(2, &[1, 0]).words(4, &[0, 0]).words(5, &[u64::MAX, 2]);
        }),
        ("done within a file", |peer| {
            peer.entry(false, 0o644, 9, b"x").words(2, &[1, 0]).words(4, &[0, 0]).words(7, &[1, 0, 0]);
        }),
        ("a wrong digest", |peer| {
            peer.entry(false, 0o644, 1, b"x").words(2, &[1, 1]).words(4, &[0, 0]).words(5, &[0, 1]);
            peer.0.write_all(b"x").unwrap();
            peer.words(6, &[1]);
        }),
    ];
    for (what, harm) in all {
        let receiver = Receiver::start(&target, &[]);
        let mut hostile = Hostile::connect(&receiver);
        harm(&mut hostile);
        let said = hostile.hear();
        let done = receiver.end();
        let expected =
            if what == "a wrong digest" { "did not arrive as it was sent" } else { "broke the protocol" };
        assert!(!done.status.success() && done.err.contains(expected), "{what}: {done:?}");
        assert!(String::from_utf8_lossy(&said).contains(expected), "{what}: it was not told");
        assert!(!target.join("x").exists(), "{what}");
    }
    // Random bytes behind the hellos.
    let mut random = Random(5);
    for _ in 0..20 {
        let receiver = Receiver::start(&target, &[]);
        let mut hostile = Hostile::connect(&receiver);
        let bytes: Vec<u8> = (0..random.next() % 500).map(|_| (random.next() % 10) as u8).collect();
        let _ = hostile.0.write_all(&bytes);
        hostile.hear();
        let done = receiver.end();
        assert!(done.status.code() == Some(125) && !done.err.contains("panicked"), "{done:?}");
    }
}

#[test]
fn connections_that_break_the_protocol_end_the_transfer() {
    let (_folder, _, target) = folders("transfer-lanes");
    const BYTES: u64 = 20;
    type Harm = fn(&mut Hostile, &mut Hostile);
    // A file of 20 bytes is to come over one more connection.
    let all: [(&str, &str, Harm); 8] = [
        ("nothing wrong", "", |main, lane| {
            lane.words(17, &[0, 0, BYTES]).0.write_all(&[1; BYTES as usize]).unwrap();
            lane.words(6, &[0]).words(6, &[0]);
            main.words(6, &[0]).words(7, &[1, 0, 0]);
        }),
        ("twice", "broke the protocol", |main, lane| {
            lane.words(17, &[0, 0, 4]).0.write_all(b"once").unwrap();
            lane.words(6, &[0]).words(17, &[0, 0, 4]);
            let _ = lane.0.write_all(b"more");
            lane.words(6, &[0]).words(6, &[0]);
            main.words(6, &[0]);
        }),
        ("behind the end", "broke the protocol", |_, lane| {
            lane.words(17, &[0, 18, 4]);
        }),
        ("a gap", "broke the protocol", |main, lane| {
            lane.words(17, &[4, 4, 4]).0.write_all(b"4567").unwrap();
            lane.words(6, &[0]).words(6, &[0]);
            main.words(6, &[0]);
        }),
        ("another sum", "broke the protocol", |main, lane| {
            lane.words(6, &[0]);
            main.words(6, &[1]);
        }),
        ("a file on the lane", "broke the protocol", |_, lane| {
            lane.words(4, &[0, 0]);
        }),
        ("bytes on the first connection", "broke the protocol", |main, _| {
            main.words(5, &[0, 4]);
        }),
        ("cut", "was cut", |main, lane| {
            lane.words(17, &[0, 0, 4]).0.write_all(b"12").unwrap();
            lane.0.shutdown(std::net::Shutdown::Both).unwrap();
            main.0.shutdown(std::net::Shutdown::Write).unwrap();
        }),
    ];
    for (what, expected, harm) in all {
        let receiver = Receiver::start(&target, &["--overwrite"]);
        let mut main = Hostile::connect_as(&receiver, 8);
        main.entry(false, 0o644, BYTES, b"x").words(2, &[1, 0]).words(14, &[1]);
        // The plan, and the token.
        let mut answer = [0; 32 + 24];
        main.0.read_exact(&mut answer).unwrap();
        assert_eq!((answer[0], answer[32]), (3, 15));
        // Who does not know it is nobody; nor is a second sender.
        Hostile::connect_as(&receiver, 4).say(15, &[7; 16]);
        let mut lane = Hostile::connect_as(&receiver, 4);
        lane.say(15, &answer[40..]);
        main.words(16, &[0, 0]);
        harm(&mut main, &mut lane);
        // It stays: an end of this connection would be a reason, too.
        let said = main.hear_until(expected);
        let done = receiver.end();
        assert_eq!(done.status.success(), expected.is_empty(), "{what}: {done:?}");
        assert!(done.err.contains(expected), "{what}: {done:?}");
        assert!(what == "cut" || said.contains(expected), "{what}: not told");
        assert_eq!(target.join("x").exists(), expected.is_empty(), "{what}");
        let _ = fs::remove_file(target.join("x"));
    }
    // Too many, none that come, and bytes without any.
    for harm in [&[(14u8, 17u64)][..], &[(14, 0)], &[(16, 0)]] {
        let receiver = Receiver::start(&target, &[]);
        let mut main = Hostile::connect_as(&receiver, 8);
        main.entry(false, 0o644, BYTES, b"x").words(2, &[1, 0]);
        for (kind, word) in harm {
            let words = [*word, 0];
            main.words(*kind, if *kind == 16 { &words } else { &words[..1] });
        }
        main.hear();
        let done = receiver.end();
        assert!(!done.status.success() && done.err.contains("broke the protocol"), "{harm:?} {done:?}");
    }
}

#[test]
fn only_who_knows_the_secret_may_send() {
    let (folder, source, target) = folders("transfer-secret");
    let file = random_file(&source.join("a"), 5_000_000);
    let (key, other) = (folder.path("key"), folder.path("other"));
    for path in [&key, &other] {
        finish(netvm().args(["secret", "new"]).arg(path)).must_succeed();
    }
    let (key, other) = (key.to_str().unwrap(), other.to_str().unwrap());
    let done = finish(netvm().arg("recv").arg(&target).args(["--listen", "0.0.0.0:0"]));
    assert!(!done.status.success() && done.err.contains("--secret"), "{done:?}");
    let receiver = Receiver::start_at("127.0.0.1:0", &target, &["--secret", key]);
    // Somebody who says nothing holds nobody up.
    let silent = std::net::TcpStream::connect(&receiver.address).unwrap();
    for (more, expected) in [(&[][..], "its secret"), (&["--secret", other][..], "another secret")] {
        let done = finish(&mut send(&receiver.address, &[&file], more));
        assert!(!done.status.success() && done.err.contains(expected), "{done:?}");
        assert!(!target.join("a").exists());
    }
    // However many come with nonsense, it is told once, and keeps nobody away.
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b"netvm"].repeat(40) {
        let mut stream = std::net::TcpStream::connect(&receiver.address).unwrap();
        // It may have hung up already.
        let _ = stream.write_all(garbage);
    }
    // The kernel cannot encrypt.
    let done = finish(&mut send(
        &receiver.address,
        &[&file],
        &["--secret", key, "--encrypt", "--framing", "simple"],
    ));
    assert!(!done.status.success() && done.err.contains("does not serve this kind"), "{done:?}");
    let done =
        finish(&mut send(&receiver.address, &[&file], &["--secret", key, "--encrypt", "--method", "mmap"]));
    let received = receiver.end();
    drop(silent);
    assert!(done.status.success() && received.status.success(), "{done:?} {received:?}");
    assert_eq!(summary(&done)["protection"], "authenticated and encrypted");
    for why in ["it has proved no secret", "its secret is not ours", "it wants another framing"] {
        assert!(received.err.contains(&format!("turned away a connection: {why}")), "{received:?}");
    }
    for why in ["it does not speak netvm's protocol", "it closed the connection"] {
        assert_eq!(received.err.matches(why).count(), 1, "{received:?}");
    }
    assert_same_file(&file, &target.join("a"));
    let receiver = Receiver::start_at("127.0.0.1:0", &target, &["--secret", key, "--encrypt"]);
    let done = finish(&mut send(&receiver.address, &[&file], &["--secret", key, "--method", "sendfile"]));
    assert!(!done.status.success() && done.err.contains("copy or mmap"), "{done:?}");
    assert!(!receiver.end().status.success());
}

#[test]
fn the_simple_framing_is_that_of_the_source_system() {
    let (_folder, source, target) = folders("transfer-simple");
    let files: Vec<PathBuf> = [0, 7, 17, 4096, 3_000_001]
        .iter()
        .map(|bytes| random_file(&source.join(format!("f{bytes}")), *bytes))
        .collect();
    let paths: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
    for method in METHODS {
        let how = ["--framing", "simple", "--method", method];
        let (sent, received) = transfer(&target, &paths, &how, &how);
        assert_eq!((&sent["files"], &received["files"]), (&5.into(), &5.into()));
        for (number, file) in files.iter().enumerate() {
            let arrived = target.join(format!("file-{:04}", number + 1));
            assert_same_file(file, &arrived);
            fs::remove_file(arrived).unwrap();
        }
    }
    // Byte by byte, as it is written down: files of 7 and 17 bytes, then a length without its bytes.
    let receiver = Receiver::start(&target, &["--framing", "simple"]);
    let mut stream = UnixStream::connect(receiver.address.strip_prefix("unix:").unwrap()).unwrap();
    let hello = Hello { features: 1, ..Hello::new(Role::Transfer) }.encode();
    stream.write_all(&hello).unwrap();
    let mut answer = hello;
    stream.read_exact(&mut answer).unwrap();
    stream.write_all(b"\0\0\0\0\0\0\0\x07\x01\x02\x03\x04\x05\x06\x07\0\0\0\0\0\0\0\x11").unwrap();
    stream.write_all(&[0xff; 17]).unwrap();
    stream.write_all(b"\0\0\0\0\0\0\0\x02x").unwrap();
    drop(stream);
    let done = receiver.end();
    assert!(!done.status.success() && done.err.contains("was cut"), "{done:?}");
    assert_eq!(fs::read(target.join("file-0001")).unwrap(), [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(fs::read(target.join("file-0002")).unwrap(), [0xff; 17]);
    assert!(!target.join("file-0003").exists());
    // Nothing is replaced, and folders have no names there.
    let receiver = Receiver::start(&target, &["--framing", "simple"]);
    let sent = finish(&mut send(&receiver.address, &paths, &["--framing", "simple"]));
    let received = receiver.end();
    assert!(!sent.status.success() && received.err.contains("--overwrite"), "{sent:?} {received:?}");
    let done = finish(&mut send("127.0.0.1:1", &[&source], &["--framing", "simple"]));
    assert!(!done.status.success() && done.err.contains("no folders"), "{done:?}");
}
