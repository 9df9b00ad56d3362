//! What a node exports, and what of it one peer may reach.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, MutexGuard};

use netvm_core::atomic::Atomic;
use netvm_core::channel::Notice;
use netvm_core::copy;
use netvm_core::endpoint::{Paging, Presence};
use netvm_core::key::{Access, RemoteKey, Rights};
use netvm_core::limits::{OUTLETS_MAX, QUEUES_MAX, SYNC_OBJECTS_MAX, TICKETS_MAX};
use netvm_core::segment::{ExportTable, ImportTable, SegmentId};
use netvm_core::sync::{ObjectId, SessionId, Ticket, Waiters};
use netvm_core::wire::Status;
use netvm_sys::shared::SharedSlice;

use super::locate::{self, LOCATE_METHOD};
use super::shared::{Shared, lock};
use crate::channel::{CHANNEL_HANDLE, CHANNEL_METHOD, Inlet, Outlets};
use crate::error::Result;
use crate::link::session::Memory;
use crate::memory::{Memory as SegmentMemory, now};
use crate::notify::queue::{self, Account};
use crate::notify::{Notifications, Notify};
use crate::shm::SHM_METHOD;
use crate::shm::export::{Near, Shared1, Sharing};
use crate::sync::{SYNC_HANDLE, SYNC_METHOD};

/// What a node exports.
#[derive(Default)]
pub(crate) struct Exports {
    pub(crate) table: ExportTable,
    /// By the segment's place in the table.
    pub(super) segments: Vec<Option<Segment>>,
    pub(super) names: HashMap<String, SegmentId>,
}

pub(crate) struct Segment {
    pub(super) memory: SegmentMemory,
    pub(crate) notifications: Notifications,
    /// What it is besides memory.
    pub(super) sync: Option<ObjectId>,
    pub(super) inlet: Option<Arc<Inlet>>,
    /// Who has it mapped.
    pub(crate) shares: Vec<Shared1>,
}

impl Segment {
    /// How other processes may reach its memory by themselves; `apart` where that need not be mapped.
    pub(crate) fn near(&self, apart: bool) -> Option<Near<'_>> {
        let file = self.memory.sharable_file().map(Near::File);
        if self.sync.is_some() {
            // A lock's word. Others have none.
            return file;
        }
        file.or_else(|| self.memory.copied_by_others().filter(|_| apart).map(Near::Apart))
    }
}

impl Exports {
    /// Whether some of the memory may be freed by somebody who does not know who uses it.
    pub(super) fn has_foreign(&self) -> bool {
        self.segments.iter().flatten().any(|segment| !segment.memory.is_kept())
    }

    /// The memory of a segment.
    pub(crate) fn memory(&self, id: SegmentId) -> Option<SegmentMemory> {
        Some(self.segment(id)?.memory.clone())
    }

    pub(crate) fn segment(&self, id: SegmentId) -> Option<&Segment> {
        self.segments.get(id.index())?.as_ref()
    }

    /// None when it was unexported and its place has another one now.
    pub(crate) fn segment_mut(&mut self, id: SegmentId) -> Option<&mut Segment> {
        if !self.table.has(id) {
            return None;
        }
        self.segments.get_mut(id.index())?.as_mut()
    }
}

/// What one peer may reach.
pub(crate) struct View<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) session: SessionId,
    pub(crate) imports: &'a mut ImportTable,
    pub(crate) inbox: &'a mut Inbox,
    pub(crate) sharing: &'a mut Sharing,
    /// The clock, once somebody has asked it.
    now: Option<u32>,
}

impl<'a> View<'a> {
    pub(crate) fn new(
        shared: &'a Shared,
        session: SessionId,
        imports: &'a mut ImportTable,
        inbox: &'a mut Inbox,
        sharing: &'a mut Sharing,
    ) -> Self {
        Self { shared, session, imports, inbox, sharing, now: None }
    }
}

