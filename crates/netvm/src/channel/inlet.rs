//! The receiving side of channels, as the node's peers reach it.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard};

use netvm_core::channel::{Ask, BLOCK_BYTES, Notice, Place, Progress, Queue, ReceiveRing, Told};
use netvm_core::limits::{HELD_BYTES_MAX, OUTLETS_MAX};
use netvm_core::notify::Notify;
use netvm_core::sync::SessionId;
use netvm_core::wire::Status;
use netvm_sys::shared::SharedSlice;

use crate::memory::{Memory, now};
use crate::node::lock;
use crate::notify::Notifications;

/// Where a sender is told: its session, and its slot there.
pub(crate) type End = (SessionId, u16);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Open,
    /// It has closed its end.
    Closing,
    /// Its session has ended.
    Lost,
}

pub(super) struct Source {
    pub(super) end: End,
    pub(super) state: State,
    /// Unused when the ring is shared.
    pub(super) ring: ReceiveRing,
    /// Its session has the ring mapped, so it may be believed that it reads its word there.
    pub(super) near: bool,
    /// How much of what came with requests has its place.
    placed: Progress,
    /// Bytes of its blocks whose places are not there.
    away: u64,
}

/// A block whose place in the ring is not there just now: the receiver writes it.
pub(super) struct Away {
    sender: u32,
    offset: u64,
    block: Vec<u8>,
}

/// Stands for the end of a block in place of a message's length.
pub(super) const BLOCK_END: u32 = u32::MAX;

/// A receiver's state. Locked after a peer and the [`Hub`], and never before one.
pub(crate) struct Inlet {
    pub(super) board: Notifications,
    pub(super) ring_bytes: u64,
    memory: Memory,
    state: Mutex<Sources>,
}

pub(super) struct Sources {
    pub(super) sources: Vec<Option<Source>>,
    /// Of the ring that all share.
    pub(super) queue: Option<Queue>,
    /// Senders that have ended, in this order, for a shared ring.
    pub(super) ended: VecDeque<u32>,
    /// In the order in which they came.
    pub(super) away: Vec<Away>,
    closed: bool,
    uses: u32,
}

