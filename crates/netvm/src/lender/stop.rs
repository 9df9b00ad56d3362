//! How a lender is stopped.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use netvm_sys::epoll::EventFd;

use crate::error::{Error, Result};

/// Stops a lender: once, and it takes no new borrowers, asks those it has to move what they have to others, and ends when the last has
/// gone; twice, and it ends at once.
#[derive(Clone, Debug)]
pub struct StopFlag(Arc<EventFd>);

impl StopFlag {
    /// A flag that is not raised.
    ///
    /// # Errors
    /// [`Error::System`] when no descriptor is left.
    pub fn new() -> Result<Self> {
        let event = EventFd::new().map_err(|error| Error::system("make an event descriptor", &error))?;
        Ok(Self(Arc::new(event)))
    }

    /// Raises the flag. Safe in a signal handler.
    pub fn stop(&self) {
        self.0.signal();
    }

    /// How often it has been raised since this was last asked.
    pub(crate) fn take(&self) -> u64 {
        self.0.take()
    }

    /// Readable when raised and not yet seen.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
