//! Where a lender that packs keeps each of its pages, how much it may lend, and when it asks for something back.
//!
//! The book-keeping only: the caller has the frames, the room on disk and the bytes. See docs/design/tiers.md.

use super::pool::{FRAME_CHUNKS, PackedPool, PieceId};
use alloc::vec;
use alloc::vec::Vec;

/// Bytes of a page, and of a frame.
const PAGE_BYTES: u64 = 4096;
/// What the books of a frame take: links of its chunks, its use, its place in two lists.
const FRAME_BOOK_BYTES: u64 = FRAME_CHUNKS as u64 * 4 + 2 + 8 + 4;
/// What those of a page that may be lent take: its entry and its piece.
const PAGE_BOOK_BYTES: u64 = 8 + 24;
/// And those of a page's room on disk: whose it is, and its place among the free ones.
const ROOM_BOOK_BYTES: u64 = 4 + 4;
/// Most times the memory that is lent.
pub const FACTOR_MAX: u64 = 16;
/// Pages that do not shrink, which were never there: what is expected of others until so many are.
const DOUBT: u64 = 256;
/// Of 16 parts of the memory, those that pages may be expected to fill when another slab is lent.
const LEND_PARTS: u64 = 14;
/// With more than so many parts filled, memory is asked back.
const HIGH_PARTS: u64 = 14;
/// And until no more than so many are.
const LOW_PARTS: u64 = 12;
/// Frames that may be free in pieces before chunks are moved to free one of them whole: these, and one of 32.
const LOOSE_FRAMES: usize = 8;

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spot {
    /// Nowhere: it is this word, again and again. Pages that were never written are zeros.
    Word(u64),
    /// In the chunks of this piece; as it is when that has 4096 bytes.
    Piece(PieceId),
    /// In this page of the room on disk, as it is.
    Disk(u32),
}

/// How many pages there are, in memory and beyond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Frames of 4096 bytes, which together with the books take no more than the memory.
    pub frames: u32,
    /// Most pages that are lent.
    pub pages: u32,
}

impl Plan {
    /// For `memory_bytes` of memory, from which at most `lend_bytes` are lent. Without room on disk no more is lent than there are frames.
    ///
    /// `None` when that leaves no frame, is more than [`FACTOR_MAX`] times the memory, or more than can be numbered (8 TiB lent, 512 GiB of memory).
    pub fn new(memory_bytes: u64, lend_bytes: u64, on_disk: bool) -> Option<Self> {
        let pages = lend_bytes / PAGE_BYTES;
        let (frames, pages) = if on_disk {
            let books = pages.checked_mul(PAGE_BOOK_BYTES + ROOM_BOOK_BYTES)?;
            (memory_bytes.checked_sub(books)? / (PAGE_BYTES + FRAME_BOOK_BYTES), pages)
        } else {
            let frames = memory_bytes / (PAGE_BYTES + FRAME_BOOK_BYTES + PAGE_BOOK_BYTES);
            (frames, pages.min(frames))
        };
        let is_possible = frames > 0
            && frames <= 1 << 27
            && pages > 0
            && pages <= 1 << 31
            && lend_bytes <= memory_bytes.checked_mul(FACTOR_MAX)?;
        is_possible.then_some(Self { frames: frames as u32, pages: pages as u32 })
    }

    /// Pages that may have to go to the disk when so many are lent and none of them shrinks.
    pub fn beyond(&self, lent: u64) -> u64 {
        lent.saturating_sub(self.frames.into())
    }
}

/// See the module.
#[derive(Debug)]
pub struct Shelf {
    plan: Plan,
    pool: PackedPool,
    /// Frames from here on were never used; these were, and are not any more.
    next_frame: u32,
    free_frames: Vec<u32>,
    /// For each page a [`Spot`], by its lowest two bits: 0 a word that ends in them, 1 a word that is the same 32 bits twice, 2 a piece, 3 on
    /// disk. So what was never touched is a page of zeros.
    entries: Vec<u64>,
    /// Whose page each of the room on disk is, and the free ones among them.
    room: Vec<u32>,
    free_room: Vec<u32>,
    /// Where to look for pages on disk next.
    hand: usize,
    asks: bool,
}

