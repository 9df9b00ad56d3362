//! The server: one thread, one epoll set, one volume, all mounts. docs/design/mount.md has the whole.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use netvm_core::files::{Files, Owner, Part, Time};
use netvm_core::wire::{Refusal, Role};
use netvm_sys::epoll::{Epoll, Interest, Ready};
use netvm_sys::fuse::FuseDevice;
use netvm_sys::mapping::Mapping;
use netvm_sys::net::{Address, Listener, Stream};

use super::notifier::Notifier;
use super::proto::Answer;
use super::segment::Segments;
use super::session::{Heard, Running, Session, What};
use super::{FEATURE_ORDER, MountNotice, OUR_ORDER, errno};
use crate::error::{Error, Result};
use crate::lender::StopFlag;
use crate::link::greeting::{self, Arrival, Greeted, Greeting};
use crate::link::paused::Paused;
use crate::link::spin::Spin;
use crate::node::{Node, Rights};
use crate::region::Region;
use crate::security::Security;
use crate::volume::{Ended, Event, Volume};

/// Most mounts that join one.
pub const JOINED_MAX: usize = 64;
/// Connections that have not said who they are.
const GREETINGS_MAX: usize = 64;
/// Rounds of requests that end at once, after which all others have their turn.
const ROUNDS_MAX: u32 = 8;
/// Requests of one session that are taken one after the other.
const REQUESTS_MAX: u32 = 64;
/// Connections that are accepted at a time; the rest stays in the kernel's queue.
const ACCEPTS_MAX: u32 = 8;

const STOP_ID: u64 = 0;
const VOLUME_ID: u64 = 1;
const SEGMENTS_ID: u64 = 2;
const LISTENER_ID: u64 = 16;
const GREETING_ID: u64 = 1 << 16;
const SESSION_ID: u64 = 1 << 32;

/// Bits of a token below the session's number.
const PLACE_BITS: u32 = 8;
/// A discard that nobody waits for.
pub(super) const NOBODY: u64 = u64::MAX;

/// How to serve.
#[derive(Clone, Debug, Default)]
pub struct MountConfig {
    /// Where other mounts may join: `HOST:PORT` or `unix:/path`.
    pub share: Vec<String>,
    /// Where they may join that only read.
    pub share_read_only: Vec<String>,
    /// Who may join.
    pub security: Security,
    /// This mount itself only reads.
    pub read_only: bool,
}

struct Entrance {
    listener: Listener,
    read_only: bool,
}

struct Newcomer {
    greeting: Greeting,
    read_only: bool,
}

/// Files on a volume, for this mount and those that join it.
pub struct MountServer {
    pub(super) files: Files,
    pub(super) volume: Option<Volume>,
    pub(super) segments: Segments,
    device: Arc<FuseDevice>,
    epoll: Epoll,
    spin: Spin,
    owner: Owner,
    at: PathBuf,
    entrances: Vec<Entrance>,
    /// Entrances that are not watched until the next sweep.
    paused: Paused,
    greetings: BTreeMap<u64, Newcomer>,
    pub(super) sessions: BTreeMap<u64, Session>,
    next: u64,
    /// Numbers of requests on the volume that have not ended.
    pub(super) under_way: BTreeSet<u64>,
    spare: Vec<Mapping>,
    config: MountConfig,
    ended: Vec<Ended>,
    pub(super) parts: Vec<Part>,
    pub(super) notices: Vec<MountNotice>,
    stopping: bool,
    sweep: Instant,
}

impl std::fmt::Debug for MountServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MountServer").field("files", &self.files.room()).finish_non_exhaustive()
    }
}

/// Now, as files count it.
pub(super) fn now() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Time { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() }
}

