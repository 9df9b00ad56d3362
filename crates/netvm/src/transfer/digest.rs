//! What a file contains, as 64 bits. Blocks of zeros do not count: holes cost nothing, wherever each side has them.

use xxhash_rust::xxh3::Xxh3;

const BLOCK_BYTES: usize = 64 << 10;
static ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

/// XXH3 over index and bytes of each block of 64 KiB that is not all zeros, the last one filled up with zeros, then the end.
pub(super) struct Digest {
    hash: Xxh3,
    /// The block that `position` is in, as far as it is known; zeros behind that.
    block: Box<[u8]>,
    position: u64,
}

impl Digest {
    pub fn new() -> Self {
        Self { hash: Xxh3::new(), block: vec![0; BLOCK_BYTES].into(), position: 0 }
    }

    /// The next bytes, at `offset`; zeros are between them and the last ones.
    pub fn update(&mut self, offset: u64, mut bytes: &[u8]) {
        debug_assert!(offset >= self.position, "in order");
        self.go_to(offset);
        while !bytes.is_empty() {
            let within = (self.position % BLOCK_BYTES as u64) as usize;
            let count = bytes.len().min(BLOCK_BYTES - within);
            let (now, later) = bytes.split_at(count);
            if count == BLOCK_BYTES {
                Self::add(&mut self.hash, self.position, now);
                self.position += count as u64;
            } else {
                self.block[within..within + count].copy_from_slice(now);
                self.go_to(self.position + count as u64);
            }
            bytes = later;
        }
    }

    /// The digest of all up to `end`.
    pub fn finish(mut self, end: u64) -> u64 {
        self.go_to(end);
        Self::add(&mut self.hash, self.position, &self.block);
        self.hash.update(&end.to_le_bytes());
        self.hash.digest()
    }

    fn go_to(&mut self, position: u64) {
        let old = std::mem::replace(&mut self.position, position);
        let block = BLOCK_BYTES as u64;
        if position / block > old / block && !old.is_multiple_of(block) {
            Self::add(&mut self.hash, old, &self.block);
            self.block.fill(0);
        }
    }

    fn add(hash: &mut Xxh3, position: u64, block: &[u8]) {
        if block != ZEROS {
            hash.update(&(position / BLOCK_BYTES as u64).to_le_bytes());
            hash.update(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pieces: &[(u64, &[u8])], end: u64) -> u64 {
        let mut digest = Digest::new();
        pieces.iter().for_each(|(offset, bytes)| digest.update(*offset, bytes));
        digest.finish(end)
    }

    #[test]
    fn pieces_and_holes_do_not_matter() {
        let mut bytes: Vec<u8> = (0..400_000u32).map(|at| (at * 7 % 251) as u8).collect();
        bytes[60_000..300_001].fill(0);
        let end = bytes.len() as u64;
        let whole = of(&[(0, &bytes)], end);
        for size in [1, 7, 4096, 65_535, 65_536, 65_537, 200_000] {
            let pieces: Vec<_> =
                bytes.chunks(size).enumerate().map(|(index, piece)| ((index * size) as u64, piece)).collect();
            assert_eq!(of(&pieces, end), whole, "{size}");
        }
        assert_eq!(of(&[(0, &bytes[..60_000]), (300_001, &bytes[300_001..])], end), whole);
        assert_eq!(of(&[(0, &bytes[..60_000]), (262_144, &bytes[262_144..])], end), whole);
        assert_eq!(of(&[], 1 << 40), of(&[(5, &[0; 99])], 1 << 40));
    }

    #[test]
    fn everything_else_matters() {
        let bytes: Vec<u8> = (0..200_000u32).map(|at| (at % 255 + 1) as u8).collect();
        let whole = of(&[(0, &bytes)], 200_000);
        for at in (0..200_000).step_by(997) {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_ne!(of(&[(0, &other)], 200_000), whole, "{at}");
        }
        assert_ne!(of(&[(0, &bytes)], 200_001), whole, "a zero more");
        assert_ne!(of(&[(1, &bytes)], 200_001), of(&[(0, &bytes)], 200_001), "shifted");
        assert_ne!(of(&[(65_536, &bytes)], 1 << 20), of(&[(131_072, &bytes)], 1 << 20), "shifted by a block");
        // The golden value: both sides of a transfer may have different versions.
        assert_eq!(of(&[(0, b"netvm")], 5), GOLDEN);
    }

    const GOLDEN: u64 = 4_571_718_363_025_398_014;
}
