//! `netvm nbd`, with the clients that people use.

mod common;

use common::{Folder, Guard, Lender, finish, has, netvm, signal, until};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

const NBDINFO: &str = "/usr/bin/nbdinfo";
const NBDCOPY: &str = "/usr/bin/nbdcopy";
const NBDSH: &str = "/usr/bin/nbdsh";
const QEMU_IMG: &str = "/usr/bin/qemu-img";
const QEMU_IO: &str = "/usr/bin/qemu-io";
const FIO: &str = "/usr/bin/fio";
const OPENSSL: &str = "/usr/bin/openssl";

struct Device {
    process: Guard,
    folder: Folder,
    errors: PathBuf,
    /// What it said when it began to listen.
    listening: String,
}

impl Device {
    fn start(size: &str, lenders: &[&Lender], more: &[&str]) -> Self {
        Self::start_by(netvm(), size, lenders, more)
    }

    /// As if the lenders were far: nothing is read from the memory of one that does not answer.
    fn start_far(size: &str, lenders: &[&Lender], more: &[&str]) -> Self {
        let mut command = netvm();
        command.env("NETVM_LINK", "socket");
        Self::start_by(command, size, lenders, more)
    }

    fn start_by(mut command: Command, size: &str, lenders: &[&Lender], more: &[&str]) -> Self {
        let folder = Folder::new("nbd");
        let errors = folder.path("errors");
        command.args(["nbd", "--size", size, "--unix"]).arg(folder.path("socket"));
        for lender in lenders {
            command.args(["--lender", &lender.address]);
        }
        command.args(more).stdout(Stdio::piped()).stderr(std::fs::File::create(&errors).unwrap());
        let mut child = command.spawn().unwrap();
        // It says where it listens when it does.
        let mut listening = String::new();
        let mut said = BufReader::new(child.stdout.as_mut().unwrap());
        for _ in 0..1 + more.iter().filter(|&&word| word == "--listen").count() {
            said.read_line(&mut listening).unwrap();
        }
        assert!(listening.contains("serving"), "{listening}{}", std::fs::read_to_string(&errors).unwrap());
        Self { process: Guard(child), folder, errors, listening }
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.folder.path("socket").display())
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap()
    }

    fn raw(&self) -> UnixStream {
        let stream = UnixStream::connect(self.folder.path("socket")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }
}

fn lender(size: &str) -> (Folder, Lender) {
    let folder = Folder::new("nbd-lender");
    let lender = Lender::start(&folder, size);
    (folder, lender)
}

fn random_bytes(bytes: usize) -> Vec<u8> {
    let mut content = vec![0; bytes];
    std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut content).unwrap();
    content
}

/// Random bytes in a file.
fn random_file(folder: &Folder, bytes: usize) -> PathBuf {
    let path = folder.path("random");
    std::fs::write(&path, random_bytes(bytes)).unwrap();
    path
}

/// A script in Python, with `h` for the device.
#[track_caller]
fn python(uri: &str, script: &str) -> String {
    let mut command = Command::new(NBDSH);
    // The module belongs to the system's python3.
    command.env("PATH", "/usr/bin:/bin").args(["-u", uri, "-c", script]);
    finish(&mut command).must_succeed().out()
}

