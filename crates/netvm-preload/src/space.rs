//! Who has which part of the far area.

use crate::backend::Far;
use crate::range::{Piece, RangeMap};
use crate::run;
use crate::sys::{self, Locked, PAGE_BYTES};
use netvm::pager::Access;
use netvm_core::ranges::FreeRanges;
use std::ops::Range;

/// What madvise(2) said about forks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ForkAs {
    Copy,
    /// MADV_DONTFORK: the child has no mapping there.
    Nothing,
    /// MADV_WIPEONFORK: the child reads zero.
    Zero,
}

/// What the program has said of far memory that it mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) protection: i32,
    pub(crate) fork: ForkAs,
    pub(crate) access: Access,
}

impl Mapping {
    /// As mmap(2) leaves it.
    pub(crate) const fn new(protection: i32) -> Self {
        Self { protection, fork: ForkAs::Copy, access: Access::Normal }
    }
}

/// What a part of the far area is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Far memory that the program mapped.
    Far(Mapping),
    /// A mapping of another kind (a file, shared or executable memory) that the program put there by MAP_FIXED.
    Foreign,
    /// Far memory of this library's own heap.
    Heap,
    /// Pages of a block of the heap that are local until it is freed.
    HeapLocal,
}

impl Kind {
    /// Whether the kernel has it, and not the pager.
    fn is_local(self) -> bool {
        matches!(self, Self::Foreign | Self::HeapLocal)
    }
}

/// The far area. Everything not free is in `owned`.
#[derive(Debug)]
pub(crate) struct Space {
    free: FreeRanges,
    owned: RangeMap<Kind>,
}

/// Taken after the heap's lock, before the pager's.
pub(crate) static SPACE: Locked<Space> =
    Locked::new(Space { free: FreeRanges::new(), owned: RangeMap::new() });

/// Raw mremap of something that is not far memory.
pub(crate) struct Move {
    pub(crate) old: usize,
    pub(crate) old_bytes: usize,
    pub(crate) new_bytes: usize,
    pub(crate) flags: i32,
    pub(crate) new: usize,
}

impl Space {
    pub(crate) fn set_up(&mut self, area: &Range<usize>) {
        self.free.put(area.start, area.len());
    }

    /// Maps far memory wherever there is room. `bytes` are whole pages.
    pub(crate) fn map(
        &mut self,
        far: &dyn Far,
        bytes: usize,
        alignment: usize,
        protection: i32,
        kind: Kind,
    ) -> Result<usize, i32> {
        let address = self.free.take(bytes, alignment).ok_or_else(|| run::no_room(bytes))?;
        if let Err(errno) = far.map(address, bytes, protection) {
            self.free.put(address, bytes);
            return Err(errno);
        }
        if protection == libc::PROT_NONE {
            run::had_room(bytes);
        }
        self.owned.set(address, address + bytes, kind);
        Ok(address)
    }

    /// Whether all of the range is free.
    pub(crate) fn is_free(&self, address: usize, bytes: usize) -> bool {
        self.owned.last_piece(address, address + bytes).is_none()
    }

    fn has_heap(&self, address: usize, bytes: usize) -> bool {
        self.owned
            .pieces_back(address, address + bytes)
            .any(|piece| matches!(piece.kind, Kind::Heap | Kind::HeapLocal))
    }

    /// MAP_FIXED of private anonymous memory.
    pub(crate) fn map_at(
        &mut self,
        far: &dyn Far,
        address: usize,
        bytes: usize,
        protection: i32,
    ) -> Result<(), i32> {
        if self.has_heap(address, bytes) {
            return Err(libc::EINVAL);
        }
        far.map(address, bytes, protection)?;
        self.free.take_any(address, address + bytes);
        self.owned.set(address, address + bytes, Kind::Far(Mapping::new(protection)));
        Ok(())
    }

