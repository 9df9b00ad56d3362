//! Packed pages: local memory that holds more pages than it has frames. See docs/design/tiers.md.

use super::engine::{EVICT_PAGES, Engine};
use super::error::PagerError;
use super::transfers::Transfer;
use crate::error::Result;
use crate::stats::PagerStats;
use lz4_flex::block::{CompressTable, compress_into_with_table, decompress_into, get_maximum_output_size};
use netvm_core::residency::{Arrival, Entry, FRAME_MAX, PageState};
use netvm_core::tier::{CHUNK_BYTES, CLASSES, Choice, FRAME_CHUNKS, PackedPool, PieceId, Policy};
use netvm_sys::paged::PagedArea;
use netvm_sys::uffd::PAGE_BYTES;
use std::time::Instant;

/// A page that needs more chunks than this is not worth packing: three quarters of a frame.
const CHUNKS_MAX: usize = FRAME_CHUNKS as usize / 4 * 3;
/// Pages evicted in one step while they are packed: a fault may be waiting.
pub(super) const PACK_PAGES: usize = EVICT_PAGES / 4;
/// One of so many operations is timed.
const TIMED_EVERY: u32 = 8;
/// One of so many evictions is timed.
const EVICTIONS_TIMED_EVERY: u32 = 4;
/// What evicting a page takes beside packing it, and bringing it in beside unpacking it, until it has been measured: nanoseconds.
const REST_NS: f64 = 2000.0;
/// What packing costs is seen where so large a part of the pages is for the pool.
const FOR_POOL_MIN: f64 = 0.25;
/// Decisions after which samples count again.
const LEARNT: u32 = 256;
/// Of so many ways back from an answered fault
const WAKES: usize = 8;
/// so many were shorter than the one that counts: the program does other things too in between.
const SHORTER: usize = 2;
/// Pages from lenders of a class over which the time that faults waited is divided up.
const FETCHED: u32 = 64;
/// The pool keeps one part in this many of its chunks free before it is made smaller, and a few frames.
const SLACK_PART: usize = 16;
const SLACK_FRAMES: usize = 24;

/// The state of the packed pages.
pub(super) struct Tier {
    pub(super) choice: Choice,
    pub(super) pool: PackedPool,
    /// A full frame by way of which pages leave the pool when no other is free; there while the pool has frames.
    pub(super) spare: Option<u32>,
    /// Pages evicted so far, modulo what the entry of a remote page can hold.
    clock: u32,
    decide_due: bool,
    lz4: CompressTable,
    /// A packed page in one piece.
    packed: Box<[u8]>,
    /// A page that leaves by way of a frame only to see what packing it would cost and bring.
    sample: Option<u32>,
    /// A page that is unpacked only to see how long it takes.
    unpacked: Box<[u8; PAGE_BYTES]>,
    timed: u32,
    evictions: u32,
    /// Pages of the eviction under way that the pool is for.
    for_pool: u32,
    /// Decisions for which what was measured of a pool counts more than samples.
    learnt: u32,
    /// When the last fault was answered, if the way back is to be timed.
    answered: Option<Instant>,
    wakes_ns: [u64; WAKES],
    wakes: usize,
    /// Since when a fault waits for a lender.
    waiting: Option<Instant>,
    /// A page came from the pool since one came last from a lender.
    by_pool: bool,
    /// For lenders of each class, and how many pages came from them.
    waited_ns: [u64; CLASSES],
    fetched: [u32; CLASSES],
}

impl Tier {
    pub(super) fn new(policy: Policy, frames: usize) -> Self {
        Self {
            choice: Choice::new(policy),
            pool: PackedPool::new(if policy == Policy::Lender { 0 } else { frames }),
            spare: None,
            clock: 1,
            decide_due: false,
            lz4: CompressTable::small(),
            sample: None,
            packed: vec![0; get_maximum_output_size(PAGE_BYTES)].into_boxed_slice(),
            unpacked: Box::new([0; PAGE_BYTES]),
            timed: 0,
            evictions: 0,
            for_pool: 0,
            learnt: 0,
            answered: None,
            wakes_ns: [0; WAKES],
            wakes: 0,
            waiting: None,
            by_pool: false,
            waited_ns: [0; CLASSES],
            fetched: [0; CLASSES],
        }
    }