#[test]
fn the_clients_of_others() {
    if !has("the_clients_of_others", &[NBDINFO, NBDCOPY, QEMU_IMG, QEMU_IO, FIO]) {
        return;
    }
    let (_folder, lender) = lender("256M");
    let device = Device::start("128M", &[&lender], &["--export", "disk"]);
    let uri = device.uri();
    let info = finish(Command::new(NBDINFO).arg(&uri)).must_succeed().out();
    for line in ["export-size: 134217728", "can_multi_conn: true", "can_fua: true", "base:allocation"] {
        assert!(info.contains(line), "{info}");
    }
    let list = finish(Command::new(NBDINFO).args(["--list", &uri])).must_succeed().out();
    assert!(list.contains("export=\"disk\""), "{list}");
    let unknown = uri.replace("///", "///other");
    assert!(!finish(Command::new(NBDINFO).arg(unknown)).status.success());

    let file = random_file(&device.folder, 40_000_001);
    let name = file.to_str().unwrap();
    finish(Command::new(NBDCOPY).args([name, &uri])).must_succeed();
    let map = finish(Command::new(NBDINFO).args(["--map", &uri])).must_succeed().out();
    let lines: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.iter().map(|line| line[3]).collect::<Vec<_>>(), ["data", "hole,zero"], "{map}");
    let back = device.folder.path("back");
    finish(Command::new(NBDCOPY).arg(&uri).arg(&back)).must_succeed();
    let (sent, back) = (std::fs::read(&file).unwrap(), std::fs::read(back).unwrap());
    assert_eq!(back.len(), 128 << 20);
    assert!(back[..sent.len()] == sent && back[sent.len()..].iter().all(|&byte| byte == 0));

    finish(Command::new(QEMU_IO).args([
        "-f",
        "raw",
        "-c",
        "write -P 0x5a 3M 7M",
        "-c",
        "discard 5M 2M",
        &uri,
    ]))
    .must_succeed();
    let check = ["read -P 0x5a 3M 2M", "read -P 0 5M 2M", "read -P 0x5a 7M 3M", "flush"];
    let mut command = Command::new(QEMU_IO);
    command.args(["-f", "raw"]).args(check.iter().flat_map(|check| ["-c", check])).arg(&uri);
    let said = finish(&mut command).must_succeed().out();
    assert!(!said.contains("verification failed"), "{said}");
    let image = device.folder.path("image");
    finish(Command::new(QEMU_IMG).args(["convert", "-f", "raw", "-O", "qcow2", &uri]).arg(&image))
        .must_succeed();
    let same = ["compare", "-f", "qcow2", "-F", "raw"];
    let said = finish(Command::new(QEMU_IMG).args(same).arg(&image).arg(&uri)).must_succeed().out();
    assert!(said.contains("identical"), "{said}");

    // Four jobs write and verify random blocks at once.
    let mut command = Command::new(FIO);
    command.current_dir(device.folder.path(".")).args([
        "--name=x",
        "--ioengine=nbd",
        "--rw=randrw",
        "--bsrange=512-256k",
    ]);
    command.args(["--iodepth=8", "--numjobs=4", "--size=24M", "--offset_increment=32M", "--verify=xxhash"]);
    command.args(["--verify_fatal=1", "--bs_unaligned", "--randrepeat=0", &format!("--uri={uri}")]);
    finish(&mut command).must_succeed();
    signal(device.process.0.id(), "TERM");
    let Device { mut process, errors, .. } = device;
    until("it has ended", || process.0.try_wait().unwrap().is_some());
    assert_eq!(std::fs::read_to_string(errors).unwrap_or_default(), "");
}

#[test]
fn commands_and_their_errors() {
    if !has("commands_and_their_errors", &[NBDSH]) {
        return;
    }
    let (_folder, lender) = lender("64M");
    let device = Device::start("33M", &[&lender], &[]);
    let said = python(
        &device.uri(),
        r#"
import errno
h.pwrite(b"x" * 5000, 777)
assert h.pread(5002, 776) == b"\0" + b"x" * 5000 + b"\0"
h.pwrite(b"y" * 100, 100, nbd.CMD_FLAG_FUA)
h.zero(50, 125)
assert h.pread(102, 99) == b"\0" + b"y" * 25 + b"\0" * 50 + b"y" * 25 + b"\0"
h.trim(1 << 20, 0)
assert h.pread(1 << 20, 0) == b"\0" * (1 << 20)
h.flush()
size = h.get_size()
def fails(code, f):
    try:
        f()
    except nbd.Error as error:
        assert error.errnum == code, (error, code)
    else:
        assert False, code
h.set_strict_mode(0)
fails(errno.EINVAL, lambda: h.pread(2, size - 1))
fails(errno.ENOSPC, lambda: h.pwrite(b"ab", size - 1))
fails(errno.ENOSPC, lambda: h.zero(2, size - 1))
fails(errno.EINVAL, lambda: h.trim(2, size - 1))
big = b"z" * (32 << 20)
h.pwrite(big, 1 << 20)
assert h.pread(32 << 20, 1 << 20) == big
assert h.pread(1, size - 1) == b"z"
print("good")
"#,
    );
    assert_eq!(said.trim(), "good");
}

