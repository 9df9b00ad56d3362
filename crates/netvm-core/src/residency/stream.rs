//! Prefetch: recognises streams of faults, in order or with a stride, and says how far to run ahead.

use super::stride::{Found, SMALL_UNITS, Stride, Strided};
use super::trend::Trends;
use alloc::vec::Vec;

/// Streams of each kind followed at once: enough for many threads that each read a few arrays.
const STREAMS: usize = 64;
/// Faults of a thread that may have been the beginning of one.
const FIRSTS: usize = 16;
/// Threads whose faults are told apart.
const THREADS: usize = 64;
/// What happened in so many faults of each thread was just before.
const RECENT: u64 = 16;
/// A stream ends when it is not continued for so many faults,
const PATIENCE: u64 = 64;
/// and so many times as many as there were between the last two that continued it.
const GAPS: u64 = 4;
/// It is expected sooner, after so many faults,
const DUE: u64 = 4;
/// and so many times as many as there were between those two.
const DUE_GAPS: u64 = 2;
/// Gap in units by which a fault may miss the expected one and still continue the stream.
const SLACK: u32 = 4;
/// A fault that is said to belong to a stream begins with the widest window, unless so many more than these have gone on with none:
const BELIEF_MAX: u32 = 64;
/// as many for each that has.
const BELIEF_STEP: u32 = 2;
/// Units at most from a fault to the next that may make a stream with it: a small stride's third, in bytes, may be one more than its second.
const NEAR: u64 = SMALL_UNITS + 1;
const _: () = assert!(SLACK as u64 <= NEAR);

/// How far to go at a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Units to bring in and map with the faulting one, itself included (1: no stream); of a stride elements.
    pub map: u32,
    /// Those behind them to bring into the pool, unmapped.
    pub fetch: u32,
    /// Where the elements are. None: in order, from the faulting unit on.
    pub stride: Option<Stride>,
}

impl Ahead {
    /// Only the page itself.
    pub const ALONE: Self = Self { map: 1, fetch: 0, stride: None };

    /// With a window of so many units, and as many behind them once it is wide enough.
    fn window(units: u32, stride: Option<Stride>) -> Self {
        Self { map: units, fetch: if units >= 4 { units } else { 0 }, stride }
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

impl core::ops::Add for MappedAhead {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { likely: self.likely + other.likely, possible: self.possible + other.possible }
    }
}

/// A stream in order.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    next: u32,
    window: u32,
    used: u64,
    /// Faults between the last two that continued it.
    gap: u64,
}

impl Stream {
    /// `recent`: faults that are just before.
    fn goes_on_with(&self, unit: u32, clock: u64, recent: u64, here: &impl Fn(u32) -> bool) -> bool {
        // Faults at random meet what was not continued lately by chance.
        let slack = if clock - self.used <= recent { SLACK } else { 0 };
        lives(self.used, self.gap, clock)
            && unit.checked_sub(self.next).is_some_and(|gap| gap <= slack)
            && (unit - self.next <= self.window / 4 || (self.next..unit).all(here))
    }
}

/// A fault that may be the beginning of a stream.
#[derive(Clone, Copy, Debug, Default)]
struct First {
    at: u64,
    /// In units.
    number: u64,
    /// From the one before it, where that was near: two to four units.
    step: Option<i64>,
    /// When it was, in faults of its thread, from 1 on, and in all.
    used: u64,
    clock: u64,
}

impl First {
    /// Whether the next unit is wanted that is not here, or one that a small stride would leave out.
    fn is_in_order(&self, number: u64, unit: u64, here: &impl Fn(u32) -> bool) -> bool {
        let units = number.saturating_sub(self.number);
        match self.step {
            Some(step) => (1..step as u64 / unit).contains(&units),
            None => {
                let next = (self.number as u32).saturating_add(1);
                (1..=u64::from(SLACK)).contains(&units) && (next..number as u32).all(here)
            }
        }
    }

    /// Whether this may be the second step of a small stride.
    fn is_near(&self, number: u64) -> bool {
        self.step.is_none() && (2..=SMALL_UNITS).contains(&number.saturating_sub(self.number))
    }

