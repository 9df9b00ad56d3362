//! A mount that joins another one: what this machine's kernel asks is handed on, and so are the answers.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use netvm_core::wire::{Hello, Role};
use netvm_sys::epoll::{Epoll, Interest, Ready};
use netvm_sys::fuse::FuseDevice;
use netvm_sys::mapping::Mapping;
use netvm_sys::shared::SharedSlice;

use super::notifier::Notifier;
use super::proto::{Answer, HEAD_BYTES, Header, OUT_HEADER_BYTES, answer_header};
use super::session::DATA_BYTES_MAX;
use super::{FEATURE_ORDER, MountNotice, OUR_ORDER};
use crate::error::{Error, Result};
use crate::lender::StopFlag;
use crate::link::greeting::{self, Transport};
use crate::link::{Incoming, Link, Outgoing};
use crate::security::{Protection, Security};

/// Who has been asked and says nothing for so long is lost.
const SILENCE: Duration = Duration::from_secs(15);
/// Most bytes of an answer: data, or entries and attributes.
const ANSWER_BYTES_MAX: usize = DATA_BYTES_MAX + 4096;

const STOP_ID: u64 = 0;
const DEVICE_ID: u64 = 1;
const HOME_ID: u64 = 2;

/// How to join.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// Where the other mount is shared: `HOST:PORT` or `unix:/path`.
    pub address: String,
    /// Who shares it.
    pub security: Security,
    /// This mount only reads.
    pub read_only: bool,
    /// For so long a connection is tried.
    pub timeout: Duration,
}

/// Requests without an answer.
fn is_silent(opcode: u32) -> bool {
    const FORGET: u32 = 2;
    const INTERRUPT: u32 = 36;
    const BATCH_FORGET: u32 = 42;
    matches!(opcode, FORGET | INTERRUPT | BATCH_FORGET)
}

/// A request on its way.
struct Sending {
    head: [u8; HEAD_BYTES],
    /// Bytes behind the head.
    data: usize,
    sent: usize,
}

/// A mount that has joined another one.
pub struct Joined {
    device: Arc<FuseDevice>,
    notifier: Notifier,
    epoll: Epoll,
    /// `None`: lost.
    home: Option<Transport>,
    address: String,
    protection: Protection,
    /// Of the request on its way, and behind that of the answer that is being received.
    buffers: Mapping,
    sending: Option<Sending>,
    head: [u8; OUT_HEADER_BYTES],
    received: usize,
    /// Requests that wait for answers.
    waiting: BTreeSet<u64>,
    /// When something came, or was asked for the first time.
    heard: Instant,
    unmounted: bool,
}

impl std::fmt::Debug for Joined {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Joined").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Joined {
    /// Connects, and puts the other mount's files over the folder `at`. Requests wait for [`Joined::run`].
    ///
    /// # Errors
    /// Those of a connection; [`Error::System`] without FUSE or the right to mount.
    pub fn mount(at: &Path, options: &JoinOptions) -> Result<Self> {
        let hello = Hello { features: OUR_ORDER, ..Hello::new(Role::Mount) };
        debug_assert_eq!(OUR_ORDER & FEATURE_ORDER, OUR_ORDER);
        let (home, theirs) = greeting::connect(&options.address, &hello, options.timeout, &options.security)?;
        if theirs.role != Role::Mount {
            return Err(Error::Other(format!(
                "{} shares no mount: give the address of a `netvm mount --share`",
                options.address
            )));
        }
        let device = FuseDevice::open().map_err(|error| Error::system("open /dev/fuse", &error))?;
        let device = Arc::new(device);
        let epoll = Epoll::new().map_err(|error| Error::system("make an epoll set", &error))?;
        let buffers = Mapping::anonymous(DATA_BYTES_MAX + ANSWER_BYTES_MAX)
            .map_err(|error| Error::system("reserve memory for buffers", &error))?;
        let joined = Self {
            notifier: Notifier::start(device.clone())?,
            protection: home.protection(),
            home: Some(home),
            address: options.address.clone(),
            device,
            epoll,
            buffers,
            sending: None,
            head: [0; OUT_HEADER_BYTES],
            received: 0,
            waiting: BTreeSet::new(),
            heard: Instant::now(),
            unmounted: false,
        };
        joined.device.mount_folder(at, options.read_only).map_err(|error| super::may_not_mount(&error))?;
        Ok(joined)
    }

