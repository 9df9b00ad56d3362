//! The operations that one side has under way.

use alloc::vec::Vec;

use crate::wire::Status;

/// What an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpKind {
    Free,
    Read,
    Write,
    Flush,
    Import,
    Call,
    Atomic,
    /// A flush of our own, for fenced writes that are held back.
    Probe,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    pub(super) kind: OpKind,
    /// Bytes asked for (reads).
    pub(super) bytes: u32,
    /// The poster's own number.
    pub(super) token: u64,
    pub(super) rail: u8,
    /// A reply's payload is arriving.
    pub(super) receiving: bool,
    /// What the peer already answered to a write that is still being sent.
    pub(super) failed: Option<Status>,
    /// The session ended before the peer could act on it.
    pub(super) never_left: bool,
    generation: u32,
}

/// A fixed number of slots.
#[derive(Debug)]
pub(super) struct OpTable {
    slots: Vec<Op>,
    free: Vec<u16>,
    calls: usize,
}

impl OpTable {
    pub(super) fn new(slots: usize) -> Self {
        let op = Op {
            kind: OpKind::Free,
            bytes: 0,
            token: 0,
            rail: 0,
            receiving: false,
            failed: None,
            never_left: false,
            generation: 0,
        };
        Self { slots: alloc::vec![op; slots], free: (0..slots as u16).rev().collect(), calls: 0 }
    }

    pub(super) fn active(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn calls(&self) -> usize {
        self.calls
    }

    /// Takes a slot; `None` when all are in use.
    pub(super) fn take(&mut self, kind: OpKind, token: u64, bytes: u32, rail: usize) -> Option<u16> {
        let slot = self.free.pop()?;
        let op = &mut self.slots[usize::from(slot)];
        let generation = op.generation.wrapping_add(1);
        *op = Op {
            kind,
            bytes,
            token,
            rail: rail as u8,
            receiving: false,
            failed: None,
            never_left: false,
            generation,
        };
        self.calls += usize::from(matches!(kind, OpKind::Call | OpKind::Import));
        Some(slot)
    }

    /// The number that stands for the slot's present operation on the wire.
    pub(super) fn wire_token(&self, slot: u16) -> u64 {
        u64::from(self.slots[usize::from(slot)].generation) << 32 | u64::from(slot)
    }

    /// The slot of an operation under way, from the peer's bytes.
    pub(super) fn find(&mut self, wire_token: u64) -> Option<(u16, &mut Op)> {
        let slot = (wire_token & 0xFFFF_FFFF) as usize;
        let op = self.slots.get_mut(slot)?;
        let same = op.kind != OpKind::Free && u64::from(op.generation) == wire_token >> 32;
        same.then_some((slot as u16, op))
    }

    pub(super) fn get(&self, slot: u16) -> &Op {
        &self.slots[usize::from(slot)]
    }

    /// Frees a slot and returns what was in it.
    pub(super) fn release(&mut self, slot: u16) -> Op {
        let op = self.slots[usize::from(slot)];
        assert!(op.kind != OpKind::Free, "slot {slot} released twice");
        self.calls -= usize::from(matches!(op.kind, OpKind::Call | OpKind::Import));
        self.slots[usize::from(slot)].kind = OpKind::Free;
        self.free.push(slot);
        op
    }

    /// The slots in use.
    pub(super) fn active_slots(&self) -> impl Iterator<Item = u16> + '_ {
        let used = |(slot, op): (usize, &Op)| (op.kind != OpKind::Free).then_some(slot as u16);
        self.slots.iter().enumerate().filter_map(used)
    }
}
