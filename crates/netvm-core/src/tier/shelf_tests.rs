//! The shelf against a model that keeps every page.

use super::pool::{CHUNK_BYTES, FRAME_CHUNKS};
use super::shelf::{FACTOR_MAX, Plan, Shelf, Spot};
use crate::sim::Random;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;

const PAGE: usize = 4096;

struct Model {
    shelf: Shelf,
    memory: Vec<u8>,
    disk: Vec<u8>,
    /// What each page should be: a word, or bytes that stand for it packed.
    pages: BTreeMap<u32, Result<u64, Vec<u8>>>,
    /// Frames whose memory has been given back, and not used since.
    given: BTreeSet<u32>,
    random: Random,
}

impl Model {
    fn new(plan: Plan, seed: u64) -> Self {
        Self {
            shelf: Shelf::new(plan),
            memory: vec![0; plan.frames as usize * PAGE],
            disk: Vec::new(),
            pages: BTreeMap::new(),
            given: BTreeSet::new(),
            random: Random::new(seed),
        }
    }

    fn provide(&mut self, lent: u64) {
        let room = self.shelf.plan().beyond(lent) as u32;
        if room > self.shelf.room().0 {
            self.shelf.add_room(room);
            self.disk.resize(room as usize * PAGE, 0);
        }
    }

    fn put(&mut self, page: u32, bytes: usize) {
        let contents: Vec<u8> = (0..bytes).map(|_| self.random.below(256) as u8).collect();
        self.put_contents(page, contents);
    }

    fn put_contents(&mut self, page: u32, contents: Vec<u8>) {
        match self.shelf.put(page, contents.len()).expect("there is room for as many as are lent") {
            Spot::Piece(id) => {
                let (bytes, chunks) = self.shelf.piece(id);
                assert_eq!(bytes, contents.len());
                for (chunk, part) in chunks.zip(contents.chunks(CHUNK_BYTES)) {
                    let at = chunk as usize * CHUNK_BYTES;
                    self.given.remove(&(chunk / FRAME_CHUNKS));
                    self.memory[at..at + part.len()].copy_from_slice(part);
                }
            }
            Spot::Disk(at) => {
                self.disk[at as usize * PAGE..][..contents.len()].copy_from_slice(&contents);
            }
            Spot::Word(_) => panic!("nobody put a word"),
        }
        self.pages.insert(page, Err(contents));
    }

    fn read(&self, page: u32) -> Result<u64, Vec<u8>> {
        match self.shelf.spot(page) {
            Spot::Word(word) => Ok(word),
            Spot::Piece(id) => {
                let (bytes, chunks) = self.shelf.piece(id);
                let mut contents = Vec::new();
                for chunk in chunks {
                    contents.extend_from_slice(&self.memory[chunk as usize * CHUNK_BYTES..][..CHUNK_BYTES]);
                }
                contents.truncate(bytes);
                Err(contents)
            }
            Spot::Disk(at) => Err(self.disk[at as usize * PAGE..][..PAGE].to_vec()),
        }
    }

    fn compact(&mut self) -> bool {
        let memory = &mut self.memory;
        let frame = self.shelf.compact(|from, to| {
            let from = from as usize * CHUNK_BYTES;
            memory.copy_within(from..from + CHUNK_BYTES, to as usize * CHUNK_BYTES);
        });
        if let Some(frame) = frame {
            // Its memory is given back.
            self.memory[frame as usize * PAGE..][..PAGE].fill(0);
            assert!(self.given.insert(frame), "given back twice");
        }
        frame.is_some()
    }

    fn check(&self, page: u32) {
        let is = self.read(page);
        match (self.pages.get(&page).unwrap_or(&Ok(0)), is) {
            (Ok(word), Ok(is)) => assert_eq!(*word, is),
            (Err(bytes), Err(is)) => assert!(is.starts_with(bytes), "page {page} has changed"),
            (expected, is) => panic!("page {page}: {expected:?} has become {is:?}"),
        }
    }
}

#[test]
fn every_page_is_what_was_last_put_whatever_it_shrinks_to() {
    for seed in 0..12 {
        let plan = Plan { frames: 24, pages: 96 };
        let mut model = Model::new(plan, seed);
        model.provide(plan.pages.into());
        // Phases in which pages shrink well, and in which they do not.
        let mut worst = 0;
        for step in 0..6000 {
            let page = model.random.below(plan.pages.into()) as u32;
            let shrinks = step / 700 % 2 == 0;
            match model.random.below(12) {
                0 => {
                    model.shelf.clear(page);
                    model.pages.remove(&page);
                }
                1 => {
                    let half = model.random.below(1 << 32);
                    let word = match model.random.below(3) {
                        0 => half << 32 | half,
                        1 => half << 20,
                        _ => half << 32 | (half ^ 2) | 1,
                    };
                    let fits = word % 4 == 0 || word >> 32 == word & 0xFFFF_FFFF;
                    assert_eq!(model.shelf.put_word(page, word), fits);
                    if fits {
                        model.pages.insert(page, Ok(word));
                    }
                }
                2 => drop(model.compact()),
                3 => {
                    if let Some((page, at)) = model.shelf.come_back(8) {
                        assert_eq!(model.shelf.spot(page), Spot::Disk(at));
                        let contents = model.read(page).unwrap_err();
                        model.put_contents(page, contents);
                        assert!(matches!(model.shelf.spot(page), Spot::Piece(_)), "it came back to memory");
                    }
                }
                _ => {
                    let most = if shrinks { 2048 } else { PAGE as u64 };
                    let bytes = 1 + model.random.below(most) as usize;
                    model.put(page, if shrinks { bytes } else { bytes.max(3 * PAGE / 4) });
                }
            }
            worst = worst.max(model.shelf.room().1);
            model.check(page);
            if step % 500 == 0 {
                (0..plan.pages).for_each(|page| model.check(page));
            }
        }
        assert!(worst > 0, "the disk was never used");
        for page in 0..plan.pages {
            model.check(page);
            model.shelf.clear(page);
            model.pages.remove(&page);
            model.check(page);
        }
        while model.compact() {}
        assert!(model.shelf.drop_room());
        // All memory has been given back that was ever used, and everything has room again.
        model.provide(plan.pages.into());
        (0..plan.pages).for_each(|page| model.put(page, PAGE));
        (0..plan.pages).for_each(|page| model.check(page));
        assert_eq!(model.shelf.room(), (72, 72));
    }
}

