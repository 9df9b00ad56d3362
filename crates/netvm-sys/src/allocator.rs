//! Blocks of memory behind the allocator interface of collections.

use allocator_api2::alloc::{AllocError, Allocator, Layout};
use allocator_api2::boxed::Box;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Who has the blocks.
///
/// What it promises, and [`Alloc`] relies on: a block is readable and writable memory at a multiple of its alignment that nobody else
/// has, neither another block nor the implementer, until it is given back, also when the last [`Alloc`] has gone; what was written to
/// it is read from it again.
pub trait Blocks: Send + Sync {
    /// A block of this layout, whose size is not 0; its address.
    fn take(&self, layout: Layout) -> Option<usize>;

    /// Whether a block of this layout is all zero when it is taken.
    fn is_zero(&self, layout: Layout) -> bool;

    /// A block of this layout is not needed any more.
    fn give(&self, address: usize, layout: Layout);

    /// Makes a block longer or shorter, wherever it is then; what fits of its contents stays, and what is new is zero if `zeroed`.
    /// `None`: nothing has changed, and it is to be copied.
    fn resize(&self, address: usize, old: Layout, new: Layout, zeroed: bool) -> Option<usize>;
}

/// An allocator of such blocks, to be cloned freely.
#[derive(Clone)]
pub struct Alloc(Arc<dyn Blocks>);

impl fmt::Debug for Alloc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Alloc")
    }
}

impl Alloc {
    /// Of these blocks.
    pub fn new(blocks: Arc<dyn Blocks>) -> Self {
        Self(blocks)
    }

    fn resize(
        &self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
        zeroed: bool,
    ) -> Result<NonNull<[u8]>, AllocError> {
        if old.size() > 0
            && new.size() > 0
            && let Some(address) = self.0.resize(ptr.as_ptr() as usize, old, new, zeroed)
        {
            let start = NonNull::new(address as *mut u8).ok_or(AllocError)?;
            return Ok(NonNull::slice_from_raw_parts(start, new.size()));
        }
        let block = if zeroed { self.allocate_zeroed(new) } else { self.allocate(new) }?;
        let bytes = old.size().min(new.size());
        // SAFETY: `ptr` is a block of `old.size()` bytes (the caller's promise), the other one is new; both have `bytes` bytes.
        unsafe { block.cast::<u8>().copy_from_nonoverlapping(ptr, bytes) };
        // SAFETY: the caller's promise; it is not used any more.
        unsafe { self.deallocate(ptr, old) };
        Ok(block)
    }
}

// SAFETY: blocks are valid, disjoint and keep their contents until they are given back, and do not depend on the allocator's own life
// (the promise of `Blocks`); clones share them.
unsafe impl Allocator for Alloc {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if layout.size() == 0 {
            let start = NonNull::new(std::ptr::without_provenance_mut(layout.align())).ok_or(AllocError)?;
            return Ok(NonNull::slice_from_raw_parts(start, 0));
        }
        let address = self.0.take(layout).ok_or(AllocError)?;
        let start = NonNull::new(address as *mut u8).ok_or(AllocError)?;
        Ok(NonNull::slice_from_raw_parts(start, layout.size()))
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        let block = self.allocate(layout)?;
        if layout.size() > 0 && !self.0.is_zero(layout) {
            // SAFETY: a new block of this many bytes.
            unsafe { block.cast::<u8>().write_bytes(0, layout.size()) };
        }
        Ok(block)
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, layout: Layout) {
        if layout.size() > 0 {
            self.0.give(ptr.as_ptr() as usize, layout);
        }
    }

    unsafe fn grow(&self, ptr: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        self.resize(ptr, old, new, false)
    }

    unsafe fn grow_zeroed(
        &self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        self.resize(ptr, old, new, true)
    }

    unsafe fn shrink(&self, ptr: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, AllocError> {
        self.resize(ptr, old, new, false)
    }
}

mod sealed {
    /// Only types whose every bit pattern, zeros among them, is a value.
    pub trait Sealed: Copy + Send + Sync + 'static {}
}

/// Numbers and arrays of them: zero bytes are a value of theirs.
pub trait Plain: sealed::Sealed {}

macro_rules! plain {
    ($($type:ty)*) => {
        $(impl sealed::Sealed for $type {}
        impl Plain for $type {})*
    };
}

