//! Lenders with a secret, over real sockets.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use netvm::Error;
use netvm::lender::{BorrowOptions, Borrower, Lender, LenderConfig, status_with};
use netvm::security::{Encryption, Protection, Secret, Security};
use netvm_core::limits::{HALF_OPEN_MAX, HELLO_BYTES};
use netvm_core::opening::{Opening, SEALED_HELLO_BYTES};
use netvm_core::wire::{Hello, Refusal, Role};
use netvm_sys::mapping::Mapping;

mod common;
use common::{Random, Serving};

fn security(encryption: Encryption) -> Security {
    Security { secret: Some(Secret::from_bytes([42; 32])), encryption, insecure: false }
}

fn options(encryption: Encryption) -> BorrowOptions {
    BorrowOptions { security: security(encryption), ..BorrowOptions::default() }
}

fn lend(security: Security) -> Serving {
    let (size_bytes, slab_bytes) = (8 << 20, 1 << 20);
    Serving::start(LenderConfig { size_bytes, slab_bytes, security, ..LenderConfig::default() })
}

/// Everything that a lender does works behind a secret, encrypted or not, and forks keep what protects them.
#[test]
fn borrowing_works_on_protected_sessions() {
    for (encryption, protection) in
        [(Encryption::IfAsked, Protection::Authenticated), (Encryption::Always, Protection::Encrypted)]
    {
        let lent = lend(security(Encryption::IfAsked));
        let mut borrower = Borrower::connect(&lent.address, &options(encryption)).unwrap();
        assert_eq!(borrower.protection(), protection);
        let slab = borrower.borrow_slab().unwrap();
        let memory = Mapping::anonymous(2 << 20).unwrap();
        let local = memory.shared();
        let mut random = Random::new(9);
        let mut model = vec![0u8; 1 << 20];
        let settle = |borrower: &mut Borrower| {
            let mut done = Vec::new();
            let deadline = Instant::now() + Duration::from_secs(5);
            while borrower.pending() > 0 {
                borrower.poll(&mut done).unwrap();
                assert!(Instant::now() < deadline);
            }
            done.into_iter().for_each(|completion| completion.result.unwrap());
        };
        for _ in 0..100 {
            let bytes = 1 + (random.next() % 100_000) as usize;
            let offset = (random.next() % ((1 << 20) - bytes as u64)) as usize;
            let data: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
            local.write_from(0, &data).unwrap();
            model[offset..offset + bytes].copy_from_slice(&data);
            borrower.post_write(1, slab, offset as u64, local.sub(0, bytes).unwrap()).unwrap();
            for token in 0..random.next() % 40 {
                let place = local.sub((1 << 20) + token as usize * 4096, 4096).unwrap();
                borrower.post_read(token, slab, token * 4096, place).unwrap();
            }
            settle(&mut borrower);
        }
        let back = local.sub(1 << 20, 1 << 20).unwrap();
        let mut fork = borrower.fork().unwrap();
        let ticket = fork.fork_ticket().unwrap();
        let claimed = Borrower::adopt(&ticket, &BorrowOptions::default()).unwrap();
        assert_eq!((fork.protection(), claimed.protection()), (protection, protection));
        drop(borrower);
        let moved = Borrower::from_parts(fork.into_parts());
        for mut borrower in [moved, claimed] {
            back.fill(0);
            borrower.post_read(0, slab, 0, back).unwrap();
            settle(&mut borrower);
            assert!(back.to_vec() == model);
        }
        assert!(!format!("{ticket:?}").contains("42, 42"));
        let status = status_with(&lent.address, &options(encryption)).unwrap();
        assert_eq!(status.protection, protection);
    }
}

#[test]
fn strangers_are_refused_with_the_reason_and_learn_no_more() {
    let lent = lend(security(Encryption::IfAsked));
    let wrong = Security { secret: Some(Secret::from_bytes([41; 32])), ..Security::default() };
    for (security, expected) in [
        (wrong, Error::WrongSecret { lender: lent.address.clone() }),
        (Security::default(), Error::NeedsSecret { lender: lent.address.clone() }),
    ] {
        let options = BorrowOptions { security, ..BorrowOptions::default() };
        assert_eq!(Borrower::connect(&lent.address, &options).unwrap_err(), expected);
    }
    // The answer to a wrong secret is the answer to none, to the byte.
    let ask = |message: &[u8]| {
        let mut stream = TcpStream::connect(&lent.address).unwrap();
        stream.write_all(message).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    };
    let mut guess = [0x55; HELLO_BYTES];
    guess[..16].copy_from_slice(&Opening::new(Role::Borrower, Encryption::IfAsked).encode());
    let answer = ask(&guess);
    assert_eq!(answer, ask(&Hello::new(Role::Borrower).encode()));
    assert_eq!(Hello::decode(&answer.try_into().unwrap()).unwrap().refusal, Refusal::Secret);
    assert!(ask(b"GET / HTTP/1.1\r\n").is_empty());
    // Nobody is accepted on a network without a secret.
    let listen = vec!["0.0.0.0:0".to_owned()];
    let config = LenderConfig { listen, ..LenderConfig::default() };
    assert!(matches!(Lender::bind(config.clone()), Err(Error::Listen { .. })));
    Lender::bind(LenderConfig { security: security(Encryption::IfAsked), ..config.clone() }).unwrap();
    Lender::bind(LenderConfig { security: Security { insecure: true, ..Security::default() }, ..config })
        .unwrap();
}

