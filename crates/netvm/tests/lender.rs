//! Lender and borrower over real sockets.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use netvm::Error;
use netvm::lender::LinkChoice::{self, Shm, Socket};
use netvm::lender::{
    BorrowOptions, Borrower, Completion, Compress, Lender, LenderConfig, LenderStatus, PostError, StopFlag,
    status,
};
use netvm_core::limits::{HEADER_BYTES, HELLO_BYTES, OPS_MAX, VERSION};
use netvm_core::wire::{Header, Hello, Kind, Role};
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;

mod common;
use common::{Random, Serving};

const SLAB: u64 = 1 << 20;

/// Polls until nothing is under way.
fn settle(borrower: &mut Borrower) -> Vec<Completion> {
    let mut done = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(5);
    while borrower.pending() > 0 && borrower.poll(&mut done).is_ok() {
        assert!(Instant::now() < deadline, "stuck with {} under way", borrower.pending());
    }
    done
}

fn ok(done: &[Completion]) {
    for completion in done {
        completion.result.clone().unwrap();
    }
}

fn memory(bytes: usize) -> SharedSlice {
    // The addresses of a dropped mapping stay reserved; a test may leak it as well.
    let mapping = Box::leak(Box::new(Mapping::anonymous(bytes).unwrap()));
    mapping.shared()
}

fn random_bytes(random: &mut Random, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|_| random.next() as u8).collect()
}

#[test]
fn written_bytes_come_back_over_tcp_and_unix() {
    let unix = format!("unix:/tmp/netvm-lender-test-{}", std::process::id());
    for (address, link) in [("127.0.0.1:0", Socket), (&unix, Socket), ("127.0.0.1:0", Shm), (&unix, Shm)] {
        let lent = Serving::at(address, 4);
        let mut borrower = lent.connect_by(link);
        let mut random = Random::new(1);
        let mut model = Vec::new();
        let mut slabs = Vec::new();
        for _ in 0..4 {
            slabs.push(borrower.borrow_slab().unwrap());
            model.push(vec![0u8; SLAB as usize]);
        }
        let local = memory(1 << 20);
        for round in 0..300 {
            // A batch of writes of any size and alignment, then a batch of reads that must see them.
            let mut at = 0;
            for token in 0..random.next() % 20 {
                let which = (random.next() % 4) as usize;
                let bytes = 1 + (random.next() % 20_000) as usize;
                let offset = (random.next() % (SLAB - bytes as u64)) as usize;
                let data = random_bytes(&mut random, bytes);
                local.write_from(at, &data).unwrap();
                model[which][offset..offset + bytes].copy_from_slice(&data);
                let slice = local.sub(at, bytes).unwrap();
                borrower.post_write(token, slabs[which], offset as u64, slice).unwrap();
                at += bytes;
            }
            let mut expected = Vec::new();
            for token in 100..100 + random.next() % 20 {
                let which = (random.next() % 4) as usize;
                let bytes = 1 + (random.next() % 20_000) as usize;
                let offset = (random.next() % (SLAB - bytes as u64)) as usize;
                let slice = local.sub(at, bytes).unwrap();
                if random.next().is_multiple_of(2) {
                    borrower.post_read(token, slabs[which], offset as u64, slice).unwrap();
                } else {
                    let cut = (random.next() % bytes as u64) as usize;
                    let pieces = [slice.sub(0, cut).unwrap(), slice.sub(cut, bytes - cut).unwrap()];
                    borrower.post_read_pages(token, slabs[which], offset as u64, &pieces).unwrap();
                }
                expected.push((slice, model[which][offset..offset + bytes].to_vec()));
                at += bytes;
            }
            ok(&settle(&mut borrower));
            for (slice, bytes) in expected {
                assert!(slice.to_vec() == bytes, "round {round}");
            }
        }
    }
}

#[test]
fn pages_scatter_and_gather() {
    for link in [Socket, Shm] {
        pages_scatter_and_gather_by(link);
    }
}

