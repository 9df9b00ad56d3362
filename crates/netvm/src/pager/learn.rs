//! What a program wanted last time, brought in before it wants it again: docs/design/learn.md.

use super::engine::Engine;
use super::error::system;
use crate::error::{Error, Result};
use netvm_core::residency::{Index, PageState, RECORD_MAX, Replay};
use netvm_sys::table::LazyTable;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const MAGIC: [u8; 8] = *b"netvmlr1";

/// Where each page is in the record: 8 bytes for each page that was ever wanted.
#[derive(Debug)]
struct Places(LazyTable);

impl Index for Places {
    fn get(&self, page: u32) -> u64 {
        self.0.get(page as usize)
    }

    fn set(&mut self, page: u32, place: u64) {
        self.0.set(page as usize, place);
    }
}

/// The record of this process, and where it is kept.
#[derive(Debug)]
pub(super) struct Learn {
    replay: Replay,
    places: Places,
    /// `None` in the children of forks: the record is that of the first process.
    file: Option<PathBuf>,
    /// What `Replay::fault` asked for last.
    next: Vec<u32>,
}

impl Learn {
    /// With the record in `file`, if there is one, of pages below `pages`.
    ///
    /// # Errors
    /// [`Error::Other`] when the file is no record or cannot be read; [`Error::System`] when there are no addresses for the index.
    pub(super) fn new(file: &Path, pages: usize) -> Result<Self> {
        let mut places =
            Places(LazyTable::new(pages).map_err(|e| system("reserve the index of the record", e))?);
        let mut replay = Replay::new();
        if let Some(record) = load(file)? {
            replay.load(record.into_iter().filter(|&page| (page as usize) < pages), &mut places);
        }
        Ok(Self { replay, places, file: Some(file.to_owned()), next: Vec::with_capacity(64) })
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
        bytes.extend(self.replay.pages().flat_map(u32::to_le_bytes));
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

    /// Pages that were asked for, and those that were wanted then.
    pub(super) fn usefulness(&self) -> (u64, u64) {
        self.replay.usefulness()
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
    let most = MAGIC.len() + 4 * RECORD_MAX;
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
    /// A page that has contents elsewhere was wanted: what was wanted after it last time is brought in, as far as there is room.
    pub(super) fn bring_what_followed(&mut self, page: u32) -> Result<()> {
        let Some(mut learn) = self.learn.take() else { return Ok(()) };
        // Never at the expense of pages in use, as with streams.
        let mut room = (self.free.len() + self.cached.len()) / 2;
        let Learn { replay, places, next, .. } = &mut learn;
        next.clear();
        replay.fault(page, places, |page| {
            next.push(page);
            room = room.saturating_sub(1);
            room > 0
        });
        let brought = next.iter().try_for_each(|&page| {
            if self.table.get(page).state() == PageState::Remote {
                let started = self.fetch_run(page..page + 1, false)?;
                self.stats.prefetched += u64::from(started);
            }
            Ok(())
        });
        self.learn = Some(learn);
        brought
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_kept_and_anything_else_is_refused() {
        let file = std::env::temp_dir().join(format!("netvm-learn-{}", std::process::id()));
        let _ = fs::remove_file(&file);
        let mut learn = Learn::new(&file, 1000).unwrap();
        for page in [5, 999, 7, 5] {
            learn.replay.fault(page, &mut learn.places, |_| true);
        }
        learn.keep().unwrap();
        assert_eq!(load(&file).unwrap(), Some(vec![5, 999, 7, 5]));
        // Pages that this run does not have are left out.
        let mut again = Learn::new(&file, 100).unwrap();
        let mut next = Vec::new();
        again.replay.fault(5, &mut again.places, |page| {
            next.push(page);
            true
        });
        assert_eq!(next, [7, 5]);
        assert_eq!(again.replay.pages().collect::<Vec<_>>(), [5], "its own");
        for (bytes, refused) in
            [(&b""[..], false), (b"netvmlr1", false), (b"netvmlr1xyz", true), (b"#!/bin/sh\n", true)]
        {
            fs::write(&file, bytes).unwrap();
            assert_eq!(Learn::new(&file, 10).is_err(), refused, "{bytes:?}");
        }
        fs::write(&file, vec![b'x'; 9 << 20]).unwrap();
        assert!(Learn::new(&file, 10).unwrap_err().to_string().contains("name another file"));
        fs::write(&file, b"").unwrap();
        // What is no file, or a link to one, stays what it is: here a pipe in place of a device.
        let link = file.with_extension("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        Learn::new(&link, 10).unwrap().keep().unwrap();
        assert!(link.symlink_metadata().unwrap().is_symlink() && load(&file).unwrap() == Some(vec![]));
        fs::remove_file(&link).unwrap();
        fs::remove_file(&file).unwrap();
        let pipe = std::process::Command::new("mkfifo").arg(&file).status().unwrap();
        assert!(pipe.success());
        let reader = fs::OpenOptions::new().read(true).write(true).open(&file).unwrap();
        let learn =
            Learn { file: Some(file.clone()), ..Learn::new(Path::new("/nonexistent/record"), 10).unwrap() };
        learn.keep().unwrap();
        drop(reader);
        assert!(!fs::metadata(&file).unwrap().is_file());
        fs::remove_file(&file).unwrap();
        assert!(check_record(&file).is_ok() && !file.exists() && !part_of(&file).exists());
        // The kernel makes no files there, whoever asks.
        let error = check_record(Path::new("/proc/self/record")).unwrap_err().to_string();
        assert!(error.contains("cannot keep a record in /proc/self/record"), "{error}");
        let nowhere = Learn::new(Path::new("/nonexistent/record"), 10).unwrap();
        assert!(nowhere.keep().unwrap_err().to_string().contains("/nonexistent/record"));
    }
}
