//! A connection between a sender and a receiver: frames and bytes of files, with time-outs.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use netvm_sys::shared::SharedSlice;

use super::frames::{Frame, HEADER_BYTES, PAYLOAD_BYTES_MAX, Totals, Wrong};
use crate::error::{Error, Result};
use crate::link::greeting::Transport;
use crate::link::{Incoming, Link, Outgoing};

/// A peer that says nothing, or takes nothing, for so long is given up.
pub(super) const IDLE: Duration = Duration::from_secs(60);
/// Who works without sending says so this often.
const WORKING: Duration = Duration::from_secs(5);
/// For so long all bytes of a step are waited for before some are taken.
const TOGETHER: Duration = Duration::from_millis(20);
/// For so long a peer is told what went wrong.
const FAREWELL: Duration = Duration::from_secs(3);
/// Bytes that are received at once when they are not a file's; and that are gathered before they are sent.
const BUFFER_BYTES: usize = 64 << 10;

const _: () = assert!(HEADER_BYTES + PAYLOAD_BYTES_MAX <= BUFFER_BYTES);

/// See the module.
pub(super) struct Wire {
    transport: Transport,
    /// The peer, for messages.
    pub peer: String,
    out: Vec<u8>,
    buffer: Box<[u8]>,
    /// Received and not taken.
    have: std::ops::Range<usize>,
    /// When something was sent last.
    sent: Instant,
    /// Frames are spoken: the peer can be told what went wrong.
    framed: bool,
}

impl Wire {
    pub fn new(transport: Transport, peer: String, framed: bool) -> Result<Self> {
        transport
            .stream()
            .without_user_timeout()
            .map_err(|error| Error::system("set up the connection", &error))?;
        Ok(Self {
            transport,
            peer,
            out: Vec::new(),
            buffer: vec![0; BUFFER_BYTES].into(),
            have: 0..0,
            sent: Instant::now(),
            framed,
        })
    }

    /// Whether the kernel can move bytes between the connection and files.
    pub fn is_plain(&self) -> bool {
        matches!(self.transport, Transport::Plain(..))
    }

