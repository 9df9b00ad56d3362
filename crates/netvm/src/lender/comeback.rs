//! Tries to reach a lost lender again, beside everything else.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{BorrowOptions, Borrower, BorrowerParts};

/// Between two tries, in the end.
pub(crate) const RETRY: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 2000 });
/// Before the first; each pause is twice as long as the one before. Who has started again is there soon,
const FIRST: Duration = Duration::from_millis(20);
/// so pauses stay short
const SHORT: Duration = Duration::from_millis(200);
/// for so long.
const SOON: Duration = Duration::from_secs(10);
const STACK_BYTES: usize = 256 << 10;

/// A thread that tries; it ends when it has succeeded, or soon after this is dropped.
pub(crate) struct Comeback {
    found: Receiver<BorrowerParts>,
    /// The thread sees when it has gone.
    _wanted: Arc<()>,
}

impl Comeback {
    /// `first` runs in the thread before all else; `slowly`: there is no hurry, as it has left, or was back only a moment ago. `None` when there is no thread to be had.
    pub(crate) fn start(
        address: &str,
        options: &BorrowOptions,
        first: Option<fn()>,
        slowly: bool,
    ) -> Option<Self> {
        let (sender, found) = sync_channel(1);
        let (address, options) = (address.to_owned(), options.clone());
        let wanted = Arc::new(());
        let still_wanted = Arc::downgrade(&wanted);
        let body = move || {
            netvm_sys::thread::set_name(c"netvm-comeback");
            netvm_sys::thread::block_signals();
            attempt(&address, &options, &sender, &still_wanted, slowly);
        };
        netvm_sys::thread::start(STACK_BYTES, first, Box::new(body)).ok()?;
        Some(Self { found, _wanted: wanted })
    }

    /// The connection, when there is one.
    pub(crate) fn take(&mut self) -> Option<Borrower> {
        self.found.try_recv().ok().map(Borrower::from_parts)
    }
}

fn attempt(
    address: &str,
    options: &BorrowOptions,
    found: &SyncSender<BorrowerParts>,
    wanted: &Weak<()>,
    slowly: bool,
) {
    let (began, mut pause) = (Instant::now(), if slowly { RETRY } else { FIRST });
    while wanted.strong_count() > 0 {
        std::thread::sleep(pause);
        let most = if slowly || began.elapsed() > SOON { RETRY } else { SHORT };
        pause = (2 * pause).min(most);
        if let Ok(borrower) = Borrower::connect(address, options) {
            let _ = found.send(borrower.into_parts());
            return;
        }
    }
}
