//! Who holds which slab of a lender.
//!
//! A *lease* is what one borrower's connection holds. Forking a lease makes a second holder of every slab of the first. A slab that
//! nobody holds any more is free again when it has been cleared.

pub mod datagram;
pub mod direct;
mod unsettled;

pub use unsettled::Unsettled;

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::limits::{LEASES_MAX, SLAB_BYTES_MAX, SLAB_BYTES_MIN};

/// Whether a lender's slabs may have so many bytes.
pub fn is_slab(bytes: u64) -> bool {
    (SLAB_BYTES_MIN..=SLAB_BYTES_MAX).contains(&bytes) && bytes.is_multiple_of(SLAB_BYTES_MIN)
}

/// A lease in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LeaseId(u32);

/// Why a slab or a lease is not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlabError {
    /// All slabs are lent.
    Full,
    /// Too many leases.
    TooManyLeases,
    /// The lease does not hold that slab.
    NotHeld,
}

#[derive(Debug, Default)]
struct Lease {
    /// One bit per slab.
    held: Vec<u64>,
    count: u64,
}

/// The slabs of a lender and their holders.
#[derive(Debug)]
pub struct Slabs {
    slab_bytes: u64,
    /// Leases that hold each slab.
    holders: Vec<u16>,
    /// Free slabs, the lowest last.
    free: Vec<u32>,
    /// Slabs that nobody holds and that have not been cleared, in the order in which they came back.
    uncleared: VecDeque<u32>,
    leases: Vec<Option<Lease>>,
}

const _: () = assert!(LEASES_MAX <= u16::MAX as usize);

impl Slabs {
    /// `count` free slabs of `slab_bytes` each.
    pub fn new(count: u32, slab_bytes: u64) -> Self {
        Self {
            slab_bytes,
            holders: alloc::vec![0; count as usize],
            free: (0..count).rev().collect(),
            uncleared: VecDeque::new(),
            leases: Vec::new(),
        }
    }

    /// Bytes of one slab.
    pub fn slab_bytes(&self) -> u64 {
        self.slab_bytes
    }

    /// Bytes of all slabs.
    pub fn size_bytes(&self) -> u64 {
        self.holders.len() as u64 * self.slab_bytes
    }

    /// Bytes of slabs that somebody holds.
    pub fn used_bytes(&self) -> u64 {
        (self.holders.len() - self.free.len() - self.uncleared.len()) as u64 * self.slab_bytes
    }

    /// Bytes of slabs that nobody holds and that have not been cleared.
    pub fn uncleared_bytes(&self) -> u64 {
        self.uncleared.len() as u64 * self.slab_bytes
    }

    /// The slab that is to be cleared next, for [`Slabs::cleared`].
    pub fn uncleared(&self) -> Option<u32> {
        self.uncleared.front().copied()
    }

    /// Bytes that a lease holds, alone or with others.
    pub fn lease_bytes(&self, lease: LeaseId) -> u64 {
        self.lease(lease).map_or(0, |lease| lease.count * self.slab_bytes)
    }

    /// Bytes that several leases hold together.
    pub fn together_bytes(&self, leases: impl Iterator<Item = LeaseId>) -> u64 {
        let mut all = alloc::vec![0; self.holders.len().div_ceil(64)];
        for lease in leases.filter_map(|lease| self.lease(lease)) {
            all.iter_mut().zip(&lease.held).for_each(|(all, held)| *all |= held);
        }
        all.iter().map(|word: &u64| u64::from(word.count_ones())).sum::<u64>() * self.slab_bytes
    }

    fn lease(&self, lease: LeaseId) -> Option<&Lease> {
        self.leases.get(lease.0 as usize)?.as_ref()
    }

    /// A lease that holds nothing.
    ///
    /// # Errors
    /// [`SlabError::TooManyLeases`].
    pub fn open(&mut self) -> Result<LeaseId, SlabError> {
        let index = match self.leases.iter().position(Option::is_none) {
            Some(index) => index,
            None if self.leases.len() < LEASES_MAX => {
                self.leases.push(None);
                self.leases.len() - 1
            }
            None => return Err(SlabError::TooManyLeases),
        };
        let held = alloc::vec![0; self.holders.len().div_ceil(64)];
        self.leases[index] = Some(Lease { held, count: 0 });
        Ok(LeaseId(index as u32))
    }

    /// A new lease that holds whatever `lease` holds.
    ///
    /// # Errors
    /// [`SlabError::TooManyLeases`].
    pub fn fork(&mut self, lease: LeaseId) -> Result<LeaseId, SlabError> {
        let fork = self.open()?;
        let Some(Lease { held, count }) = self.lease(lease) else { return Ok(fork) };
        let copy = Lease { held: held.clone(), count: *count };
        for slab in slabs_of(&copy.held) {
            self.holders[slab as usize] += 1;
        }
        self.leases[fork.0 as usize] = Some(copy);
        Ok(fork)
    }

