//! What is known of each swap: files in a folder that only root may enter.
//!
//! | file | what | who writes it |
//! |---|---|---|
//! | `swap-N.file` | what the FUSE file is mounted over | `swap on`; locked by it and the server, this reserves the number |
//! | `swap-N.json` | [`Entry`] | `swap on`, before anything is swapped |
//! | `swap-N.health` | [`Health`], then zeros | the server, through a mapping |

use super::by::By;
use super::reserve::Changed;
use netvm::view::ublk;
use netvm_sys::nbd;
use netvm_sys::shared::SharedSlice;
use netvm_sys::stat::start_time;
use serde::{Deserialize, Serialize};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

const FOLDER: &str = "/run/netvm";
/// Most swaps that are looked for; the kernel has about 30.
const NUMBERS: u32 = 64;
/// Bytes of a health file.
const HEALTH_BYTES: usize = 64 << 10;

/// A swap's files.
#[derive(Clone, Debug)]
pub struct Files {
    number: u32,
}

/// A number that is nobody else's, for as long as this or a copy of it is open somewhere.
#[derive(Debug)]
pub struct Reserved {
    pub files: Files,
    pub lock: fs::File,
}

impl Files {
    /// Takes a free number.
    ///
    /// # Errors
    /// A sentence.
    pub fn reserve() -> Result<Reserved, String> {
        let mut builder = fs::DirBuilder::new();
        builder
            .recursive(true)
            .mode(0o700)
            .create(FOLDER)
            .map_err(|error| format!("cannot make {FOLDER}: {error}"))?;
        let folder = fs::symlink_metadata(FOLDER).map_err(|error| format!("{FOLDER}: {error}"))?;
        if !folder.is_dir() || folder.uid() != 0 || folder.mode() & 0o022 != 0 {
            return Err(format!("{FOLDER} is not a folder that only root can write to: remove it"));
        }
        for number in 0..NUMBERS {
            let files = Self { number };
            if let Some(lock) = files.take(true)? {
                return Ok(Reserved { files, lock });
            }
        }
        Err(format!("there are {NUMBERS} swaps already; `netvm swap off` ends them"))
    }

    /// Locks the file of this number, unless it is somebody's: of a swap, of one that is being made, or of a server that is left.
    /// A file that nobody has is taken, or with `make` made.
    fn take(&self, make: bool) -> Result<Option<fs::File>, String> {
        let path = self.mount_point();
        let failed = |error: io::Error| format!("cannot make {}: {error}", path.display());
        if fs::symlink_metadata(self.entry_path()).is_ok() || self.is_mounted() {
            return Ok(None);
        }
        let mut options = OpenOptions::new();
        let opened =
            options.write(true).create(make).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = match opened.open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !make => return Ok(None),
            opened => opened.map_err(failed)?,
        };
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(failed(error.into())),
        }
        // Whoever had it before may have removed it, or made a swap of it, just now.
        let same = fs::symlink_metadata(&path).is_ok_and(|there| {
            file.metadata().is_ok_and(|ours| (there.dev(), there.ino()) == (ours.dev(), ours.ino()))
        });
        let free = same && fs::symlink_metadata(self.entry_path()).is_err();
        Ok(free.then_some(file))
    }

    /// Removes what was left by a `swap on` that was killed before there was a swap.
    pub fn sweep() {
        for files in (0..NUMBERS).map(Self::of) {
            // The lock is held until the file is gone.
            if let Ok(Some(_lock)) = files.take(false) {
                files.remove();
            }
        }
    }

    /// The files of a number that somebody has reserved.
    pub fn of(number: u32) -> Self {
        Self { number }
    }

    /// All numbers that are taken.
    pub fn all() -> Vec<Self> {
        let taken = |files: &Self| fs::symlink_metadata(files.entry_path()).is_ok();
        (0..NUMBERS).map(Self::of).filter(taken).collect()
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    fn path(&self, ending: &str) -> PathBuf {
        Path::new(FOLDER).join(format!("swap-{}.{ending}", self.number))
    }

    pub fn mount_point(&self) -> PathBuf {
        self.path("file")
    }

    fn entry_path(&self) -> PathBuf {
        self.path("json")
    }

    /// # Errors
    /// A sentence.
    pub fn write_entry(&self, entry: &Entry) -> Result<(), String> {
        let path = self.entry_path();
        let text = serde_json::to_vec(entry).map_err(|error| error.to_string())?;
        // Whoever reads it finds all of it or nothing.
        let new = self.path("new");
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, &path))
            .map_err(|error| format!("{}: {error}", path.display()))
    }

    /// # Errors
    /// A sentence.
    pub fn entry(&self) -> Result<Entry, String> {
        let path = self.entry_path();
        let text = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Settings that were changed for another one, which has gone, are this one's to restore.
    pub fn inherit(&self, changed: &[Changed]) {
        if let Ok(mut entry) = self.entry() {
            entry.changed.extend_from_slice(changed);
            let _ = self.write_entry(&entry);
        }
    }

    /// A health file of zeros, for the server to map.
    ///
    /// # Errors
    /// As of the file system.
    pub fn make_health(&self) -> io::Result<fs::File> {
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(self.path("health"))?;
        file.set_len(HEALTH_BYTES as u64)?;
        Ok(file)
    }

    /// What the server wrote last.
    pub fn health(&self) -> Option<Health> {
        for _ in 0..20 {
            let bytes = fs::read(self.path("health")).ok()?;
            let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
            if let Ok(health) = serde_json::from_slice(&bytes[..end]) {
                return Some(health);
            }
            // It is writing.
            std::thread::sleep(Duration::from_millis(10));
        }
        None
    }

    /// Removes them. The number is free afterwards.
    pub fn remove(&self) {
        for ending in ["json", "health", "new", "file"] {
            let _ = fs::remove_file(self.path(ending));
        }
    }

    /// Whether the FUSE file is mounted.
    pub fn is_mounted(&self) -> bool {
        let at = self.mount_point();
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        mounts.lines().filter_map(|line| line.split(' ').nth(1)).any(|path| Path::new(path) == at)
    }
}

