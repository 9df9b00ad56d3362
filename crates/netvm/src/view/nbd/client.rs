//! One connection of a client.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use netvm_sys::pipe::Pages;

use super::buffers::{Buffer, Buffers};
use super::negotiation::{Export, Negotiation, Step, TEXT_BYTES_MAX};
use super::proto::{Head, PAYLOAD_MAX, REQUEST_BYTES, Request, command};
use super::tls::{Tls, TlsFiles};
use crate::lender::Place;
use crate::link::{Incoming, Link, Outgoing, Stream};

/// Bytes received at once besides payload.
const STAGE_BYTES: usize = 80 << 10;
/// Buffers that one client's requests may use.
const USED_MAX: usize = 64 << 20;
/// Requests of one client at once, and answers that it has not taken.
const REQUESTS_MAX: usize = 1024;
/// Receives before others have their turn.
const ROUNDS_MAX: usize = 16;

/// Something to send.
struct Answer {
    head: Head,
    data: Option<(Buffer, usize)>,
}

/// A request that is complete.
pub(super) struct Arrived {
    pub(super) request: Request,
    /// For the data of a read, or with the payload of a write; `None` when there was no memory, or it is too long.
    pub(super) buffer: Option<Buffer>,
}

/// Why a client is closed.
pub(super) enum Parting {
    /// It has gone, or wants to.
    Gone,
    /// It does not keep to the protocol.
    Violation(String),
}

impl From<io::Error> for Parting {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::InvalidData => Self::Violation(error.to_string()),
            _ => Self::Gone,
        }
    }
}

/// Takes pages of the bytes from `done` on, of `bytes`; false when there are none, or nobody knows whose they are by now.
pub(super) fn take(pages: &mut Pages, place: &Place<'_>, done: usize, bytes: usize) -> bool {
    matches!(pages.take(&place.lease.file, place.at + done as u64, bytes - done), Ok(1..))
        && place.lease.is_lent()
}

/// Payload under way.
struct Payload {
    request: Request,
    /// `None`: there was no memory for it, or it is too long; it is thrown away.
    buffer: Option<Buffer>,
    got: usize,
}

pub(super) struct Client {
    /// `None` only while TLS begins.
    link: Option<Box<dyn Link>>,
    /// For TLS to begin on.
    plain: Option<Stream>,
    pub(super) negotiation: Option<Negotiation>,
    pub(super) structured: bool,
    pub(super) allocation: bool,
    pub(super) since: Instant,
    /// Received and not used: `stage[from..to]`.
    stage: Box<[u8]>,
    from: usize,
    to: usize,
    payload: Option<Payload>,
    /// What negotiation has to say.
    text: Vec<u8>,
    answers: VecDeque<Answer>,
    /// Bytes of the first answer, or of the text, that have been sent.
    sent: usize,
    /// Requests that have not been answered, and bytes of their buffers.
    pub(super) requests: usize,
    pub(super) used: usize,
    /// Nothing more is received; it is closed when all has been answered.
    closing: bool,
    /// What it has sent may be here, where no event tells of it: it was not looked at because of a limit.
    pub(super) put_off: bool,
    pub(super) interest: (bool, bool),
    pub(super) served: u64,
}

impl Client {
    pub(super) fn new(stream: Stream, tls: super::negotiation::Tls) -> Self {
        let mut text = Vec::new();
        let negotiation = Some(Negotiation::new(tls, &mut text));
        Self {
            link: None,
            plain: Some(stream),
            negotiation,
            structured: false,
            allocation: false,
            since: Instant::now(),
            stage: vec![0; STAGE_BYTES].into(),
            from: 0,
            to: 0,
            payload: None,
            text,
            answers: VecDeque::new(),
            sent: 0,
            requests: 0,
            used: 0,
            closing: false,
            put_off: false,
            interest: (true, false),
            served: 0,
        }
    }

