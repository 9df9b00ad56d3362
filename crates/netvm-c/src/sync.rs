//! Synchronisation between processes. C has no guards: what a handle holds is kept in it until it is released.

use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use netvm::node::{Node, RemoteKey};
use netvm::region::Peer;
use netvm::sync::{
    Combine, Group, Kind, Lock, LockGuard, Monitor, MonitorGuard, Permit, ReadGuard, ReadWriteLock,
    Semaphore, SyncError, Turn, WaitQueue, Waiting, WriteGuard,
};
use netvm_core::limits::GROUP_BYTES_MAX;

use crate::call::{call, call_for, timeout};
use crate::code::{Code, Failure, Result};
use crate::ffi::{In, Opaque, Out, OutHandle, Own, Ref, Target, Text};
use crate::lasting::PeerHandle;
use crate::node::{named, segment_name};

/// Release: return when the home has heard so.
pub(crate) const CONFIRM: u32 = 1;

fn confirm(flags: u32) -> Result<bool> {
    match flags {
        0 => Ok(false),
        CONFIRM => Ok(true),
        other => Err(Failure::argument(format!("{other:#x} has flags that do not exist"))),
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn not_held() -> Failure {
    Failure::new(Code::NotHeld, "it is not held through this handle")
}

/// Keeps what it is our turn with.
fn keep<G>(turn: Turn<G>, keep: impl FnOnce(G)) -> Result<Code> {
    match turn {
        Ok(guard) => {
            keep(guard);
            Ok(Code::Ok)
        }
        Err(SyncError::Abandoned(guard)) => {
            keep(guard);
            Ok(Code::Abandoned)
        }
        Err(error) => Err(error.into()),
    }
}

/// Ends a turn.
fn end<G>(guard: G, flags: u32, release: impl FnOnce(G) -> Result<(), SyncError>) -> Result<()> {
    if confirm(flags)? { Ok(release(guard)?) } else { Ok(()) }
}

fn export(node: &Ref<Node>, name: &Text, kind: Kind, key: &Out<[u8; 16]>) -> Result<()> {
    key.check()?;
    let exported = node.get()?.export_sync(segment_name(name)?, kind)?;
    key.set(exported.to_bytes())
}

fn open<T>(
    peer: &Ref<PeerHandle>,
    name: &Text,
    key: &In<[u8; 16]>,
    open: impl FnOnce(&Peer, &str, &RemoteKey) -> Result<T, SyncError>,
) -> Result<T> {
    Ok(open(&*peer.get()?.now()?, segment_name(name)?, &RemoteKey::from_bytes(key.get()?))?)
}

macro_rules! opaque {
    ($type:ty, $tag:literal, $name:literal, $close:ident) => {
        impl Opaque for $type {
            const TAG: u32 = $tag;
            const NAME: &'static str = $name;
        }

        /// Closes it; what it holds is given back.
        #[unsafe(no_mangle)]
        pub extern "C" fn $close(handle: Own<$type>) -> c_int {
            call(|| handle.take().map(drop))
        }
    };
}

/// `netvm_lock`.
pub struct LockHandle {
    lock: Lock,
    held: Mutex<Option<LockGuard>>,
}

opaque!(LockHandle, 0x6E76_4C10, "lock", netvm_lock_close);

/// Exports a lock.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_export_lock(node: Ref<Node>, name: Text, key: Out<[u8; 16]>) -> c_int {
    call(|| export(&node, &name, Kind::LOCK, &key))
}

/// Opens a lock.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_lock_open(
    peer: Ref<PeerHandle>,
    name: Text,
    key: In<[u8; 16]>,
    lock: OutHandle<LockHandle>,
) -> c_int {
    call(|| {
        lock.fill(|| Ok(LockHandle { lock: open(&peer, &name, &key, Lock::open)?, held: Mutex::default() }))
    })
}

/// Waits for our turn.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_lock_acquire(lock: Ref<LockHandle>, timeout_ns: i64) -> c_int {
    call_for(|| {
        let LockHandle { lock, held } = lock.get()?;
        let turn = if timeout_ns == 0 { lock.try_lock() } else { lock.lock(timeout(timeout_ns)) };
        keep(turn, |guard| *locked(held) = Some(guard))
    })
}

/// Ends our turn.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_lock_release(lock: Ref<LockHandle>, flags: u32) -> c_int {
    call(|| {
        confirm(flags)?;
        let guard = locked(&lock.get()?.held).take();
        end(guard.ok_or_else(not_held)?, flags, LockGuard::release)
    })
}

enum Reading {
    Read(ReadGuard),
    Write(WriteGuard),
}

/// `netvm_rwlock`.
pub struct ReadWriteHandle {
    lock: ReadWriteLock,
    held: Mutex<Vec<Reading>>,
}

