//! How the owner of shared memory makes sure that nobody else is using it any more, at the cost of two plain stores for each use.
//!
//! One gate for each process that the memory is shared with. Its threads have a word each, which is odd while the thread is inside;
//! each share of memory has a flag, which the owner sets to take it back. A thread makes its word odd and then looks at the flag; the
//! owner sets the flag and then looks at the words. Between the two steps each needs a full fence: the owner's is membarrier(2),
//! which executes one on behalf of all the other process's threads, so theirs need only keep the compiler from reordering.
//!
//! Memory that is not mapped by the other process but copied by the kernel (process_vm_writev) is taken back in the same way, and more: each
//! thread has its kernel read from its words what to copy ([`aim`]), so that the owner can [`Inside::cut`] a thread short that was stopped
//! between going in and copying, however much later it goes on.
//!
//! The words are in memory that the other process may write as it likes. It can delay the owner, who waits with a limit; no more.

use crate::words::Words;

#[cfg(not(test))]
use core::sync::atomic::{AtomicU64, Ordering};
#[cfg(test)]
use loom::sync::atomic::{AtomicU64, Ordering};

/// Threads of one process with a word each. Number 0 is for all others, one at a time.
pub const THREADS: usize = if cfg!(test) { 4 } else { 64 };
/// Most shares of one gate.
pub const SHARES: usize = if cfg!(test) { 2 } else { 256 };
/// Words that a gate takes.
pub const GATE_WORDS: usize = THREADS * STRIDE + SHARES + TOKEN_WORDS;
/// Words of the token, by which the owner's memory is known again.
pub const TOKEN_WORDS: usize = 2;
/// Where they begin.
pub const TOKEN: usize = THREADS * STRIDE + SHARES;

/// Words of different threads do not share a cache line.
const STRIDE: usize = if cfg!(test) { 4 } else { 8 };
/// Behind a thread's word: where it copies from or to, and how many bytes.
const AIM: usize = 2;
const FLAGS: usize = THREADS * STRIDE;

/// Thread number `thread` goes in; false (and it is not in) when the share has been taken back. `fence`, between the two steps, is
/// a full fence, or one for the compiler alone when the owner uses membarrier.
///
/// # Panics
/// For a thread or share beyond the bounds, or fewer than [`GATE_WORDS`] words.
#[inline]
#[must_use]
pub fn enter(gate: &impl Words, thread: usize, share: usize, fence: impl FnOnce()) -> bool {
    let words = gate.words();
    let word = &words[thread * STRIDE];
    // Only this thread writes the word.
    let before = word.load(Ordering::Relaxed);
    // Release: the owner may see this store and not the one of `leave` before it.
    word.store(before.wrapping_add(1), Ordering::Release);
    fence();
    // Acquire: the memory is touched after this.
    let open = words[FLAGS + share].load(Ordering::Acquire) == 0;
    if !open {
        leave(gate, thread);
    }
    open
}

/// What thread number `thread` copies next. Before it goes in: what the owner does about it comes later.
#[inline]
pub fn aim(words: &impl Words, thread: usize, address: u64, bytes: u64) -> &[AtomicU64; 2] {
    let aim = aimed(words, thread);
    aim[0].store(address, Ordering::Relaxed);
    aim[1].store(bytes, Ordering::Relaxed);
    aim
}

#[inline]
fn aimed(words: &impl Words, thread: usize) -> &[AtomicU64; 2] {
    words.words()[thread * STRIDE + AIM..].first_chunk().expect("a gate of GATE_WORDS words")
}

