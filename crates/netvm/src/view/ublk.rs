//! A volume as a ublk block device of this machine. docs/design/ublk.md has the whole.
//!
//! One thread, one epoll set, one volume. After [`UblkServer::new`] it allocates nothing to execute a request.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;

use netvm_sys::epoll::{Epoll, EventFd, Interest, Ready};
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;
use netvm_sys::ublk::{Control, Heard, Info, Operation, Queues, Request, Shape, disk};

use super::rehearsal::rehearse;
use crate::error::{Error, Result};
use crate::lender::StopFlag;
use crate::volume::{BLOCK_BYTES, Ended, Event, Volume};

/// Most hardware queues.
pub const QUEUES_MAX: u16 = 32;
/// Most requests of all queues.
pub const SLOTS_MAX: usize = 1024;
/// Most bytes of one request.
pub const REQUEST_BYTES_MAX: u32 = 1 << 20;

const STOP_ID: u64 = 0;
const QUEUES_ID: u64 = 1;
const VOLUME_ID: u64 = 2;
const CONTROL_ID: u64 = 3;
/// Of threads that only wait for the kernel.
const STACK_BYTES: usize = 128 << 10;

const EIO: i32 = 5;
const EINVAL: i32 = 22;
const EOPNOTSUPP: i32 = 95;

/// How to serve.
#[derive(Clone, Copy, Debug)]
pub struct UblkConfig {
    /// Hardware queues, 1 to [`QUEUES_MAX`].
    pub queues: u16,
    /// Requests of each; of all queues at most [`SLOTS_MAX`].
    pub depth: u16,
    /// Most bytes of a request, a multiple of 4096, at most [`REQUEST_BYTES_MAX`]. Each request has a place of so many.
    pub request_bytes: u32,
    /// When the server dies the disk stays, and its requests wait for another process. Otherwise they fail and the
    /// disk goes.
    pub stays: bool,
}

impl Default for UblkConfig {
    fn default() -> Self {
        Self { queues: 1, depth: 64, request_bytes: 128 << 10, stays: false }
    }
}

impl UblkConfig {
    fn check(&self) -> Result<()> {
        let slots = usize::from(self.queues) * usize::from(self.depth);
        if !(1..=QUEUES_MAX).contains(&self.queues) || !(1..=SLOTS_MAX).contains(&slots) {
            return Err(Error::Other(format!(
                "{} queues of {} requests are not possible: 1 to {QUEUES_MAX} queues, and {SLOTS_MAX} requests in all at most",
                self.queues, self.depth
            )));
        }
        let bytes = self.request_bytes;
        if bytes == 0 || bytes > REQUEST_BYTES_MAX || !u64::from(bytes).is_multiple_of(BLOCK_BYTES) {
            return Err(Error::Other(format!(
                "requests of {bytes} bytes are not possible: a multiple of 4096, {REQUEST_BYTES_MAX} at most"
            )));
        }
        Ok(())
    }
}

/// A request that the volume works on.
#[derive(Clone, Copy, Debug)]
struct Running {
    request: Request,
    /// The write is done; its flush is under way.
    flushing: bool,
}

/// Something that whoever runs the server should know.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Notice {
    /// The disk is there.
    Started,
    /// Of the volume.
    Volume(Event),
}

/// A volume as a block device.
#[derive(Debug)]
pub struct UblkServer {
    volume: Volume,
    info: Info,
    // Before the memory that the kernel uses.
    queues: Option<Queues>,
    device: Device,
    epoll: Epoll,
    buffers: Mapping,
    running: Vec<Option<Running>>,
    ended: Vec<Ended>,
}

/// A device of the kernel's. It goes with this.
#[derive(Debug)]
struct Device {
    id: u32,
    /// Somebody else removes it: the number may be another one's by now.
    gone: bool,
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.gone {
            let _ = remove(self.id);
        }
    }
}

/// Removes a device, whoever served it.
///
/// # Errors
/// [`Error::System`] when there is none of this number, or without the right to do so.
pub fn remove(id: u32) -> Result<()> {
    let mut control = open_control()?;
    // One that has not been started, or has been stopped, has nothing to stop.
    let _ = control.stop(id);
    control.delete(id).map_err(|error| Error::system("remove a ublk device", &error))
}

