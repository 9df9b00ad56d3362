//! Reserved addresses, for far memory and for what belongs to it.

use super::PAGE_BYTES;
use crate::raw;
use crate::shared::SharedSlice;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, TryLockError};

/// Beside what is ours and the program must not touch.
const GUARD_BYTES: usize = 16 * PAGE_BYTES;

/// Addresses of far memory that has ended: a start, and how many bytes. All are mapped, and nobody may touch them.
///
/// They are never unmapped, as somebody may still have a [`SharedSlice`] of them: who uses it finds nothing there, or other far memory, but nobody else's.
static ENDED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// A reserved range of addresses, released on drop.
#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) start: usize,
    pub(super) bytes: usize,
    /// Bytes before and behind that nobody can use.
    guard: usize,
    /// Of addresses that are kept for others in place of being released: with those behind that nobody had asked for.
    kept_bytes: Option<usize>,
}

impl Reservation {
    fn new(bytes: usize) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { map(0, bytes, libc::PROT_NONE, 0) }?;
        Ok(Self { start, bytes, guard: 0, kept_bytes: None })
    }

    /// The kernel would place it right below far memory, where a program that goes too far back would find it.
    pub(super) fn guarded(bytes: usize) -> io::Result<Self> {
        let too_much = || io::Error::from(io::ErrorKind::OutOfMemory);
        let all = Self::new(bytes.checked_add(2 * GUARD_BYTES).ok_or_else(too_much)?)?;
        let start = all.start + GUARD_BYTES;
        std::mem::forget(all);
        Ok(Self { start, bytes, guard: GUARD_BYTES, kept_bytes: None })
    }

    /// For far memory: what ended before may have had them.
    fn kept(bytes: usize) -> io::Result<Self> {
        if let Some((start, kept_bytes)) = take_ended(bytes) {
            return Ok(Self { start, bytes, guard: 0, kept_bytes: Some(kept_bytes) });
        }
        let mut fresh = Self::new(bytes)?;
        fresh.kept_bytes = Some(bytes);
        Ok(fresh)
    }

    fn contains(&self, address: usize, bytes: usize) -> bool {
        address.is_multiple_of(PAGE_BYTES)
            && bytes.is_multiple_of(PAGE_BYTES)
            && bytes > 0
            && address >= self.start
            && address.checked_add(bytes).is_some_and(|end| end <= self.start + self.bytes)
    }

    pub(super) fn check(&self, address: usize, bytes: usize) -> io::Result<()> {
        if self.contains(address, bytes) {
            Ok(())
        } else {
            Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("range {address:#x}+{bytes:#x} is not in {:#x}+{:#x}", self.start, self.bytes),
            ))
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        match self.kept_bytes {
            // SAFETY: the reservation owns this range; whoever drops it has no use for its contents.
            None => drop(unsafe { raw::munmap(self.start - self.guard, self.bytes + 2 * self.guard) }),
            Some(bytes) => {
                // SAFETY: as above; what is mapped instead has no contents.
                if unsafe { map(self.start, bytes, libc::PROT_NONE, libc::MAP_FIXED) }.is_ok() {
                    put_ended(self.start, bytes);
                }
            }
        }
    }
}

/// Who has the list for long is a thread that a child of a fork does not have: then there is none.
fn with_ended<R>(run: impl FnOnce(&mut Vec<(usize, usize)>) -> R) -> Option<R> {
    const LOOKS: u32 = 1000;
    for _ in 0..LOOKS {
        match ENDED.try_lock() {
            Ok(mut ended) => return Some(run(&mut ended)),
            Err(TryLockError::Poisoned(ended)) => return Some(run(&mut ended.into_inner())),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    None
}

/// The shortest that is long enough.
fn take_ended(bytes: usize) -> Option<(usize, usize)> {
    with_ended(|ended| {
        let long_enough = ended.iter().enumerate().filter(|(_, (_, kept))| *kept >= bytes);
        let (index, _) = long_enough.min_by_key(|(_, (_, kept))| *kept)?;
        Some(ended.swap_remove(index))
    })
    .flatten()
}

fn put_ended(start: usize, bytes: usize) {
    // Else they are never used again.
    let _ = with_ended(|ended| ended.push((start, bytes)));
}

/// Maps private memory.
///
/// # Safety
/// With MAP_FIXED in `flags`, the caller owns the range.
pub(super) unsafe fn map(address: usize, bytes: usize, protection: i32, flags: i32) -> io::Result<usize> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: forwarded from the caller.
    unsafe { raw::mmap(address, bytes, protection, flags, -1) }
}

/// Addresses for far memory, which several [`PagedArea`](super::PagedArea)s may divide: each installs and maps only what is its part.
///
/// When the last of these, and of the areas, has gone, others get them.
#[derive(Clone, Debug)]
pub struct Addresses(pub(super) Arc<Reservation>);

impl Addresses {
    /// Reserves `bytes` of them.
    ///
    /// # Errors
    /// ENOMEM when they cannot be had (RLIMIT_AS, overcommit).
    pub fn reserve(bytes: usize) -> io::Result<Self> {
        Ok(Self(Arc::new(Reservation::kept(bytes)?)))
    }

    /// Which they are.
    pub fn range(&self) -> Range<usize> {
        self.0.start..self.0.start + self.0.bytes
    }

    /// All of them as memory, as long as the process lives. What is not mapped faults.
    pub fn memory(&self) -> SharedSlice {
        // SAFETY: the reservation is ours, and never unmapped; accesses through a SharedSlice are raw copies that may fault but not alias.
        unsafe { SharedSlice::from_raw(self.0.start as *mut u8, self.0.bytes) }
    }
}
