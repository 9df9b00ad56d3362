//! Counters of the pager.

macro_rules! stats {
    ($(#[doc = $help:literal] $name:ident),+ $(,)?) => {
        /// What a pager (or all pagers of a run) did. Counters only grow; gauges say so.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct PagerStats {
            $(#[doc = $help] pub $name: u64,)+
        }

        impl PagerStats {
            /// Number of fields.
            pub const FIELDS: usize = [$(stringify!($name)),+].len();
            /// Names of the fields, in order.
            pub const NAMES: [&'static str; Self::FIELDS] = [$(stringify!($name)),+];

            /// What the fields are, in order, in a sentence each.
            pub const HELP: [&'static str; Self::FIELDS] = [$($help),+];

            /// The fields in order.
            pub fn values(&self) -> [u64; Self::FIELDS] {
                [$(self.$name),+]
            }

            /// From the fields in order.
            pub fn from_values(values: [u64; Self::FIELDS]) -> Self {
                let [$($name),+] = values;
                Self { $($name),+ }
            }
        }
    };
}

stats! {
    /// Page faults served.
    faults,
    /// Of these, faults that needed no I/O: their pages were there, new, packed, or in a local frame yet.
    faults_without_io,
    /// Times that pages which had been evicted were still in local frames.
    rescues,
    /// Pages read from lenders.
    remote_reads,
    /// Of these, pages that whoever wanted them read from the memory of a lender on this host, at once.
    read_at_once,
    /// Datagrams with a page, or a part of one, that lenders' kernels have sent, before anybody was woken there.
    kernel_reads,
    /// Reads by datagrams that had to be done over the connection after all.
    datagrams_given_up,
    /// Pages that came wrong by datagrams, and were read again over the connection: nobody is to blame.
    wrong_datagrams,
    /// Pages written to lenders.
    remote_writes,
    /// Pages that were touched for the first time.
    zero_fills,
    /// Pages read ahead of demand into local frames: behind those of a window that is mapped with the page that is wanted, whose use nobody sees.
    prefetched,
    /// Of these, pages that were wanted before they were given up: estimated from samples, which are left to fault.
    prefetch_hits,
    /// Pages asked for because they were wanted next the last time.
    foreseen,
    /// Of these, pages that were wanted: estimated from samples, which are left to fault.
    foreseen_hits,
    /// Pages that were away when the program named them (`will_need_each`; MADV_WILLNEED of little), with others of their unit.
    named,
    /// Pages evicted without a write because they had not changed.
    clean_drops,
    /// Evicted pages that nobody had written to and that left many at a time.
    left_together,
    /// Pages evicted without a write because they were all zero.
    zero_drops,
    /// Bytes read from lenders.
    bytes_in,
    /// Bytes written to lenders.
    bytes_out,
    /// Lenders that were lost, each time counted.
    lenders_lost,
    /// Lost lenders that came back.
    lenders_back,
    /// Pages that were copied to another lender because a copy was lost.
    pages_repaired,
    /// Pages that were moved to another lender because theirs asked for its memory.
    pages_moved,
    /// Pages that were moved to a cheaper lender because they were wanted often, or to a dearer one to make room for such.
    pages_sorted,
    /// Pages that were moved out of slabs that held few, so that these could go back to their lenders.
    pages_collected,
    /// Lenders that left when everything had been moved away.
    lenders_left,
    /// Time from losses until all pages had all their copies again, in milliseconds.
    repair_ms,
    /// Reads that were asked of a second lender because the first took too long.
    hedged_reads,
    /// Pages that came back from a lender with wrong contents and were read from another.
    wrong_pages,
    /// Longest time that a read from a lender took, in microseconds.
    read_us_peak,
    /// Gauge: pages that have fewer copies than they should have.
    pages_unprotected,
    /// Gauge: far pages that hold contents now.
    far_pages,
    /// Gauge: local frames in use now (4096 bytes each), and those that were given up for single pages to come.
    local_frames,
    /// Most local frames in use at any time.
    local_frames_peak,
    /// Pages packed into local memory.
    packed,
    /// Bytes of local memory that they took.
    packed_bytes,
    /// Pages brought in by unpacking.
    unpacked,
    /// Pages that were tried and did not become small enough.
    incompressible,
    /// Packed pages that went on to a lender.
    spilled,
    /// Evicted pages that were one word repeated, not zero: they cost nothing.
    filled,
    /// Gauge: local frames that hold packed pages now; part of `local_frames`.
    pool_frames,
    /// Gauge: pages packed in them.
    pool_pages,
    /// Most local frames that held packed pages; of several processes the sum.
    pool_frames_peak,
    /// Times the part of the local memory for packed pages was changed.
    pool_changes,
    /// Pages that were packed to see how small they become, whether or not they stayed so.
    pack_tries,
    /// Nanoseconds spent on that, from samples.
    pack_ns,
    /// Nanoseconds spent unpacking, from samples.
    unpack_ns,
    /// Nanoseconds that faults waited for lenders.
    fetch_ns,
    /// Short ways from an answered fault to the next one, summed up, in nanoseconds.
    wake_ns,
    /// How many of them.
    wakes,
}

impl PagerStats {
    /// Whether the field of this name tells the present, not what has happened.
    pub fn is_gauge(name: &str) -> bool {
        matches!(name, "far_pages" | "local_frames" | "pool_frames" | "pool_pages" | "pages_unprotected")
    }

    /// Part of the pages read from lenders (0 to 1) that came without a fault that waited for them: what prefetch has covered. `None` when none were read.
    pub fn prefetch_coverage(&self) -> Option<f64> {
        let waited = self.faults.saturating_sub(self.faults_without_io).min(self.remote_reads);
        (self.remote_reads > 0).then(|| 1.0 - waited as f64 / self.remote_reads as f64)
    }

    /// Adds another pager's counters and gauges.
    pub fn add(&mut self, other: &Self) {
        let mut values = self.values();
        for (value, other) in values.iter_mut().zip(other.values()) {
            *value = value.wrapping_add(other);
        }
        let read_us_peak = self.read_us_peak.max(other.read_us_peak);
        *self = Self { read_us_peak, ..Self::from_values(values) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coverage_is_what_no_fault_waited_for() {
        let stats = |faults, faults_without_io, remote_reads| {
            PagerStats { faults, faults_without_io, remote_reads, ..PagerStats::default() }
                .prefetch_coverage()
        };
        assert_eq!(stats(10, 6, 16), Some(0.75));
        assert_eq!((stats(9, 9, 0), stats(9, 2, 7), stats(9, 0, 3)), (None, Some(0.0), Some(0.0)));
    }
}
