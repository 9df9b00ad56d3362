//! Borrowers on this host, and what files they are given: docs/design/nearby.md.

use std::sync::Arc;

use netvm_sys::memfd::Memfd;

use super::*;
use crate::lender::protocol::Inherited;
use crate::shm::LinkChoice;
use crate::shm::meeting::Invitation;

impl Lender {
    /// [`protocol::MEET`].
    pub(super) fn meet(&self, served: &mut Served, lease: LeaseId, invitation: &[u8]) -> Result<(), Status> {
        let invitation = Invitation::decode(invitation).ok_or(Status::BadRequest)?;
        let wants_socket = !LinkChoice::from_environment().may_share();
        let has_none = self.memories.on_disk || self.memories.packing().is_some();
        if wants_socket || has_none || self.memories.has_file(lease) {
            return Err(Status::Unsupported);
        }
        // It is on another host, or has given up.
        served.met = Some(Invited::come(&invitation).map_err(|_| Status::Unsupported)?);
        Ok(())
    }

    /// [`protocol::FILE`].
    pub(super) fn give_files(
        &mut self,
        served: &mut Served,
        lease: LeaseId,
        wants_inherited: bool,
    ) -> Result<Vec<u8>, Status> {
        let channel = served.met.take().ok_or(Status::BadRequest)?.believe();
        let channel = channel.ok_or(Status::Unsupported)?;
        let file = self.memories.give_file(lease).map_err(|_| Status::Full)?;
        let mut out = BodyWriter::default();
        out.u64(file.len()).u64(self.memories.slabs.size_bytes());
        let files_max = if wants_inherited { protocol::INHERITED_MAX } else { 0 };
        // Where such a descriptor cannot be had what is in there goes over the session.
        let open = |(file, runs): (Arc<Memfd>, _)| Some((file.read_only().ok()?, runs));
        let inherited = self.memories.inherited(lease, files_max).into_iter().filter_map(open);
        let (files, runs): (Vec<_>, Vec<_>) = inherited.unzip();
        let all: Vec<_> = [file.as_fd()].into_iter().chain(files.iter().map(AsFd::as_fd)).collect();
        channel.send(&[1], &all).map_err(|_| Status::Unsupported)?;
        if !runs.is_empty() {
            Inherited(runs).encode(&mut out);
        }
        Ok(out.0)
    }
}
