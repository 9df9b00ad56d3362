//! The thread of a node.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use netvm_core::epoch::{Incarnation, Order};
use netvm_core::limits::{HALF_OPEN_MAX, HELLO_TIMEOUT_MS};
use netvm_core::wire::{Refusal, Role};
use netvm_sys::epoll::Ready;

use super::shared::{GREETING_ID, KICK_ID, LISTENER_ID, STOP_ID, Shared, add_peer, lock, watch};
use crate::connection::{LEASE_TICK_MAX, LOOK_MAX, Origin, PeerSession, gather};
use crate::link::Link;
use crate::link::greeting::{Greeted, Greeting, Transport};
use crate::link::paused::Paused;
use crate::link::spin::Trial;

/// Peers that are looked at directly, without asking epoll who has something.
const HOT_MAX: usize = 4;
/// One at which so many looks in a row found nothing is left to epoll.
const MISSES_MAX: u32 = 64;
/// Looks between two at everybody else, and at whether somebody wants the CPU.
const LOOKS_AT_HOT: u32 = 8;
/// Who comes back from yielding the CPU so late had to share it.
const AWAY: Duration = Duration::from_micros(50);
/// Then it does not look for so long, twice as long each time until looking is not disturbed.
const REST_MIN: Duration = Duration::from_millis(1);
const REST_MAX: Duration = Duration::from_millis(64);

/// A session whose rails are not complete.
pub(super) struct Forming {
    pub(super) session: [u8; 16],
    pub(super) rails: Vec<Option<Transport>>,
    pub(super) since: Instant,
}

/// The thread that serves a node's peers.
pub(super) struct Server {
    pub(super) shared: Arc<Shared>,
    pub(super) greetings: Vec<Option<Greeting>>,
    pub(super) forming: Vec<Forming>,
    /// Listeners that could not accept.
    paused: Paused,
    /// Channels that are looked after every `gather::TICK`, and when that was.
    pub(super) ticking: Vec<u64>,
    pub(super) ticked: Instant,
    /// When peers were looked after, and how often they are.
    pub(super) looked: Instant,
    pub(super) look_every: Duration,
    pub(super) started: Instant,
    /// About now.
    woke: Instant,
    pub(super) interval: Duration,
    pub(super) look: Trial,
    /// Who was served lately, with the looks that found nothing since. What they have to send is not watched for.
    pub(super) hot: Vec<(Arc<PeerSession>, u32)>,
    pub(super) looks: u32,
    /// Others wanted this CPU: no looking before then.
    pub(super) look_again: Instant,
    pub(super) rest: Duration,
}