    /// What stands in place of a frame in the entry of a page that becomes remote now.
    pub(super) fn stamp(&self) -> u32 {
        self.clock
    }

    /// What is packed from now on has another stamp than what is packed.
    pub(super) fn begin_stamp(&mut self) {
        self.clock = self.clock.wrapping_add(1) & FRAME_MAX;
    }

    pub(super) fn note_evicted(&mut self, pages: usize) {
        self.clock = self.clock.wrapping_add(pages as u32) & FRAME_MAX;
        self.choice.note_evicted(pages);
    }

    /// A page is brought in that was given up at `stamp`, from a lender of this class or in place of it. Returns how many pages were evicted since.
    pub(super) fn note_back(&mut self, stamp: u32, class: u8) -> u32 {
        let age = self.clock.wrapping_sub(stamp) & FRAME_MAX;
        self.decide_due |= self.choice.note_age(age, class);
        age
    }

    /// Whether this page, which nobody would look at when it leaves, is to be looked at: as many of those as of others.
    pub(super) fn samples(&mut self, page: u32) -> bool {
        let samples = self.choice.sample();
        if samples {
            self.sample = Some(page);
        }
        samples
    }

    /// A fault begins to wait for a lender.
    pub(super) fn note_waiting(&mut self) {
        self.waiting.get_or_insert_with(Instant::now);
    }

    /// Whether a fault waits for a lender.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    /// Pages have come from a lender of this class; a fault waited for one if `wanted`.
    pub(super) fn note_fetched(&mut self, pages: u32, wanted: bool, class: u8, stats: &mut PagerStats) {
        let mut waited_ns = 0;
        if wanted && let Some(since) = self.waiting.take() {
            waited_ns = since.elapsed().as_nanos() as u64;
            let in_row = !std::mem::take(&mut self.by_pool);
            self.choice.costs.note_wait(waited_ns as f64, in_row, class);
        }
        self.note_waited(waited_ns, pages, class, stats);
    }

    /// The same of pages for which a fault waited so long.
    pub(super) fn note_fetched_alone(
        &mut self,
        pages: u32,
        waited_ns: u64,
        class: u8,
        stats: &mut PagerStats,
    ) {
        let in_row = !std::mem::take(&mut self.by_pool);
        self.choice.costs.note_wait(waited_ns as f64, in_row, class);
        self.note_waited(waited_ns, pages, class, stats);
    }

    fn note_waited(&mut self, waited_ns: u64, pages: u32, class: u8, stats: &mut PagerStats) {
        let place = usize::from(class).min(CLASSES - 1);
        let (all_ns, fetched) = (&mut self.waited_ns[place], &mut self.fetched[place]);
        *all_ns += waited_ns;
        *fetched += pages;
        if *fetched >= FETCHED {
            self.choice.costs.fetch[place].note(*all_ns as f64 / f64::from(*fetched));
            stats.fetch_ns += *all_ns;
            (*all_ns, *fetched) = (0, 0);
        }
    }

    /// Whether the next operation is one to time.
    fn is_timed(&mut self) -> bool {
        self.timed = self.timed.wrapping_add(1);
        self.timed.is_multiple_of(TIMED_EVERY)
    }

    /// A fault has been answered.
    pub(super) fn note_answered(&mut self) {
        if self.is_timed() {
            self.answered = Some(Instant::now());
        }
    }

    /// The next fault is there.
    pub(super) fn note_fault(&mut self, stats: &mut PagerStats) {
        let Some(answered) = self.answered.take() else { return };
        self.wakes_ns[self.wakes] = answered.elapsed().as_nanos() as u64;
        self.wakes += 1;
        if self.wakes == WAKES {
            self.wakes_ns.sort_unstable();
            self.choice.costs.fault.note(self.wakes_ns[SHORTER] as f64);
            stats.wake_ns += self.wakes_ns[SHORTER];
            stats.wakes += 1;
            self.wakes = 0;
        }
    }

