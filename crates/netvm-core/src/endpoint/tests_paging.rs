//! Memory that is not there: what waits, what does not, and that nothing changes its order.

use super::tests::{BLOCK_BYTES, BLOCKS, Side, World, settle};
use super::*;
use crate::atomic::{Atomic, AtomicOp, Width};
use crate::limits::{BOUNCE_BYTES_MAX, JOB_BYTES, JOBS_RUNNING_MAX, WINDOW};
use crate::sim::Random;
use alloc::vec;

const LEN: usize = BLOCK_BYTES * BLOCKS;
const PAGE: u64 = 4096;

/// A side whose segment is open, and frames as they come from the wire.
fn open() -> (Side, u32) {
    let mut side = Side::new(1);
    let (handle, ..) = side.memory.import("memory", &super::tests::KEY).unwrap();
    (side, handle)
}

fn write(sequence: u64, flags: u8, offset: u64, bytes: &[u8]) -> Vec<u8> {
    let payload_bytes = bytes.len() as u32;
    let header = Header { sequence, flags, offset, payload_bytes, ..Header::new(Kind::Write) };
    [&header.encode()[..], bytes].concat()
}

fn request(kind: Kind, sequence: u64, offset: u64, bytes: u32) -> Vec<u8> {
    Header { sequence, offset, bytes, token: sequence, ..Header::new(kind) }.encode().to_vec()
}

fn add(sequence: u64, offset: u64) -> Vec<u8> {
    let atomic = Atomic::new(AtomicOp::Add, Width::Eight, 1);
    let body = atomic.body();
    let payload_bytes = body.len() as u32;
    [&Header { sequence, offset, payload_bytes, ..atomic.header() }.encode()[..], &body].concat()
}

/// Feeds with memory away or there.
fn feed(side: &mut Side, away: bool, bytes: &[u8]) {
    side.memory.all_away = away;
    side.feed(0, bytes).unwrap();
    side.memory.all_away = false;
}

/// Kinds of the frames that wait to be sent.
fn answers(side: &Side) -> Vec<Kind> {
    side.endpoint.frames(0).1.map(|frame| Header::decode(&frame.header).unwrap().kind).collect()
}

#[test]
fn others_go_on_while_one_page_is_away() {
    let (mut side, _) = open();
    feed(&mut side, true, &write(0, 0, 10, b"late"));
    let job = side.endpoint.job().unwrap();
    assert_eq!((job.offset, &job.work), (10, &Work::Write(b"late".to_vec())));
    // Writes and reads of other pages; a window of them.
    for sequence in 1..WINDOW {
        let offset = PAGE + sequence % 4000;
        feed(&mut side, false, &write(sequence, 0, offset, &[sequence as u8]));
        assert_eq!(side.memory.bytes[offset as usize], sequence as u8);
    }
    feed(&mut side, false, &request(Kind::Read, WINDOW, PAGE, 5));
    assert_eq!(answers(&side), [Kind::ReadReply], "it sees all that it could see");
    // What must see the late one waits.
    feed(&mut side, false, &request(Kind::Flush, WINDOW, 0, 0));
    feed(&mut side, false, &add(WINDOW, 2 * PAGE + 8));
    feed(&mut side, false, &request(Kind::Read, WINDOW, 4000, 200));
    assert_eq!((answers(&side).len(), side.memory.atomics), (1, 0));
    assert_eq!(side.endpoint.receive.applied(), 0);
    side.execute(job);
    assert_eq!(side.endpoint.receive.applied(), WINDOW);
    assert_eq!((&side.memory.bytes[10..14], side.memory.atomics), (&b"late"[..], 1));
    // The read of its page was a job behind it.
    let job = side.endpoint.job().unwrap();
    assert_eq!(job.work, Work::Read(200));
    side.execute(job);
    let expected = [Kind::ReadReply, Kind::FlushAck, Kind::AtomicReply, Kind::ReadReply];
    let (mut seen, mut expected) = (answers(&side), expected.to_vec());
    seen.sort_by_key(|kind| *kind as u8);
    expected.sort_by_key(|kind| *kind as u8);
    assert_eq!(seen, expected);
    assert!(side.endpoint.paging().is_empty() && side.endpoint.paging().bytes() == 0);
}