    /// MAP_FIXED of anything else: `place` makes the mapping.
    pub(crate) fn place_foreign(
        &mut self,
        far: &dyn Far,
        address: usize,
        bytes: usize,
        place: impl FnOnce() -> Result<usize, i32>,
    ) -> Result<usize, i32> {
        if self.has_heap(address, bytes) {
            return Err(libc::EINVAL);
        }
        // The pager must forget the pages before something else is there.
        far.unmap(address, bytes)?;
        match place() {
            Ok(placed) => {
                self.free.take_any(address, address + bytes);
                self.owned.set(address, address + bytes, Kind::Foreign);
                Ok(placed)
            }
            Err(errno) => {
                self.renew(far, address, bytes);
                Err(errno)
            }
        }
    }

    /// Where nothing came in the place of what was there: it is the program's all the same, as fresh memory.
    fn renew(&mut self, far: &dyn Far, address: usize, bytes: usize) {
        // The kernel may have unmapped the reservation before it refused. If it does not give it back, the addresses stay the program's.
        let reserved = far.unmap(address, bytes);
        for piece in self.owned.pieces(address, address + bytes) {
            let Kind::Far(Mapping { protection, .. }) = piece.kind else { continue };
            if reserved.and_then(|()| far.map(piece.start, piece.bytes(), protection)).is_err() {
                self.owned.set(piece.start, piece.end, Kind::Foreign);
            }
        }
    }

    /// munmap(2). Parts that are free already are skipped, as the kernel does.
    pub(crate) fn unmap(&mut self, far: &dyn Far, address: usize, bytes: usize) -> Result<(), i32> {
        if self.has_heap(address, bytes) {
            return Err(libc::EINVAL);
        }
        // One after the other: a program with too many mappings has no memory for a list of them.
        while let Some(piece) = self.owned.last_piece(address, address + bytes) {
            match piece.kind {
                Kind::Foreign => {
                    // SAFETY: the program gives up this mapping; the reservation takes its place in one step.
                    unsafe { sys::reserve(piece.start, piece.bytes()) }?;
                }
                _ => far.unmap(piece.start, piece.bytes())?,
            }
            self.owned.clear(piece.start, piece.end);
            self.free.put(piece.start, piece.bytes());
        }
        Ok(())
    }

    /// mprotect(2).
    pub(crate) fn protect(
        &mut self,
        far: &dyn Far,
        address: usize,
        bytes: usize,
        protection: i32,
    ) -> Result<(), i32> {
        let complete = self.owned.covers(address, address + bytes);
        for piece in self.owned.pieces(address, address + bytes) {
            match piece.kind {
                Kind::Foreign | Kind::HeapLocal => {
                    // SAFETY: a mapping of the program's, which asked for this.
                    unsafe { sys::mprotect(piece.start, piece.bytes(), protection) }?
                }
                Kind::Heap => far.protect(piece.start, piece.bytes(), protection)?,
                Kind::Far(mapping) => {
                    far.protect(piece.start, piece.bytes(), protection)?;
                    self.owned.set(piece.start, piece.end, Kind::Far(Mapping { protection, ..mapping }));
                }
            }
        }
        if complete { Ok(()) } else { Err(libc::ENOMEM) }
    }

    /// pkey_mprotect(2) with a key that the kernel takes: memory that gets another than its own is local from now on.
    pub(crate) fn protect_by_key(
        &mut self,
        far: &dyn Far,
        address: usize,
        bytes: usize,
        protection: i32,
        key: i32,
    ) -> Result<(), i32> {
        if key != 0 {
            self.make_local(far, address, bytes)?;
        }
        let complete = self.owned.covers(address, address + bytes);
        for piece in self.owned.pieces(address, address + bytes) {
            if piece.kind.is_local() {
                // SAFETY: a mapping of the program's, which asked for this.
                unsafe { sys::pkey_mprotect(piece.start, piece.bytes(), protection, key) }?;
            } else {
                self.protect(far, piece.start, piece.bytes(), protection)?;
            }
        }
        if complete { Ok(()) } else { Err(libc::ENOMEM) }
    }