fn pages_scatter_and_gather_by(link: LinkChoice) {
    let lent = Serving::new(1);
    let mut borrower = lent.connect_by(link);
    let slab = borrower.borrow_slab().unwrap();
    let local = memory(1 << 20);
    let pages: Vec<_> = (0..256).rev().map(|page| local.sub(page * 4096, 4096).unwrap()).collect();
    for (index, page) in pages.iter().enumerate() {
        page.fill(index as u8);
    }
    borrower.post_write_pages(1, slab, 0, &pages).unwrap();
    ok(&settle(&mut borrower));
    local.fill(0xEE);
    for chunk in 0..4 {
        borrower.post_read_pages(2, slab, chunk * 64 * 4096, &pages[chunk as usize * 64..][..64]).unwrap();
    }
    ok(&settle(&mut borrower));
    for (index, page) in pages.iter().enumerate() {
        assert_eq!(page.to_vec(), vec![index as u8; 4096]);
    }
    assert_eq!(borrower.post_read(1, slab, 0, memory(2 << 20)), Err(PostError::TooLong));
}

#[test]
fn slabs_are_refused_beyond_the_size_and_come_back_as_zeros() {
    for (one, two) in [(Socket, Socket), (Shm, Shm), (Shm, Socket), (Socket, Shm)] {
        slabs_are_refused_and_come_back(one, two);
    }
}

fn slabs_are_refused_and_come_back(one: LinkChoice, two: LinkChoice) {
    let lent = Serving::new(2);
    let (mut one, mut two) = (lent.connect_by(one), lent.connect_by(two));
    let local = memory(4096);
    let slab = one.borrow_slab().unwrap();
    let other = two.borrow_slab().unwrap();
    assert_eq!(
        one.borrow_slab(),
        Err(Error::LenderFull {
            lender: lent.address.clone(),
            size_bytes: 2 * SLAB,
            used_bytes: 2 * SLAB,
            limit: netvm::LenderLimit::Size
        })
    );
    local.fill(7);
    one.post_write(0, slab, 8192, local).unwrap();
    ok(&settle(&mut one));
    one.return_slab(slab).unwrap();
    assert!(matches!(one.return_slab(slab), Err(Error::Op { .. })), "twice");
    assert_eq!(two.borrow_slab(), Ok(slab));
    two.post_read(0, slab, 8192, local).unwrap();
    ok(&settle(&mut two));
    assert_eq!(local.to_vec(), vec![0; 4096]);
    // Not ours, not there, beyond the end: refused, and the connection lives on.
    for (slab, offset) in [(other, 0), (99, 0), (u32::MAX, u64::MAX)] {
        one.post_read(5, slab, offset, local).unwrap();
        let done = settle(&mut one);
        assert!(matches!(&done[0].result, Err(Error::Op { .. })), "{done:?}");
    }
    two.post_read(5, slab, SLAB - 4095, local).unwrap();
    assert!(settle(&mut two)[0].result.is_err());
    two.post_read(5, slab, SLAB - 4096, local).unwrap();
    ok(&settle(&mut two));
    // A refused write means lost data: that connection is over.
    one.post_write(6, other, 0, local).unwrap();
    let deadline = Instant::now() + Duration::from_secs(2);
    let error = loop {
        if let Err(error) = one.poll(&mut Vec::new()) {
            break error;
        }
        assert!(Instant::now() < deadline);
    };
    assert!(error.to_string().contains("refused a write"), "{error}");
    assert_eq!(one.post_read(1, slab, 0, local), Err(PostError::Closed));
}

#[test]
fn a_fork_shares_slabs_until_one_lets_go() {
    for link in [Socket, Shm] {
        a_fork_shares_slabs_by(link);
    }
}

