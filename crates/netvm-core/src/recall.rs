//! Whom a lender asks for memory when its machine is short of it, and for how much. docs/design/lending.md.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

/// A borrower that was asked and gives nothing back is asked again, or reckoned with again, after so long.
pub const PATIENCE_MS: u64 = 10_000;
/// Under pressure, one part in this many of what is lent is asked back at a time.
const PRESSURE_PART: u64 = 8;

/// What a lender leaves to others on its machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes that are to be available; 0: whatever there is.
    pub reserve_bytes: u64,
    /// Hundredths of a percent of the time in which something may wait for memory; 0: any.
    pub stall: u32,
}

/// How the machine is doing; `None` for what is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Bytes that are available.
    pub available_bytes: Option<u64>,
    /// Hundredths of a percent of the last seconds in which something waited for memory.
    pub stall: Option<u32>,
}

impl Limits {
    /// Bytes that are missing, at a lender that uses `used_bytes`: never more than those.
    pub fn missing(&self, reading: Reading, used_bytes: u64) -> u64 {
        let reserve = reading.available_bytes.map_or(0, |bytes| self.reserve_bytes.saturating_sub(bytes));
        let is_stalled = self.stall > 0 && reading.stall.is_some_and(|stall| stall >= self.stall);
        let stall = if is_stalled { (used_bytes / PRESSURE_PART).max(1) } else { 0 };
        reserve.max(stall).min(used_bytes)
    }
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    /// When it was asked, or last gave something back.
    at_ms: u64,
    held: u64,
    /// What it will hold at most when it has done so.
    until: u64,
    cannot: bool,
}

/// What was asked of whom.
#[derive(Clone, Debug, Default)]
pub struct Recalls {
    asked: BTreeMap<u64, Asked>,
    missing: u64,
    stuck: bool,
}

/// A borrower to be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Its number.
    pub borrower: u64,
    /// How many bytes to give back; 0: none any more.
    pub bytes: u64,
}

impl Recalls {
    /// Nobody.
    pub fn new() -> Self {
        Self::default()
    }

    /// So many bytes are missing, and these borrowers hold so many: whom to ask. Those who hold most come first.
    pub fn look(&mut self, now_ms: u64, missing: u64, borrowers: &[(u64, u64)]) -> Vec<Ask> {
        let held: BTreeMap<u64, u64> = borrowers.iter().copied().collect();
        self.missing = missing;
        if missing == 0 {
            self.stuck = false;
            let asked = core::mem::take(&mut self.asked);
            return asked.into_keys().map(|borrower| Ask { borrower, bytes: 0 }).collect();
        }
        self.asked.retain(|borrower, asked| {
            let held = held.get(borrower).copied();
            if held.is_some_and(|held| held < asked.held) {
                (asked.held, asked.at_ms) = (held.unwrap_or(0), now_ms);
            }
            let is_patient = now_ms.saturating_sub(asked.at_ms) < PATIENCE_MS;
            held.is_some_and(|held| (held > asked.until || asked.cannot) && is_patient)
        });
        let under_way: u64 = self
            .asked
            .iter()
            .filter(|(_, asked)| !asked.cannot)
            .map(|(borrower, asked)| held.get(borrower).map_or(0, |held| held.saturating_sub(asked.until)))
            .sum();
        let mut left = missing.saturating_sub(under_way);
        let mut free: Vec<(u64, u64)> =
            borrowers.iter().copied().filter(|(borrower, _)| !self.asked.contains_key(borrower)).collect();
        free.sort_by_key(|&(borrower, held)| (core::cmp::Reverse(held), borrower));
        let mut asks = Vec::new();
        for (borrower, held) in free {
            let bytes = left.min(held);
            if bytes == 0 {
                break;
            }
            left -= bytes;
            self.asked.insert(borrower, Asked { at_ms: now_ms, held, until: held - bytes, cannot: false });
            asks.push(Ask { borrower, bytes });
        }
        let waits = self.asked.values().any(|asked| !asked.cannot);
        self.stuck = !waits;
        asks
    }

    /// A borrower has nowhere else to put what it was asked for.
    pub fn cannot(&mut self, borrower: u64) {
        if let Some(asked) = self.asked.get_mut(&borrower) {
            asked.cannot = true;
        }
    }

