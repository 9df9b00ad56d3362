//! What peers cost that do nothing: memory of a process that has many, and its processor time.

use std::error::Error;
use std::time::{Duration, Instant};

use super::super::report::Row;
use super::{Link, Other};

pub const MEMORY: &str = "memory_per_idle_peer_bytes";
pub const CPU: &str = "idle-cpu";
const GOAL_BYTES: f64 = (256 << 10) as f64;
const GOAL_PERCENT: f64 = 0.1;
const BLOCK_BYTES: usize = 64 << 10;

/// Resident memory of a process.
fn resident_bytes(pid: u32) -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<u64>()? << 10)
}

/// What all threads of a process have run so far.
fn cpu_time(pid: u32) -> Result<Duration, Box<dyn Error>> {
    let mut nanoseconds = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(thread?.path().join("schedstat"))?;
        nanoseconds += text.split(' ').next().unwrap_or_default().parse::<u64>()?;
    }
    Ok(Duration::from_nanos(nanoseconds))
}

/// Connects `peers` times to a fresh partner, moves a little over each session and lets it be; how the partner has grown.
///
/// # Errors
/// When the partner cannot be had.
pub fn memory(link: Link, encrypt: bool, peers: usize) -> Result<Row, Box<dyn Error>> {
    let mut other = Other::start(link, encrypt, None)?;
    // The first one also makes what all share.
    let (here, first) = other.connect(link)?;
    let mut regions = vec![first];
    let mut block = vec![1; BLOCK_BYTES];
    let mut use_it = |region: &netvm::region::Region| -> Result<(), Box<dyn Error>> {
        region.write(0, &block)?;
        region.flush()?;
        region.read(0, &mut block)?;
        region.fetch_add(0, 1u64)?;
        Ok(())
    };
    use_it(&regions[0])?;
    let before = resident_bytes(other.partner.pid())?;
    for _ in 0..peers {
        let region = here.connect(&other.ticket)?;
        use_it(&region)?;
        regions.push(region);
    }
    let after = resident_bytes(other.partner.pid())?;
    drop(regions);
    let mut row = Row::new("rma", MEMORY, "bytes");
    row.size_bytes = Some(BLOCK_BYTES as u64);
    row.median = Some((after.saturating_sub(before) / peers as u64) as f64);
    row.floor = Some(GOAL_BYTES);
    row.ratio = row.median.map(|bytes| bytes / GOAL_BYTES);
    row.n = peers as u64;
    row.note = format!("{peers} peers that have written and read 64 KiB; the floor is the limit");
    Ok(row)
}

/// Lets a node with one peer be for `time`; what of a CPU its process takes.
///
/// # Errors
/// When the partner cannot be had.
pub fn cpu(link: Link, encrypt: bool, time: Duration) -> Result<Row, Box<dyn Error>> {
    let mut other = Other::start(link, encrypt, None)?;
    let (_here, region) = other.connect(link)?;
    region.fetch_add(0, 1u64)?;
    // Who has just been served still looks for more.
    std::thread::sleep(Duration::from_millis(200));
    let (start, before) = (Instant::now(), cpu_time(other.partner.pid())?);
    std::thread::sleep(time);
    let used = cpu_time(other.partner.pid())?.saturating_sub(before);
    let percent = used.as_secs_f64() / start.elapsed().as_secs_f64() * 100.0;
    let mut row = Row::new("rma", CPU, "% of a CPU");
    (row.median, row.floor, row.n) = (Some(percent), Some(GOAL_PERCENT), 1);
    row.ratio = Some(percent / GOAL_PERCENT);
    row.note = format!(
        "over {} s, with one peer that asks for signs of life; the floor is the limit",
        time.as_secs()
    );
    Ok(row)
}
