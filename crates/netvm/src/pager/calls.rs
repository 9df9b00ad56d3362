//! How the program's threads call the pager's thread, and what it does then.

use super::end::Desk;
use super::engine::Engine;
use super::error::{PagerError, system};
use super::hints::Access;
use super::lenders::LenderState;
use super::named::Named;
use crate::error::{Error, Result};
use crate::lender::ForkTicket;
use crate::stats::PagerStats;
use netvm_sys::paged::Bell;
use netvm_sys::thread::{Gate, Turn, without_signals};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What the pager's thread can be asked to do. Ranges are bytes at addresses.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a call is made without allocating, and waits for the pager anyway"
)]
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
    WillNeedEach(Named),
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
    /// Leave pages here, from now on or when they have come.
    Pin {
        address: usize,
        bytes: usize,
    },
    /// Bring pages in that are pinned.
    BringIn {
        address: usize,
        bytes: usize,
    },
    Unpin {
        address: usize,
        bytes: usize,
    },
    /// The end of a pin whose pages could not all come, whatever has been unmapped of it meanwhile.
    UndoPin {
        address: usize,
        bytes: usize,
    },
    /// Another budget; as [`Call::Keep`] to be repeated.
    Budget {
        bytes: u64,
    },
    /// Read what lenders on this host have for the parent of this process only over their connections.
    ForgetInherited,
    /// Of several shards: give up all but so many frames; as many as that later. To be repeated while frames are left ([`Doorbell::left`]).
    Keep {
        frames: u64,
        frames_max: u64,
    },
    Publish,
    /// Tell how each lender is.
    Lenders,
    /// Write the record of what was wanted.
    KeepRecord,
    /// Refused while anything is mapped.
    MayEnd,
    /// Let go of everything: nobody uses far memory any more.
    End,
    /// Finish all I/O, hand the engine over and stand still. If the stack of who asks is far memory, what it needs of it stays here; so does
    /// what is `Doorbell::needed`.
    Park {
        stack_pointer: usize,
    },
}

/// How often a call rings, if others look at the doorbell all the time.
const RINGS_MAX: usize = 10_000;

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
    lenders: Mutex<Vec<LenderState>>,
    left: Mutex<usize>,
    parked: Mutex<Option<Box<Engine>>>,
    tickets: Mutex<Vec<Option<ForkTicket>>>,
    needed: Mutex<Vec<usize>>,
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
            lenders: Mutex::default(),
            left: Mutex::default(),
            parked: Mutex::default(),
            tickets: Mutex::default(),
            needed: Mutex::default(),
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
        let mut why = std::io::ErrorKind::TimedOut.into();
        for _ in 0..RINGS_MAX {
            if let Err(error) = self.bell.ring() {
                why = error;
                break;
            }
            // None: the answer was for another process that had looked at the page just before.
            if let Some(result) = lock(&self.exchange).result.take() {
                return result;
            }
        }
        // Nor is it carried out later, when somebody else rings.
        lock(&self.exchange).call = None;
        Err(system("call the pager", why))
    }

    /// Keeps all other callers out until it is given back.
    pub(super) fn turn(&self) -> &Turn {
        &self.turn
    }

    /// What a call has left here.
    pub(super) fn latest<T>(&self, call: Call, read: impl FnOnce(&Self) -> T) -> T {
        without_signals(|| {
            self.turn.take();
            let published = self.call_in_turn(call);
            let latest = read(self);
            self.turn.give_back();
            debug_assert!(published.is_ok());
            latest
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

    pub(super) fn lenders(&self) -> MutexGuard<'_, Vec<LenderState>> {
        lock(&self.lenders)
    }

    /// Frames that are still to be given back.
    pub(super) fn left(&self) -> MutexGuard<'_, usize> {
        lock(&self.left)
    }

    /// The engine while the pager's thread stands still.
    pub(super) fn parked(&self) -> MutexGuard<'_, Option<Box<Engine>>> {
        lock(&self.parked)
    }

    /// Claims to copies of this process's leases, left by the pager's thread when it parked.
    pub(super) fn tickets(&self) -> MutexGuard<'_, Vec<Option<ForkTicket>>> {
        lock(&self.tickets)
    }

    /// Addresses whose pages are used before a fork is over, left by who asks the pager's thread to park.
    pub(super) fn needed(&self) -> MutexGuard<'_, Vec<usize>> {
        lock(&self.needed)
    }

    pub(super) fn resume(&self) -> &Gate {
        &self.resume
    }
}

