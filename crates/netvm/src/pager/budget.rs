//! How many frames a pager may hold: its own limit, or its share of what a run, or the shards of a process, have together.

use crate::detail::PagerDetail;
use crate::runfile::Slot;
use crate::stats::PagerStats;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// While a process starves, ended ones are looked for so often.
const REAP_EVERY: Duration = Duration::from_millis(50);

/// After so long without a frame a process gets a few beyond the budget of the run: others that are stopped, or hang, give nothing.
const STARVED_MAX: Duration = Duration::from_millis(1500);

/// A look in vain counts for so much at most: while this process is stopped, or its machine stands still, so do those that would give.
const LOOK_MAX: Duration = Duration::from_millis(175);

/// Of several shards, how often each says what came.
const INFLOW_EVERY: Duration = Duration::from_millis(50);
/// Of what it said before, this part is forgotten each time.
const INFLOW_PART: u64 = 8;
/// A shard that has less than half of what is its own asks the others for it so often at most.
const ASK_EVERY: Duration = Duration::from_millis(1);
/// One step of giving frames to others is one in so many of what there is, and a few.
const GIVEN_PART: u64 = 8;
const GIVEN_MIN: u64 = 64;

/// How long a process has been refused frames, as far as it has looked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Starving {
    waited: Duration,
    looked: Instant,
}

impl Starving {
    fn begin() -> Self {
        Self { waited: Duration::ZERO, looked: Instant::now() }
    }

    /// Looks once more; whether it has been too long.
    fn is_too_long(&mut self) -> bool {
        let since = std::mem::replace(&mut self.looked, Instant::now());
        self.waited += self.looked.saturating_duration_since(since).min(LOOK_MAX);
        self.waited >= STARVED_MAX
    }
}

/// The local budget.
#[derive(Debug)]
pub(super) struct Budget {
    frames_max: u64,
    held: u64,
    /// The last request was refused.
    refused: bool,
    /// Nothing is granted, though this process has less than its share.
    starving: Option<Starving>,
    /// When ended processes were last looked for.
    looked: Option<Instant>,
    slot: Option<Slot>,
    /// Pages that had come when the inflow was noted last.
    came: u64,
    noted: Instant,
    /// When others were last asked for frames.
    asked: Option<Instant>,
    /// Of a shard: it got less than it wanted, since the inflow was noted.
    short: bool,
}

impl Budget {
    pub(super) fn new(frames_max: u64, slot: Option<Slot>) -> Self {
        Self {
            frames_max,
            held: 0,
            refused: false,
            starving: None,
            looked: None,
            slot,
            came: 0,
            noted: Instant::now(),
            asked: None,
            short: false,
        }
    }

    /// Asks for up to `frames` more; returns how many may be used.
    pub(super) fn grow(&mut self, frames: u64) -> u64 {
        let mut room = frames.min(self.frames_max - self.held.min(self.frames_max));
        // What a shard gives is for those that starve.
        if let Some(slot) = self.slot.as_ref().filter(|slot| slot.is_shard() && slot.others_starve()) {
            room = room.min(slot.fair_share().saturating_sub(self.held));
        }
        let mut granted = match &self.slot {
            Some(slot) if room > 0 => slot.grow(room),
            _ => room,
        };
        if let Some(slot) = &self.slot {
            let lacks = self.held + granted < slot.fair_share();
            // A shard does until it has its own, or gets what it wants: the others would take back what they give.
            let goes_on = slot.is_shard() && slot.is_starving();
            self.short |= granted < room;
            let starving = lacks && (granted == 0 || goes_on);
            slot.set_starving(starving);
            if !starving || room == 0 || slot.is_shard() {
                self.starving = None;
            } else if self.starving.get_or_insert_with(Starving::begin).is_too_long()
                && self.held < slot.floor()
            {
                granted = slot.grow_beyond(room.min(slot.floor() - self.held));
            }
        }
        self.refused = granted == 0;
        self.held += granted;
        granted
    }

