//! The pager's thread: its state and its loop.

use super::backing::Backing;
use super::blocks::Blocks;
use super::budget::Budget;
use super::calls::Call;
use super::collect::Collecting;
use super::end::Desk;
use super::errand::Errands;
use super::error::{PagerError, system};
use super::learn::Learn;
use super::look::{Awaited, Look};
use super::placement::{self, Placement};
use super::seals::Seals;
use super::shards::Neighbours;
use super::table::PageTable;
use super::tier::Tier;
use super::together::TO_WRITE_MAX;
use super::transfers::{TRANSFER_PAGES_MAX, Transfer};
use super::{FaultPath, PagerConfig};
use crate::error::{Error, Result};
use crate::lender::BorrowOptions;
use crate::runfile::Slot as RunSlot;
use crate::stats::PagerStats;
use netvm_core::residency::{
    Arrival, Entry, FRAME_MAX, FrameChain, FrameSet, Marks, PageQueue, PageState, Protection, Returns,
    Streams,
};
use netvm_sys::cpu::Hold;
use netvm_sys::paged::{Addresses, Bell, FrameDesign, PagedArea, Told};
use netvm_sys::thread::Gate;
use netvm_sys::uffd::{Fault, PAGE_BYTES};
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages that one eviction step handles: enough to share the cost of a system call, few enough not to delay a fault.
pub(super) const EVICT_PAGES: usize = 32;
/// The same where the last ones were long runs of neighbours, as a stream leaves them behind: each run is one call, and one message.
pub(super) const EVICT_PAGES_MAX: usize = 128;
/// How many times a page is spared that was needed again soon after it had been evicted.
pub(super) const SPARED: u32 = 2;
/// Frames that get memory at a time while the budget is not used up.
const GROW_FRAMES: u64 = 64;
/// How often an idle pager looks whether others need its frames.
pub(super) const TICK: Duration = Duration::from_millis(50);

/// How long to wait for frames that others must give back.
pub(super) const STARVED: Duration = Duration::from_millis(1);

/// For how long a child may not be known yet.
const STARTING: Duration = Duration::from_millis(50);

/// For how long a pager that spins looks for the next event.
const SPIN: Duration = Duration::from_millis(1);
/// Faults taken at a time.
const FAULTS_MAX: usize = 32;
/// Faults after which the counters are published again.
const PUBLISH_FAULTS: u64 = 64;

/// What there is to do.
#[derive(Clone, Copy, Debug)]
struct Ready {
    faults: bool,
    links: bool,
}

