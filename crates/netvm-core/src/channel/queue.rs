//! A ring with many senders: the receiver's node gives out the places.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use super::NoPlace;
use crate::limits::HELD_BYTES_MAX;

/// Who sends: one of the receiver's senders.
type Who = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    Reserved,
    Committed,
    /// Its sender will not commit it.
    Dead,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Entry {
    who: Who,
    start: u64,
    bytes: u64,
    state: State,
}

/// A block that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// Whose.
    pub sender: u32,
    /// Where in the ring.
    pub offset: u64,
    /// How long, with headers.
    pub bytes: u64,
}

/// A place for what waited.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// Whose.
    pub sender: u32,
    /// Where in the ring.
    pub offset: u64,
    /// What was held: it is to be written there now, before anybody looks. None: its sender writes, and is to be told.
    pub held: Option<Vec<u8>>,
}

/// Answer to a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// There.
    At(u64),
    /// Later: there will be a [`Grant`].
    Later,
}

/// Blocks are multiples of this, so that what is noted of a block takes no more than it.
pub const BLOCK_BYTES: u64 = 64;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Sender {
    /// Where the place begins that it has not committed.
    reserved: Option<u64>,
    waits: bool,
    /// Blocks that have not been read.
    committed: u64,
    /// Bytes of its blocks that are held until there is room.
    held: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Waiting {
    who: Who,
    bytes: u64,
    held: Option<Vec<u8>>,
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Queue {
    capacity: u64,
    tail: u64,
    entries: VecDeque<Entry>,
    /// Those who have anything here.
    senders: BTreeMap<Who, Sender>,
    waiting: VecDeque<Waiting>,
    grants: VecDeque<Grant>,
}

impl Queue {
    /// An empty ring of `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        let (entries, waiting, grants) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        Self { capacity, tail: 0, entries, senders: BTreeMap::new(), waiting, grants }
    }

    /// Longest block.
    pub fn block_bytes_max(capacity: u64) -> u64 {
        capacity / 2 / BLOCK_BYTES * BLOCK_BYTES
    }

    /// A place for a block of `bytes`.
    ///
    /// # Errors
    /// Too long, none at all, no multiple of [`BLOCK_BYTES`]; full: the sender has a place, or waits for one, already.
    pub fn reserve(&mut self, who: u32, bytes: u64) -> Result<Place, NoPlace> {
        if bytes == 0 || !bytes.is_multiple_of(BLOCK_BYTES) || bytes > Self::block_bytes_max(self.capacity) {
            return Err(NoPlace::TooLong);
        }
        if self.senders.get(&who).is_some_and(|sender| sender.waits || sender.reserved.is_some()) {
            return Err(NoPlace::Full);
        }
        if self.waiting.is_empty()
            && let Some(offset) = self.take(who, bytes, false)
        {
            return Ok(Place::At(offset));
        }
        self.senders.entry(who).or_default().waits = true;
        self.waiting.push_back(Waiting { who, bytes, held: None });
        Ok(Place::Later)
    }

    /// A block that has come with the request for its place, and is read from there: the caller writes it to the place, now. Without room
    /// it is held.
    ///
    /// # Errors
    /// Too long, or nothing; full: more is held for the sender than it may have.
    pub fn put(&mut self, who: u32, block: &[u8]) -> Result<Place, NoPlace> {
        let bytes = (block.len() as u64).next_multiple_of(BLOCK_BYTES);
        if bytes == 0 || bytes > Self::block_bytes_max(self.capacity) {
            return Err(NoPlace::TooLong);
        }
        if self.waiting.is_empty()
            && let Some(offset) = self.take(who, bytes, true)
        {
            return Ok(Place::At(offset));
        }
        let sender = self.senders.entry(who).or_default();
        if sender.held + bytes > HELD_BYTES_MAX {
            self.forget(who);
            return Err(NoPlace::Full);
        }
        sender.held += bytes;
        self.waiting.push_back(Waiting { who, bytes, held: Some(block.to_vec()) });
        Ok(Place::Later)
    }

    /// The sender's block is written; false when it has none.
    pub fn commit(&mut self, who: u32) -> bool {
        let Some(sender) = self.senders.get_mut(&who) else { return false };
        let Some(start) = sender.reserved.take() else { return false };
        sender.committed += 1;
        self.mark(start, State::Committed);
        true
    }

    /// The sender does not want to wait any more; false when it does not wait: its place may be on its way.
    pub fn cancel(&mut self, who: u32) -> bool {
        let waits = self.senders.get_mut(&who).is_some_and(|sender| core::mem::take(&mut sender.waits));
        if waits {
            self.waiting.retain(|waiting| waiting.who != who || waiting.held.is_some());
            self.forget(who);
            self.pump();
        }
        waits
    }

    /// The sender does not use its place, and waits for none. What is held of it has arrived.
    pub fn give_up(&mut self, who: u32) {
        self.cancel(who);
        if let Some(start) = self.senders.get_mut(&who).and_then(|sender| sender.reserved.take()) {
            self.mark(start, State::Dead);
            self.forget(who);
        }
        self.pump();
    }

    /// The block to read next.
    pub fn front(&self) -> Option<Block> {
        let entry = self.entries.front().filter(|entry| entry.state == State::Committed)?;
        let sender = entry.who;
        Some(Block { sender, offset: entry.start % self.capacity, bytes: entry.bytes })
    }

    /// The block in front has been read.
    pub fn release(&mut self) {
        let Some(Block { sender: who, .. }) = self.front() else { return };
        self.entries.pop_front();
        if let Some(sender) = self.senders.get_mut(&who) {
            sender.committed -= 1;
        }
        self.forget(who);
        self.pump();
    }

    /// Whether blocks of the sender are still to be read.
    pub fn has_of(&self, who: u32) -> bool {
        self.senders.get(&who).is_some_and(|sender| sender.committed > 0 || sender.held > 0)
    }

    /// The next place for one who waited.
    pub fn grant(&mut self) -> Option<Grant> {
        self.grants.pop_front()
    }

    fn mark(&mut self, start: u64, state: State) {
        if let Ok(at) = self.entries.binary_search_by_key(&start, |entry| entry.start) {
            self.entries[at].state = state;
        }
    }

    /// Nothing of a sender is noted that has nothing here.
    fn forget(&mut self, who: Who) {
        if self.senders.get(&who) == Some(&Sender::default()) {
            self.senders.remove(&who);
        }
    }

    fn take(&mut self, who: Who, bytes: u64, has_come: bool) -> Option<u64> {
        let head = self.entries.front().map_or(self.tail, |entry| entry.start);
        let at = self.tail % self.capacity;
        let start = if at + bytes > self.capacity { self.tail + self.capacity - at } else { self.tail };
        if start + bytes - head > self.capacity {
            return None;
        }
        let sender = self.senders.entry(who).or_default();
        let state = if has_come {
            sender.committed += 1;
            State::Committed
        } else {
            (sender.reserved, sender.waits) = (Some(start), false);
            State::Reserved
        };
        self.entries.push_back(Entry { who, start, bytes, state });
        self.tail = start + bytes;
        Some(start % self.capacity)
    }

    /// Frees what is dead and in front, and serves who waits.
    fn pump(&mut self) {
        while self.entries.front().is_some_and(|entry| entry.state == State::Dead) {
            self.entries.pop_front();
        }
        while let Some(&Waiting { who, bytes, ref held }) = self.waiting.front() {
            let has_come = held.is_some();
            let Some(offset) = self.take(who, bytes, has_come) else { break };
            if has_come && let Some(sender) = self.senders.get_mut(&who) {
                sender.held -= bytes;
            }
            let held = self.waiting.pop_front().and_then(|waiting| waiting.held);
            self.grants.push_back(Grant { sender: who, offset, held });
        }
    }
}
