//! Several connections that carry the bytes of one file, each with a thread at both ends. The first connection says what they do, and what
//! went wrong; a lane that fails only ends.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::digest::Digest;
use super::extents;
use super::frames::{CHUNK_BYTES, Frame};
use super::pieces::{Chain, Piece};
use super::sink::{Into, Sink};
use super::source::{Pouring, Source};
use super::wire::{IDLE, Wire};
use crate::error::{Error, Result};

/// Smaller files go over the first connection.
pub(super) const BYTES_MIN: u64 = 16 << 20;
/// A lane that waits for others tells its sender so this often.
const TURN_STEP: Duration = Duration::from_secs(5);
/// So often whoever waits for lanes says how far they are.
const TICK: Duration = Duration::from_millis(100);

/// The state of lanes while a file is under way. `T` is what they share.
struct Common<T> {
    state: Mutex<T>,
    changed: Condvar,
    ended: AtomicBool,
    /// Lanes that are not done.
    running: AtomicU64,
    moved: AtomicU64,
    error: Mutex<Option<Error>>,
    /// Woken when a lane is done.
    waker: UnixStream,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Common<T> {
    fn new(state: T, lanes: usize) -> Result<(Self, UnixStream)> {
        let failed = |error| Error::system("make a socket", &error);
        let (waits, waker) = UnixStream::pair().map_err(failed)?;
        waits.set_nonblocking(true).and_then(|()| waker.set_nonblocking(true)).map_err(failed)?;
        let common = Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            ended: AtomicBool::new(false),
            running: AtomicU64::new(lanes as u64),
            moved: AtomicU64::new(0),
            error: Mutex::new(None),
            waker,
        };
        Ok((common, waits))
    }

    /// A lane is done. The first error counts: others follow from it.
    fn done(&self, result: Result<()>) {
        if let Err(error) = result {
            lock(&self.error).get_or_insert(error);
            self.end();
        }
        self.running.fetch_sub(1, Ordering::AcqRel);
        // When it is full somebody is about to look.
        let _ = (&self.waker).write(&[0]);
    }

    /// All stop where they are.
    fn end(&self) {
        let _state = lock(&self.state);
        self.ended.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    fn check(&self) -> Result<()> {
        match self.ended.load(Ordering::Acquire) {
            true => Err(Error::Other("the transfer was given up".to_owned())),
            false => Ok(()),
        }
    }

    fn is_running(&self) -> bool {
        self.running.load(Ordering::Acquire) > 0
    }
}

/// Lanes as those who started them see them.
struct Watch<'a, T> {
    common: &'a Common<T>,
    waits: UnixStream,
    stops: Vec<OwnedFd>,
}

impl<T> Watch<'_, T> {
    /// Waits until a lane is done, a moment has passed or, unless `deaf`, something has come over the first connection.
    fn wait(&mut self, wire: &Wire, deaf: bool) -> Result<()> {
        let fd = |fd: i32, events| libc::pollfd { fd, events, revents: 0 };
        let mut fds = [
            fd(self.waits.as_raw_fd(), libc::POLLIN),
            fd(if deaf { -1 } else { wire.as_fd().as_raw_fd() }, libc::POLLIN),
        ];
        netvm_sys::thread::poll(&mut fds, Some(TICK))
            .map_err(|error| Error::system("wait for the peer", &error))?;
        let _ = self.waits.read(&mut [0; 64]);
        Ok(())
    }

    /// Stops those that still run.
    fn stop(&self) {
        self.common.end();
        for stop in &self.stops {
            let _ = rustix::net::shutdown(stop, rustix::net::Shutdown::Both);
        }
    }
}

/// The end of what happened: of the lanes and of the first connection, who knows more tells.
fn outcome(wire: &mut Wire, ours: Result<()>, theirs: Option<Error>) -> Result<()> {
    match (ours, theirs) {
        // A lane that is cut: the peer says why, or is gone.
        (Ok(()), Some(error @ Error::Cut { .. })) => Err(wire.why(error)),
        (Ok(()), Some(error)) => Err(error),
        (ours, _) => ours,
    }
}

/// Which piece is sent next.
struct Cursor {
    /// The end of the last one.
    at: u64,
    length: u64,
    /// Where data is.
    range: Option<(u64, u64)>,
}

