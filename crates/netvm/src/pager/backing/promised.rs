//! Slots for packed pages that are written after a fork, once for parent and children: docs/design/pager.md, "fork".

use super::Backing;
use crate::error::Result;
use crate::lender::Borrower;
use crate::pager::error::system;
use netvm_core::residency::Slot;
use netvm_core::tier::{PieceId, Promise, Promises};
use netvm_sys::filemap::FileWords;
use std::time::{Duration, Instant};

/// Forks of whose promises some are left: more make none.
const FORKS_MAX: usize = 16;
/// A child that has just been forked may be about to start another program: it is not a follower yet.
const SETTLED_IN: Duration = Duration::from_millis(50);
/// A follower that has not been seen for so long is not written for,
const SEEN_LATELY: Duration = Duration::from_millis(300);
/// and for so long, not there any more; no more is a keeper that has settled nothing meanwhile.
const GONE: Duration = Duration::from_secs(2);
/// How long the others need at most to let go of what was promised, where there is no room for anything else.
const STOPPING: Duration = Duration::from_millis(500);
/// Numbers of operations that ask whether what was sent is there.
pub(super) const PROMISED: u64 = 1 << 41;

/// Number of a transfer with promised pages.
pub(in crate::pager) type Step = u32;

/// What was promised before one fork.
struct Made {
    promises: Promises<FileWords>,
    /// What was seen of the others last, and when something new was.
    seen: u64,
    since: Instant,
    /// When it was made, or this process forked.
    began: Instant,
}

/// What this process has promised its children, or its parent has promised it.
#[derive(Default)]
pub(in crate::pager) struct Promised {
    made: Vec<Made>,
    step: Step,
    /// Steps that have been sent. To read what others have written, on another connection, lenders must have said that it is there:
    sent: Vec<Step>,
    /// those that they were asked about, by so many of them that have not answered.
    asked: Vec<Step>,
    left: u32,
    /// Answers to earlier questions do not count.
    round: u64,
    /// When all were stopped for want of room.
    stopped: Option<Instant>,
    /// Slots that have been taken for what is being promised.
    taken: Option<Vec<Slot>>,
}

impl Promised {
    pub(in crate::pager) fn is_empty(&self) -> bool {
        self.made.is_empty()
    }

    /// The next one to keep, and which fork it is of.
    pub(in crate::pager) fn next(&self) -> Option<(usize, Promise)> {
        let next = |(fork, made): (usize, &Made)| made.promises.next().map(|promise| (fork, promise));
        self.made.iter().enumerate().find_map(next)
    }

    /// Whether there are some to keep, for somebody who has been seen lately.
    pub(in crate::pager) fn is_wanted(&self) -> bool {
        let wanted = |made: &Made| {
            made.promises.next().is_some() && made.seen > 0 && made.since.elapsed() < SEEN_LATELY
        };
        self.made.iter().any(wanted)
    }

    /// Whether a slot is taken for a promise that nothing has come of yet.
    pub(super) fn is_left(&self, slot: Slot) -> bool {
        self.made.iter().flat_map(|made| made.promises.left()).any(|promise| promise.slot == slot)
    }

    /// Steps of which it is not known that they are there.
    pub(in crate::pager) fn steps(&self) -> usize {
        self.made.iter().map(|made| made.promises.steps()).sum()
    }

    /// Whether somebody else may yet keep some.
    pub(in crate::pager) fn is_following(&self) -> bool {
        self.made.iter().any(|made| !made.promises.is_keeper())
    }

    /// The next one of this fork is kept, with the step that leaves next.
    pub(in crate::pager) fn keep(&mut self, fork: usize) {
        self.made[fork].promises.keep();
    }

    /// The next one of this fork cannot be kept. Its slot is free.
    pub(in crate::pager) fn break_it(&mut self, fork: usize) {
        self.made[fork].promises.break_it();
    }

    /// What was kept of this fork leaves.
    pub(in crate::pager) fn leave(&mut self, fork: usize) -> Step {
        self.step = self.step.wrapping_add(1);
        self.made[fork].promises.leave(self.step);
        self.step
    }

