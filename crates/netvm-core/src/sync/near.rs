//! The word of a lock or semaphore: processes of the home's host take and give back a lock that nobody else wants, and use up and make permits
//! that nobody waits for, by changing a word that they have mapped.
//!
//! ```text
//!  63          13 | 12      1 | 0
//!  count          | seat      | HOME
//! ```
//!
//! *Free* has no seat and no HOME. Who takes it puts its session's seat there, in one step, from exactly the value that it has read; who gives
//! it back counts on. HOME is the home's: from then on nobody else changes the word, and the home decides as it does without one. Before each of
//! its steps it takes the word ([`Word::claim`]), and finds who has the lock; when nobody has it, wants it or is to be told of a death, it puts a
//! free word back that never was there before.
//!
//! **Whose session has ended** takes nothing any more. The home first sets the flag of the session's share ([`crate::gate`]) and then changes every
//! word that the session may know to a value with another count. A process reads the word, then the flag, then changes the word from what it
//! has read. If that succeeds it came before the home's change, so the home has found it there; had it read the word afterwards it would have seen the
//! flag. It may be stopped for as long as it likes in between: a value comes back only after 2^51 changes.
//!
//! Whoever has the word mapped can write anything there. The home believes that a seat has the lock, or that nobody has it, and no more.
//!
//! **Permits** have no owner, so that a semaphore's word has their number in place of a seat:
//!
//! ```text
//!  63     33 | 32       1 | 0
//!  count     | permits    | HOME
//! ```
//!
//! Who uses some up leaves fewer there, and who makes some more, each time counting on. While the word is the home's it has them; permits that
//! belong to somebody, and come back when he dies, are asked for there. A permit that is used up by who dies then is gone, as the interface says, so that a
//! count that comes back after 2^31 changes harms nobody.

use super::message::{GENERATION_BITS, Ticket};

const HOME: u64 = 1;
const SEAT_BITS: u32 = 12;
const COUNT: u64 = 1 << (SEAT_BITS + 1);
/// Sessions that may have words of one home's at a time; seat 0 is nobody's.
pub(super) const SEATS_MAX: u16 = (1 << SEAT_BITS) - 1;

/// Where the word is. Its first value is 0.
pub trait Word {
    /// Sets the lowest bit and returns what the word was. At least Acquire.
    fn claim(&mut self) -> u64;
    /// Replaces the word. At least Release.
    fn put(&mut self, word: u64);
}

/// For homes that nobody has words of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Nowhere {}

impl Word for Nowhere {
    fn claim(&mut self) -> u64 {
        match *self {}
    }

    fn put(&mut self, _: u64) {
        match *self {}
    }
}

/// What the bit of [`Word::claim`] is, for those who set it.
pub const CLAIMED: u64 = HOME;

/// Whether the home decides.
pub(super) fn is_claimed(word: u64) -> bool {
    word & HOME != 0
}

/// The seat of who has the lock.
pub(super) fn seat(word: u64) -> Option<u16> {
    let seat = (word / 2) as u16 & SEATS_MAX;
    (word & HOME == 0 && seat != 0).then_some(seat)
}

/// A free word with another count.
pub(super) fn freed(word: u64) -> u64 {
    (word & !(COUNT - 1)).wrapping_add(COUNT)
}

/// Permits that a semaphore's word and all that have an owner may be together; so many more may be made by the word.
pub(super) const NEAR_PERMITS_MAX: u32 = u32::MAX / 2;

/// The permits in a semaphore's word.
pub(super) fn permits(word: u64) -> u32 {
    (word >> 1) as u32
}

/// A semaphore's word with so many permits, and another count.
pub(super) fn with_permits(word: u64, permits: u32) -> u64 {
    (word >> 33).wrapping_add(1) << 33 | u64::from(permits) << 1
}

/// What a process of this host knows of a lock or semaphore, as the home has told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Near {
    /// Its session's seat.
    seat: u16,
    /// How the home calls what the session has by the word.
    ticket: Ticket,
}

/// What is in the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Change the word from what was read to this, and the lock is taken, or the permits are used up.
    Free(u64),
    /// Another session that has the word mapped has it; there are too few permits.
    Taken,
    /// The home decides.
    Home,
}

