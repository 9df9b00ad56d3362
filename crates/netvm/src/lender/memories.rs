//! The lent memory: one range of addresses, of a common file and of the files of leases on this host (docs/design/nearby.md).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Weak};

use netvm_core::slab::datagram::UNIT_BYTES;
use netvm_core::slab::{LeaseId, SlabError, Slabs};
use netvm_sys::bpf::Pages;
use netvm_sys::mapping::Mapping;
use netvm_sys::mark::{self, MARK_BYTES};
use netvm_sys::memfd::Memfd;
use netvm_sys::shared::SharedSlice;

use super::packing::{self, Packing};
use super::protocol::{Class, Runs};
use super::server::Compress;
use crate::error::{Error, LenderLimit, Result};

/// What lent memory is counted in.
const PAGE_BYTES: u64 = 4096;

pub(super) struct Memories {
    pub(super) slabs: Slabs,
    common: Memfd,
    /// It is on a disk: room is taken slab by slab, and nobody else is given a file.
    pub(super) on_disk: bool,
    /// Why there was no slab when one was last asked for.
    pub(super) limit: LenderLimit,
    /// What is lent is packed into the common file, not mapped from it.
    packing: Option<RefCell<Packing>>,
    /// All slabs, each from the file it is in, at its place in there.
    mapping: Mapping,
    hugepages: bool,
    /// What leases have been given.
    files: BTreeMap<LeaseId, Arc<Memfd>>,
    /// Who is not given files of others any more.
    renounced: BTreeSet<LeaseId>,
    /// Files of leases that have been ended though their process may be there: it may be about to write where it had begun to.
    doubted: Vec<Weak<Memfd>>,
    /// Slabs that are not in the common file.
    owners: BTreeMap<u32, Arc<Memfd>>,
    /// So many bytes of the slab that is to be cleared next have been.
    cleared_bytes: u64,
    /// Units of slabs that the kernel reads, too ([datagrams](../../../../docs/design/datagrams.md)): mapped in the place of the common file.
    units: BTreeMap<Unit, Arc<Pages>>,
    /// Most of them: each has a descriptor, and two mappings more than there were.
    units_max: usize,
}

/// A slab, and which of its units.
pub(super) type Unit = (u32, u32);

impl Memories {
    /// What it lends.
    pub(super) fn class(&self) -> Class {
        match self.on_disk {
            true => Class::File,
            false if self.packing.is_some() => Class::Packed,
            false => Class::Remote,
        }
    }

    /// Reserves `count` slabs of `slab_bytes` each, in memory or on the file system of `folder`.
    pub(super) fn new(count: u32, slab_bytes: u64, hugepages: bool, folder: Option<&Path>) -> Result<Self> {
        let bytes = u64::from(count) * slab_bytes;
        let reserve = |error: std::io::Error| {
            Error::Other(format!(
                "cannot reserve {} MiB of addresses to lend ({error}); check `ulimit -v` and vm.overcommit_memory, or lend less",
                bytes >> 20
            ))
        };
        let common = match folder {
            None => Memfd::new(c"netvm-lender", bytes).map_err(reserve)?,
            Some(folder) => on_disk(folder, bytes, slab_bytes).map_err(|error| {
                Error::Other(format!("cannot lend from a file in {}: {error}", folder.display()))
            })?,
        };
        let mapping = match folder {
            None => Mapping::of_memfd(&common),
            Some(_) => Mapping::of_disk(&common),
        };
        let mapping = mapping.map_err(reserve)?;
        if hugepages {
            mapping.advise_huge().map_err(|error| Error::system("use huge pages", &error))?;
        }
        Ok(Self {
            slabs: Slabs::new(count, slab_bytes),
            common,
            on_disk: folder.is_some(),
            limit: LenderLimit::Size,
            packing: None,
            mapping,
            hugepages,
            files: BTreeMap::new(),
            renounced: BTreeSet::new(),
            doubted: Vec::new(),
            owners: BTreeMap::new(),
            cleared_bytes: 0,
            units: BTreeMap::new(),
            units_max: 0,
        })
    }

