//! Blocks of memory for the objects of a program, from pages that may be far away.
//!
//! What the heap knows of its blocks is not in them: giving a block back, or looking for a free one, touches no page. Small blocks of
//! a size come from *spans*; a large one is the caller's business, in pages of its own. docs/design/far.md.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

/// Bytes of a span, which begins at a multiple of it. Pages of it that no block has touched cost nothing.
pub const SPAN_BYTES: usize = 256 << 10;
/// Blocks above this are large.
pub const SMALL_BYTES_MAX: usize = 32 << 10;
/// Alignments above this are large, too.
pub const ALIGN_MAX: usize = 4096;

const STEP: usize = 16;
/// Sizes up to this are multiples of 16; above there are four to each doubling.
const FINE_BYTES_MAX: usize = 128;
const CLASSES: usize = FINE_BYTES_MAX / STEP + 4 * 8;

/// Bytes of a block that a layout gets; `None` for a large one.
#[inline]
pub fn small_bytes(bytes: usize, align: usize) -> Option<usize> {
    class_of(bytes, align).map(bytes_of)
}

#[inline]
fn class_of(bytes: usize, align: usize) -> Option<usize> {
    if align > ALIGN_MAX || bytes > SMALL_BYTES_MAX {
        return None;
    }
    // Powers of two are sizes, and blocks of such a size are aligned to it.
    let bytes = if align > STEP { bytes.max(align).next_power_of_two() } else { bytes.max(1) };
    if bytes <= FINE_BYTES_MAX {
        return Some(bytes.div_ceil(STEP) - 1);
    }
    let doubling = (bytes - 1).ilog2();
    let quarter = ((bytes - 1) >> (doubling - 2)) & 3;
    let class = FINE_BYTES_MAX / STEP + (doubling as usize - 7) * 4 + quarter;
    (class < CLASSES).then_some(class)
}

#[inline]
fn bytes_of(class: usize) -> usize {
    match class.checked_sub(FINE_BYTES_MAX / STEP) {
        None => (class + 1) * STEP,
        Some(class) => (5 + class % 4) << (5 + class / 4),
    }
}

#[derive(Debug)]
struct Span {
    class: usize,
    /// A bit for each block that is used.
    used: Vec<u64>,
    count: usize,
    /// Blocks before are used.
    cursor: usize,
    /// It stands in the list of spans with room.
    listed: bool,
}

impl Span {
    fn blocks(&self) -> usize {
        SPAN_BYTES / bytes_of(self.class)
    }

    fn take(&mut self) -> Option<usize> {
        let blocks = self.blocks();
        for word in self.cursor / 64..self.used.len() {
            let block = word * 64 + self.used[word].trailing_ones() as usize;
            if self.used[word] != u64::MAX && block < blocks {
                self.used[word] |= 1 << (block % 64);
                (self.count, self.cursor) = (self.count + 1, block + 1);
                return Some(block);
            }
        }
        None
    }
}

/// A block that is no block of the heap was to be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotABlock;

/// What becomes of a span when a block has been given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// It has other blocks, or is kept for the next.
    Kept,
    /// It is empty, and no longer the heap's: the address of the span.
    Empty(usize),
}

/// The small blocks.
#[derive(Debug)]
pub struct Heap {
    spans: BTreeMap<usize, Span>,
    /// By size: spans that may have room.
    room: Vec<Vec<usize>>,
    used_bytes: usize,
}

impl Default for Heap {
    fn default() -> Self {
        Self::new()
    }
}

impl Heap {
    /// Without any span.
    pub fn new() -> Self {
        Self { spans: BTreeMap::new(), room: vec![Vec::new(); CLASSES], used_bytes: 0 }
    }

