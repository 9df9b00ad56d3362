//! What commands have in common that make something of a volume.

use super::secret::SecurityArgs;
use super::slabs;
use crate::size::Size;
use clap::Args;
use netvm::Error;
use netvm::lender::BorrowOptions;
use netvm::volume::{Event, Volume, VolumeOptions};
use std::collections::BTreeSet;
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

/// What happens to a volume, for people.
#[derive(Clone, Debug)]
pub struct Story {
    replicas: usize,
    lenders: usize,
    /// Those that cannot take copies now.
    away: BTreeSet<String>,
    /// Whether something was lost for good.
    lost: bool,
}

impl Story {
    /// Of a volume on so many lenders that each have `replicas` copies of it.
    pub fn new(lenders: usize, replicas: usize) -> Self {
        Self { replicas, lenders, away: BTreeSet::new(), lost: false }
    }

    /// Lenders that are there.
    fn left(&self) -> usize {
        self.lenders.saturating_sub(self.away.len())
    }

    /// The next event, if there is something to say of it.
    pub fn sentence(&mut self, event: &Event) -> Option<String> {
        Some(match event {
            Event::LenderLost { lender, error, degraded, lost } => {
                self.away.insert(lender.clone());
                self.lost = *lost > 0;
                // The error's own sentence knows nothing of copies.
                let why = match error {
                    Error::LenderLost { reason, .. } => reason.clone(),
                    other => other.to_string(),
                };
                format!("lost lender {lender}, {why}: {}", self.consequence(*degraded, *lost))
            }
            Event::LenderBack { lender } => {
                self.away.remove(lender);
                format!("{lender} is back, empty, and used again")
            }
            Event::LenderLeft { lender } => {
                self.away.insert(lender.clone());
                event.to_string()
            }
            Event::LenderUnfit { .. } | Event::Recalled { .. } | Event::Stuck { .. } => event.to_string(),
            // Of nothing there is no copy.
            Event::Mended { .. } if self.left() == 0 => return None,
            Event::Mended { after } => {
                let what = if self.lost { "of what is left " } else { "" };
                format!("all copies {what}are complete again, after {:.1} s", after.as_secs_f64())
            }
        })
    }

    fn consequence(&self, degraded: u64, lost: u64) -> &'static str {
        match (degraded, lost) {
            (_, 1..) if self.left() == 0 => "nothing is left: reads of what was written fail (EIO)",
            (_, 1..) => "what only it had is lost: reads of that fail (EIO), the rest goes on",
            (1.., 0) if self.left() >= self.replicas => {
                "nothing is lost; the other copies are copied to another lender if one has room"
            }
            (1.., 0) if self.left() == 1 => {
                "nothing is lost; no other lender is there for new copies, so there is no protection until one is back"
            }
            (1.., 0) => {
                "nothing is lost; no other lender is there for new copies, so there is less protection until one is back"
            }
            (0, 0) => "it had nothing",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Story, is_here};
    use netvm::Error;
    use netvm::volume::Event;
    use std::time::Duration;

    fn lost(lender: &str, degraded: u64, lost: u64) -> Event {
        let lender = lender.to_owned();
        let error = Error::LenderLost { lender: lender.clone(), reason: "it closed the connection".into() };
        Event::LenderLost { lender, error, degraded, lost }
    }

    const MENDED: Event = Event::Mended { after: Duration::from_secs(3) };

    #[test]
    fn nothing_is_complete_when_nothing_is_left() {
        let mut story = Story::new(2, 2);
        let said = story.sentence(&lost("a:1", 4, 0)).unwrap();
        assert!(
            said.contains("nothing is lost; no other lender") && said.contains("no protection"),
            "{said}"
        );
        let said = story.sentence(&lost("b:1", 0, 4)).unwrap();
        assert!(said.contains("nothing is left"), "{said}");
        assert_eq!(story.sentence(&MENDED), None);
        story.sentence(&Event::LenderBack { lender: "a:1".into() }).unwrap();
        let said = story.sentence(&MENDED).unwrap();
        assert!(said.contains("all copies of what is left are complete again"), "{said}");
    }

    #[test]
    fn copies_go_to_another_lender_where_there_is_one() {
        let mut story = Story::new(3, 2);
        let said = story.sentence(&lost("a:1", 4, 0)).unwrap();
        assert!(said.contains("copied to another lender"), "{said}");
        let said = story.sentence(&MENDED).unwrap();
        assert_eq!(said, "all copies are complete again, after 3.0 s");
        let said = story.sentence(&lost("b:1", 4, 0)).unwrap();
        assert!(said.contains("no protection until one is back"), "{said}");
        let mut story = Story::new(3, 3);
        let said = story.sentence(&lost("a:1", 4, 0)).unwrap();
        assert!(said.contains("less protection until one is back"), "{said}");
    }

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