    /// Slabs of `slab_bytes` each, as many as `compress` says, packed into `size_bytes` of memory.
    pub(super) fn packed(size_bytes: u64, slab_bytes: u64, compress: &Compress) -> Result<Self> {
        let plan = packing::plan(size_bytes, slab_bytes, compress)?;
        let count = u64::from(plan.pages) * PAGE_BYTES / slab_bytes;
        // One mapping of all frames, which is not cut into slabs.
        let mut memories = Self::new(plan.frames, PAGE_BYTES, false, None)?;
        let frames = memories.mapping.shared();
        let packing = Packing::new(plan, slab_bytes, frames, compress.overflow.as_deref())?;
        memories.slabs = Slabs::new(u32::try_from(count).unwrap_or(u32::MAX), slab_bytes);
        memories.packing = Some(RefCell::new(packing));
        Ok(memories)
    }

    /// What packs, if anything does: then no slab is anywhere as a whole.
    pub(super) fn packing(&self) -> Option<&RefCell<Packing>> {
        self.packing.as_ref()
    }

    /// Pages that are lent, or were and still take room.
    fn lent_pages(&self) -> u64 {
        (self.slabs.used_bytes() + self.slabs.uncleared_bytes()) / PAGE_BYTES
    }

    /// Bytes that are to be had, since what is lent does not shrink enough.
    pub(super) fn missing_bytes(&self) -> u64 {
        self.packing.as_ref().map_or(0, |packing| packing.borrow_mut().missing_bytes(self.lent_pages()))
    }

    /// Most memory that is used if that is less than what is lent, and what it has no room for.
    pub(super) fn packed_bytes(&self) -> (u64, u64) {
        let spilled = |packing: &RefCell<Packing>| (self.common.len(), packing.borrow().spilled_bytes());
        self.packing.as_ref().map_or((0, 0), spilled)
    }

    /// To be called now and then.
    pub(super) fn tick(&mut self) {
        if let Some(packing) = &self.packing {
            packing.borrow_mut().tick(&self.common, self.lent_pages());
        }
    }

    pub(super) fn slab(&self, slab: u32, offset: u64, bytes: u32) -> Option<SharedSlice> {
        if self.packing.is_some() {
            return None;
        }
        let start = u64::from(slab).checked_mul(self.slabs.slab_bytes())?.checked_add(offset)?;
        self.mapping.shared().sub(usize::try_from(start).ok()?, bytes as usize)
    }

    /// Bytes of memory in use for what is lent.
    pub(super) fn resident_bytes(&self) -> u64 {
        let mut files: Vec<&Arc<Memfd>> = self.files.values().chain(self.owners.values()).collect();
        files.sort_by_key(|file| Arc::as_ptr(file));
        files.dedup_by_key(|file| Arc::as_ptr(file));
        let files =
            files.into_iter().map(|file| file.resident_bytes().unwrap_or(0).saturating_sub(MARK_BYTES));
        let units: u64 = self.units.values().map(|pages| pages.bytes()).sum();
        self.common.resident_bytes().unwrap_or(0) + files.sum::<u64>() + units
    }

    /// Whether the kernel may read what is lent here: it is memory, as it is, in pages of the usual size, and in slabs that are not too many.
    pub(super) fn may_have_units(&self) -> bool {
        let is_memory = !self.on_disk && self.packing.is_none() && !self.hugepages;
        is_memory && self.slabs.slab_bytes() >= UNIT_BYTES
    }

    /// From now on the kernel may have units: as many as leave half of the descriptors and mappings that there may be to others.
    pub(super) fn allow_units(&mut self) {
        let descriptors_max = netvm_sys::thread::descriptors_max();
        let mappings_max = std::fs::read_to_string("/proc/sys/vm/max_map_count");
        let mappings_max = mappings_max.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(65_530);
        self.units_max = (descriptors_max / 2).min(mappings_max / 4);
    }