opaque!(ReadWriteHandle, 0x6E76_5211, "reader-writer lock", netvm_rwlock_close);

/// Exports a reader-writer lock.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_export_rwlock(node: Ref<Node>, name: Text, key: Out<[u8; 16]>) -> c_int {
    call(|| export(&node, &name, Kind::ReadWriteLock, &key))
}

/// Opens a reader-writer lock.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_rwlock_open(
    peer: Ref<PeerHandle>,
    name: Text,
    key: In<[u8; 16]>,
    lock: OutHandle<ReadWriteHandle>,
) -> c_int {
    call(|| {
        lock.fill(|| {
            Ok(ReadWriteHandle {
                lock: open(&peer, &name, &key, ReadWriteLock::open)?,
                held: Mutex::default(),
            })
        })
    })
}

/// Waits for our turn to read.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_rwlock_read(lock: Ref<ReadWriteHandle>, timeout_ns: i64) -> c_int {
    call_for(|| {
        let ReadWriteHandle { lock, held } = lock.get()?;
        let turn = if timeout_ns == 0 { lock.try_read() } else { lock.read(timeout(timeout_ns)) };
        keep(turn, |guard| locked(held).push(Reading::Read(guard)))
    })
}

/// Waits for our turn to write.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_rwlock_write(lock: Ref<ReadWriteHandle>, timeout_ns: i64) -> c_int {
    call_for(|| {
        let ReadWriteHandle { lock, held } = lock.get()?;
        let turn = if timeout_ns == 0 { lock.try_write() } else { lock.write(timeout(timeout_ns)) };
        keep(turn, |guard| locked(held).push(Reading::Write(guard)))
    })
}

/// Ends a turn.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_rwlock_release(lock: Ref<ReadWriteHandle>, flags: u32) -> c_int {
    call(|| {
        confirm(flags)?;
        // Readers are all alike, and a writer is alone.
        let guard = locked(&lock.get()?.held).pop();
        end(guard.ok_or_else(not_held)?, flags, |guard| match guard {
            Reading::Read(guard) => guard.release(),
            Reading::Write(guard) => guard.release(),
        })
    })
}

/// `netvm_semaphore`.
pub struct SemaphoreHandle {
    semaphore: Semaphore,
    /// With their numbers.
    held: Mutex<Vec<(u32, Permit)>>,
}

opaque!(SemaphoreHandle, 0x6E76_5312, "semaphore", netvm_semaphore_close);

/// Exports a semaphore.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_export_semaphore(
    node: Ref<Node>,
    name: Text,
    permits: u32,
    key: Out<[u8; 16]>,
) -> c_int {
    call(|| export(&node, &name, Kind::Semaphore { permits }, &key))
}

/// Opens a semaphore.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_semaphore_open(
    peer: Ref<PeerHandle>,
    name: Text,
    key: In<[u8; 16]>,
    semaphore: OutHandle<SemaphoreHandle>,
) -> c_int {
    call(|| {
        semaphore.fill(|| {
            let semaphore = open(&peer, &name, &key, Semaphore::open)?;
            Ok(SemaphoreHandle { semaphore, held: Mutex::default() })
        })
    })
}

/// Waits for permits that go back.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_semaphore_acquire(
    semaphore: Ref<SemaphoreHandle>,
    permits: u32,
    timeout_ns: i64,
) -> c_int {
    call_for(|| {
        let SemaphoreHandle { semaphore, held } = semaphore.get()?;
        let turn = match timeout_ns {
            0 => semaphore.try_acquire(permits),
            _ => semaphore.acquire(permits, timeout(timeout_ns)),
        };
        keep(turn, |permit| locked(held).push((permits, permit)))
    })
}

/// Gives back permits that were acquired together.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_semaphore_release(
    semaphore: Ref<SemaphoreHandle>,
    permits: u32,
    flags: u32,
) -> c_int {
    call(|| {
        confirm(flags)?;
        let mut held = locked(&semaphore.get()?.held);
        let place = held.iter().rposition(|(count, _)| *count == permits).ok_or_else(not_held)?;
        let (_, permit) = held.swap_remove(place);
        drop(held);
        end(permit, flags, Permit::release)
    })
}

/// Uses permits up.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_semaphore_consume(
    semaphore: Ref<SemaphoreHandle>,
    permits: u32,
    timeout_ns: i64,
) -> c_int {
    call_for(|| {
        let semaphore = &semaphore.get()?.semaphore;
        let turn = match timeout_ns {
            0 => semaphore.try_consume(permits),
            _ => semaphore.consume(permits, timeout(timeout_ns)),
        };
        keep(turn, |()| ())
    })
}