#[test]
fn what_is_written_on_one_connection_is_read_on_another() {
    if !has("what_is_written_on_one_connection_is_read_on_another", &[NBDSH]) {
        return;
    }
    let (_folder, lender) = lender("64M");
    let device = Device::start("16M", &[&lender], &[]);
    let script = r#"
import os
others = [nbd.NBD() for _ in range(3)]
for o in others:
    o.connect_uri("URI")
for round in range(300):
    block = os.urandom(4096)
    others[round % 3].pwrite(block, 4096 * (round % 7))
    for o in others + [h]:
        assert o.pread(4096, 4096 * (round % 7)) == block
print("good")
"#;
    assert_eq!(python(&device.uri(), &script.replace("URI", &device.uri())).trim(), "good");
}

#[test]
fn long_reads_and_whatever_changes_between_them() {
    if !has("long_reads_and_whatever_changes_between_them", &[NBDSH]) {
        return;
    }
    let script = r#"
import random
model = bytearray(24 << 20)
for round in range(400):
    bytes = random.choice([4096, 40_000, 131_072, 1 << 20, 3_000_000])
    offset = random.randrange(len(model) - bytes)
    what = random.random()
    if what < 0.5:
        assert h.pread(bytes, offset) == model[offset:offset + bytes], (round, bytes, offset)
    elif what < 0.9:
        model[offset:offset + bytes] = random.randbytes(bytes)
        h.pwrite(model[offset:offset + bytes], offset)
    else:
        model[offset:offset + bytes] = b"\0" * bytes
        h.trim(bytes, offset)
assert h.pread(len(model), 0) == model
print("good")
"#;
    let (_folder, lender) = lender("64M");
    let device = Device::start("24M", &[&lender], &["--listen", "127.0.0.1:0"]);
    assert_eq!(python(&device.uri(), script).trim(), "good");
    // Over TCP, too; and of a lender that is asked for everything.
    let tcp = device.listening.split_whitespace().find(|word| word.starts_with("127.0.0.1:")).unwrap();
    let trimmed = format!("h.trim(24 << 20, 0)\n{script}");
    assert_eq!(python(&format!("nbd://{tcp}"), &trimmed).trim(), "good");
}

#[test]
fn long_answers_to_a_client_that_is_in_no_hurry() {
    let (_folder, lender) = lender("64M");
    let device = Device::start("16M", &[&lender], &[]);
    let mut stream = device.raw();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&3u32.to_be_bytes()).unwrap();
    stream.write_all(b"IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0").unwrap();
    stream.read_exact(&mut [0; 20 + 12 + 20]).unwrap();
    let request = |command: u16, cookie: u64, offset: u64, bytes: u32| {
        let magic = 0x2560_9513u32.to_be_bytes();
        let (cookie, offset) = (cookie.to_be_bytes(), offset.to_be_bytes());
        [&magic[..], &[0; 2], &command.to_be_bytes(), &cookie, &offset, &bytes.to_be_bytes()].concat()
    };
    let mut answer = [0; 16];
    let contents: Vec<u8> = random_bytes(8 << 20);
    stream.write_all(&[&request(1, 1, 0, 8 << 20)[..], &contents].concat()).unwrap();
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[4..8], [0; 4]);
    // All are asked for before anything is read, and then in small pieces: the socket has room for a part of one answer.
    let reads: Vec<(u64, u32)> = (0..40).map(|n| (n * 177_777, 65_536 + 20_001 * n as u32)).collect();
    for (cookie, &(offset, bytes)) in reads.iter().enumerate() {
        stream.write_all(&request(0, cookie as u64, offset, bytes)).unwrap();
    }
    let mut left = reads.len();
    while left > 0 {
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
        let (offset, bytes) = reads[u64::from_be_bytes(answer[8..].try_into().unwrap()) as usize];
        let mut got = vec![0; bytes as usize];
        for piece in got.chunks_mut(10_007) {
            stream.read_exact(piece).unwrap();
        }
        assert!(got == contents[offset as usize..][..bytes as usize], "{bytes} bytes at {offset}");
        left -= 1;
    }
}

