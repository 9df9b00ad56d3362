//! Reads that are asked for by datagrams, and that the lender's kernel answers where it may: docs/design/datagrams.md.

mod common;

use common::pages::Pages;
use common::{Random, Serving, alone, alone_in_thread, fault_paths, has_in_thread};
use netvm::lender::{BorrowOptions, Borrower, Completion, LenderConfig, LinkChoice, status};
use netvm::pager::{FaultPath, Pager, PagerConfig, TierPolicy};
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;

/// Whether lenders of this user have their kernel answer.
fn by_kernel() -> bool {
    match netvm::lender::probe_kernel_reads() {
        Ok(()) => true,
        Err(error) => {
            let thread = std::thread::current();
            eprintln!("{}: skipped ({error})", thread.name().unwrap_or_default());
            false
        }
    }
}

fn lend_at(listen: &str, mib: u64, slab_bytes: u64) -> Serving {
    let listen = vec![listen.to_owned()];
    let config = LenderConfig {
        listen,
        size_bytes: mib * MIB,
        slab_bytes,
        kernel_reads: true,
        ..LenderConfig::default()
    };
    Serving::start(config)
}

/// Until the process ends, as pagers do not end before.
fn lend(mib: u64) -> &'static Serving {
    Box::leak(Box::new(lend_at("127.0.0.1:0", mib, 4 * MIB)))
}

fn start(lenders: &[&str], change: impl FnOnce(&mut PagerConfig)) -> Arc<Pager> {
    let mut config = PagerConfig {
        local_bytes: 8 * MIB,
        lenders: lenders.iter().map(|&lender| lender.to_owned()).collect(),
        area_bytes: 1 << 34,
        tier: TierPolicy::Lender,
        link: LinkChoice::Datagrams,
        ..PagerConfig::default()
    };
    change(&mut config);
    Pager::start(config).unwrap()
}

#[test]
fn far_memory_stays_as_written_and_comes_from_the_kernel() {
    let Some(_alone) = alone() else { return };
    if !by_kernel() {
        return;
    }
    type Change = fn(&mut PagerConfig);
    let plain: Change = |_| ();
    let settings: [(&str, usize, Change); 6] = [
        ("thread", 1, plain),
        ("in-thread", 1, |config| config.fault_path = FaultPath::InThread),
        ("encrypted", 1, |config| config.encrypt_pages = true),
        ("two copies", 2, |config| config.replicas = 2),
        ("shards", 1, |config| config.shards = 2),
        ("two pages", 1, |config| config.page_bytes = 8192),
    ];
    let in_thread = has_in_thread();
    let settings = settings.into_iter().filter(|(name, ..)| in_thread || *name != "in-thread");
    for (round, (name, lenders, change)) in settings.enumerate() {
        let lenders: Vec<_> = (0..lenders).map(|_| lend(96)).collect();
        let addresses: Vec<_> = lenders.iter().map(|lender| lender.address.as_str()).collect();
        let pager = start(&addresses, change);
        let memory = common::mapped::mapped(&pager, 0, 40 << 20);
        let mut pages = Pages::written(memory, round as u64 + 1);
        let (since, mut rounds) = (Instant::now(), 0);
        while pager.stats().kernel_reads < 3000 {
            pages.churn(1000);
            rounds += 1;
            assert!(since.elapsed() < Duration::from_secs(60), "{name}: {:?}", pager.stats());
        }
        pages.check_all();
        let stats = pager.stats();
        println!("{name}: {rounds} rounds, {stats:?}");
        assert!(stats.wrong_pages == 0 && stats.lenders_lost == 0, "{name}: {stats:?}");
        assert!(stats.datagrams_given_up < stats.kernel_reads / 10, "{name}: {stats:?}");
        let answered: u64 = addresses.iter().map(|address| status(address).unwrap().kernel_reads).sum();
        assert!(answered >= stats.kernel_reads, "{name}: {answered} {stats:?}");
    }
}

