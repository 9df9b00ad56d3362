//! What /proc tells of processes.

use crate::signal;
use std::fs;
use std::io::{self, ErrorKind};

/// A process, as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// What it is called, in 15 bytes; a zombie too.
    pub name: String,
    /// Who has started it, or has it since.
    pub parent: u32,
    /// When it started, in clock ticks since boot: tells it from a later one with the same pid. exec changes nothing about it.
    pub started: u64,
    /// Where its code and its stack start, which are new with each exec; 1 and 0 of processes of other users.
    pub start_code: u64,
    /// See above.
    pub start_stack: u64,
    /// Where its environment starts and ends.
    pub environment: (u64, u64),
    has_ended: bool,
}

impl Stat {
    /// Also of one that has ended and that nobody has waited for; `None` when there is none, or it cannot be read: see [`is_gone`].
    pub fn of(pid: u32) -> Option<Self> {
        // /proc may be that of another name space, with other numbers.
        let path = if pid == std::process::id() {
            "/proc/self/stat".to_owned()
        } else {
            format!("/proc/{pid}/stat")
        };
        Self::parse(&String::from_utf8_lossy(&fs::read(path).ok()?))
    }

    fn parse(stat: &str) -> Option<Self> {
        // The name may contain anything; fields are counted from the last parenthesis. proc(5) has the state as the third.
        let (before, rest) = stat.rsplit_once(')')?;
        let (_, name) = before.split_once('(')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        // A process whose first thread has ended looks like a zombie; its other threads go on.
        let has_ended = fields.first() == Some(&"X") || (fields.first() == Some(&"Z") && number(20)? <= 1);
        Some(Self {
            name: name.to_owned(),
            parent: u32::try_from(number(4)?).ok()?,
            started: number(22)?,
            start_code: number(26)?,
            start_stack: number(28)?,
            environment: (number(50).unwrap_or(0), number(51).unwrap_or(0)),
            has_ended,
        })
    }

    /// The same; `None` when it has ended, too.
    pub fn of_living(pid: u32) -> Option<Self> {
        Self::of(pid).filter(|stat| !stat.has_ended)
    }

    /// Whether it has ended, and nobody has waited for it.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }
}

/// Whether there is no such process, as far as can be known: /proc may hide those of other users (hidepid), whom kill(2) knows all the same.
/// It needs no descriptor.
pub fn is_gone(pid: u32) -> bool {
    let shown = fs::symlink_metadata(format!("/proc/{pid}"));
    shown.is_err_and(|error| error.kind() == ErrorKind::NotFound) && !signal::exists(pid)
}

/// When a process started; `None` when it has ended.
pub fn start_time(pid: u32) -> Option<u64> {
    Some(Stat::of_living(pid)?.started)
}

/// The numbers of all processes.
pub fn pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The number of this process's name space of processes: in another one others have the same pids. `None` without /proc.
pub fn pid_space() -> Option<u64> {
    space_at("/proc/self/ns/pid")
}

/// The same of another process; `None` also when we may not know.
pub fn pid_space_of(pid: u32) -> Option<u64> {
    space_at(&format!("/proc/{pid}/ns/pid"))
}

fn space_at(path: &str) -> Option<u64> {
    fs::read_link(path).ok()?.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

/// How a process is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// In this name space of processes.
    pub here: u32,
    /// In its own.
    pub own: u32,
    /// Whether that is another one, within this.
    pub is_within: bool,
}

impl Numbers {
    fn parse(here: u32, status: &str) -> Option<Self> {
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        let mut numbers = numbers.split_ascii_whitespace();
        let own = numbers.next_back()?.parse().ok()?;
        Some(Self { here, own, is_within: numbers.next().is_some() })
    }
}

/// All processes of this name space, and of those within. `None` when some may be hidden, or cannot be read.
pub fn numbers() -> Option<Vec<Numbers>> {
    // The first one is always there: where it is hidden, as from other users, so are others.
    if !shows_this_space() || fs::symlink_metadata("/proc/1").is_err() {
        return None;
    }
    let mut numbers = Vec::new();
    for entry in fs::read_dir("/proc").ok()? {
        let Some(pid) = entry.ok()?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        match fs::read(format!("/proc/{pid}/status")) {
            Ok(status) => numbers.push(Numbers::parse(pid, &String::from_utf8_lossy(&status))?),
            Err(error) if has_gone(&error) => {}
            Err(_) => return None,
        }
    }
    Some(numbers)
}

/// It has ended since its entry was seen.
fn has_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Whether the pids in /proc, as it is mounted here, are those of this process's name space.
pub fn shows_this_space() -> bool {
    let me = fs::read_link("/proc/self").ok();
    me.is_some_and(|me| me.to_str().and_then(|me| me.parse().ok()) == Some(std::process::id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_told_from_others_and_may_be_called_anything() {
        let me = Stat::of(std::process::id()).unwrap();
        assert_eq!(me.parent, std::os::unix::process::parent_id());
        assert_eq!(start_time(std::process::id()), Some(me.started));
        assert!(me.start_code > 1 && me.start_stack > 0 && me.environment.0 < me.environment.1, "{me:?}");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        while Stat::of_living(pid).is_some() {
            std::thread::yield_now();
        }
        let ended = Stat::of(pid).unwrap();
        assert_eq!(ended.parent, std::process::id(), "nobody has waited for it");
        assert!(ended.has_ended() && !me.has_ended() && !is_gone(pid));
        child.wait().unwrap();
        assert_eq!(Stat::of(pid), None);
        assert!(is_gone(pid) && is_gone(u32::MAX) && !is_gone(1) && !is_gone(std::process::id()));
        assert!(pids().any(|pid| pid == std::process::id()) && !pids().any(|other| other == pid));
        let numbers: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        let odd = Stat::parse(&format!("7 (a) (b) Z) Z {}\n", numbers.join(" "))).unwrap();
        assert_eq!((odd.name.as_str(), odd.parent, odd.started), ("a) (b) Z", 4, 22));
        assert_eq!((odd.start_code, odd.start_stack, odd.environment), (26, 28, (50, 51)));
        for broken in ["", "7 (", "7 (a)", "7 (a) R 1 2", "7 a) R"] {
            assert_eq!(Stat::parse(broken), None, "{broken}");
        }
        assert!(pid_space().is_some_and(|space| space > 0) && shows_this_space());
        let own = std::process::id();
        assert_eq!((pid_space_of(own), pid_space_of(u32::MAX)), (pid_space(), None));
        let mine = Numbers { here: own, own, is_within: false };
        let all = super::numbers();
        assert!(all.is_none_or(|all| all.contains(&mine) && all.iter().all(|numbers| numbers.here != pid)));
        let inner = Numbers { here: 700, own: 2, is_within: true };
        assert_eq!(Numbers::parse(700, "Name:\ta\nNSpid:\t700\t31\t2\nNSpgid:\t4\n"), Some(inner));
        assert_eq!(Numbers::parse(own, &format!("NSpid:\t{own}\n")), Some(mine));
        assert_eq!((Numbers::parse(7, "NSpid:\n"), Numbers::parse(7, "Pid:\t7\n")), (None, None));
    }
}