/// Makes permits.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_semaphore_add(
    semaphore: Ref<SemaphoreHandle>,
    permits: u32,
    free: Out<u64>,
) -> c_int {
    call(|| {
        let now = semaphore.get()?.semaphore.add(permits)?;
        free.set_if_wanted(now)
    })
}

/// `netvm_monitor`.
pub struct MonitorHandle {
    monitor: Monitor,
    held: Mutex<Option<MonitorGuard>>,
}

opaque!(MonitorHandle, 0x6E76_4D13, "monitor", netvm_monitor_close);

impl MonitorHandle {
    fn notify(&self, run: impl FnOnce(&MonitorGuard) -> Result<u64, SyncError>) -> Result<u64> {
        Ok(run(locked(&self.held).as_ref().ok_or_else(not_held)?)?)
    }
}

/// Exports a monitor.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_export_monitor(
    node: Ref<Node>,
    name: Text,
    conditions: u32,
    key: Out<[u8; 16]>,
) -> c_int {
    call(|| export(&node, &name, Kind::Monitor { conditions }, &key))
}

/// Opens a monitor.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_monitor_open(
    peer: Ref<PeerHandle>,
    name: Text,
    key: In<[u8; 16]>,
    monitor: OutHandle<MonitorHandle>,
) -> c_int {
    call(|| {
        monitor.fill(|| {
            Ok(MonitorHandle { monitor: open(&peer, &name, &key, Monitor::open)?, held: Mutex::default() })
        })
    })
}

/// Waits for our turn inside.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_monitor_enter(monitor: Ref<MonitorHandle>, timeout_ns: i64) -> c_int {
    call_for(|| {
        let MonitorHandle { monitor, held } = monitor.get()?;
        let turn = if timeout_ns == 0 { monitor.try_enter() } else { monitor.enter(timeout(timeout_ns)) };
        keep(turn, |guard| *locked(held) = Some(guard))
    })
}

/// Leaves.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_monitor_exit(monitor: Ref<MonitorHandle>, flags: u32) -> c_int {
    call(|| {
        confirm(flags)?;
        let guard = locked(&monitor.get()?.held).take();
        end(guard.ok_or_else(not_held)?, flags, MonitorGuard::release)
    })
}

/// Waits for a condition.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_monitor_wait(monitor: Ref<MonitorHandle>, condition: u32, timeout_ns: i64) -> c_int {
    call_for(|| {
        let held = &monitor.get()?.held;
        let guard = locked(held).take().ok_or_else(not_held)?;
        let mut signalled = true;
        let turn = guard.wait(condition, timeout(timeout_ns)).map(|(guard, in_time)| {
            signalled = in_time;
            guard
        });
        let code = keep(turn, |guard| *locked(held) = Some(guard))?;
        if signalled {
            return Ok(code);
        }
        Err(Failure::new(Code::TimedOut, "the condition was not signalled in time; we are inside again"))
    })
}

/// Signals the first that waits.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_monitor_signal(
    monitor: Ref<MonitorHandle>,
    condition: u32,
    woken: Out<u64>,
) -> c_int {
    call(|| woken.set_if_wanted(monitor.get()?.notify(|guard| guard.signal(condition))?))
}

/// Signals all that wait.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_monitor_broadcast(
    monitor: Ref<MonitorHandle>,
    condition: u32,
    woken: Out<u64>,
) -> c_int {
    call(|| woken.set_if_wanted(monitor.get()?.notify(|guard| guard.broadcast(condition))?))
}

opaque!(WaitQueue, 0x6E76_5114, "wait queue", netvm_wait_queue_close);
opaque!(Waiting, 0x6E76_5715, "place in a wait queue", netvm_waiting_close);

/// Exports a wait queue.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_export_wait_queue(node: Ref<Node>, name: Text, key: Out<[u8; 16]>) -> c_int {
    call(|| export(&node, &name, Kind::WaitQueue, &key))
}

/// Opens a wait queue.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_wait_queue_open(
    peer: Ref<PeerHandle>,
    name: Text,
    key: In<[u8; 16]>,
    queue: OutHandle<WaitQueue>,
) -> c_int {
    call(|| queue.fill(|| open(&peer, &name, &key, WaitQueue::open)))
}

/// Takes the last place.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_wait_queue_enqueue(queue: Ref<WaitQueue>, waiting: OutHandle<Waiting>) -> c_int {
    call(|| waiting.fill(|| Ok(queue.get()?.enqueue()?)))
}

/// Waits to be woken, and gives the place up.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_waiting_wait(waiting: Own<Waiting>, timeout_ns: i64) -> c_int {
    call(|| {
        let waiting =
            waiting.take()?.ok_or_else(|| Failure::argument("the place in a wait queue is NULL"))?;
        Ok(waiting.wait(timeout(timeout_ns))?)
    })
}

