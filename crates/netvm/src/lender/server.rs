//! A lender: one thread, one epoll set.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use netvm_core::endpoint::{Event, Exports, Request};
use netvm_core::key::{Access, RemoteKey, Rights};
use netvm_core::limits::{HALF_OPEN_MAX, SLABS_MAX, VERSION};
use netvm_core::recall::Recalls;
use netvm_core::slab::direct::UNIT_BYTES;
use netvm_core::slab::{LeaseId, SlabError, Slabs, is_slab};
use netvm_core::wire::{BodyReader, BodyWriter, Refusal, Role, Status};
use netvm_sys::epoll::{Epoll, Interest, Ready};
use netvm_sys::net::{Address, Listener};
use netvm_sys::shared::SharedSlice;

use super::clearing::Pace;
use super::memories::Memories;
use super::protocol::{self, BorrowAnswer, BorrowerStatus, LenderStatus, Recall};
use super::recall::counted;
use super::stop::StopFlag;
use super::tickets::Tickets;
use crate::error::{Error, LenderLimit, Result};
use crate::link::Link;
use crate::link::greeting::{self, Greeted, Greeting, Transport};
use crate::link::paused::Paused;
use crate::link::session::{Failure, Memory, Session};
use crate::link::spin::Spin;
use crate::security::{Protection, Security};
use crate::shm::meeting::Invited;
use datagrams::Readers;
use view::{Returns, View, do_jobs};

mod datagrams;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod meeting;
mod view;

/// Most connections at once.
const CONNECTIONS_MAX: usize = 4096;
/// Receives for one connection before the others have their turn.
const ROUNDS_MAX: usize = 8;
/// Parts of slabs are given back in pages.
const PAGE_BYTES: u64 = 4096;
const STOP_ID: u64 = u64::MAX;
const PARENT_ID: u64 = u64::MAX - 1;
/// Listeners have the numbers from here on,
const LISTENER_ID: u64 = 1 << 32;
/// and sockets for datagrams from here on.
const DATAGRAM_ID: u64 = 1 << 33;
pub(super) const TICK: Duration = Duration::from_millis(500);

/// How to lend.
#[derive(Clone, Debug)]
pub struct LenderConfig {
    /// Where to listen: `HOST:PORT` (port 0 for any free one) or `unix:/path`.
    pub listen: Vec<String>,
    /// Bytes to lend; rounded down to whole slabs.
    pub size_bytes: u64,
    /// Bytes of one slab: a multiple of 4096.
    pub slab_bytes: u64,
    /// Lend from a file without a name in this folder, not from memory.
    pub folder: Option<PathBuf>,
    /// Keep pages packed: then `size_bytes` is the memory that it may use, not what it lends.
    pub compress: Option<Compress>,
    /// Ask the kernel for huge pages.
    pub hugepages: bool,
    /// End when the last borrower has gone and `parent_fd` has reached its end.
    pub private: bool,
    /// What `private` watches: standard input if `None`.
    pub parent_fd: Option<RawFd>,
    /// Microseconds to look for the next request before sleeping, while they come in quick succession: 0 never, `None` 50 where there
    /// are several CPUs.
    pub spin_us: Option<u32>,
    /// Tell on standard error who comes and goes.
    pub verbose: bool,
    /// Memory that is to stay available on this machine, in bytes: when there is less, borrowers are asked to give some back. 0: none.
    pub reserve_bytes: u64,
    /// Borrowers are asked to give memory back when something has waited for memory for so many hundredths of a percent of the last 10 s
    /// ([`LenderConfig::pressure_file`]). 0: never.
    pub stall: u32,
    /// What tells that: `/proc/pressure/memory`, or the `memory.pressure` of a control group.
    pub pressure_file: PathBuf,
    /// What tells how much is available.
    pub meminfo_file: PathBuf,
    /// Most bytes for one borrower, rounded down to whole slabs; 0: as many as there are.
    pub quota_bytes: u64,
    /// A borrower that has not answered for so long has its memory taken away, though its connection stands. `None`: never.
    pub lease_timeout: Option<Duration>,
    /// When it has been asked to stop, it waits for so long until borrowers have moved what they have to others. `None`: as long as it
    /// takes.
    pub leave_timeout: Option<Duration>,
    /// Have the kernel answer reads of pagers, where it may be had for that ([datagrams](../../../../docs/design/datagrams.md)): Linux 6.6, CAP_BPF and CAP_NET_ADMIN.
    pub kernel_reads: bool,
    /// Who may connect. Without a secret it listens on loopback and unix sockets only.
    pub security: Security,
}

