//! The bytes of a lender that packs: pages in pieces in memory, and on disk what memory has no room for. docs/design/tiers.md.

use std::path::Path;

use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};
use netvm_core::tier::{CHUNK_BYTES, FACTOR_MAX, FRAME_CHUNKS, Plan, Shelf, Spot};
use netvm_sys::mapping::Mapping;
use netvm_sys::memfd::Memfd;
use netvm_sys::shared::SharedSlice;

use super::server::Compress;
use crate::error::{Error, LenderLimit, Result};

const PAGE_BYTES: usize = 4096;
/// A page that needs more bytes than this is kept as it is: it would take as many chunks.
const PACKED_BYTES_MAX: usize = PAGE_BYTES - CHUNK_BYTES;
/// Frames that are freed, at most, after something was given back, and at each tick: others wait meanwhile.
const FREED_AT_ONCE: usize = 64;
const FREED_PER_TICK: usize = 2048;
/// Pages that come back from disk at each tick, and places that are looked at for each.
const BACK_PER_TICK: usize = 512;
const LOOKS: usize = 4096;

/// A file on a disk with room for what does not shrink.
struct Overflow {
    file: Memfd,
    mapping: Mapping,
}

pub(super) struct Packing {
    shelf: Shelf,
    slab_pages: u32,
    /// The frames, of which chunk `c` is the bytes from `c * CHUNK_BYTES` on.
    frames: SharedSlice,
    overflow: Option<Overflow>,
    lz4: CompressTable,
    packed: Box<[u8]>,
    /// A page of which a part is read or written.
    page: Vec<u8>,
}

/// How many pages of how much memory: what `compress` says of `memory_bytes`, in slabs of `slab_bytes`.
pub(super) fn plan(memory_bytes: u64, slab_bytes: u64, compress: &Compress) -> Result<Plan> {
    let lend_bytes = compress.lend_bytes / slab_bytes * slab_bytes;
    Plan::new(memory_bytes, lend_bytes, compress.overflow.is_some())
        .filter(|plan| u64::from(plan.pages) * PAGE_BYTES as u64 >= slab_bytes)
        .ok_or_else(|| {
            Error::Other(format!(
                "cannot lend up to {} MiB packed into {} MiB of memory in slabs of {} MiB; a slab must fit, and at most {FACTOR_MAX} times the \
                 memory can be lent",
                compress.lend_bytes >> 20,
                memory_bytes >> 20,
                slab_bytes >> 20
            ))
        })
}

impl Packing {
    /// `frames` is the memory of all frames of the plan.
    pub(super) fn new(
        plan: Plan,
        slab_bytes: u64,
        frames: SharedSlice,
        folder: Option<&Path>,
    ) -> Result<Self> {
        let overflow = folder.map(|folder| {
            overflow(folder, plan)
                .map_err(|error| Error::Other(format!("cannot keep a file in {}: {error}", folder.display())))
        });
        Ok(Self {
            shelf: Shelf::new(plan),
            slab_pages: (slab_bytes / PAGE_BYTES as u64) as u32,
            frames,
            overflow: overflow.transpose()?,
            lz4: CompressTable::small(),
            packed: vec![0; get_maximum_output_size(PAGE_BYTES)].into(),
            page: vec![0; PAGE_BYTES],
        })
    }

    /// Makes sure that so many pages have room whatever is written to them, and that it is wise to lend them, or the borrower `pressed`.
    pub(super) fn admit(&mut self, lent: u64, pressed: bool) -> std::result::Result<(), LenderLimit> {
        if !self.shelf.may_lend(lent, pressed) {
            return Err(LenderLimit::Memory);
        }
        let (before, _) = self.shelf.room();
        let (from, to) =
            (u64::from(before) * PAGE_BYTES as u64, self.shelf.plan().beyond(lent) * PAGE_BYTES as u64);
        if to <= from {
            return Ok(());
        }
        let overflow = self.overflow.as_ref().ok_or(LenderLimit::Memory)?;
        if overflow.file.provide(from, to - from).is_err() {
            let _ = overflow.file.punch_hole(from, to - from);
            return Err(LenderLimit::Disk);
        }
        self.shelf.add_room((to / PAGE_BYTES as u64) as u32);
        Ok(())
    }

