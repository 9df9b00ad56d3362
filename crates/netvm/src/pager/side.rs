//! The lenders of a pager: how fast they answer, whether they do, and those that were lost.

use crate::error::{Error, Result, Scope};
use crate::lender::{BorrowOptions, Borrower, Comeback, Debt, Ear, HEARD, Patience, SILENCE};
use crate::link::greeting::STOPPING;
use netvm_core::residency::SlabCopy;
use std::ops::{Index, IndexMut};
use std::time::{Duration, Instant};

/// A read is asked of another lender, too, after so many times what reads usually take,
const LATE_FACTOR: u64 = 8;
/// but not before so long,
const LATE_NS_MIN: u64 = 3_000_000;
/// and so much later for each byte.
const LATE_NS_PER_BYTE: u64 = 10;
/// A read counts as so many times the average at most.
const OUTLIER: u64 = 4;
/// Every so many reads the second best is asked, to see whether it still is.
const TRY_OTHER: u32 = 128;
/// unless it costs so much more besides that it would hardly ever be.
const TRY_EXTRA_NS_MAX: u64 = 10_000;

/// A lender that was back for so long is looked for soon when it is lost again.
const STAYED: Duration = Duration::from_secs(10);

/// One lender.
pub(super) struct Side {
    pub(super) address: String,
    pub(super) borrower: Option<Borrower>,
    pub(super) lost: Option<Error>,
    /// It has returned a wrong page: it is not taken back.
    pub(super) distrusted: bool,
    /// A read of it is overdue.
    pub(super) late: bool,
    /// Reads under way that threads wait for by themselves.
    pub(super) alone: u32,
    /// What a read takes besides its bytes, smoothed, in nanoseconds; 0 before the first.
    usual_ns: u64,
    /// The same over a longer time: by it places are chosen.
    read_ns: u64,
    comeback: Option<Comeback>,
    /// When it was back last.
    back: Option<Instant>,
    /// It was not lost, but left, as it asked for that.
    pub(super) left: bool,
    ear: Ear,
    probed: Instant,
}

impl Side {
    fn debt(&mut self, now: Instant) -> Debt {
        let live = self.borrower.as_mut().filter(|_| self.lost.is_none());
        live.map(|borrower| borrower.debt(now)).unwrap_or_default()
    }

    /// Whether it may be asked by datagrams.
    pub(super) fn asks(&self) -> bool {
        self.borrower.as_ref().is_some_and(Borrower::asks)
    }

    /// When a read of `bytes` bytes is overdue.
    pub(super) fn limit(&self, bytes: usize) -> Duration {
        let usual = (self.usual_ns * LATE_FACTOR).max(LATE_NS_MIN);
        Duration::from_nanos(usual + bytes as u64 * LATE_NS_PER_BYTE)
    }

    /// A read of `bytes` bytes took `time`.
    pub(super) fn answered(&mut self, time: Duration, bytes: usize) {
        self.late = false;
        let time = (time.as_nanos() as u64).saturating_sub(bytes as u64 * LATE_NS_PER_BYTE);
        self.usual_ns = if self.usual_ns == 0 { time } else { (self.usual_ns * 7 + time) / 8 };
        let time = if self.read_ns == 0 { time } else { time.min(self.read_ns * OUTLIER) };
        self.read_ns = if self.read_ns == 0 { time } else { (self.read_ns * 63 + time).div_ceil(64) };
    }

    /// What a read takes besides its bytes, over a longer time, in nanoseconds; 0 before the first.
    pub(super) fn read_ns(&self) -> u64 {
        self.read_ns
    }

    /// How long a read would take, about.
    fn cost(&self) -> u64 {
        let pending = self.borrower.as_ref().map_or(0, Borrower::pending) as u64 + u64::from(self.alone);
        if self.late { u64::MAX } else { self.usual_ns.max(1) * (pending + 1) }
    }
}

/// All of them, by number.
pub(super) struct Sides {
    sides: Vec<Side>,
    options: BorrowOptions,
    hook: Option<fn()>,
    silence_max: Duration,
    replicas: usize,
    patience: Patience,
    chosen: u32,
}

impl Index<u32> for Sides {
    type Output = Side;

    fn index(&self, lender: u32) -> &Side {
        &self.sides[lender as usize]
    }
}

impl IndexMut<u32> for Sides {
    fn index_mut(&mut self, lender: u32) -> &mut Side {
        &mut self.sides[lender as usize]
    }
}