    /// madvise(2).
    pub(crate) fn advise(
        &mut self,
        far: &dyn Far,
        address: usize,
        bytes: usize,
        advice: i32,
    ) -> Result<(), i32> {
        let complete = self.owned.covers(address, address + bytes);
        for piece in self.owned.pieces(address, address + bytes) {
            if piece.kind.is_local() {
                // SAFETY: a mapping of the program's, which asked for this.
                unsafe { sys::madvise(piece.start, piece.bytes(), advice) }?;
                continue;
            }
            self.advise_far(far, piece, advice)?;
        }
        if complete { Ok(()) } else { Err(libc::ENOMEM) }
    }

    /// These places, addresses and bytes, are going to be used, in this order. False, and nothing is done, when they are not all of them short and of far
    /// memory: the pages of such come many at a time, and are not only fetched but mapped.
    pub(crate) fn will_need_each(
        &self,
        far: &dyn Far,
        mut places: impl Iterator<Item = (usize, usize)> + Clone,
    ) -> bool {
        let is_far = |(address, bytes): (usize, usize)| {
            let piece = self.owned.at(address);
            (1..=NAMED_BYTES_MAX).contains(&bytes)
                && address.is_multiple_of(PAGE_BYTES)
                && piece.is_some_and(|piece| !piece.kind.is_local() && piece.end - address >= bytes)
        };
        if !places.clone().all(is_far) {
            return false;
        }
        far.will_need_each(&mut places);
        true
    }

    fn advise_far(&mut self, far: &dyn Far, piece: Piece<Kind>, advice: i32) -> Result<(), i32> {
        let fork = match advice {
            libc::MADV_DONTNEED | MADV_DONTNEED_LOCKED | libc::MADV_FREE => {
                return far.discard(piece.start, piece.bytes());
            }
            libc::MADV_WILLNEED | libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE => {
                far.will_need(piece.start, piece.bytes());
                return Ok(());
            }
            libc::MADV_NORMAL => return self.hint(far, piece, Access::Normal),
            libc::MADV_RANDOM => return self.hint(far, piece, Access::Random),
            libc::MADV_SEQUENTIAL => return self.hint(far, piece, Access::Sequential),
            libc::MADV_PAGEOUT => {
                far.page_out(piece.start, piece.bytes());
                return Ok(());
            }
            libc::MADV_MERGEABLE
            | libc::MADV_UNMERGEABLE
            | libc::MADV_HUGEPAGE
            | libc::MADV_NOHUGEPAGE
            | libc::MADV_DONTDUMP
            | libc::MADV_DODUMP
            | libc::MADV_COLD
            | MADV_COLLAPSE => return Ok(()),
            libc::MADV_DOFORK | libc::MADV_KEEPONFORK => ForkAs::Copy,
            libc::MADV_DONTFORK => ForkAs::Nothing,
            libc::MADV_WIPEONFORK => ForkAs::Zero,
            libc::MADV_HWPOISON => return Err(libc::EPERM),
            // MADV_REMOVE is for shared memory; guard pages are what kernels before 6.13 refuse like this.
            _ => return Err(libc::EINVAL),
        };
        if let Kind::Far(mapping) = piece.kind {
            self.owned.set(piece.start, piece.end, Kind::Far(Mapping { fork, ..mapping }));
        }
        Ok(())
    }

    /// How a piece is going to be used. Blocks of the heap have several owners, one after the other and beside each other.
    fn hint(&mut self, far: &dyn Far, piece: Piece<Kind>, access: Access) -> Result<(), i32> {
        let Kind::Far(mapping) = piece.kind else { return Ok(()) };
        if mapping.access != access && (access == Access::Normal || self.owned.len() < HINTED_MAX) {
            far.advise(piece.start, piece.bytes(), access);
            self.owned.set(piece.start, piece.end, Kind::Far(Mapping { access, ..mapping }));
        }
        Ok(())
    }

