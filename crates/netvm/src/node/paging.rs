//! Threads that execute peers' operations on memory that is not there, and wait for it.
//!
//! Started when they are first needed, at most [`PAGERS_MAX`] of a node. What must stay behind what is decided by the sessions
//! ([`netvm_core::endpoint::Paging`]): here every task may be executed at once.
//!
//! A task is first *brought in*, without touching the memory, which may take for ever, and then executed. Until it is executed it can be
//! given up: its thread is lost until the memory comes, touches nothing then, and another takes its place.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use netvm_core::atomic::AtomicOp;
use netvm_core::endpoint::{Done, Job, JobId, Work};
use netvm_core::limits::{PAGERS_LOST_MAX, PAGERS_MAX};
use netvm_core::segment::SegmentId;
use netvm_core::wire::Status;
use netvm_sys::residency::PAGE_BYTES;
use netvm_sys::shared::SharedSlice;

use super::shared::lock;
use crate::connection::PeerSession;
use crate::memory::Memory;

/// A job and the memory it is about.
pub(crate) struct Task {
    pub(crate) peer: Weak<PeerSession>,
    pub(crate) segment: SegmentId,
    pub(crate) memory: Memory,
    pub(crate) job: Job,
    pub(crate) since: Instant,
}

#[derive(Default)]
pub(crate) struct Pagers {
    state: Mutex<State>,
    /// There is work, or an end.
    work: Condvar,
    /// A task has been executed, or a thread has ended.
    over: Condvar,
    /// What the jobs of all sessions hold.
    bytes: AtomicUsize,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    running: Vec<Running>,
    /// Number of the next task that is begun.
    next: u64,
    /// Threads that are not lost, and what the others wait for.
    threads: usize,
    lost: Vec<Lost>,
    idle: usize,
    stopped: bool,
}

/// A task that a thread has begun.
struct Running {
    number: u64,
    peer: Weak<PeerSession>,
    id: JobId,
    segment: SegmentId,
    since: Instant,
    pages: Range<usize>,
    /// Its memory is being touched: it cannot be given up any more.
    is_touching: bool,
    /// And belongs to somebody who may free it when nobody uses it.
    is_foreign: bool,
}

/// A task that was given up while a thread waited for its memory.
struct Lost {
    number: u64,
    /// Numbers of pages that did not come in time. Nobody else needs to wait for them; none if the task was not wanted any more.
    pages: Range<usize>,
}

type Peer = Weak<PeerSession>;

/// Whom to tell that a task was given up.
type Told = (Peer, JobId);

impl State {
    fn begin(&mut self, task: &Task) -> u64 {
        let number = self.next;
        self.next += 1;
        self.running.push(Running {
            number,
            peer: Weak::clone(&task.peer),
            id: task.job.id,
            segment: task.segment,
            since: task.since,
            pages: pages(task),
            is_touching: false,
            is_foreign: !task.memory.is_kept(),
        });
        number
    }

    /// The memory of a task is there: whether it is to be executed still.
    fn touch(&mut self, number: u64) -> bool {
        let begun = self.running.iter_mut().find(|running| running.number == number);
        begun.map(|running| running.is_touching = true).is_some()
    }

    /// Whether a task needs pages that have not come when others waited for them.
    fn is_hopeless(&self, task: &Task) -> bool {
        let pages = pages(task);
        self.lost.iter().any(|lost| lost.pages.start < pages.end && pages.start < lost.pages.end)
    }

    /// Gives up what can be: since its memory has not come in time if it `is_late`, otherwise since nobody wants it.
    fn give_up(&mut self, is_late: bool, which: impl Fn(&Peer, SegmentId, Instant) -> bool) -> Vec<Told> {
        let mut told = Vec::new();
        self.running.retain(|running| {
            let goes = !running.is_touching && which(&running.peer, running.segment, running.since);
            if goes {
                told.push((Weak::clone(&running.peer), running.id));
                let pages = if is_late { running.pages.clone() } else { 0..0 };
                self.lost.push(Lost { number: running.number, pages });
            }
            !goes
        });
        self.threads -= told.len();
        self.tasks.retain(|task| {
            let goes = which(&task.peer, task.segment, task.since);
            if goes {
                told.push((Weak::clone(&task.peer), task.job.id));
            }
            !goes
        });
        told
    }
}

impl Pagers {
    /// What the jobs of all sessions hold, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// A session's jobs hold `now` bytes instead of `before`.
    pub(crate) fn account(&self, before: usize, now: usize) {
        if before != now {
            // Wraps around where it becomes less; the sum does not.
            self.bytes.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
        }
    }

    /// Has a task executed.
    ///
    /// # Errors
    /// What to refuse it with when there is nobody who could.
    pub(crate) fn push(self: &Arc<Self>, task: Task) -> Result<(), Status> {
        let mut state = lock(&self.state);
        if state.stopped {
            return Err(Status::Stopping);
        }
        if state.is_hopeless(&task) {
            return Err(Status::Away);
        }
        state.tasks.push_back(task);
        self.grow(&mut state);
        if state.threads == 0 {
            state.tasks.pop_back();
            return Err(if state.lost.is_empty() { Status::Full } else { Status::Away });
        }
        self.work.notify_one();
        Ok(())
    }

    /// Starts threads for tasks that nobody is free for.
    fn grow(self: &Arc<Self>, state: &mut State) {
        while state.idle < state.tasks.len()
            && state.threads < PAGERS_MAX
            && state.lost.len() < PAGERS_LOST_MAX
        {
            let pagers = Arc::clone(self);
            let thread = std::thread::Builder::new().name("netvm-paging".to_owned());
            // It ends by itself, or never.
            if thread.spawn(move || pagers.run()).is_err() {
                return;
            }
            state.threads += 1;
        }
    }

    fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            if let Some(task) = state.tasks.pop_front() {
                let number = state.begin(&task);
                drop(state);
                bring(&task);
                state = lock(&self.state);
                if !state.touch(number) {
                    drop(state);
                    drop(task);
                    state = lock(&self.state);
                    state.lost.retain(|lost| lost.number != number);
                    if state.threads >= PAGERS_MAX {
                        return;
                    }
                    state.threads += 1;
                    continue;
                }
                drop(state);
                let Task { peer, memory, job, .. } = task;
                let id = job.id;
                let result = execute(&memory, job);
                drop(memory);
                state = lock(&self.state);
                state.running.retain(|running| running.number != number);
                self.over.notify_all();
                drop(state);
                tell(&peer, id, result);
                drop(peer);
                state = lock(&self.state);
            } else if state.stopped {
                state.threads -= 1;
                self.over.notify_all();
                return;
            } else {
                state.idle += 1;
                state = wait(&self.work, state);
                state.idle -= 1;
            }
        }
    }

    /// Refuses the tasks of a segment that is not exported any more, and waits until `deadline` for those that are being executed: true
    /// when nobody touches it, for ever.
    pub(crate) fn take_back(self: &Arc<Self>, segment: SegmentId, deadline: Instant) -> bool {
        self.refuse(Status::NoHandle, false, |_, other, _| other == segment);
        let touches = |state: &mut State| state.running.iter().any(|running| running.segment == segment);
        self.wait_while(touches, deadline)
    }

    /// Executes nothing more for a session that has ended, with that session locked. Waits for what is being executed, since that memory is
    /// somebody else's next; not for longer than `limit`: a page may have left again.
    pub(crate) fn forget(self: &Arc<Self>, peer: &Peer, limit: Duration) {
        let mut state = lock(&self.state);
        drop(state.give_up(false, |other, _, _| other.ptr_eq(peer)));
        self.grow(&mut state);
        drop(state);
        let touches = |state: &mut State| state.running.iter().any(|running| running.peer.ptr_eq(peer));
        self.wait_while(touches, Instant::now() + limit);
    }

    /// Refuses tasks that have waited for longer than `limit`.
    pub(crate) fn expire(self: &Arc<Self>, limit: Duration) {
        self.refuse(Status::Away, true, |_, _, since| since.elapsed() >= limit);
    }

    fn refuse(
        self: &Arc<Self>,
        status: Status,
        is_late: bool,
        which: impl Fn(&Peer, SegmentId, Instant) -> bool,
    ) {
        let mut state = lock(&self.state);
        let told = state.give_up(is_late, which);
        self.grow(&mut state);
        drop(state);
        for (peer, id) in told {
            tell(&peer, id, Err(status));
        }
    }

    /// False when `deadline` has come first.
    fn wait_while(&self, is_so: impl Fn(&mut State) -> bool, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.over.wait_timeout_while(lock(&self.state), left, is_so);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Ends the threads, and waits until `deadline` for what is being executed; longer where somebody else may free that memory next.
    pub(crate) fn stop(&self, deadline: Instant) {
        let mut state = lock(&self.state);
        state.stopped = true;
        let _ = state.give_up(false, |_, _, _| true);
        drop(state);
        self.work.notify_all();
        if !self.wait_while(|state| state.threads > 0, deadline) {
            let touches = |state: &mut State| state.running.iter().any(|running| running.is_foreign);
            drop(self.over.wait_while(lock(&self.state), touches));
        }
    }
}

fn wait<'a>(condition: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    condition.wait(state).unwrap_or_else(PoisonError::into_inner)
}

fn tell(peer: &Weak<PeerSession>, id: JobId, result: Result<Done, Status>) {
    if let Some(peer) = peer.upgrade() {
        peer.paged(id, result);
    }
}

/// What a task touches, and whether it writes.
fn part(task: &Task) -> Option<(SharedSlice, bool)> {
    let offset = usize::try_from(task.job.offset).ok()?;
    let (bytes, writes) = match &task.job.work {
        Work::Write(bytes) => (bytes.len(), true),
        Work::Read(bytes) => (*bytes as usize, false),
        Work::Atomic(atomic) => (atomic.width as usize, atomic.op != AtomicOp::Load),
    };
    Some((task.memory.shared().sub(offset, bytes)?, writes))
}

/// Numbers of the pages that it touches.
fn pages(task: &Task) -> Range<usize> {
    part(task).map_or(0..0, |(part, _)| {
        let start = part.as_ptr().addr();
        start / PAGE_BYTES..(start + part.len()).div_ceil(PAGE_BYTES)
    })
}

/// Waits until a task's memory is there. It may be gone again when it is touched: then the thread waits there.
fn bring(task: &Task) {
    if let Some((part, writes)) = part(task) {
        task.memory.bring(part, writes);
    }
}

/// Touches the memory.
fn execute(memory: &Memory, job: Job) -> Result<Done, Status> {
    let shared = memory.shared();
    let offset = usize::try_from(job.offset).map_err(|_| Status::OutOfBounds)?;
    match job.work {
        Work::Write(bytes) => shared.write_from(offset, &bytes).map(|()| Done::Written).ok_or(Status::Fault),
        Work::Read(bytes) => {
            let mut copy = vec![0; bytes as usize];
            shared.read_into(offset, &mut copy).map(|()| Done::Read(copy)).ok_or(Status::Fault)
        }
        Work::Atomic(atomic) => super::exports::execute(shared, offset, &atomic).map(Done::Word),
    }
}