fn a_fork_shares_slabs_by(link: LinkChoice) {
    let lent = Serving::new(3);
    let mut parent = lent.connect_by(link);
    let local = memory(8192);
    let (page, back) = (local.sub(0, 4096).unwrap(), local.sub(4096, 4096).unwrap());
    let slab = parent.borrow_slab().unwrap();
    page.fill(1);
    parent.post_write(0, slab, 0, page).unwrap();
    // The fork sees the write although it is not even sent yet.
    let mut child = parent.fork().unwrap();
    assert_eq!((parent.sole_holder(slab), child.sole_holder(slab)), (Ok(false), Ok(false)));
    // Both know whose it is.
    let other = Serving::new(1).connect_by(link);
    assert!(child.is_at_lender_of(&parent) && parent.is_at_lender_of(&child.fork().unwrap()));
    assert!(!child.is_at_lender_of(&other));
    child.post_read(0, slab, 0, back).unwrap();
    ok(&settle(&mut child));
    assert_eq!(back.to_vec(), vec![1; 4096]);
    let own = child.borrow_slab().unwrap();
    parent.post_read(0, own, 0, back).unwrap();
    ok(&settle(&mut parent)[..1]);
    assert!(settle(&mut parent).is_empty());
    // The parent dies without a word: the slab lives on with the child.
    drop(parent);
    let deadline = Instant::now() + Duration::from_secs(2);
    while !child.sole_holder(slab).unwrap() {
        assert!(Instant::now() < deadline);
    }
    back.fill(0);
    child.post_read(0, slab, 0, back).unwrap();
    ok(&settle(&mut child));
    assert_eq!(back.to_vec(), vec![1; 4096]);
    // As plain data, and by ticket.
    let parts = child.fork().unwrap().into_parts();
    let mut adopted = Borrower::from_parts(parts);
    let ticket = child.fork_ticket().unwrap();
    let mut claimed = Borrower::adopt(&ticket, &BorrowOptions::default()).unwrap();
    assert!(Borrower::adopt(&ticket, &BorrowOptions::default()).is_err(), "a ticket is good once");
    drop(child);
    for borrower in [&mut adopted, &mut claimed] {
        back.fill(0);
        borrower.post_read(0, slab, 0, back).unwrap();
        ok(&settle(borrower));
        assert_eq!(back.to_vec(), vec![1; 4096]);
    }
    drop((adopted, claimed));
    let deadline = Instant::now() + Duration::from_secs(2);
    let held = |status: LenderStatus| (status.used_bytes, status.resident_bytes);
    while held(status(&lent.address).unwrap()) != (0, 0) {
        assert!(Instant::now() < deadline, "a dead borrower's memory is given back");
    }
}

/// Writes all of a slab of 1 MiB.
fn fill_slab(borrower: &mut Borrower, slab: u32, piece: SharedSlice) {
    for offset in (0..1 << 20).step_by(piece.len()) {
        borrower.post_write(0, slab, offset, piece).unwrap();
        ok(&settle(borrower));
    }
}

#[test]
fn slabs_are_zero_however_soon_they_are_lent_again() {
    let folder = std::env::temp_dir();
    let compress = Compress { lend_bytes: 8 << 20, overflow: Some(folder.clone()) };
    let lent = [
        LenderConfig::default(),
        LenderConfig { hugepages: true, ..LenderConfig::default() },
        LenderConfig { folder: Some(folder), ..LenderConfig::default() },
        LenderConfig { compress: Some(compress), ..LenderConfig::default() },
    ]
    .map(|config| Serving::start(LenderConfig { size_bytes: 8 << 20, slab_bytes: 1 << 20, ..config }));
    let piece = memory(256 << 10);
    let is_zero = |borrower: &mut Borrower, slab, offset| {
        piece.fill(0xEE);
        borrower.post_read(0, slab, offset, piece).unwrap();
        ok(&settle(borrower));
        piece.to_vec().iter().all(|&byte| byte == 0)
    };
    for round in 0..80 {
        let (kind, lent) = (round % 4, &lent[round % 4]);
        // One that packs keeps some room for what may not shrink.
        let all = if kind == 3 { 6 } else { 8 };
        let link = if kind < 2 && round % 8 < 4 { Shm } else { Socket };
        let mut borrower = lent.connect_by(link);
        // Those that the one before had, which are not cleared yet.
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut slabs = Vec::new();
        while slabs.len() < all {
            slabs.extend(borrower.borrow_slab());
            assert!(Instant::now() < deadline, "round {round}: {} slabs", slabs.len());
        }
        for &slab in &slabs {
            for offset in (0..1 << 20).step_by(piece.len()) {
                assert!(is_zero(&mut borrower, slab, offset), "round {round}");
            }
            piece.fill(0xCC);
            fill_slab(&mut borrower, slab, piece);
        }
        // One goes back, and another comes, perhaps the same.
        borrower.return_slab(slabs[3]).unwrap();
        slabs[3] = borrower.borrow_slab().unwrap();
        assert!(is_zero(&mut borrower, slabs[3], 1 << 19), "round {round}");
        // What a fork has outlives its parent, and one it gives back does not come back to it.
        let mut child = borrower.fork().unwrap();
        if round % 3 == 0 {
            child.return_slab(slabs[0]).unwrap();
        }
        drop(borrower);
        for &slab in &slabs[4..] {
            piece.fill(0);
            child.post_read(0, slab, 1 << 19, piece).unwrap();
            ok(&settle(&mut child));
            assert!(piece.to_vec().iter().all(|&byte| byte == 0xCC), "round {round}");
        }
    }
}