/// A swap as it was made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Entry {
    /// The server.
    pub pid: u32,
    /// When it started, so that no other process is taken for it.
    pub started: u64,
    /// Who stands in for the server when it is dead, if somebody does, and when that started.
    pub guard: Option<(u32, u64)>,
    /// What kind of device it is.
    pub by: By,
    pub device: PathBuf,
    pub size_bytes: u64,
    pub replicas: usize,
    /// Settings of the machine that were changed for it.
    pub changed: Vec<Changed>,
}

impl Entry {
    /// Whether the server is there.
    pub fn is_served(&self) -> bool {
        start_time(self.pid) == Some(self.started)
    }

    /// The processes that it needs, and when they started.
    pub fn processes(&self) -> impl Iterator<Item = (u32, u64)> {
        [Some((self.pid, self.started)), self.guard].into_iter().flatten()
    }

    /// A ublk device whose server and guard are both dead: whatever is asked of it waits for somebody who answers.
    pub fn is_abandoned(&self, files: &Files) -> bool {
        let is_there = |(pid, started)| start_time(pid) == Some(started);
        self.by == By::Ublk && !self.processes().any(is_there) && self.is_attached(files)
    }

    /// Whether the device is still ours, and not another's by now.
    pub fn is_attached(&self, files: &Files) -> bool {
        match self.by {
            By::Ublk => {
                let server = self.number().and_then(|number| ublk::server_of(number).ok());
                server.is_some_and(|server| self.processes().any(|(pid, _)| pid == server))
            }
            By::Nbd => {
                let server = self.number().and_then(nbd::served_by);
                server.is_some_and(|server| nbd::is_thread_of(server, self.pid))
            }
            By::Loop => {
                let name = self.device.file_name().unwrap_or_default();
                let path = Path::new("/sys/block").join(name).join("loop/backing_file");
                // The kernel appends a word when the file was unmounted.
                let file = fs::read_to_string(path).unwrap_or_default();
                file.split_whitespace().next().is_some_and(|file| Path::new(file) == files.mount_point())
            }
        }
    }

    /// The number at the end of the device's name.
    pub fn number(&self) -> Option<u32> {
        let name = self.device.file_name()?.to_str()?;
        name.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().ok()
    }

    /// Takes the device away, which is not swap any more. A loop device the kernel takes by itself.
    ///
    /// # Errors
    /// A sentence.
    pub fn take_away(&self, files: &Files) -> Result<(), String> {
        let Some(number) = self.number().filter(|_| self.is_attached(files)) else { return Ok(()) };
        let taken = match self.by {
            By::Ublk => ublk::remove(number).map_err(|error| error.to_string()),
            By::Nbd => nbd::disconnect(number).map_err(|error| error.to_string()),
            By::Loop => Ok(()),
        };
        taken.map_err(|error| format!("cannot take {} away: {error}", self.device.display()))
    }

