//! Reads and writes of a file past the page cache, several at a time, by an io_uring.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, squeue, types};

/// What direct I/O wants of addresses, offsets and lengths, in bytes.
pub const ALIGN: usize = 4096;
/// Most operations at a time.
const PLACES_MAX: usize = 4096;

/// Bytes at an address that direct I/O takes.
#[derive(Debug)]
pub struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    /// So many zeros.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + ALIGN];
        let start = bytes.as_ptr().align_offset(ALIGN);
        Self { bytes, start, len }
    }

    /// All of them.
    pub fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

#[derive(Debug)]
struct Place {
    buffer: Aligned,
    busy: bool,
}

/// Places for operations on a file, each with a buffer that one operation at a time reads into or writes from.
pub struct Queue {
    ring: IoUring,
    file: File,
    places: Vec<Place>,
    under_way: usize,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue")
            .field("file", &self.file)
            .field("under_way", &self.under_way)
            .finish_non_exhaustive()
    }
}

impl Queue {
    /// So many places of `bytes` bytes each.
    ///
    /// # Errors
    /// ENOSYS or EPERM where io_uring is not there or switched off; `InvalidInput` for no places, or more than 4096.
    pub fn new(file: File, places: usize, bytes: usize) -> io::Result<Self> {
        if places == 0 || places > PLACES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let ring = IoUring::new(places.next_power_of_two() as u32)?;
        let place = || Place { buffer: Aligned::new(bytes), busy: false };
        Ok(Self { ring, file, places: std::iter::repeat_with(place).take(places).collect(), under_way: 0 })
    }

    /// The buffer of a place; none while an operation uses it.
    pub fn buffer(&mut self, place: usize) -> Option<&mut [u8]> {
        self.places.get_mut(place).filter(|place| !place.busy).map(|place| place.buffer.get())
    }

    /// Begins to read from `offset`, at the latest when something is waited for.
    ///
    /// # Errors
    /// `InvalidInput` for a place that is not free.
    pub fn read(&mut self, place: usize, offset: u64) -> io::Result<()> {
        self.begin(place, |fd, bytes| {
            opcode::Read::new(fd, bytes.as_mut_ptr(), bytes.len() as u32).offset(offset).build()
        })
    }

    /// The same for writing.
    ///
    /// # Errors
    /// As of [`Queue::read`].
    pub fn write(&mut self, place: usize, offset: u64) -> io::Result<()> {
        self.begin(place, |fd, bytes| {
            opcode::Write::new(fd, bytes.as_ptr(), bytes.len() as u32).offset(offset).build()
        })
    }

    fn begin(
        &mut self,
        place: usize,
        make: impl FnOnce(types::Fd, &mut [u8]) -> squeue::Entry,
    ) -> io::Result<()> {
        let fd = types::Fd(self.file.as_raw_fd());
        let of = self.places.get_mut(place).filter(|place| !place.busy);
        let of = of.ok_or(io::ErrorKind::InvalidInput)?;
        let entry = make(fd, of.buffer.get()).user_data(place as u64);
        // SAFETY: file and buffer are this queue's; while the place is busy nobody gets at its buffer, and the queue ends only when
        // nothing is under way (`drop`).
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| io::Error::from(io::ErrorKind::WouldBlock))?;
        of.busy = true;
        self.under_way += 1;
        Ok(())
    }

    /// An operation that has ended: its place, and how many bytes were moved. With `wait`, everything that was begun is handed over first, and
    /// one is waited for; `None` when there is none.
    ///
    /// # Errors
    /// Of io_uring_enter(2).
    pub fn ended(&mut self, wait: bool) -> io::Result<Option<(usize, io::Result<usize>)>> {
        loop {
            if let Some(done) = self.ring.completion().next() {
                let place = done.user_data() as usize;
                if let Some(place) = self.places.get_mut(place) {
                    place.busy = false;
                }
                self.under_way -= 1;
                let result = usize::try_from(done.result());
                return Ok(Some((place, result.map_err(|_| io::Error::from_raw_os_error(-done.result())))));
            }
            if !wait || self.under_way == 0 {
                return Ok(None);
            }
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                handed => drop(handed?),
            }
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        while self.under_way > 0 {
            if self.ended(true).is_err() {
                // The kernel may still use them.
                std::mem::forget(std::mem::take(&mut self.places));
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn buffers_are_aligned() {
        let mut buffer = Aligned::new(8192);
        assert!(buffer.get().as_ptr().addr().is_multiple_of(ALIGN) && buffer.get().len() == 8192);
    }

    #[test]
    fn each_place_has_one_operation_at_a_time() {
        let file = crate::memfd::Memfd::sealed(c"netvm-direct", 64 << 10).unwrap();
        let file = File::from(std::os::fd::AsFd::as_fd(&file).try_clone_to_owned().unwrap());
        let mut queue = match Queue::new(file.try_clone().unwrap(), 3, ALIGN) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                println!("skipped (no io_uring here: {error})");
                return;
            }
            queue => queue.unwrap(),
        };
        assert!(queue.ended(true).unwrap().is_none());
        for place in 0..3 {
            queue.buffer(place).unwrap().fill(place as u8 + 1);
            queue.write(place, place as u64 * 8192).unwrap();
            assert!(queue.buffer(place).is_none());
            assert!(queue.read(place, 0).is_err());
        }
        let mut ended = [false; 3];
        while let Some((place, bytes)) = queue.ended(true).unwrap() {
            assert_eq!(bytes.unwrap(), ALIGN);
            assert!(!std::mem::replace(&mut ended[place], true));
        }
        assert_eq!(ended, [true; 3]);
        let mut byte = [0];
        for place in 0..3 {
            file.read_exact_at(&mut byte, place as u64 * 8192 + 4095).unwrap();
            assert_eq!(byte, [place as u8 + 1]);
        }
        queue.read(1, 16384).unwrap();
        let (place, bytes) = queue.ended(true).unwrap().unwrap();
        assert_eq!((place, bytes.unwrap(), queue.buffer(1).unwrap()[0]), (1, ALIGN, 3));
        // Beyond the end, and what is under way at its end.
        queue.read(0, 1 << 20).unwrap();
        assert_eq!(queue.ended(true).unwrap().unwrap().1.unwrap(), 0);
        queue.read(2, 0).unwrap();
        drop(queue);
        assert!(Queue::new(file, 0, 1).is_err());
    }
}
