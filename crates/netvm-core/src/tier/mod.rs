//! Where an evicted page goes, packed into local memory or to a lender, and the accounts of the packed ones: policies without memory,
//! clock or network. `netvm::pager` carries out what they decide. See docs/design/tiers.md.

mod buckets;
mod choice;
#[cfg(test)]
mod choice_tests;
mod pool;
#[cfg(test)]
mod pool_tests;

pub use choice::{Average, Choice, Costs, Policy, STEPS, STEPS_MAX};
pub use pool::{CHUNK_BYTES, FRAME_CHUNKS, PackedPool, Piece, PieceId};