impl Server {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let look_every = shared.look_every();
        Self {
            shared,
            greetings: Vec::new(),
            forming: Vec::new(),
            paused: Paused::default(),
            ticking: Vec::new(),
            ticked: Instant::now(),
            looked: Instant::now(),
            look_every,
            started: Instant::now(),
            woke: Instant::now(),
            interval: gather::TICK,
            look: Trial::new(LOOK_MAX),
            hot: Vec::new(),
            looks: 0,
            look_again: Instant::now(),
            rest: REST_MIN,
        }
    }

    pub(super) fn run(mut self) {
        let mut ready = Vec::new();
        let mut served = false;
        loop {
            let timeout = if self.ticking.is_empty() { self.look_every } else { self.interval };
            match self.wait(&mut ready, timeout, served) {
                Ok(looked) => served = looked,
                Err(_) => return,
            }
            for Ready { id, .. } in ready.drain(..) {
                match id {
                    STOP_ID => return,
                    KICK_ID => {
                        self.shared.kick.take();
                        self.ticking.append(&mut lock(&self.shared.ticking));
                        self.interval = gather::TICK;
                        self.look_every = self.shared.look_every();
                    }
                    GREETING_ID.. => self.greet((id - GREETING_ID) as usize),
                    LISTENER_ID.. => self.accept((id - LISTENER_ID) as usize),
                    _ => {
                        if let Some(peer) = self.shared.peer(id) {
                            peer.serve(id);
                            served = true;
                            self.heat(peer);
                        }
                    }
                }
            }
            self.shared.deliver();
            if !self.ticking.is_empty() {
                self.tick();
            }
            if self.woke.saturating_duration_since(self.looked) >= self.look_every {
                self.tidy();
                self.look_after();
            }
        }
    }

    /// Waits for something to do. After a request the next one may come soon: then it looks for it before it sleeps, as long as
    /// that pays and nobody else wants the CPU. True when it has served somebody at whom it looked directly.
    fn wait(&mut self, ready: &mut Vec<Ready>, timeout: Duration, served: bool) -> std::io::Result<bool> {
        let mut last = Instant::now();
        if served && last >= self.look_again {
            let budget = self.look.budget();
            let until = last + budget.min(timeout);
            while last < until {
                self.looks = self.looks.wrapping_add(1);
                let at_all = self.looks.is_multiple_of(LOOKS_AT_HOT) || self.hot.is_empty();
                if at_all {
                    self.shared.epoll.wait(ready, Some(Duration::ZERO))?;
                }
                let hot = self.serve_hot();
                if hot || !ready.is_empty() {
                    self.woke = last;
                    self.look.note(true);
                    self.rest = (self.rest / 2).max(REST_MIN);
                    return Ok(hot);
                }
                if at_all {
                    std::thread::yield_now();
                }
                let now = Instant::now();
                if now.duration_since(last) > AWAY {
                    self.look_again = now + self.rest;
                    self.rest = (self.rest * 2).min(REST_MAX);
                    break;
                }
                last = now;
            }
            if !budget.is_zero() && last >= until {
                self.look.note(false);
            }
        }
        self.hot.drain(..).for_each(|(peer, _)| peer.watch_output());
        self.sleep(ready, timeout)?;
        Ok(false)
    }

    /// From now on a peer is looked at directly.
    fn heat(&mut self, peer: Arc<PeerSession>) {
        if self.hot.iter().any(|(hot, _)| Arc::ptr_eq(hot, &peer)) {
            return;
        }
        if self.hot.len() == HOT_MAX {
            self.hot.remove(0).0.watch_output();
        }
        self.hot.push((peer, 0));
    }

    /// Looks at those who were served lately; whether there was something to do.
    fn serve_hot(&mut self) -> bool {
        let mut any = false;
        self.hot.retain_mut(|(peer, misses)| {
            let found = peer.look();
            any |= found;
            *misses = if found { 0 } else { *misses + 1 };
            let stays = *misses < MISSES_MAX;
            if !stays {
                peer.watch_output();
            }
            stays
        });
        any
    }

    fn sleep(&mut self, ready: &mut Vec<Ready>, timeout: Duration) -> std::io::Result<()> {
        self.shared.epoll.wait(ready, Some(timeout))?;
        self.woke = Instant::now();
        Ok(())
    }

    fn tick(&mut self) {
        if self.ticked.elapsed() < self.interval {
            return;
        }
        let shared = &self.shared;
        let mut interval = LEASE_TICK_MAX;
        self.ticking.retain(|&id| {
            let next = shared.peer(id).and_then(|peer| peer.tick());
            interval = interval.min(next.unwrap_or(interval));
            next.is_some()
        });
        self.interval = interval;
        self.ticked = Instant::now();
    }

    fn look_after(&mut self) {
        self.looked = Instant::now();
        let page_limit = self.shared.page_limit();
        self.shared.pagers.expire(page_limit);
        let now_ms = self.started.elapsed().as_millis() as u64;
        let keep_alive = *lock(&self.shared.keep_alive);
        let peers: Vec<_> = lock(&self.shared.peers).iter().flatten().cloned().collect();
        for peer in peers {
            peer.look_after(now_ms, keep_alive, page_limit);
        }
    }

    /// Closes what has been half open for too long, and forgets peers that have ended.
    fn tidy(&mut self) {
        let late = |since: Instant| since.elapsed() > Duration::from_millis(HELLO_TIMEOUT_MS);
        let now = Instant::now();
        let listeners = lock(&self.shared.listeners);
        self.paused.resume(&self.shared.epoll, LISTENER_ID, |index| listeners.get(index));
        drop(listeners);
        for greeting in &mut self.greetings {
            greeting.take_if(|greeting| greeting.is_late(now));
        }
        self.forming.retain(|forming| !late(forming.since));
        for place in lock(&self.shared.peers).iter_mut() {
            place.take_if(|peer| peer.is_closed());
        }
    }

    fn accept(&mut self, index: usize) {
        for _ in 0..8 {
            let listeners = lock(&self.shared.listeners);
            let Some(listener) = listeners.get(index) else { return };
            let stream = match listener.accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(_) => {
                    self.paused.pause(&self.shared.epoll, listener, index);
                    return;
                }
            };
            drop(listeners);
            let index = match self.greetings.iter().position(Option::is_none) {
                Some(index) => index,
                None if self.greetings.len() < HALF_OPEN_MAX => {
                    self.greetings.push(None);
                    self.greetings.len() - 1
                }
                None => {
                    // Who means it says hello sooner than the oldest has.
                    let since = |index: &usize| self.greetings[*index].as_ref().map(Greeting::since);
                    (0..HALF_OPEN_MAX).min_by_key(since).unwrap_or(0)
                }
            };
            self.greetings[index] = None;
            if watch(&self.shared.epoll, stream.as_fd(), GREETING_ID + index as u64).is_ok() {
                self.greetings[index] = Some(Greeting::new(stream, Role::Node));
            }
        }
    }

    fn greet(&mut self, index: usize) {
        let Some(greeting) = self.greetings.get_mut(index).and_then(Option::take) else { return };
        let arrival = match greeting.progress(&self.shared.security) {
            Greeted::Waiting(greeting) => return self.greetings[index] = Some(greeting),
            Greeted::Hello(arrival) => arrival,
            Greeted::Gone(_) => return,
        };
        let theirs = arrival.hello;
        if theirs.role != Role::Node {
            return arrival.refuse(Refusal::Role);
        }
        if self.forming.len() >= HALF_OPEN_MAX {
            return arrival.refuse(Refusal::Busy);
        }
        let _ = self.shared.epoll.remove(arrival.stream().as_fd());
        let known = self.forming.iter().position(|forming| forming.session == theirs.session);
        let incarnation = Incarnation::from_bytes(theirs.session);
        if known.is_none() {
            // Before the answer: whoever has it finds nothing of his earlier sessions.
            let is_stale = |forming: &Forming| {
                incarnation.after(&Incarnation::from_bytes(forming.session)) == Order::Stale
            };
            if self.forming.iter().any(is_stale) || !self.shared.make_way(&incarnation) {
                return arrival.refuse(Refusal::Role);
            }
            self.forming.retain(|forming| {
                incarnation.after(&Incarnation::from_bytes(forming.session)) == Order::Unrelated
            });
        }
        let index = known.unwrap_or_else(|| {
            let rails = (0..theirs.rails).map(|_| None).collect();
            self.forming.push(Forming { session: theirs.session, rails, since: Instant::now() });
            self.forming.len() - 1
        });
        let rails = &mut self.forming[index].rails;
        let expected = rails.len() == usize::from(theirs.rails) && rails[usize::from(theirs.rail)].is_none();
        let accepted = if expected { arrival.accept() } else { None };
        let accepted = accepted.filter(|transport| transport.stream().without_user_timeout().is_ok());
        let Some(transport) = accepted else {
            self.forming.swap_remove(index);
            return;
        };
        rails[usize::from(theirs.rail)] = Some(transport);
        if rails.iter().all(Option::is_some) {
            let rails = self.forming.swap_remove(index).rails;
            let links = rails.into_iter().flatten().map(|rail| Box::new(rail) as Box<dyn Link>).collect();
            let limits = (theirs.ops_max, theirs.window);
            if let Ok(peer) = add_peer(&self.shared, links, limits, "a peer", Origin::Peer) {
                let _ = peer.came_as.set(incarnation);
            }
        }
    }
}
