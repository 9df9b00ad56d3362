//! Sequential prefetch: recognises streams of faults and says how far to run ahead.

/// Streams followed at once: enough for a few threads that each read a few arrays.
const STREAMS: usize = 16;
/// Gap in pages by which a fault may miss the expected page and still continue the stream.
const SLACK: u32 = 4;

/// How far to go at a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Pages to bring in and map with the faulting one, itself included (1: no stream).
    pub map: u32,
    /// Pages behind those to bring into the pool, unmapped.
    pub fetch: u32,
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

    /// Notes a fault on `page` and says how far to run ahead.
    ///
    /// The first fault of a stream brings one page; each fault where the last window ended doubles the window.
    pub fn fault(&mut self, page: u32) -> Ahead {
        const ALONE: Ahead = Ahead { map: 1, fetch: 0 };
        if self.window_max == 0 {
            return ALONE;
        }
        self.clock += 1;
        let clock = self.clock;
        let known = self
            .streams
            .iter_mut()
            .find(|stream| stream.used != 0 && page >= stream.next && page - stream.next <= SLACK);
        if let Some(stream) = known {
            let map = (stream.window * 2).min(self.window_max);
            *stream = Stream { next: page.saturating_add(map), window: map, used: clock };
            return Ahead { map, fetch: if map >= 4 { map } else { 0 } };
        }
        self.begin(page, 1);
        ALONE
    }

    /// As [`Streams::fault`], for a page that is known to belong to a stream: it begins with the widest window.
    pub fn fault_in_stream(&mut self, page: u32) -> Ahead {
        let window = self.window_max.max(1);
        let ahead = self.fault(page);
        if ahead.map == window {
            return ahead;
        }
        self.begin(page, window);
        Ahead { map: window, fetch: if window >= 4 { window } else { 0 } }
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
    fn a_known_stream_needs_no_start() {
        let mut streams = Streams::new(64);
        for page in [500, 564, 628] {
            assert_eq!(streams.fault_in_stream(page), Ahead { map: 64, fetch: 64 });
        }
        assert_eq!(streams.fault(692).map, 64, "it is followed");
        assert_eq!(streams.fault_in_stream(9), Ahead { map: 64, fetch: 64 });
        assert_eq!(streams.streams.iter().filter(|stream| stream.used > 0).count(), 2);
        assert_eq!(Streams::new(0).fault_in_stream(7), Ahead { map: 1, fetch: 0 });
    }

    #[test]
    fn off_and_at_the_end_of_the_area() {
        assert_eq!(Streams::new(0).fault(7), Ahead { map: 1, fetch: 0 });
        let mut streams = Streams::new(64);
        for page in u32::MAX - 3..=u32::MAX {
            streams.fault(page);
        }
    }
}
