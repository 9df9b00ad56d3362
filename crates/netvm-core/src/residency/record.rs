//! A record of faults: in which order pages were wanted, by each thread, and an index to it.
//!
//! Temporal streaming (Wenisch et al., ISCA 2005) in the form of a global history buffer (Nesbit and Smith, HPCA 2004) as long as there are pages. Its index
//! is of *two* faults in a row, as in Domino (Bakhshalipour et al., HPCA 2018): a page of many small objects is wanted many times in a pass, each time by way
//! of another one, and of faults at random hardly any two happen again in the same order.

use alloc::collections::TryReserveError;
use alloc::vec;
use alloc::vec::Vec;

/// Faults of one thread that are together.
const CHUNK: u64 = 32;
/// Faults that are kept at least: 8 MiB of them, and 2 MiB of index.
pub const RECORD_MIN: usize = 1 << 21;
/// Faults that are kept at most: as many pages are 1 TiB.
pub const RECORD_MAX: usize = 1 << 28;
/// One in so many pairs of faults is in the index, by its hash: a walk is found a little later, and faults at random are spared three of four looks.
const SAMPLED: usize = 4;
/// Length of the index at first: it is touched here and there, and few faults are to need few pages of memory.
const INDEX_MIN: usize = 1 << 13;
/// Chunks whose faults lie together: no growth copies what is there.
const SEGMENT: usize = RECORD_MIN / CHUNK as usize;
/// No page.
const NONE: u32 = u32::MAX;

/// Where in the record a fault is. Chunks are numbered from 1 on as they are begun, and the last ones are known.
pub(super) type Place = u64;

/// Before the first fault of all.
pub(super) const BEGINNING: Place = CHUNK - 1;

/// Where a thread's faults are recorded.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tail {
    /// The last one, if there is any.
    last: Option<(Place, u32)>,
}

/// See the module's text.
#[derive(Clone, Debug)]
pub(super) struct Record {
    segments: Vec<Vec<u32>>,
    /// For each chunk the one that goes on with it, 0 for none.
    after: Vec<u64>,
    /// Chunks that were begun.
    begun: u64,
    chunks_max: usize,
    /// By the hash of two faults in a row, 1 more than the low bits of the place of the second, 0 for none. What came last is found.
    index: Vec<u32>,
    /// The one before it became too short.
    shorter: Vec<u32>,
}

impl Record {
    pub(super) fn new() -> Self {
        let chunks_max = RECORD_MIN / CHUNK as usize;
        let (segments, after, index, shorter) = Default::default();
        Self { segments, after, begun: 0, chunks_max, index, shorter }
    }

    /// So many pages may be wanted in turn: about as many faults are kept, seven for five pages at most, as far as that can still be had.
    pub(super) fn make_room(&mut self, pages: usize) {
        // Once the oldest chunk has been used again, each has its place.
        if self.begun <= self.chunks_max as u64 {
            let faults = ((pages.min(RECORD_MAX) * 7 / 5).max(RECORD_MIN) + 1).next_power_of_two() / 2;
            self.chunks_max = self.chunks_max.max(faults / CHUNK as usize);
        }
    }

