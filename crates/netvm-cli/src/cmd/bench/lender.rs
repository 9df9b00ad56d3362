//! Lenders of a bench, as whoever uses netvm starts them.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// A process that is killed on drop.
pub struct Lender {
    process: Child,
    /// Where it listens.
    pub address: String,
}

impl Lender {
    /// `netvm lend` with these arguments, in slabs of 1 MiB; `far`: as if it were on another host.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(listen: &str, bytes: u64, more: &[&str], far: bool) -> Result<Self, Box<dyn Error>> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["lend", "--size", &bytes.to_string(), "--slab", "1M", "--listen", listen]).args(more);
        if far {
            command.env("NETVM_LINK", "socket");
        }
        // Whoever kills the bench leaves no lenders behind. Its threads that start some live as long as it does, or wait for them.
        netvm_sys::signal::die_with_parent(&mut command);
        let process = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let mut lender = Self { process, address: String::new() };
        let mut line = String::new();
        if let Some(out) = lender.process.stdout.take() {
            BufReader::new(out).read_line(&mut line)?;
        }
        if line.is_empty() {
            return Err(format!("a lender of {} MiB does not start", bytes >> 20).into());
        }
        lender.address = line.trim().rsplit(' ').next().unwrap_or_default().to_owned();
        Ok(lender)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        // Stopped ones, too.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
