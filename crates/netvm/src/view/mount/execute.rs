//! What each request does.

use netvm_core::files::{Attributes, Files, Kind, Make, Number, Owner, Part, Refused, Rename};

use super::proto::{self, Answer, Ask, HEAD_BYTES, Header, Keeping, Opened};
use super::segment::Job;
use super::server::{MountServer, now};
use super::session::{DATA_BYTES_MAX, Running, Session, What};
use super::{MountNotice, errno};

/// Most bytes of entries in one answer.
const ENTRIES_BYTES_MAX: u32 = 64 << 10;
/// A kernel that is alone keeps what it was told for so long. It does not know how many blocks what it writes later takes.
const ALONE: Keeping = Keeping { names: 3600, attributes: 1 };

const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 16;

/// A request, and where its data is.
#[derive(Clone, Copy)]
struct Place {
    session: u64,
    place: usize,
    unique: u64,
}

/// What a request wants of the bytes of a file.
enum Bytes {
    Read { offset: u64, bytes: u32 },
    Write { offset: u64, bytes: u32, append: bool, cached: bool },
    Sync,
}

impl MountServer {
    /// Begins a request; answers it unless it is one for the volume or a segment.
    pub(super) fn execute(&mut self, session: u64, header: &Header, head: &[u8; HEAD_BYTES], place: usize) {
        let Some(this) = self.sessions.get_mut(&session) else { return };
        let body =
            if header.is_plausible(DATA_BYTES_MAX) { this.body(header, head, place) } else { Vec::new() };
        let at = Place { session, place, unique: header.unique };
        let Some(ask) = Ask::parse(header, &body) else {
            return this.answer(Answer::error(header.unique, libc::EINVAL), place);
        };
        if this.read_only && changes(&ask) {
            return this.answer(Answer::error(header.unique, libc::EROFS), place);
        }
        let bytes = match ask {
            Ask::Read { offset, bytes } => Bytes::Read { offset, bytes },
            Ask::Write { offset, bytes, append, cached } => Bytes::Write { offset, bytes, append, cached },
            Ask::Sync => Bytes::Sync,
            Ask::Forget { times } => {
                self.files.forget(session, header.node, times);
                return self.release(session, place);
            }
            Ask::ForgetMany(pairs) => {
                proto::forgotten(pairs).for_each(|(number, times)| self.files.forget(session, number, times));
                return self.release(session, place);
            }
            Ask::Silent => return self.release(session, place),
            ask => {
                let answer = self.answer_to(session, header, &ask);
                let answer =
                    answer.unwrap_or_else(|refused| Answer::error(header.unique, errno::of(refused)));
                if let Some(session) = self.sessions.get_mut(&session) {
                    session.answer(answer, place);
                }
                return self.discard();
            }
        };
        if let Err(error) = self.move_bytes(at, header.node, &bytes)
            && let Some(session) = self.sessions.get_mut(&session)
        {
            session.answer(Answer::error(header.unique, error), place);
        }
    }

