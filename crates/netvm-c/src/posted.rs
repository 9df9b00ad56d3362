//! Operations that are posted now and end later.

use std::ffi::c_int;
use std::time::Duration;

use netvm::atomic::Word;
use netvm::posted::{Atomically, Counted, Counter, Op, Posting};
use netvm::region::Region;
use netvm_sys::shared::SharedSlice;

use crate::board::Signal;
use crate::call::{call, call_for, timeout};
use crate::code::{Code, Failure, Result};
use crate::ffi::{In, Opaque, Options, Out, OutHandle, Own, Ref, Source, Target};
use crate::lasting::{RegionHandle, inside};
use crate::node::named;
use crate::region::{FENCE, PART_BYTES, Piece, QUEUE, pieces, write_options};

/// Flags of posting, besides those of puts.
pub(crate) const DONT_WAIT: u32 = 2;
pub(crate) const MORE: u32 = 8;

impl Opaque for Counter {
    const TAG: u32 = 0x6E76_4320;
    const NAME: &'static str = "counter";
}

/// `netvm_op`.
pub enum Posted {
    Plain(Op),
    Word32(Op<u32>),
    Word64(Op<u64>),
}

impl Opaque for Posted {
    const TAG: u32 = 0x6E76_4F21;
    const NAME: &'static str = "operation";
}

impl Posted {
    /// The word before an atomic, 0 otherwise, when it has ended.
    fn test(&self) -> Option<netvm::Result<u64>> {
        match self {
            Self::Plain(op) => op.test().map(|ended| ended.map(|()| 0)),
            Self::Word32(op) => op.test().map(|ended| ended.map(u64::from)),
            Self::Word64(op) => op.test(),
        }
    }

    fn wait(&self, limit: Option<Duration>) -> Option<netvm::Result<u64>> {
        match (self, limit) {
            (Self::Plain(op), None) => Some(op.wait().map(|()| 0)),
            (Self::Word32(op), None) => Some(op.wait().map(u64::from)),
            (Self::Word64(op), None) => Some(op.wait()),
            (Self::Plain(op), Some(limit)) => op.wait_for(limit).map(|ended| ended.map(|()| 0)),
            (Self::Word32(op), Some(limit)) => op.wait_for(limit).map(|ended| ended.map(u64::from)),
            (Self::Word64(op), Some(limit)) => op.wait_for(limit),
        }
    }
}

/// `netvm_post_options`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct PostOptions {
    size: usize,
    pub(crate) counter: Ref<Counter>,
    pub(crate) signal: In<Signal>,
    pub(crate) flags: u32,
    pub(crate) reserved: u32,
}

impl Default for PostOptions {
    fn default() -> Self {
        Self { size: 0, counter: Ref::NULL, signal: In::NULL, flags: 0, reserved: 0 }
    }
}

/// Posts one operation: counted, or with a handle.
fn post<'a>(
    region: &'a Region,
    options: &'a PostOptions,
    op: Option<&OutHandle<Posted>>,
    counted: impl FnOnce(Counted<'_>) -> netvm::Result<()>,
    single: impl FnOnce(Posting<'a>) -> netvm::Result<Posted>,
) -> Result<()> {
    if options.reserved != 0 {
        return Err(Failure::argument("a reserved member of the options is not 0"));
    }
    let posting = region.post();
    let posting = if options.flags & DONT_WAIT != 0 { posting.without_waiting() } else { posting };
    let posting = if options.flags & MORE != 0 { posting.followed() } else { posting };
    match (options.counter.optional()?, op) {
        (Some(counter), None) => Ok(counted(posting.counted(counter))?),
        (None, Some(op)) => op.fill(|| Ok(single(posting)?)),
        _ => Err(Failure::argument("an operation needs a counter or a place for its handle, and not both")),
    }
}

/// For all but puts.
fn no_put(options: &PostOptions) -> Result<()> {
    if options.flags & !(DONT_WAIT | MORE) != 0 || options.signal.optional()?.is_some() {
        return Err(Failure::argument(
            "only puts have other flags than NETVM_DONT_WAIT and NETVM_MORE, and signals",
        ));
    }
    Ok(())
}

fn posted_buffer(bytes: usize, buffer: Result<SharedSlice>) -> Result<SharedSlice> {
    if bytes > PART_BYTES {
        let message = format!("a posted operation moves at most {PART_BYTES} bytes, not {bytes}");
        return Err(Failure::new(Code::Bounds, message));
    }
    buffer
}

/// Posts a write.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_post_put(
    region: Ref<RegionHandle>,
    offset: u64,
    buffer: Source,
    bytes: usize,
    options: Options<PostOptions>,
    op: OutHandle<Posted>,
) -> c_int {
    call(|| {
        let op = op.wanted()?;
        post_put(region.get()?, offset, buffer, bytes, &options.get()?, op)
    })
}

