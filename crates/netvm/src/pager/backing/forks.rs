//! Lenders' slabs in both processes of a fork: docs/design/pager.md.

use super::Backing;
use crate::detail::PagerDetail;
use crate::error::{Error, Result, Scope};
use crate::lender::{Borrower, ForkTicket};
use crate::stats::PagerStats;

impl Backing {
    /// Before a fork, with no operation on its way: claims to leases that share every slab, for each lender that is not lost and has
    /// a lease left.
    pub(in crate::pager) fn fork_tickets(&mut self) -> Result<Vec<Option<ForkTicket>>> {
        // All are asked before any is waited for; and nothing else happens until all have answered, or have been silent for too long.
        let claims: Vec<_> = (0..self.sides.len())
            .map(|lender| self.sides.caller(lender).map(Borrower::post_fork).transpose())
            .collect();
        let take = |(lender, claim): (usize, Result<Option<_>>)| {
            let side = self.sides.live(lender as u32);
            claim.and_then(|claim| claim.zip(side).map(|(claim, side)| side.take_ticket(claim)).transpose())
        };
        let answers: Vec<_> = claims.into_iter().enumerate().map(take).collect();
        let mut tickets = Vec::new();
        for (lender, answer) in answers.into_iter().enumerate() {
            tickets.push(match answer {
                Ok(ticket) => ticket,
                // It serves this process on; whether the child can do without it, the child finds out.
                Err(error) if error.scope() == Scope::Op => None,
                Err(error) => self.lose(lender as u32, error).map(|()| None)?,
            });
        }
        Ok(tickets)
    }

    /// In the thread that forks: the child's connections, all made at once.
    pub(in crate::pager) fn redeem(&self, tickets: &[Option<ForkTicket>]) -> Result<Vec<Option<Borrower>>> {
        let adopted = Borrower::adopt_all(tickets.iter().flatten(), &self.sides.fork_options());
        let mut adopted = adopted.into_iter();
        let take =
            |ticket: &Option<ForkTicket>| match ticket.as_ref().and_then(|_| adopted.next()).transpose() {
                // The child can do without, if there are other copies.
                Err(_) if self.replicas > 1 => Ok(None),
                result => result,
            };
        tickets.iter().map(take).collect()
    }

    /// From now on what the parent writes can be had in no way by what is open here.
    pub(in crate::pager) fn forget_inherited(&mut self) {
        for lender in 0..self.sides.len() {
            if let Some(borrower) = self.sides[lender].borrower.as_mut() {
                borrower.forget_inherited();
            }
        }
    }

    /// After a fork, in the child. The parent's connections belong to descriptors that do not exist here.
    pub(in crate::pager) fn adopt(&mut self, borrowers: Vec<Option<Borrower>>) -> Result<()> {
        self.mending.leave();
        self.promised.follow();
        self.paused = false;
        (self.stats, *self.detail) = (PagerStats::default(), PagerDetail::default());
        (self.ever_lost, self.ever_left, self.needed) = (0, 0, None);
        let missing: Vec<bool> = borrowers.iter().map(Option::is_none).collect();
        for (lender, borrower) in borrowers.into_iter().enumerate() {
            self.sides.adopt(lender as u32, borrower);
        }
        for lender in (0..self.sides.len()).filter(|&lender| missing[lender as usize]) {
            if self.slots.is_alive(lender) {
                let address = self.sides[lender].address.clone();
                let reason =
                    "it was lost while the process forked, or had no lease left for the child".to_owned();
                self.lose(lender, Error::LenderLost { lender: address, reason })?;
            }
        }
        self.slots.leave_mending();
        self.seals.adopt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lender::{BorrowOptions, Lender, LenderConfig, LinkChoice, StopFlag};
    use crate::pager::PagerConfig;
    use crate::pager::seals::Seals;

    #[test]
    fn a_lender_that_has_no_lease_for_the_child_is_not_lost() {
        let config = LenderConfig { size_bytes: 4 << 20, slab_bytes: 1 << 20, ..LenderConfig::default() };
        let mut lender = Lender::bind(config).unwrap();
        let address = lender.addresses().remove(0);
        let stop = StopFlag::new().unwrap();
        let flag = stop.clone();
        let thread = std::thread::spawn(move || lender.run(&flag).unwrap());
        let config = PagerConfig { lenders: vec![address.clone()], ..PagerConfig::default() };
        let options = BorrowOptions { link: LinkChoice::Socket, ..BorrowOptions::default() };
        let seal = |slots_per_slab| Seals::new([0; 192], slots_per_slab, false);
        let mut backing = Backing::connect(&config, options, None, seal).unwrap();
        backing.take_slots(1).unwrap();
        while backing.sides.live(0).unwrap().fork_ticket().is_ok() {}
        let tickets = backing.fork_tickets().unwrap();
        assert!(matches!(tickets[..], [None]) && backing.sides[0].lost.is_none());
        // The parent goes on.
        let borrowers = backing.redeem(&tickets).unwrap();
        backing.sides.live(0).unwrap().borrow_slab().unwrap();
        // The child has nobody else.
        let error = backing.adopt(borrowers).unwrap_err().to_string();
        assert!(error.contains(&address) && error.contains("no lease left"), "{error}");
        stop.stop();
        stop.stop();
        thread.join().unwrap();
    }
}