    /// The pages of a unit for the kernel to read, where it is moved to if it has none. `None` where that is not possible.
    ///
    /// # Errors
    /// The kernel has no memory for that, or no descriptor.
    pub(super) fn unit(&mut self, unit: Unit) -> std::io::Result<Option<Arc<Pages>>> {
        let (slab, index) = unit;
        if let Some(pages) = self.units.get(&unit).filter(|_| !self.owners.contains_key(&slab)) {
            return Ok(Some(Arc::clone(pages)));
        }
        let (offset, bytes) = self.unit_range(index);
        let has_room = self.units.len() < self.units_max;
        if !self.may_have_units() || !has_room || bytes == 0 || self.owners.contains_key(&slab) {
            return Ok(None);
        }
        let pages = Arc::new(Pages::new((bytes / PAGE_BYTES) as u32)?);
        let start = u64::from(slab) * self.slabs.slab_bytes() + offset;
        self.mapping.replace_with_pages(start, &pages, |memory| self.common.read_at(start, &[memory]))?;
        let _ = self.common.punch_hole(start, bytes);
        self.units.insert(unit, Arc::clone(&pages));
        Ok(Some(pages))
    }

    /// Most units that there may be.
    pub(super) fn units_max(&self) -> usize {
        self.units_max
    }

    /// Where in a slab a unit begins, and how many bytes it has; none beyond the end.
    fn unit_range(&self, index: u32) -> (u64, u64) {
        let offset = u64::from(index) * UNIT_BYTES;
        (offset, self.slabs.slab_bytes().saturating_sub(offset).min(UNIT_BYTES))
    }

    /// The kernel has no business any more in units of which nothing is lent in this range, or all is discarded: those.
    fn end_units(&mut self, slab: u32, offset: u64, bytes: u64, is_lent: bool) -> Vec<Unit> {
        let (first, end) = (offset / UNIT_BYTES, (offset + bytes).div_ceil(UNIT_BYTES));
        let touched: Vec<Unit> =
            self.units.range((slab, first as u32)..(slab, end as u32)).map(|(&unit, _)| unit).collect();
        let mut ended = Vec::new();
        for unit in touched {
            let (start, len) = self.unit_range(unit.1);
            let at = u64::from(slab) * self.slabs.slab_bytes() + start;
            let is_whole = !is_lent || (offset <= start && start + len <= offset + bytes);
            // The file has nothing there.
            if is_whole && self.mapping.replace(at, len, &self.common, self.hugepages).is_ok() {
                self.units.remove(&unit);
                ended.push(unit);
                continue;
            }
            let (from, to) = (offset.max(start), (offset + bytes).min(start + len));
            if let Some(memory) = self.slab(slab, from, (to - from) as u32) {
                memory.fill(0);
            }
        }
        ended
    }

    /// A file of its own for the lease: slabs that it borrows from now on are in there, and behind all slabs a mark that is there as long as the
    /// lease is.
    pub(super) fn give_file(&mut self, lease: LeaseId) -> std::io::Result<Arc<Memfd>> {
        let file = Arc::new(Memfd::sealed(c"netvm-lease", self.slabs.size_bytes() + MARK_BYTES)?);
        mark::set(&file, self.slabs.size_bytes())?;
        self.files.insert(lease, Arc::clone(&file));
        Ok(file)
    }

    /// A new lease that holds whatever `lease` holds.
    pub(super) fn fork(&mut self, lease: LeaseId) -> Result<LeaseId, SlabError> {
        let fork = self.slabs.fork(lease)?;
        if self.renounced.contains(&lease) {
            self.renounced.insert(fork);
        }
        Ok(fork)
    }

    /// Neither this lease nor a fork of it is given files of others any more.
    pub(super) fn renounce(&mut self, lease: LeaseId) {
        self.renounced.insert(lease);
    }

    /// The files of other leases in which slabs of this one are, with the slabs that are in each. Some have renounced them.
    pub(super) fn inherited(&self, lease: LeaseId, files_max: usize) -> Vec<(Arc<Memfd>, Runs)> {
        let files_max = if self.renounced.contains(&lease) { 0 } else { files_max };
        let own = self.files.get(&lease);
        let mut files: Vec<(Arc<Memfd>, Runs)> = Vec::new();
        let of_others = self.owners.iter().filter(|&(&slab, owner)| {
            !own.is_some_and(|own| Arc::ptr_eq(own, owner)) && self.slabs.holds(lease, slab)
        });
        for (&slab, owner) in of_others {
            let file = files.iter().position(|(file, _)| Arc::ptr_eq(file, owner)).unwrap_or(files.len());
            if file == files_max {
                // Over the session.
                continue;
            }
            if file == files.len() {
                files.push((Arc::clone(owner), Vec::new()));
            }
            match files[file].1.last_mut() {
                Some((first, count)) if *first + *count == slab => *count += 1,
                _ => files[file].1.push((slab, 1)),
            }
        }
        files
    }