    /// When an eviction begins, if it is to be timed: always while a fault waits for a lender, or else some.
    pub(super) fn time_eviction(&mut self) -> Option<Instant> {
        (self.evictions, self.for_pool) = (self.evictions.wrapping_add(1), 0);
        (self.waiting.is_some() || self.evictions.is_multiple_of(EVICTIONS_TIMED_EVERY)).then(Instant::now)
    }

    /// `pages` pages were evicted, and packed where that was possible if `packing`.
    pub(super) fn note_eviction(&mut self, since: Option<Instant>, pages: usize, packing: bool) {
        let Some(since) = since.filter(|_| pages > 0) else { return };
        let took = since.elapsed();
        let each = took.as_nanos() as f64 / pages as f64;
        let part = f64::from(self.for_pool) / pages as f64;
        if !packing || self.for_pool == 0 {
            self.choice.costs.send.note(each);
        } else if part >= FOR_POOL_MIN {
            // The others went as they were.
            let others = self.choice.costs.send.or(each).min(each) * (1.0 - part);
            self.choice.costs.pack.note((each - others) / part);
            self.learnt = LEARNT;
        }
        // This is not what the lender takes.
        self.waiting = self.waiting.map(|waiting| waiting + took);
    }

    /// The pool was looked after, perhaps while a fault waits for a lender: this is not what the lender takes.
    fn note_tended(&mut self, since: Option<Instant>) {
        if let Some(since) = since {
            self.waiting = self.waiting.map(|waiting| waiting + since.elapsed());
        }
    }

    /// Packs a page into `self.packed`; its length if that pays.
    fn compress(&mut self, page: &[u8], stats: &mut PagerStats) -> Option<usize> {
        stats.pack_tries += 1;
        let since = self.is_timed().then(Instant::now);
        // The buffer is as long as the result can be.
        let bytes = compress_into_with_table(page, &mut self.packed, &mut self.lz4).unwrap_or(usize::MAX);
        if let Some(since) = since {
            stats.pack_ns += since.elapsed().as_nanos() as u64 * u64::from(TIMED_EVERY);
        }
        let chunks = bytes.div_ceil(CHUNK_BYTES);
        let fits = chunks <= CHUNKS_MAX;
        self.choice.tried(fits.then_some(chunks));
        stats.incompressible += u64::from(!fits);
        fits.then_some(bytes)
    }

    /// Measures what packing this page would cost and bring.
    fn measure(&mut self, page: &[u8], stats: &mut PagerStats) {
        let since = Instant::now();
        let packed = self.compress(page, stats);
        if self.learnt > 0 {
            return;
        }
        // What else there is to do for it is measured when it is done.
        self.choice.costs.pack.note(since.elapsed().as_nanos() as f64 + REST_NS);
        let Some(bytes) = packed else { return };
        let since = Instant::now();
        if decompress_into(&self.packed[..bytes], &mut self.unpacked[..]).is_ok() {
            self.choice.costs.unpack.note(since.elapsed().as_nanos() as f64 + REST_NS);
        }
    }

    /// Puts what `compress` left into the pool, as the newest. `None` when there is no room.
    fn store(&mut self, paged: &mut PagedArea, page: u32, bytes: usize) -> Option<PieceId> {
        let id = self.pool.insert(page, bytes, self.clock)?;
        for (chunk, part) in self.pool.chunks(id).zip(self.packed[..bytes].chunks(CHUNK_BYTES)) {
            let (frame, at) = place(chunk);
            paged.frame_bytes_mut(frame)[at..at + part.len()].copy_from_slice(part);
        }
        Some(id)
    }

    /// Unpacks a piece into a full frame.
    fn unpack(&mut self, paged: &mut PagedArea, id: PieceId, to: u32, stats: &mut PagerStats) -> bool {
        let since = self.is_timed().then(Instant::now);
        let bytes = usize::from(self.pool.piece(id).bytes);
        for (chunk, part) in self.pool.chunks(id).zip(self.packed[..bytes].chunks_mut(CHUNK_BYTES)) {
            let (frame, at) = place(chunk);
            part.copy_from_slice(&paged.frame_bytes(frame)[at..at + part.len()]);
        }
        let out = paged.frame_bytes_mut(to as usize);
        let whole = decompress_into(&self.packed[..bytes], out).is_ok_and(|bytes| bytes == PAGE_BYTES);
        if let Some(since) = since {
            stats.unpack_ns += since.elapsed().as_nanos() as u64 * u64::from(TIMED_EVERY);
        }
        whole
    }

