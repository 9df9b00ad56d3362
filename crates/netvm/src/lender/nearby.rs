//! A lender on this host: its memory is read and written without it. docs/design/nearby.md has the whole.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use netvm_core::limits::PAYLOAD_BYTES_MAX;
use netvm_core::slab::direct::{Direct, UNIT_BYTES, Unit, Way};
use netvm_core::wire::{BodyReader, BodyWriter, Status};
use netvm_sys::mark::Mark;
use netvm_sys::memfd::Memfd;
use netvm_sys::shared::SharedSlice;

use super::borrower::Borrower;
use super::protocol::{self, Inherited};
use crate::error::{Error, Result};
use crate::link::together::Wait;
use crate::shm::LinkChoice;
use crate::shm::meeting::Inviter;

/// What a lender on this host shares with one borrower.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) file: Memfd,
    /// The lender takes it away before anything else, when it ends the lease. One for all files of a lease.
    mark: Arc<Mark>,
}

impl Lease {
    /// A file with a mark behind the first `bytes` bytes.
    #[cfg(test)]
    pub(crate) fn of(file: Memfd, bytes: u64) -> std::io::Result<Self> {
        netvm_sys::mark::set(&file, bytes)?;
        let mark = Arc::new(Mark::of_peer(&file, bytes)?);
        Ok(Self { file, mark })
    }

    /// Whether what has been read from the file was still there. To be asked afterwards.
    pub(crate) fn is_lent(&self) -> bool {
        self.mark.is_set()
    }
}

/// The lease's file, and what goes there.
pub(super) struct Nearby {
    pub(super) lease: Arc<Lease>,
    /// Files of other leases, only to be read, each with this lease's mark: as long as that is there nothing is punched that this lease holds.
    pub(super) inherited: Vec<Arc<Lease>>,
    slab_bytes: u64,
    pub(super) direct: Direct,
}

/// What came of a transfer that may be possible directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tried {
    Done,
    /// The session has to do it (again).
    Session,
    /// The lease is over: what was read is nothing, what was written is nowhere.
    Over,
}

/// Bytes in the lease's file.
pub(crate) struct Place<'a> {
    pub(crate) lease: &'a Arc<Lease>,
    pub(crate) at: u64,
}

impl Nearby {
    /// A slab has been borrowed.
    pub(super) fn borrowed(&mut self, slab: u32) {
        let end = (u64::from(slab) + 1).checked_mul(self.slab_bytes);
        if end.is_some_and(|end| end <= self.lease.file.len()) {
            self.direct.borrowed(slab);
        }
    }

    /// Reads what can be read directly.
    #[inline]
    pub(super) fn read(
        &mut self,
        applied: u64,
        slab: u32,
        offset: u64,
        bytes: u32,
        locals: &[SharedSlice],
    ) -> Tried {
        if bytes > PAYLOAD_BYTES_MAX {
            return Tried::Session;
        }
        let Some(Place { lease, at }) = self.place(applied, slab, offset, bytes.into()) else {
            return Tried::Session;
        };
        tried(lease, lease.file.read_at(at, locals).is_ok())
    }

    /// Where in the file the bytes are, when nothing keeps them from being read there now.
    pub(super) fn place(&mut self, applied: u64, slab: u32, offset: u64, bytes: u64) -> Option<Place<'_>> {
        let lease = match self.direct.read(applied, slab, offset, bytes) {
            Way::Direct => &self.lease,
            Way::Inherited(file) => self.inherited.get(file as usize)?,
            Way::Session => return None,
        };
        Some(Place { lease, at: u64::from(slab) * self.slab_bytes + offset })
    }

    /// A child of this process is to have nothing of it.
    pub(super) fn keep_from_children(&self) {
        // Where there is no memory for that, the fork finds none either.
        let _ = self.lease.mark.keep_from_children();
    }

    /// All that it has.
    pub(super) fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.inherited.iter().chain([&self.lease]).map(|lease| lease.file.as_fd())
    }

    /// Has no file any more but its own.
    pub(super) fn forget_inherited(&mut self) {
        self.direct.forget_inherited();
        self.inherited.clear();
    }

    /// Writes what can be written directly.
    #[inline]
    pub(super) fn write(
        &mut self,
        applied: u64,
        slab: u32,
        offset: u64,
        bytes: u32,
        locals: &[SharedSlice],
    ) -> Tried {
        let way = self.direct.write(applied, slab, offset, bytes.into());
        if bytes > PAYLOAD_BYTES_MAX || way != Way::Direct {
            return Tried::Session;
        }
        let done = self.lease.file.write_at(u64::from(slab) * self.slab_bytes + offset, locals);
        tried(&self.lease, done.is_ok())
    }
}

/// Only afterwards is it known that the lender had not taken the memory back before.
#[inline]
fn tried(lease: &Lease, done: bool) -> Tried {
    match done {
        _ if !lease.is_lent() => Tried::Over,
        true => Tried::Done,
        false => Tried::Session,
    }
}

