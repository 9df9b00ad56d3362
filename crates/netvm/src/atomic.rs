//! Atomics on a peer's words.
//!
//! They are executed by the peer's CPU on its memory, in the thread that serves the connection: atomic with all other peers' on every link
//! and with the owner's own CPU atomics on the same word ([`SharedSlice::with_u64`](netvm_sys::shared::SharedSlice::with_u64)). Writes and
//! reads are copies, and not atomic.

use std::sync::atomic::Ordering;

use netvm_core::atomic::{Atomic, AtomicOp, Width};
use netvm_core::endpoint::Answer;
use netvm_sys::shared::SharedSlice;

use crate::error::{Error, Result};
use crate::region::Region;

mod sealed {
    pub trait Sealed {}
    impl Sealed for u32 {}
    impl Sealed for u64 {}
}

/// A word that atomics work on: `u32` or `u64`.
pub trait Word: sealed::Sealed + Copy {
    /// How wide it is.
    #[doc(hidden)]
    const WIDTH: Width;
    /// In the lower half of 64 bits.
    #[doc(hidden)]
    fn to_u64(self) -> u64;
    /// Back.
    #[doc(hidden)]
    fn from_u64(word: u64) -> Self;
}

impl Word for u32 {
    const WIDTH: Width = Width::Four;
    fn to_u64(self) -> u64 {
        u64::from(self)
    }
    fn from_u64(word: u64) -> Self {
        word as u32
    }
}

impl Word for u64 {
    const WIDTH: Width = Width::Eight;
    fn to_u64(self) -> u64 {
        self
    }
    fn from_u64(word: u64) -> Self {
        word
    }
}

/// Each returns what the word was before; `offset` is a multiple of the word's width. They see all writes made before through this
/// peer's regions.
///
/// All of them fail with [`Error::Bounds`], [`Error::Op`] when the peer refuses (misaligned, read-only, unexported), [`Error::LenderLost`] or
/// [`Error::Timeout`] when it was certainly not executed, and [`Error::OutcomeUnknown`] when nobody can tell.
impl Region {
    /// Reads a word whole.
    ///
    /// # Errors
    /// See above.
    pub fn atomic_load<W: Word>(&self, offset: u64) -> Result<W> {
        self.atomic(offset, "load", Atomic::new(AtomicOp::Load, W::WIDTH, 0))
    }

    /// Writes a word whole.
    ///
    /// # Errors
    /// See above.
    pub fn atomic_store<W: Word>(&self, offset: u64, value: W) -> Result<()> {
        self.swap(offset, value).map(drop)
    }

    /// Puts `value` in place of the word.
    ///
    /// # Errors
    /// See above.
    pub fn swap<W: Word>(&self, offset: u64, value: W) -> Result<W> {
        self.atomic(offset, "swap", Atomic::new(AtomicOp::Swap, W::WIDTH, value.to_u64()))
    }

    /// Puts `new` in place of the word if it is `expected`; it was when the result is `expected`.
    ///
    /// # Errors
    /// See above.
    pub fn compare_swap<W: Word>(&self, offset: u64, expected: W, new: W) -> Result<W> {
        let atomic = Atomic::compare_swap(W::WIDTH, expected.to_u64(), new.to_u64());
        self.atomic(offset, "compare-and-swap", atomic)
    }

    /// Adds `operand`, wrapping around.
    ///
    /// # Errors
    /// See above.
    pub fn fetch_add<W: Word>(&self, offset: u64, operand: W) -> Result<W> {
        self.atomic(offset, "fetch-and-add", Atomic::new(AtomicOp::Add, W::WIDTH, operand.to_u64()))
    }

    /// Bitwise and.
    ///
    /// # Errors
    /// See above.
    pub fn fetch_and<W: Word>(&self, offset: u64, operand: W) -> Result<W> {
        self.atomic(offset, "fetch-and-and", Atomic::new(AtomicOp::And, W::WIDTH, operand.to_u64()))
    }

