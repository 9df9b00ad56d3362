//! Names.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;

use super::{
    Body, Entry, FILES_MAX, Files, Kind, LINKS_MAX, Map, Number, Owner, Refused, TARGET_BYTES_MAX, Time,
    check_name,
};

/// Cookies of the first two entries of each folder.
const THIS: u64 = 1;
const ABOVE: u64 = 2;

/// The entries of a folder, by name, and in the order in which they came: who reads them while others change them goes on where it was.
#[derive(Debug)]
pub(super) struct Folder {
    above: Number,
    /// -> cookie
    names: BTreeMap<Box<[u8]>, u64>,
    entries: BTreeMap<u64, (Box<[u8]>, Number)>,
    next: u64,
    /// It has no name any more; nothing is made in it.
    removed: bool,
}

impl Folder {
    pub(super) fn new(above: Number) -> Self {
        Self { above, names: BTreeMap::new(), entries: BTreeMap::new(), next: ABOVE + 1, removed: false }
    }

    fn find(&self, name: &[u8]) -> Option<Number> {
        self.entries.get(self.names.get(name)?).map(|&(_, number)| number)
    }

    fn insert(&mut self, name: &[u8], number: Number) {
        self.names.insert(name.into(), self.next);
        self.entries.insert(self.next, (name.into(), number));
        self.next += 1;
    }

    fn remove(&mut self, name: &[u8]) {
        if let Some(cookie) = self.names.remove(name) {
            self.entries.remove(&cookie);
        }
    }
}

/// How to rename.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rename {
    /// What has the new name is replaced.
    Replace,
    /// Only when nothing has the new name.
    Keep,
    /// Both have a name, and they change places.
    Exchange,
}

/// What is made.
#[derive(Clone, Copy, Debug)]
pub enum Make<'a> {
    /// A folder.
    Folder,
    /// An empty file.
    File,
    /// A symbolic link to this.
    Link(&'a [u8]),
    /// A special file: its bits of `S_IFMT`, and its device.
    Special(u32, u32),
}

impl Files {
    fn folder(&self, number: Number) -> Result<&Folder, Refused> {
        match &self.inode(number)?.body {
            Body::Folder(folder) => Ok(folder),
            _ => Err(Refused::NotFolder),
        }
    }

    /// What has this name; `.` and `..` are names here.
    ///
    /// # Errors
    /// [`Refused::NotFound`], [`Refused::NotFolder`], [`Refused::NameTooLong`].
    pub fn find(&self, folder: Number, name: &[u8]) -> Result<Number, Refused> {
        let inside = self.folder(folder)?;
        match name {
            b"." => Ok(folder),
            b".." => Ok(inside.above),
            _ => {
                check_name(name)?;
                inside.find(name).ok_or(Refused::NotFound)
            }
        }
    }

    fn check_new(&self, folder: Number, name: &[u8]) -> Result<(), Refused> {
        let inside = self.folder(folder)?;
        check_name(name)?;
        if inside.removed {
            return Err(Refused::NotFound);
        }
        if inside.find(name).is_some() { Err(Refused::Exists) } else { Ok(()) }
    }

    fn enter(&mut self, folder: Number, name: &[u8], number: Number, now: Time) {
        let Ok(inode) = self.inode_mut(folder) else { return };
        inode.touch(now);
        if let Ok(inside) = inode.folder() {
            inside.insert(name, number);
        }
    }

    fn leave(&mut self, folder: Number, name: &[u8], now: Time) {
        let Ok(inode) = self.inode_mut(folder) else { return };
        inode.touch(now);
        if let Ok(inside) = inode.folder() {
            inside.remove(name);
        }
    }

