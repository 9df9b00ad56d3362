//! Waiting for a peer's notifications: the local side of the board of a segment.
//!
//! ```no_run
//! # fn main() -> netvm::Result<()> {
//! use netvm::node::{Node, Rights};
//! use netvm::notify::Notify;
//!
//! let consumer = Node::new()?;
//! let address = consumer.listen("127.0.0.1:0")?;
//! let memory = Node::memory(1 << 20)?;
//! let (key, notifications) = consumer.export_notified("queue", memory, Rights::ReadWrite, 16)?;
//!
//! let producer = Node::new()?;
//! let region = producer.connect(&address)?.import("queue", &key)?;
//! region.write_notify(4096, b"item", Notify::Count { number: 3 })?;
//!
//! assert!(notifications.wait(3, None));
//! // The item, and everything that was written before it, is in the consumer's memory.
//! notifications.acknowledge(3);
//! # Ok(()) }
//! ```
//!
//! A number has an event count (signals are counted, and taken by [`Notifications::acknowledge`]) and a one-shot value (posted, and taken by
//! [`Notifications::reset`]); a program uses the one that fits. docs/design/one-sided.md tells the promises and the races.

pub(crate) mod queue;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use netvm_core::limits::{NOTIFICATIONS_MAX, QUEUE_PLACES_MAX};
use netvm_core::notify::{Wake, board_words};
use netvm_core::words::PrivateWords;
use netvm_sys::cpu::idle_ns_of;
use netvm_sys::epoll::EventFd;
use netvm_sys::memfd::Memfd;
use netvm_sys::thread::{futex_wait_shared, futex_wake_shared};
use netvm_sys::words::SharedWords;

pub use netvm_core::notify::Notify;

use crate::error::{Error, Result};
use crate::node::{Shared, lock};
use crate::shm::BoardWords;
use queue::{Account, Queue};

type Board = netvm_core::notify::Board<BoardWords>;

/// Nobody spins longer than this before he blocks: about what blocking and waking cost together.
const SPIN_NS_MAX: u64 = 50_000;
/// Who does not spin, as waits were long, tries it once in so many waits.
const TRY_EVERY: u32 = 32;
/// Who spins longer lets others run in between.
const YIELD_AFTER_NS: u64 = 5_000;
/// Whose notifications come through shared memory looks at the links only so often: that takes ten times as long as to look at the board.
const LINKS_EVERY_NS: u64 = 20_000;
/// Calls of one handler before the others have their turn.
const CALLS_MAX: usize = 64;

/// The notifications of one exported segment. Cloning is cheap; all clones are the same board.
#[derive(Clone)]
pub struct Notifications {
    owner: Arc<Owner>,
}

/// Ends the dispatcher when nobody can signal or look any more.
struct Owner(Arc<Inner>);

impl Drop for Owner {
    fn drop(&mut self) {
        let handlers = std::mem::take(&mut lock(&self.0.dispatch).handlers);
        // What they own may lock whatever it likes when it goes.
        drop(handlers);
        self.0.wake(self.0.board.ring());
    }
}

struct Inner {
    board: Board,
    descriptor: OnceLock<EventFd>,
    /// How long waits lately took, in nanoseconds: an exponential mean.
    wait_ns_mean: AtomicU64,
    /// Notifications that this process has put on the board, for peers on its links too.
    delivered: AtomicU64,
    /// Waits without spinning.
    slept: AtomicU32,
    /// The last one that somebody spun for came through shared memory.
    from_memory: AtomicBool,
    /// Where `wait_any` looks first.
    next: AtomicU32,
    dispatch: Mutex<Dispatch>,
    queue: OnceLock<Queue>,
    /// What brings notifications: whoever spins drives it himself.
    node: Weak<Shared>,
}

#[derive(Default)]
struct Dispatch {
    handlers: HashMap<u16, Arc<Handler>>,
    /// The dispatcher, while it runs.
    thread: Option<ThreadId>,
}

type Call = Box<dyn FnMut(Notify) + Send>;

struct Handler {
    /// Locked while it is called, so that removing it waits for the call.
    call: Mutex<Option<Call>>,
    disarmed: AtomicBool,
}

impl std::fmt::Debug for Notifications {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Notifications").field("numbers", &self.numbers()).finish_non_exhaustive()
    }
}

