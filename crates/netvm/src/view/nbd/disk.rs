//! A volume as a network block device of this machine's own kernel, which asks through a pair of unix sockets. docs/design/swap.md
//! tells what for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::thread;

use netvm_sys::nbd::{NbdDevice, NbdSocket, disk};
use netvm_sys::shared::SharedSlice;

use super::super::places::{Heard, IN_FLIGHT_MAX, PlacesServer, REQUEST_BYTES_MAX, Source, Work};
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
        Ok(Self { places: PlacesServer::new(volume, Socket::new(socket))?, device })
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
            places.source.socket.end();
            let ran = runs.join().unwrap_or(Ok(()));
            served.and(ran.map_err(|error| Error::system("run a network block device", &error)))
        })
    }
}

/// Several requests without data, which are received in one call; of one with data what comes with it is copied, so it is not many.
const STAGE_BYTES: usize = 16 * REQUEST_BYTES;

/// The kernel sends data page by page. Of so much all but the last page is waited for in one call; behind that page the next requests may be.
const LONG_BYTES: usize = 8 << 10;
const LAST_BYTES: usize = 4 << 10;

#[derive(Debug)]
struct Socket {
    socket: NbdSocket,
    /// Received, and not looked at from `from` to `to`.
    stage: [u8; STAGE_BYTES],
    from: usize,
    to: usize,
    /// What was received last was all that there was.
    drained: bool,
    answers: Vec<(Head, SharedSlice)>,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Socket {
    fn new(socket: NbdSocket) -> Self {
        let answers = Vec::with_capacity(IN_FLIGHT_MAX);
        Self { socket, stage: [0; STAGE_BYTES], from: 0, to: 0, drained: false, answers }
    }

    /// The head of the next request; `None` when there is none now.
    fn head(&mut self) -> io::Result<Option<[u8; REQUEST_BYTES]>> {
        loop {
            let staged = &self.stage[self.from..self.to];
            if let Some(head) = staged.first_chunk::<REQUEST_BYTES>() {
                self.from += REQUEST_BYTES;
                return Ok(Some(*head));
            }
            let begun = !staged.is_empty();
            // Whoever waits is told when there is more.
            if std::mem::take(&mut self.drained) && !begun {
                return Ok(None);
            }
            self.stage.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
            match self.fill(SharedSlice::EMPTY, begun) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Receives into `first` and the stage; how many bytes went to `first`.
    fn fill(&mut self, first: SharedSlice, waits: bool) -> io::Result<usize> {
        let room = first.len() + STAGE_BYTES - self.to;
        let got = self.socket.receive(first, &mut self.stage[self.to..], waits)?;
        self.drained = got < room;
        let there = got.min(first.len());
        self.to += got - there;
        Ok(there)
    }

    /// Receives the data of a request.
    fn data(&mut self, place: SharedSlice) -> io::Result<()> {
        let mut got = place.len().min(self.to - self.from);
        let _ = place.write_from(0, &self.stage[self.from..self.from + got]);
        self.from += got;
        while got < place.len() {
            // All that was staged is taken.
            (self.from, self.to) = (0, 0);
            let missing = place.len() - got;
            if missing >= LONG_BYTES {
                let most = missing - LAST_BYTES;
                self.socket.receive_all(place.sub(got, most).unwrap_or(SharedSlice::EMPTY))?;
                got += most;
                continue;
            }
            got += self.fill(place.sub(got, place.len() - got).unwrap_or(SharedSlice::EMPTY), true)?;
        }
        Ok(())
    }

    /// Takes bytes that are too many for `place`.
    fn skip(&mut self, mut bytes: usize, place: SharedSlice) -> io::Result<()> {
        while bytes > 0 {
            let part = bytes.min(place.len());
            self.data(place.sub(0, part).unwrap_or(SharedSlice::EMPTY))?;
            bytes -= part;
        }
        Ok(())
    }

    fn put(&mut self, cookie: u64, error: u32, data: SharedSlice) {
        self.answers.push((Head::simple(cookie, error), data));
        if self.answers.len() == IN_FLIGHT_MAX {
            self.push();
        }
    }

    fn refuse(&mut self, request: Request, error: u32) -> Heard<u64> {
        self.put(request.cookie, error, SharedSlice::EMPTY);
        Heard::Done
    }
}

impl Source for Socket {
    /// Its cookie.
    type Request = u64;

    fn hear(&mut self, place: SharedSlice, _: u64) -> Heard<u64> {
        let head = match self.head() {
            Ok(Some(head)) => head,
            Ok(None) => return Heard::None,
            Err(_) => return Heard::End,
        };
        let Some(request) = Request::decode(&head) else { return Heard::End };
        let (offset, length) = (request.offset, request.bytes as usize);
        let work = match request.command {
            command::READ if length <= REQUEST_BYTES_MAX => Work::Read { offset, bytes: length },
            command::WRITE if length <= REQUEST_BYTES_MAX => {
                if self.data(place.sub(0, length).unwrap_or(SharedSlice::EMPTY)).is_err() {
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
        match result {
            Ok(data) => self.put(cookie, 0, data),
            Err(error) => self.put(cookie, error as u32, SharedSlice::EMPTY),
        }
    }

    fn push(&mut self) {
        // At the end of the connection nobody waits for them.
        let _ = self.socket.write(self.answers.iter().map(|(head, data)| (head.bytes(), *data)));
        self.answers.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netvm_sys::epoll::{Epoll, Interest};
    use netvm_sys::mapping::Mapping;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn request(command: u16, cookie: u64, bytes: usize) -> Vec<u8> {
        let head =
            [&0x2560_9513_u32.to_be_bytes()[..], &[0; 2], &command.to_be_bytes(), &cookie.to_be_bytes()];
        let place = [&(cookie * 4096).to_be_bytes()[..], &(bytes as u32).to_be_bytes()];
        let data = if command == command::WRITE { vec![cookie as u8; bytes] } else { Vec::new() };
        [head.concat(), place.concat(), data].concat()
    }

    fn socket() -> (UnixStream, Socket) {
        let (kernel, ours) = UnixStream::pair().unwrap();
        (kernel, Socket::new(NbdSocket::from(std::os::fd::OwnedFd::from(ours))))
    }

    #[test]
    fn requests_are_heard_however_they_come_in_pieces() {
        let mut all = Vec::new();
        let mut wanted = Vec::new();
        for cookie in 0..60_u64 {
            let (command, bytes) = match cookie % 5 {
                0 => (command::WRITE, 100),
                1 => (command::WRITE, 8192 + 4096 * (cookie as usize % 4)),
                2 => (command::FLUSH, 0),
                _ => (command::READ, 4096),
            };
            let offset = cookie * 4096;
            wanted.push((
                cookie,
                match command {
                    command::WRITE => Work::Write { offset, bytes, through: false },
                    command::FLUSH => Work::Flush,
                    _ => Work::Read { offset, bytes },
                },
            ));
            all.extend(request(command, cookie, bytes));
        }
        // One that is too long is passed over, and answered.
        all.extend(request(command::WRITE, 60, REQUEST_BYTES_MAX + 1));
        all.extend(request(command::READ, 61, 512));
        wanted.push((61, Work::Read { offset: 61 * 4096, bytes: 512 }));
        let memory = Mapping::anonymous(REQUEST_BYTES_MAX).unwrap();
        for piece in [1, 27, 28, 29, 449, 4096, all.len()] {
            let (mut kernel, mut socket) = socket();
            let epoll = Epoll::new().unwrap();
            epoll.add(socket.as_fd(), 0, Interest { readable: true, writable: false }).unwrap();
            let (mut heard, mut ready) = (Vec::new(), Vec::new());
            std::thread::scope(|scope| {
                let mut kernel = kernel.try_clone().unwrap();
                let all = &all;
                scope.spawn(move || all.chunks(piece).for_each(|piece| kernel.write_all(piece).unwrap()));
                while heard.len() < wanted.len() {
                    match socket.hear(memory.shared(), 1 << 30) {
                        Heard::Work(cookie, work) => {
                            if let Work::Write { bytes, .. } = work {
                                let got = memory.shared().sub(0, bytes).unwrap().to_vec();
                                assert!(got.iter().all(|&byte| byte == cookie as u8), "{piece}: {cookie}");
                            }
                            heard.push((cookie, work));
                        }
                        Heard::Done => {}
                        Heard::None => epoll.wait(&mut ready, None).unwrap(),
                        Heard::End => panic!("{piece}: it has not ended"),
                    }
                }
            });
            assert_eq!(heard, wanted, "in pieces of {piece}");
            socket.push();
            let mut answer = [0; 16];
            kernel.read_exact(&mut answer).unwrap();
            assert_eq!(answer, Head::simple(60, errno::EINVAL).bytes());
            drop(kernel);
            assert!(matches!(socket.hear(memory.shared(), 1 << 30), Heard::None | Heard::End));
            assert!(matches!(socket.hear(memory.shared(), 1 << 30), Heard::End));
        }
    }

    #[test]
    fn answers_wait_until_all_are_there() {
        let (mut kernel, mut socket) = socket();
        let memory = Mapping::anonymous(4096).unwrap();
        memory.shared().fill(7);
        let data = memory.shared().sub(0, 3).unwrap();
        socket.answer(1, Work::Flush, Ok(data));
        socket.answer(2, Work::Flush, Err(5));
        kernel.set_nonblocking(true).unwrap();
        let mut got = [0; 64];
        assert_eq!(kernel.read(&mut got).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        socket.push();
        let wanted = [Head::simple(1, 0).bytes(), &[7; 3], Head::simple(2, 5).bytes()].concat();
        let count = kernel.read(&mut got).unwrap();
        assert_eq!(got[..count], wanted);
        socket.push();
        assert_eq!(kernel.read(&mut got).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        // More than there are places: they go at once, nothing is allocated.
        (0..IN_FLIGHT_MAX as u64).for_each(|cookie| socket.answer(cookie, Work::Flush, Err(5)));
        assert!(socket.answers.is_empty() && socket.answers.capacity() == IN_FLIGHT_MAX);
        assert_eq!(kernel.read(&mut got).unwrap(), got.len());
    }
}
