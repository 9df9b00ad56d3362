//! Which part of the local memory holds packed pages, chosen by what everything costs.

use super::FRAME_CHUNKS;

/// The part of the local memory that the pool has is chosen in this many steps.
pub const STEPS: u32 = 16;
/// Most steps: a quarter of the local memory always holds pages as they are.
pub const STEPS_MAX: u32 = 12;

/// Buckets of ages, each as wide as one step of the local memory, and one for all beyond.
const BUCKETS: usize = 8 * STEPS as usize;
/// Classes of lenders: what packing saves differs from class to class.
pub const CLASSES: usize = 4;
/// Least number of pages brought in between two decisions,
const WINDOW_MIN: u32 = 256;
/// and, of a large local memory, one for each so many frames.
const WINDOW_PART: u32 = 64;
/// Half of what was counted is forgotten with so many pages brought in: one for each so many frames,
const MEMORY_PART: u32 = 4;
/// but no more than this.
const MEMORY_MAX: u32 = 8192;
/// The expected cost must fall by one part in this many before anything is changed.
const GAIN_PART: f64 = 32.0;
/// As [`GAIN_PART`], while there is no pool: what one would cost is known less well.
const FIRST_GAIN_PART: f64 = 16.0;
/// Least part of the pages of any age that is taken to be still out.
const OUT_MIN: f64 = 1.0 / 64.0;
/// Steps taken at a time, so that the next decision rests on what was measured nearby,
const STRIDE: u32 = 2;
/// and where much is to be gained: one part in so many.
const STRIDE_FAR: u32 = 6;
const FAR_PART: f64 = 8.0;

/// Every class.
const ALL: u8 = (1 << CLASSES) - 1;

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

/// Waits for lenders that make up one sample.
const GROUP: u32 = 16;
/// A lender that is asked all the time is taken to be so many times faster at most.
const BUSY_MIN: f64 = 0.5;

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
    /// Waiting for a lender of each class: less for pages that came ahead of their faults.
    pub fetch: [Average; CLASSES],
    /// Evicting to a lender.
    pub send: Average,
    /// Chunks that a packed page takes.
    pub chunks: Average,
    /// Part of the evicted pages that can be packed, 0 to 1.
    pub packable: Average,
    /// Part of the evicted pages of which no lender has a copy, 0 to 1.
    pub changed: Average,
    waits: [Waits; CLASSES],
}

/// What single faults waited for a lender, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Waits {
    all: Sum,
    /// Those that had waited for a lender the time before, too.
    in_row: Sum,
}

/// Samples are averaged in groups: single ones differ by much.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    average: Average,
    sum: f64,
    samples: u32,
}

impl Sum {
    fn note(&mut self, sample: f64) {
        self.sum += sample;
        self.samples += 1;
        if self.samples == GROUP {
            self.average.note(self.sum / f64::from(GROUP));
            (self.sum, self.samples) = (0.0, 0);
        }
    }
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

    /// Waiting for a lender of this class.
    fn fetch(&self, class: usize) -> f64 {
        self.fetch[class].or(20_000.0)
    }

    /// A page brought in from a lender, who takes `fetch`, and sent again some time.
    fn by_lender(&self, fetch: f64) -> f64 {
        self.fault.or(5000.0) + fetch + self.send.or(1000.0)
    }

    /// A fault waited so long for a lender of this class; `in_row`: so did the one before.
    pub fn note_wait(&mut self, ns: f64, in_row: bool, class: u8) {
        let waits = &mut self.waits[place(class)];
        waits.all.note(ns);
        if in_row {
            waits.in_row.note(ns);
        }
    }

