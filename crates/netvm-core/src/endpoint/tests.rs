//! Two endpoints over a simulated network, and one endpoint against nonsense.

use super::*;
use crate::atomic::Atomic;
use crate::limits::{JOBS_RUNNING_MAX, PAYLOAD_BYTES_MAX, WINDOW};
use crate::segment::{ExportTable, ImportTable, SegmentId};
use crate::sim::{Pipe, Random};
use alloc::vec;

pub(super) const KEY: RemoteKey = RemoteKey::from_bytes([9; 16]);
pub(super) const BLOCK_BYTES: usize = 600;
pub(super) const BLOCKS: usize = 24;
pub(super) const NUMBERS: u32 = 100;

/// One process: an endpoint, a segment it exports, buffers.
pub(super) struct Side {
    pub(super) endpoint: Endpoint,
    pub(super) memory: Memory,
    pub(super) locals: Vec<Vec<u8>>,
}

pub(super) struct Memory {
    pub(super) bytes: Vec<u8>,
    exports: ExportTable,
    imports: ImportTable,
    segment: SegmentId,
    /// What was made visible, in order, and whether [`super::tests_one_sided`] found the memory as promised then.
    pub(super) notified: Vec<Notify>,
    pub(super) inspect: Option<fn(&[u8], Notify)>,
    /// Atomics executed.
    pub(super) atomics: u32,
    /// Memory is away at random.
    pub(super) away: Option<Random>,
    pub(super) all_away: bool,
}

impl Exports for Memory {
    fn check(&mut self, handle: u32, offset: u64, bytes: u32, access: Access) -> Result<(), Status> {
        self.imports.check(&self.exports, handle, offset, bytes, access).map(|_| ())
    }
    fn import(&mut self, name: &str, key: &RemoteKey) -> Result<(u32, u64, Rights), Status> {
        self.imports.import(&self.exports, name, key)
    }
    fn unimport(&mut self, handle: u32) {
        self.imports.unimport(handle);
    }
    fn presence(&mut self, _: u32, _: u64, bytes: u32, _: Access) -> Presence {
        assert!(bytes > 0);
        let is_away = self.all_away || self.away.as_mut().is_some_and(|random| random.once_in(4));
        if is_away { Presence::Away } else { Presence::Here }
    }
    fn atomic(&mut self, handle: u32, offset: u64, atomic: &Atomic) -> Result<u64, Status> {
        self.imports.check_atomic(&self.exports, handle, offset, atomic)?;
        self.atomics += 1;
        let width = atomic.width as usize;
        let place = &mut self.bytes[offset as usize..][..width];
        let mut word = [0; 8];
        word[..width].copy_from_slice(place);
        let before = u64::from_le_bytes(word);
        place.copy_from_slice(&atomic.applied_to(before).to_le_bytes()[..width]);
        Ok(before)
    }
    fn notifications(&mut self, handle: u32) -> u32 {
        self.imports.notifications(&self.exports, handle).map_or(0, |(_, numbers)| numbers)
    }
    fn notify(&mut self, handle: u32, notify: Notify) {
        if u32::from(notify.number()) < self.notifications(handle) {
            if let Some(inspect) = self.inspect {
                inspect(&self.bytes, notify);
            }
            self.notified.push(notify);
        }
    }
}

impl Side {
    pub(super) fn new(rails: usize) -> Self {
        let bytes = vec![0; BLOCK_BYTES * BLOCKS];
        let mut exports = ExportTable::default();
        let segment = exports.export("memory", KEY, Rights::ReadWrite, bytes.len() as u64, NUMBERS).unwrap();
        let memory = Memory {
            bytes,
            exports,
            imports: ImportTable::default(),
            segment,
            notified: Vec::new(),
            inspect: None,
            atomics: 0,
            away: None,
            all_away: false,
        };
        Self {
            endpoint: Endpoint::new(rails, OPS_MAX as u32, WINDOW as u32),
            memory,
            locals: vec![Vec::new(); OPS_MAX],
        }
    }

