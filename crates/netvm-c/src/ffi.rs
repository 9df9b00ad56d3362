//! Pointers from C. The only file here that follows them.
//!
//! The exported functions take these wrappers in place of bare pointers; they are transparent, and only C can make one. So what C
//! promises in `netvm.h` is used here and nowhere else:
//!
//! * a handle is one that a function of ours returned and that has not been closed, or NULL;
//! * a text ends with a zero byte; a buffer has as many bytes as the number beside it says; a struct begins with its size;
//! * nobody else changes or frees any of them during the call.
//!
//! NULL, bad alignment, a handle of another kind or of a process that forked, and lengths beyond what memory can have are errors.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::File;
use std::mem::size_of;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use netvm::memory::RawRange;
use netvm_sys::fork::Process;
use netvm_sys::shared::SharedSlice;

use crate::code::{Code, Failure, Result};

/// What a handle may stand for.
pub(crate) trait Opaque {
    /// Tells this kind of handle from others, and from most of what is no handle.
    const TAG: u32;
    /// What it is called.
    const NAME: &'static str;
}

/// What C has a pointer to.
pub struct Handle<T> {
    /// [`Opaque::TAG`], and 0 once it is closed.
    tag: AtomicU32,
    /// The process that made it.
    process: Process,
    value: T,
}

#[inline(always)]
fn check<T: Opaque>(pointer: *const Handle<T>) -> Result<()> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(no_handle(T::NAME, pointer.is_null()));
    }
    // SAFETY: neither NULL nor misaligned (checked above), and then C promises a live handle; all kinds begin with the tag.
    let (tag, process) = unsafe { ((*pointer).tag.load(Ordering::Relaxed), (*pointer).process) };
    if tag != T::TAG {
        return Err(other_handle(T::NAME));
    }
    if !process.is_this() {
        return Err(inherited(T::NAME));
    }
    Ok(())
}

#[cold]
fn no_handle(name: &str, is_null: bool) -> Failure {
    Failure::argument(if is_null {
        format!("the {name} is NULL")
    } else {
        format!("the pointer given is no {name}")
    })
}

#[cold]
fn other_handle(name: &str) -> Failure {
    Failure::argument(format!("the pointer given is no {name}, or it has been closed"))
}

#[cold]
fn inherited(name: &str) -> Failure {
    let message = format!("this {name} belongs to the process that forked; make one of your own");
    Failure::new(Code::Forked, message)
}

/// A handle that the function uses.
#[repr(transparent)]
pub struct Ref<T>(*const Handle<T>);

impl<T> Clone for Ref<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Ref<T> {}

impl<T: Opaque> Ref<T> {
    pub(crate) const NULL: Self = Self(std::ptr::null());

    /// None for NULL.
    pub(crate) fn optional(&self) -> Result<Option<&T>> {
        if self.0.is_null() { Ok(None) } else { self.get().map(Some) }
    }

    #[inline(always)]
    pub(crate) fn get(&self) -> Result<&T> {
        check(self.0)?;
        // SAFETY: `check` has found a live handle of this kind, and C does not close it during the call.
        Ok(unsafe { &(*self.0).value })
    }
}

/// A handle that the function ends; NULL stands for none.
#[repr(transparent)]
pub struct Own<T>(*mut Handle<T>);

impl<T: Opaque> Own<T> {
    pub(crate) fn take(self) -> Result<Option<T>> {
        if self.0.is_null() {
            return Ok(None);
        }
        check(self.0)?;
        // SAFETY: `check` has found a live handle of this kind, which `OutHandle` made with Box, and C gives it up.
        let handle = unsafe { Box::from_raw(self.0) };
        handle.tag.store(0, Ordering::Relaxed);
        Ok(Some(handle.value))
    }
}

/// Where a new handle goes.
#[repr(transparent)]
pub struct OutHandle<T>(*mut *mut Handle<T>);

impl<T: Opaque> OutHandle<T> {
    /// Makes the handle with what `make` returns; NULL when that fails.
    pub(crate) fn fill(&self, make: impl FnOnce() -> Result<T>) -> Result<()> {
        let place = self.clear()?;
        let process = Process::this().map_err(|error| {
            Failure::new(
                Code::System,
                format!("cannot map a page that a fork wipes (MADV_WIPEONFORK): {error}"),
            )
        })?;
        let handle = Handle { tag: AtomicU32::new(T::TAG), process, value: make()? };
        // SAFETY: as above.
        unsafe { place.write(Box::into_raw(Box::new(handle))) };
        Ok(())
    }

