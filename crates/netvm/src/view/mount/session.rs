//! Who asks: the kernel of this machine through its device, or that of another one whose mount hands on what it is asked.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use netvm_core::files::Number;
use netvm_sys::epoll::Interest;
use netvm_sys::fuse::FuseDevice;
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;

use super::notifier::Notifier;
use super::proto::{Answer, HEAD_BYTES, Header};
use crate::link::greeting::Transport;
use crate::link::{Incoming, Link, Outgoing};

/// Most bytes of data in one request.
pub(super) const DATA_BYTES_MAX: usize = 1 << 20;
/// Requests of one session that are being executed.
pub(super) const PLACES: usize = 32;
/// Answers that a session has not taken, with which nothing more is heard of it.
const UNSENT_MAX: usize = 2 * PLACES;

/// A request that the volume or a segment works on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Running {
    pub(super) unique: u64,
    pub(super) file: Number,
    pub(super) what: What,
    /// When it began, as the files count.
    pub(super) stamp: u64,
    /// Parts that have not ended.
    pub(super) left: usize,
    pub(super) failed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Read { bytes: u32 },
    Write { bytes: u32 },
    Sync,
}

/// What became of listening.
pub(super) enum Heard {
    /// A request, whose data is in this place.
    One {
        header: Header,
        head: [u8; HEAD_BYTES],
        place: usize,
    },
    Nothing,
    /// There will be no more; why, if it is worth telling.
    Over(Option<String>),
}

struct Out {
    head: Vec<u8>,
    /// Data, and the place that it is in.
    data: Option<(usize, usize)>,
}

/// A connection to another mount.
struct Line {
    transport: Transport,
    head: [u8; HEAD_BYTES],
    /// The place of the request that is being received, and how much of it is there.
    receiving: Option<(usize, usize)>,
    out: VecDeque<Out>,
    /// Of the first of them.
    sent: usize,
}

enum Channel {
    Device(Arc<FuseDevice>, Notifier),
    Line(Box<Line>),
}

/// One mount.
pub(super) struct Session {
    channel: Channel,
    /// Where it is; for messages.
    pub(super) peer: String,
    pub(super) read_only: bool,
    buffers: Mapping,
    pub(super) running: [Option<Running>; PLACES],
    free: Vec<usize>,
    /// It is not listened to any more.
    pub(super) over: bool,
    pub(super) watched: Interest,
    /// Files of which it is to drop what it has cached.
    stale: BTreeSet<Number>,
    /// Versions of files that it has opened.
    pub(super) opened: BTreeMap<Number, u64>,
}

impl Session {
    fn new(channel: Channel, peer: String, read_only: bool, buffers: Mapping) -> Self {
        Self {
            channel,
            peer,
            read_only,
            buffers,
            running: [None; PLACES],
            free: (0..PLACES).rev().collect(),
            over: false,
            watched: Interest { readable: true, writable: false },
            stale: BTreeSet::new(),
            opened: BTreeMap::new(),
        }
    }

    pub(super) fn local(
        device: Arc<FuseDevice>,
        notifier: Notifier,
        read_only: bool,
        buffers: Mapping,
    ) -> Self {
        Self::new(Channel::Device(device, notifier), "this mount".to_owned(), read_only, buffers)
    }

    pub(super) fn remote(transport: Transport, peer: String, read_only: bool, buffers: Mapping) -> Self {
        let line = Line { transport, head: [0; HEAD_BYTES], receiving: None, out: VecDeque::new(), sent: 0 };
        Self::new(Channel::Line(Box::new(line)), peer, read_only, buffers)
    }

    /// Memory for [`Session::local`] and [`Session::remote`].
    pub(super) fn buffers() -> io::Result<Mapping> {
        Mapping::anonymous(PLACES * DATA_BYTES_MAX)
    }

    pub(super) fn into_buffers(self) -> Mapping {
        self.buffers
    }