#[test]
fn a_page_is_written_in_the_order_of_arrival() {
    let (mut side, _) = open();
    feed(&mut side, true, &write(0, 0, 0, &[1; 100]));
    feed(&mut side, false, &write(1, 0, 50, &[2; 100]));
    // Two pages, behind both; and what is behind that.
    feed(&mut side, false, &write(2, 0, 4000, &[3; 200]));
    feed(&mut side, false, &write(3, 0, PAGE, &[4; 10]));
    feed(&mut side, false, &write(4, 0, 2 * PAGE, &[5; 10]));
    assert_eq!(side.memory.bytes[2 * PAGE as usize], 5, "nobody is before it");
    for (number, len) in [(1, 100), (2, 100), (3, 200), (4, 10)] {
        let job = side.endpoint.job().unwrap();
        assert_eq!(job.work, Work::Write(vec![number; len]));
        assert_eq!(side.endpoint.job(), None, "one after the other");
        side.execute(job);
    }
    assert_eq!(side.endpoint.receive.applied(), 5);
    assert_eq!(side.memory.bytes[49..51], [1, 2]);
    assert_eq!(side.memory.bytes[PAGE as usize - 1..PAGE as usize + 1], [3, 4]);
}

#[test]
fn fences_and_atomics_wait_for_all_before_them() {
    let (mut side, _) = open();
    feed(&mut side, true, &write(0, 0, 0, b"a"));
    feed(&mut side, true, &write(1, 0, PAGE, b"b"));
    feed(&mut side, false, &write(2, crate::wire::FENCE, 2 * PAGE, b"c"));
    feed(&mut side, false, &write(3, 0, 3 * PAGE, b"d"));
    assert_eq!((side.memory.bytes[2 * PAGE as usize], side.memory.bytes[3 * PAGE as usize]), (0, b'd'));
    let (one, two) = (side.endpoint.job().unwrap(), side.endpoint.job().unwrap());
    assert_eq!(side.endpoint.job(), None);
    side.execute(two);
    assert_eq!(side.endpoint.job(), None);
    side.execute(one);
    let fenced = side.endpoint.job().unwrap();
    assert_eq!(fenced.offset, 2 * PAGE);
    side.execute(fenced);
    // Atomics are executed in order, on whatever words.
    feed(&mut side, true, &add(4, 8));
    feed(&mut side, false, &add(4, PAGE + 8));
    let first = side.endpoint.job().unwrap();
    assert_eq!((first.offset, side.endpoint.job(), side.memory.atomics), (8, None, 0));
    side.execute(first);
    let second = side.endpoint.job().unwrap();
    side.execute(second);
    assert_eq!((side.memory.atomics, side.endpoint.paging().is_empty()), (2, true));
}

#[test]
fn jobs_are_refused_one_by_one_and_forgotten_with_the_session() {
    let (mut side, handle) = open();
    feed(&mut side, true, &write(0, 0, 0, b"a"));
    feed(&mut side, true, &request(Kind::Read, 0, PAGE, 10));
    feed(&mut side, true, &add(0, 2 * PAGE));
    feed(&mut side, false, &add(0, 2 * PAGE + 1));
    let running = side.endpoint.job().unwrap();
    let read = side.endpoint.job().unwrap();
    side.memory.revoke();
    side.endpoint.revoke(handle, |_, bytes| vec![0; bytes as usize]);
    side.endpoint.paged(running.id, Ok(Done::Written), &mut side.memory).unwrap();
    side.endpoint.paged(read.id, Ok(Done::Read(vec![0; 10])), &mut side.memory).unwrap();
    while let Some(job) = side.endpoint.job() {
        side.execute(job);
    }
    assert_eq!(answers(&side), [Kind::Error; 4]);
    assert_eq!((side.memory.atomics, side.endpoint.receive.applied()), (0, 1));
    feed(&mut side, false, &request(Kind::Flush, 1, 0, 0));
    let last = side.endpoint.frames(0).1.last().map(|frame| Header::decode(&frame.header).unwrap());
    assert_eq!(last.map(|header| header.status), Some(Status::NoHandle as u16), "told, not silent");
    // A job that comes back to a session that has ended changes nothing.
    let (mut side, _) = open();
    feed(&mut side, true, &write(0, 0, 0, b"a"));
    let job = side.endpoint.job().unwrap();
    side.endpoint.fail();
    side.endpoint.paged(job.id, Ok(Done::Written), &mut side.memory).unwrap();
    assert_eq!((side.endpoint.paging().bytes(), side.endpoint.has_output(0)), (0, false));
}

