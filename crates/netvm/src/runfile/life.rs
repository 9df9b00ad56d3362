//! The processes of a run: who they are, who of them lives, and what becomes of what the others held.

use super::*;
use netvm_sys::stat::{self, Numbers, Stat, pid_space, shows_this_space, start_time};

impl RunFile {
    /// A program of the run starts in this process: what the one before it held (before exec) is given back.
    pub fn begin(&self) {
        let pid = std::process::id();
        let stat = Stat::of(pid);
        self.retire_before_exec(pid, Identity::new(stat.as_ref()));
        if std::os::unix::process::parent_id() != self.supervisor() {
            return;
        }
        // Orphans have this parent, too, but the program is there before them.
        let program = self.word(PROGRAM).compare_exchange(0, pid.into(), AcqRel, Acquire);
        if program.is_ok() || program == Err(pid.into()) {
            let name = stat.map(|stat| stat.name).unwrap_or_default();
            for (index, word) in name_words(&name).into_iter().enumerate() {
                self.word(PROGRAM_NAME + index).store(word, Relaxed);
            }
            self.word(PROGRAM_ENDED).store(0, Release);
        }
    }

    /// A program that has begun in this process ends.
    pub fn end(&self) {
        if self.word(PROGRAM).load(Relaxed) == u64::from(std::process::id()) {
            self.word(PROGRAM_ENDED).store(1, Release);
        }
    }

    /// Whether the preloaded library was in process `pid`, which the supervisor has started, to its end, as far as can be known. `name` is what it
    /// was called when it ended by itself: a program that did not say that it ends may have become another, whose name is another.
    pub fn was_preloaded(&self, pid: u32, name: Option<&str>) -> bool {
        let word = |index| self.word(index).load(Acquire);
        let same_name = |name: &str| name_words(name) == [word(PROGRAM_NAME), word(PROGRAM_NAME + 1)];
        word(PROGRAM) == u64::from(pid) && (word(PROGRAM_ENDED) != 0 || name.is_none_or(same_name))
    }

    fn retire_before_exec(&self, pid: u32, now: Identity) {
        let same = |then: Identity| then.space == now.space && same(then.started, now.started);
        self.retire_if(|slot, then| slot == u64::from(pid) && same(then));
    }

    /// Enters a process. What the same pid left behind (before exec) is given back first.
    ///
    /// # Errors
    /// When 1024 processes use far memory at once.
    pub fn join(self: &Arc<Self>, pid: u32) -> Result<Slot> {
        let mut identity = Identity::new(Stat::of(pid).as_ref());
        self.retire_before_exec(pid, identity);
        // Looking at all processes takes longer.
        match self.budget_frames().saturating_sub(self.used()) < FLOOR_FRAMES {
            true => self.reap_all(),
            false => self.reap(),
        }
        if pid != std::process::id() {
            // It may be in the middle of exec.
            identity.image = 0;
        }
        for index in 0..SLOT_COUNT {
            let base = SLOTS + index * SLOT_WORDS;
            if self.word(base + SLOT_PID).compare_exchange(0, RETIRING, AcqRel, Relaxed).is_ok() {
                self.word(base + SLOT_SPACE).store(identity.space, Relaxed);
                self.word(base + SLOT_STARTED).store(identity.started, Relaxed);
                self.word(base + SLOT_IMAGE).store(identity.image, Relaxed);
                self.word(base + SLOT_PID).store(pid.into(), Release);
                self.word(PROCESSES).fetch_add(1, AcqRel);
                return Ok(Slot { run: Arc::clone(self), base });
            }
        }
        Err(Error::Other(format!("more than {SLOT_COUNT} processes of one run use far memory at once")))
    }

    /// Gives back what processes held that are known to be gone, or to have become other programs. Those of another name space of processes are for others
    /// to look at, who see them.
    pub fn reap(&self) {
        let Some(space) = pid_space().filter(|_| shows_this_space()) else { return };
        let is_gone = |pid, then| match Stat::of(pid) {
            Some(stat) => stat.has_ended() || !Identity::in_space(space, Some(&stat)).may_be(then),
            None => stat::is_gone(pid),
        };
        self.retire_if(|pid, then| then.space == space && is_gone(pid as u32, then));
    }