    fn release(&mut self, session: u64, place: usize) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.release(place);
        }
        self.discard();
    }

    fn keeping(&self) -> Keeping {
        if self.is_alone() { ALONE } else { Keeping { names: 0, attributes: 0 } }
    }

    /// The answer to what is done at once.
    fn answer_to(&mut self, session: u64, header: &Header, ask: &Ask<'_>) -> Result<Answer, Refused> {
        let Header { unique, node, uid, gid, .. } = *header;
        let owner = |mode: u32| Owner { permissions: mode & 0o7777, uid, gid };
        Ok(match *ask {
            Ask::Init { minor, .. } if minor < proto::MINOR_MIN => Answer::error(unique, libc::EPROTO),
            Ask::Init { readahead, flags, .. } => {
                Answer::init(unique, readahead, flags, DATA_BYTES_MAX as u32, self.is_alone())
            }
            Ask::Lookup { name } => {
                let number = self.files.find(node, name)?;
                self.entry(session, unique, number)?
            }
            Ask::Attributes => Answer::attributes(unique, self.keeping(), &self.files.attributes(node)?),
            Ask::Change(change) => {
                self.files.change(node, &change.at(now()), now())?;
                self.changed(session, node);
                Answer::attributes(unique, self.keeping(), &self.files.attributes(node)?)
            }
            Ask::ReadLink => Answer::bytes_of(unique, self.files.target(node)?),
            Ask::MakeLink { name, target } => {
                self.make(session, unique, node, name, Make::Link(target), owner(0o777))?
            }
            Ask::MakeNode { name, mode, device } => {
                let make = match mode & libc::S_IFMT {
                    libc::S_IFREG | 0 => Make::File,
                    kind @ (libc::S_IFIFO | libc::S_IFSOCK | libc::S_IFCHR | libc::S_IFBLK) => {
                        Make::Special(kind, device)
                    }
                    _ => return Err(Refused::Invalid),
                };
                self.make(session, unique, node, name, make, owner(mode))?
            }
            Ask::MakeFolder { name, mode } => {
                self.make(session, unique, node, name, Make::Folder, owner(mode))?
            }
            // Somebody else has made it meanwhile: the kernel looks again, and opens it as it would have.
            Ask::Create { name, exclusive: false, .. } if self.files.find(node, name).is_ok() => {
                Answer::error(unique, libc::ESTALE)
            }
            Ask::Create { name, mode, .. } => {
                let answer = self.make(session, unique, node, name, Make::File, owner(mode))?;
                let number = self.files.find(node, name)?;
                answer.open(self.opens(session, number))
            }
            Ask::Remove { name, folder } => {
                self.files.remove(node, name, folder, now())?;
                Answer::done(unique)
            }
            Ask::Rename { name, to, new, flags } => {
                let how = match flags {
                    0 => Rename::Replace,
                    libc::RENAME_NOREPLACE => Rename::Keep,
                    libc::RENAME_EXCHANGE => Rename::Exchange,
                    _ => return Err(Refused::Invalid),
                };
                self.files.rename((node, name), (to, new), how, now())?;
                Answer::done(unique)
            }
            Ask::Link { file, name } => {
                self.files.link(file, node, name, now())?;
                self.entry(session, unique, file)?
            }
            Ask::Open { .. } => {
                if let Kind::Segment(segment) = self.files.attributes(node)?.kind
                    && self.sessions.get(&session).is_some_and(Session::is_local)
                    && self.segments.is_exporter(segment, header.thread)
                {
                    self.notices.push(MountNotice::OfItself { thread: header.thread });
                    return Ok(Answer::error(unique, libc::EDEADLK));
                }
                Answer::done(unique).open(self.opens(session, node))
            }
            Ask::OpenFolder => {
                self.files.attributes(node)?;
                Answer::done(unique).open(Opened::Fresh)
            }
            Ask::Entries { offset, bytes } => {
                let mut answer = Answer::done(unique);
                let most = bytes.min(ENTRIES_BYTES_MAX) as usize;
                for entry in self.files.entries(node, offset)? {
                    if !answer.add_entry(&entry, most) {
                        break;
                    }
                }
                answer
            }
            Ask::Statistics => Answer::statistics(unique, &self.files.room()),
            Ask::Allocate { offset, bytes, mode } => {
                match mode {
                    0 | KEEP_SIZE => self.files.allocate(node, offset, bytes, mode == 0, now())?,
                    mode if mode == PUNCH_HOLE | KEEP_SIZE || mode == ZERO_RANGE | KEEP_SIZE => {
                        self.files.punch(node, offset, bytes, now())?;
                    }
                    _ => return Ok(Answer::error(unique, libc::EOPNOTSUPP)),
                }
                self.changed(session, node);
                Answer::done(unique)
            }
            Ask::Nothing => Answer::done(unique),
            _ => Answer::error(unique, libc::ENOSYS),
        })
    }

    fn make(
        &mut self,
        session: u64,
        unique: u64,
        folder: Number,
        name: &[u8],
        make: Make<'_>,
        owner: Owner,
    ) -> Result<Answer, Refused> {
        // As other file systems: what is made in a folder with the bit belongs to the folder's group.
        let above = self.files.attributes(folder)?;
        let mut owner = owner;
        if above.permissions & libc::S_ISGID != 0 {
            owner.gid = above.gid;
            if matches!(make, Make::Folder) {
                owner.permissions |= libc::S_ISGID;
            }
        }
        let number = self.files.make(folder, name, make, owner, now())?;
        self.entry(session, unique, number)
    }

    fn entry(&mut self, session: u64, unique: u64, number: Number) -> Result<Answer, Refused> {
        let attributes: Attributes = self.files.attributes(number)?;
        self.files.remember(session, number);
        Ok(Answer::entry(unique, self.keeping(), &attributes))
    }

    /// A session opens a file: what its kernel is to do with what it has cached.
    fn opens(&mut self, session: u64, number: Number) -> Opened {
        if !self.files.is_on_volume(number) {
            return Opened::Direct;
        }
        if self.is_alone() {
            return Opened::Keep;
        }
        let version = self.files.version(number);
        let Some(session) = self.sessions.get_mut(&session) else { return Opened::Fresh };
        if session.opened.insert(number, version) == Some(version) { Opened::Keep } else { Opened::Fresh }
    }

    /// The bytes of a file have changed: others must not show what they have cached.
    fn changed(&mut self, by: u64, number: Number) {
        for (&other, session) in &mut self.sessions {
            if other != by && !session.over && self.files.knows(other, number) {
                session.forget_bytes(number);
            }
        }
    }

    /// Begins a request that the volume or a segment works on.
    fn move_bytes(&mut self, at: Place, number: Number, what: &Bytes) -> Result<(), i32> {
        let kind = self.files.attributes(number).map_err(errno::of)?.kind;
        if let Kind::Segment(segment) = kind {
            return self.use_segment(at, segment, number, what);
        }
        let mut parts = std::mem::take(&mut self.parts);
        parts.clear();
        let stamp = self.files.begin();
        let alone = self.is_alone();
        let found = find_parts(&mut self.files, number, what, alone, &mut parts);
        let result = found.map_err(errno::of).and_then(|what| {
            self.discard();
            let left = if what == What::Sync {
                1
            } else {
                parts.iter().filter(|part| part.offset.is_some()).count()
            };
            // One more, until all have begun.
            let running =
                Running { unique: at.unique, file: number, what, stamp, left: left + 1, failed: false };
            let session = self.sessions.get_mut(&at.session).ok_or(libc::EIO)?;
            session.running[at.place] = Some(running);
            self.under_way.insert(stamp);
            self.begin_parts(at, what, &parts);
            if matches!(what, What::Write { .. }) {
                self.changed(at.session, number);
            }
            Ok(())
        });
        self.parts = parts;
        result
    }

    fn begin_parts(&mut self, at: Place, what: What, parts: &[Part]) {
        let token = Self::token(at.session, at.place);
        let Some(session) = self.sessions.get_mut(&at.session) else { return };
        let mut failed = false;
        for &Part { at: from, offset, bytes } in parts {
            let local = session.buffer(at.place, from as usize, bytes as usize);
            let Some(offset) = offset else {
                local.fill(0);
                continue;
            };
            let begun = self.volume.as_mut().is_some_and(|volume| match what {
                What::Read { .. } => volume.read(token, offset, local).is_ok(),
                _ => volume.write(token, offset, local).is_ok(),
            });
            if !begun {
                failed = true;
                // It will not end by itself.
                session.running[at.place].iter_mut().for_each(|running| running.left -= 1);
            }
        }
        if what == What::Sync {
            match &mut self.volume {
                Some(volume) => volume.flush(token),
                None => session.running[at.place].iter_mut().for_each(|running| running.left -= 1),
            }
        }
        self.lessen(at, failed);
    }

    /// All parts have begun.
    fn lessen(&mut self, at: Place, failed: bool) {
        let Some(session) = self.sessions.get_mut(&at.session) else { return };
        let Some(running) = &mut session.running[at.place] else { return };
        running.left -= 1;
        running.failed |= failed;
        if running.left == 0 {
            self.finish(at.session, at.place);
        }
    }

    fn use_segment(&mut self, at: Place, segment: u32, number: Number, what: &Bytes) -> Result<(), i32> {
        let size = self.files.attributes(number).map_err(errno::of)?.size;
        let token = Self::token(at.session, at.place);
        let session = self.sessions.get_mut(&at.session).ok_or(libc::EIO)?;
        let local = |bytes: u32| session.buffer(at.place, 0, bytes as usize);
        let (what, job) = match *what {
            Bytes::Read { offset, bytes } => {
                let bytes =
                    u64::from(bytes).min(size.saturating_sub(offset)).min(DATA_BYTES_MAX as u64) as u32;
                (What::Read { bytes }, Job::Read { token, offset, local: local(bytes) })
            }
            // Nothing behind the end can be written.
            Bytes::Write { offset, .. } if offset >= size => return Err(libc::ENOSPC),
            Bytes::Write { offset, bytes, .. } => {
                let bytes = u64::from(bytes).min(size - offset) as u32;
                (What::Write { bytes }, Job::Write { token, offset, local: local(bytes) })
            }
            Bytes::Sync => (What::Sync, Job::Flush { token }),
        };
        if what == (What::Read { bytes: 0 }) {
            session.answer(Answer::done(at.unique), at.place);
            return Ok(());
        }
        if matches!(what, What::Write { .. }) && !self.segments.is_writable(segment) {
            return Err(libc::EROFS);
        }
        let stamp = self.files.begin();
        let running = Running { unique: at.unique, file: number, what, stamp, left: 1, failed: false };
        session.running[at.place] = Some(running);
        if !self.segments.begin(segment, job) {
            session.running[at.place] = None;
            return Err(libc::EIO);
        }
        if matches!(what, What::Write { .. }) {
            self.changed(at.session, number);
        }
        Ok(())
    }
}

