//! A full fence on behalf of the threads of other processes: membarrier(2).

use std::sync::OnceLock;

const GLOBAL_EXPEDITED: i32 = 1 << 1;
const REGISTER_GLOBAL_EXPEDITED: i32 = 1 << 2;

fn membarrier(command: i32) -> bool {
    // SAFETY: no pointers.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Lets other processes' [`barrier`]s include the threads of this one; false where the kernel does not offer it.
pub fn register() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| membarrier(REGISTER_GLOBAL_EXPEDITED))
}

/// Whether [`barrier`] works here.
pub fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| membarrier(GLOBAL_EXPEDITED))
}

/// Has every running thread of all processes that have registered execute a full fence, and this thread too. False where the kernel
/// does not offer it; then it was a fence of this thread only.
pub fn barrier() -> bool {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    membarrier(GLOBAL_EXPEDITED)
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_is_available_works() {
        assert_eq!(super::is_available(), super::barrier());
        assert!(super::register() == super::register());
    }
}