    /// Bytes of blocks that are used.
    pub fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    /// Spans of which no block is used.
    pub fn empty_spans(&self) -> impl Iterator<Item = usize> + '_ {
        self.spans.iter().filter(|(_, span)| span.count == 0).map(|(&start, _)| start)
    }

    /// The address of a block; `None` when a span is needed ([`Heap::add`]), and for large ones.
    pub fn take(&mut self, bytes: usize, align: usize) -> Option<usize> {
        let class = class_of(bytes, align)?;
        while let Some(&start) = self.room[class].last() {
            if let Some(span) = self.spans.get_mut(&start) {
                if let Some(block) = span.take() {
                    self.used_bytes += bytes_of(class);
                    return Some(start + block * bytes_of(class));
                }
                span.listed = false;
            }
            self.room[class].pop();
        }
        None
    }

    /// [`SPAN_BYTES`] bytes at `start`, a multiple of it, for blocks like this one, which is small.
    pub fn add(&mut self, start: usize, bytes: usize, align: usize) {
        debug_assert!(start.is_multiple_of(SPAN_BYTES));
        let Some(class) = class_of(bytes, align) else { return };
        let words = (SPAN_BYTES / bytes_of(class)).div_ceil(64);
        self.spans.insert(start, Span { class, used: vec![0; words], count: 0, cursor: 0, listed: true });
        self.room[class].push(start);
    }

    /// Where the block is that has this address, used or not.
    pub fn block_at(&self, address: usize) -> Option<Range<usize>> {
        let start = address & !(SPAN_BYTES - 1);
        let bytes = bytes_of(self.spans.get(&start)?.class);
        let block = address - (address - start) % bytes;
        Some(block..block + bytes)
    }

    /// Bytes of the block that begins at this address; `None` if there is none, or it is not used.
    pub fn used_at(&self, address: usize) -> Option<usize> {
        let start = address & !(SPAN_BYTES - 1);
        let span = self.spans.get(&start)?;
        let (offset, bytes) = (address - start, bytes_of(span.class));
        let block = offset / bytes;
        let is_used = block < span.blocks() && span.used[block / 64] >> (block % 64) & 1 != 0;
        (is_used && offset.is_multiple_of(bytes)).then_some(bytes)
    }

    /// Gives back a block of this layout.
    ///
    /// # Errors
    /// [`NotABlock`], and nothing is changed.
    pub fn give(&mut self, address: usize, bytes: usize, align: usize) -> Result<Given, NotABlock> {
        let start = address & !(SPAN_BYTES - 1);
        let (span, class) = self.spans.get_mut(&start).zip(class_of(bytes, align)).ok_or(NotABlock)?;
        let (offset, size) = (address - start, bytes_of(class));
        let block = offset / size;
        if span.class != class || !offset.is_multiple_of(size) || block >= span.blocks() {
            return Err(NotABlock);
        }
        let (word, bit) = (block / 64, 1 << (block % 64));
        if span.used[word] & bit == 0 {
            return Err(NotABlock);
        }
        span.used[word] &= !bit;
        span.count -= 1;
        span.cursor = span.cursor.min(block);
        self.used_bytes -= size;
        let room = &mut self.room[class];
        if span.count == 0 && room.iter().any(|&other| other != start) {
            self.spans.remove(&start);
            room.retain(|&other| other != start);
            return Ok(Given::Empty(start));
        }
        if !span.listed {
            span.listed = true;
            room.push(start);
        }
        Ok(Given::Kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_close_and_aligned() {
        let mut last = 0;
        for class in 0..CLASSES {
            assert!(bytes_of(class) > last && bytes_of(class).is_multiple_of(STEP), "{class}");
            last = bytes_of(class);
            assert_eq!(class_of(last, 1), Some(class));
        }
        assert_eq!(last, SMALL_BYTES_MAX);
        for bytes in 0..=SMALL_BYTES_MAX {
            let got = small_bytes(bytes, 8).unwrap();
            assert!(got >= bytes && (bytes <= 64 || got - bytes <= bytes / 3), "{bytes} -> {got}");
            for align in [16, 32, 64, 4096] {
                if let Some(got) = small_bytes(bytes, align) {
                    assert!(got >= bytes && got.is_multiple_of(align), "{bytes} {align}");
                }
            }
        }
        assert_eq!(small_bytes(SMALL_BYTES_MAX + 1, 8), None);
        assert_eq!(small_bytes(8, ALIGN_MAX * 2), None);
    }

    #[test]
    fn blocks_never_overlap_and_empty_spans_go() {
        let (mut heap, mut random, mut spans, mut next) = (Heap::new(), 3_u64, Vec::new(), SPAN_BYTES);
        let mut below = |end: usize| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) as usize % end
        };
        let mut blocks: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
        for round in 0..60_000 {
            // Grows, then shrinks.
            if blocks.is_empty() || below(100) < if round < 30_000 { 60 } else { 35 } {
                let most = 1 << (4 + below(12));
                let bytes = below(most).min(SMALL_BYTES_MAX);
                let align = 1 << below(8);
                let Some(size) = small_bytes(bytes, align) else { continue };
                let address = match heap.take(bytes, align) {
                    Some(address) => address,
                    None => {
                        heap.add(next, bytes, align);
                        spans.push(next);
                        next += SPAN_BYTES;
                        heap.take(bytes, align).unwrap()
                    }
                };
                assert!(address.is_multiple_of(align));
                assert!(spans.contains(&(address & !(SPAN_BYTES - 1))));
                let before = blocks.range(..=address).next_back();
                assert!(before.is_none_or(|(&at, &(bytes, align))| {
                    at + small_bytes(bytes, align).unwrap() <= address
                }));
                assert!(blocks.range(address..).next().is_none_or(|(&at, _)| address + size <= at));
                blocks.insert(address, (bytes, align));
            } else {
                let at = below(next);
                let (&address, &(bytes, align)) = blocks.range(at..).chain(&blocks).next().unwrap();
                blocks.remove(&address);
                assert_eq!(heap.used_at(address), small_bytes(bytes, align));
                assert_eq!(heap.used_at(address + 8), None);
                assert_eq!(heap.give(address + 8, bytes, align), Err(NotABlock));
                if let Given::Empty(span) = heap.give(address, bytes, align).unwrap() {
                    spans.retain(|&other| other != span);
                    assert!(blocks.range(span..span + SPAN_BYTES).next().is_none());
                }
                assert_eq!(heap.give(address, bytes, align), Err(NotABlock));
                assert_eq!(heap.used_at(address), None);
            }
        }
        for (address, (bytes, align)) in blocks {
            heap.give(address, bytes, align).unwrap();
        }
        assert_eq!(heap.used_bytes(), 0);
        assert!(heap.empty_spans().count() <= CLASSES, "one is kept for each size at most");
    }
}
