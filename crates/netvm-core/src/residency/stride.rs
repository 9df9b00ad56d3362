//! Streams with a stride: elements of some bytes, equally far apart, as a program meets them that goes through a matrix by columns, or by tiles.
//!
//! They are followed in bytes, as few rows are whole pages long: in pages, a row of 4.7 would be steps of 5, 5, 4, 5, 5, 4, none of which continues the ones
//! before. Where faults come without their place in the page, all steps are whole pages.

/// Longest window, in elements: each is a transfer of its own.
const ELEMENTS_MAX: u32 = 32;
/// Narrower windows have nothing read ahead behind them.
const AHEAD_MIN: u32 = 4;
/// Elements that may be left out where a window ended, and in one, as they are here.
const LEFT_OUT_MAX: u32 = 256;
/// Those that may be left out though they are not here.
const MISSED_MAX: u32 = 4;
/// Elements before the window that may turn out to be longer, too.
const BEFORE: i64 = 8;
/// An element of more units is a stream of its own.
const UNITS_MAX: u64 = 4;
/// The length of elements is known to within so many bytes.
const GRAIN: u64 = 256;
/// A step of no more units is small: it is seen by itself, and may soon turn out to be in order.
pub(super) const SMALL_UNITS: u64 = 4;
/// Elements get longer when one in so many of a window is,
const LONGER_PART: u32 = 8;
/// or so many are.
const LONGER_MAX: u32 = 4;
/// Of so many windows one is brought in as if elements were short, to see whether they are.
const PROBE: u32 = 16;

/// Where elements are, in bytes from the beginning of the area.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stride {
    /// The first.
    pub from: u64,
    /// From one to the next. Never 0.
    pub step: i64,
    /// Bytes of each, at least 1.
    pub extent: u64,
}

impl Stride {
    /// The first unit of the element `index`, and the one behind its last, if there is such an element. Units are of `unit` bytes.
    pub fn units(self, index: u32, unit: u64) -> Option<(u32, u32)> {
        let start = self.from.checked_add_signed(self.step.checked_mul(i64::from(index))?)?;
        let end = start.checked_add(self.extent.max(1))?.div_ceil(unit);
        Some((u32::try_from(start / unit).ok()?, u32::try_from(end).ok()?))
    }

    fn is_here(self, index: u32, unit: u64, here: &impl Fn(u32) -> bool) -> bool {
        self.units(index, unit).is_some_and(|(from, end)| (from..end).all(here))
    }

    /// How many elements from the first on have `window` that are not here.
    fn elements(self, window: u32, unit: u64, here: &impl Fn(u32) -> bool) -> u32 {
        let (mut elements, mut missing) = (0, 0);
        while missing < window && elements < window + LEFT_OUT_MAX {
            missing += u32::from(!self.is_here(elements, unit, here));
            elements += 1;
        }
        elements
    }
}

/// What a fault is to a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// It goes on: so many elements come with the faulting one, and so many behind them into the pool.
    Ahead(Stride, u32, u32),
    /// The elements of the last window are longer than was known.
    Longer(Stride, u32),
    /// All that lies between elements is wanted. The last window had so many.
    InOrder(u32),
}

/// A stream with a stride.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Strided {
    /// Where the next element begins.
    next: u64,
    step: i64,
    /// Bytes of an element that come,
    extent: u64,
    /// and that came before the last probe.
    extent_known: u64,
    /// Elements that came with the last window,
    window: u32,
    /// and with those between them that were here.
    elements: u32,
    windows: u32,
    /// Elements of the last window that were longer.
    longer: u32,
    /// The faults that used it last, and continued it.
    pub(super) used: u64,
    continued: u64,
    /// Faults between the last two that continued it.
    pub(super) gap: u64,
}

impl Strided {
    /// Begins with the element at `at`, with a window of `window` elements. `clock`: now, in faults; `gap`: since the one before of this thread.
    pub(super) fn new(at: u64, step: i64, window: u32, (clock, gap): (u64, u64)) -> Option<Self> {
        let next = at.checked_add_signed(step.checked_mul(i64::from(window))?)?;
        let (used, continued) = (clock, clock);
        let (extent, extent_known, windows, longer, elements) = (1, 1, 0, 0, window);
        Some(Self {
            next,
            step,
            extent,
            extent_known,
            window,
            elements,
            windows,
            longer,
            used,
            continued,
            gap,
        })
    }