/// In any order: whoever is behind them goes on, and nothing is executed that was refused.
#[test]
fn jobs_that_wait_for_too_long_are_refused() {
    let (mut side, _) = open();
    feed(&mut side, true, &write(0, 0, 0, b"a"));
    let stuck = side.endpoint.job().unwrap();
    assert_eq!(side.endpoint.overdue(1000, 500), [], "it is being executed");
    // Behind it, behind both of its pages, and behind everything.
    feed(&mut side, false, &write(1, 0, 10, b"b"));
    feed(&mut side, false, &write(2, 0, 4000, &[3; 200]));
    feed(&mut side, false, &write(3, crate::wire::FENCE, 2 * PAGE, b"d"));
    feed(&mut side, false, &request(Kind::Read, 3, PAGE, 10));
    assert_eq!((side.endpoint.overdue(1000, 500).len(), side.endpoint.overdue(1499, 500).len()), (0, 0));
    feed(&mut side, true, &write(4, 0, PAGE + 100, b"young"));
    let late = side.endpoint.overdue(1500, 500);
    assert_eq!(late.len(), 4);
    for id in late.into_iter().rev() {
        side.endpoint.paged(id, Err(Status::Away), &mut side.memory).unwrap();
    }
    assert_eq!(answers(&side), [Kind::Error; 2], "the read, and the writes as one");
    let young = side.endpoint.job().unwrap();
    side.execute(young);
    assert_eq!(side.endpoint.job(), None);
    assert_eq!(side.memory.bytes[PAGE as usize + 100..][..5], *b"young");
    // The one that is executed ends when it ends.
    side.execute(stuck);
    assert_eq!((side.endpoint.receive.applied(), side.memory.bytes[0]), (5, b'a'));
    assert_eq!(
        (side.memory.bytes[10], side.memory.bytes[4000], side.memory.bytes[2 * PAGE as usize]),
        (0, 0, 0)
    );
    assert!(side.endpoint.paging().is_empty() && side.endpoint.paging().bytes() == 0);
    feed(&mut side, false, &request(Kind::Flush, 5, 0, 0));
    let last = side.endpoint.frames(0).1.last().map(|frame| Header::decode(&frame.header).unwrap());
    assert_eq!(last.map(|header| header.status), Some(Status::Away as u16), "told, not silent");
}

#[test]
fn a_diverted_payload_is_written_as_a_job() {
    let (mut side, _) = open();
    let frame = write(0, 0, 100, &[7; 300]);
    side.feed(0, &frame[..HEADER_BYTES + 120]).unwrap();
    assert!(side.endpoint.divert(0) && !side.endpoint.divert(0));
    side.feed(0, &frame[HEADER_BYTES + 120..]).unwrap();
    let job = side.endpoint.job().unwrap();
    assert_eq!((job.offset, &job.work), (220, &Work::Write(vec![7; 180])));
    side.execute(job);
    assert_eq!(side.memory.bytes[100..400], [7; 300]);
}

