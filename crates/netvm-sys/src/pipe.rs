//! Pages of a file on their way to a socket. The pipe refers to them: they are what they were when they were taken, whatever becomes of
//! the file meanwhile.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::memfd::Memfd;
use crate::shared::SharedSlice;

/// What it takes at once, where the kernel lets it.
const PIPE_BYTES: libc::c_int = 1 << 20;

/// A pipe that nobody else has.
#[derive(Debug)]
pub struct Pages {
    from: OwnedFd,
    to: OwnedFd,
    held: usize,
}

impl Pages {
    /// An empty one.
    ///
    /// # Errors
    /// EMFILE, ENFILE.
    pub fn new() -> io::Result<Self> {
        let mut fds: [RawFd; 2] = [-1; 2];
        // SAFETY: `fds` is a local that pipe2 fills.
        if unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: descriptors that the kernel just gave us.
        let [from, to] = fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        // It works with less as well.
        // SAFETY: plain system call on our own descriptor.
        unsafe { libc::fcntl(to.as_raw_fd(), libc::F_SETPIPE_SZ, PIPE_BYTES) };
        Ok(Self { from, to, held: 0 })
    }

    /// Bytes that have been taken and not passed on.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Takes pages with up to `bytes` bytes from `offset` of `file`, as many as it has room for. Returns how many bytes that are.
    ///
    /// # Errors
    /// Those of splice(2): EAGAIN when there is no room.
    pub fn take(&mut self, file: &Memfd, offset: u64, bytes: usize) -> io::Result<usize> {
        let mut at = offset as libc::loff_t;
        let (from, to) = (file.as_fd().as_raw_fd(), self.to.as_raw_fd());
        // SAFETY: the kernel reads and changes `at`, a local.
        let count = unsafe { libc::splice(from, &mut at, to, std::ptr::null_mut(), bytes, FLAGS) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        self.held += count;
        Ok(count)
    }

    /// Passes pages on to a socket, as far as it takes them now; `more` will follow. Returns how many bytes it took.
    ///
    /// # Errors
    /// Those of splice(2).
    pub fn send(&mut self, socket: &impl AsFd, more: bool) -> io::Result<usize> {
        let flags = FLAGS | if more { libc::SPLICE_F_MORE } else { 0 };
        let (from, to) = (self.from.as_raw_fd(), socket.as_fd().as_raw_fd());
        let null = std::ptr::null_mut();
        // SAFETY: no pointers.
        let count = unsafe { libc::splice(from, null, to, null, self.held, flags) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        self.held -= count;
        Ok(count)
    }

    /// Copies all that is left to the start of `local`, which has room for it.
    ///
    /// # Errors
    /// `InvalidInput` when it has not.
    pub fn copy_to(&mut self, local: SharedSlice) -> io::Result<()> {
        let mut at = 0;
        while self.held > 0 {
            let place = local.sub(at, self.held).ok_or(io::ErrorKind::InvalidInput)?;
            // SAFETY: the kernel writes into the shared memory of `place`, and tells when some of it is not mapped.
            let count = unsafe { libc::read(self.from.as_raw_fd(), place.as_ptr().cast(), place.len()) };
            match usize::try_from(count) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => (at, self.held) = (at + count, self.held - count),
                Err(_) => return Err(io::Error::last_os_error()),
            }
        }
        Ok(())
    }
}

const FLAGS: libc::c_uint = libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn pages_are_what_they_were_when_they_were_taken() {
        let file = Memfd::sealed(c"test", 64 << 10).unwrap();
        let memory = Mapping::anonymous(64 << 10).unwrap();
        let memory = memory.shared();
        memory.fill(7);
        file.write_at(0, &[memory]).unwrap();
        let (near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let mut pages = Pages::new().unwrap();
        let taken = pages.take(&file, 100, 50_000).unwrap();
        assert!(taken > 0 && pages.held() == taken);
        file.punch_hole(0, 64 << 10).unwrap();
        let sent = pages.send(&near, false).unwrap();
        memory.fill(0);
        assert!(pages.held() == 0 || pages.copy_to(memory.sub(0, 1).unwrap()).is_err());
        pages.copy_to(memory).unwrap();
        let mut bytes = vec![0; sent];
        far.read_exact(&mut bytes).unwrap();
        bytes.extend(memory.sub(0, taken - sent).unwrap().to_vec());
        assert_eq!((bytes, pages.held()), (vec![7; taken], 0));
        // Again, and nothing of it sent.
        assert_eq!(pages.take(&file, 0, 4096).unwrap(), 4096);
        memory.fill(1);
        pages.copy_to(memory).unwrap();
        assert_eq!(memory.sub(4095, 2).unwrap().to_vec(), [0, 1]);
    }
}