#[test]
fn as_many_pages_as_frames_fit_without_a_disk_in_any_sizes() {
    for seed in 0..50 {
        let plan = Plan::new(40 * 5000, u64::MAX / 32, false);
        assert_eq!(plan, None, "more than can be");
        let plan = Plan::new(40 * 5000, 40 * 5000, false).unwrap();
        assert_eq!(plan.frames, plan.pages);
        let mut model = Model::new(plan, seed);
        for _ in 0..2000 {
            let page = model.random.below(plan.pages.into()) as u32;
            let bytes = PAGE - model.random.below(if seed % 2 == 0 { 1200 } else { 4000 }) as usize;
            model.put(page, bytes);
            if model.random.once_in(10) {
                model.compact();
            }
            model.check(page);
        }
    }
}

#[test]
fn books_and_frames_take_no_more_than_the_memory() {
    const GIB: u64 = 1 << 30;
    for factor in 1..=FACTOR_MAX {
        let plan = Plan::new(GIB, factor * GIB, true).unwrap();
        assert_eq!(u64::from(plan.pages), factor * GIB / 4096);
        let per_page = core::mem::size_of::<super::Piece>() as u64 + 8 + 8;
        let books = u64::from(plan.frames) * (64 + 2 + 8 + 4) + u64::from(plan.pages) * per_page;
        let all = u64::from(plan.frames) * 4096 + books;
        assert!(all <= GIB && all > GIB - 8192, "{factor}: {all}");
        assert!(u64::from(plan.frames) * 4096 > GIB * 8 / 10, "{factor}: {plan:?}");
    }
    assert_eq!(Plan::new(GIB, (FACTOR_MAX + 1) * GIB, true), None);
    assert_eq!(Plan::new(4000, 4000, false), None);
    assert_eq!(Plan::new(GIB, u64::MAX, true), None);
    assert_eq!(Plan::new(u64::MAX, u64::MAX, false), None);
}

#[test]
fn more_is_lent_as_pages_shrink_and_asked_back_when_they_do_not() {
    let plan = Plan { frames: 4096, pages: 4 * 4096 };
    let mut model = Model::new(plan, 1);
    // Nothing is known: as if nothing would shrink.
    assert!(model.shelf.may_lend(4096, false) && !model.shelf.may_lend(4097, false));
    model.provide(plan.pages.into());
    // A quarter of their size.
    for page in 0..4096 {
        model.put(page, 1024);
    }
    assert!(model.shelf.may_lend(2 * 4096, false) && !model.shelf.may_lend(4 * 4096, false));
    assert_eq!(model.shelf.missing(2 * 4096), 0);
    for page in 4096..12_000 {
        model.put(page, 1024);
    }
    assert!(model.shelf.may_lend(13_000, false) && !model.shelf.may_lend(16_384, false));
    assert!(!model.shelf.may_lend(u64::MAX, false));
    assert_eq!(model.shelf.missing(12_000), 0, "three quarters are filled");
    // They change into what does not shrink.
    let mut page = 0;
    let missing = loop {
        let missing = model.shelf.missing(12_000);
        if missing > 0 {
            break missing;
        }
        model.put(page, PAGE);
        page += 1;
    };
    assert_eq!(model.shelf.room().1, 0, "long before the disk is needed");
    // Who has nobody else gets what the disk has room for.
    assert!(model.shelf.may_lend(12_001, true) && model.shelf.may_lend(plan.pages.into(), true));
    assert!(!model.shelf.may_lend(u64::from(plan.pages) + 1, true));
    assert!(!model.shelf.may_lend(12_001, false) && (1000..3000).contains(&missing), "{missing}");
    // As much as that comes back: it is enough, and more than just enough.
    for page in 12_000 - missing as u32..12_000 {
        model.shelf.clear(page);
        model.pages.remove(&page);
    }
    let left = model.shelf.missing(12_000 - missing);
    assert!(left < 400, "{left}");
    for page in 9000..10_000 {
        model.shelf.clear(page);
        model.pages.remove(&page);
    }
    assert_eq!(model.shelf.missing(12_000 - missing - 1000), 0);
    // What fits as it is is never asked back.
    (0..4096).for_each(|page| model.put(page, PAGE));
    (4096..12_000).for_each(|page| model.shelf.clear(page));
    assert_eq!(model.shelf.missing(4096), 0);
}