/// Nothing is away, and no more than a receive or two is held beyond the bound.
#[test]
fn what_jobs_hold_is_counted() {
    let (mut side, _) = open();
    let mut sequence = 0;
    while side.endpoint.paging().bytes() < BOUNCE_BYTES_MAX && sequence < WINDOW {
        feed(&mut side, true, &write(sequence, 0, (sequence % 3) * PAGE, &[1; 4000]));
        sequence += 1;
        assert_eq!(side.endpoint.paging().bytes() as u64, sequence * (4000 + JOB_BYTES as u64));
    }
    assert!(sequence < WINDOW);
    let mut jobs: VecDeque<Job> = core::iter::from_fn(|| side.endpoint.job()).collect();
    assert_eq!(jobs.len(), 3.min(JOBS_RUNNING_MAX));
    let mut done = 0;
    while let Some(job) = jobs.pop_front() {
        side.execute(job);
        jobs.extend(core::iter::from_fn(|| side.endpoint.job()));
        done += 1;
    }
    assert_eq!(
        (done, side.endpoint.paging().bytes(), side.endpoint.receive.applied()),
        (sequence, 0, sequence)
    );
}

/// Overlapping writes of all lengths, reads and atomics on one rail: as if nothing had ever been away.
#[test]
fn one_rail_is_in_order_whatever_is_away() {
    for seed in 0..150 {
        let mut world = World::new(seed, 1, None);
        let handle = world.import(0).unwrap();
        world.page_out();
        let mut random = Random::new(seed ^ 0x77);
        let mut model = vec![0u8; LEN];
        let mut reads = Vec::new();
        for token in 0..300 {
            let offset = random.below(LEN as u64 - 1) as usize;
            let len = 1 + random.below((LEN - offset).min(3000) as u64) as usize;
            let endpoint = &mut world.sides[0].endpoint;
            match random.below(5) {
                0 => {
                    if let Ok(slot) = endpoint.post_read(token, handle, offset as u64, len as u32) {
                        world.sides[0].locals[usize::from(slot)] = vec![0; len];
                        reads.push((token, slot, offset, len));
                    }
                }
                1 => {
                    let at = offset & !7;
                    let add = Atomic::new(AtomicOp::Add, Width::Eight, 0x0101_0101);
                    // An answer before the next write: those may overtake it.
                    endpoint.post_atomic(token, handle, at as u64, &add).unwrap();
                    let before = u64::from_le_bytes(model[at..at + 8].try_into().unwrap());
                    let after = before.wrapping_add(0x0101_0101);
                    model[at..at + 8].copy_from_slice(&after.to_le_bytes());
                    let events = settle(&mut world);
                    let word = events.iter().find_map(|event| match event {
                        Event::Completed { result: Ok(Answer::Word(word)), .. } => Some(*word),
                        _ => None,
                    });
                    assert_eq!(word, Some(before), "seed {seed}");
                    reads.clear();
                }
                _ => {
                    let data: Vec<u8> = (0..len).map(|_| random.draw() as u8).collect();
                    let options = WriteOptions { fence: random.once_in(6), notify: None };
                    endpoint.post_write_copied(handle, offset as u64, &data, options).unwrap();
                    model[offset..offset + len].copy_from_slice(&data);
                }
            }
            for _ in 0..random.below(30) {
                world.step();
            }
            while let Some(event) = world.sides[0].endpoint.event() {
                let Event::Completed { token, result: Ok(_), .. } = event else { panic!("{event:?}") };
                reads.retain(|read| read.0 != token);
            }
        }
        world.sides[0].endpoint.post_flush(1000).unwrap();
        let mut flushed = false;
        for _ in 0..40 {
            flushed |= settle(&mut world)
                .iter()
                .any(|event| matches!(event, Event::Completed { token: 1000, result: Ok(_), .. }));
            if flushed {
                break;
            }
        }
        assert!(flushed && world.jobs_done > 20, "seed {seed}: {}", world.jobs_done);
        assert!(world.sides[1].memory.bytes == model, "seed {seed}: out of order");
    }
}