/// Thread number `thread` comes out. Release: the memory was touched before.
#[inline]
pub fn leave(words: &impl Words, thread: usize) {
    let word = &words.words()[thread * STRIDE];
    word.store(word.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
}

/// Changes thread number `thread`'s word without going in or out: on CPUs whose read-modify-writes are full fences the cheapest one.
#[inline]
pub fn touch(words: &impl Words, thread: usize) {
    words.words()[thread * STRIDE].fetch_add(2, Ordering::SeqCst);
}

/// The owner lets a new share in: nobody has its number now.
pub fn open(words: &impl Words, share: usize) {
    words.words()[FLAGS + share].store(0, Ordering::Release);
}

/// The owner takes a share back. Execute a full fence for all threads of the other process next (membarrier, or nothing but our own when
/// theirs are full), then wait with [`Inside`].
pub fn revoke(words: &impl Words, share: usize) {
    words.words()[FLAGS + share].store(1, Ordering::Release);
}

/// Who was inside when a share was taken back and may still use it.
#[derive(Clone, Debug)]
pub struct Inside {
    seen: [u64; THREADS],
}

impl Inside {
    /// Looks who is inside, after the fence.
    pub fn new(words: &impl Words) -> Self {
        // Acquire: pairs with `leave`.
        let seen = core::array::from_fn(|thread| words.words()[thread * STRIDE].load(Ordering::Acquire));
        Self { seen }
    }

    /// Has all of them copy nothing if they have not begun to.
    pub fn cut(&self, words: &impl Words) {
        for thread in (0..THREADS).filter(|&thread| self.seen[thread] % 2 == 1) {
            aimed(words, thread)[1].store(0, Ordering::Release);
        }
    }

    /// Whether all of them have come out, perhaps to go in again.
    pub fn is_over(&mut self, words: &impl Words) -> bool {
        let mut over = true;
        for (thread, seen) in self.seen.iter_mut().enumerate() {
            if *seen % 2 == 1 {
                if words.words()[thread * STRIDE].load(Ordering::Acquire) == *seen {
                    over = false;
                } else {
                    *seen = 0;
                }
            }
        }
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::PrivateWords;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, fence};
    use loom::thread;

    /// A gate, and memory that belongs to the owner alone once it is taken back.
    struct Shared {
        gate: PrivateWords,
        memory: AtomicU64,
    }

    fn shared() -> Arc<Shared> {
        Arc::new(Shared { gate: PrivateWords::new(GATE_WORDS), memory: AtomicU64::new(0) })
    }

    /// As membarrier: a full fence of each thread of the other process, at some moment of it. In the model all threads have one there.
    fn full() {
        fence(Ordering::SeqCst);
    }

    fn model(body: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(body);
    }

    /// The owner takes `share` back, then writes; nobody may write after that.
    fn take_back(shared: &Shared, share: usize) {
        revoke(&shared.gate, share);
        full();
        let mut inside = Inside::new(&shared.gate);
        while !inside.is_over(&shared.gate) {
            thread::yield_now();
        }
        shared.memory.store(100, Ordering::Relaxed);
    }

    fn write(shared: &Shared, number: usize, share: usize) -> bool {
        let inside = enter(&shared.gate, number, share, full);
        if inside {
            shared.memory.store(number as u64, Ordering::Relaxed);
            leave(&shared.gate, number);
        }
        inside
    }

    #[test]
    fn nobody_is_inside_after_it_was_taken_back() {
        model(|| {
            let shared = shared();
            let guest = shared.clone();
            let thread = thread::spawn(move || {
                let first = write(&guest, 1, 0);
                (first, write(&guest, 1, 0))
            });
            take_back(&shared, 0);
            let (first, second) = thread.join().unwrap();
            assert!(first || !second, "taken back is taken back");
            assert_eq!(shared.memory.load(Ordering::Relaxed), 100);
        });
    }

    #[test]
    fn two_threads_and_another_share() {
        model(|| {
            let shared = shared();
            let threads = [(1, 0), (2, 1)].map(|(number, share)| {
                let guest = shared.clone();
                thread::spawn(move || {
                    let inside = enter(&guest.gate, number, share, full);
                    if inside {
                        if share == 0 {
                            guest.memory.store(1, Ordering::Relaxed);
                        }
                        leave(&guest.gate, number);
                    }
                    inside
                })
            });
            take_back(&shared, 0);
            let [_, other] = threads.map(|thread| thread.join().unwrap());
            assert!(other, "the other share is still there");
            assert_eq!(shared.memory.load(Ordering::Relaxed), 100);
        });
    }

    #[test]
    fn what_was_written_inside_is_seen_by_the_owner() {
        model(|| {
            let shared = shared();
            let entered = Arc::new(AtomicBool::new(false));
            let (guest, mark) = (shared.clone(), entered.clone());
            let thread = thread::spawn(move || {
                if enter(&guest.gate, 3, 1, full) {
                    mark.store(true, Ordering::Relaxed);
                    guest.memory.store(3, Ordering::Relaxed);
                    leave(&guest.gate, 3);
                }
            });
            revoke(&shared.gate, 1);
            full();
            let mut inside = Inside::new(&shared.gate);
            while !inside.is_over(&shared.gate) {
                thread::yield_now();
            }
            let seen = shared.memory.load(Ordering::Relaxed);
            thread.join().unwrap();
            assert_eq!(seen == 3, entered.load(Ordering::Relaxed));
        });
    }

    #[test]
    fn who_was_stopped_inside_copies_nothing_when_it_goes_on() {
        model(|| {
            let shared = shared();
            let over = Arc::new(AtomicBool::new(false));
            let (guest, may_go_on) = (shared.clone(), over.clone());
            let thread = thread::spawn(move || {
                let target = aim(&guest.gate, 1, 64, 8);
                if enter(&guest.gate, 1, 0, full) {
                    // Stopped here for longer than the owner waits.
                    while !may_go_on.load(Ordering::Relaxed) {
                        thread::yield_now();
                    }
                    full();
                    if target[1].load(Ordering::Relaxed) > 0 {
                        guest.memory.store(1, Ordering::Relaxed);
                    }
                    leave(&guest.gate, 1);
                }
            });
            revoke(&shared.gate, 0);
            full();
            Inside::new(&shared.gate).cut(&shared.gate);
            shared.memory.store(100, Ordering::Relaxed);
            full();
            over.store(true, Ordering::Relaxed);
            thread.join().unwrap();
            assert_eq!(shared.memory.load(Ordering::Relaxed), 100);
        });
    }

    #[test]
    fn a_thread_that_comes_again_and_again_delays_nobody() {
        loom::model(|| {
            let gate = PrivateWords::new(GATE_WORDS);
            assert!(enter(&gate, 2, 1, full));
            revoke(&gate, 0);
            let mut inside = Inside::new(&gate);
            assert!(!inside.is_over(&gate));
            leave(&gate, 2);
            assert!(enter(&gate, 2, 1, full));
            assert!(inside.is_over(&gate) && inside.is_over(&gate));
            assert!(!enter(&gate, 3, 0, full));
            assert!(Inside::new(&gate).seen[3] == 2, "a refusal is not inside");
            open(&gate, 0);
            assert!(enter(&gate, 3, 0, full));
        });
    }
}
