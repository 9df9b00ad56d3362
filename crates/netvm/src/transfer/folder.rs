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
            let file = match rustix::fs::openat(folder, &part, flags, Mode::RUSR | Mode::WUSR) {
                Err(Errno::ACCESS) => {
                    undress(folder, &part)?;
                    continue;
                }
                other => plain(other?)?,
            };
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
        let named = dress(part, entry).and_then(|()| self.name(entry, replace));
        if named.is_err() {
            // The next one has to write into it again.
            let _ = mark_unordered(part, false);
        }
        named
    }

    fn name(&mut self, entry: &Entry, replace: bool) -> io::Result<()> {
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

/// Makes a part ours to write again whose transfer has died between its permissions and its name.
fn undress(folder: &OwnedFd, part: &str) -> io::Result<()> {
    match rustix::fs::openat(folder, part, OFlags::RDONLY | PLAIN, Mode::empty()) {
        Ok(file) => {
            let file = plain(file)?;
            // Not while another transfer is about to name it; and where it just has, this is not the part any more.
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            let ours = rustix::fs::fstat(&file)?;
            match rustix::fs::statat(folder, part, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(there) if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) => {
                    mark_unordered(&file, false)
                }
                Ok(_) | Err(Errno::NOENT) => Ok(()),
                Err(error) => Err(error.into()),
            }
        }
        // It cannot even be read: it comes anew.
        Err(Errno::ACCESS) => match rustix::fs::statat(folder, part, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(there) if FileType::from_raw_mode(there.st_mode) == FileType::RegularFile => {
                Ok(rustix::fs::unlinkat(folder, part, AtFlags::empty())?)
            }
            Ok(_) => Err(Errno::ACCESS.into()),
            Err(error) => Err(error.into()),
        },
        Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Permissions hold for everybody but root: in a thread that is nobody there.
    fn as_nobody(root: &Path, act: impl FnOnce() + Send) {
        std::os::unix::fs::chown(root, Some(65534), None).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: changes how this thread is seen by file systems, and nothing else.
                unsafe { libc::setfsuid(65534) };
                act();
            });
        });
    }

    #[test]
    fn a_part_that_has_its_permissions_and_no_name_is_taken_up() {
        let root = std::env::temp_dir().join(format!("netvm-undressed-{}", std::process::id()));
        std::fs::create_dir(&root).unwrap();
        let of_root = std::fs::metadata(&root).unwrap().uid() == 0;
        let check = || {
            for mode in [0o400, 0o444, 0o000] {
                let mut folder = Folder::open(&root).unwrap();
                let entry = Entry { folder: false, mode, changed: (1, 0), bytes: 8, name: b"file".to_vec() };
                let mut part = folder.open_part(&entry.name, true).unwrap();
                part.write_all(b"complete").unwrap();
                // As its receiver dies here.
                dress(&part, &entry).unwrap();
                if mode != 0 {
                    let busy = folder.open_part(&entry.name, true).unwrap_err();
                    assert_eq!(busy.kind(), io::ErrorKind::WouldBlock);
                }
                drop(part);
                let part = folder.open_part(&entry.name, true).unwrap();
                let kept = part.metadata().unwrap();
                assert_eq!(
                    (kept.len(), kept.mode() & 0o777),
                    (if mode == 0 { 0 } else { 8 }, 0o600),
                    "{mode:o}"
                );
                // Nor does a name that is taken keep the next one from it.
                std::fs::write(root.join("file"), "other").unwrap();
                let taken = folder.finish(&part, &entry, false).unwrap_err();
                assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
                assert_eq!(part.metadata().unwrap().mode() & 0o777, 0o600);
                folder.finish(&part, &entry, true).unwrap();
                let finished = std::fs::metadata(root.join("file")).unwrap();
                assert_eq!(finished.permissions().mode() & 0o777, u32::from(mode));
                std::fs::remove_file(root.join("file")).unwrap();
            }
        };
        if of_root {
            as_nobody(&root, check)
        } else {
            check()
        }
        std::fs::remove_dir_all(&root).unwrap();
    }
}