#[test]
fn nobody_waits_while_what_another_had_is_cleared() {
    let (lent, piece) = (Serving::new(192), memory(256 << 10));
    let (mut greedy, mut other) = (lent.connect_by(Socket), lent.connect_by(Socket));
    piece.fill(7);
    let slab = other.borrow_slab().unwrap();
    fill_slab(&mut other, slab, piece);
    while let Ok(slab) = greedy.borrow_slab() {
        fill_slab(&mut greedy, slab, piece);
    }
    drop(greedy);
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut answered_in_between = 0;
    loop {
        let LenderStatus { used_bytes, resident_bytes, .. } = status(&lent.address).unwrap();
        other.post_read(0, slab, 0, piece).unwrap();
        ok(&settle(&mut other));
        assert_eq!(piece.to_vec()[..2], [7; 2]);
        if resident_bytes <= 1 << 20 {
            break;
        }
        answered_in_between += u32::from(used_bytes == 1 << 20);
        assert!(Instant::now() < deadline, "{resident_bytes}");
    }
    assert!(answered_in_between > 3, "{answered_in_between}");
}

#[test]
fn tickets_of_one_are_no_reason_to_refuse_others() {
    let lent = Serving::new(1);
    let (mut greedy, mut other) = (lent.connect(), lent.connect());
    let tickets: Vec<_> = std::iter::from_fn(|| greedy.fork_ticket().ok()).take(5000).collect();
    assert!((1..100).contains(&tickets.len()), "{}", tickets.len());
    let error = greedy.fork_ticket().unwrap_err();
    assert!(matches!(error, Error::Op { code: netvm_core::wire::Status::Busy, .. }), "{error:?}");
    drop(Borrower::adopt(&other.fork_ticket().unwrap(), &BorrowOptions::default()).unwrap());
    // With one that is claimed there is room for the next.
    drop(Borrower::adopt(&tickets[0], &BorrowOptions::default()).unwrap());
    greedy.fork_ticket().unwrap();
    assert!(greedy.fork_ticket().is_err());
}

#[test]
fn a_status_lists_borrowers() {
    let lent = Serving::new(4);
    let (name, pid) = ("sort\x1b[2J".into(), Some(42));
    let options = BorrowOptions { name, pid, link: Socket, ..BorrowOptions::default() };
    let mut borrower = Borrower::connect(&lent.address, &options).unwrap();
    let slab = borrower.borrow_slab().unwrap();
    borrower.post_write(0, slab, 0, memory(4096)).unwrap();
    borrower.flush(Duration::from_secs(1)).unwrap();
    let status = status(&lent.address).unwrap();
    assert_eq!((status.size_bytes, status.used_bytes, status.slab_bytes), (4 * SLAB, SLAB, SLAB));
    assert_eq!(status.resident_bytes, 4096);
    let listed = &status.borrowers[0];
    assert_eq!((listed.name.as_str(), listed.pid, listed.bytes, listed.ops), ("sort?[2J", 42, SLAB, 1));
}