    /// What was broken of this fork needs nothing to leave.
    pub(in crate::pager) fn settle_broken(&mut self, fork: usize) {
        self.made[fork].promises.settle_broken();
        self.forget_settled();
    }

    /// A step has been sent.
    pub(in crate::pager) fn sent(&mut self, step: Step) {
        self.sent.push(step);
    }

    /// A lender has what it was asked about.
    fn confirmed(&mut self) {
        self.left -= 1;
        if self.left == 0 {
            for step in self.asked.drain(..) {
                self.made.iter_mut().any(|made| made.promises.arrived(step));
            }
            self.forget_settled();
        }
    }

    /// What was asked about need not be known any more.
    fn forget_asked(&mut self) {
        self.sent.clear();
        self.asked.clear();
        (self.left, self.round) = (0, self.round + 1);
    }

    fn forget_settled(&mut self) {
        self.made.retain(|made| !made.promises.is_over());
    }

    /// In the parent, after a fork.
    pub(in crate::pager) fn forked(&mut self) {
        for made in self.made.iter_mut().filter(|made| made.promises.is_keeper()) {
            made.since = Instant::now();
        }
    }

    /// Slots are being taken that nobody needs now.
    pub(super) fn is_reserving(&self) -> bool {
        self.taken.is_some()
    }

    /// In the child of a fork.
    pub(super) fn follow(&mut self) {
        self.forget_asked();
        for made in &mut self.made {
            made.promises.follow();
            (made.seen, made.since) = (made.promises.settled(), Instant::now());
            made.began = made.since;
        }
    }

    /// A promise that is settled, and whether it was kept.
    pub(in crate::pager) fn take_up(&mut self) -> Option<(Promise, bool)> {
        let taken = self.made.iter_mut().find_map(|made| made.promises.take_up());
        if taken.is_none() {
            self.forget_settled();
        }
        taken
    }

    /// The pieces that something has been promised about: a bit for each.
    pub(in crate::pager) fn pieces(&self) -> Vec<u64> {
        let mut bits = Vec::new();
        for promise in self.made.iter().flat_map(|made| made.promises.left()) {
            let word = promise.piece as usize / 64;
            if word >= bits.len() {
                bits.resize(word + 1, 0);
            }
            bits[word] |= 1 << (promise.piece % 64);
        }
        bits
    }

    pub(in crate::pager) fn has_room(&self) -> bool {
        self.made.len() < FORKS_MAX
    }

    /// Looks at the others, and is seen by them. Returns what is not to be waited for any longer.
    fn look(&mut self) -> Vec<Promise> {
        // One fork's are kept after the other's.
        let mut goes_on = false;
        for made in &mut self.made {
            let is_keeper = made.promises.is_keeper();
            if !is_keeper && made.began.elapsed() >= SETTLED_IN {
                made.promises.be_seen();
            }
            let seen = if is_keeper { made.promises.seen() } else { made.promises.settled() };
            if std::mem::replace(&mut made.seen, seen) != seen {
                made.since = Instant::now();
                goes_on |= !is_keeper;
            }
        }
        let mut ended = Vec::new();
        for made in &mut self.made {
            if goes_on && !made.promises.is_keeper() {
                made.since = Instant::now();
            }
            let is_over = match made.promises.is_keeper() {
                true => made.promises.is_stopped(),
                false => made.promises.has_ended(),
            };
            if is_over || made.since.elapsed() >= GONE {
                ended.append(&mut made.promises.end());
            }
        }
        self.forget_settled();
        ended
    }
}

impl Backing {
    /// Takes slots for the pieces, whose stamps are given, and promises to write them. Nothing is promised unless lenders have room beside for as
    /// many pages, and for `installed` ones: those a child may have to give up, too, and there may be others who need some.
    pub(in crate::pager) fn promise(&mut self, pieces: Vec<(PieceId, u32)>, installed: usize) -> Result<()> {
        let count = pieces.len();
        let Some(slots) = self.reserve(count, count + installed)? else { return Ok(()) };
        let words = FileWords::inherited(Promises::<FileWords>::words(count));
        let words = words.map_err(|e| system("share memory with a child", e))?;
        let promise = |((piece, stamp), slot)| Promise { piece, stamp, slot };
        let list = pieces.into_iter().zip(slots).map(promise).collect();
        let (promises, now) = (Promises::new(words, list), Instant::now());
        self.promised.made.push(Made { promises, seen: 0, since: now, began: now });
        Ok(())
    }