    /// The bytes that the rail would send now.
    pub(super) fn output(&self, rail: usize, max: usize) -> Vec<u8> {
        let (sent, frames) = self.endpoint.frames(rail);
        let mut out = Vec::new();
        for frame in frames {
            out.extend_from_slice(&frame.header);
            match &frame.payload {
                Payload::None => {}
                Payload::Local { slot, .. } => out.extend_from_slice(&self.locals[usize::from(*slot)]),
                Payload::Segment { handle, offset, bytes } => {
                    let (offset, bytes) = (*offset, *bytes);
                    assert!(
                        self.memory
                            .imports
                            .check(&self.memory.exports, *handle, offset, bytes, Access::Read)
                            .is_ok()
                    );
                    out.extend_from_slice(&self.memory.bytes[offset as usize..][..bytes as usize]);
                }
                Payload::Body(body) => out.extend_from_slice(body),
                Payload::Inline(inline) => out.extend_from_slice(inline.as_slice()),
            }
            if out.len() > sent + max {
                break;
            }
        }
        out.drain(..sent);
        out.truncate(max);
        out
    }

    pub(super) fn feed(&mut self, rail: usize, mut bytes: &[u8]) -> Result<(), Violation> {
        while !bytes.is_empty() {
            let whole = self.endpoint.whole_write(rail, bytes).filter(|header| {
                let Header { handle, offset, payload_bytes, .. } = *header;
                payload_bytes == 0
                    || (!self.endpoint.paging().is_before(offset, payload_bytes)
                        && self.memory.presence(handle, offset, payload_bytes, Access::Write)
                            == Presence::Here)
            });
            if let Some(header) = whole {
                let (frame, tail) = bytes.split_at(HEADER_BYTES + header.payload_bytes as usize);
                bytes = tail;
                let Header { handle, offset, payload_bytes, .. } = header;
                let allowed = self.memory.check(handle, offset, payload_bytes, Access::Write);
                if allowed.is_ok() {
                    self.memory.bytes[offset as usize..][..payload_bytes as usize]
                        .copy_from_slice(&frame[HEADER_BYTES..]);
                }
                self.endpoint.wrote(rail, &header, allowed, &mut self.memory)?;
                continue;
            }
            match self.endpoint.want(rail) {
                Want::Header(missing) => {
                    let (head, tail) = bytes.split_at(missing.min(bytes.len()));
                    bytes = tail;
                    self.endpoint.header(rail, head, &mut self.memory)?;
                }
                Want::Payload { place, at, bytes: missing } => {
                    let (head, tail) = bytes.split_at(bytes.len().min(missing as usize));
                    bytes = tail;
                    match place {
                        Place::Segment { handle, offset } => {
                            let start = offset + u64::from(at);
                            let len = head.len() as u32;
                            self.memory
                                .imports
                                .check(&self.memory.exports, handle, start, len, Access::Write)
                                .unwrap();
                            self.memory.bytes[start as usize..][..head.len()].copy_from_slice(head);
                        }
                        Place::Local { slot } => {
                            let local = &mut self.locals[usize::from(slot)];
                            local[at as usize..][..head.len()].copy_from_slice(head);
                        }
                        Place::Body => self.endpoint.body(rail, head),
                        Place::Discard => {}
                    }
                    self.endpoint.landed(rail, head.len() as u32, &mut self.memory)?;
                }
            }
        }
        Ok(())
    }
}

impl Memory {
    pub(super) fn revoke(&mut self) {
        assert!(self.exports.unexport(self.segment));
    }
}

impl Side {
    /// As somebody who may wait for memory does it, at last.
    pub(super) fn execute(&mut self, job: Job) {
        let Job { id, handle, offset, work } = job;
        let (bytes, access) = match &work {
            Work::Write(bytes) => (bytes.len(), Access::Write),
            Work::Read(bytes) => (*bytes as usize, Access::Read),
            Work::Atomic(atomic) => (atomic.width as usize, Access::Read),
        };
        let result = self.memory.check(handle, offset, bytes as u32, access).and_then(|()| {
            let place = &mut self.memory.bytes[offset as usize..][..bytes];
            match work {
                Work::Write(bytes) => {
                    place.copy_from_slice(&bytes);
                    Ok(Done::Written)
                }
                Work::Read(_) => Ok(Done::Read(place.to_vec())),
                Work::Atomic(atomic) => self.memory.atomic(handle, offset, &atomic).map(Done::Word),
            }
        });
        self.endpoint.paged(id, result, &mut self.memory).unwrap();
    }
}

