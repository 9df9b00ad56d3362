//! Around every exported function: panics stay inside, and the thread remembers what went wrong.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::code::{Code, Failure, Result};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs a function's body.
#[inline(always)]
pub(crate) fn call(body: impl FnOnce() -> Result<()>) -> c_int {
    call_for(|| body().map(|()| Code::Ok))
}

/// As [`call`], for functions that succeed in several ways.
#[inline(always)]
pub(crate) fn call_for(body: impl FnOnce() -> Result<Code>) -> c_int {
    // A number comes out in a register; a failure with its message would be written and copied.
    let number = || match body() {
        Ok(code) => code as c_int,
        Err(failure) => remember(failure),
    };
    catch_unwind(AssertUnwindSafe(number)).unwrap_or_else(|panic| remember(internal(&*panic)))
}

fn internal(panic: &(dyn Any + Send)) -> Failure {
    let text = panic.downcast_ref::<&str>().copied();
    let text =
        text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no reason given");
    Failure::new(Code::Internal, format!("netvm has a defect: {text}; please report it"))
}

#[cold]
fn remember(failure: Failure) -> c_int {
    let mut bytes = failure.message.into_bytes();
    bytes.retain(|byte| *byte != 0);
    let message = CString::new(bytes).unwrap_or_default();
    // A thread that is ending has no place for it any more.
    let _ = LAST.try_with(|last| last.replace(message));
    failure.code as c_int
}

/// Negative: no limit.
pub(crate) fn timeout(timeout_ns: i64) -> Option<Duration> {
    u64::try_from(timeout_ns).ok().map(Duration::from_nanos)
}

/// The last failure of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_last_error() -> *const c_char {
    // The text stays where it is until the next failure replaces it.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// What a code means.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_strerror(code: c_int) -> *const c_char {
    Code::from_number(code).map_or(c"unknown code", Code::text).as_ptr()
}

/// The library's version.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_stay_inside() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| ()));
        assert_eq!(call(|| panic!("on {}", "purpose")), Code::Internal as c_int);
        std::panic::set_hook(hook);
        let message = LAST.with(|last| last.borrow().clone()).into_string().unwrap();
        assert_eq!(message, "netvm has a defect: on purpose; please report it");
        assert_eq!(call_for(|| Ok(Code::Abandoned)), 1);
        assert_eq!((timeout(-1), timeout(i64::MIN), timeout(5)), (None, None, Some(Duration::from_nanos(5))));
    }
}
