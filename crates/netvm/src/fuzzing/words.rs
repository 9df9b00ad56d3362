//! Locks whose words are mapped: honest processes that are stopped between two steps, others that ask for and write whatever they like.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;

use netvm_core::sync::{
    CLAIMED, Home, Kind, Near, ObjectId, Op, Reply, Request, Seen, SessionId, Signal, Ticket, Word,
};

use super::Input;

const PROCESSES: usize = 3;
const OBJECTS: usize = 2;

/// A word that processes have mapped, and whether one of them has written into it what it must not.
#[derive(Clone, Default)]
struct Mapped {
    word: Rc<Cell<u64>>,
    lied: Rc<Cell<bool>>,
}

impl Word for Mapped {
    fn claim(&mut self) -> u64 {
        self.word.replace(self.word.get() | CLAIMED)
    }

    fn put(&mut self, word: u64) {
        self.word.set(word);
    }
}

type Holder = (SessionId, u16, u32);

/// A lock, and what should be so.
struct Object {
    id: ObjectId,
    mapped: Mapped,
    /// Who has it by what the home has said, and who waits.
    holders: BTreeSet<Holder>,
    waiting: BTreeSet<Holder>,
    /// By the word: whose session, and what was written.
    near: [Option<Near>; PROCESSES],
    taken: [Option<u64>; PROCESSES],
    /// Read, and the flag of the session's share looked at, but not changed yet.
    read: Vec<(SessionId, usize, u64, u64)>,
    /// Somebody has died with it, and nobody has been told.
    dead: bool,
}

impl Object {
    fn new(home: &mut Home<Mapped>) -> Self {
        let id = home.create(Kind::Monitor { conditions: 2 }).expect("there is room");
        let mapped = Mapped::default();
        home.give_word(id, mapped.clone());
        let (holders, waiting) = (BTreeSet::new(), BTreeSet::new());
        let near = [None; PROCESSES];
        let taken = [None; PROCESSES];
        Self { id, mapped, holders, waiting, near, taken, read: Vec::new(), dead: false }
    }

    fn is_honest(&self) -> bool {
        !self.mapped.lied.get()
    }

    fn granted(&mut self, holder: Holder, abandoned: bool) {
        self.holders.insert(holder);
        assert!(!self.is_honest() || abandoned == self.dead, "a death is told once");
        self.dead = false;
    }

    fn check(&self) {
        assert!(self.holders.len() <= 1, "two have a lock");
        let near = self.taken.iter().flatten().count();
        assert!(!self.is_honest() || self.holders.len() + near <= 1, "two have a lock, by its word");
    }
}

struct World {
    home: Home<Mapped>,
    objects: Vec<Object>,
    sessions: [SessionId; PROCESSES],
    next: u64,
}

/// See the module.
///
/// # Panics
/// When something is wrong.
pub fn words(data: &[u8]) {
    let mut input = Input(data);
    let mut home = Home::default();
    let objects = (0..OBJECTS).map(|_| Object::new(&mut home)).collect();
    let sessions = std::array::from_fn(|process| SessionId(process as u64));
    let mut world = World { home, objects, sessions, next: PROCESSES as u64 };
    while !input.is_empty() {
        let (process, object) = (input.below(PROCESSES), input.below(OBJECTS));
        match input.below(16) {
            0 => world.end(process),
            1 => world.close(object),
            2 => {
                let mapped = &world.objects[object].mapped;
                mapped.word.set(u64::from_le_bytes(input.array()));
                mapped.lied.set(true);
            }
            3 | 4 => world.read(process, object),
            5 | 6 => world.change(object, input.below(8)),
            7 | 8 => world.give_back(process, object),
            9 => {
                let body = input.piece();
                if let Some(request) = Request::decode(body) {
                    world.ask(process, object, request);
                }
            }
            10 => {
                let (slot, generation) = (u16::from(input.byte() % 4), u32::from(input.byte() % 3));
                world.released(process, Ticket { slot, generation });
            }
            _ => {
                // A sound request with small numbers, perhaps for what the process has by the word.
                let mut body = [0; 20];
                (body[0], body[1]) = (1 + input.byte() % 15, input.byte() % 4);
                for (index, below) in [(2, 4), (4, 3), (12, 3), (16, 3)] {
                    body[index] = input.byte() % below;
                }
                let by_word = input.byte() % 4 == 0;
                if let Some(mut request) = Request::decode(&body) {
                    if let (true, Some(near)) = (by_word, world.objects[object].near[process]) {
                        request.ticket = near.ticket();
                    }
                    world.ask(process, object, request);
                }
            }
        }
        world.signals();
        world.objects.iter().for_each(Object::check);
    }
    (0..PROCESSES).for_each(|process| world.end(process));
    assert_eq!(world.home.tickets(), 0, "a process that is gone has something");
    assert!(!world.home.has_signals(), "for nobody");
    for object in 0..OBJECTS {
        // Whatever was written into the word: the home's own counts are right.
        let request = |op| Request { object: 0, ticket: Ticket { slot: 0, generation: 1 }, op };
        world.ask(0, object, request(Op::Acquire { count: 1, wait: false, owned: true }));
        assert_eq!(world.objects[object].holders.len(), 1, "it is free, and not to be had");
        world.ask(0, object, request(Op::Release));
    }
    // Now that no word is a lie: one that names a seat would give the lock to the first who gets that seat.
    for object in 0..OBJECTS {
        let near = Request { object: 0, ticket: Ticket { slot: 0, generation: 1 }, op: Op::Near };
        world.ask(1, object, near);
        world.objects[object].read.clear();
        world.read(1, object);
        assert_eq!(world.objects[object].read.len(), 1, "its word does not say that it is free");
    }
}

