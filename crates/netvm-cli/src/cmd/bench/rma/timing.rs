//! How one round of one case is timed.

use std::error::Error;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

/// What one round of one case found.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Microseconds, GB/s or millions per second.
    pub median: f64,
    /// The same of the slowest hundredth; none for rates.
    pub p99: Option<f64>,
    /// Operations per second.
    pub per_s: f64,
    /// Operations.
    pub n: u64,
}

impl Sample {
    /// `count` operations of `size` bytes: GB/s.
    pub fn of_rate(count: u64, size: usize, elapsed: Duration) -> Self {
        let per_s = count as f64 / elapsed.as_secs_f64();
        Self { median: per_s * size as f64 / 1e9, p99: None, per_s, n: count }
    }

    /// Microseconds of operations whose nanoseconds are in the histogram, divided by `ways`.
    ///
    /// # Errors
    /// When there are none.
    pub fn of(histogram: &Histogram<u64>, elapsed: Duration, ways: u32) -> Result<Self, Box<dyn Error>> {
        if histogram.is_empty() {
            return Err("nothing was measured".into());
        }
        let at = |share| histogram.value_at_quantile(share) as f64 / 1000.0 / f64::from(ways);
        let per_s = histogram.len() as f64 / elapsed.as_secs_f64();
        Ok(Self { median: at(0.5), p99: Some(at(0.99)), per_s, n: histogram.len() })
    }

    /// The same in millions of operations per second.
    pub fn in_millions(self) -> Self {
        Self { median: self.per_s / 1e6, ..self }
    }
}

/// Microseconds of `one`, divided by `ways` (2 for one way of a round trip), repeated for `time`.
///
/// # Errors
/// The first of `one`.
pub fn latency(
    time: Duration,
    ways: u32,
    mut one: impl FnMut() -> Result<(), Box<dyn Error>>,
) -> Result<Sample, Box<dyn Error>> {
    for _ in 0..200 {
        one()?;
    }
    let mut histogram = super::super::histogram()?;
    let start = Instant::now();
    let mut now = start;
    while now.duration_since(start) < time {
        one()?;
        let end = Instant::now();
        histogram.saturating_record(end.duration_since(now).as_nanos() as u64);
        now = end;
    }
    Sample::of(&histogram, now.duration_since(start), ways)
}
