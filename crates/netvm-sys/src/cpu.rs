//! CPUs: which a thread may use, which it uses, and holding it on one for a while.
//!
//! By system call and /proc, since the library that is preloaded into programs shows them other answers.

use crate::thread::{Turn, number};
use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

const WORDS: usize = 16;

/// A set of CPUs, 0 to 1023.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuSet([u64; WORDS]);

impl CpuSet {
    /// One CPU.
    pub fn one(cpu: usize) -> Self {
        let mut set = Self::default();
        if let Some(word) = set.0.get_mut(cpu / 64) {
            *word |= 1 << (cpu % 64);
        }
        set
    }

    /// CPUs on which a thread (0: the calling one) may run.
    ///
    /// # Errors
    /// EINVAL on machines with more CPUs than the set holds; ESRCH, EPERM.
    pub fn of(thread: u32) -> io::Result<Self> {
        let mut set = Self::default();
        // SAFETY: the kernel writes at most the size given, which is the set's.
        let result = unsafe {
            libc::syscall(libc::SYS_sched_getaffinity, thread as usize, size_of::<Self>(), set.0.as_mut_ptr())
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(set) }
    }

    /// CPUs with the same level 3 cache as one of them, itself included; `None` where the kernel does not tell.
    pub fn near(cpu: usize) -> Option<Self> {
        read_small(&format!("/sys/devices/system/cpu/cpu{cpu}/cache/index3/shared_cpu_list"), Self::listed)
    }

