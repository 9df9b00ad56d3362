//! What homes and processes tell each other.
//!
//! ```text
//!  request  | op 1 | flags 1 | slot 2 | generation 4 | object 4 | number 4 | next 4 | bytes ... |
//!  reply    | code 1 | number 8 | bytes ... |
//!  signal   a notification of the session: number = slot, value = generation << 4 | signal
//!  release  the same in the other direction, with 15 as signal: no answer, so no round trip
//! ```

use alloc::vec::Vec;
use core::num::NonZeroU32;

use super::group::Combine;
use crate::limits::GROUP_BYTES_MAX;
use crate::notify::Notify;

/// Generations are reused after so many uses of a slot.
pub(super) const GENERATION_BITS: u32 = 28;

const REQUEST_BYTES: usize = 20;

/// Stands for one wait, or one possession, of one process: its own number and which use of that number it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket {
    /// Number, unique within the session while it waits or has something.
    pub slot: u16,
    /// Which use of the number.
    pub generation: u32,
}

const RELEASED: u32 = 15;

impl Ticket {
    /// Tells the home that the ticket gives back what it has. A notification comes after all writes before it, so the next one
    /// finds those.
    pub fn release(self) -> Option<Notify> {
        self.notify(RELEASED)
    }

    /// Back.
    pub fn from_release(notify: Notify) -> Option<Self> {
        Self::from_notify(notify).and_then(|(ticket, code)| (code == RELEASED).then_some(ticket))
    }

    fn notify(self, code: u32) -> Option<Notify> {
        let value = NonZeroU32::new(self.generation << 4 | code)?;
        Some(Notify::Post { number: self.slot, value })
    }

    fn from_notify(notify: Notify) -> Option<(Self, u32)> {
        let Notify::Post { number, value } = notify else { return None };
        Some((Self { slot: number, generation: value.get() >> 4 }, value.get() & 15))
    }
}

/// What a process wants of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// What the object is: [`Reply::Done`] with its kind.
    Describe,
    /// So many units (a lock: 1, a writer: [`super::WRITER`]), or a place in the queue for them.
    Acquire {
        /// Units.
        count: u32,
        /// Queue if there are not so many.
        wait: bool,
        /// They come back when the process dies.
        owned: bool,
    },
    /// Gives back what the ticket has.
    Release,
    /// Leaves the queue. [`Reply::Queued`] when it is too late: the signal is on its way, or will come.
    Cancel,
    /// Makes new units.
    Add {
        /// How many.
        count: u32,
    },
    /// Gives a monitor back and waits for a condition, in one step. The wait has a generation of its own.
    Wait {
        /// Which.
        condition: u32,
        /// Generation of the ticket from now on.
        next: u32,
    },
    /// Lets who waits for a condition queue for the monitor; [`Reply::Done`] with their number.
    Notify {
        /// Which.
        condition: u32,
        /// All of them instead of the first.
        all: bool,
    },
    /// A place in a wait queue.
    Enqueue,
    /// Wakes the first in a wait queue; [`Reply::Done`] with their number.
    Wake {
        /// How many at most.
        count: u32,
    },
    /// Membership in a group; [`Reply::Done`] with the rank.
    Join,
    /// Ends it.
    Leave,
    /// Arrives at the group's next meeting.
    Arrive {
        /// Generation of the ticket from now on.
        next: u32,
        /// What becomes of the contributions.
        combine: Combine,
        /// This one's.
        bytes: Vec<u8>,
    },
    /// What the last meeting came to.
    Fetch,
    /// What a process needs that has the lock's word mapped: [`Reply::Done`] with a [`super::Near`] in it.
    Near,
    /// What the session has by the word belongs to the ticket from now on.
    Adopt,
}

/// An [`Op`] and for whom.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// The session's handle of the object.
    pub object: u32,
    /// Who asks.
    pub ticket: Ticket,
    /// What.
    pub op: Op,
}

impl Request {
    /// The body of the call.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(REQUEST_BYTES);
        let (op, flags, number, next): (u8, u8, u32, u32) = match &self.op {
            Op::Describe => (1, 0, 0, 0),
            Op::Acquire { count, wait, owned } => (2, u8::from(*wait) | u8::from(*owned) << 1, *count, 0),
            Op::Release => (3, 0, 0, 0),
            Op::Cancel => (4, 0, 0, 0),
            Op::Add { count } => (5, 0, *count, 0),
            Op::Wait { condition, next } => (6, 0, *condition, *next),
            Op::Notify { condition, all } => (7, u8::from(*all), *condition, 0),
            Op::Enqueue => (8, 0, 0, 0),
            Op::Wake { count } => (9, 0, *count, 0),
            Op::Join => (10, 0, 0, 0),
            Op::Leave => (11, 0, 0, 0),
            Op::Arrive { next, combine, .. } => (12, 0, combine.number(), *next),
            Op::Fetch => (13, 0, 0, 0),
            Op::Near => (14, 0, 0, 0),
            Op::Adopt => (15, 0, 0, 0),
        };
        bytes.extend_from_slice(&[op, flags]);
        bytes.extend_from_slice(&self.ticket.slot.to_le_bytes());
        for word in [self.ticket.generation, self.object, number, next] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        if let Op::Arrive { bytes: more, .. } = &self.op {
            bytes.extend_from_slice(more);
        }
        bytes
    }

    /// Back; `None` when a peer sends what makes no sense.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_at_checked(REQUEST_BYTES)?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (flags, number, next) = (head[1], word(12), word(16));
        let ticket = Ticket { slot: u16::from_le_bytes([head[2], head[3]]), generation: word(4) };
        let op = match head[0] {
            1 => Op::Describe,
            2 => Op::Acquire { count: number, wait: flags & 1 != 0, owned: flags & 2 != 0 },
            3 => Op::Release,
            4 => Op::Cancel,
            5 => Op::Add { count: number },
            6 => Op::Wait { condition: number, next },
            7 => Op::Notify { condition: number, all: flags & 1 != 0 },
            8 => Op::Enqueue,
            9 => Op::Wake { count: number },
            10 => Op::Join,
            11 => Op::Leave,
            12 => Op::Arrive { next, combine: Combine::from_number(number)?, bytes: rest.to_vec() },
            13 => Op::Fetch,
            14 => Op::Near,
            15 => Op::Adopt,
            _ => return None,
        };
        let bytes_max = if head[0] == 12 { GROUP_BYTES_MAX } else { 0 };
        let allowed = (ticket.generation | next) >> GENERATION_BITS == 0 && rest.len() <= bytes_max;
        allowed.then_some(Self { object: word(8), ticket, op })
    }
}

