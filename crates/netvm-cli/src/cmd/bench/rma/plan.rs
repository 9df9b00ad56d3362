//! What `netvm bench rma` measures: cases, their floors, and where they run.

use clap::ValueEnum;
use netvm_sys::bench_floor::allowed_cpus;

use super::{Link, shm};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Placements {
    /// Each process on a CPU of its own
    TwoCpus,
    /// Both on one
    SameCpu,
    /// As the kernel likes
    Unpinned,
    /// All three
    All,
}

/// How whoever waits does so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Wait {
    /// Looks all the time
    Poll,
    /// Sleeps at once
    Block,
    /// Both, in one table
    Both,
}

#[derive(Clone, Copy, Debug)]
pub struct Placement {
    pub name: &'static str,
    pub here: Option<usize>,
    pub there: Option<usize>,
}

pub fn placements(wanted: Placements) -> Vec<Placement> {
    let cpus = allowed_cpus();
    let (first, second) = (cpus.first().copied(), cpus.get(1).copied());
    let is = |one| wanted == one || wanted == Placements::All;
    let mut all = Vec::new();
    if is(Placements::TwoCpus) && second.is_some() {
        all.push(Placement { name: "two-cpus", here: first, there: second });
    }
    if is(Placements::SameCpu) {
        all.push(Placement { name: "same-cpu", here: first, there: first });
    }
    if is(Placements::Unpinned) {
        all.push(Placement { name: "unpinned", here: None, there: None });
    }
    all
}

pub const PING_POLLING: &str = "ping-pong-poll";
pub const PING_BLOCKING: &str = "ping-pong-block";
/// While the other side's program computes.
pub const PING_PASSIVE: &str = "ping-pong-passive";
/// Eight bytes there, and so many back.
pub const ASK_POLLING: &str = "ask-poll";
pub const ASK_BLOCKING: &str = "ask-block";
pub const ASK_PASSIVE: &str = "ask-passive";
pub const STREAM: &str = "stream";
/// Bytes of all floors and cases that have no size of their own.
const WORD: usize = 8;
const SIZES: [usize; 9] = [8, 64, 512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20];
/// Of what is timed one by one.
const LATENCY_SIZES: [usize; 2] = [8, 4 << 10];
const LATENCY_SIZE_MAX: usize = 256 << 10;
/// What one side of the bare ping-pong over shared memory has room for.
const SHM_SIZE_MAX: usize = 64 << 10;

/// What is measured: a floor or a case of netvm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub name: &'static str,
    pub size: usize,
    /// Bytes off alignment.
    pub shift: usize,
    pub is_floor: bool,
}

impl Case {
    pub fn unit(&self) -> &'static str {
        match self.name {
            "put-bw" | "get-bw" | "put-bw-misaligned" | "get-bw-misaligned" | "copy-bw" | STREAM => "GB/s",
            "put-rate" | "channel-rate" | "shared-rate" => "M/s",
            _ => "us",
        }
    }

    /// Whether nobody looks: both sides sleep.
    pub fn sleeps(&self) -> bool {
        !self.is_floor && self.name.ends_with("-block") && self.name != "notify-block"
    }

    /// What it is made of, as name, size and how much of it: the sum is its floor.
    pub fn floor(&self, link: Link, placement: &str) -> Vec<(&'static str, usize, f64)> {
        if link == Link::Shm {
            return shm::floor_of(self).into_iter().collect();
        }
        if self.is_floor {
            return Vec::new();
        }
        // Who polls keeps the other one from running.
        let (ping, ask) = if placement == "same-cpu" || self.sleeps() {
            (PING_BLOCKING, ASK_BLOCKING)
        } else {
            (PING_POLLING, ASK_POLLING)
        };
        vec![match self.name.trim_end_matches("-block") {
            "put" => (ping, self.size, 0.5),
            "notify-spin" => (ping, WORD, 0.5),
            "notify" | "notify-handler" => (PING_BLOCKING, WORD, 0.5),
            "channel" => (ping, self.size, 0.5),
            "lock" | "sem" | "barrier" | "fetch-add" | "cas" => (ping, WORD, 1.0),
            "sem-count" => (ping, WORD, 2.0),
            "lock-take" | "sem-take" => ("fetch-add", WORD, 1.0),
            "lock-give" | "sem-give" => (ping, WORD, 0.5),
            "waitq" => (ping, WORD, 2.0),
            "put-complete-passive" | "get-passive" => (ASK_PASSIVE, self.size, 1.0),
            "fetch-add-passive" => (PING_PASSIVE, WORD, 1.0),
            "put-complete" | "get" => (ask, self.size, 1.0),
            // We ask the source's node, which writes to the target's.
            "copy" | "copy-through" => return vec![(ping, WORD, 1.0), (ask, self.size, 1.0)],
            _ => (STREAM, self.size, 1.0),
        }]
    }

    /// What it is measured beside.
    pub fn needs(&self, one: &Self, link: Link, placements: &[Placement]) -> bool {
        let parts = placements.iter().flat_map(|placement| self.floor(link, placement.name));
        parts.into_iter().any(|(name, size, _)| (name, size) == (one.name, one.size))
    }
}

