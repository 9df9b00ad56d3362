//! Files and folders on a volume: names, attributes, and where the bytes are. docs/design/mount.md has the whole.
//!
//! All of it is in memory and changes in one step. Bytes are moved by whoever drives it: [`Files::read`] and [`Files::write`] tell
//! where they are. Before anything is begun on the volume it must discard what [`Files::discards`] tells.

mod folder;
mod map;
mod space;
#[cfg(test)]
mod tests;

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range;

use crate::limits::{FILES_MAX, NAME_BYTES_MAX};
use crate::volume::BLOCK_BYTES;
use folder::Folder;
pub use folder::{Make, Rename};
use map::Map;
use space::Space;

/// Number of a file or folder; never used again for another one.
pub type Number = u64;
/// The folder above all.
pub const ROOT: Number = 1;
/// Most bytes of a symbolic link.
pub const TARGET_BYTES_MAX: usize = 4095;
/// Most bytes of a file: offsets of the operating system are signed.
pub const FILE_BYTES_MAX: u64 = i64::MAX as u64;
/// Most links to one file.
const LINKS_MAX: u32 = 1 << 16;

/// Why something was not done, and nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is no such name.
    NotFound,
    /// There is no such file any more.
    Stale,
    /// The name is taken.
    Exists,
    /// It is not a folder.
    NotFolder,
    /// It is a folder.
    IsFolder,
    /// The folder is not empty.
    NotEmpty,
    /// The name is too long.
    NameTooLong,
    /// The name, or what is asked for, makes no sense.
    Invalid,
    /// All blocks are taken, or there are too many files.
    NoSpace,
    /// It would be longer than a file can be.
    TooLong,
    /// It has too many links.
    TooManyLinks,
    /// What has a fixed size and place is not changed.
    NotPermitted,
}

/// Seconds since 1970, and nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Seconds.
    pub seconds: i64,
    /// 0 to 999 999 999.
    pub nanos: u32,
}

impl Time {
    fn after(self, other: Self) -> Self {
        if self > other {
            return self;
        }
        match other.nanos {
            999_999_999.. => Self { seconds: other.seconds.saturating_add(1), nanos: 0 },
            nanos => Self { seconds: other.seconds, nanos: nanos + 1 },
        }
    }
}

/// What something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A folder.
    Folder,
    /// Bytes on the volume.
    File,
    /// A symbolic link.
    Link,
    /// A named pipe, a socket or a device: only its name and attributes are here. The number is that of `S_IFMT`.
    Special(u32),
    /// The bytes of a segment of another process: the number under which it was added.
    Segment(u32),
}

/// What `stat` tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Its number.
    pub number: Number,
    /// What it is.
    pub kind: Kind,
    /// Bytes.
    pub size: u64,
    /// Blocks of 4096 bytes that it uses.
    pub blocks: u64,
    /// Twelve bits.
    pub permissions: u32,
    /// How many names it has.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Which device it is.
    pub device: u32,
    /// Last read, as far as it is kept.
    pub accessed: Time,
    /// Last change of the content; every change has a later time.
    pub modified: Time,
    /// Last change of content or attributes.
    pub changed: Time,
}

/// Who makes something, and how.
#[derive(Clone, Copy, Debug)]
pub struct Owner {
    /// Permissions: twelve bits.
    pub permissions: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

/// What is to be changed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Change {
    /// Length.
    pub size: Option<u64>,
    /// Permissions: twelve bits.
    pub permissions: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Time of the last read.
    pub accessed: Option<Time>,
    /// Time of the last change of the content.
    pub modified: Option<Time>,
    /// Time of the last change.
    pub changed: Option<Time>,
}

/// A run of the bytes that were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where in the request.
    pub at: u64,
    /// Where in the volume; `None`: zeros.
    pub offset: Option<u64>,
    /// How many.
    pub bytes: u64,
}