    /// After fork(2), in the child: the pool stayed with the parent.
    pub(super) fn forget_pool(&mut self, frames: usize) {
        let policy = self.choice.policy();
        self.pool = PackedPool::new(if policy == Policy::Lender { 0 } else { frames });
        self.spare = None;
        self.waiting = None;
    }

    /// Frames that packed pages have, and the spare one.
    pub(super) fn frames(&self) -> usize {
        self.pool.frames() + usize::from(self.spare.is_some())
    }

    /// Without a pool, what was measured when there was one is believed for a while.
    fn forget_slowly(&mut self) {
        if self.choice.step() == 0 {
            self.learnt = self.learnt.saturating_sub(1);
        }
    }

    /// Pages that a fault may wait for were dropped.
    pub(super) fn forget_waiting(&mut self) {
        self.waiting = None;
    }
}

/// Frame of a chunk, and where it begins there.
fn place(chunk: u32) -> (usize, usize) {
    ((chunk / FRAME_CHUNKS) as usize, (chunk % FRAME_CHUNKS) as usize * CHUNK_BYTES)
}

/// The word that a page consists of, if it is one repeated.
pub(super) fn repeated_word(page: &[u8]) -> Option<u64> {
    let (words, _) = page.as_chunks::<8>();
    let first = *words.first()?;
    // Most pages differ soon; the others are compared in pieces that the processor compares at once.
    if words.iter().take(8).any(|word| *word != first) {
        return None;
    }
    let same = words.chunks(8).all(|some| some.iter().all(|word| *word == first));
    same.then(|| u64::from_ne_bytes(first))
}

impl Engine {
    /// Packs a page that lies in a frame, which is free or the pool's afterwards. False when it cannot be packed, or there is no room.
    pub(super) fn pack(&mut self, page: u32, frame: u32, entry: Entry, clean: bool) -> Result<bool> {
        let class = self.backing.slots.class_of(entry.slot());
        self.tier.for_pool += u32::from(self.tier.choice.is_packed(class));
        if !self.tier.choice.try_to_pack(class) {
            if self.tier.sample.take_if(|sample| *sample == page).is_some() || self.tier.choice.sample() {
                self.tier.measure(self.paged.frame_bytes(frame as usize), &mut self.stats);
                self.tier.choice.costs.changed.note(if clean { 0.0 } else { 1.0 });
            }
            return Ok(false);
        }
        let bytes = self.tier.compress(self.paged.frame_bytes(frame as usize), &mut self.stats);
        self.tier.choice.costs.changed.note(if clean { 0.0 } else { 1.0 });
        let Some(bytes) = bytes else { return Ok(false) };
        let mut frame_left = true;
        if self.tier.pool.free_chunks() < PackedPool::chunks_of(bytes) {
            if self.tier.pool.frames() >= self.pool_frames_max(self.local_frames) {
                return Ok(false);
            }
            if self.tier.spare.is_none() {
                if self.free.is_empty() {
                    self.give_up_cached(1);
                }
                let Some((spare, _)) = self.free.take_run(1) else { return Ok(false) };
                self.tier.spare = Some(spare as u32);
            }
            // What lay there is in the buffer now.
            self.tier.pool.add_frame(frame);
            frame_left = false;
            self.stats.pool_frames_peak = self.stats.pool_frames_peak.max(self.tier.frames() as u64);
        }
        let Some(id) = self.tier.store(&mut self.paged, page, bytes) else { return Ok(false) };
        if frame_left {
            self.free.put(frame as usize, 1);
        }
        let slot = if clean {
            entry.slot()
        } else {
            self.backing.release_slot(entry.slot())?;
            0
        };
        self.table.set(page, entry.with_state(PageState::Packed).with_frame(id).with_slot(slot));
        self.stats.packed += 1;
        self.stats.packed_bytes += (PackedPool::chunks_of(bytes) * CHUNK_BYTES) as u64;
        Ok(true)
    }

