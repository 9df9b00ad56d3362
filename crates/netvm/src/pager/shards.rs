//! Several pagers that divide the far memory of one process, by stripes of its addresses. See docs/design/shards.md.

use super::calls::{Call, Doorbell};
use super::end::Desk;
use super::engine::Engine;
use super::error::{PagerError, system};
use super::inthread::InThread;
use super::lenders::LenderState;
use super::{FaultPath, Pager, PagerConfig, local_bytes_min};
use crate::error::Result;
use crate::runfile::RunFile;
use crate::stats::PagerStats;
use netvm_core::residency::Ahead;
use netvm_sys::epoll::EventFd;
use netvm_sys::uffd::PAGE_BYTES;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most of them.
pub const SHARDS_MAX: usize = 64;

/// Neighbouring addresses of one shard: long enough that a stream seldom meets the end of one, and that the kernel's 65530 mappings of a process
/// suffice for nearly 1 TiB; short enough that arrays of some hundred MiB are spread evenly.
pub const STRIPE_BYTES: usize = 16 << 20;
const STRIPE_PAGES: u32 = (STRIPE_BYTES / PAGE_BYTES) as u32;

/// Rounds in which shards give up what a smaller budget has no room for; each but the last few ends it but for rounding.
const SHED_ROUNDS: usize = 100;
/// Between two calls that ask whether frames are still to be given back.
const SHRINK_PAUSE_MAX: Duration = Duration::from_millis(1);

/// Streams that are about to go on in another stripe: a place for each stripe, modulo this.
const PASSING: usize = 64;

/// Which shard has an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stripes {
    pub(super) start: usize,
    pub(super) shards: usize,
}

impl Stripes {
    pub(super) fn shard_of(self, address: usize) -> usize {
        (address - self.start) / STRIPE_BYTES % self.shards
    }

    /// A range of the area in pieces of one shard each: its number, address and bytes.
    pub(super) fn pieces(self, address: usize, bytes: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let end = address + bytes;
        let mut at = address;
        std::iter::from_fn(move || {
            let piece = at;
            if piece >= end {
                return None;
            }
            at = match self.shards {
                1 => end,
                _ => end.min(piece + STRIPE_BYTES - (piece - self.start) % STRIPE_BYTES),
            };
            Some((self.shard_of(piece), piece, at - piece))
        })
    }

    /// After so many bytes of addresses the shards are the same again.
    pub(super) fn cycle(self) -> usize {
        self.shards * STRIPE_BYTES
    }

    /// Whether each page would stay with its shard.
    fn keeps_shards(self, from: usize, to: usize) -> bool {
        self.shards == 1 || from.abs_diff(to).is_multiple_of(self.cycle())
    }
}

/// What shards tell each other.
#[derive(Debug)]
pub(super) struct Neighbours {
    /// For each stripe the page at which a stream will begin, 0 for none. A hint.
    streams: [AtomicU32; PASSING],
    /// Of each shard: others need frames now.
    asked: Vec<Asked>,
}

#[derive(Debug)]
struct Asked {
    is_asked: AtomicBool,
    /// Readable then, for a shard that sleeps.
    event: EventFd,
}

impl Neighbours {
    pub(super) fn new(shards: usize) -> Result<Self> {
        let asked = |_| {
            let event = EventFd::new().map_err(|e| system("eventfd", e))?;
            Ok(Asked { is_asked: AtomicBool::new(false), event })
        };
        Ok(Self {
            streams: std::array::from_fn(|_| AtomicU32::new(0)),
            asked: (0..shards).map(asked).collect::<Result<_>>()?,
        })
    }

    fn place(&self, page: u32) -> &AtomicU32 {
        &self.streams[(page / STRIPE_PAGES) as usize % PASSING]
    }

