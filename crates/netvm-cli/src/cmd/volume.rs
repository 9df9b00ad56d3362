//! What commands have in common that make something of a volume.

use super::secret::SecurityArgs;
use super::slabs;
use crate::size::Size;
use clap::Args;
use netvm::Error;
use netvm::lender::BorrowOptions;
use netvm::volume::{Event, Volume, VolumeOptions};
use std::net::{IpAddr, ToSocketAddrs, UdpSocket};

/// Arguments of a volume.
#[derive(Args, Debug)]
pub struct VolumeArgs {
    /// Bytes that it has, e.g. 4G
    #[arg(long)]
    pub size: Size,
    /// Address of a lender, HOST:PORT or unix:/path; may be given several times
    #[arg(long, value_name = "ADDR", required = true)]
    pub lender: Vec<String>,
    /// How many lenders keep each byte
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub replicas: usize,
    #[command(flatten)]
    pub security: SecurityArgs,
}

impl VolumeArgs {
    /// Borrows `size_bytes` under a name that lenders show.
    ///
    /// # Errors
    /// As of [`Volume::open`]; secrets that cannot be read.
    pub fn open(&self, name: &str, size_bytes: u64) -> Result<Volume, Box<dyn std::error::Error>> {
        let borrow = BorrowOptions {
            name: name.to_owned(),
            security: self.security.load()?,
            ..BorrowOptions::default()
        };
        let options = VolumeOptions { replicas: self.replicas, borrow, ..VolumeOptions::default() };
        // The server of a swap leaves the folder that it was started in.
        let lenders = self.lender.iter().map(|address| absolute(address)).collect::<Result<Vec<_>, _>>()?;
        open(&lenders, size_bytes, options)
    }

    /// A lender on this machine, if there is one.
    pub fn lender_here(&self) -> Option<&str> {
        self.lender.iter().map(String::as_str).find(|address| is_here(address))
    }
}

/// A volume, whose user is told where lenders' slabs differ.
///
/// # Errors
/// As of [`Volume::open`].
pub fn open(
    lenders: &[String],
    size_bytes: u64,
    options: VolumeOptions,
) -> Result<Volume, Box<dyn std::error::Error>> {
    let volume = Volume::open(lenders, size_bytes, options)?;
    let (lenders, slabs): (Vec<_>, Vec<_>) =
        volume.slabs().map(|(lender, bytes)| (lender.to_owned(), Size(bytes))).unzip();
    slabs::smallest(&lenders, &slabs);
    Ok(volume)
}

/// A lender's address that does not depend on the working directory.
fn absolute(address: &str) -> std::io::Result<String> {
    match address.strip_prefix("unix:") {
        Some(path) => Ok(format!("unix:{}", std::path::absolute(path)?.display())),
        None => Ok(address.to_owned()),
    }
}

/// Whether an address is one of this machine. One that cannot be resolved is not; whoever connects to it says why.
fn is_here(address: &str) -> bool {
    // Only addresses of this machine can be bound to.
    let is_ours = |ip: IpAddr| ip.is_loopback() || UdpSocket::bind((ip, 0)).is_ok();
    address.starts_with("unix:")
        || address.to_socket_addrs().is_ok_and(|mut found| found.any(|found| is_ours(found.ip())))
}

/// What happened to a volume, for people.
pub fn sentence(event: &Event) -> String {
    match event {
        Event::LenderLost { lender, error, degraded, lost } => {
            let what = match (degraded, lost) {
                (_, 1..) => "what only it had is lost: reads of that fail (EIO), the rest goes on",
                (1.., 0) => "nothing is lost; the other copies are copied to another lender if there is one",
                (0, 0) => "it had nothing",
            };
            // The error's own sentence knows nothing of copies.
            let why = match error {
                Error::LenderLost { reason, .. } => reason.clone(),
                other => other.to_string(),
            };
            format!("lost lender {lender}, {why}: {what}")
        }
        Event::LenderBack { lender } => format!("{lender} is back, empty, and used again"),
        Event::LenderUnfit { .. }
        | Event::Recalled { .. }
        | Event::Stuck { .. }
        | Event::LenderLeft { .. } => event.to_string(),
        Event::Mended { after } => {
            format!("all copies are complete again, after {:.1} s", after.as_secs_f64())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_here;

    #[test]
    fn this_machine_is_known_by_its_addresses() {
        for here in ["unix:/run/lender", "127.0.0.1:7070", "127.9.9.9:1", "[::1]:7070", "localhost:7070"] {
            assert!(is_here(here), "{here}");
        }
        // Addresses for documentation are nobody's.
        for elsewhere in ["192.0.2.1:7070", "[2001:db8::1]:7070", "no port", "10.7.0.1"] {
            assert!(!is_here(elsewhere), "{elsewhere}");
        }
    }
}