    /// Bitwise or.
    ///
    /// # Errors
    /// See above.
    pub fn fetch_or<W: Word>(&self, offset: u64, operand: W) -> Result<W> {
        self.atomic(offset, "fetch-and-or", Atomic::new(AtomicOp::Or, W::WIDTH, operand.to_u64()))
    }

    /// Bitwise exclusive or.
    ///
    /// # Errors
    /// See above.
    pub fn fetch_xor<W: Word>(&self, offset: u64, operand: W) -> Result<W> {
        self.atomic(offset, "fetch-and-xor", Atomic::new(AtomicOp::Xor, W::WIDTH, operand.to_u64()))
    }

    #[inline]
    fn atomic<W: Word>(&self, offset: u64, what: &'static str, atomic: Atomic) -> Result<W> {
        self.check(offset, W::WIDTH as usize)?;
        if let Some(word) = self.mapped(true).and_then(|mapped| mapped.atomic(self.peer(), offset, &atomic)) {
            return Ok(W::from_u64(word));
        }
        let answer = self.run(what, |state, token| {
            state.session.endpoint.post_atomic(token, self.handle(), offset, &atomic)
        })?;
        match answer {
            Answer::Word(word) => Ok(W::from_u64(word)),
            _ => Err(Error::Other("an atomic was answered with something else".to_owned())),
        }
    }
}

/// Executes a peer's atomic with one CPU instruction; `None` when the word is misaligned, beyond the end, or gone with the rest of its file.
#[inline]
pub(crate) fn execute(memory: &SharedSlice, offset: usize, atomic: &Atomic) -> Option<u64> {
    // Sequentially consistent: a peer cannot say less, and on the way over a network it costs nothing.
    const ORDER: Ordering = Ordering::SeqCst;
    let Atomic { op, operand, compare, .. } = *atomic;
    macro_rules! apply {
        ($word:expr, $width:ty) => {{
            let (word, operand, compare) = ($word, operand as $width, compare as $width);
            match op {
                AtomicOp::Load => word.load(ORDER),
                AtomicOp::Swap => word.swap(operand, ORDER),
                AtomicOp::CompareSwap => {
                    word.compare_exchange(compare, operand, ORDER, ORDER).unwrap_or_else(|now| now)
                }
                AtomicOp::Add => word.fetch_add(operand, ORDER),
                AtomicOp::And => word.fetch_and(operand, ORDER),
                AtomicOp::Or => word.fetch_or(operand, ORDER),
                AtomicOp::Xor => word.fetch_xor(operand, ORDER),
            }
        }};
    }
    if memory.is_guarded() {
        let change = |word| if op == AtomicOp::Load { None } else { Some(atomic.applied_to(word)) };
        return memory.update(offset, atomic.width as usize, change);
    }
    match atomic.width {
        Width::Four => memory.with_u32(offset, |word| u64::from(apply!(word, u32))),
        Width::Eight => memory.with_u64(offset, |word| apply!(word, u64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_does_what_the_model_says() {
        use AtomicOp::{Add, And, CompareSwap, Load, Or, Swap, Xor};
        let mapping = crate::node::Node::memory(4096).unwrap();
        let memory = mapping.shared();
        let (old, operand) = (0xF0F0_1234_FFFF_FFFF_u64, 0x0FF0_0001_0000_0003_u64);
        for width in [Width::Four, Width::Eight] {
            for op in [Load, Swap, CompareSwap, Add, And, Or, Xor] {
                for compare in [old, old ^ 1] {
                    memory.with_u64(8, |word| word.store(old, Ordering::Relaxed));
                    let atomic = Atomic { op, width, operand, compare };
                    let seen = execute(&memory, 8, &atomic).unwrap();
                    let now = execute(&memory, 8, &Atomic::new(Load, width, 0)).unwrap();
                    assert_eq!(now, atomic.applied_to(seen), "{atomic:?}");
                }
            }
        }
        let load = Atomic::new(Load, Width::Eight, 0);
        assert_eq!((execute(&memory, 4, &load), execute(&memory, 4096, &load)), (None, None));
    }
}