/// Why a request was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The object is of another kind.
    WrongKind,
    /// The ticket does not have what it gives back, or is no member.
    NotHeld,
    /// More units than there can be, no such condition.
    Number,
    /// The object, or the session's allowance, is full.
    Full,
    /// The ticket is in use.
    InUse,
    /// Others of the group do something else at this meeting.
    Mismatch,
    /// The object has gone.
    Closed,
}

/// The immediate answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Reply {
    /// It is the asker's turn.
    Granted {
        /// Who had it before has died with it.
        abandoned: bool,
    },
    /// A signal will come, or is on its way.
    Queued,
    /// Not now, and the asker did not want to wait.
    Busy,
    /// No signal will come.
    Cancelled,
    /// Done.
    Done(u64),
    /// What a meeting came to.
    Result(Vec<u8>),
    /// A member of the group has died or left in the middle of a meeting.
    Broken,
    /// Not done.
    Refused(Refusal),
}

const REFUSALS: [Refusal; 7] = [
    Refusal::WrongKind,
    Refusal::NotHeld,
    Refusal::Number,
    Refusal::Full,
    Refusal::InUse,
    Refusal::Mismatch,
    Refusal::Closed,
];

impl Reply {
    /// The body of the call's answer.
    pub fn encode(&self) -> Vec<u8> {
        let (code, number, more): (u8, u64, &[u8]) = match self {
            Self::Granted { abandoned } => (1, u64::from(*abandoned), &[]),
            Self::Queued => (2, 0, &[]),
            Self::Busy => (3, 0, &[]),
            Self::Cancelled => (4, 0, &[]),
            Self::Done(number) => (5, *number, &[]),
            Self::Result(bytes) => (6, 0, bytes),
            Self::Broken => (7, 0, &[]),
            Self::Refused(refusal) => {
                let number = REFUSALS.iter().position(|other| other == refusal).unwrap_or(0);
                (8, number as u64, &[])
            }
        };
        let mut bytes = Vec::with_capacity(9 + more.len());
        bytes.push(code);
        bytes.extend_from_slice(&number.to_le_bytes());
        bytes.extend_from_slice(more);
        bytes
    }

    /// Back; `None` when a home sends what makes no sense.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (&code, rest) = bytes.split_first()?;
        let (number, more) = rest.split_first_chunk::<8>()?;
        let number = u64::from_le_bytes(*number);
        Some(match code {
            1 => Self::Granted { abandoned: number != 0 },
            2 => Self::Queued,
            3 => Self::Busy,
            4 => Self::Cancelled,
            5 => Self::Done(number),
            6 => Self::Result(more.to_vec()),
            7 => Self::Broken,
            8 => Self::Refused(*REFUSALS.get(usize::try_from(number).ok()?)?),
            _ => return None,
        })
    }
}

/// What a queued process is told when its turn has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Signal {
    /// Its turn; woken; the meeting is over.
    Granted = 1,
    /// Its turn, and who had it before has died with it.
    Abandoned = 2,
    /// Inside the monitor again after the time for the condition was over.
    Expired = 3,
    /// Both.
    ExpiredAbandoned = 4,
    /// The object has gone.
    Closed = 5,
    /// A member of the group has died or left.
    Broken = 6,
}

impl Signal {
    pub(super) fn turn(abandoned: bool, expired: bool) -> Self {
        match (abandoned, expired) {
            (false, false) => Self::Granted,
            (true, false) => Self::Abandoned,
            (false, true) => Self::Expired,
            (true, true) => Self::ExpiredAbandoned,
        }
    }

    /// As a notification of the session.
    pub fn notify(self, ticket: Ticket) -> Option<Notify> {
        ticket.notify(self as u32)
    }

    /// Back.
    pub fn from_notify(notify: Notify) -> Option<(Ticket, Self)> {
        let (ticket, code) = Ticket::from_notify(notify)?;
        let signal = match code {
            1 => Self::Granted,
            2 => Self::Abandoned,
            3 => Self::Expired,
            4 => Self::ExpiredAbandoned,
            5 => Self::Closed,
            6 => Self::Broken,
            _ => return None,
        };
        Some((ticket, signal))
    }
}
