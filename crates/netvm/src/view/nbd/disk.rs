//! A volume as a network block device of this machine's own kernel, which asks through a pair of unix sockets. docs/design/swap.md
//! tells what for.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::thread;

use netvm_sys::nbd::{NbdDevice, NbdSocket, disk};
use netvm_sys::shared::SharedSlice;

use super::super::places::{Heard, PlacesServer, REQUEST_BYTES_MAX, Source, Work};
use super::proto::{Head, REQUEST_BYTES, Request, command, errno, flag, transmission};
use crate::error::{Error, Result};
use crate::lender::StopFlag;
use crate::volume::{Event, Volume};

/// Of the thread that only runs the device.
const STACK_BYTES: usize = 128 << 10;

/// A volume as /dev/nbdN. After [`NbdDisk::new`] it allocates nothing to execute a request.
#[derive(Debug)]
pub struct NbdDisk {
    places: PlacesServer<Socket>,
    device: NbdDevice,
}

impl NbdDisk {
    /// Takes a free device for a volume that is not used yet, and what executing requests will need. Requests wait for
    /// [`NbdDisk::run`].
    ///
    /// # Errors
    /// [`Error::System`] without nbd, a free device, rights or memory; [`Error::Other`] when the size is not one of whole blocks; the
    /// error of a lender that is lost already.
    pub fn new(volume: Volume) -> Result<Self> {
        use transmission as can;
        let flags = can::HAS_FLAGS | can::SEND_FLUSH | can::SEND_FUA | can::SEND_TRIM;
        let (device, socket) = NbdDevice::take(volume.size_bytes(), flags, REQUEST_BYTES_MAX)
            .map_err(|error| Error::system("take a network block device", &error))?;
        Ok(Self { places: PlacesServer::new(volume, Socket(socket))?, device })
    }

    /// Number of the device.
    pub fn number(&self) -> u32 {
        self.device.number()
    }

    /// Where the disk is.
    pub fn disk(&self) -> PathBuf {
        disk(self.device.number())
    }

    /// The volume behind it.
    pub fn volume(&self) -> &Volume {
        self.places.volume()
    }

    /// Serves until the device is disconnected, or the flag is raised. `notice` is called once at the beginning, and then whenever
    /// something happened to the volume.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel does not run the device, or does not let it wait.
    pub fn run(&mut self, stop: &StopFlag, notice: impl FnMut(&Volume, Option<Event>)) -> Result<()> {
        let Self { places, device } = self;
        thread::scope(|scope| {
            let builder = thread::Builder::new().name("nbd-device".to_owned()).stack_size(STACK_BYTES);
            let runs = builder.spawn_scoped(scope, || {
                let result = device.run();
                // Whoever waits for requests is to know.
                stop.stop();
                result
            });
            let runs = runs.map_err(|error| Error::system("start a thread", &error))?;
            let served = places.run(stop, notice);
            device.disconnect();
            // The kernel waits for more answers as long as it can.
            places.source.0.end();
            let ran = runs.join().unwrap_or(Ok(()));
            served.and(ran.map_err(|error| Error::system("run a network block device", &error)))
        })
    }
}

#[derive(Debug)]
struct Socket(NbdSocket);

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Socket {
    fn refuse(&self, request: Request, error: u32) -> Heard<u64> {
        let sent = self.0.write(Head::simple(request.cookie, error).bytes(), SharedSlice::EMPTY);
        if sent.is_ok() { Heard::Done } else { Heard::End }
    }

    /// Takes bytes that are too many for `place`.
    fn skip(&self, mut bytes: usize, place: SharedSlice) -> std::io::Result<()> {
        while bytes > 0 {
            let part = bytes.min(place.len());
            self.0.read(place.sub(0, part).unwrap_or(SharedSlice::EMPTY))?;
            bytes -= part;
        }
        Ok(())
    }
}

impl Source for Socket {
    /// Its cookie.
    type Request = u64;

    fn hear(&mut self, place: SharedSlice, _: u64) -> Heard<u64> {
        let mut head = [0; REQUEST_BYTES];
        match self.0.read_head(&mut head) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Heard::None,
            Err(_) => return Heard::End,
        }
        let Some(request) = Request::decode(&head) else { return Heard::End };
        let (offset, length) = (request.offset, request.bytes as usize);
        let work = match request.command {
            command::READ if length <= REQUEST_BYTES_MAX => Work::Read { offset, bytes: length },
            command::WRITE if length <= REQUEST_BYTES_MAX => {
                if self.0.read(place.sub(0, length).unwrap_or(SharedSlice::EMPTY)).is_err() {
                    return Heard::End;
                }
                Work::Write { offset, bytes: length, through: request.flags & flag::FUA != 0 }
            }
            command::WRITE => {
                return match self.skip(length, place) {
                    Ok(()) => self.refuse(request, errno::EINVAL),
                    Err(_) => Heard::End,
                };
            }
            command::TRIM | command::WRITE_ZEROES => Work::Discard { offset, bytes: length as u64 },
            command::FLUSH => Work::Flush,
            command::DISC => return Heard::End,
            _ => return self.refuse(request, errno::EINVAL),
        };
        Heard::Work(request.cookie, work)
    }

    fn answer(&mut self, cookie: u64, _: Work, result: std::result::Result<SharedSlice, i32>) {
        let (error, data) = match result {
            Ok(data) => (0, data),
            Err(error) => (error as u32, SharedSlice::EMPTY),
        };
        // At the end of the connection nobody waits for it.
        let _ = self.0.write(Head::simple(cookie, error).bytes(), data);
    }
}