#[test]
fn long_reads_while_what_they_read_moves_to_another_lender() {
    if !has("long_reads_while_what_they_read_moves_to_another_lender", &[NBDCOPY, NBDSH]) {
        return;
    }
    let folder = Folder::new("nbd-moves");
    let [leaves, stays] =
        ["leaves", "stays"].map(|name| Lender::start_with(&folder.path(name), "96M", &["--slab", "1M"]));
    let device = Device::start("64M", &[&leaves, &stays], &[]);
    let file = random_file(&device.folder, 64 << 20);
    finish(Command::new(NBDCOPY).arg(&file).arg(device.uri())).must_succeed();
    let script = r#"
import os, random, signal, threading, time
data = open("FILE", "rb").read()
gone = lambda: "holds nothing any more" in open("SAID").read()
over, bad, counts = time.time() + 60, [], [0] * 3
def read(n):
    o = nbd.NBD()
    o.connect_uri("URI")
    while not bad and time.time() < over and (counts[n] < 100 or not gone()):
        bytes = random.choice([32_768, 131_072, 1 << 20, 4 << 20])
        offset = random.randrange(len(data) - bytes)
        if o.pread(bytes, offset) != data[offset:offset + bytes]:
            bad.append((bytes, offset))
        counts[n] += 1
threads = [threading.Thread(target=read, args=(n,)) for n in range(3)]
for thread in threads:
    thread.start()
time.sleep(0.3)
os.kill(PID, signal.SIGTERM)
for thread in threads:
    thread.join()
print("good" if gone() and not bad else (bad, counts))
"#;
    let pid = leaves.process.0.id().to_string();
    let script = script.replace("FILE", file.to_str().unwrap()).replace("URI", &device.uri());
    let script = script.replace("SAID", device.errors.to_str().unwrap()).replace("PID", &pid);
    assert_eq!(python(&device.uri(), &script).trim(), "good", "{}", device.said());
}

#[test]
fn a_lost_lender_with_and_without_replicas() {
    const TEST: &str = "a_lost_lender_with_and_without_replicas";
    if !has(TEST, &[NBDCOPY, NBDSH]) {
        return;
    }
    for replicas in [1, 2] {
        for how in ["KILL", "STOP"] {
            let lenders = [lender("192M"), lender("192M"), lender("192M")];
            let all = [&lenders[0].1, &lenders[1].1, &lenders[2].1];
            let device = Device::start_far("96M", &all, &["--replicas", &replicas.to_string()]);
            let file = random_file(&device.folder, 96 << 20);
            finish(Command::new(NBDCOPY).arg(&file).arg(device.uri())).must_succeed();
            // All is written, and nobody has anything to wait for.
            let back = device.folder.path("back");
            finish(Command::new(NBDCOPY).arg(device.uri()).arg(&back)).must_succeed();
            lenders[1].1.signal(how);
            let read = finish(Command::new(NBDCOPY).arg(device.uri()).arg(&back));
            assert_eq!(read.status.success(), replicas == 2, "{}", device.said());
            if replicas == 1 {
                until("it names the lender", || device.said().contains(&lenders[1].1.address));
                assert!(device.said().contains("is lost"), "{}", device.said());
                // What the others have is still there.
                let script = r#"
good = 0
for at in range(0, 96 << 20, 1 << 20):
    try:
        h.pread(1 << 20, at)
        good += 1
    except nbd.Error:
        pass
print(good)
"#;
                let good: u32 = python(&device.uri(), script).trim().parse().unwrap();
                assert!((48..=80).contains(&good), "{good}");
                continue;
            }
            assert!(std::fs::read(&file).unwrap() == std::fs::read(&back).unwrap());
            until("the copies are complete again", || device.said().contains("complete again"));
            // Another one: what it had is on the third by now.
            lenders[0].1.signal(how);
            finish(Command::new(NBDCOPY).arg(device.uri()).arg(&back)).must_succeed();
            assert!(std::fs::read(&file).unwrap() == std::fs::read(&back).unwrap());
        }
    }
}

/// One after the other: there is nobody who could take a copy.
#[test]
fn nothing_is_complete_when_the_last_lender_is_lost() {
    if !has("nothing_is_complete_when_the_last_lender_is_lost", &[NBDCOPY]) {
        return;
    }
    let lenders = [lender("96M"), lender("96M")];
    let device = Device::start("64M", &[&lenders[0].1, &lenders[1].1], &["--replicas", "2"]);
    let file = random_file(&device.folder, 64 << 20);
    finish(Command::new(NBDCOPY).arg(&file).arg(device.uri())).must_succeed();
    lenders[0].1.signal("KILL");
    until("nothing is protected", || device.said().contains("there is no protection until one is back"));
    lenders[1].1.signal("KILL");
    until("nothing is left", || device.said().contains("nothing is left"));
    std::thread::sleep(Duration::from_secs(2));
    assert!(!device.said().contains("complete"), "{}", device.said());
}

