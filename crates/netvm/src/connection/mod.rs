//! One session of a node: its links, and the users that wait for its operations.

pub(crate) mod gather;
mod paging;
mod polling;
mod posted;
mod pulse;
mod ride;
#[cfg(test)]
mod tests;
mod waiting;

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use netvm_core::channel::Notice;
use netvm_core::copy;
use netvm_core::endpoint::{Answer, Event, OpError, PostError, Request};
use netvm_core::epoch::Incarnation;
use netvm_core::limits::TICKETS_MAX;
use netvm_core::notify::Notify;
use netvm_core::segment::ImportTable;
use netvm_core::sync::{SessionId, Signal, Ticket};
use netvm_core::wire::Status;
use netvm_sys::epoll::Interest;
use netvm_sys::mapping::Mapping;

use crate::channel::{CHANNEL_HANDLE, Heard, Notices};
use crate::copier;
use crate::error::{Error, Result};
use crate::link::Link;
use crate::link::session::{Failure, Session};
use crate::link::spin::Trial;
use crate::node::{Inbox, Shared, View, lock, lock_by};
use crate::region::WriteOptions;
use crate::shm::export::Sharing;
use crate::shm::import::Neighbour;
use crate::shm::mapped::Beside;
use crate::sync::SYNC_HANDLE;
use gather::{Gather, Step};
use posted::Targets;
use ride::Ride;

/// A peer that does not answer for so long has failed.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Who waits for room behind somebody who waits for an answer looks again after so long.
const PATIENCE: Duration = Duration::from_millis(1);
/// A session that ends waits so long for its links to take what is queued.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(200);
/// And so long for what paging threads execute for it.
const PAGING_TIMEOUT: Duration = Duration::from_millis(200);
/// Who waits looks for so long before sleeping, when that pays: about what sleeping and being woken cost where it is dear.
pub(crate) const LOOK_MAX: Duration = Duration::from_micros(100);
/// Receives on one rail before the others have their turn.
const ROUNDS_MAX: usize = 16;
/// Receives on one rail of a session that has ended: more than a socket holds.
const FAREWELL_ROUNDS_MAX: usize = 256;
/// A wait without end: the clock has one.
pub(crate) const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
/// The node's thread looks by itself at a peer at which it found something so often, and only then is not told any more.
const FINDS_MIN: u32 = 32;
/// Polls without anything received after which a peer is quiet.
const QUIET_POLLS: u32 = 64;

/// Who has wanted a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The program.
    Program,
    /// Another peer, for a copy.
    Copy,
    /// The peer itself.
    Peer,
}

/// A session with one peer, shared by its users and the node's thread.
pub(crate) struct PeerSession {
    shared: Arc<Shared>,
    me: Weak<PeerSession>,
    pub(crate) address: String,
    /// What its connections are made of. They are closed when it ends.
    pub(crate) link: &'static str,
    pub(crate) origin: Origin,
    id: u64,
    pub(crate) session: SessionId,
    /// The peer has connected, and nobody has got it from [`crate::node::Node::accept`] yet.
    pub(crate) arrived: AtomicBool,
    /// The number of a session that the peer has opened.
    pub(crate) came_as: OnceLock<Incarnation>,
    state: Mutex<State>,
    /// An operation has ended, or nobody leads any more. Told by [`PeerSession::tell_followers`] only.
    changed: Condvar,
    /// What a peer on this host has mapped for us.
    pub(crate) neighbour: Neighbour,
    pub(crate) beside: Beside,
    /// Microseconds until the next tick, for who does not get the lock.
    pace_us: AtomicU32,
    /// Polls since something was last received.
    quiet: AtomicU32,
    /// How often who waited went to sleep,
    #[cfg(test)]
    sleeps: AtomicU32,
    /// and how often the node's thread was told to leave it alone.
    #[cfg(test)]
    leases: AtomicU32,
}

/// While those who wait or poll watch the links, the node's thread comes by so often, to see whether they still do.
pub(crate) const LEASE_TICK: Duration = Duration::from_micros(200);
/// And so often when they always did: each visit of its takes some of their time.
pub(crate) const LEASE_TICK_MAX: Duration = Duration::from_micros(1600);