impl Engine {
    /// The result of a call is the inner one: what was refused has changed nothing.
    ///
    /// # Errors
    /// Pages cannot be had any more.
    pub(super) fn carry_out(&mut self, call: Call, desk: &Desk) -> Result<Result<()>> {
        // The kernel may have no room for a mapping.
        if let Err(error) = self.remap(call) {
            return Ok(Err(error));
        }
        match self.try_to(call, desk) {
            Err(error) if !is_refusal(&error, call) => Err(error),
            result => Ok(result),
        }
    }

    /// What a call changes of the kernel's mappings, before anything else: no page is forgotten that stays. Nobody is served meanwhile.
    fn remap(&self, call: Call) -> Result<()> {
        match call {
            Call::Map { address, bytes, protection } => {
                self.pages(address, bytes)?;
                self.paged.place_range(address, bytes, protection).map_err(|e| system("map far memory", e))
            }
            Call::Unmap { address, bytes } => {
                self.pages(address, bytes)?;
                self.paged.unmap_range(address, bytes).map_err(|e| system("unmap far memory", e))
            }
            Call::Protect { address, bytes, protection } => {
                self.pages(address, bytes)?;
                self.paged.protect_range(address, bytes, protection).map_err(|e| system("mprotect", e))
            }
            _ => Ok(()),
        }
    }

    fn try_to(&mut self, call: Call, desk: &Desk) -> Result<()> {
        match call {
            Call::Map { address, bytes, .. } => {
                // At once: a page that the kernel fills in meanwhile is not ours.
                self.paged.serve_range(address, bytes).map_err(|e| system("serve far memory", e))?;
                // What it has filled in since the range was placed.
                self.paged.drop_pages(address, bytes).map_err(|e| system("map far memory", e))?;
                self.drop_range(address, bytes)?;
                self.ranges.insert(address, bytes);
                self.wake(address, bytes)
            }
            Call::Unmap { address, bytes } => {
                self.drop_range(address, bytes)?;
                self.wake(address, bytes)
            }
            Call::Discard { address, bytes } => {
                let pages = self.pages(address, bytes)?;
                self.forget(pages)?;
                self.paged.drop_pages(address, bytes).map_err(|e| system("discard far memory", e))?;
                self.wake(address, bytes)
            }
            Call::Relocate { old, new, bytes } => {
                self.relocate(self.pages(old, bytes)?, self.pages(new, bytes)?)
            }
            Call::MakeLocal { address, bytes, protection } => self.make_local(address, bytes, protection),
            Call::WillNeed { address, bytes } => self.will_need(self.pages(address, bytes)?),
            Call::WillNeedEach(named) => self.will_need_each(&named),
            Call::PageOut { address, bytes } => self.page_out(self.pages(address, bytes)?),
            Call::Advise { address, bytes, access } => {
                self.advice.change(self.pages(address, bytes)?, |_| access as u32);
                Ok(())
            }
            Call::Pin { address, bytes } => self.pin(self.pages(address, bytes)?),
            Call::BringIn { address, bytes } => self.bring_pinned_in(self.pages(address, bytes)?),
            Call::Unpin { address, bytes } => self.unpin_known(self.pages(address, bytes)?),
            Call::UndoPin { address, bytes } => {
                self.unpin(self.pages(address, bytes)?);
                Ok(())
            }
            Call::Budget { bytes } => {
                self.set_budget(bytes)?;
                self.tell_left(desk);
                Ok(())
            }
            Call::Keep { frames, frames_max } => {
                self.keep(frames, frames_max)?;
                self.tell_left(desk);
                Ok(())
            }
            Call::ForgetInherited => {
                self.backing.forget_inherited();
                Ok(())
            }
            Call::Publish => {
                self.publish(desk);
                Ok(())
            }
            Call::Lenders => {
                self.tell_lenders(desk);
                Ok(())
            }
            Call::KeepRecord => self.learn.keep(),
            Call::MayEnd => self.may_end(),
            Call::End => {
                self.get_ready_to_end(desk);
                Ok(())
            }
            Call::Protect { .. } | Call::Park { .. } => Ok(()),
        }
    }

