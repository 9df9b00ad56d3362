//! Many threads, one of which at a time works for all of them: flat combining (Hendler, Incze, Shavit, Tzafrir: *Flat combining and the
//! synchronization-parallelism tradeoff*, SPAA 2010).
//!
//! Who wants something and gets the turn does it; who does not get it *posts* what it wants, and waits. The holder *takes* what was
//! posted, and *settles* what is done. Who waits tries for the turn, too: with it, it goes on with what it wanted by itself, which the holder
//! before may have taken or not ([`Combine::withdraw`]). Nothing is lost when the holder leaves in between: whoever still waits
//! gets the turn.
//!
//! A holder may also give whoever wants something an *errand*: a part of the work that needs no turn, and whose end the next holder is told of.
//!
//! Waiters and the holder may sleep. Each side first says that it is going to and then looks once more; the other first changes what is
//! looked at and then looks whether somebody sleeps. Between the two steps each has a full fence, so one of the two sees the other.

#[cfg(not(test))]
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(test)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Most threads that can have something posted; more try again.
pub const POSTS: usize = if cfg!(test) { 2 } else { 64 };

/// Most errands that can be under way.
pub const ERRANDS: usize = 64;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// The holder sleeps, and is to be woken by whoever posts.
const ASLEEP: u32 = 2;

/// See the module's text. What is wanted is a number.
#[derive(Debug)]
pub struct Combine {
    turn: AtomicU32,
    /// What waiters sleep on.
    bell: AtomicU32,
    sleepers: AtomicU32,
    /// A bit for each place that belongs to a waiter,
    claimed: AtomicU64,
    /// whose number waits for the holder,
    posted: AtomicU64,
    /// was taken by a holder, written by holders only,
    taken: AtomicU64,
    /// or is settled.
    done: AtomicU64,
    /// A bit for each errand that has ended since a holder last looked.
    ended: AtomicU64,
    wanted: [AtomicU64; POSTS],
}

impl Default for Combine {
    fn default() -> Self {
        Self::new()
    }
}

/// A place for a number. It belongs to one waiter.
#[derive(Debug)]
pub struct Post(usize);

/// What became of a number that was withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Withdrawn {
    /// No holder has seen it.
    New,
    /// A holder took it, and has not settled it.
    Taken,
    /// It is done.
    Done,
}