/// One of three lenders that hold each page twice ends while its kernel answers, and another one leaves.
#[test]
fn lenders_end_and_leave_while_their_kernels_answer() {
    let Some(_alone) = alone() else { return };
    if !by_kernel() {
        return;
    }
    for path in fault_paths() {
        let lenders: Vec<_> = (0..4).map(|_| Some(lend_at("127.0.0.1:0", 64, 4 * MIB))).collect();
        let mut lenders = std::mem::ManuallyDrop::new(lenders);
        let addresses: Vec<_> = lenders.iter().flatten().map(|lender| lender.address.clone()).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        let pager = start(&addresses, |config| (config.replicas, config.fault_path) = (2, path));
        let mut pages = Pages::written(common::mapped::mapped(&pager, 0, 40 << 20), 3);
        let churn = |pages: &mut Pages, more: u64| {
            let (since, before) = (Instant::now(), pager.stats().kernel_reads);
            while pager.stats().kernel_reads < before + more {
                pages.churn(500);
                assert!(since.elapsed() < Duration::from_secs(60), "{path}: {:?}", pager.stats());
            }
        };
        churn(&mut pages, 2000);
        // At once, with reads under way.
        let ended = lenders[0].take();
        std::thread::scope(|scope| {
            scope.spawn(move || drop(ended));
            churn(&mut pages, 2000);
        });
        // Asked to stop once, it waits for its borrowers.
        lenders[1].as_ref().unwrap().stop.stop();
        churn(&mut pages, 2000);
        pages.check_all();
        let stats = pager.stats();
        println!("{path}: {stats:?}");
        assert!(stats.lenders_lost == 1 && stats.wrong_pages == 0, "{path}: {stats:?}");
    }
}

/// Threads that read and write while others discard, and while the local memory becomes less and more.
#[test]
fn what_is_dropped_and_written_anew_is_never_seen_again() {
    let Some(_alone) = alone() else { return };
    if !by_kernel() {
        return;
    }
    for path in fault_paths() {
        let lender = lend(128);
        let pager = start(&[&lender.address], |config| {
            (config.fault_path, config.local_bytes_max) = (path, 16 * MIB);
        });
        let bytes = 12 << 20;
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (pager, over) = (&pager, &over);
                scope.spawn(move || {
                    let memory = common::mapped::mapped(pager, thread as usize * bytes, bytes);
                    for round in 0..6 {
                        let mut pages = Pages::written(memory, thread << 8 | round);
                        pages.churn(4000);
                        pages.check_all();
                        pager.discard(memory.as_ptr() as usize, memory.len()).unwrap();
                        let mut zeros = vec![1; memory.len()];
                        memory.read_into(0, &mut zeros).unwrap();
                        assert!(zeros.iter().all(|&byte| byte == 0));
                    }
                    over.store(true, Ordering::Relaxed);
                });
            }
            for mib in [4, 12, 6, 10].into_iter().cycle() {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                pager.set_local_bytes(mib * MIB).unwrap();
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let stats = pager.stats();
        println!("{path}: {stats:?}");
        assert!(stats.kernel_reads > 500 && stats.wrong_pages == 0, "{path}: {stats:?}");
    }
}

/// As if a firewall let connections through, and nothing else: nobody is at the port that the lender tells, at the address that it was reached at.
#[test]
fn without_datagrams_all_goes_over_the_connection() {
    let Some(_alone) = alone() else { return };
    if !by_kernel() {
        return;
    }
    let lender = lend(64);
    // Takes them, and says nothing.
    let port: u16 = lender.address.rsplit(':').next().unwrap().parse().unwrap();
    let silent = UdpSocket::bind(("127.0.0.2", port)).unwrap();
    let forward = forwarded("127.0.0.2:0", &lender.address);
    for path in fault_paths() {
        let pager = start(&[&forward], |config| config.fault_path = path);
        let mut pages = Pages::written(common::mapped::mapped(&pager, 0, 24 << 20), 5);
        let since = Instant::now();
        pages.churn(3000);
        let stats = pager.stats();
        println!("{path}: {:?} {stats:?}", since.elapsed());
        assert!(stats.datagrams_given_up > 0 && stats.kernel_reads == 0, "{path}: {stats:?}");
        assert!(stats.datagrams_given_up < 20, "{path}: {stats:?}");
        assert!(stats.wrong_pages == 0 && stats.lenders_lost == 0, "{path}: {stats:?}");
        pages.check_all();
    }
    drop(silent);
}