/// Whether this kernel's devices can stay without a server ([`UblkConfig::stays`]).
///
/// # Errors
/// [`Error::System`] without ublk or the right to use it, and before Linux 6.5.
pub fn can_stay() -> Result<bool> {
    open_control()?.can_recover().map_err(|error| Error::system("ask what ublk can", &error))
}

/// The process that serves a device; 0 before it is a disk and when it is none any more.
///
/// # Errors
/// [`Error::System`] when there is none of this number.
pub fn server_of(id: u32) -> Result<u32> {
    let info = open_control()?.info(id).map_err(|error| Error::system("ask for a ublk device", &error))?;
    Ok(u32::try_from(info.server).unwrap_or(0))
}

fn open_control() -> Result<Control> {
    Control::open().map_err(|error| Error::system("open /dev/ublk-control", &error))
}

impl UblkServer {
    /// Makes a device for a volume that is not used yet, and what executing requests will need. It is a disk when it runs.
    ///
    /// # Errors
    /// [`Error::System`] without ublk, rights or memory; [`Error::Other`] when the size is not one of whole blocks or the
    /// configuration is not possible; the error of a lender that is lost already.
    pub fn new(mut volume: Volume, config: &UblkConfig) -> Result<Self> {
        let size = volume.size_bytes();
        config.check()?;
        if size == 0 || !size.is_multiple_of(BLOCK_BYTES) {
            return Err(Error::Other("the device's size must be a multiple of 4096 bytes".to_owned()));
        }
        let mut control = open_control()?;
        let wanted = Shape {
            queues: config.queues,
            depth: config.depth,
            request_bytes: config.request_bytes,
            recoverable: config.stays,
        };
        let added = control.add(wanted).map_err(|error| Error::system("make a ublk device", &error))?;
        let (info, device) = (added, Device { id: added.id, gone: false });
        control.set_size(&info, size).map_err(|error| Error::system("size a ublk device", &error))?;
        let (slots, bytes) = (info.shape.slots(), info.shape.request_bytes as usize);
        let buffers = Mapping::anonymous(slots * bytes);
        let buffers = buffers.map_err(|error| Error::system("reserve memory for buffers", &error))?;
        let places = buffers.shared();
        rehearse(&mut volume, slots, bytes, |slot, length| {
            places.sub(slot * bytes, length).unwrap_or(SharedSlice::EMPTY)
        })?;
        let queues = Queues::open(&info, places);
        let queues = queues.map_err(|error| Error::system("open a ublk device", &error))?;
        let epoll = Epoll::new().map_err(|error| Error::system("make an epoll set", &error))?;
        Ok(Self {
            volume,
            info,
            queues: Some(queues),
            device,
            epoll,
            buffers,
            running: vec![None; slots],
            ended: Vec::with_capacity(2 * slots),
        })
    }

    /// Number of the device.
    pub fn id(&self) -> u32 {
        self.device.id
    }

    /// Where the disk is when it has started.
    pub fn disk(&self) -> PathBuf {
        disk(self.device.id)
    }