    /// Readable when something has come.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.transport.wait_fd()
    }

    /// What protects it.
    pub fn protection(&self) -> crate::security::Protection {
        self.transport.protection()
    }

    /// Appends a frame to what is sent next.
    pub fn queue(&mut self, frame: &Frame) -> Result<()> {
        frame.encode(&mut self.out);
        if self.out.len() >= BUFFER_BYTES { self.flush() } else { Ok(()) }
    }

    /// Appends bytes to what is sent next.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        if self.out.len() + bytes.len() <= BUFFER_BYTES {
            self.out.extend(bytes);
            return Ok(());
        }
        self.flush()?;
        self.send(bytes.len(), |skip, out| {
            out.bytes(&bytes[skip..]);
        })
    }

    /// Sends memory that may go away: EFAULT then.
    pub fn shared(&mut self, memory: SharedSlice) -> Result<()> {
        self.flush()?;
        self.send(memory.len(), |skip, out| {
            if let Some(rest) = memory.sub(skip, memory.len() - skip) {
                out.shared(rest);
            }
        })
    }

    /// Sends what is queued.
    pub fn flush(&mut self) -> Result<()> {
        let mut out = std::mem::take(&mut self.out);
        let result = self.send(out.len(), |skip, pieces| {
            pieces.bytes(&out[skip..]);
        });
        out.clear();
        self.out = out;
        result
    }

    fn send<'a>(&mut self, total: usize, pieces: impl Fn(usize, &mut Outgoing<'a>)) -> Result<()> {
        let mut sent = 0;
        while sent < total || self.transport.has_unsent() {
            let done = if sent < total {
                let mut out = Outgoing::new();
                pieces(sent, &mut out);
                self.transport.post(&out).map(|count| sent += count)
            } else {
                self.transport.flush()
            };
            match done {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for_room()?,
                Err(error) => return Err(self.lost(&error)),
            }
        }
        self.sent = Instant::now();
        Ok(())
    }

    /// Has the kernel send a range of a file; returns how many bytes, 0 at the file's end.
    pub fn sendfile(&mut self, file: &File, offset: u64, bytes: u64) -> Result<u64> {
        self.flush()?;
        let mut offset = offset;
        loop {
            let stream = self.transport.stream().as_fd();
            match rustix::fs::sendfile(stream, file, Some(&mut offset), bytes as usize) {
                Ok(sent) => {
                    self.sent = Instant::now();
                    return Ok(sent as u64);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => self.wait_for_room()?,
                Err(error) => return Err(self.lost(&error.into())),
            }
        }
    }

    /// Waits until something can be sent; what comes meanwhile is looked at.
    fn wait_for_room(&mut self) -> Result<()> {
        let waited = self.transport.stream().wait(true, IDLE);
        if !waited.map_err(|error| Error::system("wait for the peer", &error))? {
            return Err(self.idle("it to take what we send"));
        }
        self.hear()
    }

    /// Looks at what has come while it is our turn: nothing, or why the peer does not go on.
    fn hear(&mut self) -> Result<()> {
        match self.fill() {
            Ok(0) => return Err(self.ended()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(self.cut(&error)),
        }
        while let Some(frame) = self.next()? {
            match frame {
                Frame::Working => {}
                Frame::Failed(text) => return Err(self.said(&text)),
                _ => return Err(self.wrong("a message out of turn")),
            }
        }
        Ok(())
    }

    /// Says that we are there if nothing has been said for a while.
    pub fn working(&mut self) -> Result<()> {
        if self.framed && self.sent.elapsed() > WORKING {
            self.queue(&Frame::Working)?;
            self.flush()?;
        }
        Ok(())
    }

    /// The next frame.
    pub fn receive(&mut self) -> Result<Frame> {
        loop {
            match self.next()? {
                Some(Frame::Working) => {}
                Some(Frame::Failed(text)) => return Err(self.said(&text)),
                Some(frame) => return Ok(frame),
                None => self.more()?,
            }
        }
    }

    /// The next frame if it is there; `None` otherwise.
    pub fn receive_now(&mut self) -> Result<Option<Frame>> {
        loop {
            match self.next()? {
                Some(Frame::Working) => {}
                Some(Frame::Failed(text)) => return Err(self.said(&text)),
                Some(frame) => return Ok(Some(frame)),
                None => match self.fill() {
                    Ok(0) => return Err(self.ended()),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                    Err(error) => return Err(self.cut(&error)),
                },
            }
        }
    }

    /// Something else than this connection has failed: the peer may be about to say why.
    pub fn why(&mut self, error: Error) -> Error {
        let deadline = Instant::now() + FAREWELL;
        loop {
            match self.receive_now() {
                Ok(Some(_)) => {}
                Ok(None) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() || !self.transport.stream().wait(false, left).unwrap_or(false) {
                        return error;
                    }
                }
                Err(said @ (Error::Other(_) | Error::Cut { .. })) => return said,
                Err(_) => return error,
            }
        }
    }

    /// Exactly these bytes.
    pub fn receive_exact(&mut self, bytes: &mut [u8]) -> Result<()> {
        let mut have = 0;
        while have < bytes.len() {
            let rest = &mut bytes[have..];
            let taken = self.take(rest.len());
            if !taken.is_empty() {
                have += taken.len();
                rest[..taken.len()].copy_from_slice(&self.buffer[taken]);
                continue;
            }
            let mut into = Incoming::new();
            into.bytes(rest);
            match self.transport.poll(&mut into) {
                Ok(0) => return Err(self.ended()),
                Ok(count) => have += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_for_many(bytes.len() - have)?;
                }
                Err(error) => return Err(self.cut(&error)),
            }
        }
        Ok(())
    }

    /// The next byte of all, unless the stream has ended.
    pub fn receive_first(&mut self) -> Result<Option<u8>> {
        while self.have.is_empty() {
            match self.fill() {
                Ok(0) => return Ok(None),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for_bytes()?,
                Err(error) => return Err(self.cut(&error)),
            }
        }
        self.have.start += 1;
        Ok(Some(self.buffer[self.have.start - 1]))
    }

    /// Some of the next bytes, at least one, into memory that may go away: EFAULT then.
    pub fn receive_shared(&mut self, memory: SharedSlice) -> Result<usize> {
        let taken = self.take(memory.len());
        let bytes = taken.len();
        if bytes > 0 {
            let gone = io::Error::from_raw_os_error(libc::EFAULT);
            return match memory.write_from(0, &self.buffer[taken]) {
                Some(()) => Ok(bytes),
                None => Err(Error::system("write to a mapped file", &gone)),
            };
        }
        loop {
            let mut into = Incoming::new();
            into.shared(memory);
            let result = self.transport.poll(&mut into);
            if let Some(count) = self.received(result)? {
                return Ok(count);
            }
        }
    }

    /// Has the kernel move received bytes to a pipe; they must not have been received already ([`Wire::buffered`]).
    pub fn splice(&mut self, pipe: &impl AsFd, bytes: usize) -> Result<usize> {
        debug_assert!(self.have.is_empty());
        use rustix::pipe::{SpliceFlags, splice};
        loop {
            let stream = self.transport.stream().as_fd();
            match splice(stream, None, pipe, None, bytes, SpliceFlags::MOVE | SpliceFlags::NONBLOCK) {
                Ok(0) => return Err(self.ended()),
                Ok(moved) => return Ok(moved),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => self.wait_for_bytes()?,
                Err(error) => return Err(self.cut(&error.into())),
            }
        }
    }

    /// How many received bytes wait to be taken.
    pub fn buffered(&self) -> usize {
        self.have.len()
    }

    fn take(&mut self, most: usize) -> std::ops::Range<usize> {
        let start = self.have.start;
        self.have.start += most.min(self.have.len());
        start..self.have.start
    }

    /// What an attempt to receive means; `None` after waiting for something to come.
    fn received(&mut self, result: io::Result<usize>) -> Result<Option<usize>> {
        match result {
            Ok(0) => Err(self.ended()),
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for_bytes().map(|()| None),
            Err(error) => Err(self.cut(&error)),
        }
    }

    /// Receives into the buffer; 0 at the end of the stream.
    fn fill(&mut self) -> io::Result<usize> {
        if self.have.is_empty() {
            self.have = 0..0;
        } else if self.have.start > 0 {
            self.buffer.copy_within(self.have.clone(), 0);
            self.have = 0..self.have.len();
        }
        let mut into = Incoming::new();
        into.bytes(&mut self.buffer[self.have.end..]);
        if into.total_bytes() == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = self.transport.poll(&mut into)?;
        self.have.end += count;
        Ok(count)
    }

    fn more(&mut self) -> Result<()> {
        let result = self.fill();
        self.received(result).map(drop)
    }

    /// Waits until something comes, for so long; whether it did.
    pub fn wait(&self, patience: Duration) -> Result<bool> {
        let waited = self.transport.stream().wait(false, patience);
        waited.map_err(|error| Error::system("wait for the peer", &error))
    }

    /// Waits until so many bytes have come, or some if that takes long: a peer that is woken for each of the sender's writes is woken often.
    fn wait_for_many(&mut self, bytes: usize) -> Result<()> {
        // Of an encrypted stream a part may be here already, and fewer follow.
        if !self.is_plain() {
            return self.wait_for_bytes();
        }
        let failed = |error| Error::system("wait for the peer", &error);
        self.transport.stream().wake_at(bytes).map_err(failed)?;
        let have = self.transport.stream().wait(false, TOGETHER).map_err(failed);
        self.transport.stream().wake_at(1).map_err(failed)?;
        if have? { Ok(()) } else { self.wait_for_bytes() }
    }

    fn wait_for_bytes(&mut self) -> Result<()> {
        let waited = self.transport.stream().wait(false, IDLE);
        match waited.map_err(|error| Error::system("wait for the peer", &error))? {
            true => Ok(()),
            false => Err(self.idle("more")),
        }
    }

    /// The frame at the front of the buffer, if it is all there.
    fn next(&mut self) -> Result<Option<Frame>> {
        let have = &self.buffer[self.have.clone()];
        let Some((header, rest)) = have.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let bytes = Frame::payload_bytes(header).map_err(|wrong| self.wrong(wrong))?;
        let Some(payload) = rest.get(..bytes) else { return Ok(None) };
        let frame = Frame::decode(header[0], payload).map_err(|wrong| self.wrong(wrong))?;
        self.have.start += HEADER_BYTES + bytes;
        Ok(Some(frame))
    }

    /// Tells the peer why it ends here, and waits a moment until it has read that.
    pub fn fail(mut self, error: &Error, between_frames: bool) {
        if !self.framed || matches!(error, Error::Cut { .. } | Error::Timeout { .. }) {
            return;
        }
        let deadline = Instant::now() + FAREWELL;
        if between_frames {
            self.out.clear();
            Frame::Failed(error.to_string()).encode(&mut self.out);
            let mut sent = 0;
            while sent < self.out.len() {
                let mut out = Outgoing::new();
                out.bytes(&self.out[sent..]);
                let left = deadline.saturating_duration_since(Instant::now());
                match self.transport.post(&out) {
                    Ok(count) => sent += count,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock && !left.is_zero() => {
                        let _ = self.transport.stream().wait(true, left.min(Duration::from_millis(20)));
                    }
                    Err(_) => return,
                }
            }
            let _ = self.transport.flush();
        }
        self.end_sending();
        // What it still sends would otherwise reset the connection, and throw away what it has not read.
        let mut rest = vec![0; BUFFER_BYTES];
        loop {
            let mut into = Incoming::new();
            into.bytes(&mut rest);
            let left = deadline.saturating_duration_since(Instant::now());
            match self.transport.poll(&mut into) {
                _ if left.is_zero() => return,
                Ok(1..) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let _ = self.transport.stream().wait(false, left);
                }
                _ => return,
            }
        }
    }

    /// Nothing more is sent.
    pub fn end_sending(&mut self) {
        let _ = rustix::net::shutdown(self.transport.stream().as_fd(), rustix::net::Shutdown::Write);
    }

    fn lost(&mut self, error: &io::Error) -> Error {
        // Who closes a connection may have said why.
        match self.hear() {
            Err(said @ Error::Other(_)) => said,
            _ => self.cut(error),
        }
    }

    fn cut(&self, error: &io::Error) -> Error {
        if error.raw_os_error() == Some(libc::EFAULT) {
            return Error::Other("the file became shorter meanwhile, or its file system failed".to_owned());
        }
        Error::Cut { peer: self.peer.clone(), reason: error.to_string() }
    }

    fn ended(&self) -> Error {
        Error::Cut { peer: self.peer.clone(), reason: "it closed the connection".to_owned() }
    }

    fn said(&self, text: &str) -> Error {
        Error::Other(format!("{} gave up: {text}", self.peer))
    }

    /// Nothing came for too long.
    pub fn idle(&self, what: &'static str) -> Error {
        Error::Timeout { lender: self.peer.clone(), what, after_ms: IDLE.as_millis() as u64 }
    }

    /// The peer broke the protocol.
    pub fn wrong(&self, wrong: Wrong) -> Error {
        Error::Protocol { lender: self.peer.clone(), reason: wrong.to_owned() }
    }

    /// The last message of all.
    pub fn receive_done(&mut self) -> Result<Totals> {
        match self.receive()? {
            Frame::Done(totals) => Ok(totals),
            _ => Err(self.wrong("a message out of turn")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;
    use std::thread;

    use super::*;
    use crate::link::connect;

    fn pair() -> (std::net::TcpStream, Wire) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let stream = connect(&address.parse().unwrap());
        let sender = listener.accept().unwrap().0;
        sender.set_nodelay(true).unwrap();
        (sender, Wire::new(Transport::Plain(stream, false), "the sender".to_owned(), true).unwrap())
    }

    #[test]
    fn bytes_that_trickle_are_taken_and_the_next_single_one_is_seen() {
        let (mut sender, mut wire) = pair();
        let bytes: Vec<u8> = (0..300_000u32).map(|at| (at % 251) as u8).collect();
        let sent = bytes.clone();
        let trickles = thread::spawn(move || {
            // Some pauses are longer than a step is waited for.
            for (index, piece) in sent.chunks(30_000).enumerate() {
                sender.write_all(piece).unwrap();
                thread::sleep(Duration::from_millis(if index % 3 == 0 { 50 } else { 1 }));
            }
            sender.write_all(&[7]).unwrap();
            sender
        });
        let mut got = vec![0; bytes.len()];
        wire.receive_exact(&mut got).unwrap();
        assert!(got == bytes);
        // Asleep in this wait: one byte is enough again.
        assert!(wire.wait(Duration::from_secs(10)).unwrap());
        assert_eq!(wire.receive_first().unwrap(), Some(7));
        drop(trickles.join().unwrap());
    }

    #[test]
    fn who_waits_for_many_bytes_notices_that_no_more_will_come() {
        let (mut sender, mut wire) = pair();
        sender.write_all(&[1; 1000]).unwrap();
        let ends = thread::spawn(move || {
            thread::sleep(Duration::from_millis(5));
            drop(sender);
        });
        let began = Instant::now();
        let error = wire.receive_exact(&mut vec![0; 1 << 20]).unwrap_err();
        assert!(matches!(error, Error::Cut { .. }), "{error}");
        assert!(began.elapsed() < IDLE / 4, "{:?}", began.elapsed());
        ends.join().unwrap();
    }
}
