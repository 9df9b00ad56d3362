//! Which connection of a client is the newest.
//!
//! The session number of a hello is a random number of the client's, the same for all its connections that replace one another, and
//! the epoch: how many there were before. A node ends a client's earlier sessions before it accepts a later one, and does not accept
//! an earlier one after that. So operations of an old session are never executed after those of a new one have begun.

/// A session's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Incarnation {
    /// Whose it is: random.
    pub client: [u8; 12],
    /// Grows with each attempt to connect.
    pub epoch: u32,
}

impl Incarnation {
    /// From a hello.
    pub fn from_bytes(session: [u8; 16]) -> Self {
        let epoch = u32::from_le_bytes([session[12], session[13], session[14], session[15]]);
        Self { client: core::array::from_fn(|index| session[index]), epoch }
    }

    /// For a hello.
    pub fn to_bytes(self) -> [u8; 16] {
        let epoch = self.epoch.to_le_bytes();
        core::array::from_fn(|index| if index < 12 { self.client[index] } else { epoch[index - 12] })
    }

    /// What `self`, which has arrived, means to an `earlier` one that is still open.
    pub fn after(&self, earlier: &Self) -> Order {
        match self.client == earlier.client {
            false => Order::Unrelated,
            true if self.epoch > earlier.epoch => Order::Replaces,
            true => Order::Stale,
        }
    }
}

/// How two sessions relate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// They are of different clients.
    Unrelated,
    /// The earlier one must end first.
    Replaces,
    /// The new one is late, or a copy, and is refused.
    Stale,
}

/// How long to wait before the next attempt to connect: twice as long each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    next_ms: u64,
    longest_ms: u64,
}

impl Backoff {
    /// First so long, at most so long.
    pub fn new(first_ms: u64, longest_ms: u64) -> Self {
        Self { next_ms: first_ms.max(1), longest_ms: longest_ms.max(1) }
    }

    /// How long to wait now; `random` makes many clients of one node come at different times: 75 to 125 %.
    pub fn pause_ms(&mut self, random: u64) -> u64 {
        let pause = self.next_ms.min(self.longest_ms);
        self.next_ms = pause.saturating_mul(2);
        (pause - pause / 4).saturating_add(random % (pause / 2 + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::Random;

    #[test]
    fn sessions_have_one_order() {
        let of = |client: u8, epoch| Incarnation { client: [client; 12], epoch };
        for epoch in [0, 1, 77, u32::MAX] {
            let incarnation = of(3, epoch);
            assert_eq!(Incarnation::from_bytes(incarnation.to_bytes()), incarnation);
        }
        assert_eq!(of(1, 2).to_bytes(), [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 0, 0, 0]);
        assert_eq!(of(1, 5).after(&of(2, 9)), Order::Unrelated);
        assert_eq!(of(1, 5).after(&of(1, 4)), Order::Replaces);
        assert_eq!((of(1, 5).after(&of(1, 5)), of(1, 4).after(&of(1, 5))), (Order::Stale, Order::Stale));
    }

    #[test]
    fn pauses_grow_and_stay_bounded() {
        let mut random = Random::new(1);
        let mut backoff = Backoff::new(10, 1000);
        let pauses: [u64; 20] = core::array::from_fn(|_| backoff.pause_ms(random.draw()));
        assert!((7..=13).contains(&pauses[0]) && pauses[5] > pauses[0]);
        assert!(pauses.iter().all(|&pause| pause <= 1250) && pauses[19] >= 750);
        let mut longest = Backoff::new(0, u64::MAX);
        assert!((0..200).map(|_| longest.pause_ms(u64::MAX)).last() > Some(1 << 60));
    }

    /// A node that does what the module says, with a client whose connections come late, in any order, twice, or never; each one that
    /// is open executes operations. Nothing of an older epoch is executed after something of a newer one.
    #[test]
    fn epochs_never_go_back_while_one_is_open() {
        for seed in 0..2000 {
            let mut random = Random::new(seed);
            let mut open: Option<Incarnation> = None;
            let (mut executed, mut refused) = (0, 0);
            let mut arriving: alloc::vec::Vec<u32> = (0..12).flat_map(|epoch| [epoch, epoch]).collect();
            while !arriving.is_empty() {
                // Mostly in order.
                let at = random.below(4.min(arriving.len() as u64)) as usize;
                let new = Incarnation { client: [7; 12], epoch: arriving.remove(at) };
                let order = open.map_or(Order::Replaces, |open| new.after(&open));
                match order {
                    Order::Replaces => open = Some(new),
                    Order::Stale => refused += 1,
                    Order::Unrelated => panic!("one client"),
                }
                let now = open.expect("just opened").epoch;
                assert!(now >= executed, "seed {seed}");
                executed = now;
            }
            assert!(refused >= 12, "each second copy is refused");
        }
    }
}
