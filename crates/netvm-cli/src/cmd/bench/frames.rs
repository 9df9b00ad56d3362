//! `netvm bench frames`: what a page costs on its way in and out in the two frame designs of the pager.
//!
//! - **a (move)**: frames are pages of a pool; a page is moved into place and out again with `UFFDIO_MOVE`. Whether it was
//!   written is found by comparing a hash of the content on the way out with the one taken on the way in.
//! - **b (copy)**: a page is copied into place write-protected with `UFFDIO_COPY`; the first write takes a
//!   write-protection fault; on the way out it is protected, copied, and dropped with `MADV_DONTNEED`.
//!
//! Every number is nanoseconds per page, over data that does not fit the cache. `quiet`: one thread only.
//! `busy`: a second thread of the process computes on the other CPU, so that every unmap must interrupt it.

use std::error::Error;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use netvm_sys::bench_floor::{FaultFloor, FloorFeatures, PAGE_BYTES, allowed_cpus, unpin_thread};
use netvm_sys::cpu::pin;
use xxhash_rust::xxh3::xxh3_64;

use super::report::{Row, median_and_spread, percentile};

/// Pages in one batch.
const BATCH: usize = 64;

/// Order in which the pages of a case are visited: a stride that is coprime to every power of two.
const STRIDE: usize = 12_345;

type Failure = Box<dyn Error>;

/// Samples of one case: nanoseconds per page, one per batch of 64 pages.
#[derive(Default)]
struct Samples {
    case: &'static str,
    repetitions: Vec<Vec<f64>>,
}

struct Bench {
    cases: Vec<Samples>,
}

impl Bench {
    fn add(&mut self, case: &'static str, nanos_per_page: Vec<f64>) {
        match self.cases.iter_mut().find(|samples| samples.case == case) {
            Some(samples) => samples.repetitions.push(nanos_per_page),
            None => self.cases.push(Samples { case, repetitions: vec![nanos_per_page] }),
        }
    }

    fn median(&self, case: &str) -> Option<f64> {
        let samples = self.cases.iter().find(|samples| samples.case == case)?;
        let medians: Vec<f64> =
            samples.repetitions.iter().filter_map(|values| percentile(&mut values.clone(), 0.5)).collect();
        Some(median_and_spread(&medians)?.0)
    }
}

/// Measures both designs and returns one row per case.
///
/// # Errors
/// When there is no userfaultfd here, or a kernel operation fails.
pub fn run(quick: bool) -> Result<Vec<Row>, Failure> {
    let pages = if quick { 4096 } else { 32_768 };
    let repetitions = if quick { 2 } else { 7 };
    let cpus = allowed_cpus();
    pin(cpus[0])?;
    let mut rows = Vec::new();
    for placement in ["quiet", "busy"] {
        if placement == "busy" && cpus.len() < 2 {
            tell!("skipped: busy (needs two CPUs)");
            continue;
        }
        let stop = AtomicBool::new(false);
        let mut bench = Bench { cases: Vec::new() };
        std::thread::scope(|scope| {
            if placement == "busy" {
                scope.spawn(|| {
                    if pin(cpus[1]).is_ok() {
                        while !stop.load(Ordering::Relaxed) {
                            std::hint::spin_loop();
                        }
                    }
                });
                std::thread::sleep(Duration::from_millis(20));
            }
            let result = (0..repetitions).try_for_each(|_| {
                measure_moves(&mut bench, pages)?;
                measure_copies(&mut bench, pages)?;
                measure_first_writes(&mut bench, pages.min(8192))
            });
            stop.store(true, Ordering::Relaxed);
            result
        })?;
        sum_up(&bench, placement, &mut rows);
    }
    unpin_thread(&cpus)?;
    Ok(rows)
}

/// Runs `one` over batches of 64 pages that cover `0..pages`, and returns nanoseconds per page of each batch.
fn time_batches(
    pages: usize,
    mut one: impl FnMut(usize) -> std::io::Result<()>,
) -> std::io::Result<Vec<f64>> {
    let batches = pages / BATCH;
    let mut samples = Vec::with_capacity(batches);
    for index in 0..batches {
        let first = (index * STRIDE % batches) * BATCH;
        let start = Instant::now();
        one(first)?;
        samples.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
    }
    Ok(samples)
}