/// Time in which the server itself did not run is nobody's silence.
#[test]
fn a_server_that_was_stopped_gives_nobody_up() {
    if !has("a_server_that_was_stopped_gives_nobody_up", &[NBDCOPY]) {
        return;
    }
    for replicas in ["1", "2"] {
        let lenders = [lender("96M"), lender("96M")];
        let device = Device::start("64M", &[&lenders[0].1, &lenders[1].1], &["--replicas", replicas]);
        let file = random_file(&device.folder, 64 << 20);
        finish(Command::new(NBDCOPY).arg(&file).arg(device.uri())).must_succeed();
        // Stopped in the middle of reads, for longer than any lender may be silent.
        let mut command = Command::new(NBDCOPY);
        let reading = Guard(command.arg(device.uri()).arg(device.folder.path("back")).spawn().unwrap());
        signal(device.process.0.id(), "STOP");
        std::thread::sleep(Duration::from_millis(6500));
        signal(device.process.0.id(), "CONT");
        let mut reading = reading;
        until("it has read everything", || reading.0.try_wait().unwrap().is_some());
        assert!(reading.0.wait().unwrap().success(), "{}", device.said());
        let back = device.folder.path("back");
        assert!(std::fs::read(&file).unwrap() == std::fs::read(&back).unwrap());
        assert_eq!(device.said(), "", "nobody was lost");
    }
}

#[test]
fn tls_and_certificates() {
    if !has("tls_and_certificates", &[NBDINFO, NBDCOPY, OPENSSL]) {
        return;
    }
    let folder = Folder::new("nbd-tls");
    let script = r#"
set -e
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=netvm-test-ca -keyout ca-key.pem -out ca-cert.pem
for who in server client; do
    openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout $who-key.pem -out $who.csr
    printf 'subjectAltName=DNS:localhost\n' > ext
    openssl x509 -req -in $who.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 2 -extfile ext -out $who-cert.pem
done
"#;
    finish(Command::new("sh").current_dir(folder.path(".")).args(["-c", script])).must_succeed();
    let (_folder, lender) = lender("64M");
    let tls = folder.path(".");
    let device =
        Device::start("16M", &[&lender], &["--listen", "127.0.0.1:0", "--tls", tls.to_str().unwrap()]);
    let uri = |certificates: &str| {
        let socket = device.folder.path("socket");
        format!("nbds+unix://localhost/?socket={}&tls-certificates={certificates}", socket.display())
    };
    let good = uri(tls.to_str().unwrap());
    let info = finish(Command::new(NBDINFO).arg(&good)).must_succeed().out();
    assert!(info.contains("newstyle-fixed with TLS"), "{info}");
    let file = random_file(&device.folder, 16 << 20);
    let back = device.folder.path("back");
    finish(Command::new(NBDCOPY).arg(&file).arg(&good)).must_succeed();
    finish(Command::new(NBDCOPY).arg(&good).arg(&back)).must_succeed();
    assert!(std::fs::read(&file).unwrap() == std::fs::read(&back).unwrap());
    // Neither without TLS nor without a certificate.
    assert!(!finish(Command::new(NBDINFO).arg(device.uri())).status.success());
    let stranger = Folder::new("nbd-stranger");
    std::fs::copy(folder.path("ca-cert.pem"), stranger.path("ca-cert.pem")).unwrap();
    assert!(!finish(Command::new(NBDINFO).arg(uri(stranger.path(".").to_str().unwrap()))).status.success());
    let done =
        finish(netvm().args(["nbd", "--size", "1M", "--lender", &lender.address, "--tls", "/nowhere"]));
    assert!(!done.status.success() && done.err.contains("/nowhere/server-key.pem"), "{}", done.err);
}