impl MountServer {
    /// An empty folder, with the owner and permissions of the folder `at`, on a volume that is not used yet, or on none: then it has
    /// segments only. Listens for mounts that join.
    ///
    /// # Errors
    /// [`Error::System`] without FUSE or memory; [`Error::Listen`], also for a network address without a secret.
    pub fn new(at: &Path, volume: Option<Volume>, config: MountConfig) -> Result<Self> {
        let device = FuseDevice::open().map_err(|error| Error::system("open /dev/fuse", &error))?;
        let device = Arc::new(device);
        let epoll = Epoll::new().map_err(|error| Error::system("make an epoll set", &error))?;
        let mut entrances = Vec::new();
        let all = config.share.iter().map(|text| (text, false));
        for (text, read_only) in all.chain(config.share_read_only.iter().map(|text| (text, true))) {
            let address: Address = text.parse().map_err(|reason: &str| Error::Address {
                address: text.clone(),
                reason: reason.to_owned(),
            })?;
            let refused = |error: std::io::Error| Error::listen(address.to_string(), &error);
            let listener = Listener::bind(&address).map_err(refused)?;
            config.security.check_shared(listener.address())?;
            entrances.push(Entrance { listener, read_only });
        }
        // What is mounted over looks as it did.
        let folder = std::fs::metadata(at)
            .and_then(|folder| {
                if folder.is_dir() { Ok(folder) } else { Err(std::io::ErrorKind::NotADirectory.into()) }
            })
            .map_err(|error| Error::Other(format!("cannot mount at {}: {error}", at.display())))?;
        let owner = Owner { permissions: folder.mode() & 0o7777, uid: folder.uid(), gid: folder.gid() };
        let bytes = volume.as_ref().map_or(0, Volume::size_bytes);
        Ok(Self {
            files: Files::new(bytes, owner, now()),
            volume,
            segments: Segments::new()?,
            device,
            epoll,
            spin: Spin::server(None),
            owner,
            at: at.to_owned(),
            entrances,
            paused: Paused::default(),
            greetings: BTreeMap::new(),
            sessions: BTreeMap::new(),
            next: 0,
            under_way: BTreeSet::new(),
            spare: Vec::new(),
            config,
            ended: Vec::new(),
            parts: Vec::new(),
            notices: Vec::new(),
            stopping: false,
            sweep: Instant::now(),
        })
    }

    /// Where mounts may join, with the real ports, and whether they may only read.
    pub fn addresses(&self) -> Vec<(String, bool)> {
        self.entrances
            .iter()
            .map(|entrance| (entrance.listener.address().to_string(), entrance.read_only))
            .collect()
    }

    /// Shows a segment as a file of the root folder, with the rights that its key gives, or with `read_only` only to be read. `node`, whose
    /// the region is, lives as long as this.
    ///
    /// # Errors
    /// [`Error::Other`] when the name is taken or makes no sense.
    pub fn add_segment(
        &mut self,
        name: &str,
        node: Arc<Node>,
        region: Region,
        read_only: bool,
    ) -> Result<()> {
        let permissions = if region.rights() == Rights::ReadWrite && !read_only { 0o644 } else { 0o444 };
        let owner = Owner { permissions, ..self.owner };
        let size = region.len();
        let number = self.segments.add(node, region, permissions & 0o222 != 0)?;
        self.files.add_segment(name.as_bytes(), number, size, owner, now()).map(drop).map_err(|refused| {
            Error::Other(format!("a file cannot be called {name:?}: {}", errno::describe(refused)))
        })
    }

    /// Puts it over the folder. Requests wait for [`MountServer::run`].
    ///
    /// # Errors
    /// [`Error::System`] without the right to mount.
    pub fn mount(&mut self) -> Result<()> {
        self.device
            .mount_folder(&self.at, self.config.read_only)
            .map_err(|error| super::may_not_mount(&error))?;
        let notifier = Notifier::start(self.device.clone())?;
        let buffers = self.take_buffers()?;
        self.add_session(Session::local(self.device.clone(), notifier, self.config.read_only, buffers))
    }

