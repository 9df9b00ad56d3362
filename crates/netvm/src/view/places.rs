//! Views whose requests come one by one, each into the first free place: one thread, one epoll set, one volume. Nothing is allocated
//! to execute a request.

use std::os::fd::AsFd;
use std::time::Duration;

use netvm_sys::epoll::{Epoll, Interest, Ready};
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;

use super::rehearsal::rehearse;
use crate::error::{Error, Result};
use crate::lender::StopFlag;
use crate::volume::{BLOCK_BYTES, Ended, Event, Volume};

/// Most requests that are being executed.
pub const IN_FLIGHT_MAX: usize = 64;
/// Most bytes of one request.
pub const REQUEST_BYTES_MAX: usize = 128 << 10;

/// Rounds of requests that end at once, after which all others have their turn.
const ROUNDS_MAX: u32 = 8;

const STOP_ID: u64 = 0;
const SOURCE_ID: u64 = 1;
const VOLUME_ID: u64 = 2;

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// What a volume is to do for a request. Reads and writes have at most [`REQUEST_BYTES_MAX`] bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Into the request's place.
    Read { offset: u64, bytes: usize },
    /// From the request's place; `through`: it has ended when lenders have applied it.
    Write { offset: u64, bytes: usize, through: bool },
    /// The range reads as zeros.
    Discard { offset: u64, bytes: u64 },
    /// All writes that have ended are applied.
    Flush,
}

/// What became of asking for a request.
pub(super) enum Heard<R> {
    /// One, and what it wants.
    Work(R, Work),
    /// One that is dealt with.
    Done,
    /// There is none now.
    None,
    /// There will be none any more.
    End,
}

/// Where requests come from. Neither call waits for what depends on this process, or allocates.
pub(super) trait Source: AsFd {
    /// A request, as far as its answer needs it.
    type Request: Copy;

    /// The next request, its bytes in `place`, of a volume of `size_bytes`.
    fn hear(&mut self, place: SharedSlice, size_bytes: u64) -> Heard<Self::Request>;

    /// Answers one: with the bytes that were read, or with an error number. The answer may wait for [`Source::push`], and the bytes with it.
    fn answer(&mut self, request: Self::Request, work: Work, result: std::result::Result<SharedSlice, i32>);

    /// Sends the answers that wait.
    fn push(&mut self) {}
}

#[derive(Clone, Copy, Debug)]
struct Running<R> {
    request: R,
    work: Work,
    /// The write is done; its flush is under way.
    flushing: bool,
}

/// A volume, and a source of requests.
#[derive(Debug)]
pub(super) struct PlacesServer<S: Source> {
    volume: Volume,
    pub(super) source: S,
    epoll: Epoll,
    /// A place for the data of each request.
    buffers: Mapping,
    running: Vec<Option<Running<S::Request>>>,
    free: Vec<usize>,
    ended: Vec<Ended>,
    /// All places are taken: requests wait in the kernel.
    full: bool,
}

impl<S: Source> PlacesServer<S> {
    /// For a volume that is not used yet.
    ///
    /// # Errors
    /// [`Error::System`] without memory; [`Error::Other`] when the size is not one of whole blocks; the error of a lender that is lost
    /// already.
    pub(super) fn new(mut volume: Volume, source: S) -> Result<Self> {
        if volume.size_bytes() == 0 || !volume.size_bytes().is_multiple_of(BLOCK_BYTES) {
            return Err(Error::Other("the size must be a multiple of 4096 bytes".to_owned()));
        }
        let epoll = Epoll::new().map_err(|error| Error::system("make an epoll set", &error))?;
        let buffers = Mapping::anonymous(IN_FLIGHT_MAX * REQUEST_BYTES_MAX);
        let buffers = buffers.map_err(|error| Error::system("reserve memory for buffers", &error))?;
        let places = buffers.shared();
        rehearse(&mut volume, IN_FLIGHT_MAX, REQUEST_BYTES_MAX, |slot, bytes| {
            places.sub(slot * REQUEST_BYTES_MAX, bytes).unwrap_or(SharedSlice::EMPTY)
        })?;
        Ok(Self {
            volume,
            source,
            epoll,
            buffers,
            running: vec![None; IN_FLIGHT_MAX],
            free: (0..IN_FLIGHT_MAX).collect(),
            ended: Vec::with_capacity(2 * IN_FLIGHT_MAX),
            full: false,
        })
    }

