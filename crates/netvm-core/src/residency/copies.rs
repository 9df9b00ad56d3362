//! Where the copies of a slab are.

/// Most copies that a slab may have.
pub const COPIES_MAX: usize = 4;

/// One copy of a slab: its lender, and its number there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlabCopy {
    /// Number of the lender.
    pub lender: u32,
    /// The slab's number at the lender.
    pub slab: u32,
}

/// A few copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    /// One more while a copy moves from one lender to another.
    list: [SlabCopy; COPIES_MAX + 1],
    count: u8,
}

impl Copies {
    /// They.
    #[inline]
    pub fn as_slice(&self) -> &[SlabCopy] {
        &self.list[..usize::from(self.count)]
    }

    /// One more; there is room for one above [`COPIES_MAX`].
    pub fn push(&mut self, copy: SlabCopy) {
        self.list[usize::from(self.count)] = copy;
        self.count += 1;
    }

    /// Forgets the copy at `lender`, if there is one.
    pub(super) fn remove(&mut self, lender: u32) -> Option<SlabCopy> {
        let place = self.as_slice().iter().position(|copy| copy.lender == lender)?;
        let copy = self.list[place];
        self.list.copy_within(place + 1..usize::from(self.count), place);
        self.count -= 1;
        Some(copy)
    }
}

impl FromIterator<SlabCopy> for Copies {
    fn from_iter<I: IntoIterator<Item = SlabCopy>>(copies: I) -> Self {
        let mut all = Self::default();
        copies.into_iter().for_each(|copy| all.push(copy));
        all
    }
}