    /// Units that its windows have.
    pub(super) fn units(&self, unit: u64) -> usize {
        self.window as usize * (1 + (self.extent / unit) as usize)
    }

    /// What a fault at `at` is to it, if anything, and notes it then. `is_known`: it was continued just before.
    pub(super) fn fault(
        &mut self,
        at: u64,
        unit: u64,
        window_max: u32,
        clock: u64,
        is_known: bool,
        here: &impl Fn(u32) -> bool,
    ) -> Option<Found> {
        let size = self.step.unsigned_abs();
        let is_whole = size.is_multiple_of(unit) && self.next.is_multiple_of(unit);
        let at = if is_whole { at - at % unit } else { at };
        let distance = (at as i64).checked_sub(self.next as i64)?;
        let mut rest = distance.rem_euclid(size as i64) as u64;
        let mut index = distance.div_euclid(size as i64) * self.step.signum();
        if rest >= self.extent + unit {
            // Not all elements are touched where the first one was: a little before, in the same unit.
            let is_before = (at + (size - rest)) / unit == at / unit;
            if !is_before {
                return None;
            }
            (rest, index) = (0, index + self.step.signum());
        }
        // What has not gone on yet may be no stride at all.
        let is_new = self.windows == 0 && size > SMALL_UNITS * unit;
        let last = i64::from(self.elements.min(ELEMENTS_MAX));
        let before = if is_new { 0 } else { last + BEFORE };
        let left_out = if is_known { i64::from(LEFT_OUT_MAX) } else { 0 };
        if index < -before || index > left_out {
            return None;
        }
        // Few may be left out that are not here, of many.
        let may_miss = i64::from((self.window / 4).min(MISSED_MAX));
        if index > may_miss && !(0..index as u32).all(|index| self.stride().is_here(index, unit, here)) {
            return None;
        }
        let mut is_longer = rest >= self.extent;
        if is_longer {
            if self.step > 0 && rest >= unit && rest + unit >= size {
                return (index < 0).then_some(Found::InOrder(self.window));
            }
            if rest >= UNITS_MAX * unit {
                return None;
            }
            // Of some elements all may be wanted, of most the beginning.
            self.longer += 1;
            is_longer = self.longer >= (self.window / LONGER_PART).clamp(1, LONGER_MAX);
            if is_longer {
                self.extent = (rest + 1).next_multiple_of(GRAIN).max(self.extent_known);
                self.extent_known = self.extent;
                self.used = clock;
            } else if index < 0 {
                return None;
            }
        }
        if index < 0 {
            // One that was here and has left, or found no frame: with those behind it.
            let elements = if is_longer { last.max(-index) } else { -index };
            let from = self.next.checked_add_signed(-self.step * elements)?;
            return Some(Found::Longer(Stride { from, ..self.stride() }, elements as u32));
        }
        let from = self.next.checked_add_signed(self.step * index)?;
        self.windows += 1;
        match self.windows % PROBE {
            0 => self.extent = 1,
            1 => self.extent_known = self.extent,
            _ => {}
        }
        self.window = (self.window * 2).clamp(1, window_max.min(ELEMENTS_MAX));
        (self.gap, self.continued, self.used, self.longer) = (clock - self.continued, clock, clock, 0);
        let stride = Stride { from, ..self.stride() };
        self.elements = stride.elements(self.window, unit, here);
        let Some(next) = from.checked_add_signed(self.step * i64::from(self.elements)) else {
            // It ends where the area begins.
            self.used = 0;
            return Some(Found::Ahead(stride, self.elements, 0));
        };
        self.next = next;
        let behind =
            if self.window >= AHEAD_MIN { self.stride().elements(self.window, unit, here) } else { 0 };
        Some(Found::Ahead(stride, self.elements, behind))
    }

    fn stride(&self) -> Stride {
        Stride { from: self.next, step: self.step, extent: self.extent }
    }
}
