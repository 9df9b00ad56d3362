//! The start of a connection: proofs of the secret if there is one, then hellos, then a [`Transport`] for the session.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use netvm_core::limits::{HELLO_BYTES, HELLO_TIMEOUT_MS};
use netvm_core::opening::{Encryption, FEATURE_ENCRYPTED, Opening, SEALED_HELLO_BYTES};
use netvm_core::wire::{Hello, Refusal, Role, WireError};
use netvm_sys::net::{Address, Dialing};

use super::auth::{self, Connecting, Keys};
use super::sealed::Sealed;
use super::together::{Wait, alone};
use super::{Caps, Incoming, Link, Outgoing, Stream};
use crate::error::{Error, Result};
use crate::security::{Protection, Security};

/// A connection that a session may use.
pub(crate) enum Transport {
    /// Bytes travel as they are. The flag says whether the peer has proved that it knows the secret.
    Plain(Stream, bool),
    /// Every byte is encrypted.
    Sealed(Box<Sealed<Stream>>),
}

impl Transport {
    fn new(stream: Stream, keys: Option<Keys>, encrypted: bool) -> Self {
        match keys {
            Some(keys) if encrypted => Self::Sealed(Box::new(Sealed::new(stream, keys))),
            keys => Self::Plain(stream, keys.is_some()),
        }
    }

    pub(crate) fn stream(&self) -> &Stream {
        match self {
            Self::Plain(stream, _) => stream,
            Self::Sealed(sealed) => sealed.link(),
        }
    }

    pub(crate) fn protection(&self) -> Protection {
        match self {
            Self::Plain(_, false) => Protection::None,
            Self::Plain(_, true) => Protection::Authenticated,
            Self::Sealed(_) => Protection::Encrypted,
        }
    }
}

impl Link for Transport {
    fn caps(&self) -> Caps {
        match self {
            Self::Plain(stream, _) => stream.caps(),
            Self::Sealed(sealed) => sealed.caps(),
        }
    }

    fn post(&mut self, pieces: &Outgoing<'_>) -> io::Result<usize> {
        match self {
            Self::Plain(stream, _) => stream.post(pieces),
            Self::Sealed(sealed) => sealed.post(pieces),
        }
    }

    fn poll(&mut self, pieces: &mut Incoming<'_>) -> io::Result<usize> {
        match self {
            Self::Plain(stream, _) => stream.poll(pieces),
            Self::Sealed(sealed) => sealed.poll(pieces),
        }
    }

    fn has_unsent(&self) -> bool {
        matches!(self, Self::Sealed(sealed) if sealed.has_unsent())
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Plain(..) => Ok(()),
            Self::Sealed(sealed) => sealed.flush(),
        }
    }

    fn has_received(&self) -> bool {
        matches!(self, Self::Sealed(sealed) if sealed.has_received())
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.stream().as_fd()
    }
}

/// Connects, proves the secret if there is one, and exchanges hellos.
pub(crate) fn connect(
    address: &str,
    hello: &Hello,
    timeout: Duration,
    security: &Security,
) -> Result<(Transport, Hello)> {
    alone(async |wait| connect_beside(wait, address, address, hello, timeout, security).await)
}

/// The same beside others, at `at`: where `address` was reached before, or the same.
pub(crate) async fn connect_beside(
    wait: &Wait,
    address: &str,
    at: &str,
    hello: &Hello,
    timeout: Duration,
    security: &Security,
) -> Result<(Transport, Hello)> {
    security.check()?;
    let parsed: Address = at
        .parse()
        .map_err(|reason: &str| Error::Address { address: address.to_owned(), reason: reason.into() })?;
    let stream = dial(wait, &parsed, timeout)
        .await
        .map_err(|error| Error::Connect { lender: address.to_owned(), reason: error.to_string() })?;
    greet(wait, stream, address, hello, timeout, security).await
}

