use super::*;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn pages_that_leave_together_are_those_that_are_there() {
    const PAGES: usize = 8;
    let Ok(mut paged) = PagedArea::new(PAGES * PAGE_BYTES, PAGES, Some(FrameDesign::Move)) else {
        eprintln!("pages_that_leave_together_are: skipped (no UFFDIO_MOVE here)");
        return;
    };
    paged.open_memory().unwrap();
    if !paged.takes_together() {
        eprintln!("pages_that_leave_together_are: skipped (this kernel cannot take pages together)");
        return;
    }
    let area = paged.area().start;
    let pages: Vec<usize> = (0..PAGES).map(|page| area + page * PAGE_BYTES).collect();
    paged.map_range(area, PAGES * PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE).unwrap();
    paged.fill_frames(0, 1).unwrap();
    for &page in pages.iter().filter(|&&page| page != pages[3]) {
        paged.install_fresh(page, 0, true).unwrap();
    }
    let mut left = [true; TOGETHER_MAX];
    assert_eq!(paged.drop_together(&pages[2..6], &mut left).unwrap(), 3);
    assert_eq!(left[..5], [true, false, true, true, false]);
    // What left is missing: it can be installed anew. What did not is still there.
    for (index, &page) in pages.iter().enumerate() {
        let installed = paged.install_fresh(page, 0, false).map_err(|error| error.raw_os_error());
        let expected = if (2..6).contains(&index) { Ok(()) } else { Err(Some(libc::EEXIST)) };
        assert_eq!(installed, expected, "page {index}");
    }
    assert!(paged.drop_together(&[area, area + PAGES * PAGE_BYTES], &mut left).is_err());
    assert_eq!(paged.drop_together(&[], &mut left).unwrap(), 0);
    // The same by another thread; what is there already ends a row of pages.
    let (helper, contents) = (paged.helper(), vec![9; 3 * PAGE_BYTES]);
    let dropped = std::thread::scope(|scope| {
        scope.spawn(|| helper.drop_together(&[pages[0], pages[1], pages[5]], &mut left)).join().unwrap()
    });
    assert_eq!((dropped.unwrap(), &left[..4]), (3, &[true, true, true, false][..]));
    let (installed, why) = helper.install(area, &contents, true);
    assert_eq!((installed, why.unwrap_err().raw_os_error()), (2, Some(libc::EEXIST)));
    let (installed, why) = helper.install(area + (PAGES - 2) * PAGE_BYTES, &contents, false);
    assert_eq!((installed, why.unwrap_err().kind()), (0, io::ErrorKind::InvalidInput), "beyond the area");
}

#[test]
fn frames_that_are_no_neighbours_are_given_back_together() {
    const FRAMES: usize = 64;
    let Ok(mut paged) = PagedArea::new(PAGE_BYTES, FRAMES, Some(FrameDesign::Move)) else {
        eprintln!("frames_that_are_no_neighbours: skipped (no UFFDIO_MOVE here)");
        return;
    };
    paged.open_memory().unwrap();
    for together in [true, false] {
        if !together {
            std::mem::forget(paged.together.take());
        }
        paged.fill_frames(0, FRAMES).unwrap();
        let there = |paged: &PagedArea| {
            let all: [usize; FRAMES] = std::array::from_fn(|frame| paged.frame_address(frame, 1));
            let mut there = [false; FRAMES];
            raw::are_there(&all, &mut there).map(|()| there)
        };
        let Ok(before) = there(&paged) else {
            eprintln!("frames_that_are_no_neighbours: skipped (the kernel does not tell what is there)");
            return;
        };
        assert_eq!(before, [true; FRAMES]);
        paged.drop_frame_runs(&[(1, 1), (5, 2), (60, 4)]).unwrap();
        let gone: Vec<usize> = (0..FRAMES).filter(|&frame| !there(&paged).unwrap()[frame]).collect();
        assert_eq!(gone, [1, 5, 6, 60, 61, 62, 63]);
        paged.drop_frame_runs(&[]).unwrap();
        paged.drop_frames(0, FRAMES).unwrap();
    }
}

#[test]
fn what_was_moved_is_found_in_the_page_tables() {
    const PAGES: usize = 16;
    // Without /proc, too.
    for opened in [true, false] {
        let Ok(mut paged) = PagedArea::new(PAGES * PAGE_BYTES, PAGES, Some(FrameDesign::Move)) else {
            eprintln!("what_was_moved_is_found_in_the_page_tables: skipped (no UFFDIO_MOVE here)");
            return;
        };
        if opened {
            paged.open_memory().unwrap();
            assert!(paged.pagemap.is_some());
        }
        let area = paged.area().start;
        paged.map_range(area, PAGES * PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE).unwrap();
        paged.fill_frames(0, PAGES).unwrap();
        let pool = paged.frame_address(0, PAGES);
        let exists = || io::Error::from_raw_os_error(libc::EEXIST);
        let moved = |bytes| paged.moved_all_the_same(area, pool, bytes, exists());
        assert_eq!(moved(PAGES * PAGE_BYTES).unwrap_err().raw_os_error(), Some(libc::EEXIST));
        // SAFETY: both ranges are this test's own.
        let (bytes, result) = unsafe { paged.uffd.move_pages(area, pool, 5 * PAGE_BYTES, false) };
        assert!(bytes == 5 * PAGE_BYTES && result.is_ok());
        assert_eq!(moved(PAGES * PAGE_BYTES).unwrap(), 5 * PAGE_BYTES);
        assert_eq!(moved(2 * PAGE_BYTES).unwrap(), 2 * PAGE_BYTES);
    }
}