    /// Bytes to ask borrowers back while so many pages are lent.
    pub(super) fn missing_bytes(&mut self, lent: u64) -> u64 {
        self.shelf.missing(lent) * PAGE_BYTES as u64
    }

    /// Bytes of what memory has no room for.
    pub(super) fn spilled_bytes(&self) -> u64 {
        u64::from(self.shelf.room().1) * PAGE_BYTES as u64
    }

    /// Cuts a range within a slab by its pages: calls `f` with each page, the part of it, and where that is in the range.
    fn pages(
        &mut self,
        slab: u32,
        offset: u64,
        bytes: usize,
        mut f: impl FnMut(&mut Self, u32, std::ops::Range<usize>, usize) -> Option<()>,
    ) -> Option<()> {
        let mut done = 0;
        while done < bytes {
            let at = offset + done as u64;
            let from = (at % PAGE_BYTES as u64) as usize;
            let part = (PAGE_BYTES - from).min(bytes - done);
            let page = slab.checked_mul(self.slab_pages)?.checked_add((at / PAGE_BYTES as u64) as u32)?;
            f(self, page, from..from + part, done)?;
            done += part;
        }
        Some(())
    }

    /// A copy of a part of a slab, which was checked. `None` when it cannot be read: the disk, or this memory, is faulty.
    pub(super) fn read(&mut self, slab: u32, offset: u64, bytes: usize) -> Option<Vec<u8>> {
        let mut copy = vec![0; bytes];
        self.pages(slab, offset, bytes, |this, page, part, at| {
            let out = &mut copy[at..at + part.len()];
            if part.len() == PAGE_BYTES {
                return this.unpack(page, out);
            }
            let mut whole = std::mem::take(&mut this.page);
            let read = this.unpack(page, &mut whole[..]);
            out.copy_from_slice(&whole[part]);
            this.page = whole;
            read
        })?;
        Some(copy)
    }

    /// Writes to a part of a slab, which was checked. `None` when the disk has failed: what was there is lost.
    pub(super) fn write(&mut self, slab: u32, offset: u64, bytes: &[u8]) -> Option<()> {
        self.pages(slab, offset, bytes.len(), |this, page, part, at| {
            let new = &bytes[at..at + part.len()];
            if part.len() == PAGE_BYTES {
                return this.pack(page, new);
            }
            let mut whole = std::mem::take(&mut this.page);
            let read = this.unpack(page, &mut whole[..]);
            whole[part].copy_from_slice(new);
            let written = read.and_then(|()| this.pack(page, &whole[..]));
            this.page = whole;
            written
        })
    }

    /// Makes whole pages of a slab read as zeros.
    pub(super) fn discard(&mut self, slab: u32, offset: u64, bytes: u64, frames: &Memfd) {
        let first = u64::from(slab) * u64::from(self.slab_pages) + offset / PAGE_BYTES as u64;
        for page in first..first + bytes / PAGE_BYTES as u64 {
            self.shelf.clear(page as u32);
        }
        self.free(frames, FREED_AT_ONCE);
    }

    /// Gives memory back that is free in pieces, at most so many frames of it.
    fn free(&mut self, file: &Memfd, most: usize) {
        let frames = self.frames;
        for _ in 0..most {
            let freed = self.shelf.compact(|from, to| {
                let chunk = |chunk| frames.sub(chunk as usize * CHUNK_BYTES, CHUNK_BYTES);
                let moved = chunk(from).zip(chunk(to)).and_then(|(from, to)| to.copy_from(&from));
                assert!(moved.is_some(), "chunks are inside of the frames");
            });
            let Some(frame) = freed else { return };
            // Kept if that fails: it is used again first.
            let _ = file.punch_hole(u64::from(frame) * PAGE_BYTES as u64, PAGE_BYTES as u64);
        }
    }

