//! All objects of one node, and whose tickets are where.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use super::WRITER;
use super::gate::{Gate, GateKind};
use super::group::Group;
use super::message::{GENERATION_BITS, Op, Refusal, Reply, Request, Signal, Ticket};
use super::near::{self, Near, Nowhere, SEATS_MAX, Word};
use super::queue::Queue;
use crate::limits::{CONDITIONS_MAX, PARTIES_MAX, SYNC_OBJECTS_MAX, TICKETS_MAX};

/// A session with a peer. Never used twice, so a process that comes back is another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// A ticket's number and whose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Who {
    pub(super) session: SessionId,
    pub(super) slot: u16,
}

/// One signal to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Signalled {
    /// To whom.
    pub session: SessionId,
    /// For which of its tickets.
    pub ticket: Ticket,
    /// What.
    pub signal: Signal,
}

/// What an object did to tickets.
#[derive(Debug, Default)]
pub(super) struct Out {
    pub(super) used: Vec<Who>,
    pub(super) freed: Vec<Who>,
    signals: Vec<Signalled>,
}

impl Out {
    pub(super) fn signal(&mut self, who: Who, ticket: Ticket, signal: Signal) {
        self.signals.push(Signalled { session: who.session, ticket, signal });
    }

    /// A signal after which the object does not know the ticket any more.
    pub(super) fn end(&mut self, who: Who, generation: u32, signal: Signal) {
        self.signal(who, Ticket { slot: who.slot, generation }, signal);
        self.freed.push(who);
    }
}

/// What an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A lock with so many conditions: a monitor, if there are any.
    Monitor {
        /// At most 256.
        conditions: u32,
    },
    /// A reader-writer lock.
    ReadWriteLock,
    /// A counting semaphore.
    Semaphore {
        /// Units at the beginning.
        permits: u32,
    },
    /// A wait queue.
    WaitQueue,
    /// Barrier, reduction, broadcast.
    Group {
        /// Members that meet: 1 to 1024.
        parties: u32,
    },
}

impl Kind {
    /// A lock.
    pub const LOCK: Self = Self::Monitor { conditions: 0 };

    /// In one number.
    pub fn to_u64(self) -> u64 {
        let (kind, number) = match self {
            Self::Monitor { conditions } => (1, conditions),
            Self::ReadWriteLock => (2, 0),
            Self::Semaphore { permits } => (3, permits),
            Self::WaitQueue => (4, 0),
            Self::Group { parties } => (5, parties),
        };
        kind << 32 | u64::from(number)
    }

