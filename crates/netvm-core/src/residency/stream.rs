//! Prefetch: recognises streams of faults, in order or with a stride, and says how far to run ahead.

use super::trend::Trends;

/// Streams followed at once: enough for a few threads that each read a few arrays.
const STREAMS: usize = 16;
/// A stream ends when it is not continued for so many faults,
const PATIENCE: u64 = 64;
/// and so many times as many as there were between the last two that continued it.
const GAPS: u64 = 4;
/// It is expected sooner, after so many faults,
const DUE: u64 = 4;
/// and so many times as many as there were between those two.
const DUE_GAPS: u64 = 2;
/// Gap in pages by which a fault may miss the expected page and still continue the stream.
const SLACK: u32 = 4;
/// Longest window of a stream with a stride: its pages come one by one.
const STRIDED_MAX: u32 = 32;

/// How far to go at a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Pages to bring in and map with the faulting one, itself included (1: no stream).
    pub map: u32,
    /// Pages behind those to bring into the pool, unmapped.
    pub fetch: u32,
    /// From one of these pages to the next, never 0; 1 in order.
    pub step: i32,
}

impl Ahead {
    /// Only the page itself.
    pub const ALONE: Self = Self { map: 1, fetch: 0, step: 1 };

    /// With a window of so many pages, and as many behind them once it is wide enough.
    fn window(pages: u32, step: i32) -> Self {
        Self { map: pages, fetch: if pages >= 4 { pages } else { 0 }, step }
    }

    /// The page `index` steps from `page` on, if there is one.
    pub fn page(self, page: u32, index: u32) -> Option<u32> {
        u32::try_from(i64::from(page) + i64::from(self.step) * i64::from(index)).ok()
    }
}

/// Pages that streams have mapped and may not have used yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MappedAhead {
    /// Of streams that are about to go on.
    pub likely: usize,
    /// Of those, too, that may have come to their end.
    pub possible: usize,
}

impl MappedAhead {
    /// In pages, where streams count in units of so many.
    pub fn in_units_of(self, pages: usize) -> Self {
        Self { likely: self.likely * pages, possible: self.possible * pages }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    next: u32,
    window: u32,
    /// 1: in order.
    step: i32,
    used: u64,
    /// Faults between the last two that continued it.
    gap: u64,
}

impl Stream {
    /// Whether it may still be continued. Faults at random would, sooner or later.
    fn lives(&self, clock: u64) -> bool {
        self.used != 0 && clock - self.used <= PATIENCE + GAPS * self.gap
    }

    fn goes_on_with(&self, page: u32, clock: u64) -> bool {
        let gap = (i64::from(page) - i64::from(self.next)) * i64::from(self.step.signum());
        let step = i64::from(self.step.unsigned_abs());
        // Faults at random meet what was not continued lately by chance, and two pages with another between them may be a stride.
        let is_known = self.window > 1 && clock - self.used <= STREAMS as u64;
        let slack = if is_known { i64::from(SLACK) } else { 0 };
        self.lives(clock) && gap >= 0 && gap <= slack * step && gap % step == 0
    }

    /// Whether this page is not far behind a first one.
    fn is_near(&self, page: u32, clock: u64) -> bool {
        let is_new = self.used != 0 && clock - self.used <= STREAMS as u64;
        is_new && self.step == 1 && page > self.next && page - self.next < SLACK
    }

    /// Whether it has passed over this page, by a small step: then it goes on in order.
    fn has_missed(&self, page: u32, clock: u64) -> bool {
        let behind = i64::from(self.next) - i64::from(page);
        let step = i64::from(self.step);
        let is_small = step > 1 && step <= i64::from(SLACK);
        is_small
            && self.lives(clock)
            && behind > 0
            && behind < step * i64::from(self.window)
            && behind % step != 0
    }
}

/// Tables of recent streams, least recently used replaced. Those that have gone on are kept apart from first pages, as faults at random,
/// of which there may be hundreds from one window to the next, each look like the beginning of one.
#[derive(Clone, Debug)]
pub struct Streams {
    streams: [Stream; STREAMS],
    first: [Stream; STREAMS],
    clock: u64,
    window_max: u32,
    trends: Trends,
}

impl Streams {
    /// Windows grow up to `window_pages_max` pages (0: prefetch is off).
    pub fn new(window_pages_max: u32) -> Self {
        Self {
            streams: [Stream::default(); STREAMS],
            first: [Stream::default(); STREAMS],
            clock: 0,
            window_max: window_pages_max,
            trends: Trends::default(),
        }
    }