impl Sides {
    /// With `known` a lender that cannot be reached is lost from the beginning; so are those with a bit in `left`, in any case. They, and
    /// those with a bit in `known`, get little time to be reached. With `left` those that are about to leave get a bit there, too.
    pub(super) fn connect(
        addresses: &[String],
        options: BorrowOptions,
        hook: Option<fn()>,
        replicas: usize,
        silence_max: Duration,
        known: Option<u64>,
        mut left: Option<&mut u64>,
    ) -> Result<Self> {
        let (sides, now) = (Vec::new(), Instant::now());
        let patience = Patience::new(now, SILENCE);
        let mut all = Self { sides, options, hook, silence_max, replicas, patience, chosen: 0 };
        let is_in = |lenders: u64, lender: usize| {
            lenders.checked_shr(lender as u32).is_some_and(|bits| bits & 1 == 1)
        };
        let left_before = left.as_deref().copied().unwrap_or(0);
        let lost_before = |lender| is_in(known.unwrap_or(0) | left_before, lender);
        let hasty = BorrowOptions { connect_timeout: SILENCE, call_timeout: SILENCE, ..all.options.clone() };
        let options = |lender| if lost_before(lender) { &hasty } else { &all.options };
        let each = addresses.iter().enumerate().map(|(lender, address)| (&address[..], options(lender)));
        for (lender, connected) in Borrower::connect_all(each).into_iter().enumerate() {
            let is_leaving = matches!(&connected, Err(Error::Refused { reason, .. }) if reason == STOPPING);
            if let Some(left) = left.as_deref_mut().filter(|_| is_leaving && lender < 64) {
                *left |= 1 << lender;
            }
            let may_be_gone = known.is_some() || is_in(left.as_deref().copied().unwrap_or(0), lender);
            let (borrower, lost) = match connected {
                Ok(mut borrower) => {
                    borrower.set_call_timeout(all.options.call_timeout);
                    (Some(borrower), None)
                }
                Err(error) if may_be_gone && error.scope() == Scope::Link => (None, Some(error)),
                Err(error) => return Err(error),
            };
            all.sides.push(Side {
                address: addresses[lender].clone(),
                borrower,
                lost,
                distrusted: false,
                late: false,
                alone: 0,
                usual_ns: 0,
                read_ns: 0,
                comeback: None,
                back: None,
                left: false,
                ear: Ear::default(),
                probed: now,
            });
        }
        Ok(all)
    }

    pub(super) fn len(&self) -> u32 {
        self.sides.len() as u32
    }