/// Everything the pager's thread owns.
pub(super) struct Engine {
    /// Which of the shards this is.
    pub(super) number: usize,
    /// With several shards.
    pub(super) neighbours: Option<Arc<Neighbours>>,
    pub(super) paged: PagedArea,
    pub(super) table: PageTable,
    /// Full frames without contents.
    pub(super) free: FrameSet,
    /// Frames without memory.
    pub(super) empty: FrameSet,
    pub(super) mapped: PageQueue,
    /// What is brought in now is a part of a window,
    pub(super) in_window: bool,
    /// and of several pages that are asked for at once, not of a unit only.
    pub(super) are_many: bool,
    /// Pages are brought in that the program has named: many, for which nobody waits, and which are used as single ones.
    pub(super) names: bool,
    pub(super) cached: FrameChain,
    pub(super) backing: Backing,
    pub(super) blocks: Blocks,
    pub(super) streams: Streams,
    /// Pages that come together.
    pub(super) unit: u32,
    pub(super) budget: Budget,
    pub(super) stats: PagerStats,
    /// Faults that wait for a frame.
    pub(super) deferred: Vec<Fault>,
    /// They are tried again.
    pub(super) is_retrying: bool,
    /// Windows with a stride have come since there were frames enough.
    pub(super) has_strides: bool,
    /// Far mappings: address -> bytes.
    pub(super) ranges: BTreeMap<usize, usize>,
    pub(super) errands: Errands,
    pub(super) transfers: Vec<Transfer>,
    pub(super) transfers_free: Vec<u32>,
    /// Full frames, installed pages and spare ones together: the local memory in use.
    pub(super) local_frames: usize,
    /// Pages of the budget without memory, for pages that will arrive by copy.
    pub(super) spare: usize,
    /// A single page has been installed since spare pages were last made.
    pub(super) spare_wanted: bool,
    /// The pages evicted last had few neighbours,
    pub(super) scattered: bool,
    /// or were long runs of them.
    pub(super) in_runs: bool,
    /// Most of them left together.
    pub(super) together: bool,
    pub(super) protection: Protection,
    /// Whether pages that have left come back soon.
    pub(super) returns: Returns,
    /// The program has dropped pages by system calls that nobody told of.
    pub(super) dropped_by_program: bool,
    /// Pages on their way of which it is known that they will be written to.
    pub(super) to_write: Vec<u32>,
    /// Frames in state Writing.
    pub(super) writing_frames: usize,
    /// Installed pages that the kernel did not let go when last asked.
    pub(super) busy_streak: usize,
    pub(super) placement: Placement,
    pub(super) tier: Tier,
    pub(super) learn: Learn,
    /// How often each page is pinned: it is not evicted, and not in the queue of mapped pages once it has left it.
    pub(super) pins: Marks,
    /// [`Access`](super::hints::Access) of each page.
    pub(super) advice: Marks,
    /// Nothing has happened since it was last looked what is to be collected.
    is_idle: bool,
    /// So many frames are still to be given back, from then on.
    pub(super) shrinks_on: Option<(Instant, usize)>,
    /// When [`Engine::tick`] was last.
    ticked: Instant,
    /// Where to look next for pages that are to come home.
    pub(super) home: u32,
    pub(super) collecting: Collecting,
    /// Evicted pages may be packed.
    pub(super) packing: bool,
    /// Whether the child of the last fork has the frames, as pages were packed there and nowhere else. Then it has those that are free, and cached
    /// pages, too, for a moment.
    pub(super) shares_frames: bool,
    /// When a child got packed pages last.
    pub(super) shared: Option<Instant>,
    /// When more of what children were promised is sent.
    pub(super) keeps_at: Instant,
    /// Faults that were put off stay so: the contents of their pages are elsewhere for a moment.
    pub(super) holds_back: bool,
    /// Some of it has become plain memory, which stays.
    pub(super) has_local: bool,
    /// Nobody uses it any more.
    pub(super) has_ended: bool,
    area: Range<usize>,
    spin: Duration,
    /// The pager goes to the CPU of the thread that faults.
    follows: bool,
    pub(super) look: Look,
    pub(super) completions: Vec<u32>,
    pub(super) poll_fds: Vec<libc::pollfd>,
}

/// The addresses of the far area.
pub(super) fn reserve(config: &PagerConfig) -> Result<Addresses> {
    let bytes = usize::try_from(config.area_bytes).map_err(|_| PagerError::SlotsExhausted)?;
    let reserved = Addresses::reserve(bytes & !(PAGE_BYTES - 1));
    reserved
        .map_err(|source| PagerError::Reserve { bytes: config.area_bytes, errno: (&source).into() }.into())
}

/// Each shard has a record of its own, with its number behind the name.
fn record_of(file: &Path, number: usize) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    if number > 0 {
        name.push(format!(".{number}"));
    }
    name.into()
}

