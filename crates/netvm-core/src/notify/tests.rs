//! The board under loom: every interleaving of signallers, takers and sleepers, and every value that the memory model lets them see.

extern crate std;

use super::*;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use std::vec::Vec;

const ONE: Notify = Notify::Count { number: 0 };

fn post(value: u32) -> Notify {
    Notify::Post { number: 0, value: NonZeroU32::new(value).unwrap() }
}

/// A board with what the driver adds: a futex, and a descriptor.
struct Driven {
    board: Board,
    /// What the kernel does between looking at the word and sleeping is one step.
    futex: Mutex<()>,
    woken: Condvar,
    readable: Mutex<bool>,
}

impl Driven {
    fn new(numbers: u32) -> Arc<Self> {
        Arc::new(Self {
            board: Board::new(numbers),
            futex: Mutex::new(()),
            woken: Condvar::new(),
            readable: Mutex::new(false),
        })
    }

    fn wake(&self, wake: Wake) {
        if wake.sleepers {
            let _kernel = self.futex.lock().unwrap();
            self.woken.notify_all();
        }
        if wake.descriptor {
            *self.readable.lock().unwrap() = true;
        }
    }

    fn deliver(&self, notify: Notify) {
        self.wake(self.board.deliver(notify).unwrap());
    }

    /// As FUTEX_WAIT.
    fn sleep(&self, seen: u32) {
        let kernel = self.futex.lock().unwrap();
        if self.board.bell().load(Ordering::Relaxed) == seen {
            drop(self.woken.wait(kernel).unwrap());
        }
    }

    /// Waits until `ready`; loom reports a sleep from which nobody wakes us.
    fn wait(&self, ready: impl Fn(&Board) -> bool) {
        loop {
            let seen = self.board.prepare();
            if ready(&self.board) {
                return;
            }
            self.sleep(seen);
        }
    }
}

/// All interleavings with up to so many involuntary switches between threads: two show every race between two steps.
fn model(switches: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(switches);
    builder.check(body);
}

