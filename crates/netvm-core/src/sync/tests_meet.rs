//! Wait queues and groups in all orders of messages, time-outs and deaths, with the state machines that run.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use stateright::{Checker, Model, Property};

use super::*;
use crate::notify::Notify;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Process {
    session: SessionId,
    alive: bool,
    waiters: Waiters,
    /// A member's or a waiting one's, and the next while it waits.
    ticket: Ticket,
    next: Ticket,
    attempt: Option<Attempt>,
    turns: u8,
    requests: VecDeque<Request>,
    replies: VecDeque<Reply>,
    signals: Vec<Notify>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Action {
    /// Queues, or arrives.
    Start(usize),
    Timeout(usize),
    Serve(usize),
    Reply(usize),
    Signal(usize),
    Die(usize),
    End(usize),
    /// Somebody wakes the first.
    Wake,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    kind: Kind,
    home: Home,
    id: ObjectId,
    processes: Vec<Process>,
    sessions: u64,
    deaths: u8,
    wakes: u8,
    /// Who waits, in the order in which they came.
    waiting: VecDeque<(SessionId, Ticket)>,
    /// Members who must be told of a broken meeting when they come.
    broke: Vec<SessionId>,
    broken: Option<&'static str>,
}

impl World {
    fn new(kind: Kind, processes: usize, turns: u8, deaths: u8, wakes: u8) -> Self {
        let mut home = Home::default();
        let id = home.create(kind).unwrap();
        let (waiting, broke) = (VecDeque::new(), Vec::new());
        let processes_here = Vec::new();
        let mut world = Self {
            kind,
            home,
            id,
            processes: processes_here,
            sessions: 0,
            deaths,
            wakes,
            waiting,
            broke,
            broken: None,
        };
        for _ in 0..processes {
            let process = world.process(turns);
            world.processes.push(process);
        }
        world
    }

    fn is_group(&self) -> bool {
        matches!(self.kind, Kind::Group { .. })
    }

    fn process(&mut self, turns: u8) -> Process {
        self.sessions += 1;
        let session = SessionId(self.sessions);
        let mut waiters = Waiters::default();
        let mut ticket = Ticket { slot: 0, generation: 0 };
        if self.is_group() {
            ticket = waiters.take().unwrap();
            let join = Request { object: 0, ticket, op: Op::Join };
            assert!(matches!(self.home.handle(session, self.id, join), Reply::Done(_)));
        }
        Process {
            session,
            alive: true,
            waiters,
            ticket,
            next: ticket,
            attempt: None,
            turns,
            requests: VecDeque::new(),
            replies: VecDeque::new(),
            signals: Vec::new(),
        }
    }

    fn actions(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.wakes > 0 {
            actions.push(Action::Wake);
        }
        for (p, process) in self.processes.iter().enumerate() {
            if !process.requests.is_empty() {
                actions.push(Action::Serve(p));
            }
            if !process.alive {
                actions.push(Action::End(p));
                continue;
            }
            if self.deaths > 0 {
                actions.push(Action::Die(p));
            }
            if !process.replies.is_empty() {
                actions.push(Action::Reply(p));
            }
            if !process.signals.is_empty() {
                actions.push(Action::Signal(p));
            }
            match &process.attempt {
                None if process.turns > 0 => actions.push(Action::Start(p)),
                Some(attempt) if *attempt.step() == Step::Signal => actions.push(Action::Timeout(p)),
                _ => {}
            }
        }
        actions
    }

    fn apply(&mut self, action: Action) {
        let group = self.is_group();
        match action {
            Action::Start(p) => {
                let process = &mut self.processes[p];
                process.turns -= 1;
                process.attempt = Some(Attempt::default());
                let (ticket, op) = if group {
                    process.next = process.waiters.renew(process.ticket.slot);
                    let (next, combine) = (process.next.generation, Combine::Nothing);
                    (process.ticket, Op::Arrive { next, combine, bytes: Vec::new() })
                } else {
                    process.ticket = process.waiters.take().unwrap();
                    process.next = process.ticket;
                    (process.ticket, Op::Enqueue)
                };
                process.requests.push_back(Request { object: 0, ticket, op });
            }
            Action::Timeout(p) => {
                let process = &mut self.processes[p];
                let attempt = process.attempt.as_mut().unwrap();
                attempt.timeout();
                assert_eq!(*attempt.cancelled(), Step::Reply);
                process.requests.push_back(Request { object: 0, ticket: process.next, op: Op::Cancel });
            }
            Action::Serve(p) => self.serve(p),
            Action::Reply(p) => {
                let process = &mut self.processes[p];
                let reply = process.replies.pop_front().unwrap();
                process.attempt.as_mut().unwrap().reply(reply);
                self.poke(p);
            }
            Action::Signal(p) => {
                let process = &mut self.processes[p];
                let notify = process.signals.remove(0);
                if !process.waiters.deliver(notify) {
                    self.broken = Some("a signal for nobody");
                }
                self.poke(p);
            }
            Action::Die(p) => {
                self.deaths -= 1;
                let process = &mut self.processes[p];
                process.alive = false;
                process.attempt = None;
                process.replies.clear();
                process.signals.clear();
            }
            Action::End(p) => {
                let Process { session, turns, .. } = self.processes[p];
                self.home.session_ended(session);
                self.waiting.retain(|waiting| waiting.0 != session);
                self.broke.retain(|other| *other != session);
                if group {
                    let sessions = self.processes.iter().map(|process| process.session);
                    let sleepers: Vec<_> = self.waiting.drain(..).collect();
                    self.broke.extend(sessions.filter(|other| {
                        *other != session && !sleepers.iter().any(|sleeper| sleeper.0 == *other)
                    }));
                    self.broke.sort_unstable();
                    self.broke.dedup();
                    self.expect(sleepers, Signal::Broken);
                }
                self.processes[p] = self.process(turns);
            }
            Action::Wake => {
                self.wakes -= 1;
                let ticket = Ticket { slot: 0, generation: 0 };
                let wake = Request { object: 0, ticket, op: Op::Wake { count: 1 } };
                let reply = self.home.handle(SessionId(0), self.id, wake);
                let first: Vec<_> = self.waiting.pop_front().into_iter().collect();
                if reply != Reply::Done(first.len() as u64) {
                    self.broken = Some("a wake-up was counted wrongly");
                }
                self.expect(first, Signal::Granted);
            }
        }
    }

    fn serve(&mut self, p: usize) {
        let session = self.processes[p].session;
        let request = self.processes[p].requests.pop_front().unwrap();
        let op = request.op.clone();
        let ticket = request.ticket;
        let reply = self.home.handle(session, self.id, request);
        match (&op, &reply) {
            (Op::Enqueue, Reply::Queued) => self.waiting.push_back((session, ticket)),
            (Op::Cancel, Reply::Cancelled) => {
                let count = self.waiting.len();
                self.waiting.retain(|waiting| *waiting != (session, ticket));
                if self.waiting.len() + 1 != count {
                    self.broken = Some("cancelled what did not wait");
                }
            }
            (Op::Cancel, Reply::Queued) => {
                if self.waiting.contains(&(session, ticket)) {
                    self.broken = Some("who waits could not cancel");
                }
            }
            (Op::Arrive { .. }, Reply::Broken) => {
                let count = self.broke.len();
                self.broke.retain(|other| *other != session);
                if self.broke.len() == count {
                    self.broken = Some("told twice that a meeting was broken");
                }
            }
            (Op::Arrive { next, .. }, Reply::Queued | Reply::Result(_)) => {
                if self.broke.contains(&session) {
                    self.broken = Some("not told that a meeting was broken");
                }
                let ticket = Ticket { generation: *next, ..ticket };
                let full = self.waiting.len() + 1 == self.processes.len();
                if full != matches!(reply, Reply::Result(_)) {
                    self.broken = Some("a meeting without all, or with all and no end");
                }
                if full {
                    let others: Vec<_> = self.waiting.drain(..).collect();
                    self.expect(others, Signal::Granted);
                } else {
                    self.waiting.push_back((session, ticket));
                }
            }
            _ => self.broken = Some("a request was refused"),
        }
        self.expect(Vec::new(), Signal::Granted);
        if self.processes[p].alive {
            self.processes[p].replies.push_back(reply);
        }
    }

    /// The home has these signals and no others.
    fn expect(&mut self, mut expected: Vec<(SessionId, Ticket)>, kind: Signal) {
        while let Some(Signalled { session, ticket, signal }) = self.home.signal() {
            let at = expected.iter().position(|other| *other == (session, ticket));
            let in_order = self.is_group() || at == Some(0);
            match at.filter(|_| in_order && signal == kind) {
                Some(at) => drop(expected.remove(at)),
                None => self.broken = Some("a signal that should not be, or not yet"),
            }
            let process = self.processes.iter_mut().find(|process| process.session == session).unwrap();
            if process.alive {
                process.signals.push(signal.notify(ticket).unwrap());
            }
        }
        if !expected.is_empty() {
            self.broken = Some("a signal was lost");
        }
    }

    fn poke(&mut self, p: usize) {
        let group = self.is_group();
        let process = &mut self.processes[p];
        let Some(attempt) = &mut process.attempt else { return };
        if matches!(attempt.step(), Step::Signal | Step::LastSignal)
            && let Some(signal) = process.waiters.signal(process.next)
        {
            attempt.signal(signal);
        }
        match attempt.step() {
            Step::Done(Outcome::Refused(_) | Outcome::Nonsense | Outcome::Busy) => {
                self.broken = Some("an attempt ended in an unexpected way");
            }
            Step::Done(_) => {
                process.attempt = None;
                if group {
                    process.ticket = process.next;
                } else {
                    process.waiters.give_back(process.ticket.slot);
                }
            }
            _ => {}
        }
    }

    /// Whoever still waits, waits because nobody wakes him, or because others do not come any more.
    fn is_at_rest(&self) -> bool {
        let waits = self.processes.iter().filter(|process| process.attempt.is_some()).count();
        waits == self.waiting.len() && !(self.is_group() && waits == self.processes.len())
    }
}

struct Small(World);

impl Model for Small {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![self.0.clone()]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        if world.broken.is_none() {
            actions.extend(world.actions());
        }
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut world = world.clone();
        world.apply(action);
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("in order, all together, told once", |_, world: &World| world.broken.is_none()),
            Property::always("never stuck", |_, world: &World| {
                !world.actions().is_empty() || world.is_at_rest()
            }),
        ]
    }
}

fn check(kind: Kind, processes: usize, turns: u8, deaths: u8, wakes: u8) {
    let checker = Small(World::new(kind, processes, turns, deaths, wakes)).checker();
    let checker = checker.threads(2).spawn_bfs().join();
    checker.assert_properties();
    assert!(checker.unique_state_count() > 1000);
}

#[test]
fn wait_queues_in_all_orders() {
    check(Kind::WaitQueue, 2, 2, 1, 2);
    check(Kind::WaitQueue, 3, 1, 1, 2);
}

#[test]
fn groups_in_all_orders() {
    check(Kind::Group { parties: 2 }, 2, 3, 1, 0);
    check(Kind::Group { parties: 3 }, 3, 1, 1, 0);
}