/// Two sides and what connects them. `pipes[rail][direction]`.
pub(super) struct World {
    pub(super) sides: [Side; 2],
    pipes: Vec<[Pipe; 2]>,
    random: Random,
    now: u64,
    pub(super) broken: bool,
    /// Of each side, and when they are over.
    jobs: [Vec<(u64, Job)>; 2],
    pub(super) jobs_done: u32,
}

impl World {
    pub(super) fn new(seed: u64, rails: usize, cut: Option<u64>) -> Self {
        let mut random = Random::new(seed);
        let mut pipe = |cut| Pipe::new(random.draw(), 1 + random.below(40), cut);
        let pipes = (0..rails).map(|rail| [pipe(cut.filter(|_| rail == 0)), pipe(None)]).collect();
        let (mut sides, jobs) = ([Side::new(rails), Side::new(rails)], [Vec::new(), Vec::new()]);
        // Otherwise nearly all frames are small, and one rail has no order to lose.
        for side in sides.iter_mut().skip(usize::from(seed.is_multiple_of(7))) {
            side.endpoint.spread();
        }
        Self { sides, pipes, random, now: 0, broken: false, jobs, jobs_done: 0 }
    }

    /// From now on memory is away at random, and it takes some time until it is there.
    pub(super) fn page_out(&mut self) {
        for side in &mut self.sides {
            side.memory.away = Some(Random::new(self.random.draw()));
        }
    }

    fn page(&mut self) {
        for (side, jobs) in self.sides.iter_mut().zip(&mut self.jobs) {
            while let Some(job) = side.endpoint.job() {
                jobs.push((self.now + self.random.below(60), job));
            }
            assert!(jobs.len() <= JOBS_RUNNING_MAX);
            while let Some(due) = jobs.iter().position(|(due, _)| *due <= self.now) {
                side.execute(jobs.swap_remove(due).1);
                self.jobs_done += 1;
            }
        }
    }

    pub(super) fn step(&mut self) {
        if !self.broken {
            self.page();
        }
        self.deliver();
    }

    /// As [`World::step`], but what is away stays away.
    fn deliver(&mut self) {
        self.now += 1;
        for rail in 0..self.pipes.len() {
            for from in 0..2 {
                if self.broken {
                    return;
                }
                let pipe = &mut self.pipes[rail][from];
                let side = &mut self.sides[from];
                let offer = side.output(rail, 1 + self.random.below(5000) as usize);
                let sent = if offer.is_empty() { 0 } else { pipe.send(self.now, &offer) };
                side.endpoint.sent(rail, sent);
                side.endpoint.close_handles(&mut side.memory);
                match pipe.receive(self.now, 5000) {
                    Some(bytes) => self.sides[1 - from].feed(rail, &bytes).unwrap(),
                    None => {
                        self.broken = true;
                        self.sides.iter_mut().for_each(|side| side.endpoint.fail());
                    }
                }
            }
        }
    }

    /// Posts an import and returns the handle.
    pub(super) fn import(&mut self, from: usize) -> Option<u32> {
        self.sides[from].endpoint.post_import(0, "memory", &KEY).unwrap();
        loop {
            self.step();
            match self.sides[from].endpoint.event() {
                Some(Event::Completed {
                    result: Ok(Answer::Imported { handle, len, rights, notifications }),
                    ..
                }) => {
                    assert_eq!((len, rights), ((BLOCK_BYTES * BLOCKS) as u64, Rights::ReadWrite));
                    assert_eq!(notifications, NUMBERS);
                    return Some(handle);
                }
                Some(_) => return None,
                None => {}
            }
        }
    }
}

/// What one side knows of the other's blocks.
#[derive(Default)]
struct Client {
    handle: u32,
    /// Contents as of all writes posted.
    model: Vec<u8>,
    /// Reads under way on each block.
    reads: Vec<u32>,
    /// A write to the block has been posted since the last finished flush.
    written: Vec<bool>,
    /// Tokens of what is under way: what it was, its slot, and the bytes that a read must return.
    under_way: Vec<(u64, What, Vec<u8>)>,
    flushing: bool,
    finished: u32,
    next_token: u64,
    /// As `model` at the time the flush under way was posted.
    at_flush: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq)]
enum What {
    Read(usize, u16),
    Write,
    Flush,
    Call,
}

