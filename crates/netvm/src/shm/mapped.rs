//! Operations on a peer's memory that is mapped here, or copied by the kernel.

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence, fence};
use std::sync::{Arc, Mutex};

use netvm_core::atomic::{Atomic, AtomicOp};
use netvm_core::endpoint::WriteOptions;
use netvm_core::gate::{self, THREADS};
use netvm_core::key::Rights;
use netvm_core::notify::{Board, Notify};
use netvm_sys::fdpass::FdSocket;
use netvm_sys::mapping::Mapping;
use netvm_sys::process::{Process, Target};
use netvm_sys::shared::SharedSlice;
use netvm_sys::thread::futex_wake_shared;

use super::{PeerWords, Request, SHM_METHOD};
use crate::connection::PeerSession;
use crate::node::lock;
use crate::posted::How;

/// Bytes that are copied in one visit to the gate: whoever unexports waits for no more.
const VISIT_BYTES: usize = 1 << 20;

/// A peer's segment.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(super) memory: Memory,
    pub(super) rights: Rights,
    pub(super) gate: Arc<PeerWords>,
    /// Its number in the gate.
    pub(super) share: usize,
    /// The exporter's membarrier makes our fence.
    pub(super) light: bool,
    pub(super) board: Option<Board<PeerWords>>,
    /// Tells the exporter that we live.
    pub(super) _channel: Arc<FdSocket>,
}

/// How its memory is reached.
#[derive(Debug)]
pub(super) enum Memory {
    Mapped(Mapping),
    Apart(Apart),
}

/// Memory of another process that is not mapped here.
#[derive(Debug)]
pub(super) struct Apart {
    pub(super) process: Arc<Process>,
    pub(super) address: u64,
    /// The kernel does not let us any more, or the process has gone.
    pub(super) refused: AtomicBool,
}

impl Apart {
    /// How a copy has ended; `None` when the links have to do it.
    fn ended(&self, copied: io::Result<()>) -> Option<()> {
        match copied {
            Ok(()) => Some(()),
            Err(error) => {
                // A page that is not there may be there the next time.
                if error.raw_os_error() != Some(libc::EFAULT) {
                    self.refused.store(true, Ordering::Relaxed);
                }
                None
            }
        }
    }
}

/// What mapped regions of one session have to know of what goes over its links.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    /// Writes posted over the links, how many of them have been applied, and for how many a flush has told how they ended.
    posted: AtomicU64,
    applied: AtomicU64,
    flushed: AtomicU64,
    /// Writes up to the last one that has bytes.
    filled: AtomicU64,
    /// For how many the peer has been asked whether it has applied them.
    asked: AtomicU64,
    ended: AtomicBool,
}

impl Beside {
    /// With the session locked, so that all only grow.
    pub(crate) fn publish(&self, posted: u64, filled: u64, applied: u64) {
        self.applied.store(applied, Ordering::Release);
        self.filled.store(filled, Ordering::Release);
        self.posted.store(posted, Ordering::Release);
    }

    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Whether all that was posted over the links is known to have been applied, by this thread's knowledge or what it was told.
    #[inline]
    pub(crate) fn is_applied(&self) -> bool {
        self.applied.load(Ordering::Acquire) >= self.posted.load(Ordering::Acquire)
    }

    /// Whether no bytes are under way over the links that would replace what is written now.
    #[inline]
    pub(crate) fn is_filled(&self) -> bool {
        self.applied.load(Ordering::Acquire) >= self.filled.load(Ordering::Acquire)
    }

    /// Whether besides nobody has to be told that some of it was refused.
    #[inline]
    pub(crate) fn is_flushed(&self) -> bool {
        self.flushed.load(Ordering::Acquire) >= self.posted.load(Ordering::Acquire)
    }

    /// What a flush posted now will cover.
    pub(crate) fn posted(&self) -> u64 {
        self.posted.load(Ordering::Acquire)
    }

    pub(crate) fn flushed(&self, posted: u64) {
        self.flushed.fetch_max(posted, Ordering::AcqRel);
    }
}

/// Threads beyond the gate's take turns.
static CROWD: Mutex<()> = Mutex::new(());
/// Numbers of threads that are taken; number 0 is the crowd's.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

const _: () = assert!(THREADS == 64, "a bit for each");

thread_local! {
    static NUMBER: Cell<usize> = const { Cell::new(0) };
    static CLAIM: Claim = const { Claim };
}

/// Gives the thread's number back.
struct Claim;

impl Drop for Claim {
    fn drop(&mut self) {
        let number = NUMBER.replace(0);
        if number != 0 {
            NUMBERS.fetch_and(!(1 << number), Ordering::Release);
        }
    }
}

