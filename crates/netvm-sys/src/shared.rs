//! Memory that somebody else may change at any time.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::guarded;

/// Copies of more than this may be made with `rep movsb`, which crawls when the destination lies a few bytes behind the source within
/// a page: measured 1 to 3 instead of 15 to 50 GB/s.
const QUICK_BYTES: usize = 2048;

/// As [`std::ptr::copy`], for ranges that may lie so.
///
/// # Safety
/// As [`std::ptr::copy`].
#[inline]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    let behind = (to as usize).wrapping_sub(from as usize);
    // Far enough from each other that pieces may be copied in order, wherever they are.
    if len <= QUICK_BYTES || !(1..64).contains(&(behind % 4096)) || behind.min(behind.wrapping_neg()) < len {
        // SAFETY: the caller's.
        return unsafe { std::ptr::copy(from, to, len) };
    }
    for at in (0..len).step_by(QUICK_BYTES) {
        // SAFETY: the caller's, for a part of the range.
        unsafe { std::ptr::copy(from.add(at), to.add(at), QUICK_BYTES.min(len - at)) };
    }
}

/// A range of memory that other threads, the kernel or another process may read and write while we look at it.
///
/// There is never a Rust reference into it: bytes are copied in and out. What is read may be torn when somebody writes at the same
/// time; it is never a bad pointer, a wrong length or undefined behaviour of our own code.
///
/// A *guarded* slice is of a mapped file, whose pages are gone when somebody truncates it: every access then says so. Kernel calls
/// that are given such memory fail with EFAULT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedSlice {
    start: NonNull<u8>,
    len: usize,
    guarded: bool,
}

// SAFETY: only addresses are shared; every access goes through raw copies, which make no claim of exclusiveness.
unsafe impl Send for SharedSlice {}
// SAFETY: as above.
unsafe impl Sync for SharedSlice {}

impl SharedSlice {
    /// A slice of no bytes.
    pub const EMPTY: Self = Self { start: NonNull::dangling(), len: 0, guarded: false };

    /// The `len` bytes at `start`.
    ///
    /// # Safety
    /// The range must stay mapped, readable and (if it is ever written through this slice) writable as long as the slice or a
    /// copy of it is used, and no Rust reference to its bytes may be alive while they are written through the slice.
    #[inline]
    pub unsafe fn from_raw(start: *mut u8, len: usize) -> Self {
        let start = if len == 0 { NonNull::dangling() } else { NonNull::new(start).expect("a null range") };
        Self { start, len, guarded: false }
    }

    /// As [`SharedSlice::from_raw`], of a mapped file that others may truncate.
    ///
    /// # Safety
    /// As [`SharedSlice::from_raw`], but for the pages behind the end of the file; [`guarded::install`] was called.
    pub unsafe fn of_file(start: *mut u8, len: usize) -> Self {
        // SAFETY: forwarded from the caller; accesses to a guarded slice survive what it lacks.
        Self { guarded: true, ..unsafe { Self::from_raw(start, len) } }
    }

    /// Whether its memory may be gone when it is touched.
    pub fn is_guarded(&self) -> bool {
        self.guarded
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The part `offset .. offset + len`; `None` when that reaches beyond the end.
    #[inline]
    pub fn sub(&self, offset: usize, len: usize) -> Option<Self> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `offset <= self.len` (checked above), so the sum stays in or just behind the same range.
        let start = unsafe { self.start.add(offset) };
        Some(Self { start, len, ..*self })
    }

