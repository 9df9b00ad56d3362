//! What the integration tests share.
#![allow(dead_code)]

pub mod mapped;
pub mod pages;
pub mod process;
pub mod redundant;
pub mod words;

use netvm::lender::{BorrowOptions, Borrower, Lender, LenderConfig, LinkChoice, StopFlag};
use netvm::pager::FaultPath;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

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

/// A lender on a thread of this process, until it is dropped.
pub struct Serving {
    pub address: String,
    pub stop: StopFlag,
    pub thread: Option<JoinHandle<()>>,
}

impl Serving {
    pub fn start(config: LenderConfig) -> Self {
        let mut lender = Lender::bind(config).unwrap();
        let address = lender.addresses().remove(0);
        let stop = StopFlag::new().unwrap();
        let flag = stop.clone();
        let thread = Some(std::thread::spawn(move || lender.run(&flag).unwrap()));
        Self { address, stop, thread }
    }

    /// So many slabs of 1 MiB, over TCP loopback.
    pub fn new(slabs: u64) -> Self {
        Self::at("127.0.0.1:0", slabs)
    }

    /// The same at an address.
    pub fn at(address: &str, slabs: u64) -> Self {
        let (listen, slab_bytes) = (vec![address.to_owned()], 1 << 20);
        let size_bytes = slabs * slab_bytes;
        Self::start(LenderConfig { listen, size_bytes, slab_bytes, ..LenderConfig::default() })
    }

    /// Whose every transfer goes over the connection.
    pub fn connect(&self) -> Borrower {
        self.connect_by(LinkChoice::Socket)
    }

    pub fn connect_by(&self, link: LinkChoice) -> Borrower {
        let options = BorrowOptions { name: "test".into(), link, ..BorrowOptions::default() };
        Borrower::connect(&self.address, &options).unwrap()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // The first asks it to wait for its borrowers, the second does not.
        while let Some(thread) = self.thread.take_if(|thread| !thread.is_finished()) {
            self.stop.stop();
            std::thread::sleep(Duration::from_millis(2));
            self.thread = Some(thread);
        }
    }
}

/// Passes bytes on between a pager and its lender, late when it is told to.
pub fn delayed(lender: &str, delay_ms: Arc<AtomicU64>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let lender = lender.to_owned();
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            // The lender may have gone.
            let Ok(far) = TcpStream::connect(&lender) else { continue };
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            let ends = [(near.try_clone(), far.try_clone()), (far.try_clone(), near.try_clone())];
            for (at, (from, to)) in ends.into_iter().enumerate() {
                let (mut from, mut to, delay_ms) = (from.unwrap(), to.unwrap(), Arc::clone(&delay_ms));
                std::thread::spawn(move || {
                    let mut bytes = vec![0; 1 << 16];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        if at == 0 {
                            std::thread::sleep(Duration::from_millis(delay_ms.load(Ordering::Relaxed)));
                        }
                        if to.write_all(&bytes[..count]).is_err() {
                            return;
                        }
                    }
                });
            }
        }
    });
    address
}

/// One test at a time: several pagers that move pages at once interrupt each other's CPUs, and all of them crawl. `None` where
/// there can be no pager, having said so.
pub fn alone() -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    if let Err(error) = netvm_sys::uffd::probe() {
        tell(&format!("skipped (userfaultfd: {error})"));
        return None;
    }
    Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The same where threads serve their own faults.
pub fn alone_in_thread() -> Option<MutexGuard<'static, ()>> {
    alone().filter(|_| has_in_thread())
}

/// Who may serve faults on this kernel. What it has not is told.
pub fn fault_paths() -> Vec<FaultPath> {
    [FaultPath::Thread].into_iter().chain(has_in_thread().then_some(FaultPath::InThread)).collect()
}

/// Whether threads may serve their own faults; if not, that is told.
pub fn has_in_thread() -> bool {
    has_moves("in-thread faults")
}

/// Whether pages can be moved, which `what` needs; if not, that is told.
pub fn has_moves(what: &str) -> bool {
    let has = netvm_sys::uffd::can_move();
    if !has {
        tell(&format!("{what}: skipped (needs Linux 6.8)"));
    }
    has
}

/// Says something of the test that runs, past the capture of the test harness.
fn tell(what: &str) {
    let thread = std::thread::current();
    let _ = writeln!(std::io::stderr(), "{}: {what}", thread.name().unwrap_or_default());
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

/// Swap space in compressed memory, for as long as it lives; that of the system where there is some.
pub struct Swap {
    made: bool,
}

impl Swap {
    /// # Errors
    /// Why there is none.
    pub fn on() -> Result<Self, String> {
        let swaps = std::fs::read_to_string("/proc/swaps").map_err(|error| error.to_string())?;
        if swaps.lines().count() > 1 {
            return Ok(Self { made: false });
        }
        let size =
            std::fs::read_to_string("/sys/block/zram0/disksize").map_err(|_| "no swap and no zram0")?;
        if size.trim() != "0" {
            return Err("zram0 is in use".to_owned());
        }
        std::fs::write("/sys/block/zram0/disksize", "64M").map_err(|error| format!("zram0: {error}"))?;
        let swap = Self { made: true };
        for (program, arguments) in [("mkswap", &["/dev/zram0"][..]), ("swapon", &["/dev/zram0"])] {
            let done = std::process::Command::new(program).args(arguments).output();
            match done {
                Ok(output) if output.status.success() => {}
                Ok(output) => return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
                Err(error) => return Err(format!("{program}: {error}")),
            }
        }
        Ok(swap)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if self.made {
            let _ = std::process::Command::new("swapoff").arg("/dev/zram0").output();
            let _ = std::fs::write("/sys/block/zram0/reset", "1");
        }
    }
}
