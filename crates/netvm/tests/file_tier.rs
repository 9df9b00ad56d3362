//! Lenders that lend from files: what goes there, and what happens when their disk is full.

mod common;

use common::words::{check, words};
use common::{Random, Serving, alone, delayed};
use netvm::far::FarMemory;
use netvm::lender::{LenderConfig, status};
use netvm::pager::TierPolicy;
use netvm::{Error, LenderLimit};
use netvm_sys::mapping::Mapping;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Local memory.
const LOCAL: u64 = 4 * MIB;
const PATIENCE: Duration = Duration::from_secs(5);
/// Eight times as much.
const WORDS: usize = 4 << 20;

/// A lender until the process ends: pagers have no end either. Slabs of 1 MiB.
fn lend(mib: u64, folder: Option<&Path>) -> &'static Serving {
    let folder = folder.map(Path::to_owned);
    let config = LenderConfig { size_bytes: mib * MIB, slab_bytes: MIB, folder, ..LenderConfig::default() };
    Box::leak(Box::new(Serving::start(config)))
}

fn borrow(lenders: &[&Serving]) -> FarMemory {
    let far = FarMemory::builder().lenders(lenders.iter().map(|lender| lender.address.as_str()));
    far.local(LOCAL).area(1 << 34).tier(TierPolicy::Lender).start().unwrap()
}

fn used(lender: &Serving) -> u64 {
    status(&lender.address).unwrap().used_bytes
}

#[test]
fn a_file_takes_what_memory_has_no_room_for() {
    let Some(_alone) = alone() else { return };
    // The file is named first: it is what it is that counts.
    let (file, memory) = (lend(256, Some(&std::env::temp_dir())), lend(8, None));
    let far = borrow(&[file, memory]);
    let mut vec = words(&far, WORDS, 1);
    assert_eq!(used(memory), 8 * MIB);
    assert!(used(file) >= 16 * MIB, "{}", used(file));
    check(&vec, 1);
    let mut random = Random::new(2);
    for _ in 0..20_000 {
        let index = random.next() as usize % WORDS;
        vec[index] = !vec[index];
        let other = random.next() as usize % WORDS;
        vec[other] = std::hint::black_box(vec[other]);
        vec[index] = !vec[index];
    }
    check(&vec, 1);
    let held = status(&file.address).unwrap();
    assert!(held.resident_bytes >= held.used_bytes, "room is taken when it is lent: {held:?}");
}

#[test]
fn memory_that_comes_free_is_used_before_more_of_the_file() {
    let Some(_alone) = alone() else { return };
    let (file, memory) = (lend(256, Some(&std::env::temp_dir())), lend(16, None));
    let mut other = memory.connect();
    for _ in 0..16 {
        other.borrow_slab().unwrap();
    }
    let far = borrow(&[memory, file]);
    let first = words(&far, WORDS / 4, 3);
    let on_file = used(file);
    assert!(on_file >= 2 * MIB);
    drop(other);
    // The full one is asked again once a second.
    std::thread::sleep(Duration::from_millis(1500));
    let second = words(&far, WORDS / 4, 4);
    assert!(used(memory) >= 6 * MIB && used(file) <= on_file + MIB, "{} {}", used(memory), used(file));
    check(&first, 3);
    check(&second, 4);
}

/// A file system of its own, in memory.
struct Small(PathBuf);

