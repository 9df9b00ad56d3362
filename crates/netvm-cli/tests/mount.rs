//! `netvm mount`: real programs on lent memory as files.

mod common;
#[path = "mount/segments.rs"]
mod segments;
#[path = "mount/users.rs"]
mod users;

use common::{Folder, Guard, Lender, Random, finish, has, netvm, signal, until, wait};
use netvm::node::{Node, Rights};
use netvm_core::wire::{Hello, Role};
use netvm_sys::mapping::Mapping;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::TcpListener;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const ENOSPC: i32 = 28;
const EROFS: i32 = 30;
const EIO: i32 = 5;
/// A run of free blocks that is too short to be given back.
const SCRAPS: u64 = 64 << 10;
const ENOTCONN: i32 = 107;

/// Whether this can mount. Says why not, past the capture of the test harness.
fn can_mount(test: &str, programs: &[&str]) -> bool {
    if !has(test, &["/dev/fuse"]) || !has(test, programs) {
        return false;
    }
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    let admin = u64::from_str_radix(effective.trim(), 16).unwrap() >> 21 & 1 == 1;
    let reason = match fs::metadata("/proc/self").unwrap().uid() {
        1.. => "not root",
        0 if !admin => "no CAP_SYS_ADMIN",
        0 => return true,
    };
    let _ = writeln!(std::io::stderr(), "{test}: skipped ({reason})");
    false
}

struct Mount {
    process: Guard,
    folder: PathBuf,
    log: PathBuf,
    /// What it said first.
    said: Vec<String>,
}

impl Mount {
    /// Over `name` in `folder`, when it has said `lines` lines. Lenders are used as if they were on other machines.
    fn start(folder: &Folder, name: &str, lines: usize, args: &[&str]) -> Self {
        Self::start_by("socket", folder, name, lines, args)
    }

    fn start_by(link: &str, folder: &Folder, name: &str, lines: usize, args: &[&str]) -> Self {
        let (at, log) = (folder.path(name), folder.path(&format!("{name}.log")));
        // What is dead there cannot be looked at.
        let _ = fs::create_dir_all(&at);
        let mut command = netvm();
        command.arg("mount").arg(&at).args(args).env("NETVM_LINK", link);
        let mut child = command.stdout(Stdio::piped()).stderr(File::create(&log).unwrap()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let said: Vec<String> = out.lines().take(lines).map_while(Result::ok).collect();
        let mount = Self { process: Guard(child), folder: at, log, said };
        assert_eq!(mount.said.len(), lines, "{}", mount.log());
        mount
    }

    fn on(folder: &Folder, lender: &Lender, size: &str) -> Self {
        Self::start_by("auto", folder, "mount", 1, &["--size", size, "--lender", &lender.address])
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// Free bytes.
    fn free(&self) -> u64 {
        let done = finish(Command::new("stat").args(["-f", "-c", "%f %S"]).arg(&self.folder)).must_succeed();
        done.out().split_whitespace().map(|number| number.parse::<u64>().unwrap()).product()
    }

    /// Ends it politely.
    #[track_caller]
    fn end(mut self) {
        signal(self.process.0.id(), "TERM");
        let status = wait(&mut self.process.0, Duration::from_secs(20));
        assert!(status.is_some_and(|status| status.success()), "{status:?}\n{}", self.log());
        assert!(!is_mounted(&self.folder));
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = self.process.0.kill();
        if is_mounted(&self.folder) {
            let _ = Command::new("umount").arg("-l").arg(&self.folder).status();
        }
    }
}

fn is_mounted(folder: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(1).is_some_and(|at| Path::new(at) == folder))
}

fn lender(folder: &Folder, name: &str, size: &str) -> Lender {
    Lender::start_with(&folder.path(name), size, &[])
}

/// Bytes of lent memory that use memory.
fn resident(lender: &Lender) -> u64 {
    lender.status()["resident_bytes"].as_u64().unwrap()
}

/// Bytes that are the same for the same seed.
fn bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut random = Random(seed);
    (0..count.div_ceil(8)).flat_map(|_| random.next().to_ne_bytes()).take(count).collect()
}

