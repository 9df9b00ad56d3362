//! Slots: the pages of borrowed slabs.

use alloc::vec;
use alloc::vec::Vec;

/// Number of a slab in its [`SlotMap`].
pub type SlabIndex = u32;
/// Number of a slot: slab and page in it, counted from 1.
pub type Slot = u32;

/// One slab and which of its slots hold a page.
#[derive(Clone, Debug)]
struct Slab {
    lender: u32,
    remote_id: u32,
    live: Vec<u64>,
    live_count: u32,
    /// Another process (after fork) may read every slot of it: nothing may be written.
    frozen: bool,
    cursor: u32,
}

/// Which slots of which slabs hold a page.
///
/// Neighbouring slots are handed out in runs, so that pages evicted together can be fetched together. A *frozen* slab is
/// shared with a process forked from this one; its slots are read and let go, never written, until it is thawed.
#[derive(Clone, Debug)]
pub struct SlotMap {
    slabs: Vec<Option<Slab>>,
    slots_per_slab: u32,
    current: usize,
    live_count: u64,
}

impl SlotMap {
    /// No slabs yet; each will have `slots_per_slab` slots.
    pub fn new(slots_per_slab: u32) -> Self {
        assert!(slots_per_slab > 0 && slots_per_slab.is_multiple_of(64));
        Self { slabs: Vec::new(), slots_per_slab, current: 0, live_count: 0 }
    }

    /// Slots that hold a page.
    pub fn live(&self) -> u64 {
        self.live_count
    }

    /// Slabs borrowed.
    pub fn slabs(&self) -> usize {
        self.slabs.iter().flatten().count()
    }

    /// Adds a slab borrowed from `lender`. `None` when slot numbers are used up.
    pub fn add(&mut self, lender: u32, remote_id: u32) -> Option<SlabIndex> {
        let slab = Slab {
            lender,
            remote_id,
            live: vec![0; self.slots_per_slab as usize / 64],
            live_count: 0,
            frozen: false,
            cursor: 0,
        };
        let index = self.slabs.iter().position(Option::is_none).unwrap_or(self.slabs.len());
        let last = (index as u64 + 1) * u64::from(self.slots_per_slab);
        if last > u64::from(Slot::MAX) {
            return None;
        }
        if index == self.slabs.len() {
            self.slabs.push(Some(slab));
        } else {
            self.slabs[index] = Some(slab);
        }
        self.current = index;
        Some(index as u32)
    }

    /// Lender and remote id of a slot's slab, and the page in it.
    pub fn locate(&self, slot: Slot) -> (u32, u32, u32) {
        let (index, page) = self.split(slot);
        let slab = self.slabs[index].as_ref().expect("slot of a slab that was returned");
        (slab.lender, slab.remote_id, page)
    }

    /// Whether a slot may be overwritten in place.
    pub fn is_writable(&self, slot: Slot) -> bool {
        self.slabs[self.split(slot).0].as_ref().is_some_and(|slab| !slab.frozen)
    }

    /// Whether two slots are neighbours in one slab.
    pub fn adjacent(&self, slot: Slot, next: Slot) -> bool {
        next == slot.wrapping_add(1) && self.split(slot).0 == self.split(next).0
    }

    /// Takes a run of 1..=`want` free neighbouring slots; `None` when another slab is needed.
    pub fn take_run(&mut self, want: u32) -> Option<(Slot, u32)> {
        let count = self.slabs.len();
        for step in 0..count {
            let index = (self.current + step) % count;
            let Some(slab) = &mut self.slabs[index] else { continue };
            if slab.frozen || slab.live_count == self.slots_per_slab {
                continue;
            }
            let (page, length) = slab.take_run(want, self.slots_per_slab);
            self.current = index;
            self.live_count += u64::from(length);
            return Some((self.join(index, page), length));
        }
        None
    }