    /// Notes a fault on `page` and says how far to run ahead.
    ///
    /// The first fault of a stream brings one page, the third equal step of a stride two; each fault where the last window ended doubles it.
    pub fn fault(&mut self, page: u32) -> Ahead {
        if self.window_max == 0 {
            return Ahead::ALONE;
        }
        self.clock += 1;
        let clock = self.clock;
        let mut all = self.streams.iter_mut().chain(&mut self.first);
        if let Some(stream) = all.find(|stream| stream.has_missed(page, clock)) {
            stream.step = 1;
            stream.next = page;
        }
        let mut all = self.streams.iter_mut().chain(&mut self.first);
        let found = all.find(|stream| stream.goes_on_with(page, clock));
        if let Some(stream) = found.map(core::mem::take) {
            let max = if stream.step == 1 { self.window_max } else { self.window_max.min(STRIDED_MAX) };
            let ahead = Ahead::window((stream.window * 2).min(max), stream.step);
            if let Some(next) = ahead.page(page, ahead.map) {
                let gap = clock - stream.used;
                begin(&mut self.streams, Stream { next, window: ahead.map, used: clock, gap, ..stream });
            }
            return ahead;
        }
        if let Some(step) = self.trends.note(page).filter(|&step| step != 1) {
            let ahead = Ahead::window(self.window_max.min(2), step);
            if let Some(next) = ahead.page(page, ahead.map) {
                begin(&mut self.streams, Stream { next, window: ahead.map, step, used: clock, gap: 0 });
                return ahead;
            }
        }
        // With one that was just before, it may be the second of a small stride.
        let before = self
            .first
            .iter_mut()
            .find_map(|first| first.is_near(page, clock).then(|| core::mem::take(first)));
        let step = before.map_or(1, |first| (page - first.next) as i32 + 1);
        let next = page.saturating_add_signed(step);
        begin(&mut self.first, Stream { next, window: 1, step, used: clock, gap: 0 });
        Ahead::ALONE
    }

    /// The pages from `from` to `to` are here: the stream that was to go on with the first of them will go on behind them.
    pub fn pass_over(&mut self, from: u32, to: u32) {
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.next == from && stream.step == 1) {
            stream.next = to;
        }
    }

    /// What streams have mapped ahead.
    pub fn mapped_ahead(&self) -> MappedAhead {
        let pages = |goes_on: &dyn Fn(&Stream) -> bool| {
            self.streams
                .iter()
                .filter(|stream| goes_on(stream))
                .map(|stream| 2 * stream.window as usize)
                .sum()
        };
        MappedAhead {
            likely: pages(&|stream| {
                stream.used != 0 && self.clock - stream.used <= DUE + DUE_GAPS * stream.gap
            }),
            possible: pages(&|stream| stream.lives(self.clock)),
        }
    }

    /// As [`Streams::fault`], for a page that is known to belong to a stream: it begins with the widest window.
    pub fn fault_in_stream(&mut self, page: u32) -> Ahead {
        let window = self.window_max.max(1);
        let ahead = self.fault(page);
        if ahead.map == window {
            return ahead;
        }
        // In place of the one that this fault has begun or continued.
        let used = self.clock;
        for stream in self.streams.iter_mut().chain(&mut self.first).filter(|stream| stream.used == used) {
            *stream = Stream::default();
        }
        begin(&mut self.streams, Stream { next: page.saturating_add(window), window, step: 1, used, gap: 0 });
        Ahead::window(window, 1)
    }
}