    /// While nothing else is to be done: memory goes back, and pages come back from disk when there is room for them.
    pub(super) fn tick(&mut self, file: &Memfd, lent: u64) {
        self.free(file, FREED_PER_TICK);
        for _ in 0..BACK_PER_TICK {
            let Some((page, _)) = self.shelf.come_back(LOOKS) else { break };
            let mut whole = std::mem::take(&mut self.page);
            // What cannot be read stays where it is: whoever wants it is told.
            let is_moved = self.unpack(page, &mut whole).is_none() || self.pack(page, &whole).is_some();
            self.page = whole;
            if !is_moved {
                break;
            }
        }
        let (room, used) = self.shelf.room();
        if let Some(overflow) = &self.overflow
            && room > 0
            && used == 0
            && self.shelf.plan().beyond(lent) == 0
            && self.shelf.drop_room()
        {
            let _ = overflow.file.punch_hole(0, u64::from(room) * PAGE_BYTES as u64);
        }
    }

    /// Takes what a page is from now on.
    fn pack(&mut self, page: u32, bytes: &[u8]) -> Option<()> {
        if let Some(word) = only_word(bytes)
            && self.shelf.put_word(page, word)
        {
            return Some(());
        }
        // The buffer is as long as the result can be.
        let packed = compress_into_with_table(bytes, &mut self.packed, &mut self.lz4).unwrap_or(usize::MAX);
        let is_packed = packed <= PACKED_BYTES_MAX;
        let piece = if is_packed { &self.packed[..packed] } else { bytes };
        match self.shelf.put(page, piece.len())? {
            Spot::Piece(id) => {
                let (_, chunks) = self.shelf.piece(id);
                for (chunk, part) in chunks.zip(piece.chunks(CHUNK_BYTES)) {
                    self.frames.write_from(chunk as usize * CHUNK_BYTES, part)?;
                }
                Some(())
            }
            Spot::Disk(at) => {
                self.overflow.as_ref()?.mapping.shared().write_from(at as usize * PAGE_BYTES, bytes)
            }
            Spot::Word(_) => None,
        }
    }

    /// What a page is.
    fn unpack(&mut self, page: u32, out: &mut [u8]) -> Option<()> {
        match self.shelf.spot(page) {
            Spot::Word(word) => {
                for place in out.chunks_exact_mut(8) {
                    place.copy_from_slice(&word.to_ne_bytes());
                }
                Some(())
            }
            Spot::Disk(at) => {
                self.overflow.as_ref()?.mapping.shared().read_into(at as usize * PAGE_BYTES, out)
            }
            Spot::Piece(id) => {
                let (bytes, chunks) = self.shelf.piece(id);
                let is_packed = bytes < PAGE_BYTES;
                let piece = if is_packed { &mut self.packed[..bytes] } else { &mut out[..] };
                for (chunk, part) in chunks.zip(piece.chunks_mut(CHUNK_BYTES)) {
                    self.frames.read_into(chunk as usize * CHUNK_BYTES, part)?;
                }
                if !is_packed {
                    return Some(());
                }
                // Checked code: it neither reads nor writes beyond, whatever the bytes are.
                let unpacked = decompress_into(&self.packed[..bytes], out);
                unpacked.is_ok_and(|bytes| bytes == PAGE_BYTES).then_some(())
            }
        }
    }
}

/// The word that a page consists of.
fn only_word(page: &[u8]) -> Option<u64> {
    let (first, rest) = page.split_at(8);
    // Most pages differ at once.
    (rest[..8] == *first && rest == &page[..page.len() - 8])
        .then(|| u64::from_ne_bytes(std::array::from_fn(|index| first[index])))
}

/// A file with room for all pages that may have to go there, a hole at first.
fn overflow(folder: &Path, plan: Plan) -> std::io::Result<Overflow> {
    let bytes = plan.beyond(plan.pages.into()).max(1) * PAGE_BYTES as u64;
    let file = Memfd::in_folder(folder, bytes)?;
    file.provide(0, PAGE_BYTES as u64)?;
    file.punch_hole(0, PAGE_BYTES as u64)?;
    let mapping = Mapping::of_disk(&file)?;
    Ok(Overflow { file, mapping })
}

const _: () = assert!(CHUNK_BYTES * FRAME_CHUNKS as usize == PAGE_BYTES);
