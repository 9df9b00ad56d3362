//! The target folder, and nothing outside it: every path is walked a folder at a time, and no symbolic link is followed.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, Timespec, Timestamps};
use rustix::io::Errno;

use super::frames::{Entry, check_name, part_name};

/// See the module.
pub(super) struct Folder {
    root: OwnedFd,
    /// The folder that was asked for last.
    last: Option<(Vec<u8>, OwnedFd)>,
}

/// What has a name already.
pub(super) enum Found {
    Nothing,
    /// A plain file of this length and time of change.
    File {
        bytes: u64,
        changed: (i64, u32),
    },
    Folder,
    Other,
}

const WALK: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Neither through links nor waiting for somebody at the other end of a FIFO.
const PLAIN: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Folder and last part of a path that [`check_name`] let pass.
fn split(name: &[u8]) -> (&[u8], &[u8]) {
    match name.iter().rposition(|&byte| byte == b'/') {
        Some(at) => (&name[..at], &name[at + 1..]),
        None => (b"", name),
    }
}

impl Folder {
    /// An existing folder; the path to it may be anything.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { root: rustix::fs::open(path, flags, Mode::empty())?, last: None })
    }

    /// The folder of this path, made where it is not there if asked.
    fn at(&mut self, path: &[u8], make: bool) -> io::Result<&OwnedFd> {
        if path.is_empty() {
            return Ok(&self.root);
        }
        // Checked before, and once more here, where it would hurt.
        check_name(path).map_err(|wrong| io::Error::new(io::ErrorKind::InvalidInput, wrong))?;
        if self.last.as_ref().is_none_or(|(last, _)| last != path) {
            let mut folder: Option<OwnedFd> = None;
            for part in path.split(|&byte| byte == b'/') {
                let above = folder.as_ref().unwrap_or(&self.root);
                let below = match rustix::fs::openat(above, part, WALK, Mode::empty()) {
                    Err(Errno::NOENT) if make => {
                        match rustix::fs::mkdirat(above, part, Mode::RWXU) {
                            Err(error) if error != Errno::EXIST => return Err(error.into()),
                            _ => {}
                        }
                        rustix::fs::openat(above, part, WALK, Mode::empty())?
                    }
                    other => other?,
                };
                folder = Some(below);
            }
            self.last = folder.map(|folder| (path.to_vec(), folder));
        }
        Ok(self.last.as_ref().map_or(&self.root, |(_, folder)| folder))
    }

    /// Makes a folder that is not there, with all above it; whether it made it.
    pub fn make(&mut self, name: &[u8]) -> io::Result<bool> {
        let (above, last) = split(name);
        let made = match rustix::fs::mkdirat(self.at(above, true)?, last, Mode::RWXU) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(error) => return Err(error.into()),
        };
        self.at(name, true)?;
        Ok(made)
    }

    /// Gives a folder its permissions and time.
    pub fn dress(&mut self, entry: &Entry) -> io::Result<()> {
        let (above, last) = split(&entry.name);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | PLAIN;
        let folder = rustix::fs::openat(self.at(above, false)?, last, flags, Mode::empty())?;
        dress(&folder, entry)
    }

    /// What is there under this name. Where a folder above it is missing, nothing is.
    pub fn find(&mut self, name: &[u8]) -> io::Result<Found> {
        let (above, last) = split(name);
        let folder = match self.at(above, false) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
            other => other?,
        };
        let stat = match rustix::fs::statat(folder, last, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(Found::Nothing),
            other => other?,
        };
        Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Found::File {
                bytes: stat.st_size as u64,
                changed: (stat.st_mtime, stat.st_mtime_nsec as u32),
            },
            FileType::Directory => Found::Folder,
            _ => Found::Other,
        })
    }

    /// Opens a plain file to read it.
    pub fn open_file(&mut self, name: &[u8]) -> io::Result<File> {
        let (above, last) = split(name);
        plain(rustix::fs::openat(self.at(above, false)?, last, OFlags::RDONLY | PLAIN, Mode::empty())?)
    }

    /// Opens what there is of a file that has not come completely, for us alone; an empty one where nothing is, if asked.
    ///
    /// # Errors
    /// `WouldBlock` when another transfer writes it.
    pub fn open_part(&mut self, name: &[u8], make: bool) -> io::Result<File> {
        let (above, last) = split(name);
        let part = part_name(last);
        let folder = self.at(above, make)?;
        let flags = OFlags::RDWR | PLAIN | if make { OFlags::CREATE } else { OFlags::empty() };
        for _ in 0..10 {
            let file = plain(rustix::fs::openat(folder, &part, flags, Mode::RUSR | Mode::WUSR)?)?;
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            // Who had it before us may have given it its name, or thrown it away.
            let ours = rustix::fs::fstat(&file)?;
            match rustix::fs::statat(folder, &part, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(there) if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) => return Ok(file),
                Ok(_) | Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Gives a complete file its permissions, its time and its name.
    ///
    /// # Errors
    /// `AlreadyExists` when something has the name and may not be replaced.
    pub fn finish(&mut self, part: &File, entry: &Entry, replace: bool) -> io::Result<()> {
        dress(part, entry)?;
        let (above, last) = split(&entry.name);
        let from = part_name(last);
        let folder = self.at(above, false)?;
        if replace {
            return Ok(rustix::fs::renameat(folder, &from, folder, last)?);
        }
        match rustix::fs::renameat_with(folder, &from, folder, last, RenameFlags::NOREPLACE) {
            // The file system does not know how; a second name does not replace anything either.
            Err(Errno::INVAL | Errno::NOSYS) => {
                rustix::fs::linkat(folder, &from, folder, last, AtFlags::empty())?;
                Ok(rustix::fs::unlinkat(folder, &from, AtFlags::empty())?)
            }
            other => Ok(other?),
        }
    }
}

/// Says of a part whether it is written out of order: its end tells less then of what has come. Its permissions carry that, since they mean
/// nothing until it is complete.
pub(super) fn mark_unordered(part: &File, unordered: bool) -> io::Result<()> {
    let mode = Mode::RUSR | Mode::WUSR | if unordered { Mode::XUSR } else { Mode::empty() };
    Ok(rustix::fs::fchmod(part, mode)?)
}

/// Whether [`mark_unordered`] was the last to say so.
pub(super) fn is_unordered(part: &Metadata) -> bool {
    part.mode() & Mode::XUSR.as_raw_mode() != 0
}

/// A file that is one: writing to a FIFO or a device does something.
fn plain(fd: OwnedFd) -> io::Result<File> {
    let file = File::from(fd);
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a plain file"));
    }
    Ok(file)
}

fn dress(file: &impl std::os::fd::AsFd, entry: &Entry) -> io::Result<()> {
    rustix::fs::fchmod(file, Mode::from_raw_mode(u32::from(entry.mode)))?;
    let time = Timespec { tv_sec: entry.changed.0, tv_nsec: i64::from(entry.changed.1) };
    let same = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    Ok(rustix::fs::futimens(file, &Timestamps { last_access: same, last_modification: time })?)
}
