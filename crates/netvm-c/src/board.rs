//! The notifications of a segment that this process exports.

use std::ffi::c_int;
use std::num::NonZeroU32;
use std::os::fd::AsRawFd;

use netvm::notify::{Notifications, Notify};
use netvm_sys::thread::without_signals;

use crate::call::{call, call_for, timeout};
use crate::code::{Code, Failure, Result};
use crate::ffi::{Callback, CallbackFunction, Opaque, Out, Own, Ref, User};

/// A segment's notifications.
pub struct Board(pub(crate) Notifications);

impl Opaque for Board {
    const TAG: u32 = 0x6E76_4205;
    const NAME: &'static str = "board";
}

/// `netvm_signal`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Signal {
    pub(crate) number: u32,
    pub(crate) value: u32,
}

impl Signal {
    /// A value of 0 is a signal of an event count.
    pub(crate) fn notify(self) -> Result<Notify> {
        let number = self.number16()?;
        Ok(match NonZeroU32::new(self.value) {
            Some(value) => Notify::Post { number, value },
            None => Notify::Count { number },
        })
    }

    /// For a queue, which takes no 0.
    pub(crate) fn queue(self) -> Result<(u16, NonZeroU32)> {
        let value = NonZeroU32::new(self.value);
        Ok((self.number16()?, value.ok_or_else(|| Failure::argument("a queue takes no value of 0"))?))
    }

    fn number16(self) -> Result<u16> {
        let Ok(number) = u16::try_from(self.number) else {
            let message = format!("{} is no notification number: they end at 65535", self.number);
            return Err(Failure::new(Code::Bounds, message));
        };
        Ok(number)
    }
}

impl Board {
    fn number(&self, number: u32) -> Result<u16> {
        let numbers = self.0.numbers();
        match u16::try_from(number) {
            Ok(inside) if number < numbers => Ok(inside),
            _ => {
                let message = format!("there is no notification number {number}: the segment has {numbers}");
                Err(Failure::new(Code::Bounds, message))
            }
        }
    }

    fn range(&self, first: u32, count: u32) -> Result<std::ops::Range<u32>> {
        let numbers = self.0.numbers();
        match first.checked_add(count) {
            Some(end) if count > 0 && end <= numbers => Ok(first..end),
            _ => {
                let message = format!(
                    "there are no {count} notification numbers from {first} on: the segment has {numbers}"
                );
                Err(Failure::new(Code::Bounds, message))
            }
        }
    }
}

fn timed_out(found: bool) -> Result<()> {
    if found { Ok(()) } else { Err(Failure::new(Code::TimedOut, "no notification came in time")) }
}

/// How many numbers.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_query(board: Ref<Board>, numbers: Out<u32>) -> c_int {
    call(|| numbers.set(board.get()?.0.numbers()))
}

/// Signals as a peer would.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_notify(board: Ref<Board>, number: u32, value: u32) -> c_int {
    call(|| {
        let board = board.get()?;
        board.number(number)?;
        board.0.notify(Signal { number, value }.notify()?);
        Ok(())
    })
}

/// Signals not yet acknowledged.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_test(board: Ref<Board>, number: u32, signals: Out<u64>) -> c_int {
    call(|| {
        let board = board.get()?;
        signals.set(board.0.test(board.number(number)?))
    })
}

/// The posted value.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_value(board: Ref<Board>, number: u32, value: Out<u32>) -> c_int {
    call(|| {
        let board = board.get()?;
        value.set(board.0.value(board.number(number)?).map_or(0, NonZeroU32::get))
    })
}

/// Waits.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_wait(board: Ref<Board>, number: u32, timeout_ns: i64) -> c_int {
    call(|| {
        let board = board.get()?;
        timed_out(board.0.wait(board.number(number)?, timeout(timeout_ns)))
    })
}

/// Waits without sleeping.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_spin(board: Ref<Board>, number: u32, timeout_ns: i64) -> c_int {
    call(|| {
        let board = board.get()?;
        timed_out(board.0.spin(board.number(number)?, timeout(timeout_ns)))
    })
}

