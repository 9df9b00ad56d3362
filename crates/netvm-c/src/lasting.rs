//! Peers and regions that may outlive a connection: behind the same handles as others.

use std::borrow::Cow;
use std::ops::Deref;
use std::sync::Arc;

use netvm::lasting::{LastingPeer, LastingRegion};
use netvm::node::RemoteKey;
use netvm::region::{Peer, Region, WriteOptions};

use crate::code::{Code, Failure, Result};
use crate::ffi::Opaque;

/// `netvm_peer`.
pub enum PeerHandle {
    /// Of one connection.
    Direct(Peer),
    /// Connected to again.
    Lasting(LastingPeer),
}

impl Opaque for PeerHandle {
    const TAG: u32 = 0x6E76_5002;
    const NAME: &'static str = "peer";
}

impl PeerHandle {
    /// The peer as it is now.
    pub(crate) fn now(&self) -> Result<Cow<'_, Peer>> {
        match self {
            Self::Direct(peer) => Ok(Cow::Borrowed(peer)),
            Self::Lasting(peer) => Ok(Cow::Owned(peer.current()?)),
        }
    }

    pub(crate) fn import(&self, name: &str, key: &RemoteKey) -> Result<RegionHandle> {
        Ok(match self {
            Self::Direct(peer) => RegionHandle::Direct(peer.import(name, key)?),
            Self::Lasting(peer) => RegionHandle::Lasting(peer.import(name, key)?),
        })
    }
}

/// `netvm_region`.
pub enum RegionHandle {
    /// Of one connection.
    Direct(Region),
    /// Opened again in each connection.
    Lasting(LastingRegion),
}

impl Opaque for RegionHandle {
    const TAG: u32 = 0x6E76_5204;
    const NAME: &'static str = "region";
}

/// The region of the connection that there is now.
pub(crate) enum Now<'a> {
    Direct(&'a Region),
    Lasting(Arc<Region>),
}

impl Deref for Now<'_> {
    type Target = Region;
    fn deref(&self) -> &Region {
        match self {
            Self::Direct(region) => region,
            Self::Lasting(region) => region,
        }
    }
}

impl RegionHandle {
    pub(crate) fn now(&self) -> Result<Now<'_>> {
        Ok(match self {
            Self::Direct(region) => Now::Direct(region),
            Self::Lasting(region) => Now::Lasting(region.current()?),
        })
    }

    /// For what a flush must know of, should the connection end before: none for those of one connection.
    pub(crate) fn lasting(&self) -> Option<&LastingRegion> {
        match self {
            Self::Direct(_) => None,
            Self::Lasting(region) => Some(region),
        }
    }

    /// The only region that can have posted writes and flushes: another connection's flush says nothing of them.
    pub(crate) fn direct(&self) -> Result<&Region> {
        match self {
            Self::Direct(region) => Ok(region),
            Self::Lasting(_) => {
                let message = "puts and flushes cannot be posted to a peer that is reconnected to";
                Err(Failure::new(Code::Unsupported, message))
            }
        }
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8], options: WriteOptions) -> Result<()> {
        match self {
            Self::Direct(region) => region.write_with(offset, bytes, options)?,
            Self::Lasting(region) => region.write_with(offset, bytes, options)?,
        }
        Ok(())
    }

    pub(crate) fn flush(&self) -> Result<()> {
        match self {
            Self::Direct(region) => region.flush()?,
            Self::Lasting(region) => region.flush()?,
        }
        Ok(())
    }
}