    /// What protects the connection.
    pub fn protection(&self) -> Protection {
        self.protection
    }

    /// Serves until it is unmounted, or stopped twice. When the other mount is lost, it goes on and answers every request with EIO.
    ///
    /// # Errors
    /// [`Error::System`] when the kernel does not let it wait.
    pub fn run(&mut self, stop: &StopFlag, mut notice: impl FnMut(MountNotice)) -> Result<()> {
        let readable = Interest { readable: true, writable: false };
        let watch = |fd, id| {
            let added = self.epoll.add(fd, id, readable);
            added.map_err(|error| Error::system("watch a descriptor", &error))
        };
        watch(stop.as_fd(), STOP_ID)?;
        watch((*self.device).as_fd(), DEVICE_ID)?;
        if let Some(home) = &self.home {
            watch(home.wait_fd(), HOME_ID)?;
        }
        let mut watched = (readable, readable);
        let mut stopping = false;
        let mut ready: Vec<Ready> = Vec::new();
        while !self.unmounted {
            let pending = self.home.as_ref().is_some_and(Link::has_received);
            let patience = if pending { Duration::ZERO } else { Duration::from_secs(1) };
            let waited = self.epoll.wait(&mut ready, Some(patience));
            waited.map_err(|error| Error::system("wait for requests", &error))?;
            if ready.iter().any(|ready| ready.id == STOP_ID) {
                if stop.take() > 1 || stopping {
                    return Ok(());
                }
                stopping = true;
            }
            let result = self.receive().and_then(|()| self.send());
            let result = result.and_then(|()| {
                let late = !self.waiting.is_empty() && self.heard.elapsed() > SILENCE;
                if late { Err(format!("it has not answered for {} s", SILENCE.as_secs())) } else { Ok(()) }
            });
            if let Err(reason) = result {
                notice(MountNotice::Lost(self.lose(&reason)));
                self.send_nowhere();
            }
            // While a request is on its way no further one is heard.
            let device = Interest { readable: self.sending.is_none(), writable: false };
            let home = Interest { readable: true, writable: self.wants_write() };
            if device != watched.0 {
                let _ = self.epoll.change((*self.device).as_fd(), DEVICE_ID, device);
            }
            if home != watched.1
                && let Some(link) = &self.home
            {
                let _ = self.epoll.change(link.wait_fd(), HOME_ID, home);
            }
            watched = (device, home);
        }
        Ok(())
    }

    fn wants_write(&self) -> bool {
        self.sending.is_some() || self.home.as_ref().is_some_and(Link::has_unsent)
    }

    fn incoming(&self, from: usize, bytes: usize) -> SharedSlice {
        self.buffers.shared().sub(DATA_BYTES_MAX + from, bytes).unwrap_or(SharedSlice::EMPTY)
    }

