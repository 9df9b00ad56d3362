//! Which transfers a borrower on the lender's host does by itself, and which go over the session: docs/design/nearby.md.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::unsettled::Unsettled;

/// Memory is provided in units of so many bytes, or of a slab when that is smaller.
pub const UNIT_BYTES: u64 = 4 << 20;
/// The way of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// On the lender's file.
    Direct,
    /// On the file with this number, of another lease: only reads.
    Inherited(u32),
    /// Over the session.
    Session,
}

/// A unit of a slab that the lender is to provide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unit {
    /// The slab.
    pub slab: u32,
    /// Which of its units.
    pub index: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Untouched,
    /// The lender has been asked. Another asking's answer comes too late: there was a discard in between.
    Asked(u32),
    Provided,
    Refused,
}

/// The file that a slab is in.
#[derive(Clone, Debug)]
enum File {
    /// The lease's own, with the states of the slab's units.
    Own(Vec<State>),
    /// That of the lease that this is a fork of, or of one before it.
    Inherited(u32),
}

/// What a borrower knows of the memory that it shares with its lender.
#[derive(Debug)]
pub struct Direct {
    slab_bytes: u64,
    slabs: BTreeMap<u32, File>,
    unsettled: Unsettled,
    /// Units that the lender has been asked for, by the number of the asking.
    asked: BTreeMap<u32, Unit>,
    next_asking: u32,
}

impl Direct {
    /// For slabs of `slab_bytes` each; none is in the file yet.
    pub fn new(slab_bytes: u64) -> Self {
        Self {
            slab_bytes,
            slabs: BTreeMap::new(),
            unsettled: Unsettled::new(),
            asked: BTreeMap::new(),
            next_asking: 0,
        }
    }

    /// A slab has been borrowed that is in the lease's own file.
    pub fn borrowed(&mut self, slab: u32) {
        let units = self.slab_bytes.div_ceil(UNIT_BYTES) as usize;
        self.slabs.insert(slab, File::Own(alloc::vec![State::Untouched; units]));
    }

    /// A fork's lease has inherited a slab that is in the file with this number.
    pub fn inherited(&mut self, slab: u32, file: u32) {
        self.slabs.insert(slab, File::Inherited(file));
    }

    /// What has been inherited goes over the session from now on.
    pub fn forget_inherited(&mut self) {
        self.slabs.retain(|_, file| matches!(file, File::Own(_)));
    }

    /// A slab is about to be given back.
    pub fn returned(&mut self, slab: u32) {
        self.slabs.remove(&slab);
    }

    /// A range is about to be discarded.
    pub fn discarded(&mut self, slab: u32, offset: u64, bytes: u64) {
        if let Some(File::Own(units)) = self.slabs.get_mut(&slab) {
            units_of(units, offset, bytes).fill(State::Untouched);
        }
    }

    /// How to read; `applied` writes of the session are known to have been applied.
    #[inline]
    pub fn read(&mut self, applied: u64, slab: u32, offset: u64, bytes: u64) -> Way {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.slab_bytes);
        let way = match self.slabs.get(&slab) {
            Some(File::Own(_)) => Way::Direct,
            Some(&File::Inherited(file)) => Way::Inherited(file),
            None => return Way::Session,
        };
        if inside && self.unsettled.allows(applied, slab, offset..offset + bytes) {
            way
        } else {
            Way::Session
        }
    }

    /// How to write. What goes over the session has to be told with [`Direct::written`].
    #[inline]
    pub fn write(&mut self, applied: u64, slab: u32, offset: u64, bytes: u64) -> Way {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.slab_bytes);
        let provided = match self.slabs.get_mut(&slab) {
            Some(File::Own(units)) if inside => {
                units_of(units, offset, bytes).iter().all(|&state| state == State::Provided)
            }
            _ => false,
        };
        if provided && self.unsettled.allows(applied, slab, offset..offset + bytes) {
            Way::Direct
        } else {
            Way::Session
        }
    }

    /// A write has been posted on the session as number `sequence`; `applied` of them are known to have been applied. Calls `provide` with every
    /// unit that the lender is to be asked for, behind that write, and with the number of the asking; false from there: it cannot be asked now.
    pub fn written(
        &mut self,
        applied: u64,
        sequence: u64,
        slab: u32,
        offset: u64,
        bytes: u64,
        mut provide: impl FnMut(Unit, u32) -> bool,
    ) {
        let Some(file) = self.slabs.get_mut(&slab) else { return };
        let Some(end) = offset.checked_add(bytes).filter(|&end| end <= self.slab_bytes) else { return };
        self.unsettled.written(applied, sequence, slab, offset..end);
        let File::Own(units) = file else { return };
        let first = (offset / UNIT_BYTES) as u32;
        for (index, state) in (first..).zip(units_of(units, offset, bytes)) {
            let unit = Unit { slab, index };
            if *state == State::Untouched && provide(unit, self.next_asking) {
                *state = State::Asked(self.next_asking);
                self.asked.insert(self.next_asking, unit);
                self.next_asking = self.next_asking.wrapping_add(1);
            }
        }
    }

    /// Whether the lender should be asked which writes it has applied, behind all that were posted; `applied` are known.
    pub fn wants_word(&self, applied: u64) -> bool {
        self.unsettled.wants_word(applied)
    }

    /// The lender has answered the asking with this number.
    pub fn provided(&mut self, asked: u32, done: bool) {
        let Some(Unit { slab, index }) = self.asked.remove(&asked) else { return };
        let state = match self.slabs.get_mut(&slab) {
            Some(File::Own(units)) => units.get_mut(index as usize),
            _ => None,
        };
        if let Some(state) = state.filter(|state| **state == State::Asked(asked)) {
            *state = if done { State::Provided } else { State::Refused };
        }
    }
}

/// The units that a range within the slab touches.
fn units_of(units: &mut [State], offset: u64, bytes: u64) -> &mut [State] {
    let first = (offset / UNIT_BYTES) as usize;
    let last = (offset.saturating_add(bytes.saturating_sub(1)) / UNIT_BYTES) as usize;
    let end = units.len().min(last.saturating_add(1));
    units.get_mut(first..end).unwrap_or_default()
}

#[cfg(test)]
mod tests;
