//! Small far allocations, up to [`BYTES_MAX`].
//!
//! Spans of one size class each, with a bitmap of their free blocks. All bookkeeping is outside the blocks, in local memory: freeing
//! a block never touches it, so a program that tears down a structure does not fetch it from the lender first. Each
//! thread keeps a few free blocks of each class.

use crate::backend::Far;
use crate::heap::HEAP;
use crate::sys::{self, Locked};
use crate::tls::{Internal, words};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// Largest small allocation.
pub(crate) const BYTES_MAX: usize = 32 << 10;
/// Unit of the table that finds a block's span; spans are multiples of it.
pub(crate) const GRANULE_BYTES: usize = 64 << 10;
const CLASSES: usize = 40;
/// Blocks of one class that a thread may keep.
const CACHE_BLOCKS: usize = 64;

/// The class of blocks of at least `bytes` (1..=[`BYTES_MAX`]).
pub(crate) const fn class_of(bytes: usize) -> usize {
    if bytes <= 128 {
        return bytes.saturating_sub(1) / 16;
    }
    let last = bytes - 1;
    let log = last.ilog2() as usize;
    8 + (log - 7) * 4 + (last >> (log - 2)) - 4
}

/// Bytes of a block of a class.
pub(crate) const fn class_bytes(class: usize) -> usize {
    if class < 8 { (class + 1) * 16 } else { (5 + (class - 8) % 4) << (5 + (class - 8) / 4) }
}

const _: () = assert!(class_of(BYTES_MAX) == CLASSES - 1 && class_bytes(CLASSES - 1) == BYTES_MAX);

const fn span_bytes(class: usize) -> usize {
    match class_bytes(class) {
        0..=1024 => GRANULE_BYTES,
        1025..=8192 => 2 * GRANULE_BYTES,
        _ => 4 * GRANULE_BYTES,
    }
}

/// Blocks of a class that a thread keeps at most: about 16 KiB.
const fn cache_blocks(class: usize) -> usize {
    let blocks = (16 << 10) / class_bytes(class);
    if blocks < 4 {
        4
    } else if blocks > CACHE_BLOCKS {
        CACHE_BLOCKS
    } else {
        blocks
    }
}

struct Span {
    start: usize,
    /// Free blocks; 0 bits are taken.
    free: Box<[u64]>,
    free_count: u32,
    count: u32,
    /// Place in the class's list of spans with free blocks.
    place: Option<u32>,
}

/// All spans of one class.
struct Class {
    spans: Vec<Span>,
    /// Indices of `spans` that have no memory.
    unused: Vec<u32>,
    /// Spans with free blocks; the last one is allocated from.
    partial: Vec<u32>,
}

static CLASS: [Locked<Class>; CLASSES] =
    [const { Locked::new(Class { spans: Vec::new(), unused: Vec::new(), partial: Vec::new() }) }; CLASSES];

/// For each granule of the area: (index of the span << 6 | class + 1), or 0.
static TABLE: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());
static TABLE_START: AtomicUsize = AtomicUsize::new(0);

/// Reserves the table, when far memory starts.
pub(crate) fn set_up(area: &Range<usize>) -> Result<(), i32> {
    let start = area.start & !(GRANULE_BYTES - 1);
    let granules = (area.end - start).div_ceil(GRANULE_BYTES);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let table = unsafe { sys::mmap(0, granules * size_of::<AtomicU32>(), writable, flags, -1, 0) }?;
    TABLE_START.store(start, Ordering::Relaxed);
    TABLE.store(table as *mut AtomicU32, Ordering::Relaxed);
    Ok(())
}

/// The table's entry of a far address.
#[inline]
fn entry(address: usize) -> &'static AtomicU32 {
    let granule = (address - TABLE_START.load(Ordering::Relaxed)) / GRANULE_BYTES;
    // SAFETY: our callers pass addresses in the far area, which the table covers; it is never unmapped, and zero is a valid AtomicU32.
    unsafe { &*TABLE.load(Ordering::Relaxed).add(granule) }
}