#[track_caller]
fn fails_with<T: std::fmt::Debug>(result: std::io::Result<T>, error: i32) {
    assert_eq!(result.as_ref().err().and_then(std::io::Error::raw_os_error), Some(error), "{result:?}");
}

fn sh(script: &str, at: &Path) -> String {
    let mut command = Command::new("/bin/sh");
    finish(command.args(["-ec", script]).current_dir(at)).must_succeed().out()
}

#[test]
fn programs() {
    let programs = ["/usr/bin/git", "/usr/bin/sqlite3", "/usr/bin/tar", "/usr/bin/sha256sum"];
    if !can_mount("programs", &programs) {
        return;
    }
    let folder = Folder::new("mount-programs");
    let lender = lender(&folder, "l", "256M");
    let mount = Mount::on(&folder, &lender, "160M");
    let outside = folder.path("outside");
    fs::create_dir_all(outside.join("deep/er")).unwrap();
    for (index, name) in ["a", "deep/b", "deep/er/c", "deep/empty"].into_iter().enumerate() {
        fs::write(outside.join(name), bytes(index as u64, index * 700_001 % 1_500_000)).unwrap();
    }
    symlink("deep/b", outside.join("link")).unwrap();
    fs::hard_link(outside.join("a"), outside.join("deep/also")).unwrap();
    fs::set_permissions(outside.join("a"), fs::Permissions::from_mode(0o750)).unwrap();
    let at = &mount.folder;
    sh(
        &format!(
            "cp -a {0} tree; diff -r {0} tree; tar c tree | tar x --transform s/^tree/again/; diff -r tree again",
            outside.display()
        ),
        at,
    );
    // Permissions, times and links are those of the originals.
    let list = "find . -mindepth 1 -type d -printf '%P %m %T@ %n\\n' | sort; find . ! -type d -printf '%P %m %T@ %n %s %l\\n' | sort";
    assert_eq!(sh(list, &outside), sh(list, &at.join("tree")));
    sh("sha256sum tree/a tree/deep/b > sums; sha256sum -c --quiet sums; rm -r again; test ! -e again", at);
    sh(
        "git init -q repo; cd repo; git config user.email a@b; git config user.name a; cp -r ../tree .; git add -A; git commit -qm one; \
         git gc -q; cd ..; git clone -q repo clone; git -C clone fsck --full --strict; diff -r repo/tree clone/tree",
        at,
    );
    let script = "PRAGMA journal_mode=wal; create table t(a integer primary key, b text); \
                  insert into t select value, hex(randomblob(100)) from generate_series(1, 20000); \
                  delete from t where a % 3 = 0; vacuum; pragma integrity_check; select count(*) from t;";
    for journal in ["wal", "delete"] {
        let said = sh(&format!("sqlite3 {journal}.db '{}'", script.replace("wal", journal)), at);
        assert_eq!(said.lines().collect::<Vec<_>>(), [journal, "ok", "13334"]);
    }
    // Folders: not empty, not a folder, and read while they change.
    assert!(fs::remove_dir(at.join("tree")).is_err() && fs::read_dir(at.join("sums")).is_err());
    fs::create_dir(at.join("many")).unwrap();
    (0..2000).for_each(|index| drop(File::create(at.join(format!("many/{index}"))).unwrap()));
    let mut seen = 0;
    for entry in fs::read_dir(at.join("many")).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
        seen += 1;
    }
    assert_eq!(seen, 2000);
    fs::remove_dir(at.join("many")).unwrap();
    // A file lives as long as it is open.
    let mut unlinked =
        OpenOptions::new().read(true).write(true).create_new(true).open(at.join("gone")).unwrap();
    fs::remove_file(at.join("gone")).unwrap();
    unlinked.write_all(b"still here").unwrap();
    unlinked.seek(SeekFrom::Start(6)).unwrap();
    let mut text = String::new();
    unlinked.read_to_string(&mut text).unwrap();
    assert_eq!(text, "here");
    drop(unlinked);
    // All of it is given back.
    sh("rm -rf *", at);
    until("its room is free", || mount.free() == 160 << 20);
    mount.end();
    until("the lender has all of it", || lender.used_bytes() == 0);
}

