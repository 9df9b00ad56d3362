//! What is known of each swap: files in a folder that only root may enter.
//!
//! | file | what | who writes it |
//! |---|---|---|
//! | `swap-N.file` | what the FUSE file is mounted over | `swap on`; reserves the number |
//! | `swap-N.json` | [`Entry`] | `swap on`, before anything is swapped |
//! | `swap-N.health` | [`Health`], then zeros | the server, through a mapping |

use netvm::runfile::start_time;
use netvm_sys::shared::SharedSlice;
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

impl Files {
    /// Takes a free number.
    ///
    /// # Errors
    /// A sentence.
    pub fn reserve() -> Result<Self, String> {
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
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(files.mount_point()) {
                Ok(_) => return Ok(files),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(format!("cannot make {}: {error}", files.mount_point().display())),
            }
        }
        Err(format!("there are {NUMBERS} swaps already; `netvm swap off` ends them"))
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
    /// The loop device.
    pub device: PathBuf,
    pub size_bytes: u64,
    pub replicas: usize,
}

impl Entry {
    /// Whether the server is there.
    pub fn is_served(&self) -> bool {
        start_time(self.pid) == Some(self.started)
    }

    /// Whether the loop device is still on our file, and not on another one by now.
    pub fn is_attached(&self, files: &Files) -> bool {
        let name = self.device.file_name().unwrap_or_default();
        let path = Path::new("/sys/block").join(name).join("loop/backing_file");
        // The kernel appends a word when the file was unmounted.
        let file = fs::read_to_string(path).unwrap_or_default();
        file.split_whitespace().next().is_some_and(|file| Path::new(file) == files.mount_point())
    }

    /// What the kernel says of it, while it is swap.
    pub fn in_use(&self, files: &Files) -> Option<InUse> {
        if !self.is_attached(files) {
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
    /// Into a mapped health file.
    pub fn write(&self, to: SharedSlice) {
        let mut text = serde_json::to_vec(self).unwrap_or_default();
        if text.len() <= to.len() {
            text.resize(to.len(), 0);
            to.write_from(0, &text);
        }
    }
}
