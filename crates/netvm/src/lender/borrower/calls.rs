//! Questions whose answers are waited for.

use super::*;

impl Borrower {
    /// Returns when the lender has applied all writes posted so far. Completions of other operations wait for the next poll.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::LenderLost`].
    pub fn flush(&mut self, timeout: Duration) -> Result<()> {
        let post = |borrower: &mut Self| borrower.session.endpoint.post_flush(INTERNAL);
        self.blocking(post, timeout, "flush").map(|_| ())
    }

    /// Borrows one more slab. It reads as zeros until it is written.
    ///
    /// # Errors
    /// [`Error::LenderFull`], [`Error::Timeout`], [`Error::LenderLost`].
    pub fn borrow_slab(&mut self) -> Result<u32> {
        let answer = self.call(protocol::BORROW, Vec::new(), "slab")?;
        self.borrowed(&answer)
    }

    /// The same for who has found no slab anywhere else: a lender that packs lends it though its pages will be on disk.
    ///
    /// # Errors
    /// As [`Borrower::borrow_slab`].
    pub fn press_for_slab(&mut self) -> Result<u32> {
        let answer = self.call(protocol::BORROW, wish(true), "slab")?;
        self.borrowed(&answer)
    }

    /// One round of one of these (`press`: of the second), for who has others to listen to meanwhile: `None` while the answer is not there. Until
    /// it is nothing else may be done with this; `slot` is the caller's to keep, `None` at first.
    ///
    /// # Errors
    /// As [`Borrower::borrow_slab`], but for the time-out, which is the caller's.
    pub(crate) fn try_borrow_slab(&mut self, slot: &mut Option<u16>, press: bool) -> Result<Option<u32>> {
        self.check()?;
        let post = |borrower: &mut Self| {
            borrower.session.endpoint.post_call(INTERNAL, protocol::BORROW, wish(press))
        };
        match self.attempt(slot, post, "slab")? {
            None => Ok(None),
            Some(Answer::Reply(answer)) => self.borrowed(&answer).map(Some),
            Some(_) => Err(self.nonsense()),
        }
    }

    fn borrowed(&mut self, answer: &[u8]) -> Result<u32> {
        let answer = BorrowAnswer::decode(answer);
        self.room_bytes = answer.as_ref().map(BorrowAnswer::room_bytes).or(self.room_bytes);
        match answer {
            Some(BorrowAnswer { slab: Some(slab), .. }) => {
                if let Some(nearby) = &mut self.nearby {
                    nearby.borrowed(slab);
                }
                Ok(slab)
            }
            Some(BorrowAnswer { slab: None, size_bytes, used_bytes, limit }) => {
                Err(Error::LenderFull { lender: self.lender.clone(), size_bytes, used_bytes, limit })
            }
            None => Err(self.nonsense()),
        }
    }

    /// Gives a slab back. Writes to it that are posted before this has ended may be executed first, or refused.
    ///
    /// # Errors
    /// [`Error::Op`] when this lease does not hold it.
    pub fn return_slab(&mut self, slab: u32) -> Result<()> {
        self.forget(slab);
        let post = |borrower: &mut Self| {
            borrower.bring_back(slab)?;
            borrower.session.endpoint.post_call(INTERNAL, protocol::RETURN, slab.to_le_bytes().to_vec())
        };
        self.blocking(post, self.call_timeout, "return of a slab").map(|_| ())
    }

    /// Whether no other lease holds the slab: then it may be written again.
    ///
    /// # Errors
    /// [`Error::Op`] when this lease does not hold it.
    pub fn sole_holder(&mut self, slab: u32) -> Result<bool> {
        let answer = self.call(protocol::SOLE, slab.to_le_bytes().to_vec(), "question about a slab")?;
        match BodyReader(&answer).u32() {
            Some(sole) => Ok(sole != 0),
            None => Err(self.nonsense()),
        }
    }

    pub(in crate::lender) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    pub(super) fn call(&mut self, method: u32, body: Vec<u8>, what: &'static str) -> Result<Vec<u8>> {
        alone(async |wait| self.ask(wait, method, body, what).await)
    }

    /// A call, beside whoever else waits.
    pub(in crate::lender) async fn ask(
        &mut self,
        wait: &Wait,
        method: u32,
        body: Vec<u8>,
        what: &'static str,
    ) -> Result<Vec<u8>> {
        let post = |borrower: &mut Self| borrower.session.endpoint.post_call(INTERNAL, method, body.clone());
        match self.answer(wait, post, self.call_timeout, what).await? {
            Answer::Reply(body) => Ok(body),
            _ => Err(self.nonsense()),
        }
    }

    pub(super) fn blocking(
        &mut self,
        post: impl FnMut(&mut Self) -> Result<u16, PostError>,
        timeout: Duration,
        what: &'static str,
    ) -> Result<Answer> {
        alone(async |wait| self.answer(wait, post, timeout, what).await)
    }

    /// Posts something and waits for its answer; what else completes meanwhile is kept for the next poll.
    async fn answer(
        &mut self,
        wait: &Wait,
        mut post: impl FnMut(&mut Self) -> Result<u16, PostError>,
        timeout: Duration,
        what: &'static str,
    ) -> Result<Answer> {
        self.check()?;
        // Time in which this process did not look, because it was stopped or starved, counts for one look.
        let (mut left, mut looked) = (timeout, Instant::now());
        let mut slot = None;
        loop {
            if let Some(answer) = self.attempt(&mut slot, &mut post, what)? {
                return Ok(answer);
            }
            let now = Instant::now();
            left = left.saturating_sub((now - looked).min(HEARD));
            looked = now;
            if left.is_zero() {
                let after_ms = timeout.as_millis() as u64;
                let error = Error::Timeout { lender: self.lender.clone(), what, after_ms };
                // The answer may still come, and would be taken for another's.
                self.break_off(error.clone());
                return Err(error);
            }
            let events = libc::POLLIN | if self.session.has_output() { libc::POLLOUT } else { 0 };
            let stream = self.session.link(0).stream();
            wait.ready(Some(stream.as_fd()), events, left.min(HEARD))
                .await
                .map_err(|error| Error::system("wait for the lender", &error))?;
        }
    }

    /// Posts something, if it is not posted, and does one round of sending and receiving: the answer, if it is there.
    fn attempt(
        &mut self,
        slot: &mut Option<u16>,
        mut post: impl FnMut(&mut Self) -> Result<u16, PostError>,
        what: &'static str,
    ) -> Result<Option<Answer>> {
        if slot.is_none() {
            // What has completed may have had the slot that the new operation gets.
            self.collect(None, &mut None)?;
            match post(self) {
                Ok(posted) => *slot = Some(posted),
                Err(PostError::Full) => {}
                Err(error) => return Err(Error::Other(error.to_string())),
            }
            self.waits();
        }
        self.poll_datagrams();
        let answer = self.progress(*slot, true)?.transpose();
        answer.map_err(|error| match error {
            OpError::Refused(code) => Error::Op { lender: self.lender.clone(), what, code },
            OpError::Lost | OpError::Unknown => self.broken.clone().unwrap_or_else(|| self.nonsense()),
        })
    }
}