    pub(super) fn borrowers(&self) -> impl Iterator<Item = &Borrower> + Clone + '_ {
        self.sides.iter().filter_map(|side| side.borrower.as_ref())
    }

    /// The connection to a lender that is not lost.
    pub(super) fn live(&mut self, lender: u32) -> Option<&mut Borrower> {
        let side = &mut self[lender];
        side.borrower.as_mut().filter(|_| side.lost.is_none())
    }

    /// The same, for a call: with replicas nobody waits for one lender's answer for longer than it may be silent.
    pub(super) fn caller(&mut self, lender: u32) -> Option<&mut Borrower> {
        if self.replicas > 1 {
            self.look(Instant::now());
            let timeout = self.patience.call_timeout(&self[lender].ear, self.silence_max);
            self.live(lender)?.set_call_timeout(timeout);
        }
        self.live(lender)
    }

    /// The copy that is read soonest.
    #[inline]
    pub(super) fn choose(&mut self, copies: &[SlabCopy]) -> Option<SlabCopy> {
        if let [only] = copies {
            return Some(*only);
        }
        self.chosen = self.chosen.wrapping_add(1);
        let try_other = self.chosen.is_multiple_of(TRY_OTHER);
        let cost = |copy: &&SlabCopy| self[copy.lender].cost();
        let best = copies.iter().min_by_key(cost)?;
        let second = copies.iter().filter(|copy| copy.lender != best.lender && try_other);
        let second = second.min_by_key(cost).filter(|copy| !self[copy.lender].late);
        Some(*second.unwrap_or(best))
    }

    /// Of lenders that have a part each, the one whose part is had soonest; `extra_ns` is what it costs besides.
    pub(super) fn choose_part<'a>(
        &mut self,
        copies: impl Iterator<Item = &'a SlabCopy> + Clone,
        extra_ns: impl Fn(&SlabCopy) -> u64,
    ) -> Option<SlabCopy> {
        self.chosen = self.chosen.wrapping_add(1);
        let cost = |copy: &&SlabCopy| self[copy.lender].cost().saturating_add(extra_ns(copy));
        if self.chosen.is_multiple_of(TRY_OTHER) {
            let is_cheap = |copy: &&SlabCopy| extra_ns(copy) <= TRY_EXTRA_NS_MAX;
            let others = copies.clone().filter(is_cheap).filter(|copy| !self[copy.lender].late);
            if let Some(other) = others.max_by_key(cost) {
                return Some(*other);
            }
        }
        copies.min_by_key(cost).copied()
    }

    /// Notes that a lender is lost; false when it was before.
    pub(super) fn lose(&mut self, lender: u32, error: Error) -> bool {
        let side = &mut self[lender];
        if side.lost.is_some() {
            return false;
        }
        if let Some(borrower) = &mut side.borrower {
            // All that is under way ends with the next poll.
            borrower.abandon("it was given up");
        }
        (side.lost, side.late, side.ear) = (Some(error), false, Ear::default());
        true
    }

    pub(super) fn any_lost(&self) -> bool {
        self.sides.iter().any(|side| side.lost.is_some())
    }

    /// Why those that are lost are lost.
    pub(super) fn losses(&self) -> String {
        let losses: Vec<_> =
            self.sides.iter().filter_map(|side| side.lost.as_ref()).map(Error::to_string).collect();
        losses.join("; ")
    }

    fn timeout(&self, lender: usize, after: Duration) -> Error {
        let lender = self.sides[lender].address.clone();
        Error::Timeout { lender, what: "a page", after_ms: after.as_millis() as u64 }
    }

    /// Asks for signs of life where nothing else is asked, and others have what it has.
    pub(super) fn probe(&mut self, now: Instant) {
        if self.replicas == 1 {
            return;
        }
        for side in &mut self.sides {
            if let Some(borrower) = side.borrower.as_mut().filter(|_| side.lost.is_none())
                && now.saturating_duration_since(side.probed) >= HEARD
            {
                side.probed = now;
                borrower.probe();
            }
        }
    }

    /// When to look again though nothing happens.
    pub(super) fn probe_patience(&self) -> Duration {
        let waits = self.borrowers().any(Borrower::is_only_probed);
        if waits { HEARD } else { Duration::from_secs(1) }
    }

    /// Counts who is silent, as far as we look.
    fn look(&mut self, now: Instant) {
        self.patience.look(now);
        for side in self.sides.iter_mut().filter(|side| side.lost.is_none()) {
            let debt = side.debt(now);
            self.patience.hear(&mut side.ear, debt);
        }
        for side in self.sides.iter_mut().filter(|side| side.lost.is_none()) {
            let debt = side.debt(now);
            self.patience.wait(&mut side.ear, debt);
        }
    }

    /// A bit for each lender that is given up if that is possible: it is silent, and others are not.
    pub(super) fn doubtful(&mut self, now: Instant) -> u64 {
        self.look(now);
        let sides = self.sides.iter().enumerate();
        sides.fold(0, |bits, (lender, side)| bits | u64::from(self.patience.is_missed(&side.ear)) << lender)
    }

    /// A lender that is to be given up.
    pub(super) fn silent(&self, can_spare: bool) -> Option<(u32, Error)> {
        let late = |side: &Side| {
            side.ear.silent() > self.silence_max || (can_spare && self.patience.is_missed(&side.ear))
        };
        let lender = self.sides.iter().position(|side| side.lost.is_none() && late(side))?;
        Some((lender as u32, self.timeout(lender, self.sides[lender].ear.silent())))
    }

    /// A lost lender that can be used again, as one that has nothing; its slabs have `bytes_min` bytes at least.
    pub(super) fn come_back(&mut self, bytes_min: u64) -> Option<u32> {
        for lender in 0..self.sides.len() {
            let side = &mut self.sides[lender];
            if side.lost.is_none() {
                continue;
            }
            // All that was under way has been reported.
            if let Some(borrower) = side.borrower.take_if(|borrower| borrower.pending() == 0) {
                borrower.let_go(self.hook);
            }
            if side.borrower.is_some() || side.distrusted {
                continue;
            }
            if side.comeback.is_none() {
                // Who comes and goes all the time is not to be repaired all the time.
                let slowly = side.left || side.back.is_some_and(|back| back.elapsed() < STAYED);
                side.comeback = Comeback::start(&side.address, &self.options, self.hook, slowly);
            }
            let found = side.comeback.as_mut().and_then(Comeback::take);
            let Some(mut borrower) = found else { continue };
            side.comeback = None;
            let is_other = |other: &Borrower| self.replicas > 1 && borrower.is_at_lender_of(other);
            let slab_bytes = borrower.slab_bytes();
            if slab_bytes < bytes_min || self.borrowers().any(is_other) {
                // Another lender than before at the same address.
                let side = &mut self.sides[lender];
                side.distrusted = true;
                let why = match slab_bytes < bytes_min {
                    true => format!(
                        "with slabs of {slab_bytes} bytes, smaller than the {bytes_min} in use; start it with the --slab it had"
                    ),
                    false => "as another of this run's lenders".to_owned(),
                };
                side.lost = Some(Error::Other(format!("{} came back {why}", side.address)));
                continue;
            }
            borrower.set_call_timeout(self.options.call_timeout);
            let side = &mut self.sides[lender];
            (side.borrower, side.lost, side.back) = (Some(borrower), None, Some(Instant::now()));
            side.left = false;
            (side.usual_ns, side.read_ns) = (0, 0);
            return Some(lender as u32);
        }
        None
    }

    /// How the thread that forks takes connections over for the child.
    pub(super) fn fork_options(&self) -> BorrowOptions {
        let limit = if self.replicas > 1 { SILENCE } else { self.options.call_timeout };
        BorrowOptions { connect_timeout: limit, call_timeout: limit, ..self.options.clone() }
    }

    /// After a fork, in the child: the parent's connections and threads do not exist here.
    pub(super) fn adopt(&mut self, lender: u32, borrower: Option<Borrower>) {
        let side = &mut self[lender];
        borrower.iter().for_each(Borrower::keep_from_children);
        std::mem::forget(std::mem::replace(&mut side.borrower, borrower));
        std::mem::forget(side.comeback.take());
        (side.late, side.ear, side.probed) = (false, Ear::default(), Instant::now());
    }
}