    /// Brings packed pages and repeated words in, from the first of `pages` on, as far as they follow each other. Returns how many, 0
    /// when there is no frame.
    pub(super) fn unpack_run(&mut self, first: u32, pages: u32) -> Result<u32> {
        let is_here = |state| matches!(state, PageState::Packed | PageState::Filled);
        let mut run = 1;
        while run < pages && is_here(self.table.get(first + run).state()) {
            run += 1;
        }
        let Some((frame, frames)) = self.take_frames(run)? else { return Ok(0) };
        let since = self.tier.is_timed().then(Instant::now);
        let arrival = Arrival::in_window(self.is_window(frames));
        let mut done = 0;
        while done < frames {
            let (page, frame) = (first + done, frame + done);
            let entry = self.table.get(page);
            match entry.state() {
                PageState::Packed => {
                    let stamp = self.tier.pool.piece(entry.frame()).stamp;
                    self.take_from_pool(page, entry.frame(), frame)?;
                    let age = self.tier.note_back(stamp, self.backing.slots.class_of(entry.slot()));
                    self.mapped.note_back(page, arrival, age as usize, self.local_frames, true);
                    self.stats.unpacked += 1;
                }
                PageState::Filled => {
                    let word = self.table.hash(page).to_ne_bytes();
                    self.paged.frame_bytes_mut(frame as usize).as_chunks_mut::<8>().0.fill(word);
                }
                // It went to a lender when frames were made free.
                _ => break,
            }
            done += 1;
        }
        if done < frames {
            self.free.put((frame + done) as usize, (frames - done) as usize);
        }
        if done > 0 {
            self.tier.by_pool = true;
            self.backing.detail.reuse.rescued += u64::from(done);
            self.install(first, frame, done)?;
            if let Some(since) = since {
                self.tier.choice.costs.unpack.note(since.elapsed().as_nanos() as f64 / f64::from(done));
            }
        }
        Ok(done)
    }

    /// Unpacks a piece into a frame and removes it.
    fn take_from_pool(&mut self, page: u32, id: PieceId, frame: u32) -> Result<()> {
        self.read_from_pool(page, id, frame)?;
        self.tier.pool.remove(id);
        Ok(())
    }

    pub(super) fn read_from_pool(&mut self, page: u32, id: PieceId, frame: u32) -> Result<()> {
        let whole = self.tier.unpack(&mut self.paged, id, frame, &mut self.stats);
        if !whole || self.content_hash(frame) != self.table.hash(page) {
            return Err(PagerError::PackedCorrupt { address: self.address_of(page) }.into());
        }
        Ok(())
    }

    /// While nobody waits: the pool gets its size and some room. True when something was done.
    pub(super) fn tend_pool(&mut self) -> Result<bool> {
        if self.tier.decide_due {
            self.tier.decide_due = false;
            self.tier.choice.decide(self.local_frames);
            self.tier.forget_slowly();
            self.stats.pool_changes = self.tier.choice.changes();
        }
        let target = self.pool_frames_max(self.local_frames);
        let (frames, free) = (self.tier.pool.frames(), self.tier.pool.free_chunks());
        if frames == 0 {
            let spare = self.tier.spare.take();
            spare.into_iter().for_each(|frame| self.free.put(frame as usize, 1));
            return Ok(spare.is_some());
        }
        let each = self.tier.choice.costs.chunks.or(8.0) as usize + 1;
        let is_full = frames > target || (frames == target && free < PACK_PAGES * each);
        if is_full && !self.backing.is_stranded() {
            let since = self.tier.is_waiting().then(Instant::now);
            let spilled = self.spill(EVICT_PAGES)?;
            let released = self.release_pool_frames(frames.saturating_sub(target).min(EVICT_PAGES));
            self.tier.note_tended(since);
            return Ok(spilled + released > 0);
        }
        let slack = (frames / SLACK_PART + SLACK_FRAMES) * FRAME_CHUNKS as usize;
        Ok(free > slack && self.release_pool_frames(1) > 0)
    }

