//! The accounting of packed pages: which piece of which frame holds what.

use super::buckets::FrameBuckets;
use alloc::vec;
use alloc::vec::Vec;

/// Bytes of one chunk, the unit in which frames are given out.
pub const CHUNK_BYTES: usize = 256;
/// Chunks in a frame of 4 KiB.
pub const FRAME_CHUNKS: u32 = 16;

/// Number of a piece in its [`PackedPool`].
pub type PieceId = u32;

const NONE: u32 = u32::MAX;
/// In a chunk's link: the rest is the piece that it is the last chunk of.
const LAST: u32 = 1 << 31;

/// The packed contents of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The page.
    pub page: u32,
    /// Length in bytes.
    pub bytes: u16,
    /// What the caller wants to remember of the moment when it was packed.
    pub stamp: u32,
    first: u32,
    before: u32,
    after: u32,
}

/// Frames cut into chunks, and the pieces that lie in them.
///
/// A piece takes as many chunks as it needs, wherever they are: no room is lost but the rest of its last chunk, and
/// [`PackedPool::compact`] frees a frame whenever as many chunks as a frame has are free, whatever happened before. So the pool
/// never needs more frames than its chunks in use fill, and one. Pieces stand in a queue in the order in which they came.
///
/// This is the book-keeping only: the caller has the frames and moves the bytes. Chunk `c` is the bytes from
/// `c * CHUNK_BYTES` on of all frames in a row.
#[derive(Clone, Debug)]
pub struct PackedPool {
    /// For each chunk in use: the next chunk of its piece, or LAST and the piece.
    links: Vec<u32>,
    /// For each frame: which of its chunks are in use.
    used: Vec<u16>,
    /// The pool's frames that have a free chunk, by how many are in use.
    open: FrameBuckets,
    pieces: Vec<Piece>,
    /// First of the numbers that are free, linked by `after`.
    free_piece: u32,
    oldest: u32,
    newest: u32,
    count: usize,
    frames: usize,
    chunks: usize,
    bytes: u64,
}

impl PackedPool {
    /// An empty pool that may be given any of the frames `0..frames`.
    ///
    /// # Panics
    /// When there are more than 2^27 of them.
    pub fn new(frames: usize) -> Self {
        assert!(frames <= (LAST / FRAME_CHUNKS) as usize);
        Self {
            links: vec![0; frames * FRAME_CHUNKS as usize],
            used: vec![0; frames],
            open: FrameBuckets::new(frames),
            pieces: Vec::new(),
            free_piece: NONE,
            oldest: NONE,
            newest: NONE,
            count: 0,
            frames: 0,
            chunks: 0,
            bytes: 0,
        }
    }

    /// Makes room for the books of so many pieces, which are not moved before there are more.
    pub fn reserve(&mut self, pieces: usize) {
        self.pieces.reserve_exact(pieces.saturating_sub(self.pieces.len()));
    }

    /// Frames that it has.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Pieces in it.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether it holds no piece.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Chunks that no piece has.
    pub fn free_chunks(&self) -> usize {
        self.frames * FRAME_CHUNKS as usize - self.chunks
    }

    /// Chunks that a piece of so many bytes takes.
    pub fn chunks_of(bytes: usize) -> usize {
        bytes.div_ceil(CHUNK_BYTES)
    }

    /// Takes a frame into the pool. Its contents are the pool's from now on.
    ///
    /// # Panics
    /// When it is there already.
    pub fn add_frame(&mut self, frame: u32) {
        assert!(
            self.used[frame as usize] == 0 && !self.open.contains(frame),
            "frame {frame} is in the pool already"
        );
        self.open.put(frame, 0);
        self.frames += 1;
    }

    /// Enters a piece of `bytes` bytes (1 to 4096) as the newest. `None` when too few chunks are free: give it a frame first.
    pub fn insert(&mut self, page: u32, bytes: usize, stamp: u32) -> Option<PieceId> {
        let need = Self::chunks_of(bytes);
        assert!((1..=FRAME_CHUNKS as usize).contains(&need), "a piece of {bytes} bytes");
        if self.free_chunks() < need {
            return None;
        }
        let id = match self.free_piece {
            NONE => {
                let empty = Piece { page: 0, bytes: 0, stamp: 0, first: 0, before: NONE, after: NONE };
                self.pieces.push(empty);
                self.pieces.len() as u32 - 1
            }
            id => {
                self.free_piece = self.pieces[id as usize].after;
                id
            }
        };
        let mut last = LAST | id;
        let mut left = need as u32;
        while left > 0 {
            let (frame, taken) = self.take_chunks(left);
            left -= taken.count_ones();
            // From the highest on, so that the piece runs upwards.
            let mut rest = taken;
            while rest != 0 {
                let bit = u16::BITS - 1 - rest.leading_zeros();
                rest &= !(1 << bit);
                let chunk = frame * FRAME_CHUNKS + bit;
                self.links[chunk as usize] = last;
                last = chunk;
            }
        }
        let piece = Piece { page, bytes: bytes as u16, stamp, first: last, before: self.newest, after: NONE };
        self.pieces[id as usize] = piece;
        match self.newest {
            NONE => self.oldest = id,
            newest => self.pieces[newest as usize].after = id,
        }
        self.newest = id;
        self.count += 1;
        self.chunks += need;
        self.bytes += bytes as u64;
        Some(id)
    }

