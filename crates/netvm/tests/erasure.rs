//! Far memory whose pages are in parts on several lenders: it survives what happens to some of them.

mod common;

use common::redundant::{
    ALTER, DELAY, HOLD, MEMORY, Model, PASS, SLABS, STALE, a_liar_is_blamed_by_a_repair, lend, proxy,
    start_with, until,
};
use common::{Serving, alone};
use netvm::lender::LinkChoice;
use netvm::pager::{Erasure, Pager, PagerConfig, PagerError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

fn in_parts(config: &mut PagerConfig, data: usize, parity: usize) {
    config.erasure = Erasure::new(data, parity);
    assert!(config.erasure.is_some());
}

fn texts(addresses: &[String]) -> Vec<&str> {
    addresses.iter().map(String::as_str).collect()
}

#[test]
fn contents_survive_lenders_that_come_and_go() {
    come_and_go(LinkChoice::Socket, 2, 1, 0);
}

#[test]
fn the_same_with_the_lenders_memory_shared() {
    come_and_go(LinkChoice::Shm, 2, 1, 1);
}

#[test]
fn the_same_with_more_parts() {
    come_and_go(LinkChoice::Socket, 4, 2, 1);
    come_and_go(LinkChoice::Shm, 8, 3, 0);
}

fn come_and_go(link: LinkChoice, data: usize, parity: usize, spare: usize) {
    let Some(_alone) = alone() else { return };
    let lenders = (0..data + parity + spare).map(|_| Some(Serving::new(SLABS))).collect::<Vec<_>>();
    let mut lenders = std::mem::ManuallyDrop::new(lenders);
    let addresses: Vec<_> = lenders.iter().flatten().map(|lender| lender.address.clone()).collect();
    let (pager, memory) = start_with(&texts(&addresses), |config| {
        config.link = link;
        in_parts(config, data, parity);
    });
    let mut model = Model::new(memory, 1);
    let used: u64 = addresses.iter().map(|address| netvm::lender::status(address).unwrap().used_bytes).sum();
    // What is far, and its parity, in whole slabs of one lender each.
    let far = (MEMORY * (data + parity) / data + ((data + parity) << 21)) as u64;
    assert!(used > far / 3 && used <= far, "{used} of {far}");
    let (mut lost, mut back) = (0, 0);
    for round in 0..3 {
        // As many as may be lost, at once.
        let losers: Vec<usize> = (0..parity).map(|index| (round + 2 * index) % lenders.len()).collect();
        for &loser in &losers {
            lenders[loser] = None;
        }
        lost += losers.len() as u64;
        until(&pager, &mut model, "they are missed", |stats| stats.lenders_lost == lost);
        model.check_all();
        for &loser in &losers {
            lenders[loser] = Some(Serving::at(&addresses[loser], SLABS));
        }
        back += losers.len() as u64;
        let stats = until(&pager, &mut model, "all pages have all parts", |stats| {
            stats.lenders_back == back && stats.pages_unprotected == 0
        });
        assert!(stats.pages_repaired > 0, "{stats:?}");
        model.check_all();
    }
    let stats = pager.stats();
    println!("{stats:?}");
    assert_eq!(stats.wrong_pages, 0, "{stats:?}");
    model.must_not_have_stalled_for(Duration::from_secs(3));
}

/// Lenders, the first behind a proxy.
fn with_proxy(
    seed: u64,
    (data, parity): (usize, usize),
    change: impl FnOnce(&mut PagerConfig),
) -> (Arc<AtomicU32>, Arc<Pager>, Model) {
    let mode = Arc::new(AtomicU32::new(PASS));
    let mut addresses: Vec<String> = (0..data + parity).map(|_| lend().address.clone()).collect();
    addresses[0] = proxy(&addresses[0], &mode, 4096 / data);
    let (pager, memory) = start_with(&texts(&addresses), |config| {
        in_parts(config, data, parity);
        change(config);
    });
    let mut model = Model::new(memory, seed);
    model.churn(2000);
    (mode, pager, model)
}

#[test]
fn a_silent_lender_is_done_without() {
    let Some(_alone) = alone() else { return };
    let (mode, pager, mut model) = with_proxy(3, (2, 1), |_| {});
    mode.store(HOLD, Ordering::Relaxed);
    let stats = until(&pager, &mut model, "it is lost", |stats| stats.lenders_lost == 1);
    model.check_all();
    println!("{stats:?}");
    model.must_not_have_stalled_for(Duration::from_secs(3));
    mode.store(PASS, Ordering::Relaxed);
    until(&pager, &mut model, "it is back, and has its parts", |stats| {
        stats.lenders_back == 1 && stats.pages_unprotected == 0
    });
    model.check_all();
}

#[test]
fn reads_do_not_wait_for_a_slow_lender() {
    let Some(_alone) = alone() else { return };
    for parts in [(2, 1), (4, 2)] {
        let (mode, pager, model) = with_proxy(4, parts, |_| {});
        // Nothing is left to be written, which it would take its time for, too.
        model.check_all();
        mode.store(DELAY, Ordering::Relaxed);
        let before = pager.stats().remote_reads;
        let started = Instant::now();
        model.check_all();
        let (took, stats) = (started.elapsed(), pager.stats());
        let reads = stats.remote_reads - before;
        println!("{reads} pages in {took:?}: {stats:?}");
        assert!(reads > 2000 && stats.lenders_lost == 0, "{stats:?}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
}

#[test]
fn a_wrong_part_is_found() {
    returns_other_contents(5, (2, 1), ALTER, false);
    returns_other_contents(6, (4, 2), ALTER, false);
}

#[test]
fn a_wrong_part_of_an_encrypted_page_is_found() {
    returns_other_contents(7, (2, 1), ALTER, true);
}

/// What the lender returns was its part of that page, but of an older one.
#[test]
fn a_stale_part_is_found() {
    returns_other_contents(8, (2, 1), STALE, false);
    returns_other_contents(9, (4, 2), STALE, true);
}

fn returns_other_contents(seed: u64, parts: (usize, usize), how: u32, encrypt_pages: bool) {
    let Some(_alone) = alone() else { return };
    let (mode, pager, mut model) = with_proxy(seed, parts, |config| config.encrypt_pages = encrypt_pages);
    mode.store(how, Ordering::Relaxed);
    let stats = until(&pager, &mut model, "it is noticed", |stats| stats.wrong_pages > 0);
    // The liar is lost, and nobody else.
    assert_eq!((stats.lenders_lost, stats.lenders_back), (1, 0), "{stats:?}");
    model.check_all();
    mode.store(PASS, Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(2500));
    // It can be reached, but is not trusted any more.
    model.churn(2000);
    let stats = pager.stats();
    assert_eq!((stats.lenders_lost, stats.lenders_back), (1, 0), "{stats:?}");
}

/// It is found while parts are computed for another lender, before anybody has asked for the page.
#[test]
fn a_lender_that_returns_wrong_parts_to_a_repair_is_blamed() {
    let Some(_alone) = alone() else { return };
    for encrypt_pages in [false, true] {
        a_liar_is_blamed_by_a_repair(&[lend(), lend(), lend(), lend(), lend()], 2048, |config| {
            in_parts(config, 2, 2);
            config.encrypt_pages = encrypt_pages;
        });
    }
}

#[test]
fn parts_that_cannot_be() {
    let lender = Serving::new(1);
    let refused = |lenders: &[&str], replicas: usize| {
        let lenders = lenders.iter().map(|&lender| lender.to_owned()).collect();
        let config = PagerConfig { lenders, replicas, erasure: Erasure::new(2, 1), ..PagerConfig::default() };
        Pager::start(config).unwrap_err().to_string()
    };
    if netvm_sys::uffd::probe().is_ok() {
        assert!(refused(&[&lender.address], 1).contains("2+1 needs 3 lenders, and there are 1"));
        assert!(refused(&[lender.address.as_str(), "b:1", &lender.address], 1).contains("named twice"));
        let (other, local) = (Serving::new(1), lender.address.replace("127.0.0.1", "localhost"));
        assert!(refused(&[&lender.address, &other.address, &local], 1).contains("are the same lender"));
        assert!(refused(&["a:1", "b:1", "c:1"], 2).contains("not both"));
    }
    let lost =
        PagerError::PartsLost { pages: 3, need: 2, why: "lender a is gone; lender b is gone".to_owned() };
    assert_eq!(
        lost.to_string(),
        "fewer than 2 parts are left of 3 pages: lender a is gone; lender b is gone"
    );
}
