//! Faults that the faulting thread serves itself: docs/design/pager.md, "Who serves a fault".
//!
//! The engine is the same as that of the pager's thread. Whoever has the turn (`core::combine`) works on it: a thread that faults, in its handler
//! of SIGBUS; a thread that calls; the pager's thread, which does what is left over.

use super::Pager;
use super::calls::Call;
use super::end::Desk;
use super::engine::{Engine, STARVED, TICK};
use super::errand::{Fetch, LEAVE, Leave, Outcome, WORDS};
use super::error::{PagerError, system};
use super::fault::gone;
use super::look::Awaited;
use super::range::this_process;
use super::seals::PageHash;
use super::shards::Stripes;
use crate::error::Result;
use netvm_core::combine::{Combine, ERRANDS, Post, Withdrawn};
use netvm_core::residency::PageState;
use netvm_sys::epoll::{EventFd, Timer};
use netvm_sys::fork::Process;
use netvm_sys::paged::Helper;
use netvm_sys::sigbus::{self, Server};
use netvm_sys::thread::{Gate, die, futex_wait, futex_wake, readable, without_signals};
use netvm_sys::uffd::{Fault, PAGE_BYTES};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// A waiter looks so often,
const SPINS: u32 = 20;
/// then lets others run so often in between, and then sleeps.
const YIELDS: u32 = 100;
/// It looks again after so long all the same.
const NAP: Duration = Duration::from_millis(1);
/// So long after the last thread has left work behind the pager's thread looks after it.
const LEFT_OVER: Duration = Duration::from_millis(1);
/// Faults of a thread at one place, one after the other, after which it is looked whether the page can be read at all.
const REPEATED: u32 = 3;
/// Looks at such a page: the program may drop it at any time.
const LOOKS: u32 = 3;
/// Eviction steps of the pager's thread between which others may have the turn.
const STEPS_MAX: u32 = 4;

/// What threads that fault, threads that call and the pager's thread share.
pub(super) struct InThread {
    /// Boxed, as a handler's weak reference keeps what is in here itself.
    combine: Box<Combine>,
    /// Whoever has the turn locks it, and finds nobody there.
    engine: Mutex<Box<Engine>>,
    /// What errands need of it,
    helper: Helper,
    hash: PageHash,
    /// and what has become of each, before its end is told.
    outcomes: Box<[[AtomicU64; WORDS]; ERRANDS]>,
    /// Wakes a holder that sleeps until answers come, or errands end.
    posted: EventFd,
    /// Wakes the pager's thread, unless the next thread that leaves work behind sets it anew before.
    left_over: Timer,
    /// When it was set last, in nanoseconds since `began`,
    set_ns: AtomicU64,
    /// and when the pager's thread looked last.
    looked_ns: AtomicU64,
    began: Instant,
    /// A child of a fork has no far memory; one of vfork(2) has its parent's.
    process: Process,
}

/// What a thread has that waits.
#[derive(Default)]
struct Waiting {
    looks: u32,
}

impl InThread {
    pub(super) fn new(mut engine: Box<Engine>) -> Result<Self> {
        engine.paged.open_memory().map_err(|e| system("open /proc/self/mem", e))?;
        Ok(Self {
            combine: Box::new(Combine::new()),
            helper: engine.paged.helper(),
            hash: engine.backing.seals.page_hash().clone(),
            outcomes: Box::new(std::array::from_fn(|_| Default::default())),
            engine: Mutex::new(engine),
            posted: EventFd::new().map_err(|e| system("eventfd", e))?,
            left_over: Timer::new().map_err(|e| system("timerfd_create", e))?,
            set_ns: AtomicU64::new(0),
            looked_ns: AtomicU64::new(0),
            began: Instant::now(),
            process: this_process()?,
        })
    }

