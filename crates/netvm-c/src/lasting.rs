//! Peers and regions that may outlive a connection: behind the same handles as others.

use std::borrow::Cow;
use std::ops::Deref;
use std::sync::Arc;

use netvm::lasting::{LastingPeer, LastingRegion, Writing};
use netvm::node::{RemoteKey, Rights};
use netvm::region::{Peer, Region};

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
    Writing(Writing<'a>),
}

impl Deref for Now<'_> {
    type Target = Region;
    #[inline]
    fn deref(&self) -> &Region {
        match self {
            Self::Direct(region) => region,
            Self::Lasting(region) => region,
            Self::Writing(region) => region,
        }
    }
}

impl RegionHandle {
    #[inline]
    pub(crate) fn now(&self) -> Result<Now<'_>> {
        Ok(match self {
            Self::Direct(region) => Now::Direct(region),
            Self::Lasting(region) => Now::Lasting(region.current()?),
        })
    }

    /// The same for a put, which the flushes of a lasting one answer for. Told at once: what the peer would refuse, of which otherwise
    /// only the next flush would tell.
    #[inline(always)]
    pub(crate) fn writing(&self, offset: u64, bytes: usize) -> Result<Now<'_>> {
        match self {
            Self::Direct(region) => writable(region, offset, bytes).map(|()| Now::Direct(region)),
            Self::Lasting(region) => writing_lasting(region, offset, bytes),
        }
    }

    /// The same for a put that is posted.
    pub(crate) fn post_put(
        &self,
        offset: u64,
        bytes: usize,
        post: impl FnOnce(&Region) -> Result<()>,
    ) -> Result<()> {
        match self {
            Self::Direct(region) => writable(region, offset, bytes).and_then(|()| post(region)),
            Self::Lasting(region) => {
                writable(&*region.current()?, offset, bytes)?;
                region.post_write(post, |failure: &Failure| failure.code == Code::Busy)
            }
        }
    }

    /// The same for a flush that is posted.
    pub(crate) fn post_flush(&self, post: impl FnOnce(&Region) -> Result<()>) -> Result<()> {
        match self {
            Self::Direct(region) => post(region),
            Self::Lasting(region) => region.post_flush(post),
        }
    }

    #[inline]
    pub(crate) fn flush(&self) -> Result<()> {
        match self {
            Self::Direct(region) => region.flush()?,
            Self::Lasting(region) => region.flush()?,
        }
        Ok(())
    }
}

#[inline(always)]
fn writable(region: &Region, offset: u64, bytes: usize) -> Result<()> {
    if region.rights() != Rights::ReadWrite {
        return Err(read_only());
    }
    inside(region, offset, bytes)
}

#[inline(never)]
fn writing_lasting(region: &LastingRegion, offset: u64, bytes: usize) -> Result<Now<'_>> {
    writable(&*region.current()?, offset, bytes)?;
    Ok(Now::Writing(region.writing()?))
}

#[cold]
fn read_only() -> Failure {
    Failure::new(Code::Rights, "the segment is exported for reading only")
}

#[inline(always)]
pub(crate) fn inside(region: &Region, offset: u64, bytes: usize) -> Result<()> {
    match offset.checked_add(bytes as u64) {
        Some(end) if end <= region.len() => Ok(()),
        _ => Err(outside(region, offset, bytes)),
    }
}

#[cold]
fn outside(region: &Region, offset: u64, bytes: usize) -> Failure {
    netvm::Error::Bounds { offset, bytes: bytes as u64, len: region.len() }.into()
}