#[test]
fn a_slab_on_disk_that_is_discarded_keeps_its_room() {
    let (folder, link) = (Some(std::env::temp_dir()), Socket);
    let config = LenderConfig { size_bytes: 2 * SLAB, slab_bytes: SLAB, folder, ..LenderConfig::default() };
    let lent = Serving::start(config);
    let mut borrower = lent.connect_by(link);
    let slab = borrower.borrow_slab().unwrap();
    let resident = || status(&lent.address).unwrap().resident_bytes;
    let reserved = resident();
    assert!(reserved >= SLAB);
    for (offset, bytes) in [(0, SLAB / 2), (0, SLAB)] {
        borrower.post_discard(1, slab, offset, bytes).unwrap();
        ok(&settle(&mut borrower));
        assert!(resident() >= reserved, "{} of {reserved}", resident());
    }
    borrower.return_slab(slab).unwrap();
    assert!(resident() < SLAB);
}

/// A write that `push` has sent completes only at the next poll, when a call may have taken its place already.
#[test]
fn a_call_is_not_answered_by_a_write_that_was_pushed_before() {
    let lent = Serving::new(1);
    let mut borrower = lent.connect();
    let slab = borrower.borrow_slab().unwrap();
    for token in 0..50 {
        borrower.post_write(token, slab, 0, memory(4096)).unwrap();
        borrower.push().unwrap();
        assert_eq!(borrower.sole_holder(slab), Ok(true));
        let done = settle(&mut borrower);
        assert_eq!(done.iter().map(|completion| completion.token).collect::<Vec<_>>(), [token]);
        ok(&done);
    }
}

#[test]
fn a_full_queue_is_backpressure() {
    let lent = Serving::new(1);
    let mut borrower = lent.connect();
    let slab = borrower.borrow_slab().unwrap();
    let local = memory(4096);
    let mut posted = 0;
    while borrower.post_read(posted, slab, 0, local) == Ok(()) {
        posted += 1;
    }
    assert_eq!(posted as usize, OPS_MAX);
    let mut done = settle(&mut borrower);
    ok(&done);
    done.sort_by_key(|completion| completion.token);
    assert!(done.iter().enumerate().all(|(index, completion)| completion.token == index as u64));
    // Many windows of writes without a read: acknowledgements must come on their own.
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut written = 0;
    while written < 5000 {
        match borrower.post_write(written, slab, 0, local) {
            Ok(()) => written += 1,
            Err(error) => {
                assert_eq!(error, PostError::Full);
                borrower.poll(&mut Vec::new()).unwrap();
                assert!(Instant::now() < deadline);
            }
        }
    }
    borrower.flush(Duration::from_secs(2)).unwrap();
}

#[test]
fn a_killed_lender_is_named_and_nothing_hangs() {
    let lent = Serving::new(1);
    let mut borrower = lent.connect();
    let slab = borrower.borrow_slab().unwrap();
    let local = memory(4096);
    let address = lent.address.clone();
    lent.stop.stop();
    std::thread::sleep(Duration::from_millis(100));
    lent.stop.stop();
    for token in 0..10 {
        borrower.post_read(token, slab, 0, local).unwrap();
    }
    let mut done = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(3);
    let error = loop {
        if let Err(error) = borrower.poll(&mut done) {
            break error;
        }
        assert!(Instant::now() < deadline);
    };
    assert!(matches!(error, Error::LenderLost { .. }) && error.to_string().contains(&address), "{error}");
    assert_eq!(done.len(), 10);
    assert_eq!(borrower.pending(), 0);
    assert_eq!(borrower.borrow_slab(), Err(error));
    assert!(matches!(Borrower::connect(&address, &BorrowOptions::default()), Err(Error::Connect { .. })));
}

#[test]
fn a_stopped_lender_waits_for_its_borrowers() {
    let mut lent = Serving::new(1);
    let mut borrower = lent.connect();
    let slab = borrower.borrow_slab().unwrap();
    lent.stop.stop();
    std::thread::sleep(Duration::from_millis(50));
    borrower.post_read(0, slab, 0, memory(4096)).unwrap();
    ok(&settle(&mut borrower));
    assert!(status(&lent.address).unwrap().draining);
    let refused = Borrower::connect(&lent.address, &BorrowOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("shutting down"), "{refused}");
    drop(borrower);
    lent.thread.take().unwrap().join().unwrap();
}