    /// Back.
    pub fn from_u64(number: u64) -> Option<Self> {
        let low = number as u32;
        Some(match number >> 32 {
            1 => Self::Monitor { conditions: low },
            2 => Self::ReadWriteLock,
            3 => Self::Semaphore { permits: low },
            4 => Self::WaitQueue,
            5 => Self::Group { parties: low },
            _ => return None,
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Machine {
    Gate(Gate),
    Queue(Queue),
    Group(Group),
}

/// An object in the home: its place and which use of the place it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId {
    index: u32,
    generation: u32,
}

impl ObjectId {
    /// Which of the home's places it has: 0 is the first.
    pub fn place(self) -> usize {
        self.index as usize
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Place<W> {
    generation: u32,
    object: Option<(Kind, Machine)>,
    /// The object's word, once somebody has it mapped.
    word: Option<W>,
    /// What the word was when the home took it.
    claimed: u64,
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Home<W = Nowhere> {
    objects: Vec<Place<W>>,
    tickets: BTreeMap<Who, ObjectId>,
    signals: VecDeque<Signalled>,
    /// Sessions that have words mapped.
    seats: BTreeMap<u16, SessionId>,
}

impl<W> Default for Home<W> {
    fn default() -> Self {
        let (objects, tickets) = (Vec::new(), BTreeMap::new());
        Self { objects, tickets, signals: VecDeque::new(), seats: BTreeMap::new() }
    }
}

impl<W: Word> Home<W> {
    /// A new object; `None` when there are too many, or it is larger than allowed.
    pub fn create(&mut self, kind: Kind) -> Option<ObjectId> {
        let machine = match kind {
            Kind::Monitor { conditions } if conditions as usize <= CONDITIONS_MAX => {
                Machine::Gate(Gate::new(GateKind::Lock, 1, conditions as usize))
            }
            Kind::ReadWriteLock => Machine::Gate(Gate::new(GateKind::ReadWrite, WRITER, 0)),
            Kind::Semaphore { permits } => Machine::Gate(Gate::new(GateKind::Semaphore, permits, 0)),
            Kind::WaitQueue => Machine::Queue(Queue::default()),
            Kind::Group { parties } if (1..=PARTIES_MAX).contains(&parties) => {
                Machine::Group(Group::new(parties))
            }
            Kind::Monitor { .. } | Kind::Group { .. } => return None,
        };
        let index = match self.objects.iter().position(|place| place.object.is_none()) {
            Some(index) => index,
            None if self.objects.len() < SYNC_OBJECTS_MAX => {
                self.objects.push(Place { generation: 0, object: None, word: None, claimed: 0 });
                self.objects.len() - 1
            }
            None => return None,
        };
        let place = &mut self.objects[index];
        place.generation += 1;
        (place.object, place.word) = (Some((kind, machine)), None);
        Some(ObjectId { index: index as u32, generation: place.generation })
    }

    /// Where the word of a lock or semaphore is, for those who have it mapped and come with [`Op::Near`]. Only once for each object.
    pub fn give_word(&mut self, id: ObjectId, mut word: W) {
        let index = id.index as usize;
        let place = self.objects.get_mut(index).filter(|place| place.generation == id.generation);
        let Some(place) = place.filter(|place| place.word.is_none()) else { return };
        match place.object {
            Some((Kind::Monitor { .. }, _)) => place.word = Some(word),
            Some((Kind::Semaphore { .. }, _)) => {
                // The permits are here, until they are put there.
                place.claimed = word.claim();
                place.word = Some(word);
                self.let_go(index);
            }
            _ => {}
        }
    }

    /// By what a session's possession by the word of an object is known here. Nobody else has such a slot, and each session one for each object.
    fn near_ticket(&self, index: usize) -> Ticket {
        let generation = self.objects[index].generation & ((1 << GENERATION_BITS) - 1);
        Ticket { slot: (TICKETS_MAX + index) as u16, generation }
    }

    /// Takes an object's word, if it has one: from now on nobody takes or gives back the lock but here.
    fn claim(&mut self, index: usize) {
        let Some(place) = self.objects.get_mut(index) else { return };
        let (Some(word), generation) = (&mut place.word, place.generation) else { return };
        let was = word.claim();
        if near::is_claimed(was) {
            return;
        }
        place.claimed = was;
        if let Some((Kind::Semaphore { .. }, Machine::Gate(gate))) = &mut place.object {
            gate.found(near::permits(was));
            return;
        }
        let Some(&session) = near::seat(was).and_then(|seat| self.seats.get(&seat)) else { return };
        let Ticket { slot, generation: known } = self.near_ticket(index);
        let (who, id) = (Who { session, slot }, ObjectId { index: index as u32, generation });
        if let Some((_, Machine::Gate(gate))) = &mut self.objects[index].object
            && gate.taken(who, known)
        {
            self.tickets.insert(who, id);
        }
    }

    /// Puts a word back that says that the lock is free, if it is; or how many permits are.
    fn let_go(&mut self, index: usize) {
        if let Some(Place { object: Some((_, Machine::Gate(gate))), word: Some(word), claimed, .. }) =
            self.objects.get_mut(index)
            && gate.is_quiet()
        {
            *claimed = match gate.permits() {
                Some(permits) => near::with_permits(*claimed, permits),
                None => near::freed(*claimed),
            };
            word.put(*claimed);
        }
    }

    /// The session has the word of an object mapped.
    fn seat(&mut self, session: SessionId, index: usize) -> Reply {
        if self.objects[index].word.is_none() {
            return Reply::Refused(Refusal::WrongKind);
        }
        let has = self.seats.iter().find(|(_, other)| **other == session).map(|(seat, _)| *seat);
        let free = || (1..=SEATS_MAX).find(|seat| !self.seats.contains_key(seat));
        let Some(seat) = has.or_else(free) else { return Reply::Refused(Refusal::Full) };
        self.seats.insert(seat, session);
        Reply::Done(Near::new(seat, self.near_ticket(index)).to_u64())
    }

    /// Takes an object away; who waits is told.
    pub fn close(&mut self, id: ObjectId) {
        let mut out = Out::default();
        let has = self.objects.get(id.index as usize).is_some_and(|place| place.generation == id.generation);
        if has {
            // It is not put back: who comes to the word asks here.
            self.claim(id.index as usize);
            self.objects[id.index as usize].word = None;
        }
        let place = self.objects.get_mut(id.index as usize).filter(|place| place.generation == id.generation);
        if let Some((_, mut machine)) = place.and_then(|place| place.object.take()) {
            match &mut machine {
                Machine::Gate(gate) => gate.close(&mut out),
                Machine::Queue(queue) => queue.close(&mut out),
                Machine::Group(group) => group.close(&mut out),
            }
        }
        self.settle(out, id);
    }

    /// A process asks; `request.object` has been looked up already.
    pub fn handle(&mut self, session: SessionId, id: ObjectId, request: Request) -> Reply {
        let Ticket { slot, generation } = request.ticket;
        let who = Who { session, slot };
        let place = self.objects.get_mut(id.index as usize).filter(|place| place.generation == id.generation);
        let Some((kind, _)) = place.and_then(|place| place.object.as_mut()) else {
            return Reply::Refused(Refusal::Closed);
        };
        match request.op {
            Op::Describe => return Reply::Done(kind.to_u64()),
            Op::Near => return self.seat(session, id.index as usize),
            Op::Acquire { .. } | Op::Enqueue | Op::Join | Op::Adopt => {
                if usize::from(slot) >= TICKETS_MAX {
                    return Reply::Refused(Refusal::Full);
                }
                if self.tickets.contains_key(&who) {
                    return Reply::Refused(Refusal::InUse);
                }
            }
            // It waits for no signal: nobody would get it.
            Op::Wait { .. } if usize::from(slot) >= TICKETS_MAX => return Reply::Refused(Refusal::Full),
            _ => {}
        }
        let index = id.index as usize;
        self.claim(index);
        let mut out = Out::default();
        let near = self.near_ticket(index);
        let Some((_, machine)) = &mut self.objects[index].object else {
            return Reply::Refused(Refusal::Closed);
        };
        let reply = match machine {
            Machine::Gate(gate) if request.op == Op::Adopt => {
                let from = Who { session, slot: near.slot };
                gate.pass((from, near.generation), (who, generation), &mut out)
            }
            Machine::Gate(gate) => gate.handle(who, generation, request.op, &mut out),
            Machine::Queue(queue) => queue.handle(who, generation, request.op, &mut out),
            Machine::Group(group) => group.handle(who, generation, request.op, &mut out),
        };
        self.settle(out, id);
        self.let_go(index);
        reply
    }

    /// A process gives back what a ticket has, or leaves a group, and waits for no answer. What makes no sense changes nothing.
    pub fn released(&mut self, session: SessionId, ticket: Ticket) {
        let who = Who { session, slot: ticket.slot };
        if let Some(index) = usize::from(ticket.slot).checked_sub(TICKETS_MAX) {
            // What it has by the word may not be known here yet.
            self.claim(index);
        }
        let Some(&id) = self.tickets.get(&who) else {
            if let Some(index) = usize::from(ticket.slot).checked_sub(TICKETS_MAX) {
                self.let_go(index);
            }
            return;
        };
        let op = match self.objects.get(id.index as usize).and_then(|place| place.object.as_ref()) {
            Some((_, Machine::Group(_))) => Op::Leave,
            _ => Op::Release,
        };
        self.handle(session, id, Request { object: 0, ticket, op });
    }

    /// A process has died, or has gone: what it had is free again, and it waits for nothing.
    pub fn session_ended(&mut self, session: SessionId) {
        // The caller has seen to it that nobody takes a word for this session who reads it from now on.
        let was_near = self.seats.values().any(|other| *other == session);
        if was_near {
            (0..self.objects.len()).for_each(|index| self.claim(index));
            self.seats.retain(|_, other| *other != session);
        }
        let all = Who { session, slot: 0 }..=Who { session, slot: u16::MAX };
        let mut objects: Vec<ObjectId> = self.tickets.range(all).map(|(_, id)| *id).collect();
        objects.sort_unstable();
        objects.dedup();
        self.tickets.retain(|who, _| who.session != session);
        self.signals.retain(|signalled| signalled.session != session);
        for id in objects {
            self.claim(id.index as usize);
            let mut out = Out::default();
            let place = self.objects.get_mut(id.index as usize);
            if let Some((_, machine)) = place.and_then(|place| place.object.as_mut()) {
                match machine {
                    Machine::Gate(gate) => gate.session_ended(session, &mut out),
                    Machine::Queue(queue) => queue.session_ended(session),
                    Machine::Group(group) => group.session_ended(session, &mut out),
                }
            }
            self.settle(out, id);
            self.let_go(id.index as usize);
        }
        if was_near {
            // Also those that it did not have: who has read one of them and is about to change it must not succeed.
            (0..self.objects.len()).for_each(|index| self.let_go(index));
        }
    }

    fn settle(&mut self, out: Out, id: ObjectId) {
        for who in out.used {
            self.tickets.insert(who, id);
        }
        for who in out.freed {
            self.tickets.remove(&who);
        }
        self.signals.extend(out.signals);
    }

    /// The next signal to send.
    pub fn signal(&mut self) -> Option<Signalled> {
        self.signals.pop_front()
    }

    /// Takes at most `most` of the signals for one session out of turn: they go with what it is answered.
    pub fn signals_for(&mut self, session: SessionId, most: usize) -> Vec<Signalled> {
        let is_its = |signalled: &Signalled| signalled.session == session;
        if most == 0 || !self.signals.iter().any(is_its) {
            return Vec::new();
        }
        let mut its = Vec::new();
        self.signals.retain(|signalled| {
            let taken = is_its(signalled) && its.len() < most;
            if taken {
                its.push(*signalled);
            }
            !taken
        });
        its
    }

    /// Whether there is one.
    pub fn has_signals(&self) -> bool {
        !self.signals.is_empty()
    }

    /// Tickets that wait for or have something.
    pub fn tickets(&self) -> usize {
        self.tickets.len()
    }

    #[cfg(test)]
    pub(super) fn word(&mut self, id: ObjectId) -> Option<&mut W> {
        self.objects[id.index as usize].word.as_mut()
    }

    #[cfg(test)]
    pub(super) fn units(&self, id: ObjectId) -> Option<(u32, u32)> {
        match &self.objects[id.index as usize].object {
            Some((_, Machine::Gate(gate))) => Some(gate.units()),
            _ => None,
        }
    }
}