fn post_put(
    handle: &RegionHandle,
    offset: u64,
    buffer: Source,
    bytes: usize,
    options: &PostOptions,
    op: Option<&OutHandle<Posted>>,
) -> Result<()> {
    let local = posted_buffer(bytes, buffer.lasting(bytes))?;
    let write = write_options(options.flags, DONT_WAIT | MORE, &options.signal)?;
    handle.post_put(offset, bytes, |region| {
        post(
            region,
            options,
            op,
            |posting| posting.write(offset, &[local], write),
            |posting| posting.write(offset, &[local], write).map(Posted::Plain),
        )
    })
}

/// Posts a read.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_post_get(
    region: Ref<RegionHandle>,
    offset: u64,
    buffer: Target,
    bytes: usize,
    options: Options<PostOptions>,
    op: OutHandle<Posted>,
) -> c_int {
    call(|| {
        let op = op.wanted()?;
        let (region, options) = (region.get()?.now()?, options.get()?);
        no_put(&options)?;
        post_get(&region, offset, buffer, bytes, &options, op)
    })
}

fn post_get(
    region: &Region,
    offset: u64,
    buffer: Target,
    bytes: usize,
    options: &PostOptions,
    op: Option<&OutHandle<Posted>>,
) -> Result<()> {
    inside(region, offset, bytes)?;
    let local = posted_buffer(bytes, buffer.lasting(bytes))?;
    post(
        region,
        options,
        op,
        |posting| posting.read(offset, &[local]),
        |posting| posting.read(offset, &[local]).map(Posted::Plain),
    )
}

/// Posts a flush.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_post_flush(
    region: Ref<RegionHandle>,
    options: Options<PostOptions>,
    op: OutHandle<Posted>,
) -> c_int {
    call(|| {
        let op = op.wanted()?;
        let (handle, options) = (region.get()?, options.get()?);
        no_put(&options)?;
        handle.post_flush(|region| {
            post(
                region,
                &options,
                op,
                |posting| posting.flush(),
                |posting| posting.flush().map(Posted::Plain),
            )
        })
    })
}

/// Posts all pieces, each with the options of its own.
fn post_each<'a>(
    region: &Region,
    iov: &'a In<Piece>,
    count: usize,
    options: &PostOptions,
    posted: &Out<usize>,
    mut one: impl FnMut(&'a Piece, &PostOptions) -> Result<()>,
) -> Result<()> {
    if options.counter.optional()?.is_none() {
        return Err(Failure::argument("operations on several pieces need a counter"));
    }
    posted.set_if_wanted(0)?;
    let all = pieces(region, iov, count)?;
    for piece in all {
        posted_buffer(piece.bytes, piece.buffer.lasting(piece.bytes))?;
    }
    for (index, piece) in all.iter().enumerate() {
        let mut options = *options;
        if index > 0 {
            options.flags &= !FENCE;
        }
        if index + 1 < all.len() {
            options.flags = options.flags & !QUEUE | MORE;
            options.signal = In::NULL;
        }
        one(piece, &options)?;
        posted.set_if_wanted(index + 1)?;
    }
    Ok(())
}

/// Posts writes of pieces.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_post_putv(
    region: Ref<RegionHandle>,
    iov: In<Piece>,
    count: usize,
    options: Options<PostOptions>,
    posted: Out<usize>,
) -> c_int {
    call(|| {
        let (handle, options) = (region.get()?, options.get()?);
        write_options(options.flags, DONT_WAIT | MORE, &options.signal)?;
        post_each(&*handle.now()?, &iov, count, &options, &posted, |piece, options| {
            post_put(handle, piece.offset, piece.buffer.source(), piece.bytes, options, None)
        })?;
        if count == 0 && options.signal.optional()?.is_some() {
            post_put(handle, 0, Source::NULL, 0, &options, None)?;
        }
        Ok(())
    })
}

/// Posts reads of pieces.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_post_getv(
    region: Ref<RegionHandle>,
    iov: In<Piece>,
    count: usize,
    options: Options<PostOptions>,
    posted: Out<usize>,
) -> c_int {
    call(|| {
        let (region, options) = (region.get()?.now()?, options.get()?);
        no_put(&options)?;
        post_each(&region, &iov, count, &options, &posted, |piece, options| {
            post_get(&region, piece.offset, piece.buffer, piece.bytes, options, None)
        })
    })
}

/// What an atomic does, without its operands.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Change {
    Load,
    Swap,
    CompareSwap,
    Add,
    And,
    Or,
    Xor,
}

/// With their numbers in C.
pub(crate) const CHANGES: [(&str, c_int, Change); 7] = [
    ("NETVM_ATOMIC_LOAD", 1, Change::Load),
    ("NETVM_ATOMIC_SWAP", 2, Change::Swap),
    ("NETVM_ATOMIC_COMPARE_SWAP", 3, Change::CompareSwap),
    ("NETVM_ATOMIC_ADD", 4, Change::Add),
    ("NETVM_ATOMIC_AND", 5, Change::And),
    ("NETVM_ATOMIC_OR", 6, Change::Or),
    ("NETVM_ATOMIC_XOR", 7, Change::Xor),
];