    /// Leaves at the doorbell how many frames there was no time to give back.
    fn tell_left(&self, desk: &Desk) {
        *desk.doorbell.left() = self.shrinks_on.map_or(0, |(_, left)| left);
    }

    /// What was in a range is gone.
    fn drop_range(&mut self, address: usize, bytes: usize) -> Result<()> {
        let pages = self.pages(address, bytes)?;
        self.forget_marks(pages.clone());
        self.remove_range(address, bytes);
        self.forget(pages)
    }
}

/// Whether an error is the answer to a call. All others leave pages behind that nobody gets any more.
fn is_refusal(error: &Error, call: Call) -> bool {
    match error {
        Error::Pager(
            PagerError::OutsideFarMemory { .. }
            | PagerError::PagePinned { .. }
            | PagerError::PinnedTooMuch { .. }
            | PagerError::NotPinned { .. }
            | PagerError::BudgetRange { .. }
            | PagerError::InUse,
        ) => true,
        Error::Pager(PagerError::LocalExhausted { .. }) => matches!(call, Call::BringIn { .. }),
        Error::Pager(PagerError::CopiesLost { pages: 0, .. } | PagerError::TooFewLenders { .. }) => {
            matches!(call, Call::Budget { .. } | Call::Keep { .. } | Call::Pin { .. } | Call::BringIn { .. })
        }
        Error::Pager(PagerError::NoLocalMemory(_)) => matches!(call, Call::MakeLocal { .. }),
        _ => matches!(call, Call::KeepRecord),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netvm_sys::paged::PagedArea;
    use netvm_sys::uffd::Fault;

    /// A pager's thread that takes the call up when the bell has rung so often, if ever. Returns what the caller gets.
    fn call(take_up_at: Option<usize>) -> (Result<()>, Option<Call>) {
        let area = PagedArea::new(1 << 20, 16, None).unwrap();
        let (doorbell, end) = (Doorbell::new(area.bell()), std::sync::atomic::AtomicBool::new(false));
        let result = std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut faults, mut rung) = ([Fault::default(); 4], 0);
                while !end.load(std::sync::atomic::Ordering::Relaxed) {
                    for _ in 0..area.read_faults(&mut faults).unwrap() {
                        rung += 1;
                        if take_up_at == Some(rung) && doorbell.take_call().is_some() {
                            doorbell.set_result(Err(PagerError::PagePinned { address: 7 }.into()));
                        }
                        area.answer_bell().unwrap();
                    }
                    std::thread::yield_now();
                }
            });
            let result = doorbell.call(Call::Publish);
            end.store(true, std::sync::atomic::Ordering::Relaxed);
            result
        });
        (result, doorbell.take_call())
    }

    #[test]
    fn a_call_whose_bell_was_answered_for_somebody_else_is_carried_out_once_or_never() {
        if PagedArea::userfault().is_err() {
            println!("skipped (userfaultfd may not be used here)");
            return;
        }
        for rung in [1, 2, 50] {
            let (result, left) = call(Some(rung));
            let is_its_own = matches!(result, Err(Error::Pager(PagerError::PagePinned { address: 7 })));
            assert!(is_its_own && left.is_none(), "{rung}: {result:?}, {left:?}");
        }
        let (result, left) = call(None);
        assert!(result.unwrap_err().to_string().contains("call the pager") && left.is_none());
    }
}
