//! The measured cases of `netvm bench rma`. Each checks what it moved.

use std::collections::VecDeque;
use std::error::Error;
use std::time::{Duration, Instant};

use netvm::copy::Copied;
use netvm::node::Mapping;
use netvm::notify::Notify;
use netvm::posted::{Op, Posting};
use netvm::region::{Region, WriteOptions};

use netvm::link::switch_looking_off;

use super::super::child::Helper;
use super::copies::Third;
use super::meet::{self, Here};
use super::partner::{HANDLED, How, PONG, PONG_OFFSET, Side};
use super::raw::AREA_BYTES;
use super::timing::{Sample, latency};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Where atomics work.
const WORD: u64 = PONG_OFFSET as u64 + (512 << 10);
/// Larger pieces are put from where they lie; smaller ones are copied.
const COPIED_BYTES_MAX: usize = 16 << 10;
/// Bytes of long puts under way at once; those that have been sent are still on their way.
const UNDER_WAY_BYTES: usize = 1 << 20;
/// The same of gets, which are under way until they are here; and how many at most.
const GETS_BYTES: usize = 2 << 20;
const GETS_MAX: usize = 128;
/// They are posted in so many parts, so that there are always some under way.
const GROUPS: usize = 4;
const PIECE_BYTES_MAX: usize = 1 << 20;

/// Both ends of a bench.
pub struct Pair {
    pub here: Side,
    pub region: Region,
    pub partner: Helper,
    pub local: Mapping,
    /// Number of the last put of a ping-pong.
    pub round: u64,
    /// Changes what is put with each run.
    pub salt: u8,
    /// Of the other side.
    pub address: String,
    /// Opened when they are measured first.
    pub meet: Option<Here>,
    pub third: Third,
}

impl Pair {
    /// One way of a put, from the call until the other process sees it: half of a ping-pong of `rounds` at most.
    pub fn put(&mut self, size: usize, time: Duration) -> Result<Sample> {
        let rounds = self.rounds(size, time)?;
        let mut bytes = vec![5; size];
        let first = self.round + 1;
        self.round += rounds;
        self.partner.tell(&format!("put {size} {first} {}", first + rounds))?;
        let mut next = first;
        let sample = latency_of(rounds, || {
            bytes[size - 8..].copy_from_slice(&next.to_ne_bytes());
            self.region.write(PONG_OFFSET as u64, &bytes)?;
            self.here.await_put(size, next)?;
            next += 1;
            Ok(())
        });
        self.partner.line()?;
        sample
    }

    /// How many rounds fit the time, from a short run.
    pub fn rounds(&mut self, size: usize, time: Duration) -> Result<u64> {
        let few = latency(time / 20, 1, || Ok(self.region.read(0, &mut vec![0; size])?))?;
        Ok(((time.as_secs_f64() * 1e6 / few.median.max(1.0)) as u64).clamp(100, 200_000))
    }

    pub fn notify(&mut self, how: How, time: Duration) -> Result<Sample> {
        let rounds = self.rounds(8, time)?;
        let what = if how == How::Spin { "spin" } else { "block" };
        self.partner.tell(&format!("{what} {rounds}"))?;
        let sample = latency_of(rounds, || {
            self.region.notify(Notify::Count { number: PONG })?;
            self.here.await_signal(PONG, how)
        });
        self.partner.line()?;
        sample
    }

    /// The other side's handler answers; this side spins.
    pub fn notify_handler(&mut self, time: Duration) -> Result<Sample> {
        latency(time, 2, || {
            self.region.notify(Notify::Count { number: HANDLED })?;
            self.here.await_signal(PONG, How::Spin)
        })
    }

