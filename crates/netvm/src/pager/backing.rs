//! Where evicted pages live: slabs of the lenders. docs/design/replicas.md has what happens when one is lost.

use super::error::{PagerError, system};
use super::seals::Seals;
use super::side::Sides;
use crate::detail::PagerDetail;
use crate::error::{Error, Result, Scope};
use crate::lender::{BorrowOptions, Borrower, Class, Completion, ForkTicket, HEARD, PostError};
use crate::runfile::RunFile;
use crate::stats::PagerStats;
use netvm_core::residency::{CHUNK_PAGES, COPIES_MAX, Copies, SlabCopy, Slot, SlotMap, Step, StepEnd};
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;
use netvm_sys::uffd::PAGE_BYTES;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// Frozen slabs are asked about one at a time, and not more often than this allows.
const THAW_INTERVAL: Duration = Duration::from_millis(200);
/// How often lenders that were full are asked again while pages lack copies.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
/// How often late answers are looked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// How long a read is waited for without any other reason to wake up.
const READ_PATIENCE: Duration = Duration::from_millis(2);
const WRITE_PATIENCE: Duration = Duration::from_millis(50);

/// Numbers of operations that no transfer of the engine belongs to.
const MEND_STEP: u64 = 1 << 40;
const MEND_WRITE: u64 = MEND_STEP + 1;
const RETURN: u64 = MEND_STEP + 2;

/// An operation of the engine.
#[derive(Clone, Copy, Debug)]
struct Op {
    slot: Slot,
    local: SharedSlice,
    /// Writes: how many copies have not taken it yet. Reads: 1.
    left: u8,
    write: bool,
    /// Reads: its pages were asked of another lender meanwhile, and that counts.
    hedged: bool,
    /// Reads: which lender was asked.
    lender: u32,
    /// Reads: when.
    asked: Option<Instant>,
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
    /// By the engine's number.
    ops: Vec<Op>,
    /// Reads that nothing else is done about.
    reads: usize,
    /// What has ended while a connection had no room.
    inbox: Vec<(u32, Completion)>,
    scratch: Vec<Completion>,
    /// Transfers that have ended without an answer.
    ended: Vec<u32>,
    /// What is copied for slabs that lack a copy passes through here.
    chunk: Option<Mapping>,
    unposted: Option<Step>,
    /// The step under way borrows a slab.
    borrowing: bool,
    paused: bool,
    timeout: Duration,
    next_thaw: Instant,
    next_ask: Instant,
    next_look: Instant,
    next_late: Instant,
    poor_since: Option<Instant>,
    ever_lost: u64,
    stats: PagerStats,
}

