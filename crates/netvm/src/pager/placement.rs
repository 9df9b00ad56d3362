//! On which CPU the pager's thread runs.
//!
//! Waking a thread on another CPU costs more than all the work of a fault, and the scheduler, which sees the pager's CPU busy in
//! that moment, moves the woken thread to another. So while one thread of the program does nearly all the faulting, often,
//! that thread, the pager and a lender that serves this process alone take turns on one CPU. When several threads fault,
//! when faults are rare, or when others want that CPU too, the scheduler decides.

use netvm_sys::cpu::{CpuSet, Hold, cpu_of, each_idle_ns, run_ns_of};
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
/// Of a CPU to move to, when they take more, one part in this many may be busy.
const BUSY_PART: u64 = 4;
/// How long to leave it to the scheduler when there is none.
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
    /// How long we had run by then,
    run_ns: u64,
    /// and how long each CPU had been idle.
    idle_ns: Box<IdleNs>,
    /// Others were found to take too much.
    crowded: bool,
}

/// For each CPU, in nanoseconds.
type IdleNs = [u64; 1024];

fn idle_ns() -> Box<IdleNs> {
    let mut all = Box::new([0; 1024]);
    each_idle_ns(|cpu, idle_ns| {
        all.get_mut(cpu).is_some_and(|idle| {
            *idle = idle_ns;
            true
        })
    });
    all
}

/// What to do about who else uses the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Share {
    /// They leave us most of it, or the scheduler may still find them another.
    Stay,
    /// They stay, and this CPU has nearly nothing to do.
    Move(usize),
    /// They stay, and all CPUs are busy.
    Leave,
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
                if now - together.looked > SHARE_INTERVAL {
                    match self.share(now) {
                        Share::Stay => {}
                        Share::Move(cpu) => self.gather(Some(cpu), now, hold, alone_in_run()),
                        Share::Leave => {
                            self.rest_until = now + REST;
                            self.let_go(hold);
                        }
                    }
                }
            }
            _ if now < self.rest_until => {}
            _ => self.gather(None, now, hold, alone_in_run()),
        }
    }

    /// Whether the thread has been put on the pager's only CPU, so that nobody needs to be held.
    fn meet(&mut self, now: Instant) {
        let is_here = CpuSet::of(self.thread).is_ok_and(|cpus| cpus == self.allowed);
        let idle_ns = Box::new([0; 1024]);
        let together =
            Together { cpu: 0, thread: self.thread, looked: now, run_ns: 0, idle_ns, crowded: false };
        self.together = is_here.then_some(together);
    }

    /// Brings everybody to this CPU, or the thread's.
    fn gather(&mut self, cpu: Option<usize>, now: Instant, hold: &Hold, alone_in_run: bool) {
        self.let_go(hold);
        let Some(cpu) = cpu.or_else(|| cpu_of(self.thread)) else { return };
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
        let (idle_ns, run_ns) = (idle_ns(), self.run_ns(self.thread));
        self.together =
            Some(Together { cpu, thread: self.thread, looked: now, run_ns, idle_ns, crowded: false });
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

    /// Who else uses the CPU.
    fn share(&mut self, now: Instant) -> Share {
        let run_ns = self.run_ns(self.thread);
        let Some(together) = &mut self.together else { return Share::Stay };
        let near = CpuSet::near(together.cpu).unwrap_or(self.allowed);
        let may_use = |cpu| self.allowed.contains(cpu) && near.contains(cpu);
        together.share(now, run_ns, idle_ns(), may_use)
    }
}

impl Together {
    /// What to do when this is how long we have run, and each CPU has been idle, by now. Others that take too much have until the next look
    /// to be moved away: a program that starts where we are is, mostly, while another CPU is idle.
    fn share(
        &mut self,
        now: Instant,
        run_ns: u64,
        idle_ns: Box<IdleNs>,
        may_use: impl Fn(usize) -> bool,
    ) -> Share {
        let elapsed_ns = (now - self.looked).as_nanos() as u64;
        let ran_ns = run_ns.saturating_sub(self.run_ns);
        let before = std::mem::replace(&mut self.idle_ns, idle_ns);
        let idle_ns = |cpu: usize| self.idle_ns[cpu].saturating_sub(before[cpu]);
        let foreign_ns = elapsed_ns.saturating_sub(ran_ns + idle_ns(self.cpu));
        (self.looked, self.run_ns) = (now, run_ns);
        let was_crowded = std::mem::replace(&mut self.crowded, foreign_ns > elapsed_ns / FOREIGN_PART);
        if !(was_crowded && self.crowded) {
            return Share::Stay;
        }
        let others = (0..self.idle_ns.len()).filter(|&cpu| cpu != self.cpu && may_use(cpu));
        let idlest = others.max_by_key(|&cpu| idle_ns(cpu));
        let idlest = idlest.filter(|&cpu| idle_ns(cpu) >= elapsed_ns - elapsed_ns / BUSY_PART);
        idlest.map_or(Share::Leave, Share::Move)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is done after each tenth of a second in which we ran, and CPUs 0 to 2 were idle, for so many milliseconds. We are on CPU 0, and may not use CPU 2.
    fn shares(windows: &[(u64, [u64; 3])]) -> Vec<Share> {
        let (mut now, mut run_ns, mut idle_ns) = (Instant::now(), 5, [7; 1024]);
        let mut together =
            Together { cpu: 0, thread: 1, looked: now, run_ns, idle_ns: Box::new(idle_ns), crowded: false };
        let mut next = |&(ran_ms, idle_ms): &(u64, [u64; 3])| {
            (now, run_ns) = (now + Duration::from_millis(100), run_ns + ran_ms * 1_000_000);
            (0..3).for_each(|cpu| idle_ns[cpu] += idle_ms[cpu] * 1_000_000);
            together.share(now, run_ns, Box::new(idle_ns), |cpu| cpu < 2)
        };
        windows.iter().map(&mut next).collect()
    }

    #[test]
    fn others_may_stay_for_a_moment() {
        use Share::{Leave, Move, Stay};
        assert_eq!(shares(&[(90, [0; 3]), (10, [80, 0, 0]), (30, [50, 0, 0])]), [Stay; 3], "ours, or idle");
        assert_eq!(shares(&[(50, [0; 3]), (100, [0; 3]), (50, [0; 3])]), [Stay; 3], "they were moved away");
        assert_eq!(shares(&[(50, [0; 3]), (50, [0; 3])]), [Stay, Leave], "all are busy");
        assert_eq!(shares(&[(50, [0, 90, 0]), (50, [0, 90, 0])]), [Stay, Move(1)]);
        assert_eq!(shares(&[(50, [0, 90, 99]), (50, [0, 60, 99])]), [Stay, Leave], "CPU 1 is busy, too");
    }
}