/// The class of the block at a far address, if a span is there.
#[inline]
pub(crate) fn class_at(address: usize) -> Option<usize> {
    (entry(address).load(Ordering::Relaxed) as usize & 63).checked_sub(1)
}

/// The block at a far address, as far as the table tells: without a lock, so spans may change meanwhile.
pub(crate) fn block_at(address: usize) -> Option<Range<usize>> {
    let first = TABLE_START.load(Ordering::Relaxed);
    if TABLE.load(Ordering::Relaxed).is_null() || address < first {
        return None;
    }
    let word = entry(address).load(Ordering::Relaxed);
    let bytes = class_bytes((word as usize & 63).checked_sub(1)?);
    let mut span = address & !(GRANULE_BYTES - 1);
    let lowest = first.max(span.saturating_sub(3 * GRANULE_BYTES));
    while span > lowest && entry(span - 1).load(Ordering::Relaxed) == word {
        span -= GRANULE_BYTES;
    }
    let start = address - (address - span) % bytes;
    Some(start..start + bytes)
}

/// What a thread keeps.
pub(crate) struct Cache {
    classes: [Kept; CLASSES],
}

struct Kept {
    count: usize,
    blocks: [usize; CACHE_BLOCKS],
}

impl Class {
    /// Takes up to `out.len()` blocks. Fewer only when there is no memory.
    fn take(&mut self, far: &dyn Far, class: usize, out: &mut [usize]) -> usize {
        let bytes = class_bytes(class);
        let mut taken = 0;
        while taken < out.len() {
            let Some(&index) = self.partial.last() else {
                if taken > 0 || !self.grow(far, class) {
                    break;
                }
                continue;
            };
            let span = &mut self.spans[index as usize];
            for (word, bits) in span.free.iter_mut().enumerate() {
                while *bits != 0 && taken < out.len() {
                    let bit = bits.trailing_zeros() as usize;
                    *bits &= *bits - 1;
                    out[taken] = span.start + (word * 64 + bit) * bytes;
                    taken += 1;
                    span.free_count -= 1;
                }
            }
            if span.free_count == 0 {
                span.place = None;
                self.partial.pop();
            }
        }
        // Blocks are used from the end: lowest addresses last.
        out[..taken].reverse();
        taken
    }

    fn grow(&mut self, far: &dyn Far, class: usize) -> bool {
        let bytes = span_bytes(class);
        let Some(start) = HEAP.with(|heap| heap.take(far, bytes, GRANULE_BYTES)) else { return false };
        let count = bytes / class_bytes(class);
        let mut free = vec![u64::MAX; count.div_ceil(64)].into_boxed_slice();
        if !count.is_multiple_of(64)
            && let Some(last) = free.last_mut()
        {
            *last = (1 << (count % 64)) - 1;
        }
        let place = Some(self.partial.len() as u32);
        let span = Span { start, free, free_count: count as u32, count: count as u32, place };
        let index = match self.unused.pop() {
            Some(index) => {
                self.spans[index as usize] = span;
                index
            }
            None => {
                self.spans.push(span);
                self.spans.len() as u32 - 1
            }
        };
        self.partial.push(index);
        for granule in (start..start + bytes).step_by(GRANULE_BYTES) {
            entry(granule).store(index << 6 | (class as u32 + 1), Ordering::Relaxed);
        }
        true
    }

