//! Tries to reach a lost lender again, beside everything else.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::lender::{BorrowOptions, Borrower, BorrowerParts};

const RETRY: Duration = Duration::from_secs(2);

/// A thread that tries; it ends when it has succeeded, or soon after this is dropped.
pub(super) struct Comeback {
    found: Receiver<BorrowerParts>,
    /// The thread sees when it has gone.
    _wanted: Arc<()>,
}

impl Comeback {
    /// `None` when there is no thread to be had.
    pub(super) fn start(address: &str, options: &BorrowOptions) -> Option<Self> {
        let (sender, found) = sync_channel(1);
        let (address, options) = (address.to_owned(), options.clone());
        let wanted = Arc::new(());
        let still_wanted = Arc::downgrade(&wanted);
        let thread = std::thread::Builder::new().name("netvm-comeback".to_owned());
        thread.spawn(move || attempt(&address, &options, &sender, &still_wanted)).ok()?;
        Some(Self { found, _wanted: wanted })
    }

    /// The connection, when there is one.
    pub(super) fn take(&mut self) -> Option<Borrower> {
        self.found.try_recv().ok().map(Borrower::from_parts)
    }
}

fn attempt(address: &str, options: &BorrowOptions, found: &SyncSender<BorrowerParts>, wanted: &Weak<()>) {
    while wanted.strong_count() > 0 {
        std::thread::sleep(RETRY);
        if let Ok(borrower) = Borrower::connect(address, options) {
            let _ = found.send(borrower.into_parts());
            return;
        }
    }
}