impl Engine {
    pub(super) fn new(
        config: &PagerConfig,
        addresses: &Addresses,
        number: usize,
        slot: Option<RunSlot>,
        neighbours: Option<Arc<Neighbours>>,
    ) -> Result<Self> {
        let frames_of = |bytes: u64| (bytes / PAGE_BYTES as u64).min(u64::from(FRAME_MAX)) as usize;
        let limit = frames_of(config.local_bytes);
        let frames = limit.max(frames_of(config.local_bytes_max));
        let told = if config.fault_path == FaultPath::InThread { Told::Faulter } else { Told::Reader };
        let paged = PagedArea::telling(told, addresses, frames, config.design);
        let paged = paged.map_err(|source| match source.raw_os_error() {
            Some(libc::ENOMEM) => PagerError::Reserve { bytes: config.area_bytes, errno: (&source).into() },
            None if told == Told::Faulter => {
                PagerError::FaultPath { why: "it needs Linux 6.8, and pages that are moved" }
            }
            None if config.design == Some(FrameDesign::Move) => {
                PagerError::FrameDesign { why: "pages are moved from Linux 6.8 on" }
            }
            _ => PagerError::Userfaultfd((&source).into()),
        })?;
        let usual = BorrowOptions::default();
        let options = BorrowOptions {
            name: config.name.clone(),
            connect_timeout: usual.connect_timeout.min(config.lender_timeout),
            call_timeout: usual.call_timeout.min(config.lender_timeout),
            security: config.security.clone(),
            link: config.link,
            // Of parts nobody could tell which one was wrong.
            datagrams: config.erasure.is_none(),
            seals: config.encrypt_pages,
            ..usual
        };
        let run = config.run.as_deref();
        let mut secret = [0; 192];
        getrandom::fill(&mut secret).map_err(|_| system("getrandom", std::io::Error::last_os_error()))?;
        let seal = |slots_per_slab| Seals::new(secret, slots_per_slab, config.encrypt_pages);
        let backing = Backing::connect(config, options, run, seal)?;
        let mut empty = FrameSet::new(frames);
        empty.put(0, frames);
        let area = paged.area();
        let pages = area.len() / PAGE_BYTES;
        let unit = (config.page_bytes / PAGE_BYTES) as u32;
        let record = config.learn.as_deref().map(|file| record_of(file, number));
        let learn = Learn::new(record.as_deref(), pages, config.prefetch_pages_max > 0)?;
        Ok(Self {
            number,
            neighbours,
            learn,
            table: PageTable::new(area.len() / PAGE_BYTES).map_err(|source| PagerError::Reserve {
                bytes: config.area_bytes,
                errno: (&source).into(),
            })?,
            paged,
            free: FrameSet::new(frames),
            empty,
            mapped: PageQueue::new(),
            in_window: false,
            are_many: false,
            names: false,
            cached: FrameChain::new(frames),
            backing,
            blocks: Blocks::new(config.block_at.clone()),
            streams: Streams::new(
                match config.prefetch_pages_max.min(TRANSFER_PAGES_MAX) {
                    0 => 0,
                    pages => (pages / unit).max(1),
                },
                unit as usize * PAGE_BYTES,
            ),
            unit,
            budget: Budget::new(limit as u64, slot),
            stats: PagerStats::default(),
            deferred: Vec::with_capacity(64),
            is_retrying: false,
            has_strides: false,
            ranges: BTreeMap::new(),
            errands: Errands::new(),
            transfers: Vec::with_capacity(1024),
            transfers_free: Vec::with_capacity(1024),
            local_frames: 0,
            spare: 0,
            spare_wanted: false,
            scattered: false,
            in_runs: false,
            together: false,
            protection: Protection::new(told == Told::Faulter),
            returns: Returns::new(),
            dropped_by_program: false,
            to_write: Vec::with_capacity(TO_WRITE_MAX),
            writing_frames: 0,
            busy_streak: 0,
            placement: Placement::new(config.private_lender),
            pins: Marks::new(),
            advice: Marks::new(),
            home: 0,
            collecting: Collecting::new(),
            tier: Tier::new(config.tier, frames),
            packing: true,
            shares_frames: false,
            shared: None,
            keeps_at: Instant::now(),
            holds_back: false,
            has_local: false,
            has_ended: false,
            is_idle: false,
            shrinks_on: None,
            ticked: Instant::now(),
            area,
            spin: match config.fault_path {
                FaultPath::Spin if config.spin_us == 0 => SPIN,
                _ => Duration::from_micros(config.spin_us.into()),
            },
            follows: config.fault_path == FaultPath::SameCpu,
            look: Look::new(),
            completions: Vec::with_capacity(1024),
            poll_fds: Vec::with_capacity(16),
        })
    }

    pub(super) fn area(&self) -> Range<usize> {
        self.area.clone()
    }

    pub(super) fn bell(&self) -> Bell {
        self.paged.bell()
    }

    pub(super) fn descriptors(&self) -> Vec<RawFd> {
        self.paged.descriptors().chain(self.backing.descriptors()).collect()
    }

