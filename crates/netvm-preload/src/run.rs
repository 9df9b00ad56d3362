//! Whether this process is part of a run, and the start of its far memory when it is first needed.

use crate::backend::{Far, LocalArea, PagerFar};
use crate::callers;
use crate::direct;
use crate::fork;
use crate::heap;
use crate::last;
use crate::malloc;
use crate::privileges;
use crate::refuse;
use crate::small;
use crate::space::SPACE;
use crate::spawn;
use crate::sys::{self, Locked};
use crate::tls::{Internal, words};
use netvm::runfile::RunFile;
use netvm_sys::uffd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// What routes memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Params {
    /// Bytes the C library's heap may hold before small allocations become far.
    pub(crate) small_local_bytes: usize,
    /// Allocations and mappings from this size on are far, in bytes.
    pub(crate) far_threshold_bytes: usize,
    /// Addresses to reserve, in bytes.
    pub(crate) area_bytes: usize,
}

/// Part of a run: set once by the constructor.
static ENABLED: AtomicBool = AtomicBool::new(false);
pub(crate) static FAR_THRESHOLD_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
pub(crate) static SMALL_LOCAL_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
static AREA_BYTES: AtomicUsize = AtomicUsize::new(0);
/// This is the child of a fork, and has no far memory.
static ORPHANED: AtomicBool = AtomicBool::new(false);
/// What the program maps stays local: it drops pages of it by system calls that nobody sees.
static MAPS_LOCALLY: AtomicBool = AtomicBool::new(false);
/// The far area; both 0 until far memory has started.
static AREA_START: AtomicUsize = AtomicUsize::new(0);
static AREA_LENGTH: AtomicUsize = AtomicUsize::new(0);
/// Points to the backend once it has started; never freed.
static BACKEND: AtomicPtr<&'static dyn Far> = AtomicPtr::new(std::ptr::null_mut());
/// The run that this process is part of.
static RUN: OnceLock<Arc<RunFile>> = OnceLock::new();
/// Held by whoever starts far memory.
pub(crate) static START: Locked<()> = Locked::new(());

/// Whether this thread's call is to be routed at all.
#[inline]
pub(crate) fn is_routed() -> bool {
    ENABLED.load(Ordering::Relaxed) && words().internal.get() == 0
}

/// In the child of a fork that has no far memory: what it allocates from now on is local, and what is the parent's it cannot touch.
pub(crate) fn do_without() {
    ENABLED.store(false, Ordering::Relaxed);
    ORPHANED.store(true, Ordering::Relaxed);
}

/// Whether far addresses are the parent's, and not mapped here.
#[inline]
pub(crate) fn is_orphaned() -> bool {
    ORPHANED.load(Ordering::Relaxed)
}

/// Whether mappings are local, whatever their size.
#[inline]
pub(crate) fn maps_locally() -> bool {
    MAPS_LOCALLY.load(Ordering::Relaxed)
}

/// Whether an address belongs to the far area.
#[inline]
pub(crate) fn is_far(address: usize) -> bool {
    // Relaxed: whoever has a far address got it from a call made after these were set.
    address.wrapping_sub(AREA_START.load(Ordering::Relaxed)) < AREA_LENGTH.load(Ordering::Relaxed)
}

/// Whether far memory, if there is any, is a pager's.
pub(crate) fn has_pager() -> bool {
    RUN.get().is_some()
}

/// Whether this is a process of the run that has far memory.
pub(crate) fn has_process(process: u32) -> bool {
    let _internal = Internal::enter();
    RUN.get().is_some_and(|run| run.pids().contains(&process))
}

/// Whether any of `address..address + bytes` is in the far area.
pub(crate) fn touches_far(address: usize, bytes: usize) -> bool {
    let (start, length) = (AREA_START.load(Ordering::Relaxed), AREA_LENGTH.load(Ordering::Relaxed));
    length > 0 && address < start + length && address.saturating_add(bytes) > start
}

/// The backend if it runs already.
pub(crate) fn started() -> Option<&'static dyn Far> {
    // Acquire pairs with the Release in `far`: the backend and the area are complete.
    let backend = BACKEND.load(Ordering::Acquire);
    // SAFETY: non-null means it was leaked by `far`, so it lives for ever.
    unsafe { backend.as_ref() }.map(|backend| &**backend)
}

/// The backend, started if need be. Ends the process when it cannot be started: memory would silently be local.
pub(crate) fn far() -> &'static dyn Far {
    if let Some(far) = started() {
        return far;
    }
    start_if_possible().unwrap_or_else(|message| sys::give_up(&message))
}

/// The same, where it may never be needed: if that fails it is told when it is.
pub(crate) fn try_to_start() {
    if started().is_none() {
        let _ = start_if_possible();
    }
}

fn start_if_possible() -> Result<&'static dyn Far, String> {
    let _internal = Internal::enter();
    let errno = sys::errno();
    let far = START.with(|()| started().map_or_else(start, Ok));
    sys::set_errno(errno);
    far
}

