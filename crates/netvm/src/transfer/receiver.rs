//! The side that gets the files.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::time::{Duration, Instant};

use netvm_core::wire::{Refusal, Role};
use netvm_sys::mapping::Mapping;
use netvm_sys::net::{Address, Listener};

use super::digest::Digest;
use super::folder::{self, Folder, Found};
use super::frames::{CHUNK_BYTES, Course, Entry, FILE_BYTES_MAX, Frame, List, Plan, Totals};
use super::lanes::{self, Came, TakeLane};
use super::onesided::{self, Target};
use super::pieces;
use super::sink::{self, Into, Sink, became_shorter};
use super::wire::Wire;
use super::{
    FEATURE_LANE, FEATURE_LANES, FEATURE_ONE_SIDED, FEATURE_SIMPLE, Framing, Method, Observer, Progress,
    ReceiveOptions, Summary, about, extents,
};
use crate::error::{Error, Result};
use crate::link::greeting::{self, Arrival, Greeted, Greeting, Transport};
use crate::security::Security;

/// Most connections that have not said hello.
const GREETINGS_MAX: usize = 32;
/// Most files of a transfer that go on where they ended; usually it is one.
const RESUMED_MAX: usize = 16;
/// Fewer bytes than these are rather sent again.
const RESUMED_BYTES_MIN: u64 = CHUNK_BYTES;
/// For so long more connections of a sender are waited for.
const JOIN: Duration = Duration::from_secs(10);
/// and for what each of them has to say first.
const JOIN_EACH: Duration = Duration::from_secs(2);

/// Waits for a sender, and receives what it sends into a folder.
pub struct Receiver {
    listener: Listener,
    folder: Folder,
    shown: String,
    options: ReceiveOptions,
}

impl Receiver {
    /// Listens for a sender of files that are to be in `folder`, which must exist.
    ///
    /// # Errors
    /// [`Error::Listen`], also for a network address without a secret; [`Error::Other`] when the folder cannot be opened.
    pub fn bind(folder: &Path, options: ReceiveOptions) -> Result<Self> {
        if options.method.is_one_sided() {
            let error =
                "one-sided writes are the sender's choice: a receiver follows, whatever its own method";
            return Err(Error::Other(error.to_owned()));
        }
        options.method.check(&options.security)?;
        let shown = folder.display().to_string();
        let folder = Folder::open(folder).map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                Error::Other(format!("there is no folder {shown} to receive into: `mkdir {shown}` makes one"))
            }
            _ => about("receive into", &shown, &error),
        })?;
        let address: Address = options.listen.parse().map_err(|reason: &str| Error::Address {
            address: options.listen.clone(),
            reason: reason.to_owned(),
        })?;
        let listener =
            Listener::bind(&address).map_err(|error| Error::listen(address.to_string(), &error))?;
        // Names are resolved by now.
        options.security.check_listener(listener.address())?;
        Ok(Self { listener, folder, shown, options })
    }

    /// Where it listens, with the real port.
    pub fn address(&self) -> String {
        self.listener.address().to_string()
    }

    /// Waits for a sender and receives all that it sends. Those who cannot prove that they know the secret are not senders.
    ///
    /// # Errors
    /// [`Error::Cut`] when the sender went away before the end: what has come is kept, and the next transfer of the same files goes on there.
    /// Otherwise a sentence about what was wrong, which the sender has been told, too.
    pub fn run(self, observer: Observer<'_>) -> Result<Summary> {
        let (arrived, features) = self.wait(&mut *observer)?;
        let simple = features & FEATURE_SIMPLE != 0;
        let Self { listener, folder, shown, options } = self;
        // There is one sender; others are told so by the system, or find a node there. Who sends over several connections makes them later.
        let (target, listener) = match features & FEATURE_ONE_SIDED != 0 {
            true => (Some(Target::new(listener, &options.security)?), None),
            false => (None, (features & FEATURE_LANES != 0).then_some(listener)),
        };
        let wire = Wire::new(arrived, "the sender".to_owned(), !simple)?;
        let begun = Instant::now();
        let sink = match Sink::new(options.method, &wire, &shown) {
            Ok(sink) => sink,
            Err(error) => {
                wire.fail(&error, true);
                return Err(error);
            }
        };
        let summary = Summary { protection: wire.protection(), ..Summary::default() };
        let mut receiving = Receiving {
            target,
            listener,
            lanes: Vec::new(),
            sink,
            progress: Progress::default(),
            folder,
            shown,
            wire,
            options: &options,
            observer,
            summary,
        };
        let result = if simple { receiving.simple() } else { receiving.all() };
        let Receiving { wire, mut summary, lanes, .. } = receiving;
        summary.streams = lanes.len().max(1);
        // Whoever sends over one of them finds that out.
        drop(lanes);
        if let Err(error) = result {
            wire.fail(&error, true);
            return Err(error);
        }
        summary.elapsed = begun.elapsed();
        Ok(summary)
    }

    /// The first who may send, and the features it asks for.
    fn wait(&self, observer: Observer<'_>) -> Result<(Transport, u64)> {
        let mut found = None;
        arrivals(&self.listener, &self.options.security, None, &mut |came| {
            match came.and_then(|arrival| self.welcome(arrival)) {
                Ok(arrived) => {
                    found = Some(arrived);
                    return ControlFlow::Break(());
                }
                Err(why) => observer(&Progress { turned_away: Some(why), ..Progress::default() }),
            }
            ControlFlow::Continue(())
        })?;
        found.ok_or_else(|| Error::Other("no sender has come".to_owned()))
    }

    fn welcome(&self, arrival: Box<Arrival>) -> std::result::Result<(Transport, u64), &'static str> {
        let features = arrival.hello.features;
        let simple = features & FEATURE_SIMPLE != 0;
        let why = if arrival.hello.role != Role::Transfer {
            "it does not want to send files"
        } else if simple != (self.options.framing == Framing::Simple) {
            "it wants another framing"
        } else if features & FEATURE_LANE != 0 {
            "it belongs to a transfer that is over"
        } else {
            let transport = arrival.accept();
            return transport.map(|transport| (transport, features)).ok_or(greeting::UNENCRYPTED);
        };
        arrival.refuse(Refusal::Role);
        Err(why)
    }
}

