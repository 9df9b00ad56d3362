//! Pages in parts, and parts computed from them: how many, and the arithmetic. docs/design/erasure.md.

use netvm_core::residency::{PARTS_MAX, Redundancy};
use netvm_sys::uffd::PAGE_BYTES;
use reed_solomon_erasure::galois_8::ReedSolomon;
use std::fmt;
use std::str::FromStr;

/// Each page is divided into `data` parts, and `parity` more are computed from them, all on different lenders: any `data` of them are
/// enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Erasure {
    data: u8,
    parity: u8,
}

impl Erasure {
    /// `data`: 2, 4 or 8; `parity`: 1 to 4. `None` for others.
    pub fn new(data: usize, parity: usize) -> Option<Self> {
        Redundancy::erasure(data, parity)?;
        Some(Self { data: data as u8, parity: parity as u8 })
    }

    /// Parts that suffice for a page.
    pub fn data(self) -> usize {
        self.data.into()
    }

    /// Lenders that may be lost.
    pub fn parity(self) -> usize {
        self.parity.into()
    }

    /// Lenders that have a part of a page.
    pub fn lenders(self) -> usize {
        self.data() + self.parity()
    }

    pub(super) fn part_bytes(self) -> usize {
        PAGE_BYTES / self.data()
    }

    /// As a number, for files and other languages; 0 is none.
    pub fn to_word(erasure: Option<Self>) -> u32 {
        erasure.map_or(0, |Self { data, parity }| u32::from(data) << 8 | u32::from(parity))
    }

    /// Of such a number. `Err` has it when it is no number of parts.
    ///
    /// # Errors
    /// The number, where it means nothing.
    pub fn from_word(word: u32) -> Result<Option<Self>, u32> {
        match word {
            0 => Ok(None),
            _ => Self::new((word >> 8) as usize, (word & 0xFF) as usize).map(Some).ok_or(word),
        }
    }
}

impl fmt::Display for Erasure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.data, self.parity)
    }
}

impl FromStr for Erasure {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('+');
        let numbers = parts.and_then(|(data, parity)| Some((data.parse().ok()?, parity.parse().ok()?)));
        numbers.and_then(|(data, parity)| Self::new(data, parity)).ok_or_else(|| {
            "give K+M, as in 2+1 or 4+2: each page in K parts (2, 4 or 8) on different lenders, and M more (1 to 4), as many as lenders \
             may be lost"
                .to_owned()
        })
    }
}

/// Parts that are there, a bit for each.
pub(super) type PartSet = u16;

/// The arithmetic. Parts of several neighbouring pages are parts of one long page.
pub(super) struct Codec {
    erasure: Erasure,
    /// With one parity part it is not needed: that is the sum of the others.
    code: Option<ReedSolomon>,
}

impl Codec {
    pub(super) fn new(erasure: Erasure) -> Self {
        let code = (erasure.parity() > 1).then(|| {
            ReedSolomon::new(erasure.data(), erasure.parity()).expect("numbers of parts that are possible")
        });
        Self { erasure, code }
    }

    /// Computes the parity parts; `parts` has all parts one after the other, each of `bytes` bytes.
    pub(super) fn encode(&mut self, parts: &mut [u8], bytes: usize) {
        let (from, to) = parts.split_at_mut(self.erasure.data() * bytes);
        let Some(code) = &self.code else {
            let to = &mut to[..bytes];
            to.copy_from_slice(&from[..bytes]);
            from[bytes..].chunks_exact(bytes).for_each(|part| add(to, part));
            return;
        };
        let mut data: [&[u8]; PARTS_MAX] = [&[]; PARTS_MAX];
        let mut parity: [&mut [u8]; PARTS_MAX] = std::array::from_fn(|_| &mut [][..]);
        data.iter_mut().zip(from.chunks_exact(bytes)).for_each(|(place, part)| *place = part);
        parity.iter_mut().zip(to.chunks_exact_mut(bytes)).for_each(|(place, part)| *place = part);
        let (data, parity) = (&data[..self.erasure.data()], &mut parity[..self.erasure.parity()]);
        code.encode_sep(data, parity).expect("as many as there are");
    }

    /// Computes the data parts that are not in `have`, which are enough.
    pub(super) fn restore(&mut self, parts: &mut [u8], bytes: usize, have: PartSet) {
        let data = self.erasure.data();
        let has = |part: usize| have >> part & 1 == 1;
        let Some(missing) = (0..data).find(|&part| !has(part)) else { return };
        let Some(code) = &self.code else {
            let (mut sum, mut at) = (parts[data * bytes..][..bytes].to_vec(), 0);
            parts[..data * bytes].chunks_exact(bytes).for_each(|part| {
                if at != missing {
                    add(&mut sum, part);
                }
                at += 1;
            });
            parts[missing * bytes..][..bytes].copy_from_slice(&sum);
            return;
        };
        let mut all: [(&mut [u8], bool); PARTS_MAX] = std::array::from_fn(|_| (&mut [][..], false));
        let places = all.iter_mut().zip(parts.chunks_exact_mut(bytes)).enumerate();
        places.for_each(|(part, (place, contents))| *place = (contents, has(part)));
        code.reconstruct_data(&mut all[..self.erasure.lenders()]).expect("enough parts");
    }

