//! How far the receiver of a ring is, in a word that the sender has mapped: told and heard without a message.
//!
//! ```text
//!  word   | position in bytes, a multiple of 8 | 1 bit free | NEAR | WAITING |
//!
//!  sender, without room:  word |= WAITING; still no room -> waits for a notice of the session
//!  receiver:              old = swap(word, position); old had WAITING -> tells by such a notice, too
//! ```
//!
//! Both change the same word in one step, so one comes first: either the sender sees the position, or the receiver sees that it waits. The
//! word is in memory that others may write: a position is believed only as far as it makes sense ([`super::SendRing::credit_to`]), and a lost
//! mark delays a sender until it looks again by itself.

#[cfg(not(test))]
use core::sync::atomic::{AtomicU64, Ordering};
#[cfg(test)]
use loom::sync::atomic::{AtomicU64, Ordering};

/// Bytes that each sender's word takes: a cache line, behind all rings.
pub const LINE_BYTES: u64 = 64;

/// The sender sleeps, or is about to.
const WAITING: u64 = 1;
/// The sender reads the word. Otherwise all is told by notices.
const NEAR: u64 = 2;
const MARKS: u64 = 7;

/// What a sender leaves in its word before its first message: `near` if it can read it there.
pub fn beginning(near: bool) -> u64 {
    if near { NEAR } else { 0 }
}

/// What of a word is the position.
pub fn position(word: u64) -> u64 {
    word & !MARKS
}

/// What the sender sets in its word before it sleeps, looking at it in the same step.
pub const SLEEPS: u64 = WAITING;

/// The receiver has consumed everything before `position`. Whether the sender must be told by a notice.
#[must_use]
pub fn advance(word: &AtomicU64, position: u64) -> bool {
    if word.load(Ordering::Relaxed) & NEAR == 0 {
        return true;
    }
    // Release: what was read in the ring was read before. Acquire: pairs with the sender's mark.
    word.swap(position | NEAR, Ordering::AcqRel) & WAITING != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    struct Shared {
        word: AtomicU64,
        /// The place that the receiver reads and the sender writes again.
        place: AtomicU64,
        notices: Mutex<u32>,
        told: Condvar,
    }

    /// The sender waits for `wanted`, in every interleaving with a receiver that tells of 8, then of 16 bytes.
    fn waits(wanted: u64) {
        loom::model(move || {
            let word = AtomicU64::new(beginning(true));
            let (notices, told) = (Mutex::new(0), Condvar::new());
            let shared = Arc::new(Shared { word, place: AtomicU64::new(1), notices, told });
            let theirs = shared.clone();
            let receiver = thread::spawn(move || {
                assert_eq!(theirs.place.load(Ordering::Relaxed), 1, "the message that was there");
                for position in [8, 16] {
                    if advance(&theirs.word, position) {
                        *theirs.notices.lock().unwrap() += 1;
                        theirs.told.notify_one();
                    }
                }
            });
            let mut heard = 0;
            loop {
                if position(shared.word.fetch_or(SLEEPS, Ordering::AcqRel)) >= wanted {
                    break;
                }
                // Loom reports a sleep from which nobody wakes us.
                let mut notices = shared.notices.lock().unwrap();
                while *notices == heard {
                    notices = shared.told.wait(notices).unwrap();
                }
                heard = *notices;
            }
            shared.place.store(2, Ordering::Relaxed);
            receiver.join().unwrap();
            assert!(heard <= 2);
        });
    }

    #[test]
    fn who_sleeps_is_woken() {
        waits(8);
        waits(16);
    }

    #[test]
    fn who_is_far_is_told_everything() {
        loom::model(|| {
            let word = AtomicU64::new(beginning(false));
            assert!(advance(&word, 8) && advance(&word, 16));
            assert_eq!(position(word.load(Ordering::Relaxed)), 0);
        });
    }
}