pub(crate) struct State {
    pub(crate) session: Session<Box<dyn Link>>,
    pub(crate) imports: ImportTable,
    /// A few at most, by token.
    ended: BTreeMap<u64, Result<Answer, OpError>>,
    targets: Targets,
    pub(crate) next_token: u64,
    /// A user waits on the links itself; the node's thread keeps out.
    led: bool,
    /// Who waits for the leader.
    followers: u32,
    watches_room: bool,
    /// Nothing is received for now: operations on memory that is not there hold all that they may.
    watches_no_input: bool,
    /// The node's thread does not even learn of an end.
    unwatched: bool,
    /// How often it found something when it looked by itself.
    finds: u32,
    /// What they hold, as the node knows it, in bytes.
    bounced: usize,
    gather: Gather,
    ride: Ride,
    look: Trial,
    /// The same for turns: these waits may be long where answers are quick.
    look_for_turn: Trial,
    /// The node's thread does not watch the links: those who wait or poll do, and it comes by with every tick. Saves telling it
    /// twice for each wait of a series.
    leased: bool,
    /// It has been told to tick.
    ticking: bool,
    /// Waits and polls since the last tick.
    visits: u32,
    series: u32,
    waited: Option<Instant>,
    pub(crate) broken: Option<Error>,
    pub(crate) bounces: Vec<Mapping>,
    pub(crate) inbox: Inbox,
    sharing: Sharing,
    pulses: Vec<pulse::Seen>,
    /// What is to be told to the peer's senders, until the window has room.
    notices: Notices,
    /// Posted writes as of the last look, and those of them that are not of the session itself.
    posted_writes: (u64, u64),
    /// The peer has been asked whether it has applied so many.
    asked: u64,
    /// Who copies to and from third nodes for the peer.
    pub(crate) copier: Option<mpsc::Sender<copier::Job>>,
}

impl State {
    /// Posts a notification of the session itself. Operations on mapped memory need not come behind it.
    fn post_notice(&mut self, handle: u32, options: WriteOptions) -> Result<(), PostError> {
        let endpoint = &mut self.session.endpoint;
        let (seen, _) = &mut self.posted_writes;
        let is_known = endpoint.posted_writes() == *seen;
        endpoint.post_write_copied(handle, 0, &[], options)?;
        if is_known {
            *seen = endpoint.posted_writes();
        }
        Ok(())
    }
}

