//! The server: what of FUSE a lone file needs, over [`PlacesServer`].

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use netvm_sys::fuse::FuseDevice;
use netvm_sys::shared::SharedSlice;

use super::super::places::{Heard, IN_FLIGHT_MAX, PlacesServer, REQUEST_BYTES_MAX, Source, Work};
use super::proto::{Answer, Ask, HEAD_BYTES, Request, errno};
use crate::error::{Error, Result};
use crate::lender::StopFlag;
use crate::volume::{Event, Volume};

/// A volume as a file. After [`FileServer::new`] it allocates nothing to execute a request.
#[derive(Debug)]
pub struct FileServer {
    places: PlacesServer<Fuse>,
}

impl FileServer {
    /// Makes the file of a volume that is not used yet, and what executing requests will need.
    ///
    /// # Errors
    /// [`Error::System`] without FUSE or memory; [`Error::Other`] when the size is not one of whole blocks; the error of a lender that
    /// is lost already.
    pub fn new(volume: Volume) -> Result<Self> {
        let device = FuseDevice::open().map_err(|error| Error::system("open /dev/fuse", &error))?;
        Ok(Self { places: PlacesServer::new(volume, Fuse(device))? })
    }

    /// Puts it over the file `at`. Only root can open it; requests wait for [`FileServer::run`].
    ///
    /// # Errors
    /// [`Error::System`] without the right to mount.
    pub fn mount(&self, at: &Path) -> Result<()> {
        self.places.source.0.mount_file(at).map_err(|error| Error::system("mount a FUSE file", &error))
    }

    /// The volume behind it.
    pub fn volume(&self) -> &Volume {
        self.places.volume()
    }

    /// Serves until it is unmounted and nobody has it open, or stopped. `notice` is called once at the beginning, and then whenever
    /// something happened to the volume.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel does not let it wait.
    pub fn run(&mut self, stop: &StopFlag, notice: impl FnMut(&Volume, Option<Event>)) -> Result<()> {
        self.places.run(stop, notice)
    }
}

#[derive(Debug)]
struct Fuse(FuseDevice);

impl AsFd for Fuse {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Fuse {
    fn send(&self, mut answer: Answer, data: SharedSlice) {
        // It fails only when nobody waits for it any more.
        let _ = self.0.write(answer.bytes(data.len()), data);
    }
}

impl Source for Fuse {
    /// Its number.
    type Request = u64;

    fn hear(&mut self, place: SharedSlice, size: u64) -> Heard<u64> {
        let mut head = [0; HEAD_BYTES];
        let length = match self.0.read(&mut head, place) {
            Ok(length) => length,
            Err(error) => {
                return match error.raw_os_error() {
                    Some(libc::EAGAIN) => Heard::None,
                    // Taken back while it was read, or a signal.
                    Some(libc::ENOENT | libc::EINTR) => Heard::Done,
                    // ENODEV; whatever else it may be, it will not end.
                    _ => Heard::End,
                };
            }
        };
        let Some(Request { unique, ask }) = Request::parse(&head, length) else { return Heard::Done };
        let work = |work| Heard::Work(unique, work);
        let answer = match ask {
            Ask::Silent => return Heard::Done,
            Ask::Nothing => Answer::done(unique),
            Ask::Refuse(error) => Answer::error(unique, error),
            Ask::Init { minor, .. } if minor < 28 => Answer::error(unique, errno::EINVAL),
            Ask::Init { readahead, flags, .. } => {
                Answer::init(unique, readahead, flags, REQUEST_BYTES_MAX as u32, IN_FLIGHT_MAX as u16)
            }
            Ask::Attributes => Answer::attributes(unique, size),
            Ask::Open => Answer::open(unique),
            Ask::Statistics => Answer::statistics(unique, size),
            Ask::Read { bytes, .. } | Ask::Write { bytes, .. } if bytes as usize > REQUEST_BYTES_MAX => {
                Answer::error(unique, errno::EINVAL)
            }
            Ask::Read { offset, bytes } => {
                // Nothing is behind the end.
                match u64::from(bytes).min(size.saturating_sub(offset)) as usize {
                    0 => Answer::done(unique),
                    bytes => return work(Work::Read { offset, bytes }),
                }
            }
            Ask::Write { offset, bytes } => {
                return work(Work::Write { offset, bytes: bytes as usize, through: false });
            }
            Ask::Discard { offset, bytes } => return work(Work::Discard { offset, bytes }),
            Ask::Sync => return work(Work::Flush),
        };
        self.send(answer, SharedSlice::EMPTY);
        Heard::Done
    }

    fn answer(&mut self, unique: u64, work: Work, result: std::result::Result<SharedSlice, i32>) {
        match (result, work) {
            (Err(error), _) => self.send(Answer::error(unique, error), SharedSlice::EMPTY),
            (Ok(_), Work::Write { bytes, .. }) => {
                self.send(Answer::written(unique, bytes as u32), SharedSlice::EMPTY);
            }
            (Ok(data), _) => self.send(Answer::done(unique), data),
        }
    }
}