    /// The volume behind it.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Makes it a disk, and serves until the flag is raised or somebody else removes the device. What was written to the disk is
    /// flushed before it is removed. The device has gone when this server is dropped.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel does not start it, or does not let it wait.
    pub fn run(&mut self, stop: &StopFlag, mut notice: impl FnMut(&Volume, Notice)) -> Result<()> {
        let Some(queues) = self.queues.take() else {
            return Err(Error::Other("this server has ended".to_owned()));
        };
        let event = EventFd::new().map_err(|error| Error::system("make an event descriptor", &error))?;
        let watch = |fd, id| {
            let added = self.epoll.add(fd, id, Interest { readable: true, writable: false });
            added.map_err(|error| Error::system("watch a descriptor", &error))
        };
        watch(stop.as_fd(), STOP_ID)?;
        watch(queues.as_fd(), QUEUES_ID)?;
        watch(self.volume.as_fd(), VOLUME_ID)?;
        watch(event.as_fd(), CONTROL_ID)?;
        let id = self.id();
        // The kernel reads and writes the disk while it executes these, so others have to wait for them.
        thread::scope(|scope| {
            // Closed before the threads are waited for, whatever happens.
            let mut queues = queues;
            queues.ask().map_err(|error| Error::system("serve a ublk device", &error))?;
            let (starting, started) = mpsc::channel();
            let told = &event;
            let start = move || {
                let result = open_control().and_then(|mut control| {
                    control.start(id).map_err(|error| Error::system("start a ublk device", &error))
                });
                let _ = starting.send(result);
                told.signal();
            };
            spawn(scope, "ublk-start", start)?;
            let mut state = State::Starting { stop: false };
            let mut ready: Vec<Ready> = Vec::with_capacity(netvm_sys::epoll::EVENTS_MAX);
            let mut left = self.running.len();
            while left > 0 {
                let waited = self.epoll.wait(&mut ready, Some(self.volume.patience()));
                waited.map_err(|error| Error::system("wait for requests", &error))?;
                for ready in &ready {
                    match ready.id {
                        STOP_ID => {
                            stop.take();
                            state = state.stop();
                        }
                        CONTROL_ID => {
                            event.take();
                            if let Ok(result) = started.try_recv() {
                                result?;
                                notice(&self.volume, Notice::Started);
                                state = state.started();
                            }
                        }
                        _ => {}
                    }
                }
                if state == State::Stop {
                    spawn(scope, "ublk-stop", move || {
                        let _ = open_control().map(|mut control| control.stop(id));
                    })?;
                    state = State::Stopping;
                }
                // Also after a wait that ended without anything: the kernel interrupts it to bring requests.
                let mut idle = ready.is_empty();
                while let Some(heard) = queues.hear() {
                    idle = false;
                    match heard {
                        Heard::Request(request) => self.begin(request, &mut queues),
                        Heard::Ended => left -= 1,
                    }
                }
                let heard = idle || ready.iter().any(|ready| ready.id == VOLUME_ID);
                self.volume.advance(heard, &mut self.ended);
                let mut ended = std::mem::take(&mut self.ended);
                for Ended { token, result } in ended.drain(..) {
                    self.end(token as usize, result.is_ok(), &mut queues);
                }
                self.ended = ended;
                self.volume.push();
                queues.push_all().map_err(|error| Error::system("answer the kernel", &error))?;
                while let Some(event) = self.volume.event() {
                    notice(&self.volume, Notice::Volume(event));
                }
            }
            self.device.gone = state != State::Stopping;
            Ok(())
        })
    }

    fn place(&self, request: &Request) -> SharedSlice {
        let all = self.info.shape.request_bytes as usize;
        let wanted = usize::try_from(request.bytes).unwrap_or(usize::MAX);
        self.buffers.shared().sub(request.slot * all, wanted.min(all)).unwrap_or(SharedSlice::EMPTY)
    }

    fn begin(&mut self, request: Request, queues: &mut Queues) {
        let Request { slot, operation, offset, bytes } = request;
        let fits = bytes <= self.info.shape.request_bytes.into();
        let token = slot as u64;
        let begun = match operation {
            Operation::Read if fits => self.volume.read(token, offset, self.place(&request)),
            Operation::Write { .. } if fits => self.volume.write(token, offset, self.place(&request)),
            Operation::Read | Operation::Write { .. } => return queues.answer(slot, -EINVAL),
            Operation::Discard => self.volume.discard(token, offset, bytes),
            Operation::Flush => {
                self.volume.flush(token);
                Ok(())
            }
            Operation::Unknown => return queues.answer(slot, -EOPNOTSUPP),
        };
        match begun {
            Ok(()) => self.running[slot] = Some(Running { request, flushing: false }),
            // The kernel knows the size.
            Err(_) => queues.answer(slot, -EIO),
        }
    }

    /// A volume op has ended.
    fn end(&mut self, slot: usize, good: bool, queues: &mut Queues) {
        let Some(Running { request, flushing }) = self.running.get_mut(slot).and_then(Option::take) else {
            return;
        };
        if !good {
            return queues.answer(slot, -EIO);
        }
        match request.operation {
            Operation::Write { through: true } if !flushing => {
                self.running[slot] = Some(Running { request, flushing: true });
                self.volume.flush(slot as u64);
            }
            Operation::Read | Operation::Write { .. } => queues.answer(slot, request.bytes as i32),
            _ => queues.answer(slot, 0),
        }
    }
}

/// What the kernel has been told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Starting {
        /// Stop as soon as it has started.
        stop: bool,
    },
    Serving,
    /// To be stopped now.
    Stop,
    Stopping,
}