/// Wakes.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_wait_queue_wake(queue: Ref<WaitQueue>, most: u32, woken: Out<u64>) -> c_int {
    call(|| woken.set_if_wanted(queue.get()?.wake_many(most)?))
}

/// `netvm_group`. A member does one thing at a time.
pub struct GroupHandle(Mutex<Group>);

opaque!(GroupHandle, 0x6E76_4716, "group", netvm_group_leave);

impl GroupHandle {
    fn get(&self) -> Result<MutexGuard<'_, Group>> {
        match self.0.try_lock() {
            Ok(group) => Ok(group),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                Err(Failure::new(Code::Busy, "another thread is at a meeting with this handle"))
            }
        }
    }
}

/// Exports a group.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_export_group(node: Ref<Node>, name: Text, parties: u32, key: Out<[u8; 16]>) -> c_int {
    call(|| export(&node, &name, Kind::Group { parties }, &key))
}

/// Joins a group.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_group_join(
    peer: Ref<PeerHandle>,
    name: Text,
    key: In<[u8; 16]>,
    group: OutHandle<GroupHandle>,
) -> c_int {
    call(|| group.fill(|| Ok(GroupHandle(Mutex::new(open(&peer, &name, &key, Group::join)?)))))
}

/// Our rank, and how many meet.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_group_query(group: Ref<GroupHandle>, rank: Out<u32>, parties: Out<u32>) -> c_int {
    call(|| {
        let group = group.get()?.get()?;
        rank.set_if_wanted(group.rank())?;
        parties.set_if_wanted(group.parties())
    })
}

/// Waits for all.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_group_barrier(group: Ref<GroupHandle>, timeout_ns: i64) -> c_int {
    call(|| Ok(group.get()?.get()?.barrier(timeout(timeout_ns))?))
}

/// With their numbers in C.
pub(crate) const REDUCTIONS: [(&str, c_int, Combine); 11] = [
    ("NETVM_SUM_U64", 1, Combine::SumU64),
    ("NETVM_MIN_U64", 2, Combine::MinU64),
    ("NETVM_MAX_U64", 3, Combine::MaxU64),
    ("NETVM_MIN_I64", 4, Combine::MinI64),
    ("NETVM_MAX_I64", 5, Combine::MaxI64),
    ("NETVM_SUM_F64", 6, Combine::SumF64),
    ("NETVM_MIN_F64", 7, Combine::MinF64),
    ("NETVM_MAX_F64", 8, Combine::MaxF64),
    ("NETVM_AND", 9, Combine::And),
    ("NETVM_OR", 10, Combine::Or),
    ("NETVM_XOR", 11, Combine::Xor),
];

/// Checked before anything is allocated for it.
fn contribution(bytes: Option<usize>) -> Result<usize> {
    bytes.filter(|bytes| *bytes <= GROUP_BYTES_MAX).ok_or_else(|| {
        Failure::new(
            Code::Bounds,
            format!("a member contributes at most {GROUP_BYTES_MAX} bytes to a meeting"),
        )
    })
}

/// Combines the numbers of all.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_group_reduce(
    group: Ref<GroupHandle>,
    operation: c_int,
    numbers: Target,
    count: usize,
    timeout_ns: i64,
) -> c_int {
    call(|| {
        let combine = named(&REDUCTIONS, operation, "reduction")?;
        let shared = numbers.shared(contribution(count.checked_mul(8))?)?;
        let mut numbers: Vec<u64> =
            shared.to_vec().as_chunks::<8>().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect();
        group.get()?.get()?.reduce(combine, &mut numbers, timeout(timeout_ns))?;
        let result: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        shared
            .write_from(0, &result)
            .ok_or_else(|| Failure::new(Code::Internal, "a result of another length"))
    })
}

/// The bytes of one to all.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_group_broadcast(
    group: Ref<GroupHandle>,
    root: u32,
    buffer: Target,
    bytes: usize,
    timeout_ns: i64,
) -> c_int {
    call(|| {
        let shared = buffer.shared(contribution(Some(bytes))?)?;
        let mut group = group.get()?.get()?;
        let (rank, parties) = (group.rank(), group.parties());
        if root >= parties {
            let message = format!("there is no rank {root} in a group of {parties}");
            return Err(Failure::new(Code::Bounds, message));
        }
        let mine = if rank == root { shared.to_vec() } else { Vec::new() };
        let result = group.broadcast(root, &mine, timeout(timeout_ns))?;
        if result.len() != bytes {
            let message = format!("rank {root} broadcast {} bytes, and {bytes} were expected", result.len());
            return Err(Failure::new(Code::Mismatch, message));
        }
        shared
            .write_from(0, &result)
            .ok_or_else(|| Failure::new(Code::Internal, "a result of another length"))
    })
}