    /// With the turn.
    fn engine(&self) -> MutexGuard<'_, Box<Engine>> {
        self.engine.try_lock().unwrap_or_else(|_| die("two threads have the turn of the pager"))
    }

    fn leave(&self, engine: MutexGuard<'_, Box<Engine>>) {
        if self.release(engine) {
            self.watch();
        }
    }

    /// Gives the turn back. True: work is left over.
    fn release(&self, mut engine: MutexGuard<'_, Box<Engine>>) -> bool {
        self.settle(&mut engine);
        let left = engine.is_under_way();
        drop(engine);
        self.combine.give_back(futex_wake);
        left
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// The pager's thread looks after what is left over, if nobody else does before: a clock that whoever leaves sets back. So it rarely wakes
    /// while threads fault all the time, and does soon after the last has.
    fn watch(&self) {
        let now_ns = self.now_ns();
        let since =
            |then: &AtomicU64| Duration::from_nanos(now_ns.saturating_sub(then.load(Ordering::Relaxed)));
        // A system call for each fault would be too many. It goes off in half of its time at the earliest; after a tick without a look, whoever faults.
        let at_least = if since(&self.looked_ns) < TICK { LEFT_OVER / 2 } else { 2 * LEFT_OVER };
        if since(&self.set_ns) >= at_least {
            self.set_ns.store(now_ns, Ordering::Relaxed);
            self.left_over.set(LEFT_OVER);
        }
    }

    fn settle(&self, engine: &mut Engine) {
        self.combine.settle(|wanted| engine.is_settled(posted(wanted).address), futex_wake);
    }

    fn wait(&self, waiting: &mut Waiting, post: Option<&Post>) {
        waiting.looks += 1;
        if waiting.looks < SPINS {
            std::hint::spin_loop();
        } else if waiting.looks < SPINS + YIELDS {
            std::thread::yield_now();
        } else {
            if let Some(bell) = self.combine.doze(post) {
                futex_wait(self.combine.bell(), bell, Some(NAP));
            }
            self.combine.awake();
        }
    }

    /// The pager's thread looks soon.
    pub(super) fn wake(&self) {
        self.left_over.set(LEFT_OVER);
    }

    /// Works on the engine as soon as nobody else does. Signals are blocked.
    fn with<R>(&self, run: impl FnOnce(&mut Engine) -> R) -> R {
        let (result, left) = self.with_turn(run);
        if left {
            self.watch();
        }
        result
    }

    /// The same; true when work is left over, of which nobody knows yet.
    fn with_turn<R>(&self, run: impl FnOnce(&mut Engine) -> R) -> (R, bool) {
        let mut waiting = Waiting::default();
        while !self.combine.try_take() {
            self.wait(&mut waiting, None);
        }
        let mut engine = self.engine();
        let Ok(result) = catch_unwind(AssertUnwindSafe(|| run(&mut engine))) else {
            die("a call about far memory could not be carried out, for a mistake in netvm");
        };
        (result, self.release(engine))
    }

    /// A thread of the program: has `call` carried out.
    pub(super) fn call(&self, call: Call, desk: &Desk) -> Result<()> {
        if !self.process.is_this() {
            let error = std::io::ErrorKind::Unsupported.into();
            return Err(system("use far memory in a child of a fork, which has none", error));
        }
        without_signals(|| {
            netvm_sys::thread::uncancelled(|| {
                self.with(|engine| {
                    let carried_out = engine.take_all_back(self).and_then(|()| engine.carry_out(call, desk));
                    match carried_out.and_then(|result| engine.backing.push().map(|()| result)) {
                        Ok(result) => result,
                        Err(error) => engine.end(&error),
                    }
                })
            })
        })
    }

    /// What a call has left at the doorbell.
    pub(super) fn latest<T>(&self, call: Call, desk: &Desk, read: impl FnOnce() -> T) -> T {
        without_signals(|| {
            // A child of a fork has what was there last.
            let _ = self.call(call, desk);
            read()
        })
    }

    /// With the turn: serves a fault of this thread, and what others post meanwhile. `known`: it has been taken up; `surely`: by the surest way.
    fn lead(&self, fault: Fault, known: bool, surely: bool) {
        let mut engine = self.engine();
        let led = match engine.lead(self, fault, known, surely) {
            Ok(led) => led,
            Err(error) => engine.end(&error),
        };
        self.leave(engine);
        if led.starved {
            // Whoever calls has the turn meanwhile; then the thread faults again.
            std::thread::sleep(STARVED);
        }
        // If that fails the thread faults again, and it is no errand then.
        if let Some(mut fetch) = led.fetch {
            let outcome = fetch.run(&self.hash, |address, contents, protect| {
                self.helper.install(address, contents, protect).0
            });
            FAILED.set(outcome.has_failed());
            self.end_errand(fetch.number, outcome);
        }
        if let Some(leave) = led.leave {
            self.end_errand(LEAVE, leave.run(&self.helper));
        }
    }

    fn end_errand(&self, number: usize, outcome: Outcome) {
        for (told, word) in self.outcomes[number].iter().zip(outcome.words()) {
            told.store(word, Ordering::Relaxed);
        }
        if self.combine.end_errand(number) {
            self.posted.signal();
        }
    }

    /// The body of the pager's thread: what nobody waits for.
    pub(super) fn tend(&self, desk: &Desk, ready: &Gate) {
        Engine::begin(desk);
        ready.open(0);
        let mut links = Vec::new();
        let (mut served, mut ticked) = (0, Instant::now());
        loop {
            self.looked_ns.store(self.now_ns(), Ordering::Relaxed);
            links.clear();
            links.push(readable(&self.left_over));
            let (next, left) = self.with_turn(|engine| {
                if engine.has_ended {
                    return None;
                }
                let more = match engine.tidy(self, desk, &mut ticked) {
                    Ok(more) => more,
                    Err(error) => engine.end(&error),
                };
                let busy = std::mem::replace(&mut served, engine.stats.faults) != engine.stats.faults;
                if more {
                    return Some(Next { busy, timeout: Some(Duration::ZERO) });
                }
                if engine.is_starved() {
                    return Some(Next { busy, timeout: Some(STARVED) });
                }
                if let Some(neighbours) = &engine.neighbours {
                    links.push(readable(neighbours.event(engine.number)));
                }
                if !busy {
                    // Nobody else hears the lenders now.
                    engine.backing.poll_fds(&mut links);
                }
                let often =
                    busy || engine.is_under_way() || engine.budget.is_shared() || engine.backing.is_poor();
                let timeout = if often { Some(TICK) } else { engine.backing.patience_when_idle() };
                let timeout = engine.collecting.patience(engine.backing.slots.live(), timeout);
                Some(Next { busy, timeout })
            });
            let Some(next) = next else { return };
            // The links tell of it, or whoever faults next takes it up.
            if left && next.busy {
                self.watch();
            }
            // Only EFAULT, EINVAL and ENOMEM are left: then it looks more often.
            if netvm_sys::thread::poll(&mut links, next.timeout).is_err() {
                std::thread::sleep(LEFT_OVER);
            }
            self.left_over.take();
        }
    }
}