/// The `turn`-th page in scattered order.
fn scattered(turn: usize, pages: usize) -> usize {
    turn * STRIDE % pages
}

fn measure_moves(bench: &mut Bench, pages: usize) -> Result<(), Failure> {
    let mut floor = FaultFloor::new(pages, FloorFeatures { moves: true, ..Default::default() })
        .map_err(|error| format!("design a (UFFDIO_MOVE, Linux 6.8) does not work here: {error}"))?;
    // Any free frame for any page: frames are taken in order, pages are scattered.
    bench.add(
        "a-move-in-1",
        time_batches(pages, |first| {
            (first..first + BATCH).try_for_each(|turn| floor.move_in(scattered(turn, pages), turn, 1))
        })?,
    );
    bench.add(
        "a-move-out-1",
        time_batches(pages, |first| {
            (first..first + BATCH).try_for_each(|turn| floor.move_out(scattered(turn, pages), turn, 1))
        })?,
    );
    bench.add("a-move-in-64", time_batches(pages, |first| floor.move_in(first, first, BATCH))?);
    bench.add("a-move-out-64", time_batches(pages, |first| floor.move_out(first, first, BATCH))?);
    bench.add(
        "a-hash-cold",
        time_batches(pages, |first| {
            for frame in first..first + BATCH {
                black_box(xxh3_64(floor.frame_bytes(frame)));
            }
            Ok(())
        })?,
    );
    bench.add(
        "a-hash-hot",
        time_batches(pages, |_| {
            for _ in 0..BATCH {
                black_box(xxh3_64(black_box(floor.frame_bytes(0))));
            }
            Ok(())
        })?,
    );
    Ok(())
}

fn measure_copies(bench: &mut Bench, pages: usize) -> Result<(), Failure> {
    let features = FloorFeatures { write_protect: true, ..Default::default() };
    let mut floor = FaultFloor::new(pages, features)
        .map_err(|error| format!("design b (write-protection, Linux 5.7) does not work here: {error}"))?;
    // The source of a copy-in is a small receive buffer, which is in the cache.
    bench.add(
        "b-copy-in-1",
        time_batches(pages, |first| {
            (first..first + BATCH)
                .try_for_each(|turn| floor.copy_in(scattered(turn, pages), turn % BATCH, 1, true))
        })?,
    );
    floor.protect(0, pages, false)?;
    touch_all(&floor, pages);
    bench.add(
        "b-protect-1",
        time_batches(pages, |first| {
            (first..first + BATCH).try_for_each(|turn| floor.protect(scattered(turn, pages), 1, true))
        })?,
    );
    bench.add(
        "b-copy-out",
        time_batches(pages, |first| {
            for turn in first..first + BATCH {
                floor.copy_out(scattered(turn, pages), turn % BATCH);
            }
            Ok(())
        })?,
    );
    bench.add(
        "b-drop-1",
        time_batches(pages, |first| {
            (first..first + BATCH).try_for_each(|turn| floor.discard(scattered(turn, pages), 1))
        })?,
    );
    bench.add("b-copy-in-64", time_batches(pages, |first| floor.copy_in(first, 0, BATCH, true))?);
    floor.protect(0, pages, false)?;
    touch_all(&floor, pages);
    bench.add("b-protect-64", time_batches(pages, |first| floor.protect(first, BATCH, true))?);
    bench.add("b-drop-64", time_batches(pages, |first| floor.discard(first, BATCH))?);
    (0..pages).step_by(BATCH).try_for_each(|first| floor.copy_in(first, 0, BATCH, true))?;
    let dropped = time_batches(pages, |first| {
        let mut victims = [0; BATCH];
        for (offset, victim) in victims.iter_mut().enumerate() {
            *victim = scattered(first + offset, pages);
        }
        floor.discard_scattered(&victims)
    });
    match dropped {
        Ok(samples) => bench.add("b-drop-scattered-64", samples),
        Err(error) => tell!("skipped: b-drop-scattered-64 (process_madvise: {error})"),
    }
    Ok(())
}

