//! The pool against a model that keeps every piece's bytes.

use super::pool::{CHUNK_BYTES, FRAME_CHUNKS, PackedPool, PieceId};
use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

struct Model {
    pool: PackedPool,
    /// The memory of all frames.
    memory: Vec<u8>,
    /// Which frames the pool may be given.
    outside: Vec<u32>,
    /// What each piece holds, and the order in which it came.
    pieces: BTreeMap<PieceId, (u32, Vec<u8>, u64)>,
    random: u64,
    clock: u64,
}

impl Model {
    fn new(frames: u32, seed: u64) -> Self {
        Self {
            pool: PackedPool::new(frames as usize),
            memory: vec![0; frames as usize * 4096],
            outside: (0..frames).collect(),
            pieces: BTreeMap::new(),
            random: seed | 1,
            clock: 0,
        }
    }

    fn next(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as usize
    }

    fn insert(&mut self) {
        let bytes = match self.next() % 4 {
            0 => 1 + self.next() % 300,
            1 => 4096,
            _ => 1 + self.next() % 4096,
        };
        let page = self.next() as u32;
        let contents: Vec<u8> = (0..bytes).map(|_| self.next() as u8).collect();
        let id = loop {
            if let Some(id) = self.pool.insert(page, bytes, 7) {
                break id;
            }
            assert!(self.pool.free_chunks() < PackedPool::chunks_of(bytes), "there was room");
            let Some(frame) = self.outside.pop() else { return };
            self.pool.add_frame(frame);
        };
        for (chunk, part) in self.pool.chunks(id).zip(contents.chunks(CHUNK_BYTES)) {
            let at = chunk as usize * CHUNK_BYTES;
            self.memory[at..at + part.len()].copy_from_slice(part);
        }
        assert_eq!(self.pool.chunks(id).count(), PackedPool::chunks_of(bytes));
        self.clock += 1;
        assert!(self.pieces.insert(id, (page, contents, self.clock)).is_none(), "a number given twice");
    }

    fn some(&mut self) -> Option<PieceId> {
        let number = self.next();
        let from = *self.pieces.keys().nth(number % self.pieces.len().max(1))?;
        Some(from)
    }

    fn read(&self, id: PieceId) -> Vec<u8> {
        let length = self.pool.piece(id).bytes as usize;
        let mut contents = Vec::new();
        for chunk in self.pool.chunks(id) {
            let at = chunk as usize * CHUNK_BYTES;
            contents.extend_from_slice(&self.memory[at..at + CHUNK_BYTES]);
        }
        contents.truncate(length);
        contents
    }

    fn remove(&mut self, id: PieceId) {
        let contents = self.read(id);
        let (page, expected, _) = self.pieces.remove(&id).unwrap();
        let piece = self.pool.remove(id);
        assert_eq!((piece.page, piece.stamp), (page, 7));
        assert!(contents == expected, "piece {id} changed");
    }

    fn compact(&mut self) {
        let free = self.pool.free_chunks();
        let (memory, mut moved) = (&mut self.memory, 0);
        let frame = self.pool.compact(|from, to| {
            let (from, to) = (from as usize * CHUNK_BYTES, to as usize * CHUNK_BYTES);
            memory.copy_within(from..from + CHUNK_BYTES, to);
            moved += 1;
        });
        assert!(moved < FRAME_CHUNKS);
        assert_eq!(frame.is_some(), free >= FRAME_CHUNKS as usize, "a frame's worth of chunks is a frame");
        if let Some(frame) = frame {
            // Whoever has the frame now writes to it.
            self.memory[frame as usize * 4096..][..4096].fill(0xEE);
            self.outside.push(frame);
        }
    }

    fn check(&self, frames: usize) {
        let pool = &self.pool;
        let chunks: usize =
            self.pieces.values().map(|(_, bytes, _)| PackedPool::chunks_of(bytes.len())).sum();
        assert_eq!(pool.len(), self.pieces.len());
        assert_eq!(pool.bytes(), self.pieces.values().map(|(_, bytes, _)| bytes.len() as u64).sum::<u64>());
        assert_eq!(pool.frames() + self.outside.len(), frames);
        assert_eq!(pool.free_chunks(), pool.frames() * FRAME_CHUNKS as usize - chunks);
    }
}