plain!(u8 u16 u32 u64 u128 usize i8 i16 i32 i64 i128 isize f32 f64);

impl<T: Plain, const N: usize> sealed::Sealed for [T; N] {}
impl<T: Plain, const N: usize> Plain for [T; N] {}

/// `len` zeros.
///
/// # Errors
/// [`AllocError`] when there is no such block.
pub fn zeroed<T: Plain>(alloc: &Alloc, len: usize) -> Result<Box<[T], Alloc>, AllocError> {
    let layout = Layout::array::<T>(len).map_err(|_| AllocError)?;
    let start = alloc.allocate_zeroed(layout)?.cast::<T>();
    let slice = NonNull::slice_from_raw_parts(start, len);
    // SAFETY: a new block of this allocator with the layout of `[T; len]`, all zero, which is a value of a `Plain` type.
    Ok(unsafe { Box::from_raw_in(slice.as_ptr(), alloc.clone()) })
}

/// Sets all of a slice to zero. `discard` may do so for its whole pages, given their address and their bytes: then it returns true.
pub fn discard<T: Plain>(slice: &mut [T], page_bytes: usize, discard: impl FnOnce(usize, usize) -> bool) {
    let (start, bytes) = (slice.as_mut_ptr() as usize, size_of_val(slice));
    let first = start.next_multiple_of(page_bytes).min(start + bytes);
    let last = ((start + bytes) / page_bytes * page_bytes).max(first);
    let (from, to) = (first - start, last - start);
    let whole = from < to && discard(first, to - from);
    let (from, to) = if whole { (from, to) } else { (bytes, bytes) };
    let start = slice.as_mut_ptr().cast::<u8>();
    // SAFETY: within the slice (`from <= to <= bytes`), which is exclusively ours; zeros are values of a `Plain` type.
    unsafe {
        start.write_bytes(0, from);
        start.add(to).write_bytes(0, bytes - to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use allocator_api2::vec::Vec;
    use std::alloc::{alloc, dealloc};
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// From the usual allocator, filled with something else than zeros.
    #[derive(Default)]
    struct Usual {
        held: AtomicUsize,
    }

    impl Blocks for Usual {
        fn take(&self, layout: Layout) -> Option<usize> {
            self.held.fetch_add(layout.size(), Ordering::Relaxed);
            // SAFETY: the size is not 0 (the trait's promise); the block is as long as its layout says.
            unsafe {
                let block = alloc(layout);
                block.write_bytes(0xA5, layout.size());
                Some(block as usize)
            }
        }

        fn is_zero(&self, _: Layout) -> bool {
            false
        }

        fn give(&self, address: usize, layout: Layout) {
            self.held.fetch_sub(layout.size(), Ordering::Relaxed);
            // SAFETY: taken above with this layout.
            unsafe { dealloc(address as *mut u8, layout) };
        }

        fn resize(&self, _: usize, _: Layout, _: Layout, _: bool) -> Option<usize> {
            None
        }
    }

    #[test]
    fn collections_take_and_give_blocks() {
        let usual = Arc::new(Usual::default());
        let alloc = Alloc::new(Arc::<Usual>::clone(&usual));
        let mut vec = Vec::new_in(alloc.clone());
        (0..10_000_u64).for_each(|value| vec.push(value.to_string()));
        vec.truncate(100);
        vec.shrink_to_fit();
        assert!(vec.iter().enumerate().all(|(index, text)| *text == index.to_string()));
        let mut zeros = zeroed::<[u32; 3]>(&alloc, 5000).unwrap();
        assert!(zeros.iter().all(|zero| *zero == [0; 3]));
        zeros.fill([1, 2, 3]);
        let mut asked = (0, 0);
        discard(&mut zeros[1..4999], 4096, |address, bytes| {
            asked = (address % 4096, bytes);
            false
        });
        assert!(asked.0 == 0 && asked.1 >= 13 * 4096, "{asked:?}");
        assert!(
            zeros[0] == [1, 2, 3]
                && zeros[4999] == [1, 2, 3]
                && zeros[1..4999].iter().all(|zero| *zero == [0; 3])
        );
        assert!(zeroed::<u8>(&alloc, 0).unwrap().is_empty());
        assert!(zeroed::<u64>(&alloc, usize::MAX / 4).is_err());
        drop((vec, zeros));
        assert_eq!(usual.held.load(Ordering::Relaxed), 0);
    }
}
