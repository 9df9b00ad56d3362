//! Pages that leave while the program writes to them, that lie at the borders of mappings, or that a device has; and lenders that refuse at first.

mod common;

use common::mapped::{mapped, set_word, word};
use common::{Lent, Serving, alone, has_in_thread, has_moves, lend};
use netvm::lender::LinkChoice;
use netvm::pager::{FaultPath, FrameDesign, LOCAL_BYTES_MIN, Pager, PagerConfig, PagerError, TierPolicy};
use netvm_sys::shared::SharedSlice;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const READ: i32 = libc::PROT_READ;
const READ_WRITE: i32 = READ | libc::PROT_WRITE;

fn start(lent: &Lent, change: impl FnOnce(&mut PagerConfig)) -> Arc<Pager> {
    start_with(vec![lent.address().to_owned()], change)
}

fn start_with(lenders: Vec<String>, change: impl FnOnce(&mut PagerConfig)) -> Arc<Pager> {
    let mut config = PagerConfig {
        local_bytes: LOCAL_BYTES_MIN,
        lenders,
        area_bytes: 1 << 34,
        tier: TierPolicy::Lender,
        ..PagerConfig::default()
    };
    change(&mut config);
    Pager::start(config).unwrap()
}

struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// One thread counts in the first word of each of these pages, and finds what it wrote; another has them leave all the time.
fn count_in_pages_that_leave(pager: &Pager, memory: SharedSlice, pages: &[usize], rounds: u64) {
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !end.load(Ordering::Relaxed) {
                pager.page_out(pager.area().start, memory.len());
            }
        });
        let _ends = Ends(&end);
        for round in 1..=rounds {
            for &page in pages {
                // Its neighbours leave with it,
                (0..memory.len() / PAGE).for_each(|page| assert!(word(memory, page * 512 + 1) >> 41 == 0));
                // and it does so meanwhile.
                for step in 0..20_000 {
                    let index = page * 512;
                    set_word(memory, index, round << 16 | step);
                    assert_eq!(word(memory, index), round << 16 | step, "page {page}, round {round}");
                }
            }
        }
    });
    let stats = pager.stats();
    assert!(stats.remote_writes > rounds / 4, "{stats:?}");
}

fn at_the_border_of_a_mapping(change: impl FnOnce(&mut PagerConfig)) {
    let Some(_alone) = alone() else { return };
    let lent = lend(16 << 20);
    let pager = start(&lent, change);
    let memory = mapped(&pager, 0, 8 * PAGE);
    for page in 0..8 {
        set_word(memory, page * 512 + 1, page as u64 | 1 << 40);
    }
    // What leaves is a run across two borders.
    pager.protect(pager.area().start + 3 * PAGE, 2 * PAGE, READ).unwrap();
    count_in_pages_that_leave(&pager, memory, &[0, 1, 2, 5, 6, 7], 400);
    for page in 0..8 {
        assert_eq!(word(memory, page * 512 + 1), page as u64 | 1 << 40);
    }
}

#[test]
fn what_is_written_at_the_border_of_a_mapping_is_not_lost() {
    at_the_border_of_a_mapping(|config| config.fault_path = FaultPath::Thread);
}

#[test]
fn nor_with_faults_in_their_own_threads() {
    if !has_in_thread() {
        return;
    }
    at_the_border_of_a_mapping(|config| config.fault_path = FaultPath::InThread);
}

#[test]
fn nor_where_pages_are_copied() {
    at_the_border_of_a_mapping(|config| {
        (config.fault_path, config.design) = (FaultPath::Thread, Some(FrameDesign::Copy));
    });
}

#[test]
fn what_is_written_to_pages_that_may_be_executed_is_not_lost() {
    let Some(_alone) = alone() else { return };
    let lent = lend(16 << 20);
    let pager = start(&lent, |config| config.fault_path = FaultPath::Thread);
    let memory = mapped(&pager, 0, 4 * PAGE);
    pager.protect(pager.area().start, 4 * PAGE, READ_WRITE | libc::PROT_EXEC).unwrap();
    count_in_pages_that_leave(&pager, memory, &[0, 1, 2, 3], 600);
}

