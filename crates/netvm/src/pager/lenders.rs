//! What a program may know of its lenders, one by one.

use super::Pager;
use super::end::Desk;
use super::engine::Engine;
use crate::detail::LENDERS_COUNTED;

/// A lender of a pager, as of now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LenderState {
    /// As it was named to the pager.
    pub address: String,
    /// Why it is not there: it was lost, and may come back, or it has left. `None`: it is there.
    pub lost: Option<String>,
    /// Bytes of pages that it holds, each copy and part counted.
    pub held_bytes: u64,
    /// Bytes that were read from it. This and the rest are counted for the first 31 lenders of a pager, and 0 for others.
    pub read_bytes: u64,
    /// Bytes that were written to it.
    pub written_bytes: u64,
    /// Reads that it answered,
    pub reads: u64,
    /// and nanoseconds that they took, all together.
    pub reads_ns: u64,
}

impl LenderState {
    /// Adds what another shard of the same pager knows of the same lender.
    fn add(&mut self, other: &Self) {
        self.lost = self.lost.take().or_else(|| other.lost.clone());
        self.held_bytes += other.held_bytes;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.reads += other.reads;
        self.reads_ns += other.reads_ns;
    }
}

impl Pager {
    /// The lenders, in the order in which they were named: which of them are there, and what each holds. None, in the child of a fork.
    pub fn lenders(&self) -> Vec<LenderState> {
        let mut all = self.shards.iter().map(|shard| shard.lenders(self));
        let mut lenders = all.next().unwrap_or_default();
        for others in all {
            lenders.iter_mut().zip(&others).for_each(|(lender, other)| lender.add(other));
        }
        lenders
    }
}

impl Engine {
    /// Leaves what is known of each lender at the doorbell.
    pub(super) fn tell_lenders(&self, desk: &Desk) {
        let detail = &self.backing.detail;
        let state = |lender: u32| {
            let side = &self.backing.sides()[lender];
            // The last number counts several together.
            let own = (lender as usize) < LENDERS_COUNTED - 1;
            let counted =
                |counts: &[(u64, u64); LENDERS_COUNTED]| if own { counts[lender as usize] } else { (0, 0) };
            let (read_bytes, written_bytes) = counted(&detail.lenders);
            let (reads, reads_ns) = counted(&detail.lender_reads);
            LenderState {
                address: side.address.clone(),
                lost: side.lost.as_ref().map(ToString::to_string),
                held_bytes: self.backing.held_bytes(lender),
                read_bytes,
                written_bytes,
                reads,
                reads_ns,
            }
        };
        *desk.doorbell.lenders() = (0..self.backing.sides().len()).map(state).collect();
    }
}