/// An entry of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Where to go on behind it.
    pub cookie: u64,
    /// What it names.
    pub number: Number,
    /// What that is.
    pub kind: Kind,
    /// Its name.
    pub name: &'a [u8],
}

/// How much there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Blocks in all.
    pub blocks: u64,
    /// Blocks that are free.
    pub free: u64,
    /// Files and folders that there can be.
    pub files: u64,
    /// How many of them there are not.
    pub files_free: u64,
}

#[derive(Debug)]
enum Body {
    Folder(Folder),
    File(Map),
    Link(Box<[u8]>),
    Special,
    Segment,
}

#[derive(Debug)]
struct Inode {
    body: Body,
    attributes: Attributes,
    /// How often sessions have been told of it and have not forgotten it.
    known: u64,
    /// How often its content has changed.
    version: u64,
    /// Something that was written did not arrive.
    damaged: bool,
}

impl Inode {
    fn folder(&mut self) -> Result<&mut Folder, Refused> {
        match &mut self.body {
            Body::Folder(folder) => Ok(folder),
            _ => Err(Refused::NotFolder),
        }
    }

    fn touch(&mut self, now: Time) {
        self.version += 1;
        self.attributes.modified = now.after(self.attributes.modified);
        self.attributes.changed = now.after(self.attributes.changed);
    }
}

/// All of it.
#[derive(Debug)]
pub struct Files {
    inodes: BTreeMap<Number, Inode>,
    next: Number,
    space: Space,
    /// What each session knows, and how often it was told.
    sessions: BTreeMap<u64, BTreeMap<Number, u64>>,
    /// Number of the last request that was begun.
    last: u64,
}

fn check_name(name: &[u8]) -> Result<(), Refused> {
    match name {
        b"" | b"." | b".." => Err(Refused::Invalid),
        _ if name.len() > NAME_BYTES_MAX => Err(Refused::NameTooLong),
        _ if name.iter().any(|&byte| byte == 0 || byte == b'/') => Err(Refused::Invalid),
        _ => Ok(()),
    }
}

fn blocks_of(offset: u64, bytes: u64) -> Range<u64> {
    offset / BLOCK_BYTES..(offset + bytes).div_ceil(BLOCK_BYTES)
}

impl Files {
    /// A folder without entries on a volume of `bytes` bytes, of which whole blocks are used.
    pub fn new(bytes: u64, owner: Owner, now: Time) -> Self {
        let mut files = Self {
            inodes: BTreeMap::new(),
            next: ROOT,
            space: Space::new(bytes / BLOCK_BYTES),
            sessions: BTreeMap::new(),
            last: 0,
        };
        files.add(Body::Folder(Folder::new(ROOT)), Kind::Folder, owner, now);
        files
    }

    fn add(&mut self, body: Body, kind: Kind, owner: Owner, now: Time) -> Number {
        let number = self.next;
        self.next += 1;
        let size = if let Body::Link(target) = &body { target.len() as u64 } else { 0 };
        let attributes = Attributes {
            number,
            kind,
            size,
            blocks: 0,
            permissions: owner.permissions & 0o7777,
            links: if kind == Kind::Folder { 2 } else { 1 },
            uid: owner.uid,
            gid: owner.gid,
            device: 0,
            accessed: now,
            modified: now,
            changed: now,
        };
        self.inodes.insert(number, Inode { body, attributes, known: 0, version: 0, damaged: false });
        number
    }

    fn inode(&self, number: Number) -> Result<&Inode, Refused> {
        self.inodes.get(&number).ok_or(Refused::Stale)
    }

    fn inode_mut(&mut self, number: Number) -> Result<&mut Inode, Refused> {
        self.inodes.get_mut(&number).ok_or(Refused::Stale)
    }