/// Waits for several signals of one number.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_wait_count(
    board: Ref<Board>,
    number: u32,
    signals: u64,
    timeout_ns: i64,
) -> c_int {
    call(|| {
        let board = board.get()?;
        timed_out(board.0.wait_count(board.number(number)?, signals, timeout(timeout_ns)))
    })
}

/// Waits for one of several numbers.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_wait_any(
    board: Ref<Board>,
    first: u32,
    count: u32,
    timeout_ns: i64,
    number: Out<u32>,
) -> c_int {
    call(|| {
        number.check()?;
        let board = board.get()?;
        let found = board.0.wait_any(board.range(first, count)?, timeout(timeout_ns));
        timed_out(found.is_some())?;
        number.set(found.map_or(0, u32::from))
    })
}

/// Takes signals.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_acknowledge(
    board: Ref<Board>,
    number: u32,
    most: u64,
    taken: Out<u64>,
) -> c_int {
    call(|| {
        let board = board.get()?;
        taken.set_if_wanted(board.0.acknowledge_many(board.number(number)?, most))
    })
}

/// Takes a posted value.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_reset(board: Ref<Board>, number: u32, value: Out<u32>) -> c_int {
    call(|| {
        let board = board.get()?;
        let number = board.number(number)?;
        value.check()?;
        value.set(board.0.reset(number).map_or(0, NonZeroU32::get))
    })
}

/// Makes the queue.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_open_queue(board: Ref<Board>, places: u32) -> c_int {
    call(|| Ok(board.get()?.0.open_queue(places)?))
}

/// Puts something into the queue, as a peer would.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_enqueue(board: Ref<Board>, number: u32, value: u32) -> c_int {
    call(|| {
        let board = board.get()?;
        board.number(number)?;
        let (number, value) = Signal { number, value }.queue()?;
        if board.0.notify(Notify::Queue { number, value }) {
            return Ok(());
        }
        Err(Failure::new(Code::Busy, "the queue has no place free, or there is none"))
    })
}

/// Takes the first of the queue.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_remove(
    board: Ref<Board>,
    timeout_ns: i64,
    number: Out<u32>,
    value: Out<u32>,
) -> c_int {
    call(|| {
        number.check()?;
        value.check()?;
        let board = board.get()?;
        let first = if timeout_ns == 0 { board.0.remove() } else { board.0.wait_remove(timeout(timeout_ns)) };
        let first = first.ok_or_else(|| Failure::new(Code::TimedOut, "nothing is in the queue"))?;
        number.set(first.0.into())?;
        value.set(first.1.get())
    })
}

/// How many are in the queue.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_queued(board: Ref<Board>, queued: Out<usize>) -> c_int {
    call(|| queued.set(board.get()?.0.queued()))
}

/// The descriptor.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_descriptor(board: Ref<Board>, descriptor: Out<c_int>) -> c_int {
    call(|| {
        descriptor.check()?;
        descriptor.set(board.get()?.0.descriptor()?.as_raw_fd())
    })
}

/// Makes the descriptor unreadable.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_rearm(board: Ref<Board>, first: u32, count: u32) -> c_int {
    call_for(|| {
        let board = board.get()?;
        Ok(if board.0.rearm(board.range(first, count)?) { Code::Ok } else { Code::Pending })
    })
}

/// Has a function called.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_arm(
    board: Ref<Board>,
    number: u32,
    handler: Option<CallbackFunction>,
    user: User,
) -> c_int {
    call(|| {
        let board = board.get()?;
        let number = board.number(number)?;
        let callback = Callback::new(handler, user)?;
        let handler = move |notify| {
            match notify {
                Notify::Count { number } => callback.call(number.into(), 0),
                Notify::Post { number, value } | Notify::Queue { number, value } => {
                    callback.call(number.into(), value.get());
                }
            };
        };
        Ok(without_signals(|| board.0.arm(number, handler))?)
    })
}

/// Ends that.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_disarm(board: Ref<Board>, number: u32) -> c_int {
    call(|| {
        let board = board.get()?;
        board.0.disarm(board.number(number)?);
        Ok(())
    })
}

/// Closes a board.
#[unsafe(no_mangle)]
pub extern "C" fn netvm_board_close(board: Own<Board>) -> c_int {
    call(|| board.take().map(drop))
}
