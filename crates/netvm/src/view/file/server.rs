//! The server: one thread, one epoll set, one volume. After [`FileServer::new`] it allocates nothing to execute a request.

use std::os::fd::AsFd;
use std::path::Path;

use netvm_sys::epoll::{Epoll, Interest, Ready};
use netvm_sys::fuse::FuseDevice;
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;

use super::super::rehearsal::rehearse;
use super::proto::{Answer, Ask, HEAD_BYTES, Request, errno};
use crate::error::{Error, Result};
use crate::lender::StopFlag;
use crate::volume::{BLOCK_BYTES, Ended, Event, Volume};

/// Most requests that are being executed.
pub const IN_FLIGHT_MAX: usize = 64;
/// Most bytes of one request.
pub const REQUEST_BYTES_MAX: usize = 128 << 10;

const STOP_ID: u64 = 0;
const DEVICE_ID: u64 = 1;
const VOLUME_ID: u64 = 2;

/// A request that the volume works on.
#[derive(Clone, Copy, Debug)]
struct Running {
    unique: u64,
    ask: Ask,
}

/// A volume as a file.
#[derive(Debug)]
pub struct FileServer {
    volume: Volume,
    device: FuseDevice,
    epoll: Epoll,
    /// A place for the data of each request.
    buffers: Mapping,
    running: [Option<Running>; IN_FLIGHT_MAX],
    free: Vec<usize>,
    ended: Vec<Ended>,
    /// All places are taken: requests wait in the kernel.
    full: bool,
}

/// What became of reading a request.
enum Heard {
    One,
    None,
    Unmounted,
}

impl FileServer {
    /// Makes the file of a volume that is not used yet, and what executing requests will need.
    ///
    /// # Errors
    /// [`Error::System`] without FUSE or memory; [`Error::Other`] when the size is not one of whole blocks; the error of a lender that
    /// is lost already.
    pub fn new(volume: Volume) -> Result<Self> {
        if volume.size_bytes() == 0 || !volume.size_bytes().is_multiple_of(BLOCK_BYTES) {
            return Err(Error::Other("the file's size must be a multiple of 4096 bytes".to_owned()));
        }
        let device = FuseDevice::open().map_err(|error| Error::system("open /dev/fuse", &error))?;
        let epoll = Epoll::new().map_err(|error| Error::system("make an epoll set", &error))?;
        let buffers = Mapping::anonymous(IN_FLIGHT_MAX * REQUEST_BYTES_MAX);
        let buffers = buffers.map_err(|error| Error::system("reserve memory for buffers", &error))?;
        let mut server = Self {
            volume,
            device,
            epoll,
            buffers,
            running: [None; IN_FLIGHT_MAX],
            free: (0..IN_FLIGHT_MAX).collect(),
            ended: Vec::with_capacity(2 * IN_FLIGHT_MAX),
            full: false,
        };
        let places = server.buffers.shared();
        let place = |slot, bytes| places.sub(slot * REQUEST_BYTES_MAX, bytes).unwrap_or(SharedSlice::EMPTY);
        rehearse(&mut server.volume, IN_FLIGHT_MAX, REQUEST_BYTES_MAX, place)?;
        Ok(server)
    }

    /// Puts it over the file `at`. Only root can open it; requests wait for [`FileServer::run`].
    ///
    /// # Errors
    /// [`Error::System`] without the right to mount.
    pub fn mount(&self, at: &Path) -> Result<()> {
        self.device.mount_file(at).map_err(|error| Error::system("mount a FUSE file", &error))
    }