    /// What each shard's thread needs.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        self.asked.iter().map(|asked| asked.event.as_fd().as_raw_fd())
    }

    /// What becomes readable when others ask this shard for frames.
    pub(super) fn event(&self, number: usize) -> &EventFd {
        &self.asked[number].event
    }

    /// Asks all others for frames.
    fn ask(&self, number: usize) {
        for (_, other) in self.asked.iter().enumerate().filter(|(other, _)| *other != number) {
            other.is_asked.store(true, Release);
            other.event.signal();
        }
    }

    /// The event may be readable.
    pub(super) fn hear(&self, number: usize) {
        if self.asked[number].event.take() > 0 {
            self.asked[number].is_asked.store(true, Relaxed);
        }
    }

    /// Whether others have asked this shard since the last time.
    fn take_asked(&self, number: usize) -> bool {
        let is_asked = &self.asked[number].is_asked;
        is_asked.load(Relaxed) && is_asked.swap(false, Acquire)
    }
}

/// One of the pagers of a process: how it is called, or who serves its faults.
pub(super) struct Shard {
    pub(super) desk: Arc<Desk>,
    /// With [`FaultPath::InThread`].
    pub(super) in_thread: Option<Arc<InThread>>,
}

impl Shard {
    pub(super) fn call(&self, call: Call, pager: &Pager) -> Result<()> {
        if pager.orphaned.load(Relaxed) {
            let error = std::io::ErrorKind::Unsupported.into();
            return Err(system("use far memory in a child of a fork, which has none", error));
        }
        match &self.in_thread {
            Some(shared) => shared.call(call, &self.desk),
            None => self.desk.doorbell.call(call),
        }
    }

    /// A call after which frames are given back: again and again until it has no more to give, with faults in between.
    pub(super) fn shrink(&self, call: Call, pager: &Pager) -> Result<()> {
        loop {
            let began = Instant::now();
            self.call(call, pager)?;
            if *self.desk.doorbell.left() == 0 {
                return Ok(());
            }
            // Who asks again at once is served before all others. Meanwhile it goes on by itself.
            std::thread::sleep(began.elapsed().min(SHRINK_PAUSE_MAX));
        }
    }

    pub(super) fn lenders(&self, pager: &Pager) -> Vec<LenderState> {
        self.latest(Call::Lenders, pager, |doorbell| doorbell.lenders().clone())
    }

    fn stats(&self, pager: &Pager) -> PagerStats {
        self.latest(Call::Publish, pager, |doorbell| *doorbell.stats())
    }

    /// What a call leaves at the doorbell; nothing in the child of a fork.
    fn latest<T: Default>(&self, call: Call, pager: &Pager, read: impl FnOnce(&Doorbell) -> T) -> T {
        if pager.orphaned.load(Relaxed) {
            return T::default();
        }
        match &self.in_thread {
            Some(shared) => shared.latest(call, &self.desk, || read(&self.desk.doorbell)),
            None => self.desk.doorbell.latest(call, read),
        }
    }
}

/// What several shards share.
#[derive(Clone)]
pub(super) struct Division {
    pub(super) budget: Arc<RunFile>,
    /// Pins and other budgets come one after the other.
    turn: Arc<Mutex<()>>,
}

