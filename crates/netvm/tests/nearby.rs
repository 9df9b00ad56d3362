//! Lenders on this host, whose memory is read and written without them. tests/lender.rs and tests/volume.rs have what is the same on all ways.

use std::time::{Duration, Instant};

use netvm::lender::{
    BorrowOptions, Borrower, Completion, LenderConfig, LenderStatus, LinkChoice, PostError, status,
};
use netvm_sys::mapping::Mapping;

mod common;
use common::{Random, Serving};

const SLAB: u64 = 1 << 20;

fn settle(borrower: &mut Borrower) {
    let mut done: Vec<Completion> = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(5);
    while borrower.pending() > 0 {
        assert!(Instant::now() < deadline);
        borrower.poll(&mut done).unwrap();
    }
    for Completion { token, result, .. } in done {
        assert!(result.is_ok(), "{token}: {result:?}");
    }
}

#[test]
fn transfers_are_the_borrowers_own_work_after_the_first_write() {
    let lender = Serving::new(4);
    let mut borrower = lender.connect_by(LinkChoice::Auto);
    assert!(borrower.is_nearby());
    let memory = Mapping::anonymous(4096).unwrap();
    let slab = borrower.borrow_slab().unwrap();
    memory.shared().fill(1);
    borrower.post_write(0, slab, 0, memory.shared()).unwrap();
    assert!(!borrower.has_ended(), "the lender has to provide the memory");
    settle(&mut borrower);
    assert_eq!(status(&lender.address).unwrap().resident_bytes, SLAB);
    let ops = status(&lender.address).unwrap().ops;
    assert!(status(&lender.address).unwrap().borrowers[0].nearby);
    for page in 0..256 {
        memory.shared().fill(page as u8);
        borrower.post_write(0, slab, page * 4096, memory.shared()).unwrap();
        assert!(borrower.has_ended());
        settle(&mut borrower);
        borrower.post_read(0, slab, page * 4096, memory.shared()).unwrap();
        assert!(borrower.has_ended());
        settle(&mut borrower);
        assert_eq!(memory.shared().to_vec(), [page as u8; 4096]);
    }
    borrower.flush(Duration::from_secs(1)).unwrap();
    let after = status(&lender.address).unwrap();
    assert_eq!((after.ops, after.resident_bytes), (ops, SLAB));
    // What is discarded costs nothing, and is provided again.
    borrower.post_discard(0, slab, 0, SLAB).unwrap();
    settle(&mut borrower);
    assert_eq!(status(&lender.address).unwrap().resident_bytes, 0);
    borrower.post_read(0, slab, 4096, memory.shared()).unwrap();
    settle(&mut borrower);
    assert_eq!(
        (memory.shared().to_vec(), status(&lender.address).unwrap().resident_bytes),
        (vec![0; 4096], 0)
    );
    borrower.post_write(0, slab, 0, memory.shared()).unwrap();
    assert!(!borrower.has_ended());
    settle(&mut borrower);
    assert_eq!(status(&lender.address).unwrap().resident_bytes, SLAB);
}

#[test]
fn many_writes_at_once_do_not_keep_it_on_the_session() {
    let lender = Serving::new(4);
    let mut borrower = lender.connect_by(LinkChoice::Auto);
    let memory = Mapping::anonymous(4096).unwrap();
    let slab = borrower.borrow_slab().unwrap();
    for page in 0..100 {
        borrower.post_write(page, slab, page * 4096, memory.shared()).unwrap();
        assert!(!borrower.has_ended(), "the lender has to provide the memory");
    }
    settle(&mut borrower);
    // Nobody reads or flushes: nothing but the writes themselves can lead back.
    let over_session = (0..400).filter(|page| {
        borrower.post_write(0, slab, page % 200 * 4096, memory.shared()).unwrap();
        let direct = borrower.has_ended();
        settle(&mut borrower);
        std::thread::sleep(Duration::from_millis(1));
        !direct
    });
    let count = over_session.count();
    assert!(count < 100, "{count}");
}

