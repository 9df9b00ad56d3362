//! Exported segments and who has them open.

use alloc::string::String;
use alloc::vec::Vec;

use crate::atomic::{Atomic, AtomicOp};
use crate::key::{Access, RemoteKey, Rights};
use crate::limits::{EXPORTS_MAX, IMPORTS_MAX, NAME_BYTES_MAX, NOTIFICATIONS_MAX};
use crate::wire::Status;

/// A segment in the table: its place and which use of the place it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentId {
    index: u32,
    generation: u32,
}

impl SegmentId {
    /// Its place in the table, for an array of the driver's.
    pub fn index(self) -> usize {
        self.index as usize
    }
}

#[derive(Debug)]
struct Entry {
    name: String,
    key: RemoteKey,
    rights: Rights,
    len: u64,
    notifications: u32,
    /// Nobody new imports it.
    withheld: bool,
}

/// Why a segment cannot be exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportError {
    /// The name is empty or too long.
    Name,
    /// The name is taken.
    Taken,
    /// More than 65536 notification numbers.
    Notifications,
    /// Too many segments.
    Full,
}

/// The segments that a node exports.
#[derive(Debug, Default)]
pub struct ExportTable {
    entries: Vec<(u32, Option<Entry>)>,
}

impl ExportTable {
    /// Exports `len` bytes under `name`, with so many notification numbers.
    ///
    /// # Errors
    /// See [`ExportError`].
    pub fn export(
        &mut self,
        name: &str,
        key: RemoteKey,
        rights: Rights,
        len: u64,
        notifications: u32,
    ) -> Result<SegmentId, ExportError> {
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(ExportError::Name);
        }
        if notifications > NOTIFICATIONS_MAX {
            return Err(ExportError::Notifications);
        }
        if self.entries.iter().any(|(_, entry)| entry.as_ref().is_some_and(|entry| entry.name == name)) {
            return Err(ExportError::Taken);
        }
        let free = self.entries.iter().position(|(_, entry)| entry.is_none());
        let index = match free {
            Some(index) => index,
            None if self.entries.len() < EXPORTS_MAX => {
                self.entries.push((0, None));
                self.entries.len() - 1
            }
            None => return Err(ExportError::Full),
        };
        let (generation, entry) = &mut self.entries[index];
        *generation += 1;
        *entry = Some(Entry { name: name.into(), key, rights, len, notifications, withheld: false });
        Ok(SegmentId { index: index as u32, generation: *generation })
    }

    /// Stops exporting; false when it was not exported any more.
    pub fn unexport(&mut self, id: SegmentId) -> bool {
        match self.entries.get_mut(id.index()) {
            Some((generation, entry)) if *generation == id.generation => entry.take().is_some(),
            _ => false,
        }
    }

    /// Whether from now on nobody imports it; whoever has it open keeps it, and nobody else gets its name.
    pub fn withhold(&mut self, id: SegmentId, withheld: bool) {
        if let Some((generation, Some(entry))) = self.entries.get_mut(id.index())
            && *generation == id.generation
        {
            entry.withheld = withheld;
        }
    }

    /// Whether it is exported.
    pub fn has(&self, id: SegmentId) -> bool {
        self.get(id).is_some()
    }

    /// The name of a segment that is still exported.
    pub fn name(&self, id: SegmentId) -> Option<&str> {
        self.get(id).map(|entry| entry.name.as_str())
    }

    fn get(&self, id: SegmentId) -> Option<&Entry> {
        let (generation, entry) = self.entries.get(id.index())?;
        if *generation == id.generation { entry.as_ref() } else { None }
    }

    fn find(&self, name: &str, key: &RemoteKey) -> Option<SegmentId> {
        let named = |(index, (generation, entry)): (usize, &(u32, Option<Entry>))| {
            let entry = entry.as_ref().filter(|entry| entry.name == name && !entry.withheld)?;
            let id = SegmentId { index: index as u32, generation: *generation };
            entry.key.matches(key).then_some(id)
        };
        self.entries.iter().enumerate().find_map(named)
    }
}

/// Bits of a handle that are its place. Above them is which use of the place it is: a request that comes late, over another rail, does not
/// reach the next one.
const PLACE_BITS: u32 = IMPORTS_MAX.ilog2();
/// Uses after which they are counted anew. The last one is left out: the highest handles are not of segments.
const USES: u32 = (1 << (u32::BITS - PLACE_BITS)) - 1;
const _: () = assert!(IMPORTS_MAX.is_power_of_two());

fn handle(place: usize, usage: u32) -> u32 {
    usage << PLACE_BITS | place as u32
}