impl PeerSession {
    pub(crate) fn new(
        shared: Arc<Shared>,
        links: Vec<Box<dyn Link>>,
        limits: (u32, u32),
        address: &str,
        id: u64,
        session: SessionId,
        origin: Origin,
    ) -> Arc<Self> {
        let link = links.first().map_or("", |link| link.caps().name);
        let state = State {
            session: Session::new(links, limits.0, limits.1),
            imports: ImportTable::default(),
            ended: BTreeMap::new(),
            targets: Targets::default(),
            next_token: 0,
            led: false,
            followers: 0,
            watches_room: false,
            watches_no_input: false,
            unwatched: false,
            finds: 0,
            bounced: 0,
            gather: Gather::default(),
            ride: Ride::default(),
            look: Trial::new(LOOK_MAX),
            look_for_turn: Trial::new(LOOK_MAX),
            leased: false,
            ticking: false,
            visits: 0,
            series: 0,
            waited: None,
            broken: None,
            bounces: Vec::new(),
            inbox: Inbox::default(),
            sharing: Sharing::default(),
            pulses: Vec::new(),
            notices: Notices::default(),
            posted_writes: (0, 0),
            asked: 0,
            copier: None,
        };
        let address = address.to_owned();
        let state = Mutex::new(state);
        Arc::new_cyclic(|me| Self {
            shared,
            me: Weak::clone(me),
            address,
            link,
            origin,
            id,
            session,
            arrived: AtomicBool::new(origin == Origin::Peer),
            came_as: OnceLock::new(),
            state,
            changed: Condvar::new(),
            pace_us: AtomicU32::new(0),
            // Until something comes: it may be one of many.
            quiet: AtomicU32::new(QUIET_POLLS),
            #[cfg(test)]
            sleeps: AtomicU32::new(0),
            #[cfg(test)]
            leases: AtomicU32::new(0),
            neighbour: Neighbour::default(),
            beside: Beside::default(),
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`PeerSession::lock`]; none when somebody has had it until the deadline.
    pub(crate) fn lock_by(&self, deadline: Instant) -> Option<MutexGuard<'_, State>> {
        lock_by(&self.state, deadline)
    }

    pub(crate) fn watch(&self) -> Result<()> {
        let state = self.lock();
        for rail in 0..state.session.endpoint.rails() {
            let fd = state.session.link(rail).wait_fd();
            let added = self.shared.epoll.add(
                fd,
                self.id + rail as u64,
                Interest { readable: true, writable: false },
            );
            added.map_err(|error| Error::system("watch a link", &error))?;
        }
        Ok(())
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().broken.is_some()
    }

    /// Ends the session; operations under way fail.
    pub(crate) fn close(&self, reason: &str) {
        self.close_locked(self.lock(), reason);
    }

    /// As [`PeerSession::close`], unless somebody waits for a page until the deadline.
    pub(crate) fn close_by(&self, reason: &str, deadline: Instant) {
        if let Some(state) = self.lock_by(deadline) {
            self.close_locked(state, reason);
        }
    }

    fn close_locked(&self, mut state: MutexGuard<'_, State>, reason: &str) {
        if state.broken.is_none() {
            state.session.endpoint.goodbye(Status::Stopping, reason);
            self.drain(&mut state);
            let error = Error::LenderLost { lender: self.address.clone(), reason: reason.to_owned() };
            self.break_off(&mut state, error);
        }
    }

    /// Ends the session at once: the peer has opened another in its place. Nothing more of it is executed.
    pub(crate) fn replace(&self) {
        let mut state = self.lock();
        let (lender, reason) = (self.address.clone(), "the peer has connected anew".to_owned());
        self.break_off(&mut state, Error::LenderLost { lender, reason });
    }

    /// Sends what is queued, for as long as the links take it: writes have completed that are still in the queue.
    fn drain(&self, state: &mut State) {
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        while self.send_all(state).is_ok() && state.session.has_output() {
            let left = deadline.saturating_duration_since(Instant::now());
            let events = libc::POLLOUT;
            let fd = |rail| state.session.link(rail).wait_fd().as_raw_fd();
            let rails = 0..state.session.endpoint.rails();
            let mut fds: Vec<_> =
                rails.map(|rail| libc::pollfd { fd: fd(rail), events, revents: 0 }).collect();
            if left.is_zero() || netvm_sys::thread::poll(&mut fds, Some(left.min(PATIENCE))).is_err() {
                return;
            }
        }
    }

    fn send_all(&self, state: &mut State) -> Result<(), Failure> {
        let State { session, imports, inbox, sharing, .. } = state;
        let mut view = View::new(&self.shared, self.session, imports, inbox, sharing);
        (0..session.endpoint.rails()).try_for_each(|rail| session.send(rail, &mut view))
    }

    fn break_off(&self, state: &mut State, error: Error) {
        if state.broken.is_some() {
            return;
        }
        for rail in 0..state.session.endpoint.rails() {
            let _ = self.shared.epoll.remove(state.session.link(rail).wait_fd());
        }
        state.broken = Some(error);
        state.copier = None;
        self.beside.end();
        state.sharing.end(&self.shared);
        state.session.endpoint.fail();
        self.account(state);
        self.collect(state);
        state.session.close_links();
        self.tell_followers(state);
        // What was locked for them passes on next.
        self.shared.pagers.forget(&self.me, PAGING_TIMEOUT);
        let mut home = lock(&self.shared.home);
        home.session_ended(self.session);
        let news = home.has_signals();
        drop(home);
        let mut hub = lock(&self.shared.hub);
        hub.session_ended(self.session);
        let news = news || hub.has_news();
        drop(hub);
        if news {
            self.shared.ring();
        }
    }

    /// Sends and receives what goes without waiting; true when something was received.
    fn progress(&self, state: &mut State) -> bool {
        self.progress_over(state, true)
    }

    /// As [`PeerSession::progress`], for who looks again, or sleeps where all rails can wake him: rails on which nothing has come for long
    /// are not looked at each time.
    fn glance(&self, state: &mut State) -> bool {
        self.progress_over(state, false)
    }

    fn progress_over(&self, state: &mut State, all_rails: bool) -> bool {
        if state.broken.is_some() {
            return false;
        }
        self.post_signals(state);
        self.exchange(state, all_rails).unwrap_or_else(|failure| {
            self.fail(state, &failure);
            true
        })
    }

    fn fail(&self, state: &mut State, failure: &Failure) {
        if !matches!(failure, Failure::Violation(_)) {
            self.read_farewell(state);
        }
        self.collect(state);
        let (lender, reason) = (self.address.clone(), failure.to_string());
        let error = match failure {
            Failure::Violation(_) => Error::Protocol { lender, reason },
            Failure::Link(_) | Failure::Ended => Error::LenderLost { lender, reason },
        };
        self.break_off(state, error);
    }

    /// Receives what had arrived when a link failed or ended: what was written before the end, and perhaps why it is one.
    fn read_farewell(&self, state: &mut State) {
        let State { session, imports, inbox, sharing, .. } = state;
        let mut view = View::new(&self.shared, self.session, imports, inbox, sharing);
        for rail in 0..session.endpoint.rails() {
            for _ in 0..FAREWELL_ROUNDS_MAX {
                if !matches!(session.receive(rail, &mut view), Ok(true)) {
                    break;
                }
            }
        }
    }

    fn exchange(&self, state: &mut State, all_rails: bool) -> Result<bool, Failure> {
        let before = state.session.received_bytes();
        let skips = state.session.skips_quiet() && !all_rails;
        for rail in 0..state.session.endpoint.rails() {
            let State { session, imports, inbox, sharing, .. } = &mut *state;
            let mut view = View::new(&self.shared, self.session, imports, inbox, sharing);
            session.send(rail, &mut view)?;
            if skips && session.is_quiet_on(rail) {
                continue;
            }
            for _ in 0..ROUNDS_MAX {
                if !session.receive(rail, &mut view)? {
                    break;
                }
            }
        }
        self.hand_out(state)?;
        self.collect(state);
        // Who has woken itself is told with the answer.
        self.post_signals(state);
        // Answers may go out on any rail: a write that arrived on one lets a read of another be served.
        let rails = if state.broken.is_none() { state.session.endpoint.rails() } else { 0 };
        for rail in 0..rails {
            let State { session, imports, inbox, sharing, .. } = &mut *state;
            let mut view = View::new(&self.shared, self.session, imports, inbox, sharing);
            session.send(rail, &mut view)?;
        }
        // Writes complete when they are sent.
        self.collect(state);
        let received = state.session.received_bytes() != before;
        if received {
            // Whoever received it: who polls must not leave it to the node's thread for ever.
            self.quiet.store(0, Ordering::Relaxed);
        }
        Ok(received)
    }

    fn collect(&self, state: &mut State) {
        self.publish(state);
        let mut any = false;
        while let Some(event) = state.session.event() {
            match event {
                Event::Completed { slot, token, result } => {
                    any = true;
                    match state.targets.take(slot, token) {
                        Some((what, target)) => target.end(self.outcome(state, what, result)),
                        None => drop(state.ended.insert(token, result)),
                    }
                }
                Event::Called { request, method, body } => self.called(state, request, method, body),
                Event::Goodbye { reason, .. } => {
                    let reason = String::from_utf8_lossy(&reason).chars().take(200).collect();
                    self.break_off(state, Error::LenderLost { lender: self.address.clone(), reason });
                }
                // The next flush tells.
                Event::WriteRefused(_) => {}
            }
        }
        if std::mem::take(&mut state.inbox.news) || any {
            self.tell_followers(state);
        }
    }

    /// A condition variable costs a system call even when nobody waits for it.
    fn tell_followers(&self, state: &State) {
        if state.followers > 0 {
            self.changed.notify_all();
        }
    }

    /// The peer calls what is not answered at once.
    fn called(&self, state: &mut State, request: Request, method: u32, body: Vec<u8>) {
        let status = match self.me.upgrade() {
            Some(me) if method == copy::METHOD => {
                if copier::submit(me, state, (request, body)) {
                    return;
                }
                Status::Busy
            }
            _ => Status::NoMethod,
        };
        state.session.endpoint.reply(request, Err(status));
    }

    /// Answers a call.
    pub(crate) fn answer(&self, request: Request, answer: Result<Vec<u8>, Status>) {
        let mut state = self.lock();
        if state.broken.is_none() {
            state.session.endpoint.reply(request, answer);
            self.progress(&mut state);
            if !state.led && !state.leased {
                self.arm(&mut state);
            }
        }
    }

    /// What the peer may reach, for those who act for it.
    pub(crate) fn with_view<R>(
        &self,
        act: impl FnOnce(&mut View<'_>) -> Result<R, Status>,
    ) -> Result<R, Status> {
        let mut state = self.lock();
        if state.broken.is_some() {
            return Err(Status::Stopping);
        }
        let State { imports, inbox, sharing, .. } = &mut *state;
        act(&mut View::new(&self.shared, self.session, imports, inbox, sharing))
    }

    pub(crate) fn node(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Posts an operation, waiting for room if need be.
    pub(crate) fn post<'a, R>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        mut post: impl FnMut(&mut State, u64) -> Result<R, PostError>,
    ) -> Result<(MutexGuard<'a, State>, u64)> {
        let token = state.next_token;
        state.next_token += 1;
        let (mut state, posted) =
            self.wait_until(state, "room for another operation", PATIENCE, |peer, state| {
                if let Some(error) = &state.broken {
                    return Some(Err(error.clone()));
                }
                let mut posted = post(state, token);
                if matches!(posted, Err(PostError::Full)) {
                    peer.glance(state);
                    // It may have made room, and of that nobody would wake us.
                    posted = match &state.broken {
                        Some(error) => return Some(Err(error.clone())),
                        None => post(state, token),
                    };
                }
                match posted {
                    Ok(_) => Some(Ok(())),
                    Err(PostError::Full) => None,
                    Err(error) => Some(Err(Error::Other(error.to_string()))),
                }
            });
        self.publish(&mut state);
        posted.map(|()| (state, token))
    }

    /// Tells mapped regions what is under way here.
    fn publish(&self, state: &mut State) {
        let endpoint = &state.session.endpoint;
        let (seen, counted) = &mut state.posted_writes;
        if endpoint.posted_writes() != *seen {
            (*seen, *counted) = (endpoint.posted_writes(), endpoint.posted_writes());
        }
        self.beside.publish(*counted, endpoint.filled_writes(), endpoint.applied_writes());
    }

    /// Calls the peer.
    pub(crate) fn call(&self, method: u32, body: &[u8]) -> Result<Vec<u8>> {
        let post = |state: &mut State, token| state.session.endpoint.post_call(token, method, body.to_vec());
        let (mut state, token) = self.post(self.lock(), post)?;
        state.ride.asked(Instant::now);
        match self.wait(state, token, "call")? {
            (_, Answer::Reply(body)) => Ok(body),
            _ => Err(Error::Other("a call was answered with something else".to_owned())),
        }
    }

    /// Sees to it that a copied write is sent: now, or together with others that follow closely. `tells` somebody: now.
    ///
    /// When the link takes only some of what is sent now, the rest is waited for. What is gathered is bounded by the queue, where
    /// posting waits.
    pub(crate) fn push<'a>(&'a self, mut state: MutexGuard<'a, State>, tells: bool) -> Result<()> {
        let endpoint = &state.session.endpoint;
        let bytes = (0..endpoint.rails()).map(|rail| endpoint.queued_bytes(rail)).sum();
        let gathered = state.gather.is_on();
        if state.gather.queued(bytes, Instant::now) == Step::Leave && !tells {
            return Ok(());
        }
        if let Err(failure) = self.send_all(&mut state) {
            self.fail(&mut state, &failure);
        }
        if state.gather.sent(Instant::now) {
            self.pace_us.store(gather::TICK.as_micros() as u32, Ordering::Relaxed);
            self.begin_ticks(&mut state);
        }
        if gathered && state.broken.is_none() {
            return Ok(());
        }
        let (state, pushed) =
            self.wait_until(state, "room on the link", PATIENCE, |_, state| match &state.broken {
                Some(error) => Some(Err(error.clone())),
                None => (!state.session.has_output()).then_some(Ok(())),
            });
        drop(state);
        pushed
    }

    /// Notifies the peer of something of the session itself, after everything written before.
    pub(crate) fn tell(&self, handle: u32, notify: Notify) -> Result<()> {
        let options = WriteOptions { notify: Some(notify), ..WriteOptions::default() };
        let post = |state: &mut State, _| state.post_notice(handle, options);
        let (state, _) = self.post(self.lock(), post)?;
        self.push(state, true)
    }

    /// As [`PeerSession::tell`], when a turn is over: with the next request, if it may `ride` and that is about to come.
    pub(crate) fn tell_released(&self, notify: Notify, ride: bool) -> Result<()> {
        let options = WriteOptions { notify: Some(notify), ..WriteOptions::default() };
        let post = |state: &mut State, _| state.post_notice(SYNC_HANDLE, options);
        let (mut state, _) = self.post(self.lock(), post)?;
        // Only where the node's thread comes by anyway: to tell it costs as much as to send.
        if !(ride && state.ride.is_on() && state.ticking) {
            if let Err(failure) = self.send_all(&mut state) {
                self.fail(&mut state, &failure);
            }
            self.leave_rest(&mut state);
        }
        state.ride.released(Instant::now());
        Ok(())
    }

    /// Waits for the signal of a ticket. `None` after `limit`.
    pub(crate) fn wait_signal(&self, ticket: Ticket, limit: Option<Duration>) -> Result<Option<Signal>> {
        let mut ready = |_: &Self, state: &mut State| match state.inbox.waiters.signal(ticket) {
            Some(signal) => Some(Ok(signal)),
            None => state.broken.clone().map(Err),
        };
        let mut state = self.lock();
        self.glance(&mut state);
        let limit = limit.unwrap_or(FOREVER).min(FOREVER);
        self.wait_for(state, limit, TIMEOUT, |state| &mut state.look_for_turn, &mut ready).1.transpose()
    }

    /// Tells one of the peer's waiters.
    pub(crate) fn signal(&self, ticket: Ticket, signal: Signal) {
        let mut state = self.lock();
        // A ticket is used again only when its signal has arrived, so no peer that keeps to this makes the queue longer.
        if state.inbox.signals.len() >= TICKETS_MAX {
            let reason = "it uses tickets again whose signals it has not received".to_owned();
            return self.break_off(&mut state, Error::Protocol { lender: self.address.clone(), reason });
        }
        state.inbox.signals.extend(signal.notify(ticket));
        self.send_signals(&mut state);
    }

    fn send_signals(&self, state: &mut State) {
        // Nothing is received here: what it asked for would bring more signals, and those who ask without being signalled would never
        // be served.
        self.post_signals(state);
        self.ask_what_is_applied(state);
        if state.broken.is_none()
            && let Err(failure) = self.send_all(state)
        {
            self.fail(state, &failure);
        }
        if !state.led && !state.leased {
            self.arm(state);
        } else if state.broken.is_none() && state.session.has_output() {
            // Whoever leads may be asleep without watching for room.
            self.begin_ticks(state);
        }
    }

    /// Tells one of the peer's senders.
    pub(crate) fn notice(&self, notice: Notice) {
        let mut state = self.lock();
        state.notices.push(notice);
        self.send_signals(&mut state);
    }

    /// The peer has not kept to the protocol.
    pub(crate) fn violated(&self, reason: &str) {
        let mut state = self.lock();
        let (lender, reason) = (self.address.clone(), reason.to_owned());
        self.break_off(&mut state, Error::Protocol { lender, reason });
    }

    /// What has been told to a sender of ours.
    pub(crate) fn hear(&self, slot: u16) -> Heard {
        self.lock().inbox.outlets.hear(slot)
    }

    /// As [`PeerSession::hear`]; nothing while somebody uses the session.
    pub(crate) fn try_hear(&self, slot: u16) -> Heard {
        self.state.try_lock().map_or_else(|_| Heard::default(), |mut state| state.inbox.outlets.hear(slot))
    }

    /// Waits until a sender of ours is told something. `None` after `limit`.
    pub(crate) fn wait_to_hear(&self, slot: u16, limit: Option<Duration>) -> Result<Option<Heard>> {
        let mut ready = |_: &Self, state: &mut State| {
            let heard = state.inbox.outlets.hear(slot);
            if heard.is_something() {
                return Some(Ok(heard));
            }
            state.broken.clone().map(Err)
        };
        let mut state = self.lock();
        self.glance(&mut state);
        let limit = limit.unwrap_or(FOREVER).min(FOREVER);
        self.wait_for(state, limit, TIMEOUT, |state| &mut state.look_for_turn, &mut ready).1.transpose()
    }

    fn post_signals(&self, state: &mut State) {
        while let Some(notify) = state.inbox.signals.front() {
            let options = WriteOptions { notify: Some(*notify), ..WriteOptions::default() };
            match state.post_notice(SYNC_HANDLE, options) {
                Err(PostError::Full) => break,
                Ok(()) | Err(_) => state.inbox.signals.pop_front(),
            };
        }
        while let Some(notify) = state.notices.first() {
            let options = WriteOptions { notify: Some(notify), ..WriteOptions::default() };
            match state.post_notice(CHANNEL_HANDLE, options) {
                Err(PostError::Full) => break,
                Ok(()) | Err(_) => state.notices.pop(),
            }
        }
    }
}

/// Closes the session when the last user has gone, if this side has opened it.
pub(crate) struct Connection {
    pub(crate) session: Arc<PeerSession>,
    pub(crate) closes: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.closes {
            self.session.close("the peer has closed the connection");
        }
    }
}