/// Passes datagrams on to the lender, and its answers back, as `change` leaves them.
fn meddling(lender: &str, mut change: impl FnMut(&mut Vec<u8>) -> bool + Send + 'static) -> String {
    let port: u16 = lender.rsplit(':').next().unwrap().parse().unwrap();
    let (near, far) =
        (UdpSocket::bind(("127.0.0.2", port)).unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
    far.connect(lender).unwrap();
    let (answers, back) = (far.try_clone().unwrap(), near.try_clone().unwrap());
    let borrower = Arc::new(std::sync::Mutex::new(None));
    let known = Arc::clone(&borrower);
    std::thread::spawn(move || {
        let mut bytes = [0; 8192];
        while let Ok((count, from)) = near.recv_from(&mut bytes) {
            *known.lock().unwrap() = Some(from);
            let _ = far.send(&bytes[..count]);
        }
    });
    std::thread::spawn(move || {
        let mut bytes = [0; 8192];
        loop {
            let Ok(count) = answers.recv(&mut bytes) else { continue };
            let mut answer = bytes[..count].to_vec();
            let to = *borrower.lock().unwrap();
            if let (Some(to), true) = (to, change(&mut answer)) {
                let _ = back.send_to(&answer, to);
            }
        }
    });
    forwarded("127.0.0.2:0", lender)
}

/// Somebody on the way changes what comes: nobody is blamed, nothing is used, and it is asked for over the connection.
#[test]
fn wrong_pages_are_read_again_over_the_connection() {
    let Some(_alone) = alone() else { return };
    if !by_kernel() {
        return;
    }
    type Change = fn(&mut PagerConfig);
    let settings: [(&str, Change); 4] = [
        ("thread", |_| ()),
        ("in-thread", |config| config.fault_path = FaultPath::InThread),
        ("encrypted", |config| config.encrypt_pages = true),
        ("two pages", |config| config.page_bytes = 8192),
    ];
    let in_thread = has_in_thread();
    for (name, change) in settings.into_iter().filter(|(name, _)| in_thread || *name != "in-thread") {
        let lender = lend(64);
        let mut count = 0;
        // From the hundredth answer on all are wrong.
        let address = meddling(&lender.address, move |answer| {
            count += 1;
            let last = answer.len() - 1;
            answer[last] ^= u8::from(count > 100);
            true
        });
        let pager = start(&[&address], change);
        let mut pages = Pages::written(common::mapped::mapped(&pager, 0, 24 << 20), 5);
        let since = Instant::now();
        while pager.stats().wrong_datagrams < 3 {
            pages.churn(200);
            assert!(since.elapsed() < Duration::from_secs(30), "{name}: {:?}", pager.stats());
        }
        pages.check_all();
        let stats = pager.stats();
        println!("{name}: {} wrong after {:?}", stats.wrong_datagrams, since.elapsed());
        assert!(stats.wrong_pages == 0 && stats.lenders_lost == 0, "{name}: {stats:?}");
    }
}

/// Answers that are lost, come twice, late, or in the wrong order.
#[test]
fn answers_may_be_lost_late_and_doubled() {
    let Some(_alone) = alone() else { return };
    if !by_kernel() {
        return;
    }
    for path in fault_paths() {
        let lender = lend(64);
        let (mut random, mut last) = (Random::new(8), Vec::new());
        let address = meddling(&lender.address, move |answer| match random.next() % 20 {
            0 => false,
            // An old one in its place.
            1 => {
                std::mem::swap(answer, &mut last);
                true
            }
            2 => {
                std::thread::sleep(Duration::from_millis(3));
                true
            }
            3 => {
                last.clone_from(answer);
                true
            }
            _ => true,
        });
        let pager = start(&[&address], |config| config.fault_path = path);
        let mut pages = Pages::written(common::mapped::mapped(&pager, 0, 24 << 20), 5);
        let since = Instant::now();
        while pager.stats().datagrams_given_up < 12 {
            pages.churn(500);
            assert!(since.elapsed() < Duration::from_secs(60), "{path}: {:?}", pager.stats());
        }
        pages.check_all();
        let stats = pager.stats();
        let (given_up, faults) = (stats.datagrams_given_up, stats.faults);
        println!("{path}: {given_up} given up of {faults} after {:?}", since.elapsed());
        assert!(stats.wrong_datagrams == 0 && stats.wrong_pages == 0, "{path}: {stats:?}");
        assert!(stats.lenders_lost == 0, "{path}: {stats:?}");
    }
}

/// Threads that wait for their own answers, one in five of which is lost or another's, while calls wait for all of them: nobody waits for long.
#[test]
fn threads_and_calls_go_on_while_answers_are_lost() {
    let Some(_alone) = alone_in_thread() else { return };
    if !by_kernel() {
        return;
    }
    let lender = lend(128);
    let mut random = Random::new(12);
    // All that come go to whoever has asked last: to another thread, now and then.
    let address = meddling(&lender.address, move |_| !random.next().is_multiple_of(5));
    let pager = start(&[&address], |config| {
        (config.fault_path, config.local_bytes_max) = (FaultPath::InThread, 12 * MIB);
    });
    let bytes = 12 << 20;
    let left = std::sync::atomic::AtomicU32::new(3);
    let (mut calls, mut longest) = (0, Duration::ZERO);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (pager, left) = (&pager, &left);
            scope.spawn(move || {
                let memory = common::mapped::mapped(pager, thread * bytes, bytes);
                for round in 0..8 {
                    let mut pages = Pages::written(memory, (thread as u64) << 8 | round);
                    pages.churn(1500);
                    pages.check_all();
                    // Longer than the first pause.
                    std::thread::sleep(Duration::from_millis(300));
                }
                left.fetch_sub(1, Ordering::Relaxed);
            });
        }
        while left.load(Ordering::Relaxed) > 0 {
            let since = Instant::now();
            pager.stats();
            pager.set_local_bytes([10, 12][calls % 2] * MIB).unwrap();
            (calls, longest) = (calls + 1, longest.max(since.elapsed()));
            std::thread::sleep(Duration::from_millis(3));
        }
    });
    let stats = pager.stats();
    println!("{calls} calls, {longest:?} at most, {} given up of {}", stats.datagrams_given_up, stats.faults);
    assert!(stats.datagrams_given_up > 3 && stats.kernel_reads > 0, "{stats:?}");
    assert!(stats.wrong_pages == 0 && stats.lenders_lost == 0, "{stats:?}");
    // 5 ms for an answer, and what this machine makes of it.
    assert!(longest < Duration::from_secs(2), "{longest:?}");
}

