//! Claims to a second lease that holds the same slabs.

use super::*;

/// A ticket that has been asked for.
#[derive(Debug)]
pub(crate) struct ForkClaim {
    slot: Option<u16>,
    since: Instant,
}

/// A ticket is waited for so long at least, if others were waited for before.
const TICKET_PATIENCE_MIN: Duration = Duration::from_millis(50);

impl Borrower {
    /// Makes a second lease, on a connection of its own, that holds every slab of this one under the same numbers, with all writes
    /// posted so far. After fork(2) the child takes it.
    ///
    /// # Errors
    /// As [`Borrower::connect`]; [`Error::Op`] when the lender has too many leases.
    pub fn fork(&mut self) -> Result<Self> {
        let ticket = self.fork_ticket()?;
        let timeout = self.call_timeout;
        let options =
            BorrowOptions { connect_timeout: timeout, call_timeout: timeout, ..BorrowOptions::default() };
        Self::adopt(&ticket, &options)
    }

    /// As [`Borrower::fork`], but whoever wants the second lease connects itself.
    ///
    /// # Errors
    /// [`Error::Op`] when the lender has too many leases; [`Error::Timeout`], [`Error::LenderLost`].
    pub fn fork_ticket(&mut self) -> Result<ForkTicket> {
        let claim = self.post_fork()?;
        self.take_ticket(claim)
    }

    /// Asks for a ticket, and does not wait. Nothing else may be done with this before [`Borrower::take_ticket`].
    pub(crate) fn post_fork(&mut self) -> Result<ForkClaim> {
        self.check()?;
        // What has completed may have had the slot that this gets.
        self.collect(None, &mut None)?;
        // If there is no room now there is when somebody waits.
        let slot = self.session.endpoint.post_call(INTERNAL, protocol::FORK, Vec::new()).ok();
        self.push()?;
        Ok(ForkClaim { slot, since: Instant::now() })
    }

    /// Waits for the ticket. Time since it was asked for counts, but for the last moment: who waits for several lenders waits for all at once.
    pub(crate) fn take_ticket(&mut self, claim: ForkClaim) -> Result<ForkTicket> {
        let mut slot = claim.slot;
        let post = |borrower: &mut Self| match slot.take() {
            Some(slot) => Ok(slot),
            None => borrower.session.endpoint.post_call(INTERNAL, protocol::FORK, Vec::new()),
        };
        let left = self.call_timeout.saturating_sub(claim.since.elapsed());
        match self.blocking(post, left.max(TICKET_PATIENCE_MIN), "fork of a lease")? {
            Answer::Reply(answer) => match BodyReader(&answer).key() {
                Some(ticket) => {
                    let (lender, security) = (self.lender.clone(), self.security.clone());
                    // The name may lead to another one by now, and asking takes its time.
                    let at = self.session.link(0).stream().reached().unwrap_or_else(|| lender.clone());
                    Ok(ForkTicket { lender, at, ticket, identity: self.identity, security })
                }
                None => Err(self.nonsense()),
            },
            _ => Err(self.nonsense()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lender::{Lender, LenderConfig, LinkChoice, StopFlag};

    const PATIENCE: Duration = Duration::from_millis(400);

    fn lender() -> (Borrower, StopFlag, std::thread::JoinHandle<Lender>) {
        let config = LenderConfig { size_bytes: 1 << 20, slab_bytes: 1 << 20, ..LenderConfig::default() };
        let mut lender = Lender::bind(config).unwrap();
        let address = lender.addresses().remove(0);
        let stop = StopFlag::new().unwrap();
        let flag = stop.clone();
        let thread = std::thread::spawn(move || {
            lender.run(&flag).unwrap();
            lender
        });
        let options =
            BorrowOptions { link: LinkChoice::Socket, call_timeout: PATIENCE, ..BorrowOptions::default() };
        (Borrower::connect(&address, &options).unwrap(), stop, thread)
    }

    /// Its connection stands, and nobody answers.
    fn silent() -> (Borrower, Lender) {
        let (borrower, stop, thread) = lender();
        stop.stop();
        stop.stop();
        (borrower, thread.join().unwrap())
    }

    #[test]
    fn silent_lenders_are_waited_for_together() {
        let (mut alone, _lender) = silent();
        let since = Instant::now();
        assert!(matches!(alone.fork_ticket(), Err(Error::Timeout { .. })));
        let one = since.elapsed();
        let mut silent = [silent(), silent(), silent(), silent()];
        let (mut live, stop, thread) = lender();
        let since = Instant::now();
        let claims = silent.each_mut().map(|(borrower, _)| borrower.post_fork().unwrap());
        let claim = live.post_fork().unwrap();
        for ((borrower, _), claim) in silent.iter_mut().zip(claims) {
            assert!(matches!(borrower.take_ticket(claim), Err(Error::Timeout { .. })));
        }
        // Its answer has been there for long.
        let ticket = live.take_ticket(claim).unwrap();
        let all = since.elapsed();
        assert!(all < one * 3, "one {one:?}, four {all:?}");
        assert!(Borrower::adopt(&ticket, &BorrowOptions::default()).is_ok());
        drop(live);
        stop.stop();
        stop.stop();
        thread.join().unwrap();
    }

    #[test]
    fn a_child_waits_for_silent_lenders_together() {
        let options = BorrowOptions {
            link: LinkChoice::Socket,
            connect_timeout: PATIENCE,
            call_timeout: PATIENCE,
            ..BorrowOptions::default()
        };
        // Tickets of lenders that stand still since.
        let mut stopped: Vec<_> = (0..4).map(|_| lender()).collect();
        let mut tickets: Vec<_> =
            stopped.iter_mut().map(|(parent, ..)| parent.fork_ticket().unwrap()).collect();
        let stood: Vec<_> = stopped
            .into_iter()
            .map(|(_, stop, thread)| {
                stop.stop();
                stop.stop();
                thread.join().unwrap()
            })
            .collect();
        let since = Instant::now();
        assert!(matches!(Borrower::adopt(&tickets[0], &options), Err(Error::Timeout { .. })));
        let one = since.elapsed();
        let (mut live, stop, thread) = lender();
        let slab = live.borrow_slab().unwrap();
        tickets.insert(1, live.fork_ticket().unwrap());
        let since = Instant::now();
        let mut adopted = Borrower::adopt_all(&tickets, &options);
        let all = since.elapsed();
        assert!(one >= PATIENCE && all < one * 2, "one {one:?}, four {all:?}");
        let mut child = adopted.remove(1).unwrap();
        assert!(!child.sole_holder(slab).unwrap());
        for silent in adopted {
            assert!(matches!(silent, Err(Error::Timeout { .. })));
        }
        drop((live, child, stood));
        stop.stop();
        stop.stop();
        thread.join().unwrap();
    }
}
