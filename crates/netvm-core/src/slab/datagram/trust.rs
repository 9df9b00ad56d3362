//! Whether datagrams are answered, and within what time: round trips as RFC 6298 has them (2.2, 2.3), for giving up, not for sending again.

/// Least, most and first time to wait for an answer.
const PATIENCE_NS: (u64, u64, u64) = (1_000_000, 100_000_000, 5_000_000);
/// More lost ones than this, in thousandths of the last few, are too many.
const LOST_MAX: u32 = 125;
/// In how many parts the last one counts as one.
const MEMORY: u32 = 16;
/// Pauses: the first and the longest.
const PAUSE_NS: (u64, u64) = (1_000_000_000, 64_000_000_000);
/// After so many answers in a row the next pause is the first again.
const WELL: u32 = 1024;
/// Answers that come sooner are worth a look at once: nobody was woken for them.
const QUICK_NS: u64 = 8_000;
/// So many reads answered by the process, within such a time, and none by the kernel: for now datagrams are no shorter way than the session.
const PROCESS_MAX: u32 = 1024;
const PROCESS_NS: u64 = 2_000_000_000;

#[derive(Debug)]
pub(super) struct Trust {
    /// Smoothed round trip and its deviation; 0: none yet.
    mean_ns: u64,
    deviation_ns: u64,
    /// Thousandths, times [`MEMORY`].
    lost: u32,
    pause_ns: u64,
    paused_until_ns: u64,
    well: u32,
    /// Reads that the lender's process has answered since one that its kernel has, and when the first of them was.
    by_process: u32,
    by_process_since_ns: u64,
    ended: bool,
    /// While nothing has been answered yet.
    patience_ns: u64,
}

impl Trust {
    pub(super) fn new() -> Self {
        Self {
            mean_ns: 0,
            deviation_ns: 0,
            lost: 0,
            pause_ns: PAUSE_NS.0,
            paused_until_ns: 0,
            well: 0,
            by_process: 0,
            by_process_since_ns: 0,
            ended: false,
            patience_ns: PATIENCE_NS.2,
        }
    }

    pub(super) fn is_on(&self, now_ns: u64) -> bool {
        !self.ended && now_ns >= self.paused_until_ns
    }

    /// The same; what time it is is only asked if that matters.
    pub(super) fn is_on_at(&self, now_ns: impl FnOnce() -> u64) -> bool {
        !self.ended && (self.paused_until_ns == 0 || now_ns() >= self.paused_until_ns)
    }

    pub(super) fn patience_ns(&self) -> u64 {
        match self.mean_ns {
            0 => self.patience_ns,
            mean => (mean + 4 * self.deviation_ns).clamp(PATIENCE_NS.0, PATIENCE_NS.1),
        }
    }

    /// How long an answer takes; 0: none has come yet.
    pub(super) fn mean_ns(&self) -> u64 {
        self.mean_ns
    }

    pub(super) fn is_quick(&self) -> bool {
        self.mean_ns < QUICK_NS
    }

    pub(super) fn answered(&mut self, ns: u64) {
        let ns = ns.max(1);
        if self.mean_ns == 0 {
            (self.mean_ns, self.deviation_ns) = (ns, ns / 2);
        } else {
            self.deviation_ns = (3 * self.deviation_ns + self.mean_ns.abs_diff(ns)) / 4;
            self.mean_ns = ((7 * self.mean_ns + ns) / 8).max(1);
        }
        self.lost -= self.lost / MEMORY;
        self.well = self.well.saturating_add(1);
        if self.well >= WELL {
            self.pause_ns = PAUSE_NS.0;
        }
    }

    /// An answer has not come in time. Perhaps it does later.
    pub(super) fn late(&mut self) {
        self.patience_ns = (2 * self.patience_ns).min(PATIENCE_NS.1);
    }

    /// Who has answered a read.
    pub(super) fn heard(&mut self, now_ns: u64, by_kernel: bool) {
        if by_kernel {
            self.by_process = 0;
            return;
        }
        if self.by_process == 0 {
            self.by_process_since_ns = now_ns;
        }
        self.by_process += 1;
        let is_long = now_ns.saturating_sub(self.by_process_since_ns) >= PROCESS_NS;
        if is_long && self.by_process >= PROCESS_MAX {
            self.by_process = 0;
            self.pause(now_ns);
        }
    }

    /// What was asked then is lost.
    pub(super) fn lost(&mut self, now_ns: u64, asked_ns: u64) {
        // Known already, if it was asked before the last pause.
        if asked_ns < self.paused_until_ns {
            return;
        }
        self.lost = self.lost - self.lost / MEMORY + 1000;
        self.well = 0;
        if self.lost / MEMORY > LOST_MAX {
            self.pause(now_ns);
        }
    }

    /// What was asked then has come, and is wrong.
    pub(super) fn wrong(&mut self, now_ns: u64, asked_ns: u64) {
        if asked_ns >= self.paused_until_ns {
            self.pause(now_ns);
        }
    }

    /// Nothing for a while.
    pub(super) fn pause(&mut self, now_ns: u64) {
        self.paused_until_ns = now_ns.saturating_add(self.pause_ns);
        self.pause_ns = (2 * self.pause_ns).min(PAUSE_NS.1);
        (self.lost, self.well) = (0, 0);
    }

    /// Nothing any more.
    pub(super) fn end(&mut self) {
        self.ended = true;
    }
}