    /// The volume behind it.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Serves until it is unmounted and nobody has it open, or stopped. `notice` is called once at the beginning, and then whenever
    /// something happened to the volume.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel does not let it wait.
    pub fn run(&mut self, stop: &StopFlag, mut notice: impl FnMut(&Volume, Option<Event>)) -> Result<()> {
        let watch = |fd, id| {
            let added = self.epoll.add(fd, id, Interest { readable: true, writable: false });
            added.map_err(|error| Error::system("watch a descriptor", &error))
        };
        watch(stop.as_fd(), STOP_ID)?;
        watch(self.device.as_fd(), DEVICE_ID)?;
        watch(self.volume.as_fd(), VOLUME_ID)?;
        notice(&self.volume, None);
        let mut ready: Vec<Ready> = Vec::with_capacity(netvm_sys::epoll::EVENTS_MAX);
        loop {
            let waited = self.epoll.wait(&mut ready, Some(self.volume.patience()));
            waited.map_err(|error| Error::system("wait for requests", &error))?;
            if ready.iter().any(|ready| ready.id == STOP_ID) {
                return Ok(());
            }
            let mut hear = ready.iter().any(|ready| ready.id == DEVICE_ID);
            loop {
                if hear && self.hear_all() {
                    return Ok(());
                }
                // What was begun may have ended, with nothing to be read.
                self.volume.poll(&mut self.ended);
                let mut ended = std::mem::take(&mut self.ended);
                for Ended { token, result } in ended.drain(..) {
                    self.end(token as usize, result.is_ok());
                }
                self.ended = ended;
                self.volume.push();
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
            match self.hear(slot) {
                Heard::One => {}
                Heard::None => {
                    self.watch(true);
                    return false;
                }
                Heard::Unmounted => return true,
            }
        }
        self.watch(false);
        false
    }

    /// Whether to be told about requests.
    fn watch(&mut self, readable: bool) {
        if self.full == readable {
            self.full = !readable;
            let _ = self.epoll.change(self.device.as_fd(), DEVICE_ID, Interest { readable, writable: false });
        }
    }

    fn buffer(&self, slot: usize, bytes: usize) -> SharedSlice {
        self.buffers.shared().sub(slot * REQUEST_BYTES_MAX, bytes).unwrap_or(SharedSlice::EMPTY)
    }

    /// Reads one request, with its data into the place `slot`, and begins it.
    fn hear(&mut self, slot: usize) -> Heard {
        let mut head = [0; HEAD_BYTES];
        let length = match self.device.read(&mut head, self.buffer(slot, REQUEST_BYTES_MAX)) {
            Ok(length) => length,
            Err(error) => {
                return match error.raw_os_error() {
                    Some(libc::EAGAIN) => Heard::None,
                    // Taken back while it was read, or a signal.
                    Some(libc::ENOENT | libc::EINTR) => Heard::One,
                    // ENODEV; whatever else it may be, it will not end.
                    _ => Heard::Unmounted,
                };
            }
        };
        if let Some(Request { unique, ask }) = Request::parse(&head, length) {
            self.begin(slot, unique, ask);
        }
        Heard::One
    }

    fn begin(&mut self, slot: usize, unique: u64, ask: Ask) {
        let size = self.volume.size_bytes();
        let ask = match ask {
            // Nothing is behind the end.
            Ask::Read { offset, bytes } => {
                Ask::Read { offset, bytes: u64::from(bytes).min(size.saturating_sub(offset)) as u32 }
            }
            ask => ask,
        };
        let answer = match ask {
            Ask::Silent => return,
            Ask::Nothing => Answer::done(unique),
            Ask::Refuse(error) => Answer::error(unique, error),
            Ask::Init { minor, .. } if minor < 28 => Answer::error(unique, errno::EINVAL),
            Ask::Init { readahead, flags, .. } => {
                Answer::init(unique, readahead, flags, REQUEST_BYTES_MAX as u32, IN_FLIGHT_MAX as u16)
            }
            Ask::Attributes => Answer::attributes(unique, size),
            Ask::Open => Answer::open(unique),
            Ask::Statistics => Answer::statistics(unique, size),
            Ask::Read { bytes: 0, .. } => Answer::done(unique),
            Ask::Read { bytes, .. } | Ask::Write { bytes, .. } if bytes as usize > REQUEST_BYTES_MAX => {
                Answer::error(unique, errno::EINVAL)
            }
            Ask::Read { .. } | Ask::Write { .. } | Ask::Discard { .. } | Ask::Sync => {
                return self.submit(slot, Running { unique, ask });
            }
        };
        self.answer(answer, SharedSlice::EMPTY);
    }

    fn submit(&mut self, slot: usize, running: Running) {
        let token = slot as u64;
        let begun = match running.ask {
            Ask::Read { offset, bytes } => self.volume.read(token, offset, self.buffer(slot, bytes as usize)),
            Ask::Write { offset, bytes } => {
                self.volume.write(token, offset, self.buffer(slot, bytes as usize))
            }
            Ask::Discard { offset, bytes } => self.volume.discard(token, offset, bytes),
            _ => {
                self.volume.flush(token);
                Ok(())
            }
        };
        match begun {
            Ok(()) => {
                // The caller read the request into the place that is the last free one.
                self.free.pop();
                self.running[slot] = Some(running);
            }
            Err(_) => self.answer(Answer::error(running.unique, errno::ENOSPC), SharedSlice::EMPTY),
        }
    }

    /// A volume op has ended.
    fn end(&mut self, slot: usize, good: bool) {
        let Some(Running { unique, ask }) = self.running.get_mut(slot).and_then(Option::take) else { return };
        self.free.push(slot);
        match ask {
            _ if !good => self.answer(Answer::error(unique, errno::EIO), SharedSlice::EMPTY),
            Ask::Read { bytes, .. } => self.answer(Answer::done(unique), self.buffer(slot, bytes as usize)),
            Ask::Write { bytes, .. } => self.answer(Answer::written(unique, bytes), SharedSlice::EMPTY),
            _ => self.answer(Answer::done(unique), SharedSlice::EMPTY),
        }
    }

    fn answer(&self, mut answer: Answer, data: SharedSlice) {
        // It fails only when nobody waits for it any more.
        let _ = self.device.write(answer.bytes(data.len()), data);
    }
}
