//! What a program wanted last time, brought in before it wants it again: docs/design/learn.md.

use super::engine::Engine;
use super::window::ROOM_FRAMES;
use crate::error::{Error, Result};
use netvm_core::residency::{Ahead, PageState, Replay, Whereabouts};
use netvm_sys::uffd::Fault;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const MAGIC: [u8; 8] = *b"netvmlr1";
/// Faults in a file, at most: 32 MiB.
const FILE_MAX: usize = 1 << 23;

/// The record of this process, and where it is kept.
#[derive(Debug)]
pub(super) struct Learn {
    pub(super) replay: Replay,
    /// `None` in the children of forks: the record is that of the first process.
    file: Option<PathBuf>,
    /// Whether anything comes ahead.
    follows: bool,
    /// What comes next: mapped first, then fetched.
    next: Vec<u32>,
}

impl Learn {
    /// With the record in `file`, if one is named and there, of pages below `pages`; nothing comes ahead unless it `follows`.
    ///
    /// # Errors
    /// [`Error::Other`] when the file is no record or cannot be read.
    pub(super) fn new(file: Option<&Path>, pages: usize, follows: bool) -> Result<Self> {
        let mut replay = Replay::new();
        if let Some(mut record) = file.map(load).transpose()?.flatten() {
            record.retain(|&page| (page as usize) < pages);
            replay.load(record.into_iter());
        }
        Ok(Self { replay, file: file.map(Path::to_owned), follows, next: Vec::with_capacity(64) })
    }

    /// After fork(2), in the child: it follows the record, and keeps none.
    pub(super) fn forked(&mut self) {
        self.file = None;
    }

    /// Writes the record of this run.
    ///
    /// # Errors
    /// [`Error::Other`] with a sentence.
    pub(super) fn keep(&self) -> Result<()> {
        let Some(named) = &self.file else { return Ok(()) };
        let failed = |error| Error::Other(format!("cannot write the record {}: {error}", named.display()));
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.replay.pages().into_iter().take(FILE_MAX).flat_map(u32::to_le_bytes));
        // A link stays one.
        let file = fs::canonicalize(named).unwrap_or_else(|_| named.clone());
        if fs::metadata(&file).is_ok_and(|there| !there.is_file()) {
            // A file must not take the place of a device such as /dev/null.
            return fs::OpenOptions::new()
                .write(true)
                .open(&file)
                .and_then(|mut it| it.write_all(&bytes))
                .map_err(failed);
        }
        let part = part_of(&file);
        fs::write(&part, bytes).and_then(|()| fs::rename(&part, &file)).map_err(|error| {
            let _ = fs::remove_file(&part);
            failed(error)
        })
    }
}

/// Where this process writes a record before it takes the place of the one of the run before.
fn part_of(file: &Path) -> PathBuf {
    let mut part = file.to_owned().into_os_string();
    part.push(format!(".{}.part", std::process::id()));
    part.into()
}

/// Whether `file` can be the record of a program, as far as that can be told before it has run: one that is not there can, where files can be made.
///
/// # Errors
/// [`Error::Other`] with a sentence.
pub fn check_record(file: &Path) -> Result<()> {
    if file.file_name().is_none() {
        return Err(Error::Other(format!("cannot keep a record in {file:?}: name a file")));
    }
    load(file)?;
    let part = part_of(&fs::canonicalize(file).unwrap_or_else(|_| file.to_owned()));
    match fs::OpenOptions::new().write(true).create_new(true).open(&part) {
        Ok(_) => drop(fs::remove_file(&part)),
        Err(error) => {
            return Err(Error::Other(format!("cannot keep a record in {}: {error}", file.display())));
        }
    }
    Ok(())
}

/// The pages that a record names, in the order of their faults.
///
/// # Errors
/// [`Error::Other`] with a sentence, also when there is no such file.
pub fn read_record(file: &Path) -> Result<Vec<u32>> {
    load(file)?.ok_or_else(|| Error::Other(format!("there is no record in {}", file.display())))
}

/// The pages of a record; `None` when there is no such file.
fn load(file: &Path) -> Result<Option<Vec<u32>>> {
    let failed = |why: &str| Error::Other(format!("cannot use {} as a record: {why}", file.display()));
    let open = match fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(file) {
        Ok(open) => open,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(&error.to_string())),
    };
    if !open.metadata().is_ok_and(|metadata| metadata.is_file()) {
        return Err(failed("it is no ordinary file; name another one"));
    }
    let most = MAGIC.len() + 4 * FILE_MAX;
    let mut bytes = Vec::new();
    open.take(most as u64 + 1).read_to_end(&mut bytes).map_err(|error| failed(&error.to_string()))?;
    match bytes.strip_prefix(&MAGIC) {
        Some(pages) if bytes.len() <= most && pages.len().is_multiple_of(4) => {
            Ok(Some(pages.as_chunks().0.iter().map(|page| u32::from_le_bytes(*page)).collect()))
        }
        _ if bytes.is_empty() => Ok(None),
        _ => Err(failed("it is none of this netvm's; name another file, or remove it")),
    }
}