    /// The same, and what processes of other name spaces held, which nobody sees any more who is in them. Only in the supervisor's own: all
    /// processes of the run are seen from there, under other numbers.
    pub fn reap_all(&self) {
        self.reap();
        let space = self.word(SUPERVISOR_SPACE).load(Relaxed);
        if space == 0 || pid_space() != Some(space) {
            return;
        }
        let slots = self.each(|base| (base, self.identity(base))).into_iter();
        let elsewhere: Vec<_> = slots.filter(|(_, (_, then))| then.space != space).collect();
        if elsewhere.is_empty() {
            return;
        }
        // Afterwards, so that whoever has one of these slots and lives is among them.
        let Some(numbers) = stat::numbers() else { return };
        for (pid, (base, then)) in elsewhere {
            if !numbers.iter().any(|&numbers| numbers.own == pid && then.may_be_elsewhere(numbers, space)) {
                self.retire(base, pid.into(), then);
            }
        }
    }

    /// The processes that use far memory, of this process's name space.
    pub fn pids(&self) -> Vec<u32> {
        let space = pid_space().unwrap_or(0);
        let spaces = self.each(|base| self.identity(base).space);
        spaces.into_iter().filter(|&(_, other)| other == space).map(|(pid, _)| pid).collect()
    }

    /// Whether a child of this process has far memory, and lives.
    pub fn has_children(&self) -> bool {
        self.reap();
        let this = std::process::id();
        self.pids().into_iter().any(|pid| Stat::of_living(pid).is_some_and(|stat| stat.parent == this))
    }

    fn retire_if(&self, gone: impl Fn(u64, Identity) -> bool) {
        for index in 0..SLOT_COUNT {
            let base = SLOTS + index * SLOT_WORDS;
            let pid = self.word(base + SLOT_PID).load(Acquire);
            if pid == 0 || pid == RETIRING {
                continue;
            }
            let identity = self.identity(base);
            if gone(pid, identity) {
                self.retire(base, pid, identity);
            }
        }
    }

    pub(super) fn identity(&self, base: usize) -> Identity {
        let word = |index| self.word(base + index).load(Relaxed);
        Identity { space: word(SLOT_SPACE), started: word(SLOT_STARTED), image: word(SLOT_IMAGE) }
    }

    pub(super) fn retire(&self, base: usize, pid: u64, identity: Identity) {
        if self.word(base + SLOT_PID).compare_exchange(pid, RETIRING, AcqRel, Relaxed).is_err() {
            return;
        }
        if self.identity(base) != identity {
            // After exec the process has left and come back meanwhile.
            self.word(base + SLOT_PID).store(pid, Release);
            return;
        }
        for field in 0..PagerStats::FIELDS {
            let value = self.word(base + SLOT_STATS + field).swap(0, Relaxed);
            match PagerStats::NAMES[field] {
                name if PagerStats::is_gauge(name) => {}
                "read_us_peak" => drop(self.word(RETIRED + field).fetch_max(value, Relaxed)),
                _ => drop(self.word(RETIRED + field).fetch_add(value, Relaxed)),
            }
        }
        // Where its faults were means nothing without its addresses.
        for index in 0..PagerDetail::WORDS {
            let value = self.word(base + SLOT_DETAIL + index).swap(0, Relaxed);
            if index < PagerDetail::SUMS {
                self.word(RETIRED_DETAIL + index).fetch_add(value, Relaxed);
            }
        }
        let held = self.word(base + SLOT_HELD).swap(0, AcqRel);
        self.word(USED).fetch_sub(held, AcqRel);
        if self.word(base + SLOT_STARVING).swap(0, AcqRel) != 0 {
            self.word(STARVING).fetch_sub(1, AcqRel);
        }
        self.word(PROCESSES).fetch_sub(1, AcqRel);
        self.word(base + SLOT_PID).store(0, Release);
    }

    /// Notes that whoever has this slot is stuck, and who has the most, once.
    pub(super) fn note_stuck(&self, stuck: usize) {
        let held = |index: usize| {
            let base = SLOTS + index * SLOT_WORDS;
            let other = self.word(base + SLOT_PID).load(Acquire);
            let is_other = other != 0 && other != RETIRING && base != stuck;
            is_other.then(|| (self.word(base + SLOT_HELD).load(Relaxed), other, self.identity(base).space))
        };
        let Some((held, holder, space)) = (0..SLOT_COUNT).filter_map(held).max() else { return };
        if self.word(STUCK_BY).compare_exchange(0, holder, AcqRel, Relaxed).is_ok() {
            self.word(STUCK_BY_SPACE).store(space, Relaxed);
            self.word(STUCK_BY_HELD).store(held, Relaxed);
            self.word(STUCK_SPACE).store(self.identity(stuck).space, Relaxed);
            self.word(STUCK).store(self.word(stuck + SLOT_PID).load(Relaxed), Release);
        }
    }