/// A stream to one address.
pub(super) async fn dial(wait: &Wait, address: &Address, timeout: Duration) -> io::Result<Stream> {
    let deadline = Instant::now() + timeout;
    let mut dialing = Dialing::start(address)?;
    loop {
        if let Some(stream) = dialing.progress()? {
            return Ok(stream);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        wait.ready(dialing.wait_fd(), libc::POLLOUT, dialing.patience().min(left)).await?;
    }
}

/// The rest of [`connect`].
pub(crate) async fn greet(
    wait: &Wait,
    stream: Stream,
    address: &str,
    hello: &Hello,
    timeout: Duration,
    security: &Security,
) -> Result<(Transport, Hello)> {
    let dialogue = Dialogue { wait, address, stream, timeout, deadline: Instant::now() + timeout };
    let Some(secret) = &security.secret else {
        dialogue.send(&hello.encode())?;
        let theirs = dialogue.hello(&dialogue.first().await?, false)?;
        return Ok((Transport::new(dialogue.stream, None, false), theirs));
    };
    let opening = Opening::new(hello.role, security.encryption);
    let Some((proof, message)) = Connecting::start(secret, opening) else {
        return Err(Error::Other("cannot get random numbers".to_owned()));
    };
    dialogue.send(&message)?;
    let answer = dialogue.first().await?;
    if Opening::decode(&answer).map_err(|error| dialogue.unfit(error))?.is_none() {
        // A hello: a refusal, or somebody who would like us to do without a proof.
        dialogue.hello(&answer, true)?;
        return Err(Error::NoSecret { lender: address.to_owned() });
    }
    let wrong = |_| Error::WrongSecret { lender: address.to_owned() };
    let mut keys = proof.finish(&answer).map_err(wrong)?;
    dialogue.send(&keys.seal_hello(&hello.encode()))?;
    let mut sealed = [0; SEALED_HELLO_BYTES];
    dialogue.receive(&mut sealed, false).await?;
    let theirs = dialogue.hello(&keys.open_hello(sealed).map_err(wrong)?, true)?;
    let encrypted = theirs.features & FEATURE_ENCRYPTED != 0;
    // It has proved that it knows the secret, so this is its own mistake and not an attack.
    if security.encryption.agree(if encrypted { Encryption::Always } else { Encryption::Never })
        != Some(encrypted)
    {
        return Err(Error::NoEncryption { lender: address.to_owned() });
    }
    Ok((Transport::new(dialogue.stream, Some(keys), encrypted), theirs))
}

/// The connecting side's half of the greeting.
struct Dialogue<'a> {
    wait: &'a Wait,
    address: &'a str,
    stream: Stream,
    timeout: Duration,
    deadline: Instant,
}

impl Dialogue<'_> {
    fn lender(&self) -> String {
        self.address.to_owned()
    }

    fn connect_error(&self, error: &io::Error) -> Error {
        Error::Connect { lender: self.lender(), reason: error.to_string() }
    }

    /// A fresh socket takes a greeting whole; if it does not, the peer is in no state to answer either.
    fn send(&self, bytes: &[u8]) -> Result<()> {
        let mut out = Outgoing::new();
        out.bytes(bytes);
        self.stream.send(&out).map(drop).map_err(|error| self.connect_error(&error))
    }

    async fn first(&self) -> Result<[u8; HELLO_BYTES]> {
        let mut bytes = [0; HELLO_BYTES];
        self.receive(&mut bytes, true).await?;
        Ok(bytes)
    }

    /// Receives exactly these bytes: what comes behind them belongs to the session.
    async fn receive(&self, bytes: &mut [u8], begins: bool) -> Result<()> {
        let mut have = 0;
        while have < bytes.len() {
            match self.receive_some(&mut bytes[have..]) {
                Ok(0) => return Err(Error::NotNetvm { lender: self.lender() }),
                Ok(received) => have += received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let left = self.deadline.saturating_duration_since(Instant::now());
                    let came = match left.is_zero() {
                        true => Ok(false),
                        false => self.wait.ready(Some(self.stream.as_fd()), libc::POLLIN, left).await,
                    };
                    if !came.map_err(|error| self.connect_error(&error))? {
                        let after_ms = self.timeout.as_millis() as u64;
                        return Err(Error::Timeout { lender: self.lender(), what: "its hello", after_ms });
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(Error::NotNetvm { lender: self.lender() });
                }
                Err(error) => return Err(self.connect_error(&error)),
            }
            if begins && !Hello::may_start_with(&bytes[..have]) {
                return Err(Error::NotNetvm { lender: self.lender() });
            }
        }
        Ok(())
    }

    fn receive_some(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut into = Incoming::new();
        into.bytes(bytes);
        self.stream.receive(&mut into)
    }

    fn unfit(&self, error: WireError) -> Error {
        match error {
            WireError::Version { theirs, theirs_min } => {
                Error::Version { lender: self.lender(), theirs, theirs_min }
            }
            _ => Error::NotNetvm { lender: self.lender() },
        }
    }

    /// Reads an answer; an error when it is a refusal.
    fn hello(&self, bytes: &[u8; HELLO_BYTES], have_secret: bool) -> Result<Hello> {
        let lender = self.lender();
        if Opening::decode(bytes).map_err(|error| self.unfit(error))?.is_some() {
            // A proof that nobody asked for.
            return Err(Error::NotNetvm { lender });
        }
        let theirs = Hello::decode(bytes).map_err(|error| self.unfit(error))?;
        let reason = match theirs.refusal {
            Refusal::None => return Ok(theirs),
            Refusal::Version => {
                let Hello { version, version_min, .. } = theirs;
                return Err(Error::Version { lender, theirs: version, theirs_min: version_min });
            }
            Refusal::Secret if have_secret => return Err(Error::WrongSecret { lender }),
            Refusal::Secret => return Err(Error::NeedsSecret { lender }),
            Refusal::NoSecret => return Err(Error::NoSecret { lender }),
            Refusal::Encryption => return Err(Error::NoEncryption { lender }),
            Refusal::Busy => "it has too many connections; try again later",
            Refusal::Stopping => STOPPING,
            Refusal::Role if theirs.role == Role::Transfer => {
                "it does not serve this kind of peer, but a `netvm send` with its own --framing; give both sides the same"
            }
            Refusal::Role => "it does not serve this kind of peer; check the address",
        };
        Err(Error::Refused { lender, reason: reason.to_owned() })
    }
}