    /// NULL, as after each failure.
    fn clear(&self) -> Result<*mut *mut Handle<T>> {
        let place = place(self.0)?;
        // SAFETY: not NULL and aligned (`place`), so C promises room for a pointer.
        unsafe { place.write(std::ptr::null_mut()) };
        Ok(place)
    }

    /// The place, if C has given one: cleared already, for what may fail before [`OutHandle::fill`].
    pub(crate) fn wanted(&self) -> Result<Option<&Self>> {
        if self.0.is_null() { Ok(None) } else { self.clear().map(|_| Some(self)) }
    }
}

#[inline(always)]
fn place<T>(pointer: *mut T) -> Result<*mut T> {
    if pointer.is_null() || !pointer.is_aligned() { Err(no_place(pointer.is_null())) } else { Ok(pointer) }
}

#[cold]
fn no_place(is_null: bool) -> Failure {
    let what = if is_null { "NULL" } else { "misaligned" };
    Failure::argument(format!("the place for the result is {what}"))
}

/// Where a result goes.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// To be called first: nothing is done for a result that has no place.
    pub(crate) fn check(&self) -> Result<()> {
        place(self.0).map(drop)
    }

    #[inline]
    pub(crate) fn set(&self, value: T) -> Result<()> {
        let place = place(self.0)?;
        // SAFETY: not NULL and aligned (`place`), so C promises room for a T.
        unsafe { place.write(value) };
        Ok(())
    }

    /// For results that C may decline.
    #[inline]
    pub(crate) fn set_if_wanted(&self, value: T) -> Result<()> {
        if self.0.is_null() { Ok(()) } else { self.set(value) }
    }
}

/// Values without pointers to follow, for which every pattern of bits is a value.
///
/// # Safety
/// `repr(C)`, and made of integers and raw pointers only, without padding that matters.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: integers and transparent wrappers of pointers only.
unsafe impl Plain for crate::node::NodeOptions {}
// SAFETY: integers only.
unsafe impl Plain for crate::node::ConnectOptions {}
// SAFETY: integers only.
unsafe impl Plain for crate::board::Signal {}
// SAFETY: integers and a transparent wrapper of a pointer.
unsafe impl Plain for crate::region::Piece {}
// SAFETY: integers and transparent wrappers of pointers.
unsafe impl Plain for crate::posted::PostOptions {}
// SAFETY: an integer and a transparent wrapper of a pointer.
unsafe impl Plain for crate::channel::Buffer {}
// SAFETY: integers and transparent wrappers of pointers.
unsafe impl Plain for crate::pager::PagerOptions {}
// SAFETY: a transparent wrapper of a pointer.
unsafe impl Plain for Text {}
// SAFETY: a transparent wrapper of a pointer.
unsafe impl Plain for Address {}
// SAFETY: bytes.
unsafe impl<const BYTES: usize> Plain for [u8; BYTES] {}

/// A value to read.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Plain> In<T> {
    pub(crate) const NULL: Self = Self(std::ptr::null());

    /// None for NULL.
    pub(crate) fn optional(&self) -> Result<Option<T>> {
        if self.0.is_null() {
            return Ok(None);
        }
        if !self.0.is_aligned() {
            return Err(Failure::argument("a pointer to a value is misaligned"));
        }
        // SAFETY: not NULL and aligned (checked), so C promises a T there, and every pattern of bits is one (`Plain`).
        Ok(Some(unsafe { *self.0 }))
    }

    pub(crate) fn get(&self) -> Result<T> {
        self.optional()?.ok_or_else(|| Failure::argument("a pointer to a value is NULL"))
    }

    /// `count` of them.
    pub(crate) fn array(&self, count: usize) -> Result<&[T]> {
        if count == 0 {
            return Ok(&[]);
        }
        if self.0.is_null() || !self.0.is_aligned() {
            return Err(Failure::argument("an array is NULL or misaligned"));
        }
        if count > isize::MAX as usize / size_of::<T>() {
            return Err(Failure::argument("an array has more elements than memory can have"));
        }
        // SAFETY: not NULL, aligned, of a possible length (checked); C promises that many, and not to change them meanwhile.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) })
    }
}

