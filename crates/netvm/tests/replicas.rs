//! Far memory whose pages two lenders hold: it survives what happens to one of them.

mod common;

use common::redundant::{
    ALTER, DELAY, HOLD, MEMORY, Model, PAGE, PASS, SLABS, STALE, a_liar_is_blamed_by_a_repair, lend, proxy,
    start_with, until,
};
use common::{Serving, alone};
use netvm::lender::LinkChoice;
use netvm::pager::{Pager, PagerConfig, PagerError};
use netvm_sys::shared::SharedSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

fn start(lenders: &[&str]) -> (Arc<Pager>, SharedSlice) {
    start_by(LinkChoice::Socket, lenders)
}

fn start_by(link: LinkChoice, lenders: &[&str]) -> (Arc<Pager>, SharedSlice) {
    start_two(lenders, |config| config.link = link)
}

/// On two of the lenders.
fn start_two(lenders: &[&str], change: impl FnOnce(&mut PagerConfig)) -> (Arc<Pager>, SharedSlice) {
    start_with(lenders, |config| {
        config.replicas = 2;
        change(config);
    })
}

#[test]
fn contents_survive_lenders_that_come_and_go() {
    come_and_go(LinkChoice::Socket);
}

#[test]
fn the_same_with_the_lenders_memory_shared() {
    come_and_go(LinkChoice::Shm);
}

fn come_and_go(link: LinkChoice) {
    let Some(_alone) = alone() else { return };
    let lenders = (0..3).map(|_| Some(Serving::new(SLABS))).collect::<Vec<_>>();
    let mut lenders = std::mem::ManuallyDrop::new(lenders);
    let addresses: Vec<_> = lenders.iter().flatten().map(|lender| lender.address.clone()).collect();
    let (pager, memory) = start_by(link, &addresses.iter().map(String::as_str).collect::<Vec<_>>());
    let mut model = Model::new(memory, 1);
    for round in 0..4 {
        let lost = round % 3;
        lenders[lost] = None;
        let stats = until(&pager, &mut model, "all pages have two copies", |stats| {
            stats.lenders_lost == round as u64 + 1 && stats.pages_unprotected == 0
        });
        assert!(stats.pages_repaired > 0, "{stats:?}");
        model.check_all();
        lenders[lost] = Some(Serving::at(&addresses[lost], SLABS));
        until(&pager, &mut model, "it came back", |stats| stats.lenders_back == round as u64 + 1);
    }
    let stats = pager.stats();
    println!("{stats:?}");
    assert_eq!(stats.wrong_pages, 0, "{stats:?}");
    model.must_not_have_stalled_for(Duration::from_secs(2));
}

#[test]
fn two_lenders_one_of_which_is_replaced() {
    let Some(_alone) = alone() else { return };
    let (first, second) = (Serving::new(SLABS), Serving::new(SLABS));
    let first = std::mem::ManuallyDrop::new(first);
    let (pager, memory) = start(&[&first.address, &second.address]);
    let mut model = Model::new(memory, 2);
    let address = second.address.clone();
    drop(second);
    let stats = until(&pager, &mut model, "pages lack a copy", |stats| stats.pages_unprotected > 1000);
    assert_eq!((stats.lenders_lost, stats.pages_repaired), (1, 0));
    Box::leak(Box::new(Serving::at(&address, SLABS)));
    until(&pager, &mut model, "all have two again", |stats| {
        stats.lenders_back == 1 && stats.pages_unprotected == 0
    });
    // And now the one that had been there all the time.
    drop(std::mem::ManuallyDrop::into_inner(first));
    model.check_all();
    model.churn(5000);
    assert_eq!(pager.stats().lenders_lost, 2);
}

/// Two lenders, the second behind a proxy.
fn with_proxy(seed: u64) -> (Arc<AtomicU32>, Arc<Pager>, Model) {
    with_proxy_and(seed, |_| {})
}

fn with_proxy_and(seed: u64, change: impl FnOnce(&mut PagerConfig)) -> (Arc<AtomicU32>, Arc<Pager>, Model) {
    let (first, second) = (lend(), lend());
    let mode = Arc::new(AtomicU32::new(PASS));
    let address = proxy(&second.address, &mode, PAGE);
    let (pager, memory) = start_two(&[&address, &first.address], change);
    let mut model = Model::new(memory, seed);
    model.churn(2000);
    (mode, pager, model)
}

#[test]
fn a_silent_lender_is_done_without() {
    let Some(_alone) = alone() else { return };
    let (mode, pager, mut model) = with_proxy(3);
    mode.store(HOLD, Ordering::Relaxed);
    let stats = until(&pager, &mut model, "it is lost", |stats| stats.lenders_lost == 1);
    model.check_all();
    println!("{stats:?}");
    // It is given up after 0.7 s, and until then what is written may have to wait. Without others it would be 4 s.
    model.must_not_have_stalled_for(Duration::from_secs(3));
    mode.store(PASS, Ordering::Relaxed);
    until(&pager, &mut model, "it is back, and has all pages", |stats| {
        stats.lenders_back == 1 && stats.pages_unprotected == 0
    });
    model.check_all();
}

