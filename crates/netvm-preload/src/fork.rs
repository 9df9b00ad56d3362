//! fork(2): every lock of this library is held by the thread that forks, and the pager makes a pager for the child.

use crate::heap::HEAP;
use crate::last;
use crate::malloc;
use crate::privileges;
use crate::run::{self, START};
use crate::small;
use crate::space::SPACE;
use crate::sys;
use crate::tls::Internal;
use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};

type Handler = Option<unsafe extern "C" fn()>;
type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> i32;

/// Registers the handlers, once. Done before anybody else can register any, so that ours run last before the fork and first after it, and
/// others may allocate.
pub(crate) fn set_up() -> Result<(), String> {
    // Constructors run one after the other, and ours before there are other threads.
    static DONE: AtomicBool = AtomicBool::new(false);
    if DONE.load(Ordering::Relaxed) {
        return Ok(());
    }
    let registered = the_real_one().map(|register| {
        // SAFETY: the handlers live as long as the process (this library is never unloaded).
        unsafe { register(Some(prepare), Some(parent), Some(child), std::ptr::null_mut()) }
    });
    DONE.store(registered == Some(0), Ordering::Relaxed);
    match registered {
        Some(0) => Ok(()),
        Some(_) => Err("cannot register fork handlers: out of memory".into()),
        None => Err("this C library cannot register fork handlers".into()),
    }
}

fn the_real_one() -> Option<Register> {
    // SAFETY: the name is a C string; dlsym returns null or the next definition of the symbol.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"__register_atfork".as_ptr()) };
    // SAFETY: the C library's function of this name has this type.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Register>(found) })
}

/// What pthread_atfork(3) calls. Constructors of the program's libraries may do so before ours has run.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __register_atfork(
    prepare: Handler,
    parent: Handler,
    child: Handler,
    library: *mut c_void,
) -> i32 {
    let _internal = Internal::enter();
    match (set_up(), the_real_one()) {
        // SAFETY: the caller's contract.
        (Ok(()), Some(register)) => unsafe { register(prepare, parent, child, library) },
        _ => libc::ENOMEM,
    }
}

/// The signal mask of the thread that forks, from prepare to the end. Only who holds START touches it.
struct Mask(UnsafeCell<MaybeUninit<libc::sigset_t>>);

// SAFETY: reached only by the one thread that holds START.
unsafe impl Sync for Mask {}

static MASK: Mask = Mask(UnsafeCell::new(MaybeUninit::uninit()));

unsafe extern "C" {
    /// Of the C library: the lock on its list of FILEs, which the same thread may take several times.
    fn _IO_list_lock();
    fn _IO_list_unlock();
    /// In the child nobody has it.
    fn _IO_list_resetlock();
    /// Its list of FILEs.
    static _IO_list_all: *const File;
}

/// A FILE of the C library, as far as a fork uses it; what comes before is older than 64-bit processors.
#[repr(C)]
struct File {
    flags: i32,
    buffers: [usize; 12],
    next: *const File,
    number: i32,
    flags2: i32,
    offset: i64,
    column: [u8; 8],
    lock: *const c_void,
}

/// Where the FILEs of a program with its own allocator are, which may be far: the child resets their locks before it has a pager.
///
/// # Safety
/// The caller has the lock on the list.
unsafe fn far_files() -> Vec<usize> {
    let mut places = Vec::new();
    if malloc::is_own() {
        // SAFETY: the caller's contract: nobody changes the list meanwhile.
        let mut next = unsafe { _IO_list_all };
        while !next.is_null() {
            let file = next;
            // Other threads may use it: nothing refers to all of it.
            // SAFETY: it is there as long as it is in the list, and faults are served.
            let (lock, behind) = unsafe {
                ((&raw const (*file).lock).read_volatile(), (&raw const (*file).next).read_volatile())
            };
            // The last word that is used is `lock`, or what it points to.
            let words = [file.addr(), file.addr() + size_of::<File>() - 1, lock.addr(), lock.addr() + 15];
            places.extend(words.into_iter().filter(|&word| run::is_far(word)));
            next = behind;
        }
        places.dedup_by_key(|place| *place / sys::PAGE_BYTES);
    }
    places
}

unsafe extern "C" fn prepare() {
    let _internal = Internal::enter();
    privileges::before_fork();
    // The stack of a handler may be far memory, and nobody serves faults until the fork is over.
    let mask = block_signals();
    // The order in which they are taken elsewhere.
    START.hold();
    // SAFETY: START is held.
    unsafe { (*MASK.0.get()).write(mask) };
    // The C library takes it between our handler and the fork. Who has it then may wait for a FILE, and who has that for a page: they must get
    // there while faults are served. After START, under which names of lenders are looked up in files.
    let mut files = Vec::new();
    if run::started().is_some() {
        // SAFETY: given back by `parent`, reset by `child`.
        files = unsafe {
            _IO_list_lock();
            far_files()
        };
    }
    small::hold();
    HEAP.hold();
    SPACE.hold();
    if let Some(far) = run::started() {
        let _root = privileges::Regained::get();
        far.fork_prepare(std::ptr::from_ref(&mask) as usize, files);
    }
}

/// Returns the signal mask, which is to be restored at the very end.
fn let_go() -> libc::sigset_t {
    // SAFETY: START is held, and `prepare` wrote the mask when it took it.
    let mask = unsafe { (*MASK.0.get()).assume_init() };
    SPACE.let_go();
    HEAP.let_go();
    small::let_go();
    START.let_go();
    mask
}

unsafe extern "C" fn parent() {
    let _internal = Internal::enter();
    let errno = sys::errno();
    if let Some(far) = run::started() {
        far.fork_parent();
        // SAFETY: `prepare` took it, in this thread.
        unsafe { _IO_list_unlock() };
    }
    restore_signals(&let_go());
    sys::set_errno(errno);
}

unsafe extern "C" fn child() {
    let _internal = Internal::enter();
    privileges::after_fork();
    last::after_fork();
    let far = run::started();
    if far.is_some() {
        // SAFETY: of all threads there is only this one, and it is not in the list.
        unsafe { _IO_list_resetlock() };
    }
    let adopted = far.map_or(Ok(()), |far| match privileges::Regained::get() {
        Some(root) => root.around(|| far.fork_child()),
        None => far.fork_child(),
    });
    let mask = let_go();
    if let Err(why) = adopted {
        run::do_without();
        sys::say(&format!("a child of a fork has no far memory, and can only start another program: {why}"));
    } else if let Some(far) = far
        // What an orphan has of the area, its children have too: nothing.
        && !run::is_orphaned()
        && let Err(errno) = SPACE.with(|space| space.after_fork(far))
    {
        let error = std::io::Error::from_raw_os_error(errno);
        sys::give_up(&format!(
            "a forked child cannot drop memory that it must not have (MADV_DONTFORK, MADV_WIPEONFORK): {error}"
        ));
    }
    restore_signals(&mask);
}

/// Blocks all signals, so that a thread started meanwhile never runs a handler of the program.
pub(crate) fn block_signals() -> libc::sigset_t {
    // SAFETY: both sets are locals; sigfillset initialises the first, pthread_sigmask the second.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut old = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        old
    }
}

pub(crate) fn restore_signals(old: &libc::sigset_t) {
    // SAFETY: `old` was filled in by `block_signals`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old, std::ptr::null_mut()) };
}