    /// The ends of channels, locks and so on.
    fn meet(&mut self) -> Result<&mut Here> {
        if self.meet.is_none() {
            let (key, receiver) = meet::receiver(&self.here.node)?;
            let peer = self.here.node.connect(&self.address)?;
            self.here.choose(&peer);
            self.partner.tell(&format!("meet {key}"))?;
            let told = self.partner.line()?;
            self.meet = Some(Here::open(&self.here.node, &self.address, &peer, &told, receiver)?);
        }
        self.meet.as_mut().ok_or_else(|| "nobody to meet".into())
    }

    /// Locks, semaphores and wait queues.
    pub fn turns(&mut self, name: &str, time: Duration) -> Result<Sample> {
        let meet = self.meet()?;
        match name {
            "lock" => meet.lock(time),
            "sem" => meet.semaphore(time),
            "sem-count" => meet.items(time),
            _ => meet.queue(time),
        }
    }

    /// Channels and barriers, where the partner does as much.
    pub fn together(&mut self, name: &str, size: usize, time: Duration) -> Result<Sample> {
        let rounds = self.rounds(size, time)?;
        self.meet()?;
        self.partner.tell(&format!("{name} {rounds}"))?;
        let meet = self.meet()?;
        let sample = if name == "barrier" { meet.barrier(rounds) } else { meet.channel(size, rounds) };
        self.partner.line()?;
        sample
    }

    /// Messages of a channel that follow each other: millions in a second, until all have been received.
    pub fn messages(&mut self, name: &str, size: usize, time: Duration) -> Result<Sample> {
        self.meet()?;
        self.partner.tell(&format!("{name} 0"))?;
        let Self { meet, partner, .. } = self;
        let meet = meet.as_mut().ok_or("nobody to meet")?;
        meet.rate(name == "shared-rate", size, time, || {
            let line = partner.line()?;
            Ok(line.strip_prefix("count ").ok_or("no count")?.parse()?)
        })
        .and_then(|sample| partner.line().map(|_| sample))
    }

    /// While the other side's program computes and calls nothing.
    pub fn passive<R>(&mut self, measure: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        self.partner.tell("compute 1")?;
        self.partner.line()?;
        let result = measure(self);
        self.partner.tell("compute 0")?;
        self.partner.line()?;
        result
    }

    /// With nobody who looks before he sleeps.
    pub fn sleeping<R>(&mut self, measure: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        self.partner.tell("look 0")?;
        self.partner.line()?;
        switch_looking_off(true);
        let result = measure(self);
        switch_looking_off(false);
        self.partner.tell("look 1")?;
        self.partner.line()?;
        result
    }

    /// One way of a put whose notification wakes the other side's program.
    pub fn put_block(&mut self, size: usize, time: Duration) -> Result<Sample> {
        let rounds = self.rounds(size, time)?;
        let bytes = vec![self.salt; size];
        self.partner.tell(&format!("put-block {size} {rounds}"))?;
        let sample = latency_of(rounds, || {
            self.region.write_notify(PONG_OFFSET as u64, &bytes, Notify::Count { number: PONG })?;
            self.here.await_signal(PONG, How::Block)
        });
        self.partner.line()?;
        sample
    }

    /// One half of taking a lock or a permit and giving it back. The node's turn between them is an atomic.
    pub fn halves(&mut self, name: &str, time: Duration) -> Result<Sample> {
        self.meet()?;
        let Self { region, meet, .. } = self;
        let meet = meet.as_ref().ok_or("nobody to meet")?;
        let mut histogram = super::super::histogram()?;
        let start = Instant::now();
        let mut end = start;
        while end.duration_since(start) < time {
            region.fetch_add(WORD, 1u64)?;
            let begin = Instant::now();
            let (taken, given) =
                if name.starts_with("lock") { meet.take_lock()? } else { meet.take_permit()? };
            end = given;
            let half = if name.ends_with("take") { taken - begin } else { given - taken };
            histogram.saturating_record(half.as_nanos() as u64);
        }
        Sample::of(&histogram, end.duration_since(start), 1)
    }

