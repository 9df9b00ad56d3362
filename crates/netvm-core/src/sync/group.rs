//! Barrier, reduction and broadcast: a number of members meet, again and again, and leave with what their contributions come to.
//!
//! When a member dies, or leaves while others wait for it, the meeting is broken: each other member is told so exactly once, those who wait
//! now and those who come later when they come. Then a new member can take the free rank.

use alloc::vec::Vec;

use super::home::{Out, SessionId, Who};
use super::message::{Op, Refusal, Reply, Signal, Ticket};
use crate::limits::GROUP_BYTES_MAX;

/// What a meeting makes of its contributions; numbers are little-endian, 8 bytes each. In the order of ranks, so that sums of
/// floating-point numbers are the same every time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Combine {
    /// Nothing: a barrier.
    Nothing,
    /// Sums, wrapping around.
    SumU64,
    /// Least.
    MinU64,
    /// Greatest.
    MaxU64,
    /// Least, signed.
    MinI64,
    /// Greatest, signed.
    MaxI64,
    /// Sums.
    SumF64,
    /// Least; a NaN only if all are.
    MinF64,
    /// Greatest; a NaN only if all are.
    MaxF64,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// The contribution of the member with this rank.
    Broadcast(u16),
}

const PLAIN: [Combine; 12] = [
    Combine::Nothing,
    Combine::SumU64,
    Combine::MinU64,
    Combine::MaxU64,
    Combine::MinI64,
    Combine::MaxI64,
    Combine::SumF64,
    Combine::MinF64,
    Combine::MaxF64,
    Combine::And,
    Combine::Or,
    Combine::Xor,
];

impl Combine {
    pub(super) fn number(self) -> u32 {
        match self {
            Self::Broadcast(root) => 1 << 16 | u32::from(root),
            plain => PLAIN.iter().position(|other| *other == plain).unwrap_or(0) as u32,
        }
    }

    pub(super) fn from_number(number: u32) -> Option<Self> {
        if number >> 16 == 1 {
            return Some(Self::Broadcast(number as u16));
        }
        PLAIN.get(number as usize).copied()
    }

    fn apply(self, one: u64, other: u64) -> u64 {
        let float = |f: fn(f64, f64) -> f64| f(f64::from_bits(one), f64::from_bits(other)).to_bits();
        let signed = |f: fn(i64, i64) -> i64| f(one as i64, other as i64) as u64;
        match self {
            Self::Nothing | Self::Broadcast(_) => one,
            Self::SumU64 => one.wrapping_add(other),
            Self::MinU64 => one.min(other),
            Self::MaxU64 => one.max(other),
            Self::MinI64 => signed(Ord::min),
            Self::MaxI64 => signed(Ord::max),
            Self::SumF64 => float(|one, other| one + other),
            Self::MinF64 => float(f64::min),
            Self::MaxF64 => float(f64::max),
            Self::And => one & other,
            Self::Or => one | other,
            Self::Xor => one ^ other,
        }
    }