#[test]
fn a_private_lender_ends_with_its_parent_and_its_last_borrower() {
    use std::os::fd::IntoRawFd;
    let (ours, theirs) = UnixStream::pair().unwrap();
    let parent_fd = Some(theirs.into_raw_fd());
    let config = LenderConfig { private: true, parent_fd, ..LenderConfig::default() };
    let mut lender = Lender::bind(config).unwrap();
    let address = lender.addresses()[0].clone();
    let thread = std::thread::spawn(move || lender.run(&StopFlag::new().unwrap()));
    let mut borrower = Borrower::connect(&address, &BorrowOptions::default()).unwrap();
    drop(ours);
    std::thread::sleep(Duration::from_millis(50));
    borrower.borrow_slab().unwrap();
    drop(borrower);
    thread.join().unwrap().unwrap();
}

/// A server that answers every connection with `answer` and closes it after the peer has.
fn answering(answer: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; HELLO_BYTES]);
            let _ = stream.write_all(&answer);
            let _ = stream.read(&mut [0; 64]);
        }
    });
    address
}

#[test]
fn other_versions_and_other_protocols_are_named() {
    let mut newer = Hello::new(Role::Lender).encode();
    newer[8..12].copy_from_slice(&[9, 0, 8, 0]);
    let address = answering(newer.to_vec());
    let error = Borrower::connect(&address, &BorrowOptions::default()).unwrap_err();
    assert_eq!(error, Error::Version { lender: address, theirs: 9, theirs_min: 8 });
    assert!(error.to_string().contains("versions 8 to 9"), "{error}");
    let address = answering(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec());
    let error = Borrower::connect(&address, &BorrowOptions::default()).unwrap_err();
    assert_eq!(error, Error::NotNetvm { lender: address });
    // A good hello and then nonsense.
    let mut nonsense = Hello::new(Role::Lender).encode().to_vec();
    nonsense.extend_from_slice(&[0xEE; 500]);
    let error = Borrower::connect(&answering(nonsense), &BorrowOptions::default()).unwrap_err();
    assert!(matches!(&error, Error::Protocol { reason, .. } if reason.contains("238")), "{error}");
    // And the other way round: a borrower of another version at our lender gets our versions.
    let lent = Serving::new(1);
    let mut stream = TcpStream::connect(&lent.address).unwrap();
    newer[12] = Role::Borrower as u8;
    stream.write_all(&newer).unwrap();
    let mut answer = [0; HELLO_BYTES];
    stream.read_exact(&mut answer).unwrap();
    let hello = Hello::decode(&answer).unwrap();
    assert_eq!((hello.version, hello.refusal), (VERSION, netvm_core::wire::Refusal::Version));
    assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0, "closed");
}

/// Answers as a lender whose slabs have so many bytes, up to the second call.
fn lending_slabs_of(slab_bytes: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.read_exact(&mut [0; HELLO_BYTES]).unwrap();
        stream.write_all(&Hello::new(Role::Lender).encode()).unwrap();
        let mut asked = [0; HEADER_BYTES];
        stream.read_exact(&mut asked).unwrap();
        let asked = Header::decode(&asked).unwrap();
        stream.read_exact(&mut vec![0; asked.payload_bytes as usize]).unwrap();
        let answer = Header { token: asked.token, payload_bytes: 8, ..Header::new(Kind::CallReply) };
        stream.write_all(&answer.encode()).unwrap();
        stream.write_all(&slab_bytes.to_le_bytes()).unwrap();
        let _ = stream.read(&mut [0; 64]);
    });
    address
}

