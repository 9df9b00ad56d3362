//! Tells the kernel to drop what it has cached. That waits for pages that are being read, so it is not for the thread that reads them.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use netvm_core::files::Number;
use netvm_sys::fuse::FuseDevice;
use netvm_sys::shared::SharedSlice;

use super::proto::Answer;
use crate::error::{Error, Result};

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stale: BTreeSet<Number>,
    over: bool,
}

/// A thread that does; it ends when this is dropped.
pub(super) struct Notifier(Arc<Shared>);

impl Notifier {
    pub(super) fn start(device: Arc<FuseDevice>) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        let thread = std::thread::Builder::new().name("netvm-notifier".to_owned());
        thread
            .spawn(move || tell(&device, &theirs))
            .map_err(|error| Error::system("start a thread", &error))?;
        Ok(Self(shared))
    }

    pub(super) fn add(&self, file: Number) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).stale.insert(file);
        self.0.changed.notify_one();
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).over = true;
        self.0.changed.notify_one();
    }
}

fn tell(device: &FuseDevice, shared: &Shared) {
    loop {
        let mut state = shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.stale.is_empty() && !state.over {
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.over {
            return;
        }
        let stale = std::mem::take(&mut state.stale);
        drop(state);
        for file in stale {
            // It may not know that file any more.
            let _ = device.write(&Answer::stale(file).finish(0), SharedSlice::EMPTY);
        }
    }
}
