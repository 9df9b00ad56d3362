//! Sequential prefetch: recognises streams of faults and says how far to run ahead.

/// Streams followed at once: enough for a few threads that each read a few arrays.
const STREAMS: usize = 16;
/// Gap in pages by which a fault may miss the expected page and still continue the stream.
const SLACK: u32 = 4;

/// A stream with such a window goes on behind so many pages that were there already. Faults that only lie near each other have none.
const SKIP_WINDOW_MIN: u32 = 16;
const SKIP: u32 = 4096;

/// How far to go at a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Pages to bring in and map with the faulting one, itself included (1: no stream).
    pub map: u32,
    /// Pages behind those to bring into the pool, unmapped.
    pub fetch: u32,
    /// First of the pages that the stream has left with this fault,
    pub left: u32,
    /// and how many they are.
    pub left_pages: u32,
}

impl Ahead {
    /// No stream.
    pub const ALONE: Self = Self { map: 1, fetch: 0, left: 0, left_pages: 0 };
}

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    next: u32,
    window: u32,
    used: u64,
}

/// Table of recent streams, least recently used replaced.
#[derive(Clone, Debug)]
pub struct Streams {
    streams: [Stream; STREAMS],
    clock: u64,
    window_max: u32,
}

impl Streams {
    /// Windows grow up to `window_pages_max` pages (0: prefetch is off).
    pub fn new(window_pages_max: u32) -> Self {
        Self { streams: [Stream::default(); STREAMS], clock: 0, window_max: window_pages_max }
    }

    /// Notes a fault on `page` and says how far to run ahead; `is_here` tells whether a page is local already.
    ///
    /// The first fault of a stream brings one page; each fault where the last window ended, or behind pages after it that were here,
    /// doubles the window.
    pub fn fault(&mut self, page: u32, is_here: impl Fn(u32) -> bool) -> Ahead {
        if self.window_max == 0 {
            return Ahead::ALONE;
        }
        self.clock += 1;
        let clock = self.clock;
        let goes_on = |stream: &Stream| {
            let Some(gap) = page.checked_sub(stream.next).filter(|_| stream.used != 0) else { return false };
            let skips = stream.window >= SKIP_WINDOW_MIN && gap <= SKIP;
            gap <= SLACK || (skips && (stream.next..page).rev().all(&is_here))
        };
        if let Some(stream) = self.streams.iter_mut().find(|stream| goes_on(stream)) {
            let map = (stream.window * 2).min(self.window_max);
            let (left, left_pages) = (stream.next - stream.window, stream.window);
            *stream = Stream { next: page.saturating_add(map), window: map, used: clock };
            return Ahead { map, fetch: if map >= 4 { map } else { 0 }, left, left_pages };
        }
        self.begin(page, 1);
        Ahead::ALONE
    }

    /// As [`Streams::fault`], for a page that is known to belong to a stream: it begins with the widest window.
    pub fn fault_in_stream(&mut self, page: u32, is_here: impl Fn(u32) -> bool) -> Ahead {
        let window = self.window_max.max(1);
        let ahead = self.fault(page, is_here);
        if ahead.map == window {
            return ahead;
        }
        self.begin(page, window);
        Ahead { map: window, fetch: if window >= 4 { window } else { 0 }, ..ahead }
    }

    /// A stream of which `window` pages from `page` on are brought in takes the place of the longest unused one.
    fn begin(&mut self, page: u32, window: u32) {
        let (next, clock) = (page.saturating_add(window), self.clock);
        // The one that this fault has just begun or continued; else the longest unused.
        let order = |stream: &&mut Stream| if stream.used == clock { 0 } else { stream.used + 1 };
        if let Some(place) = self.streams.iter_mut().min_by_key(order) {
            *place = Stream { next, window, used: clock };
        }
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
            let ahead = streams.fault(page, |_| false);
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
                *page += streams.fault(*page, |_| false).map;
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
            let ahead = streams.fault(page >> 8, |_| false);
            extra += ahead.map - 1 + ahead.fetch;
        }
        assert!(extra < 100, "{extra} pages fetched for nothing");
    }

    #[test]
    fn a_known_stream_needs_no_start() {
        let mut streams = Streams::new(64);
        for page in [500, 564, 628] {
            let ahead = streams.fault_in_stream(page, |_| false);
            assert_eq!((ahead.map, ahead.fetch), (64, 64));
        }
        assert_eq!(streams.fault(692, |_| false).map, 64, "it is followed");
        assert_eq!(
            streams.fault_in_stream(9, |_| false),
            Ahead { map: 64, fetch: 64, left: 0, left_pages: 0 }
        );
        assert_eq!(streams.streams.iter().filter(|stream| stream.used > 0).count(), 2);
        assert_eq!(Streams::new(0).fault_in_stream(7, |_| false), Ahead::ALONE);
    }

    #[test]
    fn pages_that_are_here_do_not_end_a_stream() {
        let mut streams = Streams::new(64);
        let here = |page: u32| (300..1000).contains(&page);
        let mut page = 100;
        while page < 300 {
            page = (page + streams.fault(page, here).map).min(page + 64);
        }
        // It ended at a window that reaches into them.
        let next = page;
        assert!((300..400).contains(&next));
        let ahead = streams.fault(1000, here);
        assert_eq!((ahead.map, ahead.left + ahead.left_pages), (64, next));
        assert!(ahead.left_pages >= 32);
        // Faults that only lie near each other are no stream.
        let mut near = Streams::new(64);
        assert!([10, 30, 20, 90, 70, 99].iter().all(|&page| near.fault(page, |_| true) == Ahead::ALONE));
        // What is not here ends it, and so does the way to it when that is too long.
        assert_eq!(streams.fault(1200, here), Ahead::ALONE);
        assert_eq!(streams.fault(1201 + SKIP + 1, |_| true), Ahead::ALONE);
    }

    #[test]
    fn off_and_at_the_end_of_the_area() {
        assert_eq!(Streams::new(0).fault(7, |_| false), Ahead::ALONE);
        let mut streams = Streams::new(64);
        for page in u32::MAX - 3..=u32::MAX {
            streams.fault(page, |_| false);
        }
    }
}
