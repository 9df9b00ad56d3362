//! `netvm bench rma --link shm`: floors without a socket, and operations of a few nanoseconds, timed many at a time.

use std::error::Error;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use netvm::node::Node;
use netvm_sys::fdpass::{FdListener, FdSocket};
use netvm_sys::mapping::Mapping;
use netvm_sys::memfd::Memfd;
use netvm_sys::shared::SharedSlice;

use super::cases::Pair;
use super::partner::{PONG_OFFSET, TIMEOUT};
use super::raw::{self, AREA_BYTES};
use super::timing::Sample;
use super::{Case, Link, PING_POLLING, STREAM};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// What a client of the floors asks for with its first byte.
pub const ECHO: u8 = b'm';
/// A plain copy of so many bytes.
const COPY: &str = "copy";
/// An atomic of this CPU on its own memory.
const ATOMIC: &str = "atomic";
/// Operations that are timed together: reading the clock takes longer than one.
const BATCH: u32 = 64;
/// Pings go to the first half of the floor's file, pongs to the second.
const HALF: usize = 64 << 10;
/// The last round of a ping-pong.
const STOP: u64 = u64::MAX;
/// Where the cases' atomics work.
const WORD: u64 = (8 << 20) + (512 << 10);

/// All floors.
pub fn floors() -> Vec<Case> {
    let floor = |name, size| Case { name, size, shift: 0, is_floor: true };
    let mut all: Vec<Case> =
        [8, 4 << 10].into_iter().flat_map(|size| [floor(PING_POLLING, size), floor(COPY, size)]).collect();
    all.push(floor(ATOMIC, 8));
    all
}

/// Cases that are measured over shared memory.
const CASES: [&str; 20] = [
    "put",
    "put-complete",
    "get",
    "fetch-add",
    "cas",
    "notify-spin",
    "notify-block",
    "notify-handler",
    "channel",
    "lock",
    "sem",
    "sem-count",
    "waitq",
    "barrier",
    "put-rate",
    "put-bw",
    "get-bw",
    "put-bw-misaligned",
    "get-bw-misaligned",
    STREAM,
];

/// Whether a case is measured over shared memory.
pub fn has(case: &Case) -> bool {
    case.is_floor || CASES.contains(&case.name)
}

/// As [`Case::floor`].
pub fn floor_of(case: &Case) -> Option<(&'static str, usize, f64)> {
    Some(match case.name {
        _ if case.is_floor => return None,
        "put" => (PING_POLLING, case.size, 0.5),
        "notify-spin" | "notify-block" | "notify-handler" => (PING_POLLING, 8, 0.5),
        "channel" => (PING_POLLING, case.size, 0.5),
        "lock" | "sem" | "sem-count" | "barrier" => (PING_POLLING, 8, 1.0),
        "waitq" => (PING_POLLING, 8, 2.0),
        "put-complete" | "get" => (COPY, case.size, 1.0),
        "fetch-add" | "cas" => (ATOMIC, 8, 1.0),
        _ => (STREAM, case.size, 1.0),
    })
}

/// What is measured in another way than over sockets.
pub fn measure(pair: &mut Pair, raw: &str, case: &Case, time: Duration) -> Option<Result<Sample>> {
    let size = case.size;
    Some(match case.name {
        PING_POLLING => ping_pong(raw, size, time),
        STREAM => stream(size, time),
        COPY => copy(size, time),
        ATOMIC => atomic(time),
        "put" => put_one_way(pair, size, time),
        "put-complete" => put_complete(pair, size, time),
        "get" => get(pair, size, time),
        "fetch-add" => fetch_add(pair, time),
        "cas" => compare_swap(pair, time),
        _ => return None,
    })
}