/// What is left for a thread to do that has had the turn.
#[derive(Default)]
struct Led {
    fetch: Option<Fetch>,
    leave: Option<Leave>,
    /// No lender is there for what must leave before its page can come.
    starved: bool,
}

/// What the pager's thread does after a look.
struct Next {
    /// Threads have faulted since the last one.
    busy: bool,
    timeout: Option<Duration>,
}

/// Registered with the handler; the list of those is never freed, so it must not keep what has ended.
pub(super) struct Faults {
    pub(super) stripes: Stripes,
    pub(super) shards: Vec<Weak<InThread>>,
}

impl Server for Faults {
    fn serve(&self, address: usize, write: bool) -> bool {
        let Some(all) = self.shards[self.stripes.shard_of(address)].upgrade() else { return false };
        // A child has no far memory: what is there now is somebody else's.
        if !all.process.is_this() {
            return false;
        }
        let (address, offset) = (address & !(PAGE_BYTES - 1), address & (PAGE_BYTES - 1));
        let times = LAST.with(|last| {
            let (before, times) = last.get();
            let times = if before == address { times.saturating_add(1) } else { 0 };
            last.set((address, times));
            times
        });
        if times >= REPEATED && all.with(|engine| engine.is_broken(address)) {
            return false;
        }
        all.serve(Fault { address, offset, write, thread: this_thread(), ..Fault::default() });
        true
    }

