//! Pages that change places, pages of all sizes with lenders that are lost: contents stay, whoever serves faults.

mod common;

use common::pages::Pages;
use common::{Serving, alone, delayed, fault_paths};
use netvm::lender::LenderConfig;
use netvm::pager::{Erasure, Pager, PagerConfig, TierPolicy};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;

fn lend(mib: u64, on_disk: bool) -> &'static Serving {
    let folder = on_disk.then(std::env::temp_dir);
    let config = LenderConfig { size_bytes: mib * MIB, slab_bytes: MIB, folder, ..LenderConfig::default() };
    Box::leak(Box::new(Serving::start(config)))
}

fn start(lenders: &[&str], change: impl FnOnce(&mut PagerConfig)) -> Arc<Pager> {
    let mut config = PagerConfig {
        local_bytes: 8 * MIB,
        lenders: lenders.iter().map(|&lender| lender.to_owned()).collect(),
        area_bytes: 1 << 34,
        tier: TierPolicy::Lender,
        ..PagerConfig::default()
    };
    change(&mut config);
    Pager::start(config).unwrap()
}

fn pages(pager: &Pager, mib: u64, seed: u64) -> Pages {
    Pages::written(common::mapped::mapped(pager, 0, (mib * MIB) as usize), seed)
}

/// A lender whose memory is shared, one over a socket, and a file that is slow; what is wanted is every fourth page, and then others.
#[test]
fn pages_that_change_places_keep_their_contents() {
    let Some(_alone) = alone() else { return };
    for (round, path) in fault_paths().into_iter().enumerate() {
        let (near, far, disk) = (lend(12, false), lend(16, false), lend(64, true));
        let over_socket = delayed(&far.address, Arc::new(AtomicU64::new(0)));
        let slow = delayed(&disk.address, Arc::new(AtomicU64::new(1)));
        let pager = start(&[&slow, &over_socket, &near.address], |config| config.fault_path = path);
        let mut pages = pages(&pager, 48, round as u64 + 1);
        for phase in 0..3 {
            let before = pager.stats().pages_sorted;
            let started = Instant::now();
            while pager.stats().pages_sorted < before + 500 {
                // Hot pages are in no order, cold ones lie between them.
                pages.churn_scattered(4 - phase, 200);
                pages.churn(5);
                let late = started.elapsed() > Duration::from_secs(30);
                assert!(!late, "{path}: nothing moves: {:?}", pager.stats());
            }
            pages.check_all();
        }
        let stats = pager.stats();
        println!("{path} {stats:?}");
        assert!(stats.wrong_pages == 0 && stats.lenders_lost == 0, "{stats:?}");
        assert!(stats.local_frames_peak <= 8 * MIB / PAGE as u64, "{stats:?}");
    }
}

/// Of pages on two lenders, or in parts on three, one lender is killed while they are read and written, and another comes in its place.
#[test]
fn larger_pages_survive_a_lender() {
    let Some(_alone) = alone() else { return };
    for (round, page_bytes) in [16 << 10, 64 << 10, 2 << 20].into_iter().enumerate() {
        for (number, (path, in_parts)) in
            fault_paths().into_iter().flat_map(|path| [(path, false), (path, true)]).enumerate()
        {
            let lenders: Vec<_> = (0..3).map(|_| Some(Serving::new(64))).collect();
            let mut lenders = std::mem::ManuallyDrop::new(lenders);
            let addresses: Vec<_> = lenders.iter().flatten().map(|lender| lender.address.clone()).collect();
            let texts: Vec<_> = addresses.iter().map(String::as_str).collect();
            let pager = start(&texts, |config| {
                (config.fault_path, config.page_bytes) = (path, page_bytes);
                match in_parts {
                    true => config.erasure = Erasure::new(2, 1),
                    false => config.replicas = 2,
                }
            });
            let what = format!("{path}, pages of {page_bytes} bytes, in parts: {in_parts}");
            let mut pages = pages(&pager, 20, (round * 8 + number) as u64 + 1);
            pages.churn(400);
            let lost = (round + number) % 3;
            lenders[lost] = None;
            let started = Instant::now();
            while pager.stats().lenders_lost == 0 {
                pages.churn(50);
                assert!(started.elapsed() < Duration::from_secs(20), "{what}: {:?}", pager.stats());
            }
            pages.check_all();
            lenders[lost] = Some(Serving::at(&addresses[lost], 64));
            let started = Instant::now();
            while pager.stats().lenders_back == 0 || pager.stats().pages_unprotected > 0 {
                pages.churn(50);
                assert!(started.elapsed() < Duration::from_secs(30), "{what}: {:?}", pager.stats());
            }
            // What was repaired is read, too.
            lenders[(lost + 1) % 3] = None;
            pages.churn(200);
            pages.check_all();
            let stats = pager.stats();
            assert!(stats.pages_repaired > 0 && stats.wrong_pages == 0, "{what}: {stats:?}");
            assert!(stats.local_frames_peak <= 8 * MIB / PAGE as u64, "{what}: {stats:?}");
        }
    }
}