/// How to lend more memory than there is.
#[derive(Clone, Debug)]
pub struct Compress {
    /// Most bytes to lend, at most 16 times the memory; how many it really lends follows from how much they shrink.
    pub lend_bytes: u64,
    /// Where a file is kept for what does not shrink, without a name, and with room for everything that is lent. Without one no more is lent than has
    /// room as it is.
    pub overflow: Option<PathBuf>,
}

impl Default for LenderConfig {
    fn default() -> Self {
        Self {
            listen: vec!["127.0.0.1:0".to_owned()],
            size_bytes: 1 << 30,
            slab_bytes: 16 << 20,
            folder: None,
            compress: None,
            hugepages: false,
            private: false,
            parent_fd: None,
            spin_us: Some(0),
            verbose: false,
            reserve_bytes: 0,
            stall: 0,
            pressure_file: PathBuf::from("/proc/pressure/memory"),
            meminfo_file: PathBuf::from("/proc/meminfo"),
            quota_bytes: 0,
            lease_timeout: None,
            leave_timeout: None,
            kernel_reads: false,
            security: Security::default(),
        }
    }
}

/// Somebody who has connected.
pub(super) enum Peer {
    /// Has not said hello yet.
    Greeting(Greeting),
    /// Is served.
    Served(Box<Served>),
}

pub(super) struct Served {
    pub(super) session: Session<Transport>,
    role: Role,
    pub(super) lease: Option<LeaseId>,
    pub(super) name: String,
    pub(super) pid: u32,
    /// When something came from it.
    pub(super) heard: Instant,
    /// It has been asked whether it is there, and that it leaves.
    pub(super) pinged: bool,
    pub(super) asked_to_leave: bool,
    /// What it is to be asked for, and whether it has not answered the last time yet.
    pub(super) wish: Option<Recall>,
    pub(super) asking: bool,
    /// It has said that it cannot give back what it was asked for.
    pub(super) cannot: bool,
    ops: u64,
    returns: Returns,
    waits_for_room: bool,
    /// Met on this host, and not yet proved to be the session's borrower.
    met: Option<Invited>,
}

impl Served {
    fn parts<'a>(&'a mut self, memories: &'a Memories) -> (&'a mut Session<Transport>, View<'a>) {
        let Self { session, lease, returns, ops, .. } = self;
        (session, View { memories, lease: *lease, returns, ops })
    }
}

/// A lender that listens.
pub struct Lender {
    pub(super) config: LenderConfig,
    /// By which it is told from others.
    identity: [u8; 16],
    listeners: Vec<Listener>,
    pub(super) memories: Memories,
    readers: Readers,
    epoll: Epoll,
    pub(super) peers: Vec<Option<Peer>>,
    pub(super) recalls: Recalls,
    /// When it ends, whoever has not left by then.
    leave_by: Option<Instant>,
    tickets: Tickets,
    pub(super) started: Instant,
    pub(super) ticked: Instant,
    /// Reads and writes of those who have gone.
    past_ops: u64,
    rate: (Instant, u64, u64),
    pub(super) draining: bool,
    /// It has said that nobody who is left can leave.
    pub(super) told_stuck: bool,
    parent_gone: bool,
    /// Listeners that could not accept.
    paused: Paused,
    pub(super) pace: Pace,
    /// This machine is short of memory.
    pub(super) is_short: bool,
}

impl std::fmt::Debug for Lender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lender").field("addresses", &self.addresses()).finish_non_exhaustive()
    }
}