fn post_something(side: &mut Side, client: &mut Client, random: &mut Random) {
    let block = random.below(BLOCKS as u64) as usize;
    let token = client.next_token;
    client.next_token += 1;
    let posted = match random.below(10) {
        0..=3 if client.reads[block] == 0 && !client.written[block] && !client.flushing => {
            let start = random.below(100) as usize;
            let len = 1 + random.below((BLOCK_BYTES - start) as u64) as usize;
            let data: Vec<u8> = (0..len).map(|_| random.draw() as u8).collect();
            let offset = block * BLOCK_BYTES + start;
            if random.once_in(2) {
                // Copied: complete at once, and gathered with others until the rail takes them.
                let options = WriteOptions::default();
                match side.endpoint.post_write_copied(client.handle, offset as u64, &data, options) {
                    Ok(()) => {
                        client.model[offset..offset + len].copy_from_slice(&data);
                        client.written[block] = true;
                    }
                    Err(error) => assert_eq!(error, PostError::Full),
                }
                return;
            }
            side.endpoint.post_write(token, client.handle, offset as u64, len as u32).map(|slot| {
                client.model[offset..offset + len].copy_from_slice(&data);
                client.written[block] = true;
                side.locals[usize::from(slot)] = data;
                (What::Write, Vec::new())
            })
        }
        4..=7 => {
            let start = random.below(100) as usize;
            let len = 1 + random.below((BLOCK_BYTES - start) as u64) as usize;
            let offset = block * BLOCK_BYTES + start;
            side.endpoint.post_read(token, client.handle, offset as u64, len as u32).map(|slot| {
                client.reads[block] += 1;
                side.locals[usize::from(slot)] = vec![0; len];
                (What::Read(block, slot), client.model[offset..offset + len].to_vec())
            })
        }
        8 if !client.flushing => side.endpoint.post_flush(token).map(|_| {
            client.flushing = true;
            client.at_flush = client.model.clone();
            (What::Flush, Vec::new())
        }),
        9 => {
            let body: Vec<u8> = (0..random.below(300)).map(|_| random.draw() as u8).collect();
            let method = body.len() as u32;
            side.endpoint.post_call(token, method, body.clone()).map(|_| (What::Call, body))
        }
        _ => return,
    };
    match posted {
        Ok((what, bytes)) => client.under_way.push((token, what, bytes)),
        Err(error) => assert_eq!(error, PostError::Full),
    }
}

/// Takes the events of one side; false when an operation was lost.
fn take_events(sides: &mut [Side; 2], who: usize, client: &mut Client) -> bool {
    let mut whole = true;
    while let Some(event) = sides[who].endpoint.event() {
        match event {
            Event::Called { request, method, body } => {
                assert_eq!(method as usize, body.len());
                let answer = body.iter().rev().copied().collect();
                sides[who].endpoint.reply(request, Ok(answer));
            }
            Event::Completed { token, result, .. } => {
                let index = client.under_way.iter().position(|&(other, ..)| other == token).unwrap();
                let (_, what, bytes) = client.under_way.swap_remove(index);
                client.finished += 1;
                if let What::Read(block, _) = what {
                    client.reads[block] -= 1;
                }
                match (what, result) {
                    (_, Err(error)) => {
                        assert!(error == OpError::Lost || (error == OpError::Unknown && what == What::Write));
                        whole = false;
                    }
                    (What::Read(_, slot), Ok(_)) => {
                        assert!(sides[who].locals[usize::from(slot)] == bytes, "stale or wrong bytes");
                    }
                    (What::Flush, Ok(_)) => {
                        assert!(sides[1 - who].memory.bytes == client.at_flush, "flushed, not applied");
                        client.flushing = false;
                        client.written.fill(false);
                    }
                    (What::Call, Ok(answer)) => {
                        assert_eq!(answer, Answer::Reply(bytes.into_iter().rev().collect()));
                    }
                    (What::Write, Ok(_)) => {}
                }
            }
            other => panic!("{other:?}"),
        }
    }
    whole
}

fn client(handle: u32) -> Client {
    Client {
        handle,
        model: vec![0; BLOCK_BYTES * BLOCKS],
        reads: vec![0; BLOCKS],
        written: vec![false; BLOCKS],
        ..Client::default()
    }
}