    /// Whether it makes sense to ask for more.
    pub(super) fn may_grow(&self) -> bool {
        let is_refused = self.refused && !self.slot.as_ref().is_some_and(Slot::gets_what_others_give);
        !is_refused && self.held < self.frames_max
    }

    /// Of a shard that was refused: whether others should give at once.
    pub(super) fn asks_now(&mut self) -> bool {
        let is_poor =
            |slot: &Slot| slot.is_shard() && slot.is_starving() && self.held < slot.fair_share() / 2;
        let asks = self.slot.as_ref().is_some_and(is_poor)
            && self.asked.is_none_or(|asked| asked.elapsed() >= ASK_EVERY);
        if asks {
            self.asked = Some(Instant::now());
        }
        asks
    }

    /// Time has passed: others may have given frames back. What ended processes held comes back here, if somebody needs it.
    pub(super) fn look_again(&mut self) {
        self.refused = false;
        if let Some(slot) = &self.slot
            && slot.any_starve()
            && !slot.is_shard()
            && self.looked.is_none_or(|looked| looked.elapsed() >= REAP_EVERY)
        {
            slot.run().reap();
            self.looked = Some(Instant::now());
        }
    }

    /// So many pages have come altogether; `waits`: others do for frames. Of shards, what comes is their claim; who needs nothing does not starve.
    pub(super) fn note_inflow(&mut self, came: u64, waits: bool) {
        let Some(slot) = &self.slot else { return };
        if !slot.is_shard() {
            if came == std::mem::replace(&mut self.came, came) && !waits {
                slot.set_starving(false);
                self.starving = None;
            }
            return;
        }
        let elapsed = self.noted.elapsed();
        if elapsed < INFLOW_EVERY {
            return;
        }
        self.noted = Instant::now();
        let periods = (elapsed.as_millis() / INFLOW_EVERY.as_millis()).min(100) as u64;
        let new = came.wrapping_sub(std::mem::replace(&mut self.came, came)) / periods;
        let mut inflow = slot.inflow().load(Relaxed);
        for _ in 0..periods {
            inflow = inflow - inflow / INFLOW_PART + new;
        }
        // What is less than one part is never forgotten otherwise.
        slot.inflow().store(if new == 0 && inflow < INFLOW_PART { 0 } else { inflow }, Relaxed);
        if !std::mem::take(&mut self.short) || new == 0 {
            slot.set_starving(false);
        }
    }

    /// Of shards: so many pages may not be evicted.
    pub(super) fn set_pinned(&self, frames: u64) {
        if let Some(slot) = &self.slot {
            slot.set_pinned(frames);
        }
    }

    /// Pages of other shards that may not be evicted.
    pub(super) fn pinned_elsewhere(&self) -> u64 {
        self.slot.as_ref().map_or(0, Slot::pinned_elsewhere)
    }

    /// One of several pagers of this process.
    pub(super) fn is_shard(&self) -> bool {
        self.slot.as_ref().is_some_and(Slot::is_shard)
    }

    /// Takes frames that exist already (after a fork), even beyond the limit.
    pub(super) fn adopt(&mut self, frames: u64) {
        let granted = self.slot.as_ref().map_or(frames, |slot| slot.grow(frames));
        // What was not granted is held all the same until the evictor has given it up.
        self.held += granted;
    }

    /// Another limit.
    pub(super) fn set_frames_max(&mut self, frames_max: u64) {
        self.frames_max = frames_max;
        self.refused = false;
    }

    pub(super) fn frames_max(&self) -> u64 {
        self.frames_max
    }

    /// Gives frames back.
    pub(super) fn release(&mut self, frames: u64) {
        let frames = frames.min(self.held);
        self.held -= frames;
        self.refused &= frames == 0;
        if let Some(slot) = &self.slot {
            slot.release(frames);
        }
    }