impl Notifications {
    pub(crate) fn new(numbers: u32, node: Weak<Shared>) -> Self {
        let words = board_words(numbers.min(NOTIFICATIONS_MAX));
        // Where peers on this host may map it, if it has any use for them.
        let shared = if words > 0 { SharedWords::new(words).ok() } else { None };
        let words = shared.map_or_else(|| BoardWords::Private(PrivateWords::new(words)), BoardWords::Shared);
        let inner = Inner {
            board: Board::of_words(words),
            descriptor: OnceLock::new(),
            wait_ns_mean: AtomicU64::new(SPIN_NS_MAX / 4),
            delivered: AtomicU64::new(0),
            slept: AtomicU32::new(0),
            from_memory: AtomicBool::new(false),
            next: AtomicU32::new(0),
            dispatch: Mutex::default(),
            queue: OnceLock::new(),
            node,
        };
        Self { owner: Arc::new(Owner(Arc::new(inner))) }
    }

    fn inner(&self) -> &Arc<Inner> {
        &self.owner.0
    }

    fn board(&self) -> &Board {
        &self.inner().board
    }

    /// The file of the board, if peers may map it.
    pub(crate) fn file(&self) -> Option<&Memfd> {
        match self.board().words() {
            BoardWords::Shared(words) => words.file(),
            BoardWords::Private(_) => None,
        }
    }

    /// A peer has signalled on the board that it has mapped, and found that somebody watches the descriptor.
    pub(crate) fn ring_descriptor(&self) {
        self.inner().wake(Wake { sleepers: false, descriptor: true });
    }

    /// Has everybody look again, whatever the bell says: who had the board mapped may have died when it had signalled and woken nobody.
    pub(crate) fn wake_all(&self) {
        let _ = self.board().ring();
        self.inner().wake(Wake { sleepers: true, descriptor: true });
    }

    /// How many numbers there are, from 0 on.
    pub fn numbers(&self) -> u32 {
        self.board().numbers()
    }

    /// Gives each importer, and this process, so many places in a queue, in which [`Notify::Queue`] puts number and value: kept one by
    /// one and in order, unlike counts and posts. Before this nobody has any. Open it before the segment's key is given away.
    ///
    /// # Errors
    /// [`Error::Other`] for other than 1 to 4096 places, and when it is open already.
    pub fn open_queue(&self, places: u32) -> Result<()> {
        if !(1..=QUEUE_PLACES_MAX).contains(&places) {
            return Err(Error::Other(format!("a queue has 1 to {QUEUE_PLACES_MAX} places, not {places}")));
        }
        let opened = self.inner().queue.set(Queue::new(places));
        opened.map_err(|_| Error::Other("the queue is open already".to_owned()))
    }

    /// Takes the first notification of the queue. Of several callers one gets each.
    pub fn remove(&self) -> Option<(u16, NonZeroU32)> {
        self.inner().queue.get()?.remove()
    }

    /// As [`Notifications::remove`], and waits for one; `None` after `timeout`.
    pub fn wait_remove(&self, timeout: Option<Duration>) -> Option<(u16, NonZeroU32)> {
        let inner = self.inner();
        let queue = inner.queue.get()?;
        inner.wait(timeout, inner.spin_ns(), |_| queue.remove())
    }

    /// How many notifications are in the queue.
    pub fn queued(&self) -> usize {
        self.inner().queue.get().map_or(0, Queue::len)
    }

    pub(crate) fn queue(&self) -> Option<&Queue> {
        self.inner().queue.get()
    }

    /// Notifies as a peer would; false when there is no such number, or no place in the queue.
    pub fn notify(&self, notify: Notify) -> bool {
        self.notify_from(notify, None)
    }

    /// As [`Notifications::notify`], on somebody's account.
    pub(crate) fn notify_from(&self, notify: Notify, account: Option<&Arc<Account>>) -> bool {
        // First: who finds it knows.
        self.inner().delivered.fetch_add(1, Ordering::Release);
        if matches!(notify, Notify::Queue { .. }) {
            // Before the bell, as for numbers.
            let is_number = u32::from(notify.number()) < self.numbers();
            if !is_number || !self.inner().queue.get().is_some_and(|queue| queue.push(notify, account)) {
                return false;
            }
        }
        let wake = self.board().deliver(notify);
        if let Some(wake) = wake {
            self.inner().wake(wake);
        }
        wake.is_some()
    }

    /// Signals of an event count that nobody has acknowledged.
    pub fn test(&self, number: u16) -> u64 {
        self.board().pending(number)
    }