    /// The first process that had nothing for long since none gave it anything, if any, and who held the most then, and how many frames.
    pub fn stuck(&self) -> Option<Stuck> {
        let word = |index: usize| self.word(index).load(Relaxed);
        let pid = self.word(STUCK).load(Acquire);
        let space = pid_space().unwrap_or(0);
        let known = |pid: u64, of: usize| (word(of) == space).then_some(pid as u32);
        (pid != 0).then(|| Stuck {
            pid: known(pid, STUCK_SPACE),
            holder: known(word(STUCK_BY), STUCK_BY_SPACE),
            frames: word(STUCK_BY_HELD),
        })
    }

    /// A process has no addresses left for so many bytes in one piece.
    pub fn note_no_room(&self, bytes: u64) {
        self.word(NO_ROOM).fetch_max(bytes, Relaxed);
    }

    /// The process that noted `bytes` goes on with less.
    pub fn note_made_do(&self, bytes: u64) {
        // Another one may have noted more.
        let _ = self.word(NO_ROOM).compare_exchange(bytes, 0, Relaxed, Relaxed);
    }

    /// The most bytes for which a process had no addresses, if any did not.
    pub fn no_room(&self) -> Option<u64> {
        Some(self.word(NO_ROOM).load(Relaxed)).filter(|&bytes| bytes > 0)
    }

    /// A program was told that there is no io_uring, or no asynchronous I/O.
    pub fn note_refused(&self) {
        self.word(REFUSED).store(1, Relaxed);
    }

    /// Whether one was.
    pub fn has_refused(&self) -> bool {
        self.word(REFUSED).load(Relaxed) != 0
    }

    /// Whether the process that made the run file lives.
    pub fn is_supervised(&self) -> bool {
        let pid = self.word(SUPERVISOR).load(Relaxed);
        start_time(pid as u32) == Some(self.word(SUPERVISOR_STARTED).load(Relaxed))
    }
}

/// A process that cannot go on as it should, and why. Those of another name space of processes have no number here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// It has had no local memory for long.
    pub pid: Option<u32>,
    /// Who has the most of it, and gives nothing back.
    pub holder: Option<u32>,
    /// How many frames.
    pub frames: u64,
}

/// Tells the program that a process runs from others that had its pid before, have it after exec, or elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Identity {
    /// Name space of processes.
    pub(super) space: u64,
    /// In clock ticks since boot. exec changes nothing about it. 0: not known, as when no descriptor was left.
    pub(super) started: u64,
    /// Of where the program's code and stack start, which are new with each exec, and stay the same until then. Not the file in /proc/PID/exe: that
    /// may be the same, and is often unreadable. 0: not known, as of processes of other users.
    pub(super) image: u64,
}

impl Identity {
    /// Of a process of this name space.
    pub(super) fn new(stat: Option<&Stat>) -> Self {
        Self::in_space(pid_space().unwrap_or(0), stat)
    }

    fn in_space(space: u64, stat: Option<&Stat>) -> Self {
        let Some(stat) = stat else { return Self { space, ..Self::default() } };
        let known = stat.start_code > 1 && stat.start_stack != 0;
        let image = if known { stat.start_code ^ stat.start_stack.rotate_left(32) } else { 0 };
        Self { space, started: stat.started, image }
    }

    /// Whether both may be the same program, as far as is known.
    fn may_be(self, other: Self) -> bool {
        self.space == other.space && same(self.started, other.started) && same(self.image, other.image)
    }

    /// Whether `numbers` may be this one of another name space, where time may be another, too. `here` is this name space.
    fn may_be_elsewhere(self, numbers: Numbers, here: u64) -> bool {
        match Stat::of(numbers.here) {
            Some(stat) if stat.has_ended() => false,
            Some(stat) => {
                let within = || stat::pid_space_of(numbers.here).unwrap_or(0);
                let space = if numbers.is_within { within() } else { here };
                same(self.space, space) && same(self.image, Self::in_space(space, Some(&stat)).image)
            }
            None => !stat::is_gone(numbers.here),
        }
    }
}

/// Whether two numbers, of which 0 is not known, may be the same.
fn same(one: u64, other: u64) -> bool {
    one == other || one == 0 || other == 0
}

/// The first 16 bytes of a name; the kernel keeps 15.
fn name_words(name: &str) -> [u64; 2] {
    let mut bytes = [0; 16];
    let length = name.len().min(16);
    bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
    [0, 8].map(|at| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index])))
}