/// Says hello to whoever connects, until `met` has enough or it is too late. It is told of those, too, who do not get so far, and why.
fn arrivals(
    listener: &Listener,
    security: &Security,
    deadline: Option<Instant>,
    met: &mut dyn FnMut(std::result::Result<Box<Arrival>, &'static str>) -> ControlFlow<()>,
) -> Result<()> {
    let mut greetings: Vec<Greeting> = Vec::new();
    loop {
        let now = Instant::now();
        let left = deadline.map(|deadline| deadline.saturating_duration_since(now));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(());
        }
        let mut fds: Vec<_> = std::iter::once(listener.as_fd())
            .chain(greetings.iter().map(Greeting::wait_fd))
            .map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 })
            .collect();
        let patience = (!greetings.is_empty()).then_some(Duration::from_millis(500));
        netvm_sys::thread::poll(&mut fds, patience.into_iter().chain(left).min())
            .map_err(|error| Error::system("wait for a sender", &error))?;
        let now = Instant::now();
        for greeting in std::mem::take(&mut greetings) {
            match greeting.progress(security) {
                Greeted::Waiting(greeting) if !greeting.is_late(now) => greetings.push(greeting),
                Greeted::Waiting(_) => drop(met(Err("it did not say in time who it is"))),
                Greeted::Gone(why) => drop(met(Err(why))),
                Greeted::Hello(arrival) => {
                    if met(Ok(arrival)).is_break() {
                        return Ok(());
                    }
                }
            }
        }
        match listener.accept() {
            Ok(Some(stream)) => {
                if greetings.len() == GREETINGS_MAX {
                    greetings.remove(0);
                }
                greetings.push(Greeting::new(stream, Role::Transfer));
            }
            Ok(None) => {}
            // No descriptor is left: somebody may close one.
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

struct Receiving<'a> {
    wire: Wire,
    folder: Folder,
    /// The target folder, for messages.
    shown: String,
    options: &'a ReceiveOptions,
    observer: Observer<'a>,
    progress: Progress,
    summary: Summary,
    sink: Sink,
    /// Where the sender writes one-sidedly, if it asked for that.
    target: Option<Target>,
    /// Where more connections of the sender come from otherwise,
    listener: Option<Listener>,
    /// and those that have come.
    lanes: Vec<TakeLane>,
}

/// A file that comes.
struct Coming {
    file: File,
    mapping: Option<Mapping>,
    /// The sender writes into it.
    remote: Option<onesided::Incoming>,
    digest: Digest,
    /// The end of what has come.
    at: u64,
}