    /// The value posted under a number, which stays.
    pub fn value(&self, number: u16) -> Option<NonZeroU32> {
        self.board().value(number)
    }

    /// Takes one signal of an event count; false when there is none. Of several callers one gets each.
    pub fn acknowledge(&self, number: u16) -> bool {
        self.board().acknowledge(number, 1) == 1
    }

    /// Takes up to `most` signals of an event count; returns how many.
    pub fn acknowledge_many(&self, number: u16, most: u64) -> u64 {
        self.board().acknowledge(number, most)
    }

    /// Takes the value posted under a number. Of several callers one gets it.
    pub fn reset(&self, number: u16) -> Option<NonZeroU32> {
        self.board().reset(number)
    }

    /// Waits until a number has a signal or a value; spins first if waits lately were short. False after `timeout`.
    pub fn wait(&self, number: u16, timeout: Option<Duration>) -> bool {
        let ready = |board: &Board| board.is_pending(number).then_some(());
        self.inner().wait(timeout, self.inner().spin_ns(), ready).is_some()
    }

    /// As [`Notifications::wait`], and never blocks: the quickest on a CPU of its own, and a waste of it otherwise.
    pub fn spin(&self, number: u16, timeout: Option<Duration>) -> bool {
        let ready = |board: &Board| board.is_pending(number).then_some(());
        self.inner().wait(timeout, u64::MAX, ready).is_some()
    }

    /// Waits until an event count has `signals` that nobody has acknowledged. False after `timeout`.
    pub fn wait_count(&self, number: u16, signals: u64, timeout: Option<Duration>) -> bool {
        let ready = |board: &Board| (board.pending(number) >= signals).then_some(());
        self.inner().wait(timeout, self.inner().spin_ns(), ready).is_some()
    }

    /// Waits until one of the numbers has a signal or a value, and returns it; numbers take turns. `None` after `timeout`.
    pub fn wait_any(&self, range: Range<u32>, timeout: Option<Duration>) -> Option<u16> {
        let inner = self.inner();
        let start = inner.next.load(Ordering::Relaxed);
        let ready = |board: &Board| board.find(range.clone(), start);
        let found = inner.wait(timeout, inner.spin_ns(), ready)?;
        inner.next.store(u32::from(found) + 1, Ordering::Relaxed);
        Some(found)
    }

    /// One of the numbers that has a signal or a value; numbers take turns.
    pub fn test_any(&self, range: Range<u32>) -> Option<u16> {
        let next = &self.inner().next;
        let found = self.board().find(range, next.load(Ordering::Relaxed))?;
        next.store(u32::from(found) + 1, Ordering::Relaxed);
        Some(found)
    }

    /// A descriptor for epoll, poll or select: readable after a notification that came after [`Notifications::rearm`], which must
    /// be called first. It is one for all numbers, for one waiter.
    ///
    /// # Errors
    /// [`Error::System`] when no descriptor is left.
    pub fn descriptor(&self) -> Result<BorrowedFd<'_>> {
        let place = &self.inner().descriptor;
        if place.get().is_none() {
            let made = EventFd::new().map_err(|error| Error::system("make an event descriptor", &error))?;
            // Another thread may have been first; then ours is closed again.
            let _ = place.set(made);
        }
        match place.get() {
            Some(descriptor) => Ok(descriptor.as_fd()),
            None => Err(Error::Other("an event descriptor has vanished".to_owned())),
        }
    }

    /// Makes the descriptor unreadable until the next notification. False when one of `range` or of the queue is pending already: then take it,
    /// and do not sleep.
    #[must_use]
    pub fn rearm(&self, range: Range<u32>) -> bool {
        if let Some(descriptor) = self.inner().descriptor.get() {
            descriptor.take();
        }
        // In this order: a notification is either found, or comes later and makes the descriptor readable.
        self.board().watch();
        self.board().find(range, 0).is_none() && self.queued() == 0
    }

    /// Calls `handler` once for each signal and each posted value of `number`, also those that are pending now, on a thread that
    /// all handlers of this segment share. It replaces the handler before.
    ///
    /// Whoever acknowledges or resets the number meanwhile takes signals away from the handler. A handler that panics is disarmed.
    ///
    /// # Errors
    /// [`Error::Bounds`] when there is no such number; [`Error::System`] when no thread is to be had.
    pub fn arm(&self, number: u16, handler: impl FnMut(Notify) + Send + 'static) -> Result<()> {
        if u32::from(number) >= self.numbers() {
            return Err(Error::Bounds {
                offset: u64::from(number),
                bytes: 1,
                len: u64::from(self.numbers()),
            });
        }
        self.disarm(number);
        let inner = self.inner();
        let handler =
            Arc::new(Handler { call: Mutex::new(Some(Box::new(handler))), disarmed: AtomicBool::new(false) });
        let mut dispatch = lock(&inner.dispatch);
        if dispatch.thread.is_none() {
            let dispatcher = Arc::clone(inner);
            let thread = std::thread::Builder::new().name("netvm-notify".to_owned());
            let thread = thread.spawn(move || dispatcher.dispatch());
            let thread = thread.map_err(|error| Error::system("start a thread", &error))?;
            dispatch.thread = Some(thread.thread().id());
        }
        let replaced = dispatch.handlers.insert(number, handler);
        inner.board.handle(number, true);
        drop(dispatch);
        // Two threads armed the number at once: the one before goes as if disarmed.
        if let Some(replaced) = replaced {
            inner.retire(&replaced);
        }
        // The dispatcher looks at what is pending already.
        inner.wake(inner.board.ring());
        Ok(())
    }

    /// Removes the handler of a number; false when there is none. When this returns it does not run and is not called again (when
    /// it disarms itself, its present call is the last). Signals that it has not been called for stay pending.
    pub fn disarm(&self, number: u16) -> bool {
        let mut dispatch = lock(&self.inner().dispatch);
        let removed = dispatch.handlers.remove(&number);
        if removed.is_some() {
            self.board().handle(number, false);
        }
        drop(dispatch);
        if let Some(handler) = &removed {
            self.inner().retire(handler);
        }
        removed.is_some()
    }
}