/// Pages of this range are the kernel's until the file is dropped. `None` where there is no io_uring.
fn register_with_the_kernel(address: usize, bytes: usize) -> Option<File> {
    const REGISTER_BUFFERS: libc::c_long = 0;
    let mut parameters = [0_u32; 30];
    // SAFETY: the parameters are larger than struct io_uring_params (120 bytes).
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) };
    // SAFETY: a descriptor that nobody else has.
    let ring = (ring >= 0).then(|| unsafe { File::from_raw_fd(ring as i32) })?;
    let buffer = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: bytes };
    // SAFETY: one iovec; the kernel checks what it names.
    let registered = unsafe {
        libc::syscall(libc::SYS_io_uring_register, ring.as_raw_fd(), REGISTER_BUFFERS, &raw const buffer, 1)
    };
    (registered == 0).then_some(ring)
}

#[test]
fn pages_that_cannot_be_moved_stay_where_they_are() {
    let Some(_alone) = alone() else { return };
    if !has_moves("pages that the kernel refuses to move") {
        return;
    }
    let lent = lend(32 << 20);
    let pager = start(&lent, |_| {});
    let (pages, old) = (3 * LOCAL_BYTES_MIN as usize / PAGE, pager.area().start);
    let memory = mapped(&pager, 0, pages * PAGE);
    (0..pages).for_each(|page| set_word(memory, page * 512 + page % 512, page as u64 | 1 << 40));
    // Among the pages that are here, and those that are not.
    let pinned = pages - 100;
    let Some(ring) = register_with_the_kernel(old + pinned * PAGE, 2 * PAGE) else {
        eprintln!("pages_that_cannot_be_moved: skipped (no io_uring with registered buffers here)");
        return;
    };
    let new = old + (1 << 30);
    mapped(&pager, 1 << 30, pages * PAGE);
    let refused = pager.relocate(old, new, pages * PAGE).unwrap_err();
    let is_pinned = |error: &netvm::Error| matches!(error, netvm::Error::Pager(PagerError::PagePinned { address }) if *address == old + pinned * PAGE);
    assert!(is_pinned(&refused), "{refused}");
    let check = |memory: SharedSlice| {
        for page in 0..pages {
            assert_eq!(word(memory, page * 512 + page % 512), page as u64 | 1 << 40, "page {page}");
        }
    };
    check(memory);
    // The kernel lets go of them some time after the ring is closed.
    drop(ring);
    let until = Instant::now() + Duration::from_secs(20);
    while let Err(error) = pager.relocate(old, new, pages * PAGE) {
        assert!(is_pinned(&error) && Instant::now() < until, "{error}");
    }
    check(pager.memory(new, pages * PAGE).unwrap());
}

#[test]
fn a_lender_that_has_refused_is_asked_again_before_the_end() {
    let Some(_alone) = alone() else { return };
    let (large, small) = (Serving::new(6), Serving::new(2 + LOCAL_BYTES_MIN / (1 << 20)));
    let mut other = small.connect();
    let mut taken = Vec::new();
    while let Ok(slab) = other.borrow_slab() {
        taken.push(slab);
    }
    let addresses = vec![large.address.clone(), small.address.clone()];
    let pager = start_with(addresses, |config| config.link = LinkChoice::Socket);
    let memory = mapped(&pager, 0, LOCAL_BYTES_MIN as usize + (7 << 20));
    let fill = |pages: std::ops::Range<usize>| {
        pages.for_each(|page| {
            (0..512).for_each(|at| set_word(memory, page * 512 + at, (page * 512 + at) as u64))
        });
    };
    let first = (LOCAL_BYTES_MIN as usize + (4 << 20)) / PAGE;
    fill(0..first);
    // It is known to have nothing; then it has something.
    taken.into_iter().for_each(|slab| other.return_slab(slab).unwrap());
    fill(first..memory.len() / PAGE);
    (0..memory.len() / 8).step_by(509).for_each(|index| assert_eq!(word(memory, index), index as u64));
    std::mem::forget((large, small, other));
}
