//! Where the copies of a slab are, or its parts: docs/design/erasure.md.

/// Most copies that a slab may have.
pub const COPIES_MAX: usize = 4;
/// Most parts of a page that hold its data,
pub const DATA_PARTS_MAX: usize = 8;
/// and most that are computed from them.
pub const PARITY_PARTS_MAX: usize = 4;
/// Most parts of a slab.
pub const PARTS_MAX: usize = DATA_PARTS_MAX + PARITY_PARTS_MAX;

/// How a slab is kept by several lenders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Redundancy {
    need: u8,
    total: u8,
}

impl Redundancy {
    /// Each of `count` lenders has whole pages.
    pub const fn replicas(count: usize) -> Self {
        assert!(count >= 1 && count <= COPIES_MAX);
        Self { need: 1, total: count as u8 }
    }

    /// Each page is in `data` parts, and `parity` more are computed from them, all at different lenders: any `data` of them are
    /// enough. `None` when there cannot be so many, or a page cannot be divided so.
    pub const fn erasure(data: usize, parity: usize) -> Option<Self> {
        let is_data = data >= 2 && data <= DATA_PARTS_MAX && data.is_power_of_two();
        if is_data && parity >= 1 && parity <= PARITY_PARTS_MAX {
            Some(Self { need: data as u8, total: (data + parity) as u8 })
        } else {
            None
        }
    }

    /// How many lenders have a slab.
    pub const fn total(self) -> usize {
        self.total as usize
    }

    /// How many of them suffice to read it.
    pub const fn need(self) -> usize {
        self.need as usize
    }

    /// Whether each lender has only a part of each page.
    pub const fn is_in_parts(self) -> bool {
        self.need > 1
    }
}

/// One copy of a slab, or one part of each of its pages: its lender, and its number there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlabCopy {
    /// Number of the lender.
    pub lender: u32,
    /// The slab's number at the lender.
    pub slab: u32,
    /// Which part of each page it has; of copies, any.
    pub part: u8,
}

/// A few copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    /// One more while a copy moves from one lender to another.
    list: [SlabCopy; PARTS_MAX + 1],
    count: u8,
}

impl Copies {
    /// They.
    #[inline]
    pub fn as_slice(&self) -> &[SlabCopy] {
        &self.list[..usize::from(self.count)]
    }

    /// One more; there is room for one above [`PARTS_MAX`].
    pub fn push(&mut self, copy: SlabCopy) {
        self.list[usize::from(self.count)] = copy;
        self.count += 1;
    }

    /// Only those that are `wanted` stay.
    pub fn retain(&mut self, wanted: impl Fn(&SlabCopy) -> bool) {
        let all = *self;
        *self = Self::default();
        all.as_slice().iter().filter(|&copy| wanted(copy)).for_each(|&copy| self.push(copy));
    }

    /// The first part of `total` that none of them has.
    pub(super) fn missing(&self, total: usize) -> u8 {
        let has = |part: &u8| self.as_slice().iter().any(|copy| copy.part == *part);
        (0..total as u8).find(|part| !has(part)).unwrap_or(0)
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