    /// Whether there is a slab to be borrowed now.
    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Takes a free slab.
    ///
    /// # Errors
    /// [`SlabError::Full`].
    pub fn borrow(&mut self, lease: LeaseId) -> Result<u32, SlabError> {
        let lease =
            self.leases.get_mut(lease.0 as usize).and_then(Option::as_mut).ok_or(SlabError::NotHeld)?;
        let slab = self.free.pop().ok_or(SlabError::Full)?;
        lease.held[slab as usize / 64] |= 1 << (slab % 64);
        lease.count += 1;
        self.holders[slab as usize] = 1;
        Ok(slab)
    }

    /// Whether the lease holds the slab.
    pub fn holds(&self, lease: LeaseId, slab: u32) -> bool {
        let word = |lease: &Lease| lease.held.get(slab as usize / 64).copied();
        self.lease(lease).and_then(word).is_some_and(|word| word >> (slab % 64) & 1 == 1)
    }

    /// Whether the lease holds the slab and nobody else does.
    ///
    /// # Errors
    /// [`SlabError::NotHeld`].
    pub fn sole_holder(&self, lease: LeaseId, slab: u32) -> Result<bool, SlabError> {
        if self.holds(lease, slab) { Ok(self.holders[slab as usize] == 1) } else { Err(SlabError::NotHeld) }
    }

    /// Gives a slab back; true when nobody holds it any more: it is lent again when it has been [`Slabs::cleared`].
    ///
    /// # Errors
    /// [`SlabError::NotHeld`].
    pub fn give_back(&mut self, lease: LeaseId, slab: u32) -> Result<bool, SlabError> {
        if !self.holds(lease, slab) {
            return Err(SlabError::NotHeld);
        }
        if let Some(lease) = self.leases[lease.0 as usize].as_mut() {
            lease.held[slab as usize / 64] &= !(1 << (slab % 64));
            lease.count -= 1;
        }
        Ok(self.drop_holder(slab))
    }

    fn drop_holder(&mut self, slab: u32) -> bool {
        let holders = &mut self.holders[slab as usize];
        *holders -= 1;
        let unused = *holders == 0;
        self.uncleared.extend(unused.then_some(slab));
        unused
    }

    /// The slab that was to be cleared next reads as zeros, and may be lent again.
    pub fn cleared(&mut self) {
        self.free.extend(self.uncleared.pop_front());
    }

    /// Ends a lease.
    pub fn close(&mut self, lease: LeaseId) {
        let Some(Lease { held, .. }) = self.leases.get_mut(lease.0 as usize).and_then(Option::take) else {
            return;
        };
        for slab in slabs_of(&held) {
            self.drop_holder(slab);
        }
    }
}

fn slabs_of(held: &[u64]) -> impl Iterator<Item = u32> + '_ {
    let bits = |(index, &word): (usize, &u64)| {
        (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index as u32 * 64 + bit)
    };
    held.iter().enumerate().flat_map(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slab_is_free_when_its_last_holder_has_gone() {
        let mut slabs = Slabs::new(3, 100);
        let parent = slabs.open().unwrap();
        assert_eq!((slabs.borrow(parent), slabs.borrow(parent)), (Ok(0), Ok(1)));
        let child = slabs.fork(parent).unwrap();
        assert_eq!((slabs.used_bytes(), slabs.lease_bytes(child)), (200, 200));
        assert_eq!(slabs.sole_holder(parent, 0), Ok(false));
        assert_eq!(slabs.borrow(child), Ok(2));
        let together = |slabs: &Slabs, leases: &[LeaseId]| slabs.together_bytes(leases.iter().copied());
        assert_eq!((together(&slabs, &[parent, child, parent]), together(&slabs, &[])), (300, 0));
        assert_eq!(slabs.borrow(parent), Err(SlabError::Full));
        assert!(!slabs.holds(parent, 2) && !slabs.holds(parent, 64) && !slabs.holds(parent, u32::MAX));
        assert_eq!(slabs.give_back(parent, 2), Err(SlabError::NotHeld));
        assert_eq!(slabs.give_back(parent, 0), Ok(false));
        assert_eq!(slabs.sole_holder(child, 0), Ok(true));
        assert_eq!(slabs.give_back(child, 0), Ok(true));
        assert_eq!((slabs.used_bytes(), slabs.uncleared_bytes()), (200, 100));
        assert!(!slabs.has_free() && slabs.borrow(parent) == Err(SlabError::Full), "it is not cleared");
        assert_eq!(slabs.uncleared(), Some(0));
        slabs.cleared();
        assert!(slabs.has_free() && slabs.uncleared_bytes() == 0);
        // Those that nobody holds any more.
        let close = |slabs: &mut Slabs, lease| {
            slabs.close(lease);
            let next = |slabs: &mut Slabs| slabs.uncleared().inspect(|_| slabs.cleared());
            core::iter::from_fn(|| next(slabs)).collect::<Vec<u32>>()
        };
        assert_eq!(close(&mut slabs, child), [2]);
        assert_eq!(close(&mut slabs, child), Vec::<u32>::new());
        assert_eq!(together(&slabs, &[parent, child]), 100);
        assert_eq!(slabs.sole_holder(parent, 1), Ok(true));
        assert_eq!(close(&mut slabs, parent), [1]);
        assert_eq!((slabs.used_bytes(), slabs.uncleared_bytes(), slabs.free.len()), (0, 0, 3));
        slabs.cleared();
        assert_eq!(slabs.free.len(), 3, "there was none");
    }
}