#[test]
fn what_is_read_of_a_slab_is_there_before_it_is_given_back() {
    if !by_kernel() {
        return;
    }
    let lender = lend_at("127.0.0.1:0", 8, 2 * MIB);
    // Nothing is answered.
    let mut client = Client::connect(&meddling(&lender.address, |_| false));
    let (slab, other) = (client.borrower.borrow_slab().unwrap(), client.borrower.borrow_slab().unwrap());
    for page in 0..8 {
        client.write(slab, page, page as u8 + 1);
        client.write(other, page, 99);
    }
    client.settle();
    let locals: Vec<_> =
        (0..8).map(|page| client.memory.shared().sub((page + 1) * PAGE, PAGE).unwrap()).collect();
    for (page, &local) in locals.iter().enumerate() {
        client.borrower.post_read(7, slab, (page * PAGE) as u64, local).unwrap();
    }
    client.borrower.post_read(8, other, 0, client.local(1)).unwrap();
    assert_eq!(client.borrower.pending(), 9);
    client.borrower.post_return(9, slab).unwrap();
    client.wait().unwrap();
    for (page, local) in locals.iter().enumerate() {
        assert_eq!(local.to_vec(), vec![page as u8 + 1; PAGE]);
    }
    assert_eq!(client.local(1).to_vec(), vec![99; PAGE]);
    // The same with a call that waits.
    client.borrower.post_read(7, other, 0, locals[0]).unwrap();
    client.borrower.return_slab(other).unwrap();
    client.wait().unwrap();
    assert_eq!(locals[0].to_vec(), vec![99; PAGE]);
}

/// Passes a connection on, from another address of this host.
fn forwarded(listen: &str, lender: &str) -> String {
    let listener = std::net::TcpListener::bind(listen).unwrap();
    let (address, lender) = (listener.local_addr().unwrap().to_string(), lender.to_owned());
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let Ok(far) = std::net::TcpStream::connect(&lender) else { continue };
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            let ends = [(near.try_clone(), far.try_clone()), (far.try_clone(), near.try_clone())];
            for (from, to) in ends {
                let (mut from, mut to) = (from.unwrap(), to.unwrap());
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            }
        }
    });
    address
}

/// A lease, one page of memory for each of its operations.
struct Client {
    borrower: Borrower,
    memory: Mapping,
    done: Vec<Completion>,
}

impl Client {
    fn connect(address: &str) -> Self {
        Self::of(Borrower::connect(address, &options()).unwrap())
    }

    fn of(borrower: Borrower) -> Self {
        Self { borrower, memory: Mapping::anonymous(64 * PAGE).unwrap(), done: Vec::new() }
    }

    fn local(&self, pages: usize) -> SharedSlice {
        self.memory.shared().sub(0, pages * PAGE).unwrap()
    }