impl State {
    fn stop(self) -> Self {
        match self {
            Self::Starting { .. } => Self::Starting { stop: true },
            Self::Serving => Self::Stop,
            state => state,
        }
    }

    fn started(self) -> Self {
        match self {
            Self::Starting { stop: true } => Self::Stop,
            _ => Self::Serving,
        }
    }
}

fn spawn<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    name: &str,
    body: impl FnOnce() + Send + 'scope,
) -> Result<()> {
    let builder = thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES);
    let spawned = builder.spawn_scoped(scope, body);
    spawned.map(drop).map_err(|error| Error::system("start a thread", &error))
}

/// Takes the place of the dead server of a device that stays ([`UblkConfig::stays`]): all its requests fail, until somebody removes it.
#[derive(Debug)]
pub struct StandIn {
    id: u32,
    control: Control,
    buffers: Mapping,
}

impl StandIn {
    /// Gets what it will need then, when there may be no memory to be had.
    ///
    /// # Errors
    /// [`Error::System`] without ublk, rights or memory, or when there is no such device.
    pub fn new(id: u32) -> Result<Self> {
        let mut control = open_control()?;
        let info = control.info(id).map_err(|error| Error::system("ask for a ublk device", &error))?;
        // The kernel copies the bytes of writes, though nobody looks at them.
        let bytes = info.shape.slots() * info.shape.request_bytes as usize;
        let buffers = Mapping::anonymous(bytes);
        let buffers = buffers.map_err(|error| Error::system("reserve memory for buffers", &error))?;
        Ok(Self { id, control, buffers })
    }

    /// Serves errors until the device is removed. The server must be dead.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel does not hand the device over.
    pub fn run(mut self) -> Result<()> {
        let failed = |what: &'static str| move |error: std::io::Error| Error::system(what, &error);
        let info = self.control.info(self.id).map_err(failed("ask for a ublk device"))?;
        loop {
            match self.control.begin_recovery(self.id) {
                Ok(()) => break,
                // The kernel is still at the dead server's requests.
                Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => {
                    thread::sleep(std::time::Duration::from_millis(10));
                }
                Err(error) => return Err(failed("take over a ublk device")(error)),
            }
        }
        let mut queues = Queues::open(&info, self.buffers.shared()).map_err(failed("open a ublk device"))?;
        queues.ask().map_err(failed("serve a ublk device"))?;
        let (id, mut control) = (self.id, self.control);
        let epoll = Epoll::new().map_err(failed("make an epoll set"))?;
        let interest = Interest { readable: true, writable: false };
        epoll.add(queues.as_fd(), 0, interest).map_err(failed("watch a descriptor"))?;
        thread::scope(|scope| {
            spawn(scope, "ublk-recover", move || {
                let _ = control.end_recovery(id);
            })?;
            let (mut left, mut ready) = (info.shape.slots(), Vec::new());
            while left > 0 {
                epoll.wait(&mut ready, None).map_err(failed("wait for requests"))?;
                while let Some(heard) = queues.hear() {
                    match heard {
                        Heard::Request(request) => queues.answer(request.slot, -EIO),
                        Heard::Ended => left -= 1,
                    }
                }
                queues.push_all().map_err(failed("answer the kernel"))?;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{State, UblkConfig};

    #[test]
    fn a_disk_is_stopped_once_and_not_before_it_has_started() {
        let early = State::Starting { stop: false }.stop();
        assert_eq!(early.stop(), early);
        assert_eq!(early.started(), State::Stop);
        assert_eq!(State::Starting { stop: false }.started(), State::Serving);
        assert_eq!(State::Serving.stop(), State::Stop);
        assert_eq!(State::Stopping.stop(), State::Stopping);
    }

    #[test]
    fn what_is_too_much_is_refused_before_anything_is_made() {
        let plain = UblkConfig::default();
        plain.check().unwrap();
        UblkConfig { queues: 32, depth: 32, ..plain }.check().unwrap();
        for (queues, depth, request_bytes) in [
            (0, 64, 4096),
            (1, 0, 4096),
            (33, 1, 4096),
            (2, 1000, 4096),
            (1, 1, 0),
            (1, 1, 4097),
            (1, 1, 2 << 20),
        ] {
            UblkConfig { queues, depth, request_bytes, stays: false }.check().unwrap_err();
        }
    }
}
