//! What the integration tests share.
#![allow(dead_code)]

pub mod process;

use netvm::lender::{Lender, LenderConfig, StopFlag};
use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lender on a thread of this process, until the process ends: pagers have no end either.
pub struct Lent {
    address: String,
}

impl Lent {
    pub fn address(&self) -> &str {
        &self.address
    }
}

/// A lender of `size_bytes` over TCP loopback.
pub fn lend(size_bytes: u64) -> Lent {
    lend_in_slabs(size_bytes, 1 << 20)
}

/// The same in slabs of `slab_bytes`.
pub fn lend_in_slabs(size_bytes: u64, slab_bytes: u64) -> Lent {
    let config = LenderConfig { size_bytes, slab_bytes, ..LenderConfig::default() };
    let mut lender = Lender::bind(config).unwrap();
    let address = lender.addresses().remove(0);
    let stop = StopFlag::new().unwrap();
    std::thread::spawn(move || lender.run(&stop).unwrap());
    Lent { address }
}

/// One test at a time: several pagers that move pages at once interrupt each other's CPUs, and all of them crawl. `None` where
/// there can be no pager, having said so.
pub fn alone() -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    if let Err(error) = netvm_sys::uffd::probe() {
        let thread = std::thread::current();
        let test = thread.name().unwrap_or_default();
        // Past the capture of the test harness.
        let _ = writeln!(std::io::stderr(), "{test}: skipped (userfaultfd: {error})");
        return None;
    }
    Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// SplitMix64: small, seeded, good enough to make contents that do not repeat.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}