/// A file's bytes as they should be, and one after the other operation on it.
struct Torture<'a> {
    random: Random,
    model: Vec<u8>,
    /// The same file, at several mounts.
    paths: &'a [PathBuf],
}

const LENGTH_MAX: u64 = 600_000;

impl Torture<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        self.random.next() % bound.max(1)
    }

    fn step(&mut self, step: usize) {
        let path = &self.paths[step % self.paths.len()];
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        assert_eq!(file.metadata().unwrap().len(), self.model.len() as u64, "step {step}");
        let offset = self.below(LENGTH_MAX);
        let length = 1 + self.below([10, 5000, 200_000][step % 3]);
        let what = self.below(8);
        let inside = (self.model.len() as u64).saturating_sub(offset).min(length) as usize;
        let from = offset as usize;
        match what {
            0..2 => {
                let data = bytes(step as u64, length as usize);
                file.write_all_at(&data, offset).unwrap();
                self.model.resize(self.model.len().max(from + data.len()), 0);
                self.model[from..from + data.len()].copy_from_slice(&data);
            }
            2 => {
                let size = self.below(LENGTH_MAX);
                file.set_len(size).unwrap();
                self.model.resize(size as usize, 0);
            }
            3 if !self.model.is_empty() => {
                let mapping = Mapping::of_file(&file, true).unwrap();
                let data = bytes(step as u64, inside);
                mapping.shared().write_from(from.min(self.model.len()), &data).unwrap();
                if inside > 0 {
                    self.model[from..from + inside].copy_from_slice(&data);
                }
                // What was written through a mapping is at the file when it is synced.
                drop(mapping);
                file.sync_all().unwrap();
            }
            4 => {
                let mut command = Command::new("fallocate");
                command.args(["-p", "-o", &offset.to_string(), "-l", &length.to_string()]);
                finish(command.arg(path)).must_succeed();
                let end = self.model.len().min(from + length as usize);
                self.model[from.min(end)..end].fill(0);
            }
            5 => {
                let mut appending = OpenOptions::new().append(true).open(path).unwrap();
                let data = bytes(step as u64, (length % 3000) as usize);
                appending.write_all(&data).unwrap();
                self.model.extend(&data);
            }
            6 if !self.model.is_empty() => {
                let mapping = Mapping::of_file(&file, false).unwrap();
                let mut data = vec![0; inside];
                mapping.shared().read_into(from.min(self.model.len()), &mut data).unwrap();
                assert!(inside == 0 || data == self.model[from..from + inside], "step {step}: mapped");
            }
            _ => {
                let mut data = vec![0; inside];
                file.read_exact_at(&mut data, offset.min(self.model.len() as u64)).unwrap();
                assert!(inside == 0 || data == self.model[from..from + inside], "step {step}: read");
            }
        }
        drop(file);
        if step.is_multiple_of(16) || (step.is_multiple_of(5) && self.paths.len() > 1) {
            for path in self.paths {
                let read = fs::read(path).unwrap();
                assert_eq!(read.len(), self.model.len(), "step {step} {}", path.display());
                let differs = read.iter().zip(&self.model).position(|(one, other)| one != other);
                assert_eq!(differs, None, "step {step} (operation {what}) {}", path.display());
            }
        }
    }
}

#[test]
fn random_operations_on_one_file() {
    if !can_mount("random_operations_on_one_file", &["/usr/bin/fallocate"]) {
        return;
    }
    let folder = Folder::new("mount-random");
    let lender = lender(&folder, "l", "64M");
    let mount = Mount::on(&folder, &lender, "16M");
    let paths = [mount.path("file")];
    File::create(&paths[0]).unwrap();
    let mut torture = Torture { random: Random(1), model: Vec::new(), paths: &paths };
    (0..1500).for_each(|step| torture.step(step));
    fs::remove_file(&paths[0]).unwrap();
    until("its room is free", || mount.free() == 16 << 20);
    mount.end();
}