    fn take_buffers(&mut self) -> Result<Mapping> {
        match self.spare.pop() {
            Some(buffers) => Ok(buffers),
            None => Session::buffers().map_err(|error| Error::system("reserve memory for buffers", &error)),
        }
    }

    fn add_session(&mut self, session: Session) -> Result<()> {
        let number = self.next;
        self.next += 1;
        self.watch(session.wait_fd(), SESSION_ID + number)?;
        self.sessions.insert(number, session);
        Ok(())
    }

    fn watch(&self, fd: BorrowedFd<'_>, id: u64) -> Result<()> {
        let added = self.epoll.add(fd, id, Interest { readable: true, writable: false });
        added.map_err(|error| Error::system("watch a descriptor", &error))
    }

    /// Whether nobody else changes files.
    pub(super) fn is_alone(&self) -> bool {
        self.entrances.is_empty()
    }

    /// Mounts that have joined.
    fn joined(&self) -> usize {
        self.sessions.values().filter(|session| !session.is_local()).count()
    }

    /// Serves until it is unmounted and no mount that has joined is left, or stopped twice. `notice` is told what happens.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel does not let it wait.
    pub fn run(&mut self, stop: &StopFlag, mut notice: impl FnMut(MountNotice)) -> Result<()> {
        self.watch(stop.as_fd(), STOP_ID)?;
        if let Some(volume) = &self.volume {
            self.watch(volume.as_fd(), VOLUME_ID)?;
        }
        self.watch(self.segments.event.as_fd(), SEGMENTS_ID)?;
        for (index, entrance) in self.entrances.iter().enumerate() {
            self.watch(entrance.listener.as_fd(), LISTENER_ID + index as u64)?;
        }
        let mut ready: Vec<Ready> = Vec::with_capacity(netvm_sys::epoll::EVENTS_MAX);
        loop {
            let mut patience = self.volume.as_ref().map_or(Duration::from_secs(1), Volume::patience);
            if self.sessions.values().any(Session::has_received) {
                patience = Duration::ZERO;
            }
            let waited = self.spin.wait_for(&self.epoll, &mut ready, patience);
            waited.map_err(|error| Error::system("wait for requests", &error))?;
            for &Ready { id, .. } in &ready {
                match id {
                    STOP_ID => {
                        if stop.take() > 1 || self.stopping {
                            return Ok(());
                        }
                        self.stopping = true;
                    }
                    VOLUME_ID | SEGMENTS_ID => {}
                    SESSION_ID.. => self.hear(id - SESSION_ID),
                    GREETING_ID.. => self.greet(id - GREETING_ID),
                    _ => self.welcome((id - LISTENER_ID) as usize),
                }
            }
            for number in self
                .sessions
                .iter()
                .filter(|(_, session)| session.has_received())
                .map(|(&number, _)| number)
                .collect::<Vec<_>>()
            {
                self.hear(number);
            }
            let heard = ready.is_empty() || ready.iter().any(|ready| ready.id == VOLUME_ID);
            self.collect(heard);
            self.push();
            self.sweep();
            self.notices.drain(..).for_each(&mut notice);
            let mounted = self.sessions.values().any(Session::is_local);
            if !mounted && self.joined() == 0 {
                return Ok(());
            }
        }
    }

    /// Takes what a session asks for while there is room, and it is its turn: its descriptor tells of the rest.
    fn hear(&mut self, number: u64) {
        for _ in 0..REQUESTS_MAX {
            let Some(session) = self.sessions.get_mut(&number) else { return };
            match session.hear() {
                Heard::One { header, head, place } => self.execute(number, &header, &head, place),
                Heard::Nothing => return,
                Heard::Over(why) => {
                    session.over = true;
                    self.part(number, why);
                    return;
                }
            }
        }
    }