    /// As [`Budget::release`], when `left` frames stay in use: frames that were never granted are not given back.
    pub(super) fn release_excess(&mut self, frames: u64, left: u64) {
        self.release(frames.min(self.held.saturating_sub(left)));
    }

    /// Whether some of `frames` in use were never granted: a child has them of its parent.
    pub(super) fn owes(&self, frames: u64) -> bool {
        frames > self.held
    }

    /// Asks for what was never granted of `frames` in use, which comes before anything else. True when there was something.
    pub(super) fn pay(&mut self, frames: u64) -> bool {
        let owes = self.owes(frames);
        if owes {
            self.grow(frames - self.held);
        }
        owes
    }

    /// How many of `frames` held must be given up now.
    pub(super) fn excess(&self, frames: u64) -> u64 {
        let mut kept = self.held.min(self.frames_max);
        // What a child has of its parent it keeps up to its share: others give as much, and it would have next to nothing until then.
        if let Some(slot) = self.slot.as_ref().filter(|slot| !slot.is_shard()) {
            kept = kept.max(slot.fair_share());
        }
        let over = frames.saturating_sub(kept);
        match &self.slot {
            Some(slot) if slot.others_starve() => {
                let more = frames.saturating_sub(slot.fair_share());
                // None should stand still while it gives.
                over.max(more.min(frames / GIVEN_PART + GIVEN_MIN))
            }
            _ => over,
        }
    }

    /// Whether others have less than their share.
    pub(super) fn others_starve(&self) -> bool {
        self.slot.as_ref().is_some_and(Slot::others_starve)
    }

    /// Whether others may ask for frames at any time.
    pub(super) fn is_shared(&self) -> bool {
        self.slot.is_some()
    }

    /// Whether no other process of the run has far memory.
    pub(super) fn is_alone(&self) -> bool {
        self.slot.as_ref().is_none_or(|slot| slot.run().processes() <= 1)
    }

    /// Whether a child of this process has far memory, and lives.
    pub(super) fn has_children(&self) -> bool {
        self.slot.as_ref().is_some_and(|slot| slot.run().has_children())
    }

    /// The lenders that are `lost`, and those that were left, have a bit each.
    pub(super) fn publish(&self, stats: &PagerStats, detail: &PagerDetail, (lost, left): (u64, u64)) {
        if let Some(slot) = &self.slot {
            slot.publish(stats, detail);
            slot.add_gone(lost, left);
        }
    }

    /// Leaves a message for the supervisor of the run; whether there is one to show it.
    pub(super) fn set_message(&self, message: &str) -> bool {
        self.slot.as_ref().is_some_and(|slot| !slot.is_shard() && slot.set_message(message))
    }

