use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;

use stateright::{Checker, Model, Property};

use super::*;
use crate::limits::{HELD_BYTES_MAX, PUT_BYTES_MAX};
use crate::sim::Random;

/// A ring, its memory, messages whose notifications are under way, and the consumed position under way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    send: SendRing,
    receive: ReceiveRing,
    memory: Vec<u8>,
    notified: usize,
    sent: VecDeque<Vec<u8>>,
    credit: Option<u32>,
    broken: Option<&'static str>,
}

const NONCE: u32 = 0xFFFF_FFF0;

impl World {
    fn new(capacity: u64) -> Self {
        Self {
            send: SendRing::new(capacity, NONCE),
            receive: ReceiveRing::new(capacity, NONCE),
            memory: vec![0; capacity as usize],
            notified: 0,
            sent: VecDeque::new(),
            credit: None,
            broken: None,
        }
    }

    fn put(&mut self, offset: u64, bytes: &[u8]) {
        self.memory[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn word(&self, offset: u64) -> u64 {
        u64::from_le_bytes(*self.memory[offset as usize..].first_chunk().unwrap())
    }

    fn send(&mut self, bytes: &[u8]) -> bool {
        let Ok(placed) = self.send.place(bytes.len()) else { return false };
        if let Some((offset, header)) = placed.skip {
            self.put(offset, &header.to_le_bytes());
        }
        self.put(placed.offset, &placed.header.to_le_bytes());
        self.put(placed.offset + MESSAGE_HEADER_BYTES, bytes);
        self.send.written(&placed);
        self.sent.push_back(bytes.to_vec());
        self.notified += 1;
        true
    }

    fn receive(&mut self) {
        self.notified -= 1;
        loop {
            match self.receive.parse(self.word(self.receive.offset())) {
                Ok(Parsed::Skipped) => {}
                Ok(Parsed::Message { offset, len }) => {
                    let expected = self.sent.pop_front().unwrap();
                    if self.memory[offset as usize..][..len] != expected {
                        self.broken = Some("another message");
                    }
                    // A later position replaces one that has not arrived.
                    self.credit = self.receive.consumed(len).or(self.credit);
                    return;
                }
                Err(Garbage) => return self.broken = Some("a good header was refused"),
            }
        }
    }

    fn credit(&mut self) {
        if let Some(units) = self.credit.take()
            && self.send.credit(units).is_err()
        {
            self.broken = Some("a good position was refused");
        }
    }

    /// With everything consumed and told, the longest message has a place.
    fn is_stuck(&self) -> bool {
        let longest = SendRing::message_bytes_max(self.memory.len() as u64);
        self.notified == 0 && self.credit.is_none() && self.send.place(longest).is_err()
    }
}

#[test]
fn rings_keep_order_and_contents() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let mut world = World::new(256 + 64 * random.below(20));
        let longest = SendRing::message_bytes_max(world.memory.len() as u64);
        let (mut sent, mut full) = (0, 0);
        for _ in 0..5000 {
            match random.below(5) {
                0 | 1 => {
                    let len = random.below(longest as u64 + 1) as usize;
                    let bytes: Vec<u8> = (0..len).map(|_| random.draw() as u8).collect();
                    let done = world.send(&bytes);
                    (sent, full) = (sent + u32::from(done), full + u32::from(!done));
                }
                2 | 3 if world.notified > 0 => world.receive(),
                4 => world.credit(),
                _ => {}
            }
            assert_eq!((world.broken, world.is_stuck()), (None, false), "seed {seed}");
        }
        assert!(sent > 500 && full > 10, "seed {seed}: {sent} sent, {full} times full");
        assert_eq!(world.send.place(longest + 1), Err(NoPlace::TooLong));
    }
}

struct Small;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Action {
    Send(usize),
    Receive,
    Credit,
}

impl Model for Small {
    type State = (World, u8);
    type Action = Action;

    fn init_states(&self) -> Vec<Self::State> {
        vec![(World::new(256), 8)]
    }

    fn actions(&self, (world, left): &Self::State, actions: &mut Vec<Action>) {
        if *left > 0 {
            actions.extend([0, 24, 56].map(Action::Send));
        }
        if world.notified > 0 {
            actions.push(Action::Receive);
        }
        if world.credit.is_some() {
            actions.push(Action::Credit);
        }
    }

    fn next_state(&self, (world, left): &Self::State, action: Action) -> Option<Self::State> {
        let (mut world, mut left) = (world.clone(), *left);
        match action {
            Action::Send(len) => {
                left -= 1;
                if !world.send(&vec![left; len]) {
                    return None;
                }
            }
            Action::Receive => world.receive(),
            Action::Credit => world.credit(),
        }
        Some((world, left))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("order and contents", |_, (world, _): &Self::State| world.broken.is_none()),
            Property::always("an empty ring has room", |_, (world, _): &Self::State| !world.is_stuck()),
        ]
    }
}

