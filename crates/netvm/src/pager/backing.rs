//! Where evicted pages live: slabs of the lenders. docs/design/replicas.md has what happens when one is lost, docs/design/erasure.md
//! how pages are kept in parts.

mod borrowing;
mod forks;
mod in_parts;
mod mending;
mod promised;
mod source;

use super::PagerConfig;
use super::erasure::Erasure;
use super::error::{PagerError, system};
use super::seals::Seals;
use super::side::Sides;
use crate::detail::PagerDetail;
use crate::error::{Error, Result, Scope};
use crate::lender::{BorrowOptions, Borrower, Class, Completion, HEARD, PostError};
use crate::runfile::RunFile;
use crate::stats::PagerStats;
use in_parts::InParts;
use mending::{MEND_STEP, Mending};
use netvm_core::residency::{COPIES_MAX, Redundancy, SlabCopy, Slot, SlotMap};
use netvm_sys::shared::SharedSlice;
use netvm_sys::uffd::PAGE_BYTES;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use promised::{PROMISED, Promised};
pub(super) use source::{HowRead, Source};

/// Frozen slabs are asked about one at a time, and not more often than this allows.
const THAW_INTERVAL: Duration = Duration::from_millis(200);
/// For how long at a time, while they turn out to be nobody else's.
const THAW_TIME: Duration = Duration::from_millis(1);
/// How often lenders that were full are asked again while pages lack copies.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
/// How often it is looked which slabs suit which lenders, where they cost differently, as long as looking takes one part of the time in so many at most,
const WEIGH_INTERVAL: Duration = Duration::from_millis(10);
const WEIGH_PART: u32 = 32;
/// and how often all cool.
const COOL_INTERVAL: Duration = Duration::from_millis(500);
/// They are in sets of bits.
const LENDERS_MAX: usize = 64;
/// How often late answers are looked for.
/// Between tries of a process that starts while no lender of its run is there.
const AWAY_INTERVAL: Duration = Duration::from_millis(100);
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// How long a read is waited for without any other reason to wake up.
const READ_PATIENCE: Duration = Duration::from_millis(2);
const WRITE_PATIENCE: Duration = Duration::from_millis(50);

/// An operation of the engine.
#[derive(Clone, Copy, Debug)]
struct Op {
    slot: Slot,
    local: SharedSlice,
    /// Writes: how many copies have not taken it yet. Reads: 1, or how many parts are on their way.
    left: u8,
    write: bool,
    /// Reads: its pages were asked of another lender meanwhile, and that counts.
    hedged: bool,
    /// Reads: which lender was asked.
    lender: u32,
    /// Reads: when.
    asked: Option<Instant>,
    /// Reads: it came by datagrams.
    unsure: bool,
    /// Reads: not by datagrams.
    by_session: bool,
}

impl Op {
    const fn new(slot: Slot, local: SharedSlice) -> Self {
        Self {
            slot,
            local,
            left: 0,
            write: false,
            hedged: false,
            lender: 0,
            asked: None,
            unsure: false,
            by_session: false,
        }
    }
}

/// Where pages came from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    pub(super) lender: u32,
    /// By datagrams, which anybody may have sent.
    pub(super) unsure: bool,
}

/// Connections to the lenders and the slots borrowed from them.
pub(super) struct Backing {
    /// What it counts, and whoever it works for.
    pub(super) detail: Box<PagerDetail>,
    sides: Sides,
    pub(super) slots: SlotMap,
    /// What the slots must hold.
    pub(super) seals: Seals,
    replicas: usize,
    /// Lenders have only parts of pages.
    parts: Option<Box<InParts>>,
    /// By the engine's number.
    ops: Vec<Op>,
    /// Reads that nothing else is done about.
    reads: usize,
    /// What has ended while a connection had no room.
    inbox: Vec<(u32, Completion)>,
    scratch: Vec<Completion>,
    /// Transfers that have ended without an answer.
    ended: Vec<u32>,
    mending: Mending,
    /// Slots that have been taken for what is to be written after a fork.
    pub(super) promised: Promised,
    paused: bool,
    fixed_order: bool,
    timeout: Duration,
    next_thaw: Instant,
    next_ask: Instant,
    next_weigh: Instant,
    next_cool: Instant,
    next_look: Instant,
    next_late: Instant,
    poor_since: Option<Instant>,
    /// Since when pages must leave and no lender is there, and when they did last.
    needed: Option<(Instant, Instant)>,
    ever_lost: u64,
    ever_left: u64,
    stats: PagerStats,
}

