//! What lenders must return: for each slot a sum of its contents, or, when pages are encrypted, the nonce and the tag of what was
//! written. See docs/security.md.

use super::error::{PagerError, system};
use crate::error::Result;
use netvm_core::residency::Slot;
use netvm_sys::mapping::Mapping;
use netvm_sys::pagehash::{self, SECRET_BYTES};
use netvm_sys::shared::SharedSlice;
use netvm_sys::uffd::PAGE_BYTES;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use xxhash_rust::xxh3::xxh3_64_with_secret;
use zeroize::Zeroizing;

/// Pages of the longest write.
const BUFFER_PAGES: usize = super::engine::EVICT_PAGES_MAX;
/// Pages that one key seals: far fewer than nonces, and than AES-GCM may.
const PAGES_PER_KEY: u64 = 1 << 40;

/// Something for each slot, where a slab has been written.
#[derive(Debug)]
struct BySlot<T> {
    slots_per_slab: usize,
    slabs: Vec<Box<[T]>>,
}

impl<T: Copy + Default> BySlot<T> {
    fn place(&self, slot: Slot) -> (usize, usize) {
        let index = slot as usize - 1;
        (index / self.slots_per_slab, index % self.slots_per_slab)
    }

    fn get(&self, slot: Slot) -> Option<T> {
        let (slab, page) = self.place(slot);
        self.slabs.get(slab)?.get(page).copied()
    }

    fn set(&mut self, slot: Slot, value: T) {
        let (slab, page) = self.place(slot);
        if slab >= self.slabs.len() {
            self.slabs.resize_with(slab + 1, Box::default);
        }
        if self.slabs[slab].is_empty() {
            self.slabs[slab] = vec![T::default(); self.slots_per_slab].into_boxed_slice();
        }
        self.slabs[slab][page] = value;
    }
}

/// How a slot's contents were encrypted.
#[derive(Clone, Copy, Debug, Default)]
struct Seal {
    /// Number of the key, and of the page under that key: together never used twice. Key 0 is none.
    key: u32,
    page: u64,
    tag: [u8; 16],
}

impl Seal {
    fn nonce(&self) -> Nonce {
        let mut nonce = [0; NONCE_LEN];
        nonce[4..].copy_from_slice(&self.page.to_le_bytes());
        Nonce::assume_unique_for_key(nonce)
    }
}

struct Cipher {
    /// The last is this process's own; those before it are its parent's, and its parent's parent's: they only open.
    keys: Vec<LessSafeKey>,
    sealed: u64,
    seals: BySlot<Seal>,
    /// Copies that are on their way, by the number of their transfer.
    sent: Vec<Option<Mapping>>,
    buffers: Vec<Mapping>,
    page: Box<[u8; PAGE_BYTES]>,
}

impl Cipher {
    fn new(slots_per_slab: usize) -> Result<Self> {
        let seals = BySlot { slots_per_slab, slabs: Vec::new() };
        let mut cipher = Self {
            keys: Vec::new(),
            sealed: 0,
            seals,
            sent: Vec::new(),
            buffers: Vec::new(),
            page: Box::new([0; PAGE_BYTES]),
        };
        cipher.add_key()?;
        Ok(cipher)
    }

    fn add_key(&mut self) -> Result<()> {
        let mut bytes = Zeroizing::new([0; 32]);
        getrandom::fill(&mut bytes[..]).map_err(|_| system("getrandom", std::io::Error::last_os_error()))?;
        // The key is as long as this cipher's keys are.
        let key = UnboundKey::new(&AES_256_GCM, &bytes[..]);
        let key = key.map_err(|_| system("make a key", std::io::ErrorKind::InvalidInput.into()))?;
        self.keys.push(LessSafeKey::new(key));
        self.sealed = 0;
        Ok(())
    }

    /// Encrypts what is in `self.page`.
    fn seal(&mut self, slot: Slot) -> Result<()> {
        if self.sealed >= PAGES_PER_KEY {
            self.add_key()?;
        }
        self.sealed += 1;
        let mut seal = Seal { key: self.keys.len() as u32, page: self.sealed, tag: [0; 16] };
        let key = &self.keys[self.keys.len() - 1];
        let tag = key.seal_in_place_separate_tag(seal.nonce(), Aad::empty(), &mut self.page[..]);
        let tag = tag.map_err(|_| system("encrypt a page", std::io::ErrorKind::InvalidInput.into()))?;
        seal.tag.copy_from_slice(tag.as_ref());
        self.seals.set(slot, seal);
        Ok(())
    }