/// Options: a struct that begins with its size, so that it may grow. NULL stands for the defaults.
#[repr(transparent)]
pub struct Options<T>(*const T);

impl<T: Plain + Default> Options<T> {
    pub(crate) fn get(&self) -> Result<T> {
        let mut options = T::default();
        if self.0.is_null() {
            return Ok(options);
        }
        if !self.0.is_aligned() {
            return Err(Failure::argument("the options are misaligned"));
        }
        // SAFETY: not NULL and aligned (checked); C promises a struct that begins with its size.
        let size = unsafe { *self.0.cast::<usize>() };
        if !(size_of::<usize>()..=4096).contains(&size) {
            let message = format!("the options have size {size}; begin with the INIT macro of netvm.h");
            return Err(Failure::argument(message));
        }
        // SAFETY: C promises `size` readable bytes.
        let given = unsafe { std::slice::from_raw_parts(self.0.cast::<u8>(), size) };
        let known = size.min(size_of::<T>());
        if given[known..].iter().any(|byte| *byte != 0) {
            let message = "the options ask for something that this version of the library does not know";
            return Err(Failure::new(Code::Unsupported, message));
        }
        // SAFETY: `known` bytes are inside both (min above), and every pattern of bits is a T (`Plain`).
        unsafe { std::ptr::copy_nonoverlapping(given.as_ptr(), (&raw mut options).cast(), known) };
        Ok(options)
    }
}

/// A text that ends with a zero byte.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    pub(crate) const NULL: Self = Self(std::ptr::null());

    pub(crate) fn optional(&self, what: &str) -> Result<Option<&str>> {
        if self.0.is_null() {
            return Ok(None);
        }
        // SAFETY: not NULL (checked), so C promises a zero byte at the end, and not to change the text meanwhile.
        let text = unsafe { CStr::from_ptr(self.0) };
        match text.to_str() {
            Ok(text) => Ok(Some(text)),
            Err(_) => Err(Failure::argument(format!("the {what} is not UTF-8"))),
        }
    }

    pub(crate) fn get(&self, what: &str) -> Result<&str> {
        self.optional(what)?.ok_or_else(|| Failure::argument(format!("the {what} is NULL")))
    }
}

/// What fits of a text in a struct, whole characters, with zeroes behind it.
pub(crate) fn cut<const BYTES: usize>(text: &str) -> [c_char; BYTES] {
    let end = (0..BYTES.min(text.len() + 1)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    let mut all = [0; BYTES];
    all.iter_mut().zip(text[..end].bytes()).for_each(|(place, byte)| *place = byte as c_char);
    all
}

/// Where a text goes.
#[repr(transparent)]
pub struct OutText(*mut c_char);

impl OutText {
    /// To be called first.
    pub(crate) fn check(&self, room: usize) -> Result<()> {
        if self.0.is_null() && room > 0 {
            return Err(Failure::argument("the place for a text is NULL"));
        }
        Ok(())
    }

    /// With its zero byte into `room` bytes.
    pub(crate) fn set(&self, text: &str, room: usize) -> Result<()> {
        self.check(room)?;
        if text.len() >= room {
            return Err(Failure::argument(format!(
                "the text {text:?} needs {} bytes, not {room}",
                text.len() + 1
            )));
        }
        // SAFETY: not NULL (checked: `room` is not 0), and C promises `room` bytes, of which the text and its end take no more.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), self.0.cast(), text.len());
            self.0.add(text.len()).write(0);
        }
        Ok(())
    }
}

#[inline(always)]
fn buffer(pointer: *mut c_void, bytes: usize) -> Result<SharedSlice> {
    if bytes == 0 {
        return Ok(SharedSlice::EMPTY);
    }
    if pointer.is_null() || bytes > isize::MAX as usize || (pointer as usize).checked_add(bytes).is_none() {
        return Err(no_buffer(pointer.is_null(), bytes));
    }
    // SAFETY: C promises so many bytes for as long as the call takes, or the posted operation (`lasting`), and the slice is used no
    // longer: an operation has let go of its buffer when its end is told, well or not.
    Ok(unsafe { SharedSlice::from_raw(pointer.cast(), bytes) })
}