impl Near {
    pub(super) fn new(seat: u16, ticket: Ticket) -> Self {
        Self { seat, ticket }
    }

    /// In one number.
    pub(super) fn to_u64(self) -> u64 {
        let Ticket { slot, generation } = self.ticket;
        u64::from(self.seat) << 48 | u64::from(slot) << 32 | u64::from(generation)
    }

    /// Back; `None` for nonsense.
    pub fn from_u64(number: u64) -> Option<Self> {
        let (seat, slot, generation) = ((number >> 48) as u16, (number >> 32) as u16, number as u32);
        let allowed = (1..=SEATS_MAX).contains(&seat) && generation >> GENERATION_BITS == 0;
        allowed.then_some(Self { seat, ticket: Ticket { slot, generation } })
    }

    /// By what the home knows it when it is to be told.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// What to do about a word that has been read.
    pub fn see(&self, word: u64) -> Seen {
        match word {
            _ if is_claimed(word) => Seen::Home,
            // Ours: it may have been given back already, in a message that is under way. The home gets what we ask behind that.
            _ if seat(word) == Some(self.seat) => Seen::Home,
            _ if seat(word).is_some() => Seen::Taken,
            _ => Seen::Free(word | (u64::from(self.seat) << 1)),
        }
    }

    /// What to do about a semaphore's word that has been read, to use up `count` permits.
    pub fn see_permits(word: u64, count: u32) -> Seen {
        match permits(word).checked_sub(count) {
            _ if is_claimed(word) || count == 0 => Seen::Home,
            Some(left) => Seen::Free(with_permits(word, left)),
            None => Seen::Taken,
        }
    }

    /// The word with `count` permits more, and how many there are then; `None`: the home is to be asked.
    pub fn more_permits(word: u64, count: u32) -> Option<(u64, u32)> {
        let more = permits(word).checked_add(count).filter(|&more| more <= NEAR_PERMITS_MAX + 1);
        let more = more.filter(|_| !is_claimed(word))?;
        Some((with_permits(word, more), more))
    }

    /// What gives back the lock that was taken with `word`: change the word from that to this. Not possible: tell the home.
    pub fn give_back(&self, word: u64) -> u64 {
        freed(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_taken_given_back_and_counted() {
        let near = Near::new(5, Ticket { slot: 1030, generation: 9 });
        assert_eq!(Near::from_u64(near.to_u64()), Some(near));
        assert_eq!(Near::from_u64(7), None);
        let Seen::Free(ours) = near.see(0) else { panic!("a new word is not free") };
        let other = Near::new(6, Ticket { slot: 1030, generation: 9 });
        assert_eq!(
            (seat(ours), other.see(ours), near.see(ours), other.see(ours | CLAIMED)),
            (Some(5), Seen::Taken, Seen::Home, Seen::Home)
        );
        let free = near.give_back(ours);
        assert!(matches!(near.see(free), Seen::Free(again) if again != ours));
        assert_eq!((seat(free), freed(ours | CLAIMED)), (None, free));
        let word = with_permits(0, 3);
        let Seen::Free(fewer) = Near::see_permits(word, 2) else { panic!("permits are not there") };
        assert_eq!((permits(fewer), Near::see_permits(fewer, 2)), (1, Seen::Taken));
        let (more, count) = Near::more_permits(fewer, 2).unwrap();
        assert_eq!((permits(more), count), (3, 3));
        assert!(more != word, "the count went on");
        assert_eq!(
            (Near::see_permits(more | CLAIMED, 1), Near::see_permits(more, 0)),
            (Seen::Home, Seen::Home)
        );
        assert_eq!(
            (Near::more_permits(more | CLAIMED, 1), Near::more_permits(more, NEAR_PERMITS_MAX)),
            (None, None)
        );
        assert_eq!(permits(with_permits(u64::MAX, u32::MAX)), u32::MAX);
        let last = !(COUNT - 1);
        assert_eq!(freed(last | CLAIMED), 0, "the count begins anew");
    }
}