/// What the first write to a page costs the program in design b: a fault that a handler thread on the same CPU answers,
/// or (Linux 6.7) one that the kernel resolves by itself.
fn measure_first_writes(bench: &mut Bench, pages: usize) -> Result<(), Failure> {
    let features = FloorFeatures { write_protect: true, ..Default::default() };
    let floor = FaultFloor::new(pages, features)?;
    (0..pages).step_by(BATCH).try_for_each(|first| floor.copy_in(first, 0, BATCH, true))?;
    let samples = std::thread::scope(|scope| {
        // The handler inherits the CPU of this thread, and ends after the last fault.
        scope.spawn(|| {
            for _ in 0..pages {
                let answered =
                    floor.wait_fault().map(|fault| fault.map(|fault| floor.protect(fault.page, 1, false)));
                assert!(matches!(answered, Ok(Some(Ok(())))), "write-protection fault: {answered:?}");
            }
        });
        time_batches(pages, |first| {
            (first..first + BATCH).for_each(|turn| floor.write(scattered(turn, pages), 1));
            Ok(())
        })
    })?;
    bench.add("b-first-write", samples);
    let features = FloorFeatures { write_protect_async: true, ..Default::default() };
    match FaultFloor::new(pages, features) {
        Ok(floor) => {
            (0..pages).step_by(BATCH).try_for_each(|first| floor.copy_in(first, 0, BATCH, true))?;
            bench.add(
                "b-first-write-async",
                time_batches(pages, |first| {
                    (first..first + BATCH).for_each(|turn| floor.write(scattered(turn, pages), 1));
                    Ok(())
                })?,
            );
        }
        Err(error) => tell!("skipped: b-first-write-async (WP_ASYNC needs Linux 6.7: {error})"),
    }
    Ok(())
}

fn touch_all(floor: &FaultFloor, pages: usize) {
    for page in 0..pages {
        floor.write(page, page as u64);
    }
}

/// Adds the measured cases, and the sums that make the two designs comparable.
fn sum_up(bench: &Bench, placement: &'static str, rows: &mut Vec<Row>) {
    for samples in &bench.cases {
        let mut medians = Vec::new();
        let mut all = Vec::new();
        for repetition in &samples.repetitions {
            medians.extend(percentile(&mut repetition.clone(), 0.5));
            all.extend_from_slice(repetition);
        }
        let Some((median, spread)) = median_and_spread(&medians) else { continue };
        let mut row = Row::new("frames", samples.case, "ns");
        row.placement = Some(placement);
        row.size_bytes = Some(PAGE_BYTES as u64);
        row.median = Some(median);
        row.spread = Some(spread);
        row.n = (all.len() * BATCH) as u64;
        row.p99 = percentile(&mut all, 0.99);
        row.per_s = Some(1e9 / median);
        rows.push(row);
    }
    // What each design pays for a page that comes in alone (a random fault) and leaves in a batch of scattered victims.
    let sums: [(&str, &[&str]); 6] = [
        ("a-sum-in", &["a-move-in-1", "a-hash-hot"]),
        ("b-sum-in", &["b-copy-in-1"]),
        ("a-sum-out-clean", &["a-move-out-1", "a-hash-cold"]),
        ("b-sum-out-clean", &["b-drop-scattered-64"]),
        ("a-sum-out-dirty", &["a-move-out-1", "a-hash-cold"]),
        ("b-sum-out-dirty", &["b-first-write", "b-protect-1", "b-drop-scattered-64"]),
    ];
    for (case, parts) in sums {
        let Some(sum) = parts.iter().map(|part| bench.median(part)).sum::<Option<f64>>() else { continue };
        let mut row = Row::new("frames", case, "ns");
        row.placement = Some(placement);
        row.size_bytes = Some(PAGE_BYTES as u64);
        row.median = Some(sum);
        row.note = format!("= {}", parts.join(" + "));
        rows.push(row);
    }
}