    fn put(&mut self, far: &dyn Far, class: usize, block: usize) {
        let index = entry(block).load(Ordering::Relaxed) >> 6;
        let span = &mut self.spans[index as usize];
        let offset = block - span.start;
        let number = offset / class_bytes(class);
        let (word, bit) = (number / 64, 1 << (number % 64));
        if !offset.is_multiple_of(class_bytes(class)) || span.free[word] & bit != 0 {
            sys::say(&format!("free({block:#x}): not an allocated block; the program's heap is corrupt"));
            std::process::abort();
        }
        span.free[word] |= bit;
        span.free_count += 1;
        match span.place {
            None => {
                span.place = Some(self.partial.len() as u32);
                self.partial.push(index);
            }
            // One empty span is kept for the next allocation.
            Some(place) if span.free_count == span.count && self.partial.len() > 1 => {
                let start = span.start;
                self.partial.swap_remove(place as usize);
                if let Some(&moved) = self.partial.get(place as usize) {
                    self.spans[moved as usize].place = Some(place);
                }
                self.spans[index as usize].free = Box::default();
                self.unused.push(index);
                let bytes = span_bytes(class);
                for granule in (start..start + bytes).step_by(GRANULE_BYTES) {
                    entry(granule).store(0, Ordering::Relaxed);
                }
                HEAP.with(|heap| heap.put(far, start, bytes));
            }
            Some(_) => {}
        }
    }
}

/// A block of `class`, or 0.
#[inline]
pub(crate) fn allocate(far: &dyn Far, class: usize) -> usize {
    let cache = words().cache.get();
    // SAFETY: only this thread has its cache's address, and no other reference to it is alive: the functions below that make one do
    // not call each other while it is in use.
    if let Some(cache) = unsafe { cache.as_mut() } {
        let kept = &mut cache.classes[class];
        if kept.count > 0 {
            kept.count -= 1;
            return kept.blocks[kept.count];
        }
    }
    refill(far, class)
}

#[cold]
fn refill(far: &dyn Far, class: usize) -> usize {
    let _internal = Internal::enter();
    let Some(cache) = thread_cache() else {
        let mut one = [0];
        CLASS[class].with(|spans| spans.take(far, class, &mut one));
        return one[0];
    };
    let kept = &mut cache.classes[class];
    let wanted = cache_blocks(class) / 2;
    kept.count = CLASS[class].with(|spans| spans.take(far, class, &mut kept.blocks[..wanted]));
    if kept.count == 0 {
        return 0;
    }
    kept.count -= 1;
    kept.blocks[kept.count]
}

/// Gives back a block that [`class_at`] found.
#[inline]
pub(crate) fn free(far: &dyn Far, class: usize, block: usize) {
    let cache = words().cache.get();
    // SAFETY: as in `allocate`.
    if let Some(cache) = unsafe { cache.as_mut() } {
        let kept = &mut cache.classes[class];
        if kept.count < cache_blocks(class) {
            kept.blocks[kept.count] = block;
            kept.count += 1;
            return;
        }
    }
    free_slow(far, class, block);
}

#[cold]
fn free_slow(far: &dyn Far, class: usize, block: usize) {
    let _internal = Internal::enter();
    let errno = sys::errno();
    match thread_cache() {
        None => CLASS[class].with(|spans| spans.put(far, class, block)),
        Some(cache) => {
            let kept = &mut cache.classes[class];
            let half = kept.count / 2;
            if half > 0 {
                // The oldest go.
                CLASS[class]
                    .with(|spans| kept.blocks[..half].iter().for_each(|&old| spans.put(far, class, old)));
                kept.blocks.copy_within(half..kept.count, 0);
                kept.count -= half;
            }
            kept.blocks[kept.count] = block;
            kept.count += 1;
        }
    }
    sys::set_errno(errno);
}

/// Key whose destructor returns a thread's blocks when it ends.
static KEY: AtomicU32 = AtomicU32::new(0);

/// Before the program starts.
pub(crate) fn set_up_threads() -> Result<(), String> {
    set_up_key(&KEY, thread_ends)
}