#[test]
fn two_mounts_of_the_same_files() {
    if !can_mount("two_mounts_of_the_same_files", &["/usr/bin/fallocate"]) {
        return;
    }
    let folder = Folder::new("mount-two");
    let key = folder.path("key");
    finish(netvm().args(["secret", "new"]).arg(&key)).must_succeed();
    let key = key.to_str().unwrap();
    let lender = Lender::start_with(&folder.path("l"), "64M", &["--secret", key]);
    let (share, reading) = (format!("unix:{}", folder.path("s").display()), "127.0.0.1:0");
    let home = Mount::start(
        &folder,
        "home",
        3,
        &[
            "--size",
            "32M",
            "--lender",
            &lender.address,
            "--share",
            &share,
            "--share-read-only",
            reading,
            "--secret",
            key,
        ],
    );
    let reading =
        home.said[2].split_whitespace().find(|word| word.starts_with("127.")).unwrap().trim_end_matches(',');
    let other = Mount::start(&folder, "other", 1, &["--join", &share, "--secret", key, "--encrypt"]);
    let reader = Mount::start(&folder, "reader", 1, &["--join", reading, "--secret", key]);
    let all = [&home, &other, &reader];

    // What one has closed the others see: contents, lengths, names, attributes.
    for round in 0..40u64 {
        let (one, two) = (all[round as usize % 2], all[(round as usize + 1) % 2]);
        let data = bytes(round, 5000 + (round as usize * 997) % 90_000);
        fs::write(one.path("file"), &data).unwrap();
        assert!(fs::read(two.path("file")).unwrap() == data, "round {round}");
        assert!(fs::read(reader.path("file")).unwrap() == data, "round {round}");
        // The same length and time, and other bytes.
        let time = fs::metadata(one.path("file")).unwrap().modified().unwrap();
        let data: Vec<u8> = data.iter().map(|byte| !byte).collect();
        fs::write(two.path("file"), &data).unwrap();
        File::options().write(true).open(two.path("file")).unwrap().set_modified(time).unwrap();
        assert!(fs::read(one.path("file")).unwrap() == data, "round {round}");
        fs::rename(two.path("file"), two.path(&format!("file{round}"))).unwrap();
        assert!(!one.path("file").exists() && reader.path(&format!("file{round}")).exists());
        fs::remove_file(one.path(&format!("file{round}"))).unwrap();
        assert!(!two.path(&format!("file{round}")).exists());
    }
    fs::create_dir(other.path("folder")).unwrap();
    fs::set_permissions(home.path("folder"), fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(fs::metadata(other.path("folder")).unwrap().mode() & 0o777, 0o700);

    // Who only reads changes nothing.
    for result in [
        fs::write(reader.path("x"), ""),
        fs::create_dir(reader.path("x")),
        fs::remove_dir(reader.path("folder")),
        fs::rename(reader.path("folder"), reader.path("x")),
        fs::set_permissions(reader.path("folder"), fs::Permissions::from_mode(0o777)),
        symlink("x", reader.path("x")),
    ] {
        fails_with(result, EROFS);
    }

    // A mapped page is renewed when another mount has changed it.
    fs::write(home.path("mapped"), [1; 8192]).unwrap();
    let file = File::open(other.path("mapped")).unwrap();
    let mapping = Mapping::of_file(&file, false).unwrap();
    let first = || {
        let mut byte = [0];
        mapping.shared().read_into(4097, &mut byte).unwrap();
        byte[0]
    };
    assert_eq!(first(), 1);
    File::options().write(true).open(home.path("mapped")).unwrap().write_all_at(&[2], 4097).unwrap();
    until("the mapping shows it", || first() == 2);
    drop((mapping, file));

    // Appended by both: every line is there, whole.
    std::thread::scope(|scope| {
        for mount in [&home, &other] {
            scope.spawn(move || {
                let mut file =
                    OpenOptions::new().append(true).create(true).open(mount.path("lines")).unwrap();
                (0..300).for_each(|index| file.write_all(format!("{index:09}\n").as_bytes()).unwrap());
            });
        }
    });
    let text = fs::read_to_string(reader.path("lines")).unwrap();
    let mut lines: Vec<usize> = text.lines().map(|line| line.parse().unwrap()).collect();
    lines.sort_unstable();
    assert_eq!(lines, (0..600).map(|index| index / 2).collect::<Vec<_>>());

    // Anything, by turns.
    let paths = [home.path("random"), other.path("random")];
    File::create(&paths[0]).unwrap();
    let mut torture = Torture { random: Random(2), model: Vec::new(), paths: &paths };
    (0..400).for_each(|step| torture.step(step));

    // One that goes, politely or not, disturbs nobody.
    reader.end();
    let kept = File::open(other.path("random")).unwrap();
    let mut other = other;
    other.process.0.kill().unwrap();
    other.process.0.wait().unwrap();
    fails_with(fs::metadata(&other.folder), ENOTCONN);
    drop(kept);
    until("it is told", || home.log().matches("has left").count() == 2);
    assert_eq!(fs::read(home.path("random")).unwrap().len(), torture.model.len());
    // Over the dead one a new one is mounted.
    let other = Mount::start(&folder, "other", 1, &["--join", &share, "--secret", key]);
    assert_eq!(fs::read(other.path("random")).unwrap(), torture.model);
    // While somebody has joined, the files stay when the first one is unmounted.
    signal(home.process.0.id(), "INT");
    until("it is unmounted", || home.log().contains("the files stay"));
    assert_eq!(fs::read(other.path("random")).unwrap(), torture.model);
    let done =
        finish(netvm().arg("mount").arg(folder.path("late")).args(["--join", &share, "--secret", key]));
    assert!(!done.status.success(), "{}", done.err);
    other.end();
    let mut home = home;
    assert!(wait(&mut home.process.0, Duration::from_secs(20)).is_some_and(|status| status.success()));
}

#[test]
fn the_first_mount_is_killed() {
    if !can_mount("the_first_mount_is_killed", &[]) {
        return;
    }
    let folder = Folder::new("mount-killed");
    let lender = lender(&folder, "l", "64M");
    let share = format!("unix:{}", folder.path("s").display());
    let args = ["--size", "16M", "--lender", &lender.address, "--share", &share];
    let mut home = Mount::start(&folder, "home", 2, &args);
    let mut other = Mount::start(&folder, "other", 1, &["--join", &share]);
    fs::write(other.path("file"), bytes(1, 100_000)).unwrap();
    let open = File::open(other.path("file")).unwrap();
    home.process.0.kill().unwrap();
    home.process.0.wait().unwrap();
    // Nothing hangs, and nothing is made up.
    let begun = Instant::now();
    fails_with(fs::metadata(home.path("file")), ENOTCONN);
    fails_with(open.read_exact_at(&mut [0; 10], 0), EIO);
    fails_with(fs::write(other.path("new"), "x"), EIO);
    assert!(begun.elapsed() < Duration::from_secs(10));
    until("it tells who is lost", || other.log().contains(&share) && other.log().contains("EIO"));
    drop(open);
    signal(other.process.0.id(), "TERM");
    assert!(wait(&mut other.process.0, Duration::from_secs(20)).is_some_and(|status| status.success()));
    until("the lender has it back", || lender.used_bytes() == 0);
    // One that is stopped is given up as well.
    let home = Mount::start(&folder, "home", 2, &args);
    let other = Mount::start(&folder, "other", 1, &["--join", &share]);
    fs::write(other.path("file"), "x").unwrap();
    signal(home.process.0.id(), "STOP");
    fails_with(fs::read(other.path("file")), EIO);
    until("it tells who is silent", || other.log().contains("not answered"));
    signal(home.process.0.id(), "CONT");
}

#[test]
fn lost_lenders() {
    if !can_mount("lost_lenders", &[]) {
        return;
    }
    let folder = Folder::new("mount-lost");
    let (mut one, two) = (lender(&folder, "l1", "64M"), lender(&folder, "l2", "64M"));
    let args = ["--size", "40M", "--lender", &one.address, "--lender", &two.address, "--replicas", "2"];
    let mount = Mount::start(&folder, "mount", 1, &args);
    let data = bytes(7, 20 << 20);
    let write_cold = |mount: &Mount, name: &str, data: &[u8]| {
        let mut file = File::create(mount.path(name)).unwrap();
        file.write_all(data).and_then(|()| file.sync_all())
    };
    // Past the page cache.
    let read_cold = |mount: &Mount, name: &str| -> std::io::Result<Vec<u8>> {
        let mut file = File::options().read(true).custom_flags(0x4000).open(mount.path(name))?;
        let mut all = Vec::new();
        file.read_to_end(&mut all)?;
        Ok(all)
    };
    write_cold(&mount, "file", &data).unwrap();
    one.process.0.kill().unwrap();
    assert!(read_cold(&mount, "file").unwrap() == data);
    write_cold(&mount, "more", &data).unwrap();
    assert!(read_cold(&mount, "more").unwrap() == data);
    until("it tells of the loss", || mount.log().contains("nothing is lost"));
    mount.end();
    drop(two);

    // Without a second copy.
    let (mut one, two) = (lender(&folder, "l3", "64M"), lender(&folder, "l4", "64M"));
    let args = ["--size", "64M", "--lender", &one.address, "--lender", &two.address];
    let mount = Mount::start(&folder, "mount", 1, &args);
    for index in 0..6u64 {
        write_cold(&mount, &format!("{index}"), &bytes(index, 8 << 20)).unwrap();
    }
    one.process.0.kill().unwrap();
    let (mut there, mut lost) = (0, 0);
    for index in 0..6u64 {
        match read_cold(&mount, &format!("{index}")) {
            Ok(read) => {
                assert!(read == bytes(index, 8 << 20), "file {index}");
                there += 1;
                // What is there can be synced, whatever else is lost.
                File::open(mount.path(&format!("{index}"))).unwrap().sync_all().unwrap();
            }
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(EIO));
                lost += 1;
                fails_with(File::open(mount.path(&format!("{index}"))).unwrap().sync_all(), EIO);
            }
        }
    }
    assert!(there >= 1 && lost >= 1, "{there} {lost}");
    // Names are not on the lenders.
    fs::create_dir(mount.path("folder")).unwrap();
    for path in [mount.path("."), mount.path("folder")] {
        File::open(path).unwrap().sync_all().unwrap();
    }
    fs::remove_dir(mount.path("folder")).unwrap();
    until("it names the lender", || mount.log().contains(&one.address) && mount.log().contains("EIO"));
    // There is less room, and what there is can be used.
    for index in 0..6 {
        fs::remove_file(mount.path(&format!("{index}"))).unwrap();
    }
    assert!(mount.free() >= 28 << 20 && mount.free() <= 36 << 20, "{}", mount.free());
    write_cold(&mount, "new", &bytes(9, 20 << 20)).unwrap();
    assert!(read_cold(&mount, "new").unwrap() == bytes(9, 20 << 20));
    mount.end();
}