fn run(seed: u64, rails: usize, operations: u32, cut: Option<u64>) {
    let mut world = World::new(seed, rails, cut);
    if !seed.is_multiple_of(3) {
        world.page_out();
    }
    let mut clients = Vec::new();
    for who in 0..2 {
        match world.import(who) {
            Some(handle) => clients.push(client(handle)),
            None => {
                assert!(world.broken);
                return;
            }
        }
    }
    let mut random = Random::new(seed ^ 0xABCD);
    for step in 0.. {
        assert!(step < 1_000_000, "seed {seed}, {rails} rails: stuck");
        for (side, client) in world.sides.iter_mut().zip(&mut clients) {
            if client.finished < operations && !world.broken {
                for _ in 0..random.below(4) {
                    post_something(side, client, &mut random);
                }
            }
        }
        world.step();
        for (who, client) in clients.iter_mut().enumerate() {
            let whole = take_events(&mut world.sides, who, client);
            assert!(whole || world.broken, "seed {seed}");
        }
        if clients.iter().all(|client| client.under_way.is_empty())
            && (world.broken || clients.iter().all(|client| client.finished >= operations))
        {
            break;
        }
    }
    for side in &mut world.sides {
        assert_eq!(side.endpoint.pending(), 0);
        assert_eq!(side.endpoint.event(), None);
    }
    if world.broken {
        assert_eq!(world.sides[0].endpoint.post_flush(0), Err(PostError::Closed));
    } else {
        assert_eq!(world.sides.each_ref().map(|side| side.endpoint.deferred.len()), [0, 0]);
        assert_eq!(world.sides.each_ref().map(|side| side.endpoint.serving_calls), [0, 0]);
        assert!(world.sides.iter().all(|side| side.endpoint.paging().is_empty()));
        assert!(seed.is_multiple_of(3) || world.jobs_done > 10, "{}", world.jobs_done);
    }
}

/// Also when everything is in use and waits; who is asked without end queues no more than he may, and nobody answers unasked.
#[test]
fn signs_of_life_need_no_room() {
    let mut world = World::new(3, 2, None);
    let handle = world.import(0).unwrap();
    world.sides[1].memory.all_away = true;
    for token in 0..OPS_MAX as u64 {
        world.sides[0].endpoint.post_read(token, handle, 0, 1).unwrap();
    }
    while world.sides[1].endpoint.paging().bytes() < OPS_MAX * crate::limits::JOB_BYTES {
        world.deliver();
    }
    assert!(!world.sides[0].endpoint.has_slots() && !world.sides[0].endpoint.has_output(1));
    world.sides[0].endpoint.ask_for_life(1);
    for _ in 0..500 {
        world.deliver();
    }
    assert_eq!(world.sides[0].endpoint.rails[1].asked_for_life, 0, "no answer");
    world.sides[0].endpoint.show_life(0);
    world.sides[0].endpoint.show_life(0);
    assert_eq!(world.sides[0].endpoint.rails[0].queue.len(), 1);
    let question = Header { flags: crate::wire::QUIET, token: PULSE, ..Header::new(Kind::Flush) };
    for _ in 0..3 * IDLE_FRAMES_MAX {
        world.sides[1].feed(1, &question.encode()).unwrap();
    }
    assert_eq!(world.sides[1].endpoint.rails[1].queue.len(), IDLE_FRAMES_MAX + 1);
    let answer = Header { token: PULSE, ..Header::new(Kind::FlushAck) }.encode();
    assert_eq!(world.sides[0].feed(1, &answer), Err(Violation::Unasked(Kind::FlushAck)));
}

#[test]
fn order_holds_over_one_to_four_rails() {
    for seed in 0..60 {
        run(seed, 1 + (seed % 4) as usize, 400, None);
    }
}

#[test]
fn a_disconnect_at_any_byte_fails_what_is_under_way_and_nothing_else() {
    for cut in 0..1500 {
        run(cut, 1 + (cut % 3) as usize, 100, Some(cut * 7));
    }
}

/// Posts, exchanges everything, and returns the events of side 0.
pub(super) fn settle(world: &mut World) -> Vec<Event> {
    let mut events = Vec::new();
    for _ in 0..500 {
        world.step();
        events.extend(core::iter::from_fn(|| world.sides[0].endpoint.event()));
    }
    events
}