    pub(super) fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Serves until the source ends, or it is stopped. `notice` is called once at the beginning, and then whenever something happened
    /// to the volume.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel does not let it wait.
    pub(super) fn run(
        &mut self,
        stop: &StopFlag,
        mut notice: impl FnMut(&Volume, Option<Event>),
    ) -> Result<()> {
        let watch = |fd, id| {
            let added = self.epoll.add(fd, id, Interest { readable: true, writable: false });
            added.map_err(|error| Error::system("watch a descriptor", &error))
        };
        watch(stop.as_fd(), STOP_ID)?;
        watch(self.source.as_fd(), SOURCE_ID)?;
        watch(self.volume.as_fd(), VOLUME_ID)?;
        notice(&self.volume, None);
        let mut ready: Vec<Ready> = Vec::with_capacity(netvm_sys::epoll::EVENTS_MAX);
        loop {
            // What waits in the kernel while there is room is not told again.
            let left = self.full && !self.free.is_empty();
            let patience = if left { Duration::ZERO } else { self.volume.patience() };
            let waited = self.epoll.wait(&mut ready, Some(patience));
            waited.map_err(|error| Error::system("wait for requests", &error))?;
            if ready.iter().any(|ready| ready.id == STOP_ID) {
                return Ok(());
            }
            let mut hear = left || ready.iter().any(|ready| ready.id == SOURCE_ID);
            let mut heard = ready.is_empty() || ready.iter().any(|ready| ready.id == VOLUME_ID);
            for _ in 0..ROUNDS_MAX {
                if hear && self.hear_all() {
                    return Ok(());
                }
                // What was begun may have ended, with nothing to be read.
                self.volume.advance(heard, &mut self.ended);
                let mut ended = std::mem::take(&mut self.ended);
                for Ended { token, result } in ended.drain(..) {
                    self.end(token as usize, result.is_ok());
                }
                self.ended = ended;
                // Before their places are used again.
                self.source.push();
                self.volume.push();
                heard = false;
                // There is room again for what waits in the kernel.
                hear = self.full && !self.free.is_empty();
                if !hear {
                    break;
                }
            }
            while let Some(event) = self.volume.event() {
                notice(&self.volume, Some(event));
            }
        }
    }

    /// Takes requests while there are any, and room; true when there will be no more.
    fn hear_all(&mut self) -> bool {
        while let Some(&slot) = self.free.last() {
            let place = self.place(slot, REQUEST_BYTES_MAX);
            match self.source.hear(place, self.volume.size_bytes()) {
                Heard::Work(request, work) => self.begin(slot, request, work),
                Heard::Done => {}
                Heard::None => {
                    self.watch(true);
                    return false;
                }
                Heard::End => return true,
            }
        }
        self.watch(false);
        false
    }

    /// Whether to be told about requests.
    fn watch(&mut self, readable: bool) {
        if self.full == readable {
            self.full = !readable;
            let interest = Interest { readable, writable: false };
            let _ = self.epoll.change(self.source.as_fd(), SOURCE_ID, interest);
        }
    }

    fn place(&self, slot: usize, bytes: usize) -> SharedSlice {
        self.buffers.shared().sub(slot * REQUEST_BYTES_MAX, bytes).unwrap_or(SharedSlice::EMPTY)
    }

    fn begin(&mut self, slot: usize, request: S::Request, work: Work) {
        let token = slot as u64;
        let begun = match work {
            Work::Read { offset, bytes } => self.volume.read(token, offset, self.place(slot, bytes)),
            Work::Write { offset, bytes, .. } => self.volume.write(token, offset, self.place(slot, bytes)),
            Work::Discard { offset, bytes } => self.volume.discard(token, offset, bytes),
            Work::Flush => {
                self.volume.flush(token);
                Ok(())
            }
        };
        match begun {
            Ok(()) => {
                // The caller read the request into the place that is the last free one.
                self.free.pop();
                self.running[slot] = Some(Running { request, work, flushing: false });
            }
            // It lies outside.
            Err(_) => self.source.answer(request, work, Err(ENOSPC)),
        }
    }

    /// A volume op has ended.
    fn end(&mut self, slot: usize, good: bool) {
        let Some(running) = self.running.get_mut(slot).and_then(Option::take) else { return };
        let Running { request, work, flushing } = running;
        if let (true, false, Work::Write { through: true, .. }) = (good, flushing, work) {
            self.running[slot] = Some(Running { flushing: true, ..running });
            return self.volume.flush(slot as u64);
        }
        self.free.push(slot);
        let data = match work {
            Work::Read { bytes, .. } => self.place(slot, bytes),
            _ => SharedSlice::EMPTY,
        };
        self.source.answer(request, work, if good { Ok(data) } else { Err(EIO) });
    }
}