impl Small {
    /// `None` where nothing can be mounted.
    fn new(name: &str, size: &str) -> Option<Self> {
        let path = std::env::temp_dir().join(format!("netvm-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"])
            .arg(&path)
            .output();
        if mount.is_ok_and(|output| output.status.success()) {
            return Some(Self(path));
        }
        let _ = std::fs::remove_dir(&path);
        let _ = writeln!(std::io::stderr(), "{name}: skipped (nothing can be mounted)");
        None
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_full_disk_is_told_when_a_slab_is_wanted_and_nothing_is_lost() {
    let Some(_alone) = alone() else { return };
    let Some(small) = Small::new("a_full_disk", "9M") else { return };
    let (full, other) = (lend(64, Some(&small.0)), lend(256, Some(&std::env::temp_dir())));
    let far = borrow(&[full, other]);
    let vec = words(&far, WORDS, 5);
    assert!((7 * MIB..=9 * MIB).contains(&used(full)), "{}", used(full));
    check(&vec, 5);
    let mut borrower = full.connect();
    let error = (0..10).find_map(|_| borrower.borrow_slab().err()).unwrap();
    assert!(matches!(error, Error::LenderFull { limit: LenderLimit::Disk, .. }), "{error:?}");
    assert!(error.to_string().contains("disk"), "{error}");
    // What was lent has room.
    check(&vec, 5);
}

/// As on file systems that copy what is written: the room that was taken is not there when it is needed.
#[test]
fn a_write_without_room_ends_its_connection_and_not_the_lender() {
    let Some(_alone) = alone() else { return };
    let Some(small) = Small::new("no_room", "9M") else { return };
    let lender = lend(4, Some(&small.0));
    let (mut borrower, mut other) = (lender.connect(), lender.connect());
    let (slab, kept) = (borrower.borrow_slab().unwrap(), other.borrow_slab().unwrap());
    let memory = Mapping::anonymous(4096).unwrap();
    let page = memory.shared();
    page.fill(7);
    other.post_write(0, kept, 0, page).unwrap();
    other.flush(PATIENCE).unwrap();
    let files = std::fs::read_dir("/proc/self/fd").unwrap().map(|file| file.unwrap().path());
    let is_lent = |file: &PathBuf| std::fs::read_link(file).is_ok_and(|target| target.starts_with(&small.0));
    let lent = files.into_iter().find(is_lent).unwrap();
    let (start, bytes) = (u64::from(slab) * MIB, MIB);
    let punch = ["--punch-hole", "--offset", &start.to_string(), "--length", &bytes.to_string()];
    assert!(Command::new("fallocate").args(punch).arg(lent_by(&lent)).status().unwrap().success());
    let mut hog = std::fs::File::create(small.0.join("hog")).unwrap();
    while hog.write_all(&[1; 4096]).is_ok() {}
    let refused = borrower.post_write(1, slab, 0, page).is_err() || borrower.flush(PATIENCE).is_err();
    assert!(refused);
    page.fill(0);
    other.post_read(2, kept, 0, page).unwrap();
    other.flush(PATIENCE).unwrap();
    assert_eq!(page.to_vec(), vec![7; 4096]);
    assert!(status(&lender.address).is_ok());
}

/// The file of a descriptor of ours, for another process.
fn lent_by(descriptor: &Path) -> PathBuf {
    let number = descriptor.file_name().unwrap();
    Path::new("/proc").join(std::process::id().to_string()).join("fd").join(number)
}

/// The lender of the file is slow, and what is wanted was allocated last.
#[test]
fn what_is_wanted_often_comes_to_memory_and_what_is_not_makes_room() {
    let Some(_alone) = alone() else { return };
    let (file, memory) = (lend(256, Some(&std::env::temp_dir())), lend(12, None));
    let slow = delayed(&file.address, Arc::new(AtomicU64::new(1)));
    let far = FarMemory::builder().lenders([slow.as_str(), memory.address.as_str()]);
    let far = far.local(LOCAL).area(1 << 34).tier(TierPolicy::Lender).start().unwrap();
    let cold = words(&far, 2 << 20, 6);
    let hot = words(&far, 1 << 20, 7);
    let mut random = Random::new(8);
    let mut reads = |time: Duration| {
        let (started, mut count) = (Instant::now(), 0u64);
        while started.elapsed() < time {
            std::hint::black_box(hot[random.next() as usize % hot.len()]);
            count += 1;
        }
        count as f64 / started.elapsed().as_secs_f64()
    };
    let before = reads(Duration::from_millis(500));
    let (started, mut after) = (Instant::now(), 0.0);
    while after < 4.0 * before {
        assert!(started.elapsed() < Duration::from_secs(60), "{before} {after} {:?}", far.stats());
        after = reads(Duration::from_millis(500));
    }
    println!("{before:.0} reads/s at first, {after:.0} after {:?}", started.elapsed());
    assert!(far.stats().pages_sorted > 1000, "{:?}", far.stats());
    check(&hot, 7);
    check(&cold, 6);
}