impl Backing {
    pub(super) fn connect(
        config: &PagerConfig,
        options: BorrowOptions,
        run: Option<&RunFile>,
        seal: impl FnOnce(u32) -> Result<Seals>,
    ) -> Result<Self> {
        let (hook, timeout, erasure) = (config.thread_hook, config.lender_timeout, config.erasure);
        let addresses = &config.lenders[..];
        if addresses.is_empty() {
            return Err(PagerError::NoLender.into());
        }
        let redundancy = check(addresses, config.replicas, erasure)?;
        let replicas = redundancy.total();
        // A process of a run that has lost a lender, or left it, does without, too; and without one that is about to leave.
        let began = Instant::now();
        let (sides, left) = loop {
            let (known, mut left) = (run.filter(|_| replicas > 1).map(RunFile::lost), run.map(RunFile::left));
            let sides =
                Sides::connect(addresses, options.clone(), hook, replicas, timeout, known, left.as_mut());
            // Others of the run go on without: so it may be back soon.
            let is_away = match &sides {
                Ok(sides) => sides.borrowers().next().is_none(),
                Err(error) => error.scope() == Scope::Link,
            };
            let waits = is_away && run.is_some_and(|run| run.lost() != 0) && began.elapsed() < timeout;
            match sides {
                Ok(sides) if !waits => break (sides, left.unwrap_or(0)),
                Err(error) if !waits => return Err(error),
                _ => std::thread::sleep(AWAY_INTERVAL),
            }
        };
        if let Some(same) = Borrower::two_at_one(sides.borrowers()).filter(|_| replicas > 1) {
            return Err(PagerError::SameLender(same.map(|borrower| borrower.lender().to_owned())).into());
        }
        let Some(smallest) = sides.borrowers().min_by_key(|borrower| borrower.slab_bytes()) else {
            return Err(PagerError::CopiesLost { pages: 0, why: sides.losses() }.into());
        };
        let (bytes, lender) = (smallest.slab_bytes(), smallest.lender().to_owned());
        let part_bytes = erasure.map_or(PAGE_BYTES, Erasure::part_bytes);
        let slots_per_slab = (bytes / part_bytes as u64 / 64 * 64) as u32;
        if slots_per_slab == 0 {
            return Err(PagerError::SlabTooSmall { lender, bytes }.into());
        }
        let now = Instant::now();
        let mut slots = SlotMap::new(slots_per_slab, addresses.len(), redundancy);
        let (mut stats, mut ever_lost) = (PagerStats::default(), 0);
        for lender in (0..sides.len()).filter(|&lender| sides[lender].lost.is_some()) {
            slots.lender_lost(lender);
            if left >> lender.min(63) & 1 == 0 {
                ever_lost |= 1 << lender.min(63);
                stats.lenders_lost += 1;
            }
        }
        for lender in 0..sides.len() {
            if let Some(borrower) = &sides[lender].borrower {
                let class = if config.fixed_order { lender as u8 } else { borrower.class() as u8 };
                slots.set_class(lender, class);
                if let Some(run) = run {
                    run.set_class(lender, borrower.class());
                }
            }
        }
        Ok(Self {
            detail: Box::default(),
            slots,
            seals: seal(slots_per_slab)?,
            sides,
            replicas,
            parts: erasure.map(|erasure| Box::new(InParts::new(erasure))),
            ops: Vec::with_capacity(1024),
            reads: 0,
            inbox: Vec::with_capacity(64),
            scratch: Vec::with_capacity(1024),
            ended: Vec::with_capacity(64),
            mending: Mending::new(erasure)?,
            promised: Promised::default(),
            paused: false,
            fixed_order: config.fixed_order,
            timeout,
            next_thaw: now,
            next_ask: now,
            next_weigh: now,
            next_cool: now,
            next_look: now,
            next_late: now,
            poor_since: None,
            needed: None,
            ever_lost,
            ever_left: 0,
            stats,
        })
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.sides.borrowers().flat_map(Borrower::descriptors).map(|fd| fd.as_raw_fd())
    }

    /// Whether the memory of some lender is shared: what is posted there is done at once.
    pub(super) fn is_nearby(&self) -> bool {
        self.sides.borrowers().any(Borrower::is_nearby)
    }