#[test]
fn slabs_come_and_go_between_borrowers_of_both_kinds() {
    let lender = Serving::new(6);
    let mut random = Random::new(11);
    let mut borrowers: Vec<(Borrower, Vec<(u32, u64)>)> =
        [LinkChoice::Shm, LinkChoice::Socket, LinkChoice::Shm]
            .map(|link| (lender.connect_by(link), Vec::new()))
            .into();
    let memory = Mapping::anonymous(64 << 10).unwrap();
    let local = memory.shared();
    for round in 1..3000u64 {
        let which = (random.next() % 3) as usize;
        let (borrower, slabs) = &mut borrowers[which];
        match random.next() % 16 {
            0 => {
                if let Ok(slab) = borrower.borrow_slab() {
                    // Whatever was there before.
                    let at = random.next() % 16 * (64 << 10);
                    local.fill(9);
                    borrower.post_read(0, slab, at, local).unwrap();
                    settle(borrower);
                    assert!(local.to_vec().iter().all(|&byte| byte == 0), "round {round}");
                    slabs.push((slab, 0));
                }
            }
            1 => {
                if let Some((slab, _)) = slabs.pop() {
                    borrower.return_slab(slab).unwrap();
                }
            }
            2 if round % 8 == 0 => {
                let link = if which == 1 { LinkChoice::Socket } else { LinkChoice::Shm };
                borrowers[which] = (lender.connect_by(link), Vec::new());
            }
            _ => {
                if slabs.is_empty() {
                    continue;
                }
                let index = (random.next() % slabs.len() as u64) as usize;
                let (slab, seed) = &mut slabs[index];
                if *seed > 0 {
                    for piece in 0..16u64 {
                        local.fill(0xEE);
                        borrower.post_read(1, *slab, piece << 16, local).unwrap();
                        settle(borrower);
                        let byte = (*seed ^ piece) as u8;
                        assert!(local.to_vec() == vec![byte; 64 << 10], "round {round}, piece {piece}");
                    }
                }
                *seed = round;
                for piece in 0..16u64 {
                    local.fill((*seed ^ piece) as u8);
                    borrower.post_write(2, *slab, piece << 16, local).unwrap();
                    if !random.next().is_multiple_of(4) {
                        settle(borrower);
                    } else {
                        // Some are under way together.
                        while borrower.has_ended() || borrower.wants_write() {
                            borrower.poll(&mut Vec::new()).unwrap();
                        }
                        settle(borrower);
                    }
                }
            }
        }
    }
    drop(borrowers);
    let deadline = Instant::now() + Duration::from_secs(2);
    let held = |status: LenderStatus| (status.used_bytes, status.resident_bytes);
    while held(status(&lender.address).unwrap()) != (0, 0) {
        assert!(Instant::now() < deadline, "what has come back is cleared");
    }
}

#[test]
fn a_fork_reads_its_parents_file_and_does_not_write_it() {
    let lender = Serving::new(6);
    let mut parent = lender.connect_by(LinkChoice::Shm);
    let (memory, there) = (Mapping::anonymous(4096).unwrap(), Mapping::anonymous(4096).unwrap());
    let slab = parent.borrow_slab().unwrap();
    let write = |borrower: &mut Borrower, slab, value| {
        memory.shared().fill(value);
        borrower.post_write(0, slab, 0, memory.shared()).unwrap();
        let direct = borrower.has_ended();
        settle(borrower);
        direct
    };
    let read = |borrower: &mut Borrower, slab, value| {
        there.shared().fill(0xEE);
        borrower.post_read(0, slab, 0, there.shared()).unwrap();
        let direct = borrower.has_ended();
        settle(borrower);
        assert!(there.shared().to_vec() == [value; 4096], "{value}");
        direct
    };
    for value in 1..4 {
        write(&mut parent, slab, value);
    }
    let mut child = parent.fork().unwrap();
    assert!(child.is_nearby() && child.descriptors().count() == 3);
    assert!(read(&mut parent, slab, 3) && read(&mut child, slab, 3));
    // What parent and child borrow later the other one has not.
    let (later, own) = (parent.borrow_slab().unwrap(), child.borrow_slab().unwrap());
    assert!(child.post_read(0, later, 0, there.shared()).is_ok() && !child.has_ended());
    let mut done = Vec::new();
    while done.is_empty() {
        child.poll(&mut done).unwrap();
    }
    assert!(done.remove(0).result.is_err());
    write(&mut child, own, 8);
    assert!(read(&mut child, own, 8));
    // A write of what was inherited is the lender's work, and reads are behind it.
    for value in 4..8 {
        memory.shared().fill(value);
        child.post_write(0, slab, 0, memory.shared()).unwrap();
        assert!(!child.has_ended());
        read(&mut child, slab, value);
    }
    child.flush(Duration::from_secs(1)).unwrap();
    assert!(read(&mut child, slab, 7) && read(&mut parent, slab, 7));
    // A child of the child has slabs in two files besides its own.
    let mut grandchild = child.fork().unwrap();
    assert_eq!(grandchild.descriptors().count(), 4);
    assert!(read(&mut grandchild, slab, 7) && read(&mut grandchild, own, 8));
    drop(parent);
    child.return_slab(slab).unwrap();
    assert!(read(&mut grandchild, slab, 7) && read(&mut grandchild, own, 8));
    drop(child);
    assert!(read(&mut grandchild, slab, 7) && read(&mut grandchild, own, 8));
    // Given back it is somebody else's, and never in that file again.
    grandchild.return_slab(slab).unwrap();
    let again = std::iter::from_fn(|| grandchild.borrow_slab().ok()).find(|&again| again == slab);
    assert_eq!(again, Some(slab));
    assert!(read(&mut grandchild, slab, 0));
    write(&mut grandchild, slab, 9);
    write(&mut grandchild, slab, 10);
    assert!(read(&mut grandchild, slab, 10));
}

