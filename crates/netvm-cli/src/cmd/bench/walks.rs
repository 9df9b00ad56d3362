//! `netvm bench fault --walks`: what an access costs when so much of the memory is local, whether it faults or not.

use std::error::Error;

use super::far::{self, Far, Started};
use super::fault::Placement;
use super::report::{Row, median_and_spread};
use super::swap::{self, Kind, Lent, Wanted};
use super::worker::{BY_THREADS, Case, Outcome};
use super::{PAGE_BYTES, floors};
use crate::size::Size;
use netvm_sys::bench_floor::unpin_thread;
use netvm_sys::cpu::pin;

type Failure = Box<dyn Error>;

/// Netvm without packed pages.
const LENDER_ONLY: &str = "netvm-lender";

/// What is measured.
#[derive(Clone, Debug)]
pub struct Walks<'a> {
    pub placements: &'a [Placement],
    pub cpus: &'a [usize],
    /// Parts of the memory that are local, in percent.
    pub percents: &'a [u32],
    pub far: Far,
    pub cases: &'a [Case],
    pub repetitions: usize,
    /// Swap as well.
    pub peers: bool,
}

/// Microseconds that a page takes at least which is not local.
#[derive(Debug, Default)]
struct Floors {
    random: Vec<f64>,
    sequential: Vec<f64>,
}

impl Floors {
    /// Of an access when so much is local: the other pages have to come, whoever chooses them. Zipf's law says not how many that are.
    fn of(&self, case: Case, percent: u32) -> Option<f64> {
        let floors = match case {
            Case::Zipf => return None,
            // What comes many at a time waits for no round trip, and without a fault.
            Case::Sequential | Case::UniformNamed => &self.sequential,
            _ => &self.random,
        };
        let (floor, _) = median_and_spread(floors)?;
        Some(floor * f64::from(100 - percent) / 100.0)
    }
}