#[test]
fn rings_in_all_orders() {
    let checker = Small.checker().threads(2).spawn_bfs().join();
    checker.assert_properties();
    assert!(checker.unique_state_count() > 1000, "{}", checker.unique_state_count());
}

#[test]
fn any_header_is_inside_or_refused() {
    let mut random = Random::new(3);
    let mut accepted = 0;
    for _ in 0..300_000 {
        let capacity = 256 + 64 * random.below(4);
        let mut ring = ReceiveRing::new(capacity, 7);
        for _ in 0..random.below(4) {
            let _ = ring.consumed(random.below(40) as usize);
        }
        // A peer that knows the tag and lies about the rest.
        let tag = u64::from(7 + (ring.offset() / 8) as u32);
        let len = if random.once_in(8) { u64::from(u32::MAX) } else { random.below(400) };
        let word = if random.once_in(4) { random.draw() } else { tag << 32 | len };
        if let Ok(Parsed::Message { offset, len }) = ring.parse(word) {
            accepted += 1;
            assert!(offset + len as u64 <= capacity);
        }
        assert!(ring.offset() < capacity);
    }
    assert!(accepted > 10_000);
    let mut ring = SendRing::new(256, 0);
    assert_eq!(ring.credit(1), Err(Garbage));
    let placed = ring.place(8).unwrap();
    ring.written(&placed);
    assert_eq!((ring.credit(3), ring.credit(2), ring.credit(3)), (Err(Garbage), Ok(()), Err(Garbage)));
}

#[test]
fn positions_that_overtake_each_other_change_nothing() {
    let last = (1 << 29) - 1;
    assert_eq!([farther(5, 3), farther(3, 5), farther(last, 2), farther(2, last)], [5, 5, 2, 2]);
    let mut flow = Flow::default();
    let mut told = Vec::new();
    let mut progress = Progress::default();
    let mut random = Random::new(11);
    for _ in 0..200_000 {
        let bytes = 64 * (1 + random.below(64));
        if flow.under_way() + bytes <= HELD_BYTES_MAX {
            flow.sent(bytes);
            told.extend(progress.step(bytes, HELD_BYTES_MAX));
        } else {
            // Any of those on their way comes first.
            let next = random.below(told.len() as u64) as usize;
            assert_eq!(flow.credit(told.swap_remove(next)), Ok(()));
        }
    }
    for units in told {
        assert_eq!(flow.credit(units), Ok(()));
    }
    assert!(flow.under_way() < HELD_BYTES_MAX / 4);
}

#[test]
fn notices_and_questions_come_back() {
    let mut random = Random::new(5);
    let most = (1 << 29) - 1;
    for told in
        [Told::Position(0), Told::Position(most), Told::Placed(most), Told::Ended, Told::Commit, Told::Close]
    {
        let notice = Notice { slot: random.draw() as u16, told };
        assert_eq!(Notice::from_notify(notice.notify()), Some(notice));
    }
    let block = [9; PUT_BYTES_MAX as usize];
    for ask in [Ask::Open { handle: 7 }, Ask::Reserve { bytes: u32::MAX }, Ask::Cancel, Ask::Put(&block)] {
        assert_eq!(Ask::decode(&ask.encode(513)), Some((513, ask)));
    }
    let too_long = [9; PUT_BYTES_MAX as usize + 8];
    for block in [&too_long[..], &too_long[..7]] {
        assert_eq!(Ask::decode(&Ask::Put(block).encode(0)), None);
    }
    for _ in 0..100_000 {
        let bytes: Vec<u8> = (0..random.below(12)).map(|_| random.below(5) as u8).collect();
        let _ = Ask::decode(&bytes);
    }
}