    /// Makes the far memory of a range local, for good: the kernel or another pager of the program's will keep its pages.
    pub(crate) fn make_local(&mut self, far: &dyn Far, address: usize, bytes: usize) -> Result<(), i32> {
        if self.has_heap(address, bytes) {
            return Err(libc::EINVAL);
        }
        for piece in self.owned.pieces(address, address + bytes) {
            let Kind::Far(Mapping { protection, fork, .. }) = piece.kind else { continue };
            far.make_local(piece.start, piece.bytes(), protection)?;
            self.owned.set(piece.start, piece.end, Kind::Foreign);
            let advice = match fork {
                ForkAs::Copy => continue,
                ForkAs::Nothing => libc::MADV_DONTFORK,
                ForkAs::Zero => libc::MADV_WIPEONFORK,
            };
            // SAFETY: a mapping of the program's, which asked for this before.
            unsafe { sys::madvise(piece.start, piece.bytes(), advice) }?;
        }
        Ok(())
    }

    /// The same for pages of one block of the heap.
    pub(crate) fn make_block_local(
        &mut self,
        far: &dyn Far,
        address: usize,
        bytes: usize,
    ) -> Result<(), i32> {
        for piece in self.owned.pieces(address, address + bytes) {
            if piece.kind == Kind::Heap {
                far.make_local(piece.start, piece.bytes(), libc::PROT_READ | libc::PROT_WRITE)?;
                self.owned.set(piece.start, piece.end, Kind::HeapLocal);
            }
        }
        Ok(())
    }

    /// What is local of a block of the heap is far again, and reads zero.
    pub(crate) fn make_block_far(&mut self, far: &dyn Far, address: usize, bytes: usize) -> Result<(), i32> {
        for piece in self.owned.pieces(address, address + bytes) {
            if piece.kind == Kind::HeapLocal {
                // SAFETY: the program gives this memory up; the reservation takes its place in one step.
                unsafe { sys::reserve(piece.start, piece.bytes()) }?;
                far.map(piece.start, piece.bytes(), libc::PROT_READ | libc::PROT_WRITE)?;
                self.owned.set(piece.start, piece.end, Kind::Heap);
            }
        }
        Ok(())
    }

    /// In a forked child, once the pager serves it.
    pub(crate) fn after_fork(&mut self, far: &dyn Far) -> Result<(), i32> {
        let pieces: Vec<_> = self
            .owned
            .iter()
            .filter(|piece| {
                matches!(piece.kind, Kind::Far(Mapping { fork: ForkAs::Nothing | ForkAs::Zero, .. }))
            })
            .collect();
        for piece in pieces {
            match piece.kind {
                Kind::Far(Mapping { fork: ForkAs::Nothing, .. }) => {
                    self.unmap(far, piece.start, piece.bytes())?
                }
                _ => far.discard(piece.start, piece.bytes())?,
            }
        }
        Ok(())
    }

    /// mremap(2) of a range that lies in the area. Sizes are whole pages and above 0.
    pub(crate) fn remap(&mut self, far: &dyn Far, call: Move) -> Result<usize, i32> {
        let Move { old, old_bytes, new_bytes, flags, .. } = call;
        let Some(piece) = self.owned.at(old) else { return Err(libc::EFAULT) };
        let mapping = match piece.kind {
            _ if piece.end < old + old_bytes => return Err(libc::EFAULT),
            Kind::Heap | Kind::HeapLocal => return Err(libc::EFAULT),
            Kind::Foreign => return self.remap_foreign(far, call),
            Kind::Far(mapping) => mapping,
        };
        let keep = flags & libc::MREMAP_DONTUNMAP != 0;
        if flags & libc::MREMAP_FIXED == 0 && !keep {
            if new_bytes <= old_bytes {
                if new_bytes < old_bytes {
                    self.unmap(far, old + new_bytes, old_bytes - new_bytes)?;
                }
                return Ok(old);
            }
            let more = new_bytes - old_bytes;
            if self.free.take_at(old + old_bytes, more) {
                if let Err(errno) = far.map(old + old_bytes, more, mapping.protection) {
                    self.free.put(old + old_bytes, more);
                    return Err(errno);
                }
                self.renew_hint(far, old + old_bytes, more, mapping);
                self.owned.set(old + old_bytes, old + new_bytes, Kind::Far(mapping));
                return Ok(old);
            }
        }
        if flags & libc::MREMAP_MAYMOVE == 0 {
            return Err(libc::ENOMEM);
        }
        if keep && old_bytes != new_bytes {
            return Err(libc::EINVAL);
        }
        self.move_far(far, call, mapping)
    }