    fn link(&mut self) -> &mut dyn Link {
        match (&mut self.link, &mut self.plain) {
            (Some(link), _) => link.as_mut(),
            (None, Some(stream)) => stream,
            (None, None) => unreachable!("a client has a stream or a link"),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match (&self.link, &self.plain) {
            (Some(link), _) => link.wait_fd(),
            (None, Some(stream)) => stream.wait_fd(),
            (None, None) => unreachable!("a client has a stream or a link"),
        }
    }

    /// Whether it may send more now, beside the payload that is on its way.
    pub(super) fn wants_read(&self) -> bool {
        let has_room = self.used < USED_MAX
            && self.requests < REQUESTS_MAX
            && self.answers.len() < REQUESTS_MAX
            && self.text.len() < TEXT_BYTES_MAX;
        !self.closing && (self.has_payload() || has_room)
    }

    /// A payload has begun, and has its buffer.
    pub(super) fn has_payload(&self) -> bool {
        self.payload.is_some()
    }

    pub(super) fn wants_write(&self) -> bool {
        !self.text.is_empty()
            || !self.answers.is_empty()
            || self.link.as_ref().is_some_and(|link| link.has_unsent())
    }

    /// Whether there is nothing left to do for one that is being closed.
    pub(super) fn is_over(&self) -> bool {
        self.closing && self.requests == 0 && !self.wants_write()
    }

    /// Takes no more requests.
    pub(super) fn close(&mut self) {
        self.closing = true;
    }

    /// Receives what is there. Complete requests are appended to `arrived`. True when there may be more.
    pub(super) fn receive(
        &mut self,
        export: &Export,
        tls: Option<&TlsFiles>,
        buffers: &mut Buffers,
        arrived: &mut Vec<Arrived>,
    ) -> Result<bool, Parting> {
        self.put_off = false;
        for _ in 0..ROUNDS_MAX {
            if !self.sort(export, tls, buffers, arrived)? || !self.wants_read() {
                self.put_off = true;
                return Ok(false);
            }
            self.stage.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
            match self.receive_once() {
                Ok(0) => return Err(Parting::Gone),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    fn receive_once(&mut self) -> io::Result<usize> {
        let mut into = Incoming::new();
        let mut direct = 0;
        if let Some(Payload { request, buffer: Some(buffer), got }) = &self.payload {
            let all = request.bytes as usize;
            if let Some(rest) = buffer.part(all).sub(*got, all - got) {
                direct = rest.len();
                into.shared(rest);
            }
        }
        into.bytes(&mut self.stage[self.to..]);
        let received = match (&mut self.link, &mut self.plain) {
            (Some(link), _) => link.poll(&mut into)?,
            (None, Some(stream)) => stream.poll(&mut into)?,
            (None, None) => 0,
        };
        if let Some(payload) = &mut self.payload {
            payload.got += received.min(direct);
        }
        self.to += received.saturating_sub(direct);
        Ok(received)
    }

    /// Makes requests of what has been received; false when nothing more is wanted.
    fn sort(
        &mut self,
        export: &Export,
        tls: Option<&TlsFiles>,
        buffers: &mut Buffers,
        arrived: &mut Vec<Arrived>,
    ) -> Result<bool, Parting> {
        loop {
            if self.closing {
                return Ok(false);
            }
            let staged = &self.stage[self.from..self.to];
            if let Some(negotiation) = &mut self.negotiation {
                if self.text.len() >= TEXT_BYTES_MAX {
                    return Ok(false);
                }
                let received = negotiation.receive(staged, export, &mut self.text);
                let (used, step) = received.map_err(|what| Parting::Violation(what.0.to_owned()))?;
                self.from += used;
                match step {
                    Step::More if used == 0 => return Ok(true),
                    Step::More => {}
                    Step::Close => self.closing = true,
                    Step::Transmission => {
                        (self.structured, self.allocation) = (negotiation.structured, negotiation.allocation);
                        self.negotiation = None;
                    }
                    Step::StartTls => self.start_tls(tls)?,
                }
                continue;
            }
            if let Some(payload) = &mut self.payload {
                let missing = payload.request.bytes as usize - payload.got;
                let take = missing.min(staged.len());
                if let Some(buffer) = &payload.buffer {
                    let rest = buffer.part(payload.request.bytes as usize).sub(payload.got, take);
                    rest.and_then(|rest| rest.write_from(0, &staged[..take]));
                }
                payload.got += take;
                self.from += take;
                if take < missing {
                    return Ok(true);
                }
                if let Some(Payload { request, buffer, .. }) = self.payload.take() {
                    arrived.push(Arrived { request, buffer });
                }
                continue;
            }
            let Some(head) = staged.first_chunk::<REQUEST_BYTES>() else { return Ok(true) };
            if !self.wants_read() {
                return Ok(false);
            }
            let request = Request::decode(head)
                .ok_or_else(|| Parting::Violation("a request does not begin as one".to_owned()))?;
            self.from += REQUEST_BYTES;
            let has_data = matches!(request.command, command::READ | command::WRITE);
            // From here on it counts: more are not even looked at above the limit.
            let fits = has_data && request.bytes <= PAYLOAD_MAX;
            let buffer = if fits { buffers.take(request.bytes as usize) } else { None };
            self.used += buffer.as_ref().map_or(0, Buffer::len);
            match request.command {
                command::DISC => {
                    self.closing = true;
                    continue;
                }
                command::WRITE => self.payload = Some(Payload { request, buffer, got: 0 }),
                _ => arrived.push(Arrived { request, buffer }),
            }
            self.requests += 1;
        }
    }

    fn start_tls(&mut self, tls: Option<&TlsFiles>) -> Result<(), Parting> {
        // Whatever the client sent before it had our answer was not within TLS: somebody put it there.
        if self.from < self.to {
            return Err(Parting::Violation("bytes between STARTTLS and its answer".to_owned()));
        }
        self.send()?;
        let (Some(files), Some(stream), true) = (tls, self.plain.take(), self.text.is_empty()) else {
            return Err(Parting::Gone);
        };
        self.link = Some(Box::new(Tls::new(stream, files)?));
        Ok(())
    }

    pub(super) fn answer(&mut self, head: Head, data: Option<(Buffer, usize)>) {
        self.answers.push_back(Answer { head, data });
        self.requests -= 1;
        self.served += 1;
    }

    /// Whether the kernel can send bytes of a file to it: nothing has to be sent before, and nothing sealed.
    pub(super) fn takes_files(&self) -> bool {
        self.link.is_none() && self.plain.is_some() && !self.wants_write()
    }

    /// Answers with bytes of a file: those of the first `pages` have been taken, and are sent as they are. What the socket does not take now is
    /// read into `buffer`, and sent like others. Only for one that [`Client::takes_files`].
    ///
    /// # Errors
    /// The connection has ended; or the rest could not be read, and half an answer has been sent.
    pub(super) fn answer_from(
        &mut self,
        head: Head,
        (place, pages): (&Place<'_>, &mut Pages),
        (buffer, bytes): (Buffer, usize),
        buffers: &mut Buffers,
    ) -> io::Result<()> {
        let all = buffer.part(bytes);
        self.answer(head, Some((buffer, bytes)));
        let Some(stream) = &self.plain else { return Err(io::ErrorKind::NotConnected.into()) };
        let length = head.bytes().len();
        let mut pieces = Outgoing::new();
        pieces.bytes(head.bytes());
        let mut sent = match stream.send_before_more(&pieces) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            other => other?,
        };
        while (length..length + bytes).contains(&sent) {
            let done = sent - length;
            if pages.held() == 0 && !take(pages, place, done, bytes) {
                break;
            }
            match pages.send(stream, done + pages.held() < bytes) {
                // The socket is full, or has ended: sending tells.
                Ok(0) | Err(_) => break,
                Ok(count) => sent += count,
            }
        }
        let (done, held) = (sent.saturating_sub(length), pages.held());
        if let Some(rest) = all.sub(done, bytes - done).filter(|rest| !rest.is_empty()) {
            pages.copy_to(rest)?;
            if let Some(rest) = rest.sub(held, rest.len() - held).filter(|rest| !rest.is_empty()) {
                place.lease.file.read_at(place.at + (done + held) as u64, &[rest])?;
            }
            if !place.lease.is_lent() {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
        }
        self.pass(sent, buffers);
        Ok(())
    }

    /// Answers with bytes that are no buffer's.
    pub(super) fn answer_text(&mut self, head: Head, bytes: &[u8], buffers: &mut Buffers) {
        let buffer = buffers.take(bytes.len());
        match buffer {
            Some(buffer) => {
                let _ = buffer.part(bytes.len()).write_from(0, bytes);
                self.used += buffer.len();
                self.answer(head, Some((buffer, bytes.len())));
            }
            None => self.close(),
        }
    }

    /// Sends what can be sent.
    pub(super) fn send(&mut self) -> io::Result<()> {
        while !self.text.is_empty() {
            let text = std::mem::take(&mut self.text);
            let mut pieces = Outgoing::new();
            pieces.bytes(&text[self.sent..]);
            let result = self.link().post(&pieces);
            self.text = text;
            match result {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
            if self.sent == self.text.len() {
                self.text.clear();
                self.sent = 0;
            }
        }
        match self.link().flush() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            other => other,
        }
    }

    /// Sends answers; buffers that have been sent go back.
    pub(super) fn send_answers(&mut self, buffers: &mut Buffers) -> io::Result<()> {
        self.send()?;
        while !self.answers.is_empty() && self.text.is_empty() {
            let answers = std::mem::take(&mut self.answers);
            let mut pieces = Outgoing::new();
            let mut skip = self.sent;
            for Answer { head, data } in &answers {
                if pieces.room() < 2 {
                    break;
                }
                let bytes = head.bytes();
                pieces.bytes(&bytes[skip.min(bytes.len())..]);
                skip = skip.saturating_sub(bytes.len());
                if let Some((buffer, length)) = data {
                    let passed = skip.min(*length);
                    if let Some(rest) = buffer.part(*length).sub(passed, length - passed) {
                        pieces.shared(rest);
                    }
                    skip -= passed;
                }
            }
            let result = self.link().post(&pieces);
            self.answers = answers;
            match result {
                Ok(count) => self.pass(count, buffers),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn pass(&mut self, count: usize, buffers: &mut Buffers) {
        self.sent += count;
        while let Some(Answer { head, data }) = self.answers.front() {
            let length = head.bytes().len() + data.as_ref().map_or(0, |(_, length)| *length);
            if self.sent < length {
                return;
            }
            self.sent -= length;
            if let Some(Answer { data: Some((buffer, _)), .. }) = self.answers.pop_front() {
                self.used -= buffer.len();
                buffers.give_back(buffer);
            }
        }
    }

    /// Gives back what its answers hold.
    pub(super) fn end(self, buffers: &mut Buffers) {
        let payload = self.payload.and_then(|payload| payload.buffer);
        let answers = self.answers.into_iter().filter_map(|answer| answer.data.map(|(buffer, _)| buffer));
        answers.chain(payload).for_each(|buffer| buffers.give_back(buffer));
    }
}