/// What one session has imported. A handle is checked before each use, so unexporting takes effect at once.
#[derive(Debug, Default)]
pub struct ImportTable {
    /// With the number of the use.
    handles: Vec<(u32, Option<SegmentId>)>,
}

impl ImportTable {
    /// Opens a segment: its handle, length and rights.
    ///
    /// # Errors
    /// [`Status::NoSegment`] for a wrong name or key; [`Status::Full`].
    pub fn import(
        &mut self,
        exports: &ExportTable,
        name: &str,
        key: &RemoteKey,
    ) -> Result<(u32, u64, Rights), Status> {
        let id = exports.find(name, key).ok_or(Status::NoSegment)?;
        let entry = exports.get(id).ok_or(Status::NoSegment)?;
        let place = match self.handles.iter().position(|(_, id)| id.is_none()) {
            Some(free) => free,
            None if self.handles.len() < IMPORTS_MAX => {
                self.handles.push((0, None));
                self.handles.len() - 1
            }
            None => return Err(Status::Full),
        };
        let (usage, opened) = &mut self.handles[place];
        *opened = Some(id);
        Ok((handle(place, *usage), entry.len, entry.rights))
    }

    fn get(&self, handle: u32) -> Option<SegmentId> {
        let (usage, id) = self.handles.get(handle as usize % IMPORTS_MAX)?;
        id.filter(|_| handle >> PLACE_BITS == *usage)
    }

    /// Closes a handle.
    pub fn unimport(&mut self, handle: u32) {
        if self.get(handle).is_some() {
            let (usage, id) = &mut self.handles[handle as usize % IMPORTS_MAX];
            (*usage, *id) = ((*usage + 1) % USES, None);
        }
    }

    /// The segment behind a handle, if the access is allowed now.
    ///
    /// # Errors
    /// [`Status::NoHandle`], [`Status::NoRights`], [`Status::OutOfBounds`].
    pub fn check(
        &self,
        exports: &ExportTable,
        handle: u32,
        offset: u64,
        bytes: u32,
        access: Access,
    ) -> Result<SegmentId, Status> {
        let id = self.get(handle).ok_or(Status::NoHandle)?;
        let entry = exports.get(id).ok_or(Status::NoHandle)?;
        if !entry.rights.allow(access) {
            return Err(Status::NoRights);
        }
        let inside = offset.checked_add(u64::from(bytes)).is_some_and(|end| end <= entry.len);
        if inside { Ok(id) } else { Err(Status::OutOfBounds) }
    }

    /// The segment behind a handle, if this atomic is allowed there now.
    ///
    /// # Errors
    /// As [`ImportTable::check`]; [`Status::Misaligned`].
    pub fn check_atomic(
        &self,
        exports: &ExportTable,
        handle: u32,
        offset: u64,
        atomic: &Atomic,
    ) -> Result<SegmentId, Status> {
        let access = if atomic.op == AtomicOp::Load { Access::Read } else { Access::Write };
        let width = atomic.width as u32;
        let id = self.check(exports, handle, offset, width, access)?;
        if offset.is_multiple_of(u64::from(width)) { Ok(id) } else { Err(Status::Misaligned) }
    }

    /// The segment behind a handle and how many notification numbers it has; none when it was taken away.
    pub fn notifications(&self, exports: &ExportTable, handle: u32) -> Option<(SegmentId, u32)> {
        let id = self.get(handle)?;
        Some((id, exports.get(id)?.notifications))
    }