impl Walks<'_> {
    /// All rows.
    ///
    /// # Errors
    /// When the far memory or a floor cannot be had.
    pub fn rows(&self) -> Result<Vec<Row>, Failure> {
        if let Some(percent) = self.percents.iter().find(|&&p| self.local_bytes(p) >= self.far.size_bytes) {
            let size = Size(self.far.size_bytes);
            return Err(format!("--size {size} is too small to have {percent} % of it local").into());
        }
        let mut rows = Vec::new();
        for &percent in self.percents {
            for compressible in [false, true] {
                for &placement in self.placements {
                    self.measure(placement, percent, compressible, &mut rows)?;
                }
                if self.peers {
                    for kind in [Kind::Zram, Kind::Disk] {
                        self.swap(percent, compressible, kind, &mut rows);
                    }
                }
            }
        }
        Ok(rows)
    }

    fn local_bytes(&self, percent: u32) -> u64 {
        (self.far.size_bytes / 100 * u64::from(percent)).next_multiple_of(1 << 20)
    }

    /// One thread, and then several if that is wanted.
    fn threads(&self) -> Vec<u8> {
        if self.far.threads > 1 { vec![1, self.far.threads] } else { vec![1] }
    }

    fn start(
        &self,
        placement: Placement,
        percent: u32,
        compressible: bool,
        peer: Option<&str>,
    ) -> Result<Started, Failure> {
        unpin_thread(self.cpus)?;
        let tier = if peer == Some(LENDER_ONLY) { "lender" } else { "auto" };
        let compressible = if compressible { "--compressible" } else { "" };
        let more = format!("--tier {tier} {compressible}");
        self.far.start(placement, self.local_bytes(percent), placement.lender.is_none(), &more)
    }

    /// A bare fault and a bare round trip; a page of a bare stream.
    fn floor(&self, placement: Placement, echo: &str, floors: &mut Floors) -> Result<(), Failure> {
        let be = |cpu: Option<usize>| cpu.map_or_else(|| unpin_thread(self.cpus), pin);
        let time = self.far.case / 6;
        be(placement.pager)?;
        // Where the lender's memory is shared nothing crosses a network.
        let (trip, stream) = match placement.is_nearby() {
            true => (0.0, floors::copy_sequential(time)?),
            false => (floors::round_trip(echo, placement.spin, time)?.median, floors::stream(echo, time)?),
        };
        be(placement.program)?;
        let fault = floors::fault(false, placement.pager, time)?;
        unpin_thread(self.cpus)?;
        floors.random.push(trip + fault.median);
        floors.sequential.push(PAGE_BYTES as f64 / 1e3 / stream.median);
        Ok(())
    }

    fn measure(
        &self,
        placement: Placement,
        percent: u32,
        compressible: bool,
        rows: &mut Vec<Row>,
    ) -> Result<(), Failure> {
        unpin_thread(self.cpus)?;
        let (_echo, echo_address) = far::echo(placement)?;
        let mut pairs = Vec::new();
        for peer in [None, Some(LENDER_ONLY)] {
            pairs.push((peer, self.start(placement, percent, compressible, peer)?));
        }
        let mut floors = Floors::default();
        let mut found = Vec::new();
        for &case in self.cases {
            for threads in self.threads() {
                let name = name_of(case, threads);
                // What is local, and how it is divided up, follows the pattern only after a while.
                for _ in 0..if threads == 1 { 3 } else { 1 } {
                    for (_, started) in &mut pairs {
                        started.worker.ask(&name)?;
                    }
                }
                let mut outcomes = vec![Vec::new(); pairs.len()];
                for _ in 0..self.repetitions {
                    self.floor(placement, &echo_address, &mut floors)?;
                    for ((_, started), outcomes) in pairs.iter_mut().zip(&mut outcomes) {
                        outcomes.push(started.worker.ask(&name)?);
                    }
                }
                let peers = pairs.iter().map(|(peer, _)| *peer);
                found.extend(peers.zip(outcomes).map(|(peer, outcomes)| (case, threads, peer, outcomes)));
            }
        }
        drop(pairs);
        for (case, threads, peer, outcomes) in found {
            let link = match case {
                // What comes many at a time goes over the session, whoever answers single reads.
                Case::UniformNamed if !placement.is_nearby() => "tcp",
                _ => placement.link_name(),
            };
            let mut row = row(percent, compressible, case, threads, &outcomes);
            (row.peer, row.placement, row.link) = (peer, Some(placement.name), Some(link.into()));
            row.floor = floors.of(case, percent);
            row.ratio = row.floor.and_then(|floor| Some(row.median? / floor));
            rows.push(row);
        }
        Ok(())
    }

    fn swap(&self, percent: u32, compressible: bool, kind: Kind, rows: &mut Vec<Row>) {
        let wanted = Wanted {
            kind,
            lent: &Lent::default(),
            waits_only: false,
            compressible,
            local_bytes: self.local_bytes(percent),
            size_bytes: self.far.size_bytes,
            case_ms: self.far.case.as_millis() as u64,
            repetitions: self.repetitions,
            cases: self.cases,
        };
        match swap::measure(&wanted) {
            Ok(measured) => {
                for (case, outcomes) in measured.outcomes {
                    let mut row = row(percent, compressible, case, 1, &outcomes);
                    row.peer = Some(kind.peer());
                    rows.push(row);
                }
            }
            Err(error) => {
                for &case in self.cases {
                    let mut row = row(percent, compressible, case, 1, &[]);
                    row.peer = Some(kind.peer());
                    row.note = format!("skipped ({error})");
                    rows.push(row);
                }
            }
        }
    }
}

/// What a worker is asked for.
fn name_of(case: Case, threads: u8) -> String {
    format!("{}{}", case.name(), if threads > 1 { BY_THREADS } else { "" })
}

fn row(percent: u32, compressible: bool, case: Case, threads: u8, outcomes: &[Outcome]) -> Row {
    let half = if compressible { "-half" } else { "" };
    let by = if threads > 1 { BY_THREADS } else { "" };
    let mut row = Row::new("fault", format!("{}-{percent}{half}{by}", case.name()), "us");
    row.size_bytes = Some(8);
    let medians: Vec<_> = outcomes.iter().map(|outcome| outcome.median).collect();
    let Some((median, spread)) = median_and_spread(&medians) else { return row };
    row.median = Some(median);
    row.spread = Some(spread);
    row.per_s = Some(1e6 * f64::from(threads) / median);
    row.n = outcomes.iter().map(|outcome| outcome.n).sum();
    let most = |value: fn(&Outcome) -> u64| outcomes.iter().map(value).max().unwrap_or(0);
    let (local, pool) = (most(|outcome| outcome.local_bytes_peak), most(|outcome| outcome.pool_bytes));
    row.note = format!("local {}", Size(local));
    if pool > 0 {
        row.note += &format!(", packed {}", Size(pool));
    }
    if threads > 1 {
        row.note += &format!(", {threads} threads");
    }
    row
}
