//! Who serves page faults. See docs/design/pager.md, "Who serves a fault".

use netvm_sys::cpu::{CpuSet, pin};
use netvm_sys::thread::{Gate, without_signals};
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Who serves page faults, and where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FaultPath {
    /// [`FaultPath::SameCpu`] where waking a thread on another CPU takes longer than on the same one, which is measured at the start;
    /// else [`FaultPath::Thread`].
    #[default]
    Auto,
    /// The pager's thread, wherever the scheduler has it.
    Thread,
    /// The pager's thread, on the CPU of the thread that does nearly all the faulting, while there is one.
    SameCpu,
    /// The pager's thread, looking for a millisecond after each event before it sleeps: for a CPU of its own.
    Spin,
    /// The thread that faults, in a handler of SIGBUS: no other thread is woken. For far memory of a program that knows of it:
    /// system calls fail with EFAULT where they meet a page that is not there, or write to one that has only been read since it came
    /// ([`Pager::pin`](super::Pager::pin) it), so it cannot be exported; a handler of SIGBUS that the program sets later must pass on what it
    /// does not know, threads must not block SIGBUS, and need 64 KiB of their stacks for it. Far memory must not be what the program's malloc
    /// hands out, nor signal handlers that interrupt malloc touch it.
    InThread,
}

/// All of them, with their names; their places are their numbers in C and in the file of a run.
const ALL: [(FaultPath, &str); 5] = [
    (FaultPath::Auto, "auto"),
    (FaultPath::Thread, "thread"),
    (FaultPath::SameCpu, "same-cpu"),
    (FaultPath::Spin, "spin"),
    (FaultPath::InThread, "in-thread"),
];

impl FaultPath {
    /// By its number.
    pub fn from_number(number: u32) -> Option<Self> {
        ALL.get(number as usize).map(|&(path, _)| path)
    }

    /// Its number in the C interface.
    pub fn number(self) -> u32 {
        ALL.iter().position(|&(path, _)| path == self).unwrap_or(0) as u32
    }

    /// What it comes to on this machine: [`FaultPath::Auto`] is decided by what wake-ups cost.
    #[must_use]
    pub fn resolved(self) -> Self {
        match self {
            Self::Auto => WakeCosts::of_this_machine().best(),
            path => path,
        }
    }
}

impl fmt::Display for FaultPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(ALL[self.number() as usize].1)
    }
}

impl FromStr for FaultPath {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = ALL.iter().find(|(_, name)| *name == text);
        found.map(|&(path, _)| path).ok_or("a fault path is auto, thread, same-cpu, spin or in-thread")
    }
}

/// Times that a thread is woken for one figure.
const WAKES: usize = 50;
/// A figure takes no longer than this,
const MEASURE_MAX: Duration = Duration::from_millis(4);
/// unless fewer times than these fit in, as others have the CPU,
const WAKES_MIN: usize = 8;
/// and then no new round begins after this. With fewer it is unknown.
const BUSY_MAX: Duration = Duration::from_millis(40);

/// What it takes to wake a sleeping thread, until it runs, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WakeCosts {
    /// On the CPU of whoever wakes it. `None`: it could not be measured.
    pub same_cpu_ns: Option<u64>,
    /// On another. `None`: also where this process may use one CPU only.
    pub other_cpu_ns: Option<u64>,
    /// How many CPUs this process may use.
    pub cpus: usize,
}

impl WakeCosts {
    /// Measured once in a process, in 10 ms at most where the CPUs are free.
    pub fn of_this_machine() -> Self {
        static COSTS: OnceLock<WakeCosts> = OnceLock::new();
        *COSTS.get_or_init(|| {
            let allowed = CpuSet::of(0).unwrap_or_default();
            let mut cpus = (0..1024).filter(|&cpu| allowed.contains(cpu));
            let (Some(first), Some(second)) = (cpus.next(), cpus.next()) else {
                return Self { cpus: 1, ..Self::default() };
            };
            Self {
                same_cpu_ns: wake_ns(first, first),
                other_cpu_ns: wake_ns(first, second),
                cpus: allowed.len(),
            }
        })
    }

    /// What [`FaultPath::Auto`] is with these.
    pub fn best(&self) -> FaultPath {
        match (self.same_cpu_ns, self.other_cpu_ns) {
            (Some(same), Some(other)) if other <= same => FaultPath::Thread,
            _ => FaultPath::SameCpu,
        }
    }
}