    /// Makes something with a name.
    ///
    /// # Errors
    /// [`Refused::Exists`], [`Refused::NoSpace`] with too many files, [`Refused::Invalid`] and [`Refused::NameTooLong`] for the name or target.
    pub fn make(
        &mut self,
        folder: Number,
        name: &[u8],
        make: Make<'_>,
        owner: Owner,
        now: Time,
    ) -> Result<Number, Refused> {
        self.check_new(folder, name)?;
        if self.inodes.len() >= FILES_MAX {
            return Err(Refused::NoSpace);
        }
        let mut device = 0;
        let (body, kind) = match make {
            Make::Folder => (Body::Folder(Folder::new(folder)), Kind::Folder),
            Make::File => (Body::File(Map::default()), Kind::File),
            Make::Link(target) if target.len() > TARGET_BYTES_MAX => return Err(Refused::NameTooLong),
            Make::Link(b"") => return Err(Refused::NotFound),
            Make::Link(target) => (Body::Link(target.into()), Kind::Link),
            Make::Special(kind, number) => {
                device = number;
                (Body::Special, Kind::Special(kind))
            }
        };
        let number = self.add(body, kind, owner, now);
        self.inode_mut(number)?.attributes.device = device;
        if kind == Kind::Folder {
            self.inode_mut(folder)?.attributes.links += 1;
        }
        self.enter(folder, name, number, now);
        Ok(number)
    }

    /// Adds the bytes of a segment as a file of the root folder. `number` tells it from others.
    ///
    /// # Errors
    /// As [`Files::make`].
    pub fn add_segment(
        &mut self,
        name: &[u8],
        number: u32,
        size: u64,
        owner: Owner,
        now: Time,
    ) -> Result<Number, Refused> {
        self.check_new(super::ROOT, name)?;
        let file = self.add(Body::Segment, Kind::Segment(number), owner, now);
        self.inode_mut(file)?.attributes.size = size;
        self.enter(super::ROOT, name, file, now);
        Ok(file)
    }

    /// Gives something that is not a folder another name.
    ///
    /// # Errors
    /// [`Refused::Exists`]; [`Refused::NotPermitted`] for folders; [`Refused::TooManyLinks`].
    pub fn link(&mut self, number: Number, folder: Number, name: &[u8], now: Time) -> Result<(), Refused> {
        self.check_new(folder, name)?;
        let inode = self.inode_mut(number)?;
        match inode.body {
            Body::Folder(_) | Body::Segment => return Err(Refused::NotPermitted),
            // It was open when its last name went.
            _ if inode.attributes.links == 0 => return Err(Refused::NotFound),
            _ if inode.attributes.links >= LINKS_MAX => return Err(Refused::TooManyLinks),
            _ => inode.attributes.links += 1,
        }
        inode.attributes.changed = now.after(inode.attributes.changed);
        self.enter(folder, name, number, now);
        Ok(())
    }

    /// Whether the name may be taken from what has it.
    fn check_removable(&self, number: Number, is_folder: bool) -> Result<(), Refused> {
        match (&self.inode(number)?.body, is_folder) {
            (Body::Folder(inside), true) if inside.names.is_empty() => Ok(()),
            (Body::Folder(_), true) => Err(Refused::NotEmpty),
            (Body::Folder(_), false) => Err(Refused::IsFolder),
            (Body::Segment, _) => Err(Refused::NotPermitted),
            (_, true) => Err(Refused::NotFolder),
            (_, false) => Ok(()),
        }
    }

    /// Takes a name away. What has no name and is not in use is gone.
    ///
    /// # Errors
    /// [`Refused::NotFound`]; [`Refused::NotEmpty`]; [`Refused::IsFolder`] and [`Refused::NotFolder`] when it is the other kind.
    pub fn remove(
        &mut self,
        folder: Number,
        name: &[u8],
        is_folder: bool,
        now: Time,
    ) -> Result<Number, Refused> {
        check_name(name)?;
        let number = self.find(folder, name)?;
        self.check_removable(number, is_folder)?;
        self.leave(folder, name, now);
        self.lose_name(folder, number, now);
        Ok(number)
    }

    /// It was taken out of `folder`, for good.
    fn lose_name(&mut self, folder: Number, number: Number, now: Time) {
        let Ok(inode) = self.inode_mut(number) else { return };
        inode.attributes.changed = now.after(inode.attributes.changed);
        match inode.folder() {
            Ok(inside) => {
                inside.removed = true;
                inode.attributes.links = 0;
                if let Ok(above) = self.inode_mut(folder) {
                    above.attributes.links -= 1;
                }
            }
            Err(_) => inode.attributes.links -= 1,
        }
        self.drop_unused(number);
    }