    /// The body of the pager's thread. Returns when nobody has the pager any more; an error is the end of the process, since pages
    /// cannot be had then.
    pub(super) fn run(mut self: Box<Self>, desk: &Desk, ready: &Gate) {
        Self::begin(desk);
        // Where unshare(2) is forbidden the program's table is shared: it works, less protected.
        let shared = self.neighbours.iter().flat_map(|neighbours| neighbours.descriptors());
        let kept: Vec<_> = self.descriptors().into_iter().chain(shared).collect();
        let own_table = netvm_sys::thread::own_descriptors(&kept).is_ok();
        self.placement.start();
        if let Err(error) = self.paged.open_memory() {
            self.end(&system("open /proc/self/mem", error));
        }
        ready.open(u32::from(own_table));
        loop {
            // What a panic says would go to a standard error that this thread has not.
            match catch_unwind(AssertUnwindSafe(|| self.serve(desk))) {
                Ok(Ok(())) if self.has_ended => return self.leave(desk),
                Ok(Ok(())) => self = Self::park(self, desk),
                Ok(Err(error)) => self.end(&error),
                Err(panic) => self.end(&PagerError::panicked(&*panic).into()),
            }
        }
    }

    /// On the pager's thread, first of all.
    pub(super) fn begin(desk: &Desk) {
        netvm_sys::thread::set_name(c"netvm-pager");
        netvm_sys::thread::block_signals();
        if let Some(cpu) = desk.cpu {
            // A CPU that went away leaves the thread unpinned.
            let _ = netvm_sys::cpu::pin(cpu);
        }
    }

    /// Pages cannot be had any more: the end of the process.
    pub(super) fn end(&self, error: &Error) -> ! {
        let message = format!("{error}; far memory is lost and the program cannot go on");
        // The supervisor of the run says it once, wherever the program's standard error goes.
        if self.budget.set_message(&message) {
            netvm_sys::thread::die_silently();
        }
        netvm_sys::thread::die(&message)
    }

    /// Hands the engine to the thread that forks, and waits for it to come back.
    fn park(engine: Box<Self>, desk: &Desk) -> Box<Self> {
        let doorbell = &desk.doorbell;
        let mut parked = doorbell.parked();
        let engine = parked.insert(engine);
        doorbell.set_result(Ok(()));
        if let Err(error) = engine.paged.answer_bell() {
            netvm_sys::thread::die(&format!("cannot answer a call: {error}"));
        }
        drop(parked);
        doorbell.resume().wait();
        let returned = doorbell.parked().take();
        returned.unwrap_or_else(|| netvm_sys::thread::die("the pager was resumed without its state"))
    }

