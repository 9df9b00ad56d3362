//! The side that has the files.

use std::collections::HashMap;
use std::fs::{File, Metadata, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use netvm_core::key::RemoteKey;
use netvm_core::wire::{Hello, Role};

use super::device;
use super::digest::Digest;
use super::frames::{
    CHUNK_BYTES, ENTRIES_MAX, Entry, Frame, LANES_MAX, NAMES_BYTES_MAX, Plan, Totals, check_name,
    is_part_name, printable,
};
use super::lanes::{self, SendLane};
use super::onesided::{self, Way, Writing};
use super::source::{Pouring, Source};
use super::wire::Wire;
use super::{
    FEATURE_LANE, FEATURE_LANES, FEATURE_ONE_SIDED, FEATURE_SIMPLE, Framing, Method, Observer, Progress,
    SendOptions, Summary, about, extents,
};
use crate::error::{Error, Result};
use crate::link::greeting;

/// Sends files, and folders with all that is in them, to a [`Receiver`](super::Receiver) at `address`. Each arrives under the last part
/// of its path.
///
/// # Errors
/// [`Error::Cut`] when the connection ended: the same call goes on where it did. Otherwise a sentence about the first file that
/// could not be sent or received; what was complete before stays there.
pub fn send(
    paths: &[PathBuf],
    address: &str,
    options: &SendOptions,
    observer: Observer<'_>,
) -> Result<Summary> {
    options.method.check(&options.security)?;
    let gathered = Gathered::of(paths)?;
    let simple = options.framing == Framing::Simple;
    if let Some((_, path)) = gathered.entries.iter().find(|(entry, _)| simple && entry.folder) {
        let why = "the simple framing has no names and no folders";
        return Err(Error::Other(format!("cannot send {}: {why}", path.display())));
    }
    let features = match (options.framing, options.method.is_one_sided()) {
        (Framing::Simple, true) => {
            let error =
                "the simple framing tells the receiver nothing of one-sided writes; use another method";
            return Err(Error::Other(error.to_owned()));
        }
        (Framing::Simple, false) => FEATURE_SIMPLE,
        (Framing::Full, true) => FEATURE_ONE_SIDED,
        (Framing::Full, false) => 0,
    };
    if options.streams.is_some_and(|streams| !(1..=LANES_MAX).contains(&streams)) {
        return Err(Error::Other(format!("a file is sent over 1 to {LANES_MAX} connections")));
    }
    if options.streams.is_some_and(|streams| streams > 1) && (simple || options.method.is_one_sided()) {
        let error = "only the default framing, and methods that are not one-sided, use several connections";
        return Err(Error::Other(error.to_owned()));
    }
    if options.method == Method::Device {
        crate::device::check_module()?;
    }
    let streams = options.streams.unwrap_or(1);
    let features = features | if streams > 1 { FEATURE_LANES } else { 0 };
    let hello = Hello { features, ..Hello::new(Role::Transfer) };
    let connected = greeting::connect(address, &hello, options.connect_timeout, &options.security);
    let (transport, theirs) = connected.map_err(|error| match error {
        Error::Connect { lender, reason } => Error::Other(format!(
            "cannot connect to {lender}: {reason}; does `netvm recv DIR --listen` wait there?"
        )),
        other => other,
    })?;
    if theirs.role != Role::Transfer {
        return Err(Error::NotNetvm { lender: address.to_owned() });
    }
    let reached = transport.stream().reached();
    let mut wire = Wire::new(transport, address.to_owned(), !simple)?;
    if options.method == Method::Sendfile && !wire.is_plain() {
        let error = "the kernel cannot encrypt what it moves by itself; use the method copy or mmap";
        return Err(Error::Other(error.to_owned()));
    }
    let begun = Instant::now();
    let mut sender = Sender {
        summary: Summary { left_out: gathered.left_out, protection: wire.protection(), ..Summary::default() },
        progress: Progress { total_bytes: gathered.bytes(), ..Progress::default() },
        wire: &mut wire,
        address: reached.as_deref().unwrap_or(address),
        remote: None,
        lanes: Vec::new(),
        streams,
        options,
        observer,
        pouring: Pouring::new(options.method),
        within_chunk: false,
    };
    let result = if simple { sender.send_simple(&gathered) } else { sender.send_all(&gathered) };
    let (mut summary, within_chunk) = (sender.summary, sender.within_chunk);
    summary.streams = sender.lanes.len().max(1);
    if let Err(error) = result {
        wire.fail(&error, !within_chunk);
        return Err(error);
    }
    summary.elapsed = begun.elapsed();
    Ok(summary)
}

/// What is to be sent.
#[derive(Default)]
struct Gathered {
    entries: Vec<(Entry, PathBuf)>,
    names_bytes: usize,
    left_out: u64,
}

impl Gathered {
    fn of(paths: &[PathBuf]) -> Result<Self> {
        let mut gathered = Self::default();
        let mut firsts: HashMap<Vec<u8>, &Path> = HashMap::new();
        for path in paths {
            let failed = |error| about("send", path.display(), &error);
            // `.` and `..` have names, too.
            let named = if path.file_name().is_some() {
                path.clone()
            } else {
                path.canonicalize().map_err(failed)?
            };
            let Some(name) = named.file_name().map(|name| name.as_bytes().to_vec()) else {
                return Err(Error::Other(format!("cannot send {}: it has no name", path.display())));
            };
            if let Some(other) = firsts.insert(name.clone(), path) {
                let (one, two) = (other.display(), path.display());
                return Err(Error::Other(format!(
                    "cannot send {one} and {two} together: they have the same name"
                )));
            }
            // What is named is sent, also through a link.
            let metadata = path.metadata().map_err(failed)?;
            if !metadata.is_dir() && !metadata.is_file() {
                return Err(Error::Other(format!(
                    "cannot send {}: it is neither a file nor a folder",
                    path.display()
                )));
            }
            gathered.add(name, path.clone(), &metadata)?;
        }
        Ok(gathered)
    }

    fn add(&mut self, name: Vec<u8>, path: PathBuf, metadata: &Metadata) -> Result<()> {
        let mut waiting = vec![(name, path, metadata.clone())];
        while let Some((name, path, metadata)) = waiting.pop() {
            check_name(&name)
                .map_err(|wrong| Error::Other(format!("cannot send {}: it has {wrong}", path.display())))?;
            self.names_bytes += name.len();
            if self.entries.len() == ENTRIES_MAX || self.names_bytes > NAMES_BYTES_MAX {
                return Err(Error::Other(
                    "these are too many files for one transfer; send them in parts".to_owned(),
                ));
            }
            if metadata.is_dir() {
                let failed = |error| about("send", path.display(), &error);
                let mut below = Vec::new();
                for entry in path.read_dir().map_err(failed)? {
                    let entry = entry.map_err(failed)?;
                    let metadata =
                        entry.metadata().map_err(|error| about("send", entry.path().display(), &error))?;
                    if !metadata.is_dir() && !metadata.is_file() || is_part_name(entry.file_name().as_bytes())
                    {
                        self.left_out += 1;
                        continue;
                    }
                    below.push((
                        [&name, &b"/"[..], entry.file_name().as_bytes()].concat(),
                        entry.path(),
                        metadata,
                    ));
                }
                // The same order every time; the first one is taken first.
                below.sort_by(|one, other| other.0.cmp(&one.0));
                waiting.extend(below);
            }
            self.entries.push((entry_of(name, &metadata), path));
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.entries.iter().map(|(entry, _)| entry.bytes).fold(0, u64::saturating_add)
    }

    fn files(&self) -> impl Iterator<Item = (usize, &Entry, &Path)> {
        let entries = self.entries.iter().enumerate();
        entries
            .filter(|(_, (entry, _))| !entry.folder)
            .map(|(index, (entry, path))| (index, entry, path.as_path()))
    }
}

fn entry_of(name: Vec<u8>, metadata: &Metadata) -> Entry {
    Entry {
        folder: metadata.is_dir(),
        mode: (metadata.mode() & 0o777) as u16,
        changed: (metadata.mtime(), metadata.mtime_nsec() as u32),
        bytes: if metadata.is_dir() { 0 } else { metadata.len() },
        name,
    }
}

struct Sender<'a> {
    wire: &'a mut Wire,
    address: &'a str,
    /// Connected when the first file is written one-sidedly.
    remote: Option<onesided::Source>,
    /// Connected when the first long file is sent; none where `streams` is 1.
    lanes: Vec<SendLane>,
    streams: usize,
    options: &'a SendOptions,
    observer: Observer<'a>,
    progress: Progress,
    summary: Summary,
    pouring: Pouring,
    /// Bytes of a file are owed: nothing else can be said.
    within_chunk: bool,
}

impl Sender<'_> {
    fn send_all(&mut self, gathered: &Gathered) -> Result<()> {
        for (entry, _) in &gathered.entries {
            self.wire.queue(&Frame::Entry(entry.clone()))?;
        }
        let (entries, check) = (gathered.entries.len() as u64, self.options.check);
        self.wire.queue(&Frame::Listed { entries, check })?;
        self.wire.flush()?;
        let mut plans = Vec::new();
        for _ in gathered.files() {
            match self.wire.receive()? {
                Frame::Plan(plan) => plans.push(plan),
                _ => return Err(self.wire.wrong("a message out of turn")),
            }
        }
        for ((index, entry, path), plan) in gathered.files().zip(plans) {
            self.progress.name = entry.to_string();
            (self.observer)(&self.progress);
            self.send_planned(index as u64, entry, path, plan)?;
        }
        let Summary { files: sent, there, kept, .. } = self.summary;
        let totals = Totals { sent, there, kept };
        self.wire.queue(&Frame::Done(totals))?;
        self.wire.flush()?;
        if self.wire.receive_done()? != totals {
            return Err(self.wire.wrong("it has counted other files"));
        }
        self.summary.checked = check;
        Ok(())
    }

    fn send_planned(&mut self, index: u64, entry: &Entry, path: &Path, plan: Plan) -> Result<()> {
        let (have, digest) = match plan {
            Plan::Keep => {
                self.summary.kept += 1;
                self.progress.done_bytes += entry.bytes;
                return Ok(());
            }
            Plan::There { digest, .. } => (entry.bytes, digest),
            Plan::Send { have, digest } => (have, digest),
        };
        let file = open(path, entry)?;
        let same = if have > 0 || matches!(plan, Plan::There { .. }) {
            let wire = &mut *self.wire;
            extents::digest(&file, have, &mut || wire.working())? == Some(digest)
        } else {
            true
        };
        let from = match plan {
            Plan::There { replace, .. } => {
                if same || !replace {
                    *if same { &mut self.summary.there } else { &mut self.summary.kept } += 1;
                    self.progress.done_bytes += entry.bytes;
                    return Ok(());
                }
                0
            }
            _ if same => have,
            _ => 0,
        };
        let is_remote = self.options.method.is_one_sided() && entry.bytes - from >= onesided::BYTES_MIN;
        self.progress.done_bytes += from;
        let is_long = entry.bytes - from >= lanes::BYTES_MIN;
        let digest = if is_remote {
            self.wire.queue(&Frame::Remote { index, from })?;
            self.write_file(&file, entry, path, from)?
        } else if is_long && self.open_lanes()? {
            self.wire.queue(&Frame::Striped { index, from })?;
            let source = Source::new(&file, path, self.options.method, entry.bytes)?;
            self.send_striped(&source, entry, from)?
        } else {
            self.wire.queue(&Frame::File { index, from })?;
            self.send_file(&file, entry, path, from)?
        };
        let changed = file.metadata().map(|now| entry_of(Vec::new(), &now).changed);
        if !changed.is_ok_and(|changed| changed == entry.changed) {
            return Err(Error::Other(format!(
                "{} was changed while it was sent; send it again",
                path.display()
            )));
        }
        self.wire.queue(&Frame::End { digest })?;
        self.summary.files += 1;
        self.summary.bytes += entry.bytes;
        Ok(())
    }

    /// Sends what a file holds from `from` on; returns the digest of that.
    fn send_file(&mut self, file: &File, entry: &Entry, path: &Path, from: u64) -> Result<u64> {
        let failed = |error| about("read", path.display(), &error);
        let source = Source::new(file, path, self.options.method, entry.bytes)?;
        let mut digest = self.options.check.then(Digest::new);
        let mut at = from;
        while let Some((start, stop)) = extents::next(file, at, entry.bytes).map_err(failed)? {
            self.progress.done_bytes += start - at;
            at = start;
            while at < stop {
                let bytes = (stop - at).min(CHUNK_BYTES);
                self.wire.queue(&Frame::Data { offset: at, bytes })?;
                self.send_range(&source, (at, bytes), digest.as_mut())?;
                at += bytes;
            }
        }
        self.progress.done_bytes += entry.bytes - at;
        Ok(digest.map_or(0, |digest| digest.finish(entry.bytes)))
    }

    /// The same, one-sidedly.
    fn write_file(&mut self, file: &File, entry: &Entry, path: &Path, from: u64) -> Result<u64> {
        let failed = |error| about("read", path.display(), &error);
        self.wire.flush()?;
        let Frame::Into { key } = self.wire.receive()? else {
            return Err(self.wire.wrong("a message out of turn"));
        };
        let mut writing = self.write_into(&RemoteKey::from_bytes(key), file, entry.bytes)?;
        self.summary.link = writing.link();
        let (mut digest, mut at) = (Digest::new(), from);
        let mut range = extents::next(file, at, entry.bytes).map_err(failed)?;
        loop {
            while let Some((start, stop)) = range.filter(|_| writing.has_room()) {
                let start = start.max(at);
                let bytes = (stop - start).min(CHUNK_BYTES);
                self.progress.done_bytes += start - at;
                at = start + bytes;
                self.wire.queue(&Frame::Data { offset: start, bytes })?;
                writing.announce(start, bytes);
                if at == stop {
                    range = extents::next(file, at, entry.bytes).map_err(failed)?;
                }
            }
            self.wire.flush()?;
            let frame = match (writing.waits_for_receiver(), writing.is_writing()) {
                (false, false) => break,
                (true, false) => Some(self.wire.receive()?),
                _ => self.wire.receive_now()?,
            };
            match frame {
                Some(Frame::Ready { end }) => {
                    let (offset, piece) = writing.ready(end).map_err(|error| self.wire.why(error))?;
                    if self.options.check {
                        onesided::update(&mut digest, offset, piece, self.pouring.buffer()).ok_or_else(
                            || Error::Other(format!("{} became shorter while it was sent", path.display())),
                        )?;
                    }
                }
                Some(_) => return Err(self.wire.wrong("a message out of turn")),
                None => {
                    if let Some((end, bytes)) = writing.wrote(true).map_err(|error| self.wire.why(error))? {
                        self.wire.queue(&Frame::Wrote { end })?;
                        self.summary.moved_bytes += bytes;
                        self.progress.done_bytes += bytes;
                        (self.observer)(&self.progress);
                    }
                }
            }
            while let Some((end, bytes)) = writing.wrote(false).map_err(|error| self.wire.why(error))? {
                self.wire.queue(&Frame::Wrote { end })?;
                self.summary.moved_bytes += bytes;
                self.progress.done_bytes += bytes;
                (self.observer)(&self.progress);
            }
        }
        self.progress.done_bytes += entry.bytes - at;
        Ok(if self.options.check { digest.finish(entry.bytes) } else { 0 })
    }

    fn write_into(&mut self, key: &RemoteKey, file: &File, bytes: u64) -> Result<Writing> {
        let security = &self.options.security;
        if self.options.method == Method::Device {
            let opened = device::Outgoing::open(self.address, security, key, bytes)?;
            return Writing::new(file, Way::Device(opened));
        }
        let source = match self.remote.take() {
            Some(source) => source,
            None => onesided::Source::connect(self.address, security, self.options.link)?,
        };
        let opened = source.open(key, file, bytes);
        self.remote = Some(source);
        opened
    }

    /// Sends bytes that the receiver has been told of.
    fn send_range(
        &mut self,
        source: &Source<'_>,
        range: (u64, u64),
        digest: Option<&mut Digest>,
    ) -> Result<()> {
        self.within_chunk = true;
        let (summary, progress, observer) = (&mut self.summary, &mut self.progress, &mut self.observer);
        self.pouring.send(self.wire, source, range, digest, &mut |bytes| {
            summary.moved_bytes += bytes;
            progress.done_bytes += bytes;
            observer(progress);
        })?;
        self.within_chunk = false;
        Ok(())
    }

    /// Sends what a file holds from `from` on over several connections; returns the sum of the digests of its pieces.
    fn send_striped(&mut self, source: &Source<'_>, entry: &Entry, from: u64) -> Result<u64> {
        self.wire.flush()?;
        let (check, before) = (self.options.check, self.progress.done_bytes);
        let (progress, observer) = (&mut self.progress, &mut self.observer);
        let range = (from, entry.bytes);
        let (sum, moved) = lanes::send(&mut self.lanes, self.wire, source, range, check, &mut |bytes| {
            progress.done_bytes = before + bytes;
            observer(progress);
        })?;
        self.summary.moved_bytes += moved;
        // Holes, too.
        self.progress.done_bytes = before + (entry.bytes - from);
        (self.observer)(&self.progress);
        Ok(sum)
    }

    /// More connections to the same receiver, if they are wanted and there are none yet; whether there are some.
    fn open_lanes(&mut self) -> Result<bool> {
        if self.streams < 2 || !self.lanes.is_empty() {
            return Ok(self.streams >= 2);
        }
        self.wire.queue(&Frame::Lanes { count: self.streams as u64 })?;
        self.wire.flush()?;
        let Frame::Join { token } = self.wire.receive()? else {
            return Err(self.wire.wrong("a message out of turn"));
        };
        let hello = Hello { features: FEATURE_LANE, ..Hello::new(Role::Transfer) };
        let options = self.options;
        for _ in 0..self.streams {
            let connected =
                greeting::connect(self.address, &hello, options.connect_timeout, &options.security);
            let (transport, _) = connected.map_err(|error| self.wire.why(error))?;
            let mut wire = Wire::new(transport, self.wire.peer.clone(), true)?;
            wire.queue(&Frame::Join { token })?;
            wire.flush()?;
            self.lanes.push(SendLane { wire, pouring: Pouring::new(options.method) });
        }
        Ok(true)
    }

    /// Lengths and bytes; the end of the stream is the end.
    fn send_simple(&mut self, gathered: &Gathered) -> Result<()> {
        for (_, entry, path) in gathered.files() {
            self.progress.name = entry.to_string();
            let file = open(path, entry)?;
            let source = Source::new(&file, path, self.options.method, entry.bytes)?;
            self.wire.bytes(&entry.bytes.to_be_bytes())?;
            self.send_range(&source, (0, entry.bytes), None)?;
            self.summary.files += 1;
            self.summary.bytes += entry.bytes;
        }
        self.wire.flush()?;
        self.wire.end_sending();
        // It closes when it has everything; a reset would be an error.
        match self.wire.receive_first()? {
            None => Ok(()),
            Some(_) => Err(self.wire.wrong("an answer where there is none")),
        }
    }
}

/// Opens a file that is still the one that was listed.
fn open(path: &Path, entry: &Entry) -> Result<File> {
    let failed = |error| about("open", path.display(), &error);
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let now = entry_of(Vec::new(), &metadata);
    if !metadata.is_file() || (now.bytes, now.changed) != (entry.bytes, entry.changed) {
        let name = printable(path.as_os_str().as_bytes());
        return Err(Error::Other(format!("{name} was changed since the transfer began; send it again")));
    }
    Ok(file)
}