/// What one borrower sent, sent again: it is answered, and gets nowhere.
#[test]
fn a_recorded_session_opens_nothing() {
    let lent = lend(security(Encryption::Always));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (recorded, target) = (Arc::new(Mutex::new(Vec::new())), lent.address.clone());
    let record = Arc::clone(&recorded);
    let middle = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        let mut server = TcpStream::connect(target).unwrap();
        let (mut back, mut forth) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        let answers = std::thread::spawn(move || std::io::copy(&mut forth, &mut back));
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = client.read(&mut bytes) {
            record.lock().unwrap().extend_from_slice(&bytes[..count]);
            server.write_all(&bytes[..count]).unwrap();
        }
        server.shutdown(std::net::Shutdown::Both).unwrap();
        answers.join().unwrap().unwrap();
    });
    let mut borrower = Borrower::connect(&address, &options(Encryption::Always)).unwrap();
    borrower.borrow_slab().unwrap();
    drop(borrower);
    middle.join().unwrap();
    let recorded = recorded.lock().unwrap().clone();
    assert!(recorded.len() > HELLO_BYTES + SEALED_HELLO_BYTES);
    let mut stream = TcpStream::connect(&lent.address).unwrap();
    stream.write_all(&recorded).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.len() <= HELLO_BYTES, "{} bytes", answer.len());
    let status = status_with(&lent.address, &options(Encryption::Always)).unwrap();
    assert_eq!((status.borrowers.len(), status.used_bytes), (0, 0));
}

/// Half-open connections end in time, whatever their stage, and a flood of them does not keep others out.
#[test]
fn half_open_connections_are_few_and_short() {
    let lent = lend(security(Encryption::IfAsked));
    let start = Instant::now();
    let mut slow: Vec<_> = (0..3).map(|_| TcpStream::connect(&lent.address).unwrap()).collect();
    // One byte now and then, all of them good, does not make it longer.
    let good = Opening::new(Role::Borrower, Encryption::IfAsked).encode();
    let mut trickle = good.iter().chain(&[7; 40]);
    let mut closed = [None; 3];
    while closed.iter().any(Option::is_none) {
        assert!(start.elapsed() < Duration::from_secs(5), "{closed:?}");
        for (stream, closed) in slow.iter_mut().zip(&mut closed).filter(|(_, closed)| closed.is_none()) {
            stream.set_read_timeout(Some(Duration::from_millis(30))).unwrap();
            match stream.read(&mut [0; 8]) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                _ => *closed = Some(start.elapsed()),
            }
        }
        if let Some(&byte) = trickle.next() {
            let _ = slow[1].write_all(&[byte]);
        }
    }
    for closed in closed {
        assert!(closed.unwrap() > Duration::from_millis(2800), "{closed:?}");
    }
    let mut flood = Vec::new();
    for _ in 0..2 * HALF_OPEN_MAX {
        flood.push(TcpStream::connect(&lent.address).unwrap());
    }
    let start = Instant::now();
    let mut borrower = Borrower::connect(&lent.address, &options(Encryption::IfAsked)).unwrap();
    borrower.borrow_slab().unwrap();
    assert!(start.elapsed() < Duration::from_secs(2));
    flood[0].set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    assert!(!matches!(flood[0].read(&mut [0; 8]), Ok(1..)), "the oldest is closed");
    let last = flood.last_mut().unwrap();
    last.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    assert_eq!(
        last.read(&mut [0; 8]).unwrap_err().kind(),
        std::io::ErrorKind::WouldBlock,
        "the youngest is not"
    );
}

/// Prints what encryption costs on one core; checked only loosely, a debug build on a busy machine must pass too.
#[test]
fn encryption_keeps_much_of_the_bandwidth() {
    let memory = Mapping::anonymous(1 << 20).unwrap();
    let pages: Vec<_> = (0..64).map(|page| memory.shared().sub(page * 4096, 4096).unwrap()).collect();
    let measure = move |security: Security, write: bool| {
        let lent = lend(security.clone());
        let options = BorrowOptions { security, ..BorrowOptions::default() };
        let mut borrower = Borrower::connect(&lent.address, &options).unwrap();
        let slabs: Vec<_> = (0..8).map(|_| borrower.borrow_slab().unwrap()).collect();
        let (mut posted, mut done, batches) = (0u64, Vec::new(), 800);
        let start = Instant::now();
        while done.len() < batches {
            while (posted as usize) < batches.min(done.len() + 8) {
                // 8 MiB in all: more than the nearest caches hold.
                let (slab, offset) = (slabs[posted as usize % 8], (posted / 8 % 4) << 18);
                if write {
                    borrower.post_write_pages(posted, slab, offset, &pages).unwrap();
                } else {
                    borrower.post_read_pages(posted, slab, offset, &pages).unwrap();
                }
                posted += 1;
            }
            let before = done.len();
            borrower.poll(&mut done).unwrap();
            if done.len() == before {
                let mut fds = [netvm_sys::thread::readable(&borrower.as_fd())];
                netvm_sys::thread::poll(&mut fds, Some(Duration::from_millis(1))).unwrap();
            }
        }
        borrower.flush(Duration::from_secs(5)).unwrap();
        (batches << 18) as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    // Both ends on one CPU: the threads of the lender inherit it.
    let pinned = std::thread::spawn(move || {
        let _ = netvm_sys::cpu::pin(0);
        for (what, write) in [("read", false), ("written", true)] {
            let mut ratios = Vec::new();
            let mut rates = (0.0, 0.0);
            for _ in 0..7 {
                rates = (measure(Security::default(), write), measure(security(Encryption::Always), write));
                ratios.push(rates.1 / rates.0);
            }
            ratios.sort_by(f64::total_cmp);
            let ratio = ratios[ratios.len() / 2];
            println!("{what}: {:.2} GB/s plain, {:.2} encrypted; median ratio {ratio:.2}", rates.0, rates.1);
            assert!(ratio > 0.1);
        }
    });
    pinned.join().unwrap();
}
