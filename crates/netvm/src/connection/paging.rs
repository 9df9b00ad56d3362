//! A session's operations on memory that is not there: handed to the node's paging threads, and back.

use std::time::{Duration, Instant};

use netvm_core::endpoint::{Done, Endpoint, Job, JobId, Work};
use netvm_core::key::Access;
use netvm_core::limits::{BOUNCE_BYTES_MAX, NODE_BOUNCE_BYTES_MAX};
use netvm_core::segment::SegmentId;
use netvm_core::wire::Status;

use super::{PeerSession, State};
use crate::link::session::Failure;
use crate::memory::Memory;
use crate::node::{Task, View, lock};

impl PeerSession {
    /// Hands out the jobs that may be executed now.
    pub(super) fn hand_out(&self, state: &mut State) -> Result<(), Failure> {
        while let Some(job) = state.session.endpoint.job() {
            let id = job.id;
            let refused = match self.find(state, &job) {
                Ok((segment, memory)) => {
                    let (peer, since) = (self.me.clone(), Instant::now());
                    self.shared.pagers.push(Task { peer, segment, memory, job, since }).err()
                }
                Err(status) => Some(status),
            };
            if let Some(status) = refused {
                self.with_endpoint(state, |endpoint, view| endpoint.paged(id, Err(status), view))?;
            }
        }
        self.account(state);
        Ok(())
    }

    fn with_endpoint<R>(&self, state: &mut State, act: impl FnOnce(&mut Endpoint, &mut View<'_>) -> R) -> R {
        let State { session, imports, inbox, sharing, .. } = state;
        act(&mut session.endpoint, &mut View::new(&self.shared, self.session, imports, inbox, sharing))
    }

    fn find(&self, state: &State, job: &Job) -> Result<(SegmentId, Memory), Status> {
        let exports = lock(&self.shared.exports);
        let (bytes, access) = match &job.work {
            Work::Write(bytes) => (bytes.len() as u32, Access::Write),
            Work::Read(bytes) => (*bytes, Access::Read),
            Work::Atomic(atomic) => {
                let id = state.imports.check_atomic(&exports.table, job.handle, job.offset, atomic)?;
                return exports.memory(id).map(|memory| (id, memory)).ok_or(Status::NoHandle);
            }
        };
        let id = state.imports.check(&exports.table, job.handle, job.offset, bytes, access)?;
        exports.memory(id).map(|memory| (id, memory)).ok_or(Status::NoHandle)
    }

    /// The node's thread, from time to time: refuses what has waited for others for too long.
    pub(super) fn refuse_overdue(
        &self,
        state: &mut State,
        now_ms: u64,
        limit: Duration,
    ) -> Result<(), Failure> {
        let limit_ms = limit.as_millis() as u64;
        for id in state.session.endpoint.overdue(now_ms, limit_ms) {
            self.with_endpoint(state, |endpoint, view| endpoint.paged(id, Err(Status::Away), view))?;
        }
        self.hand_out(state)
    }

    /// Tells how much of the node's bounce memory this session holds, and how much it may.
    pub(super) fn account(&self, state: &mut State) {
        let now = state.session.endpoint.paging().bytes();
        self.shared.pagers.account(state.bounced, now);
        state.bounced = now;
        let node_is_full = self.shared.pagers.bytes() >= NODE_BOUNCE_BYTES_MAX;
        state.session.bounce_max = if node_is_full { 1 } else { BOUNCE_BYTES_MAX };
    }

    /// A paging thread: a job has been executed.
    pub(crate) fn paged(&self, id: JobId, result: Result<Done, Status>) {
        let mut state = self.lock();
        if state.broken.is_some() {
            return;
        }
        let told = self.with_endpoint(&mut state, |endpoint, view| endpoint.paged(id, result, view));
        match told.map_err(Failure::from).and_then(|()| self.hand_out(&mut state)) {
            // Whoever leads receives: what came for him would not wake him otherwise.
            Ok(()) if state.led => match self.send_all(&mut state) {
                Ok(()) => self.collect(&mut state),
                Err(failure) => self.fail(&mut state, &failure),
            },
            Ok(()) => drop(self.progress(&mut state)),
            Err(failure) => self.fail(&mut state, &failure),
        }
        if !state.led && !state.leased {
            self.arm(&mut state);
        }
    }
}