fn change<W>(operation: c_int, operand: W, expected: W) -> Result<Atomically<W>> {
    Ok(match named(&CHANGES, operation, "atomic operation")? {
        Change::Load => Atomically::Load,
        Change::Swap => Atomically::Swap(operand),
        Change::CompareSwap => Atomically::CompareSwap { expected, new: operand },
        Change::Add => Atomically::Add(operand),
        Change::And => Atomically::And(operand),
        Change::Or => Atomically::Or(operand),
        Change::Xor => Atomically::Xor(operand),
    })
}

fn post_atomic<W: Word>(
    region: Ref<RegionHandle>,
    offset: u64,
    change: impl FnOnce() -> Result<Atomically<W>>,
    options: Options<PostOptions>,
    op: OutHandle<Posted>,
    handle: fn(Op<W>) -> Posted,
) -> c_int {
    call(|| {
        let op = op.wanted()?;
        let (region, options, change) = (region.get()?.now()?, options.get()?, change()?);
        no_put(&options)?;
        post(
            &region,
            &options,
            op,
            |posting| posting.atomic(offset, change),
            |posting| posting.atomic(offset, change).map(handle),
        )
    })
}

/// Posts an atomic on 32 bits.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_post_atomic_u32(
    region: Ref<RegionHandle>,
    offset: u64,
    operation: c_int,
    operand: u32,
    expected: u32,
    options: Options<PostOptions>,
    op: OutHandle<Posted>,
) -> c_int {
    post_atomic(region, offset, || change(operation, operand, expected), options, op, Posted::Word32)
}

/// Posts an atomic on 64 bits.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_post_atomic_u64(
    region: Ref<RegionHandle>,
    offset: u64,
    operation: c_int,
    operand: u64,
    expected: u64,
    options: Options<PostOptions>,
    op: OutHandle<Posted>,
) -> c_int {
    post_atomic(region, offset, || change(operation, operand, expected), options, op, Posted::Word64)
}

/// Whether it has ended, and how.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_op_test(op: Ref<Posted>, old: Out<u64>) -> c_int {
    call_for(|| match op.get()?.test() {
        Some(ended) => old.set_if_wanted(ended?).map(|()| Code::Ok),
        None => Ok(Code::UnderWay),
    })
}

/// Waits for its end.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_op_wait(op: Ref<Posted>, timeout_ns: i64, old: Out<u64>) -> c_int {
    call(|| match op.get()?.wait(timeout(timeout_ns)) {
        Some(ended) => old.set_if_wanted(ended?),
        None => Err(Failure::new(Code::TimedOut, "the operation has not ended in time, and goes on")),
    })
}

/// Waits for its end, and forgets it.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_op_close(op: Own<Posted>) -> c_int {
    call(|| op.take().map(drop))
}

/// A counter of nothing.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_counter_create(counter: OutHandle<Counter>) -> c_int {
    call(|| counter.fill(|| Ok(Counter::new())))
}

/// `netvm_counts`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Counts {
    pub(crate) posted: u64,
    pub(crate) done: u64,
    pub(crate) failed: u64,
}

/// Its counts; sends and receives first.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_counter_test(counter: Ref<Counter>, counts: Out<Counts>) -> c_int {
    call(|| {
        let counter = counter.get()?;
        counter.poll();
        // In this order: what ends meanwhile is not more than what was posted.
        let (done, failed) = (counter.done(), counter.failed());
        counts.set(Counts { posted: counter.posted(), done, failed })
    })
}

fn in_time(ended: bool) -> Result<()> {
    if ended {
        Ok(())
    } else {
        Err(Failure::new(Code::TimedOut, "operations are still under way, and go on"))
    }
}

/// Waits until so many have ended well.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_counter_wait(counter: Ref<Counter>, operations: u64, timeout_ns: i64) -> c_int {
    call(|| in_time(counter.get()?.wait_for(operations, timeout(timeout_ns))?))
}

/// Waits until nothing is under way.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_counter_wait_all(counter: Ref<Counter>, timeout_ns: i64) -> c_int {
    call(|| in_time(counter.get()?.wait_all(timeout(timeout_ns))?))
}

/// Takes the first failure.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_counter_take_error(counter: Ref<Counter>) -> c_int {
    call(|| match counter.get()?.take_error() {
        Some(error) => Err(error.into()),
        None => Ok(()),
    })
}

/// Closes it, when nothing is under way any more: buffers may be gone next.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_counter_close(counter: Own<Counter>) -> c_int {
    call(|| {
        if let Some(counter) = counter.take()? {
            // How they ended is told by waiting before.
            let _ = counter.wait_all(None);
        }
        Ok(())
    })
}