impl Division {
    /// `None` for one shard, which shares nothing.
    pub(super) fn new(config: &PagerConfig) -> Result<Option<Self>> {
        if config.shards == 1 {
            return Ok(None);
        }
        Ok(Some(Self {
            budget: RunFile::of_shards(config.local_bytes, config.shards)?,
            turn: Arc::default(),
        }))
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why there cannot be so many, if so.
pub(super) fn refused(config: &PagerConfig) -> Option<PagerError> {
    let shards = config.shards;
    let why = if !(1..=SHARDS_MAX).contains(&shards) {
        "there can be 1 to 64"
    } else if shards > 1 && config.run.is_some() {
        "processes of a run have one, which they can take through a fork"
    } else if shards > 1 && config.fault_path == FaultPath::SameCpu {
        "the thread that faults can be held beside one pager only: fault path thread, spin or in-thread"
    } else {
        return None;
    };
    Some(PagerError::Shards { shards, why })
}

impl Pager {
    /// Carries a call out on each piece of a range, in order, until one fails.
    pub(super) fn on_pieces(
        &self,
        address: usize,
        bytes: usize,
        call: impl Fn(usize, usize) -> Call,
    ) -> Result<()> {
        self.check(address, bytes)?;
        self.stripes
            .pieces(address, bytes)
            .try_for_each(|(shard, address, bytes)| self.shards[shard].call(call(address, bytes), self))
    }

    /// The same; the pieces before one that fails are undone.
    pub(super) fn on_all_pieces(
        &self,
        address: usize,
        bytes: usize,
        call: impl Fn(usize, usize) -> Call,
        undo: impl Fn(usize, usize) -> Call,
    ) -> Result<()> {
        self.check(address, bytes)?;
        for (shard, at, length) in self.stripes.pieces(address, bytes) {
            if let Err(error) = self.shards[shard].call(call(at, length), self) {
                self.on_each_piece(address, at - address, undo);
                return Err(error);
            }
        }
        Ok(())
    }

    /// On all pieces, whatever becomes of any of them.
    pub(super) fn on_each_piece(&self, address: usize, bytes: usize, call: impl Fn(usize, usize) -> Call) {
        for (shard, at, length) in self.stripes.pieces(address, bytes) {
            let _ = self.shards[shard].call(call(at, length), self);
        }
    }

    /// Whoever has only one shard checks ranges itself.
    fn check(&self, address: usize, bytes: usize) -> Result<()> {
        let is_in =
            address >= self.area.start && address.checked_add(bytes).is_some_and(|end| end <= self.area.end);
        let is_whole = bytes > 0 && (address | bytes).is_multiple_of(PAGE_BYTES);
        if is_in && is_whole { Ok(()) } else { Err(PagerError::OutsideFarMemory { address, bytes }.into()) }
    }

    /// To all shards.
    pub(super) fn on_shards(&self, call: Call) -> Result<()> {
        self.shards.iter().try_for_each(|shard| shard.call(call, self))
    }

    /// Keeps all others out that pin or change the budget, where shards have to agree on it.
    pub(super) fn budget_turn(&self) -> Option<MutexGuard<'_, ()>> {
        self.division.as_ref().map(Division::turn)
    }

    pub(super) fn sum_of_stats(&self) -> PagerStats {
        let mut all = self.shards.iter().map(|shard| shard.stats(self));
        let mut sum = all.next().unwrap_or_default();
        all.for_each(|stats| sum.add(&stats));
        if let Some(division) = &self.division {
            // What each told was true at another moment, and what left one may be with the next.
            sum.local_frames = division.budget.used();
            sum.local_frames_peak = division.budget.used_peak();
        }
        sum
    }

    /// Another budget for all shards together. Each keeps its part of what they hold, and a floor.
    pub(super) fn set_budget_of_shards(&self, division: &Division, bytes: u64) -> Result<()> {
        let _turn = division.turn();
        let budget = &division.budget;
        let page_bytes = PAGE_BYTES as u64;
        let pins_bytes = budget.pinned().div_ceil(3) * 4 * page_bytes;
        let min_bytes = (self.shards.len() as u64 * local_bytes_min(self.config.page_bytes)).max(pins_bytes);
        let max_bytes = self.config.local_bytes.max(self.config.local_bytes_max);
        if bytes < min_bytes || bytes > max_bytes {
            return Err(PagerError::BudgetRange { bytes, min_bytes, max_bytes }.into());
        }
        let frames = bytes / page_bytes;
        // From now on nobody gets more while more than that is in use.
        let before = budget.budget_frames();
        budget.set_budget(frames);
        for _ in 0..SHED_ROUNDS {
            let used = budget.used();
            for (number, shard) in self.shards.iter().enumerate() {
                let (held, pinned) = budget.held_and_pinned(number);
                let keep = if used > frames {
                    let part = u128::from(held) * u128::from(frames) / u128::from(used);
                    (part as u64).max(pinned + budget.shard_floor())
                } else {
                    held
                };
                let keep = Call::Keep { frames: keep.min(held), frames_max: frames };
                shard.shrink(keep, self).inspect_err(|_| self.take_budget_back(division, before, number))?;
            }
            if used <= frames {
                break;
            }
        }
        Ok(())
    }

    /// A shard could not give up what it should: that one and those before it may have what they had.
    fn take_budget_back(&self, division: &Division, frames: u64, asked: usize) {
        division.budget.set_budget(frames);
        for shard in &self.shards[..=asked] {
            let _ = shard.call(Call::Keep { frames, frames_max: frames }, self);
        }
    }

    /// Moves contents from page to page by hand where they come to other shards, whose slots are their own.
    fn copy_over(&self, old: usize, new: usize, bytes: usize) -> Result<()> {
        self.check(old, bytes)?;
        self.discard(new, bytes)?;
        let (from, to) = (self.memory(old, bytes)?, self.memory(new, bytes)?);
        let mut page = [0; PAGE_BYTES];
        for at in (0..bytes).step_by(PAGE_BYTES) {
            // Whole pages of both.
            let _ = from.read_into(at, &mut page);
            if page != [0; PAGE_BYTES] {
                let _ = to.write_from(at, &page);
            }
        }
        self.discard(old, bytes)
    }

    pub(super) fn relocate_pieces(&self, old: usize, new: usize, bytes: usize) -> Result<()> {
        if !self.stripes.keeps_shards(old, new) {
            return self.copy_over(old, new, bytes);
        }
        self.check(new, bytes)?;
        self.on_pieces(old, bytes, |at, bytes| Call::Relocate { old: at, new: new + (at - old), bytes })
    }
}

impl Engine {
    /// This shard was refused frames: others are told to give some where it has far less than what is its own.
    pub(super) fn ask_for_frames(&mut self) {
        if let Some(neighbours) = &self.neighbours
            && self.budget.asks_now()
        {
            neighbours.ask(self.number);
        }
    }