#[test]
fn random_use_keeps_contents_order_and_accounts() {
    const FRAMES: u32 = 48;
    for seed in 1..6 {
        let mut model = Model::new(FRAMES, seed * 0x9E37_79B9);
        for step in 0..12_000 {
            match model.next() % 16 {
                0..7 => model.insert(),
                7..11 => {
                    if let Some(id) = model.some() {
                        model.remove(id);
                    }
                }
                11 => {
                    let oldest =
                        model.pieces.iter().min_by_key(|(_, (_, _, clock))| *clock).map(|(&id, _)| id);
                    assert_eq!(model.pool.oldest(), oldest);
                    if let Some(id) = oldest {
                        model.remove(id);
                    }
                }
                12 => {
                    if let Some(id) = model.some() {
                        let page = model.next() as u32;
                        model.pool.rename(id, page);
                        model.pieces.get_mut(&id).unwrap().0 = page;
                    }
                }
                _ => model.compact(),
            }
            if step % 64 == 0 {
                model.check(FRAMES as usize);
            }
        }
        let order: Vec<_> = model.pool.pieces().map(|(id, _)| model.pieces[&id].2).collect();
        assert!(order.len() == model.pieces.len() && order.is_sorted());
        while let Some(id) = model.pool.oldest() {
            model.remove(id);
        }
        while model.pool.frames() > 0 {
            model.compact();
        }
        model.check(FRAMES as usize);
    }
}

#[test]
fn compaction_leaves_less_than_a_frame_unused() {
    // The worst that can happen: many pieces, of which then one in each frame is left.
    let mut pool = PackedPool::new(64);
    (0..64).for_each(|frame| pool.add_frame(frame));
    let pieces: Vec<_> = (0..64 * 16).map(|page| pool.insert(page, CHUNK_BYTES, 0).unwrap()).collect();
    assert_eq!((pool.free_chunks(), pool.insert(0, 1, 0)), (0, None));
    let mut left = Vec::new();
    for (index, &id) in pieces.iter().enumerate() {
        if index % 16 == 5 {
            left.push(id);
        } else {
            pool.remove(id);
        }
    }
    let mut shifts = 0;
    while pool.compact(|_, _| shifts += 1).is_some() {}
    assert_eq!((pool.frames(), pool.free_chunks(), shifts), (4, 0, 60));
    let mut chunks: Vec<_> = left.iter().flat_map(|&id| pool.chunks(id)).collect();
    chunks.sort_unstable();
    chunks.dedup();
    assert_eq!(chunks.len(), 64, "two pieces lie in one chunk");
}

#[test]
fn a_piece_lies_in_one_frame_when_one_has_room() {
    let mut pool = PackedPool::new(8);
    (0..3).for_each(|frame| pool.add_frame(frame));
    let large = pool.insert(1, 9 * CHUNK_BYTES, 0).unwrap();
    let second = pool.insert(2, 9 * CHUNK_BYTES, 0).unwrap();
    let small = pool.insert(3, 7 * CHUNK_BYTES - 5, 0).unwrap();
    let frame_of = |id| {
        let mut frames: Vec<_> = pool.chunks(id).map(|chunk| chunk / FRAME_CHUNKS).collect();
        assert!(pool.chunks(id).is_sorted());
        frames.dedup();
        assert_eq!(frames.len(), 1);
        frames[0]
    };
    assert_ne!(frame_of(large), frame_of(second));
    assert!(
        frame_of(small) == frame_of(large) || frame_of(small) == frame_of(second),
        "it fills what is open"
    );
}

#[test]
#[should_panic(expected = "is in the pool already")]
fn a_frame_is_given_once() {
    let mut pool = PackedPool::new(4);
    pool.add_frame(1);
    pool.add_frame(1);
}

#[test]
#[should_panic(expected = "is gone")]
fn a_piece_is_removed_once() {
    let mut pool = PackedPool::new(4);
    pool.add_frame(1);
    let id = pool.insert(9, 100, 0).unwrap();
    pool.remove(id);
    pool.remove(id);
}
