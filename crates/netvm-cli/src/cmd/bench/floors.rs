//! The floors of `netvm bench fault`: what the kernel alone takes for the steps that a far page fault is made of.

use std::error::Error;
use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use clap::Args;
use netvm_sys::bench_floor::{FaultFloor, FloorFeatures};
use netvm_sys::bench_sigbus::SigbusFloor;
use netvm_sys::cpu::pin;

use super::PAGE_BYTES;
use super::worker::Outcome;

/// Bytes of a request in the round trip.
pub const REQUEST_BYTES: usize = 16;
/// Bytes of one send in the stream.
pub const STREAM_BYTES: usize = 256 << 10;
/// With bytes both ways, nobody sends so much more than has come.
const AHEAD_BYTES: u64 = 2 * STREAM_BYTES as u64;

#[derive(Args, Debug)]
pub struct EchoArgs {
    #[arg(long)]
    cpu: Option<usize>,
    /// Look for requests instead of sleeping until one comes
    #[arg(long)]
    spin: bool,
}

/// The other side of the TCP floors: a process that answers 16 bytes with 4 KiB, or streams, one way or both.
///
/// It prints its address and ends when its input ends.
///
/// # Errors
/// When there is no loopback network.
pub fn serve(args: &EchoArgs) -> Result<(), Box<dyn Error>> {
    if let Some(cpu) = args.cpu {
        pin(cpu)?;
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    out!("{}", listener.local_addr()?);
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
    for stream in listener.incoming() {
        // A client that has gone is nothing to report.
        let _ = stream.and_then(|stream| serve_one(stream, args.spin));
    }
    Ok(())
}

/// Fills `bytes` from a stream that does not block.
fn spin_exact(stream: &mut TcpStream, bytes: &mut [u8]) -> std::io::Result<()> {
    let mut have = 0;
    while have < bytes.len() {
        match stream.read(&mut bytes[have..]) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => have += read,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn serve_one(mut stream: TcpStream, spin: bool) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    if kind[0] == b'b' {
        let mut exchange = Exchange::new(stream)?;
        loop {
            exchange.step()?;
        }
    }
    if spin && kind[0] != b's' {
        // Answers fit the socket's buffer.
        stream.set_nonblocking(true)?;
        let (answer, mut request) = ([0x5A; PAGE_BYTES], [0; REQUEST_BYTES]);
        loop {
            spin_exact(&mut stream, &mut request)?;
            stream.write_all(&answer)?;
        }
    }
    let answer = vec![0x5A; if kind[0] == b's' { STREAM_BYTES } else { PAGE_BYTES }];
    let mut request = [0; REQUEST_BYTES];
    loop {
        if kind[0] != b's' {
            stream.read_exact(&mut request)?;
        }
        stream.write_all(&answer)?;
    }
}

/// Round trips of 16 bytes there and 4 KiB back; who waits sleeps, or looks for the bytes if `spin`.
///
/// # Errors
/// When the connection fails.
pub fn round_trip(address: &str, spin: bool, time: Duration) -> Result<Outcome, Box<dyn Error>> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.write_all(b"r")?;
    stream.set_nonblocking(spin)?;
    let mut page = [0; PAGE_BYTES];
    timed(time, || {
        stream.write_all(&[1; REQUEST_BYTES])?;
        if spin {
            spin_exact(&mut stream, &mut page)?
        } else {
            stream.read_exact(&mut page)?
        }
        Ok(())
    })
}

/// Bandwidth of one TCP stream in sends and receives of 256 KiB.
///
/// # Errors
/// When the connection fails.
pub fn stream(address: &str, time: Duration) -> Result<Outcome, Box<dyn Error>> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"s")?;
    let mut buffer = vec![0; STREAM_BYTES];
    for _ in 0..64 {
        stream.read_exact(&mut buffer)?;
    }
    bandwidth(STREAM_BYTES, time, || Ok(stream.read_exact(&mut buffer)?))
}

/// Bandwidth of one TCP connection each way, while as much goes the other way: what each page that is overwritten takes, as it comes in before and goes out
/// afterwards.
///
/// # Errors
/// When the connection fails.
pub fn both_ways(address: &str, time: Duration) -> Result<Outcome, Box<dyn Error>> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"b")?;
    let mut exchange = Exchange::new(stream)?;
    let mut block = || {
        let end = exchange.received + STREAM_BYTES as u64;
        while exchange.received < end {
            exchange.step()?;
        }
        Ok(())
    };
    for _ in 0..64 {
        block()?;
    }
    bandwidth(STREAM_BYTES, time, block)
}