    /// What is known of it.
    ///
    /// # Errors
    /// [`Refused::Stale`].
    pub fn attributes(&self, number: Number) -> Result<Attributes, Refused> {
        let inode = self.inode(number)?;
        let blocks = match &inode.body {
            Body::File(map) => map.count(),
            Body::Segment => inode.attributes.size.div_ceil(BLOCK_BYTES),
            _ => 0,
        };
        Ok(Attributes { blocks, ..inode.attributes })
    }

    /// How much there is.
    pub fn room(&self) -> Room {
        let files = FILES_MAX as u64;
        let files_free = files - (self.inodes.len() as u64).min(files);
        Room { blocks: self.space.total(), free: self.space.free(), files, files_free }
    }

    /// Changes attributes.
    ///
    /// # Errors
    /// [`Refused::IsFolder`], [`Refused::Invalid`], [`Refused::TooLong`] or [`Refused::NotPermitted`] for a length that it cannot have.
    pub fn change(&mut self, number: Number, change: &Change, now: Time) -> Result<(), Refused> {
        if let Some(size) = change.size {
            self.resize(number, size, now)?;
        }
        let attributes = &mut self.inode_mut(number)?.attributes;
        let set = |to: &mut u32, from: Option<u32>| *to = from.unwrap_or(*to);
        set(&mut attributes.permissions, change.permissions.map(|bits| bits & 0o7777));
        set(&mut attributes.uid, change.uid);
        set(&mut attributes.gid, change.gid);
        attributes.accessed = change.accessed.unwrap_or(attributes.accessed);
        attributes.modified = change.modified.unwrap_or(attributes.modified);
        attributes.changed = change.changed.unwrap_or_else(|| now.after(attributes.changed));
        Ok(())
    }

    /// The file's map, if it is one of bytes on the volume.
    fn map(&mut self, number: Number) -> Result<(&mut Map, &mut Space, &mut Attributes), Refused> {
        let inode = self.inodes.get_mut(&number).ok_or(Refused::Stale)?;
        match &mut inode.body {
            Body::File(map) => Ok((map, &mut self.space, &mut inode.attributes)),
            Body::Folder(_) => Err(Refused::IsFolder),
            Body::Segment => Err(Refused::NotPermitted),
            Body::Link(_) | Body::Special => Err(Refused::Invalid),
        }
    }

    fn resize(&mut self, number: Number, size: u64, now: Time) -> Result<(), Refused> {
        if size > FILE_BYTES_MAX {
            return Err(Refused::TooLong);
        }
        if let Ok(Attributes { kind: Kind::Segment(_), size: fixed, .. }) = self.attributes(number)
            && fixed == size
        {
            return Ok(());
        }
        let old = self.map(number)?.2.size;
        if size < old {
            // The rest of the last block must be zeros when the file grows again.
            self.clear(number, size, old.next_multiple_of(BLOCK_BYTES) - size)?;
        }
        let inode = self.inode_mut(number)?;
        inode.attributes.size = size;
        inode.touch(now);
        Ok(())
    }

    /// Makes a range zeros: whole blocks are holes afterwards, parts of others are zeroed by the volume.
    fn clear(&mut self, number: Number, offset: u64, bytes: u64) -> Result<(), Refused> {
        let last = self.last;
        let end = offset + bytes;
        let (map, space, _) = self.map(number)?;
        let (first, behind) = (offset.div_ceil(BLOCK_BYTES), end / BLOCK_BYTES);
        let edges = match first > behind {
            true => [offset..end, end..end],
            false => [offset..first * BLOCK_BYTES, behind * BLOCK_BYTES..end],
        };
        for edge in edges {
            if !edge.is_empty()
                && let (Some(at), _) = map.run(edge.start / BLOCK_BYTES, u64::MAX)
            {
                let from = at * BLOCK_BYTES + edge.start % BLOCK_BYTES;
                space.zero(from..from + (edge.end - edge.start));
            }
        }
        if first < behind {
            for blocks in map.remove(first..behind) {
                space.retire(last, blocks);
            }
        }
        Ok(())
    }