#[test]
fn lenders_of_impossible_slabs_are_named() {
    for bytes in [0, 1, 4095, 4097, (1 << 30) + 4096, 1 << 31, 1 << 44, 1 << 63, u64::MAX] {
        let address = lending_slabs_of(bytes);
        let error = Borrower::connect(&address, &BorrowOptions::default()).unwrap_err();
        let named = matches!(&error, Error::Protocol { lender, .. } if *lender == address);
        assert!(named && error.to_string().contains(&format!("{bytes} bytes")), "{error}");
    }
    let address = lending_slabs_of(1 << 30);
    let error = Borrower::connect(&address, &BorrowOptions::default()).unwrap_err();
    assert!(matches!(error, Error::LenderLost { .. }), "as far as the second call: {error}");
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    let with = |size_bytes, slab_bytes, hugepages| {
        Lender::bind(LenderConfig { size_bytes, slab_bytes, hugepages, ..LenderConfig::default() })
    };
    assert!(with(1 << 30, 2 << 20, true).is_ok());
    for (size, slab) in [(1 << 20, 2 << 20), (1 << 30, 0), (1 << 30, 1000), (u64::MAX, 4096)] {
        let error = with(size, slab, false).unwrap_err().to_string();
        assert!(error.contains("slab"), "{error}");
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let listen = vec![address.clone()];
    let error = Lender::bind(LenderConfig { listen, ..LenderConfig::default() }).unwrap_err().to_string();
    assert!(error.contains(&address) && error.contains("in use"), "{error}");
}

#[test]
fn a_silent_server_times_out() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = BorrowOptions { connect_timeout: Duration::from_millis(200), ..BorrowOptions::default() };
    let error = Borrower::connect(&listener.local_addr().unwrap().to_string(), &options).unwrap_err();
    assert!(matches!(error, Error::Timeout { after_ms: 200, .. }), "{error}");
    for (address, part) in [("nonsense", "HOST:PORT"), ("unix:/nowhere/at/all", "No such file")] {
        let error = Borrower::connect(address, &options).unwrap_err().to_string();
        assert!(error.contains(address) && error.contains(part), "{error}");
    }
}

#[test]
fn half_open_connections_and_garbage_do_not_disturb_others() {
    let lent = Serving::new(1);
    let mut half_open: Vec<_> = (0..50).map(|_| TcpStream::connect(&lent.address).unwrap()).collect();
    half_open[1].write_all(b"netvm").unwrap();
    let mut random = Random::new(7);
    for round in 0..200 {
        let mut stream = TcpStream::connect(&lent.address).unwrap();
        let len = (random.next() % 400) as usize;
        let mut bytes = random_bytes(&mut random, len);
        if round % 2 == 0 {
            // Behind a good hello, frames that make no sense.
            bytes.splice(0..0, Hello::new(Role::Borrower).encode());
        }
        let _ = stream.write_all(&bytes);
    }
    let mut borrower = lent.connect();
    let slab = borrower.borrow_slab().unwrap();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(4000) {
        borrower.post_read(0, slab, 0, memory(4096)).unwrap();
        ok(&settle(&mut borrower));
        std::thread::sleep(Duration::from_millis(20));
    }
    for stream in &mut half_open {
        stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let closed = stream.read(&mut [0; 8]);
        let gone = matches!(&closed, Ok(0))
            || matches!(&closed, Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset);
        assert!(gone, "still open after 4 s: {closed:?}");
    }
}

/// Prints what a page costs; the figures are checked only loosely, a debug build on a busy machine must pass too.
#[test]
fn pages_are_fast() {
    let lent = Serving::new(8);
    let mut borrower = lent.connect();
    let slab = borrower.borrow_slab().unwrap();
    let local = memory(1 << 20);
    let pages: Vec<_> = (0..256).map(|page| local.sub(page * 4096, 4096).unwrap()).collect();
    borrower.post_write_pages(0, slab, 0, &pages).unwrap();
    ok(&settle(&mut borrower));
    let rounds = 20_000;
    let mut done = Vec::with_capacity(64);
    let start = Instant::now();
    for round in 0..rounds {
        borrower.post_read(round, slab, (round % 256) * 4096, pages[0]).unwrap();
        while done.is_empty() {
            borrower.poll(&mut done).unwrap();
        }
        done.clear();
    }
    let page_us = start.elapsed().as_secs_f64() * 1e6 / rounds as f64;
    let start = Instant::now();
    let mut posted = 0;
    let mut finished = 0;
    let batches = 8000;
    while finished < batches {
        while posted < batches && posted - finished < 4 {
            let from = (posted % 4 * 64) as usize;
            borrower.post_read_pages(posted, slab, from as u64 * 4096, &pages[from..from + 64]).unwrap();
            posted += 1;
        }
        borrower.poll(&mut done).unwrap();
        finished += done.len() as u64;
        done.clear();
    }
    let gb_per_s = batches as f64 * 64.0 * 4096.0 / start.elapsed().as_secs_f64() / 1e9;
    let start = Instant::now();
    let (mut posted, mut finished, writes) = (0, 0, 4000);
    while finished < writes {
        while posted < writes && borrower.post_write_pages(posted, slab, 0, &pages[..64]).is_ok() {
            posted += 1;
        }
        borrower.poll(&mut done).unwrap();
        finished += done.len() as u64;
        done.clear();
    }
    borrower.flush(Duration::from_secs(5)).unwrap();
    let write_gb_per_s = writes as f64 * 64.0 * 4096.0 / start.elapsed().as_secs_f64() / 1e9;
    println!(
        "one page {page_us:.1} us; 64-page reads {gb_per_s:.2} GB/s; 64-page writes {write_gb_per_s:.2} GB/s"
    );
    assert!(page_us < 1000.0 && gb_per_s > 0.05);
}