#[cold]
fn no_buffer(is_null: bool, bytes: usize) -> Failure {
    Failure::argument(if is_null {
        "the buffer is NULL".to_owned()
    } else {
        format!("a buffer cannot have {bytes} bytes")
    })
}

/// A buffer to read.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Source(*const c_void);

impl Source {
    pub(crate) const NULL: Self = Self(std::ptr::null());

    /// It is never written to.
    #[inline]
    pub(crate) fn shared(&self, bytes: usize) -> Result<SharedSlice> {
        buffer(self.0.cast_mut(), bytes)
    }

    /// For an operation that is posted: C promises the buffer until that has ended.
    pub(crate) fn lasting(&self, bytes: usize) -> Result<SharedSlice> {
        buffer(self.0.cast_mut(), bytes)
    }

    #[inline]
    pub(crate) fn bytes(&self, bytes: usize) -> Result<&[u8]> {
        let buffer = buffer(self.0.cast_mut(), bytes)?;
        // SAFETY: of a possible length and not NULL (`buffer`; an empty one dangles); C promises not to change it meanwhile.
        Ok(unsafe { std::slice::from_raw_parts(buffer.as_ptr(), buffer.len()) })
    }
}

/// A buffer to fill.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Target(*mut c_void);

impl Target {
    #[inline]
    pub(crate) fn shared(&self, bytes: usize) -> Result<SharedSlice> {
        buffer(self.0, bytes)
    }

    /// For an operation that is posted: C promises the buffer until that has ended.
    pub(crate) fn lasting(&self, bytes: usize) -> Result<SharedSlice> {
        buffer(self.0, bytes)
    }

    /// The program's own memory, for exports: C promises it until none of them is left.
    pub(crate) fn registered(&self, bytes: usize, writable: bool) -> Result<RawRange> {
        let range = buffer(self.0, bytes)?;
        // SAFETY: of a possible length (`buffer`); C promises the memory until the last export of it has ended, and has no Rust
        // references into it.
        Ok(unsafe { RawRange::new(range.as_ptr(), range.len(), writable) })
    }

    /// The same buffer, to be read.
    pub(crate) fn source(self) -> Source {
        Source(self.0)
    }
}

/// An array to fill.
#[repr(transparent)]
pub struct OutArray<T>(*mut T);

impl<T: Copy> OutArray<T> {
    /// To be called first.
    pub(crate) fn check(&self, room: usize) -> Result<()> {
        if room == 0 {
            return Ok(());
        }
        place(self.0).map(drop)
    }

    /// Element `index` of `room`.
    pub(crate) fn set(&self, index: usize, room: usize, value: T) -> Result<()> {
        let start = place(self.0)?;
        if index >= room {
            return Err(Failure::new(Code::Internal, "an array is shorter than what it should hold"));
        }
        // SAFETY: not NULL and aligned (`place`), and `index` is below `room`, for which C promises room.
        unsafe { start.add(index).write(value) };
        Ok(())
    }
}

/// An address to compare, not to follow.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Address(*const c_void);

impl Address {
    pub(crate) fn pointer(&self) -> *const u8 {
        self.0.cast()
    }
}

/// A descriptor of the program's.
#[repr(transparent)]
pub struct Descriptor(c_int);

impl Descriptor {
    /// A file with a descriptor of its own.
    pub(crate) fn file(&self) -> Result<File> {
        if self.0 < 0 {
            return Err(Failure::argument(format!("{} is no descriptor", self.0)));
        }
        // SAFETY: not -1 (checked), and C promises not to close it during the call; one that is not open is refused by the kernel.
        let borrowed = unsafe { BorrowedFd::borrow_raw(self.0) };
        let owned = borrowed.try_clone_to_owned();
        owned.map(File::from).map_err(|error| netvm::Error::system("duplicate a descriptor", &error).into())
    }
}

/// Whatever C wants to find again in its callbacks. We do not follow it.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct User(*mut c_void);

// SAFETY: it is only handed back. C promises that its callback may be called on another thread.
unsafe impl Send for User {}

/// What C calls `netvm_handler`.
pub type CallbackFunction = extern "C" fn(user: *mut c_void, number: u32, value: u32);