    fn has_ended(&self) -> bool {
        self.shards.iter().all(|shard| shard.strong_count() == 0)
    }
}

thread_local! {
    /// The last errand of this thread has failed: what it wants next is no errand, and comes over the session if it has the turn for that.
    static FAILED: Cell<bool> = const { Cell::new(false) };
    /// Where this thread faulted last, and how often it had there before without a fault elsewhere.
    static LAST: Cell<(usize, u32)> = const { Cell::new((0, 0)) };
}

impl InThread {
    /// Returns when the access to this page can be repeated.
    fn serve(&self, fault: Fault) {
        let (all, surely) = (self, FAILED.take());
        let mut waiting = Waiting::default();
        let (post, asleep) = loop {
            if all.combine.try_take() {
                return all.lead(fault, false, surely);
            }
            match all.combine.post(to_post(fault)) {
                Some(posted) => break posted,
                None => all.wait(&mut waiting, None),
            }
        };
        if asleep {
            all.posted.signal();
        }
        let mut waiting = Waiting::default();
        loop {
            if all.combine.is_done(&post) {
                return;
            }
            if all.combine.try_take() {
                return match all.combine.withdraw(post) {
                    Withdrawn::Done => all.leave(all.engine()),
                    was => all.lead(fault, was == Withdrawn::Taken, surely),
                };
            }
            all.wait(&mut waiting, Some(&post));
        }
    }
}

/// Faults of the area come to these from now on.
pub(super) fn install(pager: &Pager, shards: &[Arc<InThread>]) -> Result<()> {
    let shards = shards.iter().map(Arc::downgrade).collect();
    let faults = Box::new(Faults { stripes: pager.stripes, shards });
    sigbus::serve(pager.area(), faults).map_err(|e| system("take SIGBUS", e))
}

impl Engine {
    /// Whether who waits for a page can go on: it is there, or has to be asked for again.
    fn is_settled(&self, address: usize) -> bool {
        match self.table.get(self.page_of(address)).state() {
            PageState::Mapped => true,
            PageState::Fetching | PageState::Writing => false,
            _ => self.deferred.is_empty() || !self.deferred.iter().any(|fault| fault.address == address),
        }
    }

    /// Transfers or faults wait for something.
    fn is_under_way(&self) -> bool {
        self.in_flight() > 0
            || self.backing.pending() > 0
            || self.errands.are_under_way()
            || !self.deferred.is_empty()
    }

    /// Whether a page that should be there cannot be read: what is there is not ours, or broken. Nobody evicts it meanwhile.
    fn is_broken(&mut self, address: usize) -> bool {
        match self.table.get(self.page_of(address)).state() {
            PageState::Mapped => (0..LOOKS).all(|_| {
                let there = self.paged.install_zero_if_missing(address).or_else(gone);
                there.is_err() || !self.paged.is_readable(address)
            }),
            PageState::Untouched if !self.is_mapped(address) => !self.paged.is_readable(address),
            _ => false,
        }
    }

