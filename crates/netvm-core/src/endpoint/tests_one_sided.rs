//! Atomics, notifications and fences over a simulated network: order over rails, and cuts at any byte.

use super::tests::{BLOCK_BYTES, BLOCKS, NUMBERS, Side, World, settle};
use super::*;
use crate::atomic::{Atomic, AtomicOp, Width};
use crate::limits::WINDOW;
use crate::sim::Random;
use alloc::vec;
use core::num::NonZeroU32;

/// The segment is a log of cells: cell 0 holds words for atomics and fences, write `i` fills cell `i`.
const CELL_BYTES: usize = 24;
const CELLS: usize = BLOCK_BYTES * BLOCKS / CELL_BYTES;

fn filling(cell: usize) -> [u8; CELL_BYTES] {
    [(cell % 250) as u8 + 1; CELL_BYTES]
}

/// A value that is posted says up to which cell the log has been written.
fn log_is_whole(bytes: &[u8], notify: Notify) {
    let Notify::Post { value, .. } = notify else { return };
    for cell in 1..value.get() as usize {
        assert_eq!(bytes[cell * CELL_BYTES..][..CELL_BYTES], filling(cell), "overtaken by {notify:?}");
    }
}

/// What one run has posted and seen.
#[derive(Default)]
struct Run {
    handle: u32,
    cell: usize,
    notices: Vec<Notify>,
    atomics: u64,
    old_words: Vec<u64>,
    unknown: u64,
    lost: u64,
    /// The value of the last fenced write, and the tokens of loads that must see at least so much.
    fenced: u64,
    loads: Vec<(u64, u64)>,
    next_token: u64,
}

const ADD: u64 = 1 << 62;

impl Run {
    fn post(&mut self, side: &mut Side, random: &mut Random) {
        let token = self.next_token;
        self.next_token += 1;
        match random.below(8) {
            0..=3 if self.cell + 1 < CELLS => self.post_log(side, random, token),
            4 => {
                let add = Atomic::new(AtomicOp::Add, Width::Eight, 1);
                let posted = side.endpoint.post_atomic(ADD | token, self.handle, 0, &add);
                self.atomics += u64::from(posted.is_ok());
            }
            5 => {
                let options = WriteOptions { fence: true, notify: None };
                let value = (self.fenced + 1).to_le_bytes();
                let posted = side.endpoint.post_write_copied(self.handle, 8, &value, options);
                self.fenced += u64::from(posted.is_ok());
            }
            6 => {
                let load = Atomic::new(AtomicOp::Load, Width::Eight, 0);
                if side.endpoint.post_atomic(token, self.handle, 8, &load).is_ok() {
                    self.loads.push((token, self.fenced));
                }
            }
            _ => {}
        }
    }

    /// The next cell of the log, or only a notification.
    fn post_log(&mut self, side: &mut Side, random: &mut Random, token: u64) {
        let number = random.below(u64::from(NUMBERS)) as u16;
        let bare = random.once_in(4);
        let cells = if bare { 0 } else { 1 + random.below(8).min((CELLS - 2 - self.cell) as u64) as usize };
        let value = NonZeroU32::new((self.cell + cells) as u32 + 1).unwrap();
        let notify = match random.below(3) {
            0 => None,
            1 => Some(Notify::Count { number }),
            _ => Some(Notify::Post { number, value }),
        };
        let options = WriteOptions { fence: random.once_in(5), notify };
        let first = self.cell + 1;
        let bytes: Vec<u8> = (first..first + cells).flat_map(filling).collect();
        let offset = (first * CELL_BYTES) as u64;
        let posted = if bytes.len() <= 48 {
            side.endpoint.post_write_copied(self.handle, offset, &bytes, options)
        } else {
            let posted =
                side.endpoint.post_write_with(token, self.handle, offset, bytes.len() as u32, options);
            posted.map(|slot| side.locals[usize::from(slot)] = bytes)
        };
        match posted {
            Ok(()) => {
                self.cell += cells;
                self.notices.extend(notify);
            }
            Err(error) => assert_eq!(error, PostError::Full),
        }
    }