    /// Lets go of a slot. Returns its slab when that holds no page any more and can be returned to the lender.
    pub fn release(&mut self, slot: Slot) -> Option<SlabIndex> {
        let (index, page) = self.split(slot);
        let slab = self.slabs[index].as_mut().expect("slot of a slab that was returned");
        let (word, bit) = (page as usize / 64, 1 << (page % 64));
        assert!(slab.live[word] & bit != 0, "slot {slot} released twice");
        slab.live[word] &= !bit;
        slab.live_count -= 1;
        self.live_count -= 1;
        (slab.live_count == 0).then_some(index as u32)
    }

    /// Forgets an empty slab; returns its lender and remote id.
    pub fn remove(&mut self, slab: SlabIndex) -> Option<(u32, u32)> {
        let place = self.slabs.get_mut(slab as usize)?;
        if place.as_ref()?.live_count != 0 {
            return None;
        }
        place.take().map(|slab| (slab.lender, slab.remote_id))
    }

    /// A fork: every slab is shared from now on.
    pub fn freeze(&mut self) {
        for slab in self.slabs.iter_mut().flatten() {
            slab.frozen = true;
        }
    }

    /// Frozen slabs with their lender and remote id.
    pub fn frozen(&self) -> impl Iterator<Item = (SlabIndex, u32, u32)> + '_ {
        self.slabs.iter().enumerate().filter_map(|(index, slab)| {
            slab.as_ref().filter(|slab| slab.frozen).map(|slab| (index as u32, slab.lender, slab.remote_id))
        })
    }

    /// A frozen slab has no other holder any more.
    pub fn thaw(&mut self, slab: SlabIndex) {
        if let Some(Some(slab)) = self.slabs.get_mut(slab as usize) {
            slab.frozen = false;
        }
    }

    fn split(&self, slot: Slot) -> (usize, u32) {
        assert!(slot != 0, "slot 0 is none");
        ((slot - 1) as usize / self.slots_per_slab as usize, (slot - 1) % self.slots_per_slab)
    }

    fn join(&self, slab: usize, page: u32) -> Slot {
        slab as u32 * self.slots_per_slab + page + 1
    }
}

impl Slab {
    fn take_run(&mut self, want: u32, slots: u32) -> (u32, u32) {
        let is_live = |live: &[u64], page: u32| live[page as usize / 64] >> (page % 64) & 1 != 0;
        let mut start = self.cursor % slots;
        while is_live(&self.live, start) {
            let word = self.live[start as usize / 64];
            start = if word == u64::MAX { (start / 64 + 1) * 64 % slots } else { (start + 1) % slots };
        }
        let mut end = start;
        while end < slots && end - start < want && !is_live(&self.live, end) {
            self.live[end as usize / 64] |= 1 << (end % 64);
            end += 1;
        }
        self.live_count += end - start;
        self.cursor = end % slots;
        (start, end - start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_fill_a_slab_and_ask_for_the_next() {
        let mut map = SlotMap::new(128);
        assert_eq!(map.take_run(10), None);
        map.add(3, 77);
        assert_eq!(map.take_run(100), Some((1, 100)));
        assert_eq!(map.take_run(100), Some((101, 28)));
        assert_eq!(map.take_run(1), None);
        assert_eq!(map.locate(128), (3, 77, 127));
        map.add(4, 5);
        assert_eq!(map.take_run(64), Some((129, 64)));
        assert!(!map.adjacent(128, 129), "neighbours of different slabs are not adjacent");
        assert!(map.adjacent(127, 128));
    }

    #[test]
    fn frozen_slabs_are_let_go_but_not_written() {
        let mut map = SlotMap::new(64);
        let slab = map.add(0, 9).unwrap();
        map.take_run(2);
        map.freeze();
        assert!(!map.is_writable(1));
        assert_eq!(map.take_run(1), None);
        assert_eq!(map.release(1), None);
        map.thaw(slab);
        assert_eq!(map.take_run(64), Some((3, 62)));
        assert_eq!(map.take_run(64), Some((1, 1)));
        for slot in 1..64 {
            assert_eq!(map.release(slot), None);
        }
        assert_eq!(map.release(64), Some(slab));
        assert_eq!(map.remove(slab), Some((0, 9)));
        assert_eq!((map.slabs(), map.live()), (0, 0));
    }
}
