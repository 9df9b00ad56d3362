//! Threads that execute peers' operations on memory that is not there, and wait for it.
//!
//! Started when they are first needed, at most [`PAGERS_MAX`] of a node. What must stay behind what is decided by the sessions
//! ([`netvm_core::endpoint::Paging`]): here every task may be executed at once.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use netvm_core::endpoint::{Done, Job, JobId, Work};
use netvm_core::limits::PAGERS_MAX;
use netvm_core::segment::SegmentId;
use netvm_core::wire::Status;

use super::shared::lock;
use crate::connection::PeerSession;
use crate::memory::Memory;

/// A job and the memory it is about.
pub(crate) struct Task {
    pub(crate) peer: Weak<PeerSession>,
    pub(crate) segment: SegmentId,
    pub(crate) memory: Memory,
    pub(crate) job: Job,
}

#[derive(Default)]
pub(crate) struct Pagers {
    state: Mutex<State>,
    /// There is work, or an end.
    work: Condvar,
    /// A task has been executed.
    over: Condvar,
    /// What the jobs of all sessions hold.
    bytes: AtomicUsize,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    running: Vec<SegmentId>,
    threads: Vec<JoinHandle<()>>,
    idle: usize,
    stopped: bool,
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

    /// Has a task executed; false when there is nobody who could.
    pub(crate) fn push(self: &Arc<Self>, task: Task) -> bool {
        let mut state = lock(&self.state);
        if state.stopped {
            return false;
        }
        if state.idle <= state.tasks.len() && state.threads.len() < PAGERS_MAX {
            let pagers = Arc::clone(self);
            let thread = std::thread::Builder::new().name("netvm-paging".to_owned());
            match thread.spawn(move || pagers.run()) {
                Ok(thread) => state.threads.push(thread),
                Err(_) if state.threads.is_empty() => return false,
                Err(_) => {}
            }
        }
        state.tasks.push_back(task);
        self.work.notify_one();
        true
    }

    fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            if let Some(task) = state.tasks.pop_front() {
                let segment = task.segment;
                state.running.push(segment);
                drop(state);
                let Task { peer, memory, job, .. } = task;
                let id = job.id;
                let result = execute(&memory, job);
                state = lock(&self.state);
                if let Some(index) = state.running.iter().position(|&other| other == segment) {
                    state.running.swap_remove(index);
                }
                self.over.notify_all();
                drop(state);
                tell(&peer, id, result);
                state = lock(&self.state);
            } else if state.stopped {
                return;
            } else {
                state.idle += 1;
                state = wait(&self.work, state);
                state.idle -= 1;
            }
        }
    }

    /// Refuses the tasks of a segment that is not exported any more, and waits for those that have begun: then nobody touches it.
    pub(crate) fn take_back(&self, segment: SegmentId) {
        let mut state = lock(&self.state);
        let (gone, rest) =
            std::mem::take(&mut state.tasks).into_iter().partition(|task| task.segment == segment);
        state.tasks = rest;
        drop(state);
        let gone: VecDeque<Task> = gone;
        for task in gone {
            tell(&task.peer, task.job.id, Err(Status::NoHandle));
        }
        let mut state = lock(&self.state);
        while state.running.contains(&segment) {
            state = wait(&self.over, state);
        }
    }

    /// Ends the threads when they have executed what they have begun.
    pub(crate) fn stop(&self) {
        let mut state = lock(&self.state);
        state.stopped = true;
        state.tasks.clear();
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        self.work.notify_all();
        for thread in threads {
            let _ = thread.join();
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

/// Touches the memory, for as long as that takes.
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
