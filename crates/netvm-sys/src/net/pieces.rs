//! Pieces of memory that one call sends or receives.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

use crate::shared::SharedSlice;

/// Most pieces in one call to the kernel: a reply of 256 pages and its neighbours.
pub const PIECES_MAX: usize = 320;

/// Longer copies than this may be made with `rep movsb`, which is 20 times slower when the destination lies a few bytes behind
/// the source within a page: measured 2.7 instead of 50 GB/s for 4096 bytes.
const COPY_BYTES_MAX: usize = 2048;

/// Pieces of memory to send, in order.
pub struct Outgoing<'a> {
    pub(super) pieces: Pieces,
    _borrowed: PhantomData<&'a [u8]>,
}

/// Places for received bytes, in order.
pub struct Incoming<'a> {
    pub(super) pieces: Pieces,
    _borrowed: PhantomData<&'a mut [u8]>,
}

pub(super) struct Pieces {
    list: [MaybeUninit<libc::iovec>; PIECES_MAX],
    len: usize,
    bytes: usize,
    /// Some are shared memory, which may fault.
    shared: bool,
    /// There is guarded memory among them.
    guarded: bool,
}

/// So much is rather copied than handed to the kernel in pieces: taking over a list of them costs it more.
pub(super) const GATHERED_BYTES_MAX: usize = 4 << 10;

/// The same with shared memory among it, which is seldom in the cache of who sends.
const GATHERED_SHARED_BYTES_MAX: usize = 512;

impl Pieces {
    /// Whether it is rather copied than handed to the kernel piece by piece.
    pub(super) fn is_short(&self) -> bool {
        let max = if self.shared { GATHERED_SHARED_BYTES_MAX } else { GATHERED_BYTES_MAX };
        self.bytes <= max && !self.guarded
    }

    fn push(&mut self, start: *mut u8, bytes: usize) -> bool {
        if bytes == 0 {
            return true;
        }
        let Some(place) = self.list.get_mut(self.len) else { return false };
        place.write(libc::iovec { iov_base: start.cast(), iov_len: bytes });
        self.len += 1;
        self.bytes += bytes;
        true
    }

    fn truncate(&mut self, bytes: usize) {
        let mut left = bytes;
        for index in 0..self.len {
            // SAFETY: the first `len` pieces are initialised.
            let piece = unsafe { self.list[index].assume_init_mut() };
            if piece.iov_len >= left {
                piece.iov_len = left;
                self.len = index + usize::from(left > 0);
                self.bytes = bytes;
                return;
            }
            left -= piece.iov_len;
        }
    }

    /// Copies between `bytes` and the pieces from byte `skip` on; returns how many bytes it copied.
    ///
    /// # Errors
    /// EFAULT, as the kernel says, for guarded memory that is gone.
    fn copy(
        &self,
        skip: usize,
        mut count: usize,
        mut each: impl FnMut(SharedSlice, usize) -> Option<()>,
    ) -> io::Result<usize> {
        let (mut skip, mut done) = (skip, 0);
        for piece in &self.list[..self.len] {
            // SAFETY: the first `len` pieces are initialised; what they point at lives as long as the list (borrowed bytes) or
            // by SharedSlice's contract.
            let piece = unsafe {
                let piece = piece.assume_init();
                if self.guarded {
                    SharedSlice::of_file(piece.iov_base.cast(), piece.iov_len)
                } else {
                    SharedSlice::from_raw(piece.iov_base.cast(), piece.iov_len)
                }
            };
            if skip >= piece.len() {
                skip -= piece.len();
                continue;
            }
            while skip < piece.len() && count > 0 {
                let take = (piece.len() - skip).min(count).min(COPY_BYTES_MAX);
                let Some(part) = piece.sub(skip, take) else { break };
                each(part, done).ok_or_else(|| io::Error::from_raw_os_error(libc::EFAULT))?;
                (skip, done, count) = (skip + take, done + take, count - take);
            }
            skip = 0;
            if count == 0 {
                break;
            }
        }
        Ok(done)
    }

    /// Copies the bytes of all pieces, none of them guarded, to the start of `bytes`, where they fit.
    pub(super) fn gather_into<'b>(&self, bytes: &'b mut [MaybeUninit<u8>]) -> &'b [u8] {
        let mut at = 0;
        for piece in &self.list[..self.len] {
            // SAFETY: the first `len` pieces are initialised.
            let piece = unsafe { piece.assume_init() };
            let place = &mut bytes[at..at + piece.iov_len];
            // SAFETY: borrowed bytes, or shared memory that is not guarded, so mapped (SharedSlice's contract), of which the place has as
            // many; others may write the latter, the place is only ours, so the two cannot overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    piece.iov_base.cast(),
                    place.as_mut_ptr().cast::<u8>(),
                    place.len(),
                );
            }
            at += piece.iov_len;
        }
        // SAFETY: the first `at` bytes have been written.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), at) }
    }

    /// The only piece.
    pub(super) fn single(&self) -> Option<libc::iovec> {
        // SAFETY: the first `len` pieces are initialised.
        (self.len == 1).then(|| unsafe { self.list[0].assume_init() })
    }

    pub(super) fn message(&self) -> libc::msghdr {
        // SAFETY: all zeros is a valid message header; the pieces are filled in below.
        let mut message = unsafe { std::mem::zeroed::<libc::msghdr>() };
        message.msg_iov = self.list.as_ptr().cast_mut().cast();
        message.msg_iovlen = self.len as _;
        message
    }
}