/// A number for this thread; 0 when there is none.
#[cold]
fn claim_number() -> usize {
    // A thread that is ending gets none: nobody would give it back.
    if CLAIM.try_with(|_| ()).is_err() {
        return 0;
    }
    let lowest = |taken: u64| (taken != u64::MAX).then(|| taken | (taken + 1));
    match NUMBERS.fetch_update(Ordering::AcqRel, Ordering::Relaxed, lowest) {
        Ok(taken) => {
            let number = taken.trailing_ones() as usize;
            NUMBER.set(number);
            number
        }
        Err(_) => 0,
    }
}

impl Mapped {
    /// Whether its memory is copied by the kernel.
    pub(crate) fn is_apart(&self) -> bool {
        matches!(self.memory, Memory::Apart(_))
    }

    /// Does `f` where the exporter waits for it; `None` when the exporter has taken the memory back, or the session has ended: its
    /// links tell which. `full`: a full fence comes first.
    #[inline]
    fn visit<R>(&self, peer: &PeerSession, full: bool, f: impl FnOnce() -> R) -> Option<R> {
        self.visit_aimed(peer, full, |_| (), |()| f())
    }

    /// As `visit`; `aim` comes before, with the thread's number.
    #[inline]
    fn visit_aimed<A, R>(
        &self,
        peer: &PeerSession,
        full: bool,
        aim: impl FnOnce(usize) -> A,
        f: impl FnOnce(A) -> R,
    ) -> Option<R> {
        if peer.beside.ended.load(Ordering::Relaxed) {
            return None;
        }
        let mut number = NUMBER.get();
        if number == 0 {
            number = claim_number();
        }
        let _turn = if number == 0 { Some(lock(&CROWD)) } else { None };
        let aimed = aim(number);
        let between = || {
            if full || !self.light {
                self.fence(number);
            } else {
                // The owner's membarrier makes it a full fence when it matters.
                compiler_fence(Ordering::SeqCst);
            }
        };
        if !gate::enter(&*self.gate, number, self.share, between) {
            return None;
        }
        let result = f(aimed);
        gate::leave(&*self.gate, number);
        Some(result)
    }

    /// Has the kernel copy `bytes` bytes from or to `at` of the segment. `full` as in `visit`.
    fn copy_apart(
        &self,
        peer: &PeerSession,
        full: bool,
        apart: &Apart,
        at: usize,
        bytes: usize,
        copy: impl FnOnce(&Target) -> io::Result<()>,
    ) -> bool {
        if bytes == 0 {
            return true;
        }
        if apart.refused.load(Ordering::Relaxed) {
            return false;
        }
        let aim = |number| gate::aim(&*self.gate, number, apart.address + at as u64, bytes as u64);
        let copied = self.visit_aimed(peer, full, aim, copy);
        copied.and_then(|copied| apart.ended(copied)).is_some()
    }

    /// A full fence of the thread with this number.
    #[inline]
    fn fence(&self, number: usize) {
        if cfg!(target_arch = "x86_64") && number != 0 {
            // A locked instruction, on a cache line that is ours: half of what `mfence` takes.
            gate::touch(&*self.gate, number);
        } else {
            fence(Ordering::SeqCst);
        }
    }

    /// Copies to `offset`, which with the length is within the segment, and notifies; false when the links have to do it (again).
    #[inline]
    pub(crate) fn write(
        &self,
        peer: &PeerSession,
        handle: u32,
        offset: u64,
        bytes: &[u8],
        options: WriteOptions,
    ) -> bool {
        let mut at = offset as usize;
        let done = self.begin_write(options)
            && bytes.chunks(VISIT_BYTES).all(|part| {
                let done = match &self.memory {
                    Memory::Mapped(memory) => {
                        let copied = self.visit(peer, false, || memory.shared().write_from(at, part));
                        copied.flatten().is_some()
                    }
                    Memory::Apart(apart) => {
                        let copy = |target: &Target| apart.process.write_from(target, part);
                        self.copy_apart(peer, false, apart, at, part.len(), copy)
                    }
                };
                at += part.len();
                done
            });
        done && self.notify(peer, handle, options)
    }

    /// As `write`, from memory that others may change.
    pub(crate) fn write_shared(
        &self,
        peer: &PeerSession,
        handle: u32,
        offset: u64,
        locals: &[SharedSlice],
        options: WriteOptions,
    ) -> bool {
        let mut at = offset as usize;
        let done = self.begin_write(options)
            && locals.iter().all(|&local| {
                let done = match &self.memory {
                    Memory::Mapped(memory) => {
                        let copy = || memory.shared().sub(at, local.len())?.copy_from(&local);
                        self.visit(peer, false, copy).flatten().is_some()
                    }
                    Memory::Apart(apart) => {
                        let copy = |target: &Target| apart.process.write(target, local);
                        self.copy_apart(peer, false, apart, at, local.len(), copy)
                    }
                };
                at += local.len();
                done
            });
        done && self.notify(peer, handle, options)
    }

