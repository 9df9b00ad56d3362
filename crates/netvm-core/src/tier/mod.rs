//! Where an evicted page goes, packed into local memory or to a lender, and the accounts of the packed ones, here and at lenders that pack:
//! policies without memory, clock or network. `netvm::pager` and `netvm::lender` carry out what they decide. See docs/design/tiers.md.

mod buckets;
mod choice;
#[cfg(test)]
mod choice_tests;
#[cfg(test)]
mod places_tests;
mod pool;
#[cfg(test)]
mod pool_tests;
mod promises;
#[cfg(test)]
mod promises_tests;
mod shelf;
#[cfg(test)]
mod shelf_tests;

pub use choice::{Average, CLASSES, Choice, Costs, Policy, STEPS, STEPS_MAX};
pub use pool::{CHUNK_BYTES, FRAME_CHUNKS, PackedPool, Piece, PieceId};
pub use promises::{Promise, Promises};
pub use shelf::{FACTOR_MAX, Plan, Shelf, Spot};