    /// Faults that there is room for now.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.after.len() * CHUNK as usize
    }

    fn slot(&self, chunk: u64) -> usize {
        ((chunk - 1) % self.chunks_max as u64) as usize
    }

    fn is_known(&self, chunk: u64) -> bool {
        chunk > 0 && chunk <= self.begun && self.begun - chunk < self.chunks_max as u64
    }

    /// The page that was wanted there, as long as it is known.
    #[inline]
    pub(super) fn page(&self, place: Place) -> Option<u32> {
        let chunk = place / CHUNK;
        if !self.is_known(chunk) {
            return None;
        }
        let page = self.chunk(self.slot(chunk))[(place % CHUNK) as usize];
        (page != NONE).then_some(page)
    }

    fn chunk(&self, slot: usize) -> &[u32] {
        &self.segments[slot / SEGMENT][slot % SEGMENT * CHUNK as usize..][..CHUNK as usize]
    }

    fn chunk_mut(&mut self, slot: usize) -> &mut [u32] {
        &mut self.segments[slot / SEGMENT][slot % SEGMENT * CHUNK as usize..][..CHUNK as usize]
    }

    /// What the same thread wanted next, and where that is.
    #[inline]
    pub(super) fn next(&self, place: Place) -> Option<(Place, u32)> {
        let next = if place % CHUNK + 1 < CHUNK {
            place + 1
        } else if place == BEGINNING {
            CHUNK
        } else {
            let chunk = place / CHUNK;
            let after = if self.is_known(chunk) { self.after[self.slot(chunk)] } else { 0 };
            after * CHUNK
        };
        Some((next, self.page(next)?))
    }

    /// A thread wanted this page. Returns where it did so before just after the page that it wanted last, if that is known.
    pub(super) fn add(&mut self, tail: &mut Tail, page: u32) -> Option<Place> {
        let before = tail.last;
        let place = match before {
            Some((last, _)) if last % CHUNK + 1 < CHUNK && self.is_known(last / CHUNK) => last + 1,
            _ => self.begin(before)?,
        };
        let slot = self.slot(place / CHUNK);
        self.chunk_mut(slot)[(place % CHUNK) as usize] = page;
        tail.last = Some((place, page));
        let (_, before) = before?;
        let at = sample(before, page)?;
        if self.after.len() * CHUNK as usize > self.index.len() * SAMPLED {
            // Nothing is moved, which would stop all threads: what came before is looked up in what there was.
            let factor = if self.index.len() < RECORD_MIN / SAMPLED { 4 } else { 2 };
            if let Some(longer) = zeroes((self.index.len() * factor).max(INDEX_MIN)) {
                self.shorter = core::mem::replace(&mut self.index, longer);
            }
        }
        if self.index.is_empty() {
            return None;
        }
        let mask = self.index.len() - 1;
        let mut found = core::mem::replace(&mut self.index[at & mask], (place as u32).wrapping_add(1));
        if found == 0 && !self.shorter.is_empty() {
            found = self.shorter[at & (self.shorter.len() - 1)];
        }
        // The low bits of what was recorded before.
        let found = place.wrapping_sub(u64::from((place as u32).wrapping_add(1).wrapping_sub(found)));
        (found < place && self.page(found) == Some(page)).then_some(found)
    }

    /// A chunk that goes on with what is before. None, where there is no memory even for the first.
    fn begin(&mut self, before: Option<(Place, u32)>) -> Option<Place> {
        if self.slot(self.begun + 1) == self.after.len() && self.reserve().is_err() {
            self.stop_growing()?;
        }
        self.begun += 1;
        let (chunk, slot) = (self.begun, self.slot(self.begun));
        if slot == self.after.len() {
            self.after.push(0);
            self.segments[slot / SEGMENT].extend([NONE; CHUNK as usize]);
        } else {
            self.after[slot] = 0;
            self.chunk_mut(slot).fill(NONE);
        }
        if let Some((place, _)) = before
            && self.is_known(place / CHUNK)
        {
            let before = self.slot(place / CHUNK);
            self.after[before] = chunk;
        }
        Some(chunk * CHUNK)
    }

    /// Room for one more chunk: without it a program does without a longer record, and does not end.
    fn reserve(&mut self) -> Result<(), TryReserveError> {
        self.after.try_reserve(1)?;
        if self.after.len().is_multiple_of(SEGMENT) {
            let mut segment = Vec::new();
            segment.try_reserve_exact(RECORD_MIN)?;
            self.segments.try_reserve(1)?;
            self.segments.push(segment);
        }
        Ok(())
    }

    /// From now on there are as many chunks as there are. None, if there is none.
    fn stop_growing(&mut self) -> Option<()> {
        if self.after.is_empty() {
            return None;
        }
        self.chunks_max = self.after.len();
        Some(())
    }

    fn known(&self) -> core::ops::RangeInclusive<u64> {
        self.begun.saturating_sub(self.chunks_max as u64) + 1..=self.begun
    }

    /// Where what is recorded from now on begins, for [`Record::pages`].
    pub(super) fn now(&self) -> u64 {
        self.begun
    }

    /// All pages that were wanted since, thread by thread.
    pub(super) fn pages(&self, since: u64) -> Vec<u32> {
        let known = self.known();
        let first = (*known.start()).max(since + 1);
        let mut taken = vec![false; (self.begun + 1).saturating_sub(first) as usize];
        let mut pages = Vec::new();
        for begin in first..=*known.end() {
            let mut chunk = begin;
            // What goes on with a chunk was begun later.
            while chunk >= begin && !core::mem::replace(&mut taken[(chunk - first) as usize], true) {
                let places = chunk * CHUNK..(chunk + 1) * CHUNK;
                pages.extend(places.map_while(|place| self.page(place)));
                chunk = self.after[self.slot(chunk)];
            }
        }
        pages
    }
}

/// So many of them, if there is memory.
fn zeroes(len: usize) -> Option<Vec<u32>> {
    let mut zeroes = Vec::new();
    zeroes.try_reserve_exact(len).ok()?;
    zeroes.resize(len, 0);
    Some(zeroes)
}