/// One end of a connection on which as much goes one way as the other.
struct Exchange {
    stream: TcpStream,
    buffer: Vec<u8>,
    sent: u64,
    received: u64,
}

impl Exchange {
    fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, buffer: vec![0x5A; STREAM_BYTES], sent: 0, received: 0 })
    }

    /// Sends and receives what can be, or sleeps until something can.
    fn step(&mut self) -> std::io::Result<()> {
        let may_send = self.sent < self.received + AHEAD_BYTES;
        let sent = if may_send { transferred(self.stream.write(&self.buffer))? } else { 0 };
        let received = transferred(self.stream.read(&mut self.buffer))?;
        (self.sent, self.received) = (self.sent + sent, self.received + received);
        if sent + received == 0 {
            let mut ready = netvm_sys::thread::readable(&self.stream);
            ready.events |= if may_send { libc::POLLOUT } else { 0 };
            netvm_sys::thread::poll(&mut [ready], None)?;
        }
        Ok(())
    }
}

/// How many bytes went at once.
fn transferred(result: std::io::Result<usize>) -> std::io::Result<u64> {
    match result {
        Ok(0) => Err(std::io::ErrorKind::UnexpectedEof.into()),
        Ok(bytes) => Ok(bytes as u64),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(0),
        Err(error) => Err(error),
    }
}

/// A page fault answered by a handler thread that only copies (or moves) a page into place.
///
/// # Errors
/// When there is no userfaultfd, or it cannot move.
pub fn fault(moves: bool, handler_cpu: Option<usize>, time: Duration) -> Result<Outcome, Box<dyn Error>> {
    const PAGES: usize = 4096;
    let floor = FaultFloor::new(PAGES, FloorFeatures { moves, ..FloorFeatures::default() })?;
    let mut page = 0;
    std::thread::scope(|scope| {
        let handler = scope.spawn(|| -> std::io::Result<()> {
            if let Some(cpu) = handler_cpu {
                pin(cpu)?;
            }
            // The last page is the signal to end.
            loop {
                let Some(fault) = floor.wait_fault()? else { continue };
                if moves {
                    floor.move_in(fault.page, fault.page, 1)?;
                } else {
                    floor.copy_in(fault.page, fault.page % 64, 1, false)?;
                }
                if fault.page == PAGES - 1 {
                    return Ok(());
                }
            }
        });
        let outcome = timed(time, || {
            black_box(floor.read(page));
            page += 1;
            if page == PAGES - 1 {
                // Start again; the sample that pays for this lies beyond the 99th percentile.
                if moves {
                    floor.move_out(0, 0, PAGES - 1)?;
                } else {
                    floor.discard(0, PAGES - 1)?;
                }
                page = 0;
            }
            Ok(())
        });
        floor.read(PAGES - 1);
        handler.join().map_err(|_| "the handler thread of the floor panicked")??;
        outcome
    })
}

/// Faults of several threads at once, each in pages of its own. With `sharded` each has a userfaultfd and a handler thread of its own as well,
/// else they share one.
///
/// # Errors
/// When there is no userfaultfd.
pub fn fault_by_threads(
    threads: usize,
    sharded: bool,
    handler_cpu: Option<usize>,
    time: Duration,
) -> Result<Outcome, Box<dyn Error>> {
    const PAGES: usize = 1024;
    let (shards, each) = if sharded { (threads, 1) } else { (1, threads) };
    // The last page of each is the signal to end.
    let end = PAGES * each;
    let new = |_| FaultFloor::new(end + 1, FloorFeatures::default());
    let floors = (0..shards).map(new).collect::<std::io::Result<Vec<_>>>()?;
    let answer = |floor: &FaultFloor| -> std::io::Result<()> {
        if let Some(cpu) = handler_cpu {
            pin(cpu)?;
        }
        loop {
            let Some(fault) = floor.wait_fault()? else { continue };
            floor.copy_in(fault.page, fault.page % 64, 1, false)?;
            if fault.page == end {
                return Ok(());
            }
        }
    };
    let walk = |floor: &FaultFloor, first: usize| {
        let mut page = 0;
        let one = || {
            black_box(floor.read(first + page));
            page += 1;
            if page == PAGES {
                floor.discard(first, PAGES)?;
                page = 0;
            }
            Ok(())
        };
        timed(time, one).map_err(|error| error.to_string())
    };
    std::thread::scope(|scope| {
        let handlers: Vec<_> = floors.iter().map(|floor| scope.spawn(move || answer(floor))).collect();
        let walkers: Vec<_> = (0..threads)
            .map(|thread| {
                let (floor, first) = if sharded { (thread, 0) } else { (0, thread * PAGES) };
                let floor = &floors[floor];
                scope.spawn(move || walk(floor, first))
            })
            .collect();
        let outcomes: Vec<_> = walkers.into_iter().map(|walker| walker.join()).collect();
        for floor in &floors {
            black_box(floor.read(end));
        }
        for handler in handlers {
            handler.join().map_err(|_| "the handler thread of the floor panicked")??;
        }
        let mut all = Outcome::default();
        for outcome in outcomes {
            let one = outcome.map_err(|_| "a thread of the floor panicked")??;
            all.median += one.median / threads as f64;
            all.p99 = all.p99.max(one.p99);
            all.n += one.n;
            all.per_s += one.per_s;
        }
        Ok(all)
    })
}