/// Waits, without sleeping, until the word at `at` is `value`.
///
/// # Errors
/// When it does not come.
pub fn await_word(memory: SharedSlice, at: usize, value: u64) -> Result<()> {
    let mut start = None;
    loop {
        for _ in 0..1000 {
            if memory.with_u64(at, |word| word.load(Ordering::Acquire)) == Some(value) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        if start.get_or_insert_with(Instant::now).elapsed() > TIMEOUT {
            return Err(format!("round {value} has not come").into());
        }
        // The other side may need this CPU.
        std::thread::yield_now();
    }
}

/// Microseconds of `one`, [`BATCH`] at a time.
fn latency(time: Duration, mut one: impl FnMut() -> Result<()>) -> Result<Sample> {
    for _ in 0..1000 {
        one()?;
    }
    // Tenths of a nanosecond.
    let mut histogram = super::super::histogram()?;
    let start = Instant::now();
    let (mut now, mut count) = (start, 0);
    while now.duration_since(start) < time {
        for _ in 0..BATCH {
            one()?;
        }
        let end = Instant::now();
        histogram.saturating_record(end.duration_since(now).as_nanos() as u64 * 10 / u64::from(BATCH));
        (now, count) = (end, count + u64::from(BATCH));
    }
    let at = |share| histogram.value_at_quantile(share) as f64 / 10_000.0;
    let per_s = count as f64 / now.duration_since(start).as_secs_f64();
    Ok(Sample { median: at(0.5), p99: Some(at(0.99)), per_s, n: count })
}

/// Copies `size` bytes to `at` of the memory, the last of them a number.
fn put(memory: SharedSlice, at: usize, bytes: &mut [u8], number: u64) -> Result<()> {
    let last = bytes.len() - 8;
    bytes[last..].copy_from_slice(&number.to_ne_bytes());
    memory.write_from(at, bytes).ok_or_else(|| "beyond the floor's file".into())
}

fn meeting() -> Vec<u8> {
    format!("netvm-bench-{}", std::os::unix::process::parent_id()).into_bytes()
}

/// Answers pings of `size` bytes in a file that the other process passes.
pub fn serve(size: usize) -> std::io::Result<()> {
    let mut bytes = [0; 8];
    let socket = FdSocket::connect(&meeting())?;
    // It is sent as soon as we have connected.
    let start = Instant::now();
    let fds = loop {
        match socket.receive(&mut bytes) {
            Ok((_, fds)) => break fds,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && start.elapsed() < TIMEOUT => {
                std::thread::yield_now();
            }
            Err(error) => return Err(error),
        }
    };
    let file = fds.into_iter().next().ok_or(std::io::ErrorKind::InvalidData)?;
    let mapping = Mapping::of_peer(&Memfd::adopt(file, 2 * HALF as u64)?, true)?;
    let memory = mapping.shared();
    let mut bytes = vec![3; size];
    let (mut round, mut idle) = (1, 0u64);
    loop {
        match memory.with_u64(size - 8, |word| word.load(Ordering::Acquire)) {
            Some(seen) if seen == round => {
                if put(memory, HALF, &mut bytes, round).is_err() {
                    return Ok(());
                }
                (round, idle) = (round + 1, 0);
            }
            Some(STOP) | None => return Ok(()),
            // Its process has ended.
            _ if idle.is_multiple_of(1 << 16) && idle > 0 && socket.has_ended() => return Ok(()),
            _ if idle > 1000 => std::thread::yield_now(),
            _ => std::hint::spin_loop(),
        }
        idle += 1;
    }
}

/// Round trips of plain copies between two processes.
fn ping_pong(raw: &str, size: usize, time: Duration) -> Result<Sample> {
    let file = Memfd::sealed(c"netvm-bench", 2 * HALF as u64)?;
    let mapping = Mapping::of_memfd(&file)?;
    let memory = mapping.shared();
    memory.fill(0);
    let listener = FdListener::bind(format!("netvm-bench-{}", std::process::id()).as_bytes())?;
    let _socket = raw::connect(Link::Shm, raw, ECHO, size)?;
    let start = Instant::now();
    let socket = loop {
        if let Some(socket) = listener.accept()? {
            break socket;
        }
        if start.elapsed() > TIMEOUT {
            return Err("the other side does not come for the floor's file".into());
        }
        std::thread::yield_now();
    };
    socket.send(&[0; 8], &[file.as_fd()])?;
    let (mut bytes, mut round) = (vec![5; size], 0);
    let sample = latency(time, || {
        round += 1;
        put(memory, 0, &mut bytes, round)?;
        await_word(memory, HALF + size - 8, round)
    });
    put(memory, 0, &mut bytes, STOP)?;
    sample
}

/// GB/s of copies of `size` bytes between two places of this process.
fn stream(size: usize, time: Duration) -> Result<Sample> {
    let area = size.max(AREA_BYTES);
    let (from, to) = (Node::memory(area)?, Node::memory(area)?);
    from.shared().fill(7);
    to.shared().fill(1);
    let source = from.shared().to_vec();
    let (start, mut count, mut at) = (Instant::now(), 0u64, 0);
    while count == 0 || start.elapsed() < time {
        for _ in 0..if size < AREA_BYTES { 64 } else { 1 } {
            to.shared().write_from(at, &source[at..at + size]).ok_or("beyond the area")?;
            count += 1;
            at = if at + 2 * size > area { 0 } else { at + size };
        }
    }
    Ok(Sample::of_rate(count, size, start.elapsed()))
}

fn copy(size: usize, time: Duration) -> Result<Sample> {
    let memory = Node::memory(2 * HALF)?;
    let bytes = vec![5; size];
    latency(time, || {
        memory.shared().write_from(0, std::hint::black_box(&bytes)).ok_or_else(|| "beyond".into())
    })
}

fn atomic(time: Duration) -> Result<Sample> {
    let memory = Node::memory(4096)?;
    latency(time, || {
        std::hint::black_box(memory.shared().with_u64(0, |word| word.fetch_add(1, Ordering::SeqCst)));
        Ok(())
    })
}

/// Half a ping-pong, timed as its floor is.
fn put_one_way(pair: &mut Pair, size: usize, time: Duration) -> Result<Sample> {
    let batches = (pair.rounds(size, time)? / u64::from(BATCH)).max(4);
    let rounds = batches * u64::from(BATCH);
    let mut bytes = vec![5; size];
    let first = pair.round + 1;
    pair.round += rounds;
    pair.partner.tell(&format!("put {size} {first} {}", first + rounds))?;
    let mut histogram = super::super::histogram()?;
    let mut next = first;
    let start = Instant::now();
    let mut now = start;
    for _ in 0..batches {
        for _ in 0..BATCH {
            bytes[size - 8..].copy_from_slice(&next.to_ne_bytes());
            pair.region.write(PONG_OFFSET as u64, &bytes)?;
            pair.here.await_put(size, next)?;
            next += 1;
        }
        let end = Instant::now();
        histogram.saturating_record(end.duration_since(now).as_nanos() as u64 * 10 / u64::from(BATCH));
        now = end;
    }
    pair.partner.line()?;
    let at = |share| histogram.value_at_quantile(share) as f64 / 20_000.0;
    let per_s = rounds as f64 / now.duration_since(start).as_secs_f64();
    Ok(Sample { median: at(0.5), p99: Some(at(0.99)), per_s, n: rounds })
}

fn put_complete(pair: &mut Pair, size: usize, time: Duration) -> Result<Sample> {
    let bytes = vec![pair.salt; size];
    let sample = latency(time, || Ok(pair.region.write_flush(0, &bytes)?))?;
    pair.expect(0, &bytes)?;
    Ok(sample)
}

fn get(pair: &mut Pair, size: usize, time: Duration) -> Result<Sample> {
    let expected: Vec<u8> = (0..size).map(|index| index as u8 ^ pair.salt).collect();
    pair.region.write(0, &expected)?;
    let mut bytes = vec![0; size];
    let sample = latency(time, || Ok(pair.region.read(0, &mut bytes)?))?;
    if bytes == expected { Ok(sample) } else { Err("a get read something else".into()) }
}

fn fetch_add(pair: &mut Pair, time: Duration) -> Result<Sample> {
    let mut expected = pair.region.atomic_load::<u64>(WORD)?;
    latency(time, || {
        let before = pair.region.fetch_add(WORD, 3u64)?;
        if before != expected {
            return Err("a fetch-add was lost".into());
        }
        expected += 3;
        Ok(())
    })
}

fn compare_swap(pair: &mut Pair, time: Duration) -> Result<Sample> {
    let mut expected = pair.region.atomic_load::<u64>(WORD)?;
    latency(time, || {
        let before = pair.region.compare_swap(WORD, expected, expected + 1)?;
        if before != expected {
            return Err("a compare-and-swap was lost".into());
        }
        expected += 1;
        Ok(())
    })
}
