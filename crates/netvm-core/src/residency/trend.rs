//! Strides: the difference that most of the last faults have in common.
//!
//! The majority of the last four differences, then of eight (Al Maruf, Chowdhury: *Effectively prefetching remote memory with
//! Leap*, USENIX ATC 2020, algorithm 1), in bytes: only the latest one counts here, so there is nobody to vote for. Or, where those have nothing in common, one that all have in units. Faults are told apart by where they are, so that
//! strides through several arrays do not hide each other.

use super::stride::SMALL_UNITS;

/// Parts of the area that are followed at once,
const LANES: usize = 8;
/// of so many units (256 MiB in pages) each.
const LANE_UNITS_LOG: u32 = 16;
const DIFFERENCES: usize = 8;
const FEWEST: usize = 4;
/// Steps that a fault may be from the one before.
const STEPS_MAX: i64 = 256;

#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    part: u64,
    /// The last fault, in bytes,
    last: u64,
    /// and in units.
    number: u64,
    /// In bytes; the latest at `count - 1`, modulo their number.
    differences: [i64; DIFFERENCES],
    /// The last one in units, and how often it was the same.
    units: i64,
    same: usize,
    /// The stride that was found last.
    step: Option<i64>,
    count: usize,
    used: u64,
}

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub(super) struct Trends {
    lanes: [Lane; LANES],
    clock: u64,
}

impl Trends {
    /// Notes a fault at `at`, in bytes, in the unit `number`, and returns the stride that it has if most before it had it, too: in bytes, a unit or more
    /// down, or two or more up, as one up is a stream in order.
    ///
    /// What is known to have a stride has it again with the first fault that is so many steps from the last one, if all between are `here`.
    pub(super) fn note(
        &mut self,
        at: u64,
        number: u64,
        unit: u64,
        here: &impl Fn(u32) -> bool,
    ) -> Option<i64> {
        self.clock += 1;
        let (part, clock) = (number >> LANE_UNITS_LOG, self.clock);
        let mut lanes = self.lanes.iter_mut();
        let Some(lane) = lanes.find(|lane| lane.is_of(part)) else {
            let oldest = self.lanes.iter_mut().min_by_key(|lane| lane.used)?;
            *oldest = Lane { part, last: at, number, used: clock, ..Lane::default() };
            return None;
        };
        let units = number as i64 - lane.number as i64;
        let bytes = at as i64 - lane.last as i64;
        (lane.last, lane.number, lane.used) = (at, number, clock);
        if units == 0 {
            return None;
        }
        lane.differences[lane.count % DIFFERENCES] = bytes;
        lane.count += 1;
        lane.same = if units == lane.units { lane.same + 1 } else { 1 };
        lane.units = units;
        let known = lane.step.filter(|&step| {
            step.unsigned_abs() > SMALL_UNITS * unit && is_multiple(at, bytes, step, unit, here)
        });
        let unit = unit as i64;
        let step = if let Some(step) = known {
            lane.step = None;
            step
        } else if [FEWEST, DIFFERENCES].into_iter().any(|last| lane.is_majority(bytes, last)) {
            bytes
        } else if lane.same >= FEWEST {
            units * unit
        } else {
            return None;
        };
        (step >= 2 * unit || step <= -unit).then_some(step)
    }

    /// The fault that was noted last, at `at`, has this stride.
    pub(super) fn keep(&mut self, at: u64, unit: u64, step: i64) {
        let part = (at / unit) >> LANE_UNITS_LOG;
        if let Some(lane) = self.lanes.iter_mut().find(|lane| lane.is_of(part)) {
            lane.step = Some(step);
        }
    }
}

/// Whether a fault at `at`, `bytes` from the one before, is one or more steps from it, and all between are here.
fn is_multiple(at: u64, bytes: i64, step: i64, unit: u64, here: &impl Fn(u32) -> bool) -> bool {
    // Within a unit of where it should be, as not all elements are touched at the same place first.
    let slack = unit as i64 - 1;
    let steps = (bytes.abs() + slack.min(step.abs() / 2)) / step.abs();
    let is_near = (bytes - steps * step).abs() <= slack;
    is_near
        && (1..=STEPS_MAX).contains(&steps)
        && (1..steps).all(|index| here(((at as i64 - index * step) / unit as i64) as u32))
}

impl Lane {
    fn is_of(&self, part: u64) -> bool {
        self.used > 0 && self.part == part
    }

    /// Whether more than half of the last `last` differences are this one.
    fn is_majority(&self, difference: i64, last: usize) -> bool {
        let latest = |index: usize| self.differences[index % DIFFERENCES];
        self.count >= last
            && (self.count - last..self.count).filter(|&index| latest(index) == difference).count() * 2 > last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn strides(trends: &mut Trends, pages: impl IntoIterator<Item = u64>) -> alloc::vec::Vec<Option<i64>> {
        pages
            .into_iter()
            .map(|page| trends.note(page * PAGE, page, PAGE, &|_| false).map(|step| step / PAGE as i64))
            .collect()
    }

    #[test]
    fn a_stride_is_known_after_three_equal_steps() {
        let found = strides(&mut Trends::default(), (0..6).map(|index| 100 + index * 17));
        assert_eq!(found, [None, None, None, None, Some(17), Some(17)]);
        let found = strides(&mut Trends::default(), (0..6).map(|index| 10_000 - index * 3));
        assert_eq!(found.last(), Some(&Some(-3)));
    }

    #[test]
    fn noise_does_not_hide_it_and_is_none_itself() {
        let mut trends = Trends::default();
        strides(&mut trends, [0, 17, 34, 51]);
        assert_eq!(strides(&mut trends, [68, 9000, 9017]), [Some(17), None, Some(17)], "five of eight");
        let mut page = 12345_u32;
        let mut found = 0;
        for _ in 0..100_000 {
            page = page.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            found += u32::from(
                trends.note(u64::from(page >> 16) * PAGE, u64::from(page >> 16), PAGE, &|_| false).is_some(),
            );
        }
        assert!(found < 10, "{found}");
    }

    #[test]
    fn two_arrays_by_turns_have_each_their_own() {
        let mut trends = Trends::default();
        for index in 0..10 {
            let found = strides(&mut trends, [index * 9, (5 << LANE_UNITS_LOG) + index * 100]);
            assert!(index < 4 || found == [Some(9), Some(100)], "{found:?}");
        }
    }

    #[test]
    fn rows_need_not_be_whole_pages() {
        // 4.6875 pages, and the same by where in its page nobody knows.
        let row = 19_200_u64;
        let mut trends = Trends::default();
        let found: alloc::vec::Vec<_> =
            (0..12).map(|index| trends.note(index * row, index * row / PAGE, PAGE, &|_| false)).collect();
        assert_eq!(found[3..], [&[None][..], &[Some(row as i64); 8]].concat());
        // Places in the page that vary do not hide a stride of pages.
        let jitter = [7, 900, 3000, 64, 2048, 11];
        let mut trends = Trends::default();
        let found: alloc::vec::Vec<_> = jitter
            .iter()
            .enumerate()
            .map(|(index, jitter)| {
                trends.note(index as u64 * 17 * PAGE + jitter, index as u64 * 17, PAGE, &|_| false)
            })
            .collect();
        assert_eq!(found[4..], [Some(17 * 4096); 2]);
    }
}