    /// Copies the bytes at `offset` into `bytes`; `None` when they reach beyond the end (nothing is copied) or are gone.
    #[inline]
    pub fn read_into(&self, offset: usize, bytes: &mut [u8]) -> Option<()> {
        let from = self.sub(offset, bytes.len())?;
        if self.guarded {
            // SAFETY: in bounds, and a mapped file (of_file's contract); nobody else's bytes overlap with ours.
            return unsafe { guarded::copy(bytes.as_mut_ptr(), from.as_ptr(), bytes.len()) };
        }
        // SAFETY: `from` is in bounds (sub checked) and mapped (from_raw's contract); `bytes` is exclusively ours.
        unsafe { copy(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Some(())
    }

    /// Has the page of the byte at `offset` come in, as any access to it would; `None` when it is beyond the end or gone.
    pub fn touch(&self, offset: usize) -> Option<()> {
        let from = self.sub(offset, 1)?;
        if self.guarded {
            return self.read_into(offset, &mut [0]);
        }
        // SAFETY: `from` is in bounds (sub checked) and mapped (from_raw's contract). Volatile: nobody wants the byte.
        unsafe { from.as_ptr().read_volatile() };
        Some(())
    }

    /// Copies `bytes` to `offset`; `None` when that reaches beyond the end (nothing is copied) or is gone.
    #[inline]
    pub fn write_from(&self, offset: usize, bytes: &[u8]) -> Option<()> {
        let to = self.sub(offset, bytes.len())?;
        if self.guarded {
            // SAFETY: as in `read_into`.
            return unsafe { guarded::copy(to.as_ptr(), bytes.as_ptr(), bytes.len()) };
        }
        // SAFETY: `to` is in bounds (sub checked) and mapped (from_raw's contract).
        unsafe { copy(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Some(())
    }

    /// Sets every byte that is there to `byte`.
    pub fn fill(&self, byte: u8) {
        if self.guarded {
            let bytes = [byte; 4096];
            for offset in (0..self.len).step_by(bytes.len()) {
                let _ = self.write_from(offset, &bytes[..bytes.len().min(self.len - offset)]);
            }
            return;
        }
        // SAFETY: the whole range is mapped (from_raw's contract).
        unsafe { std::ptr::write_bytes(self.as_ptr(), byte, self.len) };
    }

    /// Copies all of `other`, which may overlap, to the start; `None` when it is longer (nothing is copied) or some of it is gone.
    #[inline]
    pub fn copy_from(&self, other: &SharedSlice) -> Option<()> {
        if other.len > self.len {
            return None;
        }
        if self.guarded || other.guarded {
            return self.copy_guarded(other);
        }
        // SAFETY: both ranges are mapped (from_raw's contract) and at least `other.len` long (checked).
        unsafe { copy(other.as_ptr(), self.as_ptr(), other.len) };
        Some(())
    }

    #[cold]
    fn copy_guarded(&self, other: &SharedSlice) -> Option<()> {
        let mut bytes = vec![0; other.len];
        other.read_into(0, &mut bytes)?;
        self.write_from(0, &bytes)
    }

    /// Lets `f` use the word of 32 bits at `offset`; `None` when that is beyond the end or its address is no multiple of 4, and for
    /// guarded memory: [`SharedSlice::update`].
    pub fn with_u32<R>(&self, offset: usize, f: impl FnOnce(&AtomicU32) -> R) -> Option<R> {
        if self.guarded {
            return None;
        }
        let word = self.sub(offset, 4)?.start.cast::<AtomicU32>();
        // SAFETY: in bounds (sub checked), mapped (from_raw's contract) and aligned (checked here); others may change an atomic
        // at any time, and the reference does not outlive `f`.
        word.is_aligned().then(|| f(unsafe { word.as_ref() }))
    }

    /// Lets `f` use the word of 64 bits at `offset`; `None` when that is beyond the end or its address is no multiple of 8, and for
    /// guarded memory: [`SharedSlice::update`].
    pub fn with_u64<R>(&self, offset: usize, f: impl FnOnce(&AtomicU64) -> R) -> Option<R> {
        if self.guarded {
            return None;
        }
        let word = self.sub(offset, 8)?.start.cast::<AtomicU64>();
        // SAFETY: as in `with_u32`.
        word.is_aligned().then(|| f(unsafe { word.as_ref() }))
    }

    /// Puts `change(word)` in place of the word of `width` (4 or 8) bytes at `offset` in one step, or leaves it for `None`; returns
    /// what it was. `None` when it is beyond the end, misaligned or gone. For guarded memory, on little-endian processors.
    pub fn update(
        &self,
        offset: usize,
        width: usize,
        mut change: impl FnMut(u64) -> Option<u64>,
    ) -> Option<u64> {
        let word = self.sub(offset, width)?.as_ptr();
        if !matches!(width, 4 | 8) || !word.addr().is_multiple_of(width) {
            return None;
        }
        let upper = word.addr() % 8;
        let mut seen = {
            // SAFETY: aligned, and in the page of a word that is in bounds (checked) and mapped (contracts of the constructors);
            // whether it is still there is told.
            let around = unsafe { guarded::load(word.wrapping_sub(upper).cast()) }?;
            if width == 4 { around >> (upper * 8) & 0xFFFF_FFFF } else { around }
        };
        loop {
            let Some(new) = change(seen) else { return Some(seen) };
            // SAFETY: as above.
            let old = unsafe {
                if width == 4 {
                    u64::from(guarded::exchange4(word.cast(), seen as u32, new as u32)?)
                } else {
                    guarded::exchange8(word.cast(), seen, new)?
                }
            };
            if old == seen {
                return Some(old);
            }
            seen = old;
        }
    }

    /// A copy of the bytes; zeros where they are gone.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        let _ = self.read_into(0, &mut bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_checked_without_overflow() {
        let mut bytes = [1u8, 2, 3, 4];
        // SAFETY: the array outlives the slice and is not touched meanwhile.
        let slice = unsafe { SharedSlice::from_raw(bytes.as_mut_ptr(), 4) };
        assert!(slice.sub(4, 0).is_some() && slice.sub(1, 3).is_some());
        assert!(slice.sub(2, 3).is_none() && slice.sub(usize::MAX, 2).is_none());
        let mut two = [0; 2];
        slice.read_into(1, &mut two).unwrap();
        assert_eq!(two, [2, 3]);
        assert!(slice.read_into(3, &mut two).is_none());
        slice.write_from(2, &[9, 8]).unwrap();
        slice.sub(0, 2).unwrap().copy_from(&slice.sub(2, 2).unwrap()).unwrap();
        assert_eq!(slice.to_vec(), [9, 8, 9, 8]);
        slice.fill(7);
        assert_eq!(slice.to_vec(), [7; 4]);
    }

    #[test]
    fn a_touched_page_is_there() {
        let mapping = crate::mapping::Mapping::anonymous(8192).unwrap();
        let (slice, mut bits) = (mapping.shared(), [0; 2]);
        slice.touch(4096 + 100).unwrap();
        crate::residency::resident(slice, &mut bits).unwrap();
        assert_eq!(bits.map(|bit| bit & 1), [0, 1]);
        assert!(slice.touch(8192).is_none());
    }

    #[test]
    fn copies_at_any_distance_are_whole() {
        for shift in [0, 1, 3, 63, 64, 4095, 4097, 8192 + 5] {
            for len in [1, 2047, 2048, 2049, 5000, 20_000] {
                let mut bytes: Vec<u8> = (0..64_000u32).map(|at| ((at * 7) >> 3) as u8).collect();
                let mut expected = bytes.clone();
                // Apart, and overlapping either way.
                for (from, to) in [(0, 32_768 + shift), (20_000, 20_000 + shift), (20_000 + shift, 20_000)] {
                    expected.copy_within(from..from + len, to);
                    // SAFETY: the vector outlives the slice and is not touched meanwhile.
                    let slice = unsafe { SharedSlice::from_raw(bytes.as_mut_ptr(), bytes.len()) };
                    let source = slice.sub(from, len).unwrap();
                    slice.sub(to, len).unwrap().copy_from(&source).unwrap();
                    assert!(bytes == expected, "{shift} {len} {from} {to}");
                }
            }
        }
    }

    #[test]
    fn words_are_aligned_and_inside() {
        use std::sync::atomic::Ordering;
        let mut words = [0u64; 2];
        // SAFETY: the array outlives the slice and is not touched meanwhile.
        let slice = unsafe { SharedSlice::from_raw(words.as_mut_ptr().cast(), 16) };
        assert_eq!(slice.with_u32(12, |word| word.fetch_add(5, Ordering::Relaxed)), Some(0));
        assert_eq!(slice.with_u32(12, |word| word.load(Ordering::Relaxed)), Some(5));
        assert!(slice.with_u64(8, |_| ()).is_some() && slice.with_u64(12, |_| ()).is_none());
        assert!(slice.with_u32(13, |_| ()).is_none() && slice.with_u32(16, |_| ()).is_none());
        assert!(slice.with_u64(usize::MAX - 7, |_| ()).is_none());
    }
}
