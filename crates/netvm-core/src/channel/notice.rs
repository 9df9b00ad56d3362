//! What the two ends of a channel tell each other besides messages.

use alloc::vec::Vec;
use core::num::NonZeroU32;

use crate::limits::PUT_BYTES_MAX;
use crate::notify::Notify;

const CODE_BITS: u32 = 3;

/// A notification of the session, for one of the sending side's slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Told {
    /// To the sender: consumed up to here, or a place is here; in units of 8 bytes, 29 bits.
    Position(u32),
    /// To the sender: the receiver has gone.
    Ended,
    /// To the sender: what came with requests has its place up to here; in units of 8 bytes, 29 bits.
    Placed(u32),
    /// To the receiver: the block in the reserved place is there.
    Commit,
    /// To the receiver: nothing more will come.
    Close,
}

/// For which slot, and what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Notice {
    /// Slot of the sending side.
    pub slot: u16,
    /// What.
    pub told: Told,
}

impl Notice {
    /// As a notification.
    pub fn notify(self) -> Notify {
        let (code, number) = match self.told {
            Told::Position(units) => (0, units),
            Told::Ended => (1, 0),
            Told::Commit => (2, 0),
            Told::Close => (3, 0),
            Told::Placed(units) => (4, units),
        };
        Notify::Post { number: self.slot, value: NonZeroU32::MIN.saturating_add(code) | number << CODE_BITS }
    }

    /// Back; `None` when a peer sends what makes no sense.
    pub fn from_notify(notify: Notify) -> Option<Self> {
        let Notify::Post { number: slot, value } = notify else { return None };
        let number = value.get() >> CODE_BITS;
        let told = match value.get() & 7 {
            1 => Told::Position(number),
            2 if number == 0 => Told::Ended,
            3 if number == 0 => Told::Commit,
            4 if number == 0 => Told::Close,
            5 => Told::Placed(number),
            _ => return None,
        };
        Some(Self { slot, told })
    }
}

/// What a sender asks with a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ask<'a> {
    /// To become a sender, by its handle of the receiver's segment. Answered by shape, number, nonce, and length of the ring.
    Open {
        /// The handle.
        handle: u32,
    },
    /// A place for so many bytes. Answered by 1 and the place, or by 0 when it must wait.
    Reserve {
        /// With headers.
        bytes: u32,
    },
    /// To wait no longer. Answered by 1, or by 0 when the place is granted already.
    Cancel,
    /// A block of messages, for whichever place there is for it first. Answered by nothing.
    Put(&'a [u8]),
}

impl<'a> Ask<'a> {
    /// The body of the call: `| op 1 | 0 1 | slot 2 | number 4 |`; with a block instead of the number: `| 4 1 | 0 1 | slot 2 | block |`.
    pub fn encode(self, slot: u16) -> Vec<u8> {
        let (op, number) = match self {
            Self::Open { handle } => (1, handle),
            Self::Reserve { bytes } => (2, bytes),
            Self::Cancel => (3, 0),
            Self::Put(_) => (4, 0),
        };
        let number = u32::to_le_bytes(number);
        let rest = if let Self::Put(block) = self { block } else { &number };
        let mut body = Vec::with_capacity(4 + rest.len());
        body.extend_from_slice(&[op, 0]);
        body.extend_from_slice(&slot.to_le_bytes());
        body.extend_from_slice(rest);
        body
    }

    /// Back, with the slot; `None` when a peer sends what makes no sense.
    pub fn decode(body: &'a [u8]) -> Option<(u16, Self)> {
        let [op, 0, slot_low, slot_high, rest @ ..] = body else { return None };
        let number = || Some(u32::from_le_bytes(rest.try_into().ok()?));
        let ask = match op {
            1 => Self::Open { handle: number()? },
            2 => Self::Reserve { bytes: number()? },
            3 => number().map(|_| Self::Cancel)?,
            4 if rest.len().is_multiple_of(8) && rest.len() as u64 <= PUT_BYTES_MAX => Self::Put(rest),
            _ => return None,
        };
        Some((u16::from_le_bytes([*slot_low, *slot_high]), ask))
    }
}