#[test]
fn no_wake_up_is_lost() {
    model(2, || {
        let driven = Driven::new(1);
        let data = Arc::new(AtomicU32::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (driven, data) = (driven.clone(), data.clone());
                thread::spawn(move || {
                    data.fetch_add(1, Ordering::Relaxed);
                    driven.deliver(ONE);
                })
            })
            .collect();
        driven.wait(|board| board.pending(0) == 2);
        assert_eq!(data.load(Ordering::Relaxed), 2, "a signal is seen after what it tells of");
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn two_sleepers_of_different_numbers_are_both_woken() {
    model(2, || {
        let driven = Driven::new(2);
        let other = driven.clone();
        let sleeper = thread::spawn(move || other.wait(|board| board.is_pending(1)));
        let other = driven.clone();
        let signaller = thread::spawn(move || {
            other.deliver(Notify::Count { number: 0 });
            other.deliver(Notify::Count { number: 1 });
        });
        driven.wait(|board| board.is_pending(0));
        sleeper.join().unwrap();
        signaller.join().unwrap();
    });
}

#[test]
fn every_signal_is_taken_once() {
    model(3, || {
        let driven = Driven::new(1);
        driven.deliver(ONE);
        let other = driven.clone();
        let signaller = thread::spawn(move || other.deliver(ONE));
        let other = driven.clone();
        let taker = thread::spawn(move || other.board.acknowledge(0, 1));
        let taken = driven.board.acknowledge(0, 2);
        // Looking never underflows, whatever is seen.
        let seen = driven.board.pending(0);
        assert!(seen <= 2);
        signaller.join().unwrap();
        let taken = taken + taker.join().unwrap();
        assert_eq!(taken + driven.board.pending(0), 2);
        assert_eq!(driven.board.signals(0), 2);
    });
}

#[test]
fn a_value_is_taken_once_and_the_last_one_stays() {
    model(3, || {
        let driven = Driven::new(1);
        let other = driven.clone();
        let poster = thread::spawn(move || {
            other.deliver(post(1));
            other.deliver(post(2));
        });
        let other = driven.clone();
        let taker = thread::spawn(move || other.board.reset(0));
        let mine = driven.board.reset(0);
        poster.join().unwrap();
        let last = [mine, taker.join().unwrap(), driven.board.reset(0)];
        let times = |value: u32| last.iter().flatten().filter(|taken| taken.get() == value).count();
        assert!(times(1) <= 1);
        assert_eq!(times(2), 1);
        assert_eq!(driven.board.value(0), None);
    });
}

#[test]
fn the_descriptor_tells_whatever_the_watcher_has_not_seen() {
    model(3, || {
        let driven = Driven::new(1);
        let other = driven.clone();
        let signaller = thread::spawn(move || {
            other.deliver(ONE);
            other.deliver(ONE);
        });
        let mut taken = 0;
        for _ in 0..2 {
            *driven.readable.lock().unwrap() = false;
            driven.board.watch();
            taken += driven.board.acknowledge(0, u64::MAX);
        }
        signaller.join().unwrap();
        let readable = *driven.readable.lock().unwrap();
        assert!(taken == 2 || readable, "signals are pending and nobody was told");
        assert_eq!(taken + driven.board.acknowledge(0, u64::MAX), 2);
    });
}

/// A dispatcher as in `netvm::notify`: it takes a signal only while a handler is armed, under the lock that removing it needs.
#[test]
fn arming_and_disarming_lose_no_signal_and_double_none() {
    model(2, || {
        let driven = Driven::new(1);
        // (armed, ended, calls)
        let handler = Arc::new(Mutex::new((false, false, 0)));
        let (other, table) = (driven.clone(), handler.clone());
        let dispatcher = thread::spawn(move || {
            loop {
                let seen = other.board.prepare();
                {
                    let mut table = table.lock().unwrap();
                    if table.0 {
                        table.2 += other.board.acknowledge(0, 1);
                    }
                    if table.1 {
                        return;
                    }
                    if table.0 && other.board.is_pending(0) {
                        continue;
                    }
                }
                other.sleep(seen);
            }
        });
        let other = driven.clone();
        let signaller = thread::spawn(move || other.deliver(ONE));
        handler.lock().unwrap().0 = true;
        driven.wake(driven.board.ring());
        let calls = {
            let mut table = handler.lock().unwrap();
            table.0 = false;
            table.2
        };
        signaller.join().unwrap();
        handler.lock().unwrap().1 = true;
        driven.wake(driven.board.ring());
        dispatcher.join().unwrap();
        assert_eq!(handler.lock().unwrap().2, calls, "called after it was disarmed");
        assert_eq!(calls + driven.board.pending(0), 1);
    });
}

#[test]
fn numbers_are_found_in_turn() {
    loom::model(|| {
        let board = Board::new(10);
        for number in [2, 5, 9] {
            let _ = board.deliver(Notify::Count { number }).unwrap();
        }
        assert_eq!((board.find(0..10, 0), board.find(0..10, 3)), (Some(2), Some(5)));
        assert_eq!(
            (board.find(0..9, 6), board.find(3..5, 0), board.find(6..100, 50)),
            (Some(2), None, Some(9))
        );
        assert_eq!(board.find(20..30, 0), None);
        assert_eq!(board.deliver(Notify::Count { number: 10 }), None);
        assert_eq!((board.pending(10), board.acknowledge(10, 1), board.reset(10)), (0, 0, None));
    });
}

#[test]
fn wake_ups_coalesce() {
    loom::model(|| {
        let board = Board::new(1);
        assert_eq!(board.deliver(ONE), Some(Wake::default()), "nobody sleeps");
        let seen = board.prepare();
        board.watch();
        assert_eq!(board.deliver(ONE), Some(Wake { sleepers: true, descriptor: true }));
        assert_eq!(board.deliver(ONE), Some(Wake::default()), "they are on their way");
        assert_ne!(board.bell().load(Ordering::Relaxed), seen, "a late sleeper does not sleep");
    });
}

/// Number 1 gets a handler while others signal: its dispatcher is woken for it, and for no other number.
#[test]
fn a_dispatcher_is_woken_for_what_has_a_handler() {
    model(3, || {
        let driven = Driven::new(2);
        let signaller = {
            let driven = Arc::clone(&driven);
            thread::spawn(move || {
                driven.deliver(ONE);
                driven.deliver(Notify::Count { number: 1 });
            })
        };
        driven.board.handle(1, true);
        loop {
            let seen = driven.board.prepare_dispatcher();
            if driven.board.acknowledge(1, 1) == 1 {
                break;
            }
            driven.sleep(seen);
            driven.board.end_dispatcher();
        }
        signaller.join().unwrap();
        // It is still said to sleep.
        assert_eq!(driven.board.deliver(ONE), Some(Wake::default()));
        assert!(driven.board.deliver(Notify::Count { number: 1 }).unwrap().sleepers);
        assert!(driven.board.ring().sleepers);
        driven.board.handle(1, false);
        assert_eq!(driven.board.deliver(Notify::Count { number: 1 }), Some(Wake::default()));
        driven.board.end_dispatcher();
        assert_eq!(driven.board.ring(), Wake::default());
    });
}
