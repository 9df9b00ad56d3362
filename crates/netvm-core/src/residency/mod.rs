//! Which pages are local, where the others are, which to fetch next and which to give up: the pager's policies, without
//! memory, clock or network. `netvm::pager` carries out what they decide.

mod blocks;
mod chain;
mod collect;
mod copies;
mod entry;
mod frames;
mod heat;
mod marks;
mod mend;
mod promote;
mod protect;
mod queue;
mod record;
mod replay;
mod returns;
mod simulate;
mod slots;
mod stream;
mod stride;
mod trend;
mod windows;

pub use blocks::{BLOCK_BYTES_MAX, WholeBlocks};
pub use chain::FrameChain;
pub use copies::{COPIES_MAX, Copies, DATA_PARTS_MAX, PARITY_PARTS_MAX, PARTS_MAX, Redundancy, SlabCopy};
pub use entry::{Entry, FRAME_MAX, PageState, SLOT_MAX};
pub use frames::FrameSet;
pub use marks::Marks;
pub use mend::{CHUNK_PAGES, Step, StepEnd};
pub use protect::Protection;
pub use queue::{Arrival, PageQueue};
pub use record::RECORD_MAX;
pub use replay::{Replay, Whereabouts};
pub use returns::Returns;
pub use simulate::{Eviction, Trace};
pub use slots::{ALL, Loss, SlabIndex, Slot, SlotMap};
pub use stream::{Ahead, MappedAhead, Streams};
pub use stride::Stride;