    /// Whether a lender's kernel may answer reads.
    pub(super) fn asks(&self) -> bool {
        self.sides.borrowers().any(Borrower::asks)
    }

    /// Whether something has ended without anything having arrived.
    pub(super) fn has_ended(&self) -> bool {
        !self.inbox.is_empty() || !self.ended.is_empty() || self.sides.borrowers().any(Borrower::has_ended)
    }

    /// Operations on their way.
    pub(super) fn pending(&self) -> usize {
        let ended = self.inbox.len() + self.ended.len();
        self.sides.borrowers().map(Borrower::pending).sum::<usize>() + ended
    }

    /// Reads that have not been answered, nor asked of another lender.
    pub(super) fn reads(&self) -> usize {
        self.reads
    }

    /// Lenders hear at once that nobody borrows any more, whoever has copies of the descriptors: children of forks may.
    pub(super) fn hang_up(&self) {
        for borrower in self.sides.borrowers() {
            // Links that are no sockets end with their owner.
            let _ = rustix::net::shutdown(borrower.as_fd(), rustix::net::Shutdown::Both);
        }
    }

    /// What to wait for.
    pub(super) fn poll_fds(&self, fds: &mut Vec<libc::pollfd>) {
        fds.extend(self.sides.borrowers().map(|borrower| libc::pollfd {
            fd: borrower.as_fd().as_raw_fd(),
            events: libc::POLLIN | if borrower.wants_write() { libc::POLLOUT } else { 0 },
            revents: 0,
        }));
        let awaited = self.sides.borrowers().filter_map(Borrower::awaited_datagrams);
        fds.extend(awaited.map(|(fd, _)| libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        }));
    }

    /// For how long to wait for an answer before [`Backing::check_answers`].
    pub(super) fn patience(&self) -> Duration {
        let awaited = self.sides.borrowers().filter_map(Borrower::awaited_datagrams);
        awaited.map(|(_, patience)| patience).fold(self.patience_with_sessions(), Duration::min)
    }

    fn patience_with_sessions(&self) -> Duration {
        if self.replicas == 1 {
            (self.timeout / 8).min(HEARD)
        } else if self.reads > 0 {
            READ_PATIENCE
        } else {
            WRITE_PATIENCE
        }
    }

    /// Takes a run of free slots, borrowing another slab if need be.
    pub(super) fn take_slots(&mut self, want: u32) -> Result<(Slot, u32)> {
        loop {
            if let Some(run) = self.slots.take_run(want) {
                return Ok(run);
            }
            self.borrow_slab()?;
        }
    }

    /// Whether the page of this slot, which came so many evictions after it left, had better be at a lender that costs less.
    pub(super) fn promotes(&mut self, slot: Slot, age: u32) -> bool {
        !self.fixed_order && self.sides.len() > 1 && self.slots.promote(slot, age)
    }

    /// Lets go of a slot; an empty slab goes back to its lender, but one is kept for the next eviction.
    pub(super) fn release_slot(&mut self, slot: Slot) -> Result<()> {
        if slot == 0 {
            return Ok(());
        }
        if let Some(slab) = self.slots.release(slot)
            && (self.slots.slabs() > 1 || !self.slots.is_writable(slot) || self.slots.is_recalled())
            && self.slots.remove(slab)
        {
            self.post_returns();
        }
        Ok(())
    }

    fn note(&mut self, token: u32, op: Op) {
        let index = token as usize;
        if index >= self.ops.len() {
            self.ops.resize(index + 1, op);
        }
        self.ops[index] = op;
    }

    /// Reads neighbouring slots from `slot` on into `local`, not by datagrams if `by_session`.
    pub(super) fn read(
        &mut self,
        token: u32,
        slot: Slot,
        local: SharedSlice,
        by_session: bool,
    ) -> Result<()> {
        let asked = Some(Instant::now());
        self.note(token, Op { left: 1, asked, by_session, ..Op::new(slot, local) });
        self.reads += 1;
        if self.parts.is_some() { self.read_parts(token) } else { self.post_read(token) }
    }

    fn post_read(&mut self, token: u32) -> Result<()> {
        loop {
            let Op { slot, local, by_session, .. } = self.ops[token as usize];
            let located = self.slots.locate(slot);
            let chosen = located.and_then(|(copies, page)| Some((self.sides.choose(copies)?, page)));
            let Some((SlabCopy { lender, slab, .. }, page)) = chosen else {
                // The slab was given back: nobody waits for it.
                self.ops[token as usize].left = 0;
                self.reads -= 1;
                self.ended.push(token);
                return Ok(());
            };
            self.ops[token as usize].lender = lender;
            let offset = u64::from(page) * PAGE_BYTES as u64;
            let posted = match &mut self.sides[lender].borrower {
                Some(borrower) if by_session => borrower.post_sure_read(token.into(), slab, offset, &[local]),
                Some(borrower) => borrower.post_read(token.into(), slab, offset, local),
                None => Err(PostError::Closed),
            };
            match posted {
                Ok(()) => {
                    self.slots.heat(slot, 1);
                    self.detail.moved(lender, local.len() as u64, 0);
                    return Ok(());
                }
                Err(error) => self.make_room(lender, error)?,
            }
        }
    }

    /// Writes `local` to neighbouring slots from `slot` on, in all their copies or parts. Returns how many bytes that are.
    pub(super) fn write(&mut self, token: u32, slot: Slot, local: SharedSlice) -> Result<u64> {
        let mut op = Op { write: true, ..Op::new(slot, local) };
        let Some((copies, page)) = self.slots.write(slot, (local.len() / PAGE_BYTES) as u32) else {
            return Err(system("write to a slab", std::io::ErrorKind::InvalidInput.into()));
        };
        let part_bytes = self.part_bytes();
        let (offset, bytes) = (u64::from(page) * part_bytes, (local.len() / PAGE_BYTES) as u64 * part_bytes);
        self.encode_parts(token, local)?;
        for &copy in copies.as_slice() {
            let lender = copy.lender;
            while self.sides.live(lender).is_some() {
                match self.post_write(token, copy, offset, local) {
                    Ok(()) => {
                        op.left += 1;
                        self.detail.moved(lender, 0, bytes);
                        break;
                    }
                    Err(error) => self.make_room(lender, error)?,
                }
            }
        }
        self.note(token, op);
        if op.left == 0 {
            self.ended.push(token);
        }
        Ok(u64::from(op.left) * bytes)
    }

    /// Bytes of a page that one lender has.
    fn part_bytes(&self) -> u64 {
        self.parts.as_ref().map_or(PAGE_BYTES, |parts| parts.bytes()) as u64
    }

    /// The queue of a connection is full: wait until it is not. The others are listened to, or nobody could tell that this one is silent.
    /// Completions are kept for the next [`Backing::poll`].
    fn make_room(&mut self, lender: u32, error: PostError) -> Result<()> {
        if error == PostError::TooLong {
            let lender = &self.sides[lender].address;
            return Err(Error::Other(format!("a transfer for lender {lender}: {error}")));
        }
        if !self.gather(None)? {
            self.wait_for_lenders()?;
        }
        self.check_answers()
    }

    /// Sends and receives what can be; the engine's transfers that have ended are appended to `out`.
    pub(super) fn poll(&mut self, out: &mut Vec<u32>) -> Result<()> {
        while let Some((lender, completion)) = self.inbox.pop() {
            self.ended(lender, completion, out)?;
        }
        for lender in 0..self.sides.len() {
            let Some(borrower) = &mut self.sides[lender].borrower else { continue };
            let mut done = std::mem::take(&mut self.scratch);
            if let Err(error) = borrower.poll(&mut done) {
                self.lose(lender, error)?;
            }
            for completion in done.drain(..) {
                self.ended(lender, completion, out)?;
            }
            self.scratch = done;
            self.hear(lender)?;
        }
        out.append(&mut self.ended);
        if self.replicas > 1 || self.is_poor() {
            self.look()?;
        }
        self.mend();
        Ok(())
    }

    fn ended(&mut self, lender: u32, completion: Completion, out: &mut Vec<u32>) -> Result<()> {
        let Completion { token, result, slab, unsure } = completion;
        let failed = result.is_err();
        if let Err(error) = result {
            // The connection is fine, but the lender refuses what it has lent.
            if error.scope() == Scope::Op || self.replicas == 1 {
                self.lose(lender, error)?;
            }
        }
        if token >= PROMISED {
            return self.promised_ended(token, failed);
        }
        if token >= MEND_STEP {
            return self.mend_ended(lender, token, failed, slab);
        }
        let (token, part) = (token as u32, (token >> 32) as u8);
        let Some(op) = self.ops.get_mut(token as usize) else {
            return Err(system("match a completion", std::io::ErrorKind::InvalidData.into()));
        };
        if self.parts.is_some() {
            return self.part_ended(lender, token, part, failed, out);
        }
        if failed && !op.write && !op.hedged {
            return self.post_read(token);
        }
        op.left -= 1;
        op.unsure = unsure;
        self.reads -= usize::from(!op.write && !op.hedged);
        if op.left == 0 {
            out.push(token);
            if let (Some(asked), false) = (op.asked, failed) {
                let (waited, bytes) = (asked.elapsed(), op.local.len());
                self.detail.waited(lender, waited.as_nanos() as u64);
                self.note_wait(waited);
                self.sides[lender].answered(waited, bytes);
            }
        }
        Ok(())
    }

    /// Sends what is queued.
    pub(super) fn push(&mut self) -> Result<()> {
        for lender in 0..self.sides.len() {
            if let Some(borrower) = self.sides.live(lender)
                && borrower.wants_write()
                && let Err(error) = borrower.push()
            {
                self.lose(lender, error)?;
            }
        }
        Ok(())
    }

    /// A lender is lost: an error when pages are lost with it.
    pub(super) fn lose(&mut self, lender: u32, error: Error) -> Result<()> {
        if self.sides[lender].lost.is_some() {
            return Ok(());
        }
        self.end_promises()?;
        // One that has nothing can be done without, until somebody is needed.
        if self.replicas == 1 && self.slots.has_pages(lender) {
            return Err(error);
        }
        if !self.sides.lose(lender, error) {
            return Ok(());
        }
        self.stats.lenders_lost += 1;
        self.ever_lost |= 1 << lender.min(63);
        let loss = self.slots.lender_lost(lender);
        let (pages, need) = (loss.gone, self.slots.redundancy().need());
        if pages > 0 {
            let why = self.sides.losses();
            return Err(match need {
                1 => PagerError::CopiesLost { pages, why },
                _ => PagerError::PartsLost { pages, need, why },
            }
            .into());
        }
        self.poor_since.get_or_insert_with(Instant::now);
        Ok(())
    }

    fn note_wait(&mut self, waited: Duration) {
        self.stats.read_us_peak = self.stats.read_us_peak.max(waited.as_micros() as u64);
    }

    /// Which lender a read was asked of, and how it came.
    pub(super) fn came_from(&self, token: u32) -> Origin {
        let Op { lender, unsure, .. } = self.ops[token as usize];
        Origin { lender, unsure }
    }

    /// A page has come by datagrams that differs from what was written: anybody may have sent it. It is to be read again, over the session.
    pub(super) fn doubt(&mut self, lender: u32) {
        self.stats.wrong_datagrams += 1;
        if let Some(borrower) = self.sides.live(lender) {
            borrower.distrust_datagrams();
        }
    }

    /// Why the connection to a lender has ended that seems to have returned something wrong. Memory that was taken back reads as zeros on
    /// this host: then nobody returned anything wrong.
    fn has_gone(&mut self, lender: u32) -> Option<Error> {
        let mut done = Vec::new();
        let ended = self.sides.live(lender).map(|borrower| borrower.poll_all(&mut done));
        self.inbox.extend(done.into_iter().map(|completion| (lender, completion)));
        ended.and_then(Result::err)
    }

    /// A lender returned a page of `slot` that differs from what was written. The page is to be read again, from another; an error
    /// when there is no other.
    pub(super) fn distrust(&mut self, lender: u32, slot: Slot) -> Result<()> {
        if self.parts.is_some() {
            return self.suspect(slot);
        }
        if let Some(gone) = self.has_gone(lender) {
            return self.lose(lender, gone);
        }
        let side = &mut self.sides[lender];
        let error = PagerError::PageCorrupt { lender: side.address.clone() };
        side.distrusted = true;
        self.stats.wrong_pages += 1;
        let elsewhere = self
            .slots
            .locate(slot)
            .is_some_and(|(copies, _)| copies.iter().any(|copy| copy.lender != lender));
        if elsewhere { self.lose(lender, error.into()) } else { Err(error.into()) }
    }

    /// A read that takes far longer than usual, while another lender has what it reads.
    pub(super) fn overdue(&mut self) -> Option<u32> {
        if self.replicas == 1 {
            return None;
        }
        let now = Instant::now();
        if now < self.next_late {
            return None;
        }
        if self.parts.is_some() {
            return self.overdue_parts(now);
        }
        let late = |op: &Op| {
            op.left > 0
                && !op.write
                && !op.hedged
                && op.asked.is_some_and(|asked| now - asked > self.sides[op.lender].limit(op.local.len()))
                && self
                    .slots
                    .locate(op.slot)
                    .is_some_and(|(copies, _)| copies.iter().any(|copy| copy.lender != op.lender))
        };
        let Some(token) = self.ops.iter().position(late).filter(|_| self.reads > 0) else {
            self.next_late = now + LOOK_INTERVAL;
            return None;
        };
        self.sides[self.ops[token].lender].late = true;
        Some(token as u32)
    }

    /// All pages of a read are asked of another lender: its answer does not count any more.
    pub(super) fn hedged(&mut self, token: u32) {
        let op = &mut self.ops[token as usize];
        op.hedged = true;
        let waited = op.asked.map_or(Duration::ZERO, |asked| asked.elapsed());
        self.note_wait(waited);
        self.reads -= 1;
        self.stats.hedged_reads += 1;
    }

    /// Finds lenders that do not answer; an error when they cannot be done without.
    pub(super) fn check_answers(&mut self) -> Result<()> {
        if self.replicas > 1 {
            return self.look();
        }
        self.sides.doubtful(Instant::now());
        match self.sides.silent(false) {
            Some((lender, error)) => self.lose(lender, error),
            None => Ok(()),
        }
    }

    /// With replicas, or when something is amiss, every millisecond: lenders that are silent, and lost ones that have gone or come back.
    fn look(&mut self) -> Result<()> {
        let now = Instant::now();
        if now < self.next_look {
            return Ok(());
        }
        self.next_look = now + LOOK_INTERVAL;
        self.sides.probe(now);
        // However busy the program is.
        if now >= self.next_ask && self.is_poor() {
            self.next_ask = now + ASK_INTERVAL;
            self.slots.ask_again();
        }
        let doubtful = self.sides.doubtful(now);
        let can_spare =
            self.replicas > 1 && doubtful != 0 && self.slots.can_spare(|lender| doubtful >> lender & 1 == 1);
        while let Some((lender, error)) = self.sides.silent(can_spare) {
            self.lose(lender, error)?;
        }
        let bytes_min = u64::from(self.slots.slots_per_slab()) * self.part_bytes();
        while let Some(lender) = self.sides.come_back(bytes_min) {
            self.stats.lenders_back += 1;
            self.slots.lender_back(lender);
            let class = self.sides[lender].borrower.as_ref().map_or(Class::Remote, Borrower::class);
            self.slots.set_class(lender, if self.fixed_order { lender as u8 } else { class as u8 });
        }
        if let Some(since) = self.poor_since
            && !self.slots.lacks_copies()
            && !self.slots.is_mending()
        {
            self.poor_since = None;
            self.stats.repair_ms += since.elapsed().as_millis() as u64;
        }
        Ok(())
    }

    /// Whether pages lack copies or are to be moved, or a lender that was lost may come back.
    pub(super) fn is_poor(&self) -> bool {
        self.poor_since.is_some() || self.sides.any_lost() || self.slots.is_recalled()
    }

    /// When to [`tick`](Self::tick) though nothing happens: lenders that stand still are looked for, where they can be done without.
    pub(super) fn patience_when_idle(&self) -> Option<Duration> {
        (self.replicas > 1).then(|| self.sides.probe_patience())
    }

    /// Lenders that stand still are missed, whatever is asked of the others.
    pub(super) fn keep_looking(&mut self) -> Result<()> {
        if self.replicas > 1 { self.look() } else { Ok(()) }
    }

    /// Nothing else to do: go on with what is missing.
    pub(super) fn tick(&mut self) -> Result<()> {
        if !self.is_poor() {
            return self.keep_looking();
        }
        self.look()?;
        self.mend();
        Ok(())
    }

    /// While it is paused, nothing is begun that nobody waits for.
    pub(super) fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Adds what only the backing knows to the pager's counters, and what is where to its detail.
    pub(super) fn count(&mut self, stats: &mut PagerStats) {
        let (slots, bytes) = (&self.slots, self.part_bytes());
        self.detail.hold((0..self.sides.len()).map(|lender| slots.live_at(lender) * bytes));
        stats.lenders_lost = self.stats.lenders_lost;
        stats.lenders_back = self.stats.lenders_back;
        stats.hedged_reads = self.stats.hedged_reads;
        for lender in 0..self.sides.len() {
            let Some(borrower) = &mut self.sides[lender].borrower else { continue };
            let counts = borrower.take_datagram_counts();
            self.stats.kernel_reads += counts.by_kernel;
            self.stats.datagrams_given_up += counts.given_up;
        }
        stats.kernel_reads = self.stats.kernel_reads;
        stats.datagrams_given_up = self.stats.datagrams_given_up;
        stats.wrong_datagrams = self.stats.wrong_datagrams;
        stats.wrong_pages = self.stats.wrong_pages;
        stats.pages_repaired = self.slots.mended();
        stats.pages_moved = self.slots.moved();
        stats.pages_sorted = self.slots.sorted();
        stats.lenders_left = self.stats.lenders_left;
        stats.pages_unprotected = self.slots.poor();
        stats.repair_ms = self.stats.repair_ms;
        stats.read_us_peak = self.stats.read_us_peak;
    }

    /// All lenders, lost ones too.
    pub(super) fn sides(&self) -> &Sides {
        &self.sides
    }

    /// Bytes of pages at a lender, each copy and part counted.
    pub(super) fn held_bytes(&self, lender: u32) -> u64 {
        self.slots.live_at(lender) * self.part_bytes()
    }

    /// The lenders that were ever lost, and those that were left: a bit for each.
    pub(super) fn ever_gone(&self) -> (u64, u64) {
        (self.ever_lost, self.ever_left)
    }

    /// Whether there are frozen slabs to ask about now.
    pub(super) fn thaw_due(&self, now: Instant) -> bool {
        now >= self.next_thaw && self.slots.is_frozen()
    }

    /// Asks about frozen slabs, one after the other, which nobody should wait for for long; true when one can be written again.
    pub(super) fn thaw_some(&mut self) -> Result<bool> {
        let began = Instant::now();
        self.next_thaw = began + THAW_INTERVAL;
        let frozen: Vec<_> = self.slots.frozen().collect();
        let mut thawed = false;
        for (slab, copies) in frozen {
            for &SlabCopy { lender, slab, .. } in copies.as_slice() {
                let Some(borrower) = self.sides.caller(lender) else { continue };
                match borrower.sole_holder(slab) {
                    Ok(true) => {}
                    // A fork shares all slabs, so the others are most likely shared too: ask again later.
                    Ok(false) => return Ok(thawed),
                    Err(error) => self.lose(lender, error)?,
                }
            }
            self.slots.thaw(slab);
            thawed = true;
            if began.elapsed() >= THAW_TIME {
                // The others with the next tick.
                self.next_thaw = began;
                break;
            }
        }
        Ok(thawed)
    }
}

/// How pages are kept, if that is possible.
fn check(addresses: &[String], replicas: usize, erasure: Option<Erasure>) -> Result<Redundancy> {
    if addresses.len() > LENDERS_MAX {
        let lenders = addresses.len();
        return Err(Error::Other(format!("{lenders} lenders are too many; name {LENDERS_MAX} at most")));
    }
    let (lenders, total) = (addresses.len(), erasure.map_or(replicas, Erasure::lenders));
    let is_twice = |index: &usize| addresses[..*index].contains(&addresses[*index]);
    let twice = (1..lenders).find(is_twice).filter(|_| total > 1).map(|index| addresses[index].clone());
    let too_few = total > lenders || twice.is_some();
    let redundancy = match erasure {
        Some(_) if replicas > 1 => return Err(PagerError::ReplicasOfParts.into()),
        Some(erasure) if too_few => return Err(PagerError::Erasure { erasure, lenders, twice }.into()),
        Some(erasure) => Redundancy::erasure(erasure.data(), erasure.parity()),
        None if too_few || !(1..=COPIES_MAX).contains(&replicas) => None,
        None => Some(Redundancy::replicas(replicas)),
    };
    redundancy.ok_or_else(|| PagerError::Replicas { replicas, lenders, twice }.into())
}