    /// Takes up which errands have ended.
    fn take_errands_back(&mut self, all: &InThread) -> Result<()> {
        let mut ended = all.combine.ended_errands();
        if ended != 0 {
            // Who waits for an errand's page looks for it as for an answer.
            self.look.came(Awaited::Answer, Instant::now);
        }
        while ended != 0 {
            let number = ended.trailing_zeros() as usize;
            ended &= ended - 1;
            let words = std::array::from_fn(|index| all.outcomes[number][index].load(Ordering::Relaxed));
            self.take_back(number, words)?;
        }
        Ok(())
    }

    /// Waits until none is under way. Nobody begins one meanwhile: that takes the turn.
    fn take_all_back(&mut self, all: &InThread) -> Result<()> {
        let mut looks = 0;
        loop {
            self.take_errands_back(all)?;
            if !self.errands.are_under_way() {
                return Ok(());
            }
            looks += 1;
            if looks < SPINS {
                std::hint::spin_loop();
            } else if looks < SPINS + YIELDS {
                std::thread::yield_now();
            } else {
                // What has been posted, or comes from lenders, is not for now: whoever does the errand may need this CPU.
                self.poll_fds.clear();
                self.poll_fds.push(readable(&all.posted));
                if all.combine.fall_asleep_for_errands() {
                    let slept = netvm_sys::thread::poll(&mut self.poll_fds, Some(NAP));
                    slept.map_err(|e| system("poll", e))?;
                }
                all.combine.wake_up();
                all.posted.take();
            }
        }
    }

    /// Serves a fault until its page is there, or its thread can fetch it by itself.
    fn lead(&mut self, all: &InThread, fault: Fault, known: bool, surely: bool) -> Result<Led> {
        self.take_errands_back(all)?;
        if !known {
            self.tier.note_fault(&mut self.stats);
            self.errands.has_failed = surely;
            self.errands.page = (!surely).then(|| self.page_of(fault.address));
            self.fault(fault)?;
            (self.errands.page, self.errands.has_failed) = (None, false);
            if let Some(fetch) = self.errands.fetch.take() {
                self.errands.takes_leave = true;
                let went_on = self.go_on(false);
                self.errands.takes_leave = false;
                went_on?;
                self.backing.keep_looking()?;
                return Ok(Led { fetch: Some(fetch), leave: self.errands.leave.take(), starved: false });
            }
        }
        // What has been asked for only now cannot have come.
        let mut look = known;
        loop {
            self.take_errands_back(all)?;
            all.combine.take_posts(|other| self.fault(posted(other)))?;
            let (moved, evicted) = self.go_on(look)?;
            if self.is_settled(fault.address) {
                return Ok(Led::default());
            }
            if self.is_starved() && self.backing.is_stranded() {
                // Others that wait for this page look again, too.
                self.deferred.retain(|other| other.address != fault.address);
                return Ok(Led { starved: true, ..Led::default() });
            }
            all.settle(self);
            if !evicted && !moved {
                self.wait_for_answer(all)?;
            }
            look = true;
        }
    }

    /// What a fault does for those before and after it: takes up what has come (at least if it is to `look`), and evicts. Whether something had come,
    /// and whether something was evicted.
    pub(super) fn go_on(&mut self, look: bool) -> Result<(bool, bool)> {
        self.backing.push()?;
        let moved = (look || self.writing_frames > 0 || self.backing.has_ended()) && self.progress()?;
        if !self.deferred.is_empty() && self.in_flight() == 0 {
            self.retry_deferred()?;
        }
        if moved {
            self.look.came(Awaited::Answer, Instant::now);
        }
        // While an answer is on its way; or else somebody has to do it.
        let evicted = self.evict_ahead()? | self.tend_pool()?;
        self.make_spare()?;
        self.backing.push()?;
        Ok((moved, evicted))
    }