#[test]
fn refusals_concern_one_operation() {
    let mut world = World::new(3, 2, None);
    let handle = world.import(0).unwrap();
    let len = (BLOCK_BYTES * BLOCKS) as u64;
    let endpoint = &mut world.sides[0].endpoint;
    endpoint.post_read(1, handle, len - 3, 4).unwrap();
    endpoint.post_read(2, handle + 1, 0, 4).unwrap();
    endpoint.post_import(3, "memory", &RemoteKey::from_bytes([8; 16])).unwrap();
    let slot = endpoint.post_write(4, handle, len, 2000).unwrap();
    world.sides[0].locals[usize::from(slot)] = vec![1; 2000];
    let slot = world.sides[0].endpoint.post_write(5, handle, 0, 4).unwrap();
    world.sides[0].locals[usize::from(slot)] = vec![2; 4];
    world.sides[0].endpoint.post_flush(6).unwrap();
    let events = settle(&mut world);
    let result = |token: u64| {
        events.iter().find_map(|event| match event {
            Event::Completed { token: other, result, .. } if *other == token => Some(result.clone()),
            _ => None,
        })
    };
    assert_eq!(result(1), Some(Err(OpError::Refused(Status::OutOfBounds))));
    assert_eq!(result(2), Some(Err(OpError::Refused(Status::NoHandle))));
    assert_eq!(result(3), Some(Err(OpError::Refused(Status::NoSegment))));
    assert_eq!(result(5), Some(Ok(Answer::Done)));
    assert_eq!(result(6), Some(Err(OpError::Refused(Status::OutOfBounds))), "the flush tells");
    assert_eq!(world.sides[1].memory.bytes[..4], [2; 4]);
    world.sides[0].endpoint.post_flush(7).unwrap();
    assert!(matches!(settle(&mut world)[..], [Event::Completed { token: 7, result: Ok(_), .. }]));
}

#[test]
fn revoking_takes_effect_at_once_in_the_middle_of_transfers() {
    for seed in 0..300 {
        let mut world = World::new(seed, 1, None);
        let handle = world.import(0).unwrap();
        let len = (BLOCK_BYTES * BLOCKS) as u32;
        world.sides[1].memory.bytes.fill(1);
        for token in 0..3 {
            let slot = world.sides[0].endpoint.post_read(token, handle, 0, len).unwrap();
            world.sides[0].locals[usize::from(slot)] = vec![0; len as usize];
        }
        let slot = world.sides[0].endpoint.post_write(3, handle, 0, len).unwrap();
        world.sides[0].locals[usize::from(slot)] = vec![2; len as usize];
        for _ in 0..seed % 60 {
            world.step();
        }
        let server = &mut world.sides[1];
        assert!(server.memory.exports.unexport(server.memory.segment));
        let bytes = server.memory.bytes.clone();
        server.endpoint.revoke(handle, |offset, len| bytes[offset as usize..][..len as usize].to_vec());
        // `output` and `feed` check that the memory is not touched from here on.
        let events = settle(&mut world);
        let ended = events.iter().filter(|event| matches!(event, Event::Completed { .. })).count();
        assert!(ended <= 4 && world.sides[0].endpoint.pending() == 0, "seed {seed}: {events:?}");
        assert!(bytes == world.sides[1].memory.bytes, "seed {seed}: written after the revocation");
    }
}

#[test]
fn a_peer_that_asks_too_much_is_cut_off() {
    let mut side = Side::new(1);
    let read = Header::new(Kind::Read).encode();
    for _ in 0..OPS_MAX {
        side.feed(0, &read).unwrap();
    }
    assert_eq!(side.feed(0, &read), Err(Violation::TooMany));
    let mut side = Side::new(1);
    let call = Header::new(Kind::Call).encode();
    for _ in 0..CALLS_MAX {
        side.feed(0, &call).unwrap();
    }
    assert_eq!(side.feed(0, &call), Err(Violation::TooMany));
    // Writes without end from a peer that never reads: acknowledgements do not pile up.
    let mut side = Side::new(1);
    let mut result = Ok(());
    for sequence in 0..2_000_000 {
        result = side.feed(0, &Header { sequence, ..Header::new(Kind::Write) }.encode());
        if result.is_err() {
            break;
        }
    }
    assert_eq!(result, Err(Violation::TooMany));
    assert!(side.endpoint.rails[0].queue.len() < 1000);
    let mut side = Side::new(1);
    let far = Header { sequence: WINDOW, ..Header::new(Kind::Write) }.encode();
    assert_eq!(side.feed(0, &far), Err(Violation::Sequence));
    let mut side = Side::new(1);
    let future = Header { applied: 1, ..Header::new(Kind::Acknowledge) }.encode();
    assert_eq!(side.feed(0, &future), Err(Violation::Sequence));
    for kind in [Kind::ReadReply, Kind::FlushAck, Kind::ImportAck, Kind::CallReply, Kind::AtomicReply] {
        let mut side = Side::new(1);
        assert_eq!(side.feed(0, &Header::new(kind).encode()), Err(Violation::Unasked(kind)));
    }
}

