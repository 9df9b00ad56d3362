//! Which pages are in memory.

use std::io;

use crate::shared::SharedSlice;

/// Bytes of a page here: the smallest that the kernel has.
pub const PAGE_BYTES: usize = 4096;

/// Asks which pages of `memory` can be touched without waiting for a disk, a lender or a userfaultfd: one byte of `pages` for each page
/// that it is in, from the first, whose lowest bit says so.
///
/// What has never been touched counts as missing, and so does what was swapped out. A moment later it may be different.
///
/// # Errors
/// ENOMEM when part of it is not mapped.
///
/// # Panics
/// When `pages` is shorter.
pub fn resident(memory: SharedSlice, pages: &mut [u8]) -> io::Result<()> {
    let first = memory.as_ptr().addr() / PAGE_BYTES * PAGE_BYTES;
    let bytes = memory.as_ptr().addr() + memory.len() - first;
    assert!(bytes.div_ceil(PAGE_BYTES) <= pages.len(), "a byte for each page");
    // SAFETY: the kernel writes one byte for each page, of which there are enough (checked); it reads no memory.
    let result = unsafe { libc::syscall(libc::SYS_mincore, first, bytes, pages.as_mut_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Waits until `memory` can be touched (for writing, if it `writes`) without waiting, or as good as. It changes no contents, and nothing
/// bad happens when the memory is not mapped any more, even while this waits.
///
/// # Errors
/// EINVAL before Linux 5.14; EFAULT where only a thread of the program can bring it in, by touching it; ENOMEM when it is not mapped.
pub fn bring(memory: SharedSlice, writes: bool) -> io::Result<()> {
    let first = memory.as_ptr().addr() / PAGE_BYTES * PAGE_BYTES;
    let bytes = (memory.as_ptr().addr() + memory.len() - first).next_multiple_of(PAGE_BYTES);
    let advice = if writes { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    loop {
        // SAFETY: the kernel handles the page faults of an access, and accesses nothing: whatever is mapped there keeps its contents.
        match unsafe { crate::raw::madvise(first, bytes, advice) } {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Milliseconds since some moment, some milliseconds late but cheap.
pub fn coarse_ms() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills in the local.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut time) };
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

/// Asks the kernel to page memory out now, whole pages of it: for tests and measurements. It may decline.
///
/// # Errors
/// EINVAL on kernels before 5.4, ENOMEM when part of it is not mapped.
pub fn page_out(memory: SharedSlice) -> io::Result<()> {
    let first = memory.as_ptr().addr().next_multiple_of(PAGE_BYTES);
    let end = (memory.as_ptr().addr() + memory.len()) / PAGE_BYTES * PAGE_BYTES;
    // SAFETY: contents stay what they are; where they are is nobody's business.
    unsafe { crate::raw::madvise(first, end.saturating_sub(first), libc::MADV_PAGEOUT) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::Mapping;

    #[test]
    fn touched_pages_are_resident() {
        let mapping = Mapping::anonymous(8 * PAGE_BYTES).unwrap();
        let memory = mapping.shared();
        memory.write_from(3 * PAGE_BYTES, b"x").unwrap();
        let mut pages = [0xFF; 8];
        resident(memory, &mut pages).unwrap();
        assert_eq!(pages.map(|page| page & 1), [0, 0, 0, 1, 0, 0, 0, 0]);
        resident(memory.sub(3 * PAGE_BYTES + 100, PAGE_BYTES).unwrap(), &mut pages).unwrap();
        assert_eq!([pages[0] & 1, pages[1] & 1], [1, 0]);
        bring(memory.sub(5 * PAGE_BYTES - 1, 2).unwrap(), true).unwrap();
        resident(memory, &mut pages).unwrap();
        assert_eq!(pages.map(|page| page & 1), [0, 0, 0, 1, 1, 1, 0, 0]);
        assert_eq!(memory.sub(5 * PAGE_BYTES - 1, 2).unwrap().to_vec(), [0, 0]);
        let before = coarse_ms();
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!((20..10_000).contains(&(coarse_ms() - before)));
    }
}