    /// Makes a hole in a file, whose length stays.
    ///
    /// # Errors
    /// As [`Files::write`].
    pub fn punch(&mut self, number: Number, offset: u64, bytes: u64, now: Time) -> Result<(), Refused> {
        let size = self.map(number)?.2.size;
        let end = offset.checked_add(bytes).ok_or(Refused::TooLong)?.min(size.next_multiple_of(BLOCK_BYTES));
        if offset < end {
            self.clear(number, offset, end - offset)?;
            self.inode_mut(number)?.touch(now);
        }
        Ok(())
    }

    /// Where the bytes are that a read of `bytes` bytes from `offset` on returns: fewer at the file's end.
    ///
    /// # Errors
    /// [`Refused::IsFolder`] and the like when it is not a file; [`Refused::NotPermitted`] for a segment, whose bytes are not here.
    pub fn read(
        &mut self,
        number: Number,
        offset: u64,
        bytes: u64,
        parts: &mut Vec<Part>,
    ) -> Result<u64, Refused> {
        let (map, _, attributes) = self.map(number)?;
        let end = offset.saturating_add(bytes).min(attributes.size);
        let mut from = offset;
        while from < end {
            let (place, behind) = map.run(from / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
            let to = end.min(behind * BLOCK_BYTES);
            let place = place.map(|block| block * BLOCK_BYTES + from % BLOCK_BYTES);
            parts.push(Part { at: from - offset, offset: place, bytes: to - from });
            from = to;
        }
        Ok(end.saturating_sub(offset))
    }

    /// Gives the file blocks for a write of `bytes` bytes from `offset` on, and tells where they are. Its length grows if need be.
    /// Without a time the times stay: whoever writes sets them.
    ///
    /// # Errors
    /// [`Refused::NoSpace`], [`Refused::TooLong`], and as [`Files::read`].
    pub fn write(
        &mut self,
        number: Number,
        offset: u64,
        bytes: u64,
        now: Option<Time>,
        parts: &mut Vec<Part>,
    ) -> Result<(), Refused> {
        let end = self.reserve(number, offset, bytes)?;
        let (map, _, attributes) = self.map(number)?;
        attributes.size = attributes.size.max(end);
        let mut from = offset;
        while from < end {
            let (place, behind) = map.run(from / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
            let to = end.min(behind * BLOCK_BYTES);
            let place = place.map(|block| block * BLOCK_BYTES + from % BLOCK_BYTES);
            parts.push(Part { at: from - offset, offset: place, bytes: to - from });
            from = to;
        }
        let inode = self.inode_mut(number)?;
        match now {
            Some(now) => inode.touch(now),
            None => inode.version += 1,
        }
        Ok(())
    }

    /// Gives the file blocks for a range, so that writes to it find room. What was a hole reads as zeros.
    ///
    /// # Errors
    /// As [`Files::write`].
    pub fn allocate(
        &mut self,
        number: Number,
        offset: u64,
        bytes: u64,
        grow: bool,
        now: Time,
    ) -> Result<(), Refused> {
        let end = self.reserve(number, offset, bytes)?;
        if grow && end > self.map(number)?.2.size {
            self.resize(number, end, now)?;
        }
        Ok(())
    }

    /// Fills the holes of a range with blocks; returns its end. All of it, or nothing is changed.
    fn reserve(&mut self, number: Number, offset: u64, bytes: u64) -> Result<u64, Refused> {
        let end = offset.checked_add(bytes).filter(|&end| end <= FILE_BYTES_MAX).ok_or(Refused::TooLong)?;
        let (map, space, _) = self.map(number)?;
        let blocks = blocks_of(offset, bytes);
        let (mut holes, mut wanted) = (Vec::new(), 0);
        let mut block = blocks.start;
        while block < blocks.end {
            let (place, behind) = map.run(block, blocks.end);
            if place.is_none() {
                holes.push(block..behind);
                wanted += behind - block;
            }
            block = behind;
        }
        if wanted > space.free() {
            return Err(Refused::NoSpace);
        }
        for hole in holes {
            let pieces = space.take(map.near(hole.start), hole.end - hole.start).ok_or(Refused::NoSpace)?;
            let mut block = hole.start;
            for piece in pieces {
                map.insert(block, piece.start, piece.end - piece.start);
                block += piece.end - piece.start;
            }
        }
        Ok(end)
    }

    /// A request on the volume is about to begin: blocks that are freed from now on are not used again before it has ended.
    pub fn begin(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The oldest request that has not ended; `None`: all have.
    pub fn settle(&mut self, oldest: Option<u64>) {
        self.space.settle(oldest.unwrap_or(u64::MAX));
    }

    /// What the volume must discard before anything else is begun: ranges of bytes.
    pub fn discards(&mut self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.space.discards()
    }

    /// These bytes of the volume are lost for good.
    pub fn lose(&mut self, bytes: Range<u64>) {
        self.space.lose(bytes.start / BLOCK_BYTES..bytes.end.div_ceil(BLOCK_BYTES));
    }

    /// Whether it is a file whose bytes are on the volume.
    pub fn is_on_volume(&self, number: Number) -> bool {
        self.inodes.get(&number).is_some_and(|inode| matches!(inode.body, Body::File(_)))
    }

    /// A number that differs when the content may have changed.
    pub fn version(&self, number: Number) -> u64 {
        self.inodes.get(&number).map_or(0, |inode| inode.version)
    }

    /// Something that was written to this file has not arrived.
    pub fn damage(&mut self, number: Number) {
        if let Some(inode) = self.inodes.get_mut(&number) {
            inode.damaged = true;
        }
    }

    /// Whether something of this file is lost.
    pub fn is_damaged(&self, number: Number) -> bool {
        self.inodes.get(&number).is_some_and(|inode| match &inode.body {
            Body::File(map) => inode.damaged || map.places().any(|blocks| self.space.is_lost(blocks)),
            _ => inode.damaged,
        })
    }

    /// A session has been told of it.
    pub fn remember(&mut self, session: u64, number: Number) {
        if let Some(inode) = self.inodes.get_mut(&number) {
            inode.known += 1;
            *self.sessions.entry(session).or_default().entry(number).or_insert(0) += 1;
        }
    }

    /// A session forgets that it was told so often of it.
    pub fn forget(&mut self, session: u64, number: Number, times: u64) {
        let Some(known) = self.sessions.get_mut(&session).and_then(|known| known.get_mut(&number)) else {
            return;
        };
        let times = times.min(*known);
        *known -= times;
        if *known == 0
            && let Some(session) = self.sessions.get_mut(&session)
        {
            session.remove(&number);
        }
        if let Some(inode) = self.inodes.get_mut(&number) {
            inode.known -= times;
        }
        self.drop_unused(number);
    }

    /// Whether a session knows it.
    pub fn knows(&self, session: u64, number: Number) -> bool {
        self.sessions.get(&session).is_some_and(|known| known.contains_key(&number))
    }

    /// A session is over: it uses nothing any more.
    pub fn end_session(&mut self, session: u64) {
        for (number, times) in self.sessions.remove(&session).unwrap_or_default() {
            if let Some(inode) = self.inodes.get_mut(&number) {
                inode.known -= times;
            }
            self.drop_unused(number);
        }
    }

    /// What has no name and is not known to anybody is gone, and its blocks are free.
    fn drop_unused(&mut self, number: Number) {
        let unused = |inode: &Inode| inode.attributes.links == 0 && inode.known == 0;
        if !self.inodes.get(&number).is_some_and(unused) {
            return;
        }
        if let Some(Inode { body: Body::File(map), .. }) = self.inodes.remove(&number) {
            for blocks in map.places() {
                self.space.retire(self.last, blocks);
            }
        }
    }
}