#[test]
fn a_lender_that_is_gone_is_told_of() {
    let lender = Serving::new(4);
    let mut borrower = lender.connect_by(LinkChoice::Shm);
    let memory = Mapping::anonymous(4096).unwrap();
    let slab = borrower.borrow_slab().unwrap();
    borrower.post_write(0, slab, 0, memory.shared()).unwrap();
    settle(&mut borrower);
    drop(lender);
    let deadline = Instant::now() + Duration::from_secs(5);
    let error = loop {
        assert!(Instant::now() < deadline);
        // It may be read for as long as nobody has looked.
        let _ = borrower.post_read(0, slab, 0, memory.shared());
        if let Err(error) = borrower.poll(&mut Vec::new()) {
            break error;
        }
    };
    assert!(error.to_string().contains("lost the connection"), "{error}");
    assert!(borrower.post_read(0, slab, 0, memory.shared()).is_err());
    assert!(borrower.post_write(0, slab, 0, memory.shared()).is_err());
}

/// As if this process had been stopped for longer than the lender waits: its memory reads as zeros, and is nobody's.
#[test]
fn memory_that_was_taken_away_is_neither_read_nor_written() {
    let (size_bytes, lease_timeout) = (4 * SLAB, Some(Duration::from_millis(400)));
    let config = LenderConfig { size_bytes, slab_bytes: SLAB, lease_timeout, ..LenderConfig::default() };
    let lender = Serving::start(config);
    let memory = Mapping::anonymous(4096).unwrap();
    let mut borrowers = [(); 2].map(|()| {
        let mut borrower = lender.connect_by(LinkChoice::Shm);
        let slab = borrower.borrow_slab().unwrap();
        memory.shared().fill(7);
        borrower.post_write(0, slab, 0, memory.shared()).unwrap();
        settle(&mut borrower);
        borrower.post_write(0, slab, 0, memory.shared()).unwrap();
        assert!(borrower.has_ended(), "directly");
        settle(&mut borrower);
        (borrower, slab)
    });
    let deadline = Instant::now() + Duration::from_secs(10);
    while status(&lender.address).unwrap().used_bytes > 0 {
        assert!(Instant::now() < deadline, "it waits for ever");
        std::thread::sleep(Duration::from_millis(10));
    }
    for (index, (borrower, slab)) in borrowers.iter_mut().enumerate() {
        let posted = match index {
            0 => borrower.post_read(0, *slab, 0, memory.shared()),
            _ => borrower.post_write(0, *slab, 0, memory.shared()),
        };
        assert_eq!(posted, Err(PostError::Closed));
        let error = borrower.poll(&mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains(&lender.address), "{error}");
    }
}

/// As if a child had been stopped for longer than that: what its parent has written to the slab since is not what it had inherited.
#[test]
fn what_a_child_had_inherited_is_not_read_when_its_lease_is_over() {
    let (size_bytes, lease_timeout) = (4 * SLAB, Some(Duration::from_millis(400)));
    let config = LenderConfig { size_bytes, slab_bytes: SLAB, lease_timeout, ..LenderConfig::default() };
    let lender = Serving::start(config);
    let memory = Mapping::anonymous(4096).unwrap();
    let mut parent = lender.connect_by(LinkChoice::Shm);
    let slab = parent.borrow_slab().unwrap();
    for _ in 0..2 {
        memory.shared().fill(7);
        parent.post_write(0, slab, 0, memory.shared()).unwrap();
        settle(&mut parent);
    }
    let mut child = parent.fork().unwrap();
    let there = Mapping::anonymous(4096).unwrap();
    child.post_read(0, slab, 0, there.shared()).unwrap();
    assert!(child.has_ended(), "directly");
    settle(&mut child);
    assert!(there.shared().to_vec() == [7; 4096]);
    // It stands still, and its parent does not.
    let deadline = Instant::now() + Duration::from_secs(10);
    while !parent.sole_holder(slab).unwrap() {
        assert!(Instant::now() < deadline, "it waits for ever");
        std::thread::sleep(Duration::from_millis(10));
    }
    memory.shared().fill(8);
    parent.post_write(0, slab, 0, memory.shared()).unwrap();
    assert!(parent.has_ended(), "directly");
    settle(&mut parent);
    assert_eq!(child.post_read(0, slab, 0, there.shared()), Err(PostError::Closed));
    assert!(child.poll(&mut Vec::new()).unwrap_err().to_string().contains(&lender.address));
}

#[test]
fn memory_is_not_shared_with_whoever_does_not_want_it() {
    let lender = Serving::new(4);
    let socket = lender.connect();
    assert!(!socket.is_nearby() && !status(&lender.address).unwrap().borrowers[0].nearby);
    let options = BorrowOptions { link: LinkChoice::Shm, ..BorrowOptions::default() };
    assert!(Borrower::connect(&lender.address, &options).unwrap().is_nearby());
}