impl View<'_> {
    /// Writes, and waits for memory that is not there.
    pub(crate) fn write_and_wait(&mut self, handle: u32, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        use netvm_core::endpoint::Exports;
        self.check(handle, offset, bytes.len() as u32, Access::Write)?;
        let part = self.memory(handle, offset, bytes.len() as u32).ok_or(Status::NoHandle)?;
        part.write_from(0, bytes).ok_or(Status::Fault)
    }

    /// Whether a part of a segment can be touched without waiting; nobody else waits while the kernel is asked.
    fn is_here(&mut self, exports: MutexGuard<'_, Exports>, id: SegmentId, part: SharedSlice) -> bool {
        let now = *self.now.get_or_insert_with(now);
        let Some(segment) = exports.segment(id) else { return true };
        if segment.memory.is_known_here(part, now) {
            return true;
        }
        let memory = segment.memory.clone();
        drop(exports);
        memory.is_here(part, now)
    }

    /// How many free places the peer has in a segment's queue.
    fn room(&mut self, body: &[u8]) -> Result<Vec<u8>, Status> {
        let handle = body.try_into().map(u32::from_le_bytes).map_err(|_| Status::BadRequest)?;
        let exports = lock(&self.shared.exports);
        let (id, _) = self.imports.notifications(&exports.table, handle).ok_or(Status::NoHandle)?;
        let segment = exports.segment(id).ok_or(Status::NoHandle)?;
        let queue = segment.notifications.queue().ok_or(Status::Unsupported)?;
        let accounts = &mut self.inbox.accounts;
        if !accounts.contains_key(&handle) {
            if accounts.len() >= QUEUES_MAX {
                return Err(Status::Full);
            }
            accounts.insert(handle, queue.open_account().ok_or(Status::Full)?);
        }
        Ok(accounts[&handle].room().to_le_bytes().to_vec())
    }

    /// The peer asks for its turn, or ends another's wait.
    fn turn(&mut self, body: &[u8]) -> Result<Vec<u8>, Status> {
        let room = TICKETS_MAX.saturating_sub(self.inbox.signals.len());
        let (answer, own) = self.shared.answer(self.session, self.imports, body, room)?;
        self.inbox.signals.extend(own.into_iter().filter_map(|own| own.signal.notify(own.ticket)));
        Ok(answer)
    }

    /// Copies between two segments that the peer has opened.
    fn copy(&mut self, request: &copy::Request<'_>, to: u32) -> Result<Vec<u8>, Status> {
        use netvm_core::endpoint::Exports;
        let copy::Request { handle, offset, bytes, other_offset, .. } = *request;
        let len = u32::try_from(bytes).map_err(|_| Status::OutOfBounds)?;
        self.check(handle, offset, len, Access::Read)?;
        self.check(to, other_offset, len, Access::Write)?;
        let from = self.memory(handle, offset, len).ok_or(Status::NoHandle)?;
        let to = self.memory(to, other_offset, len).ok_or(Status::NoHandle)?;
        to.copy_from(&from).ok_or(Status::Fault)?;
        Ok(copy::Reply::Done.encode())
    }
}

/// Signals from the peer, for our processes that wait for their turn there, and what else is to be told.
#[derive(Default)]
pub(crate) struct Inbox {
    /// Signals to the peer's waiters, until the window has room.
    pub(crate) signals: VecDeque<Notify>,
    pub(crate) waiters: Waiters,
    pub(crate) outlets: Outlets,
    pub(crate) news: bool,
    /// The peer's places in queues of notifications, by the segment's handle.
    pub(crate) accounts: HashMap<u32, Arc<Account>>,
}

