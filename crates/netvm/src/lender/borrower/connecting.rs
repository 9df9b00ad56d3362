//! Connections to one lender, and to several together; leases that are taken over.

use super::*;

impl Borrower {
    /// Connects to the lender at `address` and opens an empty lease.
    ///
    /// # Errors
    /// [`Error::Address`], [`Error::Connect`], [`Error::NotNetvm`], [`Error::Version`], [`Error::Refused`], [`Error::Timeout`];
    /// [`Error::NeedsSecret`], [`Error::WrongSecret`], [`Error::NoSecret`], [`Error::NoEncryption`].
    pub fn connect(address: &str, options: &BorrowOptions) -> Result<Self> {
        alone(async |wait| Self::attach(wait, address, address, &[0; 16], options).await)
    }

    /// Connects to several lenders in the time of the slowest of them. Names are resolved one after the other.
    ///
    /// # Errors
    /// Each as [`Borrower::connect`].
    pub fn connect_all<'a>(
        lenders: impl IntoIterator<Item = (&'a str, &'a BorrowOptions)>,
    ) -> Vec<Result<Self>> {
        let lenders: Vec<_> = lenders.into_iter().collect();
        let waits: Vec<_> = lenders.iter().map(|_| Wait::default()).collect();
        let attach = |((address, options), wait)| Self::attach(wait, address, address, &[0; 16], options);
        together(&waits, lenders.into_iter().zip(&waits).map(attach))
    }

    /// Two of these that are at one lender, if any are: what has one there twice loses both at once.
    pub(crate) fn two_at_one<'a>(borrowers: impl Iterator<Item = &'a Self> + Clone) -> Option<[&'a Self; 2]> {
        let is_same = |(index, one): (usize, &'a Self)| {
            let other = borrowers.clone().skip(index + 1).find(|other| one.is_at_lender_of(other))?;
            Some([one, other])
        };
        borrowers.clone().enumerate().find_map(is_same)
    }

    /// Connects to the lender of a forked lease and takes it, with the secret of the connection that the ticket came over.
    ///
    /// # Errors
    /// As [`Borrower::connect`]; [`Error::Op`] when the ticket is used or too old.
    pub fn adopt(ticket: &ForkTicket, options: &BorrowOptions) -> Result<Self> {
        let adopted = alone(async |wait| Self::adopt_beside(wait, ticket, options).await);
        adopted.inspect(Self::keep_from_children)
    }

    /// Takes several in the time of the slowest of their lenders, for a child of this process: there each is told to
    /// [`Borrower::keep_from_children`].
    pub(crate) fn adopt_all<'a>(
        tickets: impl IntoIterator<Item = &'a ForkTicket>,
        options: &BorrowOptions,
    ) -> Vec<Result<Self>> {
        let tickets: Vec<_> = tickets.into_iter().collect();
        let waits: Vec<_> = tickets.iter().map(|_| Wait::default()).collect();
        let adopt = |(ticket, wait)| Self::adopt_beside(wait, ticket, options);
        together(&waits, tickets.into_iter().zip(&waits).map(adopt))
    }

    async fn adopt_beside(wait: &Wait, ticket: &ForkTicket, options: &BorrowOptions) -> Result<Self> {
        let options = BorrowOptions { security: ticket.security.clone(), ..options.clone() };
        let mut borrower = Self::attach(wait, &ticket.lender, &ticket.at, &ticket.ticket, &options).await?;
        borrower.identity = ticket.identity;
        Ok(borrower)
    }

    async fn attach(
        wait: &Wait,
        address: &str,
        at: &str,
        ticket: &[u8; 16],
        options: &BorrowOptions,
    ) -> Result<Self> {
        let mut borrower = Self::open(wait, address, at, Role::Borrower, options).await?;
        let pid = options.pid.unwrap_or_else(std::process::id);
        let mut body = BodyWriter::default();
        body.bytes(ticket).u32(pid).text(&options.name);
        let answer = borrower.ask(wait, protocol::ATTACH, body.0, "lease").await?;
        borrower.slab_bytes = borrower.slab_size(&answer)?;
        let is_fork = *ticket != [0; 16];
        borrower.look_around(wait, options.link, is_fork).await?;
        let is_sealed = borrower.protection() == Protection::Encrypted && !options.seals;
        if options.datagrams && borrower.nearby.is_none() && !is_sealed && options.link.wants_datagrams() {
            borrower.look_for_datagrams(wait).await?;
        }
        // Who takes a fork's lease knows, and is perhaps about to fork itself.
        if !is_fork {
            borrower.keep_from_children();
            match borrower.ask(wait, protocol::KIND, Vec::new(), "kind of memory").await {
                Ok(answer) => {
                    let mut answer = BodyReader(&answer);
                    borrower.kind = Class::from_kind(answer.u32().unwrap_or(0));
                    borrower.identity = answer.key();
                }
                Err(Error::Op { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(borrower)
    }

    pub(super) async fn open(
        wait: &Wait,
        address: &str,
        at: &str,
        role: Role,
        options: &BorrowOptions,
    ) -> Result<Self> {
        let (hello, timeout) = (Hello::new(role), options.connect_timeout);
        let (transport, theirs) =
            greeting::connect_beside(wait, address, at, &hello, timeout, &options.security).await?;
        Ok(Self::from_parts(BorrowerParts {
            lender: address.to_owned(),
            slab_bytes: 0,
            transport,
            security: options.security.clone(),
            call_timeout: options.call_timeout,
            limits: (theirs.ops_max, theirs.window),
            nearby: None,
            asker: None,
            kind: Class::Remote,
            identity: None,
        }))
    }

    /// Gives the connection away, for another thread to take with [`Borrower::from_parts`].
    ///
    /// # Panics
    /// When an operation is under way, or when anything but forking and attaching was ever posted on the connection.
    pub fn into_parts(self) -> BorrowerParts {
        assert!(self.pending() == 0, "operations are under way");
        let Self {
            session,
            lender,
            slab_bytes,
            security,
            call_timeout,
            limits,
            nearby,
            asker,
            kind,
            identity,
            ..
        } = self;
        let transport = session.into_links().next().expect("one rail");
        BorrowerParts {
            lender,
            slab_bytes,
            transport,
            security,
            call_timeout,
            limits,
            nearby,
            asker,
            kind,
            identity,
        }
    }

    /// Takes a connection given away with [`Borrower::into_parts`] before any write was posted on it.
    pub fn from_parts(parts: BorrowerParts) -> Self {
        let BorrowerParts {
            lender,
            slab_bytes,
            transport,
            security,
            call_timeout,
            limits,
            nearby,
            asker,
            kind,
            identity,
        } = parts;
        let session = Session::new(vec![transport], limits.0, limits.1);
        let ready = Vec::with_capacity(OPS_MAX);
        let (waiting_since, broken) = (None, None);
        Self {
            session,
            lender,
            slab_bytes,
            security,
            call_timeout,
            limits,
            ready,
            waiting_since,
            probing: false,
            delivery: Delivery::default(),
            broken,
            recall: None,
            room_bytes: None,
            nearby,
            asker,
            kind,
            identity,
            unheard: 0,
        }
    }
}