impl Cursor {
    fn next(&mut self, file: &File) -> io::Result<Option<Piece>> {
        if self.range.is_none_or(|(_, stop)| stop <= self.at) {
            self.range = extents::next(file, self.at, self.length)?;
        }
        let Some((start, stop)) = self.range else { return Ok(None) };
        let (after, offset) = (self.at, start.max(self.at));
        let bytes = (stop - offset).min(CHUNK_BYTES);
        self.at = offset + bytes;
        Ok(Some(Piece { after, offset, bytes }))
    }
}

/// A connection of the sender.
pub(super) struct SendLane {
    pub wire: Wire,
    pub pouring: Pouring,
}

impl SendLane {
    fn run(&mut self, source: &Source<'_>, check: bool, common: &Common<Cursor>) -> Result<u64> {
        let mut sum = 0u64;
        loop {
            common.check()?;
            let next = lock(&common.state).next(source.file);
            let next = next.map_err(|error| super::about("read", source.path.display(), &error))?;
            let Some(piece) = next else { break };
            self.wire.queue(&Frame::Piece(piece))?;
            let mut digest = check.then(Digest::new);
            let told = &mut |bytes| {
                common.moved.fetch_add(bytes, Ordering::Relaxed);
            };
            self.pouring.send(&mut self.wire, source, (piece.offset, piece.bytes), digest.as_mut(), told)?;
            let digest = digest.map_or(0, |digest| digest.finish(piece.offset + piece.bytes));
            sum = sum.wrapping_add(digest);
            self.wire.queue(&Frame::End { digest })?;
        }
        self.wire.queue(&Frame::End { digest: sum })?;
        self.wire.flush()?;
        Ok(sum)
    }
}

/// Sends what a file holds from `from` on; returns the sum of the digests of its pieces, and how many bytes were sent. `progress` hears of
/// the latter now and then.
///
/// # Errors
/// The first one of a lane, or what the receiver says.
pub(super) fn send(
    lanes: &mut [SendLane],
    wire: &mut Wire,
    source: &Source<'_>,
    (from, length): (u64, u64),
    check: bool,
    progress: &mut dyn FnMut(u64),
) -> Result<(u64, u64)> {
    let (common, waits) = Common::new(Cursor { at: from, length, range: None }, lanes.len())?;
    let mut watch = Watch { common: &common, waits, stops: stops(lanes.iter().map(|lane| &lane.wire))? };
    let sum = AtomicU64::new(0);
    let result = std::thread::scope(|scope| {
        for lane in lanes {
            let (common, sum) = (&common, &sum);
            scope.spawn(move || {
                let done = lane.run(source, check, common);
                common.done(done.map(|digest| {
                    sum.fetch_add(digest, Ordering::Relaxed);
                }));
            });
        }
        let result = (|| {
            while common.is_running() && common.check().is_ok() {
                watch.wait(wire, false)?;
                progress(common.moved.load(Ordering::Relaxed));
                if wire.receive_now()?.is_some() {
                    return Err(wire.wrong("a message out of turn"));
                }
            }
            Ok(())
        })();
        if result.is_err() || common.check().is_err() {
            watch.stop();
        }
        result
    });
    let error = lock(&common.error).take();
    outcome(wire, result, error)?;
    Ok((sum.into_inner(), common.moved.into_inner()))
}

/// A connection of the receiver.
pub(super) struct TakeLane {
    pub wire: Wire,
    pub sink: Sink,
}

impl TakeLane {
    fn run(&mut self, into: Into<'_>, check: bool, common: &Common<Chain>) -> Result<u64> {
        let mut sum = 0u64;
        loop {
            common.check()?;
            let piece = match self.wire.receive()? {
                Frame::Piece(piece) => piece,
                Frame::End { digest } if digest == sum => return Ok(sum),
                _ => return Err(self.wire.wrong("a message out of turn")),
            };
            self.wait_for_turn(piece, common)?;
            let mut digest = check.then(Digest::new);
            let told = &mut |_, bytes| {
                common.moved.fetch_add(bytes as u64, Ordering::Relaxed);
            };
            let range = (piece.offset, piece.bytes);
            self.sink.take(&mut self.wire, into, range, digest.as_mut(), told)?;
            let digest = digest.map_or(0, |digest| digest.finish(piece.offset + piece.bytes));
            match self.wire.receive()? {
                Frame::End { digest: theirs } if theirs == digest => {}
                Frame::End { .. } => return Err(super::sink::differs(into.entry)),
                _ => return Err(self.wire.wrong("a message out of turn")),
            }
            sum = sum.wrapping_add(digest);
            lock(&common.state).came(piece);
            common.changed.notify_all();
        }
    }

