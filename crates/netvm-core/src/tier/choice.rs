//! Which part of the local memory holds packed pages, chosen by what everything costs.

use super::FRAME_CHUNKS;

/// The part of the local memory that the pool has is chosen in this many steps.
pub const STEPS: u32 = 16;
/// Most steps: a quarter of the local memory always holds pages as they are.
pub const STEPS_MAX: u32 = 12;

/// Buckets of ages, each as wide as one step of the local memory, and one for all beyond.
const BUCKETS: usize = 8 * STEPS as usize;
/// Least number of pages brought in between two decisions.
const WINDOW_MIN: u32 = 256;
/// The expected cost must fall by one part in this many before anything is changed.
const GAIN_PART: f64 = 32.0;
/// As [`GAIN_PART`], while there is no pool: what one would cost is known less well.
const FIRST_GAIN_PART: f64 = 16.0;
/// Least part of the pages of any age that is taken to be still out.
const OUT_MIN: f64 = 1.0 / 64.0;
/// Steps taken at a time, so that the next decision rests on what was measured nearby.
const STRIDE: u32 = 2;

/// What the program's keeper wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Whatever costs least.
    #[default]
    Auto,
    /// All evicted pages go to a lender, as they are.
    Lender,
    /// Evicted pages are packed as long as the pool may grow; only the oldest go to a lender.
    Packed,
}

/// Times the average that a sample counts at most.
const OUTLIER: f64 = 4.0;

/// A moving average of the last samples; the first counts in full. One that is far off, because the thread was interrupted, counts as four
/// times the average.
#[derive(Clone, Copy, Debug, Default)]
pub struct Average {
    value: f64,
    samples: u64,
}

impl Average {
    /// Takes a sample into account.
    pub fn note(&mut self, sample: f64) {
        let sample = if self.samples < 4 { sample } else { sample.min(self.value * OUTLIER + 1.0) };
        self.samples += 1;
        let weight = (self.samples as f64).min(16.0);
        self.value += (sample - self.value) / weight;
    }

    /// The average, or `usual` while nothing has been measured.
    pub fn or(&self, usual: f64) -> f64 {
        if self.samples == 0 { usual } else { self.value }
    }
}

/// What was measured, in nanoseconds for each page unless said otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub struct Costs {
    /// From the program's fault to the pager and back, whatever is done there.
    pub fault: Average,
    /// Evicting with packing, or finding out that it does not pay.
    pub pack: Average,
    /// Bringing in from the pool.
    pub unpack: Average,
    /// Waiting for a lender: less for pages that came ahead of their faults.
    pub fetch: Average,
    /// Evicting to a lender.
    pub send: Average,
    /// Chunks that a packed page takes.
    pub chunks: Average,
    /// Part of the evicted pages that can be packed, 0 to 1.
    pub packable: Average,
    /// Part of the evicted pages of which no lender has a copy, 0 to 1.
    pub changed: Average,
}

impl Costs {
    /// Pages in each frame of the pool.
    pub fn ratio(&self) -> f64 {
        f64::from(FRAME_CHUNKS) / self.chunks.or(8.0).max(0.5)
    }

    /// A page brought in from the pool, and packed again some time.
    fn by_pool(&self) -> f64 {
        self.fault.or(5000.0) + self.unpack.or(1000.0) + self.pack.or(3000.0)
    }

    /// A page brought in from a lender, and sent again some time.
    fn by_lender(&self) -> f64 {
        self.fault.or(5000.0) + self.fetch.or(20_000.0) + self.send.or(1000.0)
    }

    /// What a page from a lender costs more when evicted pages go through the pool.
    fn detour(&self) -> f64 {
        self.pack.or(3000.0) + self.packable.or(1.0) * self.changed.or(1.0) * self.unpack.or(1000.0)
    }
}

/// Decides how large the pool is to be, from how long pages have been out when they are wanted again.
///
/// The age of a page is the number of pages that were evicted after it. Its *distance* is how many of those are still out: pages
/// leave in order, so a page of distance `d` would still be in a pool that holds `d` pages, and would not have left a local memory
/// with `d` more frames for pages as they are. The ages of the last few thousand pages therefore tell what each size of the pool
/// would have cost, and the pool moves towards the cheapest.
#[derive(Clone, Debug)]
pub struct Choice {
    policy: Policy,
    /// What was measured.
    pub costs: Costs,
    ages: [f32; BUCKETS + 1],
    /// Pages evicted while the ages were counted.
    evictions: f32,
    width: u32,
    noted: u32,
    step: u32,
    skip: u32,
    failures: u32,
    sampled: u32,
    evicted: u32,
    changes: u64,
}