    /// Others that wait for frames get some.
    pub(super) fn give_if_asked(&mut self) -> Result<()> {
        match &self.neighbours {
            Some(neighbours) if neighbours.take_asked(self.number) => self.shrink(),
            _ => Ok(()),
        }
    }

    /// Tells the shard that has the next stripe of a stream that will go on there.
    pub(super) fn pass_stream_on(&self, page: u32, ahead: Ahead) {
        let Some(neighbours) = &self.neighbours else { return };
        let next = (page / STRIPE_PAGES + 1).saturating_mul(STRIPE_PAGES);
        let reach = page.saturating_add((ahead.map + ahead.fetch).saturating_mul(self.unit));
        if ahead.stride.is_none() && ahead.map > 1 && reach >= next {
            neighbours.place(next).store(next, Relaxed);
        }
    }

    /// Whether the fault on this page is that of a stream from the stripe before.
    pub(super) fn takes_stream_over(&self, page: u32) -> bool {
        let Some(neighbours) = &self.neighbours else { return false };
        if !page.is_multiple_of(STRIPE_PAGES) || page == 0 {
            return false;
        }
        neighbours.place(page).compare_exchange(page, 0, Relaxed, Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_is_heard_once_by_all_others() {
        let neighbours = Neighbours::new(3).unwrap();
        let heard = |number| {
            neighbours.hear(number);
            neighbours.take_asked(number)
        };
        assert_eq!([0, 1, 2].map(heard), [false; 3]);
        neighbours.ask(1);
        // Who is busy sees the word, and finds the event when it sleeps.
        assert!(neighbours.take_asked(0) && !neighbours.take_asked(0));
        assert_eq!([0, 1, 2].map(heard), [true, false, true]);
        assert_eq!([0, 1, 2].map(heard), [false; 3]);
        neighbours.ask(0);
        neighbours.ask(2);
        assert_eq!([0, 1, 2].map(heard), [true; 3]);
    }

    #[test]
    fn stripes_cover_a_range_once_and_in_order() {
        let start = 0x7000_0000_1000;
        let stripes = Stripes { start, shards: 3 };
        let from = start + STRIPE_BYTES - 2 * PAGE_BYTES;
        let bytes = 3 * STRIPE_BYTES;
        let pieces: Vec<_> = stripes.pieces(from, bytes).collect();
        assert_eq!(pieces.iter().map(|piece| piece.0).collect::<Vec<_>>(), [0, 1, 2, 0]);
        let mut at = from;
        for &(shard, address, bytes) in &pieces {
            assert_eq!((address, stripes.shard_of(address + bytes - 1)), (at, shard));
            at += bytes;
        }
        assert_eq!(at, from + bytes);
        let one = Stripes { start, shards: 1 };
        assert_eq!(one.pieces(from, bytes).collect::<Vec<_>>(), [(0, from, bytes)]);
        assert!(stripes.keeps_shards(from, from + 3 * STRIPE_BYTES));
        assert!(!stripes.keeps_shards(from + STRIPE_BYTES, from));
    }
}
