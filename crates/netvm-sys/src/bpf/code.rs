//! Programs for the kernel, instruction by instruction: <linux/bpf.h>, Documentation/bpf/standardization/instruction-set.rst.

use super::{Pages, Table};
use std::marker::PhantomData;
use std::os::fd::AsRawFd;

/// A register. 0 has results, 1 to 5 have arguments and are lost in calls, 6 to 9 stay, 10 is the end of the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct R(pub u8);

/// Bytes that one access moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// One.
    B1 = 0x10,
    /// Two.
    B2 = 0x08,
    /// Four.
    B4 = 0x00,
    /// Eight.
    B8 = 0x18,
}

/// When a jump is made, by the register on its left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum If {
    /// It is the same.
    Eq = 0x10,
    /// It is greater, without signs.
    Gt = 0x20,
    /// It is another.
    Ne = 0x50,
}

/// What the kernel does for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Helper {
    /// (table or pages, address of the key): what is there, or 0.
    Lookup = 1,
    /// (packet, interface, flags): sends a copy of the packet there; addresses in it are void afterwards. 0, or less.
    CloneRedirect = 13,
    /// (packet, offset, from, bytes, flags): writes into the packet; 0, or less.
    StoreBytes = 9,
    /// (interface, flags): the verdict that sends the packet there.
    Redirect = 23,
    /// (packet, bytes, flags): makes it longer or shorter; 0, or less. Addresses in it are void afterwards.
    ChangeTail = 38,
}

/// A place in a program that is jumped to.
#[derive(Clone, Copy, Debug)]
pub struct Label(usize);

/// A program in the making. What is wrong with it the kernel says when it is loaded.
#[derive(Debug, Default)]
pub struct Code<'a> {
    words: Vec<u64>,
    /// Where each label is, when it has been placed.
    labels: Vec<Option<usize>>,
    /// Jumps, and where they go.
    jumps: Vec<(usize, Label)>,
    named: PhantomData<&'a ()>,
}

const LOAD: u8 = 0x61;
const STORE: u8 = 0x63;
const ATOMIC_ADD: u8 = 0xDB;
const LOAD_WIDE: u8 = 0x18;
const MAP_FD: u8 = 1;

impl<'a> Code<'a> {
    /// No instruction yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn push(&mut self, code: u8, left: R, right: R, offset: i16, immediate: i32) {
        let registers = u64::from(right.0 << 4 | left.0 & 15);
        let (offset, immediate) = (u64::from(offset as u16), u64::from(immediate as u32));
        self.words.push(u64::from(code) | registers << 8 | offset << 16 | immediate << 32);
    }

    /// `to` = `from`.
    pub fn copy(&mut self, to: R, from: R) {
        self.push(0xBF, to, from, 0, 0);
    }

    /// `to` = `value`.
    pub fn set(&mut self, to: R, value: i32) {
        self.push(0xB7, to, R(0), 0, value);
    }

    /// `to` += `value`.
    pub fn add(&mut self, to: R, value: i32) {
        self.push(0x07, to, R(0), 0, value);
    }

    /// `to` += `other`.
    pub fn add_register(&mut self, to: R, other: R) {
        self.push(0x0F, to, other, 0, 0);
    }

    /// `to` &= `mask`, with its sign.
    pub fn and(&mut self, to: R, mask: i32) {
        self.push(0x57, to, R(0), 0, mask);
    }

    /// `to` ^= `mask`, with its sign.
    pub fn xor(&mut self, to: R, mask: i32) {
        self.push(0xA7, to, R(0), 0, mask);
    }

    /// `to` >>= `bits`, without a sign.
    pub fn shift_right(&mut self, to: R, bits: i32) {
        self.push(0x77, to, R(0), 0, bits);
    }

    /// `to` = what is at `from` + `offset`.
    pub fn load(&mut self, width: Width, to: R, from: R, offset: i16) {
        self.push(LOAD | width as u8, to, from, offset, 0);
    }

    /// What is at `to` + `offset` = `from`.
    pub fn store(&mut self, width: Width, to: R, offset: i16, from: R) {
        self.push(STORE | width as u8, to, from, offset, 0);
    }

    /// What is at `to` + `offset`, eight bytes, += `from`, at once.
    pub fn add_atomically(&mut self, to: R, offset: i16, from: R) {
        self.push(ATOMIC_ADD, to, from, offset, 0);
    }

    /// Calls `helper`.
    pub fn call(&mut self, helper: Helper) {
        self.push(0x85, R(0), R(0), 0, helper as i32);
    }

    /// Ends, with the verdict in the first register.
    pub fn end(&mut self) {
        self.push(0x95, R(0), R(0), 0, 0);
    }

    /// `to` = the table.
    pub fn table(&mut self, to: R, table: &'a Table) {
        self.wide(to, table.fd.as_raw_fd());
    }

    /// `to` = the pages.
    pub fn pages(&mut self, to: R, pages: &'a Pages) {
        self.wide(to, pages.fd.as_raw_fd());
    }

    fn wide(&mut self, to: R, fd: i32) {
        self.push(LOAD_WIDE, to, R(MAP_FD), 0, fd);
        self.push(0, R(0), R(0), 0, 0);
    }

    /// A place for [`Code::place`].
    pub fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// Jumps to this label come here.
    pub fn place(&mut self, label: Label) {
        self.labels[label.0] = Some(self.words.len());
    }

    /// Jumps when `left` is so to `value`.
    pub fn jump_if(&mut self, left: R, is: If, value: i32, to: Label) {
        self.jumps.push((self.words.len(), to));
        self.push(0x05 | is as u8, left, R(0), 0, value);
    }

    /// Jumps when `left` is so to `right`.
    pub fn jump_if_register(&mut self, left: R, is: If, right: R, to: Label) {
        self.jumps.push((self.words.len(), to));
        self.push(0x0D | is as u8, left, right, 0, 0);
    }

    /// The instructions.
    ///
    /// # Panics
    /// When a jump goes to a label that has no place.
    pub(super) fn words(&self) -> Vec<u64> {
        let mut words = self.words.clone();
        for &(at, Label(label)) in &self.jumps {
            let target = self.labels[label].expect("a label without a place");
            let offset = target as i64 - at as i64 - 1;
            words[at] |= u64::from(offset as i16 as u16) << 16;
        }
        words
    }
}