    /// The stride, if there is the same step once more: in bytes, or else in units.
    fn stride(&mut self, at: u64, number: u64, unit: u64) -> Option<i64> {
        let step = self.step?;
        let whole = step as u64 / unit;
        let exact = (self.at.checked_add_signed(step) == Some(at)).then_some(step);
        let found = exact.or((number.saturating_sub(self.number) == whole).then_some((whole * unit) as i64));
        if found.is_some() {
            *self = Self::default();
        }
        found
    }
}

/// Whether a stream may still be continued. Faults at random would, sooner or later.
fn lives(used: u64, gap: u64, clock: u64) -> bool {
    used != 0 && clock <= last(used, gap)
}

/// The last fault that may continue it.
fn last(used: u64, gap: u64) -> u64 {
    used + PATIENCE + GAPS * gap
}

/// What is known of the faults of one thread. Faults at random, of which there may be hundreds from one window of a stream to the next, each look like the
/// beginning of one, and those of other threads lie between: so these are apart from streams, and from each other.
#[derive(Clone, Debug)]
struct Thread {
    id: u32,
    /// When the last one was, in faults of all.
    used: u64,
    clock: u64,
    first: [First; FIRSTS],
    trends: Trends,
}

impl Thread {
    fn new(id: u32, used: u64) -> Self {
        Self { id, used, clock: 0, first: [First::default(); FIRSTS], trends: Trends::default() }
    }
}

/// Tables of recent streams, least recently used replaced. A stream may go on in another thread.
#[derive(Clone, Debug)]
pub struct Streams {
    streams: [Stream; STREAMS],
    strided: [Strided; STREAMS],
    /// No stream lives longer than this: programs without any are spared the search.
    alive_until: u64,
    threads: Vec<Thread>,
    clock: u64,
    window_max: u32,
    /// Bytes that come together.
    unit: u64,
    /// How far it is believed that faults are in order which are said to be.
    belief: u32,
}

impl Streams {
    /// Windows grow up to `window_max` units (0: prefetch is off) of `unit_bytes` each.
    pub fn new(window_max: u32, unit_bytes: usize) -> Self {
        Self {
            streams: [Stream::default(); STREAMS],
            strided: [Strided::default(); STREAMS],
            alive_until: 0,
            threads: Vec::new(),
            clock: 0,
            window_max,
            unit: unit_bytes.max(1) as u64,
            belief: BELIEF_MAX,
        }
    }

    /// Notes a fault of `thread` at `at`, in bytes from the beginning of the area, and says how far to run ahead; `here`: whether a unit is mapped, so
    /// that a stream passes over it without a fault.
    ///
    /// The first fault of a stream brings one unit, the third equal step of a stride two; each fault where the last window ended doubles it.
    pub fn fault(&mut self, at: u64, thread: u32, here: impl Fn(u32) -> bool) -> Ahead {
        if self.window_max == 0 {
            return Ahead::ALONE;
        }
        self.clock += 1;
        let (clock, number) = (self.clock, at / self.unit);
        let thread = self.thread(thread);
        let gap = clock - core::mem::replace(&mut self.threads[thread].used, clock);
        self.threads[thread].clock += 1;
        let recent = RECENT * self.threads.len() as u64;
        if clock <= self.alive_until
            && let Some(ahead) = self.go_on(at, thread, recent, &here)
        {
            return ahead;
        }
        let (unit, thread) = (self.unit, &mut self.threads[thread]);
        let of_thread = thread.clock;
        let alive = |first: &First| lives(first.used, 0, of_thread);
        // Of faults at random hardly any.
        let is_near = thread.first.iter().any(|first| number.wrapping_sub(first.number) <= NEAR);
        let near: &mut [First] = if is_near { &mut thread.first } else { &mut [] };
        let first = near.iter_mut().find(|first| alive(first) && first.is_in_order(number, unit, &here));
        if let Some(first) = first {
            let (number, used) = (number as u32, core::mem::take(first).clock);
            return self.go_on_in_order(number, Stream { next: number, window: 1, used, gap: 0 });
        }
        let third = near
            .iter_mut()
            .find_map(|first| if alive(first) { first.stride(at, number, unit) } else { None });
        let trend = thread.trends.note(at, number, unit, &here);
        if let Some(step) = third.or(trend) {
            let window = self.window_max.min(2);
            if let Some(stream) = Strided::new(at, step, window, (clock, gap)) {
                begin(&mut self.strided, stream, |stream| stream.used);
                self.alive_until = self.alive_until.max(last(clock, gap));
                return Ahead::window(window, Some(Stride { from: at, step, extent: 1 }));
            }
        }
        // With one that was just before, it may be the second of a small stride.
        let before = near
            .iter_mut()
            .find(|first| first.used != 0 && of_thread - first.used <= RECENT && first.is_near(number));
        let step = before.map(|first| (at - core::mem::take(first).at) as i64);
        begin(&mut thread.first, First { at, number, step, used: of_thread, clock }, |first| first.used);
        Ahead::ALONE
    }