    /// Decrypts a page; false when it is not what was written last.
    fn open(&self, slot: Slot, page: &mut [u8]) -> bool {
        let Some(seal) = self.seals.get(slot).filter(|seal| seal.key > 0) else { return false };
        let Some(key) = self.keys.get(seal.key as usize - 1) else { return false };
        let tag = Tag::from(seal.tag);
        key.open_in_place_separate_tag(seal.nonce(), Aad::empty(), tag, page, 0..).is_ok()
    }
}

/// By which contents of pages are recognised.
#[derive(Clone)]
pub(super) struct PageHash {
    secret: [u8; SECRET_BYTES],
}

impl PageHash {
    pub(super) const fn new(secret: [u8; SECRET_BYTES]) -> Self {
        Self { secret }
    }

    /// Of a page.
    #[inline]
    pub(super) fn of(&self, page: &[u8; PAGE_BYTES]) -> u64 {
        pagehash::xxh3(page, &self.secret).unwrap_or_else(|| xxh3_64_with_secret(page, &self.secret))
    }
}

/// See the module's text.
pub(super) struct Seals {
    hash: PageHash,
    /// Without encryption: 32 bits of the content hash, for those who copy slabs without knowing which pages are in them.
    sums: BySlot<u32>,
    cipher: Option<Cipher>,
}

impl Seals {
    pub(super) fn new(secret: [u8; 192], slots_per_slab: u32, encrypt: bool) -> Result<Self> {
        let slots_per_slab = slots_per_slab as usize;
        let cipher = if encrypt { Some(Cipher::new(slots_per_slab)?) } else { None };
        Ok(Self { hash: PageHash::new(secret), sums: BySlot { slots_per_slab, slabs: Vec::new() }, cipher })
    }

    /// Whether lenders get encrypted pages.
    #[inline]
    pub(super) fn encrypts(&self) -> bool {
        self.cipher.is_some()
    }

    /// The content hash of a page.
    #[inline]
    pub(super) fn hash(&self, page: &[u8]) -> u64 {
        match page.first_chunk().filter(|_| page.len() == PAGE_BYTES) {
            Some(page) => self.hash.of(page),
            None => xxh3_64_with_secret(page, &self.hash.secret),
        }
    }

    /// Of pages.
    pub(super) fn page_hash(&self) -> &PageHash {
        &self.hash
    }

    /// A page with this content hash is written to a slot.
    pub(super) fn note(&mut self, slot: Slot, hash: u64) {
        self.sums.set(slot, hash as u32);
    }

    /// Encrypts the pages of transfer `token`, which go to neighbouring slots; returns what is to be sent.
    pub(super) fn seal(&mut self, token: u32, slot: Slot, pages: SharedSlice) -> Result<SharedSlice> {
        let Some(cipher) = &mut self.cipher else { return Ok(pages) };
        let buffer = match cipher.buffers.pop() {
            Some(buffer) => buffer,
            None => Mapping::anonymous(BUFFER_PAGES * PAGE_BYTES).map_err(|e| system("map a buffer", e))?,
        };
        let too_long = || system("encrypt pages", std::io::ErrorKind::InvalidInput.into());
        let out = buffer.shared().sub(0, pages.len()).ok_or_else(too_long)?;
        for (index, at) in (0..pages.len()).step_by(PAGE_BYTES).enumerate() {
            pages.read_into(at, &mut cipher.page[..]).ok_or_else(too_long)?;
            cipher.seal(slot + index as u32)?;
            out.write_from(at, &cipher.page[..]).ok_or_else(too_long)?;
        }
        let index = token as usize;
        if index >= cipher.sent.len() {
            cipher.sent.resize_with(index + 1, || None);
        }
        cipher.sent[index] = Some(buffer);
        Ok(out)
    }

    /// Transfer `token` is over.
    pub(super) fn sent(&mut self, token: u32) {
        if let Some(cipher) = &mut self.cipher
            && let Some(buffer) = cipher.sent.get_mut(token as usize).and_then(Option::take)
        {
            cipher.buffers.push(buffer);
        }
    }