    /// Serves faults and calls until asked to park, or to end.
    fn serve(&mut self, desk: &Desk) -> Result<()> {
        let mut faults = [Fault::default(); FAULTS_MAX];
        let bell = self.paged.bell();
        let mut spin_until = Instant::now();
        let mut ready = Ready { faults: true, links: true };
        let mut published = 0;
        let mut polled = Instant::now();
        loop {
            let mut count = 0;
            if ready.faults {
                count = self.paged.read_faults(&mut faults).map_err(|e| system("read userfaultfd", e))?;
            }
            if count > 0 {
                self.tier.note_fault(&mut self.stats);
            }
            for (index, &fault) in faults[..count].iter().enumerate() {
                if !bell.is_at(fault.address) {
                    if self.follows {
                        self.placement.note(fault, &desk.hold, || self.budget.is_alone());
                    }
                    self.fault(fault)?;
                    continue;
                }
                if let Some(call) = desk.doorbell.take_call() {
                    if let Call::Park { stack_pointer } = call {
                        self.placement.let_go(&desk.hold);
                        // The kernel will not tell of them again.
                        faults[index + 1..count].iter().try_for_each(|&fault| self.fault(fault))?;
                        self.get_ready_to_fork(stack_pointer, &desk.doorbell.needed())?;
                        // After the writes on the same connections, so the copies of the leases have them.
                        *desk.doorbell.tickets() = self.backing.fork_tickets()?;
                        return Ok(());
                    }
                    // It is named in place of faults.
                    if self.follows && matches!(call, Call::WillNeedEach(_)) {
                        self.placement.note(fault, &desk.hold, || self.budget.is_alone());
                    }
                    let result = self.carry_out(call, desk)?;
                    desk.doorbell.set_result(result);
                }
                self.answer()?;
                if self.has_ended {
                    return Ok(());
                }
            }
            self.backing.push()?;
            // A write has completed once it is sent, which no descriptor tells.
            let is_due = polled.elapsed() >= TICK;
            let moved = (is_due || ready.links || self.writing_frames > 0 || self.backing.has_ended())
                && self.progress()?;
            // However busy the program is, lenders ask for their memory, and show that they live: what has come by now counts.
            if is_due {
                polled = Instant::now();
                self.backing.check_answers()?;
            }
            if is_due || self.collecting.is_on() {
                self.collect()?;
            }
            if !self.deferred.is_empty() && self.in_flight() == 0 {
                self.retry_deferred()?;
            }
            // Usually while an answer is on its way.
            let evicted = self.evict_ahead()? | self.tend_pool()?;
            self.make_spare()?;
            self.backing.push()?;
            self.shrink_on()?;
            if !self.backing.promised.is_empty() {
                self.keep_promises()?;
            }
            let mut block = !evicted && count < FAULTS_MAX && (self.deferred.is_empty() || self.is_starved());
            if !self.spin.is_zero() {
                let now = Instant::now();
                if count > 0 || moved {
                    spin_until = now + self.spin;
                }
                if now < spin_until {
                    std::hint::spin_loop();
                    ready = Ready { faults: true, links: true };
                    continue;
                }
            }
            if block && self.stats.faults.wrapping_sub(published) >= PUBLISH_FAULTS {
                published = self.stats.faults;
                self.publish(desk);
            }
            block |= self.in_flight() > 0 && !evicted && count == 0;
            block &= !self.backing.has_ended() && self.shrinks_on.is_none();
            if count > 0 {
                self.look.came(Awaited::Fault, Instant::now);
            }
            if moved {
                self.look.came(Awaited::Answer, Instant::now);
            }
            ready = self.wait(block, &desk.hold)?;
            self.give_if_asked()?;
            // Others need what this process has too much, also if it is never idle; and shards show what comes to each.
            let others_need = self.budget.is_shard()
                || self.budget.others_starve()
                || self.budget.owes(self.local_frames as u64)
                || !self.backing.promised.is_empty();
            if others_need && self.ticked.elapsed() >= TICK {
                self.tick()?;
            }
        }
    }

    /// What the fork needs of a far stack comes in, and what a child must find at lenders is there.
    fn get_ready_to_fork(&mut self, stack_pointer: usize, also: &[usize]) -> Result<()> {
        // What only packed pages hold each child would give up by itself, to places of its own. They are to share one. A child that is alone may as
        // well write for itself where it can read only that.
        let encrypts = self.backing.seals.encrypts();
        let is_one_of_several =
            || self.shared.is_some_and(|shared| shared.elapsed() < STARTING) || self.budget.has_children();
        let is_shared = !encrypts || is_one_of_several();
        if is_shared && !self.backing.is_stranded() {
            self.packing = !encrypts;
            self.promise_packed()?;
            if encrypts {
                // No child could read what is written later.
                self.send_all_promised()?;
            }
        }
        self.bring_in_for_fork(stack_pointer, also)?;
        self.finish_all()?;
        self.packing = true;
        Ok(())
    }

    fn answer(&self) -> Result<()> {
        self.paged.answer_bell().map_err(|e| system("answer a call", e))
    }

    /// Faults wait for frames, and nothing is under way that could free one: others must give some back.
    pub(super) fn is_starved(&self) -> bool {
        !self.deferred.is_empty()
            && self.in_flight() == 0
            && self.backing.pending() == 0
            && !self.errands.are_under_way()
    }