    /// Where this thread is, in place of the one that has had no fault for longest if there are too many.
    fn thread(&mut self, id: u32) -> usize {
        if let Some(index) = self.threads.iter().position(|thread| thread.id == id) {
            return index;
        }
        let new = Thread::new(id, self.clock);
        if self.threads.len() < THREADS {
            self.threads.push(new);
            return self.threads.len() - 1;
        }
        let oldest = self.threads.iter().enumerate().min_by_key(|(_, thread)| thread.used);
        let index = oldest.map_or(0, |(index, _)| index);
        self.threads[index] = new;
        index
    }

    /// The next window of the stream that this fault goes on with, if there is one.
    fn go_on(&mut self, at: u64, thread: usize, recent: u64, here: &impl Fn(u32) -> bool) -> Option<Ahead> {
        let (unit, clock, number) = (self.unit, self.clock, (at / self.unit) as u32);
        for strided in self.strided.iter_mut().filter(|strided| lives(strided.used, strided.gap, clock)) {
            let is_known = clock - strided.used <= recent;
            let found = strided.fault(at, unit, self.window_max, clock, is_known, here);
            self.alive_until = self.alive_until.max(last(strided.used, strided.gap));
            match found {
                None => {}
                Some(Found::Ahead(stride, map, fetch)) => {
                    self.threads[thread].trends.keep(at, unit, stride.step);
                    return Some(Ahead { map, fetch, stride: Some(stride) });
                }
                Some(Found::Longer(stride, map)) => {
                    return Some(Ahead { map, fetch: 0, stride: Some(stride) });
                }
                Some(Found::InOrder(window)) => {
                    *strided = Strided::default();
                    let stream = Stream { next: number, window, used: clock, gap: 0 };
                    return Some(self.go_on_in_order(number, stream));
                }
            }
        }
        let known = self.streams.iter_mut().find(|stream| stream.goes_on_with(number, clock, recent, here));
        let stream = known.map(core::mem::take)?;
        Some(self.go_on_in_order(number, stream))
    }

    /// Another window of a stream in order, that `stream` was.
    fn go_on_in_order(&mut self, number: u32, stream: Stream) -> Ahead {
        let window = (stream.window * 2).min(self.window_max);
        let (used, gap) = (self.clock, self.clock - stream.used);
        let next = number.saturating_add(window);
        self.begin_in_order(Stream { next, window, used, gap });
        Ahead::window(window, None)
    }

    fn begin_in_order(&mut self, stream: Stream) {
        self.alive_until = self.alive_until.max(last(stream.used, stream.gap));
        begin(&mut self.streams, stream, |stream| stream.used);
    }

    /// The units from `from` to `to` are here: the stream that was to go on with the first of them will go on behind them.
    pub fn pass_over(&mut self, from: u32, to: u32) {
        if let Some(stream) = self.streams.iter_mut().find(|stream| stream.used != 0 && stream.next == from) {
            stream.next = to;
        }
    }

    /// What streams have mapped ahead.
    pub fn mapped_ahead(&self) -> MappedAhead {
        let mut ahead = MappedAhead::default();
        if self.clock > self.alive_until {
            return ahead;
        }
        let in_order = self.streams.iter().map(|stream| (stream.used, stream.gap, stream.window as usize));
        let strided = self.strided.iter().map(|stream| (stream.used, stream.gap, stream.units(self.unit)));
        for (used, gap, units) in in_order.chain(strided) {
            if lives(used, gap, self.clock) {
                ahead.possible += 2 * units;
                let is_due = self.clock - used <= DUE + DUE_GAPS * gap;
                ahead.likely += if is_due { 2 * units } else { 0 };
            }
        }
        ahead
    }