#[test]
fn pages_that_are_in_use_move_and_keep_their_contents() {
    const PAGES: usize = 64;
    let Ok(mut paged) = PagedArea::new(PAGES * PAGE_BYTES, PAGES, Some(FrameDesign::Move)) else {
        eprintln!("pages_that_are_in_use_move_and_keep_their_contents: skipped (no UFFDIO_MOVE here)");
        return;
    };
    let address = paged.area().start;
    paged.map_range(address, PAGES * PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE).unwrap();
    paged.fill_frames(0, PAGES).unwrap();
    let memory = Addresses(Arc::clone(&paged.area)).memory();
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let user = scope.spawn(|| {
            let mut rounds = 0_u64;
            while !end.load(Ordering::Relaxed) {
                rounds += 1;
                for page in 0..PAGES {
                    memory.write_from(page * PAGE_BYTES, &rounds.to_ne_bytes()).unwrap();
                }
                for page in 0..PAGES {
                    let mut word = [0; 8];
                    memory.read_into(page * PAGE_BYTES, &mut word).unwrap();
                    assert_eq!(u64::from_ne_bytes(word), rounds, "page {page}");
                }
            }
            rounds
        });
        // Clears the accessed bits, so that the use changes page table entries in the middle of moves.
        scope.spawn(|| {
            while !end.load(Ordering::Relaxed) && std::fs::write("/proc/self/clear_refs", "1").is_ok() {
                std::hint::spin_loop();
            }
        });
        paged.install(address, 0, PAGES).unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_millis(500);
        let mut moves = 0;
        while std::time::Instant::now() < until {
            let (moved, result) = paged.extract(address, 0, PAGES);
            assert!(moved == PAGES && result.is_ok(), "{moved} {result:?}");
            paged.install(address, 0, PAGES).unwrap();
            moves += 1;
        }
        end.store(true, Ordering::Relaxed);
        assert!(user.join().unwrap() > 0 && moves > 0);
    });
}

/// A page that is missing, one that is locked, another mapping: those before and behind leave with what they hold, and no page twice.
#[test]
fn what_is_in_the_way_of_a_run_that_is_copied_stays() {
    const PAGES: usize = 32;
    let Ok(mut paged) = PagedArea::new(PAGES * PAGE_BYTES, PAGES, Some(FrameDesign::Copy)) else {
        eprintln!("what_is_in_the_way_of_a_run: skipped (no userfaultfd here)");
        return;
    };
    paged.open_memory().unwrap();
    let at = |paged: &PagedArea, page: usize| paged.area().start + page * PAGE_BYTES;
    let whole = PAGES * PAGE_BYTES;
    paged.map_range(at(&paged, 0), whole, libc::PROT_READ | libc::PROT_WRITE).unwrap();
    paged.fill_frames(0, PAGES).unwrap();
    (0..PAGES).for_each(|frame| paged.frame_bytes_mut(frame).fill(frame as u8 + 1));
    paged.install(at(&paged, 0), 0, PAGES).unwrap();
    let (missing, locked, only_read) = (5, 12, 20);
    // SAFETY: pages of this test's own; what is in the first is given up.
    unsafe {
        raw::drop_memory(at(&paged, missing), PAGE_BYTES).unwrap();
        assert_eq!(libc::mlock(at(&paged, locked) as *const _, PAGE_BYTES), 0);
        raw::mprotect(at(&paged, only_read), PAGE_BYTES, libc::PROT_READ).unwrap();
    }
    let mut left = [false; PAGES];
    let mut page = 0;
    while page < PAGES {
        let (moved, why) = paged.extract(at(&paged, page), page, PAGES - page);
        left[page..page + moved].fill(true);
        page += moved;
        match why {
            Ok(()) => assert_eq!(page, PAGES),
            Err(ExtractError::Missing) => assert_eq!(page, missing),
            Err(ExtractError::Busy) => assert_eq!(page, locked),
            Err(ExtractError::Os(error)) => panic!("page {page}: {error}"),
        }
        page += 1;
    }
    for (page, left) in left.into_iter().enumerate() {
        assert_eq!(left, page != missing && page != locked, "page {page}");
        let there = paged.has(at(&paged, page)).unwrap();
        assert_eq!(there, page == locked, "page {page}");
        if left {
            assert!(paged.frame_bytes(page).iter().all(|&byte| byte == page as u8 + 1), "page {page}");
        }
    }
    // It is as it was, and can be written to.
    let kept = at(&paged, locked) as *mut u8;
    // SAFETY: a page of this test's own, which is there.
    unsafe {
        assert_eq!(kept.read_volatile(), locked as u8 + 1);
        kept.write_volatile(7);
        assert_eq!((kept.read_volatile(), libc::munlock(kept.cast(), PAGE_BYTES)), (7, 0));
    }
    assert!(paged.extract(at(&paged, locked), locked, 1).1.is_ok());
    assert_eq!(paged.frame_bytes(locked)[0], 7);
}
