//! `netvm bench block --device`: the same cases on a block device of this machine, past its page cache.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use netvm_sys::direct::{Aligned, Queue};

use super::super::floors;
use super::super::report::Row;
use super::{CASES, Case, Series, echo};

type Failure = Box<dyn Error>;

/// A device under test. Nobody else uses it meanwhile.
struct Device {
    path: PathBuf,
    file: File,
}

impl Device {
    fn open(path: &Path, size: u64) -> Result<Self, Failure> {
        let failed = |error: std::io::Error| {
            let why = match error.raw_os_error() {
                Some(libc::EBUSY) => "it is mounted, swap, or otherwise in use".to_owned(),
                _ => error.to_string(),
            };
            format!("cannot measure {}: {why}", path.display())
        };
        let is_device = path.metadata().map_err(failed)?.file_type().is_block_device();
        if !is_device {
            return Err(format!("cannot measure {}: it is no block device", path.display()).into());
        }
        // Exclusively: a device that is in use is refused.
        let flags = libc::O_DIRECT | libc::O_EXCL;
        let file =
            OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).map_err(failed)?;
        let bytes = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))?;
        if bytes < size {
            return Err(format!("{} has {bytes} bytes, and {size} are needed", path.display()).into());
        }
        Ok(Self { path: path.to_owned(), file })
    }

    /// Writes at every 4 KiB where it is.
    fn fill(&self, size: u64) -> Result<(), Failure> {
        const STEP: usize = 1 << 20;
        let mut buffer = Aligned::new(STEP);
        for start in (0..size).step_by(STEP) {
            for (index, block) in buffer.get().chunks_exact_mut(4096).enumerate() {
                mark(block, start + index as u64 * 4096);
            }
            self.file.write_all_at(buffer.get(), start)?;
        }
        Ok(self.file.sync_all()?)
    }

    /// Microseconds of each operation, and how long all took.
    fn run(&self, case: Case, size: u64, time: Duration, seed: u64) -> Result<(Vec<f64>, f64), Failure> {
        match self.queue(case) {
            Some(queue) => self.run_queue(queue?, case, size, time, seed),
            None => self.run_threads(case, size, time, seed),
        }
    }

    /// What asks for several operations at a time: `None` where one is enough, or this kernel has none.
    fn queue(&self, case: Case) -> Option<std::io::Result<Queue>> {
        if case.depth == 1 {
            return None;
        }
        match self.file.try_clone().and_then(|file| Queue::new(file, case.depth, case.bytes)) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => None,
            queue => Some(queue),
        }
    }

    /// By one thread: whatever ends is replaced together with all that have ended with it.
    fn run_queue(
        &self,
        mut queue: Queue,
        case: Case,
        size: u64,
        time: Duration,
        mut seed: u64,
    ) -> Result<(Vec<f64>, f64), Failure> {
        let blocks = size / case.bytes as u64;
        let start = Instant::now();
        let mut begun = vec![(0, start); case.depth];
        let mut free: Vec<usize> = (0..case.depth).collect();
        let (mut times, mut next) = (Vec::new(), 0);
        loop {
            while let Some(place) = free.pop().filter(|_| start.elapsed() < time) {
                next += 1;
                let offset = choose(case, &mut seed, || next) % blocks * case.bytes as u64;
                let bytes = queue.buffer(place).ok_or("a place is used twice")?;
                if case.writes {
                    mark(bytes, offset);
                }
                begun[place] = (offset, Instant::now());
                match case.writes {
                    true => queue.write(place, offset)?,
                    false => queue.read(place, offset)?,
                }
            }
            let mut wait = true;
            while let Some((place, done)) = queue.ended(wait)? {
                wait = false;
                let (offset, since) = begun[place];
                times.push(since.elapsed().as_secs_f64() * 1e6);
                let wrong = |what: String| format!("{} at {offset}: {what}", self.path.display());
                let count = done.map_err(|error| wrong(error.to_string()))?;
                let bytes = queue.buffer(place).ok_or("a place is used twice")?;
                if count != bytes.len() {
                    return Err(wrong(format!("{count} bytes instead of {}", bytes.len())).into());
                }
                self.check(case, bytes, offset)?;
                free.push(place);
            }
            if wait {
                return Ok((times, start.elapsed().as_secs_f64()));
            }
        }
    }

    /// Each place in the queue is a thread that waits for its own operation.
    fn run_threads(
        &self,
        case: Case,
        size: u64,
        time: Duration,
        seed: u64,
    ) -> Result<(Vec<f64>, f64), Failure> {
        let barrier = Barrier::new(case.depth + 1);
        let next = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..case.depth as u64)
                .map(|thread| {
                    let (barrier, next) = (&barrier, &next);
                    scope.spawn(move || {
                        barrier.wait();
                        self.work(case, size, time, seed + thread * 7919, next)
                    })
                })
                .collect();
            barrier.wait();
            let start = Instant::now();
            let mut times = Vec::new();
            for thread in threads {
                times.append(&mut thread.join().map_err(|_| "a thread of the bench has panicked")??);
            }
            Ok((times, start.elapsed().as_secs_f64()))
        })
    }

    fn work(
        &self,
        case: Case,
        size: u64,
        time: Duration,
        seed: u64,
        next: &AtomicU64,
    ) -> Result<Vec<f64>, String> {
        let blocks = size / case.bytes as u64;
        let (mut buffer, mut seed, mut times) = (Aligned::new(case.bytes), seed, Vec::new());
        let start = Instant::now();
        while start.elapsed() < time {
            let block = choose(case, &mut seed, || next.fetch_add(1, Ordering::Relaxed));
            let offset = block % blocks * case.bytes as u64;
            let bytes = buffer.get();
            if case.writes {
                mark(bytes, offset);
            }
            let begun = Instant::now();
            let done = match case.writes {
                true => self.file.write_all_at(bytes, offset),
                false => self.file.read_exact_at(bytes, offset),
            };
            times.push(begun.elapsed().as_secs_f64() * 1e6);
            done.map_err(|error| format!("{} at {offset}: {error}", self.path.display()))?;
            self.check(case, bytes, offset)?;
        }
        Ok(times)
    }

    fn check(&self, case: Case, bytes: &[u8], offset: u64) -> Result<(), String> {
        let mut blocks = bytes.chunks_exact(4096).zip((offset..).step_by(4096));
        if !case.writes && !blocks.all(|(block, at)| is_marked(block, at)) {
            return Err(format!("what was read at {offset} is not what was written there"));
        }
        Ok(())
    }
}