macro_rules! pieces {
    ($name:ident, $borrow:ty, $start:ident) => {
        impl<'a> $name<'a> {
            /// No pieces yet.
            #[expect(
                clippy::new_without_default,
                reason = "it is large and meant to live on the stack of one call"
            )]
            pub fn new() -> Self {
                let list = [const { MaybeUninit::uninit() }; PIECES_MAX];
                let pieces = Pieces { list, len: 0, bytes: 0, shared: false, guarded: false };
                Self { pieces, _borrowed: PhantomData }
            }

            /// Appends bytes of ours; false (and nothing appended) when the list is full.
            pub fn bytes(&mut self, bytes: $borrow) -> bool {
                let len = bytes.len();
                self.pieces.push(bytes.$start().cast_mut(), len)
            }

            /// Appends shared memory; false (and nothing appended) when the list is full.
            pub fn shared(&mut self, slice: SharedSlice) -> bool {
                self.pieces.shared = true;
                self.pieces.guarded |= slice.is_guarded();
                self.pieces.push(slice.as_ptr(), slice.len())
            }

            /// Bytes in all pieces.
            pub fn total_bytes(&self) -> usize {
                self.pieces.bytes
            }

            /// How many more pieces fit.
            pub fn room(&self) -> usize {
                PIECES_MAX - self.pieces.len
            }

            /// Whether there is nothing in it.
            pub fn is_empty(&self) -> bool {
                self.pieces.bytes == 0
            }

            /// Keeps only the first `bytes` bytes.
            pub fn truncate(&mut self, bytes: usize) {
                self.pieces.truncate(bytes);
            }
        }
    };
}

trait AsStart {
    fn start_of(&self) -> *const u8;
}
impl AsStart for &[u8] {
    fn start_of(&self) -> *const u8 {
        self.as_ptr()
    }
}
trait AsMutStart {
    fn start_mut(self) -> *const u8;
}
impl AsMutStart for &mut [u8] {
    fn start_mut(self) -> *const u8 {
        self.as_mut_ptr()
    }
}
pieces!(Outgoing, &'a [u8], start_of);
pieces!(Incoming, &'a mut [u8], start_mut);

impl Outgoing<'_> {
    /// Copies the bytes to send, from byte `skip` on, into `bytes`; returns how many there were.
    ///
    /// # Errors
    /// EFAULT when memory of a truncated file is among them.
    pub fn gather(&self, skip: usize, bytes: &mut [u8]) -> io::Result<usize> {
        let count = bytes.len();
        self.pieces.copy(skip, count, |part, at| part.read_into(0, &mut bytes[at..at + part.len()]))
    }
}

impl Incoming<'_> {
    /// Puts `bytes` into the places, from byte `skip` on; returns how many fitted.
    ///
    /// # Errors
    /// EFAULT when memory of a truncated file is among them; then nothing counts as put.
    pub fn scatter(&mut self, skip: usize, bytes: &[u8]) -> io::Result<usize> {
        self.pieces.copy(skip, bytes.len(), |part, at| part.write_from(0, &bytes[at..at + part.len()]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel tells what copying them would not survive.
    #[test]
    fn only_short_pieces_of_memory_that_stays_are_copied() {
        let memory = crate::mapping::Mapping::anonymous(8192).unwrap();
        let (shared, long) = (memory.shared(), [0; GATHERED_BYTES_MAX]);
        let is_short = |bytes, slice: Option<SharedSlice>| {
            let mut pieces = Outgoing::new();
            assert!(pieces.bytes(&long[..bytes]) && slice.is_none_or(|slice| pieces.shared(slice)));
            pieces.pieces.is_short()
        };
        assert!(is_short(GATHERED_BYTES_MAX, None));
        assert!(is_short(12, shared.sub(0, 500)) && !is_short(12, shared.sub(0, 501)));
        // SAFETY: the memory stays mapped; to be guarded only forbids.
        let guarded = unsafe { SharedSlice::of_file(shared.as_ptr(), 8) };
        assert!(!is_short(1, Some(guarded)));
    }

    #[test]
    fn lists_truncate_gather_and_scatter() {
        let mut pieces = Outgoing::new();
        pieces.bytes(b"abc");
        pieces.bytes(b"");
        pieces.bytes(b"defg");
        let mut out = [0; 5];
        assert_eq!((pieces.gather(1, &mut out).unwrap(), &out), (5, b"bcdef"));
        pieces.truncate(3);
        assert_eq!((pieces.total_bytes(), pieces.gather(2, &mut out).unwrap()), (3, 1));
        let (mut one, mut two) = ([0; 2], [0; 3]);
        let mut places = Incoming::new();
        places.bytes(&mut one);
        places.bytes(&mut two);
        assert_eq!(places.scatter(1, b"xyzzzz").unwrap(), 4);
        assert_eq!((one, two), ([0, b'x'], *b"yzz"));
    }
}