const NOBODY: u32 = u32::MAX;

impl Shelf {
    /// All pages zeros. No room on disk.
    pub fn new(plan: Plan) -> Self {
        let mut pool = PackedPool::new(plan.frames as usize);
        // Once and for all, so that it is never copied: memory that is not touched is not there.
        pool.reserve(plan.pages as usize);
        let beyond = plan.beyond(plan.pages.into()) as usize;
        Self {
            plan,
            pool,
            next_frame: 0,
            free_frames: Vec::with_capacity(plan.frames as usize),
            entries: vec![0; plan.pages as usize],
            room: Vec::with_capacity(beyond),
            free_room: Vec::with_capacity(beyond),
            hand: 0,
            asks: false,
        }
    }

    /// How many pages there may be.
    pub fn plan(&self) -> Plan {
        self.plan
    }

    /// Where a page is.
    pub fn spot(&self, page: u32) -> Spot {
        let entry = self.entries[page as usize];
        match entry & 3 {
            0 => Spot::Word(entry),
            1 => Spot::Word((entry >> 2) << 32 | entry >> 2),
            2 => Spot::Piece((entry >> 2) as PieceId),
            _ => Spot::Disk((entry >> 2) as u32),
        }
    }

    /// The length and the chunks of a piece, in order.
    pub fn piece(&self, id: PieceId) -> (usize, impl Iterator<Item = u32> + '_) {
        (usize::from(self.pool.piece(id).bytes), self.pool.chunks(id))
    }

    /// The page is this word from now on, again and again; false for words that an entry cannot hold.
    pub fn put_word(&mut self, page: u32, word: u64) -> bool {
        let entry = match word {
            _ if word & 3 == 0 => word,
            _ if word >> 32 == word & 0xFFFF_FFFF => (word & 0xFFFF_FFFF) << 2 | 1,
            _ => return false,
        };
        self.clear(page);
        self.entries[page as usize] = entry;
        true
    }

    /// A place for what the page is from now on, which takes `bytes` (1 to 4096) bytes in memory, and 4096 on disk. What it was is gone.
    ///
    /// `None` when neither has room, which does not happen while there are as many pages on disk as [`Plan::beyond`] says.
    pub fn put(&mut self, page: u32, bytes: usize) -> Option<Spot> {
        self.clear(page);
        let need = PackedPool::chunks_of(bytes);
        while self.pool.free_chunks() < need {
            let Some(frame) = self.take_frame() else { break };
            self.pool.add_frame(frame);
        }
        let spot = match self.pool.insert(page, bytes, 0) {
            Some(id) => {
                self.entries[page as usize] = u64::from(id) << 2 | 2;
                Spot::Piece(id)
            }
            None => {
                let at = self.free_room.pop()?;
                self.room[at as usize] = page;
                self.entries[page as usize] = u64::from(at) << 2 | 3;
                Spot::Disk(at)
            }
        };
        Some(spot)
    }

    fn take_frame(&mut self) -> Option<u32> {
        if let Some(frame) = self.free_frames.pop() {
            return Some(frame);
        }
        let frame = self.next_frame;
        (frame < self.plan.frames).then(|| {
            self.next_frame += 1;
            frame
        })
    }

    /// The page is zeros from now on.
    pub fn clear(&mut self, page: u32) {
        match self.spot(page) {
            Spot::Word(_) => {}
            Spot::Piece(id) => drop(self.pool.remove(id)),
            Spot::Disk(at) => {
                self.room[at as usize] = NOBODY;
                self.free_room.push(at);
            }
        }
        self.entries[page as usize] = 0;
    }

