//! The page table: one [`Entry`] and one content hash for each far page, 16 bytes in all.

use netvm_core::residency::{Entry, PageState};
use netvm_sys::table::LazyTable;
use std::io;
use std::ops::Range;

const CHUNK_PAGES: usize = 512;

/// Entries and hashes of all pages of the area, and how many pages of each 2 MiB are not untouched.
#[derive(Debug)]
pub(super) struct PageTable {
    /// The entry of a page and its hash, side by side: whoever needs one needs the other soon.
    words: LazyTable,
    touched: LazyTable,
    far_pages: u64,
}

impl PageTable {
    pub(super) fn new(pages: usize) -> io::Result<Self> {
        Ok(Self {
            words: LazyTable::new(pages.checked_mul(2).ok_or(io::ErrorKind::InvalidInput)?)?,
            touched: LazyTable::new(pages.div_ceil(CHUNK_PAGES))?,
            far_pages: 0,
        })
    }

    /// Pages that hold contents, wherever these are.
    pub(super) fn far_pages(&self) -> u64 {
        self.far_pages
    }

    pub(super) fn get(&self, page: u32) -> Entry {
        Entry::from_word(self.words.get(2 * page as usize))
    }

    pub(super) fn set(&mut self, page: u32, entry: Entry) {
        let page = page as usize;
        let was = Entry::from_word(self.words.get(2 * page)).state() != PageState::Untouched;
        let is = entry.state() != PageState::Untouched;
        self.words.set(2 * page, entry.word());
        if was != is {
            let chunk = page / CHUNK_PAGES;
            let count = self.touched.get(chunk);
            self.touched.set(chunk, if is { count + 1 } else { count - 1 });
            self.far_pages = if is { self.far_pages + 1 } else { self.far_pages - 1 };
        }
    }

    pub(super) fn hash(&self, page: u32) -> u64 {
        self.words.get(2 * page as usize + 1)
    }

    pub(super) fn set_hash(&mut self, page: u32, hash: u64) {
        self.words.set(2 * page as usize + 1, hash);
    }

    /// The first page of `pages` that is not untouched. Skips untouched 2 MiB at a time.
    pub(super) fn next_touched(&self, pages: Range<u32>) -> Option<u32> {
        let (mut page, end) = (pages.start as usize, pages.end as usize);
        while page < end {
            if page.is_multiple_of(CHUNK_PAGES) && self.touched.get(page / CHUNK_PAGES) == 0 {
                page += CHUNK_PAGES;
            } else if Entry::from_word(self.words.get(2 * page)).state() == PageState::Untouched {
                page += 1;
            } else {
                return Some(page as u32);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_touched_pages_in_a_huge_table() {
        let mut table = PageTable::new(1 << 28).unwrap();
        let entry = Entry::default().with_state(PageState::Remote).with_slot(3);
        for page in [5, 100_000, (1 << 28) - 1] {
            table.set(page, entry);
        }
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(page) = table.next_touched(from..1 << 28) {
            found.push(page);
            from = page + 1;
        }
        assert_eq!(found, [5, 100_000, (1 << 28) - 1]);
        table.set(100_000, Entry::default());
        assert_eq!((table.next_touched(6..200_000), table.far_pages()), (None, 2));
    }
    #[test]
    fn sixteen_bytes_for_each_far_page() {
        let pages = 1 << 20;
        let table = PageTable::new(pages).unwrap();
        let words = table.words.len() + table.touched.len();
        let bytes = (words * 8) as f64 / pages as f64;
        println!("{bytes:.3} bytes for each far page");
        assert!((16.0..16.1).contains(&bytes), "{bytes}");
    }
}