/// Which block is next: of those in order, or any.
fn choose(case: Case, seed: &mut u64, next: impl FnOnce() -> u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    if case.in_order { next() } else { *seed >> 33 }
}

fn mark(block: &mut [u8], offset: u64) {
    block[..8].copy_from_slice(&offset.to_be_bytes());
    block[8..].fill(offset as u8 | 1);
}

fn is_marked(block: &[u8], offset: u64) -> bool {
    block[..8] == offset.to_be_bytes() && block[8..].iter().all(|byte| *byte == offset as u8 | 1)
}

/// Runs the bench on devices, which have a turn at every case in each round.
///
/// # Errors
/// When one of them is in use or too small, or reads what was not written.
pub fn run(paths: &[PathBuf], size: u64, time: Duration, rounds: usize) -> Result<Vec<Row>, Failure> {
    let devices = paths.iter().map(|path| Device::open(path, size)).collect::<Result<Vec<_>, _>>()?;
    for device in &devices {
        device.fill(size).map_err(|error| format!("{}: {error}", device.path.display()))?;
    }
    let (echo, address) = echo()?;
    let mut series = Series::new(devices.len());
    for round in 0..rounds as u64 {
        series.trips.push(floors::round_trip(&address, false, time)?.median);
        series.streams.push(floors::stream(&address, time)?.median);
        for (number, device) in devices.iter().enumerate() {
            for (index, case) in CASES.iter().enumerate() {
                let (times, seconds) = device.run(*case, size, time, round * 31 + 1)?;
                series.add(number, index, times, seconds);
            }
        }
    }
    echo.finish();
    let mut rows = Vec::new();
    for (index, case) in CASES.iter().enumerate() {
        for (number, device) in devices.iter().enumerate() {
            let mut row = series.row(number, index, case.name.replacen("nbd", "disk", 1));
            let name = device.path.file_name().unwrap_or_default();
            row.link = Some(name.to_string_lossy().into_owned().into());
            rows.push(row);
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_told_apart() {
        let mut block = [0; 4096];
        mark(&mut block, 8192);
        assert!(is_marked(&block, 8192) && !is_marked(&block, 4096));
        block[4095] ^= 2;
        assert!(!is_marked(&block, 8192));
    }

    #[test]
    fn what_is_read_is_checked_however_it_is_read() {
        let path = std::env::temp_dir().join(format!("netvm-bench-device-{}", std::process::id()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let (device, size, time) = (Device { path, file }, 1 << 20, Duration::from_millis(100));
        device.fill(size).unwrap();
        for case in CASES {
            for (times, seconds) in
                [device.run(case, size, time, 5).unwrap(), device.run_threads(case, size, time, 5).unwrap()]
            {
                assert!(times.len() >= case.depth && seconds > 0.0, "{}", case.name);
            }
        }
        device.file.write_all_at(&[0; 1 << 20], 0).unwrap();
        for case in CASES.into_iter().filter(|case| !case.writes) {
            let wrong = [device.run(case, size, time, 5), device.run_threads(case, size, time, 5)];
            assert!(wrong.iter().all(Result::is_err), "{}", case.name);
        }
    }

    #[test]
    fn only_block_devices_are_overwritten() {
        for path in ["/dev/null", "/proc/self/exe", "/nowhere"] {
            assert!(Device::open(Path::new(path), 0).is_err(), "{path}");
        }
    }
}
