//! Whether a peer, or one connection to it, is alive: when to ask it, and when to give it up. No clock: whoever looks says what time it
//! is.

/// How failed peers are found. Times are in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepAlive {
    /// A peer that has been silent for so long is asked for a sign of life.
    pub interval_ms: u64,
    /// One that has been silent for so long has failed.
    pub timeout_ms: u64,
}

impl Default for KeepAlive {
    /// Asked after 1 s, given up after 4 s.
    fn default() -> Self {
        Self { interval_ms: 1000, timeout_ms: 4000 }
    }
}

impl KeepAlive {
    /// These times, made to fit each other: an interval of at least 10 ms, and a time-out of at least three intervals.
    pub fn new(interval_ms: u64, timeout_ms: u64) -> Self {
        let interval_ms = interval_ms.clamp(10, 1 << 40);
        Self { interval_ms, timeout_ms: timeout_ms.clamp(3 * interval_ms, 1 << 42) }
    }

    /// How often to look, so that a failed peer is found at most two looks after its time-out.
    pub fn look_every_ms(&self) -> u64 {
        (self.interval_ms / 2).min(500)
    }
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing.
    Fine,
    /// Send something that is answered at once.
    Ask,
    /// It has failed, after silence of so many milliseconds.
    Failed(u64),
}

/// What is known of one peer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pulse {
    /// When it was first seen or last heard, and when we last looked.
    heard_ms: Option<u64>,
    looked_ms: u64,
    asked: bool,
}

impl Pulse {
    /// For how long it has been silent.
    pub fn silent_ms(&self, now_ms: u64) -> u64 {
        now_ms.saturating_sub(self.heard_ms.unwrap_or(now_ms))
    }

    /// Looks: `heard` says whether anything came from the peer, or went on to it, since the last look.
    pub fn look(&mut self, now_ms: u64, heard: bool, keep_alive: KeepAlive) -> Verdict {
        // Who comes so late was stopped himself, or had no CPU: what the peer has sent meanwhile is still to be received.
        let late = now_ms.saturating_sub(self.looked_ms) >= keep_alive.timeout_ms / 2;
        let first = self.heard_ms.is_none();
        self.looked_ms = now_ms;
        if heard || late || first {
            self.heard_ms = Some(now_ms);
            self.asked = false;
            // Somebody who was late asks at once.
            if heard || first || !late {
                return Verdict::Fine;
            }
        }
        let silent_ms = self.silent_ms(now_ms);
        if silent_ms >= keep_alive.timeout_ms {
            return Verdict::Failed(silent_ms);
        }
        if !self.asked && (late || silent_ms >= keep_alive.interval_ms) {
            self.asked = true;
            return Verdict::Ask;
        }
        Verdict::Fine
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::Random;

    /// A peer that answers what it is asked after a while, until it dies.
    fn found_after(
        seed: u64,
        keep_alive: KeepAlive,
        dies_ms: Option<u64>,
        until_ms: u64,
    ) -> (Option<u64>, u64) {
        let mut random = Random::new(seed);
        let (mut pulse, mut answer, mut asked) = (Pulse::default(), None, 0);
        let mut now = random.below(1 << 30);
        let start = now;
        while now < start + until_ms {
            let alive = dies_ms.is_none_or(|dies| now < start + dies);
            let chatter = alive && random.once_in(20);
            let heard = chatter || answer.is_some_and(|due| due <= now && alive);
            if heard {
                answer = None;
            }
            match pulse.look(now, heard, keep_alive) {
                Verdict::Fine => {}
                Verdict::Ask => {
                    asked += 1;
                    answer.get_or_insert(now + random.below(keep_alive.interval_ms));
                }
                Verdict::Failed(_) => return (Some(now - start), asked),
            }
            // Somewhat late, as threads are.
            now += keep_alive.look_every_ms() + random.below(keep_alive.look_every_ms() / 2 + 1);
        }
        (None, asked)
    }

    #[test]
    fn the_dead_are_found_in_time_and_the_living_are_left_alone() {
        for seed in 0..500 {
            let keep_alive = match seed % 3 {
                0 => KeepAlive::default(),
                1 => KeepAlive::new(20, 100),
                _ => KeepAlive::new(700, 9000),
            };
            let bound = keep_alive.timeout_ms + 2 * (keep_alive.look_every_ms() * 3 / 2);
            assert_eq!(
                found_after(seed, keep_alive, None, 100 * keep_alive.timeout_ms).0,
                None,
                "seed {seed}"
            );
            let dies = 3 * keep_alive.timeout_ms + seed;
            let (found, _) = found_after(seed, keep_alive, Some(dies), 100 * keep_alive.timeout_ms);
            let found = found.expect("never found");
            assert!((dies..=dies + bound).contains(&found), "seed {seed}: {found} for {dies}");
        }
        let default = KeepAlive::default();
        assert!(
            default.timeout_ms + 2 * default.look_every_ms() <= 5000,
            "the default finds them within 5 s"
        );
    }

    #[test]
    fn nobody_is_asked_while_there_is_traffic() {
        let (mut pulse, keep_alive) = (Pulse::default(), KeepAlive::default());
        assert!((0..100).all(|look| pulse.look(look * 500, true, keep_alive) == Verdict::Fine));
        let asked = (100..105).map(|look| pulse.look(look * 500, false, keep_alive));
        let asked = asked.filter(|verdict| *verdict == Verdict::Ask).count();
        assert_eq!(asked, 1, "once for one silence");
    }

    #[test]
    fn who_was_away_himself_blames_nobody() {
        let (mut pulse, keep_alive) = (Pulse::default(), KeepAlive::default());
        assert_eq!(pulse.look(1000, false, keep_alive), Verdict::Fine);
        assert_eq!(pulse.look(1_000_000, false, keep_alive), Verdict::Ask);
        assert_eq!(pulse.look(1_000_500, false, keep_alive), Verdict::Fine);
        assert!((1..8).all(|look| pulse.look(1_000_000 + 500 * look, false, keep_alive) == Verdict::Fine));
        assert_eq!(pulse.look(1_004_000, false, keep_alive), Verdict::Failed(4000));
    }

    #[test]
    fn times_fit_each_other() {
        assert_eq!(KeepAlive::new(0, 0), KeepAlive { interval_ms: 10, timeout_ms: 30 });
        assert_eq!(KeepAlive::new(1000, 5), KeepAlive { interval_ms: 1000, timeout_ms: 3000 });
        assert!(KeepAlive::new(u64::MAX, u64::MAX).timeout_ms < u64::MAX);
    }
}