    /// Says what to look at; if `block`, when there is something or that is likely.
    fn wait(&mut self, block: bool, hold: &Hold) -> Result<Ready> {
        if !block {
            self.backing.keep_looking()?;
            return Ok(Ready { faults: true, links: self.backing.pending() > 0 });
        }
        if !self.is_starved()
            && let Some(ready) = self.look()?
        {
            return Ok(ready);
        }
        self.poll_fds.clear();
        self.poll_fds.push(netvm_sys::thread::readable(&self.paged.as_fd()));
        self.backing.poll_fds(&mut self.poll_fds);
        let waiting = self.backing.pending() > 0;
        let timeout = if self.is_starved() {
            Some(STARVED)
        } else if waiting {
            Some(self.backing.patience())
        } else if self.placement.is_holding() {
            Some(placement::PATIENCE)
        } else if self.budget.is_shared() || self.backing.is_poor() {
            Some(TICK)
        } else {
            self.backing.patience_when_idle()
        };
        let timeout = match self.backing.promised.is_empty() {
            true => timeout,
            false => Some(timeout.unwrap_or(TICK).min(TICK)),
        };
        let patience = self.collecting.patience(self.backing.slots.live(), timeout);
        let patience = match self.promised_due() {
            Some(due) => Some(patience.unwrap_or(due).min(due)),
            None => patience,
        };
        let wakes_early = patience != timeout;
        if let Some(neighbours) = &self.neighbours {
            self.poll_fds.push(netvm_sys::thread::readable(neighbours.event(self.number)));
        }
        let ready = netvm_sys::thread::poll(&mut self.poll_fds, patience).map_err(|e| system("poll", e))?;
        // What follows may wait for something else, with the same descriptors.
        if let Some(neighbours) = &self.neighbours
            && self.poll_fds.pop().is_some_and(|fd| fd.revents != 0)
        {
            neighbours.hear(self.number);
        }
        let (faults, links) = self.poll_fds.split_at(1);
        let is_ready = |fd: &libc::pollfd| fd.revents != 0;
        let (faults, links) = (faults.iter().any(is_ready), links.iter().any(is_ready));
        // Others that ask for frames are no answer.
        let no_answer = waiting && !faults && !links;
        if no_answer {
            self.backing.check_answers()?;
        } else if ready == 0 && wakes_early {
            if self.ticked.elapsed() >= TICK {
                // The last one may be long ago.
                if std::mem::replace(&mut self.is_idle, true) {
                    self.placement.let_go(hold);
                }
                self.tick()?;
            }
        } else if ready == 0 {
            self.placement.let_go(hold);
            self.tick()?;
        } else {
            self.is_idle = false;
            // A busy program may have no need of a lender that stands still.
            self.backing.keep_looking()?;
        }
        // A blocking call may have left completions behind.
        Ok(Ready { faults, links: links || no_answer })
    }

    /// Instead of sleeping, as long as that pays: lets others run, and says what to look at then.
    fn look(&mut self) -> Result<Option<Ready>> {
        // What is read ahead, or written, nobody waits for.
        let is_awaited = self.tier.is_waiting() && self.backing.reads() > 0;
        let awaited = if is_awaited { Awaited::Answer } else { Awaited::Fault };
        let Some(turn) = self.look.next(awaited, Instant::now) else { return Ok(None) };
        if self.look.yields() {
            std::thread::yield_now();
        }
        self.backing.keep_looking()?;
        Ok(Some(match awaited {
            // Other threads may fault meanwhile.
            Awaited::Answer => Ready { faults: turn % 2 == 0, links: true },
            Awaited::Fault => Ready { faults: true, links: self.backing.pending() > 0 },
        }))
    }

    /// Now and then: give frames to other processes of the run, take frozen slabs back into use.
    pub(super) fn tick(&mut self) -> Result<()> {
        self.ticked = Instant::now();
        // Of shards what comes counts; a process of a run is idle when it has no faults either.
        let came = match self.budget.is_shard() {
            true => self.stats.remote_reads + self.stats.zero_fills - self.collecting.read(),
            false => self.stats.faults,
        };
        self.budget.note_inflow(came, !self.deferred.is_empty());
        self.budget.look_again();
        if !self.backing.promised.is_empty() {
            self.backing.tend_promises()?;
            self.take_up_promised()?;
        }
        // Also of one that idles: others give its share.
        self.budget.pay(self.local_frames as u64);
        self.shrink()?;
        if self.backing.thaw_due(Instant::now()) {
            self.backing.thaw_some()?;
        }
        if self.backing.slots.is_stuck() {
            self.bring_home()?;
        }
        if self.backing.is_poor() {
            self.backing.count(&mut self.stats);
            self.budget.publish(&self.stats, &self.backing.detail, self.backing.ever_gone());
        }
        self.backing.tick()
    }