impl Engine {
    /// Notes that a page was wanted which has contents elsewhere, and looks up what was wanted after it before: nothing, in a stream, which knows better. Returns
    /// how many of these pages are to be mapped with it.
    pub(super) fn follow(&mut self, fault: Fault, page: u32, ahead: Ahead) -> usize {
        let follows = self.learn.follows;
        if self.is_retrying || !(follows || self.learn.file.is_some()) {
            self.learn.next.clear();
            return 0;
        }
        let is_alone = follows && ahead.map == 1 && ahead.stride.is_none() && self.has_room_for_units();
        // Never at the expense of pages in use, as with streams.
        let ready = (self.free.len() + self.cached.len()).saturating_sub(ROOM_FRAMES);
        let room = if is_alone { ready / 2 / self.unit as usize } else { 0 };
        let table = &self.table;
        let whereabouts = |page: u32| match table.get(page).state() {
            PageState::Mapped => Whereabouts::Here,
            PageState::Untouched | PageState::Writing => Whereabouts::Nowhere,
            PageState::Fetching => Whereabouts::Coming,
            PageState::Cached | PageState::Remote | PageState::Packed | PageState::Filled => {
                Whereabouts::Away
            }
        };
        let Learn { replay, next, .. } = &mut self.learn;
        replay.fault(page, fault.thread, room, whereabouts, next)
    }

    /// Maps the first `map` pages of what is expected after a fault: before the page of the fault itself, whose arrival wakes the thread.
    pub(super) fn bring_what_follows(&mut self, map: usize) -> Result<()> {
        self.has_strides |= map > 0;
        let mut index = 0;
        while index < map {
            let pages = self.unit_of(self.learn.next[index]);
            let (first, mut end) = (pages.start, pages.end);
            index += 1;
            // Neighbours in order come as a run.
            while index < map && self.learn.next[index] == end {
                (end, index) = (end + self.unit, index + 1);
            }
            if self.has_room_beside(end - first) {
                self.bring_in(first, end - first)?;
            }
        }
        Ok(())
    }

    /// Fetches what is expected behind those.
    pub(super) fn fetch_what_follows(&mut self, map: usize) -> Result<()> {
        for index in map..self.learn.next.len() {
            if self.has_room_beside(self.unit) {
                self.fetch_ahead(self.unit_of(self.learn.next[index]))?;
            }
        }
        Ok(())
    }

    /// The pages that come with one.
    pub(super) fn unit_of(&self, page: u32) -> std::ops::Range<u32> {
        let first = page - page % self.unit;
        first..first.saturating_add(self.unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learn(file: &Path, pages: usize) -> Result<Learn> {
        Learn::new(Some(file), pages, true)
    }

    #[test]
    fn a_record_is_kept_and_anything_else_is_refused() {
        let file = std::env::temp_dir().join(format!("netvm-learn-{}", std::process::id()));
        let _ = fs::remove_file(&file);
        let mut kept = learn(&file, 1000).unwrap();
        for page in [5, 999, 7, 5] {
            kept.replay.fault(page, 1, 0, |_| Whereabouts::Away, &mut Vec::new());
        }
        kept.keep().unwrap();
        assert_eq!(load(&file).unwrap(), Some(vec![5, 999, 7, 5]));
        // Pages that this run does not have are left out.
        let mut again = learn(&file, 100).unwrap();
        let mut next = Vec::new();
        again.replay.fault(5, 1, 10, |_| Whereabouts::Away, &mut next);
        assert_eq!(next, [7], "not what is wanted already");
        assert_eq!(again.replay.pages(), [5], "its own");
        for (bytes, refused) in
            [(&b""[..], false), (b"netvmlr1", false), (b"netvmlr1xyz", true), (b"#!/bin/sh\n", true)]
        {
            fs::write(&file, bytes).unwrap();
            assert_eq!(learn(&file, 10).is_err(), refused, "{bytes:?}");
        }
        fs::write(&file, vec![b'x'; 9 << 20]).unwrap();
        assert!(learn(&file, 10).unwrap_err().to_string().contains("name another file"));
        fs::write(&file, b"").unwrap();
        // What is no file, or a link to one, stays what it is: here a pipe in place of a device.
        let link = file.with_extension("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        learn(&link, 10).unwrap().keep().unwrap();
        assert!(link.symlink_metadata().unwrap().is_symlink() && load(&file).unwrap() == Some(vec![]));
        fs::remove_file(&link).unwrap();
        fs::remove_file(&file).unwrap();
        let pipe = std::process::Command::new("mkfifo").arg(&file).status().unwrap();
        assert!(pipe.success());
        let reader = fs::OpenOptions::new().read(true).write(true).open(&file).unwrap();
        let piped =
            Learn { file: Some(file.clone()), ..learn(Path::new("/nonexistent/record"), 10).unwrap() };
        piped.keep().unwrap();
        drop(reader);
        assert!(!fs::metadata(&file).unwrap().is_file());
        fs::remove_file(&file).unwrap();
        assert!(check_record(&file).is_ok() && !file.exists() && !part_of(&file).exists());
        // The kernel makes no files there, whoever asks.
        let error = check_record(Path::new("/proc/self/record")).unwrap_err().to_string();
        assert!(error.contains("cannot keep a record in /proc/self/record"), "{error}");
        let nowhere = learn(Path::new("/nonexistent/record"), 10).unwrap();
        assert!(nowhere.keep().unwrap_err().to_string().contains("/nonexistent/record"));
    }
}
