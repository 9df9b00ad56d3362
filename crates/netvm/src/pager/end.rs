//! The end of a pager: when nobody has it any more, and nothing of its far memory is in use. See docs/design/far.md.

use super::Pager;
use super::calls::{Call, Doorbell};
use super::engine::Engine;
use super::error::PagerError;
use crate::error::Result;
use netvm_sys::cpu::Hold;
use netvm_sys::thread::Gate;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What threads of the program share with the thread of one pager. It does not keep the [`Pager`]: who has none any more ends the thread.
pub(super) struct Desk {
    pub(super) doorbell: Doorbell,
    /// The thread that is held on the pager's CPU.
    pub(super) hold: Arc<Hold>,
    /// The CPU of its thread.
    pub(super) cpu: Option<usize>,
    /// Its thread is there.
    pub(super) is_served: AtomicBool,
    /// Opened by its thread, which has let go of everything.
    pub(super) has_ended: Gate,
}

impl Desk {
    pub(super) fn new(engine: &Engine, hold: &Arc<Hold>, cpu: Option<usize>) -> Self {
        let doorbell = Doorbell::new(engine.bell());
        Self {
            doorbell,
            hold: Arc::clone(hold),
            cpu,
            is_served: AtomicBool::new(false),
            has_ended: Gate::new(),
        }
    }
}

impl Engine {
    /// Who has the addresses of a block that was never given back may use it as long as the process lives.
    pub(super) fn may_end(&self) -> Result<()> {
        if self.ranges.is_empty() && !self.has_local { Ok(()) } else { Err(PagerError::InUse.into()) }
    }

    /// The last call.
    pub(super) fn get_ready_to_end(&mut self, desk: &Desk) {
        self.placement.let_go(&desk.hold);
        // Nobody needs what is on its way, but lenders would say that they were left in the middle of it.
        let _ = self.finish_all();
        self.backing.hang_up();
        self.has_ended = true;
    }

    /// On the pager's thread, when the call has been answered.
    pub(super) fn leave(self: Box<Self>, desk: &Desk) {
        // Whoever has called still reads the doorbell.
        desk.doorbell.resume().wait();
        drop(self);
        desk.has_ended.open(0);
    }
}

/// The last one who had it, and all collections, ranges and exports of its far memory, is gone: so nobody calls it, and who maps nothing touches nothing.
impl Drop for Pager {
    fn drop(&mut self) {
        // What a child of a fork has of it is its parent's. Programs that are run with far memory have it to their end.
        let is_here = self.process.is_some_and(|process| process.is_this());
        let all = || self.shards.iter().filter(|shard| shard.desk.is_served.load(Ordering::Relaxed));
        if !is_here || all().any(|shard| shard.call(Call::MayEnd, self).is_err()) {
            return;
        }
        for shard in all() {
            if shard.call(Call::End, self).is_ok() {
                shard.desk.doorbell.resume().open(0);
                if let Some(shared) = &shard.in_thread {
                    shared.wake();
                }
                shard.desk.has_ended.wait();
            }
        }
    }
}