    fn wait(&mut self) -> Result<(), netvm::error::Error> {
        while self.borrower.pending() > 0 {
            self.borrower.poll(&mut self.done)?;
        }
        self.done.drain(..).try_for_each(|completion| completion.result)
    }

    fn write(&mut self, slab: u32, page: u64, byte: u8) {
        self.local(1).fill(byte);
        self.borrower.post_write(1, slab, page * PAGE as u64, self.local(1)).unwrap();
        self.wait().unwrap();
    }

    fn settle(&mut self) {
        self.borrower.flush(Duration::from_secs(4)).unwrap();
    }

    fn read(&mut self, slab: u32, page: u64) -> Result<u8, netvm::error::Error> {
        let local = self.local(1);
        local.fill(0xEE);
        self.borrower.post_read(2, slab, page * PAGE as u64, local).unwrap();
        self.wait()?;
        let bytes = local.to_vec();
        assert!(bytes.iter().all(|byte| byte == &bytes[0]), "torn: {:?}", &bytes[..8]);
        Ok(bytes[0])
    }

    /// So many of the last reads were answered by the lender's kernel and by its process.
    fn counts(&mut self) -> (u64, u64) {
        let counts = self.borrower.take_datagram_counts();
        (counts.by_kernel, counts.by_process)
    }

    /// With a slab, a page of which the kernel answers with sevens.
    #[track_caller]
    fn reading(lender: &str, page: u64) -> (Self, u32) {
        let mut client = Self::connect(lender);
        let slab = client.borrower.borrow_slab().unwrap();
        client.write(slab, page, 7);
        client.settle();
        client.until_by_kernel(slab, page, 7);
        (client, slab)
    }