    fn take_events(&mut self, side: &mut Side, broken: bool) {
        while let Some(event) = side.endpoint.event() {
            let Event::Completed { token, result, .. } = event else { panic!("{event:?}") };
            match result {
                Ok(Answer::Word(word)) if token & ADD != 0 => self.old_words.push(word),
                Ok(Answer::Word(word)) => {
                    let index = self.loads.iter().position(|&(other, _)| other == token).unwrap();
                    assert!(word >= self.loads.swap_remove(index).1, "a load missed an earlier write");
                }
                Ok(Answer::Done) => {}
                Err(error) if broken => {
                    if token & ADD != 0 {
                        self.unknown += u64::from(error == OpError::Unknown);
                        self.lost += u64::from(error == OpError::Lost);
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

fn run(seed: u64, rails: usize, steps: u32, cut: Option<u64>) -> Run {
    let mut world = World::new(seed, rails, cut);
    if !seed.is_multiple_of(3) {
        world.page_out();
    }
    let mut run = Run::default();
    let Some(handle) = world.import(0) else { return run };
    run.handle = handle;
    world.sides[1].memory.inspect = Some(log_is_whole);
    let mut random = Random::new(seed ^ 0x5151);
    let word = |world: &World, offset: usize| {
        u64::from_le_bytes(world.sides[1].memory.bytes[offset..offset + 8].try_into().unwrap())
    };
    let mut fenced = 0;
    for step in 0.. {
        assert!(step < 200_000, "seed {seed}, {rails} rails: stuck");
        if step < steps && !world.broken {
            for _ in 0..random.below(5) {
                run.post(&mut world.sides[0], &mut random);
            }
        }
        world.step();
        let now = word(&world, 8);
        assert!(now >= fenced, "seed {seed}: fenced write {now} after {fenced}");
        fenced = now;
        run.take_events(&mut world.sides[0], world.broken);
        if world.broken || (step > steps && world.sides[0].endpoint.pending() == 0) {
            break;
        }
    }
    if !world.broken {
        world.sides[0].endpoint.post_flush(0).unwrap();
        let events = settle(&mut world);
        let flushed = matches!(events[..], [Event::Completed { result: Ok(_), .. }]);
        assert!(flushed || world.broken, "{events:?}");
    }
    if !world.broken {
        assert_eq!(world.sides[1].memory.notified, run.notices);
        assert_eq!((run.old_words.len() as u64, run.unknown, run.lost), (run.atomics, 0, 0));
        assert_eq!(word(&world, 8), run.fenced);
        assert_eq!(world.sides[1].endpoint.notices.len() + world.sides[0].endpoint.held.len(), 0);
    }
    let seen = &world.sides[1].memory.notified;
    assert!(run.notices.starts_with(seen), "seed {seed}: notified in another order");
    // Each execution left another value, so none is seen twice unless it was executed twice.
    run.old_words.sort_unstable();
    let (done, executed) = (run.old_words.len() as u64, word(&world, 0));
    assert!(run.old_words.windows(2).all(|pair| pair[0] < pair[1]), "seed {seed}: executed twice");
    assert!(run.old_words.last().is_none_or(|&last| last < executed));
    assert!(done <= executed && executed <= done + run.unknown, "seed {seed}: lost, and executed");
    assert_eq!(done + run.unknown + run.lost, run.atomics, "seed {seed}: each ends once");
    run
}

#[test]
fn nothing_overtakes_over_one_to_four_rails() {
    let (mut notices, mut fences) = (0, 0);
    for seed in 0..200 {
        let run = run(seed, 1 + (seed % 4) as usize, 300, None);
        notices += run.notices.len();
        fences += run.fenced;
    }
    assert!(notices > 5_000 && fences > 5_000, "{notices} {fences}");
}

#[test]
fn a_cut_at_any_byte_never_reports_an_atomic_that_may_not_have_been_executed() {
    let (mut unknown, mut lost) = (0, 0);
    for cut in 0..3000 {
        let run = run(cut, 1 + (cut % 3) as usize, 100, Some(150 + cut * 3));
        unknown += run.unknown;
        lost += run.lost;
    }
    assert!(unknown > 100 && lost > 100, "{unknown} {lost}");
}

/// How a write and an atomic end when the session ends after so many bytes were sent.
fn ends_after(sent_bytes: usize, atomic: bool) -> OpError {
    let mut side = Side::new(1);
    let slot = if atomic {
        side.endpoint.post_atomic(7, 0, 0, &Atomic::new(AtomicOp::Add, Width::Four, 1)).unwrap()
    } else {
        side.endpoint.post_write(7, 0, 0, 16).unwrap()
    };
    side.locals[usize::from(slot)] = vec![0; 16];
    side.endpoint.sent(0, sent_bytes);
    side.endpoint.fail();
    match side.endpoint.event() {
        Some(Event::Completed { token: 7, result: Err(error), .. }) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_never_left_is_known_not_to_have_happened() {
    assert_eq!([0, 1, 63, 64].map(|sent| ends_after(sent, true)), {
        use OpError::{Lost, Unknown};
        [Lost, Lost, Lost, Unknown]
    });
    assert_eq!([0, 1, 63].map(|sent| ends_after(sent, false)), {
        use OpError::{Lost, Unknown};
        [Lost, Unknown, Unknown]
    });
}

fn result_of(events: &[Event], token: u64) -> Result<Answer, OpError> {
    let result = events.iter().find_map(|event| match event {
        Event::Completed { token: other, result, .. } if *other == token => Some(result.clone()),
        _ => None,
    });
    result.expect("completed")
}

#[test]
fn refusals_concern_one_atomic_or_notification() {
    let mut world = World::new(5, 2, None);
    let handle = world.import(0).unwrap();
    let len = (BLOCK_BYTES * BLOCKS) as u64;
    let endpoint = &mut world.sides[0].endpoint;
    let add = |width| Atomic::new(AtomicOp::Add, width, 5);
    endpoint.post_atomic(1, handle, 4, &add(Width::Eight)).unwrap();
    endpoint.post_atomic(2, handle, len, &add(Width::Four)).unwrap();
    endpoint.post_atomic(3, handle + 1, 0, &add(Width::Four)).unwrap();
    endpoint.post_atomic(4, handle, 4, &add(Width::Four)).unwrap();
    let notify = |number| WriteOptions { fence: false, notify: Some(Notify::Count { number }) };
    endpoint.post_write_copied(handle, 0, &[9; 4], notify(NUMBERS as u16)).unwrap();
    endpoint.post_write_copied(handle, 0, &[], notify(3)).unwrap();
    // The probe of a fenced write must not swallow the refusal.
    endpoint.post_write_copied(handle, 16, &[1; 4], WriteOptions { fence: true, notify: None }).unwrap();
    assert_eq!(endpoint.held.len(), 1, "two rails have writes that may not have been applied");
    let mut events = settle(&mut world);
    world.sides[0].endpoint.post_flush(5).unwrap();
    events.extend(settle(&mut world));
    let refused = |token| match result_of(&events, token) {
        Err(OpError::Refused(status)) => status,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        [1, 2, 3, 5].map(refused),
        [Status::Misaligned, Status::OutOfBounds, Status::NoHandle, Status::OutOfBounds]
    );
    assert_eq!(result_of(&events, 4), Ok(Answer::Word(0)));
    let memory = &world.sides[1].memory;
    assert_eq!(memory.bytes[..20], [[0; 4], [5, 0, 0, 0], [0; 4], [0; 4], [1; 4]].concat());
    assert_eq!(memory.notified, [Notify::Count { number: 3 }]);
    assert_eq!(memory.atomics, 1);
}

/// A write of no bytes that notifies, as it comes from the wire.
fn notice(sequence: u64, number: u16) -> [u8; HEADER_BYTES] {
    Header { sequence, ..Header::write(false, Some(Notify::Count { number })) }.encode()
}

#[test]
fn a_notification_waits_for_earlier_writes_and_dies_with_its_segment() {
    for revoked in [false, true] {
        let mut side = Side::new(2);
        let (handle, ..) =
            side.memory.import("memory", &RemoteKey::from_bytes([9; 16])).expect("the segment of the tests");
        assert_eq!(handle, 0);
        side.feed(1, &notice(2, 1)).unwrap();
        side.feed(1, &notice(1, 2)).unwrap();
        assert_eq!(side.memory.notified, []);
        if revoked {
            side.memory.unimport(handle);
            side.endpoint.revoke(handle, |_, bytes| vec![0; bytes as usize]);
        }
        side.feed(0, &Header { sequence: 0, ..Header::new(Kind::Write) }.encode()).unwrap();
        let expected = [Notify::Count { number: 2 }, Notify::Count { number: 1 }];
        assert_eq!(side.memory.notified, if revoked { &[][..] } else { &expected[..] });
        assert_eq!(side.endpoint.notices.len(), 0);
    }
}

#[test]
fn waiting_notifications_are_bounded_and_odd_flags_end_the_session() {
    let mut side = Side::new(1);
    side.memory.import("memory", &RemoteKey::from_bytes([9; 16])).unwrap();
    for sequence in 1..WINDOW {
        side.feed(0, &notice(sequence, 0)).unwrap();
    }
    assert_eq!(side.endpoint.notices.len() as u64, WINDOW - 1);
    assert_eq!(side.feed(0, &notice(WINDOW, 0)), Err(Violation::Sequence));
    for (flags, bytes) in [(6, 1), (4, 0), (128, 0)] {
        let mut side = Side::new(1);
        let odd = Header { flags, bytes, ..Header::new(Kind::Write) };
        assert_eq!(side.feed(0, &odd.encode()), Err(Violation::Body));
    }
    let mut side = Side::new(1);
    assert_eq!(side.feed(0, &Header::new(Kind::Atomic).encode()), Err(Violation::Body), "no operands");
}

#[test]
fn fenced_writes_without_end_are_backpressure() {
    let mut side = Side::new(2);
    side.endpoint.spread();
    let fenced = WriteOptions { fence: true, notify: None };
    let mut posted = 0;
    // Nothing is ever sent: two plain writes occupy both rails, then all must be held.
    for options in [WriteOptions::default(); 2] {
        side.endpoint.post_write_copied(0, 0, &[1], options).unwrap();
    }
    let error = loop {
        match side.endpoint.post_write_with(posted, 0, 0, 1, fenced) {
            Ok(_) => posted += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error, PostError::Full);
    assert_eq!((posted, side.endpoint.held.len()), (OPS_MAX as u64 - 1, OPS_MAX - 1), "a slot for the probe");
    side.endpoint.fail();
    let ended = core::iter::from_fn(|| side.endpoint.event());
    let lost = |event: Event| matches!(event, Event::Completed { result: Err(OpError::Lost), .. });
    assert_eq!(ended.filter(|event| lost(event.clone())).count(), OPS_MAX - 1);
    assert_eq!(side.endpoint.pending(), 0);
}

#[test]
fn small_frames_share_a_rail_and_long_ones_take_turns() {
    let mut side = Side::new(4);
    let endpoint = &mut side.endpoint;
    let queued = |endpoint: &Endpoint| [0, 1, 2, 3].map(|rail| endpoint.queued_bytes(rail));
    endpoint.post_read(0, 0, 0, 16 << 10).unwrap();
    endpoint.post_flush(1).unwrap();
    while endpoint.queued_bytes(0) <= BATCH_BYTES_MAX {
        assert_eq!(queued(endpoint)[1..], [0; 3]);
        endpoint.post_write_copied(0, 0, &[1; 1000], WriteOptions::default()).unwrap();
    }
    // It is backed up.
    for _ in 0..9 {
        endpoint.post_write_copied(0, 0, &[1; 1000], WriteOptions::default()).unwrap();
    }
    let full = endpoint.queued_bytes(0);
    assert_eq!(queued(endpoint), [full, 9 * 1048, 0, 0]);
    // The rail on which a read is asked for is the one on which its answer comes.
    let mut reads = [0; 4];
    for token in 2..62 {
        let before = queued(endpoint);
        endpoint.post_read(token, 0, 0, 64 << 10).unwrap();
        let after = queued(endpoint);
        (0..4).for_each(|rail| reads[rail] += u32::from(after[rail] > before[rail]));
    }
    assert!(reads[0] == 0 && reads[2..].iter().all(|reads| (24..=36).contains(reads)), "{reads:?}");
    endpoint.sent(0, full);
    let at = endpoint.post_write_with(40, 0, 0, 8, WriteOptions::default());
    assert!(at.is_ok() && endpoint.queued_bytes(0) == HEADER_BYTES + 8, "it keeps up again");
}

#[test]
fn a_goodbye_arrives_with_its_reason() {
    let mut world = World::new(4, 1, None);
    world.sides[1].endpoint.goodbye(Status::Stopping, "it is late");
    let told = Event::Goodbye { status: Status::Stopping, reason: b"it is late".to_vec() };
    assert_eq!(settle(&mut world), [told]);
}

#[test]
fn a_handle_is_given_back_after_the_answers_to_earlier_reads() {
    let mut side = Side::new(1);
    side.memory.import("memory", &RemoteKey::from_bytes([9; 16])).unwrap();
    let read = Header { bytes: 64, ..Header::new(Kind::Read) };
    side.feed(0, &read.encode()).unwrap();
    side.feed(0, &Header::new(Kind::Unimport).encode()).unwrap();
    side.endpoint.sent(0, HEADER_BYTES + 10);
    side.endpoint.close_handles(&mut side.memory);
    assert_eq!(side.memory.check(0, 0, 1, Access::Read), Ok(()), "its bytes are still to be sent");
    side.endpoint.sent(0, 54);
    side.endpoint.close_handles(&mut side.memory);
    assert_eq!(side.memory.check(0, 0, 1, Access::Read), Err(Status::NoHandle));
    assert_eq!(side.endpoint.queued_bytes(0), HEADER_BYTES, "the answer");
}

/// By a call, as borrowers do: the owner is asked for the bytes until they are sent, and refuses everything that comes later.
#[test]
fn who_gives_memory_back_is_answered_what_it_asked_for_before() {
    let (mut side, mut random) = (Side::new(1), Random::new(7));
    side.memory.import("memory", &RemoteKey::from_bytes([9; 16])).unwrap();
    side.memory.bytes.iter_mut().for_each(|byte| *byte = random.draw() as u8);
    let expected = side.memory.bytes[100..164].to_vec();
    let write = Header { offset: 100, payload_bytes: 4, ..Header::new(Kind::Write) };
    side.feed(0, &[&write.encode()[..], &expected[..4]].concat()).unwrap();
    for token in 0..3 {
        let read = Header { sequence: 1, token, offset: 100, bytes: 64, ..Header::new(Kind::Read) };
        side.feed(0, &read.encode()).unwrap();
    }
    side.feed(0, &Header { sequence: 1, ..Header::new(Kind::Flush) }.encode()).unwrap();
    side.feed(0, &Header { sequence: 1, handle: 3, ..Header::new(Kind::Call) }.encode()).unwrap();
    let Some(Event::Called { request, .. }) = side.endpoint.event() else { panic!("no call") };
    side.endpoint.given_back(0, &mut side.memory);
    side.endpoint.given_back(0, &mut side.memory);
    side.endpoint.reply(request, Ok(Vec::new()));
    let mut answers = Vec::new();
    while side.endpoint.has_output(0) {
        assert_eq!(side.memory.check(0, 100, 64, Access::Read), Ok(()), "its bytes are still to be sent");
        let part = side.output(0, 50);
        side.endpoint.sent(0, part.len());
        answers.extend_from_slice(&part);
        side.endpoint.close_handles(&mut side.memory);
        if answers.len() >= 3 * (HEADER_BYTES + 64) {
            break;
        }
    }
    assert_eq!(side.memory.check(0, 100, 64, Access::Read), Err(Status::NoHandle));
    for answer in answers.chunks_exact(HEADER_BYTES + 64).take(3) {
        let header = Header::decode(answer.first_chunk().unwrap()).unwrap();
        assert_eq!((header.kind, &answer[HEADER_BYTES..]), (Kind::ReadReply, &expected[..]));
    }
    let rest: Vec<_> =
        side.endpoint.frames(0).1.map(|frame| Header::decode(&frame.header).unwrap()).collect();
    assert!(rest.iter().all(|header| header.status == 0), "the flush, the call: {rest:?}");
    // At once, when nobody waits for anything.
    let (handle, ..) = side.memory.import("memory", &RemoteKey::from_bytes([9; 16])).unwrap();
    let mut idle = Side::new(1);
    idle.endpoint.given_back(handle, &mut side.memory);
    assert_eq!(side.memory.check(handle, 0, 1, Access::Read), Err(Status::NoHandle));
}