    /// The lease is about to be ended without its process having said that it goes.
    pub(super) fn doubt(&mut self, lease: LeaseId) {
        self.doubted.retain(|file| file.strong_count() > 0);
        self.doubted.extend(self.files.get(&lease).map(Arc::downgrade));
    }

    /// Whether the lease holds the slab, and nobody else does, or writes to it.
    ///
    /// # Errors
    /// [`SlabError::NotHeld`].
    pub(super) fn is_sole(&self, lease: LeaseId, slab: u32) -> Result<bool, SlabError> {
        let is_doubted = self.owners.get(&slab).is_some_and(|owner| {
            self.doubted.iter().any(|file| std::ptr::eq(file.as_ptr(), Arc::as_ptr(owner)))
        });
        Ok(self.slabs.sole_holder(lease, slab)? && !is_doubted)
    }

    pub(super) fn has_file(&self, lease: LeaseId) -> bool {
        self.files.contains_key(&lease)
    }

    /// Takes a free slab, which reads as zeros. The borrower has asked everybody else if it is `pressed`.
    pub(super) fn borrow(&mut self, lease: LeaseId, pressed: bool) -> Result<u32, SlabError> {
        if !self.slabs.has_free() {
            self.clear_next();
        }
        let borrowed = self.slabs.borrow(lease);
        if !pressed || borrowed.is_err() {
            self.limit = LenderLimit::Size;
        }
        let slab = borrowed?;
        if let Some(packing) = &self.packing {
            let mut admitted = packing.borrow_mut().admit(self.lent_pages(), pressed);
            while admitted.is_err() && self.clear_next() {
                let Some(packing) = &self.packing else { break };
                admitted = packing.borrow_mut().admit(self.lent_pages(), pressed);
            }
            if let Err(limit) = admitted {
                self.limit = limit;
                self.slabs.give_back(lease, slab)?;
                return Err(SlabError::Full);
            }
            return Ok(slab);
        }
        if self.on_disk {
            // Now, while it can be refused: a write that finds no room would be lost.
            let (start, bytes) = (u64::from(slab) * self.slabs.slab_bytes(), self.slabs.slab_bytes());
            let mut provided = self.common.provide(start, bytes);
            // What has come back takes its room until it is cleared.
            while provided.is_err() && self.clear_next() {
                provided = self.common.provide(start, bytes);
            }
            if provided.is_err() {
                self.limit = LenderLimit::Disk;
                self.slabs.give_back(lease, slab)?;
                return Err(SlabError::Full);
            }
        }
        let file = self.files.get(&lease).cloned();
        if self.place(slab, file) {
            return Ok(slab);
        }
        self.slabs.give_back(lease, slab)?;
        Err(SlabError::Full)
    }

    /// Has the slab in `file`, or in the common one. False when the kernel has no mapping for that.
    fn place(&mut self, slab: u32, file: Option<Arc<Memfd>>) -> bool {
        let is_same = match (&file, self.owners.get(&slab)) {
            (Some(file), Some(owner)) => Arc::ptr_eq(file, owner),
            (None, None) => true,
            _ => false,
        };
        if is_same {
            return true;
        }
        let (start, bytes) = (u64::from(slab) * self.slabs.slab_bytes(), self.slabs.slab_bytes());
        let target = file.as_deref().unwrap_or(&self.common);
        if self.mapping.replace(start, bytes, target, self.hugepages).is_err() {
            return false;
        }
        // What could not be put back before.
        self.units.retain(|&(of, _), _| of != slab);
        match file {
            Some(file) => self.owners.insert(slab, file),
            None => self.owners.remove(&slab),
        };
        true
    }

    /// Ends a lease.
    pub(super) fn close(&mut self, lease: LeaseId) {
        if let Some(file) = self.files.remove(&lease) {
            // First: who reads it by itself looks at the mark afterwards.
            let _ = mark::clear(&file, self.slabs.size_bytes());
        }
        self.renounced.remove(&lease);
        self.slabs.close(lease);
    }