impl Backing {
    pub(super) fn connect(
        addresses: &[String],
        replicas: usize,
        options: BorrowOptions,
        hook: Option<fn()>,
        timeout: Duration,
        run: Option<&RunFile>,
        seal: impl FnOnce(u32) -> Result<Seals>,
    ) -> Result<Self> {
        if addresses.is_empty() {
            return Err(PagerError::NoLender.into());
        }
        let twice = |index: usize| addresses[..index].contains(&addresses[index]);
        let twice = (1..addresses.len()).find(|&index| replicas > 1 && twice(index));
        if !(1..=COPIES_MAX).contains(&replicas) || replicas > addresses.len() || twice.is_some() {
            return Err(PagerError::Replicas {
                replicas,
                lenders: addresses.len(),
                twice: twice.map(|index| addresses[index].clone()),
            }
            .into());
        }
        // A process of a run that has lost a lender does without, too.
        let known = run.filter(|_| replicas > 1).map(RunFile::lost);
        let sides = Sides::connect(addresses, options, hook, replicas, timeout, known)?;
        let Some(smallest) = sides.borrowers().min_by_key(|borrower| borrower.slab_bytes()) else {
            return Err(PagerError::CopiesLost { pages: 0, why: sides.losses() }.into());
        };
        let (bytes, lender) = (smallest.slab_bytes(), smallest.lender().to_owned());
        let slots_per_slab = (bytes / PAGE_BYTES as u64 / 64 * 64) as u32;
        if slots_per_slab == 0 {
            return Err(PagerError::SlabTooSmall { lender, bytes }.into());
        }
        // For moves, too: it costs memory when it is used.
        let chunk = Some(Mapping::anonymous(CHUNK_PAGES as usize * PAGE_BYTES));
        let now = Instant::now();
        let mut slots = SlotMap::new(slots_per_slab, addresses.len(), replicas);
        let (mut stats, mut ever_lost) = (PagerStats::default(), 0);
        for lender in (0..sides.len()).filter(|&lender| sides[lender].lost.is_some()) {
            slots.lender_lost(lender);
            ever_lost |= 1 << lender.min(63);
            stats.lenders_lost += 1;
        }
        for lender in 0..sides.len() {
            if let Some(borrower) = &sides[lender].borrower {
                slots.set_class(lender, borrower.class() as u8);
            }
        }
        Ok(Self {
            detail: Box::default(),
            slots,
            seals: seal(slots_per_slab)?,
            sides,
            replicas,
            ops: Vec::with_capacity(1024),
            reads: 0,
            inbox: Vec::with_capacity(64),
            scratch: Vec::with_capacity(1024),
            ended: Vec::with_capacity(64),
            chunk: chunk.transpose().map_err(|e| system("map a buffer", e))?,
            unposted: None,
            borrowing: false,
            paused: false,
            timeout,
            next_thaw: now,
            next_ask: now,
            next_look: now,
            next_late: now,
            poor_since: None,
            ever_lost,
            stats,
        })
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.sides.borrowers().flat_map(Borrower::descriptors).map(|fd| fd.as_raw_fd())
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

    /// What to wait for.
    pub(super) fn poll_fds(&self, fds: &mut Vec<libc::pollfd>) {
        fds.extend(self.sides.borrowers().map(|borrower| libc::pollfd {
            fd: borrower.as_fd().as_raw_fd(),
            events: libc::POLLIN | if borrower.wants_write() { libc::POLLOUT } else { 0 },
            revents: 0,
        }));
    }

    /// For how long to wait for an answer before [`Backing::check_answers`].
    pub(super) fn patience(&self) -> Duration {
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

    fn borrow_slab(&mut self) -> Result<()> {
        let (mut copies, mut refused) = (Copies::default(), None);
        let now = Instant::now();
        // A dearer lender is next: perhaps a cheaper one has something again.
        if now >= self.next_ask
            && self.slots.candidate(&[]).is_some_and(|lender| self.slots.is_overflow(lender))
        {
            self.next_ask = now + ASK_INTERVAL;
            self.slots.ask_again();
        }
        while copies.as_slice().len() < self.replicas
            && let Some(lender) = self.slots.candidate(copies.as_slice())
        {
            let borrowed = match self.sides.caller(lender) {
                Some(borrower) => borrower.borrow_slab(),
                None => break,
            };
            match borrowed {
                Ok(slab) => copies.push(SlabCopy { lender, slab }),
                Err(error @ Error::LenderFull { .. }) => {
                    self.slots.lender_full(lender);
                    refused = Some(error);
                }
                Err(error) => self.lose(lender, error)?,
            }
        }
        let count = copies.as_slice().len();
        // After a loss fewer copies are better than none; before, the lenders are too small for what was asked.
        if count == self.replicas || (count > 0 && self.sides.any_lost()) {
            return match self.slots.add(copies.as_slice()) {
                Some(_) => Ok(()),
                None => Err(PagerError::SlotsExhausted.into()),
            };
        }
        copies.as_slice().iter().for_each(|&copy| self.slots.not_wanted(copy));
        self.slots.ask_again();
        // Better a slab that a dead child has let go than none at all.
        if self.thaw_all()? {
            return Ok(());
        }
        Err(refused.unwrap_or(PagerError::NoLender.into()))
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

    fn post_returns(&mut self) {
        while let Some(copy) = self.slots.take_return() {
            let Some(borrower) = &mut self.sides[copy.lender].borrower else { continue };
            if borrower.post_return(RETURN, copy.slab) == Err(PostError::Full) {
                self.slots.not_wanted(copy);
                return;
            }
        }
    }

    fn note(&mut self, token: u32, op: Op) {
        let index = token as usize;
        if index >= self.ops.len() {
            self.ops.resize(index + 1, op);
        }
        self.ops[index] = op;
    }

    /// Reads neighbouring slots from `slot` on into `local`.
    pub(super) fn read(&mut self, token: u32, slot: Slot, local: SharedSlice) -> Result<()> {
        let asked = Some(Instant::now());
        self.note(token, Op { slot, local, left: 1, write: false, hedged: false, lender: 0, asked });
        self.reads += 1;
        self.post_read(token)
    }

    fn post_read(&mut self, token: u32) -> Result<()> {
        loop {
            let Op { slot, local, .. } = self.ops[token as usize];
            let located = self.slots.locate(slot);
            let chosen = located.and_then(|(copies, page)| Some((self.sides.choose(copies)?, page)));
            let Some((SlabCopy { lender, slab }, page)) = chosen else {
                // The slab was given back: nobody waits for it.
                self.ops[token as usize].left = 0;
                self.reads -= 1;
                self.ended.push(token);
                return Ok(());
            };
            self.ops[token as usize].lender = lender;
            let offset = u64::from(page) * PAGE_BYTES as u64;
            let posted = match &mut self.sides[lender].borrower {
                Some(borrower) => borrower.post_read(token.into(), slab, offset, local),
                None => Err(PostError::Closed),
            };
            match posted {
                Ok(()) => {
                    self.detail.moved(lender, local.len() as u64, 0);
                    return Ok(());
                }
                Err(error) => self.make_room(lender, error)?,
            }
        }
    }

    /// Writes `local` to neighbouring slots from `slot` on, in all their copies. Returns how many there are.
    pub(super) fn write(&mut self, token: u32, slot: Slot, local: SharedSlice) -> Result<u64> {
        let mut op = Op { slot, local, left: 0, write: true, hedged: false, lender: 0, asked: None };
        let Some((copies, page)) = self.slots.write(slot, (local.len() / PAGE_BYTES) as u32) else {
            return Err(system("write to a slab", std::io::ErrorKind::InvalidInput.into()));
        };
        let offset = u64::from(page) * PAGE_BYTES as u64;
        for &SlabCopy { lender, slab } in copies.as_slice() {
            while let Some(borrower) = self.sides.live(lender) {
                match borrower.post_write(token.into(), slab, offset, local) {
                    Ok(()) => {
                        op.left += 1;
                        self.detail.moved(lender, 0, local.len() as u64);
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
        Ok(op.left.into())
    }

    /// The queue of a connection is full: wait until it is not. Completions are kept for the next [`Backing::poll`].
    fn make_room(&mut self, lender: u32, error: PostError) -> Result<()> {
        let patience = self.patience();
        let Some(borrower) = &mut self.sides[lender].borrower else { return Ok(()) };
        if error == PostError::TooLong {
            return Err(Error::Other(format!("a transfer for lender {}: {error}", borrower.lender())));
        }
        let mut done = Vec::new();
        let result = borrower.poll(&mut done);
        let some = !done.is_empty();
        self.inbox.extend(done.into_iter().map(|completion| (lender, completion)));
        if let Err(error) = result {
            return self.lose(lender, error);
        }
        if !some {
            let events = libc::POLLIN | if borrower.wants_write() { libc::POLLOUT } else { 0 };
            let mut fds = [libc::pollfd { fd: borrower.as_fd().as_raw_fd(), events, revents: 0 }];
            netvm_sys::thread::poll(&mut fds, Some(patience)).map_err(|e| system("poll", e))?;
            self.check_answers()?;
        }
        Ok(())
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
            self.hear(lender);
        }
        out.append(&mut self.ended);
        if self.replicas > 1 || self.is_poor() {
            self.look()?;
        }
        self.mend();
        Ok(())
    }

    /// The first slot of a chunk that has been read to be copied whose contents are not what was written there.
    fn wrong_slot(&mut self) -> Option<Slot> {
        let Self { slots, seals, chunk: Some(chunk), .. } = self else { return None };
        if !slots.is_step_good() {
            return None;
        }
        let mut page = [0; PAGE_BYTES];
        let is_wrong = |&(index, slot): &(usize, Slot)| {
            let read = chunk.shared().read_into(index * PAGE_BYTES, &mut page);
            read.is_some() && !seals.is_right(slot, &mut page)
        };
        let live = slots.slots_of_step().enumerate().filter_map(|(index, slot)| Some((index, slot?)));
        live.into_iter().find(is_wrong).map(|(_, slot)| slot)
    }

    /// What the lender asks back.
    fn hear(&mut self, lender: u32) {
        if let Some(borrower) = self.sides.live(lender)
            && let Some(recall) = borrower.take_recall()
        {
            let slabs = recall.slabs(borrower.slab_bytes());
            self.slots.recall(lender, slabs);
        }
    }

    /// Tells lenders what nobody else can have, and leaves those that are leaving and have nothing any more.
    fn answer_recalls(&mut self) {
        while let Some(lender) = self.slots.take_stuck() {
            if let Some(borrower) = self.sides.live(lender) {
                borrower.post_cannot();
            }
        }
        if let Some(lender) = self.slots.left()
            && self.sides.live(lender).is_some_and(|borrower| borrower.pending() == 0)
        {
            let reason = "it has been stopped, and what it held was moved".to_owned();
            let error = Error::LenderLost { lender: self.sides[lender].address.clone(), reason };
            self.sides.lose(lender, error);
            // It has nothing that could be.
            self.slots.lender_lost(lender);
            self.stats.lenders_left += 1;
        }
    }

    fn ended(&mut self, lender: u32, completion: Completion, out: &mut Vec<u32>) -> Result<()> {
        let Completion { token, result, slab } = completion;
        let failed = result.is_err();
        if let Err(error) = result {
            // The connection is fine, but the lender refuses what it has lent.
            if error.scope() == Scope::Op || self.replicas == 1 {
                self.lose(lender, error)?;
            }
        }
        if token >= MEND_STEP {
            match (token, failed, slab) {
                (MEND_STEP, true, _) => self.slots.step_ended(StepEnd::Lost),
                (MEND_STEP, false, Some(slab)) => self.slots.step_ended(StepEnd::Borrowed(slab)),
                (MEND_STEP, false, None) if self.borrowing => self.slots.step_ended(StepEnd::Full),
                (MEND_STEP, false, None) => match self.wrong_slot() {
                    // It is blamed now, not whoever would have got a copy.
                    Some(slot) => {
                        self.distrust(lender, slot)?;
                        self.slots.step_ended(StepEnd::Lost);
                    }
                    None => self.slots.step_ended(StepEnd::Done),
                },
                _ => {}
            }
            return Ok(());
        }
        let Some(op) = self.ops.get_mut(token as usize) else {
            return Err(system("match a completion", std::io::ErrorKind::InvalidData.into()));
        };
        if failed && !op.write && !op.hedged {
            return self.post_read(token as u32);
        }
        op.left -= 1;
        self.reads -= usize::from(!op.write && !op.hedged);
        if op.left == 0 {
            out.push(token as u32);
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
        // One that has nothing can be done without, if there is another.
        if self.replicas == 1 && (self.slots.has_pages(lender) || self.slots.alive() == 1) {
            return Err(error);
        }
        if !self.sides.lose(lender, error) {
            return Ok(());
        }
        self.stats.lenders_lost += 1;
        self.ever_lost |= 1 << lender.min(63);
        let loss = self.slots.lender_lost(lender);
        if loss.gone > 0 || self.slots.alive() == 0 {
            return Err(PagerError::CopiesLost { pages: loss.gone, why: self.sides.losses() }.into());
        }
        self.poor_since.get_or_insert_with(Instant::now);
        Ok(())
    }

    fn note_wait(&mut self, waited: Duration) {
        self.stats.read_us_peak = self.stats.read_us_peak.max(waited.as_micros() as u64);
    }

    /// Which lender a read was asked of.
    pub(super) fn asked(&self, token: u32) -> u32 {
        self.ops[token as usize].lender
    }

    /// A lender returned a page of `slot` that differs from what was written. The page is to be read again, from another; an error
    /// when there is no other.
    pub(super) fn distrust(&mut self, lender: u32, slot: Slot) -> Result<()> {
        // Memory that was taken back reads as zeros on this host: then the connection has ended, and nobody returned anything wrong.
        let mut done = Vec::new();
        let ended = self.sides.live(lender).map(|borrower| borrower.poll_all(&mut done));
        self.inbox.extend(done.into_iter().map(|completion| (lender, completion)));
        if let Some(Err(error)) = ended {
            return self.lose(lender, error);
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
        let can_spare = doubtful != 0 && self.slots.can_spare(|lender| doubtful >> lender & 1 == 1);
        while let Some((lender, error)) = self.sides.silent(can_spare) {
            self.lose(lender, error)?;
        }
        let bytes_min = u64::from(self.slots.slots_per_slab()) * PAGE_BYTES as u64;
        while let Some(lender) = self.sides.come_back(bytes_min) {
            self.stats.lenders_back += 1;
            self.slots.lender_back(lender);
            let class = self.sides[lender].borrower.as_ref().map_or(Class::Remote, Borrower::class);
            self.slots.set_class(lender, class as u8);
        }
        if let Some(since) = self.poor_since
            && self.slots.poor() == 0
            && !self.slots.is_mending()
        {
            self.poor_since = None;
            self.stats.repair_ms += since.elapsed().as_millis() as u64;
        }
        Ok(())
    }

    /// Begins what is to be done next for slabs that lack a copy.
    fn mend(&mut self) {
        self.post_returns();
        if self.paused || self.chunk.is_none() {
            return;
        }
        let step = self.unposted.take();
        let step = step.or_else(|| self.slots.next_step());
        // A move may have been the last, and nothing else wakes us.
        self.post_returns();
        if self.slots.is_recalled() {
            self.answer_recalls();
        }
        let Some(step) = step else { return };
        match self.post_step(step) {
            Ok(()) => self.slots.step_posted(),
            Err(PostError::Full) => self.unposted = Some(step),
            Err(PostError::Closed | PostError::TooLong) => self.slots.step_ended(StepEnd::Lost),
        }
    }

    fn post_step(&mut self, step: Step) -> std::result::Result<(), PostError> {
        let (Step::Borrow { lender }
        | Step::Read { from: SlabCopy { lender, .. }, .. }
        | Step::Write { to: SlabCopy { lender, .. }, .. }) = step;
        let chunk = self.chunk.as_ref().ok_or(PostError::TooLong)?.shared();
        let part = |pages: u32| chunk.sub(0, pages as usize * PAGE_BYTES).ok_or(PostError::TooLong);
        let offset = |page: u32| u64::from(page) * PAGE_BYTES as u64;
        let borrower = self.sides.live(lender).ok_or(PostError::Closed)?;
        self.borrowing = matches!(step, Step::Borrow { .. });
        match step {
            Step::Borrow { .. } => borrower.post_borrow(MEND_STEP),
            Step::Read { from, page, pages } => {
                borrower.post_read(MEND_STEP, from.slab, offset(page), part(pages)?)
            }
            Step::Write { to, page, pages } => {
                borrower.post_write(MEND_WRITE, to.slab, offset(page), part(pages)?)?;
                // It has ended when the lender has it.
                borrower.post_flush(MEND_STEP)
            }
        }
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

    /// Adds what only the backing knows to the pager's counters.
    pub(super) fn count(&self, stats: &mut PagerStats) {
        stats.lenders_lost = self.stats.lenders_lost;
        stats.lenders_back = self.stats.lenders_back;
        stats.hedged_reads = self.stats.hedged_reads;
        stats.wrong_pages = self.stats.wrong_pages;
        stats.pages_repaired = self.slots.mended();
        stats.pages_moved = self.slots.moved();
        stats.lenders_left = self.stats.lenders_left;
        stats.pages_unprotected = if self.is_poor() { self.slots.poor() } else { 0 };
        stats.repair_ms = self.stats.repair_ms;
        stats.read_us_peak = self.stats.read_us_peak;
    }

    /// The lenders that were ever lost, a bit for each.
    pub(super) fn ever_lost(&self) -> u64 {
        self.ever_lost
    }

    /// Whether there are frozen slabs to ask about now.
    pub(super) fn thaw_due(&self, now: Instant) -> bool {
        now >= self.next_thaw && self.slots.is_frozen()
    }

    /// Asks about every frozen slab; true when one can be written again.
    pub(super) fn thaw_all(&mut self) -> Result<bool> {
        self.next_thaw = Instant::now() + THAW_INTERVAL;
        let frozen: Vec<_> = self.slots.frozen().collect();
        let mut thawed = false;
        for (slab, copies) in frozen {
            for &SlabCopy { lender, slab } in copies.as_slice() {
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
        }
        Ok(thawed)
    }

    /// Before a fork, with no operation on its way: claims to leases that share every slab, for each lender that is not lost.
    pub(super) fn fork_tickets(&mut self) -> Result<Vec<Option<ForkTicket>>> {
        let mut tickets = Vec::new();
        for lender in 0..self.sides.len() {
            let ticket = self.sides.caller(lender).map(Borrower::fork_ticket).transpose();
            tickets.push(match ticket {
                Ok(ticket) => ticket,
                Err(error) => self.lose(lender, error).map(|()| None)?,
            });
        }
        Ok(tickets)
    }

    /// In the thread that forks: the child's connections.
    pub(super) fn redeem(&self, tickets: &[Option<ForkTicket>]) -> Result<Vec<Option<Borrower>>> {
        let options = self.sides.fork_options();
        let redeem = |ticket: &Option<ForkTicket>| {
            match ticket.as_ref().map(|ticket| Borrower::adopt(ticket, &options)).transpose() {
                // The child can do without, if there are other copies.
                Err(_) if self.replicas > 1 => Ok(None),
                result => result,
            }
        };
        tickets.iter().map(redeem).collect()
    }

    /// After a fork, in the child. The parent's connections belong to descriptors that do not exist here.
    pub(super) fn adopt(&mut self, borrowers: Vec<Option<Borrower>>) -> Result<()> {
        self.unposted = None;
        self.paused = false;
        (self.stats, *self.detail) = (PagerStats::default(), PagerDetail::default());
        self.ever_lost = 0;
        let missing: Vec<bool> = borrowers.iter().map(Option::is_none).collect();
        for (lender, borrower) in borrowers.into_iter().enumerate() {
            self.sides.adopt(lender as u32, borrower);
        }
        for lender in (0..self.sides.len()).filter(|&lender| missing[lender as usize]) {
            if self.slots.is_alive(lender) {
                let address = self.sides[lender].address.clone();
                let reason = "it was lost while the process forked".to_owned();
                self.lose(lender, Error::LenderLost { lender: address, reason })?;
            }
        }
        self.slots.leave_mending();
        self.seals.adopt()
    }
}
