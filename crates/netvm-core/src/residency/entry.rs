//! What the pager knows of one far page, in one word.

/// Highest frame number an [`Entry`] can hold (27 bits: 512 GiB of local memory).
pub const FRAME_MAX: u32 = (1 << 27) - 1;
/// Highest slot number (32 bits: 16 TiB of far memory). Slot 0 means "none".
pub const SLOT_MAX: u32 = u32::MAX;

/// Where a page's contents are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PageState {
    /// Never written, discarded, or found to be all zero: nowhere; reads as zero.
    Untouched = 0,
    /// In the program's address space.
    Mapped = 1,
    /// On a lender only.
    Remote = 2,
    /// In a frame of the pool, and on a lender: may be given up at once, or mapped again without I/O.
    Cached = 3,
    /// In a frame of the pool whose write to the lender is on its way.
    Writing = 4,
    /// On its way from the lender into a frame.
    Fetching = 5,
    /// In the pool of packed pages; a slot, if it has one, holds the same.
    Packed = 6,
    /// One word repeated, which is known: nowhere else.
    Filled = 7,
}

/// State, flags, frame and slot of one page.
///
/// ```text
///  63            32 31             5  4        3      2    0
/// +----------------+----------------+--------+--------+-----+
/// | slot (0: none) | frame          | wanted | queued |state|
/// +----------------+----------------+--------+--------+-----+
/// ```
/// A packed page has the number of its piece in place of a frame; a remote one the moment when it was given up, on a clock of 27 bits; a
/// mapped one how many more times it is spared when its turn to be evicted comes.
/// `wanted`: a thread waits for it (Writing, Fetching); it was in use before, not only read ahead (Cached); it is write-protected, and as it
/// came (Mapped: [`Entry::protected`]). `queued`: it stands in the queue of mapped pages.
/// An all-zero word is an untouched page, so a fresh table of zeroes is a table of untouched pages.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Entry(u64);

const STATE: u64 = 0b111;
const QUEUED: u64 = 1 << 3;
const WANTED: u64 = 1 << 4;
const FRAME_SHIFT: u32 = 5;
const SLOT_SHIFT: u32 = 32;

impl Entry {
    /// From a word of the table.
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// The word to store.
    pub const fn word(self) -> u64 {
        self.0
    }

    /// State of the page.
    pub const fn state(self) -> PageState {
        match self.0 & STATE {
            1 => PageState::Mapped,
            2 => PageState::Remote,
            3 => PageState::Cached,
            4 => PageState::Writing,
            5 => PageState::Fetching,
            6 => PageState::Packed,
            7 => PageState::Filled,
            _ => PageState::Untouched,
        }
    }

    /// The same page in another state.
    #[must_use]
    pub const fn with_state(self, state: PageState) -> Self {
        Self(self.0 & !STATE | state as u64)
    }

    /// Frame that holds it (Cached, Writing, Fetching), or what stands in its place (Packed, Remote).
    pub const fn frame(self) -> u32 {
        (self.0 >> FRAME_SHIFT) as u32 & FRAME_MAX
    }

    /// The same page in another frame.
    #[must_use]
    pub const fn with_frame(self, frame: u32) -> Self {
        assert!(frame <= FRAME_MAX);
        Self(self.0 & !((FRAME_MAX as u64) << FRAME_SHIFT) | (frame as u64) << FRAME_SHIFT)
    }

    /// Slot on a lender that holds a copy, 0 for none.
    pub const fn slot(self) -> u32 {
        (self.0 >> SLOT_SHIFT) as u32
    }

    /// The same page with another slot.
    #[must_use]
    pub const fn with_slot(self, slot: u32) -> Self {
        Self(self.0 & (u32::MAX as u64) | (slot as u64) << SLOT_SHIFT)
    }

    /// A thread waits for it.
    pub const fn wanted(self) -> bool {
        self.0 & WANTED != 0
    }

    /// Sets whether a thread waits for it.
    #[must_use]
    pub const fn with_wanted(self, wanted: bool) -> Self {
        Self(if wanted { self.0 | WANTED } else { self.0 & !WANTED })
    }

    /// Mapped, write-protected, and as it came: its slot, if it has one, holds the same.
    pub const fn protected(self) -> bool {
        self.0 & (STATE | WANTED) == PageState::Mapped as u64 | WANTED
    }

    /// Sets whether a mapped page is write-protected.
    #[must_use]
    pub const fn with_protected(self, protected: bool) -> Self {
        assert!(matches!(self.state(), PageState::Mapped));
        self.with_wanted(protected)
    }

    /// It stands in the queue of mapped pages.
    pub const fn queued(self) -> bool {
        self.0 & QUEUED != 0
    }

    /// Sets whether it stands in the queue of mapped pages.
    #[must_use]
    pub const fn with_queued(self, queued: bool) -> Self {
        Self(if queued { self.0 | QUEUED } else { self.0 & !QUEUED })
    }
}

impl core::fmt::Debug for Entry {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?}(frame {}, slot {}", self.state(), self.frame(), self.slot())?;
        write!(
            f,
            "{}{})",
            if self.wanted() { ", wanted" } else { "" },
            if self.queued() { ", queued" } else { "" }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_disturb_each_other() {
        let entry = Entry::default()
            .with_state(PageState::Fetching)
            .with_frame(FRAME_MAX)
            .with_slot(SLOT_MAX)
            .with_wanted(true)
            .with_queued(true);
        assert_eq!(entry.word(), !0b010);
        let entry = entry.with_frame(5).with_slot(7).with_state(PageState::Remote).with_wanted(false);
        assert_eq!((entry.frame(), entry.slot(), entry.state()), (5, 7, PageState::Remote));
        assert!(entry.queued() && !entry.wanted());
    }

    #[test]
    fn only_mapped_pages_are_protected() {
        let entry = Entry::default().with_state(PageState::Mapped).with_slot(9).with_protected(true);
        assert!(entry.protected() && !entry.with_protected(false).protected());
        assert!(!entry.with_state(PageState::Cached).protected(), "there the flag means something else");
    }

    #[test]
    fn zero_is_untouched() {
        assert_eq!(Entry::from_word(0).state(), PageState::Untouched);
    }
}