    /// Takes up to `want` free chunks of one frame: the fullest that has them all, or else the emptiest.
    fn take_chunks(&mut self, want: u32) -> (u32, u16) {
        let frame = self.open.fullest_below(FRAME_CHUNKS - want).or_else(|| self.open.emptiest());
        let frame = frame.expect("free chunks are counted, so a frame has one");
        let used = self.used[frame as usize];
        let mut free = !used;
        let mut taken = 0_u16;
        for _ in 0..want.min(free.count_ones()) {
            let lowest = free & free.wrapping_neg();
            taken |= lowest;
            free &= !lowest;
        }
        self.set_used(frame, used | taken);
        (frame, taken)
    }

    /// The use of a frame changes.
    fn set_used(&mut self, frame: u32, used: u16) {
        let before = self.used[frame as usize];
        if before != u16::MAX {
            self.open.remove(frame, before.count_ones());
        }
        self.used[frame as usize] = used;
        if used != u16::MAX {
            self.open.put(frame, used.count_ones());
        }
    }

    /// A piece.
    ///
    /// # Panics
    /// When there is none of this number.
    pub fn piece(&self, id: PieceId) -> &Piece {
        let piece = &self.pieces[id as usize];
        assert!(piece.bytes != 0, "piece {id} is gone");
        piece
    }

    /// A piece, if there is one of this number.
    pub fn find(&self, id: PieceId) -> Option<&Piece> {
        self.pieces.get(id as usize).filter(|piece| piece.bytes != 0)
    }

    /// The chunks of a piece, in order.
    pub fn chunks(&self, id: PieceId) -> impl Iterator<Item = u32> + '_ {
        let first = self.piece(id).first;
        core::iter::successors(Some(first), |&chunk| {
            let link = self.links[chunk as usize];
            (link & LAST == 0).then_some(link)
        })
    }

    /// The piece that came first.
    pub fn oldest(&self) -> Option<PieceId> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// All pieces, the oldest first.
    pub fn pieces(&self) -> impl Iterator<Item = (PieceId, &Piece)> + '_ {
        let at = |id: u32| (id != NONE).then(|| (id, &self.pieces[id as usize]));
        core::iter::successors(at(self.oldest), move |(_, piece)| at(piece.after))
    }

    /// Takes a piece out; its chunks are free.
    ///
    /// # Panics
    /// When there is none of this number.
    pub fn remove(&mut self, id: PieceId) -> Piece {
        let piece = *self.piece(id);
        let mut link = piece.first;
        while link & LAST == 0 {
            // The chunks of one frame follow each other: one change for all of them.
            let frame = link / FRAME_CHUNKS;
            let mut used = self.used[frame as usize];
            while link & LAST == 0 && link / FRAME_CHUNKS == frame {
                used &= !(1 << (link % FRAME_CHUNKS));
                self.chunks -= 1;
                link = self.links[link as usize];
            }
            self.set_used(frame, used);
        }
        match piece.before {
            NONE => self.oldest = piece.after,
            before => self.pieces[before as usize].after = piece.after,
        }
        match piece.after {
            NONE => self.newest = piece.before,
            after => self.pieces[after as usize].before = piece.before,
        }
        let free = Piece { page: 0, bytes: 0, stamp: 0, first: 0, before: NONE, after: self.free_piece };
        self.pieces[id as usize] = free;
        self.free_piece = id;
        self.count -= 1;
        self.bytes -= u64::from(piece.bytes);
        piece
    }

    /// Says that the page of a piece is now known as `page`.
    ///
    /// # Panics
    /// When there is none of this number.
    pub fn rename(&mut self, id: PieceId, page: u32) {
        self.piece(id);
        self.pieces[id as usize].page = page;
    }

    /// Lets go of a frame: an empty one, or the emptiest after its chunks have moved elsewhere. `shift(from, to)` moves the bytes of one
    /// chunk, and is called at most 15 times. `None` when fewer chunks are free than a frame has.
    pub fn compact(&mut self, mut shift: impl FnMut(u32, u32)) -> Option<u32> {
        if self.free_chunks() < FRAME_CHUNKS as usize {
            return None;
        }
        let frame = self.open.emptiest()?;
        let mut used = self.used[frame as usize];
        self.open.remove(frame, used.count_ones());
        self.frames -= 1;
        while used != 0 {
            let chunk = frame * FRAME_CHUNKS + used.trailing_zeros();
            used &= used - 1;
            let (other, taken) = self.take_chunks(1);
            let to = other * FRAME_CHUNKS + taken.trailing_zeros();
            shift(chunk, to);
            self.relink(chunk, to);
        }
        self.used[frame as usize] = 0;
        Some(frame)
    }

    /// `to` takes the place of `chunk` in its piece.
    fn relink(&mut self, chunk: u32, to: u32) {
        let mut link = self.links[chunk as usize];
        self.links[to as usize] = link;
        while link & LAST == 0 {
            link = self.links[link as usize];
        }
        let piece = &mut self.pieces[(link & !LAST) as usize];
        if piece.first == chunk {
            piece.first = to;
            return;
        }
        let mut before = piece.first;
        while self.links[before as usize] != chunk {
            before = self.links[before as usize];
        }
        self.links[before as usize] = to;
    }
}