#[test]
fn a_file_system_in_a_file() {
    let programs = ["/sbin/mkfs.ext4", "/sbin/e2fsck", "/dev/loop-control", "/usr/bin/mount"];
    if !can_mount("a_file_system_in_a_file", &programs) {
        return;
    }
    let folder = Folder::new("mount-ext4");
    let lender = lender(&folder, "l", "256M");
    let mount = Mount::on(&folder, &lender, "128M");
    let script = "truncate -s 96M disk; /sbin/mkfs.ext4 -q -F disk; mkdir inner; mount -o loop disk inner; trap 'umount inner' EXIT; \
                  cp -r /usr/include/linux inner/; diff -r /usr/include/linux inner/linux; rm -r inner/linux/netfilter; sync; \
                  umount inner; trap - EXIT; /sbin/e2fsck -fn disk; mount -o loop,ro disk inner; trap 'umount inner' EXIT; \
                  cmp /usr/include/linux/fuse.h inner/linux/fuse.h; umount inner; trap - EXIT";
    let done = finish(Command::new("/bin/sh").args(["-ec", script]).current_dir(&mount.folder));
    assert!(done.status.success(), "{}\n{}", done.out(), done.err);
    // The loop device lets it go a moment later.
    until("it can be unmounted", || {
        signal(mount.process.0.id(), "TERM");
        std::thread::sleep(Duration::from_millis(100));
        !is_mounted(&mount.folder)
    });
}