    /// Takes up to `frames` frames from the pool that it does not need.
    pub(super) fn release_pool_frames(&mut self, frames: usize) -> usize {
        let paged = &mut self.paged;
        let shift = |from, to| {
            let mut bytes = [0; CHUNK_BYTES];
            let (frame, at) = place(from);
            bytes.copy_from_slice(&paged.frame_bytes(frame)[at..at + CHUNK_BYTES]);
            let (frame, at) = place(to);
            paged.frame_bytes_mut(frame)[at..at + CHUNK_BYTES].copy_from_slice(&bytes);
        };
        let mut shift = shift;
        for released in 0..frames {
            let Some(frame) = self.tier.pool.compact(&mut shift) else { return released };
            self.free.put(frame as usize, 1);
        }
        frames
    }

    /// Gives up to `want` of the oldest packed pages to a lender, as far as there are free frames to unpack them. Returns how many.
    pub(super) fn spill(&mut self, want: usize) -> Result<usize> {
        let mut done = self.drop_written(want);
        if done < want && !self.backing.promised.is_empty() {
            self.take_up_promised()?;
            // The oldest were promised first.
            if self.is_oldest_promised()? {
                self.send_promised(want - done)?;
            }
            done += self.drop_written(want - done);
        }
        let mut batch = Batch::default();
        while done < want
            && let Some(id) = self.tier.pool.oldest()
        {
            let piece = *self.tier.pool.piece(id);
            let entry = self.table.get(piece.page);
            let mut slot = entry.slot();
            if slot == 0 {
                if batch.is_full() {
                    self.send_batch(&mut batch)?;
                }
                if batch.frames == 0 && self.free.is_empty() {
                    self.give_up_cached(want - done);
                }
                if batch.frames == 0
                    && let Some((frame, frames)) = self.free.take_run((want - done).min(EVICT_PAGES))
                {
                    let slots = self.backing.take_slots(frames as u32);
                    let (slot, slots) = slots.inspect_err(|_| self.free.put(frame, frames))?;
                    batch = Batch { slot, slots, ..Batch::new(frame, frames) };
                }
                let Some((frame, new)) = batch.next() else { break };
                slot = new;
                self.take_from_pool(piece.page, id, frame)?;
            } else {
                // A lender has it already.
                self.tier.pool.remove(id);
            }
            let entry = entry.with_state(PageState::Remote).with_frame(piece.stamp).with_slot(slot);
            self.table.set(piece.page, entry);
            self.stats.spilled += 1;
            done += 1;
        }
        self.send_batch(&mut batch)?;
        Ok(done)
    }

    /// Gives up to `want` of the oldest packed pages up, as far as lenders have them already. Returns how many.
    pub(super) fn drop_written(&mut self, want: usize) -> usize {
        let mut done = 0;
        while done < want
            && let Some(id) = self.tier.pool.oldest()
        {
            let piece = *self.tier.pool.piece(id);
            let entry = self.table.get(piece.page);
            if entry.slot() == 0 {
                break;
            }
            self.tier.pool.remove(id);
            self.table.set(piece.page, entry.with_state(PageState::Remote).with_frame(piece.stamp));
            done += 1;
        }
        self.stats.spilled += done as u64;
        done
    }

    /// There is no frame, and no page in use can be taken out: takes one from the pool, or a step towards it. True when it did.
    pub(super) fn take_from_pool_now(&mut self) -> Result<bool> {
        if self.release_pool_frames(1) > 0 {
            return Ok(true);
        }
        self.use_spare();
        let spilled = self.spill(1)?;
        if self.in_flight() == 0 {
            self.regain_spare();
        }
        Ok(spilled > 0)
    }

    /// Most frames the pool may have of `local` frames: a quarter always holds pages as they are that are not pinned.
    pub(super) fn pool_frames_max(&self, local: usize) -> usize {
        self.tier.choice.frames(local).min((local - local / 4).saturating_sub(self.pins.count() as usize))
    }