    /// What the kernel says of it, while it is swap.
    pub fn in_use(&self, files: &Files) -> Option<InUse> {
        // The kernel forgets whose a network block device was when its server is dead, but lets nobody else swap on it.
        let is_orphan = self.by == By::Nbd && !self.is_served();
        if !is_orphan && !self.is_attached(files) {
            return None;
        }
        let swaps = fs::read_to_string("/proc/swaps").ok()?;
        let fields = swaps.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
        let fields = fields
            .into_iter()
            .find(|fields| fields.first().is_some_and(|path| Path::new(path) == self.device))?;
        Some(InUse {
            used_bytes: fields.get(3)?.parse::<u64>().ok()? * 1024,
            priority: fields.get(4)?.parse().ok()?,
        })
    }
}

/// A line of /proc/swaps.
#[derive(Clone, Copy, Debug)]
pub struct InUse {
    pub used_bytes: u64,
    pub priority: i32,
}

/// How the server is doing.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Health {
    pub lenders: Vec<LenderHealth>,
    /// Extents with fewer copies than there should be.
    pub degraded: u64,
    /// Extents of which nothing is left.
    pub lost: u64,
    /// What protects the server on other machines, and not on this one.
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LenderHealth {
    pub address: String,
    /// Why it is lost.
    pub lost: Option<String>,
}

impl Health {
    /// Into a mapped health file. What is too long for it is told in fewer words.
    pub fn write(&self, to: SharedSlice) {
        let mut text = self.text(to.len());
        text.resize(to.len(), 0);
        to.write_from(0, &text);
    }

    /// At most `bytes_max` bytes: without the ends of long texts, then without lenders that are well, then without the others.
    fn text(&self, bytes_max: usize) -> Vec<u8> {
        let mut health = self.clone();
        for chars_max in [usize::MAX, 256, 64, 16] {
            for text in health.texts() {
                if let Some((end, _)) = text.char_indices().nth(chars_max) {
                    text.truncate(end);
                    text.push('…');
                }
            }
            if let Some(text) = health.fitting(bytes_max) {
                return text;
            }
        }
        let all = health.lenders.len();
        // Those that are lost come first.
        health.lenders.sort_by_key(|lender| lender.lost.is_none());
        while health.lenders.pop().is_some() {
            health.warnings.truncate(8);
            let left = health.lenders.len();
            let mut told = health.clone();
            told.warnings
                .push(format!("{} of {all} lenders are not shown: there is no room for them", all - left));
            if let Some(text) = told.fitting(bytes_max) {
                return text;
            }
        }
        Vec::new()
    }

    fn texts(&mut self) -> impl Iterator<Item = &mut String> {
        let lenders = self.lenders.iter_mut();
        let lenders = lenders.flat_map(|lender| [Some(&mut lender.address), lender.lost.as_mut()]);
        lenders.flatten().chain(self.warnings.iter_mut())
    }

    fn fitting(&self, bytes_max: usize) -> Option<Vec<u8>> {
        serde_json::to_vec(self).ok().filter(|text| text.len() <= bytes_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_long_is_told_in_fewer_words() {
        let lender = |number: usize, chars: usize| LenderHealth {
            address: format!("{number}{}", "\u{1}".repeat(chars)),
            lost: (number % 2 == 1).then(|| "ü".repeat(chars)),
        };
        for (lenders, chars, room) in
            [(64, 200, HEALTH_BYTES), (64, 5000, HEALTH_BYTES), (64, 5000, 4096), (3, 5, HEALTH_BYTES)]
        {
            let health = Health {
                lenders: (0..lenders).map(|number| lender(number, chars)).collect(),
                degraded: 3,
                lost: 2,
                warnings: vec!["w".repeat(chars)],
            };
            let text = health.text(room);
            let read: Health = serde_json::from_slice(&text).unwrap();
            assert!(text.len() <= room && (read.degraded, read.lost) == (3, 2));
            if room == HEALTH_BYTES {
                // All of them are there, and told apart.
                let lost = read.lenders.iter().filter(|lender| lender.lost.is_some()).count();
                assert_eq!((read.lenders.len(), lost), (lenders, lenders / 2));
            } else {
                assert!(
                    read.warnings.last().is_some_and(|text| text.contains("not shown")),
                    "{:?}",
                    read.warnings
                );
                assert!(read.lenders.iter().all(|lender| lender.lost.is_some()));
            }
            assert_eq!(chars > 5, text != serde_json::to_vec(&health).unwrap());
        }
    }
}