/// What [`protocol::PROVIDE`] is to be told of a unit.
pub(super) fn provision(Unit { slab, index }: Unit, slab_bytes: u64) -> Vec<u8> {
    let start = u64::from(index) * UNIT_BYTES;
    let mut body = BodyWriter::default();
    body.u32(slab).u64(start).u64(UNIT_BYTES.min(slab_bytes.saturating_sub(start)));
    body.0
}

/// Between two looks whether others still read there, and how many. Who reads for longer than that frees it.
const LOOK: Duration = Duration::from_millis(1);
const LOOKS_MAX: u32 = 10_000;
const STACK_BYTES: usize = 64 << 10;

impl Borrower {
    /// Ends the connection to a lender that is lost. If it was on this host and has died, what it had lent is freed when nobody has the file any more,
    /// by whoever had it last, for whom the kernel needs 0.2 s for a GiB: a thread of its own, in which `first` runs before all else.
    pub(crate) fn let_go(mut self, first: Option<fn()>) {
        let Some(Nearby { lease, inherited, .. }) = self.nearby.take() else { return };
        drop(self);
        let body = move || {
            netvm_sys::thread::set_name(c"netvm-let-go");
            netvm_sys::thread::block_signals();
            // A thread that serves its own faults may be there just now.
            for _ in 0..LOOKS_MAX {
                if inherited.iter().chain([&lease]).all(|lease| Arc::strong_count(lease) == 1) {
                    break;
                }
                std::thread::sleep(LOOK);
            }
        };
        // Without one it is freed here.
        let _ = netvm_sys::thread::start(STACK_BYTES, first, Box::new(body));
    }

    /// Finds out whether the lender is on this host, and shares its memory if both want that.
    ///
    /// # Errors
    /// When the connection is lost; or, with [`LinkChoice::Shm`], when the memory cannot be shared.
    pub(super) async fn look_around(&mut self, wait: &Wait, link: LinkChoice, is_fork: bool) -> Result<()> {
        let link = link.or_environment();
        if !link.may_share() {
            return Ok(());
        }
        match self.meet(wait, is_fork).await {
            Ok(nearby) => {
                self.nearby = Some(nearby);
                Ok(())
            }
            Err(_) if self.is_broken() => self.check(),
            Err(_) if link == LinkChoice::Auto => Ok(()),
            Err(reason) => Err(Error::Other(format!(
                "the memory of lender {} cannot be shared, and nothing else is wanted: {reason}",
                self.lender()
            ))),
        }
    }

    async fn meet(&mut self, wait: &Wait, is_fork: bool) -> Result<Nearby, String> {
        let inviter = Inviter::invite()?;
        let invitation = inviter.invitation.encode().to_vec();
        self.ask(wait, protocol::MEET, invitation, "meeting").await.map_err(|error| match error {
            Error::Op { code: Status::Unsupported, .. } => {
                "it is on another host (or in another network name space), or shares no memory".to_owned()
            }
            Error::Op { code: Status::NoMethod, .. } => "it does not know how".to_owned(),
            other => other.to_string(),
        })?;
        let channel = inviter.meet()?;
        let wish = if is_fork { 1_u32.to_le_bytes().to_vec() } else { Vec::new() };
        let answer = self.ask(wait, protocol::FILE, wish, "file").await;
        let answer = answer.map_err(|error| error.to_string())?;
        let mut answer = BodyReader(&answer);
        let bytes = answer.u64().ok_or("its answer makes no sense")?;
        let mark = answer.u64().ok_or("it does not tell when it takes its memory back")?;
        let Inherited(runs) = Inherited::decode(answer).ok_or("its answer makes no sense")?;
        // Where no more descriptors are to be had, those files are not used.
        let (_, fds) = channel.receive_some(&mut [0; 1]).map_err(|error| error.to_string())?;
        if fds.len() > 1 + runs.len() {
            return Err(format!("it has passed {} descriptors, and speaks of {}", fds.len(), 1 + runs.len()));
        }
        let bad = |error| format!("its file is not as it should be: {error}");
        let mut files = fds.into_iter().map(|fd| Memfd::adopt(fd, bytes).map_err(bad));
        let file = files.next().ok_or("it has passed no descriptor")??;
        let mark = Arc::new(Mark::of_peer(&file, mark).map_err(bad)?);
        let with_mark = |file| Arc::new(Lease { file, mark: Arc::clone(&mark) });
        let inherited = files.map(|file| file.map(with_mark)).collect::<Result<Vec<_>, _>>()?;
        let slab_bytes = self.slab_bytes();
        let mut direct = Direct::new(slab_bytes);
        let slabs = bytes / slab_bytes;
        for (file, runs) in (0..inherited.len() as u32).zip(runs) {
            for (first, count) in runs {
                // Beyond its end there is nothing to be read.
                let slabs = u64::from(first)..(u64::from(first) + u64::from(count)).min(slabs);
                slabs.for_each(|slab| direct.inherited(slab as u32, file));
            }
        }
        Ok(Nearby { lease: with_mark(file), inherited, slab_bytes, direct })
    }
}
