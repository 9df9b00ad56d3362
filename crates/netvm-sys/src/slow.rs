//! Memory whose pages take their time to come in: for measurements of who waits for them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::mapping::{Mapping, RawRange};
use crate::uffd::{Fault, PAGE_BYTES, Userfault};

/// Memory of which the first pages are missing, and come in, as zeros, some time after they are touched.
#[derive(Debug)]
pub struct SlowPages {
    mapping: Arc<Mapping>,
    stop: Arc<AtomicBool>,
}

impl SlowPages {
    /// `pages` pages, of which the first `slow` take `delay`; the others are there. Kept until the process ends.
    ///
    /// # Errors
    /// As [`Userfault::open`]; ENOMEM.
    pub fn new(pages: usize, slow: usize, delay: Duration) -> io::Result<Self> {
        let slow = slow.min(pages);
        let mapping = Arc::new(Mapping::anonymous(pages * PAGE_BYTES)?);
        if let Some(rest) = mapping.shared().sub(slow * PAGE_BYTES, (pages - slow) * PAGE_BYTES) {
            rest.fill(1);
        }
        let uffd = Userfault::open(0)?;
        // SAFETY: our own mapping, whose faults the thread below serves as long as the process lives.
        unsafe { uffd.register(mapping.shared().as_ptr().addr(), slow * PAGE_BYTES, false) }?;
        let stop = Arc::new(AtomicBool::new(false));
        let (kept, at_once) = (Arc::clone(&mapping), Arc::clone(&stop));
        std::thread::Builder::new().name("slow-pages".to_owned()).spawn(move || {
            let _kept = kept;
            let mut waiting: Vec<(Instant, usize)> = Vec::new();
            let mut faults = [Fault::default(); 32];
            loop {
                let count = uffd.read_faults(&mut faults).unwrap_or(0);
                let due = Instant::now() + delay;
                waiting.extend(faults[..count].iter().map(|fault| (due, fault.address)));
                let now = Instant::now();
                waiting.retain(|&(due, address)| {
                    let waits = due > now && !at_once.load(Ordering::Relaxed);
                    if !waits {
                        // SAFETY: a page of the mapping that this thread keeps, which reads as zero.
                        let _ = unsafe { uffd.zero(address, PAGE_BYTES) };
                        let _ = uffd.wake(address, PAGE_BYTES);
                    }
                    waits
                });
                std::thread::sleep(Duration::from_millis(1));
            }
        })?;
        Ok(Self { mapping, stop })
    }

    /// All of it, to be exported.
    pub fn range(&self) -> RawRange {
        let memory = self.mapping.shared();
        // SAFETY: mapped until the process ends (its thread keeps it), and nobody has references to it.
        unsafe { RawRange::new(memory.as_ptr(), memory.len(), true) }
    }
}

impl Drop for SlowPages {
    fn drop(&mut self) {
        // Nobody waits for it longer than needed.
        self.stop.store(true, Ordering::Relaxed);
    }
}