/// A frame that is sometimes meaningful.
fn random_frame(random: &mut Random, sequence: u64) -> Vec<u8> {
    let mut bytes = [0u8; HEADER_BYTES];
    if random.once_in(4) {
        bytes.fill_with(|| random.draw() as u8);
        return bytes.to_vec();
    }
    let some = [0, 1, 2, 3, 100, 599, 70_000, u64::from(PAYLOAD_BYTES_MAX), u64::MAX];
    let mut pick = |small: u64| if small > 0 { random.below(small) } else { some[random.below(9) as usize] };
    bytes[0] = 1 + pick(16) as u8;
    bytes[1] = if pick(2) == 0 { 0 } else { pick(9) as u8 };
    bytes[2..4].copy_from_slice(&(pick(12) as u16).to_le_bytes());
    let payload = if bytes[0] == Kind::Atomic as u8 && pick(8) > 0 { 16 } else { pick(200) as u32 };
    let header_fields = [if pick(3) > 0 { sequence } else { pick(0) }, pick(2), pick(0)];
    bytes[4..8].copy_from_slice(&payload.to_le_bytes());
    for (index, field) in header_fields.into_iter().enumerate() {
        bytes[8 + index * 8..16 + index * 8].copy_from_slice(&field.to_le_bytes());
    }
    bytes[32..36].copy_from_slice(&(pick(3) as u32).to_le_bytes());
    let bytes_field = if pick(3) == 0 { 8 } else { pick(0) as u32 };
    bytes[36..40].copy_from_slice(&bytes_field.to_le_bytes());
    bytes[40..48].copy_from_slice(&pick(0).to_le_bytes());
    let mut frame = bytes.to_vec();
    frame.resize(HEADER_BYTES + payload as usize, 7);
    frame
}

#[test]
fn a_million_random_frames_neither_panic_nor_pile_up() {
    let mut random = Random::new(2003);
    let (mut frames, mut atomics) = (0, 0);
    while frames < 1_000_000 {
        let rails = 1 + random.below(2) as usize;
        let mut side = Side::new(rails);
        side.memory.imports.import(&side.memory.exports, "memory", &KEY).unwrap();
        for _ in 0..random.below(5) {
            let slot = side.endpoint.post_read(1, 0, 0, 100).unwrap();
            side.locals[usize::from(slot)] = vec![0; 100];
        }
        for _ in 0..2000 {
            frames += 1;
            let rail = random.below(rails as u64) as usize;
            let sequence = side.endpoint.receive.applied() + random.below(3);
            let frame = random_frame(&mut random, sequence);
            let cut =
                if random.once_in(50) { random.below(frame.len() as u64) as usize } else { frame.len() };
            if side.feed(rail, &frame[..cut]).is_err() {
                break;
            }
            while let Some(event) = side.endpoint.event() {
                if let Event::Called { request, .. } = event {
                    side.endpoint.reply(request, Err(Status::NoMethod));
                }
            }
            if random.once_in(3) {
                let out = side.output(rail, 10_000).len();
                side.endpoint.sent(rail, out);
            }
            let queued: usize = side.endpoint.rails.iter().map(|rail| rail.queue.len()).sum();
            assert!(queued <= 3 * OPS_MAX && side.endpoint.deferred.len() <= OPS_MAX);
            assert!(side.endpoint.notices.len() <= WINDOW as usize);
            side.memory.notified.clear();
            atomics += core::mem::take(&mut side.memory.atomics);
            assert!(side.endpoint.rails.iter().all(|rail| rail.body.capacity() <= 2 * BODY_BYTES_MAX));
        }
    }
    assert!(atomics > 20, "{atomics} of the frames were sound atomics");
}