/// Nothing is asked of it: a lender on this host would be read without it, and a program may do nothing for a while.
#[test]
fn a_silent_lender_is_missed_though_nobody_wants_anything() {
    let Some(_alone) = alone() else { return };
    let (mode, pager, model) = with_proxy(7);
    // It is idle from here on.
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(pager.stats().lenders_lost, 0);
    mode.store(HOLD, Ordering::Relaxed);
    let started = Instant::now();
    while pager.stats().lenders_lost == 0 {
        assert!(started.elapsed() < Duration::from_secs(30), "never missed: {:?}", pager.stats());
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("missed after {:?}", started.elapsed());
    model.check_all();
}

/// As when the host, or its network, stands still: there is nobody to go on with.
#[test]
fn lenders_that_are_all_silent_at_once_are_waited_for() {
    let Some(_alone) = alone() else { return };
    let modes = [(); 2].map(|()| Arc::new(AtomicU32::new(PASS)));
    let addresses = modes.each_ref().map(|mode| proxy(&lend().address, mode, PAGE));
    let (pager, memory) = start(&[&addresses[0], &addresses[1]]);
    let mut model = Model::new(memory, 11);
    model.churn(2000);
    for round in 0..3 {
        let before = pager.stats().lenders_lost;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                modes.iter().for_each(|mode| mode.store(HOLD, Ordering::Relaxed));
                std::thread::sleep(Duration::from_millis(1500));
                modes.iter().for_each(|mode| mode.store(PASS, Ordering::Relaxed));
            });
            let started = Instant::now();
            while started.elapsed() < Duration::from_secs(3) {
                model.churn(200);
            }
        });
        let stats = until(&pager, &mut model, "all pages have two copies", |stats| {
            stats.pages_unprotected == 0 && stats.lenders_lost == stats.lenders_back
        });
        // A call that nobody else could have answered meanwhile may have been given up.
        assert!(stats.lenders_lost <= before + 1, "round {round}: {stats:?}");
        model.check_all();
    }
    assert!(model.slowest.get() > Duration::from_secs(1), "nothing stood still: {:?}", model.slowest.get());
    // One of them alone is missed soon: after 0.7 s and what writes may still be sent. Each time the host stands still it is waited for anew.
    let mut times = Vec::new();
    while times.iter().all(|&time| time >= Duration::from_secs(3)) {
        assert!(times.len() < 3, "{times:?}");
        let before = pager.stats().lenders_lost;
        let started = Instant::now();
        modes[1].store(HOLD, Ordering::Relaxed);
        until(&pager, &mut model, "it is lost", |stats| stats.lenders_lost == before + 1);
        times.push(started.elapsed());
        modes[1].store(PASS, Ordering::Relaxed);
        until(&pager, &mut model, "it is back", |stats| {
            stats.pages_unprotected == 0 && stats.lenders_lost == stats.lenders_back
        });
    }
    println!("missed after {times:?}");
}