fn start() -> Result<&'static dyn Far, String> {
    let signals = fork::block_signals();
    let started = start_backend();
    fork::restore_signals(&signals);
    let far: &'static dyn Far = Box::leak(started?);
    let area = far.area();
    if let Err(errno) = small::set_up(&area) {
        let error = std::io::Error::from_raw_os_error(errno);
        sys::give_up(&format!("cannot reserve addresses for the table of small allocations: {error}"));
    }
    SPACE.with(|space| space.set_up(&area));
    AREA_START.store(area.start, Ordering::Relaxed);
    AREA_LENGTH.store(area.len(), Ordering::Relaxed);
    // Release pairs with the Acquire in `started`.
    BACKEND.store(Box::leak(Box::new(far)), Ordering::Release);
    Ok(far)
}

fn start_backend() -> Result<Box<dyn Far>, String> {
    let area_bytes = AREA_BYTES.load(Ordering::Relaxed);
    if let Some(run) = RUN.get() {
        return PagerFar::start(run).map(|far| Box::new(far) as Box<dyn Far>);
    }
    match LocalArea::new(area_bytes) {
        Ok(area) => Ok(Box::new(area)),
        Err(errno) => {
            let error = std::io::Error::from_raw_os_error(errno);
            Err(format!("cannot reserve {area_bytes} bytes of addresses for far memory: {error}"))
        }
    }
}

fn bytes_from(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

fn find_params() -> Result<Option<Params>, String> {
    if let Some(path) = std::env::var_os("NETVM_RUN") {
        let run = RunFile::open(Path::new(&path)).map_err(|error| error.to_string())?;
        // Frames of the program before exec, which may never have been followed by far memory.
        run.begin();
        let params = run.params();
        let run = RUN.get_or_init(|| run);
        debug_assert_eq!(run.params(), params);
        return Ok(Some(Params {
            small_local_bytes: params.small_local_bytes as usize,
            far_threshold_bytes: params.far_threshold_bytes as usize,
            area_bytes: params.area_bytes as usize,
        }));
    }
    if std::env::var_os("NETVM_PRELOAD_BACKEND").is_some_and(|backend| backend == "local") {
        return Ok(Some(Params {
            small_local_bytes: bytes_from("NETVM_PRELOAD_SMALL_LOCAL_BYTES", 16 << 20),
            far_threshold_bytes: bytes_from("NETVM_PRELOAD_FAR_THRESHOLD_BYTES", 128 << 10),
            area_bytes: bytes_from("NETVM_PRELOAD_AREA_BYTES", 1 << 40),
        }));
    }
    Ok(None)
}

/// Runs once, before the program's own code. Until then everything goes to the C library.
extern "C" fn begin() {
    let _internal = Internal::enter();
    direct::set_up();
    let params = match find_params() {
        Ok(Some(params)) => params,
        Ok(None) => return,
        Err(message) => sys::give_up(&message),
    };
    if let Some(reason) = refuse::reason() {
        sys::give_up(&reason);
    }
    AREA_BYTES.store(params.area_bytes & !(sys::PAGE_BYTES - 1), Ordering::Relaxed);
    SMALL_LOCAL_BYTES.store(params.small_local_bytes, Ordering::Relaxed);
    FAR_THRESHOLD_BYTES.store(params.far_threshold_bytes.max(heap::THRESHOLD_BYTES_MIN), Ordering::Relaxed);
    MAPS_LOCALLY.store(refuse::drops_pages_unseen(), Ordering::Relaxed);
    spawn::set_up();
    // Before there are threads that change the environment.
    uffd::unwanted();
    privileges::set_up();
    let set_up = callers::set_up()
        .and_then(|()| fork::set_up())
        .and_then(|()| small::set_up_threads())
        .and_then(|()| malloc::set_up_threads())
        .and_then(|()| last::set_up());
    if let Err(message) = set_up {
        sys::give_up(&message);
    }
    ENABLED.store(true, Ordering::Relaxed);
    if malloc::is_own() && !callers::is_sanitized() {
        // It may have its locks when it maps memory, and to start threads takes memory.
        far();
    }
}

/// Bytes that this process found no room for, 0 for none.
static NO_ROOM: AtomicUsize = AtomicUsize::new(0);
/// ENOMEM: the area has no room for so many bytes. `netvm run` says what to do.
#[cold]
pub(crate) fn no_room(bytes: usize) -> i32 {
    NO_ROOM.fetch_max(bytes, Ordering::Relaxed);
    if let Some(run) = RUN.get() {
        run.note_no_room(bytes as u64);
    }
    libc::ENOMEM
}

/// A program is told that there is no io_uring, or no asynchronous I/O: should it end for that, `netvm run` says why.
#[cold]
pub(crate) fn refused() {
    if let Some(run) = RUN.get() {
        run.note_refused();
    }
}

/// So many bytes of addresses were reserved. Runtimes ask for less when they are refused, and less again: who gets half of it makes do.
pub(crate) fn had_room(bytes: usize) {
    let wanted = NO_ROOM.load(Ordering::Relaxed);
    if wanted != 0 && bytes >= wanted / 2 {
        NO_ROOM.store(0, Ordering::Relaxed);
        if let Some(run) = RUN.get() {
            run.note_made_do(wanted as u64);
        }
    }
}

/// Runs at exit.
extern "C" fn end() {
    let _internal = Internal::enter();
    if let Some(run) = RUN.get() {
        run.end();
    }
    if let Some(far) = started() {
        far.finish();
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;