    /// A borrower has gone.
    pub fn forget(&mut self, borrower: u64) {
        self.asked.remove(&borrower);
    }

    /// Bytes that were missing when last looked.
    pub fn missing(&self) -> u64 {
        self.missing
    }

    /// Something is missing, and nobody can give it back.
    pub fn is_stuck(&self) -> bool {
        self.stuck
    }

    /// What a borrower was asked to give back and still has, given what it holds.
    pub fn asked_of(&self, borrower: u64, held: u64) -> u64 {
        self.asked.get(&borrower).map_or(0, |asked| held.saturating_sub(asked.until))
    }

    /// Whether a borrower has said that it cannot.
    pub fn has_refused(&self, borrower: u64) -> bool {
        self.asked.get(&borrower).is_some_and(|asked| asked.cannot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::Random;
    use alloc::vec;

    const MIB: u64 = 1 << 20;

    #[test]
    fn what_is_missing_is_never_more_than_what_is_used() {
        let limits = Limits { reserve_bytes: 100 * MIB, stall: 500 };
        let missing = |available: Option<u64>, stall, used| {
            limits.missing(Reading { available_bytes: available.map(|mib| mib * MIB), stall }, used * MIB)
                / MIB
        };
        assert_eq!(missing(Some(150), Some(499), 80), 0);
        assert_eq!(missing(Some(70), None, 80), 30);
        assert_eq!(missing(Some(0), None, 80), 80);
        assert_eq!(missing(Some(150), Some(500), 80), 10);
        assert_eq!(missing(Some(70), Some(9900), 80), 30);
        assert_eq!(missing(None, None, 80), 0);
        assert_eq!(
            Limits::default().missing(Reading { available_bytes: Some(0), stall: Some(10_000) }, MIB),
            0
        );
    }

    /// Borrowers that give back late, in slabs, more than they were asked for, or not at all.
    #[test]
    fn memory_comes_back_if_somebody_can_give_it() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let slab = 16 * MIB;
            let count = 1 + random.below(5);
            let mut held: Vec<(u64, u64)> = (0..count).map(|n| (n, (1 + random.below(20)) * slab)).collect();
            let able: Vec<bool> = held.iter().map(|_| !random.once_in(3)).collect();
            let mut due = vec![0_u64; held.len()];
            let mut recalls = Recalls::new();
            let used: u64 = held.iter().map(|(_, held)| held).sum();
            let wanted = random.below(used) + 1;
            let (mut asks, mut now) = (0, 0);
            let gone = |held: &[(u64, u64)]| used - held.iter().map(|(_, held)| held).sum::<u64>();
            let can: u64 = held.iter().zip(&able).filter(|(_, able)| **able).map(|((_, held), _)| held).sum();
            while now < 200_000 {
                now += 500;
                let missing = wanted.saturating_sub(gone(&held));
                for Ask { borrower, bytes } in recalls.look(now, missing, &held) {
                    let index = borrower as usize;
                    assert!(bytes <= held[index].1 && (bytes > 0) == (missing > 0));
                    asks += 1;
                    if able[index] {
                        // The last one counts.
                        due[index] = bytes.div_ceil(slab);
                    } else if bytes > 0 {
                        recalls.cannot(borrower);
                    }
                }
                for index in 0..held.len() {
                    if due[index] > 0 && random.once_in(3) {
                        due[index] -= 1;
                        held[index].1 -= slab.min(held[index].1);
                    }
                }
            }
            let missing = wanted.saturating_sub(gone(&held));
            assert_eq!(missing, if can >= wanted { 0 } else { missing.max(wanted - can) }, "seed {seed}");
            assert_eq!(recalls.is_stuck(), missing > 0, "seed {seed}");
            assert!(gone(&held) < 2 * wanted + slab * count, "seed {seed}: far more than was missing");
            assert!(asks < 200, "seed {seed}: {asks}");
            assert!(recalls.look(now, 0, &held).iter().all(|ask| ask.bytes == 0) && !recalls.is_stuck());
            assert!(recalls.look(now, 0, &held).is_empty());
        }
    }
}