/// A page fault answered by the faulting thread itself, which copies a page into place in its handler of SIGBUS.
///
/// # Errors
/// When there is no userfaultfd.
pub fn fault_in_handler(time: Duration) -> Result<Outcome, Box<dyn Error>> {
    const PAGES: usize = 4096;
    let floor = SigbusFloor::new(PAGES)?;
    let mut page = 0;
    timed(time, || {
        black_box(floor.read(page));
        page += 1;
        if page == PAGES {
            // Start again; the sample that pays for this lies beyond the 99th percentile.
            floor.discard(PAGES)?;
            page = 0;
        }
        Ok(())
    })
}

/// Copies of single pages over memory that does not fit the cache.
///
/// # Errors
/// None in practice.
pub fn copy_pages(time: Duration) -> Result<Outcome, Box<dyn Error>> {
    const PAGES: usize = 16 << 10;
    let from = vec![1u8; PAGES * PAGE_BYTES];
    let mut page = [0; PAGE_BYTES];
    let mut turn = 0usize;
    timed(time, || {
        turn = (turn + 7919) % PAGES;
        page.copy_from_slice(&from[turn * PAGE_BYTES..][..PAGE_BYTES]);
        black_box(&page);
        Ok(())
    })
}

/// Sequential copies over memory that does not fit the cache.
///
/// # Errors
/// None in practice.
pub fn copy_sequential(time: Duration) -> Result<Outcome, Box<dyn Error>> {
    const CHUNKS: usize = 256;
    let from = vec![1u8; CHUNKS * STREAM_BYTES];
    let mut to = vec![0u8; CHUNKS * STREAM_BYTES];
    let mut turn = 0;
    bandwidth(STREAM_BYTES, time, || {
        turn = (turn + 1) % CHUNKS;
        let range = turn * STREAM_BYTES..(turn + 1) * STREAM_BYTES;
        to[range.clone()].copy_from_slice(&from[range]);
        black_box(&to);
        Ok(())
    })
}

/// Microseconds of `one`, repeated for `time`.
fn timed(
    time: Duration,
    mut one: impl FnMut() -> Result<(), Box<dyn Error>>,
) -> Result<Outcome, Box<dyn Error>> {
    for _ in 0..200 {
        one()?;
    }
    let mut histogram = super::histogram()?;
    let start = Instant::now();
    let mut now = start;
    while now.duration_since(start) < time {
        one()?;
        let end = Instant::now();
        histogram.saturating_record(end.duration_since(now).as_nanos() as u64);
        now = end;
    }
    Ok(Outcome {
        median: histogram.value_at_quantile(0.5) as f64 / 1000.0,
        p99: histogram.value_at_quantile(0.99) as f64 / 1000.0,
        n: histogram.len(),
        per_s: histogram.len() as f64 / now.duration_since(start).as_secs_f64(),
        ..Outcome::default()
    })
}

/// GB/s of `one`, which moves `bytes`, repeated for `time`.
fn bandwidth(
    bytes: usize,
    time: Duration,
    one: impl FnMut() -> Result<(), Box<dyn Error>>,
) -> Result<Outcome, Box<dyn Error>> {
    let outcome = timed(time, one)?;
    let gigabytes = bytes as f64 / 1e9;
    Ok(Outcome { median: outcome.per_s * gigabytes, p99: gigabytes / (outcome.p99 * 1e-6), ..outcome })
}