    /// Gives something another name, in one step.
    ///
    /// # Errors
    /// As [`Files::remove`] for what has the new name; [`Refused::Invalid`] when a folder would get below itself.
    pub fn rename(
        &mut self,
        from: (Number, &[u8]),
        to: (Number, &[u8]),
        how: Rename,
        now: Time,
    ) -> Result<(), Refused> {
        check_name(from.1)?;
        let moved = self.find(from.0, from.1)?;
        let replaced = match self.check_new(to.0, to.1) {
            Ok(()) => None,
            Err(Refused::Exists) if how == Rename::Keep => return Err(Refused::Exists),
            Err(Refused::Exists) => Some(self.find(to.0, to.1)?),
            Err(refused) => return Err(refused),
        };
        self.check_not_below(moved, to.0)?;
        if matches!(self.inode(moved)?.body, Body::Segment) {
            return Err(Refused::NotPermitted);
        }
        match (replaced, how) {
            (None, Rename::Exchange) => return Err(Refused::NotFound),
            (Some(other), Rename::Exchange) => {
                self.check_not_below(other, from.0)?;
                if matches!(self.inode(other)?.body, Body::Segment) {
                    return Err(Refused::NotPermitted);
                }
                for (place, number) in [(from, other), (to, moved)] {
                    self.leave(place.0, place.1, now);
                    self.enter(place.0, place.1, number, now);
                }
                self.has_moved(other, to.0, from.0, now);
            }
            // Two names of one thing: nothing happens.
            (Some(other), _) if other == moved => return Ok(()),
            (Some(other), _) => {
                self.check_removable(other, self.folder(moved).is_ok())?;
                self.leave(to.0, to.1, now);
                self.lose_name(to.0, other, now);
                self.leave(from.0, from.1, now);
                self.enter(to.0, to.1, moved, now);
            }
            (None, _) => {
                self.leave(from.0, from.1, now);
                self.enter(to.0, to.1, moved, now);
            }
        }
        self.has_moved(moved, from.0, to.0, now);
        Ok(())
    }

    fn has_moved(&mut self, number: Number, from: Number, to: Number, now: Time) {
        let Ok(inode) = self.inode_mut(number) else { return };
        inode.attributes.changed = now.after(inode.attributes.changed);
        let Ok(inside) = inode.folder() else { return };
        inside.above = to;
        if let Ok(above) = self.inode_mut(from) {
            above.attributes.links -= 1;
        }
        if let Ok(above) = self.inode_mut(to) {
            above.attributes.links += 1;
        }
    }

    /// Whether `folder` is neither `number` nor below it.
    fn check_not_below(&self, number: Number, folder: Number) -> Result<(), Refused> {
        let mut above = folder;
        loop {
            if above == number {
                return Err(Refused::Invalid);
            }
            let next = self.folder(above)?.above;
            if next == above {
                return Ok(());
            }
            above = next;
        }
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// [`Refused::Invalid`] when it is none.
    pub fn target(&self, number: Number) -> Result<&[u8], Refused> {
        match &self.inode(number)?.body {
            Body::Link(target) => Ok(target),
            _ => Err(Refused::Invalid),
        }
    }

    /// The entries of a folder behind a cookie; 0 is before the first one.
    ///
    /// # Errors
    /// [`Refused::NotFolder`].
    pub fn entries(&self, number: Number, cookie: u64) -> Result<impl Iterator<Item = Entry<'_>>, Refused> {
        let folder = self.folder(number)?;
        let own = [(THIS, number, &b"."[..]), (ABOVE, folder.above, b"..")];
        let own = own.into_iter().filter(move |&(own, ..)| own > cookie);
        let own = own.map(|(cookie, number, name)| Entry { cookie, number, kind: Kind::Folder, name });
        let rest = folder.entries.range(cookie.saturating_add(1)..);
        let rest = rest.filter_map(|(&cookie, (name, number))| {
            let kind = self.inodes.get(number)?.attributes.kind;
            Some(Entry { cookie, number: *number, kind, name })
        });
        Ok(own.chain(rest))
    }
}