    /// Until not too many other pieces are missing before this one.
    fn wait_for_turn(&mut self, piece: Piece, common: &Common<Chain>) -> Result<()> {
        let (mut moved, mut since) = (common.moved.load(Ordering::Relaxed), Instant::now());
        loop {
            let mut chain = lock(&common.state);
            if chain.begin(piece).map_err(|wrong| self.wire.wrong(wrong))? {
                return Ok(());
            }
            common.check()?;
            let waited = common.changed.wait_timeout(chain, TURN_STEP);
            let slept = waited.unwrap_or_else(PoisonError::into_inner).1.timed_out();
            let now = common.moved.load(Ordering::Relaxed);
            if now != moved {
                (moved, since) = (now, Instant::now());
            } else if since.elapsed() >= IDLE {
                return Err(self.wire.idle("a piece that others wait for"));
            }
            if slept {
                // The sender waits as long for us to take this one.
                self.wire.queue(&Frame::Working)?;
                self.wire.flush()?;
            }
        }
    }
}

/// How far a file has come: the end of what is complete, and the bytes that were received.
pub(super) struct Came {
    pub front: u64,
    pub moved: u64,
}

/// Receives what a file holds from `from` on, until its `END`. What has come in any case is in `came`.
///
/// # Errors
/// The first one of a lane, or what the sender says.
pub(super) fn take(
    lanes: &mut [TakeLane],
    wire: &mut Wire,
    into: Into<'_>,
    from: u64,
    check: bool,
    came: &mut Came,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let (common, waits) = Common::new(Chain::new(from, into.entry.bytes), lanes.len())?;
    let mut watch = Watch { common: &common, waits, stops: stops(lanes.iter().map(|lane| &lane.wire))? };
    let sum = AtomicU64::new(0);
    let mut theirs = None;
    let result = std::thread::scope(|scope| {
        for lane in lanes {
            let (common, sum) = (&common, &sum);
            scope.spawn(move || {
                let done = lane.run(into, check, common);
                common.done(done.map(|digest| {
                    sum.fetch_add(digest, Ordering::Relaxed);
                }));
            });
        }
        let result = (|| {
            let mut all_came: Option<Instant> = None;
            while (common.is_running() || theirs.is_none()) && common.check().is_ok() {
                watch.wait(wire, theirs.is_some())?;
                if !common.is_running() && all_came.get_or_insert_with(Instant::now).elapsed() >= IDLE {
                    return Err(wire.idle("the end of a file"));
                }
                progress(common.moved.load(Ordering::Relaxed));
                // What comes behind the end is not for now.
                if theirs.is_none() {
                    match wire.receive_now()? {
                        Some(Frame::End { digest }) => theirs = Some(digest),
                        Some(_) => return Err(wire.wrong("a message out of turn")),
                        None => {}
                    }
                }
            }
            Ok(())
        })();
        if result.is_err() || common.check().is_err() {
            watch.stop();
        }
        result
    });
    let error = lock(&common.error).take();
    let chain = lock(&common.state);
    *came = Came { front: chain.front(), moved: common.moved.load(Ordering::Relaxed) };
    outcome(wire, result, error)?;
    if !chain.is_whole() || theirs != Some(sum.into_inner()) {
        return Err(wire.wrong("pieces of a file that are missing"));
    }
    Ok(())
}

fn stops<'a>(wires: impl Iterator<Item = &'a Wire>) -> Result<Vec<OwnedFd>> {
    let stops = wires.map(|wire| wire.as_fd().try_clone_to_owned()).collect::<io::Result<_>>();
    stops.map_err(|error| Error::system("duplicate a socket", &error))
}