    /// As [`Streams::fault`], at a place that is said to belong to a stream in order: it begins with the widest window of which all streams' have
    /// room in `room` units of memory, as long as that is mostly true.
    pub fn fault_in_stream(
        &mut self,
        at: u64,
        thread: u32,
        room: usize,
        here: impl Fn(u32) -> bool,
    ) -> Ahead {
        let ahead = self.fault(at, thread, here);
        self.belief = match ahead.map {
            0 | 1 => self.belief.saturating_sub(1),
            _ => (self.belief + BELIEF_STEP).min(BELIEF_MAX),
        };
        let clock = self.clock;
        let alive = self.streams.iter().filter(|stream| lives(stream.used, stream.gap, clock)).count();
        // More than can be followed: what it would begin takes another's place.
        let is_one_more = ahead.map <= 1 && alive >= STREAMS;
        // What is mapped, and as much behind it.
        let window = (room / (2 * alive.max(1))).clamp(1, self.window_max.max(1) as usize) as u32;
        if self.belief == 0 || is_one_more || (ahead.map == window && ahead.stride.is_none()) {
            return ahead;
        }
        // In place of the one that this fault has begun or continued.
        let used = self.clock;
        let stale = self.streams.iter_mut().filter(|stream| stream.used == used);
        stale.for_each(|stream| *stream = Stream::default());
        let stale = self.strided.iter_mut().filter(|stream| stream.used == used);
        stale.for_each(|stream| *stream = Strided::default());
        let all = self.threads.iter_mut().flat_map(|thread| &mut thread.first);
        all.filter(|first| first.clock == used).for_each(|first| *first = First::default());
        let next = ((at / self.unit) as u32).saturating_add(window);
        self.begin_in_order(Stream { next, window, used, gap: 0 });
        Ahead::window(window, None)
    }
}