/// A connection that has not said hello yet. Until the secret is proved it costs this and nothing else.
pub(crate) struct Greeting {
    stream: Stream,
    role: Role,
    since: Instant,
    bytes: [u8; SEALED_HELLO_BYTES],
    have: usize,
    proved: Option<Box<Proved>>,
}

/// The peer, or somebody who has recorded it, knows the secret.
struct Proved {
    keys: Keys,
    role: u16,
    /// What both sides agree on, if they do.
    encrypted: Option<bool>,
}

/// How far a greeting has come.
pub(crate) enum Greeted {
    /// It waits for more.
    Waiting(Greeting),
    /// The peer has said who it is, and wants an answer.
    Hello(Box<Arrival>),
    /// It is over.
    Gone(&'static str),
}

type Refused = (Refusal, &'static str);
const ENDED: &str = "it closed the connection";
/// Why [`Arrival::accept`] says no, mostly.
pub(crate) const UNENCRYPTED: &str = "one side insists on encryption, and the other does not encrypt";
/// The reason of who is about to end.
pub(crate) const STOPPING: &str = "it is shutting down; use another lender";

impl Greeting {
    /// A connection just taken by a node or lender (`role`).
    pub(crate) fn new(stream: Stream, role: Role) -> Self {
        Self { stream, role, since: Instant::now(), bytes: [0; SEALED_HELLO_BYTES], have: 0, proved: None }
    }

    /// When it was taken.
    pub(crate) fn since(&self) -> Instant {
        self.since
    }

    /// Readable while [`Greeting::progress`] would come further.
    pub(crate) fn wait_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Whether it takes too long, however far it has come.
    pub(crate) fn is_late(&self, now: Instant) -> bool {
        now - self.since > Duration::from_millis(HELLO_TIMEOUT_MS)
    }

    /// Receives what is there; never blocks.
    pub(crate) fn progress(mut self, security: &Security) -> Greeted {
        loop {
            let wanted = if self.proved.is_some() { SEALED_HELLO_BYTES } else { HELLO_BYTES };
            let mut into = Incoming::new();
            into.bytes(&mut self.bytes[self.have..wanted]);
            match self.stream.receive(&mut into) {
                Ok(received) if received > 0 => self.have += received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Greeted::Waiting(self),
                _ => return Greeted::Gone(ENDED),
            }
            if self.proved.is_none() && !Hello::may_start_with(&self.bytes[..self.have]) {
                return Greeted::Gone("it does not speak netvm's protocol");
            }
            if self.have < wanted {
                continue;
            }
            let hello = match self.proved.take() {
                None => self.first(security),
                Some(proved) => self.second(*proved).map(Some),
            };
            match hello {
                Ok(None) => self.have = 0,
                Ok(Some((hello, keys, encrypted))) => {
                    let Self { stream, role, .. } = self;
                    return Greeted::Hello(Box::new(Arrival { hello, stream, role, keys, encrypted }));
                }
                Err((refusal, why)) => {
                    if refusal != Refusal::None {
                        refuse(&self.stream, self.role, refusal);
                    }
                    return Greeted::Gone(why);
                }
            }
        }
    }

    /// The first message is there: a hello, or a proof, which is answered.
    #[expect(clippy::type_complexity, reason = "the parts of an arrival")]
    fn first(&mut self, security: &Security) -> Result<Option<(Hello, Option<Keys>, Option<bool>)>, Refused> {
        let bytes: [u8; HELLO_BYTES] = std::array::from_fn(|index| self.bytes[index]);
        let opening = Opening::decode(&bytes).map_err(unfit)?;
        let (secret, theirs) = match (&security.secret, opening) {
            (None, None) => return Ok(Some((Hello::decode(&bytes).map_err(unfit)?, None, Some(false)))),
            (None, Some(_)) => return Err((Refusal::NoSecret, "it wants a secret proved, and we have none")),
            (Some(_), None) => return Err((Refusal::Secret, "it has proved no secret")),
            (Some(secret), Some(theirs)) => (secret, theirs),
        };
        let ours = Opening::new(self.role, security.encryption);
        let (keys, answer) =
            auth::answer(secret, &bytes, ours).map_err(|_| (Refusal::Secret, "its secret is not ours"))?;
        if !send(&self.stream, &answer) {
            return Err((Refusal::None, ENDED));
        }
        let encrypted = theirs.encryption.agree(security.encryption);
        self.proved = Some(Box::new(Proved { keys, role: theirs.role, encrypted }));
        Ok(None)
    }

    /// The sealed hello is there: only who knows the secret and is there now can have made it.
    fn second(&mut self, proved: Proved) -> Result<(Hello, Option<Keys>, Option<bool>), Refused> {
        let Proved { mut keys, role, encrypted } = proved;
        // Nothing to answer: whoever altered it would be told no more than that.
        let hello =
            keys.open_hello(self.bytes).map_err(|_| (Refusal::None, "its proof was recorded or altered"))?;
        let hello = Hello::decode(&hello).map_err(|_| (Refusal::None, "its hello makes no sense"))?;
        if hello.role as u16 != role {
            return Err((Refusal::None, "it has changed its role"));
        }
        Ok((hello, Some(keys), encrypted))
    }
}

/// Somebody who may connect and waits for our answer.
pub(crate) struct Arrival {
    /// Who it is.
    pub(crate) hello: Hello,
    stream: Stream,
    role: Role,
    keys: Option<Keys>,
    encrypted: Option<bool>,
}

impl Arrival {
    /// The connection.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Answers yes; `None` when the peer has gone, or when one of the two insists on encryption and the other does not encrypt.
    pub(crate) fn accept(self) -> Option<Transport> {
        let Some(encrypted) = self.encrypted else {
            self.refuse(Refusal::Encryption);
            return None;
        };
        let (mut keys, stream) = (self.keys, self.stream);
        let features = if encrypted { FEATURE_ENCRYPTED } else { 0 };
        let hello = Hello { features, ..Hello::new(self.role) };
        reply(&stream, keys.as_mut(), &hello).then(|| Transport::new(stream, keys, encrypted))
    }

    /// Answers no.
    pub(crate) fn refuse(mut self, refusal: Refusal) {
        let hello = Hello { refusal, ..Hello::new(self.role) };
        reply(&self.stream, self.keys.as_mut(), &hello);
    }
}

/// Says no to somebody whose hello we do not even read.
pub(crate) fn refuse(stream: &Stream, role: Role, refusal: Refusal) {
    reply(stream, None, &Hello { refusal, ..Hello::new(role) });
}

fn reply(stream: &Stream, keys: Option<&mut Keys>, hello: &Hello) -> bool {
    match keys {
        Some(keys) => send(stream, &keys.seal_hello(&hello.encode())),
        None => send(stream, &hello.encode()),
    }
}

fn send(stream: &Stream, bytes: &[u8]) -> bool {
    let mut out = Outgoing::new();
    out.bytes(bytes);
    matches!(stream.send(&out), Ok(sent) if sent == bytes.len())
}

fn unfit(error: WireError) -> Refused {
    match error {
        WireError::Version { .. } => (Refusal::Version, "it speaks other versions"),
        _ => (Refusal::Role, "its hello makes no sense"),
    }
}