impl Receiving<'_> {
    fn all(&mut self) -> Result<()> {
        let (list, check) = self.list()?;
        let (plans, mut held) = self.plan(&list)?;
        let mut made = Vec::new();
        for entry in list.entries.iter().filter(|entry| entry.folder) {
            let ours = self.folder.make(&entry.name).map_err(|error| self.failed("make", entry, &error))?;
            if ours || self.options.overwrite {
                made.push(entry);
            }
        }
        let mut course = Course::default();
        let mut coming: Option<(usize, Coming)> = None;
        let totals = loop {
            let frame = self.wire.receive();
            let done = frame.and_then(|frame| {
                self.step(frame, &list, &plans, check, &mut course, &mut held, &mut coming)
            });
            match done {
                Ok(None) => {}
                Ok(Some(totals)) => break totals,
                Err(error) => {
                    // What was mapped is as long as the file will be: only what has come is kept.
                    if let Some((_, coming)) = coming
                        && (coming.remote.is_none() || self.close_remote().is_ok())
                    {
                        let _ = coming.file.set_len(coming.at);
                    }
                    return Err(error);
                }
            }
        };
        // What is in a folder changes its time, and needs its permissions: the innermost comes first.
        for entry in made.into_iter().rev() {
            self.folder.dress(entry).map_err(|error| self.failed("set the permissions of", entry, &error))?;
        }
        self.summary.there = totals.there;
        self.summary.kept = totals.kept;
        self.summary.checked = check;
        if totals.sent != self.summary.files {
            return Err(self.wire.wrong("it has counted other files"));
        }
        self.wire.queue(&Frame::Done(totals))?;
        self.wire.flush()
    }

    /// What there will be, and whether digests come.
    fn list(&mut self) -> Result<(List, bool)> {
        let mut list = List::default();
        loop {
            match self.wire.receive()? {
                Frame::Entry(entry) => list.add(entry).map_err(|wrong| self.wire.wrong(wrong))?,
                Frame::Listed { entries, check } if entries == list.entries.len() as u64 => {
                    return Ok((list, check));
                }
                _ => return Err(self.wire.wrong("a message out of turn")),
            }
        }
    }

    /// What we want of each file; and the parts of files that go on.
    #[expect(clippy::type_complexity, reason = "used once")]
    fn plan(&mut self, list: &List) -> Result<(Vec<Option<Plan>>, HashMap<usize, File>)> {
        let (mut plans, mut held) = (Vec::new(), HashMap::new());
        for (index, entry) in list.entries.iter().enumerate() {
            plans.push(None);
            if entry.folder {
                continue;
            }
            let plan = self.plan_file(index, entry, &mut held)?;
            plans[index] = Some(plan);
            self.progress.total_bytes = self.progress.total_bytes.saturating_add(entry.bytes);
            self.wire.queue(&Frame::Plan(plan))?;
        }
        self.wire.flush()?;
        Ok((plans, held))
    }

    fn plan_file(&mut self, index: usize, entry: &Entry, held: &mut HashMap<usize, File>) -> Result<Plan> {
        let found = self.folder.find(&entry.name).map_err(|error| self.failed("look for", entry, &error))?;
        let replace = self.options.overwrite;
        match found {
            Found::Folder if replace => {
                let error = io::Error::from_raw_os_error(libc::EISDIR);
                return Err(self.failed("replace", entry, &error));
            }
            Found::File { bytes, changed } if (bytes, changed) == (entry.bytes, entry.changed) => {
                if let Ok(file) = self.folder.open_file(&entry.name)
                    && let Some(digest) = self.digest(&file, bytes)?
                {
                    return Ok(Plan::There { digest, replace });
                }
                if !replace {
                    return Ok(Plan::Keep);
                }
            }
            Found::File { .. } | Found::Folder | Found::Other if !replace => {
                self.summary.kept_folders += u64::from(matches!(found, Found::Folder));
                return Ok(Plan::Keep);
            }
            _ => {}
        }
        // What came last may have been on its way when everything stopped.
        if held.len() < RESUMED_MAX
            && let Ok(part) = self.folder.open_part(&entry.name, false)
            && let Ok(metadata) = part.metadata()
        {
            let margin = match folder::is_unordered(&metadata) {
                true => CHUNK_BYTES * (2 + pieces::AHEAD_MAX as u64),
                false => CHUNK_BYTES,
            };
            let have = metadata.len().min(entry.bytes).saturating_sub(margin);
            if have >= RESUMED_BYTES_MIN
                && let Some(digest) = self.digest(&part, have)?
            {
                held.insert(index, part);
                return Ok(Plan::Send { have, digest });
            }
        }
        Ok(Plan::Send { have: 0, digest: 0 })
    }

    fn digest(&mut self, file: &File, bytes: u64) -> Result<Option<u64>> {
        let wire = &mut self.wire;
        extents::digest(file, bytes, &mut || wire.working())
    }

    #[expect(clippy::too_many_arguments, reason = "the state of one loop")]
    fn step(
        &mut self,
        frame: Frame,
        list: &List,
        plans: &[Option<Plan>],
        check: bool,
        course: &mut Course,
        held: &mut HashMap<usize, File>,
        coming: &mut Option<(usize, Coming)>,
    ) -> Result<Option<Totals>> {
        let wrong = |wrong| Error::Protocol { lender: "the sender".to_owned(), reason: wrong };
        match (frame, coming.as_mut()) {
            (Frame::File { index, from }, None) => {
                let index = course.file(plans, list, index, from).map_err(|why| wrong(why.to_owned()))?;
                let entry = &list.entries[index];
                self.progress.name = entry.to_string();
                (self.observer)(&self.progress);
                *coming = Some((index, self.open(entry, from, held.remove(&index), self.options.method)?));
            }
            (Frame::Remote { index, from }, None) => {
                let index = course.file(plans, list, index, from).map_err(|why| wrong(why.to_owned()))?;
                let entry = &list.entries[index];
                if entry.bytes == 0 {
                    return Err(wrong("an empty file is to be written into".to_owned()));
                }
                self.progress.name = entry.to_string();
                (self.observer)(&self.progress);
                let mut opened = self.open(entry, from, held.remove(&index), Method::OneSided)?;
                let Some(target) = &self.target else {
                    return Err(wrong("a message out of turn".to_owned()));
                };
                let (key, remote) = target.open(&opened.file)?;
                opened.remote = Some(remote);
                *coming = Some((index, opened));
                self.wire.queue(&Frame::Into { key: key.to_bytes() })?;
                self.wire.flush()?;
            }
            (Frame::Data { offset, bytes }, Some((index, Coming { file, remote: Some(remote), .. }))) => {
                course.data(offset, bytes).map_err(|why| wrong(why.to_owned()))?;
                sink::promise(&self.shown, file, &list.entries[*index], offset, bytes)?;
                remote.prepare(offset, bytes).map_err(|why| wrong(why.to_owned()))?;
                self.wire.queue(&Frame::Ready { end: offset + bytes })?;
                self.wire.flush()?;
            }
            (Frame::Wrote { end }, Some((index, Coming { remote: Some(remote), digest, at, .. }))) => {
                let (offset, piece) = remote.wrote(end).map_err(|why| wrong(why.to_owned()))?;
                if check {
                    onesided::update(digest, offset, piece, self.sink.buffer())
                        .ok_or_else(|| became_shorter(&list.entries[*index]))?;
                }
                *at = end;
                self.summary.moved_bytes += piece.len() as u64;
                self.progress.done_bytes += piece.len() as u64;
                (self.observer)(&self.progress);
            }
            (Frame::Lanes { count }, None) if self.lanes.is_empty() => self.let_join(count as usize)?,
            (Frame::Striped { index, from }, None) if !self.lanes.is_empty() => {
                let index = course.file(plans, list, index, from).map_err(|why| wrong(why.to_owned()))?;
                let entry = &list.entries[index];
                self.progress.name = entry.to_string();
                let opened = self.open(entry, from, held.remove(&index), self.options.method)?;
                let (_, opened) = coming.insert((index, opened));
                self.take_striped(opened, entry, check)?;
                let bytes = course.end().map_err(|why| wrong(why.to_owned()))?;
                let Some((_, done)) = coming.take() else { return Ok(None) };
                self.finish(&done.file, entry, bytes)?;
            }
            (Frame::Data { offset, bytes }, Some((index, coming))) => {
                course.data(offset, bytes).map_err(|why| wrong(why.to_owned()))?;
                self.take(coming, &list.entries[*index], offset, bytes, check)?;
            }
            (Frame::End { digest }, Some((index, _))) => {
                let bytes = course.end().map_err(|why| wrong(why.to_owned()))?;
                let entry = &list.entries[*index];
                let Some((_, done)) = coming.take() else { return Ok(None) };
                if let Some(remote) = &done.remote {
                    if !remote.is_complete() {
                        return Err(wrong("the end of a file that is being written".to_owned()));
                    }
                    self.close_remote()?;
                }
                if check && done.digest.finish(bytes) != digest {
                    // Nothing of it can be trusted.
                    let _ = done.file.set_len(0);
                    return Err(sink::differs(entry));
                }
                self.finish(&done.file, entry, bytes)?;
            }
            (Frame::Done(totals), None) if course.is_between() => return Ok(Some(totals)),
            _ => return Err(wrong("a message out of turn".to_owned())),
        }
        Ok(None)
    }

    /// A file has come: its length, its permissions, its time and its name.
    fn finish(&mut self, file: &File, entry: &Entry, bytes: u64) -> Result<()> {
        file.set_len(bytes).map_err(|error| self.failed("write", entry, &error))?;
        let finished = self.folder.finish(file, entry, self.options.overwrite);
        finished.map_err(|error| self.failed("finish", entry, &error))?;
        self.summary.files += 1;
        self.summary.bytes += bytes;
        Ok(())
    }

    /// Lets the sender make more connections.
    fn let_join(&mut self, count: usize) -> Result<()> {
        // It is closed when they have come.
        let Some(listener) = self.listener.take() else {
            return Err(self.wire.wrong("a message out of turn"));
        };
        let mut token = [0; 16];
        getrandom::fill(&mut token).map_err(|_| Error::Other("cannot get random numbers".to_owned()))?;
        self.wire.queue(&Frame::Join { token })?;
        self.wire.flush()?;
        let (lanes, options, shown) = (&mut self.lanes, self.options, &self.shown);
        let deadline = Instant::now() + JOIN;
        let mut failed = None;
        arrivals(&listener, &options.security, Some(deadline), &mut |came| {
            let Ok(arrival) = came else { return ControlFlow::Continue(()) };
            let hello = &arrival.hello;
            if hello.role != Role::Transfer || hello.features & FEATURE_LANE == 0 {
                arrival.refuse(Refusal::Role);
                return ControlFlow::Continue(());
            }
            let Some(transport) = arrival.accept() else { return ControlFlow::Continue(()) };
            match join(transport, token, deadline, options.method, shown) {
                Ok(lane) => lanes.extend(lane),
                Err(error) => failed = Some(error),
            }
            if failed.is_some() || lanes.len() == count {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        match failed {
            Some(error) => Err(error),
            None if lanes.len() < count => {
                let after_ms = JOIN.as_millis() as u64;
                Err(Error::Timeout { lender: self.wire.peer.clone(), what: "its connections", after_ms })
            }
            None => Ok(()),
        }
    }

    /// Receives a file over several connections.
    fn take_striped(&mut self, coming: &mut Coming, entry: &Entry, check: bool) -> Result<()> {
        (self.observer)(&self.progress);
        let before = self.progress.done_bytes + coming.at;
        let (progress, observer) = (&mut self.progress, &mut self.observer);
        let from = coming.at;
        let mut came = Came { front: from, moved: 0 };
        folder::mark_unordered(&coming.file, true)
            .map_err(|error| sink::failed(&self.shown, "write", entry, &error))?;
        let into = Into { file: &coming.file, mapping: coming.mapping.as_ref(), entry };
        let result =
            lanes::take(&mut self.lanes, &mut self.wire, into, from, check, &mut came, &mut |bytes| {
                progress.done_bytes = before + bytes;
                observer(progress);
            });
        coming.at = came.front;
        self.summary.moved_bytes += came.moved;
        self.progress.done_bytes = before - from + entry.bytes;
        if result.is_err() {
            // Whoever is told of the error finds a part that is in order.
            let _ = coming.file.set_len(coming.at);
            let _ = folder::mark_unordered(&coming.file, false);
        }
        result
    }

    /// Nobody writes into the file under way any more.
    fn close_remote(&self) -> Result<()> {
        self.target.as_ref().map_or(Ok(()), Target::close)
    }

    fn open(&mut self, entry: &Entry, from: u64, part: Option<File>, method: Method) -> Result<Coming> {
        let opened = part.map_or_else(|| self.folder.open_part(&entry.name, true), Ok);
        let file = opened.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                Error::Other(format!("cannot write {entry} in {}: another transfer does", self.shown))
            }
            _ => self.failed("write", entry, &error),
        })?;
        // Behind what is kept there may be anything.
        let length = file.set_len(from).and_then(|()| match method {
            Method::Mmap | Method::OneSided => file.set_len(entry.bytes),
            _ => Ok(()),
        });
        length.map_err(|error| self.failed("write", entry, &error))?;
        let mapping = match method {
            Method::Mmap if entry.bytes > 0 => {
                Some(Mapping::of_file(&file, true).map_err(|error| self.failed("map", entry, &error))?)
            }
            _ => None,
        };
        Ok(Coming { file, mapping, remote: None, digest: Digest::new(), at: from })
    }

    /// Writes bytes that are next on the connection.
    fn take(
        &mut self,
        coming: &mut Coming,
        entry: &Entry,
        offset: u64,
        bytes: u64,
        check: bool,
    ) -> Result<()> {
        let Coming { file, mapping, digest, at, .. } = coming;
        let into = Into { file, mapping: mapping.as_ref(), entry };
        let (summary, progress, observer) = (&mut self.summary, &mut self.progress, &mut self.observer);
        let digest = check.then_some(digest);
        self.sink.take(&mut self.wire, into, (offset, bytes), digest, &mut |end, count| {
            *at = end;
            summary.moved_bytes += count as u64;
            progress.done_bytes += count as u64;
            observer(progress);
        })
    }

    /// Files without names: they get numbers.
    fn simple(&mut self) -> Result<()> {
        for number in 1.. {
            let Some(first) = self.wire.receive_first()? else { return Ok(()) };
            let mut rest = [0; 7];
            self.wire.receive_exact(&mut rest)?;
            let bytes =
                u64::from_be_bytes(std::array::from_fn(
                    |index| if index == 0 { first } else { rest[index - 1] },
                ));
            if bytes > FILE_BYTES_MAX {
                return Err(self.wire.wrong("a length that is none"));
            }
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            let name = format!("file-{number:04}").into_bytes();
            let changed = (now.as_secs() as i64, now.subsec_nanos());
            let entry = Entry { folder: false, mode: 0o644, changed, bytes, name };
            self.progress.name = entry.to_string();
            self.progress.total_bytes = self.progress.total_bytes.saturating_add(bytes);
            let found =
                self.folder.find(&entry.name).map_err(|error| self.failed("look for", &entry, &error))?;
            let in_the_way = match found {
                Found::Folder => Some(libc::EISDIR),
                Found::File { .. } | Found::Other if !self.options.overwrite => Some(libc::EEXIST),
                _ => None,
            };
            if let Some(errno) = in_the_way {
                return Err(self.failed("write", &entry, &io::Error::from_raw_os_error(errno)));
            }
            let mut coming = self.open(&entry, 0, None, self.options.method)?;
            if let Err(error) = self.take(&mut coming, &entry, 0, bytes, false) {
                let _ = coming.file.set_len(0);
                return Err(error);
            }
            self.finish(&coming.file, &entry, bytes)?;
        }
        Ok(())
    }

    /// A sentence about a file.
    fn failed(&self, what: &str, entry: &Entry, error: &io::Error) -> Error {
        sink::failed(&self.shown, what, entry, error)
    }
}

/// A connection of the sender whose hello has come; `None` when it is not one of this transfer.
fn join(
    transport: Transport,
    token: [u8; 16],
    deadline: Instant,
    method: Method,
    shown: &str,
) -> Result<Option<TakeLane>> {
    let mut wire = Wire::new(transport, "the sender".to_owned(), true)?;
    // Others wait behind it.
    let deadline = deadline.min(Instant::now() + JOIN_EACH);
    let joined = loop {
        match wire.receive_now() {
            Ok(Some(frame)) => break frame,
            Ok(None) => {}
            Err(_) => return Ok(None),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || !wire.wait(left)? {
            return Ok(None);
        }
    };
    if !matches!(joined, Frame::Join { token: theirs } if theirs == token) {
        return Ok(None);
    }
    let sink = Sink::new(method, &wire, shown)?;
    Ok(Some(TakeLane { wire, sink }))
}