impl Lender {
    /// Reserves the memory (it costs nothing until it is written) and listens.
    ///
    /// # Errors
    /// [`Error::Address`], [`Error::Listen`]; [`Error::Other`] for sizes that make no sense; [`Error::System`] when the kernel cannot
    /// reserve so much.
    pub fn bind(config: LenderConfig) -> Result<Self> {
        let slab_bytes = config.slab_bytes;
        if !is_slab(slab_bytes) {
            return Err(Error::Other(format!(
                "a slab of {slab_bytes} bytes cannot be lent; choose a multiple of 4096 up to 1 GiB"
            )));
        }
        let lend_bytes = config.compress.as_ref().map_or(config.size_bytes, |compress| compress.lend_bytes);
        let count = lend_bytes / slab_bytes;
        if count == 0 || count > SLABS_MAX {
            return Err(Error::Other(format!(
                "cannot lend {lend_bytes} bytes in slabs of {slab_bytes} bytes: that makes {count} slabs, and 1 to {SLABS_MAX} are possible"
            )));
        }
        let memories = match &config.compress {
            None => Memories::new(count as u32, slab_bytes, config.hugepages, config.folder.as_deref())?,
            Some(_) if config.folder.is_some() || config.hugepages => {
                return Err(Error::Other("packed pages are lent from memory, in pages of 4 KiB".to_owned()));
            }
            Some(compress) => Memories::packed(config.size_bytes, slab_bytes, compress)?,
        };
        let epoll = Epoll::new().map_err(|error| Error::system("make an epoll set", &error))?;
        let mut listeners = Vec::new();
        for text in &config.listen {
            let address: Address = text.parse().map_err(|reason: &str| Error::Address {
                address: text.clone(),
                reason: reason.to_owned(),
            })?;
            let listener = Listener::bind(&address).map_err(|error| Error::listen(text.clone(), &error))?;
            // Nobody is accepted before this.
            config.security.check_listener(listener.address())?;
            let id = LISTENER_ID + listeners.len() as u64;
            watch(&epoll, listener.as_fd(), id)?;
            listeners.push(listener);
        }
        let now = Instant::now();
        let mut identity = [0; 16];
        getrandom::fill(&mut identity)
            .map_err(|error| Error::system("get random bytes", &std::io::Error::other(error.to_string())))?;
        Ok(Self {
            config,
            identity,
            listeners,
            memories,
            readers: Readers::default(),
            epoll,
            peers: Vec::new(),
            recalls: Recalls::new(),
            leave_by: None,
            tickets: Tickets::default(),
            started: now,
            ticked: now,
            past_ops: 0,
            rate: (now, 0, 0),
            draining: false,
            told_stuck: false,
            parent_gone: false,
            paused: Paused::default(),
            pace: Pace::new(now),
            is_short: false,
        })
    }

    /// Where it listens, with the real ports.
    pub fn addresses(&self) -> Vec<String> {
        self.listeners.iter().map(|listener| listener.address().to_string()).collect()
    }

    /// Serves until it is stopped.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel does not let it wait; nothing that a borrower does.
    pub fn run(&mut self, stop: &StopFlag) -> Result<()> {
        watch(&self.epoll, stop.as_fd(), STOP_ID)?;
        let parent = match self.config.parent_fd {
            _ if !self.config.private => None,
            Some(fd) => netvm_sys::net::own_raw_fd(fd).ok(),
            None => std::io::stdin().as_fd().try_clone_to_owned().ok(),
        };
        // A descriptor that cannot be waited for (/dev/null, a file) is at its end already.
        self.parent_gone = match &parent {
            Some(fd) => watch(&self.epoll, fd.as_fd(), PARENT_ID).is_err(),
            None => self.config.private,
        };
        let result = self.serve(stop, parent.as_ref().map(AsFd::as_fd));
        let _ = self.epoll.remove(stop.as_fd());
        result
    }

    fn serve(&mut self, stop: &StopFlag, parent: Option<BorrowedFd<'_>>) -> Result<()> {
        let mut ready = Vec::new();
        let mut next_tick = Instant::now() + TICK;
        let mut spin = Spin::server(self.config.spin_us);
        loop {
            if self.draining && self.borrowers() == 0 {
                return Ok(());
            }
            if self.config.private && self.parent_gone && self.peers.iter().all(Option::is_none) {
                return Ok(());
            }
            if self.leave_by.is_some_and(|by| Instant::now() >= by) {
                let (left, bytes) = (counted(self.borrowers()), self.memories.slabs.used_bytes());
                self.say(format_args!(
                    "the time to leave is over: {} MiB lent to {left} are lost",
                    bytes >> 20
                ));
                return Ok(());
            }
            let patience = self.clear_ahead(!ready.is_empty());
            let waited = spin.wait_for(&self.epoll, &mut ready, patience);
            waited.map_err(|error| Error::system("wait for borrowers", &error))?;
            for &Ready { id, interest } in &ready {
                match id {
                    STOP_ID => {
                        if stop.take() > 1 || self.draining {
                            return Ok(());
                        }
                        self.draining = true;
                        // Nobody waits as long as one that is beyond all clocks.
                        self.leave_by =
                            self.config.leave_timeout.and_then(|timeout| Instant::now().checked_add(timeout));
                        match self.borrowers() {
                            0 => self.say(format_args!("asked to stop")),
                            some => self.say(format_args!("asked to stop: waiting for {}", counted(some))),
                        }
                        self.ask_all_to_leave();
                    }
                    PARENT_ID => {
                        if let Some(parent) = parent
                            && netvm_sys::net::at_end(parent)
                        {
                            let _ = self.epoll.remove(parent);
                            self.parent_gone = true;
                        }
                    }
                    DATAGRAM_ID.. => self.answer_datagrams((id - DATAGRAM_ID) as usize),
                    LISTENER_ID.. => self.accept((id - LISTENER_ID) as usize),
                    _ => self.attend(id as usize, interest),
                }
            }
            if Instant::now() >= next_tick {
                next_tick = Instant::now() + TICK;
                self.tick();
            }
        }
    }