/// A callback and its user pointer.
#[derive(Clone, Copy)]
pub(crate) struct Callback {
    function: CallbackFunction,
    user: User,
}

impl Callback {
    pub(crate) fn new(function: Option<CallbackFunction>, user: User) -> Result<Self> {
        let function = function.ok_or_else(|| Failure::argument("the handler is NULL"))?;
        Ok(Self { function, user })
    }

    pub(crate) fn call(&self, number: u32, value: u32) {
        (self.function)(self.user.0, number, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct One(u64);
    impl Opaque for One {
        const TAG: u32 = 0x1111;
        const NAME: &'static str = "one";
    }
    #[derive(Debug)]
    struct Two;
    impl Opaque for Two {
        const TAG: u32 = 0x2222;
        const NAME: &'static str = "two";
    }
    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    #[repr(C)]
    struct Growing {
        size: usize,
        a: u64,
        b: u64,
    }
    // SAFETY: integers only.
    unsafe impl Plain for Growing {}

    #[test]
    fn handles_know_their_kind() {
        let mut one: *mut Handle<One> = std::ptr::null_mut();
        OutHandle(&raw mut one).fill(|| Ok(One(5))).unwrap();
        assert_eq!(Ref(one).get().unwrap().0, 5);
        let code = |result: Result<()>| result.map_err(|failure| failure.code);
        assert_eq!(code(Ref::<Two>(one.cast()).get().map(drop)), Err(Code::Argument));
        assert_eq!(code(Ref::<One>(std::ptr::null()).get().map(drop)), Err(Code::Argument));
        assert_eq!(
            code(Ref::<One>(one.cast::<u8>().wrapping_add(1).cast()).get().map(drop)),
            Err(Code::Argument)
        );
        let failing = OutHandle(&raw mut one);
        let kept = one;
        assert_eq!(code(failing.fill(|| Err(Failure::argument("no")))), Err(Code::Argument));
        assert!(one.is_null());
        assert_eq!(Own(kept).take().unwrap().unwrap().0, 5);
        assert!(Own::<One>(std::ptr::null_mut()).take().unwrap().is_none());
        assert_eq!(code(OutHandle::<One>(std::ptr::null_mut()).fill(|| Ok(One(1)))), Err(Code::Argument));
    }

    #[test]
    fn options_grow() {
        let full = Growing { size: size_of::<Growing>(), a: 1, b: 2 };
        assert_eq!(Options(&raw const full).get().unwrap(), full);
        let older = Growing { size: 16, ..full };
        assert_eq!(Options(&raw const older).get().unwrap(), Growing { size: 16, a: 1, b: 0 });
        assert_eq!(Options::<Growing>(std::ptr::null()).get().unwrap(), Growing::default());
        let mut newer = [size_of::<Growing>() + 8, 1, 2, 0];
        let get = |newer: &[usize; 4]| {
            Options(newer.as_ptr().cast::<Growing>()).get().map_err(|failure| failure.code)
        };
        assert!(get(&newer).is_ok());
        newer[3] = 1;
        assert_eq!(get(&newer), Err(Code::Unsupported));
        newer[0] = 4;
        assert_eq!(get(&newer), Err(Code::Argument));
    }

    #[test]
    fn buffers_have_possible_lengths() {
        let mut byte = 1u8;
        let target = Target((&raw mut byte).cast());
        assert_eq!(target.shared(1).unwrap().len(), 1);
        assert!(target.shared(usize::MAX).is_err() && target.shared(isize::MAX as usize + 1).is_err());
        assert!(Target(std::ptr::null_mut()).shared(1).is_err());
        assert!(Source(std::ptr::null()).bytes(0).unwrap().is_empty());
        let mut text = [1 as c_char; 4];
        let out = OutText(text.as_mut_ptr());
        assert!(out.set("abcd", 4).is_err());
        out.set("abc", 4).unwrap();
        assert_eq!(Text(text.as_ptr()).get("text").unwrap(), "abc");
        assert!(Text::NULL.get("text").is_err() && Text(c"\xFF".as_ptr()).get("text").is_err());
        assert!(In::<Growing>(std::ptr::null()).array(1).is_err());
        assert!(In(&raw const TWO).array(usize::MAX).is_err());
    }

    static TWO: Growing = Growing { size: 0, a: 0, b: 0 };
}
