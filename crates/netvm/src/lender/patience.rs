//! How long lenders are waited for that do not answer: docs/design/replicas.md. The times are the caller's.
//!
//! Whoever uses several lenders *looks* now and then. Silence is what was seen of it while looking: a stretch in which nobody looked, because this
//! process was stopped or starved, counts for one look. And nobody is given up early while nobody else is heard either: then it is this host,
//! or its network, that stands still.

use std::time::{Duration, Instant};

/// A look counts for so much at most. While something is owed looks are not further apart.
pub(crate) const HEARD: Duration = Duration::from_millis(175);
/// A lender that is silent for so long, while others are heard, is lost where these have all that it has.
pub(crate) const SILENCE: Duration = Duration::from_millis(700);
/// So much longer where nothing but a sign of life was asked of it: nobody waits for it.
const PROBE_FACTOR: u32 = 3;
/// Who was heard within this time vouches for the network: they are asked for signs of life once a look.
const FRESH: Duration = Duration::from_millis(350);

/// Of one user of lenders.
#[derive(Debug)]
pub(crate) struct Patience {
    early: Duration,
    /// Time that was looked at.
    clock: Duration,
    passed: Duration,
    looked: Instant,
    /// Nobody was looking for a while; who was starved with us gets this much time to be heard.
    lenient_until: Instant,
    /// How many have been heard lately.
    fresh: u32,
}

/// What is known of one lender's silence.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ear {
    received_bytes: u64,
    heard: Option<Duration>,
    silent: Duration,
    /// The part of it in which others were heard.
    missed: Duration,
    is_probed: bool,
}

/// What a lender has sent and owes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Debt {
    /// All that has come from it.
    pub(crate) received_bytes: u64,
    /// Since when it has owed something.
    pub(crate) since: Option<Instant>,
    /// And that is only a sign of life.
    pub(crate) is_probed: bool,
}

/// How far what was sent has got, as the kernel tells: that a network is slow is no silence of the lender.
#[derive(Debug, Default)]
pub(crate) struct Delivery {
    acknowledged_bytes: u64,
    /// All that had been sent when the question for a sign of life had been.
    asked_at: Option<u64>,
}

impl Delivery {
    /// A sign of life is asked for, behind all that is queued.
    pub(crate) fn ask(&mut self, acknowledged_bytes: u64) {
        *self = Self { acknowledged_bytes, asked_at: None };
    }

    /// The question has been answered.
    pub(crate) fn answered(&mut self) {
        self.asked_at = None;
    }

    /// Nothing is queued any more.
    pub(crate) fn sent(&mut self, sent_bytes: u64) {
        self.asked_at.get_or_insert(sent_bytes);
    }

    /// Whether more of it has been acknowledged, and the question was not before: what its kernel takes after that says nothing of the lender.
    pub(crate) fn gets_on(&mut self, acknowledged_bytes: u64) -> bool {
        let before = std::mem::replace(&mut self.acknowledged_bytes, acknowledged_bytes);
        acknowledged_bytes > before && self.asked_at.is_none_or(|asked_at| before < asked_at)
    }
}

impl Patience {
    /// Lenders are given up early after `early`.
    pub(crate) fn new(now: Instant, early: Duration) -> Self {
        Self {
            early,
            clock: Duration::ZERO,
            passed: Duration::ZERO,
            looked: now,
            lenient_until: now,
            fresh: 0,
        }
    }

    /// Whether nobody has looked for so long that more would not count.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.looked) >= HEARD
    }

    /// A look begins: [`Patience::hear`] all lenders, then [`Patience::wait`] for each.
    pub(crate) fn look(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.looked);
        if passed > 2 * HEARD {
            self.lenient_until = now + self.early;
        }
        self.passed = passed.min(HEARD);
        self.clock += self.passed;
        (self.looked, self.fresh) = (now, 0);
    }

    /// What has come from a lender that is not lost.
    pub(crate) fn hear(&mut self, ear: &mut Ear, debt: Debt) {
        if debt.received_bytes != ear.received_bytes {
            (ear.received_bytes, ear.heard) = (debt.received_bytes, Some(self.clock));
            (ear.silent, ear.missed) = (Duration::ZERO, Duration::ZERO);
        }
        ear.is_probed = debt.is_probed;
        self.fresh += u32::from(self.is_fresh(ear));
    }

    /// Counts its silence, when all have been heard.
    pub(crate) fn wait(&self, ear: &mut Ear, debt: Debt) {
        let waited = debt.since.map_or(Duration::ZERO, |since| self.looked.saturating_duration_since(since));
        if waited < ear.silent {
            (ear.silent, ear.missed) = (Duration::ZERO, Duration::ZERO);
        }
        ear.silent = (ear.silent + self.passed).min(waited);
        if self.is_vouched_for(ear) {
            ear.missed = (ear.missed + self.passed).min(ear.silent);
        }
    }

    fn is_fresh(&self, ear: &Ear) -> bool {
        ear.heard.is_some_and(|heard| self.clock - heard <= FRESH)
    }

    /// Whether others are heard, so that its silence means something.
    fn is_vouched_for(&self, ear: &Ear) -> bool {
        self.looked >= self.lenient_until && self.fresh > u32::from(self.is_fresh(ear))
    }

    /// Whether it is given up where it can be spared.
    pub(crate) fn is_missed(&self, ear: &Ear) -> bool {
        ear.missed > if ear.is_probed { self.early * PROBE_FACTOR } else { self.early }
    }

    /// How long to wait for the answer to a call, when without others it would be `longest`.
    pub(crate) fn call_timeout(&self, ear: &Ear, longest: Duration) -> Duration {
        if self.is_vouched_for(ear) { self.early.min(longest) } else { longest }
    }
}