/// Where the bytes are that a request wants.
fn find_parts(
    files: &mut Files,
    number: Number,
    what: &Bytes,
    alone: bool,
    parts: &mut Vec<Part>,
) -> Result<What, Refused> {
    Ok(match *what {
        Bytes::Read { offset, bytes } => {
            let most = u64::from(bytes).min(DATA_BYTES_MAX as u64);
            What::Read { bytes: files.read(number, offset, most, parts)? as u32 }
        }
        Bytes::Write { offset, bytes, append, cached } => {
            // Others may have made it longer since this kernel was told how long it is. It finds out by the time of the change.
            let offset = if append { files.attributes(number)?.size } else { offset };
            // A kernel that writes from its cache, alone, sets the times itself.
            files.write(number, offset, bytes.into(), (!(alone && cached)).then(now), parts)?;
            What::Write { bytes }
        }
        Bytes::Sync => What::Sync,
    })
}

/// Whether a request changes something.
fn changes(ask: &Ask<'_>) -> bool {
    matches!(
        ask,
        Ask::Change(_)
            | Ask::MakeLink { .. }
            | Ask::MakeNode { .. }
            | Ask::MakeFolder { .. }
            | Ask::Create { .. }
            | Ask::Remove { .. }
            | Ask::Rename { .. }
            | Ask::Link { .. }
            | Ask::Write { .. }
            | Ask::Allocate { .. }
    )
}