    /// Decrypts what a lender returned for a slot; false when it is not what was written there last.
    pub(super) fn open(&self, slot: Slot, page: &mut [u8]) -> bool {
        self.cipher.as_ref().is_none_or(|cipher| cipher.open(slot, page))
    }

    /// Whether this is what was written to a slot last. `page` is anything afterwards.
    pub(super) fn is_right(&self, slot: Slot, page: &mut [u8]) -> bool {
        match &self.cipher {
            Some(cipher) => cipher.open(slot, page),
            None => self.sums.get(slot) == Some(self.hash(page) as u32),
        }
    }

    /// In the child of a fork: what it writes is under a key that its parent does not use.
    pub(super) fn adopt(&mut self) -> Result<()> {
        let Some(cipher) = &mut self.cipher else { return Ok(()) };
        if cipher.keys.len() >= u32::MAX as usize {
            return Err(PagerError::SlotsExhausted.into());
        }
        cipher.add_key()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(seals: &mut Seals, token: u32, slot: Slot, page: &[u8]) -> Vec<u8> {
        let memory = Mapping::anonymous(PAGE_BYTES).unwrap();
        memory.shared().write_from(0, page).unwrap();
        let out = seals.seal(token, slot, memory.shared()).unwrap();
        out.to_vec()
    }

    #[test]
    fn only_what_was_written_last_opens() {
        let mut seals = Seals::new([7; 192], 64, true).unwrap();
        let (one, two) = (vec![1; PAGE_BYTES], vec![2; PAGE_BYTES]);
        let old = sealed(&mut seals, 0, 5, &one);
        let other = sealed(&mut seals, 1, 6, &one);
        let new = sealed(&mut seals, 2, 5, &one);
        assert!(old != new && old != other && old != one, "the same page never looks the same");
        let opens = |seals: &Seals, slot, page: &[u8]| {
            let mut page = page.to_vec();
            seals.open(slot, &mut page).then_some(page)
        };
        assert_eq!(opens(&seals, 5, &new), Some(one.clone()));
        assert_eq!(opens(&seals, 6, &other), Some(one.clone()));
        for (slot, page) in [(5, &old), (5, &other), (6, &new), (7, &new), (1000, &new), (5, &two)] {
            assert_eq!(opens(&seals, slot, page), None, "slot {slot}");
        }
        for byte in [0, 100, PAGE_BYTES - 1] {
            let mut bad = new.clone();
            bad[byte] ^= 1;
            assert_eq!(opens(&seals, 5, &bad), None);
        }
        // A child opens what its parent wrote, and writes under a key of its own.
        seals.adopt().unwrap();
        assert_eq!(opens(&seals, 5, &new), Some(one));
        let third = sealed(&mut seals, 0, 7, &two);
        assert_eq!(opens(&seals, 7, &third), Some(two));
        (0..3).for_each(|token| seals.sent(token));
        assert_eq!(
            seals.cipher.unwrap().buffers.len(),
            3,
            "buffers are used again, but not while they are sent"
        );
    }

    #[test]
    fn wide_vectors_change_no_hash() {
        let (mut page, mut secret) = ([0; PAGE_BYTES], [0; SECRET_BYTES]);
        for round in 0..50 {
            if round > 0 {
                getrandom::fill(&mut page[..]).unwrap();
            }
            getrandom::fill(&mut secret).unwrap();
            let Some(wide) = pagehash::xxh3(&page, &secret) else {
                eprintln!("wide_vectors_change_no_hash: skipped (this processor has none)");
                return;
            };
            assert_eq!(wide, xxh3_64_with_secret(&page, &secret), "round {round}");
        }
    }

    #[test]
    fn sums_tell_whether_a_copy_is_right() {
        let mut seals = Seals::new([7; 192], 64, false).unwrap();
        let mut page = vec![3; PAGE_BYTES];
        assert!(!seals.is_right(64, &mut page));
        seals.note(64, seals.hash(&page));
        assert!(seals.is_right(64, &mut page) && !seals.is_right(65, &mut page));
        page[9] = 0;
        assert!(!seals.is_right(64, &mut page));
    }
}