    pub(super) fn is_local(&self) -> bool {
        matches!(self.channel, Channel::Device(..))
    }

    pub(super) fn wait_fd(&self) -> BorrowedFd<'_> {
        match &self.channel {
            Channel::Device(device, _) => std::os::fd::AsFd::as_fd(&**device),
            Channel::Line(line) => line.transport.wait_fd(),
        }
    }

    pub(super) fn buffer(&self, place: usize, at: usize, bytes: usize) -> SharedSlice {
        let whole = self.buffers.shared().sub(place * DATA_BYTES_MAX, DATA_BYTES_MAX);
        whole.and_then(|whole| whole.sub(at, bytes)).unwrap_or(SharedSlice::EMPTY)
    }

    /// Whether nothing of it is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.running.iter().all(Option::is_none)
    }

    fn can_hear(&self) -> bool {
        let taken = match &self.channel {
            Channel::Device(..) => true,
            Channel::Line(line) => line.out.len() < UNSENT_MAX,
        };
        !self.over && taken && !self.free.is_empty()
    }

    /// What to wait for.
    pub(super) fn interest(&self) -> Interest {
        let writable = match &self.channel {
            Channel::Device(..) => false,
            Channel::Line(line) => !line.out.is_empty() || line.transport.has_unsent(),
        };
        Interest { readable: self.can_hear(), writable: writable && !self.over }
    }

    /// Whether there is something to be heard of which its descriptor does not tell.
    pub(super) fn has_received(&self) -> bool {
        matches!(&self.channel, Channel::Line(line) if line.transport.has_received()) && self.can_hear()
    }

    /// The next request.
    pub(super) fn hear(&mut self) -> Heard {
        if !self.can_hear() {
            return Heard::Nothing;
        }
        match &mut self.channel {
            Channel::Device(device, _) => {
                let Some(&place) = self.free.last() else { return Heard::Nothing };
                let mut head = [0; HEAD_BYTES];
                let data = self.buffers.shared().sub(place * DATA_BYTES_MAX, DATA_BYTES_MAX);
                loop {
                    match device.read(&mut head, data.unwrap_or(SharedSlice::EMPTY)) {
                        Ok(length) => {
                            let header = Header::parse(&head);
                            if header.length != length {
                                return Heard::Over(Some("the kernel sent half a request".to_owned()));
                            }
                            self.free.pop();
                            return Heard::One { header, head, place };
                        }
                        Err(error) => match error.raw_os_error() {
                            Some(libc::EAGAIN) => return Heard::Nothing,
                            // Taken back while it was read, or a signal.
                            Some(libc::ENOENT | libc::EINTR) => {}
                            Some(libc::ENODEV) => return Heard::Over(None),
                            _ => return Heard::Over(Some(format!("cannot read requests: {error}"))),
                        },
                    }
                }
            }
            Channel::Line(line) => {
                let (place, mut have) = match line.receiving {
                    Some(receiving) => receiving,
                    None => match self.free.pop() {
                        Some(place) => (place, 0),
                        None => return Heard::Nothing,
                    },
                };
                let data = self.buffers.shared().sub(place * DATA_BYTES_MAX, DATA_BYTES_MAX);
                let data = data.unwrap_or(SharedSlice::EMPTY);
                loop {
                    let mut into = Incoming::new();
                    if have < HEAD_BYTES {
                        into.bytes(&mut line.head[have..]);
                    } else {
                        let header = Header::parse(&line.head);
                        if !header.is_plausible(DATA_BYTES_MAX) {
                            return Heard::Over(Some("it broke the protocol".to_owned()));
                        }
                        let rest = header.length.saturating_sub(have);
                        if rest == 0 {
                            line.receiving = None;
                            return Heard::One { header, head: line.head, place };
                        }
                        into.shared(data.sub(have - HEAD_BYTES, rest).unwrap_or(SharedSlice::EMPTY));
                    }
                    match line.transport.poll(&mut into) {
                        Ok(0) => return Heard::Over(None),
                        Ok(received) => have += received,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            line.receiving = Some((place, have));
                            return Heard::Nothing;
                        }
                        Err(error) => return Heard::Over(Some(error.to_string())),
                    }
                }
            }
        }
    }

    /// What follows the header of a request that is not a write.
    pub(super) fn body(&self, header: &Header, head: &[u8; HEAD_BYTES], place: usize) -> Vec<u8> {
        let mut body = head
            [super::proto::IN_HEADER_BYTES..header.length.clamp(super::proto::IN_HEADER_BYTES, HEAD_BYTES)]
            .to_vec();
        if header.length > HEAD_BYTES && !header.is_write() {
            body.extend(self.buffer(place, 0, header.length - HEAD_BYTES).to_vec());
        }
        body
    }

    /// Answers, and gives the place back.
    pub(super) fn answer(&mut self, answer: Answer, place: usize) {
        self.put(Out { head: answer.finish(0), data: None });
        self.free.push(place);
    }

    /// Answers with the first bytes of what is in a place, and gives the place back as soon as they have left.
    pub(super) fn answer_data(&mut self, answer: Answer, place: usize, bytes: usize) {
        self.put(Out { head: answer.finish(bytes), data: Some((place, bytes)) });
    }

    /// Gives a place back, and nobody waits for an answer.
    pub(super) fn release(&mut self, place: usize) {
        self.free.push(place);
    }

    fn put(&mut self, out: Out) {
        let data = out.data.map_or(SharedSlice::EMPTY, |(place, bytes)| self.buffer(place, 0, bytes));
        match &mut self.channel {
            Channel::Device(device, _) => {
                // It fails only when nobody waits for it any more.
                let _ = device.write(&out.head, data);
                self.free.extend(out.data.map(|(place, _)| place));
            }
            Channel::Line(line) => line.out.push_back(out),
        }
    }

    /// Has it drop what it has cached of a file.
    pub(super) fn forget_bytes(&mut self, file: Number) {
        match &self.channel {
            Channel::Device(_, notifier) => notifier.add(file),
            Channel::Line(_) => {
                self.stale.insert(file);
            }
        }
    }

    /// Sends what is to be sent, as far as it is taken.
    ///
    /// # Errors
    /// Why it is over.
    pub(super) fn push(&mut self) -> Result<(), String> {
        let Channel::Line(line) = &mut self.channel else { return Ok(()) };
        if line.out.len() < UNSENT_MAX {
            for file in std::mem::take(&mut self.stale) {
                line.out.push_back(Out { head: Answer::stale(file).finish(0), data: None });
            }
        }
        let data_of = |place: usize, bytes: usize| self.buffers.shared().sub(place * DATA_BYTES_MAX, bytes);
        while !line.out.is_empty() {
            let mut out = Outgoing::new();
            let mut skip = line.sent;
            for next in line.out.iter().take(16) {
                if skip < next.head.len() {
                    out.bytes(&next.head[skip..]);
                }
                let gone = skip.saturating_sub(next.head.len());
                if let Some(data) = next.data.and_then(|(place, bytes)| data_of(place, bytes)) {
                    out.shared(data.sub(gone, data.len() - gone).unwrap_or(SharedSlice::EMPTY));
                }
                skip = 0;
            }
            match line.transport.post(&out) {
                Ok(count) => line.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.to_string()),
            }
            while let Some(first) = line.out.front() {
                let length = first.head.len() + first.data.map_or(0, |(_, bytes)| bytes);
                if line.sent < length {
                    break;
                }
                line.sent -= length;
                self.free.extend(line.out.pop_front().and_then(|out| out.data).map(|(place, _)| place));
            }
        }
        match line.transport.flush() {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error.to_string()),
            _ => Ok(()),
        }
    }
}