    /// Frees a frame when many chunks are free: the caller may give its memory back. `shift(from, to)` moves the bytes of one chunk.
    pub fn compact(&mut self, shift: impl FnMut(u32, u32)) -> Option<u32> {
        let loose = (LOOSE_FRAMES + self.pool.frames() / 32) * FRAME_CHUNKS as usize;
        if self.pool.free_chunks() < loose && !self.pool.is_empty() {
            return None;
        }
        let frame = self.pool.compact(shift)?;
        self.free_frames.push(frame);
        Some(frame)
    }

    // ---- on disk ----

    /// Pages of room on disk, and how many of them are in use.
    pub fn room(&self) -> (u32, u32) {
        (self.room.len() as u32, (self.room.len() - self.free_room.len()) as u32)
    }

    /// There is room for more pages on disk, behind what there was: for `pages` in all.
    pub fn add_room(&mut self, pages: u32) {
        let before = self.room.len() as u32;
        self.free_room.extend((before..pages).rev());
        self.room.resize(self.room.len().max(pages as usize), NOBODY);
    }

    /// The room on disk is not used, and not there any more; false while it is used.
    pub fn drop_room(&mut self) -> bool {
        let is_unused = self.free_room.len() == self.room.len();
        if is_unused {
            self.room.clear();
            self.free_room.clear();
        }
        is_unused
    }

    /// A page on disk that has room in memory now: put it. Looks at most at `looks` places.
    pub fn come_back(&mut self, looks: usize) -> Option<(u32, u32)> {
        let has_room = self.demand() < LOW_PARTS * u64::from(self.plan.frames);
        if !has_room || self.free_room.len() == self.room.len() {
            return None;
        }
        (0..looks).find_map(|_| {
            self.hand = if self.hand + 1 < self.room.len() { self.hand + 1 } else { 0 };
            let page = *self.room.get(self.hand)?;
            (page != NOBODY).then_some((page, self.hand as u32))
        })
    }

    // ---- how much to lend ----

    /// Chunks that everything would take in memory.
    fn demand(&self) -> u64 {
        let (_, on_disk) = self.room();
        let used = self.pool.frames() * FRAME_CHUNKS as usize - self.pool.free_chunks();
        used as u64 + u64::from(on_disk) * u64::from(FRAME_CHUNKS)
    }

    /// Pages that take something.
    fn filled(&self) -> u64 {
        self.pool.len() as u64 + u64::from(self.room().1)
    }

    /// Whether so many pages may be lent in all, given what those that are there need. Up to the number of frames they always may; and as
    /// many as the plan has to who is `pressed`, having found nobody else: the disk has room for what does not shrink.
    pub fn may_lend(&self, lent: u64, pressed: bool) -> bool {
        if pressed || lent > self.plan.pages.into() {
            return lent <= self.plan.pages.into();
        }
        let frames = u64::from(self.plan.frames);
        let chunks = u64::from(FRAME_CHUNKS);
        // Those that are lent and take nothing yet will probably need what the others do.
        let (demand, filled) = (self.demand(), self.filled());
        let rest = lent.saturating_sub(filled) * (demand + DOUBT * chunks) / (filled + DOUBT);
        lent <= frames || demand + rest <= LEND_PARTS * frames
    }

    /// Pages to ask back, while `lent` are lent: what is there needs more memory than is good.
    pub fn missing(&mut self, lent: u64) -> u64 {
        let (frames, demand) = (u64::from(self.plan.frames), self.demand());
        let parts = if self.asks { LOW_PARTS } else { HIGH_PARTS };
        // As many as there are frames fit, whatever they are.
        self.asks = lent > frames && demand > parts * frames;
        if !self.asks {
            return 0;
        }
        let excess = demand - LOW_PARTS * frames;
        let pages = (u128::from(self.filled()) * u128::from(excess)).div_ceil(demand.into()) as u64;
        pages.clamp(1, lent - frames)
    }
}