impl Inner {
    fn wake(&self, wake: Wake) {
        if wake.sleepers {
            futex_wake_shared(self.board.bell());
        }
        if wake.descriptor
            && let Some(descriptor) = self.descriptor.get()
        {
            descriptor.signal();
        }
    }

    /// How long the next wait spins: twice what waits lately took, and not at all when that is more than blocking costs.
    fn spin_ns(&self) -> u64 {
        let mean = self.wait_ns_mean.load(Ordering::Relaxed);
        if !has_others() {
            return 0;
        }
        if mean <= SPIN_NS_MAX {
            return (2 * mean + 1000).min(SPIN_NS_MAX);
        }
        // Two that answer each other may wait long only because both sleep.
        let tries = self.slept.fetch_add(1, Ordering::Relaxed) % TRY_EVERY == TRY_EVERY - 1;
        if tries { SPIN_NS_MAX } else { 0 }
    }

    fn wait<R>(
        &self,
        timeout: Option<Duration>,
        spin_ns: u64,
        ready: impl Fn(&Board) -> Option<R>,
    ) -> Option<R> {
        if let Some(found) = ready(&self.board) {
            return Some(found);
        }
        let start = Instant::now();
        let found = self.spin_and_block(start, timeout, spin_ns, ready);
        // A wait of any length counts as a few times the longest spin at most, so that the mean finds back quickly.
        let waited = (start.elapsed().as_nanos() as u64).min(4 * SPIN_NS_MAX);
        let mean = self.wait_ns_mean.load(Ordering::Relaxed);
        let tried = mean > SPIN_NS_MAX && waited <= spin_ns && spin_ns <= SPIN_NS_MAX;
        let mean = if tried { waited } else { mean - mean / 8 + waited / 8 };
        self.wait_ns_mean.store(mean, Ordering::Relaxed);
        found
    }