    /// So many slots, or none if lenders have no room for all, and for so many more.
    fn reserve(&mut self, count: usize, more: usize) -> Result<Option<Vec<Slot>>> {
        self.promised.taken = Some(Vec::with_capacity(count));
        let reserved = self.try_to_reserve(count, more);
        let taken = self.promised.taken.take().unwrap_or_default();
        match reserved {
            Ok(true) => return Ok(Some(taken)),
            Err(error) if !error.is_no_room() => return Err(error),
            _ => self.give_up(taken),
        }
        Ok(None)
    }

    /// False where there is no room, or what has been taken was given up as a lender was lost.
    fn try_to_reserve(&mut self, count: usize, more: usize) -> Result<bool> {
        let mut reserved = 0;
        while reserved < count {
            if !self.has_room_for(count - reserved + more) {
                return Ok(false);
            }
            let (first, run) = self.take_slots((count - reserved) as u32)?;
            match &mut self.promised.taken {
                Some(taken) if taken.len() == reserved => taken.extend(first..first + run),
                _ => {
                    self.give_up((first..first + run).collect());
                    return Ok(false);
                }
            }
            reserved += run as usize;
        }
        Ok(true)
    }

    /// Asks lenders whether what has been sent is there.
    pub(in crate::pager) fn ask_about_promised(&mut self) {
        if self.promised.sent.is_empty() || self.promised.left > 0 {
            return;
        }
        let token = PROMISED + self.promised.round;
        for lender in 0..self.sides.len() {
            let Some(borrower) = self.sides.live(lender) else { continue };
            // If not, later; or it is lost, as will be heard soon: then all of it is over.
            if borrower.post_flush(token).is_err() {
                (self.promised.left, self.promised.round) = (0, self.promised.round + 1);
                return;
            }
            self.promised.left += 1;
        }
        if self.promised.left > 0 {
            self.promised.asked = std::mem::take(&mut self.promised.sent);
        }
    }

    /// A lender has answered that.
    pub(super) fn promised_ended(&mut self, token: u64, failed: bool) -> Result<()> {
        if token != PROMISED + self.promised.round || self.promised.left == 0 {
            return Ok(());
        }
        if failed {
            return self.end_promises();
        }
        self.promised.confirmed();
        Ok(())
    }

    /// Slots that nothing was written to. No slab is kept for the next eviction: after the fork nothing could be written there.
    fn give_up(&mut self, slots: Vec<Slot>) {
        for slot in slots {
            if let Some(slab) = self.slots.release(slot)
                && self.slots.remove(slab)
            {
                self.post_returns();
            }
        }
    }

    /// Whether lenders have room for so many pages, as far as is known.
    fn has_room_for(&self, pages: usize) -> bool {
        let rooms = self.sides.borrowers().map(Borrower::room_bytes);
        let room_bytes: u64 = rooms.map(|room| room.unwrap_or(u64::MAX)).fold(0, u64::saturating_add);
        pages as u64 * self.part_bytes() * self.replicas as u64 <= room_bytes
    }

    /// Now and then.
    pub(in crate::pager) fn tend_promises(&mut self) -> Result<()> {
        let ended = self.promised.look();
        ended.into_iter().try_for_each(|promise| self.release_slot(promise.slot))
    }

    /// Lenders have no room: what leaves now needs it more than what would leave later. True when there may be some soon.
    pub(super) fn stop_promises(&mut self) -> Result<bool> {
        if !self.promised.is_empty() {
            self.promised.made.iter().for_each(|made| made.promises.stop());
            self.end_promises()?;
            self.promised.stopped = Some(Instant::now());
        }
        Ok(self.promised.stopped.is_some_and(|stopped| stopped.elapsed() < STOPPING))
    }