/// All that there is over a link.
pub fn all_cases(link: Link, by_size: bool, quick: bool) -> Vec<Case> {
    let case = |name, size| Case { name, size, shift: 0, is_floor: false };
    let floor = |name, size| Case { is_floor: true, ..case(name, size) };
    let sizes: &[usize] = if quick { &[8, 64, 4 << 10, 64 << 10, 1 << 20] } else { &SIZES };
    let one_by_one: Vec<usize> = if by_size {
        sizes.iter().copied().filter(|size| *size <= LATENCY_SIZE_MAX).collect()
    } else {
        LATENCY_SIZES.to_vec()
    };
    let mut all = Vec::new();
    if link == Link::Shm {
        all = shm::floors();
        let more = one_by_one.iter().map(|&size| floor(PING_POLLING, size));
        let more: Vec<_> = more.filter(|one| one.size <= SHM_SIZE_MAX && !all.contains(one)).collect();
        all.extend(more);
    } else {
        for name in [PING_POLLING, PING_BLOCKING, ASK_POLLING, ASK_BLOCKING] {
            all.extend(one_by_one.iter().map(|&size| floor(name, size)));
        }
        all.extend(LATENCY_SIZES.map(|size| floor(ASK_PASSIVE, size)));
        all.push(floor(PING_PASSIVE, WORD));
    }
    all.extend(sizes.iter().map(|&size| floor(STREAM, size)));
    for name in ["put", "put-block", "put-complete", "put-complete-block", "get", "get-block"] {
        all.extend(one_by_one.iter().map(|&size| case(name, size)));
    }
    let words = ["fetch-add", "fetch-add-block", "cas", "cas-block"];
    let notifications = ["notify-spin", "notify-block", "notify-handler"];
    all.extend(words.into_iter().chain(notifications).map(|name| case(name, WORD)));
    all.extend(LATENCY_SIZES.map(|size| case("channel", size)));
    let turns =
        ["lock", "lock-take", "lock-give", "sem", "sem-take", "sem-give", "sem-count", "waitq", "barrier"];
    all.extend(turns.map(|name| case(name, WORD)));
    for name in ["put-complete-passive", "get-passive"] {
        all.extend(LATENCY_SIZES.map(|size| case(name, size)));
    }
    all.push(case("fetch-add-passive", WORD));
    for name in ["copy", "copy-through"] {
        all.extend(LATENCY_SIZES.map(|size| case(name, size)));
    }
    for name in ["put-rate", "channel-rate", "shared-rate"] {
        all.extend([case(name, 8), case(name, 64)]);
    }
    for name in ["put-bw", "get-bw"] {
        all.extend(sizes.iter().map(|&size| case(name, size)));
    }
    for name in ["put-bw-misaligned", "get-bw-misaligned"] {
        let odd = sizes.iter().filter(|size| (64..=1 << 20).contains(*size));
        all.extend(odd.map(|&size| Case { shift: 1, ..case(name, size) }));
    }
    all.extend(sizes.iter().filter(|size| **size >= 64 << 10).map(|&size| case("copy-bw", size)));
    all.retain(|case| link != Link::Shm || shm::has(case));
    all
}

/// Whether a case was asked for. By default everything but the cases that sleep and have others that do not.
pub fn is_wanted(case: &Case, part: Option<&str>, wait: Option<Wait>) -> bool {
    let waits = match wait {
        None => !case.sleeps() || part.is_some_and(|part| part.contains("block")),
        Some(Wait::Both) => true,
        Some(wait) => (wait == Wait::Block) == is_blocking(case.name),
    };
    waits && part.is_none_or(|part| case.name.contains(part))
}

fn is_blocking(name: &str) -> bool {
    name.ends_with("-block") || name.ends_with("-passive") || name == "notify-handler"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_its_floor_in_the_plan() {
        let anywhere = [
            Placement { name: "two-cpus", here: None, there: None },
            Placement { name: "same-cpu", here: None, there: None },
        ];
        for (by_size, quick) in [(false, false), (false, true), (true, false), (true, true)] {
            let all = all_cases(Link::Tcp, by_size, quick);
            for case in all.iter().filter(|case| !case.is_floor) {
                for placement in anywhere {
                    let parts = case.floor(Link::Tcp, placement.name);
                    assert!(!parts.is_empty(), "{case:?}");
                    for (name, size, share) in parts {
                        assert!(share > 0.0);
                        let known = all.iter().find(|one| (one.name, one.size) == (name, size));
                        let floor = known.unwrap_or_else(|| panic!("{case:?}: no {name} of {size}"));
                        assert!(case.needs(floor, Link::Tcp, &anywhere));
                        assert!(floor.unit() == case.unit() || case.unit() == "M/s", "{case:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_asked_for() {
        let names = |part: Option<&str>, wait: Option<Wait>| -> Vec<&str> {
            let all = all_cases(Link::Tcp, false, true);
            let mut names: Vec<_> = all
                .iter()
                .filter(|case| !case.is_floor && is_wanted(case, part, wait))
                .map(|case| case.name)
                .collect();
            names.dedup();
            names
        };
        assert_eq!(names(Some("get"), Some(Wait::Poll)), ["get", "get-bw", "get-bw-misaligned"]);
        assert_eq!(names(Some("get"), Some(Wait::Block)), ["get-block", "get-passive"]);
        assert_eq!(names(Some("get-block"), None), ["get-block"]);
        assert_eq!(names(Some("cas"), Some(Wait::Both)), ["cas", "cas-block"]);
        let usual = names(None, None);
        assert!(
            usual.contains(&"notify-block")
                && usual.contains(&"get-passive")
                && !usual.contains(&"get-block")
        );
    }
}