impl Combine {
    /// Nobody has the turn.
    pub fn new() -> Self {
        Self {
            turn: AtomicU32::new(FREE),
            bell: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            claimed: AtomicU64::new(0),
            posted: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            done: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            wanted: core::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// The turn, if nobody has it. Acquire: what the holder before did is seen.
    #[inline]
    #[must_use]
    pub fn try_take(&self) -> bool {
        self.turn.load(Ordering::Relaxed) == FREE
            && self.turn.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Gives the turn back. `wake` wakes all who sleep on [`Combine::bell`].
    #[inline]
    pub fn give_back(&self, wake: impl FnOnce(&AtomicU32)) {
        self.turn.store(FREE, Ordering::Release);
        self.ring(wake);
    }

    #[inline]
    fn ring(&self, wake: impl FnOnce(&AtomicU32)) {
        // Pairs with the fence of `doze`.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            self.bell.fetch_add(1, Ordering::Relaxed);
            wake(&self.bell);
        }
    }

    /// Posts a number; `None` when all places are used. True: the holder sleeps, and must be woken.
    #[must_use]
    pub fn post(&self, wanted: u64) -> Option<(Post, bool)> {
        let mut claimed = self.claimed.load(Ordering::Relaxed);
        let place = loop {
            let place = (!claimed).trailing_zeros() as usize;
            if place >= POSTS {
                return None;
            }
            // Acquire pairs with the Release of whoever gave the place up.
            match self.claimed.compare_exchange(
                claimed,
                claimed | 1 << place,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => break place,
                Err(now) => claimed = now,
            }
        };
        self.wanted[place].store(wanted, Ordering::Relaxed);
        // Publishes the number.
        self.posted.fetch_or(1 << place, Ordering::Release);
        // Pairs with the fence of `fall_asleep`.
        fence(Ordering::SeqCst);
        Some((Post(place), self.turn.load(Ordering::Relaxed) == ASLEEP))
    }

    /// Whether it is settled. Then the post is of no use any more.
    #[inline]
    #[must_use]
    pub fn is_done(&self, post: &Post) -> bool {
        // Acquire: what the holder did for us is seen.
        if self.done.load(Ordering::Acquire) >> post.0 & 1 == 0 {
            return false;
        }
        self.done.fetch_and(!(1 << post.0), Ordering::Relaxed);
        self.claimed.fetch_and(!(1 << post.0), Ordering::Release);
        true
    }

    /// By the holder: its own post is of no use any more, it goes on by itself.
    pub fn withdraw(&self, post: Post) -> Withdrawn {
        let bit = 1 << post.0;
        let was = if self.posted.fetch_and(!bit, Ordering::Relaxed) & bit != 0 {
            Withdrawn::New
        } else if self.taken.load(Ordering::Relaxed) & bit != 0 {
            self.taken.fetch_and(!bit, Ordering::Relaxed);
            Withdrawn::Taken
        } else {
            self.done.fetch_and(!bit, Ordering::Relaxed);
            Withdrawn::Done
        };
        self.claimed.fetch_and(!bit, Ordering::Release);
        was
    }

    /// By the holder: whether something was posted that no holder has taken.
    #[inline]
    #[must_use]
    pub fn has_posts(&self) -> bool {
        self.posted.load(Ordering::Relaxed) != 0
    }

    /// By the holder: takes all that was posted.
    ///
    /// # Errors
    /// The first of `serve`, after which what was posted is lost.
    pub fn take_posts<E>(&self, mut serve: impl FnMut(u64) -> Result<(), E>) -> Result<(), E> {
        if !self.has_posts() {
            return Ok(());
        }
        // Acquire: the numbers are seen.
        let posted = self.posted.swap(0, Ordering::Acquire);
        self.taken.fetch_or(posted, Ordering::Relaxed);
        self.each(posted, |_, wanted| serve(wanted))
    }

    /// By the holder: tells the waiters whose number is settled. Returns whether others are left.
    pub fn settle(&self, mut is_settled: impl FnMut(u64) -> bool, wake: impl FnOnce(&AtomicU32)) -> bool {
        let taken = self.taken.load(Ordering::Relaxed);
        if taken == 0 {
            return false;
        }
        let mut settled = 0;
        let _ = self.each(taken, |bit, wanted| {
            settled |= if is_settled(wanted) { bit } else { 0 };
            Ok::<(), ()>(())
        });
        if settled != 0 {
            self.taken.fetch_and(!settled, Ordering::Relaxed);
            // From here on the places are the waiters'.
            self.done.fetch_or(settled, Ordering::Release);
            self.ring(wake);
        }
        taken != settled
    }

    fn each<E>(&self, bits: u64, mut run: impl FnMut(u64, u64) -> Result<(), E>) -> Result<(), E> {
        let mut left = bits;
        while left != 0 {
            let place = left.trailing_zeros() as usize;
            left &= left - 1;
            run(1 << place, self.wanted[place].load(Ordering::Relaxed))?;
        }
        Ok(())
    }

    /// A waiter is going to sleep until [`Combine::bell`] is no longer what this returns; `None`: it must not, there is something to do.
    /// [`Combine::awake`] follows in both cases.
    #[must_use]
    pub fn doze(&self, post: Option<&Post>) -> Option<u32> {
        let bell = self.bell.load(Ordering::Relaxed);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence of `ring`.
        fence(Ordering::SeqCst);
        let is_done = post.is_some_and(|post| self.done.load(Ordering::Relaxed) >> post.0 & 1 != 0);
        let is_free = self.turn.load(Ordering::Relaxed) == FREE;
        (!is_done && !is_free).then_some(bell)
    }

    /// The waiter has slept, or not.
    pub fn awake(&self) {
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// What waiters sleep on.
    pub fn bell(&self) -> &AtomicU32 {
        &self.bell
    }

    /// By whoever does an errand, which a holder has given it, without the turn: it has ended. True: the holder sleeps, and must be woken.
    ///
    /// # Panics
    /// Beyond [`ERRANDS`].
    #[must_use]
    pub fn end_errand(&self, errand: usize) -> bool {
        assert!(errand < ERRANDS, "no such errand");
        // Release: what was done is seen.
        self.ended.fetch_or(1 << errand, Ordering::Release);
        // Pairs with the fence of `fall_asleep`.
        fence(Ordering::SeqCst);
        self.turn.load(Ordering::Relaxed) == ASLEEP
    }

    /// By the holder: the errands that have ended since this was last asked, a bit for each.
    #[inline]
    #[must_use]
    pub fn ended_errands(&self) -> u64 {
        // Most have nothing to tell.
        if self.ended.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        self.ended.swap(0, Ordering::Acquire)
    }

    /// The holder is going to sleep, and to be woken when something is posted or an errand ends; false: something has been, or has. [`Combine::wake_up`]
    /// follows in both cases.
    #[must_use]
    pub fn fall_asleep(&self) -> bool {
        self.turn.store(ASLEEP, Ordering::Relaxed);
        // Pairs with the fences of `post` and `end_errand`.
        fence(Ordering::SeqCst);
        self.posted.load(Ordering::Relaxed) == 0 && self.ended.load(Ordering::Relaxed) == 0
    }

    /// The same, and only until an errand ends: what is posted is for later.
    #[must_use]
    pub fn fall_asleep_for_errands(&self) -> bool {
        self.turn.store(ASLEEP, Ordering::Relaxed);
        // Pairs with the fence of `end_errand`.
        fence(Ordering::SeqCst);
        self.ended.load(Ordering::Relaxed) == 0
    }

    /// The holder has slept, or not.
    pub fn wake_up(&self) {
        self.turn.store(HELD, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    /// What the holders work on, and descriptors and futexes as locks: loom reports a sleep from which nobody wakes us.
    struct Shared {
        combine: Combine,
        /// Numbers taken, and answered.
        begun: Mutex<Vec<u64>>,
        answered: Mutex<Vec<u64>>,
        bell: (Mutex<()>, Condvar),
        event: (Mutex<bool>, Condvar),
    }

    impl Shared {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                combine: Combine::new(),
                begun: Mutex::new(Vec::new()),
                answered: Mutex::new(Vec::new()),
                bell: (Mutex::new(()), Condvar::new()),
                event: (Mutex::new(false), Condvar::new()),
            })
        }

        fn wake(&self) -> impl FnOnce(&AtomicU32) {
            |_: &AtomicU32| {
                drop(self.bell.0.lock().unwrap());
                self.bell.1.notify_all();
            }
        }

        fn sleep(&self, post: Option<&Post>) {
            if let Some(bell) = self.combine.doze(post) {
                let guard = self.bell.0.lock().unwrap();
                // As futex(2): nobody rings between the look and the sleep.
                if self.combine.bell().load(Ordering::SeqCst) == bell {
                    drop(self.bell.1.wait(guard).unwrap());
                }
            }
            self.combine.awake();
        }

        fn signal(&self) {
            *self.event.0.lock().unwrap() = true;
            self.event.1.notify_all();
        }

        fn wait_for_event(&self) {
            let mut event = self.event.0.lock().unwrap();
            while !*event {
                event = self.event.1.wait(event).unwrap();
            }
            *event = false;
        }

        fn begin(&self, number: u64) {
            // Only holders are here.
            let mut begun = self.begun.try_lock().expect("two have the turn");
            assert!(!begun.contains(&number), "{number} is begun twice");
            begun.push(number);
        }

        /// The holder goes on with what was begun; with everything, as one answer brings all.
        fn answer(&self) {
            let begun = self.begun.try_lock().expect("two have the turn").clone();
            *self.answered.lock().unwrap() = begun;
        }

        fn is_answered(&self, number: u64) -> bool {
            self.answered.lock().unwrap().contains(&number)
        }

        fn lead(&self, number: u64, known: bool) {
            if !known {
                self.begin(number);
            }
            self.combine
                .take_posts(|other| {
                    self.begin(other);
                    Ok::<(), ()>(())
                })
                .unwrap();
            self.answer();
            assert!(self.is_answered(number));
            self.combine.settle(|other| self.is_answered(other), self.wake());
            self.combine.give_back(self.wake());
        }

        fn fault(&self, number: u64) {
            if self.combine.try_take() {
                return self.lead(number, false);
            }
            let (post, asleep) = self.combine.post(number).expect("as many places as threads");
            if asleep {
                self.signal();
            }
            loop {
                if self.combine.is_done(&post) {
                    break;
                }
                if self.combine.try_take() {
                    match self.combine.withdraw(post) {
                        Withdrawn::Done => self.combine.give_back(self.wake()),
                        was => self.lead(number, was == Withdrawn::Taken),
                    }
                    break;
                }
                self.sleep(Some(&post));
            }
            assert!(self.is_answered(number), "{number}");
        }
    }

    fn model(body: impl Fn() + Send + Sync + 'static) {
        bounded(3, body);
    }

    fn bounded(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.check(body);
    }

    #[test]
    fn everybody_is_served_once_and_nobody_sleeps_for_ever() {
        model(|| {
            let shared = Shared::new();
            let other = shared.clone();
            let thread = thread::spawn(move || other.fault(1));
            shared.fault(2);
            shared.fault(3);
            thread.join().unwrap();
            let mut begun = shared.begun.lock().unwrap().clone();
            begun.sort_unstable();
            assert_eq!(begun, [1, 2, 3]);
            assert_eq!(shared.combine.claimed.load(Ordering::Relaxed), 0);
        });
    }

    #[test]
    fn three_threads_at_once() {
        bounded(1, || {
            let shared = Shared::new();
            let threads = [1, 2].map(|number| {
                let other = shared.clone();
                thread::spawn(move || other.fault(number))
            });
            shared.fault(3);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert_eq!(shared.begun.lock().unwrap().len(), 3);
        });
    }

    #[test]
    fn a_holder_that_sleeps_is_woken_by_a_post() {
        model(|| {
            let shared = Shared::new();
            let other = shared.clone();
            assert!(shared.combine.try_take());
            let thread = thread::spawn(move || other.fault(1));
            // It sleeps until something is posted, as if for an answer that does not come.
            while !shared.combine.has_posts() {
                if shared.combine.fall_asleep() {
                    shared.wait_for_event();
                }
                shared.combine.wake_up();
            }
            shared.lead(2, false);
            thread.join().unwrap();
        });
    }

    #[test]
    fn a_holder_that_sleeps_is_woken_by_the_end_of_an_errand() {
        model(|| {
            let shared = Shared::new();
            let other = shared.clone();
            assert!(shared.combine.try_take());
            // What has been posted does not keep it awake.
            let (post, _) = shared.combine.post(3).unwrap();
            let errand = thread::spawn(move || {
                *other.answered.lock().unwrap() = alloc::vec![7];
                if other.combine.end_errand(5) {
                    other.signal();
                }
            });
            // As a call does, which waits until none is under way.
            loop {
                let ended = shared.combine.ended_errands();
                if ended != 0 {
                    assert_eq!(ended, 1 << 5);
                    break;
                }
                if shared.combine.fall_asleep_for_errands() {
                    shared.wait_for_event();
                }
                shared.combine.wake_up();
            }
            assert!(shared.is_answered(7));
            assert_eq!(shared.combine.withdraw(post), Withdrawn::New);
            shared.combine.give_back(shared.wake());
            errand.join().unwrap();
            assert_eq!(shared.combine.ended_errands(), 0, "each is told once");
        });
    }

    #[test]
    fn an_errand_that_ends_while_nobody_has_the_turn_is_told_to_the_next_holder() {
        model(|| {
            let shared = Shared::new();
            let other = shared.clone();
            let thread = thread::spawn(move || {
                let asleep = other.combine.end_errand(0);
                assert!(!asleep);
                other.fault(1);
            });
            shared.fault(2);
            thread.join().unwrap();
            assert!(shared.combine.try_take());
            assert_eq!(shared.combine.ended_errands(), 1);
        });
    }

    #[test]
    fn who_wants_the_turn_alone_gets_it() {
        model(|| {
            let shared = Shared::new();
            let other = shared.clone();
            let thread = thread::spawn(move || other.fault(1));
            while !shared.combine.try_take() {
                shared.sleep(None);
            }
            shared.combine.give_back(shared.wake());
            thread.join().unwrap();
        });
    }

    #[test]
    fn places_are_used_again() {
        model(|| {
            let combine = Combine::new();
            assert!(combine.try_take() && !combine.try_take());
            let (first, _) = combine.post(7).unwrap();
            let (second, asleep) = combine.post(8).unwrap();
            assert!(!asleep && combine.post(9).is_none());
            let mut seen = Vec::new();
            combine
                .take_posts(|wanted| {
                    seen.push(wanted);
                    Ok::<(), ()>(())
                })
                .unwrap();
            assert_eq!(seen, [7, 8]);
            assert!(combine.settle(|wanted| wanted == 8, |_| {}));
            assert!(!combine.is_done(&first) && combine.is_done(&second));
            let (third, _) = combine.post(9).unwrap();
            assert_eq!(
                (combine.withdraw(first), combine.withdraw(third)),
                (Withdrawn::Taken, Withdrawn::New)
            );
            assert!(!combine.has_posts() && !combine.settle(|_| true, |_| {}));
        });
    }
}
