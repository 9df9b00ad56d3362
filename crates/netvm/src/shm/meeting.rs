//! How two ends of a session meet over a socket of their host, if they are on the same one.

use std::io;

use netvm_core::key::RemoteKey;
use netvm_sys::fdpass::{FdListener, FdSocket};

pub(crate) type Secret = [u8; 16];

/// The name of a meeting: nobody can have the one who is invited talk to anybody but a netvm.
pub(crate) fn meeting_name(name: &Secret) -> Vec<u8> {
    let hex: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("netvm-{hex}").into_bytes()
}

/// What the one who invites says in the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Invitation {
    /// Where it listens.
    pub(crate) name: Secret,
    /// What it wants to hear first.
    pub(crate) hello: Secret,
    /// What it will answer.
    pub(crate) proof: Secret,
}

pub(crate) const INVITATION_BYTES: usize = 48;

impl Invitation {
    pub(crate) fn encode(&self) -> [u8; INVITATION_BYTES] {
        let mut bytes = [0; INVITATION_BYTES];
        for (place, part) in bytes.chunks_exact_mut(16).zip([self.name, self.hello, self.proof]) {
            place.copy_from_slice(&part);
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; INVITATION_BYTES] = bytes.try_into().ok()?;
        let part = |index: usize| bytes[16 * index..].first_chunk().copied();
        Some(Self { name: part(0)?, hello: part(1)?, proof: part(2)? })
    }
}

/// The side that invites.
#[derive(Debug)]
pub(crate) struct Inviter {
    pub(crate) invitation: Invitation,
    listener: FdListener,
}

impl Inviter {
    /// Listens at a random name.
    pub(crate) fn invite() -> Result<Self, String> {
        let random = || {
            let mut bytes: Secret = [0; 16];
            getrandom::fill(&mut bytes).map(|()| bytes).map_err(|error| error.to_string())
        };
        let invitation = Invitation { name: random()?, hello: random()?, proof: random()? };
        let listener = FdListener::bind(&meeting_name(&invitation.name))
            .map_err(|error| format!("no sockets to pass descriptors over: {error}"))?;
        Ok(Self { invitation, listener })
    }

    /// The guest, who has connected and sent its part before it answered; whoever else has come is not it.
    pub(crate) fn meet(self) -> Result<FdSocket, String> {
        while let Some(socket) = self.listener.accept().map_err(|error| error.to_string())? {
            let mut bytes = [0; 16];
            let known = match socket.receive(&mut bytes) {
                Ok((16, fds)) => fds.is_empty() && is_same(bytes, self.invitation.hello),
                _ => false,
            };
            if known {
                socket.send(&self.invitation.proof, &[]).map_err(|error| error.to_string())?;
                return Ok(socket);
            }
        }
        Err("the peer did not come to the meeting".to_owned())
    }
}

/// The side that is invited: has come, and does not know yet to whom.
#[derive(Debug)]
pub(crate) struct Invited {
    channel: FdSocket,
    proof: Secret,
}

impl Invited {
    /// Connects and says what is wanted; never waits.
    ///
    /// # Errors
    /// The other one is on another host, or has given up.
    pub(crate) fn come(invitation: &Invitation) -> io::Result<Self> {
        let channel = FdSocket::connect(&meeting_name(&invitation.name))?;
        channel.send(&invitation.hello, &[])?;
        Ok(Self { channel, proof: invitation.proof })
    }

    /// The one we met is the session's peer if it has sent us what the peer said it would.
    pub(crate) fn believe(self) -> Option<FdSocket> {
        let mut bytes = [0; 16];
        let received = self.channel.receive(&mut bytes).ok()?;
        (received.0 == 16 && is_same(bytes, self.proof)).then_some(self.channel)
    }
}

fn is_same(one: Secret, other: Secret) -> bool {
    RemoteKey::from_bytes(one).matches(&RemoteKey::from_bytes(other))
}