    /// A session will ask for nothing more.
    fn part(&mut self, number: u64, why: Option<String>) {
        let joined = self.joined();
        let Some(session) = self.sessions.get_mut(&number) else { return };
        session.over = true;
        let _ = self.epoll.remove(session.wait_fd());
        self.files.end_session(number);
        let notice = match session.is_local() {
            true => MountNotice::Unmounted { joined },
            false => MountNotice::Left { peer: session.peer.clone(), why },
        };
        self.notices.push(notice);
        self.discard();
        self.bury(number);
    }

    /// Forgets a session that is over when nothing uses its memory any more.
    fn bury(&mut self, number: u64) {
        if self.sessions.get(&number).is_some_and(|session| session.over && session.is_idle())
            && let Some(session) = self.sessions.remove(&number)
        {
            self.spare.push(session.into_buffers());
        }
    }

    /// What the volume and segments have done; whether something may have come from lenders.
    fn collect(&mut self, mut heard: bool) {
        for (token, result) in self.segments.answers() {
            if let Err(error) = &result {
                self.notices.push(MountNotice::Segment(error.clone()));
            }
            self.end(token, result.is_ok());
        }
        for round in 1..=ROUNDS_MAX {
            let Some(volume) = &mut self.volume else { return };
            let mut ended = std::mem::take(&mut self.ended);
            volume.advance(heard, &mut ended);
            heard = false;
            // Before those who wait are told: they may ask what is lost.
            while let Some(event) = volume.event() {
                if matches!(event, Event::LenderLost { lost: 1.., .. }) {
                    volume.lost().for_each(|bytes| self.files.lose(bytes));
                }
                self.notices.push(MountNotice::Volume(event));
            }
            let any = !ended.is_empty();
            for Ended { token, result } in ended.drain(..) {
                if token != NOBODY {
                    self.end(token, result.is_ok());
                }
            }
            self.ended = ended;
            self.discard();
            // What was begun may have ended already, and there are places again.
            let waiting: Vec<u64> = self
                .sessions
                .iter()
                .filter(|(_, session)| any && session.is_local())
                .map(|(&number, _)| number)
                .collect();
            // Where one request follows the other, others wait: lenders, mounts that have joined, and who wants an end. Nothing may be begun
            // after the last look at what has ended; what is still asked for stays in the device, which is readable.
            if waiting.is_empty() || round == ROUNDS_MAX {
                return;
            }
            waiting.into_iter().for_each(|number| self.hear(number));
        }
    }

    /// Has the volume discard what is free.
    pub(super) fn discard(&mut self) {
        self.files.settle(self.under_way.first().copied());
        let Some(volume) = &mut self.volume else { return };
        for range in self.files.discards() {
            // They lie within it.
            let _ = volume.discard(NOBODY, range.start, range.end - range.start);
        }
    }

    pub(super) fn token(session: u64, place: usize) -> u64 {
        session << PLACE_BITS | place as u64
    }

    /// A part of a request has ended.
    fn end(&mut self, token: u64, good: bool) {
        let (number, place) = (token >> PLACE_BITS, (token & ((1 << PLACE_BITS) - 1)) as usize);
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let Some(Some(running)) = session.running.get_mut(place) else { return };
        running.left -= 1;
        running.failed |= !good;
        if running.left == 0 {
            self.finish(number, place);
        }
    }

