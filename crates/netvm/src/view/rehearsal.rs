//! What views do beforehand that must not allocate memory when the kernel waits for some.

use netvm_sys::epoll::{Epoll, Interest};
use netvm_sys::shared::SharedSlice;

use crate::error::{Error, Result};
use crate::volume::{Ended, Volume};

/// Has a volume that is not used yet do as much at once as it ever will, so that its queues have their final size: `slots` requests of
/// `bytes_max` bytes, or as many as it has, with `buffer` giving the place for each.
///
/// # Errors
/// The error of a lender that is lost already; [`Error::System`].
pub(super) fn rehearse(
    volume: &mut Volume,
    slots: usize,
    bytes_max: usize,
    buffer: impl Fn(usize, usize) -> SharedSlice,
) -> Result<()> {
    let size = volume.size_bytes();
    let bytes = size.min(bytes_max as u64) as usize;
    let room = size - bytes as u64;
    for writes in [true, false] {
        for slot in 0..slots {
            // Not on block boundaries where that is possible: those take the most transfers.
            let offset = (slot * (bytes_max + 512)) as u64 % (room + 1);
            match writes {
                true => volume.write(slot as u64, offset, buffer(slot, bytes))?,
                false => volume.read(slot as u64, offset, buffer(slot, bytes))?,
            }
        }
        settle(volume, slots)?;
    }
    volume.discard(0, 0, size)?;
    settle(volume, 1)?;
    volume.flush(0);
    settle(volume, 1)
}

/// Until this many operations have ended. A lender that is silent is lost, so this ends.
fn settle(volume: &mut Volume, mut count: usize) -> Result<()> {
    let wait = Epoll::new().map_err(|error| Error::system("make an epoll set", &error))?;
    let interest = Interest { readable: true, writable: false };
    wait.add(volume.as_fd(), 0, interest).map_err(|error| Error::system("watch a descriptor", &error))?;
    let (mut ready, mut ended) = (Vec::new(), Vec::new());
    loop {
        volume.poll(&mut ended);
        for Ended { result, .. } in ended.drain(..) {
            result?;
            count -= 1;
        }
        if count == 0 {
            return Ok(());
        }
        let waited = wait.wait(&mut ready, Some(volume.patience()));
        waited.map_err(|error| Error::system("wait for lenders", &error))?;
    }
}