impl Choice {
    /// Nothing measured yet. `Policy::Auto` starts without a pool.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            costs: Costs::default(),
            ages: [0.0; BUCKETS + 1],
            evictions: 0.0,
            width: 1,
            noted: 0,
            step: if policy == Policy::Packed { STEPS_MAX } else { 0 },
            skip: 0,
            failures: 0,
            sampled: 0,
            evicted: 0,
            changes: 0,
        }
    }

    /// What was asked for.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Part of the local memory that the pool may have, in steps of [`STEPS`].
    pub fn step(&self) -> u32 {
        self.step
    }

    #[cfg(test)]
    pub(super) fn set_step(&mut self, step: u32) {
        self.step = step;
    }

    /// How often the part was changed.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Most frames the pool may have of `local` frames of local memory.
    pub fn frames(&self, local: usize) -> usize {
        local / STEPS as usize * self.step as usize
    }

    /// Whether to try to pack the next evicted page. After several that could not be packed only some are tried.
    pub fn try_to_pack(&mut self) -> bool {
        if self.step == 0 {
            return false;
        }
        let skipped = self.skip > 0;
        self.skip = self.skip.saturating_sub(1);
        !skipped
    }

    /// How an attempt to pack a page ended: the chunks it takes, or `None` when it would take too many.
    pub fn tried(&mut self, chunks: Option<usize>) {
        self.costs.packable.note(if chunks.is_some() { 1.0 } else { 0.0 });
        match chunks {
            Some(chunks) => {
                self.costs.chunks.note(chunks as f64);
                self.failures = 0;
                self.skip = 0;
            }
            None => {
                self.failures = (self.failures + 1).min(10);
                self.skip = (1 << self.failures.saturating_sub(4)) - 1;
            }
        }
    }

    /// While nothing is packed: whether to measure with the next evicted page what packing would cost and bring.
    pub fn sample(&mut self) -> bool {
        if self.policy != Policy::Auto || self.step != 0 {
            return false;
        }
        self.evicted = self.evicted.wrapping_add(1);
        let every = if self.sampled < 64 { 8 } else { 64 };
        let now = self.evicted.is_multiple_of(every);
        self.sampled = self.sampled.saturating_add(now.into());
        now
    }

    /// So many pages were evicted.
    pub fn note_evicted(&mut self, pages: usize) {
        self.evictions += pages as f32;
    }

    /// A page was brought in that was evicted `age` evictions ago. True when it is time to [`Choice::decide`].
    pub fn note_age(&mut self, age: u32) -> bool {
        if self.policy != Policy::Auto {
            return false;
        }
        let bucket = ((age / self.width) as usize).min(BUCKETS);
        self.ages[bucket] += 1.0;
        self.noted += 1;
        self.noted >= (self.width * STEPS / 4).max(WINDOW_MIN)
    }

    /// Chooses the size of the pool anew; `local` is the local memory in frames.
    pub fn decide(&mut self, local: usize) {
        let width = (local as u32 / STEPS).max(1);
        if width.abs_diff(self.width) > self.width / 4 {
            // The budget has changed: the ages were counted in another measure.
            self.ages = [0.0; BUCKETS + 1];
            self.evictions = 0.0;
            self.width = width;
            self.noted = 0;
            return;
        }
        self.noted = 0;
        let best = self.best();
        let (now, then) = (self.expected(self.step), self.expected(best));
        let part = if self.step == 0 { FIRST_GAIN_PART } else { GAIN_PART };
        if then < now * (1.0 - 1.0 / part) {
            let before = self.step;
            self.step = best.clamp(self.step.saturating_sub(STRIDE), self.step + STRIDE);
            self.changes += u64::from(before != self.step);
            // Ages are counted from where pages leave, which moves with the pool.
            self.shift(self.step as i32 - before as i32);
        }
        self.evictions *= 0.5;
        for count in &mut self.ages {
            *count *= 0.5;
        }
    }

    fn best(&self) -> u32 {
        (0..=STEPS_MAX)
            .min_by(|&one, &other| self.expected(one).total_cmp(&self.expected(other)))
            .unwrap_or(0)
    }

    /// Pages brought in that would have been seen for each step by which the mapped part were smaller.
    fn unseen(&self) -> f64 {
        f64::from(self.ages[0] + self.ages[1]) / 2.0
    }

    /// What the pages brought in lately would have cost with a pool of `step` steps, in nanoseconds.
    fn expected(&self, step: u32) -> f64 {
        let costs = &self.costs;
        let packable = costs.packable.or(1.0);
        let reach = if packable < 0.01 { 0.0 } else { f64::from(step) * costs.ratio() / packable };
        let lender = costs.by_lender() + if step == 0 { 0.0 } else { costs.detour() };
        let pool = packable * costs.by_pool() + (1.0 - packable) * lender;
        // A page somewhere in `from..from + wide` steps behind the mapped ones.
        let each = |from: f64, wide: f64| {
            let inside = if wide > 0.0 { (reach - from).clamp(0.0, wide) / wide } else { 0.0 };
            inside * pool + (1.0 - inside) * lender
        };
        let nearer = f64::from(self.step) - f64::from(step);
        let mut sum = 0.0;
        let mut distance = 0.0;
        let mut back = 0.0;
        for &count in &self.ages[..BUCKETS] {
            let count = f64::from(count);
            // The pages of this bucket lie between this distance and the next.
            let out = (1.0 - back / f64::from(self.evictions).max(1.0)).clamp(OUT_MIN, 1.0);
            let missing = (distance + out - nearer).clamp(0.0, out) / out;
            sum += missing * count * each((distance - nearer).max(0.0), missing * out);
            distance += out;
            back += count;
        }
        if nearer < 0.0 {
            sum += self.unseen() * -nearer * each(0.0, -nearer);
        }
        sum + f64::from(self.ages[BUCKETS]) * lender
    }

    /// The mapped part becomes smaller by `steps`.
    fn shift(&mut self, steps: i32) {
        let (unseen, old) = (self.unseen() as f32, self.ages);
        for (bucket, count) in self.ages[..BUCKETS].iter_mut().enumerate() {
            let from = bucket as i32 - steps;
            *count = match usize::try_from(from) {
                Ok(from) if from < BUCKETS => old[from],
                Ok(_) => 0.0,
                Err(_) => unseen,
            };
        }
    }
}