impl Ear {
    /// For how long it has been silent.
    pub(crate) fn silent(&self) -> Duration {
        self.silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Lenders, of which some are asked all the time and answer at once.
    struct World {
        now: Instant,
        patience: Patience,
        ears: [Ear; 3],
        debts: [Debt; 3],
    }

    impl World {
        fn new() -> Self {
            let now = Instant::now();
            let mut world = Self {
                now,
                patience: Patience::new(now, SILENCE),
                ears: Default::default(),
                debts: Default::default(),
            };
            world.run(100 * MS, 20 * MS, [true; 3]);
            world
        }

        fn run(&mut self, time: Duration, step: Duration, answers: [bool; 3]) {
            let end = self.now + time;
            while self.now < end {
                self.now += step;
                for (debt, answers) in self.debts.iter_mut().zip(answers) {
                    if answers {
                        (debt.received_bytes, debt.since) = (debt.received_bytes + 1, None);
                    }
                }
                self.patience.look(self.now);
                for (ear, debt) in self.ears.iter_mut().zip(&self.debts) {
                    self.patience.hear(ear, *debt);
                }
                for (ear, debt) in self.ears.iter_mut().zip(&mut self.debts) {
                    self.patience.wait(ear, *debt);
                    // Asked again.
                    debt.since = debt.since.or(Some(self.now));
                }
            }
        }

        fn missed(&self) -> [bool; 3] {
            self.ears.map(|ear| self.patience.is_missed(&ear))
        }
    }

    #[test]
    fn what_gets_on_is_no_silence_until_the_question_has_arrived() {
        let mut delivery = Delivery::default();
        delivery.ask(100);
        assert!(!delivery.gets_on(100));
        assert!(delivery.gets_on(200), "on its way, behind others");
        delivery.sent(500);
        delivery.sent(900);
        assert!(delivery.gets_on(499) && !delivery.gets_on(499));
        assert!(delivery.gets_on(600), "it has arrived just now");
        assert!(!delivery.gets_on(900), "only its kernel takes this");
        delivery.ask(900);
        assert!(delivery.gets_on(901));
        delivery.sent(901);
        delivery.answered();
        assert!(delivery.gets_on(902), "nothing is asked");
    }

    #[test]
    fn one_that_is_silent_is_missed_soon() {
        let mut world = World::new();
        world.run(680 * MS, 20 * MS, [false, true, true]);
        assert_eq!(world.missed(), [false; 3]);
        world.run(100 * MS, 20 * MS, [false, true, true]);
        assert_eq!(world.missed(), [true, false, false]);
        // Two of three as well.
        world.run(800 * MS, 20 * MS, [false, false, true]);
        assert_eq!(world.missed(), [true, true, false]);
        world.run(40 * MS, 20 * MS, [true; 3]);
        assert_eq!(world.missed(), [false; 3]);
    }

    #[test]
    fn when_all_are_silent_nobody_is_missed_and_all_are_counted() {
        let mut world = World::new();
        world.run(1500 * MS, 20 * MS, [false; 3]);
        assert_eq!(world.missed(), [false; 3]);
        assert!(world.ears.iter().all(|ear| ear.silent() > 1400 * MS));
        // They come back one after the other.
        world.run(100 * MS, 20 * MS, [false, true, false]);
        assert_eq!(world.missed(), [false; 3]);
        world.run(100 * MS, 20 * MS, [false, true, true]);
        assert_eq!(world.missed(), [false; 3]);
        // One does not.
        world.run(600 * MS, 20 * MS, [false, true, true]);
        assert_eq!(world.missed(), [true, false, false]);
    }

    #[test]
    fn a_stretch_in_which_nobody_looked_does_not_count() {
        let mut world = World::new();
        world.run(600 * MS, 20 * MS, [false, true, true]);
        world.run(5000 * MS, 5000 * MS, [false, true, true]);
        assert!(world.ears[0].silent() < 800 * MS);
        // The others are as late as we are: they get time.
        world.run(100 * MS, 20 * MS, [false, true, true]);
        assert_eq!(world.missed(), [false; 3]);
        world.run(1000 * MS, 20 * MS, [false, true, true]);
        assert_eq!(world.missed(), [true, false, false]);
    }

    #[test]
    fn a_sign_of_life_may_take_longer_and_so_may_calls_when_nobody_is_heard() {
        let mut world = World::new();
        world.debts[0].is_probed = true;
        world.run(1500 * MS, 100 * MS, [false, true, true]);
        assert_eq!(world.missed(), [false; 3]);
        assert_eq!(world.patience.call_timeout(&world.ears[0], 9000 * MS), SILENCE);
        world.run(700 * MS, 100 * MS, [false, true, true]);
        assert_eq!(world.missed(), [true, false, false]);
        world.run(600 * MS, 100 * MS, [false; 3]);
        assert_eq!(world.patience.call_timeout(&world.ears[1], 9000 * MS), 9000 * MS);
        // The only one that is heard has nobody to vouch for it.
        world.run(200 * MS, 100 * MS, [false, true, false]);
        assert_eq!(world.patience.call_timeout(&world.ears[1], 9000 * MS), 9000 * MS);
        assert_eq!(world.patience.call_timeout(&world.ears[2], 9000 * MS), SILENCE);
    }
}