    /// Of a list as the kernel writes them: numbers and ranges, as in `0-3,8,10-11`.
    fn listed(list: &str) -> Option<Self> {
        let mut set = Self::default();
        for range in list.trim().split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
            // Those beyond the set's words cannot be in it.
            for cpu in first..=last.min(WORDS * 64) {
                if let Some(word) = set.0.get_mut(cpu / 64) {
                    *word |= 1 << (cpu % 64);
                }
            }
        }
        Some(set)
    }

    /// How many they are.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a CPU is among them.
    pub fn contains(&self, cpu: usize) -> bool {
        self.0.get(cpu / 64).is_some_and(|word| word >> (cpu % 64) & 1 != 0)
    }

    /// The set as cpu_set_t lays it out: words of 64 CPUs.
    pub fn words(&self) -> &[u64] {
        &self.0
    }

    /// Lets a thread (0: the calling one) run on these CPUs only.
    ///
    /// # Errors
    /// EINVAL when it may use none of them; ESRCH, EPERM.
    pub fn apply(&self, thread: u32) -> io::Result<()> {
        // SAFETY: the kernel reads at most the size given, which is the set's.
        let result = unsafe {
            libc::syscall(libc::SYS_sched_setaffinity, thread as usize, size_of::<Self>(), self.0.as_ptr())
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// Pins the calling thread to one CPU.
///
/// # Errors
/// EINVAL when this process may not use that CPU.
pub fn pin(cpu: usize) -> io::Result<()> {
    CpuSet::one(cpu).apply(0)
}

/// Whether this process may use a CPU now: the calling thread goes there, and back.
///
/// # Errors
/// EINVAL when it may not.
pub fn may_use(cpu: usize) -> io::Result<()> {
    let here = CpuSet::of(0)?;
    pin(cpu)?;
    here.apply(0)
}

/// Reads a small file of /proc without the heap.
fn read_small<R>(path: &str, parse: impl FnOnce(&str) -> Option<R>) -> Option<R> {
    let mut buffer = [0; 4096];
    let length = std::fs::File::open(path).ok()?.read(&mut buffer).ok()?;
    parse(&String::from_utf8_lossy(&buffer[..length]))
}

/// CPU on which a thread of this process ran last.
pub fn cpu_of(thread: u32) -> Option<usize> {
    read_small(&format!("/proc/self/task/{thread}/stat"), |stat| {
        // The name may contain anything; fields are counted from the last parenthesis.
        stat[stat.rfind(')')? + 1..].split_ascii_whitespace().nth(36)?.parse().ok()
    })
}

/// Time that a thread of any process has run, in nanoseconds.
pub fn run_ns_of(thread: u32) -> Option<u64> {
    read_small(&format!("/proc/{thread}/schedstat"), |stat| {
        stat.split_ascii_whitespace().next()?.parse().ok()
    })
}

/// Time that a CPU has been idle, in nanoseconds, to some 10 ms.
pub fn idle_ns_of(cpu: usize) -> Option<u64> {
    let mut found = None;
    each_idle_ns(|other, idle_ns| {
        found = (other == cpu).then_some(idle_ns);
        found.is_none()
    });
    found
}

/// Tells how long each CPU has been idle, in nanoseconds to some 10 ms, until `next` returns false. Without the heap.
pub fn each_idle_ns(next: impl FnMut(usize, u64) -> bool) {
    if let Ok(stat) = std::fs::File::open("/proc/stat") {
        idle_ns_in(stat, next);
    }
}

/// With many CPUs it is long, and behind them comes a line that is longer.
fn idle_ns_in(mut stat: impl Read, mut next: impl FnMut(usize, u64) -> bool) {
    let (mut buffer, mut filled) = ([0; 4096], 0);
    loop {
        match stat.read(&mut buffer[filled..]) {
            Ok(length @ 1..) => filled += length,
            _ => return,
        }
        let mut start = 0;
        while let Some(length) = buffer[start..filled].iter().position(|&byte| byte == b'\n') {
            let line = str::from_utf8(&buffer[start..start + length]).unwrap_or_default();
            start += length + 1;
            let Some(line) = line.strip_prefix("cpu") else { return };
            // The first line is the sum of all.
            if let Some((cpu, idle_ns)) = idle_ns(line)
                && !next(cpu, idle_ns)
            {
                return;
            }
        }
        buffer.copy_within(start..filled, 0);
        filled -= start;
    }
}

/// Of a CPU's line: its number, and time without work in nanoseconds.
fn idle_ns(line: &str) -> Option<(usize, u64)> {
    // Counted in USER_HZ, which is 100 on every architecture that Linux has userfaultfd for.
    const TICK_NS: u64 = 10_000_000;
    let (cpu, times) = line.split_once(' ')?;
    let mut times = times.split_ascii_whitespace().skip(3).map(str::parse::<u64>);
    let (idle, iowait) = (times.next()?.ok()?, times.next()?.ok()?);
    Some((cpu.parse().ok()?, idle.saturating_add(iowait).saturating_mul(TICK_NS)))
}

/// A thread that is held on one CPU for a while, and the CPUs that it may use otherwise.
///
/// Holding must not show: [`Hold::release`] comes before questions about CPUs, and whoever starts threads or programs does it
/// between [`Hold::suspend`] and [`Hold::resume`], so that they do not inherit the hold.
#[derive(Debug, Default)]
pub struct Hold {
    turn: Turn,
    /// 0: no thread is held.
    thread: AtomicU32,
    cpu: AtomicU32,
    /// What the held thread may use otherwise. Written before `thread`.
    cpus: [AtomicU64; WORDS],
    suspended: AtomicU32,
    /// The program places its threads itself.
    given_up: AtomicBool,
}

impl Hold {
    /// Holds nothing.
    pub const fn new() -> Self {
        Self {
            turn: Turn::new(),
            thread: AtomicU32::new(0),
            cpu: AtomicU32::new(0),
            cpus: [const { AtomicU64::new(0) }; WORDS],
            suspended: AtomicU32::new(0),
            given_up: AtomicBool::new(false),
        }
    }

    /// Holds a thread of this process on `cpu` instead of the one held until now. False when that may not be.
    pub fn hold(&self, thread: u32, cpu: usize) -> bool {
        self.turn.take();
        self.let_go();
        let may = self.suspended.load(Ordering::Relaxed) == 0 && !self.given_up.load(Ordering::Relaxed);
        let held = may && thread != 0 && self.try_hold(thread, cpu);
        self.turn.give_back();
        held
    }

    fn try_hold(&self, thread: u32, cpu: usize) -> bool {
        let Ok(cpus) = CpuSet::of(thread) else { return false };
        // A thread that may use one CPU only was placed there by somebody.
        if cpus.len() < 2 || !cpus.contains(cpu) {
            return false;
        }
        for (word, value) in self.cpus.iter().zip(cpus.0) {
            word.store(value, Ordering::Relaxed);
        }
        self.cpu.store(cpu as u32, Ordering::Relaxed);
        // Release pairs with the Acquire in `held`: whoever sees the thread sees its CPUs.
        self.thread.store(thread, Ordering::Release);
        if CpuSet::one(cpu).apply(thread).is_err() {
            self.thread.store(0, Ordering::Relaxed);
            return false;
        }
        true
    }

    /// With the turn taken.
    fn let_go(&self) {
        if let Some((thread, cpus)) = self.held() {
            // A thread that has ended needs nothing.
            let _ = cpus.apply(thread);
            self.thread.store(0, Ordering::Relaxed);
        }
    }

    fn held(&self) -> Option<(u32, CpuSet)> {
        let thread = self.thread.load(Ordering::Acquire);
        let mut cpus = CpuSet::default();
        for (value, word) in cpus.0.iter_mut().zip(&self.cpus) {
            *value = word.load(Ordering::Relaxed);
        }
        (thread != 0).then_some((thread, cpus))
    }

    /// Lets the held thread go, if there is one.
    pub fn release(&self) {
        self.turn.take();
        self.let_go();
        self.turn.give_back();
    }

    /// Lets the held thread go, and holds none until [`Hold::resume`]. May be nested.
    pub fn suspend(&self) {
        self.turn.take();
        self.suspended.fetch_add(1, Ordering::Relaxed);
        self.let_go();
        self.turn.give_back();
    }

    /// Ends [`Hold::suspend`].
    pub fn resume(&self) {
        self.suspended.fetch_sub(1, Ordering::Relaxed);
    }

    /// Never holds a thread again: the program decides itself where its threads run.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
        self.release();
    }

    /// What a thread (0: the calling one) may use, if it is held.
    pub fn cpus_of(&self, thread: u32) -> Option<CpuSet> {
        let (held, cpus) = self.held()?;
        (held == if thread == 0 { number() } else { thread }).then_some(cpus)
    }

    /// Before exec(2), perhaps in a child of vfork(2) that shares this memory and has inherited the hold: gives the calling
    /// thread its CPUs back. Only system calls and no lock.
    pub fn free_this_thread(&self) {
        if let Some((_, cpus)) = self.held()
            && CpuSet::of(0).is_ok_and(|now| now == CpuSet::one(self.cpu.load(Ordering::Relaxed) as usize))
        {
            let _ = cpus.apply(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets() {
        let set = CpuSet::one(70);
        assert!(set.contains(70) && !set.contains(6) && !set.contains(5000) && set.len() == 1);
        assert!(CpuSet::one(9999).is_empty());
        let mine = CpuSet::of(0).unwrap();
        assert!(mine.contains(cpu_of(number()).unwrap()));
        // A new thread's time is counted from its first tick on.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while run_ns_of(number()).unwrap() == 0 {
            assert!(std::time::Instant::now() < end);
        }
        assert!(idle_ns_of(0).is_some());
    }

    #[test]
    fn lists_of_cpus() {
        let listed = |list| {
            let set = CpuSet::listed(list)?;
            Some((0..WORDS * 64).filter(|&cpu| set.contains(cpu)).collect::<Vec<_>>())
        };
        assert_eq!(listed("0-3,8,62-65\n"), Some(vec![0, 1, 2, 3, 8, 62, 63, 64, 65]));
        assert_eq!((listed("7"), listed("3-1")), (Some(vec![7]), Some(vec![])));
        assert_eq!(listed("0-18446744073709551615").map(|cpus| cpus.len()), Some(WORDS * 64));
        assert_eq!([listed(""), listed("a"), listed("1-"), listed("1,,2")], [None, None, None, None]);
        assert!(CpuSet::near(0).is_none_or(|near| near.contains(0)));
    }

    #[test]
    fn many_cpus_are_read() {
        let mut stat = String::from("cpu  9 9 9 9 9 9 9 9 9 9\n");
        (0..900).for_each(|cpu| stat.push_str(&format!("cpu{cpu} 123456 0 7890 {cpu} 1 0 3 0 0 0\n")));
        stat.push_str(&format!("intr {}\n", "0 ".repeat(9000)));
        let mut seen = 0;
        idle_ns_in(stat.as_bytes(), |cpu, idle_ns| {
            assert_eq!((cpu, idle_ns), (seen, (seen as u64 + 1) * 10_000_000));
            seen += 1;
            true
        });
        assert_eq!(seen, 900);
        for wrong in ["cpu0 1 2\n", "cpu0 1 2 3 x 5\n", "cpu0", "", "cpux 1 2 3 4 5\n", "CPU0 1 2 3 4 5\n"] {
            idle_ns_in(wrong.as_bytes(), |_, _| panic!("{wrong}"));
        }
        // A line that never ends.
        idle_ns_in([b'c'; 1 << 16].as_slice(), |_, _| panic!("it has no number"));
    }

    #[test]
    fn a_held_thread_gets_its_cpus_back() {
        let before = CpuSet::of(0).unwrap();
        if before.len() < 2 {
            eprintln!("a_held_thread_gets_its_cpus_back: skipped (one CPU)");
            return;
        }
        let (hold, me) = (Hold::new(), number());
        let cpu = cpu_of(me).unwrap();
        let one = CpuSet::one(cpu);
        assert!(hold.hold(me, cpu));
        assert_eq!(CpuSet::of(0).unwrap(), one);
        assert_eq!(
            (hold.cpus_of(0), hold.cpus_of(me), hold.cpus_of(me + 1)),
            (Some(before), Some(before), None)
        );
        hold.suspend();
        assert_eq!((CpuSet::of(0).unwrap(), hold.cpus_of(0)), (before, None));
        assert!(!hold.hold(me, cpu));
        hold.resume();
        assert!(hold.hold(me, cpu));
        hold.free_this_thread();
        assert_eq!(CpuSet::of(0).unwrap(), before);
        assert!(hold.hold(me, cpu));
        hold.release();
        assert_eq!(CpuSet::of(0).unwrap(), before);
        hold.give_up();
        assert!(!hold.hold(me, cpu));
    }
}
