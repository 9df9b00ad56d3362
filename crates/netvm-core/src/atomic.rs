//! Operations that change a word of memory in one step and return what it was.

use crate::limits::ATOMIC_BYTES;
use crate::wire::{Header, Kind, Status};

/// How wide a word is. Words are aligned to their width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Width {
    /// 32 bits.
    Four = 4,
    /// 64 bits.
    Eight = 8,
}

/// What becomes of the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AtomicOp {
    /// It stays.
    Load = 0,
    /// It becomes the operand.
    Swap = 1,
    /// It becomes the operand if it equals the comparand.
    CompareSwap = 2,
    /// The operand is added, wrapping around.
    Add = 3,
    /// Bitwise and.
    And = 4,
    /// Bitwise or.
    Or = 5,
    /// Bitwise exclusive or.
    Xor = 6,
}

/// One operation with its operands. For a word of 32 bits only their lower halves count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Atomic {
    /// What becomes of the word.
    pub op: AtomicOp,
    /// How wide the word is.
    pub width: Width,
    /// See [`AtomicOp`].
    pub operand: u64,
    /// See [`AtomicOp::CompareSwap`].
    pub compare: u64,
}

impl Atomic {
    /// `op` with an operand.
    pub fn new(op: AtomicOp, width: Width, operand: u64) -> Self {
        Self { op, width, operand, compare: 0 }
    }

    /// `new` instead of `expected`.
    pub fn compare_swap(width: Width, expected: u64, new: u64) -> Self {
        Self { op: AtomicOp::CompareSwap, width, operand: new, compare: expected }
    }

    /// What `word` becomes: the meaning of each operation, for models and for memory that is not shared.
    pub fn applied_to(&self, word: u64) -> u64 {
        let Self { operand, compare, .. } = *self;
        let cut = |word: u64| if self.width == Width::Four { word & 0xFFFF_FFFF } else { word };
        cut(match self.op {
            AtomicOp::Load => word,
            AtomicOp::Swap => operand,
            AtomicOp::CompareSwap => {
                if cut(word) == cut(compare) {
                    operand
                } else {
                    word
                }
            }
            AtomicOp::Add => word.wrapping_add(operand),
            AtomicOp::And => word & operand,
            AtomicOp::Or => word | operand,
            AtomicOp::Xor => word ^ operand,
        })
    }

    /// The header of its request.
    pub fn header(&self) -> Header {
        Header {
            flags: self.op as u8,
            bytes: self.width as u32,
            payload_bytes: ATOMIC_BYTES as u32,
            ..Header::new(Kind::Atomic)
        }
    }

    /// The body of its request.
    pub fn body(&self) -> [u8; ATOMIC_BYTES] {
        let mut body = [0; ATOMIC_BYTES];
        body[..8].copy_from_slice(&self.operand.to_le_bytes());
        body[8..].copy_from_slice(&self.compare.to_le_bytes());
        body
    }

    /// Reads a request.
    ///
    /// # Errors
    /// [`Status::Unsupported`] for an operation or a width that we do not know, [`Status::BadRequest`] for a short body.
    pub fn decode(header: &Header, body: &[u8]) -> Result<Self, Status> {
        let op = match header.flags {
            0 => AtomicOp::Load,
            1 => AtomicOp::Swap,
            2 => AtomicOp::CompareSwap,
            3 => AtomicOp::Add,
            4 => AtomicOp::And,
            5 => AtomicOp::Or,
            6 => AtomicOp::Xor,
            _ => return Err(Status::Unsupported),
        };
        let width = match header.bytes {
            4 => Width::Four,
            8 => Width::Eight,
            _ => return Err(Status::Unsupported),
        };
        let body: &[u8; ATOMIC_BYTES] = body.try_into().map_err(|_| Status::BadRequest)?;
        let number = |at: usize| u64::from_le_bytes(core::array::from_fn(|index| body[at + index]));
        Ok(Self { op, width, operand: number(0), compare: number(8) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_32_bits_ignore_the_upper_half() {
        let high = 1 << 40;
        let cas = Atomic::compare_swap(Width::Four, high | 5, high | 9);
        assert_eq!((cas.applied_to(5), cas.applied_to(6)), (9, 6));
        let add = Atomic::new(AtomicOp::Add, Width::Four, 1);
        assert_eq!(add.applied_to(0xFFFF_FFFF), 0);
        let wide = Atomic::compare_swap(Width::Eight, high | 5, 9);
        assert_eq!((wide.applied_to(5), wide.applied_to(high | 5)), (5, 9));
    }

    #[test]
    fn unknown_requests_are_refused() {
        let good = Atomic::new(AtomicOp::Xor, Width::Eight, 3);
        assert_eq!(Atomic::decode(&good.header(), &good.body()), Ok(good));
        let odd = |flags, bytes| Atomic::decode(&Header { flags, bytes, ..good.header() }, &good.body());
        assert_eq!((odd(7, 8), odd(3, 5), odd(3, 0)), (unsupported(), unsupported(), unsupported()));
        assert_eq!(Atomic::decode(&good.header(), &[0; 15]), Err(Status::BadRequest));
    }

    fn unsupported() -> Result<Atomic, Status> {
        Err(Status::Unsupported)
    }
}
