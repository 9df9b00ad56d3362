//! What a peer costs that does nothing: memory, measured in a process that has many.

use std::error::Error;

use super::super::child::Helper;
use super::super::report::Row;
use super::Link;
use super::partner::Side;

/// Name of the case.
pub const CASE: &str = "memory_per_idle_peer_bytes";
const GOAL_BYTES: f64 = (256 << 10) as f64;
const BLOCK_BYTES: usize = 64 << 10;

/// Resident memory of a process.
fn resident_bytes(pid: u32) -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<u64>()? << 10)
}

/// Connects `peers` times to a fresh partner, moves a little over each session and lets it be; how the partner has grown.
///
/// # Errors
/// When the partner cannot be had.
pub fn measure(link: Link, encrypt: bool, peers: usize) -> Result<Row, Box<dyn Error>> {
    let mut partner = Helper::start(&super::partner_args(link, encrypt, None), false)?;
    let secret = super::tell_secret(&mut partner, encrypt)?;
    partner.line()?;
    let ticket = partner.line()?;
    let here = Side::new(link, secret, 1)?;
    // The first one also makes what all share.
    let mut regions = vec![here.connect(&ticket)?];
    partner.tell(&here.ticket)?;
    partner.line()?;
    let mut block = vec![1; BLOCK_BYTES];
    let mut use_it = |region: &netvm::region::Region| -> Result<(), Box<dyn Error>> {
        region.write(0, &block)?;
        region.flush()?;
        region.read(0, &mut block)?;
        region.fetch_add(0, 1u64)?;
        Ok(())
    };
    use_it(&regions[0])?;
    let before = resident_bytes(partner.pid())?;
    for _ in 0..peers {
        let region = here.connect(&ticket)?;
        use_it(&region)?;
        regions.push(region);
    }
    let after = resident_bytes(partner.pid())?;
    drop(regions);
    let mut row = Row::new("rma", CASE, "bytes");
    row.size_bytes = Some(BLOCK_BYTES as u64);
    row.median = Some((after.saturating_sub(before) / peers as u64) as f64);
    row.floor = Some(GOAL_BYTES);
    row.ratio = row.median.map(|bytes| bytes / GOAL_BYTES);
    row.n = peers as u64;
    row.note = format!("{peers} peers that have written and read 64 KiB; the floor is the limit");
    Ok(row)
}
