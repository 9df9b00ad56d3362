//! A link that is late on purpose.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use netvm_core::sim::Random;
use netvm_sys::thread::poll;

use super::{Caps, Incoming, Link, Loopback, Outgoing};
use crate::error::{Error, Result};

/// Bytes held back in one direction before no more are taken.
const HELD_BYTES_MAX: usize = 256 << 10;
/// Most bytes of a portion.
const PORTION_BYTES_MAX: u64 = 32 << 10;
/// A loopback link does not tell when there is room again.
const AGAIN: Duration = Duration::from_micros(200);

/// Wraps a link whose bytes are late: each portion, of random length, by a random time. So what comes over one link and over others, or
/// happens meanwhile in other threads, changes its order in time; the bytes of a link do not.
///
/// A thread passes the bytes on. It ends with the link.
#[derive(Debug)]
pub struct Delayed {
    near: Loopback,
    caps: Caps,
}

impl Delayed {
    /// `link` with delays of up to `max`, which `seed` chooses.
    ///
    /// # Errors
    /// [`Error::System`] when no descriptor or thread is to be had.
    pub fn new(link: impl Link + 'static, seed: u64, max: Duration) -> Result<Self> {
        let (near, far) = Loopback::pair()?;
        let caps = Caps { name: "delayed", ..link.caps() };
        let mut random = Random::new(seed);
        let (inward, outward) = (Way::new(&mut random, max), Way::new(&mut random, max));
        let thread = std::thread::Builder::new().name("netvm-delayed".to_owned());
        let started = thread.spawn(move || pass_on(link, far, inward, outward));
        started.map_err(|error| Error::system("start a thread", &error))?;
        Ok(Self { near, caps })
    }
}

impl Link for Delayed {
    fn caps(&self) -> Caps {
        self.caps
    }

    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        self.near.post(pieces)
    }

    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        self.near.poll(pieces)
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.near.wait_fd()
    }
}

/// One direction.
struct Way {
    random: Random,
    max: Duration,
    /// What is under way, and when it is due: each not before the one before it.
    held: VecDeque<(Instant, Vec<u8>)>,
    held_bytes: usize,
    /// Bytes of the first portion that have been passed on.
    passed: usize,
    /// No more will come.
    ended: bool,
    /// The receiving end takes nothing now.
    stuck: bool,
}

impl Way {
    fn new(random: &mut Random, max: Duration) -> Self {
        let random = Random::new(random.draw());
        Self { random, max, held: VecDeque::new(), held_bytes: 0, passed: 0, ended: false, stuck: false }
    }

    fn takes_more(&self) -> bool {
        !self.ended && self.held_bytes < HELD_BYTES_MAX
    }

    fn is_over(&self) -> bool {
        self.ended && self.held.is_empty()
    }

    /// Takes what has come, and passes on what is due.
    fn step(&mut self, from: &mut impl Link, to: &mut impl Link) {
        let now = Instant::now();
        while self.takes_more() {
            let mut portion = vec![0; 1 + self.random.below(PORTION_BYTES_MAX) as usize];
            let mut into = Incoming::new();
            into.bytes(&mut portion);
            match from.poll(&mut into) {
                Ok(count @ 1..) => {
                    portion.truncate(count);
                    let late = Duration::from_nanos(self.random.below(self.max.as_nanos() as u64 + 1));
                    let due = self.held.back().map_or(now, |(due, _)| *due).max(now + late);
                    self.held_bytes += count;
                    self.held.push_back((due, portion));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Ok(_) | Err(_) => self.ended = true,
            }
        }
        self.stuck = false;
        while let Some((due, portion)) = self.held.front()
            && *due <= now
        {
            let mut out = Outgoing::new();
            out.bytes(&portion[self.passed..]);
            match to.post(&out) {
                Ok(count) => self.passed += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.stuck = true;
                    break;
                }
                // Nobody is there: this and what follows is for nobody.
                Err(_) => {
                    (self.held_bytes, self.passed) = (0, 0);
                    return self.held.clear();
                }
            }
            if self.passed == portion.len() {
                self.held_bytes -= portion.len();
                self.passed = 0;
                self.held.pop_front();
            }
        }
    }

    /// When there is something to do that no descriptor tells of.
    fn due_in(&self) -> Option<Duration> {
        let (due, _) = self.held.front()?;
        Some(if self.stuck { AGAIN } else { due.saturating_duration_since(Instant::now()) })
    }
}

fn pass_on(mut link: impl Link, mut far: Loopback, mut inward: Way, mut outward: Way) {
    loop {
        inward.step(&mut link, &mut far);
        outward.step(&mut far, &mut link);
        let unsent = link.flush().is_err() && link.has_unsent();
        // An end of either side is one of the whole link, when what came before has been passed on.
        if inward.is_over() || (outward.is_over() && !unsent) {
            return;
        }
        let wants = |way: &Way| if way.takes_more() { libc::POLLIN } else { 0 };
        let room = if outward.stuck || unsent { libc::POLLOUT } else { 0 };
        let fd = |fd: BorrowedFd<'_>, events| libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
        let mut fds = [fd(link.wait_fd(), wants(&inward) | room), fd(far.wait_fd(), wants(&outward))];
        let due = [inward.due_in(), outward.due_in(), unsent.then_some(AGAIN)];
        if poll(&mut fds, due.into_iter().flatten().min()).is_err() {
            return;
        }
    }
}