    fn spin_and_block<R>(
        &self,
        start: Instant,
        timeout: Option<Duration>,
        spin_ns: u64,
        ready: impl Fn(&Board) -> Option<R>,
    ) -> Option<R> {
        let late = |now: Duration| timeout.is_some_and(|timeout| now >= timeout);
        let node = if spin_ns > 0 { self.node.upgrade() } else { None };
        let mut polled = false;
        let delivered = self.delivered.load(Ordering::Acquire);
        let mut poll_at =
            if self.from_memory.load(Ordering::Relaxed) { u128::from(LINKS_EVERY_NS) } else { 0 };
        let mut now = Duration::ZERO;
        let yield_after_ns = if several_cpus() || spin_ns == u64::MAX { YIELD_AFTER_NS } else { 0 };
        loop {
            for _ in 0..16 {
                if let Some(found) = ready(&self.board) {
                    let from_memory = self.delivered.load(Ordering::Acquire) == delivered;
                    self.from_memory.store(from_memory, Ordering::Relaxed);
                    return Some(found);
                }
                std::hint::spin_loop();
            }
            if let Some(node) = &node
                && now.as_nanos() >= poll_at
            {
                node.poll();
                polled = true;
                if poll_at > 0 {
                    poll_at = now.as_nanos() + u128::from(LINKS_EVERY_NS);
                }
            }
            now = start.elapsed();
            if late(now) {
                return None;
            }
            if now.as_nanos() >= u128::from(spin_ns) {
                break;
            }
            // The thread that will notify us may be waiting for our CPU.
            if now.as_nanos() >= u128::from(yield_after_ns) {
                std::thread::yield_now();
            }
        }
        if let Some(node) = node.filter(|_| polled) {
            node.stop_polling();
        }
        loop {
            let seen = self.board.prepare();
            if let Some(found) = ready(&self.board) {
                return Some(found);
            }
            let now = start.elapsed();
            if late(now) {
                return None;
            }
            // The kernel refuses times beyond the end of its clock; an hour, and then again, is as good.
            let left = timeout.map(|timeout| (timeout - now).min(Duration::from_secs(3600)));
            futex_wait_shared(self.board.bell(), seen, left);
        }
    }

    /// The dispatcher's thread. It ends when nothing is armed.
    fn dispatch(&self) {
        let mut armed = Vec::new();
        loop {
            let seen = self.board.prepare_dispatcher();
            {
                let mut dispatch = lock(&self.dispatch);
                if dispatch.handlers.is_empty() {
                    dispatch.thread = None;
                    self.board.end_dispatcher();
                    return;
                }
                let pending = dispatch.handlers.iter().filter(|(number, _)| self.board.is_pending(**number));
                armed.extend(pending.map(|(&number, handler)| (number, Arc::clone(handler))));
            }
            if armed.is_empty() {
                futex_wait_shared(self.board.bell(), seen, None);
            }
            self.board.end_dispatcher();
            for (number, handler) in armed.drain(..) {
                if !handler.run(number, &self.board) {
                    let mut dispatch = lock(&self.dispatch);
                    if dispatch.handlers.get(&number).is_some_and(|now| Arc::ptr_eq(now, &handler)) {
                        dispatch.handlers.remove(&number);
                        self.board.handle(number, false);
                    }
                }
            }
        }
    }

    /// Makes sure that a handler which has left the table is not called again.
    fn retire(&self, handler: &Handler) {
        handler.disarmed.store(true, Ordering::Release);
        if lock(&self.dispatch).thread == Some(std::thread::current().id()) {
            // Called by a handler: this one, which then holds the lock itself, or another one, and then this one does not run.
            if let Ok(mut call) = handler.call.try_lock() {
                *call = None;
            }
        } else {
            let call = lock(&handler.call).take();
            drop(call);
        }
    }
}

impl Handler {
    /// Calls it for what is pending; false when it is not armed any more.
    fn run(&self, number: u16, board: &Board) -> bool {
        let mut guard = match self.call.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Only whoever disarms it holds the lock.
            Err(TryLockError::WouldBlock) => return false,
        };
        let Some(call) = guard.as_mut() else { return false };
        for _ in 0..CALLS_MAX {
            if self.disarmed.load(Ordering::Acquire) {
                return false;
            }
            // Taken before the call: exactly one call for each signal, whoever else takes.
            let notify = if board.acknowledge(number, 1) == 1 {
                Notify::Count { number }
            } else if let Some(value) = board.reset(number) {
                Notify::Post { number, value }
            } else {
                return true;
            };
            if std::panic::catch_unwind(AssertUnwindSafe(|| call(notify))).is_err() {
                *guard = None;
                return false;
            }
        }
        true
    }
}

/// Whether others run while this thread does: on another CPU of this machine, be it none of ours.
fn has_others() -> bool {
    static OTHERS: OnceLock<bool> = OnceLock::new();
    let online = || (0..64).filter(|cpu| idle_ns_of(*cpu).is_some()).nth(1).is_some();
    *OTHERS.get_or_init(|| several_cpus() || online())
}

/// Whether the thread that asks first may run on several.
fn several_cpus() -> bool {
    static SEVERAL: OnceLock<bool> = OnceLock::new();
    *SEVERAL.get_or_init(|| std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1))
}

#[cfg(test)]
mod tests;