    pub(super) fn publish(&mut self, desk: &Desk) {
        self.stats.far_pages = self.table.far_pages();
        self.stats.local_frames = self.local_frames as u64;
        self.stats.pool_frames = self.tier.frames() as u64;
        self.stats.pool_pages = self.tier.pool.len() as u64;
        let replay = &mut self.learn.replay;
        (self.stats.foreseen, self.stats.foreseen_hits) = replay.usefulness();
        replay.make_room((self.stats.far_pages as usize + self.local_frames) / self.unit as usize);
        self.backing.count(&mut self.stats);
        self.budget.publish(&self.stats, &self.backing.detail, self.backing.ever_gone());
        *desk.doorbell.stats() = self.stats;
    }

    /// Whoever waits for a page that is no longer on its way looks again.
    pub(super) fn wake(&self, address: usize, bytes: usize) -> Result<()> {
        self.paged.wake(address, bytes).map_err(|e| system("wake who waits for dropped pages", e))
    }

    pub(super) fn pages(&self, address: usize, bytes: usize) -> Result<Range<u32>> {
        let end = address.checked_add(bytes);
        match end {
            Some(end)
                if address >= self.area.start
                    && end <= self.area.end
                    && bytes > 0
                    && address.is_multiple_of(PAGE_BYTES)
                    && bytes.is_multiple_of(PAGE_BYTES) =>
            {
                Ok(self.page_of(address)..self.page_of(end - PAGE_BYTES) + 1)
            }
            _ => Err(PagerError::OutsideFarMemory { address, bytes }.into()),
        }
    }

    pub(super) fn page_of(&self, address: usize) -> u32 {
        ((address - self.area.start) / PAGE_BYTES) as u32
    }

    pub(super) fn address_of(&self, page: u32) -> usize {
        self.area.start + page as usize * PAGE_BYTES
    }

    /// Keeps the list of mapped ranges (needed after a fork) free of `address..address + bytes`.
    pub(super) fn remove_range(&mut self, address: usize, bytes: usize) {
        let end = address + bytes;
        let overlapping: Vec<(usize, usize)> = self
            .ranges
            .range(..end)
            .rev()
            .map(|(&start, &length)| (start, length))
            .take_while(|(start, length)| start + length > address)
            .collect();
        for (start, length) in overlapping {
            self.ranges.remove(&start);
            if start < address {
                self.ranges.insert(start, address - start);
            }
            if start + length > end {
                self.ranges.insert(end, start + length - end);
            }
        }
    }

    /// Gives the budget's frames memory. Returns how many frames became free.
    pub(super) fn grow(&mut self) -> Result<usize> {
        if self.budget.pay(self.local_frames as u64) {
            return Ok(0);
        }
        let granted = self.budget.grow(GROW_FRAMES.min(self.empty.len() as u64)) as usize;
        if granted == 0 {
            self.ask_for_frames();
        }
        let mut filled = 0;
        while filled < granted {
            let Some((frame, frames)) = self.empty.take_run(granted - filled) else { break };
            if let Err(error) = self.paged.fill_frames(frame, frames) {
                self.empty.put(frame, frames);
                if self.local_frames + filled == 0 {
                    return Err(PagerError::NoLocalMemory((&error).into()).into());
                }
                break;
            }
            self.free.put(frame, frames);
            filled += frames;
        }
        self.budget.release((granted - filled) as u64);
        self.note_local(filled);
        Ok(filled)
    }

    /// A page enters the program's address space, or the queue of those that are in it.
    pub(super) fn note_mapped(&mut self, page: u32, entry: Entry, arrival: Arrival) {
        let protected = entry.protected();
        if !entry.queued() {
            self.mapped.push(page, arrival);
        }
        self.table.set(page, entry.with_state(PageState::Mapped).with_protected(protected).with_queued(true));
    }
}