/// A stream takes the place of the longest unused one.
fn begin<T>(streams: &mut [T], new: T, used: impl Fn(&T) -> u64) {
    if let Some(place) = streams.iter_mut().min_by_key(|stream| used(stream)) {
        *place = new;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::vec;

    const PAGE: usize = 4096;
    /// Windows of all streams fit.
    const ROOM: usize = 1 << 20;

    impl Streams {
        /// A fault at the beginning of a page.
        fn page(&mut self, page: u32) -> Ahead {
            self.fault(u64::from(page) * PAGE as u64, 1, |_| false)
        }
    }

    impl Ahead {
        /// In pages.
        fn step(self) -> i64 {
            self.stride.map_or(1, |stride| stride.step / PAGE as i64)
        }
    }

    #[test]
    fn sequential_faults_widen_the_window() {
        let mut streams = Streams::new(64, PAGE);
        let mut page = 1000;
        let mut windows = Vec::new();
        for _ in 0..8 {
            let ahead = streams.page(page);
            windows.push(ahead.map);
            page += ahead.map;
        }
        assert_eq!(windows, [1, 2, 4, 8, 16, 32, 64, 64]);
    }

    #[test]
    fn interleaved_streams_are_told_apart() {
        let mut streams = Streams::new(64, PAGE);
        let mut pages = [0_u32, 1 << 20, 1 << 24];
        for _ in 0..7 {
            for page in &mut pages {
                *page += streams.page(*page).map;
            }
        }
        assert!(pages.iter().zip([0, 1 << 20, 1 << 24]).all(|(page, start)| page - start > 100));
    }

    #[test]
    fn threads_by_turns_have_streams_of_their_own() {
        for step in [1_u32, 3, 40] {
            let mut streams = Streams::new(128, PAGE);
            let (mut pages, mut faults) = ([0_u32; 40], 0);
            while pages[0] < 2000 * step {
                for (thread, page) in pages.iter_mut().enumerate() {
                    let at = (thread as u64 * 1_000_003 + u64::from(*page)) * PAGE as u64;
                    let ahead = streams.fault(at, thread as u32, |_| false);
                    assert!(ahead.map == 1 || ahead.step() == i64::from(step), "{ahead:?}");
                    *page += ahead.map * step;
                    faults += 1;
                }
            }
            assert!(faults < 40 * 80, "step {step}: {faults} faults for 80,000 pages");
        }
        // Whoever comes to where a stream was to go on goes on with it.
        let mut streams = Streams::new(64, PAGE);
        let mut page = 1000;
        for thread in [1, 1, 1, 2, 3, 1, 4] {
            page += streams.fault(u64::from(page) * PAGE as u64, thread, |_| false).map;
        }
        assert_eq!(page, 1000 + 127);
    }

    #[test]
    fn random_faults_fetch_one_page() {
        let mut streams = Streams::new(64, PAGE);
        let mut page = 12345_u32;
        let mut extra = 0;
        for _ in 0..10_000 {
            page = page.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let ahead = streams.page(page >> 8);
            extra += ahead.map - 1 + ahead.fetch;
        }
        assert!(extra < 100, "{extra} pages fetched for nothing");
    }

    #[test]
    fn streams_go_on_among_faults_at_random_which_they_do_not_catch() {
        let mut streams = Streams::new(128, PAGE);
        let mut random = 7_u32;
        let mut next = |pages: u32| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) % pages
        };
        // A page of the stream takes as long as four faults at random.
        let (mut page, mut faults, mut extra) = (1_000_000_u32, 0, 0);
        while page < 1_010_000 {
            let ahead = streams.page(page);
            page += ahead.map;
            faults += 1;
            for _ in 0..4 * ahead.map {
                extra += streams.page(next(1 << 20)).map - 1;
            }
        }
        assert!(faults < 200 && streams.mapped_ahead().possible >= 256, "{faults} faults for 10,000 pages");
        assert!(extra < 1000, "{extra} pages with 40,000 faults at random");
        // When streams have ended they are not taken up by whoever comes by, even among few pages.
        let mut streams = Streams::new(128, PAGE);
        for page in (0..4096).filter(|page| page % 300 < 240) {
            streams.page(page);
        }
        for _ in 0..1000 {
            streams.page(next(4096));
        }
        let extra: u32 = (0..10_000).map(|_| streams.page(next(4096)).map - 1).sum();
        assert!(extra < 1000 && streams.mapped_ahead().possible < 128, "{extra} pages for nothing");
    }

    #[test]
    fn strides_widen_the_window_in_both_directions() {
        for step in [17_i32, -1, -40] {
            let mut streams = Streams::new(64, PAGE);
            let mut page = 1_000_000_u32;
            let mut windows = Vec::new();
            for _ in 0..11 {
                let ahead = streams.page(page);
                assert!(ahead.map == 1 || ahead.step() == i64::from(step), "{ahead:?}");
                windows.push(ahead.map);
                page = page.wrapping_add_signed(step * ahead.map as i32);
            }
            assert_eq!(windows, [1, 1, 1, 1, 2, 4, 8, 16, 32, 32, 32], "{step}");
        }
        // Down to the first page, and not beyond.
        let mut streams = Streams::new(64, PAGE);
        let mut left = 40_u32;
        while let Some(page) = left.checked_sub(1) {
            let ahead = streams.page(page);
            left = left.saturating_sub(ahead.map);
            let elements = (1..ahead.map + ahead.fetch).filter_map(|index| ahead.stride?.units(index, 4096));
            assert!(elements.into_iter().all(|(other, end)| other < page && end == other + 1));
        }
    }

    /// Which pages come, with how many faults, when a program touches these places one after the other and nothing leaves.
    fn touch(streams: &mut Streams, here: &mut BTreeSet<u32>, places: impl IntoIterator<Item = u64>) -> u32 {
        let mut faults = 0;
        for at in places {
            let page = (at / PAGE as u64) as u32;
            if here.contains(&page) {
                continue;
            }
            faults += 1;
            let ahead = streams.fault(at, 1, |page| here.contains(&page));
            here.insert(page);
            for index in 0..ahead.map {
                let (from, to) = match ahead.stride {
                    Some(stride) => stride.units(index, PAGE as u64).unwrap(),
                    None => (page + index, page + index + 1),
                };
                here.extend(from..to);
            }
        }
        faults
    }

    #[test]
    fn tiles_of_a_matrix_come_without_what_lies_between() {
        // 2400 columns of 2400 numbers, of which rows 500 to 1011 are read, in tiles of eight columns.
        let column = 19_200_u64;
        let places = || {
            (0..300_u64).flat_map(move |tile| {
                (500..1012_u64)
                    .step_by(4)
                    .flat_map(move |row| (0..8).map(move |index| (tile * 8 + index) * column + row * 8))
            })
        };
        let wanted = places().map(|at| at / PAGE as u64).collect::<BTreeSet<_>>().len();
        let mut here = BTreeSet::new();
        let faults = touch(&mut Streams::new(128, PAGE), &mut here, places());
        let came = here.len();
        assert!(faults < 250 && came < wanted * 11 / 10, "{faults} faults, {came} pages for {wanted}");
    }

    #[test]
    fn columns_whose_pages_are_partly_here_are_followed() {
        for row in [32_000_u64, 32_008, 19_200] {
            // Four thousand rows, in blocks of 64 columns: a page has several blocks of a row, and some pages lie between two.
            let block = |block: u64| {
                (0..4000).flat_map(move |index| [0, 511].map(|at| index * row + block * 512 + at))
            };
            let (mut streams, mut here) = (Streams::new(128, PAGE), BTreeSet::new());
            let faults: Vec<_> = (0..8).map(|of| touch(&mut streams, &mut here, block(of))).collect();
            let wanted = (0..8).flat_map(block).map(|at| at / PAGE as u64).collect::<BTreeSet<_>>().len();
            let (all, came) = (faults.iter().sum::<u32>(), here.len());
            assert!(all < 1000 && came < wanted * 11 / 10, "{row}: {faults:?}, {came} pages for {wanted}");
        }
    }

    #[test]
    fn small_steps_are_no_stream_in_order() {
        let mut streams = Streams::new(64, PAGE);
        let mut pages = [(1000_u32, 2_u32), (1 << 20, 3), (1 << 24, 4)];
        let (mut faults, mut wanted) = (0, 0);
        for _ in 0..12 {
            for (page, step) in &mut pages {
                let ahead = streams.page(*page);
                assert!(ahead.map == 1 || ahead.step() == i64::from(*step), "{ahead:?} at {page}, {step}");
                *page += *step * ahead.map;
                (faults, wanted) = (faults + 1, wanted + ahead.map);
            }
        }
        assert!(wanted > 12 * faults, "{wanted} pages with {faults} faults");
    }

    #[test]
    fn a_page_that_is_here_makes_no_step() {
        // Read in order; the second page, and later some, are here.
        let mut streams = Streams::new(64, PAGE);
        let here = |page| page == 1 || page == 40 || page == 41;
        let (mut page, mut windows) = (0, Vec::new());
        while page < 200 {
            if here(page) {
                page += 1;
                continue;
            }
            let ahead = streams.fault(u64::from(page) * PAGE as u64, 1, here);
            windows.push((page, ahead.map));
            // What is left out would be a fault of its own.
            page += if ahead.step() == 1 { ahead.map } else { 1 };
        }
        assert_eq!(windows[..6], [(0, 1), (2, 2), (4, 4), (8, 8), (16, 16), (32, 32)]);
        assert_eq!(windows.last(), Some(&(192, 64)));
        // Two steps of two, and then what was left out.
        let mut streams = Streams::new(64, PAGE);
        assert_eq!(
            [0, 2, 4, 5].map(|page| streams.page(page)).map(|ahead| (ahead.map, ahead.step())),
            [(1, 1), (1, 1), (2, 2), (4, 1)]
        );
        // Kept pages are passed over.
        let mut streams = Streams::new(64, PAGE);
        (0..3).for_each(|page| _ = streams.page(page));
        streams.pass_over(3, 900);
        assert_eq!(streams.page(900), Ahead { map: 4, fetch: 4, stride: None });
        streams.pass_over(7, 8);
        assert_eq!(streams.page(904).map, 8, "of another stream");
    }

    #[test]
    fn a_known_stream_needs_no_start() {
        let mut streams = Streams::new(64, PAGE);
        for page in [500, 564, 628] {
            assert_eq!(
                streams.fault_in_stream(page * PAGE as u64, 1, ROOM, |_| false),
                Ahead { map: 64, fetch: 64, stride: None }
            );
        }
        assert_eq!(streams.page(692).map, 64, "it is followed");
        assert_eq!(
            streams.fault_in_stream(9 * PAGE as u64, 1, ROOM, |_| false),
            Ahead { map: 64, fetch: 64, stride: None }
        );
        assert_eq!(streams.streams.iter().filter(|stream| stream.used > 0).count(), 2);
        assert_eq!(Streams::new(0, PAGE).fault_in_stream(7, 1, ROOM, |_| false), Ahead::ALONE);
    }

    #[test]
    fn windows_of_many_known_streams_leave_each_other_room() {
        const ROOM: usize = 1000;
        for (count, windows_max) in [(3_u64, 1000), (24, 1000), (60, 1000), (200, 64 * 1000)] {
            let mut streams = Streams::new(128, PAGE);
            let (mut next, mut faults, mut most) = (vec![0_u64; count as usize], 0, 0);
            for page in 0..2000 {
                for (stream, next) in next.iter_mut().enumerate().filter(|(_, next)| **next <= page) {
                    let at = (stream as u64 * 1_000_003 + page) * PAGE as u64;
                    let ahead = streams.fault_in_stream(at, 1, ROOM, |_| false);
                    assert!(page < 600 || ahead.fetch <= ahead.map);
                    *next = page + u64::from(ahead.map);
                    faults += 1;
                }
                let mapped: u64 = next.iter().map(|&next| next - page).sum();
                most = if page > 600 { mapped.max(most) } else { 0 };
            }
            assert!(most as usize <= windows_max, "{count} streams have {most} pages");
            assert!(count > 64 || faults < 2000 * count / 6, "{count} streams: {faults} faults");
        }
    }

    #[test]
    fn who_says_in_order_and_goes_anywhere_is_not_believed_for_long() {
        let mut streams = Streams::new(128, PAGE);
        let mut page = 12345_u32;
        let mut next = || {
            page = page.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            u64::from(page >> 8) * PAGE as u64
        };
        let came: u32 = (0..10_000).map(|_| streams.fault_in_stream(next(), 1, ROOM, |_| false).map).sum();
        assert!(came < 10_000 + 70 * 128, "{came} pages with 10,000 faults at random");
        // In order after all.
        let (mut at, mut faults) = (1_u64 << 40, 0);
        while at < (1 << 40) + 4096 * PAGE as u64 {
            at += u64::from(streams.fault_in_stream(at, 1, ROOM, |_| false).map) * PAGE as u64;
            faults += 1;
        }
        assert!(faults < 45, "{faults} faults for 4096 pages");
        // A new array now and then is no reason to doubt.
        let windows = (0..200_u64).map(|index| {
            let page = index / 4 * 5000 + index % 4 * 128;
            streams.fault_in_stream(page * PAGE as u64, 1, ROOM, |_| false).map
        });
        assert!(windows.into_iter().all(|window| window == 128));
    }

    #[test]
    fn whatever_faults_come_windows_are_bounded_and_hold_the_fault() {
        let mut random = 11_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 17) % below
        };
        for unit in [PAGE, 512 * PAGE] {
            let mut streams = Streams::new(128, unit);
            // Up to the end of the largest area, with steps that lead beyond it on both sides.
            let end = 1_u64 << 44;
            let (mut at, mut step, mut left) = (0_u64, 0_i64, 0);
            for _ in 0..200_000 {
                if left == 0 {
                    left = 1 + next(40);
                    at = [next(end), next(1 << 22), end - 1 - next(1 << 22)][left as usize % 3];
                    let log = [12, 15, 24, 43][left as usize % 4];
                    step = next(1 << log) as i64 - next(1 << 20) as i64;
                }
                left -= 1;
                let parity = next(3);
                let here = |unit: u32| u64::from(unit) % 3 < parity;
                let ahead = match next(50) {
                    0 => streams.fault_in_stream(at, 1, ROOM, here),
                    _ => streams.fault(at, next(3) as u32, here),
                };
                assert!((1..1 << 10).contains(&ahead.map) && ahead.fetch < 1 << 10, "{ahead:?}");
                if let Some(stride) = ahead.stride {
                    let number = (at / unit as u64) as u32;
                    let holds = |(from, to): (u32, u32)| from <= number && number < to;
                    let mut all = (0..ahead.map).filter_map(|index| stride.units(index, unit as u64));
                    assert!(all.any(holds), "{ahead:?} without {at}");
                }
                at = at.checked_add_signed(step).filter(|&at| at < end).unwrap_or(next(end));
                at = at.saturating_add(next(2) * next(5000)).min(end - 1);
            }
        }
    }

    #[test]
    fn off_and_at_the_end_of_the_area() {
        assert_eq!(Streams::new(0, PAGE).page(7), Ahead::ALONE);
        let mut streams = Streams::new(64, PAGE);
        for page in u32::MAX - 3..=u32::MAX {
            streams.page(page);
        }
    }
}