    /// From the partner to a third node, asked for here.
    pub fn copy(&mut self, size: usize, through: bool, time: Duration) -> Result<Sample> {
        let (bytes, to) = (vec![self.salt; size], self.third.region(&self.here)?);
        self.region.write(0, &bytes)?;
        let sample = latency(time, 1, || {
            if through {
                return Ok(self.region.copy_through(0, to, 0, size as u64)?);
            }
            match self.region.copy_to(0, to, 0, size as u64)? {
                Copied::Pushed | Copied::Pulled => Ok(()),
                other => Err(format!("copied in another way: {other:?}").into()),
            }
        })?;
        let mut there = vec![0; size];
        to.read(0, &mut there)?;
        if there == bytes { Ok(sample) } else { Err("what was copied is not there".into()) }
    }

    /// GB/s of such copies, one after the other.
    pub fn copy_bandwidth(&mut self, size: usize, time: Duration) -> Result<Sample> {
        let one = self.copy(size, false, time)?;
        Ok(Sample { median: one.per_s * size as f64 / 1e9, p99: None, ..one })
    }

    pub fn put_complete(&mut self, size: usize, time: Duration) -> Result<Sample> {
        let bytes = vec![self.salt; size];
        let sample = latency(time, 1, || Ok(self.region.write_flush(0, &bytes)?))?;
        self.expect(0, &bytes)?;
        Ok(sample)
    }

    pub fn get(&mut self, size: usize, time: Duration) -> Result<Sample> {
        let expected: Vec<u8> = (0..size).map(|index| index as u8 ^ self.salt).collect();
        self.region.write(0, &expected)?;
        let mut bytes = vec![0; size];
        let sample = latency(time, 1, || Ok(self.region.read(0, &mut bytes)?))?;
        if bytes == expected { Ok(sample) } else { Err("a get read something else".into()) }
    }

    pub fn fetch_add(&mut self, time: Duration) -> Result<Sample> {
        let mut expected = self.region.atomic_load::<u64>(WORD)?;
        latency(time, 1, || {
            let before = self.region.fetch_add(WORD, 3u64)?;
            if before != expected {
                return Err("a fetch-add was lost".into());
            }
            expected += 3;
            Ok(())
        })
    }

    pub fn compare_swap(&mut self, time: Duration) -> Result<Sample> {
        let mut expected = self.region.atomic_load::<u64>(WORD)?;
        latency(time, 1, || {
            let before = self.region.compare_swap(WORD, expected, expected + 1)?;
            if before != expected {
                return Err("a compare-and-swap was lost".into());
            }
            expected += 1;
            Ok(())
        })
    }

    /// GB/s of puts of `size` bytes, several always under way, until all are there, `shift` bytes off the page.
    pub fn put_bandwidth(&mut self, size: usize, shift: usize, time: Duration) -> Result<Sample> {
        let area = size.max(AREA_BYTES);
        let salt = self.salt;
        let source: Vec<u8> = (0..area).map(|index| (index / 7) as u8 ^ salt).collect();
        let local = self.local.shared();
        local.write_from(0, &source).ok_or("the area is too large")?;
        let part = size.min(PIECE_BYTES_MAX);
        let piece = |at: usize| local.sub(at, part).ok_or("beyond the area");
        // Short ones are copied, and have ended when they are posted.
        let ends_at_once = self.region.link() == "shm";
        let group = if size <= COPIED_BYTES_MAX { 64 } else { (UNDER_WAY_BYTES / GROUPS / part).max(1) };
        let mut under_way = VecDeque::new();
        let (start, mut count, mut at) = (Instant::now(), 0, 0);
        while count < area / part || start.elapsed() < time {
            if under_way.len() == GROUPS {
                wait_all(under_way.pop_front())?;
            }
            let mut ops = Vec::new();
            for index in 0..group {
                let offset = (at + shift) as u64;
                if size <= COPIED_BYTES_MAX {
                    self.region.write(offset, &source[at..at + size])?;
                } else if ends_at_once {
                    self.region.write_shared(offset, &[piece(at)?])?;
                } else {
                    let post = group_post(&self.region, index + 1 < group);
                    ops.push(post.write(offset, &[piece(at)?], WriteOptions::default())?);
                }
                count += 1;
                at = if at + 2 * part > area { 0 } else { at + part };
            }
            under_way.push_back(ops);
        }
        under_way.into_iter().try_for_each(|ops| wait_all(Some(ops)))?;
        self.region.flush()?;
        let sample = Sample::of_rate((count * part / size) as u64, size, start.elapsed());
        let covered = area / part * part;
        self.expect(shift, &source[..covered])?;
        Ok(sample)
    }

