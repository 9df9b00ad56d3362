//! How many frames this process may hold: its own limit, or its share of the run's.

use crate::detail::PagerDetail;
use crate::runfile::Slot;
use crate::stats::PagerStats;
use std::time::{Duration, Instant};

/// While a process starves, ended ones are looked for so often.
const REAP_EVERY: Duration = Duration::from_millis(50);

/// The local budget.
#[derive(Debug)]
pub(super) struct Budget {
    frames_max: u64,
    held: u64,
    /// The last request was refused.
    refused: bool,
    /// When ended processes were last looked for.
    looked: Option<Instant>,
    slot: Option<Slot>,
}

impl Budget {
    pub(super) fn new(frames_max: u64, slot: Option<Slot>) -> Self {
        Self { frames_max, held: 0, refused: false, looked: None, slot }
    }

    /// Asks for up to `frames` more; returns how many may be used.
    pub(super) fn grow(&mut self, frames: u64) -> u64 {
        let room = frames.min(self.frames_max - self.held.min(self.frames_max));
        let granted = match &self.slot {
            Some(slot) if room > 0 => slot.grow(room),
            _ => room,
        };
        if let Some(slot) = &self.slot {
            slot.set_starving(granted == 0 && self.held < slot.fair_share());
        }
        self.refused = granted == 0;
        self.held += granted;
        granted
    }

    /// Whether it makes sense to ask for more.
    pub(super) fn may_grow(&self) -> bool {
        !self.refused && self.held < self.frames_max
    }

    /// Time has passed: others may have given frames back. What ended processes held comes back here, if somebody needs it.
    pub(super) fn look_again(&mut self) {
        self.refused = false;
        if let Some(slot) = &self.slot
            && slot.any_starve()
            && self.looked.is_none_or(|looked| looked.elapsed() >= REAP_EVERY)
        {
            slot.run().reap();
            self.looked = Some(Instant::now());
        }
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

    /// How many of `frames` held must be given up now.
    pub(super) fn excess(&self, frames: u64) -> u64 {
        let over = frames.saturating_sub(self.held.min(self.frames_max));
        match &self.slot {
            Some(slot) if slot.others_starve() => over.max(frames.saturating_sub(slot.fair_share())),
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

    pub(super) fn publish(&self, stats: &PagerStats, detail: &PagerDetail, lost_lenders: u64) {
        if let Some(slot) = &self.slot {
            slot.publish(stats, detail);
            if lost_lenders != 0 {
                slot.add_lost(lost_lenders);
            }
        }
    }

    /// Leaves a message for the supervisor of the run; whether there is one to show it.
    pub(super) fn set_message(&self, message: &str) -> bool {
        self.slot.as_ref().is_some_and(|slot| slot.set_message(message))
    }

    /// After fork(2), in the child: the parent keeps its slot.
    pub(super) fn replace_after_fork(&mut self, slot: Option<Slot>) {
        std::mem::forget(std::mem::replace(&mut self.slot, slot));
        self.held = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runfile::{RunFile, RunParams};

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