    #[track_caller]
    fn until_by_kernel(&mut self, slab: u32, page: u64, byte: u8) {
        let since = Instant::now();
        loop {
            assert_eq!(self.read(slab, page).unwrap(), byte);
            if self.counts().0 > 0 {
                return;
            }
            assert!(since.elapsed() < Duration::from_secs(10), "the kernel never answers");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn options() -> BorrowOptions {
    BorrowOptions {
        name: "test".into(),
        link: LinkChoice::Datagrams,
        datagrams: true,
        ..BorrowOptions::default()
    }
}

#[test]
fn reads_see_what_was_written_before_them_whoever_answers() {
    if !by_kernel() {
        return;
    }
    // Slabs of one unit, and of one and a half.
    for (listen, slab_bytes) in [("127.0.0.1:0", 3 * MIB), ("[::1]:0", 3 * MIB), ("0.0.0.0:0", 2 * MIB)] {
        if listen.starts_with('[') && std::net::TcpListener::bind(listen).is_err() {
            println!("skipped (no IPv6)");
            continue;
        }
        let insecure = netvm::security::Security { insecure: true, ..Default::default() };
        let config = LenderConfig {
            listen: vec![listen.to_owned()],
            size_bytes: 24 * MIB,
            slab_bytes,
            kernel_reads: true,
            security: insecure,
            ..LenderConfig::default()
        };
        let lender = Serving::start(config);
        let mut client = Client::connect(&lender.address.replace("0.0.0.0", "127.0.0.1"));
        let slab = client.borrower.borrow_slab().unwrap();
        let last = slab_bytes / PAGE as u64 - 1;
        client.write(slab, last, 7);
        // The write may be on its way: over the session, behind it.
        assert_eq!((client.read(slab, last).unwrap(), client.counts()), (7, (0, 0)));
        client.settle();
        client.until_by_kernel(slab, last, 7);
        // What is written now goes where the kernel reads.
        let (mut random, mut by_kernel) = (Random::new(3), 0);
        for round in 0..2000 {
            let (page, byte) = (random.next() % (last + 1), round as u8);
            client.write(slab, page, byte);
            if random.next().is_multiple_of(2) {
                client.settle();
            }
            assert_eq!(client.read(slab, page).unwrap(), byte, "{round}");
            by_kernel += client.counts().0;
        }
        assert!(by_kernel > 200, "{listen}: {by_kernel}");
        client.write(slab, last, 9);
        client.settle();
        client.borrower.post_discard(3, slab, 0, slab_bytes).unwrap();
        client.wait().unwrap();
        assert_eq!(client.read(slab, last).unwrap(), 0, "dropped");
        client.write(slab, last, 8);
        client.settle();
        client.until_by_kernel(slab, last, 8);
        assert!(client.borrower.pending() == 0);
    }
}

#[test]
fn a_lease_reads_what_it_holds_and_nothing_else() {
    if !by_kernel() {
        return;
    }
    let lender = lend_at("127.0.0.1:0", 8, 2 * MIB);
    let ((mut one, slab), mut two) = (Client::reading(&lender.address, 3), Client::connect(&lender.address));
    let refused = two.read(slab, 3).unwrap_err().to_string();
    assert!(refused.contains("refused") || refused.contains("lent"), "{refused}");
    assert_eq!(two.counts(), (0, 0));
    // A fork's lease reads what it has inherited, by a key of its own.
    let ticket = one.borrower.fork_ticket().unwrap();
    let mut child = Client::of(Borrower::adopt(&ticket, &options()).unwrap());
    child.until_by_kernel(slab, 3, 7);
    one.borrower.return_slab(slab).unwrap();
    assert_eq!(child.read(slab, 3).unwrap(), 7);
    assert!(one.read(slab, 3).is_err() || one.counts().0 > 0, "its own page, or none");
    drop(child);
    // When nobody holds it any more, it is another's, and empty.
    let since = Instant::now();
    let mut borrowed = Vec::new();
    while borrowed.len() < 4 {
        borrowed.extend(two.borrower.borrow_slab().ok());
        assert!(since.elapsed() < Duration::from_secs(10));
    }
    assert!(borrowed.contains(&slab));
    for &slab in &borrowed {
        two.write(slab, 4, 5);
        two.settle();
        two.until_by_kernel(slab, 4, 5);
        assert_eq!(two.read(slab, 3).unwrap(), 0, "another's");
    }
    assert!(one.read(slab, 4) != Ok(5), "another's");
}

#[test]
fn datagrams_of_strangers_and_of_any_content_change_nothing() {
    if !by_kernel() {
        return;
    }
    let lender = lend_at("127.0.0.1:0", 8, 2 * MIB);
    let (mut client, slab) = Client::reading(&lender.address, 1);
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.connect(&lender.address).unwrap();
    stranger.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut random = Random::new(9);
    for round in 0..4000 {
        let mut bytes: Vec<u8> = (0..random.next() % 90).map(|_| random.next() as u8).collect();
        // Some are requests but for the key.
        if round % 4 == 0 {
            bytes.resize(40, 0);
            bytes[..16].copy_from_slice(b"nvR1\0\0\0\0\0\x10\0\0\0\x10\0\0");
        }
        let _ = stranger.send(&bytes);
        if round % 64 == 0 {
            assert_eq!(client.read(slab, 1).unwrap(), 7);
        }
    }
    assert!(stranger.recv(&mut [0; 100]).is_err(), "an answer to a stranger");
    assert!(client.counts().0 > 30);
    assert_eq!(status(&lender.address).unwrap().borrowers.len(), 1);
}

#[test]
fn who_may_not_or_does_not_want_to_goes_over_the_connection() {
    let lender = Serving::new(8);
    let mut client = Client::connect(&lender.address);
    let slab = client.borrower.borrow_slab().unwrap();
    client.write(slab, 1, 7);
    client.settle();
    assert_eq!((client.read(slab, 1).unwrap(), client.counts()), (7, (0, 0)), "not asked to");
    if !by_kernel() {
        return;
    }
    let lender = lend_at("127.0.0.1:0", 8, 2 * MIB);
    for (datagrams, link) in [(false, LinkChoice::Datagrams), (true, LinkChoice::Socket)] {
        let borrower = Borrower::connect(&lender.address, &BorrowOptions { datagrams, link, ..options() });
        let mut client = Client::of(borrower.unwrap());
        let slab = client.borrower.borrow_slab().unwrap();
        client.write(slab, 1, 7);
        client.settle();
        assert_eq!((client.read(slab, 1).unwrap(), client.counts()), (7, (0, 0)), "{datagrams} {link:?}");
    }
}

#[test]
fn a_lender_that_goes_takes_reads_with_it() {
    if !by_kernel() {
        return;
    }
    let lender = lend_at("127.0.0.1:0", 8, 2 * MIB);
    let (mut client, slab) = Client::reading(&lender.address, 1);
    drop(lender);
    let since = Instant::now();
    while client.read(slab, 1).is_ok() {
        assert!(since.elapsed() < Duration::from_secs(5), "it reads on");
    }
    assert!(client.borrower.post_read(1, slab, 0, client.local(1)).is_err());
    assert_eq!(client.borrower.pending(), 0);
}