    /// GB/s of gets of `size` bytes, several always under way.
    pub fn get_bandwidth(&mut self, size: usize, shift: usize, time: Duration) -> Result<Sample> {
        let area = size.max(AREA_BYTES);
        let salt = self.salt;
        let expected: Vec<u8> = (0..area + shift).map(|index| (index / 5) as u8 ^ salt).collect();
        self.region.write(0, &expected)?;
        let part = size.min(PIECE_BYTES_MAX);
        let parts = (GETS_BYTES.max(size) / part).clamp(GROUPS, GETS_MAX);
        let local = self.local.shared();
        let pieces: Vec<_> = (0..parts)
            .map(|index| index * part % area)
            .filter_map(|at| Some(((at + shift) as u64, local.sub(at, part)?)))
            .collect();
        let groups: Vec<_> = pieces.chunks(pieces.len().div_ceil(GROUPS)).collect();
        let ends_at_once = self.region.link() == "shm";
        let mut next = groups.iter().cycle();
        let mut under_way = VecDeque::new();
        let (start, mut bytes) = (Instant::now(), 0);
        while bytes < area || start.elapsed() < time {
            if under_way.len() == groups.len() {
                wait_all(under_way.pop_front())?;
            }
            let group = next.next().ok_or("nothing to get")?;
            bytes += group.len() * part;
            if ends_at_once {
                group.iter().try_for_each(|&(offset, local)| self.region.read_shared(offset, &[local]))?;
                continue;
            }
            let ops = group.iter().enumerate().map(|(index, &(offset, local))| {
                group_post(&self.region, index + 1 < group.len()).read(offset, &[local])
            });
            under_way.push_back(ops.collect::<netvm::Result<Vec<Op>>>()?);
        }
        under_way.into_iter().try_for_each(|ops| wait_all(Some(ops)))?;
        let sample = Sample::of_rate((bytes / size) as u64, size, start.elapsed());
        for (offset, piece) in pieces {
            if piece.to_vec() != expected[offset as usize..][..part] {
                return Err("a get read something else".into());
            }
        }
        Ok(sample)
    }

    /// Whether the bytes are there.
    pub fn expect(&self, offset: usize, expected: &[u8]) -> Result<()> {
        let mut bytes = vec![0; expected.len()];
        self.region.read(offset as u64, &mut bytes)?;
        if bytes == expected { Ok(()) } else { Err("what was put is not there".into()) }
    }
}

/// Posts one of a group: the last sends them.
fn group_post(region: &Region, followed: bool) -> Posting<'_> {
    if followed { region.post().followed() } else { region.post() }
}

fn wait_all(ops: Option<Vec<Op>>) -> Result<()> {
    Ok(ops.into_iter().flatten().try_for_each(|op| op.wait())?)
}

/// Half the microseconds of `one`, `rounds` times: exactly as often as the other side answers.
pub fn latency_of(rounds: u64, mut one: impl FnMut() -> Result<()>) -> Result<Sample> {
    let mut histogram = super::super::histogram()?;
    let start = Instant::now();
    let mut now = start;
    for _ in 0..rounds {
        one()?;
        let end = Instant::now();
        histogram.saturating_record(end.duration_since(now).as_nanos() as u64);
        now = end;
    }
    Sample::of(&histogram, now.duration_since(start), 2)
}