#[test]
fn full_busy_and_forbidden() {
    if !can_mount("full_busy_and_forbidden", &["/usr/bin/setpriv"]) {
        return;
    }
    let folder = Folder::new("mount-full");
    let lender = lender(&folder, "l", "64M");
    let mount = Mount::on(&folder, &lender, "8M");
    // Full: whoever writes is told, at the latest by fsync.
    let mut file = File::create(mount.path("big")).unwrap();
    let data = bytes(3, 1 << 20);
    let result = (0..16).try_for_each(|_| file.write_all(&data).and_then(|()| file.sync_all()));
    fails_with(result, ENOSPC);
    drop(file);
    let done = finish(
        Command::new("dd")
            .args(["if=/dev/zero", "bs=1M", "count=20"])
            .arg(format!("of={}", mount.path("dd").display())),
    );
    assert!(!done.status.success() && done.err.contains("No space left"), "{}", done.err);
    assert!(resident(&lender) >= 7 << 20);
    // What was written before is right, and room comes back.
    let read = fs::read(mount.path("big")).unwrap();
    assert!(read.len() >= 4 << 20 && read.chunks(1 << 20).take(4).all(|chunk| chunk == data));
    fs::remove_file(mount.path("dd")).unwrap();
    fs::remove_file(mount.path("big")).unwrap();
    until("its room is free", || mount.free() == 8 << 20);
    until("the lender has it back", || resident(&lender) <= SCRAPS);
    let sparse = File::create(mount.path("sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    sparse.write_all_at(b"end", (1 << 40) - 3).unwrap();
    sparse.sync_all().unwrap();
    until("its blocks are counted", || sparse.metadata().unwrap().blocks() == 8);
    let mut hole = [1; 100];
    File::open(mount.path("sparse")).unwrap().read_exact_at(&mut hole, 1 << 39).unwrap();
    assert_eq!(hole, [0; 100]);
    drop(sparse);

    // Others may do what permissions say.
    fs::write(mount.path("mine"), "secret").unwrap();
    fs::set_permissions(mount.path("mine"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(mount.path("all"), "public").unwrap();
    fs::set_permissions(mount.path("all"), fs::Permissions::from_mode(0o644)).unwrap();
    let as_other = |program: &str, name: &str| {
        let mut command = Command::new("/usr/bin/setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", program]).arg(mount.path(name));
        finish(&mut command)
    };
    // The folder of the test may be closed to others.
    let reachable = as_other("stat", "all");
    if reachable.status.success() {
        assert_eq!(as_other("cat", "all").must_succeed().out(), "public");
        let denied = as_other("cat", "mine");
        assert!(!denied.status.success() && denied.err.contains("denied"), "{}", denied.err);
        assert!(!as_other("rm", "all").status.success() && !as_other("touch", "new").status.success());
    } else {
        let _ = writeln!(
            std::io::stderr(),
            "full_busy_and_forbidden: permissions skipped (others do not reach the folder)"
        );
    }

    // Open: it stays.
    let open = File::open(mount.path("all")).unwrap();
    signal(mount.process.0.id(), "TERM");
    until("it refuses", || mount.log().contains("is in use"));
    assert!(is_mounted(&mount.folder));
    assert_eq!(fs::read_to_string(mount.path("all")).unwrap(), "public");
    drop(open);
    mount.end();
}

#[test]
fn bad_input() {
    if !can_mount("bad_input", &[]) {
        return;
    }
    let folder = Folder::new("mount-bad");
    let lender = lender(&folder, "l", "64M");
    let at = folder.path("m");
    fs::create_dir(&at).unwrap();
    fs::write(folder.path("key"), "nonsense").unwrap();
    let (address, key) = (lender.address.as_str(), folder.path("key"));
    let segment = |file: &str| format!("{file},name=n,at=127.0.0.1:1,key={}", key.display());
    let (here, nowhere) = (at.to_str().unwrap(), folder.path("nowhere"));
    for (args, reason) in [
        (vec![here], "nothing to mount"),
        (vec![here, "--size", "1M"], "--lender"),
        (vec![here, "--size", "1K", "--lender", address], "block of 4096"),
        (vec![here, "--size", "1G", "--lender", address], "too little memory"),
        (vec![here, "--size", "1M", "--lender", address, "--replicas", "2"], "replicas"),
        (
            vec![here, "--size", "1M", "--lender", address, "--share", "0.0.0.0:0"],
            "makes one); choose another --share",
        ),
        (vec![here, "--size", "1M", "--lender", address, "--join", "x:1"], "cannot be used with"),
        (vec![here, "--join", "unix:/nowhere/at/all"], "/nowhere/at/all"),
        (vec![here, "--join", "127.0.0.1:1"], "`netvm mount --share 127.0.0.1:1`"),
        (vec![here, "--join", address], "does not"),
        (vec![here, "--segment", "f"], "name= is missing"),
        (vec![here, "--segment", &segment("f")], "has no key"),
        (vec![here, "--segment", "f,name=n,at=127.0.0.1:1,key=nokey"], "cannot read the key file nokey"),
        (vec![nowhere.to_str().unwrap(), "--size", "1M", "--lender", address], "No such file"),
        (vec![key.to_str().unwrap(), "--size", "1M", "--lender", address], "not a directory"),
    ] {
        let done = finish(netvm().arg("mount").args(&args));
        assert!(!done.status.success() && done.err.contains(reason), "{args:?}: {}", done.err);
        assert!(!is_mounted(&at), "{args:?}");
    }
    until("the lender has everything back", || lender.status()["borrowers"].as_array().unwrap().is_empty());

    // Whoever may join says anything: no answer, an error, or the end, and the files stay as they are.
    let socket = folder.path("s");
    let share = format!("unix:{}", socket.display());
    let mount = Mount::start(
        &folder,
        "mount",
        2,
        &["--size", "8M", "--lender", address, "--share-read-only", &share],
    );
    fs::write(mount.path("file"), bytes(1, 50_000)).unwrap();
    let mut random = Random(11);
    for round in 0..60u64 {
        let mut stream = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let order = if round % 7 == 3 { 2 << 8 } else { 1 << 8 };
        stream.write_all(&Hello { features: order, ..Hello::new(Role::Mount) }.encode()).unwrap();
        let mut hello = Hello::new(Role::Mount).encode();
        if stream.read_exact(&mut hello).is_err()
            || Hello::decode(&hello).unwrap().refusal != netvm_core::wire::Refusal::None
        {
            assert_eq!(order, 2 << 8, "round {round}");
            continue;
        }
        for unique in 1..40u64 {
            let mut head = [0u8; 80];
            let opcode = (random.next() % 56) as u32;
            let extra = if opcode == 16 { (random.next() % 5000) as u32 } else { 0 };
            let length = match (random.next() % 12, opcode) {
                (0, _) => random.next() as u32,
                (_, 16) => 80 + extra,
                _ => 40 + (random.next() % 41) as u32,
            };
            head[40..].iter_mut().for_each(|byte| *byte = random.next() as u8 & 0x13);
            head[..4].copy_from_slice(&length.to_ne_bytes());
            head[4..8].copy_from_slice(&opcode.to_ne_bytes());
            head[8..16].copy_from_slice(&unique.to_ne_bytes());
            head[16..24].copy_from_slice(&(random.next() % 4).to_ne_bytes());
            if opcode == 16 {
                head[56..60].copy_from_slice(&extra.to_ne_bytes());
            }
            let rest = vec![0; length.saturating_sub(80).min(100_000) as usize];
            if stream.write_all(&head).and_then(|()| stream.write_all(&rest)).is_err() {
                break;
            }
        }
        if round % 2 == 0 {
            // One that has asked something can be answered as well.
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let _ = stream.read_to_end(&mut Vec::new());
        }
    }
    assert_eq!(fs::read(mount.path("file")).unwrap(), bytes(1, 50_000));
    assert_eq!(fs::read_dir(&mount.folder).unwrap().count(), 1);
    mount.end();
}