    /// The kernel's next request, into the buffer.
    fn hear(&mut self) -> Option<Sending> {
        loop {
            let mut head = [0; HEAD_BYTES];
            match self
                .device
                .read(&mut head, self.buffers.shared().sub(0, DATA_BYTES_MAX).unwrap_or(SharedSlice::EMPTY))
            {
                Ok(length) => {
                    return Some(Sending { head, data: length.saturating_sub(HEAD_BYTES), sent: 0 });
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::ENOENT | libc::EINTR) => {}
                    Some(libc::EAGAIN) => return None,
                    _ => {
                        self.unmounted = true;
                        return None;
                    }
                },
            }
        }
    }

    /// Hands requests on, as far as the connection takes them.
    fn send(&mut self) -> std::result::Result<(), String> {
        if self.home.is_none() {
            self.send_nowhere();
            return Ok(());
        }
        loop {
            if self.sending.is_none() {
                let Some(sending) = self.hear() else { break };
                let header = Header::parse(&sending.head);
                if !is_silent(header.opcode) {
                    if self.waiting.is_empty() {
                        self.heard = Instant::now();
                    }
                    self.waiting.insert(header.unique);
                }
                self.sending = Some(sending);
            }
            let Some(sending) = &mut self.sending else { break };
            let gone = sending.sent.saturating_sub(HEAD_BYTES);
            let data = self.buffers.shared().sub(gone, sending.data - gone).unwrap_or(SharedSlice::EMPTY);
            let mut out = Outgoing::new();
            if sending.sent < HEAD_BYTES {
                out.bytes(&sending.head[sending.sent..]);
            }
            out.shared(data);
            let Some(home) = &mut self.home else { break };
            let posted = home.post(&out);
            match posted {
                Ok(count) => sending.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.to_string()),
            }
            if sending.sent == HEAD_BYTES + sending.data {
                self.sending = None;
            }
        }
        match self.home.as_mut().map_or(Ok(()), Link::flush) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error.to_string()),
            _ => Ok(()),
        }
    }

    /// Hands answers back.
    fn receive(&mut self) -> std::result::Result<(), String> {
        loop {
            let mut into = Incoming::new();
            if self.received < OUT_HEADER_BYTES {
                into.bytes(&mut self.head[self.received..]);
            } else {
                let (length, error, unique) = answer_header(&self.head);
                if !(OUT_HEADER_BYTES..=ANSWER_BYTES_MAX).contains(&length) {
                    return Err("it broke the protocol".to_owned());
                }
                if self.received == length {
                    self.received = 0;
                    self.deliver(length, error, unique)?;
                    continue;
                }
                into.shared(self.incoming(self.received - OUT_HEADER_BYTES, length - self.received));
            }
            let Some(home) = &mut self.home else { return Ok(()) };
            match home.poll(&mut into) {
                Ok(0) => return Err("it has ended".to_owned()),
                Ok(count) => {
                    self.received += count;
                    self.heard = Instant::now();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    fn deliver(&mut self, length: usize, error: i32, unique: u64) -> std::result::Result<(), String> {
        let data = self.incoming(0, length - OUT_HEADER_BYTES);
        if unique != 0 {
            // The kernel checks the rest. What was not asked for is no answer.
            if self.waiting.remove(&unique) {
                let _ = self.device.write(&self.head, data);
            }
            return Ok(());
        }
        let mut number = [0; 8];
        if error != Answer::INVALIDATE_INODE || data.read_into(0, &mut number).is_none() {
            return Err("it broke the protocol".to_owned());
        }
        self.notifier.add(u64::from_ne_bytes(number));
        Ok(())
    }

    /// The other mount is gone; whoever waits is told.
    fn lose(&mut self, reason: &str) -> Error {
        if let Some(home) = self.home.take() {
            let _ = self.epoll.remove(home.wait_fd());
        }
        (self.sending, self.received) = (None, 0);
        for unique in std::mem::take(&mut self.waiting) {
            let _ = self.device.write(&Answer::error(unique, libc::EIO).finish(0), SharedSlice::EMPTY);
        }
        Error::LenderLost { lender: self.address.clone(), reason: reason.to_owned() }
    }

    /// Answers that nothing can be had any more.
    fn send_nowhere(&mut self) {
        while let Some(Sending { head, .. }) = self.hear() {
            let header = Header::parse(&head);
            if !is_silent(header.opcode) {
                let _ =
                    self.device.write(&Answer::error(header.unique, libc::EIO).finish(0), SharedSlice::EMPTY);
            }
        }
    }
}