    /// After fork(2), in the child: the parent keeps its slot.
    pub(super) fn replace_after_fork(&mut self, slot: Option<Slot>) {
        std::mem::forget(std::mem::replace(&mut self.slot, slot));
        self.held = 0;
        self.starving = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runfile::{RunFile, RunParams};

    #[test]
    fn a_shard_gets_what_comes_to_it_and_others_give_in_steps() {
        let run = RunFile::of_shards(800 * 4096, 2).unwrap();
        let mut all = [0, 1].map(|number| Budget::new(800, Some(run.join_shard(number))));
        let [one, other] = &mut all;
        assert_eq!((one.grow(700), other.grow(700), other.grow(1)), (700, 100, 0));
        // Nothing has come: equal shares, and steps.
        assert_eq!((one.excess(700), other.excess(100)), (700 / 8 + 64, 0));
        // To this one everything.
        std::thread::sleep(INFLOW_EVERY);
        one.note_inflow(1000, false);
        other.note_inflow(0, false);
        assert_eq!(one.excess(700), 0);
        one.look_again();
        other.look_again();
        assert_eq!((run.used(), one.grow(1)), (800, 0), "who lives is not taken for dead");
        // To the other one: it may have all but the floor, and what is pinned.
        for _ in 0..60 {
            std::thread::sleep(INFLOW_EVERY / 50);
            one.noted -= INFLOW_EVERY;
            one.note_inflow(1000, false);
        }
        std::thread::sleep(INFLOW_EVERY);
        other.note_inflow(1000, false);
        assert_eq!(other.grow(1), 0);
        one.set_pinned(300);
        let mut held = 700;
        while one.excess(held) > 0 {
            let given = one.excess(held);
            one.release_excess(given, held - given);
            held -= given;
            other.grow(given);
            assert_eq!(run.used(), 800);
            other.grow(1);
        }
        assert!((400..=401).contains(&held), "{held}");
        // With less there is nothing to get until it is used no more.
        run.set_budget(600);
        other.release(100);
        assert_eq!((other.grow(1), run.used(), run.used_peak()), (0, 700, 800));
        assert_eq!((run.shard_floor(), other.pinned_elsewhere(), one.is_shard()), (75, 300, true));
        assert!(!one.set_message("no supervisor"), "nobody would show it");
    }

    #[test]
    fn a_shard_asks_when_it_has_far_less_than_its_own_and_gets_what_is_given() {
        let run = RunFile::of_shards(800 * 4096, 2).unwrap();
        let mut all = [0, 1].map(|number| Budget::new(800, Some(run.join_shard(number))));
        let [one, other] = &mut all;
        assert_eq!((one.grow(760), other.grow(64), other.grow(64)), (760, 40, 0));
        // Of 400. Once in a while.
        assert!(other.asks_now() && !other.may_grow());
        other.asked = Some(Instant::now() + 100_000 * ASK_EVERY);
        assert!(!other.asks_now());
        other.asked = None;
        assert!(other.asks_now() && !one.asks_now());
        one.release_excess(100, 660);
        // Not for who has more than its own, though no tick has passed.
        assert_eq!((one.grow(64), other.may_grow(), other.grow(64)), (0, true, 64));
        // It goes on starving, so the others go on giving.
        assert!(one.others_starve());
        assert_eq!((one.grow(64), other.grow(64), other.grow(64)), (0, 36, 0));
        one.release_excess(200, 460);
        assert_eq!(other.grow(200), 200);
        other.asked = None;
        // More than half: the ticks suffice.
        assert_eq!((other.grow(1), other.asks_now(), one.others_starve()), (0, false, true));
        one.release_excess(60, 400);
        assert_eq!((other.grow(60), one.others_starve(), one.grow(1), run.used()), (60, false, 0, 800));
    }

    #[test]
    fn a_shard_that_gets_what_it_wants_does_not_starve() {
        let run = RunFile::of_shards(800 * 4096, 2).unwrap();
        let mut all = [0, 1].map(|number| Budget::new(800, Some(run.join_shard(number))));
        let [one, other] = &mut all;
        assert_eq!((one.grow(800), other.grow(64)), (800, 0));
        one.release_excess(200, 600);
        // It uses few frames again and again.
        let mut came = 0;
        let mut turn = |other: &mut Budget| {
            other.noted -= INFLOW_EVERY;
            came += 64;
            assert_eq!(other.grow(64), 64);
            other.release(64);
            other.note_inflow(came, false);
        };
        turn(other);
        assert!(one.others_starve(), "it was refused in this time");
        turn(other);
        assert!(!one.others_starve());
        assert_eq!((one.excess(600), one.grow(200), run.used()), (0, 200, 800));
    }

    #[test]
    fn a_child_pays_back_what_it_has_of_its_parent_and_who_idles_does_not_starve() {
        let path = std::env::temp_dir().join(format!("netvm-budget-owed-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let params = RunParams { budget_bytes: 1000 * 4096, ..RunParams::default() };
        let run = RunFile::create(&path, &params).unwrap();
        let mut parent = Budget::new(1000, Some(run.join(std::process::id()).unwrap()));
        assert_eq!(parent.grow(900), 900);
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut child = Budget::new(1000, Some(run.join(other.id()).unwrap()));
        child.adopt(800);
        // Its share it keeps.
        assert_eq!((child.held, child.excess(800), child.excess(500)), (100, 300, 0));
        // What it lets go of was never granted.
        child.release_excess(650, 150);
        assert_eq!((child.held, run.used()), (100, 1000));
        assert!(child.pay(150) && child.held == 100);
        // The parent gives in steps, as long as the child wants something.
        assert_eq!(parent.excess(900), 900 / GIVEN_PART + GIVEN_MIN);
        child.note_inflow(7, false);
        child.note_inflow(7, true);
        assert!(parent.excess(900) > 0, "faults wait for frames");
        child.note_inflow(7, false);
        assert_eq!(parent.excess(900), 0);
        // It owes something as long as it is there, busy or not.
        let mut given = 0;
        while child.pay(500) {
            let excess = parent.excess(900 - given);
            parent.release_excess(excess, 900 - given - excess);
            given += excess;
        }
        assert_eq!((child.held, child.excess(500), run.used()), (500, 0, 900 - given + 500));
        other.kill().unwrap();
        other.wait().unwrap();
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn who_gets_nothing_for_long_goes_a_little_beyond() {
        let path = std::env::temp_dir().join(format!("netvm-budget-floor-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let params = RunParams { budget_bytes: 1000 * 4096, ..RunParams::default() };
        let run = RunFile::create(&path, &params).unwrap();
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let holder = run.join(other.id()).unwrap();
        let floor = holder.floor();
        assert_eq!(holder.grow(1000), 1000);
        let mut budget = Budget::new(1000, Some(run.join(std::process::id()).unwrap()));
        assert_eq!((budget.grow(64), run.stuck(), run.used()), (0, None, 1000));
        // While nobody looks nobody could have given anything.
        let stood_still = |starving: Starving| Starving { looked: starving.looked - STARVED_MAX, ..starving };
        budget.starving = budget.starving.map(stood_still);
        assert_eq!((budget.grow(64), run.stuck()), (0, None));
        let waited = budget.starving.unwrap().waited;
        assert!((LOOK_MAX..STARVED_MAX).contains(&waited), "{waited:?}");
        budget.starving = budget.starving.map(|starving| Starving { waited: STARVED_MAX, ..starving });
        assert_eq!((budget.grow(64), budget.grow(1000), budget.grow(64)), (64, floor - 64, 0));
        let stuck = run.stuck().unwrap();
        assert_eq!(
            (stuck.pid, stuck.holder, stuck.frames),
            (Some(std::process::id()), Some(other.id()), 1000)
        );
        // Nobody gets what is beyond once more.
        holder.release(floor);
        assert_eq!((budget.grow(64), run.used()), (0, 1000));
        // Something was given: the time begins again.
        holder.release(64);
        assert_eq!((budget.grow(64), budget.starving), (64, None));
        other.kill().unwrap();
        other.wait().unwrap();
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn what_an_ended_process_held_comes_back_to_one_that_starves() {
        let path = std::env::temp_dir().join(format!("netvm-budget-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let params = RunParams { budget_bytes: 100 * 4096, ..RunParams::default() };
        let run = RunFile::create(&path, &params).unwrap();
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert_eq!(run.join(other.id()).unwrap().grow(100), 100);
        let mut budget = Budget::new(100, Some(run.join(std::process::id()).unwrap()));
        budget.look_again();
        assert_eq!(budget.grow(10), 0);
        // It lives, and will give back some by itself.
        budget.look_again();
        assert_eq!(budget.grow(10), 0);
        other.kill().unwrap();
        other.wait().unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while budget.grow(10) == 0 {
            assert!(Instant::now() < until);
            budget.look_again();
        }
        assert_eq!((budget.held, budget.excess(10)), (10, 0));
        std::fs::remove_file(&path).unwrap();
    }
}