/// A stream takes the place of the longest unused one.
fn begin(streams: &mut [Stream; STREAMS], new: Stream) {
    if let Some(place) = streams.iter_mut().min_by_key(|stream| stream.used) {
        *place = new;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_faults_widen_the_window() {
        let mut streams = Streams::new(64);
        let mut page = 1000;
        let mut windows = alloc::vec::Vec::new();
        for _ in 0..8 {
            let ahead = streams.fault(page);
            windows.push(ahead.map);
            page += ahead.map;
        }
        assert_eq!(windows, [1, 2, 4, 8, 16, 32, 64, 64]);
    }

    #[test]
    fn interleaved_streams_are_told_apart() {
        let mut streams = Streams::new(64);
        let mut pages = [0_u32, 1 << 20, 1 << 24];
        for _ in 0..7 {
            for page in &mut pages {
                *page += streams.fault(*page).map;
            }
        }
        assert!(pages.iter().zip([0, 1 << 20, 1 << 24]).all(|(page, start)| page - start > 100));
    }

    #[test]
    fn random_faults_fetch_one_page() {
        let mut streams = Streams::new(64);
        let mut page = 12345_u32;
        let mut extra = 0;
        for _ in 0..10_000 {
            page = page.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let ahead = streams.fault(page >> 8);
            extra += ahead.map - 1 + ahead.fetch;
        }
        assert!(extra < 100, "{extra} pages fetched for nothing");
    }

    #[test]
    fn streams_go_on_among_faults_at_random_which_they_do_not_catch() {
        let mut streams = Streams::new(128);
        let mut random = 7_u32;
        let mut next = |pages: u32| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) % pages
        };
        // A page of the stream takes as long as four faults at random.
        let (mut page, mut faults, mut extra) = (1_000_000_u32, 0, 0);
        while page < 1_010_000 {
            let ahead = streams.fault(page);
            page += ahead.map;
            faults += 1;
            for _ in 0..4 * ahead.map {
                extra += streams.fault(next(1 << 20)).map - 1;
            }
        }
        assert!(faults < 200 && streams.mapped_ahead().possible >= 256, "{faults} faults for 10,000 pages");
        assert!(extra < 1000, "{extra} pages with 40,000 faults at random");
        // When streams have ended they are not taken up by whoever comes by, even among few pages.
        let mut streams = Streams::new(128);
        for page in (0..4096).filter(|page| page % 300 < 240) {
            streams.fault(page);
        }
        for _ in 0..1000 {
            streams.fault(next(4096));
        }
        let extra: u32 = (0..10_000).map(|_| streams.fault(next(4096)).map - 1).sum();
        assert!(extra < 1000 && streams.mapped_ahead().possible < 128, "{extra} pages for nothing");
    }

    #[test]
    fn strides_widen_the_window_in_both_directions() {
        for step in [17_i32, -1, -40] {
            let mut streams = Streams::new(64);
            let mut page = 1_000_000_u32;
            let mut windows = alloc::vec::Vec::new();
            for _ in 0..11 {
                let ahead = streams.fault(page);
                assert!(ahead.map == 1 || ahead.step == step, "{ahead:?}");
                windows.push(ahead.map);
                page = page.wrapping_add_signed(step * ahead.map as i32);
            }
            assert_eq!(windows, [1, 1, 1, 1, 2, 4, 8, 16, 32, 32, 32], "{step}");
        }
        // Down to the first page, and not beyond.
        let mut streams = Streams::new(64);
        for page in (0..40).rev() {
            let ahead = streams.fault(page);
            assert!(
                (1..ahead.map + ahead.fetch)
                    .all(|index| ahead.page(page, index).is_none_or(|other| other < page))
            );
        }
    }

    #[test]
    fn small_steps_are_no_stream_in_order() {
        let mut streams = Streams::new(64);
        let mut pages = [(1000_u32, 2_u32), (1 << 20, 3), (1 << 24, 4)];
        let (mut faults, mut wanted) = (0, 0);
        for _ in 0..12 {
            for (page, step) in &mut pages {
                let ahead = streams.fault(*page);
                assert!(ahead.map == 1 || ahead.step == *step as i32, "{ahead:?} at {page}, {step}");
                *page += *step * ahead.map;
                (faults, wanted) = (faults + 1, wanted + ahead.map);
            }
        }
        assert!(wanted > 12 * faults, "{wanted} pages with {faults} faults");
    }

    #[test]
    fn a_page_that_is_here_makes_no_step() {
        // Read in order; the second page, and later some, are here.
        let mut streams = Streams::new(64);
        let here = |page| page == 1 || page == 40 || page == 41;
        let (mut page, mut windows) = (0, alloc::vec::Vec::new());
        while page < 200 {
            if here(page) {
                page += 1;
                continue;
            }
            let ahead = streams.fault(page);
            windows.push((page, ahead.map));
            // What is left out would be a fault of its own.
            page += if ahead.step == 1 { ahead.map } else { 1 };
        }
        assert_eq!(windows[..6], [(0, 1), (2, 1), (3, 2), (5, 4), (9, 8), (17, 16)]);
        assert_eq!(windows.last(), Some(&(193, 64)));
        // Two steps of two, and then what was left out.
        let mut streams = Streams::new(64);
        assert_eq!(
            [0, 2, 4, 5].map(|page| streams.fault(page)).map(|ahead| (ahead.map, ahead.step)),
            [(1, 1), (1, 1), (2, 2), (4, 1)]
        );
        // Kept pages are passed over.
        let mut streams = Streams::new(64);
        (0..3).for_each(|page| _ = streams.fault(page));
        streams.pass_over(3, 900);
        assert_eq!(streams.fault(900), Ahead { map: 4, fetch: 4, step: 1 });
        streams.pass_over(7, 8);
        assert_eq!(streams.fault(904).map, 8, "of another stream");
    }

    #[test]
    fn a_known_stream_needs_no_start() {
        let mut streams = Streams::new(64);
        for page in [500, 564, 628] {
            assert_eq!(streams.fault_in_stream(page), Ahead { map: 64, fetch: 64, step: 1 });
        }
        assert_eq!(streams.fault(692).map, 64, "it is followed");
        assert_eq!(streams.fault_in_stream(9), Ahead { map: 64, fetch: 64, step: 1 });
        assert_eq!(streams.streams.iter().filter(|stream| stream.used > 0).count(), 2);
        assert_eq!(Streams::new(0).fault_in_stream(7), Ahead::ALONE);
    }

    #[test]
    fn off_and_at_the_end_of_the_area() {
        assert_eq!(Streams::new(0).fault(7), Ahead::ALONE);
        let mut streams = Streams::new(64);
        for page in u32::MAX - 3..=u32::MAX {
            streams.fault(page);
        }
    }
}