    /// What a lender takes that is asked fault by fault, to what it takes now that it is asked more rarely: it may sleep in between, and what it
    /// needs is no longer in the CPU's caches.
    fn busy(&self, class: usize) -> f64 {
        let Waits { all, in_row } = &self.waits[class];
        let all = all.average.or(0.0);
        if all > 0.0 { (in_row.average.or(all) / all).clamp(BUSY_MIN, 1.0) } else { 1.0 }
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
/// would have cost, and the pool moves towards the cheapest. All of that is counted for each class of lenders by itself: pages that would come from cheap
/// ones need not be packed when others are, which then stay in the pool for longer.
#[derive(Clone, Debug)]
pub struct Choice {
    policy: Policy,
    /// What was measured.
    pub costs: Costs,
    ages: [[f32; BUCKETS + 1]; CLASSES],
    /// Pages evicted while the ages were counted.
    evictions: f32,
    /// Pages that left, by the class of the lender that has them or would get them.
    left: [f32; CLASSES],
    /// The classes whose pages are packed, a bit for each.
    classes: u8,
    width: u32,
    noted: u32,
    step: u32,
    skip: u32,
    failures: u32,
    sampled: u32,
    evicted: u32,
    changes: u64,
    /// [`Costs::busy`], as it was when pages of the class were packed last.
    busy: [f64; CLASSES],
}

impl Choice {
    /// Nothing measured yet. `Policy::Auto` starts without a pool.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            costs: Costs::default(),
            ages: [[0.0; BUCKETS + 1]; CLASSES],
            evictions: 0.0,
            left: [0.0; CLASSES],
            classes: ALL,
            width: 1,
            noted: 0,
            step: if policy == Policy::Packed { STEPS_MAX } else { 0 },
            skip: 0,
            failures: 0,
            sampled: 0,
            evicted: 0,
            changes: 0,
            busy: [1.0; CLASSES],
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

    /// Whether to try to pack the next evicted page, which would be at a lender of this class otherwise. After several that could not be packed only some
    /// are tried.
    pub fn try_to_pack(&mut self, class: u8) -> bool {
        self.left[place(class)] += 1.0;
        if !self.is_packed(class) {
            return false;
        }
        let skipped = self.skip > 0;
        self.skip = self.skip.saturating_sub(1);
        !skipped
    }

    /// Whether the pool is for pages that would be at a lender of this class otherwise.
    pub fn is_packed(&self, class: u8) -> bool {
        self.step > 0 && self.classes >> place(class) & 1 == 1
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
        // Far from paying, a sample takes more of a stream's time than it is worth.
        let now = self.evicted.is_multiple_of(every)
            && (self.sampled < 512 || self.evicted.is_multiple_of(256) || self.would_pay(ALL));
        self.sampled = self.sampled.saturating_add(now.into());
        now
    }

    /// So many pages were evicted.
    pub fn note_evicted(&mut self, pages: usize) {
        self.evictions += pages as f32;
    }

    /// A page was brought in that was evicted `age` evictions ago, from a lender of this class or from the pool in place of it. True when it is time to
    /// [`Choice::decide`].
    pub fn note_age(&mut self, age: u32, class: u8) -> bool {
        if self.policy != Policy::Auto {
            return false;
        }
        let bucket = ((age / self.width) as usize).min(BUCKETS);
        self.ages[place(class)][bucket] += 1.0;
        self.noted += 1;
        self.noted >= (self.width * STEPS / WINDOW_PART).max(WINDOW_MIN)
    }

    /// Chooses the size of the pool anew, and what goes there; `local` is the local memory in frames.
    pub fn decide(&mut self, local: usize) {
        let width = (local as u32 / STEPS).max(1);
        let noted = core::mem::take(&mut self.noted);
        if width.abs_diff(self.width) > self.width / 4 {
            // The budget has changed: the ages were counted in another measure.
            self.forget(0.0);
            self.width = width;
            return;
        }
        for class in 0..CLASSES {
            if self.is_packed(class as u8) {
                self.busy[class] = self.costs.busy(class);
            }
        }
        let now = self.expected(self.step, self.classes);
        let (then, best, classes) = self.best();
        let part = if self.step == 0 { FIRST_GAIN_PART } else { GAIN_PART };
        if then < now * (1.0 - 1.0 / part) {
            let before = (self.step, self.classes);
            let stride = if then < now * (1.0 - 1.0 / FAR_PART) { STRIDE_FAR } else { STRIDE };
            self.step = best.clamp(self.step.saturating_sub(stride), self.step + stride);
            self.classes = if self.step == 0 { ALL } else { classes };
            self.changes += u64::from(before != (self.step, self.classes));
            // Ages are counted from where pages leave, which moves with the pool.
            self.shift(self.step as i32 - before.0 as i32);
        }
        let memory = (self.width * STEPS / MEMORY_PART).clamp(WINDOW_MIN, MEMORY_MAX);
        self.forget(1.0 - 0.5 * (noted as f32 / memory as f32).min(1.0));
    }

    /// Only so much of what was counted counts from now on.
    fn forget(&mut self, keep: f32) {
        self.evictions *= keep;
        let counts = self.ages.as_flattened_mut().iter_mut().chain(&mut self.left);
        counts.for_each(|count| *count *= keep);
    }

    /// The least expected cost, and with which size and classes.
    fn best(&self) -> (f64, u32, u8) {
        let mut best = (self.expected(0, ALL), 0, ALL);
        for class in (0..CLASSES).filter(|&class| self.left[class] >= 1.0) {
            // This class, and all that are as dear.
            let is_dear = |other: &usize| self.costs.fetch(*other) >= self.costs.fetch(class);
            let classes = (0..CLASSES).filter(is_dear).fold(0, |all, other| all | 1 << other);
            // While none is packed each that would be costs more then, and the mapped part only becomes smaller.
            if self.step == 0 && !self.would_pay(classes) {
                continue;
            }
            for step in 1..=STEPS_MAX {
                let expected = self.expected(step, classes);
                if expected < best.0 {
                    best = (expected, step, classes);
                }
            }
        }
        best
    }

    /// Whether a page of any of these classes costs less in the pool than with its lender. Classes that no page is of do not count: what their lenders would
    /// take is a guess.
    fn would_pay(&self, classes: u8) -> bool {
        let is_used = |class: usize| self.left[class] > 0.0 || self.ages[class].iter().any(|&age| age > 0.0);
        let pays = |class: usize| self.costs.by_pool() < self.costs.by_lender(self.costs.fetch(class));
        (0..CLASSES).any(|class| classes >> class & 1 == 1 && is_used(class) && pays(class))
    }

    /// What the pages brought in lately would have cost with a pool of `step` steps for pages of these classes, in nanoseconds.
    fn expected(&self, step: u32, classes: u8) -> f64 {
        let costs = &self.costs;
        let packable = costs.packable.or(1.0);
        let is_packed = |class: usize| step > 0 && classes >> class & 1 == 1;
        let all: f64 = self.left.iter().map(|&left| f64::from(left)).sum();
        let packed: f64 =
            (0..CLASSES).filter(|&class| is_packed(class)).map(|class| f64::from(self.left[class])).sum();
        // The part of the pages that leave for which the pool is.
        let share = if all > 0.0 { packed / all } else { 1.0 };
        let reach = if packable < 0.01 { 0.0 } else { f64::from(step) * costs.ratio() / packable };
        let mut cost = [(0.0, 0.0); CLASSES];
        for (class, cost) in cost.iter_mut().enumerate() {
            // Where pages are packed, the lender is asked more rarely.
            let rarely = match (self.is_packed(class as u8), is_packed(class)) {
                (true, false) => self.busy[class],
                (false, true) => 1.0 / self.busy[class],
                _ => 1.0,
            };
            let detour = if is_packed(class) { costs.detour() } else { 0.0 };
            let lender = costs.by_lender(costs.fetch(class) * rarely) + detour;
            *cost = (packable * costs.by_pool() + (1.0 - packable) * lender, lender);
        }
        // A page of this class somewhere in `from..from + wide` steps of such pages behind the mapped ones.
        let each = |class: usize, from: f64, wide: f64| {
            let (pool, lender) = cost[class];
            let is_inside = is_packed(class) && wide > 0.0;
            let inside = if is_inside { (reach - from).clamp(0.0, wide) / wide } else { 0.0 };
            inside * pool + (1.0 - inside) * lender
        };
        let nearer = f64::from(self.step) - f64::from(step);
        let evictions = f64::from(self.evictions).max(1.0);
        let mut sum = 0.0;
        // Of all pages, and of those for which the pool is.
        let (mut distance, mut back) = (0.0, 0.0);
        let (mut packed_distance, mut packed_back) = (0.0, 0.0);
        for bucket in 0..BUCKETS {
            // The pages of this bucket lie between this distance and the next.
            let out = (1.0 - back / evictions).clamp(OUT_MIN, 1.0);
            let packed_out = (1.0 - packed_back / (evictions * share).max(1.0)).clamp(OUT_MIN, 1.0) * share;
            let missing = (distance + out - nearer).clamp(0.0, out) / out;
            let from = (packed_distance - nearer * share).max(0.0);
            for class in 0..CLASSES {
                let count = f64::from(self.ages[class][bucket]);
                if count > 0.0 {
                    sum += missing * count * each(class, from, missing * packed_out);
                    back += count;
                    packed_back += if is_packed(class) { count } else { 0.0 };
                }
            }
            distance += out;
            packed_distance += packed_out;
        }
        for (class, (_, lender)) in cost.iter().enumerate() {
            if nearer < 0.0 {
                sum += self.unseen(class) * -nearer * each(class, 0.0, -nearer * share);
            }
            sum += f64::from(self.ages[class][BUCKETS]) * lender;
        }
        sum
    }

    /// Pages of a class brought in that would have been seen for each step by which the mapped part were smaller.
    fn unseen(&self, class: usize) -> f64 {
        f64::from(self.ages[class][0] + self.ages[class][1]) / 2.0
    }

    /// The mapped part becomes smaller by `steps`.
    fn shift(&mut self, steps: i32) {
        for class in 0..CLASSES {
            let (unseen, old) = (self.unseen(class) as f32, self.ages[class]);
            for (bucket, count) in self.ages[class][..BUCKETS].iter_mut().enumerate() {
                let from = bucket as i32 - steps;
                *count = match usize::try_from(from) {
                    Ok(from) if from < BUCKETS => old[from],
                    Ok(_) => 0.0,
                    Err(_) => unseen,
                };
            }
        }
    }
}

/// Where a class is counted.
fn place(class: u8) -> usize {
    usize::from(class).min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(state: &mut u64, most: f64) -> f64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) as f64 / (1_u64 << 31) as f64 * most
    }

