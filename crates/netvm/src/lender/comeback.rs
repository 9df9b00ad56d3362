//! Tries to reach a lost lender again, beside everything else.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::{BorrowOptions, Borrower, BorrowerParts};

const RETRY: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 2000 });
const STACK_BYTES: usize = 256 << 10;

/// A thread that tries; it ends when it has succeeded, or soon after this is dropped.
pub(crate) struct Comeback {
    found: Receiver<BorrowerParts>,
    /// The thread sees when it has gone.
    _wanted: Arc<()>,
}

impl Comeback {
    /// `first` runs in the thread before all else. `None` when there is no thread to be had.
    pub(crate) fn start(address: &str, options: &BorrowOptions, first: Option<fn()>) -> Option<Self> {
        let (sender, found) = sync_channel(1);
        let (address, options) = (address.to_owned(), options.clone());
        let wanted = Arc::new(());
        let still_wanted = Arc::downgrade(&wanted);
        let body = move || {
            netvm_sys::thread::set_name(c"netvm-comeback");
            netvm_sys::thread::block_signals();
            attempt(&address, &options, &sender, &still_wanted);
        };
        netvm_sys::thread::start(STACK_BYTES, first, Box::new(body)).ok()?;
        Some(Self { found, _wanted: wanted })
    }

    /// The connection, when there is one.
    pub(crate) fn take(&mut self) -> Option<Borrower> {
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