/// Refusals among pipelined reads: what was laid out for a page turns out to be something else, and must be moved.
#[test]
fn refused_reads_among_others_do_not_disturb_them() {
    let lent = Serving::new(1);
    let mut borrower = lent.connect();
    let slab = borrower.borrow_slab().unwrap();
    let local = memory(1 << 20);
    for page in 0..256 {
        local.sub(page * 4096, 4096).unwrap().fill(page as u8);
    }
    borrower.post_write(0, slab, 0, local).unwrap();
    ok(&settle(&mut borrower));
    let mut random = Random::new(3);
    for _ in 0..200 {
        local.fill(0xAA);
        let count = 1 + random.next() % 60;
        let mut expected = Vec::new();
        for token in 0..count {
            let bytes = 1 + (random.next() % 9000) as usize;
            let slice = local.sub(token as usize * 9000, bytes).unwrap();
            let page = (random.next() % 200) as usize;
            let bad = random.next().is_multiple_of(3);
            borrower.post_read(token, if bad { 77 } else { slab }, page as u64 * 4096, slice).unwrap();
            expected.push((slice, page, bad));
        }
        let done = settle(&mut borrower);
        assert_eq!(done.len() as u64, count);
        for Completion { token, result, .. } in done {
            let (slice, page, bad) = expected[token as usize];
            assert_eq!(result.is_err(), bad);
            let good = |(index, byte): (usize, &u8)| *byte == (page + index / 4096) as u8;
            assert!(bad || slice.to_vec().iter().enumerate().all(good), "token {token}");
        }
        // What follows a refused read's buffer was not touched.
        for pair in expected.windows(2) {
            let gap = 9000 - pair[0].0.len();
            let end = pair[0].0.as_ptr() as usize - local.as_ptr() as usize + pair[0].0.len();
            assert_eq!(local.sub(end, gap).unwrap().to_vec(), vec![0xAA; gap]);
        }
    }
}

#[test]
fn several_lenders_cost_the_time_of_the_slowest() {
    let lent: Vec<_> = (0..4).map(|_| Serving::new(4)).collect();
    let delay = Arc::new(AtomicU64::new(40));
    let addresses: Vec<_> =
        lent.iter().map(|lent| common::delayed(&lent.address, Arc::clone(&delay))).collect();
    let options = BorrowOptions { link: LinkChoice::Socket, ..BorrowOptions::default() };
    let since = Instant::now();
    Borrower::connect(&addresses[0], &options).unwrap();
    let one = since.elapsed();
    let since = Instant::now();
    // One that nobody answers for, among them.
    let nobody = "127.0.0.1:9".to_owned();
    let each = addresses.iter().chain([&nobody]).map(|address| (&address[..], &options));
    let mut connected = Borrower::connect_all(each);
    let all = since.elapsed();
    assert!(matches!(connected.pop(), Some(Err(Error::Connect { .. }))));
    assert_eq!(connected.len(), 4);
    for (borrower, address) in connected.into_iter().zip(&addresses) {
        let mut borrower = borrower.unwrap();
        assert_eq!(borrower.lender(), address);
        borrower.borrow_slab().unwrap();
    }
    assert!(one >= Duration::from_millis(80) && all < one * 2, "one {one:?}, four {all:?}");
}