    /// Whether a contribution of so many bytes makes sense.
    fn fits(self, bytes: usize) -> bool {
        match self {
            Self::Nothing => bytes == 0,
            Self::Broadcast(_) => bytes <= GROUP_BYTES_MAX,
            _ => bytes.is_multiple_of(8) && bytes <= GROUP_BYTES_MAX,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Member {
    who: Who,
    generation: u32,
    contribution: Option<Vec<u8>>,
    /// A meeting was broken before this one came to it.
    broken: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Group {
    /// By rank.
    members: Vec<Option<Member>>,
    result: Vec<u8>,
}

impl Group {
    pub(super) fn new(parties: u32) -> Self {
        Self { members: (0..parties).map(|_| None).collect(), result: Vec::new() }
    }

    pub(super) fn handle(&mut self, who: Who, generation: u32, op: Op, out: &mut Out) -> Reply {
        match op {
            Op::Join => {
                let Some(rank) = self.members.iter().position(Option::is_none) else {
                    return Reply::Refused(Refusal::Full);
                };
                self.members[rank] = Some(Member { who, generation, contribution: None, broken: false });
                out.used.push(who);
                Reply::Done(rank as u64)
            }
            Op::Leave => match self.find(who, generation) {
                Some(rank) => {
                    self.members[rank] = None;
                    out.freed.push(who);
                    if self.present().next().is_some() {
                        self.break_up(out);
                    }
                    Reply::Done(0)
                }
                None => Reply::Refused(Refusal::NotHeld),
            },
            Op::Arrive { next, combine, bytes } => match self.find(who, generation) {
                Some(rank) => self.arrive(rank, next, combine, bytes, out),
                None => Reply::Refused(Refusal::NotHeld),
            },
            Op::Fetch if self.find(who, generation).is_some() => Reply::Result(self.result.clone()),
            Op::Fetch => Reply::Refused(Refusal::NotHeld),
            Op::Cancel => {
                let member = self.find(who, generation).and_then(|rank| self.members[rank].as_mut());
                match member.and_then(|member| member.contribution.take()) {
                    Some(_) => Reply::Cancelled,
                    None => Reply::Queued,
                }
            }
            _ => Reply::Refused(Refusal::WrongKind),
        }
    }

    fn arrive(&mut self, rank: usize, next: u32, combine: Combine, bytes: Vec<u8>, out: &mut Out) -> Reply {
        let root = match combine {
            Combine::Broadcast(root) => usize::from(root),
            _ => 0,
        };
        if !combine.fits(bytes.len()) || root >= self.members.len() {
            return Reply::Refused(Refusal::Number);
        }
        // The contribution begins with what is to become of it, so that differences are seen.
        let mut contribution = combine.number().to_le_bytes().to_vec();
        contribution.extend_from_slice(&bytes);
        let same_length = !matches!(combine, Combine::Broadcast(_));
        let differs = |other: &Vec<u8>| {
            other[..4] != contribution[..4] || same_length && other.len() != contribution.len()
        };
        if self.present().any(differs) {
            return Reply::Refused(Refusal::Mismatch);
        }
        let Some(member) = &mut self.members[rank] else { return Reply::Refused(Refusal::NotHeld) };
        if member.contribution.is_some() {
            return Reply::Refused(Refusal::InUse);
        }
        member.generation = next;
        if core::mem::take(&mut member.broken) {
            return Reply::Broken;
        }
        member.contribution = Some(contribution);
        if self.present().count() < self.members.len() {
            return Reply::Queued;
        }
        self.result = self.combined(combine, root);
        for (other, member) in self.members.iter_mut().enumerate() {
            if let Some(member) = member {
                member.contribution = None;
                if other != rank {
                    member.signal(Signal::Granted, out);
                }
            }
        }
        Reply::Result(self.result.clone())
    }

    fn combined(&self, combine: Combine, root: usize) -> Vec<u8> {
        let mut contributions = self.present();
        if let Combine::Broadcast(_) = combine {
            return contributions.nth(root).map_or_else(Vec::new, |bytes| bytes[4..].to_vec());
        }
        let mut sum = contributions.next().map_or_else(Vec::new, |bytes| bytes[4..].to_vec());
        for contribution in contributions {
            for (sum, other) in
                sum.as_chunks_mut::<8>().0.iter_mut().zip(contribution[4..].as_chunks::<8>().0)
            {
                *sum = combine.apply(u64::from_le_bytes(*sum), u64::from_le_bytes(*other)).to_le_bytes();
            }
        }
        sum
    }

    /// The contributions to the meeting under way.
    fn present(&self) -> impl Iterator<Item = &Vec<u8>> {
        self.members.iter().flatten().filter_map(|member| member.contribution.as_ref())
    }

    fn find(&self, who: Who, generation: u32) -> Option<usize> {
        let same = |member: &Member| member.who == who && member.generation == generation;
        self.members.iter().position(|member| member.as_ref().is_some_and(same))
    }

    fn break_up(&mut self, out: &mut Out) {
        for member in self.members.iter_mut().flatten() {
            match member.contribution.take() {
                Some(_) => member.signal(Signal::Broken, out),
                None => member.broken = true,
            }
        }
    }

    pub(super) fn session_ended(&mut self, session: SessionId, out: &mut Out) {
        let mut died = false;
        for member in &mut self.members {
            died |= member.take_if(|member| member.who.session == session).is_some();
        }
        if died {
            self.break_up(out);
        }
    }

    pub(super) fn close(&mut self, out: &mut Out) {
        for member in self.members.iter().flatten() {
            if member.contribution.is_some() {
                member.signal(Signal::Closed, out);
            }
            out.freed.push(member.who);
        }
    }
}

impl Member {
    fn signal(&self, signal: Signal, out: &mut Out) {
        out.signal(self.who, Ticket { slot: self.who.slot, generation: self.generation }, signal);
    }
}
