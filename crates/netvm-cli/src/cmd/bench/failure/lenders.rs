//! The lenders of a run, one of which has an accident.

use std::error::Error;
use std::path::Path;
use std::process::Command;

use netvm_sys::signal;

use super::super::lender::Lender;
use super::Trouble;

/// Who has the accident: not the first, which has the most to do.
const VICTIM: usize = 1;

pub struct Lenders {
    lenders: Vec<Lender>,
}

impl Lenders {
    /// So many, each with so much to lend. With a network that may be cut, the one that has the accident is on it, and the others are not.
    ///
    /// # Errors
    /// When one does not start.
    pub fn start(folder: &Path, count: usize, bytes: u64, own_network: bool) -> Result<Self, Box<dyn Error>> {
        let lender = |index| {
            let listen = match own_network && index != VICTIM {
                true => format!("unix:{}", folder.join(format!("lender-{index}")).display()),
                false => "127.0.0.1:0".to_owned(),
            };
            Lender::start(&listen, bytes, &[], true)
        };
        Ok(Self { lenders: (0..count).map(lender).collect::<Result<_, _>>()? })
    }

    /// What `netvm run` is told.
    pub fn arguments(&self) -> impl Iterator<Item = &str> {
        self.lenders.iter().flat_map(|lender| ["--lender", &lender.address])
    }

    /// Trouble for one of them.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn strike(&mut self, trouble: Trouble) -> Result<(), Box<dyn Error>> {
        let pid = self.lenders[VICTIM].pid();
        match trouble {
            Trouble::Kill => Ok(signal::send(pid, signal::SIGKILL)?),
            Trouble::Stop => Ok(signal::send(pid, signal::SIGSTOP)?),
            Trouble::Cut => network("down"),
        }
    }

    /// The run is over: so is the trouble.
    pub fn end(self, trouble: Option<Trouble>) {
        if trouble == Some(Trouble::Cut) {
            let _ = network("up");
        }
    }
}

/// The loopback device of this network.
///
/// # Errors
/// When ip(8) is not there, or refuses.
pub fn network(state: &str) -> Result<(), Box<dyn Error>> {
    let output = Command::new("ip").args(["link", "set", "lo", state]).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip link set lo {state}: {}", String::from_utf8_lossy(&output.stderr)).into()),
    }
}
