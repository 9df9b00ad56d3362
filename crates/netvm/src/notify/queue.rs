//! A segment's queue: notifications that are kept one by one, in the order in which they came.
//!
//! Each importer has so many *places*. It takes one for each notification and gets it back when somebody has removed that one; it asks
//! how many are free when it has none left. So a writer never posts what there is no room for, and one that does loses it.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use netvm_core::limits::QUEUE_TOTAL_MAX;
use netvm_core::notify::Notify;

use crate::node::lock;

/// Method of the call that asks for free places; body: the handle (4 bytes), answer: how many (4).
pub(crate) const METHOD: u32 = 0x5155_4555;

/// What one importer has in the queue.
#[derive(Debug)]
pub(crate) struct Account {
    /// Only grow; `removed` never passes `queued`.
    queued: AtomicU64,
    removed: AtomicU64,
    places: u64,
    /// Of all accounts of the queue.
    reserved: Arc<AtomicU64>,
}

impl Account {
    /// Free places.
    pub(crate) fn room(&self) -> u32 {
        // In this order: `queued` is then at least what it was when the last removal counted here was made.
        let removed = self.removed.load(Ordering::Acquire);
        // At most 4096.
        (self.places - (self.queued.load(Ordering::Acquire) - removed)) as u32
    }
}

impl Drop for Account {
    /// The importer has gone, and the last of its notifications has been removed.
    fn drop(&mut self) {
        self.reserved.fetch_sub(self.places, Ordering::Relaxed);
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Queue {
    places: u64,
    entries: Mutex<VecDeque<(u16, NonZeroU32, Arc<Account>)>>,
    reserved: Arc<AtomicU64>,
    /// That of the exporter's own process.
    own: Arc<Account>,
}

impl Queue {
    pub(crate) fn new(places: u32) -> Self {
        let (places, reserved) = (u64::from(places), Arc::new(AtomicU64::new(u64::from(places))));
        let own = Account { queued: 0.into(), removed: 0.into(), places, reserved: Arc::clone(&reserved) };
        Self { places, entries: Mutex::default(), reserved, own: Arc::new(own) }
    }

    /// Places for one more importer, if there are any.
    pub(crate) fn open_account(&self) -> Option<Arc<Account>> {
        let more =
            |reserved: u64| Some(reserved + self.places).filter(|reserved| *reserved <= QUEUE_TOTAL_MAX);
        self.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        let reserved = Arc::clone(&self.reserved);
        Some(Arc::new(Account { queued: 0.into(), removed: 0.into(), places: self.places, reserved }))
    }

    /// Puts a notification at the end; false when it is none for a queue or there is no place.
    pub(crate) fn push(&self, notify: Notify, account: Option<&Arc<Account>>) -> bool {
        let Notify::Queue { number, value } = notify else { return false };
        let account = account.unwrap_or(&self.own);
        let mut entries = lock(&self.entries);
        if account.room() == 0 {
            return false;
        }
        account.queued.fetch_add(1, Ordering::Release);
        entries.push_back((number, value, Arc::clone(account)));
        true
    }

    /// Takes the first one.
    pub(crate) fn remove(&self) -> Option<(u16, NonZeroU32)> {
        let (number, value, account) = lock(&self.entries).pop_front()?;
        account.removed.fetch_add(1, Ordering::Release);
        Some((number, value))
    }

    pub(crate) fn len(&self) -> usize {
        lock(&self.entries).len()
    }
}
