//! On which CPU the pager's thread runs.
//!
//! Waking a thread on another CPU costs more than all the work of a fault, and the scheduler, which sees the pager's CPU busy in
//! that moment, moves the woken thread to another. So while one thread of the program does nearly all the faulting, often,
//! that thread, the pager and a lender that serves this process alone take turns on one CPU. When several threads fault,
//! when faults are rare, or when others want that CPU too, the scheduler decides.

use netvm_sys::cpu::{CpuSet, Hold, cpu_of, idle_ns_of, run_ns_of};
use netvm_sys::uffd::Fault;
use std::time::{Duration, Instant};

/// Faults between two looks.
const PERIOD: u32 = 128;
/// Faults in a period that must come from one thread.
const SAME_MIN: u32 = PERIOD / 8 * 7;
/// A period that takes longer than this is not worth it.
const PERIOD_MAX: Duration = Duration::from_millis(50);
/// How long the pager waits for a fault before it lets go.
pub(super) const PATIENCE: Duration = Duration::from_millis(50);
/// Time between two looks at who else uses the CPU.
const SHARE_INTERVAL: Duration = Duration::from_millis(100);
/// One part in this many of the CPU's time may go to others.
const FOREIGN_PART: u64 = 4;
/// How long to leave it to the scheduler when they take more.
const REST: Duration = Duration::from_secs(1);

/// Where the pager runs, and why.
#[derive(Debug)]
pub(super) struct Placement {
    /// All CPUs that the pager's thread may use.
    allowed: CpuSet,
    /// The pager's thread.
    this_thread: u32,
    /// Lender that serves nobody else.
    private_lender: Option<u32>,
    together: Option<Together>,
    /// The thread that faults most, by the majority vote of Boyer and Moore.
    thread: u32,
    votes: u32,
    same: u32,
    seen: u32,
    since: Instant,
    rest_until: Instant,
}

/// Everybody is on one CPU.
#[derive(Debug)]
struct Together {
    cpu: usize,
    thread: u32,
    looked: Instant,
    run_ns: u64,
    idle_ns: u64,
}

impl Placement {
    pub(super) fn new(private_lender: Option<u32>) -> Self {
        let now = Instant::now();
        Self {
            allowed: CpuSet::default(),
            this_thread: 0,
            private_lender,
            together: None,
            thread: 0,
            votes: 0,
            same: 0,
            seen: 0,
            since: now,
            rest_until: now,
        }
    }

    /// On the pager's thread: from now on it may move among the CPUs it has now.
    pub(super) fn start(&mut self) {
        self.allowed = CpuSet::of(0).unwrap_or_default();
        self.this_thread = netvm_sys::thread::number();
        self.together = None;
    }

    /// Whether the pager must not sleep for longer than [`PATIENCE`].
    pub(super) fn is_holding(&self) -> bool {
        self.together.is_some()
    }

    /// Notes a fault; now and then, moves.
    pub(super) fn note(&mut self, fault: Fault, hold: &Hold, alone_in_run: impl FnOnce() -> bool) {
        if self.allowed.is_empty() || fault.thread == 0 {
            return;
        }
        if fault.thread == self.thread {
            self.votes += 1;
            self.same += 1;
        } else if self.votes == 0 {
            (self.thread, self.votes, self.same) = (fault.thread, 1, 1);
        } else {
            self.votes -= 1;
        }
        self.seen += 1;
        if self.seen >= PERIOD {
            self.look(hold, alone_in_run);
            (self.seen, self.same, self.votes) = (0, 0, 0);
        }
    }

    fn look(&mut self, hold: &Hold, alone_in_run: impl FnOnce() -> bool) {
        let now = Instant::now();
        let often = now - std::mem::replace(&mut self.since, now) < PERIOD_MAX;
        if self.same < SAME_MIN || !often {
            return self.let_go(hold);
        }
        if self.allowed.len() == 1 {
            return self.meet(now);
        }
        match &self.together {
            Some(together) if together.thread == self.thread && hold.cpus_of(self.thread).is_some() => {
                if now - together.looked > SHARE_INTERVAL && !self.is_cpu_ours(now) {
                    self.rest_until = now + REST;
                    self.let_go(hold);
                }
            }
            _ if now < self.rest_until => {}
            _ => self.gather(now, hold, alone_in_run()),
        }
    }

    /// Whether the thread has been put on the pager's only CPU, so that nobody needs to be held.
    fn meet(&mut self, now: Instant) {
        let is_here = CpuSet::of(self.thread).is_ok_and(|cpus| cpus == self.allowed);
        self.together =
            is_here.then_some(Together { cpu: 0, thread: self.thread, looked: now, run_ns: 0, idle_ns: 0 });
    }

    /// Brings everybody to the thread's CPU.
    fn gather(&mut self, now: Instant, hold: &Hold, alone_in_run: bool) {
        self.let_go(hold);
        let Some(cpu) = cpu_of(self.thread) else { return };
        if !hold.hold(self.thread, cpu) {
            return;
        }
        let one = CpuSet::one(cpu);
        // A CPU that went away leaves things as they are.
        if one.apply(0).is_err() {
            return hold.release();
        }
        // Several processes would pull the lender to and fro.
        if let Some(lender) = self.private_lender.filter(|_| alone_in_run) {
            // It answers from where it is, too.
            let _ = one.apply(lender);
        }
        let (idle_ns, run_ns) = (idle_ns_of(cpu).unwrap_or(0), self.run_ns(self.thread));
        self.together = Some(Together { cpu, thread: self.thread, looked: now, run_ns, idle_ns });
    }

    /// Leaves it to the scheduler.
    pub(super) fn let_go(&mut self, hold: &Hold) {
        if self.together.take().is_none() {
            return;
        }
        if self.allowed.len() == 1 {
            return;
        }
        hold.release();
        let _ = self.allowed.apply(0);
        if let Some(lender) = self.private_lender {
            let _ = self.allowed.apply(lender);
        }
    }

    /// Time that those on the CPU have run, in nanoseconds.
    fn run_ns(&self, thread: u32) -> u64 {
        let threads = [Some(thread), Some(self.this_thread), self.private_lender];
        threads.into_iter().flatten().filter_map(run_ns_of).sum()
    }

    /// Whether others leave us most of the CPU.
    fn is_cpu_ours(&mut self, now: Instant) -> bool {
        let Some(together) = &self.together else { return true };
        let elapsed_ns = (now - together.looked).as_nanos() as u64;
        let run_ns = self.run_ns(together.thread);
        let idle_ns = idle_ns_of(together.cpu).unwrap_or(0);
        let used_ns = run_ns.saturating_sub(together.run_ns) + idle_ns.saturating_sub(together.idle_ns);
        let foreign_ns = elapsed_ns.saturating_sub(used_ns);
        if let Some(together) = &mut self.together {
            (together.looked, together.run_ns, together.idle_ns) = (now, run_ns, idle_ns);
        }
        foreign_ns <= elapsed_ns / FOREIGN_PART
    }
}
