//! On which CPU the pager's thread runs.
//!
//! Waking a thread on another CPU costs more than all the work of a fault. While one thread of the program does nearly all the
//! faulting, the pager (and a lender that serves this run alone) moves to that thread's CPU: the three take turns there. When
//! several threads fault, the scheduler decides.

use netvm_sys::thread::{CpuSet, cpu_of};
use netvm_sys::uffd::Fault;

/// Faults between two looks.
const PERIOD: u32 = 128;

/// Where the pager runs, and why.
#[derive(Debug)]
pub(super) struct Placement {
    /// All CPUs that this thread may use; `None` when it is not to move.
    allowed: Option<CpuSet>,
    /// Lender that serves nobody else.
    private_lender: Option<u32>,
    pinned: Option<usize>,
    thread: u32,
    same: u32,
    seen: u32,
}

impl Placement {
    pub(super) fn new(private_lender: Option<u32>) -> Self {
        Self { allowed: None, private_lender, pinned: None, thread: 0, same: 0, seen: 0 }
    }

    /// On the pager's thread: from now on it may move among the CPUs it has now.
    pub(super) fn start(&mut self) {
        self.allowed = CpuSet::of_this_thread().ok().filter(|set| set.len() > 1);
    }

    /// Notes a fault; now and then, moves.
    pub(super) fn note(&mut self, fault: Fault) {
        if self.allowed.is_none() || fault.thread == 0 {
            return;
        }
        if fault.thread == self.thread {
            self.same += 1;
        } else if self.same == 0 {
            self.thread = fault.thread;
        } else {
            self.same -= 1;
        }
        self.seen += 1;
        if self.seen >= PERIOD {
            self.look();
            (self.seen, self.same) = (0, 0);
        }
    }

    fn look(&mut self) {
        let Some(allowed) = self.allowed else { return };
        let alone = self.same >= PERIOD / 8 * 7;
        let wanted = if alone { cpu_of(self.thread) } else { None };
        if wanted == self.pinned {
            return;
        }
        let set = wanted.map_or(allowed, CpuSet::one);
        // A CPU that went away leaves things as they are.
        if set.apply(0).is_ok() {
            self.pinned = wanted;
            if let Some(lender) = self.private_lender {
                let _ = set.apply(lender);
            }
        }
    }
}
