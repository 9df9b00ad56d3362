//! Strides: the difference that most of the last faults have in common.
//!
//! By Boyer and Moore's vote over the last four differences, then over eight (Al Maruf, Chowdhury: *Effectively prefetching remote memory with
//! Leap*, USENIX ATC 2020, algorithm 1). Faults are told apart by where they are, so that strides through several arrays do not hide each
//! other.

/// Parts of the area that are followed at once,
const LANES: usize = 8;
/// of so many pages (256 MiB) each.
const LANE_PAGES_LOG: u32 = 16;
const DIFFERENCES: usize = 8;
const FEWEST: usize = 4;

#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    part: u32,
    last: u32,
    /// The latest at `count - 1`, modulo their number.
    differences: [i32; DIFFERENCES],
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
    /// Notes a fault, and returns the stride that it has if most before it had it, too. Never 0.
    pub(super) fn note(&mut self, page: u32) -> Option<i32> {
        self.clock += 1;
        let (part, clock) = (page >> LANE_PAGES_LOG, self.clock);
        let known = self.lanes.iter().position(|lane| lane.used > 0 && lane.part == part);
        let Some(index) = known else {
            let oldest = self.lanes.iter_mut().min_by_key(|lane| lane.used)?;
            *oldest = Lane { part, last: page, used: clock, ..Lane::default() };
            return None;
        };
        let lane = &mut self.lanes[index];
        // A part has fewer pages than an i32 has numbers.
        let difference = page.wrapping_sub(lane.last) as i32;
        (lane.last, lane.used) = (page, clock);
        if difference == 0 {
            return None;
        }
        lane.differences[lane.count % DIFFERENCES] = difference;
        lane.count += 1;
        [FEWEST, DIFFERENCES]
            .into_iter()
            .find_map(|last| lane.majority(last))
            .filter(|&stride| stride == difference)
    }
}

impl Lane {
    /// What more than half of the last `last` differences are.
    fn majority(&self, last: usize) -> Option<i32> {
        if self.count < last {
            return None;
        }
        let latest = || (self.count - last..self.count).map(|index| self.differences[index % DIFFERENCES]);
        let (mut candidate, mut votes) = (0, 0);
        for difference in latest() {
            if votes == 0 {
                candidate = difference;
            }
            votes += if difference == candidate { 1 } else { -1 };
        }
        (latest().filter(|&difference| difference == candidate).count() * 2 > last).then_some(candidate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strides(trends: &mut Trends, pages: impl IntoIterator<Item = u32>) -> alloc::vec::Vec<Option<i32>> {
        pages.into_iter().map(|page| trends.note(page)).collect()
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
            found += u32::from(trends.note(page >> 16).is_some());
        }
        assert!(found < 10, "{found}");
    }

    #[test]
    fn two_arrays_by_turns_have_each_their_own() {
        let mut trends = Trends::default();
        for index in 0..10 {
            let found = strides(&mut trends, [index * 9, (5 << LANE_PAGES_LOG) + index * 100]);
            assert!(index < 4 || found == [Some(9), Some(100)], "{found:?}");
        }
    }
}