    pub(super) fn say(&self, what: std::fmt::Arguments<'_>) {
        if self.config.verbose {
            // Where this goes may be closed, or on a disk that is full: no reason not to serve.
            let _ = writeln!(std::io::stderr(), "netvm lend: {what}");
        }
    }

    fn borrowers(&self) -> usize {
        let borrows =
            |peer: &&Option<Peer>| matches!(peer, Some(Peer::Served(served)) if served.lease.is_some());
        self.peers.iter().filter(borrows).count() + self.tickets.count()
    }

    fn tick(&mut self) {
        let now = Instant::now();
        self.paused.resume(&self.epoll, LISTENER_ID, |index| self.listeners.get(index));
        for index in 0..self.peers.len() {
            if matches!(&self.peers[index], Some(Peer::Greeting(greeting)) if greeting.is_late(now)) {
                self.peers[index] = None;
            }
        }
        for lease in self.tickets.take_stale(now) {
            self.close(lease);
        }
        self.forgive(now);
        self.memories.tick();
        self.look_after_memory(now);
        self.look_after_borrowers(now);
        let (since, before, _) = self.rate;
        let ops = self.ops();
        let seconds = (now - since).as_secs_f64();
        if seconds >= 0.4 {
            self.rate = (now, ops, ((ops - before) as f64 / seconds) as u64);
        }
    }

    fn ops(&self) -> u64 {
        let ops = |peer: &Option<Peer>| match peer {
            Some(Peer::Served(served)) => served.ops,
            _ => 0,
        };
        self.past_ops + self.peers.iter().map(ops).sum::<u64>()
    }

