//! What client and server agree on before the first request: bytes in, bytes out.

use super::proto::{self, ALLOCATION, ALLOCATION_CONTEXT, answer, handshake, info, option};

const OPTION_BYTES_MAX: u32 = 64 << 10;
const NAME_BYTES_MAX: usize = 4096;
/// Answers that a client may leave unread before the next option is looked at.
pub(super) const TEXT_BYTES_MAX: usize = 256 << 10;

/// What is exported.
#[derive(Clone, Debug)]
pub(super) struct Export {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) size_bytes: u64,
    pub(super) flags: u16,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// More bytes are needed.
    More,
    /// Requests follow.
    Transmission,
    /// Everything from here on is within TLS.
    StartTls,
    /// The client wants no more, or cannot be answered: send what there is, then close.
    Close,
}

/// The client does not speak the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Violation(pub(super) &'static str);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tls {
    /// There is none.
    Off,
    /// It must be started first.
    Wanted,
    On,
}

#[derive(Debug)]
pub(super) struct Negotiation {
    flags_known: bool,
    no_zeroes: bool,
    pub(super) tls: Tls,
    pub(super) structured: bool,
    /// The client wants to know what is allocated.
    pub(super) allocation: bool,
}

impl Negotiation {
    /// Of a client that has just connected; what it is told first is appended to `out`.
    pub(super) fn new(tls: Tls, out: &mut Vec<u8>) -> Self {
        out.extend(proto::NBDMAGIC.to_be_bytes());
        out.extend(proto::IHAVEOPT.to_be_bytes());
        out.extend((handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes());
        Self { flags_known: false, no_zeroes: false, tls, structured: false, allocation: false }
    }

    /// Takes bytes of the client; returns how many of them are done with. Answers are appended to `out`; when it is long after one of them the
    /// others wait.
    pub(super) fn receive(
        &mut self,
        bytes: &[u8],
        export: &Export,
        out: &mut Vec<u8>,
    ) -> Result<(usize, Step), Violation> {
        let mut rest = bytes;
        loop {
            let before = rest;
            let step = match self.flags_known {
                false => self.flags(&mut rest)?,
                true => self.option(&mut rest, export, out)?,
            };
            let is_over = rest.len() == before.len() || !matches!(step, Step::More);
            if is_over || out.len() >= TEXT_BYTES_MAX {
                return Ok((bytes.len() - rest.len(), step));
            }
        }
    }

    fn flags(&mut self, rest: &mut &[u8]) -> Result<Step, Violation> {
        let Some((flags, tail)) = rest.split_first_chunk() else { return Ok(Step::More) };
        let flags = u32::from_be_bytes(*flags);
        let known = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        if flags & !known != 0 || flags & u32::from(handshake::FIXED_NEWSTYLE) == 0 {
            return Err(Violation("it does not do fixed newstyle negotiation"));
        }
        self.no_zeroes = flags & u32::from(handshake::NO_ZEROES) != 0;
        self.flags_known = true;
        *rest = tail;
        Ok(Step::More)
    }

    fn option(&mut self, rest: &mut &[u8], export: &Export, out: &mut Vec<u8>) -> Result<Step, Violation> {
        let mut reader = Reader(rest);
        let (Some(magic), Some(number), Some(length)) = (reader.u64(), reader.u32(), reader.u32()) else {
            return Ok(Step::More);
        };
        if magic != proto::IHAVEOPT {
            return Err(Violation("an option does not begin as one"));
        }
        if length > OPTION_BYTES_MAX {
            return Err(Violation("an option is longer than 64 KiB"));
        }
        let Some(body) = reader.bytes(length as usize) else { return Ok(Step::More) };
        *rest = reader.0;
        let mut reply = |kind: u32, body: &[u8]| {
            out.extend(proto::OPTION_REPLY_MAGIC.to_be_bytes());
            out.extend(number.to_be_bytes());
            out.extend(kind.to_be_bytes());
            out.extend((body.len() as u32).to_be_bytes());
            out.extend(body);
        };
        let may = matches!(number, option::ABORT | option::STARTTLS);
        if self.tls == Tls::Wanted && !may {
            reply(answer::ERR_TLS_REQD, b"this server wants TLS first");
            return Ok(if number == option::EXPORT_NAME { Step::Close } else { Step::More });
        }
        match number {
            option::EXPORT_NAME => {
                // The only one without an answer when it fails.
                if body != export.name.as_bytes() && !body.is_empty() {
                    return Ok(Step::Close);
                }
                out.extend(export.size_bytes.to_be_bytes());
                out.extend(export.flags.to_be_bytes());
                if !self.no_zeroes {
                    out.extend([0; 124]);
                }
                return Ok(Step::Transmission);
            }
            option::ABORT => {
                reply(answer::ACK, &[]);
                return Ok(Step::Close);
            }
            option::LIST if !body.is_empty() => reply(answer::ERR_INVALID, b"a list has no argument"),
            option::LIST => {
                let name = export.name.as_bytes();
                let body = [&(name.len() as u32).to_be_bytes(), name, export.description.as_bytes()].concat();
                reply(answer::SERVER, &body);
                reply(answer::ACK, &[]);
            }
            option::STARTTLS if self.tls == Tls::Wanted && body.is_empty() => {
                reply(answer::ACK, &[]);
                (self.tls, self.structured, self.allocation) = (Tls::On, false, false);
                return Ok(Step::StartTls);
            }
            option::STARTTLS if self.tls == Tls::On || !body.is_empty() => {
                reply(answer::ERR_INVALID, b"TLS has been started already");
            }
            option::STRUCTURED_REPLY if body.is_empty() => {
                self.structured = true;
                reply(answer::ACK, &[]);
            }
            option::STRUCTURED_REPLY => reply(answer::ERR_INVALID, b"structured replies have no argument"),
            option::INFO | option::GO => match wanted(body) {
                None => reply(answer::ERR_INVALID, b"the request's lengths do not add up"),
                Some((name, _)) if !is(export, name) => {
                    reply(answer::ERR_UNKNOWN, b"there is no export of this name");
                }
                Some((_, kinds)) => {
                    let mut told = Vec::new();
                    told.extend(info::EXPORT.to_be_bytes());
                    told.extend(export.size_bytes.to_be_bytes());
                    told.extend(export.flags.to_be_bytes());
                    reply(answer::INFO, &told);
                    // Each once, however often it is asked for.
                    for kind in [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE] {
                        if !kinds.clone().any(|asked| asked == kind) {
                            continue;
                        }
                        let mut told = kind.to_be_bytes().to_vec();
                        match kind {
                            info::NAME => told.extend(export.name.as_bytes()),
                            info::DESCRIPTION => told.extend(export.description.as_bytes()),
                            _ => {
                                let sizes = [proto::BLOCK_MIN, proto::BLOCK_PREFERRED, proto::PAYLOAD_MAX];
                                sizes.iter().for_each(|size| told.extend(size.to_be_bytes()));
                            }
                        }
                        reply(answer::INFO, &told);
                    }
                    reply(answer::ACK, &[]);
                    if number == option::GO {
                        return Ok(Step::Transmission);
                    }
                }
            },
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => match contexts(body) {
                _ if !self.structured => {
                    reply(answer::ERR_INVALID, b"contexts need structured replies");
                }
                None => reply(answer::ERR_INVALID, b"the request's lengths do not add up"),
                Some((name, _)) if !is(export, name) => {
                    reply(answer::ERR_UNKNOWN, b"there is no export of this name");
                }
                Some((_, queries)) => {
                    let is_list = number == option::LIST_META_CONTEXT;
                    let all = is_list && (queries.is_empty() || queries.contains(&&b"base:"[..]));
                    let found = all || queries.contains(&ALLOCATION.as_bytes());
                    if found {
                        let id = if is_list { 0 } else { ALLOCATION_CONTEXT };
                        reply(answer::META_CONTEXT, &[&id.to_be_bytes(), ALLOCATION.as_bytes()].concat());
                    }
                    self.allocation = if is_list { self.allocation } else { found };
                    reply(answer::ACK, &[]);
                }
            },
            _ => reply(answer::ERR_UNSUP, b"this server does not know the option"),
        }
        Ok(Step::More)
    }
}

/// The empty name is the default export.
fn is(export: &Export, name: &[u8]) -> bool {
    name.is_empty() || name == export.name.as_bytes()
}

/// Of an INFO or GO: the export's name and what to tell about it.
fn wanted(body: &[u8]) -> Option<(&[u8], impl Iterator<Item = u16> + Clone)> {
    let mut reader = Reader(body);
    let name = reader.text()?;
    let count = usize::from(reader.u16()?);
    let kinds = reader.bytes(2 * count)?;
    let kinds = kinds.as_chunks::<2>().0.iter().map(|kind| u16::from_be_bytes(*kind));
    reader.0.is_empty().then_some((name, kinds))
}

/// Of a request about contexts: the export's name, and the queries.
fn contexts(body: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut reader = Reader(body);
    let name = reader.text()?;
    let count = reader.u32()?;
    // As many as there is room for, whatever the number says.
    let queries: Option<Vec<_>> = (0..count).map(|_| reader.text()).collect();
    reader.0.is_empty().then_some((name, queries?))
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count)?;
        self.0 = tail;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let length = self.u32()? as usize;
        if length > NAME_BYTES_MAX { None } else { self.bytes(length) }
    }
}