impl Inlet {
    pub(super) fn new(
        board: Notifications,
        memory: Memory,
        ring_bytes: u64,
        senders: u32,
        shared: bool,
    ) -> Self {
        let sources = Sources {
            sources: (0..senders).map(|_| None).collect(),
            queue: shared.then(|| Queue::new(ring_bytes)),
            ended: VecDeque::new(),
            away: Vec::new(),
            closed: false,
            uses: 0,
        };
        Self { board, memory, ring_bytes, state: Mutex::new(sources) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Sources> {
        lock(&self.state)
    }

    /// The receiver goes; whom to tell.
    pub(crate) fn close(&self) -> Vec<End> {
        let mut state = self.lock();
        state.closed = true;
        let open = state.sources.iter().flatten().filter(|source| source.state == State::Open);
        open.map(|source| source.end).collect()
    }

    /// A sender begins; its number and the answer to it.
    fn open(&self, end: End, near: bool) -> Result<(u32, Vec<u8>), Status> {
        let mut state = self.lock();
        if state.closed {
            return Err(Status::NoHandle);
        }
        let free = state.sources.iter().position(Option::is_none).ok_or(Status::Busy)?;
        state.uses = state.uses.wrapping_add(1);
        // Far from the tags of the use before: positions go on from there.
        let nonce = state.uses.wrapping_mul(0x9E37_79B1);
        let ring = ReceiveRing::new(self.ring_bytes, nonce);
        let placed = Progress::default();
        state.sources[free] = Some(Source { end, state: State::Open, ring, near, placed, away: 0 });
        let mut answer = Vec::with_capacity(20);
        for word in [u32::from(state.queue.is_some()), free as u32, nonce] {
            answer.extend_from_slice(&word.to_le_bytes());
        }
        answer.extend_from_slice(&self.ring_bytes.to_le_bytes());
        Ok((free as u32, answer))
    }

    /// A sender ends. Its messages are read first.
    fn end(&self, sender: u32, how: State) -> Vec<(End, Told)> {
        let mut state = self.lock();
        let Sources { sources, queue, ended, .. } = &mut *state;
        let Some(source) = sources.get_mut(sender as usize).and_then(Option::as_mut) else {
            return Vec::new();
        };
        source.state = how;
        let notify = match queue {
            Some(queue) => {
                ended.push_back(sender);
                queue.give_up(sender);
                Notify::Count { number: 0 }
            }
            None => Notify::Post { number: sender as u16, value: NonZeroU32::MIN },
        };
        let grants = self.grants(&mut state);
        drop(state);
        self.board.notify(notify);
        grants
    }

    /// A block has come with the request for its place.
    fn put(&self, sender: u32, block: &[u8]) -> Result<Vec<(End, Told)>, Status> {
        let mut state = self.lock();
        let Sources { sources, queue, .. } = &mut *state;
        let queue = queue.as_mut().ok_or(Status::Unsupported)?;
        let source = sources.get(sender as usize).and_then(Option::as_ref);
        // Of those it has not been told that they are placed.
        if source.is_some_and(|source| source.away + block.len() as u64 > HELD_BYTES_MAX) {
            return Err(Status::BadRequest);
        }
        match queue.put(sender, block) {
            Ok(Place::At(offset)) => {
                let told = self.place(&mut state, sender, offset, block);
                drop(state);
                self.board.notify(Notify::Count { number: 0 });
                Ok(told.into_iter().collect())
            }
            Ok(Place::Later) => Ok(Vec::new()),
            Err(_) => Err(Status::BadRequest),
        }
    }

    /// Writes a block to the place that it has got, or leaves that to the receiver: who is here serves others, too, and waits for no page.
    /// Whom to tell of it.
    fn place(&self, state: &mut Sources, sender: u32, offset: u64, block: &[u8]) -> Option<(End, Told)> {
        let place = self.place_of(offset, block)?;
        let now = now();
        if !self.memory.is_known_here(place, now) && !self.memory.is_here(place, now) {
            if let Some(Some(source)) = state.sources.get_mut(sender as usize) {
                source.away += block.len() as u64;
            }
            state.away.push(Away { sender, offset, block: block.to_vec() });
            return None;
        }
        self.write(place, block);
        placed(state, sender, block)
    }

    fn place_of(&self, offset: u64, block: &[u8]) -> Option<SharedSlice> {
        let bytes = (block.len() as u64).next_multiple_of(BLOCK_BYTES);
        self.memory.shared().sub(offset as usize, bytes as usize)
    }

    fn write(&self, place: SharedSlice, block: &[u8]) {
        let _ = place.write_from(0, block);
        if block.len() < place.len() {
            let _ = place.write_from(block.len(), &u64::from(BLOCK_END).to_le_bytes());
        }
    }

    /// The receiver's thread writes what nobody else could, for as long as that takes; whom to tell. None when there is nothing.
    pub(super) fn write_away(&self) -> Option<Vec<(End, Told)>> {
        let blocks = std::mem::take(&mut self.lock().away);
        if blocks.is_empty() {
            return None;
        }
        for Away { offset, block, .. } in &blocks {
            if let Some(place) = self.place_of(*offset, block) {
                self.write(place, block);
            }
        }
        let mut state = self.lock();
        let told = blocks.iter().filter_map(|Away { sender, block, .. }| {
            if let Some(Some(source)) = state.sources.get_mut(*sender as usize) {
                source.away = source.away.saturating_sub(block.len() as u64);
            }
            placed(&mut state, *sender, block)
        });
        Some(told.collect())
    }

    /// Places for what waited, and whom to tell. Whoever calls this looks at the ring afterwards, or has it looked at.
    pub(super) fn grants(&self, state: &mut Sources) -> Vec<(End, Told)> {
        let mut told = Vec::new();
        while let Some(grant) = state.queue.as_mut().and_then(Queue::grant) {
            told.extend(match &grant.held {
                Some(block) => self.place(state, grant.sender, grant.offset, block),
                None => state.sources[grant.sender as usize]
                    .as_ref()
                    .map(|source| (source.end, Told::Position((grant.offset / 8) as u32))),
            });
        }
        told
    }
}

/// A block has been written; whom to tell.
fn placed(state: &mut Sources, sender: u32, block: &[u8]) -> Option<(End, Told)> {
    let source = state.sources.get_mut(sender as usize)?.as_mut()?;
    let units = source.placed.step((block.len() as u64).next_multiple_of(BLOCK_BYTES), HELD_BYTES_MAX)?;
    (source.state == State::Open).then_some((source.end, Told::Placed(units)))
}

/// The senders of a node's peers.
#[derive(Default)]
pub(crate) struct Hub {
    ends: BTreeMap<End, (Arc<Inlet>, u32)>,
    /// What other peers must be told.
    outbox: VecDeque<(End, Told)>,
}

impl Hub {
    /// A peer asks; `inlet` is what its handle stands for, and whether it has that mapped.
    pub(crate) fn ask(
        &mut self,
        end: End,
        ask: Ask<'_>,
        inlet: Option<(Arc<Inlet>, bool)>,
    ) -> Result<Vec<u8>, Status> {
        if let Ask::Open { .. } = ask {
            let (inlet, near) = inlet.ok_or(Status::Unsupported)?;
            if usize::from(end.1) >= OUTLETS_MAX || self.ends.contains_key(&end) {
                return Err(Status::BadRequest);
            }
            let (sender, answer) = inlet.open(end, near)?;
            self.ends.insert(end, (inlet, sender));
            return Ok(answer);
        }
        let (inlet, sender) = self.ends.get(&end).ok_or(Status::NoHandle)?;
        if let Ask::Put(block) = ask {
            let told = inlet.put(*sender, block)?;
            self.outbox.extend(told);
            return Ok(Vec::new());
        }
        let mut state = inlet.lock();
        let queue = state.queue.as_mut().ok_or(Status::Unsupported)?;
        let answer = match ask {
            Ask::Reserve { bytes } => match queue.reserve(*sender, u64::from(bytes)) {
                Ok(Place::At(offset)) => [1, offset],
                Ok(Place::Later) => [0, 0],
                Err(_) => return Err(Status::BadRequest),
            },
            _ => [u64::from(queue.cancel(*sender)), 0],
        };
        let grants = inlet.grants(&mut state);
        drop(state);
        if ask == Ask::Cancel {
            // What was held behind it may have been placed.
            inlet.board.notify(Notify::Count { number: 0 });
        }
        self.outbox.extend(grants);
        Ok(answer.iter().flat_map(|word| word.to_le_bytes()).collect())
    }

    /// A sender tells.
    pub(crate) fn told(&mut self, end: End, told: Told) {
        let Some((inlet, sender)) = self.ends.get(&end) else { return };
        match told {
            Told::Commit => {
                let committed = inlet.lock().queue.as_mut().is_some_and(|queue| queue.commit(*sender));
                if committed {
                    inlet.board.notify(Notify::Count { number: 0 });
                }
            }
            Told::Close => {
                let grants = inlet.end(*sender, State::Closing);
                self.outbox.extend(grants);
                self.ends.remove(&end);
            }
            Told::Position(_) | Told::Placed(_) | Told::Ended => {}
        }
    }

    /// A peer has gone.
    pub(crate) fn session_ended(&mut self, session: SessionId) {
        let all: Vec<End> =
            self.ends.range((session, 0)..=(session, u16::MAX)).map(|(end, _)| *end).collect();
        for end in all {
            if let Some((inlet, sender)) = self.ends.remove(&end) {
                let grants = inlet.end(sender, State::Lost);
                self.outbox.extend(grants);
            }
        }
        self.outbox.retain(|((other, _), _)| *other != session);
    }

    /// A receiver has gone.
    pub(crate) fn forget(&mut self, inlet: &Arc<Inlet>) {
        self.ends.retain(|_, (other, _)| !Arc::ptr_eq(other, inlet));
    }

    pub(crate) fn has_news(&self) -> bool {
        !self.outbox.is_empty()
    }

    pub(crate) fn news(&mut self) -> Option<(SessionId, Notice)> {
        let ((session, slot), told) = self.outbox.pop_front()?;
        Some((session, Notice { slot, told }))
    }
}