    #[inline]
    fn begin_write(&self, options: WriteOptions) -> bool {
        if options.fence {
            fence(Ordering::Release);
        }
        // A queue is its owner's alone.
        self.rights == Rights::ReadWrite && !matches!(options.notify, Some(Notify::Queue { .. }))
    }

    /// Whoever sees the signal sees this thread's earlier copies: the board's changes are releases.
    #[inline]
    fn notify(&self, peer: &PeerSession, handle: u32, options: WriteOptions) -> bool {
        let Some(notify) = options.notify else { return true };
        if matches!(notify, Notify::Queue { .. }) {
            // Its owner keeps the queue: over the session.
            return false;
        }
        let Some(board) = &self.board else { return false };
        let Some(Some(wake)) = self.visit(peer, false, || board.deliver(notify)) else { return false };
        if wake.sleepers {
            futex_wake_shared(board.bell());
        }
        if wake.descriptor {
            // Only its owner may touch a descriptor that could block. When the session ends, so does the waiter's hope.
            let how = How { waits: true, followed: false };
            let _ = peer.call_unseen(how, SHM_METHOD, &Request::Ring { handle }.encode());
        }
        true
    }

    /// Copies from `offset`, which with the length is within the segment; false when the links have to do it.
    #[inline]
    pub(crate) fn read(&self, peer: &PeerSession, offset: u64, bytes: &mut [u8]) -> bool {
        let mut at = offset as usize;
        bytes.chunks_mut(VISIT_BYTES).all(|part| {
            let bytes = part.len();
            let done = match &self.memory {
                Memory::Mapped(memory) => {
                    self.visit(peer, true, || memory.shared().read_into(at, part)).flatten().is_some()
                }
                Memory::Apart(apart) => {
                    let copy = |target: &Target| apart.process.read_into(target, part);
                    self.copy_apart(peer, true, apart, at, bytes, copy)
                }
            };
            at += bytes;
            done
        })
    }

    /// As `read`, into memory that others may change.
    #[inline]
    pub(crate) fn read_shared(&self, peer: &PeerSession, offset: u64, locals: &[SharedSlice]) -> bool {
        let mut at = offset as usize;
        locals.iter().all(|&local| {
            let done = match &self.memory {
                Memory::Mapped(memory) => {
                    let copy = || local.copy_from(&memory.shared().sub(at, local.len())?);
                    self.visit(peer, true, copy).flatten().is_some()
                }
                Memory::Apart(apart) => {
                    let copy = |target: &Target| apart.process.read(target, local);
                    self.copy_apart(peer, true, apart, at, local.len(), copy)
                }
            };
            at += local.len();
            done
        })
    }

    /// Changes a word within the segment; `None` when the links have to do it, or to say why it cannot be done.
    #[inline]
    pub(crate) fn atomic(&self, peer: &PeerSession, offset: u64, atomic: &Atomic) -> Option<u64> {
        // The kernel copies; it does not compute.
        let Memory::Mapped(memory) = &self.memory else { return None };
        let loads = atomic.op == AtomicOp::Load;
        if !loads && self.rights != Rights::ReadWrite {
            return None;
        }
        // A changing atomic is a full fence itself on some CPUs.
        let full = loads || !cfg!(target_arch = "x86_64");
        let memory = memory.shared();
        self.visit(peer, full, || crate::atomic::execute(&memory, offset as usize, atomic)).flatten()
    }

    /// A write has gone over the links, perhaps behind others that have not been applied there. A peer that answers through our memory would
    /// never tell that they have, and all that come later had to go there too.
    /// `followed`: something else follows at once.
    pub(crate) fn ask_what_is_applied(&self, peer: &PeerSession, followed: bool) {
        let Beside { posted, applied, asked, .. } = &peer.beside;
        let change = |from, to| asked.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
        let (before, now) = (asked.load(Ordering::Relaxed), posted.load(Ordering::Acquire));
        if applied.load(Ordering::Acquire) >= before && now > before && change(before, now).is_ok() {
            // Not where that would wait for room: the next write asks.
            let how = How { waits: false, followed };
            if peer.call_unseen(how, SHM_METHOD, &Request::Applied.encode()).is_err() {
                let _ = change(now, before);
            }
        }
    }

    /// All that was written before is in the peer's memory, also for those who look there without an operation of ours; false when the
    /// session has ended.
    #[inline]
    pub(crate) fn flush(&self, peer: &PeerSession) -> bool {
        self.fence(NUMBER.get());
        !peer.beside.ended.load(Ordering::Relaxed)
    }
}