    /// Slabs are about to be lost, or moved: nothing that is not there yet is waited for.
    pub(in crate::pager) fn end_promises(&mut self) -> Result<()> {
        let made = std::mem::take(&mut self.promised.made);
        self.promised.forget_asked();
        if let Some(taken) = self.promised.taken.as_mut().map(std::mem::take) {
            self.give_up(taken);
        }
        for mut made in made {
            let left = made.promises.end();
            left.into_iter().try_for_each(|promise| self.release_slot(promise.slot))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lender::{BorrowOptions, Lender, LenderConfig, StopFlag};
    use crate::pager::PagerConfig;
    use crate::pager::seals::Seals;

    /// Pages of a slab.
    const SLAB: usize = 256;

    fn with_lender_of(slabs: u64, test: impl FnOnce(Backing)) {
        let config = LenderConfig { size_bytes: slabs << 20, slab_bytes: 1 << 20, ..LenderConfig::default() };
        let mut lender = Lender::bind(config).unwrap();
        let config = PagerConfig { lenders: lender.addresses(), ..PagerConfig::default() };
        let stop = StopFlag::new().unwrap();
        let flag = stop.clone();
        let thread = std::thread::spawn(move || lender.run(&flag).unwrap());
        let seal = |slots_per_slab| Seals::new([0; 192], slots_per_slab, false);
        test(Backing::connect(&config, BorrowOptions::default(), None, seal).unwrap());
        stop.stop();
        stop.stop();
        thread.join().unwrap();
    }

    fn pieces(count: usize) -> Vec<(PieceId, u32)> {
        (0..count as u32).map(|id| (id, 1)).collect()
    }

    #[test]
    fn nothing_is_promised_without_room_for_as_much_and_no_slab_stays() {
        with_lender_of(6, |mut backing| {
            for (count, installed, made) in [(3 * SLAB, SLAB, 0), (9 * SLAB, 0, 0), (2 * SLAB, SLAB, 1)] {
                backing.promise(pieces(count), installed).unwrap();
                assert_eq!(backing.promised.made.len(), made, "{count} {installed}");
                assert_eq!(backing.slots.slabs(), made * count / SLAB);
            }
            assert_eq!(backing.slots.live(), 2 * SLAB as u64);
            assert!(backing.promised.is_left(1) && !backing.promised.is_left(2 * SLAB as u32 + 1));
            // Nobody has been seen.
            assert!(!backing.promised.is_wanted() && !backing.promised.is_following());
            backing.promised.made[0].since -= GONE;
            backing.tend_promises().unwrap();
            assert!(backing.promised.is_empty() && backing.slots.live() == 0);
        });
    }

    #[test]
    fn what_leaves_now_gets_the_room_of_what_would_leave_later() {
        with_lender_of(4, |mut backing| {
            backing.promise(pieces(2 * SLAB), 0).unwrap();
            assert_eq!(backing.promised.made.len(), 1);
            let mut taken = 0;
            let refused = loop {
                match backing.take_slots(64) {
                    Ok((_, slots)) => taken += slots as usize,
                    Err(error) => break error,
                }
            };
            assert!(matches!(refused, crate::Error::LenderFull { .. }), "{refused}");
            assert_eq!((taken, backing.promised.is_empty()), (4 * SLAB, true));
        });
    }

    #[test]
    fn a_step_is_there_when_all_lenders_have_said_so() {
        with_lender_of(4, |mut backing| {
            backing.promise(pieces(SLAB), 0).unwrap();
            let (fork, first) = backing.promised.next().unwrap();
            assert_eq!((fork, first), (0, Promise { piece: 0, stamp: 1, slot: first.slot }));
            backing.promised.keep(fork);
            let step = backing.promised.leave(fork);
            assert_eq!((backing.promised.steps(), backing.promised.made[0].promises.settled()), (1, 0));
            backing.ask_about_promised();
            assert_eq!(backing.promised.left, 0, "it has not been sent");
            backing.promised.sent(step);
            backing.ask_about_promised();
            assert_eq!((backing.promised.left, backing.promised.made[0].promises.settled()), (1, 0));
            let began = Instant::now();
            while backing.promised.steps() > 0 {
                assert!(began.elapsed() < Duration::from_secs(10), "no answer");
                backing.poll(&mut Vec::new()).unwrap();
            }
            assert_eq!(backing.promised.made[0].promises.settled(), 1);
        });
    }
}