    /// Some of the parts of a page in `have` are wrong: finds those from which a page comes that is right, puts that page where the
    /// data parts are, and returns the parts that were wrong. `None` when there are none such.
    pub(super) fn find_wrong(
        &mut self,
        parts: &mut [u8],
        have: PartSet,
        mut is_right: impl FnMut(&[u8]) -> bool,
    ) -> Option<PartSet> {
        let (data, bytes) = (self.erasure.data(), self.erasure.part_bytes());
        let given = parts.to_vec();
        let some = |set: &PartSet| set & !have == 0 && set.count_ones() as usize == data;
        for set in (0..1 << self.erasure.lenders()).filter(some) {
            parts.copy_from_slice(&given);
            self.restore(parts, bytes, set);
            if !is_right(&parts[..PAGE_BYTES]) {
                continue;
            }
            self.encode(parts, bytes);
            let pairs = parts.chunks_exact(bytes).zip(given.chunks_exact(bytes)).enumerate();
            let differs = pairs.filter(|(_, (right, given))| right != given).map(|(part, _)| 1 << part);
            return Some(differs.fold(0, |all, part: PartSet| all | part) & have);
        }
        None
    }
}

const _: () = assert!(PARTS_MAX <= PartSet::BITS as usize);

fn add(sum: &mut [u8], part: &[u8]) {
    sum.iter_mut().zip(part).for_each(|(sum, byte)| *sum ^= byte);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(codec: &mut Codec, bytes: usize, seed: u64) -> Vec<u8> {
        let mut state = seed;
        let mut parts: Vec<u8> = (0..codec.erasure.lenders() * bytes)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 56) as u8
            })
            .collect();
        codec.encode(&mut parts, bytes);
        parts
    }

    fn all() -> impl Iterator<Item = Erasure> {
        [2, 4, 8].into_iter().flat_map(|data| (1..=4).filter_map(move |parity| Erasure::new(data, parity)))
    }

    #[test]
    fn any_parts_that_are_enough_have_all() {
        for erasure in all() {
            let (mut codec, lenders) = (Codec::new(erasure), erasure.lenders());
            let bytes = erasure.part_bytes();
            let right = parts(&mut codec, bytes, 7);
            for have in (0..1u16 << lenders).filter(|set| set.count_ones() as usize == erasure.data()) {
                let mut some = right.clone();
                for part in (0..lenders).filter(|part| have >> part & 1 == 0) {
                    some[part * bytes..][..bytes].fill(0xEE);
                }
                codec.restore(&mut some, bytes, have);
                assert!(some[..PAGE_BYTES] == right[..PAGE_BYTES], "{erasure} of {have:b}");
            }
        }
    }

    /// What is written in windows is read page by page.
    #[test]
    fn parts_of_neighbours_are_parts_of_each() {
        for erasure in all() {
            let (mut codec, pages) = (Codec::new(erasure), 5);
            let part = erasure.part_bytes();
            let long = parts(&mut codec, pages * part, 9);
            for page in 0..pages {
                let of = |at: usize| &long[at * pages * part + page * part..][..part];
                let mut one: Vec<u8> = (0..erasure.lenders()).flat_map(of).copied().collect();
                let all = one.clone();
                codec.encode(&mut one, part);
                assert!(one == all, "{erasure} page {page}");
            }
        }
    }

    #[test]
    fn wrong_parts_are_found() {
        for erasure in all() {
            let (mut codec, bytes) = (Codec::new(erasure), erasure.part_bytes());
            let right = parts(&mut codec, bytes, 11);
            let have = (1 << erasure.lenders()) - 1;
            for part in 0..erasure.lenders() {
                let mut bad = right.clone();
                bad[part * bytes + 5] ^= 0x10;
                let found = codec.find_wrong(&mut bad, have, |page| page == &right[..PAGE_BYTES]);
                assert_eq!(found, Some(1 << part), "{erasure} part {part}");
                assert!(bad == right);
                // With one part less there is nothing to find it with, or just enough.
                let other = 1 << ((part + 1) % erasure.lenders());
                bad[part * bytes + 5] ^= 0x10;
                let found = codec.find_wrong(&mut bad, have & !other, |page| page == &right[..PAGE_BYTES]);
                assert_eq!(found, (erasure.parity() > 1).then_some(1 << part));
            }
        }
    }

    #[test]
    fn texts_and_numbers() {
        for erasure in all() {
            assert_eq!(erasure.to_string().parse(), Ok(erasure));
            assert_eq!(Erasure::from_word(Erasure::to_word(Some(erasure))), Ok(Some(erasure)));
        }
        assert_eq!(Erasure::from_word(0), Ok(None));
        for bad in
            ["", "2", "2+", "3+1", "1+1", "16+2", "2+0", "2+5", "-2+1", "2+1+1", "99999999999999999999+1"]
        {
            assert!(bad.parse::<Erasure>().unwrap_err().contains("2+1"), "{bad}");
        }
        for bad in [1, 0x200, 0x301, 0xFFFF_FFFF] {
            assert_eq!(Erasure::from_word(bad), Err(bad));
        }
    }
}