impl World {
    fn end(&mut self, process: usize) {
        let session = std::mem::replace(&mut self.sessions[process], SessionId(self.next));
        self.next += 1;
        self.home.session_ended(session);
        for object in &mut self.objects {
            let by_word = object.taken[process].take().is_some();
            object.near[process] = None;
            let held = object.holders.len();
            object.holders.retain(|holder| holder.0 != session);
            object.waiting.retain(|holder| holder.0 != session);
            object.dead |= by_word || object.holders.len() < held;
        }
        self.signals();
    }

    fn close(&mut self, object: usize) {
        let old = &mut self.objects[object];
        self.home.close(old.id);
        old.holders.clear();
        self.signals();
        let old = std::mem::replace(&mut self.objects[object], Object::new(&mut self.home));
        assert!(old.waiting.is_empty(), "somebody was not told that it has gone");
        for (_, _, seen, _) in old.read {
            let is_changed = seen != old.mapped.word.get();
            assert!(is_changed || old.mapped.lied.get(), "a lock that has gone can be taken");
        }
    }

    fn read(&mut self, process: usize, object: usize) {
        let (session, object) = (self.sessions[process], &mut self.objects[object]);
        let seen = object.mapped.word.get();
        if let Some(near) = object.near[process]
            && let Seen::Free(ours) = near.see(seen)
        {
            object.read.push((session, process, seen, ours));
            if object.read.len() > 8 {
                object.read.remove(0);
            }
        }
    }

    fn change(&mut self, object: usize, which: usize) {
        let (sessions, object) = (self.sessions, &mut self.objects[object]);
        if which >= object.read.len() {
            return;
        }
        let (session, process, seen, ours) = object.read.remove(which);
        if object.mapped.word.get() != seen {
            return;
        }
        if sessions[process] != session {
            assert!(!object.is_honest(), "taken by a session that had ended");
            return;
        }
        object.mapped.word.set(ours);
        object.taken[process] = Some(ours);
        assert!(!object.is_honest() || !object.dead, "nobody is told of a death");
    }

    fn give_back(&mut self, process: usize, object: usize) {
        let it = &mut self.objects[object];
        let (Some(ours), Some(near)) = (it.taken[process].take(), it.near[process]) else { return };
        if it.mapped.word.get() == ours {
            it.mapped.word.set(near.give_back(ours));
        } else {
            self.home.released(self.sessions[process], near.ticket());
        }
    }

    /// Gives back what the ticket has, of whatever object.
    fn released(&mut self, process: usize, ticket: Ticket) {
        let session = self.sessions[process];
        self.home.released(session, ticket);
        let holder = (session, ticket.slot, ticket.generation);
        for object in &mut self.objects {
            object.holders.remove(&holder);
        }
    }

    fn ask(&mut self, process: usize, object: usize, request: Request) {
        let (session, it) = (self.sessions[process], &mut self.objects[object]);
        let reply = self.home.handle(session, it.id, request.clone());
        assert_eq!(Reply::decode(&reply.encode()), Some(reply.clone()));
        let Ticket { slot, generation } = request.ticket;
        let holder = (session, slot, generation);
        let by_word = it.near[process].is_some_and(|near| near.ticket() == request.ticket);
        match (&request.op, reply) {
            (Op::Acquire { .. }, Reply::Granted { abandoned }) => it.granted(holder, abandoned),
            (Op::Acquire { .. }, Reply::Queued) => drop(it.waiting.insert(holder)),
            (Op::Cancel, Reply::Cancelled) => assert!(it.waiting.remove(&holder), "it did not wait"),
            (Op::Release, Reply::Done(_)) => {
                let had = it.holders.remove(&holder) || by_word && it.taken[process].take().is_some();
                assert!(had || !it.is_honest(), "it has given back what it did not have");
            }
            (Op::Wait { next, .. }, Reply::Queued) => {
                assert!(it.holders.remove(&holder), "it was not inside");
                it.waiting.insert((session, slot, *next));
            }
            (Op::Adopt, Reply::Done(_)) => {
                let had = it.taken[process].take().is_some();
                assert!(had || !it.is_honest(), "it did not have the word");
                it.holders.insert(holder);
            }
            (Op::Near, Reply::Done(number)) => it.near[process] = Near::from_u64(number),
            _ => {}
        }
    }

    /// Each signal is for somebody who waits.
    fn signals(&mut self) {
        while let Some(signalled) = self.home.signal() {
            let Ticket { slot, generation } = signalled.ticket;
            let holder = (signalled.session, slot, generation);
            let waits = |object: &&mut Object| object.waiting.contains(&holder);
            let object = self.objects.iter_mut().find(waits).expect("a signal for nobody");
            object.waiting.remove(&holder);
            match signalled.signal {
                Signal::Granted | Signal::Expired => object.granted(holder, false),
                Signal::Abandoned | Signal::ExpiredAbandoned => object.granted(holder, true),
                Signal::Closed | Signal::Broken => {}
            }
        }
    }
}