impl netvm_core::endpoint::Exports for View<'_> {
    fn check(&mut self, handle: u32, offset: u64, bytes: u32, access: Access) -> Result<(), Status> {
        if handle >= CHANNEL_HANDLE && bytes == 0 && access == Access::Write {
            return Ok(());
        }
        self.imports.check(&lock(&self.shared.exports).table, handle, offset, bytes, access).map(|_| ())
    }

    fn import(&mut self, name: &str, key: &RemoteKey) -> Result<(u32, u64, Rights), Status> {
        self.imports.import(&lock(&self.shared.exports).table, name, key)
    }

    fn unimport(&mut self, handle: u32) {
        self.sharing.forget(self.shared, handle);
        self.imports.unimport(handle);
        self.inbox.accounts.remove(&handle);
    }

    fn atomic(&mut self, handle: u32, offset: u64, atomic: &Atomic) -> Result<u64, Status> {
        let exports = lock(&self.shared.exports);
        let id = self.imports.check_atomic(&exports.table, handle, offset, atomic)?;
        let memory = exports.segment(id).map(|segment| segment.memory.shared());
        // The session's lock keeps `unexport` waiting.
        drop(exports);
        let offset = usize::try_from(offset).map_err(|_| Status::OutOfBounds)?;
        execute(memory.ok_or(Status::NoHandle)?, offset, atomic)
    }

    fn presence(&mut self, handle: u32, offset: u64, bytes: u32, _: Access) -> Presence {
        let exports = lock(&self.shared.exports);
        let Ok(id) = self.imports.check(&exports.table, handle, offset, bytes, Access::Read) else {
            return Presence::Here;
        };
        let part = exports
            .segment(id)
            .and_then(|segment| segment.memory.shared().sub(usize::try_from(offset).ok()?, bytes as usize));
        match part {
            Some(part) if !self.is_here(exports, id, part) => Presence::Away,
            _ => Presence::Here,
        }
    }

    fn address(&mut self, handle: u32, offset: u64) -> u64 {
        self.memory(handle, offset, 0).map_or(offset, |memory| memory.as_ptr().addr() as u64)
    }

    fn snapshot(&mut self, handle: u32, offset: u64, bytes: u32) -> Option<Result<Vec<u8>, Status>> {
        let memory = self.memory(handle, offset, bytes)?;
        memory.is_guarded().then(|| {
            let mut copy = vec![0; bytes as usize];
            memory.read_into(0, &mut copy).map(|()| copy).ok_or(Status::Fault)
        })
    }

    fn call(&mut self, method: u32, body: &[u8]) -> Option<Result<Vec<u8>, Status>> {
        match method {
            SYNC_METHOD => Some(self.turn(body)),
            CHANNEL_METHOD => {
                let is_mapped = |handle| self.sharing.has(handle);
                Some(self.shared.asked(self.session, self.imports, is_mapped, body))
            }
            // To and from third nodes takes longer.
            copy::METHOD => {
                let request = copy::Request::decode(body)?;
                let copy::Way::Local { handle } = request.way else { return None };
                Some(self.copy(&request, handle))
            }
            SHM_METHOD => Some(self.sharing.answer(self.shared, self.imports, body)),
            queue::METHOD => Some(self.room(body)),
            LOCATE_METHOD => Some(locate::answer(&lock(&self.shared.exports), self.imports, body)),
            _ => None,
        }
    }

    fn notifications(&mut self, handle: u32) -> u32 {
        match handle {
            // Tickets, and what sessions have by the words of locks.
            SYNC_HANDLE => return (TICKETS_MAX + SYNC_OBJECTS_MAX) as u32,
            CHANNEL_HANDLE => return OUTLETS_MAX as u32,
            _ => {}
        }
        self.imports
            .notifications(&lock(&self.shared.exports).table, handle)
            .map_or(0, |(_, numbers)| numbers)
    }

    fn notify(&mut self, handle: u32, notify: Notify) {
        if handle == SYNC_HANDLE {
            match Ticket::from_release(notify) {
                Some(ticket) => self.shared.released(self.session, ticket),
                None => self.inbox.news |= self.inbox.waiters.deliver(notify),
            }
            return;
        }
        if handle == CHANNEL_HANDLE {
            if let Some(notice) = Notice::from_notify(notify)
                && !self.shared.told(self.session, notice)
            {
                self.inbox.news |= self.inbox.outlets.deliver(notice);
            }
            return;
        }
        let exports = lock(&self.shared.exports);
        let segment = self.imports.notifications(&exports.table, handle);
        let segment = segment.and_then(|(id, _)| exports.segment(id));
        let notifications = segment.map(|segment| segment.notifications.clone());
        // Waking somebody takes a system call, which other sessions need not wait for.
        drop(exports);
        if let Some(notifications) = notifications {
            // Without places of its own a peer has none to use.
            let account = self.inbox.accounts.get(&handle);
            if account.is_some() || !matches!(notify, Notify::Queue { .. }) {
                notifications.notify_from(notify, account);
            }
        }
    }
}

impl Memory for View<'_> {
    fn memory(&mut self, handle: u32, offset: u64, bytes: u32) -> Option<SharedSlice> {
        let exports = lock(&self.shared.exports);
        // The kind of access was checked when the operation began; that the segment is still there is checked each time.
        let id = self.imports.check(&exports.table, handle, offset, bytes, Access::Read).ok()?;
        exports.segment(id)?.memory.shared().sub(usize::try_from(offset).ok()?, bytes as usize)
    }

    fn write(&mut self, handle: u32, offset: u64, bytes: &[u8], jobs: &Paging) -> Option<Result<(), Status>> {
        let exports = lock(&self.shared.exports);
        let len = bytes.len() as u32;
        let found = self.imports.check(&exports.table, handle, offset, len, Access::Write).and_then(|id| {
            let segment = exports.segment(id).ok_or(Status::NoHandle)?;
            let offset = usize::try_from(offset).map_err(|_| Status::OutOfBounds)?;
            let part = segment.memory.shared().sub(offset, bytes.len()).ok_or(Status::OutOfBounds)?;
            Ok((id, part))
        });
        let (id, part) = match found {
            Ok(found) => found,
            Err(status) => return Some(Err(status)),
        };
        if jobs.is_before(part.as_ptr().addr() as u64, len) || !self.is_here(exports, id, part) {
            return None;
        }
        // The session's lock keeps `unexport` waiting.
        Some(part.write_from(0, bytes).ok_or(Status::Fault))
    }
}

/// Executes an atomic that was checked.
pub(super) fn execute(memory: SharedSlice, offset: usize, atomic: &Atomic) -> Result<u64, Status> {
    // Aligned offsets of memory that begins anywhere: the word's address counts.
    let is_aligned = (memory.as_ptr().addr() + offset).is_multiple_of(atomic.width as usize);
    let gone = if is_aligned && memory.is_guarded() { Status::Fault } else { Status::Misaligned };
    crate::atomic::execute(&memory, offset, atomic).ok_or(gone)
}