    /// All handles and what they stand for, exported still or not.
    pub fn handles(&self) -> impl Iterator<Item = (u32, SegmentId)> + '_ {
        let open =
            |(place, (usage, id)): (usize, &(u32, Option<SegmentId>))| Some((handle(place, *usage), (*id)?));
        self.handles.iter().enumerate().filter_map(open)
    }

    /// The handles that stand for `id`.
    pub fn handles_of(&self, id: SegmentId) -> impl Iterator<Item = u32> + '_ {
        self.handles().filter(move |&(_, other)| other == id).map(|(handle, _)| handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::atomic::Width;

    #[test]
    fn keys_rights_bounds_and_unexport() {
        let key = RemoteKey::from_bytes([1; 16]);
        let wrong = RemoteKey::from_bytes([2; 16]);
        let mut exports = ExportTable::default();
        let mut imports = ImportTable::default();
        let read_only = exports.export("ro", key, Rights::Read, 100, 3).unwrap();
        exports.export("rw", key, Rights::ReadWrite, u64::MAX, 0).unwrap();
        assert_eq!(exports.export("ro", key, Rights::Read, 1, 0), Err(ExportError::Taken));
        assert_eq!(exports.export("", key, Rights::Read, 1, 0), Err(ExportError::Name));
        assert_eq!(imports.import(&exports, "ro", &wrong), Err(Status::NoSegment));
        assert_eq!(imports.import(&exports, "no", &key), Err(Status::NoSegment));
        let (ro, len, rights) = imports.import(&exports, "ro", &key).unwrap();
        assert_eq!((len, rights), (100, Rights::Read));
        let (rw, ..) = imports.import(&exports, "rw", &key).unwrap();
        let check = |imports: &ImportTable, exports: &ExportTable, handle, offset, bytes, access| {
            imports.check(exports, handle, offset, bytes, access).map(|_| ())
        };
        assert_eq!(check(&imports, &exports, ro, 99, 1, Access::Read), Ok(()));
        assert_eq!(check(&imports, &exports, ro, 99, 2, Access::Read), Err(Status::OutOfBounds));
        assert_eq!(check(&imports, &exports, rw, u64::MAX, 2, Access::Read), Err(Status::OutOfBounds));
        assert_eq!(check(&imports, &exports, ro, 0, 1, Access::Write), Err(Status::NoRights));
        assert_eq!(check(&imports, &exports, 9, 0, 1, Access::Read), Err(Status::NoHandle));
        let many = exports.export("many", key, Rights::Read, 1, NOTIFICATIONS_MAX + 1);
        assert_eq!(many, Err(ExportError::Notifications));
        let atomic = |handle, offset, op| {
            let atomic = Atomic::new(op, Width::Eight, 1);
            imports.check_atomic(&exports, handle, offset, &atomic).map(|_| ())
        };
        assert_eq!(atomic(ro, 8, AtomicOp::Load), Ok(()));
        assert_eq!(atomic(ro, 8, AtomicOp::Add), Err(Status::NoRights));
        assert_eq!(atomic(rw, 12, AtomicOp::Add), Err(Status::Misaligned));
        assert_eq!(atomic(ro, 96, AtomicOp::Load), Err(Status::OutOfBounds));
        assert_eq!(atomic(9, 0, AtomicOp::Load), Err(Status::NoHandle));
        assert_eq!(imports.notifications(&exports, ro), Some((read_only, 3)));
        assert_eq!(imports.handles_of(read_only).collect::<Vec<_>>(), [ro]);
        exports.withhold(read_only, true);
        assert_eq!(ImportTable::default().import(&exports, "ro", &key), Err(Status::NoSegment));
        assert_eq!(check(&imports, &exports, ro, 0, 1, Access::Read), Ok(()), "whoever has it open keeps it");
        assert_eq!(exports.export("ro", key, Rights::Read, 1, 0), Err(ExportError::Taken));
        exports.withhold(read_only, false);
        assert!(ImportTable::default().import(&exports, "ro", &key).is_ok());
        assert!(exports.unexport(read_only) && !exports.unexport(read_only));
        let again = exports.export("ro", key, Rights::ReadWrite, 100, 0).unwrap();
        assert_eq!(again.index(), read_only.index());
        let gone = check(&imports, &exports, ro, 0, 1, Access::Read);
        assert_eq!(imports.notifications(&exports, ro), None);
        assert_eq!(gone, Err(Status::NoHandle), "an old handle does not reach a new segment");
    }

    #[test]
    fn a_handle_that_was_given_back_reaches_nothing_else() {
        let key = RemoteKey::from_bytes([1; 16]);
        let mut exports = ExportTable::default();
        let mut imports = ImportTable::default();
        exports.export("one", key, Rights::ReadWrite, 8, 0).unwrap();
        let two = exports.export("two", key, Rights::ReadWrite, 8, 1).unwrap();
        let mut late = Vec::new();
        for _ in 0..3 {
            let (one, ..) = imports.import(&exports, "one", &key).unwrap();
            late.push(one);
            imports.unimport(one);
        }
        let (handle, ..) = imports.import(&exports, "two", &key).unwrap();
        for late in late {
            assert_eq!(imports.check(&exports, late, 0, 1, Access::Write), Err(Status::NoHandle));
            assert_eq!(imports.notifications(&exports, late), None);
            imports.unimport(late);
        }
        assert_eq!(imports.check(&exports, handle, 0, 1, Access::Write), Ok(two));
        assert_eq!(imports.handles().collect::<Vec<_>>(), [(handle, two)]);
        // The numbers of uses end before the handles that are of no segments.
        imports.handles[0].0 = USES - 1;
        let last = super::handle(0, USES - 1);
        assert_eq!(imports.check(&exports, last, 0, 1, Access::Write), Ok(two));
        imports.unimport(last);
        assert_eq!(imports.import(&exports, "one", &key).unwrap().0, 0);
        assert!(super::handle(IMPORTS_MAX - 1, USES - 1) < u32::MAX - IMPORTS_MAX as u32 + 1);
    }
}