    /// Nothing has come: lets others run, or sleeps until something comes.
    fn wait_for_answer(&mut self, all: &InThread) -> Result<()> {
        let starved = self.is_starved();
        if !starved && self.look.next(Awaited::Answer, Instant::now).is_some() {
            std::thread::yield_now();
            return self.backing.keep_looking();
        }
        self.sleep(all, if starved { STARVED } else { self.backing.patience() })?;
        if starved {
            self.tick()?;
        }
        self.backing.keep_looking()
    }

    /// Until an answer comes, somebody posts, or an errand ends.
    fn sleep(&mut self, all: &InThread, timeout: Duration) -> Result<()> {
        self.poll_fds.clear();
        self.poll_fds.push(readable(&all.posted));
        self.backing.poll_fds(&mut self.poll_fds);
        if all.combine.fall_asleep() {
            let ready = netvm_sys::thread::poll(&mut self.poll_fds, Some(timeout));
            all.combine.wake_up();
            if ready.map_err(|e| system("poll", e))? == 0 {
                self.backing.check_answers()?;
            }
            if self.poll_fds[0].revents != 0 {
                all.posted.take();
            }
        } else {
            all.combine.wake_up();
        }
        Ok(())
    }

    /// What was left over: answers that nobody waits for, eviction, signs of life. True: there is more.
    fn tidy(&mut self, all: &InThread, desk: &Desk, ticked: &mut Instant) -> Result<bool> {
        self.take_errands_back(all)?;
        all.combine.take_posts(|other| self.fault(posted(other)))?;
        self.backing.push()?;
        self.progress()?;
        if !self.deferred.is_empty() && self.in_flight() == 0 {
            self.retry_deferred()?;
        }
        let mut steps = 0;
        while steps < STEPS_MAX && (self.evict_ahead()? | self.tend_pool()?) {
            steps += 1;
        }
        self.make_spare()?;
        self.backing.push()?;
        self.collect()?;
        if let Some(neighbours) = &self.neighbours {
            neighbours.hear(self.number);
            self.give_if_asked()?;
        }
        // What has been sent ends without anything having to arrive.
        while self.writing_frames > 0 && self.progress()? {}
        self.backing.keep_looking()?;
        if ticked.elapsed() >= TICK {
            *ticked = Instant::now();
            self.backing.check_answers()?;
            self.tick()?;
            self.publish(desk);
        }
        self.shrink_on()?;
        Ok(steps == STEPS_MAX || self.backing.has_ended() || self.shrinks_on.is_some())
    }
}

/// Where the number of a thread is in what is posted: user space has no addresses there.
const THREAD_SHIFT: u32 = 48;

/// The number that is posted for a fault: its address, in whose lowest bit is whether it is a write, and its thread.
fn to_post(fault: Fault) -> u64 {
    let address = (fault.address + fault.offset) as u64 & !1;
    u64::from(fault.thread) << THREAD_SHIFT | address | u64::from(fault.write)
}

/// A fault from that.
fn posted(wanted: u64) -> Fault {
    let address = (wanted & !(u64::MAX << THREAD_SHIFT) & !1) as usize;
    Fault {
        address: address & !(PAGE_BYTES - 1),
        offset: address & (PAGE_BYTES - 1),
        write: wanted & 1 != 0,
        thread: (wanted >> THREAD_SHIFT) as u32,
        ..Fault::default()
    }
}

/// The calling thread's number in 16 bits, never 0: two that share one share what is known of their faults.
fn this_thread() -> u32 {
    thread_local!(static NUMBER: Cell<u16> = const { Cell::new(0) });
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set((netvm_sys::thread::number() as u16).max(1));
        }
        number.get().into()
    })
}

/// Why a pager cannot be set up like this.
pub(super) fn refused(config: &super::PagerConfig) -> Option<PagerError> {
    let why = if config.run.is_some() {
        "the program's system calls would fail where they meet a page that is not there"
    } else if config.design == Some(super::FrameDesign::Copy) {
        "it needs pages that are moved"
    } else {
        return None;
    };
    Some(PagerError::FaultPath { why })
}

#[cfg(test)]
mod tests;
