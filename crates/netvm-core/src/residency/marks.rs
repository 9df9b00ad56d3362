//! A small number for each page: pins, advice.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range;

/// A number for each page, 0 unless it was changed. Costs as much as there are ranges with different numbers.
#[derive(Clone, Debug, Default)]
pub struct Marks {
    /// From this page on; 0 before the first.
    from: BTreeMap<u32, u32>,
}

impl Marks {
    /// All 0.
    pub const fn new() -> Self {
        Self { from: BTreeMap::new() }
    }

    /// Whether all are 0.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.from.is_empty()
    }

    /// The number of a page.
    #[inline]
    pub fn get(&self, page: u32) -> u32 {
        if self.from.is_empty() {
            0
        } else {
            self.from.range(..=page).next_back().map_or(0, |(_, &mark)| mark)
        }
    }

    /// Changes the numbers of `pages`.
    pub fn change(&mut self, pages: Range<u32>, change: impl Fn(u32) -> u32) {
        if pages.is_empty() {
            return;
        }
        let (first, behind) = (self.get(pages.start), self.get(pages.end));
        self.from.insert(pages.start, first);
        self.from.insert(pages.end, behind);
        self.from.range_mut(pages.clone()).for_each(|(_, mark)| *mark = change(*mark));
        // Neighbours with the same number are one range.
        let mut last = pages.start.checked_sub(1).map_or(0, |page| self.get(page));
        let same = |(&start, &mark): (&u32, &u32)| {
            let same = mark == last;
            last = mark;
            same.then_some(start)
        };
        let same: Vec<u32> = self.from.range(pages.start..=pages.end).filter_map(same).collect();
        for start in same {
            self.from.remove(&start);
        }
    }

    /// The numbers of `pages` go to as many from `to` on, which do not overlap them, and whose own are forgotten; `pages` have 0 then.
    pub fn relocate(&mut self, pages: Range<u32>, to: u32) {
        if self.is_empty() {
            return;
        }
        let inside = self.from.range(pages.clone()).map(|(&start, &mark)| (start, mark));
        let mut runs: Vec<_> = [(pages.start, self.get(pages.start))].into_iter().chain(inside).collect();
        runs.push((pages.end, 0));
        self.change(to..to + (pages.end - pages.start), |_| 0);
        self.change(pages.clone(), |_| 0);
        for run in runs.windows(2) {
            let (start, end) = (run[0].0 - pages.start + to, run[1].0 - pages.start + to);
            self.change(start..end, |_| run[0].1);
        }
    }

    /// Pages whose number is not 0.
    pub fn count(&self) -> u64 {
        let (mut count, mut open) = (0, None);
        for (&start, &mark) in &self.from {
            if let Some(from) = open.take() {
                count += u64::from(start - from);
            }
            open = (mark != 0).then_some(start);
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_an_array_of_numbers() {
        let (mut marks, mut model) = (Marks::new(), [0_u32; 200]);
        let mut random = 7_u64;
        let mut below = |end: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((random >> 33) % end) as u32
        };
        for _ in 0..5000 {
            let (a, b) = (below(200), below(200));
            let pages = a.min(b)..a.max(b);
            let what = below(5);
            if what == 4 {
                let length = pages.end - pages.start;
                let to = below(200);
                if to + length <= 200 && (to >= pages.end || to + length <= pages.start) {
                    let (from, to_end) = (pages.start as usize..pages.end as usize, (to + length) as usize);
                    let moved = model[from.clone()].to_vec();
                    model[from].fill(0);
                    model[to as usize..to_end].copy_from_slice(&moved);
                    marks.relocate(pages, to);
                }
                continue;
            }
            let change = |mark: u32| match what {
                0 => mark + 1,
                1 => mark.saturating_sub(1),
                2 => 0,
                _ => mark.min(2),
            };
            marks.change(pages.clone(), change);
            model[pages.start as usize..pages.end as usize].iter_mut().for_each(|mark| *mark = change(*mark));
            for (page, &mark) in model.iter().enumerate() {
                assert_eq!(marks.get(page as u32), mark);
            }
            assert_eq!(marks.count(), model.iter().filter(|&&mark| mark != 0).count() as u64);
        }
        marks.change(0..200, |_| 0);
        assert!(marks.is_empty());
    }
}