#[test]
fn reads_do_not_wait_for_a_slow_lender() {
    let Some(_alone) = alone() else { return };
    let (mode, pager, model) = with_proxy(4);
    mode.store(DELAY, Ordering::Relaxed);
    let before = pager.stats().remote_reads;
    let started = Instant::now();
    model.check_all();
    let (took, stats) = (started.elapsed(), pager.stats());
    let reads = stats.remote_reads - before;
    println!("{reads} pages in {took:?}: {stats:?}");
    assert!(reads > 2000 && stats.lenders_lost == 0, "{stats:?}");
    // Half of them from there, one after the other, would take far longer.
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn a_wrong_page_is_read_from_the_other_lender() {
    returns_other_contents(5, ALTER, false);
}

#[test]
fn an_altered_encrypted_page_is_read_from_the_other_lender() {
    returns_other_contents(7, ALTER, true);
}

#[test]
fn a_replayed_encrypted_page_is_read_from_the_other_lender() {
    returns_other_contents(8, STALE, true);
}

/// What a lender returns was written to that page, but before something else was.
#[test]
fn a_stale_page_is_read_from_the_other_lender() {
    returns_other_contents(6, STALE, false);
}

fn returns_other_contents(seed: u64, how: u32, encrypt_pages: bool) {
    let Some(_alone) = alone() else { return };
    let (mode, pager, mut model) = with_proxy_and(seed, |config| config.encrypt_pages = encrypt_pages);
    mode.store(how, Ordering::Relaxed);
    let stats = until(&pager, &mut model, "it is noticed", |stats| stats.wrong_pages > 0);
    assert_eq!((stats.lenders_lost, stats.lenders_back), (1, 0));
    model.check_all();
    mode.store(PASS, Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(2500));
    // It can be reached, but is not trusted any more.
    model.churn(2000);
    assert_eq!(pager.stats().lenders_back, 0);
}

/// It is found while its pages are copied, before anybody else has got one and anybody has asked for one.
#[test]
fn a_lender_that_returns_wrong_pages_to_a_repair_is_blamed_and_not_the_copy() {
    let Some(_alone) = alone() else { return };
    for encrypt_pages in [false, true] {
        a_liar_is_blamed_by_a_repair(&[lend(), lend(), lend(), lend()], PAGE, |config| {
            (config.replicas, config.encrypt_pages) = (3, encrypt_pages);
        });
    }
}

/// What lenders get looks like nothing.
#[test]
fn encrypted_pages_come_back_and_are_read_by_nobody() {
    let Some(_alone) = alone() else { return };
    let lenders = [lend(), lend()];
    let addresses = lenders.map(|lender| &*lender.address);
    let (pager, memory) = start_two(&addresses, |config| {
        (config.encrypt_pages, config.tier) = (true, netvm::pager::TierPolicy::Lender);
    });
    // Pages alike but for one word: their copies at the lenders have nothing in common.
    for page in 0..MEMORY / PAGE {
        memory.write_from(page * PAGE, &[b'A'; PAGE]).unwrap();
        memory.write_from(page * PAGE, &(page as u64).to_le_bytes()).unwrap();
    }
    for page in 0..MEMORY / PAGE {
        let mut bytes = [0; PAGE];
        memory.read_into(page * PAGE, &mut bytes).unwrap();
        assert!(bytes[..8] == (page as u64).to_le_bytes() && bytes[8..] == [b'A'; PAGE - 8], "page {page}");
    }
    let mut model = Model::new(memory, 12);
    model.churn(5000);
    model.check_all();
    let stats = pager.stats();
    assert!(stats.remote_reads > 3000 && stats.wrong_pages == 0, "{stats:?}");
}

/// Who is reached at a lost lender's address may be the other one: two copies there would be lost together.
#[test]
fn who_comes_back_as_the_other_lender_stays_lost() {
    let Some(_alone) = alone() else { return };
    let place = |name: &str| {
        std::env::temp_dir()
            .join(format!("netvm-replicas-{name}-{}", std::process::id()))
            .display()
            .to_string()
    };
    for (number, choice) in [LinkChoice::Socket, LinkChoice::Shm].into_iter().enumerate() {
        let [link, sockets @ ..] = ["link", "one", "two"].map(|name| place(&format!("{name}-{number}")));
        let points_to = |socket: &str| {
            let _ = std::fs::remove_file(&link);
            std::os::unix::fs::symlink(socket, &link).unwrap();
        };
        let [one, two] = sockets.each_ref().map(|socket| Serving::at(&format!("unix:{socket}"), SLABS));
        points_to(&sockets[0]);
        let (pager, memory) = start_by(choice, &[&format!("unix:{link}"), &two.address]);
        let mut model = Model::new(memory, 3);
        model.churn(5000);
        points_to(&sockets[1]);
        drop(one);
        let stats = until(&pager, &mut model, "pages lack a copy", |stats| stats.pages_unprotected > 1000);
        // Three times what it takes to try again.
        let end = Instant::now() + Duration::from_secs(6);
        while Instant::now() < end {
            model.churn(500);
        }
        model.check_all();
        let now = pager.stats();
        assert_eq!((now.lenders_lost, now.lenders_back), (stats.lenders_lost, 0), "{now:?}");
        assert!(now.pages_unprotected > 1000, "{now:?}");
        // The pager needs it as long as the process lives.
        std::mem::forget(two);
        [link, sockets[1].clone()].iter().for_each(|path| std::fs::remove_file(path).unwrap());
    }
}

#[test]
fn replicas_that_cannot_be() {
    let lender = Serving::new(1);
    let refused = |lenders: &[&str], replicas: usize| {
        let lenders = lenders.iter().map(|&lender| lender.to_owned()).collect();
        let config = PagerConfig { lenders, replicas, ..PagerConfig::default() };
        Pager::start(config).unwrap_err().to_string()
    };
    if netvm_sys::uffd::probe().is_ok() {
        assert!(refused(&[&lender.address], 2).contains("2 replicas on 1 lender"));
        assert!(refused(&[lender.address.as_str(); 2], 2).contains("named twice"));
        // By another name.
        let local = lender.address.replace("127.0.0.1", "localhost");
        assert!(refused(&[&lender.address, &local], 2).contains("are the same lender"));
        assert!(refused(&[&lender.address], 0).contains("0 replicas"));
        assert!(refused(&["a:1", "b:1", "c:1", "d:1", "e:1"], 5).contains("1 to 4 replicas"));
    }
    let lost = PagerError::CopiesLost { pages: 3, why: "lender a is gone; lender b is gone".to_owned() };
    assert_eq!(lost.to_string(), "no copy is left of 3 pages: lender a is gone; lender b is gone");
}