/// Where these two are in the index, modulo its length, if they are in it at all. By the finalizer of SplitMix64 (Steele et al., OOPSLA 2014).
fn sample(before: u32, page: u32) -> Option<usize> {
    let both = u64::from(before) << 32 | u64::from(page);
    let mixed = (both ^ both >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    let mixed = (mixed ^ mixed >> 31) as usize;
    mixed.is_multiple_of(SAMPLED).then_some(mixed / SAMPLED)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add_all(record: &mut Record, tail: &mut Tail, pages: impl IntoIterator<Item = u32>) {
        for page in pages {
            record.add(tail, page);
        }
    }

    /// What was recorded behind a place.
    fn behind(record: &Record, mut place: Place) -> Vec<u32> {
        let mut pages = Vec::new();
        while let Some((next, page)) = record.next(place) {
            pages.push(page);
            place = next;
        }
        pages
    }

    #[test]
    fn threads_have_their_own_order() {
        let mut record = Record::new();
        let mut tails = [Tail::default(); 3];
        for at in 0..100 {
            for (thread, tail) in tails.iter_mut().enumerate() {
                assert_eq!(record.add(tail, at * 10 + thread as u32), None);
            }
        }
        assert_eq!(behind(&record, BEGINNING), (0..100).map(|at| at * 10).collect::<Vec<_>>());
        // By two in a row, whoever wants them.
        let mut tail = Tail::default();
        let found = (50..100).find_map(|at| Some((at, record.add(&mut tail, at * 10 + 1)?)));
        let (at, found) = found.unwrap();
        let expected: Vec<_> = (at + 1..100).map(|at| at * 10 + 1).collect();
        assert_eq!(behind(&record, found), expected);
        assert_eq!(record.add(&mut tail, 502), None);
        let kept = record.pages(0);
        let expected = (0..3).flat_map(|thread| (0..100).map(move |at| at * 10 + thread));
        let again = (50..=at).map(|at| at * 10 + 1);
        assert_eq!(kept, expected.chain(again).chain([502]).collect::<Vec<_>>());
        let now = record.now();
        add_all(&mut record, &mut Tail::default(), [7, 8, 9]);
        assert_eq!(record.pages(now), [7, 8, 9]);
    }

    #[test]
    fn a_page_that_is_wanted_often_is_found_by_the_one_before() {
        let mut record = Record::new();
        let mut tail = Tail::default();
        let hub = 1_000_000;
        add_all(&mut record, &mut tail, (0..1000).flat_map(|page| [page, hub]));
        let found = (0..1000).filter(|&page| {
            record.add(&mut tail, page);
            record
                .add(&mut tail, hub)
                .is_some_and(|at| record.next(at).is_some_and(|(_, next)| next == page + 1))
        });
        let found = found.count();
        assert!(found > 1000 / SAMPLED / 2, "{found}");
    }

    #[test]
    fn without_memory_it_does_not_get_longer() {
        let mut record = Record::new();
        let mut tail = Tail::default();
        assert_eq!(record.stop_growing(), None);
        add_all(&mut record, &mut tail, 0..1000);
        assert_eq!(record.stop_growing(), Some(()));
        add_all(&mut record, &mut tail, 1000..1100);
        // Each chunk has its place by then.
        record.make_room(1 << 24);
        add_all(&mut record, &mut tail, 1100..5000);
        assert_eq!(record.len(), 1024);
        let known: Vec<u32> = record.pages(0);
        assert_eq!(known, (5000 - known.len() as u32..5000).collect::<Vec<_>>());
        assert!(known.len() > 1024 - CHUNK as usize);
    }

    #[test]
    fn it_is_bounded_and_what_is_gone_is_not_found() {
        let mut record = Record::new();
        let (mut tail, mut idle) = (Tail::default(), Tail::default());
        add_all(&mut record, &mut idle, [1, 2, 3]);
        let n = RECORD_MIN as u32;
        add_all(&mut record, &mut tail, (0..3 * n).map(|page| page % (n / 2)));
        assert_eq!((record.len(), record.index.len()), (RECORD_MIN, RECORD_MIN / SAMPLED));
        assert!(behind(&record, BEGINNING).is_empty());
        // The chunk of the idle thread is another's.
        assert_eq!(record.add(&mut idle, 4), None);
        assert!(record.pages(0).len() <= RECORD_MIN);
        // Pairs that came later have taken the places of some.
        let is_found = |page: &u32| {
            let mut again = Tail::default();
            record.add(&mut again, page + 100);
            let found = record.add(&mut again, page + 101);
            found.is_some_and(|found| behind(&record, found)[..2] == [page + 102, page + 103])
        };
        let found = (0..1000).map(|page| page * 8).filter(is_found).count();
        assert!(found > 1000 / SAMPLED / 2, "{found}");
        // Too late to grow.
        record.make_room(4 * RECORD_MIN);
        add_all(&mut record, &mut tail, 0..100);
        assert_eq!(record.len(), RECORD_MIN);
        let mut large = Record::new();
        large.make_room(RECORD_MIN * 10 / 7 - 1);
        add_all(&mut large, &mut Tail::default(), 0..3);
        assert_eq!(large.chunks_max * CHUNK as usize, RECORD_MIN);
        large.make_room(RECORD_MIN * 10 / 7 + 1);
        large.make_room(1);
        add_all(&mut large, &mut Tail::default(), 0..3 * n);
        assert_eq!(large.len(), 2 * RECORD_MIN);
    }
}
