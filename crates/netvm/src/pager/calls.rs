//! How the program's threads call the pager's thread.

use super::engine::Engine;
use super::hints::Access;
use crate::error::Result;
use crate::lender::ForkTicket;
use crate::stats::PagerStats;
use netvm_sys::paged::Bell;
use netvm_sys::thread::{Gate, Turn, without_signals};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What the pager's thread can be asked to do. Ranges are bytes at addresses.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    Map {
        address: usize,
        bytes: usize,
        protection: i32,
    },
    Unmap {
        address: usize,
        bytes: usize,
    },
    Discard {
        address: usize,
        bytes: usize,
    },
    Relocate {
        old: usize,
        new: usize,
        bytes: usize,
    },
    Protect {
        address: usize,
        bytes: usize,
        protection: i32,
    },
    WillNeed {
        address: usize,
        bytes: usize,
    },
    MakeLocal {
        address: usize,
        bytes: usize,
        protection: i32,
    },
    /// Take pages out that are not needed for now; they keep their contents.
    PageOut {
        address: usize,
        bytes: usize,
    },
    Advise {
        address: usize,
        bytes: usize,
        access: Access,
    },
    /// Bring pages in, and leave them there.
    Pin {
        address: usize,
        bytes: usize,
    },
    Unpin {
        address: usize,
        bytes: usize,
    },
    /// Another budget.
    Budget {
        bytes: u64,
    },
    /// Of several shards: give up all but so many frames; as many as that later.
    Keep {
        frames: u64,
        frames_max: u64,
    },
    Publish,
    /// Write the record of what was wanted.
    KeepRecord,
    /// Finish all I/O, hand the engine over and stand still. If the stack of who asks is far memory, what it needs of it stays here.
    Park {
        stack_pointer: usize,
    },
}

#[derive(Debug, Default)]
struct Exchange {
    call: Option<Call>,
    result: Option<Result<()>>,
}

/// One call at a time: the caller leaves it in the exchange and faults on the doorbell page; the pager carries it out, leaves the
/// result and resolves the fault.
pub(super) struct Doorbell {
    bell: Bell,
    turn: Turn,
    exchange: Mutex<Exchange>,
    stats: Mutex<PagerStats>,
    parked: Mutex<Option<Box<Engine>>>,
    tickets: Mutex<Vec<Option<ForkTicket>>>,
    resume: Gate,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Doorbell {
    pub(super) fn new(bell: Bell) -> Self {
        Self {
            bell,
            turn: Turn::new(),
            exchange: Mutex::default(),
            stats: Mutex::default(),
            parked: Mutex::default(),
            tickets: Mutex::default(),
            resume: Gate::new(),
        }
    }

    /// From a thread of the program: have `call` carried out. Without signals meanwhile: programs stop their threads by signals, and
    /// call this while the others stand still; a handler may call it too.
    pub(super) fn call(&self, call: Call) -> Result<()> {
        without_signals(|| {
            self.turn.take();
            let result = self.call_in_turn(call);
            self.turn.give_back();
            result
        })
    }

    /// The caller holds the turn.
    pub(super) fn call_in_turn(&self, call: Call) -> Result<()> {
        *lock(&self.exchange) = Exchange { call: Some(call), result: None };
        self.bell.ring();
        lock(&self.exchange).result.take().unwrap_or(Ok(()))
    }

    /// Keeps all other callers out until it is given back.
    pub(super) fn turn(&self) -> &Turn {
        &self.turn
    }

    /// The counters as of now.
    pub(super) fn latest_stats(&self) -> PagerStats {
        without_signals(|| {
            self.turn.take();
            let published = self.call_in_turn(Call::Publish);
            let stats = *lock(&self.stats);
            self.turn.give_back();
            debug_assert!(published.is_ok());
            stats
        })
    }

    /// From the pager's thread: the call that waits.
    pub(super) fn take_call(&self) -> Option<Call> {
        lock(&self.exchange).call.take()
    }

    /// From the pager's thread: the call's outcome.
    pub(super) fn set_result(&self, result: Result<()>) {
        lock(&self.exchange).result = Some(result);
    }

    pub(super) fn stats(&self) -> MutexGuard<'_, PagerStats> {
        lock(&self.stats)
    }

    /// The engine while the pager's thread stands still.
    pub(super) fn parked(&self) -> MutexGuard<'_, Option<Box<Engine>>> {
        lock(&self.parked)
    }

    /// Claims to copies of this process's leases, left by the pager's thread when it parked.
    pub(super) fn tickets(&self) -> MutexGuard<'_, Vec<Option<ForkTicket>>> {
        lock(&self.tickets)
    }

    pub(super) fn resume(&self) -> &Gate {
        &self.resume
    }
}