/// Makes a key that calls `at_end` when a thread ends.
pub(crate) fn set_up_key(place: &AtomicU32, at_end: extern "C" fn(*mut c_void)) -> Result<(), String> {
    let mut key = 0;
    // SAFETY: `key` outlives the call; the destructor lives as long as the process.
    if unsafe { libc::pthread_key_create(&mut key, Some(at_end)) } != 0 {
        return Err("cannot create a thread key: the program's libraries use all of them".into());
    }
    place.store(key, Ordering::Relaxed);
    Ok(())
}

fn thread_cache<'a>() -> Option<&'a mut Cache> {
    let mut cache = words().cache.get();
    if cache.is_null() {
        // SAFETY: zero is a valid Cache; a null result is looked at below.
        cache = unsafe { crate::__libc_calloc(1, size_of::<Cache>()) }.cast();
        if cache.is_null() {
            return None;
        }
        // SAFETY: the key exists (set up before the program started); the value is this thread's alone.
        if unsafe { libc::pthread_setspecific(KEY.load(Ordering::Relaxed), cache.cast()) } != 0 {
            // SAFETY: just allocated, not published.
            unsafe { crate::__libc_free(cache.cast()) };
            return None;
        }
        words().cache.set(cache);
    }
    // SAFETY: as in `allocate`.
    unsafe { cache.as_mut() }
}

extern "C" fn thread_ends(cache: *mut c_void) {
    let _internal = Internal::enter();
    words().cache.set(std::ptr::null_mut());
    let Some(far) = crate::run::started() else { return };
    let cache: *mut Cache = cache.cast();
    // SAFETY: the key's value is this thread's cache, which nobody refers to any more (the word above is null).
    for (class, kept) in unsafe { &(*cache).classes }.iter().enumerate() {
        if kept.count > 0 {
            CLASS[class].with(|spans| {
                kept.blocks[..kept.count].iter().for_each(|&block| spans.put(far, class, block))
            });
        }
    }
    // SAFETY: it came from __libc_calloc and is not used after this.
    unsafe { crate::__libc_free(cache.cast()) };
}

/// Before a fork.
pub(crate) fn hold() {
    CLASS.iter().for_each(Locked::hold);
}

/// After a fork. Blocks kept by threads that the child does not have stay taken there.
pub(crate) fn let_go() {
    CLASS.iter().for_each(Locked::let_go);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_by_any_address_in_them() {
        let start = 1 << 40;
        set_up(&(start..start + (1 << 24))).unwrap();
        let (large, small) = (class_of(2560), class_of(100));
        // Two spans of one class beside each other, and one of another; the first granule is nobody's.
        let mut spans = Vec::new();
        for (index, class) in [(5, large), (6, large), (0, small)] {
            let span = spans.last().map_or(start + GRANULE_BYTES, |&(span, class)| span + span_bytes(class));
            spans.push((span, class));
            for granule in (span..span + span_bytes(class)).step_by(GRANULE_BYTES) {
                entry(granule).store(index << 6 | (class as u32 + 1), Ordering::Relaxed);
            }
        }
        for &(span, class) in &spans {
            let bytes = class_bytes(class);
            for block in (span..).step_by(bytes).take(span_bytes(class) / bytes) {
                for address in [block, block + 1, block + bytes - 1] {
                    assert_eq!(block_at(address), Some(block..block + bytes));
                }
            }
        }
        assert_eq!((block_at(start), block_at(start - 1), block_at(start + (1 << 23))), (None, None, None));
    }

    #[test]
    fn classes_are_tight_and_monotonic() {
        for bytes in 1..=BYTES_MAX {
            let class = class_of(bytes);
            assert!(class_bytes(class) >= bytes, "{bytes}");
            assert!(class == 0 || class_bytes(class - 1) < bytes, "{bytes}");
            assert!(class_bytes(class).is_multiple_of(16));
        }
        for class in 0..CLASSES {
            assert!(span_bytes(class) / class_bytes(class) >= 8);
            assert!(cache_blocks(class) <= CACHE_BLOCKS);
        }
    }
}
