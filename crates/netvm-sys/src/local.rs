//! Plain local memory that will take the place of far memory.

use crate::raw;
use std::io;

/// New private memory, all zero and without pages until it is written.
#[derive(Debug)]
pub struct LocalCopy {
    start: usize,
    bytes: usize,
    /// So that a process with too many mappings (vm.max_map_count) is told before anything is copied.
    room: Option<Room>,
}

/// Mappings that stand for those that it takes to move one.
#[derive(Debug)]
struct Room(usize);

/// More than the kernel wants to be free.
const ROOM_PAGES: usize = 16;
const PAGE_BYTES: usize = 4096;

impl Room {
    fn new() -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let room = Self(unsafe { raw::mmap(0, ROOM_PAGES * PAGE_BYTES, libc::PROT_READ, flags, -1) }?);
        for page in (1..ROOM_PAGES).step_by(2) {
            // SAFETY: our own page, to which nobody refers.
            unsafe { raw::mprotect(room.0 + page * PAGE_BYTES, PAGE_BYTES, libc::PROT_NONE) }?;
        }
        Ok(room)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // SAFETY: our own mappings, without contents.
        let _ = unsafe { raw::munmap(self.0, ROOM_PAGES * PAGE_BYTES) };
    }
}

impl LocalCopy {
    /// `bytes` are whole pages.
    ///
    /// # Errors
    /// ENOMEM, also where there would be no room to [move](LocalCopy::take_the_place_of) it.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { raw::mmap(0, bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1) }?;
        let mut copy = Self { start, bytes, room: None };
        copy.room = Some(Room::new()?);
        Ok(copy)
    }

    fn check(&self, offset: usize, bytes: usize) {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "{offset:#x}+{bytes:#x} is not in {:#x} bytes", self.bytes);
    }

    /// Writes to it.
    ///
    /// # Panics
    /// When the range is not inside.
    pub fn set(&mut self, offset: usize, contents: &[u8]) {
        self.check(offset, contents.len());
        // SAFETY: inside our mapping (checked), which `&mut self` has alone.
        unsafe {
            std::ptr::copy_nonoverlapping(contents.as_ptr(), (self.start + offset) as *mut u8, contents.len())
        };
    }

    /// Reads from it.
    ///
    /// # Panics
    /// When the range is not inside.
    pub fn get(&self, offset: usize, out: &mut [u8]) {
        self.check(offset, out.len());
        // SAFETY: inside our mapping (checked), which nobody writes while `&self` is alive.
        unsafe {
            std::ptr::copy_nonoverlapping((self.start + offset) as *const u8, out.as_mut_ptr(), out.len())
        };
    }

    /// Takes the place of what is mapped at `to`.
    ///
    /// # Errors
    /// As mremap(2), with the copy: nothing has changed.
    ///
    /// # Safety
    /// The caller owns `to` for as many bytes as this has, and gives up what is there.
    pub unsafe fn take_the_place_of(mut self, to: usize, protection: i32) -> Result<(), (Self, io::Error)> {
        self.room = None;
        // SAFETY: our own mapping, to which no reference exists; the caller owns `to`.
        let moved = unsafe {
            raw::mprotect(self.start, self.bytes, protection)
                .and_then(|()| raw::move_to(self.start, self.bytes, to))
        };
        if let Err(error) = moved {
            // SAFETY: as above.
            return match unsafe { raw::mprotect(self.start, self.bytes, libc::PROT_READ | libc::PROT_WRITE) }
            {
                Ok(()) => Err((self, error)),
                Err(_) => crate::thread::die("what was to become local memory can be neither moved nor read"),
            };
        }
        std::mem::forget(self);
        Ok(())
    }

    /// Bytes in all.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for LocalCopy {
    fn drop(&mut self) {
        // SAFETY: our own mapping; whoever drops it has no use for its contents.
        let _ = unsafe { raw::munmap(self.start, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_takes_the_place_of_another_mapping() {
        let place = LocalCopy::new(2 * 4096).unwrap();
        let mut copy = LocalCopy::new(2 * 4096).unwrap();
        copy.set(4090, &[7; 10]);
        // SAFETY: the place is this test's own.
        unsafe { copy.take_the_place_of(place.start, libc::PROT_READ) }.map_err(|(_, error)| error).unwrap();
        let mut out = [0; 12];
        place.get(4089, &mut out);
        assert_eq!(out, [0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0]);
    }

    #[test]
    #[should_panic(expected = "is not in")]
    fn nothing_is_written_outside() {
        LocalCopy::new(4096).unwrap().set(4090, &[0; 10]);
    }
}
