//! `netvm bench fault --walks`: what an access costs when so much of the memory is local, whether it faults or not.

use std::error::Error;
use std::time::Duration;

use netvm::pager::FaultPath;

use super::child::Helper;
use super::fault::Placement;
use super::floors;
use super::report::{Row, median_and_spread};
use super::swap::{self, Kind, Lent, Wanted};
use super::worker::{Case, Outcome};
use crate::size::Size;
use netvm_sys::bench_floor::unpin_thread;
use netvm_sys::cpu::pin;

type Failure = Box<dyn Error>;

/// Netvm without packed pages.
const LENDER_ONLY: &str = "netvm-lender";

/// What is measured.
#[derive(Clone, Debug)]
pub struct Walks<'a> {
    pub placement: Placement,
    pub cpus: &'a [usize],
    /// Parts of the memory that are local, in percent.
    pub percents: &'a [u32],
    pub size_bytes: u64,
    pub repetitions: usize,
    /// Time of one repetition of one case.
    pub case: Duration,
    /// Who serves faults.
    pub fault_path: FaultPath,
    /// Swap as well.
    pub peers: bool,
}

/// A worker and its lender.
struct Pair {
    peer: Option<&'static str>,
    worker: Helper,
    _lender: Helper,
}

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

impl Walks<'_> {
    /// All rows.
    ///
    /// # Errors
    /// When the far memory or a floor cannot be had.
    pub fn rows(&self) -> Result<Vec<Row>, Failure> {
        let mut rows = Vec::new();
        for &percent in self.percents {
            for compressible in [false, true] {
                self.measure(percent, compressible, &mut rows)?;
            }
        }
        Ok(rows)
    }

    fn local_bytes(&self, percent: u32) -> u64 {
        (self.size_bytes / 100 * u64::from(percent)).next_multiple_of(1 << 20)
    }

    fn start(&self, percent: u32, compressible: bool, peer: Option<&'static str>) -> Result<Pair, Failure> {
        unpin_thread(self.cpus)?;
        let pinned = |name: &str, cpu: Option<usize>| match cpu {
            Some(cpu) => vec![format!("--{name}"), cpu.to_string()],
            None => Vec::new(),
        };
        let lent = self.size_bytes.next_multiple_of(16 << 20) + (64 << 20);
        let mut command = words(&format!("lend --private --listen 127.0.0.1:0 --size {lent}"));
        command.extend(pinned("cpu", self.placement.lender));
        if self.placement.spin {
            command.extend(words("--spin-us 1000"));
        }
        let mut lender = Helper::start(&command, false)?;
        let said = lender.line()?;
        let address = said.rsplit(' ').next().unwrap_or_default();
        let mut command = words(&format!(
            "bench worker --lender {address} --fault-path {} --local-bytes {} --size-bytes {} --case-ms {} --tier {}",
            self.fault_path,
            self.local_bytes(percent),
            self.size_bytes,
            self.case.as_millis(),
            if peer == Some(LENDER_ONLY) { "lender" } else { "auto" },
        ));
        command.extend(pinned("cpu", self.placement.program));
        command.extend(pinned("pager-cpu", self.placement.pager));
        command.extend(compressible.then(|| "--compressible".to_owned()));
        command.extend(words(if self.placement.nearby { "--link shm" } else { "--link socket" }));
        if self.placement.lender.is_none() {
            command.extend(words(&format!("--private-lender {}", lender.pid())));
        }
        let mut worker = Helper::start(&command, false)?;
        worker.ask("fill")?;
        Ok(Pair { peer, worker, _lender: lender })
    }

    /// A bare fault and a bare round trip, in microseconds.
    fn floor(&self, echo: &str) -> Result<f64, Failure> {
        let be = |cpu: Option<usize>| cpu.map_or_else(|| unpin_thread(self.cpus), pin);
        be(self.placement.pager)?;
        let trip = floors::round_trip(echo, self.placement.spin, self.case / 6)?;
        be(self.placement.program)?;
        let fault = floors::fault(false, self.placement.pager, self.case / 6)?;
        unpin_thread(self.cpus)?;
        Ok(trip.median + fault.median)
    }

    fn measure(&self, percent: u32, compressible: bool, rows: &mut Vec<Row>) -> Result<(), Failure> {
        let mut command = words("bench echo");
        command.extend(self.placement.lender.iter().flat_map(|cpu| ["--cpu".to_owned(), cpu.to_string()]));
        command.extend(self.placement.spin.then(|| "--spin".to_owned()));
        unpin_thread(self.cpus)?;
        let mut echo = Helper::start(&command, false)?;
        let echo_address = echo.line()?;
        let mut pairs = Vec::new();
        for peer in [None, Some(LENDER_ONLY)] {
            pairs.push(self.start(percent, compressible, peer)?);
        }
        let mut floor = Vec::new();
        let mut found: Vec<(Case, Option<&'static str>, Vec<Outcome>)> = Vec::new();
        for case in Case::WALKS {
            for pair in &mut pairs {
                // What is local, and how it is divided up, follows the pattern only after a while.
                for _ in 0..3 {
                    pair.worker.ask(case.name())?;
                }
            }
            let mut outcomes: Vec<_> = pairs.iter().map(|pair| (case, pair.peer, Vec::new())).collect();
            for _ in 0..self.repetitions {
                floor.push(self.floor(&echo_address)?);
                for (pair, (.., outcomes)) in pairs.iter_mut().zip(&mut outcomes) {
                    outcomes.push(pair.worker.ask(case.name())?);
                }
            }
            found.extend(outcomes);
        }
        drop(pairs);
        let floor = median_and_spread(&floor).map(|(median, _)| median);
        let placement = Some(self.placement.name);
        let link = if self.placement.nearby { "shm" } else { "tcp" };
        for (case, peer, outcomes) in found {
            let mut row = self.row(percent, compressible, case, &outcomes);
            (row.peer, row.placement, row.link) = (peer, placement, Some(link.into()));
            // The pages that are not local have to fault, whoever chooses them.
            row.floor =
                floor.filter(|_| case != Case::Zipf).map(|floor| floor * f64::from(100 - percent) / 100.0);
            row.ratio = row.floor.and_then(|floor| Some(row.median? / floor));
            rows.push(row);
        }
        if self.peers {
            for kind in [Kind::Zram, Kind::Disk] {
                self.swap(percent, compressible, kind, rows);
            }
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
            size_bytes: self.size_bytes,
            case_ms: self.case.as_millis() as u64,
            repetitions: self.repetitions,
            cases: &Case::WALKS,
        };
        match swap::measure(&wanted) {
            Ok(measured) => {
                for (case, outcomes) in measured.outcomes {
                    let mut row = self.row(percent, compressible, case, &outcomes);
                    row.peer = Some(kind.peer());
                    rows.push(row);
                }
            }
            Err(error) => {
                for case in Case::WALKS {
                    let mut row = self.row(percent, compressible, case, &[]);
                    row.peer = Some(kind.peer());
                    row.note = format!("skipped ({error})");
                    rows.push(row);
                }
            }
        }
    }

    fn row(&self, percent: u32, compressible: bool, case: Case, outcomes: &[Outcome]) -> Row {
        let half = if compressible { "-half" } else { "" };
        let mut row = Row::new("fault", format!("{}-{percent}{half}", case.name()), "us");
        row.size_bytes = Some(8);
        let medians: Vec<_> = outcomes.iter().map(|outcome| outcome.median).collect();
        let Some((median, spread)) = median_and_spread(&medians) else { return row };
        row.median = Some(median);
        row.spread = Some(spread);
        row.per_s = Some(1e6 / median);
        row.n = outcomes.iter().map(|outcome| outcome.n).sum();
        let most = |value: fn(&Outcome) -> u64| outcomes.iter().map(value).max().unwrap_or(0);
        let (local, pool) = (most(|outcome| outcome.local_bytes_peak), most(|outcome| outcome.pool_bytes));
        row.note = format!("local {}", Size(local));
        if pool > 0 {
            row.note += &format!(", packed {}", Size(pool));
        }
        row
    }
}