    /// Makes the next `bytes` bytes at most that nobody holds any more read as zeros, and gives their memory back. What gave memory for a while
    /// takes a while to be cleared, in which others would wait, if all was done at once.
    pub(super) fn clear_some(&mut self, bytes: u64) {
        let Some(slab) = self.slabs.uncleared() else { return };
        let (from, slab_bytes) = (self.cleared_bytes, self.slabs.slab_bytes());
        let bytes = bytes.min(slab_bytes - from);
        // Who knew of them has been told when nobody held the slab any more.
        self.empty(slab, from, bytes, false);
        self.cleared_bytes = from + bytes;
        if self.cleared_bytes < slab_bytes {
            return;
        }
        self.cleared_bytes = 0;
        // Who had the file may write there still. If this fails it is done before the slab is lent again.
        self.place(slab, None);
        self.slabs.cleared();
    }

    /// Clears all of the next slab; false when there is none.
    fn clear_next(&mut self) -> bool {
        let has_any = self.slabs.uncleared().is_some();
        self.clear_some(self.slabs.slab_bytes());
        has_any
    }

    /// Makes a part of a slab that is lent, or all of it, read as zeros and gives its memory back.
    /// The units that the kernel had and has no more.
    pub(super) fn discard(&mut self, slab: u32, offset: u64, bytes: u64) -> Vec<Unit> {
        self.empty(slab, offset, bytes, true)
    }

    fn empty(&mut self, slab: u32, offset: u64, bytes: u64, is_lent: bool) -> Vec<Unit> {
        let ended = self.end_units(slab, offset, bytes, is_lent);
        self.empty_file(slab, offset, bytes, is_lent);
        ended
    }

    fn empty_file(&self, slab: u32, offset: u64, bytes: u64, is_lent: bool) {
        if let Some(packing) = &self.packing {
            return packing.borrow_mut().discard(slab, offset, bytes, &self.common);
        }
        let file = self.owners.get(&slab).map_or(&self.common, |file| file);
        let start = u64::from(slab) * self.slabs.slab_bytes() + offset;
        if file.punch_hole(start, bytes).is_ok() {
            if self.on_disk && is_lent {
                // Room for what is written there next. If there is none any more, that write fails, and the session with it.
                let _ = file.provide(start, bytes);
            }
        } else {
            // Never another borrower's data, whatever it costs.
            if let Some(memory) = self.slab(slab, offset, bytes as u32) {
                memory.fill(0);
            }
        }
    }

    /// Allocates a part of a slab that is in the lease's own file; false when it is not, or there is no memory.
    pub(super) fn provide(&self, lease: LeaseId, slab: u32, offset: u64, bytes: u64) -> bool {
        match (self.files.get(&lease), self.owners.get(&slab)) {
            (Some(file), Some(owner)) if Arc::ptr_eq(file, owner) => {
                file.provide(u64::from(slab) * self.slabs.slab_bytes() + offset, bytes).is_ok()
            }
            _ => false,
        }
    }
}

