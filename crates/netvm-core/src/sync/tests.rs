//! A home and processes with threads, whose messages may be delayed and reordered and who may die at any step. The simulation below takes
//! random steps; `tests_model.rs` takes all of them.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use alloc::{format, vec};

use super::near::{is_claimed, permits};
use super::*;
use crate::limits::TICKETS_MAX;
use crate::notify::Notify;
use crate::sim::Random;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Doing {
    Idle,
    Trying(Attempt),
    Inside,
    /// Inside, and has signalled a condition.
    Signalling,
    /// Has read a free lock's word, or one with enough permits, which would become that one.
    Read(u64, u64),
    /// And then seen that its session goes on.
    Going(u64, u64),
    /// Inside by the word, or with permits that it will make anew.
    Near(u64),
    /// Inside, and has asked for a ticket.
    Adopting,
}

/// A word of a process that may be stopped between two steps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ModelWord(pub(super) u64);

impl Word for ModelWord {
    fn claim(&mut self) -> u64 {
        let was = self.0;
        self.0 |= CLAIMED;
        was
    }

    fn put(&mut self, word: u64) {
        self.0 = word;
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Thread {
    doing: Doing,
    ticket: Ticket,
    turns: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Process {
    session: SessionId,
    alive: bool,
    near: Option<Near>,
    waiters: Waiters,
    threads: Vec<Thread>,
    requests: VecDeque<(Option<usize>, Request)>,
    replies: VecDeque<(usize, Reply)>,
    signals: Vec<Notify>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Action {
    Start(usize, usize),
    /// The next step with a word: reading it, looking at the flag, changing it.
    Near(usize, usize),
    /// One of a process that has died, or was thought dead, goes on.
    Stale(usize),
    Adopt(usize, usize),
    Timeout(usize, usize),
    Release(usize, usize),
    Wait(usize, usize),
    Notify(usize, usize, bool),
    /// The home takes a process's next request.
    Serve(usize),
    Reply(usize),
    Signal(usize, usize),
    Die(usize),
    /// The home sees that it died, after some of its last requests.
    End(usize),
}

type Holder = (SessionId, u16);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    kind: Kind,
    home: Home<ModelWord>,
    id: ObjectId,
    processes: Vec<Process>,
    /// Who was stopped in [`Doing::Going`].
    stale: Vec<(SessionId, u64, u64)>,
    deaths_left: u8,
    turns: u8,
    sessions: u64,
    // What the home should do, kept separately.
    expected: VecDeque<(SessionId, Ticket, u32, Option<u32>)>,
    waits: [VecDeque<(SessionId, Ticket)>; 2],
    held: BTreeMap<Holder, u32>,
    dead_units: u32,
    /// Permits that were used up by the word and have not been made anew; what the dead used up never will be.
    used: u32,
    pub(super) broken: Option<&'static str>,
}

impl World {
    pub(super) fn new(kind: Kind, processes: usize, threads: usize, turns: u8, deaths: u8) -> Self {
        let mut home = Home::default();
        let id = home.create(kind).unwrap();
        home.give_word(id, ModelWord(0));
        let mut world = Self {
            kind,
            home,
            id,
            processes: Vec::new(),
            stale: Vec::new(),
            deaths_left: deaths,
            turns,
            sessions: 0,
            expected: VecDeque::new(),
            waits: [VecDeque::new(), VecDeque::new()],
            held: BTreeMap::new(),
            dead_units: 0,
            used: 0,
            broken: None,
        };
        for _ in 0..processes {
            let process = world.process(threads);
            world.processes.push(process);
        }
        world
    }

    fn process(&mut self, threads: usize) -> Process {
        self.sessions += 1;
        let ticket = Ticket { slot: 0, generation: 0 };
        let thread = Thread { doing: Doing::Idle, ticket, turns: self.turns };
        let session = SessionId(self.sessions);
        let near = match self.home.handle(session, self.id, Request { object: 0, ticket, op: Op::Near }) {
            Reply::Done(near) => Some(Near::from_u64(near).unwrap()),
            reply => {
                assert_eq!(reply, Reply::Refused(Refusal::WrongKind));
                None
            }
        };
        Process {
            session,
            alive: true,
            near,
            waiters: Waiters::default(),
            threads: vec![thread; threads],
            requests: VecDeque::new(),
            replies: VecDeque::new(),
            signals: Vec::new(),
        }
    }

    fn units(&self) -> u32 {
        match self.kind {
            Kind::Semaphore { permits } => permits,
            Kind::ReadWriteLock => WRITER,
            _ => 1,
        }
    }

    fn count(&self, process: usize, thread: usize) -> u32 {
        match self.kind {
            Kind::Semaphore { .. } => 1 + ((process + thread) % 2) as u32,
            Kind::ReadWriteLock if (process + thread).is_multiple_of(2) => WRITER,
            _ => 1,
        }
    }

    pub(super) fn actions(&self) -> Vec<Action> {
        let mut actions: Vec<Action> = (0..self.stale.len()).map(Action::Stale).collect();
        let conditions = matches!(self.kind, Kind::Monitor { conditions } if conditions > 0);
        for (p, process) in self.processes.iter().enumerate() {
            if !process.requests.is_empty() {
                actions.push(Action::Serve(p));
            }
            if !process.alive {
                actions.push(Action::End(p));
                continue;
            }
            if self.deaths_left > 0 {
                actions.push(Action::Die(p));
            }
            if !process.replies.is_empty() {
                actions.push(Action::Reply(p));
            }
            actions.extend((0..process.signals.len()).map(|signal| Action::Signal(p, signal)));
            for (t, thread) in process.threads.iter().enumerate() {
                match &thread.doing {
                    Doing::Idle if thread.turns > 0 => {
                        actions.push(Action::Start(p, t));
                        actions.extend(process.near.map(|_| Action::Near(p, t)));
                    }
                    Doing::Read(..) | Doing::Going(..) => actions.push(Action::Near(p, t)),
                    Doing::Near(_) => {
                        actions.push(Action::Release(p, t));
                        if conditions {
                            actions.push(Action::Adopt(p, t));
                        }
                    }
                    Doing::Trying(attempt) if *attempt.step() == Step::Signal => {
                        actions.push(Action::Timeout(p, t));
                    }
                    Doing::Inside => {
                        actions.push(Action::Release(p, t));
                        if conditions && thread.turns > 0 {
                            actions.extend([
                                Action::Wait(p, t),
                                Action::Notify(p, t, false),
                                Action::Notify(p, t, true),
                            ]);
                        }
                    }
                    _ => {}
                }
            }
        }
        actions
    }

    pub(super) fn apply(&mut self, action: Action) {
        match action {
            Action::Near(p, t) => self.near(p, t),
            Action::Stale(stale) => {
                let (session, seen, ours) = self.stale.swap_remove(stale);
                let word = self.home.word(self.id).unwrap();
                if word.0 == seen {
                    word.0 = ours;
                    match self.processes.iter().find(|process| process.session == session) {
                        Some(_) if self.is_semaphore() => self.used += permits(seen) - permits(ours),
                        Some(process) => {
                            let slot = process.near.unwrap().ticket().slot;
                            self.granted((session, slot), 1, false);
                        }
                        None => self.broken = Some("taken by a session that had ended"),
                    }
                }
            }
            Action::Adopt(p, t) => {
                let process = &mut self.processes[p];
                let ticket = process.waiters.take().unwrap();
                (process.threads[t].ticket, process.threads[t].doing) = (ticket, Doing::Adopting);
                self.ask(p, Some(t), ticket, Op::Adopt);
            }
            Action::Start(p, t) => {
                let op = Op::Acquire { count: self.count(p, t), wait: true, owned: true };
                let process = &mut self.processes[p];
                let ticket = process.waiters.take().unwrap();
                let thread = &mut process.threads[t];
                thread.turns -= 1;
                (thread.ticket, thread.doing) = (ticket, Doing::Trying(Attempt::default()));
                self.ask(p, Some(t), ticket, op);
            }
            Action::Timeout(p, t) => {
                let thread = &mut self.processes[p].threads[t];
                if let Doing::Trying(attempt) = &mut thread.doing {
                    attempt.timeout();
                    assert_eq!(*attempt.cancelled(), Step::Reply);
                }
                let ticket = thread.ticket;
                self.ask(p, Some(t), ticket, Op::Cancel);
            }
            Action::Release(p, t)
                if self.is_semaphore() && matches!(self.processes[p].threads[t].doing, Doing::Near(_)) =>
            {
                let count = self.count(p, t);
                self.processes[p].threads[t].doing = Doing::Idle;
                let word = self.home.word(self.id).unwrap();
                match Near::more_permits(word.0, count) {
                    Some((more, _)) => {
                        word.0 = more;
                        self.used -= count;
                    }
                    None => self.ask(p, None, Ticket { slot: 0, generation: 0 }, Op::Add { count }),
                }
            }
            Action::Release(p, t) if let Doing::Near(ours) = self.processes[p].threads[t].doing => {
                let process = &mut self.processes[p];
                let (near, session) = (process.near.unwrap(), process.session);
                process.threads[t].doing = Doing::Idle;
                let word = self.home.word(self.id).unwrap();
                if word.0 == ours {
                    word.0 = near.give_back(ours);
                    self.held.remove(&(session, near.ticket().slot));
                } else {
                    self.ask(p, None, near.ticket(), Op::Release);
                }
            }
            Action::Release(p, t) => {
                let ticket = self.processes[p].threads[t].ticket;
                self.ask(p, None, ticket, Op::Release);
                self.finish(p, t);
            }
            Action::Wait(p, t) => {
                let process = &mut self.processes[p];
                let thread = &mut process.threads[t];
                thread.turns -= 1;
                let old = thread.ticket;
                thread.ticket = process.waiters.renew(old.slot);
                thread.doing = Doing::Trying(Attempt::default());
                let op = Op::Wait { condition: (t % 2) as u32, next: thread.ticket.generation };
                self.ask(p, Some(t), old, op);
            }
            Action::Notify(p, t, all) => {
                let thread = &mut self.processes[p].threads[t];
                thread.turns -= 1;
                thread.doing = Doing::Signalling;
                let ticket = thread.ticket;
                self.ask(p, Some(t), ticket, Op::Notify { condition: u32::from(t == 0), all });
            }
            Action::Serve(p) => self.serve(p),
            Action::Reply(p) => {
                let Some((t, reply)) = self.processes[p].replies.pop_front() else { return };
                match &mut self.processes[p].threads[t].doing {
                    Doing::Trying(attempt) => {
                        attempt.reply(reply);
                    }
                    doing => {
                        self.broken = match reply {
                            Reply::Done(_) => self.broken,
                            _ => Some("a signal to a condition was refused"),
                        };
                        *doing = Doing::Inside;
                    }
                }
                self.poke(p, t);
            }
            Action::Signal(p, signal) => {
                let process = &mut self.processes[p];
                let notify = process.signals.swap_remove(signal);
                process.waiters.deliver(notify);
                for t in 0..self.processes[p].threads.len() {
                    self.poke(p, t);
                }
            }
            Action::Die(p) => {
                self.deaths_left -= 1;
                let process = &mut self.processes[p];
                process.alive = false;
                process.replies.clear();
                process.signals.clear();
                for thread in &mut process.threads {
                    if let Doing::Going(seen, ours) = thread.doing {
                        self.stale.push((process.session, seen, ours));
                    }
                    (thread.doing, thread.turns) = (Doing::Idle, 0);
                }
            }
            Action::End(p) => self.end(p),
        }
        let inside = |(p, process): (usize, &Process)| {
            let inside = |(_, thread): &(usize, &Thread)| {
                matches!(thread.doing, Doing::Inside | Doing::Signalling | Doing::Near(_) | Doing::Adopting)
            };
            let inside = process.threads.iter().enumerate().filter(inside);
            inside.map(|(t, _)| u64::from(self.count(p, t))).sum::<u64>()
        };
        if self.processes.iter().enumerate().map(inside).sum::<u64>() > u64::from(self.units()) {
            self.broken = Some("more inside than there is room for");
        }
        let (free, held) = self.free_and_held();
        if free + held + self.used != self.units() {
            self.broken = Some("units have come or gone");
        }
    }

    fn is_semaphore(&self) -> bool {
        matches!(self.kind, Kind::Semaphore { .. })
    }

    /// Units at the home, or in the word.
    fn free_and_held(&mut self) -> (u32, u32) {
        let (free, held) = self.home.units(self.id).unwrap();
        let is_semaphore = self.is_semaphore();
        match self.home.word(self.id) {
            Some(word) if is_semaphore && !is_claimed(word.0) => (permits(word.0), held),
            _ => (free, held),
        }
    }

    /// A thread's next step with the word.
    fn near(&mut self, p: usize, t: usize) {
        let (is_semaphore, count) = (self.is_semaphore(), self.count(p, t));
        let process = &mut self.processes[p];
        let (session, near) = (process.session, process.near.unwrap());
        let thread = &mut process.threads[t];
        let word = self.home.word(self.id).unwrap();
        match thread.doing {
            Doing::Read(seen, ours) => thread.doing = Doing::Going(seen, ours),
            Doing::Going(seen, ours) if word.0 == seen => {
                word.0 = ours;
                thread.turns -= 1;
                thread.doing = Doing::Near(ours);
                if !self.expected.is_empty() {
                    self.broken = Some("somebody was overtaken by the word");
                }
                match is_semaphore {
                    true if self.dead_units > 0 => self.broken = Some("a death was not told by the word"),
                    true => self.used += count,
                    false => self.granted((session, near.ticket().slot), 1, false),
                }
            }
            _ => match if is_semaphore { Near::see_permits(word.0, count) } else { near.see(word.0) } {
                Seen::Free(ours) if thread.doing == Doing::Idle => thread.doing = Doing::Read(word.0, ours),
                _ => {
                    thread.doing = Doing::Idle;
                    self.apply(Action::Start(p, t));
                }
            },
        }
    }

    fn ask(&mut self, p: usize, t: Option<usize>, ticket: Ticket, op: Op) {
        let request = Request { object: 0, ticket, op };
        let request = Request::decode(&request.encode()).unwrap();
        self.processes[p].requests.push_back((t, request));
    }

    fn finish(&mut self, p: usize, t: usize) {
        let process = &mut self.processes[p];
        process.threads[t].doing = Doing::Idle;
        process.waiters.give_back(process.threads[t].ticket.slot);
    }

    /// A thread that waits looks for its signal.
    fn poke(&mut self, p: usize, t: usize) {
        let process = &mut self.processes[p];
        let thread = &mut process.threads[t];
        let Doing::Trying(attempt) = &mut thread.doing else { return };
        if matches!(attempt.step(), Step::Signal | Step::LastSignal)
            && let Some(signal) = process.waiters.signal(thread.ticket)
        {
            attempt.signal(signal);
        }
        match attempt.step() {
            Step::Done(Outcome::Ours { .. }) => thread.doing = Doing::Inside,
            Step::Done(Outcome::TimedOut) => self.finish(p, t),
            Step::Done(_) => self.broken = Some("an attempt ended in an unexpected way"),
            _ => {}
        }
    }

    fn serve(&mut self, p: usize) {
        let Some((asker, request)) = self.processes[p].requests.pop_front() else { return };
        let session = self.processes[p].session;
        let Request { ticket, ref op, .. } = request;
        let op = op.clone();
        let reply = if op == Op::Release {
            let told = Ticket::from_release(ticket.release().unwrap());
            self.home.released(session, told.unwrap());
            Reply::Done(0)
        } else {
            self.home.handle(session, self.id, request)
        };
        match (&op, &reply) {
            (Op::Acquire { count, .. }, Reply::Granted { abandoned }) => {
                if !self.expected.is_empty() {
                    self.broken = Some("somebody was overtaken");
                }
                self.granted((session, ticket.slot), *count, *abandoned);
            }
            (Op::Acquire { count, .. }, Reply::Queued) => {
                self.expected.push_back((session, ticket, *count, None));
            }
            (Op::Adopt, Reply::Done(_)) => {
                let near = self.processes[p].near.unwrap().ticket().slot;
                let count = self.held.remove(&(session, near)).unwrap();
                self.held.insert((session, ticket.slot), count);
            }
            (Op::Release, Reply::Done(_)) => {
                self.held.remove(&(session, ticket.slot));
            }
            (Op::Add { count }, Reply::Done(_)) => self.used -= *count,
            (Op::Cancel, Reply::Cancelled) => {
                self.expected.retain(|waiting| (waiting.0, waiting.1) != (session, ticket));
            }
            (Op::Cancel, Reply::Queued) => {
                for condition in 0..2 {
                    let waits = &mut self.waits[condition];
                    let count = waits.len();
                    waits.retain(|waiting| *waiting != (session, ticket));
                    if waits.len() < count {
                        // Nobody signalled him: his death later is no reason to signal another.
                        self.expected.push_back((session, ticket, 1, None));
                    }
                }
            }
            (Op::Wait { condition, next }, Reply::Queued) => {
                self.held.remove(&(session, ticket.slot));
                let ticket = Ticket { generation: *next, ..ticket };
                self.waits[*condition as usize].push_back((session, ticket));
            }
            (Op::Notify { condition, all }, Reply::Done(count)) => {
                let waits = self.waits[*condition as usize].len() as u64;
                if *count != if *all { waits } else { waits.min(1) } {
                    self.broken = Some("a signal was lost");
                }
                for _ in 0..*count {
                    self.pass_on(*condition);
                }
            }
            _ => self.broken = Some("a request was refused"),
        }
        self.take_signals();
        if let Some(t) = asker {
            let reply = Reply::decode(&reply.encode()).unwrap();
            self.processes[p].replies.push_back((t, reply));
        }
    }

    fn pass_on(&mut self, condition: u32) {
        if let Some((session, ticket)) = self.waits[condition as usize].pop_front() {
            self.expected.push_back((session, ticket, 1, Some(condition)));
        }
    }

    fn end(&mut self, p: usize) {
        let session = self.processes[p].session;
        let passed = self.expected.iter().filter(|waiting| waiting.0 == session);
        let passed: Vec<u32> = passed.filter_map(|waiting| waiting.3).collect();
        self.expected.retain(|waiting| waiting.0 != session);
        for waits in &mut self.waits {
            waits.retain(|waiting| waiting.0 != session);
        }
        for condition in passed {
            self.pass_on(condition);
        }
        let dead = self.held.extract_if(.., |holder, _| holder.0 == session);
        for (_, count) in dead {
            self.dead_units = match self.kind {
                Kind::Semaphore { .. } => self.dead_units + count,
                Kind::ReadWriteLock if count < WRITER => self.dead_units,
                _ => 1,
            };
        }
        self.home.session_ended(session);
        self.take_signals();
        let threads = self.processes[p].threads.len();
        self.processes[p] = self.process(threads);
    }

    fn granted(&mut self, holder: Holder, count: u32, abandoned: bool) {
        if abandoned != (self.dead_units > 0) {
            self.broken = Some("a death was not told once");
        }
        match self.kind {
            Kind::ReadWriteLock if count < WRITER => {}
            _ => self.dead_units -= self.dead_units.min(count),
        }
        self.held.insert(holder, count);
    }

    fn take_signals(&mut self) {
        while let Some(Signalled { session, ticket, signal }) = self.home.signal() {
            let abandoned = matches!(signal, Signal::Abandoned | Signal::ExpiredAbandoned);
            match self.expected.pop_front() {
                Some((first, expected, count, _)) if (first, expected) == (session, ticket) => {
                    self.granted((session, ticket.slot), count, abandoned);
                }
                _ => self.broken = Some("not the first in the queue"),
            }
            let process = self.processes.iter_mut().find(|process| process.session == session).unwrap();
            if process.alive {
                process.signals.push(signal.notify(ticket).unwrap());
            }
        }
    }

    /// Nothing can happen any more: then everybody must be done.
    pub(super) fn is_at_rest(&self) -> bool {
        let idle = |process: &Process| process.threads.iter().all(|thread| thread.doing == Doing::Idle);
        let quiet = self.expected.is_empty() && self.waits.iter().all(VecDeque::is_empty);
        let used: usize = self.processes.iter().map(|process| process.waiters.used()).sum();
        quiet
            && self.processes.iter().all(idle)
            && used == 0
            && self.home.tickets() == 0
            && self.clone().free_and_held() == (self.units() - self.used, 0)
            && self.processes[0].near.is_none_or(|near| {
                // Somebody died and nobody has been told: who comes next asks the home.
                let word = self.home.clone().word(self.id).unwrap().0;
                let is_open = match self.is_semaphore() {
                    true => !is_claimed(word),
                    false => matches!(near.see(word), Seen::Free(_)),
                };
                is_open == (self.dead_units == 0)
            })
    }
}

pub(super) const KINDS: [Kind; 5] = [
    Kind::LOCK,
    Kind::Monitor { conditions: 2 },
    Kind::ReadWriteLock,
    Kind::Semaphore { permits: 2 },
    Kind::Semaphore { permits: 5 },
];

#[test]
fn turns_are_exclusive_in_order_and_survive_deaths() {
    let mut deaths = 0;
    for seed in 0..600 {
        let kind = KINDS[seed as usize % KINDS.len()];
        let mut random = Random::new(seed);
        let mut world = World::new(kind, 3, 2, 12, 6);
        for step in 0.. {
            let actions = world.actions();
            // Time-outs and deaths are always possible: not too often.
            let rare = |action: &Action| match action {
                Action::Timeout(..) => 20,
                Action::Die(_) => 100,
                // Who was stopped goes on much later.
                Action::Stale(_) => 50,
                _ => 1,
            };
            let Some(&action) = actions.get(random.below(actions.len().max(1) as u64) as usize) else {
                break;
            };
            if !random.once_in(rare(&action)) {
                continue;
            }
            deaths += u32::from(matches!(action, Action::Die(_)));
            world.apply(action);
            if let Some(reason) = world.broken {
                panic!("seed {seed}, step {step}, {kind:?}: {reason} after {action:?}\n{world:#?}");
            }
        }
        assert!(world.is_at_rest(), "seed {seed}, {kind:?}: stuck\n{world:#?}");
    }
    assert!(deaths > 1000, "only {deaths} deaths");
}

pub(super) struct Alone {
    pub(super) home: Home<ModelWord>,
    pub(super) id: ObjectId,
}

impl Alone {
    pub(super) fn new(kind: Kind) -> Self {
        let mut home = Home::default();
        let id = home.create(kind).unwrap();
        Self { home, id }
    }

    pub(super) fn ask(&mut self, session: u64, slot: u16, generation: u32, op: Op) -> Reply {
        let ticket = Ticket { slot, generation };
        self.home.handle(SessionId(session), self.id, Request { object: 0, ticket, op })
    }

    pub(super) fn signals(&mut self) -> Vec<(u64, u16, Signal)> {
        core::iter::from_fn(|| self.home.signal())
            .map(|signalled| (signalled.session.0, signalled.ticket.slot, signalled.signal))
            .collect()
    }
}

pub(super) const LOCK: Op = Op::Acquire { count: 1, wait: true, owned: true };

#[test]
fn old_and_foreign_tickets_do_nothing() {
    let mut lock = Alone::new(Kind::LOCK);
    assert_eq!(lock.ask(1, 0, 7, LOCK), Reply::Granted { abandoned: false });
    assert_eq!(lock.ask(1, 0, 6, Op::Release), Reply::Refused(Refusal::NotHeld));
    assert_eq!(lock.ask(2, 0, 7, Op::Release), Reply::Refused(Refusal::NotHeld));
    assert_eq!(lock.ask(1, 0, 8, LOCK), Reply::Refused(Refusal::InUse));
    assert_eq!(lock.ask(1, TICKETS_MAX as u16, 1, LOCK), Reply::Refused(Refusal::Full));
    assert_eq!(lock.ask(1, 0, 7, Op::Wait { condition: 0, next: 9 }), Reply::Refused(Refusal::Number));
    assert_eq!(lock.ask(1, 0, 7, Op::Add { count: 1 }), Reply::Refused(Refusal::WrongKind));
    assert_eq!(lock.ask(2, 0, 1, LOCK), Reply::Queued);
    assert_eq!(lock.ask(1, 0, 7, Op::Release), Reply::Done(0));
    assert_eq!(lock.signals(), [(2, 0, Signal::Granted)]);
    lock.home.session_ended(SessionId(2));
    assert_eq!(lock.ask(3, 0, 1, LOCK), Reply::Granted { abandoned: true });
    assert_eq!(lock.ask(4, 5, 1, LOCK), Reply::Queued);
    lock.home.close(lock.id);
    assert_eq!(lock.signals(), [(4, 5, Signal::Closed)]);
    assert_eq!(lock.home.tickets(), 0);
    assert_eq!(lock.ask(4, 5, 2, LOCK), Reply::Refused(Refusal::Closed));
}

#[test]
fn wait_queues_wake_in_order() {
    let mut queue = Alone::new(Kind::WaitQueue);
    for session in 1..=4 {
        assert_eq!(queue.ask(session, 0, 1, Op::Enqueue), Reply::Queued);
    }
    assert_eq!(queue.ask(2, 0, 1, Op::Cancel), Reply::Cancelled);
    queue.home.session_ended(SessionId(1));
    assert_eq!(queue.ask(9, 0, 0, Op::Wake { count: 1 }), Reply::Done(1));
    assert_eq!(queue.signals(), [(3, 0, Signal::Granted)]);
    assert_eq!(queue.ask(3, 0, 1, Op::Cancel), Reply::Queued, "too late: it has been woken");
    assert_eq!(queue.ask(9, 0, 0, Op::Wake { count: 9 }), Reply::Done(1));
    assert_eq!(queue.ask(9, 0, 0, Op::Wake { count: 9 }), Reply::Done(0));
    assert_eq!(queue.home.tickets(), 0);
}

/// Members meet with random contributions, give up, die and are replaced: who meets gets the sum of all, who survives a broken meeting
/// hears of it once.
#[test]
fn groups_meet_or_break_for_all() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let mut group = Alone::new(Kind::Group { parties: 3 });
        let mut sessions = 3;
        // Session, generation, contribution, meeting to be told broken.
        let mut members: Vec<(u64, u32, Option<u64>, bool)> = Vec::new();
        let mut met = 0;
        for step in 0..400 {
            let context = format!("seed {seed}, step {step}");
            if members.len() < 3 {
                sessions += 1;
                assert!(matches!(group.ask(sessions, 0, 1, Op::Join), Reply::Done(_)), "{context}");
                members.push((sessions, 1, None, false));
            }
            let at = random.below(members.len() as u64) as usize;
            let (session, generation, contribution, broken) = members[at];
            if random.once_in(15) {
                group.home.session_ended(SessionId(session));
                members.remove(at);
                let mut told = group.signals();
                for member in &mut members {
                    if member.2.take().is_some() {
                        let signal = (member.0, 0, Signal::Broken);
                        told.remove(told.iter().position(|other| *other == signal).expect(&context));
                    } else {
                        member.3 = true;
                    }
                }
                assert!(told.is_empty(), "{context}: {told:?}");
            } else if contribution.is_some() {
                if random.once_in(3) {
                    assert_eq!(group.ask(session, 0, generation, Op::Cancel), Reply::Cancelled, "{context}");
                    members[at].2 = None;
                }
            } else {
                let number = random.draw();
                members[at].1 += 1;
                let bytes = number.to_le_bytes().to_vec();
                let arrive = Op::Arrive { next: generation + 1, combine: Combine::SumU64, bytes };
                let reply = group.ask(session, 0, generation, arrive);
                if broken {
                    assert_eq!(reply, Reply::Broken, "{context}");
                    members[at].3 = false;
                    continue;
                }
                members[at].2 = Some(number);
                if members.len() == 3 && members.iter().all(|member| member.2.is_some()) {
                    met += 1;
                    let sum = members.iter().filter_map(|member| member.2).fold(0, u64::wrapping_add);
                    let sum = Reply::Result(sum.to_le_bytes().to_vec());
                    assert_eq!(reply, sum, "{context}");
                    assert_eq!(group.signals().len(), 2, "{context}");
                    for member in &mut members {
                        member.2 = None;
                        assert_eq!(group.ask(member.0, 0, member.1, Op::Fetch), sum, "{context}");
                    }
                } else {
                    assert_eq!(reply, Reply::Queued, "{context}");
                }
            }
        }
        assert!(met > 5, "seed {seed}: only {met} meetings");
    }
}

#[test]
fn groups_refuse_different_meetings() {
    let mut group = Alone::new(Kind::Group { parties: 2 });
    assert_eq!(group.ask(1, 0, 1, Op::Join), Reply::Done(0));
    assert_eq!(group.ask(2, 0, 1, Op::Join), Reply::Done(1));
    assert_eq!(group.ask(3, 0, 1, Op::Join), Reply::Refused(Refusal::Full));
    let arrive = |combine, bytes: &[u8]| Op::Arrive { next: 2, combine, bytes: bytes.to_vec() };
    assert_eq!(group.ask(1, 0, 1, arrive(Combine::SumU64, &[0; 7])), Reply::Refused(Refusal::Number));
    assert_eq!(group.ask(1, 0, 1, arrive(Combine::Broadcast(2), &[])), Reply::Refused(Refusal::Number));
    assert_eq!(group.ask(1, 0, 1, arrive(Combine::Broadcast(0), b"hello")), Reply::Queued);
    assert_eq!(group.ask(2, 0, 1, arrive(Combine::Broadcast(1), b"")), Reply::Refused(Refusal::Mismatch));
    assert_eq!(group.ask(2, 0, 1, arrive(Combine::Nothing, b"")), Reply::Refused(Refusal::Mismatch));
    assert_eq!(group.ask(2, 0, 1, arrive(Combine::Broadcast(0), b"")), Reply::Result(b"hello".to_vec()));
    let number = |number: f64| number.to_bits().to_le_bytes();
    let arrive = |bytes: &[u8]| Op::Arrive { next: 3, combine: Combine::MaxF64, bytes: bytes.to_vec() };
    assert_eq!(group.ask(1, 0, 2, arrive(&number(-1.5))), Reply::Queued);
    assert_eq!(group.ask(2, 0, 2, arrive(&number(-2.5))), Reply::Result(number(-1.5).to_vec()));
}

#[test]
fn any_bytes_decode_to_something_or_nothing() {
    let mut random = Random::new(1);
    let mut home: Home = Home::default();
    let ids: Vec<ObjectId> = KINDS
        .into_iter()
        .chain([Kind::WaitQueue, Kind::Group { parties: 2 }])
        .filter_map(|kind| home.create(kind))
        .collect();
    let mut decoded = 0;
    for _ in 0..200_000 {
        let mut bytes: Vec<u8> = (0..20 + random.below(3) * 8).map(|_| random.draw() as u8).collect();
        // Small numbers hit more.
        for at in [2, 4, 8, 12, 16] {
            let wide = random.once_in(8);
            for byte in bytes[at + 1..at + if at == 2 { 2 } else { 4 }].iter_mut().filter(|_| !wide) {
                *byte = 0;
            }
        }
        bytes[0] %= 16;
        bytes[2] %= 4;
        bytes[4] %= 4;
        let Some(request) = Request::decode(&bytes) else { continue };
        assert_eq!(Request::decode(&request.encode()).as_ref(), Some(&request));
        decoded += 1;
        let id = ids[random.below(ids.len() as u64) as usize];
        let session = SessionId(random.below(3));
        let reply = home.handle(session, id, request);
        assert_eq!(Reply::decode(&reply.encode()), Some(reply));
        let _ = Reply::decode(&bytes);
        if random.once_in(50) {
            home.session_ended(session);
        }
        while home.signal().is_some() {}
    }
    assert!(decoded > 10_000, "{decoded}");
}