    /// Makes the pool smaller until it has at most `frames` frames, or `most` fewer than now, as far as possible at once. What it gives is free.
    pub(super) fn shrink_pool_by(&mut self, most: usize, frames: usize) -> Result<()> {
        let frames = frames.max(self.tier.pool.frames().saturating_sub(most));
        while self.tier.pool.frames() > frames {
            if self.release_pool_frames(self.tier.pool.frames() - frames) > 0 {
                continue;
            }
            self.use_spare();
            if self.spill(EVICT_PAGES)? == 0 {
                break;
            }
            self.finish_all()?;
        }
        if self.free.len() > 1 {
            self.regain_spare();
        }
        Ok(())
    }

    /// The spare frame, where what left the pool was at a lender already, and needed none on its way that would have become it again.
    fn regain_spare(&mut self) {
        if self.tier.spare.is_none() && self.tier.pool.frames() > 0 {
            self.tier.spare = self.free.take_run(1).map(|(frame, _)| frame as u32);
        }
    }

    /// With no other frame left, the spare one is for spilling; it becomes the spare one again when its page has been sent.
    fn use_spare(&mut self) {
        if self.free.is_empty()
            && let Some(frame) = self.tier.spare.take()
        {
            self.free.put(frame as usize, 1);
        }
    }

    /// Frames of pages that have gone from the pool to a lender.
    pub(super) fn spilled(&mut self, mut frame: u32, mut frames: u32) {
        self.writing_frames -= frames as usize;
        if self.tier.spare.is_none() && self.tier.pool.frames() > 0 {
            self.tier.spare = Some(frame);
            (frame, frames) = (frame + 1, frames - 1);
        }
        if frames > 0 {
            self.free.put(frame as usize, frames as usize);
        }
    }

    /// Sends what the batch has collected; what it did not use is free again.
    fn send_batch(&mut self, batch: &mut Batch) -> Result<()> {
        let Batch { frame, frames, slot, slots, used } = std::mem::take(batch);
        for unused in used..slots {
            self.backing.release_slot(slot + unused)?;
        }
        if frames > used as usize {
            self.free.put(frame + used as usize, frames - used as usize);
        }
        if used > 0 {
            // Whoever reads the slot from now on does so after this, on the same connection.
            self.writing_frames += used as usize;
            let transfer = Transfer { loose: true, ..Transfer::write(0, frame as u32, used) };
            self.start(transfer, slot)?;
        }
        Ok(())
    }

    /// At least one frame, with the pool as it is.
    pub(super) fn make_frames_free(&mut self) -> Result<()> {
        self.finish_all()?;
        self.use_spare();
        if self.free.is_empty() {
            self.give_up_cached(EVICT_PAGES);
        }
        if self.free.is_empty() && self.backing.is_stranded() {
            return Err(self.backing.too_few(None));
        }
        if self.free.is_empty() && self.evict_unpacked()? == 0 {
            return Err(PagerError::LocalExhausted { pages: self.mapped.len() as u64 }.into());
        }
        Ok(())
    }
}

/// Neighbouring frames and neighbouring slots for pages that are sent together.
#[derive(Default)]
struct Batch {
    frame: usize,
    frames: usize,
    slot: u32,
    slots: u32,
    used: u32,
}

impl Batch {
    fn new(frame: usize, frames: usize) -> Self {
        Self { frame, frames, ..Self::default() }
    }

    fn is_full(&self) -> bool {
        self.used > 0 && self.used as usize >= self.frames.min(self.slots as usize)
    }

    /// The next frame and its slot.
    fn next(&mut self) -> Option<(u32, u32)> {
        if self.used as usize >= self.frames.min(self.slots as usize) {
            return None;
        }
        self.used += 1;
        Some((self.frame as u32 + self.used - 1, self.slot + self.used - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_one_word_is_recognised() {
        let mut page = [0_u8; PAGE_BYTES];
        assert_eq!(repeated_word(&page), Some(0));
        page.as_chunks_mut::<8>().0.fill(0x0123_4567_89AB_CDEF_u64.to_ne_bytes());
        assert_eq!(repeated_word(&page), Some(0x0123_4567_89AB_CDEF));
        for different in [0, 7, 8, 63, 64, 2000, PAGE_BYTES - 1] {
            page[different] ^= 1;
            assert_eq!(repeated_word(&page), None, "byte {different}");
            page[different] ^= 1;
        }
    }
}