impl fmt::Display for WakeCosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.same_cpu_ns, self.other_cpu_ns) {
            (Some(same), Some(other)) => write!(
                f,
                "waking a thread takes {:.1} us on the same CPU, {:.1} us on another",
                same as f64 / 1000.0,
                other as f64 / 1000.0
            ),
            _ if self.cpus > 1 => f.write_str("what it takes to wake a thread could not be measured"),
            _ => f.write_str("there is one CPU to use"),
        }
    }
}

/// The time from waking a thread to its running, by a thread on CPU `from` of one on CPU `to`. Both are threads of their own: those
/// of the program stay where they are.
fn wake_ns(from: usize, to: usize) -> Option<u64> {
    let (ping, pong) = (Gate::new(), Gate::new());
    let (ping, pong) = (&ping, &pong);
    let measure = || {
        pin(from).ok()?;
        let start = Instant::now();
        let mut rounds = Vec::with_capacity(WAKES);
        let more = |rounds: usize| match rounds {
            0..WAKES_MIN => start.elapsed() < BUSY_MAX,
            _ => rounds < WAKES && start.elapsed() < MEASURE_MAX,
        };
        while more(rounds.len()) {
            let before = Instant::now();
            ping.open(0);
            if pong.wait() != 0 {
                return None;
            }
            rounds.push(before.elapsed().as_nanos() as u64);
        }
        typical(rounds)
    };
    without_signals(|| {
        std::thread::scope(|scope| {
            let answer = move || {
                let pinned = u32::from(pin(to).is_err());
                while ping.wait() == 0 {
                    pong.open(pinned);
                }
            };
            let answers = std::thread::Builder::new().spawn_scoped(scope, answer).ok()?;
            let measured = std::thread::Builder::new().spawn_scoped(scope, measure);
            let measured = measured.ok().and_then(|thread| thread.join().ok().flatten());
            ping.open(1);
            answers.join().ok()?;
            measured
        })
    })
}

/// One way of typical rounds, there and back: the lower quartile, as whoever else wants the CPU makes rounds longer, never shorter.
fn typical(mut rounds: Vec<u64>) -> Option<u64> {
    rounds.sort_unstable();
    (rounds.len() >= WAKES_MIN).then(|| rounds[rounds.len() / 4] / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers() {
        for (number, (path, name)) in ALL.into_iter().enumerate() {
            assert_eq!((name.parse(), path.to_string()), (Ok(path), name.to_owned()));
            assert_eq!((FaultPath::from_number(number as u32), path.number()), (Some(path), number as u32));
        }
        assert!("handler".parse::<FaultPath>().is_err() && FaultPath::from_number(5).is_none());
    }

    #[test]
    fn who_else_has_the_cpu_decides_nothing() {
        // Half of the rounds were interrupted; and what are too few rounds says nothing.
        let rounds = (0..WAKES as u64).map(|round| if round % 2 == 0 { 6000 } else { 400_000_000 });
        assert_eq!(typical(rounds.collect()), Some(3000));
        assert_eq!((typical(vec![400_000_000]), typical(Vec::new())), (None, None));
        let unknown = WakeCosts { cpus: 2, ..WakeCosts::default() };
        assert!(unknown.to_string().contains("could not be measured"), "{unknown}");
        assert_eq!(unknown.best(), FaultPath::SameCpu);
    }

    #[test]
    fn wake_ups_decide() {
        let costs = |same, other| WakeCosts { same_cpu_ns: Some(same), other_cpu_ns: Some(other), cpus: 2 };
        assert_eq!(costs(2000, 30_000).best(), FaultPath::SameCpu);
        assert_eq!(costs(2000, 1500).best(), FaultPath::Thread);
        assert_eq!(WakeCosts::default().best(), FaultPath::SameCpu);
        let before = CpuSet::of(0).unwrap();
        let measured = WakeCosts::of_this_machine();
        assert_eq!(CpuSet::of(0).unwrap(), before, "who measures stays where it was");
        assert!(measured.same_cpu_ns.is_none() || before.len() > 1, "{measured:?}");
        assert!(measured.same_cpu_ns.is_none_or(|ns| ns > 100), "{measured:?}");
        assert_eq!(FaultPath::Auto.resolved(), measured.best());
        assert_eq!(FaultPath::Spin.resolved(), FaultPath::Spin);
    }
}