/// However a client's bytes are cut, the answers are the same.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn fuzz(bytes: &[u8]) {
    let export = Export {
        name: "e".to_owned(),
        description: "an export".to_owned(),
        size_bytes: 1 << 30,
        flags: proto::transmission::HAS_FLAGS,
    };
    let Some((&first, bytes)) = bytes.split_first() else { return };
    let tls = if first & 1 == 0 { Tls::Off } else { Tls::Wanted };
    let run = |cut: usize| {
        let mut out = Vec::new();
        let mut negotiation = Negotiation::new(tls, &mut out);
        let (mut start, mut end) = (0, cut.min(bytes.len()));
        loop {
            match negotiation.receive(&bytes[start..end], &export, &mut out) {
                Ok((used, Step::More)) => {
                    start += used;
                    if used > 0 {
                        continue;
                    }
                    if end == bytes.len() {
                        return (out, Ok(Step::More));
                    }
                    end = (end + cut).min(bytes.len());
                }
                Ok((used, step)) => {
                    assert!(start + used <= end);
                    return (out, Ok(step));
                }
                Err(violation) => return (out, Err(violation)),
            }
        }
    };
    let whole = run(bytes.len().max(1));
    assert_eq!(run(1 + usize::from(first >> 4)), whole);
    // No option is answered by much more than it has.
    assert!(whole.0.len() <= 1024 + 64 * bytes.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(number: u32, body: &[u8]) -> Vec<u8> {
        let (magic, length) = (proto::IHAVEOPT.to_be_bytes(), (body.len() as u32).to_be_bytes());
        [&magic[..], &number.to_be_bytes(), &length, body].concat()
    }

    fn export() -> Export {
        Export { name: "disk".to_owned(), description: "a disk".to_owned(), size_bytes: 4096, flags: 5 }
    }

    fn fresh(tls: Tls) -> Negotiation {
        let mut negotiation = Negotiation::new(tls, &mut Vec::new());
        let step = negotiation.receive(&3u32.to_be_bytes(), &export(), &mut Vec::new());
        assert_eq!(step, Ok((4, Step::More)));
        negotiation
    }

    fn kinds(mut out: &[u8]) -> Vec<u32> {
        let mut kinds = Vec::new();
        while !out.is_empty() {
            kinds.push(u32::from_be_bytes(out[12..16].try_into().unwrap()));
            let length = u32::from_be_bytes(out[16..20].try_into().unwrap());
            out = &out[20 + length as usize..];
        }
        kinds
    }

    #[test]
    fn go_tells_what_was_asked_for_and_begins() {
        let mut out = Vec::new();
        let mut negotiation = fresh(Tls::Off);
        let body = [&4u32.to_be_bytes()[..], b"disk", &2u16.to_be_bytes(), &[0, 3, 0, 99]].concat();
        let asked = [ask(option::STRUCTURED_REPLY, &[]), ask(option::GO, &body), b"rest".to_vec()].concat();
        let step = negotiation.receive(&asked, &export(), &mut out).unwrap();
        assert_eq!(step, (asked.len() - 4, Step::Transmission));
        assert_eq!(kinds(&out), [answer::ACK, answer::INFO, answer::INFO, answer::ACK]);
        assert!(negotiation.structured && !negotiation.allocation);
    }

    #[test]
    fn answers_are_no_longer_than_somebody_reads() {
        let mut negotiation = fresh(Tls::Off);
        let asked = ask(option::LIST, &[]).repeat(40_000);
        let (mut from, mut answers) = (0, 0);
        while from < asked.len() {
            let mut out = Vec::new();
            let (used, step) = negotiation.receive(&asked[from..], &export(), &mut out).unwrap();
            assert!(used > 0 && step == Step::More && out.len() < TEXT_BYTES_MAX + 1024, "{}", out.len());
            from += used;
            answers += kinds(&out).len();
        }
        assert_eq!(answers, 2 * 40_000);
        let wanted = [&[0; 4][..], &30_000_u16.to_be_bytes(), &[0, 3].repeat(30_000)].concat();
        let mut out = Vec::new();
        negotiation.receive(&ask(option::INFO, &wanted), &export(), &mut out).unwrap();
        assert_eq!(kinds(&out), [answer::INFO, answer::INFO, answer::ACK]);
    }

    #[test]
    fn wrong_options_are_answered_and_the_next_one_counts() {
        let mut out = Vec::new();
        let mut negotiation = fresh(Tls::Off);
        let body = |name: &[u8]| [&(name.len() as u32).to_be_bytes()[..], name, &[0, 0]].concat();
        for (asked, expected) in [
            (ask(77, b"?"), answer::ERR_UNSUP),
            (ask(option::INFO, &body(b"other")), answer::ERR_UNKNOWN),
            (ask(option::INFO, &[0, 0, 0, 9]), answer::ERR_INVALID),
            (ask(option::SET_META_CONTEXT, &[0; 8]), answer::ERR_INVALID),
            (ask(option::STARTTLS, &[]), answer::ERR_UNSUP),
            (ask(option::LIST, b"x"), answer::ERR_INVALID),
        ] {
            out.clear();
            let step = negotiation.receive(&asked, &export(), &mut out);
            assert_eq!((step, kinds(&out)), (Ok((asked.len(), Step::More)), vec![expected]));
        }
        let huge = [proto::IHAVEOPT.to_be_bytes(), [0, 0, 0, 3, 0xff, 0, 0, 0]].concat();
        assert!(negotiation.receive(&huge, &export(), &mut out).is_err());
    }

    #[test]
    fn nothing_is_told_before_tls() {
        let mut negotiation = fresh(Tls::Wanted);
        let mut out = Vec::new();
        negotiation.receive(&ask(option::LIST, &[]), &export(), &mut out).unwrap();
        assert_eq!(kinds(&out), [answer::ERR_TLS_REQD]);
        let name = ask(option::EXPORT_NAME, b"disk");
        assert_eq!(negotiation.receive(&name, &export(), &mut out).unwrap().1, Step::Close);
        let start = ask(option::STARTTLS, &[]);
        assert_eq!(negotiation.receive(&start, &export(), &mut out).unwrap().1, Step::StartTls);
        out.clear();
        negotiation.receive(&ask(option::LIST, &[]), &export(), &mut out).unwrap();
        assert_eq!(kinds(&out), [answer::SERVER, answer::ACK]);
    }

    #[test]
    fn any_bytes_in_any_portions() {
        let mut random = netvm_core::sim::Random::new(3);
        for _ in 0..3000 {
            let mut bytes = vec![random.draw() as u8, 0, 0, 0, 3];
            for _ in 0..random.below(5) {
                let body: Vec<u8> = (0..random.below(24)).map(|_| random.below(5) as u8).collect();
                bytes.extend(ask(random.below(12) as u32, &body));
            }
            bytes.truncate(random.below(bytes.len() as u64 + 1) as usize);
            fuzz(&bytes);
        }
    }
}