/// Senders reserve, write, commit, give up, die; the receiver reads: every block is at a place of its own, comes in the order of
/// reservation, and nobody waits while there is room.
#[test]
fn shared_rings_survive_their_senders() {
    let (mut deaths, mut waits, mut held) = (0, 0, 0);
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let capacity = 512;
        let mut queue = Queue::new(capacity);
        // Per sender: its place and length, or that it waits.
        let mut open: BTreeMap<u32, (Option<u64>, u64)> = BTreeMap::new();
        let mut order: VecDeque<(u32, u64)> = VecDeque::new();
        // Who waits, and whether its block has come.
        let mut waiting: VecDeque<(u32, bool)> = VecDeque::new();
        for step in 0..3000 {
            let context = alloc::format!("seed {seed}, step {step}");
            let id = random.below(4) as u32;
            let session = id;
            match random.below(9) {
                0..3 if !open.contains_key(&session) => {
                    let bytes = BLOCK_BYTES * (1 + random.below(4));
                    let place = match queue.reserve(id, bytes).unwrap() {
                        Place::At(offset) => {
                            order.push_back((session, offset));
                            Some(offset)
                        }
                        Place::Later => {
                            waits += 1;
                            waiting.push_back((session, false));
                            None
                        }
                    };
                    open.insert(session, (place, bytes));
                    assert_eq!(queue.reserve(id, BLOCK_BYTES), Err(NoPlace::Full), "{context}");
                }
                3 if matches!(open.get(&session), Some((Some(_), _))) => {
                    open.remove(&session);
                    assert!(queue.commit(id) && !queue.commit(id), "{context}");
                }
                4 => {
                    if let Some(block) = queue.front() {
                        let first = order.pop_front().unwrap();
                        assert_eq!(first, (block.sender, block.offset), "{context}");
                        assert!(block.offset + block.bytes <= capacity, "{context}");
                        queue.release();
                    }
                }
                5 if matches!(open.get(&session), Some((None, _))) && random.once_in(3) => {
                    assert!(queue.cancel(id) && !queue.cancel(id), "{context}");
                    open.remove(&session);
                    waiting.retain(|other| *other != (session, false));
                }
                6 if random.once_in(5) => {
                    deaths += 1;
                    queue.give_up(id);
                    if let Some((place, _)) = open.remove(&session) {
                        match place {
                            Some(offset) => {
                                let at = order.iter().rposition(|entry| *entry == (session, offset)).unwrap();
                                order.remove(at);
                            }
                            None => waiting.retain(|other| *other != (session, false)),
                        }
                    }
                }
                7 => {
                    let block = alloc::vec![id as u8; 8 * (1 + random.below(24)) as usize];
                    match queue.put(id, &block) {
                        Ok(Place::At(offset)) => order.push_back((session, offset)),
                        Ok(Place::Later) => {
                            held += 1;
                            assert!(queue.has_of(id), "{context}");
                            waiting.push_back((session, true));
                        }
                        Err(error) => {
                            assert_eq!(error, NoPlace::Full, "{context}");
                            let its =
                                waiting.iter().filter(|waits| **waits == (session, true)).count() as u64;
                            assert!(
                                its * BLOCK_BYTES * 3 > HELD_BYTES_MAX - BLOCK_BYTES * 3,
                                "{context}: {its}"
                            );
                        }
                    }
                }
                _ => {}
            }
            while let Some(Grant { sender: session, offset, held }) = queue.grant() {
                assert_eq!(waiting.pop_front(), Some((session, held.is_some())), "{context}: out of turn");
                order.push_back((session, offset));
                match held {
                    Some(block) => assert!(block.iter().all(|&byte| byte == session as u8), "{context}"),
                    None => open.get_mut(&session).unwrap().0 = Some(offset),
                }
            }
            assert!(!order.is_empty() || waiting.is_empty(), "{context}: waits for nothing");
            // Nobody's place overlaps another's.
            let places: Vec<_> =
                open.values().filter_map(|(place, bytes)| Some((place.as_ref()?, bytes))).collect();
            for (index, (start, bytes)) in places.iter().enumerate() {
                assert!(*start + *bytes <= capacity, "{context}");
                let apart =
                    |(other, more): &(&u64, &u64)| *other + *more <= **start || *start + *bytes <= **other;
                assert!(places[index + 1..].iter().all(apart), "{context}");
            }
        }
        for session in 0..4 {
            queue.give_up(session);
        }
        while queue.front().is_some() {
            queue.release();
        }
        assert!(queue.reserve(9, Queue::block_bytes_max(capacity)).is_ok());
        assert_eq!(queue.reserve(8, 8), Err(NoPlace::TooLong));
    }
    assert!(deaths > 1000 && waits > 1000 && held > 1000, "{deaths} deaths, {waits} waits, {held} held");
}

#[test]
fn a_position_in_memory_is_believed_where_it_makes_sense() {
    let mut random = Random::new(3);
    let mut ring = SendRing::new(1024, 7);
    let (mut sent, mut freed, mut refused) = (0, 0, 0);
    for _ in 0..100_000 {
        while let Ok(placed) = ring.place(random.below(250) as usize) {
            ring.written(&placed);
            sent = placed.end;
        }
        let position = match random.below(3) {
            0 => random.draw(),
            1 => freed + random.below(1200),
            _ => freed + random.below((sent - freed) / 8 + 1) * 8,
        };
        let believed = ring.credit_to(position);
        if (freed..=sent).contains(&position) && position.is_multiple_of(8) {
            assert_eq!(believed, Ok(position > freed));
            freed = position;
        } else {
            assert_eq!(believed, Err(Garbage));
            refused += 1;
        }
    }
    assert!(refused > 10_000 && freed > 1 << 20);
}