    /// Memory that has come to a mapping is used as the rest of it.
    fn renew_hint(&self, far: &dyn Far, address: usize, bytes: usize, mapping: Mapping) {
        if mapping.access != Access::Normal && bytes > 0 {
            far.advise(address, bytes, mapping.access);
        }
    }

    fn move_far(&mut self, far: &dyn Far, call: Move, mapping: Mapping) -> Result<usize, i32> {
        let Move { old, old_bytes, new_bytes, flags, new } = call;
        let protection = mapping.protection;
        let kept = old_bytes.min(new_bytes);
        // Mapped writable first, so that pages can be moved there whatever the program's protection is.
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        let address = if flags & libc::MREMAP_FIXED == 0 {
            self.map(far, new_bytes, PAGE_BYTES, writable, Kind::Far(mapping))?
        } else {
            self.map_at(far, new, new_bytes, writable)?;
            self.owned.set(new, new + new_bytes, Kind::Far(mapping));
            new
        };
        if let Err(errno) = far.relocate(old, address, kept) {
            // All of it is where it was.
            self.unmap(far, address, new_bytes)?;
            return Err(errno);
        }
        // The kernel may refuse what follows to a program with too many mappings. Nothing may be lost of what has moved.
        if protection != writable
            && let Err(errno) = far.protect(address, new_bytes, protection)
            && far.relocate(address, old, kept).is_ok()
        {
            self.unmap(far, address, new_bytes)?;
            return Err(errno);
        }
        self.renew_hint(far, address, new_bytes, mapping);
        if flags & libc::MREMAP_DONTUNMAP == 0 {
            // If it stays, it is empty.
            let _ = self.unmap(far, old, old_bytes);
        } else {
            self.renew_hint(far, old, old_bytes, mapping);
        }
        Ok(address)
    }

    /// mremap(2) of a mapping that is not far but lies in the area.
    fn remap_foreign(&mut self, far: &dyn Far, call: Move) -> Result<usize, i32> {
        let Move { old, old_bytes, new_bytes, flags, new } = call;
        if flags & (libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) == 0 {
            if new_bytes <= old_bytes {
                if new_bytes < old_bytes {
                    self.unmap(far, old + new_bytes, old_bytes - new_bytes)?;
                }
                return Ok(old);
            }
            if flags & libc::MREMAP_MAYMOVE == 0 {
                return Err(libc::ENOMEM);
            }
        }
        // SAFETY: a mapping of the program's, which asked for this; `new` is outside the area, or room is made for it.
        let move_it = || unsafe { sys::mremap(old, old_bytes, new_bytes, flags, new) };
        let moved = if flags & libc::MREMAP_FIXED != 0 && far.area().contains(&new) {
            self.place_foreign(far, new, new_bytes, move_it)?
        } else {
            move_it()?
        };
        if flags & libc::MREMAP_DONTUNMAP == 0 && moved != old {
            let fixed =
                libc::MAP_FIXED_NOREPLACE | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: nothing is replaced. If another thread's mapping got there first, the addresses stay lost to us.
            if unsafe { sys::mmap(old, old_bytes, libc::PROT_NONE, fixed, -1, 0) } == Ok(old) {
                self.owned.clear(old, old + old_bytes);
                self.free.put(old, old_bytes);
            }
        }
        Ok(moved)
    }
}

/// With so many pieces nothing more is remembered of how they are used.
const HINTED_MAX: usize = 1 << 15;
/// Longer ranges are read ahead, not mapped.
const NAMED_BYTES_MAX: usize = 64 << 10;
/// Linux 5.18.
const MADV_DONTNEED_LOCKED: i32 = 24;
/// Linux 6.1.
const MADV_COLLAPSE: i32 = 25;