    fn accept(&mut self, listener: usize) {
        // A few at a time; the rest stays in the kernel's queue. Out of descriptors: those waiting wait on.
        for _ in 0..ROUNDS_MAX {
            let stream = match self.listeners[listener].accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(error) => {
                    // Out of descriptors: who waits is accepted at a later tick, and until then does not keep us awake.
                    self.say(format_args!("cannot accept a connection: {error}"));
                    self.paused.pause(&self.epoll, &self.listeners[listener], listener);
                    return;
                }
            };
            let index = match self.peers.iter().position(Option::is_none) {
                Some(index) => index,
                None if self.peers.len() < CONNECTIONS_MAX => {
                    self.peers.push(None);
                    self.peers.len() - 1
                }
                None => {
                    greeting::refuse(&stream, Role::Lender, Refusal::Busy);
                    continue;
                }
            };
            if watch(&self.epoll, stream.as_fd(), index as u64).is_ok() {
                self.limit_half_open();
                self.peers[index] = Some(Peer::Greeting(Greeting::new(stream, Role::Lender)));
            }
        }
    }

    /// Closes the oldest half-open connection when there are too many: who means it says hello sooner.
    fn limit_half_open(&mut self) {
        let since = |(index, peer): (usize, &Option<Peer>)| match peer {
            Some(Peer::Greeting(greeting)) => Some((greeting.since(), index)),
            _ => None,
        };
        let half_open = || self.peers.iter().enumerate().filter_map(since);
        if half_open().count() >= HALF_OPEN_MAX
            && let Some((_, oldest)) = half_open().min()
        {
            self.peers[oldest] = None;
        }
    }

    pub(super) fn attend(&mut self, index: usize, interest: Interest) {
        let Some(peer) = self.peers.get_mut(index).and_then(Option::take) else { return };
        match peer {
            Peer::Greeting(greeting) => {
                self.peers[index] = self.greet(greeting);
                if matches!(self.peers[index], Some(Peer::Served(_))) {
                    self.attend(index, Interest { readable: true, writable: false });
                }
            }
            Peer::Served(mut served) => match self.converse(index, &mut served, interest) {
                Ok(()) => self.peers[index] = Some(Peer::Served(served)),
                Err(failure) => {
                    self.recalls.forget(index as u64);
                    self.part(*served, &failure);
                }
            },
        }
    }

    fn greet(&mut self, greeting: Greeting) -> Option<Peer> {
        let arrival = match greeting.progress(&self.config.security) {
            Greeted::Waiting(greeting) => return Some(Peer::Greeting(greeting)),
            Greeted::Hello(arrival) => arrival,
            Greeted::Gone(why) => {
                self.say(format_args!("closed a connection: {why}"));
                return None;
            }
        };
        let theirs = arrival.hello;
        let refusal = match theirs.role {
            _ if theirs.rails != 1 => Refusal::Role,
            Role::Observer => Refusal::None,
            // A fork of one that is there comes with a ticket.
            Role::Borrower if self.draining && self.tickets.count() == 0 => Refusal::Stopping,
            Role::Borrower => Refusal::None,
            Role::Node | Role::Lender | Role::Transfer | Role::Mount => Refusal::Role,
        };
        if refusal != Refusal::None {
            arrival.refuse(refusal);
            return None;
        }
        let transport = arrival.accept()?;
        Some(Peer::Served(Box::new(Served {
            session: Session::new(vec![transport], theirs.ops_max, theirs.window),
            role: theirs.role,
            lease: None,
            name: String::new(),
            pid: 0,
            heard: Instant::now(),
            pinged: false,
            asked_to_leave: false,
            wish: None,
            asking: false,
            cannot: false,
            ops: 0,
            returns: Returns::default(),
            waits_for_room: false,
            met: None,
        })))
    }

    /// Receives, serves and answers.
    fn converse(&mut self, index: usize, served: &mut Served, interest: Interest) -> Result<(), Failure> {
        if interest.readable {
            if self.config.lease_timeout.is_some() {
                (served.heard, served.pinged) = (Instant::now(), false);
            }
            for _ in 0..ROUNDS_MAX {
                let (session, mut view) = served.parts(&self.memories);
                let more = session.receive(0, &mut view)?;
                do_jobs(session, &mut view)?;
                while let Some(event) = served.session.event() {
                    match event {
                        Event::Called { request, method, body } => {
                            if method == protocol::CANNOT {
                                served.cannot = true;
                                self.recalls.cannot(index as u64);
                            }
                            self.called(served, request, method, &body);
                        }
                        Event::Goodbye { .. } => return Err(Failure::Ended),
                        Event::Completed { token, .. } => served.answered(token),
                        Event::WriteRefused(_) => {}
                    }
                }
                if !more {
                    break;
                }
            }
        }
        let (session, mut view) = served.parts(&self.memories);
        let sent = loop {
            // Reads that waited until others were sent may have to be done first.
            match session.send(0, &mut view) {
                Ok(()) if do_jobs(session, &mut view)? => {}
                sent => break sent,
            }
        };
        self.take_back(served);
        sent?;
        let waits_for_room = served.session.has_output();
        if waits_for_room != served.waits_for_room {
            served.waits_for_room = waits_for_room;
            let interest = Interest { readable: true, writable: waits_for_room };
            let fd = served.session.link(0).wait_fd();
            self.epoll.change(fd, index as u64, interest).map_err(Failure::Link)?;
        }
        Ok(())
    }

    pub(super) fn part(&mut self, served: Served, failure: &Failure) {
        let Served { session, ops, role, lease, name, pid, .. } = served;
        self.past_ops += ops;
        // First: who reads its memory by itself must not see it change while nothing tells that it is over.
        drop(session);
        if role != Role::Borrower {
            return;
        }
        let bytes = lease.map_or(0, |lease| self.memories.slabs.lease_bytes(lease));
        if let Some(lease) = lease {
            self.tickets.forget_parent(lease);
            self.close(lease);
        }
        self.say(format_args!("{name} (pid {pid}) has gone, {} MiB come back: {failure}", bytes >> 20));
    }

    fn close(&mut self, lease: LeaseId) {
        self.readers.close(lease);
        self.memories.close(lease);
    }

    fn called(&mut self, served: &mut Served, request: Request, method: u32, body: &[u8]) {
        let answer = self.answer(served, method, body);
        served.session.endpoint.reply(request, answer);
    }

    fn answer(&mut self, served: &mut Served, method: u32, body: &[u8]) -> Result<Vec<u8>, Status> {
        let mut reader = BodyReader(body);
        let mut out = BodyWriter::default();
        if method == protocol::STATUS {
            return Ok(self.status().encode());
        }
        if served.role != Role::Borrower {
            return Err(Status::NoRights);
        }
        if method == protocol::ATTACH {
            let key = reader.key().ok_or(Status::BadRequest)?;
            let pid = reader.u32().ok_or(Status::BadRequest)?;
            let name = reader.text().ok_or(Status::BadRequest)?;
            if served.lease.is_some() {
                return Err(Status::BadRequest);
            }
            let lease = self.lease(&key)?;
            // Control characters would let a borrower paint the lender's terminal.
            let name = name.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
            (served.lease, served.pid, served.name) = (Some(lease), pid, name);
            self.say(format_args!("{} (pid {pid}) has come", served.name));
            out.u64(self.memories.slabs.slab_bytes());
            return Ok(out.0);
        }
        let lease = served.lease.ok_or(Status::BadRequest)?;
        if method == protocol::BORROW {
            let (quota, before) = (self.config.quota_bytes, self.memories.limit);
            let held = match quota {
                0 => 0,
                _ => self.memories.slabs.together_bytes(self.tickets.forks_of(lease).chain([lease])),
            };
            let beyond = quota > 0 && held + self.memories.slabs.slab_bytes() > quota;
            let pressed = reader.u32() == Some(1);
            let slab = if beyond { None } else { self.memories.borrow(lease, pressed).ok() };
            let slabs = &self.memories.slabs;
            let (size_bytes, used_bytes) =
                if beyond { (quota, held) } else { (slabs.size_bytes(), slabs.used_bytes()) };
            let limit = match beyond {
                true => LenderLimit::Quota,
                false => self.memories.limit,
            };
            match limit {
                _ if limit == before => {}
                LenderLimit::Disk => {
                    self.say(format_args!("the disk is full: there is no room for another slab"));
                }
                LenderLimit::Memory => {
                    let used = used_bytes >> 20;
                    self.say(format_args!(
                        "the {used} MiB that are lent do not shrink enough for another slab; who finds none elsewhere gets it on disk"
                    ));
                }
                LenderLimit::Size | LenderLimit::Quota => {}
            }
            return Ok(BorrowAnswer { slab, size_bytes, used_bytes, limit }.encode());
        }
        let slabs = &mut self.memories.slabs;
        match method {
            protocol::RETURN => {
                let slab = reader.u32().ok_or(Status::BadRequest)?;
                if !slabs.holds(lease, slab) || served.returns.waiting.contains(&slab) {
                    return Err(Status::NoHandle);
                }
                served.returns.waiting.push(slab);
                // What was asked for before is answered first.
                let Served { session, lease, returns, ops, .. } = served;
                let mut view = View { memories: &self.memories, lease: *lease, returns, ops };
                session.endpoint.given_back(slab, &mut view);
                self.take_back(served);
            }
            protocol::FORK if !self.tickets.has_room(lease) => return Err(Status::Busy),
            protocol::FORK => {
                let mut key = [0; 16];
                getrandom::fill(&mut key).map_err(|_| Status::Busy)?;
                let fork = self.memories.fork(lease).map_err(|_| Status::Busy)?;
                for &slab in &served.returns.waiting {
                    let _ = self.memories.slabs.give_back(fork, slab);
                }
                self.tickets.add(key, fork, lease);
                out.bytes(&key);
            }
            protocol::SOLE => {
                let slab = reader.u32().ok_or(Status::BadRequest)?;
                let sole = self.memories.is_sole(lease, slab).map_err(|_| Status::NoHandle)?;
                out.u32(u32::from(sole));
            }
            protocol::CANNOT => {}
            protocol::RENOUNCE => self.memories.renounce(lease),
            protocol::KIND => drop(out.u32(self.memories.class().kind()).bytes(&self.identity)),
            protocol::DISCARD => {
                let (slab, offset, bytes) = range(slabs, lease, &mut reader)?;
                let ended = self.memories.discard(slab, offset, bytes);
                self.readers.ended(&ended);
            }
            protocol::MEET => self.meet(served, lease, body)?,
            protocol::DATAGRAMS => {
                let (port, key) = self.admit_reader(served, lease)?;
                out.u32(port.into()).bytes(&key);
            }
            protocol::FILE => return self.give_files(served, lease, reader.u32() == Some(1)),
            protocol::PROVIDE => {
                let (slab, offset, bytes) = range(slabs, lease, &mut reader)?;
                if bytes > UNIT_BYTES || !self.memories.provide(lease, slab, offset, bytes) {
                    return Err(Status::Full);
                }
            }
            _ => return Err(Status::NoMethod),
        }
        Ok(out.0)
    }

    /// The borrower has been sent what it had asked for of these slabs: they are lent to others.
    fn take_back(&mut self, served: &mut Served) {
        while let Some(slab) = served.returns.over.pop() {
            served.returns.waiting.retain(|&waiting| waiting != slab);
            // The rest of a write that came too late.
            served.session.endpoint.revoke(slab, |_, bytes| vec![0; bytes as usize]);
            if let Some(lease) = served.lease {
                self.readers.returned(lease, slab);
                let _ = self.memories.slabs.give_back(lease, slab);
            }
        }
    }

    /// A new lease, or the one that a ticket stands for.
    fn lease(&mut self, key: &[u8; 16]) -> Result<LeaseId, Status> {
        if *key == [0; 16] {
            if self.draining {
                return Err(Status::Busy);
            }
            return self.memories.slabs.open().map_err(|error| match error {
                SlabError::TooManyLeases | SlabError::Full | SlabError::NotHeld => Status::Busy,
            });
        }
        self.tickets.claim(key).ok_or(Status::NoSegment)
    }

    /// How it is doing.
    pub fn status(&self) -> LenderStatus {
        let slabs = &self.memories.slabs;
        let borrower = |(index, peer): (usize, &Option<Peer>)| match peer {
            Some(Peer::Served(served)) => served.lease.map(|lease| {
                let bytes = slabs.lease_bytes(lease);
                let recalled = self.recalls.asked_of(index as u64, bytes);
                BorrowerStatus {
                    name: served.name.clone(),
                    pid: served.pid,
                    bytes,
                    ops: served.ops,
                    nearby: self.memories.has_file(lease),
                    recalled_bytes: if served.asked_to_leave { bytes } else { recalled },
                    cannot: served.cannot && (served.asked_to_leave || recalled > 0),
                }
            }),
            _ => None,
        };
        LenderStatus {
            version: VERSION,
            size_bytes: slabs.size_bytes(),
            used_bytes: slabs.used_bytes(),
            resident_bytes: self.memories.resident_bytes(),
            slab_bytes: slabs.slab_bytes(),
            uptime: self.started.elapsed(),
            ops: self.ops(),
            ops_per_s: self.rate.2,
            draining: self.draining,
            missing_bytes: self.recalls.missing(),
            stuck: self.recalls.is_stuck(),
            quota_bytes: self.config.quota_bytes,
            borrowers: self.peers.iter().enumerate().filter_map(borrower).collect(),
            class: self.memories.class(),
            memory_bytes: self.memories.packed_bytes().0,
            spilled_bytes: self.memories.packed_bytes().1,
            kernel_reads: self.readers.by_kernel(),
            protection: Protection::None,
        }
    }
}

/// Whole pages of a slab that the lease holds.
fn range(slabs: &Slabs, lease: LeaseId, reader: &mut BodyReader<'_>) -> Result<(u32, u64, u64), Status> {
    let range = (reader.u32(), reader.u64(), reader.u64());
    let (Some(slab), Some(offset), Some(bytes)) = range else { return Err(Status::BadRequest) };
    if !slabs.holds(lease, slab) {
        return Err(Status::NoHandle);
    }
    let end = offset.checked_add(bytes).filter(|&end| end <= slabs.slab_bytes());
    end.ok_or(Status::OutOfBounds)?;
    if (offset | bytes) % PAGE_BYTES != 0 {
        return Err(Status::BadRequest);
    }
    Ok((slab, offset, bytes))
}

fn watch(epoll: &Epoll, fd: BorrowedFd<'_>, id: u64) -> Result<()> {
    let added = epoll.add(fd, id, Interest { readable: true, writable: false });
    added.map_err(|error| Error::system("watch a descriptor", &error))
}