    /// A request has ended.
    pub(super) fn finish(&mut self, number: u64, place: usize) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let Some(Running { unique, file, what, stamp, failed, .. }) = session.running[place].take() else {
            return;
        };
        self.under_way.remove(&stamp);
        if failed && matches!(what, What::Write { .. }) {
            self.files.damage(file);
        }
        // A flush fails after any loss; what this file has may be there all the same.
        let failed =
            failed && (what != What::Sync || self.files.is_damaged(file) || !self.files.is_on_volume(file));
        match what {
            _ if failed => session.answer(Answer::error(unique, libc::EIO), place),
            What::Read { bytes } => session.answer_data(Answer::done(unique), place, bytes as usize),
            What::Write { bytes } => session.answer(Answer::written(unique, bytes), place),
            What::Sync => session.answer(Answer::done(unique), place),
        }
        self.bury(number);
    }

    /// Sends answers, and tells epoll what to wait for.
    fn push(&mut self) {
        if let Some(volume) = &mut self.volume {
            volume.push();
        }
        let mut over = Vec::new();
        for (&number, session) in &mut self.sessions {
            if session.over {
                continue;
            }
            if let Err(why) = session.push() {
                over.push((number, why));
                continue;
            }
            let interest = session.interest();
            if interest != session.watched {
                session.watched = interest;
                let _ = self.epoll.change(session.wait_fd(), SESSION_ID + number, interest);
            }
        }
        for (number, why) in over {
            self.part(number, Some(why));
        }
    }

    /// Somebody connects.
    fn welcome(&mut self, index: usize) {
        for _ in 0..ACCEPTS_MAX {
            let Some(entrance) = self.entrances.get(index) else { return };
            let stream = match entrance.listener.accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(_) => {
                    self.paused.pause(&self.epoll, &entrance.listener, index);
                    return;
                }
            };
            let read_only = entrance.read_only;
            if self.greetings.len() >= GREETINGS_MAX {
                greeting::refuse(&stream, Role::Mount, Refusal::Busy);
                continue;
            }
            let greeting = Greeting::new(stream, Role::Mount);
            let number = self.next;
            self.next += 1;
            if self.watch(greeting.wait_fd(), GREETING_ID + number).is_ok() {
                self.greetings.insert(number, Newcomer { greeting, read_only });
            }
        }
    }

    fn greet(&mut self, number: u64) {
        let Some(Newcomer { greeting, read_only }) = self.greetings.remove(&number) else { return };
        let _ = self.epoll.remove(greeting.wait_fd());
        match greeting.progress(&self.config.security) {
            Greeted::Waiting(greeting) => {
                if self.watch(greeting.wait_fd(), GREETING_ID + number).is_ok() {
                    self.greetings.insert(number, Newcomer { greeting, read_only });
                }
            }
            Greeted::Gone(_) => {}
            Greeted::Hello(arrival) => self.join(*arrival, read_only),
        }
    }

    /// Somebody who may join.
    fn join(&mut self, arrival: Arrival, read_only: bool) {
        // What it hands on are its kernel's own records.
        if arrival.hello.role != Role::Mount || arrival.hello.features & FEATURE_ORDER != OUR_ORDER {
            return arrival.refuse(Refusal::Role);
        }
        if self.joined() >= JOINED_MAX || self.stopping {
            return arrival.refuse(if self.stopping { Refusal::Stopping } else { Refusal::Busy });
        }
        let peer = peer_of(arrival.stream());
        let Some(transport) = arrival.accept() else { return };
        let Ok(buffers) = self.take_buffers() else { return };
        if self.add_session(Session::remote(transport, peer.clone(), read_only, buffers)).is_ok() {
            self.notices.push(MountNotice::Joined { peer, read_only });
        }
    }

    /// Closes connections that do not say who they are, and looks again who connects.
    fn sweep(&mut self) {
        let now = Instant::now();
        if now - self.sweep > Duration::from_millis(500) {
            self.sweep = now;
            // Closing takes them out of the epoll set.
            self.greetings.retain(|_, greeted| !greeted.greeting.is_late(now));
            let listener = |index: usize| Some(&self.entrances.get(index)?.listener);
            self.paused.resume(&self.epoll, LISTENER_ID, listener);
        }
    }
}

/// Who it is, for messages.
fn peer_of(stream: &Stream) -> String {
    let address =
        rustix::net::getpeername(stream).ok().and_then(|address| SocketAddr::try_from(address?).ok());
    address.map_or_else(|| "this machine".to_owned(), |address| address.to_string())
}