#[test]
fn clients_that_do_not_keep_to_the_protocol() {
    let (_folder, lender) = lender("64M");
    let device = Device::start("16M", &[&lender], &[]);
    let mut greeting = [0; 18];
    let begin = || {
        let mut stream = device.raw();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        stream
    };
    // What is sent, and that the server closes.
    let closed = |bytes: &[u8]| {
        let mut stream = begin();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    };
    closed(b"GET / HTTP/1.1\r\n\r\n");
    closed(&[0xff; 4096]);
    closed(b"IHAVEOPT\0\0\0\x07\xff\xff\xff\xff");
    let go = b"IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0";
    closed(&[&go[..], &[0x99; 28]].concat());
    // A write whose payload never comes, of 4 GiB, and many requests whose answers nobody reads.
    let request = |command: u16, bytes: u32| {
        let (magic, cookie, offset) = (0x2560_9513u32.to_be_bytes(), [7; 8], [0; 8]);
        [&magic[..], &[0; 2], &command.to_be_bytes(), &cookie, &offset, &bytes.to_be_bytes()].concat()
    };
    closed(&[&go[..], &request(1, u32::MAX), &[1; 100_000]].concat());
    let mut silent = begin();
    silent.write_all(go).unwrap();
    silent.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    for _ in 0..10_000 {
        if silent.write_all(&request(0, 1 << 20)).is_err() {
            break;
        }
    }
    let mut idle: Vec<UnixStream> =
        (0..80).filter_map(|_| UnixStream::connect(device.folder.path("socket")).ok()).collect();
    let _ = idle[0].read(&mut greeting);
    drop(idle);
    // Others are served all the same.
    let mut stream = begin();
    stream.write_all(go).unwrap();
    stream.write_all(&request(0, 4096)).unwrap();
    let mut answer = vec![0; 20 + 12 + 20 + 16 + 4096];
    stream.read_exact(&mut answer).unwrap();
    assert!(answer.ends_with(&[0; 4096]));
    assert!(device.said().contains("closed a client"), "{}", device.said());
}

#[test]
fn slabs_that_differ_are_told_of() {
    let folder = Folder::new("nbd-slabs");
    let [small, large, same] = [("small", "1M"), ("large", "4M"), ("same", "1M")]
        .map(|(name, slab)| Lender::start_with(&folder.path(name), "32M", &["--slab", slab]));
    let said = Device::start("16M", &[&small, &large], &[]).said();
    assert!(said.contains("of 4 MiB") && said.contains("start all with one --slab"), "{said}");
    let said = Device::start("16M", &[&small, &same], &[]).said();
    assert!(!said.contains("--slab"), "{said}");
}

#[test]
fn what_cannot_be_is_said() {
    let (_folder, lender) = lender("64M");
    let address = lender.address.as_str();
    for (arguments, expected) in [
        (&["--size", "1G", "--lender", address][..], "too little memory"),
        (&["--size", "0", "--lender", address], "0 bytes"),
        (&["--size", "4095P", "--lender", address], "can have"),
        (&["--size", "1M", "--lender", address, "--replicas", "2"], "2 replicas on 1 lenders"),
        (&["--size", "1M", "--lender", "unix:/nowhere/x"], "/nowhere/x"),
        (&["--size", "1M", "--lender", address, "--unix", "/nowhere/x"], "choose another --unix path"),
        (
            &["--size", "1M", "--lender", address, "--tls", "/proc"],
            "a folder with server-cert.pem, server-key.pem",
        ),
        (&["--size", "1M", "--lender", address, "--listen", "0.0.0.0:0"], "--insecure"),
        (&["--size", "1M"], "--lender"),
    ] {
        let done = finish(netvm().arg("nbd").args(arguments));
        assert!(!done.status.success() && done.err.contains(expected), "{arguments:?}: {}", done.err);
    }
}

#[test]
fn the_doctor_tells_of_this_view_and_of_no_other() {
    let told = finish(netvm().args(["doctor", "--json"]));
    let told: serde_json::Value = serde_json::from_slice(&told.out).unwrap();
    let findings = told["findings"].as_array().unwrap();
    let whats: Vec<&str> = findings.iter().map(|finding| finding["what"].as_str().unwrap()).collect();
    let nbd = findings.iter().find(|finding| finding["what"] == "netvm nbd");
    assert_eq!(nbd.unwrap_or_else(|| panic!("{whats:?}"))["verdict"], "ok");
    assert!(!whats.contains(&"FUSE") && !whats.contains(&"ublk"), "{whats:?}");
    assert!(whats.contains(&"netvm mount") && whats.contains(&"netvm device"), "{whats:?}");
    assert!(whats.iter().all(|what| what.trim() == *what), "{whats:?}");
}