/// A file on a file system that can reserve room, give it back, and has some for the first slab.
fn on_disk(folder: &Path, bytes: u64, slab_bytes: u64) -> std::io::Result<Memfd> {
    let file = Memfd::in_folder(folder, bytes)?;
    file.provide(0, slab_bytes)?;
    file.punch_hole(0, slab_bytes)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slab_is_where_its_lease_looks_and_nobody_else() {
        let mut memories = Memories::new(4, 8192, false, None).unwrap();
        let [near, far, fork] = [(); 3].map(|()| memories.slabs.open().unwrap());
        let file = memories.give_file(near).unwrap();
        let (mine, theirs) = (memories.borrow(near, false).unwrap(), memories.borrow(far, false).unwrap());
        let write = |memories: &Memories, slab| memories.slab(slab, 0, 4096).unwrap().fill(7);
        write(&memories, mine);
        write(&memories, theirs);
        assert!(!file.is_hole(u64::from(mine) * 8192) && file.is_hole(u64::from(theirs) * 8192));
        assert_eq!(memories.resident_bytes(), 8192);
        assert!(memories.provide(near, mine, 4096, 4096) && !memories.provide(near, theirs, 0, 4096));
        assert!(!memories.provide(far, theirs, 0, 4096) && !memories.provide(far, mine, 0, 4096));
        assert_eq!(memories.resident_bytes(), 3 * 4096);
        memories.discard(mine, 0, 8192);
        assert_eq!(memories.resident_bytes(), 4096);
        write(&memories, mine);
        // Given back, it is another's, and the file that the first one still has is not where it is.
        assert_eq!(memories.slabs.give_back(near, mine), Ok(true));
        memories.clear_next();
        assert!(file.is_hole(u64::from(mine) * 8192));
        assert_eq!(memories.borrow(fork, false), Ok(mine));
        write(&memories, mine);
        assert!(file.is_hole(u64::from(mine) * 8192));
        memories.close(near);
        memories.close(far);
        memories.close(fork);
        while memories.clear_next() {}
        assert_eq!((memories.resident_bytes(), memories.owners.len(), memories.files.len()), (0, 0, 0));
    }

    #[test]
    fn slabs_on_a_disk_take_room_while_they_are_lent() {
        let folder = std::env::temp_dir();
        let mut memories = Memories::new(4, 1 << 20, false, Some(&folder)).unwrap();
        assert_eq!(memories.resident_bytes(), 0);
        let lease = memories.slabs.open().unwrap();
        let slab = memories.borrow(lease, false).unwrap();
        let resident = memories.resident_bytes();
        assert!(resident >= 1 << 20);
        memories.slab(slab, 0, 8192).unwrap().fill(7);
        memories.discard(slab, 0, 4096);
        let bytes = |at| memories.slab(slab, at, 1).unwrap().to_vec();
        assert_eq!((bytes(0), bytes(4096), memories.resident_bytes()), (vec![0], vec![7], resident));
        memories.close(lease);
        memories.clear_next();
        assert_eq!(memories.resident_bytes(), 0);
        let lease = memories.slabs.open().unwrap();
        assert_eq!(memories.borrow(lease, false), Ok(slab));
        assert_eq!(memories.slab(slab, 4096, 1).unwrap().to_vec(), [0], "another borrower's");
        assert!(Memories::new(4, 4096, false, Some(Path::new("/nowhere/at/all"))).is_err());
    }

    #[test]
    fn a_slab_outlives_the_lease_whose_file_it_is_in() {
        let mut memories = Memories::new(2, 4096, false, None).unwrap();
        let parent = memories.slabs.open().unwrap();
        memories.give_file(parent).unwrap();
        let slab = memories.borrow(parent, false).unwrap();
        memories.slab(slab, 0, 4096).unwrap().fill(3);
        let child = memories.fork(parent).unwrap();
        let own = memories.give_file(child).unwrap();
        assert!(!memories.provide(child, slab, 0, 4096), "in its parent's file");
        let later = memories.borrow(child, false).unwrap();
        let inherited = memories.inherited(child, 1);
        assert!(matches!(&inherited[..], [(file, runs)] if !Arc::ptr_eq(file, &own) && *runs == [(slab, 1)]));
        assert!(memories.inherited(child, 0).is_empty() && memories.inherited(parent, 1).is_empty());
        memories.renounce(child);
        let fork = memories.fork(child).unwrap();
        assert!(memories.inherited(child, 1).is_empty() && memories.inherited(fork, 2).is_empty());
        memories.close(fork);
        assert_eq!(memories.slabs.give_back(child, later), Ok(true));
        memories.clear_next();
        assert_eq!((memories.is_sole(child, slab), memories.is_sole(parent, slab)), (Ok(false), Ok(false)));
        let stopped = memories.slabs.open().unwrap();
        memories.give_file(stopped).unwrap();
        memories.doubt(stopped);
        memories.close(stopped);
        memories.doubt(parent);
        memories.close(parent);
        // It may be about to write there.
        assert_eq!((memories.is_sole(child, slab), memories.doubted.len()), (Ok(false), 1));
        memories.doubted.clear();
        assert_eq!(memories.is_sole(child, slab), Ok(true));
        assert_eq!(memories.slab(slab, 4095, 1).unwrap().to_vec(), [3]);
        assert_eq!(memories.resident_bytes(), 4096);
        memories.close(child);
        assert_eq!((memories.resident_bytes(), memories.slabs.used_bytes()), (4096, 0), "to be cleared");
        assert!(memories.clear_next() && !memories.clear_next());
        assert_eq!((memories.resident_bytes(), memories.owners.len(), memories.renounced.len()), (0, 0, 0));
    }
}