    /// Whatever was measured, of pages of so many classes.
    fn any(state: &mut u64, used: usize) -> Choice {
        let mut choice = Choice::new(Policy::Auto);
        let Costs { fault, pack, unpack, fetch, send, chunks, packable, changed, .. } = &mut choice.costs;
        let times = [(fault, 9e3), (pack, 9e3), (unpack, 3e3), (send, 3e3)];
        for (average, most) in times.into_iter().chain([(chunks, 12.0), (packable, 1.0), (changed, 1.0)]) {
            average.note(random(state, most));
        }
        choice.evictions = random(state, 5e3) as f32;
        for (class, fetch) in fetch.iter_mut().enumerate().take(used) {
            fetch.note(random(state, 2e4));
            choice.left[class] = random(state, 900.0) as f32;
            choice.busy[class] = BUSY_MIN + random(state, 1.0 - BUSY_MIN);
            choice.ages[class].iter_mut().for_each(|age| *age = random(state, 20.0) as f32);
        }
        choice
    }

    #[test]
    fn what_is_not_looked_at_would_not_have_been_chosen() {
        let mut state = 1;
        for used in 1..=CLASSES {
            let (mut left_out, mut chosen) = (0, 0);
            for _ in 0..200 {
                let choice = any(&mut state, used);
                let (least, step, _) = choice.best();
                let every = (0..=ALL).flat_map(|classes| (0..=STEPS_MAX).map(move |step| (step, classes)));
                for (step, classes) in every.filter(|(_, classes)| !choice.would_pay(*classes)) {
                    assert!(
                        choice.expected(step, classes) >= least * (1.0 - 1e-12),
                        "{step} for {classes:b}"
                    );
                }
                left_out += u32::from(!choice.would_pay(ALL));
                chosen += u32::from(step > 0);
            }
            assert!(left_out > 0 && chosen > 10, "{used} classes: {left_out}, {chosen}");
        }
    }

    #[test]
    fn far_from_paying_few_pages_are_tried() {
        // One lender, as most have, whose pages come in a part of the time that packing takes; and one that takes longer.
        for (fetch, tried) in [(1_500.0, 512 + 100), (50_000.0, 512 + 400)] {
            let mut choice = Choice::new(Policy::Auto);
            choice.costs.fetch[0].note(fetch);
            choice.costs.pack.note(5_000.0);
            choice.left[0] = 1.0;
            let first = (0..64 * 8 + (512 - 64) * 64).filter(|_| choice.sample()).count();
            assert_eq!(first, 512);
            let then = (0..400 * 64).filter(|_| choice.sample()).count();
            assert_eq!(first + then, tried, "{fetch} ns");
        }
    }
}
