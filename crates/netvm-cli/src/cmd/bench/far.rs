//! The far memory of `netvm bench fault`: a worker and its lenders, each a process.

use std::error::Error;
use std::time::Duration;

use netvm::lender::LinkChoice;
use netvm::pager::{Erasure, FaultPath};

use super::child::Helper;
use super::fault::Placement;

/// What holds for all that is measured.
#[derive(Clone, Copy, Debug)]
pub struct Far {
    pub size_bytes: u64,
    pub replicas: u8,
    pub erasure: Option<Erasure>,
    pub encrypt_pages: bool,
    pub threads: u8,
    pub fault_path: FaultPath,
    /// Time of one repetition of one case.
    pub case: Duration,
}

/// Those that run.
pub struct Started {
    // The worker goes first: it borrows from the lenders.
    pub worker: Helper,
    _lenders: Vec<Helper>,
}

pub fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn pinned(name: &str, cpu: Option<usize>) -> Vec<String> {
    cpu.map_or_else(Vec::new, |cpu| vec![format!("--{name}"), cpu.to_string()])
}

/// The other side of the floors, where the lender is, and its address.
///
/// # Errors
/// When it does not start.
pub fn echo(placement: Placement) -> Result<(Helper, String), Box<dyn Error>> {
    let mut command = words("bench echo");
    command.extend(pinned("cpu", placement.lender));
    command.extend(placement.spin.then(|| "--spin".to_owned()));
    let mut echo = Helper::start(&command, false)?;
    let address = echo.line()?;
    Ok((echo, address))
}

impl Far {
    /// Starts a worker with `more` arguments, and fills its memory. `private`: its lender goes where it goes, if it has only that.
    ///
    /// # Errors
    /// When one of them does not start.
    pub fn start(
        &self,
        placement: Placement,
        local_bytes: u64,
        private: bool,
        more: &str,
    ) -> Result<Started, Box<dyn Error>> {
        let lent = self.size_bytes.next_multiple_of(16 << 20) + (64 << 20);
        let mut command = words(&format!("lend --private --listen 127.0.0.1:0 --size {lent}"));
        let by_kernel = placement.link == LinkChoice::Datagrams;
        command.extend(words(if by_kernel { "--kernel-reads auto" } else { "--kernel-reads off" }));
        command.extend(pinned("cpu", placement.lender));
        if placement.spin {
            command.extend(words("--spin-us 1000"));
        }
        let (mut lenders, mut addresses) = (Vec::new(), Vec::new());
        for _ in 0..self.erasure.map_or(self.replicas.into(), Erasure::lenders) {
            let mut lender = Helper::start(&command, false)?;
            addresses.push(lender.line()?.rsplit(' ').next().unwrap_or_default().to_owned());
            lenders.push(lender);
        }
        let mut command = self.worker_command(placement, local_bytes, &addresses);
        command.extend(words(more));
        if let ([lender], true) = (&lenders[..], private) {
            command.extend(words(&format!("--private-lender {}", lender.pid())));
        }
        let mut worker = Helper::start(&command, false)?;
        worker.ask("fill")?;
        Ok(Started { worker, _lenders: lenders })
    }

    fn worker_command(&self, placement: Placement, local_bytes: u64, lenders: &[String]) -> Vec<String> {
        let mut command = words("bench worker");
        command.extend(lenders.iter().flat_map(|lender| ["--lender".to_owned(), lender.clone()]));
        command.extend(words(&format!(
            "--replicas {} --local-bytes {local_bytes} --size-bytes {} --case-ms {} --threads {} --fault-path {}",
            self.replicas,
            self.size_bytes,
            self.case.as_millis(),
            self.threads,
            self.fault_path
        )));
        command.extend(pinned("cpu", placement.program));
        command.extend(pinned("pager-cpu", placement.pager));
        command.extend(words(match placement.link {
            LinkChoice::Shm => "--link shm",
            LinkChoice::Datagrams => "--link datagrams",
            LinkChoice::Socket | LinkChoice::Auto => "--link socket",
        }));
        if let Some(erasure) = self.erasure {
            command.extend(words(&format!("--erasure {erasure}")));
        }
        command.extend(self.encrypt_pages.then(|| "--encrypt-pages".to_owned()));
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_was_asked_for_reaches_the_worker() {
        let placement = Placement {
            name: "here",
            program: Some(1),
            pager: None,
            lender: None,
            spin: false,
            link: LinkChoice::Shm,
        };
        let far = Far {
            size_bytes: 1 << 20,
            replicas: 2,
            erasure: None,
            encrypt_pages: true,
            threads: 4,
            fault_path: FaultPath::InThread,
            case: Duration::from_millis(150),
        };
        let lenders = ["a:1".to_owned(), "b:2".to_owned()];
        let said = far.worker_command(placement, 4096, &lenders).join(" ");
        let expected = "bench worker --lender a:1 --lender b:2 --replicas 2 --local-bytes 4096 --size-bytes 1048576 \
                        --case-ms 150 --threads 4 --fault-path in-thread --cpu 1 --link shm --encrypt-pages";
        assert_eq!(said, expected);
        let far = Far { replicas: 1, erasure: Some("2+1".parse().unwrap()), encrypt_pages: false, ..far };
        assert!(
            far.worker_command(placement, 4096, &lenders).join(" ").ends_with("--link shm --erasure 2+1")
        );
    }
}
